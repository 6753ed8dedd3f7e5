// The named masks, by hand.
#include <gtest/gtest.h>

#include "expr/evaluate.hpp"
#include "flashjit/programs.hpp"

namespace flashjit {
namespace {

bool attends(const MaskProgram& mask, std::int32_t q, std::int32_t kv, std::int32_t seqlen_q,
             std::int32_t seqlen_kv) {
  if (mask.empty()) return true;
  expr::Evaluation evaluation({}, expr::Floats::rounded);
  const int root = evaluation.add(mask.tree());
  return evaluation.run({.q = q, .kv = kv, .seqlen_q = seqlen_q, .seqlen_kv = seqlen_kv})[root].integer;
}

TEST(Causal, DefinitionByHand) {
  const MaskProgram bottom_right = causal(), top_left = causal(CausalAlignment::top_left);
  // Two queries, four keys: the last query sees all keys, or only the first two.
  EXPECT_TRUE(attends(bottom_right, 1, 3, 2, 4));
  EXPECT_TRUE(attends(bottom_right, 0, 2, 2, 4));
  EXPECT_FALSE(attends(bottom_right, 0, 3, 2, 4));
  EXPECT_TRUE(attends(top_left, 1, 1, 2, 4));
  EXPECT_FALSE(attends(top_left, 1, 2, 2, 4));
  // Four queries, two keys: the first two queries see nothing.
  EXPECT_FALSE(attends(bottom_right, 1, 0, 4, 2));
  EXPECT_TRUE(attends(bottom_right, 2, 0, 4, 2));
  EXPECT_TRUE(attends(bottom_right, 3, 1, 4, 2));
  EXPECT_TRUE(attends(top_left, 0, 0, 4, 2));
  EXPECT_TRUE(attends({}, 0, 3, 1, 4));
}

TEST(Causal, DefinitionDoesNotOverflow) {
  const std::int32_t n = 2147483647;
  EXPECT_TRUE(attends(causal(), n - 1, n - 1, n, n));
  EXPECT_FALSE(attends(causal(), 0, n - 1, n, n));
  EXPECT_TRUE(attends(causal(), 0, n - 1, 1, n));
}

}  // namespace
}  // namespace flashjit

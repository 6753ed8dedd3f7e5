// Named masks, and what is accepted.
#include <gtest/gtest.h>

#include "expr/programs.hpp"

namespace flashjit {
namespace {

TEST(Causal, DefinitionByHand) {
  const MaskProgram bottom_right = causal(), top_left = causal(CausalAlignment::top_left);
  // Two queries, four keys: the last query sees all keys, or only the first two.
  EXPECT_TRUE(expr::attends(bottom_right, 1, 3, 2, 4));
  EXPECT_TRUE(expr::attends(bottom_right, 0, 2, 2, 4));
  EXPECT_FALSE(expr::attends(bottom_right, 0, 3, 2, 4));
  EXPECT_TRUE(expr::attends(top_left, 1, 1, 2, 4));
  EXPECT_FALSE(expr::attends(top_left, 1, 2, 2, 4));
  // Four queries, two keys: the first two queries see nothing.
  EXPECT_FALSE(expr::attends(bottom_right, 1, 0, 4, 2));
  EXPECT_TRUE(expr::attends(bottom_right, 2, 0, 4, 2));
  EXPECT_TRUE(expr::attends(bottom_right, 3, 1, 4, 2));
  EXPECT_TRUE(expr::attends(top_left, 0, 0, 4, 2));
  EXPECT_TRUE(expr::attends({}, 0, 3, 1, 4));
}

TEST(Causal, DefinitionDoesNotOverflow) {
  const std::int64_t n = 2147483647;
  EXPECT_TRUE(expr::attends(causal(), n - 1, n - 1, n, n));
  EXPECT_FALSE(expr::attends(causal(), 0, n - 1, n, n));
  EXPECT_TRUE(expr::attends(causal(), 0, n - 1, 1, n));
}

TEST(Programs, KnownOnesAreAccepted) {
  EXPECT_TRUE(expr::check(MaskProgram()));
  EXPECT_TRUE(expr::check(causal()));
  EXPECT_TRUE(expr::check(causal(CausalAlignment::top_left)));
  EXPECT_TRUE(expr::check(ScoreProgram()));
}

}  // namespace
}  // namespace flashjit

// Masks: the arithmetic that kernels run (templates/common/causal.cuh) against the definition, for every
// small shape and tile.
#include <gtest/gtest.h>

#include <algorithm>

#include "expr/programs.hpp"
#include "templates/common/causal.cuh"

namespace flashjit {
namespace {

constexpr int kLongest = 9;
constexpr int kBeyond = 3;  // tiles may reach past the end of the tensors

struct CausalCase {
  CausalAlignment alignment;
  int seqlen_q, seqlen_kv;

  int shift() const { return alignment == CausalAlignment::bottom_right ? seqlen_kv - seqlen_q : 0; }
  bool attends(int q, int kv) const { return expr::attends(causal(alignment), q, kv, seqlen_q, seqlen_kv); }
};

template <class Check>
void for_all_cases(Check check) {
  for (const auto alignment : {CausalAlignment::bottom_right, CausalAlignment::top_left}) {
    for (int sq = 0; sq <= kLongest; ++sq) {
      for (int skv = 0; skv <= kLongest; ++skv) check(CausalCase{alignment, sq, skv});
    }
  }
}

/// How many pairs of [q0, q1) x [kv0, kv1) attend.
int count(const CausalCase& c, int q0, int q1, int kv0, int kv1) {
  int attending = 0;
  for (int q = q0; q < q1; ++q) {
    for (int kv = kv0; kv < kv1; ++kv) attending += c.attends(q, kv);
  }
  return attending;
}

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

TEST(Causal, PairsAreThoseOfTheDefinition) {
  for_all_cases([](const CausalCase& c) {
    for (int q = 0; q < c.seqlen_q + kBeyond; ++q) {
      for (int kv = 0; kv < c.seqlen_kv + kBeyond; ++kv) {
        ASSERT_EQ(causal_attends(q, kv, c.shift()), c.attends(q, kv));
      }
    }
  });
}

TEST(Causal, TilesAreClassifiedExactly) {
  for_all_cases([](const CausalCase& c) {
    for (int q0 = 0; q0 < c.seqlen_q + kBeyond; ++q0) {
      for (int q1 = q0 + 1; q1 <= c.seqlen_q + kBeyond; ++q1) {
        for (int kv0 = 0; kv0 < c.seqlen_kv + kBeyond; ++kv0) {
          for (int kv1 = kv0 + 1; kv1 <= c.seqlen_kv + kBeyond; ++kv1) {
            const int attending = count(c, q0, q1, kv0, kv1);
            ASSERT_EQ(causal_tile_is_empty(q1, kv0, c.shift()), attending == 0);
            ASSERT_EQ(causal_tile_is_full(q0, kv1, c.shift()), attending == (q1 - q0) * (kv1 - kv0));
          }
        }
      }
    }
  });
}

TEST(Causal, KeyBoundsAreExact) {
  for_all_cases([](const CausalCase& c) {
    for (int q0 = 0; q0 < c.seqlen_q; ++q0) {
      for (int q1 = q0 + 1; q1 <= c.seqlen_q + kBeyond; ++q1) {
        int end = 0;
        for (int kv = 0; kv < c.seqlen_kv; ++kv) {
          if (count(c, q0, std::min(q1, c.seqlen_q), kv, kv + 1) > 0) end = kv + 1;
        }
        ASSERT_EQ(causal_kv_end(q1, c.shift(), c.seqlen_q, c.seqlen_kv), end);
      }
    }
  });
}

TEST(Causal, QueryBoundsAreExact) {
  for_all_cases([](const CausalCase& c) {
    for (int kv0 = 0; kv0 < c.seqlen_kv + kBeyond; ++kv0) {
      int begin = c.seqlen_q;
      for (int q = c.seqlen_q - 1; q >= 0; --q) {
        if (count(c, q, q + 1, kv0, c.seqlen_kv) > 0) begin = q;
      }
      const int got = causal_q_begin(kv0, c.shift(), c.seqlen_q, c.seqlen_kv);
      if (kv0 < c.seqlen_kv) {
        ASSERT_EQ(got, begin);
      }
      ASSERT_GE(got, 0);
      ASSERT_LE(got, c.seqlen_q);
    }
  });
}

TEST(Causal, BoundsHoldAtTheLongestLengths) {
  const int n = 2147483647 - 1023;
  EXPECT_EQ(causal_kv_end(n + 255, 0, n, n), n);
  EXPECT_EQ(causal_kv_end(1, 1 - n, n, 1), 0);
  EXPECT_EQ(causal_kv_end(256, n - 1, 1, n), n);
  EXPECT_EQ(causal_q_begin(0, 1 - n, n, 1), n - 1);
  EXPECT_EQ(causal_q_begin(n + 255, 0, n, n), n);
  EXPECT_EQ(causal_q_begin(n - 1, n - 1, 1, n), 0);
  EXPECT_TRUE(causal_tile_is_full(0, n, n - 1));
  EXPECT_TRUE(causal_tile_is_empty(255, 256, 0));
  EXPECT_FALSE(causal_tile_is_empty(n + 255, n - 1, 0));
}

TEST(Programs, KnownOnesAreAccepted) {
  EXPECT_TRUE(expr::check(MaskProgram()));
  EXPECT_TRUE(expr::check(causal()));
  EXPECT_TRUE(expr::check(causal(CausalAlignment::top_left)));
  EXPECT_TRUE(expr::check(ScoreProgram()));
}

TEST(Programs, HooksAreTheSixOfTheContract) {
  for (const MaskProgram& mask : {MaskProgram(), causal(), causal(CausalAlignment::top_left)}) {
    const std::string hooks = expr::emit_hooks({}, mask);
    for (const char* name : {" float score(", " float score_grad(", " bool mask(", " classify_tile(",
                             " flashjit::Range kv_bounds(", "flashjit::Range q_bounds("}) {
      const std::size_t at = hooks.find(name);
      ASSERT_NE(at, std::string::npos) << name << " is missing in\n" << hooks;
      EXPECT_EQ(hooks.find(name, at + 1), std::string::npos) << name << " is there twice in\n" << hooks;
    }
    EXPECT_EQ(std::count(hooks.begin(), hooks.end(), '{'), std::count(hooks.begin(), hooks.end(), '}'));
    EXPECT_EQ(hooks.find('$'), std::string::npos);
  }
}

TEST(Programs, HooksDifferByWhereTheDiagonalEnds) {
  const std::string shift = "p.seqlen_kv - p.seqlen_q";
  EXPECT_NE(expr::emit_hooks({}, causal()).find(shift), std::string::npos);
  EXPECT_EQ(expr::emit_hooks({}, causal(CausalAlignment::top_left)).find(shift), std::string::npos);
  EXPECT_EQ(expr::emit_hooks({}, {}).find("causal"), std::string::npos);
}

}  // namespace
}  // namespace flashjit

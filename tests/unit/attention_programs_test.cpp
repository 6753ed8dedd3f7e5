// The ready-made programs against their definitions, written out by hand.
#include "flashjit/attention_programs.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>

#include "expr/evaluate.hpp"
#include "flashjit/spec.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit {
namespace {

using expr::Bound;
using expr::Expr;
using expr::Point;

constexpr int kBatch = 2, kHeads = 3, kQueries = 9, kKeys = 12, kShift = kKeys - kQueries;

struct Captured {
  std::string name;
  std::vector<std::int64_t> size;
  std::vector<double> values;
};

/// Calls check(point, value) for every pair.
void for_all_pairs(const Expr& program, const std::vector<Captured>& captured,
                   const std::function<void(const Point&, const expr::Value&)>& check) {
  std::vector<Bound> bound;
  for (const Captured& c : captured) bound.push_back({c.name, c.size, c.values});
  expr::Evaluation evaluation(bound, expr::Floats::exact);
  const int place = evaluation.add(program.pointer());
  Point point{.seqlen_q = kQueries, .seqlen_kv = kKeys, .score = 0.75};
  for (point.b = 0; point.b < kBatch; ++point.b) {
    for (point.h = 0; point.h < kHeads; ++point.h) {
      for (point.q = 0; point.q < kQueries; ++point.q) {
        for (point.kv = 0; point.kv < kKeys; ++point.kv) check(point, evaluation.run(point)[place]);
      }
    }
  }
}

void expect_mask(const Expr& mask, const std::function<bool(const Point&)>& attends,
                 const std::vector<Captured>& captured = {}) {
  for_all_pairs(mask, captured, [&](const Point& p, const expr::Value& value) {
    EXPECT_EQ(value.integer != 0, attends(p)) << to_string(mask) << " at q " << p.q << ", kv " << p.kv;
  });
  EXPECT_EQ(MaskProgram(mask), MaskProgram(to_string(mask)));
}

void expect_score(const Expr& score, const std::function<double(const Point&)>& expected,
                  const std::vector<Captured>& captured = {}) {
  for_all_pairs(score, captured, [&](const Point& p, const expr::Value& value) {
    EXPECT_NEAR(value.real, expected(p), 1e-6) << to_string(score) << " at q " << p.q << ", kv " << p.kv;
  });
  EXPECT_EQ(ScoreProgram(score), ScoreProgram(to_string(score)));
}

std::string refusal(const std::function<void()>& action) {
  return failure(ErrorCode::invalid_argument, action);
}

TEST(AttentionPrograms, Causal) {
  EXPECT_EQ(MaskProgram(programs::causal_mask()), causal());
  EXPECT_EQ(MaskProgram(programs::causal_mask(CausalAlignment::top_left)), causal(CausalAlignment::top_left));
  expect_mask(programs::causal_mask(), [](const Point& p) { return p.kv <= p.q + kShift; });
}

TEST(AttentionPrograms, SlidingWindow) {
  for (int left = -1; left < 5; ++left) {
    for (int right = -1; right < 5; ++right) {
      expect_mask(programs::sliding_window(left, right), [&](const Point& p) {
        const int position = p.q + kShift;
        return (left < 0 || p.kv >= position - left) && (right < 0 || p.kv <= position + right);
      });
    }
  }
  EXPECT_EQ(MaskProgram(programs::sliding_window(-1, 0)), causal());
  EXPECT_TRUE(MaskProgram(programs::sliding_window(-1, -1)).empty());
  expect_in("left is -2; it must be from -1", refusal([] { programs::sliding_window(-2, 0); }));
}

TEST(AttentionPrograms, PrefixLm) {
  const Captured prefix{"prefix", {kBatch}, {2, 7}};
  expect_mask(programs::prefix_lm(),
              [&](const Point& p) { return p.kv <= p.q + kShift || p.kv < prefix.values[p.b]; }, {prefix});
}

TEST(AttentionPrograms, Documents) {
  Captured one{"documents", {kKeys}, {}}, q_ids{"of_q", {kBatch, kQueries}, {}},
      kv_ids{"of_kv", {kBatch, kKeys}, {}};
  for (int i = 0; i < kKeys; ++i) one.values.push_back(i / 4);
  for (int i = 0; i < kBatch * kQueries; ++i) q_ids.values.push_back(i / 5);
  for (int i = 0; i < kBatch * kKeys; ++i) kv_ids.values.push_back(i / 7);
  expect_mask(programs::documents(1), [](const Point& p) { return p.q / 4 == p.kv / 4; }, {one});
  expect_mask(programs::documents(2, "of_q", "of_kv"),
              [](const Point& p) { return (p.b * kQueries + p.q) / 5 == (p.b * kKeys + p.kv) / 7; },
              {q_ids, kv_ids});
  expect_in("the rank of documents' ids is 3", refusal([] { programs::documents(3); }));
}

TEST(AttentionPrograms, DilatedAndStrided) {
  expect_mask(programs::dilated(3), [](const Point& p) { return (p.q + kShift - p.kv) % 3 == 0; });
  expect_mask(programs::strided(2, 4), [](const Point& p) {
    const int distance = p.q + kShift - p.kv;
    return distance >= 0 && (distance < 2 || distance % 4 == 0);
  });
  expect_in("stride is 0; it must be from 1", refusal([] { programs::dilated(0); }));
  expect_in("local is 0", refusal([] { programs::strided(0, 4); }));
}

TEST(AttentionPrograms, Neighborhood) {
  expect_mask(programs::neighborhood_2d(4, 1), [](const Point& p) {
    return std::abs(p.q / 4 - p.kv / 4) <= 1 && std::abs(p.q % 4 - p.kv % 4) <= 1;
  });
  expect_in("width is 0", refusal([] { programs::neighborhood_2d(0, 1); }));
}

TEST(AttentionPrograms, Chunked) {
  expect_mask(programs::chunked(4),
              [](const Point& p) { return p.kv <= p.q + kShift && p.kv / 4 == (p.q + kShift) / 4; });
  expect_in("size is 0", refusal([] { programs::chunked(0); }));
}

TEST(AttentionPrograms, OfServing) {
  Captured first{"mm_first", {kBatch, kQueries}, {}}, last{"mm_last", {kBatch, kQueries}, {}},
      bits{"ancestors", {kBatch, kQueries}, {}}, at{"q_positions", {kBatch, kQueries}, {}},
      of_keys{"kv_positions", {kBatch, kKeys}, {}};
  for (int i = 0; i < kBatch * kQueries; ++i) {
    first.values.push_back(i % 7);
    last.values.push_back(i % 5 + 5);
    bits.values.push_back(static_cast<double>(i * 37 % 512));
    at.values.push_back(i * 5 % 30);
  }
  for (int i = 0; i < kBatch * kKeys; ++i) of_keys.values.push_back(i * 7 % 30);
  const auto of_query = [](const Captured& c, const Point& p) {
    return static_cast<int>(c.values[p.b * kQueries + p.q]);
  };
  expect_mask(programs::mm_prefix(),
              [&](const Point& p) {
                return p.kv <= p.q + kShift || (of_query(first, p) <= p.kv && p.kv < of_query(last, p));
              },
              {first, last});
  expect_mask(
      programs::tree(),
      [&](const Point& p) { return p.kv < kShift || (of_query(bits, p) >> (p.kv - kShift) & 1) == 1; },
      {bits});
  expect_mask(programs::positions(),
              [&](const Point& p) { return of_keys.values[p.b * kKeys + p.kv] <= of_query(at, p); },
              {at, of_keys});
  expect_mask(programs::interleaved(), [&](const Point& p) { return p.kv * 3 + 2 <= of_query(at, p); },
              {at, {"ranks", {}, {3}}, {"rank", {}, {2}}});
  expect_mask(programs::causal_if(), [](const Point& p) { return p.b == 1 || p.kv <= p.q + kShift; },
              {{"causal_flags", {kBatch}, {1, 0}}});
}

TEST(AttentionPrograms, Alibi) {
  const Captured slopes{"slopes", {kHeads}, {0.5, 0.25, 0.125}};
  expect_score(programs::alibi(),
               [&](const Point& p) { return 0.75 - slopes.values[p.h] * std::abs(p.q + kShift - p.kv); },
               {slopes});
}

TEST(AttentionPrograms, AlibiSlopes) {
  EXPECT_EQ(programs::alibi_slopes(8),
            (std::vector<float>{0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625}));
  // Those of 4 heads, then the first and the third of 8.
  EXPECT_EQ(programs::alibi_slopes(6), (std::vector<float>{0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125}));
  EXPECT_EQ(programs::alibi_slopes(1), std::vector<float>{0.00390625});
  EXPECT_TRUE(programs::alibi_slopes(0).empty());
}

TEST(AttentionPrograms, Softcap) {
  EXPECT_EQ(to_string(programs::softcap(50)), "50.0 * tanh(score / 50.0)");
  expect_score(programs::softcap(2), [](const Point&) { return 2 * std::tanh(0.375); });
  expect_in("cap is 0", refusal([] { programs::softcap(0); }));
  expect_in("cap is nan", refusal([] { programs::softcap(NAN); }));
}

TEST(AttentionPrograms, DenseBias) {
  Captured bias{"bias", {kHeads, kQueries, kKeys}, {}};
  for (int i = 0; i < kHeads * kQueries * kKeys; ++i) bias.values.push_back(i / 8.0);
  const Expr program = programs::dense_bias(ElementType::bf16, {expr::h, expr::q, expr::kv}, true);
  EXPECT_EQ(to_string(program), "bias: bf16 3d grad; score + bias[h, q, kv]");
  expect_score(program, [](const Point& p) { return 0.75 + ((p.h * kQueries + p.q) * kKeys + p.kv) / 8.0; },
               {bias});
  expect_in("the index score", refusal([] { programs::dense_bias(ElementType::fp32, {expr::score}); }));
  expect_in("the index q;", refusal([] { programs::dense_bias(ElementType::fp32, {expr::q, expr::q}); }));
  expect_in("1 to 6", refusal([] { programs::dense_bias(ElementType::fp32, {}); }));
}

/// The bucket as T5's code computes it; `relative` is the key's position less the query's.
int t5_bucket(int relative, bool bidirectional, int buckets, int max_distance) {
  int bucket = 0;
  if (bidirectional) {
    buckets /= 2;
    bucket = relative > 0 ? buckets : 0;
    relative = std::abs(relative);
  } else {
    relative = -std::min(relative, 0);
  }
  const int exact = buckets / 2;
  if (relative < exact) return bucket + relative;
  const float share = std::log(static_cast<float>(relative) / static_cast<float>(exact)) /
                      static_cast<float>(std::log(static_cast<double>(max_distance) / exact));
  return bucket +
         std::min(exact + static_cast<int>(share * static_cast<float>(buckets - exact)), buckets - 1);
}

TEST(AttentionPrograms, RelativeBias) {
  const std::array options{
      programs::RelativeBias{}, programs::RelativeBias{.bidirectional = false},
      programs::RelativeBias{.num_buckets = 8, .max_distance = 6, .wants_grad = true},
      programs::RelativeBias{.bidirectional = false, .num_buckets = 2, .max_distance = 2},
      programs::RelativeBias{.num_buckets = 256, .max_distance = 512}};
  for (const programs::RelativeBias& o : options) {
    Captured table{"table", {o.num_buckets, kHeads}, {}};
    for (int i = 0; i < o.num_buckets * kHeads; ++i) table.values.push_back(i);
    const Expr program = programs::relative_bias(o);
    expect_score(program,
                 [&](const Point& p) {
                   const int relative = p.kv - (p.q + kShift);
                   return 0.75 +
                          t5_bucket(relative, o.bidirectional, o.num_buckets, o.max_distance) * kHeads + p.h;
                 },
                 {table});
    // Every distance, beyond the largest.
    const std::vector<Bound> bound = {{table.name, table.size, table.values}};
    expr::Evaluation evaluation(bound, expr::Floats::exact);
    const int place = evaluation.add(program.pointer());
    for (int relative = -1500; relative <= 1500; ++relative) {
      const Point p{.q = 2000, .kv = 2000 + relative, .seqlen_q = 4000, .seqlen_kv = 4000};
      ASSERT_EQ(evaluation.run(p)[place].real,
                t5_bucket(relative, o.bidirectional, o.num_buckets, o.max_distance) * kHeads)
          << relative;
    }
  }
  expect_in("num_buckets is 3; it must be even and from 4 to 256",
            refusal([] { programs::relative_bias({.num_buckets = 3}); }));
  expect_in("max_distance is 8; it must be from 9",
            refusal([] { programs::relative_bias({.max_distance = 8}); }));
}

TEST(AttentionPrograms, Combine) {
  AttentionSpec spec{.head_dim = 64};
  spec.score = programs::alibi();
  spec.mask = programs::causal_mask() && programs::documents(1);
  EXPECT_EQ(
      to_string(spec),
      "bf16:d64:score{slopes: fp32 1d; score - slopes[h] * abs(to_float(q + seqlen_kv - seqlen_q - kv))}:"
      "mask{documents: int32 1d; kv <= q + seqlen_kv - seqlen_q && documents[q] == documents[kv]}");
}

}  // namespace
}  // namespace flashjit

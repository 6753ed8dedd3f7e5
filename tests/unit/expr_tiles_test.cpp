// Classes of tiles and bounds against all pairs: intervals, named masks, and random masks.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "expr/key_bounds.hpp"
#include "tests/support/host_tiles.hpp"
#include "tests/support/random_program.hpp"
#include "tests/support/tame_program.hpp"

namespace flashjit::expr {
namespace {

using test::bounds_of;
using test::Given;
using test::HostTiles;
using test::tame_captures;
using test::TameProgram;

// --- intervals -------------------------------------------------------------------------------------------

constexpr long long kMin = INT32_MIN, kMax = INT32_MAX;

Interval random_interval(std::mt19937& random) {
  constexpr long long kCentres[] = {0, 0, 0, 40, -40, kMin, kMax, 1 << 20};
  const long long centre = kCentres[random() % 8];
  const long long low = centre + static_cast<int>(random() % 13) - 6;
  const long long high = low + static_cast<int>(random() % 9);
  return {std::clamp(low, kMin, kMax), std::clamp(high, kMin, kMax)};
}

struct IntOperation {
  const char* name;
  Interval (*of_intervals)(Interval, Interval);
  int (*of_ints)(int, int);
};

const IntOperation kIntOperations[] = {
    {"+", [](Interval a, Interval b) { return a + b; }, wrap_add},
    {"-", [](Interval a, Interval b) { return a - b; }, wrap_subtract},
    {"*", [](Interval a, Interval b) { return a * b; }, wrap_multiply},
    {"/", [](Interval a, Interval b) { return a / b; }, wrap_divide},
    {"%", [](Interval a, Interval b) { return a % b; }, wrap_modulo},
    {"<<", [](Interval a, Interval b) { return a << b; }, wrap_shift_left},
    {">>", [](Interval a, Interval b) { return a >> b; }, wrap_shift_right},
    {"&", [](Interval a, Interval b) { return a & b; }, [](int a, int b) { return a & b; }},
    {"|", [](Interval a, Interval b) { return a | b; }, [](int a, int b) { return a | b; }},
    {"^", [](Interval a, Interval b) { return a ^ b; }, [](int a, int b) { return a ^ b; }},
    {"min", [](Interval a, Interval b) { return min(a, b); }, [](int a, int b) { return std::min(a, b); }},
    {"max", [](Interval a, Interval b) { return max(a, b); }, [](int a, int b) { return std::max(a, b); }},
    {"negate", [](Interval a, Interval) { return -a; }, [](int a, int) { return wrap_negate(a); }},
    {"~", [](Interval a, Interval) { return ~a; }, [](int a, int) { return ~a; }},
    {"abs", [](Interval a, Interval) { return abs(a); }, [](int a, int) { return wrap_abs(a); }},
};

TEST(Intervals, HoldEveryResult) {
  std::mt19937 random(1);
  for (const IntOperation& operation : kIntOperations) {
    SCOPED_TRACE(operation.name);
    for (int i = 0; i < 4000; ++i) {
      const Interval a = random_interval(random), b = random_interval(random);
      const Interval result = operation.of_intervals(a, b);
      ASSERT_TRUE(result.low <= result.high && fits(result));
      for (long long x = a.low; x <= a.high; ++x)
        for (long long y = b.low; y <= b.high; ++y)
          ASSERT_TRUE(result.contains(operation.of_ints(static_cast<int>(x), static_cast<int>(y))))
              << x << " " << y << " in [" << result.low << ", " << result.high << "]";
    }
  }
}

struct Relating {
  Truth (*of_intervals)(Interval, Interval);
  bool (*of_ints)(long long, long long);
};
const Relating kRelations[] = {
    {[](Interval a, Interval b) { return a < b; }, [](long long a, long long b) { return a < b; }},
    {[](Interval a, Interval b) { return a <= b; }, [](long long a, long long b) { return a <= b; }},
    {[](Interval a, Interval b) { return a > b; }, [](long long a, long long b) { return a > b; }},
    {[](Interval a, Interval b) { return a >= b; }, [](long long a, long long b) { return a >= b; }},
    {[](Interval a, Interval b) { return a == b; }, [](long long a, long long b) { return a == b; }},
    {[](Interval a, Interval b) { return a != b; }, [](long long a, long long b) { return a != b; }},
};

TEST(Intervals, ComparisonsAreExact) {
  std::mt19937 random(2);
  for (const Relating& relation : kRelations) {
    for (int i = 0; i < 2000; ++i) {
      const Interval a = random_interval(random), b = random_interval(random);
      Truth expected = {false, false};
      for (long long x = a.low; x <= a.high; ++x)
        for (long long y = b.low; y <= b.high; ++y)
          (relation.of_ints(x, y) ? expected.can_be_true : expected.can_be_false) = true;
      const Truth got = relation.of_intervals(a, b);
      ASSERT_EQ(got.can_be_true, expected.can_be_true);
      ASSERT_EQ(got.can_be_false, expected.can_be_false);
    }
  }
}

TEST(Intervals, QuotientsRoundDownAndUp) {
  for (long long a = -20; a <= 20; ++a) {
    for (long long b = 1; b <= 7; ++b) {
      const long long down = floor_divide(a, b), up = ceil_divide(a, b);
      EXPECT_TRUE(down * b <= a && a < (down + 1) * b) << a << " " << b;
      EXPECT_TRUE(up * b >= a && a > (up - 1) * b) << a << " " << b;
    }
  }
}

// --- masks -----------------------------------------------------------------------------------------------

/// Lengths and tiles to check a mask with, against every pair.
struct Checked {
  int exact = 0, tiles = 0;  ///< tiles whose class is the best there is
  int told_by_bounds = 0;    ///< shapes of a mask that is its bounds
};

using Attends = std::vector<std::vector<bool>>;

bool in(Range range, int at) { return range.begin <= at && at < range.end; }

/// That the pairs of a mask that is its bounds are those within the bounds of each row, and of each column.
void check_is_bounds(const HostTiles& mask, const Point& head, const Attends& attends) {
  for (int row = 0; row < head.seqlen_q; ++row) {
    const Range keys = mask.kv_bounds(head, {row, row + 1});
    for (int column = 0; column < head.seqlen_kv; ++column) {
      ASSERT_EQ(in(keys, column), attends[row][column]) << column << " of query " << row;
      ASSERT_EQ(in(mask.q_bounds(head, {column, column + 1}), row), attends[row][column])
          << row << " of key " << column;
    }
  }
}

void check_tiles(const HostTiles& mask, Point head, std::mt19937& random, int count, Checked& checked) {
  const int sq = head.seqlen_q, skv = head.seqlen_kv;
  Attends attends(sq, std::vector<bool>(skv));
  for (head.q = 0; head.q < sq; ++head.q)
    for (head.kv = 0; head.kv < skv; ++head.kv) attends[head.q][head.kv] = mask.attends(head);
  head.q = head.kv = 0;
  if (mask.analysis().bounds() > 0) {
    ASSERT_NO_FATAL_FAILURE(check_is_bounds(mask, head, attends));
    ++checked.told_by_bounds;
  }
  const auto range = [&](int length) {
    const int begin = static_cast<int>(random() % static_cast<unsigned>(length));
    return Range{begin, begin + 1 + static_cast<int>(random() % static_cast<unsigned>(length - begin))};
  };
  for (int i = 0; i < count; ++i) {
    const Range q = range(sq), kv = range(skv);
    bool any = false, all = true;
    for (int row = q.begin; row < q.end; ++row)
      for (int column = kv.begin; column < kv.end; ++column)
        (attends[row][column] ? any : all) = attends[row][column];
    const TileClass best = all ? TileClass::full : any ? TileClass::partial : TileClass::empty;
    const TileClass got = mask.classify(head, q, kv);
    ++checked.tiles;
    checked.exact += got == best;
    if (got != TileClass::partial) {
      ASSERT_EQ(got, best) << q.begin << "-" << q.end << " " << kv.begin << "-" << kv.end;
    }
    if (mask.analysis().bounds() > 0) {
      const Range of_all = mask.kv_bounds_of_all(head, q);
      for (int column = 0; column < skv; ++column) {
        bool by_all = true;
        for (int row = q.begin; row < q.end; ++row) by_all = by_all && attends[row][column];
        ASSERT_EQ(in(of_all, column), by_all) << column;
      }
    }
    const Range keys = mask.kv_bounds(head, q), queries = mask.q_bounds(head, kv);
    ASSERT_TRUE(0 <= keys.begin && keys.begin <= keys.end && keys.end <= skv);
    ASSERT_TRUE(0 <= queries.begin && queries.begin <= queries.end && queries.end <= sq);
    for (int row = 0; row < sq; ++row) {
      for (int column = 0; column < skv; ++column) {
        if (!attends[row][column]) continue;
        ASSERT_TRUE(!in(q, row) || in(keys, column)) << column << " of query " << row;
        ASSERT_TRUE(!in(kv, column) || in(queries, row)) << row << " of key " << column;
      }
    }
  }
}

Checked check_mask(const NodePtr& root, const std::vector<Given>& given, unsigned seed) {
  const HostTiles mask(prepared_mask(root), bounds_of(given));
  std::mt19937 random(seed);
  Checked checked;
  const int lengths[][2] = {{9, 7}, {5, 12}, {1, 6}};
  for (const auto& [sq, skv] : lengths) {
    const Point head{.b = 1, .h = 3, .h_kv = 1, .seqlen_q = sq, .seqlen_kv = skv};
    check_tiles(mask, head, random, 12, checked);
    if (testing::Test::HasFatalFailure()) break;
  }
  return checked;
}

TEST(Tiles, RandomMasksAreClassifiedSoundly) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const std::vector<Given> given = tame_captures(seed);
    const Expr mask = TameProgram(seed, given).mask();
    check_mask(mask.pointer(), given, seed);
    ASSERT_FALSE(HasFatalFailure()) << seed << ": " << to_string(mask);
  }
}

TEST(Tiles, WildMasksAreClassifiedSoundly) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::vector<Given> given;
    for (const Declaration& d : test::random_program_declarations())
      given.push_back({d, std::vector<std::int64_t>(d.rank, 5)});
    test::fill(given, seed);
    const Expr mask = test::RandomProgram(seed).mask_program();
    check_mask(mask.pointer(), given, seed);
    ASSERT_FALSE(HasFatalFailure()) << seed << ": " << to_string(mask);
  }
}

/// Conjunctions of affine comparisons, now and then with constants that wrap.
Expr affine_mask(std::mt19937& random) {
  const auto pick = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
  const auto side = [&] {
    Expr sum = pick(5) ? Expr(pick(9) - 4) : pick(2) ? Expr(INT32_MAX - pick(5)) : Expr(INT32_MIN + pick(5));
    if (pick(3)) sum = sum + (pick(4) ? Expr(q) : Expr(q) * (pick(9) - 4));
    if (pick(3)) sum = pick(2) ? sum + Expr(kv) : sum - kv * (pick(4) + 1);
    if (pick(3) == 0) sum = sum + seqlen_kv - seqlen_q;
    if (pick(4) == 0) sum = sum - scalar_int("window") * pick(4);
    return sum;
  };
  constexpr Op kOps[] = {Op::less, Op::less_equal, Op::greater, Op::greater_equal, Op::equal, Op::not_equal};
  Expr mask = apply(kOps[pick(6)], {side(), side()});
  for (int parts = pick(3); parts > 0; --parts) {
    const Expr next = apply(kOps[pick(6)], {side(), side()});
    mask = pick(3) ? mask && next : !(!mask || !next);
  }
  return pick(6) ? mask : mask && scalar_int("window") > 0;
}

TEST(Tiles, RandomMasksOfExtremeCapturesAreClassifiedSoundly) {
  for (unsigned seed = 0; seed < 4000; ++seed) {
    std::vector<Given> given = tame_captures(seed);
    std::mt19937 random(seed);
    for (Given& one : given) {
      const ElementType type = one.declaration.type;
      const double most = type == ElementType::int64 ? 0x1p63 : type == ElementType::int32 ? 2147483647 : 0;
      for (double& value : one.values)
        if (most > 0 && random() % 2) value = random() % 2 ? most : -most - (most < 0x1p63);
    }
    const Expr mask = seed % 2 ? affine_mask(random) : TameProgram(seed, given).mask();
    check_mask(mask.pointer(), given, seed);
    ASSERT_FALSE(HasFatalFailure()) << seed << ": " << to_string(mask);
  }
}

/// Comparisons of int64 sums, as of limits that are no limit, in conjunctions and disjunctions.
Expr int64_mask(std::mt19937& random) {
  const auto pick = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
  const auto side = [&] {
    const Expr positions[] = {q, kv, kv - q, q + 1, seqlen_kv};
    const Expr indices[] = {b, h, q, kv};
    const Expr limit = tensor("limits", ElementType::int64, 1)[indices[pick(4) * pick(2)]];
    const Expr position = to_int64(positions[pick(5)]);
    return pick(4) == 0 ? position : pick(4) == 0 ? limit : pick(3) ? position + limit : position - limit;
  };
  constexpr Op kOps[] = {Op::less, Op::less_equal, Op::greater, Op::greater_equal, Op::equal, Op::not_equal};
  Expr mask = apply(kOps[pick(6)], {side(), side()});
  for (int parts = pick(3); parts > 0; --parts) {
    const Expr next = apply(kOps[pick(6)], {side(), side()});
    mask = pick(3) ? mask && next : mask || next;
  }
  return mask;
}

TEST(Tiles, MasksOfExtremeInt64sAreClassifiedSoundly) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    const Expr mask = int64_mask(random);
    constexpr double kLimits[] = {0x1p63, -0x1p63, 0x1p31, -0x1p31, 0x1p62, 5, -3, 0};  // 2^63 saturates
    Given limits = test::given("limits", ElementType::int64, {5});
    for (int i = 0; i < 5; ++i) limits.values.push_back(kLimits[random() % 8]);
    check_mask(mask.pointer(), {limits}, seed);
    ASSERT_FALSE(HasFatalFailure()) << seed << ": " << to_string(mask);
    Evaluation evaluation(bounds_of({limits}), Floats::rounded);
    const int before = evaluation.add(mask.pointer()), after = evaluation.add(prepared_mask(mask.pointer()));
    for (int i = 0; i < 100; ++i) {
      const std::vector<Value> values =
          evaluation.run({.b = 1, .h = 3, .q = i % 10, .kv = i / 10, .seqlen_q = 10, .seqlen_kv = 10});
      ASSERT_EQ(values[before].integer, values[after].integer) << seed << ": " << to_string(mask);
    }
  }
}

TEST(Tiles, AffineConjunctionsHaveSoundBounds) {
  int exact = 0, tiles = 0, told_by_bounds = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    std::mt19937 random(seed);
    std::vector<Given> given = tame_captures(seed);
    const Expr mask = affine_mask(random);
    ASSERT_FALSE(HostTiles(mask.pointer(), bounds_of(given)).analysis().listed()) << to_string(mask);
    const Checked checked = check_mask(mask.pointer(), given, seed);
    ASSERT_FALSE(HasFatalFailure()) << seed << ": " << to_string(mask);
    exact += checked.exact, tiles += checked.tiles, told_by_bounds += checked.told_by_bounds;
  }
  EXPECT_GT(exact, tiles * 8 / 10);
  EXPECT_GT(told_by_bounds, 100);
}

// --- named masks -----------------------------------------------------------------------------------------

struct Verdict {
  const char* mask;
  bool listed, evaluated;
  std::size_t q_reads, kv_reads;
};

TEST(Tiles, VerdictsOnWhatPeopleWrite) {
  const Verdict verdicts[] = {
      {"kv <= q + seqlen_kv - seqlen_q", false, false, 0, 0},
      {"w: int; kv <= q && q - kv < w", false, false, 0, 0},
      {"kv <= q && kv != q && b != 1", false, false, 0, 0},
      {"!(kv > q || q - kv > 100)", false, false, 0, 0},
      {"abs(q - kv) <= 8 && !(9 < abs(kv - q))", false, false, 0, 0},
      {"w: int; w >= abs(q + seqlen_kv - seqlen_q - kv)", false, false, 0, 0},
      {"abs(q - kv) > 8", true, false, 0, 0},
      {"prefix: int32 1d; kv < prefix[b]", false, false, 0, 0},
      {"prefix: int32 1d; kv <= q || kv < prefix[b]", true, false, 0, 0},
      {"q < 4 || kv < 4 || abs(q - kv) < 8", true, false, 0, 0},
      {"doc: int32 2d; kv <= q && doc[b, q] == doc[b, kv]", true, false, 1, 1},
      {"doc: int32 2d; doc[b, q] != doc[b, kv]", true, true, 1, 1},
      {"q / 64 == kv / 64", true, false, 0, 0},
      {"q >> 6 == kv >> 6", true, false, 0, 0},
      {"q / 64 * 3 == kv % 64", true, false, 0, 1},
      {"at: int32 2d; ranks: int; rank: int; kv * ranks + rank <= at[b, q]", true, false, 1, 0},
      {"at: int32 2d; n: int; at[b, q] < n - kv / 16", true, false, 1, 0},
      {"at: int32 2d; n: int; kv * (n - kv) <= at[b, q]", true, false, 1, 1},
      {"q % 4 == 0 && kv <= q", true, false, 1, 0},
      {"(q - kv) % 4 == 0", true, true, 0, 0},
      {"any: bool 2d; any[q, kv]", true, true, 0, 0},
      {"w: fp32 1d; w[q] > 0.5 && kv <= q", true, false, 1, 0},
      {"to_float(kv) < to_float(q) * 0.5", true, true, 0, 0},
      {"doc: int32 1d; g: bool 1d; doc[q] == doc[kv] || g[q]", true, true, 2, 1},
  };
  for (const Verdict& v : verdicts) {
    Graph graph;
    const int root = graph.add(prepared_mask(parse(v.mask).pointer()));
    const MaskAnalysis mask(graph, root);
    EXPECT_EQ(mask.listed(), v.listed) << v.mask;
    EXPECT_EQ(mask.evaluate_tiles(), v.evaluated) << v.mask;
    EXPECT_EQ(mask.q_reads().size(), v.q_reads) << v.mask;
    EXPECT_EQ(mask.kv_reads().size(), v.kv_reads) << v.mask;
  }
}

TEST(Tiles, MasksThatTheirBoundsTell) {
  const auto bounds = [](const char* text) {
    Graph graph;
    const int root = graph.add(prepared_mask(parse(text).pointer()));
    return MaskAnalysis(graph, root).bounds();
  };
  for (const char* text : {"kv <= q + seqlen_kv - seqlen_q", "kv <= q", "q == kv", "kv <= q && b != 1",
                           "prefix: int32 1d; kv < prefix[b]"})
    EXPECT_EQ(bounds(text), 1u) << text;
  for (const char* text : {"w: int; kv <= q && q - kv < w", "abs(q - kv) <= 8", "!(kv > q || q - kv > 100)"})
    EXPECT_EQ(bounds(text), 2u) << text;
  // Nothing, a hole, sides that may wrap, what is listed.
  for (const char* text : {"true", "kv <= q && kv != q", "w: int; q < kv + w", "2 * kv <= q + 1",
                           "kv <= q || kv < 4", "doc: int32 1d; kv <= q && doc[q] == doc[kv]"})
    EXPECT_EQ(bounds(text), 0u) << text;
}

/// Calls check(tiles, head, q range, kv range) for small shapes and all of their tiles.
template <class Check>
void for_all_tiles(const char* text, const std::vector<Given>& given, Check check) {
  const HostTiles mask(prepared_mask(parse(text).pointer()), bounds_of(given));
  for (int sq = 1; sq <= 7; ++sq) {
    for (int skv = 1; skv <= 7; ++skv) {
      for (int q0 = 0; q0 < sq; ++q0) {
        for (int q1 = q0 + 1; q1 <= sq; ++q1)
          check(mask, Point{.seqlen_q = sq, .seqlen_kv = skv}, Range{q0, q1});
      }
    }
  }
}

/// Bounds and classes are the best there are.
void expect_exact(const char* text, const std::vector<Given>& given = {}) {
  SCOPED_TRACE(text);
  for_all_tiles(text, given, [](const HostTiles& mask, Point head, Range q) {
    int begin = head.seqlen_kv, end = 0;
    std::vector<int> met(head.seqlen_kv);
    for (head.kv = 0; head.kv < head.seqlen_kv; ++head.kv) {
      for (head.q = q.begin; head.q < q.end; ++head.q) met[head.kv] += mask.attends(head);
      if (met[head.kv] > 0) begin = std::min(begin, head.kv), end = head.kv + 1;
    }
    head.q = head.kv = 0;
    const Range got = mask.kv_bounds(head, q);
    if (end > 0) {
      ASSERT_EQ(got.begin, begin);
      ASSERT_EQ(got.end, end);
    } else {
      ASSERT_EQ(got.begin, got.end);
    }
    for (int kv0 = 0; kv0 < head.seqlen_kv; ++kv0) {
      int count = 0;
      for (int kv1 = kv0 + 1; kv1 <= head.seqlen_kv; ++kv1) {
        count += met[kv1 - 1];
        const int pairs = (q.end - q.begin) * (kv1 - kv0);
        const TileClass expected = count == pairs ? TileClass::full
                                   : count > 0    ? TileClass::partial
                                                  : TileClass::empty;
        ASSERT_EQ(mask.classify(head, q, {kv0, kv1}), expected);
      }
    }
  });
}

TEST(Tiles, CausalAndTopLeftAreExact) {
  expect_exact("kv <= q + seqlen_kv - seqlen_q");
  expect_exact("kv <= q");
  expect_exact("kv < q");
}

TEST(Tiles, OneSideIsExact) {
  const std::vector<Given> given = {test::given("w", ElementType::int32, {}, {3})};
  expect_exact("w: int; q - kv < w", given);
  expect_exact("w: int; kv < w", given);
  expect_exact("w: int; q >= w", given);
  expect_exact("q == kv");
  expect_exact("2 * kv <= q + 1");
  expect_exact("w: int; abs(q - kv) < w", given);
  expect_exact("2 >= abs(q + seqlen_kv - seqlen_q - kv)");
}

TEST(Tiles, CausalHoldsAtTheLongestLengths) {
  const HostTiles causal(parse("kv <= q + seqlen_kv - seqlen_q").pointer(), {});
  const int n = INT32_MAX - 1023;
  const auto head = [](int sq, int skv) { return Point{.seqlen_q = sq, .seqlen_kv = skv}; };
  EXPECT_EQ(causal.kv_bounds(head(n, n), {n - 255, n}).end, n);
  EXPECT_EQ(causal.kv_bounds(head(n, 1), {0, 1}).end, 0);
  EXPECT_EQ(causal.kv_bounds(head(1, n), {0, 1}).end, n);
  EXPECT_EQ(causal.q_bounds(head(n, 1), {0, 1}).begin, n - 1);
  EXPECT_EQ(causal.classify(head(n, n), {0, 256}, {256, n}), TileClass::empty);
  EXPECT_EQ(causal.classify(head(1, n), {0, 1}, {0, n}), TileClass::full);
}

/// A mask's bounds as planning knows them, compared with a kernel's.
void expect_key_bounds(const char* mask, bool all_known) {
  SCOPED_TRACE(mask);
  const HostTiles tiles(prepared_mask(parse(mask).pointer()), {});
  constexpr int kLengths[][2] = {{90, 70}, {5, 120}, {64, 64}};
  for (const auto& [sq, skv] : kLengths) {
    const KeyBounds bounds{MaskProgram(mask)};
    for (int begin = 0; begin < sq; begin += 16) {
      const Range known = bounds.of({begin, begin + 16}, sq, skv);
      const Range exact = tiles.kv_bounds(Point{.seqlen_q = sq, .seqlen_kv = skv}, {begin, begin + 16});
      EXPECT_EQ(known.begin, all_known ? exact.begin : 0) << begin;
      EXPECT_EQ(known.end, all_known ? exact.end : skv) << begin;
    }
  }
}

TEST(Tiles, PlanningKnowsBoundsOfLengthsAndConstants) {
  for (const char* mask : {"kv <= q + seqlen_kv - seqlen_q", "q >= kv && q - kv < 20", "abs(q - kv) < 7",
                           "kv > 3 && kv < 50", "q == kv", "q < 40 && kv <= q"})
    expect_key_bounds(mask, true);
  for (const char* mask :
       {"q / 8 == kv / 8", "q >= kv || kv < 9", "(q ^ kv) < 30", "kv <= q - h", "kv + b < 90"})
    expect_key_bounds(mask, false);
  const KeyBounds none{MaskProgram()}, unknown{MaskProgram("w: int; q >= kv && q - kv < w")};
  EXPECT_EQ(none.of({0, 12}, 12, 34).end, 34);
  EXPECT_EQ(unknown.of({16, 32}, 100, 100).begin, 0);
  EXPECT_EQ(unknown.of({16, 32}, 100, 100).end, 32);
}

TEST(Tiles, WrappedConstantsAreNotTakenForLargeOnes) {
  // q + 2147483647 is negative but for q = 0.
  const HostTiles mask(parse("kv < q + 2147483647").pointer(), {});
  const Point head{.seqlen_q = 8, .seqlen_kv = 8};
  EXPECT_EQ(mask.classify(head, {0, 1}, {0, 8}), TileClass::full);
  EXPECT_EQ(mask.classify(head, {1, 8}, {0, 8}), TileClass::partial);
  const Range all = mask.kv_bounds(head, {0, 8});
  EXPECT_EQ(all.begin, 0);
  EXPECT_EQ(all.end, 8);
}

}  // namespace
}  // namespace flashjit::expr

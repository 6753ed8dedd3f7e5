// Dense attention, forward and backward, against the fp64 reference: every pair of features occurs in some
// case. Shapes too large for the CPU are in large_test.cpp, against the naive GPU kernel.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/tiles.hpp"
#include "tests/support/attention_case.hpp"

namespace flashjit::test {
namespace {

constexpr std::array kDTypes = {DType::fp16, DType::bf16, DType::fp32};
constexpr std::array kFamilies = {Family::sm90, Family::sm80, Family::simt, Family::sm75};
constexpr std::array<std::array<int, 2>, 14> kHeadDims = {{{8, 8},
                                                           {16, 16},
                                                           {24, 24},
                                                           {40, 40},
                                                           {64, 64},
                                                           {72, 72},
                                                           {96, 96},
                                                           {128, 128},
                                                           {160, 160},
                                                           {192, 192},
                                                           {256, 256},
                                                           {64, 32},
                                                           {192, 128},
                                                           {32, 64}}};
const std::array<MaskProgram, 3> kMasks = {MaskProgram(), causal(), causal(CausalAlignment::top_left)};
constexpr std::array<std::array<int, 2>, 20> kLengths = {
    {{1, 1},     {1, 128},   {1, 333},   {7, 7},     {7, 200},   {64, 64},   {64, 1},
     {65, 64},   {64, 65},   {127, 129}, {128, 128}, {129, 127}, {128, 333}, {200, 65},
     {200, 200}, {333, 129}, {333, 333}, {0, 64},    {64, 0},    {333, 7}}};
constexpr std::array<std::array<int, 3>, 5> kBatchAndHeads = {
    {{1, 1, 1}, {3, 2, 2}, {2, 8, 1}, {2, 4, 2}, {1, 6, 3}}};  // batch, heads_q, heads_kv
constexpr std::array kDropout = {0.0, 0.1, 0.6};
constexpr std::array kLayouts = {Layout::bhsd, Layout::bshd, Layout::packed, Layout::padded};
constexpr std::array kScoreSizes = {1.0, 3e3};  // normal data has scores up to about 4: 1e4

/// Turns what cannot be, such as fp32 on tensor cores and packed tensors of unlike sizes, into what is
/// nearest.
void make_possible(AttentionCase& test) {
  if (test.spec.dtype == DType::fp32) test.family = Family::simt;
  test.spec.dtype = dtype_for(test.family, test.spec.dtype);
  if (test.layout == Layout::packed) {
    test.spec.head_dim_v = test.spec.head_dim;
    test.shape.heads_kv = test.shape.heads_q;
    test.shape.seqlen_kv = test.shape.seqlen_q;
  }
  // The rounding error of a handful of scores or rows is luck, that of a hundred a yardstick: tiny problems
  // come in batches.
  const std::int64_t rows = test.shape.batch * test.shape.heads_q * test.shape.seqlen_q;
  if (test.shape.seqlen_q * test.shape.seqlen_kv < 100 || rows < 50) test.shape.batch = 16;
}

std::vector<AttentionCase> make_cases() {
  std::vector<AttentionCase> cases;
  const auto choices = covering_choices<12>({3, 4, 14, 3, 20, 5, 3, 4, 2, 2, 2, 2});
  for (const auto& [dtype, family, dims, mask, lengths, heads, dropout, layout, size, kv_lengths, det,
                    scale] : choices) {
    AttentionCase test;
    test.spec = {.dtype = kDTypes[dtype],
                 .head_dim = kHeadDims[dims][0],
                 .head_dim_v = kHeadDims[dims][1],
                 .mask = kMasks[mask],
                 .dropout = kDropout[dropout] > 0,
                 .kv = padded_if(kv_lengths == 1),
                 .reproducible = {.deterministic = det == 1}};
    const auto [batch, heads_q, heads_kv] = kBatchAndHeads[heads];
    test.shape = {batch, heads_q, heads_kv, kLengths[lengths][0], kLengths[lengths][1]};
    test.family = kFamilies[family];
    test.layout = kLayouts[layout];
    if (scale == 1) test.softmax_scale = 0.21f;
    test.dropout_p = kDropout[dropout];
    test.score_size = kScoreSizes[size];
    test.seed = static_cast<unsigned>(cases.size());
    make_possible(test);
    vary(test);
    cases.push_back(test);
  }
  // More tiles than the device has multiprocessors: blocks of family sm90 take several, some without keys.
  for (const int head_dim : {64, 128, 256}) {
    for (const MaskProgram& mask : kMasks) {
      cases.push_back({.spec = {.dtype = DType::bf16, .head_dim = head_dim, .mask = mask},
                       .shape = {9, 8, 4, 450, 120},
                       .family = Family::sm90,
                       .seed = static_cast<unsigned>(cases.size())});
    }
  }
  // More heads than the first tiles of all blocks need: the backward pass clears the others' dQ as it goes.
  for (const int head_dim : {64, 128, 256})
    for (const MaskProgram& mask : {MaskProgram{}, causal()})
      for (const bool det : {false, true})
        cases.push_back({.spec = {.dtype = DType::bf16,
                                  .head_dim = head_dim,
                                  .mask = mask,
                                  .reproducible = {.deterministic = det}},
                         .shape = {40, 8, 4, 130, 300},
                         .family = Family::sm90,
                         .seed = static_cast<unsigned>(cases.size())});
  // There with many KV tiles: fewer rows of dQ are converted at a time, and sm80 takes its largest tiles.
  for (const Family family : {Family::sm90, Family::sm80})
    for (const int head_dim : {64, 128, 256})
      cases.push_back({.spec = {.dtype = DType::fp16, .head_dim = head_dim},
                       .shape = {5, 8, 4, 130, 1100},
                       .family = family,
                       .seed = static_cast<unsigned>(cases.size())});
  // One query of grouped heads, which the forward pass packs into one tile, or two.
  for (const Family family : kFamilies)
    for (const Layout layout : {Layout::bhsd, Layout::bshd, Layout::padded})
      for (const AttentionShape& shape : {AttentionShape{3, 8, 2, 1, 333}, AttentionShape{2, 96, 1, 1, 200}})
        cases.push_back({.spec = {.dtype = dtype_for(family, DType::bf16),
                                  .head_dim = 128,
                                  .mask = kMasks[layout == Layout::bshd ? 0 : 1],
                                  .kv = padded_if(layout == Layout::padded)},
                         .shape = shape,
                         .family = family,
                         .layout = layout,
                         .seed = static_cast<unsigned>(cases.size())});
  // Many rounds of KV tiles, of which those of the last heads come by their place.
  for (const Family family : {Family::sm90, Family::sm80})
    for (const int head_dim : {64, 128, 256})
      cases.push_back({.spec = {.dtype = DType::bf16, .head_dim = head_dim, .mask = causal()},
                       .shape = {10, 4, 4, 130, 2100},
                       .family = family,
                       .seed = static_cast<unsigned>(cases.size())});
  return cases;
}

const std::vector<AttentionCase>& all_cases() {
  static const std::vector<AttentionCase> cases = make_cases();
  return cases;
}

/// Each spec, one feature after the other, in each shape and family.
std::vector<AttentionCase> feature_cases(std::span<const char* const> specs,
                                         std::span<const AttentionShape> shapes,
                                         std::span<const Family> families, const char* variant) {
  std::vector<AttentionCase> cases;
  for (const Family family : families)
    for (const char* spec : specs)
      for (const AttentionShape& shape : shapes) {
        AttentionCase test{.spec = parse_spec(spec), .shape = shape, .family = family};
        if (test.spec.dropout) test.dropout_p = 0.2;
        test.variant = variant;
        test.seed = static_cast<unsigned>(cases.size());
        vary(test);
        cases.push_back(test);
      }
  return cases;
}

/// One after the other in each layout that tensors of their own can have.
std::vector<AttentionCase> in_layouts_by_turns(std::vector<AttentionCase> cases) {
  for (std::size_t i = 0; i < cases.size(); ++i)
    cases[i].layout = std::array{Layout::bhsd, Layout::bshd, Layout::padded}[i % 3];
  return cases;
}

/// Above 256 columns: every dimension, and each feature.
std::vector<AttentionCase> wide_cases() {
  constexpr std::array<const char*, 10> kRests = {"",
                                                  ":causal",
                                                  ":dropout:causal",
                                                  ":kvlen:det",
                                                  ":varlen:sinks:causal",
                                                  ":map64x64:dropout",
                                                  ":map16x256:causal:det",
                                                  ":score{50.0 * tanh(score / 50.0)}",
                                                  ":score{bias: fp32 2d grad; score + bias[h, kv]}",
                                                  ":mask{doc: int32 1d; doc[q] == doc[kv]}:row_max"};
  constexpr std::array<AttentionShape, 2> kShapes = {{{2, 4, 2, 130, 200}, {1, 2, 1, 333, 333}}};
  std::vector<std::string> texts;
  for (int d = 264; d <= 576; d += 8)
    texts.push_back(fmt::format("{}:d{}x{}{}", texts.size() % 2 ? "bf16" : "fp16", d, std::min(d, 512),
                                kRests[texts.size() % kRests.size()]));
  for (const char* dims : {"d512", "d320x256", "d576x512"})
    for (const char* rest : kRests) texts.push_back(fmt::format("bf16:{}{}", dims, rest));
  for (const char* dims : {"d8x512", "d576x8"}) texts.push_back(fmt::format("bf16:{}:causal", dims));
  const std::vector<const char*> specs = [&] {
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    return pointers;
  }();
  std::vector<AttentionCase> cases = feature_cases(specs, kShapes, std::array{Family::sm80}, "wide");
  std::ranges::copy(feature_cases(specs, std::span(kShapes).first(1), std::array{Family::sm90}, "wide"),
                    std::back_inserter(cases));
  constexpr std::array kOfThreads = {"fp32:d512:causal", "fp32:d576x512:dropout:det", "bf16:d320x256:kvlen"};
  std::ranges::copy(feature_cases(kOfThreads, kShapes, std::array{Family::simt}, "wide"),
                    std::back_inserter(cases));
  return in_layouts_by_turns(cases);
}

/// KV tiles for all multiprocessors: family sm80 takes its largest tiles, in which two warps share rows and
/// dQ comes a tile later; the others of these tests have the smallest.
std::vector<AttentionCase> large_tile_cases() {
  constexpr std::array kSpecs = {
      "bf16:d64:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
      "bf16:d64:score{gate: fp32 2d grad; score * gate[b, h]}",
      "fp16:d64:causal:dropout",
      "fp16:d80:causal",
      "bf16:d96:dropout:kvlen",
      "bf16:d96:map64x64:mask{q >= kv && q - kv < 100}",
      "bf16:d128:causal_top_left:dropout",
      "bf16:d128:map32x64",
      "fp16:d128:varlen:sinks:mask{doc: int32 1d; doc[q] == doc[kv]}",
      "bf16:d128x64:score{50.0 * tanh(score / 50.0)}",
      "bf16:d128:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}",
      "bf16:d128:score{gate: fp32 2d grad; score * gate[b, h]}:dropout",
      "fp16:d160:causal_top_left",
      "bf16:d192:dropout:kvlen",
      "bf16:d128:causal:dropout:dropout_place",
      "bf16:d192x128:score{bias: fp32 2d grad; score + bias[h, kv]}",
      "bf16:d240",
      "bf16:d256:score{50.0 * tanh(score / 50.0)}:dropout",
      "fp16:d256:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:varlen",
      "bf16:d256:map64x64:det",
  };
  constexpr std::array<AttentionShape, 1> kShapes = {{{5, 8, 4, 130, 1100}}};
  return feature_cases(kSpecs, kShapes, std::array{Family::sm80}, "large");
}

class Attention : public CaseTest {
 protected:
  static void SetUpTestSuite() {
    std::vector<AttentionCase> cases = large_tile_cases();
    std::ranges::copy(all_cases(), std::back_inserter(cases));
    std::ranges::copy(wide_cases(), std::back_inserter(cases));
    prepare_selected(cases);
  }
};

TEST_P(Attention, MatchesTheReference) { run_case(); }

INSTANTIATE_TEST_SUITE_P(Pairs, Attention, testing::ValuesIn(all_cases()),
                         [](const auto& test) { return name_of(test.param); });

INSTANTIATE_TEST_SUITE_P(Wide, Attention, testing::ValuesIn(wide_cases()),
                         [](const auto& test) { return name_of(test.param); });

INSTANTIATE_TEST_SUITE_P(LargeTiles, Attention, testing::ValuesIn(large_tile_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// A few specs that stress different parts of a tile, at a shape that is no multiple of any.
std::vector<AttentionCase> sweep_cases() {
  struct Sweep {
    AttentionSpec spec;
    std::vector<Family> families;
  };
  const Sweep sweeps[] = {
      {{.dtype = DType::bf16, .head_dim = 128, .mask = causal()}, {Family::sm90}},
      {{.dtype = DType::fp16, .head_dim = 64}, {Family::sm90}},
      {{.dtype = DType::bf16, .head_dim = 192, .head_dim_v = 128}, {Family::sm90}},
      {{.dtype = DType::bf16, .head_dim = 72, .head_dim_v = 40}, {Family::sm90}},
      {{.dtype = DType::fp16, .head_dim = 128, .dropout = true, .kv = KvLayout::padded()},
       {Family::sm90, Family::sm80}},
      {{.dtype = DType::bf16, .head_dim = 64, .mask = causal(), .reproducible = {.deterministic = true}},
       {Family::sm90}},
      {{.dtype = DType::bf16, .head_dim = 32, .reproducible = {.deterministic = true}}, {Family::sm90}},
      {{.dtype = DType::bf16,
        .head_dim = 192,
        .head_dim_v = 128,
        .mask = causal(),
        .reproducible = {.deterministic = true}},
       {Family::sm90, Family::sm80}},
      {{.dtype = DType::fp16, .head_dim = 256, .reproducible = {.deterministic = true}}, {Family::sm90}},
      {{.dtype = DType::bf16, .head_dim = 64, .mask = causal()}, {Family::sm80}},
      {{.dtype = DType::bf16, .head_dim = 256, .mask = causal()}, {Family::sm80}},
      {{.dtype = DType::fp16, .head_dim = 40}, {Family::sm80}},
      {{.dtype = DType::fp32,
        .head_dim = 64,
        .mask = causal(),
        .dropout = true,
        .reproducible = {.deterministic = true}},
       {Family::simt}},
      {{.dtype = DType::bf16, .head_dim = 128, .mask = causal(), .kv = KvLayout::padded()}, {Family::simt}},
  };
  std::vector<AttentionCase> cases;
  for (const auto& [spec, families] : sweeps)
    for (const Family family : families)
      cases.push_back({.spec = spec,
                       .shape = {2, 2, 1, 333, 200},
                       .family = family,
                       .dropout_p = spec.dropout ? 0.3 : 0.0});
  return cases;
}

class EveryConfiguration : public GpuTestWith<AttentionCase> {};

TEST_P(EveryConfiguration, GivesTheSameResult) { check_every_configuration(GetParam()); }

INSTANTIATE_TEST_SUITE_P(SearchSpace, EveryConfiguration, testing::ValuesIn(sweep_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// Split-KV: few queries of many keys.
std::vector<AttentionCase> split_kv_cases() {
  constexpr std::array kSpecs = {
      "bf16:d128",
      "fp16:d64:causal",
      "bf16:d128:dropout:kvlen",
      "bf16:d64:causal:varlen:sinks",
      "fp16:d192x128:map64x64",
      "bf16:d256:causal_top_left:sinks",
      "fp16:d72x40:mask{q >= kv && q - kv < 300}",
      "bf16:d64:mask{doc: int32 1d; doc[q] == doc[kv]}:dropout",
      "bf16:d96:score{bias: bf16 4d; score + bias[b, h, q, kv]}:causal",
      "fp16:d8x256:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:sinks:kvlen",
  };
  constexpr std::array<AttentionShape, 2> kShapes = {{{2, 4, 2, 70, 1100}, {3, 2, 1, 1, 777}}};
  return feature_cases(kSpecs, kShapes, std::array{Family::sm90, Family::sm80}, "shared");
}

class SplitKv : public SupportedCase {};

TEST_P(SplitKv, GivesTheSameResult) {
  const AttentionCase& test = GetParam();
  TileConfig config = heuristic(test.family, test.spec, test.shape, Pass::forward);
  config.split = true;
  TemporaryRuntime runtime;
  AttentionRun run(test, make_problem(test));
  run.check_forward(runtime.get(), config);
  run.check_forward_without_lse(runtime.get(), config);
}

INSTANTIATE_TEST_SUITE_P(Features, SplitKv, testing::ValuesIn(split_kv_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// Split-Q: few KV tiles of many queries, in four splits and in two, some of which meet none. And keys
/// without any queries.
std::vector<AttentionCase> split_q_cases() {
  constexpr std::array kSpecs = {
      "bf16:d128",
      "bf16:d128:causal",
      "fp16:d64:causal:kvlen",
      "bf16:d64:dropout:sinks",
      "bf16:d256:causal",
      "fp16:d192x128:map64x64",
      "bf16:d72x40:mask{q >= kv && q - kv < 200}",
      "bf16:d128:causal:det",
      "bf16:d128:causal:varlen",
      "fp16:d256:varlen:det",
      "bf16:d64:mask{doc: int32 1d; q >= kv && doc[q] == doc[kv]}",
      "bf16:d96:score{bias: bf16 4d; score + bias[b, h, q, kv]}:causal_top_left",
      "fp16:d128:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:causal",
  };
  constexpr std::array<AttentionShape, 3> kShapes = {
      {{1, 16, 1, 515, 300}, {2, 40, 2, 210, 333}, {2, 4, 2, 0, 300}}};
  return in_layouts_by_turns(
      feature_cases(kSpecs, kShapes, std::array{Family::sm90, Family::sm80}, "queries"));
}

class SplitQ : public SupportedCase {};

TEST_P(SplitQ, GivesTheSameResult) {
  const AttentionCase& test = GetParam();
  TileConfig config = heuristic(test.family, test.spec, test.shape, Pass::backward);
  EXPECT_EQ(config.split, test.shape.seqlen_q > 0);
  config.split = true;
  EXPECT_GE(plan::num_splits(with_pass(test.spec, Pass::backward), test.shape, config, gpu().info),
            test.shape.seqlen_q > 0 ? 2 : 1);
  TemporaryRuntime runtime;
  AttentionRun run(test, make_problem(test));
  run.check_forward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::forward));
  run.check_backward(runtime.get(), config);
}

INSTANTIATE_TEST_SUITE_P(Features, SplitQ, testing::ValuesIn(split_q_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// Few queries of grouped heads: groups of 4, 3 and 1, and of 65, which are two sets.
std::vector<AttentionCase> packed_head_cases() {
  constexpr std::array kSpecs = {
      "bf16:d128",
      "fp16:d64:causal",
      "bf16:d128:causal_top_left:kvlen",
      "bf16:d64:causal:varlen:sinks",
      "fp16:d72x40:mask{q >= kv && q - kv < 300}",
      "bf16:d256:score{50.0 * tanh(score / 50.0)}:causal",
      "fp16:d96:score{score + 0.05 * to_float(kv - q)}:sinks",
      "bf16:d64x192:score{f: fp32 2d; score + (f[b, q] - f[b, kv])}:causal",
  };
  constexpr std::array<AttentionShape, 4> kShapes = {
      {{2, 8, 2, 5, 1100}, {3, 6, 2, 70, 777}, {2, 4, 4, 9, 130}, {1, 130, 2, 3, 200}}};
  return in_layouts_by_turns(feature_cases(kSpecs, kShapes, std::array{Family::sm90}, "heads"));
}

class ForwardConfigurations : public SupportedCase {
 protected:
  void check(std::initializer_list<const char*> texts) {
    const AttentionCase& test = GetParam();
    TemporaryRuntime runtime;
    AttentionRun run(test, make_problem(test));
    for (const char* text : texts) {
      const TileConfig config = parse_config(text);
      run.check_forward(runtime.get(), config);
      run.check_forward_without_lse(runtime.get(), config);
    }
  }
};

class PackedHeads : public ForwardConfigurations {};

TEST_P(PackedHeads, GiveTheSameResult) {
  check({"sm90:br64:bc64:w4:s2:split:pack_gqa", "sm90:br128:bc48:w8:s2:split:pack_gqa"});
}

INSTANTIATE_TEST_SUITE_P(Features, PackedHeads, testing::ValuesIn(packed_head_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// K and V of sm80 by TMA: rows behind a sequence's last key, padded columns, tiles of lists.
std::vector<AttentionCase> tma_cases() {
  constexpr std::array kSpecs = {
      "bf16:d64",
      "fp16:d128:causal",
      "bf16:d128:causal_top_left:kvlen",
      "fp16:d64:causal:dropout",
      "bf16:d128:varlen:sinks:causal",
      "bf16:d72x40:mask{q >= kv && q - kv < 100}",
      "fp16:d128x64:score{50.0 * tanh(score / 50.0)}:dropout:kvlen",
      "bf16:d256:map64x64",
      "fp16:d240x256:varlen",
      "bf16:d64:map32x64:kvlen:row_max",
  };
  constexpr std::array<AttentionShape, 3> kShapes = {
      {{2, 4, 2, 333, 300}, {36, 2, 2, 66, 450}, {3, 4, 1, 1, 1100}}};
  return in_layouts_by_turns(feature_cases(kSpecs, kShapes, std::array{Family::sm80}, "tma"));
}

class CopiesByTma : public ForwardConfigurations {
 protected:
  void SetUp() override {
    ForwardConfigurations::SetUp();
    if (gpu().info.compute_capability < 90) GTEST_SKIP() << "TMA is of sm_90 and newer";
  }
};

TEST_P(CopiesByTma, GiveTheSameResult) {
  check({"sm80:br64:bc32:w4:tma", "sm80:br128:bc32:w8:tma", "sm80:br64:bc64:w4:split:tma"});
}

INSTANTIATE_TEST_SUITE_P(Features, CopiesByTma, testing::ValuesIn(tma_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// Two Q tiles at a time in a block of sm90: few, of which some blocks have one or none, and several rounds.
std::vector<AttentionCase> two_tile_cases() {
  constexpr std::array kSpecs = {
      "bf16:d64",
      "fp16:d64:causal",
      "bf16:d32:causal_top_left:sinks",
      "fp16:d64:map128x128",
      "bf16:d64:map32x64:kvlen",
      "bf16:d64x40:mask{q >= kv && q - kv < 100}",
      "fp16:d40:mask{(q / 64 ^ kv / 64) % 3 == 1}:sinks",
      "bf16:d64:causal:dropout",
      "fp16:d48:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}",
      "bf16:d64:map64x128:varlen",
  };
  constexpr std::array<AttentionShape, 2> kShapes = {{{2, 4, 2, 333, 300}, {40, 8, 4, 260, 150}}};
  return feature_cases(kSpecs, kShapes, std::array{Family::sm90}, "two");
}

class TwoTilesAtATime : public ForwardConfigurations {};

TEST_P(TwoTilesAtATime, GiveTheSameResult) {
  check(
      {"sm90:br128:bc64:w16:s3", "sm90:br128:bc64:w16:s4", "sm90:br128:bc48:w16:s1", "sm90:br64:bc96:w8:s2"});
}

INSTANTIATE_TEST_SUITE_P(Features, TwoTilesAtATime, testing::ValuesIn(two_tile_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// Backward passes of sm90 whose clusters sum up dQ: of whole rows, more heads than clusters, rows of more
/// keys than a cluster has, and blocks without keys.
std::vector<AttentionCase> cluster_cases() {
  constexpr std::array kSpecs = {
      "bf16:d64",
      "fp16:d128:causal",
      "bf16:d128:causal_top_left:kvlen",
      "fp16:d64:causal:dropout",
      "bf16:d128:causal:dropout:dropout_place",
      "bf16:d128:varlen:sinks:causal",
      "bf16:d72x40:mask{q >= kv && q - kv < 100}",
      "fp16:d128x64:score{50.0 * tanh(score / 50.0)}:dropout:kvlen",
      "bf16:d40:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:varlen",
      "bf16:d96:score{f: fp32 2d; score + (f[b, q] - f[b, kv])}:causal",
      "bf16:d128:sinks:causal",
      "bf16:d40:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:kvlen",
  };
  constexpr std::array<AttentionShape, 5> kShapes = {
      {{2, 4, 2, 333, 200}, {36, 2, 2, 66, 450}, {3, 2, 1, 70, 1100}, {2, 2, 2, 300, 60}, {2, 4, 4, 1, 256}}};
  auto cases = in_layouts_by_turns(feature_cases(kSpecs, kShapes, std::array{Family::sm90}, "sums"));
  // Each cluster takes many, of which some blocks have keys and some have none.
  constexpr std::array kUnlike = {"fp16:d64:varlen", "bf16:d64:kvlen"};
  constexpr std::array<AttentionShape, 1> kMany = {{{200, 4, 4, 70, 450}}};
  std::ranges::move(feature_cases(kUnlike, kMany, std::array{Family::sm90}, "many"),
                    std::back_inserter(cases));
  return cases;
}

class Clusters : public SupportedCase {};

TEST_P(Clusters, SumUpDq) {
  const AttentionCase& test = GetParam();
  TemporaryRuntime runtime;
  AttentionRun run(test, make_problem(test));
  run.check_forward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::forward));
  const int br = test.spec.head_dim <= 64 ? 128 : 64;
  for (const int bc : {256, 512})
    run.check_backward(runtime.get(), {.family = Family::sm90, .br = br, .bc = bc, .warps = 8, .stages = 2});
  run.check_backward(runtime.get(), {.family = Family::sm90, .br = 64, .bc = 256, .warps = 8});
}

INSTANTIATE_TEST_SUITE_P(Features, Clusters, testing::ValuesIn(cluster_cases()),
                         [](const auto& test) { return name_of(test.param); });

class AttentionArguments : public GpuTestWith<Family> {
 protected:
  void check(AttentionCase test, reference::Problem problem, bool without_lse = false) {
    test.family = GetParam();
    const Support support = supports(test.family, test.spec);
    if (!support) GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
    TemporaryRuntime runtime;
    AttentionRun run(test, std::move(problem));
    const TileConfig config = heuristic(test.family, test.spec, test.shape, Pass::forward);
    run.check_forward(runtime.get(), config);
    run.check_backward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::backward));
    if (without_lse) run.check_forward_without_lse(runtime.get(), config);
  }
};

TEST_P(AttentionArguments, LseMayBeNull) {
  const AttentionCase test{.spec = {.dtype = DType::fp16, .head_dim = 64, .mask = causal()},
                           .shape = {1, 2, 2, 65, 129}};
  check(test, make_problem(test), true);
}

TEST_P(AttentionArguments, KvLengthsAreClampedToTheKeys) {
  const AttentionCase test{
      .spec = {.dtype = DType::bf16, .head_dim = 64, .mask = causal(), .kv = KvLayout::padded()},
      .shape = {4, 2, 1, 65, 130}};
  reference::Problem problem = make_problem(test);
  problem.kv_lengths = {-5, 1000, 130, 1};
  check(test, std::move(problem));
}

TEST_P(AttentionArguments, NothingToDoIsDone) {
  for (const AttentionShape& shape :
       {AttentionShape{0, 2, 2, 64, 64}, AttentionShape{2, 0, 0, 64, 64}, AttentionShape{2, 2, 1, 0, 0}}) {
    SCOPED_TRACE(to_string(shape));
    const AttentionCase test{.spec = {.dtype = DType::fp16, .head_dim = 64}, .shape = shape};
    check(test, make_problem(test));
  }
}

TEST_P(AttentionArguments, AllScoresEqual) {
  const AttentionCase test{.spec = {.dtype = DType::fp16, .head_dim = 32, .mask = causal()},
                           .shape = {1, 2, 2, 100, 150}};
  reference::Problem problem = make_problem(test);
  std::fill(problem.q.begin(), problem.q.end(), 0.0);
  check(test, std::move(problem));
}

INSTANTIATE_TEST_SUITE_P(Families, AttentionArguments, testing::ValuesIn(kFamilies),
                         [](const auto& test) { return to_string(test.param); });

}  // namespace
}  // namespace flashjit::test

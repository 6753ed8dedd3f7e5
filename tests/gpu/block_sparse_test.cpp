// Block-sparse attention, forward and backward, against the fp64 reference: block sizes that fit no tile,
// empty rows and columns, maps that broadcast.
#include <gtest/gtest.h>

#include <array>
#include <cctype>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "flashjit/patterns.hpp"
#include "tests/support/attention_case.hpp"

namespace flashjit::test {
namespace {

constexpr std::array kDTypes = {DType::bf16, DType::fp16, DType::fp32};
constexpr std::array kFamilies = {Family::sm90, Family::sm80, Family::sm75, Family::simt};
constexpr std::array kHeadDims = {32, 64, 128};
const std::array<MaskProgram, 3> kMasks = {MaskProgram(), causal(), causal(CausalAlignment::top_left)};
constexpr std::array<BlockSize, 10> kBlocks = {{{16, 16},
                                                {16, 256},
                                                {32, 64},
                                                {48, 80},
                                                {64, 64},
                                                {64, 128},
                                                {128, 128},
                                                {144, 112},
                                                {256, 16},
                                                {256, 256}}};
constexpr std::array<std::array<int, 2>, 6> kLengths = {
    {{1, 130}, {65, 64}, {200, 333}, {333, 200}, {400, 512}, {129, 129}}};
constexpr std::array kDropout = {0.0, 0.2};

std::vector<AttentionCase> make_cases() {
  std::vector<AttentionCase> cases;
  const auto choices = covering_choices<12>({10, 6, 3, 3, 3, 3, 2, 2, 2, 2, 2, 3});
  for (const auto& [block, lengths, dtype, family, dim, mask, dropout, kv_lengths, det, per_batch, per_head,
                    density] : choices) {
    AttentionCase test;
    test.spec = {.dtype = kDTypes[dtype],
                 .head_dim = kHeadDims[dim],
                 .mask = kMasks[mask],
                 .dropout = kDropout[dropout] > 0,
                 .kv = padded_if(kv_lengths == 1),
                 .block_map = kBlocks[block],
                 .reproducible = {.deterministic = det == 1}};
    test.shape = {2, 4, 2, kLengths[lengths][0], kLengths[lengths][1]};
    test.family = test.spec.dtype == DType::fp32 ? Family::simt : kFamilies[family];
    test.spec.dtype = dtype_for(test.family, test.spec.dtype);
    test.dropout_p = kDropout[dropout];
    test.map_batch = per_batch ? 2 : 1;
    test.map_heads = per_head ? 4 : 1;
    test.map_density = std::array{0.15, 0.5, 0.9}[density];
    test.seed = static_cast<unsigned>(cases.size());
    cases.push_back(test);
  }
  // More tiles than the device has multiprocessors: blocks of family sm90 take several, some without keys;
  // and more heads than their first tiles need: the backward pass clears the others' dQ as it goes.
  for (const AttentionShape& shape : {AttentionShape{9, 8, 4, 450, 330}, AttentionShape{40, 8, 4, 130, 150}})
    for (const int head_dim : {64, 256})
      for (const double density : {0.05, 0.5})
        cases.push_back({.spec = {.dtype = DType::bf16, .head_dim = head_dim, .block_map = {64, 64}},
                         .shape = shape,
                         .family = Family::sm90,
                         .map_batch = shape.batch,
                         .map_heads = shape.heads_q,
                         .map_density = density,
                         .seed = static_cast<unsigned>(cases.size())});
  return cases;
}

const std::vector<AttentionCase>& all_cases() {
  static const std::vector<AttentionCase> cases = make_cases();
  return cases;
}

class BlockSparse : public CaseTest {
 protected:
  static void SetUpTestSuite() { prepare_selected(all_cases()); }
};

TEST_P(BlockSparse, MatchesTheReference) { run_case(); }

INSTANTIATE_TEST_SUITE_P(Pairs, BlockSparse, testing::ValuesIn(all_cases()),
                         [](const auto& test) { return name_of(test.param); });

std::vector<AttentionCase> sweep_cases() {
  const AttentionShape shape{1, 2, 1, 333, 400};
  return {
      {.spec = {.dtype = DType::bf16, .head_dim = 64, .mask = causal(), .block_map = {48, 80}},
       .shape = shape,
       .family = Family::sm80,
       .map_heads = 2},
      {.spec = {.dtype = DType::fp16,
                .head_dim = 128,
                .block_map = {16, 16},
                .reproducible = {.deterministic = true}},
       .shape = shape,
       .family = Family::sm80},
      {.spec = {.dtype = DType::fp32, .head_dim = 64, .block_map = {144, 112}},
       .shape = shape,
       .family = Family::simt},
  };
}

class BlockSparseEveryConfiguration : public GpuTestWith<AttentionCase> {};

TEST_P(BlockSparseEveryConfiguration, GivesTheSameResult) { check_every_configuration(GetParam()); }

INSTANTIATE_TEST_SUITE_P(SearchSpace, BlockSparseEveryConfiguration, testing::ValuesIn(sweep_cases()),
                         [](const auto& test) { return name_of(test.param); });

/// Maps that are worth a name of their own, in both families.
class BlockSparseMaps : public GpuTestWith<Family> {
 protected:
  static AttentionCase test_with(BlockSize block, bool deterministic = false) {
    return {.spec = {.dtype = dtype_for(GetParam(), DType::bf16),
                     .head_dim = 64,
                     .block_map = block,
                     .reproducible = {.deterministic = deterministic}},
            .shape = {1, 2, 2, 300, 280},
            .family = GetParam()};
  }
  static void check(const AttentionCase& test, std::vector<std::uint8_t> map) {
    const Support support = supports(test.family, test.spec);
    if (!support) GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
    reference::Problem problem = make_problem(test);
    problem.block_map = std::move(map);
    TemporaryRuntime runtime;
    AttentionRun run(test, std::move(problem));
    run.check_forward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::forward));
    run.check_backward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::backward));
  }
  static void check(BlockSize block, const BlockPattern& pattern) { check(test_with(block), pattern.blocks); }
};

TEST_P(BlockSparseMaps, AnEmptyMapGivesZeros) { check({32, 32}, empty_pattern(300, 280, {32, 32})); }

TEST_P(BlockSparseMaps, AnEmptyMapGivesZerosDeterministically) {
  check(test_with({32, 32}, true), empty_pattern(300, 280, {32, 32}).blocks);
}

TEST_P(BlockSparseMaps, AFullMapIsDense) {
  BlockPattern full = empty_pattern(300, 280, {64, 32});
  std::fill(full.blocks.begin(), full.blocks.end(), std::uint8_t{1});
  check({64, 32}, full);
}

TEST_P(BlockSparseMaps, AnyNonzeroByteAttends) {
  BlockPattern pattern = butterfly(5, 5);
  for (std::size_t i = 0; i < pattern.blocks.size(); ++i)
    pattern.blocks[i] *= static_cast<std::uint8_t>(1 + 51 * (i % 6));
  check({64, 64}, pattern);
}

TEST_P(BlockSparseMaps, OneBlockAttends) {
  BlockPattern pattern = empty_pattern(300, 280, {16, 16});
  pattern.blocks.back() = 1;
  check({16, 16}, pattern);
}

TEST_P(BlockSparseMaps, Butterfly) { check({32, 32}, butterfly(10, 9)); }
TEST_P(BlockSparseMaps, LocalWindow) { check({16, 16}, local_window(19, 18, 1)); }
TEST_P(BlockSparseMaps, Strided) { check({32, 16}, strided(10, 18, 3)); }
TEST_P(BlockSparseMaps, LocalGlobal) { check({32, 32}, local_global(10, 9, 1, 1)); }
TEST_P(BlockSparseMaps, BigBird) { check({16, 32}, big_bird(19, 9, 1, 1, 2, 5)); }

/// Warpgroups of one Q tile that meet other KV tiles than their neighbours: family sm90 passes over those.
struct RowsCase {
  const char *spec, *config;
};

class BlockSparseRows : public GpuTestWith<RowsCase> {
 protected:
  /// For each block row of the map whether it attends to a block column, in all heads alike.
  static void check(const std::function<bool(std::int64_t, std::int64_t)>& attends) {
    const KernelSpec spec = parse_spec(GetParam().spec);
    const AttentionCase test{.spec = spec, .shape = {1, 2, 2, 1000, 2600}, .family = Family::sm90};
    if (const Support support = supports(test.family, spec); !support)
      GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
    reference::Problem problem = make_problem(test);
    BlockPattern map = empty_pattern(test.shape.seqlen_q, test.shape.seqlen_kv, spec.block_map);
    for (std::int64_t row = 0; row < map.rows; ++row)
      for (std::int64_t column = 0; column < map.columns; ++column)
        map.blocks[row * map.columns + column] = attends(row, column);
    problem.block_map = map.blocks;
    TemporaryRuntime runtime;
    AttentionRun run(test, std::move(problem));
    run.check_forward(runtime.get(), parse_config(GetParam().config));
  }
};

TEST_P(BlockSparseRows, FarApart) {
  check([](auto row, auto column) { return row % 2 == 0 || column == row % 3 * 10; });
}
TEST_P(BlockSparseRows, AllAndNone) {
  check([](auto row, auto) { return row % 2 == 1; });
}
TEST_P(BlockSparseRows, NothingInCommon) {
  check([](auto row, auto column) { return (row + column) % 2 == 0; });
}
TEST_P(BlockSparseRows, Windows) {
  check([](auto row, auto column) { return column >= row && column < row + 4; });
}
TEST_P(BlockSparseRows, WithoutOrder) {
  check([](auto row, auto column) { return (row * 7919 + column * 104729) % 31 < 9; });
}

constexpr std::array kRowsCases = {
    RowsCase{"fwd:bf16:d64:map128x128", "sm90:br192:bc128:w12:s4"},
    RowsCase{"fwd:fp16:d64:map64x128:sinks", "sm90:br192:bc128:w12:s2"},
    RowsCase{"fwd:bf16:d40:map64x128:dropout", "sm90:br128:bc64:w8:s3"},
    RowsCase{"fwd:bf16:d128:map64x128", "sm90:br128:bc128:w8:s2"},
    RowsCase{"fwd:bf16:d256:map64x64", "sm90:br128:bc64:w8:s2"},
    RowsCase{"fwd:bf16:d64:map64x128:score{30.0 * tanh(score / 30.0)}", "sm90:br128:bc128:w8:s2:split"}};

INSTANTIATE_TEST_SUITE_P(Configurations, BlockSparseRows, testing::ValuesIn(kRowsCases),
                         [](const auto& test) {
                           std::string name = std::string(test.param.spec) + "_" + test.param.config;
                           std::erase_if(name, [](char c) { return c == ' ' || c == '{' || c == '}'; });
                           for (char& c : name)
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           return name;
                         });

INSTANTIATE_TEST_SUITE_P(Families, BlockSparseMaps, testing::ValuesIn(kFamilies),
                         [](const auto& test) { return to_string(test.param); });

}  // namespace
}  // namespace flashjit::test

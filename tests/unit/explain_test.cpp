// The page of `inspect --html`: which tiles it draws how, and what it says of a kernel, without a GPU.
#include "tools/parts/explain.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "autotune/inputs.hpp"
#include "support/file.hpp"
#include "tests/support/run_command.hpp"
#include "tools/parts/tile_map.hpp"

namespace flashjit::command {
namespace {

plan::ExecutionPlan plan_of(const std::string& spec, const std::string& shape, const std::string& config,
                            const char* arch = "sm_80") {
  return plan::make_plan(parse_spec(spec).normalized(), parse_shape(shape), DeviceInfo::parse(arch), {},
                         parse_config(config));
}

TileMap map_of(const plan::ExecutionPlan& plan, double density = autotune::kDefaultMapDensity) {
  return tile_map(plan, autotune::plausible_map(plan.spec, plan.shape, density));
}

std::ptrdiff_t count(const TileMap& tiles, TileKind kind) { return std::ranges::count(tiles.kinds, kind); }

TEST(TileMaps, WithoutAMaskAllIsComputed) {
  const TileMap tiles = map_of(plan_of("fwd:bf16:d64", "b1:hq2:hkv2:sq300:skv500", "sm80:br64:bc64:w4"));
  EXPECT_EQ(tiles.q_tiles, 5);
  EXPECT_EQ(tiles.kv_tiles, 8);
  EXPECT_EQ(count(tiles, TileKind::computed), 40);
}

TEST(TileMaps, ACausalMaskHasADiagonalOfMaskedTiles) {
  const TileMap tiles =
      map_of(plan_of("fwd:bf16:d64:causal", "b1:hq2:hkv2:sq512:skv1024", "sm80:br64:bc64:w4"));
  ASSERT_EQ(tiles.rows.size(), 8u);
  ASSERT_EQ(tiles.columns.size(), 16u);
  for (std::size_t row = 0; row < 8; ++row)
    for (std::size_t column = 0; column < 16; ++column)  // the last query sees the last key
      EXPECT_EQ(tiles.at(row, column), column < row + 8    ? TileKind::computed
                                       : column == row + 8 ? TileKind::masked
                                                           : TileKind::skipped)
          << row << " " << column;
}

TEST(TileMaps, AWindowSkipsOnBothSides) {
  const TileMap tiles = map_of(plan_of("fwd:bf16:d64:mask{q >= kv && q - kv < 128}",
                                       "b1:hq2:hkv2:sq1024:skv1024", "sm80:br64:bc64:w4"));
  EXPECT_EQ(tiles.at(10, 7), TileKind::skipped);
  EXPECT_EQ(tiles.at(10, 8), TileKind::masked);
  EXPECT_EQ(tiles.at(10, 9), TileKind::computed);
  EXPECT_EQ(tiles.at(10, 10), TileKind::masked);
  EXPECT_EQ(tiles.at(10, 11), TileKind::skipped);
}

TEST(TileMaps, ListsSkipWhatBoundsCannot) {
  const plan::ExecutionPlan plan = plan_of("fwd:bf16:d64:mask{q / 128 % 2 == kv / 128 % 2}",
                                           "b1:hq2:hkv2:sq1024:skv1024", "sm80:br64:bc64:w4");
  ASSERT_TRUE(plan.spec.has_tile_lists);
  const TileMap tiles = map_of(plan);
  EXPECT_EQ(count(tiles, TileKind::computed), 128);
  EXPECT_EQ(count(tiles, TileKind::skipped), 128);
}

TEST(TileMaps, OfABlockMapOnlyItsBlocksAreVisited) {
  const plan::ExecutionPlan plan =
      plan_of("fwd:bf16:d64:map128x64", "b1:hq2:hkv2:sq1024:skv1024", "sm80:br64:bc64:w4");
  const BlockPattern map = autotune::plausible_map(plan.spec, plan.shape, 0.5);
  const TileMap tiles = tile_map(plan, map);
  EXPECT_EQ(count(tiles, TileKind::computed), 2 * std::ranges::count(map.blocks, 1));
  EXPECT_EQ(count(tiles, TileKind::computed) + count(tiles, TileKind::skipped), 256);
}

TEST(TileMaps, OfVeryManyTilesSomeAreDrawn) {
  const TileMap tiles =
      map_of(plan_of("fwd:bf16:d64:causal", "b1:hq2:hkv2:sq100000:skv100000", "sm80:br64:bc64:w4"));
  EXPECT_EQ(tiles.q_tiles, 1563);
  ASSERT_EQ(tiles.rows.size(), static_cast<std::size_t>(kMostDrawn));
  EXPECT_EQ(tiles.rows.front(), 0);
  EXPECT_EQ(tiles.rows.back(), 1562);
}

TEST(TileMaps, NothingToAttendToIsNoTile) {
  const TileMap tiles = map_of(plan_of("fwd:bf16:d64", "b1:hq2:hkv2:sq64:skv0", "sm80:br64:bc64:w4"));
  EXPECT_EQ(tiles.kinds.size(), 0u);
}

bool has(const std::string& page, const std::string& text) { return page.find(text) != std::string::npos; }

class Explaining : public testing::Test {
 protected:
  test::CommandResult inspect(const std::string& more, const std::string& nvrtc) {
    return test::run_command(folder_, "inspect --html " + folder_.file("page.html") + " " + more,
                             "FLASHJIT_NVRTC=" + nvrtc);
  }
  std::string page() const { return read_file(folder_.file("page.html")); }

  test::TemporaryDirectory folder_;
};

TEST_F(Explaining, OnePageSaysWhatWasMadeAndWhy) {
  const auto done = inspect("--spec 'bf16:d128:mask{q >= kv && q - kv < 1000}' --arch sm_90a",
                            test::built(FLASHJIT_FAKE_NVRTC));
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_TRUE(has(done.out, "explains 2 kernels"));
  const std::string html = page();
  EXPECT_TRUE(html.starts_with("<!doctype html>"));
  for (const char* text :
       {"fwd:bf16:d128:mask{q &gt;= kv &amp;&amp; q - kv &lt; 1000}", "bwd:bf16:d128", "sm90:br",
        "<b>chosen</b>", "the heuristic's choice", "class='masked'", "class='skipped'", "roofline",
        "registers", "extern &quot;C&quot;", "within the mask's bounds"})
    EXPECT_TRUE(has(html, text)) << text;
  for (const char* outside : {"<script", "<link", "http:", "https:", "url("})
    EXPECT_FALSE(has(html, outside)) << outside;
}

TEST_F(Explaining, TheFamiliesSayWhyNot) {
  ASSERT_EQ(inspect("--spec fwd:fp32:d64 --arch sm_90a", test::built(FLASHJIT_FAKE_NVRTC)).code, 0);
  EXPECT_TRUE(has(page(), "<td>simt</td><td>yes, <b>chosen</b></td>"));
  EXPECT_TRUE(has(page(), "fp32"));
}

TEST_F(Explaining, WithoutACompilerThePageSaysSo) {
  const auto done = inspect("--spec fwd:bf16:d64 --arch sm_80", "/nowhere/libnvrtc.so");
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_TRUE(has(page(), "/nowhere/libnvrtc.so"));
  EXPECT_TRUE(has(page(), "<td>-</td>"));
}

TEST_F(Explaining, WhatIsNoAttentionHasNoTiles) {
  ASSERT_EQ(inspect("--spec append:bf16:d64:pages16 --arch sm_80", test::built(FLASHJIT_FAKE_NVRTC)).code, 0);
  EXPECT_FALSE(has(page(), "tiles of S,"));
  EXPECT_TRUE(has(page(), "append"));
}

TEST_F(Explaining, AStoredKernelHasNoPlan) {
  const auto refused = inspect("--key 00", test::built(FLASHJIT_FAKE_NVRTC));
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(has(refused.err, "give --spec"));
  EXPECT_EQ(inspect("--spec bf16:d64 --source", test::built(FLASHJIT_FAKE_NVRTC)).code, 2);
}

TEST_F(Explaining, EverySpecThatKernelsAreMadeForHasAPage) {
  for (const char* spec :
       {"fwd:bf16:d128:causal:pages16", "fwd:bf16:d128:causal:varlen:pages16",
        "fwd:bf16:d576x512:causal:pages64:shared_kv", "bf16:d64:causal:dropout:det",
        "fwd:bf16:d64:sinks:kvlen", "bf16:d64:map128x64", "fwd:bf16:d128:kve4m3:causal",
        "bf16:d64:mask{documents: int32 1d; documents[q] == documents[kv]}", "fwd:bf16:d128:indices"}) {
    for (const char* shape : {"b1:hq8:hkv1:sq1:skv4096", "b2:hq16:hkv2:sq700:skv900"}) {
      const auto done = inspect("--spec '" + std::string(spec) + "' --arch sm_90a --shape " + shape,
                                test::built(FLASHJIT_FAKE_NVRTC));
      EXPECT_EQ(done.code, 0) << spec << " " << shape << ": " << done.err;
    }
  }
}

}  // namespace
}  // namespace flashjit::command

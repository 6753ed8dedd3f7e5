// The candidates, which are not worth measuring, and which of the measured is taken.
#include "autotune/space.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "autotune/tuner.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "plan/tiles.hpp"
#include "tests/support/tuning_problem.hpp"

namespace flashjit::autotune {
namespace {

using namespace test;

TEST(Space, HeuristicFirstEachOnceAllAdmitted) {
  const auto device = setting().device;
  for (const char* text : {"fwd:bf16:d128:causal", "bwd:fp16:d64", "fwd:fp32:d64", "bwd:bf16:d128:det",
                           "fwd:bf16:d64:map128x128"}) {
    const Problem p{parse_spec(text).normalized(), problem().shape};
    const auto list = candidates_of(p, device);
    ASSERT_FALSE(list.empty()) << text;
    EXPECT_EQ(list.front(), plan::make_plan(p.spec, p.shape, device, {}).config) << text;
    std::set<std::string> seen;
    for (const TileConfig& config : list) {
      EXPECT_TRUE(seen.insert(to_string(config)).second) << text << " twice: " << to_string(config);
      const Support admitted = plan::traits(config.family).admits(p.spec, config, device);
      EXPECT_TRUE(admitted) << text << " " << to_string(config) << ": " << admitted.reason;
    }
  }
}

// But for those that share keys where one part of them is all there would be.
TEST(Space, EveryAdmittedConfigurationOfEveryAbleFamilyIsThere) {
  const auto list = all_candidates();
  const auto [spec, shape] = problem();
  for (const plan::FamilyTraits& traits : plan::families()) {
    if (!traits.supports(problem().spec, setting().device)) continue;
    for (const TileConfig& config : traits.search_space(problem().spec, setting().device)) {
      const bool one_part = config.split && plan::num_splits(spec, shape, config, setting().device) == 1;
      EXPECT_EQ(std::find(list.begin(), list.end(), config) == list.end(), one_part) << to_string(config);
    }
  }
  const Problem one_query{spec, {.batch = 1, .heads_q = 1, .heads_kv = 1, .seqlen_q = 1, .seqlen_kv = 9000}};
  EXPECT_TRUE(std::ranges::any_of(candidates_of(one_query, setting().device), &TileConfig::split));
}

TEST(Space, HeadsArePackedWhereSomeShareKeys) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto packs = [&](int heads_kv) {
    const Problem few{parse_spec("fwd:bf16:d128:causal").normalized(),
                      {.batch = 1, .heads_q = 8, .heads_kv = heads_kv, .seqlen_q = 4, .seqlen_kv = 9000}};
    return std::ranges::any_of(candidates_of(few, h100), &TileConfig::pack_gqa);
  };
  EXPECT_TRUE(packs(2));
  EXPECT_FALSE(packs(8));
}

TEST(Space, TwoTilesAtATimeAreForMoreTilesThanMultiprocessors) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto has_two = [&](const char* spec, int heads) {
    const Problem p{parse_spec(spec).normalized(),
                    {.batch = 1, .heads_q = heads, .heads_kv = heads, .seqlen_q = 512, .seqlen_kv = 512}};
    return std::ranges::any_of(candidates_of(p, h100), [](const TileConfig& c) { return c.warps == 16; });
  };
  EXPECT_FALSE(has_two("fwd:bf16:d64", 33));  // a block for each of 132
  EXPECT_TRUE(has_two("fwd:bf16:d64", 34));
  EXPECT_FALSE(has_two("bwd:bf16:d64", 34));
}

TEST(Space, ClustersShareKeysWhereAllRunAtOnce) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto clusters = [&](const char* spec, const char* shape) {
    std::vector<std::string> found;
    for (const TileConfig& config : candidates_of({parse_spec(spec).normalized(), parse_shape(shape)}, h100))
      if (config.cluster) found.push_back(to_string(config));
    return found;
  };
  const std::vector<std::string> one = clusters("fwd:bf16:d128:causal:cache", "b1:hq8:hkv8:sq4:skv8192");
  EXPECT_NE(std::ranges::find(one, "sm90:br64:bc128:w4:s2:split:cluster"), one.end());
  EXPECT_EQ(std::ranges::find(one, "sm90:br64:bc128:w4:s2:split:pack_gqa:cluster"), one.end());
  EXPECT_FALSE(clusters("fwd:bf16:d128:causal:cache", "b3:hq5:hkv5:sq4:skv8192").empty());
  // Heads that share K and V are one cluster's where they are packed, else several.
  const std::vector<std::string> packed = clusters("fwd:bf16:d128:causal:cache", "b1:hq32:hkv8:sq1:skv8192");
  EXPECT_NE(std::ranges::find(packed, "sm90:br64:bc128:w4:s2:split:pack_gqa:cluster"), packed.end());
  EXPECT_EQ(std::ranges::find(packed, "sm90:br64:bc128:w4:s2:split:cluster"), packed.end());
  // Too many clusters, keys of one tile, other work beside the softmax, no keys to share.
  EXPECT_TRUE(clusters("fwd:bf16:d128:causal:cache", "b2:hq8:hkv8:sq1:skv8192").empty());
  EXPECT_TRUE(clusters("fwd:bf16:d128:causal:cache", "b1:hq8:hkv8:sq1:skv64").empty());
  EXPECT_TRUE(clusters("fwd:bf16:d128:causal:cache:invariant", "b1:hq8:hkv8:sq1:skv8192").empty());
  EXPECT_TRUE(clusters("bwd:bf16:d128:causal", "b1:hq8:hkv8:sq1:skv8192").empty());
}

// Eight blocks have a part of the keys each, and nothing is combined afterwards.
TEST(Space, ClustersArePredictedByTheirParts) {
  const Problem one{parse_spec("fwd:bf16:d128:causal:cache").normalized(),
                    parse_shape("b1:hq8:hkv8:sq1:skv8192")};
  const Model model(one, DeviceInfo::parse("sm_90a"));
  const auto ms = [&](const char* config) { return model.predict(parse_config(config)).ms; };
  EXPECT_LT(ms("sm90:br64:bc128:w4:s2:split:cluster"), 0.5 * ms("sm90:br64:bc128:w4:s2"));
}

TEST(Space, ChoiceOfFamilies) {
  for (const TileConfig& config : candidates_of(problem(), setting().device, {Family::simt})) {
    EXPECT_EQ(config.family, Family::simt);
  }
}

TEST(Space, NoFamilyNamesEveryReason) {
  const Problem fp32{parse_spec("fwd:fp32:d64").normalized(), problem().shape};
  try {
    candidates_of(fp32, setting().device, {Family::sm80});
    FAIL() << "fp32 has no sm80 kernels";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(error.message().find("fwd:fp32:d64"), std::string::npos) << error.message();
    EXPECT_NE(error.message().find("sm80:"), std::string::npos) << error.message();
    EXPECT_NE(error.message().find("simt:"), std::string::npos) << error.message();
  }
}

TEST(Space, CanonicalOrderIsStrict) {
  const auto list = all_candidates();
  for (const TileConfig& a : list) {
    EXPECT_FALSE(canonical_less(a, a));
    for (const TileConfig& b : list) EXPECT_EQ(canonical_less(a, b) || canonical_less(b, a), a != b);
  }
}

TEST(Space, DisqualifiedSaysWhy) {
  const TileConfig config = all_candidates().front();
  const auto device = setting().device;
  const KernelSpec spec = problem().spec;
  EXPECT_EQ(disqualified(spec, report_with(config, 128, 0, 1024), device), "");
  EXPECT_NE(disqualified(spec, report_with(config, 128, 32, 1024), device).find("spills 32 bytes"),
            std::string::npos);
  EXPECT_NE(disqualified(spec, report_with(config, 100000, 0, 1024), device).find("registers"),
            std::string::npos);
  EXPECT_NE(disqualified(spec, report_with(config, 128, 0, 1 << 20), device).find("1048576 bytes of shared"),
            std::string::npos);
}

TEST(Space, SpillsOutsideOfTheMainLoopAreForgiven) {
  const KernelSpec spec = parse_spec("bwd:bf16:d64").normalized();
  const auto device = setting().device;
  const TileConfig config = candidates_of({spec, problem().shape}, device).front();
  KernelReport report;
  report.config = config;
  bool some_cold = false;
  for (const plan::Entry& entry : plan::traits(config.family).kernel(spec, config).entries) {
    some_cold |= !entry.hot;
    report.entries.push_back({entry.name, 64, entry.hot ? 0 : 16, 0, entry.threads});
  }
  ASSERT_TRUE(some_cold);
  EXPECT_EQ(disqualified(spec, report, device), "");
}

TEST(Pick, TheMinimum) {
  const auto list = all_candidates();
  ASSERT_GE(list.size(), 3u);
  EXPECT_EQ(pick({{list[0], 2, ""}, {list[1], 1, ""}, {list[2], 3, ""}}, list[0]), list[1]);
}

TEST(Pick, TiesByCanonicalOrderWhateverTheListsOrder) {
  auto list = all_candidates();
  std::sort(list.begin(), list.end(), canonical_less);
  ASSERT_GE(list.size(), 4u);
  const TileConfig& unmeasured = list[3];
  const plan::Timing a{list[0], 1.004, ""}, b{list[1], 1.000, ""}, c{list[2], 1.002, ""};
  EXPECT_EQ(pick({a, b, c}, unmeasured), list[0]);
  EXPECT_EQ(pick({c, b, a}, unmeasured), list[0]);
  EXPECT_EQ(pick({b, c}, unmeasured), list[1]);
  EXPECT_EQ(pick({{list[0], 1.01, ""}, b}, unmeasured), list[1]) << "1% is no noise";
}

TEST(Pick, TiesWithTheHeuristicAreItsOwn) {
  auto list = all_candidates();
  std::sort(list.begin(), list.end(), canonical_less);
  ASSERT_GE(list.size(), 3u);
  const plan::Timing a{list[0], 1.000, ""}, b{list[1], 1.001, ""}, c{list[2], 1.004, ""};
  EXPECT_EQ(pick({a, b, c}, list[2]), list[2]);
  EXPECT_EQ(pick({a, b, {list[2], 1.01, ""}}, list[2]), list[0]) << "1% is no noise";
}

TEST(Pick, NothingMeasured) {
  const TileConfig heuristic = all_candidates()[0];
  EXPECT_EQ(pick({}, heuristic), std::nullopt);
  EXPECT_EQ(pick({{heuristic, 0, "spills 4 bytes"}}, heuristic), std::nullopt);
}

}  // namespace
}  // namespace flashjit::autotune

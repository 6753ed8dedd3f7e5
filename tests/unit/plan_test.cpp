// From a spec and a shape to a plan: which configuration, why, and every refusal.
#include "plan/plan.hpp"
#include "plan/tiles.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <random>
#include <tuple>

#include "flashjit/can.hpp"
#include "plan/workspace.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit::plan {
namespace {

const DeviceInfo kA100 = DeviceInfo::parse("sm_80");
const AttentionShape kShape{2, 8, 4, 1000, 1500};

TuningRecord record(const KernelSpec& spec, const AttentionShape& shape, const TileConfig& best) {
  TuningRecord out;
  out.spec = spec;
  out.shape = shape;
  out.arch = kA100.arch;
  out.best = best;
  return out;
}

/// A configuration that is not the heuristic's.
TileConfig other_config(const KernelSpec& spec, const AttentionShape& shape) {
  const TileConfig heuristic = make_plan(spec, shape, kA100, {}).config;
  for (const TileConfig& config : traits(heuristic.family).search_space(spec, kA100)) {
    if (config != heuristic) return config;
  }
  throw Error(ErrorCode::internal, "the search space holds the heuristic's configuration only");
}

TEST(Families, BestFirst) {
  ASSERT_EQ(families().size(), 4u);
  EXPECT_EQ(families()[0].family, Family::sm90);
  EXPECT_EQ(families()[1].family, Family::sm80);
  EXPECT_EQ(families()[2].family, Family::sm75);
  EXPECT_EQ(families()[3].family, Family::simt);
  for (const FamilyTraits& family : families()) EXPECT_EQ(traits(family.family).family, family.family);
}

TEST(Families, AnUnknownFamilyIsNamed) {
  expect_in("unknown(9)", failure(ErrorCode::internal, [] { traits(static_cast<Family>(9)); }));
}

TEST(Plan, ShapesThatNoMemoryHoldsAreRefused) {
  constexpr std::int64_t kMost = 2147483647;
  for (const AttentionShape& shape :
       {AttentionShape{kMost, kMost, kMost, 2147482624, 2147482624},
        AttentionShape{459739, 2594424, 648606, 1955847304, 0}, AttentionShape{1 << 20, 1 << 20, 1, 257, 1},
        AttentionShape{1 << 20, 1 << 20, 1, 1, 257}, AttentionShape{kMost, 0, kMost, 1, 1 << 20}})
    expect_in("at most 2^48", failure(ErrorCode::invalid_argument, [&] { shape.validate(); }));
  EXPECT_NO_THROW((AttentionShape{1 << 14, 1 << 14, 1, 1 << 20, 1}.validate()));
}

/// Sums and products of sizes fit wherever validate() lets a shape pass; run with -fsanitize=undefined, too.
TEST(Plan, ShapesAtTheLimitsHaveAPlanOrARefusal) {
  std::mt19937 random(1);
  const auto one_of = [&](const auto& values) { return values[random() % std::size(values)]; };
  constexpr std::int64_t kCounts[] = {0, 1, 2, 7, 1 << 12, 1 << 20, 2147483647};
  constexpr std::int64_t kLengths[] = {0, 1, 3, 128, 1 << 17, 1 << 24, 2147482624};
  const char* const specs[] = {"fwd:fp16:d32",
                               "fwd:bf16:d128:causal",
                               "bwd:bf16:d64:det",
                               "bwd:fp32:d64:sinks",
                               "fwd:fp16:d64:varlen",
                               "bwd:bf16:d64:mask{doc: int32 2d; doc[b, q] == doc[b, kv]}",
                               "bwd:bf16:d64:det:score{t: fp32 1d grad; score + t[h]}",
                               "fwd:bf16:d64:indices",
                               "fwd:bf16:d128:map64",
                               "merge:fp16:d64"};
  int planned = 0;
  for (int i = 0; i < 1500; ++i) {
    const std::int64_t heads_kv = one_of(kCounts);
    const AttentionShape shape{one_of(kCounts),
                               std::min(heads_kv * one_of(kCounts), std::int64_t{2147483647}), heads_kv,
                               one_of(kLengths), one_of(kLengths)};
    const char *spec = one_of(specs), *arch = one_of(std::array{"sm_75", "sm_80", "sm_86", "sm_90a"});
    SCOPED_TRACE(fmt::format("{} {} {}", spec, to_string(shape), arch));
    try {
      const ExecutionPlan plan = make_plan(parse_spec(spec), shape, DeviceInfo::parse(arch), {});
      ++planned;
      for (const Launch& launch : plan.launches) {
        ASSERT_GE(launch.blocks, 0);
        ASSERT_LE(launch.blocks, 2147483647);
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::invalid_argument) << error.message();
    }
  }
  EXPECT_GT(planned, 300);
}

/// Devices with less shared memory than their architecture's common product: others' parts, or made up.
TEST(Plan, DevicesOfLittleSharedMemoryHaveAPlanThatFitsOrARefusal) {
  for (const char* arch : {"sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_120"})
    for (const int kilobytes : {16, 48, 64, 99, 164, 227}) {
      DeviceInfo device = DeviceInfo::parse(arch);
      device.shared_per_block = kilobytes * 1024;
      device.shared_per_sm = std::max(device.shared_per_block + 1024, std::min(device.shared_per_sm, 65536));
      for (const char* text :
           {"fwd:bf16:d64", "fwd:bf16:d512", "bwd:bf16:d512", "fwd:bf16:d264x344", "bwd:fp16:d576x512",
            "fwd:bf16:d128:kve4m3", "fwd:bf16:d256:causal", "bwd:bf16:d256", "fwd:fp32:d512",
            "fwd:fp16:d576x512:pages64:shared_kv", "fwd:fp16:d128:indices", "bwd:bf16:d128:indices"})
        for (const std::int64_t queries : {1, 16, 4096}) {
          SCOPED_TRACE(fmt::format("{} {} {}", arch, kilobytes, text));
          const KernelSpec spec = parse_spec(text);
          const Support support = can(spec, device);
          try {
            const ExecutionPlan plan = make_plan(spec, {1, 16, 16, queries, 4096}, device, {});
            EXPECT_GT(plan.config.br, 0);
            for (const Entry& entry : plan.entries) {
              EXPECT_LE(entry.shared_bytes, device.shared_per_block);
              EXPECT_LE(entry.min_blocks * (entry.shared_bytes + 1024), device.shared_per_sm + 1023)
                  << to_string(plan.config);
            }
            EXPECT_TRUE(support || queries != 4096) << support.reason;
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.message();
            expect_in("bytes of shared memory", error.message());
            EXPECT_TRUE(!support || queries != 4096);
          }
        }
    }
}

TEST(Plan, TheFirstAbleFamilyDoesIt) {
  const auto family = [](const char* spec, const char* arch) {
    return make_plan(parse_spec(spec), kShape, DeviceInfo::parse(arch), {}).config.family;
  };
  EXPECT_EQ(family("fwd:bf16:d128:causal", "sm_90a"), Family::sm90);
  EXPECT_EQ(family("fwd:bf16:d128:causal", "sm_90"), Family::sm80);
  EXPECT_EQ(family("bwd:bf16:d256:causal", "sm_90a"), Family::sm90);
  EXPECT_EQ(family("fwd:bf16:d128:causal", "sm_80"), Family::sm80);
  EXPECT_EQ(family("bwd:fp16:d64", "sm_90a"), Family::sm90);
  EXPECT_EQ(family("fwd:fp32:d128", "sm_80"), Family::simt);
  EXPECT_EQ(family("fwd:bf16:d128", "sm_75"), Family::simt);
}

/// One of them is all that fits a multiprocessor.
TEST(Plan, GpusOf100KilobytesTakeBlocksOfEightWarps) {
  constexpr AttentionShape kMany{4, 16, 16, 4096, 4096};
  const auto tiles = [&](const char* spec, const char* arch) {
    return to_string(make_plan(parse_spec(spec), kMany, DeviceInfo::parse(arch), {}).config);
  };
  for (const char* arch : {"sm_86", "sm_89", "sm_120"}) {
    EXPECT_EQ(tiles("fwd:bf16:d128:causal", arch), "sm80:br128:bc64:w8") << arch;
    EXPECT_EQ(tiles("bwd:bf16:d64", arch), "sm80:br64:bc128:w8") << arch;
    EXPECT_EQ(tiles("bwd:bf16:d128:causal", arch), "sm80:br32:bc128:w8") << arch;
    EXPECT_EQ(tiles("fwd:bf16:d256:map64x64", arch), "sm80:br128:bc32:w8") << arch;
  }
  EXPECT_EQ(tiles("fwd:bf16:d256:causal", "sm_86"), "sm80:br128:bc32:w8:q_in_registers");
  EXPECT_EQ(tiles("fwd:bf16:d256:causal", "sm_120"), "sm80:br128:bc32:w8");
  EXPECT_EQ(tiles("fwd:bf16:d256:causal", "sm_80"), "sm80:br128:bc64:w8");
}

TEST(Plan, TensorCoresOfTuringTakeFp16) {
  const DeviceInfo t4 = DeviceInfo::parse("sm_75");
  const auto plan = [&](const std::string& text) { return make_plan(parse_spec(text), kShape, t4, {}); };
  for (const char* rest : {"d64", "d128:causal", "d40:varlen:dropout", "d256:map64x64", "d320x264:sinks"})
    for (const char* pass : {"fwd", "bwd"}) {
      const ExecutionPlan planned = plan(fmt::format("{}:fp16:{}", pass, rest));
      EXPECT_EQ(planned.config.family, Family::sm75) << pass << ' ' << rest;
      EXPECT_LE(planned.main().shared_bytes, 64 * 1024) << pass << ' ' << rest;
    }
  EXPECT_EQ(plan("fwd:fp16:d128:kve4m3:pages16:causal").config.family, Family::sm75);
  EXPECT_EQ(plan("fwd:fp16:d576x512:shared_kv:pages64:causal").config.family, Family::sm75);
  EXPECT_EQ(plan("fwd:bf16:d64").config.family, Family::simt);
  EXPECT_EQ(plan("bwd:fp16:d512").config.family, Family::simt);  // more than 64 KB
  const auto refused = [&](const char* text) { return sm75_traits().supports(parse_spec(text), t4).reason; };
  expect_in("give fp16 tensors", refused("fwd:bf16:d64"));
  expect_in("65536 bytes of shared memory", refused("bwd:fp16:d512"));
}

/// Newer GPUs have sm80, but for tests, which name a configuration.
TEST(Plan, TensorCoresOfTuringAreForcedOnNewerGpus) {
  const KernelSpec spec = parse_spec("fwd:fp16:d64:causal");
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    EXPECT_NE(make_plan(spec, kShape, device, {}).config.family, Family::sm75) << arch;
    const TileConfig forced = parse_config("sm75:br64:bc64:w4");
    EXPECT_EQ(make_plan(spec, kShape, device, {}, forced).config, forced) << arch;
    EXPECT_TRUE(sm75_traits().search_space(spec, device).empty()) << arch;
  }
  const DeviceInfo t4 = DeviceInfo::parse("sm_75");
  EXPECT_FALSE(sm75_traits().search_space(spec, t4).empty());
  expect_in("has one stage", sm75_traits().admits(spec, parse_config("sm75:br64:bc64:w4:s2"), t4).reason);
}

TEST(Plan, DeterministicGradientsOfCapturesAreLeftToSimt) {
  const DeviceInfo hopper = DeviceInfo::parse("sm_90a");
  const auto plan = [&](const std::string& text) { return make_plan(parse_spec(text), kShape, hopper, {}); };
  const std::string rest = "bf16:d64:score{t: fp32 1d grad; score + t[kv]}";
  EXPECT_EQ(plan("bwd:" + rest).config.family, Family::sm90);
  EXPECT_EQ(plan("fwd:" + rest + ":det").config.family, Family::sm90);
  EXPECT_EQ(plan("bwd:bf16:d64:score{t: fp32 1d; score + t[kv]}:det").config.family, Family::sm90);
  const ExecutionPlan ordered = plan("bwd:" + rest + ":det");
  EXPECT_EQ(ordered.config.family, Family::simt);
  EXPECT_EQ(ordered.entries.back().name, "capture_grads");
  EXPECT_GT(ordered.launches.back().blocks, 1);
  EXPECT_TRUE(ordered.needs.semaphores);
  EXPECT_FALSE(plan("bwd:fp32:d64:score{t: fp32 1d grad; score + t[kv]}").needs.semaphores);
}

TEST(Plan, ListsAreSharedByThoseThatNothingTellsApart) {
  const auto needs = [](const std::string& text) {
    return make_plan(parse_spec(text), kShape, kA100, {}).needs;
  };
  const std::string documents = "mask{doc: int32 2d; doc[b, q] == doc[b, kv]}";
  const std::int64_t batch = kShape.batch, heads = kShape.heads_q;
  EXPECT_EQ(needs("fwd:bf16:d64:causal").list_sets, 0);
  EXPECT_EQ(needs("fwd:bf16:d64:mask{q / 8 == kv / 8}").list_sets, 1);
  EXPECT_EQ(needs("fwd:bf16:d64:" + documents).list_sets, batch);
  EXPECT_EQ(needs("fwd:bf16:d64:mask{q / 8 == kv / 8}:kvlen").list_sets, batch);
  EXPECT_EQ(needs("fwd:bf16:d64:mask{q / 8 == kv / 8}:varlen").list_sets, batch);
  EXPECT_EQ(needs("fwd:bf16:d64:mask{q / (h + 1) == kv / 8}").list_sets, heads);
  EXPECT_EQ(needs("fwd:bf16:d64:map64x64").list_sets, batch * heads);
  EXPECT_EQ(needs("bwd:bf16:d64:causal:det").list_sets, 1);
  EXPECT_EQ(needs("fwd:bf16:d64:map64x64").term_bounds, 0);
  const WorkspaceNeeds read = needs("bwd:bf16:d64:" + documents);
  EXPECT_EQ(read.term_bounds, read.list_rows + read.list_columns);
}

TEST(Plan, WhatMakesListsComesBeforeTheMainKernel) {
  const auto order = [](const char* spec, const DeviceInfo& device) {
    const ExecutionPlan plan = make_plan(parse_spec(spec), kShape, device, {});
    std::string names;
    for (const Launch& launch : plan.launches)
      names += plan.entries[launch.entry].name + (launch.when == LaunchedWhen::lists_are_made    ? "+ "
                                                  : launch.when == LaunchedWhen::lists_are_given ? "- "
                                                                                                 : " ");
    return names;
  };
  EXPECT_EQ(order("bwd:bf16:d64:mask{q % 8 == kv % 8}:det", kA100),
            "preprocess term_bounds+ tile_lists+ list_ranks+ backward convert_dq ");
  EXPECT_EQ(order("fwd:bf16:d64:mask{q % 8 == kv % 8}", kA100), "term_bounds+ tile_lists+ forward ");
  EXPECT_EQ(order("fwd:bf16:d64:mask{q / 8 == kv / 8}", kA100), "tile_lists+ forward ");
  EXPECT_EQ(order("fwd:bf16:d64:map64x64", DeviceInfo::parse("sm_90a")), "tile_lists+ reset_work- forward ");
}

TEST(Plan, HoppersBackwardPassStartsEarlyAndClearsTheLaterHeads) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto plan = [&](const char* spec, const AttentionShape& shape, const char* config) {
    return make_plan(parse_spec(spec), shape, h100, {}, parse_config(config));
  };
  const AttentionShape many{40, 8, 4, 130, 300};
  const std::int64_t blocks = h100.multiprocessors;
  const ExecutionPlan hopper = plan("bwd:bf16:d64", many, "sm90:br64:bc128:w8:s2");
  for (const Launch& launch : hopper.launches) EXPECT_TRUE(launch.early);
  EXPECT_EQ(hopper.heads_cleared, (blocks + 2) / 3 + 1);
  // A cluster of two blocks shares a KV tile.
  const ExecutionPlan clusters = plan("bwd:bf16:d256", many, "sm90:br64:bc128:w8:s1");
  EXPECT_EQ(clusters.entries[clusters.launches.back().entry].cluster, 2);
  EXPECT_EQ(clusters.heads_cleared, (blocks / 2 + 2) / 3 + 1);
  // More than L2 keeps, few heads, and no keys: the preprocess entry clears all.
  EXPECT_EQ(plan("bwd:bf16:d128", {16, 32, 8, 1024, 1024}, "sm90:br64:bc128:w8:s2").heads_cleared, 128);
  EXPECT_EQ(plan("bwd:bf16:d128", {16, 16, 16, 1024, 1024}, "sm90:br64:bc128:w8:s2").heads_cleared,
            (blocks + 7) / 8 + 1);
  EXPECT_EQ(plan("bwd:bf16:d64", {2, 8, 4, 130, 300}, "sm90:br64:bc128:w8:s2").heads_cleared, 8);
  EXPECT_EQ(plan("bwd:bf16:d64", {40, 8, 4, 130, 0}, "sm90:br64:bc128:w8:s2").heads_cleared, 160);
  const ExecutionPlan portable = plan("bwd:bf16:d64", many, "sm80:br64:bc64:w4");
  EXPECT_EQ(portable.heads_cleared, 160);
  for (const Launch& launch : portable.launches) EXPECT_FALSE(launch.early);
}

TEST(Plan, ClustersThatHaveWholeRowsNeedNoMemoryForDq) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto plan = [&](const AttentionShape& shape) {
    return make_plan(parse_spec("bwd:bf16:d128"), shape, h100, {}, parse_config("sm90:br64:bc512:w8:s2"));
  };
  const ExecutionPlan whole = plan({64, 16, 16, 900, 512}), more = plan({64, 16, 16, 900, 513});
  EXPECT_FALSE(whole.needs.dq_accum);
  EXPECT_FALSE(whole.needs.clears_dq);
  EXPECT_TRUE(more.needs.dq_accum);
  EXPECT_TRUE(more.needs.clears_dq);
  EXPECT_LT(whole.workspace.bytes, more.workspace.bytes / 40);
  EXPECT_TRUE(plan({64, 16, 16, 900, 0}).needs.dq_accum) << "without keys nobody sums up";
  for (const ExecutionPlan& of : {whole, more}) {
    EXPECT_EQ(of.entries[of.launches.back().entry].cluster, 4);
    EXPECT_EQ(of.launches.back().blocks, h100.multiprocessors / 4 * 4);
  }
}

TEST(Plan, HoldsWhatTheFamilySays) {
  for (const char* text :
       {"fwd:bf16:d128:causal", "bwd:fp16:d64:det", "bwd:fp32:d40", "fwd:bf16:d64:map64x64",
        "bwd:bf16:d64x128:map64x64:det", "fwd:fp16:d256:kvlen:dropout"}) {
    const KernelSpec spec = parse_spec(text);
    const ExecutionPlan plan = make_plan(spec, kShape, kA100, {});
    const FamilyTraits& family = traits(plan.config.family);
    const KernelPlan kernel = family.kernel(spec, plan.config);
    EXPECT_EQ(plan.config_source, ConfigSource::heuristic);
    EXPECT_EQ(plan.spec, spec);
    EXPECT_EQ(plan.shape, kShape);
    EXPECT_TRUE(family.admits(spec, plan.config, kA100)) << text;
    EXPECT_EQ(plan.entries, kernel.entries);
    EXPECT_FALSE(plan.entries.empty());
    EXPECT_EQ(plan.launches, launches_of(kernel, kShape));
    for (const Launch& launch : plan.launches) EXPECT_LT(launch.entry, plan.entries.size());
    EXPECT_EQ(plan.needs, family.workspace(kernel, kShape));
    EXPECT_EQ(plan.workspace, workspace_layout(plan.needs, spec, kShape));
    EXPECT_EQ(plan.tensor_boxes, kernel.tensor_boxes);
  }
}

/// What the portable family takes, where dQ comes a tile later (two stages) and warps work in pairs if the
/// device has the memory; small problems get tiles for all multiprocessors.
TEST(Plan, ThePortableFamilyTakesWhatFits) {
  const AttentionShape large{4, 16, 16, 4096, 4096}, small{1, 16, 16, 512, 512};
  struct Case {
    const char* arch;
    std::string spec;
    AttentionShape shape;
    const char* config;
  };
  const std::string alibi = "score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:causal";
  const std::string learned = "score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}";
  const std::string gate = "score{gate: fp32 1d grad; score * gate[h]}";
  for (const Case& c : {
           Case{"sm_90", "fwd:bf16:d128:causal", large, "sm80:br128:bc64:w4"},
           Case{"sm_90", "fwd:bf16:d96:causal", large, "sm80:br128:bc48:w4"},
           Case{"sm_90", "fwd:bf16:d128:causal", small, "sm80:br64:bc64:w4"},
           Case{"sm_90", "fwd:bf16:d64", small, "sm80:br64:bc128:w4"},
           Case{"sm_80", "fwd:bf16:d192x128", large, "sm80:br128:bc128:w8"},
           Case{"sm_80", "fwd:bf16:d160", large, "sm80:br128:bc80:w8:s2"},
           Case{"sm_80", "fwd:bf16:d192", large, "sm80:br128:bc48:w8:s2:q_in_registers"},
           Case{"sm_86", "fwd:bf16:d192", large, "sm80:br64:bc64:w4"},
           Case{"sm_90", "bwd:bf16:d64", large, "sm80:br32:bc128:w4:s2"},
           Case{"sm_90", "bwd:bf16:d64", small, "sm80:br64:bc64:w8:s2:d_split2"},
           Case{"sm_120", "bwd:bf16:d64", large, "sm80:br64:bc128:w8"},
           Case{"sm_90", "bwd:bf16:d64:" + learned, large, "sm80:br64:bc64:w4:s2"},
           Case{"sm_90", "bwd:bf16:d64:" + gate, large, "sm80:br32:bc64:w4:s2"},
           Case{"sm_90", "bwd:bf16:d128:causal", large, "sm80:br64:bc128:w8:s2:d_split2"},
           Case{"sm_90", "bwd:bf16:d128:dropout", large, "sm80:br32:bc128:w8:s2:d_split2"},
           Case{"sm_90", "bwd:bf16:d96:dropout", large, "sm80:br64:bc128:w8:s2:d_split2"},
           Case{"sm_90", "bwd:bf16:d128:causal", small, "sm80:br64:bc64:w8:s2:d_split2"},
           Case{"sm_80", "bwd:bf16:d128:" + alibi, large, "sm80:br32:bc128:w8:s2:d_split2"},
           Case{"sm_80", "bwd:bf16:d104", large, "sm80:br64:bc128:w8"},
           Case{"sm_86", "bwd:bf16:d128", large, "sm80:br32:bc128:w8"},
           Case{"sm_80", "bwd:bf16:d128:" + learned, large, "sm80:br32:bc128:w8:s2:d_split2"},
           Case{"sm_80", "bwd:bf16:d128:dropout:" + learned, large, "sm80:br32:bc128:w8"},
           Case{"sm_90", "bwd:bf16:d128:" + gate, large, "sm80:br64:bc64:w8:s2:d_split2"},
           Case{"sm_90", "bwd:bf16:d192:dropout", large, "sm80:br64:bc64:w8:s2:d_split2"},
           Case{"sm_80", "bwd:bf16:d192", large, "sm80:br32:bc64:w8:s2:d_split2"},
           Case{"sm_90", "bwd:bf16:d240", large, "sm80:br64:bc64:w8:s2:d_split2"},
           Case{"sm_80", "bwd:bf16:d256", large, "sm80:br32:bc64:w8:s2:d_split2"},
           Case{"sm_86", "bwd:bf16:d256", large, "sm80:br16:bc64:w8:d_split2"},
           Case{"sm_80", "fwd:bf16:d320x256", large, "sm80:br64:bc64:w4"},
           Case{"sm_90", "fwd:bf16:d512", large, "sm80:br64:bc64:w8:d_split4"},
           Case{"sm_80", "fwd:bf16:d576x512", large, "sm80:br64:bc32:w8:d_split2"},
           Case{"sm_86", "fwd:bf16:d512", large, "sm80:br32:bc16:w4:d_split2"},
           Case{"sm_90", "bwd:bf16:d512", large, "sm80:br64:bc32:w8:d_split4"},
           Case{"sm_90a", "bwd:bf16:d512", large, "sm90:br64:bc64:w8:s2"},
           Case{"sm_90a", "bwd:bf16:d416x384", large, "sm90:br64:bc64:w8"},
           Case{"sm_90a", "bwd:bf16:d320x256", large, "sm90:br64:bc128:w8:s2"},
           Case{"sm_90a", "bwd:bf16:d320x256:map64x64", large, "sm90:br64:bc64:w8:s2"},
           Case{"sm_90a", "bwd:bf16:d320x256:fp32_grads", large, "sm90:br64:bc64:w8:s2"},
           Case{"sm_90a", "bwd:bf16:d320x256", {1, 8, 1, 4096, 1024}, "sm90:br64:bc64:w8:s2:split"},
           Case{"sm_90a", "bwd:bf16:d576x512", large, "sm80:br64:bc32:w8:d_split4"},
           Case{"sm_80", "bwd:bf16:d576x512", large, "sm80:br32:bc32:w8:d_split4"},
           Case{"sm_86", "bwd:bf16:d512", large, "sm80:br16:bc16:w4:d_split4"},
       }) {
    const DeviceInfo device = DeviceInfo::parse(c.arch);
    EXPECT_EQ(to_string(make_plan(parse_spec(c.spec), c.shape, device, {}).config), c.config)
        << c.arch << ' ' << c.spec;
  }
}

/// Also within the 100 KB of shared memory that small GPUs have.
TEST(Plan, EveryWideHeadDimensionHasTilesOnTensorCores) {
  std::vector<std::string> dims;
  for (int d = 264; d <= 576; d += 8)
    dims.push_back(d <= 512 ? fmt::format("d{}", d) : fmt::format("d{}x512", d));
  for (const char* more : {"d320x256", "d576x8", "d8x512", "d576x264"}) dims.emplace_back(more);
  for (const char* arch : {"sm_80", "sm_86", "sm_90", "sm_120"})
    for (const std::string& of : dims)
      for (const char* pass : {"fwd", "bwd"}) {
        const KernelSpec spec = parse_spec(fmt::format("{}:bf16:{}", pass, of));
        const DeviceInfo device = DeviceInfo::parse(arch);
        const TileConfig config = make_plan(spec, kShape, device, {}).config;
        EXPECT_EQ(config.family, Family::sm80) << arch << ' ' << to_string(spec);
        EXPECT_TRUE(sm80_traits().admits(spec, config, device)) << arch << ' ' << to_string(spec);
      }
}

TEST(Plan, FamiliesRefuseElementTypesThatTheyLack) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  for (const FamilyTraits* family : {&sm90_traits(), &sm80_traits()})
    EXPECT_EQ(family->supports(parse_spec("fwd:fp32:d64"), h100).reason,
              "its kernels take fp16 and bf16, the spec has fp32");
  EXPECT_EQ(make_plan(parse_spec("fwd:fp32:d64"), kShape, h100, {}).config.family, Family::simt);
}

TEST(Plan, TheSpecIsNormalized) {
  const ExecutionPlan plan =
      make_plan({{.head_dim = 64, .reproducible = {.deterministic = true}}}, kShape, kA100, {});
  EXPECT_EQ(plan.spec.head_dim_v, 64);
  EXPECT_FALSE(plan.spec.reproducible.deterministic);
}

TEST(Plan, OneQueryOfGroupedHeadsIsATileOfTheirQueries) {
  const AttentionShape shape{2, 8, 2, 1, 1000}, packed{2, 2, 2, 4, 1000};
  const auto problem = [](const char* spec, const AttentionShape& given) {
    return fold_gqa(parse_spec(spec), given);
  };
  for (const char* spec :
       {"fwd:bf16:d128", "fwd:bf16:d128:causal", "fwd:bf16:d128:kvlen", "fwd:bf16:d128:causal:kvlen:det"}) {
    const Problem made = problem(spec, shape), again = fold_gqa(made.spec, made.shape);
    EXPECT_EQ(made.shape, packed) << spec;
    EXPECT_TRUE(made.spec.mask.empty()) << spec;
    EXPECT_EQ(made.spec.kv, parse_spec(spec).kv);
    EXPECT_EQ(again.shape, packed) << spec;
  }
  for (const char* spec :
       {"bwd:bf16:d128", "fwd:bf16:d128:causal_top_left", "fwd:bf16:d128:dropout", "fwd:bf16:d128:sinks",
        "fwd:bf16:d128:map64x64", "fwd:bf16:d128:score{score * to_float(h)}", "fwd:bf16:d128:mask{kv > h}"})
    EXPECT_EQ(problem(spec, shape).shape, shape) << spec;
  for (const AttentionShape& other :
       {AttentionShape{2, 8, 8, 1, 1000}, AttentionShape{2, 8, 2, 2, 1000}, AttentionShape{2, 0, 0, 1, 1000}})
    EXPECT_EQ(problem("fwd:bf16:d128", other).shape, other) << to_string(other);
  const ExecutionPlan plan = make_plan(parse_spec("fwd:bf16:d128:causal"), shape, kA100, {});
  EXPECT_EQ(plan.shape, packed);
  EXPECT_TRUE(plan.fold_gqa);
  EXPECT_EQ(plan.launches.front().blocks, 4 * plan.needs.num_splits);  // a KV head of a batch entry each
}

TEST(Plan, BlocksShareTheKeysOfFewQueries) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto planned = [&](const char* spec, const char* shape, const DeviceInfo& device = kA100) {
    return make_plan(parse_spec(spec), parse_shape(shape), device, {});
  };
  // 8 heads of keys, 132 multiprocessors: 16 blocks each.
  const ExecutionPlan one = planned("fwd:bf16:d128:sinks", "b1:hq8:hkv8:sq1:skv8192", h100);
  EXPECT_EQ(to_string(one.config), "sm90:br64:bc128:w4:s2:split");
  EXPECT_EQ(one.needs.num_splits, 16);
  ASSERT_EQ(one.launches.size(), 2u);
  EXPECT_EQ(one.launches[0].blocks, 8 * 16);
  EXPECT_EQ(one.entries[one.launches[1].entry].name, "combine");
  EXPECT_EQ(one.launches[1].blocks, 8);
  EXPECT_TRUE(one.launches[1].early);
  EXPECT_GE(one.workspace.bytes, 8u * 16 * (128 + 1) * 4);
  // No more parts than tiles of keys, also where a configuration that shares them is given.
  const KernelSpec plain = parse_spec("fwd:bf16:d128").normalized();
  EXPECT_EQ(num_splits(plain, parse_shape("b1:hq1:hkv1:sq1:skv1000"), one.config, h100), 8);
  EXPECT_EQ(num_splits(plain, parse_shape("b64:hq8:hkv8:sq1:skv8192"), one.config, h100), 1);
  EXPECT_EQ(num_splits(plain, parse_shape("b0:hq8:hkv8:sq1:skv0"), one.config, h100), 1);
  // Where a block has few keys, or all multiprocessors have a block, nothing is joined.
  for (const char* shape :
       {"b1:hq8:hkv8:sq1:skv512", "b16:hq8:hkv8:sq1:skv8192", "b1:hq16:hkv16:sq1024:skv1024"})
    EXPECT_EQ(planned("fwd:bf16:d128", shape, h100).needs.num_splits, 0) << shape;
  EXPECT_EQ(planned("bwd:bf16:d128", "b1:hq8:hkv8:sq1:skv8192", h100).needs.num_splits, 0);
  // Two blocks for each of 108.
  const ExecutionPlan on_a100 = planned("fwd:bf16:d64:causal", "b2:hq32:hkv4:sq1:skv4096");
  EXPECT_TRUE(on_a100.config.split);
  EXPECT_EQ(on_a100.needs.num_splits, 108 * 2 / 8);
  EXPECT_FALSE(on_a100.launches.back().early);
}

TEST(Plan, PartsOfInvariantCallsFollowFromTheKeys) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto planned = [&](const char* spec, const std::string& shape) {
    return make_plan(parse_spec(spec), parse_shape(shape), h100, {});
  };
  const char* spec = "fwd:bf16:d64:causal:cache:invariant";
  const std::vector<std::pair<int, int>> parts = {{100, 1},  {2048, 1}, {2049, 2}, {4096, 2},
                                                  {4097, 5}, {8192, 8}, {8193, 8}, {131072, 64}};
  for (const auto& [keys, count] : parts)
    EXPECT_EQ(planned(spec, fmt::format("b4:hq64:hkv8:sq4:skv{}", keys)).needs.num_splits, count) << keys;
  // No counter of work tiles, and nothing to combine where all sequences have one part.
  const ExecutionPlan many = planned(spec, "b4:hq64:hkv8:sq4:skv4096"),
                      one = planned(spec, "b4:hq64:hkv8:sq4:skv2048");
  ASSERT_EQ(many.launches.size(), 2u);
  EXPECT_EQ(many.entries[many.launches[1].entry].name, "combine");
  EXPECT_GT(many.launches[1].blocks, 0);
  EXPECT_EQ(one.launches[1].blocks, 0);
  EXPECT_FALSE(many.needs.semaphores);
  EXPECT_EQ(
      planned("fwd:bf16:d64:causal:cache:invariant:row_max", "b4:hq64:hkv8:sq4:skv4096").launches.size(), 3u);
  // Tiles of fewer rows have as many keys, on which the bits depend.
  for (const char* any : {spec, "fwd:bf16:d128:causal:cache:invariant",
                          "fwd:bf16:d192:causal:cache:invariant", "fwd:bf16:d256:causal:cache:invariant"}) {
    const TileConfig few = planned(any, "b4:hq64:hkv8:sq4:skv4096").config,
                     more = planned(any, "b4:hq64:hkv8:sq16:skv4096").config;
    EXPECT_EQ(few.bc, more.bc) << any;
    EXPECT_LE(few.br, more.br) << any;
  }
  EXPECT_EQ(many.config.br, 64);
  EXPECT_EQ(planned(spec, "b4:hq64:hkv8:sq16:skv4096").config.br, 128);
}

TEST(Plan, OneTileOfKeysLeavesNothingToCombine) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto combining = [&](const char* spec, const char* shape) {
    const ExecutionPlan plan = make_plan(parse_spec(spec), parse_shape(shape), h100, {});
    EXPECT_TRUE(plan.entries[plan.launches.back().entry].name.starts_with("combine")) << spec;
    return plan.launches.back().blocks;
  };
  EXPECT_EQ(combining("fwd:bf16:d64:causal:pages16", "b2:hq4:hkv4:sq1:skv128"), 0);
  EXPECT_GT(combining("fwd:bf16:d64:causal:pages16", "b2:hq4:hkv4:sq1:skv129"), 0);
  EXPECT_GT(combining("fwd:bf16:d64:causal:varlen:pages16:shared_prefix", "b2:hq4:hkv4:sq1:skv128"),
            0);  // rows of both passes
}

TEST(Plan, OneTileOfKeysNeedsNoMemoryForParts) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto bytes = [&](const char* spec, const char* shape) {
    return make_plan(parse_spec(spec), parse_shape(shape), h100, {}).workspace.bytes;
  };
  EXPECT_EQ(bytes("fwd:bf16:d64:causal:pages16", "b2:hq4:hkv4:sq1:skv128"), 0u);
  EXPECT_GT(bytes("fwd:bf16:d64:causal:pages16", "b2:hq4:hkv4:sq1:skv129"), 0u);
  EXPECT_EQ(bytes("fwd:bf16:d128:causal:cache:invariant", "b8:hq8:hkv1:sq1:skv64"), 0u);
}

TEST(Plan, OneQueryOfOneSequenceIsJoinedInClusters) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto planned = [&](const char* spec, const char* shape) {
    return make_plan(parse_spec(spec), parse_shape(shape), h100, {});
  };
  const ExecutionPlan one = planned("fwd:bf16:d128:causal:cache", "b1:hq32:hkv8:sq1:skv8192");
  EXPECT_EQ(to_string(one.config), "sm90:br64:bc128:w4:s2:split:cluster");
  ASSERT_EQ(one.launches.size(), 1u);
  EXPECT_EQ(one.launches[0].blocks, 8 * 8);
  EXPECT_TRUE(one.launches[0].early);
  EXPECT_EQ(one.workspace.bytes, 0u);
  // Too long, too few heads, too many, several sequences, queries of their own, other work beside the
  // softmax.
  for (const char* shape :
       {"b1:hq32:hkv8:sq1:skv32768", "b1:hq16:hkv4:sq1:skv8192", "b1:hq32:hkv16:sq1:skv8192",
        "b2:hq32:hkv8:sq1:skv8192", "b1:hq32:hkv8:sq2:skv8192"})
    EXPECT_FALSE(planned("fwd:bf16:d128:causal:cache", shape).config.cluster) << shape;
  for (const char* spec : {"fwd:bf16:d128:causal:cache:invariant", "fwd:bf16:d128:causal:cache:row_max",
                           "fwd:bf16:d128:kve4m3:causal:cache", "fwd:bf16:d128:causal:pages1"})
    EXPECT_FALSE(planned(spec, "b1:hq32:hkv8:sq1:skv8192").config.cluster) << spec;
  const auto admitted = [&](const char* spec, const char* config) {
    return traits(Family::sm90).admits(AnalysedSpec(parse_spec(spec)), parse_config(config), h100);
  };
  EXPECT_TRUE(admitted("fwd:bf16:d128:causal:sinks", "sm90:br64:bc128:w4:s2:split:pack_gqa:cluster"));
  for (const char* config : {"sm90:br128:bc128:w8:s2:split:cluster", "sm90:br64:bc128:w4:s2:cluster"})
    EXPECT_NE(admitted("fwd:bf16:d128", config).reason.find("cluster is for"), std::string::npos) << config;
}

// One KV head of a Llama 70B in eight parts has 32 KV tiles of 4k tokens: a quarter of the multiprocessors.
TEST(Plan, BlocksShareTheQueriesOfFewKvTiles) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto planned = [&](const char* spec, const char* shape, const DeviceInfo& device) {
    return make_plan(parse_spec(spec), parse_shape(shape), device, {});
  };
  const ExecutionPlan llama = planned("bwd:bf16:d128:causal", "b1:hq8:hkv1:sq4096:skv4096", h100);
  EXPECT_EQ(to_string(llama.config), "sm90:br64:bc128:w8:s2:split");
  EXPECT_EQ(llama.needs.num_splits, 8);
  ASSERT_EQ(llama.launches.size(), 3u);
  EXPECT_EQ(llama.launches[1].blocks, 132);
  EXPECT_EQ(llama.entries[llama.launches[2].entry].name, "combine_dkdv");
  EXPECT_EQ(llama.launches[2].blocks, 4096 / 8);
  EXPECT_TRUE(llama.launches[2].early);
  EXPECT_GE(llama.workspace.dv_splits - llama.workspace.dk_splits, 8u * 4096 * 128 * 4);
  EXPECT_EQ(llama.workspace.o_splits, llama.workspace.lse_splits) << "no parts of the keys";

  // Within a few percent of the best that was measured, on an H100. Nothing is split where combining would
  // take longer than what is gained.
  const std::tuple<int, const char*, const char*> cases[] = {
      {11, "bwd:bf16:d128:causal", "b1:hq8:hkv1:sq2048:skv2048"},
      {8, "bwd:bf16:d128:causal", "b1:hq8:hkv1:sq8192:skv8192"},
      {4, "bwd:bf16:d128", "b1:hq8:hkv1:sq4096:skv4096"},
      {3, "bwd:bf16:d128:causal", "b1:hq32:hkv8:sq1024:skv1024"},
      {4, "bwd:bf16:d128:causal", "b1:hq8:hkv2:sq4096:skv4096"},
      {6, "bwd:bf16:d256:causal", "b1:hq8:hkv1:sq4096:skv4096"},
      {6, "bwd:bf16:d128:causal", "b1:hq16:hkv4:sq1024:skv1024"},
      {4, "bwd:bf16:d128", "b1:hq16:hkv4:sq1024:skv1024"},
      {4, "bwd:bf16:d128", "b1:hq16:hkv16:sq4096:skv256"},
      {0, "bwd:bf16:d128", "b1:hq60:hkv60:sq4096:skv256"},
      {0, "bwd:bf16:d128:causal", "b1:hq32:hkv8:sq4096:skv4096"},
      {8, "bwd:bf16:d64:causal", "b1:hq8:hkv1:sq4096:skv4096"},
      {0, "bwd:bf16:d128", "b1:hq16:hkv16:sq512:skv512"},
      {0, "bwd:bf16:d128:causal", "b1:hq16:hkv16:sq1024:skv1024"},
      {0, "bwd:bf16:d128", "b1:hq8:hkv8:sq1024:skv1024"},  // would take as long, and twice the memory
      {0, "bwd:bf16:d128:causal", "b1:hq8:hkv8:sq2048:skv2048"},
      {0, "bwd:bf16:d256", "b1:hq4:hkv4:sq2048:skv2048"},
      {0, "bwd:bf16:d128:causal", "b8:hq32:hkv8:sq4096:skv4096"},
      {8, "bwd:bf16:d128:causal:varlen", "b1:hq8:hkv1:sq4096:skv4096"},
      {0, "bwd:bf16:d128", "b1:hq8:hkv1:sq4096:skv0"},
      {0, "bwd:bf16:d128", "b1:hq8:hkv1:sq0:skv4096"},
      {0, "bwd:bf16:d128", "b0:hq8:hkv1:sq4096:skv4096"},
  };
  for (const auto& [parts, spec, shape] : cases)
    EXPECT_EQ(planned(spec, shape, h100).needs.num_splits, parts) << spec << " " << shape;
  // The portable family likewise; it has no persistent blocks.
  const ExecutionPlan on_a100 = planned("bwd:bf16:d128:causal", "b1:hq8:hkv1:sq4096:skv4096", kA100);
  EXPECT_TRUE(on_a100.config.split) << to_string(on_a100.config);
  EXPECT_EQ(on_a100.launches[1].blocks, 4096 / on_a100.config.bc * on_a100.needs.num_splits);
}

// With few heads each of which a cluster has all keys of, nothing runs before the main entry, and nothing is
// counted.
TEST(Plan, ClustersFindRowStatsWhereAllRunAtOnce) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto planned = [&](const char* spec, const char* shape, const char* config) {
    return make_plan(parse_spec(spec), parse_shape(shape), h100, {}, parse_config(config));
  };
  const std::tuple<bool, const char*, const char*, const char*> cases[] = {
      {true, "bwd:bf16:d64", "b1:hq16:hkv16:sq512:skv512", "sm90:br128:bc512:w8:s2"},
      {true, "bwd:bf16:d128:causal", "b8:hq16:hkv8:sq256:skv256", "sm90:br64:bc256:w8:s2"},
      {false, "bwd:bf16:d64", "b3:hq16:hkv16:sq512:skv512", "sm90:br128:bc512:w8:s2"},  // two rounds
      {false, "bwd:bf16:d64", "b1:hq16:hkv4:sq512:skv512", "sm90:br128:bc512:w8:s2"},   // too many rows
      {false, "bwd:bf16:d64", "b1:hq16:hkv16:sq512:skv600", "sm90:br128:bc512:w8:s2"},  // dQ is added up
      {false, "bwd:bf16:d64:sinks", "b1:hq16:hkv16:sq512:skv512", "sm90:br128:bc512:w8:s2"},
      {false, "bwd:bf16:d64:varlen", "b1:hq16:hkv16:sq512:skv512", "sm90:br128:bc512:w8:s2"},
      {false, "bwd:bf16:d64:dropout", "b1:hq16:hkv16:sq512:skv512", "sm90:br128:bc512:w8:s2"},
      {false, "bwd:bf16:d64", "b1:hq16:hkv16:sq512:skv512", "sm90:br128:bc128:w8:s2"},
  };
  for (const auto& [alone, spec, shape, config] : cases) {
    const ExecutionPlan plan = planned(spec, shape, config);
    EXPECT_EQ(plan.launches.front().blocks == 0, alone) << spec << " " << shape;
    EXPECT_EQ(plan.needs.semaphores, !alone) << spec << " " << shape;
    if (alone) {
      EXPECT_EQ(main_launch(plan, plan.launches).blocks,
                plan.shape.batch * plan.shape.heads_kv * plan.main().cluster);
    }
  }
}

// A causal head's first KV tiles take longest: those of the last round of heads come first of all of these.
TEST(Plan, TheLastHeadsAreMixedUnderACausalMask) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto planned = [&](const char* spec, const char* shape) {
    return make_plan(parse_spec(spec), parse_shape(shape), h100, {}, parse_config("sm90:br64:bc128:w8:s2"));
  };
  const std::tuple<int, const char*, const char*> cases[] = {
      {8, "bwd:bf16:d128:causal", "b1:hq16:hkv16:sq2048:skv2048"},
      {4, "bwd:bf16:d128:causal_top_left", "b4:hq16:hkv16:sq4096:skv4096"},
      {1, "bwd:bf16:d128:causal", "b1:hq16:hkv16:sq16384:skv16384"},
      {2, "bwd:bf16:d256:causal", "b1:hq16:hkv16:sq4096:skv4096"},  // clusters of two blocks
      {16, "bwd:bf16:d128:causal", "b1:hq16:hkv16:sq1024:skv1024"},
      {0, "bwd:bf16:d128:causal", "b16:hq16:hkv16:sq1024:skv1024"},  // many rounds of short heads
      {0, "bwd:bf16:d128:causal", "b1:hq16:hkv16:sq65536:skv65536"},
      {0, "bwd:bf16:d128:causal:det", "b1:hq16:hkv16:sq2048:skv2048"},
      {0, "bwd:bf16:d128:causal:map128x128", "b1:hq16:hkv16:sq2048:skv2048"},
      {0, "bwd:bf16:d128", "b1:hq16:hkv16:sq2048:skv2048"},
      {0, "bwd:bf16:d128:causal", "b0:hq16:hkv16:sq2048:skv2048"},
      {0, "bwd:bf16:d128:causal", "b1:hq16:hkv16:sq2048:skv0"},
  };
  for (const auto& [heads, spec, shape] : cases)
    EXPECT_EQ(planned(spec, shape).lpt_heads, heads) << spec << " " << shape;
  // Zeros are there for all of them when the first is begun: by the preprocess entry, or as blocks go on.
  EXPECT_EQ(planned("bwd:bf16:d128:causal", "b1:hq12:hkv12:sq2048:skv2048").heads_cleared, 12);
  EXPECT_EQ(planned("bwd:bf16:d128:causal", "b4:hq16:hkv16:sq2048:skv2048").heads_cleared, 10);
}

TEST(Plan, BackwardOfHopperReadsLseInBothUnitsWithoutAScore) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto needs = [&](const char* spec, const char* config) {
    return make_plan(parse_spec(spec), {2, 4, 4, 300, 300}, h100, {}, parse_config(config)).needs.lse_log2;
  };
  for (const char* spec : {"bwd:bf16:d64", "bwd:bf16:d128:causal:varlen:det", "bwd:fp16:d256:dropout"})
    EXPECT_TRUE(needs(spec, "sm90:br64:bc128:w8:s2")) << spec;
  EXPECT_FALSE(needs("bwd:bf16:d64:score{2.0 * score}", "sm90:br64:bc128:w8:s2"));
  EXPECT_FALSE(needs("bwd:bf16:d256:map128x128", "sm90:br64:bc128:w8:s2"));
  EXPECT_FALSE(needs("fwd:bf16:d64", "sm90:br128:bc128:w8:s2"));
  EXPECT_FALSE(needs("bwd:bf16:d64", "sm80:br64:bc64:w4:s1"));
}

TEST(Plan, RecordsOfSharedTilesDoNotServeShapesWithoutParts) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const KernelSpec spec = parse_spec("bwd:bf16:d128:causal").normalized();
  for (const auto& [shape, source] : {std::pair("b1:hq8:hkv1:sq4096:skv4096", ConfigSource::tuned),
                                      std::pair("b8:hq32:hkv8:sq4096:skv4096", ConfigSource::heuristic)}) {
    TuningRecords records;
    TuningRecord of_shape = record(spec, parse_shape(shape), parse_config("sm90:br64:bc128:w8:s2:split"));
    of_shape.arch = h100.arch;
    records.add(of_shape);
    EXPECT_EQ(make_plan(spec, parse_shape(shape), h100, records).config_source, source) << shape;
  }
}

TEST(Plan, PartsOfQueriesAreRefusedWithAReason) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto reason = [&](const char* spec, const char* config) {
    const TileConfig tile = parse_config(config);
    return traits(tile.family).admits(parse_spec(spec).normalized(), tile, h100).reason;
  };
  EXPECT_NE(reason("bwd:bf16:d128", "sm90:br64:bc256:w8:s2:split").find("clusters"), std::string::npos);
  EXPECT_NE(reason("bwd:bf16:d128", "sm90:br64:bc128:w8:s2:split:pack_gqa").find("forward"),
            std::string::npos);
}

TEST(Plan, HeadsOfKvMayHaveNoHeadsOfQ) {
  for (const char* spec : {"bwd:bf16:d128", "bwd:bf16:d64:causal", "bwd:fp32:d64", "fwd:bf16:d128:causal"})
    for (const char* shape : {"b1000:hq0:hkv1:sq1000:skv1000", "b1:hq0:hkv8:sq1:skv4096"})
      for (const char* arch : {"sm_90a", "sm_80"})
        EXPECT_EQ(make_plan(parse_spec(spec), parse_shape(shape), DeviceInfo::parse(arch), {}).shape.heads_q,
                  0);
}

TEST(Plan, TilesWithTooFewWarpsAreRefusedWithAReason) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto reason = [&](const char* spec, const char* config) {
    const TileConfig tile = parse_config(config);
    return traits(tile.family).admits(parse_spec(spec).normalized(), tile, h100).reason;
  };
  EXPECT_NE(reason("bwd:bf16:d72", "sm80:br128:bc16:w1").find("1 warps copy LSE and D of 64 rows"),
            std::string::npos);
  EXPECT_EQ(reason("bwd:bf16:d8", "sm80:br64:bc16:w1"), "");
  EXPECT_NE(reason("fwd:bf16:d128", "sm90:br32:bc176:w4").find("4 warps compute 64 rows"), std::string::npos);
}

TEST(Plan, DecodesCopyFewRowsAtATimeAndJoinCutTilesInOneWave) {
  const auto planned = [](const char* spec) {
    return make_plan(parse_spec(spec), parse_shape("b8:hq32:hkv8:sq16:skv8192"), DeviceInfo::parse("sm_90a"),
                     {}, std::nullopt);
  };
  const ExecutionPlan plain = planned("fwd:bf16:d128:causal:cache");
  ASSERT_TRUE(plain.schedule.stream_k && plain.tensor_boxes);
  EXPECT_EQ(plain.tensor_boxes->kv_rows, 16);
  EXPECT_EQ(plain.launches[1].blocks, 132 * 4);
  EXPECT_EQ(planned("fwd:bf16:d128:causal:pages24").tensor_boxes->kv_rows, 8);
  const ExecutionPlan fixed_parts = planned("fwd:bf16:d128:causal:cache:invariant");
  EXPECT_EQ(fixed_parts.tensor_boxes->kv_rows, 16);
  EXPECT_EQ(fixed_parts.launches[1].blocks, 8 * 32 * 16 / 16);  // 16 rows a block
  // A row of 128 bytes is a slice.
  EXPECT_EQ(planned("fwd:bf16:d64:causal:cache").tensor_boxes->kv_rows, 128);
}

TEST(Plan, FewQueriesOfGroupedHeadsAreOneTile) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto planned = [&](const char* spec, const char* shape, const char* config = "") {
    const std::optional<TileConfig> given =
        *config ? std::optional(parse_config(config)) : std::optional<TileConfig>();
    return make_plan(parse_spec(spec), parse_shape(shape), h100, {}, given);
  };
  // 16 queries of 4 heads: 64 rows, of each of 8 heads of K and V.
  const ExecutionPlan few = planned("fwd:bf16:d128:causal", "b1:hq32:hkv8:sq16:skv32768");
  EXPECT_EQ(to_string(few.config), "sm90:br64:bc128:w4:s2:split:pack_gqa");
  EXPECT_EQ(few.needs.num_splits, 132 / 8);
  EXPECT_EQ(few.launches[0].blocks, 8 * 16);
  EXPECT_EQ(few.launches[1].blocks, 32 * 16);  // rows that are joined
  ASSERT_TRUE(few.tensor_boxes);
  EXPECT_TRUE(few.tensor_boxes->pack_gqa);
  // Also where there are tiles for all multiprocessors: K and V are read once all the same.
  EXPECT_TRUE(planned("fwd:bf16:d128:causal", "b64:hq32:hkv8:sq4:skv4096").config.pack_gqa);
  // 21 queries of 3 heads a warpgroup; of 65 heads two sets of 33 and 32.
  const char* two_groups = "sm90:br128:bc64:w8:s2:split:pack_gqa";
  EXPECT_EQ(planned("fwd:bf16:d64", "b1:hq6:hkv2:sq43:skv64", two_groups).launches[0].blocks, 2 * 2);
  EXPECT_EQ(planned("fwd:bf16:d64", "b1:hq65:hkv1:sq2:skv64", two_groups).launches[0].blocks, 2);
  EXPECT_EQ(planned("fwd:bf16:d64", "b1:hq0:hkv0:sq2:skv64", two_groups).launches[0].blocks, 0);
  // Not where rows fill tiles anyway, keys are few, or no heads share any.
  for (const char* shape :
       {"b4:hq32:hkv8:sq4096:skv4096", "b1:hq32:hkv8:sq16:skv256", "b1:hq8:hkv8:sq16:skv32768"})
    EXPECT_FALSE(planned("fwd:bf16:d128:causal", shape).config.pack_gqa) << shape;
  const auto refused = [&](const char* spec, const char* config, const char* reason) {
    const Support support = sm90_traits().admits(parse_spec(spec).normalized(), parse_config(config), h100);
    EXPECT_NE(support.reason.find(reason), std::string::npos) << spec << ": " << support.reason;
  };
  refused("fwd:bf16:d128", "sm90:br64:bc128:w4:s2:pack_gqa", "give split, too");
  for (const char* spec :
       {"fwd:bf16:d128:score{score * to_float(h)}", "fwd:bf16:d128:mask{kv > h}", "fwd:bf16:d128:dropout",
        "fwd:bf16:d128:map64x64", "fwd:bf16:d128:mask{doc: int32 1d; doc[q] == doc[kv]}",
        "fwd:bf16:d128:score{bias: bf16 2d; score + bias[q, kv]}"})
    refused(spec, "sm90:br64:bc128:w4:s2:split:pack_gqa", "are alike");
  EXPECT_FALSE(sm80_traits().admits(parse_spec("fwd:bf16:d128").normalized(),
                                    parse_config("sm80:br64:bc64:w4:s2:split:pack_gqa"), kA100));
}

TEST(Plan, WhatReadsListsStartsBeforeTheyAreMade) {
  const auto early = [](const char* spec, const DeviceInfo& device) {
    std::vector<bool> all;
    for (const Launch& l :
         make_plan(parse_spec(spec), parse_shape("b2:hq4:hkv4:sq512:skv512"), device, {}).launches)
      all.push_back(l.early);
    return all;
  };
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a"), a100 = DeviceInfo::parse("sm_80");
  const char* documents = "fwd:bf16:d64:mask{doc: int32 1d; doc[q] == doc[kv]}";
  // term_bounds, tile_lists or reset_work, forward.
  EXPECT_EQ(early(documents, h100), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(early(documents, a100), (std::vector<bool>{false, false, false}));
  EXPECT_EQ(early("fwd:bf16:d64:map128x128", h100), (std::vector<bool>{false, false, true}));
  EXPECT_EQ(early("fwd:bf16:d64:causal", h100), (std::vector<bool>{false}));
}

TEST(Plan, ZeroSizesArePlanned) {
  for (const char* text : {"fwd:bf16:d64", "bwd:bf16:d64:det", "bwd:fp32:d64", "fwd:bf16:d64:map64x64",
                           "bwd:bf16:d64:map64x64:det"}) {
    for (const AttentionShape& shape :
         {AttentionShape{}, AttentionShape{0, 4, 2, 8, 8}, AttentionShape{1, 0, 0, 8, 8},
          AttentionShape{1, 4, 4, 0, 8}, AttentionShape{1, 4, 4, 8, 0}}) {
      const ExecutionPlan plan = make_plan(parse_spec(text), shape, kA100, {});
      for (const Launch& launch : plan.launches)
        EXPECT_GE(launch.blocks, 0) << text << " " << to_string(shape);
    }
  }
}

TEST(Plan, GivenBeforeTunedBeforeNearBeforeHeuristic) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64");
  const AttentionShape near{2, 8, 4, 1000, 1600};
  const TileConfig heuristic = make_plan(spec, kShape, kA100, {}).config;
  const TileConfig tuned = other_config(spec, kShape);

  TuningRecords records;
  EXPECT_EQ(make_plan(spec, kShape, kA100, records).config_source, ConfigSource::heuristic);
  records.add(record(spec, near, tuned));
  ExecutionPlan plan = make_plan(spec, kShape, kA100, records);
  EXPECT_EQ(plan.config, tuned);
  EXPECT_EQ(plan.config_source, ConfigSource::tuned_near);
  EXPECT_EQ(make_plan(spec, near, kA100, records).config_source, ConfigSource::tuned);

  plan = make_plan(spec, near, kA100, records, heuristic);
  EXPECT_EQ(plan.config, heuristic);
  EXPECT_EQ(plan.config_source, ConfigSource::given);
}

TEST(Plan, RecordsThatAreNotAdmittedArePassedOver) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64");
  const AttentionShape near{2, 8, 4, 1000, 1600};
  const TileConfig tuned = other_config(spec, kShape);
  TileConfig impossible = tuned;
  impossible.br = 1023;

  TuningRecords records;
  records.add(record(spec, kShape, impossible));
  ExecutionPlan plan = make_plan(spec, kShape, kA100, records);
  EXPECT_EQ(plan.config_source, ConfigSource::heuristic);
  records.add(record(spec, near, tuned));
  plan = make_plan(spec, kShape, kA100, records);
  EXPECT_EQ(plan.config, tuned);
  EXPECT_EQ(plan.config_source, ConfigSource::tuned_near);
}

TEST(Plan, RecordsOfAFamilyThatCannotArePassedOver) {
  const KernelSpec spec = parse_spec("fwd:fp32:d64");
  TuningRecords records;
  records.add(record(spec, kShape, parse_config("sm80:br128:bc64:w4:s2")));
  EXPECT_EQ(make_plan(spec, kShape, kA100, records).config.family, Family::simt);
}

TEST(Plan, AGivenConfigurationThatIsNotAdmittedIsRefused) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64");
  for (const char* text : {"sm80:br17:bc64:w4", "sm80:br256:bc256:w1:s4", "simt:br1000:bc1000:w32"}) {
    const std::string message =
        failure(ErrorCode::invalid_argument, [&] { make_plan(spec, kShape, kA100, {}, parse_config(text)); });
    expect_in(std::string("the configuration ") + text + " cannot do fwd:bf16:d64 on sm_80", message);
  }
  expect_in("cannot do fwd:fp32:d64 on sm_80", failure(ErrorCode::invalid_argument, [&] {
              make_plan(parse_spec("fwd:fp32:d64"), kShape, kA100, {}, parse_config("sm80:br128:bc64:w4:s2"));
            }));
}

TEST(Plan, ADeviceThatIsTooOldGetsEveryFamilysReason) {
  DeviceInfo old = DeviceInfo::parse("sm_75");
  old.name = old.arch = "sm_70";
  old.compute_capability = 70;
  const KernelSpec spec = parse_spec("fwd:bf16:d64");
  const std::string message = failure(ErrorCode::unsupported, [&] { make_plan(spec, kShape, old, {}); });
  expect_in("no kernel family can do fwd:bf16:d64 on sm_70", message);
  expect_in("sm90: ", message);
  expect_in("sm80: ", message);
  expect_in("simt: ", message);
}

TEST(Plan, WrongSpecsAndShapesAreRefused) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64");
  expect_in("head_dim is 300",
            failure(ErrorCode::invalid_argument, [] { make_plan({{.head_dim = 300}}, kShape, kA100, {}); }));
  expect_in("heads_q is 3 and heads_kv is 2", failure(ErrorCode::invalid_argument, [&] {
              make_plan(spec, {1, 3, 2, 8, 8}, kA100, {});
            }));
}

TEST(Plan, MoreBlocksThanAGridTakesAreRefused) {
  const AttentionShape huge{1 << 20, 1 << 10, 1 << 10, 4096, 4096};
  const std::string message =
      failure(ErrorCode::invalid_argument, [&] { make_plan(parse_spec("fwd:bf16:d64"), huge, kA100, {}); });
  expect_in(to_string(huge), message);
  expect_in("2147483647 are allowed", message);
}

// With a look at each tile these took from 2 to 40 seconds.
TEST(Plan, TheLongestSequencesArePlannedAtOnce) {
  constexpr std::int64_t kLongest = 2147482624;
  const std::vector<AttentionShape> shapes = {
      {1, 32, 8, kLongest, kLongest}, {1, 1, 1, kLongest, 1}, {1, 2147483647, 2147483647, 1, 100}};
  for (const char* spec :
       {"fwd:bf16:d128:causal", "bwd:bf16:d128:causal", "fwd:bf16:d128:causal:varlen:pages16"})
    for (const char* arch : {"sm_80", "sm_90a"})
      for (const AttentionShape& shape : shapes) {
        const auto begin = std::chrono::steady_clock::now();
        try {
          make_plan(parse_spec(spec), shape, DeviceInfo::parse(arch), {});
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::invalid_argument);  // too many blocks for a grid
        }
        // A loop over the tiles would take minutes; a busy machine takes a second.
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10))
            << spec << " " << arch << " " << to_string(shape);
      }
}

TEST(Plan, EverySearchSpaceIsAdmitted) {
  for (const char* arch : {"sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    for (const char* text : {"fwd:bf16:d8", "fwd:fp16:d128:causal", "bwd:bf16:d256", "bwd:fp32:d256x8",
                             "fwd:fp32:d40", "bwd:fp16:d96x104:det:map16x256"}) {
      const KernelSpec spec = parse_spec(text);
      ASSERT_TRUE(can(spec, device)) << text << " " << arch;
      for (const FamilyTraits& family : families()) {
        if (!family.supports(spec, device)) continue;
        const TileConfig heuristic = family.heuristic(spec, kShape, device);
        EXPECT_TRUE(family.admits(spec, heuristic, device))
            << to_string(heuristic) << " for " << text << " on " << arch << ": "
            << family.admits(spec, heuristic, device).reason;
        const std::vector<TileConfig> space = family.search_space(spec, device);
        const bool is_for_tests = family.family == Family::sm75 && device.compute_capability > 75;
        EXPECT_EQ(space.empty(), is_for_tests) << text << " " << arch;
        for (const TileConfig& config : space) {
          const Support admitted = family.admits(spec, config, device);
          EXPECT_TRUE(admitted) << to_string(config) << " for " << text << " on " << arch << ": "
                                << admitted.reason;
          EXPECT_EQ(parse_config(to_string(config)), config);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashjit::plan

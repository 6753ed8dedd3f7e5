// Family sm90 without a GPU: what it refuses and why, its tiles, and the text that is rendered for it alone.
#include <gtest/gtest.h>

#include <string>

#include "plan/plan.hpp"
#include "plan/sm90.hpp"
#include "plan/wgmma.hpp"
#include "render/render.hpp"
#include "templates/sm90/layout.cuh"
#include "tests/support/expectations.hpp"
#include "tests/support/planned_constant.hpp"

namespace flashjit::plan {
namespace {

const DeviceInfo kH100 = DeviceInfo::parse("sm_90a");
const AttentionShape kLarge = parse_shape("b4:hq32:hkv8:sq4096:skv4096");
const AttentionShape kSmall = parse_shape("b1:hq2:hkv1:sq100:skv130");

const FamilyTraits& family() { return sm90_traits(); }

std::string refusal(const std::string& spec, const DeviceInfo& device = kH100) {
  return family().supports(parse_spec(spec), device).reason;
}

/// The heuristic's configuration.
std::string chosen(const std::string& spec, const std::string& shape) {
  return to_string(family().heuristic(parse_spec(spec), parse_shape(shape), kH100));
}

std::string refusal_of_config(const std::string& config, const std::string& spec = "fwd:bf16:d64") {
  return family().admits(parse_spec(spec), parse_config(config), kH100).reason;
}

TEST(Sm90, DoesMostOnHopper) {
  for (const char* spec :
       {"fwd:bf16:d128", "fwd:fp16:d8:causal", "fwd:bf16:d256:causal_top_left", "fwd:fp16:d192x128",
        "fwd:bf16:d72x40", "fwd:bf16:d256:causal:dropout:kvlen:map64x64",
        "bwd:bf16:d128:causal:dropout:kvlen", "bwd:bf16:d256:causal:dropout:map64x64:det",
        "bwd:fp16:d192x128:varlen:sinks", "bwd:fp16:d72x40:causal:kvlen:map32x32:det",
        "bwd:bf16:d64:causal:dropout:kvlen:map64x64:det"})
    EXPECT_EQ(refusal(spec), "") << spec;
}

TEST(Sm90, RefusesTheRestWithItsReason) {
  expect_in("fp32", refusal("fwd:fp32:d128"));
  for (const char* arch : {"sm_80", "sm_90", "sm_100a", "sm_120"}) {
    const std::string reason = refusal("fwd:bf16:d128", DeviceInfo::parse(arch));
    expect_in("sm_90a", reason);
    expect_in(std::string("the device is ") + arch, reason);
  }
}

TEST(Sm90, TilesAreRowsOfWarpGroups) {
  EXPECT_EQ(refusal_of_config("sm90:br192:bc128:w12:s2"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc16:w4"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc224:w4:s2", "fwd:bf16:d64"), "");
  expect_in("12 warps compute 192 rows, of one Q tile or, with 8 or 16, of two, Br is 128",
            refusal_of_config("sm90:br128:bc64:w12:s2"));
  expect_in("warps is 4, 8, 12 or 16, not 20", refusal_of_config("sm90:br320:bc64:w20:s2"));
  expect_in("not 264", refusal_of_config("sm90:br64:bc264:w4:s2"));
  expect_in("not 72", refusal_of_config("sm90:br64:bc72:w4:s2"));
  expect_in("stages is 1 to 4, not 5", refusal_of_config("sm90:br64:bc64:w4:s5"));
  EXPECT_EQ(refusal_of_config("sm90:br64:bc64:w4:s2:min_blocks3", "fwd:bf16:d64"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc128:w4:s2:min_blocks2", "fwd:bf16:d64"), "");
  expect_in("keeps 104 values a thread, 96 fit",
            refusal_of_config("sm90:br64:bc96:w4:s2:min_blocks3", "fwd:bf16:d64"));
  expect_in("keeps 80 values a thread, 72 fit",
            refusal_of_config("sm90:br128:bc64:w8:s2:min_blocks2", "fwd:bf16:d64"));
  expect_in("bytes of shared memory a block",
            refusal_of_config("sm90:br64:bc64:w4:s3:min_blocks2", "fwd:bf16:d128"));
  // Two Q tiles at a time.
  EXPECT_EQ(refusal_of_config("sm90:br128:bc64:w16:s3"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc128:w8:s2"), "");
  EXPECT_EQ(refusal_of_config("sm90:br128:bc64:w16:s2", "fwd:bf16:d64:map128x128:varlen"), "");
  expect_in("keeps 92 values a thread, 80 fit", refusal_of_config("sm90:br128:bc80:w16:s2"));
  for (const char* spec : {"fwd:bf16:d64:causal:kvlen", "fwd:bf16:d64:varlen"})
    expect_in("blocks that take one after the other", refusal_of_config("sm90:br128:bc64:w16:s2", spec));
  expect_in("not for split keys", refusal_of_config("sm90:br128:bc64:w16:s2:split"));
  expect_in("no warp to find what the score reads of the keys",
            refusal_of_config("sm90:br128:bc64:w16:s3", "fwd:bf16:d64:score{w: fp32 1d; score + w[kv]}"));
  expect_in("min_blocks is 1 to 3, in the backward pass 1, not 4",
            refusal_of_config("sm90:br64:bc64:w4:s2:min_blocks4"));
  expect_in("in the backward pass 1, not 2",
            refusal_of_config("sm90:br64:bc128:w8:s2:min_blocks2", "bwd:bf16:d128"));
  EXPECT_EQ(refusal_of_config("sm90:br64:bc128:w4:s2:split"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc128:w8:s2:split", "bwd:bf16:d128"), "");
  expect_in("not for this family", refusal_of_config("sm90:br64:bc64:w4:q_in_registers"));
  expect_in("d_split is 1", refusal_of_config("sm90:br64:bc64:w8:d_split2"));
  expect_in("not for this family", refusal_of_config("sm90:br64:bc64:w8:d_split2", "bwd:bf16:d128"));
  expect_in("share 64 rows", refusal_of_config("sm90:br128:bc64:w8:s2", "fwd:bf16:d264"));
  EXPECT_EQ(refusal_of_config("sm90:br64:bc64:w8:d_split2", "fwd:bf16:d576x512"), "");
  EXPECT_EQ(refusal_of_config("sm90:br128:bc64:w8:s2", "fwd:bf16:d320x256"), "");
  expect_in("another family", refusal_of_config("sm80:br64:bc64:w4"));
  EXPECT_EQ(refusal_of_config("sm90:br64:bc128:w8:s2", "bwd:bf16:d128"), "");
  EXPECT_EQ(refusal_of_config("sm90:br128:bc128:w8:s2", "bwd:bf16:d64"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc64:w8:s2", "bwd:bf16:d256"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc128:w8:s2", "bwd:bf16:d256"), "");
  EXPECT_EQ(refusal_of_config("sm90:br64:bc128:w8:s2", "bwd:bf16:d320x256"), "");
  for (const char* spec : {"bwd:bf16:d328x256", "bwd:bf16:d264", "bwd:bf16:d320x256:fp32_grads"})
    expect_in("or 128 where K has up to 320 and V up to 256, without split and gradients in fp32",
              refusal_of_config("sm90:br64:bc128:w8:s2", spec));
  EXPECT_NE(refusal_of_config("sm90:br64:bc128:w8:s2:split", "bwd:bf16:d320x256"), "");
  for (const char* config : {"sm90:br64:bc96:w8:s2", "sm90:br128:bc64:w8:s2"})
    expect_in("Bc 64 or 128, and Br 64", refusal_of_config(config, "bwd:bf16:d136"));
  EXPECT_EQ(refusal_of_config("sm90:br64:bc64:w8:s2", "bwd:bf16:d64"), "");
  expect_in("with Bc 128 up to head dimension 128",
            refusal_of_config("sm90:br128:bc64:w8:s2", "bwd:bf16:d64"));
  expect_in("bytes of shared memory", refusal_of_config("sm90:br128:bc128:w8:s1", "bwd:bf16:d128"));
}

TEST(Sm90, ClustersSumUpDqOfMoreKeys) {
  for (const char* config : {"sm90:br64:bc256:w8:s2", "sm90:br64:bc512:w8:s2"})
    for (const char* spec :
         {"bwd:bf16:d128:causal:dropout", "bwd:fp16:d72x40:kvlen", "bwd:bf16:d64:varlen:sinks"})
      EXPECT_EQ(refusal_of_config(config, spec), "") << spec;
  EXPECT_EQ(refusal_of_config("sm90:br128:bc512:w8:s2", "bwd:bf16:d64"), "");
  expect_in("up to 128 columns", refusal_of_config("sm90:br64:bc256:w8:s2", "bwd:bf16:d136"));
  for (const char* config : {"sm90:br64:bc384:w8:s2", "sm90:br64:bc1024:w8:s2", "sm90:br192:bc256:w8:s2"})
    expect_in("above 128 Bc is 256 or 512, with 8 warps and Br 64 or 128",
              refusal_of_config(config, "bwd:bf16:d128"));
  for (const char* rest : {":det", ":map128x128", ":score{w: fp32 1d grad; score + w[kv]}"})
    expect_in("without lists of tiles, ordered additions and gradients",
              refusal_of_config("sm90:br64:bc256:w8:s2", std::string("bwd:bf16:d128") + rest));
  expect_in("bytes of shared memory", refusal_of_config("sm90:br64:bc256:w8:s3", "bwd:bf16:d128"));
}

TEST(Sm90, TilesFitSharedMemory) {
  expect_in("bytes of shared memory", refusal_of_config("sm90:br128:bc96:w8:s2", "fwd:bf16:d256"));
  EXPECT_EQ(refusal_of_config("sm90:br128:bc80:w8:s2", "fwd:bf16:d256"), "");
}

TEST(Sm90, TilesFitRegisters) {
  // Bc/2 + head_dim_v/2 + Bc/4.
  EXPECT_EQ(refusal_of_config("sm90:br128:bc176:w8", "fwd:bf16:d128"), "");
  expect_in("keeps 220 values a thread, 200 fit", refusal_of_config("sm90:br128:bc208:w8", "fwd:bf16:d128"));
  EXPECT_EQ(refusal_of_config("sm90:br192:bc128:w12", "fwd:bf16:d64"), "");
  expect_in("keeps 132 values a thread, 128 fit", refusal_of_config("sm90:br192:bc128:w12", "fwd:bf16:d72"));
}

TEST(Sm90, TheHeuristicIsAdmittedForEveryHeadDimension) {
  for (int d = 8; d <= 256; d += 8) {
    for (int dv = 8; dv <= 256; dv += 8) {
      KernelSpec biased{{.head_dim = d, .head_dim_v = dv}};
      biased.score = ScoreProgram("bias: bf16 2d; score + bias[q, kv]");
      KernelSpec gated{{.head_dim = d, .head_dim_v = dv}, Pass::backward};
      gated.score = ScoreProgram("f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])");
      for (const KernelSpec& spec : {KernelSpec{{.head_dim = d, .head_dim_v = dv}}, biased, gated}) {
        for (const AttentionShape& shape : {kLarge, kSmall}) {
          const TileConfig config = family().heuristic(spec, shape, kH100);
          const Support admitted = family().admits(spec, config, kH100);
          ASSERT_TRUE(admitted) << to_string(spec) << " " << admitted.reason;
        }
        ASSERT_FALSE(family().search_space(spec, kH100).empty()) << to_string(spec);
      }
    }
  }
}

TEST(Sm90, TheHeuristicFillsTheDevice) {
  const auto chosen = [](const char* spec, const AttentionShape& shape) {
    return to_string(family().heuristic(parse_spec(spec), shape, kH100));
  };
  EXPECT_EQ(chosen("fwd:bf16:d64", kLarge), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("fwd:bf16:d128", kLarge), "sm90:br192:bc80:w12:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128:dropout", kLarge), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d64:dropout", kLarge), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("fwd:bf16:d64:dropout:causal", kLarge), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d64:score{bias: bf16 2d; score + bias[q, kv]}", kLarge),
            "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d192x128", kLarge), "sm90:br192:bc80:w12:s2");
  EXPECT_EQ(chosen("fwd:bf16:d256", kLarge), "sm90:br128:bc80:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:causal", kLarge), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:dropout", kLarge), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:map128x128", kLarge), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:map64x128", kLarge), "sm90:br64:bc128:w8:s2");
  // Blocks of 64 keys have lists of their own, and so has each warpgroup.
  EXPECT_EQ(chosen("bwd:bf16:d64:map64x64", kLarge), "sm90:br64:bc64:w4:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:map64x64:dropout", kLarge), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128:map64x64", kLarge), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:score{slopes: fp32 1d; score + slopes[h]}", kLarge),
            "sm90:br128:bc128:w8:s2");
  // Row terms are in shared memory, but their gradients take registers.
  EXPECT_EQ(chosen("bwd:bf16:d64:score{f: fp32 2d; score + (f[h, q] - f[h, kv])}", kLarge),
            "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:score{f: fp32 2d grad; score + (f[h, q] - f[h, kv])}", kLarge),
            "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:mask{doc: int32 1d; doc[q] == doc[kv]}", kLarge), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:mask{keep: bool 2d; keep[q, kv]}", kLarge), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", kLarge), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d256", kLarge), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d256:map64x64", kLarge), "sm90:br64:bc64:w8:s2");
  const AttentionShape half = parse_shape("b1:hq16:hkv16:sq512:skv320");  // 80 tiles of 64 keys
  EXPECT_EQ(chosen("bwd:bf16:d128", half), "sm90:br64:bc64:w8:s3");
  EXPECT_EQ(chosen("bwd:bf16:d64", half), "sm90:br64:bc64:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d256", half), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", parse_shape("b1:hq16:hkv16:sq512:skv640")), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128", parse_shape("b1:hq4:hkv4:sq1000:skv1000")), "sm90:br64:bc128:w4:s2");
}

TEST(Sm90, TheHeuristicGivesShortRowsToClusters) {
  const char* short_rows = "b64:hq16:hkv16:sq256:skv256";
  EXPECT_EQ(chosen("bwd:bf16:d128", short_rows), "sm90:br64:bc256:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:causal:dropout", short_rows), "sm90:br128:bc256:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128:kvlen", "b64:hq16:hkv4:sq900:skv100"), "sm90:br64:bc256:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128:causal:varlen", short_rows), "sm90:br64:bc256:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128", short_rows), "sm90:br128:bc128:w8:s2");
  // What such clusters cannot do, and what has no room next to the partial dQ.
  for (const char* spec : {"bwd:bf16:d128:det", "bwd:bf16:d128:map128x128",
                           "bwd:bf16:d128:score{bias: bf16 2d; score + bias[q, kv]}"})
    EXPECT_EQ(chosen(spec, short_rows), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d256", short_rows), "sm90:br64:bc128:w8:s2");
  // Few heads; and few keys, of which 64 columns leave one block without any.
  EXPECT_EQ(chosen("bwd:bf16:d128", "b1:hq16:hkv16:sq256:skv256"), "sm90:br64:bc256:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b1:hq16:hkv16:sq128:skv128"), "sm90:br64:bc64:w8:s3");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b256:hq16:hkv16:sq64:skv64"), "sm90:br64:bc256:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64", "b256:hq32:hkv32:sq64:skv64"), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64", "b256:hq32:hkv32:sq65:skv65"), "sm90:br128:bc256:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:varlen", "b256:hq32:hkv32:sq128:skv128"), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:varlen", "b256:hq32:hkv32:sq129:skv129"), "sm90:br128:bc256:w8:s2");
  // Four blocks: 120 of 132 multiprocessors at a time.
  EXPECT_EQ(chosen("bwd:bf16:d64", "b1:hq16:hkv16:sq512:skv512"), "sm90:br128:bc512:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64", "b1:hq8:hkv8:sq512:skv384"), "sm90:br128:bc512:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64:causal", "b1:hq16:hkv16:sq512:skv512"), "sm90:br64:bc64:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b1:hq30:hkv30:sq512:skv512"), "sm90:br64:bc512:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b1:hq8:hkv8:sq512:skv512"), "sm90:br64:bc64:w8:s3");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b1:hq31:hkv31:sq512:skv512"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b32:hq16:hkv16:sq512:skv512"), "sm90:br64:bc512:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64", "b32:hq32:hkv32:sq512:skv512"), "sm90:br128:bc512:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128:causal", "b32:hq16:hkv16:sq512:skv512"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128:varlen", "b32:hq16:hkv16:sq512:skv512"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128:kvlen", "b32:hq16:hkv16:sq512:skv512"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d48", "b32:hq32:hkv32:sq512:skv512"), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b32:hq16:hkv16:sq512:skv384"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d64", "b32:hq32:hkv32:sq512:skv448"), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b8:hq16:hkv16:sq512:skv512"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b32:hq16:hkv16:sq513:skv513"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("bwd:bf16:d128", "b32:hq16:hkv16:sq513:skv0"), "sm90:br64:bc64:w8:s3");
}

constexpr const char* kTwoTiles = "sm90:br128:bc64:w16:s3";
constexpr const char* kTwoListedTiles = "sm90:br128:bc64:w16:s4";

// What tests/compile found to spill: 128 keys beside 128 columns.
TEST(Sm90, SmallPagesWithScalesOfTheirOwnHaveFewerKeys) {
  // So few queries that no Q tile would decode what another one did.
  const auto keys = [](const char* spec) {
    return family().heuristic(parse_spec(spec), parse_shape("b64:hq32:hkv32:sq128:skv4096"), kH100).bc;
  };
  for (const char* spec : {"fwd:bf16:d128:kv{e2m1:g16:e4m3:apart:scaled}:causal:pages16",
                           "fwd:bf16:d128:kv{int4:g32:fp16:apart:zero}:pages16"})
    EXPECT_EQ(keys(spec), 112) << spec;
  for (const char* spec :
       {"fwd:bf16:d128:kv{e2m1:g16:e4m3:apart:scaled}", "fwd:bf16:d96:kv{e2m1:g16:e4m3:apart:scaled}:pages16",
        "fwd:bf16:d128:kv{e2m1:g16:e4m3:apart:scaled}:pages64", "fwd:bf16:d128:kv{nvfp4}:pages16"})
    EXPECT_EQ(keys(spec), 128) << spec;
}

TEST(Sm90, TheHeuristicKnowsWhatCausalTilesCost) {
  // One cluster has both tiles of a head.
  EXPECT_EQ(chosen("fwd:bf16:d64:causal", "b64:hq32:hkv32:sq256:skv256"), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d64:causal", "b32:hq32:hkv32:sq512:skv512"), "sm90:br128:bc64:w16:s3");
  EXPECT_EQ(chosen("fwd:bf16:d192:causal", "b85:hq10:hkv10:sq192:skv192"), "sm90:br128:bc80:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d256:causal", "b85:hq8:hkv8:sq192:skv192"), "sm90:br128:bc64:w8:s2");
  // Three groups have smaller KV tiles, which counts where rows are short.
  EXPECT_EQ(chosen("fwd:bf16:d128:causal", "b10:hq16:hkv16:sq1536:skv1536"), "sm90:br128:bc128:w8:s2");
  // Tiles of 192 rows end 11% after an even share, of 128 rows 0.2%; with 12 heads of 4k it is 192 that end
  // together.
  EXPECT_EQ(chosen("fwd:bf16:d128:causal", "b1:hq8:hkv1:sq8192:skv8192"), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d96:causal", "b1:hq16:hkv16:sq4096:skv4096"), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d64:causal", "b1:hq16:hkv16:sq4096:skv4096"), "sm90:br128:bc64:w16:s3");
  EXPECT_EQ(chosen("fwd:bf16:d128:causal", "b1:hq12:hkv12:sq4096:skv4096"), "sm90:br192:bc80:w12:s2");
}

TEST(Sm90, TheHeuristicCountsRounds) {
  const std::string one_group = "sm90:br64:bc128:w4:s2", two_groups = "sm90:br128:bc128:w8:s2";
  // 128 blocks for 132 multiprocessors: twice as many of half the size would take two rounds.
  EXPECT_EQ(chosen("fwd:bf16:d128", "b1:hq16:hkv16:sq1024:skv1024"), two_groups);
  EXPECT_EQ(chosen("fwd:bf16:d128", "b1:hq16:hkv16:sq768:skv768"), two_groups);
  // Two rounds of 192 rows take longer than two of 128.
  EXPECT_EQ(chosen("fwd:bf16:d128", "b1:hq16:hkv16:sq2048:skv2048"), two_groups);
  // 256 tiles, two at a time, are one round.
  EXPECT_EQ(chosen("fwd:bf16:d64", "b1:hq32:hkv32:sq1024:skv1024"), kTwoTiles);
  // Under a causal mask the longest tile decides while there is about a round.
  EXPECT_EQ(chosen("fwd:bf16:d128:causal", "b1:hq16:hkv16:sq1024:skv1024"), one_group);
  EXPECT_EQ(chosen("fwd:bf16:d256:causal", "b1:hq8:hkv4:sq2048:skv2048"), "sm90:br64:bc64:w4:s2");
  EXPECT_EQ(chosen("fwd:bf16:d64:causal", "b1:hq16:hkv16:sq2048:skv2048"), two_groups);
}

TEST(Sm90, WeightsThatKeepLittleHaveASoftmaxsTiles) {
  const auto chosen = [](const std::string& dim, const std::string& program) {
    const std::string spec = "bwd:bf16:d" + dim + ":score{" + program + "}:weight_mod";
    return to_string(family().heuristic(parse_spec(spec), kLarge, kH100));
  };
  for (const char* program : {"sigmoid(score - 4.0)", "score * sigmoid(score) / to_float(seqlen_kv)"}) {
    EXPECT_EQ(chosen("64", program), "sm90:br128:bc128:w8:s2") << program;
    EXPECT_EQ(chosen("128", program), "sm90:br64:bc128:w8:s2") << program;
  }
  EXPECT_EQ(chosen("64", "score * sigmoid(score * 1.702)"), "sm90:br64:bc128:w8:s2");
  EXPECT_EQ(chosen("128", "score * sigmoid(score * 1.702)"), "sm90:br64:bc64:w8:s2");
}

TEST(Sm90, MasksHaveTilesOfTheirOwn) {
  const auto chosen = [](const std::string& mask) {
    return to_string(family().heuristic(parse_spec("fwd:bf16:d64:" + mask), kLarge, kH100));
  };
  EXPECT_EQ(chosen("mask{q >= kv && q - kv < 2048}"), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("mask{q >= kv && q - kv < 300}"), kTwoTiles);
  EXPECT_EQ(chosen("mask{q >= kv || kv < 2000}"), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("mask{doc: int32 1d; doc[q] == doc[kv]}"), "sm90:br64:bc64:w4:s2:min_blocks3");
  EXPECT_EQ(chosen("mask{valid: bool 2d; q >= kv && valid[b, kv]}"), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("mask{valid: bool 2d; valid[b, kv]}:map128x128"), "sm90:br64:bc64:w4:s2:min_blocks3");
  EXPECT_EQ(chosen("mask{q / 128 % 2 == kv / 128 % 2}"), kTwoListedTiles);
  // Tiles of 192 rows reach over blocks of 128; not over blocks of 8 or 64.
  EXPECT_EQ(chosen("mask{((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0}"), kTwoListedTiles);
  EXPECT_EQ(chosen("mask{kv / 8 <= q / 8}"), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("mask{q / 64 == kv / 64}"), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("map128x128"), kTwoListedTiles);
  EXPECT_EQ(chosen("map64x128"), "sm90:br192:bc128:w12:s4");
  EXPECT_EQ(chosen("map128x64"), kTwoListedTiles);
  EXPECT_EQ(chosen("map64x64"), "sm90:br64:bc64:w4:s2:min_blocks3");
  EXPECT_EQ(chosen("map128x128:dropout"), "sm90:br64:bc128:w4:s2:min_blocks2");
  const auto of_shape = [](const char* shape) {
    return to_string(family().heuristic(parse_spec("fwd:bf16:d64:map128x128"), parse_shape(shape), kH100));
  };
  EXPECT_EQ(of_shape("b2:hq16:hkv16:sq4096:skv4096"), kTwoListedTiles);
  EXPECT_EQ(of_shape("b1:hq16:hkv16:sq1024:skv1024"), "sm90:br64:bc128:w4:s2:min_blocks2");
}

// Of longer tiles pairs with queries of other blocks would be computed in vain.
TEST(Sm90, KvTilesReachAcrossNoBlockOf64Keys) {
  const auto chosen = [](const std::string& spec, const char* shape) {
    return to_string(family().heuristic(parse_spec(spec), parse_shape(shape), kH100));
  };
  const char *many = "b1:hq8:hkv8:sq32768:skv32768", *few = "b1:hq2:hkv2:sq64:skv32768";
  for (const char* rest :
       {"", ":causal", ":dropout", ":varlen", ":mask{sizes: int32 1d; kv % 64 < sizes[kv / 64]}"})
    EXPECT_EQ(chosen("fwd:bf16:d128:map64x64" + std::string(rest), many), "sm90:br64:bc64:w4:s2:min_blocks2")
        << rest;
  EXPECT_EQ(chosen("fwd:bf16:d96:map128x192", many), "sm90:br64:bc64:w4:s2:min_blocks2");
  EXPECT_EQ(chosen("fwd:bf16:d128:map64x64:score{k: fp32 1d; score + k[kv]}", many), "sm90:br128:bc64:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128:map64x128", many), "sm90:br128:bc128:w8:s2");
  EXPECT_NE(chosen("fwd:bf16:d128:map64x64", few).find(":bc64:w4:s2:split"), std::string::npos);
}

TEST(Sm90, SmallTilesOfBlocksHoldQInRegisters) {
  const auto holds = [](const char* spec, const char* config) {
    return test::planned_constant(parse_spec(spec), parse_config(config), "kHoldsQ");
  };
  EXPECT_EQ(holds("fwd:bf16:d128:map64x64", "sm90:br64:bc64:w4:s2:min_blocks2"), 1);
  EXPECT_EQ(holds("fwd:fp16:d72:map16x16:dropout", "sm90:br64:bc64:w4:s2:min_blocks2"), 1);
  EXPECT_EQ(holds("fwd:bf16:d64:map64x64", "sm90:br64:bc64:w4:s2:min_blocks3"), 0);
  EXPECT_EQ(holds("fwd:bf16:d128:map64x64:skip_softmax", "sm90:br64:bc64:w4:s2:min_blocks2"), 0);
  EXPECT_EQ(holds("fwd:bf16:d128:map64x64", "sm90:br128:bc64:w8:s4"), 0);
  EXPECT_EQ(holds("fwd:bf16:d64:map128x128", "sm90:br64:bc128:w4:s2:min_blocks2"), 0);
  EXPECT_EQ(holds("fwd:bf16:d64", "sm90:br64:bc64:w4:s2:min_blocks3"), 0);
}

TEST(Sm90, ListsTellWarpGroupsApartWhereBlocksDivideIntoTheirRows) {
  const auto rows = [](const char* spec, const char* config) {
    return test::planned_constant(parse_spec(spec), parse_config(config), "kListedRows");
  };
  EXPECT_EQ(rows("fwd:bf16:d64:map128x128", "sm90:br192:bc128:w12:s4"), 64);
  EXPECT_EQ(rows("fwd:bf16:d64:map64x256", "sm90:br128:bc128:w8:s2"), 64);
  EXPECT_EQ(rows("fwd:bf16:d64:map192x128", "sm90:br192:bc128:w12:s4"), 192);
  EXPECT_EQ(rows("fwd:bf16:d64:map128x64", "sm90:br192:bc128:w12:s4"), 192);
  EXPECT_EQ(rows("fwd:bf16:d64:map32x128", "sm90:br192:bc128:w12:s4"), 192);
  EXPECT_EQ(rows("fwd:bf16:d64:map64x64", "sm90:br128:bc64:w16:s4"), 128);
  EXPECT_EQ(rows("fwd:bf16:d64:map64x128", "sm90:br128:bc128:w8:s1"), 128);
  EXPECT_EQ(rows("bwd:bf16:d64:map64x128", "sm90:br128:bc128:w8:s2"), 128);
  EXPECT_EQ(rows("fwd:bf16:d64:map64x128", "sm80:br128:bc128:w8:s2"), 128);
  for (const char* rest : {":kvlen", ":varlen", ":causal", ":score{bias: bf16 2d; score + bias[q, kv]}",
                           ":score{bias: fp32 1d; score + bias[kv]}"})
    EXPECT_EQ(rows(("fwd:bf16:d64:map128x128" + std::string(rest)).c_str(), "sm90:br192:bc128:w12:s4"), 192)
        << rest;
}

TEST(Sm90, TheHeuristicComputesFewPairsInVain) {
  const auto chosen = [](const char* spec, int length) {
    const AttentionShape shape{
        .batch = 32, .heads_q = 16, .heads_kv = 16, .seqlen_q = length, .seqlen_kv = length};
    return to_string(family().heuristic(parse_spec(spec), shape, kH100));
  };
  EXPECT_EQ(chosen("fwd:bf16:d64", 512), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("fwd:bf16:d64:causal", 1024), kTwoTiles);
  EXPECT_EQ(chosen("fwd:bf16:d64:causal", 2048), "sm90:br192:bc128:w12:s3");
  EXPECT_EQ(chosen("fwd:bf16:d128", 512), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128:causal_top_left", 1024), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128:causal", 4096), "sm90:br128:bc128:w8:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128:causal", 8192), "sm90:br192:bc80:w12:s2");
  EXPECT_EQ(chosen("fwd:bf16:d128:mask{q - kv < 256 && q >= kv}", 4096), "sm90:br128:bc128:w8:s2");
}

TEST(Sm90, MultipliesCodes) {
  const auto supports = [](const char* spec) { return family().supports(parse_spec(spec), kH100); };
  for (const char* spec : {"fwd:bf16:d128:kve4m3:q_codes", "fwd:fp16:d256:kve5m2:q_codes:causal:varlen",
                           "fwd:bf16:d16x240:kve4m3:q_codes:pages8:sinks:fp32_out",
                           "fwd:bf16:d128:kve4m3:q_codes:key_scales:pages16:causal"}) {
    EXPECT_TRUE(supports(spec)) << spec;
    const KernelSpec of_codes = parse_spec(spec);
    for (const AttentionShape& shape : {AttentionShape{4, 16, 4, 4096, 4096}, {64, 32, 8, 1, 4096}}) {
      const TileConfig config = family().heuristic(of_codes, shape, kH100);
      EXPECT_TRUE(family().admits(of_codes, config, kH100)) << spec << " " << to_string(config);
      EXPECT_TRUE(family().kernel(of_codes, config).tensor_boxes->pairs_of_codes);
    }
  }
  for (const char* spec : {"fwd:bf16:d64:kve4m3:q_codes", "fwd:bf16:d144:kve4m3:q_codes",
                           "fwd:bf16:d192:kve4m3:q_codes:causal", "fwd:bf16:d256:kve4m3:q_codes"})
    EXPECT_GE(family().heuristic(parse_spec(spec), {4, 8, 8, 4096, 4096}, kH100).bc, 96) << spec;
  for (const char* spec :
       {"fwd:bf16:d128:kve4m3:q_codes:sums4:causal", "fwd:bf16:d256:kve4m3:q_codes:sums_all",
        "fwd:bf16:d64:kve4m3:q_codes:sums_all:key_scales"})
    EXPECT_TRUE(supports(spec)) << spec;
  EXPECT_FALSE(supports("fwd:bf16:d128:kve4m3:q_codes:key_scales:row_max"));
  EXPECT_FALSE(supports("fwd:bf16:d128:kve4m3:q_codes:pages3"));
  EXPECT_FALSE(supports("fwd:bf16:d272:kve4m3:q_codes"));
  EXPECT_FALSE(family().admits(parse_spec("fwd:bf16:d128:kve4m3:q_codes"),
                               parse_config("sm90:br128:bc112:w8:s2"), kH100));
}

TEST(Sm90, DecodesRowsOfFormats) {
  for (const char* spec : {"fwd:bf16:d128:kv{nvfp4}:pages16", "fwd:fp16:d64:k{q8_0}:v{e4m3}:cache",
                           "fwd:bf16:d256:kv{q4_0}:causal", "fwd:bf16:d128:v{q4_0}:pages3"})
    EXPECT_EQ(refusal(spec), "") << spec;
  expect_in("head dimensions up to 256 and without shared_kv",
            refusal("fwd:bf16:d192x128:kv{e4m3:g64:fp32:tail64}:shared_kv:pages64"));
  expect_in("in a format that is decoded", refusal("fwd:bf16:d128:kv{nvfp4}:cache:indices"));
  const KernelSpec spec = parse_spec("fwd:bf16:d128:kv{nvfp4}:pages16");
  const TileConfig decoding = family().heuristic(spec, parse_shape("b64:hq8:hkv8:sq9:skv4096"), kH100);
  EXPECT_EQ(to_string(decoding), "sm90:br64:bc64:w4:s2:min_blocks2:split");
  const KernelPlan kernel = family().kernel(spec, decoding);
  // One warpgroup copies, one computes, one decodes; and no tensor map is of K and V, whose rows are 72
  // bytes.
  EXPECT_EQ(kernel.entries.front().threads, 3 * 128);
  EXPECT_EQ(kernel.tensor_boxes->kv_rows, 0);
  // A block that is alone has two that decode.
  EXPECT_EQ(family().kernel(spec, parse_config("sm90:br64:bc128:w4:s2:split")).entries.front().threads,
            4 * 128);
  EXPECT_EQ(family().heuristic(spec, parse_shape("b4:hq32:hkv8:sq512:skv16384"), kH100).min_blocks, 1);
  EXPECT_EQ(sm90::row_pitch(72, 8), 80);
  EXPECT_EQ(sm90::row_pitch(64, 16), 64);
  EXPECT_EQ(sm90::row_pitch(34, 2), 48);
}

/// The rows of a query's heads, where codes are operands as they are.
TEST(Sm90, FewRowsOverCodesHaveATileOfTheirOwn) {
  const auto chosen_for = [](const std::string& options, const char* shape) {
    return to_string(family().heuristic(parse_spec("fwd:bf16:d128:" + options), parse_shape(shape), kH100));
  };
  const char *few = "b64:hq8:hkv8:sq8:skv4096", *many = "b64:hq8:hkv8:sq9:skv4096";
  for (const char* of :
       {"kv{nvfp4}:pages16", "kv{mxfp4}:cache", "kve4m3:pages16", "k{int4:g32:fp16}:v{nvfp4}:pages64",
        "kv{q8_0}:pages16", "kv{mxfp8}:pages64", "kv{e4m3:g128:fp32}:cache",
        "kv{uint4:g32:fp16:zero=uint4}:pages16", "kv{q4_1}:cache",
        "k{uint2:keys32:fp16:min}:v{uint2:g32:fp16:min}:pages64", "kv{q4_0}:pages16",
        "kv{e2m1:g16:e4m3:apart:scaled}:pages16", "k{int8:g32:fp32:apart}:v{int4:row:fp16:apart}:pages16"})
    EXPECT_EQ(chosen_for(of, few), "sm90:br8:bc128:w4:s2:min_blocks2:split") << of;
  EXPECT_EQ(chosen_for("kve4m3:pages16", many), "sm90:br64:bc128:w4:s2:split");
  // Others are decoded to tiles first.
  for (const char* of :
       {"kv{int4}:cache", "kv{int4:g16:fp16}:cache", "kv{int4:g64:bf16:before:zero=uint8}:pages16",
        "kv{e2m1:g16:e4m3:before}:pages16",
        "kv{decode4(select(code < 8, 1.0, -1.0) * (exp2((code & 7) * scale) - 1.0)):g32:fp16}:pages16",
        "kv{int4:g64:fp16:halves}:pages16", "k{nvfp4}:pages16", "kv{nvfp4}:pages16:key_scales",
        "kv{nvfp4}:pages16:score{score + 1.0}", "kv{nvfp4}:pages16:mask{kv > 5}", "kv{nvfp4}:pages16:sinks"})
    EXPECT_EQ(chosen_for(of, few).find("br8"), std::string::npos) << of;
  const KernelPlan kernel = family().kernel(parse_spec("fwd:bf16:d128:kv{nvfp4}:pages16"),
                                            parse_config(chosen_for("kv{nvfp4}:pages16", few)));
  EXPECT_EQ(kernel.entries.front().threads, 3 * 128);
  expect_in("Br 8 is for a cache",
            refusal_of_config("sm90:br8:bc128:w4:s2:min_blocks2:split", "fwd:bf16:d128:cache"));
  expect_in("Br 8 is for sm90:br8:bc128:w4:s2:min_blocks2:split",
            refusal_of_config("sm90:br8:bc64:w4:s2:min_blocks2:split", "fwd:bf16:d128:kv{nvfp4}:cache"));
}

TEST(Sm90, DecodesLatents) {
  const KernelSpec spec = parse_spec("fwd:bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64:indices");
  EXPECT_EQ(refusal("fwd:bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64"), "");
  // These have a scale of the call, scales in another tensor, or rows of no multiple of 16 bytes.
  for (const char* format : {"nvfp4", "e4m3:g64:fp32:apart", "e4m3:g64:fp16:tail64"})
    expect_in("rows of a multiple of 16 bytes have all scales",
              refusal(fmt::format("fwd:bf16:d{}:kv{{{}}}:shared_kv", 576 - 64, format)));
  const TileConfig config = family().heuristic(spec, parse_shape("b64:hq128:hkv1:sq1:skv4096"), kH100);
  EXPECT_EQ(to_string(config), "sm90:br64:bc32:w8:s2:d_split2:split:pack_gqa");
  // One warpgroup copies, two compute, one decodes.
  const KernelPlan kernel = family().kernel(spec, config);
  EXPECT_EQ(kernel.entries.front().threads, 4 * 128);
  EXPECT_EQ(kernel.tensor_boxes->kv_rows, 0);
}

TEST(Sm90, PlansOneKernelWithTensorMaps) {
  const KernelSpec spec = parse_spec("fwd:bf16:d128:causal");
  const ExecutionPlan plan = make_plan(spec, parse_shape("b2:hq16:hkv4:sq1025:skv2000"), kH100, {});
  ASSERT_EQ(to_string(plan.config), "sm90:br192:bc80:w12:s2");
  const sm90::ForwardLayout layout{.br = 192,
                                   .bc = 80,
                                   .head_dim = 128,
                                   .head_dim_v = 128,
                                   .stages = 2,
                                   .reads_bias_tile = false,
                                   .reads_column_terms = false,
                                   .lists = false,
                                   .q_tiles_per_cta = 1,
                                   .d_split = 1,
                                   .shared_kv = false,
                                   .codes = false,
                                   .row_pitch = 0,
                                   .scale_bytes = 0,
                                   .code_products = false,
                                   .key_scales = false,
                                   .split = false,
                                   .indices = false,
                                   .joined_queries = 0,
                                   .joins_parts = false,
                                   .ctas = 1};
  const int bytes = layout.bytes();
  const Entry expected{.name = "forward",
                       .header = "flashjit/sm90/forward.cuh",
                       .function = "flashjit::sm90::forward",
                       .threads = 12 * 32 + 128,
                       .cluster = 2,
                       .shared_bytes = bytes,
                       .hot = true,
                       .tensor_maps = true,
                       .persistent = true};
  EXPECT_EQ(plan.entries, std::vector<Entry>{expected});
  EXPECT_EQ(plan.launches, (std::vector<Launch>{{0, kH100.multiprocessors}}));  // of 2 * 16 * 6 tiles
  EXPECT_EQ(plan.tensor_boxes, (TensorBoxes{64, 80, 16}));
  EXPECT_EQ(plan.workspace.bytes, 0u);
}

TEST(Sm90, OIsCopiedWhereItFitsBesideTheOthersAndNoSequenceFollows) {
  const auto o_rows = [](const char* spec) {
    return make_plan(parse_spec(spec), parse_shape("b2:hq16:hkv4:sq1024:skv1024"), kH100, {})
        .tensor_boxes->o_rows;
  };
  for (const char* spec :
       {"fwd:bf16:d64", "fwd:bf16:d128:causal", "fwd:bf16:d192x128:mask{q >= kv && q - kv < 300}"})
    EXPECT_EQ(o_rows(spec), 16) << spec;
  for (const char* spec : {"fwd:bf16:d256", "fwd:bf16:d192x128", "fwd:bf16:d128:causal:varlen"})
    EXPECT_EQ(o_rows(spec), 0) << spec;
}

TEST(Sm90, BiasTilesAreLoadedWhereTheyFit) {
  const auto planned = [](const std::string& spec) {
    return make_plan(parse_spec(spec), parse_shape("b2:hq16:hkv4:sq1024:skv1024"), kH100, {});
  };
  const std::string score =
      ":score{bias: bf16 3d; doc: int32 1d; n: int; score + to_float(doc[n]) * bias[h, q, kv]}";
  for (const char* dims : {"fwd:bf16:d64", "fwd:bf16:d256", "bwd:bf16:d64", "bwd:bf16:d128"}) {
    const ExecutionPlan plan = planned(dims + score), plain = planned(dims);
    EXPECT_EQ(plan.tensor_boxes->bias, (BiasBox{plan.config.br, 1, 3})) << dims;
    EXPECT_EQ(plain.tensor_boxes->bias, BiasBox{}) << dims;
  }
  EXPECT_EQ(planned("bwd:bf16:d256" + score).tensor_boxes->bias, BiasBox{});
  EXPECT_EQ(
      planned(
          "fwd:bf16:d64:score{gate: fp32 2d; n: int; bias: fp16 2d; score * gate[h, kv] + bias[q, kv + n]}")
          .tensor_boxes->bias,
      (BiasBox{128, 1, 2}));
}

TEST(Sm90, WhereIndicesAreCheckedThereAreNoBiasTiles) {
  for (const char* dims :
       {"fwd:bf16:d64", "fwd:bf16:d96", "fwd:bf16:d128", "fwd:bf16:d256", "bwd:bf16:d128"}) {
    const KernelSpec spec = parse_spec(std::string(dims) + ":score{bias: bf16 2d; score + bias[q, kv]}");
    const ExecutionPlan plan = make_plan(spec, kLarge, kH100, {}, {}, {.check_indices = true});
    const KernelPlan plain = family().kernel(parse_spec(dims), plan.config);
    EXPECT_EQ(plan.main().shared_bytes, plain.main().shared_bytes) << dims;
    EXPECT_EQ(plan.tensor_boxes, plain.tensor_boxes) << dims;
    EXPECT_NE(family().kernel(spec, plan.config).tensor_boxes->bias, BiasBox{}) << dims;
  }
}

TEST(Sm90, QueryValuesHaveALineOfEachQTileInTheBackwardPass) {
  const auto planned = [](const std::string& spec) {
    return make_plan(parse_spec(spec), parse_shape("b2:hq16:hkv4:sq1000:skv1024"), kH100, {},
                     parse_config("sm90:br64:bc128:w8:s2"));
  };
  const auto bytes = [](const ExecutionPlan& plan) { return plan.entries.back().shared_bytes; };
  for (const char* dims : {"bf16:d64", "fp16:d96", "bf16:d128", "bf16:d192", "bf16:d256"}) {
    const std::string backward = std::string("bwd:") + dims;
    const ExecutionPlan plain = planned(backward + ":score{2.0 * score}");
    for (const char* score :
         {":score{t: fp32 2d; score * t[h, q]}", ":score{f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])}"}) {
      const ExecutionPlan plan = planned(backward + score);
      EXPECT_EQ(bytes(plan) - bytes(plain), 2 * 64 * 4) << dims << score;
      EXPECT_EQ(plan.workspace.bytes - plain.workspace.bytes, 2u * 16 * 1024 * 4) << dims << score;
    }
    for (const char* score :
         {":score{w: fp32 1d; score + w[kv]}", ":score{t: fp32 2d; score * t[h, q] + t[h, q + 1]}"}) {
      const ExecutionPlan plan = planned(backward + score);
      EXPECT_EQ(bytes(plan), bytes(plain)) << dims << score;
      EXPECT_EQ(plan.workspace.bytes, plain.workspace.bytes) << dims << score;
    }
  }
  const std::string gates = "d64:score{f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])}";
  EXPECT_FALSE(make_plan(parse_spec("fwd:bf16:" + gates), kLarge, kH100, {}).needs.row_terms);
  EXPECT_FALSE(make_plan(parse_spec("bwd:fp32:" + gates), kLarge, kH100, {}).needs.row_terms);
}

TEST(Sm90, ClustersShareAKvTileOfManyColumns) {
  DeviceInfo odd = kH100;
  odd.multiprocessors = 113;
  for (const auto& [shape, blocks] : {std::pair{"b2:hq16:hkv4:sq1025:skv2000", 112},  // of 2 * 4 * 16 tiles
                                      std::pair{"b1:hq4:hkv4:sq64:skv1000", 64}}) {
    const ExecutionPlan plan = make_plan(parse_spec("bwd:bf16:d256:causal"), parse_shape(shape), odd, {},
                                         parse_config("sm90:br64:bc128:w8:s2"));
    EXPECT_EQ(plan.entries.back().cluster, 2);
    EXPECT_EQ(plan.launches.back().blocks, blocks) << shape;
    EXPECT_EQ(plan.tensor_boxes, (TensorBoxes{64, 64, 64}));
  }
  const ExecutionPlan alone =
      make_plan(parse_spec("bwd:bf16:d256"), kSmall, odd, {}, parse_config("sm90:br64:bc64:w8:s2"));
  EXPECT_EQ(alone.entries.back().cluster, 1);
}

TEST(Sm90, BlocksOfAClusterTakeNeighbouringTilesOfAMaskedForwardPass) {
  const auto planned = [](const std::string& spec, const std::string& shape, const std::string& config) {
    const ExecutionPlan plan =
        make_plan(parse_spec(spec), parse_shape(shape), kH100, {}, parse_config(config));
    return std::pair{plan.entries.back().cluster, plan.launches.back().blocks};
  };
  const std::string many = "b2:hq16:hkv4:sq1024:skv1024", few = "b1:hq3:hkv3:sq600:skv600";
  const std::string config = "sm90:br128:bc128:w8:s2";
  using Planned = std::pair<int, std::int64_t>;
  for (const char* spec : {"fwd:bf16:d128:causal", "fwd:bf16:d128:mask{q >= kv && q - kv < 256}"}) {
    EXPECT_EQ(planned(spec, many, config), (Planned{2, kH100.multiprocessors})) << spec;
    EXPECT_EQ(planned(spec, few, config), (Planned{2, 16})) << spec;  // of 3 * 5 tiles
  }
  EXPECT_EQ(planned("fwd:bf16:d128:causal", many, "sm90:br64:bc64:w4:s2:min_blocks2").first, 1);
  EXPECT_EQ(planned("fwd:bf16:d64:causal", many, kTwoTiles), (Planned{1, kH100.multiprocessors}));
  for (const char* spec : {"fwd:bf16:d128", "fwd:bf16:d128:causal:kvlen", "fwd:bf16:d128:causal:varlen",
                           "fwd:bf16:d128:causal:map128x128"})
    EXPECT_EQ(planned(spec, many, config).first, 1) << spec;
}

TEST(Sm90, BlocksTakeTilesInTurnWhereTheyCostWhatThePlannerCanTell) {
  const auto blocks = [](const std::string& spec, const std::string& shape) {
    return make_plan(parse_spec(spec), parse_shape(shape), kH100, {}).launches.back().blocks;
  };
  EXPECT_EQ(blocks("fwd:bf16:d128", "b2:hq4:hkv4:sq1024:skv1024"), 2 * 4 * 16);  // no more than there is work
  EXPECT_EQ(blocks("fwd:bf16:d128:map128x128", "b2:hq16:hkv16:sq1024:skv1024"), kH100.multiprocessors);
  for (const char* spec : {"fwd:bf16:d128:kvlen", "fwd:bf16:d128:varlen"})
    EXPECT_EQ(blocks(spec, "b2:hq16:hkv16:sq1024:skv1024"), 2 * 16 * 8) << spec;
}

TEST(Sm90, OtherFamiliesHaveNoTensorMaps) {
  for (const FamilyTraits* other : {&sm80_traits(), &simt_traits()}) {
    const KernelSpec spec = parse_spec("fwd:bf16:d64");
    const TileConfig config = other->heuristic(spec, kLarge, kH100);
    const KernelPlan kernel = other->kernel(spec, config);
    EXPECT_FALSE(kernel.tensor_boxes);
    for (const Entry& entry : kernel.entries) EXPECT_FALSE(entry.tensor_maps);
  }
}

KernelSource rendered(const std::string& spec, const std::string& config) {
  return render::render(parse_spec(spec), parse_config(config), kH100, render::TemplateSet::embedded());
}

TEST(Sm90Render, TheKernelTakesTensorMaps) {
  const std::string text = rendered("fwd:bf16:d128", "sm90:br128:bc128:w8:s2").text;
  expect_in(
      "__launch_bounds__(384, 1)\n"
      "flashjit_forward(const __grid_constant__ flashjit::Params p, "
      "const __grid_constant__ flashjit::TensorMaps maps) {\n"
      "  flashjit::sm90::forward<flashjit::Problem>(p, maps);\n",
      text);
  expect_in(wgmma_functions(parse_spec("fwd:bf16:d128"), parse_config("sm90:br128:bc128:w8:s2")), text);
  EXPECT_EQ(rendered("fwd:bf16:d128", "sm80:br128:bc64:w4").text.find("wgmma"), std::string::npos);
}

TEST(Sm90Render, ForwardProductsAreOneInstructionOfTheirWidth) {
  EXPECT_EQ(wgmma_functions(parse_spec("fwd:fp16:d64x8"), parse_config("sm90:br64:bc16:w4")),
            R"(  static __device__ __forceinline__ void multiply_scores(float (&c)[8], unsigned long long a,
                                              unsigned long long b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred first, more;\n"
        ".reg .b64 left, right;\n"
        "setp.ne.b32 first, %10, 0;\n"
        "setp.eq.b32 more, 0, 0;\n"
        "add.s64 left, %8, 0;\n"
        "add.s64 right, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, left, right, first, 1, 1, 0, 0;\n"
        "}\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "l"(a), "l"(b), "r"(accumulate));
  }
  static __device__ __forceinline__ void multiply_output(float (&c)[4], const unsigned (*a)[4],
                                              unsigned long long b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred first, more;\n"
        ".reg .b64 left, right;\n"
        "setp.ne.b32 first, %9, 0;\n"
        "setp.eq.b32 more, 0, 0;\n"
        "add.s64 right, %8, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, right, first, 1, 1, 1;\n"
        "}\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "l"(b), "r"(accumulate));
  }
)");
}

TEST(Sm90Render, BackwardProductsAreOneStatementOfAllSteps) {
  const std::string text = wgmma_functions(parse_spec("bwd:bf16:d72"), parse_config("sm90:br64:bc128:w8:s2"));
  // S^T: five steps of 72 columns, of which the fifth begins a slice of K's 128 rows and of Q's 64.
  expect_in(
      "\"add.s64 left, %32, 1024;\\n\"\n        \"add.s64 right, %33, 512;\\n\"\n        "
      "\"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
      text);
  EXPECT_EQ(text.find("add.s64 left, %32, 1026;"), std::string::npos);
  // dV: the fourth sixteen of 64 queries are 48 rows on; P^T is in registers.
  expect_in("\"add.s64 right, %80, 384;", text);
  expect_in("\"r\"(a[3][3]), \"l\"(b)", text);
}

TEST(Sm90Render, WideForwardProductsAreOneStatementOfAllSteps) {
  const auto steps = [](const char* spec) {
    const std::string text = wgmma_functions(parse_spec(spec), parse_config("sm90:br128:bc64:w8:s2"));
    int count = 0;
    for (std::size_t at = 0; (at = text.find("wgmma.mma_async", at)) != text.npos; ++at) ++count;
    return count;
  };
  EXPECT_EQ(steps("fwd:bf16:d256"), 16 + 4);
  EXPECT_EQ(steps("fwd:bf16:d64x192"), 4 + 4);
  EXPECT_EQ(steps("fwd:bf16:d192x128"), 2);
}

TEST(Sm90, ChoosesForCachesWhatItAdmits) {
  for (const char* type : {"bf16:d128", "fp16:d64", "bf16:d64x32", "bf16:d256", "bf16:d64:kve4m3"})
    for (const char* rest : {":causal:varlen", "", ":causal", ":varlen:sinks", ":mask{q - kv < 40}:varlen"})
      for (const char* cache : {":cache", ":pages16", ":pages3", ":cache:invariant"})
        for (const char* shape : {"b4:hq4:hkv2:sq70:skv200", "b3:hq8:hkv2:sq1:skv300",
                                  "b3:hq2:hkv2:sq130:skv129", "b4:hq32:hkv8:sq1024:skv4096"}) {
          const AnalysedSpec spec(parse_spec(std::string("fwd:") + type + rest + cache));
          const TileConfig config = family().heuristic(spec, parse_shape(shape), kH100);
          EXPECT_EQ(family().admits(spec, config, kH100).reason, "") << type << rest << cache << " " << shape;
        }
}

TEST(Sm90Render, ProductsFollowElementTypeAndWidths) {
  const std::string text =
      wgmma_functions(parse_spec("fwd:bf16:d192x128"), parse_config("sm90:br128:bc112:w8:s2"));
  expect_in("m64n112k16.f32.bf16.bf16", text);
  expect_in("m64n128k16.f32.bf16.bf16", text);
  expect_in("float (&c)[56]", text);
  expect_in("float (&c)[64]", text);
}

}  // namespace
}  // namespace flashjit::plan

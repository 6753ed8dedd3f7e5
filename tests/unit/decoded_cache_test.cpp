// Quantized K and V that are decoded once for a call: where that is chosen, planned, rendered and refused,
// and what the kernels of such a call get.
#include "call/decoded_cache.hpp"

#include <gtest/gtest.h>

#include "plan/decoded_cache.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"

namespace flashjit {
namespace {

constexpr const char* kInt4 = "bf16:d128:kv{int4:g32:fp16}:pages16:causal";
constexpr const char *kPrefill = "b4:hq32:hkv8:sq4096:skv4096", *kChunk = "b4:hq32:hkv8:sq512:skv16384";

plan::ExecutionPlan planned(const std::string& spec, const std::string& shape, const char* arch = "sm_90a") {
  return plan::make_plan(parse_spec(spec), parse_shape(shape), DeviceInfo::parse(arch), {});
}
bool is_decoded_once(const std::string& spec, const std::string& shape, const char* arch = "sm_90a") {
  return planned(spec, shape, arch).config.decode_cache;
}

TEST(DecodedCache, IsChosenForManyQueriesOfFewBits) {
  for (const char* arch : {"sm_90a", "sm_80"}) {
    EXPECT_TRUE(is_decoded_once(kInt4, kPrefill, arch));
    EXPECT_TRUE(is_decoded_once("bf16:d128:kv{q8_0}:pages16:causal", kPrefill, arch));
    EXPECT_TRUE(is_decoded_once("bf16:d128:kv{nvfp4}:cache:causal:varlen", kChunk, arch));
    EXPECT_TRUE(is_decoded_once("bf16:d128:kv{q8_0}:pages16:causal", kChunk, arch));
    // One query's tiles are decoded once as it is.
    EXPECT_FALSE(is_decoded_once(kInt4, "b64:hq32:hkv8:sq1:skv4096", arch));
    EXPECT_FALSE(is_decoded_once(kInt4, "b64:hq32:hkv8:sq16:skv4096", arch));
  }
  // Elements in small pages: rows that are copied one by one, and boxes of 8 with more than 64 columns.
  for (const int page : {1, 3, 20}) {
    for (const int dim : {64, 128}) {
      const std::string spec = fmt::format("bf16:d{}:pages{}:causal", dim, page);
      EXPECT_TRUE(is_decoded_once(spec, kPrefill)) << spec;
      EXPECT_EQ(is_decoded_once(spec, kChunk), dim == 64) << spec;
      EXPECT_FALSE(is_decoded_once(spec, "b64:hq64:hkv8:sq16:skv4096")) << spec;
      EXPECT_FALSE(is_decoded_once(spec, kPrefill, "sm_80")) << "cp.async copies rows as it does tiles";
    }
  }
  EXPECT_TRUE(is_decoded_once("bf16:d128:pages8:causal", kPrefill));
  EXPECT_FALSE(is_decoded_once("bf16:d64:pages8:causal", kPrefill));
  EXPECT_FALSE(is_decoded_once("bf16:d128:pages8:causal", kChunk));
  EXPECT_FALSE(is_decoded_once("bf16:d128:pages16:causal", kPrefill));
  // Kernels multiply results with scales of heads; rounded elements would have these.
  EXPECT_TRUE(is_decoded_once("bf16:d128:kve4m3:pages16:causal", kPrefill));
  EXPECT_FALSE(is_decoded_once("bf16:d128:kve4m3:pages16:causal", "b4:hq32:hkv8:sq256:skv16384"));
  EXPECT_FALSE(is_decoded_once("bf16:d128:kve4m3:pages16:causal", kPrefill, "sm_80"));
  EXPECT_FALSE(is_decoded_once("bf16:d128:kve4m3:pages16:causal:key_scales", kPrefill));
  // More than 1 GiB of elements.
  EXPECT_FALSE(is_decoded_once(kInt4, "b32:hq32:hkv8:sq4096:skv16384"));
}

TEST(DecodedCache, IsAnEntryBeforeThoseOfAPlainCache) {
  const plan::ExecutionPlan plan = planned(kInt4, kPrefill),
                            plain = planned("bf16:d128:cache:causal", kPrefill);
  EXPECT_EQ(to_string(plan.config), to_string(plain.config) + ":decode_cache");
  ASSERT_EQ(plan.entries.size(), plain.entries.size() + 1);
  EXPECT_EQ(plan.entries[0].name, "decode_cache");
  EXPECT_EQ(plan.steps[0], plan::Step::decode_cache);
  EXPECT_EQ(plan.launches[0].blocks, 4 * 8 * 4096 / 64);
  for (std::size_t i = 0; i < plain.entries.size(); ++i) {
    EXPECT_EQ(plan.entries[i + 1], plain.entries[i]);
    EXPECT_EQ(plan.launches[i + 1].blocks, plain.launches[i].blocks);
  }
  // A kernel that starts before its predecessor ends would read K and V too soon.
  for (const plan::Launch& launch : plan.launches)
    EXPECT_FALSE(launch.early && plan.entries[launch.entry].hot);
  EXPECT_EQ(plan.workspace.bytes, plain.workspace.bytes + std::size_t{4} * 8 * 4096 * (128 + 128) * 2);
}

TEST(DecodedCache, OfLatentsHasOneRow) {
  const plan::ExecutionPlan plan =
      plan::make_plan(parse_spec("bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64"),
                      parse_shape("b1:hq16:hkv1:sq4096:skv4096"), DeviceInfo::parse("sm_80"), {});
  ASSERT_TRUE(plan.config.decode_cache);
  EXPECT_EQ(plan.workspace.bytes, std::size_t{4096} * 576 * 2);
}

TEST(DecodedCache, IsRenderedAsAProblemOfItsOwn) {
  const plan::ExecutionPlan plan = planned("bf16:d128:k{e4m3}:v{nvfp4}:pages16:causal", kPrefill);
  const std::string text =
      render::render(plan, DeviceInfo::parse("sm_90a"), render::TemplateSet::embedded()).text;
  const std::size_t stored = text.find("struct StoredProblem : Problem");
  ASSERT_NE(stored, text.npos);
  EXPECT_LT(text.find("using KvElement = bf16"), stored);
  EXPECT_LT(text.find("kPageRows = 0"), stored);
  EXPECT_GT(text.find("kPageRows = 16"), stored);
  EXPECT_GT(text.find("struct KFormat"), stored);
  EXPECT_NE(text.find("decode_cache<flashjit::StoredProblem>"), text.npos);
  EXPECT_NE(text.find("forward<flashjit::Problem>"), text.npos);
}

TEST(DecodedCache, IsRefusedWhereItChangesResultsOrCannotBe) {
  const auto refusal = [](const char* spec, const char* config, const char* arch = "sm_90a") {
    const TileConfig tile = parse_config(config);
    return plan::traits(tile.family).admits(parse_spec(spec), tile, DeviceInfo::parse(arch)).reason;
  };
  const char *sm90 = "sm90:br128:bc128:w8:s2:decode_cache", *sm80 = "sm80:br64:bc64:w4:s2:decode_cache";
  for (const char* config : {sm90, sm80}) {
    EXPECT_EQ(refusal("fwd:bf16:d128:kv{nvfp4}:pages16", config), "");
    EXPECT_EQ(refusal("fwd:fp16:d128:kv{q8_0}:cache", config), "");
    EXPECT_NE(refusal("fwd:bf16:d128:pages16", config).find("quantized K and V"), std::string::npos);
    EXPECT_NE(refusal("fwd:bf16:d128:kve4m3:pages16:key_scales", config).find("8-bit K and V is"),
              std::string::npos);
    EXPECT_NE(refusal("fwd:bf16:d128:kve4m3:q_codes", config).find("copies pages"), std::string::npos);
    EXPECT_NE(refusal("fwd:fp16:d128:k{e4m3}:v{q8_0}", config).find("for bf16"), std::string::npos);
    for (const char* option :
         {"kv{nvfp4}:indices", "kv{nvfp4}:cache:invariant", "kv{nvfp4}:varlen:pages16:shared_prefix"})
      EXPECT_NE(refusal(fmt::format("fwd:bf16:d128:{}", option).c_str(), config).find("without indices"),
                std::string::npos)
          << option;
    EXPECT_NE(refusal("fwd:bf16:d128:kv{nvfp4}:varlen", config).find("packed K and V"), std::string::npos);
  }
  EXPECT_EQ(refusal("fwd:bf16:d128:pages1", sm90), "");
  EXPECT_NE(refusal("fwd:bf16:d128:pages1", sm80).find("family sm90"), std::string::npos);
  EXPECT_NE(refusal("fwd:bf16:d72:pages1", sm90).find("multiples of 16"), std::string::npos);
  EXPECT_EQ(refusal("fwd:fp16:d128:kve4m3:pages16", sm90), "");
  EXPECT_NE(refusal("fwd:bf16:d128:kve4m3:pages16", sm80).find("family sm90"), std::string::npos);
  EXPECT_NE(refusal("fwd:bf16:d128:kve4m3", "simt:br32:bc32:w4:decode_cache").find("does not have"),
            std::string::npos);
  EXPECT_NE(refusal("fwd:fp16:d64:kv{q8_0}", "sm75:br64:bc64:w4:decode_cache", "sm_75").find("sm80 and sm90"),
            std::string::npos);
}

TEST(DecodedCache, IsWhereTheKernelsOfACallReadKAndV) {
  const plan::ExecutionPlan plan = planned(kInt4, kPrefill);
  const auto pointer = [](std::uintptr_t address) { return reinterpret_cast<void*>(address); };
  const KvRow row = parse_kv_format("int4:g32:fp16").row(128);
  const ConstTensorView pages{
      pointer(0x100000), {1024, 8, 16, row.bytes}, {16 * 8 * row.bytes, 16 * row.bytes, row.bytes, 1}};
  const ForwardArgs args{.q = ConstTensorView::bhsd(pointer(0x1000), 4, 32, 4096, 128),
                         .k = pages,
                         .v = pages,
                         .out = TensorView::bhsd(pointer(0x2000), 4, 32, 4096, 128),
                         .workspace = {pointer(0x40000000), plan.workspace.bytes},
                         .page_table = {static_cast<const std::int32_t*>(pointer(0x3000)), 4, 256}};
  const DecodeCacheParams params = decode_cache_params(plan, args);
  EXPECT_EQ(params.call.k.data, pages.data);
  EXPECT_EQ(params.call.page_table.pages, args.page_table.data);
  const ForwardArgs decoded = with_decoded_cache(plan, args);
  EXPECT_EQ(decoded.k.data, params.k.data);
  EXPECT_EQ(decoded.v.data, params.v.data);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(decoded.k.data), 0x40000000 + plan.workspace.decoded_k);
  EXPECT_EQ(plan.workspace.decoded_v - plan.workspace.decoded_k, std::size_t{4} * 8 * 4096 * 128 * 2);
  EXPECT_EQ(decoded.k.size, (std::array<std::int64_t, 4>{4, 8, 4096, 128}));
  EXPECT_EQ(params.k.stride_b, 8 * 4096 * 128);
  EXPECT_EQ(decoded.page_table.data, nullptr);
}

}  // namespace
}  // namespace flashjit

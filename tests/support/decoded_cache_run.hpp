// Attention over K and V that are decoded once, into the workspace: in every layout, with NaN in all that is
// no key, and beside decoding for each Q tile.
#pragma once

#include <string>

#include "plan/decoded_cache.hpp"
#include "tests/support/kv_format_run.hpp"

namespace flashjit::test {

struct DecodedCacheCase {
  std::string spec;
  AttentionShape shape;
  std::string config;  ///< or the name of a family, whose heuristic then chooses
  int window = 0;      ///< the mask's: pages in front of it are freed
  /// Whether the other kernel rounds the same values, too: no scales of the call, or in family sm80 a format
  /// that is decoded.
  bool same_bits = false;
};
inline std::string name_of(const DecodedCacheCase& test) {
  std::string name = fmt::format("{}_{}_{}", test.spec, to_string(test.shape), test.config);
  std::ranges::replace_if(
      name, [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}
inline void PrintTo(const DecodedCacheCase& test, std::ostream* out) { *out << name_of(test); }

inline TileConfig config_of(const DecodedCacheCase& test) {
  if (test.config.find(':') != std::string::npos) return parse_config(test.config);
  const plan::AnalysedSpec spec = plan::with_elements(parse_spec(test.spec));
  TileConfig config =
      plan::traits(parse_family(test.config)).heuristic(spec, test.shape, DeviceInfo::parse("sm_90a"));
  config.decode_cache = true;
  return config;
}

/// The workspace, as all memory that tests give, has NaN before.
inline void check_decoded_cache(Runtime& runtime, const DecodedCacheCase& test) {
  const TileConfig config = config_of(test);
  ASSERT_TRUE(config.decode_cache);
  KvFormatRun run({test.spec, test.shape, config.family, 1});
  const auto wanted = run.reference();
  run.poison_dead_rows(test.window);
  const auto decoded = run.launch(runtime, config);
  expect_near(decoded, wanted);
  if (!test.same_bits) return;
  const auto by_tiles = run.launch(runtime, plan::without_decode_cache(config));
  expect_near(by_tiles, wanted);
  EXPECT_TRUE(decoded == by_tiles);
}

inline std::vector<DecodedCacheCase> decoded_cache_cases() {
  const std::string sm90 = "sm90:br128:bc64:w8:s2:decode_cache", sm80 = "sm80:br64:bc32:w4:s2:decode_cache",
                    kivi = "bf16:d128:k{uint2:keys16:fp16:min}:v{uint2:g32:fp16:min}:pages16",
                    window = "mask{kv > q + seqlen_kv - seqlen_q - 37 && kv <= q + seqlen_kv - seqlen_q}";
  return {
      {"bf16:d128:kv{nvfp4}:pages16:causal", {2, 4, 2, 70, 150}, sm90},
      {"bf16:d128:kv{int4:g32:fp16}:causal", {2, 2, 1, 50, 70}, sm90, 0, true},
      {"bf16:d128:kv{mxfp8}:pages3", {2, 4, 1, 20, 100}, "sm90:br64:bc64:w4:s2:split:pack_gqa:decode_cache"},
      {"fp16:d64:kv{q8_0}:pages64:causal", {3, 4, 2, 100, 200}, sm90, 0, true},
      {kivi + ":" + window, {2, 4, 2, 20, 150}, sm90, 37},
      {kivi + ":causal", {2, 2, 1, 40, 100}, sm80, 0, true},
      {"bf16:d64:kv{int8:g32:fp32}:pages16:" + window, {2, 4, 1, 20, 180}, sm80, 37, true},
      {"bf16:d128:kv{e2m1:g16:e4m3:apart:scaled}:cache:causal", {2, 4, 2, 70, 130}, sm80, 0, true},
      {"bf16:d128x64:k{int4}:v{nvfp4}:cache:key_scales", {3, 4, 2, 30, 90}, sm90},
      {"bf16:d64:v{q4_0}:pages16", {2, 4, 2, 30, 90}, "sm80:br64:bc32:w4:tma:decode_cache"},
      {"bf16:d64:kv{q4_1}:pages16:causal:varlen", {3, 4, 2, 70, 150}, sm90, 0, true},
      {"bf16:d128:kv{int4:g32:fp16:zero}:kvlen", {3, 2, 1, 40, 100}, sm80, 0, true},
      {"bf16:d128:k{int4}:v{e4m3}:pages64:causal:varlen", {3, 4, 2, 40, 150}, sm80, 0, true},
      {"bf16:d64:kve4m3:pages16:causal:varlen", {3, 4, 2, 70, 150}, sm90},
      {"fp16:d128:kvint8:cache", {2, 2, 1, 40, 100}, sm90},
      {"bf16:d64:k{e4m3}:v{q8_0}:cache:mask{(q / 40 + kv / 40) % 2 == 0}", {2, 4, 2, 70, 150}, sm90},
      {"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64", {2, 4, 1, 20, 80}, "sm80", 0, true},
      {"bf16:d64:k{iq4_nl}:v{nvfp4}:pages16:score{score - 0.1 * to_float(abs(q - kv))}:causal",
       {2, 4, 1, 40, 90},
       sm90},
      {"bf16:d256:kv{q4_0}:pages16:mask{(q + kv + h) % 3 != 0}", {2, 4, 2, 20, 90}, "sm90"},
  };
}

}  // namespace flashjit::test

// Quantized K and V that are decoded once, into the workspace, by the families that can.
#include "tests/support/cache_run.hpp"
#include "tests/support/decoded_cache_run.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

class DecodedCache : public GpuTestWith<DecodedCacheCase> {};

TEST_P(DecodedCache, IsAttentionOverTheDecodedRows) {
  TemporaryRuntime runtime;
  check_decoded_cache(runtime.get(), GetParam());
}

class DecodedCaches : public GpuTest {};

constexpr const char* kWindow = "mask{q + seqlen_kv - seqlen_q - kv < 20 && kv <= q + seqlen_kv - seqlen_q}";

/// NaN wherever there is no key, tables with pages that do not exist.
void check_keys_in_order(const std::vector<std::string>& specs) {
  TemporaryRuntime runtime;
  unsigned seed = 0;
  for (const std::string& spec : specs) {
    SCOPED_TRACE(spec);
    const bool has_window = spec.ends_with(kWindow);
    CacheRun({.spec = parse_spec(spec),
              .shape = {3, 4, 2, has_window ? 5 : 30, 120},
              .family = Family::sm90,
              .slot_table = spec.find(":cache") != std::string::npos,
              .seed = ++seed,
              .window = has_window ? 20 : 0})
        .check(runtime.get(), parse_config("sm90:br128:bc64:w8:s2:decode_cache"));
  }
}

/// Scales of sequences and heads are not rounded into the elements: LSE is as exact as over codes.
TEST_F(DecodedCaches, AreReadAsTheKeysInOrder) {
  check_keys_in_order({"bf16:d64:kve4m3:causal:varlen:pages16:sinks",
                       "bf16:d128:kvint8:cache:causal:score{2.0 * tanh(score / 2.0)}",
                       std::string("bf16:d64:kve5m2:pages8:") + kWindow,
                       "bf16:d64:causal:varlen:pages1:sinks", "bf16:d96x80:causal:pages8",
                       std::string("fp16:d128:pages3:") + kWindow});
}

/// Codes that are multiplied are copied from their pages, with the same tiles and so the same sums.
TEST_F(DecodedCaches, AreCopiesOfCodesThatAreMultiplied) {
  check_keys_in_order(
      {"bf16:d64:kve4m3:q_codes:causal:varlen:pages16", "bf16:d256:kve4m3:q_codes:causal:pages16",
       std::string("fp16:d128:kve5m2:q_codes:pages8:") + kWindow, "bf16:d128x96:kve4m3:q_codes:pages64"});
}

/// Without a cache: padding, dropout, listed tiles, the largest scores.
TEST_F(DecodedCaches, AreThoseOfCallsWithoutACache) {
  const TemporaryDirectory folder;
  for (const char* spec :
       {"bf16:d64:kve4m3:kvlen:dropout", "bf16:d64:kvint8:map64:causal", "bf16:d128:kve5m2:row_max"}) {
    const CommandResult result =
        run_command(folder,
                    fmt::format("verify --seed 5 --spec {} --shape b2:hq4:hkv2:sq70:skv150 --config {}", spec,
                                "sm90:br128:bc64:w8:s2:decode_cache"),
                    fmt::format("FLASHJIT_LIBCUDA='{}'", read_environment().libcuda));
    EXPECT_EQ(result.code, 0) << spec << "\n" << result.out << result.err;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DecodedCache, testing::ValuesIn(decoded_cache_cases()), [](const auto& info) {
  return fmt::format("{}_{}", info.index, name_of(info.param));
});

}  // namespace
}  // namespace flashjit::test

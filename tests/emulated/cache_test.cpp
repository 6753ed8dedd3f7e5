// Caches in slots and pages, read by kernels of every family that the emulator runs.
#include <cstdio>

#include "tests/support/cache_run.hpp"
#include "tests/support/run_command.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

std::vector<CacheCase> cache_cases() {
  struct Kind {
    const char* spec;
    AttentionShape shape;
    PoolLayout layout;
  };
  const std::vector<Kind> kinds = {
      {"bf16:d64:causal:varlen:pages16", {4, 4, 2, 70, 200}, PoolLayout::nhd},
      {"fp16:d128:causal:pages64", {3, 4, 1, 3, 300}, PoolLayout::interleaved},
      {"bf16:d64x32:cache", {3, 2, 1, 20, 150}, PoolLayout::hnd},
      {"bf16:d96x64:causal:pages16:shared_kv", {3, 16, 1, 2, 200}, PoolLayout::nhd},
      {"fp16:d576x512:causal:varlen:pages64:shared_kv", {3, 16, 1, 3, 450}, PoolLayout::hnd},
      {"bf16:d64:causal:pages3", {3, 4, 2, 1, 100}, PoolLayout::nhd},
      {"fp16:d96:sinks:pages256", {3, 8, 2, 1, 400}, PoolLayout::hnd},
      {"bf16:d64:causal:varlen:pages400", {3, 4, 2, 5, 900}, PoolLayout::nhd},
      {"fp16:d64:pages257", {3, 4, 2, 3, 600}, PoolLayout::hnd},
      {"fp16:d72x40:causal:varlen:pages1", {4, 4, 2, 70, 200}, PoolLayout::nhd},
      {"bf16:d128:sinks:pages12", {3, 8, 1, 2, 300}, PoolLayout::interleaved},
      {"bf16:d576x512:causal:pages1:shared_kv", {3, 16, 1, 2, 150}, PoolLayout::nhd},
      {"bf16:d576x512:causal:pages64:shared_kv:indices", {3, 70, 1, 2, 150}, PoolLayout::nhd},
      {"fp16:d576x512:causal:varlen:pages64:shared_kv:q_rope", {3, 16, 1, 3, 450}, PoolLayout::hnd},
      {"bf16:d576x512:causal:pages16:shared_kv:q_rope", {3, 24, 1, 1, 200}, PoolLayout::nhd},
      {"bf16:d96x64:pages3:shared_kv:q_rope", {3, 6, 1, 40, 200}, PoolLayout::nhd},
      {"bf16:d72x40:causal:varlen:cache:shared_kv:q_rope", {3, 4, 2, 9, 100}, PoolLayout::nhd},
      {"bf16:d576x512:causal:pages64:shared_kv:q_rope:indices", {3, 70, 1, 2, 150}, PoolLayout::nhd},
      {"fp16:d96x64:causal:varlen:pages3:sinks:indices", {3, 6, 2, 5, 150}, PoolLayout::hnd},
      {"bf16:d64:cache:indices", {3, 1, 1, 3, 200}, PoolLayout::nhd},
      {"bf16:d64:kve4m3:causal:varlen:pages16", {4, 4, 2, 70, 200}, PoolLayout::nhd},
      {"fp16:d128:kve4m3:causal:pages64:key_scales", {3, 4, 1, 3, 300}, PoolLayout::interleaved},
      {"fp16:d80x32:kve5m2:cache", {3, 2, 1, 20, 150}, PoolLayout::hnd},
      {"bf16:d96x16:kve4m3:causal:varlen:pages1:key_scales", {4, 4, 2, 70, 200}, PoolLayout::nhd},
      {"fp16:d256:kve5m2:sinks:pages12", {3, 8, 1, 2, 300}, PoolLayout::hnd},
      {"bf16:d64x48:kvint8:causal:pages3", {3, 4, 2, 1, 100}, PoolLayout::nhd},
      {"bf16:d96:kvint8:sinks:pages256:key_scales", {3, 8, 2, 1, 400}, PoolLayout::hnd},
      {"bf16:d64:kve4m3:q_codes:causal:varlen:pages16", {4, 4, 2, 70, 200}, PoolLayout::nhd},
      {"fp16:d128x96:kve5m2:q_codes:cache:key_scales", {3, 8, 2, 1, 300}, PoolLayout::hnd},
      {"bf16:d128:kve4m3:q_codes:key_scales:causal:varlen:pages16", {4, 8, 2, 70, 200}, PoolLayout::nhd},
      {"fp16:d32:kve4m3:score{16.0 * tanh(score / 16.0)}:cache:key_scales",
       {3, 2, 1, 5, 90},
       PoolLayout::hnd},
  };
  const std::vector<Kind> prefixes = {
      {"bf16:d64:causal:varlen:pages16:shared_prefix", {5, 8, 2, 3, 700}, PoolLayout::nhd},
      {"fp16:d128:varlen:pages64:sinks:shared_prefix", {3, 4, 4, 70, 500}, PoolLayout::hnd},
      {"bf16:d96:causal:varlen:pages3:shared_prefix", {4, 6, 2, 1, 500}, PoolLayout::interleaved},
      {"bf16:d128:causal:varlen:pages16:shared_prefix", {40, 8, 2, 1, 600}, PoolLayout::nhd},
      {"bf16:d64:kve4m3:causal:varlen:pages64:shared_prefix", {4, 4, 2, 1, 500}, PoolLayout::nhd},
      {"bf16:d64:kve4m3:causal:varlen:pages64:key_scales:shared_prefix", {4, 4, 2, 1, 500}, PoolLayout::nhd},
  };
  // A query sees 20 keys; pages in front of these are freed.
  const std::string window = "mask{q + seqlen_kv - seqlen_q - kv < 20 && kv <= q + seqlen_kv - seqlen_q}",
                    listed =
                        "mask{q + seqlen_kv - seqlen_q - kv < 20 && kv <= q + seqlen_kv - seqlen_q && "
                        "(kv + q) % 5 != 3}";
  struct Freed {
    std::string spec;
    AttentionShape shape;
  };
  const std::vector<Freed> freed = {
      {"bf16:d64:pages16:" + window, {3, 4, 2, 1, 300}},
      {"fp16:d128:pages16:" + window, {3, 4, 2, 5, 300}},
      {"bf16:d64:varlen:pages16:" + window, {4, 4, 2, 40, 300}},
      {"bf16:d64:varlen:pages3:" + window, {4, 4, 2, 7, 200}},
      {"fp16:d96x64:varlen:pages16:" + listed, {4, 4, 2, 40, 300}},
      {"bf16:d576x512:pages16:shared_kv:" + window, {3, 16, 1, 2, 200}},
      {"bf16:d64:kve4m3:pages16:" + window, {3, 4, 2, 5, 300}},
      {"fp16:d128:kve4m3:pages16:key_scales:" + window, {3, 4, 1, 3, 300}},
      {"bf16:d128:kve4m3:q_codes:key_scales:varlen:pages16:" + window, {4, 8, 2, 7, 300}},
  };
  std::vector<CacheCase> all;
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const Kind& kind : kinds) {
      const auto seed = static_cast<unsigned>(all.size());
      all.push_back({.spec = spec_for(family, kind.spec),
                     .shape = kind.shape,
                     .family = family,
                     .layout = kind.layout,
                     .slot_table = seed % 2 == 1,
                     .seed = seed});
    }
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const Freed& kind : freed)
      all.push_back({.spec = spec_for(family, kind.spec),
                     .shape = kind.shape,
                     .family = family,
                     .seed = static_cast<unsigned>(all.size()),
                     .window = 20});
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const Kind& kind : prefixes)
      all.push_back({.spec = spec_for(family, kind.spec),
                     .shape = kind.shape,
                     .family = family,
                     .layout = kind.layout,
                     .seed = static_cast<unsigned>(all.size())});
  return covering(all, [](const CacheCase& test) {
    return shown_by(test.spec, test.family,
                    fmt::format("{} {}", to_string(test.spec), to_string(test.shape)));
  });
}

class EmulatedQ : public GpuTest {};

class EmulatedCache : public GpuTestWith<CacheCase> {};

TEST_P(EmulatedCache, IsReadAsTheKeysInOrder) {
  TemporaryRuntime runtime;
  check_cache(runtime.get(), GetParam());
}

TEST_F(EmulatedQ, MeetsSlotsThatTmaCopies) {
  TemporaryRuntime runtime;
  for (const char* spec : {"bf16:d64x32:cache", "fp16:d128:causal:varlen:cache"})
    for (const bool slot_table : {false, true}) {
      const CacheCase test{.spec = parse_spec(spec),
                           .shape = {3, 4, 2, 20, 150},
                           .family = Family::sm80,
                           .slot_table = slot_table,
                           .seed = 5};
      CacheRun(test).check(runtime.get(), parse_config("sm80:br64:bc32:w4:tma"));
    }
}

/// Rows of a tile may be of several heads where keys are not split, too.
TEST_F(EmulatedQ, OfPackedHeadsIsStoredByHead) {
  TemporaryRuntime runtime;
  for (const char* spec : {"bf16:d128:causal:varlen:pages16", "fp16:d64:varlen:cache:sinks"})
    CacheRun({.spec = parse_spec(spec), .shape = {4, 8, 2, 70, 200}, .family = Family::sm90, .seed = 7})
        .check(runtime.get(), parse_config("sm90:br128:bc64:w8:s2:pack_gqa"));
}

/// From a counter a CTA may get several of the last Q tiles.
TEST_F(EmulatedQ, OfManyTilesAndNoMaskIsComputed) {
  const TemporaryDirectory folder;
  for (const char* config : {"sm90:br128:bc64:w8:s2", "sm90:br192:bc64:w12:s2"}) {
    const CommandResult result = run_command(
        folder,
        fmt::format("verify --seed 1 --spec fwd:bf16:d64:cache --shape b5:hq2:hkv2:sq33:skv33 --config {}",
                    config),
        fmt::format("FLASHJIT_LIBCUDA='{}' FLASHJIT_NVRTC='{}' FLASHJIT_EMULATOR_CAPABILITY=90",
                    built(FLASHJIT_EMULATED_CUDA), built(FLASHJIT_EMULATED_NVRTC)));
    EXPECT_EQ(result.code, 0) << result.out << result.err;
  }
}

/// What the host cannot check: pages that do not exist, and lengths.
/// Products of codes may be of a type of less range than Q's.
TEST_F(EmulatedQ, OfAnyMagnitudeIsMultipliedWithCodes) {
  TemporaryRuntime runtime;
  for (const char* spec :
       {"bf16:d128:kve4m3:causal:cache", "bf16:d64x96:kve5m2:varlen:pages16", "bf16:d48:kvint8:cache"})
    for (const int exponent : {-60, 60})
      check_cache(runtime.get(), {.spec = parse_spec(spec),
                                  .shape = {3, 4, 2, 5, 200},
                                  .family = Family::sm90,
                                  .seed = 3,
                                  .q_exponent = exponent});
}

class EmulatedWrongCache : public GpuTest {};

// A run has half of the specs and families (is_drawn()).
TEST_F(EmulatedWrongCache, SpoilsItsSequencesAlone) {
  struct Wrong {
    std::int32_t page, length;
    const char *of_page, *of_length;
  };
  for (const Wrong& wrong : {Wrong{1 << 30, 5000, "page_table[0, 0] is 1073741824", "kv_lengths[1] is 5000"},
                             Wrong{-3, -5, "page_table[0, 0] is -3", "kv_lengths[1] is -5"}})
    for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
      for (const char* spec : {"bf16:d64:causal:pages16", "fp16:d64:pages3"}) {
        if (!is_drawn(fmt::format("{} {}", spec, to_string(family)), 2)) continue;
        SCOPED_TRACE(std::string(spec) + " " + std::string(to_string(family)));
        const CacheCase test{.spec = spec_for(family, spec), .shape = {3, 4, 2, 5, 100}, .family = family};
        const TileConfig config = plan::traits(family).heuristic(test.spec, test.shape, gpu().info);
        for (const bool checked : {false, true}) {
          TemporaryRuntime runtime(checked);
          runtime.get().prepare(test.spec, test.shape, config);
          testing::internal::CaptureStdout();
          CacheRun(test).check_wrong_entries(runtime.get(), wrong.page, wrong.length);
          std::fflush(stdout);
          const std::string text = testing::internal::GetCapturedStdout();
          EXPECT_EQ(text.find(wrong.of_page) != std::string::npos, checked) << text.substr(0, 500);
          EXPECT_EQ(text.find(wrong.of_length) != std::string::npos, checked) << text.substr(0, 500);
        }
      }
}

TEST_F(EmulatedWrongCache, OfAPrefixIsSaidWhereIndicesAreChecked) {
  for (const Family family : {Family::simt, Family::sm90}) {
    SCOPED_TRACE(to_string(family));
    const CacheCase test{.spec = parse_spec("bf16:d64:causal:varlen:pages16:shared_prefix"),
                         .shape = {3, 8, 2, 3, 300},
                         .family = family};
    const TileConfig config = plan::traits(family).heuristic(test.spec, test.shape, gpu().info);
    const auto printed = [&](std::int32_t prefix, std::int32_t length) {
      TemporaryRuntime runtime(true);
      runtime.get().prepare(test.spec, test.shape, config);
      testing::internal::CaptureStdout();
      CacheRun(test).check_wrong_prefix(runtime.get(), prefix, length);
      std::fflush(stdout);
      return testing::internal::GetCapturedStdout();
    };
    const auto has = [](const std::string& text, const char* words) {
      return testing::AssertionResult(text.find(words) != std::string::npos) << text.substr(0, 500);
    };
    EXPECT_EQ(printed(200, 281), "");
    EXPECT_TRUE(has(printed(-7, 281), "prefix_length is -7, but sequence 0 has 278 keys"));
    EXPECT_TRUE(has(printed(1 << 30, 281), "prefix_length is 1073741824, but sequence 0 has 278 keys"));
    EXPECT_TRUE(has(printed(200, 5000), "kv_lengths[0] is 5000"));
    EXPECT_TRUE(has(printed(200, 100), "prefix_length is 200, but sequence 0 has 97 keys"));
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedCache, testing::ValuesIn(cache_cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace flashjit::test

// O as codes with scales: each code exactly, and of calls of many keys, by every family that stores them.
#include <fmt/format.h>

#include "tests/support/built.hpp"
#include "tests/support/out_codes_run.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

class EmulatedExactOutCodes : public GpuTestWith<OutCodesCase> {};
class EmulatedOutCodes : public GpuTestWith<OutCodesCase> {};

TEST_P(EmulatedExactOutCodes, AreTheNearest) {
  TemporaryRuntime runtime;
  check_exact_codes(runtime.get(), GetParam());
}

TEST_P(EmulatedOutCodes, AreThoseOfTheReference) {
  TemporaryRuntime runtime;
  check_near_codes(runtime.get(), GetParam());
}

class EmulatedProblemsOfOutCodes : public testing::TestWithParam<const char*> {};

TEST_P(EmulatedProblemsOfOutCodes, AreVerified) {
  const TemporaryDirectory folder;
  const CommandResult result =
      run_command(folder, std::string("verify --seed 3 --spec ") + GetParam(),
                  fmt::format("FLASHJIT_LIBCUDA='{}' FLASHJIT_NVRTC='{}' FLASHJIT_EMULATOR_CAPABILITY=90",
                              built(FLASHJIT_EMULATED_CUDA), built(FLASHJIT_EMULATED_NVRTC)));
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("out "), std::string::npos) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(
    All, EmulatedProblemsOfOutCodes,
    testing::Values(
        "'fwd:bf16:d64:causal:out{e4m3}' --shape b2:hq2:hkv1:sq70:skv90",
        "'fwd:bf16:d64:causal:out{e4m3:row:fp32:apart}:varlen' --shape b2:hq2:hkv1:sq70:skv90",
        "'fwd:bf16:d64:out{e2m1:g16:e4m3:apart:scaled}:kvlen' --shape b2:hq2:hkv1:sq70:skv90",
        "'fwd:bf16:d64:causal:out{e2m1:g16:e4m3:apart:scaled}:swizzled_scales' --shape "
        "b2:hq2:hkv1:sq70:skv90",
        "'fwd:bf16:d64:out{e2m1:g16:e4m3:apart:scaled}:swizzled_scales:varlen' --shape "
        "b2:hq2:hkv2:sq70:skv90",
        "'fwd:bf16:d128:causal:out{e4m3:row:fp32:apart}:indices' --shape b2:hq8:hkv2:sq5:skv190",
        "'fwd:bf16:d128:causal:out{e2m1:g16:e4m3:apart:scaled}:indices:cache' "
        "--shape b2:hq24:hkv1:sq3:skv190 --config sm80:br16:bc32:w1:s2:min_blocks4",
        "'fwd:bf16:d64:out{e4m3}:indices' --shape b1:hq24:hkv1:sq3:skv90 --config simt:br16:bc32:w4"));

const std::string kFp8 = ":out{e4m3}", kRows = ":out{e4m3:row:fp32:apart}",
                  kFp4 = ":out{e2m1:g16:e4m3:apart:scaled}";

std::vector<OutCodesCase> exact() {
  std::vector<OutCodesCase> all;
  for (const std::string& format : {kFp8, kRows, kFp4})
    for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75}) {
      const std::string type = family == Family::sm75 ? "fp16" : "bf16";
      all.push_back({type + ":d128" + format, {3, 2, 2, 33, 1}, family});
      all.push_back({type + ":d80x48" + format, {2, 4, 2, 70, 1}, family});
    }
  return all;
}

std::vector<OutCodesCase> many_keys() {
  const std::string gate = ":out_mod{out * 2.0 + to_float(column) * 0.01}";
  const std::string swizzled = kFp4 + ":swizzled_scales";
  return {
      {"bf16:d64:causal" + swizzled, {2, 2, 1, 150, 100}, Family::sm90},
      {"fp16:d128" + swizzled, {1, 4, 2, 90, 130}, Family::sm80},
      {"fp32:d64:causal" + swizzled, {1, 2, 1, 140, 50}, Family::simt},
      {"bf16:d64:causal:cache" + swizzled, {3, 8, 2, 5, 400}, Family::sm90},
      {"bf16:d64" + swizzled, {2, 2, 2, 5, 200}, Family::sm80, "sm80:br32:bc32:w2:s1:split"},
      {"bf16:d64:causal" + kFp8, {1, 2, 1, 150, 100}, Family::sm90},  // first queries without keys
      {"bf16:d64:causal" + gate + kFp4, {1, 2, 1, 150, 100}, Family::sm90},
      {"bf16:d256:causal" + kFp8, {1, 2, 1, 90, 130}, Family::sm90},
      {"bf16:d256:causal" + swizzled, {1, 2, 1, 90, 130}, Family::sm90},
      {"fp16:d192:causal" + kRows, {1, 2, 1, 90, 130}, Family::sm90},
      {"fp16:d96:causal" + gate + kRows, {2, 2, 1, 70, 130}, Family::sm80},
      {"bf16:d128" + kFp4, {1, 4, 2, 90, 130}, Family::sm80},
      {"fp32:d64:causal" + kFp4, {1, 2, 1, 70, 50}, Family::simt},
      {"bf16:d320:causal" + gate + kFp8, {1, 2, 1, 40, 50}, Family::simt},
      // Two warpgroups share a row.
      {"bf16:d320:causal" + kFp8, {1, 2, 1, 70, 130}, Family::sm90},
      {"fp16:d272" + kFp4, {2, 2, 1, 70, 90}, Family::sm90},
      {"bf16:d512:causal" + swizzled, {1, 2, 1, 70, 130}, Family::sm90},
      {"bf16:d512:cache" + kFp8, {3, 8, 1, 1, 300}, Family::sm90},
      {"bf16:d576x512:cache" + kFp4, {2, 16, 1, 2, 100}, Family::sm90},
      // Split keys, whose O another kernel completes: combine, and of a cache combine_parts.
      {"bf16:d96" + kFp4, {2, 2, 1, 5, 200}, Family::sm80, "sm80:br32:bc32:w2:s1:split"},
      {"fp16:d256:causal" + kRows, {1, 2, 1, 3, 200}, Family::sm80, "sm80:br32:bc32:w2:s1:split"},
      {"bf16:d128" + kFp8, {2, 4, 1, 3, 300}, Family::sm90, "sm90:br64:bc64:w4:s2:split:pack_gqa"},
      {"bf16:d128:cache" + kFp8, {3, 8, 2, 2, 400}, Family::sm90},
      {"bf16:d64:causal:cache" + kFp4, {3, 8, 2, 5, 400}, Family::sm90},
      {"bf16:d256:cache" + kFp8, {3, 8, 1, 1, 300}, Family::sm90},
      {"bf16:d128:causal:cache" + kRows, {2, 4, 2, 70, 200}, Family::sm90, "sm90:br64:bc64:w4:s2:pack_gqa"},
  };
}

const auto kName = [](const auto& info) { return std::to_string(info.index) + "_" + name_of(info.param); };
INSTANTIATE_TEST_SUITE_P(All, EmulatedExactOutCodes, testing::ValuesIn(exact()), kName);
INSTANTIATE_TEST_SUITE_P(All, EmulatedOutCodes, testing::ValuesIn(many_keys()), kName);

}  // namespace
}  // namespace flashjit::test

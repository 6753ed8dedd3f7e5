// append() and merge() as the emulator runs them.
#include "tests/support/append_run.hpp"

namespace flashjit::test {
namespace {

class EmulatedAppend : public GpuTestWith<AppendCase> {};

TEST_P(EmulatedAppend, StoresRotatedRowsAndNothingElse) {
  TemporaryRuntime runtime;
  AppendRun(GetParam()).check(runtime.get());
}

INSTANTIATE_TEST_SUITE_P(
    All, EmulatedAppend,
    testing::ValuesIn(append_cases({"bf16:d128:causal:varlen:pages16", "fp16:d64x32:pages3", "fp32:d40:cache",
                                    "bf16:d96:varlen:cache", "bf16:d128:kve4m3:varlen:pages16:key_scales",
                                    "fp16:d64x32:kve4m3:pages3", "bf16:d96:kve5m2:cache:key_scales",
                                    "fp16:d80:kvint8:varlen:cache:key_scales"},
                                   {{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}})),
    [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(Slots, EmulatedAppend,
                         testing::ValuesIn(with_slots(
                             append_cases({"bf16:d128:causal:varlen:pages16", "fp16:d64x32:pages3",
                                           "fp32:d40:cache", "bf16:d128:kve4m3:varlen:pages16:key_scales"},
                                          {{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}}))),
                         [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(WithoutQ, EmulatedAppend, testing::ValuesIn(rows_without_q()),
                         [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(SlotsWithoutQ, EmulatedAppend, testing::ValuesIn(slots_without_q()),
                         [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(Norms, EmulatedAppend,
                         testing::ValuesIn(with_norms(append_cases(
                             {"bf16:d128:causal:varlen:pages16", "fp16:d64x32:pages3", "fp32:d40:cache",
                              "bf16:d96:varlen:cache", "bf16:d128:kve4m3:varlen:pages16:key_scales",
                              "fp16:d64x32:kve4m3:pages3"},
                             {{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}}))),
                         [](const auto& info) { return name_of(info.param); });

/// Caches of codes, whose K and Q are rotated last.
INSTANTIATE_TEST_SUITE_P(
    Hadamard, EmulatedAppend,
    testing::ValuesIn(with_norms(append_cases({"bf16:d128:kve4m3:varlen:pages16:key_scales:hadamard",
                                               "fp16:d64x32:kve4m3:pages3:hadamard",
                                               "fp16:d80:kvint8:cache:key_scales:hadamard"},
                                              {{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}}))),
    [](const auto& info) { return name_of(info.param); });

class EmulatedMerge : public GpuTest {};

TEST_F(EmulatedMerge, IsTheSoftmaxOverAllKeys) {
  TemporaryRuntime runtime;
  check_merge(runtime.get(), "bf16:d128", 2, {}, {}, false);
  check_merge(runtime.get(), "bf16:d128", 8, DType::fp32, {}, false);
  check_merge(runtime.get(), "bf16:d128", 3, {}, DType::fp32, false);
  check_merge(runtime.get(), "fp16:d64x40", 1, {}, {}, true);
  check_merge(runtime.get(), "fp32:d24", 5, {}, {}, true);
}

}  // namespace
}  // namespace flashjit::test

// append() and merge() on the GPU.
#include "tests/support/append_run.hpp"

namespace flashjit::test {
namespace {

class AppendTest : public GpuTestWith<AppendCase> {};

TEST_P(AppendTest, StoresRotatedRowsAndNothingElse) {
  TemporaryRuntime runtime;
  AppendRun(GetParam()).check(runtime.get());
}

INSTANTIATE_TEST_SUITE_P(All, AppendTest,
                         testing::ValuesIn(append_cases(
                             {"bf16:d128:causal:varlen:pages16", "fp16:d64x32:pages3", "fp32:d40:cache",
                              "bf16:d96:varlen:cache", "bf16:d256:pages1", "fp16:d128:varlen:pages256",
                              "bf16:d128:kve4m3:varlen:pages16:key_scales", "fp16:d64x32:kve4m3:pages3",
                              "bf16:d96:kve5m2:cache:key_scales", "fp16:d80:kvint8:varlen:cache:key_scales"},
                             {{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}, {300, 16, 2, 5, 90}})),
                         [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(WithoutQ, AppendTest, testing::ValuesIn(rows_without_q()),
                         [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(SlotsWithoutQ, AppendTest, testing::ValuesIn(slots_without_q()),
                         [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(
    Slots, AppendTest,
    testing::ValuesIn(with_slots(append_cases({"bf16:d128:causal:varlen:pages16", "fp16:d64x32:pages3",
                                               "fp32:d40:cache", "bf16:d96:varlen:cache", "bf16:d256:pages1",
                                               "bf16:d128:kve4m3:varlen:pages16:key_scales",
                                               "bf16:d96:kve5m2:cache:key_scales"},
                                              {{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}, {300, 16, 2, 5, 90}}))),
    [](const auto& info) { return name_of(info.param); });

INSTANTIATE_TEST_SUITE_P(
    Norms, AppendTest,
    testing::ValuesIn(with_norms(append_cases({"bf16:d128:causal:varlen:pages16", "fp16:d64x32:pages3",
                                               "fp32:d40:cache", "bf16:d96:varlen:cache", "bf16:d256:pages1",
                                               "bf16:d128:kve4m3:varlen:pages16:key_scales"},
                                              {{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}, {300, 16, 2, 5, 90}}))),
    [](const auto& info) { return name_of(info.param); });

class MergeTest : public GpuTest {};

TEST_F(MergeTest, IsTheSoftmaxOverAllKeys) {
  TemporaryRuntime runtime;
  check_merge(runtime.get(), "bf16:d128", 2, {}, {}, false);
  check_merge(runtime.get(), "bf16:d128", 8, DType::fp32, {}, false);
  check_merge(runtime.get(), "bf16:d128", 3, {}, DType::fp32, false);
  check_merge(runtime.get(), "fp16:d64x40", 1, {}, {}, true);
  check_merge(runtime.get(), "fp32:d24", 5, {}, {}, true);
}

}  // namespace
}  // namespace flashjit::test

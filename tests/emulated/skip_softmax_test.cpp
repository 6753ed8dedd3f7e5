// Skip-softmax as the emulator runs it.
#include "tests/support/skip_softmax_run.hpp"

namespace flashjit::test {
namespace {

class EmulatedSkipSoftmax : public GpuTest {};

TEST_F(EmulatedSkipSoftmax, LeavesOutTilesFarBelowTheMaximum) {
  TemporaryRuntime runtime;
  expect_skips(runtime.get(), {"bf16:d64:causal", {1, 2, 1, 200, 700}});
  expect_skips(runtime.get(), {"fp16:d128", {1, 2, 2, 100, 500}});
  expect_skips(runtime.get(), {"bf16:d128:causal:varlen", {2, 2, 1, 130, 600}});
  expect_skips(runtime.get(), {"bf16:d64:mask{q >= kv && q - kv < 300}", {1, 2, 1, 500, 500}});
  for (const char* config : {"sm80:br64:bc64:w4:split", "sm90:br64:bc64:w4:s2:split", "sm90:br128:bc64:w8:s2",
                             "sm90:br64:bc64:w4:s2:split:pack_gqa"})
    expect_skips(runtime.get(), {"bf16:d64:causal", {1, 4, 2, 20, 900}, config});
  for (const char* config : {"sm80:br64:bc64:w4", "sm90:br64:bc64:w4:s2"})
    expect_skips(runtime.get(), {"bf16:d64:kvlen:sinks:row_max", {2, 2, 1, 70, 900}, config});
}

TEST_F(EmulatedSkipSoftmax, SkipsNoTileWithANan) {
  TemporaryRuntime runtime;
  for (const char* config : {"sm80:br64:bc64:w4", "sm90:br128:bc64:w8:s2"})
    expect_nan_is_seen(runtime.get(), {"bf16:d64", {1, 2, 1, 100, 700}, config});
}

}  // namespace
}  // namespace flashjit::test

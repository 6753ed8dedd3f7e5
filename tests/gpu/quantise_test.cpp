// Codes of 8 bits and their scales of a tensor.
#include "tests/support/quantise_run.hpp"

namespace flashjit::test {
namespace {

class Quantise : public GpuTest {};

TEST_F(Quantise, IsWhatTheReferenceSays) {
  TemporaryRuntime runtime;
  for (const QuantiseCase& test : quantise_cases()) check_quantise(runtime.get(), test);
  check_quantise(runtime.get(), {"bf16:d128:kve4m3", {2, 16, 4096}, {2, 1, 8, 1}, true});
}

}  // namespace
}  // namespace flashjit::test

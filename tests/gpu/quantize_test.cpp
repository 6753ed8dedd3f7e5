// Codes of 8 bits and their scales of a tensor.
#include "tests/support/quantize_run.hpp"

namespace flashjit::test {
namespace {

class Quantize : public GpuTest {};

TEST_F(Quantize, IsWhatTheReferenceSays) {
  TemporaryRuntime runtime;
  for (const QuantizeCase& test : quantize_cases()) check_quantize(runtime.get(), test);
  check_quantize(runtime.get(), {"bf16:d128:kve4m3", {2, 16, 4096}, {2, 1, 8, 1}, true});
}

}  // namespace
}  // namespace flashjit::test

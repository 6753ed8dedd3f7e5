// Codes of 8 bits and their scales of a tensor.
#include "tests/support/quantize_run.hpp"

namespace flashjit::test {
namespace {

class EmulatedQuantize : public GpuTest {};

TEST_F(EmulatedQuantize, IsWhatTheReferenceSays) {
  TemporaryRuntime runtime;
  for (const QuantizeCase& test : quantize_cases()) check_quantize(runtime.get(), test);
}

}  // namespace
}  // namespace flashjit::test

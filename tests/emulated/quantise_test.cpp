// Codes of 8 bits and their scales of a tensor.
#include "tests/support/quantise_run.hpp"

namespace flashjit::test {
namespace {

class EmulatedQuantise : public GpuTest {};

TEST_F(EmulatedQuantise, IsWhatTheReferenceSays) {
  TemporaryRuntime runtime;
  for (const QuantiseCase& test : quantise_cases()) check_quantise(runtime.get(), test);
}

}  // namespace
}  // namespace flashjit::test

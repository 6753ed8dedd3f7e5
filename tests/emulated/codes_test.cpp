// K and V of 8 bits: every code through every conversion.
#include "tests/support/codes_check.hpp"

namespace flashjit::test {
namespace {

class EmulatedCodes : public GpuTestWith<Family> {};

TEST_P(EmulatedCodes, AreWhatTheyMean) {
  TemporaryRuntime runtime;
  check_all_codes(runtime.get(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Families, EmulatedCodes, testing::Values(Family::simt, Family::sm80),
                         [](const auto& info) { return to_string(info.param); });

}  // namespace
}  // namespace flashjit::test

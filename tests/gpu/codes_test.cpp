// K and V of 8 bits: every code through every conversion.
#include "tests/support/codes_check.hpp"

namespace flashjit::test {
namespace {

class Codes : public GpuTestWith<Family> {};

TEST_P(Codes, AreWhatTheyMean) {
  TemporaryRuntime runtime;
  check_all_codes(runtime.get(), GetParam());
}

TEST_P(Codes, OfManyKeysKeepTheirMean) {
  TemporaryRuntime runtime;
  for (const std::int64_t keys : {std::int64_t{1}, std::int64_t{131072}})
    check_long_mean(runtime.get(), GetParam(), keys);
}

INSTANTIATE_TEST_SUITE_P(Families, Codes, testing::Values(Family::simt, Family::sm80, Family::sm90),
                         [](const auto& info) { return to_string(info.param); });

}  // namespace
}  // namespace flashjit::test

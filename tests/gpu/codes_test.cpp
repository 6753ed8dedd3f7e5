// K and V of 8 bits: every code through every conversion, and what combines with them.
#include <fmt/format.h>

#include <string>

#include "tests/support/codes_check.hpp"
#include "tests/support/codes_problems.hpp"
#include "tests/support/run_command.hpp"

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

TEST_P(Codes, ThatAreNanInKBehindAMaskReachNothing) {
  TemporaryRuntime runtime;
  check_nan_behind_mask(runtime.get(), GetParam());
}

TEST_P(Codes, ThatAreNanInVBehindAMaskReachNothing) {
  if (GetParam() != Family::sm90) GTEST_SKIP() << "zero times NaN is NaN there";
  TemporaryRuntime runtime;
  check_nan_in_v_behind_mask(runtime.get(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Families, Codes,
                         testing::Values(Family::simt, Family::sm80, Family::sm90, Family::sm75),
                         [](const auto& info) { return to_string(info.param); });

class ProblemsOfCodes : public GpuTestWith<const char*> {};

TEST_P(ProblemsOfCodes, AreRight) {
  if (gpu().info.arch != "sm_90a") GTEST_SKIP() << "the problems are family sm90's";
  const TemporaryDirectory folder;
  const CommandResult result = run_command(folder, std::string("verify --seed 3 ") + GetParam(),
                                           fmt::format("FLASHJIT_LIBCUDA='{}'", read_environment().libcuda));
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("sm90:"), std::string::npos) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(All, ProblemsOfCodes, testing::ValuesIn(kProblemsOfCodes));

}  // namespace
}  // namespace flashjit::test

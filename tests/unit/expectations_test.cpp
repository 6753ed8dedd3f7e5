// What `flashjit doctor` tells of a GPU, and what `flashjit verify --all` checks on one.
#include "tools/parts/expectations.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "plan/family.hpp"
#include "tests/support/expectations.hpp"
#include "tools/parts/everything.hpp"

namespace flashjit::command {
namespace {

Expectation of(const char* arch, DType dtype) {
  for (const Expectation& expectation : expectations_of(DeviceInfo::parse(arch)))
    if (expectation.dtype == dtype) return expectation;
  throw Error(ErrorCode::internal, "nothing is expected of that type");
}

TEST(Expectations, NameTheFamilyAndWhatIsMissing) {
  const Expectation fp16 = of("sm_75", DType::fp16), bf16 = of("sm_75", DType::bf16);
  EXPECT_EQ(fp16.forward, Family::sm75);
  EXPECT_EQ(fp16.backward, Family::sm75);
  EXPECT_EQ(bf16.forward, Family::simt);
  expect_in("give fp16 tensors", bf16.missing);
  expect_in("fp16: forward by sm75, at an estimated ", to_string(fp16));
  EXPECT_EQ(fp16.times_of_fp16, 1);
  EXPECT_GE(bf16.times_of_fp16, 3);
  expect_in(
      fmt::format(", in an estimated {} times the time of fp16 (sm75: ", std::lround(bf16.times_of_fp16)),
      to_string(bf16));
  EXPECT_EQ(to_string(of("sm_80", DType::bf16)).find("times the time"), std::string::npos);
  EXPECT_EQ(of("sm_90a", DType::bf16).forward, Family::sm90);
  EXPECT_EQ(of("sm_90a", DType::bf16).missing, "");
  EXPECT_EQ(of("sm_89", DType::bf16).missing, "");
  EXPECT_EQ(fp16.missing, "");
  expect_in("sm80: its kernels take fp16 and bf16", of("sm_86", DType::fp32).missing);
}

TEST(Expectations, SharesAreOfAPeakThatNoKernelBeats) {
  for (const char* arch : {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"})
    for (const Expectation& expectation : expectations_of(DeviceInfo::parse(arch)))
      for (const double share : {expectation.forward_share, expectation.backward_share}) {
        EXPECT_GT(share, 0.01) << arch << ' ' << to_string(expectation);
        EXPECT_LE(share, 1) << arch << ' ' << to_string(expectation);
      }
}

TEST(Everything, HasWhatEachFamilyCanDo) {
  std::set<Family> able;
  for (const auto& [spec, shape] : every_problem()) {
    ASSERT_TRUE(shape.has_value()) << to_string(spec);
    spec.validate();
    shape->validate();
    for (const char* arch : {"sm_75", "sm_90a"})
      for (const plan::FamilyTraits& family : plan::families())
        if (family.supports(spec, DeviceInfo::parse(arch))) able.insert(family.family);
  }
  EXPECT_EQ(able.size(), plan::families().size());
}

}  // namespace
}  // namespace flashjit::command

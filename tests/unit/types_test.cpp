// The names of passes, element types, families, sources of configurations and error codes.
#include "flashjit/types.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "flashjit/error.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit {
namespace {

TEST(Types, NamesGoBothWays) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::append, Pass::merge, Pass::quantize, Pass::jvp,
                          Pass::backward_jvp})
    EXPECT_EQ(parse_pass(to_string(pass)), pass);
  for (const DType type : {DType::fp16, DType::bf16, DType::fp32, DType::e4m3, DType::e5m2, DType::int8})
    EXPECT_EQ(parse_dtype(to_string(type)), type);
  for (const Family family : {Family::sm90, Family::sm80, Family::sm75, Family::simt})
    EXPECT_EQ(parse_family(to_string(family)), family);
  EXPECT_EQ(to_string(Pass::backward), "bwd");
  EXPECT_EQ(to_string(DType::bf16), "bf16");
  EXPECT_EQ(to_string(Family::simt), "simt");
}

TEST(Types, SourcesOfConfigurationsHaveTheNamesThatReportsPrint) {
  EXPECT_EQ(to_string(ConfigSource::given), "given");
  EXPECT_EQ(to_string(ConfigSource::tuned), "tuned");
  EXPECT_EQ(to_string(ConfigSource::tuned_elsewhere), "tuned elsewhere");
  EXPECT_EQ(to_string(ConfigSource::tuned_near), "tuned for a near shape");
  EXPECT_EQ(to_string(ConfigSource::heuristic), "heuristic");
}

TEST(Types, UnknownNamesAreRefusedWithTheKnownOnes) {
  EXPECT_EQ(failure(ErrorCode::invalid_argument, [] { parse_pass("forward"); }),
            "the pass is 'forward'; it must be one of: fwd, bwd, append, merge, quantize, jvp, bwd_jvp");
  EXPECT_EQ(failure(ErrorCode::invalid_argument, [] { parse_dtype("fp8"); }),
            "the element type is 'fp8'; it must be one of: fp16, bf16, fp32, e4m3, e5m2, int8");
  EXPECT_EQ(failure(ErrorCode::invalid_argument, [] { parse_family(""); }),
            "the kernel family is ''; it must be one of: sm90, sm80, sm75, simt");
}

TEST(Types, ErrorCodesHaveNames) {
  std::set<std::string> names;
  for (int code = 1; code <= 10; ++code) names.insert(to_string(static_cast<ErrorCode>(code)));
  EXPECT_EQ(names.size(), 10u);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_EQ(to_string(ErrorCode::kernel_missing), "kernel_missing");
}

}  // namespace
}  // namespace flashjit

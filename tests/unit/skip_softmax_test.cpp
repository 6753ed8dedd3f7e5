// Skip-softmax: its text, what is refused, who plans it, and the threshold of a call.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "call/skip_softmax.hpp"
#include "flashjit/error.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit {
namespace {

using test::refused_spec;

TEST(SkipSoftmax, IsAnOptionOfTheText) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:causal:skip_softmax:sinks");
  EXPECT_TRUE(spec.epilogue.skip_softmax);
  EXPECT_EQ(to_string(spec), "fwd:bf16:d64:causal:sinks:skip_softmax");
  ForwardArgs args;
  args.q.dtype = args.k.dtype = args.v.dtype = args.out.dtype = DType::bf16;
  EXPECT_FALSE(spec_of(args).epilogue.skip_softmax);
  args.skip_softmax_threshold = 0.0f;
  EXPECT_TRUE(spec_of(args).epilogue.skip_softmax);
}

TEST(SkipSoftmax, IsForASoftmaxAtInference) {
  EXPECT_EQ(refused_spec("fwd:bf16:d64:causal:varlen:sinks:row_max:invariant:skip_softmax"), "accepted");
  EXPECT_EQ(refused_spec("fwd:bf16:d64:varlen:pages16:kve4m3:skip_softmax"), "accepted");
  expect_in("skip_softmax is set and dropout is, too", refused_spec("bf16:d64:dropout:skip_softmax"));
  expect_in("skip_softmax is set and weight_mod is, too",
            refused_spec("bf16:d64:score{sigmoid(score)}:weight_mod:skip_softmax"));
  expect_in("the pass is backward and skip_softmax is set", refused_spec("bwd:bf16:d64:skip_softmax"));
  expect_in("the pass is jvp and skip_softmax is set", refused_spec("jvp:bf16:d64:skip_softmax"));
}

std::string skip_softmax_support(Family family, const std::string& text, const char* arch) {
  return plan::traits(family).supports(parse_spec(text), DeviceInfo::parse(arch)).reason;
}

TEST(SkipSoftmax, IsPlannedForTheFamiliesThatHaveIt) {
  const AttentionShape shape{2, 8, 2, 2048, 4096};
  const auto planned = [&](const char* text, const char* arch) {
    return plan::make_plan(parse_spec(text), shape, DeviceInfo::parse(arch), {}).config;
  };
  EXPECT_EQ(planned("fwd:bf16:d128:causal:skip_softmax", "sm_90a").family, Family::sm90);
  EXPECT_EQ(planned("fwd:bf16:d128:pages16:skip_softmax", "sm_90a").family, Family::sm90);
  EXPECT_EQ(planned("fwd:bf16:d128:causal:skip_softmax", "sm_80").family, Family::sm80);
  EXPECT_EQ(planned("fwd:bf16:d128:causal:skip_softmax", "sm_120").family, Family::sm80);
  // Two Q tiles at a time, which the plain mask gets, would spill.
  const char* window = "fwd:bf16:d64:mask{q >= kv && q - kv < 300}";
  EXPECT_EQ(planned(window, "sm_90a").warps, 16);
  EXPECT_NE(planned("fwd:bf16:d64:mask{q >= kv && q - kv < 300}:skip_softmax", "sm_90a").warps, 16);

  expect_in("max.NaN of sm_80", skip_softmax_support(Family::sm75, "fwd:fp16:d64:skip_softmax", "sm_75"));
  expect_in("families sm80 and sm90",
            skip_softmax_support(Family::simt, "fwd:fp32:d64:skip_softmax", "sm_90a"));
  for (const char* spec : {"fwd:bf16:d64:indices:skip_softmax", "fwd:bf16:d320:skip_softmax"}) {
    expect_in("skip_softmax is without indices", skip_softmax_support(Family::sm90, spec, "sm_90a"));
    expect_in("skip_softmax is without indices", skip_softmax_support(Family::sm80, spec, "sm_80"));
  }
}

TEST(SkipSoftmax, TakesAThresholdFrom0To1) {
  AttentionSpec spec{.head_dim = 64};
  ForwardArgs args;
  const auto refusal = [&] { return test::refusal_of([&] { check_skip_softmax(spec, args); }); };
  EXPECT_EQ(refusal(), "accepted");
  args.skip_softmax_threshold = 0.5f;
  expect_in("skip_softmax_threshold is given, but the spec has no skip_softmax", refusal());
  spec.epilogue.skip_softmax = true;
  EXPECT_EQ(refusal(), "accepted");
  for (const float wrong : {-0.5f, 1.5f, std::numeric_limits<float>::quiet_NaN()}) {
    args.skip_softmax_threshold = wrong;
    expect_in("it must be from 0 to 1", refusal());
  }
  Params params{};
  args.skip_softmax_threshold = 0.25f;
  std::int64_t counts[2];
  args.skip_softmax_counts = counts;
  set_skip_softmax(params, spec, args);
  EXPECT_EQ(params.skip_softmax_log2, -2.0f);
  EXPECT_EQ(static_cast<void*>(params.skip_softmax_counts), counts);
  args.skip_softmax_threshold.reset();
  set_skip_softmax(params, spec, args);
  EXPECT_EQ(params.skip_softmax_log2, -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace flashjit

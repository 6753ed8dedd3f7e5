// Which kernels of family sm80 copy K and V by TMA, and in what boxes.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit::plan {
namespace {

Support admits(const char* spec, const char* config, const char* arch) {
  const TileConfig c = parse_config(config);
  return traits(c.family).admits(parse_spec(spec), c, DeviceInfo::parse(arch));
}

TEST(TmaOfSm80, IsForRowsAndSlotsInTheForwardPass) {
  for (const char* spec : {"fwd:bf16:d64", "fwd:fp16:d128:varlen:causal", "fwd:bf16:d72x40:kvlen",
                           "fwd:bf16:d128:cache", "fwd:bf16:d256:map64x64", "fwd:fp16:d128x64:shared_kv"})
    for (const char* arch : {"sm_90", "sm_90a", "sm_100", "sm_120", "sm_121"}) {
      const Support able = admits(spec, "sm80:br64:bc32:w4:tma", arch);
      EXPECT_TRUE(able) << spec << ' ' << arch << ": " << able.reason;
    }
}

TEST(TmaOfSm80, IsRefusedWithTheReason) {
  struct Refused {
    const char *spec, *config, *arch, *reason;
  };
  for (const Refused& refused :
       {Refused{"fwd:bf16:d64", "sm80:br64:bc32:w4:tma", "sm_89", "sm_90 and newer"},
        Refused{"fwd:fp16:d64", "sm75:br64:bc32:w4:tma", "sm_120", "for family sm80"},
        Refused{"fwd:fp16:d64", "sm90:br64:bc64:w4:s2:tma", "sm_90a", "always copies by TMA"},
        Refused{"fwd:fp16:d64", "simt:br64:bc64:w8:tma", "sm_120", "does not have"},
        Refused{"bwd:bf16:d64", "sm80:br32:bc64:w4:tma", "sm_120", "for the forward pass"},
        Refused{"fwd:bf16:d64:pages16", "sm80:br64:bc32:w4:tma", "sm_120", "not for pages"},
        Refused{"fwd:bf16:d64:indices", "sm80:br16:bc32:w1:tma", "sm_120", "not for pages and indices"},
        Refused{"fwd:bf16:d64:kve4m3", "sm80:br64:bc32:w4:tma", "sm_120", "of Q's type"},
        Refused{"fwd:bf16:d64", "sm80:br64:bc32:w4:s2:tma", "sm_120", "stages is 1, not 2"}}) {
    const Support able = admits(refused.spec, refused.config, refused.arch);
    EXPECT_FALSE(able) << refused.spec << ' ' << refused.config;
    expect_in(refused.reason, able.reason);
  }
}

TEST(TmaOfSm80, BoxesAreRowsWithTheirPaddingAndTakeNoMemory) {
  const DeviceInfo device = DeviceInfo::parse("sm_120");
  const AnalysedSpec spec(parse_spec("fwd:bf16:d72x40"));
  const KernelPlan plain = sm80_traits().kernel(spec, parse_config("sm80:br64:bc32:w4"));
  const KernelPlan tma = sm80_traits().kernel(spec, parse_config("sm80:br64:bc32:w4:tma"));
  EXPECT_FALSE(plain.tensor_boxes.has_value());
  EXPECT_FALSE(plain.main().tensor_maps);
  EXPECT_EQ(tma.tensor_boxes, (TensorBoxes{.kv_rows = 32, .k_columns = 88, .v_columns = 56}));
  EXPECT_TRUE(tma.main().tensor_maps);
  EXPECT_EQ(tma.main().shared_bytes, plain.main().shared_bytes);
}

TEST(TmaOfSm80, IsMeasuredOnConsumerBlackwellAlone) {
  const auto tries_tma = [](const char* spec, const char* arch) {
    return std::ranges::any_of(sm80_traits().search_space(parse_spec(spec), DeviceInfo::parse(arch)),
                               &TileConfig::tma);
  };
  EXPECT_TRUE(tries_tma("fwd:bf16:d128:causal", "sm_120"));
  EXPECT_TRUE(tries_tma("fwd:fp16:d64:varlen", "sm_121"));
  EXPECT_FALSE(tries_tma("fwd:bf16:d128:causal", "sm_90a"));
  EXPECT_FALSE(tries_tma("fwd:bf16:d128:pages16", "sm_120"));
  EXPECT_FALSE(tries_tma("bwd:bf16:d128", "sm_120"));
}

}  // namespace
}  // namespace flashjit::plan

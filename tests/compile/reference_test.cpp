// The naive reference kernels, which the GPU tests judge by, compile. Needs NVRTC and no GPU.
#include <gtest/gtest.h>

#include "compile/compiler.hpp"
#include "tests/support/nvrtc.hpp"
#include "tests/support/reference_source.hpp"
#include "tests/support/variants.hpp"

namespace flashjit {
namespace {

void expect_compiled(const KernelSpec& spec) {
  SCOPED_TRACE(to_string(spec));
  const KernelSource source = test::reference_source(spec.normalized(), DeviceInfo::parse("sm_90a"));
  EXPECT_EQ(test::compiler().compile(source).resources.size(), test::reference_entries().size());
}

TEST(ReferenceSource, FeaturesCompile) {
  for (const char* spec : {"bf16:d64", "fp32:d40x72:causal:varlen:sinks", "fp16:d64:map32x64:varlen:dropout",
                           "bf16:d128:kvlen:sinks:dropout"})
    expect_compiled(parse_spec(spec));
}

}  // namespace
}  // namespace flashjit

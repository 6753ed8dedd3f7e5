// Q, K and V of 8 bits, by kernels of every family that takes them.
#include "tests/support/eight_bits_run.hpp"

namespace flashjit::test {
namespace {

class EmulatedEightBits : public GpuTestWith<EightBits> {};

/// Hopper's mma converts codes, Ada's multiplies them.
TEST_P(EmulatedEightBits, AreWithinTheirLimits) {
  check_eight_bits(GetParam());
  check_eight_bits(GetParam(), 89);
}

INSTANTIATE_TEST_SUITE_P(
    All, EmulatedEightBits,
    testing::Values(
        EightBits{"fwd:bf16:d128:kve4m3:q_codes:causal", {1, 4, 2, 150, 290}},
        EightBits{"fwd:fp16:d64:kve4m3:q_codes:dropout:kvlen:sinks", {3, 2, 2, 70, 130}},
        EightBits{"fwd:bf16:d80x48:kve5m2:q_codes:causal:varlen:fp32_out", {3, 4, 1, 90, 200}},
        EightBits{"fwd:bf16:d192x128:kve4m3:q_codes:map64x64:score{50.0 * tanh(score / 50.0)}",
                  {1, 2, 1, 130, 200}},
        EightBits{"fwd:bf16:d16x144:kve5m2:q_codes:mask{q >= kv && q - kv < 70}", {2, 8, 1, 9, 400}},
        EightBits{"fwd:fp32:d96:kve4m3:q_codes", {1, 2, 1, 40, 70}},
        EightBits{"fwd:bf16:d128:kve4m3:q_codes", {1, 8, 1, 1, 3000}},
        EightBits{"fwd:bf16:d128:kve4m3:q_codes:sums_all:causal", {1, 4, 2, 150, 490}},
        EightBits{"fwd:fp16:d64:kve4m3:q_codes:sums4:kvlen:sinks", {3, 2, 2, 70, 900}},
        EightBits{"fwd:bf16:d256:kve5m2:q_codes:sums_all:varlen", {3, 2, 1, 90, 300}},
        EightBits{"fwd:bf16:d128:kve4m3:q_codes:key_scales:causal", {2, 4, 2, 150, 290}},
        EightBits{"fwd:fp16:d80:kve5m2:q_codes:key_scales:dropout:varlen:sinks", {3, 4, 2, 90, 200}},
        EightBits{"fwd:bf16:d256x64:kve4m3:q_codes:key_scales:score{50.0 * tanh(score / 50.0)}:kvlen",
                  {2, 2, 1, 70, 130}},
        EightBits{"fwd:bf16:d64:kve4m3:q_codes:key_scales:score{slopes: fp32 1d; score + slopes[h] * "
                  "to_float(kv - q)}:causal",
                  {1, 4, 2, 130, 200}}));

}  // namespace
}  // namespace flashjit::test

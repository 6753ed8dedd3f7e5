// Tangents of gradients on a GPU.
#include "tests/support/backward_jvp_run.hpp"

namespace flashjit::test {
namespace {

std::vector<JvpCase> second_derivative_cases() {
  std::vector<JvpCase> all = {
      {"bf16:d320x280:causal", {1, 2, 1, 90, 130}},
      {"fp32:d64:causal:sinks", {2, 2, 1, 150, 100}},
      {"bf16:d64:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
       {1, 4, 2, 150, 200}},
      {"fp16:d64:score{bias: fp16 4d grad; score + bias[b, h, q, kv]}", {1, 4, 2, 150, 133}},
      {"fp32:d32:score{gate: fp32 2d grad; score * exp(0.2 * gate[h, kv]) - 0.1 * score * score}:sinks",
       {1, 4, 2, 100, 150}},
      {"bf16:d64:causal:varlen:dropout", {4, 2, 1, 150, 200}, "", "", 7},
      {"bf16:d64:fp32_grads", {2, 2, 1, 130, 140}, "", "o"},
      {"bf16:d64", {2, 2, 1, 130, 140}, "", "qkv"},
  };
  for (const char* spec :
       {"bf16:d64", "bf16:d128:causal", "fp16:d192x128:dropout:sinks", "bf16:d96:map64x64",
        "bf16:d128:mask{q >= kv && q - kv < 200}:kvlen",
        "bf16:d64:score{50.0 * tanh(score / 50.0)}:mask{doc: int32 1d; doc[q] == doc[kv]}"})
    for (const AttentionShape& shape :
         {AttentionShape{2, 4, 2, 200, 300}, {3, 2, 2, 150, 77}, {1, 4, 2, 5, 500}})
      all.push_back({spec, shape});
  return all;
}

class GradientTangents : public GpuTestWith<JvpCase> {};

TEST_P(GradientTangents, AreTheDerivative) {
  TemporaryRuntime runtime;
  expect_gradient_tangents(runtime.get(), GetParam(), 1);
}

INSTANTIATE_TEST_SUITE_P(All, GradientTangents, testing::ValuesIn(second_derivative_cases()));

}  // namespace
}  // namespace flashjit::test

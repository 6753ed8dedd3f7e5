// O's tangent on a GPU.
#include "tests/support/jvp_run.hpp"

namespace flashjit::test {
namespace {

std::vector<JvpCase> jvp_cases() {
  std::vector<JvpCase> all = {
      {"bf16:d320x280:causal", {1, 2, 1, 300, 400}},
      {"fp32:d64:causal:sinks", {2, 4, 2, 300, 200}},
      {"bf16:d128:causal", {1, 4, 2, 700, 900}, "sm80:br64:bc32:w4:min_blocks2"},
      {"bf16:d64:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
       {1, 4, 2, 700, 900}},
      {"fp16:d64:score{bias: fp16 4d grad; score + bias[b, h, q, kv]}", {1, 4, 2, 300, 333}},
      {"bf16:d64:causal:varlen:dropout", {4, 4, 2, 300, 400}, "", "", 7},
      {"bf16:d128:causal", {2, 8, 2, 1100, 1300}, "sm90:br128:bc48:w8:s2"},
      {"bf16:d128:causal:varlen", {4, 4, 2, 300, 400}, "sm90:br128:bc48:w8:s2", "", 7},
      {"fp16:d128:dropout:sinks", {2, 4, 1, 300, 400}, "sm90:br128:bc32:w8:s2"},
      {"bf16:d128", {1, 4, 2, 700, 900}, "sm90:br128:bc48:w8:s2", "qv"},
      {"bf16:d64:causal", {1, 4, 2, 700, 900}, "sm90:br128:bc80:w8:s2", "k"},
      {"bf16:d64:map64x64", {2, 4, 2, 500, 700}, "sm90:br128:bc64:w8:s2"},
      {"bf16:d128:map128x128", {2, 4, 2, 500, 900}, "sm90:br128:bc32:w8:s2"},
      {"bf16:d128:causal", {1, 4, 2, 700, 900}, "sm90:br128:bc48:w8:s3"},
      {"bf16:d72", {2, 4, 4, 256, 256}, "sm90:br128:bc80:w8:s2"},
      {"bf16:d96:causal", {2, 4, 2, 300, 400}, "sm90:br128:bc64:w8:s2"},
      {"bf16:d192x128:causal", {2, 4, 2, 300, 400}, "sm90:br128:bc32:w8:s2"},
      {"bf16:d64:causal", {2, 4, 2, 300, 400}, "sm90:br128:bc80:w8:s2", "", 0, true},
  };
  for (const char* spec :
       {"bf16:d64", "bf16:d128:causal", "fp16:d192x128:dropout:sinks", "bf16:d96:map64x64",
        "bf16:d128:mask{q >= kv && q - kv < 200}:kvlen",
        "bf16:d64:score{50.0 * tanh(score / 50.0)}:mask{doc: int32 1d; doc[q] == doc[kv]}"})
    for (const AttentionShape& shape :
         {AttentionShape{2, 8, 2, 1100, 1300}, {3, 4, 4, 300, 77}, {1, 4, 2, 5, 3000}})
      all.push_back({spec, shape});
  return all;
}

class Tangents : public GpuTestWith<JvpCase> {};

TEST_P(Tangents, AreTheDerivative) {
  TemporaryRuntime runtime;
  expect_tangents(runtime.get(), GetParam(), 1);
}

INSTANTIATE_TEST_SUITE_P(All, Tangents, testing::ValuesIn(jvp_cases()));

}  // namespace
}  // namespace flashjit::test

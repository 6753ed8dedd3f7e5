// O's tangent as the emulator runs it.
#include "tests/support/jvp_run.hpp"

namespace flashjit::test {
namespace {

class EmulatedJvp : public GpuTest {};

TEST_F(EmulatedJvp, IsTheDerivative) {
  TemporaryRuntime runtime;
  const JvpCase cases[] = {
      {"bf16:d64", {2, 4, 2, 70, 90}},
      {"fp32:d32x16:causal", {1, 2, 2, 100, 70}},  // rows without keys
      {"fp16:d128", {1, 2, 1, 65, 1}},
      {"bf16:d64:causal:varlen:dropout", {3, 4, 2, 70, 90}, "", "", 5},
      {"bf16:d64:mask{q >= kv && q - kv < 30}:kvlen", {3, 2, 1, 100, 110}},
      {"bf16:d64:map32x32", {1, 2, 2, 100, 130}},
      {"fp16:d72x40:score{5.0 * tanh(score / 5.0)}:fp32_out", {1, 4, 1, 70, 90}},
      {"fp32:d16:dropout:sinks", {2, 4, 2, 40, 50}},
      {"bf16:d320x280:causal", {1, 2, 1, 40, 50}},
      {"bf16:d64", {1, 2, 1, 50, 60}, "", "q"},
      {"bf16:d64", {1, 2, 1, 50, 60}, "", "kv"},
      {"bf16:d128:causal", {2, 4, 2, 300, 210}, "sm90:br128:bc48:w8:s2"},
      {"fp16:d128:dropout:sinks:kvlen", {2, 2, 1, 140, 150}, "sm90:br128:bc32:w8:s3"},
      {"bf16:d128:causal:varlen", {3, 4, 2, 150, 170}, "sm90:br128:bc48:w8:s2", "", 5},
      {"bf16:d64:map64x64", {1, 2, 2, 200, 330}, "sm90:br128:bc64:w8:s2"},
      {"bf16:d64:score{5.0 * tanh(score / 5.0)}:causal", {1, 4, 1, 270, 290}, "sm90:br128:bc80:w8:s2"},
      {"bf16:d128", {1, 2, 1, 150, 160}, "sm90:br128:bc48:w8:s2", "qv"},
      {"bf16:d128:mask{q >= kv && q - kv < 100}:kvlen", {2, 2, 1, 300, 310}, "sm90:br128:bc48:w8:s2"},
      {"fp16:d128:map32x32:sinks", {1, 2, 2, 200, 230}, "sm90:br128:bc32:w8:s2"},
      {"bf16:d64", {1, 2, 1, 150, 160}, "sm90:br128:bc80:w8:s2", "k"},
      {"bf16:d72:causal", {1, 2, 1, 150, 270}, "sm90:br128:bc80:w8:s2"},
      {"fp16:d96x80:kvlen", {2, 2, 1, 140, 250}, "sm90:br128:bc64:w8:s2"},
      {"bf16:d192x128:causal", {1, 2, 1, 150, 170}, "sm90:br128:bc32:w8:s2"},
      {"bf16:d128:map128x128", {1, 2, 2, 200, 530}, "sm90:br128:bc32:w8:s2"},
      {"bf16:d64:causal", {2, 4, 2, 150, 160}, "sm90:br128:bc80:w8:s2", "", 0, true},
      {"bf16:d64", {2, 4, 2, 50, 60}, "", "", 0, true},
  };
  unsigned seed = 0;
  for (const JvpCase& test : cases) expect_tangents(runtime.get(), test, seed++);
}

TEST_F(EmulatedJvp, HasTangentsOfCaptures) {
  TemporaryRuntime runtime;
  for (const char* spec :
       {"bf16:d64:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
        "fp16:d64:score{bias: fp16 4d grad; score + bias[b, h, q, kv]}",
        "bf16:d128:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
        "bf16:d128:score{gate: fp32 2d grad; score * gate[h, kv]}:mask{doc: int32 1d; doc[q] == doc[kv]}",
        "fp32:d32:score{gate: fp32 2d grad; score * exp(gate[h, kv]) - score * score}:sinks",
        "bf16:d64:score{table: fp32 2d grad; score + table[h, max(min(kv - q, 31), -32) + 32]}"
        ":mask{doc: int32 1d; doc[q] == doc[kv]}",
        // A large dS that all keys of a row have in common leaves O as it is.
        "bf16:d64:score{common: fp32 1d grad; score + 1000.0 * common[h]}:causal",
        "fp16:d64:score{common: fp32 1d grad; score + 1000.0 * common[h]}:sinks",
        // NaN and infinity of pairs that do not attend reach nothing.
        "bf16:d64:score{g: fp32 1d grad; score * sqrt(to_float(q - kv)) + g[kv] * log(to_float(q - kv))}"
        ":mask{kv < q}"})
    expect_tangents(runtime.get(), {spec, {1, 4, 2, 70, 90}});
}

}  // namespace
}  // namespace flashjit::test

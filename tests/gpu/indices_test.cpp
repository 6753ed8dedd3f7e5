// Lists of keys for each query: any number of heads, short and long lists, equal entries, no keys; NaN in
// rows that no list names.
#include "tests/support/attention_case.hpp"

namespace flashjit::test {
namespace {

std::vector<AttentionCase> index_cases() {
  struct Kind {
    const char* spec;
    AttentionShape shape;
    std::int64_t top_k;
  };
  const std::vector<Kind> kinds = {
      {"bf16:d64:indices", {2, 1, 1, 5, 300}, 1},
      {"fp16:d64:causal:indices", {2, 12, 4, 70, 300}, 64},
      {"bf16:d128:varlen:sinks:indices", {5, 8, 1, 60, 700}, 130},
      {"fp16:d128:kvlen:indices", {3, 3, 3, 9, 500}, 257},
      {"bf16:d192x128:causal_top_left:indices", {1, 65, 1, 40, 900}, 500},
      {"bf16:d256:indices", {2, 16, 2, 33, 400}, 200},
      {"fp16:d320x256:causal:indices", {1, 100, 1, 20, 600}, 320},
      {"bf16:d576x512:shared_kv:indices", {2, 128, 1, 17, 3000}, 2048},
      {"fp16:d576x512:causal:varlen:shared_kv:indices", {3, 16, 1, 50, 900}, 333},
      {"bf16:d576x512:shared_kv:indices", {1, 64, 1, 3, 5000}, 4096},
      {"bf16:d64:mask{doc: int32 1d; doc[q] == doc[kv]}:indices", {2, 6, 2, 90, 400}, 150},
      {"fp16:d96:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal:row_max:indices",
       {2, 40, 2, 9, 200},
       70},
      {"fp32:d72x40:causal:indices", {2, 20, 2, 9, 200}, 70},
  };
  std::vector<AttentionCase> all;
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const Kind& kind : kinds) {
      const auto seed = static_cast<unsigned>(all.size());
      AttentionCase test{.spec = spec_for(family, kind.spec),
                         .shape = kind.shape,
                         .family = family,
                         .layout = static_cast<Layout>(seed % 2),
                         .seed = seed,
                         .top_k = kind.top_k};
      test.dlse = seed % 3 == 1;
      all.push_back(test);
    }
  return all;
}

class IndicesTest : public SupportedCase {};

TEST_P(IndicesTest, MatchesTheReference) {
  const AttentionCase& test = GetParam();
  SCOPED_TRACE(to_string(test.spec) + " " + to_string(test.shape));
  TemporaryRuntime runtime;
  AttentionRun run(test);
  run.check_forward(runtime.get(), config_of(test, Pass::forward));
  run.check_backward(runtime.get(), config_of(test, Pass::backward));
}

INSTANTIATE_TEST_SUITE_P(All, IndicesTest, testing::ValuesIn(index_cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace flashjit::test

// Batch invariance and O in fp32 on a GPU.
#include "tests/support/invariant_run.hpp"

namespace flashjit::test {
namespace {

std::vector<InvariantCase> sequences() {
  const std::vector<std::int32_t> lengths = {16000, 5, 2048, 0, 2049, 9000, 700};
  std::vector<InvariantCase> all;
  for (const char* spec : {"bf16:d128:causal:cache:invariant", "fp16:d64:cache:invariant",
                           "bf16:d256:causal:cache:invariant", "fp32:d64:cache:invariant"})
    for (const std::int64_t queries : {1, 5, 64, 300})
      all.push_back({spec, {7, 16, 4, queries, 16384}, lengths});
  for (const char* spec : {"bf16:d128:causal:invariant", "fp16:d64:invariant"})
    for (const std::int64_t queries : {1, 40, 1000}) all.push_back({spec, {9, 8, 2, queries, 3000}});
  return all;
}

class Sequences : public GpuTestWith<InvariantCase> {};

TEST_P(Sequences, AreTheSameAlone) {
  TemporaryRuntime runtime;
  expect_same_alone(runtime.get(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, Sequences, testing::ValuesIn(sequences()));

class Rows : public GpuTestWith<const char*> {};

TEST_P(Rows, AreTheSameForFewerQueries) {
  TemporaryRuntime runtime;
  const std::vector<std::int32_t> lengths = {16000, 80, 2048, 0, 2049, 8192, 6143, 700};
  expect_same_of_fewer_queries(runtime.get(), {GetParam(), {8, 16, 4, 64, 16384}, lengths},
                               {1, 2, 4, 16, 33});
  // Chunks of a prefill.
  expect_same_of_fewer_queries(runtime.get(), {GetParam(), {8, 16, 4, 700, 16384}, lengths}, {65, 512});
}

INSTANTIATE_TEST_SUITE_P(All, Rows,
                         testing::Values("bf16:d64:causal:cache:invariant",
                                         "bf16:d128:causal:cache:invariant",
                                         "fp16:d192:causal:cache:invariant",
                                         "bf16:d256:causal:cache:invariant"));

std::vector<InvariantCase> fp32_outs() {
  std::vector<InvariantCase> all;
  for (const char* spec :
       {"bf16:d64", "bf16:d128:causal", "fp16:d72x40", "bf16:d256", "fp16:d192x128:causal"})
    for (const AttentionShape& shape : {AttentionShape{2, 4, 2, 333, 500}, AttentionShape{1, 4, 2, 1, 5000},
                                        AttentionShape{3, 4, 4, 9, 2000}})
      all.push_back({spec, shape});
  for (const char* spec : {"bf16:d64:causal:cache", "bf16:d128:cache:invariant"})
    for (const std::int64_t queries : {1, 70}) all.push_back({spec, {3, 8, 2, queries, 9000}, {9000, 0, 77}});
  for (const char* config : {"sm80:br64:bc64:w4", "sm80:br64:bc32:w4:min_blocks2:split", "simt:br32:bc32:w4"})
    all.push_back({"bf16:d64x40:causal", {2, 4, 2, 300, 500}, {}, config});
  return all;
}

class Fp32Out : public GpuTestWith<InvariantCase> {};

TEST_P(Fp32Out, IsWhatIsRounded) {
  TemporaryRuntime runtime;
  expect_fp32_out(runtime.get(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, Fp32Out, testing::ValuesIn(fp32_outs()));

}  // namespace
}  // namespace flashjit::test

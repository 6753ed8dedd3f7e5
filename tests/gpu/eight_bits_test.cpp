// Q, K and V of 8 bits without a cache: features in pairs, and rows of a tile and of many.
#include "tests/support/covering.hpp"
#include "tests/support/eight_bits_run.hpp"

namespace flashjit::test {
namespace {

std::vector<EightBits> problems() {
  constexpr AttentionShape kShapes[] = {{2, 8, 2, 333, 700}, {3, 4, 4, 1, 2000}, {2, 6, 3, 600, 129}};
  std::vector<EightBits> all;
  for (const KernelSpec& spec : covering_specs_of_products_of_codes()) {
    if (spec.kv.is_cache() || spec.epilogue.row_max)
      continue;  // which cache_test.cpp has, or the command has not
    if (spec.kv.is_padded() && spec.mask == causal()) continue;  // which has two meanings
    all.push_back({to_string(spec), kShapes[all.size() % std::size(kShapes)]});
  }
  for (const char* spec : {"fwd:bf16:d128:kve4m3:q_codes:causal", "fwd:fp16:d256:kve4m3:q_codes"})
    all.push_back({spec, {1, 1, 1, 64, 40000}});
  return all;
}

class EightBitsTest : public GpuTestWith<EightBits> {};

TEST_P(EightBitsTest, AreWithinTheirLimits) { check_eight_bits(GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, EightBitsTest, testing::ValuesIn(problems()));

}  // namespace
}  // namespace flashjit::test

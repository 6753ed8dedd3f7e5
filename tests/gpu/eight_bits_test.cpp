// Q, K and V of 8 bits without a cache: features in pairs, and rows of a tile and of many.
#include "tests/support/covering.hpp"
#include "tests/support/eight_bits_run.hpp"

namespace flashjit::test {
namespace {

class EightBitsTest : public GpuTest {};

TEST_F(EightBitsTest, AreWithinTheirLimits) {
  constexpr AttentionShape kShapes[] = {{2, 8, 2, 333, 700}, {3, 4, 4, 1, 2000}, {2, 6, 3, 600, 129}};
  std::size_t i = 0;
  for (const AttentionSpec& spec : covering_specs_of_products_of_codes()) {
    if (spec.has_cache() || spec.row_max) continue;  // which cache_test.cpp has, or the command has not
    if (spec.kv_lengths && spec.mask == causal()) continue;  // which has two meanings
    check_eight_bits({to_string(spec).c_str(), kShapes[i++ % std::size(kShapes)]});
  }
}

TEST_F(EightBitsTest, OfLongRowsAreWithinTheirLimits) {
  for (const char* spec : {"fwd:bf16:d128:kve4m3:q_codes:causal", "fwd:fp16:d256:kve4m3:q_codes"})
    check_eight_bits({spec, {1, 1, 1, 64, 40000}});
}

}  // namespace
}  // namespace flashjit::test

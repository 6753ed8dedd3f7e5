// Sizes that a caller gives and nothing has bounded yet: no product of them wraps.
#include "call/tensor_checks.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "call/apart.hpp"

namespace flashjit {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kHuge = std::int64_t{1} << 31;

TEST(TensorChecks, ProductsAndSumsStopAtTheLargestNumber) {
  EXPECT_EQ(times(3, 5), 15);
  EXPECT_EQ(times(kHuge, kHuge), kHuge * kHuge);
  EXPECT_EQ(times(kHuge, 2 * kHuge), kLargest);
  EXPECT_EQ(plus(kLargest - 1, 1), kLargest);
  EXPECT_EQ(plus(kLargest, kLargest), kLargest);
}

TEST(TensorChecks, ATensorOfMoreThanAllMemoryHasAnExtent) {
  ConstTensorView tensor;
  tensor.data = reinterpret_cast<void*>(0x10000);
  tensor.size = {2, 1, kHuge, 8};
  tensor.stride = {kHuge * kHuge, 8, kHuge, 1};  // 2^62 elements of 4 bytes, and more
  const Extent extent = extent_of(tensor, 4);
  EXPECT_EQ(extent.begin, 0x10000u);
  EXPECT_GT(extent.end, std::uintptr_t{1} << 62) << "empty, it would overlap nothing";
}

TEST(TensorChecks, APageTableOfAnyWidthHasACapacity) {
  AttentionSpec spec{.dtype = DType::bf16, .head_dim = 64, .kv = KvLayout::paged(256)};
  ConstTensorView k;
  k.size = {1, 1, 256, 64};
  EXPECT_EQ(cache_capacity(spec, k, PageTableView{nullptr, 1, kLargest / 2}), kLargest);
  EXPECT_EQ(cache_capacity(spec, k, PageTableView{nullptr, 1, 3}), 768);
}

}  // namespace
}  // namespace flashjit

// What cuTensorMapEncodeTiled of the emulated driver writes and the emulated TMA reads: 16-bit elements in
// boxes whose rows are at most 128 bytes, swizzled by 128 bytes, or bytes and words without a swizzle.
#pragma once

#include <cstdint>

namespace flashjit_emulator {

struct TensorMap {
  static constexpr int kMostDimensions = 5;

  char* data = nullptr;
  std::uint64_t strides[kMostDimensions] = {};  ///< bytes, the first those of an element
  std::uint32_t sizes[kMostDimensions] = {};
  std::uint16_t box[kMostDimensions] = {};
  std::uint16_t dimensions = 0;  ///< 0: not encoded
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace flashjit_emulator

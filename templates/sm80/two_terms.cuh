// P and dS as sums of two elements (two_terms): a value rounded, and what rounding leaves of it. Each product
// with them becomes two products, with the error of fp32.
#pragma once

#include "flashjit/common/sink.cuh"
#include "flashjit/sm80/tile.cuh"

namespace flashjit::sm80 {

/// What rounding to elements leaves of two values, as elements.
template <class Element>
__device__ __forceinline__ unsigned rest_of_pair(float low, float high) {
  const unsigned rounded = pack<Element>(low, high);
  return pack<Element>(low - low_of<Element>(rounded), high - high_of<Element>(rounded));
}

/// sum_of_products() where P V adds up both terms of P.
template <class Element>
__device__ __forceinline__ float sum_of_two_terms(float sum, float rest) {
  const float largest = exp2_approx(rest);
  return sum_of_products<Element>(sum, rest) + low_of<Element>(rest_of_pair<Element>(largest, 0.0f));
}

/// The second term of as_left_operand(). Where `kDrops`, values below zero are marked, and zero.
template <class Element, bool kDrops, int kNt>
__device__ __forceinline__ void rest_as_left_operand(unsigned (&a)[4], const float (&c)[kNt][4], int k) {
  const auto kept = [](float value) { return kDrops && value < 0.0f ? 0.0f : value; };
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float(&tile)[4] = c[2 * k + r / 2];
    a[r] = rest_of_pair<Element>(kept(tile[r % 2 * 2]), kept(tile[r % 2 * 2 + 1]));
  }
}

/// The second term of store_fragment(), without its factors.
template <class Element, int kPitch>
__device__ __forceinline__ void store_rest(char* tile, int row, int column, const float (&c)[4]) {
  const unsigned upper = rest_of_pair<Element>(c[0], c[1]), lower = rest_of_pair<Element>(c[2], c[3]);
  const float rest[4] = {low_of<Element>(upper), high_of<Element>(upper), low_of<Element>(lower),
                         high_of<Element>(lower)};
  store_fragment<Element, kPitch>(tile, row, column, rest, 1.0f, 1.0f);
}

}  // namespace flashjit::sm80

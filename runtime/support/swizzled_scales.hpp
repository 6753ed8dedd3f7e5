// The matrix of O's scales that tcgen05 reads, of all tokens and of the blocks of all heads, on the host.
#pragma once

#include <cstdint>

#include "templates/common/scale_tiles.cuh"

namespace flashjit {

/// Rows of the matrix: whole tiles.
constexpr std::int64_t rows_of_scales(std::int64_t tokens) {
  return (tokens + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows;
}

/// The byte of a token's column, of so many columns.
template <class Byte>
constexpr Byte* swizzled_scale(Byte* first, std::int64_t token, std::int64_t column, std::int64_t columns) {
  return row_of_scales(first, token, columns * kScaleTileRows, 0) +
         byte_of_scale_column(static_cast<int>(column));
}

}  // namespace flashjit

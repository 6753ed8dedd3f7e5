// Scales as cuBLAS and tcgen05 read them: a matrix of bytes in tiles of 128 rows and 4 columns, one after the
// other. Host and device include this file: the CPU reference writes them as kernels do.
#pragma once

namespace flashjit {

constexpr int kScaleTileRows = 128, kScaleTileColumns = 4;

/// The first byte of a row: tiles of 128 rows have `of_tiles` bytes, and a head begins `of_head` bytes behind
/// the first one. One sum, as parts of it in other functions change the order of code.
template <class Byte>
constexpr Byte* row_of_scales(Byte* first, long long row, long long of_tiles, long long of_head) {
  return first + row / kScaleTileRows * of_tiles + of_head + row % 32 * 16 +
         row % kScaleTileRows / 32 * kScaleTileColumns;
}
/// How many bytes behind it a column of the head is.
constexpr int byte_of_scale_column(int column) {
  return column / kScaleTileColumns * (kScaleTileRows * kScaleTileColumns) + column % kScaleTileColumns;
}

}  // namespace flashjit

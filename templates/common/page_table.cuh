// The entries of a page table: a row for each sequence, or one row for all, as CSR has it.
#pragma once

#include "flashjit/common/params.cuh"

namespace flashjit {

/// The host cannot check where sequences begin: an entry outside of the table is not read and names no page.
__device__ __forceinline__ int entry_of(const PageTableParam& table, int b, int column) {
  if (table.starts == nullptr) return table.pages[static_cast<long long>(b) * table.stride + column];
  const auto entry = static_cast<unsigned>(table.starts[b] + column);
  return entry < table.entries ? table.pages[entry] : -1;
}

}  // namespace flashjit

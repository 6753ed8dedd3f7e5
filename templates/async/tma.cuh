// TMA: copies of boxes of tensors between global and shared memory.
#pragma once

#include "flashjit/common/tensor_maps.cuh"

namespace flashjit {

/// The driver's CUtensorMap, opaque.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

using TensorMaps = TensorMapsOf<TensorMap>;
using JvpTensorMaps = JvpTensorMapsOf<TensorMap>;

/// Fetches a map before the first copy needs it.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Copies the box at (column, row, head, batch) to shared memory, and completes on `barrier`.
__device__ __forceinline__ void load_box(unsigned to, const TensorMap& map, unsigned barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

/// The same to this CTA's shared memory, which NVRTC knows from 12.8 on. On sm_120 load_box() also compares
/// CTAs, and has a call.
__device__ __forceinline__ void load_box_to_cta(unsigned to, const TensorMap& map, unsigned barrier,
                                                int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

/// The same for PackGQA, where the map has two dimensions for heads: query heads of a KV head, and KV heads.
__device__ __forceinline__ void load_packed_box(unsigned to, const TensorMap& map, unsigned barrier,
                                                int column, int head, int row, int set, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(set), "r"(batch)
      : "memory");
}

/// Starts copying a box from shared memory to (column, row, head, batch), in this thread's bulk group. Rows
/// and columns outside of the tensor are dropped.
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned from, int column, int row, int head,
                                          int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
/// Closes this thread's bulk group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until TMA has read the sources of all this thread's bulk groups.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Copies `bytes` (a multiple of 16) from global to shared memory, and completes on `barrier`.
__device__ __forceinline__ void load_line(unsigned to, const void* from, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Makes this thread's ordinary writes to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void publish_to_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashjit

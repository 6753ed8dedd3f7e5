// Hopper's own instructions, one wrapper each: mbarriers, bulk tensor copies, warp-group matrix products.
#pragma once

#include "flashjit/common/ptx.cuh"
#include "flashjit/common/wait.cuh"
#include "flashjit/sm90/layout.cuh"

namespace flashjit {

/// The driver's CUtensorMap, opaque.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

/// The tensors that a kernel copies through the TMA unit; `o` is O of the forward, dO of the backward pass,
/// `plane` the tensor of which the score reads planes: all zeros where the unit cannot copy it.
struct TensorMaps {
  TensorMap q, k, v, o, plane;
};

namespace sm90 {

/// True for one thread of a whole warp. Where it branches on this, ptxas knows that it is one, and need not
/// find that out before each instruction of the TMA unit.
__device__ __forceinline__ bool elected() {
  unsigned yes;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(yes));
  return yes != 0;
}

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives and tells how many bytes of bulk copies the phase waits for.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
template <class P>
__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
  if constexpr (P::kCheckWaits) {
    // In one piece: of the same loop in C++ ptxas makes spills, and products that wait for each other.
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        ".reg .u64 begin, now;\n"
        "mov.u64 begin, %%globaltimer;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "mov.u64 now, %%globaltimer;\n"
        "sub.u64 now, now, begin;\n"
        "setp.le.u64 done, now, %2;\n"
        "@done bra again;\n"
        "trap;\n"
        "over:\n"
        "}\n" ::"r"(barrier),
        "r"(parity), "n"(kHangNanoseconds)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
}
/// Whether there is nothing to wait for. The answer takes a wait's time even so: ask while there is other
/// work.
__device__ __forceinline__ bool barrier_ready(unsigned barrier, int parity) {
  unsigned yes;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(yes)
      : "r"(barrier), "r"(parity)
      : "memory");
  return yes != 0;
}
/// How many blocks a cluster has; 1 without clusters.
__device__ __forceinline__ unsigned cluster_size() {
  unsigned blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
}
/// Of a cluster: which block this is, and where something in this block's shared memory lies in another's.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ unsigned in_block(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
/// Waits for all threads of the cluster that have not ended.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
/// Stores a word or four, or copies `bytes` (a multiple of 16) of this block's shared memory, to that of a
/// block of the cluster, and completes on a barrier there.
__device__ __forceinline__ void store_remote(unsigned to, unsigned value, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
               "r"(value), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_remote(unsigned to, float4 value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
/// Arrives on a barrier of a block of the cluster, to say that what was there has been read. What this thread
/// has written need not be visible by that, for which it would wait until the whole GPU could see it.
__device__ __forceinline__ void barrier_arrive_remote(unsigned barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_remote(unsigned to, unsigned from, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Makes initialised barriers visible to the TMA unit.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Copies the box at (column, row, head, batch) to shared memory; completes on `barrier`.
__device__ __forceinline__ void load_box(unsigned to, const TensorMap& map, unsigned barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

/// The same for a map whose heads are two dimensions: those that share K and V, and the sets of them.
__device__ __forceinline__ void load_packed_box(unsigned to, const TensorMap& map, unsigned barrier,
                                                int column, int head, int row, int set, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(set), "r"(batch)
      : "memory");
}

/// Starts copying a box from shared memory to (column, row, head, batch); rows and columns outside of the
/// tensor stay behind. Of this thread's bulk group.
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned from, int column, int row, int head,
                                          int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
/// Ends this thread's bulk group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until the TMA unit has read what this thread's groups store or add.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Copies `bytes` (a multiple of 16) from global to shared memory; completes on `barrier`.
__device__ __forceinline__ void load_line(unsigned to, const void* from, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Stores four matrices of 8 x 8 16-bit elements, held as by mma; lane l gives the place of row l % 8 of
/// matrix l / 8.
__device__ __forceinline__ void store_matrices(unsigned to, const unsigned (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
/// Makes this thread's ordinary writes to shared memory visible to wgmma and the TMA unit.
__device__ __forceinline__ void publish_to_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void lower_register_limit() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void raise_register_limit() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// ptxas lets a wait for products overtake arithmetic that does not need them, which then runs when they are
/// done, not beside them. It stays behind this: a store to `place` that never happens, as `value` is not
/// negative.
__device__ __forceinline__ void finish_before_wait(float value, unsigned place) {
  asm volatile(
      "{\n"
      ".reg .pred negative;\n"
      "setp.lt.f32 negative, %0, 0f00000000;\n"
      "@negative st.shared.f32 [%1], %0;\n"
      "}\n" ::"f"(value),
      "r"(place)
      : "memory");
}
/// Keeps the compiler from moving reads and writes of an accumulator across an asynchronous product.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

/// Copies a tile, slice by slice, from slice `first` on.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap& map, unsigned barrier, int row,
                                          int head, int batch, int first = 0) {
  for (int slice = 0; slice < slices(kColumns); ++slice)
    load_box(to + slice * kRows * kRowBytes, map, barrier, (first + slice) * kSliceColumns, row, head, batch);
}

/// Descriptor of a 128-byte-swizzled tile whose rows are the M or N dimension of the product, or the summed
/// one. `slice_bytes`: from one slice of 64 columns to the next; read where rows are summed.
__device__ __forceinline__ unsigned long long tile_descriptor(unsigned address, int slice_bytes) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned long long kEightRows = static_cast<unsigned long long>(8 * kRowBytes >> 4) << 32;
  return kSwizzle128 | kEightRows | static_cast<unsigned long long>(slice_bytes >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}

}  // namespace sm90
}  // namespace flashjit

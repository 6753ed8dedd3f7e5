// The PTX instructions that the tensor-core families use, one wrapper each.
#pragma once

#include "flashjit/common/element.cuh"

namespace flashjit {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// The error is at most 2^-22, absolute or relative.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// A value that the compiler knows nothing about, so that it neither splits it nor keeps what it derived from
/// it.
template <class T>
__device__ __forceinline__ T opaque(T value) {
  asm("" : "+r"(value));
  return value;
}
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

/// Named barriers among some warps of the CTA; 0 is __syncthreads().
__device__ __forceinline__ void named_barrier_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/// Whether any thread that arrives there has `yes`.
__device__ __forceinline__ bool named_barrier_any(int name, int threads, bool yes) {
  unsigned any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(name), "r"(threads), "r"(static_cast<unsigned>(yes))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Programmatic dependent launch: a grid may start when all CTAs of the one before have allowed it, and
// waits until these have ended before it reads what they write.
template <class P>
__device__ __forceinline__ void let_next_grid_start() {
  if constexpr (P::kArch >= 90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
template <class P>
__device__ __forceinline__ void wait_for_prior_grid() {
  if constexpr (P::kArch >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Stores to global memory, for pointers whose origin the compiler does not see.
__device__ __forceinline__ void store_global(void* to, uint2 words) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
}
__device__ __forceinline__ void store_global(void* to, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

/// The larger of two, or NaN where one is. From sm_80 on.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

/// Copies 16 bytes from global to shared memory, or writes 16 zero bytes when `valid` is false.
__device__ __forceinline__ void copy_async_16(unsigned to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
/// Copies the first `bytes` of 16, and writes zeros behind.
__device__ __forceinline__ void copy_async_first(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// As copy_async_16(), of 4 bytes.
__device__ __forceinline__ void copy_async_4(unsigned to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_4(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Stores to an address of shared memory.
__device__ __forceinline__ void store_shared_16(unsigned to, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_4(unsigned to, unsigned x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane 8i+r gives the address of row r of matrix i.
__device__ __forceinline__ void load_matrix_x4(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
/// Two of them; lanes 0 to 15 give addresses.
__device__ __forceinline__ void load_matrix_x2(unsigned& first, unsigned& second, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(first), "=r"(second)
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

/// Adds to four floats in global memory, which begin at a multiple of 16 bytes.
__device__ __forceinline__ void add_four(float* at, float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x0), "f"(x1),
               "f"(x2), "f"(x3)
               : "memory");
#else
  atomicAdd(at, x0);
  atomicAdd(at + 1, x1);
  atomicAdd(at + 2, x2);
  atomicAdd(at + 3, x3);
#endif
}

/// C += A B with A 16x16, B 16x8 and fp32 C. Lane 4g+c holds C[g][2c], C[g][2c+1], C[g+8][2c], C[g+8][2c+1].
template <class Element>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma_16x8x16<fp16>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                  unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                  unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// C += A B with A 16x8 and B 8x8 of fp16, for sm_75: half of mma_16x8x16().
__device__ __forceinline__ void mma_16x8x8(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

/// C += A B of codes, 32 columns of A: a register has four that lie together, in the place of two of 16 bits.
template <class A, class B>
__device__ __forceinline__ void mma_16x8x32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma_16x8x32<e4m3, e4m3>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                        unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x32<e4m3, e5m2>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                        unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x32<e5m2, e5m2>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                        unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// Each element is two codes.
template <>
__device__ __forceinline__ void mma_16x8x16<e4m3>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                  unsigned b1) {
  mma_16x8x32<e4m3, e4m3>(c, a, b0, b1);
}
template <>
__device__ __forceinline__ void mma_16x8x16<e5m2>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                  unsigned b1) {
  mma_16x8x32<e5m2, e5m2>(c, a, b0, b1);
}

/// Brings 32 bytes into L2.
__device__ __forceinline__ void prefetch_to_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

/// Two floats as codes of e4m3, the first in the lower byte; too large values become the largest. From
/// sm_89 on.
__device__ __forceinline__ unsigned pair_of_e4m3(float x, float y) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(y), "f"(x));
  return codes;
}
/// Four floats as codes of e4m3, the first in the lowest byte; too large values become the largest.
__device__ __forceinline__ unsigned pack_e4m3(float x0, float x1, float x2, float x3) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
  return low | static_cast<unsigned>(high) << 16;
}

}  // namespace flashjit

// What NVRTC gives a kernel without being asked, for the host's compiler: included before every emulated
// kernel.
#pragma once

#include <math.h>
#include <initializer_list>

extern "C" int printf(const char*, ...);

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

// clang-format off
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
// clang-format on

namespace flashjit_emulator {

/// An operand of an asm statement: an input's bits, or where an output's variable is.
struct Operand {
  void* variable;
  unsigned long long bits;
  unsigned bytes;
};
template <class T>
inline Operand output(T& variable) {
  static_assert(sizeof(T) <= 8);
  return {&variable, 0, sizeof(T)};
}
template <class T>
inline Operand input(const T& value) {
  static_assert(sizeof(T) <= 8);
  Operand operand{nullptr, 0, sizeof(T)};
  __builtin_memcpy(&operand.bits, &value, sizeof(T));
  return operand;
}

/// An asm statement, with its instructions once it has run.
struct Statement {
  const char* text;
  const char* file;
  int line;
  const void* instructions;
};
void execute(Statement& statement, const Operand* operands, unsigned count);
template <class... Operands>
inline void run(Statement& statement, const Operands&... operands) {
  const Operand all[] = {operands..., {}};
  execute(statement, all, sizeof...(operands));
}

const uint3& thread_index() __attribute__((const));
const uint3& block_index() __attribute__((const));
const uint3& block_size() __attribute__((const));
const uint3& grid_size() __attribute__((const));

/// The block's variable of this key.
void* static_shared(const void* key, unsigned bytes, unsigned alignment);
void* dynamic_shared();
unsigned shared_offset(const void* pointer);
template <class T, class Unique>
inline T& shared_variable(Unique) {
  static const char key = 0;
  return *static_cast<T*>(static_shared(&key, sizeof(T), alignof(T)));
}

/// What the lanes of a warp do together, each with a value of its own.
enum class Exchange { sync, ballot, shuffle, shuffle_up, shuffle_down, shuffle_xor, least, greatest };
unsigned exchange(Exchange kind, unsigned lanes, unsigned value, int argument);
template <class T>
inline T shuffle(Exchange kind, unsigned lanes, T value, int argument) {
  unsigned words[(sizeof(T) + 3) / 4] = {};
  __builtin_memcpy(words, &value, sizeof(T));
  for (unsigned& word : words) word = exchange(kind, lanes, word, argument);
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}

/// Gives the number of threads for which it holds.
int synchronise_block(bool holds);
/// Lets others run, now and then.
void reach_atomic();
/// Lets others run, for whose work this thread waits.
void spin();

template <class T>
inline T fetch_add(T* at, T value) {
  reach_atomic();
  const T before = *at;
  *at = before + value;
  return before;
}
template <class T>
inline T fetch_replace(T* at, T value) {
  reach_atomic();
  const T before = *at;
  *at = value;
  return before;
}

/// A kernel that can be launched.
struct Entry {
  int cluster;
  void (*call)(void** parameters);
};
template <class A>
inline void call(void (*kernel)(A), void** parameters) {
  kernel(*static_cast<A*>(parameters[0]));
}
template <class A, class B>
inline void call(void (*kernel)(A, B), void** parameters) {
  kernel(*static_cast<A*>(parameters[0]), *static_cast<B*>(parameters[1]));
}

template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
/// Truncates and saturates; NaN gives `nan`.
template <class To>
inline To to_integer(float x, To nan) {
  constexpr To kLowest = To(1ull << (8 * sizeof(To) - 1)), kHighest = ~kLowest;
  if (x != x) return nan;
  if (x >= float(kHighest)) return kHighest;
  return x <= float(kLowest) ? kLowest : To(x);
}

}  // namespace flashjit_emulator

#define threadIdx (flashjit_emulator::thread_index())
#define blockIdx (flashjit_emulator::block_index())
#define blockDim (flashjit_emulator::block_size())
#define gridDim (flashjit_emulator::grid_size())

inline void __syncthreads() { flashjit_emulator::synchronise_block(false); }
inline int __syncthreads_count(int holds) { return flashjit_emulator::synchronise_block(holds != 0); }
inline void __syncwarp(unsigned lanes = ~0u) {
  flashjit_emulator::exchange(flashjit_emulator::Exchange::sync, lanes, 0, 0);
}
template <class T>
inline T __shfl_sync(unsigned lanes, T value, int lane) {
  return flashjit_emulator::shuffle(flashjit_emulator::Exchange::shuffle, lanes, value, lane);
}
template <class T>
inline T __shfl_up_sync(unsigned lanes, T value, int by) {
  return flashjit_emulator::shuffle(flashjit_emulator::Exchange::shuffle_up, lanes, value, by);
}
template <class T>
inline T __shfl_down_sync(unsigned lanes, T value, int by) {
  return flashjit_emulator::shuffle(flashjit_emulator::Exchange::shuffle_down, lanes, value, by);
}
template <class T>
inline T __shfl_xor_sync(unsigned lanes, T value, int bits) {
  return flashjit_emulator::shuffle(flashjit_emulator::Exchange::shuffle_xor, lanes, value, bits);
}
inline unsigned __ballot_sync(unsigned lanes, int holds) {
  return flashjit_emulator::exchange(flashjit_emulator::Exchange::ballot, lanes, holds != 0, 0);
}
inline int __vimax3_s32(int a, int b, int c) { return a > b ? (a > c ? a : c) : (b > c ? b : c); }
/// `chosen` of each half of two words.
template <class Half, class Chosen>
inline unsigned flashjit_halves(unsigned a, unsigned b, Chosen chosen) {
  const unsigned low = static_cast<unsigned short>(chosen(Half(a), Half(b)));
  return low | unsigned{static_cast<unsigned short>(chosen(Half(a >> 16), Half(b >> 16)))} << 16;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return flashjit_halves<unsigned short>(a, b, [](auto x, auto y) { return x > y ? x : y; });
}
inline unsigned __vminu2(unsigned a, unsigned b) {
  return flashjit_halves<unsigned short>(a, b, [](auto x, auto y) { return x < y ? x : y; });
}
inline unsigned __vmaxs2(unsigned a, unsigned b) {
  return flashjit_halves<short>(a, b, [](auto x, auto y) { return x > y ? x : y; });
}
inline int __any_sync(unsigned lanes, int holds) { return __ballot_sync(lanes, holds) != 0; }
inline int __all_sync(unsigned lanes, int holds) { return __ballot_sync(lanes, !holds) == 0; }
inline int __reduce_min_sync(unsigned lanes, int value) {
  return static_cast<int>(flashjit_emulator::exchange(flashjit_emulator::Exchange::least, lanes,
                                                      static_cast<unsigned>(value), 0));
}
inline int __reduce_max_sync(unsigned lanes, int value) {
  return static_cast<int>(flashjit_emulator::exchange(flashjit_emulator::Exchange::greatest, lanes,
                                                      static_cast<unsigned>(value), 0));
}

inline unsigned long long __cvta_generic_to_shared(const void* pointer) {
  return flashjit_emulator::shared_offset(pointer);
}
inline void __nanosleep(unsigned) { flashjit_emulator::spin(); }
inline void __threadfence() { flashjit_emulator::reach_atomic(); }
template <class T>
inline T atomicAdd(T* at, T value) {
  return flashjit_emulator::fetch_add(at, value);
}
inline int atomicMax(int* at, int value) {
  flashjit_emulator::reach_atomic();
  const int before = *at;
  if (value > before) *at = value;
  return before;
}
inline unsigned atomicOr(unsigned* at, unsigned bits) {
  flashjit_emulator::reach_atomic();
  const unsigned before = *at;
  *at = before | bits;
  return before;
}
template <class T>
inline T atomicExch(T* at, T value) {
  return flashjit_emulator::fetch_replace(at, value);
}
template <class T>
inline T __ldg(const T* at) {
  return *at;
}
template <class T>
inline T __ldcg(const T* at) {
  return *at;
}
template <class T>
inline void __stcg(T* at, T value) {
  *at = value;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
  return by >= 32 ? low : by == 0 ? high : high << by | low >> (32 - by);
}
inline unsigned __float_as_uint(float x) { return flashjit_emulator::as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return flashjit_emulator::as<float>(x); }
inline int __float_as_int(float x) { return flashjit_emulator::as<int>(x); }
inline float __int_as_float(int x) { return flashjit_emulator::as<float>(x); }
inline int __float2int_rz(float x) { return flashjit_emulator::to_integer<int>(x, 0); }
inline int __float2int_rn(float x) { return flashjit_emulator::to_integer<int>(nearbyintf(x), 0); }
inline long long __float2ll_rz(float x) {
  return flashjit_emulator::to_integer<long long>(x, static_cast<long long>(1ull << 63));
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? fminf(x, 1.0f) : 0.0f; }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = static_cast<float>(sin(M_PI * x)), *cosine = static_cast<float>(cos(M_PI * x));
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

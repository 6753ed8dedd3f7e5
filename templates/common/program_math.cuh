// The functions of the program language in fp32: fast ones for 16-bit elements, which round by more than
// these err, and exact ones for fp32.
#pragma once

namespace flashjit {

/// For 16-bit elements. The instructions are not volatile: the score and its derivative share them.
template <class Element>
struct Math {
  static __device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float sqrt(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float divide(float a, float b) {
    float y;
    asm("div.full.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
  static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float exp(float x) { return exp2(x * 1.4426950408889634f); }
  static __device__ __forceinline__ float log(float x) { return log2(x) * 0.6931471805599453f; }
  /// Not by tanh, whose absolute error is larger than small values.
  static __device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp(-x)); }
  static __device__ __forceinline__ float sin(float x) { return __sinf(within_a_turn(x)); }
  static __device__ __forceinline__ float cos(float x) { return __cosf(within_a_turn(x)); }

 private:
  /// Subtracts the nearest multiple of 2 pi, as the sum of two floats.
  static __device__ __forceinline__ float within_a_turn(float x) {
    const float turns = rintf(x * 0.15915494309189535f);
    return __fmaf_rn(turns, 1.7484555e-7f, __fmaf_rn(turns, -6.2831855f, x));
  }
};

template <>
struct Math<float> {
  static __device__ __forceinline__ float exp2(float x) { return exp2f(x); }
  static __device__ __forceinline__ float log2(float x) { return log2f(x); }
  static __device__ __forceinline__ float sqrt(float x) { return sqrtf(x); }
  static __device__ __forceinline__ float rsqrt(float x) { return rsqrtf(x); }
  static __device__ __forceinline__ float tanh(float x) { return tanhf(x); }
  static __device__ __forceinline__ float divide(float a, float b) { return a / b; }
  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ float log(float x) { return logf(x); }
  static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
  static __device__ __forceinline__ float sin(float x) { return sinf(x); }
  static __device__ __forceinline__ float cos(float x) { return cosf(x); }
};

}  // namespace flashjit

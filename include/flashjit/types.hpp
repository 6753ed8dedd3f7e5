// Element types, passes, kernel families and other names, which all other headers use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#if defined(_WIN32)
#include "flashjit/windows_export.h"
#else
#define FLASHJIT_API __attribute__((visibility("default")))
#endif

namespace flashjit {

/// Which computation a kernel does.
enum class Pass : std::uint8_t {
  forward,       ///< O from Q, K, V
  backward,      ///< dQ, dK, dV from those and dO
  append,        ///< new rows of K (rotated) and V into a cache, and new rows of Q, rotated
  merge,         ///< O and LSE of partial states over disjoint keys
  quantize,      ///< a tensor as codes of 2 to 8 bits and scales
  jvp,           ///< O and its tangent from Q, K, V and their tangents (forward-mode derivative)
  backward_jvp,  ///< tangents of dQ, dK, dV from tangents of Q, K, V and dO (second derivative)
};
/// Whether the pass is attention's. The others have no masks, no scores and no tiles to choose.
constexpr bool is_attention(Pass pass) {
  return pass == Pass::forward || pass == Pass::backward || pass == Pass::jvp || pass == Pass::backward_jvp;
}
/// Whether the results are gradients, or tangents of gradients.
constexpr bool gives_gradients(Pass pass) { return pass == Pass::backward || pass == Pass::backward_jvp; }

/// Element type of Q, K, V, O and their gradients. LSE and D are always fp32; so is accumulation. Types of 8
/// bits are codes: K and V are codes times scales, which are tensors of their own.
enum class DType : std::uint8_t {
  fp16,
  bf16,
  fp32,
  e4m3,  ///< 4 bits of exponent, 3 of mantissa: up to 448, no infinities
  e5m2,  ///< up to 57344
  int8,
};

/// Element type of a captured tensor. Programs read int64 as int64, other integers as int, booleans as bool
/// and floats as float.
enum class ElementType : std::uint8_t { fp32, fp16, bf16, int32, int64, int16, int8, uint8, boolean };

/// How many KV tiles of P V the tensor cores may sum up, where Q, K and V have 8 bits: see
/// Epilogue::pv_sums.
enum class PvSums : std::uint8_t { of_tile, of_four, of_all };

/// Kernel families, in order of preference. Each is named after the instructions it needs.
enum class Family : std::uint8_t {
  sm90,  ///< wgmma, TMA: sm_90a, fp16 and bf16
  sm80,  ///< mma.sync, ldmatrix, cp.async: sm_80 and newer, fp16 and bf16
  sm75,  ///< mma.sync, ldmatrix: chosen on sm_75, fp16
  simt,  ///< plain fused multiply-adds: sm_75 and newer, every type and problem but skip_softmax
};

/// Where a kernel's tile configuration comes from.
enum class ConfigSource : std::uint8_t {
  given,            ///< the caller named it
  tuned,            ///< a tuning record of this shape, measured on this device with these versions
  tuned_elsewhere,  ///< a record of this shape, from another device or other versions
  tuned_near,       ///< a record of a near shape
  heuristic,        ///< no record: the family chose
};

/// "fwd", "bwd", "append", "merge", "quantize", "jvp", "bwd_jvp"
FLASHJIT_API std::string to_string(Pass pass);
FLASHJIT_API std::string to_string(DType dtype);       // "fp16", "bf16", "fp32", "e4m3", ...
FLASHJIT_API std::string to_string(ElementType type);  // "fp32", ..., "uint8", "bool"
FLASHJIT_API std::string to_string(Family family);     // "sm90", "sm80", "sm75", "simt"
/// "given", "tuned", "tuned elsewhere", "tuned for a near shape", "heuristic"
FLASHJIT_API std::string to_string(ConfigSource source);

FLASHJIT_API Pass parse_pass(std::string_view text);
FLASHJIT_API DType parse_dtype(std::string_view text);
FLASHJIT_API Family parse_family(std::string_view text);

/// Bytes of one element.
constexpr int size_of(DType dtype) {
  constexpr int kBytes[] = {2, 2, 4, 1, 1, 1};
  return kBytes[static_cast<int>(dtype)];
}
constexpr int size_of(ElementType type) {
  constexpr int kBytes[] = {4, 2, 2, 4, 8, 2, 1, 1, 1};
  return kBytes[static_cast<int>(type)];
}

}  // namespace flashjit

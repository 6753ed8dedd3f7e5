// The small types that every template uses. Host and device include this file.
#pragma once

namespace flashjit {

struct fp16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};
/// K and V of 8 bits.
struct e4m3 {
  unsigned char bits;
};
struct e5m2 {
  unsigned char bits;
};
struct int8 {
  unsigned char bits;
};

/// How much of a tile attends.
enum class TileClass : int { empty, partial, full };

/// Half-open range of queries or keys.
struct Range {
  int begin, end;
};

/// A query or a key. Its float is base + offset: the kernels keep `offset` a constant of the unrolled loops,
/// so that what is affine in positions costs no conversion and hardly an addition. Exact below 2^24.
struct Position {
  int at;
  float base, offset;
};

/// A bool in a type, for lambdas.
template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

constexpr int min(int a, int b) { return a < b ? a : b; }
constexpr int max(int a, int b) { return a > b ? a : b; }
constexpr int clamped(int x, int low, int high) { return min(max(x, low), high); }

}  // namespace flashjit

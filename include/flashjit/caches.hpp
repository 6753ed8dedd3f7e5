// One softmax over the keys of several caches, such as the cache of a window and a compressed one.
#pragma once

#include <cstddef>
#include <span>

#include "flashjit/runtime.hpp"

namespace flashjit {

/// The most caches of attention_over().
inline constexpr std::size_t kMaxCaches = 8;

/// One of the caches of attention_over(), as Runtime::forward(spec, args) takes it.
struct CacheArgs {
  /// Its layout, formats, mask, score, `varlen`, `indices` and so on, as spec_of(args) finds it. All caches
  /// have the same `dtype` and columns of V. Not with weights(), out_mod, row_max and running_state. Sinks
  /// count once: they are given with the first cache alone.
  AttentionSpec spec;
  /// The queries, which all caches share, [b, hq, sq, d] or packed, with k, v, page_table, kv_lengths,
  /// indices, scales, captures and others of this cache. `lse` and `workspace` are the whole call's, and null
  /// here, and so is `out`, but for its dtype.
  ForwardArgs args;
};

/// Arguments of attention_over().
struct OverArgs {
  std::span<const CacheArgs> caches;  ///< 1 to kMaxCaches
  TensorView out;  ///< [b, hq, sq, dv] of the specs' dtype, or fp32 where the first spec has partial.fp32_out
  float* lse = nullptr;  ///< [b, hq, sq], natural log of the row sums over all caches; null: not wanted
  RowStrides lse_strides = {};
  Workspace workspace = {};  ///< at least attention_over_workspace_bytes(runtime, args)
};

/// Bytes of OverArgs::workspace: O in fp32 and LSE of each cache's part, and the most that one of their calls
/// needs besides. Pointers are not read. Compiles nothing; needs a current context. Not monotonic in sizes,
/// as Runtime::workspace_bytes(). Throws Error(invalid_argument) for caches that do not go together.
FLASHJIT_API std::size_t attention_over_workspace_bytes(Runtime& runtime, const OverArgs& args);

/// Launches O = softmax over the keys of all caches on `stream`: a forward pass of each cache, in their
/// order, which writes its part of O in fp32, and a launch that joins them (Runtime::merge()); with one cache
/// that cache's pass alone. It is exact: each row's sum is over the keys of all caches and its head's logit.
/// A key that is in two caches counts twice. Page sizes, formats, KV heads, masks and scores of caches may
/// differ. Packed rows of no sequence get O = 0 and LSE = -inf.
///
/// Allocates nothing on the device, and may be captured. To compile before, call it once, or prepare() each
/// spec with partial.fp32_out, and Pass::merge. Throws Error as Runtime::forward(), with messages that name
/// the cache, as "caches[1]: k has ..". `out` and `lse` are written by the last launch: they are as they were
/// where it throws.
FLASHJIT_API void attention_over(Runtime& runtime, const OverArgs& args, Stream stream);

}  // namespace flashjit

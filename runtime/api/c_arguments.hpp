// The C interface's structs of arguments as the C++ interface's.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>

#include "api/c_call.hpp"
#include "call/known_calls.hpp"
#include "flashjit/caches.hpp"
#include "flashjit/error.hpp"
#include "flashjit/flashjit.h"
#include "flashjit/runtime.hpp"
#include "templates/auxiliary/append_params.cuh"
#include "templates/common/params.cuh"

namespace flashjit::c_api {

inline std::optional<float> optional(const float* value) {
  return value ? std::optional(*value) : std::nullopt;
}

/// Room for one call's captures, whose span the arguments hold.
using Captures = std::array<Capture, FLASHJIT_MAX_CAPTURES>;

Capture capture(const flashjit_capture& c);

template <class CArgs>
std::span<const Capture> captures(const CArgs& c, Captures& room) {
  if (c.capture_count > room.size())
    throw Error(ErrorCode::invalid_argument,
                fmt::format("capture_count is {}: programs declare at most {} tensors and {} scalars.",
                            c.capture_count, kMaxCaptures, kMaxScalars));
  if (c.capture_count > 0) required(c.captures, "captures", "give capture_count of them");
  for (std::size_t i = 0; i < c.capture_count; ++i) {
    required(c.captures[i].name, "the name of a capture", "give the name that the program declares");
    room[i] = capture(c.captures[i]);
  }
  return {room.data(), c.capture_count};
}

/// Sets what the arguments of all passes share, with shared sequences, too.
template <class Args, class CArgs>
void set_alike(Args& args, const CArgs& c, Captures& room) {
  args.softmax_scale = optional(c.softmax_scale);
  args.dropout_p = c.dropout_p;
  args.seed = c.seed;
  args.offset = c.offset;
  args.workspace = {c.workspace, c.workspace_bytes};
  args.captures = captures(c, room);
  args.sinks = c.sinks;
}

/// Room for the states of a call, whose span the arguments hold.
using States = std::array<PartialState, kMaxPartialStates>;

/// Room for the caches of a call.
struct Caches {
  std::array<CacheArgs, kMaxCaches> of_call;
  std::array<Captures, kMaxCaches> captures;
};

/// Where the structs have addresses of device memory. Calls that differ in one that is missing here are
/// others.
inline constexpr std::array kMemoryOfForward = {offsetof(flashjit_forward_args, q.data),
                                                offsetof(flashjit_forward_args, k.data),
                                                offsetof(flashjit_forward_args, v.data),
                                                offsetof(flashjit_forward_args, out.data),
                                                offsetof(flashjit_forward_args, lse),
                                                offsetof(flashjit_forward_args, kv_lengths),
                                                offsetof(flashjit_forward_args, block_map.data),
                                                offsetof(flashjit_forward_args, workspace),
                                                offsetof(flashjit_forward_args, cu_seqlens_q),
                                                offsetof(flashjit_forward_args, cu_seqlens_kv),
                                                offsetof(flashjit_forward_args, sinks),
                                                offsetof(flashjit_forward_args, rng_state),
                                                offsetof(flashjit_forward_args, page_table.data),
                                                offsetof(flashjit_forward_args, page_table.starts),
                                                offsetof(flashjit_forward_args, row_max),
                                                offsetof(flashjit_forward_args, k_scale.data),
                                                offsetof(flashjit_forward_args, v_scale.data),
                                                offsetof(flashjit_forward_args, q_scale.data),
                                                offsetof(flashjit_forward_args, indices.data),
                                                offsetof(flashjit_forward_args, indices.topk_length),
                                                offsetof(flashjit_forward_args, prefix_length),
                                                offsetof(flashjit_forward_args, state.out.data),
                                                offsetof(flashjit_forward_args, state.lse),
                                                offsetof(flashjit_forward_args, out_before_mod.data),
                                                offsetof(flashjit_forward_args, k_block_scale.data),
                                                offsetof(flashjit_forward_args, v_block_scale.data),
                                                offsetof(flashjit_forward_args, skip_softmax_counts),
                                                offsetof(flashjit_forward_args, q_rope.data),
                                                offsetof(flashjit_forward_args, out_scale)};
inline constexpr std::array kMemoryOfBackward = {offsetof(flashjit_backward_args, q.data),
                                                 offsetof(flashjit_backward_args, k.data),
                                                 offsetof(flashjit_backward_args, v.data),
                                                 offsetof(flashjit_backward_args, out.data),
                                                 offsetof(flashjit_backward_args, lse),
                                                 offsetof(flashjit_backward_args, dout.data),
                                                 offsetof(flashjit_backward_args, dq.data),
                                                 offsetof(flashjit_backward_args, dk.data),
                                                 offsetof(flashjit_backward_args, dv.data),
                                                 offsetof(flashjit_backward_args, kv_lengths),
                                                 offsetof(flashjit_backward_args, block_map.data),
                                                 offsetof(flashjit_backward_args, workspace),
                                                 offsetof(flashjit_backward_args, cu_seqlens_q),
                                                 offsetof(flashjit_backward_args, cu_seqlens_kv),
                                                 offsetof(flashjit_backward_args, sinks),
                                                 offsetof(flashjit_backward_args, dsinks),
                                                 offsetof(flashjit_backward_args, rng_state),
                                                 offsetof(flashjit_backward_args, dlse),
                                                 offsetof(flashjit_backward_args, indices.data),
                                                 offsetof(flashjit_backward_args, indices.topk_length)};

/// A call of this spec in words. False where it is not to be remembered: with tile lists, or scales of O that
/// it writes.
template <class CArgs>
bool add_words(CallWords& call, const flashjit_spec& spec, const CArgs& c);
using MovedCaptures = std::array<flashjit_capture, FLASHJIT_MAX_CAPTURES>;
/// The call with each of its addresses moved by its distance_of_address(). `room` holds the captures.
template <class CArgs>
CArgs with_moved_addresses(CArgs c, MovedCaptures& room);

// `room` holds what spans of the result point to.
ListArgs list_args(const flashjit_list_args& c, Captures& room);
ForwardArgs forward_args(const flashjit_forward_args& c, Captures& room);
BackwardArgs backward_args(const flashjit_backward_args& c, Captures& room);
JvpArgs jvp_args(const flashjit_jvp_args* given, Captures& room);
BackwardJvpArgs backward_jvp_args(const flashjit_backward_jvp_args* given, Captures& room);
AppendArgs append_args(const flashjit_append_args* given);
MergeArgs merge_args(const flashjit_merge_args* given, States& room);
OverArgs over_args(const flashjit_over_args* given, Caches& room);
QuantizeArgs quantize_args(const flashjit_quantize_args* given);

}  // namespace flashjit::c_api

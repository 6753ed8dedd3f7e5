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

/// What the arguments of all passes have alike, those of shared sequences too.
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

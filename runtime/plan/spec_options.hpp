// The options of a spec that are on or off: one row says all that is the same for each.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string_view>

#include "flashjit/spec.hpp"

namespace flashjit::plan {

constexpr int kMaxHeadDim = 576;  ///< of Q and K
constexpr int kMaxHeadDimV = 512, kHeadDimStep = 8;
constexpr int kMostPageSize = 1 << 30;
constexpr std::int64_t kMostOfACount = std::numeric_limits<std::int32_t>::max();
// Kernels count queries and keys in 32 bits, and their last tile reaches past the end.
constexpr std::int64_t kMaxLength = kMostOfACount - 1023;

struct SpecOption {
  std::string_view text;      ///< in a spec: "kvlen"
  std::string_view constant;  ///< of the Problem: "kKvLengths"; empty: none
  bool (*is_on)(const AttentionSpec&);
  void (*turn_on)(AttentionSpec&);
  std::string_view argument = "";  ///< of a call in Python, which turns it on: "kv_lengths"
};

/// A flag of a spec, or of a member of it.
template <auto... kMembers>
constexpr SpecOption spec_option(std::string_view text, std::string_view constant,
                                 std::string_view argument = "") {
  return {text, constant, [](const AttentionSpec& spec) { return (spec.*....*kMembers); },
          [](AttentionSpec& spec) { (spec.*....*kMembers) = true; }, argument};
}

/// In the order of a spec's text, where a block map comes before `det`.
inline constexpr std::array kSpecOptions{
    spec_option<&AttentionSpec::dropout>("dropout", "kDropout", "dropout_p"),
    SpecOption{"kvlen", "kKvLengths", [](const AttentionSpec& spec) { return spec.kv.is_padded(); },
               [](AttentionSpec& spec) { spec.kv.kind = KvLayout::Kind::padded; }, "kv_lengths"},
    spec_option<&AttentionSpec::reproducible, &Reproducible::deterministic>("det", "kDeterministic",
                                                                            "deterministic"),
    spec_option<&AttentionSpec::varlen>("varlen", "kVarlen", "cu_seqlens_q"),
    spec_option<&AttentionSpec::sinks>("sinks", "kSinks", "sinks"),
    SpecOption{"cache", "kCache", [](const AttentionSpec& spec) { return spec.kv.is_cache(); },
               [](AttentionSpec& spec) { spec.kv.kind = KvLayout::Kind::slots; }, "cache"},
    spec_option<&AttentionSpec::epilogue, &Epilogue::row_max>("row_max", "kRowMax", "return_row_max"),
    spec_option<&AttentionSpec::epilogue, &Epilogue::skip_softmax>("skip_softmax", "kSkipSoftmax",
                                                                   "skip_softmax_threshold"),
    spec_option<&AttentionSpec::epilogue, &Epilogue::swizzled_scales>("swizzled_scales", "kSwizzledScales",
                                                                      "swizzled_scales"),
    spec_option<&AttentionSpec::kv, &KvLayout::key_scales>("key_scales", "kKeyScales", "k_scale"),
    spec_option<&AttentionSpec::kv, &KvLayout::hadamard>("hadamard", ""),  // another entry of append()
    spec_option<&AttentionSpec::partial, &Partial::fp32_out>("fp32_out", "kFp32Out", "out_dtype"),
    spec_option<&AttentionSpec::partial, &Partial::two_terms>("two_terms", "kTwoTerms", "accurate"),
    spec_option<&AttentionSpec::partial, &Partial::fp32_grads>("fp32_grads", "kFp32Grads"),
    spec_option<&AttentionSpec::partial, &Partial::add_grads>("add_grads", "kAddGrads"),
    spec_option<&AttentionSpec::partial, &Partial::dropout_place>("dropout_place", "kDropoutPlace"),
    spec_option<&AttentionSpec::reproducible, &Reproducible::batch_invariant>("invariant", "kInvariant",
                                                                              "batch_invariant"),
    spec_option<&AttentionSpec::kv, &KvLayout::shared_kv>("shared_kv", "kSharedKv", "v_columns"),
    spec_option<&AttentionSpec::prologue, &Prologue::q_codes>("q_codes", "kQCodes", "q_scale"),
    SpecOption{"sums4", "kSumsOfFour",
               [](const AttentionSpec& spec) { return spec.epilogue.pv_sums == PvSums::of_four; },
               [](AttentionSpec& spec) { spec.epilogue.pv_sums = PvSums::of_four; }},
    SpecOption{"sums_all", "kSumsAll",
               [](const AttentionSpec& spec) { return spec.epilogue.pv_sums == PvSums::of_all; },
               [](AttentionSpec& spec) { spec.epilogue.pv_sums = PvSums::of_all; }},
    spec_option<&AttentionSpec::prologue, &Prologue::q_rope>("q_rope", "kQRope", "q_rope"),
    spec_option<&AttentionSpec::indices>("indices", "kIndices", "indices"),
    spec_option<&AttentionSpec::kv, &KvLayout::shared_prefix>("shared_prefix", "kSharedPrefix",
                                                              "prefix_length"),
    spec_option<&AttentionSpec::partial, &Partial::running_state>("running_state", "kRunningState", "state"),
    SpecOption{"weight_mod", "kWeightMod", [](const AttentionSpec& spec) { return spec.score.is_weight(); },
               [](AttentionSpec& spec) { spec.score = weights(spec.score); }, "weight_mod"},
};

/// Whether the text names a pass: "fwd:bf16:d64" does, "bf16:d64" does not.
bool names_pass(std::string_view spec_text);

}  // namespace flashjit::plan

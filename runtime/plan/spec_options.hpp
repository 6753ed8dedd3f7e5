// The options of a spec that are on or off: one row says all that is the same for each.
#pragma once

#include <array>
#include <string_view>

#include "flashjit/spec.hpp"

namespace flashjit::plan {

struct SpecOption {
  std::string_view text;      ///< in a spec: "kvlen"
  std::string_view constant;  ///< of the Problem: "kKvLengths"
  bool AttentionSpec::*on;
  std::string_view argument = "";  ///< of a call in Python, which turns it on: "kv_lengths"
};

/// In the order of a spec's text, where a block map comes before `det`.
inline constexpr std::array kSpecOptions{
    SpecOption{"dropout", "kDropout", &AttentionSpec::dropout, "dropout_p"},
    SpecOption{"kvlen", "kKvLengths", &AttentionSpec::kv_lengths, "kv_lengths"},
    SpecOption{"det", "kDeterministic", &AttentionSpec::deterministic, "deterministic"},
    SpecOption{"varlen", "kVarlen", &AttentionSpec::varlen, "cu_seqlens_q"},
    SpecOption{"sinks", "kSinks", &AttentionSpec::sinks, "sinks"},
    SpecOption{"cache", "kCache", &AttentionSpec::cache, "cache"},
    SpecOption{"row_max", "kRowMax", &AttentionSpec::row_max, "return_row_max"},
    SpecOption{"key_scales", "kKeyScales", &AttentionSpec::key_scales, "k_scale"},
    SpecOption{"fp32_out", "kFp32Out", &AttentionSpec::fp32_out, "out_dtype"},
    SpecOption{"fp32_grads", "kFp32Grads", &AttentionSpec::fp32_grads},
    SpecOption{"add_grads", "kAddGrads", &AttentionSpec::add_grads},
    SpecOption{"dropout_place", "kDropoutPlace", &AttentionSpec::dropout_place},
    SpecOption{"invariant", "kInvariant", &AttentionSpec::batch_invariant, "batch_invariant"},
    SpecOption{"shared_kv", "kSharedKv", &AttentionSpec::shared_kv, "v_columns"},
    SpecOption{"q_codes", "kQCodes", &AttentionSpec::q_codes, "q_scale"},
    SpecOption{"indices", "kIndices", &AttentionSpec::indices, "indices"},
    SpecOption{"shared_prefix", "kSharedPrefix", &AttentionSpec::shared_prefix, "prefix_length"},
    SpecOption{"running_state", "kRunningState", &AttentionSpec::running_state, "state"},
};

/// Whether the text names a pass: "fwd:bf16:d64" does, "bf16:d64" does not.
bool names_pass(std::string_view spec_text);

}  // namespace flashjit::plan

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
};

/// In the order of a spec's text, where a block map stands before `det`.
inline constexpr std::array kSpecOptions{
    SpecOption{"dropout", "kDropout", &AttentionSpec::dropout},
    SpecOption{"kvlen", "kKvLengths", &AttentionSpec::kv_lengths},
    SpecOption{"det", "kDeterministic", &AttentionSpec::deterministic},
    SpecOption{"varlen", "kVarlen", &AttentionSpec::varlen},
    SpecOption{"sinks", "kSinks", &AttentionSpec::sinks},
};

}  // namespace flashjit::plan

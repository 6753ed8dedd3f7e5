// Tuning records that ship inside the library: one text file a GPU in runtime/plan/shipped, embedded when it
// is built.
//
//     arch sm_90a
//     device NVIDIA H100 80GB HBM3
//     driver 13.0
//     nvrtc nvrtc13.0.88
//     library 0.1.0
//     fwd:bf16:d128:causal b1:hq32:hkv8:sq4096:skv4096 sm90:br128:bc128:w8:s2
//
// '#' begins a comment at the start of a line. `flashjit tune --ship FILE` writes them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/records.hpp"

namespace flashjit::plan {

/// The records of such a text, without timings. Throws Error(io) with the line that is wrong.
std::vector<TuningRecord> parse_shipped(std::string_view text);

/// The text of records of one architecture, device and set of versions. Throws Error(invalid_argument) when
/// they are of several, or there are none.
std::string shipped_text(const std::vector<TuningRecord>& records);

/// The records that this library was built with.
const std::vector<TuningRecord>& shipped_records();

}  // namespace flashjit::plan

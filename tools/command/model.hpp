// The kernels that serving or training a model needs, from a line that says what its attention is.
#pragma once

#include <string_view>
#include <vector>

#include "packing.hpp"

namespace flashjit::command {

/// Each kernel that the heuristic takes on the device for any number of sequences, queries and keys: decode,
/// prefill and chunks of it, append and merge. `text` is such as "32/8 heads, d128, pages of 16, bf16", and
/// "kv e4m3" for a cache of 8 bits; with "training" instead of a cache both passes, of sequences of one
/// length and of packed ones. What it has besides is of a spec, such as "mask{q - kv < 4096}". Throws
/// Error(invalid_argument).
std::vector<PackItem> model_items(std::string_view text, const DeviceInfo& device,
                                  const plan::TuningRecords& records);

}  // namespace flashjit::command

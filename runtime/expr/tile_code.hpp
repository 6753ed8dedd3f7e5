// Classes of tiles and bounds as CUDA.
#pragma once

#include <string>

#include "expr/analyze.hpp"
#include "expr/code.hpp"

namespace flashjit::expr {

/// Bodies of the hooks of the same names; the arguments are called q_range and kv_range.
std::string classify_tile_body(HeadCode& head, const MaskAnalysis& mask);
std::string bounds_body(HeadCode& head, const MaskAnalysis& mask, bool of_keys);

}  // namespace flashjit::expr

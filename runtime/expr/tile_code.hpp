// Classes of tiles and bounds as CUDA.
#pragma once

#include <string>

#include "expr/analyze.hpp"
#include "expr/code.hpp"

namespace flashjit::expr {

/// Which bounds: of keys or of queries, and whether some position of the other kind meets them or all do.
struct BoundsKind {
  bool of_keys, of_all = false;
};

/// Bodies of the hooks of the same names; the arguments are called q_range and kv_range.
std::string classify_tile_body(HeadCode& head, const MaskAnalysis& mask);
std::string bounds_body(HeadCode& head, const MaskAnalysis& mask, BoundsKind kind);

}  // namespace flashjit::expr

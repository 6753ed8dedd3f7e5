// Which keys queries may attend to, as far as a mask's bounds and the lengths alone tell: what planning knows
// of a mask before a call.
#pragma once

#include "expr/analyze.hpp"
#include "templates/common/types.cuh"

namespace flashjit::expr {

class KeyBounds {
 public:
  /// An empty mask bounds nothing.
  explicit KeyBounds(const MaskProgram& mask);
  KeyBounds(const KeyBounds&) = delete;
  KeyBounds& operator=(const KeyBounds&) = delete;

  /// The keys that some of `queries` (non-empty) may attend to: all but the keys that affine
  /// comparisons of positions, lengths and constants rule out.
  Range of(Range queries, int seqlen_q, int seqlen_kv) const;

 private:
  Graph graph_;
  std::optional<MaskAnalysis> mask_;  // where it bounds the keys
};

}  // namespace flashjit::expr

// Score and mask programs: what is done to a score before the softmax, and which pairs (q, kv) attend.
#pragma once

#include <string>
#include <utility>

#include "flashjit/types.hpp"

namespace flashjit {

/// Which pairs (q, kv) attend to each other, as canonical text that is part of the kernel's key.
///
/// The empty program masks nothing. Known programs: "causal" and "causal_top_left".
class MaskProgram {
 public:
  MaskProgram() = default;
  explicit MaskProgram(std::string text) : text_(std::move(text)) {}

  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  bool operator==(const MaskProgram&) const = default;

 private:
  std::string text_;
};

/// What is done to softmax_scale * (Q K^T) before the softmax, as canonical text.
///
/// The empty program is the identity, and the only one known so far.
class ScoreProgram {
 public:
  ScoreProgram() = default;
  explicit ScoreProgram(std::string text) : text_(std::move(text)) {}

  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  bool operator==(const ScoreProgram&) const = default;

 private:
  std::string text_;
};

/// Where the diagonal of a causal mask ends when seqlen_q and seqlen_kv differ.
enum class CausalAlignment : std::uint8_t {
  bottom_right,  ///< the last query sees the last key: q + seqlen_kv - seqlen_q >= kv
  top_left,      ///< the first query sees the first key only: q >= kv
};

/// A causal mask. The lengths are those of the AttentionShape; key padding masks further, it does not shift.
inline MaskProgram causal(CausalAlignment alignment = CausalAlignment::bottom_right) {
  return MaskProgram(alignment == CausalAlignment::bottom_right ? "causal" : "causal_top_left");
}

}  // namespace flashjit

// Score and mask programs: how a score changes before the softmax, and which pairs (q, kv) attend; and
// programs of O's, Q's and K's elements. The language is in flashjit/expr.hpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "flashjit/expr.hpp"
#include "flashjit/types.hpp"

namespace flashjit {

/// Which pairs (q, kv) attend to each other, as canonical text that is part of the kernel's key.
///
/// A bool expression without `score`: "kv <= q + window" or spec.mask = q >= kv && q - kv < 1024. The empty
/// program masks nothing; "true" and blank text are the same. "causal" and "causal_top_left" are names of two
/// masks.
class FLASHJIT_API MaskProgram {
 public:
  MaskProgram() = default;
  /// Throws Error(invalid_argument) if it is not a bool expression, reads score, declares a gradient, or
  /// declares more than 16 tensors or 8 scalars.
  explicit MaskProgram(std::string_view text);
  MaskProgram(const expr::Expr& mask);

  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  /// Null when empty.
  const expr::NodePtr& tree() const { return tree_; }
  friend bool operator==(const MaskProgram& a, const MaskProgram& b) { return a.text_ == b.text_; }

 private:
  std::string text_;
  expr::NodePtr tree_;
};

/// How softmax_scale * (Q K^T) changes before the softmax, as canonical text.
///
/// A float expression (an int becomes float): "50.0 * tanh(score / 50.0)". The empty program is the identity;
/// "score" and blank text are the same. Or, made by weights(), the weights themselves.
class FLASHJIT_API ScoreProgram {
 public:
  ScoreProgram() = default;
  /// Throws Error(invalid_argument) if it is not an expression, is bool, or declares more than 16 tensors or
  /// 8 scalars.
  explicit ScoreProgram(std::string_view text);
  ScoreProgram(const expr::Expr& score);

  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  /// Null when empty.
  const expr::NodePtr& tree() const { return tree_; }
  /// Whether its value is the weight of a pair, without a softmax.
  bool is_weight() const { return is_weight_; }
  friend bool operator==(const ScoreProgram& a, const ScoreProgram& b) {
    return a.text_ == b.text_ && a.is_weight_ == b.is_weight_;
  }
  /// The program with its value as the weight of a pair, P, in place of the softmax: sigmoid or ReLU
  /// attention, SiLU / n of HSTU. Pairs that a mask leaves out weigh 0. There is no LSE, and the backward
  /// pass reads neither O nor LSE. Not for dropout, a sink, row_max, indices, q_codes, batch_invariant and
  /// running_state, nor for an empty program.
  friend ScoreProgram weights(ScoreProgram program) {
    program.is_weight_ = true;
    return program;
  }

 private:
  std::string text_;
  expr::NodePtr tree_;
  bool is_weight_ = false;
};
ScoreProgram weights(ScoreProgram program);

/// How O's elements change before they are stored, as canonical text.
///
/// A float expression of `out`, an element of O in fp32, and of b, h, h_kv, q, column, seqlen_q and
/// seqlen_kv: "gate: bf16 4d; out * sigmoid(gate[b, q, h, column])". The empty program is the identity; "out"
/// and blank text are the same.
class FLASHJIT_API OutProgram {
 public:
  OutProgram() = default;
  /// Throws Error(invalid_argument) if it is not an expression, is bool, reads score or kv, or declares more
  /// than 16 tensors or 8 scalars.
  explicit OutProgram(std::string_view text);
  OutProgram(const expr::Expr& out);

  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  /// Null when empty.
  const expr::NodePtr& tree() const { return tree_; }
  friend bool operator==(const OutProgram& a, const OutProgram& b) { return a.text_ == b.text_; }

 private:
  std::string text_;
  expr::NodePtr tree_;
};

/// How elements of Q's or K's rows change before the scores, as canonical text.
///
/// A float expression of `element`, an element of the row in fp32, `element_at(column)`, another one, the
/// row's `sum_of_squares`, `column`, b, h_kv, seqlen_q, seqlen_kv, and in q_mod h and q, in k_mod kv:
/// "cos: fp32 2d; sin: fp32 2d; element * cos[q, column % 64] + select(column < 64, -element_at(column + 64),
/// element_at(column - 64)) * sin[q, column % 64]". The empty program is the identity; "element" and blank
/// text are the same.
class FLASHJIT_API RowProgram {
 public:
  RowProgram() = default;
  /// Throws Error(invalid_argument) if it is not an expression, is bool, reads score or out, or declares more
  /// than 16 tensors or 8 scalars.
  explicit RowProgram(std::string_view text);
  RowProgram(const expr::Expr& element);

  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  /// Null when empty.
  const expr::NodePtr& tree() const { return tree_; }
  friend bool operator==(const RowProgram& a, const RowProgram& b) { return a.text_ == b.text_; }

 private:
  std::string text_;
  expr::NodePtr tree_;
};

/// Where the diagonal of a causal mask ends when seqlen_q and seqlen_kv differ.
enum class CausalAlignment : std::uint8_t {
  bottom_right,  ///< the last query sees the last key: q + seqlen_kv - seqlen_q >= kv
  top_left,      ///< the first query sees the first key only: q >= kv
};

/// A causal mask. The lengths are the AttentionShape's (with varlen, the sequence's); key padding
/// masks more, without shifting the diagonal.
FLASHJIT_API const MaskProgram& causal(CausalAlignment alignment = CausalAlignment::bottom_right);

}  // namespace flashjit

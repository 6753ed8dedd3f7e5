// Q in two tensors, as latent attention has it: the columns that V has, too, and those behind them.
#pragma once

#include "call/tensor_checks.hpp"
#include "flashjit/runtime.hpp"

namespace flashjit {

/// Makes a Q of all columns the two views of its memory that the spec wants.
inline void split_q(const AttentionSpec& spec, ForwardArgs& args) {
  if (!spec.prologue.q_rope) return;
  args.q_rope = args.q;
  args.q_rope.data = static_cast<const char*>(args.q.data) + spec.v_dim() * size_of(spec.dtype);
  args.q_rope.size[3] -= spec.v_dim();
  args.q = args.q.first_columns(spec.v_dim());
}

/// The columns behind V's, where they are apart; else, and in passes with derivatives, no tensor.
template <class Args>
ConstTensorView q_rope_of(const Args& args) {
  if constexpr (requires { args.q_rope; })
    return args.q_rope;
  else
    return {};
}

/// `sizes`: of a Q that has all columns.
void check_q(const AttentionSpec& spec, const ConstTensorView& q, const ConstTensorView& q_rope, Sizes sizes);

}  // namespace flashjit

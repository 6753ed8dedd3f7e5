// Q in two tensors, as latent attention has it: the columns that V has, too, and those behind them.
#pragma once

#include "call/tensor_checks.hpp"

namespace flashjit {

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

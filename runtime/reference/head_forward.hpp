// The forward pass of one head, from which the other passes go on.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "reference/context.hpp"
#include "reference/matrix.hpp"

namespace flashjit::reference {

/// One head's Q, K, V.
struct Head {
  Matrix q, k, v;

  Head(const Context& context, std::int64_t task)
      : q(slice(context.problem.q, context.q_rows(task), context.spec.head_dim)),
        k(slice(context.problem.k, context.kv_rows(task), context.spec.head_dim)),
        v(slice(context.problem.v, context.kv_rows(task), context.spec.v_dim())) {}
};

/// One head's forward pass, with what the backward pass uses again.
struct HeadForward {
  Matrix s;                   ///< what the score program is given
  Matrix p;                   ///< after the softmax, before dropout
  Matrix dropped;             ///< what dropout multiplies P with
  std::vector<bool> attends;  ///< of each pair
  Matrix out;
  std::vector<double> lse, row_max;

  explicit HeadForward(Matrix products)
      : s(std::move(products)),
        p(s.rows, s.columns),
        dropped(s.rows, s.columns),
        out(0, 0),
        lse(s.rows),
        row_max(s.rows) {}
};

/// With an LSE of NaN, P is NaN where the query attends, and zero at all other keys.
void spoil_row(HeadForward& fwd, std::int64_t i);
HeadForward forward_head(const Context& context, const Arithmetic& arithmetic, const Head& head,
                         std::int64_t task);

}  // namespace flashjit::reference

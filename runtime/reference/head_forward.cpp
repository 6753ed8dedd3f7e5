#include "reference/head_forward.hpp"

#include <cmath>
#include <limits>

namespace flashjit::reference {
namespace {

/// The largest score of a row, or `first`; NaN where one is NaN or infinity, next to which no other has a
/// share.
double largest_of(const double* row, std::int64_t columns, double first) {
  double largest = first;
  for (std::int64_t j = 0; j < columns; ++j)
    if (std::isnan(row[j]) || row[j] > largest)
      largest = row[j];
    else if (std::isnan(largest))
      break;
  return largest == kInfinity ? kNaN : largest;
}

/// Replaces a row of scores by its softmax, in which `sink` is one more score, and returns its LSE. A row of
/// -inf becomes zeros.
double softmax(double* row, std::int64_t columns, double sink) {
  const double largest = largest_of(row, columns, sink);
  if (largest == -kInfinity) {
    std::fill_n(row, columns, 0.0);
    return largest;
  }
  double sum = std::exp(sink - largest);
  for (std::int64_t j = 0; j < columns; ++j) sum += row[j] = std::exp(row[j] - largest);
  for (std::int64_t j = 0; j < columns; ++j) row[j] /= sum;
  return largest + std::log(sum);
}

/// The softmax of a row of scores, with dropout's and the lists' part in it: its P, LSE and largest score.
void softmax_row(const Context& context, HeadForward& fwd, std::int64_t task, std::int64_t i) {
  double* const p = fwd.p[i];
  fwd.row_max[i] = largest_of(p, fwd.p.columns, -kInfinity);
  if (context.spec.indices)  // keys that are named twice count twice
    for (std::int64_t j = 0; j < fwd.p.columns; ++j)
      if (p[j] != -kInfinity) p[j] += std::log(context.named(task, i, j));
  fwd.lse[i] = softmax(p, fwd.p.columns, context.sink(task));
  if (std::isnan(fwd.lse[i])) spoil_row(fwd, i);
}

/// With weight_mod scores are P already. There is no LSE: -inf, as rows without keys have it.
void keep_row(HeadForward& fwd, std::int64_t i) { fwd.lse[i] = fwd.row_max[i] = -kInfinity; }

}  // namespace

void spoil_row(HeadForward& fwd, std::int64_t i) {
  for (std::int64_t j = 0; j < fwd.p.columns; ++j)
    fwd.p[i][j] = fwd.attends[i * fwd.p.columns + j] ? kNaN : 0.0;
}

HeadForward forward_head(const Context& context, const Arithmetic& arithmetic, const Head& head,
                         std::int64_t task) {
  HeadForward fwd(arithmetic.product(head.q, transpose(head.k)));
  const double masked = context.spec.score.is_weight() ? 0.0 : -kInfinity;
  for (std::int64_t i = 0; i < fwd.s.rows; ++i) {
    double *const s = fwd.s[i], *const p = fwd.p[i];
    for (std::int64_t j = 0; j < fwd.s.columns; ++j) {
      const Point at = context.point(task, i, j);
      s[j] = arithmetic.rounded_score(context.scale * s[j]);
      const bool attends = context.attends(at);
      p[j] = !attends                       ? masked
             : context.programs.has_score() ? arithmetic.rounded_score(context.programs.score(at, s[j]))
                                            : s[j];
      fwd.dropped[i][j] = attends ? context.dropout_factor(task, i, j) : 0.0;
      fwd.attends.push_back(attends);
    }
    if (context.spec.score.is_weight())
      keep_row(fwd, i);
    else
      softmax_row(context, fwd, task, i);
  }
  if (context.spec.prologue.q_codes)
    arithmetic.round_to_codes(fwd.p);
  else
    arithmetic.round(fwd.p);
  Matrix kept = fwd.p;
  for (std::size_t i = 0; i < kept.values.size(); ++i) kept.values[i] *= fwd.dropped.values[i];
  arithmetic.round(kept);
  fwd.out = arithmetic.product(kept, head.v);
  arithmetic.round(fwd.out);
  return fwd;
}

}  // namespace flashjit::reference

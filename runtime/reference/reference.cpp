#include "reference/reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>

#include "reference/context.hpp"
#include "reference/head_forward.hpp"
#include "reference/matrix.hpp"
#include "reference/row_mods.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"

namespace flashjit::reference {
namespace {

/// Joins O and LSE with O and LSE of other keys, where the problem has them.
void join_state(const Context& context, const Arithmetic& arithmetic, std::int64_t task, HeadForward& fwd) {
  const Problem& problem = context.problem;
  if (!context.spec.partial.running_state) return;
  const Matrix before = slice(problem.state_out, context.q_rows(task), fwd.out.columns);
  for (std::int64_t i = 0; i < fwd.out.rows; ++i) {
    const double lse = problem.state_lse[context.q_rows(task).begin + i];
    if (lse == -kInfinity) continue;  // whose O may be anything
    const double highest = std::max(lse, fwd.lse[i]);
    const double of_state = std::exp(lse - highest), of_keys = std::exp(fwd.lse[i] - highest);
    for (std::int64_t j = 0; j < fwd.out.columns; ++j)
      fwd.out[i][j] = (of_state * before[i][j] + of_keys * fwd.out[i][j]) / (of_state + of_keys);
    fwd.lse[i] = highest + std::log(of_state + of_keys);
  }
  arithmetic.round(fwd.out);
}

/// O as it is stored.
Matrix modified_out(const Context& context, const Arithmetic& arithmetic, std::int64_t task,
                    const Matrix& out) {
  Matrix result = out;
  for (std::int64_t i = 0; i < out.rows; ++i)
    for (std::int64_t j = 0; j < out.columns; ++j)
      result[i][j] = arithmetic.rounded(context.programs.out_mod(context.point(task, i, 0), j, out[i][j]));
  return result;
}

/// One head's gradients; all but dq are its share of a sum over heads.
struct HeadBackward {
  Matrix dq, dk, dv;
  std::vector<double> dsink_rows = {};
  CaptureGrads captures = {}, capture_squares = {}, capture_counts = {};
};

/// From d loss / d (scores after the program) to those before it, and what that gives to the captures.
/// `sizes`: of the terms whose difference ds is.
void through_score_program(const Context& context, const Arithmetic& arithmetic, const HeadForward& fwd,
                           std::int64_t task, const Matrix& sizes, Matrix& ds, HeadBackward& result) {
  if (!context.programs.has_score()) return;
  if (result.captures.empty())
    result.captures = result.capture_squares = result.capture_counts = context.programs.zero_grads();
  for (std::int64_t i = 0; i < ds.rows; ++i) {
    for (std::int64_t j = 0; j < ds.columns; ++j) {
      const Point at = context.point(task, i, j);
      if (!context.attends(at)) continue;  // the program may mean nothing there
      const auto add = [&](std::size_t capture, std::int64_t element, double derivative) {
        double& grad = result.captures[capture][element];
        grad = arithmetic.sum(grad, ds[i][j] * derivative);
        const double size = sizes[i][j] * derivative;
        result.capture_squares[capture][element] += size * size;
        ++result.capture_counts[capture][element];
      };
      if (context.programs.has_grads()) context.programs.add_grads(at, fwd.s[i][j], add);
      ds[i][j] = arithmetic.rounded(ds[i][j] * context.programs.score_grad(at, fwd.s[i][j]));
    }
  }
}

/// LSE and O of more keys than its own, if the problem has them, are the softmax's; NaN is of some such
/// key. LSE in fp32 that is the same but for its rounding changes nothing.
void take_results_of_all_keys(const Context& context, std::int64_t task, HeadForward& fwd) {
  const Problem& problem = context.problem;
  if (problem.lse.empty()) return;
  const Matrix out = slice(problem.out, context.q_rows(task), fwd.out.columns);
  for (std::int64_t i = 0; i < fwd.p.rows; ++i) {
    const double lse = problem.lse[context.q_rows(task).begin + i];
    const bool of_more = std::isnan(lse) || lse > fwd.lse[i] + 1e-6 * (1 + std::abs(lse));
    if (!of_more || std::isnan(fwd.lse[i])) continue;
    const double share = std::exp(fwd.lse[i] - lse);
    for (std::int64_t j = 0; j < fwd.p.columns; ++j) fwd.p[i][j] *= share;
    if (std::isnan(lse)) spoil_row(fwd, i);
    for (std::int64_t j = 0; j < out.columns; ++j) fwd.out[i][j] = out[i][j];
    fwd.lse[i] = lse;
  }
}

/// From dP to d loss / d score, where the softmax of a row is D's: P (dP - D).
void softmax_backward(const Context& context, const Arithmetic& arithmetic, const HeadForward& fwd,
                      const Matrix& dout, std::int64_t task, Matrix& ds, Matrix& sizes,
                      std::vector<double>& dsink_rows) {
  const double sink = context.sink(task);
  dsink_rows.resize(sink == -kInfinity ? 0 : fwd.p.rows);
  for (std::int64_t i = 0; i < ds.rows; ++i) {
    double d = -context.dlse(task, i, fwd.lse[i]);
    for (std::int64_t j = 0; j < dout.columns; ++j) d += dout[i][j] * fwd.out[i][j];
    for (std::int64_t j = 0; j < ds.columns; ++j) {
      if (fwd.p[i][j] == 0) {  // V of a key that the query does not attend to may be NaN
        ds[i][j] = 0;
        continue;
      }
      const double dp = arithmetic.rounded(arithmetic.rounded(ds[i][j]) * fwd.dropped[i][j]);
      ds[i][j] = arithmetic.rounded(fwd.p[i][j] * (dp - d));
      sizes[i][j] = fwd.p[i][j] * (std::abs(dp) + std::abs(d));
    }
    if (sink != -kInfinity) {
      const double p = arithmetic.rounded(std::exp(sink - fwd.lse[i]));
      dsink_rows[i] = -arithmetic.rounded(p * d);
    }
  }
}

/// The same with weight_mod, where the score is P: dP of pairs that attend.
void weights_backward(const Arithmetic& arithmetic, const HeadForward& fwd, Matrix& ds, Matrix& sizes) {
  for (std::int64_t i = 0; i < ds.rows; ++i)
    for (std::int64_t j = 0; j < ds.columns; ++j) {
      ds[i][j] = fwd.attends[i * ds.columns + j] ? arithmetic.rounded(ds[i][j]) : 0.0;
      sizes[i][j] = std::abs(ds[i][j]);
    }
}

/// A gradient times a derivative, which may be NaN where the gradient is zero.
double chained(double gradient, double derivative) { return gradient == 0 ? 0 : gradient * derivative; }

/// From the gradient of what out_mod gave to dO, and what that gives to the captures.
Matrix through_out_mod(const Context& context, const Arithmetic& arithmetic, const HeadForward& fwd,
                       std::int64_t task, const Matrix& given, HeadBackward& result) {
  Matrix dout = given;
  if (result.captures.empty())
    result.captures = result.capture_squares = result.capture_counts = context.programs.zero_grads();
  for (std::int64_t i = 0; i < dout.rows; ++i)
    for (std::int64_t j = 0; j < dout.columns; ++j) {
      const Point at = context.point(task, i, 0);
      const auto add = [&](std::size_t capture, std::int64_t element, double derivative) {
        const double value = chained(dout[i][j], derivative);
        double& grad = result.captures[capture][element];
        grad = arithmetic.sum(grad, value);
        result.capture_squares[capture][element] += value * value;
        ++result.capture_counts[capture][element];
      };
      context.programs.add_out_mod_grads(at, j, fwd.out[i][j], add);
      dout[i][j] =
          arithmetic.rounded(chained(dout[i][j], context.programs.out_mod_grad(at, j, fwd.out[i][j])));
    }
  return dout;
}

HeadBackward backward_head(const Context& context, const Arithmetic& arithmetic, const Head& head,
                           const Matrix& given, std::int64_t task) {
  HeadForward fwd = forward_head(context, arithmetic, head, task);
  take_results_of_all_keys(context, task, fwd);
  HeadBackward result{Matrix(0, 0), Matrix(0, 0), Matrix(0, 0)};
  const Matrix dout =
      context.programs.has_out_mod() ? through_out_mod(context, arithmetic, fwd, task, given, result) : given;
  Matrix kept = fwd.p;
  for (std::size_t i = 0; i < kept.values.size(); ++i) kept.values[i] *= fwd.dropped.values[i];
  arithmetic.round(kept);

  std::vector<double> dsink_rows;
  Matrix sizes(fwd.p.rows, fwd.p.columns);
  Matrix ds = arithmetic.product(dout, transpose(head.v));  // dP until the softmax's derivative is applied
  if (context.spec.score.is_weight())
    weights_backward(arithmetic, fwd, ds, sizes);
  else
    softmax_backward(context, arithmetic, fwd, dout, task, ds, sizes, dsink_rows);
  result.dv = arithmetic.product(transpose(kept), dout);
  result.dsink_rows = std::move(dsink_rows);
  through_score_program(context, arithmetic, fwd, task, sizes, ds, result);
  result.dq = arithmetic.product(ds, head.k);
  result.dk = arithmetic.product(transpose(ds), head.q);
  for (double& value : result.dq.values) value *= context.scale;
  for (double& value : result.dk.values) value *= context.scale;
  arithmetic.round(result.dq);
  return result;
}

/// Sums the query heads of each group and rounds once: rows of K or V from one matrix a query head.
std::vector<double> sum_groups(const Context& context, const Arithmetic& arithmetic,
                               const std::vector<HeadBackward>& heads, Matrix HeadBackward::*part,
                               std::size_t size) {
  std::vector<double> sum(size, 0.0);
  for (std::int64_t task = 0; task < context.tasks(); ++task) {
    const std::vector<double>& values = (heads[task].*part).values;
    double* to = sum.data() + context.kv_rows(task).begin * (heads[task].*part).columns;
    for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
  }
  for (double& value : sum) value = arithmetic.rounded(value);
  return sum;
}

}  // namespace

Forward forward(const Problem& given, Precision precision) {
  const Arithmetic arithmetic{given.spec.dtype, precision};
  const std::optional<Problem> modified = with_modified_rows(given, arithmetic);
  const Problem& problem = modified ? *modified : given;
  const Context context(problem);
  if (context.spec.partial.running_state) {
    check_size("state_out", problem.state_out.size(), count({context.q_count(), context.spec.v_dim()}));
    check_size("state_lse", problem.state_lse.size(), context.q_count());
  }
  Forward result{std::vector<double>(context.q_count() * context.spec.v_dim()),
                 std::vector<double>(context.q_count(), kNaN), std::vector<double>(context.q_count(), kNaN)};
  const bool with_mod = context.programs.has_out_mod();
  if (with_mod) result.out_before_mod.resize(result.out.size());
  std::mutex out_mutex;  // sequences may share rows where cu_seqlens_q is wrong
  parallel_for(context.tasks(), [&](std::int64_t task) {
    HeadForward head = forward_head(context, arithmetic, Head(context, task), task);
    join_state(context, arithmetic, task, head);
    const std::lock_guard lock(out_mutex);
    put(with_mod ? modified_out(context, arithmetic, task, head.out) : head.out, result.out,
        context.q_rows(task));
    if (with_mod) put(head.out, result.out_before_mod, context.q_rows(task));
    std::ranges::copy(head.lse, result.lse.begin() + context.q_rows(task).begin);
    std::ranges::copy(head.row_max, result.row_max.begin() + context.q_rows(task).begin);
  });
  return result;
}

Backward backward(const Problem& given, Precision precision) {
  const Arithmetic arithmetic{given.spec.dtype, precision};
  const std::optional<Problem> modified = with_modified_rows(given, arithmetic);
  const Problem& problem = modified ? *modified : given;
  const Context context(problem);
  const std::int64_t dim_v = context.spec.v_dim();
  check_size("dout", problem.dout.size(), count({context.q_count(), dim_v}));
  if (!problem.dlse.empty()) check_size("dlse", problem.dlse.size(), context.q_count());
  if (!problem.lse.empty()) {
    check_size("lse", problem.lse.size(), context.q_count());
    check_size("out", problem.out.size(), count({context.q_count(), dim_v}));
  }
  Backward result{.dq = std::vector<double>(problem.q.size()), .dk = {}, .dv = {}};
  result.captures = result.capture_squares = result.capture_counts = context.programs.zero_grads();
  if (context.has_sinks()) {
    result.dsinks.resize(context.shape.heads_q);
    result.dsink_rows.resize(context.tasks() * context.shape.seqlen_q);
  }
  std::vector<HeadBackward> heads(context.tasks(), {Matrix(0, 0), Matrix(0, 0), Matrix(0, 0)});
  std::mutex captures_mutex;  // a head's share may be large: none is kept
  parallel_for(context.tasks(), [&](std::int64_t task) {
    const Matrix dout = slice(problem.dout, context.q_rows(task), dim_v);
    heads[task] = backward_head(context, arithmetic, Head(context, task), dout, task);
    const CaptureGrads captures = std::move(heads[task].captures);
    const CaptureGrads squares = std::move(heads[task].capture_squares);
    const CaptureGrads counts = std::move(heads[task].capture_counts);
    const std::lock_guard lock(captures_mutex);
    for (std::size_t i = 0; i < captures.size(); ++i)
      for (std::size_t j = 0; j < captures[i].size(); ++j) {
        result.captures[i][j] = arithmetic.sum(result.captures[i][j], captures[i][j]);
        result.capture_squares[i][j] += squares[i][j];
        result.capture_counts[i][j] += counts[i][j];
      }
  });
  for (std::int64_t task = 0; task < context.tasks(); ++task) {
    put(heads[task].dq, result.dq, context.q_rows(task));
    if (context.has_sinks()) {
      const std::vector<double>& rows = heads[task].dsink_rows;
      std::copy(rows.begin(), rows.end(), result.dsink_rows.begin() + task * context.shape.seqlen_q);
      const double of_task = std::accumulate(
          rows.begin(), rows.end(), 0.0, [&](double sum, double row) { return arithmetic.sum(sum, row); });
      double& dsink = result.dsinks[context.head_of(task)];
      dsink = arithmetic.sum(dsink, of_task);
    }
  }
  result.dk = sum_groups(context, arithmetic, heads, &HeadBackward::dk, problem.k.size());
  result.dv = sum_groups(context, arithmetic, heads, &HeadBackward::dv, problem.v.size());
  if (modified) through_row_mods(Context(given), arithmetic, result);
  return result;
}

double round_to(DType dtype, double value) { return dtype_info(dtype).round(value); }

}  // namespace flashjit::reference

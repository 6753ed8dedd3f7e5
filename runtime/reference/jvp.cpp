// Forward-mode derivative: with S = score(softmax_scale * Q K^T),
//
//   dS = score'(..) softmax_scale (dQ K^T + Q dK^T) + d score / d capture * dcapture
//   dLSE = rowsum(P * dS),  dO = (P * (dS - dLSE)) V + P dV
//
// where dropout multiplies P in dO alone, and a sink is one more score without a value.
#include <cmath>
#include <limits>
#include <mutex>

#include "reference/head_forward.hpp"
#include "reference/reference.hpp"

namespace flashjit::reference {
namespace {

/// Some rows of a tangent; zeros where there is none.
Matrix tangent_of(const std::vector<double>& tangent, Rows rows, std::int64_t columns) {
  return tangent.empty() ? Matrix(rows.count, columns) : slice(tangent, rows, columns);
}

/// What the captures' tangents add to a score's.
double of_captures(const Context& context, const Point& at, double s) {
  const auto& tangents = context.problem.capture_tangents;
  if (tangents.empty() || !context.programs.has_grads()) return 0;
  double sum = 0;
  context.programs.add_grads(at, s, [&](std::size_t capture, std::int64_t element, double derivative) {
    const double tangent = tangents[capture][element];
    if (tangent != 0) sum += derivative * tangent;
  });
  return sum;
}

/// dS of a head, from the tangents of its products; zero where a pair does not attend.
void through_score_program(const Context& context, const Arithmetic& arithmetic, const HeadForward& fwd,
                           std::int64_t task, Matrix& ds) {
  for (std::int64_t i = 0; i < ds.rows; ++i)
    for (std::int64_t j = 0; j < ds.columns; ++j) {
      double& tangent = ds[i][j];
      if (!fwd.attends[i * ds.columns + j]) {
        tangent = 0;
        continue;
      }
      tangent = arithmetic.rounded(tangent * context.scale);
      if (!context.programs.has_score()) continue;
      const Point at = context.point(task, i, j);
      const double own = tangent == 0 ? 0 : context.programs.score_grad(at, fwd.s[i][j]) * tangent;
      tangent = arithmetic.rounded(own + of_captures(context, at, fwd.s[i][j]));
    }
}

struct HeadJvp {
  HeadForward fwd;
  Matrix out;
  std::vector<double> lse;
};

HeadJvp jvp_head(const Context& context, const Arithmetic& arithmetic, std::int64_t task) {
  const Problem& problem = context.problem;
  const Head head(context, task);
  const Matrix dq = tangent_of(problem.q_tangent, context.q_rows(task), context.spec.head_dim);
  const Matrix dk = tangent_of(problem.k_tangent, context.kv_rows(task), context.spec.head_dim);
  const Matrix dv = tangent_of(problem.v_tangent, context.kv_rows(task), context.spec.v_dim());
  HeadJvp result{forward_head(context, arithmetic, head, task), Matrix(0, 0), {}};
  const HeadForward& fwd = result.fwd;

  Matrix ds = arithmetic.product(dq, transpose(head.k));
  const Matrix of_keys = arithmetic.product(head.q, transpose(dk));
  for (std::size_t i = 0; i < ds.values.size(); ++i) ds.values[i] += of_keys.values[i];
  through_score_program(context, arithmetic, fwd, task, ds);

  const double sink = context.sink(task);
  const double dsink = problem.sinks_tangent.empty() ? 0 : problem.sinks_tangent[context.head_of(task)];
  Matrix dp(ds.rows, ds.columns), p(ds.rows, ds.columns);
  for (std::int64_t i = 0; i < ds.rows; ++i) {
    double dlse = sink == -kInfinity ? 0 : std::exp(sink - fwd.lse[i]) * dsink;
    for (std::int64_t j = 0; j < ds.columns; ++j)
      if (fwd.p[i][j] != 0) dlse += fwd.p[i][j] * ds[i][j];
    for (std::int64_t j = 0; j < ds.columns; ++j) {
      if (fwd.p[i][j] == 0) continue;
      p[i][j] = arithmetic.rounded(fwd.p[i][j] * fwd.dropped[i][j]);
      dp[i][j] = arithmetic.rounded(fwd.p[i][j] * (ds[i][j] - dlse) * fwd.dropped[i][j]);
    }
    result.lse.push_back(dlse);
  }
  result.out = arithmetic.product(dp, head.v);
  const Matrix of_values = arithmetic.product(p, dv);
  for (std::size_t i = 0; i < result.out.values.size(); ++i) result.out.values[i] += of_values.values[i];
  arithmetic.round(result.out);
  return result;
}

void check_tangents(const Context& context) {
  const Problem& problem = context.problem;
  const auto check = [](const char* name, const std::vector<double>& tangent, std::size_t wanted) {
    if (!tangent.empty()) check_size(name, tangent.size(), static_cast<std::int64_t>(wanted));
  };
  check("q_tangent", problem.q_tangent, problem.q.size());
  check("k_tangent", problem.k_tangent, problem.k.size());
  check("v_tangent", problem.v_tangent, problem.v.size());
  check("sinks_tangent", problem.sinks_tangent, static_cast<std::size_t>(context.shape.heads_q));
  if (problem.capture_tangents.empty()) return;
  const CaptureGrads sizes = context.programs.zero_grads();
  check_size("capture_tangents", problem.capture_tangents.size(), static_cast<std::int64_t>(sizes.size()));
  for (std::size_t i = 0; i < sizes.size(); ++i)
    check_size(problem.captures[i].name.c_str(), problem.capture_tangents[i].size(),
               static_cast<std::int64_t>(sizes[i].size()));
}

}  // namespace

Jvp jvp(const Problem& problem, Precision precision) {
  const Context context(problem);
  const Arithmetic arithmetic{context.spec.dtype, precision};
  check_tangents(context);
  const std::int64_t rows = context.q_count();
  Jvp result{.out = std::vector<double>(context.q_count() * context.spec.v_dim()),
             .lse = std::vector<double>(rows, kNaN),
             .out_tangent = std::vector<double>(context.q_count() * context.spec.v_dim()),
             .lse_tangent = std::vector<double>(rows, kNaN)};
  std::mutex out_mutex;  // sequences may share rows where cu_seqlens_q is wrong
  parallel_for(context.tasks(), [&](std::int64_t task) {
    const HeadJvp head = jvp_head(context, arithmetic, task);
    const std::lock_guard lock(out_mutex);
    put(head.fwd.out, result.out, context.q_rows(task));
    put(head.out, result.out_tangent, context.q_rows(task));
    std::ranges::copy(head.fwd.lse, result.lse.begin() + context.q_rows(task).begin);
    std::ranges::copy(head.lse, result.lse_tangent.begin() + context.q_rows(task).begin);
  });
  return result;
}

}  // namespace flashjit::reference

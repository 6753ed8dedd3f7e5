// The derivative of the backward pass along tangents of what it reads. With a prime for a tangent,
//
//   S' = score'(..) scale (Q' K^T + Q K'^T) + d score / d capture * capture',   LSE' = rowsum(P S')
//   P' = P (S' - LSE'),   dP' = dO' V^T + dO V'^T,   D' = rowsum(P' dP + P dP') - dLSE'
//   dS' = P' (dP - D) + P (dP' - D')
//
// and the tangents of dQ, dK and dV are the tangents of the products, where dropout multiplies P and dP, and
// a sink is one more score without a value.
#include <cmath>
#include <mutex>

#include "reference/head_forward.hpp"
#include "reference/reference.hpp"
#include "reference/score_tangents.hpp"

namespace flashjit::reference {
namespace {

/// Some rows of a tangent; zeros where there is none.
Matrix rows_of_tangent(const std::vector<double>& tangent, Rows rows, std::int64_t columns) {
  return tangent.empty() ? Matrix(rows.count, columns) : slice(tangent, rows, columns);
}

Matrix sum_of(const Arithmetic& arithmetic, Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.values.size(); ++i) a.values[i] += b.values[i];
  arithmetic.round(a);
  return a;
}

/// A head's matrices and their tangents.
struct HeadTangents {
  Matrix q, k, v, dout;

  HeadTangents(const Context& context, std::int64_t task)
      : q(rows_of_tangent(context.problem.q_tangent, context.q_rows(task), context.spec.head_dim)),
        k(rows_of_tangent(context.problem.k_tangent, context.kv_rows(task), context.spec.head_dim)),
        v(rows_of_tangent(context.problem.v_tangent, context.kv_rows(task), context.spec.v_dim())),
        dout(rows_of_tangent(context.problem.dout_tangent, context.q_rows(task), context.spec.v_dim())) {}
};

/// Tangents of one head's gradients; all but dq are its share of a sum over heads.
struct HeadGradTangents {
  Matrix dq{0, 0}, dk{0, 0}, dv{0, 0};
  double dsink = 0;
  CaptureGrads captures = {};
};

/// A pair's P after dropout and dS, and their tangents.
struct PairMatrices {
  Matrix p, p_tangent, ds, ds_tangent;
};

class HeadDerivative {
 public:
  HeadDerivative(const Context& context, const Arithmetic& arithmetic, const ScoreTangents& score,
                 std::int64_t task)
      : context_(context),
        arithmetic_(arithmetic),
        score_(score),
        task_(task),
        head_(context, task),
        tangents_(context, task),
        dout_(slice(context.problem.dout, context.q_rows(task), context.spec.v_dim())),
        fwd_(forward_head(context, arithmetic, head_, task)) {}

  HeadGradTangents get() {
    const Matrix s_tangent = sum_of(arithmetic_, arithmetic_.product(tangents_.q, transpose(head_.k)),
                                    arithmetic_.product(head_.q, transpose(tangents_.k)));
    const Matrix dp = arithmetic_.product(dout_, transpose(head_.v));
    const Matrix dp_tangent = sum_of(arithmetic_, arithmetic_.product(tangents_.dout, transpose(head_.v)),
                                     arithmetic_.product(dout_, transpose(tangents_.v)));
    const Matrix zero(fwd_.p.rows, fwd_.p.columns);
    PairMatrices pairs{zero, zero, zero, zero};
    if (context_.programs.has_grads()) result_.captures = context_.programs.zero_grads();
    for (std::int64_t i = 0; i < fwd_.p.rows; ++i) row(i, s_tangent, dp, dp_tangent, pairs);

    const auto of_products = [&](const Matrix& a, const Matrix& b, const Matrix& c, const Matrix& d,
                                 double factor) {
      Matrix sum = sum_of(arithmetic_, arithmetic_.product(a, b), arithmetic_.product(c, d));
      for (double& value : sum.values) value *= factor;
      return sum;
    };
    result_.dq = of_products(pairs.ds_tangent, head_.k, pairs.ds, tangents_.k, context_.scale);
    result_.dk =
        of_products(transpose(pairs.ds_tangent), head_.q, transpose(pairs.ds), tangents_.q, context_.scale);
    result_.dv = of_products(transpose(pairs.p_tangent), dout_, transpose(pairs.p), tangents_.dout, 1.0);
    return std::move(result_);
  }

 private:
  void row(std::int64_t i, const Matrix& s_tangent, const Matrix& dp, const Matrix& dp_tangent,
           PairMatrices& pairs) {
    const std::int64_t columns = fwd_.p.columns;
    std::vector<PairScoreTangents> scores(columns);
    double lse_tangent = 0, d = 0, sum = 0;
    const double sink = context_.sink(task_), p_sink = std::exp(sink - fwd_.lse[i]);
    const auto& of_sinks = context_.problem.sinks_tangent;
    const double sink_tangent =
        sink == -kInfinity || of_sinks.empty() ? 0 : of_sinks[context_.head_of(task_)];
    const auto dropped = [&](const Matrix& of_dp, std::int64_t j) {
      return arithmetic_.rounded(arithmetic_.rounded(of_dp[i][j]) * fwd_.dropped[i][j]);
    };
    if (sink != -kInfinity) lse_tangent = p_sink * sink_tangent;
    for (std::int64_t j = 0; j < columns; ++j) {
      const double p = fwd_.p[i][j];
      if (p == 0) continue;
      scores[j] = score_.at(context_.point(task_, i, j), fwd_.s[i][j],
                            arithmetic_.rounded(s_tangent[i][j] * context_.scale));
      scores[j].tangent = arithmetic_.rounded(scores[j].tangent);
      lse_tangent += p * scores[j].tangent;
      d += p * dropped(dp, j);
      sum += p * scores[j].tangent * dropped(dp, j) + p * dropped(dp_tangent, j);
    }
    const auto& of_dlse = context_.problem.dlse_tangent;
    const bool attends = fwd_.lse[i] != -kInfinity;
    const double dlse_tangent = of_dlse.empty() || !attends ? 0 : of_dlse[context_.q_rows(task_).begin + i];
    const double d_tangent = sum - lse_tangent * d - dlse_tangent;
    d -= context_.dlse(task_, i, fwd_.lse[i]);
    if (sink != -kInfinity)
      result_.dsink -= arithmetic_.rounded(p_sink * ((sink_tangent - lse_tangent) * d + d_tangent));
    for (std::int64_t j = 0; j < columns; ++j) {
      const double p = fwd_.p[i][j];
      if (p == 0) continue;
      const double p_tangent = arithmetic_.rounded(p * (scores[j].tangent - lse_tangent));
      double& ds = pairs.ds[i][j] = arithmetic_.rounded(p * (dropped(dp, j) - d));
      double& ds_tangent = pairs.ds_tangent[i][j] =
          arithmetic_.rounded(p_tangent * (dropped(dp, j) - d) + p * (dropped(dp_tangent, j) - d_tangent));
      for (const PairScoreTangents::Read& read : scores[j].reads) {
        double& grad = result_.captures[read.capture][read.element];
        grad = arithmetic_.sum(grad, along(ds_tangent, read.slope) + along(ds, read.slope_tangent));
      }
      ds_tangent =
          arithmetic_.rounded(along(ds_tangent, scores[j].slope) + along(ds, scores[j].slope_tangent));
      ds = arithmetic_.rounded(along(ds, scores[j].slope));
      pairs.p[i][j] = arithmetic_.rounded(p * fwd_.dropped[i][j]);
      pairs.p_tangent[i][j] = arithmetic_.rounded(p_tangent * fwd_.dropped[i][j]);
    }
  }

  const Context& context_;
  const Arithmetic& arithmetic_;
  const ScoreTangents& score_;
  std::int64_t task_;
  Head head_;
  HeadTangents tangents_;
  Matrix dout_;
  HeadForward fwd_;
  HeadGradTangents result_;
};

/// Adds one head's rows of K or V.
void add_rows(const Matrix& from, std::vector<double>& to, Rows rows) {
  for (std::size_t i = 0; i < from.values.size(); ++i) to[rows.begin * from.columns + i] += from.values[i];
}

void check_sizes_of_tangents(const Context& context) {
  const Problem& problem = context.problem;
  const auto check = [](const char* name, const std::vector<double>& tangent, std::int64_t wanted) {
    if (!tangent.empty()) check_size(name, tangent.size(), wanted);
  };
  const std::int64_t rows = context.q_count(), columns = context.spec.v_dim();
  check_size("dout", problem.dout.size(), count({rows, columns}));
  check("q_tangent", problem.q_tangent, std::ssize(problem.q));
  check("k_tangent", problem.k_tangent, std::ssize(problem.k));
  check("v_tangent", problem.v_tangent, std::ssize(problem.v));
  check("dout_tangent", problem.dout_tangent, std::ssize(problem.dout));
  check("dlse", problem.dlse, rows);
  check("dlse_tangent", problem.dlse_tangent, rows);
  check("sinks_tangent", problem.sinks_tangent, context.shape.heads_q);
  if (problem.capture_tangents.empty()) return;
  const CaptureGrads sizes = context.programs.zero_grads();
  check_size("capture_tangents", problem.capture_tangents.size(), std::ssize(sizes));
  for (std::size_t i = 0; i < sizes.size(); ++i)
    if (!sizes[i].empty())
      check(problem.captures[i].name.c_str(), problem.capture_tangents[i], std::ssize(sizes[i]));
}

}  // namespace

Backward backward_jvp(const Problem& problem, Precision precision) {
  const Context context(problem);
  const Arithmetic arithmetic{context.spec.dtype, precision};
  check_sizes_of_tangents(context);
  const ScoreTangents score(context.spec.score, problem.captures, problem.capture_tangents);
  Backward result{.dq = std::vector<double>(problem.q.size()),
                  .dk = std::vector<double>(problem.k.size()),
                  .dv = std::vector<double>(problem.v.size())};
  result.captures = context.programs.zero_grads();
  result.dsinks.resize(context.shape.heads_q);
  std::vector<HeadGradTangents> heads(context.tasks());
  parallel_for(context.tasks(), [&](std::int64_t task) {
    heads[task] = HeadDerivative(context, arithmetic, score, task).get();
  });
  for (std::int64_t task = 0; task < context.tasks(); ++task) {
    const HeadGradTangents& head = heads[task];
    put(head.dq, result.dq, context.q_rows(task));
    add_rows(head.dk, result.dk, context.kv_rows(task));
    add_rows(head.dv, result.dv, context.kv_rows(task));
    result.dsinks[context.head_of(task)] += head.dsink;
    for (std::size_t i = 0; i < head.captures.size(); ++i)
      for (std::size_t j = 0; j < head.captures[i].size(); ++j)
        result.captures[i][j] = arithmetic.sum(result.captures[i][j], head.captures[i][j]);
  }
  for (std::vector<double>* grads : {&result.dq, &result.dk, &result.dv})
    for (double& value : *grads) value = arithmetic.rounded(value);
  return result;
}

}  // namespace flashjit::reference

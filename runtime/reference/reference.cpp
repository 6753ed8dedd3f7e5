#include "reference/reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <future>
#include <initializer_list>
#include <limits>
#include <thread>

#include "expr/programs.hpp"
#include "flashjit/error.hpp"
#include "support/small_float.hpp"
#include "templates/common/philox.cuh"

namespace flashjit::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

[[noreturn]] void refuse(std::string message) {
  throw Error(ErrorCode::invalid_argument, std::move(message));
}

struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<double> values;

  Matrix(std::int64_t rows, std::int64_t columns) : rows(rows), columns(columns), values(rows * columns) {}
  double* operator[](std::int64_t row) { return values.data() + row * columns; }
  const double* operator[](std::int64_t row) const { return values.data() + row * columns; }
};

Matrix transpose(const Matrix& a) {
  Matrix result(a.columns, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.columns; ++j) result[j][i] = a[i][j];
  }
  return result;
}

/// A B with sums in `Sum`.
template <class Sum>
Matrix multiply(const Matrix& a, const Matrix& b) {
  const std::vector<Sum> right(b.values.begin(), b.values.end());
  Matrix result(a.rows, b.columns);
  std::vector<Sum> row(b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    std::fill(row.begin(), row.end(), Sum{0});
    for (std::int64_t k = 0; k < a.columns; ++k) {
      const Sum factor = static_cast<Sum>(a[i][k]);
      if (factor == 0) continue;  // most of a masked P
      const Sum* from = right.data() + k * b.columns;
      for (std::int64_t j = 0; j < b.columns; ++j) row[j] += factor * from[j];
    }
    std::copy(row.begin(), row.end(), result[i]);
  }
  return result;
}

/// The arithmetic of a precision: how matrices are multiplied and what becomes of each result.
struct Arithmetic {
  DType dtype;
  Precision precision;

  double rounded(double value) const {
    return precision == Precision::exact ? value : round_to(dtype, value);
  }
  double rounded_score(double value) const {
    return precision == Precision::fused ? static_cast<float>(value) : rounded(value);
  }
  void round(Matrix& a) const {
    if (precision != Precision::exact) {
      for (double& value : a.values) value = round_to(dtype, value);
    }
  }
  Matrix product(const Matrix& a, const Matrix& b) const {
    return precision == Precision::exact ? multiply<double>(a, b) : multiply<float>(a, b);
  }
};

/// Calls task(0) to task(count - 1) on all processors; rethrows what one of them throws.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& task) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t i = next++; i < count; i = next++) task(i);
  };
  const std::int64_t processors = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::future<void>> helpers;
  for (std::int64_t i = 1; i < std::min(processors, count); ++i) {
    helpers.push_back(std::async(std::launch::async, work));
  }
  work();
  for (auto& helper : helpers) helper.get();
}

/// The product of sizes; refuses what no memory can hold.
std::int64_t count(std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) {
      refuse(fmt::format("a tensor of {} elements overflows 64 bits; give smaller sizes",
                         fmt::join(sizes, " x ")));
    }
  }
  return product;
}

void check_size(const char* what, std::size_t given, std::int64_t wanted) {
  if (static_cast<std::int64_t>(given) != wanted) {
    refuse(fmt::format("{} has {} elements but the spec and shape need {}; give exactly that many", what,
                       given, wanted));
  }
}

/// A checked problem with everything that is derived from it.
struct Context {
  const Problem& problem;
  AttentionSpec spec;  ///< normalized
  AttentionShape shape;
  double scale;
  Dropout dropout;
  std::int64_t map_rows = 0, map_columns = 0;

  explicit Context(const Problem& problem);

  std::int64_t tasks() const { return shape.batch * shape.heads_q; }
  std::int64_t batch_of(std::int64_t task) const { return task / shape.heads_q; }
  std::int64_t head_of(std::int64_t task) const { return task % shape.heads_q; }
  /// Place of the head's K and V among [batch, heads_kv].
  std::int64_t kv_of(std::int64_t task) const {
    return batch_of(task) * shape.heads_kv + head_of(task) / (shape.heads_q / shape.heads_kv);
  }

  bool attends(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t kv) const;
  /// What dropout multiplies the pair's probability with: 0 or 1 / (1 - p).
  double dropout_factor(std::int64_t task, std::int64_t q, std::int64_t kv) const;
};

Context::Context(const Problem& given) : problem(given), spec(given.spec.normalized()), shape(given.shape) {
  spec.validate();
  shape.validate();
  for (const Support& support : {expr::check(spec.score), expr::check(spec.mask)}) {
    if (!support) refuse(support.reason);
  }
  check_size("q", given.q.size(), count({shape.batch, shape.heads_q, shape.seqlen_q, spec.head_dim}));
  check_size("k", given.k.size(), count({shape.batch, shape.heads_kv, shape.seqlen_kv, spec.head_dim}));
  check_size("v", given.v.size(), count({shape.batch, shape.heads_kv, shape.seqlen_kv, spec.v_dim()}));
  if (spec.kv_lengths) check_size("kv_lengths", given.kv_lengths.size(), shape.batch);
  if (spec.has_block_map()) {
    const bool broadcasts = (given.map_batch == 1 || given.map_batch == shape.batch) &&
                            (given.map_heads == 1 || given.map_heads == shape.heads_q);
    if (!broadcasts) {
      refuse(fmt::format("the block map has {} batch entries and {} heads; allowed are 1 or {}, and 1 or {}",
                         given.map_batch, given.map_heads, shape.batch, shape.heads_q));
    }
    map_rows = (shape.seqlen_q + spec.block_map.q - 1) / spec.block_map.q;
    map_columns = (shape.seqlen_kv + spec.block_map.kv - 1) / spec.block_map.kv;
    check_size("block_map", given.block_map.size(),
               given.map_batch * given.map_heads * map_rows * map_columns);
  }
  scale = given.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(spec.head_dim)));
  if (!(std::isfinite(scale) && scale > 0)) {
    refuse(fmt::format("softmax_scale is {}; it must be finite and positive", scale));
  }
  if (!spec.dropout && given.dropout_p != 0) {
    refuse(fmt::format("dropout_p is {} but the spec has no dropout; set spec.dropout or leave it 0",
                       given.dropout_p));
  }
  dropout = dropout_parameters(given.dropout_p);
}

bool Context::attends(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t kv) const {
  if (spec.kv_lengths && kv >= problem.kv_lengths[b]) return false;
  if (spec.has_block_map()) {
    const std::int64_t map =
        (problem.map_batch == 1 ? 0 : b) * problem.map_heads + (problem.map_heads == 1 ? 0 : h);
    const std::int64_t row = map * map_rows + q / spec.block_map.q;
    if (!problem.block_map[row * map_columns + kv / spec.block_map.kv]) return false;
  }
  return expr::attends(spec.mask, q, kv, shape.seqlen_q, shape.seqlen_kv);
}

double Context::dropout_factor(std::int64_t task, std::int64_t q, std::int64_t kv) const {
  if (!spec.dropout || dropout.keep_below == ~0u) return dropout.keep_scale;
  const auto low = [](std::uint64_t value) { return static_cast<unsigned>(value); };
  const auto high = [](std::uint64_t value) { return static_cast<unsigned>(value >> 32); };
  const int i = static_cast<int>(q), j = static_cast<int>(kv);
  const Philox4 words = dropout_words(low(problem.seed), high(problem.seed), low(problem.offset),
                                      high(problem.offset), static_cast<unsigned>(task), i, j);
  return words.word[dropout_word_index(i, j)] < dropout.keep_below ? dropout.keep_scale : 0.0;
}

/// Matrix `index` of a tensor [..., rows, columns].
Matrix slice(const std::vector<double>& tensor, std::int64_t index, std::int64_t rows, std::int64_t columns) {
  Matrix result(rows, columns);
  std::copy_n(tensor.begin() + index * rows * columns, rows * columns, result.values.begin());
  return result;
}

void put(const Matrix& from, std::vector<double>& tensor, std::int64_t index) {
  std::copy(from.values.begin(), from.values.end(), tensor.begin() + index * from.rows * from.columns);
}

/// One head's Q, K, V.
struct Head {
  Matrix q, k, v;

  Head(const Context& context, std::int64_t task)
      : q(slice(context.problem.q, task, context.shape.seqlen_q, context.spec.head_dim)),
        k(slice(context.problem.k, context.kv_of(task), context.shape.seqlen_kv, context.spec.head_dim)),
        v(slice(context.problem.v, context.kv_of(task), context.shape.seqlen_kv, context.spec.v_dim())) {}
};

/// One head's forward pass, with what the backward pass uses again.
struct HeadForward {
  Matrix p;        ///< after the softmax, before dropout
  Matrix dropped;  ///< what dropout multiplies P with
  Matrix out;
  std::vector<double> lse;
};

/// Replaces a row of scores by its softmax and returns its LSE. A row of -inf becomes zeros.
double softmax(double* row, std::int64_t columns) {
  const double largest = columns ? *std::max_element(row, row + columns) : -kInfinity;
  if (largest == -kInfinity) {
    std::fill_n(row, columns, 0.0);
    return -kInfinity;
  }
  double sum = 0;
  for (std::int64_t j = 0; j < columns; ++j) sum += row[j] = std::exp(row[j] - largest);
  for (std::int64_t j = 0; j < columns; ++j) row[j] /= sum;
  return largest + std::log(sum);
}

HeadForward forward_head(const Context& context, const Arithmetic& arithmetic, const Head& head,
                         std::int64_t task) {
  const std::int64_t b = context.batch_of(task), h = context.head_of(task);
  Matrix s = arithmetic.product(head.q, transpose(head.k));
  Matrix dropped(s.rows, s.columns);
  std::vector<double> lse(s.rows);
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.columns; ++j) {
      const bool attends = context.attends(b, h, i, j);
      s[i][j] = attends ? arithmetic.rounded_score(context.scale * s[i][j]) : -kInfinity;
      dropped[i][j] = attends ? context.dropout_factor(task, i, j) : 0.0;
    }
    lse[i] = softmax(s[i], s.columns);
  }
  Matrix p = std::move(s);
  arithmetic.round(p);
  Matrix kept = p;
  for (std::size_t i = 0; i < kept.values.size(); ++i) kept.values[i] *= dropped.values[i];
  arithmetic.round(kept);
  Matrix out = arithmetic.product(kept, head.v);
  arithmetic.round(out);
  return {std::move(p), std::move(dropped), std::move(out), std::move(lse)};
}

/// One head's gradients; dk and dv are its share of its group's.
struct HeadBackward {
  Matrix dq, dk, dv;
};

HeadBackward backward_head(const Context& context, const Arithmetic& arithmetic, const Head& head,
                           const Matrix& dout, std::int64_t task) {
  const HeadForward fwd = forward_head(context, arithmetic, head, task);
  Matrix kept = fwd.p;
  for (std::size_t i = 0; i < kept.values.size(); ++i) kept.values[i] *= fwd.dropped.values[i];
  arithmetic.round(kept);

  Matrix ds = arithmetic.product(dout, transpose(head.v));  // dP until the softmax's derivative is applied
  for (std::int64_t i = 0; i < ds.rows; ++i) {
    double d = 0;
    for (std::int64_t j = 0; j < dout.columns; ++j) d += dout[i][j] * fwd.out[i][j];
    for (std::int64_t j = 0; j < ds.columns; ++j) {
      const double dp = arithmetic.rounded(arithmetic.rounded(ds[i][j]) * fwd.dropped[i][j]);
      ds[i][j] = arithmetic.rounded(fwd.p[i][j] * (dp - d));
    }
  }
  HeadBackward result{arithmetic.product(ds, head.k), arithmetic.product(transpose(ds), head.q),
                      arithmetic.product(transpose(kept), dout)};
  for (double& value : result.dq.values) value *= context.scale;
  for (double& value : result.dk.values) value *= context.scale;
  arithmetic.round(result.dq);
  return result;
}

/// Sums the query heads of each group and rounds once: [batch, heads_kv, ...] from one matrix a query head.
std::vector<double> sum_groups(const Context& context, const Arithmetic& arithmetic,
                               const std::vector<HeadBackward>& heads, Matrix HeadBackward::*part,
                               std::size_t size) {
  std::vector<double> sum(size, 0.0);
  for (std::int64_t task = 0; task < context.tasks(); ++task) {
    const std::vector<double>& values = (heads[task].*part).values;
    double* to = sum.data() + context.kv_of(task) * static_cast<std::int64_t>(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
  }
  for (double& value : sum) value = arithmetic.rounded(value);
  return sum;
}

}  // namespace

Forward forward(const Problem& problem, Precision precision) {
  const Context context(problem);
  const Arithmetic arithmetic{context.spec.dtype, precision};
  if (problem.q.empty()) return {};
  const std::int64_t rows = context.tasks() * context.shape.seqlen_q;
  Forward result{std::vector<double>(rows * context.spec.v_dim()), std::vector<double>(rows)};
  parallel_for(context.tasks(), [&](std::int64_t task) {
    const HeadForward head = forward_head(context, arithmetic, Head(context, task), task);
    put(head.out, result.out, task);
    std::copy(head.lse.begin(), head.lse.end(), result.lse.begin() + task * context.shape.seqlen_q);
  });
  return result;
}

Backward backward(const Problem& problem, Precision precision) {
  const Context context(problem);
  const Arithmetic arithmetic{context.spec.dtype, precision};
  const std::int64_t dim_v = context.spec.v_dim();
  check_size("dout", problem.dout.size(), count({context.tasks(), context.shape.seqlen_q, dim_v}));
  if (problem.q.empty()) {
    return {{}, std::vector<double>(problem.k.size(), 0.0), std::vector<double>(problem.v.size(), 0.0)};
  }
  std::vector<HeadBackward> heads(context.tasks(), {Matrix(0, 0), Matrix(0, 0), Matrix(0, 0)});
  parallel_for(context.tasks(), [&](std::int64_t task) {
    const Matrix dout = slice(problem.dout, task, context.shape.seqlen_q, dim_v);
    heads[task] = backward_head(context, arithmetic, Head(context, task), dout, task);
  });
  std::vector<double> dq(problem.q.size());
  for (std::int64_t task = 0; task < context.tasks(); ++task) put(heads[task].dq, dq, task);
  return {std::move(dq), sum_groups(context, arithmetic, heads, &HeadBackward::dk, problem.k.size()),
          sum_groups(context, arithmetic, heads, &HeadBackward::dv, problem.v.size())};
}

Dropout dropout_parameters(double p) {
  if (!(p >= 0 && p < 1)) refuse(fmt::format("dropout_p is {}; it must be at least 0 and below 1", p));
  const double keep_below = std::min(std::round((1 - p) * 0x1p32), 0x1p32 - 1);
  return {static_cast<std::uint32_t>(keep_below), 1 / (1 - p)};
}

double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::fp16:
      return Fp16::round(value);
    case DType::bf16:
      return Bf16::round(value);
    case DType::fp32:
      break;
  }
  return static_cast<float>(value);
}

double max_abs_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) {
    refuse(
        fmt::format("cannot compare {} elements with {}; give two tensors of one size", a.size(), b.size()));
  }
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // equal infinities too
    const double error = std::fabs(a[i] - b[i]);
    if (std::isnan(error)) return kInfinity;
    largest = std::max(largest, error);
  }
  return largest;
}

Verdict judge(const std::vector<double>& got, const std::vector<double>& exact,
              const std::vector<double>& rounded, double factor) {
  const double limit = factor * max_abs_error(rounded, exact) + 1e-5;
  if (!std::isfinite(limit)) {
    refuse(
        "the rounded computation overflows its element type, so it sets no error limit; use smaller values "
        "or fp32");
  }
  return {max_abs_error(got, exact), limit};
}

}  // namespace flashjit::reference

#include "reference/reference.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <future>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <numeric>
#include <thread>

#include "flashjit/error.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"
#include "templates/common/packed.cuh"
#include "templates/common/philox.cuh"

namespace flashjit::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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
  double sum(double a, double b) const {
    return precision == Precision::exact ? a + b : static_cast<float>(a + b);
  }
  void round(Matrix& a) const {
    if (precision != Precision::exact) {
      for (double& value : a.values) value = round_to(dtype, value);
    }
  }
  /// Rows of e4m3 whose largest is 256, as products of 8 bits have P.
  void round_to_codes(Matrix& a) const {
    if (precision == Precision::exact) return;
    for (std::int64_t i = 0; i < a.rows; ++i) {
      const double largest =
          std::accumulate(a[i], a[i] + a.columns, 0.0, [](double x, double y) { return std::max(x, y); });
      if (!(largest > 0)) continue;
      for (std::int64_t j = 0; j < a.columns; ++j)
        a[i][j] = round_to(DType::e4m3, a[i][j] * 256 / largest) * largest / 256;
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
      refuse("a tensor of {} elements overflows 64 bits; give smaller sizes", fmt::join(sizes, " x "));
    }
  }
  return product;
}

void check_size(const char* what, std::size_t given, std::int64_t wanted) {
  if (static_cast<std::int64_t>(given) != wanted) {
    refuse("{} has {} elements but the spec and shape need {}; give exactly that many", what, given, wanted);
  }
}

/// One sequence's rows among all of a tensor's.
struct Rows {
  std::int64_t begin, count;
};

/// How many rows a head has in a packed tensor of `heads`.
std::int64_t rows_of_head(const std::vector<double>& tensor, std::int64_t heads, std::int64_t dim) {
  const std::int64_t row = count({heads, dim});
  return row == 0 ? 0 : std::ssize(tensor) / row;
}

/// A checked problem with everything that is derived from it.
struct Context {
  const Problem& problem;
  AttentionSpec spec;  ///< normalized
  AttentionShape shape;
  Programs programs;
  std::int64_t packed_q = 0, packed_kv = 0;  ///< rows of a head, with spec.varlen
  double scale;
  Dropout dropout;
  std::int64_t map_rows = 0, map_columns = 0;
  std::vector<int> names = {};  ///< of each list, how often it names each key

  explicit Context(const Problem& problem);

  std::int64_t tasks() const { return shape.batch * shape.heads_q; }
  std::int64_t batch_of(std::int64_t task) const { return task / shape.heads_q; }
  std::int64_t head_of(std::int64_t task) const { return task % shape.heads_q; }
  std::int64_t kv_head_of(std::int64_t task) const {
    return head_of(task) / (shape.heads_q / shape.heads_kv);
  }
  Rows q_rows(std::int64_t task) const {
    if (!spec.varlen) return {task * shape.seqlen_q, shape.seqlen_q};
    return packed(problem.cu_seqlens_q, batch_of(task), head_of(task), packed_q, shape.seqlen_q);
  }
  /// Without rows past the sequence's length: what they hold does not matter, nor takes time.
  Rows kv_rows(std::int64_t task) const {
    const std::int64_t b = batch_of(task), h = kv_head_of(task);
    if (packs_kv()) return packed(problem.cu_seqlens_kv, b, h, packed_kv, shape.seqlen_kv);
    const std::int64_t length = spec.has_lengths()
                                    ? std::clamp<std::int64_t>(problem.kv_lengths[b], 0, shape.seqlen_kv)
                                    : shape.seqlen_kv;
    return {(b * shape.heads_kv + h) * shape.seqlen_kv, length};
  }
  /// The seqlen_kv of programs.
  std::int64_t seqlen_kv(std::int64_t task) const {
    return spec.cache || packs_kv() ? kv_rows(task).count : shape.seqlen_kv;
  }
  /// All rows of Q, and of K: [batch, heads, length], or [heads, packed rows].
  std::int64_t q_count() const { return count_rows(spec.varlen, shape.heads_q, packed_q, shape.seqlen_q); }
  std::int64_t kv_count() const { return count_rows(packs_kv(), shape.heads_kv, packed_kv, shape.seqlen_kv); }
  /// Whether K and V are packed, as Q is with spec.varlen.
  bool packs_kv() const { return spec.varlen && !spec.cache; }

  Point point(std::int64_t task, std::int64_t q, std::int64_t kv) const {
    return {batch_of(task), head_of(task), kv_head_of(task), q, kv, q_rows(task).count, seqlen_kv(task)};
  }
  /// The head's sink; -inf, which adds nothing, without sinks.
  double sink(std::int64_t task) const { return spec.sinks ? problem.sinks[head_of(task)] : -kInfinity; }
  /// The gradient of a row's LSE. A row that attends to nothing has no P that it could change.
  double dlse(std::int64_t task, std::int64_t q, double lse) const {
    return problem.dlse.empty() || lse == -kInfinity ? 0.0 : problem.dlse[task * shape.seqlen_q + q];
  }
  bool attends(const Point& point) const;
  /// How often a query's list names a key; 1 without lists.
  int named(std::int64_t task, std::int64_t q, std::int64_t kv) const {
    return spec.indices ? names[list_of(task, q) * shape.seqlen_kv + kv] : 1;
  }
  /// What dropout multiplies the pair's probability with: 0 or 1 / (1 - p).
  double dropout_factor(std::int64_t task, std::int64_t q, std::int64_t kv) const;

 private:
  /// Lists are [index_batch, queries, heads_kv].
  std::int64_t list_of(std::int64_t task, std::int64_t q) const {
    const std::int64_t queries = spec.varlen ? packed_q : shape.seqlen_q;
    const std::int64_t b = problem.index_batch == 1 ? 0 : batch_of(task);
    const std::int64_t first = spec.varlen ? q_rows(task).begin - head_of(task) * packed_q : 0;
    return (b * queries + first + q) * shape.heads_kv + kv_head_of(task);
  }
  void read_indices();
  static Rows packed(const std::vector<std::int32_t>& offsets, std::int64_t b, std::int64_t h,
                     std::int64_t rows, std::int64_t longest) {
    const auto [first, count] =
        packed_rows(offsets[b], offsets[b + 1], static_cast<int>(rows), static_cast<int>(longest));
    return {h * rows + first, count};
  }
  std::int64_t count_rows(bool packed, std::int64_t heads, std::int64_t packed_length,
                          std::int64_t length) const {
    return packed ? heads * packed_length : count({shape.batch, heads, length});
  }
};

Context::Context(const Problem& given)
    : problem(given), spec(given.spec.normalized()), shape(given.shape), programs(spec, given.captures) {
  spec.validate();
  shape.validate();
  if (spec.varlen) {
    check_size("cu_seqlens_q", given.cu_seqlens_q.size(), shape.batch + 1);
    packed_q = rows_of_head(given.q, shape.heads_q, spec.head_dim);
  }
  if (packs_kv()) {
    check_size("cu_seqlens_kv", given.cu_seqlens_kv.size(), shape.batch + 1);
    packed_kv = rows_of_head(given.k, shape.heads_kv, spec.head_dim);
  }
  check_size("q", given.q.size(), count({q_count(), spec.head_dim}));
  check_size("k", given.k.size(), count({kv_count(), spec.head_dim}));
  check_size("v", given.v.size(), count({kv_count(), spec.v_dim()}));
  if (spec.sinks) check_size("sinks", given.sinks.size(), shape.heads_q);
  if (spec.has_lengths()) check_size("kv_lengths", given.kv_lengths.size(), shape.batch);
  if (spec.has_block_map()) {
    const bool broadcasts = (given.map_batch == 1 || given.map_batch == shape.batch) &&
                            (given.map_heads == 1 || given.map_heads == shape.heads_q);
    if (!broadcasts) {
      refuse("the block map has {} batch entries and {} heads; allowed are 1 or {}, and 1 or {}",
             given.map_batch, given.map_heads, shape.batch, shape.heads_q);
    }
    map_rows = (shape.seqlen_q + spec.block_map.q - 1) / spec.block_map.q;
    map_columns = (shape.seqlen_kv + spec.block_map.kv - 1) / spec.block_map.kv;
    check_size("block_map", given.block_map.size(),
               given.map_batch * given.map_heads * map_rows * map_columns);
  }
  scale = given.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(spec.head_dim)));
  if (!(std::isfinite(scale) && scale > 0)) {
    refuse("softmax_scale is {}; it must be finite and positive", scale);
  }
  if (!spec.dropout && given.dropout_p != 0) {
    refuse("dropout_p is {} but the spec has no dropout; set spec.dropout or leave it 0", given.dropout_p);
  }
  dropout = dropout_parameters(given.dropout_p);
  if (spec.indices) read_indices();
}

void Context::read_indices() {
  const std::int64_t queries = spec.varlen ? packed_q : shape.seqlen_q;
  const std::int64_t lists = count({problem.index_batch, queries, shape.heads_kv});
  if (problem.index_batch != 1 && problem.index_batch != shape.batch)
    refuse("the indices have {} batch entries; allowed are 1 or {}", problem.index_batch, shape.batch);
  const std::int64_t given = std::ssize(problem.indices), top_k = lists == 0 ? 0 : given / lists;
  check_size("indices", problem.indices.size(), lists * top_k);
  names.resize(static_cast<std::size_t>(count({lists, shape.seqlen_kv})));
  for (std::int64_t i = 0; i < given; ++i)
    if (const std::int64_t key = problem.indices[i]; key >= 0 && key < shape.seqlen_kv)
      ++names[i / top_k * shape.seqlen_kv + key];
}

bool Context::attends(const Point& at) const {
  if (spec.indices && named(at.b * shape.heads_q + at.h, at.q, at.kv) == 0) return false;
  if (spec.kv_lengths && at.kv >= problem.kv_lengths[at.b]) return false;
  if (spec.has_block_map()) {
    const std::int64_t map =
        (problem.map_batch == 1 ? 0 : at.b) * problem.map_heads + (problem.map_heads == 1 ? 0 : at.h);
    const std::int64_t row = map * map_rows + at.q / spec.block_map.q;
    if (!problem.block_map[row * map_columns + at.kv / spec.block_map.kv]) return false;
  }
  return programs.attends(at);
}

double Context::dropout_factor(std::int64_t task, std::int64_t q, std::int64_t kv) const {
  if (!spec.dropout) return dropout.keep_scale;
  const auto low = [](std::uint64_t value) { return static_cast<unsigned>(value); };
  const auto high = [](std::uint64_t value) { return static_cast<unsigned>(value >> 32); };
  const DropoutPlace& place = problem.dropout_place;
  const std::int64_t heads = place.heads ? place.heads : shape.heads_q;
  const std::int64_t head = (place.batch + batch_of(task)) * heads + place.head + head_of(task);
  const int i = static_cast<int>(place.q + place.q_step * q),
            j = static_cast<int>(place.kv + place.kv_step * kv);
  const Philox4 words = dropout_words(low(problem.seed), high(problem.seed), low(problem.offset),
                                      high(problem.offset), static_cast<unsigned>(head), i, j);
  const unsigned drawn = draw_dropped(words.word[dropout_word_index(i, j)], dropout.drop_share);
  return is_dropped(drawn, j & 1) ? 0.0 : dropout.keep_scale;
}

/// Some rows of a tensor [..., columns].
Matrix slice(const std::vector<double>& tensor, Rows rows, std::int64_t columns) {
  Matrix result(rows.count, columns);
  std::copy_n(tensor.begin() + rows.begin * columns, rows.count * columns, result.values.begin());
  return result;
}

void put(const Matrix& from, std::vector<double>& tensor, Rows rows) {
  std::copy(from.values.begin(), from.values.end(), tensor.begin() + rows.begin * from.columns);
}

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

/// With an LSE of NaN, P is NaN where the query attends, and zero at all other keys.
void spoil_row(HeadForward& fwd, std::int64_t i) {
  for (std::int64_t j = 0; j < fwd.p.columns; ++j)
    fwd.p[i][j] = fwd.attends[i * fwd.p.columns + j] ? kNaN : 0.0;
}

HeadForward forward_head(const Context& context, const Arithmetic& arithmetic, const Head& head,
                         std::int64_t task) {
  HeadForward fwd(arithmetic.product(head.q, transpose(head.k)));
  for (std::int64_t i = 0; i < fwd.s.rows; ++i) {
    double *const s = fwd.s[i], *const p = fwd.p[i];
    for (std::int64_t j = 0; j < fwd.s.columns; ++j) {
      const Point at = context.point(task, i, j);
      s[j] = arithmetic.rounded_score(context.scale * s[j]);
      const bool attends = context.attends(at);
      p[j] = !attends                       ? -kInfinity
             : context.programs.has_score() ? arithmetic.rounded_score(context.programs.score(at, s[j]))
                                            : s[j];
      fwd.dropped[i][j] = attends ? context.dropout_factor(task, i, j) : 0.0;
      fwd.attends.push_back(attends);
    }
    fwd.row_max[i] = largest_of(p, fwd.p.columns, -kInfinity);
    if (context.spec.indices)  // keys that are named twice count twice
      for (std::int64_t j = 0; j < fwd.p.columns; ++j)
        if (p[j] != -kInfinity) p[j] += std::log(context.named(task, i, j));
    fwd.lse[i] = softmax(p, fwd.p.columns, context.sink(task));
    if (std::isnan(fwd.lse[i])) spoil_row(fwd, i);
  }
  if (context.spec.q_codes)
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

/// Joins O and LSE with those of other keys, where the problem has them.
void join_state(const Context& context, const Arithmetic& arithmetic, std::int64_t task, HeadForward& fwd) {
  const Problem& problem = context.problem;
  if (!context.spec.running_state) return;
  const Matrix before = slice(problem.state_out, context.q_rows(task), fwd.out.columns);
  for (std::int64_t i = 0; i < fwd.out.rows; ++i) {
    const double lse = problem.state_lse[task * context.shape.seqlen_q + i];
    if (lse == -kInfinity) continue;  // whose O may be anything
    const double highest = std::max(lse, fwd.lse[i]);
    const double of_state = std::exp(lse - highest), of_keys = std::exp(fwd.lse[i] - highest);
    for (std::int64_t j = 0; j < fwd.out.columns; ++j)
      fwd.out[i][j] = (of_state * before[i][j] + of_keys * fwd.out[i][j]) / (of_state + of_keys);
    fwd.lse[i] = highest + std::log(of_state + of_keys);
  }
  arithmetic.round(fwd.out);
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
    const double lse = problem.lse[task * context.shape.seqlen_q + i];
    const bool of_more = std::isnan(lse) || lse > fwd.lse[i] + 1e-6 * (1 + std::abs(lse));
    if (!of_more || std::isnan(fwd.lse[i])) continue;
    const double share = std::exp(fwd.lse[i] - lse);
    for (std::int64_t j = 0; j < fwd.p.columns; ++j) fwd.p[i][j] *= share;
    if (std::isnan(lse)) spoil_row(fwd, i);
    for (std::int64_t j = 0; j < out.columns; ++j) fwd.out[i][j] = out[i][j];
    fwd.lse[i] = lse;
  }
}

HeadBackward backward_head(const Context& context, const Arithmetic& arithmetic, const Head& head,
                           const Matrix& dout, std::int64_t task) {
  HeadForward fwd = forward_head(context, arithmetic, head, task);
  take_results_of_all_keys(context, task, fwd);
  Matrix kept = fwd.p;
  for (std::size_t i = 0; i < kept.values.size(); ++i) kept.values[i] *= fwd.dropped.values[i];
  arithmetic.round(kept);

  const double sink = context.sink(task);
  std::vector<double> dsink_rows(sink == -kInfinity ? 0 : fwd.p.rows);
  Matrix sizes(fwd.p.rows, fwd.p.columns);
  Matrix ds = arithmetic.product(dout, transpose(head.v));  // dP until the softmax's derivative is applied
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
  HeadBackward result{Matrix(0, 0), Matrix(0, 0), arithmetic.product(transpose(kept), dout),
                      std::move(dsink_rows)};
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

void check_offsets(const char* name, const std::vector<std::int32_t>& offsets, std::int64_t rows,
                   std::int64_t longest) {
  if (offsets.front() != 0) refuse("{} begins with {}; it must begin with 0", name, offsets[0]);
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
    const std::int64_t length = std::int64_t{offsets[b + 1]} - offsets[b];
    if (length < 0 || length > longest) {
      refuse("{} gives sequence {} the length {}; allowed are 0 to {}, the shape's length", name, b, length,
             longest);
    }
  }
  if (offsets.back() > rows) {
    refuse("{} ends with {}, but the packed tensors have {} rows; it must end there or before", name,
           offsets.back(), rows);
  }
}

void check_offsets(const Problem& problem) {
  if (!problem.spec.varlen) return;
  const Context context(problem);
  check_offsets("cu_seqlens_q", problem.cu_seqlens_q, context.packed_q, context.shape.seqlen_q);
  if (context.packs_kv())
    check_offsets("cu_seqlens_kv", problem.cu_seqlens_kv, context.packed_kv, context.shape.seqlen_kv);
}

namespace {

/// The first key of sequence b that is not the first sequence's, in K or V; `keys` if there is none.
std::int64_t first_unlike(const std::vector<double>& values, const AttentionShape& shape, std::int64_t b,
                          std::int64_t keys) {
  const std::int64_t of_sequence = std::ssize(values) / shape.batch, of_head = of_sequence / shape.heads_kv,
                     dim = of_head / shape.seqlen_kv;
  const auto alike = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  std::int64_t first = keys;
  for (std::int64_t h = 0; h < shape.heads_kv; ++h) {
    const auto mine = values.begin() + b * of_sequence + h * of_head, others = values.begin() + h * of_head;
    first = std::min(first, (std::mismatch(mine, mine + keys * dim, others, alike).first - mine) / dim);
  }
  return first;
}

}  // namespace

std::optional<KeyPlace> first_attended(const Problem& problem, const std::vector<KeyPlace>& keys) {
  const Context context(problem);
  for (const KeyPlace& key : keys)
    for (std::int64_t h = 0; h < context.shape.heads_q; ++h) {
      const std::int64_t task = key.b * context.shape.heads_q + h, queries = context.q_rows(task).count;
      for (std::int64_t q = 0; q < queries; ++q)
        if (context.attends(context.point(task, q, key.kv))) return key;
    }
  return std::nullopt;
}

void check_prefix(const Problem& problem) {
  const std::int64_t prefix = problem.prefix_length;
  const std::vector<std::int32_t>& offsets = problem.cu_seqlens_q;
  if (!problem.spec.shared_prefix || prefix == 0 || offsets.back() == 0) return;
  if (prefix < 0) refuse("prefix_length is {}; it must be 0 or more", prefix);
  for (std::int64_t b = 0; b < problem.shape.batch; ++b) {
    const std::int64_t queries = offsets[b + 1] - offsets[b];
    if (b > 0 && queries == 0) continue;
    const std::int64_t keys = std::clamp<std::int64_t>(problem.kv_lengths[b], 0, problem.shape.seqlen_kv);
    const std::int64_t most = std::max<std::int64_t>(keys - queries, 0);
    if (most < prefix)
      refuse(
          "prefix_length is {}, but sequence {} has {} keys besides those of its queries; it must be at most "
          "that",
          prefix, b, most);
    const std::int64_t alike = std::min(first_unlike(problem.k, problem.shape, b, prefix),
                                        first_unlike(problem.v, problem.shape, b, prefix));
    if (alike < prefix)
      refuse(
          "prefix_length is {}, but key {} of sequence {} is not that of sequence 0; give how many first "
          "keys all sequences share",
          prefix, alike, b);
  }
}

Forward forward(const Problem& problem, Precision precision) {
  const Context context(problem);
  const Arithmetic arithmetic{context.spec.dtype, precision};
  if (context.spec.running_state) {
    check_size("state_out", problem.state_out.size(), count({context.q_count(), context.spec.v_dim()}));
    check_size("state_lse", problem.state_lse.size(), context.tasks() * context.shape.seqlen_q);
  }
  Forward result{std::vector<double>(context.q_count() * context.spec.v_dim()),
                 std::vector<double>(context.tasks() * context.shape.seqlen_q, kNaN),
                 std::vector<double>(context.tasks() * context.shape.seqlen_q, kNaN)};
  std::mutex out_mutex;  // sequences may share rows where cu_seqlens_q is wrong
  parallel_for(context.tasks(), [&](std::int64_t task) {
    HeadForward head = forward_head(context, arithmetic, Head(context, task), task);
    join_state(context, arithmetic, task, head);
    const std::lock_guard lock(out_mutex);
    put(head.out, result.out, context.q_rows(task));
    std::ranges::copy(head.lse, result.lse.begin() + task * context.shape.seqlen_q);
    std::ranges::copy(head.row_max, result.row_max.begin() + task * context.shape.seqlen_q);
  });
  return result;
}

Backward backward(const Problem& problem, Precision precision) {
  const Context context(problem);
  const Arithmetic arithmetic{context.spec.dtype, precision};
  const std::int64_t dim_v = context.spec.v_dim();
  check_size("dout", problem.dout.size(), count({context.q_count(), dim_v}));
  if (!problem.dlse.empty())
    check_size("dlse", problem.dlse.size(), context.tasks() * context.shape.seqlen_q);
  if (!problem.lse.empty()) {
    check_size("lse", problem.lse.size(), context.tasks() * context.shape.seqlen_q);
    check_size("out", problem.out.size(), count({context.q_count(), dim_v}));
  }
  Backward result{.dq = std::vector<double>(problem.q.size()), .dk = {}, .dv = {}};
  result.captures = result.capture_squares = result.capture_counts = context.programs.zero_grads();
  if (context.spec.sinks) {
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
    if (context.spec.sinks) {
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
  return result;
}

std::vector<double> existing_rows(const Problem& problem, const std::vector<double>& values) {
  if (!problem.spec.varlen) return values;
  const Context context(problem);
  std::vector<double> rows;
  for (std::int64_t task = 0; task < context.tasks(); ++task) {
    const auto first = values.begin() + task * context.shape.seqlen_q;
    rows.insert(rows.end(), first, first + context.q_rows(task).count);
  }
  return rows;
}

Dropout dropout_parameters(double p) {
  if (!(p >= 0 && p < 1)) refuse("dropout_p is {}; it must be at least 0 and below 1", p);
  const double kept = std::max(std::round((1 - p) * 0x1p15), 1.0);  // of 2^15
  return {static_cast<std::uint32_t>(0x1p15 - kept) * 0x10001u, 0x1p15 / kept};
}

double round_to(DType dtype, double value) { return dtype_info(dtype).round(value); }

double max_abs_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) {
    refuse("cannot compare {} elements with {}; give two tensors of one size", a.size(), b.size());
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

namespace {

Verdict judged_by(double yardstick, double error, double factor) {
  const double limit = factor * yardstick + 1e-5;
  if (!std::isfinite(limit)) {
    refuse(
        "the rounded computation overflows its element type, so it sets no error limit; use smaller values "
        "or fp32");
  }
  return {error, limit};
}

}  // namespace

Verdict judge(const std::vector<double>& got, const std::vector<double>& exact,
              const std::vector<double>& rounded, double factor) {
  return judged_by(max_abs_error(rounded, exact), max_abs_error(got, exact), factor);
}

Verdict judge_dsinks(const AttentionShape& shape, const std::vector<double>& got, SinkGrads exact,
                     SinkGrads rounded, double factor) {
  std::vector<double> squares(shape.heads_q);
  for (std::int64_t row = 0; row < std::ssize(exact.rows); ++row) {
    const double error = rounded.rows[row] - exact.rows[row];
    squares[row / shape.seqlen_q % shape.heads_q] += error * error;
  }
  double yardstick = max_abs_error(rounded.sums, exact.sums);
  for (const double sum : squares) yardstick = std::max(yardstick, std::sqrt(sum));
  return judged_by(yardstick, max_abs_error(got, exact.sums), factor);
}

Verdict judge_capture(DType dtype, const std::vector<double>& got, CaptureGrad exact,
                      const std::vector<double>& rounded, double factor) {
  const auto& [sums, squares, counts] = exact;
  const double rounding = dtype_info(dtype).unit_roundoff / 2, adding = dtype_info(DType::fp32).unit_roundoff;
  double yardstick = max_abs_error(rounded, sums);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const double terms = rounding * rounding * squares[i];
    const double additions = adding * adding * counts[i] * (sums[i] * sums[i] + squares[i]);
    yardstick = std::max(yardstick, std::sqrt(terms + additions));
  }
  return judged_by(yardstick, max_abs_error(got, sums), factor);
}

}  // namespace flashjit::reference

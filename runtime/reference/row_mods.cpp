#include "reference/row_mods.hpp"

#include <mutex>
#include <span>

#include "expr/derive.hpp"
#include "expr/nodes.hpp"

namespace flashjit::reference {
namespace {

/// A gradient times a derivative, which may be NaN where the gradient is zero.
double times_derivative(double gradient, double derivative) {
  return gradient == 0 ? 0 : gradient * derivative;
}

/// What the elements of one head's rows give to the captures.
struct CaptureSums {
  CaptureGrads sums, squares, counts;

  void add(std::size_t capture, std::int64_t element, double value) {
    sums[capture][element] += value;
    squares[capture][element] += value * value;
    ++counts[capture][element];
  }
};

/// A program of Q's rows or K's, with its derivatives.
class RowMod {
 public:
  RowMod(const Context& context, bool of_q)
      : context_(context),
        of_q_(of_q),
        columns_(context.spec.head_dim),
        evaluation_(bound(context.problem.captures), expr::Floats::exact) {
    const expr::NodePtr& program =
        of_q ? context.spec.prologue.q_mod.tree() : context.spec.prologue.k_mod.tree();
    exists_ = program != nullptr;
    if (!exists_) return;
    const auto slope = [&](const expr::NodePtr& variable) {
      return evaluation_.add(derivative(program, variable));
    };
    root_ = evaluation_.add(program);
    own_ = slope(make_name(expr::Name::element));
    squares_ = slope(make_name(expr::Name::sum_of_squares));
    for (const expr::NodePtr& read : reads_of_row(program))
      others_.push_back({evaluation_.add(read), slope(read)});
    for (const expr::NodePtr& read : reads_with_grad(program))
      captures_.push_back({evaluation_.add(read), slope(read)});
  }

  bool exists() const { return exists_; }
  /// Whether the task is the one that has the rows: heads of K are shared.
  bool has_rows(std::int64_t task) const {
    const std::int64_t group = context_.shape.heads_q / context_.shape.heads_kv;
    return of_q_ || context_.head_of(task) % group == 0;
  }
  Rows rows(std::int64_t task) const { return of_q_ ? context_.q_rows(task) : context_.kv_rows(task); }

  Matrix modified(std::int64_t task, const Matrix& given) const {
    Matrix result(given.rows, given.columns);
    for (std::int64_t i = 0; i < given.rows; ++i)
      for (std::int64_t column = 0; column < columns_; ++column)
        result[i][column] = values(task, i, column, given)[root_].real;
    return result;
  }

  /// The gradient of the rows as they are given, from that of the modified ones.
  Matrix gradient(std::int64_t task, const Matrix& given, const Matrix& modified,
                  CaptureSums& captures) const {
    Matrix result(given.rows, given.columns);
    for (std::int64_t i = 0; i < given.rows; ++i) {
      double squares = 0;
      for (std::int64_t column = 0; column < columns_; ++column) {
        const double gradient = modified[i][column];
        const expr::Point point = point_of(task, i, column, given);
        const std::vector<expr::Value> all = evaluation_.run(point);
        const auto share = [&](int slope) { return times_derivative(gradient, all[slope].real); };
        result[i][column] += share(own_);
        squares += share(squares_);
        for (const auto& [read, slope] : others_)
          result[i][evaluation_.row_column(read, point, all)] += share(slope);
        for (const auto& [read, slope] : captures_) {
          const expr::Evaluation::Element element = evaluation_.element(read, all);
          captures.add(element.capture, element.index, share(slope));
        }
      }
      for (std::int64_t column = 0; column < columns_; ++column)
        result[i][column] += times_derivative(2 * squares, given[i][column]);
    }
    return result;
  }

 private:
  struct Read {
    int read, slope;
  };

  expr::Point point_of(std::int64_t task, std::int64_t i, std::int64_t column, const Matrix& given) const {
    expr::Point point = as_program_sees(context_.point(task, of_q_ ? i : 0, of_q_ ? 0 : i), 0, column);
    point.row = std::span(given[i], static_cast<std::size_t>(columns_));
    for (const double x : point.row) point.sum_of_squares += x * x;
    return point;
  }
  std::vector<expr::Value> values(std::int64_t task, std::int64_t i, std::int64_t column,
                                  const Matrix& given) const {
    return evaluation_.run(point_of(task, i, column, given));
  }

  const Context& context_;
  bool of_q_, exists_ = false;
  std::int64_t columns_;
  expr::Evaluation evaluation_;
  int root_ = 0, own_ = 0, squares_ = 0;
  std::vector<Read> others_ = {}, captures_ = {};
};

}  // namespace

std::optional<Problem> with_modified_rows(const Problem& given, const Arithmetic& arithmetic) {
  if (!given.spec.prologue.has_programs()) return std::nullopt;
  const Context context(given);
  Problem result = given;
  for (const bool of_q : {true, false}) {
    const RowMod mod(context, of_q);
    std::vector<double>& tensor = of_q ? result.q : result.k;
    const std::vector<double>& from = of_q ? given.q : given.k;
    if (!mod.exists()) continue;
    parallel_for(context.tasks(), [&](std::int64_t task) {
      if (!mod.has_rows(task)) return;
      Matrix rows = mod.modified(task, slice(from, mod.rows(task), context.spec.head_dim));
      const DType stored = context.spec.dtype;  // in which all that follows reads them
      for (double& value : rows.values)
        if (size_of(stored) < 4) value = round_to(stored, value);
      arithmetic.round(rows);
      put(rows, tensor, mod.rows(task));
    });
  }
  return result;
}

void through_row_mods(const Context& given, const Arithmetic& arithmetic, Backward& result) {
  std::mutex captures_mutex;
  const CaptureGrads zeros = given.programs.zero_grads();
  for (const bool of_q : {true, false}) {
    const RowMod mod(given, of_q);
    if (!mod.exists()) continue;
    std::vector<double>& tensor = of_q ? result.dq : result.dk;
    const std::vector<double>& from = of_q ? given.problem.q : given.problem.k;
    const std::int64_t columns = given.spec.head_dim;
    parallel_for(given.tasks(), [&](std::int64_t task) {
      if (!mod.has_rows(task)) return;
      CaptureSums captures{zeros, zeros, zeros};
      Matrix rows = mod.gradient(task, slice(from, mod.rows(task), columns),
                                 slice(tensor, mod.rows(task), columns), captures);
      arithmetic.round(rows);
      put(rows, tensor, mod.rows(task));
      const std::lock_guard lock(captures_mutex);
      for (std::size_t i = 0; i < zeros.size(); ++i)
        for (std::size_t j = 0; j < zeros[i].size(); ++j) {
          result.captures[i][j] = arithmetic.sum(result.captures[i][j], captures.sums[i][j]);
          result.capture_squares[i][j] += captures.squares[i][j];
          result.capture_counts[i][j] += captures.counts[i][j];
        }
    });
  }
}

}  // namespace flashjit::reference

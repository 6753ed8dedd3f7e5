#include "expr/evaluate.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "templates/common/int_math.cuh"

namespace flashjit::expr {
namespace {

/// `Int` is int or long long.
template <class Int>
Int integer_operation(Op op, Int a, Int b) {
  switch (op) {
    case Op::negate:
      return wrap_negate(a);
    case Op::complement:
      return ~a;
    case Op::logical_not:
      return !a;
    case Op::add:
      if constexpr (sizeof(Int) > 4) return saturate_add(a, b);
      return wrap_add(a, b);
    case Op::subtract:
      if constexpr (sizeof(Int) > 4) return saturate_subtract(a, b);
      return wrap_subtract(a, b);
    case Op::multiply:
      return wrap_multiply(a, b);
    case Op::divide:
      return wrap_divide(a, b);
    case Op::modulo:
      return wrap_modulo(a, b);
    case Op::shift_left:
      return wrap_shift_left(a, b);
    case Op::shift_right:
      return wrap_shift_right(a, b);
    case Op::bit_and:
    case Op::logical_and:
      return a & b;
    case Op::bit_or:
    case Op::logical_or:
      return a | b;
    case Op::bit_xor:
      return a ^ b;
    case Op::min:
      return std::min(a, b);
    case Op::max:
      return std::max(a, b);
    case Op::abs:
      return wrap_abs(a);
    default:
      throw Error(ErrorCode::internal, fmt::format("operation {} is none of ints", static_cast<int>(op)));
  }
}

double real_operation(Op op, double a, double b) {
  switch (op) {
    case Op::negate:
      return -a;
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return a / b;
    case Op::modulo:
      return std::fmod(a, b);
    case Op::min:
      return std::fmin(a, b);
    case Op::max:
      return std::fmax(a, b);
    case Op::abs:
      return std::fabs(a);
    case Op::floor:
      return std::floor(a);
    case Op::trunc:
      return std::trunc(a);
    case Op::round:
      return std::nearbyint(a);
    case Op::exp:
      return std::exp(a);
    case Op::exp2:
      return std::exp2(a);
    case Op::expm1:
      return std::expm1(a);
    case Op::log:
      return std::log(a);
    case Op::log2:
      return std::log2(a);
    case Op::log1p:
      return std::log1p(a);
    case Op::pow:
      return std::pow(a, b);
    case Op::sqrt:
      return std::sqrt(a);
    case Op::rsqrt:
      return 1 / std::sqrt(a);
    case Op::tanh:
      return std::tanh(a);
    case Op::sigmoid:
      return 1 / (1 + std::exp(-a));
    case Op::erf:
      return std::erf(a);
    case Op::sin:
      return std::sin(a);
    case Op::cos:
      return std::cos(a);
    default:
      throw Error(ErrorCode::internal, fmt::format("operation {} is none of floats", static_cast<int>(op)));
  }
}

Value literal(const Node& node) {
  if (node.type == Type::real) return {.real = node.real};
  return {.integer = node.type == Type::integer ? node.integer : node.boolean};
}

Value name_value(Name name, const Point& point) {
  switch (name) {
    case Name::score:
      return {.real = point.score};
    case Name::b:
      return {.integer = point.b};
    case Name::h:
      return {.integer = point.h};
    case Name::h_kv:
      return {.integer = point.h_kv};
    case Name::q:
      return {.integer = point.q};
    case Name::kv:
      return {.integer = point.kv};
    case Name::seqlen_q:
      return {.integer = point.seqlen_q};
    case Name::seqlen_kv:
      return {.integer = point.seqlen_kv};
    case Name::out:
      return {.real = point.out};
    case Name::column:
      return {.integer = point.column};
    case Name::element:
      return {.real = point.row[point.column]};
    case Name::sum_of_squares:
      return {.real = point.sum_of_squares};
  }
  return {};
}

/// A captured number as programs see it.
Value captured(Type type, const Bound& bound, std::int64_t index) {
  const double value = bound.values[index];
  if (type == Type::real) return {.real = value};
  if (type == Type::int64) return {.integer = bound.exact.empty() ? to_int64(value) : bound.exact[index]};
  return {.integer = type == Type::integer ? to_int32(value) : value != 0};
}

}  // namespace

std::int32_t to_int32(double value) {
  if (std::isnan(value)) return 0;
  return static_cast<std::int32_t>(std::clamp(value, -2147483648.0, 2147483647.0));
}

std::int64_t to_int64(double value) {
  if (std::isnan(value)) return 0;
  if (value >= 0x1p63) return INT64_MAX;
  return value <= -0x1p63 ? INT64_MIN : static_cast<std::int64_t>(value);
}

int Evaluation::add(const NodePtr& node) {
  const int place = graph_.add(node);
  while (static_cast<int>(capture_of_.size()) < graph_.size()) {
    const Node& added = graph_.node(static_cast<int>(capture_of_.size()));
    int capture = -1;
    if (is_of_declared(added.op)) {
      const auto found = std::ranges::find(captures_, added.declaration.name, &Bound::name);
      if (found == captures_.end())
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("no value is given for '{}'", added.declaration.name));
      capture = static_cast<int>(found - captures_.begin());
    }
    capture_of_.push_back(capture);
  }
  return place;
}

std::vector<Value> Evaluation::run(const Point& point) const {
  std::vector<Value> values(graph_.size());
  for (int i = 0; i < graph_.size(); ++i) {
    values[i] = evaluate(i, point, values);
    if (floats_ == Floats::rounded) values[i].real = static_cast<float>(values[i].real);
  }
  return values;
}

Evaluation::Element Evaluation::element(int read, const std::vector<Value>& values) const {
  const std::vector<int>& args = graph_[read].args;
  const Bound& bound = captures_[capture_of_[read]];
  std::int64_t index = 0;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::int64_t at = values[args[i]].integer;
    index = index * bound.size[i] + std::clamp<std::int64_t>(at, 0, bound.size[i] - 1);
  }
  return {static_cast<std::size_t>(capture_of_[read]), index};
}

std::int64_t Evaluation::row_column(int read, const Point& point, const std::vector<Value>& values) const {
  const std::int64_t last = static_cast<std::int64_t>(point.row.size()) - 1;
  return std::clamp<std::int64_t>(values[graph_[read].args[0]].integer, 0, last);
}

Value Evaluation::evaluate(int place, const Point& point, const std::vector<Value>& values) const {
  const Node& node = graph_.node(place);
  const std::vector<int>& args = graph_[place].args;
  const auto arg = [&](std::size_t i) { return i < args.size() ? values[args[i]] : Value{}; };
  const auto arg_type = [&](std::size_t i) { return graph_.node(args[i]).type; };
  if (is_comparison(node.op)) {
    if (arg_type(0) == Type::real) return {.integer = compare(node.op, arg(0).real, arg(1).real)};
    return {.integer = compare(node.op, arg(0).integer, arg(1).integer)};
  }
  switch (node.op) {
    case Op::literal:
      return literal(node);
    case Op::name:
      return name_value(node.name, point);
    case Op::scalar:
      return captured(node.type, captures_[capture_of_[place]], 0);
    case Op::read: {
      const Element at = element(place, values);
      return captured(node.type, captures_[at.capture], at.index);
    }
    case Op::element_at:
      return {.real = point.row[row_column(place, point, values)]};
    case Op::size:
      return {.integer = static_cast<std::int32_t>(captures_[capture_of_[place]].size[node.integer])};
    case Op::select:
      return arg(0).integer ? arg(1) : arg(2);
    case Op::to_float:
      return {.real = static_cast<double>(arg(0).integer)};
    case Op::to_int:
      return {.integer = arg_type(0) == Type::real ? to_int32(arg(0).real) : saturate_int(arg(0).integer)};
    case Op::to_int64:
      return {.integer = arg_type(0) == Type::real ? to_int64(arg(0).real) : arg(0).integer};
    case Op::low_word:
      return {.integer = low_word_of(arg(0).integer)};
    case Op::high_word:
      return {.integer = high_word_of(arg(0).integer)};
    case Op::to_bool:
      return {.integer = arg_type(0) == Type::real ? arg(0).real != 0 : arg(0).integer != 0};
    default:
      if (node.type == Type::real) return {.real = real_operation(node.op, arg(0).real, arg(1).real)};
      if (node.type == Type::int64)
        return {.integer = integer_operation<long long>(node.op, arg(0).integer, arg(1).integer)};
      return {.integer = integer_operation(node.op, static_cast<std::int32_t>(arg(0).integer),
                                           static_cast<std::int32_t>(arg(1).integer))};
  }
}

}  // namespace flashjit::expr

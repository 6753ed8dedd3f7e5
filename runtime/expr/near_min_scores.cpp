#include "expr/near_min_scores.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "expr/nodes.hpp"
#include "expr/ops.hpp"
#include "templates/common/interval.cuh"

namespace flashjit::expr {
namespace {

constexpr double kFar = 1e37;
constexpr double kLargest = 3.4028234663852886e38;
constexpr double kOrdinary = 1e6;      // scores, and captures that scores or positions are multiplied by
constexpr double kSmallest = 1e-6;     // divisors that programs compute
constexpr double kEnough = 1e100;      // beyond kFar, and small enough for products
constexpr long long kHeads = 1 << 20;  // and sequences

/// Bounds of a float that is not NaN.
struct Span {
  double low, high;

  double size() const { return std::max(-low, high); }
  double least_size() const { return low > 0 ? low : high < 0 ? -high : 0; }
};

Span up_to(double size) { return {-size, size}; }
Span join(Span a, Span b) { return {std::min(a.low, b.low), std::max(a.high, b.high)}; }
Span around(std::initializer_list<double> values) { return {std::min(values), std::max(values)}; }
Span bounded(Span a) { return {std::clamp(a.low, -kEnough, kEnough), std::clamp(a.high, -kEnough, kEnough)}; }

Span product(Span a, Span b) {
  return around({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
}

Span quotient(Span a, Span b, bool of_ints) {
  const double least = std::max(b.least_size(), b.least_size() > 0 ? 0 : of_ints ? 1 : kSmallest);
  if (b.low < 0) return up_to(a.size() / least);
  return {std::min(a.low / least, 0.0), std::max(a.high / least, 0.0)};
}

Span power(Span a, Span b) {
  const double least = a.least_size(), most = a.size();
  const Span found = around(
      {std::pow(least, b.low), std::pow(least, b.high), std::pow(most, b.low), std::pow(most, b.high)});
  return a.low < 0 ? up_to(found.high) : Span{0, found.high};
}

Span remainder(Span a, Span b) {
  const double most = std::min(a.size(), b.size());
  return {a.low < 0 ? -most : 0, a.high > 0 ? most : 0};
}

/// NaN loses against the other operand.
Span greater_of(const Span& a, const Span& b) {
  if (a.low == a.high) return {a.low, std::max(a.high, b.high)};
  if (b.low == b.high) return {b.low, std::max(a.high, b.high)};
  return join(a, b);
}
Span negative(Span a) { return {-a.high, -a.low}; }

Span of_operation(Op op, Span a, Span b) {
  switch (op) {
    case Op::negate:
      return negative(a);
    case Op::abs:
      return {a.least_size(), a.size()};
    case Op::floor:
    case Op::trunc:
    case Op::round:
      return {a.low - 1, a.high + 1};
    case Op::add:
      return {a.low + b.low, a.high + b.high};
    case Op::subtract:
      return {a.low - b.high, a.high - b.low};
    case Op::multiply:
      return product(a, b);
    case Op::modulo:
      return remainder(a, b);
    case Op::max:
      return greater_of(a, b);
    case Op::min:
      return negative(greater_of(negative(a), negative(b)));
    case Op::select:
      return join(a, b);
    case Op::exp:
      return {std::exp(a.low), std::exp(a.high)};
    case Op::exp2:
      return {std::exp2(a.low), std::exp2(a.high)};
    case Op::expm1:
      return {std::expm1(a.low), std::expm1(a.high)};
    case Op::pow:
      return power(a, b);
    case Op::sqrt:
      return {0, std::sqrt(std::max(a.high, 0.0))};
    case Op::rsqrt:
      return {0, 1 / std::sqrt(std::max(a.low, 1e-45))};
    case Op::log:
    case Op::log2:
    case Op::log1p:
      return up_to(150);  // of any float
    default:
      return up_to(1);  // tanh, sigmoid, erf, sin, cos
  }
}

Interval of_ints(Op op, Interval a, Interval b) {
  switch (op) {
    case Op::negate:
      return -a;
    case Op::complement:
      return ~a;
    case Op::abs:
      return abs(a);
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return a / b;
    case Op::modulo:
      return a % b;
    case Op::shift_left:
      return a << b;
    case Op::shift_right:
      return a >> b;
    case Op::bit_and:
      return a & b;
    case Op::bit_or:
      return a | b;
    case Op::bit_xor:
      return a ^ b;
    case Op::min:
      return min(a, b);
    case Op::max:
      return max(a, b);
    case Op::select:
      return join(a, b);
    default:
      return any_int();  // words of int64s
  }
}

Interval of_elements(ElementType type) {
  switch (type) {
    case ElementType::boolean:
      return {0, 1};
    case ElementType::int8:
      return {-128, 127};
    case ElementType::uint8:
      return {0, 255};
    case ElementType::int16:
      return {-32768, 32767};
    default:
      return any_int();
  }
}

/// The leaves of a value. A measure is a score, a position or a distance, or such times anything.
enum class Origin : std::uint8_t { constant, measure, other };

struct Value {
  Interval ints = {0, 1};
  Span ordinary = {0, 1};  ///< where captured floats are kOrdinary at most
  Span extreme = {0, 1};   ///< where they are anything, but for factors of measures
  Origin origin = Origin::constant;
};

class Reach {
 public:
  explicit Reach(const Graph& graph) : graph_(graph) {}

  bool far(int root) {
    for (int place = 0; place <= root; ++place) values_.push_back(value_at(place));
    return values_[root].extreme.low <= -kFar;
  }

 private:
  Value value_at(int place) {
    switch (graph_.node(place).type) {
      case Type::real:
        return real_at(place);
      case Type::boolean:
        return {.origin = Origin::other};
      case Type::integer:
      case Type::int64:
        return int_at(place);
    }
    return {};
  }

  const Value& arg(int place, std::size_t i) const {
    const std::vector<int>& args = graph_[place].args;
    return values_[args[std::min(i, args.size() - 1)]];
  }
  /// The operand of an operation, or the arm of a select.
  const Value& operand(int place, std::size_t i) const {
    return arg(place, graph_.node(place).op == Op::select ? i + 1 : i);
  }

  /// Positions and distances stay such when captured ints move them.
  Value int_at(int place) const {
    const Node& node = graph_.node(place);
    const bool int64 = node.type == Type::int64;
    switch (node.op) {
      case Op::literal:
        return {.ints = {node.integer, node.integer}};
      case Op::name:
        return name_value(node.name);
      case Op::size:
        return {.ints = any_int()};
      case Op::scalar:
      case Op::read:
        return {.ints = int64 ? any_int() : of_elements(node.declaration.type), .origin = Origin::other};
      case Op::to_int:
      case Op::to_int64: {
        Value result = arg(place, 0);
        if (node.args[0]->type == Type::real) result.ints = any_int();
        return result;
      }
      default: {
        const Value &a = operand(place, 0), &b = operand(place, 1);
        const bool measure = a.origin == Origin::measure || b.origin == Origin::measure;
        return {.ints = int64 ? any_int() : of_ints(node.op, a.ints, b.ints),
                .origin = measure ? Origin::measure : std::max(a.origin, b.origin)};
      }
    }
  }

  static Value name_value(Name name) {
    const bool in_sequence =
        name == Name::q || name == Name::kv || name == Name::seqlen_q || name == Name::seqlen_kv;
    return {.ints = {0, in_sequence ? any_int().high - 1 : kHeads},
            .origin = in_sequence ? Origin::measure : Origin::constant};
  }

  Value real_at(int place) const {
    const Node& node = graph_.node(place);
    switch (node.op) {
      case Op::literal:
        return {.ordinary = {node.real, node.real}, .extreme = {node.real, node.real}};
      case Op::name:
        return {.ordinary = up_to(kOrdinary), .extreme = up_to(kOrdinary), .origin = Origin::measure};
      case Op::scalar:
      case Op::read: {
        const bool fp16 = node.op == Op::read && node.declaration.type == ElementType::fp16;
        return {.ordinary = up_to(fp16 ? 65504 : kOrdinary),
                .extreme = up_to(fp16 ? 65504 : kLargest),
                .origin = Origin::other};
      }
      case Op::to_float:
        return float_of_int(place);
      case Op::divide:
        return divided(place);
      case Op::multiply:
        return multiplied(place);
      default:
        return computed(place);
    }
  }

  Value float_of_int(int place) const {
    Value result = arg(place, 0);
    const bool int64 = graph_.node(place).args[0]->type == Type::int64;
    result.ordinary = int64
                          ? up_to(0x1p63)
                          : Span{static_cast<double>(result.ints.low), static_cast<double>(result.ints.high)};
    result.extreme = result.ordinary;
    return result;
  }

  /// A divisor that may be zero is taken as kSmallest or more.
  Value divided(int place) const {
    const Value &a = arg(place, 0), &b = arg(place, 1);
    const bool of_ints = graph_.node(graph_[place].args[1]).op == Op::to_float;
    return {.ordinary = bounded(quotient(a.ordinary, b.ordinary, of_ints)),
            .extreme = bounded(quotient(a.extreme, b.extreme, of_ints)),
            .origin = a.origin == Origin::measure ? a.origin : std::max(a.origin, b.origin)};
  }

  /// Whether one factor is tanh of a quotient by the other: then the product is no larger than the dividend.
  const Value* softcapped(int place) const {
    const std::vector<int>& args = graph_[place].args;
    for (const std::size_t i : {0, 1}) {
      if (graph_.node(args[i]).op != Op::tanh) continue;
      const int inner = graph_[args[i]].args[0];
      if (graph_.node(inner).op == Op::divide && graph_[inner].args[1] == args[1 - i]) return &arg(inner, 0);
    }
    return nullptr;
  }

  Value multiplied(int place) const {
    if (const Value* capped = softcapped(place))
      return {.ordinary = up_to(capped->ordinary.size()),
              .extreme = up_to(capped->extreme.size()),
              .origin = capped->origin};
    const Value &a = arg(place, 0), &b = arg(place, 1);
    const bool square = graph_[place].args[0] == graph_[place].args[1];
    const auto times = [&](Span x, Span y) {
      return bounded(square ? Span{x.least_size() * x.least_size(), x.size() * x.size()} : product(x, y));
    };
    const bool measure = a.origin == Origin::measure || b.origin == Origin::measure;
    const Span ordinary = times(a.ordinary, b.ordinary);
    return {.ordinary = ordinary,
            .extreme = measure ? ordinary : times(a.extreme, b.extreme),
            .origin = measure ? Origin::measure : std::max(a.origin, b.origin)};
  }

  /// Exponentials of measures and bounded functions are none.
  static bool keeps_measures(Op op) {
    switch (op) {
      case Op::exp:
      case Op::exp2:
      case Op::expm1:
      case Op::pow:
      case Op::rsqrt:
      case Op::tanh:
      case Op::sigmoid:
      case Op::erf:
      case Op::sin:
      case Op::cos:
        return false;
      default:
        return true;
    }
  }

  Value computed(int place) const {
    const Op op = graph_.node(place).op;
    const Value &a = operand(place, 0), &b = operand(place, 1);
    const Origin origin = std::max(a.origin, b.origin);
    const bool other = origin != Origin::constant && !keeps_measures(op);
    return {.ordinary = bounded(of_operation(op, a.ordinary, b.ordinary)),
            .extreme = bounded(of_operation(op, a.extreme, b.extreme)),
            .origin = other ? Origin::other : origin};
  }

  const Graph& graph_;
  std::vector<Value> values_;
};

}  // namespace

bool may_be_near_min(const Graph& graph, int root) { return Reach(graph).far(root); }

}  // namespace flashjit::expr

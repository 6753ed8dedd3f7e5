// Random well-typed programs from a fixed seed: for tests that hold for every program.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "expr/ops.hpp"
#include "flashjit/expr.hpp"

namespace flashjit::test {

/// What may appear in the programs that are made.
struct RandomProgramOptions {
  int depth = 5;                 ///< levels of operations, at most
  bool score = true;             ///< the name score
  bool grad = true;              ///< tensors whose gradient is wanted (score programs)
  bool captures = true;          ///< tensors and scalars
  bool transcendental = true;    ///< exp to cos; without, every operation is exact or rounded once
  bool extreme_literals = true;  ///< INT_MAX, 1e30 and the like
};

class RandomProgram {
 public:
  explicit RandomProgram(std::uint64_t seed, RandomProgramOptions options = {})
      : random_(seed), options_(options) {}

  expr::Expr score_program() { return make(expr::Type::real, options_.depth); }
  expr::Expr mask_program() {
    const RandomProgramOptions before = options_;
    options_.score = options_.grad = false;
    const expr::Expr out = make(expr::Type::boolean, options_.depth);
    options_ = before;
    return out;
  }

  expr::Expr make(expr::Type type, int depth) {
    if (depth <= 0 || below(8) == 0) return leaf(type);
    switch (type) {
      case expr::Type::boolean:
        return boolean(depth - 1);
      case expr::Type::integer:
        return integer(depth - 1);
      case expr::Type::int64:
        return expr::to_int64(integer(depth - 1));
      case expr::Type::real:
        break;
    }
    return real(depth - 1);
  }

  /// 0 to count - 1; the same on every standard library.
  int below(int count) { return static_cast<int>(random_() % static_cast<std::uint64_t>(count)); }

 private:
  using Expr = expr::Expr;
  using Type = expr::Type;
  using Op = expr::Op;

  template <class Value>
  Value one_of(const std::vector<Value>& values) {
    return values[below(static_cast<int>(values.size()))];
  }

  /// An int or a float: promotion is exercised.
  Expr number(int depth) { return make(below(3) == 0 ? Type::real : Type::integer, depth); }

  Expr boolean(int depth) {
    switch (below(8)) {
      case 0:
        return !make(Type::boolean, depth);
      case 1:
      case 2:
        return expr::apply(one_of<Op>({Op::logical_and, Op::logical_or}),
                           {make(Type::boolean, depth), make(Type::boolean, depth)});
      case 3:
        return expr::apply(one_of<Op>({Op::equal, Op::not_equal}),
                           {make(Type::boolean, depth), make(Type::boolean, depth)});
      case 4:
        return expr::to_bool(number(depth));
      case 5:
        return select(make(Type::boolean, depth), make(Type::boolean, depth), make(Type::boolean, depth));
      default:
        return expr::apply(
            one_of<Op>({Op::equal, Op::not_equal, Op::less, Op::less_equal, Op::greater, Op::greater_equal}),
            {number(depth), number(depth)});
    }
  }

  Expr integer(int depth) {
    switch (below(8)) {
      case 0:
        return expr::apply(one_of<Op>({Op::negate, Op::complement, Op::abs}), {make(Type::integer, depth)});
      case 1:
        return expr::to_int(below(2) == 0 ? make(Type::real, depth) : make(Type::boolean, depth));
      case 2:
        return select(make(Type::boolean, depth), make(Type::integer, depth), make(Type::integer, depth));
      case 3:
        return expr::apply(
            one_of<Op>({Op::shift_left, Op::shift_right, Op::bit_and, Op::bit_or, Op::bit_xor}),
            {make(Type::integer, depth), make(Type::integer, depth)});
      default:
        return expr::apply(
            one_of<Op>({Op::add, Op::subtract, Op::multiply, Op::divide, Op::modulo, Op::min, Op::max}),
            {make(Type::integer, depth), make(Type::integer, depth)});
    }
  }

  Expr real(int depth) {
    switch (below(options_.transcendental ? 7 : 5)) {
      case 0:
        return expr::apply(one_of<Op>({Op::negate, Op::abs, Op::floor, Op::trunc, Op::round}),
                           {make(Type::real, depth)});
      case 1:
        return expr::to_float(below(2) == 0 ? make(Type::integer, depth) : make(Type::boolean, depth));
      case 2:
        return select(make(Type::boolean, depth), make(Type::real, depth), number(depth));
      case 5:
      case 6:
        return expr::apply(one_of<Op>({Op::exp, Op::exp2, Op::expm1, Op::log, Op::log2, Op::log1p, Op::sqrt,
                                       Op::rsqrt, Op::tanh, Op::sigmoid, Op::erf, Op::sin, Op::cos}),
                           {number(depth)});
      default: {
        const Op op = one_of<Op>({Op::add, Op::subtract, Op::multiply, Op::divide, Op::min, Op::max});
        const bool real_first = below(2) == 0;
        const Expr a = make(Type::real, depth), b = number(depth);
        return real_first ? expr::apply(op, {a, b}) : expr::apply(op, {b, a});
      }
    }
  }

  Expr leaf(Type type) {
    if (options_.captures && below(4) == 0) return captured(type);
    switch (type) {
      case Type::boolean:
        return below(2) == 0;
      case Type::integer:
        return below(3) == 0 ? integer_literal() : position();
      case Type::int64:
        return expr::to_int64(position());
      case Type::real:
        break;
    }
    if (options_.score && below(2) == 0) return expr::score;
    return below(2) == 0 ? real_literal() : expr::to_float(position());
  }

  Expr position() {
    return one_of<expr::NameConstant>({expr::b, expr::h, expr::h_kv, expr::q, expr::kv, expr::q, expr::kv,
                                       expr::seqlen_q, expr::seqlen_kv});
  }

  Expr integer_literal() {
    constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
    if (options_.extreme_literals && below(6) == 0)
      return one_of<std::int32_t>({kMin, kMin + 1, -(kMin + 1), 65536, -65536, 16777217});
    return below(40) - 12;
  }

  Expr real_literal() {
    if (options_.extreme_literals && below(6) == 0)
      return one_of<float>({-0.0f, 1e30f, -3.4028235e38f, 1.17549435e-38f, 1e-45f, 16777216.0f, 0.1f});
    return static_cast<float>(below(64) - 24) / one_of<float>({1.0f, 2.0f, 3.0f, 8.0f, 10.0f});
  }

  /// The same name is the same declaration in all programs: see random_program_declarations().
  Expr captured(Type type) {
    const std::string grad = options_.grad ? "_grad" : "";
    switch (type) {
      case Type::boolean:
        return expr::tensor("flags", ElementType::boolean, 1)[index()];
      case Type::integer:
        switch (below(4)) {
          case 0:
            return expr::scalar_int("window");
          case 1:
            return expr::tensor("doc", ElementType::int32, 2)(expr::b, index());
          case 2:
            return expr::to_int(expr::tensor("lengths", ElementType::int64, 1)[expr::b]);
          default:
            return expr::tensor("small", ElementType::int8, 1)[index()];
        }
      case Type::int64:
        return expr::tensor("lengths", ElementType::int64, 1)[expr::b];
      case Type::real:
        break;
    }
    if (below(4) == 0) return expr::scalar_float("cap");
    if (below(2) == 0) return expr::tensor("slopes", ElementType::fp32, 1)[expr::h];
    const expr::Tensor bias = expr::tensor("bias" + grad, ElementType::bf16, 4);
    return (options_.grad ? bias.with_grad() : bias)(expr::b, expr::h, index(), index());
  }

  Expr index() { return below(4) == 0 ? make(Type::integer, 1) : position(); }

  std::mt19937_64 random_;
  RandomProgramOptions options_;
};

/// Every name that random programs may declare.
inline std::vector<expr::Declaration> random_program_declarations() {
  return {{"flags", ElementType::boolean, 1, false}, {"window", ElementType::int32, 0, false},
          {"doc", ElementType::int32, 2, false},     {"lengths", ElementType::int64, 1, false},
          {"small", ElementType::int8, 1, false},    {"cap", ElementType::fp32, 0, false},
          {"slopes", ElementType::fp32, 1, false},   {"bias", ElementType::bf16, 4, false},
          {"bias_grad", ElementType::bf16, 4, true}};
}

}  // namespace flashjit::test

// Random programs whose values stay moderate and smooth, as of programs that people write, with values for
// what random programs declare.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "expr/evaluate.hpp"
#include "expr/nodes.hpp"
#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "flashjit/expr.hpp"
#include "support/small_float.hpp"

namespace flashjit::test {

/// A declared name with its value, rounded to its type.
struct Given {
  expr::Declaration declaration;
  std::vector<std::int64_t> size = {};
  std::vector<double> values = {};
};

inline Given given(const char* name, ElementType type, std::vector<std::int64_t> size,
                   std::vector<double> values = {}, bool grad = false) {
  Given made;
  made.declaration = {name, type, static_cast<int>(size.size()), grad};
  made.size = std::move(size);
  made.values = std::move(values);
  return made;
}

/// Small ints, one int64 beyond int32, floats within a few units.
inline void fill(std::vector<Given>& all, unsigned seed) {
  std::mt19937 random(seed);
  for (Given& given : all) {
    std::int64_t count = 1;
    for (const std::int64_t size : given.size) count *= size;
    const ElementType type = given.declaration.type;
    for (std::int64_t i = 0; i < count; ++i) {
      const int small = static_cast<int>(random() % 7) - (type == ElementType::uint8 ? 0 : 2);
      const double real = static_cast<double>(static_cast<int>(random() % 801) - 400) / 128.0;
      const bool is_real = expr::read_type(type) == expr::Type::real;
      given.values.push_back(is_real                            ? Bf16::round(real)
                             : type == ElementType::boolean     ? random() % 2
                             : type == ElementType::int64 && !i ? 1e12
                                                                : small);
    }
  }
}

/// What tame programs may read: one of each element type, of several ranks.
inline std::vector<Given> tame_captures(unsigned seed) {
  std::vector<Given> all;
  const auto add = [&](const char* name, ElementType type, std::vector<std::int64_t> size,
                       bool grad = false) { all.push_back(given(name, type, std::move(size), {}, grad)); };
  add("doc", ElementType::int32, {2, 9});
  add("limit", ElementType::int16, {3});
  add("kind", ElementType::int8, {8});
  add("level", ElementType::uint8, {4, 5});
  add("far", ElementType::int64, {6});
  add("open", ElementType::boolean, {7, 7});
  add("bias", ElementType::bf16, {2, 2, 6, 6}, true);
  add("slopes", ElementType::fp32, {4}, true);
  add("window", ElementType::int32, {});
  add("cap", ElementType::fp32, {});
  fill(all, seed);
  all.back().values[0] = 5;  // programs divide by it
  return all;
}

inline std::vector<expr::Bound> bounds_of(const std::vector<Given>& given) {
  std::vector<expr::Bound> bound;
  for (const Given& g : given) bound.push_back({g.declaration.name, g.size, g.values});
  return bound;
}

/// Makes programs of at most `depth` levels.
class TameProgram {
 public:
  TameProgram(unsigned seed, const std::vector<Given>& captures) : random_(seed), captures_(captures) {}

  expr::Expr mask() { return boolean(4); }
  expr::Expr score() {
    const expr::Expr x = real(4, true);
    return pick(2) ? x : expr::Expr(expr::score) + x;
  }

 private:
  using Expr = expr::Expr;
  using Op = expr::Op;

  int pick(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }

  template <std::size_t n>
  Op any_of(const Op (&ops)[n]) {
    return ops[pick(n)];
  }

  Expr integer_literal() {
    constexpr std::int32_t kExtreme[] = {INT32_MAX, INT32_MIN, 1 << 30, -1, 0, 31, 65536, INT32_MAX - 5};
    return pick(8) ? Expr(pick(13) - 4) : Expr(kExtreme[pick(8)]);
  }
  Expr read(const char* name) {
    for (const Given& given : captures_) {
      if (given.declaration.name != name) continue;
      if (given.declaration.is_scalar()) return expr::scalar(given.declaration);
      std::vector<Expr> indices;
      for (int i = 0; i < given.declaration.rank; ++i) indices.push_back(pick(6) ? name_of() : integer(1));
      return expr::read(given.declaration, indices);
    }
    throw Error(ErrorCode::internal, name);
  }
  Expr name_of() {
    using namespace expr;
    const NameConstant names[] = {b, h, h_kv, seqlen_q, seqlen_kv, q, q, q, kv, kv, kv};
    return names[pick(11)];
  }

  Expr integer(int depth) {
    using namespace expr;
    if (depth == 0 || pick(6) == 0) {
      const int kind = pick(8);
      if (kind < 4) return name_of();
      if (kind < 6) return integer_literal();
      constexpr const char* kNames[] = {"doc", "limit", "kind", "level", "far", "window"};
      return read(kNames[pick(6)]);
    }
    switch (pick(12)) {
      case 0:
        return select(boolean(depth - 1), integer(depth - 1), integer(depth - 1));
      case 1:
        return to_int(boolean(depth - 1));
      case 2:
        return pick(2) ? -integer(depth - 1) : pick(2) ? ~integer(depth - 1) : abs(integer(depth - 1));
      case 3:
        return integer(depth - 1) * integer_literal();
      case 4:
      case 5: {
        constexpr Op kRare[] = {Op::multiply, Op::divide, Op::modulo,  Op::shift_left, Op::shift_right,
                                Op::bit_and,  Op::bit_or, Op::bit_xor, Op::min,        Op::max};
        return apply(any_of(kRare), {integer(depth - 1), integer(depth - 1)});
      }
      case 6:
        return to_int(real(depth - 1, false));
      default:
        return pick(2) ? integer(depth - 1) + integer(depth - 1) : integer(depth - 1) - integer(depth - 1);
    }
  }

  Expr boolean(int depth) {
    using namespace expr;
    constexpr Op kCompare[] = {Op::less,          Op::less_equal, Op::greater,  Op::greater_equal,
                               Op::greater_equal, Op::equal,      Op::not_equal};
    if (depth == 0) return pick(8) ? apply(any_of(kCompare), {integer(0), integer(0)}) : read("open");
    switch (pick(9)) {
      case 0:
        return !boolean(depth - 1);
      case 1:
      case 2:
        return boolean(depth - 1) && boolean(depth - 1);
      case 3:
        return boolean(depth - 1) || boolean(depth - 1);
      case 4:
        return pick(3)   ? to_bool(integer(depth - 1))
               : pick(2) ? select(boolean(depth - 1), boolean(depth - 1), boolean(depth - 1))
                         : boolean(depth - 1) == boolean(depth - 1);
      case 5:
        if (!pick(3)) return apply(any_of(kCompare), {real(depth - 1, false), real(depth - 1, false)});
        [[fallthrough]];
      default:
        return apply(any_of(kCompare), {integer(depth - 1), integer(depth - 1)});
    }
  }

  Expr real(int depth, bool with_score) {
    using namespace expr;
    if (depth == 0 || pick(7) == 0) {
      switch (pick(with_score ? 7 : 4)) {
        case 0:
          return Expr(static_cast<float>(pick(33) - 16) / 8);
        case 1:
          return read("cap");
        case 2:
          return read(pick(2) ? "bias" : "slopes");
        case 3:
          // Small, as sines and sums of large floats are all rounding error.
          return (pick(2) ? to_float(name_of() - name_of() + pick(3)) : to_float(integer(1) % 64)) * 0.125;
        default:
          return Expr(expr::score);
      }
    }
    const Expr a = real(depth - 1, with_score);
    switch (pick(with_score ? 14 : 7)) {
      case 0:
        return -a;
      case 1:
        return abs(a);
      case 2:
        return apply(pick(2) ? Op::min : Op::max, {a, real(depth - 1, with_score)});
      case 3:
        return select(boolean(1), a, real(depth - 1, with_score));
      case 4:
        return a * real(depth - 1, with_score);
      case 5:
      case 6:
        return pick(2) ? a + real(depth - 1, with_score) : a - real(depth - 1, with_score);
      case 7:
        return pick(3) == 0 ? erf(a) : pick(2) ? tanh(a) : sigmoid(a);
      case 8:
        return pick(2) ? sin(a) : cos(a);
      case 9:
        return pick(3) == 0 ? expm1(min(a, Expr(3.0)))
               : pick(2)    ? exp(min(a, Expr(3.0)))
                            : exp2(min(a, Expr(3.0)));
      case 10:
        return pick(3) == 0 ? log1p(abs(a)) : pick(2) ? log(abs(a) + 0.5) : log2(abs(a) + 0.5);
      case 11:
        return pick(3) == 0 ? pow(abs(a) + 0.25, real(0, false))
               : pick(2)    ? sqrt(abs(a) + 0.25)
                            : rsqrt(abs(a) + 0.25);
      case 12:
        return a / (abs(real(depth - 1, with_score)) + 1.0);
      default:
        return pick(2) ? a / read("cap") : a * 0.75;
    }
  }

  std::mt19937 random_;
  const std::vector<Given>& captures_;
};

}  // namespace flashjit::test

// Random score programs that make masks of numbers: products, sums and choices of captured extremes with what
// is bounded, next to scores and distances with ordinary factors.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "flashjit/expr.hpp"

namespace flashjit::test {

class FarProgram {
 public:
  explicit FarProgram(unsigned seed) : random_(seed) {}

  expr::Expr make() {
    using namespace expr;
    const Expr base = pick(3) ? Expr(expr::score) : softcapped();
    switch (pick(4)) {
      case 0:
        return select(condition(), real(2), base);
      case 1:
        return base + tensor("slopes", ElementType::fp32, 1)[h] * to_float(kv - q) + real(2);
      case 2:
        return min(base, real(3));
      default:
        return base + real(3);
    }
  }

  struct Value {
    std::string name;
    std::vector<std::int64_t> size;
    std::vector<double> values;
  };
  /// Values for what programs read, of 2 heads, `queries` and `keys`.
  static std::vector<Value> values(unsigned seed, std::int64_t queries, std::int64_t keys) {
    constexpr double kLeast = std::numeric_limits<float>::lowest(), kLeastBf16 = -0x1.fep127;
    std::mt19937 random(seed);
    const auto filled = [&](const char* name, std::vector<std::int64_t> size, std::vector<double> of) {
      std::int64_t count = 1;
      for (const std::int64_t one : size) count *= one;
      Value made{name, std::move(size), {}};
      for (std::int64_t i = 0; i < count; ++i) made.values.push_back(of[random() % of.size()]);
      return made;
    };
    return {filled("low", {}, {kLeast, kLeast, 0.5 * kLeast, 0, 1}),
            filled("lows", {2}, {kLeast, kLeast, 0.75 * kLeast, 0}),
            filled("rows", {queries}, {kLeast, 0, 1, -1}),
            filled("bias", {queries, keys}, {kLeastBf16, kLeastBf16, 0, 0.5}),
            filled("pad", {keys}, {0, 1, 1, 1, 1, 1}),
            filled("huge", {keys}, {INT32_MAX, INT32_MIN, 0, 1}),
            filled("open", {queries}, {0, 0, 1}),
            filled("slopes", {2}, {-0.25, 0.5})};
  }

 private:
  using Expr = expr::Expr;

  int pick(unsigned count) { return static_cast<int>(random_() % count); }

  static Expr softcapped() {
    const Expr cap = expr::scalar_float("low");
    return cap * tanh(Expr(expr::score) / cap);
  }

  Expr condition() {
    using namespace expr;
    switch (pick(3)) {
      case 0:
        return tensor("open", ElementType::boolean, 1)[q];
      case 1:
        return tensor("pad", ElementType::int8, 1)[kv] != 0;
      default:
        return kv > q;
    }
  }

  /// No larger than a few units.
  Expr bounded() {
    using namespace expr;
    switch (pick(7)) {
      case 0:
        return to_float(tensor("pad", ElementType::int8, 1)[kv]);
      case 1:
        return 1.0 - to_float(tensor("pad", ElementType::int8, 1)[kv]);
      case 2:
        return to_float(condition());
      case 3:
        return exp(0.0 * expr::score);
      case 4:
        return exp(-0.5 * abs(to_float(kv - q)));
      case 5:
        return sigmoid(expr::score);
      default:
        return Expr(static_cast<float>(pick(5)) / 4);
    }
  }

  Expr extreme() {
    using namespace expr;
    switch (pick(6)) {
      case 0:
        return scalar_float("low");
      case 1:
        return tensor("lows", ElementType::fp32, 1)[h];
      case 2:
        return tensor("rows", ElementType::fp32, 1)[q];
      case 3:
        return tensor("bias", ElementType::bf16, 2)(q, kv);
      case 4:
        return -pow(Expr(10.0), Expr(37.0)) * 30.0;
      default:
        return to_float(tensor("huge", ElementType::int32, 1)[kv]) * -1e29;
    }
  }

  Expr real(int depth) {
    if (depth == 0) return pick(4) ? extreme() : bounded();
    switch (pick(6)) {
      case 0:
        return extreme();
      case 1:
      case 2:
        return pick(2) ? real(depth - 1) * bounded() : bounded() * real(depth - 1);
      case 3:
        return pick(2) ? real(depth - 1) + bounded() : 0.5 * real(depth - 1) + 0.5 * real(depth - 1);
      case 4:
        return select(condition(), real(depth - 1), bounded());
      default:
        return min(real(depth - 1), bounded());
    }
  }

  std::mt19937 random_;
};

}  // namespace flashjit::test

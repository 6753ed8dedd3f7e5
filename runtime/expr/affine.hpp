// Integers that are affine in the positions: factor * q + factor * kv + what all pairs of a head share.
#pragma once

#include <optional>
#include <vector>

#include "expr/graph.hpp"
#include "templates/common/interval.cuh"

namespace flashjit::expr {

/// The int at `place`, which is the same for all pairs, times `factor`.
struct Term {
  int place;
  long long factor;
  bool operator==(const Term&) const = default;
  auto operator<=>(const Term&) const = default;
};

/// The part of an affine form that all pairs of a head share; exact in 64 bits.
struct Rest {
  std::vector<Term> terms = {};  ///< by place, without zero factors
  long long constant = 0;

  bool operator==(const Rest&) const = default;
  auto operator<=>(const Rest&) const = default;
};

/// Equal to the int modulo 2^32; equal to it where the form fits into an int.
struct Affine {
  long long q = 0, kv = 0;
  Rest rest = {};
};

Rest operator*(const Rest& a, long long factor);
Affine operator+(const Affine& a, const Affine& b);
Affine operator-(const Affine& a, const Affine& b);
Affine operator*(const Affine& a, long long factor);

/// The form of an int; none where it is not affine, or where 64 bits might not hold it.
std::optional<Affine> affine_form(const Graph& graph, int place);

/// Whether the form fits into an int at all pairs, whatever the lengths and the values that calls give.
bool always_fits(const Graph& graph, const Affine& form);

}  // namespace flashjit::expr

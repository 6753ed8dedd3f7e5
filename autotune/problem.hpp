// What is tuned: one spec at one shape.
#pragma once

#include "flashjit/spec.hpp"

namespace flashjit::autotune {

struct Problem {
  AttentionSpec spec;
  AttentionShape shape;

  bool operator==(const Problem&) const = default;
};

}  // namespace flashjit::autotune

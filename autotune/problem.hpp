// What is tuned: one spec at one shape.
#pragma once

#include "plan/plan.hpp"

namespace flashjit::autotune {

using plan::Problem;

}  // namespace flashjit::autotune

// What `flashjit verify --all` checks: the problems that together have every feature.
#pragma once

#include <vector>

#include "tools/parts/suite.hpp"

namespace flashjit::command {

/// Small enough for the CPU's reference; the usual ones first.
std::vector<autotune::SuiteProblem> every_problem();

}  // namespace flashjit::command

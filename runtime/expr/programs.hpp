// Score and mask programs as CUDA text for the kernels and as functions for the CPU reference.
#pragma once

#include <cstdint>
#include <string>

#include "flashjit/error.hpp"
#include "flashjit/programs.hpp"

namespace flashjit::expr {

/// Whether the program is one that flashjit knows; the reason lists those that are.
Support check(const MaskProgram& mask);
Support check(const ScoreProgram& score);

/// The static member functions score, score_grad, mask, classify_tile, kv_bounds and q_bounds of a Problem:
/// their contract is templates/common/problem.cuh.
std::string emit_hooks(const ScoreProgram& score, const MaskProgram& mask);

/// The same meaning on the host, for the reference.
bool attends(const MaskProgram& mask, std::int64_t q, std::int64_t kv, std::int64_t seqlen_q,
             std::int64_t seqlen_kv);

}  // namespace flashjit::expr

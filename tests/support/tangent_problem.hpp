// Problems with tangents, for derivatives on the CPU.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "expr/declarations.hpp"
#include "reference/inputs.hpp"
#include "reference/reference.hpp"

namespace flashjit::test {

inline std::vector<double> normal_doubles(std::size_t count, std::mt19937& generator) {
  std::normal_distribution<double> one(0, 1);
  std::vector<double> values(count);
  for (double& value : values) value = one(generator);
  return values;
}

/// A problem with plausible values and tangents of them.
inline reference::Problem problem_with_tangents(const std::string& spec, const AttentionShape& shape) {
  std::mt19937 generator(5);
  reference::Problem problem{.spec = parse_spec(spec), .shape = shape};
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = shape;
  std::int64_t queries = batch * seqlen_q, keys = batch * seqlen_kv;
  if (problem.spec.varlen) {
    problem.cu_seqlens_q = reference::random_offsets(batch, seqlen_q, 1, 3);
    problem.cu_seqlens_kv = reference::random_offsets(batch, seqlen_kv, 2, 4);
    queries = problem.cu_seqlens_q.back(), keys = problem.cu_seqlens_kv.back();
  }
  problem.q = normal_doubles(heads_q * queries * problem.spec.head_dim, generator);
  problem.k = normal_doubles(heads_kv * keys * problem.spec.head_dim, generator);
  problem.v = normal_doubles(heads_kv * keys * problem.spec.v_dim(), generator);
  if (problem.spec.dropout) problem.dropout_p = 0.3, problem.seed = 7;
  if (problem.spec.kv.is_padded()) problem.kv_lengths = {static_cast<std::int32_t>(seqlen_kv - 2), 0};
  if (problem.spec.sinks) problem.sinks = reference::random_sinks(heads_q, 2);
  problem.captures = reference::plausible_captures(problem.spec, shape, 1);
  problem.q_tangent = normal_doubles(problem.q.size(), generator);
  problem.k_tangent = normal_doubles(problem.k.size(), generator);
  problem.v_tangent = normal_doubles(problem.v.size(), generator);
  problem.sinks_tangent = normal_doubles(problem.sinks.size(), generator);
  const auto declared = expr::declarations(problem.spec.score, problem.spec.mask);
  for (const reference::Captured& captured : problem.captures) {
    const auto found = std::ranges::find(declared, captured.name, &expr::Declaration::name);
    problem.capture_tangents.push_back(
        normal_doubles(found->wants_grad ? captured.values.size() : 0, generator));
  }
  problem.dout = normal_doubles(heads_q * queries * problem.spec.v_dim(), generator);
  problem.dout_tangent = normal_doubles(problem.dout.size(), generator);
  problem.dlse = normal_doubles(heads_q * queries, generator);
  problem.dlse_tangent = normal_doubles(problem.dlse.size(), generator);
  return problem;
}

/// The problem a step along its tangents.
inline reference::Problem moved_along_tangents(reference::Problem problem, double step) {
  const auto move = [&](std::vector<double>& values, const std::vector<double>& tangent) {
    for (std::size_t i = 0; i < tangent.size(); ++i) values[i] += step * tangent[i];
  };
  move(problem.q, problem.q_tangent);
  move(problem.k, problem.k_tangent);
  move(problem.v, problem.v_tangent);
  move(problem.sinks, problem.sinks_tangent);
  for (std::size_t i = 0; i < problem.captures.size(); ++i)
    move(problem.captures[i].values, problem.capture_tangents[i]);
  move(problem.dout, problem.dout_tangent);
  move(problem.dlse, problem.dlse_tangent);
  return problem;
}

}  // namespace flashjit::test

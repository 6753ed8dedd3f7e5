// O's tangent on the GPU against the reference in fp64: poisoned results, rows beside which nothing is
// written.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "expr/declarations.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {

struct JvpCase {
  const char* spec;
  AttentionShape shape;
  const char* config = "";  ///< empty: what the families choose that can
  const char* zero = "";    ///< letters of Q, K and V whose tangent is null
  std::int64_t unused_rows = 0;
  bool expands = false;  ///< tangents are of one head of one batch entry, repeated by strides of 0
};
inline void PrintTo(const JvpCase& test, std::ostream* out) {
  *out << test.spec << " " << to_string(test.shape) << " " << test.config;
}

/// The problem with tangents of the size of their tensors.
inline reference::Problem with_tangents(reference::Problem problem, const JvpCase& test, unsigned seed) {
  std::mt19937 generator(77 + seed);
  const DType dtype = problem.spec.dtype;
  const auto tangent = [&](char name, const std::vector<double>& tensor) {
    std::vector<double> values = normal_values(std::ssize(tensor), dtype, 1, generator);
    const std::int64_t heads = name == 'q' ? test.shape.heads_q : test.shape.heads_kv;
    const std::size_t of_head = values.size() / static_cast<std::size_t>(test.shape.batch * heads);
    for (std::size_t i = of_head; test.expands && i < values.size(); ++i) values[i] = values[i % of_head];
    return std::string(test.zero).find(name) == std::string::npos ? values : std::vector<double>();
  };
  problem.q_tangent = tangent('q', problem.q);
  problem.k_tangent = tangent('k', problem.k);
  problem.v_tangent = tangent('v', problem.v);
  problem.sinks_tangent = normal_values(std::ssize(problem.sinks), DType::fp32, 1, generator);
  for (const reference::Captured& captured : problem.captures) {
    const auto declared = expr::declarations(problem.spec.score, problem.spec.mask);
    const auto found = std::ranges::find(declared, captured.name, &expr::Declaration::name);
    problem.capture_tangents.push_back(
        found->wants_grad ? normal_values(std::ssize(captured.values), DType::fp32, 1, generator)
                          : std::vector<double>());
  }
  return problem;
}

/// What a call with tangents has on the device beside its matrices.
class TangentMemory {
 public:
  explicit TangentMemory(const reference::Problem& problem)
      : problem_(problem),
        lengths_(to_device(problem.kv_lengths)),
        offsets_q_(to_device(problem.cu_seqlens_q)),
        offsets_kv_(to_device(problem.cu_seqlens_kv)),
        map_(to_device(problem.block_map)),
        sinks_(to_device(DType::fp32, problem.sinks)),
        sinks_tangent_(to_device(DType::fp32, problem.sinks_tangent)) {}

  /// Sets what the arguments of both passes have. `tangents`: of Q, K and V; empty ones are null.
  template <class Args>
  void give(Args& args, const AttentionCase& test, const std::vector<Tensor>& tangents) const {
    if (!problem_.q_tangent.empty()) args.q_tangent = tangents[0].view;
    if (!problem_.k_tangent.empty()) args.k_tangent = tangents[1].view;
    if (!problem_.v_tangent.empty()) args.v_tangent = tangents[2].view;
    args.kv_lengths = static_cast<const std::int32_t*>(lengths_.data());
    args.dropout_p = problem_.dropout_p, args.seed = problem_.seed, args.offset = problem_.offset;
    args.sinks = static_cast<const float*>(sinks_.data());
    args.sinks_tangent = static_cast<const float*>(sinks_tangent_.data());
    args.zero_unused_rows = test.unused_rows > 0;
    if (test.spec.has_block_map()) {
      const BlockSize block = test.spec.block_map;
      args.block_map = {
          static_cast<const std::uint8_t*>(map_.data()),
          {problem_.map_batch, problem_.map_heads, (test.shape.seqlen_q + block.q - 1) / block.q,
           (test.shape.seqlen_kv + block.kv - 1) / block.kv}};
    }
    if (test.spec.varlen) {
      args.cu_seqlens_q = static_cast<const std::int32_t*>(offsets_q_.data());
      args.cu_seqlens_kv = static_cast<const std::int32_t*>(offsets_kv_.data());
      args.batch_size = test.shape.batch;
      args.max_seqlen_q = test.shape.seqlen_q, args.max_seqlen_kv = test.shape.seqlen_kv;
    }
  }

 private:
  const reference::Problem& problem_;
  device::DeviceBuffer lengths_, offsets_q_, offsets_kv_, map_, sinks_, sinks_tangent_;
};

class JvpRun {
 public:
  JvpRun(const AttentionCase& test, const JvpCase& tangents)
      : test_(with_one_meaning(test)),
        problem_(with_tangents(make_problem(test), tangents, test.seed)),
        exact_(reference::jvp(problem_)),
        rounded_(reference::jvp(problem_, reference::Precision::rounded)) {
    const auto [b, hq, hkv, sq, skv] = test_.shape;
    const std::int64_t d = test_.spec.head_dim, dv = test_.spec.v_dim(), batch = test_.spec.varlen ? 1 : b;
    const std::int64_t rows = test_.spec.varlen ? std::ssize(problem_.q) / (hq * d) : sq;
    const std::int64_t keys = test_.spec.varlen ? std::ssize(problem_.k) / (hkv * d) : skv;
    const std::array<Size, 3> sizes{{{batch, hq, rows, d}, {batch, hkv, keys, d}, {batch, hkv, keys, dv}}};
    inputs_ = make_qkv(test.layout, test_.spec.dtype, sizes);
    tangents_ = make_qkv(test.layout == Layout::bhsd ? Layout::bshd : Layout::bhsd, test_.spec.dtype, sizes);
    for (int i = 0; i < 2; ++i)
      outs_.push_back(make_tensor(test.layout, test_.spec.out_type(), {batch, hq, rows, dv}));
    const std::vector<double>* const given[] = {&problem_.q, &problem_.k, &problem_.v};
    const std::vector<double>* const dual[] = {&problem_.q_tangent, &problem_.k_tangent, &problem_.v_tangent};
    for (int i = 0; i < 3; ++i) {
      inputs_[i].put(*given[i]);
      if (!dual[i]->empty()) tangents_[i].put(*dual[i]);
      if (tangents.expands) tangents_[i].view.stride[0] = tangents_[i].view.stride[1] = 0;
    }
  }

  /// Launches into poisoned results and compares O, LSE and their tangents.
  void check(Runtime& runtime, const TileConfig& config) {
    SCOPED_TRACE("jvp with " + to_string(config));
    launch(runtime, config);
    expect_near("out", outs_[0].get(), exact_.out, rounded_.out);
    expect_near("out_tangent", outs_[1].get(), exact_.out_tangent, rounded_.out_tangent);
    EXPECT_TRUE(gaps_untouched(outs_)) << "memory beside O and its tangent was written";
    expect_rows("lse", lse_, exact_.lse);
    expect_rows("lse_tangent", lse_tangent_, exact_.lse_tangent);
  }

 private:
  void launch(Runtime& runtime, const TileConfig& config) {
    const KernelSpec spec{test_.spec, Pass::jvp};
    runtime.prepare(spec, test_.shape, config);
    const GuardedMemory work(runtime.workspace_bytes(spec, test_.shape));
    for (const Tensor& out : outs_) out.memory->poison();
    const TangentMemory memory(problem_);
    const DeviceCaptures captures(gpu().driver(), with_pass(test_.spec, Pass::jvp), problem_.captures);
    std::vector<Capture> views(captures.view().begin(), captures.view().end());
    std::vector<device::DeviceBuffer> of_captures;
    for (std::size_t i = 0; i < views.size(); ++i) {
      of_captures.push_back(to_device(DType::fp32, problem_.capture_tangents[i]));
      views[i].grad =
          problem_.capture_tangents[i].empty() ? nullptr : static_cast<float*>(of_captures[i].data());
    }
    JvpArgs args;
    args.q = inputs_[0].view, args.k = inputs_[1].view, args.v = inputs_[2].view;
    memory.give(args, test_, tangents_);
    args.out = outs_[0].view, args.out_tangent = outs_[1].view;
    args.lse = static_cast<float*>(lse_.data()), args.lse_tangent = static_cast<float*>(lse_tangent_.data());
    lse_.poison(), lse_tangent_.poison();
    args.captures = views;
    args.workspace = {work.data(), work.bytes()};
    runtime.jvp(spec, args, nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(work.guards_intact());
  }

  static void expect_near(const char* name, const std::vector<double>& got, const std::vector<double>& exact,
                          const std::vector<double>& rounded) {
    const auto [error, limit] = reference::judge(got, exact, rounded, 2);
    EXPECT_LE(error, limit) << name;
  }
  void expect_rows(const char* name, const GuardedMemory& memory, const std::vector<double>& exact) const {
    const auto rows = [&](const std::vector<double>& values) {
      return reference::existing_rows(problem_, values);
    };
    EXPECT_LE(reference::max_abs_error(rows(decode(DType::fp32, memory.content())), rows(exact)),
              1e-3 * (1 + largest_finite(rows(exact))))
        << name;
    EXPECT_TRUE(memory.guards_intact()) << "memory beside " << name << " was written";
  }

  AttentionCase test_;
  reference::Problem problem_;
  reference::Jvp exact_, rounded_;
  std::vector<Tensor> inputs_, tangents_, outs_;
  GuardedMemory lse_{exact_.lse.size() * sizeof(float)}, lse_tangent_{exact_.lse.size() * sizeof(float)};
};

/// In every family that can, or in the configuration: Run(case, test).check(). A run has one in `of` of the
/// families' (is_drawn()).
template <class Run>
void expect_in_families(Runtime& runtime, const JvpCase& test, Pass pass, unsigned seed, std::uint64_t of) {
  SCOPED_TRACE(testing::PrintToString(test));
  bool computed = false;
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75}) {
    const KernelSpec spec{spec_for(family, test.spec), pass};
    if (*test.config ? parse_config(test.config).family != family
                     : !plan::traits(family).supports(spec, gpu().info).ok)
      continue;
    computed = true;
    if (!is_drawn(fmt::format("{} {} {}", to_string(spec), test.config, to_string(family)), of)) continue;
    AttentionCase given{.spec = spec,
                        .shape = test.shape,
                        .family = family,
                        .layout = seed % 2 == 0 ? Layout::bshd : Layout::padded,
                        .map_heads = test.shape.heads_q,
                        .seed = seed,
                        .dlse = pass == Pass::backward_jvp,
                        .unused_rows = test.unused_rows};
    if (spec.dropout) given.dropout_p = 0.2;
    const TileConfig config = *test.config ? parse_config(test.config)
                                           : plan::traits(family).heuristic(spec, test.shape, gpu().info);
    Run(given, test).check(runtime, config);
  }
  EXPECT_TRUE(computed) << "no family can";
}

inline void expect_tangents(Runtime& runtime, const JvpCase& test, unsigned seed = 0) {
  expect_in_families<JvpRun>(runtime, test, Pass::jvp, seed, 4);
}

}  // namespace flashjit::test

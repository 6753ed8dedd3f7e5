// Tangents of gradients on the GPU against the reference in fp64: poisoned results, rows beside which nothing
// is written.
#pragma once

#include <string>
#include <vector>

#include "tests/support/jvp_run.hpp"

namespace flashjit::test {

/// Also with tangents of dO and dLSE; 'o' among `zero`: without that of dO.
inline reference::Problem with_all_tangents(reference::Problem given, const JvpCase& test, unsigned seed) {
  reference::Problem problem = with_tangents(std::move(given), test, seed);
  std::mt19937 generator(99 + seed);
  if (std::string(test.zero).find('o') == std::string::npos)
    problem.dout_tangent = normal_values(std::ssize(problem.dout), problem.spec.dtype, 1, generator);
  problem.dlse_tangent = normal_values(std::ssize(problem.dlse), DType::fp32, 1, generator);
  return problem;
}

class BackwardJvpRun {
 public:
  BackwardJvpRun(const AttentionCase& test, const JvpCase& tangents)
      : test_(with_one_meaning(test)),
        problem_(with_all_tangents(make_problem(test), tangents, test.seed)),
        lse_(reference::forward(problem_).lse),
        exact_(reference::backward_jvp(problem_)),
        rounded_(reference::backward_jvp(problem_, reference::Precision::rounded)) {
    const auto [b, hq, hkv, sq, skv] = test_.shape;
    const std::int64_t d = test_.spec.head_dim, dv = test_.spec.v_dim(), batch = test_.spec.varlen ? 1 : b;
    const std::int64_t rows = test_.spec.varlen ? std::ssize(problem_.q) / (hq * d) : sq;
    const std::int64_t keys = test_.spec.varlen ? std::ssize(problem_.k) / (hkv * d) : skv;
    const std::array<Size, 4> sizes{
        {{batch, hq, rows, d}, {batch, hkv, keys, d}, {batch, hkv, keys, dv}, {batch, hq, rows, dv}}};
    const std::vector<double>* const given[] = {&problem_.q, &problem_.k, &problem_.v, &problem_.dout};
    const std::vector<double>* const dual[] = {&problem_.q_tangent, &problem_.k_tangent, &problem_.v_tangent,
                                               &problem_.dout_tangent};
    const Layout other = test.layout == Layout::bhsd ? Layout::bshd : Layout::bhsd;
    for (int i = 0; i < 4; ++i) {
      inputs_.push_back(make_tensor(test.layout, test_.spec.dtype, sizes[i]));
      tangents_.push_back(make_tensor(other, test_.spec.dtype, sizes[i]));
      inputs_[i].put(*given[i]);
      if (!dual[i]->empty()) tangents_[i].put(*dual[i]);
      if (i < 3) grads_.push_back(make_tensor(test.layout, test_.spec.grad_type(), sizes[i]));
    }
  }

  /// Launches into poisoned results and compares the tangents of all gradients.
  void check(Runtime& runtime, const TileConfig& config) {
    SCOPED_TRACE("backward_jvp with " + to_string(config));
    launch(runtime, config);
    const std::vector<double>* const exact[] = {&exact_.dq, &exact_.dk, &exact_.dv};
    const std::vector<double>* const rounded[] = {&rounded_.dq, &rounded_.dk, &rounded_.dv};
    const char* const names[] = {"dq", "dk", "dv"};
    for (int i = 0; i < 3; ++i) expect_near(names[i], grads_[i].get(), *exact[i], *rounded[i]);
    EXPECT_TRUE(gaps_untouched(grads_)) << "memory beside the results was written";
  }

 private:
  void launch(Runtime& runtime, const TileConfig& config) {
    const KernelSpec spec{test_.spec, Pass::backward_jvp};
    runtime.prepare(spec, test_.shape, config);
    const GuardedMemory work(runtime.workspace_bytes(spec, test_.shape));
    for (const Tensor& grad : grads_) grad.memory->poison();
    const TangentMemory memory(problem_);
    const auto lse = to_device(DType::fp32, lse_), dlse = to_device(DType::fp32, problem_.dlse),
               dlse_tangent = to_device(DType::fp32, problem_.dlse_tangent),
               dsinks = to_device(DType::fp32, std::vector<double>(problem_.sinks.size()));
    DeviceCaptures captures(gpu().driver(), with_pass(test_.spec, Pass::backward), problem_.captures);
    std::vector<device::DeviceBuffer> of_captures;
    std::vector<const float*> capture_tangents;
    for (const std::vector<double>& tangent : problem_.capture_tangents) {
      of_captures.push_back(to_device(DType::fp32, tangent));
      capture_tangents.push_back(static_cast<const float*>(of_captures.back().data()));
    }
    const auto floats = [](const device::DeviceBuffer& buffer) {
      return static_cast<float*>(const_cast<void*>(static_cast<const void*>(buffer.data())));
    };
    BackwardJvpArgs args;
    args.q = inputs_[0].view, args.k = inputs_[1].view, args.v = inputs_[2].view, args.dout = inputs_[3].view;
    memory.give(args, test_, tangents_);
    if (!problem_.dout_tangent.empty()) args.dout_tangent = tangents_[3].view;
    args.dq = grads_[0].view, args.dk = grads_[1].view, args.dv = grads_[2].view;
    args.lse = floats(lse), args.dlse = floats(dlse), args.dlse_tangent = floats(dlse_tangent);
    args.captures = captures.view();
    args.capture_tangents = capture_tangents;
    args.dsinks = floats(dsinks);
    args.workspace = {work.data(), work.bytes()};
    runtime.backward_jvp(spec, args, nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(work.guards_intact());
    const reference::CaptureGrads found = captures.grads();
    for (std::size_t i = 0; i < found.size(); ++i)
      expect_sums(problem_.captures[i].name.c_str(), found[i], exact_.captures[i], rounded_.captures[i]);
    if (problem_.sinks.empty()) return;
    const std::vector<float> sums = device::download<float>(dsinks);
    expect_sums("dsinks", {sums.begin(), sums.end()}, exact_.dsinks, rounded_.dsinks);
  }

  static void expect_near(const char* name, const std::vector<double>& got, const std::vector<double>& exact,
                          const std::vector<double>& rounded) {
    const auto [error, limit] = reference::judge(got, exact, rounded, 2);
    EXPECT_LE(error, limit) << name << ", up to " << largest_finite(exact);
  }
  /// Few sums of many: the rounded computation's errors may cancel by luck.
  static void expect_sums(const char* name, const std::vector<double>& got, const std::vector<double>& exact,
                          const std::vector<double>& rounded) {
    const auto [error, limit] = reference::judge(got, exact, rounded, 2);
    EXPECT_LE(error, std::max(limit, 2e-3 * (1 + largest_finite(exact)))) << name;
  }

  AttentionCase test_;
  reference::Problem problem_;
  std::vector<double> lse_;
  reference::Backward exact_, rounded_;
  std::vector<Tensor> inputs_, tangents_, grads_;
};

inline void expect_gradient_tangents(Runtime& runtime, const JvpCase& test, unsigned seed = 0) {
  expect_in_families<BackwardJvpRun>(runtime, test, Pass::backward_jvp, seed, 2);
}

}  // namespace flashjit::test

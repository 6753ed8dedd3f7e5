// Random programs' hooks in a kernel, pair by pair and tile by tile, against the CPU.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "compile/compiler.hpp"
#include "device/loaded_kernel.hpp"
#include "reference/inputs.hpp"
#include "tests/support/gpu_support.hpp"
#include "tests/support/program_check.hpp"
#include "tests/support/program_source.hpp"
#include "tests/support/strided_captures.hpp"

namespace flashjit::test {
namespace {

/// The captures in device memory, strided, as Params has them.
class DeviceGiven {
 public:
  explicit DeviceGiven(const std::vector<Given>& given) {
    for (const Given& g : given) {
      layouts_.emplace_back(g.size, g.values);
      values_.push_back(to_device(reference::encode(g.declaration.type, layouts_.back().memory)));
      grads_.push_back(to_device(std::vector<float>(g.declaration.wants_grad ? g.values.size() : 1)));
    }
  }
  void set(const std::vector<Given>& given, Params& params) const {
    int tensors = 0, scalars = 0;
    for (std::size_t i = 0; i < given.size(); ++i) {
      const Given& g = given[i];
      if (g.declaration.is_scalar()) {
        std::memcpy(&params.scalars[scalars++], reference::encode(g.declaration.type, g.values).data(), 4);
        continue;
      }
      CaptureParam& param = params.captures[tensors++];
      param = {values_[i].data(), static_cast<float*>(grads_[i].data()), {0, 0, 0, 0}, {1, 1, 1, 1}};
      for (int d = 0; d < g.declaration.rank; ++d)
        param.size[d] = static_cast<int>(g.size[d]), param.stride[d] = layouts_[i].stride[d];
    }
  }
  std::vector<float> grad(std::size_t i) const { return device::download<float>(grads_[i]); }

 private:
  std::vector<Strided> layouts_;
  std::vector<device::DeviceBuffer> values_, grads_;
};

ProgramResults run(const device::LoadedKernel& kernels, std::size_t entry, const ProgramCase& test) {
  ProgramResults results(test);
  const DeviceGiven given(test.given);
  const device::DeviceBuffer dot = to_device(test.dot), score = to_device(results.score),
                             grad = to_device(results.score_grad), attends = to_device(results.attends),
                             tiles = to_device(results.tile_class), kv_bounds = to_device(results.kv_bounds),
                             q_bounds = to_device(results.q_bounds);
  ProgramParams params{};
  given.set(test.given, params.base);
  params.base.seqlen_q = test.seqlen_q, params.base.seqlen_kv = test.seqlen_kv;
  params.base.heads_q = test.heads_q, params.base.heads_kv = test.heads_kv;
  params.base.softmax_scale = test.softmax_scale;
  params.b = test.b, params.h = test.h, params.tile_q = test.tile_q, params.tile_kv = test.tile_kv;
  params.dot = static_cast<const float*>(dot.data());
  params.score = static_cast<float*>(score.data()), params.score_grad = static_cast<float*>(grad.data());
  params.attends = static_cast<int*>(attends.data()), params.tile_class = static_cast<int*>(tiles.data());
  params.kv_bounds = static_cast<int*>(kv_bounds.data());
  params.q_bounds = static_cast<int*>(q_bounds.data());
  std::array<void*, 1> parameters{&params};
  device::launch(*gpu().driver(), kernels.kernel(entry), 1, test::kProgramThreads, 0, nullptr, parameters);
  gpu().context->synchronize();
  results.score = device::download<float>(score), results.score_grad = device::download<float>(grad);
  results.attends = device::download<int>(attends), results.tile_class = device::download<int>(tiles);
  results.kv_bounds = device::download<int>(kv_bounds), results.q_bounds = device::download<int>(q_bounds);
  for (std::size_t i = 0; i < results.grads.size(); ++i)
    if (!results.grads[i].empty()) results.grads[i] = given.grad(i);
  return results;
}

/// 40 programs a source: the seed of the first.
class ProgramHooks : public GpuTestWith<unsigned> {
 protected:
  static void check(const char* element, double tolerance) {
    std::vector<ProgramCase> cases;
    std::vector<expr::Trees> programs;
    for (unsigned i = 0; i < 40; ++i) {
      cases.push_back(test::random_case(GetParam() + i));
      programs.push_back(cases.back().trees);
    }
    const KernelSource source = test::program_source(programs, gpu().info.arch, element);
    const device::LoadedKernel kernels(
        gpu().driver(), compile::Compiler::open(read_environment().nvrtc)->compile(source).cubin,
        source.entries);
    kernels.make_ready(gpu().context->device());
    ProgramErrors errors;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(fmt::format("seed {}\n  score {}\n  mask {}", GetParam() + i,
                               expr::body_text(*programs[i].score), expr::body_text(*programs[i].mask)));
      const ProgramResults results = run(kernels, i, cases[i]);
      check_masks(cases[i], results);
      ProgramErrors own;
      check_scores(cases[i], results, tolerance, own);
      EXPECT_LE(own.wrong, own.compared / 10);
      errors.compared += own.compared, errors.wrong += own.wrong;
    }
    EXPECT_GT(errors.compared, 2000);
    EXPECT_LE(errors.wrong, errors.compared / 100);
  }
};

TEST_P(ProgramHooks, OfHalvesAreClose) { check("flashjit::bf16", 2e-2); }
TEST_P(ProgramHooks, OfFloatsAreCloser) { check("float", 1e-4); }

INSTANTIATE_TEST_SUITE_P(Random, ProgramHooks, testing::Values(0u, 1000u, 2000u));

}  // namespace
}  // namespace flashjit::test

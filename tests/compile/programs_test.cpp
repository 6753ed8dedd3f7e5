// The hooks of programs compile, alone and in one source. Needs NVRTC and no GPU.
#include <gtest/gtest.h>

#include <algorithm>

#include "compile/compiler.hpp"
#include "expr/ops.hpp"
#include "tests/support/nvrtc.hpp"
#include "tests/support/program_source.hpp"
#include "tests/support/random_program.hpp"
#include "tests/support/tame_program.hpp"

namespace flashjit {
namespace {

using test::RandomProgram;
using test::TameProgram;

/// With the declarations of both.
expr::Trees trees(const expr::NodePtr& score, const expr::NodePtr& mask) {
  expr::Trees made{score, mask};
  for (const expr::NodePtr& program : {score, mask}) {
    for (const expr::Declaration& d : expr::declarations_of(*program)) {
      const auto same_name = [&](const expr::Declaration& known) { return known.name == d.name; };
      if (std::ranges::none_of(made.declarations, same_name)) made.declarations.push_back(d);
    }
  }
  return made;
}

expr::Trees parsed(const char* score, const char* mask) {
  return trees(expr::parse(score).pointer(), expr::parse(mask).pointer());
}

void expect_compiled(const std::vector<expr::Trees>& programs, const expr::EmitOptions& options = {}) {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const bool half = std::string_view(arch) == "sm_80";
    const KernelSource source =
        test::program_source(programs, arch, half ? "flashjit::bf16" : "float", options);
    try {
      const CompiledKernel kernel = test::compiler().compile(source);
      EXPECT_EQ(kernel.resources.size(), programs.size());
      EXPECT_EQ(kernel.log.find("warning"), std::string::npos) << kernel.log.substr(0, 3000);
    } catch (const Error& error) {
      FAIL() << error.message() << "\n" << error.detail().substr(0, 3000);
    }
  }
}

TEST(ProgramHooks, NamedOnesCompile) {
  expect_compiled({
      {},
      parsed("score + 0.0 * score", "true"),
      parsed("slopes: fp32 1d; score + slopes[h] * to_float(kv - q)", "kv <= q + seqlen_kv - seqlen_q"),
      parsed("slopes: fp32 1d grad; score - slopes[h] * to_float(abs(q - kv))",
             "w: int; q - kv < w && kv <= q"),
      parsed("cap: float; cap * tanh(score / cap)", "doc: int64 2d; doc[b, q] == doc[b, kv]"),
      parsed("bias: bf16 4d grad; score + bias[b, h, q, kv]", "p: int32 1d; kv <= q || kv < p[b]"),
      parsed("t: fp16 1d grad; score + t[kv - q + 64]", "keep: bool 3d; keep[h_kv, q, kv]"),
      parsed("1.5 * sigmoid(score) + sin(score) * cos(score)", "(q ^ kv) % 8 == 0"),
      parsed("exp(score) + log2(exp2(score)) + sqrt(abs(score)) + rsqrt(log(score))", "q / 64 == kv / 64"),
      parsed("erf(score) + expm1(score) + log1p(abs(score)) + pow(abs(score), 1.5) + score % 0.75",
             "t: int32 2d; t[b, size(t, 1) - 1 - q] == t[b, kv % size(t, 1)]"),
      parsed("t: fp32 1d grad; trunc(score) + round(score * 2.0) + t[(q - kv) % size(t, 0)]", "true"),
      parsed("-score", "w: fp32 1d; w[q] > 0.5 && to_float(kv) < 3.5 * to_float(q)"),
  });
}

TEST(ProgramHooks, CheckedOnesCompile) {
  expect_compiled({parsed("slopes: fp32 1d grad; bias: bf16 3d; score * slopes[h] + bias[b, q, kv - q]",
                          "doc: int32 2d; any: bool 2d; doc[b, q] == doc[b, kv] && any[q, kv]")},
                  {.check_indices = true});
}

TEST(ProgramHooks, RandomOnesCompile) {
  std::vector<expr::Trees> programs;
  for (unsigned seed = 0; seed < 20; ++seed) {
    const std::vector<test::Given> given = test::tame_captures(seed);
    TameProgram random(seed, given);
    programs.push_back(trees(random.score().pointer(), random.mask().pointer()));
  }
  for (unsigned seed = 0; seed < 20; ++seed) {
    RandomProgram random(seed);
    const expr::Expr score = random.score_program();
    programs.push_back(trees(score.pointer(), random.mask_program().pointer()));
  }
  expect_compiled(programs);
}

}  // namespace
}  // namespace flashjit

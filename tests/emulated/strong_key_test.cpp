// dQ of rows with one strong key: it is a small difference of dP and D = rowsum(dO * O), to which O in 16
// bits adds its rounding, and O in fp32 does not.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "tests/support/attention_case.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

class StrongKey : public GpuTest {};

/// Most queries attend to key 7, whose score is 8 above the logarithm of the others' sum; then all scores are
/// multiplied.
reference::Problem with_strong_key(const AttentionCase& test, double factor = 1) {
  reference::Problem problem = make_problem(test);
  const std::int64_t dim = test.spec.head_dim, keys = test.shape.seqlen_kv;
  const double size = (std::log(static_cast<double>(keys)) + 8) / 3;
  const auto direction = [&](std::int64_t column) {
    return (column % 3 == 0 ? 1 : -1) / std::sqrt(static_cast<double>(dim));
  };
  const auto set = [&](double& element, double value) {
    element = reference::round_to(test.spec.dtype, value);
  };
  for (std::size_t i = 0; i < problem.q.size(); ++i)
    set(problem.q[i], factor * (problem.q[i] + size * direction(static_cast<std::int64_t>(i) % dim)));
  for (std::int64_t head = 0; head < test.shape.batch * test.shape.heads_kv; ++head)
    for (std::int64_t column = 0; column < dim; ++column)
      set(problem.k[(head * keys + 7) * dim + column],
          3 * std::sqrt(static_cast<double>(dim)) * direction(column));
  return problem;
}

/// The root mean square of a gradient's errors, relative to that of the gradient.
double error_of(const std::vector<double>& got, const std::vector<double>& want) {
  double errors = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    errors += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(errors / size);
}

/// Errors of dQ, dK and dV. `config` is for the backward pass.
std::array<double, 3> errors_of(Runtime& runtime, const std::string& spec, const AttentionShape& shape,
                                Family family, const std::string& config = "") {
  const AttentionCase test{.spec = spec_for(family, spec), .shape = shape, .family = family};
  SCOPED_TRACE(to_string(test.spec) + " " + to_string(family));
  const reference::Problem problem = with_strong_key(test);
  AttentionRun run(test, problem);
  run.check_forward(runtime, heuristic(family, test.spec, shape, Pass::forward));
  run.check_backward(
      runtime, config.empty() ? heuristic(family, test.spec, shape, Pass::backward) : parse_config(config));
  const reference::Backward want = reference::backward(problem);
  return {error_of(run.grad(0), want.dq), error_of(run.grad(1), want.dk), error_of(run.grad(2), want.dv)};
}

TEST_F(StrongKey, HasAccurateGradientsFromOInFp32) {
  TemporaryRuntime runtime;
  struct Case {
    const char* spec;
    AttentionShape shape;
    double limit;  // three times what rounding dS and dQ alone makes
  };
  for (const auto& [spec, shape, limit] :
       {Case{"bf16:d64", {1, 2, 1, 70, 150}, 0.007},
        Case{"bf16:d128:score{score * abs(score) / 10.0}", {1, 2, 2, 130, 90}, 0.007},
        Case{"fp16:d72x40:kvlen", {1, 2, 1, 70, 100}, 0.0009},
        Case{"fp16:d320x256", {1, 1, 1, 40, 70}, 0.0009}})
    for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75}) {
      const KernelSpec of_family = spec_for(family, spec);
      if (!supports(family, of_family)) continue;
      if (!is_drawn(std::string(spec) + to_string(family), 2)) continue;
      const double plain = errors_of(runtime.get(), spec, shape, family)[0];
      const double accurate = errors_of(runtime.get(), std::string(spec) + ":fp32_out", shape, family)[0];
      const double own = limit * (of_family.dtype == parse_spec(spec).dtype ? 1 : 0.13);
      EXPECT_GT(plain, 2 * own) << spec << " " << to_string(family);
      EXPECT_LT(accurate, own) << spec << " " << to_string(family);
    }
}

// P and dS in one element of 16 bits make errors of 0.0015 in bf16, 0.0002 in fp16, and more in dQ. Of fp16
// the second element of a small dS has few bits: it ends at 2^-24.
TEST_F(StrongKey, HasErrorsOfFp32WithTwoTerms) {
  TemporaryRuntime runtime;
  struct Case {
    const char* spec;
    AttentionShape shape;
    const char* config = "";
  };
  for (const auto& [spec, shape, config] :
       {Case{"bf16:d64:causal", {1, 4, 2, 150, 150}},
        Case{"bf16:d128:score{score * abs(score) / 10.0}", {1, 2, 2, 130, 90}},
        Case{"bf16:d128:dropout", {1, 2, 1, 70, 150}, "sm80:br64:bc64:w8:s2:d_split2"},
        Case{"bf16:d64:dropout:sinks", {1, 2, 1, 70, 150}, "sm80:br64:bc64:w4"},
        Case{"fp16:d72x40:kvlen:map64x64", {1, 2, 1, 70, 100}}, Case{"fp16:d192x128:det", {1, 2, 1, 70, 100}},
        Case{"bf16:d320x256", {1, 1, 1, 40, 70}}})
    for (const Family family : {Family::simt, Family::sm80}) {
      const std::string exact = std::string(spec) + ":fp32_out:fp32_grads:two_terms";
      if (!supports(family, spec_for(family, exact))) continue;
      if (family == Family::simt && !is_drawn(spec, 3)) continue;
      const bool has_config = family == Family::sm80;
      const double limit = parse_spec(spec).dtype == DType::bf16 ? 2e-4 : 1e-4;
      for (const double error : errors_of(runtime.get(), exact, shape, family, has_config ? config : ""))
        EXPECT_LT(error, limit) << spec << " " << to_string(family);
    }
}

// The exponent of a row's largest key is not zero then, but what rounding took of the shift: O is that key's
// V only where the row sum has P as P V does.
TEST_F(StrongKey, IsExactForLargeScoresWithTwoTerms) {
  TemporaryRuntime runtime;
  for (const char* spec : {"bf16:d64", "fp16:d128:causal"}) {
    const AttentionShape shape{1, 2, 1, 70, 70};
    const AttentionCase test{.spec = spec_for(Family::sm80, std::string(spec) + ":fp32_out:two_terms"),
                             .shape = shape,
                             .family = Family::sm80};
    const reference::Problem problem = with_strong_key(test, 512);
    AttentionRun run(test, problem);
    run.check_forward(runtime.get(), heuristic(Family::sm80, test.spec, shape, Pass::forward));
    EXPECT_LT(error_of(run.out(), reference::forward(problem).out), 1e-4) << spec;
  }
}

}  // namespace
}  // namespace flashjit::test

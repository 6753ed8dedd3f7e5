// dQ of rows with one strong key: it is a small difference of dP and D = rowsum(dO * O), to which O in 16
// bits adds its rounding, and O in fp32 does not.
#include <cmath>
#include <string>

#include "tests/support/attention_case.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

class StrongKey : public GpuTest {};

/// Most queries attend to key 7, whose score is 8 above the logarithm of the others' sum.
reference::Problem with_strong_key(const AttentionCase& test) {
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
    set(problem.q[i], problem.q[i] + size * direction(static_cast<std::int64_t>(i) % dim));
  for (std::int64_t head = 0; head < test.shape.batch * test.shape.heads_kv; ++head)
    for (std::int64_t column = 0; column < dim; ++column)
      set(problem.k[(head * keys + 7) * dim + column],
          3 * std::sqrt(static_cast<double>(dim)) * direction(column));
  return problem;
}

/// The root mean square of dQ's errors, relative to that of dQ.
double error_of_dq(Runtime& runtime, const std::string& spec, const AttentionShape& shape, Family family) {
  const AttentionCase test{.spec = spec_for(family, spec), .shape = shape, .family = family};
  SCOPED_TRACE(to_string(test.spec) + " " + to_string(family));
  const reference::Problem problem = with_strong_key(test);
  AttentionRun run(test, problem);
  run.check_forward(runtime, heuristic(family, test.spec, shape, Pass::forward));
  run.check_backward(runtime, heuristic(family, test.spec, shape, Pass::backward));
  const std::vector<double> got = run.grad(0), want = reference::backward(problem).dq;
  double errors = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    errors += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(errors / size);
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
      const double plain = error_of_dq(runtime.get(), spec, shape, family);
      const double accurate = error_of_dq(runtime.get(), std::string(spec) + ":fp32_out", shape, family);
      const double own = limit * (of_family.dtype == parse_spec(spec).dtype ? 1 : 0.13);
      EXPECT_GT(plain, 2 * own) << spec << " " << to_string(family);
      EXPECT_LT(accurate, own) << spec << " " << to_string(family);
    }
}

}  // namespace
}  // namespace flashjit::test

// A small problem of the reference for programs of elements, and its gradients beside finite differences.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "reference/reference.hpp"

namespace flashjit::test {

/// Two heads of five queries over one of seven keys, eight columns each.
class ProgramProblem : public testing::Test {
 protected:
  static constexpr std::int64_t kQueries = 5, kKeys = 7, kDim = 8, kHeads = 2;

  /// Numbers between -1 and 1.
  static std::vector<double> filled(std::int64_t count, double step) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < count; ++i) values.push_back(std::sin(step * static_cast<double>(i + 1)));
    return values;
  }
  /// options: those of the spec's text.
  static reference::Problem problem_of(const std::string& options) {
    reference::Problem problem{.spec = parse_spec("fp32:d8:" + options),
                               .shape = {1, kHeads, 1, kQueries, kKeys}};
    problem.q = filled(kHeads * kQueries * kDim, 0.7), problem.k = filled(kKeys * kDim, 1.3);
    problem.v = filled(kKeys * kDim, 2.1), problem.dout = filled(kHeads * kQueries * kDim, 0.4);
    return problem;
  }
  /// The sum of O times dO, whose gradients the backward pass gives.
  static double loss_of(const reference::Problem& problem) {
    const std::vector<double> out = reference::forward(problem).out;
    double loss = 0;
    for (std::size_t i = 0; i < out.size(); ++i) loss += out[i] * problem.dout[i];
    return loss;
  }
  /// Expects the gradient of the loss with regard to `value`, which is one of the problem's.
  static void expect_slope(const reference::Problem& problem, double& value, double gradient,
                           const char* name) {
    constexpr double kStep = 1e-5;
    const double at = value;
    value = at + kStep;
    const double above = loss_of(problem);
    value = at - kStep;
    const double below = loss_of(problem);
    value = at;
    EXPECT_NEAR(gradient, (above - below) / (2 * kStep), 1e-8) << name;
  }
};

}  // namespace flashjit::test

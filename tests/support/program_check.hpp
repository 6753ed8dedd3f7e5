// What the hooks of programs give, in the kernel of program_kernel.cuh, against the CPU's evaluation.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "expr/analyze.hpp"
#include "expr/derive.hpp"
#include "expr/emit.hpp"
#include "expr/ops.hpp"
#include "tests/support/host_tiles.hpp"
#include "tests/support/program_params.cuh"
#include "tests/support/tame_program.hpp"

namespace flashjit::test {

/// A program with the values of all that it may read, at one head of one shape.
struct ProgramCase {
  expr::Trees trees;
  std::vector<Given> given;
  int seqlen_q = 11, seqlen_kv = 14, b = 1, h = 3, heads_q = 4, heads_kv = 2;
  int tile_q = 4, tile_kv = 5;
  float softmax_scale = 0.5f;
  std::vector<float> dot = {};

  int pairs() const { return seqlen_q * seqlen_kv; }
  int rows() const { return (seqlen_q + tile_q - 1) / tile_q; }
  int columns() const { return (seqlen_kv + tile_kv - 1) / tile_kv; }
  expr::Point head() const {
    return {.b = b, .h = h, .h_kv = h / (heads_q / heads_kv), .seqlen_q = seqlen_q, .seqlen_kv = seqlen_kv};
  }
};

inline ProgramCase random_case(unsigned seed) {
  ProgramCase made;
  made.given = tame_captures(seed);
  TameProgram random(seed, made.given);
  made.trees.score = random.score().pointer();
  made.trees.mask = random.mask().pointer();
  for (const Given& given : made.given) made.trees.declarations.push_back(given.declaration);
  for (int i = 0; i < made.pairs(); ++i)
    made.dot.push_back(static_cast<float>((i * 37 + 11) % 101 - 50) / 16);
  return made;
}

/// As ProgramParams; gradients of captures by the places of `given`.
struct ProgramResults {
  std::vector<float> score, score_grad;
  std::vector<int> attends, tile_class, kv_bounds, q_bounds;
  std::vector<std::vector<float>> grads;

  explicit ProgramResults(const ProgramCase& test)
      : score(test.pairs()),
        score_grad(test.pairs()),
        attends(test.pairs()),
        tile_class(test.rows() * test.columns()),
        kv_bounds(2 * test.rows()),
        q_bounds(2 * test.columns()) {
    for (const Given& given : test.given)
      grads.emplace_back(given.declaration.wants_grad ? given.values.size() : 0);
  }
};

/// How many values were compared, and how many were wrong: conditions on floats and steep functions turn a
/// rounding error into any error, if seldom.
struct ProgramErrors {
  int compared = 0, wrong = 0;

  void compare(double got, double expected, double tolerance) {
    if (!std::isfinite(expected) || std::fabs(expected) > 1e4) return;
    ++compared;
    wrong += !(std::fabs(got - expected) <= tolerance * (1 + std::fabs(expected)));
  }
};

inline void check_masks(const ProgramCase& test, const ProgramResults& got) {
  const HostTiles written(test.trees.mask, bounds_of(test.given));
  const HostTiles mask(expr::prepared_mask(test.trees.mask), bounds_of(test.given));
  expr::Point point = test.head();
  for (int i = 0; i < test.pairs(); ++i) {
    point.q = i / test.seqlen_kv, point.kv = i % test.seqlen_kv;
    ASSERT_EQ(got.attends[i], written.attends(point)) << "at " << point.q << ", " << point.kv;
  }
  const auto range = [](int tile, int size, int length) {
    return Range{tile * size, std::min(tile * size + size, length)};
  };
  for (int i = 0; i < test.rows() * test.columns(); ++i) {
    const Range q = range(i / test.columns(), test.tile_q, test.seqlen_q),
                kv = range(i % test.columns(), test.tile_kv, test.seqlen_kv);
    ASSERT_EQ(got.tile_class[i], static_cast<int>(mask.classify(test.head(), q, kv))) << "tile " << i;
  }
  const auto expect_range = [](Range expected, const int* bounds) {
    EXPECT_EQ(bounds[0], expected.begin);
    EXPECT_EQ(bounds[1], expected.end);
  };
  for (int i = 0; i < test.rows(); ++i)
    expect_range(mask.kv_bounds(test.head(), range(i, test.tile_q, test.seqlen_q)), &got.kv_bounds[2 * i]);
  for (int i = 0; i < test.columns(); ++i)
    expect_range(mask.q_bounds(test.head(), range(i, test.tile_kv, test.seqlen_kv)), &got.q_bounds[2 * i]);
}

inline void check_scores(const ProgramCase& test, const ProgramResults& got, double tolerance,
                         ProgramErrors& errors) {
  expr::Evaluation evaluation(bounds_of(test.given), expr::Floats::exact);
  const expr::NodePtr root = test.trees.score;
  const int score = evaluation.add(root);
  const int grad = evaluation.add(derivative(root, expr::make_name(expr::Name::score)));
  std::vector<std::pair<int, int>> reads;
  for (const expr::NodePtr& read : reads_with_grad(root))
    reads.emplace_back(evaluation.add(read), evaluation.add(derivative(root, read)));
  std::vector<std::vector<double>> sums, sizes;
  for (const auto& values : got.grads) sums.emplace_back(values.size()), sizes.emplace_back(values.size());

  expr::Point point = test.head();
  for (int i = 0; i < test.pairs(); ++i) {
    point.q = i / test.seqlen_kv, point.kv = i % test.seqlen_kv;
    point.score = test.dot[i] * test.softmax_scale;
    const std::vector<expr::Value> values = evaluation.run(point);
    errors.compare(got.score[i], values[score].real, tolerance);
    errors.compare(got.score_grad[i], values[grad].real, tolerance);
    for (const auto& [read, slope] : reads) {
      const expr::Evaluation::Element element = evaluation.element(read, values);
      sums[element.capture][element.index] += values[slope].real;
      sizes[element.capture][element.index] += std::fabs(values[slope].real);
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    for (std::size_t j = 0; j < sums[i].size(); ++j) {
      // Relative to all that was added.
      const double size = 1 + sizes[i][j];
      errors.compare(got.grads[i][j] / size, sums[i][j] / size, sizes[i][j] > 0 ? tolerance : 0);
    }
  }
}

}  // namespace flashjit::test

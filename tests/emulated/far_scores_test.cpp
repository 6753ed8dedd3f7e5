// Rows whose scores all are next to the least float, as additive masks of left padding have them: O is the
// mean of V, as PyTorch's is.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/attention_case.hpp"

namespace flashjit::test {
namespace {

constexpr double kLeast = -0x1.fep127;  // of bf16
constexpr std::int64_t kPadded = 70;    // queries

struct Masked {
  const char *name, *score;
  std::vector<std::int64_t> size;  ///< of the tensor `pad`; without: the program reads none
};

const std::vector<Masked>& masked() {
  static const std::vector<Masked> all = {
      {"bias", "pad: bf16 2d; score + pad[q, kv]", {140, 200}},
      {"pairs", "pad: fp32 2d; score + 0.5 * pad[q, kv] + 0.5 * pad[q, kv]", {140, 200}},
      {"line", "pad: fp32 1d; score + pad[q]", {140}},
      {"product", "pad: fp32 1d; score + pad[q] * 3.3895313e38", {140}},
      {"select", "q < 70 ? -3.3895313e38 : score", {}},
      {"number", "least: float; select(q < 70, least, score)", {}},
  };
  return all;
}

/// Rows before kPadded see nothing but the least float; others see it at every third key, and at some
/// -infinity.
reference::Captured pad_of(const Masked& given) {
  const bool product = std::string(given.name) == "product";
  std::int64_t count = 1;
  for (const std::int64_t size : given.size) count *= size;
  reference::Captured pad{"pad", given.size, std::vector<double>(count)};
  const std::int64_t keys = count / given.size[0];
  for (std::int64_t i = 0; i < count; ++i) {
    const bool far = i / keys < kPadded || (keys > 1 && i % 3 == 0);
    pad.values[i] = far                      ? (product ? -1 : kLeast)
                    : keys > 1 && i % 7 == 0 ? -std::numeric_limits<double>::infinity()
                                             : 0;
  }
  return pad;
}

AttentionCase case_of(const Masked& given, Family family, bool split) {
  AttentionCase test{.spec = parse_spec(std::string("bf16:d64:score{") + given.score + "}"),
                     .shape = {1, 2, 1, 140, 200},
                     .family = family,
                     .variant = given.name};
  if (!given.size.empty()) test.captures = [given](const auto&) { return std::vector{pad_of(given)}; };
  if (std::string(given.name) == "number")
    test.captures = [](const auto&) { return std::vector<reference::Captured>{{"least", {}, {kLeast}}}; };
  if (split) test.variant += "_split";
  return test;
}

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> all;
  for (const Masked& given : masked())
    for (const Family family : {Family::simt, Family::sm80, Family::sm90}) {
      all.push_back(case_of(given, family, false));
      if (family != Family::simt && given.name == std::string("bias"))
        all.push_back(case_of(given, family, true));
    }
  return all;
}

class FarScores : public SupportedCase {};

TEST_P(FarScores, GiveTheMeanOfV) {
  const AttentionCase& test = GetParam();
  TemporaryRuntime runtime;
  TileConfig config = heuristic(test.family, test.spec, test.shape, Pass::forward);
  config.split = test.variant.ends_with("_split");
  AttentionRun run(test);
  run.check_forward(runtime.get(), config);
}

INSTANTIATE_TEST_SUITE_P(Attention, FarScores, testing::ValuesIn(cases()),
                         [](const auto& test) { return name_of(test.param); });

class LargeScores : public SupportedCase {};

/// P of a row's only key is 1 for scores of 1e5, too, of which units of log2 lose the third digit.
TEST_P(LargeScores, GiveTheOnlyKeyAllOfP) {
  const AttentionCase& test = GetParam();
  TemporaryRuntime runtime;
  AttentionRun run(test);
  run.check_forward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::forward));
  run.check_backward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::backward));
  EXPECT_EQ(run.grad(2), run.problem().dout);
}

std::vector<AttentionCase> of_one_key() {
  std::vector<AttentionCase> all;
  for (const Family family : {Family::simt, Family::sm80, Family::sm90})
    for (const char* spec : {"bf16:d64", "bf16:d256:causal"})  // whose scale is a power of two
      all.push_back(
          {.spec = parse_spec(spec), .shape = {40, 2, 2, 1, 1}, .family = family, .score_size = 1e5});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Attention, LargeScores, testing::ValuesIn(of_one_key()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace flashjit::test

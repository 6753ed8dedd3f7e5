// Calls whose keys join a running state. A fifth of the rows have none: their LSE is -inf, and their O NaN.
#pragma once

#include <ostream>
#include <string>

#include "tests/support/attention_case.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {

struct RunningStateCase {
  const char* spec;
  AttentionShape shape;
  const char* config = "";  ///< empty: the planner's choices of all families that can
};
inline void PrintTo(const RunningStateCase& test, std::ostream* out) {
  *out << test.spec << " " << to_string(test.shape) << " " << test.config;
}

inline void expect_joins(Runtime& runtime, const RunningStateCase& test, Family family, unsigned seed) {
  AttentionCase given{.spec = spec_for(family, std::string(test.spec) + ":running_state"),
                      .shape = test.shape,
                      .family = family,
                      .layout = seed % 2 == 0 ? Layout::bshd : Layout::padded,
                      .map_heads = test.shape.heads_q,
                      .seed = seed};
  if (given.spec.dropout) given.dropout_p = 0.2;
  vary(given);
  SCOPED_TRACE(to_string(given.spec) + " " + to_string(given.shape) + " " + to_string(family) +
               (given.state_in_place ? " in place" : ""));
  const TileConfig config =
      *test.config ? parse_config(test.config) : heuristic(family, given.spec, given.shape, Pass::forward);
  AttentionRun run(given);
  run.check_forward(runtime, config);
  run.check_forward_without_lse(runtime, config);
}

/// Where O is fp32 in place, too. A run has a quarter of the families' (is_drawn()).
inline void expect_joins(Runtime& runtime, const RunningStateCase& test) {
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75}) {
    const KernelSpec spec = spec_for(family, std::string(test.spec) + ":running_state");
    if (*test.config ? parse_config(test.config).family != family : !supports(family, spec)) continue;
    if (!is_drawn(fmt::format("{} {} {}", to_string(spec), test.config, to_string(family)), 4)) continue;
    if (spec.normalized().out_type() == DType::fp32) expect_joins(runtime, test, family, 2);
    expect_joins(runtime, test, family, 3);
  }
}

/// The backward pass of O and LSE that a forward pass joined.
inline void expect_gradients_of_joined(Runtime& runtime, const AttentionShape& shape) {
  for (const char* spec : {"bf16:d64:causal", "fp16:d128", "bf16:d64:causal:varlen:dropout"}) {
    const AttentionCase test{
        .spec = parse_spec(std::string(spec) + ":running_state"), .shape = shape, .family = Family::sm90};
    AttentionRun run(test);
    run.check_forward(runtime, heuristic(test.family, test.spec, shape, Pass::forward));
    run.check_backward(runtime, heuristic(test.family, test.spec, shape, Pass::backward));
  }
}

}  // namespace flashjit::test

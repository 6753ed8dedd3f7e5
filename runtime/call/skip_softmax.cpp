#include "call/skip_softmax.hpp"

#include <cmath>

#include "call/tensor_checks.hpp"
#include "support/refuse.hpp"

namespace flashjit {

void check_skip_softmax(const AttentionSpec& spec, const ForwardArgs& args) {
  const float threshold = args.skip_softmax_threshold.value_or(0.0f);
  if (!spec.epilogue.skip_softmax && (args.skip_softmax_threshold || args.skip_softmax_counts))
    refuse("{} is given, but the spec has no skip_softmax: set spec.epilogue.skip_softmax.",
           args.skip_softmax_threshold ? "skip_softmax_threshold" : "skip_softmax_counts");
  if (!(threshold >= 0 && threshold <= 1))
    refuse(
        "skip_softmax_threshold is {}: it must be from 0 to 1, as no key weighs more than the heaviest; "
        "where "
        "a scale factor is divided by the number of keys, give at most 1.",
        threshold);
  check_pointer("skip_softmax_counts", args.skip_softmax_counts, alignof(std::int64_t));
}

void set_skip_softmax(Params& params, const AttentionSpec& spec, const ForwardArgs& args) {
  if (!spec.epilogue.skip_softmax) return;
  params.skip_softmax_log2 = std::log2(args.skip_softmax_threshold.value_or(0.0f));
  params.skip_softmax_counts = reinterpret_cast<unsigned long long*>(args.skip_softmax_counts);
}

}  // namespace flashjit

#include "plan/family.hpp"

#include <algorithm>

#include "expr/analyze.hpp"
#include "expr/declarations.hpp"

namespace flashjit::plan {

bool has_tile_lists(const AttentionSpec& spec) {
  const bool ordered = spec.pass == Pass::backward && spec.deterministic;
  return spec.has_block_map() || expr::mask_traits(spec.mask).listed || (ordered && !spec.mask.empty());
}

bool is_causal(const MaskProgram& mask) {
  return mask == causal(CausalAlignment::bottom_right) || mask == causal(CausalAlignment::top_left);
}

bool has_capture_grads(const AttentionSpec& spec) {
  return spec.pass == Pass::backward &&
         std::ranges::any_of(expr::declarations(spec.score, spec.mask), &expr::Declaration::wants_grad);
}

bool orders_capture_grads(const AttentionSpec& spec) { return spec.deterministic && has_capture_grads(spec); }

std::span<const FamilyTraits> families() {
  static const std::array<FamilyTraits, 3> kFamilies{sm90_traits(), sm80_traits(), simt_traits()};
  return kFamilies;
}

const FamilyTraits& traits(Family family) {
  for (const FamilyTraits& candidate : families()) {
    if (candidate.family == family) return candidate;
  }
  throw Error(ErrorCode::internal, "no traits for the kernel family " + to_string(family));
}

}  // namespace flashjit::plan

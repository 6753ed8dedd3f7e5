#include "plan/analysed_spec.hpp"

#include <algorithm>
#include <array>

#include "expr/ops.hpp"

namespace flashjit::plan {

bool is_causal(const MaskProgram& mask) {
  return mask == causal(CausalAlignment::bottom_right) || mask == causal(CausalAlignment::top_left);
}

std::string to_string(BatchPart part) {
  constexpr std::array kParts = {"all", "prefills", "decodes"};
  return kParts[static_cast<std::size_t>(part)];
}

AnalysedSpec::AnalysedSpec(const KernelSpec& spec, const Checks& checks)
    : KernelSpec(spec.normalized()),
      checks(checks),
      programs(
          expr::facts_of(score, mask, {.check_indices = checks.check_indices}, epilogue.out_mod, prologue)),
      key_bounds(std::make_shared<expr::KeyBounds>(mask)),
      is_causal(plan::is_causal(mask)) {
  const bool backward = pass == Pass::backward;
  has_tile_lists = !indices && (has_block_map() || programs.mask.listed ||
                                (backward && reproducible.deterministic && programs.has_mask));
  has_capture_grads =
      gives_gradients(pass) && score.tree() &&
      std::ranges::any_of(expr::declarations_of(*score.tree()), &expr::Declaration::wants_grad);
}

}  // namespace flashjit::plan

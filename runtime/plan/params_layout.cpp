#include "plan/params_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>

namespace flashjit::plan {
namespace {

constexpr std::size_t kParamsAlignment = 8;

int scalars_of(const KernelPlan& kernel) {
  const auto is_scalar = [](const auto& declaration) { return declaration.is_scalar(); };
  return static_cast<int>(std::ranges::count_if(kernel.spec.programs.declarations, is_scalar));
}
int tensors_of(const KernelPlan& kernel) {
  return static_cast<int>(kernel.spec.programs.declarations.size()) - scalars_of(kernel);
}

/// Members of Params up to the next row's. A group begins with a member that is aligned to 8 bytes, so that a
/// kernel's Params are its groups one behind the other.
struct ParamsGroup {
  std::string_view name;  ///< of the word before its members: FLASHJIT_IF_<name>
  std::size_t begin;
  int (*count)(const KernelPlan&);  ///< 0: the kernel lacks it; else 1, or how long its array is
  std::size_t element = 0;          ///< bytes of one of the array's
};

/// In the order of Params. What is before the first one every kernel has.
constexpr ParamsGroup kParamsGroups[] = {
    {"GRADIENTS", offsetof(Params, dout),
     [](const KernelPlan& k) -> int { return gives_gradients(k.spec.pass); }},
    {"TILE_LISTS", offsetof(Params, lists), [](const KernelPlan& k) -> int { return k.spec.has_tile_lists; }},
    {"BLOCK_MAP", offsetof(Params, block_map),
     [](const KernelPlan& k) -> int { return k.spec.has_block_map(); }},
    {"VARLEN", offsetof(Params, cu_seqlens_q), [](const KernelPlan& k) -> int { return k.spec.varlen; }},
    {"KV_LENGTHS", offsetof(Params, kv_lengths),
     [](const KernelPlan& k) -> int { return k.spec.kv.has_lengths() || k.spec.kv.shared_prefix; }},
    {"SPLIT", offsetof(Params, o_splits), [](const KernelPlan& k) -> int { return k.config.split; }},
    {"PACK_GQA", offsetof(Params, packed), [](const KernelPlan& k) -> int { return k.config.pack_gqa; }},
    {"DROPOUT", offsetof(Params, rng_state), [](const KernelPlan& k) -> int { return k.spec.dropout; }},
    {"SCALES", offsetof(Params, k_scale),
     [](const KernelPlan& k) -> int { return k.spec.kv.quantized() || k.spec.prologue.q_codes; }},
    {"INDICES", offsetof(Params, indices), [](const KernelPlan& k) -> int { return k.spec.indices; }},
    {"Q_ROPE", offsetof(Params, q_rope), [](const KernelPlan& k) -> int { return k.spec.prologue.q_rope; }},
    {"JOINED_LISTS", offsetof(Params, joined_lists),
     [](const KernelPlan& k) -> int { return k.config.join_lists; }},
    {"OUT_MOD", offsetof(Params, out_mod),
     [](const KernelPlan& k) -> int { return !k.spec.epilogue.out_mod.empty(); }},
    {"OUT_CODES", offsetof(Params, out_scale),
     [](const KernelPlan& k) -> int { return k.spec.epilogue.out_format.quantized(); }},
    {"ROW_MODS", offsetof(Params, given),
     [](const KernelPlan& k) -> int { return k.spec.prologue.has_programs(); }},
    {"RUNNING_STATE", offsetof(Params, o_state),
     [](const KernelPlan& k) -> int { return k.spec.partial.running_state; }},
    {"SKIP_SOFTMAX", offsetof(Params, skip_softmax_counts),
     [](const KernelPlan& k) -> int { return k.spec.epilogue.skip_softmax; }},
    {"CAPTURES", offsetof(Params, captures), tensors_of, sizeof(CaptureParam)},
    {"SCALARS", offsetof(Params, scalars), scalars_of, sizeof(unsigned)},
};

constexpr bool in_order(std::span<const ParamsGroup> groups) {
  return std::ranges::is_sorted(groups, {}, &ParamsGroup::begin) &&
         std::ranges::all_of(groups,
                             [](const ParamsGroup& group) { return group.begin % kParamsAlignment == 0; });
}
static_assert(in_order(kParamsGroups) && sizeof(Params) % kParamsAlignment == 0);

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kParamsAlignment - 1) / kParamsAlignment * kParamsAlignment;
}

/// Parts that are neighbours are one.
void add_part(ParamsLayout& layout, std::size_t begin, std::size_t bytes) {
  layout.bytes += bytes;
  if (!layout.parts.empty() && layout.parts.back().begin + layout.parts.back().bytes == begin)
    layout.parts.back().bytes += bytes;
  else
    layout.parts.push_back({begin, bytes});
}

}  // namespace

ParamsLayout params_layout(const KernelPlan& kernel) {
  ParamsLayout layout;
  add_part(layout, 0, std::begin(kParamsGroups)->begin);
  for (const ParamsGroup* group = std::begin(kParamsGroups); group != std::end(kParamsGroups); ++group) {
    const int count = group->count(kernel);
    layout.macros.emplace_back(fmt::format("FLASHJIT_IF_{}", group->name), count > 0 ? "" : "static");
    if (group->element > 0)
      layout.macros.emplace_back(fmt::format("FLASHJIT_{}", group->name), std::to_string(std::max(count, 1)));
    if (count == 0) continue;
    const std::size_t end = group + 1 == std::end(kParamsGroups) ? sizeof(Params) : group[1].begin;
    const std::size_t all = end - group->begin;
    add_part(layout, group->begin,
             group->element ? aligned(group->element * static_cast<std::size_t>(count)) : all);
  }
  layout.macros.emplace_back("FLASHJIT_PARAMS_BYTES", std::to_string(layout.bytes));
  return layout;
}

}  // namespace flashjit::plan

#include "plan/kernel_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "plan/config_switches.hpp"
#include "plan/divided_batch.hpp"
#include "plan/spec_options.hpp"
#include "plan/tiles.hpp"

namespace flashjit::plan {

void KernelPlan::add(Step step, Entry entry) {
  steps.push_back(step);
  entries.push_back(std::move(entry));
}

const Entry& KernelPlan::main() const { return *std::ranges::find_if(entries, &Entry::hot); }

std::string name_of(const KernelPlan& kernel) {
  const std::string name = fmt::format("{} {}", to_string(kernel.spec), to_string(kernel.config));
  return kernel.spec.part == BatchPart::all ? name
                                            : fmt::format("{} of {}", name, to_string(kernel.spec.part));
}

std::vector<expr::Constant> problem_constants(const AnalysedSpec& spec, const TileConfig& config,
                                              bool tile_lists) {
  const auto [by_batch, by_head] = lists_differ(spec);
  std::vector<expr::Constant> all = {{"kBackward", spec.pass == Pass::backward},
                                     {"kHeadDim", spec.head_dim},
                                     {"kHeadDimV", spec.v_dim()},
                                     {"kBlockMap", spec.has_block_map()},
                                     {"kBlockQ", spec.block_map.q},
                                     {"kBlockKv", spec.block_map.kv},
                                     {"kTileLists", tile_lists},
                                     {"kListsByBatch", by_batch},
                                     {"kListsByHead", by_head},
                                     {"kPageRows", spec.kv.page_size},
                                     {"kBr", config.br},
                                     {"kBc", config.bc},
                                     {"kWarps", config.warps},
                                     {"kCheckIndices", spec.checks.check_indices},
                                     {"kCheckWaits", spec.checks.check_waits}};
  for (const ConfigSwitch& one : kConfigSwitches) {
    if (one.constant.empty()) continue;
    if (one.on)
      all.push_back({one.constant, config.*one.on});
    else
      all.push_back({one.constant, config.*one.number});
  }
  for (const SpecOption& option : kSpecOptions)
    if (!option.constant.empty())
      all.push_back(
          {option.constant, option.is_on(spec) && (option.text != "key_scales" || spec.has_scales())});
  constexpr int kAnyFewer = std::numeric_limits<int>::min(), kAnyMore = std::numeric_limits<int>::max();
  all.push_back({"kFewestQueries", spec.part == BatchPart::prefills ? kMostQueriesOfDecode + 1 : kAnyFewer});
  all.push_back({"kMostQueries", spec.part == BatchPart::decodes ? kMostQueriesOfDecode : kAnyMore});
  std::ranges::move(expr::constants_of(spec.programs), std::back_inserter(all));
  return all;
}

Entry family_entry(Family family, const std::string& name, const std::string& header, int threads) {
  return {.name = name,
          .header = fmt::format("flashjit/{}/{}.cuh", to_string(family), header),
          .function = fmt::format("flashjit::{}::{}", to_string(family), name),
          .threads = threads};
}

Entry auxiliary_entry(const std::string& name, const std::string& header) {
  return {.name = name,
          .header = fmt::format("flashjit/auxiliary/{}.cuh", header.empty() ? name : header),
          .function = "flashjit::auxiliary::" + name,
          .threads = kAuxiliaryThreads};
}

void add_sink_grads(KernelPlan& kernel) {
  if (finds_sink_grads(kernel.spec)) kernel.add(Step::sink_grads, auxiliary_entry("sink_grads"));
}

void add_row_mods(KernelPlan& kernel) {
  if (kernel.spec.prologue.has_programs()) kernel.add(Step::row_mods, auxiliary_entry("row_mods"));
}

void add_row_mod_grads(KernelPlan& kernel) {
  if (kernel.spec.prologue.has_programs() && kernel.spec.pass == Pass::backward)
    kernel.add(Step::row_mod_grads, auxiliary_entry("row_mod_grads"));
}

}  // namespace flashjit::plan

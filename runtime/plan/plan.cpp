#include "plan/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "plan/decoded_cache.hpp"
#include "plan/divided_batch.hpp"
#include "plan/tiles.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {
namespace {

struct Choice {
  TileConfig config;
  ConfigSource source;
  std::string nvrtc = {};
};

Support admits(const AnalysedSpec& spec, const TileConfig& config, const DeviceInfo& device) {
  const FamilyTraits& family = traits(config.family);
  const Support able = family.supports(spec, device);
  return able ? family.admits(spec, config, device) : able;
}

/// What tiles are chosen by where a row's bits must not depend on other sequences: whether there are few
/// queries, as in decode, whose keys are worth splitting.
AttentionShape without_batch(const AttentionShape& shape, std::int64_t few = 16) {
  constexpr std::int64_t kFewQueries = 64, kManySequences = 256, kManyKeys = 1 << 17;
  if (shape.seqlen_q <= kFewQueries) return {1, shape.heads_q, shape.heads_kv, few, kManyKeys};
  return {kManySequences, shape.heads_q, shape.heads_kv, 4096, 4096};
}

/// Rows of a tile do not change each other's bits, so that fewer may be a tile of the same keys.
TileConfig invariant_config(const FamilyTraits& family, const AnalysedSpec& spec, const AttentionShape& shape,
                            const DeviceInfo& device) {
  const TileConfig config = family.heuristic(spec, without_batch(shape), device);
  const TileConfig fewer =
      family.heuristic(spec, without_batch(shape, std::min<std::int64_t>(shape.seqlen_q, 16)), device);
  return fewer.br < config.br && fewer.bc == config.bc && fewer.split == config.split ? fewer : config;
}

/// The tiles that a family would choose, or why it can do nothing here: none may fit the device.
struct Chosen {
  TileConfig config;
  Support support;
};
Chosen chosen_by(const FamilyTraits& family, const AnalysedSpec& spec, const AttentionShape& shape,
                 const DeviceInfo& device) {
  if (const Support able = family.supports(spec, device); !able) return {{}, able};
  const TileConfig config = spec.reproducible.batch_invariant ? invariant_config(family, spec, shape, device)
                                                              : family.heuristic(spec, shape, device);
  return {config, family.admits(spec, config, device)};
}

/// The tiles of the first family that can.
std::optional<TileConfig> first_chosen(const AnalysedSpec& spec, const AttentionShape& shape,
                                       const DeviceInfo& device) {
  for (const FamilyTraits& family : families())
    if (const Chosen chosen = chosen_by(family, spec, shape, device); chosen.support) return chosen.config;
  return std::nullopt;
}

std::string every_reason(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  std::string out = fmt::format("no kernel family can do {} on {}", to_string(spec), device.arch);
  const char* separator = ": ";
  for (const FamilyTraits& family : families()) {
    out += fmt::format("{}{}: {}", separator, to_string(family.family),
                       chosen_by(family, spec, shape, device).support.reason);
    separator = "; ";
  }
  return out;
}

Choice choose(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
              const TuningRecords& records, const std::optional<TileConfig>& given) {
  if (given) {
    if (const Support admitted = admits(spec, *given, device); !admitted) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the configuration {} cannot do {} on {}: {}; leave it out to have one chosen",
                              to_string(*given), to_string(spec), device.arch, admitted.reason));
    }
    return {*given, ConfigSource::given};
  }
  const auto by_heuristic = [&]() -> Choice {
    if (const auto config = first_chosen(spec, shape, device)) return {*config, ConfigSource::heuristic};
    throw Error(ErrorCode::unsupported, every_reason(spec, shape, device));
  };
  if (spec.reproducible.batch_invariant) return by_heuristic();
  // A record may come from another version or a smaller sibling of the device, or from a shape whose tiles
  // are worth sharing where this one's are not.
  const auto usable = [&](const TileConfig& config) {
    return admits(spec, config, device) && (!config.split || num_splits(spec, shape, config, device) > 1) &&
           (!config.decode_cache || gain_by_decoded_cache(spec, shape) > kGainThatMayBe);
  };
  if (const auto match = records.find(spec, shape, device, usable); match.record) {
    const ConfigSource lead = match.same_shape ? ConfigSource::tuned_elsewhere : ConfigSource::tuned_near;
    return {match.record->best, match.exact ? ConfigSource::tuned : lead, match.record->nvrtc};
  }
  return by_heuristic();
}

/// KV tiles of a head that blocks take, each part of one counted.
std::int64_t kv_tiles_of_head(const ExecutionPlan& plan) {
  return tiles(plan.shape.seqlen_kv, plan.config.bc) * std::max<std::int64_t>(plan.needs.num_splits, 1);
}

/// How many heads a causal mask's backward pass takes in LPT order: as many as have nearest to a round of KV
/// tiles. Many rounds of short heads end well as they are, and read Q better.
std::int64_t lpt_heads(const ExecutionPlan& plan, const DeviceInfo& device) {
  constexpr std::int64_t kTilesOfLongHead = 16, kFewRounds = 4;
  const std::int64_t heads = plan.shape.batch * plan.shape.heads_kv, of_head = kv_tiles_of_head(plan);
  const AnalysedSpec& spec = plan.spec;
  if (spec.pass != Pass::backward || !spec.is_causal || spec.has_tile_lists || of_head == 0) return 0;
  const std::int64_t slots = blocks_at_once(plan.main(), device);
  if (of_head < kTilesOfLongHead && heads * of_head > kFewRounds * slots) return 0;
  return std::min(heads, (slots + of_head / 2) / of_head);
}

/// How many heads of dQ are cleared first: as many as the first KV tiles of all blocks need, and one more.
/// Later ones are cleared as far ahead, by is_to_clear() in templates/sm90/convert_dq.cuh. It is all heads
/// where L2 could not keep so many zeros until they are added to: grouped heads, long sequences.
std::int64_t heads_cleared(const ExecutionPlan& plan, const DeviceInfo& device) {
  const AttentionShape& shape = plan.shape;
  const std::int64_t heads = shape.batch * shape.heads_kv, of_head = kv_tiles_of_head(plan);
  if (!plan.needs.clears_dq || shape.heads_q == 0 || heads == 0 || of_head == 0) return heads;
  const Launch& main = main_launch(plan, plan.launches);
  const std::int64_t begun = tiles(main.blocks, plan.main().cluster * of_head);
  if (plan.lpt_heads > 1 && heads - plan.lpt_heads < begun) return heads;
  const std::int64_t first = begun + 1;
  const std::int64_t group = shape.heads_q / shape.heads_kv;
  const double bytes = 4.0 * static_cast<double>(group * padded_seqlen_q(shape)) * plan.spec.head_dim;
  constexpr double kShareOfL2 = 0.75;
  const std::int64_t alive = std::max(first + first / group + 1, plan.lpt_heads);
  const bool stay = static_cast<double>(alive) * bytes <= kShareOfL2 * static_cast<double>(device.l2_bytes);
  return stay ? std::min(heads, first) : heads;
}

/// Whether each cluster finds the stats of its KV tile's rows, so that the preprocess entry, its launch and
/// all counters are left out: where all clusters run at once, and each of their warps has rows once at most.
bool finds_row_stats(const ExecutionPlan& plan, const DeviceInfo& device) {
  const AttentionShape& shape = plan.shape;
  if (!plan.schedule.finds_row_stats || plan.needs.dq_accum || shape.seqlen_q == 0 || shape.heads_kv == 0)
    return false;
  const std::int64_t rows = shape.heads_q / shape.heads_kv * padded_seqlen_q(shape);
  const std::int64_t rows_at_once = std::int64_t{plan.main().cluster} * kRowStatsWarps * kLseRows;
  return rows <= rows_at_once && shape.batch * shape.heads_kv <= blocks_at_once(plan.main(), device);
}

void require_launchable(const ExecutionPlan& plan) {
  constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();  // a grid's first dimension
  for (const Launch& launch : plan.launches) {
    if (launch.blocks > kMaxBlocks) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("{} with {} needs {} thread blocks in one launch; {} are allowed: give a call fewer "
                      "sequences, heads or queries",
                      to_string(plan.shape), to_string(plan.config), launch.blocks, kMaxBlocks));
    }
  }
}

/// Whether no work tile is cut into parts, which leaves nothing to combine.
bool has_whole_tiles(const ExecutionPlan& plan, std::int64_t splits) {
  if (plan.schedule.fixed_parts) return splits == 1;
  return plan.schedule.stream_k && plan.needs.cascade_tiles == 0 && !plan.spec.indices &&
         plan.shape.seqlen_kv <= plan.config.bc;  // segments end between KV tiles
}

/// A kernel's launches and memory at a shape.
ExecutionPlan at_shape(KernelPlan kernel, const AttentionShape& shape, const DeviceInfo& device) {
  ExecutionPlan plan{std::move(kernel)};
  const FamilyTraits& family = traits(plan.config.family);
  plan.shape = shape;
  plan.launches = launches_of(plan, plan.shape);
  plan.needs = family.workspace(plan, plan.shape);
  const std::int64_t splits = num_splits(plan, plan.shape, device);
  if (plan.config.split && !plan.config.cluster) plan.needs.num_splits = splits;
  if (finds_row_stats(plan, device)) {
    plan.needs.semaphores = false;
    for (Launch& launch : plan.launches)
      launch.blocks = plan.entries[launch.entry].hot ? plan.shape.batch * plan.shape.heads_kv : 0;
  }
  plan.needs.whole_tiles = has_whole_tiles(plan, splits);
  if (plan.needs.whole_tiles)
    for (Launch& launch : plan.launches)
      if (const Step step = plan.steps[launch.entry]; step == Step::combine || step == Step::combine_parts)
        launch.blocks = 0;
  plan.workspace = workspace_layout(plan.needs, plan.spec, plan.shape);
  require_launchable(plan);
  for (Launch& launch : plan.launches) {
    const Entry& entry = plan.entries[launch.entry];
    if (entry.hot || plan.steps[launch.entry] == Step::combine_parts) launch.blocks *= splits;
    if (entry.persistent) launch.blocks = std::min(launch.blocks, blocks_at_once(entry, device));
    launch.blocks *= entry.cluster;
  }
  require_launchable(plan);
  if (plan.schedule.stream_k) plan.head_groups = head_groups(plan, plan.shape, splits);
  if (plan.schedule.fixed_parts)
    plan.head_groups = head_groups(plan, plan.shape, main_launch(plan, plan.launches).blocks);
  plan.lpt_heads = lpt_heads(plan, device);
  plan.heads_cleared = heads_cleared(plan, device);
  return plan;
}

/// The call's decodes in a launch of their own, in the same workspace.
void divide_batch(ExecutionPlan& plan, const DeviceInfo& device) {
  std::optional<DividedBatch> divided = divided_batch(plan, plan.shape, device);
  if (!divided) return;
  plan = at_shape(std::move(divided->prefills), plan.shape, device);
  plan.decodes = std::make_shared<const ExecutionPlan>(
      at_shape(std::move(divided->decodes), divided->decodes_shape, device));
  const std::size_t bytes = std::max(plan.workspace.bytes, plan.decodes->workspace.bytes);
  plan.workspace.bytes = plan.workspace.list_count = bytes;  // there are no lists
}

}  // namespace

Problem fold_gqa(const KernelSpec& spec, const AttentionShape& shape) {
  Problem problem{spec.normalized(), shape};
  KernelSpec& computed = problem.spec;
  const bool grouped = shape.seqlen_q == 1 && shape.heads_q > shape.heads_kv && shape.heads_kv > 0;
  // The last query sees every key.
  const bool sees_all = computed.mask.empty() || computed.mask == causal();
  const bool alike = is_plain(computed) && sees_all && !computed.indices;
  if (computed.pass != Pass::forward || !grouped || !alike) return problem;
  computed.mask = {};
  problem.shape.seqlen_q = shape.heads_q / shape.heads_kv;
  problem.shape.heads_q = shape.heads_kv;
  return problem;
}

ExecutionPlan make_plan(const KernelSpec& given_spec, const AttentionShape& given_shape,
                        const DeviceInfo& device, const TuningRecords& records,
                        const std::optional<TileConfig>& given, const Checks& checks) {
  given_spec.validate();
  given_shape.validate();
  const Problem problem = fold_gqa(given_spec, given_shape);
  const AnalysedSpec spec(problem.spec, checks);
  Choice choice = choose(spec, problem.shape, device, records, given);
  ExecutionPlan plan =
      at_shape(traits(choice.config.family).kernel(spec, choice.config), problem.shape, device);
  if (choice.source != ConfigSource::given) divide_batch(plan, device);
  plan.fold_gqa = problem.shape != given_shape;
  plan.config_source = choice.source;
  plan.tuned_nvrtc = std::move(choice.nvrtc);
  return plan;
}

}  // namespace flashjit::plan

#include "plan/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "plan/tiles.hpp"

namespace flashjit::plan {
namespace {

struct Choice {
  TileConfig config;
  std::string source;
  std::string nvrtc = {};
};

const FamilyTraits* first_able(const AttentionSpec& spec, const DeviceInfo& device) {
  for (const FamilyTraits& family : families()) {
    if (family.supports(spec, device)) return &family;
  }
  return nullptr;
}

std::string every_reason(const AttentionSpec& spec, const DeviceInfo& device) {
  std::string out = fmt::format("no kernel family can do {} on {}", to_string(spec), device.arch);
  const char* separator = ": ";
  for (const FamilyTraits& family : families()) {
    out += fmt::format("{}{}: {}", separator, to_string(family.family), family.supports(spec, device).reason);
    separator = "; ";
  }
  return out;
}

Support admits(const AttentionSpec& spec, const TileConfig& config, const DeviceInfo& device) {
  const FamilyTraits& family = traits(config.family);
  const Support able = family.supports(spec, device);
  return able ? family.admits(spec, config, device) : able;
}

Choice choose(const AttentionSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
              const TuningRecords& records, const std::optional<TileConfig>& given) {
  if (given) {
    if (const Support admitted = admits(spec, *given, device); !admitted) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the configuration {} cannot do {} on {}: {}; leave it out to have one chosen",
                              to_string(*given), to_string(spec), device.arch, admitted.reason));
    }
    return {*given, "given"};
  }
  // A record may come from another version or a smaller sibling of the device, or from a shape whose tiles
  // are worth sharing where this one's are not.
  const auto usable = [&](const TileConfig& config) {
    return admits(spec, config, device) && (!config.in_parts || tile_parts(spec, shape, config, device) > 1);
  };
  if (const auto match = records.find(spec, shape, device, usable); match.record) {
    const char* lead = match.same_shape ? kTunedElsewhere : "tuned for a near shape";
    return {match.record->best, match.exact ? kTuned : lead, match.record->nvrtc};
  }
  const FamilyTraits* family = first_able(spec, device);
  if (!family) throw Error(ErrorCode::unsupported, every_reason(spec, device));
  return {family->heuristic(spec, shape, device), "heuristic"};
}

/// KV tiles of a head that blocks take, each part of one counted.
std::int64_t kv_works(const ExecutionPlan& plan) {
  return tiles(plan.shape.seqlen_kv, plan.config.bc) * std::max<std::int64_t>(plan.needs.parts, 1);
}

/// Where a causal mask's KV tiles differ, those whose tiles are nearest to a round. Many rounds of short
/// heads end well as they are, and read Q better.
std::int64_t lpt_heads(const ExecutionPlan& plan, const DeviceInfo& device) {
  constexpr std::int64_t kWorksOfLongHead = 16, kFewRounds = 4;
  const std::int64_t heads = plan.shape.batch * plan.shape.heads_kv, works = kv_works(plan);
  const AttentionSpec& spec = plan.spec;
  if (spec.pass == Pass::forward || !is_causal(spec.mask) || has_tile_lists(spec) || works == 0) return 0;
  const std::int64_t slots =
      blocks_at_once(plan.entries[main_launch(plan.entries, plan.launches).entry], device);
  if (works < kWorksOfLongHead && heads * works > kFewRounds * slots) return 0;
  return std::min(heads, (slots + works / 2) / works);
}

/// Those that the first KV tiles of all blocks need, and one more; later ones are cleared as far ahead, by
/// is_to_clear() in templates/sm90/convert_dq.cuh. All, where L2 could not keep so many zeros until they are
/// added to: grouped heads, long sequences.
std::int64_t heads_cleared(const ExecutionPlan& plan, const DeviceInfo& device) {
  const AttentionShape& shape = plan.shape;
  const std::int64_t heads = shape.batch * shape.heads_kv, works = kv_works(plan);
  if (!plan.needs.clears_dq || heads == 0 || works == 0) return heads;
  const Launch& main = main_launch(plan.entries, plan.launches);
  const std::int64_t begun = tiles(main.blocks, plan.entries[main.entry].cluster * works);
  if (plan.lpt_heads > 1 && heads - plan.lpt_heads < begun) return heads;
  const std::int64_t first = begun + 1;
  const std::int64_t group = shape.heads_q / shape.heads_kv;
  const double bytes = 4.0 * static_cast<double>(group * padded_seqlen_q(shape)) * plan.spec.head_dim;
  constexpr double kShareOfL2 = 0.75;
  const std::int64_t alive = std::max(first + first / group + 1, plan.lpt_heads);
  const bool stay = static_cast<double>(alive) * bytes <= kShareOfL2 * static_cast<double>(device.l2_bytes);
  return stay ? std::min(heads, first) : heads;
}

void require_launchable(const ExecutionPlan& plan) {
  constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();  // a grid's first dimension
  for (const Launch& launch : plan.launches) {
    if (launch.blocks > kMaxBlocks) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("{} with {} needs {} thread blocks in one launch; {} are allowed: split the batch",
                      to_string(plan.shape), to_string(plan.config), launch.blocks, kMaxBlocks));
    }
  }
}

}  // namespace

Support supports(const AttentionSpec& given, const DeviceInfo& device) {
  try {
    given.validate();
  } catch (const Error& error) {
    return Support::no(error.message());
  }
  const AttentionSpec spec = given.normalized();
  return first_able(spec, device) ? Support::yes() : Support::no(every_reason(spec, device));
}

Problem with_packed_heads(const AttentionSpec& spec, const AttentionShape& shape) {
  Problem problem = {spec.normalized(), shape};
  AttentionSpec& computed = problem.spec;
  const bool grouped = shape.seqlen_q == 1 && shape.heads_q > shape.heads_kv && shape.heads_kv > 0;
  // The last query sees every key.
  const bool sees_all = computed.mask.empty() || computed.mask == causal();
  const bool alike = computed.score.empty() && sees_all && !computed.dropout && !computed.sinks &&
                     !computed.varlen && !computed.has_block_map();
  if (computed.pass != Pass::forward || !grouped || !alike) return problem;
  computed.mask = {};
  problem.shape.seqlen_q = shape.heads_q / shape.heads_kv;
  problem.shape.heads_q = shape.heads_kv;
  return problem;
}

ExecutionPlan make_plan(const AttentionSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
                        const TuningRecords& records, const std::optional<TileConfig>& given) {
  spec.validate();
  shape.validate();
  ExecutionPlan plan;
  Problem problem = with_packed_heads(spec, shape);
  plan.spec = std::move(problem.spec);
  plan.shape = problem.shape;
  Choice choice = choose(plan.spec, plan.shape, device, records, given);
  plan.config = choice.config;
  plan.config_source = std::move(choice.source);
  plan.tuned_nvrtc = std::move(choice.nvrtc);
  const FamilyTraits& family = traits(plan.config.family);
  plan.entries = family.entries(plan.spec, plan.config);
  plan.launches = family.launches(plan.spec, plan.shape, plan.config);
  plan.needs = family.workspace(plan.spec, plan.shape, plan.config);
  const std::int64_t parts = tile_parts(plan.spec, plan.shape, plan.config, device);
  if (plan.config.in_parts) plan.needs.parts = parts;
  plan.workspace = workspace_layout(plan.needs, plan.spec, plan.shape);
  plan.tensor_boxes = family.tensor_boxes(plan.spec, plan.config);
  plan.declarations = expr::declarations(plan.spec.score, plan.spec.mask);
  require_launchable(plan);
  for (Launch& launch : plan.launches) {
    const Entry& entry = plan.entries[launch.entry];
    if (entry.hot) launch.blocks *= parts;
    if (entry.persistent) launch.blocks = std::min(launch.blocks, blocks_at_once(entry, device));
    launch.blocks *= entry.cluster;
  }
  plan.lpt_heads = lpt_heads(plan, device);
  plan.heads_cleared = heads_cleared(plan, device);
  return plan;
}

}  // namespace flashjit::plan

#include "plan/divided_batch.hpp"

#include <utility>

#include "plan/family.hpp"

namespace flashjit::plan {
namespace {

/// With fewer, decodes are too little work for a launch of their own.
constexpr std::int64_t kFewestSequences = 8;

bool may_divide(const KernelPlan& whole, const AttentionShape& shape) {
  const AnalysedSpec& spec = whole.spec;
  const bool packed_beside_cache = spec.pass == Pass::forward && spec.varlen && spec.kv.is_cache();
  // What decodes a quantized cache once does so for all; small pages are copied for the prefills alone.
  const bool decodes_all = whole.config.decode_cache && spec.kv.quantized();
  const bool in_whole_tiles =
      whole.schedule.dynamic_tiles && !whole.schedule.tile_lists && !whole.config.split && !decodes_all;
  // A launch adds these up over all sequences, or makes them for all beforehand.
  const bool counts_all = spec.kv.shared_prefix || spec.epilogue.skip_softmax || spec.prologue.has_programs();
  return packed_beside_cache && in_whole_tiles && !counts_all && !spec.reproducible.batch_invariant &&
         !spec.indices && shape.batch >= kFewestSequences && shape.seqlen_q > kMostQueriesOfDecode;
}

AnalysedSpec part_of(AnalysedSpec spec, BatchPart part) {
  spec.part = part;
  return spec;
}

std::optional<KernelPlan> kernel_of(const AnalysedSpec& part, const TileConfig& config,
                                    const FamilyTraits& family, const DeviceInfo& device) {
  if (!family.admits(part, config, device)) return std::nullopt;
  return family.kernel(part, config);
}

}  // namespace

std::optional<DividedBatch> divided_batch(const KernelPlan& whole, const AttentionShape& shape,
                                          const DeviceInfo& device) {
  if (!may_divide(whole, shape)) return std::nullopt;
  const FamilyTraits& family = traits(whole.config.family);
  AttentionShape of_decodes = shape;
  of_decodes.seqlen_q = kMostQueriesOfDecode;
  const AnalysedSpec decode = part_of(whole.spec, BatchPart::decodes),
                     prefill = part_of(whole.spec, BatchPart::prefills);
  // A tuned configuration is kept. The heuristic's of the whole packs heads for decodes.
  const bool is_tuned = whole.config != family.heuristic(whole.spec, shape, device);
  auto decodes = kernel_of(decode, family.heuristic(decode, of_decodes, device), family, device);
  auto prefills =
      kernel_of(prefill, is_tuned ? whole.config : family.heuristic(prefill, shape, device), family, device);
  if (!decodes || !decodes->schedule.stream_k || !prefills || prefills->config.split) return std::nullopt;
  return DividedBatch{*std::move(prefills), *std::move(decodes), of_decodes};
}

}  // namespace flashjit::plan

// K and V in formats that are decoded, once for a call: an entry of its own writes them to the workspace as
// elements, and the kernel of a spec with 16-bit K and V reads these. The same for elements in pages that are
// too small for TMA, and for codes in pages that are multiplied as they are.
// Families that can are made of their plain ones by WithDecodedCache.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "plan/family.hpp"

namespace flashjit::plan {

/// The spec of the kernel that reads the elements: without formats, but where codes are multiplied, and a
/// cache is in slots.
AnalysedSpec with_elements(AnalysedSpec spec);
/// The same of what a family has planned, if its configuration decodes the cache; else its own spec.
KernelSpec spec_of_main(const KernelPlan& kernel);
/// The type of K and V there.
inline DType kv_type_of_main(const KernelPlan& kernel) {
  return kernel.config.decode_cache && !kernel.spec.prologue.q_codes ? kernel.spec.dtype
                                                                     : kernel.spec.kv_type();
}

/// Whether a spec's K and V may be decoded once, whatever its shape.
Support may_decode_cache(const AnalysedSpec& spec);
/// How much time that saves of what Q tiles take to decode, over what it costs, by bytes and rates; 0 where
/// it may not be or would take much workspace.
double gain_by_decoded_cache(const AnalysedSpec& spec, const AttentionShape& shape);
/// From which gain on a heuristic decodes once, and the tuner tries it.
inline constexpr double kGainThatDecides = 1.0, kGainThatMayBe = 0.5;

/// Makes the plan of the kernel that reads elements one of `spec`, with the entry that decodes before others.
KernelPlan add_decode_cache(KernelPlan of_elements, const AnalysedSpec& spec);

/// What `config` is to the kernel that reads the elements.
inline TileConfig without_decode_cache(TileConfig config) {
  config.decode_cache = false;
  return config;
}

/// Whether the scales of heads are left to what kernels make of the elements, as they are of 8-bit codes.
inline bool leaves_scales(const KernelPlan& kernel) {
  return kernel.config.decode_cache && kernel.spec.has_scales() && !kernel.spec.prologue.q_codes;
}

/// A family's functions for configurations with decode_cache, too; others stay as they are. `kScales`: its
/// kernels multiply results with scales of heads, see leaves_scales().
template <const FamilyTraits& kPlain, bool kScales>
struct WithDecodedCache {
  static Support may_decode(const AnalysedSpec& spec) {
    if (Support may = may_decode_cache(spec); !may) return may;
    if (kScales || (spec.kv.quantized() && !spec.has_scales())) return Support::yes();
    return Support::no("decode_cache of 8-bit K and V, and of small pages, is for family sm90");
  }
  static Support admits(const AnalysedSpec& spec, const TileConfig& config, const DeviceInfo& device) {
    if (!config.decode_cache) return kPlain.admits(spec, config, device);
    if (Support may = may_decode(spec); !may) return may;
    const AnalysedSpec elements = with_elements(spec);
    if (Support able = kPlain.supports(elements, device); !able) return able;
    return kPlain.admits(elements, without_decode_cache(config), device);
  }
  static TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape,
                              const DeviceInfo& device) {
    if (may_decode(spec) && gain_by_decoded_cache(spec, shape) > kGainThatDecides)
      if (const AnalysedSpec elements = with_elements(spec); kPlain.supports(elements, device)) {
        TileConfig config = kPlain.heuristic(elements, shape, device);
        config.decode_cache = true;
        return config;
      }
    return kPlain.heuristic(spec, shape, device);
  }
  static std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
    std::vector<TileConfig> all = kPlain.search_space(spec, device);
    if (!may_decode(spec)) return all;
    for (TileConfig config : kPlain.search_space(with_elements(spec), device)) {
      config.decode_cache = true;
      if (admits(spec, config, device)) all.push_back(config);
    }
    return all;
  }
  static KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& config) {
    if (!config.decode_cache) return kPlain.kernel(spec, config);
    return add_decode_cache(kPlain.kernel(with_elements(spec), without_decode_cache(config)), spec);
  }
  static WorkspaceNeeds workspace(const KernelPlan& kernel, const AttentionShape& shape) {
    WorkspaceNeeds needs = kPlain.workspace(kernel, shape);
    needs.decoded_cache = kernel.config.decode_cache;
    return needs;
  }
  static std::string functions(const AnalysedSpec& spec, const TileConfig& config) {
    if (!config.decode_cache) return kPlain.functions(spec, config);
    return kPlain.functions(with_elements(spec), without_decode_cache(config));
  }

  static constexpr FamilyTraits kTraits{.family = kPlain.family,
                                        .computed_by = kPlain.computed_by,
                                        .supports = kPlain.supports,
                                        .admits = admits,
                                        .heuristic = heuristic,
                                        .search_space = search_space,
                                        .kernel = kernel,
                                        .workspace = workspace,
                                        .functions = functions};
};

}  // namespace flashjit::plan

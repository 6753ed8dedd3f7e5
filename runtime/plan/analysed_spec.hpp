// A spec with what planning asks of its programs, found once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "expr/facts.hpp"
#include "expr/key_bounds.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::plan {

/// Debug modes that are compiled into kernels.
struct Checks {
  bool check_indices = false;  ///< kernels print each index of a captured tensor that is clamped, each of
                               ///< AttentionSpec::indices that is no key, and wrong pages and lengths
  bool check_waits = false;    ///< kernels trap where they would hang

  bool operator==(const Checks&) const = default;
};

/// Which of a packed batch's sequences a kernel computes, see divided_batch.hpp.
enum class BatchPart : std::uint8_t { all, prefills, decodes };
std::string to_string(BatchPart part);  // "all", "prefills", "decodes"

/// A normalized spec. Made of any spec that is valid; making one takes as long as planning does, so that what
/// plans many kernels of a spec makes it once.
struct AnalysedSpec : KernelSpec {
  AnalysedSpec() = default;
  AnalysedSpec(const KernelSpec& spec, const Checks& checks = {});

  Checks checks;
  BatchPart part = BatchPart::all;
  expr::ProgramFacts programs;
  std::shared_ptr<const expr::KeyBounds> key_bounds;  ///< of the mask
  /// Whether kernels may walk lists of tiles: for a block map, a mask without bounds, or any mask
  /// where additions to dQ are ordered.
  bool has_tile_lists = false;
  bool is_causal = false;          ///< the mask is a causal one, of either alignment
  bool has_capture_grads = false;  ///< the pass gives gradients to tensors that the score reads
  /// Whether elements of O, Q or K add to gradients of captured tensors, which they do in any order.
  bool adds_element_grads() const {
    return pass == Pass::backward && programs.out_mod_grads + programs.row_mod_grads > 0;
  }
  /// Whether gradients of captured tensors are to be added up in one order.
  bool orders_capture_grads() const {
    return reproducible.deterministic && (has_capture_grads || adds_element_grads());
  }
};

/// Whether it is a causal mask, of either alignment.
bool is_causal(const MaskProgram& mask);

/// Whether queries, keys and at most a causal mask alone say what P and O of a sequence are.
bool is_plain(const AttentionSpec& spec);
/// An option of the whole softmax of a row, which one of several calls over parts of its keys has; null: the
/// spec has none.
const char* counted_once(const AttentionSpec& spec);
/// Whether its pass gives a gradient of each head's sink.
bool finds_sink_grads(const KernelSpec& spec);

}  // namespace flashjit::plan

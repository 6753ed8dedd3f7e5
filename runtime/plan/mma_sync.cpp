#include "plan/mma_sync.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/sm80_jvp.hpp"
#include "plan/tiles.hpp"
#include "templates/sm80/layout.cuh"

namespace flashjit::plan::mma_sync {
namespace {

/// fp32 values of every pair that one warp of two hands to the other: P, the score's slope, and the score for
/// gradients of captured tensors.
int exchanged_values(const AnalysedSpec& spec, const TileConfig& c) {
  return c.d_split == 1 || is_wide(spec) ? 0
                                         : 1 + spec.programs.has_slope + (spec.programs.capture_grads > 0);
}

int shared_bytes(const AnalysedSpec& spec, const TileConfig& c) {
  if (spec.pass == Pass::forward)
    return sm80::ForwardLayout{c.br,
                               c.bc,
                               spec.head_dim,
                               spec.v_dim(),
                               c.stages,
                               size_of(spec.kv_type()),
                               spec.has_key_scales(),
                               c.d_split,
                               spec.kv.shared_kv}
        .bytes();
  return sm80::BackwardLayout{c.br,          c.bc,
                              spec.head_dim, spec.v_dim(),
                              c.stages,      exchanged_values(spec, c),
                              spec.indices,  spec.partial.two_terms ? 2 : 1}
      .bytes();
}

/// fp32 accumulators and kept operands of one thread: what cannot be traded away by the compiler.
int accumulator_registers(const AnalysedSpec& spec, const TileConfig& c) {
  const int columns = 16 * sm80::units_of(spec.v_dim(), c.d_split);
  if (spec.pass == Pass::forward)
    return sm80::forward_registers(c.br * c.d_split / (16 * c.warps),
                                   c.bc / sm80::score_parts(c.bc, c.d_split), spec.head_dim, columns,
                                   c.q_in_registers, false);
  if (spec.indices) {  // dQ, scores, some columns of dK or dV at a time, and the addresses of their rows
    constexpr int kAtOnce = 32, kAddresses = 24;
    const int tiles = c.bc * c.d_split / (16 * c.warps);
    return c.br * sm80::round_up(spec.head_dim, 16) / (32 * c.warps) +
           tiles * (c.br / sm80::score_parts(c.br, c.d_split) + kAtOnce) + kAddresses;
  }
  if (is_wide(spec))
    return c.bc * c.d_split / (16 * c.warps) *
           (c.br / sm80::score_parts(c.br, c.d_split) +
            (16 * sm80::units_of(spec.head_dim, c.d_split) + columns) / 2);
  const int d = sm80::round_up(spec.head_dim, 16), dv = sm80::round_up(spec.v_dim(), 16);
  const int mt = c.bc * c.d_split / (16 * c.warps);
  return c.d_split == 1 ? mt * (c.br + (d + dv) / 2) : mt * (c.br / 2 + std::max(d, dv) / 2);
}

/// If a step may skip its tile, ptxas keeps more values over the vote, most with score programs and with
/// codes that are converted.
Support check_skip_softmax(const AnalysedSpec& spec, const TileConfig& c) {
  if (!spec.epilogue.skip_softmax) return Support::yes();
  constexpr int kMostValues = 170, kMostBesideOthers = 120, kMostKeysBesideOthers = 64;
  const bool others = !spec.score.empty() || spec.has_scales();
  const int registers = accumulator_registers(spec, c);
  if (registers <= (others ? kMostBesideOthers : kMostValues) && (!others || c.bc <= kMostKeysBesideOthers))
    return Support::yes();
  return Support::no(fmt::format("skip_softmax is for smaller tiles than {}, which keeps {} values a thread",
                                 to_string(c), registers));
}

Support check_d_split(const AnalysedSpec& spec, const TileConfig& c) {
  if (c.d_split == 1) return Support::yes();
  if (c.warps % c.d_split != 0)
    return Support::no(fmt::format("d_split divides the warps, {} does not divide {}", c.d_split, c.warps));
  const bool forward = spec.pass == Pass::forward;
  if (!is_wide(spec)) {
    if (!forward && c.d_split == 2) return Support::yes();
    return Support::no(fmt::format("up to {} columns d_split is 2 and for the backward pass, not {}",
                                   sm80::kMostNarrowColumns, to_string(c)));
  }
  // Each computes S of whole n8 tiles, alone or in pairs.
  const int shared = forward ? c.bc : c.br, tiles = shared / 8, parts = sm80::score_parts(shared, c.d_split);
  if (tiles % parts == 0 && (tiles == parts || tiles / parts % 2 == 0)) return Support::yes();
  return Support::no(fmt::format("{} warps cannot share {} columns of S", c.d_split, shared));
}

/// Whether TMA may copy K and V: rows one after the other in a tensor, as they are.
Support check_tma(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (!c.tma) return Support::yes();
  if (c.family != Family::sm80 || device.compute_capability < 90)
    return Support::no(fmt::format("tma is for family sm80 on sm_90 and newer, not for {} on {}",
                                   to_string(c.family), device.arch));
  if (spec.pass != Pass::forward) return Support::no("tma is for the forward pass");
  if (spec.kv.is_paged() || spec.indices) return Support::no("tma is not for pages and indices");
  if (spec.has_scales() || spec.decodes_kv()) return Support::no("tma is for K and V of Q's type");
  if (c.stages != 1) return Support::no(fmt::format("with tma stages is 1, not {}", c.stages));
  return Support::yes();
}

/// Blocks of the main loop.
std::int64_t hot_blocks(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& c) {
  const KernelPlan planned = kernel(spec, c);
  return main_launch(planned, launches_of(planned, shape)).blocks;
}

/// Whether sharing its Q tiles' keys spares each block as many tiles as combining the splits takes: a launch,
/// and some time for every row.
bool gains_by_split(const AnalysedSpec& spec, const AttentionShape& shape, const TileConfig& c,
                    const DeviceInfo& device) {
  if (spec.pass != Pass::forward) return false;
  const std::int64_t join_tiles = 6 + shape.batch * shape.heads_q * shape.seqlen_q / 400;
  const std::int64_t kv_tiles = tiles(shape.seqlen_kv, c.bc);
  const std::int64_t splits = num_splits(spec, shape, c, device);
  return kv_tiles - tiles(kv_tiles, splits) >= join_tiles && traits(c.family).admits(spec, c, device);
}

/// The backward pass's tiles of one query's heads: no more than there are.
TileConfig backward_tile_of_indices(Family family, const AnalysedSpec& spec, const AttentionShape& shape,
                                    const DeviceInfo& device) {
  const TileConfig smallest = config(family, 16, 16, 4, 1, false, 4);
  for (const int br : {64, 32, 16})
    for (const int bc : {32, 16}) {
      const bool too_large = br > 16 && shape.heads_q <= br / 2 * shape.heads_kv;
      if (const TileConfig c = config(family, br, bc, bc == 32 ? 8 : 4, 1, false, 4);
          !too_large && traits(c.family).admits(spec, c, device))
        return c;
    }
  return smallest;
}

/// Tiles of one query's heads.
TileConfig heuristic_of_indices(const AnalysedSpec& spec, const AttentionShape& shape,
                                const DeviceInfo& device, const Preferences& preferred) {
  const Family family = preferred.tiles.back().family;
  if (spec.pass == Pass::backward) return backward_tile_of_indices(family, spec, shape, device);
  const bool few = shape.heads_q <= kRowsOfOneWarp * shape.heads_kv;
  const TileConfig small = is_wide(spec)
                               ? config(family, kRowsOfOneWarp, 32, 4, 1, false, 4)
                               : one_warp_tile(family, spec, device, 32, preferred.stages_of_one_warp);
  constexpr int kMostRows = 64;
  if (!few || !traits(small.family).admits(spec, small, device))
    for (const TileConfig& c : preferred.tiles)
      if (c.br <= kMostRows && traits(c.family).admits(spec, c, device)) return c;
  return small;
}

}  // namespace

TileConfig config(Family family, int br, int bc, int warps, int stages, bool keep_q, int d_split) {
  return {.family = family,
          .br = br,
          .bc = bc,
          .warps = warps,
          .stages = stages,
          .q_in_registers = keep_q,
          .d_split = d_split};
}

std::vector<TileConfig> good_of(std::initializer_list<Choice> choices) {
  std::vector<TileConfig> good;
  for (const Choice& choice : choices)
    if (choice.good) good.push_back(choice.tile);
  return good;
}

bool is_wide(const AnalysedSpec& spec) {
  return spec.pass == Pass::forward ? spec.v_dim() > sm80::kMostNarrowColumns
                                    : sm80::is_wide(spec.head_dim, spec.v_dim()) || spec.indices;
}

Support supports(const AnalysedSpec& spec) {
  if (spec.has_scales() && sm80::is_wide(spec.head_dim, spec.v_dim()))
    return Support::no(fmt::format("K and V of 8 bits are for head dimensions up to {}, not {} and {}",
                                   sm80::kMostNarrowColumns, spec.head_dim, spec.v_dim()));
  if (spec.pass == Pass::jvp) return sm80_jvp::supports(spec);
  if (spec.pass == Pass::backward_jvp) return Support::no(kNoSecondDerivative);
  const bool plain_lists =
      spec.score.empty() && !spec.epilogue.row_max && !spec.has_scales() && !spec.programs.mask.uses_head;
  if (spec.indices && !plain_lists)
    return Support::no("indices are without a score program, row_max, K and V of 8 bits, and h in a mask");
  if (spec.epilogue.skip_softmax && (spec.indices || spec.prologue.q_codes || is_wide(spec)))
    return Support::no(
        fmt::format("skip_softmax is without indices and Q of 8 bits, and for up to {} columns of V",
                    sm80::kMostNarrowColumns));
  const bool wide = sm80::is_wide(spec.head_dim, spec.v_dim());
  if (spec.partial.two_terms && (wide || spec.indices || spec.kv.quantized()))
    return Support::no(
        fmt::format("two_terms is without indices and quantized K and V, and for up to {} columns",
                    sm80::kMostNarrowColumns));
  if (spec.epilogue.out_format.quantized() && is_wide(spec)) return Support::no(kCodesOfWholeRows);
  if (spec.orders_capture_grads()) return Support::no(kUnorderedGrads);
  return Support::yes();
}

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (spec.pass == Pass::jvp) return sm80_jvp::admits(spec, c, device);
  const bool forward = spec.pass == Pass::forward;
  const auto one_of = [](int value, auto... allowed) { return ((value == allowed) || ...); };
  if (!one_of(c.warps, 1, 2, 4, 8)) return Support::no(fmt::format("warps is 1, 2, 4 or 8, not {}", c.warps));
  if (c.br < 16 || c.br > 256 || c.br % 16 != 0 || c.bc < 16 || c.bc > 256 || c.bc % 16 != 0)
    return Support::no(fmt::format("Br and Bc are multiples of 16 up to 256, not {} and {}", c.br, c.bc));
  if (c.stages < 1 || c.stages > 4) return Support::no(fmt::format("stages is 1 to 4, not {}", c.stages));
  if (c.min_blocks < 1 || c.min_blocks > 8)
    return Support::no(fmt::format("min_blocks is 1 to 8, not {}", c.min_blocks));
  if (Support split = check_d_split(spec, c); !split) return split;
  if (c.pack_gqa || c.join_lists) return Support::no("pack_gqa and join_lists are for family sm90");
  if (Support tma = check_tma(spec, c, device); !tma) return tma;
  if (Support skip = check_skip_softmax(spec, c); !skip) return skip;
  if (spec.indices && !forward && c.stages > 1)
    return Support::no("with indices the backward pass has one stage");
  if (spec.score.is_weight() && forward && c.split) return Support::no(kJoinsByLse);
  if (!spec.epilogue.out_mod.empty() && forward && c.split) return Support::no(kModifiesWholeOut);
  if (spec.indices && c.split) return Support::no("split is not for indices, whose lists are short");
  if (c.q_in_registers && !forward) return Support::no("q_in_registers is for the forward pass");
  // A Q tile must not straddle the padding of D and LSE.
  if (!forward && 128 % c.br != 0)
    return Support::no(fmt::format("backward Br divides 128, {} does not", c.br));
  if (constexpr int kRowsOfAThread = 2; !forward && c.br > kRowsOfAThread * 32 * c.warps)
    return Support::no(fmt::format("{} warps copy LSE and D of {} rows, Br is {}", c.warps,
                                   kRowsOfAThread * 32 * c.warps, c.br));
  const int rows = forward ? c.br : c.bc, warps = c.warps / c.d_split;
  if (rows % (16 * warps) != 0)
    return Support::no(fmt::format("{} warps cannot share {} rows in tiles of 16", warps, rows));
  const int bytes = shared_bytes(spec, c);
  if (bytes > device.shared_per_block)
    return Support::no(fmt::format("{} needs {} bytes of shared memory, {} has {}", to_string(c), bytes,
                                   device.arch, device.shared_per_block));
  const int limit = std::min(255, device.registers_per_sm / (c.warps * 32 * c.min_blocks));
  if (const int registers = accumulator_registers(spec, c); registers > limit - 30)
    return Support::no(
        fmt::format("{} keeps {} values a thread, {} registers are too few", to_string(c), registers, limit));
  return Support::yes();
}

TileConfig with_split(const AnalysedSpec& spec, TileConfig c, const DeviceInfo& device) {
  c.split = true;
  const bool two_fit = 2 * (shared_bytes(spec, c) + kReservedSharedBytes) <= device.shared_per_sm;
  if (spec.pass == Pass::forward) c.min_blocks = c.warps <= 4 && two_fit ? 2 : 1;
  return c;
}

TileConfig one_warp_tile(Family family, const AnalysedSpec& spec, const DeviceInfo& device, int bc,
                         int stages) {
  constexpr int kMostBlocks = 8;  // of registers for as many
  TileConfig c = config(family, kRowsOfOneWarp, bc, 1, stages);
  c.min_blocks =
      std::clamp(device.shared_per_sm / (shared_bytes(spec, c) + kReservedSharedBytes), 1, kMostBlocks);
  return c;
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  if (spec.pass == Pass::jvp) return sm80_jvp::kernel(spec, c);
  Entry main = main_entry(c.family, spec, c.warps * 32, shared_bytes(spec, c));
  main.min_blocks = c.min_blocks;
  if (c.tma) {
    main.header = "flashjit/sm80/forward_tma.cuh";
    main.tensor_maps = true;
  }
  KernelPlan kernel = tensor_core_kernel(spec, c, main, {.tile_lists = spec.has_tile_lists});
  if (c.tma)
    kernel.tensor_boxes = {
        .kv_rows = c.bc, .k_columns = sm80::pitch(spec.head_dim), .v_columns = sm80::pitch(spec.v_dim())};
  kernel.constants.push_back({"kListedRows", c.br});
  if (spec.pass == Pass::backward) kernel.constants.push_back({"kExchanged", exchanged_values(spec, c)});
  return kernel;
}

TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
                     const Preferences& preferred) {
  if (spec.indices) return heuristic_of_indices(spec, shape, device, preferred);
  const std::vector<TileConfig>& choices = preferred.tiles;
  const FamilyTraits& family = traits(choices.back().family);
  if (spec.has_scales() && shape.seqlen_q <= kRowsOfOneWarp) {
    TileConfig c =
        one_warp_tile(family.family, spec, device, preferred.keys_of_one_warp, preferred.stages_of_one_warp);
    c.split = true;
    c.split = gains_by_split(spec, shape, c, device);
    if (family.admits(spec, c, device)) return c;
  }
  TileConfig best = choices.back();
  std::int64_t most = -1;
  for (const TileConfig& c : choices) {
    if (!family.admits(spec, c, device)) continue;
    if (const TileConfig shared = with_split(spec, c, device);
        spec.pass == Pass::backward && num_splits(spec, shape, shared, device) > 1)
      return shared;
    const std::int64_t blocks = hot_blocks(spec, shape, c);
    if (blocks > most) best = c, most = blocks;
    if (blocks * 10 >= device.multiprocessors * std::int64_t{9}) return c;
  }
  if (spec.pass == Pass::jvp) return best;
  const bool few_wide_rows = spec.pass == Pass::forward && is_wide(spec) && shape.seqlen_q <= kRowsOfOneWarp;
  const TileConfig shared = with_split(
      spec, few_wide_rows ? config(family.family, kRowsOfOneWarp, 32, 4, 1, false, 4) : choices.back(),
      device);
  return gains_by_split(spec, shape, shared, device) ? shared : best;
}

}  // namespace flashjit::plan::mma_sync

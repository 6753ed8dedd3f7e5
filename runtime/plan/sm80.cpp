// Family sm80: mma.sync, ldmatrix and cp.async. Device side in templates/sm80.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>

#include "plan/sm80_jvp.hpp"
#include "plan/tensor_core.hpp"
#include "plan/tiles.hpp"
#include "templates/sm80/layout.cuh"

namespace flashjit::plan {
namespace {

/// Whether one warp's registers do not hold its rows of O, or of dK and dV. So do warps share the heads of a
/// query that has a list of keys, backward.
bool is_wide(const AnalysedSpec& spec) {
  return spec.pass == Pass::forward ? spec.v_dim() > sm80::kMostNarrowColumns
                                    : sm80::is_wide(spec.head_dim, spec.v_dim()) || spec.indices;
}

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
  return sm80::BackwardLayout{
      c.br, c.bc, spec.head_dim, spec.v_dim(), c.stages, exchanged_values(spec, c), spec.indices}
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

constexpr int kKeysOfCodes = 32;  // of a product of codes
/// Whether Q, too, is multiplied as codes; else it is converted.
bool multiplies_codes(const AnalysedSpec& spec, const DeviceInfo& device) {
  return sm80::multiplies_codes(spec.q_codes, spec.has_key_scales(), device.compute_capability);
}

Support supports(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (!is_attention(spec.pass)) return Support::no(kNoProducts);
  if (spec.dtype != DType::fp16 && spec.dtype != DType::bf16)
    return Support::no(fmt::format("its kernels take fp16 and bf16, the spec has {}", to_string(spec.dtype)));
  if (spec.has_scales() && sm80::is_wide(spec.head_dim, spec.v_dim()))
    return Support::no(fmt::format("K and V of 8 bits are for head dimensions up to {}, not {} and {}",
                                   sm80::kMostNarrowColumns, spec.head_dim, spec.v_dim()));
  if (device.compute_capability < 80)
    return Support::no(
        fmt::format("needs mma.m16n8k16 and cp.async of sm_80, the device is {}", device.arch));
  if (spec.pass == Pass::jvp) return sm80_jvp::supports(spec);
  const bool plain_lists =
      spec.score.empty() && !spec.row_max && !spec.has_scales() && !spec.programs.mask.uses_head;
  if (spec.indices && !plain_lists)
    return Support::no("indices are without a score program, row_max, K and V of 8 bits, and h in a mask");
  if (spec.orders_capture_grads()) return Support::no(kUnorderedGrads);
  return Support::yes();
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

Support admits(const AnalysedSpec& spec, const TileConfig& c, const DeviceInfo& device) {
  if (c.family != Family::sm80) return Support::no("the configuration is of another family");
  if (Support s = supports(spec, device); !s) return s;
  if (spec.pass == Pass::jvp) return sm80_jvp::admits(spec, c, device);
  const bool forward = spec.pass == Pass::forward;
  const auto one_of = [](int value, auto... allowed) { return ((value == allowed) || ...); };
  if (!one_of(c.warps, 1, 2, 4, 8)) return Support::no(fmt::format("warps is 1, 2, 4 or 8, not {}", c.warps));
  if (c.br < 16 || c.br > 256 || c.br % 16 != 0 || c.bc < 16 || c.bc > 256 || c.bc % 16 != 0)
    return Support::no(fmt::format("Br and Bc are multiples of 16 up to 256, not {} and {}", c.br, c.bc));
  if (multiplies_codes(spec, device) && c.bc % kKeysOfCodes != 0)
    return Support::no(
        fmt::format("products of 8 bits have {} keys, Bc is a multiple, not {}", kKeysOfCodes, c.bc));
  if (c.stages < 1 || c.stages > 4) return Support::no(fmt::format("stages is 1 to 4, not {}", c.stages));
  if (c.min_blocks < 1 || c.min_blocks > 8)
    return Support::no(fmt::format("min_blocks is 1 to 8, not {}", c.min_blocks));
  if (Support split = check_d_split(spec, c); !split) return split;
  if (c.pack_gqa) return Support::no("pack_gqa is for family sm90");
  if (spec.indices && !forward && c.stages > 1)
    return Support::no("with indices the backward pass has one stage");
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

TileConfig config(int br, int bc, int warps, int stages, bool q_in_registers = false, int d_split = 1) {
  return {.family = Family::sm80,
          .br = br,
          .bc = bc,
          .warps = warps,
          .stages = stages,
          .q_in_registers = q_in_registers,
          .d_split = d_split};
}

constexpr int kReservedBytes = 1024;  // of a block

/// Blocks share what tiles meet. Keys by two blocks a multiprocessor, which hide each other's waits, where
/// both fit: registers of four warps allow it.
TileConfig with_split(const AnalysedSpec& spec, TileConfig c, const DeviceInfo& device) {
  c.split = true;
  const bool two_fit = 2 * (shared_bytes(spec, c) + kReservedBytes) <= device.shared_per_sm;
  if (spec.pass == Pass::forward) c.min_blocks = c.warps <= 4 && two_fit ? 2 : 1;
  return c;
}

/// Whether registers are spared: no score, no packed sequences, no pages, one head dimension. On Hopper, as
/// ptxas keeps more for other architectures.
bool is_lean_on_hopper(const AnalysedSpec& spec, const DeviceInfo& device) {
  return device.compute_capability == 90 && spec.head_dim == spec.v_dim() && spec.score.empty() &&
         !spec.varlen && !spec.kv.is_paged();
}
/// And nothing but lengths of keys, a causal mask or an order of additions asked for: the fewest registers.
bool is_plain_on_hopper(const AnalysedSpec& spec, const DeviceInfo& device) {
  return is_lean_on_hopper(spec, device) && (spec.mask.empty() || spec.is_causal) && !spec.dropout &&
         !spec.has_block_map();
}

/// A tile, and whether it is good for what is asked.
struct Choice {
  TileConfig tile;
  bool good = true;
};

std::vector<TileConfig> good_of(std::initializer_list<Choice> choices) {
  std::vector<TileConfig> good;
  for (const Choice& choice : choices)
    if (choice.good) good.push_back(choice.tile);
  return good;
}

// Good tiles, best first, by the wider head dimension; the last of each fits every device. Measured on
// Hopper, also with one block a multiprocessor, as smaller devices have. What spills is left out, but for a
// few words with programs that are faster with it all the same (softcap at d64).

/// With K and V of 8 bits, whose conversion takes registers, and time for each warp that does it: warps of
/// many rows.
std::vector<TileConfig> forward_preferences_of_codes(const AnalysedSpec& spec, const DeviceInfo& device) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool by_instruction = device.compute_capability >= 89, map = spec.has_block_map();
  const bool lean = !spec.has_key_scales() && !spec.varlen && !spec.kv.is_paged() && spec.score.empty() &&
                    !(spec.q_codes && (map || spec.dropout));
  return good_of(
      {{config(128, 64, 4, 1), d <= 64 && lean && spec.mask.empty()},
       {config(128, 32, 4, 1), d <= 96 || (d <= 128 && lean)},
       {config(128, 64, 8, 1), d <= 128 && !(map && spec.dropout) && (spec.score.empty() || by_instruction)},
       {config(64, 64, 4, 1), d <= 128 || (d <= 192 && !map && (by_instruction || !spec.q_codes))},
       {config(64, 32, 4, 1), d <= 192 || by_instruction},
       {config(64, 16, 4, 1), d > 192}});
}

/// Where Q is of 8 bits, too: nothing is converted.
std::vector<TileConfig> forward_preferences_of_products_of_codes(const AnalysedSpec& spec) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  return good_of({{config(128, 64, 8, 2), d <= 128},
                  {config(64, 64, 4, 2), d <= 128},
                  {config(64, 32, 4, 2), d <= 192},
                  {config(64, 32, 4, 1)}});
}

/// For queries that all fit one warp: blocks of one warp each, as many as fit, which hide each other's
/// waits. K and V are then converted once.
constexpr int kRowsOfOneWarp = 16;
TileConfig one_warp_tile(const AnalysedSpec& spec, const DeviceInfo& device, int bc, int stages) {
  constexpr int kMostBlocks = 8;  // of registers for as many
  TileConfig c = config(kRowsOfOneWarp, bc, 1, stages);
  c.min_blocks = std::clamp(device.shared_per_sm / (shared_bytes(spec, c) + kReservedBytes), 1, kMostBlocks);
  return c;
}

// Above 256 columns the largest that fits a device comes first.
std::vector<TileConfig> wide_forward_preferences(const AnalysedSpec& spec) {
  if (!is_wide(spec)) return {config(64, 64, 4, 1), config(64, 32, 4, 1), config(32, 32, 2, 1)};
  return good_of({{config(64, 64, 8, 1, false, 4), !(spec.kv.shared_kv && spec.varlen)},
                  {config(64, 32, 8, 1, false, 2)},
                  {config(32, 32, 4, 1, false, 2)},
                  {config(32, 16, 4, 1, false, 2), !spec.kv.shared_kv}});
}
std::vector<TileConfig> wide_backward_preferences(const AnalysedSpec& spec) {
  const bool spare = spec.score.empty() && !spec.dropout && !spec.varlen && !spec.has_block_map();
  return good_of({{config(32, 64, 8, 1, false, 2), spare},
                  {config(64, 32, 8, 1, false, 4)},
                  {config(32, 32, 8, 1, false, 4)},
                  {config(16, 32, 8, 1, false, 4)},
                  {config(16, 16, 4, 1, false, 4)}});
}

std::vector<TileConfig> forward_preferences(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (multiplies_codes(spec, device)) return forward_preferences_of_products_of_codes(spec);
  if (spec.has_scales()) return forward_preferences_of_codes(spec, device);
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool large = device.compute_capability < 100;
  const bool roomy = device.shared_per_block > 200 * 1024;  // two blocks of the tiles that need most
  if (d <= 64) {
    const int stages = device.shared_per_block > 120 * 1024 ? 2 : 1;
    return good_of({{config(128, 64, 4, stages)}, {config(64, 128, 4, 1), large}, {config(64, 64, 4, 1)}});
  }
  if (d <= 128) {
    const bool lengths_spill =
        (spec.varlen || spec.kv.is_paged()) &&
        (spec.has_block_map() || spec.partial.fp32_out || device.compute_capability == 90);
    // A mask beside lengths spills there by some words.
    const bool masks_lengths = spec.kv.has_lengths() && !spec.mask.empty();
    return good_of({{config(128, 64, 4, 1), d == 128 && is_plain_on_hopper(spec, device) && !masks_lengths},
                    {config(128, 48, 4, 1), large && !lengths_spill},
                    {config(128, 32, 4, 1), large || !(spec.partial.fp32_out && spec.has_block_map())},
                    {config(64, 64, 4, 1)},
                    {config(64, 32, 4, 1)}});
  }
  if (d > sm80::kMostNarrowColumns) return wide_forward_preferences(spec);
  const bool packed_map_spills = spec.varlen && spec.has_block_map() && device.compute_capability == 90;
  return good_of({{config(128, 128, 8, 1), d <= 192 && spec.v_dim() <= 128},
                  {config(128, 80, 8, 2), d <= 160},
                  {config(128, 48, 8, 2, true), d <= 192 && !packed_map_spills},
                  {config(64, 64, 4, 1), roomy},
                  {config(128, 64, 8, 1)},
                  {config(64, 64, 4, 1)},
                  {config(64, 32, 4, 1)}});
}

/// The largest spill with gradients of captured tensors, which keep S and their addresses until dS is known,
/// and slopes as many values again.
std::vector<TileConfig> backward_preferences(const AnalysedSpec& spec, const DeviceInfo& device) {
  const int d = std::max(spec.head_dim, spec.v_dim());
  const bool capture_grads = spec.has_capture_grads;
  const bool and_slopes = capture_grads && spec.programs.has_slope;
  const bool plain = is_plain_on_hopper(spec, device);
  const auto pairs = [](int br, int bc, int stages) { return config(br, bc, 8, stages, false, 2); };
  if (d <= 64) {
    const bool large = device.compute_capability < 100 && !capture_grads;
    return good_of({{config(32, 128, 4, 2), large},
                    {pairs(64, 64, 2), large},  // of few keys, for all multiprocessors
                    {config(64, 64, 4, 2), !and_slopes},
                    {config(32, 64, 4, 2)}});
  }
  if (d <= 128 && capture_grads) {
    const bool wide_pairs = !and_slopes && !spec.dropout && !spec.has_block_map();
    return good_of({{pairs(32, 128, 2), wide_pairs},
                    {config(32, 128, 8, 1), !and_slopes},
                    {pairs(64, 64, 2)},
                    {pairs(32, 64, 2)},
                    {config(32, 64, 4, 1), !and_slopes},
                    {pairs(32, 64, 1)}});
  }
  if (d <= 128) {
    return good_of({{pairs(64, 128, 2), d <= 96 ? is_lean_on_hopper(spec, device) : d == 128 && plain},
                    {pairs(32, 128, 2), d > 112},
                    {config(64, 128, 8, 1)},
                    {pairs(64, 64, 2)},
                    {pairs(32, 64, 2)},
                    {config(32, 64, 4, 1)}});
  }
  if (d > sm80::kMostNarrowColumns) return wide_backward_preferences(spec);
  return good_of({{pairs(64, 64, 2), d <= 192 || (d <= 240 && plain)},
                  {pairs(32, 64, 2)},
                  {pairs(32, 64, 1), !and_slopes},
                  {pairs(16, 64, 1)}});
}

std::vector<TileConfig> preferences(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (spec.pass == Pass::jvp) return sm80_jvp::preferences(spec);
  return spec.pass == Pass::forward ? forward_preferences(spec, device) : backward_preferences(spec, device);
}

/// Above 256 columns.
std::vector<TileConfig> wide_space() {
  std::vector<TileConfig> space;
  for (const int warps : {4, 8})
    for (const int stages : {1, 2})
      for (const int d_split : {1, 2, 4})
        for (const int br : {16, 32, 64, 128})
          for (const int bc : {16, 32, 64}) space.push_back(config(br, bc, warps, stages, false, d_split));
  return space;
}

std::vector<TileConfig> search_space(const AnalysedSpec& spec, const DeviceInfo& device) {
  if (spec.pass == Pass::jvp) return sm80_jvp::search_space(spec, device);
  const bool forward = spec.pass == Pass::forward;
  std::vector<TileConfig> found;
  const auto consider = [&](TileConfig c) {
    if (admits(spec, c, device)) found.push_back(c);
  };
  if (std::max(spec.head_dim, spec.v_dim()) > sm80::kMostNarrowColumns) {
    for (const TileConfig& c : wide_space()) {
      consider(c);
      if (forward && c.br <= 64) consider(with_split(spec, c, device));
    }
    return found;
  }
  constexpr std::array kForwardRows{64, 128, 192};
  constexpr std::array kForwardColumns{32, 48, 64, 80, 96, 128};
  constexpr std::array kBackwardRows{16, 32, 64, 128};
  constexpr std::array kBackwardColumns{32, 64, 96, 128};
  for (const int warps : {4, 8})
    for (const int stages : {1, 2, 3}) {
      if (forward) {
        for (const int br : kForwardRows)
          for (const int bc : kForwardColumns)
            for (const bool q_in_registers : {false, true})
              consider(config(br, bc, warps, stages, q_in_registers));
        for (const int bc : {32, 64}) consider(with_split(spec, config(64, bc, warps, stages), device));
      } else {
        for (const int br : kBackwardRows)
          for (const int bc : kBackwardColumns)
            for (const int d_split : {1, 2}) consider(config(br, bc, warps, stages, false, d_split));
      }
    }
  if (!forward)
    for (const TileConfig& c : preferences(spec, device)) consider(with_split(spec, c, device));
  if (spec.has_scales())
    for (const int bc : {32, 64})
      for (const int stages : {2, 3, 4})
        for (const bool split : {false, true}) {
          TileConfig c = one_warp_tile(spec, device, bc, stages);
          c.split = split;
          consider(c);
        }
  return found;
}

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& c) {
  if (spec.pass == Pass::jvp) return sm80_jvp::kernel(spec, c);
  Entry main = main_entry(Family::sm80, spec, c.warps * 32, shared_bytes(spec, c));
  main.min_blocks = c.min_blocks;
  KernelPlan kernel = tensor_core_kernel(spec, c, main, {.tile_lists = spec.has_tile_lists});
  kernel.constants.push_back({"kListedRows", c.br});
  if (spec.pass == Pass::backward) kernel.constants.push_back({"kExchanged", exchanged_values(spec, c)});
  return kernel;
}

std::string functions(const AnalysedSpec& /*spec*/, const TileConfig& /*config*/) { return {}; }

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
  return kv_tiles - tiles(kv_tiles, splits) >= join_tiles && admits(spec, c, device);
}

/// The backward pass's tiles of one query's heads: no more than there are.
TileConfig backward_tile_of_indices(const AnalysedSpec& spec, const AttentionShape& shape,
                                    const DeviceInfo& device) {
  const TileConfig smallest = config(16, 16, 4, 1, false, 4);
  for (const int br : {64, 32, 16})
    for (const int bc : {32, 16}) {
      const bool too_large = br > 16 && shape.heads_q <= br / 2 * shape.heads_kv;
      if (const TileConfig c = config(br, bc, bc == 32 ? 8 : 4, 1, false, 4);
          !too_large && admits(spec, c, device))
        return c;
    }
  return smallest;
}

/// Tiles of one query's heads.
TileConfig heuristic_of_indices(const AnalysedSpec& spec, const AttentionShape& shape,
                                const DeviceInfo& device) {
  if (spec.pass == Pass::backward) return backward_tile_of_indices(spec, shape, device);
  const bool few = shape.heads_q <= kRowsOfOneWarp * shape.heads_kv;
  const TileConfig small =
      is_wide(spec) ? config(kRowsOfOneWarp, 32, 4, 1, false, 4) : one_warp_tile(spec, device, 32, 2);
  constexpr int kMostRows = 64;
  if (!few || !admits(spec, small, device))
    for (const TileConfig& c : preferences(spec, device))
      if (c.br <= kMostRows && admits(spec, c, device)) return c;
  return small;
}

/// The first good configuration whose main loop gives nine multiprocessors of ten a block, else the one with
/// the most blocks. Where multiprocessors have none, blocks share what the tiles meet, if that is much: the
/// keys of small Q tiles, the queries of the best KV tiles.
TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device) {
  if (spec.indices) return heuristic_of_indices(spec, shape, device);
  if (spec.has_scales() && shape.seqlen_q <= kRowsOfOneWarp) {
    const bool spills = std::max(spec.head_dim, spec.v_dim()) > 192 &&
                        (spec.dropout || spec.has_key_scales() || !spec.score.empty());
    TileConfig c = one_warp_tile(spec, device, spills && !multiplies_codes(spec, device) ? 16 : 32, 2);
    c.split = true;
    c.split = gains_by_split(spec, shape, c, device);
    if (admits(spec, c, device)) return c;
  }
  const std::vector<TileConfig> choices = preferences(spec, device);
  TileConfig best = choices.back();
  std::int64_t most = -1;
  for (const TileConfig& c : choices) {
    if (!admits(spec, c, device)) continue;
    if (const TileConfig shared = with_split(spec, c, device);
        spec.pass == Pass::backward && num_splits(spec, shape, shared, device) > 1)
      return shared;
    const std::int64_t blocks = hot_blocks(spec, shape, c);
    if (blocks > most) best = c, most = blocks;
    if (blocks * 10 >= device.multiprocessors * std::int64_t{9}) return c;
  }
  if (spec.pass == Pass::jvp) return best;
  const bool few_wide_rows = spec.pass == Pass::forward && is_wide(spec) && shape.seqlen_q <= kRowsOfOneWarp;
  const TileConfig shared =
      with_split(spec, few_wide_rows ? config(kRowsOfOneWarp, 32, 4, 1, false, 4) : choices.back(), device);
  return gains_by_split(spec, shape, shared, device) ? shared : best;
}

}  // namespace

const FamilyTraits& sm80_traits() {
  static constexpr FamilyTraits kTraits{Family::sm80, ComputedBy::warps, supports, admits,
                                        heuristic,    search_space,      kernel,   tensor_core_workspace,
                                        functions};
  return kTraits;
}

}  // namespace flashjit::plan

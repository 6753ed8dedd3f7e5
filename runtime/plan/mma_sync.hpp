// What the families of templates/sm80 share: sm80 itself, and sm75, whose Problem names other instructions.
#pragma once

#include <initializer_list>

#include "plan/tensor_core.hpp"

namespace flashjit::plan::mma_sync {

/// Rows of one mma.sync, which queries that all fit one warp have.
constexpr int kRowsOfOneWarp = 16;

/// `keep_q`: Q stays in registers.
TileConfig config(Family family, int br, int bc, int warps, int stages, bool keep_q = false, int d_split = 1);

/// A tile, and whether it is good for what is asked.
struct Choice {
  TileConfig tile;
  bool good = true;
};
std::vector<TileConfig> good_of(std::initializer_list<Choice> choices);

/// Whether one warp's registers do not hold its rows of O, or of dK and dV. So do warps share the heads of a
/// query that has a list of keys, backward.
bool is_wide(const AnalysedSpec& spec);

/// What the templates have no kernel for, whatever the device.
Support supports(const AnalysedSpec& spec);
/// Whether a tile is one of the templates' and fits the device: its shape, shared memory and registers.
Support admits(const AnalysedSpec& spec, const TileConfig& config, const DeviceInfo& device);

/// Blocks share what tiles meet. Keys by two blocks a multiprocessor, which hide each other's waits, where
/// both fit: registers of four warps allow it.
TileConfig with_split(const AnalysedSpec& spec, TileConfig config, const DeviceInfo& device);
/// For queries that all fit one warp: blocks of one warp each, as many as fit, which hide each other's
/// waits. K and V are then converted once.
TileConfig one_warp_tile(Family family, const AnalysedSpec& spec, const DeviceInfo& device, int bc,
                         int stages);

/// What a family prefers for a spec.
struct Preferences {
  std::vector<TileConfig> tiles;  ///< best first
  int keys_of_one_warp;           ///< Bc of one_warp_tile(), with K and V of 8 bits
  int stages_of_one_warp;
};
/// The first good configuration whose main loop gives nine multiprocessors of ten a block, else the one with
/// the most blocks. Where multiprocessors have none, blocks share what the tiles meet, if that is much: the
/// keys of small Q tiles, the queries of the best KV tiles.
TileConfig heuristic(const AnalysedSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
                     const Preferences& preferred);

KernelPlan kernel(const AnalysedSpec& spec, const TileConfig& config);

}  // namespace flashjit::plan::mma_sync

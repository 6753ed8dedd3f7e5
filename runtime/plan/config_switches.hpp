// The switches of a tile configuration, besides its family, tile and warps: one row says all that is the same
// for each.
#pragma once

#include <array>
#include <string_view>

#include "flashjit/spec.hpp"

namespace flashjit::plan {

struct ConfigSwitch {
  std::string_view text;      ///< in a configuration: "pack_gqa", or before a number, as in "s2"
  std::string_view constant;  ///< of the Problem: "kPackGqa"; empty: kernels need not know
  bool TileConfig::*on = nullptr;
  int TileConfig::*number = nullptr;  ///< if it is one, from 1 to `max`
  int max = 0;

  constexpr int value(const TileConfig& config) const { return on ? config.*on : config.*number; }
};

/// In the order of a configuration's text.
inline constexpr std::array kConfigSwitches{
    ConfigSwitch{.text = "s", .constant = "kStages", .number = &TileConfig::stages, .max = 16},
    ConfigSwitch{.text = "q_in_registers", .constant = "kQInRegisters", .on = &TileConfig::q_in_registers},
    ConfigSwitch{.text = "d_split", .constant = "kDSplit", .number = &TileConfig::d_split, .max = 8},
    ConfigSwitch{
        .text = "min_blocks", .constant = "kMinBlocks", .number = &TileConfig::min_blocks, .max = 32},
    ConfigSwitch{.text = "split", .constant = "kSplit", .on = &TileConfig::split},
    ConfigSwitch{.text = "pack_gqa", .constant = "kPackGqa", .on = &TileConfig::pack_gqa},
    ConfigSwitch{.text = "cluster", .constant = "kClusterSplit", .on = &TileConfig::cluster},
    ConfigSwitch{.text = "tma", .constant = "kTma", .on = &TileConfig::tma},
    ConfigSwitch{.text = "decode_cache", .constant = {}, .on = &TileConfig::decode_cache},
    ConfigSwitch{.text = "join_lists", .constant = "kJoinsLists", .on = &TileConfig::join_lists},
};

}  // namespace flashjit::plan

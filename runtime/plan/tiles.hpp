// What the families share: counting tiles, and naming entries.
#pragma once

#include "plan/family.hpp"

namespace flashjit::plan {

constexpr std::int64_t tiles(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

/// Threads of the kernels around the main one, and rows of one head that each block of them takes.
constexpr int kAuxiliaryThreads = 128;

/// Bytes of a multiprocessor's shared memory that the driver keeps for each block.
constexpr int kReservedSharedBytes = 1024;

/// How many blocks, or clusters, of an entry the device holds.
std::int64_t blocks_at_once(const Entry& entry, const DeviceInfo& device);

/// The launch of the first entry that holds a main loop.
const Launch& main_launch(const std::vector<Entry>& entries, const std::vector<Launch>& launches);

/// In how many parts blocks share what each tile meets, keys forward and queries backward: as many as fill
/// the device and are worth it, if the configuration has them share, else 1. Of a normalized spec.
std::int64_t tile_parts(const AttentionSpec& spec, const AttentionShape& shape, const TileConfig& config,
                        const DeviceInfo& device);

/// An entry from templates/<family>/<header>.cuh.
Entry family_entry(Family family, const std::string& name, const std::string& header, int threads);
/// An entry from templates/auxiliary/<header>.cuh, by default of its own name.
Entry auxiliary_entry(const std::string& name, const std::string& header = {});

}  // namespace flashjit::plan

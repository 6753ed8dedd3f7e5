// What the families share: counting tiles, and naming entries.
#pragma once

#include <algorithm>

#include "plan/family.hpp"

namespace flashjit::plan {

constexpr std::int64_t tiles(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

/// Of a forward pass whose blocks share keys: in how many parts, so that `works` Q tiles fill `slots` blocks.
constexpr std::int64_t key_parts(std::int64_t works, std::int64_t slots, std::int64_t kv_tiles) {
  return std::max<std::int64_t>(1, std::min(slots / std::max<std::int64_t>(works, 1), kv_tiles));
}

/// Threads of the kernels around the main one, and rows of one head that each block of them takes.
constexpr int kAuxiliaryThreads = 128;

/// Bytes of a multiprocessor's shared memory that the driver keeps for each block.
constexpr int kReservedSharedBytes = 1024;

/// An entry from templates/<family>/<header>.cuh.
Entry family_entry(Family family, const std::string& name, const std::string& header, int threads);
/// An entry from templates/auxiliary/<header>.cuh, by default of its own name.
Entry auxiliary_entry(const std::string& name, const std::string& header = {});

}  // namespace flashjit::plan

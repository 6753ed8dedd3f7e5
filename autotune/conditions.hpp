// How warm and fast the GPU was while something was measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "device/sensors.hpp"

namespace flashjit::autotune {

/// A reading over time.
struct Range {
  int first = 0, last = 0, least = 0, most = 0;

  friend bool operator==(const Range&, const Range&) = default;
};

/// What the sensors said, from the first reading to the last. What is unknown has no value.
struct Conditions {
  std::optional<Range> clock_mhz, celsius;
  std::uint64_t slowed_by = 0;  ///< device::GpuState's, of all readings

  void add(const device::GpuState& state);
  void add(const Conditions& later);

  friend bool operator==(const Conditions&, const Conditions&) = default;
};

/// "the power limit, heat": what held the clocks back, without what merely chose them; empty: nothing.
std::string slowed_text(std::uint64_t slowed_by);
/// "clock 1980 -> 1755 MHz, 35 -> 61 C, slowed by the power limit", from the first reading to the last; empty
/// where nothing is known.
std::string to_string(const Conditions& conditions);

}  // namespace flashjit::autotune

#include "autotune/conditions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace flashjit::autotune {
namespace {

/// NVML's bits for what slows a GPU down; the others say that it idles, or which clocks were asked for.
constexpr std::array<std::pair<std::uint64_t, const char*>, 3> kReasons{
    {{0x04, "the power limit"}, {0x20 | 0x40, "heat"}, {0x08 | 0x80, "the hardware's protection"}}};

std::optional<Range> range_of(const std::optional<int>& value) {
  if (!value) return {};
  return Range{*value, *value, *value, *value};
}

void extend(std::optional<Range>& range, const std::optional<Range>& later) {
  if (!later) return;
  if (!range) range = later;
  range = {range->first, later->last, std::min(range->least, later->least),
           std::max(range->most, later->most)};
}

std::string arrow(const std::optional<Range>& range) {
  return range ? fmt::format("{} -> {}", range->first, range->last) : "unknown";
}

}  // namespace

void Conditions::add(const device::GpuState& state) {
  add(Conditions{range_of(state.clock_mhz), range_of(state.celsius), state.slowed_by});
}

void Conditions::add(const Conditions& later) {
  extend(clock_mhz, later.clock_mhz);
  extend(celsius, later.celsius);
  slowed_by |= later.slowed_by;
}

std::string slowed_text(std::uint64_t slowed_by) {
  std::string text;
  for (const auto& [bits, name] : kReasons)
    if (slowed_by & bits) text += fmt::format("{}{}", text.empty() ? "" : ", ", name);
  return text;
}

std::string to_string(const Conditions& conditions) {
  if (!conditions.clock_mhz && !conditions.celsius) return "";
  const std::string slowed = slowed_text(conditions.slowed_by);
  return fmt::format("clock {} MHz, {} C{}{}", arrow(conditions.clock_mhz), arrow(conditions.celsius),
                     slowed.empty() ? "" : ", slowed by ", slowed);
}

}  // namespace flashjit::autotune

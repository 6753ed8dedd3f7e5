// A kernel that a family plans compiles, without spills in its main loop, and fits the device.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <sstream>
#include <string>
#include <string_view>

#include "compile/compiler.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {

/// The line in which ptxas says that it made the kernel slower than it was written, with products that wait
/// for each other (C7510 and its kin) or registers that do not move (C7508); empty: there is none.
inline std::string performance_loss(const std::string& log) {
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    const auto has = [&](const char* word) { return line.find(word) != line.npos; };
    if ((has("wgmma") && has("serializ")) || (has("setmaxnreg") && has("ignored"))) return line;
  }
  return {};
}

/// By the family's own tile for the shape. A run has an eighth of them (is_drawn()). Registers go to the
/// test's report.
inline void expect_no_spills(const compile::Compiler& compiler, const KernelSpec& spec,
                             const plan::FamilyTraits& family, const AttentionShape& shape,
                             const DeviceInfo& device) {
  const TileConfig config = family.heuristic(spec, shape, device);
  const std::string name = fmt::format("{} {} {}", to_string(spec), to_string(config), device.arch);
  if (!is_drawn(name, 8)) return;
  SCOPED_TRACE(name);
  const KernelSource source = render::render(spec, config, device, render::TemplateSet::embedded(), {});
  const CompiledKernel kernel = compiler.compile(source);
  EXPECT_FALSE(spills_in_main_loop(kernel, source.entries));
  EXPECT_EQ(performance_loss(kernel.log), "");
  for (const plan::Entry& entry : source.entries) EXPECT_LE(entry.shared_bytes, device.shared_per_block);
  for (const EntryResources& used : kernel.resources)
    testing::Test::RecordProperty(fmt::format("{}_{}", to_string(config), used.entry), used.registers);
}

/// A spec in every family that has it, of a large and of a small problem, alternately. `wanted(nth)`: whether
/// the nth of these families counts.
template <class Wanted>
void expect_no_spills_in_families(const compile::Compiler& compiler, const KernelSpec& spec,
                                  const DeviceInfo& device, Turns& turns, Wanted wanted) {
  int families = 0;
  for (const plan::FamilyTraits& family : plan::families()) {
    if (!is_planned(family, device) || !family.supports(spec, device)) continue;
    if (!wanted(families++)) continue;
    for (const AttentionShape& shape : turns.of<AttentionShape>({4, 32, 8, 4096, 4096}, {1, 2, 1, 100, 130}))
      expect_no_spills(compiler, spec, family, shape, device);
  }
}

/// One pass of each spec.
inline void expect_no_spills_of_pass(std::span<const char* const> specs, Pass pass, const char* arch) {
  const auto compiler = compile::Compiler::open();
  const DeviceInfo device = DeviceInfo::parse(arch);
  Turns turns;
  for (const char* text : specs) {
    turns.next_row();
    expect_no_spills_in_families(*compiler, {parse_spec(text), pass}, device, turns,
                                 [](int) { return true; });
  }
}

/// Both passes of each spec, by every family that has them, for one of the architectures by turns, at night
/// for all; of a large and of a small problem, alternately. `wanted(pass, nth)`: whether the nth family that
/// has the pass counts.
template <class Wanted>
void expect_no_spills_by_turns(std::span<const char* const> specs, std::span<const std::string_view> archs,
                               std::string_view arch, Wanted wanted) {
  const auto compiler = compile::Compiler::open();
  const DeviceInfo device = DeviceInfo::parse(std::string(arch));
  Turns turns;
  auto place = static_cast<std::size_t>(std::ranges::find(archs, arch) - archs.begin());
  for (const char* text : specs) {
    if (++place % archs.size() != 0 && !every_kernel()) continue;
    turns.next_row();
    for (const Pass pass : {Pass::forward, Pass::backward})
      expect_no_spills_in_families(*compiler, {parse_spec(text), pass}, device, turns,
                                   [&](int nth) { return wanted(pass, nth); });
  }
}

}  // namespace flashjit::test

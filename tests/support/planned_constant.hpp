// A constant of a planned kernel's Problem.
#pragma once

#include <algorithm>
#include <string_view>
#include <variant>

#include "plan/family.hpp"

namespace flashjit::test {

/// As the configuration's family plans it; -1: the Problem has none of that name.
inline int planned_constant(const KernelSpec& spec, const TileConfig& config, std::string_view name) {
  const plan::KernelPlan kernel = plan::traits(config.family).kernel(spec, config);
  const auto found = std::ranges::find(kernel.constants, name, &expr::Constant::name);
  if (found == kernel.constants.end()) return -1;
  return std::visit([](auto value) { return static_cast<int>(value); }, found->value);
}

}  // namespace flashjit::test

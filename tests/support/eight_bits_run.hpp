// Attention with Q, K and V of 8 bits, without a cache, as the command compares it with the reference.
#pragma once

#include <fmt/format.h>

#include <ostream>
#include <string>

#include "plan/family.hpp"
#include "tests/support/gpu_support.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {

struct EightBits {
  std::string spec;
  AttentionShape shape;
};
inline void PrintTo(const EightBits& test, std::ostream* out) {
  *out << test.spec << " " << to_string(test.shape);
}

/// In the families that take it, with their heuristics' tiles; of this GPU, or of one that the emulator
/// plays.
inline void check_eight_bits(const EightBits& test, int capability = 0) {
  const TemporaryDirectory folder;
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75}) {
    const KernelSpec spec = spec_for(family, test.spec).normalized();
    const plan::FamilyTraits& traits = plan::traits(family);
    const DeviceInfo device =
        capability == 0 ? gpu().info : DeviceInfo::parse(fmt::format("sm_{}", capability));
    if (!traits.supports(spec, device)) continue;
    const CommandResult result = run_command(
        folder,
        fmt::format("verify --seed 5 --spec '{}' --shape {} --config {}", to_string(spec),
                    to_string(test.shape), to_string(traits.heuristic(spec, test.shape, device))),
        fmt::format("FLASHJIT_LIBCUDA='{}'{}", read_environment().libcuda,
                    capability == 0 ? "" : fmt::format(" FLASHJIT_EMULATOR_CAPABILITY={}", capability)));
    EXPECT_EQ(result.code, 0) << test.spec << " " << to_string(family) << "\n" << result.out << result.err;
  }
}

}  // namespace flashjit::test

// Programs of a sequence that several calls compute, as each of these sees it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "flashjit/programs.hpp"

namespace flashjit {

/// Where a call's positions, heads and batch entries begin in the whole problem, and how long that is.
struct PartPlace {
  std::int64_t q = 0, kv = 0, head = 0, head_kv = 0, batch = 0, length = 0;

  /// As the scalars that moved programs declare, in the order of kPartNames.
  std::array<std::int64_t, 6> values() const { return {q, kv, head, head_kv, batch, length}; }
};
inline constexpr std::array<std::string_view, 6> kPartNames = {"part_q",       "part_kv", "part_head",
                                                               "part_head_kv", "part_b",  "part_length"};

/// Which numbers are not a call's own. Positions and lengths never are.
struct PartMoves {
  bool heads = false, batch = false;
};

/// The program of a call: kPartNames are scalars, so that all calls have one kernel. Throws
/// Error(invalid_argument) where it then declares too much.
MaskProgram moved(const MaskProgram& mask, PartMoves moves);
ScoreProgram moved(const ScoreProgram& score, PartMoves moves);

}  // namespace flashjit

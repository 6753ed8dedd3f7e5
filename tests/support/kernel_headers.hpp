// The templates' headers on the host: which tiles a kernel visits, by the kernel's own code. Of the emulator
// only what the compiler needs to see: a test runs functions of one thread.
#pragma once

#include "tests/emulator/device.hpp"

// The host's compiler need not understand PTX, which nothing here runs: asm statements become empty.
#define asm(...) static_cast<void>(0)
#define volatile(...) ("")
// After what they need.
#include "flashjit/common/problem.cuh"
#include "flashjit/common/tile_walk.cuh"
#include "flashjit/tma/tile_scheduler.cuh"
#undef asm
#undef volatile

namespace flashjit::test {

/// A problem for TileProblem's Mask: every pair attends.
struct NoMask {
  static constexpr bool kHasMask = false, kListed = false;
  static constexpr int kMaskBounds = 0;
  static bool attends(const ExampleProblem::Head&, int, int) { return true; }
  static Range kv_bounds(const ExampleProblem::Head& head, Range) { return {0, head.seqlen_kv}; }
  static Range q_bounds(const ExampleProblem::Head& head, Range) { return {0, head.seqlen_q}; }
};

/// Causal, aligned to the last query and key.
struct Causal {
  static constexpr bool kHasMask = true, kListed = false;
  static constexpr int kMaskBounds = 1;
  static int shift(const ExampleProblem::Head& head) { return head.seqlen_kv - head.seqlen_q; }
  static bool attends(const ExampleProblem::Head& head, int q, int kv) { return kv <= q + shift(head); }
  static Range kv_bounds(const ExampleProblem::Head& head, Range q) {
    return {0, clamped(q.end + shift(head), 0, head.seqlen_kv)};
  }
  static Range q_bounds(const ExampleProblem::Head& head, Range kv) {
    return {clamped(kv.begin - shift(head), 0, head.seqlen_q), head.seqlen_q};
  }
};

/// A window of kLeft keys before a query and none behind it.
template <int kLeft>
struct Window {
  static constexpr bool kHasMask = true, kListed = false;
  static constexpr int kMaskBounds = 2;
  static bool attends(const ExampleProblem::Head&, int q, int kv) { return kv <= q && q - kv < kLeft; }
  static Range kv_bounds(const ExampleProblem::Head& head, Range q) {
    return {clamped(q.begin - kLeft + 1, 0, head.seqlen_kv), clamped(q.end, 0, head.seqlen_kv)};
  }
  static Range q_bounds(const ExampleProblem::Head& head, Range kv) {
    return {clamped(kv.begin, 0, head.seqlen_q), clamped(kv.end + kLeft - 1, 0, head.seqlen_q)};
  }
};

/// Pairs of scattered tiles, which are listed.
struct Scattered {
  static constexpr bool kHasMask = true, kListed = true;
  static constexpr int kMaskBounds = 0;
  static bool attends(const ExampleProblem::Head& head, int q, int kv) {
    return ((q / 24 * 7 + kv / 40 * 5 + head.h * 3) % 4 == 0) || q / 8 == kv / 8;
  }
  static Range kv_bounds(const ExampleProblem::Head& head, Range) { return {0, head.seqlen_kv}; }
  static Range q_bounds(const ExampleProblem::Head& head, Range) { return {0, head.seqlen_q}; }
};

/// What a kernel's Problem says that decides which tiles it visits.
template <class Mask, int br, int bc, bool backward = false, bool split = false, bool deterministic = false>
struct TileProblem : ExampleProblem {
  using Pairs = Mask;
  static constexpr bool kBackward = backward, kSplit = split, kDeterministic = deterministic;
  static constexpr int kBr = br, kBc = bc, kListedRows = br;
  static constexpr bool kHasMask = Mask::kHasMask, kTileLists = Mask::kListed, kListed = Mask::kListed;
  static constexpr bool kListsByHead = true;
  static constexpr int kMaskBounds = Mask::kMaskBounds;

  /// Exact, by looking at every pair.
  static TileClass classify_tile(const Params&, const Head& head, Range q, Range kv, const Interval*,
                                 const Interval*) {
    bool any = false, all = true;
    for (int i = q.begin; i < q.end; ++i)
      for (int j = kv.begin; j < kv.end; ++j) {
        any |= Mask::attends(head, i, j);
        all &= Mask::attends(head, i, j);
      }
    return all ? TileClass::full : any ? TileClass::partial : TileClass::empty;
  }
  static Range kv_bounds(const Params&, const Head& head, Range q) { return Mask::kv_bounds(head, q); }
  static Range q_bounds(const Params&, const Head& head, Range kv) { return Mask::q_bounds(head, kv); }
};

}  // namespace flashjit::test

#include "api/shared_schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "expr/key_bounds.hpp"

namespace flashjit {

MaskProgram mask_of(const SharedSequence& s) {
  if (s.window == 0) return s.spec.mask;
  return MaskProgram(fmt::format("q >= kv && q - kv < {}", s.window));
}

std::vector<RowChunk> chunks_of(const SharedSequence& s, int rank, int ranks) {
  if (s.layout == ShardLayout::contiguous) return {{0, s.rows, rank * s.rows}};
  const std::int64_t half = s.rows / 2;
  return {{0, half, rank * half}, {half, half, (2 * ranks - 1 - rank) * half}};
}

namespace {

/// A call for a segment of queries and one of keys, in the same document of `length` rows.
std::optional<SharedCall> call_of(const SharedSequence& s, const expr::KeyBounds& bounds, std::int64_t length,
                                  std::size_t segment, const RowChunk& q, RowChunk kv) {
  const auto as_int = [](std::int64_t x) { return static_cast<int>(x); };
  const Range seen = bounds.of({as_int(q.first), as_int(q.last() + 1)}, as_int(length), as_int(length));
  const std::int64_t first = std::max<std::int64_t>(kv.first, seen.begin);
  const std::int64_t last = std::min<std::int64_t>(kv.last(), seen.end - 1);
  if (first > last) return {};
  kv = {kv.begin + first - kv.first, last - first + 1, first, kv.document};
  CallMask mask = s.spec.mask.empty() ? CallMask::none : CallMask::program;
  // Segments that are not the same have no position in common: the last query is then at the last key.
  const bool beyond_window = s.window > 0 && q.last() - first >= s.window;
  if (s.spec.mask == causal() && !beyond_window) mask = last > q.first ? CallMask::causal : CallMask::none;
  return SharedCall{segment, kv, mask};
}

/// Whether one call can compute both: neighbours in memory, the first seen as a whole.
bool joins(const SharedSequence& s, const SharedCall& a, const SharedCall& b) {
  return a.segment == b.segment && a.mask == CallMask::none &&
         (b.mask == CallMask::none || b.mask == CallMask::causal) && a.keys.end() == b.keys.begin &&
         (a.keys.last() + 1 == b.keys.first || (!s.spec.dropout && s.spec.score.empty()));
}

}  // namespace

std::int64_t length_of(const SharedSequence& s, std::int64_t document, int ranks) {
  return s.documents.empty() ? s.rows * ranks : s.documents[document + 1] - s.documents[document];
}

std::vector<RowChunk> segments_of(const SharedSequence& s, int rank, int ranks) {
  const std::vector<RowChunk> chunks = chunks_of(s, rank, ranks);
  if (s.documents.empty()) return chunks;
  std::vector<RowChunk> segments;
  for (const RowChunk& chunk : chunks)
    for (std::size_t i = 0; i + 1 < s.documents.size(); ++i) {
      const std::int64_t first = std::max(chunk.first, s.documents[i]);
      const std::int64_t end = std::min(chunk.first + chunk.count, s.documents[i + 1]);
      if (first < end)
        segments.push_back({chunk.begin + first - chunk.first, end - first, first - s.documents[i],
                            static_cast<std::int64_t>(i)});
    }
  return segments;
}

std::vector<SharedCall> calls_with(const SharedSequence& s, int rank, int owner, int ranks) {
  const std::vector<RowChunk> mine = segments_of(s, rank, ranks), theirs = segments_of(s, owner, ranks);
  const expr::KeyBounds bounds(mask_of(s));
  std::vector<SharedCall> calls;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const std::size_t before = calls.size();
    for (const RowChunk& keys : theirs) {
      if (keys.document != mine[i].document) continue;
      const std::int64_t length = length_of(s, keys.document, ranks);
      const std::optional<SharedCall> call = call_of(s, bounds, length, i, mine[i], keys);
      if (!call) continue;
      if (calls.size() == before || !joins(s, calls.back(), *call)) {
        calls.push_back(*call);
        continue;
      }
      calls.back().keys.count += call->keys.count;
      calls.back().mask = call->mask;
    }
    if (owner != rank) continue;
    if (calls.size() == before) calls.push_back({i, mine[i], CallMask::program});  // it sees none of its own
    calls[before].first = true;
  }
  return calls;
}

}  // namespace flashjit

#include "api/shared_schedule.hpp"

#include <algorithm>
#include <optional>

namespace flashjit {
namespace {

std::vector<RowChunk> chunks_of(const SharedSequence& s, int rank, int ranks) {
  if (s.layout == ShardLayout::contiguous) return {{0, s.rows, rank * s.rows}};
  const std::int64_t half = s.rows / 2;
  return {{0, half, rank * half}, {half, half, (2 * ranks - 1 - rank) * half}};
}

/// Of a segment of queries and one of keys, in the same document.
std::optional<SharedCall> call_of(const SharedSequence& s, std::size_t segment, const RowChunk& q,
                                  RowChunk kv) {
  if (s.spec.mask.empty()) return SharedCall{segment, kv, CallMask::none};
  const std::int64_t first = s.window > 0 ? std::max(kv.first, q.first - s.window + 1) : kv.first;
  const std::int64_t last = std::min(kv.last(), q.last());
  if (first > last) return {};
  kv = {kv.begin + first - kv.first, last - first + 1, first, kv.document};
  const bool beyond_window = s.window > 0 && q.last() - first >= s.window;
  // Segments that are not the same have no position in common: the last query is then at the last key.
  const bool ahead = last > q.first;
  return SharedCall{segment, kv,
                    beyond_window ? ahead ? CallMask::causal_window : CallMask::window
                    : ahead       ? CallMask::causal
                                  : CallMask::none};
}

/// Whether one call can compute both: neighbours in memory, of which the first is seen as a whole.
bool joins(const SharedSequence& s, const SharedCall& a, const SharedCall& b) {
  return a.segment == b.segment && a.mask == CallMask::none &&
         (b.mask == CallMask::none || b.mask == CallMask::causal) && a.keys.end() == b.keys.begin &&
         (!s.spec.dropout || a.keys.last() + 1 == b.keys.first);
}

}  // namespace

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
  std::vector<SharedCall> calls;
  for (std::size_t i = 0; i < mine.size(); ++i)
    for (const RowChunk& keys : theirs) {
      if (keys.document != mine[i].document) continue;
      const std::optional<SharedCall> call = call_of(s, i, mine[i], keys);
      if (!call) continue;
      if (calls.empty() || !joins(s, calls.back(), *call)) {
        calls.push_back(*call);
        continue;
      }
      calls.back().keys.count += call->keys.count;
      calls.back().mask = call->mask;
    }
  return calls;
}

}  // namespace flashjit

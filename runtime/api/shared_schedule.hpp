// Which of its rows a rank of a SharedAttention computes with which keys: a function of sizes alone.
#pragma once

#include <cstdint>
#include <vector>

#include "flashjit/distributed.hpp"

namespace flashjit {

/// Rows of a shard that are neighbours in the sequence: row begin + i is at position first + i, of the
/// sequence or of its document.
struct RowChunk {
  std::int64_t begin = 0, count = 0, first = 0;
  std::int64_t document = 0;

  std::int64_t end() const { return begin + count; }
  std::int64_t last() const { return first + count - 1; }
  bool operator==(const RowChunk&) const = default;
};

/// How a call's pairs are masked: not at all, by causal() with the last query at the last key, or by the
/// sequence's mask as moved() to the call.
enum class CallMask : std::uint8_t { none, causal, program };

struct SharedCall {
  std::size_t segment;  ///< whose rows are the queries
  RowChunk keys;        ///< in the owner's block
  CallMask mask;
  bool first = false;  ///< of its segment: each has one, with the rank's own keys
  bool last = false;   ///< of its segment

  bool operator==(const SharedCall&) const = default;
};

/// The whole sequence's, with its window.
MaskProgram mask_of(const SharedSequence& sequence);

/// What a rank has of the sequence, in the order of its rows.
std::vector<RowChunk> chunks_of(const SharedSequence& sequence, int rank, int ranks);

/// Rows of a document, or without any of the sequence.
std::int64_t length_of(const SharedSequence& sequence, std::int64_t document, int ranks);

/// A rank's rows: with documents a segment for each document in each chunk, as each has a state of its own.
std::vector<RowChunk> segments_of(const SharedSequence& sequence, int rank, int ranks);

/// What a rank computes with the keys of `owner`. A pair is in one call at most; in none, it does not attend.
std::vector<SharedCall> calls_with(const SharedSequence& sequence, int rank, int owner, int ranks);

}  // namespace flashjit

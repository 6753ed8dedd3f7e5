// Plausible random values for what a spec leaves to the call, and how they are stored: shared by the command,
// the tuner and the tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashjit/spec.hpp"
#include "reference/programs.hpp"

namespace flashjit::reference {

/// Rounds and clamps as a conversion to the type does; a bool is 0 or 1.
double round_to(ElementType type, double value);

/// The bytes of `values` as elements of `type`, little-endian.
std::vector<std::byte> encode(ElementType type, const std::vector<double>& values);

/// A value for each name that the spec's programs declare, drawn from `seed`: floats are normal, scalars
/// small and positive; integer vectors, and integers in rows that are read by q or kv alone, are numbers of
/// documents, conditions in such rows say where padding begins. A tensor's sizes cover the positions
/// at which the programs read it, where they say so plainly; large ones are made for one batch entry and
/// head.
std::vector<Captured> plausible_captures(const AttentionSpec& spec, const AttentionShape& shape,
                                         std::uint64_t seed);

/// Where `batch` sequences of up to `longest` rows begin and end, [batch + 1]: the first has `longest` rows,
/// number `empty` none, the others any number.
std::vector<std::int32_t> random_offsets(std::int64_t batch, std::int64_t longest, std::int64_t empty,
                                         std::uint64_t seed);

/// The numbers 0 to count - 1 in any order: the pages of a table [batch, columns], row by row.
std::vector<std::int32_t> shuffled_pages(std::int64_t count, std::uint64_t seed);

/// How many first keys the sequences of a cache share by default: at most all but a sequence's queries.
std::int32_t plausible_prefix(const AttentionShape& shape);
/// Gives all sequences the first `keys` of the first one, in K or V [batch, heads_kv, seqlen_kv, dim], and at
/// least so many keys before the keys of their queries.
void share_prefix(const AttentionShape& shape, std::int32_t keys, std::int64_t dim,
                  std::vector<double>& values, std::vector<std::int32_t>& lengths);

/// The first `columns` of each row of `dim` values.
std::vector<double> first_columns(const std::vector<double>& values, std::int64_t dim, std::int64_t columns);

/// Rounds `values`, [.., heads, rows, dim], to codes of the type times scales in fp32, such that the largest
/// of a head, or of a row, is the type's largest. Returns the scales: [heads], or one a row.
std::vector<double> quantize(DType type, bool by_row, std::int64_t heads, std::int64_t rows, std::int64_t dim,
                             std::vector<double>& values);

/// Lists of `top_k` of `keys` keys each; some entries are named twice, or are -1 or no key.
std::vector<std::int32_t> random_indices(std::int64_t lists, std::int64_t top_k, std::int64_t keys,
                                         std::uint64_t seed);
/// Lists of `top_k` of `keys` keys each, no key twice in a list, as indexers give them to neighbouring
/// queries: each list has `changed` keys that the one before had not. Some entries are -1.
std::vector<std::int32_t> neighbouring_indices(std::int64_t lists, std::int64_t top_k, std::int64_t keys,
                                               std::int64_t changed, std::uint64_t seed);
/// How long lists are by default.
std::int64_t plausible_top_k(std::int64_t keys);

/// A sink for each of `heads`, of the size of scores.
std::vector<double> random_sinks(std::int64_t heads, std::uint64_t seed);

}  // namespace flashjit::reference

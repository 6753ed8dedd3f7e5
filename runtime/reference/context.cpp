#include "reference/context.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "support/overflow.hpp"
#include "support/refuse.hpp"
#include "templates/common/philox.cuh"

namespace flashjit::reference {
namespace {

/// How many rows a head has in a packed tensor of `heads`.
std::int64_t rows_of_head(const std::vector<double>& tensor, std::int64_t heads, std::int64_t dim) {
  const std::int64_t row = count({heads, dim});
  return row == 0 ? 0 : std::ssize(tensor) / row;
}

/// The first key of sequence b that is not the first sequence's, in K or V; `keys` if there is none.
std::int64_t first_unlike(const std::vector<double>& values, const AttentionShape& shape, std::int64_t b,
                          std::int64_t keys) {
  const std::int64_t of_sequence = std::ssize(values) / shape.batch, of_head = of_sequence / shape.heads_kv,
                     dim = of_head / shape.seqlen_kv;
  const auto alike = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  std::int64_t first = keys;
  for (std::int64_t h = 0; h < shape.heads_kv; ++h) {
    const auto mine = values.begin() + b * of_sequence + h * of_head, others = values.begin() + h * of_head;
    first = std::min(first, (std::mismatch(mine, mine + keys * dim, others, alike).first - mine) / dim);
  }
  return first;
}

}  // namespace

std::int64_t count(std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    if (multiply_overflows(product, size, product)) {
      refuse("a tensor of {} elements overflows 64 bits; give smaller sizes", fmt::join(sizes, " x "));
    }
  }
  return product;
}

void check_size(const char* what, std::size_t given, std::int64_t wanted) {
  if (static_cast<std::int64_t>(given) != wanted) {
    refuse("{} has {} elements but the spec and shape need {}; give exactly that many", what, given, wanted);
  }
}

Context::Context(const Problem& given)
    : problem(given), spec(given.spec.normalized()), shape(given.shape), programs(spec, given.captures) {
  spec.validate();
  shape.validate();
  if (spec.varlen) {
    check_size("cu_seqlens_q", given.cu_seqlens_q.size(), shape.batch + 1);
    packed_q = rows_of_head(given.q, shape.heads_q, spec.head_dim);
  }
  if (packs_kv()) {
    check_size("cu_seqlens_kv", given.cu_seqlens_kv.size(), shape.batch + 1);
    packed_kv = rows_of_head(given.k, shape.heads_kv, spec.head_dim);
  }
  check_size("q", given.q.size(), count({q_count(), spec.head_dim}));
  check_size("k", given.k.size(), count({kv_count(), spec.head_dim}));
  check_size("v", given.v.size(), count({kv_count(), spec.v_dim()}));
  if (spec.sinks) check_size("sinks", given.sinks.size(), shape.heads_q);
  if (spec.kv.has_lengths()) check_size("kv_lengths", given.kv_lengths.size(), shape.batch);
  if (spec.has_block_map()) {
    const bool broadcasts = (given.map_batch == 1 || given.map_batch == shape.batch) &&
                            (given.map_heads == 1 || given.map_heads == shape.heads_q);
    if (!broadcasts) {
      refuse("the block map has {} batch entries and {} heads; allowed are 1 or {}, and 1 or {}",
             given.map_batch, given.map_heads, shape.batch, shape.heads_q);
    }
    map_rows = (shape.seqlen_q + spec.block_map.q - 1) / spec.block_map.q;
    map_columns = (shape.seqlen_kv + spec.block_map.kv - 1) / spec.block_map.kv;
    check_size("block_map", given.block_map.size(),
               given.map_batch * given.map_heads * map_rows * map_columns);
  }
  scale = given.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(spec.head_dim)));
  if (!(std::isfinite(scale) && scale > 0)) {
    refuse("softmax_scale is {}; it must be finite and positive", scale);
  }
  if (!spec.dropout && given.dropout_p != 0) {
    refuse("dropout_p is {} but the spec has no dropout; set spec.dropout or leave it 0", given.dropout_p);
  }
  dropout = dropout_parameters(given.dropout_p);
  if (spec.indices) read_indices();
}

void Context::read_indices() {
  const std::int64_t queries = spec.varlen ? packed_q : shape.seqlen_q;
  const std::int64_t lists = count({problem.index_batch, queries, shape.heads_kv});
  if (problem.index_batch != 1 && problem.index_batch != shape.batch)
    refuse("the indices have {} batch entries; allowed are 1 or {}", problem.index_batch, shape.batch);
  const std::int64_t given = std::ssize(problem.indices), top_k = lists == 0 ? 0 : given / lists;
  check_size("indices", problem.indices.size(), lists * top_k);
  names.resize(static_cast<std::size_t>(count({lists, shape.seqlen_kv})));
  for (std::int64_t i = 0; i < given; ++i)
    if (const std::int64_t key = problem.indices[i]; key >= 0 && key < shape.seqlen_kv)
      ++names[i / top_k * shape.seqlen_kv + key];
}

bool Context::has_sinks() const { return spec.sinks; }

double Context::sink(std::int64_t task) const {
  return has_sinks() ? problem.sinks[head_of(task)] : -kInfinity;
}

bool Context::attends(const Point& at) const {
  if (spec.indices && named(at.b * shape.heads_q + at.h, at.q, at.kv) == 0) return false;
  if (spec.kv.is_padded() && at.kv >= problem.kv_lengths[at.b]) return false;
  if (spec.has_block_map()) {
    const std::int64_t map =
        (problem.map_batch == 1 ? 0 : at.b) * problem.map_heads + (problem.map_heads == 1 ? 0 : at.h);
    const std::int64_t row = map * map_rows + at.q / spec.block_map.q;
    if (!problem.block_map[row * map_columns + at.kv / spec.block_map.kv]) return false;
  }
  return programs.attends(at);
}

double Context::dropout_factor(std::int64_t task, std::int64_t q, std::int64_t kv) const {
  if (!spec.dropout) return dropout.keep_scale;
  const auto low = [](std::uint64_t value) { return static_cast<unsigned>(value); };
  const auto high = [](std::uint64_t value) { return static_cast<unsigned>(value >> 32); };
  const DropoutPlace& place = problem.dropout_place;
  const std::int64_t heads = place.heads ? place.heads : shape.heads_q;
  const std::int64_t head = (place.batch + batch_of(task)) * heads + place.head + head_of(task);
  const int i = static_cast<int>(place.q + place.q_step * q),
            j = static_cast<int>(place.kv + place.kv_step * kv);
  const Philox4 words = dropout_words(low(problem.seed), high(problem.seed), low(problem.offset),
                                      high(problem.offset), static_cast<unsigned>(head), i, j);
  const unsigned drawn = draw_dropped(words.word[dropout_word_index(i, j)], dropout.drop_share);
  return is_dropped(drawn, j & 1) ? 0.0 : dropout.keep_scale;
}

void check_offsets(const char* name, const std::vector<std::int32_t>& offsets, std::int64_t rows,
                   std::int64_t longest) {
  if (offsets.front() != 0) refuse("{} begins with {}; it must begin with 0", name, offsets[0]);
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
    const std::int64_t length = std::int64_t{offsets[b + 1]} - offsets[b];
    if (length < 0 || length > longest) {
      refuse("{} gives sequence {} the length {}; allowed are 0 to {}, the longest that the call names", name,
             b, length, longest);
    }
  }
  if (offsets.back() > rows) {
    refuse("{} ends with {}, but the packed tensors have {} rows; it must end there or before", name,
           offsets.back(), rows);
  }
}

void check_lengths(const AttentionShape& shape, std::span<const std::int32_t> lengths) {
  for (std::size_t b = 0; b < lengths.size(); ++b)
    if (lengths[b] < 0 || lengths[b] > shape.seqlen_kv)
      refuse("kv_lengths has {} for sequence {}: give 0 to {}, the most keys that a sequence may have.",
             lengths[b], b, shape.seqlen_kv);
}

void check_problem(const Problem& problem) {
  const Context context(problem);
  if (context.spec.kv.has_lengths()) check_lengths(problem.shape, problem.kv_lengths);
  if (!problem.spec.varlen) return;
  check_offsets("cu_seqlens_q", problem.cu_seqlens_q, context.packed_q, context.shape.seqlen_q);
  if (context.packs_kv())
    check_offsets("cu_seqlens_kv", problem.cu_seqlens_kv, context.packed_kv, context.shape.seqlen_kv);
}

std::optional<KeyPlace> first_attended(const Problem& problem, const std::vector<KeyPlace>& keys) {
  const Context context(problem);
  for (const KeyPlace& key : keys)
    for (std::int64_t h = 0; h < context.shape.heads_q; ++h) {
      const std::int64_t task = key.b * context.shape.heads_q + h, queries = context.q_rows(task).count;
      for (std::int64_t q = 0; q < queries; ++q)
        if (context.attends(context.point(task, q, key.kv))) return key;
    }
  return std::nullopt;
}

void check_prefix(const Problem& problem) {
  const std::int64_t prefix = problem.prefix_length;
  const std::vector<std::int32_t>& offsets = problem.cu_seqlens_q;
  if (!problem.spec.kv.shared_prefix || prefix == 0 || offsets.back() == 0) return;
  if (prefix < 0) refuse("prefix_length is {}; it must be 0 or more", prefix);
  for (std::int64_t b = 0; b < problem.shape.batch; ++b) {
    const std::int64_t queries = offsets[b + 1] - offsets[b];
    if (b > 0 && queries == 0) continue;
    const std::int64_t keys = std::clamp<std::int64_t>(problem.kv_lengths[b], 0, problem.shape.seqlen_kv);
    const std::int64_t most = std::max<std::int64_t>(keys - queries, 0);
    if (most < prefix)
      refuse(
          "prefix_length is {}, but sequence {} has {} keys before its queries' keys; it must be at most "
          "that",
          prefix, b, most);
    const std::int64_t alike = std::min(first_unlike(problem.k, problem.shape, b, prefix),
                                        first_unlike(problem.v, problem.shape, b, prefix));
    if (alike < prefix)
      refuse(
          "prefix_length is {}, but key {} of sequence {} is not that of sequence 0; give how many first "
          "keys all sequences share",
          prefix, alike, b);
  }
}

std::vector<double> existing_rows(const Problem& problem, const std::vector<double>& values) {
  if (!problem.spec.varlen) return values;
  const Context context(problem);
  std::vector<double> rows;
  for (std::int64_t task = 0; task < context.tasks(); ++task) {
    const auto first = values.begin() + context.q_rows(task).begin;
    rows.insert(rows.end(), first, first + context.q_rows(task).count);
  }
  return rows;
}

}  // namespace flashjit::reference

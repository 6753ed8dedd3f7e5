// A cache in slots or pages, as an engine keeps it: pages in any order, NaN in every row that is no key, and
// in a table, behind a sequence's pages and in front of a window, numbers of pages that do not exist or are
// another's.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "flashjit/flashjit.hpp"
#include "reference/inputs.hpp"
#include "reference/reference.hpp"
#include "tests/support/scales.hpp"

namespace flashjit::test {

enum class PoolLayout : std::uint8_t {
  hnd,         ///< K [pages, heads, rows, d]; V is a tensor of its own
  nhd,         ///< K [pages, rows, heads, d]
  interleaved  ///< K and V in one: [pages, 2, rows, heads, d], of equal head dimensions
};

struct CacheCase {
  KernelSpec spec;       ///< with pages or cache
  AttentionShape shape;  ///< seqlen_kv: the most keys of a sequence
  Family family = Family::simt;
  PoolLayout layout = PoolLayout::nhd;
  bool slot_table = false;  ///< of slots: they are in no order
  bool own_scales = false;  ///< with key_scales: each key has its own
  unsigned seed = 0;
  int window = 0;           ///< the mask's: whole pages in front of it are freed
  bool decodes = false;     ///< most packed sequences have up to 17 queries
  bool neighbours = false;  ///< of lists of keys share most, and have no key twice
  int q_exponent = 0;       ///< Q is 2^q_exponent as large as usual, the scale of scores as much smaller
};

inline std::string name_of(const CacheCase& test) {
  constexpr const char* kLayouts[] = {"hnd", "nhd", "interleaved"};
  std::string name =
      fmt::format("{}_{}_{}_{}{}_{}", to_string(test.spec), to_string(test.shape), to_string(test.family),
                  kLayouts[static_cast<int>(test.layout)], test.slot_table ? "_table" : "", test.seed);
  std::ranges::replace_if(
      name, [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

/// What GoogleTest prints of a case.
inline void PrintTo(const CacheCase& test, std::ostream* out) { *out << name_of(test); }

/// One of the pools, as values, and how a view of it is made.
struct Pool {
  std::vector<double> values = {};
  std::int64_t offset = 0;  ///< of its first element, where two share memory
  std::array<std::int64_t, 4> size = {}, stride = {};

  template <class Void>
  BasicTensorView<Void> view(Void* data, DType dtype) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return {static_cast<Byte*>(data) + offset * size_of(dtype), size, stride};
  }
  double& at(std::int64_t page, std::int64_t head, std::int64_t row, std::int64_t i) {
    return values[offset + page * stride[0] + head * stride[1] + row * stride[2] + i];
  }
};

/// A case's numbers: a problem for the reference, whose keys are in order, and the cache that has the same.
struct Cache {
  reference::Problem problem;
  Pool k = {},
       v = {};  ///< with one memory, that of k, where the layout says so; codes where there are scales
  Scales k_scale = {}, v_scale = {};
  std::vector<double> q = {};  ///< the problem's, or its codes
  Scales q_scale = {};
  std::vector<std::int32_t> table = {};
  std::int64_t columns = 0, table_stride = 0;
  std::vector<std::int32_t> starts = {};  ///< of the sequences in the table, if that is one row

  std::int64_t entry(std::int64_t b, std::int64_t column) const {
    return table_view(table.data(), starts.data()).entry(b, column);
  }
  PageTableView table_view(const std::int32_t* data, const std::int32_t* in_one_row) const {
    if (table.empty()) return {};
    return {data, problem.shape.batch, columns, table_stride, starts.empty() ? nullptr : in_one_row};
  }
};

namespace cache_detail {

inline Pool make_pool(PoolLayout layout, std::int64_t pages, std::int64_t heads, std::int64_t rows,
                      std::int64_t d) {
  Pool pool{.size = {pages, heads, rows, d}};
  if (layout == PoolLayout::hnd) pool.stride = {heads * rows * d, rows * d, d, 1};
  if (layout == PoolLayout::nhd) pool.stride = {rows * heads * d, d, heads * d, 1};
  if (layout == PoolLayout::interleaved) pool.stride = {2 * rows * heads * d, d, heads * d, 1};
  const std::int64_t copies = layout == PoolLayout::interleaved ? 2 : 1;
  pool.values.assign(copies * pages * heads * rows * d, std::numeric_limits<double>::quiet_NaN());
  return pool;
}

}  // namespace cache_detail

/// The table as CSR has it: the entries of each sequence behind those of the one before, and no others.
inline void put_in_one_row(Cache& cache, std::int64_t page_rows) {
  std::vector<std::int32_t> entries;
  for (std::int64_t b = 0; b < cache.problem.shape.batch; ++b) {
    cache.starts.push_back(static_cast<std::int32_t>(entries.size()));
    const auto first = cache.table.begin() + b * cache.table_stride;
    entries.insert(entries.end(), first, first + (cache.problem.kv_lengths[b] + page_rows - 1) / page_rows);
  }
  // Room for the longest sequence that the shape allows; what is there is not read.
  entries.resize(std::max<std::size_t>(entries.size(), cache.columns),
                 std::numeric_limits<std::int32_t>::max());
  cache.table = std::move(entries);
  cache.columns = std::ssize(cache.table), cache.table_stride = 0;
}

/// Prefills of any length beside decodes.
inline std::vector<std::int32_t> offsets_beside_decodes(std::int64_t batch, std::int64_t longest,
                                                        std::uint64_t seed) {
  constexpr std::array<std::int64_t, 6> kFew = {1, 16, 17, 0, 4, 1};
  std::vector<std::int32_t> offsets = {0};
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::uint64_t place = (seed + static_cast<std::uint64_t>(b)) % (kFew.size() + 1);
    const std::int64_t rows = place < kFew.size() ? kFew[place] : b % 2 ? longest : longest / 3;
    offsets.push_back(static_cast<std::int32_t>(offsets.back() + rows));
  }
  return offsets;
}

inline Cache make_cache(const CacheCase& test) {
  const KernelSpec spec = test.spec.normalized();
  const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
  std::mt19937 random(77 + test.seed);
  Cache cache{.problem = {.spec = test.spec, .shape = test.shape}};
  reference::Problem& problem = cache.problem;
  if (spec.varlen)
    problem.cu_seqlens_q = test.decodes ? offsets_beside_decodes(batch, seqlen_q, test.seed)
                                        : reference::random_offsets(batch, seqlen_q, 1, test.seed);
  const std::int64_t queries = spec.varlen ? problem.cu_seqlens_q.back() : batch * seqlen_q;
  std::normal_distribution<double> normal;
  const auto values = [&](std::int64_t count) {
    std::vector<double> all(count);
    for (double& value : all) value = reference::round_to(spec.dtype, normal(random));
    return all;
  };
  const DType kv_type = spec.kv_type();
  problem.q = values(heads_q * queries * spec.head_dim);
  for (double& value : problem.q) value = std::ldexp(value, test.q_exponent);
  if (test.q_exponent != 0)
    problem.softmax_scale = std::ldexp(1 / std::sqrt(spec.head_dim), -test.q_exponent);
  cache.q = problem.q;
  if (spec.prologue.q_codes) {
    cache.q_scale = make_scales(false, test.seed + 1, {batch, 1, heads_kv, 1});
    const std::int64_t rows = spec.varlen ? queries : seqlen_q;
    for (std::int64_t i = 0; i < std::ssize(cache.q); ++i) {
      const std::int64_t row = i / spec.head_dim, h = row / rows % heads_q;
      std::int64_t b = row / rows / heads_q;
      if (spec.varlen)
        while (b + 1 < batch && problem.cu_seqlens_q[b + 1] <= row % rows) ++b;
      double& scale = cache.q_scale.at(b, 0, h / (heads_q / heads_kv), 0);
      if (std::isnan(scale)) scale = random_scale(kv_type, random);
      cache.q[i] = random_code(kv_type, random);
      problem.q[i] = cache.q[i] * scale;
    }
  }
  const std::int64_t kv_rows = batch * heads_kv * seqlen_kv;
  const auto kv_values = [&](int dim) {
    if (!spec.has_scales()) return values(kv_rows * dim);
    std::vector<double> codes(kv_rows * dim);
    for (double& code : codes) code = random_code(kv_type, random);
    return codes;
  };
  problem.k = kv_values(spec.head_dim);
  problem.v = spec.kv.shared_kv ? reference::first_columns(problem.k, spec.head_dim, spec.v_dim())
                                : kv_values(spec.v_dim());
  if (spec.sinks) problem.sinks = reference::random_sinks(heads_q, test.seed);
  if (spec.indices) {
    constexpr std::int64_t kTopK = 70;
    problem.index_batch = spec.varlen ? 1 : batch;
    problem.indices =
        test.neighbours
            ? reference::neighbouring_indices(queries * heads_kv, kTopK, seqlen_kv, kTopK / 8, test.seed)
            : reference::random_indices(queries * heads_kv, kTopK, seqlen_kv, test.seed);
  }
  problem.captures = reference::plausible_captures(spec, test.shape, test.seed);
  // One sequence without keys, one with as many as there may be.
  std::uniform_int_distribution<std::int32_t> length(1, static_cast<std::int32_t>(seqlen_kv));
  for (std::int64_t b = 0; b < batch; ++b) problem.kv_lengths.push_back(length(random));
  if (batch > 1) problem.kv_lengths[1] = 0;
  if (batch > 2) problem.kv_lengths[2] = static_cast<std::int32_t>(seqlen_kv);
  if (spec.kv.shared_prefix) {
    problem.prefix_length = reference::plausible_prefix(test.shape);
    reference::share_prefix(test.shape, problem.prefix_length, spec.head_dim, problem.k, problem.kv_lengths);
    reference::share_prefix(test.shape, problem.prefix_length, spec.v_dim(), problem.v, problem.kv_lengths);
  }

  const std::int64_t rows = spec.kv.is_paged() ? spec.kv.page_size : seqlen_kv + 3;
  const std::int64_t of_sequence = spec.kv.is_paged() ? (seqlen_kv + rows - 1) / rows : 1;
  const std::int64_t pages = batch * of_sequence + 2;
  cache.k = cache_detail::make_pool(test.layout, pages, heads_kv, rows, spec.head_dim);
  cache.v = cache_detail::make_pool(test.layout, pages, heads_kv, rows, spec.v_dim());
  const bool shared = test.layout == PoolLayout::interleaved;
  if (shared) cache.v.offset = rows * heads_kv * spec.head_dim;
  Pool& v_values = shared ? cache.k : cache.v;
  if (spec.has_scales()) {
    const std::array<std::int64_t, 4> all = {batch, pages, heads_kv, rows};
    // Sequences with keys in common have no scales of their own.
    const auto form = [&](unsigned seed) { return spec.kv.shared_prefix ? seed % 2 : seed; };
    cache.k_scale = make_scales(spec.kv.key_scales, form(test.seed), all, test.own_scales);
    cache.v_scale = make_scales(spec.kv.key_scales, form(test.seed + test.seed / 2), all, test.own_scales);
  }
  // The reference's keys are codes times scales.
  const auto scale_row = [&](Scales& scales, std::int64_t b, std::int64_t page, std::int64_t h,
                             std::int64_t row, double* values, int dim) {
    if (!spec.has_scales()) return;
    double& scale = scales.at(b, page, h, row);
    if (std::isnan(scale)) scale = random_scale(kv_type, random);
    for (int i = 0; i < dim; ++i) values[i] *= scale;
  };

  std::vector<std::int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  const bool tabled = spec.kv.is_paged() || test.slot_table;
  if (tabled) std::ranges::shuffle(order, random);
  cache.columns = of_sequence + (spec.kv.is_paged() ? 1 : 0);
  cache.table_stride = cache.columns + 2;
  if (tabled) cache.table.assign(batch * cache.table_stride, std::numeric_limits<std::int32_t>::max());
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t own_queries =
        spec.varlen ? problem.cu_seqlens_q[b + 1] - problem.cu_seqlens_q[b] : seqlen_q;
    const std::int64_t first = problem.kv_lengths[b] - own_queries - test.window + 1;  // that a query sees
    for (std::int64_t n = 0; n < problem.kv_lengths[b]; ++n) {
      if (test.window != 0 && (n / rows + 1) * rows <= first) {
        cache.table[b * cache.table_stride + n / rows] = n / rows % 2 == 0 ? -1 : order[pages - 1];
        continue;
      }
      const bool shares = (n / rows + 1) * rows <= problem.prefix_length;  // the whole page
      const std::int32_t page = order[(shares ? 0 : b) * of_sequence + n / rows];
      if (tabled) cache.table[b * cache.table_stride + n / rows] = page;
      for (std::int64_t h = 0; h < heads_kv; ++h) {
        const std::int64_t row = (b * heads_kv + h) * seqlen_kv + n;
        for (std::int64_t i = 0; i < spec.head_dim; ++i)
          cache.k.at(page, h, n % rows, i) = problem.k[row * spec.head_dim + i];
        for (std::int64_t i = 0; i < spec.v_dim(); ++i)
          v_values.values[cache.v.offset + page * cache.v.stride[0] + h * cache.v.stride[1] +
                          n % rows * cache.v.stride[2] + i] = problem.v[row * spec.v_dim() + i];
        scale_row(cache.k_scale, b, page, h, n % rows, &problem.k[row * spec.head_dim], spec.head_dim);
        scale_row(cache.v_scale, b, page, h, n % rows, &problem.v[row * spec.v_dim()], spec.v_dim());
      }
    }
    // A slot without keys is a slot all the same.
    if (tabled && !spec.kv.is_paged()) cache.table[b * cache.table_stride] = order[b];
  }
  if (spec.kv.is_paged() && test.seed % 2 == 1) put_in_one_row(cache, rows);
  return cache;
}

}  // namespace flashjit::test

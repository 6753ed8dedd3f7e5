// Attention over K and V in any format: rows of random values in the format's bytes, which kernels and the
// CPU reference read through the same arguments.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "expr/kv_codec.hpp"
#include "expr/kv_decode.hpp"
#include "flashjit/reference.hpp"
#include "plan/family.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/kv_formats.hpp"

namespace flashjit::test {

struct KvFormatCase {
  std::string spec;
  AttentionShape shape;
  Family family = Family::simt;
  int padding = 0;          ///< of rows, in units of their alignment
  int top_k = 20;           ///< entries of a query's list, of which more than 20 do not all count
  bool neighbours = false;  ///< of lists share most, and have no key twice
};

inline std::string name_of(const KvFormatCase& test) {
  std::string name =
      fmt::format("{}_{}_{}_{}", test.spec, to_string(test.shape), to_string(test.family), test.padding);
  if (test.top_k != KvFormatCase{}.top_k) name += fmt::format("_top{}", test.top_k);
  std::ranges::replace_if(
      name, [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}
inline void PrintTo(const KvFormatCase& test, std::ostream* out) { *out << name_of(test); }

/// K or V of a cache, or of a call without one: [pages, heads, rows, bytes].
struct StoredPool {
  KvFormat format;
  StoredKvRow row;
  int dim;
  std::array<std::int64_t, 4> size, stride;  ///< in elements of the row's type
  std::vector<std::uint8_t> bytes;
  std::vector<float> scales;               ///< of the call, [pages, heads, rows] or one for all
  std::vector<std::uint8_t> block_scales;  ///< of a format that has these apart, laid out as scale_size says
  std::vector<double> group;               ///< elements of keys whose scales are not found yet

  StoredPool(const AttentionSpec& spec, const KvFormat& of, const StoredKvRow& stored, int columns,
             std::int64_t pages, std::int64_t heads, std::int64_t rows, int padding)
      : format(of), row(stored), dim(columns), size{pages, heads, rows, stored.columns} {
    const std::int64_t step = stored.columns + padding * stored.alignment / size_of(stored.type);
    stride = {rows * heads * step, step, heads * step, 1};  // heads of a row are neighbours
    bytes.assign(static_cast<std::size_t>(pages * stride[0] * size_of(stored.type)), 0xff);
    block_scales.assign(static_cast<std::size_t>(pages * scale_stride(0) * scale_bytes()), 0xff);
    if (format.has_argument())
      scales.assign(static_cast<std::size_t>(spec.kv.key_scales ? pages * heads * rows : 1), 0.0f);
  }
  int scale_bytes() const { return size_of(format.scale_type); }
  std::array<std::int64_t, 4> scale_size() const {
    const std::int64_t keys = std::max(format.keys, 1);
    return {size[0], size[1], (size[2] + keys - 1) / keys,
            format.quantized() ? format.row(dim).scale_columns : 0};
  }
  /// Rows of all heads are neighbours, with eight numbers, 16 bytes or more, between them.
  std::int64_t scale_stride(int i) const {
    const auto [pages, heads, rows, columns] = scale_size();
    const std::int64_t step = columns == 0 ? 0 : columns + 16;
    return i == 0 ? rows * heads * step : i == 1 ? step : heads * step;
  }
  std::uint8_t* scales_at(std::int64_t page, std::int64_t h, std::int64_t n) {
    if (block_scales.empty()) return nullptr;
    const std::int64_t row = n / std::max(format.keys, 1);
    return &block_scales[static_cast<std::size_t>(
        (page * scale_stride(0) + h * scale_stride(1) + row * scale_stride(2)) * scale_bytes())];
  }
  ConstTensorView block_scale_view(const void* data) const {
    if (block_scales.empty()) return {};
    return {data, scale_size(), {scale_stride(0), scale_stride(1), scale_stride(2), 1}};
  }
  /// NaN, as far as the format has it in a row and its scales.
  void poison(std::int64_t page, std::int64_t h, std::int64_t n) {
    std::fill_n(at(page, h, n), row.columns * size_of(row.type), std::uint8_t{0xff});
    if (format.keys == 0 && !block_scales.empty())
      std::fill_n(scales_at(page, h, n), scale_size()[3] * scale_bytes(), std::uint8_t{0xff});
    if (scales.size() > 1)
      scales[static_cast<std::size_t>((page * size[1] + h) * size[2] + n)] =
          std::numeric_limits<float>::quiet_NaN();
  }
  float argument(std::int64_t page, std::int64_t h, std::int64_t n) const {
    if (scales.empty()) return 1;
    return scales[scales.size() == 1 ? 0 : static_cast<std::size_t>((page * size[1] + h) * size[2] + n)];
  }
  std::uint8_t* at(std::int64_t page, std::int64_t h, std::int64_t n) {
    return &bytes[static_cast<std::size_t>((page * stride[0] + h * stride[1] + n * stride[2]) *
                                           size_of(row.type))];
  }
  void put(DType dtype, std::int64_t page, std::int64_t h, std::int64_t n,
           const std::vector<double>& values) {
    if (format.keys > 0) return put_key(page, h, n, values);
    if (format.quantized())
      return encode_row(format, dim, values.data(), argument(page, h, n), at(page, h, n),
                        scales_at(page, h, n));
    for (int i = 0; i < dim; ++i) dtype_info(dtype).encode(values[i], at(page, h, n) + i * size_of(dtype));
  }
  /// Keys come in order; the last of those that share scales encodes them.
  void put_key(std::int64_t page, std::int64_t h, std::int64_t n, const std::vector<double>& values) {
    group.insert(group.end(), values.begin(), values.end());
    if ((n + 1) % format.keys != 0 && n + 1 != size[2]) return;
    std::vector<std::uint8_t*> rows;
    for (std::int64_t key = n / format.keys * format.keys; key <= n; ++key) rows.push_back(at(page, h, key));
    encode_keys(format, dim, group.data(), rows, scales_at(page, h, n));
    group.clear();
  }
  std::vector<double> get(DType dtype, std::int64_t page, std::int64_t h, std::int64_t n) {
    std::vector<double> values(static_cast<std::size_t>(dim));
    if (format.quantized())
      decode_row(format, dim, at(page, h, n), argument(page, h, n), values.data(), scales_at(page, h, n));
    else
      for (int i = 0; i < dim; ++i) values[i] = dtype_info(dtype).decode(at(page, h, n) + i * size_of(dtype));
    return values;
  }
  ConstTensorView view(const void* data) const { return {data, size, stride}; }
  ConstScaleView scale_view(const void* data, bool cached) const {
    if (scales.empty()) return {};
    const auto* floats = static_cast<const float*>(data);
    if (scales.size() == 1) return ConstScaleView::of_tensor(floats);
    if (cached) return ConstScaleView::of_keys(floats, size[0], size[1], size[2]);
    return {floats, {size[0], 1, size[1], size[2]}, {size[1] * size[2], 0, size[2], 1}};
  }
};

/// A case's memory on the host, and the same on the device.
class KvFormatRun {
 public:
  explicit KvFormatRun(const KvFormatCase& test)
      : test_(test),
        spec_(spec_for(test.family, test.spec)),
        k_(pool(spec_.kv.k_format, spec_.stored_k(), spec_.head_dim)),
        v_(pool(spec_.kv.v_format, spec_.stored_v(), spec_.v_dim())) {
    for (StoredPool* pool : {&k_, &v_})
      for (float& scale : pool->scales)
        scale =
            4.0f / largest_with_argument(pool->format) * (0.5f + 0.01f * static_cast<float>(random_() % 100));
    const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
    table_.resize(static_cast<std::size_t>(batch * columns()));
    std::vector<std::int32_t> pages(static_cast<std::size_t>(k_.size[0]));
    std::iota(pages.begin(), pages.end(), 0);
    if (spec_.kv.is_cache()) std::ranges::shuffle(pages, random_);
    std::copy_n(pages.begin(), table_.size(), table_.begin());
    for (std::int64_t b = 0; b < batch; ++b)
      lengths_.push_back(static_cast<std::int32_t>(b == 1 ? 1 : seqlen_kv - 3 * b % seqlen_kv));
    for (std::int64_t b = 0; b <= batch; ++b) offsets_.push_back(static_cast<std::int32_t>(b * seqlen_q));
    q_ = random_values(batch * heads_q * seqlen_q * spec_.head_dim);
    if (spec_.indices && test.neighbours)
      indices_ = reference::neighbouring_indices(batch * seqlen_q * heads_kv, test.top_k, seqlen_kv,
                                                 test.top_k / 8, random_());
    else if (spec_.indices)
      for (std::int64_t i = 0; i < batch * seqlen_q * heads_kv * test.top_k; ++i)
        indices_.push_back(static_cast<std::int32_t>(random_() % (seqlen_kv + 2)) - 1);
    if (spec_.indices && test.top_k > KvFormatCase{}.top_k)
      for (std::int64_t i = 0; i < batch * seqlen_q; ++i)
        topk_lengths_.push_back(static_cast<std::int32_t>(test.top_k - 13 * i % test.top_k));
    for (std::int64_t page = 0; page < k_.size[0]; ++page)
      for (std::int64_t h = 0; h < heads_kv; ++h)
        for (std::int64_t n = 0; n < k_.size[2]; ++n) {
          k_.put(spec_.dtype, page, h, n, random_values(spec_.head_dim));
          if (!spec_.kv.shared_kv) v_.put(spec_.dtype, page, h, n, random_values(spec_.v_dim()));
        }
  }

  const KernelSpec& spec() const { return spec_; }
  StoredPool& k() { return k_; }
  StoredPool& v() { return v_; }
  std::vector<double>& q() { return q_; }
  void softmax_scale(float scale) { scale_ = scale; }
  /// Where key `n` of a sequence is.
  std::int64_t page_of(std::int64_t b, std::int64_t n) const {
    return table_[static_cast<std::size_t>(b * columns() +
                                           (spec_.kv.is_paged() ? n / spec_.kv.page_size : 0))];
  }
  std::int64_t row_of(std::int64_t n) const { return spec_.kv.is_paged() ? n % spec_.kv.page_size : n; }

  /// Poisons rows that are no keys, and pages that lie in front of a window.
  void poison_dead_rows(int window) {
    if (!spec_.kv.has_lengths()) return;
    const std::int64_t rows = k_.size[2];
    for (std::int64_t b = 0; b < test_.shape.batch; ++b) {
      const std::int64_t first = window == 0 ? 0 : lengths_[b] - test_.shape.seqlen_q - window + 1;
      for (std::int64_t n = 0; n < columns() * rows; ++n)
        if (n >= lengths_[b] || (spec_.kv.is_paged() && (n / rows + 1) * rows <= first))
          for (std::int64_t h = 0; h < test_.shape.heads_kv; ++h) {
            k_.poison(page_of(b, n), h, row_of(n));
            if (!spec_.kv.shared_kv) v_.poison(page_of(b, n), h, row_of(n));
          }
    }
  }

  struct Results {
    std::vector<double> out, lse;
    bool operator==(const Results&) const = default;
  };
  /// By the CPU reference.
  Results reference() {
    const std::vector<std::uint8_t> q = encode(spec_.dtype, q_);
    std::vector<std::uint8_t> out(out_count() * size_of(spec_.dtype));
    std::vector<float> lse(lse_count());
    const ForwardArgs args =
        args_of({q.data(), k_.bytes.data(), v_.bytes.data(), k_.scales.data(), v_.scales.data(),
                 k_.block_scales.data(), v_.block_scales.data(), table_.data(), lengths_.data(),
                 indices_.data(), topk_lengths_.data(), offsets_.data(), out.data(), lse.data()});
    reference_forward(spec_, args);
    return {decode(spec_.dtype, out), {lse.begin(), lse.end()}};
  }
  /// By a kernel, by default of the family's heuristic.
  Results launch(Runtime& runtime, const std::optional<TileConfig>& config = {}) {
    const plan::FamilyTraits& family = plan::traits(test_.family);
    runtime.prepare(spec_, test_.shape, config ? *config : family.heuristic(spec_, test_.shape, gpu().info));
    const auto q = to_device(spec_.dtype, q_);
    const auto k = to_device(k_.bytes), v = to_device(v_.bytes);
    const auto k_scale = to_device(k_.scales), v_scale = to_device(v_.scales);
    const auto k_blocks = to_device(k_.block_scales), v_blocks = to_device(v_.block_scales);
    const auto table = to_device(table_), lengths = to_device(lengths_), indices = to_device(indices_),
               topk_lengths = to_device(topk_lengths_), offsets = to_device(offsets_);
    const GuardedMemory out(out_count() * size_of(spec_.dtype)), lse(lse_count() * sizeof(float));
    const GuardedMemory work(runtime.workspace_bytes(spec_, test_.shape));
    ForwardArgs args = args_of({q.data(), k.data(), v.data(), k_scale.data(), v_scale.data(), k_blocks.data(),
                                v_blocks.data(), table.data(), lengths.data(), indices.data(),
                                topk_lengths.data(), offsets.data(), out.data(), lse.data()});
    args.workspace = {work.data(), work.bytes()};
    runtime.forward(spec_, args, nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(out.guards_intact() && lse.guards_intact() && work.guards_intact());
    return {decode(spec_.dtype, out.content()), decode(DType::fp32, lse.content())};
  }

 private:
  struct Memory {
    const void *q, *k, *v, *k_scale, *v_scale, *k_block_scale, *v_block_scale, *table, *lengths, *indices,
        *topk_lengths, *offsets;
    void *out, *lse;
  };

  StoredPool pool(const KvFormat& format, const StoredKvRow& row, int dim) const {
    const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test_.shape;
    const std::int64_t rows = spec_.kv.is_paged() ? spec_.kv.page_size : seqlen_kv;
    return {spec_,    format, row,          dim, batch * columns() + (spec_.kv.is_cache() ? 2 : 0),
            heads_kv, rows,   test_.padding};
  }
  std::int64_t columns() const {
    if (!spec_.kv.is_paged()) return 1;
    return (test_.shape.seqlen_kv + spec_.kv.page_size - 1) / spec_.kv.page_size;
  }
  std::size_t out_count() const {
    return static_cast<std::size_t>(test_.shape.batch * test_.shape.heads_q * test_.shape.seqlen_q *
                                    spec_.v_dim());
  }
  std::size_t lse_count() const {
    return static_cast<std::size_t>(test_.shape.batch * test_.shape.heads_q * test_.shape.seqlen_q);
  }
  std::vector<double> random_values(std::int64_t count) {
    std::normal_distribution<double> normal;
    std::vector<double> values(static_cast<std::size_t>(count));
    for (double& value : values) value = dtype_info(spec_.dtype).round(normal(random_));
    return values;
  }
  ForwardArgs args_of(const Memory& memory) const {
    const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test_.shape;
    const bool cached = spec_.kv.is_cache(), shared = spec_.kv.shared_kv, packed = spec_.varlen;
    const std::int64_t q_batch = packed ? 1 : batch, rows = packed ? batch * seqlen_q : seqlen_q;
    ForwardArgs args{.q = ConstTensorView::bhsd(memory.q, q_batch, heads_q, rows, spec_.head_dim),
                     .k = k_.view(memory.k),
                     .v = shared ? k_.view(memory.k) : v_.view(memory.v),
                     .out = TensorView::bhsd(memory.out, q_batch, heads_q, rows, spec_.v_dim()),
                     .lse = static_cast<float*>(memory.lse),
                     .k_scale = k_.scale_view(memory.k_scale, cached),
                     .v_scale = shared ? ConstScaleView{} : v_.scale_view(memory.v_scale, cached),
                     .k_block_scale = k_.block_scale_view(memory.k_block_scale),
                     .v_block_scale = shared ? ConstTensorView{} : v_.block_scale_view(memory.v_block_scale)};
    if (scale_) args.softmax_scale = scale_;
    if (spec_.kv.has_lengths()) args.kv_lengths = static_cast<const std::int32_t*>(memory.lengths);
    if (packed) {
      args.cu_seqlens_q = static_cast<const std::int32_t*>(memory.offsets);
      args.batch_size = batch, args.max_seqlen_q = seqlen_q;
    }
    if (cached) {
      args.max_seqlen_kv = seqlen_kv;
      args.page_table = {static_cast<const std::int32_t*>(memory.table), batch, columns()};
    }
    if (spec_.indices)
      args.indices = IndicesView::contiguous(static_cast<const std::int32_t*>(memory.indices), batch,
                                             seqlen_q, heads_kv, test_.top_k);
    if (!topk_lengths_.empty()) {
      args.indices.topk_length = static_cast<const std::int32_t*>(memory.topk_lengths);
      args.indices.topk_length_stride = {seqlen_q, 1};
    }
    return args;
  }

  KvFormatCase test_;
  KernelSpec spec_;
  std::mt19937 random_{11};
  std::optional<float> scale_;
  StoredPool k_, v_;
  std::vector<double> q_;
  std::vector<std::int32_t> table_, lengths_, indices_, topk_lengths_, offsets_;
};

/// O and LSE agree within the limits of 16 bits.
inline void expect_near(const KvFormatRun::Results& got, const KvFormatRun::Results& wanted) {
  for (std::size_t i = 0; i < wanted.out.size(); ++i)
    ASSERT_NEAR(got.out[i], wanted.out[i], 0.02 * (0.5 + std::abs(wanted.out[i]))) << i;
  for (std::size_t i = 0; i < wanted.lse.size(); ++i)
    if (std::isfinite(wanted.lse[i])) {
      ASSERT_NEAR(got.lse[i], wanted.lse[i], 0.02 * (0.5 + std::abs(wanted.lse[i]))) << i;
    }
}

/// Kernel and reference agree.
inline void check_kv_format(Runtime& runtime, const KvFormatCase& test,
                            const std::optional<TileConfig>& config = {}) {
  SCOPED_TRACE(name_of(test));
  KvFormatRun run(test);
  const auto wanted = run.reference();
  expect_near(run.launch(runtime, config), wanted);
}

/// Every code of K and V, exactly: each sequence has one key, so that O is its V, and LSE of a query that is
/// 1 in one column and else 0 is that column of K. `spec`: without its layout; with as many queries as
/// columns.
inline void check_every_code(Runtime& runtime, const KvFormatCase& test,
                             const std::optional<TileConfig>& config = {}) {
  SCOPED_TRACE(name_of(test));
  KvFormatRun run(test);
  const int dim = run.spec().head_dim;
  const std::int64_t batch = test.shape.batch, keys = run.k().size[2];
  ASSERT_EQ(test.shape.seqlen_q, dim);
  ASSERT_TRUE(test.shape.seqlen_kv == 1 && test.shape.heads_q == 1 && keys >= 1);
  run.softmax_scale(1.0f);
  run.q().assign(run.q().size(), 0.0);
  for (std::int64_t i = 0; i < batch * dim; ++i) run.q()[i * dim + i % dim] = 1.0;
  const auto fill = [&](StoredPool& pool, int columns) {
    const unsigned codes = pool.format.quantized() ? 1u << pool.format.bits() : 64;
    for (std::int64_t b = 0; b < batch; ++b) {
      std::vector<double> row(static_cast<std::size_t>(columns));
      for (int i = 0; i < columns; ++i) {
        const unsigned code = static_cast<unsigned>((b * columns + i) % codes);
        const double value = !pool.format.quantized() ? code * 0.125 - 3
                             : pool.format.decode.empty()
                                 ? code_value(pool.format, code)
                                 : decode_expression(pool.format).value(static_cast<int>(code), 1, 0);
        row[i] = std::isfinite(value) ? value * pool.argument(run.page_of(b, 0), 0, 0) : 0;
      }
      pool.put(run.spec().dtype, run.page_of(b, 0), 0, run.row_of(0), row);
    }
  };
  fill(run.k(), dim);
  if (!run.spec().kv.shared_kv) fill(run.v(), run.spec().v_dim());
  const auto got = run.launch(runtime, config);
  const int dim_v = run.spec().v_dim();
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto k = run.k().get(run.spec().dtype, run.page_of(b, 0), 0, run.row_of(0));
    const auto v =
        run.spec().kv.shared_kv ? k : run.v().get(run.spec().dtype, run.page_of(b, 0), 0, run.row_of(0));
    const double ulp = 2 * dtype_info(run.spec().dtype).unit_roundoff;
    for (int i = 0; i < dim; ++i) {
      ASSERT_NEAR(got.lse[b * dim + i], k[i], ulp * std::abs(k[i]) + 1e-6) << "K " << b << " " << i;
      for (int j = 0; j < dim_v; ++j)
        ASSERT_NEAR(got.out[(b * dim + i) * dim_v + j], v[j], ulp * std::abs(v[j]) + 1e-6)
            << "V " << b << " " << j;
    }
  }
}

/// Bytes of a row of the scales' tensor.
inline std::size_t block_scale_bytes(const KvFormat& format, int dim) {
  return static_cast<std::size_t>(format.row(dim).scale_columns * size_of(format.scale_type));
}

/// Rows from a kernel are those of the reference, but for quotients next to the middle between two codes.
/// Scales that are apart have a row for each row, or for each group of keys, in the same order.
inline void expect_same_rows(const KvFormat& format, int dim, const std::vector<std::uint8_t>& got,
                             const std::vector<std::uint8_t>& wanted,
                             const std::vector<std::uint8_t>& got_scales = {},
                             const std::vector<std::uint8_t>& wanted_scales = {}) {
  ASSERT_EQ(got.size(), wanted.size());
  std::size_t other = 0;
  for (std::size_t i = 0; i < got.size(); ++i) other += got[i] != wanted[i];
  // Rotated rows differ in the last bits, which scales of fp32 show.
  const std::size_t most = got.size() / (format.scale_type == KvFormat::Number::fp32 ? 50 : 200);
  EXPECT_LE(other, most) << "of " << got.size() << " bytes, " << to_string(format);
  const std::size_t bytes = static_cast<std::size_t>(format.row_bytes(dim));
  std::vector<double> x(static_cast<std::size_t>(dim)), y(x);
  const auto scales_of = [&](const std::vector<std::uint8_t>& scales, std::size_t row) {
    return scales.data() + row / bytes / std::max(format.keys, 1) * block_scale_bytes(format, dim);
  };
  for (std::size_t row = 0; row + bytes <= got.size(); row += bytes) {
    decode_row(format, dim, &got[row], 1, x.data(), scales_of(got_scales, row));
    decode_row(format, dim, &wanted[row], 1, y.data(), scales_of(wanted_scales, row));
    const double largest = std::abs(*std::ranges::max_element(y, {}, [](double v) { return std::abs(v); }));
    for (int i = 0; i < dim; ++i) {
      if (x[i] == y[i]) continue;
      ASSERT_NEAR(x[i], y[i], 0.4 * largest + 1e-6) << row / bytes << " " << i;
    }
  }
}

inline std::vector<double> rows_with_zeros(std::int64_t rows, int dim) {
  std::mt19937 random(5);
  std::vector<double> values = normal_values(rows * dim, DType::bf16, 2.0, random);
  std::fill_n(values.begin(), dim, 0.0);  // a row of zeros, whose scales are 1
  return values;
}

/// Blocks with an extreme of both signs, in eight columns side by side or not, with numbers that scales are
/// too large or too small for, and of zeros of both signs.
inline std::vector<double> rows_at_edges(std::int64_t rows, int dim) {
  std::mt19937 random(7);
  std::vector<double> values = normal_values(rows * dim, DType::bf16, 1.0, random);
  for (std::int64_t row = 0; row < rows; ++row)
    for (int i = 0; i < dim; ++i) {
      double& value = values[row * dim + i];
      const int in_block = i % 32, kind = static_cast<int>(row % 6), one = kind == 0 ? 1 : 2;
      if (kind <= 1 && in_block == one) value = kind == 0 ? -8 : 8;
      if (kind <= 1 && in_block == (kind == 0 ? 6 : 17)) value = kind == 0 ? 8 : -8;
      if (kind == 2) value = std::ldexp(value, -21);
      if (kind == 3) value = std::ldexp(value, 22);
      if (kind == 4) value = i % 3 ? 0.0 : -0.0;
    }
  return values;
}

inline void check_quantized_rows(Runtime& runtime, const std::string& format_text) {
  const KernelSpec spec = parse_spec("quantize:bf16:d128:kv{" + format_text + "}");
  const KvFormat& format = spec.kv.k_format;
  const std::int64_t batch = 2, heads = 3, rows = format.keys > 0 ? 2 * format.keys : 7,
                     bytes = spec.stored_k().columns;
  const std::int64_t scale_rows = rows / std::max(format.keys, 1);
  const std::vector<double> x = rows_with_zeros(batch * heads * rows, 128);
  const auto args_of = [&](const void* from, void* codes, void* scale, void* block_scale) {
    QuantizeArgs args{.x = ConstTensorView::bhsd(from, batch, heads, rows, 128),
                      .codes = TensorView::bhsd(codes, batch, heads, rows, bytes),
                      .scale = {}};
    if (format.has_argument()) args.scale = ScaleView::of_heads(static_cast<float*>(scale), batch, heads);
    if (format.has_block_scales())
      args.block_scale =
          TensorView::bhsd(block_scale, batch, heads, scale_rows, format.row(128).scale_columns);
    return args;
  };
  const std::vector<std::uint8_t> host_x = encode(DType::bf16, x);
  std::vector<std::uint8_t> wanted(static_cast<std::size_t>(batch * heads * rows * bytes));
  std::vector<float> wanted_scales(6);
  std::vector<std::uint8_t> wanted_blocks(batch * heads * scale_rows * block_scale_bytes(format, 128));
  reference_quantize(spec, args_of(host_x.data(), wanted.data(), wanted_scales.data(), wanted_blocks.data()));
  const auto device_x = to_device(host_x);
  const GuardedMemory codes(wanted.size()), scales(6 * sizeof(float)), blocks(wanted_blocks.size());
  runtime.quantize(spec, args_of(device_x.data(), codes.data(), scales.data(), blocks.data()), nullptr);
  gpu().context->synchronize();
  EXPECT_TRUE(codes.guards_intact() && scales.guards_intact() && blocks.guards_intact());
  const std::vector<double> got_scales = decode(DType::fp32, scales.content());
  for (int i = 0; i < 6 && format.has_argument(); ++i)
    EXPECT_NEAR(got_scales[i], wanted_scales[i], 1e-5 * wanted_scales[i]) << i;
  expect_same_rows(format, 128, codes.content(), wanted, blocks.content(), wanted_blocks);
}

/// New rows in pages in any order, rotated or not. With 576 columns they are latents, which have no V of
/// their own.
inline void check_appended_rows(Runtime& runtime, const std::string& format_text, int dim = 128,
                                bool rotates = true,
                                std::vector<double> (&made)(std::int64_t, int) = rows_with_zeros,
                                const char* option = "") {
  const bool latent = dim > 512, keyed = parse_kv_format(format_text).scales == KvFormat::Scales::argument;
  const KernelSpec spec = parse_spec(fmt::format("append:bf16:d{}:kv{{{}}}:pages4{}{}",
                                                 latent ? "576x512" : std::to_string(dim), format_text,
                                                 latent  ? ":shared_kv"
                                                 : keyed ? ":key_scales"
                                                         : "",
                                                 option))
                              .normalized();
  const KvFormat& format = spec.kv.k_format;
  const std::int64_t batch = 2, heads = latent ? 1 : 2, rows = 5, pages = 6, bytes = spec.stored_k().columns;
  const std::vector<std::int32_t> table{4, 0, 2, 1, 5, 3}, lengths{9, 12};
  const std::vector<std::uint8_t> x = encode(DType::bf16, made(batch * heads * rows, dim));
  const std::vector<float> fixed_scales(static_cast<std::size_t>(pages * heads * 4), 0.01f);
  const auto args_of = [&](const void* from, void* k, void* v, void* k_scale, void* v_scale, void* k_blocks,
                           void* v_blocks, const void* page_table, const void* kv_lengths) {
    const auto view = ConstTensorView::bhsd(from, batch, heads, rows, dim);
    AppendArgs args{.k = view,
                    .v = latent ? ConstTensorView{} : view,
                    .k_cache = TensorView::bshd(k, pages, 4, heads, bytes),
                    .v_cache = latent ? TensorView{} : TensorView::bshd(v, pages, 4, heads, bytes),
                    .kv_lengths = static_cast<const std::int32_t*>(kv_lengths),
                    .page_table = {static_cast<const std::int32_t*>(page_table), batch, 3},
                    .rope = {.theta = latent || !rotates ? 0 : 1e4f}};
    const auto scale = [&](void* data) {
      if (!format.has_argument()) return ScaleView{};
      auto* floats = static_cast<float*>(data);
      return keyed ? ScaleView::of_keys(floats, pages, heads, 4) : ScaleView::of_tensor(floats);
    };
    args.k_scale = scale(k_scale), args.v_scale = scale(v_scale);
    if (format.has_block_scales()) {
      const int columns = format.row(dim).scale_columns;
      args.k_block_scale = TensorView::bshd(k_blocks, pages, 4, heads, columns);
      if (!latent) args.v_block_scale = TensorView::bshd(v_blocks, pages, 4, heads, columns);
    }
    return args;
  };
  std::vector<std::uint8_t> k(static_cast<std::size_t>(pages * 4 * heads * bytes), 0), v = k;
  std::vector<std::uint8_t> k_blocks(pages * 4 * heads * block_scale_bytes(format, dim), 0),
      v_blocks = k_blocks;
  std::vector<float> k_scales = fixed_scales, v_scales = fixed_scales;
  const auto device_x = to_device(x), device_k = to_device(k), device_v = to_device(v);
  const auto device_k_scales = to_device(k_scales), device_v_scales = to_device(v_scales);
  const auto device_k_blocks = to_device(k_blocks), device_v_blocks = to_device(v_blocks);
  const auto device_table = to_device(table), device_lengths = to_device(lengths);
  reference_append(spec, args_of(x.data(), k.data(), v.data(), k_scales.data(), v_scales.data(),
                                 k_blocks.data(), v_blocks.data(), table.data(), lengths.data()));
  runtime.append(spec,
                 args_of(device_x.data(), device_k.data(), device_v.data(), device_k_scales.data(),
                         device_v_scales.data(), device_k_blocks.data(), device_v_blocks.data(),
                         device_table.data(), device_lengths.data()),
                 nullptr);
  gpu().context->synchronize();
  const auto downloaded = [](const auto& buffer) { return device::download<std::uint8_t>(buffer); };
  expect_same_rows(format, dim, downloaded(device_k), k, downloaded(device_k_blocks), k_blocks);
  expect_same_rows(format, dim, downloaded(device_v), v, downloaded(device_v_blocks), v_blocks);
  const std::vector<double> got_scales = from_device(DType::fp32, device_k_scales);
  for (std::size_t i = 0; i < k_scales.size() && keyed; ++i)
    EXPECT_NEAR(got_scales[i], k_scales[i], 1e-4 * k_scales[i]) << i;
}

/// Such K and V in every layout, by the families that read them.
inline std::vector<KvFormatCase> block_scale_cases(const std::vector<Family>& families) {
  std::vector<KvFormatCase> all;
  for (const Family family : families) {
    for (const char* spec :
         {"bf16:d128:kv{int4:g32:fp16:apart:zero}:pages16:causal",
          "bf16:d128:k{int4:keys32:fp16:zero=uint4}:v{uint4:g32:fp16:apart:zero=uint4}:pages64:causal",
          "fp16:d64:k{e2m1:g16:e4m3:apart:scaled}:cache",
          "bf16:d64:k{q8_0}:v{uint2:g32:bf16:apart:min}:pages3", "bf16:d128:kv{e4m3:g64:fp32:apart:tail64}",
          "bf16:d576x512:kv{e4m3:g128:fp32:apart:tail64}:shared_kv:pages64:indices",
          "bf16:d512:kv{fp8_ds_mla_v4}:shared_kv:pages64:indices",
          "bf16:d128:kv{int4_offset:row:e8m0:apart:halves}:cache:causal",
          "bf16:d128:k{uint2:keys32:fp16:min}:v{uint2:g32:fp16:min}:pages64:causal",
          "fp16:d64:k{int4:keys16:bf16:zero}:v{e4m3}:cache", "bf16:d128:kv{e4m3:keys64:fp32}",
          "bf16:d128:k{uint2:keys16:fp16:zero:tail64}:v{uint2:g32:fp16:apart:min}:pages16:indices"})
      all.push_back({spec, {2, 4, 1, 3, 90}, family, 1});
    // Rows of codes follow each other in a page; a window that leaves pages; tiles within a group of keys.
    all.push_back({"bf16:d128:kv{e2m1:g16:e4m3:apart:scaled}:pages16:causal", {2, 4, 1, 1, 150}, family});
    all.push_back(
        {"bf16:d128:k{uint2:keys16:fp16:min}:v{uint2:g16:fp16:apart:min}:pages16:mask{kv > q + "
         "seqlen_kv - seqlen_q - 37 && kv <= q + seqlen_kv - seqlen_q}",
         {2, 4, 2, 2, 150},
         family,
         1});
    all.push_back({"bf16:d128:kv{int4:keys128:fp16:zero}:cache:causal", {2, 4, 2, 70, 300}, family});
    all.push_back(
        {"bf16:d256:k{uint4:keys64:fp32:zero}:v{int4:g32:fp16:apart}:pages64", {2, 4, 1, 1, 200}, family});
  }
  std::erase_if(all, [](const KvFormatCase& test) {
    return !plan::traits(test.family)
                .supports(parse_spec(test.spec).normalized(), DeviceInfo::parse("sm_90a"));
  });
  return all;
}

/// K and V in formats drawn from the grammar, in drawn layouts and by drawn families: always the same
/// `count`.
inline std::vector<KvFormatCase> drawn_kv_format_cases(const std::vector<Family>& families, int count) {
  std::mt19937 random(2024);
  const std::vector<std::string> layouts{"", ":causal", ":cache", ":pages16:causal", ":pages64", ":pages3"};
  std::vector<KvFormatCase> all;
  while (static_cast<int>(all.size()) < count) {
    const Family family = families[random() % families.size()];
    const std::string of_k = drawn_kv_format(random), of_v = drawn_kv_format(random);
    if (of_k.find(':') == std::string::npos) continue;  // both may be codes alone, which are not decoded
    const std::string spec = fmt::format("{}:d128:k{{{}}}:v{{{}}}{}", random() % 2 ? "bf16" : "fp16", of_k,
                                         of_v, layouts[random() % layouts.size()]);
    const auto below = [&](int most) { return static_cast<std::int64_t>(random() % most); };
    const AttentionShape shape{2, 4, 1 + below(2), 1 + below(5), 40 + below(110)};
    const int padding = static_cast<int>(random() % 3);
    try {
      const KernelSpec known = parse_spec(spec).normalized();
      known.validate();
      if (plan::traits(family).supports(known, DeviceInfo::parse("sm_90a")))
        all.push_back({spec, shape, family, padding});
    } catch (const Error&) {  // such as pages that have no whole groups of keys
    }
  }
  return all;
}

}  // namespace flashjit::test

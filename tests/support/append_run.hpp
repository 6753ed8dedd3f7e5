// append() and merge() on a device against fp64, with everything that they must not write poisoned.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#include "tests/support/attention_case.hpp"
#include "tests/support/cache_case.hpp"

namespace flashjit::test {

enum class Rope : std::uint8_t { none, halves, interleaved, typed_tables, theta };
enum class Sections : std::uint8_t { none, apart, interleaved };

struct AppendCase {
  CacheCase cache;  ///< its seqlen_q: new rows of a sequence, with varlen the most
  Rope rope = Rope::halves;
  int dims = 0;            ///< of the rotation; 0: head_dim
  bool positions = false;  ///< given, up to 2^20
  bool q_in_place = false;
  int slot_bytes = 0;                  ///< 4 or 8: rows go to slots of int32 or int64, some to none
  Sections sections = Sections::none;  ///< with positions
  bool norms = false;                  ///< of K and Q, with weights of fp32 and of the spec's type
  bool without_q = false;
};

inline std::string name_of(const AppendCase& test) {
  constexpr const char* kRopes[] = {"none", "halves", "interleaved", "typed_tables", "theta"};
  constexpr const char* kSections[] = {"", "_sections", "_interleaved_sections"};
  return fmt::format("{}_{}{}{}{}{}{}{}{}", name_of(test.cache), kRopes[static_cast<int>(test.rope)],
                     test.dims, test.positions ? "_positions" : "", test.q_in_place ? "_in_place" : "",
                     test.slot_bytes ? fmt::format("_slots{}", test.slot_bytes) : "",
                     kSections[static_cast<int>(test.sections)], test.norms ? "_norms" : "",
                     test.without_q ? "_without_q" : "");
}

/// A tensor of rows [batch, heads, rows, dim] in the memory order [batch, rows, heads, dim].
struct Rows {
  std::int64_t batch, heads, rows, dim;
  std::vector<double> values = {};

  double* row(std::int64_t b, std::int64_t h, std::int64_t s) {
    return &values[((b * rows + s) * heads + h) * dim];
  }
  template <class Void>
  BasicTensorView<Void> view(Void* data) const {
    return BasicTensorView<Void>::bshd(data, batch, rows, heads, dim);
  }
};

class AppendRun {
 public:
  explicit AppendRun(const AppendCase& test)
      : test_(test), spec_(test.cache.spec.normalized()), cache_(make_cache(test.cache)) {
    const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.cache.shape;
    const reference::Problem& problem = cache_.problem;
    constexpr std::int64_t kUnusedRows = 2;
    const std::int64_t rows = spec_.varlen ? problem.cu_seqlens_q.back() + kUnusedRows : seqlen_q;
    const std::int64_t b = spec_.varlen ? 1 : batch;
    k_ = make_rows(b, heads_kv, rows, spec_.head_dim);
    v_ = make_rows(b, heads_kv, rows, spec_.v_dim());
    q_ = make_rows(b, heads_q, rows, spec_.head_dim);
    make_rotation(b * rows);
    make_norms();
    expected_q_ = q_;
    if (!test_.q_in_place) std::ranges::fill(expected_q_.values, kPoison);
    if (test_.slot_bytes) slots_.assign(static_cast<std::size_t>(b * rows), -1);
    poison_new_keys();
  }

  void check(Runtime& runtime) {
    const DType dtype = spec_.dtype, cached = spec_.kv_type();
    device::DeviceBuffer k = to_device(dtype, k_.values), v = to_device(dtype, v_.values),
                         q = to_device(dtype, q_.values), q_out = poisoned(q_.values.size() * size_of(dtype)),
                         k_cache = to_device(cached, cache_.k.values),
                         v_cache = to_device(cached, cache_.v.values),
                         k_scale = to_device(DType::fp32, cache_.k_scale.values),
                         v_scale = to_device(DType::fp32, cache_.v_scale.values),
                         lengths = to_device(cache_.problem.kv_lengths), table = to_device(cache_.table),
                         starts = to_device(cache_.starts), offsets = to_device(cache_.problem.cu_seqlens_q),
                         positions = to_device(positions_), cos = to_device(table_type(), cos_),
                         sin = to_device(table_type(), sin_);
    const device::DeviceBuffer k_weight = to_device(DType::fp32, k_weight_),
                               q_weight = to_device(dtype, q_weight_);
    const bool shared = test_.cache.layout == PoolLayout::interleaved, tables = !cos_.empty();
    device::DeviceBuffer& rotated_q = test_.q_in_place ? q : q_out;
    AppendArgs args{
        .k = k_.view(static_cast<const void*>(k.data())),
        .v = v_.view(static_cast<const void*>(v.data())),
        .k_cache = cache_.k.view(k_cache.data(), cached),
        .v_cache = cache_.v.view(shared ? k_cache.data() : v_cache.data(), cached),
        .kv_lengths = static_cast<const std::int32_t*>(lengths.data()),
        .page_table = cache_.table_view(static_cast<const std::int32_t*>(table.data()),
                                        static_cast<const std::int32_t*>(starts.data())),
        .q = q_.view(static_cast<const void*>(q.data())),
        .q_out = q_.view(rotated_q.data()),
        .rope = {.cos = tables ? cos.data() : nullptr,
                 .sin = tables ? sin.data() : nullptr,
                 .table_rows = table_rows_,
                 .type = table_type(),
                 .theta = test_.rope == Rope::theta ? kTheta : 0.0f,
                 .dims = test_.dims,
                 .interleaved = test_.rope == Rope::interleaved,
                 .positions =
                     positions_.empty() ? nullptr : static_cast<const std::int32_t*>(positions.data()),
                 .sections = sections(),
                 .interleaved_sections = test_.sections == Sections::interleaved},
        .max_seqlen_kv = test_.cache.shape.seqlen_kv,
        .k_scale = writable(cache_.k_scale, k_scale),
        .v_scale = writable(cache_.v_scale, v_scale)};
    if (test_.norms)
      args.k_norm = {k_weight.data(), DType::fp32, kEps}, args.q_norm = {q_weight.data(), dtype, kEps};
    if (spec_.varlen) {
      args.cu_seqlens_q = static_cast<const std::int32_t*>(offsets.data());
      args.batch_size = test_.cache.shape.batch;
    }
    device::DeviceBuffer wide = to_device(slots_),
                         narrow = to_device(std::vector<std::int32_t>(slots_.begin(), slots_.end()));
    if (test_.slot_bytes) {
      args.kv_lengths = args.cu_seqlens_q = nullptr;
      args.page_table = {};
      args.batch_size = args.max_seqlen_kv = 0;
      args.slots = test_.slot_bytes == 8 ? SlotsView{wide.data(), ElementType::int64}
                                         : SlotsView{narrow.data(), ElementType::int32};
    }
    if (test_.without_q) args.q = {}, args.q_out = {};
    runtime.append(test_.cache.spec, args, nullptr);
    gpu().context->synchronize();
    std::vector<double> got_k = from_device(cached, k_cache), got_v = from_device(cached, v_cache);
    if (spec_.has_scales()) {
      Scales of_k = cache_.k_scale, of_v = cache_.v_scale;
      of_k.values = from_device(DType::fp32, k_scale), of_v.values = from_device(DType::fp32, v_scale);
      compare_scales("k_scale", cache_.k_scale, of_k);
      compare_scales("v_scale", cache_.v_scale, of_v);
      multiply(got_k, cache_.k, of_k);
      multiply(shared ? got_k : got_v, cache_.v, of_v);
    }
    compare("k_cache", expected_k_, cache_.k.values, got_k, cached);
    if (!shared) compare("v_cache", expected_v_, cache_.v.values, got_v, cached);
    if (!test_.without_q) compare("q_out", expected_q_.values, {}, from_device(dtype, rotated_q), dtype);
  }

 private:
  static constexpr double kPoison = std::numeric_limits<double>::quiet_NaN();
  static constexpr float kTheta = 10000.0f, kEps = 1e-3f;

  static ScaleView writable(const Scales& scales, device::DeviceBuffer& memory) {
    const ConstScaleView view = scales.view(memory.data());
    return {static_cast<float*>(memory.data()), view.size, view.stride};
  }

  /// Whose page it is; -1: nobody's.
  std::int64_t sequence_of(std::int64_t page) const {
    for (std::int64_t b = 0; b < test_.cache.shape.batch; ++b) {
      if (cache_.table.empty() && page == b) return b;
      const std::int64_t keys = cache_.problem.kv_lengths[b], rows = cache_.k.size[2];
      for (std::int64_t key = 0; key < keys && !cache_.table.empty(); key += rows)
        if (cache_.entry(b, key / rows) == page) return b;
    }
    return -1;
  }
  /// From codes to what they mean.
  void multiply(std::vector<double>& values, const Pool& pool, Scales scales) const {
    for (std::int64_t page = 0; page < pool.size[0]; ++page) {
      const std::int64_t b = std::max<std::int64_t>(sequence_of(page), 0);
      for (std::int64_t h = 0; h < pool.size[1]; ++h)
        for (std::int64_t row = 0; row < pool.size[2]; ++row)
          for (std::int64_t i = 0; i < pool.size[3]; ++i)
            values[pool.offset + page * pool.stride[0] + h * pool.stride[1] + row * pool.stride[2] + i] *=
                scales.at(b, page, h, row);
    }
  }
  /// Scales are as before but for the new keys', with key_scales.
  void compare_scales(const char* name, const Scales& expected, const Scales& got) const {
    for (std::size_t i = 0; i < got.values.size(); ++i)
      if (std::isnan(expected.values[i]))
        EXPECT_TRUE(std::isnan(got.values[i])) << name << " is written at " << i;
      else
        EXPECT_NEAR(got.values[i], expected.values[i], 1e-5 * expected.values[i]) << name << " at " << i;
  }

  DType table_type() const { return test_.rope == Rope::typed_tables ? spec_.dtype : DType::fp32; }
  int dims() const { return test_.dims ? test_.dims : spec_.head_dim; }

  Rows make_rows(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) {
    Rows made{b, h, s, d};
    std::mt19937 random(5 + test_.cache.seed);
    std::normal_distribution<double> normal;
    made.values.resize(static_cast<std::size_t>(b * h * s * d));
    for (double& value : made.values) value = reference::round_to(spec_.dtype, normal(random));
    return made;
  }

  void make_rotation(std::int64_t rows) {
    if (test_.rope == Rope::none) return;
    const bool far = test_.positions && test_.rope == Rope::theta;
    if (test_.positions)
      for (std::int64_t i = 0; i < (test_.sections == Sections::none ? rows : 3 * rows); ++i)
        positions_.push_back(static_cast<std::int32_t>(far ? (1 << 20) - 17 * i : (37 * i + 5) % 50));
    if (test_.rope == Rope::theta) return;
    table_rows_ = std::max<std::int64_t>(test_.cache.shape.seqlen_kv, 50);
    for (std::int64_t position = 0; position < table_rows_; ++position)
      for (int pair = 0; pair < dims() / 2; ++pair) {
        const double angle = static_cast<double>(position) * std::pow(kTheta, -2.0 * pair / dims());
        cos_.push_back(reference::round_to(table_type(), std::cos(angle)));
        sin_.push_back(reference::round_to(table_type(), std::sin(angle)));
      }
  }

  void make_norms() {
    if (!test_.norms) return;
    std::mt19937 random(9);
    std::uniform_real_distribution<double> weight(0.5, 1.5);
    for (int i = 0; i < spec_.head_dim; ++i) {
      k_weight_.push_back(static_cast<float>(weight(random)));
      q_weight_.push_back(reference::round_to(spec_.dtype, weight(random)));
    }
  }
  std::vector<double> normed(std::vector<double> row, const std::vector<double>& weight) const {
    double squares = 0;
    for (const double value : row) squares += value * value;
    for (std::size_t i = 0; i < weight.size(); ++i)
      row[i] *= weight[i] / std::sqrt(squares / static_cast<double>(row.size()) + kEps);
    return row;
  }

  /// A quarter of the pairs turns by the time, half by the height and the rest by the width; interleaved,
  /// half, a quarter and a quarter, as the first is the largest there.
  std::array<int, 3> sections() const {
    const int quarter = dims() / 8;
    if (test_.sections == Sections::none) return {};
    return test_.sections == Sections::apart ? std::array{quarter, 2 * quarter, dims() / 2 - 3 * quarter}
                                             : std::array{dims() / 2 - 2 * quarter, quarter, quarter};
  }
  /// Which of a row's positions turns a pair.
  int section_of(int pair) const {
    const auto [time, height, width] = sections();
    if (test_.sections == Sections::interleaved)
      return pair % 3 == 1 && pair < 3 * height ? 1 : pair % 3 == 2 && pair < 3 * width ? 2 : 0;
    return pair < time ? 0 : pair < time + height ? 1 : 2;
  }

  /// A row times blocks of a Hadamard matrix.
  static std::vector<double> by_hadamard(const std::vector<double>& row) {
    const std::size_t block = row.size() & -row.size();
    std::vector<double> out(row.size());
    for (std::size_t i = 0; i < row.size(); ++i)
      for (std::size_t j = 0; j < block; ++j)
        out[i] += row[i / block * block + j] * (std::popcount(i % block & j) % 2 ? -1 : 1) /
                  std::sqrt(static_cast<double>(block));
    return out;
  }

  std::vector<double> rotated(const double* first, const std::vector<double>& weight,
                              const std::array<std::int64_t, 3>& positions) const {
    std::vector<double> row(first, first + spec_.head_dim);
    if (test_.norms) row = normed(row, weight);
    if (test_.rope != Rope::none) row = turned(row, positions);
    return test_.cache.spec.kv.hadamard ? by_hadamard(row) : row;
  }
  std::vector<double> turned(const std::vector<double>& row,
                             const std::array<std::int64_t, 3>& positions) const {
    std::vector<double> out = row;
    const int pairs = dims() / 2;
    for (int pair = 0; pair < pairs; ++pair) {
      const std::int64_t position = positions[test_.sections == Sections::none ? 0 : section_of(pair)];
      const double angle =
          static_cast<double>(position) * std::pow(static_cast<double>(kTheta), -1.0 * pair / pairs);
      const bool tables = !cos_.empty();
      const double c = tables ? cos_[position * pairs + pair] : std::cos(angle);
      const double s = tables ? sin_[position * pairs + pair] : std::sin(angle);
      const int x = test_.rope == Rope::interleaved ? 2 * pair : pair;
      const int y = test_.rope == Rope::interleaved ? x + 1 : pair + pairs;
      out[x] = row[x] * c - row[y] * s;
      out[y] = row[x] * s + row[y] * c;
    }
    return out;
  }

  /// Takes the new keys out of the cache, and notes what is to come there and in Q.
  void poison_new_keys() {
    const std::int64_t batch = test_.cache.shape.batch, page_rows = cache_.k.size[2];
    const bool shared = test_.cache.layout == PoolLayout::interleaved;
    Pool& v_pool = shared ? cache_.k : cache_.v;
    expected_k_ = cache_.k.values, expected_v_ = cache_.v.values;
    std::vector<double>& expected_v = shared ? expected_k_ : expected_v_;
    if (spec_.has_scales()) {
      multiply(expected_k_, cache_.k, cache_.k_scale);
      multiply(expected_v, cache_.v, cache_.v_scale);
    }
    // A new key's scale, or what is left of it by a scale that is given.
    const auto quantized = [&](std::vector<double> row, double* scale) {
      if (!spec_.has_scales()) return row;
      const double largest = dtype_info(spec_.kv_type()).largest;
      if (spec_.kv.key_scales) *scale = largest_finite(row) / largest;
      for (double& value : row) value = std::clamp(value, -largest * *scale, largest * *scale);
      return row;
    };
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int64_t first = spec_.varlen ? cache_.problem.cu_seqlens_q[b] : 0;
      const std::int64_t count = spec_.varlen ? cache_.problem.cu_seqlens_q[b + 1] - first : k_.rows;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t key = cache_.problem.kv_lengths[b] - count + i;
        if (key < 0) continue;
        const std::int64_t at = spec_.varlen ? 0 : b, s = first + i;
        std::array<std::int64_t, 3> position{key, key, key};
        for (std::int64_t n = 0; n < 3 && !positions_.empty(); ++n)
          position[n] =
              positions_[at * k_.rows + s + (test_.sections == Sections::none ? 0 : n * k_.batch * k_.rows)];
        const std::int64_t page = cache_.table.empty() ? b : cache_.entry(b, key / page_rows);
        if (test_.slot_bytes) {
          const bool left_out = (at * k_.rows + s) % 5 == 3;
          slots_[static_cast<std::size_t>(at * k_.rows + s)] =
              left_out ? (s % 2 ? -1 : cache_.k.size[0] * page_rows) : page * page_rows + key % page_rows;
          if (left_out) continue;
        }
        const auto place = [&](const Pool& pool, std::int64_t h) {
          return pool.offset + page * pool.stride[0] + h * pool.stride[1] + key % page_rows * pool.stride[2];
        };
        for (std::int64_t h = 0; h < k_.heads; ++h) {
          const auto scale_of = [&](Scales& scales) {
            return spec_.has_scales() ? &scales.at(b, page, h, key % page_rows) : nullptr;
          };
          std::ranges::copy(
              quantized(rotated(k_.row(at, h, s), k_weight_, position), scale_of(cache_.k_scale)),
              &expected_k_[place(cache_.k, h)]);
          const std::vector<double> v_row(v_.row(at, h, s), v_.row(at, h, s) + v_.dim);
          std::ranges::copy(quantized(v_row, scale_of(cache_.v_scale)), &expected_v[place(cache_.v, h)]);
          std::fill_n(&cache_.k.values[place(cache_.k, h)], k_.dim, kPoison);
          std::fill_n(&v_pool.values[place(cache_.v, h)], v_.dim, kPoison);
        }
        for (std::int64_t h = 0; h < q_.heads; ++h)
          std::ranges::copy(rotated(q_.row(at, h, s), q_weight_, position), expected_q_.row(at, h, s));
      }
    }
  }

  /// Half a unit in the last place, and what fp32 makes of the angle.
  void compare(const char* name, const std::vector<double>& expected, const std::vector<double>& before,
               const std::vector<double>& got, DType type) const {
    const bool codes = size_of(type) == 1, marked = type != DType::int8;  // which has no NaN
    const double half = type == DType::int8 || type == DType::fp32 ? 0 : dtype_info(type).unit_roundoff;
    double least = 1e-5;  // half the distance of codes next to zero
    if (codes)
      for (const Scales* scales : {&cache_.k_scale, &cache_.v_scale})
        least = std::max(least, largest_finite(scales->values) * (type == DType::int8   ? 0.501
                                                                  : type == DType::e4m3 ? 0x1p-10
                                                                                        : 0x1p-17));
    ASSERT_EQ(got.size(), expected.size());
    std::size_t written = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(got[i]) || !marked) << name << " is written at " << i;
      } else {
        ASSERT_NEAR(got[i], expected[i], 1.001 * half * std::abs(expected[i]) + least) << name << " at " << i;
      }
      written += !before.empty() && std::isnan(before[i]) && !std::isnan(got[i]);
    }
    if (!before.empty() && marked) {
      EXPECT_GT(written, 0u) << name;
    }
  }

  AppendCase test_;
  KernelSpec spec_;
  Cache cache_;  ///< before the call
  Rows k_{}, v_{}, q_{}, expected_q_{};
  std::vector<double> expected_k_, expected_v_, cos_, sin_, k_weight_, q_weight_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int64_t> slots_;
  std::int64_t table_rows_ = 0;
};

/// Every layout by turns with every rotation.
inline std::vector<AppendCase> append_cases(std::initializer_list<const char*> specs,
                                            const std::vector<AttentionShape>& shapes) {
  std::vector<AppendCase> all;
  unsigned seed = 0;
  for (const Rope rope : {Rope::none, Rope::halves, Rope::interleaved, Rope::typed_tables, Rope::theta})
    for (const char* text : specs) {
      AppendCase test{.cache = {.spec = parse_spec(text),
                                .shape = shapes[(seed + seed / shapes.size()) % shapes.size()],
                                .layout = static_cast<PoolLayout>((seed + seed / 3) % 3),
                                .slot_table = seed % 2 == 1,
                                .own_scales = parse_spec(text).kv.key_scales,
                                .seed = seed},
                      .rope = rope,
                      .positions = rope != Rope::none && seed % 2 == 0,
                      .q_in_place = seed % 3 == 0};
      const KernelSpec& spec = test.cache.spec;
      if (rope != Rope::none) test.dims = seed % 2 ? 16 : spec.head_dim / 16 * 16;
      if (spec.v_dim() != spec.head_dim && test.cache.layout == PoolLayout::interleaved)
        test.cache.layout = PoolLayout::hnd;
      all.push_back(test);
      ++seed;
    }
  return all;
}

/// The same cases with norms of K and Q, and the three positions of M-RoPE where there is a rotation.
inline std::vector<AppendCase> with_norms(std::vector<AppendCase> cases) {
  for (std::size_t i = 0; i < cases.size(); ++i) {
    AppendCase& test = cases[i];
    test.norms = true;
    if (test.rope == Rope::none) continue;
    test.positions = true;
    test.sections = i % 2 ? Sections::apart : Sections::interleaved;
  }
  return cases;
}

/// Rows as they come, without Q: a block for each, and a warp for each of many.
inline std::vector<AppendCase> rows_as_they_come(std::initializer_list<const char*> specs) {
  std::vector<AppendCase> all;
  for (const AttentionShape& shape : {AttentionShape{4, 4, 2, 7, 50}, {3, 2, 2, 1, 40}, {3, 2, 1, 700, 720}})
    for (AppendCase test : append_cases(specs, {shape}))
      if (test.rope == Rope::none) test.without_q = true, all.push_back(test);
  return all;
}

/// The same cases with slots in place of lengths and tables.
inline std::vector<AppendCase> with_slots(std::vector<AppendCase> cases) {
  for (std::size_t i = 0; i < cases.size(); ++i) {
    AppendCase& test = cases[i];
    test.slot_bytes = i % 2 ? 8 : 4;
    test.positions = test.rope != Rope::none;
  }
  return cases;
}
inline std::vector<AppendCase> rows_without_q() {
  return rows_as_they_come({"bf16:d128:causal:varlen:pages16", "fp16:d64:pages3", "bf16:d256:cache",
                            "bf16:d32:kve4m3:varlen:pages16", "fp16:d64:kve4m3:cache",
                            "bf16:d64:kve5m2:pages16"});
}
inline std::vector<AppendCase> slots_without_q() {
  return with_slots(
      rows_as_they_come({"bf16:d128:causal:varlen:pages16", "fp16:d64:pages3", "bf16:d256:cache"}));
}

/// States of some of the rows, merged on the device and in fp64.
inline void check_merge(Runtime& runtime, const char* spec_text, int count, std::optional<DType> states_type,
                        std::optional<DType> out_type, bool in_place) {
  const KernelSpec spec = parse_spec(spec_text);
  const DType from = states_type.value_or(spec.dtype), to = out_type.value_or(spec.dtype);
  constexpr std::int64_t kBatch = 3, kHeads = 2, kRows = 5;
  const std::int64_t rows = kBatch * kHeads * kRows, dim = spec.v_dim();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::mt19937 random(count);
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> o(count), lse(count);
  // LSE is [batch, heads, rows], in memory of every other state [batch, rows, heads], as O is.
  const auto place_of = [&](std::int64_t row) {
    const std::int64_t s = row % kRows, h = row / kRows % kHeads, b = row / kRows / kHeads;
    return ((b * kRows + s) * kHeads + h) * dim;
  };
  for (int i = 0; i < count; ++i) {
    o[i].resize(rows * dim);
    for (std::int64_t row = 0; row < rows; ++row) {
      // Row 0 has no keys at all; a state without keys of a row may have anything as its O.
      const bool none = row == 0 || (row + i) % 4 == 0;
      lse[i].push_back(none ? -kInfinity
                            : static_cast<float>(row == 1 ? 3e4 + normal(random) : 3 * normal(random)));
      for (std::int64_t d = 0; d < dim; ++d)
        o[i][place_of(row) + d] =
            none ? std::numeric_limits<double>::quiet_NaN() : reference::round_to(from, normal(random));
    }
  }
  std::vector<device::DeviceBuffer> o_memory, lse_memory;
  std::vector<PartialState> states;
  for (int i = 0; i < count; ++i) {
    o_memory.push_back(to_device(from, o[i]));
    std::vector<double> by_rows(rows);
    for (std::int64_t row = 0; row < rows; ++row) by_rows[place_of(row) / dim] = lse[i][row];
    lse_memory.push_back(to_device(DType::fp32, i % 2 == 0 ? lse[i] : by_rows));
  }
  for (int i = 0; i < count; ++i)
    states.push_back({ConstTensorView::bshd(o_memory[i].data(), kBatch, kRows, kHeads, dim),
                      static_cast<const float*>(lse_memory[i].data()),
                      i % 2 == 0 ? RowStrides{} : RowStrides{kRows * kHeads, 1, kHeads}});
  device::DeviceBuffer out = poisoned(rows * dim * size_of(to)), lse_out = poisoned(rows * 4);
  device::DeviceBuffer& target = in_place ? o_memory[0] : out;
  runtime.merge(spec,
                {.states = states,
                 .out = TensorView::bshd(target.data(), kBatch, kRows, kHeads, dim),
                 .lse = static_cast<float*>(lse_out.data()),
                 .states_type = states_type,
                 .out_type = out_type},
                nullptr);
  gpu().context->synchronize();
  const std::vector<double> got = from_device(to, target), got_lse = from_device(DType::fp32, lse_out);
  const double half = to == DType::bf16 ? 0x1p-8 : to == DType::fp16 ? 0x1p-11 : 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t place = place_of(row);
    double highest = -kInfinity, sum = 0;
    for (int i = 0; i < count; ++i) highest = std::max(highest, lse[i][row]);
    for (int i = 0; i < count && highest > -kInfinity; ++i) sum += std::exp(lse[i][row] - highest);
    if (sum == 0) {
      EXPECT_EQ(got_lse[row], -kInfinity) << row;
    } else {
      EXPECT_NEAR(got_lse[row], highest + std::log(sum), 1e-6 + 1e-7 * std::abs(highest)) << row;
    }
    for (std::int64_t d = 0; d < dim; ++d) {
      double expected = 0;
      for (int i = 0; i < count; ++i)
        if (lse[i][row] > -kInfinity) expected += std::exp(lse[i][row] - highest) / sum * o[i][place + d];
      ASSERT_NEAR(got[place + d], expected, half * std::abs(expected) + 3e-6) << row << " " << d;
    }
  }
}

}  // namespace flashjit::test

// One attention problem on the GPU against the reference: its tensors, its launches and its limits; and how a
// small set of problems is chosen that meets every pair of features.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "autotune/device_captures.hpp"
#include "plan/family.hpp"
#include "reference/inputs.hpp"
#include "reference/reference.hpp"
#include "support/file.hpp"
#include "tests/support/gpu_support.hpp"
#include "tests/support/strided_captures.hpp"

namespace flashjit::test {

enum class Layout : std::uint8_t {
  bhsd,
  bshd,
  packed,  ///< Q, K, V, and dQ, dK, dV, in one tensor each
  padded,  ///< rows with a gap between them, which may be neither read nor written
};

struct AttentionCase {
  AttentionSpec spec;  ///< of both passes
  AttentionShape shape;
  Family family = Family::simt;
  Layout layout = Layout::bhsd;
  std::optional<float> softmax_scale = {};
  double dropout_p = 0;
  double score_size = 1;  ///< how much larger S is than that of normal data
  std::int64_t map_batch = 1, map_heads = 1;
  double map_density = 0.4;
  bool built_lists = false;  ///< calls are given lists that were built before
  /// Values of what the programs declare; none: plausible ones.
  std::function<std::vector<reference::Captured>(const AttentionShape&)> captures = {};
  bool strided_captures = false;  ///< transposed, and expanded where nothing changes
  std::string variant = {};       ///< names the programs in the test's name
  unsigned seed = 0;
  bool dlse = false;           ///< LSE has a gradient, too
  bool rng_on_device = false;  ///< dropout's seed and offset are where the kernels read them
  std::int64_t top_k = 0;      ///< of lists of keys
  /// How many keys of a list the one before lacks, where lists have no key twice; else their keys are random.
  std::optional<std::int64_t> changed_keys = {};
  int reserved_sms = 0;          ///< multiprocessors left to others
  bool state_in_place = false;   ///< a running state is where O and LSE are written
  std::int64_t unused_rows = 0;  ///< with varlen: NaN behind the last sequence, of which zeros must come
};

/// By turns what combines with everything.
inline void vary(AttentionCase& test) {
  test.dlse = test.seed % 3 == 1 && !test.spec.score.is_weight();
  test.rng_on_device = test.spec.dropout && test.seed % 2 == 1;
  test.state_in_place = test.spec.partial.running_state && test.spec.normalized().out_type() == DType::fp32 &&
                        !test.spec.varlen && test.seed % 2 == 0;
  if (test.seed % 5 == 2) test.reserved_sms = test.seed % 2 == 0 ? 1000 : 3;
  // Without queries there is no launch that could clear rows.
  test.unused_rows = test.spec.varlen && test.shape.seqlen_q > 0 ? test.seed % 4 * 3 : 0;
}

/// A name that GoogleTest allows: "bf16_d64_causal_b2_hq2_hkv1_sq64_skv65_sm80_bhsd_7".
inline std::string name_of(const AttentionCase& test) {
  constexpr std::array kLayouts = {"bhsd", "bshd", "packed", "padded"};
  KernelSpec backward{test.spec, Pass::backward};  // which says whether it is deterministic
  if (!test.variant.empty()) backward.score = {}, backward.mask = {};
  std::string name = fmt::format("{}_{}_{}_{}", to_string(backward).substr(4), to_string(test.shape),
                                 to_string(test.family), kLayouts[static_cast<int>(test.layout)]);
  if (!test.variant.empty()) name += "_" + test.variant;
  if (test.softmax_scale) name += "_scaled";
  if (test.dropout_p > 0) name += fmt::format("_p{}", static_cast<int>(100 * test.dropout_p));
  if (test.score_size > 100) name += "_extreme";
  if (test.built_lists) name += "_lists";
  if (test.strided_captures) name += "_strided";
  if (test.dlse) name += "_dlse";
  if (test.rng_on_device) name += "_rng";
  if (test.unused_rows > 0) name += "_unused";
  name += fmt::format("_{}", test.seed);
  std::ranges::replace_if(
      name, [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

/// What GoogleTest prints of a case.
inline void PrintTo(const AttentionCase& test, std::ostream* out) { *out << name_of(test); }

/// Device memory that begins as NaN, with a guard before and one behind it.
class GuardedMemory {
 public:
  static constexpr std::size_t kGuard = 4096;

  explicit GuardedMemory(std::size_t bytes) : buffer_(poisoned(kGuard + bytes + kGuard)), bytes_(bytes) {}

  void* data() const { return static_cast<char*>(buffer_.data()) + kGuard; }
  std::size_t bytes() const { return bytes_; }
  /// An image has the guards, too: what is at data() is its number kGuard.
  std::vector<std::uint8_t> download() const { return device::download<std::uint8_t>(buffer_); }
  void upload(const std::vector<std::uint8_t>& image) { buffer_.upload(image.data(), image.size()); }
  void poison() { buffer_.fill(0xff); }
  /// What is between the guards.
  std::vector<std::uint8_t> content() const {
    const std::vector<std::uint8_t> image = download();
    return {image.begin() + kGuard, image.end() - kGuard};
  }
  void write(const std::vector<std::uint8_t>& content) {
    std::vector<std::uint8_t> image = download();
    std::ranges::copy(content, image.begin() + kGuard);
    upload(image);
  }
  bool guards_intact() const {
    const auto poisoned = [](std::uint8_t byte) { return byte == 0xff; };
    const std::vector<std::uint8_t> image = download();
    return std::all_of(image.begin(), image.begin() + kGuard, poisoned) &&
           std::all_of(image.end() - kGuard, image.end(), poisoned);
  }

 private:
  device::DeviceBuffer buffer_;
  std::size_t bytes_;
};

/// A tensor in device memory, which it may share with others.
struct Tensor {
  std::shared_ptr<GuardedMemory> memory;
  TensorView view;
  DType dtype;

  std::size_t row_bytes() const { return view.size[3] * size_of(dtype); }

  /// Calls use(position of the row's first byte in the memory's image) in the order [batch, heads, length].
  template <class Use>
  void for_each_row(Use use) const {
    const std::int64_t start = static_cast<const char*>(view.data) -
                               static_cast<const char*>(memory->data()) + GuardedMemory::kGuard;
    for (std::int64_t b = 0; b < view.size[0]; ++b) {
      for (std::int64_t h = 0; h < view.size[1]; ++h) {
        for (std::int64_t s = 0; s < view.size[2]; ++s) {
          use(start + (b * view.stride[0] + h * view.stride[1] + s * view.stride[2]) * size_of(dtype));
        }
      }
    }
  }
  void put(const std::vector<double>& values) {
    const std::vector<std::uint8_t> bytes = encode(dtype, values);
    std::vector<std::uint8_t> image = memory->download();
    auto from = bytes.begin();
    for_each_row([&](std::int64_t to) {
      std::copy_n(from, row_bytes(), image.begin() + to);
      from += static_cast<std::ptrdiff_t>(row_bytes());
    });
    memory->upload(image);
  }
  std::vector<double> get() const {
    const std::vector<std::uint8_t> image = memory->download();
    std::vector<std::uint8_t> bytes;
    for_each_row([&](std::int64_t from) {
      bytes.insert(bytes.end(), image.begin() + from,
                   image.begin() + from + static_cast<std::ptrdiff_t>(row_bytes()));
    });
    return decode(dtype, bytes);
  }
};

/// Whether every byte that belongs to none of the tensors, which share one memory or have one each, is as
/// poisoned.
inline bool gaps_untouched(const std::vector<Tensor>& tensors) {
  return std::ranges::all_of(tensors, [&](const Tensor& one) {
    std::vector<std::uint8_t> image = one.memory->download();
    for (const Tensor& other : tensors) {
      if (other.memory != one.memory) continue;
      other.for_each_row([&](std::int64_t at) { std::fill_n(image.begin() + at, other.row_bytes(), 0xff); });
    }
    return std::ranges::all_of(image, [](std::uint8_t byte) { return byte == 0xff; });
  });
}

using Size = std::array<std::int64_t, 4>;  ///< batch, heads, length, dim

inline Tensor make_tensor(Layout layout, DType dtype, const Size& size) {
  const auto [b, h, s, d] = size;
  const std::int64_t row = layout == Layout::padded ? d + 8 : d;
  Tensor tensor{std::make_shared<GuardedMemory>(b * h * s * row * size_of(dtype)), {}, dtype};
  void* data = tensor.memory->data();
  if (layout == Layout::bhsd) tensor.view = TensorView::bhsd(data, b, h, s, d);
  if (layout == Layout::bshd || layout == Layout::packed) tensor.view = TensorView::bshd(data, b, s, h, d);
  if (layout == Layout::padded) tensor.view = {data, size, {h * s * row, s * row, row, 1}};
  return tensor;
}

/// Q, K and V, or their gradients.
inline std::vector<Tensor> make_qkv(Layout layout, DType dtype, const std::array<Size, 3>& sizes) {
  std::vector<Tensor> tensors;
  if (layout != Layout::packed) {
    for (const Size& size : sizes) tensors.push_back(make_tensor(layout, dtype, size));
    return tensors;
  }
  const auto [b, h, s, d] = sizes[0];
  const auto memory = std::make_shared<GuardedMemory>(3 * b * h * s * d * size_of(dtype));
  for (int part = 0; part < 3; ++part) {
    tensors.push_back(
        {memory, TensorView::packed_qkv(memory->data(), b, s, h, d, part, size_of(dtype)), dtype});
  }
  return tensors;
}

inline std::vector<double> normal_values(std::int64_t count, DType dtype, double size,
                                         std::mt19937& generator) {
  std::normal_distribution<double> normal(0, size);
  std::vector<double> values(count);
  for (double& value : values) value = reference::round_to(dtype, normal(generator));
  return values;
}

/// A map with blocks on at random, its second row and last column empty.
inline std::vector<std::uint8_t> random_map(std::int64_t maps, std::int64_t rows, std::int64_t columns,
                                            double density, std::mt19937& generator) {
  std::bernoulli_distribution on(density);
  std::vector<std::uint8_t> map(maps * rows * columns);
  for (std::size_t i = 0; i < map.size(); ++i) {
    const std::int64_t row = static_cast<std::int64_t>(i) / columns % rows,
                       column = static_cast<std::int64_t>(i) % columns;
    const bool empty = density < 1 && ((row == 1 && rows > 1) || (column == columns - 1 && columns > 1));
    map[i] = !empty && on(generator) ? 1 : 0;
  }
  return map;
}

/// A causal mask beside lengths of keys has two meanings where Q and K are of unlike lengths, and is refused:
/// there it is the other one.
inline AttentionCase with_one_meaning(AttentionCase test) {
  AttentionSpec& spec = test.spec;
  if (spec.kv.is_padded() && spec.mask == causal() && test.shape.seqlen_q != test.shape.seqlen_kv)
    spec.mask = MaskProgram("causal_top_left");
  return test;
}

/// How many first entries of each query's lists count, none, all, and numbers outside of both among them;
/// empty: all, by turns.
inline std::vector<std::int32_t> topk_lengths(const AttentionCase& test, std::int64_t queries) {
  if (test.seed % 3 == 0) return {};
  std::mt19937 random(test.seed);
  std::uniform_int_distribution<std::int32_t> length(-3, static_cast<std::int32_t>(test.top_k) + 3);
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(queries));
  for (std::int32_t& one : lengths) one = length(random);
  return lengths;
}

/// Puts a key behind the lengths of lists of top_k entries.
inline std::vector<std::int32_t> with_key_behind(std::vector<std::int32_t> lists,
                                                 const std::vector<std::int32_t>& lengths, std::int64_t top_k,
                                                 std::int32_t key) {
  if (lengths.empty() || lists.empty()) return lists;
  const std::int64_t of_query = std::ssize(lists) / std::ssize(lengths);
  for (std::int64_t i = 0; i < std::ssize(lists); ++i)
    if (i % top_k >= lengths[static_cast<std::size_t>(i / of_query)])
      lists[static_cast<std::size_t>(i)] = key;
  return lists;
}

/// Lists for all queries: of their own for each sequence, or by turns the same for all. NaN in the rows of K
/// and V that no list names.
inline void add_indices(reference::Problem& problem, const AttentionCase& test) {
  const AttentionSpec& spec = test.spec;
  const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
  problem.index_batch = spec.varlen || test.seed % 2 == 1 ? 1 : batch;
  const std::int64_t queries =
      spec.varlen ? std::ssize(problem.q) / (heads_q * spec.head_dim) : problem.index_batch * seqlen_q;
  const std::int64_t count = queries * heads_kv;
  problem.indices = with_key_behind(
      test.changed_keys
          ? reference::neighbouring_indices(count, test.top_k, seqlen_kv, *test.changed_keys, test.seed)
          : reference::random_indices(count, test.top_k, seqlen_kv, test.seed),
      topk_lengths(test, queries), test.top_k, -1);
  if (spec.varlen) return;  // where a row may be named by what another sequence's lists say
  std::vector<bool> named(static_cast<std::size_t>(batch * heads_kv * seqlen_kv));
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t i = 0; i < seqlen_q * heads_kv * test.top_k; ++i) {
      const std::int64_t first = problem.index_batch == 1 ? 0 : b * seqlen_q * heads_kv * test.top_k;
      const std::int64_t key = problem.indices[first + i];
      if (key >= 0 && key < seqlen_kv)
        named[(b * heads_kv + i / test.top_k % heads_kv) * seqlen_kv + key] = true;
    }
  for (std::size_t row = 0; row < named.size(); ++row) {
    if (named[row]) continue;
    std::fill_n(problem.k.begin() + row * spec.head_dim, spec.head_dim,
                std::numeric_limits<double>::quiet_NaN());
    std::fill_n(problem.v.begin() + row * spec.v_dim(), spec.v_dim(),
                std::numeric_limits<double>::quiet_NaN());
  }
}

/// Blocks whose random numbers are those of other calls as they are, and others.
inline DropoutPlace place_of(const AttentionCase& test) {
  DropoutPlace place{
      .batch = 3, .head = 2, .heads = 2 + test.shape.heads_q + test.seed % 2, .q = 1024, .kv = 48};
  if (test.seed % 3 == 1) place.q = 1021, place.kv = 7;
  if (test.seed % 3 == 2) place.q = 5, place.q_step = 8, place.kv_step = 3;
  return place;
}

/// O and LSE of other keys; where there was none, LSE is -inf and O NaN.
inline void add_state(reference::Problem& problem, std::int64_t queries, std::mt19937& generator) {
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = problem.shape;
  const std::int64_t dim = problem.spec.v_dim();
  problem.state_out = normal_values(heads_q * queries * dim, DType::fp32, 1, generator);
  problem.state_lse = normal_values(heads_q * queries, DType::fp32, 3, generator);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (std::int64_t row = 0; row < heads_q * queries; ++row) {
    if (row % 5 != 3) {  // about as much as the call's keys
      problem.state_lse[row] =
          reference::round_to(DType::fp32, problem.state_lse[row] + std::log(seqlen_kv + 1.0));
      continue;
    }
    problem.state_lse[row] = -kInfinity;
    std::fill_n(problem.state_out.begin() + row * dim, dim, std::numeric_limits<double>::quiet_NaN());
  }
}

inline reference::Problem make_problem(const AttentionCase& given) {
  const AttentionCase test = with_one_meaning(given);
  const AttentionSpec& spec = test.spec;
  const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
  std::mt19937 generator(1000 + test.seed);
  reference::Problem problem{.spec = spec, .shape = test.shape};
  if (spec.varlen) {
    // One tensor for Q, K and V has as many rows of each.
    const unsigned kv_seed = test.layout == Layout::packed ? test.seed : test.seed + 1;
    const std::int64_t kv_empty = test.layout == Layout::packed ? 1 : 2;
    problem.cu_seqlens_q = reference::random_offsets(batch, seqlen_q, 1, test.seed);
    problem.cu_seqlens_kv = reference::random_offsets(batch, seqlen_kv, kv_empty, kv_seed);
  }
  const std::int64_t queries =
      spec.varlen ? problem.cu_seqlens_q.back() + test.unused_rows : batch * seqlen_q;
  const std::int64_t keys = spec.varlen ? problem.cu_seqlens_kv.back() + test.unused_rows : batch * seqlen_kv;
  const auto normal = [&](std::int64_t rows, int dim, double size) {
    return normal_values(rows * dim, spec.dtype, size, generator);
  };
  // Shared between Q and K, so that dQ and dK stay within fp16.
  const double size = std::sqrt(test.score_size);
  problem.q = normal(heads_q * queries, spec.head_dim, size);
  problem.k = normal(heads_kv * keys, spec.head_dim, size);
  problem.v = spec.kv.shared_kv ? reference::first_columns(problem.k, spec.head_dim, spec.v_dim())
                                : normal(heads_kv * keys, spec.v_dim(), 1);
  problem.dout = normal(heads_q * queries, spec.v_dim(), 1);
  const auto spoil = [&](std::vector<double>& tensor, std::int64_t rows, int dim) {
    for (std::size_t i = 0; i < tensor.size(); ++i)
      if (static_cast<std::int64_t>(i) / dim % rows >= rows - test.unused_rows)
        tensor[i] = std::numeric_limits<double>::quiet_NaN();
  };
  spoil(problem.q, queries, spec.head_dim);
  spoil(problem.k, keys, spec.head_dim);
  spoil(problem.v, keys, spec.v_dim());
  spoil(problem.dout, queries, spec.v_dim());
  if (test.dlse) problem.dlse = normal_values(heads_q * queries, DType::fp32, 1, generator);
  if (test.softmax_scale) problem.softmax_scale = *test.softmax_scale;
  if (spec.kv.is_padded()) {
    // One entry without keys, and one with all of them, where there are so many.
    std::uniform_int_distribution<std::int32_t> length(0, static_cast<std::int32_t>(seqlen_kv));
    for (std::int64_t b = 0; b < batch; ++b) problem.kv_lengths.push_back(b == 1 ? 0 : length(generator));
    if (batch > 2) problem.kv_lengths[2] = static_cast<std::int32_t>(seqlen_kv);
  }
  if (spec.has_block_map()) {
    const std::int64_t rows = (seqlen_q + spec.block_map.q - 1) / spec.block_map.q;
    const std::int64_t columns = (seqlen_kv + spec.block_map.kv - 1) / spec.block_map.kv;
    problem.map_batch = test.map_batch;
    problem.map_heads = test.map_heads;
    problem.block_map =
        random_map(test.map_batch * test.map_heads, rows, columns, test.map_density, generator);
  }
  if (spec.indices) add_indices(problem, test);
  problem.dropout_p = test.dropout_p;
  if (spec.partial.dropout_place) problem.dropout_place = place_of(test);
  problem.seed = 0x0123456789abcdefull + test.seed;
  problem.offset = 0xfedcba9876543210ull - test.seed;
  if (spec.sinks) problem.sinks = reference::random_sinks(heads_q, test.seed);
  if (spec.partial.running_state) add_state(problem, queries, generator);
  if (test.captures) problem.captures = test.captures(test.shape);
  if (problem.captures.empty()) problem.captures = reference::plausible_captures(spec, test.shape, test.seed);
  return problem;
}

/// The backward pass has O and LSE of all keys.
inline reference::Problem with_joined_results(reference::Problem problem) {
  if (!problem.spec.partial.running_state) return problem;
  const reference::Forward joined = reference::forward(problem);
  problem.out = joined.out;
  problem.lse = joined.lse;
  return problem;
}

inline KvLayout padded_if(bool padded) { return padded ? KvLayout::padded() : KvLayout{}; }

inline KernelSpec with_pass(const AttentionSpec& spec, Pass pass) {
  return KernelSpec{spec, pass}.normalized();
}

inline double largest_finite(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

/// A case's problem, its tensors on the GPU and what the reference makes of it.
class AttentionRun {
 public:
  explicit AttentionRun(const AttentionCase& test) : AttentionRun(test, make_problem(test)) {}

  AttentionRun(const AttentionCase& test, reference::Problem given)
      : test_(with_one_meaning(test)),
        problem_(with_joined_results(std::move(given))),
        exact_(reference::forward(problem_)),
        rounded_(reference::forward(problem_, yardstick())),
        exact_grad_(reference::backward(problem_)),
        rounded_grad_(reference::backward(problem_, yardstick())),
        inputs_(make_qkv(test.layout, test.spec.dtype, sizes())),
        grads_(make_qkv(test.layout, test.spec.grad_type(), sizes())),
        out_(make_tensor(test.layout, test.spec.out_type(), out_size())),
        dout_(make_tensor(test.layout, test.spec.dtype, out_size())),
        lse_(exact_.lse.size() * sizeof(float)),
        row_max_(exact_.lse.size() * sizeof(float)),
        kv_lengths_(to_device(problem_.kv_lengths)),
        block_map_(to_device(problem_.block_map)),
        cu_seqlens_q_(to_device(problem_.cu_seqlens_q)),
        cu_seqlens_kv_(to_device(problem_.cu_seqlens_kv)),
        sinks_(to_device(DType::fp32, problem_.sinks)),
        dsinks_(device_bytes(sinks_.bytes())),
        dlse_(to_device(DType::fp32, in_memory(problem_.dlse))),
        rng_state_(to_device(std::vector{problem_.seed, problem_.offset})),
        topk_length_(to_device(topk_lengths(test, queries_of_lists()))),
        indices_(to_device(with_key_behind(  // a kernel that reads on finds keys there
            problem_.indices, topk_lengths(test, queries_of_lists()), test.top_k, 0))),
        captures_(gpu().driver(), with_pass(test.spec, Pass::backward), problem_.captures) {
    if (!test.spec.epilogue.out_mod.empty())
      before_mod_ = make_tensor(test.layout, test.spec.dtype, out_size());
    if (test.spec.partial.running_state) {
      state_ = make_tensor(test.layout, DType::fp32, out_size());
      state_.put(problem_.state_out);
      state_lse_ = to_device(DType::fp32, in_memory(problem_.state_lse));
    }
    if (test.strided_captures) strided_ = StridedCaptures(captures_.view(), problem_.captures);
    inputs_[0].put(problem_.q);
    inputs_[1].put(problem_.k);
    inputs_[2].put(problem_.v);
    dout_.put(problem_.dout);
  }

  const reference::Problem& problem() const { return problem_; }

  /// Later launches are on this stream; else on the legacy one.
  void use(Stream stream) { stream_ = stream; }
  /// What the last forward pass made.
  std::vector<double> out() const { return out_.get(); }
  std::vector<double> lse() const { return rows_in(lse_); }
  std::vector<double> row_max() const { return rows_in(row_max_); }
  /// What the last backward pass made: dQ, dK, dV.
  std::vector<double> grad(int which) const { return grads_[which].get(); }

  /// Whether the reference's results are finite in both precisions, and so set limits.
  bool has_limits() const {
    const auto finite = [](const std::vector<double>& values) {
      return std::ranges::all_of(values, [](double value) { return std::isfinite(value); });
    };
    const auto finite_grads = [&](const reference::Backward& grads) {
      return finite(grads.dq) && finite(grads.dk) && finite(grads.dv) && finite(grads.dsinks) &&
             std::ranges::all_of(grads.captures, finite);
    };
    return finite(exact_.out) && finite(rounded_.out) && finite_grads(exact_grad_) &&
           finite_grads(rounded_grad_);
  }

  /// Launches the forward pass into poisoned outputs and compares O and LSE.
  void check_forward(Runtime& runtime, const TileConfig& config) {
    SCOPED_TRACE("forward with " + to_string(config));
    launch_forward(runtime, config, static_cast<float*>(lse_.data()));
    expect_within_limit("out", out_.get(), exact_.out, rounded_.out, 2);
    EXPECT_TRUE(gaps_untouched({out_})) << "memory beside O was written";
    check_lse();
    check_row_max();
  }

  /// Launches the forward pass with skip-softmax and gives how many tiles it visited, and how many it
  /// skipped.
  std::vector<std::int64_t> launch_skipping(Runtime& runtime, const TileConfig& config, float threshold) {
    skip_softmax_threshold_ = threshold;
    skip_softmax_counts_ = to_device(std::vector<std::int64_t>{0, 0});
    launch_forward(runtime, config, static_cast<float*>(lse_.data()));
    skip_softmax_threshold_.reset();
    return device::download<std::int64_t>(skip_softmax_counts_);
  }
  const reference::Forward& exact() const { return exact_; }

  /// Launches the forward pass and gives its LSE, for programs that set no limits.
  std::vector<double> launch_for_lse(Runtime& runtime, const TileConfig& config) {
    launch_forward(runtime, config, static_cast<float*>(lse_.data()));
    return lse();
  }

  /// Launches without an LSE; O must have the same bits as with it. check_forward() must have run.
  void check_forward_without_lse(Runtime& runtime, const TileConfig& config) {
    SCOPED_TRACE("forward without LSE");
    const std::vector<double> expected = out_.get();
    launch_forward(runtime, config, nullptr);
    EXPECT_EQ(out_.get(), expected);
  }

  /// Launches the backward pass on what check_forward() left, and compares dQ, dK and dV.
  void check_backward(Runtime& runtime, const TileConfig& config) {
    SCOPED_TRACE("backward with " + to_string(config));
    launch_backward(runtime, config);
    expect_within_limit("dq", grads_[0].get(), exact_grad_.dq, rounded_grad_.dq, 3);
    expect_within_limit("dk", grads_[1].get(), exact_grad_.dk, rounded_grad_.dk, 3);
    expect_within_limit("dv", grads_[2].get(), exact_grad_.dv, rounded_grad_.dv, 3);
    EXPECT_TRUE(gaps_untouched(grads_)) << "memory beside dQ, dK and dV was written";
    if (test_.spec.grad_type() != test_.spec.dtype) expect_unrounded_grads();
    std::vector<double> dsinks = from_device(DType::fp32, dsinks_);
    for (double& value : dsinks) value -= kSinkGradBefore;  // it is added to what was there
    expect_within_limit(
        "dsinks",
        reference::judge_dsinks(test_.shape, dsinks, {exact_grad_.dsinks, exact_grad_.dsink_rows},
                                {rounded_grad_.dsinks, rounded_grad_.dsink_rows}, 3),
        exact_grad_.dsinks);
    check_capture_grads();
    if (test_.spec.reproducible.deterministic) check_same_bits_again(runtime, config);
  }

  /// Launches both passes, whatever they compute, and checks the memory around all that they are given.
  void check_memory_beside(Runtime& runtime, const TileConfig& forward, const TileConfig& backward) {
    launch_forward(runtime, forward, static_cast<float*>(lse_.data()));
    launch_backward(runtime, backward);
    EXPECT_TRUE(gaps_untouched(inputs_)) << "memory beside Q, K and V was written";
    EXPECT_TRUE(gaps_untouched({dout_})) << "memory beside dO was written";
    EXPECT_TRUE(gaps_untouched({out_})) << "memory beside O was written";
    EXPECT_TRUE(gaps_untouched(grads_)) << "memory beside dQ, dK and dV was written";
    expect_guard_intact(lse_, "LSE");
  }

 private:
  static constexpr double kSinkGradBefore = 1;

  std::array<Size, 3> sizes() const {
    auto [b, hq, hkv, sq, skv] = test_.shape;
    const std::int64_t d = test_.spec.head_dim, dv = test_.spec.v_dim();
    if (test_.spec.varlen) {  // whose offsets may be wrong
      b = 1;
      sq = std::ssize(problem_.q) / (hq * d);
      skv = std::ssize(problem_.k) / (hkv * d);
    }
    return {{{b, hq, sq, d}, {b, hkv, skv, d}, {b, hkv, skv, dv}}};
  }
  /// Which have lists of their own.
  std::int64_t queries_of_lists() const {
    return test_.spec.indices ? problem_.index_batch * sizes()[0][2] : 0;
  }
  Size out_size() const {
    const auto [b, hq, sq, d] = sizes()[0];
    return {b, hq, sq, test_.spec.v_dim()};
  }
  /// Extreme scores rounded to 16 bits would set no limit worth the name.
  reference::Precision yardstick() const {
    return test_.score_size > 100 ? reference::Precision::fused : reference::Precision::rounded;
  }
  /// Compares by the project's rule and notes error and limit among the test's properties. Scores and LSE are
  /// fp32, so that every kernel's P is off by a few units in the last place of the largest of them.
  void expect_within_limit(const char* name, const std::vector<double>& got, const std::vector<double>& exact,
                           const std::vector<double>& rounded, double factor) const {
    expect_within_limit(name, reference::judge(got, exact, rounded, factor), exact);
  }
  void expect_within_limit(const char* name, const reference::Verdict& verdict,
                           const std::vector<double>& exact) const {
    const auto [error, limit] = verdict;
    std::vector<double> scores = exact_.lse;  // but for rows whose P is the same whatever they are rounded to
    std::erase_if(scores, [](double lse) { return lse < -1e37; });
    const double allowed = limit + 4 * 0x1p-24 * largest_finite(scores) * largest_finite(exact);
    testing::Test::RecordProperty(name, fmt::format("error {:.3g}, limit {:.3g}", error, allowed));
    EXPECT_LE(error, allowed) << name;
  }

  void expect_unrounded_grads() const {
    for (const Tensor& grad : grads_)
      EXPECT_TRUE(std::ranges::any_of(
          grad.get(), [&](double x) { return x != reference::round_to(test_.spec.dtype, x); }));
  }

  const std::int32_t* kv_lengths() const { return static_cast<const std::int32_t*>(kv_lengths_.data()); }
  BlockMapView block_map() const {
    if (!test_.spec.has_block_map()) return {};
    const BlockSize block = test_.spec.block_map;
    return {static_cast<const std::uint8_t*>(block_map_.data()),
            {problem_.map_batch, problem_.map_heads, (test_.shape.seqlen_q + block.q - 1) / block.q,
             (test_.shape.seqlen_kv + block.kv - 1) / block.kv}};
  }

  /// What a call is lent: a poisoned workspace, and lists in memory of their own where the case has them
  /// built, both of exactly the size that the runtime asks for.
  struct Lent {
    GuardedMemory work, list_memory;
    TileLists lists;
  };
  Lent lend(Runtime& runtime, const KernelSpec& spec) const {
    const std::size_t bytes = runtime.workspace_bytes(spec, test_.shape);
    const std::size_t list_bytes = test_.built_lists ? runtime.list_bytes(spec, test_.shape) : 0;
    Lent lent{GuardedMemory(bytes - list_bytes), GuardedMemory(list_bytes), {}};
    if (!test_.built_lists) return lent;
    ListArgs args{.memory = {lent.list_memory.data(), list_bytes}};
    set_mask_args(args);
    wait_for_fills();
    lent.lists = runtime.build_lists(spec, test_.shape, args, stream_);
    return lent;
  }
  static void expect_guards_intact(const Lent& lent) {
    expect_guard_intact(lent.work, "workspace");
    expect_guard_intact(lent.list_memory, "lists");
  }

  template <class Args>
  void set_mask_args(Args& args) const {
    args.kv_lengths = kv_lengths();
    args.block_map = block_map();
    args.captures = test_.strided_captures ? strided_.view() : captures_.view();
    if (!test_.spec.varlen) return;
    args.cu_seqlens_q = static_cast<const std::int32_t*>(cu_seqlens_q_.data());
    args.cu_seqlens_kv = static_cast<const std::int32_t*>(cu_seqlens_kv_.data());
  }

  /// The arguments of both passes besides their tensors.
  template <class Args>
  void set_common(Args& args, const Lent& lent) const {
    set_mask_args(args);
    args.softmax_scale = test_.softmax_scale;
    args.dropout_p = problem_.dropout_p;
    args.partial.dropout_place = problem_.dropout_place;
    args.partial.reserved_sms = test_.reserved_sms;
    if (test_.rng_on_device) {
      args.rng_state = static_cast<const std::uint64_t*>(rng_state_.data());
    } else {
      args.seed = problem_.seed;
      args.offset = problem_.offset;
    }
    args.zero_unused_rows = test_.unused_rows > 0;
    args.workspace = {lent.work.data(), lent.work.bytes()};
    if (test_.built_lists) args.lists = &lent.lists;
    args.sinks = static_cast<const float*>(sinks_.data());
    if (test_.spec.indices) {
      const std::int64_t queries = sizes()[0][2], lists = queries_of_lists() * test_.shape.heads_kv;
      args.indices = IndicesView::contiguous(static_cast<const std::int32_t*>(indices_.data()),
                                             problem_.index_batch, queries, test_.shape.heads_kv,
                                             lists == 0 ? 0 : std::ssize(problem_.indices) / lists);
      args.indices.topk_length = static_cast<const std::int32_t*>(topk_length_.data());
      args.indices.topk_length_stride = {queries, 1};
    }
    if (!test_.spec.varlen) return;
    args.batch_size = test_.shape.batch;
    args.max_seqlen_q = test_.shape.seqlen_q;
    args.max_seqlen_kv = test_.shape.seqlen_kv;
  }

  static void expect_guard_intact(const GuardedMemory& memory, const char* name) {
    EXPECT_TRUE(memory.guards_intact()) << "memory beside the " << name << " was written";
  }

  /// They are on the legacy stream, for which other streams do not wait.
  void wait_for_fills() const {
    if (stream_) gpu().context->synchronize();
  }

  ConstTensorView v_view() const {
    if (!test_.spec.kv.shared_kv) return inputs_[2].view;
    return ConstTensorView(inputs_[1].view).first_columns(test_.spec.v_dim());
  }

  void launch_forward(Runtime& runtime, const TileConfig& config, float* lse) {
    KernelSpec spec = with_pass(test_.spec, Pass::forward);
    spec.epilogue.skip_softmax = skip_softmax_threshold_.has_value();
    runtime.prepare(spec, test_.shape, config);
    const Lent lent = lend(runtime, spec);
    out_.memory->poison();
    if (lse) lse_.poison();
    row_max_.poison();
    ForwardArgs args{.q = inputs_[0].view,
                     .k = inputs_[1].view,
                     .v = v_view(),
                     .out = out_.view,
                     .lse = spec.score.is_weight() ? nullptr : lse,
                     .lse_strides = lse_strides()};
    set_common(args, lent);
    args.skip_softmax_threshold = skip_softmax_threshold_;
    if (spec.epilogue.skip_softmax)
      args.skip_softmax_counts = static_cast<std::int64_t*>(skip_softmax_counts_.data());
    if (spec.epilogue.row_max) args.row_max = static_cast<float*>(row_max_.data());
    if (!spec.epilogue.out_mod.empty()) args.out_before_mod = before_mod_.view;
    if (spec.partial.running_state)
      args.partial.state = {state_.view, static_cast<const float*>(state_lse_.data())};
    if (test_.state_in_place && lse) {
      out_.put(problem_.state_out);
      lse_.write(encode(DType::fp32, in_memory(problem_.state_lse)));
      args.partial.state = {out_.view, lse};
    }
    wait_for_fills();
    runtime.forward(spec, args, stream_);
    gpu().context->synchronize();
    expect_guards_intact(lent);
  }

  void launch_backward(Runtime& runtime, const TileConfig& config) {
    const KernelSpec spec = with_pass(test_.spec, Pass::backward);
    runtime.prepare(spec, test_.shape, config);
    const Lent lent = lend(runtime, spec);
    for (Tensor& grad : grads_) grad.memory->poison();
    dsinks_ = to_device(DType::fp32, std::vector<double>(problem_.sinks.size(), kSinkGradBefore));
    captures_.zero_grads();
    BackwardArgs args{.q = inputs_[0].view,
                      .k = inputs_[1].view,
                      .v = v_view(),
                      .out = !spec.epilogue.out_mod.empty() ? ConstTensorView(before_mod_.view)
                             : spec.score.is_weight()       ? ConstTensorView{}
                                                            : ConstTensorView(out_.view),
                      .lse = spec.score.is_weight() ? nullptr : static_cast<const float*>(lse_.data()),
                      .lse_strides = lse_strides(),
                      .dout = dout_.view,
                      .dq = grads_[0].view,
                      .dk = grads_[1].view,
                      .dv = grads_[2].view,
                      .dsinks = static_cast<float*>(dsinks_.data()),
                      .dlse = test_.dlse ? static_cast<const float*>(dlse_.data()) : nullptr};
    set_common(args, lent);
    wait_for_fills();
    runtime.backward(spec, args, stream_);
    gpu().context->synchronize();
    expect_guards_intact(lent);
  }

  /// In every other case LSE is [batch, rows, heads], packed [rows, heads].
  bool lse_by_rows() const { return test_.seed % 2 == 1; }
  std::int64_t rows_of_batch() const { return inputs_[0].view.size[2]; }
  RowStrides lse_strides() const {
    const std::int64_t heads = test_.shape.heads_q;
    return lse_by_rows() ? RowStrides{heads * rows_of_batch(), 1, heads} : RowStrides{};
  }
  /// LSE, or what is like it, as memory has it; the reference has [batch, heads, rows].
  std::vector<double> in_memory(const std::vector<double>& rows) const {
    return lse_by_rows() ? transposed(rows, test_.shape.heads_q, rows_of_batch()) : rows;
  }
  std::vector<double> rows_in(const GuardedMemory& memory) const {
    const std::vector<double> values = decode(DType::fp32, memory.content());
    return lse_by_rows() ? transposed(values, rows_of_batch(), test_.shape.heads_q) : values;
  }
  /// Matrices [rows, columns] one after the other, each transposed.
  static std::vector<double> transposed(const std::vector<double>& values, std::int64_t rows,
                                        std::int64_t columns) {
    std::vector<double> result(values.size());
    for (std::int64_t i = 0; i < std::ssize(values); ++i) {
      const std::int64_t first = i / (rows * columns) * (rows * columns), at = i - first;
      result[first + at % columns * rows + at / columns] = values[i];
    }
    return result;
  }

  void check_lse() const {
    if (!test_.spec.score.is_weight()) check_rows("LSE", lse_, exact_.lse);
  }
  void check_row_max() const {
    if (test_.spec.epilogue.row_max) check_rows("row_max", row_max_, exact_.row_max);
  }
  /// What is written of each row that exists, and of no other.
  void check_rows(const char* name, const GuardedMemory& memory, const std::vector<double>& exact) const {
    const std::vector<double> got = rows_in(memory);
    // An element that a program made may be rounded to its other neighbour.
    const double neighbour = test_.spec.prologue.has_programs() ? 1e-2 : 0.0;
    EXPECT_LE(reference::max_abs_error(reference::existing_rows(problem_, got),
                                       reference::existing_rows(problem_, exact)),
              1e-3 + neighbour + 1e-6 * largest_finite(exact))
        << name;
    for (std::size_t row = 0; row < got.size(); ++row) {
      if (!std::isnan(exact[row])) continue;
      if (test_.unused_rows > 0)
        EXPECT_EQ(got[row], -std::numeric_limits<double>::infinity()) << name << " of unused row " << row;
      else
        EXPECT_TRUE(std::isnan(got[row])) << name << " of unused row " << row << " was written";
    }
    expect_guard_intact(memory, name);
  }

  void check_capture_grads() const {
    const reference::CaptureGrads grads = captures_.grads();
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (exact_grad_.captures[i].empty()) continue;
      expect_within_limit(("grad of " + problem_.captures[i].name).c_str(),
                          reference::judge_capture(test_.spec.dtype, grads[i],
                                                   {exact_grad_.captures[i], exact_grad_.capture_squares[i],
                                                    exact_grad_.capture_counts[i]},
                                                   rounded_grad_.captures[i], 3),
                          exact_grad_.captures[i]);
    }
  }

  /// Several times, since what two warps race for is lost seldom.
  void check_same_bits_again(Runtime& runtime, const TileConfig& config) {
    constexpr int kRuns = 8;
    std::vector<std::vector<std::uint8_t>> first;
    for (const Tensor& grad : grads_) first.push_back(grad.memory->download());
    const std::vector<float> first_dsinks = device::download<float>(dsinks_);
    const reference::CaptureGrads first_captures = captures_.grads();
    for (int run = 1; run < kRuns; ++run) {
      SCOPED_TRACE(fmt::format("run {} of {}", run + 1, kRuns));
      launch_backward(runtime, config);
      EXPECT_EQ(device::download<float>(dsinks_), first_dsinks);
      EXPECT_EQ(captures_.grads() == first_captures, true) << "gradients of captures differ";
      for (std::size_t i = 0; i < grads_.size(); ++i)
        EXPECT_EQ(grads_[i].memory->download() == first[i], true) << "gradient " << i << " differs";
    }
  }

  AttentionCase test_;
  reference::Problem problem_;
  reference::Forward exact_, rounded_;
  reference::Backward exact_grad_, rounded_grad_;
  std::vector<Tensor> inputs_, grads_;
  Tensor out_, dout_, state_, before_mod_;  ///< state_: with running_state; before_mod_: with out_mod
  GuardedMemory lse_, row_max_;
  device::DeviceBuffer kv_lengths_, block_map_, cu_seqlens_q_, cu_seqlens_kv_, sinks_, dsinks_, dlse_,
      rng_state_, topk_length_, indices_, state_lse_, skip_softmax_counts_;
  std::optional<float> skip_softmax_threshold_;
  DeviceCaptures captures_;
  StridedCaptures strided_;
  Stream stream_ = nullptr;
};

/// One kernel to have ready.
struct Wanted {
  KernelSpec spec;
  AttentionShape shape;
  TileConfig config;
};

/// Compiles on all processors. What cannot be compiled is left to the test that needs it, which then says
/// why.
inline void prepare_all(Runtime& runtime, const std::vector<Wanted>& kernels) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    gpu().context->make_current();
    for (std::size_t i = next++; i < kernels.size(); i = next++) {
      try {
        runtime.prepare(kernels[i].spec, kernels[i].shape, kernels[i].config);
      } catch (const Error&) {
      }
    }
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
}

/// The family or, where it cannot do the pass of the spec, the next that can.
inline const plan::FamilyTraits& able_family(Family family, const KernelSpec& spec) {
  const auto all = plan::families();
  const auto wanted = std::ranges::find(all, family, &plan::FamilyTraits::family);
  const auto able = std::find_if(wanted, all.end(), [&](const plan::FamilyTraits& candidate) {
    return candidate.supports(spec, gpu().info).ok;
  });
  return able == all.end() ? *wanted : *able;
}

/// Whether both passes can be done by the family or one after it.
inline Support supports(Family family, const AttentionSpec& given) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const KernelSpec spec = with_pass(given, pass);
    const Support support = able_family(family, spec).supports(spec, gpu().info);
    if (!support) return support;
  }
  return Support::yes();
}

inline TileConfig heuristic(Family family, const AttentionSpec& given, const AttentionShape& shape,
                            Pass pass) {
  const KernelSpec spec = with_pass(given, pass);
  return able_family(family, spec).heuristic(spec, shape, gpu().info);
}

/// The configuration that a case is run with. Every other case takes that of a problem that fills the device,
/// as those of tests hardly do.
inline TileConfig config_of(const AttentionCase& test, Pass pass) {
  const AttentionShape large{16, 16, 16, 4096, 4096};
  return heuristic(test.family, test.spec, test.seed / 2 % 2 ? large : test.shape, pass);
}

/// Both passes of each case, with its configurations.
inline std::vector<Wanted> kernels_of(const std::vector<AttentionCase>& cases) {
  std::vector<Wanted> kernels;
  for (const AttentionCase& test : cases) {
    if (!supports(test.family, test.spec)) continue;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      kernels.push_back({with_pass(test.spec, pass), test.shape, config_of(test, pass)});
    }
  }
  return kernels;
}

/// A runtime with a cache of its own, gone with it; or with the one that FLASHJIT_TEST_CACHE names, which
/// stays.
class TemporaryRuntime {
 public:
  explicit TemporaryRuntime(std::optional<bool> check_indices = {})
      : runtime_(RuntimeOptions{.cache_dir = kept() ? kept() : own_.string(),
                                .check_indices = check_indices,
                                .log = [](std::string_view) {}}) {}
  ~TemporaryRuntime() {
    std::error_code ignored;
    std::filesystem::remove_all(own_, ignored);
  }
  TemporaryRuntime(const TemporaryRuntime&) = delete;
  TemporaryRuntime& operator=(const TemporaryRuntime&) = delete;

  Runtime& get() { return runtime_; }

 private:
  static const char* kept() { return std::getenv("FLASHJIT_TEST_CACHE"); }

  std::filesystem::path own_ =
      std::filesystem::temp_directory_path() / ("flashjit-gpu-test-" + unique_suffix());
  Runtime runtime_;
};

/// Skips the cases that their family does not support.
class SupportedCase : public GpuTestWith<AttentionCase> {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    const AttentionCase& test = GetParam();
    const Support support = supports(test.family, test.spec);
    if (!support) GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
  }
};

/// Runs cases; the kernels of those that the filter selects are compiled together first.
class CaseTest : public SupportedCase {
 protected:
  static void prepare_selected(const std::vector<AttentionCase>& cases) {
    if (!gpu().context) return;
    shared_ = std::make_unique<TemporaryRuntime>();
    prepare_all(shared_->get(), kernels_of(selected(cases)));
  }
  static void TearDownTestSuite() { shared_.reset(); }

  static void run_case() {
    const AttentionCase& test = GetParam();
    SCOPED_TRACE(to_string(test.spec) + " " + to_string(test.shape));
    AttentionRun run(test);
    run.check_forward(shared_->get(), config_of(test, Pass::forward));
    run.check_backward(shared_->get(), config_of(test, Pass::backward));
  }

 private:
  static std::vector<AttentionCase> selected(const std::vector<AttentionCase>& cases) {
    const testing::TestSuite& suite = *testing::UnitTest::GetInstance()->current_test_suite();
    std::vector<AttentionCase> result;
    for (const AttentionCase& test : cases) {
      for (int i = 0; i < suite.total_test_count(); ++i) {
        const testing::TestInfo& info = *suite.GetTestInfo(i);
        if (info.should_run() && std::string_view(info.name()).ends_with(fmt::format("/{}", name_of(test))))
          result.push_back(test);
      }
    }
    return result;
  }

  inline static std::unique_ptr<TemporaryRuntime> shared_;
};

/// Runs a problem with every configuration of the family's search space, in each pass that the family has.
inline void check_every_configuration(const AttentionCase& test) {
  const plan::FamilyTraits& family = plan::traits(test.family);
  const auto supports = [&](Pass pass) { return family.supports(with_pass(test.spec, pass), gpu().info); };
  if (const Support support = supports(Pass::forward); !support)
    GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
  SCOPED_TRACE(to_string(test.spec) + " " + to_string(test.shape));
  TemporaryRuntime runtime;
  AttentionRun run(test);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (!supports(pass)) continue;
    const KernelSpec spec = with_pass(test.spec, pass);
    const std::vector<TileConfig> configs = family.search_space(spec, gpu().info);
    EXPECT_FALSE(configs.empty()) << to_string(spec);
    std::vector<Wanted> kernels;
    for (const TileConfig& config : configs) kernels.push_back({spec, test.shape, config});
    prepare_all(runtime.get(), kernels);
    for (const TileConfig& config : configs) {
      if (pass == Pass::forward) run.check_forward(runtime.get(), config);
      if (pass == Pass::backward) run.check_backward(runtime.get(), config);
    }
  }
}

/// Picks one level of every factor, as often as it takes that every pair of levels of two factors occurs
/// together. Greedy and deterministic; `levels` says how many levels each factor has.
template <std::size_t kFactors>
std::vector<std::array<int, kFactors>> covering_choices(const std::array<int, kFactors>& levels) {
  using Choice = std::array<int, kFactors>;
  struct Pair {
    std::size_t factor_a, factor_b;
    int a, b;
  };
  std::mt19937 generator(1);
  std::vector<Pair> missing;
  for (std::size_t f = 0; f < kFactors; ++f) {
    for (std::size_t g = f + 1; g < kFactors; ++g) {
      for (int a = 0; a < levels[f]; ++a) {
        for (int b = 0; b < levels[g]; ++b) missing.push_back({f, g, a, b});
      }
    }
  }
  const auto covers = [](const Choice& choice, const Pair& pair) {
    return choice[pair.factor_a] == pair.a && choice[pair.factor_b] == pair.b;
  };
  std::vector<Choice> choices;
  while (!missing.empty()) {
    Choice best{};
    std::ptrdiff_t best_count = 0;
    for (int attempt = 0; attempt < 40; ++attempt) {
      Choice choice;
      for (std::size_t f = 0; f < kFactors; ++f) choice[f] = static_cast<int>(generator() % levels[f]);
      const Pair& pair = missing[generator() % missing.size()];  // so that every choice makes progress
      choice[pair.factor_a] = pair.a;
      choice[pair.factor_b] = pair.b;
      const auto count =
          std::ranges::count_if(missing, [&](const Pair& other) { return covers(choice, other); });
      if (count > best_count) {
        best = choice;
        best_count = count;
      }
    }
    std::erase_if(missing, [&](const Pair& pair) { return covers(best, pair); });
    choices.push_back(best);
  }
  return choices;
}

}  // namespace flashjit::test

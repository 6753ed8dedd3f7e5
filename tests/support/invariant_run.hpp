// Sequences computed together and each alone, whose bits must be the same, and O in fp32 beside O rounded.
#pragma once

#include <cstring>

#include "tests/support/attention_case.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {

/// Slots of a cache, or whole tensors where the spec has none; `lengths` are the keys of each, in slots of
/// `capacity`.
struct InvariantCase {
  const char* spec;
  AttentionShape shape;  ///< its batch: the sequences; seqlen_kv: capacity
  std::vector<std::int32_t> lengths = {};
  const char* config = "";  ///< "": the heuristic's
};
inline void PrintTo(const InvariantCase& test, std::ostream* out) {
  *out << test.spec << " " << to_string(test.shape) << " " << test.config;
}

class InvariantRun {
 public:
  InvariantRun(Runtime& runtime, const InvariantCase& test)
      : runtime_(runtime),
        spec_(parse_spec(test.spec)),
        shape_(test.shape),
        q_(random(test.shape.heads_q * test.shape.seqlen_q, spec_.head_dim, 1)),
        k_(random(test.shape.heads_kv * test.shape.seqlen_kv, spec_.head_dim, 2)),
        v_(random(test.shape.heads_kv * test.shape.seqlen_kv, spec_.v_dim(), 3)),
        lengths_(to_device(test.lengths)) {
    if (*test.config) config_ = parse_config(test.config);
  }

  /// `count` sequences from one on: the bytes of each one's O and LSE. `queries`: as many of the last alone.
  std::vector<std::vector<std::uint8_t>> run(std::int64_t first, std::int64_t count,
                                             std::optional<std::int64_t> queries = {}) {
    AttentionShape shape = shape_;
    shape.batch = count;
    shape.seqlen_q = queries.value_or(shape_.seqlen_q);
    const int out_size = size_of(spec_.out_type());
    const std::size_t rows = shape.heads_q * shape.seqlen_q, o_bytes = rows * spec_.v_dim() * out_size;
    const GuardedMemory out(count * o_bytes), lse(count * rows * 4);
    if (config_) runtime_.prepare(spec_, shape, *config_);
    const GuardedMemory work(runtime_.workspace_bytes(spec_, shape));
    const auto view = [&](const device::DeviceBuffer& memory, std::int64_t heads, std::int64_t length,
                          int dim) {
      const std::int64_t of_one = heads * length * dim * size_of(spec_.dtype);
      return ConstTensorView::bhsd(static_cast<const char*>(memory.data()) + first * of_one, count, heads,
                                   length, dim);
    };
    ConstTensorView q = view(q_, shape.heads_q, shape_.seqlen_q, spec_.head_dim);
    q.data = static_cast<const char*>(q.data) +
             (shape_.seqlen_q - shape.seqlen_q) * spec_.head_dim * size_of(spec_.dtype);
    q.size[2] = shape.seqlen_q;
    runtime_.forward(
        spec_,
        {.q = q,
         .k = view(k_, shape.heads_kv, shape.seqlen_kv, spec_.head_dim),
         .v = view(v_, shape.heads_kv, shape.seqlen_kv, spec_.v_dim()),
         .out = TensorView::bhsd(out.data(), count, shape.heads_q, shape.seqlen_q, spec_.v_dim()),
         .lse = static_cast<float*>(lse.data()),
         .kv_lengths =
             spec_.kv.has_lengths() ? static_cast<const std::int32_t*>(lengths_.data()) + first : nullptr,
         .workspace = {work.data(), work.bytes()}},
        nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(out.guards_intact() && lse.guards_intact() && work.guards_intact());
    const std::vector<std::uint8_t> o = out.content(), l = lse.content();
    std::vector<std::vector<std::uint8_t>> each(count);
    for (std::int64_t i = 0; i < count; ++i) {
      each[i].assign(o.begin() + i * o_bytes, o.begin() + (i + 1) * o_bytes);
      each[i].insert(each[i].end(), l.begin() + i * rows * 4, l.begin() + (i + 1) * rows * 4);
    }
    return each;
  }

  /// O of all sequences.
  std::vector<double> out() {
    const DType type = spec_.out_type();
    std::vector<double> all;
    for (std::vector<std::uint8_t>& bytes : run(0, shape_.batch)) {
      bytes.resize(bytes.size() - shape_.heads_q * shape_.seqlen_q * 4);
      std::ranges::copy(decode(type, bytes), std::back_inserter(all));
    }
    return all;
  }

 private:
  device::DeviceBuffer random(std::int64_t rows, int dim, unsigned seed) const {
    std::mt19937 generator(seed);
    const std::int64_t count = shape_.batch * rows * dim;
    return to_device(
        repeated(encode(spec_.dtype, normal_values(std::min(count, kPeriod), spec_.dtype, 1, generator)),
                 count * size_of(spec_.dtype)));
  }
  /// Numbers are drawn once and repeat, as caches have 10^8. A prime, so that a sequence's rows differ.
  static constexpr std::int64_t kPeriod = 1'000'003;
  static std::vector<std::uint8_t> repeated(std::vector<std::uint8_t> block, std::size_t bytes) {
    const std::size_t period = block.size();
    block.resize(bytes);
    for (std::size_t done = period; done < bytes; done += period)
      std::memcpy(&block[done], block.data(), std::min(period, bytes - done));
    return block;
  }

  Runtime& runtime_;
  KernelSpec spec_;
  AttentionShape shape_;
  std::optional<TileConfig> config_;
  device::DeviceBuffer q_, k_, v_, lengths_;
};

/// A run has a quarter of the cases (is_drawn()).
inline void expect_same_alone(Runtime& runtime, const InvariantCase& test) {
  SCOPED_TRACE(test.spec);
  if (!is_drawn(fmt::format("{} {} {}", test.spec, to_string(test.shape), test.config), 4)) return;
  InvariantRun run(runtime, test);
  const auto together = run.run(0, test.shape.batch);
  for (std::int64_t i = 0; i < test.shape.batch; ++i)
    EXPECT_TRUE(run.run(i, 1)[0] == together[i]) << "sequence " << i << " of " << to_string(test.shape);
}

/// The last of a sequence's queries give the same without the queries before them.
inline void expect_same_of_fewer_queries(Runtime& runtime, const InvariantCase& test,
                                         const std::vector<std::int64_t>& fewer) {
  SCOPED_TRACE(test.spec);
  const KernelSpec spec = parse_spec(test.spec);
  InvariantRun run(runtime, test);
  const std::int64_t heads = test.shape.heads_q, queries = test.shape.seqlen_q;
  const auto all = run.run(0, test.shape.batch);
  for (const std::int64_t few : fewer) {
    const auto last = run.run(0, test.shape.batch, few);
    for (std::int64_t i = 0; i < test.shape.batch; ++i)
      for (const auto& [begin, row] :
           {std::pair<std::int64_t, std::int64_t>{0, spec.v_dim() * size_of(spec.out_type())},
            {spec.v_dim() * size_of(spec.out_type()), 4}})
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::uint8_t* one = all[i].data() + heads * queries * begin + ((h + 1) * queries - few) * row;
          const std::uint8_t* other = last[i].data() + heads * few * begin + h * few * row;
          ASSERT_EQ(std::memcmp(one, other, few * row), 0)
              << few << " of " << queries << " queries, sequence " << i << ", head " << h
              << (begin == 0 ? ": O" : ": LSE");
        }
  }
}

/// O in 16 bits is O in fp32, rounded. A run has a quarter of the cases (is_drawn()).
inline void expect_fp32_out(Runtime& runtime, InvariantCase test) {
  SCOPED_TRACE(test.spec);
  if (!is_drawn(fmt::format("{} {} {}", test.spec, to_string(test.shape), test.config), 4)) return;
  const std::vector<double> narrow = InvariantRun(runtime, test).out();
  const std::string wide_spec = std::string(test.spec) + ":fp32_out";
  test.spec = wide_spec.c_str();
  const std::vector<double> wide = InvariantRun(runtime, test).out();
  ASSERT_EQ(wide.size(), narrow.size());
  std::size_t rounded = 0;
  for (std::size_t i = 0; i < wide.size(); ++i) {
    ASSERT_EQ(reference::round_to(parse_spec(test.spec).dtype, wide[i]), narrow[i]) << i;
    rounded += wide[i] != narrow[i];
  }
  EXPECT_GT(rounded, wide.size() / 2);
}

}  // namespace flashjit::test

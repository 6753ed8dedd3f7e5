// O as codes: of calls whose O is known exactly, as each sequence has one key, so that O is its V, and of
// calls of many keys.
#pragma once

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "expr/kv_codec.hpp"
#include "flashjit/reference.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/kv_format_run.hpp"

namespace flashjit::test {

struct OutCodesCase {
  std::string spec;  ///< with out{<format>}; without its pass
  AttentionShape shape;
  Family family;
  std::string config = {};
};
inline std::string name_of(const OutCodesCase& test) {
  std::string name = to_string(test.family) + "_" + test.spec;
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

/// A forward pass with codes of O, by a kernel and by the reference.
class OutCodesRun {
 public:
  struct Results {
    std::vector<std::uint8_t> codes, scales;  ///< of rows [batch, heads, queries]
  };

  OutCodesRun(const OutCodesCase& test, float scale)
      : test_(test), spec_(spec_for(test.family, test.spec)), scale_(scale) {
    const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
    q_ = random_values(batch * heads_q * seqlen_q * spec_.head_dim);
    k_ = random_values(batch * heads_kv * seqlen_kv * spec_.head_dim);
    v_ = random_values(batch * heads_kv * seqlen_kv * spec_.v_dim());
    for (std::int64_t b = 0; b < batch; ++b)
      lengths_.push_back(static_cast<std::int32_t>(b == 1 ? 0 : seqlen_kv - 3 * b));
  }

  const KernelSpec& spec() const { return spec_; }
  const KvFormat& format() const { return spec_.epilogue.out_format; }
  std::vector<double>& v() { return v_; }
  int code_bytes() const { return format().row_bytes(spec_.v_dim()); }
  int scale_bytes() const { return format().row(spec_.v_dim()).scale_columns * size_of(format().scale_type); }
  std::int64_t rows() const { return test_.shape.batch * test_.shape.heads_q * test_.shape.seqlen_q; }

  Results launch(Runtime& runtime) {
    const plan::FamilyTraits& family = plan::traits(test_.family);
    runtime.prepare(
        spec_, test_.shape,
        test_.config.empty() ? family.heuristic(spec_, test_.shape, gpu().info) : parse_config(test_.config));
    const auto q = to_device(spec_.dtype, q_), k = to_device(spec_.dtype, k_), v = to_device(spec_.dtype, v_);
    const auto scale = to_device(std::vector{scale_});
    const auto lengths = to_device(lengths_);
    const auto count = static_cast<std::size_t>(rows());
    const GuardedMemory out(count * code_bytes()), scales(scale_memory());
    const GuardedMemory work(runtime.workspace_bytes(spec_, test_.shape));
    ForwardArgs args =
        args_of(q.data(), k.data(), v.data(), lengths.data(), scale.data(), out.data(), scales.data());
    args.workspace = {work.data(), work.bytes()};
    runtime.forward(spec_, args, nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(out.guards_intact() && scales.guards_intact() && work.guards_intact());
    return {out.content(), in_rows(scales.content())};
  }
  Results reference() {
    const auto q = encode(spec_.dtype, q_), k = encode(spec_.dtype, k_), v = encode(spec_.dtype, v_);
    const auto count = static_cast<std::size_t>(rows());
    Results results{std::vector<std::uint8_t>(count * code_bytes()),
                    std::vector<std::uint8_t>(scale_memory())};
    reference_forward(spec_, args_of(q.data(), k.data(), v.data(), lengths_.data(), &scale_,
                                     results.codes.data(), results.scales.data()));
    results.scales = in_rows(std::move(results.scales));
    return results;
  }
  /// Elements of a row.
  std::vector<double> decoded(const Results& results, std::int64_t row) const {
    std::vector<double> values(static_cast<std::size_t>(spec_.v_dim()));
    decode_row(format(), spec_.v_dim(), &results.codes[row * code_bytes()],
               format().has_argument() ? scale_ : 1.0, values.data(),
               format().has_block_scales() ? &results.scales[row * scale_bytes()] : nullptr);
    return values;
  }

 private:
  std::vector<double> random_values(std::int64_t count) {
    std::normal_distribution<double> normal;
    std::vector<double> values(static_cast<std::size_t>(count));
    for (double& value : values) value = dtype_info(spec_.dtype).round(normal(random_));
    return values;
  }
  ForwardArgs args_of(const void* q, const void* k, const void* v, const void* lengths, const void* scale,
                      void* out, void* scales) const {
    const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test_.shape;
    ForwardArgs args{.q = ConstTensorView::bhsd(q, batch, heads_q, seqlen_q, spec_.head_dim),
                     .k = ConstTensorView::bhsd(k, batch, heads_kv, seqlen_kv, spec_.head_dim),
                     .v = ConstTensorView::bhsd(v, batch, heads_kv, seqlen_kv, spec_.v_dim()),
                     .out = TensorView::bhsd(out, batch, heads_q, seqlen_q, code_bytes())};
    if (spec_.kv.is_cache()) args.kv_lengths = static_cast<const std::int32_t*>(lengths);
    if (format().has_argument()) args.out_scale = static_cast<const float*>(scale);
    const std::int64_t blocks = format().row(spec_.v_dim()).scale_columns;
    if (spec_.epilogue.swizzled_scales)
      args.out_block_scale = TensorView::bhsd(scales, 1, 1, token_rows(), heads_q * blocks);
    else if (format().has_block_scales())
      args.out_block_scale = TensorView::bhsd(scales, batch, heads_q, seqlen_q, blocks);
    return args;
  }
  /// Of swizzled scales.
  std::int64_t token_rows() const { return (test_.shape.batch * test_.shape.seqlen_q + 127) / 128 * 128; }
  std::size_t scale_memory() const {
    const std::int64_t scales_of =
        spec_.epilogue.swizzled_scales ? token_rows() * test_.shape.heads_q : rows();
    return static_cast<std::size_t>(scales_of * scale_bytes());
  }
  /// Scales as rows [batch, heads, queries], which may be swizzled.
  std::vector<std::uint8_t> in_rows(std::vector<std::uint8_t> scales) const {
    if (!spec_.epilogue.swizzled_scales) return scales;
    const auto [batch, heads, kv, queries, keys] = test_.shape;
    const int blocks = scale_bytes();
    std::vector<std::uint8_t> in_order(static_cast<std::size_t>(rows() * blocks));
    for (std::int64_t i = 0; i < rows() * blocks; ++i) {
      const std::int64_t row = i / blocks, token = row / queries / heads * queries + row % queries,
                         column = row / queries % heads * blocks + i % blocks;
      const std::int64_t tile = token / 128 * (heads * blocks / 4) + column / 4;
      in_order[i] = scales[tile * 512 + token % 32 * 16 + token % 128 / 32 * 4 + column % 4];
    }
    return in_order;
  }

  OutCodesCase test_;
  KernelSpec spec_;
  float scale_;
  std::mt19937 random_{5};
  std::vector<double> q_, k_, v_;
  std::vector<std::int32_t> lengths_;  ///< of a cache's slots: one is empty
};

/// Values whose codes tell how they are rounded: near and at the middles between codes, beyond the largest,
/// tiny, zeros, and in some rows NaN and infinities.
inline void fill_with_hard_values(std::vector<double>& v, const AttentionSpec& spec) {
  const KvFormat& format = spec.epilogue.out_format;
  const unsigned codes = 1U << format.bits();
  const auto dim = static_cast<std::size_t>(spec.v_dim());
  for (std::size_t i = 0; i < v.size(); ++i) {
    const double x = code_value(format, static_cast<unsigned>(i * 7 % codes));
    const double y = code_value(format, static_cast<unsigned>((i * 7 + 1) % codes));
    const double middle = std::isnan(x) || std::isnan(y) ? 1e6 : (x + y) / 2;
    const double near = i % 3 == 0 ? middle : i % 3 == 1 ? middle * 1.01 : middle * 0.99;
    v[i] = dtype_info(spec.dtype).round(i / dim % 5 == 4 ? 0.0 : i % 11 == 0 ? near * 40 : near);
  }
  v[dim + 3] = std::numeric_limits<double>::quiet_NaN();
  v[2 * dim + 5] = std::numeric_limits<double>::infinity();
}

/// Each code exactly, to the nearest, ties to even: as O times the reciprocal of its scale in fp32.
inline void check_exact_codes(Runtime& runtime, const OutCodesCase& test) {
  SCOPED_TRACE(name_of(test));
  constexpr float kScale = 0.75f;
  OutCodesRun run(test, kScale);
  fill_with_hard_values(run.v(), run.spec());
  const OutCodesRun::Results got = run.launch(runtime), reference = run.reference();
  const KvFormat& format = run.format();
  const KvRow row = format.row(run.spec().v_dim());
  const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
  ASSERT_EQ(seqlen_kv, 1);
  for (std::int64_t i = 0; i < run.rows(); ++i) {
    const std::int64_t b = i / seqlen_q / heads_q, h = i / seqlen_q % heads_q / (heads_q / heads_kv);
    const double* v = &run.v()[(b * heads_kv + h) * run.spec().v_dim()];
    for (int column = 0; column < run.spec().v_dim(); ++column) {
      double scale = format.has_argument() ? kScale : 1.0;
      if (format.has_block_scales()) {
        const std::int64_t at = i * run.scale_bytes() + column / row.block * row.scale_step;
        const double of_block = decode_number(format.scale_type, &got.scales[at]),
                     wanted = decode_number(format.scale_type, &reference.scales[at]);
        if (std::isnan(wanted)) {
          ASSERT_TRUE(std::isnan(of_block)) << "row " << i << ", column " << column;
          continue;
        }
        ASSERT_EQ(of_block, wanted) << "row " << i << ", column " << column;
        scale *= of_block;
      }
      const unsigned byte = got.codes[i * run.code_bytes() + column * format.bits() / 8];
      const unsigned code = format.bits() == 8 ? byte : byte >> column % 2 * 4 & 15;
      const float factor = 1.0f / static_cast<float>(scale);
      const unsigned wanted = code_of(format, static_cast<float>(v[column]) * factor);
      if (std::isnan(v[column]))
        ASSERT_TRUE(std::isnan(code_value(format, code))) << "row " << i << ", column " << column;
      else
        ASSERT_EQ(code, wanted) << "row " << i << ", column " << column << ", O " << v[column];
    }
  }
}

/// Codes of O of many keys are the reference's, or where that lies between two codes the other one.
inline void check_near_codes(Runtime& runtime, const OutCodesCase& test) {
  SCOPED_TRACE(name_of(test));
  OutCodesRun run(test, 0.0078125f);
  const OutCodesRun::Results got = run.launch(runtime), wanted = run.reference();
  const double step = run.format().bits() == 4 ? 0.4 : 0.13;
  std::size_t others = 0;
  for (std::int64_t i = 0; i < run.rows(); ++i) {
    const std::vector<double> x = run.decoded(got, i), y = run.decoded(wanted, i);
    double largest = 0;
    for (const double value : y) largest = std::max(largest, std::abs(value));
    for (std::size_t n = 0; n < x.size(); ++n) {
      ASSERT_NEAR(x[n], y[n], step * std::abs(y[n]) + 0.12 * largest) << "row " << i << ", column " << n;
      others += std::abs(x[n] - y[n]) > 0.01 * largest;
    }
  }
  EXPECT_LT(others, wanted.codes.size() / 10);
}

}  // namespace flashjit::test

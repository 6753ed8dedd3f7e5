// Every code of 8 bits on its way through a kernel: as K, whose product with a unit is the score that LSE
// tells, and as V of a row's only key, which is then O.
#pragma once

#include <cmath>
#include <vector>

#include "tests/support/attention_case.hpp"
#include "tests/support/scales.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {

/// 256 sequences of one key each: all elements of K or V have the sequence's number as their code.
class CodesCheck {
 public:
  CodesCheck(const KernelSpec& spec, Family family, double scale)
      : spec_(spec), family_(family), scale_(scale) {
    scales_.assign(spec.kv.key_scales ? kCodes : 1, scale);
  }

  void check_v(Runtime& runtime) {
    const Results got = run(runtime, std::vector<std::uint8_t>(kCodes * kDim), codes());
    for (int code = 0; code < kCodes; ++code)
      for (int i = 0; i < kDim; ++i)
        expect_same(got.out[code * kDim + i], reference::round_to(spec_.dtype, value(code)), code);
  }
  void check_k(Runtime& runtime) {
    const Results got = run(runtime, codes(), std::vector<std::uint8_t>(kCodes * kDim));
    for (int code = 0; code < kCodes; ++code) {
      const double wanted = value(code);
      if (!(std::abs(wanted) < kLargestScore)) continue;
      EXPECT_NEAR(got.lse[code], wanted, 1e-6 * (1 + std::abs(wanted)))
          << to_string(spec_) << " code " << code;
    }
  }

 private:
  static constexpr int kCodes = 256, kDim = 16;
  static constexpr double kLargestScore = 1e6;  // beyond, an exponent's rounding is too large for LSE
  struct Results {
    std::vector<double> out, lse;
  };

  static std::vector<std::uint8_t> codes() {
    std::vector<std::uint8_t> all(kCodes * kDim);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(i / kDim);
    return all;
  }
  double value(int code) const {
    const auto bits = static_cast<std::uint8_t>(code);
    return dtype_info(spec_.kv_type()).decode(&bits) * scale_;
  }
  void expect_same(double got, double wanted, int code) const {
    EXPECT_TRUE(got == wanted || (std::isnan(got) && std::isnan(wanted)))
        << to_string(spec_) << " code " << code << ": " << got << ", not " << wanted;
  }

  /// Q is 1 in one dimension.
  Results run(Runtime& runtime, const std::vector<std::uint8_t>& k_codes,
              const std::vector<std::uint8_t>& v_codes) {
    const AttentionShape shape{kCodes, 1, 1, 1, 1};
    const auto one =
        static_cast<float>(spec_.prologue.q_codes ? 0.5 : 1);  // and so is the scale of its codes
    std::vector<double> q(kCodes * kDim);
    for (std::size_t i = 0; i < kCodes; ++i) q[i * kDim + i % kDim] = 1 / one;
    const auto device_one = to_device(std::vector{one});
    const auto device_q = to_device(spec_.q_type(), q), k = to_device(k_codes), v = to_device(v_codes),
               scales = to_device(DType::fp32, scales_);
    const GuardedMemory out(kCodes * kDim * size_of(spec_.dtype)), lse(kCodes * sizeof(float));
    runtime.prepare(spec_, shape, plan::traits(family_).heuristic(spec_, shape, gpu().info));
    const GuardedMemory work(runtime.workspace_bytes(spec_, shape));
    const ConstScaleView view{
        static_cast<const float*>(scales.data()), {std::ssize(scales_), 1, 1, 1}, {1, 0, 0, 0}};
    const ForwardArgs args{
        .q = ConstTensorView::bhsd(device_q.data(), kCodes, 1, 1, kDim),
        .k = ConstTensorView::bhsd(k.data(), kCodes, 1, 1, kDim),
        .v = ConstTensorView::bhsd(v.data(), kCodes, 1, 1, kDim),
        .out = TensorView::bhsd(out.data(), kCodes, 1, 1, kDim),
        .lse = static_cast<float*>(lse.data()),
        .softmax_scale = 1.0f,
        .workspace = {work.data(), work.bytes()},
        .k_scale = view,
        .v_scale = view,
        .q_scale = spec_.prologue.q_codes
                       ? ConstScaleView::of_tensor(static_cast<const float*>(device_one.data()))
                       : ConstScaleView{}};
    runtime.forward(spec_, args, nullptr);
    gpu().context->synchronize();
    return {decode(spec_.dtype, out.content()), decode(DType::fp32, lse.content())};
  }

  KernelSpec spec_;
  Family family_;
  double scale_;
  std::vector<double> scales_;
};

/// A query that sees `keys` keys alike: O is the mean of V, whose keys have scales from 2^-20 to 2^20 by
/// turns, or 2^-5 to 2^5.
inline void check_long_mean(Runtime& runtime, Family family, std::int64_t keys) {
  constexpr int kDim = 16;
  const KernelSpec spec = spec_for(family, "bf16:d16:kve4m3:key_scales");
  const AttentionShape shape{1, 1, 1, 1, keys};
  std::mt19937 random(9);
  const double step = spec.dtype == DType::fp16 ? 0.25 : 1;  // fp16 has no codes times 2^20
  std::vector<double> codes(keys * kDim), scales(keys), sums(kDim), sizes(kDim);
  for (std::int64_t n = 0; n < keys; ++n) {
    scales[n] = std::exp2(step * static_cast<double>(n % 41 - 20));
    for (int i = 0; i < kDim; ++i) {
      const double code = codes[n * kDim + i] = random_code(spec.kv_type(), random);
      sums[i] += code * scales[n], sizes[i] += std::abs(code * scales[n]);
    }
  }
  const auto q = to_device(spec.dtype, std::vector<double>(kDim, 1.0)),
             k = to_device(std::vector<std::uint8_t>(keys * kDim)), v = to_device(spec.kv_type(), codes),
             scale = to_device(DType::fp32, scales);
  const GuardedMemory out(kDim * size_of(spec.dtype)), lse(sizeof(float));
  runtime.prepare(spec, shape, plan::traits(family).heuristic(spec, shape, gpu().info));
  const GuardedMemory work(runtime.workspace_bytes(spec, shape));
  const ConstScaleView view{static_cast<const float*>(scale.data()), {1, 1, 1, keys}, {0, 0, 0, 1}};
  runtime.forward(spec,
                  {.q = ConstTensorView::bhsd(q.data(), 1, 1, 1, kDim),
                   .k = ConstTensorView::bhsd(k.data(), 1, 1, keys, kDim),
                   .v = ConstTensorView::bhsd(v.data(), 1, 1, keys, kDim),
                   .out = TensorView::bhsd(out.data(), 1, 1, 1, kDim),
                   .lse = static_cast<float*>(lse.data()),
                   .workspace = {work.data(), work.bytes()},
                   .k_scale = view,
                   .v_scale = view},
                  nullptr);
  gpu().context->synchronize();
  const auto count = static_cast<double>(keys);
  const std::vector<double> got = decode(spec.dtype, out.content());
  for (int i = 0; i < kDim; ++i)
    EXPECT_NEAR(got[i], sums[i] / count, 0x1p-8 * std::abs(sums[i]) / count + 1e-5 * sizes[i] / count) << i;
  EXPECT_NEAR(decode(DType::fp32, lse.content())[0], std::log(count), 1e-5);
}

/// K's codes are NaN from the middle on, and so are V's where families hide them, which a causal mask hides
/// from the queries before: their O is the mean of V so far.
inline void check_nan_behind_mask(Runtime& runtime, Family family,
                                  const char* of_codes = "bf16:d16:kve4m3:causal", bool in_v = false) {
  constexpr int kDim = 16, kRows = 40, kFirstNan = 20;
  const KernelSpec spec = spec_for(family, of_codes);
  const AttentionShape shape{1, 1, 1, kRows, kRows};
  std::mt19937 random(3);
  std::vector<double> k(kRows * kDim), v(kRows * kDim);
  for (std::size_t i = 0; i < k.size(); ++i) {
    const bool is_nan = i / kDim >= kFirstNan;
    k[i] = is_nan ? std::nan("") : random_code(spec.kv_type(), random);
    v[i] = is_nan && in_v ? std::nan("") : random_code(spec.kv_type(), random);
  }
  const auto q = to_device(spec.q_type(), std::vector<double>(kRows * kDim)),
             device_k = to_device(spec.kv_type(), k), device_v = to_device(spec.kv_type(), v),
             scale = to_device(DType::fp32, std::vector<double>{0.5});
  const GuardedMemory out(kRows * kDim * size_of(spec.dtype));
  runtime.prepare(spec, shape, plan::traits(family).heuristic(spec, shape, gpu().info));
  const GuardedMemory work(runtime.workspace_bytes(spec, shape));
  const ConstScaleView view{static_cast<const float*>(scale.data()), {1, 1, 1, 1}, {0, 0, 0, 0}};
  runtime.forward(spec,
                  {.q = ConstTensorView::bhsd(q.data(), 1, 1, kRows, kDim),
                   .k = ConstTensorView::bhsd(device_k.data(), 1, 1, kRows, kDim),
                   .v = ConstTensorView::bhsd(device_v.data(), 1, 1, kRows, kDim),
                   .out = TensorView::bhsd(out.data(), 1, 1, kRows, kDim),
                   .workspace = {work.data(), work.bytes()},
                   .k_scale = view,
                   .v_scale = view,
                   .q_scale = spec.prologue.q_codes ? view : ConstScaleView{}},
                  nullptr);
  gpu().context->synchronize();
  const std::vector<double> got = decode(spec.dtype, out.content());
  for (int column = 0; column < kDim; ++column) {
    double sum = 0, size = 0;
    for (int row = 0; row < kFirstNan; ++row) {
      sum += 0.5 * v[row * kDim + column], size += std::abs(0.5 * v[row * kDim + column]);
      EXPECT_NEAR(got[row * kDim + column], sum / (row + 1), 0x1p-7 * size / (row + 1)) << row;
    }
  }
}

/// V's, too, where a KV tile has keys that some rows do not attend to; the second mask is the first as no
/// bounds say it.
inline void check_nan_in_v_behind_mask(Runtime& runtime, Family family) {
  for (const char* codes :
       {"bf16:d16:kve4m3", "fp16:d16:kve5m2", "bf16:d16:kve4m3:key_scales", "bf16:d16:kve4m3:q_codes",
        "bf16:d16:kve5m2:q_codes", "bf16:d16:kve4m3:q_codes:key_scales"})
    for (const char* mask : {":causal", ":mask{max(q, kv) == q}"}) {
      const std::string spec = std::string(codes) + mask;
      if (!plan::traits(family).supports(spec_for(family, spec), gpu().info)) continue;
      SCOPED_TRACE(spec);
      check_nan_behind_mask(runtime, family, spec.c_str(), true);
    }
}

/// Scales are powers of two, so that nothing rounds but what must. A run has half of the specs (is_drawn()).
inline void check_all_codes(Runtime& runtime, Family family) {
  for (const char* spec :
       {"bf16:d16:kve4m3", "fp16:d16:kve4m3", "bf16:d16:kve5m2", "fp16:d16:kve5m2", "bf16:d16:kvint8",
        "fp16:d16:kvint8", "bf16:d16:kve4m3:key_scales", "fp16:d16:kve5m2:key_scales",
        "bf16:d16:kvint8:key_scales", "bf16:d16:kve4m3:q_codes", "fp16:d16:kve5m2:q_codes",
        "bf16:d16:kve4m3:q_codes:key_scales"}) {
    if (!is_drawn(fmt::format("{} {}", spec, to_string(family)), 2)) continue;
    for (const double scale : {1.0, 0x1p-20, 0x1p20}) {
      const KernelSpec parsed = spec_for(family, spec);
      if (!plan::traits(family).supports(parsed, gpu().info)) continue;
      if (parsed.dtype == DType::fp16 && scale > 1) continue;  // whose O is infinite
      CodesCheck check(parsed, family, scale);
      check.check_v(runtime);
      if (scale == 1.0) check.check_k(runtime);
    }
  }
}

}  // namespace flashjit::test

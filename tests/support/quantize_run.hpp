// quantize() on the GPU: codes times scales are x, rotated or not, as nearly as the codes' type allows.
#pragma once

#include <cmath>
#include <vector>

#include "flashjit/reference.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/scales.hpp"

namespace flashjit::test {

struct QuantizeCase {
  const char* spec;                  ///< "bf16:d64:kve4m3"
  std::array<std::int64_t, 3> size;  ///< batch, heads, rows
  std::array<std::int64_t, 4> scales;
  bool hadamard = false;
  RopeView rope = {};      ///< by theta
  bool positions = false;  ///< of its own for each row, backwards
};

inline void check_quantize(Runtime& runtime, const QuantizeCase& test) {
  SCOPED_TRACE(std::string(test.spec) + (test.hadamard ? " hadamard" : ""));
  const KernelSpec spec = parse_spec(test.spec);
  const std::int64_t batch = test.size[0], heads = test.size[1], rows = test.size[2];  // for the lambda
  const std::int64_t dim = spec.head_dim, count = batch * heads * rows * dim;
  std::mt19937 random(7);
  std::vector<double> x = normal_values(count, spec.dtype, 3.0, random);
  // The first head of the first entry is zeros, but where all share a scale.
  if (test.scales[2] > 1) std::fill_n(x.begin(), heads / test.scales[2] * rows * dim, 0.0);
  std::int64_t scale_count = 1;
  for (const std::int64_t size : test.scales) scale_count *= size;
  std::vector<std::int32_t> positions(batch * rows);
  for (std::size_t i = 0; i < positions.size(); ++i)
    positions[i] = static_cast<std::int32_t>(3 * (positions.size() - i));
  const auto args_of = [&](const void* x_data, void* codes, void* scale, const void* given_positions) {
    RopeView rope = test.rope;
    if (test.positions) rope.positions = static_cast<const std::int32_t*>(given_positions);
    ScaleView view{static_cast<float*>(scale),
                   test.scales,
                   {test.scales[1] * test.scales[2] * test.scales[3], test.scales[2] * test.scales[3],
                    test.scales[3], 1}};
    return QuantizeArgs{.x = ConstTensorView::bhsd(x_data, batch, heads, rows, dim),
                        .codes = TensorView::bhsd(codes, batch, heads, rows, dim),
                        .scale = view,
                        .hadamard = test.hadamard,
                        .rope = rope};
  };
  const auto device_x = to_device(spec.dtype, x);
  const auto device_positions = to_device(positions);
  const GuardedMemory codes(count), scale(scale_count * sizeof(float));
  runtime.quantize(spec, args_of(device_x.data(), codes.data(), scale.data(), device_positions.data()),
                   nullptr);
  gpu().context->synchronize();
  EXPECT_TRUE(codes.guards_intact() && scale.guards_intact());
  const std::vector<double> got = decode(spec.kv_type(), codes.content()),
                            got_scales = decode(DType::fp32, scale.content());

  std::vector<std::uint8_t> host_x = encode(spec.dtype, x), host_codes(count);
  std::vector<float> host_scales(scale_count);
  reference_quantize(spec, args_of(host_x.data(), host_codes.data(), host_scales.data(), positions.data()));
  const std::vector<double> wanted = decode(spec.kv_type(), host_codes);
  for (std::int64_t i = 0; i < scale_count; ++i)
    EXPECT_NEAR(got_scales[i], host_scales[i], 1e-5 * host_scales[i]) << i;
  // A quotient next to the middle between two codes may become either.
  std::int64_t other = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    other += got[i] != wanted[i];
    EXPECT_NEAR(got[i], wanted[i], 1 + std::abs(wanted[i]) / 4) << i;
  }
  EXPECT_LE(other, count / 200);
  double largest = 0;
  for (const double code : got) largest = std::max(largest, std::abs(code));
  if (count > 0) {
    EXPECT_EQ(largest, dtype_info(spec.kv_type()).largest);
  }
}

/// All types, and scales of a tensor, of heads, of Q's KV heads, of pages and of rows.
inline const std::vector<QuantizeCase>& quantize_cases() {
  static const std::vector<QuantizeCase> all = {
      {"bf16:d128:kve4m3", {3, 4, 37}, {1, 1, 1, 1}},
      {"bf16:d128:kve4m3", {3, 4, 37}, {3, 1, 4, 1}, true},
      {"fp16:d64:kve5m2", {2, 8, 5}, {2, 1, 2, 1}},
      {"fp16:d80:kvint8", {5, 2, 16}, {1, 5, 2, 1}},
      {"fp32:d96:kve4m3", {2, 3, 20}, {2, 1, 3, 20}, true},
      {"bf16:d256:kvint8", {4, 2, 16}, {1, 4, 2, 16}},
      {"fp32:d16:kve4m3", {1, 1, 1}, {1, 1, 1, 1}},
      {"bf16:d576x512:kve4m3", {1, 2, 9}, {1, 1, 2, 1}, true},
      {"bf16:d128:kve4m3", {2, 4, 37}, {2, 1, 4, 1}, true, {.theta = 1e4f}},
      {"fp16:d96:kve5m2",
       {2, 2, 20},
       {2, 1, 2, 20},
       false,
       {.theta = 500.0f, .dims = 64, .interleaved = true},
       true},
      {"bf16:d64:kve4m3", {3, 4, 0}, {3, 1, 4, 1}},
      {"bf16:d64:kve4m3", {3, 4, 0}, {1, 3, 4, 1}},
      {"bf16:d64:kve4m3", {0, 4, 5}, {1, 1, 1, 1}},
      {"bf16:d64:kve4m3", {3, 0, 5}, {3, 1, 1, 1}}};
  return all;
}

}  // namespace flashjit::test

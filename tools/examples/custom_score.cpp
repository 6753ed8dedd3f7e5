// An attention of your own: ALiBi's slopes, a sliding window whose width is given at the call, in one
// kernel.
#include <algorithm>
#include <cmath>

#include "example.hpp"

namespace {

constexpr std::int64_t kHeads = 4, kLength = 200, kDim = 64, kElements = kHeads * kLength * kDim;

/// What row i of a head must be where Q is zero and every element of V's row j is j.
double expected(double slope, std::int64_t window, std::int64_t i) {
  double sum = 0, weighted = 0;
  for (std::int64_t j = std::max<std::int64_t>(0, i - window + 1); j <= i; ++j) {
    const double weight = std::exp(slope * static_cast<double>(j - i));
    sum += weight;
    weighted += weight * static_cast<double>(j);
  }
  return weighted / sum;
}

}  // namespace

int main() {
  return example::run([](const cuda_functions& cuda) {
    const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    std::vector<float> values(kElements);
    for (std::int64_t i = 0; i < kElements; ++i) values[i] = static_cast<float>(i / kDim % kLength);
    const auto tensor = [&](const std::vector<float>& from) {
      return flashjit::TensorView::bhsd(example::upload(cuda, from), 1, kHeads, kLength, kDim);
    };
    const auto zero = tensor(std::vector<float>(kElements)), v = tensor(values), out = tensor(values);

    flashjit::Runtime runtime;
    const flashjit::AttentionSpec spec{
        .dtype = flashjit::DType::fp32,
        .head_dim = kDim,
        .score = flashjit::ScoreProgram("slopes: fp32 1d; score + slopes[h] * to_float(kv - q)"),
        .mask = flashjit::MaskProgram("window: int; q >= kv && q - kv < window")};
    for (const std::int64_t window : {30, 100}) {  // the second needs no new kernel
      const flashjit::Capture captures[] = {
          flashjit::Capture::tensor("slopes", example::upload(cuda, slopes), {kHeads}),
          flashjit::Capture::number("window", static_cast<double>(window))};
      runtime.forward(spec, {.q = zero, .k = zero, .v = v, .out = out, .captures = captures}, nullptr);
      const std::vector<float> got = example::download<float>(cuda, out.data, kElements);
      for (std::int64_t h = 0; h < kHeads; ++h)
        for (std::int64_t i = 0; i < kLength; ++i)
          if (std::fabs(got[(h * kLength + i) * kDim] - expected(slopes[h], window, i)) > 1e-2) return false;
    }
    return true;
  });
}

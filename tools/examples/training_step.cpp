// Training: forward, loss, backward, update. Q, K and V learn to give a target, with dropout on the way.
#include <cmath>

#include "example.hpp"

namespace {

constexpr std::int64_t kHeads = 2, kLength = 64, kDim = 32, kElements = kHeads * kLength * kDim;

std::vector<float> wave(float step) {
  std::vector<float> values(kElements);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(step * static_cast<float>(i));
  return values;
}

flashjit::TensorView tensor(float* data) {
  return flashjit::TensorView::bhsd(data, 1, kHeads, kLength, kDim);
}

}  // namespace

int main() {
  return example::run([](const cuda_functions& cuda) {
    std::vector<float> parameters[] = {wave(0.7f), wave(1.1f), wave(1.7f)};  // Q, K, V
    const std::vector<float> target = wave(0.3f);
    float* device[] = {example::upload(cuda, parameters[0]), example::upload(cuda, parameters[1]),
                       example::upload(cuda, parameters[2])};
    float* grads[] = {example::upload(cuda, target), example::upload(cuda, target),
                      example::upload(cuda, target)};
    float *out = example::upload(cuda, target), *dout = example::upload(cuda, target);
    float* lse = example::upload(cuda, std::vector<float>(kHeads * kLength));

    flashjit::Runtime runtime;
    const flashjit::AttentionSpec spec{
        .dtype = flashjit::DType::fp32, .head_dim = kDim, .mask = flashjit::causal(), .dropout = true};
    const auto lent = example::workspace(cuda, runtime, spec, {1, kHeads, kHeads, kLength, kLength},
                                         flashjit::Pass::backward);
    const auto q = tensor(device[0]), k = tensor(device[1]), v = tensor(device[2]), o = tensor(out);

    double first = 0, last = 0;
    for (std::uint64_t step = 0; step < 40; ++step) {
      const double p = 0.05;  // the offset makes every step's dropout mask another one
      runtime.forward(
          spec, {.q = q, .k = k, .v = v, .out = o, .lse = lse, .dropout_p = p, .seed = 1, .offset = step},
          nullptr);
      std::vector<float> gradient = example::download<float>(cuda, out, kElements);
      last = 0;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        gradient[i] -= target[i];  // of half the squared distance
        last += 0.5 * gradient[i] * gradient[i];
      }
      if (step == 0) first = last;
      cuda.upload(reinterpret_cast<CUdeviceptr>(dout), gradient.data(), kElements * sizeof(float));
      runtime.backward(spec,
                       {.q = q,
                        .k = k,
                        .v = v,
                        .out = o,
                        .lse = lse,
                        .dout = tensor(dout),
                        .dq = tensor(grads[0]),
                        .dk = tensor(grads[1]),
                        .dv = tensor(grads[2]),
                        .dropout_p = p,
                        .seed = 1,
                        .offset = step,
                        .workspace = lent},
                       nullptr);
      for (int i = 0; i < 3; ++i) {
        const std::vector<float> grad = example::download<float>(cuda, grads[i], kElements);
        for (std::size_t j = 0; j < grad.size(); ++j) parameters[i][j] -= 0.1f * grad[j];
        cuda.upload(reinterpret_cast<CUdeviceptr>(device[i]), parameters[i].data(),
                    kElements * sizeof(float));
      }
    }
    std::printf("loss %.1f -> %.1f\n", first, last);
    return last < 0.6 * first;
  });
}

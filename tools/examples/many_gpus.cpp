// Many GPUs of one host with one Runtime: a thread for each, every one with its own context and kernels.
#include <algorithm>
#include <atomic>
#include <thread>

#include "example.hpp"

namespace {

constexpr std::int64_t kBatch = 2, kHeads = 8, kLength = 512, kDim = 64;
constexpr std::int64_t kElements = kBatch * kHeads * kLength * kDim;
constexpr unsigned short kOne = 0x3f80, kNan = 0x7fff;  // bf16

/// Runs on the device whose context is current in this thread.
bool attend(const cuda_functions& cuda, flashjit::Runtime& runtime) {
  const auto tensor = [&](unsigned short bits) {
    return flashjit::TensorView::bhsd(make_filled(&cuda, bits, kElements), kBatch, kHeads, kLength, kDim);
  };
  const auto q = tensor(kOne), k = tensor(kOne), v = tensor(kOne), out = tensor(kNan);
  const flashjit::AttentionSpec spec{.dtype = flashjit::DType::bf16, .head_dim = kDim};
  runtime.forward(spec, {.q = q, .k = k, .v = v, .out = out}, nullptr);
  const auto got = example::download<unsigned short>(cuda, out.data, kElements);
  return std::all_of(got.begin(), got.end(), [](unsigned short x) { return x == kOne; });
}

}  // namespace

int main() {
  return example::run([](const cuda_functions& cuda) {
    int devices = 0;
    cuda.device_count(&devices);
    std::printf("%d GPUs\n", devices);

    flashjit::Runtime runtime;
    std::atomic<int> right = 0;
    std::vector<std::thread> threads;
    for (int device = 0; device < devices; ++device) {
      threads.emplace_back([&, device] {
        try {
          if (use_device(&cuda, device) && attend(cuda, runtime)) ++right;
        } catch (const std::exception& error) {
          std::fprintf(stderr, "GPU %d: %s\n", device, error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return right == devices;
  });
}

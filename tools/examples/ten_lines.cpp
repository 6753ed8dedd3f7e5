// The README's ten lines: causal attention, forward and backward, compiled on the first call. A test holds
// the README to them.
//
// Exit code: 0 done, 77 no GPU here, 1 failure.
#include <flashjit/flashjit.hpp>

#include <cstdint>
#include <cstdio>

#include "cuda_by_hand.h"

namespace {

constexpr unsigned short kOne = 0x3f80, kNan = 0x7fff;  // bf16

/// Q, K, V and dO of ones; returns the first element of O, bf16's bits.
unsigned short attend(const cuda_functions& cuda) {
  const std::int64_t batch = 2, heads = 8, length = 1024;
  const auto memory = [&](unsigned short bits) {
    return make_filled(&cuda, bits, batch * heads * length * 128);
  };
  const auto device_memory = [&](std::size_t bytes) { return make_filled(&cuda, 0, bytes / 2); };
  const auto tensor = [&](unsigned short bits) {
    return flashjit::TensorView::bhsd(memory(bits), batch, heads, length, 128, flashjit::DType::bf16);
  };
  const auto k = tensor(kOne), v = tensor(kOne), dout = tensor(kOne);
  const auto o = tensor(kNan), dq = tensor(kNan), dk = tensor(kNan), dv = tensor(kNan);
  void* const q_data = memory(kOne);
  const auto lse = static_cast<float*>(memory(kNan));
  CUstream stream = nullptr;

  flashjit::Runtime runtime;
  const flashjit::AttentionSpec causal{.mask = flashjit::causal()};
  const auto q = flashjit::TensorView::bhsd(q_data, batch, heads, length, 128, flashjit::DType::bf16);
  runtime.forward({.q = q, .k = k, .v = v, .out = o, .lse = lse}, causal, stream);

  flashjit::BackwardArgs args{
      .q = q, .k = k, .v = v, .out = o, .lse = lse, .dout = dout, .dq = dq, .dk = dk, .dv = dv};
  const std::size_t bytes = runtime.workspace_bytes(args, causal);
  args.workspace = {device_memory(bytes), bytes};
  runtime.backward(args, causal, stream);

  unsigned short first = 0;
  cuda.download(&first, reinterpret_cast<CUdeviceptr>(o.data), sizeof first);  // waits for the launches
  return first;
}

}  // namespace

int main() {
  cuda_functions cuda;
  if (!open_cuda(&cuda)) {
    std::puts("no GPU here");
    return 77;
  }
  try {
    // The average of ones is one, whatever the weights.
    const unsigned short first = attend(cuda);
    std::printf("O[0] = 0x%04x: %s\n", first, first == kOne ? "right" : "WRONG");
    return first == kOne ? 0 : 1;
  } catch (const flashjit::Error& error) {
    std::fprintf(stderr, "%s: %s\n", flashjit::to_string(error.code()).c_str(), error.what());
    return 1;
  }
}

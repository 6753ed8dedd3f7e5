// A CUDA graph: prepare() compiles and loads before the capture, which then records the launch alone.
#include "example.hpp"

namespace {

constexpr std::int64_t kBatch = 2, kHeads = 8, kLength = 512, kDim = 64;
constexpr std::int64_t kElements = kBatch * kHeads * kLength * kDim;
constexpr unsigned short kOne = 0x3f80, kTwo = 0x4000, kNan = 0x7fff;  // bf16

}  // namespace

int main() {
  return example::run([](const cuda_functions& cuda) {
    const auto tensor = [&](unsigned short bits) {
      return flashjit::TensorView::bhsd(make_filled(&cuda, bits, kElements), kBatch, kHeads, kLength, kDim);
    };
    const auto q = tensor(kOne), k = tensor(kOne), v = tensor(kOne), out = tensor(kNan);

    flashjit::Runtime runtime;
    const flashjit::AttentionSpec spec{
        .dtype = flashjit::DType::bf16, .head_dim = kDim, .mask = flashjit::causal()};
    runtime.prepare(spec, {kBatch, kHeads, kHeads, kLength, kLength});

    CUstream stream = nullptr;
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    cuda.create_stream(&stream, CU_STREAM_NON_BLOCKING);
    cuda.begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    runtime.forward(spec, {.q = q, .k = k, .v = v, .out = out}, stream);
    cuda.end_capture(stream, &graph);
    if (cuda.instantiate(&executable, graph, 0) != CUDA_SUCCESS) return false;

    // The same memory at every replay, with what is in it then. The average of equal values is that value.
    for (const unsigned short value : {kOne, kTwo}) {
      cuda.fill(reinterpret_cast<CUdeviceptr>(v.data), value, kElements);
      cuda.synchronize();
      if (cuda.launch_graph(executable, stream) != CUDA_SUCCESS) return false;
      cuda.wait_for_stream(stream);
      if (example::download<unsigned short>(cuda, out.data, 1)[0] != value) return false;
    }
    return true;
  });
}

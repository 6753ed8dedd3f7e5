// Block-sparse attention: every block of 128 queries attends to its neighbours and to the first block.
#include <cmath>

#include "example.hpp"

namespace {

constexpr std::int64_t kHeads = 2, kLength = 2048, kDim = 64, kElements = kHeads * kLength * kDim;
constexpr int kBlock = 128;

}  // namespace

int main() {
  return example::run([](const cuda_functions& cuda) {
    const std::int64_t blocks = kLength / kBlock;
    const flashjit::BlockPattern pattern = flashjit::local_global(blocks, blocks, 1, 1);
    std::printf("%.0f%% of the blocks\n", 100 * pattern.density());

    std::vector<float> values(kElements);  // every element of V's row j is j's block
    for (std::int64_t i = 0; i < kElements; ++i) {
      const std::int64_t block = i / kDim % kLength / kBlock;
      values[i] = static_cast<float>(block);
    }
    const auto tensor = [&](const std::vector<float>& from) {
      return flashjit::TensorView::bhsd(example::upload(cuda, from), 1, kHeads, kLength, kDim);
    };
    const auto zero = tensor(std::vector<float>(kElements)), v = tensor(values), out = tensor(values);

    flashjit::Runtime runtime;
    const flashjit::AttentionSpec spec{
        .dtype = flashjit::DType::fp32, .head_dim = kDim, .block_map = {kBlock, kBlock}};
    runtime.forward(
        spec,
        {.q = zero,
         .k = zero,
         .v = v,
         .out = out,
         .block_map = {example::upload(cuda, pattern.blocks), {1, 1, blocks, blocks}},
         .workspace = example::workspace(cuda, runtime, spec, {1, kHeads, kHeads, kLength, kLength})},
        nullptr);

    // With Q zero a row is the average of what it sees.
    const std::vector<float> got = example::download<float>(cuda, out.data, kElements);
    for (std::int64_t row = 0; row < blocks; ++row) {
      double sum = 0, seen = 0;
      for (std::int64_t column = 0; column < blocks; ++column) {
        seen += pattern.at(row, column);
        sum += static_cast<double>(column) * pattern.at(row, column);
      }
      if (std::fabs(got[row * kBlock * kDim] - sum / seen) > 1e-3) return false;
    }
    return true;
  });
}

// A product: its kernels were compiled when it was built and are in it, so that it runs where no NVRTC is.
#include <ship_a_pack_pack.hpp>  // made by flashjit_add_pack()

#include "../example.hpp"

namespace {

constexpr std::int64_t kBatch = 2, kHeads = 8, kLength = 512, kDim = 64;
constexpr unsigned short kOne = 0x3f80, kNan = 0x7fff;  // bf16

}  // namespace

int main() {
  for (const flashjit::EmbeddedFile& file : ship_a_pack_pack)
    std::printf("%.*s: %zu bytes\n", static_cast<int>(file.path.size()), file.path.data(), file.bytes.size());
  return example::run([](const cuda_functions& cuda) {
    const auto tensor = [&](unsigned short bits) {
      return flashjit::TensorView::bhsd(make_filled(&cuda, bits, kBatch * kHeads * kLength * kDim), kBatch,
                                        kHeads, kLength, kDim);
    };
    const auto q = tensor(kOne), k = tensor(kOne), v = tensor(kOne), out = tensor(kNan);
    flashjit::Runtime runtime(
        {.cache_dir = "", .embedded_packs = {ship_a_pack_pack}, .jit = flashjit::JitMode::off});
    const flashjit::AttentionSpec spec{
        .dtype = flashjit::DType::bf16, .head_dim = kDim, .mask = flashjit::causal()};
    runtime.forward(spec, {.q = q, .k = k, .v = v, .out = out}, nullptr);
    return example::download<unsigned short>(cuda, out.data, 1)[0] == kOne;
  });
}

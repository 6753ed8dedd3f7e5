// The loop of an inference engine: prompts of unlike lengths in one packed call, then 100 steps of decode by
// one CUDA graph, over a cache in pages. Each call is checked against the CPU reference, which takes the same
// arguments.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "example.hpp"

namespace {

constexpr std::int64_t kSequences = 4, kHeads = 8, kHeadsKv = 2, kDim = 64, kPageRows = 16, kPages = 48,
                       kColumns = 12, kSteps = 100;
constexpr std::int64_t kPrompts[kSequences] = {3, 70, 1, 41}, kLongest = 70, kPromptRows = 115;
constexpr unsigned short kNan = 0x7fff;  // rows of pages that are no keys may hold anything
using Bf16 = unsigned short;
using flashjit::ConstTensorView, flashjit::TensorView;

const flashjit::AttentionSpec kDecode{.dtype = flashjit::DType::bf16,
                                      .head_dim = kDim,
                                      .mask = flashjit::causal(),
                                      .kv = flashjit::KvLayout::paged(kPageRows)};
const flashjit::AttentionSpec kPrefill = [] {
  flashjit::AttentionSpec spec = kDecode;
  spec.varlen = true;
  return spec;
}();

/// What the calls read and write: in host memory for the reference, in device memory for the kernels.
struct Memory {
  Bf16 *q, *k, *v, *out, *k_cache, *v_cache;
  std::int32_t *lengths, *table, *offsets;
};

/// The arguments of append(), with `rows` new keys of each sequence, or packed ones.
flashjit::AppendArgs append_args(const Memory& m, bool packed) {
  const std::int64_t batch = packed ? 1 : kSequences, rows = packed ? kPromptRows : 1;
  flashjit::AppendArgs args{.k = ConstTensorView::bshd(m.k, batch, rows, kHeadsKv, kDim),
                            .v = ConstTensorView::bshd(m.v, batch, rows, kHeadsKv, kDim),
                            .k_cache = TensorView::bshd(m.k_cache, kPages, kPageRows, kHeadsKv, kDim),
                            .v_cache = TensorView::bshd(m.v_cache, kPages, kPageRows, kHeadsKv, kDim),
                            .kv_lengths = m.lengths,
                            .page_table = {m.table, kSequences, kColumns},
                            .q = ConstTensorView::bshd(m.q, batch, rows, kHeads, kDim),
                            .q_out = TensorView::bshd(m.q, batch, rows, kHeads, kDim),
                            .rope = {.theta = 10000.0f}};
  if (packed) args.cu_seqlens_q = m.offsets, args.batch_size = kSequences;
  return args;
}

/// Those of forward(), which sees what append() has stored.
flashjit::ForwardArgs forward_args(const Memory& m, bool packed, flashjit::Workspace workspace) {
  const flashjit::AppendArgs append = append_args(m, packed);
  flashjit::ForwardArgs args{.q = append.q_out,
                             .k = append.k_cache,
                             .v = append.v_cache,
                             .out = append.q_out,
                             .kv_lengths = m.lengths,
                             .workspace = workspace,
                             .page_table = append.page_table};
  args.out.data = m.out;
  if (packed) args.cu_seqlens_q = m.offsets, args.batch_size = kSequences, args.max_seqlen_q = kLongest;
  return args;
}

/// The host's side: what an engine decides between two steps, and what the results must be.
class Engine {
 public:
  Engine() : random_(1) {
    for (std::vector<Bf16>* cache : {&k_cache_, &v_cache_})
      cache->assign(kPages * kPageRows * kHeadsKv * kDim, kNan);
    for (std::int64_t page = 0; page < kPages; ++page) free_.push_back(static_cast<std::int32_t>(page));
    std::shuffle(free_.begin(), free_.end(), random_);
  }

  Memory memory() {
    return {q_.data(),       k_.data(),       v_.data(),     out_.data(),    k_cache_.data(),
            v_cache_.data(), lengths_.data(), table_.data(), offsets_.data()};
  }

  /// New keys of each sequence, with the pages for them and the rows of Q, K and V that a model would give.
  void grow(const std::vector<std::int64_t>& counts) {
    std::int64_t rows = 0;
    for (std::int64_t b = 0; b < kSequences; ++b) {
      for (std::int64_t n = 0; n < counts[b]; ++n, ++lengths_[b]) {
        if (lengths_[b] % kPageRows != 0) continue;
        table_[b * kColumns + lengths_[b] / kPageRows] = free_.back();
        free_.pop_back();
      }
      rows += counts[b];
      offsets_[b + 1] = static_cast<std::int32_t>(rows);
    }
    fill(q_, rows * kHeads * kDim), fill(k_, rows * kHeadsKv * kDim), fill(v_, rows * kHeadsKv * kDim);
    out_.assign(q_.size(), kNan);
  }

  void check(const flashjit::AttentionSpec& spec, const std::vector<Bf16>& got) {
    flashjit::reference_append(spec, append_args(memory(), spec.varlen));
    flashjit::reference_forward(spec, forward_args(memory(), spec.varlen, {}));
    for (std::size_t i = 0; i < out_.size(); ++i)
      if (!(std::abs(value_of(got[i]) - value_of(out_[i])) < 0.02f)) right = false;  // nor is NaN
  }

  bool right = true;
  const std::vector<Bf16>&q = q_, &k = k_, &v = v_;
  const std::vector<std::int32_t>&lengths = lengths_, &table = table_, &offsets = offsets_;

 private:
  static float value_of(Bf16 bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  void fill(std::vector<Bf16>& values, std::int64_t count) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    values.resize(static_cast<std::size_t>(count));
    for (Bf16& value : values) {
      const float x = uniform(random_);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &x, sizeof bits);
      value = static_cast<Bf16>(bits >> 16);
    }
  }

  std::mt19937 random_;
  std::vector<Bf16> q_, k_, v_, out_, k_cache_, v_cache_;
  std::vector<std::int32_t> free_, lengths_ = std::vector<std::int32_t>(kSequences),
                                   table_ = std::vector<std::int32_t>(kSequences * kColumns, -1),
                                   offsets_ = std::vector<std::int32_t>(kSequences + 1);
};

template <class T>
void copy(const cuda_functions& cuda, T* to, const std::vector<T>& from) {
  cuda.upload(reinterpret_cast<CUdeviceptr>(to), from.data(), from.size() * sizeof(T));
}

void send(const cuda_functions& cuda, const Memory& device, const Engine& engine) {
  copy(cuda, device.q, engine.q), copy(cuda, device.k, engine.k), copy(cuda, device.v, engine.v);
  copy(cuda, device.lengths, engine.lengths), copy(cuda, device.table, engine.table);
  copy(cuda, device.offsets, engine.offsets);
}

}  // namespace

int main() {
  return example::run([](const cuda_functions& cuda) {
    Engine engine;
    const auto make = [&](std::int64_t rows) {
      return example::upload(cuda, std::vector<Bf16>(static_cast<std::size_t>(rows * kDim), kNan));
    };
    const Memory device{make(kPromptRows * kHeads),
                        make(kPromptRows * kHeadsKv),
                        make(kPromptRows * kHeadsKv),
                        make(kPromptRows * kHeads),
                        make(kPages * kPageRows * kHeadsKv),
                        make(kPages * kPageRows * kHeadsKv),
                        example::upload(cuda, engine.lengths),
                        example::upload(cuda, engine.table),
                        example::upload(cuda, engine.offsets)};
    flashjit::Runtime runtime;
    // Launches and workspace depend on these bounds, not on the lengths.
    const flashjit::AttentionShape bounds{kSequences, kHeads, kHeadsKv, 1, kColumns * kPageRows};
    flashjit::AttentionShape prompt_bounds = bounds;
    prompt_bounds.seqlen_q = kLongest;

    engine.grow({std::begin(kPrompts), std::end(kPrompts)});
    send(cuda, device, engine);
    runtime.append(kPrefill, append_args(device, true), nullptr);
    runtime.forward(kPrefill,
                    forward_args(device, true, example::workspace(cuda, runtime, kPrefill, prompt_bounds)),
                    nullptr);
    engine.check(kPrefill, example::download<Bf16>(cuda, device.out, engine.q.size()));

    runtime.prepare(kDecode, bounds, flashjit::Pass::append);
    runtime.prepare(kDecode, bounds);
    const flashjit::Workspace workspace = example::workspace(cuda, runtime, kDecode, bounds);
    CUstream stream = nullptr;
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    cuda.create_stream(&stream, CU_STREAM_NON_BLOCKING);
    cuda.begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    runtime.append(kDecode, append_args(device, false), stream);
    runtime.forward(kDecode, forward_args(device, false, workspace), stream);
    cuda.end_capture(stream, &graph);
    if (cuda.instantiate(&executable, graph, 0) != CUDA_SUCCESS) return false;

    for (int step = 0; step < kSteps && engine.right; ++step) {
      engine.grow(std::vector<std::int64_t>(kSequences, 1));
      send(cuda, device, engine);
      if (cuda.launch_graph(executable, stream) != CUDA_SUCCESS) return false;
      cuda.wait_for_stream(stream);
      engine.check(kDecode, example::download<Bf16>(cuda, device.out, engine.q.size()));
    }
    return engine.right;
  });
}

// The loop of an inference engine: prompts of unlike lengths in one packed call, then 100 steps of decode by
// one CUDA graph, over a cache in pages. Each call is checked against the CPU reference, which takes the same
// arguments.
#include "paged_host.hpp"

namespace {

using namespace paged;
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

/// The arguments of forward(), which sees what append() has stored.
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

/// Whether results equal the reference's.
bool is_right(Engine& engine, const flashjit::AttentionSpec& spec, const std::vector<Bf16>& got) {
  flashjit::reference_append(spec, append_args(engine.memory(), spec.varlen));
  flashjit::reference_forward(spec, forward_args(engine.memory(), spec.varlen, {}));
  return engine.has(got);
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
    if (!is_right(engine, kPrefill, example::download<Bf16>(cuda, device.out, engine.q.size()))) return false;

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

    for (int step = 0; step < kSteps; ++step) {
      engine.grow(std::vector<std::int64_t>(kSequences, 1));
      send(cuda, device, engine);
      if (cuda.launch_graph(executable, stream) != CUDA_SUCCESS) return false;
      cuda.wait_for_stream(stream);
      if (!is_right(engine, kDecode, example::download<Bf16>(cuda, device.out, engine.q.size())))
        return false;
    }
    return true;
  });
}

// A small inference engine, for Llama and Qwen3 as Hugging Face saves them (config.json, model.safetensors).
// Sequences join and leave a batch; each step computes the chunks of new prompts beside the next tokens of
// the others, in one packed call a layer over a cache in pages, and picks tokens greedily.
//
//   small_llama FOLDER NEW_TOKENS PROMPT...     a prompt is numbers of tokens: 5,17,3
//
// On a GPU append() and forward() of each layer are a CUDA graph while all sequences decode; without one the
// CPU reference takes the same arguments. Linear layers, norms and SwiGLU are plain loops on the host, in
// fp32, in memory that the GPU sees, too: this page is about the calls of attention. A fast engine has the
// whole step on the GPU, in one graph.
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <numeric>
#include <sstream>
#include <string>

#include "example.hpp"
#include "small_llama_model.hpp"

namespace {

/// Bounds of the batch: sequences and rows of a step, rows of a page, pages of a sequence and of the cache.
constexpr std::int64_t kSequences = 4, kRows = 24, kPageRows = 8, kColumns = 16, kPages = 40;
using flashjit::ConstTensorView, flashjit::TensorView;

/// append() and forward() of all layers. Its launches depend on the bounds alone, so graphs stay right.
class Attention {
 public:
  Attention(const Model& model, const cuda_functions* gpu) : model_(model), gpu_(gpu) {
    spec_ = {.dtype = flashjit::DType::fp32,
             .head_dim = static_cast<int>(model.dim),
             .mask = flashjit::causal(),
             .kv = flashjit::KvLayout::paged(kPageRows),
             .varlen = true};
    const std::int64_t columns = model.heads * model.dim, columns_kv = model.heads_kv * model.dim;
    for (float** rows : {&q, &out}) *rows = zeros<float>(kRows * columns);
    for (float** rows : {&k, &v}) *rows = zeros<float>(kRows * columns_kv);
    lengths = zeros<std::int32_t>(kSequences), offsets = zeros<std::int32_t>(kSequences + 1);
    table = zeros<std::int32_t>(kSequences * kColumns);
    for (std::int64_t i = 0; i < model.layers; ++i) {
      const std::string at = "model.layers." + std::to_string(i) + ".self_attn.";
      layers_.push_back({.k_cache = zeros<float>(kPages * kPageRows * columns_kv),
                         .v_cache = zeros<float>(kPages * kPageRows * columns_kv),
                         .q_norm = norm_weight(at + "q_norm"),
                         .k_norm = norm_weight(at + "k_norm")});
    }
    if (gpu) start();
  }

  /// `out` of the rows of q, k and v.
  void run(std::int64_t layer, bool all_decode) {
    if (!gpu_) {
      flashjit::reference_append(spec_, append_args(layer, all_decode));
      flashjit::reference_forward(spec_, forward_args(layer, all_decode));
      return;
    }
    if (!all_decode)
      launch(layer, false);
    else if (gpu_->launch_graph(graphs_[layer], stream_) != CUDA_SUCCESS)
      fail("the graph of a layer did not start");
    if (gpu_->wait_for_stream(stream_) != CUDA_SUCCESS) fail("a layer's launch failed");
  }

  float *q, *k, *v, *out;                   // packed rows of all sequences, [rows, heads, dim]
  std::int32_t *lengths, *offsets, *table;  // of a sequence: keys, its first row, its pages

 private:
  struct Layer {
    float *k_cache, *v_cache;
    const float *q_norm, *k_norm;  // of Qwen3
  };

  /// Memory that the host sees, and the GPU where there is one. Not freed: the example ends.
  template <class T>
  T* zeros(std::size_t count) const {
    if (!gpu_) return new T[count]();
    CUdeviceptr address = 0;
    if (gpu_->alloc_managed(&address, count * sizeof(T), CU_MEM_ATTACH_GLOBAL) != CUDA_SUCCESS)
      fail("no device memory");
    return std::fill_n(reinterpret_cast<T*>(address), count, T()) - count;
  }

  const float* norm_weight(const std::string& name) const {
    if (!model_.tensors.contains(name + ".weight")) return nullptr;
    return std::ranges::copy(model_.weight(name, model_.dim), zeros<float>(model_.dim)).out - model_.dim;
  }

  flashjit::AppendArgs append_args(std::int64_t layer, bool all_decode) const {
    const std::int64_t rows = all_decode ? kSequences : kRows, dim = model_.dim, heads_kv = model_.heads_kv;
    const Layer& at = layers_[layer];
    return {.k = ConstTensorView::bshd(k, 1, rows, heads_kv, dim),
            .v = ConstTensorView::bshd(v, 1, rows, heads_kv, dim),
            .k_cache = TensorView::bshd(at.k_cache, kPages, kPageRows, heads_kv, dim),
            .v_cache = TensorView::bshd(at.v_cache, kPages, kPageRows, heads_kv, dim),
            .kv_lengths = lengths,
            .page_table = {table, kSequences, kColumns},
            .q = ConstTensorView::bshd(q, 1, rows, model_.heads, dim),
            .q_out = TensorView::bshd(q, 1, rows, model_.heads, dim),
            .rope = {.theta = model_.theta},
            .cu_seqlens_q = offsets,
            .batch_size = kSequences,
            .k_norm = {.weight = at.k_norm, .eps = model_.eps},
            .q_norm = {.weight = at.q_norm, .eps = model_.eps}};
  }

  flashjit::ForwardArgs forward_args(std::int64_t layer, bool all_decode) const {
    const flashjit::AppendArgs append = append_args(layer, all_decode);
    return {.q = append.q_out,
            .k = append.k_cache,
            .v = append.v_cache,
            .out = TensorView::bshd(out, 1, append.q.size[2], model_.heads, model_.dim),
            .kv_lengths = lengths,
            .workspace = workspace_,
            .cu_seqlens_q = offsets,
            .batch_size = kSequences,
            .max_seqlen_q = all_decode ? 1 : kRows,
            .page_table = append.page_table};
  }

  void launch(std::int64_t layer, bool all_decode) {
    runtime_.append(spec_, append_args(layer, all_decode), stream_);
    runtime_.forward(spec_, forward_args(layer, all_decode), stream_);
  }

  /// Compiles what steps need, and captures the graphs. No request waits for either.
  void start() {
    const flashjit::AttentionShape decode{kSequences, model_.heads, model_.heads_kv, 1, kColumns * kPageRows};
    flashjit::ShapeRange steps{.first = decode, .last = decode, .step = {}};
    steps.last.seqlen_q = kRows;
    runtime_.prepare_range(spec_, steps, flashjit::Pass::append);
    workspace_.bytes = runtime_.prepare_range(spec_, steps).workspace_bytes;
    workspace_.data = zeros<char>(workspace_.bytes + 1);
    if (gpu_->create_stream(&stream_, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) fail("no stream");
    graphs_.resize(layers_.size());
    for (std::int64_t layer = 0; layer < model_.layers; ++layer) {
      CUgraph graph = nullptr;
      gpu_->begin_capture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
      launch(layer, true);
      gpu_->end_capture(stream_, &graph);
      if (gpu_->instantiate(&graphs_[layer], graph, 0) != CUDA_SUCCESS) fail("no graph of a layer");
    }
  }

  const Model& model_;
  const cuda_functions* gpu_;
  flashjit::AttentionSpec spec_;
  flashjit::Runtime runtime_;
  flashjit::Workspace workspace_ = {};
  std::vector<Layer> layers_;
  CUstream stream_ = nullptr;
  std::vector<CUgraphExec> graphs_;
};

/// What the model says behind each of the rows in `last`: [last, vocabulary].
Floats logits(const Model& model, Attention& attention, const std::vector<std::int64_t>& tokens,
              const std::vector<std::int64_t>& last, bool all_decode) {
  const std::int64_t hidden = model.hidden, columns = model.heads * model.dim;
  const auto row_of = [&](const Floats& from, std::int64_t row, Floats& to) {
    to.insert(to.end(), &from[row * hidden], &from[row * hidden] + hidden);
  };
  Floats x, rows;
  for (const std::int64_t token : tokens)
    row_of(model.weight("model.embed_tokens", model.vocabulary * hidden), token, x);
  const auto add = [&](const Floats& y) { std::ranges::transform(x, y, x.begin(), std::plus<>()); };
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    const Floats h = model.norm(x, at + "input_layernorm");
    const auto project = [&](const char* name, std::int64_t heads, float* to) {
      std::ranges::copy(model.linear(h, hidden, at + "self_attn." + name, heads * model.dim), to);
    };
    project("q_proj", model.heads, attention.q);
    project("k_proj", model.heads_kv, attention.k);
    project("v_proj", model.heads_kv, attention.v);
    attention.run(layer, all_decode);
    const Floats o(attention.out, attention.out + tokens.size() * columns);
    add(model.linear(o, columns, at + "self_attn.o_proj", hidden));

    const Floats m = model.norm(x, at + "post_attention_layernorm");
    const std::int64_t inner = std::ssize(model.tensors.at(at + "mlp.gate_proj.weight")) / hidden;
    Floats a = model.linear(m, hidden, at + "mlp.gate_proj", inner);
    const Floats up = model.linear(m, hidden, at + "mlp.up_proj", inner);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] *= up[i] / (1 + std::exp(-a[i]));
    add(model.linear(a, inner, at + "mlp.down_proj", hidden));
  }
  for (const std::int64_t row : last) row_of(x, row, rows);
  const bool tied = !model.tensors.contains("lm_head.weight");
  return model.linear(model.norm(rows, "model.norm"), hidden, tied ? "model.embed_tokens" : "lm_head",
                      model.vocabulary);
}

struct Sequence {
  std::vector<std::int64_t> tokens;  // the prompt, then what the model said
  std::int64_t wanted = 0;           // tokens at the end
  std::int64_t cached = 0;           // rows of K and V that the cache has
  std::vector<std::int32_t> pages = {};

  bool is_cached() const { return cached == std::ssize(tokens); }
};

/// Steps until every sequence has its tokens.
void serve(const Model& model, Attention& attention, std::vector<Sequence>& sequences) {
  std::vector<std::int32_t> free_pages(kPages);
  std::iota(free_pages.rbegin(), free_pages.rend(), 0);
  std::deque<Sequence*> waiting;
  for (Sequence& sequence : sequences) waiting.push_back(&sequence);
  std::array<Sequence*, kSequences> active{};
  int steps = 0, mixed = 0, decodes = 0;
  for (;; ++steps) {
    // A sequence joins where a place is free, and pages for all that it will have.
    for (Sequence*& place : active) {
      if (place || waiting.empty()) continue;
      const std::int64_t pages = (waiting.front()->wanted + kPageRows - 1) / kPageRows;
      if (pages > std::ssize(free_pages)) continue;
      place = waiting.front(), waiting.pop_front();
      place->pages.assign(free_pages.end() - pages, free_pages.end());
      free_pages.resize(free_pages.size() - pages);
    }
    const std::int64_t count = kSequences - std::ranges::count(active, nullptr);
    if (count == 0) break;

    std::vector<std::int64_t> tokens, last;
    std::int64_t spare = kRows - count, longest = 0, shortest = kRows;  // each has a row, prompts the rest
    for (std::int64_t b = 0; b < kSequences; ++b) {
      if (Sequence* sequence = active[b]) {
        const std::int64_t rows = std::min(std::ssize(sequence->tokens) - sequence->cached, spare + 1);
        spare -= rows - 1, longest = std::max(longest, rows), shortest = std::min(shortest, rows);
        const auto next = sequence->tokens.begin() + sequence->cached;
        tokens.insert(tokens.end(), next, next + rows);
        sequence->cached += rows;
        std::ranges::copy(sequence->pages, &attention.table[b * kColumns]);
        if (sequence->is_cached()) last.push_back(std::ssize(tokens) - 1);
      }
      attention.lengths[b] = active[b] ? static_cast<std::int32_t>(active[b]->cached) : 0;
      attention.offsets[b + 1] = static_cast<std::int32_t>(tokens.size());
    }
    mixed += longest > 1 && shortest == 1, decodes += longest == 1;

    const Floats scores = logits(model, attention, tokens, last, longest == 1);
    auto row = scores.begin();
    for (Sequence*& sequence : active) {
      if (!sequence || !sequence->is_cached()) continue;
      sequence->tokens.push_back(std::max_element(row, row + model.vocabulary) - row);
      row += model.vocabulary;
      if (std::ssize(sequence->tokens) < sequence->wanted) continue;
      free_pages.insert(free_pages.end(), sequence->pages.begin(), sequence->pages.end());
      sequence = nullptr;
    }
  }
  std::printf("%d steps, %d with prompts beside decoding, %d of decoding alone\n", steps, mixed, decodes);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) fail("small_llama FOLDER NEW_TOKENS PROMPT..., where a prompt is numbers of tokens: 5,17,3");
  const Model model(argv[1]);
  const std::int64_t new_tokens = std::stoll(argv[2]);
  std::vector<Sequence> sequences;
  for (int i = 3; i < argc; ++i) {
    std::istringstream prompt(argv[i]);
    Sequence& sequence = sequences.emplace_back();
    for (std::string token; std::getline(prompt, token, ',');) sequence.tokens.push_back(std::stoll(token));
    for (const std::int64_t token : sequence.tokens)
      if (token < 0 || token >= model.vocabulary) fail("the model has no token " + std::to_string(token));
    sequence.wanted = std::ssize(sequence.tokens) + new_tokens;
    if (sequence.tokens.empty() || new_tokens < 1 || sequence.wanted > kColumns * kPageRows)
      fail("a prompt and its answer have 2 to " + std::to_string(kColumns * kPageRows) + " tokens");
  }
  cuda_functions cuda;
  const bool gpu = open_cuda(&cuda);
  std::puts(gpu ? "on the GPU" : "on the CPU, by the reference");
  Attention attention(model, gpu ? &cuda : nullptr);
  serve(model, attention, sequences);
  for (const Sequence& sequence : sequences) {
    for (const std::int64_t token : sequence.tokens) std::printf("%lld ", static_cast<long long>(token));
    std::puts("");
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

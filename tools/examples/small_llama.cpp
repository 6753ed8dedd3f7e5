// A small inference engine, for Llama and Qwen3 as Hugging Face saves them (config.json, model.safetensors).
// Sequences join and leave a batch; each step computes the chunks of new prompts beside the next tokens of
// the others, in one packed call a layer over a cache in pages, and picks tokens greedily.
//
//   small_llama FOLDER NEW_TOKENS PROMPT...     a prompt is numbers of tokens: 5,17,3
//
// On a GPU append() and forward() of each layer are a CUDA graph while all sequences decode; without one the
// CPU reference takes the same arguments. Linear layers, norms and SwiGLU are plain loops on the host, in
// fp32, and rows of Q, K, V and O are copied around each attention: this page is about the calls of
// attention. A fast engine has the whole step on the GPU, in one graph.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>

#include "example.hpp"

namespace {

/// Bounds of the batch: sequences and rows of a step, rows of a page, pages of a sequence and of the cache.
constexpr std::int64_t kSequences = 4, kRows = 24, kPageRows = 8, kColumns = 16, kPages = 40;
using Floats = std::vector<float>;
using flashjit::ConstTensorView, flashjit::TensorView;

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

nlohmann::json read_config(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) fail("cannot read " + path.string());
  return nlohmann::json::parse(file);
}

/// The tensors of a file by their names, fp32 and bf16, as fp32.
std::map<std::string, Floats> read_safetensors(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t header_bytes = 0;  // little-endian, as the host's
  if (!file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes))
    fail("cannot read " + path.string());
  const std::uint64_t file_bytes = std::filesystem::file_size(path), data_begin = 8 + header_bytes;
  if (header_bytes > file_bytes - 8) fail(path.string() + " is cut off in its header");
  std::string header(header_bytes, ' ');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  std::map<std::string, Floats> tensors;
  const nlohmann::json entries = nlohmann::json::parse(header);
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    const bool bf16 = entry.at("dtype") == "BF16";
    if (!bf16 && entry.at("dtype") != "F32") fail(name + " must be F32 or BF16");
    const auto begin = entry.at("data_offsets").at(0).get<std::uint64_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::uint64_t>();
    if (begin > end || end > file_bytes - data_begin) fail(name + " is outside of " + path.string());
    std::string bytes(end - begin, ' ');
    file.seekg(static_cast<std::streamoff>(data_begin + begin));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const std::size_t width = bf16 ? 2 : 4;
    Floats values(bytes.size() / width);
    for (std::size_t i = 0; i < values.size(); ++i)  // a bf16 is the upper half of an fp32
      std::memcpy(reinterpret_cast<char*>(&values[i]) + 4 - width, bytes.data() + i * width, width);
    tensors[name] = std::move(values);
  }
  return tensors;
}

struct Model {
  std::int64_t layers, hidden, heads, heads_kv, dim, vocabulary;
  float eps, theta;
  std::map<std::string, Floats> tensors;

  explicit Model(const std::filesystem::path& folder) {
    const nlohmann::json config = read_config(folder / "config.json");
    const std::string type = config.at("model_type");
    if (type != "llama" && type != "qwen3") fail("the model is " + type + ", not llama or qwen3");
    if (config.value("hidden_act", "silu") != "silu" || config.value("attention_bias", false) ||
        config.value("mlp_bias", false) || config.value("use_sliding_window", false))
      fail("no biases, windows, and activations other than silu here");
    // Where the angle of the rotation is, and under which name its type, depends on the version that wrote.
    nlohmann::json rope = config.value("rope_parameters", nlohmann::json());
    if (rope.is_null()) rope = config.value("rope_scaling", nlohmann::json());
    if (rope.is_null()) rope = nlohmann::json::object();
    if (rope.value("rope_type", rope.value("type", "default")) != "default")
      fail("rotations cannot be scaled here");
    theta = rope.value("rope_theta", config.value("rope_theta", 10000.0f));
    eps = config.at("rms_norm_eps");
    layers = config.at("num_hidden_layers"), hidden = config.at("hidden_size");
    heads = config.at("num_attention_heads"), heads_kv = config.value("num_key_value_heads", heads);
    const nlohmann::json head_dim = config.value("head_dim", nlohmann::json());
    dim = head_dim.is_null() ? hidden / heads : head_dim.get<std::int64_t>();
    vocabulary = config.at("vocab_size");
    tensors = read_safetensors(folder / "model.safetensors");
  }

  bool has(const std::string& name) const { return tensors.contains(name); }

  /// A tensor of so many elements.
  const Floats& weight(const std::string& name, std::int64_t elements) const {
    const auto found = tensors.find(name);
    if (found == tensors.end()) fail("the model has no " + name);
    if (std::ssize(found->second) != elements) fail(name + " does not have the sizes of config.json");
    return found->second;
  }

  /// x [rows, in] times the transpose of a weight [out, in].
  Floats linear(const Floats& x, std::int64_t in, const std::string& name, std::int64_t out) const {
    const Floats& w = weight(name, out * in);
    Floats y(x.size() / in * out);
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] = std::inner_product(&x[i / out * in], &x[i / out * in] + in, &w[i % out * in], 0.0f);
    return y;
  }

  Floats norm(const Floats& x, const std::string& name) const {
    const Floats& w = weight(name, hidden);
    Floats y(x.size());
    for (std::size_t row = 0; row < x.size(); row += hidden) {
      const float squares = std::inner_product(&x[row], &x[row] + hidden, &x[row], 0.0f);
      const float scale = 1 / std::sqrt(squares / static_cast<float>(hidden) + eps);
      for (std::int64_t i = 0; i < hidden; ++i) y[row + i] = x[row + i] * scale * w[i];
    }
    return y;
  }
};

std::string layer_name(std::int64_t layer, const char* name) {
  return "model.layers." + std::to_string(layer) + "." + name + ".weight";
}

/// Values on the host and, where there is a GPU, on it too: the attention's.
template <class T>
struct Mirrored {
  std::vector<T> host;
  T* device = nullptr;

  Mirrored(const cuda_functions* cuda, std::size_t count, T value = {}) : host(count, value) {
    if (cuda) device = example::upload(*cuda, host);
  }
  T* data() { return device ? device : host.data(); }
  void send(const cuda_functions* cuda) {
    if (cuda) cuda->upload(reinterpret_cast<CUdeviceptr>(device), host.data(), host.size() * sizeof(T));
  }
};

using MirroredFloats = Mirrored<float>;

/// append() and forward() of all layers. Its launches depend on the bounds alone, so graphs stay right.
class Attention {
 public:
  Attention(const Model& model, const cuda_functions* gpu)
      : q(gpu, kRows * model.heads * model.dim),
        k(gpu, kRows * model.heads_kv * model.dim),
        v(gpu, k.host.size()),
        lengths(gpu, kSequences),
        offsets(gpu, kSequences + 1),
        table(gpu, kSequences * kColumns),
        model_(model),
        gpu_(gpu),
        out_(gpu, q.host.size()),
        spec_{.dtype = flashjit::DType::fp32,
              .head_dim = static_cast<int>(model.dim),
              .mask = flashjit::causal(),
              .kv = flashjit::KvLayout::paged(kPageRows),
              .varlen = true} {
    for (std::int64_t layer = 0; layer < model.layers; ++layer)
      layers_.push_back({MirroredFloats(gpu, kPages * kPageRows * model.heads_kv * model.dim),
                         MirroredFloats(gpu, kPages * kPageRows * model.heads_kv * model.dim),
                         norm_weight(layer_name(layer, "self_attn.q_norm")),
                         norm_weight(layer_name(layer, "self_attn.k_norm"))});
    if (gpu) start();
  }

  /// What changed since the last step: lengths, offsets, the table.
  void begin_step() { lengths.send(gpu_), offsets.send(gpu_), table.send(gpu_); }

  /// O of the rows of Q, K and V that are in q.host, k.host and v.host.
  const Floats& run(std::int64_t layer, bool all_decode) {
    if (!gpu_) {
      flashjit::reference_append(spec_, append_args(layer, all_decode));
      flashjit::reference_forward(spec_, forward_args(layer, all_decode));
      return out_.host;
    }
    q.send(gpu_), k.send(gpu_), v.send(gpu_);
    if (!all_decode) launch(layer, false);
    if (all_decode && gpu_->launch_graph(graphs_[layer], stream_) != CUDA_SUCCESS)
      fail("the graph of a layer did not start");
    out_.host = example::download<float>(*gpu_, out_.device, out_.host.size());
    return out_.host;
  }

  MirroredFloats q, k, v;                          // packed rows of all sequences
  Mirrored<std::int32_t> lengths, offsets, table;  // of a sequence: keys, its first row, its pages

 private:
  struct Layer {
    MirroredFloats k_cache, v_cache;
    std::optional<MirroredFloats> q_norm, k_norm;
  };

  std::optional<MirroredFloats> norm_weight(const std::string& name) const {
    if (!model_.has(name)) return {};
    std::optional<MirroredFloats> weight(std::in_place, gpu_, model_.dim);
    weight->host = model_.weight(name, model_.dim);
    weight->send(gpu_);
    return weight;
  }

  flashjit::AppendArgs append_args(std::int64_t layer, bool all_decode) {
    const std::int64_t rows = all_decode ? kSequences : kRows, dim = model_.dim;
    Layer& at = layers_[layer];
    const auto norm = [&](std::optional<MirroredFloats>& weight) {
      return flashjit::NormView{.weight = weight ? weight->data() : nullptr, .eps = model_.eps};
    };
    return {.k = ConstTensorView::bshd(k.data(), 1, rows, model_.heads_kv, dim),
            .v = ConstTensorView::bshd(v.data(), 1, rows, model_.heads_kv, dim),
            .k_cache = TensorView::bshd(at.k_cache.data(), kPages, kPageRows, model_.heads_kv, dim),
            .v_cache = TensorView::bshd(at.v_cache.data(), kPages, kPageRows, model_.heads_kv, dim),
            .kv_lengths = lengths.data(),
            .page_table = {table.data(), kSequences, kColumns},
            .q = ConstTensorView::bshd(q.data(), 1, rows, model_.heads, dim),
            .q_out = TensorView::bshd(q.data(), 1, rows, model_.heads, dim),
            .rope = {.theta = model_.theta},
            .cu_seqlens_q = offsets.data(),
            .batch_size = kSequences,
            .k_norm = norm(at.k_norm),
            .q_norm = norm(at.q_norm)};
  }

  flashjit::ForwardArgs forward_args(std::int64_t layer, bool all_decode) {
    const flashjit::AppendArgs append = append_args(layer, all_decode);
    flashjit::ForwardArgs args{.q = append.q_out,
                               .k = append.k_cache,
                               .v = append.v_cache,
                               .out = append.q_out,
                               .kv_lengths = append.kv_lengths,
                               .workspace = workspace_,
                               .cu_seqlens_q = append.cu_seqlens_q,
                               .batch_size = kSequences,
                               .max_seqlen_q = all_decode ? 1 : kRows,
                               .page_table = append.page_table};
    args.out.data = out_.data();
    return args;
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
    workspace_.data = example::upload(*gpu_, std::vector<char>(workspace_.bytes + 1));
    // A stream that waits for the copies, which are on the default stream.
    if (gpu_->create_stream(&stream_, CU_STREAM_DEFAULT) != CUDA_SUCCESS) fail("no stream");
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
  MirroredFloats out_;
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
  const std::int64_t columns_kv = model.heads_kv * model.dim;
  const Floats& embedding = model.weight("model.embed_tokens.weight", model.vocabulary * hidden);
  Floats x;
  for (const std::int64_t token : tokens)
    x.insert(x.end(), &embedding[token * hidden], &embedding[token * hidden] + hidden);
  const auto add = [&](const Floats& y) {
    std::transform(x.begin(), x.end(), y.begin(), x.begin(), std::plus<>());
  };
  attention.begin_step();
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const Floats h = model.norm(x, layer_name(layer, "input_layernorm"));
    const auto project = [&](const char* name, std::int64_t out, Floats& rows) {
      const Floats y = model.linear(h, hidden, layer_name(layer, name), out);
      std::copy(y.begin(), y.end(), rows.begin());
    };
    project("self_attn.q_proj", columns, attention.q.host);
    project("self_attn.k_proj", columns_kv, attention.k.host);
    project("self_attn.v_proj", columns_kv, attention.v.host);
    Floats o = attention.run(layer, all_decode);
    o.resize(tokens.size() * columns);
    add(model.linear(o, columns, layer_name(layer, "self_attn.o_proj"), hidden));

    const Floats m = model.norm(x, layer_name(layer, "post_attention_layernorm"));
    const std::string gate = layer_name(layer, "mlp.gate_proj");
    const std::int64_t inner = std::ssize(model.tensors.at(gate)) / hidden;
    Floats a = model.linear(m, hidden, gate, inner);
    const Floats up = model.linear(m, hidden, layer_name(layer, "mlp.up_proj"), inner);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] *= up[i] / (1 + std::exp(-a[i]));
    add(model.linear(a, inner, layer_name(layer, "mlp.down_proj"), hidden));
  }
  Floats rows;
  for (const std::int64_t row : last) rows.insert(rows.end(), &x[row * hidden], &x[row * hidden] + hidden);
  const char* head = model.has("lm_head.weight") ? "lm_head.weight" : "model.embed_tokens.weight";  // tied
  return model.linear(model.norm(rows, "model.norm.weight"), hidden, head, model.vocabulary);
}

struct Sequence {
  std::vector<std::int64_t> tokens;  // the prompt, then what the model said
  std::int64_t wanted = 0;           // tokens at the end
  std::int64_t cached = 0;           // rows of K and V that the cache has
  std::vector<std::int32_t> pages = {};
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
    std::int64_t count = 0;
    for (Sequence*& place : active) {
      if (!place && !waiting.empty()) {
        const std::int64_t pages = (waiting.front()->wanted + kPageRows - 1) / kPageRows;
        if (pages <= std::ssize(free_pages)) {
          place = waiting.front(), waiting.pop_front();
          place->pages.assign(free_pages.end() - pages, free_pages.end());
          free_pages.resize(free_pages.size() - pages);
        }
      }
      count += place != nullptr;
    }
    if (count == 0) break;

    std::vector<std::int64_t> tokens, last;
    std::int64_t spare = kRows - count, longest = 0,
                 shortest = kRows;  // each has a row, prompts what is left
    for (std::int64_t b = 0; b < kSequences; ++b) {
      Sequence* sequence = active[b];
      std::int64_t rows = 0;
      if (sequence) {
        rows = std::min(std::ssize(sequence->tokens) - sequence->cached, spare + 1);
        spare -= rows - 1, longest = std::max(longest, rows), shortest = std::min(shortest, rows);
        const auto next = sequence->tokens.begin() + sequence->cached;
        tokens.insert(tokens.end(), next, next + rows);
        sequence->cached += rows;
        std::copy(sequence->pages.begin(), sequence->pages.end(), &attention.table.host[b * kColumns]);
        if (sequence->cached == std::ssize(sequence->tokens)) last.push_back(std::ssize(tokens) - 1);
      }
      attention.lengths.host[b] = sequence ? static_cast<std::int32_t>(sequence->cached) : 0;
      attention.offsets.host[b + 1] = static_cast<std::int32_t>(tokens.size());
    }
    mixed += longest > 1 && shortest == 1, decodes += longest == 1;

    const Floats scores = logits(model, attention, tokens, last, longest == 1);
    auto row = scores.begin();
    for (Sequence*& sequence : active) {
      if (!sequence || sequence->cached != std::ssize(sequence->tokens)) continue;
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

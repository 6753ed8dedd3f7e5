// The model of small_llama.cpp: its file, its sizes, and its linear layers and norms, as plain loops on the
// host.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using Floats = std::vector<float>;

[[noreturn]] inline void fail(const std::string& why) { throw std::runtime_error(why); }

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The tensors of a file by their names, fp32 and bf16, as fp32. Both sides are little-endian.
inline std::map<std::string, Floats> read_safetensors(const std::filesystem::path& path) {
  const std::string file = read_file(path);
  std::uint64_t header = 0;
  if (file.size() < sizeof header) fail("cannot read " + path.string());
  std::memcpy(&header, file.data(), sizeof header);
  if (header > file.size() - sizeof header) fail(path.string() + " is cut off in its header");
  const std::string_view data = std::string_view(file).substr(sizeof header + header);
  std::map<std::string, Floats> tensors;
  const auto entries = nlohmann::json::parse(std::string_view(file).substr(sizeof header, header));
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    const bool bf16 = entry.at("dtype") == "BF16";
    if (!bf16 && entry.at("dtype") != "F32") fail(name + " must be F32 or BF16");
    const std::uint64_t begin = entry.at("data_offsets").at(0), end = entry.at("data_offsets").at(1);
    if (begin > end || end > data.size()) fail(name + " is outside of " + path.string());
    const std::size_t width = bf16 ? 2 : 4;
    Floats& values = tensors[name] = Floats((end - begin) / width);
    for (std::size_t i = 0; i < values.size(); ++i)  // a bf16 is the upper half of an fp32
      std::memcpy(reinterpret_cast<char*>(&values[i]) + 4 - width, &data[begin + i * width], width);
  }
  return tensors;
}

struct Model {
  std::int64_t layers, hidden, heads, heads_kv, dim, vocabulary;
  float eps, theta;
  std::map<std::string, Floats> tensors;

  explicit Model(const std::filesystem::path& folder) {
    const auto config = nlohmann::json::parse(read_file(folder / "config.json"));
    const std::string type = config.at("model_type");
    if (type != "llama" && type != "qwen3") fail("the model is " + type + ", not llama or qwen3");
    if (config.value("hidden_act", "silu") != "silu" || config.value("attention_bias", false) ||
        config.value("mlp_bias", false) || config.value("use_sliding_window", false))
      fail("no biases, windows, and activations other than silu here");
    // Where the angle of the rotation is, and under which name its type, depends on the version that wrote.
    auto rope = nlohmann::json::object();
    for (const char* name : {"rope_scaling", "rope_parameters"})
      if (config.contains(name) && !config[name].is_null()) rope = config[name];
    if (rope.value("rope_type", rope.value("type", "default")) != "default")
      fail("rotations cannot be scaled here");
    theta = rope.value("rope_theta", config.value("rope_theta", 10000.0f));
    eps = config.at("rms_norm_eps");
    layers = config.at("num_hidden_layers"), hidden = config.at("hidden_size");
    heads = config.at("num_attention_heads"), heads_kv = config.value("num_key_value_heads", heads);
    const auto head_dim = config.value("head_dim", nlohmann::json());
    dim = head_dim.is_null() ? hidden / heads : head_dim.get<std::int64_t>();
    vocabulary = config.at("vocab_size");
    tensors = read_safetensors(folder / "model.safetensors");
  }

  /// A tensor of so many elements.
  const Floats& weight(const std::string& name, std::int64_t elements) const {
    const auto found = tensors.find(name + ".weight");
    if (found == tensors.end()) fail("the model has no " + name + ".weight");
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
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float* row = &x[i / hidden * hidden];
      const float squares = std::inner_product(row, row + hidden, row, 0.0f);
      y[i] = x[i] / std::sqrt(squares / static_cast<float>(hidden) + eps) * w[i % hidden];
    }
    return y;
  }
};

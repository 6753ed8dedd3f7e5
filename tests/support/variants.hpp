// The attentions that have a name, as programs with values for what they declare.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashjit/spec.hpp"
#include "reference/inputs.hpp"

namespace flashjit::test {

using Captures = std::vector<reference::Captured>;

struct Variant {
  std::string name, score, mask;
  /// Values for the names that the programs declare, at a shape.
  std::function<Captures(const AttentionShape&)> captures = [](const AttentionShape&) { return Captures{}; };

  AttentionSpec in(AttentionSpec spec) const {
    if (!score.empty()) spec.score = ScoreProgram(score);
    if (!mask.empty()) spec.mask = MaskProgram(mask);
    return spec;
  }
};

/// A tensor whose element i, counted in C order, is value(i) rounded to the type.
inline reference::Captured tensor(std::string name, std::vector<std::int64_t> size, ElementType type,
                                  const std::function<double(std::int64_t)>& value) {
  std::int64_t count = 1;
  for (std::int64_t& one : size) count *= one = std::max<std::int64_t>(one, 1);
  reference::Captured made{std::move(name), std::move(size), std::vector<double>(count)};
  for (std::int64_t i = 0; i < count; ++i) made.values[i] = reference::round_to(type, value(i));
  return made;
}

inline reference::Captured scalar(std::string name, double value) { return {std::move(name), {}, {value}}; }

/// Something between -1 and 1 that repeats at no distance that matters.
inline double wave(std::int64_t i) { return std::sin(0.7 * static_cast<double>(i * i % 1009) + 0.1); }

/// As many as programs may read, of all ranks.
inline Variant sixteen_tensors() {
  Variant made{"sixteen_tensors", "", ""};
  std::string declared, sum = "score";
  for (int i = 0; i < 16; ++i) {
    constexpr const char* kIndices[] = {"b",           "b, h",           "b, h, q",
                                        "b, h, q, kv", "b, h, q, kv, 0", "b, h, q, kv, 0, 1"};
    declared += "t" + std::to_string(i) + ": fp32 " + std::to_string(i % 6 + 1) + "d; ";
    sum += " + 0.2 * t" + std::to_string(i) + "[" + kIndices[i % 6] + "]";
  }
  made.score = declared + sum;
  made.captures = [](const AttentionShape& s) {
    const std::vector<std::int64_t> sizes{s.batch, s.heads_q, s.seqlen_q, s.seqlen_kv, 1, 2};
    Captures all;
    for (int i = 0; i < 16; ++i)
      all.push_back(tensor("t" + std::to_string(i), {sizes.begin(), sizes.begin() + i % 6 + 1},
                           ElementType::fp32, [i](std::int64_t place) { return wave(place + 7 * i); }));
    return all;
  };
  return made;
}

inline const std::vector<Variant>& variants() {
  using Shape = AttentionShape;
  const auto documents = [](const Shape& s, std::int64_t batch) {
    const std::int64_t length = std::max<std::int64_t>({s.seqlen_q, s.seqlen_kv, 1});
    // Documents of 1, 2, 3, ... tokens, times 9.
    return tensor("doc", batch ? std::vector{batch, length} : std::vector{length}, ElementType::int32,
                  [=](std::int64_t i) {
                    return std::floor(
                        std::sqrt(static_cast<double>(i % length) / 4.5 + static_cast<double>(i / length)));
                  });
  };
  const auto slopes = [](const Shape& s) {
    return Captures{tensor("slopes", {s.heads_q}, ElementType::fp32,
                           [](std::int64_t h) { return std::exp2(-1.0 - static_cast<double>(h) / 2); })};
  };
  static const std::vector<Variant> all = {
      {"causal", "", "kv <= q + seqlen_kv - seqlen_q"},
      {"causal_top_left", "", "kv <= q"},
      {"window", "", "left: int; right: int; kv >= q - left && kv <= q + right",
       [](const Shape&) {
         return Captures{scalar("left", 40), scalar("right", 17)};
       }},
      {"causal_window", "",
       "window: int; kv <= q + seqlen_kv - seqlen_q && q + seqlen_kv - seqlen_q - kv < window",
       [](const Shape&) { return Captures{scalar("window", 70)}; }},
      {"prefix_lm", "", "prefix: int32 1d; kv <= q || kv < prefix[b]",
       [](const Shape& s) {
         return Captures{tensor("prefix", {s.batch}, ElementType::int32,
                                [](std::int64_t b) { return static_cast<double>(17 * b % 100); })};
       }},
      {"documents", "", "doc: int32 1d; doc[q] == doc[kv]",
       [=](const Shape& s) { return Captures{documents(s, 0)}; }},
      {"causal_documents", "", "doc: int32 2d; kv <= q && doc[b, q] == doc[b, kv]",
       [=](const Shape& s) { return Captures{documents(s, std::max<std::int64_t>(s.batch, 1))}; }},
      {"dilated", "", "step: int; kv <= q && (q - kv) % step == 0",
       [](const Shape&) { return Captures{scalar("step", 3)}; }},
      {"strided", "", "stride: int; kv <= q && (q - kv < stride || kv % stride == stride - 1)",
       [](const Shape&) { return Captures{scalar("stride", 24)}; }},
      {"neighbourhood", "",
       "width: int; radius: int; "
       "abs(q / width - kv / width) <= radius && abs(q % width - kv % width) <= radius",
       [](const Shape&) {
         return Captures{scalar("width", 16), scalar("radius", 2)};
       }},
      {"per_head", "", "h % 2 == 0 ? kv <= q : kv >= q"},
      {"not_window", "", "!(abs(q - kv) < 20) && !(kv > q)"},
      {"alibi", "slopes: fp32 1d; score + slopes[h] * to_float(kv - q)", "", slopes},
      {"causal_alibi_grad", "slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)", "kv <= q", slopes},
      {"softcap", "5.0 * tanh(score / 5.0)", ""},
      {"causal_softcap", "cap: float; cap * tanh(score / cap)", "kv <= q",
       [](const Shape&) { return Captures{scalar("cap", 2.5)}; }},
      {"bias", "bias: bf16 4d; score + bias[b, h, q, kv]", "",
       [](const Shape& s) {
         return Captures{
             tensor("bias", {s.batch, s.heads_q, s.seqlen_q, s.seqlen_kv}, ElementType::bf16, wave)};
       }},
      // One matrix for all batches and heads: an index is clamped into the tensor.
      {"bias_grad", "bias: fp32 4d grad; score + bias[b, h, q, kv]", "",
       [](const Shape& s) {
         return Captures{tensor("bias", {1, 1, s.seqlen_q, s.seqlen_kv}, ElementType::fp32, wave)};
       }},
      {"relative_bias", "table: fp16 2d grad; score + table[h, max(min(kv - q, 31), -32) + 32]", "",
       [](const Shape& s) {
         return Captures{tensor("table", {s.heads_q, 64}, ElementType::fp16, wave)};
       }},
      {"gated", "gate: fp32 2d grad; score * sigmoid(gate[h, kv]) + 0.1 * sin(score)", "",
       [](const Shape& s) {
         return Captures{tensor("gate", {s.heads_q, s.seqlen_kv}, ElementType::fp32, wave)};
       }},
      {"six_dims", "t: fp16 6d grad; score + t[b, h, q / 8, q % 8, kv / 8, kv % 8]", "",
       [](const Shape& s) {
         return Captures{tensor("t", {s.batch, s.heads_q, 5, 8, 7, 8}, ElementType::fp16, wave)};
       }},
      sixteen_tensors(),
  };
  return all;
}

}  // namespace flashjit::test

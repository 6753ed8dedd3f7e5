// Score and mask programs, packed sequences and sinks against the fp64 reference: every named variant in
// every family and type, and all features with each other.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "flashjit/attention_programs.hpp"
#include "tests/support/attention_case.hpp"
#include "tests/support/variants.hpp"

namespace flashjit::test {
namespace {

constexpr std::array kDTypes = {DType::fp16, DType::bf16, DType::fp32};
constexpr std::array kFamilies = {Family::sm90, Family::sm80, Family::sm75, Family::simt};
constexpr std::array<std::array<int, 2>, 5> kHeadDims = {
    {{64, 64}, {128, 128}, {40, 40}, {96, 64}, {256, 256}}};
constexpr std::array<std::array<int, 2>, 8> kLengths = {
    {{1, 1}, {1, 333}, {65, 64}, {129, 129}, {200, 333}, {333, 200}, {333, 333}, {130, 7}}};
constexpr std::array<std::array<int, 3>, 3> kBatchAndHeads = {{{2, 2, 2}, {3, 4, 1}, {4, 4, 2}}};
constexpr std::array<BlockSize, 3> kBlocks = {{{0, 0}, {64, 64}, {48, 80}}};
enum Lengths { kDense, kPadded, kPacked };

AttentionCase case_of(const Variant& variant, AttentionSpec spec, const AttentionShape& shape, Family family,
                      unsigned seed) {
  spec = variant.in(spec);
  spec.dtype = dtype_for(family, spec.dtype);
  AttentionCase test{.spec = spec,
                     .shape = shape,
                     .family = spec.dtype == DType::fp32 ? Family::simt : family,
                     .captures = variant.captures,
                     .variant = variant.name,
                     .seed = seed};
  // The rounding error of a handful of scores or rows is luck: tiny problems come in batches.
  if (shape.seqlen_q * shape.seqlen_kv < 1000) test.shape.batch = 16;
  return test;
}

/// Every variant, family and type.
std::vector<AttentionCase> variant_cases() {
  std::vector<AttentionCase> cases;
  for (const Variant& variant : variants()) {
    for (const Family family : kFamilies) {
      for (const DType dtype : kDTypes) {
        if ((dtype == DType::fp32) != (family == Family::simt)) continue;
        const unsigned seed = static_cast<unsigned>(cases.size());
        cases.push_back(case_of(variant, {.dtype = dtype, .head_dim = seed % 2 ? 64 : 128},
                                {2, 4, 2, 333, 301}, family, seed));
      }
    }
  }
  return cases;
}

/// Every pair of features, among them the variants.
std::vector<AttentionCase> pair_cases() {
  std::vector<AttentionCase> cases;
  const auto choices =
      covering_choices<11>({static_cast<int>(variants().size()), 3, 4, 5, 8, 3, 2, 3, 2, 3, 2});
  for (const auto& [variant, dtype, family, dims, lengths, heads, dropout, packing, sinks, block, det] :
       choices) {
    const auto [batch, heads_q, heads_kv] = kBatchAndHeads[heads];
    const unsigned seed = 1000 + static_cast<unsigned>(cases.size());
    const AttentionSpec spec{.dtype = kDTypes[dtype],
                             .head_dim = kHeadDims[dims][0],
                             .head_dim_v = kHeadDims[dims][1],
                             .dropout = dropout == 1,
                             .kv = padded_if(packing == kPadded),
                             .block_map = kBlocks[block],
                             .reproducible = {.deterministic = det == 1},
                             .varlen = packing == kPacked,
                             .sinks = sinks == 1};
    AttentionCase test = case_of(variants()[variant], spec,
                                 {batch, heads_q, heads_kv, kLengths[lengths][0], kLengths[lengths][1]},
                                 kFamilies[family], seed);
    test.dropout_p = dropout == 1 ? 0.2 : 0;
    test.layout = seed % 3 == 0 ? Layout::padded : seed % 3 == 1 ? Layout::bshd : Layout::bhsd;
    test.map_density = 0.6;
    test.built_lists = seed % 5 < 2;
    if (seed % 2) test.map_batch = test.shape.batch, test.map_heads = heads_q;
    cases.push_back(test);
  }
  return cases;
}

/// Packed sequences and sinks without programs but causal masks: what most callers use.
std::vector<AttentionCase> packed_cases() {
  const std::array<MaskProgram, 3> masks = {MaskProgram(), causal(), causal(CausalAlignment::top_left)};
  std::vector<AttentionCase> cases;
  const auto choices = covering_choices<10>({3, 4, 5, 3, 8, 3, 2, 2, 2, 4});
  for (const auto& [dtype, family, dims, mask, lengths, heads, packed, sinks, det, layout] : choices) {
    const auto [batch, heads_q, heads_kv] = kBatchAndHeads[heads];
    const unsigned seed = 2000 + static_cast<unsigned>(cases.size());
    AttentionCase test{
        .spec = {.dtype = kDTypes[dtype],
                 .head_dim = kHeadDims[dims][0],
                 .head_dim_v = kHeadDims[dims][1],
                 .mask = masks[mask],
                 .reproducible = {.deterministic = det == 1},
                 .varlen = packed == 1,
                 .sinks = sinks == 1},
        .shape = {batch, heads_q, heads_kv, kLengths[lengths][0], kLengths[lengths][1]},
        .family = kDTypes[dtype] == DType::fp32 ? Family::simt : kFamilies[family],
        .layout = std::array{Layout::bhsd, Layout::bshd, Layout::packed, Layout::padded}[layout],
        .seed = seed};
    test.spec.dtype = dtype_for(test.family, test.spec.dtype);
    if (test.layout == Layout::packed) {
      test.spec.head_dim_v = test.spec.head_dim;
      test.shape.heads_kv = test.shape.heads_q;
      test.shape.seqlen_kv = test.shape.seqlen_q;
    }
    if (test.shape.seqlen_q * test.shape.seqlen_kv < 1000) test.shape.batch = 16;
    cases.push_back(test);
  }
  return cases;
}

/// Every family with these attentions, in the types that it is used with.
std::vector<AttentionCase> in_every_family(const std::vector<Variant>& given, const AttentionShape& shape,
                                           unsigned first_seed) {
  std::vector<AttentionCase> cases;
  for (const Variant& variant : given) {
    for (const Family family : kFamilies) {
      const unsigned seed = first_seed + static_cast<unsigned>(cases.size());
      const DType dtype = family == Family::simt ? DType::fp32 : DType::bf16;
      cases.push_back(
          case_of(variant, {.dtype = dtype, .head_dim = seed % 2 ? 64 : 128}, shape, family, seed));
    }
  }
  return cases;
}

/// Tensors that lie otherwise in memory than in a program, read by score, mask and both passes.
std::vector<AttentionCase> strided_cases() {
  using test::tensor;
  using test::wave;
  const AttentionShape shape{2, 4, 2, 233, 201};
  const auto bias = [](const AttentionShape& s) {  // the same for all batches and heads
    return tensor("bias", {s.batch, s.heads_q, s.seqlen_q, s.seqlen_kv}, ElementType::bf16,
                  [area = s.seqlen_q * s.seqlen_kv](std::int64_t i) { return wave(i % area); });
  };
  const auto gate = [](const AttentionShape& s) {
    return tensor("gate", {s.heads_q, s.seqlen_kv}, ElementType::fp32, wave);
  };
  const auto documents = [](const AttentionShape& s) {
    return tensor("doc", {s.batch, s.seqlen_q}, ElementType::int32, [length = s.seqlen_q](std::int64_t i) {
      return static_cast<double>(i % length / (40 + 10 * (i / length)));
    });
  };
  std::vector<AttentionCase> cases =
      in_every_family({{"documents_and_expanded_bias", "bias: bf16 4d; score + bias[b, h, q, kv]",
                        "doc: int32 2d; doc[b, q] == doc[b, kv]",
                        [=](const AttentionShape& s) {
                          return test::Captures{bias(s), documents(s)};
                        }},
                       {"expanded_bias_grad", "bias: bf16 4d grad; score + bias[b, h, q, kv]", "kv <= q",
                        [=](const AttentionShape& s) { return test::Captures{bias(s)}; }},
                       {"gate_grad", "gate: fp32 2d grad; score * sigmoid(gate[h, kv])", "kv <= q + 20",
                        [=](const AttentionShape& s) { return test::Captures{gate(s)}; }}},
                      shape, 4000);
  for (AttentionCase& test : cases) test.strided_captures = true;
  return cases;
}

/// Adds a variant of family sm90 at each head dimension, with key lengths, and packed with dropout.
void add_lengths(std::vector<AttentionCase>& cases, const Variant& variant, const AttentionShape& shape,
                 unsigned first_seed) {
  for (const int dim : {32, 64, 96, 128, 192, 256}) {
    const unsigned seed = first_seed + static_cast<unsigned>(cases.size());
    AttentionSpec spec{.dtype = DType::bf16, .head_dim = dim, .kv = KvLayout::padded()};
    cases.push_back(case_of(variant, spec, shape, Family::sm90, seed));
    spec.kv = {}, spec.varlen = true, spec.dropout = true;
    cases.push_back(case_of(variant, spec, shape, Family::sm90, seed + 1));
    cases.back().dropout_p = 0.2;
  }
}

/// Bias tiles of 16-bit tensors, which a kernel may copy as tiles: with rows that TMA can copy, rows
/// that begin between words, keys and queries that go with other columns and rows than their own, and tensors
/// that are too small.
std::vector<AttentionCase> bias_tile_cases() {
  using test::tensor;
  using test::wave;
  const auto bias = [](ElementType type, int rows_less, int columns_less) {
    return [=](const AttentionShape& s) {
      return test::Captures{
          tensor("bias", {s.heads_q, s.seqlen_q - rows_less, s.seqlen_kv - columns_less}, type, wave)};
    };
  };
  const auto bias_2d = [](const AttentionShape& s) {
    return test::Captures{tensor("bias", {s.seqlen_q, s.seqlen_kv}, ElementType::fp16, wave)};
  };
  const auto bf16 = ElementType::bf16, fp16 = ElementType::fp16;
  std::vector<AttentionCase> cases = in_every_family(
      {{"even_rows", "bias: bf16 3d; score + bias[h, q, kv]", "", bias(bf16, 0, 0)},
       {"even_rows_causal", "bias: fp16 3d; score + bias[h, q, kv]", "causal", bias(fp16, 0, 0)},
       {"odd_rows", "bias: fp16 3d; score - bias[h, q, kv]", "", bias(fp16, 0, 1)},
       {"even_shift", "bias: bf16 3d; score + 0.5 * bias[h, q, kv - 6]", "kv <= q + 90", bias(bf16, 0, 0)},
       {"odd_shift", "bias: bf16 3d; score + bias[h, seqlen_q - 1 - q, kv + 3]", "", bias(bf16, 0, 0)},
       {"too_small", "bias: fp16 3d; score * (1.0 + 0.1 * bias[h, q, kv])", "", bias(fp16, 60, 150)},
       {"twice", "bias: bf16 3d; score + bias[h, q, kv] * bias[h, q, kv + 1]", "", bias(bf16, 0, 0)}},
      {2, 4, 2, 233, 434}, 6000);
  const AttentionShape whole_rows{2, 4, 2, 333, 440};
  const Variant bias_tile{"bias_tile", "bias: bf16 3d; score + bias[h, q, kv]", "", bias(bf16, 0, 0)};
  const std::vector<AttentionCase> copied = in_every_family(
      {bias_tile,
       {"bias_tile_curved_causal", "bias: bf16 3d; 9.0 * tanh((score + bias[h, q, kv]) / 9.0)", "causal",
        bias(bf16, 0, 0)},
       {"bias_tile_shift", "bias: fp16 3d; score - 0.5 * bias[h, q + 3, kv + 8]", "", bias(fp16, -4, -16)},
       {"bias_tile_odd_shift", "bias: bf16 3d; score - 0.5 * bias[h, q + 3, kv + 9]", "",
        bias(bf16, -4, -16)},
       {"bias_tile_negative_shift", "bias: fp16 3d; score - 0.5 * bias[h, q - 3, kv]", "", bias(fp16, 0, 0)},
       {"bias_tile_narrow", "bias: bf16 3d; score + bias[h, q, kv]", "kv <= q + 20", bias(bf16, 0, 8)},
       {"bias_tile_2d_window", "bias: fp16 2d; score * (1.0 + 0.1 * bias[q, kv])",
        "q - kv < 100 && kv - q < 70", bias_2d},
       {"bias_tile_blocks", "bias: fp16 2d; score + bias[q, kv]", "q / 64 % 3 != kv / 64 % 2", bias_2d}},
      whole_rows, 7000);
  cases.insert(cases.end(), copied.begin(), copied.end());
  // TMA copies it for every other head, and blocks have tiles of both kinds.
  const Variant by_head{"bias_tile_shift_by_head", "bias: bf16 3d; score + bias[h, q, kv + 4 * h]", "",
                        bias(bf16, 0, -128)};
  for (const int dim : {32, 64, 128, 256})
    cases.push_back(case_of(by_head, {.dtype = DType::bf16, .head_dim = dim}, {2, 32, 8, 333, 200},
                            Family::sm90, 7900 + static_cast<unsigned>(dim)));
  add_lengths(cases, bias_tile, whole_rows, 8000);
  return cases;
}

/// Bias tiles with gradients: in rows of whole 16 bytes and in others, shared by batches, with pairs
/// that are clamped to one element, of a score with a slope, of 32 bits, and together with another gradient.
std::vector<AttentionCase> bias_tile_grad_cases() {
  using test::tensor;
  using test::wave;
  const auto bf16 = ElementType::bf16, fp16 = ElementType::fp16, fp32 = ElementType::fp32;
  const auto bias = [](ElementType type, int rows_less = 0, int columns_less = 0) {
    return [=](const AttentionShape& s) {
      return test::Captures{
          tensor("bias", {s.heads_q, s.seqlen_q - rows_less, s.seqlen_kv - columns_less}, type, wave)};
    };
  };
  const auto own = [](const AttentionShape& s) {
    return test::Captures{
        tensor("bias", {s.batch, s.heads_q, s.seqlen_q, s.seqlen_kv}, ElementType::fp16, wave)};
  };
  const auto and_slopes = [=](const AttentionShape& s) {
    test::Captures captures = bias(bf16)(s);
    captures.push_back(tensor("slopes", {s.heads_q}, ElementType::fp32,
                              [](std::int64_t h) { return 0.01 * static_cast<double>(h + 1); }));
    return captures;
  };
  const AttentionShape whole_rows{2, 4, 2, 333, 440}, odd_rows{2, 4, 2, 233, 433};
  const Variant plain{"bias_tile_grad", "bias: bf16 3d grad; score + bias[h, q, kv]", "", bias(bf16)};
  std::vector<AttentionCase> cases = in_every_family(
      {plain,
       {"bias_tile_grad_causal", "bias: fp16 4d grad; score + bias[b, h, q, kv]", "causal", own},
       {"bias_tile_grad_curved", "bias: bf16 3d grad; 9.0 * tanh((score + bias[h, q, kv]) / 9.0)", "causal",
        bias(bf16)},
       {"bias_tile_grad_scaled", "bias: bf16 3d grad; score - 0.5 * bias[h, q, kv]", "", bias(bf16)},
       {"bias_tile_grad_fp32", "bias: fp32 3d grad; score + bias[h, q, kv]", "q - kv < 100 && kv - q < 70",
        bias(fp32)},
       {"bias_tile_grad_shift", "bias: fp16 3d grad; score + bias[h, q + 3, kv + 8]", "",
        bias(fp16, -4, -16)},
       {"bias_tile_grad_clamped", "bias: bf16 3d grad; score + bias[h, q - 3, kv + 4]", "",
        bias(bf16, 4, 40)},
       {"bias_tile_grad_and_slopes",
        "bias: bf16 3d grad; slopes: fp32 1d grad; score + bias[h, q, kv] + slopes[h] * to_float(kv - q)",
        "causal", and_slopes}},
      whole_rows, 9000);
  const std::vector<AttentionCase> odd = in_every_family({plain}, odd_rows, 9100);
  cases.insert(cases.end(), odd.begin(), odd.end());
  add_lengths(cases, plain, whole_rows, 9200);
  return cases;
}

/// Gradients that are sums over the pairs of one kv - q: of a table with a place for each, of places that
/// many share, with a factor, of a score with a slope, and together with other gradients. And slopes of the
/// difference.
std::vector<AttentionCase> difference_grad_cases() {
  using test::tensor;
  using test::wave;
  const auto table = [](ElementType type, int size) {
    return [=](const AttentionShape& s) {
      const std::int64_t places = size > 0 ? size : s.seqlen_q + s.seqlen_kv;
      return test::Captures{tensor("table", {s.heads_q, places}, type, wave)};
    };
  };
  const auto slopes = [](const AttentionShape& s) {
    return test::Captures{tensor("slopes", {s.heads_q}, ElementType::fp32,
                                 [](std::int64_t h) { return 0.01 * static_cast<double>(h + 1); })};
  };
  const auto all = [=](const AttentionShape& s) {
    test::Captures captures = table(ElementType::fp32, 0)(s);
    captures.push_back(slopes(s)[0]);
    captures.push_back(tensor("gate", {s.seqlen_kv}, ElementType::fp32, wave));
    captures.push_back(tensor("bias", {s.seqlen_q, s.seqlen_kv}, ElementType::bf16, wave));
    return captures;
  };
  const AttentionShape shape{2, 4, 2, 333, 450};
  const Variant own{"table_grad", "table: fp32 2d grad; score + table[h, kv - q + seqlen_q]", "",
                    table(ElementType::fp32, 0)};
  const Variant sloped{"slopes_grad", "slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)", "",
                       slopes};
  std::vector<AttentionCase> cases = in_every_family(
      {own,
       sloped,
       {"table_grad_causal", "table: bf16 2d grad; score + table[h, q - kv]", "causal",
        table(ElementType::bf16, 0)},
       {"table_grad_curved", "table: fp16 2d grad; 9.0 * tanh((score + table[h, kv - q + seqlen_q]) / 9.0)",
        "q - kv < 100 && kv - q < 70", table(ElementType::fp16, 0)},
       {"table_grad_clamped", "table: fp32 2d grad; score - 0.5 * table[h, max(min(kv - q, 9), -6) + 6]", "",
        table(ElementType::fp32, 16)},
       {"table_grad_scaled",
        "table: fp32 2d grad; score + 0.01 * table[h, (kv - q) % 5 + 4] * to_float(q - kv)", "",
        table(ElementType::fp32, 9)},
       {"all_grads",
        "table: fp32 2d grad; slopes: fp32 1d grad; gate: fp32 1d grad; bias: bf16 2d grad; "
        "score + bias[q, kv] + gate[kv] + slopes[h] * to_float(kv - q) + table[h, kv - q + seqlen_q]",
        "causal", all}},
      shape, 9300);
  for (const int dim : {32, 64, 96, 128, 192, 256}) {
    const unsigned seed = 9400 + static_cast<unsigned>(cases.size());
    AttentionSpec spec{.dtype = DType::bf16, .head_dim = dim, .kv = KvLayout::padded()};
    cases.push_back(case_of(own, spec, shape, Family::sm90, seed));
    cases.push_back(case_of(sloped, spec, shape, Family::sm90, seed + 1));
    spec.kv = {}, spec.varlen = true, spec.dropout = true;
    cases.push_back(case_of(own, spec, shape, Family::sm90, seed + 2));
    cases.back().dropout_p = 0.2;
  }
  return cases;
}

/// What a score reads of a query and what it reads of a key: the logarithm of gates between the two.
Variant forget_gates(bool wants_grad = false) {
  return {wants_grad ? "forget_gates_grad" : "forget_gates",
          wants_grad ? "f: fp32 3d grad; score + (f[b, h, q] - f[b, h, kv])"
                     : "f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])",
          "causal", [](const AttentionShape& s) {
            return test::Captures{
                test::tensor("f", {s.batch, s.heads_q, std::max(s.seqlen_q, s.seqlen_kv)}, ElementType::fp32,
                             [](std::int64_t i) { return -0.01 * static_cast<double>(i); })};
          }};
}

/// What a score reads of queries and of keys alone, which a kernel may find once for a row or a column of a
/// tile: also where blocks share a Q tile's keys, where the last round's tiles are cut, and where several
/// values of keys are read.
std::vector<AttentionCase> position_value_cases() {
  using test::tensor;
  using test::wave;
  const auto of_keys = [](ElementType type) {
    return [=](const AttentionShape& s) {
      return test::Captures{tensor("bias", {s.batch, s.seqlen_kv}, type, wave)};
    };
  };
  const auto of_queries = [](const AttentionShape& s) {
    return test::Captures{tensor("t", {s.heads_q, s.seqlen_q}, ElementType::fp16, wave)};
  };
  const auto looked_up = [](const AttentionShape& s) {
    return test::Captures{tensor("at", {s.seqlen_kv}, ElementType::int32,
                                 [](std::int64_t i) { return static_cast<double>((i * 7 + 3) % 90); }),
                          tensor("w", {90}, ElementType::bf16, wave)};
  };
  const auto fp32 = ElementType::fp32, bf16 = ElementType::bf16;
  // A tensor of queries alone; behind the last of them no 0 may be read.
  const Variant divided{
      "divided", "t: fp32 2d; score / t[h, q]", "", [](const AttentionShape& s) {
        return test::Captures{tensor("t", {s.heads_q, s.seqlen_q}, ElementType::fp32,
                                     [](std::int64_t i) { return 1.0 + 0.25 * static_cast<double>(i % 7); })};
      }};
  const Variant key_bias{"key_bias", "bias: fp32 2d; score + bias[b, kv]", "", of_keys(fp32)};
  std::vector<AttentionCase> cases = in_every_family(
      {key_bias,
       forget_gates(),
       {"shifted_key_bias", "bias: bf16 2d; score + 0.5 * bias[b, kv - 3]", "q - kv < 100", of_keys(bf16)},
       {"temperature_of_queries", "t: fp16 2d; score * sigmoid(t[h, q])", "", of_queries},
       {"looked_up", "w: bf16 1d; at: int32 1d; 9.0 * tanh((score + w[at[kv]]) / 9.0)", "causal", looked_up},
       {"several", "bias: fp32 2d; score * sigmoid(bias[b, kv]) + bias[b, kv + 1]", "", of_keys(fp32)},
       {"key_bias_blocks", "bias: fp32 2d; score + bias[b, kv]", "q / 64 % 3 != kv / 64 % 2", of_keys(fp32)}},
      {2, 4, 2, 333, 440}, 9000);
  const auto add = [&](const Variant& variant, const AttentionSpec& spec, const AttentionShape& shape) {
    const unsigned seed = 9500 + static_cast<unsigned>(cases.size());
    cases.push_back(case_of(variant, spec, shape, Family::sm90, seed));
    if (spec.dropout) cases.back().dropout_p = 0.2;
  };
  for (const int dim : {32, 64, 96, 128, 192, 256}) {
    const AttentionSpec spec{.dtype = DType::bf16, .head_dim = dim};
    AttentionSpec padded = spec, packed = spec;
    padded.kv = KvLayout::padded();
    packed.varlen = packed.dropout = true;
    add(forget_gates(), padded, {2, 4, 2, 333, 440});
    add(key_bias, packed, {2, 4, 2, 333, 440});
    add(forget_gates(), spec, {1, 8, 8, 5, 3000});
    add(key_bias, spec, {5, 32, 32, 140, 130});
  }
  for (const int dim : {64, 96, 128, 192, 256}) {
    const AttentionSpec spec{.dtype = DType::bf16, .head_dim = dim};
    AttentionSpec padded = spec, packed = spec;
    padded.kv = KvLayout::padded();
    packed.varlen = packed.dropout = true;
    for (const AttentionSpec& each : {spec, padded, packed}) add(divided, each, {3, 4, 2, 333, 440});
    add(forget_gates(), packed, {3, 4, 2, 333, 440});
    add(forget_gates(true), spec, {2, 4, 2, 333, 440});
  }
  return cases;
}

/// Masks of what they read of one position: integers and conditions of several types, two of each side, of
/// expressions that leave the tensor, with scores that read by position, too.
std::vector<AttentionCase> mask_read_cases() {
  using test::Captures;
  using test::tensor;
  using test::wave;
  const auto longest = [](const AttentionShape& s) { return std::max(s.seqlen_q, s.seqlen_kv); };
  const auto documents = [=](const AttentionShape& s, ElementType type) {
    return tensor("doc", {s.batch, longest(s)}, type, [n = longest(s)](std::int64_t i) {
      return static_cast<double>(i % n / (50 + 20 * (i / n)));
    });
  };
  const auto valid = [](const AttentionShape& s) {
    return Captures{tensor("valid", {s.batch, s.seqlen_kv}, ElementType::boolean,
                           [](std::int64_t i) { return i % 7 < 4 ? 1.0 : 0.0; })};
  };
  const auto starts = [](const AttentionShape& s) {
    return Captures{tensor("start", {s.seqlen_q}, ElementType::int32,
                           [](std::int64_t q) { return static_cast<double>(q * 3 / 4 - q % 11); })};
  };
  const auto ids = [=](ElementType type) {
    return [=](const AttentionShape& s) { return Captures{documents(s, type)}; };
  };
  const auto and_gates = [=](const AttentionShape& s) {
    return Captures{documents(s, ElementType::int64),
                    tensor("gate", {s.heads_q, longest(s)}, ElementType::fp32, wave)};
  };
  const std::string gates = "gate: fp32 2d; score + (gate[h, q] - gate[h, kv])";
  const std::vector<Variant> given = {
      {"valid_keys", "", "valid: bool 2d; valid[b, kv]", valid},
      {"from_starts", "", "start: int32 1d; kv >= start[q] && kv <= q + 100", starts},
      {"int64_documents", "", "doc: int64 2d; kv <= q + 30 && doc[b, q] == doc[b, kv]",
       ids(ElementType::int64)},
      {"neighbours_documents", "",
       "doc: uint8 2d; doc[b, q] == doc[b, kv] || doc[b, q / 2] + 1 == doc[b, kv + 40]",
       ids(ElementType::uint8)},
      {"documents_and_gates", gates, "doc: int64 2d; doc[b, q] >= doc[b, kv]", and_gates}};
  std::vector<AttentionCase> cases = in_every_family(given, {3, 4, 2, 333, 433}, 9400);
  unsigned seed = 9500;
  for (const int dim : {32, 64, 96, 128, 192, 256}) {
    AttentionSpec spec{.dtype = DType::fp16, .head_dim = dim, .block_map = {.q = 128, .kv = 64}};
    cases.push_back(case_of(given[2], spec, {2, 4, 2, 333, 440}, Family::sm90, seed++));
    spec = {.dtype = DType::bf16, .head_dim = dim, .dropout = true, .varlen = true, .sinks = true};
    cases.push_back(case_of(given[3], spec, {2, 4, 2, 333, 440}, Family::sm90, seed++));
    cases.back().dropout_p = 0.2;
  }
  return cases;
}

/// What the header of ready-made programs promises of their combination, and T5's buckets.
std::vector<AttentionCase> ready_made_cases() {
  using test::tensor;
  namespace ready = programs;
  const auto text = [](const expr::Expr& program) { return expr::to_string(program); };
  const auto table = [](std::int64_t buckets, ElementType type) {
    return [=](const AttentionShape& s) {
      return test::Captures{tensor("table", {buckets, s.heads_q}, type, test::wave)};
    };
  };
  const auto documents = [](const AttentionShape& s) {
    return test::Captures{tensor("documents", {std::max(s.seqlen_q, s.seqlen_kv)}, ElementType::int32,
                                 [](std::int64_t i) { return static_cast<double>(i / 70); })};
  };
  const auto prefix = [](const AttentionShape& s) {
    return test::Captures{
        tensor("prefix", {s.batch}, ElementType::int32, [](std::int64_t b) { return 30.0 + 50 * b; })};
  };
  const ready::RelativeBias learned{.wants_grad = true};
  const ready::RelativeBias one_sided{
      .bidirectional = false, .num_buckets = 16, .max_distance = 64, .type = ElementType::bf16};
  return in_every_family(
      {{"window_or_dilated", "", text(ready::sliding_window(40, 0) || ready::dilated(7))},
       {"not_strided_or_prefix", "", text(!ready::strided(24, 24) || ready::prefix_lm()), prefix},
       {"causal_and_other_documents", "", text(ready::causal_mask() && !ready::documents(1)), documents},
       {"blocks_of_tiles", "", "q / 128 % 3 != kv / 128"},
       {"blocks_of_tiles_read", "", "keep: bool 2d; keep[q >> 7, kv / 256]",
        [](const AttentionShape&) {
          return test::Captures{tensor("keep", {2, 2}, ElementType::boolean,
                                       [](std::int64_t i) { return i == 1 ? 0.0 : 1.0; })};
        }},
       {"not_either", "", text(!(ready::neighborhood_2d(16, 2) || ready::sliding_window(0, -1)))},
       {"relative_bias_grad", text(ready::relative_bias(learned)), "", table(32, ElementType::fp32)},
       {"causal_relative_bias", text(ready::relative_bias(one_sided)), text(ready::causal_mask()),
        table(16, ElementType::bf16)}},
      {2, 4, 2, 233, 290}, 5000);
}

const std::vector<AttentionCase>& all_cases() {
  static const std::vector<AttentionCase> cases = [] {
    std::vector<AttentionCase> all = variant_cases();
    for (const auto& more :
         {pair_cases(), packed_cases(), strided_cases(), bias_tile_cases(), bias_tile_grad_cases(),
          difference_grad_cases(), position_value_cases(), mask_read_cases(), ready_made_cases()})
      all.insert(all.end(), more.begin(), more.end());
    return all;
  }();
  return cases;
}

class Programs : public CaseTest {
 protected:
  static void SetUpTestSuite() { prepare_selected(all_cases()); }
};

TEST_P(Programs, MatchTheReference) { run_case(); }

const auto kName = [](const auto& test) { return name_of(test.param); };
INSTANTIATE_TEST_SUITE_P(Variants, Programs, testing::ValuesIn(variant_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Pairs, Programs, testing::ValuesIn(pair_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Packed, Programs, testing::ValuesIn(packed_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Strided, Programs, testing::ValuesIn(strided_cases()), kName);
INSTANTIATE_TEST_SUITE_P(BiasTiles, Programs, testing::ValuesIn(bias_tile_cases()), kName);
INSTANTIATE_TEST_SUITE_P(BiasTileGrads, Programs, testing::ValuesIn(bias_tile_grad_cases()), kName);
INSTANTIATE_TEST_SUITE_P(DifferenceGrads, Programs, testing::ValuesIn(difference_grad_cases()), kName);
INSTANTIATE_TEST_SUITE_P(PositionValues, Programs, testing::ValuesIn(position_value_cases()), kName);
INSTANTIATE_TEST_SUITE_P(MaskReads, Programs, testing::ValuesIn(mask_read_cases()), kName);
INSTANTIATE_TEST_SUITE_P(ReadyMade, Programs, testing::ValuesIn(ready_made_cases()), kName);

/// A few that stress different parts of a kernel, with every configuration.
std::vector<AttentionCase> sweep_cases() {
  std::vector<AttentionCase> cases;
  const AttentionShape shape{3, 4, 2, 333, 200};
  unsigned seed = 3000;
  const auto add = [&](const char* name, AttentionSpec spec, Family family) {
    for (const Variant& variant : variants())
      if (variant.name == name) cases.push_back(case_of(variant, spec, shape, family, seed++));
  };
  const AttentionSpec bf16{.dtype = DType::bf16, .head_dim = 64}, wide{.dtype = DType::bf16, .head_dim = 128};
  AttentionSpec packed = bf16, fp32{.dtype = DType::fp32, .head_dim = 64};
  packed.varlen = packed.sinks = true;
  fp32.varlen = fp32.sinks = true;
  for (const Family family : {Family::sm90, Family::sm80}) {
    add("causal_window", bf16, family);
    add("causal_documents", wide, family);
    add("causal_softcap", packed, family);
    add("alibi", wide, family);
    add("bias_grad", bf16, family);
    add("neighbourhood", packed, family);
  }
  add("causal_alibi_grad", fp32, Family::simt);
  add("documents", fp32, Family::simt);
  for (const AttentionSpec& spec : {bf16, wide})
    cases.push_back(case_of(forget_gates(), spec, shape, Family::sm90, seed++));
  return cases;
}

class ProgramsEveryConfiguration : public GpuTestWith<AttentionCase> {};

TEST_P(ProgramsEveryConfiguration, GivesTheSameResult) { check_every_configuration(GetParam()); }

INSTANTIATE_TEST_SUITE_P(SearchSpace, ProgramsEveryConfiguration, testing::ValuesIn(sweep_cases()), kName);

/// What a tile of work may meet at the ends of sequences and softmaxes.
class ProgramsEdges : public GpuTestWith<Family> {
 protected:
  static void check(AttentionCase test, reference::Problem problem) {
    test.family = GetParam();
    const Support support = supports(test.family, test.spec);
    if (!support) GTEST_SKIP() << to_string(test.family) << ": " << support.reason;
    TemporaryRuntime runtime;
    AttentionRun run(test, std::move(problem));
    run.check_forward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::forward));
    run.check_backward(runtime.get(), heuristic(test.family, test.spec, test.shape, Pass::backward));
  }
  static AttentionCase test_of(bool packed, bool sinks, MaskProgram mask = {}) {
    return {.spec = {.dtype = dtype_for(GetParam(), DType::bf16),
                     .head_dim = 64,
                     .mask = std::move(mask),
                     .varlen = packed,
                     .sinks = sinks},
            .shape = {4, 4, 2, 150, 170}};
  }
  /// Sequences of these lengths.
  static void check_lengths(const AttentionCase& given, const std::vector<std::int32_t>& q,
                            const std::vector<std::int32_t>& kv) {
    AttentionCase test = given;
    const auto offsets = [](const std::vector<std::int32_t>& lengths) {
      std::vector<std::int32_t> sums{0};
      for (const std::int32_t length : lengths) sums.push_back(sums.back() + length);
      return sums;
    };
    test.shape.batch = std::ssize(q);
    reference::Problem problem = make_problem(test);
    problem.cu_seqlens_q = offsets(q);
    problem.cu_seqlens_kv = offsets(kv);
    std::mt19937 generator(7);
    const auto normal = [&](std::int64_t rows) {
      return normal_values(rows * 64, test.spec.dtype, 1, generator);
    };
    problem.q = normal(4 * problem.cu_seqlens_q.back());
    problem.dout = normal(4 * problem.cu_seqlens_q.back());
    problem.k = normal(2 * problem.cu_seqlens_kv.back());
    problem.v = normal(2 * problem.cu_seqlens_kv.back());
    check(test, std::move(problem));
  }
};

TEST_P(ProgramsEdges, ManySequencesOfOneToken) {
  const std::vector<std::int32_t> ones(100, 1);
  AttentionCase test = test_of(true, true, causal());
  test.shape.seqlen_q = test.shape.seqlen_kv = 1;
  check_lengths(test, ones, ones);
}

TEST_P(ProgramsEdges, MostSequencesAreEmpty) {
  check_lengths(test_of(true, true), {0, 0, 150, 0, 0, 0, 1, 0}, {170, 0, 0, 0, 100, 0, 170, 0});
}

TEST_P(ProgramsEdges, SequencesWithoutKeysHaveOnlyTheirSinks) {
  check_lengths(test_of(true, true), {64, 150, 3}, {0, 0, 0});
}

TEST_P(ProgramsEdges, SequencesThatFillTilesExactly) {
  check_lengths(test_of(true, false, causal()), {128, 64, 128, 16}, {128, 64, 128, 16});
}

TEST_P(ProgramsEdges, TheLongestSequenceMayBeABound) {
  AttentionCase test = test_of(true, true, causal());
  test.shape.seqlen_q = 1000;
  test.shape.seqlen_kv = 777;
  check_lengths(test, {100, 7, 60}, {50, 90, 61});
}

TEST_P(ProgramsEdges, SinksOfEverySize) {
  const AttentionCase test = test_of(false, true, causal());
  reference::Problem problem = make_problem(test);
  problem.sinks = {-std::numeric_limits<double>::infinity(), 80, -80, 0};
  check(test, std::move(problem));
}

INSTANTIATE_TEST_SUITE_P(Families, ProgramsEdges, testing::ValuesIn(kFamilies),
                         [](const auto& test) { return to_string(test.param); });

}  // namespace
}  // namespace flashjit::test

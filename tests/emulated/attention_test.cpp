// Kernels of every family, run by the emulator, against the fp64 reference.
#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/attention_case.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

constexpr const char* kFiveSlices = "sm90:br64:bc128:w8:s2";  // above 256 columns of K
constexpr const char* kScaledSlopes = "score{slopes: fp32 1d grad; score * slopes[h]}";
// RoPE in halves of 64 columns, by tables.
constexpr const char* kTurnedQ =
    "cosine: fp32 2d grad; sine: fp32 2d; element * cosine[q, column % 32] + "
    "select(column < 32, -element_at(column + 32), element_at(column - 32)) * sine[q, column % 32]";
constexpr const char* kTurnedK =
    "cosine: fp32 2d grad; sine: fp32 2d; element * cosine[kv, column % 32] + "
    "select(column < 32, -element_at(column + 32), element_at(column - 32)) * sine[kv, column % 32]";
constexpr const char* kCausalAlibi =
    "score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal";

/// A spec and the shapes that it is run with, in these families and configurations.
struct Problems {
  const char* name;
  std::string spec;
  std::vector<AttentionShape> shapes;
  Layout layout = Layout::bhsd;
  std::vector<Family> families = {Family::simt, Family::sm80, Family::sm90, Family::sm75};
  const char* forward = "";  ///< empty: the planner's choice
  const char* backward = "";
};

const std::vector<Problems>& problems() {
  using enum Family;
  static const std::vector<Problems> all = {
      {"dense",
       "bf16:d64:row_max",
       {{2, 4, 2, 170, 190}, {16, 2, 1, 1, 65}, {9, 4, 4, 65, 1}},
       Layout::padded},
      {"causal", "fp16:d64:causal:det", {{1, 2, 1, 100, 400}, {2, 2, 2, 129, 129}}, Layout::bshd},
      {"varlen", "bf16:d64:causal:varlen:dropout:row_max", {{3, 4, 2, 130, 150}}},
      {"window",
       "bf16:d64:score{5.0 * tanh(score / 5.0)}:mask{q >= kv && q - kv < 70}:kvlen:sinks:row_max",
       {{3, 2, 1, 200, 210}}},
      {"documents",
       "bf16:d64:score{table: fp32 2d grad; score + table[h, max(min(kv - q, 31), -32) + 32]}"
       ":mask{doc: int32 1d; doc[q] == doc[kv]}",
       {{1, 2, 2, 140, 200}}},
      {"ordered_grads",
       "bf16:d32:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:det",
       {{2, 4, 2, 70, 100}},
       Layout::bhsd,
       {simt}},
      {"blocks", "bf16:d64:map64x64:causal", {{1, 4, 2, 300, 330}}},
      {"sigmoid",
       "bf16:d64:score{sigmoid(score - 2.0)}:causal:weight_mod",
       {{2, 4, 2, 170, 190}, {9, 4, 4, 65, 1}},
       Layout::padded,
       {simt, sm80, sm90}},
      {"relu",
       "fp16:d128:score{max(score, 0.0) / to_float(seqlen_kv)}:mask{q >= kv && q - kv < 70}:kvlen:weight_mod",
       {{2, 2, 1, 150, 170}},
       Layout::bshd,
       {simt, sm80, sm90}},
      {"silu",
       "bf16:d64:score{n: float; shift: fp32 1d grad; (score + shift[h]) * sigmoid(score + shift[h]) / n}"
       ":causal:varlen:weight_mod",
       {{3, 4, 2, 130, 150}},
       Layout::bhsd,
       {simt, sm80, sm90}},
      {"weights_of_documents",
       "bf16:d64:score{table: fp32 2d grad; sigmoid(score + table[h, max(min(kv - q, 31), -32) + 32])}"
       ":mask{doc: int32 1d; doc[q] == doc[kv]}:weight_mod",
       {{1, 2, 2, 140, 200}},
       Layout::bhsd,
       {simt, sm80, sm90}},
      {"weights_of_blocks",
       "fp16:d64:map64x64:det:score{sigmoid(score)}:weight_mod",
       {{1, 4, 2, 170, 130}},
       Layout::bhsd,
       {simt, sm80, sm90}},
      {"weights_in_pairs",
       "bf16:d128:score{slopes: fp32 1d grad; sigmoid(score + slopes[h] * to_float(kv - "
       "q))}:causal:weight_mod",
       {{1, 4, 2, 130, 200}},
       Layout::bhsd,
       {sm80},
       "",
       "sm80:br32:bc128:w8:s2:d_split2"},
      {"weights_of_shared_rows",
       "bf16:d320x280:score{score * sigmoid(score)}:causal:weight_mod",
       {{1, 2, 1, 70, 90}},
       Layout::padded,
       {sm80},
       "sm80:br32:bc32:w4:d_split2",
       "sm80:br32:bc64:w8:d_split2"},
      {"gated_out",
       "bf16:d64:causal:out_mod{gate: bf16 4d grad; out * sigmoid(gate[b, q, h, column])}",
       {{2, 4, 2, 170, 190}, {9, 4, 4, 65, 1}},
       Layout::padded,
       {simt, sm80, sm75}},
      {"out_of_packed_rows",
       "fp16:d128x96:" + std::string(kScaledSlopes) +
           ":out_mod{slopes: fp32 1d grad; x: fp32 2d grad; tanh(out * slopes[h]) + x[q, 0]}:varlen:sinks",
       {{3, 4, 2, 130, 150}},
       Layout::bshd,
       {simt, sm80}},
      {"out_of_weights",
       "bf16:d40:score{sigmoid(score)}:out_mod{w: fp32 2d grad; out * w[h, column]}:weight_mod:fp32_out",
       {{2, 2, 1, 150, 70}},
       Layout::bhsd,
       {simt, sm80}},
      {"out_of_shared_rows",
       "bf16:d320x280:causal:out_mod{w: fp32 2d; out * w[h, column]}",
       {{1, 2, 1, 70, 90}},
       Layout::padded,
       {sm80},
       "sm80:br32:bc32:w4:d_split2",
       "sm80:br32:bc64:w8:d_split2"},
      {"gated_out_of_hopper",
       "fp16:d64:causal:out_mod{gate: fp16 3d grad; tanh(out) + 0.5 * gate[b, q, h]}",
       {{1, 2, 1, 330, 100}},  // first queries without keys
       Layout::bshd,
       {sm90}},
      {"gated_out_of_hopper",
       "bf16:d128:varlen:out_mod{gate: bf16 3d grad; out * sigmoid(gate[q, h, column])}",
       {{2, 2, 1, 150, 170}},
       Layout::bhsd,
       {sm90}},
      {"gates_in_shared_memory",  // work tile after work tile
       "bf16:d64:causal:out_mod{gate: bf16 4d; out * sigmoid(gate[b, h, q, column])}",
       {{1, 8, 2, 560, 140}},
       Layout::padded,
       {sm90}},
      {"gates_in_shared_memory",
       "fp16:d40:varlen:out_mod{gate: fp16 4d; out * sigmoid(gate[b, q, h, column])}",
       {{3, 2, 1, 210, 90}},
       Layout::bshd,
       {sm90}},
      {"clamped_gates_in_shared_memory",
       "bf16:d64:out_mod{gate: bf16 4d; out * sigmoid(gate[b, h, q - 3, column])}",
       {{1, 2, 1, 200, 100}},
       Layout::bhsd,
       {sm90}},
      {"gated_wide_out_of_hopper",
       "bf16:d200:causal:out_mod{gate: bf16 4d; out * sigmoid(gate[b, h, q, column])}",
       {{1, 2, 1, 200, 100}},
       Layout::padded,
       {sm90}},
      {"turned_rows",
       "bf16:d64:causal:q_mod{" + std::string(kTurnedQ) + "}:k_mod{" + kTurnedK + "}",
       {{2, 4, 2, 170, 190}, {9, 4, 4, 65, 1}},
       Layout::padded},
      {"normed_packed_rows",
       "fp16:d128x96:q_mod{w: fp32 1d grad; element * rsqrt(sum_of_squares / 128.0 + 0.00001) * w[column]}"
       ":k_mod{w: fp32 1d grad; x: fp32 2d grad; element * w[column] + x[h_kv, kv]}:varlen:sinks",
       {{3, 4, 2, 130, 150}},
       Layout::bshd,
       {simt, sm80, sm90}},
      {"turned_keys",
       "bf16:d128:kvlen:fp32_grads:k_mod{a: fp32 1d; element * cos(a[column / 2] * to_float(kv)) + "
       "element_at(column ^ 1) * sin(a[column / 2] * to_float(kv)) * to_float(2 * (column & 1) - 1)}",
       {{2, 2, 1, 150, 170}},
       Layout::bhsd,
       {sm80, sm90}},
      {"rows_that_share_elements",
       "fp16:d72:det:q_mod{element + 0.5 * element_at(column / 2) * element_at(100)}",
       {{2, 2, 1, 70, 90}},
       Layout::bhsd,
       {simt, sm80}},
      {"scaled_rows",
       "fp32:d40:score{tanh(score)}:q_mod{s: fp32 2d grad; element * s[h, column]}:dropout",
       {{2, 2, 1, 70, 90}},
       Layout::bshd,
       {simt}},
      // Rows whose scores are all negative, and rows whose maximum grows from -32 past 0.
      {"signs",
       "bf16:d128:score{score + to_float(8 - 10 * (kv / 64 * (q % 3)) - 20 * (1 - min(q % 3, 1)))}:row_max",
       {{1, 2, 1, 70, 330}},
       Layout::bhsd,
       {sm90},
       "sm90:br128:bc64:w8:s2"},
      // What each family does in ways of its own.
      {"split",
       "fp16:d64:sinks:row_max",
       {{1, 4, 1, 1, 600}, {1, 2, 1, 70, 500}},
       Layout::bhsd,
       {sm80},
       "sm80:br64:bc64:w4:s2:split"},
      {"pairs",
       "bf16:d128:" + std::string(kCausalAlibi),
       {{2, 4, 2, 130, 300}},
       Layout::bhsd,
       {sm80},
       "",
       "sm80:br32:bc128:w8:s2:d_split2"},
      {"split", "fp16:d64:sinks", {{1, 2, 1, 70, 500}}, Layout::bhsd, {sm90}, "sm90:br64:bc64:w4:s2:split"},
      {"cluster",
       "fp16:d64:causal:sinks",
       {{1, 2, 1, 70, 500}, {2, 4, 2, 3, 1300}, {1, 2, 2, 1, 60}},
       Layout::bhsd,
       {sm90},
       "sm90:br64:bc64:w4:s2:split:cluster"},
      {"cluster_of_packed_heads",
       "bf16:d128:causal",
       {{2, 8, 2, 3, 700}},
       Layout::bshd,
       {sm90},
       "sm90:br64:bc64:w4:s2:split:pack_gqa:cluster"},
      {"pack",
       "bf16:d128:causal:kvlen:row_max",
       {{2, 8, 2, 5, 400}},
       Layout::bhsd,
       {sm90},
       "sm90:br64:bc64:w4:s2:split:pack_gqa"},
      {"held_q", "fp16:d96:causal:map64x64", {{2, 4, 2, 200, 333}}, Layout::bshd, {sm90}},
      {"two_tiles",
       "bf16:d64:map64x128:varlen",
       {{2, 4, 2, 333, 300}},
       Layout::bhsd,
       {sm90},
       "sm90:br128:bc64:w16:s3"},
      {"bias",
       "fp16:d64:score{bias: fp16 4d grad; score + bias[b, h, q, kv]}",
       {{1, 2, 2, 150, 200}},
       Layout::bhsd,
       {sm90}},
      {"cluster",
       "bf16:d128:causal:dropout",
       {{1, 4, 2, 200, 450}},
       Layout::bhsd,
       {sm90},
       "",
       "sm90:br64:bc256:w8:s2"},
      {"tma",
       "bf16:d64:causal",
       {{2, 4, 2, 170, 190}, {9, 4, 4, 65, 1}},
       Layout::bshd,
       {sm80},
       "sm80:br64:bc64:w4:tma"},
      {"tma_late",
       "fp16:d64:kvlen:row_max",
       {{3, 4, 2, 150, 210}},
       Layout::padded,
       {sm80},
       "sm80:br128:bc64:w4:tma"},
      {"tma_of_packed_rows",
       "fp16:d128:varlen:dropout:causal",
       {{3, 4, 2, 130, 150}},
       Layout::bhsd,
       {sm80},
       "sm80:br128:bc48:w8:tma"},
      {"tma_of_columns_with_padding",
       "bf16:d72x40:kvlen:sinks:mask{q >= kv && q - kv < 70}",
       {{3, 2, 1, 100, 210}},
       Layout::padded,
       {sm80},
       "sm80:br64:bc32:w4:tma"},
      {"tma_of_blocks",
       "bf16:d256:map64x64",
       {{1, 4, 2, 130, 330}},
       Layout::bhsd,
       {sm80},
       "sm80:br128:bc32:w8:q_in_registers:tma"},
      {"tma_of_splits",
       "fp16:d96:sinks",
       {{1, 4, 2, 70, 500}},
       Layout::bshd,
       {sm80},
       "sm80:br64:bc64:w4:split:tma"},
      {"tma_of_shared_rows",
       "bf16:d320x280:varlen:causal",
       {{2, 2, 1, 70, 150}},
       Layout::padded,
       {sm80},
       "sm80:br64:bc32:w8:d_split2:tma"},
      {"tma_of_shared_kv",
       "bf16:d128x64:causal_top_left:kvlen:shared_kv",
       {{2, 4, 2, 70, 190}},
       Layout::padded,
       {sm80},
       "sm80:br64:bc64:w4:tma"},
      {"shared_rows",
       "bf16:d320:causal:dropout",
       {{1, 2, 1, 70, 150}},
       Layout::padded,
       {sm80},
       "sm80:br64:bc64:w8:d_split4",
       "sm80:br32:bc64:w8:d_split2"},
      {"shared_rows_of_few_keys",
       "fp16:d576x512:varlen:dropout:det:row_max",
       {{2, 2, 1, 35, 50}},
       Layout::bshd,
       {sm80},
       "sm80:br32:bc16:w4:d_split2",
       "sm80:br16:bc16:w4:d_split4"},
      {"shared_rows_of_splits",
       "bf16:d272x24:sinks:mask{doc: int32 1d; doc[q] == doc[kv]}:kvlen",
       {{1, 4, 1, 33, 300}},
       Layout::bhsd,
       {sm80},
       "",
       "sm80:br32:bc32:w8:s2:d_split4:split"},
      {"shared_rows_of_eight_columns",
       "bf16:d288x8:causal",
       {{1, 2, 1, 33, 70}},
       Layout::bhsd,
       {sm80},
       "",
       "sm80:br32:bc64:w8:d_split2"},
      {"shared_rows_of_parts",
       "bf16:d24x264:map32x16:row_max",
       {{2, 2, 1, 60, 200}},
       Layout::bhsd,
       {sm80},
       "sm80:br32:bc32:w4:d_split2:split",
       "sm80:br64:bc32:w8:d_split4"},
      {"wide",
       "bf16:d320x256:causal:dropout",
       {{1, 2, 1, 150, 170}},
       Layout::padded,
       {sm90},
       "sm90:br128:bc48:w8:s2",
       "sm90:br64:bc64:w8:s2"},
      {"five_slices", "bf16:d320x256", {{2, 2, 1, 150, 300}}, Layout::bhsd, {sm90}, "", kFiveSlices},
      {"five_slices_of_causal_dropout",
       "bf16:d320x256:causal:dropout",
       {{1, 2, 1, 150, 170}},
       Layout::padded,
       {sm90},
       "",
       kFiveSlices},
      {"five_slices_of_packed_rows",
       "fp16:d264x200:causal:varlen",
       {{3, 2, 1, 150, 170}},
       Layout::bshd,
       {sm90},
       "",
       kFiveSlices},
      {"five_slices_in_order",
       "bf16:d296x64:det",
       {{1, 2, 1, 200, 333}},
       Layout::bhsd,
       {sm90},
       "",
       "sm90:br64:bc128:w8:s1"},
      {"shared_rows",
       "fp16:d320x280:causal:varlen",
       {{2, 2, 1, 70, 90}},
       Layout::bshd,
       {sm90},
       "sm90:br64:bc32:w8:s2:d_split2",
       "sm90:br64:bc64:w8:s2"},
      {"shared_rows_of_packed_heads",
       "bf16:d576x512:causal:kvlen",
       {{2, 16, 1, 3, 150}},
       Layout::bhsd,
       {sm90},
       "sm90:br64:bc32:w8:s2:d_split2:split:pack_gqa",
       "sm80:br16:bc16:w4:d_split4"},
      {"shared_kv",
       "bf16:d128x64:causal:dropout:shared_kv",
       {{2, 4, 2, 70, 190}},
       Layout::padded,
       {simt, sm80, sm90}},
      {"shared_kv_in_stages",
       "fp16:d192x128:kvlen:shared_kv",
       {{2, 4, 1, 70, 190}},
       Layout::bshd,
       {sm80},
       "sm80:br64:bc32:w4:s2"},
      {"shared_kv_of_shared_rows",
       "bf16:d320x280:mask{q >= kv && q - kv < 70}:shared_kv",
       {{1, 2, 1, 70, 150}},
       Layout::bhsd,
       {sm80},
       "sm80:br32:bc32:w4:d_split2"},
      {"latents_of_queries",
       "bf16:d328x320:causal:dropout:shared_kv:row_max",
       {{1, 2, 1, 150, 170}},
       Layout::padded,
       {sm90},
       "sm90:br64:bc48:w8:s2:d_split2"},
      {"shared_rows_in_one_stage",
       "fp16:d512:kvlen:row_max",
       {{2, 2, 1, 70, 250}},
       Layout::bhsd,
       {sm90},
       "sm90:br64:bc64:w8:d_split2",
       "sm90:br64:bc64:w8:s2"},
      {"shared_rows_of_lists",
       "bf16:d272x328:map64x64:score{t: fp32 1d; score * t[kv]}",
       {{1, 2, 1, 170, 300}},
       Layout::bhsd,
       {sm90},
       "sm90:br64:bc64:w8:s2:d_split2",
       "sm90:br64:bc64:w8:s2"},
      {"split_columns", "bf16:d384x392:det:sinks:fp32_grads", {{1, 4, 2, 70, 90}}, Layout::bshd, {sm90}},
      {"split_columns_and_queries",
       "fp16:d8x512:mask{doc: int32 1d; doc[q] == doc[kv]}",
       {{1, 4, 1, 300, 100}},
       Layout::bhsd,
       {sm90},
       "",
       "sm90:br64:bc64:w8:s1:split"},
      {"indices", "bf16:d64:causal:indices", {{2, 6, 2, 5, 150}, {1, 70, 1, 3, 90}}, Layout::padded},
      {"indices_of_packed_queries", "fp16:d72x40:varlen:sinks:indices", {{3, 4, 1, 9, 200}}, Layout::bshd},
      {"indices_and_lengths", "bf16:d128:kvlen:indices", {{3, 3, 3, 4, 100}}},
      {"indices_of_latents", "fp16:d576x512:shared_kv:indices", {{2, 16, 1, 2, 120}}, Layout::bshd},
      {"indices_and_programs",
       "bf16:d64:" + std::string(kCausalAlibi) + ":indices:row_max",
       {{2, 20, 2, 3, 70}},
       Layout::bhsd,
       {simt}},
      {"sums_of_many_queries", "fp32:d64", {{1, 64, 1, 128, 1}}, Layout::bhsd, {simt}},
      {"wide_dims", "bf16:d320x264:causal", {{1, 2, 2, 50, 70}}, Layout::padded, {simt}},
      {"wide", "fp16:d256:causal", {{1, 4, 2, 150, 200}}, Layout::bhsd, {sm90}, "", "sm90:br64:bc64:w8"},
      {"wide_cluster", "bf16:d256", {{2, 2, 1, 150, 200}}, Layout::bhsd, {sm90}, "", "sm90:br64:bc128:w8:s2"},
      {"fp32_out", "bf16:d72x40:causal:varlen:sinks:fp32_out", {{2, 4, 2, 130, 100}}, Layout::padded},
      {"fp32_out_of_hopper",
       "fp16:d128:causal:kvlen:dropout:fp32_out",
       {{2, 2, 1, 90, 90}},
       Layout::bshd,
       {sm90}},
      {"fp32_grads",
       "bf16:d72x40:causal:det:sinks:fp32_grads",
       {{2, 4, 2, 130, 150}, {1, 2, 1, 70, 20}},
       Layout::padded},
      {"dropout_place",
       "bf16:d128:causal:dropout:dropout_place",
       {{2, 4, 2, 130, 150}, {1, 2, 1, 70, 90}, {2, 2, 1, 65, 33}}},
      {"dropout_place",
       "fp16:d64:varlen:dropout:dropout_place:fp32_grads",
       {{3, 4, 2, 60, 90}, {2, 2, 1, 150, 30}, {2, 2, 2, 33, 65}}},
      {"dropout_place_of_wide_heads",
       "bf16:d320x256:dropout:dropout_place",
       {{1, 2, 1, 70, 90}, {1, 2, 1, 33, 70}, {1, 2, 1, 17, 33}},
       Layout::padded,
       {sm80, sm90}},
      {"fp32_grads_of_documents", "fp16:d64:varlen:dropout:fp32_grads", {{3, 4, 2, 100, 90}}, Layout::bshd},
      {"fp32_grads_of_keys_without_queries",
       "bf16:d128:mask{q >= kv && q - kv < 70}:fp32_grads",
       {{1, 2, 1, 70, 400}}},
      {"fp32_grads_of_splits",
       "bf16:d64:fp32_grads",
       {{1, 4, 1, 300, 100}},
       Layout::bhsd,
       {sm90},
       "",
       "sm90:br64:bc128:w8:s2:split"},
      {"fp32_grads_of_splits",
       "fp16:d64:fp32_grads",
       {{1, 4, 1, 300, 100}},
       Layout::bhsd,
       {sm80},
       "",
       "sm80:br64:bc64:w4:s1:split"},
      {"fp32_grads_of_shared_rows",
       "bf16:d320x280:causal:fp32_grads",
       {{1, 2, 1, 70, 90}},
       Layout::bhsd,
       {sm80},
       "",
       "sm80:br16:bc32:w8:d_split4"},
      // No preprocess entry: the clusters find D and LSE themselves.
      {"clusters_that_find_d",
       "bf16:d64:causal",
       {{1, 1, 1, 300, 500}, {1, 2, 1, 100, 400}},
       Layout::bshd,
       {sm90},
       "",
       "sm90:br128:bc512:w8:s2"},
      {"clusters_that_find_d",
       "fp16:d128x96",
       {{2, 2, 1, 130, 250}},
       Layout::bhsd,
       {sm90},
       "",
       "sm90:br64:bc256:w8:s2"},
      {"fp32_grads_of_clusters",
       "bf16:d128:causal:fp32_grads",
       {{1, 4, 2, 200, 450}},
       Layout::bhsd,
       {sm90},
       "",
       "sm90:br64:bc256:w8:s2"},
  };
  return all;
}

AttentionCase case_of(const Problems& problem, const AttentionShape& shape, Family family, unsigned seed) {
  AttentionCase test{.spec = spec_for(family, problem.spec),
                     .shape = shape,
                     .family = family,
                     .layout = problem.layout,
                     .map_heads = shape.heads_q,
                     .variant = problem.name,
                     .seed = seed};
  if (test.spec.dropout) test.dropout_p = 0.2;
  if (test.spec.indices) test.top_k = 40 + seed % 3 * 50;
  test.built_lists = test.spec.has_block_map();
  vary(test);
  return test;
}

struct EmulatedCase {
  AttentionCase attention;
  const Problems* problem;
};
void PrintTo(const EmulatedCase& test, std::ostream* out) { PrintTo(test.attention, out); }

std::vector<EmulatedCase> cases() {
  std::vector<EmulatedCase> result;
  for (const Problems& problem : problems())
    for (const Family family : problem.families)
      for (const AttentionShape& shape : problem.shapes)
        result.push_back({case_of(problem, shape, family, static_cast<unsigned>(result.size())), &problem});
  return covering(result, [](const EmulatedCase& test) {
    return shown_by(KernelSpec{test.attention.spec}, test.attention.family, test.problem->name);
  });
}

/// The kernels are compiled once for all shapes.
class Emulated : public GpuTestWith<EmulatedCase> {
 protected:
  static void SetUpTestSuite() { runtime_ = std::make_unique<TemporaryRuntime>(); }
  static void TearDownTestSuite() { runtime_.reset(); }

  static TileConfig config(const char* given, Pass pass) {
    const AttentionCase& test = GetParam().attention;
    return *given ? parse_config(given) : heuristic(test.family, test.spec, test.shape, pass);
  }
  static Runtime& runtime() { return runtime_->get(); }

 private:
  inline static std::unique_ptr<TemporaryRuntime> runtime_;
};

TEST_P(Emulated, MatchesTheReference) {
  const auto& [test, problem] = GetParam();
  SCOPED_TRACE(to_string(test.spec) + " " + to_string(test.shape));
  AttentionRun run(test);
  for (int order = 0; order < 2; ++order) {  // of all that may happen in any order
    run.check_forward(runtime(), config(problem->forward, Pass::forward));
    run.check_backward(runtime(), config(problem->backward, Pass::backward));
  }
}

INSTANTIATE_TEST_SUITE_P(Attention, Emulated, testing::ValuesIn(cases()),
                         [](const auto& test) { return name_of(test.param.attention); });

}  // namespace
}  // namespace flashjit::test

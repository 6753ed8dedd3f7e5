// What the append, merge and quantize entries take, by value. Host and device include this file.
#pragma once

#if defined(__CUDACC__)
#include "flashjit/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flashjit {

/// Head dimensions are at most 576, so that a rotation has fewer than 2^9 pairs.
constexpr int kRopeFactors = 9;

/// The rotation of a head's first dimensions, pair by pair.
struct RopeParam {
  const void *cos, *sin;  ///< [table_rows, pairs], of fp32 or the problem's type; null: from the turns below
  long long stride;       ///< from one position of the tables to the next
  int table_rows;
  int fp32_tables;
  int pairs;                     ///< 0: nothing is rotated
  int interleaved;               ///< pairs of dimensions (2i, 2i + 1); else (i, i + pairs)
  const int* positions;          ///< one for each row; null: the number of its key
  int sections[3];               ///< M-RoPE: pairs of each array of positions; zeros: there is one
  int interleaved_sections;      ///< pairs take turns
  int position_count;            ///< of an array of positions
  double turns;                  ///< of pair 0 for each position
  double factors[kRopeFactors];  ///< turns of pair i + 2^n over pair i's
};

/// RMS norm of a head's rows; null: none.
struct NormParam {
  const void* weight;  ///< [head_dim], of fp32 or the problem's type
  int fp32;
  float eps;
};

/// What the append entry takes.
struct AppendParams {
  TensorParam k, v, q, q_out;  ///< the new rows: [batch, heads, rows, dim], or packed in batch 0
  TensorParam k_cache, v_cache;
  ScaleParam k_scale,
      v_scale;  ///< of codes in the cache; with Problem::kKeyScales each key's, which is written
  PageTableParam page_table;
  const int* kv_lengths;  ///< [batch], with the new rows
  const int* cu_seqlens;  ///< varlen: [batch + 1]
  int batch, rows, heads_kv, heads_q;
  int seqlen_kv;  ///< the most keys of a sequence
  RopeParam rope;
  const void* slots;  ///< the cache's row for each new row, in place of lengths and table; null: none
  int wide_slots;     ///< int64, else int32
  int slot_rows;      ///< of a page or slot of the cache
  int slot_pages;     ///< pages or slots of the cache
  NormParam k_norm, q_norm;
  TensorParam k_block_scale, v_block_scale;  ///< of formats whose scales are apart, written
};

/// The most states that the merge entry takes, and dimensions of O that a thread of it does.
constexpr int kMaxPartialStates = 8, kMergedDims = 8;

/// What the merge entry takes.
struct MergeParams {
  TensorParam o[kMaxPartialStates];
  RowsParam lse[kMaxPartialStates];
  TensorParam out;
  RowsParam lse_out;  ///< null: not wanted
  int count;          ///< of states
  int batch, heads, seqlen;
  int fp32_parts, fp32_out;  ///< else they are of the problem's type
};

/// What the quantize entries take.
struct QuantizeParams {
  TensorParam x, codes;  ///< [batch, heads, rows, dim]
  ScaleParam scale;      ///< written; strides are 0 where rows share one, pages are the batch
  int batch, heads, rows;
  int scales_b, scales_h;  ///< how many there are, but for rows
  int heads_of_scale;      ///< that share one
  int scale_of_row;        ///< each row has its own
  int hadamard;
  RopeParam rope;           ///< positions [batch, rows]; null: the number of the row
  TensorParam block_scale;  ///< of a format whose scales are apart, written
};

}  // namespace flashjit

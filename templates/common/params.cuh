// What a launch hands to a kernel, by value. Host and device include this file, so that it exists once.
#pragma once

namespace flashjit {

/// Pointer and strides, in elements, of a tensor [batch, heads, length, dim] whose last stride is 1.
struct TensorParam {
  void* data;
  long long stride_b, stride_h, stride_s;
};

/// Lists of the tiles that a block map and a mask leave, made by the block_lists entry; a set of lists for
/// each batch entry and head that they tell apart.
struct BlockListParam {
  int* count;    ///< [sets, rows]: tiles in the row's list
  int* entries;  ///< [sets, rows, columns]: the tiles and what is known of them, see common/tile_walk.cuh
  int* rank;   ///< like entries, backward with deterministic only: the tile's place in its Q tile's own list
  int* reads;  ///< [sets, q_tiles, q_reads, 2], then [sets, kv_tiles, kv_reads, 2]: smallest and largest
               ///< value of what the mask reads over each tile's rows; made by the tile_reads entry
};

/// Rows of dK and dV that a block of the join_gradients entry joins, and the most parts that it can.
constexpr int kJoinedRows = 8, kMostQueryParts = 32;

constexpr int kMaxCaptures = 8, kMaxScalars = 8;

/// How many counters Params::tickets has, see templates/common/tile_walk.cuh: of all blocks, for each head of
/// K and V, and at most for each Q tile of a head whose dQ is added to in turns.
constexpr int kWorkCounters = 4, kHeadCounters = 2, kTurnParts = 4;

/// A captured tensor; unused dimensions have size 1 and stride 0.
struct CaptureParam {
  const void* data;
  float* grad;
  long long stride[4];  ///< in elements
  int size[4];
};

/// The heads of Q that share one of K and V, where a forward kernel packs them: row r of a warp group is of
/// query r / heads and of head r % heads of a set.
struct PackedHeadsParam {
  int shared;   ///< heads of Q for each of K and V
  int heads;    ///< of a set: all of these, or as many as make equal sets, the last of which may lack some
  int sets;     ///< for each head of K and V
  int queries;  ///< of a warp group
  unsigned inverse;  ///< 2^16 / heads, rounded up: row * inverse / 2^16 is row / heads
};

struct Params {
  TensorParam q, k, v, o, dout, dq, dk, dv;
  float* lse;             ///< [batch, heads_q, seqlen_q]; null: not wanted
  const int* kv_lengths;  ///< [batch]; read with Problem::kKvLengths only
  float* d;               ///< [batch, heads_q, seqlen_q_padded]: rowsum(dO * O)
  float* lse_log2;  ///< [batch, heads_q, seqlen_q_padded]: LSE * log2(e), but +inf for rows that attend to
                    ///< nothing or do not exist: their P is exp2(S - inf) = 0
  float* dq_accum;  ///< [batch, heads_q, seqlen_q_padded, head_dim]: dQ / softmax_scale in fp32
  int* tickets;     ///< what blocks count, see templates/common/tile_walk.cuh
  const unsigned char* block_map;  ///< [map_batch, map_heads, map_rows, map_columns]
  BlockListParam lists;  ///< forward: rows are Q tiles, columns KV tiles; backward: the other way round
  int map_batch, map_heads, map_rows, map_columns;  ///< map_batch and map_heads are 1 where they broadcast
  int batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  int seqlen_q_padded;  ///< seqlen_q rounded up to a multiple of 128
  int heads_cleared;    ///< of [batch, heads_kv], whose dq_accum the preprocess entry clears
  float softmax_scale;
  float softmax_scale_log2;  ///< times log2(e)
  float keep_scale;          ///< 1 / (1 - p)
  unsigned drop_share;       ///< 2^15 p in each half, see draw_dropped()
  unsigned seed_lo, seed_hi, offset_lo, offset_hi;
  CaptureParam captures[kMaxCaptures];
  unsigned scalars[kMaxScalars];  ///< bits of an int or a float
  const int* cu_seqlens_q;        ///< varlen: [batch + 1]
  const int* cu_seqlens_kv;
  const float* sinks;  ///< [heads_q]
  float* dsinks;
  float* o_parts;    ///< [parts, batch, heads_q, seqlen_q, head_dim_v]: O from one part of the keys alone
  float* lse_parts;  ///< [parts, batch, heads_q, seqlen_q]: its LSE, without sinks
  int parts;  ///< in how many parts blocks share what a tile meets, see common/tile_parts.cuh; read, as
              ///< theirs are, with kInParts only
  int rows_q, rows_kv;  ///< varlen: of the packed tensors, or 2^31 - 1 where lists are built, which has none
  PackedHeadsParam packed;  ///< read with kPacksHeads only
  float* query_values;      ///< [batch, heads_q, seqlen_q_padded]: Problem::query_value(); null: not wanted
  float* dk_parts;  ///< [parts, batch, heads_kv, seqlen_kv, head_dim]: dK from one part of the queries alone
  float* dv_parts;  ///< [parts, batch, heads_kv, seqlen_kv, head_dim_v]
  int heads_mixed;  ///< of [batch, heads_kv] the last ones, whose KV tiles come by their place, see
                    ///< with_mixed_heads(); read with kMixesHeads only
  int zero_unused_rows;       ///< varlen: whether rows that belong to no sequence become zeros
  const float* dlse;          ///< [batch, heads_q, seqlen_q]: the gradient of LSE; null: there is none
  const unsigned* rng_state;  ///< dropout: seed_lo to offset_hi on the device; null: those above
};

}  // namespace flashjit

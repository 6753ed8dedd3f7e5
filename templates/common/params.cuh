// What a launch hands to a kernel, by value. Host and device include this file, so that it exists once.
#pragma once

namespace flashjit {

/// Pointer and strides, in elements, of a tensor [batch, heads, length, dim] whose last stride is 1.
struct TensorParam {
  void* data;
  long long stride_b, stride_h, stride_s;
};

/// Pointer and strides, in elements, of one float for each row of [batch, heads, length].
struct RowsParam {
  float* data;
  long long stride_b, stride_h, stride_s;
};

/// The tiles that a block map and a mask leave, as lists that the tile_lists entry makes: one set for each
/// batch entry and head that they tell apart.
struct TileListParam {
  int* count;    ///< [sets, rows]: tiles in the row's list
  int* entries;  ///< [sets, rows, columns]: the tiles and what is known of them, see common/tile_lists.cuh
  int* rank;     ///< like entries, backward with deterministic only: the tile's rank in its Q tile's list
  int* term_bounds;  ///< [sets, q_tiles, row_terms, 2], then [sets, kv_tiles, column_terms, 2]: smallest and
                     ///< largest value of the mask's terms over each tile; made by the term_bounds entry
};

/// Rows of dK and dV that a CTA of the combine_dkdv entry adds up, and the most splits that it can.
constexpr int kCombinedRows = 8, kMaxQuerySplits = 32;

/// Keys of a split where these depend on nothing but a row's own keys, and the KV tiles that it has.
constexpr int kKeysOfSplit = 2048;
/// Rows of O that a CTA of the combine entry does, where there are many.
constexpr int combined_rows_of_cta(int head_dim_v) {
  return head_dim_v <= 128 ? 16 : head_dim_v <= 256 ? 8 : 4;
}
constexpr int tiles_of_split(int bc) { return bc < kKeysOfSplit ? kKeysOfSplit / bc : 1; }

constexpr int kMaxCaptures = 16, kMaxScalars = 8;

/// Rows of whose LSE the preprocess entry says together whether any is large: a warp's.
constexpr int kLseRows = 32;

/// Warps of a CTA that find D and LSE, where clusters do so: all but the producer's.
constexpr int kRowStatsWarps = 11;

/// How many ints Params::semaphores has (common/semaphores.cuh): tile counters, semaphores for each KV head,
/// and with ordered additions at most kDqSemaphores for each Q tile of a head.
constexpr int kTileCounters = 4, kHeadSemaphores = 2, kDqSemaphores = 4;
/// And with kClaimsTiles: see sm90/backward_schedule.cuh.
constexpr int kClaimableTiles = 255, kTileClaims = 1 + kClaimableTiles;

/// A captured tensor; unused dimensions have size 1 and stride 0.
struct CaptureParam {
  const void* data;
  float* grad;
  long long stride[6];  ///< in elements
  int size[6];
};

/// The heads of Q that share one of K and V, where a forward kernel packs them: row r of a warpgroup is of
/// query r / heads and of head r % heads of a set.
struct PackedHeadsParam {
  int shared;   ///< heads of Q for each of K and V
  int heads;    ///< of a set: all of these, or as many as make equal sets, the last of which may lack some
  int sets;     ///< for each head of K and V
  int queries;  ///< of a warpgroup
  unsigned inverse;  ///< 2^16 / heads, rounded up: row * inverse / 2^16 is row / heads
};

/// Where a cache has the keys of its sequences. A slot is one page that holds all of a sequence's keys.
struct PageTableParam {
  const int* pages;   ///< [batch, columns]: a page's batch index in K and V; null: that of the sequence
  int stride;         ///< from one sequence to the next
  int count;          ///< pages of K and V
  const int* starts;  ///< where each sequence's entries begin in `pages`, which is one row; null: it has rows
  unsigned entries;   ///< in that row
};

/// The keys that queries attend to, [batch, queries, heads_kv, count]; packed queries are in batch 0.
struct IndicesParam {
  const int* keys;
  long long stride_b, stride_q, stride_h;
  int count;
  const int* topk_length;  ///< [batch, queries], like keys: how many entries of a list count; null: all
  long long length_stride_b, length_stride_q;
};

/// Where the call's rows, keys and heads are in the problem whose dropout mask they get: row i is at q +
/// q_step * i.
struct DropoutPlaceParam {
  unsigned first_head;  ///< among [batch, heads]
  int heads;            ///< of a batch entry there
  int q, q_step, kv, kv_step;
  int whole_cells;  ///< whether the pairs of a Philox call are those of another there, see dropout_words()
};

/// Scales of K or V, whose strides are 0 where they are shared; those of pages and rows are read with
/// Problem::kKeyScales only.
struct ScaleParam {
  float* data;
  long long stride_b, stride_page, stride_h, stride_s;
};

/// Stream-K: the work tile that begins in a share and ends in a later one.
struct CutTile {
  int batch_head, q_tile;
  int shares_end;  ///< the end of the shares that have parts of it; 0: there is none
  int continues;   ///< the share in which the tile of this share's first part begins, if in an earlier one;
                   ///< else -1
};

/// Cascade: the shares that have parts of a work tile.
struct SharesOfTile {
  int begin, end;
};

struct Params {
  TensorParam q, k, v, o;
  union {
    TensorParam dout;
    TensorParam o_state;  ///< fp32; read with kRunningState only
  };
  TensorParam dq;
  union {
    TensorParam dk;
    TensorParam k_block_scale;  ///< read with a KFormat whose scales are apart only
  };
  union {
    TensorParam dv;
    TensorParam v_block_scale;  ///< the same of VFormat
  };
  RowsParam lse;          ///< null: not wanted; dlse, lse_state and row_max have its strides
  const int* kv_lengths;  ///< [batch]; read with Problem::kKvLengths and kCache only
  float* d;               ///< [batch, heads_q, seqlen_q_padded]: rowsum(dO * O)
  float* lse_padded;      ///< [batch, heads_q, seqlen_q_padded]: LSE, but +inf for rows without P, see
                          ///< lse_gives_p(), or that do not exist: it is exp2(S - inf) = 0; with kLseLog2
                          ///< what common/lse_log2.cuh says follows
  float* dq_accum;        ///< [batch, heads_q, seqlen_q_padded, head_dim]: dQ / softmax_scale in fp32
  int* semaphores;        ///< tile counters and semaphores, see common/semaphores.cuh
  const unsigned char* block_map;  ///< [map_batch, map_heads, map_rows, map_columns]
  TileListParam lists;  ///< forward: rows are Q tiles, columns KV tiles; backward: the other way round
  int map_batch, map_heads, map_rows, map_columns;  ///< map_batch and map_heads are 1 where they broadcast
  int batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  int seqlen_q_padded;  ///< seqlen_q rounded up to a multiple of 128
  int heads_cleared;    ///< of [batch, heads_kv], whose dq_accum the preprocess entry clears
  float softmax_scale;
  float softmax_scale_log2;  ///< times log2(e)
  float keep_scale;          ///< 1 / (1 - p)
  unsigned drop_share;       ///< 2^15 p in each half, see draw_dropped()
  unsigned seed_lo, seed_hi, offset_lo, offset_hi;
  const int* cu_seqlens_q;  ///< varlen: [batch + 1]
  union {
    const int* cu_seqlens_kv;
    const int* prefix_length;  ///< of a cache: first keys that all sequences share; read with kCascade only
  };
  const float* sinks;  ///< [heads_q]
  float* dsinks;
  float* o_splits;      ///< [num_splits, batch, heads_q, seqlen_q, head_dim_v]: O of one split of the keys
  float* lse_splits;    ///< [num_splits, batch, heads_q, seqlen_q]: its LSE, without sinks
  int num_splits;       ///< split-KV (backward: split-Q), see common/split.cuh; read with kSplit only, as are
                        ///< o_splits, lse_splits, dk_splits and dv_splits
  int rows_q, rows_kv;  ///< varlen: of the packed tensors, or 2^31 - 1 where lists are built, which has none
  PackedHeadsParam packed;  ///< read with kPackGqa only
  float* row_terms;  ///< [batch, heads_q, seqlen_q_padded]: Problem::score_row_term(); null: not wanted
  float* dk_splits;  ///< [num_splits, batch, heads_kv, seqlen_kv, head_dim]: dK of one split of the queries
  float* dv_splits;  ///< [num_splits, batch, heads_kv, seqlen_kv, head_dim_v]
  int lpt_heads;     ///< how many of the last [batch, heads_kv] come in lpt_order(); read with kLptOrder only
  int zero_unused_rows;  ///< varlen: whether rows that belong to no sequence become zeros
  union {
    const float* dlse;       ///< like lse: its gradient; null: there is none
    const float* lse_state;  ///< like lse; read with kRunningState only
  };
  const unsigned* rng_state;  ///< dropout: seed_lo to offset_hi on the device; null: those above
  PageTableParam page_table;  ///< read with Problem::kCache only
  int head_lanes;             ///< stream-K: how many heads are computed at a time, see tma/stream_k.cuh
  union {
    CutTile* cut_tiles;  ///< stream-K: [num_splits], the number of shares; o_splits and lse_splits are then
                         ///< [2 num_splits, Br], of the parts of work tiles
    SharesOfTile* shares_of_tile;  ///< cascade: of each work tile; o_splits and lse_splits have rows of parts
  };
  float* row_max;                 ///< like lse: the largest score of a row; read with kRowMax only
  unsigned scalars[kMaxScalars];  ///< bits of an int or a float
  CaptureParam captures[kMaxCaptures];
  ScaleParam k_scale, v_scale;  ///< read with K and V of 8 bits only
  ScaleParam q_scale;           ///< read with Problem::kQCodes only
  union {
    IndicesParam indices;  ///< read with Problem::kIndices only
    TensorParam out_mod;   ///< read with Problem::kOutMod only. Forward: O before the program; null: not
                          ///< wanted. Backward: dO of what it gave, from which the out_grads entry makes dout
  };
  DropoutPlaceParam dropout_place;  ///< read with Problem::kDropoutPlace only

  /// How many query heads share a head of K and V.
  constexpr int qhead_per_kvhead() const { return heads_q / heads_kv; }
};

}  // namespace flashjit

// What a launch hands to a kernel, by value. Host and device include this file, so that it exists once. The
// host has all members of Params; a kernel has those that its plan names, see FLASHJIT_PARAMS_BYTES below.
#pragma once

// A rendered source defines how many bytes its Params have and a word for each group of members: nothing
// where the kernel has the group, else `static`, whose members take no space. One without a definition may
// stand in code that is never run; a kernel that reads it is refused after it was compiled (runtime/compile).
#if !defined(FLASHJIT_PARAMS_BYTES)
#define FLASHJIT_IF_GRADIENTS
#define FLASHJIT_IF_TILE_LISTS
#define FLASHJIT_IF_BLOCK_MAP
#define FLASHJIT_IF_VARLEN
#define FLASHJIT_IF_KV_LENGTHS
#define FLASHJIT_IF_SPLIT
#define FLASHJIT_IF_PACK_GQA
#define FLASHJIT_IF_DROPOUT
#define FLASHJIT_IF_SCALES
#define FLASHJIT_IF_INDICES
#define FLASHJIT_IF_Q_ROPE
#define FLASHJIT_IF_JOINED_LISTS
#define FLASHJIT_IF_OUT_MOD
#define FLASHJIT_IF_OUT_CODES
#define FLASHJIT_IF_ROW_MODS
#define FLASHJIT_IF_RUNNING_STATE
#define FLASHJIT_IF_SKIP_SOFTMAX
#define FLASHJIT_IF_CAPTURES
#define FLASHJIT_IF_SCALARS
#define FLASHJIT_CAPTURES flashjit::kMaxCaptures
#define FLASHJIT_SCALARS flashjit::kMaxScalars
#elif defined(__CUDACC__)
#pragma nv_diag_suppress 20044  // a static member without a definition
#endif

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
/// KV tiles of a fixed part (tma/fixed_parts.cuh) of a sequence of `keys`: half the tiles if it would have
/// three or four parts, so that one sequence alone gives more of a device work.
constexpr int tiles_of_part(int bc, int keys) {
  const bool halves = keys > 2 * kKeysOfSplit && keys <= 4 * kKeysOfSplit;
  return halves ? (tiles_of_split(bc) + 1) / 2 : tiles_of_split(bc);
}
constexpr int parts_of_keys(int bc, int keys) {
  const int of_part = tiles_of_part(bc, keys) * bc;
  return (keys + of_part - 1) / of_part;
}

/// CTAs of a cluster that share the keys of a Q tile.
constexpr int kJoiningCtas = 8;

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
  int heads;    ///< of a set: all that share one of K and V, or as many as make equal sets; the last set may
                ///< lack some
  int sets;     ///< for each head of K and V
  int queries;  ///< of a warpgroup
  unsigned inverse;  ///< 2^16 / heads, rounded up: row * inverse / 2^16 is row / heads
  int shared;        ///< heads of Q for each of K and V
};

/// Where a cache has the keys of its sequences. A slot is one page that holds all of a sequence's keys.
struct PageTableParam {
  const int* pages;   ///< [batch, columns]: a page's batch index in K and V; null: the sequence's
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

/// The most queries whose lists are joined, a bit of a byte each; keys that a joined list has room for, for
/// each of its queries.
constexpr int kMostJoinedQueries = 8, kJoinedKeysOfQuery = 2048;

/// Joined lists, [batch, Q tiles, heads_kv]: see common/joined_list.cuh.
struct JoinedListsParam {
  int* lengths;            ///< see stored_length()
  int* keys;               ///< of each list `capacity`
  unsigned char* queries;  ///< like keys: which of the tile's queries have the key, a bit for each
  int capacity;
};

/// Where the call's rows, keys and heads are in the problem whose dropout mask they get: row i is at q +
/// q_step * i.
struct DropoutPlaceParam {
  unsigned first_head;  ///< among [batch, heads]
  int heads;            ///< of a batch entry there
  int q, q_step, kv, kv_step;
  int whole_cells;  ///< whether a Philox call's pairs are one call's there, too: see dropout_words()
};

/// Rows of Q or K that a CTA of the row_mods and row_mod_grads entries has.
constexpr int kRowsOfModCta = 64;

/// Q, K, dQ and dK as the call has them, where q_mod or k_mod makes others, which Params::q, k, dq and dk
/// are.
struct GivenRowsParam {
  TensorParam q, k, dq, dk;
};

/// Scales of K or V, whose strides are 0 where they are shared; strides of pages and rows are read with
/// Problem::kKeyScales only.
struct ScaleParam {
  float* data;
  long long stride_b, stride_page, stride_h, stride_s;
};

/// Stream-K: the work tile that begins in a segment and ends in a later one.
struct PartialTile {
  int batch_head, q_tile;
  int segments_end;  ///< the end of the segments that have parts of it; 0: there is none
  int continues;     ///< the segment in which the tile of this one's first part begins, if in an earlier one;
                     ///< else -1
};

/// Cascade: the segments that have parts of a work tile.
struct SegmentsOfTile {
  int begin, end;
};

/// Members that only some kernels have are in groups: runtime/plan/params_layout.cpp says which kernel has
/// which. A group begins with a member that is aligned to 8 bytes. Which members are neighbours at 8 bytes
/// matters: kernels may load these together.
struct Params {
  TensorParam q, k, v, o;
  RowsParam lse;       ///< null: not wanted; dlse, lse_state and row_max have its strides
  int* semaphores;     ///< tile counters and semaphores, see common/semaphores.cuh
  const float* sinks;  ///< [heads_q]
  int batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  int seqlen_q_padded;  ///< seqlen_q rounded up to a multiple of 128
  int heads_cleared;    ///< backward: of [batch, heads_kv], whose dq_accum the preprocess entry clears
  float softmax_scale;
  float softmax_scale_log2;  ///< times log2(e)
  float keep_scale;          ///< dropout: 1 / (1 - p)
  float* row_max;            ///< like lse: the largest score of a row; read with kRowMax only

  FLASHJIT_IF_GRADIENTS TensorParam dout, dq, dk, dv;
  FLASHJIT_IF_GRADIENTS const float* dlse;  ///< like lse: its gradient; null: there is none
  FLASHJIT_IF_GRADIENTS float* d;           ///< [batch, heads_q, seqlen_q_padded]: rowsum(dO * O)
  /// [batch, heads_q, seqlen_q_padded]: LSE, but +inf for rows without P, see lse_gives_p(), or that do not
  /// exist: it is exp2(S - inf) = 0; with kLseLog2 what common/lse_log2.cuh says follows.
  FLASHJIT_IF_GRADIENTS float* lse_padded;
  /// [batch, heads_q, seqlen_q_padded, head_dim]: dQ / softmax_scale in fp32.
  FLASHJIT_IF_GRADIENTS float* dq_accum;
  /// [batch, heads_q, seqlen_q_padded]: Problem::score_row_term(); null: not wanted.
  FLASHJIT_IF_GRADIENTS float* row_terms;
  /// [num_splits, batch, heads_kv, seqlen_kv, head_dim or head_dim_v]: dK and dV of one split of the queries;
  /// read with kSplit only.
  FLASHJIT_IF_GRADIENTS float *dk_splits, *dv_splits;
  FLASHJIT_IF_GRADIENTS float* dsinks;
  /// How many of the last [batch, heads_kv] come in lpt_order(); read with kKvTileLptOrder only.
  FLASHJIT_IF_GRADIENTS int lpt_heads;

  /// Forward: rows are Q tiles, columns KV tiles; backward: the other way round.
  FLASHJIT_IF_TILE_LISTS TileListParam lists;

  FLASHJIT_IF_BLOCK_MAP const unsigned char* block_map;  ///< [map_batch, map_heads, map_rows, map_columns]
  FLASHJIT_IF_BLOCK_MAP int map_batch, map_heads;        ///< 1 where they broadcast
  FLASHJIT_IF_BLOCK_MAP int map_rows, map_columns;

  FLASHJIT_IF_VARLEN const int* cu_seqlens_q;  ///< [batch + 1]
  FLASHJIT_IF_VARLEN const int* cu_seqlens_kv;
  FLASHJIT_IF_VARLEN int zero_unused_rows;  ///< whether rows that belong to no sequence become zeros
  /// Rows of the packed tensors; 2^31 - 1 where lists are built, which has no tensors.
  FLASHJIT_IF_VARLEN int rows_q, rows_kv;

  FLASHJIT_IF_KV_LENGTHS const int* kv_lengths;  ///< [batch]
  /// Keys that all sequences share; read with kCascade only.
  FLASHJIT_IF_KV_LENGTHS const int* prefix_length;
  FLASHJIT_IF_KV_LENGTHS PageTableParam page_table;  ///< read with Problem::kCache only

  /// [num_splits, batch, heads_q, seqlen_q, head_dim_v]: O of one split of the keys. Of stream-K [2
  /// num_splits, Br], of the parts of work tiles, of a cascade rows of parts; so of lse_splits.
  FLASHJIT_IF_SPLIT float* o_splits;
  FLASHJIT_IF_SPLIT float* lse_splits;  ///< [num_splits, batch, heads_q, seqlen_q]: its LSE, without sinks
  FLASHJIT_IF_SPLIT PartialTile* partial_tiles;        ///< stream-K: [num_splits], or null: no tile is cut
  FLASHJIT_IF_SPLIT SegmentsOfTile* segments_of_tile;  ///< cascade: of each work tile
  FLASHJIT_IF_SPLIT int num_splits;                    ///< split-KV (backward: split-Q), see common/split.cuh
  alignas(8) FLASHJIT_IF_SPLIT
      int head_groups;  ///< where CTAs have segments: heads computed at a time, see tma/stream_k.cuh

  alignas(8) FLASHJIT_IF_PACK_GQA PackedHeadsParam packed;

  FLASHJIT_IF_DROPOUT const unsigned* rng_state;        ///< seed_lo to offset_hi on the device; null: these
  FLASHJIT_IF_DROPOUT DropoutPlaceParam dropout_place;  ///< read with Problem::kDropoutPlace only
  alignas(8) FLASHJIT_IF_DROPOUT unsigned drop_share;   ///< 2^15 p in each half, see draw_dropped()
  FLASHJIT_IF_DROPOUT unsigned seed_lo, seed_hi, offset_lo, offset_hi;

  FLASHJIT_IF_SCALES ScaleParam k_scale, v_scale;
  FLASHJIT_IF_SCALES ScaleParam q_scale;         ///< read with Problem::kQCodes only
  FLASHJIT_IF_SCALES TensorParam k_block_scale;  ///< read with a KFormat whose scales are apart only
  FLASHJIT_IF_SCALES TensorParam v_block_scale;  ///< the same of VFormat

  FLASHJIT_IF_INDICES IndicesParam indices;

  FLASHJIT_IF_Q_ROPE TensorParam q_rope;  ///< Q's columns behind V's

  FLASHJIT_IF_JOINED_LISTS JoinedListsParam joined_lists;

  /// Forward: O before the program; null: not wanted. Backward: dO of what it gave, from which the out_grads
  /// entry makes dout.
  FLASHJIT_IF_OUT_MOD TensorParam out_mod;

  FLASHJIT_IF_OUT_CODES const float* out_scale;       ///< of all codes of O; read with an argument alone
  FLASHJIT_IF_OUT_CODES TensorParam out_block_scale;  ///< written, of an OutFormat whose scales are apart

  FLASHJIT_IF_ROW_MODS GivenRowsParam given;

  FLASHJIT_IF_RUNNING_STATE TensorParam o_state;     ///< fp32
  FLASHJIT_IF_RUNNING_STATE const float* lse_state;  ///< like lse

  FLASHJIT_IF_SKIP_SOFTMAX unsigned long long* skip_softmax_counts;  ///< [2]; null: not wanted
  FLASHJIT_IF_SKIP_SOFTMAX float skip_softmax_log2;                  ///< log2 of the threshold

  FLASHJIT_IF_CAPTURES CaptureParam captures[FLASHJIT_CAPTURES];

  alignas(8) FLASHJIT_IF_SCALARS unsigned scalars[FLASHJIT_SCALARS];  ///< bits of an int or a float

  /// How many query heads share a head of K and V.
  constexpr int qhead_per_kvhead() const { return heads_q / heads_kv; }
};
#if defined(FLASHJIT_PARAMS_BYTES)
static_assert(sizeof(Params) == FLASHJIT_PARAMS_BYTES, "the host packs what the kernel has");
#endif

}  // namespace flashjit

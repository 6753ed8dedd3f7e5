/** @file
 * flashjit's C interface: opaque handles, structs that carry their size, status codes, a last error message.
 *
 * Every function is thread-safe. A function that returns flashjit_status returns FLASHJIT_OK or an error
 * code; flashjit_last_error_message() then returns the message. Set `struct_size`, where there is one, to the
 * struct's size, as `= {.struct_size = sizeof x}` does: a library that knows another size refuses the call.
 * Zero is the default of the other members.
 */
#ifndef FLASHJIT_FLASHJIT_H
#define FLASHJIT_FLASHJIT_H

#include "flashjit/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options, which a runtime copies: see RuntimeOptions of flashjit/runtime.hpp. Zeros are defaults. */
typedef struct flashjit_options {
  size_t struct_size;
  const char* cache_dir;    /**< null: as RuntimeOptions; "": nothing is kept on disk */
  const char* const* packs; /**< searched first to last, before FLASHJIT_PACKS and the cache */
  size_t pack_count;
  flashjit_jit jit;
  const char* template_dir; /**< null: the embedded templates */
  /** Receives one line at a time, from any thread; may call the library; null: stderr. */
  void (*log)(void* user, const char* line);
  void* log_user;
  const char* nvrtc;    /**< libnvrtc or its folder; null: FLASHJIT_NVRTC, else the usual places */
  uint64_t cache_limit; /**< bytes of kernels in cache_dir; 0: as RuntimeOptions; UINT64_MAX: none */
  /** As of RuntimeOptions. Keep the context until flashjit_stop_tuning() or flashjit_runtime_destroy(). */
  flashjit_switch tune_in_background;
  flashjit_switch compile_in_background; /**< as of RuntimeOptions, likewise */
} flashjit_options;

/** With "varlen" in the spec, sequences of different lengths are packed: q [1, heads, rows, dim] and so on.
 * Sequence i has rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of Q and O, and cu_seqlens_kv[i] to
 * cu_seqlens_kv[i + 1] of K and V. batch_size, max_seqlen_q and max_seqlen_kv (the longest sequence's, or
 * more) are then the shape's batch and lengths; without "varlen" all of them are 0 or null.
 *
 * With "pages<rows>" in the spec, K and V are pools of pages [pages, heads_kv, rows, dim], and page_table
 * says whose they are; with "cache" they are slots [slots, heads_kv, capacity, dim]. kv_lengths is how many
 * keys each sequence has, max_seqlen_kv how many it may have (0: all that there is room for). "varlen" then
 * says that Q alone is packed.
 *
 * ForwardArgs of flashjit/runtime.hpp says what CUDA graphs may rely on, and what happens where offsets,
 * lengths or page numbers on the device are wrong. */
typedef struct flashjit_forward_args {
  size_t struct_size;
  flashjit_tensor q, k, v; /**< read only */
  flashjit_tensor out; /**< of Q's type; with "fp32_out" in the spec, fp32; with "out{...}" rows of bytes in
                          that format; in memory of its own */
  float* lse;          /**< [batch, heads_q, seqlen_q], natural log of the row sums; null: not wanted */
  /** Strides of lse, row_max and state.lse, in elements: batch, heads, rows. With "varlen" LSE is packed like
   * q, and the first is not read. Zeros: contiguous, packed [heads_q, rows of q]. */
  int64_t lse_stride[3];
  const float* softmax_scale;   /**< on the host, finite and > 0; null: 1 / sqrt(head_dim) */
  const int32_t* kv_lengths;    /**< [batch] on the device, with "kvlen": keys from there on are padding; with
                                   "cache" or "pages": the keys of each sequence */
  flashjit_block_map block_map; /**< with "map..." in the spec */
  double dropout_p;             /**< in [0, 1), with "dropout" in the spec; rounded to a multiple of 2^-15 */
  uint64_t seed, offset;        /**< of the dropout mask */
  void* workspace;              /**< 256-byte aligned device memory */
  size_t workspace_bytes;       /**< at least flashjit_workspace_bytes() */
  const flashjit_capture* captures; /**< one for each name declared by the spec's programs, in any order */
  size_t capture_count;
  const int32_t* cu_seqlens_q;  /**< [batch_size + 1] on the device, with "varlen" in the spec */
  const int32_t* cu_seqlens_kv; /**< the same of K and V */
  const float* sinks;           /**< [heads_q] on the device, with "sinks" in the spec */
  int64_t batch_size, max_seqlen_q, max_seqlen_kv;
  const flashjit_tile_lists* lists; /**< from flashjit_build_lists(); null: built in this call, if needed */
  /** Seed and offset on the device, 16-byte aligned, which kernels read in place of those above: a CUDA graph
   * then has another dropout mask at each replay. Null: those above. */
  const uint64_t* rng_state;
  /** With "varlen", not 0: rows that belong to no sequence become zeros in out, and -inf in lse. */
  int32_t zero_unused_rows;
  flashjit_page_table page_table; /**< with "pages", and where slots of "cache" are not in order */
  float* row_max; /**< with "row_max" in the spec, like lse: the largest score that a query attends to */
  flashjit_scales k_scale, v_scale;     /**< where flashjit_kv_row() tells has_scale; read only */
  flashjit_scales q_scale;              /**< with "q_codes", too */
  flashjit_indices indices;             /**< with "indices" in the spec */
  flashjit_dropout_place dropout_place; /**< with "dropout_place" in the spec */
  int32_t reserved_sms;                 /**< SMs that persistent kernels leave free, e.g. for NCCL */
  /** With "shared_prefix" in the spec: one number on the device, how many first keys all sequences share.
   * Every sequence has at least this many besides its new ones. 0: none. Kernels do not check it. */
  const int32_t* prefix_length;
  /** With "running_state" in the spec: O in fp32 and LSE of other keys; may be the memory of out and lse. */
  flashjit_partial_state state;
  /** With "out_mod{...}" in the spec: O before that program, which the backward pass wants as its `out`: like
   * out, of Q's type, in memory of its own; zero: not wanted. */
  flashjit_tensor out_before_mod;
  /** With a KV format whose scales are in a tensor of their own, as flashjit_kv_block_scales() tells: read
   * only, [as k, as k, rows or groups of keys, columns] of the scales' type, with strides in these. */
  flashjit_tensor k_block_scale, v_block_scale;
  /** With "skip_softmax" in the spec: on the host, from 0, which skips nothing, to 1. Keys of a KV tile are
   * left out of O and LSE where exp(largest score in the tile - maximum so far) is below it for each of the
   * rows that a kernel computes together: see ForwardArgs of flashjit/runtime.hpp. */
  const float* skip_softmax_threshold;
  /** [2] on the device, ADDED to: tiles visited, and how many of these were skipped; null: not wanted. */
  int64_t* skip_softmax_counts;
  /** With "q_rope" in the spec: Q's columns behind V's, [batch, heads_q, seqlen_q, head_dim - head_dim_v],
   * read only; q then has the first head_dim_v columns. */
  flashjit_tensor q_rope;
  /** With "out{...}" in the spec, O as codes: one number on the device, which codes are multiplied with, of
   * e4m3 and e2m1:g16:e4m3:apart:scaled (NVFP4). See Epilogue::out_format of flashjit/spec.hpp. */
  const float* out_scale;
  /** The same, written, where scales are apart: [as out, as out, as out, scales of a row] of their type; with
   * "swizzled_scales" in the spec see ForwardArgs::out_block_scale of flashjit/runtime.hpp. */
  flashjit_tensor out_block_scale;
} flashjit_forward_args;

/** O and its tangent, the derivative of O along the tangents of what it depends on: see JvpArgs of
 * flashjit/runtime.hpp. A captured tensor's tangent is flashjit_capture's `grad`, read. */
typedef struct flashjit_jvp_args {
  size_t struct_size;
  const flashjit_forward_args* forward;            /**< O's, with a workspace for FLASHJIT_JVP */
  flashjit_tensor q_tangent, k_tangent, v_tangent; /**< like q, k and v, read only; zero: there is none */
  flashjit_tensor out_tangent;                     /**< like out, in memory of its own */
  float* lse_tangent;                              /**< like lse; null: not wanted */
  const float* sinks_tangent; /**< [heads_q] on the device, with "sinks" in the spec; null: zero */
} flashjit_jvp_args;

/** Members of flashjit_forward_args mean the same here; gradients have the sizes of their tensors. With
 * "dropout", seed and offset are the forward pass's. */
typedef struct flashjit_backward_args {
  size_t struct_size;
  flashjit_tensor q, k, v, out; /**< read only; out and lse are the forward pass's, with "out_mod{...}"
                                   out_before_mod in place of out; with "fp32_out" out is fp32, and
                                   gradients of rows with one strong key are as accurate as fp32 makes them */
  const float* lse;             /**< [batch, heads_q, seqlen_q] */
  int64_t lse_stride[3];        /**< of lse and dlse */
  flashjit_tensor dout;         /**< read only; of Q's type */
  flashjit_tensor dq, dk, dv;   /**< of their tensor's type, or fp32 with "fp32_grads"; memory of their own */
  const float* softmax_scale;
  const int32_t* kv_lengths;
  flashjit_block_map block_map;
  double dropout_p;
  uint64_t seed, offset;
  void* workspace;
  size_t workspace_bytes;
  const flashjit_capture* captures;
  size_t capture_count;
  const int32_t *cu_seqlens_q, *cu_seqlens_kv;
  const float* sinks;
  float* dsinks; /**< [heads_q], added to: zero it first; null: not wanted */
  int64_t batch_size, max_seqlen_q, max_seqlen_kv;
  const flashjit_tile_lists* lists; /**< from flashjit_build_lists() with FLASHJIT_BACKWARD */
  const uint64_t* rng_state;
  int32_t zero_unused_rows;             /**< of dq, dk and dv */
  const float* dlse;                    /**< like lse: its gradient; null: there is none */
  flashjit_indices indices;             /**< with "indices" in the spec */
  flashjit_dropout_place dropout_place; /**< with "dropout_place" in the spec */
  int32_t reserved_sms;
} flashjit_backward_args;

/** Tangents of the gradients, the derivative of the backward pass along tangents of what it reads: see
 * BackwardJvpArgs of flashjit/runtime.hpp. */
typedef struct flashjit_backward_jvp_args {
  size_t struct_size;
  /** The backward pass's, with a workspace for FLASHJIT_BACKWARD_JVP. dq, dk, dv, dsinks and the captures'
   * `grad` get tangents of these gradients; out and lists are not read. */
  const flashjit_backward_args* backward;
  flashjit_tensor q_tangent, k_tangent, v_tangent, dout_tangent; /**< like q, k, v, dout, read only; zero:
                                                                    there is none */
  const float* dlse_tangent;                                     /**< like dlse; null: zero */
  const float* sinks_tangent; /**< [heads_q] on the device, with "sinks" in the spec; null: zero */
  /** One for each of the captures, on the host, to fp32 on the device, contiguous, where the program declares
   * "grad". */
  const float* const* capture_tangents;
} flashjit_backward_jvp_args;

/** Rotary position embedding: see RopeView of flashjit/runtime.hpp. Zero: nothing is rotated. */
typedef struct flashjit_rope {
  const void *cos, *sin;      /**< on the device, [table_rows, dims / 2]; null: by theta */
  int64_t table_rows;         /**< positions that the tables have */
  int64_t stride;             /**< from one position to the next, in elements; 0: dims / 2 */
  flashjit_element_type type; /**< of the tables: FLASHJIT_ELEMENT_FP32 (also by default), or the spec's */
  float theta;                /**< without tables */
  int32_t dims;               /**< a multiple of 16; 0: all of head_dim */
  int32_t interleaved;        /**< not 0: pairs of dimensions (2i, 2i + 1); else (i, i + dims / 2) */
  const int32_t* positions;   /**< one for each row, on the device; null: the number of its key */
  int32_t sections[3];        /**< M-RoPE: pairs by time, height and width, with three arrays of positions */
  int32_t interleaved_sections; /**< not 0: pairs of the three take turns */
} flashjit_rope;

/** RMS norm of a head's row before the rotation: see NormView of flashjit/runtime.hpp. Zero: none. */
typedef struct flashjit_norm {
  const void* weight;         /**< on the device, [head_dim] */
  flashjit_element_type type; /**< FLASHJIT_ELEMENT_FP32 (also by default), or the spec's */
  float eps;                  /**< added to the mean of squares; 0: 1e-6 */
} flashjit_norm;

/** New rows of K (rotated) and V to store into a cache, and new rows of Q to rotate. New row
 * i of the n of sequence b is key kv_lengths[b] - n + i: kv_lengths counts the new rows already. Sizes: k
 * [batch, heads_kv, n, dim], v likewise, q and q_out [batch, heads_q, n, dim], the caches as k and v of
 * flashjit_forward_args. With "varlen" in the spec the rows of batch_size sequences are packed, and sequence
 * b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]. Rows that AppendArgs of flashjit/runtime.hpp names are
 * left out. */
typedef struct flashjit_append_args {
  size_t struct_size;
  flashjit_tensor k, v; /**< read only */
  flashjit_tensor k_cache, v_cache;
  const int32_t* kv_lengths;      /**< [batch] on the device: the keys of each, with the new ones */
  flashjit_page_table page_table; /**< as of flashjit_forward_args */
  flashjit_tensor q;              /**< read only; zero: there is none */
  flashjit_tensor q_out;          /**< may be q */
  flashjit_rope rope;
  const int32_t* cu_seqlens_q;      /**< [batch_size + 1] on the device, with "varlen" in the spec */
  int64_t batch_size;               /**< sequences, with "varlen" in the spec */
  int64_t max_seqlen_kv;            /**< the most keys of a sequence; 0: all there is room for */
  flashjit_scales k_scale, v_scale; /**< as of flashjit_forward_args; with "key_scales" written */
  /** Where each new row goes, in place of lengths and table: see SlotsView of flashjit/runtime.hpp. */
  const void* slots;
  flashjit_element_type slots_type; /**< FLASHJIT_ELEMENT_INT64 (also by default) or FLASHJIT_ELEMENT_INT32 */
  flashjit_norm k_norm, q_norm;
  flashjit_tensor k_block_scale, v_block_scale; /**< as of flashjit_forward_args, written */
} flashjit_append_args;

/** O and LSE over all keys, from partial states whose keys are disjoint. */
typedef struct flashjit_merge_args {
  size_t struct_size;
  const flashjit_partial_state* states; /**< state_count of them, on the host: 1 to 8 */
  size_t state_count;
  flashjit_tensor out; /**< like the states' out; may be one of them, if of its type */
  float* lse;          /**< null: not wanted */
  int64_t lse_stride[3];
  flashjit_element_type states_type, out_type; /**< FLASHJIT_ELEMENT_FP32, or the spec's (also by default) */
} flashjit_merge_args;

/** One of the caches of flashjit_attention_over(): see CacheArgs of flashjit/caches.hpp. */
typedef struct flashjit_cache_args {
  const flashjit_spec* spec;         /**< of this cache; "sinks" in the first alone */
  const flashjit_forward_args* args; /**< its queries and keys; out, lse and workspace are zero */
} flashjit_cache_args;

/** Arguments of flashjit_attention_over(). */
typedef struct flashjit_over_args {
  size_t struct_size;
  const flashjit_cache_args* caches; /**< cache_count of them, on the host: 1 to 8 */
  size_t cache_count;
  flashjit_tensor
      out;    /**< like q, with V's columns, of the specs' type; with "fp32_out" in the first, fp32 */
  float* lse; /**< [batch, heads_q, seqlen_q], of all caches' keys; null: not wanted */
  int64_t lse_stride[3];
  void* workspace;        /**< 256-byte aligned device memory */
  size_t workspace_bytes; /**< at least flashjit_attention_over_workspace_bytes() */
} flashjit_over_args;

/** A tensor as codes of 2 to 8 bits and scales: see QuantizeArgs of flashjit/runtime.hpp. */
typedef struct flashjit_quantize_args {
  size_t struct_size;
  flashjit_tensor x;     /**< [batch, heads, rows, dim] of the spec's type, or a pool of pages; read only */
  flashjit_tensor codes; /**< x's rows in the spec's format of K: of x's sizes, or bytes */
  flashjit_scales scale; /**< written; its sizes say what shares a scale */
  int32_t hadamard;      /**< not 0: rows are multiplied by blocks of a Hadamard matrix */
  flashjit_rope rope;    /**< before that, rows are rotated by their positions */
  flashjit_tensor block_scale; /**< written: as k_block_scale of flashjit_forward_args */
} flashjit_quantize_args;

/** Inputs of tile lists: the arguments of the calls that will use them, as far as masks read them. */
typedef struct flashjit_list_args {
  size_t struct_size;
  void* memory;        /**< 256-byte aligned device memory, where the lists go and stay */
  size_t memory_bytes; /**< at least flashjit_list_bytes() */
  const int32_t* kv_lengths;
  flashjit_block_map block_map;
  const flashjit_capture* captures; /**< all captures of the calls; the score's are not read */
  size_t capture_count;
  const int32_t *cu_seqlens_q, *cu_seqlens_kv;
} flashjit_list_args;

/** Such as "0.1.0". */
FLASHJIT_C_API const char* flashjit_version(void) FLASHJIT_NOEXCEPT;

/** "invalid_argument", ...; "ok" for FLASHJIT_OK. Never null. */
FLASHJIT_C_API const char* flashjit_status_name(flashjit_status status) FLASHJIT_NOEXCEPT;

/** For bindings, which write a spec's text from a call's arguments: the `index`-th option that is on or off,
 * and the argument that turns it on, such as "kvlen" and "kv_lengths", valid for ever; either may be null.
 * Returns 0 if there are no more, else 1. */
FLASHJIT_C_API int32_t flashjit_spec_option(size_t index, const char** option,
                                            const char** argument) FLASHJIT_NOEXCEPT;

/** The message of the last failed call on this thread; "" if none failed. Valid until the next failure on
 * this thread. Never null; "" also where the thread's objects are gone, as in an atexit handler. After
 * dlclose() the library stays loaded until the threads that asked for it, or failed, have ended. */
FLASHJIT_C_API const char* flashjit_last_error_message(void) FLASHJIT_NOEXCEPT;
/** Long details of that error, such as a compiler's log; often "". */
FLASHJIT_C_API const char* flashjit_last_error_detail(void) FLASHJIT_NOEXCEPT;

/** `options` may be null for the defaults. Needs no driver: the first call that needs one opens it. */
FLASHJIT_C_API flashjit_status flashjit_runtime_create(const flashjit_options* options,
                                                       flashjit_runtime** runtime) FLASHJIT_NOEXCEPT;
/** Unloads every kernel, so wait for launched ones and drop graphs that hold them first. Null is allowed. */
FLASHJIT_C_API void flashjit_runtime_destroy(flashjit_runtime* runtime) FLASHJIT_NOEXCEPT;

/** Ends tuning and compiling in the background for good: waits some seconds at most for the job under way,
 * and drops the rest. Tuned configurations stay in use. Call it before a context is destroyed, or before the
 * program ends without destroying the runtime. Does nothing if nothing is under way. */
FLASHJIT_C_API flashjit_status flashjit_stop_tuning(flashjit_runtime* runtime) FLASHJIT_NOEXCEPT;

/** Parses a spec such as "bf16:d128:causal" or "fp16:d64x32:dropout:map128x64" once, for many calls. The
 * function called overrides a pass in the text ("fwd:", "bwd:"). */
FLASHJIT_C_API flashjit_status flashjit_spec_create(const char* text, flashjit_spec** spec) FLASHJIT_NOEXCEPT;
/** Null is allowed. Launched calls, captured graphs and tile lists do not need it. */
FLASHJIT_C_API void flashjit_spec_destroy(flashjit_spec* spec) FLASHJIT_NOEXCEPT;

/** Launches on `stream`, in the context that is current; compiles on the first call of a spec. Nothing is
 * launched when an argument is wrong. */
FLASHJIT_C_API flashjit_status flashjit_forward(flashjit_runtime* runtime, const flashjit_spec* spec,
                                                const flashjit_forward_args* args,
                                                struct CUstream_st* stream) FLASHJIT_NOEXCEPT;
/** The same for the gradients. */
FLASHJIT_C_API flashjit_status flashjit_backward(flashjit_runtime* runtime, const flashjit_spec* spec,
                                                 const flashjit_backward_args* args,
                                                 struct CUstream_st* stream) FLASHJIT_NOEXCEPT;

/** The same for O and its tangent. */
FLASHJIT_C_API flashjit_status flashjit_jvp(flashjit_runtime* runtime, const flashjit_spec* spec,
                                            const flashjit_jvp_args* args,
                                            struct CUstream_st* stream) FLASHJIT_NOEXCEPT;
/** The same for tangents of the gradients. */
FLASHJIT_C_API flashjit_status flashjit_backward_jvp(flashjit_runtime* runtime, const flashjit_spec* spec,
                                                     const flashjit_backward_jvp_args* args,
                                                     struct CUstream_st* stream) FLASHJIT_NOEXCEPT;

/** Stores new rows of K (rotated) and V into a cache, and rotates new rows of Q, in one launch. Takes
 * flashjit_forward()'s spec; reads element types, head dimensions, "varlen", "cache", "pages" and formats. */
FLASHJIT_C_API flashjit_status flashjit_append(flashjit_runtime* runtime, const flashjit_spec* spec,
                                               const flashjit_append_args* args,
                                               struct CUstream_st* stream) FLASHJIT_NOEXCEPT;
/** Joins partial states. Reads the spec's element type and dimension of V. */
FLASHJIT_C_API flashjit_status flashjit_merge(flashjit_runtime* runtime, const flashjit_spec* spec,
                                              const flashjit_merge_args* args,
                                              struct CUstream_st* stream) FLASHJIT_NOEXCEPT;

/** One softmax over the keys of several caches: each cache is a launch, which writes its part of O into the
 * workspace, and one more joins them. See attention_over() of flashjit/caches.hpp. */
FLASHJIT_C_API flashjit_status flashjit_attention_over(flashjit_runtime* runtime,
                                                       const flashjit_over_args* args,
                                                       struct CUstream_st* stream) FLASHJIT_NOEXCEPT;
/** Bytes of workspace that it needs; pointers to tensors are not read. */
FLASHJIT_C_API flashjit_status flashjit_attention_over_workspace_bytes(flashjit_runtime* runtime,
                                                                       const flashjit_over_args* args,
                                                                       size_t* bytes) FLASHJIT_NOEXCEPT;

/** Quantizes a tensor. Reads the spec's element types, head dimension and format of K. */
FLASHJIT_C_API flashjit_status flashjit_quantize(flashjit_runtime* runtime, const flashjit_spec* spec,
                                                 const flashjit_quantize_args* args,
                                                 struct CUstream_st* stream) FLASHJIT_NOEXCEPT;

/** A row of `head_dim` columns of K or V in a KV format, as the spec has it in "k{...}": its bytes, the bytes
 * that its address and strides are multiples of, and whether the call has k_scale or v_scale for it. Results
 * may be null; with head_dim 0 bytes and alignment are left alone. */
FLASHJIT_C_API flashjit_status flashjit_kv_row(const char* format, int32_t head_dim, int64_t* bytes,
                                               int32_t* alignment, int32_t* has_scale) FLASHJIT_NOEXCEPT;
/** What a tensor of scales, k_block_scale, has for rows of `head_dim` columns in a KV format: the numbers of
 * a row, scales and then zero points; how many keys share a row, 1 or more, or 0 where the format has no such
 * tensor; and the type of a number, "fp16", valid for ever. Results may be null; with head_dim 0 columns are
 * left alone. */
FLASHJIT_C_API flashjit_status flashjit_kv_block_scales(const char* format, int32_t head_dim,
                                                        int64_t* columns, int32_t* keys,
                                                        const char** type) FLASHJIT_NOEXCEPT;
/** The head dimensions of specs: multiples of `step` from `step` on, up to `most`, and of V up to `most_v`.
 * Columns of codes must also be what their format wants, see flashjit_kv_row(). Results may be null. */
FLASHJIT_C_API void flashjit_head_dims(int32_t* step, int32_t* most, int32_t* most_v) FLASHJIT_NOEXCEPT;
/** The names of KV formats and what they stand for, from index 0 on; 0: there are no more. */
FLASHJIT_C_API int32_t flashjit_kv_format_name(size_t index, const char** name,
                                               const char** parts) FLASHJIT_NOEXCEPT;

/** What an entry (a __global__ function) of a kernel takes. */
typedef struct flashjit_entry_report {
  const char* entry;
  int32_t registers;
  int32_t spill_bytes;  /**< stores and loads together */
  int32_t shared_bytes; /**< static and dynamic together */
  int32_t threads;      /**< a block */
} flashjit_entry_report;

/** A kernel that was prepared, for logs and tables. Texts and entries live as long as the receiver runs. */
typedef struct flashjit_kernel_report {
  const char *spec, *config;
  const char*
      config_source;  /**< "given", "tuned", "tuned elsewhere", "tuned for a near shape", "heuristic" */
  const char* key;    /**< the directory's name in cache and pack; empty: nothing is launched */
  const char* origin; /**< "memory", "pack", "disk", "compiled" */
  double render_ms, compile_ms, load_ms; /**< spent by this call */
  const flashjit_entry_report* entries;
  size_t entry_count;
} flashjit_kernel_report;

/** Called in the thread that called, for each kernel, when all are made. */
typedef void (*flashjit_kernel_receiver)(void* user, const flashjit_kernel_report* report);

/** Compiles and loads now, e.g. before a graph capture. With `config`, such as "sm80:br128:bc64:w4:s2", that
 * tile configuration is used for this spec and shape from now on; null: the tuned one, else the heuristic's.
 * `receiver` (null: nobody is told) gets the kernel's report. */
FLASHJIT_C_API flashjit_status flashjit_prepare(flashjit_runtime* runtime, flashjit_pass pass,
                                                const flashjit_spec* spec, const flashjit_shape* shape,
                                                const char* config, flashjit_kernel_receiver receiver,
                                                void* user) FLASHJIT_NOEXCEPT;

/** The same for both passes in parallel, in little more time than for one. For training. */
FLASHJIT_C_API flashjit_status flashjit_prepare_both(flashjit_runtime* runtime, const flashjit_spec* spec,
                                                     const flashjit_shape* shape,
                                                     flashjit_kernel_receiver receiver,
                                                     void* user) FLASHJIT_NOEXCEPT;

/** Compiles in parallel the kernels that the first calls of both passes would wait for. With
 * compile_in_background these may be plain kernels; else it is flashjit_prepare_both(). */
FLASHJIT_C_API flashjit_status flashjit_prepare_first_calls(flashjit_runtime* runtime,
                                                            const flashjit_spec* spec,
                                                            const flashjit_shape* shape) FLASHJIT_NOEXCEPT;

/** How many of the kernels are made, at first none; 0 stops it. Called in the thread that called. */
typedef int32_t (*flashjit_range_progress)(void* user, size_t made, size_t configurations);

/** flashjit_prepare() for all shapes from `first` to `last`, which have the same heads: each batch with each
 * seqlen_q and seqlen_kv. A step of 0, or no `step`, means the ends and the powers of two between them;
 * another one first, first + step and so on, and last. Compiles on all cores. Stopped by `progress` (null:
 * nobody is told) it finishes the kernels under way and returns FLASHJIT_OK; those made stay in memory and in
 * the cache. `receiver` (null: nobody is told) gets the reports of those made. Results may be null: kernels
 * made, configurations that the shapes choose, and the most bytes of workspace that a call of these shapes
 * needs. Refused: a size of `first` that is 0 or above that of `last`, heads that differ, negative steps,
 * more than 2^16 shapes. */
FLASHJIT_C_API flashjit_status flashjit_prepare_range(flashjit_runtime* runtime, flashjit_pass pass,
                                                      const flashjit_spec* spec, const flashjit_shape* first,
                                                      const flashjit_shape* last, const flashjit_shape* step,
                                                      flashjit_range_progress progress,
                                                      flashjit_kernel_receiver receiver, void* user,
                                                      size_t* made, size_t* configurations,
                                                      size_t* workspace_bytes) FLASHJIT_NOEXCEPT;

/** Bytes of workspace that a call needs; flashjit_list_bytes() less if it receives its lists. Not monotonic:
 * small batches split keys. Take the largest over the shapes that are called. */
FLASHJIT_C_API flashjit_status flashjit_workspace_bytes(flashjit_runtime* runtime, flashjit_pass pass,
                                                        const flashjit_spec* spec,
                                                        const flashjit_shape* shape,
                                                        size_t* bytes) FLASHJIT_NOEXCEPT;

/** Bytes of device memory that flashjit_build_lists() needs; 0 if the kernels use no lists. */
FLASHJIT_C_API flashjit_status flashjit_list_bytes(flashjit_runtime* runtime, flashjit_pass pass,
                                                   const flashjit_spec* spec, const flashjit_shape* shape,
                                                   size_t* bytes) FLASHJIT_NOEXCEPT;

/** Builds the tile lists of a block map or a mask on `stream` once, for any number of calls with the same
 * pass, spec, shape, tile configuration, block map, lengths and captures of the mask. Other calls refuse
 * them. The memory must outlive the calls. */
FLASHJIT_C_API flashjit_status flashjit_build_lists(flashjit_runtime* runtime, flashjit_pass pass,
                                                    const flashjit_spec* spec, const flashjit_shape* shape,
                                                    const flashjit_list_args* args,
                                                    struct CUstream_st* stream,
                                                    flashjit_tile_lists** lists) FLASHJIT_NOEXCEPT;
/** Null is allowed. */
FLASHJIT_C_API void flashjit_tile_lists_destroy(flashjit_tile_lists* lists) FLASHJIT_NOEXCEPT;

/** The device of the current context, whose kernels the runtime's calls launch. */
FLASHJIT_C_API flashjit_status flashjit_current_device(flashjit_runtime* runtime,
                                                       flashjit_device* device) FLASHJIT_NOEXCEPT;
/** A device from its architecture: "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100",
 * "sm_100a", "sm_120", "sm_120a" or "sm_121". The sizes are a common product's of that architecture. Needs no
 * driver. */
FLASHJIT_C_API flashjit_status flashjit_device_of(const char* arch,
                                                  flashjit_device* device) FLASHJIT_NOEXCEPT;

/** FLASHJIT_OK if some kernel family computes the spec at the shape on the device; FLASHJIT_UNSUPPORTED if
 * none does, with the message that a call would fail with: every family's reason, or the spec's or shape's
 * mistake. `shape` may be null before shapes are known: see can() of flashjit/can.hpp. Exact for the
 * combination, and pure: no driver, no compiler, no file. Takes well under a millisecond. */
FLASHJIT_C_API flashjit_status flashjit_can(flashjit_pass pass, const flashjit_spec* spec,
                                            const flashjit_shape* shape,
                                            const flashjit_device* device) FLASHJIT_NOEXCEPT;

/** The same on the CPU, in fp64, slowly: every pointer is the host's, and results are rounded to the spec's
 * type. Needs no GPU and no runtime; stream and workspace are ignored. For tests and small sizes.
 */
FLASHJIT_C_API flashjit_status
flashjit_reference_forward(const flashjit_spec* spec, const flashjit_forward_args* args) FLASHJIT_NOEXCEPT;
/** The same for the gradients. */
FLASHJIT_C_API flashjit_status
flashjit_reference_backward(const flashjit_spec* spec, const flashjit_backward_args* args) FLASHJIT_NOEXCEPT;
/** The same for O and its tangent. */
FLASHJIT_C_API flashjit_status flashjit_reference_jvp(const flashjit_spec* spec,
                                                      const flashjit_jvp_args* args) FLASHJIT_NOEXCEPT;
/** The same for tangents of the gradients. */
FLASHJIT_C_API flashjit_status flashjit_reference_backward_jvp(
    const flashjit_spec* spec, const flashjit_backward_jvp_args* args) FLASHJIT_NOEXCEPT;
/** The same of flashjit_append(), flashjit_merge() and flashjit_quantize(). */
FLASHJIT_C_API flashjit_status flashjit_reference_append(const flashjit_spec* spec,
                                                         const flashjit_append_args* args) FLASHJIT_NOEXCEPT;
FLASHJIT_C_API flashjit_status flashjit_reference_merge(const flashjit_spec* spec,
                                                        const flashjit_merge_args* args) FLASHJIT_NOEXCEPT;
FLASHJIT_C_API flashjit_status
flashjit_reference_quantize(const flashjit_spec* spec, const flashjit_quantize_args* args) FLASHJIT_NOEXCEPT;

/** Attention over a sequence whose rows the ranks of an NCCL communicator share. */
typedef struct flashjit_shared_attention flashjit_shared_attention;

/** How keys come to queries: in a ring, or all at once; or each rank gets all rows of its share of the heads.
 */
typedef int32_t flashjit_sharing_scheme;
enum { FLASHJIT_RING = 0, FLASHJIT_ALL_GATHER = 1, FLASHJIT_ULYSSES = 2 };
/** Which rows a rank has: of twice as many blocks as ranks, block r and the r-th from the end; or neighbours.
 */
typedef int32_t flashjit_shard_layout;
enum { FLASHJIT_ZIGZAG = 0, FLASHJIT_CONTIGUOUS = 1 };

/** See SharedSequence of flashjit/distributed.hpp. */
typedef struct flashjit_shared_sequence {
  size_t struct_size;
  int64_t batch, heads_q, heads_kv;
  int64_t rows; /**< of each rank's shard; even with FLASHJIT_ZIGZAG */
  flashjit_sharing_scheme scheme;
  flashjit_shard_layout layout;
  int64_t window; /**< with causal: how many keys a query sees, the last at its own position; 0: all */
  const int64_t* documents; /**< on the host, [document_count + 1]; null: there are none */
  size_t document_count;
  int32_t reserved_sms;     /**< left to transfers of a ring while these are under way */
  void* heads_communicator; /**< two levels: the ncclComm_t of ranks that share heads; null: one level */
} flashjit_shared_sequence;

/** This rank's shards: see SharedForwardArgs of flashjit/distributed.hpp. */
typedef struct flashjit_shared_forward_args {
  size_t struct_size;
  const void *q, *k, *v;
  void* out;
  float* lse;
  const float* softmax_scale; /**< on the host; null: 1 / sqrt(head_dim) */
  void* workspace;
  size_t workspace_bytes; /**< at least flashjit_shared_workspace_bytes(); the memory is 256-byte aligned */
  double dropout_p;       /**< with "dropout" in the spec; this and all below are the same on all ranks */
  uint64_t seed, offset;
  const flashjit_capture* captures; /**< one for each name declared by the spec's programs, in any order */
  size_t capture_count;
  const float* sinks; /**< [heads_q] on the device, with "sinks" in the spec */
} flashjit_shared_forward_args;

/** `out` and `lse` are the forward pass's. To gradients of captures and sinks this rank's part of the sum
 * over ranks is added. */
typedef struct flashjit_shared_backward_args {
  size_t struct_size;
  const void *q, *k, *v, *out;
  const float* lse;
  const void* dout;
  void *dq, *dk, *dv;
  const float* softmax_scale;
  void* workspace;
  size_t workspace_bytes;
  double dropout_p;
  uint64_t seed, offset;
  const flashjit_capture* captures;
  size_t capture_count;
  const float* sinks;
  const float* dlse; /**< like lse: the gradient of LSE; null: there is none */
  float* dsinks;     /**< [heads_q]; null: not wanted */
} flashjit_shared_backward_args;

/** The spec has an element type, head dimensions, programs, "dropout" and "sinks". Programs see the whole
 * sequence, or with documents, whose number is `b`, the document. Their names do not begin with "part_".
 * `communicator` is an ncclComm_t of the current device. It and the runtime must live longer. NCCL is opened
 * at run time: `nccl`, null: FLASHJIT_NCCL, else libnccl.so.2. Not for several threads at once. */
FLASHJIT_C_API flashjit_status flashjit_shared_create(flashjit_runtime* runtime, const flashjit_spec* spec,
                                                      const flashjit_shared_sequence* sequence,
                                                      void* communicator, const char* nccl,
                                                      flashjit_shared_attention** shared) FLASHJIT_NOEXCEPT;
/** Null is allowed. */
FLASHJIT_C_API void flashjit_shared_destroy(flashjit_shared_attention* shared) FLASHJIT_NOEXCEPT;

/** Bytes of device memory that a call needs besides the shards. */
FLASHJIT_C_API flashjit_status flashjit_shared_workspace_bytes(flashjit_shared_attention* shared,
                                                               flashjit_pass pass,
                                                               size_t* bytes) FLASHJIT_NOEXCEPT;
/** Compiles and loads the pass's kernels, and compares what the ranks were given: an error on all of them
 * where they differ. Waits for the other ranks. */
FLASHJIT_C_API flashjit_status flashjit_shared_prepare(flashjit_shared_attention* shared, flashjit_pass pass,
                                                       void* workspace, size_t workspace_bytes,
                                                       struct CUstream_st* stream) FLASHJIT_NOEXCEPT;
/** Kernels on `stream`, transfers on `copies`, which may be the same. Both passes are called by all ranks. */
FLASHJIT_C_API flashjit_status flashjit_shared_forward(flashjit_shared_attention* shared,
                                                       const flashjit_shared_forward_args* args,
                                                       struct CUstream_st* stream,
                                                       struct CUstream_st* copies) FLASHJIT_NOEXCEPT;
FLASHJIT_C_API flashjit_status flashjit_shared_backward(flashjit_shared_attention* shared,
                                                        const flashjit_shared_backward_args* args,
                                                        struct CUstream_st* stream,
                                                        struct CUstream_st* copies) FLASHJIT_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* FLASHJIT_FLASHJIT_H */

// The values that describe a problem and a way to compute it. All are plain values with ==. A spec
// (normalized), a shape and a configuration survive to_string() and their parser: one string serves logs, the
// command line, records and file names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "flashjit/kv_format.hpp"
#include "flashjit/programs.hpp"
#include "flashjit/types.hpp"

namespace flashjit {

/// Size of the blocks of a block map, in queries and keys. {0, 0}: no block map.
struct BlockSize {
  int q = 0;   ///< a multiple of 16 from 16 to 256
  int kv = 0;  ///< a multiple of 16 from 16 to 256

  bool operator==(const BlockSize&) const = default;
};

/// How K and V lie in memory, and what says how many keys a sequence has. As text: nothing, "kvlen", "cache",
/// "pages16"; then "shared_kv" and "shared_prefix".
struct KvLayout {
  enum class Kind : std::uint8_t {
    contiguous,  ///< [b, hkv, skv, d]; or with varlen packed, as Q is
    padded,      ///< the same, and keys from kv_lengths[b] on are padding, which masks count. Not with varlen
    slots,       ///< a cache: each sequence has one contiguous slot, and kv_lengths[b] of its rows
    paged,       ///< a cache in pages that a page table names
  };
  Kind kind = Kind::contiguous;
  int page_size = 0;  ///< tokens of a page of a paged cache, 1 or more; else 0
  /// V is K's first head_dim_v columns, as in latent attention: the forward pass loads them once. Its v must
  /// be k's memory with k's strides. The backward pass does not differ; the gradient of that memory is dK +
  /// dV. V then has K's format.
  bool shared_kv = false;
  /// All sequences share their first `prefix_length` keys, which may then be read once (cascade). Results do
  /// not change. For paged caches and varlen.
  bool shared_prefix = false;
  /// How rows of K and of V are stored; by default as elements of Q's type. Quantized ones are for the
  /// forward pass, and head dimensions are multiples of 16. Where both are e4m3, e5m2 or int8 alone (an FP8
  /// or INT8 KV cache), tensor cores' kernels read the codes; other formats are decoded as tiles are loaded.
  KvFormat k_format = {}, v_format = {};
  /// Scales at the call, k_scale and v_scale, are per key or per page; otherwise per sequence and head.
  bool key_scales = false;
  /// append() multiplies new rows of K and Q by blocks of a Hadamard matrix after norm and RoPE, as
  /// QuantizeArgs::hadamard does: outliers in few columns spread over a block before rows are encoded.
  /// Attention takes the Q that append() writes and is unchanged. Not with shared_kv, whose V is in K's rows.
  bool hadamard = false;

  bool quantized() const { return k_format.quantized() || v_format.quantized(); }
  /// The same format of K and V.
  KvLayout with(const KvFormat& format) const {
    KvLayout layout = *this;
    layout.k_format = layout.v_format = format;
    return layout;
  }
  static KvLayout padded() { return {Kind::padded}; }
  static KvLayout slots() { return {Kind::slots}; }
  static KvLayout paged(int page_size) { return {Kind::paged, page_size}; }

  bool is_padded() const { return kind == Kind::padded; }
  bool is_paged() const { return kind == Kind::paged; }
  /// With a cache `causal` lets a sequence's last query see its last key, and with varlen only Q is packed.
  /// Caches are for the forward pass alone.
  bool is_cache() const { return kind == Kind::slots || kind == Kind::paged; }
  /// Whether kv_lengths is given at the call.
  bool has_lengths() const { return kind != Kind::contiguous; }
  bool operator==(const KvLayout&) const = default;
};

/// Options for calls that compute part of a larger problem, as in context parallelism: some keys of its
/// queries, or some queries of its keys.
struct Partial {
  /// O is fp32, whatever the type of Q, K and V. The backward pass, which is then given O in fp32, finds D =
  /// rowsum(dO * O) from O before rounding: accurate gradients of rows with one strong key. With
  /// out_mod the backward pass is given O before that, of Q's type.
  bool fp32_out = false;
  /// P and dS enter their products as the sum of two elements each, in place of one: O, dQ, dK and dV then
  /// have the errors of attention in fp32, rounded once, if the backward pass is also given O in fp32
  /// (fp32_out). The forward pass has three products instead of two, the backward pass eight instead of five.
  bool two_terms = false;
  bool fp32_grads = false;  ///< backward only: dQ, dK and dV are fp32
  /// Backward only: accumulate into fp32 dQ, dK and dV, for gradients that several calls compute.
  bool add_grads = false;
  /// Use the dropout mask of the larger problem; `DropoutPlace` at the call gives this call's offset in it.
  bool dropout_place = false;
  /// Continue from the O and LSE of earlier keys, a PartialState at the call: online softmax across calls.
  /// Forward only; not with a cache, indices, quantized K and V, or sinks, which belong to the first call.
  bool running_state = false;

  bool operator==(const Partial&) const = default;
};

/// How Q is stored, and programs that change Q and K before the scores.
struct Prologue {
  /// Q has the type of K, too (FP8: e4m3 or e5m2), with one scale for the queries of each KV head. O has
  /// `dtype`.
  bool q_codes = false;
  /// Q's columns behind V's, as latent attention rotates them, are in a tensor of their own: ForwardArgs::q
  /// has the first head_dim_v columns, q_rope the others. Forward only, with kv.shared_kv, without q_codes
  /// and q_mod.
  bool q_rope = false;
  /// Programs of elements of Q's and K's rows (RoPE, the norm of a head), computed in fp32 and rounded to
  /// `dtype` by a launch before the others, in the workspace. Gradients are for Q and K as they are given.
  /// k_mod is not for a cache, whose rows append() already rotates, a format and shared_kv; both not with K
  /// and V of 8 bits, q_codes, indices, running_state and add_grads, nor in jvp and backward_jvp.
  RowProgram q_mod = {}, k_mod = {};

  bool has_programs() const { return !q_mod.empty() || !k_mod.empty(); }
  bool operator==(const Prologue&) const = default;
};

/// Further results of the forward pass, a program of O's elements, and an approximation.
struct Epilogue {
  bool row_max = false;  ///< forward only: the largest score of each row is a result, too
  /// A program of O's elements, applied in fp32 before they are rounded and stored. LSE and row_max stay the
  /// softmax's. Not with indices, batch_invariant and running_state, nor in jvp and backward_jvp.
  OutProgram out_mod = {};
  /// Forward only: skip-softmax (BLASST). Rows that are computed together leave out the keys of a KV tile
  /// whose largest score lies below each row's maximum so far by more than -log(threshold), a number at the
  /// call: see ForwardArgs::skip_softmax_threshold. Not with dropout and weights().
  bool skip_softmax = false;
  /// With q_codes: of how many KV tiles the tensor cores may sum up P V, one, four or all, before the sum
  /// goes to fp32. Hopper's sum codes with about 14 bits, so the error of O grows with the tiles where V's
  /// mean is not zero; more tiles are faster (tools/docs/eight-bits.md). Where they are not, fewer are
  /// summed.
  PvSums pv_sums = PvSums::of_tile;
  /// Forward only: O is stored as codes with scales, which are found or applied in fp32, after out_mod:
  ///   e4m3                        FP8: O / ForwardArgs::out_scale, a number of the call on the device
  ///   e4m3:row:fp32:apart         FP8, with a scale for each row of a head, its largest magnitude / 448, in
  ///                               ForwardArgs::out_block_scale
  ///   e2m1:g16:e4m3:apart:scaled  NVFP4: codes of 4 bits, with the scales of 16 columns there, which
  ///                               out_scale is multiplied with
  /// A stored value is code * scale of the block * out_scale. Codes are the nearest, ties to even; a value
  /// that is too large becomes the largest; NaN stays NaN, with NVFP4 in the scale. Head dimensions of V are
  /// then multiples of 16. Not with running_state and fp32_out.
  KvFormat out_format = {};
  /// NVFP4 only: scales lie as cuBLAS, tcgen05 and engines read them (128x4). Head dimensions of V are then
  /// multiples of 64. See ForwardArgs::out_block_scale.
  bool swizzled_scales = false;

  bool operator==(const Epilogue&) const = default;
};

/// Results whose bits stay the same.
struct Reproducible {
  bool deterministic = false;  ///< backward only: on every run
  /// Forward only: a row's bits do not depend on which other sequences are in the call. Keys are split, if at
  /// all, as their number says, and the spec alone chooses tiles: tools/docs/serving.md has the price.
  bool batch_invariant = false;

  /// Whether any call is to give the same bits as another, so that its configuration may not change.
  bool any() const { return deterministic || batch_invariant; }
  bool operator==(const Reproducible&) const = default;
};

/// A row of K, V or O in memory: columns of a type. The columns of a quantized row are its bytes. Their type
/// is the format's where it is codes of 8 bits alone, else int8.
struct StoredKvRow {
  DType type = DType::bf16;
  int columns = 0;
  int alignment = 16;  ///< bytes; of pointers and strides
};

/// What attention is computed, in both passes. Everything here is compiled into the kernels; everything else
/// is an argument of the call.
///
/// O = dropout(softmax(mask(score(softmax_scale * Q K^T)))) V, row by row.
/// With a score of weights() there is no softmax: O = where(mask, score(softmax_scale * Q K^T), 0) V.
/// epilogue.out_mod is applied to each element of O last, before it becomes codes (out_format),
/// prologue.q_mod and k_mod to Q and K first. With sinks, the softmax of a row has one more logit, its
/// head's, without a value. LSE includes it, and a row that attends to nothing has O = 0 and LSE = its sink.
/// As text, to which a KernelSpec adds its pass: "bf16:d64x32:causal:dropout:kvlen:map128x64:det",
/// "bf16:d64:causal:varlen:pages16:sinks", "bf16:d128:kve4m3:causal:cache:key_scales",
/// "bf16:d128:k{q8_0}:v{int4:g32:fp16}:cache".
struct AttentionSpec {
  DType dtype = DType::bf16;
  int head_dim = 0;    ///< of Q and K: a multiple of 8 from 8 to 576
  int head_dim_v = 0;  ///< of V and O: a multiple of 8 from 8 to 512; 0 means head_dim
  ScoreProgram score = {};
  MaskProgram mask = {};
  bool dropout = false;  ///< whether a dropout probability is applied (its value is given at the call)
  KvLayout kv = {};
  BlockSize block_map = {};  ///< whether a block map is given at the call, and the size of its blocks
  Reproducible reproducible = {};
  bool varlen = false;  ///< sequences of different lengths, packed one after the other
  bool sinks = false;   ///< one more logit per query head in the softmax, without a value
  /// Sparse tokens: the heads that share a head of K and V attend to the keys that a list of each query names
  /// at the call, and to no others. A key that is in a list twice counts twice; -1, and a number that is no
  /// key of the sequence, is skipped. Masks and scores see a key's number as its position. Not with a block
  /// map, dropout, q_codes or, in the backward pass, `deterministic`.
  bool indices = false;
  Partial partial = {};
  Epilogue epilogue = {};
  Prologue prologue = {};

  DType q_type() const { return prologue.q_codes ? kv_type() : dtype; }
  /// The element type that kernels read K and V as; formats that are decoded as tiles are loaded become
  /// `dtype`.
  FLASHJIT_API DType kv_type() const;
  /// Rows of K, and of V, in memory.
  FLASHJIT_API StoredKvRow stored_k() const;
  FLASHJIT_API StoredKvRow stored_v() const;
  /// O's type in the forward pass, before it becomes codes.
  DType out_type() const { return partial.fp32_out ? DType::fp32 : dtype; }
  /// Rows of O in memory in the forward pass.
  FLASHJIT_API StoredKvRow stored_out() const;
  /// O's type in the backward pass.
  DType saved_out_type() const { return epilogue.out_mod.empty() ? out_type() : dtype; }
  /// The type of dQ, dK and dV.
  DType grad_type() const { return partial.fp32_grads ? DType::fp32 : dtype; }
  /// Whether kernels read codes of 8 bits, whose scales are given at the call.
  bool has_scales() const { return size_of(kv_type()) == 1; }
  /// Whether kernels multiply S and V with scales of keys; decoded rows are multiplied before.
  bool has_key_scales() const { return kv.key_scales && has_scales(); }
  /// Whether K or V is in a format that is decoded as its tiles are loaded.
  bool decodes_kv() const { return kv.quantized() && !has_scales(); }
  int v_dim() const { return head_dim_v ? head_dim_v : head_dim; }
  bool has_block_map() const { return block_map.q != 0; }
  /// The canonical form of equal problems: head_dim_v filled in, options dropped where they have no effect,
  /// int scalars that programs read as floats alone declared float.
  FLASHJIT_API AttentionSpec normalized() const;
  /// Throws Error(invalid_argument) that names the first field out of range and the allowed values.
  FLASHJIT_API void validate() const;
  bool operator==(const AttentionSpec&) const = default;
};

/// One pass of an attention, which is what a kernel computes: {spec, Pass::backward}. As text:
/// "fwd:bf16:d128:causal", "bwd:bf16:d128:causal:det", "append:bf16:d128:pages16", "jvp:bf16:d128:causal",
/// "bwd_jvp:..".
struct KernelSpec : AttentionSpec {
  Pass pass = Pass::forward;

  /// As AttentionSpec's, and without what the other pass alone has. The passes append, merge and quantize
  /// keep what they read: element types, head dimensions and the cache.
  FLASHJIT_API KernelSpec normalized() const;
  /// As AttentionSpec's, and refuses what the pass cannot do.
  FLASHJIT_API void validate() const;
  bool operator==(const KernelSpec&) const = default;
};

/// Sizes known at the call. As text: "b2:hq32:hkv8:sq4096:skv4096". With spec.varlen the batch is the number
/// of sequences, and the lengths are the longest sequence's. With a cache seqlen_kv is the call's
/// max_seqlen_kv, by default the table's columns * page_size. For append() seqlen_q is the new rows of a
/// sequence; merge() and quantize() read batch, heads_q and seqlen_q of their tensor.
struct AttentionShape {
  std::int64_t batch = 0;
  std::int64_t heads_q = 0;  ///< a multiple of heads_kv; query head h reads KV head h / (heads_q / heads_kv)
  std::int64_t heads_kv = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_kv = 0;

  /// Throws Error(invalid_argument) on negative sizes, on head counts that do not divide, on heads or a batch
  /// beyond 2^31 - 1 and on lengths beyond 2^31 - 1024 (kernels count in 32 bits, and their last tile reaches
  /// past the end). Sizes of zero are legal.
  FLASHJIT_API void validate() const;
  bool operator==(const AttentionShape&) const = default;
};

/// How it is computed: a family, its tile and its switches. Changes speed, never the mathematics.
///
/// As text: "sm80:br128:bc64:w4:s2:q_in_registers:min_blocks2:split:pack_gqa". Br counts queries and Bc keys
/// in both passes.
struct TileConfig {
  Family family = Family::simt;
  int br = 0;      ///< rows of Q in a tile
  int bc = 0;      ///< rows of K and V in a tile; in sm90's backward pass the blocks of a cluster share 128
                   ///< of them above d128, else more than 128
  int warps = 0;   ///< consumer warps; sm90 has four producer warps more. In its forward pass a warp has 16
                   ///< rows of Q; twice as many warps as Br needs make two Q tiles per CTA
  int stages = 1;  ///< pipeline stages of the operands that stream through shared memory
  bool q_in_registers = false;  ///< sm80 forward: keep Q's fragments in registers instead of re-reading them
  /// sm80: warps that have the same rows. In the backward pass up to d256 one of two is for dV, one for dK;
  /// above, each has some of the columns of O, of dK and of dV.
  int d_split = 1;
  int min_blocks = 1;     ///< thread blocks per multiprocessor: bounds the registers per thread
  bool split = false;     ///< of sm90 and sm80: split-KV forward, split-Q backward. Blocks share the keys of
                          ///< a Q tile (the queries of a KV tile), with as many splits as fit the device;
                          ///< another kernel combines them
  bool pack_gqa = false;  ///< PackGQA, with split, forward of sm90: a Q tile has rows of all heads that
                          ///< share K and V, and fewer queries; for specs that treat all heads alike
  bool cluster = false;   ///< with split, forward of sm90: the blocks that share a Q tile's keys are a
                          ///< cluster, whose eight blocks join their parts without another kernel
  bool tma = false;       ///< sm80 forward, on sm_90 and newer: TMA copies K and V, not cp.async
  /// sm90 and sm80, forward over K and V in formats that are decoded, sm90 over small pages: an entry does so
  /// once, into the workspace, and the main loop reads elements of 16 bits. Else each Q tile does.
  bool decode_cache = false;
  bool join_lists = false;  ///< sm90 forward with indices: an entry of its own joins the lists of some
                            ///< queries, which then share a tile

  bool operator==(const TileConfig&) const = default;
};

/// What planning and compiling need to know about a GPU: a value, with which the command plans, explains and
/// packs for GPUs that are not there.
struct DeviceInfo {
  std::string name;            ///< "NVIDIA H100 80GB HBM3", or the architecture when built by hand
  std::string arch;            ///< what NVRTC compiles for: "sm_80", "sm_90a", ...
  int compute_capability = 0;  ///< 80, 90, ...
  int multiprocessors = 0;
  int shared_per_block = 0;  ///< bytes, the opt-in limit of one thread block
  int shared_per_sm = 0;     ///< bytes
  int registers_per_sm = 0;
  std::int64_t l2_bytes = 0;
  std::string driver;  ///< the CUDA version of its driver, "13.0"; empty when built by hand

  /// A device from its architecture: "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100",
  /// "sm_100a", "sm_120", "sm_120a", "sm_121". The sizes are a common product's of that architecture.
  FLASHJIT_API static DeviceInfo parse(std::string_view arch);
  bool operator==(const DeviceInfo&) const = default;
};

FLASHJIT_API std::string to_string(const AttentionSpec& spec);
FLASHJIT_API std::string to_string(const KernelSpec& spec);
FLASHJIT_API std::string to_string(const AttentionShape& shape);
FLASHJIT_API std::string to_string(const TileConfig& config);
FLASHJIT_API std::string to_string(const DeviceInfo& device);  ///< its arch

/// Parsers throw Error(invalid_argument) that quotes the part they could not read and says what is allowed
/// there. A spec's pass defaults to forward, its options may come in any order, and "map64" means "map64x64".
FLASHJIT_API KernelSpec parse_spec(std::string_view text);
FLASHJIT_API AttentionShape parse_shape(std::string_view text);
FLASHJIT_API TileConfig parse_config(std::string_view text);

}  // namespace flashjit

// The runtime: compiles an attention kernel on first use, caches it, and afterwards just launches it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/pack.hpp"
#include "flashjit/spec.hpp"
#include "flashjit/tensor.hpp"

struct CUstream_st;  // the driver's and the CUDA runtime's stream handle: cudaStream_t and CUstream convert

namespace flashjit {

/// Null is the legacy default stream, however the caller was compiled. With per-thread default streams, pass
/// cudaStreamPerThread.
using Stream = CUstream_st*;

/// Inputs of tile lists: the arguments of the calls that will use them, as far as masks read them.
struct ListArgs {
  Workspace memory = {};  ///< where the lists go and stay; at least Runtime::list_bytes(spec, shape)
  const std::int32_t* kv_lengths = nullptr;
  BlockMapView block_map = {};
  std::span<const Capture> captures = {};  ///< all captures of the calls; the score's are not read
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_kv = nullptr;
};

/// Tile lists from Runtime::build_lists(), for any number of calls with the same pass, spec, shape, tile
/// configuration, block map, lengths and captures of the mask. The caller owns the memory.
struct TileLists {
  void* data = nullptr;
  std::string built_for = {};                       ///< spec, shape and tile configuration
  std::array<std::int64_t, 2> block_map_size = {};  ///< the map's batch and heads, which may be 1
};

/// O and LSE of the same queries over some of their keys.
struct PartialState {
  ConstTensorView out;         ///< [b, h, s, dv]
  const float* lse = nullptr;  ///< [b, h, s]
  RowStrides lse_strides = {};
};

/// Arguments of a call that computes a part of a larger problem, see Partial.
struct PartialArgs {
  /// With running_state: O, like `out` but fp32, and LSE of other keys, with the strides of lse. They may be
  /// out's and lse's memory. O of a row whose LSE is -inf may be anything. Of the forward pass.
  PartialState state = {};
  DropoutPlace dropout_place = {};  ///< with dropout_place
  /// SMs that persistent kernels leave free, e.g. for NCCL. Other kernels and stream-K use all.
  int reserved_sms = 0;
};

/// Arguments of O = attention(Q, K, V). Sizes: q [b, hq, sq, d], k [b, hkv, skv, d], v [b, hkv, skv, dv],
/// out [b, hq, sq, dv]; `out` has Q's type, or with spec.partial.fp32_out fp32, or is rows of
/// spec.epilogue.out_format: e4m3, or of NVFP4 bytes [b, hq, sq, dv / 2].
///
/// With spec.varlen, b sequences of different lengths are packed: q [1, hq, rows, d], k [1, hkv, rows_kv, d]
/// and so on. Sequence i has rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of Q and O, and cu_seqlens_kv[i] to
/// cu_seqlens_kv[i + 1] of K and V. batch_size, max_seqlen_q and max_seqlen_kv replace b, sq and skv, also
/// for a block map (its blocks count within each sequence), workspace_bytes() and prepare(). A maximum may
/// exceed the longest sequence, but not be smaller. LSE is packed like Q, [hq, rows]. Rows of O, dQ, dK and
/// dV that belong to no sequence, those from cu_seqlens[batch_size] on, are left as they are, or with
/// zero_unused_rows become zeros, and their LSE -inf. Programs count q and kv within their sequence and see
/// its own lengths.
///
/// cu_seqlens is not checked, because that would wait for the device. If it is wrong (negative, descending,
/// beyond the last row, or a sequence longer than its maximum), kernels cut the sequence to existing rows.
/// The results of the sequences concerned are then wrong, but nothing outside the tensors is read or written.
///
/// In a paged cache K and V are pools of pages, k [pages, hkv, page_size, d], with any strides (NHD, HND, K
/// and V in one tensor, layers in one tensor), and page_table says whose they are. In slots, k [slots, hkv,
/// capacity, d], sequence b has slot b, or the one that page_table names. In both, kv_lengths [b] says how
/// many keys a sequence has, max_seqlen_kv (0: all that table or slot have room for) how many it may have,
/// and spec.varlen says that Q alone is packed. Launches and workspace depend on these bounds alone, so that
/// a captured CUDA graph stays right while lengths and tables change. Page numbers and lengths are on the
/// device and not checked: where they are wrong the sequence's results are, too, but nothing outside the
/// tensors is read or written.
struct ForwardArgs {
  ConstTensorView q, k, v;
  /// With spec.prologue.q_rope: Q's columns behind V's, [b, hq, sq, d - dv]; q then has the first dv columns.
  ConstTensorView q_rope = {};
  TensorView out;                           ///< in memory of its own
  float* lse = nullptr;                     ///< [b, hq, sq], natural log of the row sums; null: not wanted
  RowStrides lse_strides = {};              ///< of lse, row_max and partial.state.lse
  std::optional<float> softmax_scale = {};  ///< finite and > 0; default 1 / sqrt(head_dim)
  /// [b] on the device: of padded keys, where padding begins; of a cache, how many keys each sequence has.
  const std::int32_t* kv_lengths = nullptr;
  BlockMapView block_map = {};  ///< with spec.block_map
  double dropout_p = 0.0;       ///< in [0, 1), with spec.dropout; rounded to a multiple of 2^-15
  std::uint64_t seed = 0;       ///< the dropout mask depends on (seed, offset, b, h, q, kv) alone
  std::uint64_t offset = 0;
  Workspace workspace = {};  ///< at least Runtime::workspace_bytes(spec, shape)
  /// A value for each name declared by the spec's programs, in any order; Capture::grad is ignored.
  std::span<const Capture> captures = {};
  const std::int32_t* cu_seqlens_q = nullptr;   ///< [batch_size + 1] on the device, with spec.varlen
  const std::int32_t* cu_seqlens_kv = nullptr;  ///< the same of K and V
  std::int64_t batch_size = 0;                  ///< sequences, with spec.varlen; 0: no row belongs to one
  std::int64_t max_seqlen_q = 0;                ///< longest sequence, with spec.varlen
  /// Longest sequence, with spec.varlen. With a cache, varlen or not: a bound of kv_lengths, by default all
  /// that a row of the page table, or a slot, has room for.
  std::int64_t max_seqlen_kv = 0;
  const float* sinks = nullptr;      ///< [hq] on the device, with spec.sinks
  const TileLists* lists = nullptr;  ///< from Runtime::build_lists(); null: built in this call, if needed
  /// Seed and offset on the device, 16-byte aligned, which the kernels read in place of the two above: a CUDA
  /// graph then has another dropout mask at each replay. Null: those above.
  const std::uint64_t* rng_state = nullptr;
  /// With spec.varlen: rows that belong to no sequence become zeros in `out`, and -inf in lse and row_max.
  bool zero_unused_rows = false;
  PageTableView page_table = {};  ///< of a paged cache, and where slots are not in order
  /// With spec.epilogue.row_max, like lse: the largest score that a query attends to, after the score program
  /// and without sinks; -inf where it attends to nothing. QK-clip's largest logit of a head is the largest of
  /// its rows'.
  float* row_max = nullptr;
  /// Scales of quantized K and V (spec.kv.k_format, v_format), finite and positive.
  ConstScaleView k_scale = {}, v_scale = {};
  /// Where a format has scales of blocks in a tensor of their own: [batch or pages, hkv, rows or groups of
  /// keys, scales and then zero points], of the scales' type, with any strides.
  ConstTensorView k_block_scale = {}, v_block_scale = {};
  /// Scales of FP8 Q (spec.prologue.q_codes): one, or one per sequence and KV head.
  ConstScaleView q_scale = {};
  IndicesView indices = {};  ///< with spec.indices: the keys that each query attends to
  /// With spec.kv.shared_prefix: one number on the device, how many first keys all sequences share. Every
  /// sequence has at least this many keys besides its new ones. 0: none. Kernels do not check it.
  const std::int32_t* prefix_length = nullptr;
  PartialArgs partial = {};
  /// With spec.epilogue.out_mod: O before that program, for the backward pass: like `out`, of Q's type, in
  /// memory of its own. Null data: not wanted.
  TensorView out_before_mod = {};
  /// With spec.epilogue.skip_softmax: from 0, which skips nothing and is the default, to 1. Keys of a KV tile
  /// are left out of O and LSE where exp(largest score in the tile - maximum so far) is below it for each of
  /// the rows that a kernel computes together. A key that is left out would have weighed less than that,
  /// relative to the row's heaviest: with n of them O changes by at most 2 n threshold max|V|. V of a skipped
  /// tile is not looked at, so that a NaN there is not seen. The CPU reference skips nothing.
  std::optional<float> skip_softmax_threshold = {};
  /// With spec.epilogue.skip_softmax: [2] on the device, ADDED to: tiles of the kernel's size that were
  /// visited and how many of these were skipped. Null: not wanted.
  std::int64_t* skip_softmax_counts = nullptr;
  /// With spec.epilogue.out_format e4m3 or NVFP4: one positive number on the device. O / out_scale is found
  /// as O times its reciprocal, in fp32. Engines whose global scale multiplies give its reciprocal.
  const float* out_scale = nullptr;
  /// Written: the scales of rows or of blocks, [b, hq, sq, scales of a row] of their type, with any strides.
  /// Rows without keys have scales of 1, as rows of zeros have. With spec.epilogue.swizzled_scales they are a
  /// matrix of a row for each token b * sq + q and a column for each block of each head, h * dv / 16 + block:
  /// [1, 1, b * sq rounded up to a multiple of 128, hq * dv / 16], contiguous, with element (r, c) at byte
  /// (r / 128 * columns + c / 4 * 4) * 128 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4. Rows behind the last
  /// token are not written.
  TensorView out_block_scale = {};
};

/// Arguments of O and its tangent, the derivative of O along the tangents of what it depends on: forward-mode
/// differentiation. The members of ForwardArgs describe O; row_max, caches, quantized K and V, indices
/// and a running state have no tangent. A tangent has its tensor's sizes and type, and any strides; null: it
/// is zero. With varlen rows of no sequence are left alone, or with zero_unused_rows become zeros in both.
/// Where a query attends to nothing its tangent is zero. A captured tensor whose tangent is given has it as
/// Capture::grad, which is then read, and the program declares "grad".
struct JvpArgs : ForwardArgs {
  ConstTensorView q_tangent, k_tangent, v_tangent;
  TensorView out_tangent;                ///< like `out`, in memory of its own
  float* lse_tangent = nullptr;          ///< like `lse`; may be null
  const float* sinks_tangent = nullptr;  ///< [hq] on the device, with spec.sinks; null: zero
};

/// Arguments of dQ, dK, dV from dO, which has Q's type. `lse` and `out` are the forward pass's, `out` of Q's
/// type, or with spec.partial.fp32_out fp32; gradients have their tensor's sizes, and its type, or with
/// spec.partial.fp32_grads fp32, and memory of their own. With spec.partial.add_grads they are added to.
/// Members that ForwardArgs has mean the same, and are given what the forward pass was given; the workspace
/// is that of Pass::backward. With spec.epilogue.out_mod `out` is the forward pass's out_before_mod, and dO
/// the gradient of out_mod's result.
struct BackwardArgs {
  ConstTensorView q, k, v, out;
  const float* lse = nullptr;   ///< [b, hq, sq]
  RowStrides lse_strides = {};  ///< of lse and dlse
  ConstTensorView dout;
  TensorView dq, dk, dv;
  std::optional<float> softmax_scale = {};
  const std::int32_t* kv_lengths = nullptr;
  BlockMapView block_map = {};
  double dropout_p = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  Workspace workspace = {};
  std::span<const Capture> captures = {};
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_kv = nullptr;
  std::int64_t batch_size = 0;
  std::int64_t max_seqlen_q = 0, max_seqlen_kv = 0;
  const float* sinks = nullptr;
  float* dsinks = nullptr;           ///< [hq], ADDED to: zero it first; null: not wanted
  const TileLists* lists = nullptr;  ///< from build_lists() with Pass::backward; null: built in this call
  const std::uint64_t* rng_state = nullptr;
  bool zero_unused_rows = false;  ///< of dq, dk and dv
  const float* dlse = nullptr;    ///< like lse: its gradient; null: there is none
  IndicesView indices = {};
  PartialArgs partial = {};
};

/// Arguments of tangents of gradients: the derivative of the backward pass along tangents of what it reads.
/// It is a Hessian-vector product; the gradient of the backward pass, with the gradients of dQ, dK and dV as
/// tangents of Q, K and V and without one of dO; and the gradient of O's tangent, with that tangent's
/// gradient as dO and O's own as dout_tangent. Members of BackwardArgs describe the backward pass, but dq,
/// dk, dv, dsinks and the captures' `grad` get tangents of these gradients; `out` and `lists` are not read,
/// and may be null. The workspace is that of Pass::backward_jvp. A tangent has its tensor's sizes and type,
/// and any strides; null: it is zero.
struct BackwardJvpArgs : BackwardArgs {
  ConstTensorView q_tangent, k_tangent, v_tangent, dout_tangent;
  const float* dlse_tangent = nullptr;   ///< like `dlse`; null: zero
  const float* sinks_tangent = nullptr;  ///< [hq] on the device, with spec.sinks; null: zero
  /// One for each of `captures`, in their order: fp32, contiguous, the tensor's sizes, on the device, where
  /// the program declares "grad"; not read elsewhere.
  std::span<const float* const> capture_tangents = {};
};

/// Completes `spec` from a call's arguments, so that {.mask = causal()} is enough. Replaces element types by
/// the views', whose dtype must be set, head dimensions that are 0, and a contiguous layout of K and V.
/// Switches on each feature whose argument is given, except block_map. A page table of one column means
/// slots, a wider one the pages of k. Without a table, kv_lengths are padding: set KvLayout::slots() where
/// they are a cache's. Forward: unquantized V at K's address and strides sets shared_kv. Scales are per key
/// or per page where they have such sizes. Throws Error(invalid_argument) where a view has no dtype.
FLASHJIT_API AttentionSpec spec_of(const ForwardArgs& args, AttentionSpec spec = {});
FLASHJIT_API AttentionSpec spec_of(const BackwardArgs& args, AttentionSpec spec = {});

/// Rotary position embedding of the first `dims` dimensions of a head: pair i is rotated by the angle of the
/// row's position, from the tables, or position * theta^(-2i / dims).
struct RopeView {
  const void *cos = nullptr, *sin = nullptr;  ///< on the device, [table_rows, dims / 2]; null: by theta
  std::int64_t table_rows = 0;                ///< positions that the tables have
  std::int64_t stride = 0;                    ///< from one position to the next, in elements; 0: dims / 2
  DType type = DType::fp32;                   ///< of the tables: fp32, or the spec's
  float theta = 0;                            ///< without tables; 0 and no tables: nothing is rotated
  int dims = 0;                               ///< a multiple of 16; 0: all of head_dim
  bool interleaved = false;                   ///< pairs of dimensions (2i, 2i + 1); else (i, i + dims / 2)
  const std::int32_t* positions = nullptr;    ///< on the device, [b, n] of n rows each, with varlen [rows],
                                              ///< for K and Q alike; null: their keys' numbers
  /// M-RoPE: how many pairs are rotated by the time, the height and the width of a row, together all.
  /// positions are then three such arrays, one behind the other. Zeros: one position rotates all pairs.
  std::array<int, 3> sections = {};
  bool interleaved_sections =
      false;  ///< pairs of the three take turns, until the height and width have theirs
};

/// RMS norm of a head's row, in fp32 and before the rotation: x * rsqrt(mean(x^2) + eps) * weight.
struct NormView {
  const void* weight = nullptr;  ///< on the device, [head_dim]; null: no norm
  DType type = DType::fp32;      ///< of the weight: fp32, or the spec's
  float eps = 1e-6f;
};

/// Rows of a cache, one for each new row: page * page size + row of the page (slots of a cache count as
/// pages, of the capacity's rows). Negative numbers, and rows beyond the cache, are left out.
struct SlotsView {
  const void* data = nullptr;  ///< on the device, [b, n] contiguous, with varlen [rows]; null: none
  ElementType type = ElementType::int64;  ///< or int32
};

/// Arguments of append(): new rows of K (rotated) and V, stored in a cache, and rows of Q to rotate. New row
/// i of the n of sequence b is key kv_lengths[b] - n + i: kv_lengths counts the new rows already, as
/// forward() then wants it. Sizes: k [b, hkv, n, d], v [b, hkv, n, dv], q and q_out [b, hq, n, d], the caches
/// as k and v of ForwardArgs. With spec.varlen the rows of batch_size sequences are packed, k [1, hkv, rows,
/// d] and so on, and sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
///
/// What the device alone knows is not checked. A row without a sequence, without a place in the cache (its
/// key's number is negative or beyond max_seqlen_kv, or its page does not exist) or without a row in the
/// tables is left out: nothing is written for it.
struct AppendArgs {
  ConstTensorView k, v;
  TensorView k_cache, v_cache;
  const std::int32_t* kv_lengths = nullptr;  ///< [b] on the device: the keys of each, with the new ones
  PageTableView page_table = {};             ///< as of ForwardArgs
  ConstTensorView q = {};                    ///< null data: there is none
  TensorView q_out = {};                     ///< may be q
  RopeView rope = {};
  const std::int32_t* cu_seqlens_q = nullptr;  ///< [batch_size + 1] on the device, with spec.varlen
  std::int64_t batch_size = 0;                 ///< sequences, with spec.varlen
  std::int64_t max_seqlen_kv = 0;              ///< the most keys of a sequence; 0: all there is room for
  /// Scales of a quantized cache (spec.kv), as in ForwardArgs. Per-head scales are inputs; larger
  /// values saturate. With spec.kv.key_scales each new key's scale is written; sizes are 1 in sequences
  /// alone.
  ScaleView k_scale = {}, v_scale = {};
  TensorView k_block_scale = {}, v_block_scale = {};  ///< as of ForwardArgs, written
  /// Where each new row goes, as engines' slot_mapping has it, in place of kv_lengths, page_table,
  /// cu_seqlens_q, batch_size and max_seqlen_kv. A rotation then needs rope.positions.
  SlotsView slots = {};
  NormView k_norm = {}, q_norm = {};
};

/// Arguments of merge(): O and LSE over all keys, from partial states whose keys are disjoint. A state with
/// LSE of -inf gives nothing, whatever its O. Without any key O is 0 and LSE -inf.
struct MergeArgs {
  std::span<const PartialState> states;  ///< 1 to 8
  TensorView out;                        ///< [b, h, s, dv]; may be one of the states', if of its type
  float* lse = nullptr;                  ///< [b, h, s]; null: not wanted
  RowStrides lse_strides = {};
  std::optional<DType> states_type = {}, out_type = {};  ///< fp32, or by default the spec's
};

/// Arguments of quantize(): x as codes and scales, as forward() takes them. The largest of the elements that
/// share a scale becomes the largest code. Where all elements are zero, or there are none, the scale is
/// 1.
struct QuantizeArgs {
  ConstTensorView x;  ///< Q, K or V [b, h, s, d], or a pool of pages; of the spec's type
  TensorView codes;   ///< x's rows in spec.kv.k_format: bytes, or of x's sizes
  /// Written. Its sizes say what shares a scale: {1, 1, 1, 1} the tensor, {b, 1, h, 1} a head of a sequence,
  /// {1, b, h, 1} a head of a page; with s in the last place, a row. Without rows, h may be a divisor of x's
  /// heads, such as the KV heads of Q.
  ScaleView scale;
  /// Rows are multiplied by an orthogonal matrix first: blocks of a Hadamard matrix, of the largest power of
  /// two that divides d. Applied to both Q and K it preserves Q K^T and spreads outliers.
  bool hadamard = false;
  /// Before that, rows are rotated by their positions, [b, s], by default 0, 1, 2 ... of each b. A row
  /// without a position in the tables is not rotated.
  RopeView rope = {};
  /// Written, as ForwardArgs::k_block_scale. Where keys share scales, x has whole groups of them.
  TensorView block_scale = {};
};

/// Whether to compile a kernel that is in no pack and not in the cache.
enum class JitMode : std::uint8_t { on, off };

/// Explicit options win over the environment; tools/docs/environment.md lists the variables. Paths are opened
/// at first use. A pack that cannot be read is logged and skipped; with JitMode::off its kernels are then
/// missing at the first call (kernel_missing), or already at prepare().
struct RuntimeOptions {
  /// Default FLASHJIT_CACHE_DIR, XDG_CACHE_HOME/flashjit, ~/.cache/flashjit; "" keeps nothing on disk.
  std::optional<std::string> cache_dir = {};
  std::vector<std::string> packs = {};  ///< searched first to last before the cache; then FLASHJIT_PACKS
  std::vector<EmbeddedPack> embedded_packs = {};  ///< searched before `packs`
  std::optional<JitMode> jit = {};                ///< default FLASHJIT_JIT, else on
  std::optional<std::string> template_dir = {};   ///< read templates from here instead of the embedded ones
  /// libnvrtc or its folder; default FLASHJIT_NVRTC, else the usual places.
  std::optional<std::string> nvrtc = {};
  /// Slow kernels that print each index of a captured tensor, page number and length that is out of range;
  /// default FLASHJIT_CHECK_INDICES, else false.
  std::optional<bool> check_indices = {};
  /// Kernels whose waits end with a launch error after 10 seconds, instead of hanging because of a bug in a
  /// kernel or in template_dir. The next synchronization or call then reports CUDA_ERROR_LAUNCH_FAILED or
  /// CUDA_ERROR_ILLEGAL_INSTRUCTION, and so do all later ones, because the process has lost its context.
  /// Results are the same. Needs NVRTC, as packs hold no such kernels. Default FLASHJIT_CHECK_WAITS, else
  /// false.
  std::optional<bool> check_waits = {};
  /// Bytes of kernels in cache_dir at which the least recently used are removed, down to 7/8; default
  /// FLASHJIT_CACHE_LIMIT, else 2 GiB.
  std::optional<std::uint64_t> cache_limit = {};
  /// The first use of a shape without a record of this device starts its tuning: in a thread, on its own
  /// stream, with its own inputs in device memory, for some seconds. Calls meanwhile use the current
  /// configuration. When tuning finishes they switch to one of the same family that needs no more workspace,
  /// and the record goes to the cache. The switch may change the last bits of results. Keep the context until
  /// stop_tuning() is called or the Runtime destroyed. Needs NVRTC. Specs with tile lists are not tuned,
  /// because build_lists() builds lists for one configuration: tune those beforehand. Default
  /// FLASHJIT_TUNE_IN_BACKGROUND, else false.
  std::optional<bool> tune_in_background = {};
  /// A call whose kernel must be compiled does not wait where another configuration of its spec is in memory
  /// and needs no more workspace: that one computes it, and a thread compiles the better one, which later
  /// calls use. Where none is in memory, a call on Hopper that is not captured waits for a plain kernel of
  /// family sm80, which takes about half the time to compile. The switch may change the last bits of results.
  /// Calls wait as ever where the spec wants the same bits each time, with tile lists and with a
  /// configuration that was given to prepare(), which always compiles. Keep the context as for
  /// tune_in_background. Default FLASHJIT_COMPILE_IN_BACKGROUND, else false.
  std::optional<bool> compile_in_background = {};
  /// Receives one line at a time, from any thread; default stderr. It may call the library. What it throws,
  /// and what stderr does not take, is dropped: a log never fails a call.
  std::function<void(std::string_view)> log = {};
};

/// Where a kernel came from.
enum class KernelOrigin : std::uint8_t { memory, pack, disk, compiled };
FLASHJIT_API std::string to_string(KernelOrigin origin);  // "memory", "pack", "disk", "compiled"

/// Resources of one entry of a compiled kernel.
struct EntryReport {
  std::string entry;
  int registers = 0;
  int spill_bytes = 0;   ///< stores and loads together
  int shared_bytes = 0;  ///< static and dynamic together
  int threads = 0;       ///< a block
};

/// Describes a prepared kernel, for logs and tables.
struct KernelReport {
  KernelSpec spec = {};
  TileConfig config = {};
  ConfigSource config_source = ConfigSource::heuristic;
  std::string key = {};  ///< the directory's name in cache and pack; empty if there is nothing to launch
  KernelOrigin origin = KernelOrigin::memory;
  double render_ms = 0, compile_ms = 0, load_ms = 0;  ///< spent by this call
  std::vector<EntryReport> entries = {};
};

/// Shapes of calls: each batch with each seqlen_q and seqlen_kv, from `first` to `last`, of the same heads. A
/// step of 0 means the ends and the powers of two between them, as engines round bounds up; another one
/// first, first + step and so on, and last.
struct ShapeRange {
  AttentionShape first, last;
  AttentionShape step = {};  ///< its heads are not read

  /// Throws Error(invalid_argument) where a size of `first` is 0 or above that of `last`, heads differ, a
  /// step is negative, or there are more than 2^16 shapes.
  FLASHJIT_API std::vector<AttentionShape> shapes() const;
};

/// What prepare_range() did.
struct RangeReport {
  std::vector<KernelReport> kernels = {};  ///< one for each configuration, as they were made
  std::size_t configurations = 0;          ///< that the shapes choose; more than `kernels` if it was stopped
  std::size_t shapes = 0;
  std::size_t workspace_bytes = 0;  ///< the most that a call of these shapes needs
};

/// Told by prepare_range() in the thread that called it: how many of its kernels are made, at first none.
/// Returning false stops it.
using RangeProgress = std::function<bool(std::size_t made, std::size_t configurations)>;

/// Compiles, caches and launches attention kernels. Thread-safe; works in the context that is current at the
/// call. It creates no context, allocates no device memory and never synchronizes, except in the thread of
/// RuntimeOptions::tune_in_background. Its kernels stay loaded until it is destroyed: first wait for all
/// launches, and drop graphs that captured one.
class FLASHJIT_API Runtime {
 public:
  /// Opens no driver and no file. Throws Error(invalid_argument) where an environment variable has a value
  /// that is not allowed.
  explicit Runtime(RuntimeOptions options = {});
  ~Runtime();
  Runtime(Runtime&&) noexcept;
  Runtime& operator=(Runtime&&) noexcept;

  /// Launches the forward pass on `stream`; compiles it on the first call of a spec, also while the stream is
  /// captured, which the capture does not see (the host waits): prepare() does that before.
  /// Throws Error before anything is launched when an argument is wrong.
  void forward(const AttentionSpec& spec, const ForwardArgs& args, Stream stream);
  /// Launches the backward pass (FlashAttention-2, algorithm 2) on `stream`.
  void backward(const AttentionSpec& spec, const BackwardArgs& args, Stream stream);
  /// Launches O and its tangent on `stream`.
  void jvp(const AttentionSpec& spec, const JvpArgs& args, Stream stream);
  /// Launches tangents of dQ, dK and dV on `stream`.
  void backward_jvp(const AttentionSpec& spec, const BackwardJvpArgs& args, Stream stream);
  /// With the arguments first, the spec is completed from them: spec_of(args, spec). With the spec first, it
  /// is taken as it is.
  void forward(const ForwardArgs& args, const AttentionSpec& spec, Stream stream) {
    forward(spec_of(args, spec), args, stream);
  }
  void backward(const BackwardArgs& args, const AttentionSpec& spec, Stream stream) {
    backward(spec_of(args, spec), args, stream);
  }
  void jvp(const JvpArgs& args, const AttentionSpec& spec, Stream stream) {
    jvp(spec_of(args, spec), args, stream);
  }
  void backward_jvp(const BackwardJvpArgs& args, const AttentionSpec& spec, Stream stream) {
    backward_jvp(spec_of(args, spec), args, stream);
  }
  void forward(const ForwardArgs& args, Stream stream) { forward(spec_of(args), args, stream); }
  void backward(const BackwardArgs& args, Stream stream) { backward(spec_of(args), args, stream); }

  /// Stores new rows of K and V in a cache: K rotated, both quantized if the cache is. Rotates new rows of Q.
  /// Takes forward()'s spec; reads element types, head dimensions, varlen and kv. Without tables and theta
  /// rows are copied, and q to q_out. Needs no workspace. Throws Error as forward() does.
  void append(const AttentionSpec& spec, const AppendArgs& args, Stream stream);
  /// Joins partial states. Reads element type and head_dim_v from the spec. Needs no workspace. Throws Error
  /// as forward() does.
  void merge(const AttentionSpec& spec, const MergeArgs& args, Stream stream);
  /// Quantizes a tensor to spec.kv.k_format. Reads element types, head_dim and that format from the spec.
  /// Needs no workspace. Throws Error as forward() does.
  void quantize(const AttentionSpec& spec, const QuantizeArgs& args, Stream stream);

  // These ask about one pass, by default the forward one. A KernelSpec, such as parse_spec() returns, has its
  // own.

  /// Compiles and loads now on the current device, e.g. before a graph capture: the configuration of calls of
  /// this shape. Other shapes may choose another one. With `config`, that configuration is used for this
  /// pass, spec and shape from now on.
  KernelReport prepare(const AttentionSpec& spec, const AttentionShape& shape, Pass pass = Pass::forward,
                       const std::optional<TileConfig>& config = {}) {
    return prepare(KernelSpec{spec, pass}, shape, config);
  }
  KernelReport prepare(const KernelSpec& spec, const AttentionShape& shape,
                       const std::optional<TileConfig>& config = {});
  /// The same for both passes in parallel, in little more time than for one. For training. Returns the
  /// forward pass's report, then the backward's.
  std::array<KernelReport, 2> prepare_both(const AttentionSpec& spec, const AttentionShape& shape);
  /// Compiles in parallel the kernels that the first calls of both passes would wait for. With
  /// compile_in_background these may be plain kernels; else it is prepare_both().
  void prepare_first_calls(const AttentionSpec& spec, const AttentionShape& shape);

  /// prepare() for all shapes of a range, with as many compilations at once as there are cores: afterwards no
  /// call of these shapes compiles. Stopped by `progress`, or by an error, it finishes the kernels under way;
  /// those made stay in memory and in the cache, so that the same call goes on from there.
  RangeReport prepare_range(const AttentionSpec& spec, const ShapeRange& range, Pass pass = Pass::forward,
                            const RangeProgress& progress = {}) {
    return prepare_range(KernelSpec{spec, pass}, range, progress);
  }
  RangeReport prepare_range(const KernelSpec& spec, const ShapeRange& range,
                            const RangeProgress& progress = {});

  /// Bytes of Workspace that a call needs: see tools/docs/memory.md. Not monotonic in the shape: a small
  /// batch may need more than a large one, because it splits keys. prepare_range() tells the largest of a
  /// range. Compiles nothing; needs a current context. A call that receives its lists needs
  /// list_bytes() less.
  std::size_t workspace_bytes(const AttentionSpec& spec, const AttentionShape& shape,
                              Pass pass = Pass::forward) {
    return workspace_bytes(KernelSpec{spec, pass}, shape);
  }
  std::size_t workspace_bytes(const KernelSpec& spec, const AttentionShape& shape);

  /// The same of one call with spec_of(args, spec); its workspace is not read.
  std::size_t workspace_bytes(const ForwardArgs& args, const AttentionSpec& spec = {});
  std::size_t workspace_bytes(const BackwardArgs& args, const AttentionSpec& spec = {});
  std::size_t workspace_bytes(const JvpArgs& args, const AttentionSpec& spec = {});
  std::size_t workspace_bytes(const BackwardJvpArgs& args, const AttentionSpec& spec = {});

  /// Bytes of memory that build_lists() needs; 0 if the kernels use no lists.
  std::size_t list_bytes(const AttentionSpec& spec, const AttentionShape& shape, Pass pass = Pass::forward) {
    return list_bytes(KernelSpec{spec, pass}, shape);
  }
  std::size_t list_bytes(const KernelSpec& spec, const AttentionShape& shape);

  /// Builds the tile lists of a block map or a mask on `stream` once, for many layers and steps: calls that
  /// receive the result do not build them again. Each pass has its own lists. If the kernels use no lists,
  /// nothing is launched, and calls accept the result all the same. Throws Error as forward() does.
  TileLists build_lists(const AttentionSpec& spec, const AttentionShape& shape, const ListArgs& args,
                        Stream stream, Pass pass = Pass::forward) {
    return build_lists(KernelSpec{spec, pass}, shape, args, stream);
  }
  TileLists build_lists(const KernelSpec& spec, const AttentionShape& shape, const ListArgs& args,
                        Stream stream);

  /// Ends RuntimeOptions::tune_in_background and compile_in_background for good: waits for the current
  /// compilation or measurement, some seconds at most, and drops the rest. Tuned configurations stay in use.
  void stop_tuning();

  /// The device of the current context, which can() takes. Throws Error(no_driver) or Error(no_device).
  DeviceInfo device();

 private:
  friend class Engine& engine_of(Runtime& runtime);  // for the C interface
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit

// The runtime: compiles an attention on first use, keeps it, and launches it ever after.
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

/// Null is the legacy default stream, however the caller was compiled: with per-thread default streams give
/// cudaStreamPerThread.
using Stream = CUstream_st*;

/// What tile lists are made of: the arguments of the calls that will use them, as far as masks see them.
struct ListArgs {
  Workspace memory = {};  ///< where the lists go and stay; at least Runtime::list_bytes(spec, shape)
  const std::int32_t* kv_lengths = nullptr;
  BlockMapView block_map = {};
  std::span<const Capture> captures = {};  ///< all that the calls give; those of the score are not read
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_kv = nullptr;
};

/// Tile lists that Runtime::build_lists() made, for any number of calls of the same pass, spec, shape and
/// tile configuration, whose block map, lengths and values of the mask's names are the same. The memory is
/// the caller's.
struct BlockLists {
  void* data = nullptr;
  std::string built_for = {};                       ///< spec, shape and tile configuration
  std::array<std::int64_t, 2> block_map_size = {};  ///< the map's batch and heads, which may be 1
};

/// Arguments of O = attention(Q, K, V). Sizes: q [b, hq, sq, d], k [b, hkv, skv, d], v [b, hkv, skv, dv],
/// out [b, hq, sq, dv].
///
/// With spec.varlen, b sequences of unlike lengths are packed: q [1, hq, rows, d], k [1, hkv, rows_kv, d] and
/// so on, where sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of Q and O, and
/// cu_seqlens_kv[i] to cu_seqlens_kv[i + 1] of K and V. batch_size, max_seqlen_q and max_seqlen_kv take the
/// place of b, sq and skv (also for a block map, whose blocks count within each sequence, and for
/// workspace_bytes() and prepare()); a maximum may be larger than the longest sequence, never smaller. Rows
/// of LSE past a sequence's end are not written. Rows of O, dQ, dK and dV that belong to no sequence, those
/// from cu_seqlens[batch_size] on, are left as they are, or with zero_unused_rows become zeros. Programs
/// count q and kv within their sequence and see its own lengths.
///
/// Nobody checks cu_seqlens, as that would wait for the device. Where it is wrong (negative, descending,
/// beyond the last row, or a sequence longer than its maximum), kernels cut the sequence to rows that there
/// are, and the results of the sequences that it concerns are wrong; nothing outside of the tensors is read
/// or written.
struct ForwardArgs {
  ConstTensorView q, k, v;
  TensorView out;
  float* lse = nullptr;  ///< [b, hq, sq] contiguous, natural log of the row sums; may be null
  std::optional<float> softmax_scale = {};  ///< finite and > 0; default 1 / sqrt(head_dim)
  const std::int32_t* kv_lengths =
      nullptr;                  ///< [b] on the device, with spec.kv_lengths: keys from there on are padding
  BlockMapView block_map = {};  ///< with spec.block_map
  double dropout_p = 0.0;       ///< in [0, 1), with spec.dropout; rounded to a multiple of 2^-15
  std::uint64_t seed = 0;       ///< the dropout mask depends on (seed, offset, b, h, q, kv) alone
  std::uint64_t offset = 0;
  Workspace workspace = {};                ///< at least Runtime::workspace_bytes(spec, shape)
  std::span<const Capture> captures = {};  ///< a value for each name that the spec's programs declare, in any
                                           ///< order; Capture::grad is not looked at
  const std::int32_t* cu_seqlens_q =
      nullptr;  ///< [batch_size + 1] on the device, from 0 up, with spec.varlen
  const std::int32_t* cu_seqlens_kv = nullptr;       ///< the same of K and V
  std::int64_t batch_size = 0;                       ///< sequences, with spec.varlen
  std::int64_t max_seqlen_q = 0, max_seqlen_kv = 0;  ///< longest sequence, with spec.varlen
  const float* sinks = nullptr;                      ///< [hq] on the device, with spec.sinks
  const BlockLists* lists = nullptr;  ///< of Runtime::build_lists(); null: made in this call, where needed
  /// Seed and offset on the device, 16-byte aligned, which the kernels read in place of the two above: a CUDA
  /// graph then has another dropout mask at each replay. Null: those above.
  const std::uint64_t* rng_state = nullptr;
  bool zero_unused_rows = false;  ///< with spec.varlen: zeros in rows of `out` that belong to no sequence
};

/// Arguments of dQ, dK, dV from dO. `lse` and `out` are the forward pass's; gradients have their tensor's
/// sizes.
struct BackwardArgs {
  ConstTensorView q, k, v, out;
  const float* lse = nullptr;  ///< [b, hq, sq] contiguous
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
  float* dsinks = nullptr;  ///< [hq], ADDED to: zero it first; null: not wanted
  const BlockLists* lists =
      nullptr;  ///< of Runtime::build_lists() with Pass::backward; null: made in this call
  const std::uint64_t* rng_state = nullptr;
  bool zero_unused_rows = false;  ///< of dq, dk and dv
  const float* dlse = nullptr;    ///< [b, hq, sq] contiguous: the gradient of LSE; null: there is none
};

/// Whether a kernel that no pack and no cache holds may be compiled.
enum class JitMode : std::uint8_t { on, off };

/// Explicit options win over the environment; tools/docs/environment.md lists the variables.
struct RuntimeOptions {
  std::optional<std::string> cache_dir = {};  ///< default FLASHJIT_CACHE_DIR, XDG_CACHE_HOME/flashjit,
                                              ///< ~/.cache/flashjit; "" keeps nothing on disk
  std::vector<std::string> packs = {};  ///< searched first to last before the cache; then FLASHJIT_PACKS
  std::vector<EmbeddedPack> embedded_packs = {};  ///< searched before `packs`
  std::optional<JitMode> jit = {};                ///< default FLASHJIT_JIT, else on
  std::optional<std::string> template_dir = {};   ///< read templates from here instead of the embedded ones
  std::optional<std::string> nvrtc = {};   ///< libnvrtc or the folder that holds it; default FLASHJIT_NVRTC,
                                           ///< else the usual places
  std::optional<bool> check_indices = {};  ///< slow kernels that print each index of a captured tensor that
                                           ///< is out of range; default FLASHJIT_CHECK_INDICES, else false
  /// Kernels whose waits for each other's threads, should one take longer than 10 seconds, end with an error
  /// of the launch in place of a hang: a bug of a kernel, or of templates in template_dir. What next reaches
  /// the device, such as a synchronise or the next call, reports CUDA_ERROR_LAUNCH_FAILED or
  /// CUDA_ERROR_ILLEGAL_INSTRUCTION, and so does all that follows in this process, whose context is lost.
  /// The results are the same. Needs NVRTC: packs hold no such kernels. Default FLASHJIT_CHECK_WAITS, else
  /// false.
  std::optional<bool> check_waits = {};
  std::optional<std::uint64_t> cache_limit = {};  ///< bytes of kernels in cache_dir at which those that were
                                                  ///< not used for longest are removed, which leaves 7/8;
                                                  ///< default FLASHJIT_CACHE_LIMIT, else 2 GiB
  /// The first use of a shape that no record of this device was measured for starts its tuning: in a thread,
  /// on a stream of its own, with inputs of its own in device memory for as long as it takes, some seconds.
  /// Calls go on with what is known, and switch when it is done to a configuration of the same family that
  /// needs no more workspace; the record goes to the cache. Results may change in their last bits when it
  /// switches. Keep the context until stop_tuning() was called or the Runtime destroyed. Needs NVRTC. Not for
  /// specs that have tile lists, which build_lists() makes for one configuration: tune those beforehand.
  /// Default FLASHJIT_TUNE_IN_BACKGROUND, else false.
  std::optional<bool> tune_in_background = {};
  std::function<void(std::string_view)> log = {};  ///< receives one line at a time; default stderr
};

/// Where a kernel came from, and what that took.
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

/// What a prepared kernel is, for logs and tables.
struct KernelReport {
  AttentionSpec spec = {};
  TileConfig config = {};
  std::string config_source =
      {};                ///< "given", "tuned", "tuned elsewhere", "tuned for a near shape", "heuristic"
  std::string key = {};  ///< the directory's name in cache and pack; empty: nothing to launch, no kernel
  KernelOrigin origin = KernelOrigin::memory;
  double render_ms = 0, compile_ms = 0, load_ms = 0;  ///< spent by this call
  std::vector<EntryReport> entries = {};
};

/// Compiles, caches and launches attention kernels. Safe from many threads; works on whatever context is
/// current at the call. Creates no context, allocates no device memory, and never synchronises (but for the
/// thread that RuntimeOptions::tune_in_background asks for). Keeps its kernels loaded until it is destroyed:
/// wait for what was launched, and drop graphs that captured a launch, before that.
class FLASHJIT_API Runtime {
 public:
  explicit Runtime(RuntimeOptions options = {});
  ~Runtime();
  Runtime(Runtime&&) noexcept;
  Runtime& operator=(Runtime&&) noexcept;

  /// Launches the forward pass on `stream`; compiles it on the first call of a spec.
  /// Throws Error before anything is launched when an argument is wrong.
  void forward(const AttentionSpec& spec, const ForwardArgs& args, Stream stream);
  /// Launches the backward pass (FlashAttention-2, algorithm 2) on `stream`.
  void backward(const AttentionSpec& spec, const BackwardArgs& args, Stream stream);

  /// Compiles and loads now on the current device, e.g. before a graph capture. spec.pass chooses the pass.
  /// With `config`, that configuration is used for this spec and shape from now on.
  KernelReport prepare(const AttentionSpec& spec, const AttentionShape& shape,
                       const std::optional<TileConfig>& config = {});
  /// The same for both passes at once, whatever spec.pass is, in little more time than one takes: before
  /// training. Returns the forward pass's report, then the backward's.
  std::array<KernelReport, 2> prepare_both(const AttentionSpec& spec, const AttentionShape& shape);

  /// Bytes of Workspace that a call needs: see tools/docs/memory.md. spec.pass chooses the pass. A call that
  /// is given its lists needs list_bytes() less.
  std::size_t workspace_bytes(const AttentionSpec& spec, const AttentionShape& shape);

  /// Bytes of memory that build_lists() needs; 0 where the kernels walk no lists. spec.pass chooses the pass.
  std::size_t list_bytes(const AttentionSpec& spec, const AttentionShape& shape);

  /// Makes the tile lists of a block map or a mask on `stream` once, for many layers and steps: calls that
  /// are given the result do not make them again. spec.pass chooses the pass; each has lists of its own.
  /// Where the kernels walk no lists, nothing is launched, and calls take the result all the same. Throws
  /// Error as forward() does.
  BlockLists build_lists(const AttentionSpec& spec, const AttentionShape& shape, const ListArgs& args,
                         Stream stream);

  /// Whether some family can do the problem on the current device, or why none can.
  Support supports(const AttentionSpec& spec, const AttentionShape& shape);

  /// Ends the tuning that RuntimeOptions::tune_in_background asked for, for good: waits for the compile or
  /// measurement under way, some seconds at most, and drops the rest. What was tuned stays in use.
  void stop_tuning();

  /// The device of the current context. Throws Error(no_driver) or Error(no_device).
  DeviceInfo device();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit

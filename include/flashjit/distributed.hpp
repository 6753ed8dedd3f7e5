// Attention over a sequence whose rows the ranks of an NCCL communicator share, forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flashjit/runtime.hpp"

namespace flashjit {

/// ring: K and V go round while the kernels of the step before run. all_gather: every rank gathers them once.
/// ulysses: each rank gets all rows of its share of the heads, which both kinds of heads must divide into.
enum class SharingScheme : std::uint8_t { ring, all_gather, ulysses };
/// Which rows a rank has: neighbours; or, of twice as many blocks as ranks, block r and the r-th from the
/// end, so that a causal mask leaves all ranks the same work.
enum class ShardLayout : std::uint8_t { contiguous, zigzag };

struct SharedSequence {
  /// Element type, head dimensions, programs, dropout and sinks; nothing else. Programs see positions, heads
  /// and lengths of the whole sequence, or with documents, whose number is `b`, of the document. Their names
  /// do not begin with "part_".
  AttentionSpec spec;
  std::int64_t batch = 1, heads_q = 1, heads_kv = 1;
  std::int64_t rows = 0;  ///< of each rank's shard; even with zigzag
  SharingScheme scheme = SharingScheme::ring;
  ShardLayout layout = ShardLayout::zigzag;
  /// With `causal`: how many keys a query sees, the last at its own position; 0: all.
  std::int64_t window = 0;
  /// Where packed documents begin in the whole sequence, and where the last one ends: masks count in each.
  /// Each part of one in a chunk is a call, and the batch is 1. Empty: there are none.
  std::vector<std::int64_t> documents = {};
  int reserved_sms = 0;  ///< left to transfers of a ring while these are under way, see ForwardArgs
  /// Two levels, with ring and all_gather: the ncclComm_t of ranks that share heads, as in ulysses, such as
  /// ranks of one host. Together they have the shard of one rank of the other communicator, of as many times
  /// the rows; each has consecutive rows of it, in the order of their ranks. Null: one level.
  void* heads_communicator = nullptr;
};

/// This rank's q, out [b, hq, rows, ...], k, v [b, hkv, rows, ...], contiguous, 16-byte aligned, and LSE
/// [chunks, b, hq, rows / chunks] with one chunk, or with zigzag two; with documents [hq, rows] of each part
/// of one in a chunk, one after the other. Where ranks share heads, LSE is of this rank's heads and of all
/// rows that the ranks have, with ulysses in one chunk. Captures and sinks are the whole problem's, and
/// the same on all ranks. With spec.dropout the mask is the whole sequence's, and with documents (b, q,
/// kv) are a document's number and places in it: all ranks give the same dropout_p, seed and offset.
struct SharedForwardArgs {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  std::optional<float> softmax_scale = {};
  Workspace workspace = {};  ///< at least workspace_bytes(Pass::forward), 256-byte aligned
  double dropout_p = 0.0;
  std::uint64_t seed = 0, offset = 0;
  std::span<const Capture> captures = {};
  const float* sinks = nullptr;  ///< [heads_q]
};

/// `out` and `lse` are the forward pass's; dout and dq are like q, or where V has other columns dout like
/// out, dk and dv like k and v. What SharedForwardArgs has is given alike. To gradients of captures and sinks
/// this rank's part of the sum over ranks is ADDED: zero them first.
struct SharedBackwardArgs {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr;
  const float* lse = nullptr;
  const void* dout = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  std::optional<float> softmax_scale = {};
  Workspace workspace = {};  ///< at least workspace_bytes(Pass::backward), 256-byte aligned
  double dropout_p = 0.0;
  std::uint64_t seed = 0, offset = 0;
  std::span<const Capture> captures = {};
  const float* sinks = nullptr;
  const float* dlse = nullptr;  ///< like lse: the gradient of LSE; null: there is none
  float* dsinks = nullptr;      ///< [heads_q]; null: not wanted
};

/// Calls of one problem by all ranks of a communicator. Partial O and gradients are fp32 and rounded once. It
/// allocates no device memory. Not for several threads at once.
class FLASHJIT_API SharedAttention {
 public:
  /// `communicator`: the caller's ncclComm_t of the current device. It, and `runtime`, must live longer. NCCL
  /// is opened at run time: `nccl`, else FLASHJIT_NCCL, else libnccl.so.2.
  /// Throws Error(invalid_argument), and Error(unsupported) also without NCCL.
  SharedAttention(Runtime& runtime, const SharedSequence& sequence, void* communicator,
                  const std::string& nccl = {});
  ~SharedAttention();
  SharedAttention(SharedAttention&&) noexcept;
  SharedAttention& operator=(SharedAttention&&) noexcept;

  /// Compiles and loads the pass's kernels, and compares the SharedSequence that the ranks were given, but
  /// not what forward() and backward() are given: throws Error(invalid_argument) on all ranks where they
  /// differ. Waits for the other ranks.
  void prepare(Pass pass, Workspace workspace, Stream stream);
  /// Bytes of device memory that a call of this pass needs besides the shards.
  std::size_t workspace_bytes(Pass pass) const;

  /// Kernels on `stream`, transfers on `copies`, which may be the same. Both passes are called by all ranks.
  /// Throws Error(invalid_argument), before anything is sent.
  void forward(const SharedForwardArgs& args, Stream stream, Stream copies);
  void backward(const SharedBackwardArgs& args, Stream stream, Stream copies);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit

// Attention on the CPU in fp64, written to be read: the oracle that every kernel is checked against.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "flashjit/spec.hpp"
#include "flashjit/tensor.hpp"
#include "reference/programs.hpp"

namespace flashjit::reference {

/// Inputs in fp64, contiguous [batch, heads, length, dim]; values already rounded to the spec's element type.
/// With spec.varlen the tensors are packed, [heads, rows, dim]: see ForwardArgs. With a cache Q alone is; its
/// K and V are the slots in order, with the shape's seqlen_kv as their capacity.
struct Problem {
  KernelSpec spec;
  AttentionShape shape;
  std::vector<double> q = {}, k = {}, v = {}, dout = {};  ///< dout: backward only
  std::optional<double> softmax_scale = {};               ///< default 1 / sqrt(head_dim)
  std::vector<std::int32_t> kv_lengths = {};              ///< [batch] with spec.kv.has_lengths()
  std::int32_t prefix_length = 0;                         ///< with spec.kv.shared_prefix; it changes nothing
  std::vector<std::uint8_t> block_map = {};  ///< [map_batch, map_heads, rows, columns] with spec.block_map
  std::int64_t map_batch = 1, map_heads = 1;
  double dropout_p = 0;
  std::uint64_t seed = 0, offset = 0;
  DropoutPlace dropout_place = {};  ///< with spec.partial.dropout_place
  std::vector<std::int32_t> cu_seqlens_q = {},
                            cu_seqlens_kv = {};  ///< [batch + 1] with spec.varlen, 0 to rows; wrong ones
                                                 ///< are read as kernels do, see check_problem()
  std::vector<double> sinks = {};                ///< [heads_q] with spec.sinks
  /// With spec.indices, [index_batch, queries, heads_kv, top-k]: see IndicesView.
  std::vector<std::int32_t> indices = {};
  std::int64_t index_batch = 1;
  /// What kernels are given beside codes where the spec has them: one for each head, or with
  /// spec.kv.key_scales for each row of k and v. These have codes times scales already.
  std::vector<double> k_scale = {}, v_scale = {};
  std::vector<double> q_scale = {};     ///< with spec.prologue.q_codes, one for each KV head
  std::vector<Captured> captures = {};  ///< one for each name that the spec's programs declare
  /// Backward: O, like Q with the dimension of V, and LSE, like Q without a dimension, where they are those
  /// of more keys than these; empty: of these keys.
  std::vector<double> out = {}, lse = {};
  /// Forward, with spec.partial.running_state: O and LSE of other keys, sized like these.
  std::vector<double> state_out = {}, state_lse = {};
  std::vector<double> dlse = {};  ///< backward: like lse, or empty where LSE has no gradient
  /// Jvp and backward_jvp: tangents, sized like their tensors; empty: zeros.
  std::vector<double> q_tangent = {}, k_tangent = {}, v_tangent = {}, sinks_tangent = {};
  std::vector<std::vector<double>> capture_tangents = {};    ///< one for each of `captures`, or none at all
  std::vector<double> dout_tangent = {}, dlse_tangent = {};  ///< backward_jvp, too
};

/// The arithmetic to compute in.
enum class Precision : std::uint8_t {
  exact,    ///< fp64 throughout
  rounded,  ///< products summed in fp32 and every matrix (S, P, dP, dS and the results) rounded to the spec's
            ///< element type, as a straightforward implementation would: the yardstick of the error limits
  fused,    ///< as rounded, but S stays in fp32, as in a fused kernel: the yardstick where scores are extreme
};

struct Forward {
  std::vector<double> out;  ///< [batch, heads_q, seqlen_q, head_dim_v]
  std::vector<double> lse;  ///< like Q without a dimension; -inf for rows that attend to nothing, NaN where a
                            ///< score of a key that they attend to is NaN, and in rows of no sequence
  std::vector<double> row_max;              ///< like lse: the largest score, without sinks
  std::vector<double> out_before_mod = {};  ///< with spec.epilogue.out_mod, like out
};
struct Backward {
  std::vector<double> dq, dk, dv;
  std::vector<double> dsinks = {};  ///< [heads_q] with spec.sinks
  CaptureGrads captures = {};       ///< of each of Problem::captures
  std::vector<double> dsink_rows =
      {};  ///< [batch, heads_q, seqlen_q] with spec.sinks: what each query gives to dsinks
  CaptureGrads capture_squares = {};  ///< sums of the squares of P (|dP| + |D|) and of ...
  CaptureGrads capture_counts = {};   ///< ... ones, over the pairs that `captures` sums
};

struct Jvp {
  std::vector<double> out, lse;                  ///< as Forward has them
  std::vector<double> out_tangent, lse_tangent;  ///< 0 for rows that attend to nothing
};

/// All throw Error(invalid_argument) when the spec or the shape is not valid or a tensor has another size
/// than they say.
Forward forward(const Problem& problem, Precision precision = Precision::exact);
Backward backward(const Problem& problem, Precision precision = Precision::exact);
Jvp jvp(const Problem& problem, Precision precision = Precision::exact);
/// Tangents of what backward() gives, of the problem's own O and LSE. Without squares and counts of captures.
Backward backward_jvp(const Problem& problem, Precision precision = Precision::exact);

/// Throws Error(invalid_argument) for whatever the spec and the shape do not allow: sizes, scales, dropout,
/// lengths and cu_seqlens, for callers that have these on the host.
void check_problem(const Problem& problem);
/// kv_lengths are from 0 to the shape's seqlen_kv.
void check_lengths(const AttentionShape& shape, std::span<const std::int32_t> lengths);
/// A cu_seqlens goes from 0 up to the number of rows, or less, in sequences of at most `longest` rows.
void check_offsets(const char* name, const std::vector<std::int32_t>& offsets, std::int64_t rows,
                   std::int64_t longest);

/// A key of a sequence.
struct KeyPlace {
  std::int64_t b, kv;
};
/// The first of `keys` that some query attends to. Looks at neither Q, K nor V.
std::optional<KeyPlace> first_attended(const Problem& problem, const std::vector<KeyPlace>& keys);

/// With spec.kv.shared_prefix, throws Error(invalid_argument) unless the sequences have the prefix in common,
/// as prefix_length says.
void check_prefix(const Problem& problem);

/// Values like LSE, but for packed rows that belong to no sequence.
std::vector<double> existing_rows(const Problem& problem, const std::vector<double>& values);

/// Rounds to nearest even, as the hardware does.
double round_to(DType dtype, double value);

/// max |a - b|; NaN in either (unless both are equal infinities) gives infinity.
double max_abs_error(const std::vector<double>& a, const std::vector<double>& b);

/// The project's rule: the error of `got` is at most `factor` times that of the rounded computation, plus
/// 1e-5. Throws Error(invalid_argument) when the rounded computation overflows, since it then sets no limit.
struct Verdict {
  double error, limit;
  bool ok() const { return error <= limit; }
};
Verdict judge(const std::vector<double>& got, const std::vector<double>& exact,
              const std::vector<double>& rounded, double factor);

/// The same of the gradients of sinks. Each is one sum over all rows, and there are as few as heads, so that
/// the rounded computation's errors may cancel by luck. What they are when they do not is the root of the sum
/// of the squares of its rows' errors, which are many and independent: the yardstick is at least that.
struct SinkGrads {
  const std::vector<double>&sums, &rows;  ///< Backward::dsinks, Backward::dsink_rows
};
Verdict judge_dsinks(const AttentionShape& shape, const std::vector<double>& got, SinkGrads exact,
                     SinkGrads rounded, double factor);

/// The same of the gradient of a capture. Its elements are sums of P (dP - D) over pairs, few or many, where
/// luck plays a part again: dP and D may cancel, and so may the errors of the sums. The yardstick is at least
/// the root of the sum of the squares of what rounding P, dP and D once, and adding in fp32, bring with them.
struct CaptureGrad {
  const std::vector<double>&sums, &squares, &counts;  ///< one capture's of Backward
};
Verdict judge_capture(DType dtype, const std::vector<double>& got, CaptureGrad exact,
                      const std::vector<double>& rounded, double factor);

}  // namespace flashjit::reference

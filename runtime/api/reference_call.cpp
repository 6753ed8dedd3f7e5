#include "flashjit/reference.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "api/host_elements.hpp"
#include "call/arguments.hpp"
#include "call/backward_jvp_arguments.hpp"
#include "call/captures.hpp"
#include "call/jvp_arguments.hpp"
#include "call/tensor_checks.hpp"
#include "expr/declarations.hpp"
#include "expr/kv_codec.hpp"
#include "reference/reference.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"
#include "support/swizzled_scales.hpp"

namespace flashjit {
namespace {

/// Calls visit(place, offset) for every element in C order: its place in a contiguous tensor and in memory.
template <class Visit>
void for_each_element(std::span<const std::int64_t> size, std::span<const std::int64_t> stride,
                      Visit&& visit) {
  std::int64_t count = 1;
  for (const std::int64_t n : size) count *= n;
  std::vector<std::int64_t> index(size.size());
  for (std::int64_t place = 0, offset = 0; place < count; ++place) {
    visit(place, offset);
    for (std::size_t i = size.size(); i-- > 0;) {
      offset += stride[i];
      if (++index[i] < size[i]) break;
      offset -= index[i] * stride[i];
      index[i] = 0;
    }
  }
}

/// `read(offset)` is an element.
template <class Read>
std::vector<double> gather(std::span<const std::int64_t> size, std::span<const std::int64_t> stride,
                           const Read& read) {
  std::int64_t count = 1;
  for (const std::int64_t n : size) count *= n;
  std::vector<double> values(static_cast<std::size_t>(count));
  for_each_element(size, stride,
                   [&](std::int64_t place, std::int64_t offset) { values[place] = read(offset); });
  return values;
}

std::vector<double> gather(DType dtype, const ConstTensorView& view) {
  return gather(view.size, view.stride,
                [&](std::int64_t offset) { return read_element(dtype, view.data, offset); });
}

/// Whether the entry of the lists at a place, counted in order, is before the end of its list.
bool counts_in_list(const IndicesView& indices, std::int64_t place) {
  if (!indices.topk_length) return true;
  const auto [sequences, queries, heads, top_k] = indices.size;
  const std::int64_t list = place / top_k / heads, q = list % queries, b = list / queries;
  const auto& stride = indices.topk_length_stride;
  return place % top_k <
         indices.topk_length[(sequences > 1 ? b * stride[0] : 0) + (queries > 1 ? q * stride[1] : 0)];
}

struct NamedScales {
  const char* name;
  const ConstScaleView& view;

  double at(std::int64_t b, std::int64_t page, std::int64_t h, std::int64_t row) const {
    return checked_scale(name, view.data[offset_of_scale(view, b, page, h, row)], b, page, h, row);
  }
};

using Missing = std::vector<reference::KeyPlace>;

/// The page that has a key, or its slot; -1: the table names no page of the cache.
std::int64_t page_of(const ForwardArgs& args, std::int64_t b, std::int64_t page_rows, std::int64_t n) {
  const PageTableView& table = args.page_table;
  const std::int64_t page = table.data ? table.entry(b, n / page_rows) : b;
  return page < args.k.size[0] ? std::max<std::int64_t>(page, -1) : -1;
}

/// K or V of a call: its tensor, format and scales.
struct StoredKv {
  const ConstTensorView &tensor, &block_scales;
  const KvFormat& format;
  DType type;
  int dim;      ///< columns that the row has
  int columns;  ///< the first of them, which are read
  NamedScales scales;

  /// Fills a row of elements; `at` is its batch or page in the tensor, `b` and `page` say whose scale it has.
  void read(std::int64_t at, std::int64_t b, std::int64_t page, std::int64_t h, std::int64_t row,
            double* to) const {
    const auto& stride = tensor.stride;
    const std::int64_t offset = at * stride[0] + h * stride[1] + row * stride[2];
    if (!format.quantized()) {
      for (int i = 0; i < columns; ++i) to[i] = read_element(type, tensor.data, offset + i);
      return;
    }
    const double scale = format.has_argument() ? scales.at(b, page, h, row) : 1;
    std::vector<double> values(static_cast<std::size_t>(dim));
    decode_row(format, dim, static_cast<const std::uint8_t*>(tensor.data) + offset, scale, values.data(),
               block_scale_row(format, block_scales, at, h, row));
    std::copy_n(values.begin(), columns, to);
  }
};

/// K or V of a cache as slots in order, [batch, heads, seqlen_kv, dim]: zeros past a sequence's keys, and for
/// keys without a page, which are noted.
std::vector<double> gather_cache(const AttentionSpec& spec, const AttentionShape& shape,
                                 const ForwardArgs& args, const StoredKv& kv, Missing& missing) {
  const ConstTensorView& pool = kv.tensor;
  const std::int64_t page_rows = spec.kv.is_paged() ? spec.kv.page_size : pool.size[2], dim = kv.columns;
  std::vector<double> values(static_cast<std::size_t>(shape.batch * shape.heads_kv * shape.seqlen_kv * dim));
  for (std::int64_t b = 0; b < shape.batch; ++b)
    for (std::int64_t n = 0; n < std::min<std::int64_t>(args.kv_lengths[b], shape.seqlen_kv); ++n) {
      const std::int64_t page = page_of(args, b, page_rows, n);
      if (page < 0) missing.push_back({b, n});
      for (std::int64_t h = 0; page >= 0 && h < shape.heads_kv; ++h)
        kv.read(page, b, page, h, n % page_rows,
                &values[((b * shape.heads_kv + h) * shape.seqlen_kv + n) * dim]);
    }
  return values;
}

/// Pages that no query's window reaches may have been freed, so that the table has anything in their place.
void refuse_missing_pages(const reference::Problem& problem, const ForwardArgs& args,
                          const Missing& missing) {
  const auto key = reference::first_attended(problem, missing);
  if (!key) return;
  const PageTableView& table = args.page_table;
  const std::int64_t page = problem.spec.kv.is_paged() ? key->kv / problem.spec.kv.page_size : 0;
  if (const std::int64_t first = table.starts ? table.starts[key->b] : 0;
      first < 0 || first + page >= (table.starts ? table.columns : page + 1))
    refuse("sequence {} begins at entry {}, but page_table has {}: give starts whose entries it has.", key->b,
           first, table.columns);
  refuse("page_table names page {} for key {} of sequence {}, but k has {} pages: give one of them.",
         table.entry(key->b, page), key->kv, key->b, args.k.size[0]);
}

/// The shape with room for the longest sequence of a cache, not for what its table or its slots could hold.
AttentionShape used_shape(const AttentionSpec& spec, const ForwardArgs& args) {
  AttentionShape shape = shape_of(spec, args);
  if (!spec.kv.is_cache() || spec.has_block_map()) return shape;
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < shape.batch; ++b)
    longest = std::max<std::int64_t>(longest, args.kv_lengths[b]);
  shape.seqlen_kv = std::min(shape.seqlen_kv, longest);
  return shape;
}

/// Which packed sequence has a row; the last one has rows that belong to none.
std::int64_t sequence_of_row(const std::int32_t* cu_seqlens, std::int64_t sequences, std::int64_t row) {
  std::int64_t b = 0;
  while (b + 1 < sequences && cu_seqlens[b + 1] <= row) ++b;
  return b;
}

/// K or V as the reference takes them. Packed rows have their sequence's scales.
std::vector<double> gather_kv(const AttentionSpec& spec, const AttentionShape& shape, const ForwardArgs& args,
                              const StoredKv& kv, Missing& missing) {
  if (spec.kv.is_cache()) return gather_cache(spec, shape, args, kv, missing);
  const ConstTensorView& tensor = kv.tensor;
  const std::int64_t batch = tensor.size[0], heads = tensor.size[1], rows = tensor.size[2];
  std::vector<double> values(static_cast<std::size_t>(batch * heads * rows * kv.columns));
  for (std::int64_t i = 0; i < batch * heads * rows; ++i) {
    const std::int64_t row = i % rows, h = i / rows % heads, b = i / rows / heads;
    const std::int64_t sequence = spec.varlen ? sequence_of_row(args.cu_seqlens_kv, args.batch_size, row) : b;
    kv.read(b, sequence, 0, h, row, &values[i * kv.columns]);
  }
  return values;
}

/// The first `rows` of each head; the rest stays as it is.
void scatter(DType dtype, const std::vector<double>& values, const TensorView& view, std::int64_t rows) {
  if (values.empty()) return;
  for_each_element(view.size, view.stride, [&](std::int64_t place, std::int64_t offset) {
    if (place / view.size[3] % view.size[2] < rows) write_element(dtype, view.data, offset, values[place]);
  });
}

/// Adds to what is there, as the kernels do with the gradients of captures and sinks.
void add(const std::vector<double>& values, float* to) {
  if (!to) return;
  for (std::size_t i = 0; i < values.size(); ++i) to[i] += static_cast<float>(values[i]);
}

reference::Captured captured(const Capture& capture, ElementType type) {
  reference::Captured result{.name = std::string(capture.name)};
  if (capture.rank == 0) {
    result.values = {capture.scalar};
    return result;
  }
  const std::span size(capture.size.data(), static_cast<std::size_t>(capture.rank));
  const std::span stride(capture.stride.data(), static_cast<std::size_t>(capture.rank));
  result.size.assign(size.begin(), size.end());
  result.values =
      gather(size, stride, [&](std::int64_t offset) { return read_element(type, capture.data, offset); });
  if (type == ElementType::int64) {
    result.exact.resize(result.values.size());
    for_each_element(size, stride, [&](std::int64_t place, std::int64_t offset) {
      result.exact[place] = static_cast<const std::int64_t*>(capture.data)[offset];
    });
  }
  return result;
}

/// Rows of two tensors' columns.
std::vector<double> joined_columns(const std::vector<double>& first, std::int64_t first_columns,
                                   const std::vector<double>& last, std::int64_t last_columns) {
  std::vector<double> joined;
  joined.reserve(first.size() + last.size());
  for (auto a = first.begin(), b = last.begin(); a != first.end(); a += first_columns, b += last_columns) {
    joined.insert(joined.end(), a, a + first_columns);
    joined.insert(joined.end(), b, b + last_columns);
  }
  return joined;
}

/// Q as the reference takes it. Packed rows have their sequence's scale.
std::vector<double> gather_q(const AttentionSpec& spec, const ForwardArgs& args) {
  std::vector<double> values = gather(spec.q_type(), args.q);
  if (spec.prologue.q_rope)
    return joined_columns(values, args.q.size[3], gather(spec.dtype, args.q_rope), args.q_rope.size[3]);
  if (!spec.prologue.q_codes) return values;
  const AttentionShape shape = shape_of(spec, args);
  const auto [batch, heads, rows, dim] = args.q.size;
  for (std::int64_t i = 0; i < batch * heads * rows; ++i) {
    const std::int64_t b =
        spec.varlen ? sequence_of_row(args.cu_seqlens_q, shape.batch, i % rows) : i / rows / heads;
    const std::int64_t h_kv = i / rows % heads / (shape.heads_q / shape.heads_kv);
    const double scale = NamedScales{"q_scale", args.q_scale}.at(b, 0, h_kv, 0);
    for (std::int64_t j = 0; j < dim; ++j) values[i * dim + j] *= scale;
  }
  return values;
}

/// LSE, or another tensor with its strides.
template <class Args>
std::vector<double> gather_rows(const Args& args, const float* data) {
  return gather(DType::fp32, rows_view(data, args.lse_strides, rows_of(args.q)));
}

template <class Args>
reference::Problem problem_of(const AttentionSpec& spec, const Args& args, Pass pass) {
  const AttentionShape shape = check_arguments(spec, args);
  const AttentionSpec normalized = spec.normalized();
  const std::vector<expr::Declaration> declared =
      expr::declarations(normalized.score, normalized.mask, normalized.epilogue.out_mod, normalized.prologue);
  check_captures(declared, args.captures, pass);

  Missing missing;
  reference::Problem problem{.spec = {spec, pass},
                             .shape = shape,
                             .softmax_scale = args.softmax_scale,
                             .dropout_p = args.dropout_p,
                             .seed = args.rng_state ? args.rng_state[0] : args.seed,
                             .offset = args.rng_state ? args.rng_state[1] : args.offset,
                             .dropout_place = args.partial.dropout_place};
  if (spec.kv.has_lengths())
    reference::check_lengths(shape, {args.kv_lengths, static_cast<std::size_t>(shape.batch)});
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    problem.shape = used_shape(spec, args);
    problem.q = gather_q(spec, args);
    const KvLayout& kv = spec.kv;
    const StoredKv k{args.k,        args.k_block_scale,       kv.k_format, spec.kv_type(), spec.head_dim,
                     spec.head_dim, {"k_scale", args.k_scale}};
    problem.k = gather_kv(spec, problem.shape, args, k, missing);
    missing.clear();  // V's are the same
    // With shared_kv V is in the rows of K.
    const bool shared = kv.shared_kv && kv.k_format.quantized();
    const StoredKv v{args.v,
                     shared ? args.k_block_scale : args.v_block_scale,
                     shared ? kv.k_format : kv.v_format,
                     spec.kv_type(),
                     shared ? spec.head_dim : spec.v_dim(),
                     spec.v_dim(),
                     {"v_scale", shared ? args.k_scale : args.v_scale}};
    problem.v = gather_kv(spec, problem.shape, args, v, missing);
    if (args.prefix_length) problem.prefix_length = *args.prefix_length;
    if (spec.partial.running_state) {
      problem.state_out = gather(DType::fp32, args.partial.state.out);
      problem.state_lse = gather_rows(args, args.partial.state.lse);
    }
  } else {
    problem.q = gather(spec.dtype, args.q);
    problem.k = gather(spec.dtype, args.k);
    problem.v = gather(spec.dtype, args.v);
  }
  const std::int64_t batch = problem.shape.batch;
  if (spec.kv.has_lengths()) problem.kv_lengths.assign(args.kv_lengths, args.kv_lengths + batch);
  if (spec.has_block_map()) {
    const auto& [data, size] = args.block_map;
    problem.block_map.assign(data, data + size[0] * size[1] * size[2] * size[3]);
    problem.map_batch = size[0];
    problem.map_heads = size[1];
  }
  if (spec.varlen) {
    problem.cu_seqlens_q.assign(args.cu_seqlens_q, args.cu_seqlens_q + batch + 1);
    if (args.cu_seqlens_kv) problem.cu_seqlens_kv.assign(args.cu_seqlens_kv, args.cu_seqlens_kv + batch + 1);
  }
  if (spec.indices) {
    const IndicesView& indices = args.indices;
    problem.index_batch = indices.size[0];
    std::array<std::int64_t, 4> stride = indices.stride;
    for (std::size_t i = 0; i < stride.size(); ++i)
      if (indices.size[i] <= 1) stride[i] = 0;
    for_each_element(indices.size, stride, [&](std::int64_t place, std::int64_t offset) {
      problem.indices.push_back(counts_in_list(indices, place) ? indices.data[offset] : -1);
    });
  }
  if (spec.sinks) problem.sinks.assign(args.sinks, args.sinks + problem.shape.heads_q);
  for (const Capture& capture : args.captures) {
    const auto declaration = std::ranges::find(declared, capture.name, &expr::Declaration::name);
    problem.captures.push_back(captured(capture, declaration->type));
  }
  if constexpr (std::is_same_v<Args, ForwardArgs>) refuse_missing_pages(problem, args, missing);
  reference::check_problem(problem);
  reference::check_prefix(problem);
  return problem;
}

/// How many rows of a packed tensor are written, all of whose rows that belong to no sequence are zeros.
template <class Args>
std::int64_t written_rows(const Args& args, const std::vector<std::int32_t>& cu_seqlens,
                          const TensorView& view) {
  return cu_seqlens.empty() || args.zero_unused_rows ? view.size[2] : cu_seqlens.back();
}

/// LSE, or another tensor with its strides, with `unused` in rows that belong to no sequence.
void scatter_rows(const reference::Problem& problem, const ForwardArgs& args, std::vector<double> values,
                  float* to, double unused = -std::numeric_limits<double>::infinity()) {
  if (!to) return;
  const RowSizes sizes = rows_of(args.q);
  const ConstTensorView view = rows_view(to, args.lse_strides, sizes);
  const auto& offsets = problem.cu_seqlens_q;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!offsets.empty() && static_cast<std::int64_t>(i) % sizes.rows >= offsets.back()) values[i] = unused;
  const TensorView written{to, view.size, view.stride};
  scatter(DType::fp32, values, written, written_rows(args, offsets, written));
}

/// The scales of a token's head.
void swizzle_scales(const TensorView& to, std::int64_t token, std::int64_t h,
                    const std::vector<std::uint8_t>& scales) {
  auto* bytes = static_cast<std::uint8_t*>(to.data);
  const std::int64_t of_head = std::ssize(scales);
  for (std::int64_t i = 0; i < of_head; ++i)
    *swizzled_scale(bytes, token, h * of_head + i, to.size[3]) = scales[static_cast<std::size_t>(i)];
}

/// Stores O as codes, and their scales; rows of no sequence as zeros, where they are written.
void scatter_codes(const AttentionSpec& spec, const ForwardArgs& args, const reference::Problem& problem,
                   std::vector<double> out) {
  const KvFormat& format = spec.epilogue.out_format;
  const auto [batch, heads, rows, columns] = args.out.size;
  const std::int64_t written = written_rows(args, problem.cu_seqlens_q, args.out);
  const float scale = format.has_argument() ? *args.out_scale : 1.0f;
  if (!(scale > 0 && std::isfinite(scale))) refuse("out_scale is {}: it must be finite and above 0.", scale);
  for (std::int64_t i = 0; i < batch * heads * rows; ++i) {
    const std::int64_t b = i / rows / heads, h = i / rows % heads, s = i % rows;
    if (s >= written) continue;
    double* row = out.data() + i * spec.v_dim();
    if (!problem.cu_seqlens_q.empty() && s >= problem.cu_seqlens_q.back())
      std::fill_n(row, spec.v_dim(), 0.0);
    const auto& stride = args.out.stride;
    auto* codes = static_cast<std::uint8_t*>(args.out.data) + b * stride[0] + h * stride[1] + s * stride[2];
    if (spec.epilogue.swizzled_scales) {
      std::vector<std::uint8_t> scales(static_cast<std::size_t>(format.row(spec.v_dim()).scale_columns));
      encode_row(format, spec.v_dim(), row, scale, codes, scales.data());
      swizzle_scales(args.out_block_scale, b * rows + s, h, scales);
      continue;
    }
    encode_row(format, spec.v_dim(), row, scale, codes,
               block_scale_row(format, args.out_block_scale, b, h, s));
  }
}

}  // namespace

void reference_forward(const AttentionSpec& spec, const ForwardArgs& args) {
  const reference::Problem problem = problem_of(spec, args, Pass::forward);
  const reference::Forward result = reference::forward(problem);
  if (spec.epilogue.out_format.quantized())
    scatter_codes(spec, args, problem, result.out);
  else
    scatter(spec.out_type(), result.out, args.out, written_rows(args, problem.cu_seqlens_q, args.out));
  scatter_rows(problem, args, result.lse, args.lse);
  scatter_rows(problem, args, result.row_max, args.row_max);
  if (args.out_before_mod.data)
    scatter(spec.dtype, result.out_before_mod, args.out_before_mod,
            problem.cu_seqlens_q.empty() ? args.out_before_mod.size[2] : problem.cu_seqlens_q.back());
}

namespace {

/// Stores dQ, dK, dV and the gradients of captures and sinks, or their tangents.
void store_gradients(const AttentionSpec& spec, const BackwardArgs& args, const reference::Problem& problem,
                     const reference::Backward& result) {
  const auto store = [&](std::vector<double> grad, const TensorView& to,
                         const std::vector<std::int32_t>& offsets) {
    if (spec.partial.add_grads) {
      const std::vector<double> before = gather(DType::fp32, to);
      for (std::size_t i = 0; i < grad.size(); ++i) grad[i] += before[i];
    }
    scatter(spec.grad_type(), grad, to, written_rows(args, offsets, to));
  };
  store(result.dq, args.dq, problem.cu_seqlens_q);
  store(result.dk, args.dk, problem.cu_seqlens_kv);
  store(result.dv, args.dv, problem.cu_seqlens_kv);
  add(result.dsinks, args.dsinks);
  for (std::size_t i = 0; i < result.captures.size(); ++i) add(result.captures[i], args.captures[i].grad);
}

/// A captured tensor's tangents, empty where it has none.
std::vector<double> capture_tangent(const reference::Captured& captured, const float* tangent) {
  return tangent ? std::vector<double>(tangent, tangent + captured.values.size()) : std::vector<double>();
}

}  // namespace

void reference_backward(const AttentionSpec& spec, const BackwardArgs& args) {
  reference::Problem problem = problem_of(spec, args, Pass::backward);
  problem.dout = gather(spec.dtype, args.dout);
  if (!spec.score.is_weight()) {
    problem.out = gather(spec.saved_out_type(), args.out);
    problem.lse = gather_rows(args, args.lse);
  }
  if (args.dlse) problem.dlse = gather_rows(args, args.dlse);
  store_gradients(spec, args, problem, reference::backward(problem));
}

void reference_backward_jvp(const AttentionSpec& spec, const BackwardJvpArgs& args) {
  reference::Problem problem = problem_of(spec, args, Pass::backward_jvp);
  const auto tangent_of = [&](const ConstTensorView& tangent) {
    return tangent.data ? gather(spec.dtype, tangent) : std::vector<double>();
  };
  problem.dout = gather(spec.dtype, args.dout);
  problem.q_tangent = tangent_of(args.q_tangent);
  problem.k_tangent = tangent_of(args.k_tangent);
  problem.v_tangent = tangent_of(args.v_tangent);
  problem.dout_tangent = tangent_of(args.dout_tangent);
  if (args.dlse) problem.dlse = gather_rows(args, args.dlse);
  if (args.dlse_tangent) problem.dlse_tangent = gather_rows(args, args.dlse_tangent);
  if (args.sinks_tangent)
    problem.sinks_tangent.assign(args.sinks_tangent, args.sinks_tangent + problem.shape.heads_q);
  for (std::size_t i = 0; i < args.capture_tangents.size(); ++i)
    problem.capture_tangents.push_back(
        capture_tangent(problem.captures[i], args.captures[i].grad ? args.capture_tangents[i] : nullptr));
  store_gradients(spec, args, problem, reference::backward_jvp(problem));
}

void reference_jvp(const AttentionSpec& spec, const JvpArgs& args) {
  reference::Problem problem = problem_of(spec, args, Pass::jvp);
  const auto tangent_of = [&](const ConstTensorView& tangent) {
    return tangent.data ? gather(spec.dtype, tangent) : std::vector<double>();
  };
  problem.q_tangent = tangent_of(args.q_tangent);
  problem.k_tangent = tangent_of(args.k_tangent);
  problem.v_tangent = tangent_of(args.v_tangent);
  if (args.sinks_tangent)
    problem.sinks_tangent.assign(args.sinks_tangent, args.sinks_tangent + problem.shape.heads_q);
  for (std::size_t i = 0; i < args.captures.size(); ++i)
    problem.capture_tangents.push_back(capture_tangent(problem.captures[i], args.captures[i].grad));
  const reference::Jvp result = reference::jvp(problem);
  const std::int64_t rows = written_rows(args, problem.cu_seqlens_q, args.out);
  scatter(spec.out_type(), result.out, args.out, rows);
  scatter(spec.out_type(), result.out_tangent, args.out_tangent, rows);
  scatter_rows(problem, args, result.lse, args.lse);
  scatter_rows(problem, args, result.lse_tangent, args.lse_tangent, 0);
}

}  // namespace flashjit

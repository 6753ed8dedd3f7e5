#include "call/apart.hpp"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "call/sink_arguments.hpp"
#include "call/tensor_checks.hpp"
#include "support/kv_names.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

/// Whether an element of `a` begins where one of `b` does. Both have the strides, from large to small, and
/// indices of dimension n differ by low[n] to high[n]: some of these, times the strides, make `distance`.
bool some_make(std::int64_t distance, std::span<const std::int64_t> strides,
               std::span<const std::int64_t> low, std::span<const std::int64_t> high) {
  if (strides.empty()) return distance == 0;
  std::int64_t least = 0, most = 0;  // what the dimensions behind this one make
  for (std::size_t n = 1; n < strides.size(); ++n)
    least = plus(least, times(low[n], strides[n])), most = plus(most, times(high[n], strides[n]));
  const std::int64_t stride = strides[0];
  for (std::int64_t i = std::max(low[0], (distance - most) / stride - 1);
       i <= std::min(high[0], (distance - least) / stride + 1); ++i)
    if (some_make(distance - i * stride, strides.subspan(1), low.subspan(1), high.subspan(1))) return true;
  return false;
}

/// Whether two views of one buffer, with the same strides, share an element. Views without four dimensions,
/// or with strides that are not nested or huge, are not known to.
bool share_an_element(const Placed& a, const Placed& b) {
  const auto distance = static_cast<std::int64_t>(b.extent.begin - a.extent.begin);
  if (a.element_size != b.element_size || distance % a.element_size != 0) return false;
  std::array<std::array<std::int64_t, 3>, 4> dims{};  // stride, low, high
  std::size_t count = 0;
  for (std::size_t n = 0; n < 4; ++n) {
    if (a.size[n] < 1 || b.size[n] < 1 || (a.size[n] > 1 && b.size[n] > 1 && a.stride[n] != b.stride[n]))
      return false;
    const std::int64_t stride = a.size[n] > 1 ? a.stride[n] : b.stride[n];
    if (stride == 0 || a.size[n] + b.size[n] == 2) continue;
    std::size_t at = count++;
    for (; at > 0 && dims[at - 1][0] < stride; --at) dims[at] = dims[at - 1];
    dims[at] = {stride, 1 - b.size[n], a.size[n] - 1};
  }
  std::array<std::int64_t, 4> stride{}, low{}, high{};
  for (std::size_t n = 0; n < count; ++n) {
    std::tie(stride[n], low[n], high[n]) = std::tie(dims[n][0], dims[n][1], dims[n][2]);
    const std::int64_t reach = times(std::max(-low[n], high[n]), stride[n]);
    if (reach > kMaxOffset / 4 || (n > 0 && stride[n - 1] < reach)) return false;
  }
  return some_make(distance / a.element_size, std::span(stride).first(count), std::span(low).first(count),
                   std::span(high).first(count));
}

void check_apart(const Placed& written, const Placed& other) {
  if (certainly_share(written, other))
    refuse(
        "{} is written, but has memory of {}: kernels write and read in any order, so give memory of its "
        "own.",
        written.name, other.name);
}

Placed placed(std::string_view name, const std::int32_t* data, std::int64_t elements) {
  return {name, data, elements, sizeof(std::int32_t)};
}

Placed placed(const Workspace& workspace) {
  return {"workspace", workspace.data, static_cast<std::int64_t>(workspace.bytes), 1};
}

Placed placed(const BlockMapView& map) {
  const auto [batch, heads, rows, columns] = map.size;
  return {"block_map", map.data, times(times(batch, heads), times(rows, columns)), 1};
}

Placed placed(const IndicesView& indices) {
  return {"indices", indices.data, indices.size, indices.stride, sizeof(std::int32_t)};
}

Placed placed(const char* name, const ConstScaleView& scales) {
  return {name, scales.data, scales.size, scales.stride, sizeof(float)};
}

Placed placed(const PageTableView& table) {
  const std::array size = {table.starts ? 1 : table.sequences, table.columns};
  const std::array<std::int64_t, 2> stride = {table.stride ? table.stride : table.columns, 1};
  return {"page_table", table.data, size, stride, sizeof(std::int32_t)};
}

/// Captures have their check later: of one without a type a byte of each element is looked at.
Placed placed(const Capture& capture) {
  const auto rank = static_cast<std::size_t>(std::clamp(capture.rank, 0, kMaxCaptureDims));
  return {capture.name, capture.data, std::span(capture.size).first(rank),
          std::span(capture.stride).first(rank), capture.type ? size_of(*capture.type) : 1};
}

/// Results, apart from each other, and a look at each tensor besides. Calls pay for what they are given.
class Written {
 public:
  void write(const Placed& result) {
    read(result);
    results_[count_++] = result;
  }
  void read(const Placed& tensor) const {
    for (const Placed& result : std::span(results_).first(count_)) check_apart(result, tensor);
  }

 private:
  std::array<Placed, 7> results_;
  std::size_t count_ = 0;
};

/// What both passes read.
template <class Args, class Visitor>
void visit_inputs(const AttentionSpec& spec, const AttentionShape& shape, const Args& args,
                  Visitor& visitor) {
  visitor.read({"q", args.q, size_of(spec.q_type())});
  visitor.read({"k", args.k, size_of(spec.stored_k().type)});
  visitor.read({"v", args.v, size_of(spec.stored_v().type)});
  visitor.read(placed_sink(args, shape));
  if (args.kv_lengths) visitor.read(placed("kv_lengths", args.kv_lengths, shape.batch));
  if (args.cu_seqlens_q) visitor.read(placed("cu_seqlens_q", args.cu_seqlens_q, plus(shape.batch, 1)));
  if (args.cu_seqlens_kv) visitor.read(placed("cu_seqlens_kv", args.cu_seqlens_kv, plus(shape.batch, 1)));
  if (args.block_map.data) visitor.read(placed(args.block_map));
  if (args.indices.data) visitor.read(placed(args.indices));
  for (const Capture& capture : args.captures)
    if (capture.data) visitor.read(placed(capture));
}

/// All that a pass writes, then all that it reads besides tangents.
template <class Visitor>
void visit_places(const AttentionSpec& spec, const AttentionShape& shape, const ForwardArgs& args,
                  Visitor& visitor) {
  visitor.write({"out", args.out, size_of(spec.stored_out().type)});
  if (args.out_before_mod.data) visitor.write({"out_before_mod", args.out_before_mod, size_of(spec.dtype)});
  if (args.lse) visitor.write(placed_rows("lse", args.lse, args.lse_strides, rows_of(args.q)));
  if (args.row_max) visitor.write(placed_rows("row_max", args.row_max, args.lse_strides, rows_of(args.q)));
  if (args.out_block_scale.data)
    visitor.write({"out_block_scale", args.out_block_scale, size_of(spec.epilogue.out_format.scale_type)});
  if (args.skip_softmax_counts)
    visitor.write({"skip_softmax_counts", args.skip_softmax_counts, 2, sizeof(std::int64_t)});
  if (args.workspace.data) visitor.write(placed(args.workspace));
  visit_inputs(spec, shape, args, visitor);
  if (args.q_rope.data) visitor.read({"q_rope", args.q_rope, size_of(spec.dtype)});
  if (args.page_table.data) visitor.read(placed(args.page_table));
  if (args.page_table.starts) visitor.read(placed("page_table.starts", args.page_table.starts, shape.batch));
  if (args.prefix_length) visitor.read(placed("prefix_length", args.prefix_length, 1));
  if (args.out_scale) visitor.read({"out_scale", args.out_scale, 1, sizeof(float)});
  if (args.k_scale.data) visitor.read(placed("k_scale", args.k_scale));
  if (args.v_scale.data) visitor.read(placed("v_scale", args.v_scale));
  if (args.q_scale.data) visitor.read(placed("q_scale", args.q_scale));
  if (args.k_block_scale.data)
    visitor.read({"k_block_scale", args.k_block_scale, size_of(spec.kv.k_format.scale_type)});
  if (args.v_block_scale.data)
    visitor.read({"v_block_scale", args.v_block_scale, size_of(spec.kv.v_format.scale_type)});
}
template <class Visitor>
void visit_places(const AttentionSpec& spec, const AttentionShape& shape, const BackwardArgs& args,
                  Visitor& visitor) {
  const int of_grads = size_of(spec.grad_type());
  visitor.write({"dq", args.dq, of_grads});
  visitor.write({"dk", args.dk, of_grads});
  visitor.write({"dv", args.dv, of_grads});
  visitor.write(placed_sink_gradient(args, shape));
  if (args.workspace.data) visitor.write(placed(args.workspace));
  visit_inputs(spec, shape, args, visitor);
  visitor.read({"out", args.out, size_of(spec.saved_out_type())});
  visitor.read({"dout", args.dout, size_of(spec.dtype)});
  visitor.read(placed_rows("lse", args.lse, args.lse_strides, rows_of(args.q)));
  if (args.dlse) visitor.read(placed_rows("dlse", args.dlse, args.lse_strides, rows_of(args.q)));
}

/// The places, without the names of captures, which the caller may free.
template <class Args>
CallPlaces places(const AttentionSpec& spec, const AttentionShape& shape, const Args& args) {
  struct Lists {
    CallPlaces found;
    void write(const Placed& tensor) { keep(found.written, tensor); }
    void read(const Placed& tensor) { keep(found.read, tensor); }
    static void keep(std::vector<Placed>& list, Placed tensor) {
      tensor.name = {};
      if (tensor.extent.begin != tensor.extent.end) list.push_back(tensor);
    }
  } lists;
  visit_places(spec, shape, args, lists);
  return std::move(lists.found);
}

}  // namespace

bool certainly_share(const Placed& a, const Placed& b) {
  const Extent x = a.extent, y = b.extent;
  const bool empty = x.begin == x.end || y.begin == y.end;
  if (empty || x.begin >= y.end || y.begin >= x.end) return false;
  const auto holds_an_end = [](const Extent& whole, const Extent& other) {
    return whole.begin <= other.begin || other.end <= whole.end;  // they meet, so one end is inside
  };
  return x.begin == y.begin || (a.dense && holds_an_end(x, y)) || (b.dense && holds_an_end(y, x)) ||
         share_an_element(a, b);
}

Extent extent_of(const ConstTensorView& tensor, int element_size) {
  return Placed{{}, tensor, element_size}.extent;
}

Placed::Placed(std::string_view name, const void* data, Numbers size, Numbers stride, int element_size)
    : name(name), element_size(element_size) {
  if (!data) return;
  std::int64_t last = 1, elements = 1;
  for (std::size_t n = 0; n < size.size(); ++n) {
    if (size[n] < 1 || (size[n] > 1 && stride[n] < 0)) return;
    elements = times(elements, size[n]);
    if (size[n] > 1) last = plus(last, times(size[n] - 1, stride[n]));
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const auto bytes = static_cast<std::uintptr_t>(times(last, element_size));
  extent = {begin, begin + std::min(bytes, std::numeric_limits<std::uintptr_t>::max() - begin)};
  dense = elements == last;
}

Placed::Placed(std::string_view name, const ConstTensorView& tensor, int element_size)
    : Placed(name, tensor.data, tensor.size, tensor.stride, element_size) {
  size = tensor.size, stride = tensor.stride;
}

Placed::Placed(std::string_view name, const void* data, std::int64_t elements, int element_size)
    : Placed(name, data, std::array{elements}, std::array{std::int64_t{1}}, element_size) {}

Placed placed_rows(const char* name, const float* data, const RowStrides& strides, const RowSizes& sizes) {
  return {name, rows_view(data, strides, sizes), sizeof(float)};
}

void check_apart(std::span<const Placed> written, std::span<const Placed> read) {
  for (std::size_t i = 0; i < written.size(); ++i) {
    for (const Placed& tensor : read) check_apart(written[i], tensor);
    for (const Placed& tensor : written.subspan(i + 1)) check_apart(written[i], tensor);
  }
}

CallPlaces places_of(const AttentionSpec& spec, const AttentionShape& shape, const ForwardArgs& args) {
  return places(spec, shape, args);
}
CallPlaces places_of(const AttentionSpec& spec, const AttentionShape& shape, const BackwardArgs& args) {
  return places(spec, shape, args);
}

void check_apart(const AttentionSpec& spec, const AttentionShape& shape, const ForwardArgs& args) {
  Written written;
  visit_places(spec, shape, args, written);
}
void check_apart(const AttentionSpec& spec, const AttentionShape& shape, const BackwardArgs& args) {
  Written written;
  visit_places(spec, shape, args, written);
}

void check_apart(const AttentionSpec& spec, const AttentionShape& shape, const AppendArgs& args,
                 bool same_rows) {
  const int element_size = size_of(spec.dtype);
  const std::int64_t rows = times(args.k.size[0], args.k.size[2]);
  const Placed k("k", args.k, element_size), v("v", args.v, element_size),
      k_cache("k_cache", args.k_cache, size_of(spec.stored_k().type)),
      v_cache("v_cache", args.v_cache, size_of(spec.stored_v().type)),
      k_scale = placed("k_scale", args.k_scale), v_scale = placed("v_scale", args.v_scale);
  Written q_out, of_k, of_v;
  q_out.write({"q_out", args.q_out, element_size});
  for (const Placed& tensor : {k, v, k_cache, v_cache, k_scale, v_scale}) q_out.read(tensor);
  of_k.write(k_cache), of_v.write(v_cache);
  if (spec.kv.key_scales) {
    of_k.write(k_scale), of_v.write(v_scale);
    if (!same_rows) check_apart(k_scale, v_scale);
  }
  for (const Written& written : {q_out, of_k, of_v}) {
    if (args.kv_lengths) written.read(placed("kv_lengths", args.kv_lengths, shape.batch));
    if (args.cu_seqlens_q) written.read(placed("cu_seqlens_q", args.cu_seqlens_q, plus(shape.batch, 1)));
    if (args.page_table.data) written.read(placed(args.page_table));
    if (args.page_table.starts)
      written.read(placed("page_table.starts", args.page_table.starts, shape.batch));
    if (args.rope.positions) written.read(placed("rope.positions", args.rope.positions, rows));
    if (args.slots.data) written.read({"slots", args.slots.data, rows, size_of(args.slots.type)});
  }
}

}  // namespace flashjit

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "api/host_elements.hpp"
#include "call/append_arguments.hpp"
#include "call/tensor_checks.hpp"
#include "expr/kv_codec.hpp"
#include "flashjit/reference.hpp"
#include "reference/reference.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

/// The first of a row's elements, which are contiguous.
template <class Void>
std::int64_t offset_of(const BasicTensorView<Void>& tensor, std::int64_t b, std::int64_t h, std::int64_t s) {
  return b * tensor.stride[0] + h * tensor.stride[1] + s * tensor.stride[2];
}

std::vector<double> read_row(DType dtype, const ConstTensorView& tensor, std::int64_t offset) {
  std::vector<double> row(static_cast<std::size_t>(tensor.size[3]));
  for (std::size_t i = 0; i < row.size(); ++i)
    row[i] = read_element(dtype, tensor.data, offset + static_cast<std::int64_t>(i));
  return row;
}

void write_row(DType dtype, const TensorView& tensor, std::int64_t offset, const std::vector<double>& row) {
  for (std::size_t i = 0; i < row.size(); ++i)
    write_element(dtype, tensor.data, offset + static_cast<std::int64_t>(i), row[i]);
}

/// A new row: where it lies, which key of which sequence it is, and its place in the cache.
struct NewRow {
  std::int64_t b, s;  ///< in the tensors
  std::int64_t sequence, key;
  std::int64_t page = -1, page_row = 0;  ///< or slot; negative: there is no place for it
};

/// Rows whose places the caller names.
std::vector<NewRow> rows_of_slots(const AppendArgs& args) {
  const std::int64_t page_rows = std::max<std::int64_t>(args.k_cache.size[2], 1);
  std::vector<NewRow> rows;
  for (std::int64_t i = 0; i < args.k.size[0] * args.k.size[2]; ++i) {
    const std::int64_t slot = args.slots.type == ElementType::int64
                                  ? static_cast<const std::int64_t*>(args.slots.data)[i]
                                  : static_cast<const std::int32_t*>(args.slots.data)[i];
    if (slot >= 0 && slot / page_rows < args.k_cache.size[0])
      rows.push_back({i / args.k.size[2], i % args.k.size[2], 0, 0, slot / page_rows, slot % page_rows});
  }
  return rows;
}

/// The page that has a key's row, or the slot; negative where there is no place for it.
std::int64_t page_of(const AttentionSpec& spec, const AppendArgs& args, const NewRow& row) {
  if (row.key < 0) return -1;
  const PageTableView& table = args.page_table;
  if (!table.data) return row.sequence;
  const std::int64_t page = table.entry(row.sequence, spec.kv.is_paged() ? row.key / spec.kv.page_size : 0);
  return page < args.k_cache.size[0] ? page : -1;
}

std::vector<NewRow> new_rows(const AttentionSpec& spec, const AppendArgs& args) {
  if (args.slots.data) return rows_of_slots(args);
  const AttentionShape shape = shape_of(spec, args);
  std::vector<std::int32_t> offsets;
  if (spec.varlen) {
    offsets.assign(args.cu_seqlens_q, args.cu_seqlens_q + shape.batch + 1);
    reference::check_offsets("cu_seqlens_q", offsets, shape.seqlen_q, shape.seqlen_q);
  }
  std::vector<NewRow> rows;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    const std::int64_t begin = spec.varlen ? offsets[b] : 0,
                       end = spec.varlen ? offsets[b + 1] : shape.seqlen_q;
    const std::int64_t length = args.kv_lengths[b];
    if (length < 0 || length > shape.seqlen_kv)
      refuse(
          "kv_lengths has {} for sequence {}, with its new keys: give 0 to {}, the most that there is room "
          "for.",
          length, b, shape.seqlen_kv);
    for (std::int64_t s = begin; s < end; ++s) {
      NewRow row{spec.varlen ? 0 : b, s, b, length - (end - s)};
      row.page = page_of(spec, args, row);
      row.page_row = spec.kv.is_paged() ? row.key % spec.kv.page_size : row.key;
      if (row.page >= 0) rows.push_back(row);
    }
  }
  return rows;
}

class Rotation {
 public:
  Rotation(const AttentionSpec& spec, const RopeView& rope)
      : rope_(rope),
        type_(rope.type),
        pairs_(rope.cos || rope.theta != 0 ? (rope.dims ? rope.dims : spec.head_dim) / 2 : 0) {}

  /// The positions of row `row` of `rows`, which has key `key`: one, or with M-RoPE its time, height and
  /// width.
  using Positions = std::array<std::int64_t, 3>;
  Positions positions(std::int64_t row, std::int64_t rows, std::int64_t key) const {
    if (!rope_.positions) return {key, key, key};
    Positions found;
    for (std::size_t i = 0; i < 3; ++i)
      found[i] = rope_.positions[row + (has_sections() ? static_cast<std::int64_t>(i) * rows : 0)];
    return found;
  }

  bool has(const Positions& positions) const {
    return pairs_ == 0 || !rope_.cos || std::ranges::all_of(positions, [&](std::int64_t position) {
             return position >= 0 && position < rope_.table_rows;
           });
  }

  void turn(std::vector<double>& row, const Positions& positions) const {
    for (std::int64_t pair = 0; pair < pairs_; ++pair) {
      const auto [c, s] = angle(positions[section_of(pair)], pair);
      double& x = row[rope_.interleaved ? 2 * pair : pair];
      double& y = row[rope_.interleaved ? 2 * pair + 1 : pair + pairs_];
      const double before = x;
      x = x * c - y * s;
      y = before * s + y * c;
    }
  }

 private:
  bool has_sections() const { return rope_.sections != std::array<int, 3>{}; }

  std::size_t section_of(std::int64_t pair) const {
    if (!has_sections()) return 0;
    const auto turn = static_cast<std::size_t>(pair % 3);
    if (rope_.interleaved_sections) return pair < 3 * std::int64_t{rope_.sections[turn]} ? turn : 0;
    return pair < rope_.sections[0] ? 0 : pair < rope_.sections[0] + rope_.sections[1] ? 1 : 2;
  }

  std::array<double, 2> angle(std::int64_t position, std::int64_t pair) const {
    if (rope_.cos) {
      const std::int64_t at = position * (rope_.stride ? rope_.stride : pairs_) + pair;
      return {read_element(type_, rope_.cos, at), read_element(type_, rope_.sin, at)};
    }
    const double turned = static_cast<double>(position) *
                          std::pow(rope_.theta, -static_cast<double>(pair) / static_cast<double>(pairs_));
    return {std::cos(turned), std::sin(turned)};
  }

  const RopeView& rope_;
  DType type_;
  std::int64_t pairs_;
};

void norm_row(const NormView& norm, std::vector<double>& row) {
  if (!norm.weight) return;
  double squares = 0;
  for (const double value : row) squares += value * value;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(row.size()) + norm.eps);
  for (std::size_t i = 0; i < row.size(); ++i)
    row[i] *= factor * read_element(norm.type, norm.weight, static_cast<std::int64_t>(i));
}

/// Multiplies a row by blocks of a Hadamard matrix, of the largest power of two that divides it.
void rotate_by_hadamard(std::vector<double>& row) {
  const std::size_t block = row.size() & -row.size();
  for (std::size_t step = 1; step < block; step *= 2)
    for (std::size_t pair = 0; pair < row.size() / 2; ++pair) {
      const std::size_t first = pair / step * 2 * step + pair % step;
      const double x = row[first], y = row[first + step];
      row[first] = x + y, row[first + step] = x - y;
    }
  for (double& value : row) value /= std::sqrt(static_cast<double>(block));
}

float largest_of(const std::vector<double>& row) {
  double largest = 0;
  for (const double value : row) largest = std::isnan(value) ? value : std::max(largest, std::abs(value));
  return static_cast<float>(largest);
}

/// The scale of the call with which the row's largest magnitude becomes the largest code.
float scale_of_row(const KvFormat& format, const std::vector<double>& row) {
  const float largest = largest_of(row);
  return largest == 0 ? 1.0f : largest / largest_with_argument(format);
}

/// Encodes a row of a tensor of bytes.
void encode(const KvFormat& format, const TensorView& tensor, const TensorView& block_scales, std::int64_t b,
            std::int64_t h, std::int64_t s, const std::vector<double>& row, float argument) {
  encode_row(format, static_cast<int>(row.size()), row.data(), argument,
             static_cast<std::uint8_t*>(tensor.data) + offset_of(tensor, b, h, s),
             block_scale_row(format, block_scales, b, h, s));
}

/// Encodes rows whose keys share scales, group by group; `row_at` gives the elements of a row of all.
template <class RowAt>
void encode_groups(const KvFormat& format, const QuantizeArgs& args, const RowAt& row_at) {
  const std::int64_t rows = args.x.size[2], heads = args.x.size[1], groups = rows / format.keys;
  for (std::int64_t i = 0; i < args.x.size[0] * heads * groups; ++i) {
    const std::int64_t first = i % groups * format.keys, h = i / groups % heads, b = i / groups / heads;
    std::vector<double> values;
    std::vector<std::uint8_t*> bytes;
    for (std::int64_t s = first; s < first + format.keys; ++s) {
      const std::vector<double> row = row_at((b * heads + h) * rows + s);
      values.insert(values.end(), row.begin(), row.end());
      bytes.push_back(static_cast<std::uint8_t*>(args.codes.data) + offset_of(args.codes, b, h, s));
    }
    encode_keys(format, static_cast<int>(args.x.size[3]), values.data(), bytes,
                block_scale_row(format, args.block_scale, b, h, first));
  }
}

/// The weight of each state of a row, and the LSE of all.
struct Weights {
  std::array<double, kMaxPartialStates> of{};
  double lse = -std::numeric_limits<double>::infinity();
};

std::int64_t lse_offset(const MergeArgs& args, const RowStrides& given, std::int64_t b, std::int64_t h,
                        std::int64_t s) {
  const RowStrides strides = row_strides(given, rows_of(args.out));
  return b * strides.batch + h * strides.head + s * strides.row;
}

Weights weights_of(const MergeArgs& args, std::int64_t b, std::int64_t h, std::int64_t s) {
  Weights weights;
  const auto lse_of = [&](const PartialState& state) {
    return state.lse[lse_offset(args, state.lse_strides, b, h, s)];
  };
  for (const PartialState& state : args.states)
    if (const double lse = lse_of(state); std::isnan(lse) || lse > weights.lse)
      weights.lse = lse;
    else if (std::isnan(weights.lse))
      break;
  if (std::isinf(weights.lse) && weights.lse < 0) return weights;
  const double highest = weights.lse;
  double sum = 0;
  for (const PartialState& state : args.states) sum += std::exp(lse_of(state) - highest);
  weights.lse = highest + std::log(sum);
  for (std::size_t i = 0; i < args.states.size(); ++i)
    weights.of[i] = std::exp(lse_of(args.states[i]) - weights.lse);
  return weights;
}

}  // namespace

void reference_append(const AttentionSpec& spec, const AppendArgs& args) {
  check_arguments(spec, args);
  const AttentionShape shape = shape_of(spec, args);
  const Rotation rotation(spec, args.rope);
  for (const NewRow& row : new_rows(spec, args)) {
    const std::int64_t page = row.page;
    const Rotation::Positions positions =
        rotation.positions(row.b * shape.seqlen_q + row.s, args.k.size[0] * args.k.size[2], row.key);
    if (!rotation.has(positions)) continue;
    // Rows of V have no norm and do not turn.
    const auto read = [&](const ConstTensorView& from, std::int64_t h, const NormView* norm) {
      std::vector<double> values = read_row(spec.dtype, from, offset_of(from, row.b, h, row.s));
      if (norm) norm_row(*norm, values), rotation.turn(values, positions);
      if (norm && spec.kv.hadamard) rotate_by_hadamard(values);
      return values;
    };
    const auto store = [&](const ConstTensorView& from, const TensorView& cache,
                           const TensorView& block_scales, const char* scales_name, const ScaleView& scales,
                           const KvFormat& format, std::int64_t h, const NormView* norm) {
      const std::int64_t slot = row.page_row, offset = offset_of(cache, page, h, slot);
      const std::vector<double> values = read(from, h, norm);
      if (!format.quantized()) return write_row(spec.dtype, cache, offset, values);
      float argument = 1;
      if (format.has_argument()) {
        float& scale = scales.data[offset_of_scale(scales, row.sequence, page, h, slot)];
        if (spec.kv.key_scales)
          scale = scale_of_row(format, values);
        else
          checked_scale(scales_name, scale, row.sequence, page, h, slot);
        argument = scale;
      }
      encode(format, cache, block_scales, page, h, slot, values, argument);
    };
    for (std::int64_t h = 0; h < shape.heads_kv; ++h) {
      store(args.k, args.k_cache, args.k_block_scale, "k_scale", args.k_scale, spec.kv.k_format, h,
            &args.k_norm);
      if (args.v.data)
        store(args.v, args.v_cache, args.v_block_scale, "v_scale", args.v_scale, spec.kv.v_format, h,
              nullptr);
    }
    for (std::int64_t h = 0; h < shape.heads_q; ++h)
      write_row(spec.dtype, args.q_out, offset_of(args.q_out, row.b, h, row.s),
                read(args.q, h, &args.q_norm));
  }
}

void reference_quantize(const AttentionSpec& spec, const QuantizeArgs& args) {
  check_arguments(spec, args);
  // No structured binding: clang 14 has none in lambdas.
  const std::int64_t batch = args.x.size[0], heads = args.x.size[1], rows = args.x.size[2];
  const std::int64_t group = heads / std::max<std::int64_t>(args.scale.size[2], 1);
  const Rotation rotation(spec, args.rope);
  const auto row_at = [&](std::int64_t row) {
    const std::int64_t b = row / rows / heads, s = row % rows;
    std::vector<double> values = read_row(spec.dtype, args.x, offset_of(args.x, b, row / rows % heads, s));
    const Rotation::Positions positions = rotation.positions(b * rows + s, batch * rows, s);
    if (rotation.has(positions)) rotation.turn(values, positions);
    if (args.hadamard) rotate_by_hadamard(values);
    return values;
  };
  const auto scale_at = [&](std::int64_t row) -> float& {
    const std::int64_t b = row / rows / heads;
    return args.scale.data[offset_of_scale(args.scale, b, b, row / rows % heads / group, row % rows)];
  };
  const KvFormat& format = spec.kv.k_format;
  if (format.keys > 0) return encode_groups(format, args, row_at);
  const auto encode_with = [&](std::int64_t row, float argument) {
    encode(format, args.codes, args.block_scale, row / rows / heads, row / rows % heads, row % rows,
           row_at(row), argument);
  };
  if (!format.has_argument()) {  // all scales are the blocks'
    for (std::int64_t row = 0; row < batch * heads * rows; ++row) encode_with(row, 1);
    return;
  }
  if (!args.scale.data) return;  // of nothing
  const auto& scales = args.scale.size;
  const float of_nothing = batch * heads * rows == 0 ? 1.0f : 0.0f;
  for (std::int64_t i = 0; i < scales[0] * scales[1] * scales[2] * scales[3]; ++i) {
    const std::int64_t head = i / scales[3], b = head / scales[2];
    args.scale.data[offset_of_scale(args.scale, b, b, head % scales[2], i % scales[3])] = of_nothing;
  }
  for (std::int64_t row = 0; row < batch * heads * rows; ++row) {
    const float wanted = largest_of(row_at(row)) / largest_with_argument(format);
    float& scale = scale_at(row);
    if (wanted > scale || std::isnan(wanted)) scale = wanted;  // std::max would drop NaN
  }
  for (std::int64_t row = 0; row < batch * heads * rows; ++row)
    if (scale_at(row) == 0) scale_at(row) = 1;
  for (std::int64_t row = 0; row < batch * heads * rows; ++row) encode_with(row, scale_at(row));
}

void reference_merge(const AttentionSpec& spec, const MergeArgs& args) {
  check_arguments(spec, args);
  const auto [batch, heads, rows, dim] = args.out.size;
  const DType from = args.states_type.value_or(spec.dtype), to = args.out_type.value_or(spec.dtype);
  for (std::int64_t row = 0; row < batch * heads * rows; ++row) {
    const std::int64_t s = row % rows, h = row / rows % heads, b = row / rows / heads;
    const Weights weights = weights_of(args, b, h, s);
    std::vector<double> out(static_cast<std::size_t>(dim));
    for (std::size_t i = 0; i < args.states.size(); ++i) {
      const float lse = args.states[i].lse[lse_offset(args, args.states[i].lse_strides, b, h, s)];
      if (std::isinf(lse) && lse < 0) continue;  // its O may be anything
      const ConstTensorView& state = args.states[i].out;
      const std::vector<double> values = read_row(from, state, offset_of(state, b, h, s));
      for (std::size_t d = 0; d < out.size(); ++d) out[d] += weights.of[i] * values[d];
    }
    write_row(to, args.out, offset_of(args.out, b, h, s), out);
    if (args.lse) args.lse[lse_offset(args, args.lse_strides, b, h, s)] = static_cast<float>(weights.lse);
  }
}

}  // namespace flashjit

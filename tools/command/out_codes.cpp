#include "out_codes.hpp"

#include "expr/kv_codec.hpp"
#include "support/swizzled_scales.hpp"

namespace flashjit::command {
namespace {

struct RowSizes {
  std::size_t columns, codes, scales;  ///< the last two in bytes
  float argument;

  explicit RowSizes(const AttentionSpec& spec)
      : columns(static_cast<std::size_t>(spec.v_dim())),
        codes(static_cast<std::size_t>(format(spec).row_bytes(spec.v_dim()))),
        scales(format(spec).has_block_scales()
                   ? static_cast<std::size_t>(format(spec).row(spec.v_dim()).scale_columns *
                                              size_of(format(spec).scale_type))
                   : 0),
        argument(format(spec).has_argument() ? kOutScale : 1.0f) {}

  static const KvFormat& format(const AttentionSpec& spec) { return spec.epilogue.out_format; }
};

const std::uint8_t* row_of(const std::vector<std::byte>& bytes, std::size_t row, std::size_t size) {
  return size == 0 ? nullptr : reinterpret_cast<const std::uint8_t*>(bytes.data()) + row * size;
}

/// Swizzled scales as rows [batch, heads, rows].
std::vector<std::byte> in_rows(const std::vector<std::byte>& swizzled, std::int64_t batch, std::int64_t heads,
                               std::int64_t rows, std::int64_t of_head) {
  std::vector<std::byte> scales;
  scales.reserve(static_cast<std::size_t>(batch * heads * rows * of_head));
  for (std::int64_t i = 0; i < batch * heads * rows; ++i) {
    const std::int64_t token = i / rows / heads * rows + i % rows, h = i / rows % heads;
    for (std::int64_t block = 0; block < of_head; ++block)
      scales.push_back(*swizzled_scale(swizzled.data(), token, h * of_head + block, heads * of_head));
  }
  return scales;
}

}  // namespace

std::vector<double> values_of_codes(const AttentionSpec& spec, std::int64_t heads, std::int64_t rows,
                                    const std::vector<std::byte>& codes,
                                    const std::vector<std::byte>& scales) {
  const RowSizes size(spec);
  const std::size_t count = codes.size() / size.codes;
  if (spec.epilogue.swizzled_scales && count > 0) {
    AttentionSpec plain = spec;
    plain.epilogue.swizzled_scales = false;
    const std::int64_t batch = static_cast<std::int64_t>(count) / heads / rows;
    return values_of_codes(plain, heads, rows, codes,
                           in_rows(scales, batch, heads, rows, static_cast<std::int64_t>(size.scales)));
  }
  std::vector<double> values(count * size.columns);
  for (std::size_t row = 0; row < count; ++row)
    decode_row(spec.epilogue.out_format, spec.v_dim(), row_of(codes, row, size.codes), size.argument,
               values.data() + row * size.columns, row_of(scales, row, size.scales));
  return values;
}

std::vector<double> stored_as(const AttentionSpec& spec, std::vector<double> out) {
  if (!spec.epilogue.out_format.quantized()) return out;
  const RowSizes size(spec);
  std::vector<std::uint8_t> codes(size.codes), scales(size.scales);
  for (std::size_t first = 0; first < out.size(); first += size.columns) {
    encode_row(spec.epilogue.out_format, spec.v_dim(), out.data() + first, size.argument, codes.data(),
               scales.empty() ? nullptr : scales.data());
    decode_row(spec.epilogue.out_format, spec.v_dim(), codes.data(), size.argument, out.data() + first,
               scales.empty() ? nullptr : scales.data());
  }
  return out;
}

}  // namespace flashjit::command

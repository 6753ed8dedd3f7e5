#include "out_codes.hpp"

#include "support/kv_codec.hpp"

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

}  // namespace

std::vector<double> values_of_codes(const AttentionSpec& spec, const std::vector<std::byte>& codes,
                                    const std::vector<std::byte>& scales) {
  const RowSizes size(spec);
  const std::size_t rows = codes.size() / size.codes;
  std::vector<double> values(rows * size.columns);
  for (std::size_t row = 0; row < rows; ++row)
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

#include "render/kv_format_text.hpp"

#include <fmt/format.h>

#include <array>
#include <string_view>

#include "expr/kv_codec.hpp"
#include "expr/kv_decode.hpp"
#include "support/dtypes.hpp"

namespace flashjit::render {
namespace {

/// The enumerators of KvZero, in the order of KvFormat::Zero.
constexpr std::array<std::string_view, 3> kZeros{"none", "subtracted", "added"};

/// A switch, which selects from registers, or a table in memory, as ptxas takes minutes over 256 cases.
std::string book_text(const KvFormat& format) {
  if (format.book.size() == 256) {
    std::string values;
    for (const float value : format.book) values += fmt::format("{:.9e}f, ", value);
    return fmt::format(
        "    static __device__ float book(unsigned code) {{ static constexpr float kValues[] = {{{}}}; "
        "return "
        "kValues[code]; }}\n",
        values);
  }
  std::string cases;
  for (std::size_t i = 0; i < format.book.size(); ++i)
    cases += fmt::format(" case {}: return {:.9e}f;", i, format.book[i]);
  return fmt::format(
      "    static __device__ float book(unsigned code) {{ switch (code) {{{} }} return 0.0f; }}\n", cases);
}

/// Functions of a format that decodes by an expression. `encodes`: also the constants that encoding needs.
std::string decode_text(const KvFormat& format, bool encodes) {
  if (format.decode.empty()) return {};
  std::string text = fmt::format(
      "    static __device__ __forceinline__ float decoded(int code, float scale, float zero) {{\n{}    }}\n",
      decode_expression(format).cuda_lines());
  if (!encodes) return text;
  const DecodeExtremes extremes = decode_extremes(format);
  for (const auto& [name, value] : {std::pair{"kLargestOf", extremes.largest},
                                    {"kHighestOf", extremes.highest},
                                    {"kLowestOf", extremes.lowest},
                                    {"kZeroRaises", int{extremes.zero_raises}}})
    text += fmt::format("    static constexpr int {} = {};\n", name, value);
  return text;
}

/// Elements that are no codes are all tail.
std::string struct_text(const char* name, const KvFormat& format, int dim, const KernelSpec& spec) {
  const DType dtype = spec.dtype;
  const bool quantized = format.quantized();
  const KvRow row = quantized ? format.row(dim) : KvRow{.block = 16, .bytes = dim * size_of(dtype)};
  const std::string tail_type = quantized ? std::string(name_of(format.tail_type)) : to_string(dtype);
  const char* stored = quantized ? "unsigned char" : dtype == DType::fp32 ? "float" : "unsigned short";
  const int scale_size = size_of(format.scale_type);
  const char* stored_scale = scale_size == 4 ? "float" : scale_size == 2 ? "unsigned short" : "unsigned char";
  std::string text = fmt::format("  struct {} {{\n    using Stored = {};\n    using StoredScale = {};\n",
                                 name, stored, stored_scale);
  const auto add = [&](const char* type, const char* constant, auto value) {
    text += fmt::format("    static constexpr {} {} = {};\n", type, constant, value);
  };
  const auto add_enum = [&](const char* type, const char* constant, std::string_view name) {
    text += fmt::format("    static constexpr {0} {1} = {0}::{2};\n", type, constant, name);
  };
  add_enum("KvCode", "kCode", name_of(format.code));
  add_enum("KvZero", "kZero", kZeros.at(static_cast<std::size_t>(format.zero)));
  add_enum("KvNumber", "kScaleType", name_of(format.scale_type));
  add_enum("KvNumber", "kTailType", tail_type);
  add("bool", "kHalves", format.packing == KvFormat::Packing::halves);
  add("bool", "kApart", format.has_block_scales());
  add("bool", "kBlockScales", format.scales != KvFormat::Scales::argument && format.keys == 0);
  add("bool", "kArgument", format.has_argument());
  add("bool", "kArgumentOfKeys", format.has_argument() && spec.kv.key_scales);
  add("int", "kBits", format.bits());
  const auto add_float = [&](const char* constant, float value) {
    add("float", constant, fmt::format("{:.9e}f", value));
  };
  add_float("kLargest", quantized ? largest_value(format) : 1.0f);
  add_float("kLargestWithArgument", quantized ? largest_with_argument(format) : 1.0f);
  add("int", "kDim", dim);
  add("int", "kColumns", row.columns);
  add("int", "kKeys", format.keys);
  add("int", "kBlock", row.block);
  add("int", "kCodes", row.codes);
  add("int", "kBlockStep", row.block_step);
  add("int", "kScales", row.scales);
  add("int", "kZeros", row.zeros);
  add("int", "kScaleStep", row.scale_step);
  add("int", "kZeroBits", format.zero_bits);
  add("int", "kZeroStep", row.zero_step);
  add("int", "kTail", row.tail);
  add("int", "kBytes", row.bytes);
  add("int", "kAlignment", row.alignment);
  add("int", "kScaleRowBytes", row.scale_columns * scale_size);
  add("int", "kScaleAlignment", format.has_block_scales() ? row.scale_alignment : row.alignment);
  const bool encodes = spec.pass == Pass::append || spec.pass == Pass::quantize;
  return text + book_text(format) + decode_text(format, encodes) + "  };\n";
}

}  // namespace

std::string kv_formats_text(const KernelSpec& spec) {
  return (spec.decodes_kv() ? stored_formats_text(spec) : std::string()) +
         (spec.epilogue.out_format.quantized()
              ? struct_text("OutFormat", spec.epilogue.out_format, spec.v_dim(), spec)
              : std::string());
}

std::string stored_formats_text(const KernelSpec& spec) {
  const bool shared = spec.kv.shared_kv;
  return struct_text("KFormat", spec.kv.k_format, spec.head_dim, spec) +
         struct_text("VFormat", shared ? spec.kv.k_format : spec.kv.v_format,
                     shared ? spec.head_dim : spec.v_dim(), spec);
}

}  // namespace flashjit::render

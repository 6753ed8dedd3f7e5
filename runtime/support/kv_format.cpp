#include "flashjit/kv_format.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "support/kv_names.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

using Code = KvFormat::Code;
using Scales = KvFormat::Scales;
using Number = KvFormat::Number;
using Zero = KvFormat::Zero;
using Packing = KvFormat::Packing;

constexpr int kStep = 16;  // columns that are decoded at a time

struct CodeName {
  Code code;
  std::string_view name;
  int bits;
  bool is_float;
};
constexpr std::array kCodes{
    CodeName{Code::element, "element", 16, true}, CodeName{Code::e4m3, "e4m3", 8, true},
    CodeName{Code::e5m2, "e5m2", 8, true},        CodeName{Code::int8, "int8", 8, false},
    CodeName{Code::uint8, "uint8", 8, false},     CodeName{Code::e2m1, "e2m1", 4, true},
    CodeName{Code::int4, "int4", 4, false},       CodeName{Code::int4_offset, "int4_offset", 4, false},
    CodeName{Code::uint4, "uint4", 4, false},     CodeName{Code::uint2, "uint2", 2, false},
    CodeName{Code::uint5, "uint5", 5, false},     CodeName{Code::int5_offset, "int5_offset", 5, false},
    CodeName{Code::uint3, "uint3", 3, false},     CodeName{Code::book, "book", 0, true},
};
constexpr std::array<std::pair<Number, std::string_view>, 5> kNumbers{{{Number::fp32, "fp32"},
                                                                       {Number::fp16, "fp16"},
                                                                       {Number::bf16, "bf16"},
                                                                       {Number::e4m3, "e4m3"},
                                                                       {Number::e8m0, "e8m0"}}};

const CodeName& info_of(Code code) {
  for (const CodeName& info : kCodes)
    if (info.code == code) return info;
  refuse("the codes of the format are number {}, which has no name", static_cast<int>(code));
}

/// Names that to_string() does not give: their parts are codes alone, or what heads of any kind may have.
constexpr std::array<std::string_view, 4> kOtherNames{"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla_nope"};

bool is_unsigned(Code code) { return !info_of(code).is_float && name_of(code).starts_with('u'); }

std::string parts_of(const KvFormat& format) {
  std::string out(name_of(format.code));
  if (!format.decode.empty()) out = fmt::format("decode{}({})", format.bits(), format.decode);
  if (format.code == Code::book) {
    for (std::size_t i = 0; i < format.book.size(); ++i)
      out += fmt::format("{}{}", i == 0 ? "(" : ",", format.book[i]);
    out += ')';
  }
  if (format.scales == Scales::argument) return out;
  out += format.keys != 0    ? fmt::format(":keys{}", format.keys)
         : format.block == 0 ? ":row"
                             : fmt::format(":g{}", format.block);
  out += fmt::format(":{}", name_of(format.scale_type));
  if (format.scales == Scales::before_block) out += ":before";
  if (format.scales == Scales::apart && format.keys == 0) out += ":apart";
  if (format.zero == Zero::subtracted) out += ":zero";
  if (format.zero_bits > 0) out += fmt::format("=uint{}", format.zero_bits);
  if (format.zero == Zero::added) out += ":min";
  if (format.packing == Packing::halves) out += ":halves";
  if (format.tail > 0)
    out += fmt::format(":tail{}{}", format.tail, format.tail_type == Number::fp16 ? "xfp16" : "");
  if (format.second_scale) out += ":scaled";
  return out;
}

/// Without scales in the row there is nothing that these could belong to.
void validate_argument_scales(const KvFormat& format) {
  const char* with_row = format.block != 0                                    ? "a block"
                         : format.keys != 0                                   ? "keys that share a scale"
                         : format.zero != Zero::none || format.zero_bits != 0 ? "zero points"
                         : format.packing != Packing::neighbors               ? "packing in halves"
                         : format.second_scale                                ? "a second scale"
                         : format.tail != 0                                   ? "a tail"
                                                                              : nullptr;
  if (with_row)
    refuse(
        "the KV format has {}, but its scales are an argument of the call; give scales in the row, such as "
        "{}:g32:fp16",
        with_row, name_of(format.code));
}

bool is_book_size(std::size_t size) {
  return size == 4 || size == 8 || size == 16 || size == 32 || size == 256;
}

bool is_group(int count) { return count == 16 || count == 32 || count == 64 || count == 128; }

/// Keys that share scales have them apart, and each column has its own.
void validate_keys(const KvFormat& format) {
  if (format.keys == 0) return;
  if (!is_group(format.keys))
    refuse("the KV format has {} keys that share a scale; they are 16, 32, 64 or 128", format.keys);
  if (format.scales != Scales::apart || format.block != 0 || format.packing != Packing::neighbors ||
      format.second_scale)
    refuse(
        "the KV format has {} keys that share a scale of each column; its scales are then in a tensor of "
        "their own, and it has no blocks of columns, no halves and no second scale",
        format.keys);
}

/// Zero points that are integers are where in the codes' range zero is.
void validate_zero_bits(const KvFormat& format) {
  if (format.zero_bits == 0) return;
  if (std::ranges::find(kZeroBits, format.zero_bits) == kZeroBits.end())
    refuse("the KV format has zero points of {} bits; they have 2, 4 or 8, or the type of the scales",
           format.zero_bits);
  if (format.zero != Zero::subtracted)
    refuse(
        "the KV format has zero points of {} bits, but none is subtracted; give zero=uint{}, or leave them "
        "out",
        format.zero_bits, format.zero_bits);
  if (format.zero_bits < format.bits())
    refuse(
        "the KV format has zero points of {} bits and codes of {}; each code may be zero, so give zero "
        "points of "
        "as many bits or more",
        format.zero_bits, format.bits());
}

/// What an expression is of: codes from 0 on, and scales that it alone reads.
void validate_decode(const KvFormat& format) {
  if (format.decode.empty()) return;
  if (!is_unsigned(format.code))
    refuse("the KV format has an expression and codes {}; give it uint2, uint3, uint4, uint5 or uint8",
           name_of(format.code));
  if (format.scales == Scales::argument || format.second_scale)
    refuse(
        "the KV format has an expression, {}, whose value is not that of the code times the scale, and so no "
        "scale of the call; give it scales of blocks alone, such as g32:fp16, without scaled",
        format.decode);
  if (format.zero == Zero::added)
    refuse("the KV format has an expression, {}, and min; give it zero", format.decode);
}

void validate_block_scales(const KvFormat& format) {
  name_of(format.scale_type);
  if (format.block != 0 && !is_group(format.block))
    refuse("the KV format has blocks of {} columns; they have 16, 32, 64 or 128, or are the row",
           format.block);
  validate_keys(format);
  const bool is_float = info_of(format.code).is_float;
  if (format.zero != Zero::none && is_float)
    refuse(
        "the KV format has zero points, but its codes are {}, which are signed floats; leave zero and min "
        "out",
        name_of(format.code));
  validate_zero_bits(format);
  if (format.zero != Zero::none && format.zero_bits == 0 &&
      (format.scale_type == Number::e8m0 || format.scale_type == Number::e4m3))
    refuse(
        "the KV format has zero points of type {}; they are fp32, fp16 or bf16, as its scales then are, or "
        "integers, zero=uint4",
        name_of(format.scale_type));
  if (format.zero == Zero::added && !is_unsigned(format.code))
    refuse(
        "the KV format adds the least element of a block to codes {}, which are signed; use uint4, or zero",
        name_of(format.code));
  if (format.packing == Packing::halves && ((format.bits() != 4 && format.bits() != 5) || format.block == 16))
    refuse(
        "the KV format packs blocks in halves, which is for codes of 4 or 5 bits in blocks of 32 columns or "
        "more");
  if (format.tail < 0 || format.tail % kStep != 0)
    refuse("the KV format has a tail of {} columns; it must be a multiple of {}", format.tail, kStep);
  if (format.tail_type != Number::bf16 && format.tail_type != Number::fp16)
    refuse("the KV format has a tail of type {}; it is bf16 or fp16", name_of(format.tail_type));
}

}  // namespace

std::string_view name_of(Code code) { return info_of(code).name; }
std::string_view name_of(Number type) {
  for (const auto& [value, name] : kNumbers)
    if (value == type) return name;
  refuse("the scales of the format have type number {}, which has no name", static_cast<int>(type));
}

std::optional<Code> code_named(std::string_view name) {
  for (const CodeName& info : kCodes)
    if (info.name == name) return info.code;
  return {};
}
std::optional<Number> number_named(std::string_view name) {
  for (const auto& [type, of_type] : kNumbers)
    if (of_type == name) return type;
  return {};
}

int KvFormat::bits() const {
  if (code != Code::book) return info_of(code).bits;
  return static_cast<int>(std::bit_width(book.size())) - 1;
}

KvRow KvFormat::row(int dim) const {
  KvRow row{.columns = dim - tail};
  row.block = block == 0 ? row.columns : block;
  const int blocks = scales == Scales::argument || row.block == 0 ? 1 : row.columns / row.block;
  const bool in_row = scales == Scales::behind_codes || scales == Scales::before_block;
  const int code_bytes = row.block * bits() / 8, scale = in_row ? size_of(scale_type) : 0;
  const bool before = scales == Scales::before_block;
  const auto zero_bytes_of = [&](int numbers, int size) {
    return zero == Zero::none ? 0 : zero_bits == 0 ? numbers * size : (numbers * zero_bits + 7) / 8;
  };
  const int zero_bytes = !in_row ? 0 : zero_bytes_of(before ? 1 : blocks, scale);
  row.codes = before ? scale + zero_bytes : 0;
  row.block_step = row.codes + code_bytes;
  row.scales = before ? 0 : blocks * code_bytes;
  row.scale_step = before ? row.block_step : scale;
  row.zeros = before ? scale : row.scales + blocks * scale;
  row.zero_step = zero_bits == 0 || before ? row.scale_step * 8 : zero_bits;
  row.tail = before ? blocks * row.block_step : row.zeros + zero_bytes;
  row.bytes = row.tail + tail * 2;
  for (const int place : {row.codes, row.block_step, row.scales, row.tail, row.bytes})
    row.alignment = std::gcd(row.alignment, place);
  if (!has_block_scales()) return row;
  const int numbers = keys == 0 ? blocks : row.columns;
  row.scales = 0;
  row.scale_step = size_of(scale_type);
  row.zeros = numbers * row.scale_step;
  row.zero_step = zero_bits == 0 ? row.scale_step * 8 : zero_bits;
  row.scale_alignment = keys == 0 ? row.scale_step : 16;  // columns' are read 16 at a time
  const int unit = zero_bits == 0 ? row.scale_step : row.scale_alignment;
  const int all = row.zeros + zero_bytes_of(numbers, row.scale_step);
  row.scale_columns = (all + unit - 1) / unit * unit / row.scale_step;
  return row;
}

void KvFormat::validate() const {
  info_of(code);
  if (code == Code::book ? !is_book_size(book.size()) : !book.empty())
    refuse(
        "the KV format has a code book of {} values; a book has 4, 8, 16, 32 or 256, and other codes have "
        "none",
        book.size());
  if (!std::ranges::all_of(book, [](float value) { return std::isfinite(value); }))
    refuse("the KV format has a code book with a value that is not finite; give finite numbers");
  if (code == Code::book && std::ranges::all_of(book, [](float value) { return value == 0; }))
    refuse("the KV format has a code book of zeros; give values that differ");
  if (scales > Scales::apart || zero > Zero::added || packing > Packing::halves)
    refuse("the KV format has scales, zero points or packing without a name");
  if (code == Code::element && *this != KvFormat{})
    refuse(
        "the KV format is not quantized, but has scales, blocks or a tail; name its codes or leave these "
        "out");
  validate_decode(*this);
  if (scales == Scales::argument)
    validate_argument_scales(*this);
  else
    validate_block_scales(*this);
  if (is_unsigned(code) && zero == Zero::none && decode.empty())
    refuse("the KV format has codes {}, which are not negative, without zero points; add zero or min",
           name_of(code));
}

void KvFormat::validate_row(int dim, std::string_view name) const {
  validate();
  if (!quantized()) return;
  const std::string format = to_string(*this);
  if (dim % kStep != 0)
    refuse("{} is {}, but its format is {}; it must then be a multiple of {}: pad the heads with zeros", name,
           dim, format, kStep);
  if (dim <= tail)
    refuse("{} is {}, but its format {} has a tail of {} columns; give a format whose tail is shorter", name,
           dim, format, tail);
  if (block != 0 && (dim - tail) % block != 0)
    refuse(
        "{} is {} with {} columns of codes, but its format {} has blocks of {}, which do not "
        "divide them",
        name, dim, dim - tail, format, block);
  if (packing == Packing::halves && block == 0 && (dim - tail) % (2 * kStep) != 0)
    refuse(
        "{} is {} with {} columns of codes, but its format {} packs them in halves of a multiple "
        "of {}",
        name, dim, dim - tail, format, kStep);
}

KvFormat kv_format_of(DType dtype) {
  switch (dtype) {
    case DType::e4m3:
      return {.code = Code::e4m3};
    case DType::e5m2:
      return {.code = Code::e5m2};
    case DType::int8:
      return {.code = Code::int8};
    default:
      return {};
  }
}

const std::vector<NamedKvFormat>& named_kv_formats() {
  static const std::vector<NamedKvFormat> kNamed{
      {"fp8", "e4m3"},
      {"fp8_e4m3", "e4m3"},
      {"fp8_e5m2", "e5m2"},
      {"fp8_ds_mla", "e4m3:g128:fp32:tail64"},
      {"fp8_ds_mla_nope", "e4m3:g128:fp32"},
      {"fp8_ds_mla_v4", "e4m3:g64:e8m0:apart:tail64"},
      {"nvfp4", "e2m1:g16:e4m3:scaled"},
      {"mxfp4", "e2m1:g32:e8m0"},
      {"mxfp8", "e4m3:g32:e8m0"},
      {"q8_0", "int8:g32:fp16:before"},
      {"q4_0", "int4_offset:g32:fp16:before:halves"},
      {"q4_1", "uint4:g32:fp16:before:min:halves"},
      {"q5_0", "int5_offset:g32:fp16:before:halves"},
      {"q5_1", "uint5:g32:fp16:before:min:halves"},
      {"iq4_nl", "book(-127,-104,-83,-65,-49,-35,-22,-10,1,13,25,38,53,69,89,113):g32:fp16:before:halves"},
  };
  return kNamed;
}

std::string to_string(const KvFormat& format) {
  std::string parts = parts_of(format);
  for (const NamedKvFormat& named : named_kv_formats())
    if (parts == named.parts && std::ranges::find(kOtherNames, named.name) == kOtherNames.end())
      return std::string(named.name);
  return parts;
}

}  // namespace flashjit

// How a row of K or V is stored: as elements of Q's type, or quantized. One description, from which kernels,
// checks and the CPU reference take the bytes of a row, how it is decoded and how it is encoded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flashjit/types.hpp"

namespace flashjit {

/// Where the parts of a row are, in bytes from its beginning: codes of `columns` in blocks, their scales and
/// zero points, and a tail of plain elements.
struct KvRow {
  int columns = 0;     ///< that have codes; the tail has the others
  int block = 0;       ///< columns that share a scale of the row; all, where no scale is in the row
  int codes = 0;       ///< of the first block
  int block_step = 0;  ///< from a block's codes to the next block's
  int scales = 0;      ///< of the first block; of scales in a tensor of their own in that one's row
  int zeros = 0;       ///< of the first block, likewise
  int scale_step = 0;  ///< from a block's scale to the next block's
  int zero_step = 0;   ///< the same of zero points, in bits
  int tail = 0;
  int bytes = 0;
  int alignment = 16;       ///< of rows: pointers and strides are multiples
  int scale_columns = 0;    ///< numbers in a row of the scales' tensor: scales, then zero points; 0: none
  int scale_alignment = 0;  ///< of these rows

  bool operator==(const KvRow&) const = default;
};

/// The format of K or of V in a call: a plain value. Its default is elements of Q's type.
///
/// As text a name, or its parts: codes, then in this order "g32" (a scale for 32 columns) or "row" (one for
/// the row), the scale's type, "before" (a block's scale is before its codes) or "apart" (scales are in a
/// tensor of their own), "zero", "zero=uint4" or "min", "halves", "tail64" or "tail64xfp16", and "scaled":
/// "int4:g32:fp16:zero", "nvfp4", "q8_0", "fp8_ds_mla", "int4:g32:fp16:apart". With "keys32" in the place of
/// "g32" 32 keys share a scale for each column, apart: "uint2:keys32:fp16:min". Codes alone, "e4m3" or
/// "int4", have the scales of the call's k_scale or v_scale. Codes of another meaning are an expression of
/// code, scale and zero in the language of programs: "decode4((code - 8) * scale):g32:fp16", and
/// "decode4(select(code < 8, 1.0, -1.0) * (exp2((code & 7) * scale) - 1.0)):g32:fp16".
struct KvFormat {
  enum class Code : std::uint8_t {
    element,      ///< not quantized
    e4m3,         ///< FP8: up to 448
    e5m2,         ///< FP8: up to 57344
    int8,         ///< -128 to 127
    uint8,        ///< 0 to 255
    e2m1,         ///< FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    int4,         ///< -8 to 7, two's complement
    int4_offset,  ///< -8 to 7, as 0 to 15
    uint4,        ///< 0 to 15
    uint2,        ///< 0 to 3
    int5_offset,  ///< -16 to 15, as 0 to 31
    uint5,        ///< 0 to 31
    uint3,        ///< 0 to 7
    book,         ///< index into `book`
  };
  enum class Scales : std::uint8_t {
    argument,      ///< k_scale or v_scale of the call: one for each head, or for each key with kv.key_scales
    behind_codes,  ///< in the row, after all codes
    before_block,  ///< in the row, before the codes of its block
    apart,         ///< in a tensor of their own, k_block_scale or v_block_scale of the call
  };
  /// What scales, zero points and tails are stored as.
  enum class Number : std::uint8_t { fp32, fp16, bf16, e4m3, e8m0 };
  enum class Zero : std::uint8_t {
    none,
    subtracted,  ///< element = (code - zero) * scale
    added,       ///< element = code * scale + zero: the least element of the block
  };
  enum class Packing : std::uint8_t {
    neighbors,  ///< one code after the other, the first in a byte's lowest bits
    halves,     ///< a byte has a column of a block's first half, and in its upper bits one of the second;
                ///< before these a block has the fifth bits of its columns, eight to a byte
  };

  Code code = Code::element;
  Scales scales = Scales::argument;
  Number scale_type = Number::fp32;  ///< of scales in the row, and of most zero points
  Zero zero = Zero::none;            ///< behind the row's scales, or behind the block's scale
  int zero_bits = 0;  ///< of integer zero points, counted from the least code: 2, 4 or 8; 0: zero points have
                      ///< the scales' type
  Packing packing = Packing::neighbors;
  bool second_scale = false;        ///< scales of the row are multiplied with the call's k_scale or v_scale
  Number tail_type = Number::bf16;  ///< bf16 or fp16
  int block = 0;                    ///< columns of a row that share a scale: 16, 32, 64, 128; 0: all
  int tail = 0;                     ///< columns behind the scales that are elements, as DeepSeek's 64 of RoPE
  std::vector<float> book = {};     ///< 4, 8, 16, 32 or 256 values
  /// An element by an expression of code, which is from 0 on, scale and zero, where it is no code times a
  /// scale.
  std::string decode = {};
  int keys =
      0;  ///< keys that share a scale of each column, 16, 32, 64 or 128; 0: blocks of a row have scales

  bool quantized() const { return code != Code::element; }
  /// Whether the call has scales for it.
  bool has_argument() const { return quantized() && (scales == Scales::argument || second_scale); }
  /// Whether the call has a tensor of its blocks' scales.
  bool has_block_scales() const { return scales == Scales::apart; }
  /// Whether all of it but the scale is one byte a column: what tensor cores' kernels read as it is.
  bool is_plain_8bit() const {
    return scales == Scales::argument && (code == Code::e4m3 || code == Code::e5m2 || code == Code::int8);
  }
  FLASHJIT_API int bits() const;  ///< of a code
  /// The row of `dim` columns, which validate_row() admits.
  FLASHJIT_API KvRow row(int dim) const;
  /// Bytes of a row of `dim` columns; of a format that is not quantized as of 16-bit elements.
  int row_bytes(int dim) const { return row(dim).bytes; }

  /// Throws Error(invalid_argument) that names the contradiction and the allowed values.
  FLASHJIT_API void validate() const;
  /// The same of rows of `dim` columns; `name` is what the message calls these: "head_dim".
  FLASHJIT_API void validate_row(int dim, std::string_view name = "head_dim") const;
  bool operator==(const KvFormat&) const = default;
};

/// The format of codes of 8 bits alone: e4m3, e5m2 or int8.
FLASHJIT_API KvFormat kv_format_of(DType dtype);
/// A format's name where it has one, else its parts; "element" where it is not quantized.
FLASHJIT_API std::string to_string(const KvFormat& format);
/// Throws Error(invalid_argument) that quotes the part it could not read, and names the allowed values.
FLASHJIT_API KvFormat parse_kv_format(std::string_view text);

/// A format with a name of its own.
struct NamedKvFormat {
  std::string_view name, parts;
};
/// All names that parse_kv_format() knows, with what they stand for.
FLASHJIT_API const std::vector<NamedKvFormat>& named_kv_formats();

}  // namespace flashjit

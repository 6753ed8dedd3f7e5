// KV formats: texts, errors, layouts of rows byte by byte, every code of every format, and rows that go
// through encode and decode.
#include "flashjit/kv_format.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "expr/kv_codec.hpp"
#include "tests/support/kv_formats.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit {
namespace {

using Code = KvFormat::Code;
using Bytes = std::vector<std::uint8_t>;
using Values = std::vector<double>;

/// Scales that are apart follow the row.
Values decoded(const KvFormat& format, int dim, const Bytes& row, double argument = 1) {
  Values values(static_cast<std::size_t>(dim));
  decode_row(format, dim, row.data(), argument, values.data(), row.data() + format.row_bytes(dim));
  return values;
}

Bytes encoded(const KvFormat& format, const Values& values, float argument = 1) {
  const int dim = static_cast<int>(values.size());
  const int bytes = format.row_bytes(dim);
  Bytes row(static_cast<std::size_t>(bytes + format.row(dim).scale_columns * size_of(format.scale_type)));
  encode_row(format, dim, values.data(), argument, row.data(), row.data() + bytes);
  return row;
}

/// A float of so many exponent and mantissa bits, by its definition.
double small_float(unsigned code, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1,
            exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1),
            mantissa = code & ((1 << mantissa_bits) - 1);
  const double sign = code >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

/// Those with names and those of other tests; where keys share scales a row is not encoded alone.
const std::vector<std::string>& formats() {
  static const std::vector<std::string> kFormats = [] {
    std::set<std::string> texts{"e4m3", "e5m2", "int8"};
    for (const NamedKvFormat& named : named_kv_formats()) texts.emplace(named.name);
    for (const auto& list : {test::kv_formats_of_128(), test::kv_formats_apart()})
      texts.insert(list.begin(), list.end());
    return std::vector<std::string>(texts.begin(), texts.end());
  }();
  return kFormats;
}

int dim_of(const KvFormat& format) { return 256 + format.tail; }

TEST(KvFormat, EveryCodeIsItsTablesValue) {
  for (unsigned code = 0; code < 256; ++code) {
    const double e4m3 = code_value({.code = Code::e4m3}, code), e5m2 = code_value({.code = Code::e5m2}, code);
    EXPECT_EQ(std::isnan(e4m3), (code & 0x7f) == 0x7f) << code;
    if ((code & 0x7f) != 0x7f) {
      EXPECT_EQ(e4m3, small_float(code, 4, 3)) << code;
    }
    if ((code & 0x7f) < 0x7c) {
      EXPECT_EQ(e5m2, small_float(code, 5, 2)) << code;
    }
    EXPECT_EQ(code_value({.code = Code::int8}, code), code < 128 ? code : code - 256.0);
    EXPECT_EQ(code_value({.code = Code::uint8}, code), code);
  }
  for (unsigned code = 0; code < 16; ++code) {
    EXPECT_EQ(code_value({.code = Code::e2m1}, code), small_float(code, 2, 1)) << code;
    EXPECT_EQ(code_value({.code = Code::int4}, code), code < 8 ? code : code - 16.0);
    EXPECT_EQ(code_value({.code = Code::int4_offset}, code), code - 8.0);
    EXPECT_EQ(code_value({.code = Code::uint4}, code), code);
  }
  constexpr double kE2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  for (unsigned code = 0; code < 16; ++code) EXPECT_EQ(code_value({.code = Code::e2m1}, code), kE2m1[code]);
  for (unsigned code = 0; code < 4; ++code) EXPECT_EQ(code_value({.code = Code::uint2}, code), code);
  for (unsigned code = 0; code < 8; ++code) EXPECT_EQ(code_value({.code = Code::uint3}, code), code);
  for (unsigned code = 0; code < 32; ++code) {
    EXPECT_EQ(code_value({.code = Code::int5_offset}, code), code - 16.0);
    EXPECT_EQ(code_value({.code = Code::uint5}, code), code);
  }
}

TEST(KvFormat, EveryScaleIsItsTypesValue) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    const double e8m0 = decode_number(KvFormat::Number::e8m0, &byte);
    if (code == 255)
      EXPECT_TRUE(std::isnan(e8m0));
    else
      EXPECT_EQ(e8m0, std::ldexp(1.0, code - 127)) << code;
    std::uint8_t again = 0;
    encode_scale(KvFormat::Number::e8m0, static_cast<float>(e8m0), &again);
    EXPECT_EQ(again, byte);
    if ((code & 0x7f) == 0x7f || code == 0 || code == 128) continue;
    EXPECT_EQ(decode_number(KvFormat::Number::e4m3, &byte), small_float(byte, 4, 3));
  }
}

TEST(KvFormat, EveryCodeOfEveryFormatSurvives) {
  for (const std::string& text : formats()) {
    const KvFormat format = parse_kv_format(text);
    for (unsigned code = 0; code < 1u << format.bits(); ++code) {
      const double value = code_value(format, code);
      if (!std::isfinite(value)) continue;
      EXPECT_EQ(code_value(format, code_of(format, static_cast<float>(value))), value) << text << " " << code;
    }
  }
}

TEST(KvFormat, CodesRoundToNearestWithTiesToEven) {
  const KvFormat e2m1{.code = Code::e2m1};
  const auto rounded = [&](float value) { return code_value(e2m1, code_of(e2m1, value)); };
  constexpr float kTies[][2] = {{0.25f, 0}, {0.75f, 1}, {1.25f, 1}, {1.75f, 2}, {2.5f, 2}, {3.5f, 4}, {5, 4}};
  for (const auto& [value, nearest] : kTies) {
    EXPECT_EQ(rounded(value), nearest) << value;
    EXPECT_EQ(rounded(-value), -nearest) << value;
  }
  EXPECT_EQ(rounded(5.01f), 6);
  EXPECT_EQ(rounded(1e9f), 6);
  EXPECT_EQ(code_of({.code = Code::int8}, 2.5f), 2u);
  EXPECT_EQ(code_of({.code = Code::int4}, -99.0f), 8u);
  EXPECT_EQ(code_of({.code = Code::int4_offset}, -99.0f), 0u);
  EXPECT_EQ(code_of({.code = Code::int5_offset}, -99.0f), 0u);
  EXPECT_EQ(code_of({.code = Code::int5_offset}, -2.5f), 14u);
  EXPECT_EQ(code_of({.code = Code::uint3}, 99.0f), 7u);
}

TEST(KvFormat, TextsSurvive) {
  for (const std::string& text : formats()) {
    const KvFormat format = parse_kv_format(text);
    EXPECT_EQ(parse_kv_format(to_string(format)), format) << text;
  }
  EXPECT_EQ(to_string(parse_kv_format("e2m1:g16:e4m3:scaled")), "nvfp4");
  EXPECT_EQ(to_string(parse_kv_format("fp8")), "e4m3");
  EXPECT_EQ(to_string(parse_kv_format("fp8_ds_mla_nope")), "e4m3:g128:fp32");
  EXPECT_EQ(to_string(parse_kv_format("e4m3:g64:e8m0:apart:tail64")), "fp8_ds_mla_v4");
  EXPECT_EQ(to_string(KvFormat{}), "element");
  EXPECT_EQ(to_string(parse_kv_format("int4:g32:fp16:zero")), "int4:g32:fp16:zero");
}

TEST(KvFormat, DrawnOnesSurvive) {
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    const std::string text = test::drawn_kv_format(random);
    const KvFormat format = parse_kv_format(text);
    EXPECT_EQ(parse_kv_format(to_string(format)), format) << text;
  }
}

TEST(KvFormat, ErrorsSayWhatIsWrong) {
  const auto says = test::expect_says;
  const auto refused = [](const auto&... of) { return test::refused_kv_format(of...); };
  says(refused("int5"), {"'int5'", "neither a name nor codes", "nvfp4", "int4:g32:fp16:zero"});
  says(refused("int4:32"), {"'32'", "g<columns>, row or keys<n>"});
  says(refused("int4:keys24:fp16"), {"24 keys", "16, 32, 64 or 128"});
  says(refused("int4:keys32:fp16:before"), {"'before'", "out of order"});
  says(refused("int4:keys32:fp16:halves"), {"32 keys", "no halves"});
  says(refused("e2m1:keys32:e4m3:scaled"), {"32 keys", "no second scale"});
  says(refused("int4:g32:fp16:before:apart"), {"'apart'", "out of order"});
  says(refused("int4:g32"), {"the type of its scales"});
  says(refused("int4:g24:fp16"), {"blocks of 24 columns", "16, 32, 64 or 128"});
  says(refused("int4:g32:fp16:zero:min"), {"'min'", "out of order"});
  says(refused("e4m3:g32:fp16:zero"), {"zero points", "e4m3", "leave zero and min out"});
  says(refused("uint4:g32:fp16"), {"uint4", "add zero or min"});
  says(refused("uint4:g32:e8m0:min"), {"zero points of type e8m0", "fp32, fp16 or bf16"});
  says(refused("int4:g32:fp16:min"), {"signed", "uint4"});
  says(refused("uint4:g32:fp16:zero=uint5"), {"'zero=uint5'", "zero=uint2, zero=uint4 or zero=uint8"});
  says(refused("uint4:g32:fp16:zero=uint4:min"), {"'min'", "out of order"});
  says(refused("uint8:g32:fp16:zero=uint4"), {"zero points of 4 bits and codes of 8", "as many bits"});
  says(refused("e2m1:g32:fp16:zero=uint4"), {"zero points", "e2m1", "leave zero and min out"});
  says(refused("int8:g32:fp16:halves"), {"halves", "4 or 5 bits"});
  says(refused("uint3:g32:fp16:min:halves"), {"halves", "4 or 5 bits"});
  says(refused("uint5:g32:fp16"), {"uint5", "add zero or min"});
  says(refused("e4m3:g128:fp32:tail20"), {"tail of 20", "multiple of 16"});
  says(refused("e4m3:g128:fp32:tail64xe4m3"), {"tail of type e4m3", "bf16 or fp16"});
  says(refused("book(1,2,3)"), {"3 values", "4, 8, 16, 32 or 256"});
  says(refused("book(1,2,3,x)"), {"'x'", "no number"});
  says(refused("book( 0x1,2,3,4)"), {"' 0x1'", "no number"});
  says(refused("book(1,,3,4)"), {"''", "no number"});
  says(refused("book(1,2,3,inf)"), {"not finite"});
  says(refused("element:g32:fp16"), {"not quantized"});
  says(refused(""), {"''"});
  says(refused("nvfp4", 72), {"head_dim is 72", "nvfp4", "a multiple of 16", "pad"});
  says(refused("q8_0", 80), {"head_dim is 80", "blocks of 32"});
  says(refused("fp8_ds_mla", 64), {"a tail of 64 columns"});
  says(refused("int4:row:fp16:halves", 80), {"halves"});
  EXPECT_EQ(refused("fp8_ds_mla", 576), "accepted");
  EXPECT_NO_THROW(KvFormat{}.validate_row(72));
}

TEST(KvFormat, BytesOfRows) {
  const auto bytes = [](const char* text, int dim) { return parse_kv_format(text).row_bytes(dim); };
  EXPECT_EQ(bytes("q8_0", 128), 4 * 34);
  EXPECT_EQ(bytes("q4_0", 128), 4 * 18);
  EXPECT_EQ(bytes("q4_1", 128), 4 * 20);
  EXPECT_EQ(bytes("iq4_nl", 128), 4 * 18);
  EXPECT_EQ(bytes("q5_0", 128), 4 * 22);
  EXPECT_EQ(bytes("q5_1", 128), 4 * 24);
  EXPECT_EQ(bytes("book(-7,-4,-2,-1,1,2,4,7):row:fp16", 128), 48 + 2);
  EXPECT_EQ(bytes("fp8_ds_mla", 576), 656);
  EXPECT_EQ(bytes("fp8_ds_mla_nope", 512), 528);
  EXPECT_EQ(bytes("fp8_ds_mla_v4", 512), 576);
  EXPECT_EQ(bytes("nvfp4", 128), 64 + 8);
  EXPECT_EQ(bytes("mxfp4", 128), 64 + 4);
  EXPECT_EQ(bytes("mxfp8", 128), 128 + 4);
  EXPECT_EQ(bytes("e4m3", 128), 128);
  EXPECT_EQ(bytes("int4:row:fp16", 128), 64 + 2);
  EXPECT_EQ(bytes("uint2:g32:fp16:min", 128), 32 + 4 * 4);
  EXPECT_EQ(bytes("uint4:g32:fp16:zero=uint4", 128), 64 + 4 * 2 + 2);
  EXPECT_EQ(bytes("uint4:row:fp16:zero=uint4", 128), 64 + 2 + 1);
  EXPECT_EQ(bytes("uint4:g32:fp16:before:zero=uint4", 128), 4 * (2 + 1 + 16));
  EXPECT_EQ(bytes("uint8:g64:fp32:zero=uint8:tail64", 192), 128 + 2 * 4 + 2 + 128);
  EXPECT_EQ(bytes("element", 128), 256);
}

TEST(KvFormat, AlignmentsOfRows) {
  const auto alignment = [](const char* text, int dim) { return parse_kv_format(text).row(dim).alignment; };
  EXPECT_EQ(alignment("q8_0", 128), 2);
  EXPECT_EQ(alignment("q4_1", 128), 4);
  EXPECT_EQ(alignment("fp8_ds_mla", 576), 16);
  EXPECT_EQ(alignment("nvfp4", 128), 8);
  EXPECT_EQ(alignment("mxfp8", 128), 4);
  EXPECT_EQ(alignment("e4m3", 128), 16);
  EXPECT_EQ(alignment("int4:g32:e8m0:before", 128), 1);
}

/// As AWQ and GPTQ pack them: two zero points of four bits in a byte, the first in its lower half.
TEST(KvFormat, RowsWithZeroPointsOfFourBits) {
  Bytes row(16 + 2 * 2 + 1);
  for (int i = 0; i < 16; ++i) row[i] = static_cast<std::uint8_t>((2 * i % 16) | (2 * i + 1) % 16 << 4);
  row[17] = 0x38, row[19] = 0x40;  // 0.5 and 2
  row[20] = 3 | 12 << 4;
  for (const char* codes : {"uint4", "int4_offset"}) {
    const KvFormat format = parse_kv_format(std::string(codes) + ":g16:fp16:zero=uint4");
    const Values values = decoded(format, 32, row);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(values[i], (i % 16 - (i < 16 ? 3 : 12)) * (i < 16 ? 0.5 : 2)) << i;
    EXPECT_EQ(encoded(format, values), row) << codes;
  }
}

/// Every code with every zero point, wherever scales are: blocks that have all codes keep their bytes.
TEST(KvFormat, EveryCodeWithEveryZeroPoint) {
  for (const char* text :
       {"uint4:g16:fp16:zero=uint4", "int4:g16:bf16:before:zero=uint8", "uint2:row:e4m3:zero=uint2",
        "int8:row:fp32:apart:zero=uint8", "int4_offset:g32:e8m0:zero=uint4:halves",
        "uint3:g16:fp16:apart:zero=uint4", "int4:g32:fp16:apart:zero=uint4:tail16"}) {
    const KvFormat format = parse_kv_format(text);
    const int codes = 1 << format.bits(), dim = 256 + format.tail,
              block = format.block == 0 ? 256 : format.block;
    for (int zero = 0; zero < codes; ++zero) {
      Values values(static_cast<std::size_t>(dim));
      for (int i = 0; i < 256; ++i) {
        const int of_block = (zero + i / block) % codes, code = (i % block) % codes;
        values[i] = std::ldexp(code - of_block, i / block % 3 - 1);
      }
      const Bytes row = encoded(format, values);
      EXPECT_EQ(decoded(format, dim, row), values) << text << " " << zero;
      EXPECT_EQ(encoded(format, decoded(format, dim, row)), row) << text << " " << zero;
      const KvRow at = format.row(dim);
      const std::uint8_t* const scales = row.data() + (format.has_block_scales() ? at.bytes : 0);
      for (int i = 0; i < 256 / block; ++i) {
        const int bit = at.zeros * 8 + i * at.zero_step;
        EXPECT_EQ(scales[bit / 8] >> bit % 8 & ((1 << format.zero_bits) - 1), (zero + i) % codes) << text;
      }
    }
  }
}

/// llama.cpp's block_q8_0: fp16 d, then int8 qs[32].
TEST(KvFormat, BlocksOfQ8_0) {
  Bytes row(68);
  for (int block = 0; block < 2; ++block) {
    row[block * 34] = 0x00, row[block * 34 + 1] = block == 0 ? 0x38 : 0xc0;  // 0.5 and -2 in fp16
    for (int i = 0; i < 32; ++i) row[block * 34 + 2 + i] = static_cast<std::uint8_t>(i * 5 - 80);
  }
  const Values values = decoded(parse_kv_format("q8_0"), 64, row);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(values[i], (i % 32 * 5 - 80) * (i < 32 ? 0.5 : -2.0)) << i;
}

/// llama.cpp's block_q4_0: fp16 d, then qs[16], which have elements 0 to 15 in their lower halves.
TEST(KvFormat, BlocksOfQ4_0) {
  Bytes row(18);
  row[1] = 0x3c;  // 1
  for (int i = 0; i < 16; ++i) row[2 + i] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  const Values values = decoded(parse_kv_format("q4_0"), 32, row);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], i - 8.0) << i;
    EXPECT_EQ(values[16 + i], 7.0 - i) << i;
  }
}

/// llama.cpp's block_q4_1: fp16 d, fp16 m, then qs[16]; an element is d * q + m.
TEST(KvFormat, BlocksOfQ4_1) {
  Bytes row(20);
  row[1] = 0x40, row[3] = 0xc2;  // 2 and -3
  for (int i = 0; i < 16; ++i) row[4 + i] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  const Values values = decoded(parse_kv_format("q4_1"), 32, row);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], 2.0 * i - 3) << i;
    EXPECT_EQ(values[16 + i], 2.0 * (15 - i) - 3) << i;
  }
}

/// llama.cpp's block_iq4_nl: fp16 d, then qs[16] as of q4_0, which are indices into kvalues_iq4nl.
TEST(KvFormat, BlocksOfIq4Nl) {
  constexpr int kValues[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  Bytes row(18);
  row[1] = 0xb8;  // -0.5
  for (int i = 0; i < 16; ++i) row[2 + i] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  const Values values = decoded(parse_kv_format("iq4_nl"), 32, row);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], -0.5 * kValues[i]) << i;
    EXPECT_EQ(values[16 + i], -0.5 * kValues[15 - i]) << i;
  }
}

/// llama.cpp's block_q5_0: fp16 d, then qh[4], whose bit i is the fifth of element i, then qs[16] as of q4_0.
TEST(KvFormat, BlocksOfQ5_0) {
  Bytes row(22);
  row[1] = 0x3c;  // 1
  row[2] = 0x55, row[3] = 0xaa, row[4] = 0x0f,
  row[5] = 0xf0;  // elements 0, 2, 4, 6, 9, 11, 13, 15, 16 to 19, ...
  for (int i = 0; i < 16; ++i) row[6 + i] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  const Values values = decoded(parse_kv_format("q5_0"), 32, row);
  for (int i = 0; i < 16; ++i) {
    const bool low_has = i < 8 ? i % 2 == 0 : i % 2 == 1, high_has = i < 4 || i >= 12;
    EXPECT_EQ(values[i], i + (low_has ? 16 : 0) - 16.0) << i;
    EXPECT_EQ(values[16 + i], 15.0 - i + (high_has ? 16 : 0) - 16) << i;
  }
  EXPECT_EQ(encoded(parse_kv_format("q5_0"), decoded(parse_kv_format("q5_0"), 32, row)).size(), row.size());
}

/// llama.cpp's block_q5_1: fp16 d, fp16 m, qh[4], qs[16]; an element is d * q + m.
TEST(KvFormat, BlocksOfQ5_1) {
  Bytes row(24);
  row[1] = 0x40, row[3] = 0xc2;  // 2 and -3
  row[4] = 0x01, row[7] = 0x80;  // elements 0 and 31
  for (int i = 0; i < 16; ++i) row[8 + i] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  const Values values = decoded(parse_kv_format("q5_1"), 32, row);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], 2.0 * (i + (i == 0 ? 16 : 0)) - 3) << i;
    EXPECT_EQ(values[16 + i], 2.0 * (15 - i + (i == 15 ? 16 : 0)) - 3) << i;
  }
}

/// Codes of 3 bits follow each other: eight in three bytes, the first in the lowest bits.
TEST(KvFormat, RowsOfThreeBits) {
  const KvFormat format = parse_kv_format("book(-7,-4,-2,-1,1,2,4,7):row:fp16");
  Bytes row(6 + 2);
  for (int half = 0; half < 2; ++half) {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<unsigned>(half == 0 ? i : 7 - i) << 3 * i;
    for (int i = 0; i < 3; ++i) row[half * 3 + i] = static_cast<std::uint8_t>(bits >> 8 * i);
  }
  row[7] = 0xc0;  // -2
  const Values values = decoded(format, 16, row);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(values[i], -2.0 * format.book[i]) << i;
    EXPECT_EQ(values[8 + i], -2.0 * format.book[7 - i]) << i;
  }
  EXPECT_EQ(encoded(format, values), row);
}

/// MXFP4: two e2m1 a byte, the first in its lower half, behind all of a row a power of two for 32.
TEST(KvFormat, RowsOfMxfp4) {
  Bytes row(34);
  for (int i = 0; i < 32; ++i) row[i] = static_cast<std::uint8_t>((2 * i % 16) | (2 * i + 1) % 16 << 4);
  row[32] = 126, row[33] = 130;  // 2^-1 and 2^3
  const Values values = decoded(parse_kv_format("mxfp4"), 64, row);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(values[i], small_float(i % 16, 2, 1) * (i < 32 ? 0.5 : 8.0)) << i;
}

/// DeepSeek's rows of 656 bytes: 512 e4m3, four fp32 scales of 128 each, 64 bf16 of RoPE.
TEST(KvFormat, RowsOfFp8DsMla) {
  Bytes row(656);
  for (int i = 0; i < 512; ++i) row[i] = static_cast<std::uint8_t>(i % 0x7f);
  for (int i = 0; i < 4; ++i) {
    const float scale = 0.25f * static_cast<float>(i + 1);
    std::memcpy(&row[512 + i * 4], &scale, 4);
  }
  for (int i = 0; i < 64; ++i) row[528 + i * 2] = static_cast<std::uint8_t>(i), row[528 + i * 2 + 1] = 0x3f;
  const Values values = decoded(parse_kv_format("fp8_ds_mla"), 576, row);
  for (int i = 0; i < 512; ++i) EXPECT_EQ(values[i], small_float(i % 0x7f, 4, 3) * 0.25 * (i / 128 + 1)) << i;
  for (int i = 0; i < 64; ++i) EXPECT_EQ(values[512 + i], small_float(0x3f00 | i, 8, 7)) << i;
}

/// DeepSeek V4's: 448 e4m3 and 64 bf16 of RoPE in a row, and in another tensor seven powers of two, of 64
/// columns each.
TEST(KvFormat, RowsOfFp8DsMlaV4) {
  const KvFormat format = parse_kv_format("fp8_ds_mla_v4");
  EXPECT_EQ(format.row(512).scale_columns, 7);
  EXPECT_EQ(format.row(512).alignment, 16);
  Bytes row(576 + 7);
  for (int i = 0; i < 448; ++i) row[i] = static_cast<std::uint8_t>(i % 0x7f);
  for (int i = 0; i < 64; ++i) row[448 + i * 2] = static_cast<std::uint8_t>(i), row[448 + i * 2 + 1] = 0x3f;
  for (int i = 0; i < 7; ++i) row[576 + i] = static_cast<std::uint8_t>(124 + i);
  const Values values = decoded(format, 512, row);
  for (int i = 0; i < 448; ++i)
    EXPECT_EQ(values[i], std::ldexp(small_float(i % 0x7f, 4, 3), i / 64 - 3)) << i;
  for (int i = 0; i < 64; ++i) EXPECT_EQ(values[448 + i], small_float(0x3f00 | i, 8, 7)) << i;
}

/// NVFP4: two e2m1 a byte, the first in its lower half, an e4m3 scale for 16, one fp32 for all.
TEST(KvFormat, RowsOfNvfp4) {
  Bytes row(36);
  for (int i = 0; i < 32; ++i) row[i] = static_cast<std::uint8_t>((2 * i % 16) | (2 * i + 1) % 16 << 4);
  for (int i = 0; i < 4; ++i) row[32 + i] = static_cast<std::uint8_t>(0x38 + i);  // 1, 1.125, 1.25, 1.375
  const Values values = decoded(parse_kv_format("nvfp4"), 64, row, 0.5);
  for (int i = 0; i < 64; ++i)
    EXPECT_EQ(values[i], small_float(i % 16, 2, 1) * (1 + 0.125 * (i / 16)) * 0.5) << i;
}

/// NVFP4 as engines store it: codes and e4m3 scales in two tensors have the bytes of a row of nvfp4.
TEST(KvFormat, RowsOfNvfp4ApartAreThoseOfNvfp4) {
  const KvFormat apart = parse_kv_format("e2m1:g16:e4m3:apart:scaled");
  const KvRow row = apart.row(64);
  EXPECT_EQ(row.bytes, 32);
  EXPECT_EQ(row.scale_columns, 4);
  EXPECT_EQ(row.scale_alignment, 1);
  Values values(64);
  for (int i = 0; i < 64; ++i) values[i] = std::sin(i) * (i / 16 + 1);
  EXPECT_EQ(encoded(apart, values, 0.25f), encoded(parse_kv_format("nvfp4"), values, 0.25f));
}

/// Zero points of fewer bits than a byte fill their rows up to whole numbers, and of keys to 16 bytes.
TEST(KvFormat, ZeroPointsApartFillWholeNumbers) {
  const auto columns = [](const char* text, int dim) { return parse_kv_format(text).row(dim).scale_columns; };
  EXPECT_EQ(columns("uint4:g32:fp16:apart:zero=uint4", 128), 4 + 1);
  EXPECT_EQ(columns("uint4:g32:fp16:apart:zero=uint4", 160), 5 + 2);
  EXPECT_EQ(columns("uint8:row:fp32:apart:zero=uint8", 128), 1 + 1);
  EXPECT_EQ(columns("uint4:keys32:fp16:zero=uint4", 128), 128 + 32);
  EXPECT_EQ(columns("uint4:keys32:fp16:zero=uint4", 48), 48 + 16);
  EXPECT_EQ(columns("uint2:keys32:fp32:zero=uint2", 16), 16 + 4);
}

/// KIVI's K: two bits, each column has a scale and the least element of 32 keys, in fp16.
TEST(KvFormat, KeysShareTheScalesOfColumns) {
  const KvFormat format = parse_kv_format("uint2:keys32:fp16:min");
  EXPECT_EQ(to_string(format), "uint2:keys32:fp16:min");
  const KvRow row = format.row(32);
  EXPECT_EQ(row.bytes, 8);
  EXPECT_EQ(row.scale_columns, 64);
  EXPECT_EQ(row.scale_alignment, 16);
  Values keys(32 * 32);
  for (int n = 0; n < 32; ++n)
    for (int i = 0; i < 32; ++i) keys[n * 32 + i] = (n + i) % 4 * (i == 5 ? 16.0 : 0.5) - i;
  Bytes rows(32 * 8), scales(64 * 2);
  std::vector<std::uint8_t*> each;
  for (int n = 0; n < 32; ++n) each.push_back(&rows[n * 8]);
  encode_keys(format, 32, keys.data(), each, scales.data());
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(decode_number(format.scale_type, &scales[i * 2]), i == 5 ? 16 : 0.5) << i;
    EXPECT_EQ(decode_number(format.scale_type, &scales[(32 + i) * 2]), -i) << i;
  }
  for (int n = 0; n < 32; ++n) {
    EXPECT_EQ(rows[n * 8] & 3, n % 4) << "the first column is in the lowest bits";
    Values values(32);
    decode_row(format, 32, each[n], 1, values.data(), scales.data());
    for (int i = 0; i < 32; ++i) EXPECT_EQ(values[i], keys[n * 32 + i]) << n << " " << i;
  }
  keys[7] = std::numeric_limits<double>::quiet_NaN();
  encode_keys(format, 32, keys.data(), each, scales.data());
  Values values(32);
  decode_row(format, 32, each[3], 1, values.data(), scales.data());
  for (int i = 0; i < 32; ++i) EXPECT_EQ(std::isnan(values[i]), i == 7) << i;
}

TEST(KvFormat, EncodeThenDecodeIsIdempotentAndNear) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  for (const std::string& text : formats()) {
    const KvFormat format = parse_kv_format(text);
    const float argument = format.scales == KvFormat::Scales::argument ? 0.02f
                           : format.second_scale                       ? 0.01f
                                                                       : 1.0f;
    for (int trial = 0; trial < 20; ++trial) {
      Values values(static_cast<std::size_t>(dim_of(format)));
      for (double& value : values) value = static_cast<float>(normal(random));
      const Bytes row = encoded(format, values, argument);
      const Values once = decoded(format, dim_of(format), row, argument);
      if (format.zero == KvFormat::Zero::none) {  // in values: -0 may become 0
        EXPECT_EQ(decoded(format, dim_of(format), encoded(format, once, argument), argument), once) << text;
      }
      if (format.scales == KvFormat::Scales::argument) continue;  // which may be too small
      const bool coarse = format.scale_type == KvFormat::Number::e8m0 || format.code == Code::e5m2;
      const double step = format.bits() <= 3   ? 2.0
                          : format.bits() <= 5 ? (coarse ? 1.2 : 0.7)
                          : coarse             ? 0.6
                                               : 0.15;
      for (int i = 0; i < dim_of(format); ++i) EXPECT_NEAR(once[i], values[i], step) << text << " " << i;
    }
  }
}

TEST(KvFormat, ZerosStayAndNanIsSeen) {
  for (const std::string& text : formats()) {
    const KvFormat format = parse_kv_format(text);
    Values values(static_cast<std::size_t>(dim_of(format)));
    for (const double value : decoded(format, dim_of(format), encoded(format, values)))
      if (format.code != Code::book) {
        EXPECT_EQ(value, 0) << text;
      }
    if (format.scales == KvFormat::Scales::argument) continue;
    values[3] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(std::isnan(decoded(format, dim_of(format), encoded(format, values))[3])) << text;
    values[3] = std::numeric_limits<double>::infinity();
    EXPECT_TRUE(std::isnan(decoded(format, dim_of(format), encoded(format, values))[3])) << text;
  }
}

}  // namespace
}  // namespace flashjit

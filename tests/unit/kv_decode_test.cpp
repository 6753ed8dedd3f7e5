// Codes of KV formats by an expression of code, scale and zero: what it means, how rows are encoded, and what
// is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "expr/kv_codec.hpp"
#include "flashjit/flashjit.h"
#include "flashjit/kv_format.hpp"
#include "flashjit/spec.hpp"
#include "tests/support/kv_formats.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit {
namespace {

/// Sixteen powers of two with a sign, which do not grow with the code.
constexpr const char* kPowers =
    "decode4(select(code < 8, 1.0, -1.0) * exp2(to_float(code & 7) - 4.0) * scale):g32:fp16";

TEST(KvDecode, CodesThatAreKnownAreThese) {
  const auto same = [](const char* text, const char* known) {
    EXPECT_EQ(parse_kv_format(text), parse_kv_format(known)) << text;
  };
  same("decode4((code - 8) * scale):g32:fp16:before:halves", "q4_0");
  same("decode4(code * scale + zero):g32:fp16:before:min:halves", "q4_1");
  same("decode5(code * scale - 16 * scale):g32:fp16:before:halves", "q5_0");
  same("decode4((code - zero) * scale):g32:fp16:zero=uint4", "uint4:g32:fp16:zero=uint4");
  same("decode4(scale * (code - 8 - zero)):g32:fp16:zero", "int4_offset:g32:fp16:zero");
  same("decode8(select(code < 128, code, code - 256) * scale):g32:fp16:before", "q8_0");
  same("decode4(to_float(select(code < 8, code, code - 16))):row:fp16", "int4:row:fp16");
  same("decode2(scale * to_float(2 * code - 3)):g16:bf16", "book(-3,-1,1,3):g16:bf16");
}

TEST(KvDecode, OthersAreBooks) {
  const KvFormat format = parse_kv_format(kPowers);
  ASSERT_EQ(format.code, KvFormat::Code::book);
  for (unsigned code = 0; code < 16; ++code)
    EXPECT_EQ(code_value(format, code),
              (code < 8 ? 1 : -1) * std::ldexp(1.0, static_cast<int>(code % 8) - 4));
  EXPECT_EQ(parse_kv_format(to_string(format)), format);
  const KvFormat cubes = parse_kv_format("decode3(pow(code / 4.0 - 0.875, 3.0) * scale):g32:fp16");
  for (unsigned code = 0; code < 8; ++code) {
    EXPECT_EQ(code_value(cubes, code), static_cast<float>(std::pow(code / 4.0 - 0.875, 3)));
  }
  EXPECT_EQ(parse_kv_format("decode8(exp(to_float(code - 128) / 64.0) * scale):row:fp32").book.size(), 256u);
}

/// A sign and a logarithm; values that grow slower than the scale, with a zero point; a table beside a zero
/// point.
using test::kLogarithms;
const std::string kSquares = "decode4((code - zero) * abs(code - zero) * scale * scale):g32:bf16:zero=uint4";
const std::string kCubesWithZero = "decode8(pow(code / 128.0 - 1.0, 3.0) * scale + zero):g64:fp32:zero";

/// Any other expression is the element itself.
TEST(KvDecode, WhatIsNoTableIsAnExpression) {
  const KvFormat logarithms = parse_kv_format(kLogarithms);
  EXPECT_EQ(logarithms.code, KvFormat::Code::uint4);
  EXPECT_EQ(logarithms.decode, "select(code < 8, 1.0, -1.0) * (exp2((code & 7) * scale) - 1.0)");
  EXPECT_EQ(parse_kv_format("decode3(code - tanh(zero)):row:fp32:zero").decode,
            "(code - tanh(zero)) * scale");
  const KvFormat cubes = parse_kv_format("decode4(pow(to_float(code), 3.0) * scale + zero):g32:fp16:min");
  EXPECT_EQ(cubes.zero, KvFormat::Zero::subtracted);  // as it is stored
  for (const KvFormat& format : {logarithms, cubes, parse_kv_format(kSquares)})
    EXPECT_EQ(parse_kv_format(to_string(format)), format);
}

/// Bytes of a row mean what the formula says.
TEST(KvDecode, ElementsAreTheExpressions) {
  const KvFormat format = parse_kv_format(kLogarithms);
  std::vector<std::uint8_t> row(static_cast<std::size_t>(format.row_bytes(32)));
  for (std::size_t i = 0; i < 16; ++i) row[i] = static_cast<std::uint8_t>(i | i << 4);
  encode_number(format.scale_type, 0.75f, &row[16]);
  std::vector<double> values(32);
  decode_row(format, 32, row.data(), 1, values.data());
  for (int i = 0; i < 32; ++i) {
    const int code = i / 2;
    const double wanted = (code < 8 ? 1 : -1) * (std::exp2(code % 8 * 0.75) - 1);
    EXPECT_NEAR(values[static_cast<std::size_t>(i)], wanted, 1e-5 * std::fabs(wanted)) << i;
  }
}

/// The scale is the stored number with which values reach the block's largest, and codes are the nearest.
TEST(KvDecode, ExpressionsAreEncodedBySearch) {
  for (const std::string& text : {kLogarithms, kSquares, kCubesWithZero}) {
    const KvFormat format = parse_kv_format(text);
    std::vector<double> values(64), once(64), again(64);
    std::vector<std::uint8_t> row(static_cast<std::size_t>(format.row_bytes(64))), other(row);
    for (const double size : {0.25, 8.0, 300.0}) {
      for (int i = 0; i < 64; ++i) values[static_cast<std::size_t>(i)] = size * std::sin(i * 0.7);
      encode_row(format, 64, values.data(), 1, row.data());
      decode_row(format, 64, row.data(), 1, once.data());
      for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(once[i], values[i], 0.4 * size) << text << i;
      if (format.zero != KvFormat::Zero::none) continue;
      encode_row(format, 64, once.data(), 1, other.data());
      decode_row(format, 64, other.data(), 1, again.data());
      EXPECT_EQ(again, once) << text;
    }
    values[40] = std::nan("");
    encode_row(format, 64, values.data(), 1, row.data());
    decode_row(format, 64, row.data(), 1, once.data());
    EXPECT_TRUE(std::isnan(once[63])) << text;
  }
}

/// The nearest value is searched, whether values grow with the code or not.
TEST(KvDecode, RowsAreEncodedByTheNearestValue) {
  const KvFormat format = parse_kv_format(kPowers);
  std::vector<double> values(64), once(64), again(64);
  for (int i = 0; i < 64; ++i) values[static_cast<std::size_t>(i)] = 8 * std::sin(i * 0.7);
  std::vector<std::uint8_t> row(static_cast<std::size_t>(format.row_bytes(64))), other(row);
  encode_row(format, 64, values.data(), 1, row.data());
  decode_row(format, 64, row.data(), 1, once.data());
  for (std::size_t i = 0; i < 64; ++i) {
    const double scale = decode_number(format.scale_type, &row[32 + i / 32 * 2]);
    for (unsigned code = 0; code < 16; ++code)
      EXPECT_LE(std::fabs(once[i] - values[i]),
                std::fabs(code_value(format, code) * scale - values[i]) + 1e-5)
          << i;
  }
  encode_row(format, 64, once.data(), 1, other.data());
  decode_row(format, 64, other.data(), 1, again.data());
  EXPECT_EQ(again, once);
}

TEST(KvDecode, SpecsAndCTakeThem) {
  const AttentionSpec spec = parse_spec(std::string("fwd:bf16:d128:k{") + kPowers +
                                        "}:v{decode4((code - zero) * scale):g64:fp16:zero=uint4}:pages16");
  EXPECT_EQ(spec.kv.k_format, parse_kv_format(kPowers));
  EXPECT_EQ(spec.kv.v_format, parse_kv_format("uint4:g64:fp16:zero=uint4"));
  std::int64_t bytes = 0;
  ASSERT_EQ(flashjit_kv_row(kPowers, 128, &bytes, nullptr, nullptr), 0);
  EXPECT_EQ(bytes, 64 + 8);
}

/// Attention reads rows that nothing here can write.
TEST(KvDecode, FormatsThatSearchFindsNoScaleForAreNotEncoded) {
  const auto refused = [](const char* pass, const std::string& format) {
    return test::refused_spec(std::string(pass) + ":bf16:d128:kv{" + format + "}:cache");
  };
  const std::string tanh = "decode4(tanh((code - 8) * scale)):g32:fp16";
  const std::string falls = "decode4((code - 8) / scale):g32:fp16";
  const std::string other = "decode4(select(scale > 1.0, code - 8.0, 7.0 - code) * scale):g32:fp16";
  const std::string positive = "decode4(exp2(code * scale + zero)):g32:fp16:zero";
  const std::string signs =
      "decode4(select(code < 8, 1.0, -1.0) * exp2((code & 7) * scale + zero)):g32:fp16:zero";
  for (const std::string& format : {tanh, falls, other, positive, signs}) {
    EXPECT_EQ(refused("fwd", format), "accepted") << format;
    for (const char* pass : {"append", "quantize"})
      EXPECT_NE(refused(pass, format).find("cannot be encoded"), std::string::npos) << format;
  }
  EXPECT_EQ(refused("append", kLogarithms), "accepted");
}

TEST(KvDecode, ErrorsSayWhatIsWrong) {
  const auto says = [](const std::string& text, std::initializer_list<const char*> parts) {
    test::expect_says(test::refused_kv_format(text), parts);
  };
  says("decode4(tanh(code * scale))", {"not that of the code times the scale", "scales of blocks"});
  says("decode4(code * scale * scale):g32:fp16:scaled", {"scales of blocks alone", "without scaled"});
  says("decode4((code + zero) * scale):g32:fp16", {"reads zero", "add zero or zero=uint4"});
  says("decode4(exp2(code * scale)):g32:fp16:zero", {"does not read", "leave these out"});
  says("decode4((code - zero) * scale):g32:fp16", {"a subtracted zero point", "no zero point"});
  says("decode4((code - zero) * scale):g32:fp16:min", {"a subtracted zero point", "an added zero point"});
  says("decode4((code - 8) * scale):g32:fp16:zero", {"no zero point", "a subtracted zero point"});
  says("decode6(code * scale):g32:fp16", {"'6'", "2, 3, 4, 5 or 8"});
  says("decode(code * scale):g32:fp16", {"''", "2, 3, 4, 5 or 8"});
  says("decode4():g32:fp16", {"expression that cannot be its codes"});
  says("decode4(code * scales):g32:fp16", {"expression that cannot be its codes", "scales"});
  says("decode4(code * scale * kv):g32:fp16", {"code, scale and zero"});
  says("decode4(code > 3):g32:fp16", {"a condition"});
  says("decode4(log(to_float(code)) * scale):g32:fp16", {"not finite"});
  says("decode4(0 * code):g32:fp16", {"zeros"});
  says("decode4", {"'decode4'", "neither a name nor codes"});
}

}  // namespace
}  // namespace flashjit

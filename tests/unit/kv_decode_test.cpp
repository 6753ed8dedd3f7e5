// Codes of KV formats by an expression of code, scale and zero: what it means, how rows are encoded, and what
// is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "expr/kv_codec.hpp"
#include "flashjit/error.hpp"
#include "flashjit/flashjit.h"
#include "flashjit/kv_format.hpp"
#include "flashjit/spec.hpp"

namespace flashjit {
namespace {

std::string message_of(const std::string& text) {
  try {
    parse_kv_format(text);
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

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

TEST(KvDecode, ErrorsSayWhatIsWrong) {
  const auto says = [](const std::string& text, std::initializer_list<const char*> parts) {
    const std::string message = message_of(text);
    for (const char* part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << text << ": " << message << " lacks " << part;
  };
  says("decode4(tanh(code * scale)):g32:fp16", {"not that of the code times the scale", "f(code) * scale"});
  says("decode4(code * scale * scale):g32:fp16", {"not that of the code times the scale"});
  says("decode4(code * scale * scale * 1e-9):g32:fp16", {"not that of the code times the scale"});
  says("decode4((code + zero) * scale):g32:fp16:zero", {"(code - zero) * scale or code * scale + zero"});
  says("decode4((code - zero) * scale):g32:fp16", {"a subtracted zero point", "no zero point"});
  says("decode4((code - zero) * scale):g32:fp16:min", {"a subtracted zero point", "an added zero point"});
  says("decode4((code - 8) * scale):g32:fp16:zero", {"no zero point", "a subtracted zero point"});
  says("decode4((code * code - zero) * scale):g32:fp16:zero", {"no integers in a row", "code - 8"});
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

// KV formats for tests: by lists, and drawn from the grammar.
#pragma once

#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/kv_format.hpp"

namespace flashjit::test {

inline const std::string kBookOf32 =
    "book(-40,-36,-32,-28,-25,-22,-19,-16,-14,-12,-10,-8,-6,-4,-2.5,-1,1,2.5,4,6,8,10,12,14,16,19,22,25,28,"
    "32,36,40):g64:fp16";

/// Values that do not grow with the code.
inline const std::string kSignedPowers =
    "decode4(select(code < 8, 1.0, -1.0) * exp2(code % 8 / 2.0) * scale):g64:bf16";

/// A table of 256 values.
inline const std::string kBookOf256 = "decode8((code - 128) * abs(code - 128) * scale):g64:fp32";

/// Elements that are no code times a scale.
inline const std::string kLogarithms =
    "decode4(select(code < 8, 1.0, -1.0) * (exp2((code & 7) * scale) - 1.0)):g32:fp16";
inline const std::string kSquaresWithZero =
    "decode8((code - 128) * abs(code - 128) * scale + zero):g64:fp32:zero";

/// Formats with and without names, of which heads of 128 columns have rows.
inline const std::vector<std::string>& kv_formats_of_128() {
  static const std::vector<std::string> kFormats{"nvfp4",
                                                 "mxfp4",
                                                 "mxfp8",
                                                 "q8_0",
                                                 "q4_0",
                                                 "q4_1",
                                                 "iq4_nl",
                                                 "q5_0",
                                                 "q5_1",
                                                 "int4",
                                                 "e2m1",
                                                 "int4:row:fp16",
                                                 "int4:g32:fp16:zero",
                                                 "uint4:g32:fp16:zero=uint4",
                                                 "int4:g64:bf16:before:zero=uint8",
                                                 "uint2:g16:e4m3:zero=uint2:scaled",
                                                 "uint4:g64:bf16:min",
                                                 "uint2:g32:fp16:min",
                                                 "uint2:g16:fp32:zero",
                                                 "uint8:g128:fp32:zero",
                                                 "int8:row:fp32:before",
                                                 "e4m3:g128:fp32",
                                                 "e5m2:g64:e8m0",
                                                 "e4m3:g64:fp32:tail64",
                                                 "book(-3,-1,1,3):g32:bf16",
                                                 "e2m1:g16:e4m3:tail32xfp16:scaled",
                                                 "int4_offset:row:fp32:halves",
                                                 "int4:g64:e8m0:before",
                                                 "uint3:g32:fp16:min",
                                                 "int5_offset:g16:fp32:before",
                                                 "int5_offset:row:bf16:halves",
                                                 "book(-7,-4.1,-2,-0.3,0.3,2,4.1,7):g128:fp16",
                                                 "book(-9,-5,-2,-1,1,2,5,9):row:bf16:scaled",
                                                 kSignedPowers,
                                                 kLogarithms,
                                                 kSquaresWithZero,
                                                 kBookOf32,
                                                 kBookOf256};
  return kFormats;
}

/// Formats of 128 columns whose scales are in a tensor of their own.
inline const std::vector<std::string>& kv_formats_apart() {
  static const std::vector<std::string> kFormats{
      "int4:g32:fp16:apart:zero",
      "e2m1:g16:e4m3:apart:scaled",
      "e4m3:g64:fp32:apart:tail64",
      "uint2:g32:bf16:apart:min",
      "int4_offset:row:e8m0:apart:halves",
      "uint4:row:bf16:apart:zero",
      "uint4:g32:fp16:apart:zero=uint4",
      "uint5:g64:e8m0:apart:zero=uint8",
      "decode5(abs(code - zero) * (code - zero) * scale):g64:bf16:apart:zero=uint8"};
  return kFormats;
}
/// Formats whose keys share scales.
inline const std::vector<std::string>& kv_formats_of_keys() {
  static const std::vector<std::string> kFormats{
      "uint2:keys32:fp16:min",
      "int4:keys16:bf16:zero",
      "e4m3:keys64:fp32",
      "uint2:keys16:fp16:zero:tail64",
      "int4:keys32:fp16:zero=uint4",
      "uint2:keys16:fp32:zero=uint2:tail16",
      "decode3((code - zero) * abs(code - zero) * scale):keys16:fp32:zero"};
  return kFormats;
}

/// A format of which heads of 128 columns have rows, drawn from the grammar.
inline std::string drawn_kv_format(std::mt19937& random) {
  const auto one_of = [&](std::initializer_list<const char*> words) {
    return std::string(words.begin()[random() % words.size()]);
  };
  for (;;) {
    std::string text =
        one_of({"e4m3", "e5m2", "e2m1", "int8", "int4", "int4_offset", "uint8", "uint4", "uint2",
                "int5_offset", "uint5", "uint3", "book(-3,-1,0.5,3)", "book(-7,-4.1,-2,-0.3,0,2,4.1,7)",
                "book(-8,-6,-4,-3,-2,-1,-0.5,0,0.25,0.75,1.5,2.5,3.5,5,7,9)"});
    if (random() % 6 != 0)  // else the scales are the call's
      text += one_of({":g16", ":g32", ":g64", ":g128", ":row", ":keys16", ":keys32"}) +
              one_of({":fp32", ":fp16", ":bf16", ":e4m3", ":e8m0"}) + one_of({"", "", ":before", ":apart"}) +
              one_of({"", ":zero", ":min", ":zero=uint2", ":zero=uint4", ":zero=uint8"}) +
              one_of({"", "", ":halves"}) + one_of({"", "", ":tail64", ":tail16xfp16"}) +
              one_of({"", "", ":scaled"});
    try {
      parse_kv_format(text).validate_row(128);
      return text;
    } catch (const Error&) {  // parts that do not go together
    }
  }
}

}  // namespace flashjit::test

// The element types' numbers: every code of the small ones, and how values become codes.
#include "support/dtypes.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>

namespace flashjit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double value_of(DType type, int code) {
  const auto bits = static_cast<std::uint8_t>(code);
  return dtype_info(type).decode(&bits);
}
int code_of(DType type, double value) {
  std::uint8_t bits = 0;
  dtype_info(type).encode(value, &bits);
  return bits;
}

TEST(DTypes, SizesAreThoseOfTheNames) {
  for (const DTypeInfo& info : dtypes()) {
    const int bits = info.name == "e4m3" || info.name == "e5m2"
                         ? 8
                         : std::stoi(std::string(info.name.substr(info.name.find_first_of("0123456789"))));
    EXPECT_EQ(size_of(info.dtype) * 8, bits) << info.name;
    EXPECT_EQ(dtype_info(info.dtype).name, info.name);
  }
}

TEST(DTypes, EveryCodeComesBack) {
  for (const DType type : {DType::e4m3, DType::e5m2, DType::int8})
    for (int code = 0; code < 256; ++code) {
      const double value = value_of(type, code);
      if (std::isnan(value) || std::isinf(value)) continue;
      EXPECT_EQ(code_of(type, value), code) << to_string(type) << " " << value;
      EXPECT_EQ(dtype_info(type).round(value), value);
    }
}

TEST(DTypes, CodesMeanWhatTheStandardSays) {
  const std::map<int, double> e4m3 = {{0x00, 0},  {0x01, 0x1p-9}, {0x07, 7 * 0x1p-9}, {0x08, 0x1p-6},
                                      {0x38, 1},  {0x3f, 1.875},  {0x78, 256},        {0x7e, 448},
                                      {0xb8, -1}, {0xfe, -448}};
  for (const auto& [code, value] : e4m3) EXPECT_EQ(value_of(DType::e4m3, code), value) << code;
  const std::map<int, double> e5m2 = {{0x01, 0x1p-16},   {0x04, 0x1p-14},    {0x3c, 1},   {0x7b, 57344},
                                      {0x7c, kInfinity}, {0xfc, -kInfinity}, {0xbe, -1.5}};
  for (const auto& [code, value] : e5m2) EXPECT_EQ(value_of(DType::e5m2, code), value) << code;
  EXPECT_EQ(value_of(DType::int8, 0xff), -1);
  EXPECT_EQ(value_of(DType::int8, 0x80), -128);
  EXPECT_TRUE(std::isnan(value_of(DType::e4m3, 0x7f)) && std::isnan(value_of(DType::e4m3, 0xff)));
  for (const int code : {0x7d, 0x7e, 0x7f, 0xff})
    EXPECT_TRUE(std::isnan(value_of(DType::e5m2, code))) << code;
}

TEST(DTypes, BetweenTwoCodesTheNearestIsTakenAndTiesGoToTheEvenOne) {
  for (const DType type : {DType::e4m3, DType::e5m2, DType::int8})
    for (int code = 0; code < 0x7e; ++code) {
      const double low = value_of(type, code), high = value_of(type, code + 1);
      if (!std::isfinite(low) || !std::isfinite(high)) continue;
      const double middle = (low + high) / 2, little = (high - low) / 64;
      EXPECT_EQ(code_of(type, middle), code % 2 == 0 ? code : code + 1) << to_string(type) << " " << middle;
      EXPECT_EQ(code_of(type, middle - little), code);
      EXPECT_EQ(code_of(type, middle + little), code + 1);
    }
}

TEST(DTypes, WhatIsTooLargeBecomesTheLargest) {
  for (const DType type : {DType::e4m3, DType::e5m2, DType::int8})
    for (const double value : {1e6, kInfinity}) {
      EXPECT_EQ(dtype_info(type).round(value), dtype_info(type).largest) << to_string(type);
      EXPECT_EQ(value_of(type, code_of(type, value)), dtype_info(type).largest);
      EXPECT_LE(value_of(type, code_of(type, -value)), -dtype_info(type).largest);
    }
  EXPECT_EQ(dtype_info(DType::e4m3).largest, 448);
  EXPECT_EQ(dtype_info(DType::e5m2).largest, 57344);
  EXPECT_EQ(code_of(DType::e4m3, kNaN), 0x7f);
  EXPECT_EQ(code_of(DType::e5m2, kNaN), 0x7f);
  EXPECT_EQ(dtype_info(DType::fp16).round(1e6), kInfinity);  // as ever
}

}  // namespace
}  // namespace flashjit

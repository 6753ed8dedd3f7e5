#include "support/dtypes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "flashjit/error.hpp"
#include "support/small_float.hpp"

namespace flashjit {
namespace {

template <class Format>
void encode_small(double value, void* to) {
  const typename Format::Bits bits = Format::encode(value);
  std::memcpy(to, &bits, sizeof bits);
}
template <class Format>
double decode_small(const void* from) {
  typename Format::Bits bits;
  std::memcpy(&bits, from, sizeof bits);
  return Format::decode(bits);
}

double round_to_float(double value) { return static_cast<float>(value); }
void encode_float(double value, void* to) {
  const auto rounded = static_cast<float>(value);
  std::memcpy(to, &rounded, sizeof rounded);
}
double decode_float(const void* from) {
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

double round_to_int8(double value) {
  return std::isnan(value) ? 0 : std::clamp(std::nearbyint(value), -128.0, 127.0);
}
void encode_int8(double value, void* to) {
  const auto rounded = static_cast<std::int8_t>(round_to_int8(value));
  std::memcpy(to, &rounded, sizeof rounded);
}
double decode_int8(const void* from) {
  std::int8_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

constexpr std::array<DTypeInfo, 6> kDTypes{{
    {DType::fp16, "fp16", "fp16", "f16", ElementType::fp16, 0x1p-11, Fp16::kMax, Fp16::round,
     encode_small<Fp16>, decode_small<Fp16>},
    {DType::bf16, "bf16", "bf16", "bf16", ElementType::bf16, 0x1p-8, Bf16::kMax, Bf16::round,
     encode_small<Bf16>, decode_small<Bf16>},
    {DType::fp32, "fp32", "float", "", ElementType::fp32, 0x1p-24, std::numeric_limits<float>::max(),
     round_to_float, encode_float, decode_float},
    {DType::e4m3,
     "e4m3",
     "e4m3",
     "e4m3",
     {},
     0x1p-4,
     E4m3::kMax,
     E4m3::round,
     encode_small<E4m3>,
     decode_small<E4m3>},
    {DType::e5m2,
     "e5m2",
     "e5m2",
     "e5m2",
     {},
     0x1p-3,
     E5m2::kMax,
     E5m2::round,
     encode_small<E5m2>,
     decode_small<E5m2>},
    {DType::int8, "int8", "int8", "", {}, 0.5, 127, round_to_int8, encode_int8, decode_int8},
}};

}  // namespace

std::span<const DTypeInfo> dtypes() { return kDTypes; }

const DTypeInfo& dtype_info(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return info;
  }
  throw Error(ErrorCode::internal, fmt::format("there is no element type {}", static_cast<int>(dtype)));
}

}  // namespace flashjit

#include "support/dtypes.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "flashjit/error.hpp"
#include "support/small_float.hpp"

namespace flashjit {
namespace {

template <class Format>
void encode_small(double value, void* to) {
  const std::uint16_t bits = Format::encode(value);
  std::memcpy(to, &bits, sizeof bits);
}
template <class Format>
double decode_small(const void* from) {
  std::uint16_t bits;
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

constexpr std::array<DTypeInfo, 3> kDTypes{{
    {DType::fp16, "fp16", "fp16", "f16", ElementType::fp16, 0x1p-11, Fp16::round, encode_small<Fp16>,
     decode_small<Fp16>},
    {DType::bf16, "bf16", "bf16", "bf16", ElementType::bf16, 0x1p-8, Bf16::round, encode_small<Bf16>,
     decode_small<Bf16>},
    {DType::fp32, "fp32", "float", "", ElementType::fp32, 0x1p-24, round_to_float, encode_float,
     decode_float},
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

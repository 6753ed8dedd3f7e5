#include "expr/kv_codec.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "expr/kv_decode.hpp"
#include "support/small_float.hpp"

namespace flashjit {
namespace {

using Code = KvFormat::Code;
using Number = KvFormat::Number;
using Zero = KvFormat::Zero;

constexpr std::array<float, 8> kE2m1{0, 0.5, 1, 1.5, 2, 3, 4, 6};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// The nearest of values that grow, ties to even places.
unsigned nearest_magnitude(std::span<const float> values, float magnitude) {
  unsigned found = 0;
  for (unsigned i = 1; i < values.size(); ++i) {
    const float middle = (values[i - 1] + values[i]) / 2;
    if (magnitude > middle || (magnitude == middle && i % 2 == 0)) found = i;
  }
  return found;
}

/// The nearest of values in any order; the first of those that are as near.
unsigned nearest(std::span<const float> values, float value) {
  unsigned found = 0;
  for (unsigned i = 1; i < values.size(); ++i)
    if (std::fabs(values[i] - value) < std::fabs(values[found] - value)) found = i;
  return found;
}

/// The values of codes that are integers.
struct Integers {
  int low, high;
};
Integers integers_of(Code code) {
  switch (code) {
    case Code::int8:
      return {-128, 127};
    case Code::uint8:
      return {0, 255};
    case Code::int4:
    case Code::int4_offset:
      return {-8, 7};
    case Code::int5_offset:
      return {-16, 15};
    case Code::uint5:
      return {0, 31};
    case Code::uint4:
      return {0, 15};
    case Code::uint3:
      return {0, 7};
    default:
      return {0, 3};
  }
}

unsigned integer_code(const KvFormat& format, float value) {
  const auto [low, high] = integers_of(format.code);
  const int rounded = std::isnan(value)
                          ? 0
                          : static_cast<int>(std::clamp(std::nearbyint(value), static_cast<float>(low),
                                                        static_cast<float>(high)));
  const bool is_offset = format.code == Code::int4_offset || format.code == Code::int5_offset;
  return static_cast<unsigned>(is_offset ? rounded - low : rounded) & ((1u << format.bits()) - 1);
}

bool is_float(Code code) { return code == Code::e4m3 || code == Code::e5m2 || code == Code::e2m1; }

/// Where a column's code is in its block: its bits, some of which may be in the next byte, or in halves the
/// lowest four.
struct CodePlace {
  int byte, shift;
  bool crosses;
};
CodePlace place_of(const KvFormat& format, int block, int column) {
  const int bits = format.bits();
  if (format.packing == KvFormat::Packing::halves)
    return {block / 8 * (bits - 4) + column % (block / 2), column < block / 2 ? 0 : 4, false};
  return {column * bits / 8, column * bits % 8, column * bits % 8 + bits > 8};
}
bool has_fifth_bits(const KvFormat& format) {
  return format.packing == KvFormat::Packing::halves && format.bits() == 5;
}

/// How the elements of a block become codes: a factor and a summand, or the code with the nearest of
/// `values`.
struct Quantizer {
  double scale = 1, zero = 0;
  std::vector<float> values = {};
};

/// The smallest power of two with which no code is too large, or the one of OCP's MX formats.
float power_of_two_scale(const KvFormat& format, float largest) {
  if (!is_float(format.code)) return largest / largest_value(format);
  const int exponent = std::max(std::ilogb(largest), -127) - std::ilogb(largest_value(format));
  return std::ldexp(1.0f, exponent);
}

/// The scale of a block of zeros: 1 where a code means 0, else 0, with which all codes do.
float scale_of_zeros(const KvFormat& format) {
  return format.code != Code::book || std::ranges::find(format.book, 0.0f) != format.book.end() ? 1 : 0;
}

Quantizer symmetric(const KvFormat& format, std::span<const float> values, float argument,
                    std::uint8_t* scale) {
  float extreme = 0;  // the element of the largest magnitude
  for (const float value : values)
    if (std::isnan(value) || std::fabs(value) > std::fabs(extreme))
      extreme = std::isnan(extreme) ? extreme : value;
  if (!std::isfinite(extreme)) return {encode_scale(format.scale_type, kNaN, scale) * argument};
  const float largest = largest_value(format), magnitude = std::fabs(extreme) / argument;
  if (magnitude == 0) return {encode_scale(format.scale_type, scale_of_zeros(format), scale) * argument};
  if (format.scale_type == Number::e8m0)
    return {encode_scale(format.scale_type, power_of_two_scale(format, magnitude), scale) * argument};
  const float wanted = largest < 0 ? extreme / argument / largest : magnitude / largest;
  return {encode_scale(format.scale_type, wanted, scale) * argument};
}

/// A zero point among others of fewer bits than a byte, which are written in their order.
void put_zero_bits(unsigned bits, int shift, std::uint8_t* to) {
  *to = static_cast<std::uint8_t>(shift == 0 ? bits : *to | bits << shift);
}

/// `zero_shift`: where in its byte a zero point of few bits is.
Quantizer with_zero(const KvFormat& format, std::span<const float> values, float argument,
                    std::uint8_t* scale, std::uint8_t* zero, int zero_shift) {
  float low = values[0], high = values[0];
  bool finite = true;
  for (const float value : values) {
    finite = finite && std::isfinite(value);
    low = std::min(low, value), high = std::max(high, value);
  }
  if (!finite) low = high = kNaN;
  const auto [lowest, highest] = integers_of(format.code);
  const auto levels = static_cast<float>(highest - lowest);
  if (format.zero == Zero::added) {
    const float least = encode_number(format.scale_type, low / argument, zero);
    const float range = high / argument - least;
    const float step = encode_scale(format.scale_type, range == 0 ? 1 : range / levels, scale);
    return {step * argument, least * argument};
  }
  low = std::min(low, 0.0f), high = std::max(high, 0.0f);
  if (!finite) low = high = kNaN;
  const float range = (high - low) / argument;
  const float step = encode_scale(format.scale_type, range == 0 ? 1 : range / levels, scale) * argument;
  const float from_lowest = -std::nearbyint(low / step);
  if (format.zero_bits == 0)
    return {step, encode_number(format.scale_type, static_cast<float>(lowest) + from_lowest, zero)};
  const auto most = static_cast<float>((1 << format.zero_bits) - 1);
  const auto bits = static_cast<unsigned>(std::isnan(from_lowest) ? 0 : std::clamp(from_lowest, 0.0f, most));
  put_zero_bits(bits, zero_shift, zero);
  return {step, static_cast<double>(lowest) + bits};
}

std::uint64_t small_bits(Number type, float value) {
  if (type == Number::fp16) return Fp16::encode(value);
  if (type == Number::bf16) return Bf16::encode(value);
  return E4m3::encode(value);
}

/// The largest finite scale, and the least positive one.
struct ScaleRange {
  float least, largest;
};
ScaleRange range_of(Number type) {
  switch (type) {
    case Number::fp32:
      return {0x1p-149f, std::numeric_limits<float>::max()};
    case Number::fp16:
      return {0x1p-24f, 65504};
    case Number::bf16:
      return {0x1p-133f, static_cast<float>(Bf16::kMax)};
    case Number::e4m3:
      return {0x1p-9f, 448};
    default:
      return {0x1p-127f, 0x1p127f};
  }
}

}  // namespace

double code_value(const KvFormat& format, unsigned code) {
  switch (format.code) {
    case Code::e4m3:
      return E4m3::decode(static_cast<std::uint8_t>(code));
    case Code::e5m2:
      return E5m2::decode(static_cast<std::uint8_t>(code));
    case Code::e2m1:
      return code & 8 ? -kE2m1[code & 7] : kE2m1[code & 7];
    case Code::int8:
      return static_cast<std::int8_t>(code);
    case Code::int4:
      return static_cast<int>(code ^ 8) - 8;
    case Code::int4_offset:
      return static_cast<int>(code) - 8;
    case Code::int5_offset:
      return static_cast<int>(code) - 16;
    case Code::book:
      return format.book[code];
    default:
      return code;
  }
}

unsigned code_of(const KvFormat& format, float value) {
  switch (format.code) {
    case Code::e4m3:
      return E4m3::encode(value);
    case Code::e5m2:
      return E5m2::encode(value);
    case Code::e2m1:
      return (std::signbit(value) ? 8u : 0u) | nearest_magnitude(kE2m1, std::fabs(value));
    case Code::book:
      return nearest(format.book, value);
    default:
      return integer_code(format, value);
  }
}

float largest_value(const KvFormat& format) {
  const bool is_signed = format.scales != KvFormat::Scales::argument && format.scale_type != Number::e8m0;
  switch (format.code) {
    case Code::e4m3:
      return 448;
    case Code::e5m2:
      return 57344;
    case Code::e2m1:
      return 6;
    case Code::int8:
      return 127;
    case Code::int4:
    case Code::int4_offset:
      return is_signed ? -8 : 7;
    case Code::int5_offset:
      return is_signed ? -16 : 15;
    case Code::book: {
      const float extreme = *std::ranges::max_element(
          format.book, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
      return is_signed ? extreme : std::fabs(extreme);
    }
    default:
      return static_cast<float>(integers_of(format.code).high);
  }
}

float largest_with_argument(const KvFormat& format) {
  const float largest = std::fabs(largest_value(format));
  return format.second_scale && format.scale_type == Number::e4m3 ? largest * 448 : largest;
}

double decode_number(Number type, const std::uint8_t* from) {
  switch (type) {
    case Number::fp32: {
      float value;
      std::memcpy(&value, from, sizeof value);
      return value;
    }
    case Number::fp16:
    case Number::bf16: {
      std::uint16_t bits;
      std::memcpy(&bits, from, sizeof bits);
      return type == Number::fp16 ? Fp16::decode(bits) : Bf16::decode(bits);
    }
    case Number::e4m3:
      return E4m3::decode(*from);
    default:
      return *from == 0xff ? kNaN : std::ldexp(1.0, *from - 127);
  }
}

float encode_number(Number type, float value, std::uint8_t* to) {
  if (type == Number::fp32) {
    std::memcpy(to, &value, sizeof value);
  } else if (type == Number::e8m0) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t up = (bits >> 23 & 0xff) + ((bits & 0x7fffff) != 0 && bits != 0x400000);
    *to = static_cast<std::uint8_t>(std::isnan(value) ? 0xff : std::min(up, 254u));
  } else {
    const std::uint64_t bits = small_bits(type, value);
    std::memcpy(to, &bits, static_cast<std::size_t>(size_of(type)));
  }
  return static_cast<float>(decode_number(type, to));
}

float encode_scale(Number type, float value, std::uint8_t* to) {
  const auto [least, largest] = range_of(type);
  if (value > 0) value = std::clamp(value, least, largest);
  if (value < 0) value = std::max(value, -largest);
  return encode_number(type, value, to);
}

namespace {

float number_of_bits(Number type, std::uint32_t bits) {
  std::uint8_t bytes[4];
  std::memcpy(bytes, &bits, sizeof bytes);
  return static_cast<float>(decode_number(type, bytes));
}

/// The bits of the largest finite number.
int most_bits(Number type) {
  constexpr std::array kMost{0x7f7fffff, 0x7bff, 0x7f7f, 0x7e, 254};
  return kMost.at(static_cast<std::size_t>(type));
}

/// The first of [first, last] that `is`, which all behind it are; else the last.
template <class Is>
int first_that(int first, int last, const Is& is) {
  while (first < last) {
    const int middle = (first & last) + ((first ^ last) >> 1);  // no sum that overflows
    if (is(middle))
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

/// Scales and zero points of formats whose elements are an expression, as they are stored: searched, since
/// the expression has no inverse.
class QuantizerSearch {
 public:
  QuantizerSearch(const KvFormat& format, std::span<const float> values)
      : format_(format), decode_(decode_expression(format)), extremes_(decode_extremes(format)) {
    for (const float value : values) {
      is_finite_ = is_finite_ && std::isfinite(value);
      low_ = std::min(low_, value), high_ = std::max(high_, value);
    }
  }

  Quantizer store(std::uint8_t* scale, std::uint8_t* zero, int zero_shift) const {
    const int least = format_.scale_type == Number::e8m0 ? 0 : 1, most = most_bits(format_.scale_type);
    std::uint32_t bits = 0, zero_bits = 0;
    if (format_.zero == Zero::none) {
      bits = nearest_scale(least, most);
    } else {
      bits = static_cast<std::uint32_t>(first_that(least, most, [&](int of) { return covers(of); }));
      zero_bits = zero_for(scale_of(bits));
    }
    Quantizer by{is_finite_ ? scale_of(bits) : kNaN, zero_of(zero_bits)};
    encode_number(format_.scale_type, static_cast<float>(by.scale), scale);
    if (format_.zero_bits > 0)
      put_zero_bits(zero_bits, zero_shift, zero);
    else if (format_.zero != Zero::none)
      encode_number(format_.scale_type, static_cast<float>(by.zero), zero);
    for (int code = 0; code < 1 << format_.bits(); ++code)
      by.values.push_back(static_cast<float>(decode_.value(code, by.scale, by.zero)));
    return by;
  }

 private:
  float scale_of(std::uint32_t bits) const { return number_of_bits(format_.scale_type, bits); }
  double zero_of(std::uint32_t bits) const {
    return format_.zero == Zero::none ? 0
           : format_.zero_bits > 0    ? static_cast<double>(bits)
                                      : number_of_bits(format_.scale_type, bits);
  }
  /// The scale whose largest magnitude is the nearest to the block's.
  std::uint32_t nearest_scale(int least, int most) const {
    const float wanted = std::max(std::fabs(low_), std::fabs(high_));
    const auto reached = [&](int bits) {
      return std::fabs(static_cast<float>(
          decode_.value(extremes_.largest, scale_of(static_cast<std::uint32_t>(bits)), 0)));
    };
    const int found = first_that(least, most, [&](int bits) { return !(reached(bits) < wanted); });
    const bool below = found > least && wanted - reached(found - 1) < reached(found) - wanted;
    return static_cast<std::uint32_t>(below ? found - 1 : found);
  }
  /// The bits of the zero point of the least highest value that is no less than the block's.
  std::uint32_t zero_for(float scale) const {
    const int most = format_.zero_bits > 0 ? (1 << format_.zero_bits) - 1 : most_bits(format_.scale_type);
    const auto bits_of = [&](int of) {
      const int place = extremes_.zero_raises ? of : -of;
      const int sign = size_of(format_.scale_type) == 4 ? INT32_MIN : 0x8000;
      return static_cast<std::uint32_t>(place < 0 ? sign | -place : place);
    };
    const int least = format_.zero_bits == 0 || !extremes_.zero_raises ? -most : 0;
    const int last = format_.zero_bits == 0 || extremes_.zero_raises ? most : 0;
    return bits_of(first_that(least, last, [&](int of) {
      return !(static_cast<float>(decode_.value(extremes_.highest, scale, zero_of(bits_of(of)))) < high_);
    }));
  }
  bool covers(int bits) const {
    const float scale = scale_of(static_cast<std::uint32_t>(bits));
    return !(static_cast<float>(decode_.value(extremes_.lowest, scale, zero_of(zero_for(scale)))) > low_);
  }

  const KvFormat& format_;
  const DecodeExpression& decode_;
  DecodeExtremes extremes_;
  float low_ = std::numeric_limits<float>::infinity(), high_ = -low_;
  bool is_finite_ = true;
};

/// A scale, and a zero point, of a row's block, or of a column of keys.
Quantizer decoded_quantizer(const KvFormat& format, const KvRow& at, const std::uint8_t* scales, int index,
                            double argument) {
  const std::ptrdiff_t step = std::ptrdiff_t{index} * at.scale_step;
  if (format.scales == KvFormat::Scales::argument) return {argument, 0};
  const double scale = decode_number(format.scale_type, scales + at.scales + step) * argument;
  if (format.zero == Zero::none) return {scale, 0};
  const std::ptrdiff_t bit = std::ptrdiff_t{index} * at.zero_step;
  const std::uint8_t* const of_zero = scales + at.zeros + bit / 8;
  if (format.zero_bits > 0)
    return {scale, static_cast<double>(integers_of(format.code).low +
                                       (*of_zero >> bit % 8 & ((1 << format.zero_bits) - 1)))};
  const double zero = decode_number(format.scale_type, of_zero);
  return {scale, format.zero == Zero::added ? zero * argument : zero};
}

Quantizer found_quantizer(const KvFormat& format, const KvRow& at, std::span<const float> values,
                          float argument, std::uint8_t* scales, int index) {
  if (format.scales == KvFormat::Scales::argument) return {argument, 0};
  const std::ptrdiff_t step = std::ptrdiff_t{index} * at.scale_step;
  const std::ptrdiff_t bit = std::ptrdiff_t{index} * at.zero_step;
  std::uint8_t *const scale = scales + at.scales + step, *const zero = scales + at.zeros + bit / 8;
  const int zero_shift = static_cast<int>(bit % 8);
  if (!format.decode.empty()) return QuantizerSearch(format, values).store(scale, zero, zero_shift);
  if (format.zero == Zero::none) return symmetric(format, values, argument, scale);
  return with_zero(format, values, argument, scale, zero, zero_shift);
}

unsigned code_by(const KvFormat& format, const Quantizer& by, float x) {
  if (!format.decode.empty()) return nearest(by.values, x);
  const auto scale = static_cast<float>(by.scale), zero = static_cast<float>(by.zero);
  // By a factor that is finite, as kernels': a block of the least numbers has zeros.
  const float largest = std::copysign(std::numeric_limits<float>::max(), scale);
  const auto quotient = [&](float y) { return std::isinf(1 / scale) ? y * largest : y / scale; };
  const float value = format.zero == Zero::added ? quotient(x - zero) : quotient(x) + zero;
  return code_of(format, value);
}
/// Puts the code of a column's value into its block's bytes, which were cleared.
void put_code(const KvFormat& format, const KvRow& at, std::uint8_t* block, int i, float x,
              const Quantizer& by) {
  const unsigned code = code_by(format, by, x);
  const auto [byte, shift, crosses] = place_of(format, at.block, i);
  if (has_fifth_bits(format)) {
    block[byte] |= static_cast<std::uint8_t>((code & 15u) << shift);
    block[i / 8] |= static_cast<std::uint8_t>(code >> 4 << i % 8);
    return;
  }
  block[byte] |= static_cast<std::uint8_t>(code << shift);
  if (crosses) block[byte + 1] |= static_cast<std::uint8_t>(code >> (8 - shift));
}
double value_by(const KvFormat& format, const Quantizer& by, unsigned code) {
  if (!format.decode.empty())
    return decode_expression(format).value(static_cast<int>(code), by.scale, by.zero);
  const double value = code_value(format, code);
  return format.zero == Zero::added ? value * by.scale + by.zero : (value - by.zero) * by.scale;
}
/// A column's code in its block's bytes.
unsigned get_code(const KvFormat& format, const KvRow& at, const std::uint8_t* block, int i) {
  const auto [byte, shift, crosses] = place_of(format, at.block, i);
  if (has_fifth_bits(format)) return (block[byte] >> shift & 15u) | (block[i / 8] >> i % 8 & 1u) << 4;
  const unsigned two = block[byte] | (crosses ? block[byte + 1] << 8 : 0u);
  return two >> shift & ((1u << format.bits()) - 1);
}

void encode_tail(const KvFormat& format, const KvRow& at, const double* from, std::uint8_t* row) {
  for (std::ptrdiff_t i = 0; i < format.tail; ++i)
    encode_number(format.tail_type, static_cast<float>(from[at.columns + i]), row + at.tail + i * 2);
}

}  // namespace

void decode_row(const KvFormat& format, int dim, const std::uint8_t* row, double argument, double* to,
                const std::uint8_t* scales) {
  const KvRow at = format.row(dim);
  if (!format.has_block_scales()) scales = row;
  for (int begin = 0, block = 0; begin < at.columns; begin += at.block, ++block) {
    Quantizer by = decoded_quantizer(format, at, scales, block, argument);
    for (int i = 0; i < at.block; ++i) {
      if (format.keys > 0) by = decoded_quantizer(format, at, scales, i, argument);
      const std::uint8_t* const codes = row + at.codes + std::ptrdiff_t{block} * at.block_step;
      to[begin + i] = value_by(format, by, get_code(format, at, codes, i));
    }
  }
  for (std::ptrdiff_t i = 0; i < format.tail; ++i)
    to[at.columns + i] = decode_number(format.tail_type, row + at.tail + i * 2);
}

void encode_row(const KvFormat& format, int dim, const double* from, float argument, std::uint8_t* row,
                std::uint8_t* scales) {
  const KvRow at = format.row(dim);
  std::vector<float> values(static_cast<std::size_t>(at.block));
  if (!format.has_block_scales()) scales = row;
  std::memset(row, 0, static_cast<std::size_t>(at.tail));
  for (int begin = 0, block = 0; begin < at.columns; begin += at.block, ++block) {
    for (int i = 0; i < at.block; ++i) values[i] = static_cast<float>(from[begin + i]);
    const Quantizer by = found_quantizer(format, at, values, argument, scales, block);
    for (int i = 0; i < at.block; ++i)
      put_code(format, at, row + at.codes + static_cast<std::ptrdiff_t>(block) * at.block_step, i, values[i],
               by);
  }
  encode_tail(format, at, from, row);
}

void encode_keys(const KvFormat& format, int dim, const double* from, std::span<std::uint8_t* const> rows,
                 std::uint8_t* scales) {
  const KvRow at = format.row(dim);
  std::vector<float> values(rows.size());
  for (std::uint8_t* const row : rows) std::memset(row, 0, static_cast<std::size_t>(at.tail));
  for (int column = 0; column < at.columns; ++column) {
    for (std::size_t n = 0; n < rows.size(); ++n) values[n] = static_cast<float>(from[n * dim + column]);
    const Quantizer by = found_quantizer(format, at, values, 1, scales, column);
    for (std::size_t n = 0; n < rows.size(); ++n) put_code(format, at, rows[n], column, values[n], by);
  }
  for (std::size_t n = 0; n < rows.size(); ++n) encode_tail(format, at, from + n * dim, rows[n]);
}

}  // namespace flashjit

#include "reference/inputs.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "expr/declarations.hpp"
#include "support/small_float.hpp"

namespace flashjit::reference {
namespace {

template <class Integer>
double clamped(double value) {
  constexpr auto kLow = static_cast<double>(std::numeric_limits<Integer>::min());
  constexpr auto kHigh = static_cast<double>(std::numeric_limits<Integer>::max());
  return std::isnan(value) ? 0 : std::clamp(std::trunc(value), kLow, kHigh);
}

template <class Element, class Convert>
std::vector<std::byte> encode_as(const std::vector<double>& values, Convert convert) {
  std::vector<std::byte> bytes(values.size() * sizeof(Element));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Element element = convert(values[i]);
    std::memcpy(&bytes[i * sizeof element], &element, sizeof element);
  }
  return bytes;
}

template <class Integer>
std::vector<std::byte> encode_integers(const std::vector<double>& values) {
  // 2^63 itself is a double, but no int64: what is beyond the last double before it saturates.
  return encode_as<Integer>(values, [](double value) {
    const double whole = clamped<Integer>(value);
    return whole >= 0x1p63 ? std::numeric_limits<Integer>::max() : static_cast<Integer>(whole);
  });
}

bool is_integer(ElementType type) { return type >= ElementType::int32 && type <= ElementType::uint8; }

constexpr std::int64_t kMostElements = std::int64_t{1} << 24;

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies());
}

/// Sizes of a tensor of the rank, outermost first; its reads are clamped, so any would do, and a size of 1
/// repeats the tensor.
std::vector<std::int64_t> sizes_of(const expr::Declaration& d, const AttentionShape& shape) {
  const std::array all{shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_kv};
  std::vector<std::int64_t> sizes(all.end() - d.rank, all.end());
  if (d.rank == 1) sizes[0] = *std::max_element(all.begin() + 1, all.end());
  for (std::int64_t& size : sizes) size = std::max<std::int64_t>(size, 1);
  for (int i = 0; i + 2 < d.rank && product(sizes) > kMostElements; ++i) sizes[i] = 1;
  return sizes;
}

/// Numbers of about four documents one behind the other.
std::vector<double> documents(std::int64_t count, std::mt19937_64& random) {
  std::bernoulli_distribution ends(std::min(1.0, 4.0 / static_cast<double>(count)));
  std::vector<double> numbers(count);
  for (std::int64_t i = 1; i < count; ++i) numbers[i] = numbers[i - 1] + (ends(random) ? 1 : 0);
  return numbers;
}

std::vector<double> tensor_values(const expr::Declaration& d, std::int64_t count, std::mt19937_64& random) {
  std::vector<double> values(count);
  if (is_integer(d.type) && d.rank == 1) {
    values = documents(count, random);
  } else if (is_integer(d.type)) {
    for (double& value : values) value = static_cast<double>(random() % 4);
  } else if (d.type == ElementType::boolean) {
    for (double& value : values) value = random() % 4 != 0;
  } else {
    std::normal_distribution<double> normal;
    for (double& value : values) value = normal(random);
  }
  for (double& value : values) value = round_to(d.type, value);
  return values;
}

double scalar_value(const expr::Declaration& d, const AttentionShape& shape, std::mt19937_64& random) {
  if (d.type == ElementType::int32)
    return static_cast<double>(1 + random() % std::max<std::uint64_t>(1, shape.seqlen_kv / 2));
  return round_to(ElementType::fp32, std::uniform_real_distribution(0.5, 2.0)(random));
}

}  // namespace

double round_to(ElementType type, double value) {
  switch (type) {
    case ElementType::fp32:
      return static_cast<float>(value);
    case ElementType::fp16:
      return Fp16::round(value);
    case ElementType::bf16:
      return Bf16::round(value);
    case ElementType::int32:
      return clamped<std::int32_t>(value);
    case ElementType::int64:
      return clamped<std::int64_t>(value);
    case ElementType::int16:
      return clamped<std::int16_t>(value);
    case ElementType::int8:
      return clamped<std::int8_t>(value);
    case ElementType::uint8:
      return clamped<std::uint8_t>(value);
    case ElementType::boolean:
      break;
  }
  return value != 0;
}

std::vector<std::byte> encode(ElementType type, const std::vector<double>& values) {
  switch (type) {
    case ElementType::fp32:
      return encode_as<float>(values, [](double value) { return static_cast<float>(value); });
    case ElementType::fp16:
      return encode_as<std::uint16_t>(values, Fp16::encode);
    case ElementType::bf16:
      return encode_as<std::uint16_t>(values, Bf16::encode);
    case ElementType::int32:
      return encode_integers<std::int32_t>(values);
    case ElementType::int64:
      return encode_integers<std::int64_t>(values);
    case ElementType::int16:
      return encode_integers<std::int16_t>(values);
    case ElementType::int8:
      return encode_integers<std::int8_t>(values);
    case ElementType::uint8:
      return encode_integers<std::uint8_t>(values);
    case ElementType::boolean:
      break;
  }
  return encode_as<std::uint8_t>(values, [](double value) { return std::uint8_t{value != 0}; });
}

std::vector<Captured> plausible_captures(const AttentionSpec& spec, const AttentionShape& shape,
                                         std::uint64_t seed) {
  std::vector<Captured> captures;
  for (const expr::Declaration& d : expr::declarations(spec.score, spec.mask)) {
    // A name's value does not depend on what else is declared.
    std::vector<std::uint32_t> material(d.name.begin(), d.name.end());
    material.insert(material.end(),
                    {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    std::seed_seq sequence(material.begin(), material.end());
    std::mt19937_64 random(sequence);
    Captured made{.name = d.name};
    if (d.is_scalar()) {
      made.values = {scalar_value(d, shape, random)};
    } else {
      made.size = sizes_of(d, shape);
      made.values = tensor_values(d, product(made.size), random);
    }
    captures.push_back(std::move(made));
  }
  return captures;
}

std::vector<std::int32_t> random_offsets(std::int64_t batch, std::int64_t longest, std::int64_t empty,
                                         std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<std::int64_t> length(0, longest);
  std::vector<std::int32_t> offsets{0};
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t any = length(random), rows = i == empty ? 0 : i == 0 ? longest : any;
    offsets.push_back(static_cast<std::int32_t>(offsets.back() + rows));
  }
  return offsets;
}

std::vector<double> random_sinks(std::int64_t heads, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(1, 2);
  std::vector<double> sinks(heads);
  for (double& sink : sinks) sink = round_to(ElementType::fp32, normal(random));
  return sinks;
}

}  // namespace flashjit::reference

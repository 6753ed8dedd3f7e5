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
#include "expr/graph.hpp"
#include "flashjit/tensor.hpp"
#include "support/dtypes.hpp"
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

/// How programs read a dimension of a tensor.
struct Reading {
  std::int64_t size = 0;   ///< of the names that they read it at; 0: they read it elsewhere, too
  bool positions = false;  ///< whether all of these are q or kv
};

std::int64_t size_of(expr::Name name, const AttentionShape& shape, std::int64_t columns) {
  switch (name) {
    case expr::Name::b:
      return shape.batch;
    case expr::Name::h:
      return shape.heads_q;
    case expr::Name::h_kv:
      return shape.heads_kv;
    case expr::Name::q:
      return shape.seqlen_q;
    case expr::Name::kv:
      return shape.seqlen_kv;
    case expr::Name::column:
      return columns;
    default:
      return 0;
  }
}

/// One reading for each dimension, outermost first.
std::vector<Reading> readings_of(const expr::Declaration& d, const expr::Graph& graph,
                                 const AttentionShape& shape, std::int64_t columns) {
  std::vector<Reading> readings(d.rank);
  for (int dimension = 0; dimension < d.rank; ++dimension) {
    Reading& reading = readings[dimension];
    for (int place = 0; place < graph.size(); ++place) {
      if (graph.node(place).op != expr::Op::read || graph.node(place).declaration.name != d.name) continue;
      const expr::Node& index = graph.node(graph[place].args[dimension]);
      const std::int64_t size = index.op == expr::Op::name ? size_of(index.name, shape, columns) : 0;
      if (size == 0) {
        reading = {};
        break;
      }
      const bool position = index.name == expr::Name::q || index.name == expr::Name::kv;
      reading.positions = position && (reading.positions || reading.size == 0);
      reading.size = std::max(reading.size, size);
    }
  }
  return readings;
}

/// Sizes of a tensor, outermost first; its reads are clamped, so any would do, and a size of 1 repeats the
/// tensor.
std::vector<std::int64_t> sizes_of(const expr::Declaration& d, const std::vector<Reading>& readings,
                                   const AttentionShape& shape) {
  const std::array<std::int64_t, kMaxCaptureDims> all{
      2, 3, shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_kv};
  std::vector<std::int64_t> sizes(all.end() - d.rank, all.end());
  if (d.rank == 1) sizes[0] = *std::max_element(all.begin() + 1, all.end());
  for (int i = 0; i < d.rank; ++i) {
    if (readings[i].size > 0) sizes[i] = readings[i].size;
    sizes[i] = std::max<std::int64_t>(sizes[i], 1);
  }
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

/// Padding: true for some half of the row or more.
std::vector<double> valid_keys(std::int64_t count, std::mt19937_64& random) {
  const std::int64_t valid = std::uniform_int_distribution((count + 1) / 2, count)(random);
  std::vector<double> values(count);
  std::fill_n(values.begin(), valid, 1.0);
  return values;
}

/// Whether a tensor is one of rows that are read by a position, as documents' ids [b, q] are.
bool in_rows(const std::vector<Reading>& readings) {
  return readings.back().positions && std::ranges::count(readings, true, &Reading::positions) == 1 &&
         std::ranges::none_of(readings, [](const Reading& reading) { return reading.size == 0; });
}

std::vector<double> tensor_values(const expr::Declaration& d, const std::vector<Reading>& readings,
                                  const std::vector<std::int64_t>& sizes, std::mt19937_64& random) {
  const std::int64_t count = product(sizes);
  std::vector<double> values(count);
  const bool is_condition = d.type == ElementType::boolean;
  if (is_integer(d.type) && d.rank == 1) {
    values = documents(count, random);
  } else if (in_rows(readings) && (is_integer(d.type) || is_condition)) {
    for (std::int64_t row = 0; row < count; row += sizes.back())
      std::ranges::copy(is_condition ? valid_keys(sizes.back(), random) : documents(sizes.back(), random),
                        values.begin() + row);
  } else if (is_integer(d.type)) {
    for (double& value : values) value = static_cast<double>(random() % 4);
  } else if (is_condition) {
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
  expr::Graph graph;
  for (const expr::NodePtr& program : {spec.score.tree(), spec.mask.tree(), spec.epilogue.out_mod.tree(),
                                       spec.prologue.q_mod.tree(), spec.prologue.k_mod.tree()})
    if (program) graph.add(program);
  std::vector<Captured> captures;
  for (const expr::Declaration& d :
       expr::declarations(spec.score, spec.mask, spec.epilogue.out_mod, spec.prologue)) {
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
      const std::vector<Reading> readings =
          readings_of(d, graph, shape, std::max(spec.head_dim, spec.v_dim()));
      made.size = sizes_of(d, readings, shape);
      made.values = tensor_values(d, readings, made.size, random);
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

std::vector<std::int32_t> shuffled_pages(std::int64_t count, std::uint64_t seed) {
  std::vector<std::int32_t> pages(static_cast<std::size_t>(count));
  std::iota(pages.begin(), pages.end(), 0);
  std::mt19937_64 random(seed);
  std::ranges::shuffle(pages, random);
  return pages;
}

std::int32_t plausible_prefix(const AttentionShape& shape) {
  return static_cast<std::int32_t>(std::max<std::int64_t>(shape.seqlen_kv - shape.seqlen_q, 0) * 15 / 16);
}

void share_prefix(const AttentionShape& shape, std::int32_t keys, std::int64_t dim,
                  std::vector<double>& values, std::vector<std::int32_t>& lengths) {
  const auto least = static_cast<std::int32_t>(std::min(keys + shape.seqlen_q, shape.seqlen_kv));
  for (std::int32_t& length : lengths) length = std::max(length, least);
  for (std::int64_t head = shape.heads_kv; head < shape.batch * shape.heads_kv; ++head)
    std::copy_n(values.begin() + head % shape.heads_kv * shape.seqlen_kv * dim, keys * dim,
                values.begin() + head * shape.seqlen_kv * dim);
}

std::vector<double> first_columns(const std::vector<double>& values, std::int64_t dim, std::int64_t columns) {
  std::vector<double> taken;
  for (auto row = values.begin(); row != values.end(); row += dim)
    taken.insert(taken.end(), row, row + columns);
  return taken;
}

std::vector<double> quantize(DType type, bool by_row, std::int64_t heads, std::int64_t rows, std::int64_t dim,
                             std::vector<double>& values) {
  const DTypeInfo& info = dtype_info(type);
  const std::int64_t row_count = std::ssize(values) / dim;
  std::vector<double> scales(static_cast<std::size_t>(by_row ? row_count : heads));
  const auto scale_of = [&](std::int64_t row) -> double& {
    return scales[static_cast<std::size_t>(by_row ? row : row / rows % heads)];
  };
  for (std::int64_t i = 0; i < std::ssize(values); ++i)
    scale_of(i / dim) = std::max(scale_of(i / dim), std::abs(values[i]));
  for (double& scale : scales) scale = scale == 0 ? 1 : static_cast<float>(scale / info.largest);
  for (std::int64_t i = 0; i < std::ssize(values); ++i)
    values[i] = info.round(values[i] / scale_of(i / dim)) * scale_of(i / dim);
  return scales;
}

std::vector<std::int32_t> random_indices(std::int64_t lists, std::int64_t top_k, std::int64_t keys,
                                         std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> indices(static_cast<std::size_t>(lists * top_k));
  for (std::int32_t& index : indices) {
    const std::uint64_t kind = random() % 32;
    index =
        kind == 0 || keys == 0 ? -1 : static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(keys));
    if (kind == 1) index += static_cast<std::int32_t>(keys);
  }
  return indices;
}

std::vector<std::int32_t> neighbouring_indices(std::int64_t lists, std::int64_t top_k, std::int64_t keys,
                                               std::int64_t changed, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> order(static_cast<std::size_t>(keys)), indices;
  std::iota(order.begin(), order.end(), 0);
  const auto draw = [&](std::int64_t first, std::int64_t count) {
    return static_cast<std::size_t>(first) + random() % static_cast<std::uint64_t>(count);
  };
  for (std::int64_t i = 0; i < top_k; ++i)
    std::swap(order[static_cast<std::size_t>(i)], order[draw(i, keys - i)]);
  for (std::int64_t list = 0; list < lists; ++list) {
    for (std::int64_t i = 0; i < top_k; ++i)
      indices.push_back(random() % 32 == 0 ? -1 : order[static_cast<std::size_t>(i)]);
    for (std::int64_t i = 0; i < changed && top_k < keys; ++i)
      std::swap(order[draw(0, top_k)], order[draw(top_k, keys - top_k)]);
  }
  return indices;
}

std::int64_t plausible_top_k(std::int64_t keys) {
  constexpr std::int64_t kMost = 2048;
  return std::min(kMost, (keys + 1) / 2);
}

std::vector<double> random_sinks(std::int64_t heads, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(1, 2);
  std::vector<double> logits(heads);
  for (double& logit : logits) logit = round_to(ElementType::fp32, normal(random));
  return logits;
}

}  // namespace flashjit::reference

#include "flashjit/attention_programs.hpp"

#include <algorithm>
#include <cmath>

#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "support/refuse.hpp"

namespace flashjit::programs {
namespace {

using namespace flashjit::expr;

constexpr std::int32_t kMaxDistance = 1 << 30;  // sums with positions stay in 32 bits

void require(std::string_view what, std::int32_t value, std::int32_t min) {
  if (value < min || value > kMaxDistance)
    refuse("{} is {}; it must be from {} to {}", what, value, min, kMaxDistance);
}

/// The position of the query among the keys.
Expr position() { return q + seqlen_kv - seqlen_q; }

/// The smallest distance of each bucket after the buckets of single distances, with T5's own fp32 arithmetic.
std::vector<std::int32_t> bucket_begins(int buckets, int single, int max_distance) {
  const auto scale = static_cast<float>(std::log(static_cast<double>(max_distance) / single));
  const auto bucket = [&](int distance) {
    const float share = std::log(static_cast<float>(distance) / static_cast<float>(single)) / scale;
    return std::min(single + static_cast<int>(share * static_cast<float>(buckets - single)), buckets - 1);
  };
  std::vector<std::int32_t> begins;
  int last = single;
  for (int distance = single; distance <= max_distance; ++distance) {
    for (; last < bucket(distance); ++last) begins.push_back(distance);
  }
  return begins;
}

/// Bucket of a distance that is not negative. Comparisons are exact where a logarithm would not be.
Expr bucket_of(const Expr& distance, int buckets, int max_distance) {
  const int single = buckets / 2;
  if (max_distance <= single || max_distance > kMaxDistance >> 10)
    refuse("max_distance is {}; it must be from {} to {}", max_distance, single + 1, kMaxDistance >> 10);
  Expr bucket = min(distance, single);
  for (const std::int32_t begin : bucket_begins(buckets, single, max_distance))
    bucket = bucket + to_int(distance >= begin);
  return bucket;
}

}  // namespace

Expr causal_mask(CausalAlignment alignment) { return Expr(flashjit::causal(alignment).tree()); }

Expr sliding_window(std::int32_t left, std::int32_t right) {
  require("left", left, -1);
  require("right", right, -1);
  const Expr last = right == 0 ? kv <= position() : kv <= position() + right;
  const Expr first = left == 0 ? kv >= position() : kv >= position() - left;
  if (left < 0) return right < 0 ? Expr(true) : last;
  return right < 0 ? first : first && last;
}

Expr prefix_lm(CausalAlignment alignment, std::string prefix) {
  return causal_mask(alignment) || kv < tensor(std::move(prefix), ElementType::int32, 1)[b];
}

Expr documents(int rank, std::string q_ids, std::string kv_ids) {
  if (rank != 1 && rank != 2) refuse("the rank of documents' ids is {}; it must be 1 or 2", rank);
  const Tensor of_kv = tensor(kv_ids.empty() ? q_ids : std::move(kv_ids), ElementType::int32, rank);
  const Tensor of_q = tensor(std::move(q_ids), ElementType::int32, rank);
  return rank == 1 ? of_q[q] == of_kv[kv] : of_q(b, q) == of_kv(b, kv);
}

Expr dilated(std::int32_t stride) {
  require("stride", stride, 1);
  return (position() - kv) % stride == 0;
}

Expr strided(std::int32_t local, std::int32_t stride) {
  require("local", local, 1);
  return causal_mask() && (position() - kv < local || dilated(stride));
}

Expr neighborhood_2d(std::int32_t width, std::int32_t radius) {
  require("width", width, 1);
  require("radius", radius, 0);
  return abs(q / width - kv / width) <= radius && abs(q % width - kv % width) <= radius;
}

Expr chunked(std::int32_t size) {
  require("size", size, 1);
  return causal_mask() && kv / size == position() / size;
}

Expr mm_prefix(std::string first, std::string last) {
  const Tensor begin = tensor(std::move(first), ElementType::int32, 2);
  const Tensor end = tensor(std::move(last), ElementType::int32, 2);
  return causal_mask() || (begin(b, q) <= kv && kv < end(b, q));
}

Expr tree(std::string ancestors) {
  const Expr own = kv - (seqlen_kv - seqlen_q);
  const Tensor bits = tensor(std::move(ancestors), ElementType::int64, 2);
  return own < 0 || (own < 64 && (bits(b, q) >> own & 1) == 1);
}

Expr positions(std::string q_positions, std::string kv_positions) {
  return tensor(std::move(kv_positions), ElementType::int32, 2)(b, kv) <=
         tensor(std::move(q_positions), ElementType::int32, 2)(b, q);
}

Expr interleaved(std::string q_positions) {
  return kv * scalar_int("ranks") + scalar_int("rank") <=
         tensor(std::move(q_positions), ElementType::int32, 2)(b, q);
}

Expr causal_if(std::string flags) {
  return tensor(std::move(flags), ElementType::int32, 1)[b] == 0 || causal_mask();
}

// The distance in floats: kernels count positions in both, so that it costs no conversion.
Expr alibi(std::string slopes) {
  return score - tensor(std::move(slopes), ElementType::fp32, 1)[h] * abs(to_float(position() - kv));
}

std::vector<float> alibi_slopes(std::int64_t heads) {
  if (heads < 0 || heads > 1 << 20) refuse("heads is {}; it must be from 0 to {}", heads, 1 << 20);
  std::int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  std::vector<float> slopes;
  for (std::int64_t i = 0; i < heads; ++i) {
    // Behind the last power of two: every other slope of the next one.
    const double exponent = i < power
                                ? static_cast<double>(i + 1) / static_cast<double>(power)
                                : static_cast<double>(2 * (i - power) + 1) / static_cast<double>(2 * power);
    slopes.push_back(static_cast<float>(std::exp2(-8 * exponent)));
  }
  return slopes;
}

Expr softcap(float cap) {
  if (!(cap > 0) || !std::isfinite(cap)) refuse("cap is {}; it must be more than 0 and finite", cap);
  return cap * tanh(score / cap);
}

Expr dense_bias(ElementType type, std::initializer_list<NameConstant> indices, bool wants_grad,
                std::string bias) {
  std::vector<Expr> reads;
  std::vector<Name> seen;
  for (const NameConstant index : indices) {
    const bool may_index = index.name == Name::b || index.name == Name::h || index.name == Name::h_kv ||
                           index.name == Name::q || index.name == Name::kv;
    if (!may_index || std::ranges::find(seen, index.name) != seen.end())
      refuse("a dense bias has the index {}; it may have b, h, h_kv, q and kv, each once",
             to_string(index.name));
    seen.push_back(index.name);
    reads.push_back(index);
  }
  const Tensor plain = tensor(std::move(bias), type, static_cast<int>(indices.size()));
  return score + (wants_grad ? plain.with_grad() : plain).read(std::move(reads));
}

Expr relative_bias(const RelativeBias& options) {
  const int least = options.bidirectional ? 4 : 2;
  if (options.num_buckets < least || options.num_buckets > 256 || options.num_buckets % 2 != 0)
    refuse("num_buckets is {}; it must be even and from {} to 256", options.num_buckets, least);
  const Tensor plain = tensor(options.table, options.type, 2);
  const Tensor table = options.wants_grad ? plain.with_grad() : plain;
  if (!options.bidirectional)
    return score + table(bucket_of(max(position() - kv, 0), options.num_buckets, options.max_distance), h);
  const int half = options.num_buckets / 2;
  const Expr behind = to_int(kv > position()) * half;
  return score + table(behind + bucket_of(abs(position() - kv), half, options.max_distance), h);
}

}  // namespace flashjit::programs

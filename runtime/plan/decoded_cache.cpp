#include "plan/decoded_cache.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/tiles.hpp"

namespace flashjit::plan {
namespace {

// Measured on an H200: ../../templates/sm90/NOTES.md#when-a-cache-is-decoded-once.
constexpr double kBytesPerSecond = 4e12, kOperationsPerSecond = 600e12;
/// By how much decoding for each Q tile lengthens the two products: of codes that the kernel reads as they
/// are, and of the format that costs least.
constexpr double kLossOfCodes = 0.15, kLossOfFormats = 0.65;
/// The same of codes that are multiplied, from pages of 16 rows: d256 400 us, from slots 283. Products of 16
/// bits take twice as long.
constexpr double kLossOfPages = 0.4 / 2;
constexpr double kSecondsOfLaunch = 5e-6;
constexpr std::int64_t kMostDecodedBytes = std::int64_t{1} << 30;

/// Rows of Q that an estimate takes together.
constexpr std::int64_t kRowsOfTile = 128;

/// A box of TMA has a multiple of 8 rows, and one of 8 costs more than larger ones.
constexpr int kFewestRowsOfBox = 16, kRowsOfBoxes = 8;
bool has_boxes(const KvLayout& kv) { return kv.page_size % kRowsOfBoxes == 0; }
bool has_small_pages(const KvLayout& kv) {
  return kv.is_paged() && (kv.page_size < kFewestRowsOfBox || !has_boxes(kv));
}

/// To copy small pages takes each Q tile as long as products of so many columns more:
/// ../../templates/sm90/NOTES.md#pages-whose-rows-are-copied-one-by-one.
double columns_of_copies(const AnalysedSpec& spec) {
  const bool narrow = std::max(spec.head_dim, spec.v_dim()) <= 64;
  if (has_boxes(spec.kv)) return narrow ? 2 : 11;
  return narrow ? 26 : 18;
}

double loss_of(const KvFormat& format, const AnalysedSpec& spec) {
  if (spec.prologue.q_codes) return kLossOfPages;
  if (!format.quantized()) return 0;
  return spec.decodes_kv() ? kLossOfFormats : kLossOfCodes;
}

/// Columns of K and V whose products take as long as what a Q tile is spared.
double spared_columns(const AnalysedSpec& spec) {
  const KvLayout& kv = spec.kv;
  if (!kv.quantized()) return (kv.shared_kv ? 1 : 2) * columns_of_copies(spec);
  return spec.head_dim * loss_of(kv.k_format, spec) + spec.v_dim() * loss_of(kv.v_format, spec);
}

/// Bytes of a key of one head as it is stored, and as elements.
struct KeyBytes {
  double stored, decoded;
};
KeyBytes bytes_of_key(const AnalysedSpec& spec) {
  const double k = spec.kv.k_format.row_bytes(spec.head_dim);
  if (spec.prologue.q_codes) return {k + spec.v_dim(), k + spec.v_dim()};
  if (spec.kv.shared_kv) return {k, 2.0 * spec.head_dim};
  return {k + spec.kv.v_format.row_bytes(spec.v_dim()), 2.0 * (spec.head_dim + spec.v_dim())};
}

/// Pairs of a query head that the mask's bounds leave, and the keys of all of them.
struct AttendedPairs {
  double pairs = 0, keys = 0;
};
AttendedPairs attended_pairs(const AnalysedSpec& spec, const AttentionShape& shape) {
  AttendedPairs all;
  const std::int64_t together = rows_to_estimate(shape, kRowsOfTile);
  std::int64_t left = shape.seqlen_q, begin = shape.seqlen_kv, end = 0;
  for (const Range& keys : keys_of_tiles(spec, shape, together)) {
    const std::int64_t rows = std::min(together, left);
    left -= rows;
    if (keys.begin >= keys.end) continue;
    all.pairs += static_cast<double>(rows) * (keys.end - keys.begin);
    begin = std::min<std::int64_t>(begin, keys.begin), end = std::max<std::int64_t>(end, keys.end);
  }
  all.keys = static_cast<double>(std::max<std::int64_t>(end - begin, 0));
  return all;
}

}  // namespace

AnalysedSpec with_elements(AnalysedSpec spec) {
  if (!spec.prologue.q_codes) {
    spec.kv.k_format = spec.kv.v_format = {};
    spec.kv.key_scales = false;
  }
  if (spec.kv.is_paged()) spec.kv.kind = KvLayout::Kind::slots;
  spec.kv.page_size = 0;
  return spec;
}

KernelSpec spec_of_main(const KernelPlan& kernel) {
  return kernel.config.decode_cache ? with_elements(kernel.spec) : kernel.spec;
}

Support may_decode_cache(const AnalysedSpec& spec) {
  const KvLayout& kv = spec.kv;
  if (spec.pass != Pass::forward || !(kv.quantized() || has_small_pages(kv)))
    return Support::no(fmt::format(
        "decode_cache is for the forward pass over quantized K and V, or over pages of fewer than {} "
        "rows or of no multiple of {}",
        kFewestRowsOfBox, kRowsOfBoxes));
  if (spec.head_dim % 16 != 0 || spec.v_dim() % 16 != 0)
    return Support::no("decode_cache is for head dimensions that are multiples of 16");
  if (spec.has_key_scales())
    return Support::no("decode_cache of 8-bit K and V is without key_scales: elements would be rounded");
  if (spec.prologue.q_codes && !kv.is_paged())
    return Support::no("decode_cache beside q_codes copies pages, and K and V are in none");
  if (size_of(spec.dtype) != 2)
    return Support::no(fmt::format("decode_cache is for Q of 16 bits, not {}", to_string(spec.dtype)));
  if (spec.decodes_kv() && spec.dtype == DType::fp16 &&
      (kv.k_format.has_argument() || kv.v_format.has_argument()))
    return Support::no(
        "decode_cache of formats with the call's scales is for bf16, as fp16 may not hold their products");
  if (spec.indices || spec.reproducible.batch_invariant || kv.shared_prefix)
    return Support::no("decode_cache is without indices, batch_invariant and shared_prefix");
  if (spec.prologue.has_programs()) return Support::no("decode_cache is without q_mod");
  if (spec.varlen && !kv.is_cache())
    return Support::no("decode_cache is not for packed K and V, only for packed Q beside a cache");
  return Support::yes();
}

double gain_by_decoded_cache(const AnalysedSpec& spec, const AttentionShape& shape) {
  // Which tiles lists leave is not known here.
  if (shape.heads_kv == 0 || !may_decode_cache(spec) || spec.has_tile_lists) return 0;
  const auto [stored, decoded] = bytes_of_key(spec);
  const double heads_kv = static_cast<double>(shape.batch) * static_cast<double>(shape.heads_kv);
  if (heads_kv * static_cast<double>(shape.seqlen_kv) * decoded > static_cast<double>(kMostDecodedBytes))
    return 0;
  const auto [pairs, keys] = attended_pairs(spec, shape);
  const double group = static_cast<double>(shape.heads_q) / static_cast<double>(shape.heads_kv);
  const double operations = 2 * spared_columns(spec);
  const double gain = heads_kv * group * pairs * operations / kOperationsPerSecond;
  // The main loop reads elements no slower than codes.
  const double cost = heads_kv * keys * (stored + decoded) / kBytesPerSecond + kSecondsOfLaunch;
  // Copies of codes are not measured yet: the tuner decides.
  return spec.prologue.q_codes ? std::min(gain / cost, kGainThatDecides) : gain / cost;
}

KernelPlan add_decode_cache(KernelPlan of_elements, const AnalysedSpec& spec) {
  KernelPlan kernel = std::move(of_elements);
  kernel.spec = spec;
  kernel.config.decode_cache = true;
  Entry entry = auxiliary_entry("decode_cache");
  entry.params = "DecodeCacheParams";
  entry.problem = "StoredProblem";
  entry.min_blocks = 8;  // its loads hide behind others'
  kernel.steps.insert(kernel.steps.begin(), Step::decode_cache);
  kernel.entries.insert(kernel.entries.begin(), std::move(entry));
  return kernel;
}

}  // namespace flashjit::plan

#include "attention.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <random>
#include <set>
#include <utility>

#include "expr/declarations.hpp"
#include "out_codes.hpp"
#include "plan/spec_options.hpp"
#include "support/paths.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"
#include "tools/parts/npy.hpp"

namespace flashjit::command {

using reference::Precision;

Results reference_results(const reference::Problem& problem, Precision precision) {
  reference::Forward forward = reference::forward(problem, precision);
  if (precision != Precision::exact) forward.out = stored_as(problem.spec, std::move(forward.out));
  Results results{std::move(forward.out), std::move(forward.lse), {}, {}, {}};
  results.row_max = std::move(forward.row_max);
  if (problem.spec.score.is_weight()) results.lse.clear();
  if (problem.spec.pass == Pass::forward) return results;
  reference::Backward backward = reference::backward(problem, precision);
  results.dq = std::move(backward.dq);
  results.dk = std::move(backward.dk);
  results.dv = std::move(backward.dv);
  results.dsinks = std::move(backward.dsinks);
  results.dsink_rows = std::move(backward.dsink_rows);
  results.capture_grads = std::move(backward.captures);
  results.capture_squares = std::move(backward.capture_squares);
  results.capture_counts = std::move(backward.capture_counts);
  return results;
}

std::vector<Comparison> compare(const Results& got, const Results& exact, const Results& rounded,
                                const reference::Problem& problem) {
  constexpr double kForwardFactor = 2, kGradientFactor = 3;
  // Tensor cores sum products of codes with about 14 bits: a score, and LSE of a row with few keys, may be
  // off by several times 2^-14 of a sum of products, which is a few units.
  const double lse_limit = problem.spec.prologue.q_codes ? 4e-3 : 1e-3;
  std::vector<Comparison> comparisons;
  const auto judge = [&](std::string output, const std::vector<double>& g, const std::vector<double>& e,
                         const std::vector<double>& r, double factor) {
    const reference::Verdict verdict = reference::judge(g, e, r, factor);
    comparisons.push_back({std::move(output), verdict.error, verdict.limit});
  };
  judge("out", got.out, exact.out, rounded.out, kForwardFactor);
  const auto judge_rows = [&](std::string output, const std::vector<double>& g,
                              const std::vector<double>& e) {
    const double error =
        reference::max_abs_error(reference::existing_rows(problem, g), reference::existing_rows(problem, e));
    comparisons.push_back({std::move(output), error, lse_limit});
  };
  if (!problem.spec.score.is_weight()) judge_rows("lse", got.lse, exact.lse);
  if (problem.spec.epilogue.row_max) judge_rows("row_max", got.row_max, exact.row_max);
  if (problem.spec.pass == Pass::forward) return comparisons;
  judge("dq", got.dq, exact.dq, rounded.dq, kGradientFactor);
  judge("dk", got.dk, exact.dk, rounded.dk, kGradientFactor);
  judge("dv", got.dv, exact.dv, rounded.dv, kGradientFactor);
  if (problem.spec.sinks) {
    const reference::Verdict verdict =
        reference::judge_dsinks(problem.shape, got.dsinks, {exact.dsinks, exact.dsink_rows},
                                {rounded.dsinks, rounded.dsink_rows}, kGradientFactor);
    comparisons.push_back({"dsinks", verdict.error, verdict.limit});
  }
  for (std::size_t i = 0; i < exact.capture_grads.size(); ++i) {
    if (exact.capture_grads[i].empty()) continue;
    const reference::Verdict verdict =
        reference::judge_capture(problem.spec.dtype, got.capture_grads.at(i),
                                 {exact.capture_grads[i], exact.capture_squares[i], exact.capture_counts[i]},
                                 rounded.capture_grads[i], kGradientFactor);
    comparisons.push_back({"grad of " + problem.captures[i].name, verdict.error, verdict.limit});
  }
  return comparisons;
}

bool all_ok(const std::vector<Comparison>& comparisons) {
  for (const Comparison& comparison : comparisons)
    if (!comparison.ok()) return false;
  return true;
}

Json to_json(const Comparison& comparison) {
  // JSON has no infinity: an error that is none is null.
  const Json error = std::isfinite(comparison.error) ? Json(comparison.error) : Json(nullptr);
  return {
      {"output", comparison.output}, {"error", error}, {"limit", comparison.limit}, {"ok", comparison.ok()}};
}

namespace {

std::vector<double> normal_values(std::int64_t count, DType dtype, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = reference::round_to(dtype, normal(random));
  return values;
}

/// Q, K and V become codes times scales, where the spec has them.
void quantize(reference::Problem& problem) {
  const KernelSpec& spec = problem.spec;
  if (spec.decodes_kv())
    refuse(
        "the command makes K and V of 16 bits, e4m3, e5m2 and int8, and the spec is {}; call the library "
        "with "
        "such rows, or `flashjit inspect` the kernel",
        to_string(spec));
  if (!spec.has_scales()) return;
  const std::int64_t heads = problem.shape.heads_kv;
  const auto of_kv = [&](std::vector<double>& values, std::int64_t dim) {
    const std::int64_t rows = spec.varlen && !spec.kv.is_cache()
                                  ? std::ssize(values) / std::max<std::int64_t>(heads * dim, 1)
                                  : problem.shape.seqlen_kv;
    return reference::quantize(spec.kv_type(), spec.kv.key_scales, heads, rows, dim, values);
  };
  if (spec.prologue.q_codes) {
    // The queries of a KV head, one head after the other.
    const std::int64_t rows = std::ssize(problem.q) / std::max<std::int64_t>(heads * spec.head_dim, 1) /
                              (spec.varlen ? 1 : std::max<std::int64_t>(problem.shape.batch, 1));
    problem.q_scale = reference::quantize(spec.q_type(), false, heads, rows, spec.head_dim, problem.q);
  }
  problem.k_scale = of_kv(problem.k, spec.head_dim);
  problem.v_scale = of_kv(problem.v, spec.v_dim());
}

std::int64_t blocks_of(std::int64_t length, int block) { return (length + block - 1) / block; }

}  // namespace

reference::Problem random_problem(const KernelSpec& spec, const AttentionShape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  reference::Problem problem;
  problem.spec = spec;
  problem.shape = shape;
  std::int64_t queries = shape.batch * shape.heads_q * shape.seqlen_q;
  std::int64_t keys = shape.batch * shape.heads_kv * shape.seqlen_kv;
  if (spec.varlen) {
    problem.cu_seqlens_q = reference::random_offsets(shape.batch, shape.seqlen_q, 1, random());
    queries = shape.heads_q * problem.cu_seqlens_q.back();
  }
  if (spec.varlen && !spec.kv.is_cache()) {
    problem.cu_seqlens_kv = reference::random_offsets(shape.batch, shape.seqlen_kv, 2, random());
    keys = shape.heads_kv * problem.cu_seqlens_kv.back();
  }
  problem.q = normal_values(queries * spec.head_dim, spec.dtype, random);
  problem.k = normal_values(keys * spec.head_dim, spec.dtype, random);
  problem.v = spec.kv.shared_kv ? reference::first_columns(problem.k, spec.head_dim, spec.v_dim())
                                : normal_values(keys * spec.v_dim(), spec.dtype, random);
  if (spec.kv.has_lengths()) {
    std::uniform_int_distribution<std::int32_t> length(0, static_cast<std::int32_t>(shape.seqlen_kv));
    for (std::int64_t b = 0; b < shape.batch; ++b) problem.kv_lengths.push_back(length(random));
  }
  if (spec.kv.shared_prefix) {
    problem.prefix_length = reference::plausible_prefix(shape);
    reference::share_prefix(shape, problem.prefix_length, spec.head_dim, problem.k, problem.kv_lengths);
    reference::share_prefix(shape, problem.prefix_length, spec.v_dim(), problem.v, problem.kv_lengths);
  }
  quantize(problem);
  if (spec.pass == Pass::backward) problem.dout = normal_values(queries * spec.v_dim(), spec.dtype, random);
  if (spec.has_block_map()) {
    problem.map_batch = shape.batch;
    problem.map_heads = shape.heads_q;
    const std::int64_t cells = shape.batch * shape.heads_q * blocks_of(shape.seqlen_q, spec.block_map.q) *
                               blocks_of(shape.seqlen_kv, spec.block_map.kv);
    std::bernoulli_distribution attends(0.5);
    for (std::int64_t i = 0; i < cells; ++i) problem.block_map.push_back(attends(random));
  }
  if (spec.dropout) {
    problem.dropout_p = 0.2;
    problem.seed = random();
    problem.offset = random();
  }
  if (spec.sinks) problem.sinks = reference::random_sinks(shape.heads_q, random());
  if (spec.indices) {
    problem.index_batch = spec.varlen ? 1 : shape.batch;
    const std::int64_t rows = spec.varlen ? problem.cu_seqlens_q.back() : shape.batch * shape.seqlen_q;
    problem.indices = reference::random_indices(
        rows * shape.heads_kv, reference::plausible_top_k(shape.seqlen_kv), shape.seqlen_kv, random());
  }
  problem.spec.partial.running_state = spec.partial.running_state && spec.pass == Pass::forward;
  if (problem.spec.partial.running_state) {
    problem.state_out = normal_values(queries * spec.v_dim(), DType::fp32, random);
    problem.state_lse = normal_values(queries, DType::fp32, random);
    for (double& lse : problem.state_lse)  // of as many keys
      lse = reference::round_to(DType::fp32, lse + std::log(static_cast<double>(shape.seqlen_kv) + 1.0));
  }
  problem.captures = reference::plausible_captures(spec, shape, random());
  return problem;
}

namespace {

constexpr std::string_view kLengths = "--kv-lengths", kMap = "--block-map", kOffsetsQ = "--cu-seqlens-q",
                           kOffsetsKv = "--cu-seqlens-kv", kSinks = "--sinks";
constexpr auto is_on(std::string_view text) {
  return std::ranges::find(plan::kSpecOptions, text, &plan::SpecOption::text)->is_on;
}
constexpr std::array<OptionFile, 5> kOptionFiles{{
    {kLengths, "kvlen", is_on("kvlen"), "int32 [batch]"},
    {kMap, "map64x64", [](const AttentionSpec& spec) { return spec.has_block_map(); },
     "uint8 [batch or 1, heads or 1, block rows, block columns]"},
    {kOffsetsQ, "varlen", is_on("varlen"), "int32 [batch + 1]: the row at which each sequence of Q begins"},
    {kOffsetsKv, "varlen", is_on("varlen"), "int32 [batch + 1]: the same of K and V"},
    {kSinks, "sinks", is_on("sinks"), "float32 [heads]"},
}};

bool has_file(const InputFiles& files, std::string_view flag) {
  const auto found = files.of_options.find(flag);
  return found != files.of_options.end() && !found->second.empty();
}

/// Splits "name=rest".
std::pair<std::string, std::string> named(const std::string& text, const char* form) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    throw Error(ErrorCode::invalid_argument, fmt::format("{} is no {}", quoted(text), form));
  return {text.substr(0, equals), text.substr(equals + 1)};
}

/// The declaration of a name that must be a scalar, or must not.
expr::Declaration declaration_of(const KernelSpec& spec, const std::string& name, bool scalar) {
  std::vector<std::string> known;
  for (const expr::Declaration& d :
       expr::declarations(spec.score, spec.mask, spec.epilogue.out_mod, spec.prologue)) {
    if (d.is_scalar() != scalar) continue;
    if (d.name == name) return d;
    known.push_back(expr::to_string(d));
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("the spec's programs declare no {} {}; they declare {}",
                          scalar ? "scalar" : "captured tensor", quoted(name),
                          known.empty() ? "none" : fmt::format("{}", fmt::join(known, ", "))));
}

reference::Captured read_scalar(const KernelSpec& spec, const std::string& text) {
  const auto [name, value_text] = named(text, "\"name=value\"");
  const expr::Declaration d = declaration_of(spec, name, true);
  double value = 0;
  const char* end = value_text.data() + value_text.size();
  const auto [stop, error] = std::from_chars(value_text.data(), end, value);
  const bool is_number = error == std::errc() && stop == end;
  const bool fits = d.type != ElementType::int32 || reference::round_to(d.type, value) == value;
  if (!is_number || !fits)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is no value for '{}'", quoted(value_text), expr::to_string(d)));
  return {name, {}, {reference::round_to(d.type, value)}};
}

}  // namespace

void set_scalars(reference::Problem& problem, const std::vector<std::string>& texts) {
  std::set<std::string> given;
  for (const std::string& text : texts) {
    reference::Captured scalar = read_scalar(problem.spec, text);
    if (!given.insert(scalar.name).second)
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the scalar '{}' is given twice; give it once", scalar.name));
    const auto found = std::ranges::find(problem.captures, scalar.name, &reference::Captured::name);
    if (found == problem.captures.end())
      problem.captures.push_back(std::move(scalar));
    else
      *found = std::move(scalar);
  }
}

namespace {

using Shape = std::vector<std::int64_t>;

std::string describe(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

/// Values and sizes (batch, heads, length, dim) of one tensor.
struct Tensor {
  std::vector<double> values;
  std::array<std::int64_t, 4> size{};
};

Tensor read_tensor(const std::string& path, Layout layout, DType dtype) {
  const npy::Array array = npy::read(path_of(path));
  const bool real = array.type == npy::Type::float16 || array.type == npy::Type::float32 ||
                    array.type == npy::Type::float64;
  if (array.shape.size() != 4 || !real)
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("'{}' holds {} {}; a tensor is float16 or float32 with four dimensions, {}", path,
                    npy::to_string(array.type), describe(array.shape),
                    layout == Layout::bhsd ? "[batch, heads, length, dim]" : "[batch, length, heads, dim]"));
  Tensor tensor{npy::to_doubles(array), {array.shape[0], array.shape[1], array.shape[2], array.shape[3]}};
  if (layout == Layout::bshd) {
    tensor.values = swap_heads_and_length(tensor.values, array.shape);
    std::swap(tensor.size[1], tensor.size[2]);
  }
  for (double& value : tensor.values) value = reference::round_to(dtype, value);
  return tensor;
}

void check_size(const std::string& path, const char* dimension, std::int64_t got, std::int64_t wanted,
                const std::string& because) {
  if (got == wanted) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("'{}' has {} {}; it must be {}, {}", path, dimension, got, wanted, because));
}

/// int32 [count], where `count` is how messages call it: "batch" or "batch + 1".
std::vector<std::int32_t> read_lengths(const std::string& path, const char* count) {
  const npy::Array array = npy::read(path_of(path));
  if (array.type != npy::Type::int32 || array.shape.size() != 1)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("'{}' holds {} {}; it must be int32 [{}]", path, npy::to_string(array.type),
                            describe(array.shape), count));
  std::vector<std::int32_t> lengths;
  for (double value : npy::to_doubles(array)) lengths.push_back(static_cast<std::int32_t>(value));
  return lengths;
}

/// uint8 [rows, columns], or [batch or 1, heads or 1, rows, columns].
void read_map(const std::string& path, reference::Problem& problem) {
  const npy::Array array = npy::read(path_of(path));
  Shape shape = array.shape;
  if (shape.size() == 2) shape.insert(shape.begin(), {1, 1});
  if (array.type != npy::Type::uint8 || shape.size() != 4)
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format(
            "'{}' holds {} {}; a block map is uint8 [batch or 1, heads or 1, block rows, block columns]",
            path, npy::to_string(array.type), describe(array.shape)));
  const BlockSize block = problem.spec.block_map;
  if (block.q > 0 && block.kv > 0) {
    const std::string because = fmt::format("the blocks of {} queries by {} keys that cover {}", block.q,
                                            block.kv, to_string(problem.shape));
    check_size(path, "block rows", shape[2], blocks_of(problem.shape.seqlen_q, block.q), because);
    check_size(path, "block columns", shape[3], blocks_of(problem.shape.seqlen_kv, block.kv), because);
  }
  problem.map_batch = shape[0];
  problem.map_heads = shape[1];
  for (std::byte cell : array.bytes) problem.block_map.push_back(static_cast<std::uint8_t>(cell));
}

/// A tensor of a program, whose type is the declared one; the file's may be any that holds the same values.
reference::Captured read_capture(const KernelSpec& spec, const std::string& text) {
  const auto [name, path] = named(text, "\"name=file.npy\"");
  const expr::Declaration d = declaration_of(spec, name, false);
  const npy::Array array = npy::read(path_of(path));
  if (static_cast<int>(array.shape.size()) != d.rank)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("'{}' holds {} {}, but the program declares '{}'", path,
                            npy::to_string(array.type), describe(array.shape), expr::to_string(d)));
  reference::Captured captured{name, array.shape, npy::to_doubles(array)};
  const bool is_float = d.type <= ElementType::bf16;
  for (double& value : captured.values) {
    const double kept = reference::round_to(d.type, value);
    if (!is_float && kept != value)
      throw Error(ErrorCode::invalid_argument, fmt::format("'{}' holds {}, but the program declares '{}'",
                                                           path, value, expr::to_string(d)));
    value = kept;
  }
  return captured;
}

/// float32 [heads].
std::vector<double> read_sinks(const std::string& path) {
  const npy::Array array = npy::read(path_of(path));
  if (array.type != npy::Type::float32 || array.shape.size() != 1)
    throw Error(ErrorCode::invalid_argument, fmt::format("'{}' holds {} {}; sinks are float32 [heads]", path,
                                                         npy::to_string(array.type), describe(array.shape)));
  return npy::to_doubles(array);
}

std::int64_t longest_of(const std::vector<std::int32_t>& offsets) {
  std::int64_t longest = 0;
  for (std::size_t i = 1; i < offsets.size(); ++i)
    longest = std::max(longest, std::int64_t{offsets[i]} - offsets[i - 1]);
  return longest;
}

/// Says how the rows of a packed problem are split into sequences.
void read_packing(reference::Problem& problem, const InputFiles& files) {
  if (problem.shape.batch != 1)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("'{}' has batch {}; the spec says \"varlen\", whose sequences are packed into "
                            "[1, heads, rows, dim]",
                            files.q, problem.shape.batch));
  problem.cu_seqlens_q = read_lengths(files.of_options.at(kOffsetsQ), "batch + 1");
  problem.cu_seqlens_kv = read_lengths(files.of_options.at(kOffsetsKv), "batch + 1");
  problem.shape.batch = std::max<std::int64_t>(0, std::ssize(problem.cu_seqlens_q) - 1);
  problem.shape.seqlen_q = longest_of(problem.cu_seqlens_q);
  problem.shape.seqlen_kv = longest_of(problem.cu_seqlens_kv);
}

}  // namespace

std::span<const OptionFile> option_files() { return kOptionFiles; }

void check_files(const KernelSpec& spec, const InputFiles& files) {
  for (const OptionFile& file : kOptionFiles) {
    const bool given = has_file(files, file.flag), on = file.is_on(spec);
    if (given && !on)
      refuse("{} is given, but the spec has no \"{}\"; add it or leave the file out", file.flag, file.option);
    if (on && !given) refuse("the spec has \"{}\": give {}, {}", file.option, file.flag, file.holds);
  }
}

reference::Problem read_problem(const KernelSpec& spec, const InputFiles& files, Layout layout) {
  if (spec.kv.is_cache())
    throw Error(
        ErrorCode::invalid_argument,
        R"(the spec has a cache, but files have the keys in order: give "kvlen" or "varlen" instead)");
  for (const auto& [is_set, name] :
       {std::pair{spec.partial.running_state, "a running_state"}, {spec.indices, "indices"}})
    if (is_set)
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the spec has {}, which no file can give: leave it out", name));
  Tensor q = read_tensor(files.q, layout, spec.dtype);
  Tensor k = read_tensor(files.k, layout, spec.dtype);
  Tensor v = read_tensor(files.v, layout, spec.dtype);
  reference::Problem problem;
  problem.spec = spec;
  problem.spec.pass = files.dout.empty() ? Pass::forward : Pass::backward;
  problem.shape = {q.size[0], q.size[1], k.size[1], q.size[2], k.size[2]};
  problem.shape.validate();

  if (spec.epilogue.out_format.quantized())
    refuse("the spec stores O as {} and a file of O has its elements; leave out{{...}} away",
           to_string(spec.epilogue.out_format));
  const std::string from_spec = "as the spec says";
  const std::string like_q = fmt::format("as in '{}'", files.q);
  const std::string like_k = fmt::format("as in '{}'", files.k);
  check_size(files.q, "head dimension", q.size[3], spec.head_dim, from_spec);
  check_size(files.k, "head dimension", k.size[3], spec.head_dim, from_spec);
  check_size(files.v, "head dimension", v.size[3], spec.v_dim(), from_spec);
  check_size(files.k, "batch", k.size[0], q.size[0], like_q);
  check_size(files.v, "batch", v.size[0], q.size[0], like_q);
  check_size(files.v, "heads", v.size[1], k.size[1], like_k);
  check_size(files.v, "length", v.size[2], k.size[2], like_k);
  problem.q = std::move(q.values);
  problem.k = std::move(k.values);
  problem.v = std::move(v.values);
  quantize(problem);

  if (!files.dout.empty()) {
    Tensor dout = read_tensor(files.dout, layout, spec.dtype);
    check_size(files.dout, "batch", dout.size[0], q.size[0], like_q);
    check_size(files.dout, "heads", dout.size[1], q.size[1], like_q);
    check_size(files.dout, "length", dout.size[2], q.size[2], like_q);
    check_size(files.dout, "head dimension", dout.size[3], spec.v_dim(), from_spec);
    problem.dout = std::move(dout.values);
  }
  if (has_file(files, kOffsetsQ)) read_packing(problem, files);
  if (has_file(files, kLengths)) problem.kv_lengths = read_lengths(files.of_options.at(kLengths), "batch");
  if (has_file(files, kSinks)) problem.sinks = read_sinks(files.of_options.at(kSinks));
  for (const std::string& text : files.captures) {
    reference::Captured capture = read_capture(spec, text);
    if (std::ranges::find(problem.captures, capture.name, &reference::Captured::name) !=
        problem.captures.end())
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the tensor '{}' is given twice; give it once", capture.name));
    problem.captures.push_back(std::move(capture));
  }
  set_scalars(problem, files.scalars);
  if (has_file(files, kMap)) read_map(files.of_options.at(kMap), problem);
  return problem;
}

std::vector<double> swap_heads_and_length(const std::vector<double>& values,
                                          const std::vector<std::int64_t>& shape) {
  const std::int64_t b = shape[0], x = shape[1], y = shape[2], d = shape[3];
  std::vector<double> swapped(values.size());
  for (std::int64_t i = 0; i < b; ++i)
    for (std::int64_t j = 0; j < x; ++j)
      for (std::int64_t l = 0; l < y; ++l)
        std::copy_n(values.begin() + ((i * x + j) * y + l) * d, d,
                    swapped.begin() + ((i * y + l) * x + j) * d);
  return swapped;
}

}  // namespace flashjit::command

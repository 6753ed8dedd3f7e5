#include "flashjit/caches.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "call/append_arguments.hpp"
#include "call/arguments.hpp"
#include "plan/analysed_spec.hpp"
#include "support/overflow.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

static_assert(kMaxCaches == kMaxPartialStates);

/// What the workspace holds: of each cache O and LSE, then what the calls need, which run one after the
/// other.
struct PartPlaces {
  std::size_t out = 0, lse = 0;  ///< bytes of one part of each
  std::size_t scratch = 0;       ///< bytes

  std::size_t parts(std::size_t caches) const { return caches * (out + lse); }
};

/// Runs `body` of a cache, whose errors say which it is.
template <class Body>
auto of_cache(std::size_t cache, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("caches[{}]: {}", cache, error.message()), error.detail());
  }
}

void check_of_one(const CacheArgs& cache, bool first) {
  const ForwardArgs& args = cache.args;
  const auto is_the_calls = [](const char* name, const void* given) {
    if (given) refuse("{} is given, but it is one for all caches: give it beside `caches`.", name);
  };
  is_the_calls("out", args.out.data);
  is_the_calls("lse", args.lse);
  is_the_calls("workspace", args.workspace.data);
  const auto is_of_whole = [](const char* name, bool given) {
    if (given) refuse("the spec has {}, which parts of a softmax do not: leave it out.", name);
  };
  is_of_whole("a score of weights()", cache.spec.score.is_weight());
  is_of_whole("out_mod", !cache.spec.epilogue.out_mod.empty());
  is_of_whole("row_max", cache.spec.epilogue.row_max);
  is_of_whole("running_state", cache.spec.partial.running_state);
  if (const char* once = plan::counted_once(cache.spec); once && !first)
    refuse("{} has {}, which count once: give them with caches[0] alone.", to_string(cache.spec), once);
}

/// What can be said of the caches without a device.
void check_caches(const OverArgs& args) {
  if (args.caches.empty() || args.caches.size() > kMaxCaches)
    refuse("caches has {} entries: give 1 to {}.", args.caches.size(), kMaxCaches);
  const CacheArgs& first = args.caches[0];
  for (std::size_t i = 0; i < args.caches.size(); ++i)
    of_cache(i, [&] {
      const CacheArgs& cache = args.caches[i];
      check_of_one(cache, i == 0);
      if (cache.spec.dtype != first.spec.dtype)
        refuse("the spec has {}, and that of caches[0] {}: all have the same.", to_string(cache.spec.dtype),
               to_string(first.spec.dtype));
      if (cache.spec.v_dim() != first.spec.v_dim())
        refuse("V has {} columns, and that of caches[0] {}: all have the same.", cache.spec.v_dim(),
               first.spec.v_dim());
      const auto &q = cache.args.q.size, &of_first = first.args.q.size;
      if (!std::equal(q.begin(), q.begin() + 3, of_first.begin()))
        refuse("q is [{}, {}, {}, {}], and that of caches[0] [{}, {}, {}, {}]: all have the same queries.",
               q[0], q[1], q[2], q[3], of_first[0], of_first[1], of_first[2], of_first[3]);
    });
}

void check_out(const OverArgs& args) {
  const auto &q = args.caches[0].args.q.size, &out = args.out.size;
  const std::int64_t columns = args.caches[0].spec.v_dim();
  if (out != std::array{q[0], q[1], q[2], columns})
    refuse("out is [{}, {}, {}, {}], but the caches' O is [{}, {}, {}, {}]: q's sizes with the columns of V.",
           out[0], out[1], out[2], out[3], q[0], q[1], q[2], columns);
}

/// Bytes of floats, rounded up to what workspaces are aligned to.
std::size_t bytes_of(const ConstTensorView& q, std::int64_t columns) {
  constexpr std::int64_t kAligned = 256;
  std::int64_t bytes = 4;
  for (const std::int64_t size : {q.size[0], q.size[1], q.size[2], columns})
    if (size < 0 || multiply_overflows(bytes, size, bytes) || bytes > std::int64_t{1} << 58)
      refuse("q is [{}, {}, {}, {}]: give sizes of memory that there can be.", q.size[0], q.size[1],
             q.size[2], q.size[3]);
  return static_cast<std::size_t>((bytes + kAligned - 1) / kAligned * kAligned);
}

AttentionSpec spec_of_part(const CacheArgs& cache) {
  AttentionSpec spec = cache.spec;
  spec.partial.fp32_out = true;
  return spec;
}

PartPlaces places_of(Runtime& runtime, const OverArgs& args) {
  PartPlaces places;
  const CacheArgs& first = args.caches[0];
  const bool alone = args.caches.size() == 1;
  if (!alone) places = {bytes_of(first.args.q, first.spec.v_dim()), bytes_of(first.args.q, 1)};
  for (std::size_t i = 0; i < args.caches.size(); ++i)
    places.scratch = std::max(places.scratch, of_cache(i, [&] {
                                const CacheArgs& cache = args.caches[i];
                                const AttentionSpec spec = alone ? cache.spec : spec_of_part(cache);
                                return runtime.workspace_bytes(spec, shape_of(spec, cache.args));
                              }));
  return places;
}

/// The calls that one is made of.
struct PartCalls {
  std::array<AttentionSpec, kMaxCaches> specs;
  std::array<ForwardArgs, kMaxCaches> parts;
  std::array<PartialState, kMaxCaches> states;
  AttentionSpec merge_spec;
  MergeArgs merge;
};

ForwardArgs part_of(const OverArgs& args, std::size_t i, const PartPlaces& places) {
  const CacheArgs& cache = args.caches[i];
  char* const memory = static_cast<char*>(args.workspace.data);
  const std::size_t begin = places.parts(args.caches.size());
  ForwardArgs part = cache.args;
  part.workspace = {memory + begin, args.workspace.bytes - begin};
  part.zero_unused_rows = cache.spec.varlen;  // what is merged is defined
  const auto& q = cache.args.q.size;
  part.out = TensorView::bhsd(memory + places.parts(i), q[0], q[1], q[2], cache.spec.v_dim(), DType::fp32);
  part.lse = reinterpret_cast<float*>(memory + places.parts(i) + places.out);
  part.lse_strides = {};
  return part;
}

void make_calls(const OverArgs& args, const PartPlaces& places, PartCalls& calls) {
  const std::size_t count = args.caches.size();
  for (std::size_t i = 0; i < count; ++i) {
    calls.specs[i] = spec_of_part(args.caches[i]);
    const ForwardArgs& part = calls.parts[i] = part_of(args, i, places);
    calls.states[i] = {part.out, part.lse};
  }
  const AttentionSpec& first = args.caches[0].spec;
  calls.merge_spec = {.dtype = first.dtype, .head_dim = first.v_dim()};
  calls.merge = {.states = {calls.states.data(), count},
                 .out = args.out,
                 .lse = args.lse,
                 .lse_strides = args.lse_strides,
                 .states_type = DType::fp32,
                 .out_type = first.out_type()};
}

/// One cache writes O and LSE itself.
void attend_alone(Runtime& runtime, const OverArgs& args, Stream stream) {
  ForwardArgs alone = args.caches[0].args;
  alone.out = args.out;
  alone.lse = args.lse;
  alone.lse_strides = args.lse_strides;
  alone.workspace = args.workspace;
  alone.zero_unused_rows = args.caches[0].spec.varlen;
  of_cache(0, [&] { runtime.forward(args.caches[0].spec, alone, stream); });
}

}  // namespace

std::size_t attention_over_workspace_bytes(Runtime& runtime, const OverArgs& args) {
  check_caches(args);
  const PartPlaces places = places_of(runtime, args);
  return places.parts(args.caches.size()) + places.scratch;
}

void attention_over(Runtime& runtime, const OverArgs& args, Stream stream) {
  check_caches(args);
  const std::size_t count = args.caches.size();
  if (count == 1) return attend_alone(runtime, args, stream);
  check_out(args);
  const PartPlaces places = places_of(runtime, args);
  check_workspace(args.workspace, places.parts(count) + places.scratch);
  PartCalls calls;
  make_calls(args, places, calls);
  for (std::size_t i = 0; i < count; ++i)
    of_cache(i, [&] { check_arguments(calls.specs[i], calls.parts[i]); });
  check_arguments(calls.merge_spec, calls.merge);
  for (std::size_t i = 0; i < count; ++i)
    of_cache(i, [&] { runtime.forward(calls.specs[i], calls.parts[i], stream); });
  runtime.merge(calls.merge_spec, calls.merge, stream);
}

}  // namespace flashjit

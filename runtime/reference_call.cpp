#include "reference_call.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arguments.hpp"
#include "reference/reference.hpp"
#include "support/small_float.hpp"

namespace flashjit {
namespace {

double read_element(DType dtype, const void* data, std::int64_t index) {
  switch (dtype) {
    case DType::fp16:
      return Fp16::decode(static_cast<const std::uint16_t*>(data)[index]);
    case DType::bf16:
      return Bf16::decode(static_cast<const std::uint16_t*>(data)[index]);
    case DType::fp32:
      break;
  }
  return static_cast<const float*>(data)[index];
}

void write_element(DType dtype, void* data, std::int64_t index, double value) {
  switch (dtype) {
    case DType::fp16:
      static_cast<std::uint16_t*>(data)[index] = Fp16::encode(value);
      return;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[index] = Bf16::encode(value);
      return;
    case DType::fp32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
  }
}

/// Calls visit(place, offset) for every element in C order: its place in a contiguous tensor and in memory.
template <class View, class Visit>
void for_each_element(const View& view, Visit&& visit) {
  std::int64_t place = 0;
  for (std::int64_t b = 0; b < view.size[0]; ++b)
    for (std::int64_t h = 0; h < view.size[1]; ++h)
      for (std::int64_t i = 0; i < view.size[2]; ++i)
        for (std::int64_t d = 0; d < view.size[3]; ++d)
          visit(place++, b * view.stride[0] + h * view.stride[1] + i * view.stride[2] + d);
}

std::vector<double> gather(DType dtype, const ConstTensorView& view) {
  std::vector<double> values(
      static_cast<std::size_t>(view.size[0] * view.size[1] * view.size[2] * view.size[3]));
  for_each_element(view, [&](std::int64_t place, std::int64_t offset) {
    values[place] = read_element(dtype, view.data, offset);
  });
  return values;
}

void scatter(DType dtype, const std::vector<double>& values, const TensorView& view) {
  if (values.empty()) return;
  for_each_element(view, [&](std::int64_t place, std::int64_t offset) {
    write_element(dtype, view.data, offset, values[place]);
  });
}

template <class Args>
reference::Problem problem_of(const AttentionSpec& spec, const Args& args) {
  reference::Problem problem{.spec = spec,
                             .shape = shape_of(args),
                             .q = gather(spec.dtype, args.q),
                             .k = gather(spec.dtype, args.k),
                             .v = gather(spec.dtype, args.v),
                             .softmax_scale = args.softmax_scale,
                             .dropout_p = args.dropout_p,
                             .seed = args.seed,
                             .offset = args.offset};
  if (spec.kv_lengths) problem.kv_lengths.assign(args.kv_lengths, args.kv_lengths + problem.shape.batch);
  if (spec.has_block_map()) {
    const auto& [data, size] = args.block_map;
    problem.block_map.assign(data, data + size[0] * size[1] * size[2] * size[3]);
    problem.map_batch = size[0];
    problem.map_heads = size[1];
  }
  return problem;
}

}  // namespace

void reference_forward(const AttentionSpec& spec, const ForwardArgs& args) {
  check_arguments(spec, args);
  const reference::Forward result = reference::forward(problem_of(spec, args));
  scatter(spec.dtype, result.out, args.out);
  if (args.lse) std::copy(result.lse.begin(), result.lse.end(), args.lse);
}

void reference_backward(const AttentionSpec& spec, const BackwardArgs& args) {
  check_arguments(spec, args);
  reference::Problem problem = problem_of(spec, args);
  problem.dout = gather(spec.dtype, args.dout);
  const reference::Backward result = reference::backward(problem);
  scatter(spec.dtype, result.dq, args.dq);
  scatter(spec.dtype, result.dk, args.dk);
  scatter(spec.dtype, result.dv, args.dv);
}

}  // namespace flashjit

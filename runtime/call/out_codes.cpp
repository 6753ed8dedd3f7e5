#include "call/out_codes.hpp"

#include <fmt/ranges.h>

#include <array>

#include "call/apart.hpp"
#include "call/block_scales.hpp"
#include "call/tensor_checks.hpp"
#include "support/refuse.hpp"
#include "support/swizzled_scales.hpp"

namespace flashjit {
namespace {

std::int64_t blocks_of_head(const AttentionSpec& spec) {
  return spec.epilogue.out_format.row(spec.v_dim()).scale_columns;
}

/// Swizzled scales are one matrix of bytes, without gaps.
void check_swizzled(const AttentionSpec& spec, const ForwardArgs& args) {
  const TensorView& scales = args.out_block_scale;
  const std::array<std::int64_t, 4> wanted = swizzled_scales_of(spec, args.out, nullptr).size;
  if (!memory_of(args.out)) return;
  if (!scales.data || scales.size != wanted || scales.stride[2] != wanted[3] || scales.stride[3] != 1)
    refuse(
        "out_block_scale is [{}] with strides [{}], but the spec has swizzled_scales: give e4m3 [{}], "
        "contiguous.",
        fmt::join(scales.size, ", "), fmt::join(scales.stride, ", "), fmt::join(wanted, ", "));
  const Placed of_scales("out_block_scale", scales, 1), of_rows("out", args.out, 1);
  flashjit::check_apart({&of_scales, 1}, {&of_rows, 1});
}

}  // namespace

TensorView swizzled_scales_of(const AttentionSpec& spec, const TensorView& out, void* data) {
  return TensorView::bhsd(data, 1, 1, rows_of_scales(out.size[0] * out.size[2]),
                          out.size[1] * blocks_of_head(spec));
}

void check_out_scales(const AttentionSpec& spec, const ForwardArgs& args) {
  const KvFormat& format = spec.epilogue.out_format;
  if (args.out_scale && !format.has_argument())
    refuse("out_scale is given, but {}: set spec.epilogue.out_format to e4m3, or leave it out.",
           format.quantized() ? fmt::format("O is {}, whose scales the kernel finds", to_string(format))
                              : "O is not stored as codes");
  if (!args.out_scale && format.has_argument() && memory_of(args.out))
    refuse("out_scale is null, but O is stored as {}: give one float in device memory.", to_string(format));
  check_pointer("out_scale", args.out_scale, alignof(float));
  if (spec.epilogue.swizzled_scales)
    check_swizzled(spec, args);
  else
    check_block_scales("out_block_scale", "out", format, spec.v_dim(), args.out, args.out_block_scale, true);
}

void set_out_scales(Params& params, const AttentionSpec& spec, const ForwardArgs& args) {
  if (!spec.epilogue.out_format.quantized()) return;
  params.out_scale = args.out_scale;
  params.out_block_scale = tensor_param(args.out_block_scale);
  if (!spec.epilogue.swizzled_scales) return;
  params.out_block_scale.stride_b = args.out.size[2];
  params.out_block_scale.stride_h = blocks_of_head(spec) * kScaleTileRows;
  params.out_block_scale.stride_s = args.out_block_scale.size[3] * kScaleTileRows;
}

}  // namespace flashjit

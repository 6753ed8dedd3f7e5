#include "call/out_codes.hpp"

#include "call/block_scales.hpp"
#include "call/tensor_checks.hpp"
#include "support/refuse.hpp"

namespace flashjit {

void check_out_scales(const AttentionSpec& spec, const ForwardArgs& args) {
  const KvFormat& format = spec.epilogue.out_format;
  if (args.out_scale && !format.has_argument())
    refuse("out_scale is given, but {}: set spec.epilogue.out_format to e4m3, or leave it out.",
           format.quantized() ? fmt::format("O is {}, whose scales the kernel finds", to_string(format))
                              : "O is not stored as codes");
  if (!args.out_scale && format.has_argument() && memory_of(args.out))
    refuse("out_scale is null, but O is stored as {}: give one float in device memory.", to_string(format));
  check_pointer("out_scale", args.out_scale, alignof(float));
  check_block_scales("out_block_scale", "out", format, spec.v_dim(), args.out, args.out_block_scale, true);
}

void set_out_scales(Params& params, const AttentionSpec& spec, const ForwardArgs& args) {
  if (!spec.epilogue.out_format.quantized()) return;
  params.out_scale = args.out_scale;
  params.out_block_scale = tensor_param(args.out_block_scale);
}

}  // namespace flashjit

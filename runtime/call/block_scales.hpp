// Scales of blocks that are in a tensor of their own, k_block_scale and v_block_scale.
#pragma once

#include "flashjit/runtime.hpp"

namespace flashjit {

/// Whether the tensor fits `rows`, which have `dim` columns in that format: [pages or batch, heads, rows,
/// scales and then zero points], of the scales' type, with a row for each key or each of the format's groups
/// of keys. `rows_name` and `name` are the caller's.
void check_block_scales(const char* name, const char* rows_name, const KvFormat& format, int dim,
                        const ConstTensorView& rows, const ConstTensorView& scales, bool written = false);

}  // namespace flashjit

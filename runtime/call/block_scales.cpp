#include "call/block_scales.hpp"

#include <fmt/ranges.h>

#include <array>
#include <string>

#include "call/apart.hpp"
#include "call/tensor_checks.hpp"
#include "support/kv_names.hpp"
#include "support/refuse.hpp"

namespace flashjit {

void check_block_scales(const char* name, const char* rows_name, const KvFormat& format, int dim,
                        const ConstTensorView& rows, const ConstTensorView& scales, bool written) {
  const bool given = scales.data || scales.size != std::array<std::int64_t, 4>{};
  if (!format.has_block_scales()) {
    if (given)
      refuse(
          "{} is given, but {} is {}, whose scales are no tensor of their own: leave it out, or give a "
          "format with apart.",
          name, rows_name, format.quantized() ? to_string(format) : "not quantized");
    return;
  }
  const KvRow row = format.row(dim);
  const std::int64_t keys = std::max(format.keys, 1);
  const std::array<std::int64_t, 4> wanted = {rows.size[0], rows.size[1], (rows.size[2] + keys - 1) / keys,
                                              row.scale_columns};
  const std::string type(name_of(format.scale_type));
  const bool empty = rows.size[0] == 0 || rows.size[1] == 0 || rows.size[2] == 0;
  if (!given && empty) return;
  if (!given)
    refuse("{} is not given, but {} is {}, whose scales are in a tensor of their own: give {} [{}].", name,
           rows_name, to_string(format), type, fmt::join(wanted, ", "));
  if (scales.size != wanted)
    refuse("{} is [{}], but {} is {}: give {} [{}], {}{}.", name, fmt::join(scales.size, ", "), rows_name,
           to_string(format), type, fmt::join(wanted, ", "),
           format.keys > 0 ? fmt::format("a row for {} keys, with the scale of each column", keys)
                           : "a row for each key, with the scale of each block",
           format.zero == KvFormat::Zero::none ? "" : " and then the zero points");
  const int size = size_of(format.scale_type);
  if (scales.dtype && to_string(*scales.dtype) != type)
    refuse("{} is {}, but the scales of {} are {}: give such a tensor.", name, to_string(*scales.dtype),
           to_string(format), type);
  const auto same = [](std::int64_t n) { return Size{n, nullptr}; };
  check_tensor(name, scales, {same(wanted[0]), same(wanted[1]), same(wanted[2]), same(wanted[3])}, size,
               written ? Access::write : Access::read, row.scale_alignment);
  if (!written) return;
  const Placed of_scales(name, scales, size), of_rows(rows_name, rows, 1);
  check_apart({&of_scales, 1}, {&of_rows, 1});
}

}  // namespace flashjit

#include "plan/takes_dtype.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

namespace flashjit::plan {
namespace {

std::string names_of(std::initializer_list<DType> types) {
  std::vector<std::string> names;
  for (const DType type : types) names.push_back(to_string(type));
  return fmt::format("{}", fmt::join(names, " and "));
}

}  // namespace

Support takes_dtype(std::initializer_list<DType> listed, std::initializer_list<DType> of_kv,
                    const AttentionSpec& spec) {
  if (std::ranges::find(listed, spec.dtype) == listed.end())
    return Support::no(
        fmt::format("its kernels take {}, the spec has {}", names_of(listed), to_string(spec.dtype)));
  const DType kv = spec.kv_type();
  if (kv == spec.dtype || std::ranges::find(of_kv, kv) != of_kv.end()) return Support::yes();
  const std::string taken = of_kv.size() == 0 ? "the type of Q" : "that of Q, " + names_of(of_kv);
  return Support::no(fmt::format("its kernels take K and V of {}, the spec has {}", taken, to_string(kv)));
}

}  // namespace flashjit::plan

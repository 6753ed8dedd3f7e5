#include "plan/takes_dtype.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

namespace flashjit::plan {

Support takes_dtype(std::initializer_list<DType> listed, const AttentionSpec& spec) {
  if (std::ranges::find(listed, spec.dtype) != listed.end()) return Support::yes();
  std::vector<std::string> names;
  for (const DType dtype : listed) names.push_back(to_string(dtype));
  return Support::no(
      fmt::format("its kernels take {}, the spec has {}", fmt::join(names, " and "), to_string(spec.dtype)));
}

}  // namespace flashjit::plan

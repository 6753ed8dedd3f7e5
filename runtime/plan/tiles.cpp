#include "plan/tiles.hpp"

#include <fmt/format.h>

namespace flashjit::plan {

Entry family_entry(Family family, const std::string& name, const std::string& header, int threads) {
  return {.name = name,
          .header = fmt::format("flashjit/{}/{}.cuh", to_string(family), header),
          .function = fmt::format("flashjit::{}::{}", to_string(family), name),
          .threads = threads};
}

Entry auxiliary_entry(const std::string& name, const std::string& header) {
  return {.name = name,
          .header = fmt::format("flashjit/auxiliary/{}.cuh", header.empty() ? name : header),
          .function = "flashjit::auxiliary::" + name,
          .threads = kAuxiliaryThreads};
}

}  // namespace flashjit::plan

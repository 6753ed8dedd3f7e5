// Which members of Params a kernel has, and where: the host has all of them.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/kernel_plan.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {

/// The same for all kernels of a plan.
struct ParamsLayout {
  /// Bytes of the host's Params. A kernel's are all parts, one behind the other.
  struct Part {
    std::size_t begin, bytes;
  };
  std::vector<Part> parts;
  std::size_t bytes = 0;  ///< of a kernel's Params
  /// The macros that templates/common/params.cuh wants of a rendered source: names and values.
  std::vector<std::pair<std::string, std::string>> macros;
};

ParamsLayout params_layout(const KernelPlan& kernel);

/// What a launch takes. `Struct` is Params, or begins with them; its other members come behind, as they are.
template <class Struct>
class PackedParams {
 public:
  PackedParams(const ParamsLayout& layout, const Struct& params) {
    const auto* from = reinterpret_cast<const std::byte*>(&params);
    std::byte* to = bytes_;
    for (const ParamsLayout::Part& part : layout.parts) {
      std::memcpy(to, from + part.begin, part.bytes);
      to += part.bytes;
    }
    std::memcpy(to, from + sizeof(Params), sizeof(Struct) - sizeof(Params));
    size_ = static_cast<std::size_t>(to - bytes_) + sizeof(Struct) - sizeof(Params);
  }
  std::span<const std::byte> bytes() const { return {bytes_, size_}; }
  const void* data() const { return bytes_; }

 private:
  alignas(Struct) std::byte bytes_[sizeof(Struct)];
  std::size_t size_;
};

}  // namespace flashjit::plan

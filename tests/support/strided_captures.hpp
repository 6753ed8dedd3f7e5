// Captures whose elements lie in memory in another order than their indices say.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reference/inputs.hpp"
#include "reference/programs.hpp"
#include "tests/support/gpu_support.hpp"

namespace flashjit::test {

/// A tensor with its first dimension innermost, a gap behind each element, and stride 0 along dimensions in
/// which nothing changes: transposed and expanded.
struct Strided {
  std::vector<double> memory = {};
  std::array<std::int64_t, kMaxCaptureDims> stride = {};

  Strided(const std::vector<std::int64_t>& size, const std::vector<double>& values) {
    std::int64_t next = 2;
    for (std::size_t d = 0; d < size.size(); ++d) {
      if (is_expanded(size, values, d)) continue;
      stride[d] = next;
      next *= size[d];
    }
    memory.assign(next, kGap);
    for (std::size_t i = 0; i < values.size(); ++i) memory[place(size, i)] = values[i];
  }

 private:
  static constexpr double kGap = 77;  // never read

  static std::size_t step(const std::vector<std::int64_t>& size, std::size_t dimension) {
    std::size_t step = 1;
    for (std::size_t d = dimension + 1; d < size.size(); ++d) step *= size[d];
    return step;
  }
  static std::size_t index(const std::vector<std::int64_t>& size, std::size_t i, std::size_t dimension) {
    return i / step(size, dimension) % size[dimension];
  }
  static bool is_expanded(const std::vector<std::int64_t>& size, const std::vector<double>& values,
                          std::size_t dimension) {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i] != values[i - index(size, i, dimension) * step(size, dimension)]) return false;
    return true;
  }
  std::size_t place(const std::vector<std::int64_t>& size, std::size_t i) const {
    std::size_t at = 0;
    for (std::size_t d = 0; d < size.size(); ++d) at += index(size, i, d) * stride[d];
    return at;
  }
};

/// A call's captures, the tensors among them strided.
class StridedCaptures {
 public:
  StridedCaptures() = default;
  /// `contiguous`: the same captures, whose gradients are used.
  StridedCaptures(std::span<const Capture> contiguous, const std::vector<reference::Captured>& captures)
      : view_(contiguous.begin(), contiguous.end()) {
    for (std::size_t i = 0; i < view_.size(); ++i) {
      if (view_[i].rank == 0) continue;
      const Strided made(captures[i].size, captures[i].values);
      memory_.push_back(to_device(reference::encode(*view_[i].type, made.memory)));
      view_[i].data = memory_.back().data();
      view_[i].stride = made.stride;
    }
  }
  std::span<const Capture> view() const { return view_; }

 private:
  std::vector<Capture> view_;
  std::vector<device::DeviceBuffer> memory_;
};

}  // namespace flashjit::test

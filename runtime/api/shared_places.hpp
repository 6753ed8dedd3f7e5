// The memory of a shared sequence's calls: tensors of a rank's rows, and the places of its workspace.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "api/shared_transfers.hpp"
#include "flashjit/tensor.hpp"

namespace flashjit {

/// Rows of a tensor [b, h, rows, dim] in memory.
struct Rows {
  void* data;
  std::int64_t heads, rows;
  int dim, element;  ///< bytes

  TensorView view(std::int64_t batch, std::int64_t begin, std::int64_t count) const {
    return {static_cast<char*>(data) + begin * dim * element,
            {batch, heads, count, dim},
            {heads * rows * dim, rows * dim, dim, 1}};
  }
};

constexpr std::size_t kPlaceAlignment = 256;

/// Hands out a workspace, or with none counts the bytes.
class Places {
 public:
  explicit Places(void* data) : data_(static_cast<char*>(data)) {}
  template <class T = void>
  T* take(std::size_t bytes) {
    char* const place = data_ ? data_ + used_ : nullptr;
    used_ += (bytes + kPlaceAlignment - 1) / kPlaceAlignment * kPlaceAlignment;
    return reinterpret_cast<T*>(place);
  }
  /// None if nothing is needed: the workspace may end here.
  Workspace take_workspace(std::size_t bytes) { return bytes ? Workspace{take(bytes), bytes} : Workspace{}; }
  std::size_t used() const { return used_; }

 private:
  char* data_;
  std::size_t used_ = 0;
};

struct ForwardPlaces {
  std::array<KvBlock, 2> blocks;  ///< ring: that under way and that at work
  KvBlock all;                    ///< all_gather: every rank's
  void* state;                    ///< O of all rows, which calls join in place
  float* lse;                     ///< of each segment
  Workspace kernels;
};

struct BackwardPlaces {
  std::array<KvBlock, 2> blocks, sums;
  KvBlock all, all_sums;
  void* dq;
  float* zeros;  ///< the LSE of sums that merge() rounds
  Workspace kernels;
};

/// Where ranks share heads: all rows of this rank's heads.
struct HeadPlaces {
  void *q, *out, *dout = nullptr, *dq = nullptr;
  KvBlock kv, dkv = {};
};

}  // namespace flashjit

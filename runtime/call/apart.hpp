// Where the tensors of a call lie: what is written shares no memory with what is read.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "flashjit/runtime.hpp"

namespace flashjit {

struct RowSizes;

/// What a view's elements lie between: its first byte and the one behind the last.
struct Extent {
  std::uintptr_t begin = 0, end = 0;
};
Extent extent_of(const ConstTensorView& tensor, int element_size);

/// Where a tensor of a call lies. Without data, or with sizes and strides that its own check refuses,
/// nowhere.
struct Placed {
  Placed() = default;
  using Numbers = std::span<const std::int64_t>;
  Placed(std::string_view name, const void* data, Numbers size, Numbers stride, int element_size);
  Placed(std::string_view name, const ConstTensorView& tensor, int element_size);
  /// Contiguous.
  Placed(std::string_view name, const void* data, std::int64_t elements, int element_size);

  std::string_view name;
  Extent extent;
  bool dense = false;  ///< whether all bytes of the extent are elements
  int element_size = 1;
  std::array<std::int64_t, 4> size{}, stride{};  ///< of a view of four dimensions; else zeros
};
/// A float for each row; without data no memory.
Placed placed_rows(const char* name, const float* data, const RowStrides& strides, const RowSizes& sizes);

/// Whether two tensors have memory in common. A dense one shares some bytes of one that begins or ends in it.
/// Two tensors with gaps that begin at one place do, and views of one buffer may.
bool certainly_share(const Placed& a, const Placed& b);

/// Refuses written memory that certainly is another tensor's, too, written or read. Rows of two tensors may
/// alternate.
void check_apart(std::span<const Placed> written, std::span<const Placed> read);

/// The same of all that both passes write, and read besides tangents.
void check_apart(const AttentionSpec& spec, const AttentionShape& shape, const ForwardArgs& args);
void check_apart(const AttentionSpec& spec, const AttentionShape& shape, const BackwardArgs& args);
/// The same places in lists, without names and without tensors that are not given.
struct CallPlaces {
  std::vector<Placed> written, read;
};
CallPlaces places_of(const AttentionSpec& spec, const AttentionShape& shape, const ForwardArgs& args);
CallPlaces places_of(const AttentionSpec& spec, const AttentionShape& shape, const BackwardArgs& args);
/// Checks append() in the same way. It leaves out two pairs: q_out may be q, and rows of K and V may come
/// from the caches. `same_rows`: whether both caches get them.
void check_apart(const AttentionSpec& spec, const AttentionShape& shape, const AppendArgs& args,
                 bool same_rows);

}  // namespace flashjit

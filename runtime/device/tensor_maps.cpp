#include "device/tensor_maps.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>

#include "plan/tiles.hpp"

namespace flashjit::device {
namespace {

constexpr int kRank = 4;  // of a view
constexpr std::size_t kMostDimensions = 5;
constexpr int kBoxColumns = 64;        // of 16 bits: 128 bytes, the width of the swizzle
constexpr cuuint64_t kAnyStride = 16;  // where no index uses it: callers may have left anything in it

[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Driver& driver, CUresult result, const char* name,
                                                   const ConstTensorView& tensor) {
  throw Error(ErrorCode::unsupported,
              fmt::format("TMA cannot copy {} of sizes [{}] with strides [{}]: {}. Give strides that are "
                          "multiples of 16 bytes and less than 2^40 bytes, or prepare() the spec with a "
                          "configuration of family sm80 without tma.",
                          name, fmt::join(tensor.size, ", "), fmt::join(tensor.stride, ", "),
                          driver.describe(result)));
}

CUtensorMapDataType element_type(DType dtype) {
  switch (dtype) {
    case DType::fp16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::e4m3:
    case DType::e5m2:
    case DType::int8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      throw Error(ErrorCode::internal, fmt::format("no kernel copies {} by TMA", to_string(dtype)));
  }
}

cuuint64_t bytes_of(CUtensorMapDataType type) {
  if (type == CU_TENSOR_MAP_DATA_TYPE_UINT8) return 1;
  return type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ? 4 : 2;
}

/// A dimension of a tensor, the fastest first: its size, its stride in elements, and how much of it is copied
/// at a time.
struct Dimension {
  std::int64_t size, stride;
  int box;
};

/// The same tensor as elements of two of its own each; none where it cannot be.
std::optional<ConstTensorView> pairs_of_elements(ConstTensorView tensor) {
  tensor.size[kRank - 1] /= 2;
  for (int i = 0; i < kRank - 1; ++i) {
    if (tensor.size[i] > 1 && tensor.stride[i] % 2 != 0) return std::nullopt;
    tensor.stride[i] /= 2;
  }
  return tensor;
}

/// Boxes of 16-bit elements are swizzled, others are not.
CUresult encode_tiled(const Driver& driver, CUtensorMap& map, CUtensorMapDataType type, const void* data,
                      std::span<const Dimension> dimensions) {
  const cuuint64_t element_bytes = bytes_of(type);
  std::array<cuuint64_t, kMostDimensions> sizes, strides;  // strides in bytes, of all but the first
  std::array<cuuint32_t, kMostDimensions> box, element_strides;
  for (std::size_t i = 0; i < dimensions.size(); ++i) {
    const Dimension& dimension = dimensions[i];
    const auto stride = static_cast<cuuint64_t>(dimension.stride) * element_bytes;
    if (i > 0) strides[i - 1] = dimension.size > 1 ? stride : kAnyStride;
    sizes[i] = static_cast<cuuint64_t>(dimension.size);
    box[i] = static_cast<cuuint32_t>(dimension.box);
    element_strides[i] = 1;
  }
  return driver.tensor_map_encode_tiled(
      &map, type, static_cast<cuuint32_t>(dimensions.size()), const_cast<void*>(data), sizes.data(),
      strides.data(), box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      element_bytes == 2 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/// head_dim, length, heads, batch: the view names the slowest dimension first.
std::array<Dimension, kRank> dimensions_of(const ConstTensorView& tensor, int rows,
                                           int columns = kBoxColumns) {
  const auto& size = tensor.size;
  const auto& stride = tensor.stride;
  return {
      {{size[3], 1, columns}, {size[2], stride[2], rows}, {size[1], stride[1], 1}, {size[0], stride[0], 1}}};
}

/// The same with the heads that share one of `heads_kv` heads of K and V as a dimension of their own, of
/// which boxes have as many rows as the kernel packs.
std::array<Dimension, kMostDimensions> packed_dimensions_of(const ConstTensorView& q, std::int64_t heads_kv,
                                                            int most_queries) {
  const auto [columns, queries, heads, batch] = dimensions_of(q, 1);
  const std::int64_t group = heads.size / heads_kv;
  const PackedHeadsParam packed =
      plan::packed_heads({.heads_q = heads.size, .heads_kv = heads_kv}, most_queries);
  return {{columns,
           {group, heads.stride, packed.heads},
           {queries.size, queries.stride, packed.queries},
           {heads_kv, heads.stride * group, 1},
           batch}};
}

void encode(const Driver& driver, CUtensorMap& map, const char* name, const ConstTensorView& tensor,
            DType dtype, std::span<const Dimension> dimensions) {
  if (std::ranges::find(tensor.size, 0) != tensor.size.end()) return;
  const CUresult result = encode_tiled(driver, map, element_type(dtype), tensor.data, dimensions);
  if (result != CUDA_SUCCESS) refuse(driver, result, name, tensor);
}

/// Boxes of whole rows of 16-bit elements, `columns` wide with their padding: as pairs, so that 256 are
/// enough.
void encode_padded_rows(const Driver& driver, CUtensorMap& map, const char* name,
                        const ConstTensorView& tensor, int rows, int columns) {
  if (std::ranges::find(tensor.size, 0) != tensor.size.end()) return;
  const std::optional<ConstTensorView> pairs = pairs_of_elements(tensor);
  const CUresult result = pairs ? encode_tiled(driver, map, CU_TENSOR_MAP_DATA_TYPE_UINT32, tensor.data,
                                               dimensions_of(*pairs, rows, columns / 2))
                                : CUDA_ERROR_INVALID_VALUE;
  if (result != CUDA_SUCCESS) refuse(driver, result, name, tensor);
}

/// Leaves the map zeroed where TMA cannot copy the tensor.
void encode_bias(const Driver& driver, CUtensorMap& map, const CaptureParam& tensor,
                 const plan::BiasBox& box) {
  const int rows = box.rank - 2, columns = box.rank - 1;
  // Unused dimensions have stride 0 and size 1.
  if ((tensor.size[columns] > 1 && tensor.stride[columns] != 1) ||
      (tensor.size[rows] > 1 && tensor.stride[rows] == 0))
    return;
  ConstTensorView view{.data = tensor.data, .size = {1, 1, 1, 1}, .stride = {}};
  for (int i = 0; i < box.rank; ++i) {
    // Kernels ask for the first index of a dimension that repeats itself.
    if (tensor.stride[i] == 0) continue;
    view.size[kRank - box.rank + i] = tensor.size[i];
    view.stride[kRank - box.rank + i] = tensor.stride[i];
  }
  if (encode_tiled(driver, map, CU_TENSOR_MAP_DATA_TYPE_UINT16, view.data, dimensions_of(view, box.rows)) !=
      CUDA_SUCCESS)
    map = {};
}

}  // namespace

TensorMaps make_tensor_maps(const Driver& driver, const plan::TensorBoxes& boxes, DType dtype, DType kv_dtype,
                            const ConstTensorView& q, const ConstTensorView& q_rope, const ConstTensorView& k,
                            const ConstTensorView& v, const ConstTensorView& o, const char* o_name,
                            std::span<const CaptureParam> captures) {
  TensorMaps maps{};
  if (boxes.pairs_of_codes) {
    const auto pairs = [&](const char* name, const ConstTensorView& tensor) {
      const std::optional<ConstTensorView> of_pairs = pairs_of_elements(tensor);
      if (!of_pairs) refuse(driver, CUDA_ERROR_INVALID_VALUE, name, tensor);
      return *of_pairs;
    };
    plan::TensorBoxes of_pairs = boxes;
    of_pairs.pairs_of_codes = false;
    return make_tensor_maps(driver, of_pairs, dtype, dtype, pairs("q", q), {}, pairs("k", k), pairs("v", v),
                            o, o_name, captures);
  }
  const auto encode_rows = [&](CUtensorMap& map, const char* name, const ConstTensorView& tensor, int rows) {
    if (rows > 0) encode(driver, map, name, tensor, dtype, dimensions_of(tensor, rows));
  };
  const auto encode_q = [&](CUtensorMap& map, const char* name, const ConstTensorView& tensor) {
    if (boxes.pack_gqa && k.size[1] > 0)
      encode(driver, map, name, tensor, dtype, packed_dimensions_of(tensor, k.size[1], boxes.most_queries));
    else
      encode_rows(map, name, tensor, boxes.q_rows);
  };
  encode_q(maps.q, "q", q);
  if (q_rope.data) encode_q(maps.q_rope, "q_rope", q_rope);
  // Rows of codes are copied whole.
  const auto encode_kv = [&](CUtensorMap& map, const char* name, const ConstTensorView& tensor, int padded) {
    if (padded > 0) return encode_padded_rows(driver, map, name, tensor, boxes.kv_rows, padded);
    const int columns = size_of(kv_dtype) == 1 ? static_cast<int>(tensor.size[3]) : kBoxColumns;
    if (boxes.kv_rows > 0)
      encode(driver, map, name, tensor, kv_dtype, dimensions_of(tensor, boxes.kv_rows, columns));
  };
  encode_kv(maps.k, "k", k, boxes.k_columns);
  encode_kv(maps.v, "v", v, boxes.v_columns);
  encode_rows(maps.o, o_name, o, boxes.o_rows);
  if (boxes.bias.rows > 0) encode_bias(driver, maps.bias, captures[boxes.bias.capture], boxes.bias);
  return maps;
}

JvpTensorMaps make_jvp_tensor_maps(const Driver& driver, const plan::TensorBoxes& boxes, DType dtype,
                                   const JvpTensors& tensors) {
  JvpTensorMaps maps{};
  const auto add = [&](CUtensorMap& map, const char* name, ConstTensorView tensor, int rows) {
    if (!tensor.data) return;
    for (int i = 0; i < 2; ++i)
      if (tensor.stride[i] == 0) tensor.size[i] = std::min<std::int64_t>(tensor.size[i], 1);
    encode(driver, map, name, tensor, dtype, dimensions_of(tensor, rows));
  };
  add(maps.q, "q", tensors.q, boxes.q_rows);
  add(maps.k, "k", tensors.k, boxes.kv_rows);
  add(maps.v, "v", tensors.v, boxes.kv_rows);
  add(maps.q_tangent, "q_tangent", tensors.q_tangent, boxes.q_rows);
  add(maps.k_tangent, "k_tangent", tensors.k_tangent, boxes.kv_rows);
  add(maps.v_tangent, "v_tangent", tensors.v_tangent, boxes.kv_rows);
  return maps;
}

}  // namespace flashjit::device

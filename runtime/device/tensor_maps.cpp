#include "device/tensor_maps.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

namespace flashjit::device {
namespace {

constexpr int kRank = 4;                // head_dim, length, heads, batch
constexpr cuuint32_t kBoxColumns = 64;  // 128 bytes, the width of the swizzle
constexpr cuuint64_t kElementBytes = 2;
constexpr cuuint64_t kAnyStride = 16;  // where no index uses it: callers may have left anything in it

[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Driver& driver, CUresult result, const char* name,
                                                   const ConstTensorView& tensor) {
  throw Error(
      ErrorCode::unsupported,
      fmt::format("The TMA unit cannot copy {} of sizes [{}] with strides [{}]: {}. Give strides that are "
                  "multiples of 16 bytes, not zero and less than 2^40 bytes, or prepare() the spec with a "
                  "configuration of family sm80.",
                  name, fmt::join(tensor.size, ", "), fmt::join(tensor.stride, ", "),
                  driver.describe(result)));
}

CUtensorMapDataType element_type(DType dtype) {
  return dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

/// Of a tensor of 16-bit elements.
CUresult encode_tiled(const Driver& driver, CUtensorMap& map, CUtensorMapDataType type,
                      const ConstTensorView& tensor, int rows) {
  std::array<cuuint64_t, kRank> sizes;
  std::array<cuuint64_t, kRank - 1> strides;  // in bytes, of all but the first
  for (int i = 0; i < kRank; ++i) {
    const int from = kRank - 1 - i;  // the view names the slowest dimension first
    sizes[i] = static_cast<cuuint64_t>(tensor.size[from]);
    if (i == 0) continue;
    strides[i - 1] = sizes[i] > 1 ? static_cast<cuuint64_t>(tensor.stride[from]) * kElementBytes : kAnyStride;
  }
  const std::array<cuuint32_t, kRank> box{kBoxColumns, static_cast<cuuint32_t>(rows), 1, 1};
  const std::array<cuuint32_t, kRank> element_strides{1, 1, 1, 1};
  return driver.tensor_map_encode_tiled(
      &map, type, kRank, const_cast<void*>(tensor.data), sizes.data(), strides.data(), box.data(),
      element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

void encode(const Driver& driver, CUtensorMap& map, const char* name, const ConstTensorView& tensor,
            DType dtype, int rows) {
  if (rows == 0 || std::ranges::find(tensor.size, 0) != tensor.size.end()) return;
  const CUresult result = encode_tiled(driver, map, element_type(dtype), tensor, rows);
  if (result != CUDA_SUCCESS) refuse(driver, result, name, tensor);
}

/// Leaves the map zeroed where the TMA unit cannot copy the tensor.
void encode_plane(const Driver& driver, CUtensorMap& map, const CaptureParam& tensor,
                  const plan::PlaneBox& box) {
  const int rows = box.rank - 2, columns = box.rank - 1;
  // Unused dimensions have stride 0 and size 1.
  if ((tensor.size[columns] > 1 && tensor.stride[columns] != 1) ||
      (tensor.size[rows] > 1 && tensor.stride[rows] == 0))
    return;
  ConstTensorView view{.data = tensor.data, .size = {1, 1, 1, 1}, .stride = {}};
  for (int i = 0; i < box.rank; ++i) {
    // Of a dimension that repeats itself, kernels ask for the first.
    if (tensor.stride[i] == 0) continue;
    view.size[kRank - box.rank + i] = tensor.size[i];
    view.stride[kRank - box.rank + i] = tensor.stride[i];
  }
  if (encode_tiled(driver, map, CU_TENSOR_MAP_DATA_TYPE_UINT16, view, box.rows) != CUDA_SUCCESS) map = {};
}

}  // namespace

TensorMaps make_tensor_maps(const Driver& driver, const plan::TensorBoxes& boxes, DType dtype,
                            const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                            const ConstTensorView& o, const char* o_name,
                            std::span<const CaptureParam> captures) {
  TensorMaps maps{};
  encode(driver, maps.q, "q", q, dtype, boxes.q_rows);
  encode(driver, maps.k, "k", k, dtype, boxes.kv_rows);
  encode(driver, maps.v, "v", v, dtype, boxes.kv_rows);
  encode(driver, maps.o, o_name, o, dtype, boxes.o_rows);
  if (boxes.plane.rows > 0) encode_plane(driver, maps.plane, captures[boxes.plane.capture], boxes.plane);
  return maps;
}

}  // namespace flashjit::device

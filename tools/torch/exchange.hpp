// PyTorch's tensors in C, without PyTorch's headers: the part of DLPack 1.3 that
// torch.Tensor.__dlpack_c_exchange_api__ leads to.
#pragma once

#include <cstdint>

namespace flashjit::torch {

struct Device {
  int32_t type;
  int32_t index;
};

constexpr int32_t kCpu = 1, kCuda = 2;

struct ElementType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

constexpr uint8_t kSigned = 0, kUnsigned = 1, kBool = 6;  // other codes are of floating point

/// Borrowed: it is valid while the Python object lives and keeps its sizes.
struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  ElementType type;
  int64_t* size;
  int64_t* stride;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* older;
  void* allocate;  // makes dense tensors only, in memory that is not the caching allocator's
  void* export_owned;
  void* import_owned;
  int (*read)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

constexpr uint32_t kExchangeMajor = 1;
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

}  // namespace flashjit::torch

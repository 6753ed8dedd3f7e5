// libnccl, opened at run time: the functions that flashjit calls on a caller's communicator. Nothing links
// it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace flashjit::device {

/// As nccl.h declares them, whose enumerations are ints, and whose ncclComm_t a pointer.
struct Nccl {
  static constexpr int kSuccess = 0, kBytes = 1, kFloats = 7, kSum = 0;

  /// Opens `library`, or libnccl.so.2 where it is empty. Throws Error(unsupported).
  static std::shared_ptr<const Nccl> open(const std::string& library);
  /// Throws Error(cuda) with `what` and NCCL's text.
  void check(int result, std::string_view what) const;

  const char* (*get_error_string)(int) = nullptr;
  int (*comm_count)(void* comm, int* count) = nullptr;
  int (*comm_user_rank)(void* comm, int* rank) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void* data, std::size_t count, int type, int peer, void* comm, CUstream) = nullptr;
  int (*recv)(void* data, std::size_t count, int type, int peer, void* comm, CUstream) = nullptr;
  int (*all_gather)(const void* from, void* to, std::size_t count, int type, void* comm, CUstream) = nullptr;
  int (*reduce_scatter)(const void* from, void* to, std::size_t count, int type, int operation, void* comm,
                        CUstream) = nullptr;
};

}  // namespace flashjit::device

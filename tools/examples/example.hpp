// What the C++ examples share: memory by hand, and a main() that reports what went wrong.
#pragma once

#include <cstdio>
#include <flashjit/flashjit.hpp>
#include <stdexcept>
#include <vector>

#include "cuda_by_hand.h"

namespace example {

/// Values on the device, of any trivial type. Not freed: the examples end.
template <class T>
T* upload(const cuda_functions& cuda, const std::vector<T>& values) {
  CUdeviceptr address = 0;
  const std::size_t bytes = values.size() * sizeof(T);
  if (cuda.alloc(&address, bytes) != CUDA_SUCCESS ||
      cuda.upload(address, values.data(), bytes) != CUDA_SUCCESS)
    throw std::runtime_error("no device memory");
  return reinterpret_cast<T*>(address);
}

/// Waits for what was launched.
template <class T>
std::vector<T> download(const cuda_functions& cuda, const void* from, std::size_t count) {
  std::vector<T> values(count);
  if (cuda.synchronize() != CUDA_SUCCESS ||
      cuda.download(values.data(), reinterpret_cast<CUdeviceptr>(from), count * sizeof(T)) != CUDA_SUCCESS)
    throw std::runtime_error("the launch failed");
  return values;
}

/// Memory for one call; {} where none is needed.
inline flashjit::Workspace workspace(const cuda_functions& cuda, flashjit::Runtime& runtime,
                                     const flashjit::AttentionSpec& spec,
                                     const flashjit::AttentionShape& shape,
                                     flashjit::Pass pass = flashjit::Pass::forward) {
  const std::size_t bytes = runtime.workspace_bytes(spec, shape, pass);
  return bytes ? flashjit::Workspace{make_filled(&cuda, 0, bytes / 2), bytes} : flashjit::Workspace{};
}

/// Exit code: 0 right, 1 wrong or failed, 77 no GPU here.
template <class Body>
int run(Body&& is_right) {
  cuda_functions cuda;
  if (!open_cuda(&cuda)) {
    std::puts("no GPU here");
    return 77;
  }
  try {
    const bool right = is_right(cuda);
    std::puts(right ? "right" : "WRONG");
    return right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace example

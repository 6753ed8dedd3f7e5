#include "flashjit/error.hpp"

namespace flashjit {

std::string to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::no_driver:
      return "no_driver";
    case ErrorCode::no_device:
      return "no_device";
    case ErrorCode::no_compiler:
      return "no_compiler";
    case ErrorCode::compile_failed:
      return "compile_failed";
    case ErrorCode::kernel_missing:
      return "kernel_missing";
    case ErrorCode::io:
      return "io";
    case ErrorCode::cuda:
      return "cuda";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

}  // namespace flashjit

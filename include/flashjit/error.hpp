// Failures: an expected refusal is a Support value, an exceptional failure is an Error.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "flashjit/types.hpp"

namespace flashjit {

/// What went wrong, coarse enough to act on. The C ABI's status codes have the same numbers.
enum class ErrorCode : std::int32_t {
  invalid_argument = 1,  ///< the caller's values are wrong; the message says which and what is allowed
  unsupported = 2,       ///< a valid request that no kernel family supports
  no_driver = 3,         ///< libcuda is missing or too old
  no_device = 4,         ///< no CUDA device, no current context, or the wrong device
  no_compiler = 5,       ///< NVRTC is missing
  compile_failed = 6,    ///< NVRTC refused the source; detail() holds its log
  kernel_missing = 7,    ///< compiling is switched off and neither a pack nor the cache has the kernel
  io = 8,                ///< a file could not be read or written, or is damaged
  cuda = 9,              ///< the driver returned an error
  internal = 10,         ///< a bug in flashjit
};

FLASHJIT_API std::string to_string(ErrorCode code);  // "invalid_argument", ...

/// The only exception type that flashjit throws on purpose.
class FLASHJIT_API Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message, std::string detail = {})
      : code_(code), message_(std::move(message)), detail_(std::move(detail)) {}

  ErrorCode code() const noexcept { return code_; }
  /// One or two sentences: what was given, what is allowed, what to do.
  const std::string& message() const noexcept { return message_; }
  /// Long material such as a compiler log; often empty.
  const std::string& detail() const noexcept { return detail_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorCode code_;
  std::string message_;
  std::string detail_;
};

/// Whether something can be done, and if not, why not.
struct Support {
  bool ok = true;
  std::string reason;

  static Support yes() { return {}; }
  static Support no(std::string reason) { return {false, std::move(reason)}; }
  explicit operator bool() const { return ok; }
};

}  // namespace flashjit

#include <string>

#include "api/c_call.hpp"
#include "api/c_words.hpp"
#include "flashjit/flashjit.h"

namespace flashjit::c_api {
namespace {

struct LastError {
  std::string message, detail;
};

/// Per thread, because C has no other place for a message. Null when the thread's objects are gone: an atexit
/// handler or a destructor may call the library even then, and gets the status alone.
LastError* last_error() noexcept {
  thread_local bool gone = false;  // has no destructor, so it can be read to the last
  struct Owned : LastError {
    ~Owned() { gone = true; }
  };
  if (gone) return nullptr;
  thread_local Owned error;
  return &error;
}

}  // namespace

flashjit_status keep_error(ErrorCode code, const char* message, const char* detail) noexcept {
  if (LastError* last = last_error()) {
    try {
      last->message = in_c_words(message);
      last->detail = detail;
    } catch (...) {
      last->message.clear(), last->detail.clear();  // no memory for the message; there is still the status
    }
  }
  return static_cast<flashjit_status>(code);
}

template <ErrorCode code, flashjit_status status>
constexpr bool kSame = static_cast<flashjit_status>(code) == status;
static_assert(kSame<ErrorCode::invalid_argument, FLASHJIT_INVALID_ARGUMENT> &&
              kSame<ErrorCode::unsupported, FLASHJIT_UNSUPPORTED> &&
              kSame<ErrorCode::no_driver, FLASHJIT_NO_DRIVER> &&
              kSame<ErrorCode::no_device, FLASHJIT_NO_DEVICE> &&
              kSame<ErrorCode::no_compiler, FLASHJIT_NO_COMPILER> &&
              kSame<ErrorCode::compile_failed, FLASHJIT_COMPILE_FAILED> &&
              kSame<ErrorCode::kernel_missing, FLASHJIT_KERNEL_MISSING> &&
              kSame<ErrorCode::io, FLASHJIT_IO> && kSame<ErrorCode::cuda, FLASHJIT_CUDA> &&
              kSame<ErrorCode::internal, FLASHJIT_INTERNAL>);

}  // namespace flashjit::c_api

extern "C" {

const char* flashjit_status_name(flashjit_status status) noexcept {
  switch (status) {
    case FLASHJIT_OK:
      return "ok";
    case FLASHJIT_INVALID_ARGUMENT:
      return "invalid_argument";
    case FLASHJIT_UNSUPPORTED:
      return "unsupported";
    case FLASHJIT_NO_DRIVER:
      return "no_driver";
    case FLASHJIT_NO_DEVICE:
      return "no_device";
    case FLASHJIT_NO_COMPILER:
      return "no_compiler";
    case FLASHJIT_COMPILE_FAILED:
      return "compile_failed";
    case FLASHJIT_KERNEL_MISSING:
      return "kernel_missing";
    case FLASHJIT_IO:
      return "io";
    case FLASHJIT_CUDA:
      return "cuda";
    case FLASHJIT_INTERNAL:
      return "internal";
    default:
      return "unknown";
  }
}

const char* flashjit_last_error_message(void) noexcept {
  const auto* last = flashjit::c_api::last_error();
  return last ? last->message.c_str() : "";
}
const char* flashjit_last_error_detail(void) noexcept {
  const auto* last = flashjit::c_api::last_error();
  return last ? last->detail.c_str() : "";
}

}  // extern "C"

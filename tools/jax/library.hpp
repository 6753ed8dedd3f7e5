// The library's functions, found in its file when flashjit.jax is imported.
#pragma once

#include <dlfcn.h>

#include <xla/ffi/api/ffi.h>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "flashjit/flashjit.h"

namespace flashjit_jax {

namespace ffi = xla::ffi;

/// The library's functions, from the file that Python has opened, and what calls share.
class Library {
 public:
  /// Null, or what is wrong with the file.
  const char* open(const char* path, flashjit_runtime* shared) {
    void* file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!file) return dlerror();
    const bool found =
        find(file, "flashjit_forward", forward) && find(file, "flashjit_backward", backward) &&
        find(file, "flashjit_reference_forward", reference_forward) &&
        find(file, "flashjit_reference_backward", reference_backward) && find(file, "flashjit_jvp", jvp) &&
        find(file, "flashjit_reference_jvp", reference_jvp) &&
        find(file, "flashjit_backward_jvp", backward_jvp) &&
        find(file, "flashjit_reference_backward_jvp", reference_backward_jvp) &&
        find(file, "flashjit_append", append) && find(file, "flashjit_reference_append", reference_append) &&
        find(file, "flashjit_prepare", prepare) && find(file, "flashjit_spec_create", spec_create) &&
        find(file, "flashjit_last_error_message", last_error_message);
    if (!found) return dlerror();
    runtime = shared;
    return nullptr;
  }

  /// Null, with an error to ask for, where the text is wrong.
  const flashjit_spec* spec(std::string_view text) {
    const std::lock_guard lock(mutex_);
    auto found = specs_.find(text);
    if (found != specs_.end()) return found->second;
    flashjit_spec* made = nullptr;
    const std::string key(text);
    if (spec_create(key.c_str(), &made) != FLASHJIT_OK) return nullptr;
    return specs_.emplace(key, made).first->second;
  }

  /// Whether the device has not prepared such a call yet.
  bool is_new(const std::string& call) {
    const std::lock_guard lock(mutex_);
    return !prepared_.contains(call);
  }
  void keep(std::string call) {
    const std::lock_guard lock(mutex_);
    prepared_.insert(std::move(call));
  }

  decltype(&flashjit_forward) forward = nullptr;
  decltype(&flashjit_backward) backward = nullptr;
  decltype(&flashjit_reference_forward) reference_forward = nullptr;
  decltype(&flashjit_reference_backward) reference_backward = nullptr;
  decltype(&flashjit_jvp) jvp = nullptr;
  decltype(&flashjit_reference_jvp) reference_jvp = nullptr;
  decltype(&flashjit_backward_jvp) backward_jvp = nullptr;
  decltype(&flashjit_reference_backward_jvp) reference_backward_jvp = nullptr;
  decltype(&flashjit_append) append = nullptr;
  decltype(&flashjit_reference_append) reference_append = nullptr;
  decltype(&flashjit_prepare) prepare = nullptr;
  decltype(&flashjit_spec_create) spec_create = nullptr;
  decltype(&flashjit_last_error_message) last_error_message = nullptr;
  flashjit_runtime* runtime = nullptr;

 private:
  template <class Function>
  static bool find(void* file, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(file, name));
    return function != nullptr;
  }

  std::mutex mutex_;
  std::map<std::string, flashjit_spec*, std::less<>> specs_;
  std::set<std::string> prepared_;
};

/// XLA gives a handler nothing that outlives a call.
inline Library& library() {
  static Library& shared = *new Library;  // never destroyed: executables may run to the last
  return shared;
}

inline ffi::Error error_of(flashjit_status status) {
  if (status == FLASHJIT_OK) return ffi::Error::Success();
  const ffi::ErrorCode code = status == FLASHJIT_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                              : status == FLASHJIT_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                              : status == FLASHJIT_INTERNAL       ? ffi::ErrorCode::kInternal
                                                                  : ffi::ErrorCode::kFailedPrecondition;
  return {code, std::string("flashjit: ") + library().last_error_message()};
}

}  // namespace flashjit_jax

// What every function of the C interface does first and last: handles are what they hold, and what is thrown
// becomes a status and the thread's last error.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <exception>

#include "flashjit/error.hpp"
#include "flashjit/flashjit.h"
#include "flashjit/runtime.hpp"

struct flashjit_runtime {
  flashjit::Runtime runtime;
};

struct flashjit_spec {
  flashjit::AttentionSpec spec;
  std::uint64_t id = next_id();  ///< of no other in the process

  static std::uint64_t next_id() noexcept {
    static std::atomic<std::uint64_t> next = 0;
    return ++next;
  }
};

struct flashjit_tile_lists {
  flashjit::TileLists lists;
};

namespace flashjit {

class Engine;
/// What is behind a Runtime.
Engine& engine_of(Runtime& runtime);

}  // namespace flashjit

namespace flashjit::c_api {

/// Keeps what flashjit_last_error_message() and flashjit_last_error_detail() return.
flashjit_status keep_error(ErrorCode code, const char* message, const char* detail) noexcept;

/// Runs `body`; what it throws becomes a status and the last error.
template <class Body>
flashjit_status guarded(Body&& body) noexcept {
  try {
    body();
    return FLASHJIT_OK;
  } catch (const Error& error) {
    return keep_error(error.code(), error.message().c_str(), error.detail().c_str());
  } catch (const std::exception& error) {
    return keep_error(ErrorCode::internal, error.what(), "");
  } catch (...) {
    return keep_error(ErrorCode::internal, "an exception of an unknown type", "");
  }
}

template <class T>
T& required(T* pointer, const char* name, const char* advice) {
  if (!pointer) throw Error(ErrorCode::invalid_argument, fmt::format("{} is null: {}.", name, advice));
  return *pointer;
}

inline Runtime& get(flashjit_runtime* runtime) {
  return required(runtime, "runtime", "make one with flashjit_runtime_create()").runtime;
}
inline const AttentionSpec& get(const flashjit_spec* spec) {
  return required(spec, "spec", "make one with flashjit_spec_create()").spec;
}

}  // namespace flashjit::c_api

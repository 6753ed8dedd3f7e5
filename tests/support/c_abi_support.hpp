// What the tests of the C interface share: owners of its handles, and a plain problem.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "flashjit/flashjit.h"

namespace flashjit::test {

struct Deleter {
  void operator()(flashjit_runtime* runtime) const { flashjit_runtime_destroy(runtime); }
  void operator()(flashjit_spec* spec) const { flashjit_spec_destroy(spec); }
};
using RuntimePtr = std::unique_ptr<flashjit_runtime, Deleter>;
using SpecPtr = std::unique_ptr<flashjit_spec, Deleter>;

inline RuntimePtr make_runtime(const flashjit_options& options) {
  flashjit_runtime* made = nullptr;
  EXPECT_EQ(flashjit_runtime_create(&options, &made), FLASHJIT_OK) << flashjit_last_error_message();
  return RuntimePtr(made);
}
inline SpecPtr make_spec(const char* text = "bf16:d64:causal") {
  flashjit_spec* made = nullptr;
  EXPECT_EQ(flashjit_spec_create(text, &made), FLASHJIT_OK) << flashjit_last_error_message();
  return SpecPtr(made);
}
/// [1, 2, 128, 64], at an address that is not read.
inline flashjit_tensor make_tensor(std::uintptr_t address) {
  return {reinterpret_cast<void*>(address), {1, 2, 128, 64}, {2 * 128 * 64, 128 * 64, 64, 1}};
}
inline flashjit_forward_args make_forward_args() {
  flashjit_forward_args args{};
  args.struct_size = sizeof args;
  args.q = make_tensor(0x10000);
  args.k = make_tensor(0x20000);
  args.v = make_tensor(0x30000);
  args.out = make_tensor(0x40000);
  return args;
}

}  // namespace flashjit::test

// The compiler of the compile tests.
#pragma once

#include <memory>

#include "compile/compiler.hpp"

namespace flashjit::test {

/// NVRTC, opened once for all tests of a process.
inline const compile::Compiler& compiler() {
  static const std::shared_ptr<const compile::Compiler> opened = compile::Compiler::open();
  return *opened;
}

}  // namespace flashjit::test

// CUDA C++ as the emulator compiles it.
#pragma once

#include <string>
#include <string_view>

namespace flashjit_emulator {

/// C++ of a kernel's source or of one of its headers. Parts that C++ lacks become calls of device.hpp: asm
/// statements, variables in shared memory, kernels.
std::string translate(std::string_view text);

}  // namespace flashjit_emulator

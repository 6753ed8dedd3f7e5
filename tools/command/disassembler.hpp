// SASS of a cubin, by the toolkit's disassembler where there is one.
#pragma once

#include <optional>
#include <string>

namespace flashjit::command {

/// cuobjdump or nvdisasm, by name if on PATH, else in CUDA_HOME, CUDA_PATH or /usr/local/cuda; nothing: none
/// is there.
std::optional<std::string> find_disassembler();

/// SASS of all images. Throws Error(no_compiler) without a disassembler, Error(io) with its output when it
/// fails.
std::string disassemble(const std::string& cubin);

}  // namespace flashjit::command

// The images that a kernel's machine code consists of.
#pragma once

#include <string_view>
#include <vector>

namespace flashjit::device {

/// The images of a CompiledKernel's cubin, in their order: as ELF files each has its size in its header. What
/// is none, damage for example, is left to the driver to refuse, and so is all that follows it: one image.
std::vector<std::string_view> images(std::string_view cubin);

}  // namespace flashjit::device

// A pack that is part of the program, as CMake's flashjit_add_pack(... EMBED) makes one.
#pragma once

#include <span>
#include <string_view>

namespace flashjit {

/// One file of a pack: its path within the pack, as "v1/sm_90a/<key>/kernel.cubin", and its bytes.
struct EmbeddedFile {
  std::string_view path, bytes;
};

/// The files of a pack, in the program's own memory for as long as a Runtime uses them.
using EmbeddedPack = std::span<const EmbeddedFile>;

}  // namespace flashjit

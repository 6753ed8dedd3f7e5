// A pack embedded in the program, as CMake's flashjit_add_pack(... EMBED) does.
#pragma once

#include <span>
#include <string_view>

namespace flashjit {

/// One file of a pack: its path within the pack, as "v1/sm_90a/<key>/kernel.cubin", and its bytes.
struct EmbeddedFile {
  std::string_view path, bytes;
};

/// The files of a pack, in memory that outlives every Runtime that uses them.
using EmbeddedPack = std::span<const EmbeddedFile>;

}  // namespace flashjit

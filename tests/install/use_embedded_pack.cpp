// A program whose pack is in it.
#include <cstdio>
#include <flashjit/flashjit.hpp>

#include "use_embedded_pack_pack.hpp"

int main() {
  bool meta = false, cubin = false, record = false;
  for (const flashjit::EmbeddedFile& file : use_embedded_pack_pack) {
    std::printf("%.*s: %zu bytes\n", static_cast<int>(file.path.size()), file.path.data(), file.bytes.size());
    meta |= file.path.starts_with("v1/sm_80/") && file.path.ends_with("/meta.json") && file.bytes[0] == '{';
    cubin |= file.path.ends_with("/kernel.cubin") && file.bytes.substr(1, 3) == "ELF";
    record |= file.path.starts_with("v1/tuning/") && file.bytes[0] == '{';
  }
  flashjit::Runtime runtime({.embedded_packs = {use_embedded_pack_pack}, .jit = flashjit::JitMode::off});
  return meta && cubin && record ? 0 : 1;
}

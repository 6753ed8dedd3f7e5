// A small kernel to keep in stores, and the files that it becomes.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cache/store.hpp"

namespace flashjit::test {

inline constexpr const char* kTag = "nvrtc13.0.88";

inline KernelSource source(const std::string& spec = "fwd:bf16:d64") {
  KernelSource s;
  s.spec = parse_spec(spec).normalized();
  s.config = parse_config("simt:br64:bc64:w8");
  s.arch = "sm_80";
  s.text = "// " + spec + "\n";
  s.headers = {{"flashjit/a.cuh", "one"}};
  s.entries = {{.name = "forward",
                .header = "flashjit/a.cuh",
                .function = "f",
                .threads = 256,
                .shared_bytes = 512,
                .hot = true}};
  return s;
}

inline std::string digest(const KernelSource& s) { return cache::source_digest(s, {"-x"}); }

inline CompiledKernel kernel(const std::string& tag = kTag) {
  CompiledKernel k;
  k.cubin = std::string(
      "\x7f"
      "ELF\0cubin",
      10);
  k.log = "ptxas info: \xff is no UTF-8, \" and \n are fine";
  k.compiler = tag;
  k.resources = {{.entry = "forward",
                  .registers = 168,
                  .spill_stores = 4,
                  .spill_loads = 8,
                  .stack = 16,
                  .static_shared = 32}};
  k.compile_ms = 123.456;
  return k;
}

inline bool keep(cache::Store& store, const KernelSource& s, const CompiledKernel& k = kernel()) {
  return store.store(s, digest(s), k);
}

inline std::optional<CompiledKernel> find(const cache::Store& store, const KernelSource& s,
                                          const std::string& tag = kTag) {
  return store.load(s, digest(s), tag);
}

/// Where `folder` keeps the entry.
inline std::filesystem::path entry_folder(const std::filesystem::path& folder, const KernelSource& s,
                                          const std::string& tag = kTag) {
  return folder / "v1" / s.arch / cache::entry_key(digest(s), tag);
}

inline void poke(const std::filesystem::path& path, std::size_t at, char byte) {
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out)
      .seekp(static_cast<std::streamoff>(at))
      .put(byte);
}

inline void write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace flashjit::test

// What makes an entry of a store usable, wherever its files are.
#pragma once

#include <string>
#include <vector>

#include "cache/meta.hpp"
#include "render/kernel_source.hpp"

namespace flashjit::cache {

/// Throws Error(io) unless the entry that `meta` describes belongs into the folder `arch`/`key`.
void check_place(const Meta& meta, const std::string& arch, const std::string& key);
/// Throws Error(io) unless the entry is the one that the source asks for.
void check_source(const Meta& meta, const KernelSource& source, const std::string& digest);
/// Throws Error(io) unless these are the bytes that were stored.
void check_cubin(const Meta& meta, std::string_view cubin);
CompiledKernel make_kernel(Meta meta, std::string cubin);

/// Puts the keys of one source's entries in order: the newest compiler's first.
void sort_by_compiler(std::vector<std::string>& keys);

}  // namespace flashjit::cache

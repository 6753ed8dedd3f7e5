// meta.json: what an entry was made from, what its cubin is, and what a hit reports.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "render/kernel_source.hpp"

namespace flashjit::cache {

struct Meta {
  std::string arch, spec, config, compiler;
  std::string source_digest;                   ///< the key's: covers the options too
  std::string text;                            ///< digest of kernel.cu
  std::map<std::string, std::string> headers;  ///< digests by name
  std::vector<plan::Entry> entries;
  std::string cubin;  ///< digest of kernel.cubin
  std::uintmax_t cubin_bytes = 0;
  std::vector<EntryResources> resources;
  std::string log;  ///< without times: the same source compiled again gives the same file

  bool operator==(const Meta&) const = default;
};

Meta make_meta(const KernelSource& source, const std::string& digest, const CompiledKernel& kernel);

/// The JSON holds a digest of itself, so that no damage to it goes unseen.
std::string to_json(const Meta& meta);
/// Throws Error(io) that names what is missing or wrong.
Meta parse_meta(const std::string& json);

/// The first field in which the entry is not the one that the source asks for; empty: it is.
std::string difference(const Meta& meta, const KernelSource& source, const std::string& digest);

}  // namespace flashjit::cache

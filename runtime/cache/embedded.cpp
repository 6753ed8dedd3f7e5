#include "cache/embedded.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cache/entry.hpp"
#include "cache/folders.hpp"
#include "flashjit/error.hpp"

namespace flashjit::cache {

EmbeddedStore::EmbeddedStore(EmbeddedPack pack, Log log) : pack_(pack), log_(std::move(log)) {}

std::optional<std::string_view> EmbeddedStore::find(std::string_view path) const {
  const auto file = std::ranges::find(pack_, path, &EmbeddedFile::path);
  return file == pack_.end() ? std::nullopt : std::optional(file->bytes);
}

CompiledKernel EmbeddedStore::read(const std::string& arch, const std::string& key,
                                   const KernelSource& source, const std::string& digest) const {
  const std::string folder = fmt::format("{}/{}/{}/", kVersionFolder, arch, key);
  const auto meta_text = find(folder + std::string(kMetaFile));
  const auto cubin = find(folder + std::string(kCubinFile));
  if (!meta_text || !cubin) throw Error(ErrorCode::io, "meta.json or kernel.cubin is missing");
  Meta meta = parse_meta(std::string(*meta_text));
  check_place(meta, arch, key);
  check_source(meta, source, digest);
  check_cubin(meta, *cubin);
  return make_kernel(std::move(meta), std::string(*cubin));
}

std::optional<CompiledKernel> EmbeddedStore::load(const KernelSource& source,
                                                  const std::string& digest) const {
  const std::string folder = fmt::format("{}/{}/", kVersionFolder, source.arch);
  const std::string end = fmt::format("/{}", kMetaFile);
  std::vector<std::string> keys;
  for (const EmbeddedFile& file : pack_) {
    if (!file.path.starts_with(folder + digest) || !file.path.ends_with(end)) continue;
    keys.emplace_back(file.path.substr(folder.size(), file.path.size() - folder.size() - end.size()));
  }
  sort_by_compiler(keys);
  for (const std::string& key : keys) {
    try {
      return read(source.arch, key, source, digest);
    } catch (const std::exception& cause) {
      if (log_)
        log_(fmt::format("ignoring the embedded kernel '{}/{}': {}; build the program again", source.arch,
                         key, cause.what()));
    }
  }
  return {};
}

std::vector<EmbeddedFile> EmbeddedStore::records() const {
  const std::string folder = fmt::format("{}/{}/", kVersionFolder, kTuningFolder);
  std::vector<EmbeddedFile> found;
  for (const EmbeddedFile& file : pack_)
    if (file.path.starts_with(folder) && file.path.ends_with(".json")) found.push_back(file);
  return found;
}

}  // namespace flashjit::cache

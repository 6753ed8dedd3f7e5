// A pack in the program's memory: a store that is only read.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/store.hpp"
#include "flashjit/pack.hpp"

namespace flashjit::cache {

class EmbeddedStore {
 public:
  EmbeddedStore(EmbeddedPack pack, Log log = {});

  /// The entry of this source, made by any compiler; the newest. A damaged entry is a miss with a warning.
  std::optional<CompiledKernel> load(const KernelSource& source, const std::string& digest) const;

  /// The tuning records' files.
  std::vector<EmbeddedFile> records() const;

 private:
  std::optional<std::string_view> find(std::string_view path) const;
  CompiledKernel read(const std::string& arch, const std::string& key, const KernelSource& source,
                      const std::string& digest) const;

  EmbeddedPack pack_;
  Log log_;
};

}  // namespace flashjit::cache

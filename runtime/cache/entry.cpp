#include "cache/entry.hpp"

#include <algorithm>
#include <cstring>

#include "cache/digest.hpp"
#include "cache/store.hpp"
#include "flashjit/error.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit::cache {
// An entry that was copied or renamed holds another kernel than its place says.
void check_place(const Meta& meta, const std::string& arch, const std::string& key) {
  if (key == entry_key(meta.source_digest, meta.compiler) && arch == meta.arch) return;
  damaged("it holds {} made by {} for {}, which belongs in another folder", quoted(meta.spec),
          quoted(meta.compiler), quoted(meta.arch));
}

void check_source(const Meta& meta, const KernelSource& source, const std::string& digest) {
  if (const std::string field = difference(meta, source, digest); !field.empty())
    damaged("its {} differs from what the key stands for", field);
}

void check_cubin(const Meta& meta, std::string_view cubin) {
  if (digest_of(cubin) != meta.cubin) damaged("kernel.cubin does not match its digest in meta.json");
}

CompiledKernel make_kernel(Meta meta, std::string cubin) {
  return {.cubin = std::move(cubin),
          .log = std::move(meta.log),
          .compiler = std::move(meta.compiler),
          .resources = std::move(meta.resources)};
}

void sort_by_compiler(std::vector<std::string>& keys) {
  std::sort(keys.begin(), keys.end(), [](const std::string& a, const std::string& b) {
    return ::strverscmp(a.c_str(), b.c_str()) > 0;
  });
}

}  // namespace flashjit::cache

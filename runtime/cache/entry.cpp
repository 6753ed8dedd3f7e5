#include "cache/entry.hpp"

#include <algorithm>
#include <string_view>

#include "cache/digest.hpp"
#include "cache/store.hpp"
#include "flashjit/error.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit::cache {
namespace {

constexpr std::string_view kDigits = "0123456789";

/// Takes the number that the text begins with, without zeros before it; empty: it begins with none.
std::string_view take_number(std::string_view& text) {
  std::string_view number = text.substr(0, std::min(text.find_first_not_of(kDigits), text.size()));
  text.remove_prefix(number.size());
  number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
  return number;
}

/// Numbers within the texts count as numbers: 13.0.9 is older than 13.0.88.
bool is_newer(std::string_view a, std::string_view b) {
  const auto begins_with_digit = [](std::string_view text) {
    return !text.empty() && kDigits.find(text.front()) != kDigits.npos;
  };
  while (!a.empty() && !b.empty()) {
    if (begins_with_digit(a) && begins_with_digit(b)) {
      const std::string_view x = take_number(a), y = take_number(b);
      if (x != y) return x.size() != y.size() ? x.size() > y.size() : x > y;
    } else if (a.front() != b.front()) {
      return static_cast<unsigned char>(a.front()) > static_cast<unsigned char>(b.front());
    } else {
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  return a.size() > b.size();
}

}  // namespace

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

void sort_by_compiler(std::vector<std::string>& keys) { std::sort(keys.begin(), keys.end(), is_newer); }

}  // namespace flashjit::cache

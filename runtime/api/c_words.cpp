#include "api/c_words.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace flashjit::c_api {
namespace {

/// Longer phrases first, as they contain shorter ones.
constexpr std::array kPhrases = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"set spec.kv to KvLayout::padded() for keys that are padding, or to slots() or paged(page_size) for a "
     "cache",
     "write :kvlen in the spec for keys that are padding, or :cache or :pages16 for a cache"},
    {"set spec.kv to KvLayout::paged(page_size) or slots()",
     "write :pages16 in the spec, with the rows of a page, or :cache"},
    {"set kv to KvLayout::paged(page_size) or slots()", "write :pages16, with the rows of a page, or :cache"},
    {"set spec.kv to KvLayout::paged(page_size)", "write :pages16 in the spec, with the rows of a page"},
    {"set spec.kv to KvLayout::slots()", "write :cache in the spec"},
    {"set spec.block_map to the size of its blocks",
     "write :map128x128 in the spec, with the size of its blocks"},
    {"set spec.epilogue.out_mod", "write :out_mod{...} in the spec"},
    {"set spec.kv.k_format to e4m3, e5m2 or int8, or to another KV format",
     "write :kve4m3, :kve5m2, :kvint8 or another KV format, such as :kv{nvfp4}, in the spec"},
    {"set spec.kv.k_format and v_format", "write :kve4m3 in the spec, or another KV format"},
    {"spec.kv names their format", "the spec names their format"},
    {"spec.kv.page_size", "the page size of the spec"},
    {"leave spec.kv.key_scales out", "leave :key_scales out of the spec"},
    {"Capture::number()", "a scalar, with rank 0 and data null"},
    {"Capture::tensor()", "its data, rank, size and stride"},
    {"ask Runtime::", "ask flashjit_"},
    {"Runtime::", "flashjit_"},
});

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

/// "set spec.epilogue.row_max" -> "write :row_max in the spec": what is on or off has the same name in a
/// text.
void replace_options(std::string& text) {
  constexpr std::string_view kSet = "set spec.";
  for (std::size_t at = 0; (at = text.find(kSet, at)) != std::string::npos;) {
    const std::size_t begin = at + kSet.size();
    const std::size_t end =
        std::min(text.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789.", begin), text.size());
    std::string path = text.substr(begin, end - begin);
    const bool ends_sentence = path.ends_with('.');
    if (ends_sentence) path.pop_back();
    const std::string said =
        "write :" + path.substr(path.rfind('.') + 1) + " in the spec" + (ends_sentence ? "." : "");
    text.replace(at, end - at, said);
    at += said.size();
  }
}

}  // namespace

std::string in_c_words(std::string message) {
  if (message.find("::") == std::string::npos && message.find("spec.") == std::string::npos) return message;
  for (const auto& [from, to] : kPhrases) replace_all(message, from, to);
  replace_options(message);
  return message;
}

}  // namespace flashjit::c_api

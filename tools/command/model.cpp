#include "model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "support/text.hpp"

namespace flashjit::command {
namespace {

constexpr std::int64_t kMostSequences = 1024, kMostQueries = 8192, kMostKeys = 1 << 18;
constexpr std::int64_t kMostDecoded = 16;  // queries of each sequence, where these are not packed

struct ModelText {
  std::int64_t heads_q = 0, heads_kv = 0;
  std::string dims, dtype, cache, codes;
  std::string mask = ":causal", rest;  ///< of the spec
  bool shared_prefix = false;          ///< of packed queries
};

[[noreturn]] void refuse_model(std::string_view text, const std::string& why) {
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("the model {} {}; write its heads, head dimension, cache and type, such as "
                  "\"32/8 heads, d128, pages of 16, bf16\" or \"32 heads, d64, slots, fp16, kv e4m3\", "
                  "and what else its spec has, such as \"dropout\"",
                  quoted(text), why));
}

/// The pieces between the ',' outside of braces, without blanks around them.
std::vector<std::string_view> phrases_of(std::string_view text) {
  std::vector<std::string_view> phrases;
  int depth = 0;
  std::size_t begin = 0;
  const auto add = [&](std::size_t end) {
    std::string_view phrase = text.substr(begin, end - begin);
    const std::size_t first = std::min(phrase.find_first_not_of(' '), phrase.size());
    phrase.remove_prefix(first);
    phrase.remove_suffix(phrase.size() - (phrase.find_last_not_of(' ') + 1));
    phrases.push_back(phrase);
    begin = end + 1;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    depth += (text[i] == '{') - (text[i] == '}');
    if (text[i] == ',' && depth == 0) add(i);
  }
  add(text.size());
  return phrases;
}

void read_heads(std::string_view phrase, ModelText& model) {
  constexpr std::int64_t kMost = 1 << 16;
  const auto numbers = split(phrase.substr(0, phrase.find(' ')), '/');
  model.heads_q = parse_int(numbers.front(), "the query heads", 1, kMost);
  model.heads_kv = parse_int(numbers.back(), "the KV heads", 1, kMost);
}

ModelText read_model(std::string_view text) {
  constexpr std::string_view kPages = "pages of ", kKv = "kv ";
  ModelText model;
  const auto set = [&](std::string& part, std::string value, std::string_view what) {
    if (!part.empty()) refuse_model(text, fmt::format("names its {} twice", what));
    part = std::move(value);
  };
  for (const std::string_view phrase : phrases_of(text)) {
    if (phrase.ends_with(" heads")) {
      if (model.heads_q != 0) refuse_model(text, "names its heads twice");
      read_heads(phrase, model);
    } else if (phrase.starts_with(kPages))
      set(model.cache, fmt::format(":pages{}", phrase.substr(kPages.size())), "cache");
    else if (phrase == "slots")
      set(model.cache, ":cache", "cache");
    else if (phrase.starts_with(kKv))
      model.codes += fmt::format(":kv{}", phrase.substr(kKv.size()));
    else if (phrase == "key_scales")
      model.codes += fmt::format(":{}", phrase);
    else if (phrase == "fp16" || phrase == "bf16" || phrase == "fp32")
      set(model.dtype, std::string(phrase), "type");
    else if (phrase.size() > 1 && phrase[0] == 'd' && phrase[1] >= '0' && phrase[1] <= '9')
      set(model.dims, std::string(phrase), "head dimension");
    else if (phrase.starts_with("mask{") || phrase.starts_with("causal"))
      model.mask = fmt::format(":{}", phrase);
    else if (phrase == "shared_prefix")
      model.shared_prefix = true;
    else
      model.rest += fmt::format(":{}", phrase);
  }
  if (model.heads_q == 0) refuse_model(text, "has no heads");
  if (model.dims.empty()) refuse_model(text, "has no head dimension");
  if (model.cache.empty()) refuse_model(text, "has no cache");
  if (model.dtype.empty()) refuse_model(text, "has no type");
  return model;
}

/// All powers of two up to the largest.
std::vector<std::int64_t> octaves(std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> values;
  for (std::int64_t value = first; value <= last; value *= 2) values.push_back(value);
  return values;
}

}  // namespace

std::vector<PackItem> model_items(std::string_view text, const DeviceInfo& device,
                                  const plan::TuningRecords& records) {
  const ModelText model = read_model(text);
  std::vector<PackItem> items;
  std::set<std::string> known;
  const auto add = [&](const std::string& spec, std::int64_t batch, std::int64_t queries, std::int64_t keys) {
    const AttentionShape shape{batch, model.heads_q, model.heads_kv, queries, keys};
    PackItem item{device, plan::make_plan(parse_spec(spec), shape, device, records, {})};
    item.chosen_by_heuristic = item.plan.config_source == ConfigSource::heuristic;
    const std::string name = item.chosen_by_heuristic ? to_string(item) : to_string(item) + to_string(shape);
    if (known.insert(name).second) items.push_back(std::move(item));
  };
  const std::string kind = fmt::format("{}:{}", model.dtype, model.dims);
  const std::string attention =
      fmt::format("fwd:{}{}{}{}{}", kind, model.codes, model.mask, model.rest, model.cache);
  for (const std::int64_t batch : octaves(1, kMostSequences))
    for (const std::int64_t keys : octaves(64, kMostKeys)) {
      for (const std::int64_t queries : octaves(1, kMostDecoded)) add(attention, batch, queries, keys);
      for (const std::int64_t queries : octaves(1, std::min(keys, kMostQueries))) {
        add(attention + ":varlen", batch, queries, keys);
        if (model.shared_prefix) add(attention + ":varlen:shared_prefix", batch, queries, keys);
      }
    }
  for (const char* packing : {"", ":varlen"})
    add(fmt::format("append:{}{}{}{}", kind, model.codes, model.cache, packing), 1, 1, 64);
  add(fmt::format("merge:{}", kind), 1, 1, 64);
  return items;
}

}  // namespace flashjit::command

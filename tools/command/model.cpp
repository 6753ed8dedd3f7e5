#include "model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "plan/shipped.hpp"
#include "support/text.hpp"

namespace flashjit::command {
namespace {

constexpr std::int64_t kMostSequences = 1024, kMostQueries = 8192, kMostKeys = 1 << 18;
constexpr std::int64_t kMostDecoded = 16;  // queries of each sequence, where these are not packed
constexpr std::int64_t kShortestTrained = 64, kLongestTrained = 1 << 17;

constexpr std::string_view kTraining = "training";  // instead of a cache

struct ModelText {
  std::int64_t heads_q = 0, heads_kv = 0;
  std::string dims, dtype, cache, codes;
  std::string mask = ":causal", rest;  ///< of the spec
  bool shared_prefix = false;          ///< of packed queries
};

[[noreturn]] void refuse_model(std::string_view text, const std::string& why) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("the model {} {}; write its heads, head dimension, cache and type, such as "
                          "\"32/8 heads, d128, pages of 16, bf16\", \"32 heads, d64, slots, fp16, kv e4m3\" "
                          "or, for both passes without a cache, \"32/8 heads, d128, training, bf16\", and "
                          "what else its spec has, such as \"dropout\"",
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
    else if (phrase == kTraining)
      set(model.cache, std::string(kTraining), "cache");
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
  if (model.cache.empty()) refuse_model(text, "has no cache, and is not for training");
  if (model.cache == kTraining && model.shared_prefix)
    refuse_model(text, "has a shared_prefix without a cache");
  if (model.dtype.empty()) refuse_model(text, "has no type");
  return model;
}

/// All powers of two up to the largest.
std::vector<std::int64_t> octaves(std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> values;
  for (std::int64_t value = first; value <= last; value *= 2) values.push_back(value);
  return values;
}

/// Collects each kernel once.
class Items {
 public:
  Items(const ModelText& model, const DeviceInfo& device, const plan::TuningRecords& records)
      : model_(model), device_(device), records_(records) {
    for (const plan::TuningRecord& record : plan::shipped_records())
      shipped_.add(record, plan::TuningRecords::Origin::shipped);
  }

  void add(const std::string& text, std::int64_t batch, std::int64_t queries, std::int64_t keys) {
    const AttentionShape shape{batch, model_.heads_q, model_.heads_kv, queries, keys};
    const KernelSpec spec = parse_spec(text);
    plan::ExecutionPlan plan = plan::make_plan(spec, shape, device_, records_, {});
    bool again = plan.config_source == ConfigSource::heuristic;
    if (!again && plan.config == plan::make_plan(spec, shape, device_, shipped_, {}).config) {
      // A runtime has these records, too; without a compiler it takes the heuristic's choice.
      keep(plan::make_plan(spec, shape, device_, {}, {}), true);
      again = true;
    }
    keep(std::move(plan), again);
  }
  std::vector<PackItem> take() { return std::move(items_); }

 private:
  void keep(plan::ExecutionPlan plan, bool chosen_again) {
    for (PackItem& item : items_of(device_, std::move(plan), chosen_again)) {
      const std::string name = to_string(item) + (item.chosen_again ? "" : to_string(item.plan.shape));
      if (known_.insert(name).second) items_.push_back(std::move(item));
    }
  }

  const ModelText& model_;
  const DeviceInfo& device_;
  const plan::TuningRecords& records_;
  plan::TuningRecords shipped_;
  std::vector<PackItem> items_;
  std::set<std::string> known_;
};

void add_training(const ModelText& model, Items& items) {
  const std::string spec =
      fmt::format("{}:{}{}{}{}", model.dtype, model.dims, model.codes, model.mask, model.rest);
  for (const std::int64_t batch : octaves(1, kMostSequences))
    for (const std::int64_t length : octaves(kShortestTrained, kLongestTrained))
      for (const char* pass : {"fwd:", "bwd:"})
        for (const char* packing : {"", ":varlen"}) items.add(pass + spec + packing, batch, length, length);
}

void add_serving(const ModelText& model, Items& items) {
  const std::string kind = fmt::format("{}:{}", model.dtype, model.dims);
  const std::string attention =
      fmt::format("fwd:{}{}{}{}{}", kind, model.codes, model.mask, model.rest, model.cache);
  for (const std::int64_t batch : octaves(1, kMostSequences))
    for (const std::int64_t keys : octaves(64, kMostKeys)) {
      for (const std::int64_t queries : octaves(1, kMostDecoded)) items.add(attention, batch, queries, keys);
      for (const std::int64_t queries : octaves(1, std::min(keys, kMostQueries))) {
        items.add(attention + ":varlen", batch, queries, keys);
        if (model.shared_prefix) items.add(attention + ":varlen:shared_prefix", batch, queries, keys);
      }
    }
  for (const char* packing : {"", ":varlen"})
    items.add(fmt::format("append:{}{}{}{}", kind, model.codes, model.cache, packing), 1, 1, 64);
  items.add(fmt::format("merge:{}", kind), 1, 1, 64);
}

}  // namespace

std::vector<PackItem> model_items(std::string_view text, const DeviceInfo& device,
                                  const plan::TuningRecords& records) {
  const ModelText model = read_model(text);
  Items items(model, device, records);
  (model.cache == kTraining ? add_training : add_serving)(model, items);
  return items.take();
}

}  // namespace flashjit::command

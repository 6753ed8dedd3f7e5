// Which kernels of a product of specs, families and devices tests compile and run. At night all of them, with
// FLASHJIT_EVERY_KERNEL=1.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/digest.hpp"
#include "plan/family.hpp"
#include "render/render.hpp"

namespace flashjit::test {

/// Family sm75 is for sm_75: newer GPUs compute with it in tests alone.
inline bool is_planned(const plan::FamilyTraits& family, const DeviceInfo& device) {
  return family.family != Family::sm75 || device.compute_capability < 80;
}

inline bool every_kernel() { return std::getenv("FLASHJIT_EVERY_KERNEL") != nullptr; }

/// Whether a run has this one of many: one in `of`, drawn by its name and the templates, so that every run of
/// a commit has the same, and a change of a template others; at night all.
inline bool is_drawn(const std::string& name, std::uint64_t of) {
  static const std::string templates = [] {
    std::string all;
    for (const auto& [file, text] : render::TemplateSet::embedded().all()) all += text;
    return cache::digest_of(all);
  }();
  const std::string digits = cache::digest_of(templates + name).substr(0, 8);
  return every_kernel() || std::stoull(digits, nullptr, 16) % of == 0;
}

/// One of two choices, or both at night: the first and the second by turns, the other way round in
/// every other row.
class Turns {
 public:
  void next_row() { turn_ = ++row_; }
  template <class T>
  std::vector<T> of(const T& first, const T& second) {
    if (every_kernel()) return {first, second};
    return {turn_++ % 2 == 0 ? first : second};
  }

 private:
  std::size_t row_ = 0, turn_ = 0;
};

/// The words between colons; a program is one word.
inline std::set<std::string> words_of(const KernelSpec& spec) {
  std::set<std::string> words;
  std::string word;
  int depth = 0;
  for (const char c : to_string(spec) + ":") {
    depth += (c == '{') - (c == '}');
    if (c == ':' && depth == 0) {
      words.insert(std::exchange(word, {}));
    } else {
      word += c;
    }
  }
  return words;
}

/// The fewest of `all`, found greedily, in which each fact about any of them is met; at night all.
template <class T, class FactsOf>
std::vector<T> covering(const std::vector<T>& all, FactsOf facts_of) {
  if (every_kernel()) return all;
  std::map<std::string, std::size_t> numbers;
  std::vector<std::vector<std::size_t>> facts;
  for (const T& one : all) {
    facts.emplace_back();
    for (const std::string& fact : facts_of(one))
      facts.back().push_back(numbers.try_emplace(fact, numbers.size()).first->second);
  }
  std::vector<char> open(numbers.size(), 1);
  std::set<std::size_t> chosen;
  for (;;) {
    std::size_t best = 0, most = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::size_t count = 0;
      for (const std::size_t number : facts[i]) count += open[number];
      if (count > most) best = i, most = count;
    }
    if (most == 0) break;
    for (const std::size_t number : facts[best]) open[number] = 0;
    chosen.insert(best);
  }
  std::vector<T> found;
  for (const std::size_t i : chosen) found.push_back(all[i]);
  return found;
}

/// Each word of a spec beside `place`, and `place`.
inline std::set<std::string> words_beside(const KernelSpec& spec, const std::string& place) {
  std::set<std::string> facts{place};
  for (const std::string& word : words_of(spec)) facts.insert(word + " " + place);
  return facts;
}

/// What an emulated case shows: `problem` by its family, and each word of the spec. Family sm75 has sm80's
/// kernels with other instructions, so words without programs are enough there.
inline std::set<std::string> shown_by(const KernelSpec& spec, Family family, const std::string& problem) {
  std::set<std::string> facts = words_beside(spec, std::string(to_string(family)));
  if (family == Family::sm75)
    std::erase_if(facts, [](const std::string& fact) { return fact.find('{') != std::string::npos; });
  else
    facts.insert(fmt::format("{} by {}", problem, to_string(family)));
  return facts;
}

/// The fewest specs that have each word of any.
inline std::vector<KernelSpec> covering_words(const std::vector<KernelSpec>& specs) {
  return covering(specs, [](const KernelSpec& spec) { return words_beside(spec, ""); });
}

struct Place {
  std::size_t spec, family, device;
};

/// Every spec by the first family that can do it, on some device; every word of a spec with every family and
/// with every device; every family on every device.
inline std::vector<Place> spread(const std::vector<KernelSpec>& specs,
                                 std::span<const plan::FamilyTraits* const> families,
                                 std::span<const DeviceInfo> devices) {
  std::vector<std::pair<Place, bool>> offered;  // and whether it is the first family's
  for (std::size_t i = 0; i < specs.size(); ++i) {
    std::size_t first = families.size();
    for (std::size_t f = 0; f < families.size(); ++f)
      for (std::size_t d = 0; d < devices.size(); ++d)
        if (families[f]->supports(specs[i], devices[d])) {
          first = std::min(first, f);
          offered.push_back({{i, f, d}, f == first});
        }
  }
  const auto facts_of = [&](const std::pair<Place, bool>& offer) {
    const auto& [place, is_first] = offer;
    const std::string family = fmt::format("by {}", place.family),
                      device = fmt::format("on {}", place.device);
    std::set<std::string> facts = words_beside(specs[place.spec], family);
    facts.merge(words_beside(specs[place.spec], device));
    facts.insert(family + device);
    if (is_first) facts.insert(fmt::format("spec {}", place.spec));
    return facts;
  };
  std::vector<Place> chosen;
  for (const auto& [place, is_first] : covering(offered, facts_of)) chosen.push_back(place);
  return chosen;
}

}  // namespace flashjit::test

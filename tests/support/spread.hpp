// Which kernels of a product of specs, families and devices the compile tests compile. At night all of them,
// with FLASHJIT_EVERY_KERNEL=1.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/family.hpp"

namespace flashjit::test {

/// Family sm75 is for sm_75: newer GPUs compute with it in tests alone.
inline bool is_planned(const plan::FamilyTraits& family, const DeviceInfo& device) {
  return family.family != Family::sm75 || device.compute_capability < 80;
}

inline bool every_kernel() { return std::getenv("FLASHJIT_EVERY_KERNEL") != nullptr; }

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

struct Place {
  std::size_t spec, family, device;
};

/// Every spec by the first family that can do it, on some device; every word of a spec with every family and
/// with every device; every family on every device. Greedy and deterministic.
inline std::vector<Place> spread(const std::vector<KernelSpec>& specs,
                                 std::span<const plan::FamilyTraits* const> families,
                                 std::span<const DeviceInfo> devices) {
  std::map<std::string, std::size_t> numbers;
  std::vector<std::pair<Place, std::vector<std::size_t>>> offered;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::set<std::string> words = words_of(specs[i]);
    std::size_t first = families.size();
    for (std::size_t f = 0; f < families.size(); ++f) {
      for (std::size_t d = 0; d < devices.size(); ++d) {
        if (!families[f]->supports(specs[i], devices[d])) continue;
        first = std::min(first, f);
        const std::string family = " by " + std::to_string(f), device = " on " + std::to_string(d);
        std::set<std::string> met{family + device};
        if (f == first) met.insert(std::to_string(i));
        for (const std::string& word : words) met.insert({word + family, word + device});
        std::vector<std::size_t> of_place;
        for (const std::string& one : met)
          of_place.push_back(numbers.try_emplace(one, numbers.size()).first->second);
        offered.push_back({{i, f, d}, std::move(of_place)});
      }
    }
  }

  std::vector<Place> chosen;
  if (every_kernel()) {
    for (const auto& [place, met] : offered) chosen.push_back(place);
    return chosen;
  }
  std::vector<char> open(numbers.size(), 1);
  for (;;) {
    std::size_t best = 0, most = 0;
    for (std::size_t i = 0; i < offered.size(); ++i) {
      std::size_t count = 0;
      for (const std::size_t number : offered[i].second) count += open[number];
      if (count > most) best = i, most = count;
    }
    if (most == 0) return chosen;
    for (const std::size_t number : offered[best].second) open[number] = 0;
    chosen.push_back(offered[best].first);
  }
}

}  // namespace flashjit::test

// A small set of specs in which every two values of different features occur together at least once.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "flashjit/spec.hpp"

namespace flashjit::test {

using Row = std::vector<std::size_t>;  // the chosen value of each feature
using Features = std::vector<std::vector<std::string>>;

/// Every combination, the last feature fastest.
inline std::vector<Row> product(const Features& features) {
  std::vector<Row> rows{{}};
  for (const auto& values : features) {
    std::vector<Row> longer;
    for (const Row& row : rows) {
      for (std::size_t value = 0; value < values.size(); ++value) {
        longer.push_back(row);
        longer.back().push_back(value);
      }
    }
    rows = std::move(longer);
  }
  return rows;
}

/// The pairs of values of two features that no chosen row has yet.
class OpenPairs {
 public:
  OpenPairs(const Features& features, const std::vector<Row>& rows) {
    for (const auto& values : features) first_.push_back(values_), values_ += values.size();
    open_.resize(values_ * values_);
    for (const Row& row : rows) set(row, 1);
  }

  std::size_t count(const Row& row) const {
    std::size_t sum = 0;
    for (std::size_t j = 1; j < row.size(); ++j) {
      const char* open = open_.data() + (first_[j] + row[j]) * values_;
      for (std::size_t i = 0; i < j; ++i) sum += open[first_[i] + row[i]];
    }
    return sum;
  }
  void close(const Row& row) { set(row, 0); }
  bool empty() const { return std::ranges::count(open_, 1) == 0; }

 private:
  void set(const Row& row, char open) {
    for (std::size_t j = 1; j < row.size(); ++j)
      for (std::size_t i = 0; i < j; ++i) open_[(first_[j] + row[j]) * values_ + first_[i] + row[i]] = open;
  }

  std::size_t values_ = 0;          // of all features
  std::vector<std::size_t> first_;  // value of each feature, among all
  std::vector<char> open_;          // by the later feature's value, then the earlier one's
};

/// Greedy: always the combination with the most pairs that are not covered yet. Deterministic.
inline std::vector<Row> pairwise(const Features& features) {
  const std::vector<Row> all = product(features);
  OpenPairs open(features, all);
  std::vector<Row> chosen;
  while (!open.empty()) {
    std::size_t best = 0, best_count = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t count = open.count(all[i]);
      if (count > best_count) best = i, best_count = count;
    }
    open.close(all[best]);
    chosen.push_back(all[best]);
  }
  return chosen;
}

inline const std::vector<std::string> kHeadDims{":d128", ":d64",  ":d8",   ":d40",
                                                ":d96",  ":d192", ":d256", ":d192x128"};
inline const std::vector<std::string> kMasks{"", ":causal", ":causal_top_left"};

inline std::vector<KernelSpec> specs_covering(const Features& features) {
  std::vector<KernelSpec> specs;
  for (const Row& row : pairwise(features)) {
    std::string text;
    for (std::size_t i = 0; i < row.size(); ++i) text += features[i][row[i]];
    specs.push_back(parse_spec(text).normalized());
  }
  return specs;
}

inline std::vector<KernelSpec> covering_specs() {
  return specs_covering({
      {"fwd", "bwd"},
      {":bf16", ":fp16", ":fp32"},
      kHeadDims,
      kMasks,
      {"", ":dropout"},
      {"", ":kvlen", ":varlen"},
      {"", ":map64x64", ":map16x256"},
      {"", ":det"},
      {"", ":sinks"},
      {"", ":row_max"},
      {"", ":fp32_out", ":fp32_grads"},
      {"", ":invariant"},
  });
}

/// Above 256 columns, with fewer values of each feature.
inline std::vector<KernelSpec> covering_wide_specs() {
  return specs_covering({{"fwd", "bwd"},
                         {":bf16", ":fp32"},
                         {":d512", ":d320x256", ":d576x512", ":d264"},
                         {"", ":causal"},
                         {"", ":dropout", ":kvlen", ":map16x256", ":varlen:sinks"},
                         {"", ":det"}});
}

/// P and dS as two elements each, up to 256 columns.
inline std::vector<KernelSpec> covering_specs_of_two_terms() {
  return specs_covering({{"fwd", "bwd"},
                         {":bf16", ":fp16"},
                         {":d128", ":d64", ":d16", ":d96", ":d192", ":d256", ":d192x128"},
                         kMasks,
                         {"", ":dropout", ":score{50.0 * tanh(score / 50.0)}"},
                         {"", ":kvlen", ":varlen"},
                         {"", ":map64x64"},
                         {"", ":det"},
                         {":fp32_out:two_terms", ":fp32_out:fp32_grads:two_terms", ":sinks:two_terms"}});
}

/// K and V of 8 bits.
inline std::vector<KernelSpec> covering_specs_of_codes() {
  return specs_covering({{"fwd"},
                         {":bf16", ":fp16"},
                         {":d128", ":d64", ":d16", ":d96", ":d192", ":d256", ":d192x128"},
                         {":kve4m3", ":kve4m3:key_scales", ":kve5m2", ":kvint8:key_scales"},
                         kMasks,
                         {"", ":dropout"},
                         {"", ":kvlen", ":varlen", ":varlen:pages16", ":cache", ":pages3"},
                         {"", ":map64x64", ":map16x256"},
                         {"", ":sinks"},
                         {"", ":row_max"}});
}

/// Q, too; without d256, which spills some words outside of the loop.
inline std::vector<KernelSpec> covering_specs_of_products_of_codes() {
  return specs_covering({{"fwd"},
                         {":bf16", ":fp16"},
                         {":d128", ":d64", ":d16", ":d80", ":d192", ":d256x128", ":d192x128"},
                         {":kve4m3:q_codes", ":kve5m2:q_codes", ":kve4m3:q_codes:key_scales",
                          ":kve4m3:q_codes:sums4", ":kve4m3:q_codes:sums_all"},
                         kMasks,
                         {"", ":dropout", ":score{50.0 * tanh(score / 50.0)}"},
                         {"", ":kvlen", ":varlen", ":varlen:pages16", ":cache", ":pages3"},
                         {"", ":map64x64", ":map16x256"},
                         {"", ":sinks", ":fp32_out"},
                         {"", ":row_max"}});
}

/// What a family can do that has no options: most of covering_specs() is beyond it.
inline std::vector<KernelSpec> covering_plain_specs() {
  return specs_covering({{"fwd", "bwd"},
                         {":bf16", ":fp16"},
                         kHeadDims,
                         kMasks,
                         {"", ":dropout", ":kvlen", ":map128x128", ":det", ":kvlen:map32x32:det", ":varlen",
                          ":sinks", ":varlen:sinks:det", ":varlen:row_max"}});
}

}  // namespace flashjit::test

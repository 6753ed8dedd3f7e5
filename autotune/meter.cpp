#include "autotune/meter.hpp"

#include <algorithm>

#include "autotune/inputs.hpp"

namespace flashjit::autotune {

std::vector<std::size_t> launch_order(std::size_t candidates, int rounds) {
  std::vector<std::size_t> order;
  for (int round = 0; round < rounds; ++round)
    for (std::size_t i = 0; i <= candidates; ++i) order.push_back(round % 2 == 0 ? i : candidates - i);
  return order;
}

Comparison compare_times(const std::vector<double>& ms, std::size_t candidates) {
  const std::size_t round = candidates + 1;
  const std::vector<std::size_t> order = launch_order(candidates, static_cast<int>(ms.size() / round));
  std::vector<double> reference;
  std::vector<std::vector<double>> ratios(candidates);
  for (std::size_t from = 0; from < order.size(); from += 2 * round) {
    std::vector<double> sums(round, 0);
    for (std::size_t i = from; i < std::min(from + 2 * round, order.size()); ++i) {
      sums[order[i]] += ms[i];
      if (order[i] == 0) reference.push_back(ms[i]);
    }
    for (std::size_t c = 0; c < candidates; ++c) ratios[c].push_back(sums[c + 1] / sums[0]);
  }
  Comparison comparison{median(std::move(reference)), {}};
  for (std::vector<double>& each : ratios) comparison.ratios.push_back(median(std::move(each)));
  return comparison;
}

}  // namespace flashjit::autotune

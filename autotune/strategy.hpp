// Which candidates are worth measuring next: the model's predictions, corrected by what was measured nearby.
#pragma once

#include <cstddef>
#include <vector>

#include "flashjit/spec.hpp"

namespace flashjit::autotune {

/// The logarithm of (time / prediction) is taken as a Gaussian process over the configurations: near ones err
/// alike, configurations of one family somewhat alike. A candidate is worth what it is expected to improve
/// the best time by. A pure function of its arguments; of equal candidates the first wins.
class Strategy {
 public:
  /// Each candidate has a configuration and a predicted time, which is above 0.
  Strategy(std::vector<TileConfig> configs, const std::vector<double>& predicted_ms);

  void measured(std::size_t candidate, double ms);
  void rule_out(std::size_t candidate);

  /// Up to `count` candidates neither measured nor ruled out, the most promising first, each chosen as if
  /// those before it had come out as expected. Those that are expected to improve the best by less than
  /// `least` (0.01: by one per cent) are left out.
  std::vector<std::size_t> next(std::size_t count, double least = 0) const;

  /// What is expected of a candidate after all that was measured.
  double expected_ms(std::size_t candidate) const;

 private:
  struct Posterior {
    std::vector<double> mean, deviation;  ///< of the logarithm of the time
  };
  Posterior posterior(const std::vector<std::size_t>& known, const std::vector<double>& errors) const;

  std::vector<TileConfig> configs_;
  std::vector<double> log_predicted_;
  std::vector<std::size_t> known_;
  std::vector<double> errors_;  ///< of `known_`: log(time / prediction)
  std::vector<bool> open_;
};

}  // namespace flashjit::autotune

#include "autotune/strategy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace flashjit::autotune {
namespace {

// Variances of the model's error in log(time): what all configurations of a problem share, what a family
// shares, what near ones share, and what each has of its own.
constexpr double kSharedVariance = 0.20 * 0.20;
constexpr double kFamilyVariance = 0.12 * 0.12;
constexpr double kNearVariance = 0.15 * 0.15;
constexpr double kOwnVariance = 0.03 * 0.03;
constexpr double kNoiseVariance = 0.005 * 0.005;

/// How unlike two configurations of one family are; at 1 their errors are correlated by 0.6.
double squared_distance(const TileConfig& a, const TileConfig& b) {
  const auto octaves = [](int x, int y) {
    return std::log2(static_cast<double>(std::max(x, 1))) - std::log2(static_cast<double>(std::max(y, 1)));
  };
  const auto square = [](double x) { return x * x; };
  return square(1.2 * octaves(a.br, b.br)) + square(1.5 * octaves(a.bc, b.bc)) +
         square(0.8 * octaves(a.warps, b.warps)) + square(0.6 * (a.stages - b.stages)) +
         square(0.8 * (a.q_in_registers - b.q_in_registers)) + square(1.0 * (a.d_split - b.d_split)) +
         square(0.6 * (a.min_blocks - b.min_blocks)) + square(1.2 * (a.split - b.split)) +
         square(1.2 * (a.pack_gqa - b.pack_gqa)) + square(1.2 * (a.cluster - b.cluster)) +
         square(0.6 * (a.tma - b.tma)) + square(1.2 * (a.decode_cache - b.decode_cache)) +
         square(1.2 * (a.join_lists - b.join_lists));
}

double covariance(const TileConfig& a, const TileConfig& b) {
  if (a.family != b.family) return kSharedVariance;
  return kSharedVariance + kFamilyVariance + kNearVariance * std::exp(-squared_distance(a, b) / 2) +
         (a == b ? kOwnVariance : 0);
}

/// Lower triangle of a Cholesky factor, row by row.
class Cholesky {
 public:
  /// Adds a row of the matrix: its covariances with the rows before, and its own variance.
  void add(const std::vector<double>& row, double variance) {
    std::vector<double> solved = solve(row);
    double rest = variance;
    for (const double x : solved) rest -= x * x;
    solved.push_back(std::sqrt(std::max(rest, 1e-12)));
    rows_.push_back(std::move(solved));
  }
  /// L x = b.
  std::vector<double> solve(const std::vector<double>& b) const {
    std::vector<double> x(rows_.size());
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      double rest = b[i];
      for (std::size_t j = 0; j < i; ++j) rest -= rows_[i][j] * x[j];
      x[i] = rest / rows_[i][i];
    }
    return x;
  }

 private:
  std::vector<std::vector<double>> rows_;
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// How far below `best` a normal variable is expected to come, counting 0 where it does not.
double expected_improvement(double best, double mean, double deviation) {
  const double z = (best - mean) / deviation;
  const double density = std::exp(-z * z / 2) / std::sqrt(2 * std::numbers::pi);
  const double below = std::erfc(-z / std::numbers::sqrt2) / 2;
  return deviation * (z * below + density);
}

}  // namespace

Strategy::Strategy(std::vector<TileConfig> configs, const std::vector<double>& predicted_ms)
    : configs_(std::move(configs)), open_(configs_.size(), true) {
  for (const double ms : predicted_ms) log_predicted_.push_back(std::log(ms));
}

void Strategy::measured(std::size_t candidate, double ms) {
  if (!open_.at(candidate)) return;
  known_.push_back(candidate);
  errors_.push_back(std::log(ms) - log_predicted_[candidate]);
  open_[candidate] = false;
}

void Strategy::rule_out(std::size_t candidate) { open_.at(candidate) = false; }

Strategy::Posterior Strategy::posterior(const std::vector<std::size_t>& known,
                                        const std::vector<double>& errors) const {
  Cholesky factor;
  for (std::size_t i = 0; i < known.size(); ++i) {
    const TileConfig& config = configs_[known[i]];
    std::vector<double> row;
    for (std::size_t j = 0; j < i; ++j) row.push_back(covariance(config, configs_[known[j]]));
    factor.add(row, covariance(config, config) + kNoiseVariance);
  }
  const std::vector<double> weights = factor.solve(errors);
  Posterior out;
  for (std::size_t i = 0; i < configs_.size(); ++i) {
    std::vector<double> row;
    for (const std::size_t j : known) row.push_back(covariance(configs_[i], configs_[j]));
    const std::vector<double> solved = factor.solve(row);
    const double variance = covariance(configs_[i], configs_[i]) - dot(solved, solved);
    out.mean.push_back(log_predicted_[i] + dot(solved, weights));
    out.deviation.push_back(std::sqrt(std::max(variance, 1e-12)));
  }
  return out;
}

std::vector<std::size_t> Strategy::next(std::size_t count, double least) const {
  std::vector<std::size_t> known = known_;
  std::vector<double> errors = errors_;
  std::vector<bool> open = open_;
  double best = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < known.size(); ++i) best = std::min(best, log_predicted_[known[i]] + errors[i]);

  std::vector<std::size_t> chosen;
  while (chosen.size() < count) {
    const Posterior now = posterior(known, errors);
    std::size_t most_promising = configs_.size();
    double most = -std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < configs_.size(); ++i) {
      if (!open[i]) continue;
      // Nothing to improve on yet: the one that is expected to be fastest.
      const double worth =
          known.empty() ? -now.mean[i] : expected_improvement(best, now.mean[i], now.deviation[i]);
      if (worth <= most) continue;
      most = worth;
      most_promising = i;
    }
    if (most_promising == configs_.size() || (!known.empty() && most < least)) break;
    chosen.push_back(most_promising);
    open[most_promising] = false;
    known.push_back(most_promising);
    errors.push_back(now.mean[most_promising] - log_predicted_[most_promising]);
    best = std::min(best, now.mean[most_promising]);
  }
  return chosen;
}

double Strategy::expected_ms(std::size_t candidate) const {
  return std::exp(posterior(known_, errors_).mean.at(candidate));
}

}  // namespace flashjit::autotune

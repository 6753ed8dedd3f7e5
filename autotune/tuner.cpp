#include "autotune/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "autotune/compile_ahead.hpp"
#include "plan/family.hpp"
#include "support/file.hpp"

namespace flashjit::autotune {
namespace {

/// How a reason begins that does not last: the next run measures such a candidate.
constexpr std::string_view kNotReached = "not reached: ";

/// Slower than this many times the best after one launch: not worth more launches.
constexpr double kHopeless = 2.0;

/// Within this factor of the best, a candidate is measured again beside the others.
constexpr double kContender = 1.10;
constexpr std::size_t kMostContenders = 6;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool measured(const plan::Timing& timing) { return timing.skipped.empty() && timing.ms > 0; }
bool settled(const plan::Timing& timing) { return !timing.skipped.starts_with(kNotReached); }

double least_ms(const std::vector<plan::Timing>& timings) {
  double least = 0;
  for (const plan::Timing& timing : timings) {
    if (measured(timing) && (least == 0 || timing.ms < least)) least = timing.ms;
  }
  return least;
}

bool rules_out_candidate_only(ErrorCode code) {
  return code == ErrorCode::compile_failed || code == ErrorCode::unsupported ||
         code == ErrorCode::invalid_argument;
}

void require_work(const Problem& problem) {
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = problem.shape;
  if (batch > 0 && heads_q > 0 && heads_kv > 0 && seqlen_q > 0 && seqlen_kv > 0) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} has a size of 0, so there is nothing to measure; give sizes of at least 1",
                          to_string(problem.shape)));
}

struct CanonicalOrder {
  bool operator()(const TileConfig& a, const TileConfig& b) const { return canonical_less(a, b); }
};

/// One search over one problem: what is known of each candidate, and the steps that learn more.
class Search {
 public:
  Search(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options)
      : problem_{problem.spec.normalized(), problem.shape},
        setting_(setting),
        meter_(meter),
        options_(options),
        now_(options.now ? options.now : steady_seconds),
        start_(now_()) {
    problem_.spec.validate();
    problem_.shape.validate();
    require_work(problem_);
    order_ = candidates(problem_, setting_.device, options_.families);
    const std::size_t chosen =
        options_.max_candidates ? std::min(options_.max_candidates, order_.size()) : order_.size();
    const std::string beyond = fmt::format("{}beyond the first {} candidates", kNotReached, chosen);
    for (std::size_t i = chosen; i < order_.size(); ++i) set({order_[i], 0, beyond});
    chosen_.assign(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(chosen));
    for (const TileConfig& config : chosen_) set({config, 0, std::string(kNotReached) + "interrupted"});
  }

  /// Takes over what an earlier run settled under the same conditions.
  void remember(const plan::TuningRecord& known) {
    if (known.spec != problem_.spec || known.shape != problem_.shape || known.arch != setting_.device.arch ||
        known.device != setting_.device.name || known.library != setting_.library) {
      return;
    }
    for (const plan::Timing& timing : known.timings) {
      const bool meaningful = measured(timing) || (settled(timing) && !timing.skipped.empty());
      if (meaningful && still_possible(timing.config)) set(timing);
    }
  }

  std::vector<TileConfig> pending() const {
    if (options_.force) return chosen_;
    std::vector<TileConfig> left;
    for (const TileConfig& config : chosen_) {
      if (!settled(results_.at(config))) left.push_back(config);
    }
    return left;
  }

  Ending run(const std::vector<TileConfig>& pending) {
    Ending ending = measure_each(pending);
    if (ending == Ending::complete) ending = measure_fastest_together();
    return ending;
  }

  plan::TuningRecord record() const {
    plan::TuningRecord record{.spec = problem_.spec,
                              .shape = problem_.shape,
                              .arch = setting_.device.arch,
                              .device = setting_.device.name,
                              .driver = setting_.driver,
                              .nvrtc = setting_.nvrtc,
                              .library = setting_.library,
                              .best = {},
                              .timings = timings()};
    const auto best = finalists_.empty() ? pick(record.timings) : pick(finalists_);
    record.best = best.value_or(heuristic());
    return record;
  }

  const TileConfig& heuristic() const { return order_.front(); }
  std::size_t measured_now() const { return measured_now_; }

 private:
  /// Also a candidate that this run leaves out (by family, say) keeps its timing.
  bool still_possible(const TileConfig& config) const {
    return results_.contains(config) ||
           plan::traits(config.family).admits(problem_.spec, config, setting_.device).ok;
  }

  void set(plan::Timing timing) { results_[timing.config] = std::move(timing); }

  std::vector<plan::Timing> timings() const {
    std::vector<plan::Timing> all;
    for (const auto& [config, timing] : results_) all.push_back(timing);
    return all;
  }

  /// Why to stop now, if so.
  std::optional<Ending> asked_to_stop() const {
    if (options_.stop && options_.stop()) return Ending::interrupted;
    if (options_.budget_seconds > 0 && now_() - start_ >= options_.budget_seconds)
      return Ending::budget_spent;
    return {};
  }

  Ending measure_each(const std::vector<TileConfig>& pending) {
    const unsigned threads = options_.compile_threads ? options_.compile_threads
                                                      : std::max(1u, std::thread::hardware_concurrency());
    CompileAhead<KernelReport> kernels(pending.size(), threads,
                                       [&](std::size_t i) { return meter_.prepare(problem_, pending[i]); });
    for (std::size_t i = 0; i < pending.size(); ++i) {
      if (const auto ending = asked_to_stop()) {
        leave(pending, i, *ending);
        return *ending;
      }
      plan::Timing timing = settle(pending[i], [&] { return kernels.take(i); });
      set(timing);
      if (options_.report) options_.report({timing, i + 1, pending.size(), least_ms(timings())});
    }
    return Ending::complete;
  }

  /// Marks the rest as not reached, unless an earlier run knows more.
  void leave(const std::vector<TileConfig>& pending, std::size_t from, Ending why) {
    for (std::size_t i = from; i < pending.size(); ++i) {
      if (!settled(results_.at(pending[i]))) set({pending[i], 0, std::string(kNotReached) + to_string(why)});
    }
  }

  plan::Timing settle(const TileConfig& config, const std::function<KernelReport()>& prepared) {
    try {
      const KernelReport kernel = prepared();
      if (kernel.config != config) return {config, 0, "runs as " + to_string(kernel.config)};
      const std::string reason = disqualified(problem_.spec, kernel, setting_.device);
      if (!reason.empty()) return {config, 0, reason};
      prepared_.insert(config);
      const double ms = measure(config);
      ++measured_now_;
      return {config, ms, {}};
    } catch (const Error& error) {
      if (!rules_out_candidate_only(error.code())) throw;
      return {config, 0, error.message()};
    }
  }

  double measure(const TileConfig& config) {
    const double first = meter_.median_ms(problem_, std::span(&config, 1), 1).front();
    const double best = least_ms(timings());
    if (best > 0 && first > kHopeless * best) return first;
    return meter_.median_ms(problem_, std::span(&config, 1), options_.repeats).front();
  }

  /// The fastest few again, in turn with one another and while nothing compiles: theirs are the times that
  /// decide.
  Ending measure_fastest_together() {
    std::vector<plan::Timing> fastest = contenders();
    if (fastest.size() < 2) return Ending::complete;
    if (const auto ending = asked_to_stop()) return *ending;
    std::vector<TileConfig> configs;
    for (const plan::Timing& timing : fastest) {
      if (!prepared_.contains(timing.config)) meter_.prepare(problem_, timing.config);
      configs.push_back(timing.config);
    }
    const std::vector<double> ms = meter_.median_ms(problem_, configs, options_.final_repeats);
    for (std::size_t i = 0; i < fastest.size(); ++i) {
      fastest[i].ms = ms.at(i);
      set(fastest[i]);
    }
    finalists_ = std::move(fastest);
    return Ending::complete;
  }

  std::vector<plan::Timing> contenders() const {
    std::vector<plan::Timing> close;
    const double least = least_ms(timings());
    for (const plan::Timing& timing : timings()) {
      if (measured(timing) && timing.ms <= least * kContender) close.push_back(timing);
    }
    std::stable_sort(close.begin(), close.end(), [](const auto& a, const auto& b) { return a.ms < b.ms; });
    close.resize(std::min(close.size(), kMostContenders));
    return close;
  }

  Problem problem_;
  const Setting& setting_;
  Meter& meter_;
  const TuneOptions& options_;
  std::function<double()> now_;
  double start_;
  std::vector<TileConfig> order_, chosen_;
  std::map<TileConfig, plan::Timing, CanonicalOrder> results_;
  std::set<TileConfig, CanonicalOrder> prepared_;
  std::vector<plan::Timing> finalists_;
  std::size_t measured_now_ = 0;
};

double ms_of(const plan::TuningRecord& record, const TileConfig& config) {
  for (const plan::Timing& timing : record.timings) {
    if (timing.config == config && measured(timing)) return timing.ms;
  }
  return 0;
}

/// An unreadable record is as good as none: it is written anew.
std::optional<plan::TuningRecord> read_record(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return {};
  try {
    return plan::parse_record(read_file(path));
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

std::string to_string(Ending ending) {
  switch (ending) {
    case Ending::complete:
      return "complete";
    case Ending::already_tuned:
      return "already tuned";
    case Ending::budget_spent:
      return "budget spent";
    case Ending::interrupted:
      return "interrupted";
  }
  return "unknown";
}

bool TuneResult::has_best() const { return best_ms() > 0; }
double TuneResult::best_ms() const { return ms_of(record, record.best); }
double TuneResult::heuristic_ms() const { return ms_of(record, heuristic); }

std::optional<TileConfig> pick(const std::vector<plan::Timing>& timings) {
  const double least = least_ms(timings);
  std::optional<TileConfig> best;
  for (const plan::Timing& timing : timings) {
    if (!measured(timing) || timing.ms > least * (1 + kNoise)) continue;
    if (!best || canonical_less(timing.config, *best)) best = timing.config;
  }
  return best;
}

TuneResult tune(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options,
                const std::optional<plan::TuningRecord>& known,
                const std::function<void(const plan::TuningRecord&)>& keep) {
  Search search(problem, setting, meter, options);
  if (known) search.remember(*known);
  const std::vector<TileConfig> pending = search.pending();
  if (pending.empty()) return {*known, Ending::already_tuned, search.heuristic(), 0};

  const auto keep_known = [&] {
    if (keep && search.measured_now() > 0) keep(search.record());
  };
  Ending ending;
  try {
    ending = search.run(pending);
  } catch (...) {
    keep_known();
    throw;
  }
  keep_known();
  return {search.record(), ending, search.heuristic(), search.measured_now()};
}

TuneResult tune_into(const std::filesystem::path& records_folder, const Problem& problem,
                     const Setting& setting, Meter& meter, const TuneOptions& options) {
  plan::TuningRecord name;
  name.spec = problem.spec.normalized();
  name.shape = problem.shape;
  name.arch = setting.device.arch;
  return tune(problem, setting, meter, options, read_record(records_folder / plan::record_path(name)),
              [&](const plan::TuningRecord& record) { plan::write_record(records_folder, record); });
}

}  // namespace flashjit::autotune

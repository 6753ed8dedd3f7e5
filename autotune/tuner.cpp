#include "autotune/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "autotune/compile_ahead.hpp"
#include "autotune/strategy.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "support/file.hpp"
#include "support/json.hpp"

namespace flashjit::autotune {
namespace {

/// How a reason begins that does not last: the next run may measure such a candidate.
constexpr std::string_view kNotReached = "not reached: ";
/// How a reason begins for a candidate that the search passed over: an exhaustive run measures it.
constexpr std::string_view kLeftOut = "left out: ";
constexpr std::string_view kUnpromising = "left out: no improvement is expected of it";

/// Candidates chosen at a time: what was measured before one batch decides on the next.
constexpr std::size_t kBatch = 4;
/// An expected improvement below this is not worth a measurement.
constexpr double kWorthwhile = 0.0005;

/// Slower than this many times the best after one launch: not worth more launches.
constexpr double kHopeless = 1.5;
/// How long a candidate is measured for, and in how many rounds: an even number, see launch_order().
constexpr double kMeasureMs = 12;
constexpr int kFewestRounds = 6;

/// Within this factor of the best, a candidate is measured again together with the others.
constexpr double kContender = 1.05;
constexpr std::size_t kMostContenders = 6;
constexpr int kMostFinals = 3;
constexpr int kMeasurements = 9;  // in a final, but of long kernels fewer
constexpr int kFewestMeasurements = 3;
constexpr double kFinalMs = 10;       // for each contender in one of them
constexpr double kAllFinalMs = 2000;  // for all
/// More than this is not noise but a measurement gone wrong.
constexpr double kMostNoise = 0.01;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool measured(const plan::Timing& timing) { return timing.skipped.empty() && timing.ms > 0; }

int rounds_for(double ms, double total_ms) {
  return 2 * static_cast<int>(std::clamp<double>(total_ms / ms, kFewestRounds, kMostRounds) / 2);
}

double least_ms(const std::vector<plan::Timing>& timings) {
  double least = 0;
  for (const plan::Timing& timing : timings) {
    if (measured(timing) && (least == 0 || timing.ms < least)) least = timing.ms;
  }
  return least;
}

Problem require_work(Problem problem) {
  problem.spec.validate();
  problem.shape.validate();
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = problem.shape;
  if (batch > 0 && heads_q > 0 && heads_kv > 0 && seqlen_q > 0 && seqlen_kv > 0) return problem;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} has a size of 0, so there is nothing to measure; give sizes of at least 1",
                          to_string(problem.shape)));
}

/// What a report says of the main kernel: of several, the one that needs most.
void note_resources(plan::Timing& timing, const KernelSpec& spec, const KernelReport& kernel) {
  for (const plan::Entry& entry : plan::traits(kernel.config.family).kernel(spec, kernel.config).entries) {
    for (const EntryReport& report : kernel.entries) {
      if (!entry.hot || report.entry != entry.name) continue;
      timing.registers = std::max(timing.registers, report.registers);
      timing.spill_bytes = std::max(timing.spill_bytes, report.spill_bytes);
    }
  }
}

/// One search over one problem: what is known of each candidate, and the steps that learn more. Candidates go
/// by their place in order_.
class Search {
 public:
  Search(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options)
      : setting_(setting),
        meter_(meter),
        options_(options),
        now_(options.now ? options.now : steady_seconds),
        start_(now_()),
        model_(require_work(problem), setting.device, options.map_density),
        problem_(model_.problem()),
        heuristic_(autotune::candidates(model_, options.families).front()),
        order_(within_workspace(autotune::candidates(model_, options.families))),
        strategy_(order_, predicted()),
        timings_(order_.size()),
        prepared_(order_.size(), false) {
    for (std::size_t i = 0; i < order_.size(); ++i) timings_[i] = {order_[i], 0, not_reached("interrupted")};
    const double share = options_.share * static_cast<double>(order_.size());
    limit_ = options_.exhaustive ? order_.size() : std::max(static_cast<std::size_t>(share), kFewest);
    if (options_.max_candidates) limit_ = std::min(limit_, options_.max_candidates);
    limit_ = std::min(limit_, order_.size());
    for (const TileConfig& config : options_.leads) add_lead(config);
    prune();
  }

  /// Takes over what an earlier run settled under the same conditions; of other conditions the best is a
  /// lead.
  void remember(const plan::TuningRecord& known) {
    if (known.spec != problem_.spec || known.shape != problem_.shape) return;
    add_lead(known.best);
    if (!is_current(known, problem_, setting_)) return;
    for (const plan::Timing& timing : known.timings) {
      const bool meaningful = measured(timing) || !timing.skipped.empty();
      if (!meaningful || timing.skipped.starts_with(kNotReached)) continue;
      if (const auto at = place(timing.config)) {
        if (measured(timing) || !settled_now_.contains(*at)) timings_[*at] = timing;
      } else if (plan::traits(timing.config.family).admits(problem_.spec, timing.config, setting_.device)) {
        others_.push_back(timing);  // left out by the choice of families, say
      }
    }
    if (options_.force) return;
    reference_ = place(heuristic_);
    if (!reference_ || !measured(timings_[*reference_])) reference_ = fastest();
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (open(i)) continue;
      done_ += measured(timings_[i]);
      tell_strategy(i);
    }
  }

  /// Whether an earlier run left nothing to do.
  bool is_done() const {
    if (options_.force) return false;
    if (done_ >= limit_) return true;
    // A search that ended by itself is done; one that was stopped, or had a smaller share, is not.
    return std::ranges::none_of(timings_, [&](const plan::Timing& timing) {
      if (!options_.exhaustive && timing.skipped == kUnpromising) return false;
      return timing.skipped.starts_with(kNotReached) || timing.skipped.starts_with(kLeftOut);
    });
  }

  Ending run() {
    Ending ending = options_.exhaustive ? measure_all() : measure_promising();
    if (ending == Ending::complete) ending = decide();
    seconds_ = now_() - start_;
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
                              .timings = timings_};
    record.timings.insert(record.timings.end(), others_.begin(), others_.end());
    std::sort(record.timings.begin(), record.timings.end(),
              [](const auto& a, const auto& b) { return canonical_less(a.config, b.config); });
    std::vector<plan::Timing> finalists;
    for (const std::size_t i : finalists_) finalists.push_back(timings_[i]);
    const auto best =
        finalists.empty() ? pick(record.timings, heuristic_) : pick(finalists, heuristic_, noise_);
    record.best = best.value_or(heuristic_);
    return record;
  }

  TuneResult result(Ending ending) const {
    const double drift = most_ms_ > 0 ? most_ms_ / least_ms_ - 1 : 0;
    return {record(), ending, heuristic_, measured_now_, order_.size(), seconds_, drift, conditions_};
  }
  const TileConfig& heuristic() const { return heuristic_; }
  std::size_t candidates() const { return order_.size(); }
  std::size_t measured_now() const { return measured_now_; }

 private:
  static std::string not_reached(std::string_view why) { return fmt::format("{}{}", kNotReached, why); }

  std::vector<TileConfig> within_workspace(std::vector<TileConfig> configs) const {
    if (!options_.max_workspace) return configs;
    std::erase_if(configs, [&](const TileConfig& config) {
      const auto plan = plan::make_plan(problem_.spec, problem_.shape, setting_.device, {}, config);
      return plan.workspace.bytes > *options_.max_workspace;
    });
    if (configs.empty())
      throw Error(ErrorCode::unsupported,
                  fmt::format("no configuration of {} at {} does with {} bytes of workspace",
                              to_string(problem_.spec), to_string(problem_.shape), *options_.max_workspace));
    return configs;
  }

  /// Leaves out what the model expects little of, except for the heuristic's choice and the leads.
  void prune() {
    if (options_.prune <= 0) return;
    const std::vector<double> ms = predicted();
    const double least = std::ranges::min(ms);
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (order_[i] == heuristic_ || std::ranges::find(leads_, i) != leads_.end()) continue;
      if (ms[i] <= options_.prune * least) continue;
      timings_[i].skipped = fmt::format("{}predicted {:.1f} times slower", kLeftOut, ms[i] / least);
      settled_now_.insert(i);
      strategy_.rule_out(i);
    }
  }

  std::vector<double> predicted() const {
    std::vector<double> ms;
    for (const TileConfig& config : order_) ms.push_back(model_.predict(config).ms);
    return ms;
  }

  std::vector<std::size_t> places() const {
    std::vector<std::size_t> all(order_.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    return all;
  }
  std::optional<std::size_t> place(const TileConfig& config) const {
    const auto at = std::find(order_.begin(), order_.end(), config);
    if (at == order_.end()) return {};
    return static_cast<std::size_t>(at - order_.begin());
  }
  void add_lead(const TileConfig& config) {
    const auto at = place(config);
    if (at && std::ranges::find(leads_, *at) == leads_.end()) leads_.push_back(*at);
  }

  /// Whether a measurement would tell something new.
  bool open(std::size_t i) const {
    const std::string& skipped = timings_[i].skipped;
    return settled_now_.contains(i) ? false
           : options_.force         ? true
                                    : skipped.starts_with(kNotReached) || skipped.starts_with(kLeftOut);
  }

  void tell_strategy(std::size_t i) {
    if (measured(timings_[i])) strategy_.measured(i, timings_[i].ms);
    if (!measured(timings_[i])) strategy_.rule_out(i);
  }

  /// Why to stop now, if so.
  std::optional<Ending> asked_to_stop() const {
    if (options_.stop && options_.stop()) return Ending::interrupted;
    if (options_.budget_seconds > 0 && now_() - start_ >= options_.budget_seconds)
      return Ending::budget_spent;
    return {};
  }

  CompileAhead<KernelReport> compile_ahead() {
    const unsigned threads = options_.compile_threads ? options_.compile_threads
                                                      : std::max(1u, std::thread::hardware_concurrency());
    return {order_.size(), threads, [this](std::size_t i) { return meter_.prepare(problem_, order_[i]); }};
  }

  Ending measure_all() {
    std::vector<std::size_t> pending = places();
    std::erase_if(pending, [&](std::size_t i) { return !open(i); });
    CompileAhead<KernelReport> kernels = compile_ahead();
    for (const std::size_t i : pending) kernels.want(i);
    std::size_t done = 0;
    for (const std::size_t i : pending) {
      if (done_ >= limit_) break;
      if (const auto ending = asked_to_stop()) return leave(*ending), *ending;
      settle(i, kernels);
      tell(i, ++done, pending.size());
    }
    leave_out(fmt::format("{}beyond the first {} candidates", kLeftOut, limit_));
    return Ending::complete;
  }

  Ending measure_promising() {
    CompileAhead<KernelReport> kernels = compile_ahead();
    std::vector<std::size_t> batch = first_batch();
    const std::size_t ahead = 2 * kBatch;
    while (done_ < limit_ && !batch.empty()) {
      // Before anything compiles that would have to be waited for.
      if (const auto ending = asked_to_stop()) return leave(*ending), *ending;
      for (const std::size_t i : batch) kernels.want(i);
      // While these are measured, idle threads compile what would come next if all went as expected.
      for (const std::size_t i : strategy_.next(ahead, kWorthwhile)) kernels.want(i);
      for (const std::size_t i : batch) {
        if (done_ >= limit_) break;
        if (const auto ending = asked_to_stop()) return leave(*ending), *ending;
        settle(i, kernels);
        tell(i, done_, limit_);
      }
      // Until something could be measured there is nothing to improve on, and anything may.
      const double least = done_ < std::min(kFewest, limit_) ? 0 : kWorthwhile;
      batch = strategy_.next(std::min(kBatch, limit_ - done_), least);
    }
    const bool spent = done_ >= limit_ && !strategy_.next(1, kWorthwhile).empty();
    leave_out(spent ? fmt::format("{}beyond the first {} candidates", kLeftOut, limit_)
                    : std::string(kUnpromising));
    return Ending::complete;
  }

  /// The heuristic's choice, the leads, and of what is left the best by the model.
  std::vector<std::size_t> first_batch() {
    std::vector<std::size_t> batch;
    const auto add = [&](std::size_t i) {
      if (open(i) && std::ranges::find(batch, i) == batch.end()) batch.push_back(i);
    };
    if (const auto at = place(heuristic_)) add(*at);
    for (const std::size_t lead : leads_) add(lead);
    batch.resize(std::min(batch.size(), kBatch));
    const std::size_t wanted = std::max(kBatch, batch.size() + 1);
    for (const std::size_t i : strategy_.next(2 * kBatch, kWorthwhile)) {
      if (batch.size() < wanted) add(i);
    }
    return batch;
  }

  /// Marks what no run has settled.
  void leave(Ending why) { mark_open(not_reached(to_string(why))); }
  void leave_out(const std::string& why) { mark_open(why); }
  void mark_open(const std::string& why) {
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const std::string& skipped = timings_[i].skipped;
      if (settled_now_.contains(i)) continue;
      if (skipped.starts_with(kNotReached) || skipped.starts_with(kLeftOut)) timings_[i].skipped = why;
    }
  }

  void tell(std::size_t i, std::size_t done, std::size_t total) const {
    if (options_.report) options_.report({timings_[i], done, total, least_ms(timings_)});
  }

  void settle(std::size_t i, CompileAhead<KernelReport>& kernels) {
    plan::Timing timing{order_[i], 0, {}};
    try {
      const KernelReport kernel = kernels.take(i);
      note_resources(timing, problem_.spec, kernel);
      // The runtime would take the heuristic's choice although it spills, so that its time counts.
      timing.skipped = kernel.config != order_[i] ? "runs as " + to_string(kernel.config)
                       : order_[i] == heuristic_  ? std::string()
                                                  : disqualified(problem_.spec, kernel, setting_.device);
      if (timing.skipped.empty()) {
        prepared_[i] = true;
        timing.ms = measure(i);
        ++measured_now_;
        ++done_;
      }
    } catch (const Error& error) {
      if (!rules_out_candidate_only(error.code())) throw;
      timing.skipped = error.message();
    }
    timings_[i] = timing;
    settled_now_.insert(i);
    tell_strategy(i);
  }

  void prepare(std::size_t i) {
    if (!prepared_[i]) meter_.prepare(problem_, order_[i]);
    prepared_[i] = true;
  }

  /// As the meter does, and notes how warm and fast the GPU was.
  Comparison compare(std::size_t reference, std::span<const TileConfig> candidates, int rounds) {
    prepare(reference);
    Comparison compared = meter_.compare(problem_, order_[reference], candidates, rounds);
    conditions_.add(meter_.state());
    if (rounds == 1) return compared;
    least_ms_ = most_ms_ > 0 ? std::min(least_ms_, compared.reference_ms) : compared.reference_ms;
    most_ms_ = std::max(most_ms_, compared.reference_ms);
    return compared;
  }

  /// The first that can be measured, which is the heuristic's choice if it can, becomes the reference.
  double measure(std::size_t i) { return reference_ ? measure_beside_reference(i) : measure_reference(i); }

  double measure_reference(std::size_t i) {
    const double first = compare(i, {}, 1).reference_ms;
    const double ms = compare(i, {}, rounds_for(first, kMeasureMs)).reference_ms;
    if (measured(timings_[i])) rescale(ms / timings_[i].ms);  // what an earlier run left
    reference_ = i;
    return ms;
  }

  double measure_beside_reference(std::size_t i) {
    const std::span<const TileConfig> config(&order_[i], 1);
    const double reference_ms = timings_[*reference_].ms;
    const double first = reference_ms * compare(*reference_, config, 1).ratios.front();
    if (first > kHopeless * best_ms()) return first;
    return reference_ms * compare(*reference_, config, rounds_for(first, kMeasureMs)).ratios.front();
  }

  /// All times are the reference's by a ratio: they change with it.
  void rescale(double factor) {
    for (plan::Timing& timing : timings_) timing.ms *= factor;
    for (plan::Timing& timing : others_) timing.ms *= factor;
  }

  /// The best time measured; in a forced run, of configurations that it has settled.
  double best_ms() const {
    double best = 0;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (!measured(timings_[i]) || (options_.force && !settled_now_.contains(i))) continue;
      if (best == 0 || timings_[i].ms < best) best = timings_[i].ms;
    }
    return best;
  }

  std::optional<std::size_t> fastest() const {
    std::vector<std::size_t> all = places();
    std::erase_if(all, [&](std::size_t i) { return !measured(timings_[i]); });
    if (all.empty()) return {};
    return *std::ranges::min_element(all, {}, [&](std::size_t i) { return timings_[i].ms; });
  }

  /// The fastest few again, while nothing compiles: these times decide. Whoever looks faster after that than
  /// the fastest of them takes part in another final.
  Ending decide() {
    for (int i = 0; i < kMostFinals; ++i) {
      const std::vector<std::size_t> fastest = contenders();
      if (fastest.empty()) break;
      if (const auto ending = asked_to_stop()) return *ending;
      measure_together(fastest);
    }
    return Ending::complete;
  }

  /// How far apart a candidate's measurements are is what counts as noise.
  void measure_together(const std::vector<std::size_t>& all) {
    std::vector<TileConfig> configs;
    double slowest = timings_[*reference_].ms;
    for (const std::size_t i : all) {
      prepare(i);
      configs.push_back(order_[i]);
      slowest = std::max(slowest, timings_[i].ms);
    }
    const int rounds = rounds_for(slowest, kFinalMs);
    const double one_ms = rounds * slowest * static_cast<double>(all.size() + 1);
    const int measurements =
        static_cast<int>(std::clamp<double>(kAllFinalMs / one_ms, kFewestMeasurements, kMeasurements));
    std::vector<double> reference_ms;
    std::vector<std::vector<double>> ratios(all.size());
    for (int measurement = 0; measurement < measurements; ++measurement) {
      const Comparison compared = compare(*reference_, configs, rounds);
      reference_ms.push_back(compared.reference_ms);
      for (std::size_t i = 0; i < all.size(); ++i) ratios[i].push_back(compared.ratios.at(i));
      if (options_.stop && options_.stop()) break;
    }
    rescale(median(reference_ms) / timings_[*reference_].ms);
    finalists_.insert(*reference_);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto [least, most] = std::ranges::minmax(ratios[i]);
      const double ratio = median(ratios[i]);
      noise_ = std::max(noise_, std::min((most - least) / 2 / ratio, kMostNoise));
      timings_[all[i]].ms = ratio * timings_[*reference_].ms;
      finalists_.insert(all[i]);
    }
  }

  /// Candidates that no final has measured, beside the reference: at first the fastest few, the leads of
  /// earlier records, and the heuristic's choice; then only candidates that look faster than the finalists.
  std::vector<std::size_t> contenders() const {
    const bool first = finalists_.empty();
    double limit = kContender * least_ms(timings_);
    for (const std::size_t i : finalists_) limit = std::min(limit, timings_[i].ms);
    std::vector<std::size_t> open = places();
    std::erase_if(open, [&](std::size_t i) {
      return !measured(timings_[i]) || i == reference_ || finalists_.contains(i);
    });
    std::ranges::stable_sort(open, {}, [&](std::size_t i) { return timings_[i].ms; });
    std::vector<std::size_t> chosen;
    for (const std::size_t i : open) {
      const bool close = first ? timings_[i].ms <= limit : timings_[i].ms < limit;
      const bool known =
          first && (order_[i] == heuristic_ || (close && std::ranges::find(leads_, i) != leads_.end()));
      if (known || (close && chosen.size() < kMostContenders)) chosen.push_back(i);
    }
    return chosen;
  }

  const Setting& setting_;
  Meter& meter_;
  const TuneOptions& options_;
  std::function<double()> now_;
  double start_;
  Model model_;
  Problem problem_;
  TileConfig heuristic_;
  std::vector<TileConfig> order_;
  Strategy strategy_;
  std::vector<plan::Timing> timings_;  // of order_
  std::vector<plan::Timing> others_;   // of candidates that are not in order_
  std::vector<bool> prepared_;
  std::vector<std::size_t> leads_;
  std::set<std::size_t> settled_now_;
  std::optional<std::size_t> reference_;  // beside which all others are measured
  std::set<std::size_t> finalists_;
  std::size_t limit_ = 0, done_ = 0;  // measured, in earlier runs too
  std::size_t measured_now_ = 0;
  double noise_ = kNoise, seconds_ = 0;
  double least_ms_ = 0, most_ms_ = 0;  // of the reference
  Conditions conditions_;
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
    return plan::parse_record(read_file(path, kMaxJsonBytes));
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

std::optional<TileConfig> pick(const std::vector<plan::Timing>& timings, const TileConfig& heuristic,
                               double noise) {
  const double least = least_ms(timings);
  std::optional<TileConfig> best;
  for (const plan::Timing& timing : timings) {
    if (!measured(timing) || timing.ms > least * (1 + noise)) continue;
    if (timing.config == heuristic) return heuristic;
    if (!best || canonical_less(timing.config, *best)) best = timing.config;
  }
  return best;
}

bool is_current(const plan::TuningRecord& record, const Problem& problem, const Setting& setting) {
  return record.spec == problem.spec.normalized() && record.shape == problem.shape &&
         record.arch == setting.device.arch && record.device == setting.device.name &&
         record.driver == setting.driver && record.nvrtc == setting.nvrtc &&
         record.library == setting.library;
}

TuneResult tune(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options,
                const std::optional<plan::TuningRecord>& known,
                const std::function<void(const plan::TuningRecord&)>& keep) {
  Search search(problem, setting, meter, options);
  if (known) search.remember(*known);
  if (search.is_done()) return {*known, Ending::already_tuned, search.heuristic(), 0, search.candidates()};

  const auto keep_known = [&] {
    if (keep && search.measured_now() > 0) keep(search.record());
  };
  Ending ending;
  try {
    ending = search.run();
  } catch (...) {
    keep_known();
    throw;
  }
  keep_known();
  return search.result(ending);
}

TuneResult tune_into(const std::filesystem::path& records_folder, const Problem& problem,
                     const Setting& setting, Meter& meter, const TuneOptions& options) {
  const Problem computed = plan::fold_gqa(problem.spec, problem.shape);  // as it is looked up
  plan::TuningRecord name;
  name.spec = computed.spec;
  name.shape = computed.shape;
  name.arch = setting.device.arch;
  return tune(computed, setting, meter, options, read_record(records_folder / plan::record_path(name)),
              [&](const plan::TuningRecord& record) { plan::write_record(records_folder, record); });
}

}  // namespace flashjit::autotune

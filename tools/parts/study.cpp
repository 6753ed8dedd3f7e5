#include "tools/parts/study.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "autotune/inputs.hpp"
#include "plan/plan.hpp"

namespace flashjit::autotune {
namespace {

// What issue 6 asks of the tuner.
constexpr double kWantedSlower = 1.02, kWantedShare = 0.15, kWantedSeconds = 20;
constexpr double kWantedUntunedMedian = 1.05, kWantedUntunedWorst = 1.15;

const plan::Timing* timing_of(const plan::TuningRecord& record, const TileConfig& config) {
  const auto at = std::ranges::find(record.timings, config, &plan::Timing::config);
  return at == record.timings.end() || at->ms <= 0 ? nullptr : &*at;
}

double least_ms(const plan::TuningRecord& record) {
  double least = 0;
  for (const plan::Timing& timing : record.timings)
    if (timing.ms > 0 && (least == 0 || timing.ms < least)) least = timing.ms;
  return least;
}

std::vector<double> ranks(const std::vector<double>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return values[i]; });
  std::vector<double> rank(values.size());
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin;
    while (end < order.size() && values[order[end]] == values[order[begin]]) ++end;
    for (std::size_t i = begin; i < end; ++i) rank[order[i]] = static_cast<double>(begin + end - 1) / 2;
    begin = end;
  }
  return rank;
}

double model_correlation(const Model& model, const plan::TuningRecord& record) {
  std::vector<double> predicted, measured;
  for (const plan::Timing& timing : record.timings) {
    if (timing.ms <= 0) continue;
    predicted.push_back(model.predict(timing.config).ms);
    measured.push_back(timing.ms);
  }
  return rank_correlation(predicted, measured);
}

/// Two columns, empty where nothing is known.
std::string least_and_most(const std::optional<Range>& range) {
  return range ? fmt::format("{},{}", range->least, range->most) : ",";
}

std::string times(std::optional<double> slower) { return slower ? fmt::format("{:.3f}", *slower) : "-"; }

/// A line of the summary: what was wanted, what was found, over all rows.
std::string verdict(const char* what, const char* wanted, const std::string& found, bool ok) {
  return fmt::format("| {} | {} | {} | {} |\n", what, wanted, found, ok ? "yes" : "no");
}

/// `value` of the rows that have one, sorted.
template <class Value>
std::vector<double> sorted(const std::vector<StudyRow>& rows, Value value) {
  std::vector<double> all;
  for (const StudyRow& row : rows)
    if (const std::optional<double> x = value(row)) all.push_back(*x);
  std::ranges::sort(all);
  return all;
}

std::string median_and_worst(const std::vector<double>& values) {
  return values.empty() ? "-" : fmt::format("{:.3f} / {:.3f}", median(values), values.back());
}

}  // namespace

std::optional<double> StudyRow::slower(const TileConfig& config) const {
  const plan::Timing* timing = timing_of(exhaustive, config);
  if (!timing) return {};
  return timing->ms / least_ms(exhaustive);
}

double rank_correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const std::vector<double> x = ranks(a), y = ranks(b);
  const double middle = (static_cast<double>(x.size()) - 1) / 2;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    xy += (x[i] - middle) * (y[i] - middle);
    xx += (x[i] - middle) * (x[i] - middle);
    yy += (y[i] - middle) * (y[i] - middle);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0;
}

StudyRow study(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options) {
  meter.compile_anew(true);
  const TuneResult search = tune(problem, setting, meter, options);
  meter.compile_anew(false);
  TuneOptions everything = options;
  everything.exhaustive = true;
  everything.prune = kStudyPrune;
  const TuneResult all = tune(problem, setting, meter, everything, search.record);
  StudyRow row;
  row.problem = {search.record.spec, search.record.shape};
  row.chosen = search.record;
  row.exhaustive = all.record;
  row.heuristic = search.heuristic;
  row.candidates = search.candidates;
  row.measured = search.measured;
  row.seconds = search.seconds;
  row.drift = all.drift;
  row.conditions = search.conditions;
  row.conditions.add(all.conditions);
  row.correlation = model_correlation(Model(row.problem, setting.device, options.map_density), all.record);
  return row;
}

void compare_untuned(std::vector<StudyRow>& rows, const DeviceInfo& device) {
  for (StudyRow& row : rows) {
    plan::TuningRecords others;
    for (const StudyRow& other : rows)
      if (&other != &row && other.problem != row.problem) others.add(other.chosen);
    const plan::ExecutionPlan plan = plan::make_plan(row.problem.spec, row.problem.shape, device, others);
    row.untuned = plan.config;
    row.untuned_by_record = plan.config_source != "heuristic";
  }
}

void measure_untuned(StudyRow& row, Meter& meter) {
  const plan::Timing* best = timing_of(row.exhaustive, row.exhaustive.best);
  if (!best || timing_of(row.exhaustive, row.untuned)) return;
  try {
    for (const TileConfig& config : {best->config, row.untuned}) meter.prepare(row.problem, config);
    const Comparison compared = meter.compare(row.problem, best->config, {&row.untuned, 1}, kMostRounds);
    row.conditions.add(meter.state());
    const double ms = compared.ratios.front() * best->ms;
    const auto known = std::ranges::find(row.exhaustive.timings, row.untuned, &plan::Timing::config);
    if (known != row.exhaustive.timings.end())
      known->ms = ms;
    else
      row.exhaustive.timings.push_back({row.untuned, ms, "not a candidate"});
  } catch (const Error& error) {
    if (!rules_out_candidate_only(error.code())) throw;
  }
}

std::string study_markdown(const std::vector<StudyRow>& rows, const Setting& setting) {
  const auto choice = sorted(rows, [](const StudyRow& row) { return row.slower(row.chosen.best); });
  const auto heuristic = sorted(rows, [](const StudyRow& row) { return row.slower(row.heuristic); });
  const auto untuned = sorted(rows, [](const StudyRow& row) { return row.slower(row.untuned); });
  const auto seconds = sorted(rows, [](const StudyRow& row) { return std::optional(row.seconds); });
  const auto correlation = sorted(rows, [](const StudyRow& row) { return std::optional(row.correlation); });
  const bool few = std::ranges::all_of(
      rows, [](const StudyRow& row) { return row.share() <= kWantedShare || row.measured <= kFewest; });
  std::size_t measured = 0, candidates = 0;
  for (const StudyRow& row : rows) {
    measured += row.measured;
    candidates += row.candidates;
  }
  const double share =
      candidates ? 100.0 * static_cast<double>(measured) / static_cast<double>(candidates) : 0;

  std::string text = fmt::format(
      "# The tuner against measuring everything\n\n{}, driver {}, {}, flashjit {}; a host of {} cores. {} "
      "problems; every search compiles anew all that it measures. Times are relative to the fastest of all "
      "candidates. Candidates that the model expects to be more than {:.0f} times slower than the best it "
      "knows are not measured, but for what the heuristic or the nearest record chooses. Made by `flashjit "
      "tune --study`.\n\n",
      setting.device.name, setting.driver, setting.nvrtc, setting.library,
      std::thread::hardware_concurrency(), rows.size(), kStudyPrune);
  text += "| median / worst | wanted | found | reached |\n|---|---|---|---|\n";
  if (!choice.empty())
    text += verdict("choice, times slower than the best", "worst 1.02", median_and_worst(choice),
                    choice.size() == rows.size() && choice.back() <= kWantedSlower);
  text += verdict("candidates measured", "15% a problem, or 6", fmt::format("{:.1f}% of all", share), few);
  if (!seconds.empty())
    text += verdict("seconds a problem, compiling included", "worst 20", median_and_worst(seconds),
                    seconds.back() <= kWantedSeconds);
  if (!untuned.empty())
    text += verdict("a shape without its record, times slower", "1.05 / 1.15", median_and_worst(untuned),
                    untuned.size() == rows.size() && median(untuned) <= kWantedUntunedMedian &&
                        untuned.back() <= kWantedUntunedWorst);
  if (!heuristic.empty())
    text += fmt::format("| the heuristic alone, times slower | | {} | |\n", median_and_worst(heuristic));
  if (!correlation.empty())
    text += fmt::format("| rank correlation of the model, median / least | | {:.3f} / {:.3f} | |\n",
                        median(correlation), correlation.front());

  text +=
      "\n| problem | shape | candidates | measured | s | choice | slower | best | heuristic | without record "
      "| "
      "by | rank corr. | drift | clock, MHz | C | slowed by |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const StudyRow& row : rows)
    text += fmt::format(
        "| `{}` | {} | {} | {} | {:.1f} | {} | {} | {} | {} | {} | {} | {:.2f} | {:.1f}% | {} | {} | {} |\n",
        to_string(row.problem.spec), to_string(row.problem.shape), row.candidates, row.measured, row.seconds,
        to_string(row.chosen.best), times(row.slower(row.chosen.best)), to_string(row.exhaustive.best),
        times(row.slower(row.heuristic)), times(row.slower(row.untuned)),
        row.untuned_by_record ? "record" : "heuristic", row.correlation, 100 * row.drift,
        range_text(row.conditions.clock_mhz), range_text(row.conditions.celsius),
        slowed_text(row.conditions.slowed_by));
  return text;
}

std::string study_csv(const std::vector<StudyRow>& rows) {
  std::string text =
      "spec,shape,candidates,measured,seconds,choice,choice_slower,best,best_ms,heuristic,heuristic_slower,"
      "untuned,untuned_slower,untuned_by,rank_correlation,drift,clock_mhz_least,clock_mhz_most,"
      "celsius_least,celsius_most,slowed_by\n";
  for (const StudyRow& row : rows)
    text +=
        fmt::format("\"{}\",{},{},{},{:.2f},{},{},{},{:.5f},{},{},{},{},{},{:.4f},{:.4f},{},{},\"{}\"\n",
                    to_string(row.problem.spec), to_string(row.problem.shape), row.candidates, row.measured,
                    row.seconds, to_string(row.chosen.best), times(row.slower(row.chosen.best)),
                    to_string(row.exhaustive.best), least_ms(row.exhaustive), to_string(row.heuristic),
                    times(row.slower(row.heuristic)), to_string(row.untuned), times(row.slower(row.untuned)),
                    row.untuned_by_record ? "record" : "heuristic", row.correlation, row.drift,
                    least_and_most(row.conditions.clock_mhz), least_and_most(row.conditions.celsius),
                    slowed_text(row.conditions.slowed_by));
  return text;
}

}  // namespace flashjit::autotune

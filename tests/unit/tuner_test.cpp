// The tuner with a fake kernel and a fake clock: what it picks, keeps, skips, resumes and leaves.
#include "autotune/tuner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "autotune/meter.hpp"
#include "autotune/space.hpp"
#include "flashjit/flashjit.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "plan/records.hpp"
#include "support/file.hpp"
#include "tests/support/tuning_problem.hpp"

namespace flashjit::autotune {
namespace {

using namespace test;

/// A GPU that is a table: every candidate has a time, and time passes only when something is measured.
class FakeMeter : public Meter {
 public:
  std::function<double(const TileConfig&)> ms = [](const TileConfig&) { return 1.0; };
  std::function<KernelReport(const TileConfig&)> compile = [](const TileConfig& config) {
    KernelReport report;
    report.config = config;
    return report;
  };
  std::function<void(const TileConfig&)> before_launch = [](const TileConfig&) {};
  std::function<device::GpuState()> state_now = [] { return device::GpuState{}; };
  double clock = 0;  // seconds

  device::GpuState state() override { return state_now(); }
  KernelReport prepare(const Problem&, const TileConfig& config) override {
    {
      const std::lock_guard lock(mutex_);
      ++prepared_[to_string(config)];
    }
    return compile(config);
  }

  Comparison compare(const Problem&, const TileConfig& reference, std::span<const TileConfig> candidates,
                     int rounds) override {
    at_once = candidates.size();
    ++measurements;
    std::vector<TileConfig> all{reference};
    all.insert(all.end(), candidates.begin(), candidates.end());
    for (const TileConfig& config : all)
      EXPECT_TRUE(prepared(config)) << to_string(config) << " was launched before it was prepared";
    if (rounds == 1) looked_at_.insert(to_string(all.back()));
    std::vector<double> times;
    for (const std::size_t i : launch_order(candidates.size(), rounds)) {
      before_launch(all[i]);
      times.push_back(ms(all[i]));
      clock += times.back() / 1e3;
    }
    return compare_times(times, candidates.size());
  }

  bool prepared(const TileConfig& config) {
    const std::lock_guard lock(mutex_);
    return prepared_.contains(to_string(config));
  }
  std::size_t prepared_count() {
    const std::lock_guard lock(mutex_);
    return prepared_.size();
  }
  /// What was launched once, before it was measured.
  const std::set<std::string>& looked_at() const { return looked_at_; }
  int measurements = 0;
  std::size_t at_once = 0;  ///< candidates that are launched beside the reference

 private:
  std::mutex mutex_;
  std::map<std::string, int> prepared_;
  std::set<std::string> looked_at_;
};

TuneOptions exhaustive() {
  TuneOptions options;
  options.exhaustive = true;
  return options;
}

plan::Timing timing_of(const plan::TuningRecord& record, const TileConfig& config) {
  for (const plan::Timing& timing : record.timings) {
    if (timing.config == config) return timing;
  }
  ADD_FAILURE() << "no timing of " << to_string(config);
  return {};
}

/// Slower by 5% with every step along the canonical order, so that there is one winner and it is known.
std::function<double(const TileConfig&)> slower_by_canonical_order() {
  auto order = all_candidates();
  std::sort(order.begin(), order.end(), canonical_less);
  return [order](const TileConfig& config) {
    const auto at = std::find(order.begin(), order.end(), config) - order.begin();
    return 1.0 + 0.05 * static_cast<double>(at);
  };
}

class TempFolder {
 public:
  TempFolder() : path_(std::filesystem::temp_directory_path() / ("flashjit_tune_" + unique_suffix())) {
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

TEST(Tune, PicksTheMinimumAndKeepsEveryTiming) {
  const auto list = all_candidates();
  for (std::size_t winner : {std::size_t{0}, list.size() / 2, list.size() - 1}) {
    FakeMeter meter;
    meter.ms = [&](const TileConfig& config) { return config == list[winner] ? 1.0 : 1.5; };
    const TuneResult result = tune(problem(), setting(), meter, exhaustive());
    EXPECT_EQ(result.ending, Ending::complete);
    EXPECT_EQ(result.record.best, list[winner]);
    EXPECT_EQ(result.best_ms(), 1.0);
    EXPECT_EQ(result.heuristic, list.front());
    EXPECT_EQ(result.heuristic_ms(), winner == 0 ? 1.0 : 1.5);
    EXPECT_EQ(result.measured, list.size());
    EXPECT_EQ(result.record.timings.size(), list.size());
    EXPECT_EQ(result.record.spec, problem().spec);
    EXPECT_EQ(result.record.shape, problem().shape);
    EXPECT_EQ(result.record.arch, "sm_80");
    EXPECT_EQ(result.record.library, "0.1.0");
  }
}

TEST(Tune, TheTimesOfTheFinalDecideAndOnlyTheirScaleIsKept) {
  const auto list = all_candidates();
  ASSERT_GE(list.size(), 4u);
  const TileConfig heuristic = list[0], steady = list[1], third = list[2], slower = list[3];
  FakeMeter meter;
  meter.ms = [&](const TileConfig& config) {
    const bool final = meter.at_once > 1;
    if (config == heuristic) return final ? 1.30 : 1.00;
    if (config == steady) return final ? 1.25 : 1.03;
    if (config == third) return final ? 1.28 : 1.04;
    return config == slower ? 1.15 : 4.0;  // in no final
  };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  EXPECT_EQ(result.record.best, steady);
  EXPECT_DOUBLE_EQ(timing_of(result.record, heuristic).ms, 1.30);
  EXPECT_DOUBLE_EQ(timing_of(result.record, steady).ms, 1.25);
  EXPECT_DOUBLE_EQ(timing_of(result.record, slower).ms, 1.15 * 1.30) << "the ratio by the reference's time";
}

/// A GPU under a power limit: while it works its clock falls by a quarter, and while it waits it recovers.
class PowerLimit {
 public:
  explicit PowerLimit(FakeMeter& meter) {
    meter.before_launch = [this](const TileConfig&) { clock_ = std::max(0.75, clock_ - 0.002); };
    meter.compile = [this](const TileConfig& config) {
      clock_ = 1;
      KernelReport report;
      report.config = config;
      return report;
    };
  }
  double clock() const { return clock_; }

 private:
  std::atomic<double> clock_ = 1;
};

TEST(Tune, AClockThatFallsByAQuarterDoesNotMoveTheChoice) {
  const auto list = all_candidates();
  for (const TileConfig& fastest : {list.front(), list[1], list[list.size() - 2]}) {
    FakeMeter meter;
    PowerLimit gpu(meter);
    meter.ms = [&](const TileConfig& config) { return (config == fastest ? 1.0 : 1.02) / gpu.clock(); };
    TuneOptions options = exhaustive();
    options.compile_threads = 1;
    const TuneResult result = tune(problem(), setting(), meter, options);
    EXPECT_EQ(result.record.best, fastest);
    EXPECT_NEAR(result.heuristic_ms() / result.best_ms(), fastest == list.front() ? 1 : 1.02, 0.002);
    for (const plan::Timing& timing : result.record.timings)
      EXPECT_GE(timing.ms, 0.998 * result.best_ms()) << "one scale: " << to_string(timing.config);
    EXPECT_GT(result.drift, 0.05) << "the clock moved";
  }
}

// What draws less power looks better the lower the clock is.
TEST(Tune, WhatLostToTheHeuristicInTheFinalIsNotChosen) {
  const auto list = all_candidates();
  FakeMeter meter;
  meter.ms = [&](const TileConfig& config) {
    if (config == list.front()) return 1.0;
    return meter.at_once > 1 ? 1.02 : 0.90;  // all look faster until they are measured together
  };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  EXPECT_EQ(result.record.best, list.front());
  meter.ms = [&](const TileConfig& config) {
    if (config == list.front()) return meter.at_once > 1 ? 1.0 : 1.3;  // no contender by its search
    return meter.at_once > 1 ? 1.02 : 1.0;
  };
  EXPECT_EQ(tune(problem(), setting(), meter, exhaustive()).record.best, list.front());
}

TEST(Tune, NothingIsChosenBesideWhatLooksFaster) {
  const auto list = all_candidates();
  ASSERT_GT(list.size(), 12u);
  FakeMeter meter;
  meter.ms = [&](const TileConfig& config) {
    const auto at = std::ranges::find(list, config) - list.begin();
    if (at == 0 || at > 9) return 1.2;
    return meter.at_once > 1 && at < 7 ? 1.1 : 1.0 + 0.001 * static_cast<double>(at);
  };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  for (const plan::Timing& timing : result.record.timings)
    EXPECT_GE(timing.ms, (1 - kNoise) * result.best_ms()) << to_string(timing.config);
}

TEST(Compare, RoundsGoBackAndForthSoThatASteadyFallOfTheClockCancels) {
  EXPECT_EQ(launch_order(2, 3), (std::vector<std::size_t>{0, 1, 2, 2, 1, 0, 0, 1, 2}));
  const std::vector<double> work{1, 2, 3};
  std::vector<double> ms;
  for (const std::size_t i : launch_order(2, 10))
    ms.push_back(work[i] * (1 + 0.01 * static_cast<double>(ms.size())));
  const Comparison compared = compare_times(ms, 2);
  EXPECT_NEAR(compared.ratios.at(0), 2, 1e-12);
  EXPECT_NEAR(compared.ratios.at(1), 3, 1e-12);
  EXPECT_NEAR(compared.reference_ms, 1.145, 0.03);
  EXPECT_EQ(compare_times({2, 5}, 1).ratios, std::vector<double>{2.5}) << "a single round";
  EXPECT_EQ(compare_times({2, 4, 3}, 0).reference_ms, 3);
}

TEST(Tune, TheConditionsSpanEveryMeasurement) {
  FakeMeter meter;
  EXPECT_EQ(tune(problem(), setting(), meter, exhaustive()).conditions, Conditions{}) << "nothing is known";
  std::vector<device::GpuState> read;
  meter.state_now = [&] {
    read.push_back({2000 - static_cast<int>(read.size()), 30 + static_cast<int>(read.size()), 0x4});
    return read.back();
  };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  EXPECT_GE(read.size(), result.measured) << "at least once a candidate";
  const int last_mhz = *read.back().clock_mhz, last_celsius = *read.back().celsius;
  EXPECT_EQ(result.conditions.clock_mhz, (Range{2000, last_mhz, last_mhz, 2000}));
  EXPECT_EQ(result.conditions.celsius, (Range{30, last_celsius, 30, last_celsius}));
  EXPECT_EQ(result.conditions.slowed_by, 0x4u);
}

TEST(Tune, WhatRepeatingShowsAsNoiseIsATie) {
  auto list = all_candidates();
  std::sort(list.begin(), list.end(), canonical_less);
  for (const double wobble : {0.0, 0.015}) {
    FakeMeter meter;
    meter.ms = [&](const TileConfig& config) {
      const double base = config == list[0]   ? 1.008
                          : config == list[1] ? 1.0
                          : config == list[2] ? 1.03
                                              : 4.0;
      const bool wobbles = meter.at_once > 1 && base < 4;  // the reference does not
      return wobbles ? base * (1 + wobble * (meter.measurements % 9)) : base;
    };
    EXPECT_EQ(tune(problem(), setting(), meter, exhaustive()).record.best, wobble > 0 ? list[0] : list[1]);
  }
}

TEST(Tune, ReasonsOfSkipsAreKept) {
  const auto list = all_candidates();
  ASSERT_GE(list.size(), 4u);
  FakeMeter meter;
  meter.compile = [&](const TileConfig& config) {
    if (config == list[0]) throw Error(ErrorCode::compile_failed, "ptxas said no");
    return report_with(config, 64, config == list[1] ? 48 : 0, 0);
  };
  meter.before_launch = [&](const TileConfig& config) {
    if (config == list[2]) throw Error(ErrorCode::unsupported, "too many resources");
  };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  EXPECT_EQ(result.ending, Ending::complete);
  EXPECT_EQ(timing_of(result.record, list[0]).skipped, "ptxas said no");
  EXPECT_NE(timing_of(result.record, list[1]).skipped.find("spills 48 bytes"), std::string::npos);
  EXPECT_EQ(timing_of(result.record, list[2]).skipped, "too many resources");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(timing_of(result.record, list[i]).ms, 0);
  EXPECT_EQ(result.measured, list.size() - 3);
  EXPECT_FALSE(meter.looked_at().contains(to_string(list[1])));
}

TEST(Tune, ABrokenDeviceEndsItAndWhatIsKnownIsKept) {
  const auto list = all_candidates();
  FakeMeter meter;
  meter.before_launch = [&](const TileConfig& config) {
    if (config == list[2]) throw Error(ErrorCode::cuda, "illegal address");
  };
  std::vector<plan::TuningRecord> kept;
  EXPECT_THROW(tune(problem(), setting(), meter, exhaustive(), {},
                    [&](const auto& record) { kept.push_back(record); }),
               Error);
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_GT(timing_of(kept[0], list[0]).ms, 0);
  EXPECT_GT(timing_of(kept[0], list[1]).ms, 0);
  EXPECT_EQ(timing_of(kept[0], list[2]).ms, 0);
  EXPECT_FALSE(timing_of(kept[0], list[2]).skipped.empty());
}

TEST(Tune, NothingMeasurableWritesNothing) {
  TempFolder folder;
  FakeMeter meter;
  meter.compile = [](const TileConfig&) -> KernelReport { throw Error(ErrorCode::compile_failed, "no"); };
  const TuneResult result = tune_into(folder.path(), problem(), setting(), meter, exhaustive());
  EXPECT_FALSE(result.has_best());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Tune, WhatIsTunedForOneQueryOfGroupedHeadsIsFound) {
  TempFolder folder;
  FakeMeter meter;
  const Problem one{parse_spec("fwd:bf16:d128:causal"), {2, 8, 2, 1, 1000}};
  const TuneResult result = tune_into(folder.path(), one, setting(), meter, exhaustive());
  plan::TuningRecords records;
  records.add(result.record);
  const plan::ExecutionPlan plan = plan::make_plan(one.spec, one.shape, setting().device, records);
  EXPECT_EQ(plan.config_source, ConfigSource::tuned);
  EXPECT_EQ(tune_into(folder.path(), one, setting(), meter, exhaustive()).ending, Ending::already_tuned);
}

TEST(Tune, AnEmptyProblemIsRefused) {
  FakeMeter meter;
  Problem empty = problem();
  empty.shape.seqlen_q = 0;
  try {
    tune(empty, setting(), meter);
    FAIL() << "there is nothing to measure";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(error.message().find("sq0"), std::string::npos) << error.message();
  }
  EXPECT_EQ(meter.prepared_count(), 0u);
}

TEST(Tune, ACandidateThatRunsAsAnotherIsNotMeasured) {
  const auto list = all_candidates();
  FakeMeter meter;
  meter.compile = [&](const TileConfig& config) {
    KernelReport report;
    report.config = config == list[1] ? list[0] : config;
    return report;
  };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  EXPECT_EQ(timing_of(result.record, list[1]).skipped, "runs as " + to_string(list[0]));
}

TEST(Tune, SlowCandidatesAreLaunchedOnce) {
  const auto list = all_candidates();
  FakeMeter meter;
  std::map<std::string, int> launches;
  meter.ms = [&](const TileConfig& config) { return config == list[0] ? 1.0 : 10.0; };
  meter.before_launch = [&](const TileConfig& config) { ++launches[to_string(config)]; };
  tune(problem(), setting(), meter, exhaustive());
  EXPECT_EQ(launches.at(to_string(list[0])), 1 + 12 + (static_cast<int>(list.size()) - 1));
  EXPECT_EQ(launches.at(to_string(list[1])), 1);
}

TEST(Tune, MaxCandidatesTakesTheFirstAndMoreLaterAddsTheRest) {
  const auto list = all_candidates();
  ASSERT_GT(list.size(), 4u);
  TempFolder folder;
  FakeMeter meter;
  TuneOptions options = exhaustive();
  options.max_candidates = 3;
  const TuneResult few = tune_into(folder.path(), problem(), setting(), meter, options);
  EXPECT_EQ(few.ending, Ending::complete);
  EXPECT_EQ(few.measured, 3u);
  EXPECT_NE(timing_of(few.record, list[3]).skipped.find("beyond the first 3"), std::string::npos);
  EXPECT_EQ(tune_into(folder.path(), problem(), setting(), meter, options).ending, Ending::already_tuned);
  options.max_candidates = 4;
  EXPECT_EQ(tune_into(folder.path(), problem(), setting(), meter, options).measured, 1u);
}

TEST(Resume, ADoneProblemIsNotTouched) {
  TempFolder folder;
  FakeMeter first, second;
  first.ms = slower_by_canonical_order();
  const TuneResult done = tune_into(folder.path(), problem(), setting(), first, exhaustive());
  const TuneResult again = tune_into(folder.path(), problem(), setting(), second, exhaustive());
  EXPECT_EQ(again.ending, Ending::already_tuned);
  EXPECT_EQ(again.record, done.record);
  EXPECT_EQ(second.prepared_count(), 0u);
}

TEST(Resume, ForceMeasuresAgain) {
  TempFolder folder;
  FakeMeter first, second;
  const auto list = all_candidates();
  tune_into(folder.path(), problem(), setting(), first, exhaustive());
  second.ms = [&](const TileConfig& config) { return config == list.back() ? 0.5 : 1.0; };
  TuneOptions options = exhaustive();
  options.force = true;
  const TuneResult again = tune_into(folder.path(), problem(), setting(), second, options);
  EXPECT_EQ(again.ending, Ending::complete);
  EXPECT_EQ(again.record.best, list.back());
}

TEST(Resume, AnInterruptKeepsWhatIsKnownAndTheNextRunMeasuresOnlyTheRest) {
  const auto list = all_candidates();
  ASSERT_GT(list.size(), 5u);
  TempFolder folder;
  FakeMeter first, second;
  const auto ms = [&](const TileConfig& config) {
    return config == list[3] ? 1.0 : config == list.back() ? 1.05 : 2.0;
  };
  first.ms = second.ms = ms;
  TuneOptions options = exhaustive();
  options.stop = [&] { return first.looked_at().size() >= 4; };
  const TuneResult half = tune_into(folder.path(), problem(), setting(), first, options);
  EXPECT_EQ(half.ending, Ending::interrupted);
  EXPECT_EQ(half.record.best, list[3]);
  EXPECT_EQ(half.measured, 4u);
  EXPECT_EQ(timing_of(half.record, list[5]).skipped, "not reached: interrupted");

  const plan::TuningRecord written =
      plan::parse_record(read_file(folder.path() / plan::record_path(half.record)));
  EXPECT_EQ(written, half.record);

  const TuneResult rest = tune_into(folder.path(), problem(), setting(), second, exhaustive());
  EXPECT_EQ(rest.ending, Ending::complete);
  EXPECT_EQ(rest.measured, list.size() - 4);
  EXPECT_EQ(rest.record.best, list[3]);
  for (const std::string& config : first.looked_at()) {
    EXPECT_FALSE(second.looked_at().contains(config)) << config << " was measured twice";
  }
}

TEST(Resume, AnInterruptBeforeAnythingWritesNothing) {
  TempFolder folder;
  FakeMeter meter;
  TuneOptions options = exhaustive();
  options.stop = [] { return true; };
  const TuneResult result = tune_into(folder.path(), problem(), setting(), meter, options);
  EXPECT_EQ(result.ending, Ending::interrupted);
  EXPECT_FALSE(result.has_best());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Resume, AForcedRunThatIsInterruptedLosesNoTiming) {
  const auto list = all_candidates();
  TempFolder folder;
  FakeMeter first, second;
  first.ms = slower_by_canonical_order();
  const TuneResult done = tune_into(folder.path(), problem(), setting(), first, exhaustive());
  second.ms = first.ms;
  TuneOptions options = exhaustive();
  options.force = true;
  options.stop = [&] { return second.looked_at().size() >= 2; };
  const TuneResult forced = tune_into(folder.path(), problem(), setting(), second, options);
  EXPECT_EQ(forced.ending, Ending::interrupted);
  EXPECT_EQ(forced.record.timings, done.record.timings);
  EXPECT_EQ(forced.record.best, done.record.best);
}

TEST(Resume, AnotherDeviceOrLibraryStartsAnew) {
  TempFolder folder;
  FakeMeter first, second, third;
  tune_into(folder.path(), problem(), setting(), first, exhaustive());
  Setting other = setting();
  other.device.name = "another GPU of this architecture";
  EXPECT_EQ(tune_into(folder.path(), problem(), other, second, exhaustive()).ending, Ending::complete);
  other.library = "0.2.0";
  EXPECT_EQ(tune_into(folder.path(), problem(), other, third, exhaustive()).ending, Ending::complete);
  for (const auto version : {&Setting::driver, &Setting::nvrtc}) {
    FakeMeter meter;
    other.*version += ".1";
    EXPECT_EQ(tune_into(folder.path(), problem(), other, meter, exhaustive()).ending, Ending::complete);
    EXPECT_EQ(meter.prepared_count(), all_candidates().size());
  }
}

TEST(Resume, ADamagedRecordIsWrittenAnew) {
  TempFolder folder;
  FakeMeter first, second;
  const TuneResult done = tune_into(folder.path(), problem(), setting(), first, exhaustive());
  const auto path = folder.path() / plan::record_path(done.record);
  std::ofstream(path, std::ios::trunc) << "{\"format\": 1, \"spec\":";
  EXPECT_EQ(tune_into(folder.path(), problem(), setting(), second, exhaustive()).ending, Ending::complete);
  EXPECT_EQ(plan::parse_record(read_file(path)).best, done.record.best);
}

TEST(Resume, FamiliesLeftOutKeepTheirTimings) {
  TempFolder folder;
  FakeMeter first, second;
  tune_into(folder.path(), problem(), setting(), first, exhaustive());
  TuneOptions options = exhaustive();
  options.families = {Family::sm80};
  options.force = true;
  const TuneResult result = tune_into(folder.path(), problem(), setting(), second, options);
  EXPECT_EQ(result.record.timings.size(), all_candidates().size());
  for (const std::string& config : second.looked_at()) EXPECT_EQ(config.rfind("sm80", 0), 0u) << config;
}

TEST(Tune, BudgetIsHonoured) {
  const auto list = all_candidates();
  FakeMeter meter;
  // 1 + 6 launches of the first, as many of each other one and of the first beside it: 0.7 s, then 1.4 s.
  meter.ms = [](const TileConfig&) { return 100.0; };
  TuneOptions options = exhaustive();
  options.now = [&] { return meter.clock; };
  options.budget_seconds = 2.5;
  const TuneResult result = tune(problem(), setting(), meter, options);
  EXPECT_EQ(result.ending, Ending::budget_spent);
  EXPECT_EQ(result.measured, 3u);
  EXPECT_LE(meter.clock, 2.5 + 1.4 + 1e-9);
  EXPECT_EQ(timing_of(result.record, list[3]).skipped, "not reached: budget spent");
  EXPECT_TRUE(result.has_best());
}

TEST(Tune, EventsCountEveryCandidateOnce) {
  FakeMeter meter;
  std::vector<Event> events;
  TuneOptions options = exhaustive();
  options.report = [&](const Event& event) { events.push_back(event); };
  tune(problem(), setting(), meter, options);
  ASSERT_EQ(events.size(), all_candidates().size());
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].done, i + 1);
    EXPECT_EQ(events[i].total, events.size());
    EXPECT_EQ(events[i].timing.config, all_candidates()[i]);
  }
}

TEST(Tune, TheRecordDoesNotDependOnTheCompileThreads) {
  std::optional<plan::TuningRecord> expected;
  for (unsigned threads : {1u, 3u, 16u}) {
    FakeMeter meter;
    meter.ms = slower_by_canonical_order();
    meter.compile = [](const TileConfig& config) {
      std::this_thread::sleep_for(std::chrono::microseconds(config.br * 37 % 400));
      if (config.bc == 32 && config.stages == 1) throw Error(ErrorCode::compile_failed, "does not compile");
      KernelReport report;
      report.config = config;
      return report;
    };
    TuneOptions options = exhaustive();
    options.compile_threads = threads;
    const TuneResult result = tune(problem(), setting(), meter, options);
    if (expected) {
      EXPECT_EQ(result.record, *expected);
    }
    expected = result.record;
  }
}

}  // namespace
}  // namespace flashjit::autotune

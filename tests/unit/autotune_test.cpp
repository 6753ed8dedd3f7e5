// The tuner with a fake kernel and a fake clock: what it picks, keeps, skips, resumes and leaves.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "autotune/compile_ahead.hpp"
#include "autotune/inputs.hpp"
#include "autotune/meter.hpp"
#include "autotune/space.hpp"
#include "autotune/tuner.hpp"
#include "flashjit/flashjit.hpp"
#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "plan/records.hpp"
#include "plan/tiles.hpp"
#include "support/file.hpp"

namespace flashjit::autotune {
namespace {

Problem problem() {
  Problem p;
  p.spec = parse_spec("fwd:bf16:d64:causal").normalized();
  p.shape = parse_shape("b2:hq4:hkv2:sq1024:skv1024");
  return p;
}

Setting setting() { return {DeviceInfo::parse("sm_80"), "13.0", "nvrtc13.0", "0.1.0"}; }

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

  std::vector<double> median_ms(const Problem&, std::span<const TileConfig> configs, int repeats) override {
    std::vector<double> times;
    at_once = configs.size();
    for (const TileConfig& config : configs) {
      before_launch(config);
      EXPECT_TRUE(prepared(config)) << to_string(config) << " was launched before it was prepared";
      if (configs.size() == 1) alone_.insert(to_string(config));
      times.push_back(ms(config));
      clock += times.back() * repeats / 1e3;
    }
    return times;
  }

  bool prepared(const TileConfig& config) {
    const std::lock_guard lock(mutex_);
    return prepared_.contains(to_string(config));
  }
  std::size_t prepared_count() {
    const std::lock_guard lock(mutex_);
    return prepared_.size();
  }
  const std::set<std::string>& measured_alone() const { return alone_; }
  std::size_t at_once = 0;  ///< candidates that are launched in turn

 private:
  std::mutex mutex_;
  std::map<std::string, int> prepared_;
  std::set<std::string> alone_;
};

std::vector<TileConfig> candidates_of(const Problem& p, const DeviceInfo& device,
                                      const std::vector<Family>& families = {}) {
  return candidates(Model(p, device), families);
}
std::vector<TileConfig> all_candidates() { return candidates_of(problem(), setting().device); }

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

// --- the space
// -----------------------------------------------------------------------------------------------

TEST(Space, HeuristicFirstEachOnceAllAdmitted) {
  const auto device = setting().device;
  for (const char* text : {"fwd:bf16:d128:causal", "bwd:fp16:d64", "fwd:fp32:d64", "bwd:bf16:d128:det",
                           "fwd:bf16:d64:map128x128"}) {
    const Problem p{parse_spec(text).normalized(), problem().shape};
    const auto list = candidates_of(p, device);
    ASSERT_FALSE(list.empty()) << text;
    EXPECT_EQ(list.front(), plan::make_plan(p.spec, p.shape, device, {}).config) << text;
    std::set<std::string> seen;
    for (const TileConfig& config : list) {
      EXPECT_TRUE(seen.insert(to_string(config)).second) << text << " twice: " << to_string(config);
      const Support admitted = plan::traits(config.family).admits(p.spec, config, device);
      EXPECT_TRUE(admitted) << text << " " << to_string(config) << ": " << admitted.reason;
    }
  }
}

// But for those that share keys where one part of them is all there would be.
TEST(Space, EveryAdmittedConfigurationOfEveryAbleFamilyIsThere) {
  const auto list = all_candidates();
  const auto [spec, shape] = problem();
  for (const plan::FamilyTraits& traits : plan::families()) {
    if (!traits.supports(problem().spec, setting().device)) continue;
    for (const TileConfig& config : traits.search_space(problem().spec, setting().device)) {
      const bool one_part = config.in_parts && plan::tile_parts(spec, shape, config, setting().device) == 1;
      EXPECT_EQ(std::find(list.begin(), list.end(), config) == list.end(), one_part) << to_string(config);
    }
  }
  const Problem one_query{spec, {.batch = 1, .heads_q = 1, .heads_kv = 1, .seqlen_q = 1, .seqlen_kv = 9000}};
  EXPECT_TRUE(std::ranges::any_of(candidates_of(one_query, setting().device), &TileConfig::in_parts));
}

TEST(Space, HeadsArePackedWhereSomeShareKeys) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto packs = [&](int heads_kv) {
    const Problem few{parse_spec("fwd:bf16:d128:causal").normalized(),
                      {.batch = 1, .heads_q = 8, .heads_kv = heads_kv, .seqlen_q = 4, .seqlen_kv = 9000}};
    return std::ranges::any_of(candidates_of(few, h100), &TileConfig::packs_heads);
  };
  EXPECT_TRUE(packs(2));
  EXPECT_FALSE(packs(8));
}

TEST(Space, TwoTilesAtATimeAreForMoreTilesThanMultiprocessors) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const auto has_two = [&](const char* spec, int heads) {
    const Problem p{parse_spec(spec).normalized(),
                    {.batch = 1, .heads_q = heads, .heads_kv = heads, .seqlen_q = 512, .seqlen_kv = 512}};
    return std::ranges::any_of(candidates_of(p, h100), [](const TileConfig& c) { return c.warps == 16; });
  };
  EXPECT_FALSE(has_two("fwd:bf16:d64", 33));  // a block for each of 132
  EXPECT_TRUE(has_two("fwd:bf16:d64", 34));
  EXPECT_FALSE(has_two("bwd:bf16:d64", 34));
}

TEST(Space, ChoiceOfFamilies) {
  for (const TileConfig& config : candidates_of(problem(), setting().device, {Family::simt})) {
    EXPECT_EQ(config.family, Family::simt);
  }
}

TEST(Space, NoFamilyNamesEveryReason) {
  const Problem fp32{parse_spec("fwd:fp32:d64").normalized(), problem().shape};
  try {
    candidates_of(fp32, setting().device, {Family::sm80});
    FAIL() << "fp32 has no sm80 kernels";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(error.message().find("fwd:fp32:d64"), std::string::npos) << error.message();
    EXPECT_NE(error.message().find("sm80:"), std::string::npos) << error.message();
    EXPECT_NE(error.message().find("simt:"), std::string::npos) << error.message();
  }
}

TEST(Space, CanonicalOrderIsStrict) {
  const auto list = all_candidates();
  for (const TileConfig& a : list) {
    EXPECT_FALSE(canonical_less(a, a));
    for (const TileConfig& b : list) EXPECT_EQ(canonical_less(a, b) || canonical_less(b, a), a != b);
  }
}

KernelReport report_with(const TileConfig& config, int registers, int spill, int shared) {
  KernelReport report;
  report.config = config;
  for (const plan::Entry& entry : plan::traits(config.family).entries(problem().spec, config)) {
    report.entries.push_back({entry.name, registers, entry.hot ? spill : 0, shared, entry.threads});
  }
  return report;
}

TEST(Space, DisqualifiedSaysWhy) {
  const TileConfig config = all_candidates().front();
  const auto device = setting().device;
  const AttentionSpec spec = problem().spec;
  EXPECT_EQ(disqualified(spec, report_with(config, 128, 0, 1024), device), "");
  EXPECT_NE(disqualified(spec, report_with(config, 128, 32, 1024), device).find("spills 32 bytes"),
            std::string::npos);
  EXPECT_NE(disqualified(spec, report_with(config, 100000, 0, 1024), device).find("registers"),
            std::string::npos);
  EXPECT_NE(disqualified(spec, report_with(config, 128, 0, 1 << 20), device).find("1048576 bytes of shared"),
            std::string::npos);
}

TEST(Space, SpillsOutsideOfTheMainLoopAreForgiven) {
  const AttentionSpec spec = parse_spec("bwd:bf16:d64").normalized();
  const auto device = setting().device;
  const TileConfig config = candidates_of({spec, problem().shape}, device).front();
  KernelReport report;
  report.config = config;
  bool some_cold = false;
  for (const plan::Entry& entry : plan::traits(config.family).entries(spec, config)) {
    some_cold |= !entry.hot;
    report.entries.push_back({entry.name, 64, entry.hot ? 0 : 16, 0, entry.threads});
  }
  ASSERT_TRUE(some_cold);
  EXPECT_EQ(disqualified(spec, report, device), "");
}

// --- choosing
// ------------------------------------------------------------------------------------------------

TEST(Pick, TheMinimum) {
  const auto list = all_candidates();
  ASSERT_GE(list.size(), 3u);
  EXPECT_EQ(pick({{list[0], 2, ""}, {list[1], 1, ""}, {list[2], 3, ""}}, list[0]), list[1]);
}

TEST(Pick, TiesByCanonicalOrderWhateverTheListsOrder) {
  auto list = all_candidates();
  std::sort(list.begin(), list.end(), canonical_less);
  ASSERT_GE(list.size(), 4u);
  const TileConfig& unmeasured = list[3];
  const plan::Timing a{list[0], 1.004, ""}, b{list[1], 1.000, ""}, c{list[2], 1.002, ""};
  EXPECT_EQ(pick({a, b, c}, unmeasured), list[0]);
  EXPECT_EQ(pick({c, b, a}, unmeasured), list[0]);
  EXPECT_EQ(pick({b, c}, unmeasured), list[1]);
  EXPECT_EQ(pick({{list[0], 1.01, ""}, b}, unmeasured), list[1]) << "1% is no noise";
}

TEST(Pick, TiesWithTheHeuristicAreItsOwn) {
  auto list = all_candidates();
  std::sort(list.begin(), list.end(), canonical_less);
  ASSERT_GE(list.size(), 3u);
  const plan::Timing a{list[0], 1.000, ""}, b{list[1], 1.001, ""}, c{list[2], 1.004, ""};
  EXPECT_EQ(pick({a, b, c}, list[2]), list[2]);
  EXPECT_EQ(pick({a, b, {list[2], 1.01, ""}}, list[2]), list[0]) << "1% is no noise";
}

TEST(Pick, NothingMeasured) {
  const TileConfig heuristic = all_candidates()[0];
  EXPECT_EQ(pick({}, heuristic), std::nullopt);
  EXPECT_EQ(pick({{heuristic, 0, "spills 4 bytes"}}, heuristic), std::nullopt);
}

// --- the search
// ----------------------------------------------------------------------------------------------

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

TEST(Tune, TheTimesOfTheLastRoundDecide) {
  const auto list = all_candidates();
  ASSERT_GE(list.size(), 4u);
  const TileConfig lucky = list[0], steady = list[1], third = list[2], slower = list[3];
  FakeMeter meter;
  meter.ms = [&](const TileConfig& config) {
    const bool last = meter.at_once > 2;
    if (config == lucky) return last ? 1.30 : 1.00;
    if (config == steady) return last ? 1.25 : 1.03;
    if (config == third) return last ? 1.28 : 1.04;
    return config == slower ? 1.15 : 4.0;  // not measured in the last round, so its time does not compare
  };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  EXPECT_EQ(result.record.best, steady);
  EXPECT_EQ(timing_of(result.record, lucky).ms, 1.30);
  EXPECT_EQ(timing_of(result.record, steady).ms, 1.25);
  EXPECT_EQ(timing_of(result.record, slower).ms, 1.15);
}

TEST(Tune, AClockThatDriftsDoesNotMoveTheChoice) {
  const auto list = all_candidates();
  const TileConfig fastest = list[list.size() - 2];
  FakeMeter meter;
  double slowdown = 1;  // the GPU grows hot: every launch makes the next one slower
  meter.ms = [&](const TileConfig& config) { return slowdown * (config == fastest ? 1.0 : 1.1); };
  meter.before_launch = [&](const TileConfig&) { slowdown *= 1.001; };
  const TuneResult result = tune(problem(), setting(), meter, exhaustive());
  EXPECT_GT(slowdown, 1.2) << "the drift should exceed the difference";
  EXPECT_EQ(result.record.best, fastest);
  EXPECT_GT(result.drift, 0.05);
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
    int rounds = 0;  // of the last measurement, in which three take part
    meter.ms = [&](const TileConfig& config) {
      const double base = config == list[0]   ? 1.008
                          : config == list[1] ? 1.0
                          : config == list[2] ? 1.03
                                              : 4.0;
      return meter.at_once > 2 ? base * (1 + wobble * (rounds++ / 3)) : base;
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
  EXPECT_FALSE(meter.measured_alone().contains(to_string(list[1])));
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
  EXPECT_EQ(plan.config_source, plan::kTuned);
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
  EXPECT_EQ(launches.at(to_string(list[0])), 2);
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

// --- keeping and resuming
// ------------------------------------------------------------------------------------

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
  options.stop = [&] { return first.measured_alone().size() >= 4; };
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
  for (const std::string& config : first.measured_alone()) {
    EXPECT_FALSE(second.measured_alone().contains(config)) << config << " was measured twice";
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
  options.stop = [&] { return second.measured_alone().size() >= 2; };
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
  for (const std::string& config : second.measured_alone()) EXPECT_EQ(config.rfind("sm80", 0), 0u) << config;
}

TEST(Tune, BudgetIsHonoured) {
  const auto list = all_candidates();
  FakeMeter meter;
  // 1 + 5 launches the first, 1 + 5 and 5 of the best beside it each other one: 0.6 s, then 1.1 s.
  meter.ms = [](const TileConfig&) { return 100.0; };
  TuneOptions options = exhaustive();
  options.now = [&] { return meter.clock; };
  options.budget_seconds = 2.0;
  const TuneResult result = tune(problem(), setting(), meter, options);
  EXPECT_EQ(result.ending, Ending::budget_spent);
  EXPECT_EQ(result.measured, 3u);
  EXPECT_LE(meter.clock, 2.0 + 1.1 + 1e-9);
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

// --- compiling in parallel
// -----------------------------------------------------------------------------------

TEST(CompileAhead, ResultsInOrderWhateverTheThreads) {
  for (unsigned threads : {1u, 2u, 7u, 32u}) {
    CompileAhead<int> work(50, threads, [](std::size_t i) {
      std::this_thread::sleep_for(std::chrono::microseconds((i * 7919) % 500));
      return static_cast<int>(i * i);
    });
    for (std::size_t i = 0; i < 50; i += 2) work.want(i);
    for (int i = 0; i < 50; ++i) EXPECT_EQ(work.take(i), i * i);
  }
}

TEST(CompileAhead, ErrorsReachTheTaker) {
  CompileAhead<int> work(2, 2, [](std::size_t i) -> int {
    if (i == 0) throw Error(ErrorCode::compile_failed, "first");
    return 1;
  });
  EXPECT_THROW(work.take(0), Error);
  EXPECT_EQ(work.take(1), 1);
}

TEST(CompileAhead, WorksOnlyOnWhatIsWantedAndFirstOnWhatIsWaitedFor) {
  std::vector<std::size_t> order;
  {
    std::promise<void> started, go;
    const auto gate = go.get_future().share();
    CompileAhead<int> work(100, 1, [&](std::size_t i) {
      if (i == 0) started.set_value(), gate.wait();
      order.push_back(i);
      return 0;
    });
    for (const std::size_t i : {0, 5, 6, 7}) work.want(i);
    started.get_future().wait();
    std::jthread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // till take(7) waits
      go.set_value();
    });
    work.take(7);
    work.take(6);
  }
  ASSERT_GE(order.size(), 3u);
  EXPECT_EQ((std::vector<std::size_t>{0, 7}), (std::vector<std::size_t>{order[0], order[1]}));
  for (const std::size_t i : order) EXPECT_TRUE(i == 0 || (i >= 5 && i <= 7)) << i;
}

TEST(CompileAhead, LeavesOutTheRestWhenDropped) {
  constexpr int kItems = 100000;  // almost a minute of work, however late this thread comes
  std::atomic<int> done{0};
  {
    CompileAhead<int> work(kItems, 2, [&](std::size_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return ++done;
    });
    for (std::size_t i = 0; i < kItems; ++i) work.want(i);
    work.take(0);
  }
  EXPECT_LT(done.load(), kItems);
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

// --- operations and inputs
// -----------------------------------------------------------------------------------

/// Pairs counted one by one.
double count_pairs(const AttentionSpec& spec, const AttentionShape& shape, const BlockPattern& map) {
  double pairs = 0;
  for (std::int64_t q = 0; q < shape.seqlen_q; ++q) {
    for (std::int64_t kv = 0; kv < shape.seqlen_kv; ++kv) {
      const bool masked = (spec.mask.text() == "causal" && q + shape.seqlen_kv - shape.seqlen_q < kv) ||
                          (spec.mask.text() == "causal_top_left" && q < kv);
      const bool off = spec.has_block_map() && !map.at(q / spec.block_map.q, kv / spec.block_map.kv);
      pairs += !masked && !off;
    }
  }
  return pairs * static_cast<double>(shape.batch * shape.heads_q);
}

TEST(Inputs, AttendingPairsAreExact) {
  for (const char* spec_text : {"fwd:bf16:d64", "fwd:bf16:d64:causal", "fwd:bf16:d64:causal_top_left",
                                "fwd:bf16:d64:map16x32", "fwd:bf16:d64:causal:map32x16"}) {
    for (const char* shape_text :
         {"b1:hq1:hkv1:sq1:skv1", "b2:hq4:hkv2:sq100:skv100", "b1:hq2:hkv1:sq37:skv150",
          "b1:hq1:hkv1:sq150:skv37", "b1:hq1:hkv1:sq0:skv9", "b1:hq1:hkv1:sq9:skv0"}) {
      const AttentionSpec spec = parse_spec(spec_text).normalized();
      const AttentionShape shape = parse_shape(shape_text);
      const BlockPattern map = plausible_map(spec, shape, 0.3);
      EXPECT_EQ(work_of(spec, shape, map).pairs, count_pairs(spec, shape, map))
          << spec_text << " " << shape_text;
    }
  }
}

TEST(Inputs, CausalCountsHalfAndBackwardTwoAndAHalf) {
  const AttentionShape shape = parse_shape("b2:hq16:hkv16:sq4096:skv4096");
  const auto operations = [&](const char* text) {
    return work_of(parse_spec(text).normalized(), shape, {}).operations;
  };
  const double full = 4.0 * 2 * 16 * 4096.0 * 4096.0 * 128;
  EXPECT_DOUBLE_EQ(operations("fwd:bf16:d128"), full);
  EXPECT_NEAR(operations("fwd:bf16:d128:causal") / full, 0.5, 1e-3);
  EXPECT_DOUBLE_EQ(operations("bwd:bf16:d128"), 2.5 * full);
}

TEST(Inputs, BytesCountEveryTensorOnce) {
  const AttentionShape shape = parse_shape("b2:hq8:hkv2:sq100:skv300");
  const double q = 2 * 8 * 100 * 64 * 2, o = 2 * 8 * 100 * 32 * 2, k = 2 * 2 * 300 * 64 * 2,
               v = 2 * 2 * 300 * 32 * 2;
  const double lse = 2 * 8 * 100 * 4;
  EXPECT_DOUBLE_EQ(work_of(parse_spec("fwd:fp16:d64x32").normalized(), shape, {}).bytes, q + k + v + o + lse);
  EXPECT_DOUBLE_EQ(work_of(parse_spec("bwd:fp16:d64x32").normalized(), shape, {}).bytes,
                   2 * (q + k + v + o) + lse);
}

TEST(Inputs, PlausibleMapHasItsDensityInEveryRow) {
  const AttentionSpec spec = parse_spec("fwd:bf16:d64:map64x64").normalized();
  const BlockPattern map = plausible_map(spec, parse_shape("b1:hq1:hkv1:sq4096:skv4096"), 0.25);
  EXPECT_EQ(map.rows, 64);
  EXPECT_EQ(map.columns, 64);
  EXPECT_DOUBLE_EQ(map.density(), 0.25);
  for (std::int64_t row = 0; row < map.rows; ++row) {
    EXPECT_EQ(map.at(row, row), 1) << "the diagonal attends";
  }
  EXPECT_DOUBLE_EQ(plausible_map(spec, parse_shape("b1:hq1:hkv1:sq4096:skv4096"), 1.0).density(), 1.0);
}

TEST(Inputs, PlausibleMapUnderACausalMaskLiesBelowTheDiagonal) {
  const AttentionSpec spec = parse_spec("fwd:bf16:d64:causal:map64x64").normalized();
  const BlockPattern map = plausible_map(spec, parse_shape("b1:hq1:hkv1:sq4096:skv4096"), 0.25);
  for (std::int64_t row = 16; row < map.rows; ++row) {
    EXPECT_EQ(map.at(row, row), 1);
    EXPECT_EQ(map.at(row, row - 15), 1);
    EXPECT_EQ(map.at(row, row - 16), 0);
    if (row + 1 < map.columns) {
      EXPECT_EQ(map.at(row, row + 1), 0);
    }
  }
}

TEST(Inputs, DensityOutOfRangeIsRefused) {
  const AttentionSpec spec = parse_spec("fwd:bf16:d64:map64x64").normalized();
  for (double density : {-0.1, 0.0, 1.5, std::nan("")}) {
    EXPECT_THROW(plausible_map(spec, problem().shape, density), Error) << density;
  }
}

TEST(Inputs, MedianOfOddAndEvenCounts) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({7}), 7);
}

}  // namespace
}  // namespace flashjit::autotune

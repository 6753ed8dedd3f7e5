// The search on made-up GPUs: how good its choice is, how little it measures, and what it makes of leads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "autotune/strategy.hpp"
#include "autotune/tuner.hpp"
#include "flashjit/flashjit.hpp"
#include "plan/plan.hpp"
#include "support/file.hpp"
#include "tests/support/made_up_gpu.hpp"

namespace flashjit::autotune {
namespace {

Setting setting_of(const char* arch) { return {DeviceInfo::parse(arch), "13.0", "nvrtc13.0", "0.1.0"}; }

/// 24 problems: passes, head dims, lengths, masks, block maps, programs, grouped heads.
std::vector<Problem> sampled_problems() {
  std::vector<Problem> all;
  for (const char* spec :
       {"fwd:bf16:d64", "fwd:bf16:d128:causal", "fwd:fp16:d256", "bwd:bf16:d64:causal", "bwd:bf16:d128",
        "fwd:bf16:d128:map128x128", "fwd:bf16:d96:score{50.0 * tanh(score / 50.0)}:causal",
        "bwd:bf16:d64:mask{q >= kv && q - kv < 256}"}) {
    for (const char* shape :
         {"b1:hq16:hkv16:sq512:skv512", "b2:hq32:hkv8:sq2048:skv2048", "b4:hq8:hkv1:sq300:skv1000"})
      all.push_back({parse_spec(spec).normalized(), parse_shape(shape)});
  }
  return all;
}

double best_ms(const test::MadeUpGpu& gpu, const std::vector<TileConfig>& configs) {
  double least = INFINITY;
  for (const TileConfig& config : configs)
    if (!gpu.spills(config)) least = std::min(least, gpu.true_ms(config));
  return least;
}

TEST(Search, IsWithinTwoPercentOfTheBestAndMeasuresAtMostAShare) {
  unsigned seed = 0;
  int beyond = 0;  // where the made-up GPU is as unlike the model as one may be
  for (const char* arch : {"sm_90a", "sm_80"}) {
    const Setting setting = setting_of(arch);
    for (const Problem& problem : sampled_problems()) {
      test::MadeUpGpu gpu(problem, setting.device, ++seed);
      TuneOptions options;
      options.compile_threads = 2;
      const TuneResult result = tune(problem, setting, gpu, options);
      const auto configs = candidates(Model(problem, setting.device));
      const std::string name =
          std::string(arch) + " " + to_string(problem.spec) + " " + to_string(problem.shape);
      const double slower = gpu.true_ms(result.record.best) / best_ms(gpu, configs);
      beyond += slower > 1.02;
      EXPECT_LE(slower, 1.08) << name;
      EXPECT_LE(gpu.measured(), std::max(0.15 * static_cast<double>(configs.size()), 6.0)) << name;
      EXPECT_EQ(result.measured, gpu.measured()) << name;
      EXPECT_EQ(result.candidates, configs.size()) << name;
      EXPECT_LE(gpu.prepared(), configs.size() / 2) << name << ": compiling costs, too";
      EXPECT_EQ(result.ending, Ending::complete) << name;
    }
  }
  EXPECT_LE(beyond, 1) << "of 48";
}

TEST(Search, ALeadIsMeasuredFirst) {
  const Problem problem = sampled_problems()[1];
  const Setting setting = setting_of("sm_80");
  const auto configs = candidates(Model(problem, setting.device));
  test::MadeUpGpu gpu(problem, setting.device, 1);
  TuneOptions options;
  options.leads = {configs.back()};
  options.max_candidates = 2;
  const TuneResult result = tune(problem, setting, gpu, options);
  std::vector<TileConfig> measured;
  for (const plan::Timing& timing : result.record.timings)
    if (timing.ms > 0) measured.push_back(timing.config);
  ASSERT_EQ(measured.size(), 2u);
  for (const TileConfig& config : measured)
    EXPECT_TRUE(config == configs.front() || config == configs.back());
}

TEST(Search, PruningLeavesOutWhatTheModelExpectsLittleOfButNotLeads) {
  const Problem problem = sampled_problems()[4];
  const Setting setting = setting_of("sm_80");
  const Model model(problem, setting.device);
  const std::vector<TileConfig> all = candidates(model);
  const auto predicted = [&](const TileConfig& config) { return model.predict(config).ms; };
  const double least = predicted(std::ranges::min(all, {}, predicted));
  test::MadeUpGpu gpu(problem, setting.device, 1);
  const auto lead = std::ranges::find_if(
      all, [&](const TileConfig& config) { return predicted(config) > 3 * least && !gpu.spills(config); });
  ASSERT_NE(lead, all.end());
  TuneOptions options;
  options.exhaustive = true;
  options.prune = 2;
  options.leads = {*lead};
  for (const plan::Timing& timing : tune(problem, setting, gpu, options).record.timings) {
    const bool hopeless = predicted(timing.config) > 2 * least && timing.config != *lead;
    EXPECT_EQ(timing.skipped.starts_with("left out: predicted"), hopeless) << to_string(timing.config);
    EXPECT_EQ(timing.ms > 0, !hopeless && !gpu.spills(timing.config)) << to_string(timing.config);
  }
}

TEST(Search, ARecordOfAnotherDeviceIsALeadAndItsTimingsAreNot) {
  const Problem problem = sampled_problems()[0];
  const Setting setting = setting_of("sm_80");
  Setting other = setting;
  other.device.name = "another GPU of this architecture";
  test::MadeUpGpu there(problem, other.device, 3), here(problem, setting.device, 3);
  plan::TuningRecord known = tune(problem, other, there).record;
  known.best = candidates(Model(problem, setting.device)).back();
  TuneOptions options;
  options.max_candidates = 2;
  const TuneResult result = tune(problem, setting, here, options, known);
  EXPECT_EQ(result.record.device, setting.device.name);
  EXPECT_EQ(result.measured, 2u);
  const auto at = std::ranges::find(result.record.timings, known.best, &plan::Timing::config);
  ASSERT_NE(at, result.record.timings.end());
  EXPECT_GT(at->ms, 0);
}

TEST(Search, GoesOnWhereItWasStoppedAndEndsAlike) {
  const Problem problem = sampled_problems()[4];
  const Setting setting = setting_of("sm_90a");
  test::MadeUpGpu gpu(problem, setting.device, 5);
  TuneOptions options;
  options.stop = [&] { return gpu.measured() >= 4; };
  const TuneResult half = tune(problem, setting, gpu, options);
  EXPECT_EQ(half.ending, Ending::interrupted);
  EXPECT_EQ(half.measured, 4u);
  test::MadeUpGpu again(problem, setting.device, 5);
  const TuneResult rest = tune(problem, setting, again, {}, half.record);
  EXPECT_EQ(rest.ending, Ending::complete);
  EXPECT_GT(rest.measured, 0u);
  EXPECT_LE(half.measured + rest.measured, std::max<std::size_t>(rest.candidates * 15 / 100, kFewest));
  const auto configs = candidates(Model(problem, setting.device));
  EXPECT_LE(gpu.true_ms(rest.record.best) / best_ms(gpu, configs), 1.02);
  test::MadeUpGpu third(problem, setting.device, 5);
  EXPECT_EQ(tune(problem, setting, third, {}, rest.record).ending, Ending::already_tuned);
  options = {};
  options.exhaustive = true;
  EXPECT_EQ(tune(problem, setting, third, options, rest.record).ending, Ending::complete)
      << "what a search left out is measured when all is wanted";
}

/// Processes that tune one problem on GPUs of one kind; what each measures differs by noise.
class Ranks : public ::testing::Test {
 protected:
  ~Ranks() override { std::filesystem::remove_all(folder_); }

  /// What a rank comes to that takes this folder for its own.
  TuneResult tune_as(int rank, const std::filesystem::path& folder) const {
    test::MadeUpGpu gpu(problem_, setting_.device, 7);
    gpu.chance = rank;
    TuneOptions options;
    options.compile_threads = 1;
    return tune_into(folder, problem_, setting_, gpu, options);
  }

  static constexpr int kRanks = 8;
  const Problem problem_ = sampled_problems()[1];
  const Setting setting_ = setting_of("sm_90a");
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("flashjit-ranks-" + unique_suffix());
};

// Times that are further apart than noise decide alike; of those on its edge one rank may drop what another
// keeps. No rule over noisy times can do better.
TEST_F(Ranks, ThatTuneApartChooseWithinNoiseOfOneAnother) {
  const test::MadeUpGpu gpu(problem_, setting_.device, 7);
  std::vector<double> ms;
  for (int rank = 0; rank < kRanks; ++rank)
    ms.push_back(gpu.true_ms(tune_as(rank, folder_ / std::to_string(rank)).record.best));
  const auto [least, most] = std::ranges::minmax(ms);
  EXPECT_LE(most / least, 1 + 2 * kNoise);
}

TEST_F(Ranks, ThatShareAFolderTakeTheRecordOfTheFirst) {
  const TuneResult first = tune_as(0, folder_);
  EXPECT_EQ(first.ending, Ending::complete);
  for (int rank = 1; rank < kRanks; ++rank) {
    const TuneResult other = tune_as(rank, folder_);
    EXPECT_EQ(other.ending, Ending::already_tuned);
    EXPECT_EQ(other.record, first.record);
  }
}

TEST_F(Ranks, ThatTuneIntoOneFolderAtOnceEndWithOneRecord) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    children.push_back(::fork());
    if (children.back() == 0) ::_exit(tune_as(rank, folder_).has_best() ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  const TuneResult first = tune_as(0, folder_);
  for (int rank = 0; rank < kRanks; ++rank) {
    const TuneResult again = tune_as(rank, folder_);
    EXPECT_EQ(again.ending, Ending::already_tuned);
    EXPECT_EQ(again.record, first.record);
  }
}

TEST(Search, CandidatesThatNeedMoreWorkspaceAreLeftOut) {
  const Problem problem{parse_spec("fwd:bf16:d64:map64x64").normalized(),
                        parse_shape("b1:hq4:hkv4:sq1024:skv1024")};
  const Setting setting = setting_of("sm_80");
  const auto bytes = [&](const TileConfig& config) {
    return plan::make_plan(problem.spec, problem.shape, setting.device, {}, config).workspace.bytes;
  };
  const auto configs = candidates(Model(problem, setting.device));
  test::MadeUpGpu gpu(problem, setting.device, 2);
  TuneOptions options;
  options.exhaustive = true;
  options.max_workspace = bytes(configs.front());
  const TuneResult result = tune(problem, setting, gpu, options);
  EXPECT_LT(result.candidates, configs.size());
  for (const plan::Timing& timing : result.record.timings)
    EXPECT_LE(bytes(timing.config), *options.max_workspace) << to_string(timing.config);
  options.max_workspace = 0;
  options.families = {Family::sm80};
  EXPECT_THROW(tune(problem, setting, gpu, options), Error);
}

TEST(Strategy, BeforeAnythingIsKnownTheModelDecides) {
  const std::vector<TileConfig> configs{parse_config("sm80:br64:bc64:w4"), parse_config("sm80:br128:bc64:w4"),
                                        parse_config("sm80:br64:bc32:w4")};
  const Strategy strategy(configs, {2.0, 1.0, 3.0});
  EXPECT_EQ(strategy.next(1), (std::vector<std::size_t>{1}));
  EXPECT_DOUBLE_EQ(strategy.expected_ms(2), 3.0);
}

TEST(Strategy, AMeasurementMovesWhatIsNearMoreThanWhatIsFar) {
  const std::vector<TileConfig> configs{parse_config("sm80:br64:bc64:w4"), parse_config("sm80:br64:bc80:w4"),
                                        parse_config("sm80:br192:bc32:w8"),
                                        parse_config("simt:br64:bc64:w8")};
  Strategy strategy(configs, {1.0, 1.0, 1.0, 1.0});
  strategy.measured(0, 1.5);
  EXPECT_NEAR(strategy.expected_ms(0), 1.5, 0.05);
  EXPECT_GT(strategy.expected_ms(1), strategy.expected_ms(2));
  EXPECT_GT(strategy.expected_ms(2), strategy.expected_ms(3));
  EXPECT_GT(strategy.expected_ms(3), 1.0);
}

TEST(Strategy, WhatIsKnownOrRuledOutIsNotAskedForAgain) {
  const std::vector<TileConfig> configs{parse_config("sm80:br64:bc64:w4"), parse_config("sm80:br64:bc80:w4"),
                                        parse_config("sm80:br192:bc32:w8")};
  Strategy strategy(configs, {1.0, 1.0, 1.0});
  strategy.measured(0, 1.0);
  strategy.rule_out(1);
  EXPECT_EQ(strategy.next(5), (std::vector<std::size_t>{2}));
  strategy.rule_out(2);
  EXPECT_TRUE(strategy.next(5).empty());
}

TEST(Strategy, HopelessCandidatesAreNotWorthwhile) {
  const std::vector<TileConfig> configs{parse_config("sm80:br64:bc64:w4"), parse_config("simt:br64:bc64:w8")};
  Strategy strategy(configs, {1.0, 10.0});
  strategy.measured(0, 1.1);
  EXPECT_TRUE(strategy.next(1, 0.001).empty());
  EXPECT_EQ(strategy.next(1).size(), 1u);
}

}  // namespace
}  // namespace flashjit::autotune

// The study of the tuner and the page on what was measured, on made-up GPUs.
#include "tools/parts/study.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "flashjit/flashjit.hpp"
#include "plan/plan.hpp"
#include "plan/shipped.hpp"
#include "support/file.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/made_up_gpu.hpp"
#include "tools/parts/report.hpp"
#include "tools/parts/suite.hpp"

namespace flashjit::autotune {
namespace {

Setting setting_of(const char* arch) {
  return {DeviceInfo::parse(arch), "13.0", "nvrtc13.0", FLASHJIT_VERSION};
}

Problem problem_of(const char* spec, const char* shape) {
  return {parse_spec(spec).normalized(), parse_shape(shape)};
}

StudyRow row_of(const Problem& problem, const Setting& setting, unsigned seed = 1) {
  test::MadeUpGpu gpu(problem, setting.device, seed);
  return study(problem, setting, gpu);
}

TEST(RankCorrelation, OfKnownRanks) {
  EXPECT_DOUBLE_EQ(rank_correlation({1, 2, 3, 4}, {10, 20, 30, 400}), 1);
  EXPECT_DOUBLE_EQ(rank_correlation({1, 2, 3, 4}, {4, 3, 2, 1}), -1);
  EXPECT_DOUBLE_EQ(rank_correlation({1, 2, 3, 4, 5}, {2, 1, 4, 3, 5}), 0.8);
  EXPECT_NEAR(rank_correlation({1, 1, 2, 3}, {1, 2, 3, 4}), 0.9487, 1e-4) << "ties share their rank";
  EXPECT_EQ(rank_correlation({1}, {1}), 0);
  EXPECT_EQ(rank_correlation({}, {}), 0);
  EXPECT_EQ(rank_correlation({1, 1}, {1, 2}), 0);
}

TEST(Study, ComparesTheSearchWithEverything) {
  const Setting setting = setting_of("sm_80");
  const Problem problem = problem_of("fwd:bf16:d128:causal", "b1:hq16:hkv16:sq1024:skv1024");
  test::MadeUpGpu gpu(problem, setting.device, 1);
  const StudyRow row = study(problem, setting, gpu);
  EXPECT_LT(row.measured, gpu.measured()) << "the rest is measured, too";
  EXPECT_LE(row.share(), 0.15);
  ASSERT_TRUE(row.slower(row.chosen.best));
  EXPECT_LE(*row.slower(row.chosen.best), 1.02);
  ASSERT_TRUE(row.slower(row.heuristic));
  EXPECT_NEAR(*row.slower(row.heuristic) / *row.slower(row.chosen.best),
              gpu.true_ms(row.heuristic) / gpu.true_ms(row.chosen.best), 0.02);
  EXPECT_GT(row.correlation, 0.5) << "the made-up GPU is the model with some twists";
  EXPECT_FALSE(row.slower(parse_config("sm80:br16:bc16:w1"))) << "was not measured";

  // What the model expects nothing of is left out, all else is settled.
  const Model model(problem, setting.device);
  double least = INFINITY;
  for (const TileConfig& config : candidates(model)) least = std::min(least, model.predict(config).ms);
  for (const plan::Timing& timing : row.exhaustive.timings) {
    const bool hopeless = model.predict(timing.config).ms > kStudyPrune * least;
    EXPECT_EQ(timing.skipped.starts_with("left out: predicted"), hopeless && timing.ms == 0)
        << to_string(timing.config) << " " << timing.skipped;
    if (!hopeless && !gpu.spills(timing.config)) {
      EXPECT_GT(timing.ms, 0) << to_string(timing.config);
    }
  }
}

/// A GPU on which one configuration spills, and that notes what was prepared while all is compiled anew.
class Noting : public test::MadeUpGpu {
 public:
  using MadeUpGpu::MadeUpGpu;
  TileConfig spilling = {};
  std::vector<TileConfig> prepared_anew, prepared_later;
  bool anew = false;

  KernelReport prepare(const Problem& problem, const TileConfig& config) override {
    KernelReport report = MadeUpGpu::prepare(problem, config);
    if (config == spilling) report.entries.front().spill_bytes = 96;
    const std::lock_guard lock(mutex_);
    (anew ? prepared_anew : prepared_later).push_back(config);
    return report;
  }
  void compile_anew(bool on) override { anew = on; }

 private:
  std::mutex mutex_;
};

TEST(Study, WhatTheRuntimeWouldTakeIsMeasuredWhateverTheTunerThinksOfIt) {
  const Setting setting = setting_of("sm_80");
  const Problem problem = problem_of("fwd:bf16:d128:causal", "b1:hq16:hkv16:sq1024:skv1024");
  Noting gpu(problem, setting.device, 1);
  gpu.spilling = candidates(Model(problem, setting.device)).front();
  StudyRow row = study(problem, setting, gpu);
  ASSERT_EQ(row.heuristic, gpu.spilling);
  const auto true_ratio = [&](const TileConfig& config) {
    return gpu.true_ms(config) / gpu.true_ms(row.exhaustive.best);
  };
  ASSERT_TRUE(row.slower(row.heuristic));
  EXPECT_NEAR(*row.slower(row.heuristic) / *row.slower(row.exhaustive.best), true_ratio(row.heuristic), 0.02);

  // What a near shape's record might name: a candidate of which the model expects nothing.
  const auto hopeless = std::ranges::find_if(row.exhaustive.timings, [](const plan::Timing& timing) {
    return timing.skipped.starts_with("left out: predicted");
  });
  ASSERT_NE(hopeless, row.exhaustive.timings.end());
  row.untuned = hopeless->config;
  EXPECT_FALSE(row.slower(row.untuned));
  measure_untuned(row, gpu);
  ASSERT_TRUE(row.slower(row.untuned));
  EXPECT_NEAR(*row.slower(row.untuned) / *row.slower(row.exhaustive.best), true_ratio(row.untuned),
              0.02 * true_ratio(row.untuned));
}

TEST(Study, TheSearchCompilesAnewAndTheReferenceNeedNot) {
  const Setting setting = setting_of("sm_80");
  const Problem problem = problem_of("fwd:bf16:d64", "b1:hq8:hkv8:sq1024:skv1024");
  Noting gpu(problem, setting.device, 1);
  const StudyRow row = study(problem, setting, gpu);
  for (const plan::Timing& timing : row.chosen.timings)
    if (timing.ms > 0) {
      EXPECT_NE(std::ranges::find(gpu.prepared_anew, timing.config), gpu.prepared_anew.end())
          << to_string(timing.config);
    }
  EXPECT_GT(gpu.prepared_later.size(), row.measured) << "all the rest";
  EXPECT_FALSE(gpu.anew);
}

/// A GPU that heats and slows down with every question.
class Heating : public test::MadeUpGpu {
 public:
  using MadeUpGpu::MadeUpGpu;
  int asked = 0;

  device::GpuState state() override {
    ++asked;
    return {2000 - asked, 30 + asked, 0x4};
  }
};

TEST(Study, TellsUnderWhichConditionsARowWasMeasured) {
  const Setting setting = setting_of("sm_80");
  const Problem problem = problem_of("fwd:bf16:d64", "b1:hq8:hkv8:sq1024:skv1024");
  Heating gpu(problem, setting.device, 1);
  const StudyRow row = study(problem, setting, gpu);
  EXPECT_EQ(row.conditions.clock_mhz, (Range{1999, 2000 - gpu.asked, 2000 - gpu.asked, 1999}));
  const std::string page = study_markdown({row}, setting), csv = study_csv({row});
  expect_in(fmt::format("| {}..1999 | 31..{} | the power limit |\n", 2000 - gpu.asked, 30 + gpu.asked), page);
  expect_in(fmt::format(",{},1999,31,{},\"the power limit\"\n", 2000 - gpu.asked, 30 + gpu.asked), csv);
}

TEST(Study, AnUntunedShapeTakesTheOthersRecords) {
  const Setting setting = setting_of("sm_80");
  std::vector<StudyRow> rows{row_of(problem_of("fwd:bf16:d64", "b1:hq8:hkv8:sq1024:skv1024"), setting),
                             row_of(problem_of("fwd:bf16:d64", "b2:hq8:hkv8:sq1024:skv1024"), setting),
                             row_of(problem_of("bwd:bf16:d64", "b1:hq8:hkv8:sq1024:skv1024"), setting)};
  compare_untuned(rows, setting.device);
  EXPECT_EQ(rows[0].untuned, rows[1].chosen.best);
  EXPECT_EQ(rows[1].untuned, rows[0].chosen.best);
  EXPECT_TRUE(rows[0].untuned_by_record);
  EXPECT_EQ(rows[2].untuned, rows[2].heuristic);
  EXPECT_FALSE(rows[2].untuned_by_record);

  const std::string page = study_markdown(rows, setting);
  expect_in("3 problems", page);
  expect_in(fmt::format("a host of {} cores", std::thread::hardware_concurrency()), page);
  expect_in("| candidates measured | 15% a problem, or 6 |", page);
  for (const StudyRow& row : rows) expect_in("`" + to_string(row.problem.spec) + "`", page);
  const std::string csv = study_csv(rows);
  EXPECT_EQ(std::ranges::count(csv, '\n'), 4);
  expect_in("| - | - |  |\n", page);  // these GPUs do not tell how warm they are
  const std::string header = csv.substr(0, csv.find('\n'));
  const std::string last = csv.substr(csv.rfind('\n', csv.size() - 2) + 1);
  EXPECT_EQ(std::ranges::count(header, ','), std::ranges::count(last, ','));
}

TEST(Study, AChoiceThatIsTooSlowIsToldSo) {
  const Setting setting = setting_of("sm_80");
  std::vector<StudyRow> rows{row_of(problem_of("fwd:bf16:d64", "b1:hq8:hkv8:sq1024:skv1024"), setting)};
  compare_untuned(rows, setting.device);
  const auto line = [&] {
    const std::string page = study_markdown(rows, setting);
    const std::size_t at = page.find("| choice, times slower");
    return page.substr(at, page.find('\n', at) - at);
  };
  EXPECT_TRUE(line().ends_with("| yes |")) << line();
  const auto slowest = std::ranges::max_element(rows[0].exhaustive.timings, {}, &plan::Timing::ms);
  rows[0].chosen.best = slowest->config;
  EXPECT_TRUE(line().ends_with("| no |")) << line();
}

/// The problems of a suite file whose lines all have a shape.
std::vector<Problem> read_suite(const std::string& name) {
  std::vector<Problem> problems;
  for (const SuiteProblem& line : parse_suite(read_file(std::string(FLASHJIT_SOURCE_DIR "/") + name), name))
    problems.push_back({line.spec, line.shape.value()});
  return problems;
}

TEST(Suites, TheStudyHasProblemsOfManyKindsEachSpecAtTwoShapesOrMore) {
  const std::vector<Problem> problems = read_suite("tools/bench/tuner_study.txt");
  EXPECT_EQ(problems.size(), 34u);
  std::map<std::string, int> specs;
  for (const Problem& problem : problems) ++specs[to_string(problem.spec)];
  for (const auto& [spec, count] : specs) EXPECT_GE(count, 2) << spec;
  const auto some = [&](auto&& predicate) { return std::ranges::any_of(problems, predicate); };
  EXPECT_TRUE(some([](const Problem& p) { return p.spec.pass == Pass::backward; }));
  EXPECT_TRUE(some([](const Problem& p) { return p.spec.has_block_map(); }));
  EXPECT_TRUE(some([](const Problem& p) { return !p.spec.score.empty(); }));
  EXPECT_TRUE(some([](const Problem& p) { return p.shape.heads_q != p.shape.heads_kv; }));
  EXPECT_TRUE(some([](const Problem& p) { return p.shape.seqlen_q % 128 != 0; }));
  for (const Pass pass : {Pass::forward, Pass::backward})
    EXPECT_TRUE(some([&](const Problem& p) { return p.spec.pass == pass && p.shape.seqlen_q >= 16384; }))
        << "power-limited";
}

TEST(Suites, TheModelsAreAllWithinWhatTheH100Does) {
  const std::vector<Problem> problems = read_suite("autotune/common_models.txt");
  EXPECT_GT(problems.size(), 20u);
  for (const Problem& problem : problems)
    EXPECT_GT(candidates(Model(problem, DeviceInfo::parse("sm_90a"))).size(), 6u) << to_string(problem.spec);
}

TEST(Suites, TheModelsAllHaveShippedRecordsThatAnUntunedPlanTakes) {
  plan::TuningRecords untuned;
  for (const plan::TuningRecord& record : plan::shipped_records())
    untuned.add(record, plan::TuningRecords::Origin::shipped);
  int passes[2] = {};
  for (const Problem& problem : read_suite("autotune/common_models.txt")) {
    const std::string name = to_string(problem.spec) + " " + to_string(problem.shape);
    const auto shipped = std::ranges::find_if(plan::shipped_records(), [&](const plan::TuningRecord& record) {
      return record.arch == "sm_90a" && record.spec == problem.spec && record.shape == problem.shape;
    });
    ASSERT_NE(shipped, plan::shipped_records().end()) << name;
    DeviceInfo device = DeviceInfo::parse("sm_90a");
    device.name = shipped->device;
    device.driver = shipped->driver;
    const plan::ExecutionPlan plan = plan::make_plan(problem.spec, problem.shape, device, untuned);
    EXPECT_EQ(plan.config, shipped->best) << name;
    EXPECT_EQ(plan.config_source, shipped->library == FLASHJIT_VERSION ? "tuned" : "tuned elsewhere") << name;
    ++passes[problem.spec.pass == Pass::backward];
  }
  EXPECT_GT(passes[0], 15);
  EXPECT_GT(passes[1], 10) << "a line that names no pass stands for both";
}

TEST(Report, CellsTellWhatBecameOfATile) {
  const Setting setting = setting_of("sm_80");
  const Problem problem = problem_of("fwd:bf16:d128:causal", "b1:hq16:hkv16:sq1024:skv1024");
  const Model model(problem, setting.device);
  plan::TuningRecord record;
  record.spec = problem.spec;
  record.shape = problem.shape;
  record.timings = {{parse_config("sm80:br128:bc64:w4"), 2.0, ""},
                    {parse_config("sm80:br128:bc64:w8"), 1.5, "", 200, 0},
                    {parse_config("sm80:br128:bc64:w8:s2"), 0, "left out: no improvement is expected of it"},
                    {parse_config("sm80:br64:bc64:w4"), 0, "left out: no improvement is expected of it"},
                    {parse_config("sm80:br64:bc32:w4"), 0, "spills 32 bytes in forward", 255, 32}};
  const auto cell = [&](int br, int bc) { return cell_of(model, record, Family::sm80, br, bc); };
  EXPECT_EQ(cell(128, 64).kind, CellKind::measured);
  EXPECT_EQ(cell(128, 64).ms, 1.5);
  expect_in("200 registers", cell(128, 64).about);
  EXPECT_EQ(cell(64, 64).kind, CellKind::predicted);
  EXPECT_EQ(cell(64, 64).ms, model.predict(parse_config("sm80:br64:bc64:w4")).ms);
  EXPECT_EQ(cell(64, 32).kind, CellKind::ruled_out);
  expect_in("spills 32 bytes", cell(64, 32).about);
  EXPECT_EQ(cell(256, 256).kind, CellKind::forbidden);
  EXPECT_EQ(cell(17, 64).kind, CellKind::none);
  EXPECT_EQ(cell_of(model, record, Family::simt, 64, 64).kind, CellKind::none);
}

TEST(Report, IsOnePageThatNeedsNothingElse) {
  const Setting setting = setting_of("sm_90a");
  const Problem problem =
      problem_of("fwd:bf16:d128:mask{q >= kv && q - kv < 256}", "b1:hq16:hkv16:sq1024:skv1024");
  test::MadeUpGpu gpu(problem, setting.device, 1);
  TuneOptions options;
  options.exhaustive = true;
  plan::TuningRecord record = tune(problem, setting, gpu, options).record;
  record.device = "a <GPU> & \"more\"";
  const Conditions conditions{Range{1980, 1755, 1755, 1980}, Range{35, 61, 35, 61}, 0x4};
  const std::string page = report_html({{record, conditions}}, setting.device);
  EXPECT_TRUE(page.starts_with("<!doctype html>"));
  EXPECT_TRUE(page.ends_with("</html>\n"));
  for (const char* part :
       {"sm90: fastest of each", "sm80: fastest of each", "simt: fastest of each",
        "times the heuristic's choice", "url(#forbidden)",
        "While measuring: clock 1980 -&gt; 1755 MHz, 35 -&gt; 61 C, slowed by the power limit",
        "against the roofline", "rank correlation", "class='best'", "bytes spilled",
        "q &gt;= kv &amp;&amp; q - kv &lt; 256", "a &lt;GPU&gt; &amp; &quot;more&quot;"})
    expect_in(part, page);
  for (const char* foreign : {"http:", "https:", "<script", "<link", "nan", "inf "})
    EXPECT_EQ(page.find(foreign), std::string::npos) << foreign;
  EXPECT_EQ(page.find("<GPU>"), std::string::npos);
  for (const char* tag : {"svg", "g", "figure", "section", "table", "tr", "td", "details", "text"}) {
    const auto count = [&](const std::string& text) {
      std::size_t n = 0;
      for (std::size_t at = page.find(text); at != std::string::npos; at = page.find(text, at + 1)) ++n;
      return n;
    };
    EXPECT_EQ(count(std::string("<") + tag + ">") + count(std::string("<") + tag + " "),
              count(std::string("</") + tag + ">"))
        << tag;
  }
}

TEST(Report, OfNothingMeasuredIsStillAPage) {
  const Problem problem = problem_of("fwd:bf16:d64", "b1:hq1:hkv1:sq64:skv64");
  plan::TuningRecord record;
  record.spec = problem.spec;
  record.shape = problem.shape;
  const std::string page = report_html({{record}}, DeviceInfo::parse("sm_80"));
  EXPECT_EQ(page.find("nan"), std::string::npos);
  EXPECT_EQ(page.find("While measuring"), std::string::npos) << "nothing is known of the GPU";
  expect_in("fwd:bf16:d64", page);
}

}  // namespace
}  // namespace flashjit::autotune

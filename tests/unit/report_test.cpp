// The page on what was measured, on a made-up GPU, and the suites of problems.
#include "tools/parts/report.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "autotune/tuner.hpp"
#include "flashjit/flashjit.hpp"
#include "plan/plan.hpp"
#include "plan/shipped.hpp"
#include "support/built.hpp"
#include "support/file.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/made_up_gpu.hpp"
#include "tools/parts/suite.hpp"

namespace flashjit::autotune {
namespace {

Setting setting_of(const char* arch) {
  return {DeviceInfo::parse(arch), "13.0", "nvrtc13.0", FLASHJIT_VERSION};
}

Problem problem_of(const char* spec, const char* shape) {
  return {parse_spec(spec).normalized(), parse_shape(shape)};
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

TEST(Suites, TakeBothPassesOfASpecThatHasThem) {
  EXPECT_EQ(parse_passes("bf16:d128:causal").size(), 2u);
  for (const char* forward : {"bf16:d128:out{e4m3}", "bf16:d576x512:shared_kv:q_rope",
                              "bf16:d128:skip_softmax", "bf16:d128:cache", "bf16:d128:kve4m3"}) {
    ASSERT_EQ(parse_passes(forward).size(), 1u) << forward;
    EXPECT_EQ(parse_passes(forward)[0].pass, Pass::forward) << forward;
  }
  EXPECT_THROW(parse_passes("bf16:d129"), Error);
  EXPECT_THROW(parse_passes("bwd:bf16:d128:out{e4m3}"), Error);
}

/// The problems of a suite file whose lines all have a shape.
std::vector<Problem> read_suite(const std::string& name) {
  std::vector<Problem> problems;
  for (const SuiteProblem& line : parse_suite(read_file(test::sources() + "/" + name), name))
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
    EXPECT_EQ(plan.config_source,
              shipped->library == FLASHJIT_VERSION ? ConfigSource::tuned : ConfigSource::tuned_elsewhere)
        << name;
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

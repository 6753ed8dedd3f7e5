// The tuner's model: tiles counted one by one, times that behave, and the H100's published figures.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include "autotune/coverage.hpp"
#include "autotune/model.hpp"
#include "autotune/space.hpp"
#include "flashjit/flashjit.hpp"
#include "plan/family.hpp"
#include "plan/sm90.hpp"
#include "support/built.hpp"

namespace flashjit::autotune {
namespace {

Problem problem_of(const std::string& spec, const std::string& shape) {
  return {parse_spec(spec).normalized(), parse_shape(shape)};
}

TileConfig config_of(const std::string& text) { return parse_config(text); }

std::int64_t sum(const std::vector<std::int64_t>& values) {
  std::int64_t total = 0;
  for (const std::int64_t value : values) total += value;
  return total;
}

/// Tiles with an attending pair, each pair asked.
std::int64_t count_tiles(const std::function<bool(std::int64_t, std::int64_t)>& attends, std::int64_t sq,
                         std::int64_t skv, int br, int bc) {
  std::int64_t tiles = 0;
  for (std::int64_t q0 = 0; q0 < sq; q0 += br)
    for (std::int64_t kv0 = 0; kv0 < skv; kv0 += bc) {
      bool any = false;
      for (std::int64_t q = q0; q < std::min<std::int64_t>(q0 + br, sq) && !any; ++q)
        for (std::int64_t kv = kv0; kv < std::min<std::int64_t>(kv0 + bc, skv) && !any; ++kv)
          any = attends(q, kv);
      tiles += any;
    }
  return tiles;
}

TEST(Coverage, CountsEveryTileWithoutAMask) {
  const Problem p = problem_of("fwd:bf16:d64", "b2:hq4:hkv2:sq1000:skv777");
  const Coverage coverage(p.spec, p.shape, {});
  EXPECT_EQ(coverage.tiles_of_rows(128, 80), std::vector<std::int64_t>(8, 10));
  EXPECT_EQ(coverage.tiles_of_columns(128, 80), std::vector<std::int64_t>(10, 8));
}

TEST(Coverage, CausalMasksAreExact) {
  for (const char* shape :
       {"b1:hq1:hkv1:sq512:skv512", "b1:hq1:hkv1:sq300:skv700", "b1:hq1:hkv1:sq700:skv300"}) {
    const Problem p = problem_of("fwd:bf16:d64:causal", shape);
    const Coverage coverage(p.spec, p.shape, {});
    const std::int64_t shift = p.shape.seqlen_kv - p.shape.seqlen_q;
    const auto attends = [&](std::int64_t q, std::int64_t kv) { return kv <= q + shift; };
    for (const auto& [br, bc] : {std::pair{64, 64}, {128, 80}, {192, 112}, {16, 32}}) {
      const std::int64_t expected = count_tiles(attends, p.shape.seqlen_q, p.shape.seqlen_kv, br, bc);
      EXPECT_EQ(sum(coverage.tiles_of_rows(br, bc)), expected) << shape << " " << br << "x" << bc;
      EXPECT_EQ(sum(coverage.tiles_of_columns(br, bc)), expected) << shape << " " << br << "x" << bc;
    }
  }
}

TEST(Coverage, OtherMasksAreNearlyRight) {
  const Problem p =
      problem_of("fwd:bf16:d64:mask{kv <= q && (q - kv < 100 || kv < 40)}", "b1:hq2:hkv2:sq1024:skv1024");
  const Coverage coverage(p.spec, p.shape, {});
  const auto attends = [](std::int64_t q, std::int64_t kv) { return kv <= q && (q - kv < 100 || kv < 40); };
  const auto expected = static_cast<double>(count_tiles(attends, 1024, 1024, 64, 64));
  EXPECT_NEAR(static_cast<double>(sum(coverage.tiles_of_rows(64, 64))) / expected, 1.0, 0.05);
}

TEST(Coverage, BlockMapsCountTheirBlocks) {
  const Problem p = problem_of("fwd:bf16:d64:map128x64", "b1:hq1:hkv1:sq1024:skv1024");
  const BlockPattern map = plausible_map(p.spec, p.shape, 0.25);
  const Coverage coverage(p.spec, p.shape, map);
  std::int64_t blocks = 0;
  for (const auto block : map.blocks) blocks += block;
  EXPECT_EQ(sum(coverage.tiles_of_rows(128, 64)), blocks);
  EXPECT_GE(sum(coverage.tiles_of_rows(64, 64)), blocks * 2);
  EXPECT_LT(sum(coverage.tiles_of_rows(256, 128)), blocks);
}

TEST(Model, TimesAreFiniteAndNotBelowTheRoofline) {
  for (const char* arch : {"sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    for (const char* spec : {"fwd:bf16:d128:causal", "bwd:bf16:d64", "fwd:fp32:d64", "bwd:bf16:d256:det",
                             "fwd:bf16:d64:map64x64", "bwd:fp16:d128:dropout"}) {
      const Model model(problem_of(spec, "b2:hq8:hkv2:sq1000:skv1500"), device);
      for (const TileConfig& config : candidates(model)) {
        const Prediction prediction = model.predict(config);
        ASSERT_TRUE(std::isfinite(prediction.ms)) << arch << " " << spec << " " << to_string(config);
        EXPECT_GE(prediction.ms, 0.9 * model.roofline_ms())
            << arch << " " << spec << " " << to_string(config);
        EXPECT_GT(prediction.tiles, 0);
        EXPECT_GE(prediction.blocks_resident, 1);
        EXPECT_FALSE(prediction.bound.empty());
      }
    }
  }
}

TEST(Model, TensorCoresBeatPlainArithmeticAndWarpGroupsBeatWarps) {
  const Model model(problem_of("fwd:bf16:d128:causal", "b2:hq16:hkv16:sq4096:skv4096"),
                    DeviceInfo::parse("sm_90a"));
  const auto best = [&](Family family) {
    double least = INFINITY;
    for (const TileConfig& config : candidates(model, {family}))
      least = std::min(least, model.predict(config).ms);
    return least;
  };
  EXPECT_LT(best(Family::sm90), best(Family::sm80));
  EXPECT_LT(best(Family::sm80), best(Family::simt));
}

TEST(Model, CausalTakesAboutHalfAndAShortGridAWave) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  const TileConfig config = config_of("sm90:br128:bc128:w8:s2");
  const auto ms = [&](const char* spec, const char* shape) {
    return Model(problem_of(spec, shape), device).predict(config).ms;
  };
  const char* large = "b2:hq16:hkv16:sq8192:skv8192";
  EXPECT_NEAR(ms("fwd:bf16:d128:causal", large) / ms("fwd:bf16:d128", large), 0.52, 0.05);
  // 132 multiprocessors: one block more begins another wave.
  EXPECT_DOUBLE_EQ(ms("fwd:bf16:d128", "b1:hq100:hkv1:sq128:skv8192"),
                   ms("fwd:bf16:d128", "b1:hq132:hkv1:sq128:skv8192"));
  EXPECT_GT(ms("fwd:bf16:d128", "b1:hq133:hkv1:sq128:skv8192"),
            1.8 * ms("fwd:bf16:d128", "b1:hq132:hkv1:sq128:skv8192"));
}

TEST(Model, EmptyShapesAreNoTrouble) {
  const DeviceInfo device = DeviceInfo::parse("sm_80");
  for (const char* shape : {"b1:hq4:hkv4:sq0:skv100", "b1:hq4:hkv4:sq100:skv0", "b0:hq4:hkv4:sq8:skv8"}) {
    const Model model(problem_of("fwd:bf16:d64:causal", shape), device);
    for (const TileConfig& config : candidates(model))
      EXPECT_TRUE(std::isfinite(model.predict(config).ms)) << shape;
  }
}

struct FastestOfStudy {
  std::string spec, shape, best;
};
/// The lines of tuner_study.py: "spec",shape,... with the fastest configuration as the eighth cell.
std::vector<FastestOfStudy> fastest_of_study(std::istream& file) {
  std::vector<FastestOfStudy> all;
  std::string line;
  for (std::getline(file, line); std::getline(file, line);) {
    const std::size_t end = line.find('"', 1);  // a spec may have commas
    std::vector<std::string> cells;
    std::istringstream rest(line.substr(end + 2));
    for (std::string cell; std::getline(rest, cell, ',');) cells.push_back(cell);
    all.push_back({line.substr(1, end - 1), cells.at(0), cells.at(6)});
  }
  return all;
}

/// The columns that the benchmark's table has under its header.
struct Figures {
  std::vector<std::map<std::string, std::string>> rows;

  explicit Figures(const std::string& path) {
    std::ifstream file(path);
    std::string line, cell;
    std::vector<std::string> header;
    while (std::getline(file, line)) {
      std::istringstream cells(line);
      std::vector<std::string> values;
      while (std::getline(cells, cell, ',')) values.push_back(cell);
      if (header.empty()) {
        header = values;
        continue;
      }
      auto& row = rows.emplace_back();
      for (std::size_t i = 0; i < std::min(values.size(), header.size()); ++i) row[header[i]] = values[i];
    }
  }
};

/// The first of the candidates by a cost.
template <class Cost>
TileConfig cheapest(const std::vector<TileConfig>& all, const Cost& cost) {
  return *std::ranges::min_element(all, {}, cost);
}

// ../../autotune/README.md#two-cost-models
TEST(Model, TheHeuristicsEstimateIsForFewTilesAndTheModelForAll) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  int by_heuristic = 0, by_model = 0, by_estimate = 0;
  std::ifstream file(test::sources() + "/tools/bench/results/h100_tuner.csv");
  for (const auto& [spec, shape, best] : fastest_of_study(file)) {
    const Problem p = problem_of(spec, shape);
    if (p.spec.pass != Pass::forward) continue;
    const Model model(p, device);
    const std::vector<TileConfig> all = candidates(model, {Family::sm90});
    const auto is_best = [&](const TileConfig& config) { return to_string(config) == best; };
    by_heuristic += is_best(all.front());
    by_model += is_best(cheapest(all, [&](const TileConfig& c) { return model.predict(c).ms; }));
    by_estimate += is_best(cheapest(all, [&](const TileConfig& c) {
      return plan::hopper::estimated_time(model.spec(), p.shape, c, device);
    }));
  }
  EXPECT_GE(by_heuristic, 14);
  EXPECT_GE(by_model, 12);
  EXPECT_LT(by_estimate, by_model);
}

TEST(Model, TheH100sFiguresAreMostlyWithinAQuarter) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  const Figures figures(test::sources() + "/tools/bench/results/h100_dense.csv");
  ASSERT_GT(figures.rows.size(), 30u);
  std::vector<double> ratios;
  for (auto row : figures.rows) {
    const std::string n = row["heads"];
    const Problem p = problem_of(
        row["pass"] + ":bf16:d" + row["head_dim"] + (row["causal"] == "1" ? ":causal" : ""),
        "b" + row["batch"] + ":hq" + n + ":hkv" + n + ":sq" + row["seqlen"] + ":skv" + row["seqlen"]);
    const Model model(p, device);
    const double ms = model.predict(plan::traits(Family::sm90).heuristic(p.spec, p.shape, device)).ms;
    const double ratio = ms / std::stod(row["flashjit_ms"]);
    EXPECT_GT(ratio, 0.5) << to_string(p.spec) << " " << to_string(p.shape);
    EXPECT_LT(ratio, 2.0) << to_string(p.spec) << " " << to_string(p.shape);
    ratios.push_back(ratio);
  }
  ASSERT_GT(ratios.size(), 20u);
  const auto near = std::ranges::count_if(ratios, [](double ratio) { return std::abs(ratio - 1) < 0.25; });
  EXPECT_GT(near, 0.8 * static_cast<double>(ratios.size()));
}

}  // namespace
}  // namespace flashjit::autotune

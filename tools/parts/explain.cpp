#include "tools/parts/explain.hpp"

#include <algorithm>
#include <array>

#include "autotune/model.hpp"
#include "plan/tiles.hpp"
#include "tools/parts/html.hpp"
#include "tools/parts/tile_map.hpp"

namespace flashjit::command {
namespace {

using html::escaped, html::put;

constexpr std::size_t kMostCandidates = 12;
constexpr int kWarp = 32;

const char* name_of(TileKind kind) {
  constexpr std::array names{"skipped", "computed", "masked", "empty"};
  return names[static_cast<std::size_t>(kind)];
}

void families(std::string& page, const Explained& kernel) {
  page += "<table><tr><th>family</th><th>can it?</th></tr>\n";
  for (const plan::FamilyTraits& family : plan::families()) {
    const Support support = family.supports(kernel.plan.spec, kernel.device);
    const bool chosen = family.family == kernel.plan.config.family;
    put(page, "<tr><td>{}</td><td>{}{}</td></tr>\n", to_string(family.family),
        support.ok ? "yes" : escaped(support.reason), chosen ? ", <b>chosen</b>" : "");
  }
  page += "</table>\n";
}

/// Why this configuration.
std::string origin(const plan::ExecutionPlan& plan) {
  switch (plan.config_source) {
    case ConfigSource::given:
      return "as given";
    case ConfigSource::tuned:
      return "the fastest when this shape was tuned on this device";
    case ConfigSource::tuned_elsewhere:
      return "the fastest when this shape was tuned, on another device or with other versions";
    case ConfigSource::tuned_near:
      return "the fastest when a near shape was tuned";
    case ConfigSource::heuristic:
      return "the heuristic's choice: no tuning record is near this shape";
  }
  return {};
}

/// Which tiles the main loop visits.
std::string visits(const plan::AnalysedSpec& spec) {
  if (spec.indices) return "the keys that each query's list names";
  if (spec.has_tile_lists) return "the tiles of a list, made on the device before the main loop";
  if (!spec.programs.has_mask) return "all tiles";
  if (spec.programs.mask_bounds > 0)
    return "the tiles within the mask's bounds, which tell exactly who attends";
  return "the tiles within the mask's bounds";
}

std::string schedule(const plan::Schedule& schedule) {
  std::string text;
  const auto add = [&](bool does, const char* what) {
    if (does) text += (text.empty() ? "" : "; ") + std::string(what);
  };
  add(schedule.q_tiles_per_cta > 1, "each block computes two Q tiles at a time");
  add(schedule.dynamic_tiles, "blocks take work tiles from a counter until there are none");
  add(schedule.stream_k, "blocks take equal shares of all KV tiles (stream-K)");
  add(schedule.cascade, "keys that all sequences share are read once");
  add(schedule.sums_dq, "a cluster sums up dQ");
  add(schedule.early_launch, "the launch overlaps the end of the one before");
  return text.empty() ? "one block a work tile" : text;
}

void decisions(std::string& page, const Explained& kernel) {
  const plan::ExecutionPlan& plan = kernel.plan;
  const TileConfig& config = plan.config;
  put(page, "<p><b><code>{}</code></b>: {}.</p>\n<table>\n", escaped(to_string(config)), origin(plan));
  const auto row = [&](const char* what, const std::string& value) {
    put(page, "<tr><td>{}</td><td>{}</td></tr>\n", what, escaped(value));
  };
  row("tile", fmt::format("{} rows of Q (Br), {} rows of K and V (Bc), {} warps, {} stages", config.br,
                          config.bc, config.warps, config.stages));
  row("visits", visits(plan.spec));
  row("schedule", schedule(plan.schedule));
  if (plan.needs.num_splits > 1)
    row("splits", fmt::format("{} of what a tile visits", plan.needs.num_splits));
  if (plan.fold_gqa) row("heads", "the query heads that share K and V are computed as queries of one");
  row("workspace", fmt::format("{} bytes", plan.workspace.bytes));
  page += "</table>\n";
}

void legend(std::string& page, const TileMap& tiles) {
  for (const TileKind kind : {TileKind::computed, TileKind::masked, TileKind::skipped, TileKind::empty}) {
    const auto count = std::ranges::count(tiles.kinds, kind);
    if (count == 0) continue;
    put(page, "<svg width='12' height='12'><rect width='12' height='12' class='{0}'/></svg> {0} {1} ",
        name_of(kind), count);
  }
}

void picture(std::string& page, const TileMap& tiles) {
  constexpr int kSide = 512, kLargest = 24;
  const auto most = static_cast<int>(std::max({tiles.rows.size(), tiles.columns.size(), std::size_t{1}}));
  const int cell = std::clamp(kSide / most, 6, kLargest);
  const bool all = std::ssize(tiles.rows) == tiles.q_tiles && std::ssize(tiles.columns) == tiles.kv_tiles;
  put(page,
      "<figure><figcaption>{} x {} tiles of S, {} queries (down) by {} keys (across){}: ", tiles.q_tiles,
      tiles.kv_tiles, tiles.queries, tiles.keys, all ? "" : ", evenly spaced ones drawn");
  legend(page, tiles);
  put(page, "</figcaption>\n<svg width='{}' height='{}' role='img' class='tiles'>\n",
      cell * tiles.columns.size(), cell * tiles.rows.size());
  for (std::size_t row = 0; row < tiles.rows.size(); ++row)
    for (std::size_t column = 0; column < tiles.columns.size(); ++column)
      put(page,
          "<rect x='{}' y='{}' width='{}' height='{}' class='{}'><title>queries from {}, keys from {}: "
          "{}</title></rect>\n",
          column * cell, row * cell, cell - 1, cell - 1, name_of(tiles.at(row, column)),
          tiles.rows[row] * tiles.queries, tiles.columns[column] * tiles.keys,
          name_of(tiles.at(row, column)));
  page += "</svg></figure>\n";
}

void resources(std::string& page, const Explained& kernel) {
  put(page, "<h3>Resources</h3><p class='about'>{}</p>\n", escaped(kernel.compiler));
  page +=
      "<table><tr><th>entry</th><th>threads</th><th>registers</th><th>spilled bytes</th><th>shared bytes</th>"
      "<th>blocks per SM</th><th>warps per SM</th></tr>\n";
  for (std::size_t i = 0; i < kernel.entries.size(); ++i) {
    const EntryReport& entry = kernel.entries[i];
    const auto known = [&](int value) { return kernel.compiled ? std::to_string(value) : std::string("-"); };
    put(page, "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
        escaped(entry.entry), entry.threads, known(entry.registers), known(entry.spill_bytes),
        entry.shared_bytes, known(kernel.resident[i]),
        known(kernel.resident[i] * ((entry.threads + kWarp - 1) / kWarp)));
  }
  page += "</table>\n";
}

/// Configurations of the chosen family by the time that the model expects, the chosen one always among them.
std::vector<std::pair<double, TileConfig>> candidates(const autotune::Model& model,
                                                      const plan::ExecutionPlan& plan) {
  std::vector<std::pair<double, TileConfig>> found;
  for (const TileConfig& config : plan::traits(plan.config.family).search_space(model.spec(), model.device()))
    if (config != plan.config) found.emplace_back(model.predict(config).ms, config);
  std::ranges::stable_sort(found, {}, &std::pair<double, TileConfig>::first);
  found.resize(std::min(found.size(), kMostCandidates - 1));
  found.emplace_back(model.predict(plan.config).ms, plan.config);
  std::ranges::stable_sort(found, {}, &std::pair<double, TileConfig>::first);
  return found;
}

void expectation(std::string& page, const autotune::Model& model, const plan::ExecutionPlan& plan) {
  const autotune::Prediction expected = model.predict(plan.config);
  put(page,
      "<h3>Expected time</h3><p>{:.4g} ms by the tuner's model, bound by {}; {:.4g} ms that no kernel beats "
      "({:.0f}% of the roofline). {:.0f} tiles are visited, in {:.1f} waves, {} blocks on a "
      "multiprocessor.</p>\n",
      expected.ms, expected.bound, model.roofline_ms(), 100 * model.roofline_ms() / expected.ms,
      expected.tiles, expected.waves, expected.blocks_resident);
  page +=
      "<details><summary>Other configurations by the model, which orders what the tuner measures</summary>"
      "<table><tr><th>configuration</th><th>ms</th></tr>\n";
  for (const auto& [ms, config] : candidates(model, plan)) {
    const bool chosen = config == plan.config;
    put(page, "<tr><td>{}{}{}</td><td>{:.4g}</td></tr>\n", chosen ? "<b>" : "", escaped(to_string(config)),
        chosen ? "</b>" : "", ms);
  }
  page += "</table></details>\n";
}

void section(std::string& page, const Explained& kernel) {
  const plan::ExecutionPlan& plan = kernel.plan;
  put(page, "<section><h2><code>{}</code><br><code>{}</code>, {}</h2>\n", escaped(to_string(plan.spec)),
      escaped(to_string(plan.shape)), escaped(kernel.device.arch));
  decisions(page, kernel);
  families(page, kernel);
  const bool attention = plan.spec.pass == Pass::forward || plan.spec.pass == Pass::backward;
  if (attention) {
    const BlockPattern map = autotune::plausible_map(plan.spec, plan.shape, autotune::kDefaultMapDensity);
    if (!plan.spec.indices) picture(page, tile_map(plan, map));
    expectation(page, autotune::Model({plan.spec, plan.shape}, kernel.device), plan);
  }
  resources(page, kernel);
  put(page, "<details><summary>Source</summary><pre>{}</pre></details></section>\n", escaped(kernel.source));
}

}  // namespace

std::string explain_html(const std::vector<Explained>& kernels) {
  std::string page = html::head("flashjit inspect");
  page +=
      "<h1>flashjit inspect</h1>\n<p>Tiles: <b>computed</b>, all pairs attend; <b>masked</b>, some do, and "
      "the mask is "
      "evaluated for each; <b>skipped</b>, never loaded; <b>empty</b>, loaded though no pair attends. "
      "Captured tensors are "
      "made up, and up to 144 pairs of a tile are asked.</p>\n";
  for (const Explained& kernel : kernels) section(page, kernel);
  page += "</body></html>\n";
  return page;
}

}  // namespace flashjit::command

#include "tools/parts/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <set>

#include "plan/family.hpp"
#include "plan/plan.hpp"
#include "tools/parts/html.hpp"

namespace flashjit::autotune {
namespace {

using html::escaped, html::put;

constexpr std::size_t kMostBars = 16;
constexpr std::size_t kMostRows = 60;

std::string resources(const plan::Timing& timing) {
  if (timing.registers == 0) return "";
  return fmt::format(", {} registers, {} bytes spilled", timing.registers, timing.spill_bytes);
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

std::vector<plan::Timing> by_time(const plan::TuningRecord& record) {
  std::vector<plan::Timing> measured;
  std::ranges::copy_if(record.timings, std::back_inserter(measured), [](const auto& t) { return t.ms > 0; });
  std::ranges::stable_sort(measured, {}, &plan::Timing::ms);
  return measured;
}

/// What times are shown as ratios to: the time of the heuristic's choice, measured and by the model; where it
/// was not measured, that of the fastest.
struct Reference {
  double measured_ms = 0, predicted_ms = 0;
  std::string name;

  double ratio(const Cell& cell) const {
    return cell.ms / (cell.kind == CellKind::predicted ? predicted_ms : measured_ms);
  }
};

Reference reference_of(const Model& model, const plan::TuningRecord& record) {
  const TileConfig heuristic = plan::make_plan(record.spec, record.shape, model.device(), {}).config;
  const auto of = [&](const plan::Timing& timing, const char* name) {
    return Reference{timing.ms, model.predict(timing.config).ms, name};
  };
  const auto known = std::ranges::find(record.timings, heuristic, &plan::Timing::config);
  if (known != record.timings.end() && known->ms > 0) return of(*known, "the heuristic's choice");
  const std::vector<plan::Timing> all = by_time(record);
  return all.empty() ? Reference{} : of(all.front(), "the fastest");
}

/// From the best, green, over yellow to twice its time and more, red.
std::string colour(double slower) {
  const double t = std::clamp(std::log2(slower), 0.0, 1.0);
  return fmt::format("hsl({:.0f} 65% {:.0f}%)", 130 * (1 - t), 45 + 20 * (1 - std::abs(2 * t - 1)));
}

double best_of(const plan::TuningRecord& record) {
  double least = 0;
  for (const plan::Timing& timing : record.timings)
    if (timing.ms > 0 && (least == 0 || timing.ms < least)) least = timing.ms;
  return least;
}

/// The fewest buffers that a candidate of the family has.
int least_stages(const plan::TuningRecord& record, Family family) {
  int least = 0;
  for (const plan::Timing& timing : record.timings)
    if (timing.config.family == family && (least == 0 || timing.config.stages < least))
      least = timing.config.stages;
  return std::max(least, 1);
}

/// Whether shared memory alone keeps every candidate with this tile out.
bool shared_memory_forbids(const Model& model, Family family, int br, int bc, int stages) {
  const plan::FamilyTraits& traits = plan::traits(family);
  bool forbids = false;
  for (const int warps : {1, 2, 4, 8, 12}) {
    for (const int split : {1, 2}) {
      const TileConfig config{
          .family = family, .br = br, .bc = bc, .warps = warps, .stages = stages, .d_split = split};
      const Support admitted = traits.admits(model.problem().spec, config, model.device());
      if (admitted) return false;
      forbids |= admitted.reason.find("bytes of shared memory") != std::string::npos;
    }
  }
  return forbids;
}

void heat_map(std::string& page, const Model& model, const plan::TuningRecord& record,
              const Reference& reference, Family family) {
  std::set<int> rows{32, 64, 128, 192, 256}, columns{32, 64, 96, 128, 160, 192, 224, 256};
  bool any = false;
  for (const plan::Timing& timing : record.timings) {
    if (timing.config.family != family) continue;
    any = true;
    rows.insert(timing.config.br);
    columns.insert(timing.config.bc);
  }
  if (!any) return;
  constexpr int kWidth = 46, kHeight = 30, kLeft = 60, kTop = 34;
  const int width = kLeft + kWidth * static_cast<int>(columns.size()) + 8;
  const int height = kTop + kHeight * static_cast<int>(rows.size()) + 8;
  const double best = best_of(record);
  put(page, "<figure><figcaption>{}: fastest of each Br (down) x Bc (across), times {}</figcaption>\n",
      to_string(family), reference.name);
  put(page, "<svg width='{}' height='{}' role='img'>\n", width, height);
  int x = kLeft;
  for (const int bc : columns) {
    put(page, "<text x='{}' y='{}' class='c'>{}</text>\n", x + kWidth / 2, kTop - 10, bc);
    x += kWidth;
  }
  int y = kTop;
  for (const int br : rows) {
    put(page, "<text x='{}' y='{}' class='r'>{}</text>\n", kLeft - 10, y + kHeight / 2 + 4, br);
    x = kLeft;
    for (const int bc : columns) {
      const Cell cell = cell_of(model, record, family, br, bc);
      const bool timed = cell.kind == CellKind::measured || cell.kind == CellKind::predicted;
      const std::string fill = cell.kind == CellKind::measured    ? colour(cell.ms / best)
                               : cell.kind == CellKind::forbidden ? "url(#forbidden)"
                               : cell.kind == CellKind::ruled_out ? "#999"
                               : cell.kind == CellKind::predicted ? "#eee"
                                                                  : "none";
      const bool chosen = record.best.family == family && record.best.br == br && record.best.bc == bc;
      put(page, "<g><title>{}</title><rect x='{}' y='{}' width='{}' height='{}' fill='{}'{}/>",
          escaped(fmt::format("Br {} Bc {}: {}", br, bc, cell.about)), x + 1, y + 1, kWidth - 2, kHeight - 2,
          fill, chosen ? " class='best'" : "");
      if (timed)
        put(page, "<text x='{}' y='{}' class='c{}'>{:.3f}</text>", x + kWidth / 2, y + kHeight / 2 + 4,
            cell.kind == CellKind::predicted ? " p" : "", reference.ratio(cell));
      page += "</g>\n";
      x += kWidth;
    }
    y += kHeight;
  }
  page += "</svg></figure>\n";
}

void bars(std::string& page, const Model& model, const plan::TuningRecord& record,
          const Reference& reference) {
  std::vector<plan::Timing> fastest = by_time(record);
  if (fastest.empty()) return;
  fastest.resize(std::min(fastest.size(), kMostBars));
  const double roofline = model.roofline_ms(), longest = std::max(fastest.back().ms, roofline);
  constexpr int kLeft = 250, kScale = 380, kHeight = 20;
  const int height = kHeight * static_cast<int>(fastest.size()) + 24;
  put(page,
      "<figure><figcaption>The fastest, times {} ({:.4g} ms), against the roofline, {:.4g} ms</figcaption>\n",
      reference.name, reference.measured_ms, roofline);
  put(page, "<svg width='{}' height='{}' role='img'>\n", kLeft + kScale + 130, height);
  int y = 4;
  for (const plan::Timing& timing : fastest) {
    put(page, "<text x='{}' y='{}' class='r'>{}</text>", kLeft - 8, y + 13,
        escaped(to_string(timing.config)));
    put(page, "<rect x='{}' y='{}' width='{:.1f}' height='{}' fill='{}'/>", kLeft, y,
        kScale * timing.ms / longest, kHeight - 4, colour(timing.ms / fastest.front().ms));
    put(page, "<text x='{:.1f}' y='{}'>{:.3f}, {:.0f}%</text>\n", kLeft + kScale * timing.ms / longest + 5,
        y + 13, timing.ms / reference.measured_ms, 100 * roofline / timing.ms);
    y += kHeight;
  }
  const double at = kLeft + kScale * roofline / longest;
  put(page, "<line x1='{:.1f}' x2='{:.1f}' y1='0' y2='{}' class='roof'/></svg></figure>\n", at, at, y);
}

void scatter(std::string& page, const Model& model, const plan::TuningRecord& record) {
  std::vector<double> predicted, measured;
  const std::vector<plan::Timing> all = by_time(record);
  for (const plan::Timing& timing : all) {
    predicted.push_back(model.predict(timing.config).ms);
    measured.push_back(timing.ms);
  }
  if (all.size() < 2) return;
  const double low = std::min(std::ranges::min(predicted), std::ranges::min(measured)) / 1.1;
  const double high = std::max(std::ranges::max(predicted), std::ranges::max(measured)) * 1.1;
  constexpr int kSide = 320, kMargin = 44;
  const auto place = [&](double ms) { return kSide * std::log(ms / low) / std::log(high / low); };
  put(page,
      "<figure><figcaption>Model (upwards) against measurement (across), ms, logarithmic; rank correlation "
      "{:.2f}</figcaption>\n",
      rank_correlation(predicted, measured));
  put(page, "<svg width='{}' height='{}' role='img'><g transform='translate({},4)'>\n", kSide + kMargin + 40,
      kSide + kMargin, kMargin);
  put(page,
      "<rect width='{0}' height='{0}' class='frame'/><line x1='0' y1='{0}' x2='{0}' y2='0' class='roof'/>\n",
      kSide);
  for (std::size_t i = 0; i < all.size(); ++i)
    put(page,
        "<circle cx='{:.1f}' cy='{:.1f}' r='4' class='{}'><title>{}: measured {:.4g}, predicted "
        "{:.4g}</title>"
        "</circle>\n",
        place(measured[i]), kSide - place(predicted[i]), to_string(all[i].config.family),
        escaped(to_string(all[i].config)), measured[i], predicted[i]);
  put(page,
      "<text x='0' y='{0}'>{1:.3g}</text><text x='{2}' y='{0}' class='r'>{3:.3g}</text>"
      "<text x='-6' y='12' class='r'>{3:.3g}</text>\n",
      kSide + 16, low, kSide, high);
  page += "</g></svg></figure>\n";
}

void table(std::string& page, const Model& model, const plan::TuningRecord& record,
           const Reference& reference) {
  const std::vector<plan::Timing> all = by_time(record);
  put(page,
      "<details><summary>Measured</summary><table><tr><th>configuration</th><th>ms</th><th>times {}</th>"
      "<th>predicted</th><th>bound by</th><th>registers</th><th>spilled</th></tr>\n",
      reference.name);
  for (std::size_t i = 0; i < std::min(all.size(), kMostRows); ++i) {
    const plan::Timing& t = all[i];
    const Prediction prediction = model.predict(t.config);
    put(page,
        "<tr><td>{}</td><td>{:.4f}</td><td>{:.3f}</td><td>{:.4f}</td><td>{}</td><td>{}</td><td>{}</td></"
        "tr>\n",
        escaped(to_string(t.config)), t.ms, t.ms / reference.measured_ms, prediction.ms, prediction.bound,
        t.registers, t.spill_bytes);
  }
  page +=
      "</table></details>\n<details><summary>Not measured</summary><table>"
      "<tr><th>configuration</th><th>predicted</th><th>why</th></tr>\n";
  for (const plan::Timing& t : record.timings) {
    if (t.ms > 0) continue;
    put(page, "<tr><td>{}</td><td>{:.4f}</td><td>{}</td></tr>\n", escaped(to_string(t.config)),
        model.predict(t.config).ms, escaped(t.skipped + resources(t)));
  }
  page += "</table></details>\n";
}

void section(std::string& page, const Reported& reported, const DeviceInfo& device, double density) {
  const plan::TuningRecord& record = reported.record;
  const Model model({record.spec, record.shape}, device, density);
  const double best = best_of(record);
  put(page, "<section><h2><code>{}</code><br><code>{}</code></h2>\n", escaped(to_string(record.spec)),
      escaped(to_string(record.shape)));
  if (best > 0) {
    const auto chosen = std::ranges::find(record.timings, record.best, &plan::Timing::config);
    const double ms = chosen != record.timings.end() && chosen->ms > 0 ? chosen->ms : best;
    put(page,
        "<p><b>{}</b>: {:.4g} ms, {:.0f} TFLOP/s, {:.0f}% of the roofline. {} of {} candidates "
        "measured.</p>\n",
        escaped(to_string(record.best)), ms, model.work().operations / ms * 1e-9,
        100 * model.roofline_ms() / ms, by_time(record).size(), record.timings.size());
  }
  put(page, "<p class='about'>{}, driver {}, {}, flashjit {}</p>\n", escaped(record.device),
      escaped(record.driver), escaped(record.nvrtc), escaped(record.library));
  const std::string conditions = to_string(reported.conditions);
  if (!conditions.empty()) put(page, "<p class='about'>While measuring: {}</p>\n", escaped(conditions));
  const Reference reference = reference_of(model, record);
  for (const plan::FamilyTraits& family : plan::families())
    heat_map(page, model, record, reference, family.family);
  bars(page, model, record, reference);
  scatter(page, model, record);
  table(page, model, record, reference);
  page += "</section>\n";
}

constexpr std::string_view kIntroduction =
    R"html(<svg width="0" height="0" style="position:absolute"><defs><pattern id="forbidden" width="6" height="6"
patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/>
<rect width="2" height="6" fill="#c55"/></pattern></defs></svg>
<h1>flashjit tune</h1>
<p>Every candidate was measured beside the heuristic's choice while the clocks were steady: maps and bars show the ratio of
their times, below 1 where the candidate is faster; a time in ms is that ratio by the time of the heuristic's choice. Maps:
coloured cells were measured, from green (the best) to red (twice its time and more); grey italics are of the model, not
measured; <b>hatched</b> tiles need more shared memory than a block may have; dark ones spill or could not
be had; the framed one was chosen. Hover for the configuration, registers and spills.</p>
)html";

}  // namespace

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

Cell cell_of(const Model& model, const plan::TuningRecord& record, Family family, int br, int bc) {
  Cell cell;
  for (const plan::Timing& timing : record.timings) {
    const TileConfig& config = timing.config;
    if (config.family != family || config.br != br || config.bc != bc) continue;
    const bool left_out = timing.skipped.starts_with("left out") || timing.skipped.starts_with("not reached");
    const CellKind kind = timing.ms > 0 ? CellKind::measured
                          : left_out    ? CellKind::predicted
                                        : CellKind::ruled_out;
    const double ms = timing.ms > 0 ? timing.ms : left_out ? model.predict(config).ms : 0;
    // Measured before predicted before ruled out; of those that are alike the fastest.
    if (cell.kind != CellKind::none && (kind > cell.kind || (kind == cell.kind && ms >= cell.ms))) continue;
    const std::string outcome = kind == CellKind::measured ? fmt::format("{:.4g} ms", ms) : timing.skipped;
    cell = {kind, ms, fmt::format("{}, {}{}", to_string(config), outcome, resources(timing))};
  }
  if (cell.kind != CellKind::none) return cell;
  if (shared_memory_forbids(model, family, br, bc, least_stages(record, family)))
    return {CellKind::forbidden, 0, "too much shared memory"};
  return {CellKind::none, 0, "no candidate"};
}

std::string report_html(const std::vector<Reported>& records, const DeviceInfo& device, double map_density) {
  std::string page = html::head("flashjit tune");
  page += kIntroduction;
  for (const Reported& record : records) section(page, record, device, map_density);
  page += "</body></html>\n";
  return page;
}

}  // namespace flashjit::autotune

// A page on what was measured: one HTML file that needs nothing else, drawn in SVG.
#pragma once

#include <string>
#include <vector>

#include "autotune/conditions.hpp"
#include "autotune/model.hpp"
#include "plan/records.hpp"

namespace flashjit::autotune {

/// A record, and under which conditions it was measured, where that is known.
struct Reported {
  plan::TuningRecord record;
  Conditions conditions = {};
};

/// Each record: a map over Br x Bc of each family's times, with the tiles that shared memory forbids, that
/// spill and that were predicted only; the fastest candidates against the roofline; the model against the
/// measurements; a table with registers and spills. `device` is the one of the records.
std::string report_html(const std::vector<Reported>& records, const DeviceInfo& device,
                        double map_density = kDefaultMapDensity);

/// What one cell of the map shows.
enum class CellKind : std::uint8_t {
  measured,   ///< ms is the fastest of the candidates with this tile
  predicted,  ///< ms is the model's: the search left these candidates out
  ruled_out,  ///< compiled, but spills or could not be had
  forbidden,  ///< more shared memory than there is
  none,       ///< no candidate has this tile
};
struct Cell {
  CellKind kind = CellKind::none;
  double ms = 0;
  std::string about;  ///< of the candidate that is meant: its text, registers and spills; or the reason
};
/// The cell of Br x Bc in the map of a family.
Cell cell_of(const Model& model, const plan::TuningRecord& record, Family family, int br, int bc);

/// Spearman's rank correlation; equal values share their rank. 0 for fewer than two values, or if one side is
/// constant.
double rank_correlation(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace flashjit::autotune

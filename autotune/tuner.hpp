// The search: compiles candidates in parallel, measures them as they come, and decides.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "autotune/conditions.hpp"
#include "autotune/meter.hpp"
#include "autotune/space.hpp"
#include "plan/records.hpp"

namespace flashjit::autotune {

/// Timings closer than this are noise, or closer than what repeating them showed: what every rank and machine
/// knows without a clock decides.
inline constexpr double kNoise = 0.005;
/// Rounds of one measurement, at most: short kernels have so many.
inline constexpr int kMostRounds = 60;

/// What timings are valid for, besides the problem.
struct Setting {
  DeviceInfo device;
  std::string driver, nvrtc, library;  ///< versions
};

/// One candidate is settled; for progress bars and logs.
struct Event {
  plan::Timing timing;
  std::size_t done = 0, total = 0;  ///< measured, and the most that will be; exhaustive: settled, and all
  double best_ms = 0;               ///< so far; 0: none measured
};

struct TuneOptions {
  std::vector<Family> families = {};  ///< empty: every family that can do the problem
  bool exhaustive = false;            ///< measure every candidate
  double prune = 0;     ///< leave out what is predicted this many times slower than the best; 0: none
  double share = 0.15;  ///< of the candidates: the most that are measured, but at least kFewest
  std::size_t max_candidates = 0;  ///< the most that are measured, where that is fewer; 0: no such limit
  double budget_seconds = 0;       ///< for one problem, from the start of tune(); 0: no limit
  bool force = false;              ///< measure again what a record already holds
  /// Measured first, with the heuristic's choice: what is best for a near shape, or on another device.
  std::vector<TileConfig> leads = {};
  std::optional<std::size_t> max_workspace = {};  ///< candidates that need more bytes are left out
  double map_density = kDefaultMapDensity;        ///< what the model assumes
  unsigned compile_threads = 0;                   ///< 0: as many as the machine runs at once
  std::function<bool()> stop = {};   ///< asked between candidates; true: keep what is known and return
  std::function<double()> now = {};  ///< seconds of a monotonic clock; default the steady clock
  std::function<void(const Event&)> report = {};  ///< called from the tuning thread
};

/// The least number of candidates that a search which is not cut short measures, where there are so many.
inline constexpr std::size_t kFewest = 6;

enum class Ending : std::uint8_t {
  complete,       ///< every chosen candidate is settled
  already_tuned,  ///< nothing was left to measure; the record is the known one
  budget_spent,   ///< best so far
  interrupted,    ///< best so far
};
std::string to_string(Ending ending);  // "complete", "already tuned", "budget spent", "interrupted"

struct TuneResult {
  plan::TuningRecord record;  ///< best is meaningful when any timing was measured
  Ending ending = Ending::complete;
  TileConfig heuristic;        ///< what the runtime would take without the record
  std::size_t measured = 0;    ///< candidates measured in this run
  std::size_t candidates = 0;  ///< that there are
  double seconds = 0;          ///< that this run took
  double drift = 0;            ///< by which the reference's longest time exceeds its shortest
  Conditions conditions = {};  ///< under which this run measured

  bool has_best() const;
  double best_ms() const;       ///< 0 when nothing was measured
  double heuristic_ms() const;  ///< 0 when it was not measured
};

/// Tunes one problem: the heuristic's choice, the leads and what the model thinks fastest are measured, then
/// what the model thinks best after that, until nothing promises an improvement or the share is spent. All
/// are measured beside the heuristic's choice (where it can be had; else beside the first that can), and
/// each time is the ratio to it by its own time, so that times of a cool GPU and of a hot one compare. The
/// fastest few and the heuristic's choice are measured once more, together, and decide. `known` is an earlier
/// record of the problem: while is_current() what it settled is not measured again (unless forced), so that
/// an interrupted search goes on where it stopped; else its best is a lead. Throws Error(invalid_argument)
/// when a size is 0, Error(unsupported) when no family can do the problem, and what the meter throws to end
/// the tuning; `keep` (where given) is called with what is known before every return and throw, if anything
/// was measured.
TuneResult tune(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options = {},
                const std::optional<plan::TuningRecord>& known = {},
                const std::function<void(const plan::TuningRecord&)>& keep = {});

/// tune() of the problem as it is computed, see fold_gqa(), with the records folder as memory: reads
/// the problem's record if there is one and writes it anew.
TuneResult tune_into(const std::filesystem::path& records_folder, const Problem& problem,
                     const Setting& setting, Meter& meter, const TuneOptions& options = {});

/// The fastest; among those within `noise` of it the heuristic's choice, else the first in canonical order.
/// None when nothing was measured.
std::optional<TileConfig> pick(const std::vector<plan::Timing>& timings, const TileConfig& heuristic,
                               double noise = kNoise);

/// Whether the record's timings are comparable with new ones: of the same problem, device, driver, NVRTC and
/// library.
bool is_current(const plan::TuningRecord& record, const Problem& problem, const Setting& setting);

}  // namespace flashjit::autotune

// The search: compiles candidates in parallel, measures them as they come, and decides.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "autotune/meter.hpp"
#include "autotune/space.hpp"
#include "plan/records.hpp"

namespace flashjit::autotune {

/// Timings closer than this are noise: the canonical order decides, so that every rank and machine picks
/// alike.
inline constexpr double kNoise = 0.01;

/// What timings are valid for, beside the problem.
struct Setting {
  DeviceInfo device;
  std::string driver, nvrtc, library;  ///< versions
};

/// One candidate is settled; for progress bars and logs.
struct Event {
  plan::Timing timing;
  std::size_t done = 0, total = 0;  ///< candidates of this problem
  double best_ms = 0;               ///< so far; 0: none measured
};

struct TuneOptions {
  std::vector<Family> families = {};  ///< empty: every family that can do the problem
  std::size_t max_candidates = 0;     ///< the first of candidates(); 0: all
  double budget_seconds = 0;          ///< for one problem, from the start of tune(); 0: no limit
  bool force = false;                 ///< measure again what a record already holds
  int repeats = 7;                    ///< of each candidate's first measurement
  int final_repeats = 21;             ///< of the interleaved measurement of the fastest
  unsigned compile_threads = 0;       ///< 0: as many as the machine runs at once
  std::function<bool()> stop = {};    ///< asked between candidates; true: keep what is known and return
  std::function<double()> now = {};   ///< seconds of a monotonic clock; default the steady clock
  std::function<void(const Event&)> report = {};  ///< called from the tuning thread
};

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
  TileConfig heuristic;      ///< what the runtime would take without the record
  std::size_t measured = 0;  ///< candidates measured in this run

  bool has_best() const;
  double best_ms() const;       ///< 0 when nothing was measured
  double heuristic_ms() const;  ///< 0 when it was not measured
};

/// Tunes one problem. `known` is an earlier record of it: what it settled on the same device and library
/// version is not measured again (unless forced), so that an interrupted search goes on where it stopped.
/// Throws Error(invalid_argument) when a size is 0, Error(unsupported) when no family can do the problem, and
/// what the meter throws to end the tuning; `keep` (where given) is called with what is known before every
/// return and throw, if anything was measured.
TuneResult tune(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options = {},
                const std::optional<plan::TuningRecord>& known = {},
                const std::function<void(const plan::TuningRecord&)>& keep = {});

/// tune() with the records folder as memory: reads the problem's record if there is one and writes it anew.
TuneResult tune_into(const std::filesystem::path& records_folder, const Problem& problem,
                     const Setting& setting, Meter& meter, const TuneOptions& options = {});

/// The fastest; among those within kNoise of it the first in canonical order. None when nothing was measured.
std::optional<TileConfig> pick(const std::vector<plan::Timing>& timings);

}  // namespace flashjit::autotune

// How good the tuner is on this GPU: its choices against measuring everything.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "autotune/tuner.hpp"

namespace flashjit::autotune {

/// One problem, tuned as by its first user, with nothing compiled before, then measured exhaustively.
struct StudyRow {
  Problem problem;
  plan::TuningRecord chosen;  ///< what the search wrote
  /// The same after all the rest was measured; its times are compared. What only `untuned` names has a reason
  /// to be skipped, too.
  plan::TuningRecord exhaustive;
  TileConfig heuristic;
  std::size_t candidates = 0;
  std::size_t measured = 0;  ///< by the search
  double seconds = 0;        ///< of the search, compiling included
  double correlation = 0;    ///< of the model's ranks with the measured ones, 1: the same order
  double drift = 0;          ///< TuneResult::drift of the exhaustive run
  Conditions conditions;     ///< of all that was measured
  /// What the runtime would take if this shape had no record: of the study's other problems the nearest, else
  /// the heuristic's.
  TileConfig untuned;
  bool untuned_by_record = false;

  /// How many times slower than the exhaustive best; none when it was not measured.
  std::optional<double> slower(const TileConfig& config) const;
  double share() const { return static_cast<double>(measured) / static_cast<double>(candidates); }
};

/// Candidates that the model expects to be this many times slower than the best it knows are not measured
/// even in a study: they would take most of its time.
inline constexpr double kStudyPrune = 2.0;

StudyRow study(const Problem& problem, const Setting& setting, Meter& meter, const TuneOptions& options = {});

/// Fills `untuned` of every row from the records of the others.
void compare_untuned(std::vector<StudyRow>& rows, const DeviceInfo& device);

/// Times `untuned`, too, where the exhaustive run passed over it; what cannot be launched has no time.
void measure_untuned(StudyRow& row, Meter& meter);

/// Spearman's: of the ranks, ties sharing theirs; 0 for fewer than two values or when one side is constant.
double rank_correlation(const std::vector<double>& a, const std::vector<double>& b);

/// A page that says what was found against what is wanted, on a host of how many cores, and a table of the
/// rows.
std::string study_markdown(const std::vector<StudyRow>& rows, const Setting& setting);
std::string study_csv(const std::vector<StudyRow>& rows);

}  // namespace flashjit::autotune

// Tuning records: which configuration was measured best for a spec, a shape and a device, and every timing.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "flashjit/pack.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::plan {

struct Timing {
  TileConfig config;
  double ms = 0;        ///< median; 0 when it was not measured
  std::string skipped;  ///< why it was not measured: "spills 32 bytes", ...; empty when it was
  int registers = 0;    ///< a thread of the main kernel; 0 when it was not compiled
  int spill_bytes = 0;  ///< of the main kernel

  bool operator==(const Timing&) const = default;
};

/// One JSON file. A pack writes records without timings: they only choose.
struct TuningRecord {
  AttentionSpec spec;  ///< normalized
  AttentionShape shape;
  std::string arch;                    ///< "sm_90a"
  std::string device;                  ///< name of the GPU measured on; empty when nothing was measured
  std::string driver, nvrtc, library;  ///< versions measured with
  TileConfig best;
  std::vector<Timing> timings;

  bool operator==(const TuningRecord&) const = default;
};

std::string to_json(const TuningRecord& record);
/// Throws Error(io) that names what is missing or wrong.
TuningRecord parse_record(const std::string& json);

/// File name of a record below a records folder: readable, and unique for (arch, spec, shape):
/// "sm_90a/fwd-bf16-d128-causal__b2-hq32-hkv8-sq4096-skv4096.json". Throws Error(invalid_argument) on an arch
/// that names no folder.
std::filesystem::path record_path(const TuningRecord& record);
/// Writes atomically: a temporary file beside it, fsync, rename. Throws Error(io), or Error(invalid_argument)
/// for a record that could not be read again.
void write_record(const std::filesystem::path& folder, const TuningRecord& record);

/// Records by spec and architecture.
class TuningRecords {
 public:
  /// Reads every record below `folder`; files that cannot be read are reported through `warnings` and passed
  /// over.
  void load(const std::filesystem::path& folder, std::vector<std::string>* warnings = nullptr);
  /// Records that are in memory already.
  void load(const std::vector<EmbeddedFile>& files, std::vector<std::string>* warnings = nullptr);
  void add(TuningRecord record);
  struct Match {
    const TuningRecord* record = nullptr;
    bool exact = false;
  };
  /// The record of this very shape, else of the nearest one (sum of |log2| ratios of lengths and of batch *
  /// heads). Earlier additions win ties, so the first pack of a search path wins. Records whose best
  /// configuration is not `usable` are passed over.
  Match find(const AttentionSpec& spec, const AttentionShape& shape, const std::string& arch,
             const std::function<bool(const TileConfig&)>& usable = {}) const;
  std::size_t size() const;

 private:
  std::map<std::string, std::vector<TuningRecord>> by_problem_;  // "<arch>/<spec>"
};

}  // namespace flashjit::plan

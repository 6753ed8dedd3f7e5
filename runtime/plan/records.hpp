// Tuning records: which configuration was measured best for a spec, a shape and a device, and every timing.
#pragma once

#include <cstdint>
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
  KernelSpec spec;  ///< normalized
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
/// Writes atomically: a temporary file next to it, fsync, rename. `folder` is a store's `v1/tuning`. Throws
/// Error(io), also where one of these folders is a link to somewhere else, or Error(invalid_argument) for a
/// record that could not be read again.
void write_record(const std::filesystem::path& folder, const TuningRecord& record);

/// Records by spec and architecture.
class TuningRecords {
 public:
  enum class Origin : std::uint8_t { own, shipped };

  /// Reads every record below `folder`; files that cannot be read are reported through `warnings` and passed
  /// over.
  void load(const std::filesystem::path& folder, std::vector<std::string>* warnings = nullptr);
  /// Records that are in memory already.
  void load(const std::vector<EmbeddedFile>& files, std::vector<std::string>* warnings = nullptr);
  void add(TuningRecord record, Origin origin = Origin::own);
  struct Match {
    const TuningRecord* record = nullptr;
    bool same_shape = false;
    /// It is of this shape, device, driver and library version; one that matches less is a lead. Unknown
    /// parts, such as the driver of a device built by hand, count as equal.
    bool exact = false;
  };
  /// The nearest record of the spec, or of its twin of the other 16-bit type. Near is: a like length of Q and
  /// of KV (ratios; beyond 16k all are alike), as many blocks for the multiprocessors (beyond many waves all
  /// are alike), a like number of heads a KV head, lengths that are whole tiles or not. Another device of the
  /// architecture, another version of driver or library and what ships with the library count as further
  /// away, and the last so much, 2 octaves, that records of one's own win up to a shape with four times the
  /// batch or the keys, twice the queries, or one and a half times both lengths. Earlier additions win ties,
  /// so the first pack of a search path wins. Records whose shape is unlike in several of these, or whose
  /// best configuration is not `usable`, are passed over. Of NVRTC nothing is asked here: a plan is made
  /// without it, and stored kernels are taken whichever made them; Engine compares it with the kernel's.
  Match find(const KernelSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
             const std::function<bool(const TileConfig&)>& usable = {}) const;
  std::size_t size() const;

 private:
  struct Held {
    TuningRecord record;
    Origin origin;
  };
  std::map<std::string, std::vector<Held>> by_problem_;  // "<arch>/<spec>"
};

}  // namespace flashjit::plan

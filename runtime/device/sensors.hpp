// How warm and how fast a GPU is, from NVML, opened at run time as libcuda is. Where it is not there, nothing
// is known.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace flashjit::device {

/// What a GPU says of itself at one moment. What is unknown has no value.
struct GpuState {
  std::optional<int> clock_mhz;  ///< of the SMs
  std::optional<int> celsius;
  std::uint64_t slowed_by = 0;  ///< NVML's reasons why clocks are lower than they could be, as its bits

  friend bool operator==(const GpuState&, const GpuState&) = default;
};

/// The sensors of one GPU. Never throws: measurements go on without it.
class Sensors {
 public:
  /// The GPU by its PCI bus id, as cuDeviceGetPCIBusId returns it; `library` is libnvidia-ml.so.1 when empty.
  explicit Sensors(const std::string& pci_bus_id, const std::string& library = {});
  ~Sensors();

  /// Asks another library of the driver, which may take milliseconds: not between what is timed.
  GpuState read() const;

 private:
  struct Nvml;
  std::unique_ptr<Nvml> nvml_;  ///< null: there is none, or it does not know the GPU
};

}  // namespace flashjit::device

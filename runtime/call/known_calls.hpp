// Calls that differ from an earlier one in their memory alone: its launches are made again, with other
// addresses.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call/apart.hpp"
#include "call/decoded_cache.hpp"
#include "device/driver.hpp"
#include "device/tensor_maps.hpp"
#include "flashjit/runtime.hpp"

namespace flashjit {

/// A call in words, which tell all that its checks and launches depend on. Of an address they tell whether it
/// is null, and its last 8 bits.
struct CallWords {
  static constexpr std::size_t kMostWords = 512, kMostAddresses = 80;

  std::array<std::uint64_t, kMostWords> words;
  std::array<std::uint64_t, kMostAddresses> memory;
  std::size_t count = 0, addresses = 0;

  void add(std::uint64_t word) { words[count++] = word; }
  /// Takes the address that a word is.
  void take_address(std::size_t word) {
    const std::uint64_t address = memory[addresses++] = words[word];
    words[word] = address == 0 ? 0 : 256 + address % 256;
  }
  std::string_view key() const {
    return {reinterpret_cast<const char*>(words.data()), count * sizeof(std::uint64_t)};
  }
};

/// How far an address is moved in order to see where it goes: each another way, which keeps its last 8 bits.
constexpr std::uint64_t distance_of_address(std::size_t address) { return (address + 1) << 16; }

/// A launch as the driver gets it, but for its stream.
struct RecordedLaunch {
  CUkernel kernel;
  unsigned blocks, threads, shared_bytes;
  bool early;
  std::vector<std::uint64_t> params;
  device::TensorMaps maps;
};

/// Words of the largest struct that a kernel has: DecodeCacheParams begins with Params.
constexpr std::size_t kMostParamWords = sizeof(DecodeCacheParams) / sizeof(std::uint64_t);

/// What a call would launch.
using RecordedLaunches = std::vector<RecordedLaunch>;

/// The memory that a call writes and reads, which has to be apart, at its own addresses and at moved ones.
struct RecordedPlaces {
  CallPlaces made, moved;
};

/// A driver whose tensor maps are the addresses that they are made of.
const device::Driver& driver_of_addresses();

/// The launches of a call, in which addresses are set anew.
class KnownCall {
 public:
  /// Whether kernels and workspace are still those that calls use.
  struct Validity {
    std::shared_ptr<const void> operation;  ///< owns the kernels
    CUdevice device;
    std::uint64_t generation;
  };
  /// Null where it is not seen where addresses go. `moved` is the call with moved addresses; it and
  /// `as_addresses` have the maps of driver_of_addresses().
  static std::shared_ptr<const KnownCall> make(Validity validity, const CallWords& call,
                                               RecordedLaunches made, const RecordedLaunches& as_addresses,
                                               const RecordedLaunches& moved, const RecordedPlaces& places);

  bool is_valid(CUdevice device, std::uint64_t generation) const {
    return validity_.device == device && validity_.generation == generation;
  }
  /// False, and nothing is launched, where memory is not apart, which a call is refused for.
  bool launch(const device::Driver& driver, const CallWords& call, Stream stream) const;

 private:
  /// A word, or a map, that is an address of the call and an offset.
  struct Address {
    std::size_t word, address;
    std::uint64_t offset;

    std::uint64_t of(const CallWords& call) const { return call.memory[address] + offset; }
  };
  struct Step {
    RecordedLaunch launch;
    std::vector<Address> in_params, in_maps;
  };
  struct Place {
    Placed placed;
    Address address;

    Extent extent_of(const CallWords& call) const;
    Placed of(const CallWords& call) const;
  };

  static bool find_places(const CallWords& call, const std::vector<Placed>& made,
                          const std::vector<Placed>& moved, std::vector<Place>& places);
  static bool find_addresses(const CallWords& call, Step& step, const RecordedLaunch& as_addresses,
                             const RecordedLaunch& moved);
  bool is_apart(const CallWords& call) const;

  Validity validity_;
  std::vector<Step> steps_;
  std::vector<Place> written_, read_;
};

/// By key.
class KnownCalls {
 public:
  std::shared_ptr<const KnownCall> find(const CallWords& call) const;
  /// Whether a call is worth to be kept: it was met before, and its addresses are not known not to be found.
  bool wants(const CallWords& call);
  void keep(const CallWords& call, std::shared_ptr<const KnownCall> known);

 private:
  static constexpr std::size_t kMostCalls = 1024;
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view key) const;
  };

  mutable std::shared_mutex mutex_;  // guards what follows
  std::unordered_map<std::string, std::shared_ptr<const KnownCall>, Hash, std::equal_to<>> calls_;
  std::array<std::atomic<std::uint64_t>, kMostCalls> met_{};  // hashes of keys, each at its remainder
};

}  // namespace flashjit

#include "call/known_calls.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "device/loaded_kernel.hpp"

namespace flashjit {
namespace {

constexpr std::size_t kMaps = sizeof(device::TensorMaps) / sizeof(CUtensorMap);

CUtensorMap& map_of(device::TensorMaps& maps, std::size_t i) {
  return reinterpret_cast<CUtensorMap*>(&maps)[i];
}
const CUtensorMap& map_of(const device::TensorMaps& maps, std::size_t i) {
  return reinterpret_cast<const CUtensorMap*>(&maps)[i];
}

bool is_made(const CUtensorMap& map) {
  return std::ranges::any_of(map.opaque, [](cuuint64_t word) { return word != 0; });
}

/// Which of the call's addresses a word is that moving them has changed, and how far behind it.
struct Found {
  std::size_t address;
  std::uint64_t offset;
};
std::optional<Found> find_address(const CallWords& call, std::uint64_t word, std::uint64_t moved) {
  for (std::size_t i = 0; i < call.addresses; ++i)
    if (call.memory[i] != 0 && moved - word == distance_of_address(i)) return Found{i, word - call.memory[i]};
  return {};
}

}  // namespace

const device::Driver& driver_of_addresses() {
  static const device::Driver kDriver = [] {
    device::Driver driver;
    driver.tensor_map_encode_tiled = [](CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data,
                                        const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                        const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
      map->opaque[0] = reinterpret_cast<std::uintptr_t>(data);
      return CUDA_SUCCESS;
    };
    return driver;
  }();
  return kDriver;
}

bool KnownCall::find_addresses(const CallWords& call, Step& step, const RecordedLaunch& as_addresses,
                               const RecordedLaunch& moved) {
  for (std::size_t word = 0; word < step.launch.params.size(); ++word) {
    const std::uint64_t before = as_addresses.params[word], after = moved.params[word];
    if (before == after) continue;
    const auto found = find_address(call, before, after);
    if (!found) return false;
    step.in_params.push_back({word, found->address, found->offset});
  }
  for (std::size_t map = 0; map < kMaps; ++map) {
    if (!is_made(map_of(step.launch.maps, map))) continue;
    const auto found =
        find_address(call, map_of(as_addresses.maps, map).opaque[0], map_of(moved.maps, map).opaque[0]);
    if (!found) return false;
    step.in_maps.push_back({map, found->address, found->offset});
  }
  return true;
}

bool KnownCall::find_places(const CallWords& call, const std::vector<Placed>& made,
                            const std::vector<Placed>& moved, std::vector<Place>& places) {
  for (std::size_t i = 0; i < made.size(); ++i) {
    const auto found = find_address(call, made[i].extent.begin, moved[i].extent.begin);
    if (!found) return false;
    places.push_back({made[i], {0, found->address, found->offset}});
  }
  return true;
}

std::shared_ptr<const KnownCall> KnownCall::make(Validity validity, const CallWords& call,
                                                 RecordedLaunches made, const RecordedLaunches& as_addresses,
                                                 const RecordedLaunches& moved,
                                                 const RecordedPlaces& places) {
  auto known = std::make_shared<KnownCall>();
  known->validity_ = std::move(validity);
  for (std::size_t i = 0; i < made.size(); ++i) {
    Step& step = known->steps_.emplace_back(std::move(made[i]));
    if (!find_addresses(call, step, as_addresses[i], moved[i])) return nullptr;
  }
  if (!find_places(call, places.made.written, places.moved.written, known->written_) ||
      !find_places(call, places.made.read, places.moved.read, known->read_))
    return nullptr;
  return known;
}

Extent KnownCall::Place::extent_of(const CallWords& call) const {
  const std::uint64_t begin = address.of(call);
  return {begin, begin + (placed.extent.end - placed.extent.begin)};
}
Placed KnownCall::Place::of(const CallWords& call) const {
  Placed here = placed;
  here.extent = extent_of(call);
  return here;
}

bool KnownCall::is_apart(const CallWords& call) const {
  for (std::size_t i = 0; i < written_.size(); ++i) {
    const Placed written = written_[i].of(call);
    const auto shares = [&](const Place& other) {
      const Extent extent = other.extent_of(call);
      const bool meet = extent.begin < written.extent.end && written.extent.begin < extent.end;
      return meet && certainly_share(written, other.of(call));
    };
    if (std::ranges::any_of(read_, shares) || std::ranges::any_of(std::span(written_).subspan(i + 1), shares))
      return false;
  }
  return true;
}

bool KnownCall::launch(const device::Driver& driver, const CallWords& call, Stream stream) const {
  if (!is_apart(call)) return false;
  for (const Step& step : steps_) {
    const RecordedLaunch& launch = step.launch;
    std::array<std::uint64_t, kMostParamWords> params;
    std::ranges::copy(launch.params, params.begin());
    for (const Address& address : step.in_params) params[address.word] = address.of(call);
    std::array<void*, 2> parameters{params.data(), const_cast<device::TensorMaps*>(&launch.maps)};
    device::TensorMaps maps;
    if (!step.in_maps.empty()) {
      maps = launch.maps;
      for (const Address& address : step.in_maps)
        driver.check(driver.tensor_map_replace_address(&map_of(maps, address.word),
                                                       reinterpret_cast<void*>(address.of(call))),
                     "cuTensorMapReplaceAddress");
      parameters[1] = &maps;
    }
    device::launch(driver, launch.kernel, launch.blocks, launch.threads, launch.shared_bytes, stream,
                   parameters, launch.early);
  }
  return true;
}

std::size_t KnownCalls::Hash::operator()(std::string_view key) const {
  return XXH3_64bits(key.data(), key.size());
}

std::shared_ptr<const KnownCall> KnownCalls::find(const CallWords& call) const {
  const std::shared_lock lock(mutex_);
  const auto found = calls_.find(call.key());
  return found == calls_.end() ? nullptr : found->second;
}

bool KnownCalls::wants(const CallWords& call) {
  const std::uint64_t hash = Hash{}(call.key());
  if (met_[hash % kMostCalls].exchange(hash, std::memory_order_relaxed) != hash) return false;
  const std::shared_lock lock(mutex_);
  const auto found = calls_.find(call.key());
  return found == calls_.end() || found->second;
}

void KnownCalls::keep(const CallWords& call, std::shared_ptr<const KnownCall> known) {
  const std::unique_lock lock(mutex_);
  if (calls_.size() >= kMostCalls) calls_.clear();
  calls_.insert_or_assign(std::string(call.key()), std::move(known));
}

}  // namespace flashjit

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "cache/folders.hpp"
#include "cache/store.hpp"
#include "support/file.hpp"

namespace flashjit::cache {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(5);
constexpr auto kSilence = std::chrono::seconds(2);

}  // namespace

Store::Lock::~Lock() { lock_.remove_and_release(); }

Store::Lock Store::lock(const std::string& arch, const std::string& key, double timeout_seconds) const {
  if (folder_.empty() || access_ == Access::read_only || !is_arch_name(arch) || !is_key_name(key) ||
      !is_usable(arch))
    return {};
  const std::filesystem::path folder = root() / kLockFolder;
  if (!link_on_the_way(root(), kLockFolder).empty() || !make_private_folders(folder).empty()) return {};
  const std::filesystem::path path = folder / fmt::format("{}-{}.lock", arch, key);

  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration<double>(timeout_seconds);
  bool told = false;
  do {
    FileLock lock;
    const FileLock::Attempt attempt = lock.lock_file(path);
    if (attempt == FileLock::Attempt::held) return Lock(std::move(lock));
    if (attempt == FileLock::Attempt::gone) continue;
    if (attempt == FileLock::Attempt::broken) return {};
    std::this_thread::sleep_for(kPollInterval);
    if (!told && Clock::now() - begin > kSilence) {
      told = true;
      warn(fmt::format("waiting for another process that compiles the same kernel, {:.0f} s at most ('{}')",
                       timeout_seconds, path.string()));
    }
  } while (Clock::now() < deadline);
  return {};
}

}  // namespace flashjit::cache

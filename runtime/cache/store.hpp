// Compiled kernels on disk: `$dir/v1/<arch>/<key>/{kernel.cu, kernel.cubin, meta.json}`. A pack is such a
// folder, read-only. Nothing here compiles, and nothing here knows CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "render/kernel_source.hpp"

namespace flashjit::cache {

/// Digest of everything that can change machine code or launch: source text, headers, entries (threads,
/// shared memory), options, architecture, the parameter struct's version. 32 hexadecimal digits. The compiler
/// is no part of it, so that a pack can be searched where no compiler is.
std::string source_digest(const KernelSource& source, const std::vector<std::string>& options);

/// "<source digest>-<compiler tag>": the name of an entry's folder.
std::string entry_key(const std::string& source_digest, const std::string& compiler_tag);

/// What list, show and verify know of an entry.
struct EntryInfo {
  std::string arch = {}, key = {};
  std::string spec = {}, config = {};
  std::string compiler = {};
  std::uintmax_t bytes = 0;
  std::string damage = {};  ///< why it cannot be used; empty: sound
};

using Log = std::function<void(std::string_view)>;

/// One folder of compiled kernels. Safe from many threads and processes. Every failure to read is a miss and
/// every failure to write is reported once; neither throws.
class Store {
 public:
  enum class Access : std::uint8_t { read_write, read_only };
  Store(std::filesystem::path folder, Access access, Log log = {});

  const std::filesystem::path& folder() const;
  /// The entry of this source made by this compiler; with an empty tag, by any compiler.
  /// A damaged or foreign entry is a miss with a warning.
  std::optional<CompiledKernel> load(const KernelSource& source, const std::string& digest,
                                     const std::string& compiler_tag) const;
  /// Atomic: temporary folder on the same file system, fsync, rename. Returns whether the entry is there
  /// afterwards.
  bool store(const KernelSource& source, const std::string& digest, const CompiledKernel& kernel);

  std::vector<EntryInfo> list() const;
  /// Removes damaged entries and leftovers; returns what it removed.
  std::vector<EntryInfo> repair();
  /// Removes the least recently used entries until at most `bytes` remain; returns how many it removed.
  std::size_t prune(std::uintmax_t bytes);
  /// Removes every entry, tuning records too when asked; touches nothing that flashjit did not write.
  std::size_t clear(bool records);
  /// Folder of the tuning records: `$dir/v1/tuning`.
  std::filesystem::path records_folder() const;

  /// Held while one process compiles an entry, so that others wait for it; released on destruction. Gives up
  /// after `timeout_seconds` or where locks do not work, and then the caller compiles anyway.
  class Lock {
   public:
    Lock() = default;
    explicit Lock(int fd) : fd_(fd) {}
    Lock(Lock&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    Lock& operator=(Lock&& other) noexcept;
    ~Lock();
    bool held() const { return fd_ >= 0; }

   private:
    int fd_ = -1;
  };
  Lock lock(const std::string& arch, const std::string& key, double timeout_seconds = 60) const;

 private:
  std::filesystem::path root() const;
  void warn(std::string_view line) const;

  std::filesystem::path folder_;
  Access access_;
  Log log_;
  std::shared_ptr<std::atomic_flag> write_failed_ =
      std::make_shared<std::atomic_flag>();  // warned of already
};

}  // namespace flashjit::cache

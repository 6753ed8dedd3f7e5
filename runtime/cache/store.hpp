// Compiled kernels on disk: `$dir/v1/<arch>/<key>/{kernel.cu, kernel.cubin, meta.json}`. A pack is such a
// folder, read-only. Nothing here compiles, and nothing here knows CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "render/kernel_source.hpp"
#include "support/file_lock.hpp"
#include "support/once.hpp"

namespace flashjit::cache {

/// Digest of everything that can change machine code or launch: source text, headers, spec, configuration,
/// entries (threads, shared memory), options, architecture. 32 hexadecimal digits. The compiler is no part of
/// it, so that a pack can be searched where no compiler is.
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
/// every failure to write is reported once; neither throws. What a link in it leads to is read, not changed.
class Store {
 public:
  /// A cache is read and written where no other user could have put code into it, see why_foreign(); else it
  /// says so once and is empty. What a path names on purpose, a pack, is read and written wherever it is.
  enum class Access : std::uint8_t { cache, read_write, read_only };
  /// `limit`: bytes of kernels at which store() prunes; by default none. Each process counts by itself, again
  /// after every 64th of the limit that it stored: by so much each they may be over it together.
  Store(std::filesystem::path folder, Access access, Log log = {},
        std::uintmax_t limit = std::numeric_limits<std::uintmax_t>::max());

  const std::filesystem::path& folder() const;
  /// Whether the folder of this name in it, an architecture's or kTuningFolder, may be used: always, but for
  /// a cache.
  bool is_usable(std::string_view name) const;
  /// The entry of this source made by this compiler; with an empty tag, by any compiler.
  /// A damaged or foreign entry is a miss with a warning, unless `quiet`: where the caller looks again.
  std::optional<CompiledKernel> load(const KernelSource& source, const std::string& digest,
                                     const std::string& compiler_tag, bool quiet = false) const;
  /// Atomic: temporary folder on the same file system, fsync, rename. Returns whether the entry is there
  /// afterwards.
  bool store(const KernelSource& source, const std::string& digest, const CompiledKernel& kernel);

  std::vector<EntryInfo> list() const;
  /// Tuning records that cannot be read; `key` is the file's name below records_folder().
  std::vector<EntryInfo> damaged_records() const;
  /// Removes damaged entries, damaged records and leftovers; returns what it removed.
  std::vector<EntryInfo> repair();
  struct Pruned {
    std::size_t removed = 0;   ///< entries
    std::uintmax_t bytes = 0;  ///< of those that remain
  };
  /// Removes the least recently used entries until at most `bytes` remain.
  Pruned prune(std::uintmax_t bytes);
  /// Removes tuning records until at most `most` remain, those first that were written longest ago.
  void prune_records(std::size_t most);
  /// Removes every entry, tuning records too when asked; touches nothing that flashjit did not write.
  std::size_t clear(bool records);
  /// Folder of the tuning records: `$dir/v1/tuning`.
  std::filesystem::path records_folder() const;

  /// Held while one process compiles an entry, so that others wait for it; released on destruction. Gives up
  /// after `timeout_seconds` or where locks do not work, and then the caller compiles anyway.
  class Lock {
   public:
    Lock() = default;
    explicit Lock(FileLock lock) : lock_(std::move(lock)) {}
    Lock(Lock&&) noexcept = default;
    Lock& operator=(Lock&& other) noexcept {
      std::swap(lock_, other.lock_);
      return *this;
    }
    ~Lock();
    bool held() const { return lock_.held(); }

   private:
    FileLock lock_;
  };
  Lock lock(const std::string& arch, const std::string& key, double timeout_seconds = 60) const;

 private:
  /// The entries of an architecture.
  struct Listing {
    std::filesystem::file_time_type changed = {};  // the folder, before it was listed
    bool settled = false;  // that was some time ago, so that another change would show
    std::set<std::string> keys;
  };
  /// What this process knows of the folder; copies of a store share it.
  struct State {
    std::mutex listing;
    std::map<std::string, Listing> listed;   // by architecture
    std::atomic_flag write_failed, foreign;  // warned of already
    Once looked;
    std::mutex counting;
    std::uintmax_t bytes = 0;      // of all kernels: when they were last counted, and what was stored since
    std::uintmax_t uncounted = 0;  // what was stored since
  };

  std::filesystem::path root() const;
  /// Whether what is kept here may be removed: no pack, and no link to where others keep theirs.
  bool may_remove() const;
  void warn(std::string_view line) const;
  /// Keys of the entries of one source, newest compiler first. The folder is listed once, and `anew` again if
  /// it has changed.
  std::vector<std::string> keys_by_any_compiler(const std::string& arch, const std::string& digest,
                                                bool anew) const;
  std::optional<CompiledKernel> load_one(const KernelSource& source, const std::string& digest,
                                         const std::string& key, bool quiet) const;
  void look_once();
  void count_again();
  bool is_over_limit(std::uintmax_t added);
  void stay_below_limit(std::uintmax_t added);

  std::filesystem::path folder_;
  Access access_;
  Log log_;
  std::uintmax_t limit_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace flashjit::cache

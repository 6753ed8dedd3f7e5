#include "cache/store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <system_error>

#include "cache/digest.hpp"
#include "cache/entry.hpp"
#include "cache/folders.hpp"
#include "cache/meta.hpp"
#include "flashjit/error.hpp"
#include "plan/records.hpp"
#include "support/file.hpp"
#include "support/json.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit::cache {
namespace {

namespace fs = std::filesystem;

constexpr int kInstallAttempts = 8;
// Where locks do not work, a temporary folder may be in use although it is not locked.
constexpr std::chrono::seconds kLeftoverAge = std::chrono::hours(1);
// To count thousands of kernels takes as long as to compile a fraction of one: often enough is cheap.
constexpr std::uintmax_t kCountsALimit = 64;

// Sizes are looked at before anything is read: a damaged file must not exhaust the memory.
std::uintmax_t size_of_file(const fs::path& path) {
  std::error_code error;
  const std::uintmax_t size = fs::is_regular_file(path, error) ? fs::file_size(path, error) : 0;
  if (error || size == 0) damaged("{} is missing, empty or no file", path.filename().string());
  return size;
}

Meta read_meta(const fs::path& entry) { return parse_meta(read_file(entry / kMetaFile, kMaxJsonBytes)); }

std::string read_cubin(const fs::path& entry, const Meta& meta) {
  if (const std::uintmax_t size = size_of_file(entry / kCubinFile); size != meta.cubin_bytes) {
    damaged("kernel.cubin has {} bytes, meta.json says {}", size, meta.cubin_bytes);
  }
  std::string cubin = read_file(entry / kCubinFile, kStoredFileLimit);
  check_cubin(meta, cubin);
  return cubin;
}

void check_place(const fs::path& entry, const Meta& meta) {
  check_place(meta, entry.parent_path().filename().string(), entry.filename().string());
}

// Throws Error(io) with the reason when the entry cannot be used for the source.
CompiledKernel read_entry(const fs::path& entry, const KernelSource& source, const std::string& digest) {
  Meta meta = read_meta(entry);
  check_place(entry, meta);
  check_source(meta, source, digest);
  std::string cubin = read_cubin(entry, meta);
  return make_kernel(std::move(meta), std::move(cubin));
}

// An entry may be older than what its folder allows now.
void require_own(const fs::path& entry) {
  if (const std::string cause = why_foreign(entry); !cause.empty()) damaged("{}", cause);
}

bool is_sound(const fs::path& entry, const KernelSource& source, const std::string& digest) {
  try {
    read_entry(entry, source, digest);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::set<std::string> entry_names(const fs::path& arch_folder) {
  std::set<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(arch_folder, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (is_key_name(name)) names.insert(std::move(name));
  }
  return names;
}

// Renames the finished folder to the entry's place. The first process wins; a damaged entry is replaced.
void install(const fs::path& finished, const fs::path& entry, const fs::path& root,
             const KernelSource& source, const std::string& digest) {
  std::error_code error;
  for (int attempt = 0; attempt < kInstallAttempts; ++attempt) {
    // Again each time: clear() in another process may remove it meanwhile.
    if (std::string cause = make_private_folders(entry.parent_path()); !cause.empty()) damaged("{}", cause);
    error = rename_folder(finished, entry);
    if (!error || is_sound(entry, source, digest)) return;
    remove_entry(root, entry);
  }
  throw Error(ErrorCode::io,
              fmt::format("cannot put the entry at '{}': {}", entry.string(), error.message()));
}

void write_entry(const fs::path& root, const fs::path& entry, const KernelSource& source,
                 const std::string& digest, const CompiledKernel& kernel) {
  const TemporaryFolder folder(root / kTemporaryFolder);
  write_new_file(folder.path() / kSourceFile, source.text, Audience::user);
  write_new_file(folder.path() / kCubinFile, kernel.cubin, Audience::user);
  write_new_file(folder.path() / kMetaFile, to_json(make_meta(source, digest, kernel)), Audience::user);
  sync_folder(folder.path());
  install(folder.path(), entry, root, source, digest);
}

EntryInfo describe(const EntryFolder& folder) {
  EntryInfo info{.arch = folder.arch, .key = folder.key, .bytes = folder_bytes(folder.path)};
  try {
    const Meta meta = read_meta(folder.path);
    info.spec = meta.spec;
    info.config = meta.config;
    info.compiler = meta.compiler;
    check_place(folder.path, meta);
    read_cubin(folder.path, meta);
    if (digest_of(read_file(folder.path / kSourceFile, kStoredFileLimit)) != meta.text)
      damaged("kernel.cu does not match its digest in meta.json");
  } catch (const std::exception& error) {
    info.damage = error.what();
  }
  return info;
}

// Throws Error(io) when it would be kept somewhere else than in the store's own folders.
void require_own_folders(const fs::path& root, std::string_view arch) {
  for (const std::string_view name : {kTemporaryFolder, arch}) {
    if (const fs::path link = link_on_the_way(root, name); !link.empty())
      throw Error(ErrorCode::io, fmt::format("'{}' is a link to somewhere else", link.string()));
  }
}

// The time of use, for prune() alone; what lies behind a link has none.
void touch(const fs::path& root, const EntryFolder& entry) {
  if (!link_on_the_way(root, entry.arch).empty() || is_link(entry.path)) return;
  touch_file(entry.path / kMetaFile);
}

fs::file_time_type last_used(const fs::path& entry) {
  std::error_code error;
  const fs::file_time_type time = fs::last_write_time(entry / kMetaFile, error);
  return error ? fs::file_time_type::min() : time;
}

}  // namespace

std::string source_digest(const KernelSource& source, const std::vector<std::string>& options) {
  std::map<std::string_view, std::string_view> headers;
  for (const Header& header : source.headers) headers[header.name] = header.text;

  Fields fields;
  fields.add(source.arch).add(to_string(source.spec)).add(to_string(source.config)).add(source.text);
  fields.add(static_cast<std::int64_t>(headers.size()));
  for (const auto& [name, text] : headers) fields.add(name).add(text);
  fields.add(static_cast<std::int64_t>(source.entries.size()));
  for (const plan::Entry& entry : source.entries) {
    fields.add(entry.name).add(entry.threads).add(entry.min_blocks).add(entry.cluster);
    fields.add(entry.shared_bytes).add(entry.tensor_maps);
    fields.add(entry.persistent);
  }
  for (const std::string& option : options) fields.add(option);
  return fields.digest();
}

std::string entry_key(const std::string& source_digest, const std::string& compiler_tag) {
  return source_digest + "-" + compiler_tag;
}

Store::Store(fs::path folder, Access access, Log log, std::uintmax_t limit)
    : folder_(std::move(folder)), access_(access), log_(std::move(log)), limit_(limit) {
  std::error_code error;
  if (access_ == Access::read_only && !fs::is_directory(folder_ / kVersionFolder, error)) {
    warn(
        fmt::format("the pack '{}' is not used: it has no folder {}; check its path, or make it with "
                    "`flashjit pack`",
                    folder_.string(), kVersionFolder));
  }
}

const fs::path& Store::folder() const { return folder_; }

fs::path Store::root() const { return folder_ / kVersionFolder; }

bool Store::may_remove() const { return access_ != Access::read_only && !is_link(root()); }

bool Store::is_usable(std::string_view name) const {
  if (access_ != Access::cache) return true;
  for (const fs::path& path : {folder_, root(), root() / name}) {
    const std::string cause = why_foreign(path);
    if (cause.empty()) continue;
    if (!state_->foreign.test_and_set())
      warn(
          fmt::format("the kernel cache '{}' is not used, kernels are kept in memory only: {}; set "
                      "FLASHJIT_CACHE_DIR to a folder of your own that only you can write (chmod 700)",
                      folder_.string(), cause));
    return false;
  }
  return true;
}

fs::path Store::records_folder() const { return root() / kTuningFolder; }

void Store::warn(std::string_view line) const {
  if (log_) log_(printable(line));  // names and texts of files may hold anything
}

std::vector<std::string> Store::keys_by_any_compiler(const std::string& arch, const std::string& digest,
                                                     bool anew) const {
  constexpr std::chrono::seconds kTick(2);  // the coarsest clock of a file system
  const std::lock_guard lock(state_->listing);
  Listing& known = state_->listed[arch];
  if (anew || !known.settled) {
    std::error_code error;
    const fs::file_time_type changed = fs::last_write_time(root() / arch, error);
    if (error) return {};
    if (!known.settled || changed != known.changed)
      known = {changed, fs::file_time_type::clock::now() - changed > kTick, entry_names(root() / arch)};
  }
  std::vector<std::string> keys;
  for (auto key = known.keys.lower_bound(digest); key != known.keys.end() && key->starts_with(digest); ++key)
    keys.push_back(*key);
  sort_by_compiler(keys);
  return keys;
}

std::optional<CompiledKernel> Store::load(const KernelSource& source, const std::string& digest,
                                          const std::string& compiler_tag, bool quiet) const {
  if (folder_.empty() || !is_arch_name(source.arch) || !is_usable(source.arch)) return {};
  if (!compiler_tag.empty()) return load_one(source, digest, entry_key(digest, compiler_tag), quiet);
  std::set<std::string> tried;
  for (const bool anew : {false, true})
    for (const std::string& key : keys_by_any_compiler(source.arch, digest, anew)) {
      if (!tried.insert(key).second) continue;
      if (auto kernel = load_one(source, digest, key, quiet)) return kernel;
    }
  return {};
}

std::optional<CompiledKernel> Store::load_one(const KernelSource& source, const std::string& digest,
                                              const std::string& key, bool quiet) const {
  const fs::path entry = root() / source.arch / key;
  std::error_code error;
  if (!is_key_name(key) || !fs::exists(entry, error)) return {};
  try {
    if (access_ == Access::cache) require_own(entry);
    CompiledKernel kernel = read_entry(entry, source, digest);
    if (access_ != Access::read_only) touch(root(), {source.arch, key, entry});
    return kernel;
  } catch (const std::exception& cause) {
    if (!quiet && fs::exists(entry, error))  // else it was removed meanwhile
      warn(fmt::format("ignoring the cached kernel '{}': {}; `flashjit cache verify` lists such entries",
                       entry.string(), cause.what()));
    return {};
  }
}

bool Store::store(const KernelSource& source, const std::string& digest, const CompiledKernel& kernel) {
  if (folder_.empty() || access_ == Access::read_only || !is_usable(source.arch)) return false;
  const std::string key = entry_key(digest, kernel.compiler);
  const fs::path entry = root() / source.arch / key;
  try {
    if (kernel.cubin.empty()) throw Error(ErrorCode::internal, "the kernel has no machine code");
    if (!is_arch_name(source.arch) || !is_key_name(key)) {
      throw Error(ErrorCode::internal,
                  fmt::format("{} and {} cannot name an entry", quoted(source.arch), quoted(key)));
    }
    if (is_sound(entry, source, digest)) return true;
    require_own_folders(root(), source.arch);
    look_once();
    write_entry(root(), entry, source, digest, kernel);
    stay_below_limit(folder_bytes(entry));
    return true;
  } catch (const std::exception& cause) {
    if (!state_->write_failed.test_and_set()) {
      warn(fmt::format(
          "the kernel cache '{}' cannot be written, kernels are kept in memory only: {}; make the "
          "folder writable or set FLASHJIT_CACHE_DIR",
          folder_.string(), cause.what()));
    }
    return false;
  }
}

/// Once a process, before it first writes: what the dead left is removed, and the kernels are counted.
void Store::look_once() {
  state_->looked.run([&] {
    remove_leftovers(root(), kLeftoverAge);
    remove_free_locks(root());
    const std::lock_guard lock(state_->counting);
    count_again();
  });
}

/// The caller holds `counting`.
void Store::count_again() {
  state_->bytes = state_->uncounted = 0;
  for (const EntryFolder& folder : entry_folders(root())) state_->bytes += folder_bytes(folder.path);
}

/// What other processes stored or pruned is seen when it is counted again: soon enough, and before pruning.
bool Store::is_over_limit(std::uintmax_t added) {
  const std::lock_guard lock(state_->counting);
  state_->bytes += added;
  state_->uncounted += added;
  if (state_->bytes > limit_ || state_->uncounted > limit_ / kCountsALimit) count_again();
  return state_->bytes > limit_;
}

void Store::stay_below_limit(std::uintmax_t added) {
  if (!is_over_limit(added)) return;
  // With room for some more, so that not every kernel from now on prunes.
  const Pruned pruned = prune(limit_ - limit_ / 8);
  {
    const std::lock_guard lock(state_->counting);
    state_->bytes = pruned.bytes;
    state_->uncounted = 0;
  }
  if (pruned.removed == 0) return;  // another came first, and said so
  warn(fmt::format(
      "the kernel cache '{}' had reached its limit of {} bytes: {} kernels that were not used for "
      "longest were removed; FLASHJIT_CACHE_LIMIT sets the limit",
      folder_.string(), limit_, pruned.removed));
}

std::vector<EntryInfo> Store::list() const {
  std::vector<EntryInfo> entries;
  for (const EntryFolder& folder : entry_folders(root())) entries.push_back(describe(folder));
  return entries;
}

std::vector<EntryInfo> Store::damaged_records() const {
  std::vector<EntryInfo> found;
  for (const fs::path& file : record_files(root())) {
    try {
      plan::parse_record(read_file(file, kMaxJsonBytes));
    } catch (const Error& error) {
      found.push_back(
          {.key = file.lexically_relative(records_folder()).generic_string(), .damage = error.message()});
    }
  }
  return found;
}

std::vector<EntryInfo> Store::repair() {
  std::vector<EntryInfo> removed;
  if (!may_remove()) return removed;
  for (const EntryFolder& folder : entry_folders(root())) {
    EntryInfo info = describe(folder);
    if (!info.damage.empty() && remove_entry(root(), folder.path)) removed.push_back(std::move(info));
  }
  for (EntryInfo& record : damaged_records()) {
    std::error_code error;
    if (fs::remove(records_folder() / record.key, error)) removed.push_back(std::move(record));
  }
  remove_free_locks(root());
  for (const fs::path& leftover : remove_leftovers(root())) {
    removed.push_back(
        {.key = leftover.filename().string(), .damage = "left over by a process that did not finish"});
  }
  return removed;
}

Store::Pruned Store::prune(std::uintmax_t bytes) {
  if (!may_remove()) return {};
  struct Candidate {
    fs::file_time_type used;
    std::uintmax_t bytes;
    fs::path path;
  };
  std::vector<Candidate> candidates;
  Pruned pruned;
  for (const EntryFolder& folder : entry_folders(root())) {
    candidates.push_back({last_used(folder.path), folder_bytes(folder.path), folder.path});
    pruned.bytes += candidates.back().bytes;
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.used < b.used; });
  for (const Candidate& candidate : candidates) {
    if (pruned.bytes <= bytes) break;
    const bool removed = remove_entry(root(), candidate.path);
    // Another process may prune at the same time: what it removed is gone, too.
    std::error_code error;
    if (!removed && (fs::exists(candidate.path, error) || error)) continue;
    pruned.bytes -= candidate.bytes;
    pruned.removed += removed;
  }
  return pruned;
}

void Store::prune_records(std::size_t most) {
  if (!may_remove()) return;
  std::vector<fs::path> files = record_files(root());
  if (files.size() <= most) return;
  std::vector<std::pair<fs::file_time_type, fs::path>> by_age;
  for (fs::path& file : files) {
    std::error_code error;
    const fs::file_time_type written = fs::last_write_time(file, error);
    if (!error) by_age.emplace_back(written, std::move(file));
  }
  std::sort(by_age.begin(), by_age.end());
  for (std::size_t i = 0; i + most < by_age.size(); ++i) {
    std::error_code ignored;
    fs::remove(by_age[i].second, ignored);
  }
}

std::size_t Store::clear(bool records) {
  if (!may_remove()) return 0;
  std::size_t removed = 0;
  for (const EntryFolder& folder : entry_folders(root())) removed += remove_entry(root(), folder.path);
  remove_leftovers(root());
  remove_free_locks(root());
  if (records) remove_records(root());
  remove_manifest(root());
  remove_empty_folders(root());
  return removed;
}

}  // namespace flashjit::cache

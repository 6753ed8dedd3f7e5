// flashjit cache: look at, check and tidy a folder of compiled kernels. A pack is such a folder.
#include "cache/store.hpp"

#include <fmt/format.h>

#include <iostream>
#include <memory>

#include "build.hpp"
#include "cache/folders.hpp"
#include "support/environment.hpp"
#include "support/file.hpp"
#include "support/json.hpp"
#include "support/paths.hpp"
#include "support/stderr.hpp"
#include "support/text.hpp"
#include "system.hpp"
#include "tools/parts/manifest.hpp"
#include "tools/parts/sha256.hpp"

namespace flashjit::command {
namespace {

using cache::EntryInfo;
using cache::Store;

struct CacheOptions {
  std::string dir;
  std::string key;
  std::string max_size;
  std::string sha256;
  bool repair = false, records = false, yes = false;
};

std::filesystem::path cache_folder(const CacheOptions& options) {
  const std::string dir = options.dir.empty() ? read_environment().cache_dir : options.dir;
  if (dir.empty())
    throw Error(
        ErrorCode::invalid_argument,
        "there is no cache folder: HOME, XDG_CACHE_HOME and FLASHJIT_CACHE_DIR are unset; give --dir");
  return path_of(dir);
}

Store open_store(const CacheOptions& options, Store::Access access) {
  const std::filesystem::path folder = cache_folder(options);
  std::error_code problem;
  if (!options.dir.empty() && !std::filesystem::is_directory(folder, problem))
    throw Error(ErrorCode::io,
                fmt::format("'{}' is no folder; give --dir a cache or a pack", folder.string()));
  // A reader finds every fault in list(), so only a writer has something to say.
  return access == Store::Access::read_write ? Store(folder, access, warn) : Store(folder, access);
}

Json entry_json(const EntryInfo& entry) {
  return {{"arch", entry.arch},     {"key", entry.key},           {"spec", entry.spec},
          {"config", entry.config}, {"compiler", entry.compiler}, {"bytes", entry.bytes},
          {"damage", entry.damage}};
}

Json entries_json(const std::vector<EntryInfo>& entries) {
  Json list = Json::array();
  for (const EntryInfo& entry : entries) list.push_back(entry_json(entry));
  return list;
}

void print_entries(const std::vector<EntryInfo>& entries) {
  Table table({"arch", "spec", "config", "compiler", "size", "state", "key"});
  for (const EntryInfo& entry : entries)
    table.add({entry.arch, printable(entry.spec), printable(entry.config), printable(entry.compiler),
               format_bytes(entry.bytes), entry.damage.empty() ? "sound" : printable(entry.damage),
               printable(entry.key)});
  table.print();
}

std::uintmax_t total_bytes(const std::vector<EntryInfo>& entries) {
  std::uintmax_t bytes = 0;
  for (const EntryInfo& entry : entries) bytes += entry.bytes;
  return bytes;
}

int list(const CacheOptions& options, bool json) {
  const Store store = open_store(options, Store::Access::read_only);
  const std::vector<EntryInfo> entries = store.list();
  if (json) {
    print_json({{"folder", store.folder().string()},
                {"bytes", total_bytes(entries)},
                {"entries", entries_json(entries)}});
    return kOk;
  }
  if (!entries.empty()) print_entries(entries);
  fmt::print("{} kernels, {} in {}\n", entries.size(), format_bytes(total_bytes(entries)),
             store.folder().string());
  return kOk;
}

int show(const CacheOptions& options, bool json) {
  const StoredKernel kernel = find_stored({cache_folder(options)}, options.key);
  Json document = entry_json(kernel.info);
  document["folder"] = kernel.folder.string();
  if (kernel.info.damage.empty())
    document["meta"] = Json::parse(read_file(kernel.folder / cache::kMetaFile, kMaxJsonBytes));
  if (json) {
    print_json(document);
    return kOk;
  }
  for (const auto& [name, value] : document.items())
    fmt::print("{:<10}{}\n", name + ":",
               value.is_string() ? printable(value.get<std::string>()) : value.dump(2, ' ', true));
  return kOk;
}

/// What differs from the pack's manifest, and the manifest from the digest that was given.
std::vector<std::string> check_pack(const CacheOptions& options, const std::filesystem::path& folder) {
  const std::filesystem::path manifest = manifest_path(folder);
  std::error_code problem;
  if (!std::filesystem::exists(manifest, problem)) {
    if (options.sha256.empty()) return {};
    return {fmt::format("{} is missing", cache::kManifestFile)};
  }
  try {
    if (const std::string digest = sha256(read_file(manifest, kStoredFileLimit));
        !options.sha256.empty() && digest != options.sha256)
      return {fmt::format("{} has the digest {}, not the one that was given", cache::kManifestFile, digest)};
    return check_manifest(folder);
  } catch (const Error& error) {
    return {error.message()};
  }
}

int verify(const CacheOptions& options, bool json) {
  Store store = open_store(options, options.repair ? Store::Access::read_write : Store::Access::read_only);
  const std::vector<EntryInfo> entries = store.list();
  std::vector<EntryInfo> damaged;
  for (const EntryInfo& entry : entries)
    if (!entry.damage.empty()) damaged.push_back(entry);
  const std::size_t sound = entries.size() - damaged.size();
  for (const EntryInfo& record : store.damaged_records()) damaged.push_back(record);
  const std::vector<std::string> differences = check_pack(options, store.folder());
  const std::vector<EntryInfo> removed = options.repair ? store.repair() : std::vector<EntryInfo>();
  if (json) {
    print_json({{"folder", store.folder().string()},
                {"entries", entries.size()},
                {"damaged", entries_json(damaged)},
                {"manifest", differences},
                {"removed", entries_json(removed)}});
  } else {
    if (!damaged.empty()) print_entries(damaged);
    fmt::print("{} kernels in {}: {} sound, {} files or kernels damaged, {} removed\n", entries.size(),
               store.folder().string(), sound, damaged.size(), removed.size());
  }
  for (const std::string& difference : differences) warn(printable(difference));
  if (!options.sha256.empty() && !differences.empty()) return kCheckFailed;
  if (options.repair && !(removed.empty() && differences.empty())) {
    std::error_code problem;
    const std::filesystem::path manifest = manifest_path(store.folder());
    if (cache::link_on_the_way(manifest.parent_path(), cache::kManifestFile).empty() &&
        std::filesystem::remove(manifest, problem))
      warn(
          "the manifest was removed: the pack differs from it; `flashjit pack` writes it "
          "anew");
  } else if (!differences.empty()) {
    return kCheckFailed;
  }
  if (damaged.empty()) return kOk;
  if (!options.repair) warn("what is damaged is never used; `flashjit cache verify --repair` removes them");
  return options.repair && removed.size() >= damaged.size() ? kOk : kCheckFailed;
}

int prune(const CacheOptions& options, bool json) {
  const std::uintmax_t limit =
      options.max_size.empty() ? read_environment().cache_limit : parse_bytes(options.max_size);
  Store store = open_store(options, Store::Access::read_write);
  const auto [removed, left] = store.prune(limit);
  if (json)
    print_json({{"folder", store.folder().string()}, {"removed", removed}, {"bytes", left}});
  else
    fmt::print("removed {} kernels; {} left in {}\n", removed, format_bytes(left), store.folder().string());
  return left <= limit ? kOk : kCheckFailed;
}

void confirm(const CacheOptions& options, const std::filesystem::path& folder) {
  if (options.yes) return;
  if (!is_terminal(Stream::in))
    throw Error(ErrorCode::invalid_argument,
                "clear removes every kernel; pass --yes where there is no terminal to ask");
  write_to_stderr(fmt::format("Remove every kernel{} in {}? [y/N] ",
                              options.records ? " and tuning record" : "", folder.string()));
  std::string answer;
  std::getline(std::cin, answer);
  if (answer != "y" && answer != "yes")
    throw Error(ErrorCode::invalid_argument, "nothing was removed: the answer was not 'y'");
}

int clear(const CacheOptions& options, bool json) {
  Store store = open_store(options, Store::Access::read_write);
  confirm(options, store.folder());
  const std::size_t removed = store.clear(options.records);
  const std::size_t left = store.list().size();
  if (json)
    print_json({{"folder", store.folder().string()}, {"removed", removed}, {"entries", left}});
  else
    fmt::print("removed {} kernels from {}\n", removed, store.folder().string());
  return left == 0 ? kOk : kCheckFailed;
}

}  // namespace

void add_cache(CLI::App& app, Context& context) {
  CLI::App* cache =
      app.add_subcommand("cache", "Look at, check and tidy the folder of compiled kernels, or a pack");
  cache->require_subcommand(1);
  cache->footer("Example:\n  flashjit cache list");
  auto options = std::make_shared<CacheOptions>();

  using Work = int (*)(const CacheOptions&, bool);
  const auto add = [&](const char* name, const char* description, const char* example, Work work) {
    CLI::App* part = add_subcommand(*cache, context, name, description, example,
                                    [options, &context, work] { return work(*options, context.json); });
    part->add_option("--dir", options->dir, "The folder; default FLASHJIT_CACHE_DIR, else ~/.cache/flashjit");
    return part;
  };
  add("list", "List the kernels", "flashjit cache list --json", list);
  add("show", "Print everything known of one kernel", "flashjit cache show 3f2a", show)
      ->add_option("key", options->key, "Key of the kernel, or how it begins")
      ->required();
  CLI::App* verifying =
      add("verify", "Check every kernel and record, and a pack's manifest; exit code 1 when one is damaged",
          "flashjit cache verify --repair", verify);
  CLI::Option* repair =
      verifying->add_flag("--repair", options->repair, "Remove what is damaged, and leftovers");
  verifying->add_option("--sha256", options->sha256, "The digest that a pack's manifest must have")
      ->excludes(repair);
  add("prune", "Remove the least recently used kernels", "flashjit cache prune --max-size 1G", prune)
      ->add_option("--max-size", options->max_size,
                   "Bytes that may stay: 512M, 1G, ...; default FLASHJIT_CACHE_LIMIT, else 2G");
  CLI::App* clearing = add("clear", "Remove every kernel", "flashjit cache clear --yes", clear);
  clearing->add_flag("--records", options->records, "Remove the tuning records too");
  clearing->add_flag("--yes", options->yes, "Do not ask");
}

}  // namespace flashjit::command

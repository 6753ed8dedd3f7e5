// The kernel store: what it keeps comes back as it was or not at all, whatever happens to the files
// meanwhile.
#include "cache/store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <thread>

#include "cache/embedded.hpp"
#include "flashjit/error.hpp"
#include "plan/records.hpp"
#include "support/file.hpp"
#include "tests/support/stored_kernel.hpp"
#include "tests/support/traced_child.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using cache::EntryInfo;
using cache::Store;
using Access = Store::Access;

using namespace test;

plan::TuningRecord record() {
  plan::TuningRecord r;
  r.spec = source().spec;
  r.shape = {1, 2, 2, 128, 128};
  r.arch = "sm_80";
  r.best = source().config;
  return r;
}

class StoreTest : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override {
    std::error_code ignored;
    fs::permissions(folder_, fs::perms::owner_all, ignored);
    fs::remove_all(folder_, ignored);
  }

  cache::Log log() {
    return [this](std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    };
  }
  Store open(Access access = Access::read_write) { return Store(folder_, access, log()); }
  fs::path entry(const KernelSource& s, const std::string& tag = kTag) const {
    return entry_folder(folder_, s, tag);
  }
  std::vector<fs::path> temporaries() const {
    std::vector<fs::path> all;
    std::error_code ignored;
    for (const auto& file : fs::directory_iterator(folder_ / "v1" / "tmp", ignored))
      all.push_back(file.path());
    return all;
  }

  fs::path folder_ = fs::path(testing::TempDir()) / ("store-" + unique_suffix());
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST_F(StoreTest, GivesBackWhatItWasGiven) {
  Store store = open();
  EXPECT_FALSE(find(store, source()));
  EXPECT_TRUE(keep(store, source()));
  const auto found = find(store, source());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->cubin, kernel().cubin);
  EXPECT_EQ(found->compiler, kTag);
  EXPECT_EQ(found->resources, kernel().resources);
  EXPECT_EQ(found->compile_ms, 0) << "which another compilation of the same source has not in common";
  EXPECT_NE(found->log.find("and \n are fine"), std::string::npos);
  EXPECT_TRUE(lines_.empty()) << lines_.front();
  EXPECT_TRUE(temporaries().empty());
}

TEST_F(StoreTest, KeepsTheSourceBesideTheCubin) {
  Store store = open();
  keep(store, source());
  EXPECT_EQ(read_file(entry(source()) / "kernel.cu"), source().text);
}

TEST_F(StoreTest, IsForThisUserAlone) {
  const ::mode_t before = ::umask(0);
  Store store(folder_ / "new" / "deeper", Access::read_write, log());
  const auto lock = store.lock("sm_80", cache::entry_key(digest(source()), kTag));
  keep(store, source());
  plan::write_record(store.records_folder(), record());
  ::umask(before);
  std::size_t files = 0;
  for (const auto& item : fs::recursive_directory_iterator(folder_ / "new")) {
    const fs::perms mode = item.status().permissions() & fs::perms::all;
    EXPECT_EQ(mode,
              item.is_directory() ? fs::perms::owner_all : fs::perms::owner_read | fs::perms::owner_write)
        << item.path();
    files += item.is_regular_file();
  }
  EXPECT_EQ(files, 5u) << "an entry's three, a lock, a record";
}

TEST_F(StoreTest, CompilersDoNotMix) {
  Store store = open();
  keep(store, source(), kernel("nvrtc12.9.86"));
  EXPECT_FALSE(find(store, source(), kTag));
  EXPECT_EQ(find(store, source(), "")->compiler, "nvrtc12.9.86");
  keep(store, source(), kernel("nvrtc12.10.1"));
  EXPECT_EQ(find(store, source(), "")->compiler, "nvrtc12.10.1") << "the newest, by number";
  EXPECT_EQ(find(store, source(), "nvrtc12.9.86")->compiler, "nvrtc12.9.86");
}

TEST_F(StoreTest, AnyCompilerPassesOverADamagedEntry) {
  Store store = open();
  keep(store, source(), kernel("nvrtc12.9.86"));
  keep(store, source(), kernel("nvrtc13.0.88"));
  write(entry(source(), "nvrtc13.0.88") / "kernel.cubin", "no longer it");
  EXPECT_EQ(find(store, source(), "")->compiler, "nvrtc12.9.86");
  EXPECT_EQ(lines_.size(), 1u);
}

TEST_F(StoreTest, EveryFlippedOrMissingByteIsAMissOrHarmless) {
  Store store = open();
  keep(store, source());
  const CompiledKernel expected = *find(store, source());
  std::size_t misses = 0;
  const auto expect_a_miss_or_the_same = [&](const char* name, std::size_t i) {
    const auto found = find(store, source());
    misses += !found;
    if (!found) return;
    ASSERT_EQ(found->cubin, expected.cubin) << name << " byte " << i;
    ASSERT_EQ(found->resources, expected.resources) << name << " byte " << i;
    ASSERT_EQ(found->compile_ms, expected.compile_ms) << name << " byte " << i;
    ASSERT_EQ(found->log, expected.log) << name << " byte " << i;
  };
  for (const char* name : {"meta.json", "kernel.cubin"}) {
    const fs::path file = entry(source()) / name;
    const std::string sound = read_file(file);
    misses = 0;
    for (std::size_t i = 0; i < sound.size(); ++i) {
      for (const unsigned char flip : {0x01, 0x20, 0x80, 0xff}) {
        poke(file, i, static_cast<char>(static_cast<unsigned char>(sound[i]) ^ flip));
        expect_a_miss_or_the_same(name, i);
      }
      write(file, std::string(sound).erase(i, 1));
      expect_a_miss_or_the_same(name, i);
      write(file, sound);
    }
    EXPECT_GT(misses, sound.size() * 3) << name;
    EXPECT_TRUE(find(store, source()));
  }
}

// Nothing runs kernel.cu, but its readers must not be misled.
TEST_F(StoreTest, ADamagedSourceIsFoundAndRepaired) {
  Store store = open();
  keep(store, source());
  const fs::path file = entry(source()) / "kernel.cu";
  const std::string sound = read_file(file);
  for (std::size_t i = 0; i < sound.size(); ++i) {
    for (const std::string& damaged :
         {sound.substr(0, i) + static_cast<char>(sound[i] ^ 1) + sound.substr(i + 1),
          std::string(sound).erase(i, 1)}) {
      write(file, damaged);
      EXPECT_NE(store.list()[0].damage, "") << "byte " << i;
      EXPECT_TRUE(find(store, source()));
    }
    write(file, sound);
  }
  EXPECT_EQ(store.list()[0].damage, "");
  fs::remove(file);
  EXPECT_NE(store.list()[0].damage, "");
  EXPECT_EQ(store.repair().size(), 1u);
  EXPECT_TRUE(keep(store, source()));
  EXPECT_EQ(store.list()[0].damage, "");
}

TEST_F(StoreTest, AllThatAnEntryIsComesBack) {
  Store store = open();
  KernelSource s = source();
  s.entries[0] = {.name = "append",
                  .header = "h",
                  .function = "f",
                  .threads = 32,
                  .min_blocks = 2,
                  .cluster = 3,
                  .shared_bytes = 4,
                  .hot = true,
                  .tensor_maps = true,
                  .params = "AppendParams",
                  .problem = "StoredProblem",
                  .persistent = true};
  keep(store, s);
  EXPECT_TRUE(find(store, s)) << (lines_.empty() ? "" : lines_[0]);
}

TEST_F(StoreTest, AnotherFormatOfMetaIsAMissThatSaysSo) {
  Store store = open();
  keep(store, source());
  std::string meta = read_file(entry(source()) / "meta.json");
  meta.replace(meta.find("\"format\": 3"), 11, "\"format\": 4");
  write(entry(source()) / "meta.json", meta);
  EXPECT_FALSE(find(store, source()));
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("format 4, this flashjit reads 3"), std::string::npos) << lines_[0];
  EXPECT_TRUE(keep(store, source()));
  EXPECT_TRUE(find(store, source()));
}

TEST_F(StoreTest, EveryTruncationIsAMiss) {
  Store store = open();
  keep(store, source());
  for (const char* name : {"meta.json", "kernel.cubin"}) {
    const fs::path file = entry(source()) / name;
    const std::string sound = read_file(file);
    write(file, sound + "more");
    EXPECT_FALSE(find(store, source())) << name << " with bytes behind it";
    // The last byte of meta.json is a line's end, which says nothing.
    for (std::size_t length = sound.size() - 1; length-- > 0;) {
      fs::resize_file(file, length);
      ASSERT_FALSE(find(store, source())) << name << " cut to " << length;
    }
    write(file, sound);
  }
}

TEST_F(StoreTest, JsonOfTheWrongShapeIsAMiss) {
  Store store = open();
  keep(store, source());
  for (const std::string text : {"[]", "{}", "null", "3", "{\"format\":1}", "{\"format\":2}",
                                 "{\"format\":\"1\"}", "{\"format\":1,\"digest\":3,\"kernel\":{}}",
                                 "{\"format\":1e99}", "{\"format\":1,\"digest\":\"\",\"kernel\":[]}"}) {
    write(entry(source()) / "meta.json", text);
    EXPECT_FALSE(find(store, source())) << text;
  }
  write(entry(source()) / "meta.json", std::string(1 << 20, '['));
  EXPECT_FALSE(find(store, source()));
  EXPECT_EQ(lines_.size(), 11u) << "one line for each";
  for (const std::string& line : lines_) EXPECT_EQ(line.find('\n'), std::string::npos) << line;
}

TEST_F(StoreTest, MissingAndStrangeFilesAreAMiss) {
  Store store = open();
  for (const char* name : {"meta.json", "kernel.cubin"}) {
    keep(store, source());
    const fs::path file = entry(source()) / name;
    fs::remove(file);
    EXPECT_FALSE(find(store, source())) << name << " is missing";
    fs::create_directory(file);
    EXPECT_FALSE(find(store, source())) << name << " is a folder";
    fs::remove(file);
    ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
    EXPECT_FALSE(find(store, source())) << name << " is a pipe that nobody writes to";
    fs::remove(file);
    ASSERT_EQ(::truncate((entry(source()) / "kernel.cu").c_str(), 0), 0);
    EXPECT_TRUE(keep(store, source()));
    EXPECT_TRUE(find(store, source()));
  }
}

TEST_F(StoreTest, AHugeFileIsNotRead) {
  const auto make_huge = [](const fs::path& file) {
    ASSERT_EQ(::truncate(file.c_str(), off_t{1} << 40), 0);  // sparse: a tebibyte of nothing
  };
  Store store = open();
  for (const char* name : {"meta.json", "kernel.cubin", "kernel.cu"}) {
    ASSERT_TRUE(keep(store, source()));
    make_huge(entry(source()) / name);
    EXPECT_EQ(find(store, source()).has_value(), name == std::string("kernel.cu")) << name;
    EXPECT_NE(store.list()[0].damage, "") << name;
    EXPECT_EQ(store.repair().size(), 1u) << name;
  }
  plan::write_record(store.records_folder(), record());
  make_huge(store.records_folder() / plan::record_path(record()));
  std::vector<std::string> warnings;
  plan::TuningRecords().load(store.records_folder(), &warnings);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("1099511627776 bytes"), std::string::npos) << warnings[0];
  EXPECT_EQ(store.damaged_records().size(), 1u);
  EXPECT_EQ(store.repair().size(), 1u);
}

TEST_F(StoreTest, StoringReplacesADamagedEntryAndKeepsASoundOne) {
  Store store = open();
  keep(store, source());
  write(entry(source()) / "kernel.cubin", "damaged");
  EXPECT_FALSE(find(store, source()));
  EXPECT_TRUE(keep(store, source()));
  EXPECT_EQ(find(store, source())->cubin, kernel().cubin);
  EXPECT_TRUE(temporaries().empty());

  CompiledKernel later = kernel();
  later.resources[0].registers = 1;
  EXPECT_TRUE(keep(store, source(), later));
  EXPECT_EQ(find(store, source())->resources, kernel().resources);
}

TEST_F(StoreTest, AnEntryInTheWrongPlaceIsAMiss) {
  Store store = open();
  keep(store, source("fwd:bf16:d64"));
  const KernelSource other = source("fwd:bf16:d128");
  fs::copy(entry(source("fwd:bf16:d64")), entry(other), fs::copy_options::recursive);
  EXPECT_FALSE(find(store, other));
  fs::copy(entry(source("fwd:bf16:d64")), entry(source("fwd:bf16:d64"), "nvrtc12.9.86"));
  EXPECT_FALSE(find(store, source("fwd:bf16:d64"), "nvrtc12.9.86"));
}

// As if two sources had one digest: the fields decide.
TEST_F(StoreTest, EqualDigestsOfDifferentSourcesAreAMiss) {
  Store store = open();
  const std::string same = digest(source());
  store.store(source(), same, kernel());
  std::vector<KernelSource> others(6, source());
  others[0].spec.dropout = true;
  others[1].config.br = 32;
  others[2].text += " ";
  others[3].headers[0].text = "two";
  others[4].entries[0].shared_bytes = 1024;
  others[5].headers[0].name = "flashjit/b.cuh";
  for (const KernelSource& other : others) EXPECT_FALSE(store.load(other, same, kTag));
  EXPECT_EQ(lines_.size(), others.size());
  EXPECT_TRUE(store.load(source(), same, kTag));
}

TEST_F(StoreTest, AForeignVersionIsNotTouched) {
  fs::create_directories(folder_ / "v2" / "sm_80" / "something");
  write(folder_ / "v2" / "sm_80" / "something" / "meta.json", "{}");
  Store store = open();
  keep(store, source());
  EXPECT_EQ(store.list().size(), 1u);
  store.clear(true);
  EXPECT_TRUE(fs::exists(folder_ / "v2" / "sm_80" / "something" / "meta.json"));
}

TEST_F(StoreTest, LinksAreReadButNeverFollowedToRemove) {
  Store store = open();
  keep(store, source());
  const fs::path elsewhere = folder_ / "elsewhere";
  fs::rename(entry(source()), elsewhere);
  fs::create_directory_symlink(elsewhere, entry(source()));
  EXPECT_TRUE(find(store, source())) << "its content is verified like any other";

  write(elsewhere / "kernel.cubin", "damaged");
  EXPECT_FALSE(find(store, source()));
  EXPECT_TRUE(keep(store, source())) << "the link gives way";
  EXPECT_FALSE(fs::is_symlink(entry(source())));
  EXPECT_TRUE(find(store, source()));
  EXPECT_EQ(read_file(elsewhere / "kernel.cubin"), "damaged");

  const KernelSource dangling = source("fwd:bf16:d128");
  fs::create_directory_symlink(folder_ / "nowhere", entry(dangling));
  EXPECT_FALSE(find(store, dangling));
  EXPECT_TRUE(keep(store, dangling));
  EXPECT_TRUE(find(store, dangling));

  fs::create_directory_symlink(elsewhere, entry(source("fwd:bf16:d32")));
  EXPECT_EQ(store.clear(true), 3u);
  EXPECT_TRUE(fs::exists(elsewhere / "meta.json"));
}

TEST_F(StoreTest, ALinkedArchitectureFolderIsLeftAlone) {
  Store store = open();
  keep(store, source());
  fs::rename(folder_ / "v1" / "sm_80", folder_ / "elsewhere");
  fs::create_directory_symlink(folder_ / "elsewhere", folder_ / "v1" / "sm_80");
  EXPECT_TRUE(find(store, source()));
  EXPECT_EQ(store.clear(true), 0u);
  EXPECT_TRUE(fs::exists(folder_ / "elsewhere" / entry(source()).filename() / "meta.json"));
}

/// Every file and folder of a tree by its path, with its bytes and when it was last changed.
std::map<fs::path, std::pair<std::string, fs::file_time_type>> tree(const fs::path& top) {
  std::map<fs::path, std::pair<std::string, fs::file_time_type>> all;
  all[top] = {"", fs::last_write_time(top)};
  for (const auto& item : fs::recursive_directory_iterator(top))
    all[item.path()] = {item.is_regular_file() ? read_file(item.path()) : "", item.last_write_time()};
  return all;
}

/// One of the store's folders, below it, is a link to where others keep their files; some are named as its
/// own.
class LinkedFolder : public StoreTest, public testing::WithParamInterface<const char*> {
 protected:
  /// A sound and a damaged entry, a record, and what the dead leave; then the link.
  void SetUp() override {
    StoreTest::SetUp();
    Store store = open();
    keep(store, source());
    keep(store, source("fwd:bf16:d128"));
    poke(entry(source("fwd:bf16:d128")) / "kernel.cubin", 3, 'x');
    plan::write_record(store.records_folder(), record());
    const fs::path linked = folder_ / GetParam();
    for (const char* folder : {"tmp/dead", "locks", "tuning/sm_80"}) {
      fs::create_directories(folder_ / "v1" / folder);
      for (const char* name : {"a.lock", "a.json", ".tmp-a"}) write(folder_ / "v1" / folder / name, "mine");
    }
    for (const char* name : {"a.lock", "a.json", ".tmp-a", "SHA256SUMS"}) write(linked / name, "mine");
    fs::rename(linked, elsewhere_);
    fs::create_directory_symlink(elsewhere_, linked);
    std::vector<fs::path> all{elsewhere_};
    for (const auto& item : fs::recursive_directory_iterator(elsewhere_)) all.push_back(item.path());
    for (const fs::path& path : all)
      fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(48));
  }

  const fs::path elsewhere_ = folder_ / "elsewhere";
};
const std::string kEntryName = "v1/sm_80/" + cache::entry_key(digest(source()), kTag);
INSTANTIATE_TEST_SUITE_P(All, LinkedFolder,
                         testing::Values("v1", "v1/tmp", "v1/locks", "v1/tuning", "v1/tuning/sm_80",
                                         "v1/sm_80", kEntryName.c_str()),
                         [](const auto& name) { return "Number" + std::to_string(name.index); });

TEST_P(LinkedFolder, IsReadAndNeverChanged) {
  const auto before = tree(elsewhere_);
  Store store = open();
  const auto expect_unchanged = [&](const char* after) {
    EXPECT_EQ(tree(elsewhere_), before) << GetParam() << " after " << after;
  };
  EXPECT_TRUE(find(store, source())) << "its content is verified like any other";
  expect_unchanged("load");
  { const auto lock = store.lock("sm_80", cache::entry_key(digest(source()), kTag), 0); }
  expect_unchanged("lock");
  keep(store, source("fwd:bf16:d32"));
  expect_unchanged("store");
  try {
    plan::write_record(store.records_folder(), record());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
  }
  expect_unchanged("a record");
  store.repair();
  expect_unchanged("repair");
  store.prune(1);
  expect_unchanged("prune");
  store.clear(true);
  expect_unchanged("clear");
}

TEST_F(StoreTest, WhereAFolderIsALinkNothingIsStoredAndTheLogSaysSo) {
  fs::create_directories(folder_ / "elsewhere");
  fs::create_directories(folder_ / "v1");
  fs::create_directory_symlink(folder_ / "elsewhere", folder_ / "v1" / "tmp");
  Store store = open();
  EXPECT_FALSE(keep(store, source()));
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("v1/tmp' is a link"), std::string::npos) << lines_[0];
  fs::remove(folder_ / "v1" / "tmp");
  EXPECT_TRUE(keep(store, source()));
}

// Renaming it away needs a folder, which a full disk has no room for either.
TEST_F(StoreTest, AnEntryGoesWhereNoFolderCanBeMade) {
  Store store = open();
  keep(store, source());
  fs::remove_all(folder_ / "v1" / "tmp");
  write(folder_ / "v1" / "tmp", "not a folder");
  EXPECT_EQ(store.clear(false), 1u);
  EXPECT_TRUE(store.list().empty());
}

TEST_F(StoreTest, NamesCannotLeaveTheFolder) {
  Store store = open();
  for (const char* tag : {"../../../escaped", "a/b", "", "a b", "nvrtc\n"}) {
    EXPECT_FALSE(keep(store, source(), kernel(tag))) << tag;
    EXPECT_FALSE(store.lock("sm_80", cache::entry_key(digest(source()), tag), 0).held()) << tag;
  }
  for (const char* arch : {"../escaped", "", "sm_", "sm_80/..", "SM_80", "sm_80ab"}) {
    KernelSource s = source();
    s.arch = arch;
    EXPECT_FALSE(keep(store, s)) << arch;
    EXPECT_FALSE(find(store, s)) << arch;
    EXPECT_FALSE(store.lock(arch, cache::entry_key(digest(s), kTag), 0).held()) << arch;
  }
  EXPECT_FALSE(store.store(source(), "../../../../escaped", kernel()));
  for (const auto& item : fs::recursive_directory_iterator(folder_))
    EXPECT_FALSE(item.is_regular_file()) << item.path();
}

TEST_F(StoreTest, AKernelWithoutMachineCodeIsNotKept) {
  Store store = open();
  CompiledKernel empty = kernel();
  empty.cubin.clear();
  EXPECT_FALSE(keep(store, source(), empty));
  EXPECT_TRUE(store.list().empty());
}

TEST_F(StoreTest, AFolderThatCannotBeWrittenWarnsOnce) {
  write(folder_ / "file", "not a folder");
  Store store(folder_ / "file" / "cache", Access::read_write, log());
  Store copy = store;
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(keep(store, source()));
  EXPECT_FALSE(keep(copy, source()));
  EXPECT_FALSE(find(store, source()));
  EXPECT_FALSE(store.lock("sm_80", cache::entry_key(digest(source()), kTag), 5).held());
  EXPECT_TRUE(store.list().empty());
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("memory only"), std::string::npos) << lines_[0];
  EXPECT_NE(lines_[0].find("FLASHJIT_CACHE_DIR"), std::string::npos) << lines_[0];
}

TEST_F(StoreTest, AFolderWithoutWritePermissionStillServesItsEntries) {
  {
    Store store = open();
    keep(store, source());
  }
  // Root may write anywhere: a child gives up its rights first.
  const auto restrict_folders = [&](fs::perms mode) {
    for (const auto& path : {folder_ / "v1" / "sm_80", folder_ / "v1" / "tmp", folder_ / "v1", folder_})
      fs::permissions(path, mode);
  };
  restrict_folders(fs::perms{0555});
  fs::permissions(entry(source()), fs::perms{0555});
  for (const auto& file : fs::directory_iterator(entry(source()))) fs::permissions(file, fs::perms{0444});
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(10);
    Store store = open();
    if (!find(store, source())) ::_exit(1);
    if (keep(store, source("fwd:bf16:d128"))) ::_exit(2);
    if (keep(store, source("fwd:bf16:d256"))) ::_exit(3);
    ::_exit(lines_.size() == 1 ? 0 : 4);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  restrict_folders(fs::perms::owner_all);
  fs::permissions(entry(source()), fs::perms::owner_all);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(StoreTest, AnEmptyPathKeepsNothingAndSaysNothing) {
  Store store({}, Access::read_write, log());
  EXPECT_FALSE(keep(store, source()));
  EXPECT_FALSE(find(store, source()));
  EXPECT_TRUE(store.list().empty());
  EXPECT_TRUE(lines_.empty());
  EXPECT_FALSE(fs::exists("v1"));
}

TEST_F(StoreTest, APackIsNeverWritten) {
  {
    Store store = open();
    keep(store, source());
  }
  const auto used = fs::last_write_time(entry(source()) / "meta.json");
  Store pack = open(Access::read_only);
  EXPECT_TRUE(find(pack, source(), ""));
  EXPECT_EQ(fs::last_write_time(entry(source()) / "meta.json"), used);
  EXPECT_FALSE(keep(pack, source("fwd:bf16:d128")));
  EXPECT_EQ(pack.clear(true) + pack.prune(0).removed + pack.repair().size(), 0u);
  EXPECT_TRUE(find(pack, source()));
  EXPECT_TRUE(lines_.empty());
}

TEST_F(StoreTest, AMissingPackIsSaidOnce) {
  const Store pack(folder_ / "nowhere", Access::read_only, log());
  EXPECT_FALSE(find(pack, source()));
  EXPECT_FALSE(find(pack, source()));
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("nowhere"), std::string::npos);
}

TEST_F(StoreTest, ListsSoundAndDamagedEntries) {
  Store store = open();
  keep(store, source("fwd:bf16:d64"));
  keep(store, source("fwd:bf16:d128"));
  write(entry(source("fwd:bf16:d128")) / "kernel.cubin", "cut");
  fs::create_directories(folder_ / "v1" / "sm_80" / "my notes");
  write(folder_ / "v1" / "sm_80" / "readme.txt", "mine");
  const std::vector<EntryInfo> all = store.list();
  ASSERT_EQ(all.size(), 2u);
  for (const EntryInfo& info : all) {
    const bool sound = info.spec == "fwd:bf16:d64";
    EXPECT_EQ(info.damage.empty(), sound) << info.damage;
    EXPECT_EQ(info.arch, "sm_80");
    EXPECT_EQ(info.compiler, kTag);
    EXPECT_EQ(info.config, "simt:br64:bc64:w8");
    EXPECT_GT(info.bytes, 100u);
  }
}

TEST_F(StoreTest, RepairRemovesDamageAndLeftovers) {
  Store store = open();
  keep(store, source("fwd:bf16:d64"));
  keep(store, source("fwd:bf16:d128"));
  fs::remove(entry(source("fwd:bf16:d128")) / "meta.json");
  fs::create_directories(folder_ / "v1" / "tmp" / "dead");
  write(folder_ / "v1" / "tmp" / "dead" / "kernel.cu", "half");
  const fs::path alive = folder_ / "v1" / "tmp" / "alive";
  fs::create_directories(alive);
  const int held = ::open(alive.c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::flock(held, LOCK_EX), 0);

  EXPECT_EQ(store.repair().size(), 2u);
  EXPECT_FALSE(fs::exists(entry(source("fwd:bf16:d128"))));
  EXPECT_FALSE(fs::exists(folder_ / "v1" / "tmp" / "dead"));
  EXPECT_TRUE(fs::exists(alive)) << "another process is writing there";
  EXPECT_TRUE(find(store, source("fwd:bf16:d64")));
  ::close(held);
  EXPECT_EQ(store.repair().size(), 1u);
}

TEST_F(StoreTest, RepairRemovesDamagedRecordsAlone) {
  Store store = open();
  plan::write_record(store.records_folder(), record());
  const fs::path good = store.records_folder() / plan::record_path(record());
  write(good.parent_path() / "cut.json", read_file(good).substr(0, 100));
  fs::create_directory_symlink(folder_, store.records_folder() / "link");
  ASSERT_EQ(store.damaged_records().size(), 1u);
  EXPECT_EQ(store.damaged_records()[0].key, "sm_80/cut.json");
  EXPECT_EQ(store.repair().size(), 1u);
  EXPECT_TRUE(store.damaged_records().empty());
  EXPECT_TRUE(fs::exists(good));
}

TEST_F(StoreTest, WhatTheDeadLeftGoesWithTheNextThatIsStored) {
  const fs::path tmp = folder_ / "v1" / "tmp", tuning = folder_ / "v1" / "tuning" / "sm_80";
  const auto now = fs::file_time_type::clock::now();
  fs::create_directories(folder_ / "v1" / "locks");
  write(folder_ / "v1" / "locks" / "sm_80-x.lock", "");
  for (const char* age : {"old", "young", "of-tomorrow"}) {
    fs::create_directories(tmp / age);
    fs::create_directories(tuning);
    write(tmp / age / "kernel.cu", "half");
    write(tuning / (std::string(".tmp-") + age), "half");
    write(folder_ / "v1" / (std::string(".tmp-") + age), "half");
    const auto changed = age == std::string("old")     ? now - std::chrono::hours(2)
                         : age == std::string("young") ? now
                                                       : now + std::chrono::hours(24);
    fs::last_write_time(tmp / age, changed);
    fs::last_write_time(tuning / (std::string(".tmp-") + age), changed);
    fs::last_write_time(folder_ / "v1" / (std::string(".tmp-") + age), changed);
  }
  Store store = open();
  keep(store, source());
  for (const char* age : {"old", "young", "of-tomorrow"}) {
    const bool stays = age == std::string("young");
    EXPECT_EQ(fs::exists(tmp / age), stays) << age;
    EXPECT_EQ(fs::exists(tuning / (std::string(".tmp-") + age)), stays) << age;
    EXPECT_EQ(fs::exists(folder_ / "v1" / (std::string(".tmp-") + age)), stays) << age;
  }
  EXPECT_TRUE(fs::is_empty(folder_ / "v1" / "locks"));
}

TEST_F(StoreTest, LocksLeaveNoFiles) {
  const Store store = open();
  const std::string key = cache::entry_key(digest(source()), kTag);
  { const auto lock = store.lock("sm_80", key); }
  EXPECT_TRUE(fs::is_empty(folder_ / "v1" / "locks"));
  const auto first = store.lock("sm_80", key);
  { const auto second = store.lock("sm_80", key, 0); }
  EXPECT_FALSE(store.lock("sm_80", key, 0).held()) << "who did not get it must not remove it";
}

// Times of use in the future or before all time change what goes first, and nothing else.
TEST_F(StoreTest, AClockThatJumpsDoesNoHarm) {
  Store store = open();
  const std::vector<std::string> specs{"fwd:bf16:d32", "fwd:bf16:d64", "fwd:bf16:d96"};
  const auto now = fs::file_time_type::clock::now();
  const std::vector<fs::file_time_type> times{now + std::chrono::hours(24 * 365 * 50), now,
                                              now - std::chrono::hours(24 * 365 * 50)};
  for (std::size_t i = 0; i < specs.size(); ++i) {
    keep(store, source(specs[i]));
    for (const auto& file : fs::directory_iterator(entry(source(specs[i]))))
      fs::last_write_time(file, times[i]);
  }
  for (const std::string& spec : specs) EXPECT_TRUE(find(store, source(spec))) << spec;
  EXPECT_EQ(store.prune(0).removed, 3u);
  EXPECT_TRUE(lines_.empty());
}

TEST_F(StoreTest, ProcessesThatPruneAtOnceKeepWhatFits) {
  Store store = open();
  for (int d = 8; d <= 128; d += 8) keep(store, source("fwd:bf16:d" + std::to_string(d)));
  std::uintmax_t total = 0;
  for (const EntryInfo& info : store.list()) total += info.bytes;
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    children.push_back(::fork());
    if (children.back() == 0) ::_exit(open().prune(total / 2).bytes <= total / 2 ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  std::uintmax_t left = 0;
  for (const EntryInfo& info : store.list()) left += info.bytes;
  EXPECT_LE(left, total / 2);
  EXPECT_GT(left, total / 4) << "each counted what the others removed";
}

/// Sources whose entries have equally many bytes.
KernelSource source_number(int number) {
  KernelSource s = source();
  s.text += std::to_string(1000 + number);
  return s;
}

class LimitedStore : public StoreTest {
 protected:
  static constexpr int kStores = 4, kEntries = 20;
  /// Each has counts of its own, as a process of its own would have.
  void SetUp() override {
    StoreTest::SetUp();
    Store first = open();
    keep(first, source_number(0));
    entry_bytes_ = first.list().at(0).bytes;
    first.clear(true);
    for (int i = 0; i < kStores; ++i)
      stores_.emplace_back(folder_, Access::read_write, log(), kEntries * entry_bytes_);
  }
  std::uintmax_t bytes() const {
    std::uintmax_t sum = 0;
    for (const auto& file : fs::recursive_directory_iterator(folder_))
      if (file.is_regular_file()) sum += file.file_size();
    return sum;
  }

  std::uintmax_t entry_bytes_ = 0;
  std::vector<Store> stores_;
};

TEST_F(LimitedStore, ProcessesThatStoreTogetherStayBelowTheLimit) {
  for (int i = 0; i < 2 * kEntries; ++i) {
    EXPECT_TRUE(keep(stores_[static_cast<std::size_t>(i % kStores)], source_number(i)));
    ASSERT_LE(bytes(), (kEntries + kStores) * entry_bytes_) << i << ", of which each stored a part";
  }
  EXPECT_GE(bytes(), kEntries / 2 * entry_bytes_);
  EXPECT_NE(lines_.at(0).find("had reached its limit"), std::string::npos) << lines_.at(0);
}

TEST_F(LimitedStore, WhatAnotherProcessPrunedIsRoomAgain) {
  for (int i = 0; i < kEntries; ++i) keep(stores_[0], source_number(i));
  EXPECT_EQ(stores_[1].prune((kEntries - 1) * entry_bytes_).removed, 1u);
  keep(stores_[0], source_number(kEntries));
  EXPECT_EQ(stores_[0].list().size(), std::size_t{kEntries});
  EXPECT_TRUE(lines_.empty()) << lines_.front();
}

// A count looks at every file of the folder.
TEST_F(StoreTest, FarBelowItsLimitAStoreDoesNotCountAgain) {
  const auto calls = [&](const char* name, std::uintmax_t limit) {
    return run_traced([&] {
             Store store(folder_ / name, Access::read_write, {}, limit);
             for (int i = 0; i < 8; ++i)
               if (!keep(store, source_number(i))) return 1;
             return 0;
           })
        .calls;
  };
  const int without = calls("a", std::numeric_limits<std::uintmax_t>::max());
  if (without == 0) GTEST_SKIP() << "processes cannot be traced here";
  EXPECT_EQ(calls("b", std::uintmax_t{1} << 30), without);
  EXPECT_GT(calls("c", std::uintmax_t{1} << 17), without) << "and near it, it does";
}

// A listing of thousands of entries takes as long as to load several kernels.
TEST_F(StoreTest, AFolderIsListedOnceAProcess) {
  constexpr int kLoads = 20;
  {
    Store store = open();
    for (int i = 0; i < kLoads; ++i) keep(store, source_number(i));
  }
  const fs::path arch = folder_ / "v1" / "sm_80";
  const auto calls = [&] {
    fs::last_write_time(arch, fs::file_time_type::clock::now() - std::chrono::hours(1));
    return run_traced([&] {
             const Store store = open(Access::read_only);
             for (int i = 0; i < kLoads; ++i)
               if (!find(store, source_number(i), "")) return 1;
             return 0;
           })
        .calls;
  };
  const int few = calls();
  if (few == 0) GTEST_SKIP() << "processes cannot be traced here";
  for (int i = 0; i < 3000; ++i) fs::create_directory(arch / (fmt::format("{:032x}", i) + "-" + kTag));
  EXPECT_LT(calls(), few + kLoads) << "one listing reads the names in about ten calls";
}

TEST_F(StoreTest, WhatAnotherProcessAddsIsFound) {
  Store writer = open();
  keep(writer, source_number(0));
  const fs::path arch = folder_ / "v1" / "sm_80";
  fs::last_write_time(arch, fs::file_time_type::clock::now() - std::chrono::hours(1));
  const Store reader = open(Access::read_only);
  EXPECT_TRUE(find(reader, source_number(0), ""));
  EXPECT_FALSE(find(reader, source_number(1), ""));
  keep(writer, source_number(1));
  EXPECT_TRUE(find(reader, source_number(1), ""));
  fs::remove_all(arch);
  EXPECT_FALSE(find(reader, source_number(0), ""));
  keep(writer, source_number(0), kernel("nvrtc99.0"));
  EXPECT_TRUE(find(reader, source_number(0), "")) << "by another compiler than the one that was listed";
}

TEST_F(StoreTest, TheNewestRecordsStay) {
  Store store = open();
  const auto now = fs::file_time_type::clock::now();
  for (int i = 0; i < 5; ++i) {
    plan::TuningRecord r = record();
    r.shape.seqlen_q = 100 + i;
    plan::write_record(store.records_folder(), r);
    fs::last_write_time(store.records_folder() / plan::record_path(r), now - std::chrono::hours(i));
  }
  store.prune_records(5);
  store.prune_records(2);
  plan::TuningRecords left;
  left.load(store.records_folder());
  EXPECT_EQ(left.size(), 2u);
  plan::TuningRecord oldest_left = record();
  oldest_left.shape.seqlen_q = 101;
  EXPECT_TRUE(fs::exists(store.records_folder() / plan::record_path(oldest_left)));
}

TEST_F(StoreTest, WhatIsKeptTellsNoTimes) {
  Store store = open();
  CompiledKernel first = kernel(), second = kernel();
  first.compile_ms = 1, first.log = "ptxas info : Used 8 registers\nptxas info : Compile time = 1.5 ms\n";
  second.compile_ms = 2, second.log = "ptxas info : Used 8 registers\nptxas info : Compile time = 2.5 ms\n";
  keep(store, source(), first);
  const std::string meta = read_file(entry(source()) / "meta.json");
  store.clear(false);
  keep(store, source(), second);
  EXPECT_EQ(read_file(entry(source()) / "meta.json"), meta);
  EXPECT_NE(meta.find("Used 8 registers"), meta.npos);
}

TEST_F(StoreTest, PrunesTheLeastRecentlyUsedFirst) {
  Store store = open();
  const std::vector<std::string> specs{"fwd:bf16:d32", "fwd:bf16:d64", "fwd:bf16:d96"};
  const auto long_ago = fs::file_time_type::clock::now() - std::chrono::hours(100);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    keep(store, source(specs[i]));
    fs::last_write_time(entry(source(specs[i])) / "meta.json", long_ago + std::chrono::hours(i));
  }
  EXPECT_TRUE(find(store, source(specs[0]))) << "and with that it is the latest used";
  std::uintmax_t total = 0;
  for (const EntryInfo& info : store.list()) total += info.bytes;

  EXPECT_EQ(store.prune(total).removed, 0u);
  EXPECT_EQ(store.prune(total - 1).removed, 1u);
  EXPECT_FALSE(find(store, source(specs[1])));
  EXPECT_TRUE(find(store, source(specs[2])));
  EXPECT_EQ(store.prune(0).removed, 2u);
  EXPECT_TRUE(store.list().empty());
  EXPECT_TRUE(temporaries().empty());
}

TEST_F(StoreTest, ClearLeavesWhatOthersWrote) {
  Store store = open();
  keep(store, source("fwd:bf16:d64"));
  keep(store, source("fwd:bf16:d128"));
  write(entry(source("fwd:bf16:d128")) / "notes.txt", "mine");
  write(folder_ / "v1" / "sm_80" / "readme.txt", "mine");
  write(folder_ / "mine.txt", "mine");
  fs::create_directories(store.records_folder() / "sm_80");
  write(store.records_folder() / "sm_80" / "record.json", "{}");
  write(store.records_folder() / "sm_80" / "notes.txt", "mine");

  EXPECT_EQ(store.clear(false), 2u);
  EXPECT_TRUE(store.list().size() <= 1);
  EXPECT_FALSE(find(store, source("fwd:bf16:d128")));
  EXPECT_TRUE(fs::exists(store.records_folder() / "sm_80" / "record.json"));
  store.clear(true);
  EXPECT_FALSE(fs::exists(store.records_folder() / "sm_80" / "record.json"));
  EXPECT_EQ(read_file(entry(source("fwd:bf16:d128")) / "notes.txt"), "mine");
  for (const char* name : {"mine.txt", "v1/sm_80/readme.txt", "v1/tuning/sm_80/notes.txt"}) {
    EXPECT_EQ(read_file(folder_ / name), "mine") << name;
  }
}

TEST_F(StoreTest, ClearRemovesAllOfItsOwn) {
  Store store = open();
  keep(store, source());
  { const auto lock = store.lock("sm_80", cache::entry_key(digest(source()), kTag)); }
  fs::create_directories(store.records_folder());
  write(store.records_folder() / "record.json", "{}");
  EXPECT_EQ(store.clear(true), 1u);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(StoreTest, ManyProcessesMayStoreOneEntry) {
  constexpr int kProcesses = 6, kRounds = 5;
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    Store store = open();
    for (int round = 0; round < kRounds; ++round) {
      const KernelSource s = source("fwd:bf16:d" + std::to_string(8 + 8 * round));
      if (!keep(store, s)) ::_exit(1);
      const auto found = find(store, s);
      if (!found || found->cubin != kernel().cubin) ::_exit(2);
    }
    ::_exit(lines_.empty() ? 0 : 3);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  Store store = open();
  const std::vector<EntryInfo> all = store.list();
  EXPECT_EQ(all.size(), static_cast<std::size_t>(kRounds));
  for (const EntryInfo& info : all) EXPECT_EQ(info.damage, "");
  EXPECT_TRUE(temporaries().empty());
}

// Readers see a whole entry or none while others remove and write it.
TEST_F(StoreTest, ReadersNeverSeeHalfAnEntry) {
  std::atomic<bool> done{false};
  std::atomic<std::size_t> hits{0};
  std::thread writer([&] {
    Store store = open();
    for (int round = 0; round < 10 || (!hits && round < 5000); ++round) {
      keep(store, source());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      store.prune(0);
    }
    done = true;
  });
  const Store reader = open();
  std::size_t wrong = 0;
  while (!done) {
    const auto found = find(reader, source());
    hits += found.has_value();
    wrong += found && found->cubin != kernel().cubin;
  }
  writer.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(hits, 0u);
}

TEST_F(StoreTest, ALockExcludesOthersUntilItsTimeout) {
  const Store store = open();
  const std::string key = cache::entry_key(digest(source()), kTag);
  Store::Lock first = store.lock("sm_80", key);
  ASSERT_TRUE(first.held());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(store.lock("sm_80", key, 0.1).held());
  const auto waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(waited, std::chrono::milliseconds(100));
  EXPECT_LT(waited, std::chrono::seconds(10));
  EXPECT_TRUE(store.lock("sm_90a", key, 0).held()) << "another entry";
  first = Store::Lock();
  EXPECT_TRUE(store.lock("sm_80", key, 0).held());
}

TEST_F(StoreTest, ALockPassesOnWhenItsHolderIsKilled) {
  const Store store = open();
  const std::string key = cache::entry_key(digest(source()), kTag);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const Store::Lock lock = store.lock("sm_80", key);
    const char held = lock.held() ? 'y' : 'n';
    if (::write(ready[1], &held, 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  char held = 0;
  ASSERT_EQ(::read(ready[0], &held, 1), 1);
  EXPECT_EQ(held, 'y');
  EXPECT_FALSE(store.lock("sm_80", key, 0).held());
  std::thread killer([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::kill(child, SIGKILL);
  });
  EXPECT_TRUE(store.lock("sm_80", key, 30).held());
  killer.join();
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(StoreTest, ClearLeavesALockThatIsHeld) {
  Store store = open();
  const std::string key = cache::entry_key(digest(source()), kTag);
  const Store::Lock lock = store.lock("sm_80", key);
  store.clear(true);
  EXPECT_FALSE(store.lock("sm_80", key, 0).held());
}

/// The files of a store as flashjit_add_pack(... EMBED) would put them into a program.
struct Embedded {
  std::vector<std::pair<std::string, std::string>> texts;
  std::vector<EmbeddedFile> files;

  explicit Embedded(const fs::path& folder) {
    for (const fs::directory_entry& file : fs::recursive_directory_iterator(folder))
      if (file.is_regular_file())
        texts.emplace_back(fs::relative(file, folder).string(), read_file(file.path()));
    for (const auto& [path, bytes] : texts) files.push_back({path, bytes});
  }
};

TEST_F(StoreTest, AnEmbeddedPackHasWhatItsFolderHad) {
  Store store = open();
  const KernelSource s = source();
  ASSERT_TRUE(keep(store, s, kernel("nvrtc12.9.86")));
  ASSERT_TRUE(keep(store, s, kernel("nvrtc13.0.88")));
  fs::create_directories(store.records_folder() / "sm_80");
  write(store.records_folder() / "sm_80" / "a.json", "{}");

  const Embedded pack(folder_);
  const cache::EmbeddedStore embedded(pack.files, log());
  const auto found = embedded.load(s, digest(s));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->cubin, kernel().cubin);
  EXPECT_EQ(found->compiler, "nvrtc13.0.88") << "the newest compiler's";
  EXPECT_FALSE(embedded.load(source("fwd:bf16:d128"), digest(source("fwd:bf16:d128"))));
  ASSERT_EQ(embedded.records().size(), 1u);
  EXPECT_EQ(embedded.records()[0].bytes, "{}");
  EXPECT_TRUE(lines_.empty());
}

TEST_F(StoreTest, ADamagedEmbeddedKernelIsAMissWithAWarning) {
  Store store = open();
  const KernelSource s = source();
  ASSERT_TRUE(keep(store, s));
  poke(entry(s) / "kernel.cubin", 3, 'x');
  const Embedded pack(folder_);
  EXPECT_FALSE(cache::EmbeddedStore(pack.files, log()).load(s, digest(s)));
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("does not match its digest"), std::string::npos) << lines_[0];
  EXPECT_FALSE(cache::EmbeddedStore({}, log()).load(s, digest(s)));
}

}  // namespace
}  // namespace flashjit

// What a store is after its process was killed at any call that changes files, or after any call on files
// failed: every entry whole or absent, and the next process carries on.
#include <errno.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "plan/records.hpp"
#include "support/file.hpp"
#include "tests/support/stored_kernel.hpp"
#include "tests/support/traced_child.hpp"
#include "tools/parts/manifest.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using namespace test;
using cache::Store;

constexpr std::uintmax_t kUnlimited = std::numeric_limits<std::uintmax_t>::max();

const std::vector<KernelSource>& sources() {
  static const std::vector<KernelSource> all{source("fwd:bf16:d64"), source("fwd:bf16:d128")};
  return all;
}

plan::TuningRecord record(const std::string& device) {
  return {.spec = parse_spec("fwd:bf16:d64").normalized(),
          .shape = {1, 2, 2, 128, 128},
          .arch = "sm_80",
          .device = device,
          .driver = "13.0",
          .nvrtc = kTag,
          .library = "0.1.0",
          .best = parse_config("simt:br64:bc64:w8"),
          .timings = {}};
}

/// What a process may answer at its end; anything else is a mistake of its own.
enum Answer : int { kDone = 0, kRefused = 1, kWrong = 2 };

/// A store that a child works with: counts what it says.
struct Child {
  int lines = 0;
  Store store;
  Child(const fs::path& folder, std::uintmax_t limit)
      : store(
            folder, Store::Access::read_write, [this](std::string_view) { ++lines; }, limit) {}

  /// Stores, and says whether it is there; that it is not must have been said.
  Answer keeps(const KernelSource& s) {
    if (keep(store, s)) return kDone;
    return lines > 0 ? kRefused : kWrong;
  }
  /// What is found is right.
  Answer finds(const KernelSource& s) const {
    const auto found = find(store, s);
    if (!found) return kRefused;
    return found->cubin == kernel().cubin && found->resources == kernel().resources ? kDone : kWrong;
  }
};

void fill(const fs::path& folder) {
  Store store(folder, Store::Access::read_write);
  for (const KernelSource& s : sources()) ASSERT_TRUE(keep(store, s));
  plan::write_record(store.records_folder(), record("old"));
}

void damage(const fs::path& folder) {
  fill(folder);
  poke(entry_folder(folder, sources()[0]) / "kernel.cubin", 2, '!');
  fs::remove(entry_folder(folder, sources()[1]) / "meta.json");
  fs::create_directories(folder / "v1" / "tmp" / "leftover");
  write(folder / "v1" / "tmp" / "leftover" / "kernel.cu", "half");
}

/// A pack of which a record has changed since its manifest was written.
void outgrow_manifest(const fs::path& folder) {
  fill(folder);
  command::write_manifest(folder);
  plan::write_record(Store(folder, Store::Access::read_write).records_folder(), record("new"));
}

/// Where only errors of files may come.
template <class Write>
Answer writes(Write write) {
  try {
    write();
    return kDone;
  } catch (const Error& error) {
    return error.code() == ErrorCode::io ? kRefused : kWrong;
  }
}

/// One piece of a process's work with a store.
struct Work {
  const char* name;
  void (*prepare)(const fs::path& folder);
  Answer (*act)(Child& child);
  std::size_t entries;    ///< that are there when it is done
  bool writes = false;    ///< files
  bool damaged = false;   ///< prepare() leaves entries that are not whole
  bool stores = false;    ///< the first source, when it is done
  bool limited = false;   ///< to half as much again as prepare() leaves
  bool manifest = false;  ///< written, when it is done
};

const std::vector<Work>& works() {
  static const std::vector<Work> all{
      {.name = "store the first",
       .prepare = [](const fs::path&) {},
       .act = [](Child& c) { return c.keeps(sources()[0]); },
       .entries = 1,
       .writes = true,
       .stores = true},
      {.name = "store what is there",
       .prepare = fill,
       .act = [](Child& c) { return c.keeps(sources()[0]); },
       .entries = 2,
       .stores = true},
      {.name = "store over damage",
       .prepare = damage,
       .act = [](Child& c) { return c.keeps(sources()[0]); },
       .entries = 2,
       .writes = true,
       .damaged = true,
       .stores = true},
      // Which one is pruned is unknown where times cannot be read.
      {.name = "store and prune",
       .prepare =
           [](const fs::path& folder) {
             Store store(folder, Store::Access::read_write);
             ASSERT_TRUE(keep(store, sources()[1]));
           },
       .act = [](Child& c) { return c.keeps(sources()[0]); },
       .entries = 1,
       .writes = true,
       .limited = true},
      {.name = "compile under a lock",
       .prepare = [](const fs::path&) {},
       .act =
           [](Child& c) {
             const Store::Lock lock = c.store.lock("sm_80", cache::entry_key(digest(sources()[0]), kTag), 0);
             if (c.finds(sources()[0]) != kRefused) return kWrong;
             return c.keeps(sources()[0]);
           },
       .entries = 1,
       .writes = true,
       .stores = true},
      {.name = "load", .prepare = fill, .act = [](Child& c) { return c.finds(sources()[0]); }, .entries = 2},
      {.name = "load of any compiler",
       .prepare = fill,
       .act =
           [](Child& c) {
             const auto found = find(c.store, sources()[0], "");
             return !found ? kRefused : found->cubin == kernel().cubin ? kDone : kWrong;
           },
       .entries = 2},
      {.name = "prune",
       .prepare = fill,
       .act = [](Child& c) { return c.store.prune(1), kDone; },
       .entries = 0},
      {.name = "clear",
       .prepare = outgrow_manifest,
       .act = [](Child& c) { return c.store.clear(true), kDone; },
       .entries = 0},
      {.name = "repair",
       .prepare = damage,
       .act = [](Child& c) { return c.store.list(), c.store.repair(), kDone; },
       .entries = 0,
       .damaged = true},
      {.name = "write a record",
       .prepare = fill,
       .act =
           [](Child& c) {
             return writes([&] { plan::write_record(c.store.records_folder(), record("new")); });
           },
       .entries = 2,
       .writes = true},
      {.name = "write a manifest",
       .prepare = outgrow_manifest,
       .act = [](Child& c) { return writes([&] { command::write_manifest(c.store.folder()); }); },
       .entries = 2,
       .writes = true,
       .manifest = true},
  };
  return all;
}

class Crash : public testing::Test {
 protected:
  void SetUp() override { begin(); }
  void TearDown() override { fs::remove_all(top_); }

  /// An empty store, and next to it what must not be touched.
  void begin() {
    fs::remove_all(top_);
    fs::create_directories(folder());
    write(top_ / "mine", "mine");
  }
  fs::path folder() const { return top_ / "cache"; }

  TracedRun run(const Work& work, Fault fault = {}) {
    begin();
    work.prepare(folder());
    const std::uintmax_t limit = work.limited ? kernel_bytes() * 3 / 2 : kUnlimited;
    return run_traced(
        [&] {
          Child child(folder(), limit);
          return static_cast<int>(work.act(child));
        },
        fault);
  }

  std::uintmax_t kernel_bytes() const {
    std::uintmax_t bytes = 0;
    for (const cache::EntryInfo& info : Store(folder(), Store::Access::read_only).list()) bytes += info.bytes;
    return bytes;
  }

  /// The old one, or the new one, which knows the record that has changed.
  void expect_a_whole_manifest(const TracedRun& run) {
    const std::vector<std::string> differences = command::check_manifest(folder());
    EXPECT_LE(differences.size(), run.exit_code == kDone ? 0u : 1u) << differences.front();
    for (const std::string& line : differences) EXPECT_TRUE(line.ends_with(".json has changed")) << line;
  }

  /// Nothing that a process did not finish becomes part of a pack.
  void expect_that_it_can_be_a_pack() {
    command::write_manifest(folder());
    EXPECT_EQ(command::check_manifest(folder()), std::vector<std::string>{});
    EXPECT_EQ(read_file(command::manifest_path(folder())).find(kUnfinishedPrefix), std::string::npos);
  }

  /// Another process finds only what is whole, stores what is missing and tidies the rest.
  void expect_that_the_next_carries_on(const Work& work, const TracedRun& run) {
    std::vector<std::string> lines;
    Store next(folder(), Store::Access::read_write, [&](std::string_view line) { lines.emplace_back(line); });
    for (const KernelSource& s : sources()) {
      const auto found = find(next, s);
      EXPECT_TRUE(!found || found->cubin == kernel().cubin);
    }
    EXPECT_TRUE(work.damaged || lines.empty()) << lines.front();
    std::vector<std::string> warnings;
    plan::TuningRecords records;
    records.load(next.records_folder(), &warnings);
    EXPECT_TRUE(warnings.empty()) << warnings.front();
    EXPECT_TRUE(run.exit_code != kDone || !work.stores || find(next, sources()[0])) << "the process said so";
    if (work.manifest) expect_a_whole_manifest(run);

    for (const KernelSource& s : sources()) {
      EXPECT_TRUE(next.lock("sm_80", cache::entry_key(digest(s), kTag), 0).held());
      EXPECT_TRUE(keep(next, s)) << (lines.empty() ? "" : lines.back());
      ASSERT_TRUE(find(next, s));
    }
    next.repair();
    EXPECT_TRUE(!fs::exists(folder() / "v1" / "tmp") || fs::is_empty(folder() / "v1" / "tmp"));
    for (const cache::EntryInfo& info : next.list()) EXPECT_EQ(info.damage, "");
    EXPECT_EQ(next.list().size(), sources().size());
    expect_that_it_can_be_a_pack();
    expect_nothing_else_touched();
  }

  void expect_nothing_else_touched() {
    EXPECT_EQ(read_file(top_ / "mine"), "mine");
    EXPECT_EQ(std::distance(fs::directory_iterator(top_), fs::directory_iterator()), 2);
    for (const auto& item : fs::directory_iterator(folder())) EXPECT_EQ(item.path().filename(), "v1");
  }

  struct Tried {
    int runs = 0, refused = 0;
  };
  /// Every place of `kind` in every work, one run each. No runs: processes cannot be traced here.
  Tried try_everywhere(Fault::Kind kind, int error = 0) {
    Tried tried;
    for (const Work& work : works()) {
      for (int at = 0;; ++at) {
        SCOPED_TRACE(testing::Message() << work.name << ", call " << at << ", error " << error);
        const TracedRun ran = run(work, {kind, at, error});
        if (!ran.traced) return {};
        if (ran.calls <= at) break;  // it came to its end before
        ++tried.runs;
        tried.refused += ran.exit_code == kRefused;
        EXPECT_EQ(ran.killed, kind == Fault::Kind::kill);
        EXPECT_NE(ran.exit_code, kWrong);
        expect_that_the_next_carries_on(work, ran);
        if (HasFailure()) return tried;
      }
    }
    return tried;
  }

  /// In memory where that is a file system: thousands of fsyncs take minutes on a disk.
  static fs::path place() {
    std::error_code error;
    return fs::is_directory("/dev/shm", error) && ::access("/dev/shm", W_OK) == 0 ? "/dev/shm"
                                                                                  : testing::TempDir();
  }

  fs::path top_ = place() / ("flashjit-crash-" + unique_suffix());
};

#define SKIP_UNLESS_TRACED(traced) \
  if (!(traced)) GTEST_SKIP() << "processes cannot be traced here"

TEST_F(Crash, WithoutAFaultEveryWorkIsDone) {
  for (const Work& work : works()) {
    const TracedRun ran = run(work);
    SKIP_UNLESS_TRACED(ran.traced);
    EXPECT_EQ(ran.exit_code, kDone) << work.name;
    EXPECT_GT(ran.calls, 0) << work.name;
    EXPECT_EQ(Store(folder(), Store::Access::read_only).list().size(), work.entries) << work.name;
  }
}

TEST_F(Crash, AtAnyCallThatWritesLeavesEveryEntryWholeOrAbsent) {
  const Tried tried = try_everywhere(Fault::Kind::kill);
  SKIP_UNLESS_TRACED(tried.runs);
  EXPECT_GT(tried.runs, 150);
}

TEST_F(Crash, WritesThatWriteLessThanTheyWereAskedToAreGoneOnWith) {
  const Tried tried = try_everywhere(Fault::Kind::short_writes);
  SKIP_UNLESS_TRACED(tried.runs);
  EXPECT_GT(tried.runs, 10);
  EXPECT_EQ(tried.refused, 0);
}

// A network file system may say only there that what was written is lost.
TEST_F(Crash, AnErrorOfCloseIsARefusal) {
  for (const Work& work : works()) {
    if (!work.writes) continue;
    SCOPED_TRACE(work.name);
    const TracedRun ran = run(work, {Fault::Kind::fail_every, SYS_close, EDQUOT});
    SKIP_UNLESS_TRACED(ran.traced);
    EXPECT_EQ(ran.exit_code, kRefused);
    expect_that_the_next_carries_on(work, ran);
  }
}

std::string error_name(const testing::TestParamInfo<int>& error) { return ::strerrorname_np(error.param); }

/// Errors that come and go.
class FailingCall : public Crash, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Errors, FailingCall, testing::Values(EIO, EACCES), error_name);

TEST_P(FailingCall, IsARightResultOrARefusal) {
  const Tried tried = try_everywhere(Fault::Kind::fail_one, GetParam());
  SKIP_UNLESS_TRACED(tried.runs);
  EXPECT_GT(tried.runs, 150);
  EXPECT_GT(tried.refused, 10);
}

/// Errors that stay. One number is enough: no code asks whether it is ENOSPC, EDQUOT or EROFS.
class FullDisk : public Crash, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Errors, FullDisk, testing::Values(ENOSPC), error_name);

TEST_P(FullDisk, FromAnyCallOnIsARightResultOrARefusal) {
  const Tried tried = try_everywhere(Fault::Kind::fail_all, GetParam());
  SKIP_UNLESS_TRACED(tried.runs);
  EXPECT_GT(tried.refused, 10);
}

}  // namespace
}  // namespace flashjit

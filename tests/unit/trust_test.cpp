// Whose a cache is: code is taken from, and left in, folders that belong to this user alone. As root also
// with folders of other users, and with a setuid program.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cache/folders.hpp"
#include "cache/store.hpp"
#include "call/engine.hpp"
#include "plan/records.hpp"
#include "support/file.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/kept_log.hpp"
#include "tests/support/run_command.hpp"
#include "tests/support/stored_kernel.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using cache::Store;
using test::find;
using test::keep;
using test::source;
using Access = Store::Access;

constexpr ::uid_t kNobody = 65534;

class Trust : public testing::Test {
 protected:
  Trust() { ::chmod(folder_.path().c_str(), 0755); }

  fs::path cache() const { return folder_.path() / "cache"; }
  Store open(Access access = Access::cache) { return Store(cache(), access, log_.writer()); }
  int lines() const {
    const std::string text = log_.text();
    return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  }
  /// Nothing is found or kept, and one line says why.
  void expect_unused(const std::string& why) {
    Store store = open();
    for (int i = 0; i < 2; ++i) {
      EXPECT_FALSE(find(store, source()));
      EXPECT_FALSE(keep(store, source("fwd:bf16:d128")));
      EXPECT_FALSE(store.lock("sm_80", cache::entry_key(test::digest(source()), test::kTag), 1).held());
    }
    EXPECT_EQ(lines(), 1) << log_.text();
    EXPECT_TRUE(log_.has(why)) << log_.text();
    EXPECT_TRUE(find(open(Access::read_only), source())) << "a pack is named on purpose";
  }
  void fill() {
    Store store = open();
    ASSERT_TRUE(keep(store, source()));
    ASSERT_TRUE(find(store, source()));
  }
  static int as_nobody(const std::function<int()>& body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(::setgid(kNobody) == 0 && ::setuid(kNobody) == 0 ? body() : 99);
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  test::TemporaryDirectory folder_;
  test::KeptLog log_;
};

TEST_F(Trust, AFolderThatOthersMayWriteIsNotUsed) {
  fill();
  for (const ::mode_t mode : {0777, 01777, 0770, 0720, 0702}) {
    for (const fs::path& path : {cache(), cache() / "v1", cache() / "v1" / "sm_80"}) {
      ASSERT_EQ(::chmod(path.c_str(), mode), 0);
      const std::string cause = cache::why_foreign(path);
      EXPECT_NE(cause.find(fmt::format("other users may write to '{}' (mode {:o})", path.string(), mode)),
                cause.npos)
          << cause;
      EXPECT_FALSE(find(open(), source()));
      ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
      EXPECT_TRUE(find(open(), source()));
    }
  }
  log_.clear();
  ::chmod(cache().c_str(), 0777);
  expect_unused("other users may write");
}

TEST_F(Trust, AnEntryThatOthersMayWriteIsAMiss) {
  fill();
  ::chmod(test::entry_folder(cache(), source()).c_str(), 0777);
  EXPECT_FALSE(find(open(), source()));
  EXPECT_TRUE(log_.has("ignoring the cached kernel")) << log_.text();
}

TEST_F(Trust, RecordsOfSuchAFolderAreNotRead) {
  test::FakeDriver::state().reset();
  const auto chosen_by = [&] {
    Settings settings;
    settings.cache_dir = cache().string();
    settings.cache_limit = 1u << 30;
    settings.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
    settings.log = log_.writer();
    Engine engine(settings, test::FakeDriver::driver());
    return engine.prepare(parse_spec("fwd:bf16:d64"), {1, 2, 2, 128, 128}, {}).config_source;
  };
  plan::TuningRecord record;
  record.spec = parse_spec("fwd:bf16:d64").normalized();
  record.shape = {1, 2, 2, 128, 128};
  record.arch = "sm_90a";
  record.best = parse_config("simt:br64:bc64:w8");
  plan::write_record(open().records_folder(), record);
  EXPECT_EQ(chosen_by(), ConfigSource::tuned);
  ::chmod(cache().c_str(), 0777);
  EXPECT_EQ(chosen_by(), ConfigSource::heuristic);
  EXPECT_EQ(lines(), 3) << "compiled twice, and one warning:\n" << log_.text();
}

class TrustAsRoot : public Trust {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can make another user's folders";
  }
};

TEST_F(TrustAsRoot, AnothersFolderIsNotUsed) {
  fill();
  for (const fs::path& path : {cache(), cache() / "v1", cache() / "v1" / "sm_80"}) {
    ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
    log_.clear();
    expect_unused("belongs to another user (uid 65534)");
    ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
  }
  ASSERT_EQ(::chown(test::entry_folder(cache(), source()).c_str(), kNobody, kNobody), 0);
  EXPECT_FALSE(find(open(), source())) << "planted before the folder was mine alone";
}

TEST_F(TrustAsRoot, NothingIsMadeInAnothersHome) {
  const fs::path home = folder_.path() / "home";
  fs::create_directories(home);
  ASSERT_EQ(::chown(home.c_str(), kNobody, kNobody), 0);
  Store store(home / ".cache" / "flashjit", Access::cache, log_.writer());
  EXPECT_FALSE(keep(store, source()));
  EXPECT_FALSE(fs::exists(home / ".cache"));
  EXPECT_TRUE(log_.has(fmt::format("'{}' belongs to another user", home.string()))) << log_.text();
}

TEST_F(TrustAsRoot, AnotherUserDoesNotUseARootsFolderInASharedOne) {
  const fs::path shared = folder_.path() / "shared";
  fs::create_directories(shared);
  ASSERT_EQ(::chmod(shared.c_str(), 01777), 0);
  Store mine(shared / "cache", Access::cache, log_.writer());
  ASSERT_TRUE(keep(mine, source()));
  EXPECT_EQ(as_nobody([&] {
              Store store(shared / "cache", Access::cache, log_.writer());
              const bool used = find(store, source()) || keep(store, source("fwd:bf16:d128"));
              Store own(shared / "own", Access::cache, log_.writer());
              return used ? 1 : keep(own, source()) && find(own, source()) ? 0 : 2;
            }),
            0);
  Store of_nobody(shared / "own", Access::cache, log_.writer());
  EXPECT_FALSE(find(of_nobody, source()));
}

TEST_F(TrustAsRoot, ALinkOfAnotherIsNotFollowed) {
  fill();
  const fs::path link = folder_.path() / "link";
  fs::create_directory_symlink(cache(), link);
  EXPECT_TRUE(find(Store(link, Access::cache), source()));
  ASSERT_EQ(::lchown(link.c_str(), kNobody, kNobody), 0);
  EXPECT_FALSE(find(Store(link, Access::cache, log_.writer()), source()));
  EXPECT_TRUE(log_.has("belongs to another user")) << log_.text();
}

TEST_F(TrustAsRoot, ASetuidProgramReadsNoEnvironment) {
  struct ::statvfs system {};
  const std::string program = folder_.file("flashjit");
  fs::copy_file(test::built(FLASHJIT_COMMAND), program);
  ASSERT_EQ(::statvfs(program.c_str(), &system), 0);
  if ((system.f_flag & ST_NOSUID) != 0) GTEST_SKIP() << "no setuid programs here";
  const auto code_with = [&](::mode_t mode) {
    EXPECT_EQ(::chmod(program.c_str(), mode), 0);
    return as_nobody([&] {
      ::setenv("FLASHJIT_LOG", "no such value", 1);
      ::setenv("FLASHJIT_TEMPLATE_DIR", "/no/such/folder", 1);
      const std::string line =
          fmt::format("exec '{}' inspect --spec fwd:bf16:d64 --source >/dev/null 2>&1", program);
      ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      return 99;
    });
  };
  EXPECT_EQ(code_with(0755), 2) << "the variables are wrong";
  EXPECT_EQ(code_with(04755), 0);
}

}  // namespace
}  // namespace flashjit

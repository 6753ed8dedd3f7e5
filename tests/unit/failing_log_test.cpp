// Lines of the log that cannot be written: the work goes on, and what was compiled is kept. Each in a process
// of its own, whose stderr is spoilt. NVRTC and the driver are those of tests/fake.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <thread>

#include "call/engine.hpp"
#include "support/file.hpp"
#include "support/file_posix.hpp"
#include "support/stderr.hpp"
#include "tests/support/built.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/kept_log.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using test::FakeDriver;
using test::Variable;

constexpr AttentionShape kShape{1, 2, 2, 128, 128};

KernelSpec spec(int head_dim) { return {{.dtype = DType::bf16, .head_dim = head_dim}}; }

void be_stderr(int fd) { ::dup2(fd, STDERR_FILENO), ::close(fd); }

void be_full_disk() { be_stderr(::open("/dev/full", O_WRONLY)); }
void be_closed() { ::close(STDERR_FILENO); }
void be_pipe_without_reader() {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) ::_exit(99);
  ::close(ends[0]);
  be_stderr(ends[1]);
}
void be_full_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_NONBLOCK) != 0) ::_exit(99);  // its reader stays open and reads nothing
  const std::array<char, 4096> bytes{};
  while (::write(ends[1], bytes.data(), bytes.size()) > 0) continue;
  be_stderr(ends[1]);
}

struct Spoilt {
  const char* name;
  void (*be)();
};

class FailingLog : public testing::TestWithParam<Spoilt> {
 protected:
  FailingLog() {
    fs::create_directories(folder_);
    FakeDriver::state().reset();
  }
  ~FailingLog() override { fs::remove_all(folder_); }

  std::unique_ptr<Engine> engine(std::function<void(std::string_view)> log = {}) const {
    const RuntimeOptions options{.cache_dir = (folder_ / "cache").string(),
                                 .nvrtc = test::built(FLASHJIT_FAKE_NVRTC),
                                 .log = std::move(log)};
    const Environment nothing = read_environment([](const char*) -> const char* { return nullptr; });
    return std::make_unique<Engine>(resolve_settings(options, nothing), FakeDriver::driver());
  }
  /// A kernel here, and one in a thread, whose error would end the process.
  static void compile(Engine& engine) {
    engine.prepare(spec(64), kShape, {});
    std::thread([&] { engine.prepare(spec(128), kShape, {}); }).join();
  }

  int compilations() const {
    std::ifstream lines(compilations_);
    return static_cast<int>(std::count(std::istreambuf_iterator<char>(lines), {}, '\n'));
  }
  /// What `body` returns in a forked child; -1: a signal ended it.
  static int in_child(const std::function<int()>& body) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      ::signal(SIGPIPE, SIG_DFL);
      int code = 98;
      try {
        code = body();
      } catch (...) {
      }
      ::_exit(code);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  bool any_file_has(const std::string& text) const {
    for (const auto& item : fs::recursive_directory_iterator(folder_ / "cache"))
      if (item.is_regular_file() && read_file(item.path()).find(text) != std::string::npos) return true;
    return false;
  }

  fs::path folder_ = fs::temp_directory_path() / ("failing-log-" + unique_suffix());
  const std::string compilations_ = (folder_ / "compilations").string();
  const Variable variable_{"FAKE_NVRTC_LOG", compilations_};
};

INSTANTIATE_TEST_SUITE_P(All, FailingLog,
                         testing::Values(Spoilt{"FullDisk", be_full_disk}, Spoilt{"Closed", be_closed},
                                         Spoilt{"PipeWithoutReader", be_pipe_without_reader},
                                         Spoilt{"FullPipe", be_full_pipe}),
                         [](const auto& info) { return info.param.name; });

TEST_P(FailingLog, FailsNoCallAndKernelsAreKept) {
  for (int run = 0; run < 2; ++run) {
    EXPECT_EQ(in_child([&] {
                GetParam().be();
                compile(*engine());
                return 0;
              }),
              0);
    EXPECT_EQ(compilations(), 2) << "the second process finds them";
  }
  EXPECT_FALSE(any_file_has("flashjit: "));
}

TEST_P(FailingLog, MayBeginWhileTheRuntimeLives) {
  EXPECT_EQ(in_child([&] {
              be_stderr(::open("/dev/null", O_WRONLY));
              const auto runtime = engine();
              GetParam().be();
              compile(*runtime);
              return 0;
            }),
            0);
  EXPECT_EQ(in_child([&] { return engine()->prepare(spec(64), kShape, {}).origin == KernelOrigin::disk; }),
            1);
  EXPECT_FALSE(any_file_has("flashjit: "));
}

TEST_F(FailingLog, ThatThrowsFailsNoCall) {
  const auto runtime = engine([](std::string_view) { throw std::runtime_error("the log's own"); });
  compile(*runtime);
  EXPECT_EQ(engine()->prepare(spec(64), kShape, {}).origin, KernelOrigin::disk);
}

TEST_F(FailingLog, AKernelIsKeptBeforeItsLineIsWritten) {
  bool kept = false;
  engine([&](std::string_view line) {
    if (line.starts_with("compiled"))
      kept = engine([](std::string_view) {})->prepare(spec(64), kShape, {}).origin == KernelOrigin::disk;
  })->prepare(spec(64), kShape, {});
  EXPECT_TRUE(kept);
}

/// Calls the library whatever is logged, and once for all that it is asked in the meantime.
TEST_F(FailingLog, MayCallTheLibrary) {
  const fs::path records = folder_ / "cache" / "v1" / "tuning" / "sm_90a";
  make_private_folders(records);
  write_file_atomically(records / "damaged.json", "{");
  std::unique_ptr<Engine> runtime;
  int lines = 0;
  runtime = engine([&](std::string_view) {
    ++lines;
    runtime->workspace_bytes(spec(64), kShape);
    runtime->prepare(spec(32), kShape, {});
    runtime->prepare(spec(64), kShape, {});  // it may be the one that is being made, which is an error
  });
  EXPECT_EQ(in_child([&] {
              compile(*runtime);
              return lines;
            }),
            4)
      << "a damaged record, and three kernels";
}

TEST(Stderr, KeepsASignalThatWaitedBefore) {
  ::sigset_t pipe, before, pending;
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, &before);
  ::raise(SIGPIPE);
  write_to_stderr("");
  ::sigpending(&pending);
  EXPECT_TRUE(::sigismember(&pending, SIGPIPE));
  int number = 0;
  ::sigwait(&pipe, &number);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST(OpenApart, NeverGivesTheNumberOfAStandardStream) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(STDIN_FILENO), ::close(STDOUT_FILENO), ::close(STDERR_FILENO);
    ::_exit(open_apart("/dev/null", O_WRONLY) > STDERR_FILENO ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace flashjit

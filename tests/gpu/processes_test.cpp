// Processes on a real device: forked ones, and one that opens the library at run time and closes it again.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "support/file.hpp"
#include "tests/support/built.hpp"
#include "tests/support/lifetime.hpp"

namespace flashjit::test {
namespace {

namespace fs = std::filesystem;

/// Runs `body` in a forked child, which ends by itself when it hangs; its exit code, -1 for a signal.
int in_forked_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(120);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool tells_of_forks(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.message().find("forked") != std::string::npos;
  }
  return false;
}

TEST_F(Lifetime, AChildForkedAfterCudaWasUsedIsToldSo) {
  expect_in_its_own_process([] {
    auto runtime = std::make_unique<Runtime>(in_memory());
    const std::vector<std::uint8_t> before = kProblem.run(*runtime, nullptr);
    // The shape was called before: nothing is left to do but to launch.
    const device::DeviceBuffer memory = kProblem.memory();
    const ForwardArgs args = kProblem.within(memory.data());
    runtime->forward(kProblem.spec, args, nullptr);
    gpu().context->synchronize();
    const int child = in_forked_child([&] {
      const bool known = tells_of_forks([&] { runtime->forward(kProblem.spec, args, nullptr); });
      const bool unknown = tells_of_forks([&] { runtime->prepare(spec_of(64), kProblem.shape); });
      const bool fresh = tells_of_forks([&] { Runtime(in_memory()).prepare(spec_of(64), kProblem.shape); });
      runtime.reset();  // neither hangs nor crashes
      return !known ? 1 : !unknown ? 2 : !fresh ? 3 : 0;
    });
    std::fprintf(stderr, "the child's exit code: %d\n", child);
    const bool parent_works = kProblem.run(*runtime, nullptr) == before;
    answer({child != 1, child != 2, child != 3, child == 0, parent_works});
  });
}

/// Prepares and runs in this process, which may be the first to; 10: compiled, 11: read from the store,
/// 77: no GPU.
int use_store(const fs::path& folder, const std::string& result) {
  if (!gpu().context) return 77;
  Runtime runtime({.cache_dir = (folder / "cache").string(),
                   .packs = {},
                   .jit = JitMode::on,
                   .log = [](std::string_view) {}});
  const KernelOrigin origin = runtime.prepare(kProblem.spec, kProblem.shape).origin;
  const std::vector<std::uint8_t> bytes = kProblem.run(runtime, nullptr);
  write_file_atomically(folder / result, std::string(bytes.begin(), bytes.end()));
  return origin == KernelOrigin::compiled ? 10 : origin == KernelOrigin::disk ? 11 : 1;
}

TEST(LifetimeOfProcesses, ChildrenForkedBeforeCudaShareTheStoreWithTheirParent) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  // In a new process, because other tests have used CUDA in this one.
  const auto body = [] {
    ::unsetenv("FLASHJIT_PACKS");  // the kernel is to be compiled
    const fs::path folder = fs::temp_directory_path() / ("flashjit-forked-" + unique_suffix());
    fs::create_directories(folder);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(300);
      ::_exit(use_store(folder, "child"));
    }
    const int mine = use_store(folder, "parent");
    int status = 0;
    ::waitpid(child, &status, 0);
    const int of_child = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::fprintf(stderr, "10: compiled, 11: read; the child %d, the parent %d\n", of_child, mine);
    const bool once = (mine == 10 && of_child == 11) || (mine == 11 && of_child == 10);
    const bool same = once && read_file(folder / "child") == read_file(folder / "parent");
    fs::remove_all(folder);
    std::_Exit(mine == 77 ? 77 : !once ? 1 : !same ? 2 : 0);
  };
  const auto ended_well = [](int status) {
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return code == 0 || (code == 77 && !gpu().context);
  };
  EXPECT_EXIT(body(), ended_well, "") << "1: not compiled once, 2: other bits";
  if (!gpu().context) GTEST_SKIP() << "no GPU: " << gpu().missing;
}

TEST_F(Lifetime, TheLibraryIsUnloadedAndTheContextGoesOn) {
  const fs::path folder = fs::temp_directory_path() / ("flashjit-unload-" + unique_suffix());
  const std::string line =
      "'" + built(FLASHJIT_UNLOAD) + "' '" + built(FLASHJIT_LIBRARY) + "' '" + folder.string() + "'";
  EXPECT_EQ(std::system(line.c_str()), 0) << line;
  fs::remove_all(folder);
}

}  // namespace
}  // namespace flashjit::test

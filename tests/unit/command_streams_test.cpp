// The command where its standard streams take nothing: a full disk, a closed descriptor, a pipe whose reader
// is gone.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStderrThatTakesNothing[] = {"2>&-", "2>/dev/full"};

class CommandStreams : public ::testing::Test {
 protected:
  /// Exit code of the shell's line, in which {} stands for the command.
  int code_of(const std::string& line, const std::string& arguments) const {
    const std::string command =
        test::command_line(folder_, arguments, "FLASHJIT_NVRTC=" + test::built(FLASHJIT_FAKE_NVRTC));
    const std::string script = folder_.file("script");
    write_file_atomically(script, fmt::format(fmt::runtime(line), command));
    const int status = std::system(fmt::format("bash '{}'", script).c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string pack_arguments(const std::string& name) const {
    return fmt::format("pack --spec fwd:bf16:d64 --arch sm_80,sm_90 --out {}", folder_.file(name));
  }
  test::TemporaryDirectory folder_;
};

TEST_F(CommandStreams, AStderrThatTakesNothingChangesNoExitCode) {
  for (const std::string spoilt : kStderrThatTakesNothing) {
    EXPECT_EQ(code_of("{} >/dev/null " + spoilt, "inspect --spec no:such"), 2) << spoilt;
    EXPECT_EQ(code_of("{} >/dev/null " + spoilt, "no-such-subcommand"), 2) << spoilt;
    EXPECT_EQ(code_of("{} >/dev/full " + spoilt, "cache list"), 4) << spoilt;
  }
  EXPECT_EQ(
      code_of("(sleep 0.2; {}) 2>&1 >/dev/null | true; exit ${{PIPESTATUS[0]}}", "inspect --spec no:such"),
      2);
}

TEST_F(CommandStreams, NoFileGetsWhatIsPrinted) {
  for (const std::string closed : {"2>&-", ">&- 2>&-", "<&- >&- 2>&-"}) {
    const std::string name = std::to_string(closed.size());
    code_of("{} " + closed, pack_arguments(name));
    EXPECT_EQ(code_of("{} >/dev/null", "cache verify --dir " + folder_.file(name)), 0) << closed;
    for (const auto& item : fs::recursive_directory_iterator(folder_.file(name))) {
      const std::string bytes = item.is_regular_file() ? read_file(item.path()) : "";
      EXPECT_EQ(bytes.find("flashjit: "), std::string::npos) << item.path();
    }
  }
}

}  // namespace
}  // namespace flashjit

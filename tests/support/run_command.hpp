// Runs the built `flashjit` command as a user would, away from the machine's own cache, packs and GPU.
#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/file.hpp"
#include "tests/support/built.hpp"

namespace flashjit::test {

struct CommandResult {
  int code = -1;  ///< exit code; -1: ended by a signal
  std::string out, err;

  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

/// A folder of its own, removed with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory()
      : path_(std::filesystem::temp_directory_path() / ("flashjit-test-" + unique_suffix())) {
    std::filesystem::create_directories(path_);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

/// A line for the shell. `arguments` are words of it. `environment` comes on top of one without packs, whose
/// cache is in `folder` and which has no driver.
inline std::string command_line(const TemporaryDirectory& folder, const std::string& arguments,
                                const std::string& environment) {
  return fmt::format(
      "env -u FLASHJIT_PACKS -u FLASHJIT_JIT -u FLASHJIT_TEMPLATE_DIR FLASHJIT_LIBCUDA=/no/libcuda.so "
      "FLASHJIT_CACHE_DIR='{}' {} '{}' {}",
      folder.file("cache"), environment, built(FLASHJIT_COMMAND), arguments);
}

/// Runs the command without a terminal, as a script would.
inline CommandResult run_command(const TemporaryDirectory& folder, const std::string& arguments,
                                 const std::string& environment = "") {
  const std::string errors = folder.file("stderr.txt");
  const std::string line =
      fmt::format("{} 2>'{}' </dev/null", command_line(folder, arguments, environment), errors);
  std::FILE* pipe = popen(line.c_str(), "r");
  if (!pipe) throw std::runtime_error("popen failed");
  CommandResult result;
  std::array<char, 4096> buffer;
  for (std::size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    result.out.append(buffer.data(), got);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.code = WEXITSTATUS(status);
  result.err = read_file(errors);
  return result;
}

/// The command on a terminal of its own.
class CommandOnTerminal {
 public:
  CommandOnTerminal(const TemporaryDirectory& folder, const std::string& arguments,
                    const std::string& environment) {
    const std::string line = "exec " + command_line(folder, arguments, environment);
    child_ = ::forkpty(&terminal_, nullptr, nullptr, nullptr);
    if (child_ == 0) {
      ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      ::_exit(127);
    }
    if (child_ < 0) throw std::runtime_error("forkpty failed");
  }
  ~CommandOnTerminal() {
    if (child_ > 0) ::kill(child_, SIGKILL), ::waitpid(child_, nullptr, 0);
    ::close(terminal_);
  }
  CommandOnTerminal(const CommandOnTerminal&) = delete;
  CommandOnTerminal& operator=(const CommandOnTerminal&) = delete;

  /// Waits until `part` is on the screen, at most a minute; false: the command has ended without it.
  bool shows(const std::string& part) {
    while (screen_.find(part) == std::string::npos)
      if (!read_more()) return false;
    return true;
  }
  void press_ctrl_c() {
    if (::write(terminal_, "\x03", 1) != 1) throw std::runtime_error("the terminal takes no input");
  }
  /// Waits for the end. `out` has all output.
  CommandResult finish() {
    while (read_more()) continue;
    int status = 0;
    ::waitpid(std::exchange(child_, -1), &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, screen_, {}};
  }

 private:
  bool read_more() {
    std::array<char, 4096> buffer;
    ::pollfd readable{terminal_, POLLIN, 0};
    if (::poll(&readable, 1, 60000) <= 0) return false;
    const ssize_t got = ::read(terminal_, buffer.data(), buffer.size());
    if (got > 0) screen_.append(buffer.data(), static_cast<std::size_t>(got));
    return got > 0;
  }

  int terminal_ = -1;
  ::pid_t child_ = -1;
  std::string screen_;
};

}  // namespace flashjit::test

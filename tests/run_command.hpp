// Runs the built `flashjit` command as a user would, away from the machine's own cache, packs and GPU.
#pragma once

#include <fmt/format.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/file.hpp"

namespace flashjit::testing {

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

/// `arguments` are words for the shell. `environment` comes on top of one without packs, whose cache is in
/// `folder` and which has no driver.
inline CommandResult run_command(const TemporaryDirectory& folder, const std::string& arguments,
                                 const std::string& environment = "") {
  const std::string errors = folder.file("stderr.txt");
  const std::string line = fmt::format(
      "env -u FLASHJIT_PACKS -u FLASHJIT_JIT -u FLASHJIT_TEMPLATE_DIR FLASHJIT_LIBCUDA=/no/libcuda.so "
      "FLASHJIT_CACHE_DIR='{}' {} '{}' {} 2>'{}' </dev/null",
      folder.file("cache"), environment, FLASHJIT_COMMAND, arguments, errors);
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

}  // namespace flashjit::testing

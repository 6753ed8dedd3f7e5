#include "disassembler.hpp"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <vector>

#include "command.hpp"
#include "device/images.hpp"
#include "support/file.hpp"
#include "support/text.hpp"

namespace flashjit::command {
namespace {

constexpr std::array<const char*, 2> kTools{"cuobjdump", "nvdisasm"};

std::vector<std::filesystem::path> tool_folders() {
  std::vector<std::filesystem::path> folders;
  for (const auto& [name, value] : variables_with_prefix("PATH"))
    if (name == "PATH")
      for (std::string_view folder : split(value, ':'))
        if (!folder.empty()) folders.emplace_back(folder);
  for (const auto& [name, value] : variables_with_prefix("CUDA_"))
    if (name == "CUDA_HOME" || name == "CUDA_PATH") folders.push_back(std::filesystem::path(value) / "bin");
  folders.emplace_back("/usr/local/cuda/bin");
  return folders;
}

/// What the program writes to stdout and stderr; its exit status is left in `status`.
std::string output_of(const std::vector<std::string>& command, int* status) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) throw Error(ErrorCode::io, "cannot make a pipe: too many open files");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int problem =
      posix_spawn(&child, command.front().c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string output;
  std::array<char, 65536> buffer;
  for (ssize_t got = 0; problem == 0 && (got = read(ends[0], buffer.data(), buffer.size())) != 0;) {
    if (got > 0)
      output.append(buffer.data(), static_cast<std::size_t>(got));
    else if (errno != EINTR)
      break;
  }
  close(ends[0]);
  if (problem != 0) throw Error(ErrorCode::io, fmt::format("cannot start '{}'", command.front()));
  while (waitpid(child, status, 0) < 0 && errno == EINTR) {
  }
  return output;
}

/// A file for as long as the disassembler reads it.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& bytes)
      : path_(std::filesystem::temp_directory_path() / fmt::format("flashjit-{}.cubin", unique_suffix())) {
    write_file_atomically(path_, bytes);
  }
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string disassemble_image(const std::string& tool, std::string_view image) {
  const TemporaryFile file{std::string(image)};
  std::vector<std::string> command{tool};
  if (tool.ends_with("cuobjdump")) command.emplace_back("-sass");
  command.push_back(file.path());
  int status = 0;
  std::string output = output_of(command, &status);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw Error(ErrorCode::io, fmt::format("'{}' could not disassemble the kernel", tool), output);
  return output;
}

}  // namespace

std::optional<std::string> find_disassembler() {
  for (const std::filesystem::path& folder : tool_folders())
    for (const char* tool : kTools)
      if (access((folder / tool).c_str(), X_OK) == 0) return (folder / tool).string();
  return std::nullopt;
}

std::string disassemble(const std::string& cubin) {
  const std::optional<std::string> tool = find_disassembler();
  if (!tool)
    throw Error(
        ErrorCode::no_compiler,
        "SASS needs cuobjdump or nvdisasm, and neither is on PATH, in CUDA_HOME/bin, CUDA_PATH/bin or "
        "/usr/local/cuda/bin; install them (apt: cuda-cuobjdump, cuda-nvdisasm; PyPI: nvidia-cuda-nvdisasm)");
  std::string text;
  for (const std::string_view image : device::images(cubin)) text += disassemble_image(*tool, image);
  return text;
}

}  // namespace flashjit::command

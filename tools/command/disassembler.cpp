#include "disassembler.hpp"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <vector>

#include "command.hpp"
#include "device/images.hpp"
#include "support/environment.hpp"
#include "support/file.hpp"
#include "support/paths.hpp"
#include "support/text.hpp"
#include "system.hpp"

namespace flashjit::command {
namespace {

constexpr std::array<const char*, 2> kTools{"cuobjdump", "nvdisasm"};

std::vector<std::filesystem::path> tool_folders() {
  std::vector<std::filesystem::path> folders;
  const std::string path = environment_value("PATH");
  for (const std::string_view folder : split(path, kPathSeparator))
    if (!folder.empty()) folders.push_back(path_of(folder));
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string toolkit = environment_value(name); !toolkit.empty())
      folders.push_back(path_of(toolkit) / "bin");
  folders.emplace_back("/usr/local/cuda/bin");
  return folders;
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
  if (path_of(tool).stem() == "cuobjdump") command.emplace_back("-sass");
  command.push_back(file.path());
  Finished finished = run_program(command);
  if (finished.exit_code != 0)
    throw Error(ErrorCode::io, fmt::format("'{}' could not disassemble the kernel", tool), finished.output);
  return std::move(finished.output);
}

}  // namespace

std::optional<std::string> find_disassembler() {
  for (const std::filesystem::path& folder : tool_folders())
    for (const char* tool : kTools)
      if (const std::filesystem::path found = program_in(folder, tool); !found.empty()) return found.string();
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

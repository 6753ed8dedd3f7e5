#include "support/file.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>

#include "flashjit/error.hpp"

namespace flashjit {

void fail_to(std::string_view action, const std::filesystem::path& path, std::string_view cause) {
  throw Error(ErrorCode::io, fmt::format("cannot {} '{}': {}", action, path.string(), cause));
}

void write_output(const std::filesystem::path& path, std::string_view bytes) {
  using std::filesystem::file_type;
  std::error_code error;
  const file_type type = std::filesystem::status(path, error).type();
  if (type == file_type::directory || (type == file_type::not_found && !is_link(path)))
    return write_file_atomically(path, bytes);
  if (type == file_type::regular)
    if (const auto target = std::filesystem::canonical(path, error); !error)
      return write_file_atomically(target, bytes);
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush();
  if (!file) fail_to("write", path, std::generic_category().message(errno));
}

std::string make_private_folders(const std::filesystem::path& folder) {
  std::error_code error;
  if (folder.empty() || std::filesystem::is_directory(folder, error)) return {};
  if (folder.has_parent_path() && folder.parent_path() != folder) {
    if (std::string cause = make_private_folders(folder.parent_path()); !cause.empty()) return cause;
  }
  const std::string cause = make_private_folder(folder);
  if (cause.empty() || std::filesystem::is_directory(folder, error)) return {};  // by another meanwhile, too
  return fmt::format("cannot make the folder '{}': {}", folder.string(), cause);
}

std::string unique_suffix() {
  const std::array<std::uint32_t, 3> words = random_words();
  return fmt::format("{:08x}{:08x}{:08x}", words[0], words[1], words[2]);
}

}  // namespace flashjit

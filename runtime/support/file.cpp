#include "support/file.hpp"

#include <fmt/format.h>

#include "flashjit/error.hpp"

namespace flashjit {

void fail_to(std::string_view action, const std::filesystem::path& path, std::string_view cause) {
  throw Error(ErrorCode::io, fmt::format("cannot {} '{}': {}", action, path.string(), cause));
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

// Whose a file or folder is, and who else may write to it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace flashjit {

struct Owner {
  bool is_user = false;    ///< this process's
  bool is_system = false;  ///< an administrator, or the system itself
  std::string name;        ///< "uid 1000"
  std::string writers;     ///< what lets others write: "mode 777"; empty: nothing
};

enum class Links : std::uint8_t { followed, kept };
/// Nothing where there is no such file or folder.
std::optional<Owner> owner_of(const std::filesystem::path& path, Links links);

}  // namespace flashjit

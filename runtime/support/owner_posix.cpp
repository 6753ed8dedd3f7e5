#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/owner.hpp"

namespace flashjit {

std::optional<Owner> owner_of(const std::filesystem::path& path, Links links) {
  struct stat status {};
  const auto look = links == Links::followed ? ::stat : ::lstat;
  if (look(path.c_str(), &status) != 0) return std::nullopt;
  const bool shared = (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  return Owner{.is_user = status.st_uid == ::geteuid(),
               .is_system = status.st_uid == 0,
               .name = fmt::format("uid {}", status.st_uid),
               .writers = shared ? fmt::format("mode {:o}", status.st_mode & 07777) : ""};
}

}  // namespace flashjit

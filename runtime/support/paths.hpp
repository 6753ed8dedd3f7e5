// Paths from texts, which are UTF-8 everywhere.
#pragma once

#include <filesystem>
#include <string_view>

namespace flashjit {

/// By itself a path takes a text for one of the system's code page, on Windows.
std::filesystem::path path_of(std::string_view text);

}  // namespace flashjit

// What the pages that the command writes are made of: one file each that needs nothing else.
#pragma once

#include <fmt/format.h>

#include <iterator>
#include <string>
#include <string_view>
#include <utility>

namespace flashjit::html {

/// Fits a page's text, attributes and titles.
std::string escaped(std::string_view text);

/// Begins a page, with the styles of all: of tables, figures and what SVG draws.
std::string head(std::string_view title);

/// Appends to a page as fmt::format makes text.
template <class... Args>
void put(std::string& page, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(page), format, std::forward<Args>(args)...);
}

}  // namespace flashjit::html

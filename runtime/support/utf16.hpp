// For the files of Windows alone: its texts are UTF-16, and flashjit's UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace flashjit {

std::wstring utf16_of(std::string_view text);
std::string utf8_of(std::wstring_view text);

/// "The system cannot find the file specified", or what else went wrong last in this thread.
std::string last_windows_error();
std::string windows_error(unsigned long code);

}  // namespace flashjit

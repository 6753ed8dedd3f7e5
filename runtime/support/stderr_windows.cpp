#include <windows.h>

#include "support/stderr.hpp"
#include "support/utf16.hpp"

namespace flashjit {
namespace {

/// Consoles show UTF-16 whatever their code page is; files and pipes take the bytes.
bool write_some(HANDLE out, std::string_view& text) {
  DWORD written = 0;
  if (!::WriteFile(out, text.data(), static_cast<DWORD>(text.size()), &written, nullptr) || written == 0)
    return false;
  text.remove_prefix(written);
  return true;
}

bool write_to_console(HANDLE out, std::string_view text) {
  DWORD mode = 0, written = 0;
  if (!::GetConsoleMode(out, &mode)) return false;
  try {
    const std::wstring wide = utf16_of(text);
    return ::WriteConsoleW(out, wide.data(), static_cast<DWORD>(wide.size()), &written, nullptr) != 0;
  } catch (...) {
    return false;  // no memory: the bytes, then
  }
}

HANDLE standard_error() noexcept { return ::GetStdHandle(STD_ERROR_HANDLE); }

}  // namespace

bool stderr_is_open() noexcept {
  const HANDLE out = standard_error();
  return out != nullptr && out != INVALID_HANDLE_VALUE && ::GetFileType(out) != FILE_TYPE_UNKNOWN;
}

void write_to_stderr(std::string_view text) noexcept {
  const HANDLE out = standard_error();
  if (out == nullptr || out == INVALID_HANDLE_VALUE || write_to_console(out, text)) return;
  while (!text.empty() && write_some(out, text)) continue;
}

}  // namespace flashjit

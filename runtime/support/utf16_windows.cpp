#include <fmt/format.h>
#include <windows.h>

#include <system_error>

#include "support/paths.hpp"
#include "support/utf16.hpp"

namespace flashjit {

std::wstring utf16_of(std::string_view text) {
  const int size = static_cast<int>(text.size());
  std::wstring out(static_cast<std::size_t>(::MultiByteToWideChar(CP_UTF8, 0, text.data(), size, nullptr, 0)),
                   L'\0');
  ::MultiByteToWideChar(CP_UTF8, 0, text.data(), size, out.data(), static_cast<int>(out.size()));
  return out;
}

std::filesystem::path path_of(std::string_view text) { return utf16_of(text); }

std::string utf8_of(std::wstring_view text) {
  const int size = static_cast<int>(text.size());
  const int bytes = ::WideCharToMultiByte(CP_UTF8, 0, text.data(), size, nullptr, 0, nullptr, nullptr);
  std::string out(static_cast<std::size_t>(bytes), '\0');
  ::WideCharToMultiByte(CP_UTF8, 0, text.data(), size, out.data(), bytes, nullptr, nullptr);
  return out;
}

std::string windows_error(unsigned long code) {
  wchar_t* text = nullptr;
  const DWORD size = ::FormatMessageW(
      FORMAT_MESSAGE_ALLOCATE_BUFFER | FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, nullptr,
      code, 0, reinterpret_cast<wchar_t*>(&text), 0, nullptr);
  if (!text) return fmt::format("Windows error {}", code);
  std::string message = utf8_of({text, size});
  ::LocalFree(text);
  message.erase(message.find_last_not_of("\r\n .") + 1);
  return message;
}

std::string last_windows_error() { return windows_error(::GetLastError()); }

}  // namespace flashjit

#include <fmt/format.h>
#include <windows.h>
// windows.h first.
#include <fcntl.h>
#include <io.h>
#include <shellapi.h>

#include <array>
#include <csignal>
#include <cstdio>

#include "flashjit/error.hpp"
#include "support/utf16.hpp"
#include "system.hpp"

namespace flashjit::command {
namespace {

/// One argument as CommandLineToArgvW takes it apart again.
std::wstring quoted_argument(const std::wstring& argument) {
  if (!argument.empty() && argument.find_first_of(L" \t\"") == argument.npos) return argument;
  std::wstring out = L"\"";
  std::size_t backslashes = 0;
  for (const wchar_t c : argument) {
    // Backslashes before a quote count twice.
    if (c == L'"') out.append(backslashes + 1, L'\\');
    backslashes = c == L'\\' ? backslashes + 1 : 0;
    out += c;
  }
  return out.append(backslashes, L'\\') + L"\"";
}

std::string read_to_end(HANDLE pipe) {
  std::string output;
  std::array<char, 65536> buffer;
  for (DWORD got = 0; ::ReadFile(pipe, buffer.data(), DWORD{buffer.size()}, &got, nullptr) && got > 0;)
    output.append(buffer.data(), got);
  return output;
}

}  // namespace

std::vector<std::string> program_arguments(int, char**) {
  int count = 0;
  wchar_t** wide = ::CommandLineToArgvW(::GetCommandLineW(), &count);
  std::vector<std::string> arguments;
  for (int i = 0; i < count; ++i) arguments.push_back(utf8_of(wide[i]));
  ::LocalFree(wide);
  return arguments;
}

// A closed stream of Windows has no handle that a file could get.
void prepare_streams() { ::_setmode(::_fileno(stdout), _O_BINARY); }

bool is_terminal(Stream stream) { return ::_isatty(static_cast<int>(stream)) != 0; }

// Windows' signal() forgets the handler when it has called it.
bool at_first_interrupt(void (*handler)(int)) { return std::signal(SIGINT, handler) != SIG_ERR; }

std::map<std::string, std::string> variables_with_prefix(std::string_view prefix) {
  std::map<std::string, std::string> found;
  wchar_t* const all = ::GetEnvironmentStringsW();
  for (const wchar_t* one = all; one && *one; one += std::wcslen(one) + 1) {
    const std::string text = utf8_of(one);
    const std::size_t equals = text.find('=', 1);  // hidden ones begin with it
    if (equals != text.npos && text.starts_with(prefix))
      found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  ::FreeEnvironmentStringsW(all);
  return found;
}

std::tm utc_of(std::time_t time) {
  std::tm utc{};
  ::gmtime_s(&utc, &time);
  return utc;
}

std::filesystem::path program_in(const std::filesystem::path& folder, const std::string& name) {
  const std::filesystem::path path = folder / (name + ".exe");
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) ? path : std::filesystem::path();
}

Finished run_program(const std::vector<std::string>& command) {
  std::wstring line;
  for (const std::string& argument : command) {
    if (!line.empty()) line += L' ';
    line += quoted_argument(utf16_of(argument));
  }
  SECURITY_ATTRIBUTES inherited{sizeof inherited, nullptr, TRUE};
  HANDLE ours = nullptr, theirs = nullptr;
  if (!::CreatePipe(&ours, &theirs, &inherited, 0))
    throw Error(ErrorCode::io, fmt::format("cannot make a pipe: {}", last_windows_error()));
  ::SetHandleInformation(ours, HANDLE_FLAG_INHERIT, 0);
  STARTUPINFOW start{};
  start.cb = sizeof start;
  start.dwFlags = STARTF_USESTDHANDLES;
  start.hStdOutput = start.hStdError = theirs;
  start.hStdInput = ::GetStdHandle(STD_INPUT_HANDLE);
  PROCESS_INFORMATION process{};
  const bool started = ::CreateProcessW(utf16_of(command.front()).c_str(), line.data(), nullptr, nullptr,
                                        TRUE, 0, nullptr, nullptr, &start, &process) != 0;
  const std::string problem = started ? std::string() : last_windows_error();
  ::CloseHandle(theirs);
  std::string output = started ? read_to_end(ours) : std::string();
  ::CloseHandle(ours);
  if (!started) throw Error(ErrorCode::io, fmt::format("cannot start '{}': {}", command.front(), problem));
  DWORD code = 0;
  ::WaitForSingleObject(process.hProcess, INFINITE);
  ::GetExitCodeProcess(process.hProcess, &code);
  ::CloseHandle(process.hProcess);
  ::CloseHandle(process.hThread);
  return {static_cast<int>(code), std::move(output)};
}

}  // namespace flashjit::command

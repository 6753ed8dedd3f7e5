#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "flashjit/error.hpp"
#include "system.hpp"

namespace flashjit::command {

std::vector<std::string> program_arguments(int argc, char** argv) { return {argv, argv + argc}; }

// Opened the wrong way round: using such a stream still fails.
void prepare_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) == -1) ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

bool is_terminal(Stream stream) { return ::isatty(static_cast<int>(stream)) != 0; }

bool at_first_interrupt(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  return ::sigaction(SIGINT, &action, nullptr) == 0;
}

std::map<std::string, std::string> variables_with_prefix(std::string_view prefix) {
  std::map<std::string, std::string> found;
  for (char** variable = environ; variable && *variable; ++variable) {
    const std::string_view text = *variable;
    const std::size_t equals = text.find('=');
    if (equals != std::string_view::npos && text.starts_with(prefix))
      found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

std::tm utc_of(std::time_t time) {
  std::tm utc{};
  ::gmtime_r(&time, &utc);
  return utc;
}

std::filesystem::path program_in(const std::filesystem::path& folder, const std::string& name) {
  const std::filesystem::path path = folder / name;
  return ::access(path.c_str(), X_OK) == 0 ? path : std::filesystem::path();
}

Finished run_program(const std::vector<std::string>& command) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw Error(ErrorCode::io, "cannot make a pipe: too many open files");
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  ::posix_spawn_file_actions_addclose(&actions, ends[0]);
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int problem =
      ::posix_spawn(&child, command.front().c_str(), &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  std::string output;
  std::array<char, 65536> buffer;
  for (ssize_t got = 0; problem == 0 && (got = ::read(ends[0], buffer.data(), buffer.size())) != 0;) {
    if (got > 0)
      output.append(buffer.data(), static_cast<std::size_t>(got));
    else if (errno != EINTR)
      break;
  }
  ::close(ends[0]);
  if (problem != 0) throw Error(ErrorCode::io, fmt::format("cannot start '{}'", command.front()));
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, std::move(output)};
}

}  // namespace flashjit::command

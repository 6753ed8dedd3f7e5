// What the command asks of the system at hand.
#pragma once

#include <ctime>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit::command {

/// The arguments in UTF-8, the program's name first.
std::vector<std::string> program_arguments(int argc, char** argv);

/// Takes the numbers of standard streams that are closed, so that no file gets one, and texts that are
/// printed with it. Standard output gets the bytes that are written to it, and lines that end in \n
/// everywhere.
void prepare_streams();

enum class Stream : int { in = 0, out = 1, error = 2 };
bool is_terminal(Stream stream);

/// Calls it at the first Ctrl-C; the second ends the process.
bool at_first_interrupt(void (*handler)(int));

/// The variables of this process's environment whose names begin with `prefix`, for diagnosis: what flashjit
/// obeys is read by support/environment.
std::map<std::string, std::string> variables_with_prefix(std::string_view prefix);

std::tm utc_of(std::time_t time);

/// The file of the program of this name in the folder; empty: there is none that can be started.
std::filesystem::path program_in(const std::filesystem::path& folder, const std::string& name);

struct Finished {
  int exit_code;       ///< -1: it was ended
  std::string output;  ///< stdout and stderr
};
/// Runs a program to its end. Throws Error(io) when it cannot be started.
Finished run_program(const std::vector<std::string>& command);

}  // namespace flashjit::command

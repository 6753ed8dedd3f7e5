// What the subcommands of `flashjit` share: how they are added, how they print, what they exit with.
//
// A subcommand is one file with one function `void add_<name>(CLI::App& app, Context& context)`: it declares
// its options and leaves its work in context.action. main.cpp parses, runs the action, and turns errors into
// exit codes.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"
#include "tools/parts/suite.hpp"

namespace flashjit::command {

using Json = nlohmann::ordered_json;

/// Exit codes of the process.
inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;  ///< a comparison or verification said no
inline constexpr int kBadInput = 2;     ///< usage, values or files
inline constexpr int kLacking = 3;      ///< no driver, no GPU, no NVRTC, or a kernel that may not be compiled
inline constexpr int kFailed = 4;       ///< the driver, a compile or flashjit itself failed
inline constexpr int kInterrupted = 130;

int exit_code(ErrorCode code);

/// What main and the subcommand that was chosen tell each other.
struct Context {
  bool json = false;            ///< --json: one JSON document on stdout and nothing else there
  std::function<int()> action;  ///< the chosen subcommand's work; returns the exit code
};

/// A subcommand with --help (ending in `example`) and --json; `action` becomes context.action when it is
/// chosen.
CLI::App* add_subcommand(CLI::App& parent, Context& context, const std::string& name,
                         const std::string& description, const std::string& example,
                         std::function<int()> action);

// One a file; main.cpp calls them in the order of the help.
void add_run(CLI::App& app, Context& context);
void add_verify(CLI::App& app, Context& context);
void add_tune(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_pack(CLI::App& app, Context& context);
void add_cache(CLI::App& app, Context& context);
void add_inspect(CLI::App& app, Context& context);
void add_doctor(CLI::App& app, Context& context);

/// Whether Ctrl-C was pressed since the first question. Until then, and at the second Ctrl-C, it ends the
/// process: long work that can keep what it has asks between steps and returns kInterrupted.
bool interrupted();

/// Whether files can be made in the folder, by making one, which does not stay, nor a folder that was not
/// there.
bool can_keep_files(const std::filesystem::path& folder);

/// One JSON document on stdout, in ASCII: what it quotes may hold anything.
void print_json(const Json& document);
/// A line on stderr: "flashjit: <message>".
void warn(std::string_view message);

/// Rows of text under a header, printed with aligned columns; columns of numbers are aligned to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  std::string text() const;
  void print() const;  ///< on stdout

 private:
  std::vector<std::vector<std::string>> rows_;  // the first is the header
};

/// Progress on stderr: a bar with the time left on a terminal, one line a step elsewhere, or everywhere where
/// several work side by side. Not for several threads at once: the caller holds its own lock.
class Progress {
 public:
  Progress(std::string what, std::size_t total, bool lines_only = false);
  ~Progress();  ///< ends the bar's line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(std::string_view item);                                     ///< one item is done
  void at(std::size_t done, std::size_t total, std::string_view item);  ///< where both are known elsewhere

 private:
  std::string what_;
  std::size_t total_, done_ = 0;
  bool terminal_;
  double start_;
};

/// A spec and, where the command needs or has one, a shape.
using Problem = autotune::SuiteProblem;
using autotune::parse_passes;
/// For --help: the passes that parse_passes() gives.
inline constexpr std::string_view kPassesOfSpec =
    "both passes unless it begins with fwd: or bwd:, or has a forward pass alone";
/// Throws Error(invalid_argument) where the spec is of another pass than attention's two: what this command
/// cannot run.
void require_attention(const KernelSpec& spec);
/// The same for commands that measure: passes of tangents are possible, too.
void require_tuned(const KernelSpec& spec);

/// parse_suite() of a file. Throws Error(io) too.
std::vector<Problem> read_suite(const std::filesystem::path& path);

/// An option's text has to be a whole number below 2^64.
CLI::Validator whole_number();

/// "1.5 MiB".
std::string format_bytes(std::uintmax_t bytes);
/// "12.3": three significant digits, for tables.
std::string format_ms(double ms);

/// Seconds of a monotonic clock.
double seconds_now();

}  // namespace flashjit::command

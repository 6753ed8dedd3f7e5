// The `flashjit` command: parses, runs the chosen subcommand, and turns errors into messages and exit codes.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "command.hpp"
#include "support/stderr.hpp"
#include "support/text.hpp"
#include "system.hpp"

namespace flashjit::command {
namespace {

void report(const Context& context, ErrorCode code, const std::string& message, const std::string& detail) {
  warn(message);
  if (!detail.empty()) write_to_stderr(fmt::format("{}\n", detail));
  if (!context.json) return;
  print_json({{"error", {{"code", to_string(code)}, {"message", message}, {"detail", detail}}}});
}

int perform(const Context& context) {
  try {
    return context.action();
  } catch (const Error& error) {
    report(context, error.code(), error.message(), error.detail());
    return exit_code(error.code());
  } catch (const std::exception& error) {
    report(context, ErrorCode::internal, error.what(), {});
    return kFailed;
  }
}

/// CLI11 says that a subcommand is missing when it does not know the one given.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<const CLI::App*> chosen =
      app.get_subcommands([](const CLI::App* part) { return part->parsed(); });
  if (chosen.empty() && !app.remaining().empty())
    return fmt::format("there is no subcommand {}; `flashjit --help` lists them",
                       flashjit::quoted(app.remaining().front()));
  return fmt::format("{}; `flashjit{} --help` shows what is allowed", error.what(),
                     chosen.empty() ? "" : " " + chosen.front()->get_name());
}

int parse(CLI::App& app, Context& context, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return kOk;
  } catch (const CLI::Success& asked_for_help) {
    return app.exit(asked_for_help);
  } catch (const CLI::ParseError& error) {
    context.json = std::find(argv, argv + argc, std::string_view("--json")) != argv + argc;
    report(context, ErrorCode::invalid_argument, usage_message(app, error), {});
    return kBadInput;
  }
}

int command(int argc, char** argv) {
  CLI::App app("Attention kernels generated, compiled at run time, tuned and cached.", "flashjit");
  app.set_version_flag("--version", fmt::format("flashjit {}", library_version()));
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 a check failed, 2 bad usage or input, 3 no GPU, driver, NVRTC or kernel, 4 a "
      "failure.");

  Context context;
  for (auto add : {add_run, add_verify, add_tune, add_bench, add_pack, add_cache, add_inspect, add_doctor})
    add(app, context);

  const int parsed = parse(app, context, argc, argv);
  if (parsed != kOk || !context.action) return parsed;
  const int code = perform(context);
  if (std::fflush(stdout) == 0) return code;
  warn("standard output could not be written; the results are incomplete");
  return kFailed;
}

}  // namespace
}  // namespace flashjit::command

int main(int argc, char** argv) {
  try {
    flashjit::command::prepare_streams();
    std::vector<std::string> arguments = flashjit::command::program_arguments(argc, argv);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    return flashjit::command::command(static_cast<int>(pointers.size()), pointers.data());
  } catch (const std::exception& error) {
    flashjit::command::warn(error.what());
    return flashjit::command::kFailed;
  }
}

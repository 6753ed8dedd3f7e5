#include "command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>

#include "support/file.hpp"
#include "support/stderr.hpp"
#include "support/text.hpp"
#include "system.hpp"

namespace flashjit::command {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::unsupported:
    case ErrorCode::io:
      return kBadInput;
    case ErrorCode::no_driver:
    case ErrorCode::no_device:
    case ErrorCode::no_compiler:
    case ErrorCode::kernel_missing:
      return kLacking;
    case ErrorCode::compile_failed:
    case ErrorCode::cuda:
    case ErrorCode::internal:
      break;
  }
  return kFailed;
}

CLI::App* add_subcommand(CLI::App& parent, Context& context, const std::string& name,
                         const std::string& description, const std::string& example,
                         std::function<int()> action) {
  CLI::App* app = parent.add_subcommand(name, description);
  app->add_flag("--json", context.json, "Print one JSON document instead of a table");
  app->footer("Example:\n  " + example);
  app->callback([&context, action = std::move(action)] { context.action = action; });
  return app;
}

namespace {

// A signal handler reaches nothing but an object of static storage; threads ask it, too.
std::atomic<bool> interrupt_seen = false;
static_assert(std::atomic<bool>::is_always_lock_free);

void on_interrupt(int) { interrupt_seen = true; }

}  // namespace

bool interrupted() {
  static const bool watching = at_first_interrupt(on_interrupt);
  return watching && interrupt_seen;
}

bool can_keep_files(const std::filesystem::path& folder) {
  std::error_code problem;
  const bool made = std::filesystem::create_directories(folder, problem);
  const std::filesystem::path probe = folder / fmt::format(".probe-{}", unique_suffix());
  try {
    write_file_atomically(probe, "");
  } catch (const Error&) {
    return false;
  }
  std::filesystem::remove(probe, problem);
  if (made) std::filesystem::remove(folder, problem);
  return true;
}

void print_json(const Json& document) {
  fmt::print("{}\n", document.dump(2, ' ', true, Json::error_handler_t::replace));
}

void warn(std::string_view message) { write_to_stderr(fmt::format("flashjit: {}\n", message)); }

Table::Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }

void Table::add(std::vector<std::string> row) {
  row.resize(rows_.front().size());
  rows_.push_back(std::move(row));
}

namespace {

bool looks_numeric(const std::string& cell) {
  return cell.empty() || cell == "-" || cell == "inf" ||
         std::isdigit(static_cast<unsigned char>(cell.front()));
}

}  // namespace

std::string Table::text() const {
  const std::size_t columns = rows_.front().size();
  std::vector<std::size_t> width(columns, 0);
  std::vector<bool> numeric(columns, rows_.size() > 1);
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    for (std::size_t c = 0; c < columns; ++c) {
      width[c] = std::max(width[c], rows_[r][c].size());
      if (r > 0 && !looks_numeric(rows_[r][c])) numeric[c] = false;
    }
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t c = 0; c < columns; ++c) {
      const std::string gap = c + 1 < columns ? "  " : "";
      line += numeric[c] ? fmt::format("{:>{}}{}", row[c], width[c], gap)
                         : fmt::format("{:<{}}{}", row[c], width[c], gap);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return text;
}

void Table::print() const { fmt::print("{}", text()); }

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Progress::Progress(std::string what, std::size_t total, bool lines_only)
    : what_(std::move(what)),
      total_(total),
      terminal_(!lines_only && is_terminal(Stream::error)),
      start_(seconds_now()) {}

Progress::~Progress() {
  if (terminal_ && done_ > 0) write_to_stderr("\n");
}

void Progress::step(std::string_view item) { at(done_ + 1, total_, item); }

void Progress::at(std::size_t done, std::size_t total, std::string_view item) {
  done_ = done;
  total_ = total;
  if (!terminal_) {
    write_to_stderr(fmt::format("{} {}/{}: {}\n", what_, done_, total_, item));
    return;
  }
  constexpr std::size_t kBar = 24;
  const std::size_t filled = total_ ? std::min(kBar, kBar * done_ / total_) : kBar;
  const double left = (seconds_now() - start_) / static_cast<double>(std::max<std::size_t>(done_, 1)) *
                      static_cast<double>(total_ > done_ ? total_ - done_ : 0);
  write_to_stderr(fmt::format("\r\033[K{} [{}{}] {}/{}, {:.0f} s left: {}", what_, std::string(filled, '#'),
                              std::string(kBar - filled, '.'), done_, total_, left, item.substr(0, 60)));
}

void require_tuned(const KernelSpec& spec) {
  if (is_attention(spec.pass)) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is not of attention: pack and inspect take it; give a spec of attention here",
                          to_string(spec)));
}

void require_attention(const KernelSpec& spec) {
  if (spec.pass == Pass::forward || spec.pass == Pass::backward) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is neither forward nor backward: pack, inspect, and of tangents bench and tune "
                          "take it; give such a spec here",
                          to_string(spec)));
}

std::vector<Problem> read_suite(const std::filesystem::path& path) {
  const auto refuse = [&](std::string_view why) {
    throw Error(ErrorCode::io,
                fmt::format("{} the suite file '{}'; give a text file with \"spec [shape]\" on "
                            "each line",
                            why, path.string()));
  };
  std::ifstream file(path);  // not read_file(): it may be a pipe
  std::string text, block(1 << 16, '\0');
  do {
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    text.append(block, 0, static_cast<std::size_t>(file.gcount()));
    if (text.size() > kStoredFileLimit)
      refuse(fmt::format("cannot take more than {} MiB of", kStoredFileLimit >> 20));
  } while (file);
  if (!file.is_open() || file.bad()) refuse("cannot read");
  return autotune::parse_suite(text, path.string());
}

CLI::Validator whole_number() {
  return {[](const std::string& text) {
            std::uint64_t value = 0;
            const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
            const bool whole = error == std::errc() && stop == text.data() + text.size();
            return whole ? std::string() : fmt::format("{} is no whole number below 2^64", quoted(text));
          },
          "UINT64"};
}

std::string format_bytes(std::uintmax_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  for (const char* unit : {"KiB", "MiB"}) {
    if (value < 1024) return fmt::format("{:.1f} {}", value, unit);
    value /= 1024;
  }
  return fmt::format("{:.1f} GiB", value);
}

std::string format_ms(double ms) {
  if (ms >= 100) return fmt::format("{:.0f}", ms);
  if (ms >= 10) return fmt::format("{:.1f}", ms);
  return fmt::format("{:.3f}", ms);
}

}  // namespace flashjit::command

#include "tools/parts/suite.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "flashjit/error.hpp"
#include "plan/spec_options.hpp"

namespace flashjit::autotune {
namespace {

/// The spec that a line of a suite begins with: it ends at a blank, but for those in a program's braces.
std::string_view leading_spec(std::string_view line) {
  int depth = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '{') ++depth;
    if (line[i] == '}') --depth;
    if (depth <= 0 && std::isspace(static_cast<unsigned char>(line[i]))) return line.substr(0, i);
  }
  return line;
}

/// What follows the spec, if anything.
std::optional<AttentionShape> parse_rest(const std::string& rest) {
  std::istringstream words(rest);
  std::string shape, extra;
  words >> shape >> extra;
  if (!extra.empty())
    throw Error(ErrorCode::invalid_argument,
                fmt::format("'{}' is left over; a line holds a spec and, if wanted, a shape", extra));
  if (shape.empty()) return {};
  const AttentionShape sizes = parse_shape(shape);
  sizes.validate();
  return sizes;
}

void add_line(std::string line, std::vector<SuiteProblem>& problems) {
  line.resize(std::min(line.find('#'), line.size()));
  line.erase(0, std::min(line.find_first_not_of(" \t\r"), line.size()));
  const std::string spec(leading_spec(line));
  if (spec.empty()) return;
  const std::optional<AttentionShape> shape = parse_rest(line.substr(spec.size()));
  for (const KernelSpec& pass : parse_passes(spec)) problems.push_back({pass, shape});
}

}  // namespace

std::vector<KernelSpec> parse_passes(std::string_view spec_text) {
  const KernelSpec spec = parse_spec(spec_text);
  if (plan::names_pass(spec_text)) return {spec.normalized()};
  std::vector<KernelSpec> passes = {KernelSpec{spec, Pass::forward}.normalized()};
  try {
    const KernelSpec backward{spec, Pass::backward};
    backward.validate();
    passes.push_back(backward.normalized());
  } catch (const Error&) {  // the spec, which is right, has a forward pass alone
  }
  return passes;
}

std::vector<SuiteProblem> parse_suite(std::string_view text, std::string_view name) {
  std::vector<SuiteProblem> problems;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    try {
      add_line(line, problems);
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}:{}: {}", name, number, error.message()), error.detail());
    }
  }
  if (problems.empty())
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the suite file '{}' holds no spec; write one a line, such as "
                            "\"bf16:d128:causal b1:hq16:hkv16:sq4096:skv4096\"",
                            name));
  return problems;
}

}  // namespace flashjit::autotune

// What README.md and tools/docs repeat from the code is what the code says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "plan/spec_options.hpp"
#include "support/built.hpp"
#include "support/environment.hpp"

namespace flashjit {
namespace {

using Rows = std::vector<std::pair<std::string, std::string>>;

std::string read(const std::string& file) {
  std::ifstream in(test::sources() + "/" + file);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// The rows "| `NAME` | description |".
Rows environment_table() {
  static const std::regex kRow(R"(^\| `([A-Z_]+)` \| (.*) \|$)");
  std::istringstream in(read("tools/docs/environment.md"));
  Rows rows;
  std::smatch match;
  for (std::string line; std::getline(in, line);) {
    if (std::regex_match(line, match, kRow)) rows.emplace_back(match[1], match[2]);
  }
  return rows;
}

TEST(Readme, EnvironmentTableIsTheListInTheCode) {
  Rows expected;
  for (const EnvironmentVariable& variable : environment_variables()) {
    expected.emplace_back(variable.name, variable.description);
  }
  ASSERT_FALSE(expected.empty());
  EXPECT_EQ(environment_table(), expected);
}

TEST(Readme, PageOfTheCommandNamesEveryOptionOfASpec) {
  const std::string page = read("tools/docs/command.md");
  for (const plan::SpecOption& option : plan::kSpecOptions)
    EXPECT_NE(page.find("`" + std::string(option.text) + "`"), std::string::npos) << option.text;
}

std::string without_comments(const std::string& code, const std::string& comment) {
  std::istringstream in(code);
  std::string text;
  for (std::string line; std::getline(in, line);) text += line.substr(0, line.find(comment)) + "\n";
  return text;
}

std::string without_spaces(std::string code) {
  std::erase_if(code, [](unsigned char c) { return std::isspace(c); });
  return code;
}

/// The README's first code block of a language below a heading.
std::string code_block(const std::string& heading, const std::string& language) {
  const std::string page = read("README.md"), fence = "```" + language + "\n";
  const std::size_t begin = page.find(fence, page.find("\n## " + heading + "\n")) + fence.size();
  return page.substr(begin, page.find("```", begin) - begin);
}

std::vector<std::string> split_at(std::string text, const std::string& end) {
  std::vector<std::string> found;
  for (std::size_t at = 0; (at = text.find(end)) != std::string::npos; text.erase(0, at + end.size())) {
    found.push_back(text.substr(0, at));
  }
  found.push_back(text);
  return found;
}

TEST(Readme, IsOneScreenOrTwo) {
  const std::string page = read("README.md");
  EXPECT_LE(std::count(page.begin(), page.end(), '\n'), 120);
}

TEST(Readme, TenLinesAreTheExamples) {
  const std::string example = without_spaces(without_comments(read("tools/examples/ten_lines.cpp"), "//"));
  const auto statements = split_at(without_comments(code_block("C++", "cpp"), "//"), ";");
  EXPECT_GE(statements.size(), 8u);
  for (const std::string& statement : statements) {
    EXPECT_NE(example.find(without_spaces(statement)), std::string::npos) << statement;
  }
}

TEST(Readme, TheMaskIsTheExamples) {
  const std::string example = without_spaces(read("tools/examples/python/custom_attention.py"));
  const auto parts = split_at(code_block("A mask that no library has", "python"), "\n\n");
  EXPECT_EQ(parts.size(), 3u);
  for (const std::string& part : parts) {
    EXPECT_NE(example.find(without_spaces(part)), std::string::npos) << part;
  }
}

}  // namespace
}  // namespace flashjit

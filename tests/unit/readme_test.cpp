// The README's table of environment variables is the list in runtime/support/environment.cpp.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "support/environment.hpp"

namespace flashjit {
namespace {

using Rows = std::vector<std::pair<std::string, std::string>>;

/// The rows "| `NAME` | description |" below the heading "## Environment".
Rows environment_table() {
  static const std::regex kRow(R"(^\| `([A-Z_]+)` \| (.*) \|$)");
  std::ifstream in(FLASHJIT_SOURCE_DIR "/README.md");
  Rows rows;
  bool inside = false;
  std::string line;
  std::smatch match;
  while (std::getline(in, line)) {
    if (line.starts_with("#")) inside = line == "## Environment";
    if (inside && std::regex_match(line, match, kRow)) rows.emplace_back(match[1], match[2]);
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

}  // namespace
}  // namespace flashjit

// Every parser of what comes from outside: what it reads comes back, and what is a little wrong is refused
// with an Error. The same inputs every time; tests/fuzz looks for more.
#include "tests/support/parsers.hpp"

#include <gtest/gtest.h>

#include <array>
#include <ctime>
#include <random>
#include <string>
#include <vector>

namespace flashjit {
namespace {

using test::Outcome;
using test::Parser;
using test::parsers;

/// One to three small accidents.
std::string damaged(std::string text, std::mt19937_64& random) {
  const auto below = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  for (std::size_t times = 1 + below(3); times > 0 && !text.empty(); --times) {
    const std::size_t at = below(text.size());
    switch (below(6)) {
      case 0:
        text.erase(at, 1 + below(4));
        break;
      case 1:
        text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.insert(at, 1, "0123456789-:{}[],\"e."[below(20)]);
        break;
      case 3:
        text.insert(at, text.substr(below(text.size()), below(30)));
        break;
      case 4:
        text.resize(at);
        break;
      default:
        std::swap(text[at], text[below(text.size())]);
        break;
    }
  }
  return text;
}

class AnyParser : public testing::TestWithParam<Parser> {};
INSTANTIATE_TEST_SUITE_P(All, AnyParser, testing::ValuesIn(parsers()),
                         [](const auto& parser) { return parser.param.name; });

TEST_P(AnyParser, ReadsWhatItWrote) {
  for (const std::string& seed : GetParam().seeds) EXPECT_EQ(GetParam().read(seed), Outcome::read) << seed;
}

TEST_P(AnyParser, SurvivesDamage) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 4000; ++i)
    for (const std::string& seed : GetParam().seeds) {
      const std::string text = damaged(seed, random);
      ASSERT_NE(GetParam().read(text), Outcome::broken) << text;
    }
}

TEST_P(AnyParser, SurvivesBytesAtRandom) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 10000; ++i) {
    std::string text(random() % 100, ' ');
    for (char& c : text) c = static_cast<char>(random());
    ASSERT_NE(GetParam().read(text), Outcome::broken) << text;
  }
}

/// `unit` with "#" as a number that counts, up to about `bytes`.
std::string repeated(const std::string& begin, const std::string& unit, const std::string& end,
                     std::size_t bytes) {
  std::string text = begin;
  for (std::size_t i = 0; text.size() + unit.size() + end.size() + 8 < bytes; ++i) {
    std::string next = unit;
    if (const std::size_t at = next.find('#'); at != next.npos) next.replace(at, 1, std::to_string(i));
    text += next;
  }
  return text + end;
}

// A limit of bytes bounds no time where a parser goes over what it has again and again.
TEST_P(AnyParser, ReadsItsLargestInputSoon) {
  const std::string& name = GetParam().name;
  const std::size_t bytes = name.starts_with("meta") || name == "record" ? kMaxJsonBytes : 1 << 20;
  std::vector<std::string> largest;
  for (const auto& [begin, unit, end] : std::vector<std::array<std::string, 3>>{{"[", "{},", "0]"},
                                                                                {"[", "[],", "0]"},
                                                                                {"{", "\"#\":0,", "\"\":0}"},
                                                                                {"[", "#,", "0]"},
                                                                                {"\"", "\\\"", "\""},
                                                                                {"", "9", ""},
                                                                                {"", "#.5e-7", ""},
                                                                                {"", "-", ""},
                                                                                {"", "a", ""},
                                                                                {"", "a#:", ""},
                                                                                {"", "a #\n", ""},
                                                                                {"", "\n", ""},
                                                                                {"", "score + ", "1"},
                                                                                {"", "(1 + ", "1"},
                                                                                {"", "\xff", ""},
                                                                                {"", "# ", ""}})
    largest.push_back(repeated(begin, unit, end, bytes));
  for (const std::string& seed : GetParam().seeds) largest.push_back(repeated("", seed + "\n", "", bytes));
  for (const std::string& text : largest) {
    const std::clock_t begin = std::clock();  // CPU time: other processes do not count
    ASSERT_NE(GetParam().read(text), Outcome::broken) << text.substr(0, 40);
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    EXPECT_LT(seconds, 10) << name << " " << text.substr(0, 40);
  }
}

TEST(Json, LengthAndDepthHaveLimits) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_NO_THROW(parse_json(nested(kMaxJsonDepth)));
  EXPECT_THROW(parse_json(nested(kMaxJsonDepth + 1)), Error);
  EXPECT_NO_THROW(parse_json(R"({"a": "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\\"[[[[[[[[[[[[[[["})"));
  EXPECT_NO_THROW(parse_json(std::string(kMaxJsonBytes - 1, ' ') + "0"));
  EXPECT_THROW(parse_json(std::string(kMaxJsonBytes, ' ') + "0"), Error);
}

// Recursion over a document a million levels deep would exhaust the stack.
TEST_P(AnyParser, SurvivesDepth) {
  constexpr std::size_t kDepth = 1000000;
  const auto nested = [](const std::string& open, const std::string& inner, const std::string& close) {
    std::string text;
    for (std::size_t i = 0; i < kDepth; ++i) text += open;
    text += inner;
    for (std::size_t i = 0; i < kDepth; ++i) text += close;
    return text;
  };
  for (const std::string& text :
       {nested("[", "", "]"), nested("{\"kernel\":", "1", "}"), nested("(", "score", ")"),
        nested("-", "1", ""), "{\"format\":2,\"digest\":\"\",\"kernel\":" + nested("[", "", "]") + "}",
        "{\"format\":" + nested("[", "", "]") + "}"})
    EXPECT_EQ(GetParam().read(text), Outcome::refused) << text.substr(0, 60);
}

}  // namespace
}  // namespace flashjit

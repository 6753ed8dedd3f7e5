// Every parser of what comes from outside: what it reads comes back, and what is a little wrong is refused
// with an Error. The same inputs every time; tests/fuzz looks for more.
#include "tests/support/parsers.hpp"

#include <gtest/gtest.h>

#include <random>

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

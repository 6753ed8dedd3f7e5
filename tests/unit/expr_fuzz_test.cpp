// Bytes that are no programs, and programs that lost or won some: refused or read, and never worse. The same
// ones every time; tests/fuzz looks for more.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "tests/support/program_text.hpp"
#include "tests/support/random_program.hpp"

namespace flashjit {
namespace {

using test::Outcome;
using test::read_program;
using test::read_spec;

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }

  std::string bytes(std::size_t count, std::string_view alphabet) {
    std::string out(count, ' ');
    for (char& c : out)
      c = alphabet.empty() ? static_cast<char>(below(256)) : alphabet[below(alphabet.size())];
    return out;
  }

  /// Pieces of the language in any order.
  std::string words(std::size_t count) {
    static constexpr std::string_view kWords[] = {
        "score", "q",      "kv",         "h",    "b",           "causal",  "1",
        "0",     "-1",     "2147483648", "1e39", "1.5",         ".",       "e",
        "true",  "select", "min",        "exp",  "to_float",    "to_int",  "(",
        ")",     "[",      "]",          ",",    ";",           ":",       "?",
        "+",     "-",      "*",          "/",    "%",           "<<",      ">>",
        "<",     "<=",     "==",         "&&",   "||",          "&",       "|",
        "^",     "!",      "~",          "t",    "t: fp32 1d;", "n: int;", "u: bf16 2d grad;",
        "grad",  "fp32",   "2d",         "t[h]", "n",           " ",       "{",
        "}",     "\n"};
    std::string out;
    for (std::size_t i = 0; i < count; ++i) out += std::string(kWords[below(std::size(kWords))]) + " ";
    return out;
  }

  std::string mutated(std::string text) {
    for (std::size_t times = 1 + below(2); times > 0 && !text.empty(); --times) {
      const std::size_t at = below(text.size());
      switch (below(5)) {
        case 0:
          text.erase(at, 1 + below(4));
          break;
        case 1:
          text.insert(at, bytes(1, "()[]{}+-*/%<>=&|^!~?:;,.0123456789eqkvhbscore "));
          break;
        case 2:
          text[at] = static_cast<char>(below(256));
          break;
        case 3:
          text.insert(at, text.substr(below(text.size()), below(20)));
          break;
        default:
          std::swap(text[at], text[below(text.size())]);
          break;
      }
    }
    return text;
  }

 private:
  std::mt19937_64 random_;
};

TEST(ExprFuzz, RandomBytesAreRefused) {
  Mutator mutator(1);
  for (int i = 0; i < 20000; ++i) {
    const std::string text = mutator.bytes(mutator.below(60), {});
    ASSERT_NE(read_program(text), Outcome::broken) << text;
    ASSERT_NE(read_spec("bf16:d64:score{" + text + "}"), Outcome::broken) << text;
  }
}

TEST(ExprFuzz, RandomWordsAreReadOrRefused) {
  Mutator mutator(2);
  int read = 0;
  for (int i = 0; i < 40000; ++i) {
    const std::string text = mutator.words(1 + mutator.below(9));
    const Outcome outcome = read_program(text);
    ASSERT_NE(outcome, Outcome::broken) << text;
    read += outcome == Outcome::read;
    ASSERT_NE(read_spec("bf16:d64:mask{" + text), Outcome::broken) << text;
  }
  EXPECT_GT(read, 500);
}

TEST(ExprFuzz, MutatedProgramsAreReadOrRefused) {
  Mutator mutator(3);
  int read = 0;
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    test::RandomProgram programs(seed, {.depth = 4});
    const std::string text = mutator.mutated(to_string(programs.score_program()));
    const Outcome outcome = read_program(text);
    ASSERT_NE(outcome, Outcome::broken) << text;
    read += outcome == Outcome::read;
  }
  EXPECT_GT(read, 500);
  EXPECT_LT(read, 18000);
}

TEST(ExprFuzz, MutatedSpecsAreReadOrRefused) {
  Mutator mutator(4);
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    test::RandomProgram programs(seed, {.depth = 3});
    KernelSpec spec{{.head_dim = 64, .dropout = seed % 2 == 0}};
    spec.score = programs.score_program();
    spec.mask = programs.mask_program();
    const std::string text = mutator.mutated(to_string(spec));
    ASSERT_NE(read_spec(text), Outcome::broken) << text;
  }
}

}  // namespace
}  // namespace flashjit

#include "support/text.hpp"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "flashjit/error.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit {
namespace {

TEST(Text, SplitKeepsEmptyPieces) {
  using Pieces = std::vector<std::string_view>;
  EXPECT_EQ(split("a:b", ':'), (Pieces{"a", "b"}));
  EXPECT_EQ(split("", ':'), (Pieces{""}));
  EXPECT_EQ(split(":a:", ':'), (Pieces{"", "a", ""}));
}

TEST(Text, QuotedFitsOnOneLine) {
  EXPECT_EQ(quoted(std::string_view("a\nb\x7f")), "'a?b?'");
  EXPECT_EQ(quoted(std::string(100, 'x')), "'" + std::string(80, 'x') + "...'");
}

TEST(Text, WhatCannotBePrintedIsAQuestionMark) {
  EXPECT_EQ(printable("a\tb\x1b[2J\x7f"), "a?b?[2J?");
  EXPECT_EQ(printable("\u00e9\u2264\U0001f600"), "\u00e9\u2264\U0001f600");
  for (const char* wrong :
       {"\xff", "\x80", "\xc3", "\xc0\xaf", "\xe2\x82", "\xed\xa0\x80", "\xc2\x9b", "\xf4\x90\x80\x80"})
    EXPECT_EQ(printable(wrong), std::string(std::string_view(wrong).size(), '?'));
}

TEST(Text, WhatTurnsOrHidesItsNeighboursIsAQuestionMark) {
  for (const char* hidden : {"\u202e", "\u2066", "\u200f", "\u061c", "\u200b", "\u2028", "\u2029", "\ufeff",
                             "\u00ad", "\U000e0041"})
    EXPECT_EQ(printable(std::string("a") + hidden + "b"), "a?b");
  EXPECT_EQ(printable("\u200a\u2010\u2027\u202f\u205f\u2070"), "\u200a\u2010\u2027\u202f\u205f\u2070");
}

TEST(Text, ShellWordsAreQuotedWhereTheShellWouldReadThem) {
  EXPECT_EQ(shell_word("fwd:bf16:d64x32:causal_top_left"), "fwd:bf16:d64x32:causal_top_left");
  EXPECT_EQ(shell_word("fwd:bf16:d64:mask{q < kv}"), "'fwd:bf16:d64:mask{q < kv}'");
}

TEST(Text, IntegersAreReadWholeAndInRange) {
  EXPECT_EQ(parse_int("-12", "x", -20, 20), -12);
  EXPECT_EQ(parse_int("9223372036854775807", "x", 0, INT64_MAX), INT64_MAX);
  for (const char* bad :
       {"", "-", "+1", " 1", "1 ", "1x", "0x1", "1.0", "21", "-21", "9223372036854775808"}) {
    EXPECT_EQ(failure(ErrorCode::invalid_argument, [&] { parse_int(bad, "the size", -20, 20); }),
              "the size is " + quoted(std::string_view(bad)) + "; it must be an integer from -20 to 20");
  }
}

TEST(Text, Versions) {
  EXPECT_EQ(cuda_version_text(12040), "12.4");
  EXPECT_EQ(cuda_version_text(13000), "13.0");
  EXPECT_EQ(library_version(), FLASHJIT_VERSION);
}

}  // namespace
}  // namespace flashjit

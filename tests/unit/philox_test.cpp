// The generator against the known answers of Random123 (Salmon et al., 2011), and the layout of the dropout
// mask.
#include "templates/common/philox.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <vector>

namespace flashjit {
namespace {

using Words = std::array<unsigned, 4>;

Words words_of(const Philox4& value) { return {value.word[0], value.word[1], value.word[2], value.word[3]}; }

TEST(Philox, GivesRandom123sKnownAnswers) {
  EXPECT_EQ(words_of(philox4x32<10>(0, 0, 0, 0, 0, 0)),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words_of(philox4x32<10>(~0u, ~0u, ~0u, ~0u, ~0u, ~0u)),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words_of(philox4x32<10>(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0)),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  EXPECT_EQ(words_of(philox4x32<7>(0, 0, 0, 0, 0, 0)),
            (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(words_of(philox4x32<7>(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0)),
            (Words{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

TEST(DropoutWords, EveryPairOfAHeadHasAWordOfItsOwn) {
  std::set<std::tuple<unsigned, unsigned, unsigned, unsigned, int>> places;
  std::set<unsigned> values;
  constexpr int kLength = 96;
  for (int q = 0; q < kLength; ++q) {
    for (int kv = 0; kv < kLength; ++kv) {
      const Philox4 words = dropout_words(1, 2, 3, 4, 5, q, kv);
      const int index = dropout_word_index(q, kv);
      ASSERT_TRUE(index >= 0 && index < 4);
      places.emplace(words.word[0], words.word[1], words.word[2], words.word[3], index * 2 + (kv & 1));
      values.insert(words.word[index] >> kv % 2 * 16 & 0xffffu);
    }
  }
  EXPECT_EQ(places.size(), static_cast<std::size_t>(kLength * kLength));
  // 9216 draws of 65536 numbers leave 8606 different ones, give or take 22.
  EXPECT_NEAR(static_cast<double>(values.size()), 8606, 120);
}

TEST(DropoutWords, OneCallServesTheEightPairsOfAnAccumulatorCell) {
  const int q = 37, kv = 82;
  const Words words = words_of(dropout_words(9, 8, 7, 6, 5, q, kv));
  std::set<int> indices;
  for (int i : {q, q ^ 8}) {
    for (int j : {kv, kv ^ 1, kv ^ 8, kv ^ 9}) {
      EXPECT_EQ(words_of(dropout_words(9, 8, 7, 6, 5, i, j)), words);
      indices.insert(dropout_word_index(i, j) * 2 + (j & 1));
    }
  }
  EXPECT_EQ(indices.size(), 8u);
}

TEST(DropoutWords, APairIsDroppedWhereItsBitsAreInTheHighestShare) {
  for (const unsigned share : {0u, 1u, 0x0ccdu, 0x4000u, 0x7fffu}) {
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
      const bool dropped = (bits & 0x7fff) >= 0x8000 - share;
      for (const unsigned other : {0u, 0x7fffu, 0xffffu}) {  // never changes the other draws
        EXPECT_EQ(is_dropped(draw_dropped(bits | other << 16, share * 0x10001u), 0), dropped);
        EXPECT_EQ(is_dropped(draw_dropped(other | bits << 16, share * 0x10001u), 1), dropped);
      }
    }
  }
}

TEST(DropoutWords, EveryBitOfSeedOffsetAndHeadMatters) {
  std::set<Words> seen;
  constexpr int kInputs = 5;
  for (int input = -1; input < kInputs; ++input) {
    for (int bit = 0; bit < (input < 0 ? 1 : 32); ++bit) {
      std::array<unsigned, kInputs> in{11, 22, 33, 44, 55};
      if (input >= 0) in[input] ^= 1u << bit;
      seen.insert(words_of(dropout_words(in[0], in[1], in[2], in[3], in[4], 3, 4)));
    }
  }
  // seed_hi and offset_hi share a key word: flipping the same bit of either gives the same stream.
  EXPECT_EQ(seen.size(), 1u + 4 * 32);
}

}  // namespace
}  // namespace flashjit

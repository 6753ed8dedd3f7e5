// Values that the command, the tuner and the GPU tests draw for what a spec leaves to the call.
#include "reference/inputs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace flashjit::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Inputs, ValuesAreRoundedAndClampedToTheirType) {
  EXPECT_EQ(round_to(ElementType::fp32, 0.1), static_cast<double>(0.1f));
  EXPECT_EQ(round_to(ElementType::fp16, 1 + 0x1p-12), 1);
  EXPECT_EQ(round_to(ElementType::bf16, 1 + 0x1p-8), 1);
  EXPECT_EQ(round_to(ElementType::int32, -2.9), -2);
  EXPECT_EQ(round_to(ElementType::int32, 1e10), 2147483647);
  EXPECT_EQ(round_to(ElementType::int16, -1e10), -32768);
  EXPECT_EQ(round_to(ElementType::int8, 200), 127);
  EXPECT_EQ(round_to(ElementType::uint8, -3), 0);
  EXPECT_EQ(round_to(ElementType::int64, std::nan("")), 0);
  EXPECT_EQ(round_to(ElementType::boolean, 0.5), 1);
}

template <class T>
T encoded(ElementType type, double value) {
  const std::vector<std::byte> bytes = encode(type, {value});
  EXPECT_EQ(bytes.size(), sizeof(T));
  EXPECT_EQ(static_cast<int>(sizeof(T)), size_of(type));
  T element{};
  std::memcpy(&element, bytes.data(), std::min(sizeof element, bytes.size()));
  return element;
}

TEST(Inputs, EveryTypeIsEncoded) {
  EXPECT_EQ(encoded<float>(ElementType::fp32, 1.5), 1.5f);
  EXPECT_EQ(encoded<std::uint16_t>(ElementType::fp16, 1.0), 0x3c00);
  EXPECT_EQ(encoded<std::uint16_t>(ElementType::bf16, 1.0), 0x3f80);
  EXPECT_EQ(encoded<std::int32_t>(ElementType::int32, -7), -7);
  EXPECT_EQ(encoded<std::int64_t>(ElementType::int64, -kInfinity), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(encoded<std::int64_t>(ElementType::int64, kInfinity), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(encoded<std::int16_t>(ElementType::int16, 300), 300);
  EXPECT_EQ(encoded<std::int8_t>(ElementType::int8, -128), -128);
  EXPECT_EQ(encoded<std::uint8_t>(ElementType::uint8, 255), 255);
  EXPECT_EQ(encoded<std::uint8_t>(ElementType::boolean, 1), 1);
}

TEST(Inputs, OffsetsHaveALongestAndAnEmptySequence) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const std::vector<std::int32_t> offsets = random_offsets(5, 70, 2, seed);
    ASSERT_EQ(offsets.size(), 6u);
    EXPECT_EQ(offsets[0], 0);
    EXPECT_EQ(offsets[1], 70);
    EXPECT_EQ(offsets[3], offsets[2]);
    for (int i = 0; i < 5; ++i) {
      EXPECT_GE(offsets[i + 1], offsets[i]);
      EXPECT_LE(offsets[i + 1], offsets[i] + 70);
    }
    EXPECT_EQ(random_offsets(5, 70, 2, seed), offsets);
  }
  EXPECT_EQ(random_offsets(0, 70, 1, 1), std::vector<std::int32_t>{0});
}

TEST(Inputs, CapturesAreAsProgramsReadThem) {
  const auto only = [](const char* mask) {
    AttentionSpec spec{.head_dim = 64, .mask = MaskProgram(mask)};
    const std::vector<Captured> captures = plausible_captures(spec, {2, 6, 3, 400, 500}, 7);
    EXPECT_EQ(captures.size(), 1u);
    return captures.front();
  };
  const Captured ids = only("ids: int32 2d; ids[b, q] == ids[b, kv]");
  EXPECT_EQ(ids.size, (std::vector<std::int64_t>{2, 500}));
  for (const std::int64_t row : {0, 500}) {
    const auto begin = ids.values.begin() + row;
    EXPECT_EQ(*begin, 0);
    EXPECT_TRUE(std::is_sorted(begin, begin + 500)) << "documents follow each other";
  }
  EXPECT_NE(std::vector(ids.values.begin(), ids.values.begin() + 500),
            std::vector(ids.values.begin() + 500, ids.values.end()));

  const Captured valid = only("valid: bool 2d; valid[b, kv] && kv <= q");
  EXPECT_EQ(valid.size, (std::vector<std::int64_t>{2, 500}));
  for (const std::int64_t row : {0, 500}) {
    const auto begin = valid.values.begin() + row;
    EXPECT_TRUE(std::is_sorted(begin, begin + 500, std::greater())) << "padding stands behind";
    EXPECT_GE(std::count(begin, begin + 500, 1.0), 250);
  }

  EXPECT_EQ(only("first: int32 1d; kv >= first[b]").size, std::vector<std::int64_t>{2});
  EXPECT_EQ(only("w: int32 2d; q - kv < w[h_kv, h]").size, (std::vector<std::int64_t>{3, 6}));
  const Captured pairs = only("keep: bool 2d; keep[q, kv]");
  EXPECT_EQ(pairs.size, (std::vector<std::int64_t>{400, 500}));
  EXPECT_FALSE(std::is_sorted(pairs.values.begin(), pairs.values.begin() + 500, std::greater()));
  EXPECT_EQ(only("table: int32 1d; kv < table[q / 4]").size, std::vector<std::int64_t>{500})
      << "of the longest, where an index is no name";
}

TEST(Inputs, ProgramsWithoutNamesNeedNoCaptures) {
  EXPECT_TRUE(plausible_captures({.head_dim = 64, .mask = causal()}, {1, 1, 1, 8, 8}, 1).empty());
}

}  // namespace
}  // namespace flashjit::reference

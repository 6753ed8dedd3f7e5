#include "tools/parts/npy.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "flashjit/error.hpp"
#include "support/built.hpp"
#include "support/file.hpp"

namespace flashjit::npy {
namespace {

/// A file made by hand: version 1 with this header and data.
std::string file_with(const std::string& header, const std::string& data, char major = 1) {
  const auto byte = [](std::size_t value) { return static_cast<char>(value & 0xff); };
  std::string file = "\x93NUMPY";
  file += {major, '\0', byte(header.size()), byte(header.size() >> 8)};
  if (major >= 2) file += {byte(header.size() >> 16), byte(header.size() >> 24)};
  return file + header + data;
}

std::string header_of(const std::string& descr, const std::string& shape,
                      const std::string& order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

void expect_refusal(const std::string& content, const std::string& part) {
  try {
    parse(content, "bad.npy");
    FAIL() << "accepted; a refusal with '" << part << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(error.message().find("bad.npy"), std::string::npos) << error.message();
    EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
  }
}

class NpyFile : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("flashjit-npy-" + unique_suffix());
};

TEST_F(NpyFile, WhatIsWrittenIsRead) {
  const std::vector<double> values{0, 1, 2, 250, 4, 5};
  for (const Type type : {Type::float16, Type::float32, Type::float64, Type::uint8, Type::int32}) {
    const Array array = from_doubles(type, {1, 2, 3}, values);
    const auto path = folder_ / (to_string(type) + ".npy");
    write(path, array);
    EXPECT_EQ(read(path), array);
    EXPECT_EQ(to_doubles(read(path)), values) << to_string(type);
  }
}

TEST_F(NpyFile, MissingFileAndFolderAreErrors) {
  EXPECT_THROW(read(folder_ / "nothing.npy"), Error);
  EXPECT_THROW(read(folder_), Error);
  EXPECT_THROW(write(folder_ / "no" / "folder.npy", from_doubles(Type::uint8, {1}, {1})), Error);
}

TEST(Npy, ReadsTheShippedData) {
  for (const char* layer : {"layer0", "layer5"}) {
    for (const char* tensor : {"q", "k", "v", "dout"}) {
      const std::string path = test::sources() + "/tests/data/" + layer + "_" + tensor + ".npy";
      const Array array = read(path);
      EXPECT_EQ(array.type, Type::float16) << path;
      EXPECT_EQ(array.shape, (std::vector<std::int64_t>{1, 12, 180, 32})) << path;
      double sum_of_squares = 0;
      for (const double value : to_doubles(array)) sum_of_squares += value * value;
      const double deviation = std::sqrt(sum_of_squares / static_cast<double>(array.elements()));
      EXPECT_TRUE(deviation > 1e-3 && deviation < 10) << path << ": " << deviation;  // and so no NaN
    }
  }
}

TEST(Npy, ReadsNumPysOwnBytes) {
  // numpy.save of numpy.array([[1.5, -2], [0, 65504]], dtype='<f2').
  const std::string header = header_of("<f2", "(2, 2)");
  const Array array = parse(file_with(header, std::string("\x00\x3e\x00\xc0\x00\x00\xff\x7b", 8)), "a.npy");
  EXPECT_EQ(array.type, Type::float16);
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(to_doubles(array), (std::vector<double>{1.5, -2, 0, 65504}));
}

TEST(Npy, WritesNumPysOwnBytes) {
  const std::string content = serialize(from_doubles(Type::uint8, {3}, {7, 8, 9}));
  const std::string start = std::string("\x93NUMPY\x01\x00\x76\x00", 10) +
                            "{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }";
  EXPECT_EQ(content.substr(0, start.size()), start);
  EXPECT_EQ(content.size(), 128u + 3);
  EXPECT_EQ(content[127], '\n');
  EXPECT_EQ(content.substr(128), "\x07\x08\x09");
}

TEST(Npy, AcceptsVersionTwoAnyOrderOfKeysAndScalars) {
  const std::string data(4, '\0');
  EXPECT_EQ(parse(file_with(header_of("<i4", "(1,)"), data, 2), "a").shape, std::vector<std::int64_t>{1});
  EXPECT_EQ(
      parse(file_with("{\"shape\":(),\"descr\":\"<f4\",\"fortran_order\":False}", data), "a").elements(), 1);
  EXPECT_EQ(parse(file_with(header_of("<f4", "(3, 0, 5)"), ""), "a").elements(), 0);
  EXPECT_EQ(parse(file_with(header_of("<f4", "(1, 1)") + "    \n", data), "a").shape.size(), 2u);
}

TEST(Npy, RefusesWhatIsNoSoundFile) {
  const std::string good = file_with(header_of("<f4", "(2,)"), std::string(8, '\0'));
  EXPECT_EQ(parse(good, "good").elements(), 2);
  expect_refusal("", "NUMPY");
  expect_refusal("PK\x03\x04 an archive", "NUMPY");
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_THROW(parse(good.substr(0, length), "cut"), Error) << "cut to " << length << " bytes";
  }
  expect_refusal(good.substr(0, good.size() - 1), "ends after 7 of 8 bytes of its data");
  expect_refusal(good + "x", "goes on for 1 bytes");
  expect_refusal(file_with(header_of("<f4", "(2,)"), std::string(8, '\0'), 3), "version is 3");
  expect_refusal(file_with(std::string(70000, ' '), "", 2), "70000 bytes");
}

TEST(Npy, RefusesOrdersTypesAndSizesItCannotHold) {
  const auto with = [](const std::string& descr, const std::string& shape,
                       const std::string& order = "False") {
    return file_with(header_of(descr, shape, order), std::string(64, '\0'));
  };
  expect_refusal(with("<f4", "(4, 4)", "True"), "Fortran");
  expect_refusal(with(">f4", "(4, 4)"), "big-endian");
  expect_refusal(with("<c8", "(8,)"), "'<c8'");
  expect_refusal(with("|V2", "(32,)"), "bfloat16");
  expect_refusal(with("<i8", "(8,)"), "int32");
  expect_refusal(with("|O", "(8,)"), "'|O'");
  expect_refusal(with("<f4", "(-4, -4)"), "negative");
  expect_refusal(with("<f4", "(99999999999999999999,)"), "2^63");
  expect_refusal(with("<f4", "(4294967296, 4294967296)"), "2^63");
  expect_refusal(with("<f8", "(4611686018427387904,)"), "2^63");
  expect_refusal(with("<f4", "(1000000000000,)"), "ends after 64");
  std::string many = "(";
  for (int i = 0; i < 33; ++i) many += "1, ";
  expect_refusal(with("<f4", many + ")"), "32 dimensions");
}

TEST(Npy, RefusesDamagedHeaders) {
  for (const char* header :
       {"", "{", "}", "{'descr'", "{'descr': }", "{'descr': '<f4", "{'shape': (2}", "{'shape': (2,,)}",
        "{'descr': '<f4', 'shape': (2,)}", "{'descr': '<f4' 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} trailing"}) {
    EXPECT_THROW(parse(file_with(header, std::string(8, '\0')), "bad"), Error) << header;
  }
}

TEST(Npy, ConvertsWithRoundingAndClamping) {
  EXPECT_EQ(to_doubles(from_doubles(Type::float16, {3}, {1 + 0x1p-11, 1 + 3 * 0x1p-11, 1e6})),
            (std::vector<double>{1, 1 + 0x1p-9, std::numeric_limits<double>::infinity()}));
  EXPECT_EQ(to_doubles(from_doubles(Type::uint8, {3}, {-3, 2.5, 300})), (std::vector<double>{0, 2, 255}));
  EXPECT_TRUE(std::isnan(to_doubles(from_doubles(Type::float32, {1}, {std::nan("")}))[0]));
  EXPECT_THROW(from_doubles(Type::int32, {1}, {std::nan("")}), Error);
  EXPECT_THROW(from_doubles(Type::float32, {2, 2}, {1, 2, 3}), Error);
  EXPECT_THROW(from_doubles(Type::float32, {-1}, {}), Error);
  EXPECT_THROW(serialize({Type::float32, {2}, std::vector<std::byte>(7)}), Error);
}

}  // namespace
}  // namespace flashjit::npy

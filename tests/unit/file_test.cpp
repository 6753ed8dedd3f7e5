// Whole files: read, and replaced so that no reader sees a part.
#include "support/file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "flashjit/error.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;

class File : public testing::Test {
 protected:
  File() { fs::create_directories(folder_); }
  ~File() override { fs::remove_all(folder_); }

  std::vector<std::string> names(const fs::path& folder) const {
    std::vector<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder)) out.push_back(entry.path().filename().string());
    return out;
  }

  const fs::path folder_ = fs::temp_directory_path() / ("flashjit-file-" + unique_suffix());
};

TEST_F(File, RoundTripOfAnyBytes) {
  std::string bytes("\0\xff\n", 3);
  bytes += std::string(300000, 'x');
  write_file_atomically(folder_ / "a", bytes);
  EXPECT_EQ(read_file(folder_ / "a"), bytes);
  write_file_atomically(folder_ / "a", "");
  EXPECT_EQ(read_file(folder_ / "a"), "");
  EXPECT_EQ(names(folder_), std::vector<std::string>{"a"}) << "no temporary file stays";
}

TEST_F(File, FailuresNameTheFileAndTheCause) {
  const std::string missing = (folder_ / "missing").string();
  expect_in("cannot read '" + missing + "': No such file",
            failure(ErrorCode::io, [&] { read_file(missing); }));
  expect_in("it is not a regular file", failure(ErrorCode::io, [&] { read_file(folder_); }));
  expect_in("cannot write '" + missing + "/a': No such file",
            failure(ErrorCode::io, [&] { write_file_atomically(missing + "/a", "x"); }));
  expect_in("cannot open folder '" + missing + "'", failure(ErrorCode::io, [&] { sync_folder(missing); }));
}

TEST_F(File, AFolderThatCannotBeMadeIsToldWithTheCause) {
  write_file_atomically(folder_ / "file", "x");
  expect_in("File exists", make_private_folders(folder_ / "file" / "a"));
  expect_in("File name too long", make_private_folders(folder_ / std::string(300, 'x')));
  expect_in("No such file or directory", make_private_folders("/proc/self/no/such"));
}

TEST_F(File, APipeIsRefusedAndNotWaitedFor) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_in("it is not a regular file", failure(ErrorCode::io, [&] { read_file(pipe); }));
}

TEST_F(File, AFailedReplacementLeavesEverythingAsItWas) {
  const fs::path target = folder_ / "folder";
  fs::create_directories(target / "inside");
  expect_in("cannot write '" + target.string() + "'",
            failure(ErrorCode::io, [&] { write_file_atomically(target, "x"); }));
  EXPECT_EQ(names(folder_), std::vector<std::string>{"folder"}) << "no temporary file stays";
}

TEST_F(File, OutputGoesIntoPipesAndDevicesAndThroughLinks) {
  const fs::path pipe = folder_ / "pipe", link = folder_ / "link", full = folder_ / "full";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  auto reader = std::async(std::launch::async, [&] {
    std::ifstream from(pipe);
    return std::string(std::istreambuf_iterator<char>(from), {});
  });
  write_output(pipe, "into the pipe");
  EXPECT_EQ(reader.get(), "into the pipe");
  EXPECT_TRUE(fs::is_fifo(pipe));

  fs::create_symlink("target", link);
  write_output(link, "longer before");
  write_output(link, "x");
  EXPECT_EQ(read_file(folder_ / "target"), "x");
  fs::create_symlink("/dev/full", full);
  expect_in("cannot write '" + full.string() + "': No space left on device",
            failure(ErrorCode::io, [&] { write_output(full, "x"); }));
  EXPECT_TRUE(fs::is_symlink(link) && fs::is_symlink(full)) << "not replaced";

  write_output(folder_ / "new", "y");
  write_output(folder_ / "new", "z");
  EXPECT_EQ(read_file(folder_ / "new"), "z");
  expect_in("cannot write", failure(ErrorCode::io, [&] { write_output(folder_ / "no" / "folder", "x"); }));
}

TEST_F(File, ReadersNeverSeeAPart) {
  const fs::path path = folder_ / "shared";
  const std::string a(100000, 'a'), b(50000, 'b');
  write_file_atomically(path, a);
  std::vector<std::thread> writers;
  for (const std::string& bytes : {a, b}) {
    writers.emplace_back([&path, bytes] {
      for (int i = 0; i < 20; ++i) write_file_atomically(path, bytes);
    });
  }
  for (int i = 0; i < 200; ++i) {
    const std::string seen = read_file(path);
    EXPECT_TRUE(seen == a || seen == b);
  }
  for (std::thread& writer : writers) writer.join();
}

TEST(UniqueSuffix, DoesNotRepeat) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) {
    const std::string suffix = unique_suffix();
    EXPECT_EQ(suffix.size(), 24u);
    EXPECT_TRUE(seen.insert(suffix).second);
  }
}

}  // namespace
}  // namespace flashjit

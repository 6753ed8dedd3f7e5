// How many files a new option of a spec, a new element type or a new family touches: what runtime/README.md
// says of those that are there.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Source files of the library and its command, relative to the tree, in which `pattern` is found.
Names files_naming(const std::string& pattern) {
  const fs::path root = FLASHJIT_SOURCE_DIR;
  const Names extensions = {".cpp", ".hpp", ".h", ".cuh"};
  const std::regex wanted(pattern);
  Names found;
  for (const char* folder : {"include", "runtime", "templates", "autotune", "tools/command"})
    for (const auto& entry : fs::recursive_directory_iterator(root / folder))
      if (extensions.contains(entry.path().extension().string()) &&
          std::regex_search(text_of(entry.path()), wanted))
        found.insert(entry.path().lexically_relative(root).generic_string());
  return found;
}

/// The number in "`what` is named in N files" on the page.
std::size_t number_on_the_page(const std::string& what) {
  const std::string page = text_of(fs::path(FLASHJIT_SOURCE_DIR) / "runtime/README.md");
  std::smatch found;
  if (!std::regex_search(page, found, std::regex("`" + what + "` is\\s+named\\s+in\\s+([0-9]+)\\s+files")))
    return 0;
  return std::stoul(found[1]);
}

std::string listed(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += "\n  " + name;
  return text;
}

TEST(Seams, AnOptionOfASpecIsNamedInNoMoreFilesThanThePageSays) {
  for (const std::string option : {"sinks", "deterministic"}) {
    const Names files = files_naming("\\b" + option + "\\b");
    EXPECT_LE(files.size(), number_on_the_page(option)) << option << listed(files);
  }
}

TEST(Seams, AnElementTypeIsNamedWhereFamiliesListItAndInTheTable) {
  EXPECT_EQ(files_naming("DType::bf16"),
            (Names{"include/flashjit/spec.hpp", "runtime/device/tensor_maps.cpp", "runtime/plan/records.cpp",
                   "runtime/plan/simt.cpp", "runtime/plan/sm80.cpp", "runtime/plan/sm90.cpp",
                   "runtime/support/dtypes.cpp", "tools/command/job.cpp"}));
}

TEST(Seams, AFamilyIsNamedInItsOwnFilesAndInTheTables) {
  Names files = files_naming("Family::sm90|sm90_traits|sm90::");
  for (const char* own : {"runtime/plan/sm90.cpp", "runtime/plan/sm90.hpp", "runtime/plan/wgmma.cpp"})
    EXPECT_EQ(files.erase(own), 1u) << own;
  std::erase_if(files, [](const std::string& name) { return name.starts_with("templates/sm90/"); });
  EXPECT_EQ(files,
            (Names{"runtime/plan/family.cpp", "runtime/plan/family.hpp", "runtime/support/types.cpp"}));
}

}  // namespace
}  // namespace flashjit

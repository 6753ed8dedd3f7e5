// How many files a new option of a spec, a new element type or a new family touches: what runtime/README.md
// says of those that are there.
#include <gtest/gtest.h>
#include <regex.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "support/built.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// An expression of the C library, which reads the tree in a tenth of the time of std::regex.
class Pattern {
 public:
  explicit Pattern(const std::string& text) {
    EXPECT_EQ(::regcomp(&compiled_, text.c_str(), REG_EXTENDED | REG_NOSUB), 0) << text;
  }
  ~Pattern() { ::regfree(&compiled_); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;
  bool is_in(const std::string& text) const {
    return ::regexec(&compiled_, text.c_str(), 0, nullptr, 0) == 0;
  }

 private:
  regex_t compiled_;
};

/// Files in some folders of the tree in which `pattern` is found.
Names files_naming(const std::string& pattern, const std::vector<const char*>& folders,
                   const Names& extensions) {
  const fs::path root = test::sources();
  const Pattern wanted(pattern);
  Names found;
  for (const char* folder : folders)
    for (const auto& entry : fs::recursive_directory_iterator(root / folder))
      if (extensions.contains(entry.path().extension().string()) && wanted.is_in(text_of(entry.path())))
        found.insert(entry.path().lexically_relative(root).generic_string());
  return found;
}

/// In source files of the library and its command.
Names files_naming(const std::string& pattern) {
  return files_naming(pattern, {"include", "runtime", "templates", "autotune", "tools/command"},
                      {".cpp", ".hpp", ".h", ".cuh"});
}
/// Adapters and drop-ins do not count: they repeat the arguments of whom they serve, whatever is new here.
/// JAX's folder counts once.
Names files_of_python_naming(const std::string& pattern) {
  const std::regex adapters(
      "tools/python/flashjit/(flash_attn/|block_sparse_attn|fastvideo|flashinfer/|sglang/|vllm/"
      "|vllm_omni|_engines).*");
  Names found;
  for (const std::string& name : files_naming(pattern, {"tools/python/flashjit"}, {".py"}))
    if (!std::regex_match(name, adapters))
      found.insert(std::regex_replace(name, std::regex("(tools/python/flashjit/[a-z_]+)/.*"), "$1"));
  return found;
}

/// The numbers in "`what` is named in N files and in M of Python's" on the page.
struct Numbers {
  std::size_t files = 0, of_python = 0;
};
Numbers numbers_on_the_page(const std::string& what) {
  const std::string page = text_of(fs::path(test::sources()) / "runtime/README.md");
  const std::regex wanted(
      "`" + what + "` is\\s+named\\s+in\\s+([0-9]+)\\s+files(\\s+and\\s+in\\s+([0-9]+)\\s+of\\s+Python)?");
  std::smatch found;
  if (!std::regex_search(page, found, wanted)) return {};
  return {std::stoul(found[1]), found[3].matched ? std::stoul(found[3]) : 0};
}

std::string listed(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += "\n  " + name;
  return text;
}

TEST(Seams, OptionsAreNamedInNoMoreFilesThanThePageSays) {
  for (const std::string option : {"sinks", "deterministic", "q_in_registers"}) {
    const Numbers numbers = numbers_on_the_page(option);
    const Names files = files_naming("\\b" + option + "\\b");
    EXPECT_LE(files.size(), numbers.files) << option << listed(files);
    const Names of_python = files_of_python_naming("\\b" + option + "\\b");
    EXPECT_LE(of_python.size(), numbers.of_python) << option << listed(of_python);
  }
}

TEST(Seams, AnElementTypeIsNamedWhereFamiliesListItAndInTheTable) {
  EXPECT_EQ(files_naming("DType::bf16"),
            (Names{"include/flashjit/spec.hpp", "runtime/device/tensor_maps.cpp", "runtime/plan/records.cpp",
                   "runtime/plan/sm80.cpp", "runtime/plan/sm90_admits.cpp", "runtime/support/dtypes.cpp"}));
}

/// What a new kind of code touches: besides its text and row in kv_format.cpp no more than decode and encode.
TEST(Seams, ACodeOfAKvFormatIsNamedWhereItIsDescribedDecodedAndEncoded) {
  EXPECT_EQ(files_naming("Code::e2m1"),
            (Names{"runtime/expr/kv_codec.cpp", "runtime/support/kv_format.cpp",
                   "templates/common/kv_encode.cuh", "templates/common/kv_format.cuh"}));
}

/// What a kernel family knows of formats: one decoded source of rows, or codes that are decoded in two steps.
TEST(Seams, FamiliesDecodeByOneFunction) {
  EXPECT_EQ(
      files_naming("\\b(decode16|load_codes16)\\b"),
      (Names{"templates/auxiliary/decode_cache.cuh", "templates/auxiliary/encode_row.cuh",
             "templates/common/decoded_kv.cuh", "templates/common/kv_channel_scales.cuh",
             "templates/common/kv_format.cuh", "templates/simt/query_heads.cuh", "templates/simt/tile.cuh",
             "templates/sm80/kv_loader.cuh", "templates/sm90/kv_latents.cuh", "templates/sm90/kv_rows.cuh"}));
}

TEST(Seams, AFamilyIsNamedInItsOwnFilesAndInTheTables) {
  Names files = files_naming("Family::sm90|sm90_traits|sm90::");
  for (const char* own : {"sm90.cpp", "sm90.hpp", "sm90_admits.cpp", "sm90_cost.cpp", "sm90_jvp.cpp",
                          "sm90_tiles.cpp", "wgmma.cpp"})
    EXPECT_EQ(files.erase(std::string("runtime/plan/") + own), 1u) << own;
  std::erase_if(files, [](const std::string& name) { return name.starts_with("templates/sm90/"); });
  EXPECT_EQ(files,
            (Names{"runtime/plan/family.cpp", "runtime/plan/family.hpp", "runtime/support/types.cpp"}));
}

}  // namespace
}  // namespace flashjit

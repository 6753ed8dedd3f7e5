// Every #include in the tree, checked against the layers of the architecture: quoted includes point downwards
// only, CUDA's headers are seen where they may be, the public headers and the templates include nothing else.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "support/built.hpp"

namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

struct Include {
  std::string name;
  bool quoted = false;
  int line = 0;
};

/// What each layer may include besides itself and the public headers. Tools may include everything.
const std::map<std::string, Names>& allowed_layers() {
  static const std::map<std::string, Names> kAllowed = [] {
    std::map<std::string, Names> allowed{{"include", {}}, {"templates", {}}, {"support", {"templates"}}};
    Names below{"support", "templates"};
    const auto add = [&](const std::string& layer) {
      allowed[layer] = below;
      below.insert(layer);
    };
    add("expr");
    allowed["reference"] = below;
    add("plan");
    add("render");
    allowed["compile"] = below;  // compile and cache are neighbours: neither sees the other
    allowed["cache"] = below;
    below.insert({"compile", "cache"});
    add("device");
    add("call");
    below.insert("reference");
    add("api");
    add("autotune");
    add("tools");
    return allowed;
  }();
  return kAllowed;
}

const std::map<std::string, Names>& layers_that_see() {
  static const std::map<std::string, Names> kSeers{{"nvrtc.h", {"compile"}},
                                                   {"cuda.h", {"device", "call", "autotune"}}};
  return kSeers;
}

/// The layer of a path relative to the source tree: "runtime/plan/plan.hpp" -> "plan".
std::string layer_of(const fs::path& path) {
  std::vector<std::string> parts;
  for (const fs::path& part : path) parts.push_back(part.string());
  return parts.size() > 2 && parts[0] == "runtime" ? parts[1] : parts[0];
}

std::vector<Include> includes_of(const fs::path& file) {
  static const std::regex kInclude(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"].*)");
  std::ifstream in(file);
  std::vector<Include> includes;
  std::string line;
  std::smatch match;
  for (int number = 1; std::getline(in, line); ++number) {
    if (std::regex_match(line, match, kInclude)) includes.push_back({match[2], match[1] == "\"", number});
  }
  return includes;
}

class Layers : public testing::Test {
 protected:
  const fs::path root_ = flashjit::test::sources();

  std::vector<fs::path> files(const std::vector<std::string>& folders) const {
    static const Names kExtensions{".hpp", ".h", ".cpp", ".c", ".cuh"};
    std::vector<fs::path> out;
    for (const std::string& folder : folders) {
      for (const auto& entry : fs::recursive_directory_iterator(root_ / folder)) {
        if (kExtensions.contains(entry.path().extension()))
          out.push_back(entry.path().lexically_relative(root_));
      }
    }
    std::sort(out.begin(), out.end());
    return out;
  }

  /// The file that a quoted include names, relative to the source tree: looked for as the build does.
  std::optional<fs::path> resolve(const fs::path& from, const std::string& name) const {
    for (const fs::path& folder :
         {from.parent_path(), fs::path("include"), fs::path("runtime"), fs::path()}) {
      if (fs::is_regular_file(root_ / folder / name)) return (folder / name).lexically_normal();
    }
    return std::nullopt;
  }
};

TEST_F(Layers, QuotedIncludesPointDownwards) {
  const std::vector<fs::path> sources = files({"include", "runtime", "autotune", "tools"});
  ASSERT_GT(sources.size(), 20u);
  for (const fs::path& file : sources) {
    const std::string layer = layer_of(file);
    ASSERT_TRUE(allowed_layers().contains(layer))
        << file << " is in no layer of the architecture: add it here";
    for (const Include& include : includes_of(root_ / file)) {
      if (!include.quoted) continue;
      const std::optional<fs::path> target = resolve(file, include.name);
      if (!target) {
        ADD_FAILURE() << fmt::format("{}:{} includes \"{}\", which is no file of the tree", file.string(),
                                     include.line, include.name);
        continue;
      }
      const std::string target_layer = layer_of(*target);
      EXPECT_TRUE(target_layer == layer || target_layer == "include" ||
                  allowed_layers().at(layer).contains(target_layer))
          << fmt::format("{}:{} ({}) includes {} ({}), which is not below it", file.string(), include.line,
                         layer, target->string(), target_layer);
    }
  }
}

TEST_F(Layers, CudaHeadersAreSeenWhereTheyMayBe) {
  int seen = 0;
  for (const fs::path& file : files({"include", "runtime", "autotune", "tools", "templates"})) {
    if (*std::next(file.begin()) == "examples") continue;  // programs of a user, who owns a context
    for (const Include& include : includes_of(root_ / file)) {
      const bool of_cuda = include.name.starts_with("cuda") || include.name.starts_with("nvrtc");
      if (include.quoted || !of_cuda) continue;
      ++seen;
      const auto seers = layers_that_see().find(include.name);
      EXPECT_TRUE(seers != layers_that_see().end() && seers->second.contains(layer_of(file)))
          << file << " must not include <" << include.name << ">";
    }
  }
  EXPECT_GE(seen, 2) << "compile includes nvrtc.h and device cuda.h; this test no longer finds them";
}

TEST_F(Layers, PublicHeadersNeedOnlyTheStandardLibrary) {
  static const std::regex kStandard("[a-z_]+|std(def|int|bool)\\.h");
  for (const fs::path& file : files({"include"})) {
    for (const Include& include : includes_of(root_ / file)) {
      if (include.quoted) {
        EXPECT_TRUE(include.name.starts_with("flashjit/")) << file << " includes \"" << include.name << "\"";
      } else {
        EXPECT_TRUE(std::regex_match(include.name, kStandard))
            << file << " includes <" << include.name << ">";
      }
    }
  }
}

TEST_F(Layers, TemplatesIncludeOnlyTemplates) {
  static const std::regex kTemplate("(flashjit|templates)/(.+)");  // as NVRTC finds it, and as the host does
  const std::vector<fs::path> templates = files({"templates"});
  ASSERT_GE(templates.size(), 5u);
  for (const fs::path& file : templates) {
    for (const Include& include : includes_of(root_ / file)) {
      std::smatch match;
      const bool named = include.quoted && std::regex_match(include.name, match, kTemplate);
      EXPECT_TRUE(named && fs::is_regular_file(root_ / "templates" / match[2].str()))
          << file << ":" << include.line << " includes " << include.name
          << ", which templates/ does not hold";
    }
  }
}

TEST_F(Layers, OnlyTheEnvironmentReadsTheEnvironment) {
  for (const fs::path& file : files({"include", "runtime", "autotune", "tools"})) {
    if (file.generic_string().starts_with("runtime/support/environment")) continue;
    std::ifstream in(root_ / file);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    EXPECT_EQ(text.find("getenv("), std::string::npos) << file << ": ask runtime/support/environment.hpp";
  }
}

TEST_F(Layers, OnlyFilesOfASystemIncludeItsHeaders) {
  static const std::regex kSystem(
      "(unistd|fcntl|dlfcn|signal|spawn|poll|pthread|elf|pwd|windows|io|aclapi|sddl|bcrypt)\\.h|sys/.*");
  static const std::regex kOfASystem(".*_(posix|windows)\\.[ch]pp");
  int seen = 0;
  for (const fs::path& file : files({"include", "runtime", "autotune", "tools/command", "tools/parts"})) {
    for (const Include& include : includes_of(root_ / file)) {
      if (include.quoted || !std::regex_match(include.name, kSystem)) continue;
      ++seen;
      EXPECT_TRUE(std::regex_match(file.string(), kOfASystem))
          << file << ":" << include.line << " includes <" << include.name << ">: ask runtime/support/";
    }
  }
  EXPECT_GE(seen, 10) << "this test no longer finds them";
}

// MSVC is not here: what it does not know is not written, but for attributes, which it passes over.
TEST_F(Layers, SourcesAreForEveryCompiler) {
  static const std::regex kOfACompiler(
      R"(__builtin_\w+|__attribute__|__extension__|__int128|__typeof__|__PRETTY_FUNCTION__|\bssize_t\b|_MSC_VER|__GNUC__|__clang__|#pragma (?!once)\w+)");
  static const std::regex kOfASystem(".*_(posix|windows)\\.[ch]pp");
  const std::set<std::string> exporting = {"include/flashjit/types.h", "include/flashjit/types.hpp"};
  for (const fs::path& file : files({"include", "runtime", "autotune", "tools/command", "tools/parts"})) {
    if (std::regex_match(file.string(), kOfASystem) || exporting.contains(file.generic_string())) continue;
    std::ifstream in(root_ / file);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    std::smatch found;
    EXPECT_FALSE(std::regex_search(text, found, kOfACompiler))
        << file << " has " << found.str() << ", which only some compilers know";
  }
}

TEST_F(Layers, FmtJoinComesFromFmtRanges) {  // where fmt 11 and newer have it, which vcpkg and Conan bring
  for (const fs::path& file : files({"runtime", "autotune", "tools"})) {
    std::ifstream in(root_ / file);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    if (text.find("fmt::join(") == std::string::npos) continue;
    const std::vector<Include> includes = includes_of(root_ / file);
    EXPECT_TRUE(
        std::ranges::any_of(includes, [](const Include& include) { return include.name == "fmt/ranges.h"; }))
        << file << " must include <fmt/ranges.h>";
  }
}

}  // namespace

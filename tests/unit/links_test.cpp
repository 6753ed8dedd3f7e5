// Relative links of every Markdown page, and the findings of NOTES.md that sources cite, lead somewhere.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "support/built.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

const fs::path kRoot = test::sources();

Lines read_lines(const fs::path& file) {
  std::ifstream in(file);
  Lines lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The lines outside of code blocks.
Lines prose(const Lines& lines) {
  Lines found;
  bool code = false;
  for (const std::string& line : lines) {
    if (line.starts_with("```")) {
      code = !code;
    } else if (!code) {
      found.push_back(line);
    }
  }
  return found;
}

/// The anchor that GitHub gives a heading.
std::string slug(std::string_view heading) {
  std::string text;
  for (const char c : heading) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || c == '-' || c == '_') text += static_cast<char>(std::tolower(byte));
    if (c == ' ') text += '-';
  }
  return text;
}

std::set<std::string> anchors(const Lines& lines) {
  static const std::regex kHeading("^#+ +(.*)$");
  std::map<std::string, int> seen;
  std::set<std::string> found;
  std::smatch match;
  for (const std::string& line : prose(lines)) {
    if (!line.starts_with('#') || !std::regex_match(line, match, kHeading)) continue;
    const std::string anchor = slug(match[1].str());
    const int before = seen[anchor]++;
    found.insert(before ? fmt::format("{}-{}", anchor, before) : anchor);
  }
  return found;
}

/// Targets of [text](target), without those on other sites.
std::vector<std::string> relative_links(const Lines& lines) {
  static const std::regex kCode("`[^`]*`"), kLink(R"(\]\(([^)\s]+)\))"), kElsewhere("^[a-z]+:.*");
  std::vector<std::string> found;
  for (const std::string& line : prose(lines)) {
    const std::string text = std::regex_replace(line, kCode, "code");
    for (std::sregex_iterator at(text.begin(), text.end(), kLink), end; at != end; ++at) {
      if (!std::regex_match((*at)[1].str(), kElsewhere)) found.push_back((*at)[1]);
    }
  }
  return found;
}

/// Why a link of a page leads nowhere; empty if it does not.
std::string fault(const fs::path& page, const std::string& link) {
  const std::size_t hash = std::min(link.find('#'), link.size());
  const fs::path target = hash == 0 ? page : page.parent_path() / link.substr(0, hash);
  if (!fs::exists(target)) return fmt::format("{}: {} is not there", page.string(), link);
  if (hash == link.size() || anchors(read_lines(target)).contains(link.substr(hash + 1))) return {};
  return fmt::format("{}: {} has no such heading", page.string(), link);
}

/// Files with one of these endings in the folders of the tree, and at its top.
std::vector<fs::path> files(const std::set<std::string>& extensions) {
  std::vector<fs::path> found;
  const auto take = [&](const fs::directory_entry& entry) {
    if (entry.is_regular_file() && extensions.contains(entry.path().extension().string())) {
      found.push_back(entry.path());
    }
  };
  for (const auto& entry : fs::directory_iterator(kRoot)) take(entry);
  for (const char* folder : {"runtime", "templates", "autotune", "include", "tests", "tools", ".github"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) take(entry);
  }
  return found;
}

TEST(Links, PagesLinkToWhatIsThere) {
  int count = 0;
  for (const fs::path& page : files({".md"})) {
    for (const std::string& link : relative_links(read_lines(page))) {
      EXPECT_EQ(fault(page, link), "");
      ++count;
    }
  }
  EXPECT_GT(count, 50);
}

/// Whether a path ends with these components.
bool ends_with(const fs::path& path, const std::string& name) {
  return path.generic_string().ends_with(fmt::format("/{}", name));
}

TEST(Links, FolderPagesNameFilesThatAreThere) {
  static const std::regex kName("`([a-z0-9_/]+\\.(hpp|cpp|cuh|py))`");
  const std::vector<fs::path> sources = files({".hpp", ".cpp", ".cuh", ".py"});
  for (const fs::path& page : files({".md"})) {
    if (page.filename() != "README.md") continue;
    for (const std::string& line : read_lines(page)) {
      for (std::sregex_iterator at(line.begin(), line.end(), kName), end; at != end; ++at) {
        const std::string name = (*at)[1];
        EXPECT_TRUE(std::ranges::any_of(sources, [&](const fs::path& file) { return ends_with(file, name); }))
            << page << ": " << name;
      }
    }
  }
}

TEST(Links, FolderPagesNameEverySource) {
  std::vector<fs::path> folders = {"autotune",    "tests/emulator", "tests/support", "tests/python",
                                   "tools/bench", "tools/command",  "tools/parts",   "tools/python/flashjit"};
  for (const char* parent : {"runtime", "templates"})
    for (const auto& entry : fs::directory_iterator(kRoot / parent))
      if (entry.is_directory()) folders.push_back(entry.path());
  const std::set<std::string> extensions = {".hpp", ".cpp", ".cuh", ".py"};
  for (const fs::path& folder : folders) {
    std::string page;
    for (const std::string& line : read_lines(kRoot / folder / "README.md")) page += line + "\n";
    for (const auto& entry : fs::directory_iterator(kRoot / folder)) {
      std::string stem = entry.path().stem().string();
      for (const std::string_view system : {"_posix", "_windows"})  // their header's names are theirs
        if (stem.ends_with(system)) stem.resize(stem.size() - system.size());
      if (!extensions.contains(entry.path().extension().string()) || stem.starts_with("__")) continue;
      const bool named = page.find("`" + stem + ".") != std::string::npos ||
                         page.find("`" + stem + "`") != std::string::npos;
      EXPECT_TRUE(named) << folder << ": its page does not name " << stem;
    }
  }
}

/// Citations of NOTES.md, by a path from the source's folder or from the root, with an anchor or without.
std::vector<std::string> citations(const fs::path& source) {
  static const std::regex kCited("([a-z0-9_./]*NOTES\\.md)(#[a-z0-9_-]+)?");
  std::vector<std::string> found;
  for (const std::string& line : read_lines(source)) {
    if (line.find("NOTES.md") == line.npos) continue;  // which takes far less time
    for (std::sregex_iterator at(line.begin(), line.end(), kCited), end; at != end; ++at)
      found.push_back((*at)[0]);
  }
  return found;
}

TEST(Links, FindingsThatSourcesCiteAreInTheNotesBesideThem) {
  int count = 0;
  for (const fs::path& source : files({".cpp", ".hpp", ".h", ".cuh", ".py"})) {
    if (source.filename() == "links_test.cpp") continue;
    for (const std::string& citation : citations(source)) {
      const bool from_root = fault(kRoot / "README.md", citation).empty();
      EXPECT_EQ(from_root ? "" : fault(source, citation), "");
      ++count;
    }
  }
  EXPECT_GT(count, 25);
}

TEST(Links, EveryFindingOfTheNotesIsCited) {
  std::set<std::string> cited;
  for (const fs::path& source : files({".cuh", ".cpp", ".md"}))
    for (const std::string& citation : citations(source))
      cited.insert(citation.substr(std::min(citation.find('#') + 1, citation.size())));
  for (const char* page : {"templates/sm80/NOTES.md", "templates/sm90/NOTES.md"})
    for (const std::string& line : read_lines(kRoot / page))
      EXPECT_TRUE(!line.starts_with("### ") || cited.contains(slug(line.substr(4)))) << page << line;
}

TEST(Links, FaultsAreFound) {
  const fs::path page = kRoot / "tools/docs/README.md";
  EXPECT_EQ(fault(page, "programs.md"), "");
  EXPECT_EQ(fault(page, "programs.md#the-language"), "");
  EXPECT_EQ(fault(page, "#reference"), "");
  EXPECT_NE(fault(page, "programs.txt"), "");
  EXPECT_NE(fault(page, "programs.md#the-grammar"), "");
}

TEST(Links, AreReadFromProseAlone) {
  const Lines lines = {"# A b: `c`, d",
                       "[x](one.md) and ![y](two.png)",
                       "`[z](code.md)`",
                       "[w](https://three)",
                       "```",
                       "[v](four.md)",
                       "# no heading",
                       "```",
                       "# A b: `c`, d"};
  EXPECT_EQ(relative_links(lines), (std::vector<std::string>{"one.md", "two.png"}));
  EXPECT_EQ(anchors(lines), (std::set<std::string>{"a-b-c-d", "a-b-c-d-1"}));
}

}  // namespace
}  // namespace flashjit

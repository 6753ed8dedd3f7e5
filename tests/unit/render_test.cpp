// From a spec and a configuration to source text, and where the templates come from.
#include "render/render.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "plan/plan.hpp"
#include "support/built.hpp"
#include "support/file.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using render::TemplateSet;

KernelSource render_text(const std::string& spec, const std::string& arch = "sm_80",
                         const TemplateSet& templates = TemplateSet::embedded()) {
  const DeviceInfo device = DeviceInfo::parse(arch);
  const plan::ExecutionPlan plan =
      plan::make_plan(parse_spec(spec), parse_shape("b2:hq4:hkv4:sq1024:skv1024"), device, {});
  return render::render(plan.spec, plan.config, device, templates);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::string> names(const KernelSource& source) {
  std::vector<std::string> all;
  for (const Header& header : source.headers) all.push_back(header.name);
  return all;
}

/// A writable copy of templates/, gone at the end.
class TemplateCopy {
 public:
  TemplateCopy() : folder_(fs::path(testing::TempDir()) / ("templates-" + unique_suffix())) {
    fs::copy(fs::path(test::sources()) / "templates", folder_, fs::copy_options::recursive);
  }
  ~TemplateCopy() { fs::remove_all(folder_); }
  const fs::path& folder() const { return folder_; }
  void append(const std::string& file, const std::string& text) {
    std::ofstream(folder_ / file, std::ios::app) << text;
  }

 private:
  fs::path folder_;
};

TEST(Render, IsDeterministic) {
  const KernelSource a = render_text("bwd:bf16:d64:causal"), b = render_text("bwd:bf16:d64:causal");
  EXPECT_EQ(a.text, b.text);
  EXPECT_EQ(a.headers, b.headers);
  EXPECT_EQ(a.entries, b.entries);
}

TEST(Render, OneSpellingOfEqualProblems) {
  const DeviceInfo device = DeviceInfo::parse("sm_80");
  KernelSpec spec = parse_spec("fwd:bf16:d64");
  const TileConfig config =
      plan::traits(Family::sm80).heuristic(spec.normalized(), parse_shape("b1:hq1:hkv1:sq64:skv64"), device);
  spec.head_dim_v = 0;
  const std::string open = render::render(spec, config, device, TemplateSet::embedded()).text;
  spec.head_dim_v = 64;
  EXPECT_EQ(open, render::render(spec, config, device, TemplateSet::embedded()).text);
}

TEST(Render, WritesTheProblem) {
  const KernelSource source = render_text("bwd:fp16:d96x64:causal:dropout:kvlen:map64x128:det");
  for (const char* line :
       {"using Element = fp16;", "kArch = 80;", "kBackward = true;", "kHeadDim = 96;", "kHeadDimV = 64;",
        "kDropout = true;", "kKvLengths = true;", "kBlockMap = true;", "kDeterministic = true;",
        "kBlockQ = 64;", "kBlockKv = 128;", "kHasScore = false;", "kHasMask = true;"}) {
    EXPECT_TRUE(contains(source.text, line)) << line << "\n" << source.text;
  }
  const TileConfig& config = source.config;
  EXPECT_TRUE(contains(source.text, "kBr = " + std::to_string(config.br) + ";"));
  EXPECT_TRUE(contains(source.text, "kBc = " + std::to_string(config.bc) + ";"));
  EXPECT_TRUE(contains(source.text, "kWarps = " + std::to_string(config.warps) + ";"));
  EXPECT_TRUE(source.text.starts_with("// " + to_string(source.spec) + " " + to_string(config) + "\n"));
}

TEST(Render, WritesWhetherWaitsAreChecked) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64");
  const DeviceInfo device = DeviceInfo::parse("sm_80");
  const TileConfig config =
      plan::traits(Family::sm80).heuristic(spec, parse_shape("b1:hq1:hkv1:sq64:skv64"), device);
  const auto text = [&](const plan::Checks& options) {
    return render::render(spec, config, device, TemplateSet::embedded(), options).text;
  };
  EXPECT_TRUE(contains(text({}), "kCheckWaits = false;"));
  EXPECT_TRUE(contains(text({.check_waits = true}), "kCheckWaits = true;"));
}

// The struct that editors see and the one that is generated must not drift apart.
TEST(Render, HasEveryConstantAndHookOfTheExampleProblem) {
  const std::string& example = TemplateSet::embedded().get("flashjit/common/problem.cuh");
  const std::string text = render_text("fwd:bf16:d64").text;
  std::size_t constants = 0;
  for (std::size_t at = example.find("static constexpr "); at != std::string::npos;
       at = example.find("static constexpr ", at + 1)) {
    const std::string declaration = example.substr(at, example.find('=', at) - at);
    EXPECT_TRUE(contains(text, declaration)) << declaration;
    ++constants;
  }
  EXPECT_GE(constants, 19u);
  for (const char* hook :
       {" score(", " score_grad(", " mask(", " classify_tile(", " kv_bounds(", " q_bounds("}) {
    EXPECT_TRUE(contains(text, hook)) << hook;
  }
}

TEST(Render, WritesEveryEntryWithItsBounds) {
  const KernelSource source = render_text("bwd:bf16:d64");
  ASSERT_FALSE(source.entries.empty());
  for (const plan::Entry& entry : source.entries) {
    EXPECT_TRUE(contains(source.text, "__launch_bounds__(" + std::to_string(entry.threads) + ", " +
                                          std::to_string(entry.min_blocks) + ")\nflashjit_" + entry.name +
                                          "("))
        << entry.name;
    EXPECT_TRUE(contains(source.text, "#include \"" + entry.header + "\"\n")) << entry.header;
    EXPECT_TRUE(contains(source.text, entry.function + "<flashjit::Problem>(p);")) << entry.function;
  }
}

TEST(Render, TakesTheHeadersThatAreIncludedAndNoOthers) {
  const KernelSource forward = render_text("fwd:fp32:d64");
  const std::vector<std::string> headers = names(forward);
  EXPECT_TRUE(std::is_sorted(headers.begin(), headers.end()));
  EXPECT_EQ(std::set<std::string>(headers.begin(), headers.end()).size(), headers.size());
  const auto has = [&](const char* name) { return std::count(headers.begin(), headers.end(), name) == 1; };
  EXPECT_TRUE(has("flashjit/simt/forward.cuh"));
  EXPECT_TRUE(has("flashjit/common/params.cuh")) << "included by common/problem.cuh alone";
  EXPECT_FALSE(has("flashjit/sm80/forward.cuh"));
  EXPECT_FALSE(has("flashjit/simt/backward.cuh"));
}

TEST(Templates, EmbeddedAreTheFilesByteForByte) {
  const TemplateSet folder = TemplateSet::from_folder(fs::path(test::sources()) / "templates");
  EXPECT_EQ(TemplateSet::embedded().all(), folder.all());
  EXPECT_GE(folder.all().size(), 5u);
}

TEST(Templates, AFolderGivesTheSameSourceWhereverItLies) {
  const TemplateCopy copy;
  const KernelSource from_copy =
      render_text("fwd:fp32:d64", "sm_80", TemplateSet::from_folder(copy.folder()));
  const KernelSource embedded = render_text("fwd:fp32:d64");
  EXPECT_EQ(from_copy.text, embedded.text);
  EXPECT_EQ(from_copy.headers, embedded.headers);
}

TEST(Templates, AnEditInAFolderReachesTheSource) {
  TemplateCopy copy;
  copy.append("simt/forward.cuh", "// edited\n");
  const KernelSource edited = render_text("fwd:fp32:d64", "sm_80", TemplateSet::from_folder(copy.folder()));
  EXPECT_NE(edited.headers, render_text("fwd:fp32:d64").headers);
}

/// The templates that host code is compiled with, directly or through another: "flashjit/common/params.cuh".
std::set<std::string> templates_of_the_host() {
  const fs::path root = test::sources();
  std::set<std::string> found;
  const auto add_includes = [&](const fs::path& path, auto& self) -> void {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      constexpr std::string_view kInclude = "#include \"templates/";
      if (!line.starts_with(kInclude)) continue;
      const std::string name =
          line.substr(kInclude.size(), line.find('"', kInclude.size()) - kInclude.size());
      if (found.insert("flashjit/" + name).second) self(root / "templates" / name, self);
    }
  };
  for (const char* folder : {"runtime", "autotune", "tools"})
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const fs::path extension = entry.path().extension();
      if (extension == ".cpp" || extension == ".hpp") add_includes(entry.path(), add_includes);
    }
  return found;
}

TEST(Templates, HeadersOfTheHostMustBeTheBuiltOnes) {
  const std::set<std::string> shared = templates_of_the_host();
  EXPECT_GE(shared.size(), 9u);
  for (const std::string& name : shared) {
    TemplateCopy copy;
    const std::string file = name.substr(name.find('/') + 1);
    copy.append(file, "// edited\n");
    try {
      TemplateSet::from_folder(copy.folder());
      ADD_FAILURE() << file << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_TRUE(contains(error.message(), file) && contains(error.message(), "rebuild")) << error.message();
    }
  }
  TemplateCopy others;
  for (const auto& [name, text] : TemplateSet::embedded().all())
    if (!shared.contains(name)) others.append(name.substr(name.find('/') + 1), "// edited\n");
  EXPECT_NO_THROW(TemplateSet::from_folder(others.folder()));
}

TEST(Templates, LinesMayEndAsOnWindows) {
  const std::string file = "sm80/forward.cuh", name = "flashjit/" + file;
  TemplateCopy copy;
  std::string text = read_file(copy.folder() / file);
  for (std::size_t at = 0; (at = text.find('\n', at)) != text.npos; at += 2) text.insert(at, 1, '\r');
  write_file_atomically(copy.folder() / file, text);
  EXPECT_EQ(TemplateSet::from_folder(copy.folder()).get(name), TemplateSet::embedded().get(name));
}

TEST(Templates, AFolderWithoutTemplatesIsRefused) {
  const fs::path empty = fs::path(testing::TempDir()) / ("empty-" + unique_suffix());
  fs::create_directories(empty);
  EXPECT_THROW(TemplateSet::from_folder(empty), Error);
  EXPECT_THROW(TemplateSet::from_folder(empty / "nowhere"), Error);
  EXPECT_THROW(TemplateSet::from_folder("/dev/null"), Error);
  fs::remove_all(empty);
}

TEST(Templates, AMissingTemplateIsNamed) {
  try {
    TemplateSet::embedded().get("flashjit/none.cuh");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    EXPECT_TRUE(contains(error.message(), "flashjit/none.cuh"));
  }
}

}  // namespace
}  // namespace flashjit

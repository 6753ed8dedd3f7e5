// The key: everything that can change machine code or launch is in it, and nothing else.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <clocale>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <set>

#include "cache/store.hpp"
#include "call/call_key.hpp"
#include "compile/compiler.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "support/built.hpp"
#include "support/file.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using cache::entry_key;
using cache::source_digest;

const std::vector<std::string> kOptions{"--gpu-architecture=sm_80", "--std=c++20"};

KernelSource source() {
  KernelSource s;
  s.spec = parse_spec("fwd:bf16:d64");
  s.config = parse_config("simt:br64:bc64:w8");
  s.arch = "sm_80";
  s.text = "text";
  s.headers = {{"flashjit/a.cuh", "one"}, {"flashjit/b.cuh", "two"}};
  s.entries = {
      {.name = "forward", .header = "flashjit/a.cuh", .function = "f", .threads = 128, .shared_bytes = 64}};
  return s;
}

/// What a call of the spec is found by.
CallKeyView call_key(const KernelSpec& spec) { return {spec, spec.pass, {1, 2, 2, 64, 64}, 0}; }

/// A change of one thing; its name for messages.
struct Change {
  const char* name;
  std::function<void(KernelSource&)> apply;
};

TEST(Key, ChangesWithEverythingThatMatters) {
  const std::vector<Change> changes{
      {"text", [](auto& s) { s.text += ' '; }},
      {"architecture", [](auto& s) { s.arch = "sm_86"; }},
      {"header text", [](auto& s) { s.headers[1].text = "twO"; }},
      {"header name", [](auto& s) { s.headers[1].name = "flashjit/c.cuh"; }},
      {"one header less", [](auto& s) { s.headers.pop_back(); }},
      {"where a header ends",
       [](auto& s) {
         s.headers = {{"flashjit/a.cuh", "onetwo"}, {"flashjit/b.cuh", ""}};
       }},
      {"entry name", [](auto& s) { s.entries[0].name = "backward"; }},
      {"threads", [](auto& s) { s.entries[0].threads = 256; }},
      {"min_blocks", [](auto& s) { s.entries[0].min_blocks = 2; }},
      {"cluster", [](auto& s) { s.entries[0].cluster = 2; }},
      {"shared bytes", [](auto& s) { s.entries[0].shared_bytes = 128; }},
      {"tensor maps", [](auto& s) { s.entries[0].tensor_maps = true; }},
      {"persistent", [](auto& s) { s.entries[0].persistent = true; }},
      {"one entry more", [](auto& s) { s.entries.push_back(s.entries[0]); }},
      {"pass", [](auto& s) { s.spec.pass = Pass::backward; }},
      {"dtype", [](auto& s) { s.spec.dtype = DType::fp16; }},
      {"head_dim", [](auto& s) { s.spec.head_dim = 72; }},
      {"head_dim_v", [](auto& s) { s.spec.head_dim_v = 72; }},
      {"score", [](auto& s) { s.spec.score = ScoreProgram("score * 2.0"); }},
      {"mask", [](auto& s) { s.spec.mask = causal(); }},
      {"dropout", [](auto& s) { s.spec.dropout = true; }},
      {"kv_lengths", [](auto& s) { s.spec.kv = KvLayout::padded(); }},
      {"block_map",
       [](auto& s) {
         s.spec.block_map = {64, 64};
       }},
      {"deterministic",
       [](auto& s) { s.spec.pass = Pass::backward, s.spec.reproducible.deterministic = true; }},
      {"varlen", [](auto& s) { s.spec.varlen = true; }},
      {"sinks", [](auto& s) { s.spec.sinks = true; }},
      {"cache", [](auto& s) { s.spec.kv = KvLayout::slots(); }},
      {"pages", [](auto& s) { s.spec.kv = KvLayout::paged(16); }},
      {"row_max", [](auto& s) { s.spec.epilogue.row_max = true; }},
      {"skip_softmax", [](auto& s) { s.spec.epilogue.skip_softmax = true; }},
      {"k_format", [](auto& s) { s.spec.kv.k_format = parse_kv_format("nvfp4"); }},
      {"v_format", [](auto& s) { s.spec.kv.v_format = parse_kv_format("q8_0"); }},
      {"q_codes",
       [](auto& s) {
         s.spec.kv = s.spec.kv.with(kv_format_of(DType::e4m3)), s.spec.prologue.q_codes = true;
       }},
      {"sums4",
       [](auto& s) {
         s.spec.kv = s.spec.kv.with(kv_format_of(DType::e4m3)), s.spec.prologue.q_codes = true;
         s.spec.epilogue.pv_sums = PvSums::of_four;
       }},
      {"sums_all",
       [](auto& s) {
         s.spec.kv = s.spec.kv.with(kv_format_of(DType::e4m3)), s.spec.prologue.q_codes = true;
         s.spec.epilogue.pv_sums = PvSums::of_all;
       }},
      {"key_scales",
       [](auto& s) { s.spec.kv = s.spec.kv.with(kv_format_of(DType::int8)), s.spec.kv.key_scales = true; }},
      {"fp32_out", [](auto& s) { s.spec.partial.fp32_out = true; }},
      {"two_terms", [](auto& s) { s.spec.partial.two_terms = true; }},
      {"fp32_grads", [](auto& s) { s.spec.pass = Pass::backward, s.spec.partial.fp32_grads = true; }},
      {"dropout_place", [](auto& s) { s.spec.dropout = s.spec.partial.dropout_place = true; }},
      {"add_grads", [](auto& s) { s.spec.pass = Pass::backward, s.spec.partial.add_grads = true; }},
      {"batch_invariant", [](auto& s) { s.spec.reproducible.batch_invariant = true; }},
      {"shared_kv", [](auto& s) { s.spec.kv.shared_kv = true; }},
      {"q_rope", [](auto& s) { s.spec.prologue.q_rope = true; }},
      {"indices", [](auto& s) { s.spec.indices = true; }},
      {"shared_prefix", [](auto& s) { s.spec.kv.shared_prefix = true; }},
      {"append", [](auto& s) { s.spec.pass = Pass::append; }},
      {"hadamard", [](auto& s) { s.spec.pass = Pass::append, s.spec.kv.hadamard = true; }},
      {"running_state", [](auto& s) { s.spec.partial.running_state = true; }},
      {"weight_mod", [](auto& s) { s.spec.score = weights(s.spec.score); }},
      {"out_mod", [](auto& s) { s.spec.epilogue.out_mod = OutProgram("out * 2.0"); }},
      {"out_format", [](auto& s) { s.spec.epilogue.out_format = parse_kv_format("e4m3"); }},
      {"swizzled_scales", [](auto& s) { s.spec.epilogue.swizzled_scales = true; }},
      {"q_mod", [](auto& s) { s.spec.prologue.q_mod = RowProgram("element * 2.0"); }},
      {"k_mod", [](auto& s) { s.spec.prologue.k_mod = RowProgram("element * 2.0"); }},
      {"br", [](auto& s) { s.config.br = 32; }},
      {"bc", [](auto& s) { s.config.bc = 32; }},
      {"warps", [](auto& s) { s.config.warps = 4; }},
      {"stages", [](auto& s) { s.config.stages = 2; }},
      {"q_in_registers", [](auto& s) { s.config.q_in_registers = true; }},
      {"d_split", [](auto& s) { s.config.d_split = 2; }},
      {"occupancy", [](auto& s) { s.config.min_blocks = 2; }},
      {"split", [](auto& s) { s.config.split = true; }},
      {"pack_gqa", [](auto& s) { s.config.pack_gqa = true; }},
      {"cluster", [](auto& s) { s.config.cluster = true; }},
      {"tma", [](auto& s) { s.config.tma = true; }},
      {"decode_cache", [](auto& s) { s.config.decode_cache = true; }},
      {"join_lists", [](auto& s) { s.config.join_lists = true; }},
      {"family", [](auto& s) { s.config.family = Family::sm80; }},
  };
  // Where one of these does not compile, a field was added: add its change above.
  const AttentionSpec spec = {};
  [[maybe_unused]] const auto& [a, b, c, d, e, f, kv, h, reproducible, j, k, indices, partial, epilogue,
                                prologue] = spec;
  [[maybe_unused]] const auto& [deterministic, batch_invariant] = reproducible;
  [[maybe_unused]] const auto& [q_codes, q_rope, q_mod, k_mod] = prologue;
  [[maybe_unused]] const auto& [row_max, out_mod, skip_softmax, pv_sums, out_format, swizzled_scales] =
      epilogue;
  [[maybe_unused]] const auto& [fp32_out, two_terms, fp32_grads, add_grads, dropout_place, running_state] =
      partial;
  [[maybe_unused]] const auto& [kind, page_size, shared_kv, shared_prefix, k_format, v_format, key_scales,
                                hadamard] = kv;
  const TileConfig config = {};
  [[maybe_unused]] const auto& [m, n, o, p, q, r, t, u, v, w, in_cluster, tma, decode_cache, join_lists] =
      config;
  // Not in the key by themselves: header, function, params and problem, which are in the text, as is what hot
  // means for a compiler.
  const plan::Entry entry = {};
  [[maybe_unused]] const auto& [name, header, function, threads, min_blocks, cluster, shared_bytes, hot,
                                tensor_maps, params, problem, persistent] = entry;

  std::set<std::string> digests{source_digest(source(), kOptions)};
  for (const Change& change : changes) {
    KernelSource changed = source();
    change.apply(changed);
    EXPECT_TRUE(digests.insert(source_digest(changed, kOptions)).second) << change.name;
    const KernelSource before = source();
    EXPECT_EQ(call_key(changed.spec) == call_key(before.spec), changed.spec == before.spec) << change.name;
  }
  for (std::vector<std::string> options : {std::vector<std::string>{},
                                           {kOptions[0]},
                                           {kOptions[1], kOptions[0]},
                                           {kOptions[0], kOptions[1], "-lineinfo"},
                                           {kOptions[0] + kOptions[1]}}) {
    EXPECT_TRUE(digests.insert(source_digest(source(), options)).second) << options.size();
  }
}

TEST(Key, StaysWithEverythingElse) {
  const std::string expected = source_digest(source(), kOptions);
  KernelSource turned = source();
  std::reverse(turned.headers.begin(), turned.headers.end());
  EXPECT_EQ(source_digest(turned, kOptions), expected) << "order of headers";

  KernelSource hot = source();
  hot.entries[0].hot = true;
  EXPECT_EQ(source_digest(hot, kOptions), expected) << "what the text says";
}

/// The key of one rendered kernel, as this process makes it.
std::string rendered_key(const render::TemplateSet& templates = render::TemplateSet::embedded()) {
  const KernelSource s =
      render::render(parse_spec("bwd:bf16:d64:causal").normalized(), parse_config("simt:br32:bc32:w4"),
                     DeviceInfo::parse("sm_80"), templates);
  return entry_key(source_digest(s, compile::compile_options(s.arch)), "nvrtc13.0.88");
}

// A process whose name, folder, environment, language, clock's zone and umask are others.
TEST(Key, StaysInAnotherProcess) {
  int results[2];
  ASSERT_EQ(::pipe(results), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_NAME, "another");
    ::clearenv();
    ::setenv("FLASHJIT_CACHE_DIR", "/somewhere/else", 1);
    ::setenv("HOME", "/another/home", 1);
    ::setenv("TZ", "Pacific/Auckland", 1);
    ::setenv("CUDA_CACHE_PATH", "/elsewhere", 1);
    ::setlocale(LC_ALL, "C.UTF-8");
    ::umask(0);
    if (::chdir("/") != 0) ::_exit(1);
    const std::string key = rendered_key();
    ::_exit(::write(results[1], key.data(), key.size()) == static_cast<ssize_t>(key.size()) ? 0 : 1);
  }
  std::string other(rendered_key().size(), '\0');
  EXPECT_EQ(::read(results[0], other.data(), other.size()), static_cast<ssize_t>(other.size()));
  EXPECT_EQ(other, rendered_key());
  ::waitpid(child, nullptr, 0);
  ::close(results[0]);
  ::close(results[1]);
}

class KeyOfTemplates : public testing::Test {
 protected:
  KeyOfTemplates() {
    fs::copy(fs::path(test::sources()) / "templates", folder_, fs::copy_options::recursive);
  }
  ~KeyOfTemplates() override { fs::remove_all(folder_); }
  std::string key() const { return rendered_key(render::TemplateSet::from_folder(folder_)); }
  void append(const char* name) const {
    std::ofstream(folder_ / name, std::ios::app) << "// one line more\n";
  }

  fs::path folder_ = fs::path(testing::TempDir()) / ("templates-" + unique_suffix());
};

TEST_F(KeyOfTemplates, StaysWhereverTheyLieAndHoweverOldTheyAre) {
  EXPECT_EQ(key(), rendered_key());
  for (const auto& file : fs::recursive_directory_iterator(folder_))
    fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::hours(100000));
  EXPECT_EQ(key(), rendered_key());
}

TEST_F(KeyOfTemplates, ChangesWithThoseThatTheKernelIncludesAlone) {
  append("sm90/forward.cuh");
  EXPECT_EQ(key(), rendered_key()) << "no simt kernel includes it";
  append("simt/backward.cuh");
  const std::string changed = key();
  EXPECT_NE(changed, rendered_key());
  append("common/ptx.cuh");
  EXPECT_NE(key(), changed);
}

// So they need not be in the key as well.
TEST(Key, HoldsTheTemplateAndTheFunctionOfAnEntryByTheText) {
  for (const char* config : {"simt:br32:bc32:w4", "sm80:br64:bc64:w4"}) {
    for (const char* spec : {"fwd:bf16:d64", "bwd:bf16:d64"}) {
      const KernelSource s = render::render(parse_spec(spec).normalized(), parse_config(config),
                                            DeviceInfo::parse("sm_80"), render::TemplateSet::embedded());
      for (const plan::Entry& entry : s.entries) {
        EXPECT_NE(s.text.find("#include \"" + entry.header + "\""), std::string::npos) << entry.header;
        EXPECT_NE(s.text.find(entry.function + "<flashjit::Problem>("), std::string::npos) << entry.function;
      }
    }
  }
}

// What a launch hands over is declared in a header, so that no kernel is launched with another version's.
TEST(Key, HoldsTheParametersOfTheLaunch) {
  const KernelSource s =
      render::render(parse_spec("fwd:bf16:d64").normalized(), parse_config("simt:br32:bc32:w4"),
                     DeviceInfo::parse("sm_80"), render::TemplateSet::embedded());
  KernelSource changed = s;
  const auto params = std::ranges::find(changed.headers, "flashjit/common/params.cuh", &Header::name);
  ASSERT_NE(params, changed.headers.end());
  params->text += " ";
  EXPECT_NE(source_digest(changed, kOptions), source_digest(s, kOptions));
}

// Python's captures={"cap": 50} is an int, 50.0 a float: the kernel is one.
TEST(Key, IsOneForIntsAndFloatsThatAreReadAsFloats) {
  const auto rendered = [&](const std::string& text) {
    return render::render(parse_spec(text).normalized(), parse_config("simt:br32:bc32:w4"),
                          DeviceInfo::parse("sm_80"), render::TemplateSet::embedded());
  };
  const auto key = [&](const std::string& text) { return source_digest(rendered(text), kOptions); };
  for (const char* pass : {"fwd:bf16:d64", "bwd:bf16:d64"}) {
    for (const char* options :
         {":score{cap: TYPE; cap * tanh(score / cap)}", ":mask{cap: TYPE; to_float(q) < cap}",
          ":score{t: fp32 1d; cap: TYPE; score + t[h] * cap}:mask{cap: TYPE; to_float(q) < cap * 2.0}"}) {
      const auto with = [&](const std::string& type) {
        return pass + std::regex_replace(std::string(options), std::regex("TYPE"), type);
      };
      EXPECT_EQ(key(with("int")), key(with("float"))) << options;
    }
  }
  const std::string both = ":score{n: int; score * n}:mask{n: int; q % n == 0}";
  EXPECT_EQ(to_string(parse_spec("fwd:bf16:d64" + both)),
            "fwd:bf16:d64:score{n: int; score * to_float(n)}:mask{n: int; q % n == 0}");
  EXPECT_EQ(to_string(parse_spec("fwd:bf16:d64:score{n: int; score * n}")),
            "fwd:bf16:d64:score{n: float; score * n}");
}

TEST(Key, ChangesWithEachDebugMode) {
  const KernelSpec spec = parse_spec("fwd:bf16:d64:score{t: fp32 1d; score + t[h]}").normalized();
  const auto key = [&](const plan::Checks& options) {
    return source_digest(render::render(spec, parse_config("simt:br32:bc32:w4"), DeviceInfo::parse("sm_80"),
                                        render::TemplateSet::embedded(), options),
                         kOptions);
  };
  const std::set<std::string> keys{key({}), key({.check_indices = true}), key({.check_waits = true}),
                                   key({.check_indices = true, .check_waits = true})};
  EXPECT_EQ(keys.size(), 4u);
}

// The options are those that NVRTC is given: a kernel made with other ones has another key.
TEST(Key, HoldsEachOptionOfTheCompiler) {
  const std::vector<std::string> options = compile::compile_options("sm_80");
  std::set<std::string> digests{source_digest(source(), options)};
  for (std::size_t i = 0; i < options.size(); ++i) {
    std::vector<std::string> changed = options;
    changed[i] += "x";
    EXPECT_TRUE(digests.insert(source_digest(source(), changed)).second) << options[i];
    changed.erase(changed.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_TRUE(digests.insert(source_digest(source(), changed)).second) << "without " << options[i];
  }
}

// A pinned value: a change of it makes every user compile everything again, so it must be meant.
TEST(Key, IsTheSameInEveryProcessAndRelease) {
  EXPECT_EQ(source_digest(source(), kOptions), "fe1afdeb2954b297475394922cf445e2");
}

TEST(Key, IsReadableAsAFolderName) {
  const std::string key = entry_key(source_digest(source(), kOptions), "nvrtc13.0.88");
  EXPECT_TRUE(std::regex_match(key, std::regex("[0-9a-f]{32}-nvrtc13\\.0\\.88"))) << key;
  EXPECT_NE(key, entry_key(source_digest(source(), kOptions), "nvrtc12.9.86"));
}

// Rendered sources of every field of the spec and of every configuration have keys of their own.
TEST(Key, DiffersForEveryRenderedKernel) {
  std::set<std::string> digests;
  std::size_t count = 0;
  const auto add = [&](const KernelSpec& spec, const TileConfig& config, const DeviceInfo& device) {
    const KernelSource s = render::render(spec, config, device, render::TemplateSet::embedded());
    EXPECT_TRUE(digests.insert(source_digest(s, kOptions)).second) << s.text;
    ++count;
  };
  const DeviceInfo device = DeviceInfo::parse("sm_80");
  for (const char* text :
       {"fwd:fp32:d64", "bwd:fp32:d64", "fwd:bf16:d64", "fwd:fp16:d64", "fwd:fp32:d72", "fwd:fp32:d64x72",
        "fwd:fp32:d64:causal", "fwd:fp32:d64:causal_top_left", "fwd:fp32:d64:dropout", "fwd:fp32:d64:kvlen",
        "fwd:fp32:d64:map64x64", "fwd:fp32:d64:map64x128", "bwd:fp32:d64:det"}) {
    add(parse_spec(text), parse_config("simt:br32:bc32:w4"), device);
  }
  add(parse_spec("fwd:fp32:d64"), parse_config("simt:br32:bc32:w4"), DeviceInfo::parse("sm_86"));
  const KernelSpec spec = parse_spec("fwd:bf16:d64").normalized();
  for (const TileConfig& config : plan::traits(Family::sm80).search_space(spec, device))
    add(spec, config, device);
  EXPECT_GT(count, 30u);
}

}  // namespace
}  // namespace flashjit

// Every family, pass, element type and feature compiles for every architecture, without spills in a main loop
// and within the device's shared memory and registers. Needs NVRTC and no GPU. A run has an eighth of the
// kernels, drawn by the templates (support/spread.hpp); at night all.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>
#include <utility>

#include "compile/compiler.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "tests/support/covering.hpp"
#include "tests/support/nvrtc.hpp"
#include "tests/support/planned_constant.hpp"
#include "tests/support/spills.hpp"
#include "tests/support/spread.hpp"

namespace flashjit {
namespace {

using test::compiler;

// The heuristic takes other tiles where the device would be idle.
AttentionShape shape_of(std::size_t index) {
  return parse_shape(index % 3 == 2 ? "b1:hq2:hkv1:sq100:skv130" : "b4:hq32:hkv8:sq4096:skv4096");
}

/// What is wrong with one entry; empty: nothing.
std::string fault(const plan::Entry& entry, const CompiledKernel& kernel, const DeviceInfo& device) {
  const auto used = std::find_if(kernel.resources.begin(), kernel.resources.end(),
                                 [&](const EntryResources& r) { return r.entry == entry.name; });
  if (used == kernel.resources.end()) return "ptxas reported nothing of it";
  if (kernel.cubin.find("flashjit_" + entry.name) == std::string::npos) return "the cubin lacks its symbol";
  if (entry.hot && used->spill_stores + used->spill_loads > 0) {
    return fmt::format("spills {} + {} bytes at {} registers", used->spill_stores, used->spill_loads,
                       used->registers);
  }
  if (const int bytes = used->static_shared + entry.shared_bytes; bytes > device.shared_per_block) {
    return fmt::format("{} bytes of shared memory, {} are there", bytes, device.shared_per_block);
  }
  if (const int registers = used->registers * entry.threads * entry.min_blocks;
      registers > device.registers_per_sm) {
    return fmt::format("{} registers, {} are there", registers, device.registers_per_sm);
  }
  return {};
}

/// A run has an eighth of these kernels.
bool is_drawn(const std::string& name) { return test::is_drawn(name, 8); }

/// What is wrong with one kernel; empty: nothing.
std::string faults_of(const KernelSpec& spec, const TileConfig& config, const DeviceInfo& device,
                      const std::string& name, const plan::Checks& checks = {}) {
  std::string faults;
  try {
    const KernelSource source = render::render(spec, config, device, render::TemplateSet::embedded(), checks);
    const CompiledKernel kernel = compiler().compile(source);
    for (const plan::Entry& entry : source.entries) {
      const std::string what = fault(entry, kernel, device);
      if (!what.empty()) faults += fmt::format("{} {}: {}\n", name, entry.name, what);
    }
    if (const std::string line = test::performance_loss(kernel.log); !line.empty())
      faults += fmt::format("{}: ptxas made it slower: \"{}\"\n", name, line);
    if (kernel.log.find("warning") != std::string::npos) faults += fmt::format("{}: {}\n", name, kernel.log);
  } catch (const Error& error) {
    faults += fmt::format("{}: {}\n{}\n", name, error.message(), error.detail());
  }
  return faults;
}
/// The same; empty, too, if the kernel is not drawn.
std::string compile_and_check(const KernelSpec& spec, const TileConfig& config, const DeviceInfo& device,
                              const plan::Checks& checks = {}) {
  const std::string name = fmt::format("{} {} {}", device.arch, to_string(spec), to_string(config));
  return is_drawn(name) ? faults_of(spec, config, device, name, checks) : "";
}

/// One kernel to compile.
struct Case {
  KernelSpec spec;
  TileConfig config;
};

/// The specs that the family can do, with the tiles it would take itself.
std::vector<Case> cases_of(const plan::FamilyTraits& family, const std::vector<KernelSpec>& specs,
                           const DeviceInfo& device) {
  std::vector<Case> cases;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (family.supports(specs[i], device))
      cases.push_back({specs[i], family.heuristic(specs[i], shape_of(i), device)});
  }
  return cases;
}

constexpr std::array kArchitectures{"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"};

/// What sm80 and simt compile for the device: they are the same for all but in their tiles.
std::vector<Case> spread_cases(const std::vector<KernelSpec>& specs, const DeviceInfo& device) {
  const std::array families{&plan::sm80_traits(), &plan::simt_traits()};
  std::vector<DeviceInfo> devices;
  for (const char* arch : kArchitectures) devices.push_back(DeviceInfo::parse(arch));
  std::vector<Case> cases;
  for (const test::Place& place : test::spread(specs, families, devices)) {
    if (devices[place.device].arch != device.arch) continue;
    const KernelSpec& spec = specs[place.spec];
    cases.push_back({spec, families[place.family]->heuristic(spec, shape_of(place.spec), device)});
  }
  return cases;
}

/// All that the families of one architecture do, and a part of what others do.
std::vector<Case> cases_of_all(const std::vector<KernelSpec>& specs, const DeviceInfo& device) {
  std::vector<Case> all = spread_cases(specs, device);
  for (const plan::FamilyTraits* family : {&plan::sm90_traits(), &plan::sm75_traits()})
    if (test::is_planned(*family, device))
      std::ranges::copy(cases_of(*family, specs, device), std::back_inserter(all));
  return all;
}

std::vector<Case> cases(const DeviceInfo& device) {
  std::vector<Case> all =
      cases_of(plan::sm90_traits(), test::covering_words(test::covering_plain_specs()), device);
  // Its tiles are larger there where nothing but causal is asked for: KernelsOfPlainAttention has those.
  if (device.compute_capability == 90 && test::every_kernel())
    std::ranges::copy(cases_of(plan::sm80_traits(), test::covering_plain_specs(), device),
                      std::back_inserter(all));
  std::ranges::copy(cases_of_all(test::covering_specs(), device), std::back_inserter(all));
  return all;
}

/// By an architecture.
class Kernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::vector<std::string> offered = compiler().architectures();
    if (std::count(offered.begin(), offered.end(), GetParam()) == 0)
      GTEST_SKIP() << compiler().tag() << " does not compile for " << GetParam();
  }
};

void compile_and_check_all(const std::vector<Case>& all, const DeviceInfo& device) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  const auto work = [&] {
    for (std::size_t i = next++; i < all.size(); i = next++) {
      const std::string faults = compile_and_check(all[i].spec, all[i].config, device);
      const std::lock_guard lock(mutex);
      if (!faults.empty()) ADD_FAILURE() << faults;
    }
  };
  std::thread helper(work);
  work();
  helper.join();
}

TEST_P(Kernels, CompileWithoutSpillsWithinTheDevice) {
  const DeviceInfo device = DeviceInfo::parse(GetParam());
  compile_and_check_all(cases(device), device);
}
TEST_P(Kernels, CompileWithoutSpillsAbove256Columns) {
  const DeviceInfo device = DeviceInfo::parse(GetParam());
  compile_and_check_all(cases_of_all(test::covering_wide_specs(), device), device);
}

INSTANTIATE_TEST_SUITE_P(Architectures, Kernels, testing::ValuesIn(kArchitectures),
                         [](const auto& info) { return std::string(info.param); });

/// K and V by TMA, with the tiles that the planner takes without, in one stage.
TEST(KernelsThatCopyByTma, CompileWithoutSpills) {
  const plan::FamilyTraits& family = plan::sm80_traits();
  std::vector<KernelSpec> specs = test::covering_plain_specs();
  std::ranges::copy(test::covering_specs(), std::back_inserter(specs));
  std::ranges::copy(test::covering_wide_specs(), std::back_inserter(specs));
  test::Turns turns;
  std::map<std::string, std::vector<Case>> cases;
  for (std::size_t i = 0; i < specs.size(); ++i)
    for (const char* arch : turns.of<const char*>("sm_120", "sm_90a")) {
      const DeviceInfo device = DeviceInfo::parse(arch);
      if (specs[i].pass != Pass::forward || !family.supports(specs[i], device)) continue;
      TileConfig config = family.heuristic(specs[i], shape_of(i), device);
      config.stages = 1;
      config.tma = true;
      if (family.admits(specs[i], config, device)) cases[arch].push_back({specs[i], config});
    }
  for (const auto& [arch, all] : cases) {
    EXPECT_GE(all.size(), 10u) << arch;
    compile_and_check_all(all, DeviceInfo::parse(arch));
  }
}

/// The covering specs have every pair of features, but not what most people use: nothing or a causal mask.
TEST(KernelsOfPlainAttention, CompileWithoutSpillsOnHopper) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  const AttentionShape shape{4, 16, 16, 4096, 4096};
  test::Turns turns;
  const auto check = [&](const plan::FamilyTraits& family, const char* dims) {
    for (const char* mask :
         family.family == Family::sm90 ? std::vector{"", ":causal"} : turns.of<const char*>("", ":causal")) {
      for (const char* pass : {"fwd", "bwd"}) {
        const KernelSpec spec = parse_spec(fmt::format("{}:bf16:{}{}", pass, dims, mask)).normalized();
        const TileConfig config = family.heuristic(spec, shape, device);
        const std::string faults = compile_and_check(spec, config, device);
        if (!faults.empty()) ADD_FAILURE() << faults;
      }
    }
  };
  for (const char* dims : {"d32", "d64", "d96", "d128", "d192x128", "d256"}) check(plan::sm90_traits(), dims);
  for (const char* dims : {"d80", "d96", "d120", "d120x128", "d128x120", "d160", "d192", "d192x128", "d240"})
    check(plan::sm80_traits(), dims);
}

TEST(KernelsOfLatents, CompileWithoutSpills) {
  constexpr std::array kSpecs = {
      "fwd:bf16:d576x512:causal:pages64:shared_kv",        "fwd:bf16:d576x512:causal:pages1:shared_kv",
      "fwd:fp16:d576x512:varlen:causal:shared_kv",         "fwd:bf16:d320x256:kvlen:dropout:shared_kv",
      "fwd:fp16:d192x128:causal:map64x64:shared_kv",       "fwd:fp32:d96x64:shared_kv",
      "fwd:bf16:d576x512:causal:pages64:shared_kv:q_rope", "fwd:fp16:d320x256:varlen:cache:shared_kv:q_rope",
      "fwd:bf16:d576x512:pages64:shared_kv:q_rope:indices"};
  test::Turns turns;
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    turns.next_row();
    for (const plan::FamilyTraits& family : plan::families())
      for (const char* text : kSpecs)
        for (const char* shape :
             turns.of<const char*>("b4:hq32:hkv1:sq4096:skv4096", "b1:hq1:hkv1:sq16:skv32768")) {
          const KernelSpec spec = parse_spec(text);
          if (!test::is_planned(family, device) || !family.supports(spec, device)) continue;
          const TileConfig config = family.heuristic(spec, parse_shape(shape), device);
          EXPECT_EQ(compile_and_check(spec, config, device), "");
        }
  }
}

/// With the tiles that the family takes by itself.
TEST(KernelsOfCaptureGrads, CompileWithoutSpills) {
  constexpr std::array kScores = {"slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)",
                                  "bias: bf16 4d grad; score + bias[b, h, q, kv]",
                                  "table: fp16 2d grad; score + table[h, max(min(kv - q, 31), -32) + 32]",
                                  "gate: fp32 2d grad; score * gate[q, kv]"};
  constexpr std::array kRests = {":causal", ":mask{doc: int32 1d; doc[q] == doc[kv]}:varlen",
                                 ":dropout:map64x64"};
  constexpr std::array kArchitectures = {"sm_80", "sm_90a", "sm_120"};
  std::size_t i = 0;
  for (const char* dims : {"d64", "d128", "d256", "d512"}) {
    for (const char* score : kScores) {
      const DeviceInfo device = DeviceInfo::parse(kArchitectures[i / 3 % 3]);
      const KernelSpec spec =
          parse_spec(fmt::format("bwd:bf16:{}:score{{{}}}{}", dims, score, kRests[i % 3]));
      const TileConfig config = plan::sm80_traits().heuristic(spec, shape_of(0), device);
      EXPECT_EQ(compile_and_check(spec, config, device), "");
      ++i;
    }
  }
}

// Also where TMA does not copy the bias tile, which the warps then do while they hold their accumulators.
TEST(KernelsThatReadBiasTiles, CompileWithoutSpills) {
  constexpr std::array kRests = {"", ":causal", ":causal:varlen", ":kvlen"};
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  std::size_t i = 0;
  for (const char* dims : {"d40", "d64", "d96", "d128", "d192", "d192x128", "d256"}) {
    for (const char* score :
         {"bias: bf16 4d; score + bias[b, h, q, kv]", "m: fp16 2d; score * m[q, kv + 1]"}) {
      const KernelSpec spec =
          parse_spec(fmt::format("fwd:bf16:{}:score{{{}}}{}", dims, score, kRests[i % 4]));
      EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape_of(i), device), device),
                "");
      ++i;
    }
    const KernelSpec backward =
        parse_spec(fmt::format("bwd:fp16:{}:score{{bias: bf16 2d; score + bias[q, kv]}}", dims));
    EXPECT_EQ(
        compile_and_check(backward, plan::sm90_traits().heuristic(backward, shape_of(0), device), device),
        "");
  }
}

// The warps that compute know nothing of these gradients: others make them of dS in shared memory.
TEST(KernelsOfGradientsFromDs, CompileWithoutSpills) {
  constexpr std::array kRests = {"", ":causal", ":causal:varlen", ":dropout"};
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  std::size_t i = 0;
  const auto check = [&](const char* dims, const char* score) {
    const KernelSpec spec = parse_spec(fmt::format("bwd:bf16:{}:score{{{}}}{}", dims, score, kRests[i % 4]));
    EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape_of(i), device), device), "");
    ++i;
  };
  for (const char* dims : {"d72", "d96", "d128", "d192", "d256"}) {
    check(dims, "bias: bf16 4d grad; score + bias[b, h, q, kv]");
    check(dims, "bias: fp16 2d grad; 9.0 * tanh((score + bias[q, kv + 1]) / 9.0)");
  }
  // Between, reads of the table leave no registers.
  for (const char* dims : {"d40", "d64", "d192x128", "d256"}) {
    check(dims, "table: fp32 2d grad; score + table[h, kv - q + seqlen_q]");
    check(dims, "table: fp16 2d grad; score + table[h, max(min(kv - q, 31), -32) + 32]");
  }
}

// What they read of queries or keys alone they find before they need it: in the backward pass where no
// lengths need the registers.
TEST(KernelsThatReadPositions, CompileWithoutSpills) {
  constexpr std::array kRests = {"", ":causal", ":dropout:causal", ":causal:varlen", ":kvlen"};
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  std::size_t i = 0;
  test::Turns turns;
  const auto check = [&](const char* pass, const char* dims, const char* score, std::size_t rests) {
    const KernelSpec spec =
        parse_spec(fmt::format("{}:bf16:{}:score{{{}}}{}", pass, dims, score, kRests[i % rests]));
    EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape_of(i), device), device), "");
  };
  for (const char* dims : {"d40", "d64", "d96", "d128", "d192", "d256"}) {
    turns.next_row();
    for (const char* score : turns.of<const char*>("bias: fp32 2d; score + bias[b, kv]",
                                                   "g: bf16 3d; score * sigmoid(g[b, h, kv])")) {
      check("fwd", dims, score, kRests.size());
      check("bwd", dims, score, 3);
      ++i;
    }
    for (const char* score : turns.of<const char*>("t: bf16 2d; score * sigmoid(t[h, q])",
                                                   "f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])")) {
      check("fwd", dims, score, kRests.size());
      check("bwd", dims, score, 3);
      ++i;
    }
  }
}

/// Kernels whose blocks take a part each of what a tile meets.
void compile_split(const char* pass, const std::array<const char*, 5>& rests, const AttentionShape& shape) {
  test::Turns turns;
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    const plan::FamilyTraits& family = device.arch == "sm_90a" ? plan::sm90_traits() : plan::sm80_traits();
    std::size_t i = 0;
    turns.next_row();
    for (const char* dims : {"d8", "d64", "d96", "d128", "d192x128", "d256"}) {
      if (device.arch != "sm_90a" && !turns.of(true, false).front()) {
        ++i;
        continue;
      }
      const std::string text = fmt::format("{}:bf16:{}{}", pass, dims, rests[i++ % rests.size()]);
      const KernelSpec spec = parse_spec(text).normalized();
      TileConfig config = family.heuristic(spec, shape, device);
      EXPECT_TRUE(config.split || spec.pass == Pass::forward) << to_string(spec);
      config.split = true;
      EXPECT_EQ(compile_and_check(spec, config, device), "");
    }
  }
}

// Few queries of many keys.
TEST(KernelsThatShareKeys, CompileWithoutSpills) {
  compile_split("fwd", {"", ":causal:kvlen", ":dropout:sinks", ":causal:varlen:row_max", ":map128x128"},
                {1, 8, 8, 16, 16384});
}

// Few KV tiles of many queries.
TEST(KernelsThatShareQueries, CompileWithoutSpills) {
  compile_split("bwd", {"", ":causal:kvlen", ":dropout:sinks", ":causal:varlen", ":map128x128:det"},
                {1, 32, 1, 4096, 512});
}

// Few queries of grouped heads, of which a tile has all that share K and V.
TEST(KernelsThatPackHeads, CompileWithoutSpills) {
  constexpr std::array kRests = {"",
                                 ":causal",
                                 ":causal:kvlen",
                                 ":score{50.0 * tanh(score / 50.0)}:causal",
                                 ":mask{q >= kv && q - kv < 300}:varlen:sinks",
                                 ":score{f: fp32 2d; score + (f[b, q] - f[b, kv])}:causal_top_left"};
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  const AttentionShape shape{1, 32, 8, 16, 16384};
  std::size_t i = 0;
  for (const char* dims : {"d8", "d64", "d96", "d128", "d192x128", "d256"}) {
    for (int n = 0; n < 2; ++n) {
      const KernelSpec spec = parse_spec(fmt::format("fwd:bf16:{}{}", dims, kRests[i++ % 6])).normalized();
      TileConfig config = plan::sm90_traits().heuristic(spec, shape, device);
      config.split = config.pack_gqa = true;
      EXPECT_EQ(compile_and_check(spec, config, device), "");
    }
  }
}

// A thread of sm80 finds each row's page, besides all that it keeps.
TEST(KernelsOfCaches, CompileWithoutSpills) {
  constexpr std::array kRests = {
      ":causal:varlen:pages16", ":cache",
      ":causal:pages1",         ":mask{q - kv < 300}:varlen:pages24",
      ":varlen:sinks:pages3",   ":dropout:pages1",
      ":sinks:varlen:pages128", ":score{50.0 * tanh(score / 50.0)}:causal:pages64"};
  std::size_t i = 0;
  test::Turns turns;
  for (const char* arch : {"sm_80", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    turns.next_row();
    for (const char* dims : {"d64", "d96", "d128", "d192x128", "d256"}) {
      for (const AttentionShape& shape :
           turns.of<AttentionShape>({16, 32, 8, 1, 8192}, {4, 32, 8, 1024, 1024})) {
        const KernelSpec spec =
            parse_spec(fmt::format("fwd:bf16:{}{}", dims, kRests[i++ % kRests.size()])).normalized();
        for (const plan::FamilyTraits* family : {&plan::sm90_traits(), &plan::sm80_traits()})
          if (family->supports(spec, device)) {
            EXPECT_EQ(compile_and_check(spec, family->heuristic(spec, shape, device), device), "");
          }
      }
    }
  }
}

TEST(KernelsOfIndices, CompileWithoutSpills) {
  constexpr std::array kRests = {":indices",
                                 ":causal:varlen:pages64:sinks:indices",
                                 ":causal:cache:indices",
                                 ":mask{doc: int32 1d; doc[q] == doc[kv]}:kvlen:indices",
                                 ":pages3:fp32_out:indices",
                                 ":causal:shared_kv:indices"};
  std::size_t i = 0;
  for (const char* dims : {"bf16:d64", "fp16:d96", "bf16:d128", "fp16:d192x128", "bf16:d256", "fp16:d320x256",
                           "bf16:d512", "fp16:d576x512", "bf16:d576x512", "fp16:d576x512"}) {
    const AttentionShape shape{16, 64, 1, 1, 8192};
    for (const char* arch : {"sm_80", "sm_90a", "sm_120"}) {
      const DeviceInfo device = DeviceInfo::parse(arch);
      const KernelSpec spec = parse_spec(fmt::format("{}{}", dims, kRests[i++ % kRests.size()]));
      for (const plan::FamilyTraits& family : plan::families()) {
        if (family.family == Family::simt && i % 3 != 0 && !test::every_kernel()) continue;
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          KernelSpec of_pass = spec;
          of_pass.pass = pass;
          if (pass == Pass::backward && spec.kv.is_cache()) continue;
          of_pass = of_pass.normalized();
          if (test::is_planned(family, device) && family.supports(of_pass, device)) {
            EXPECT_EQ(compile_and_check(of_pass, family.heuristic(of_pass, shape, device), device), "");
          }
        }
      }
    }
  }
}

TEST(KernelsWithOutInFp32, CompileWithoutSpills) {
  constexpr std::array kRests = {":fp32_out",
                                 ":causal:fp32_out",
                                 ":causal:varlen:fp32_out",
                                 ":causal:pages16:fp32_out",
                                 ":cache:invariant:fp32_out",
                                 ":causal:varlen:pages64:invariant"};
  std::size_t i = 0;
  for (const char* arch : {"sm_80", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    for (const char* dims : {"d64", "d128", "d192x128", "d256"}) {
      for (const AttentionShape& shape : {AttentionShape{16, 32, 8, 1, 8192}, {4, 32, 8, 1024, 1024}}) {
        const KernelSpec spec =
            parse_spec(fmt::format("fwd:bf16:{}{}", dims, kRests[i++ % kRests.size()])).normalized();
        const plan::ExecutionPlan plan = plan::make_plan(spec, shape, device, {});
        EXPECT_EQ(compile_and_check(plan.spec, plan.config, device), "");
      }
    }
  }
}

TEST(KernelsOfRunningStates, CompileWithoutSpills) {
  constexpr std::array kRests = {":causal",          ":fp32_out", ":causal:varlen:fp32_out",
                                 ":causal:fp32_out", "",          ":causal:dropout:fp32_out"};
  std::size_t i = 0;
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    for (const char* dims : {"d64", "d128", "d192x128", "d256", "d320x280"}) {
      for (const AttentionShape& shape : {AttentionShape{1, 32, 8, 16384, 16384}, {4, 8, 8, 30, 8192}}) {
        const KernelSpec spec =
            parse_spec(fmt::format("fwd:bf16:{}{}:running_state", dims, kRests[i++ % kRests.size()]))
                .normalized();
        const plan::ExecutionPlan plan = plan::make_plan(spec, shape, device, {});
        EXPECT_EQ(compile_and_check(plan.spec, plan.config, device), "");
      }
    }
  }
}

TEST(KernelsOfSharedPrefixes, CompileWithoutSpills) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  for (const char* text :
       {"bf16:d64:causal", "fp16:d128:sinks", "bf16:d256:causal", "bf16:d128:kve4m3:causal"})
    for (const std::int64_t queries : {1, 100}) {
      const KernelSpec spec =
          parse_spec(fmt::format("fwd:{}:varlen:pages{}:shared_prefix", text, queries == 1 ? 16 : 3))
              .normalized();
      const plan::ExecutionPlan plan = plan::make_plan(spec, {64, 32, 8, queries, 8704}, device, {});
      EXPECT_TRUE(plan.schedule.cascade) << text;
      EXPECT_EQ(compile_and_check(plan.spec, plan.config, device), "");
    }
}

// Their schedulers keep more than others': in each run, the tile that spilled.
TEST(KernelsOfSharedPrefixes, ProducersOfTwoConsumersHaveRegisters) {
  const KernelSpec spec = parse_spec("fwd:fp16:d128:varlen:sinks:pages16:shared_prefix").normalized();
  const TileConfig config = parse_config("sm90:br128:bc64:w8:s4:split:pack_gqa");
  EXPECT_EQ(faults_of(spec, config, DeviceInfo::parse("sm_90a"), to_string(config)), "");
}

TEST(KernelsOfBlocksOfADropoutMask, CompileWithoutSpills) {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    for (const char* text : {"fwd:bf16:d64:causal:varlen", "fwd:bf16:d128:causal",
                             "bwd:bf16:d64:causal:varlen", "bwd:bf16:d128:causal"}) {
      const KernelSpec spec = parse_spec(fmt::format("{}:dropout:dropout_place", text)).normalized();
      const plan::ExecutionPlan plan = plan::make_plan(spec, {1, 32, 8, 4096, 4096}, device, {});
      EXPECT_EQ(compile_and_check(plan.spec, plan.config, device), "");
    }
  }
}

TEST(KernelsWithGradientsInFp32, CompileWithoutSpills) {
  test::Turns turns;
  for (const char* arch : {"sm_80", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    turns.next_row();
    for (const char* text :
         {"d64:causal", "d128", "d128:causal", "d128:causal:varlen", "d192x128:causal", "d256"}) {
      for (const char* option : turns.of<const char*>("fp32_grads", "add_grads")) {
        const KernelSpec spec = parse_spec(fmt::format("bwd:bf16:{}:{}", text, option)).normalized();
        const plan::ExecutionPlan plan = plan::make_plan(spec, {4, 32, 8, 1024, 1024}, device, {});
        EXPECT_EQ(compile_and_check(plan.spec, plan.config, device), "");
      }
    }
  }
}

TEST(KernelsAroundAttention, CompileWithoutSpills) {
  for (const char* arch : {"sm_75", "sm_80", "sm_90a", "sm_120"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    for (const char* text :
         {"append:bf16:d128:varlen:pages16", "append:fp16:d64x32:pages3", "append:fp32:d256:cache",
          "append:bf16:d8:varlen:cache", "append:bf16:d128:kve4m3:varlen:pages16:key_scales",
          "append:fp16:d64x32:kvint8:cache", "append:fp32:d80:kve5m2:pages1:key_scales", "merge:bf16:d128",
          "append:fp16:d64x32:kve4m3:pages16:key_scales:hadamard", "append:bf16:d128:kv{q4_0}:cache:hadamard",
          "quantize:bf16:d128:kve4m3", "quantize:fp32:d80:kvint8", "merge:fp16:d40", "merge:fp32:d256"}) {
      const KernelSpec spec = parse_spec(text).normalized();
      for (const plan::FamilyTraits& family : plan::families())
        if (test::is_planned(family, device) && family.supports(spec, device)) {
          EXPECT_EQ(compile_and_check(spec, family.heuristic(spec, shape_of(0), device), device), "");
        }
    }
  }
}

// Rows are decoded on their way to wgmma, by warps with few registers.
TEST(KernelsOfKvFormats, CompileWithoutSpillsOnHopper) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  test::Turns turns;
  for (const char* formats :
       {"kv{nvfp4}", "kv{mxfp8}", "kv{q8_0}", "kv{q4_1}", "k{q5_0}:v{uint3:g32:fp16:min}",
        "kv{book(-7,-4.1,-2,-1,1,2,4.1,7):g128:fp16}", "kv{int4:g32:fp16:zero}", "kv{e4m3:g128:fp32}",
        "kv{e2m1:g16:e4m3:apart:scaled}", "kv{int4:g32:fp16:apart:zero}", "kv{uint4:g32:fp16:zero=uint4}",
        "k{uint2:keys16:fp16:min}:v{uint2:g32:fp16:min}", "k{uint2:keys16:fp16:min}:v{nvfp4}",
        "k{int4:keys16:fp16:zero=uint4}:v{nvfp4}",
        "k{decode4(exp2(code * scale) - 1.0):g32:fp16}:v{decode8(code * code * scale + zero):g64:fp32:zero}"})
    for (const AttentionShape& shape :
         turns.of<AttentionShape>({64, 32, 8, 1, 4096}, {4, 8, 8, 1024, 4096})) {
      const KernelSpec spec =
          parse_spec(fmt::format("fwd:bf16:d128:causal:pages16:{}", formats)).normalized();
      EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape, device), device), "");
    }
}

// Few rows over codes as operands; and a query whose rows are decoded by two blocks of a multiprocessor, also
// with a mask and heads packed.
TEST(KernelsOfDecodedRows, CompileWithoutSpillsForAQuery) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  for (const char* formats :
       {"kv{int4:g32:fp16}", "kv{int4_offset:g64:fp16}", "kv{nvfp4}", "kv{mxfp4}", "kve4m3", "kv{q4_0}",
        "kv{q4_1}", "kv{q5_0}", "kv{iq4_nl}", "kv{q8_0}", "kv{mxfp8}", "kv{e4m3:g128:fp32}",
        "kv{int8:g32:fp16}", "kv{int4:g32:fp16:zero}", "kv{uint4:g32:fp16:zero=uint4}",
        "k{uint2:keys32:fp16:min}:v{uint2:g32:fp16:min}", "kv{e2m1:g16:e4m3:apart:scaled}"})
    for (const char* keys : {"cache", "pages64", "causal:varlen:pages64"}) {
      const KernelSpec spec = parse_spec(fmt::format("fwd:bf16:d128:{}:{}", formats, keys)).normalized();
      const TileConfig config = plan::sm90_traits().heuristic(spec, {64, 32, 8, 1, 4096}, device);
      EXPECT_EQ(compile_and_check(spec, config, device), "");
    }
}

// The entry that decodes a cache once, beside kernels of 16 bits.
TEST(KernelsOfDecodedCaches, CompileWithoutSpills) {
  const std::pair<const char*, const char*> all[] = {
      {"sm_90a", "fwd:bf16:d128:kv{nvfp4}:pages16:causal"},
      {"sm_90a", "fwd:bf16:d128:k{e4m3}:v{int4}:pages16:key_scales"},
      {"sm_90a", "fwd:bf16:d128:kve4m3:pages16"},
      {"sm_90a", "fwd:fp16:d64:kv{q8_0}:cache"},
      {"sm_90a", "fwd:bf16:d128:k{uint2:keys32:fp16:min}:v{uint2:g32:fp16:min}:pages64:varlen:causal"},
      {"sm_90a", "fwd:bf16:d128:kv{mxfp4}:pages16:mask{kv > q + seqlen_kv - seqlen_q - 100}"},
      {"sm_80", "fwd:bf16:d256:kv{int4:g32:fp16:apart:zero}:pages64"},
      {"sm_80", "fwd:bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64"},
      {"sm_80", "fwd:bf16:d128:k{iq4_nl}:v{q4_1}"}};
  for (const auto& [arch, text] : all) {
    const KernelSpec spec = parse_spec(text).normalized();
    const DeviceInfo device = DeviceInfo::parse(arch);
    const plan::ExecutionPlan plan = plan::make_plan(spec, {1, 32, 8, 4096, 4096}, device, {});
    ASSERT_TRUE(plan.config.decode_cache) << text;
    EXPECT_EQ(compile_and_check(spec, plan.config, device), "");
  }
}

// Latents, which one warpgroup decodes for two that share rows.
TEST(KernelsOfDecodedLatents, CompileWithoutSpillsOnHopper) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  for (const char* text :
       {"bf16:d576x512:kv{fp8_ds_mla}:indices", "bf16:d576x512:kv{fp8_ds_mla}:causal:pages64",
        "bf16:d576x512:kv{fp8_ds_mla}:causal:varlen:sinks:pages64:indices",
        "fp16:d576x512:kv{int8:g64:fp32:tail64}:pages16:causal",
        "fp16:d320:kv{e4m3:g64:fp32:tail64}:pages16:causal:indices",
        "bf16:d576x512:kv{fp8_ds_mla}:pages64:score{2.0 * tanh(score / 2.0)}",
        "bf16:d576x512:kv{fp8_ds_mla}:dropout:causal"}) {
    const KernelSpec spec = parse_spec(fmt::format("fwd:{}:shared_kv", text)).normalized();
    const TileConfig config = plan::sm90_traits().heuristic(spec, {64, 128, 1, 1, 4096}, device);
    EXPECT_EQ(compile_and_check(spec, config, device), "");
    const TileConfig of_many = plan::sm90_traits().heuristic(spec, {1, 16, 1, 512, 4096}, device);
    if (of_many.join_lists) {
      EXPECT_EQ(compile_and_check(spec, of_many, device), "");
    }
  }
}

// Scales of blocks and of keys that are in a tensor of their own, by the families that read them.
TEST(KernelsOfBlockScales, CompileWithoutSpills) {
  const DeviceInfo devices[] = {DeviceInfo::parse("sm_80"), DeviceInfo::parse("sm_90a"),
                                DeviceInfo::parse("sm_75")};
  std::size_t turn = 0;
  for (const char* text : {"fwd:fp16:d128:causal:pages16:kv{e2m1:g16:e4m3:apart:scaled}",
                           "fwd:fp16:d64:kv{int4:g32:fp16:apart:zero}:cache",
                           "fwd:fp16:d128:k{uint2:keys32:fp16:min}:v{uint2:g32:fp16:min}:pages64:causal",
                           "fwd:fp16:d256:k{uint4:keys64:fp32:zero}:v{int4:g32:fp16:apart}:cache:causal"}) {
    const KernelSpec spec = parse_spec(text).normalized();
    for (const plan::FamilyTraits& family : plan::families()) {
      const DeviceInfo& device = devices[family.family == Family::sm75 ? 2 : turn++ % 2];
      if (!test::is_planned(family, device) || !family.supports(spec, device)) continue;
      EXPECT_EQ(compile_and_check(
                    spec, family.heuristic(spec, {16, 32, 8, turn % 3 == 0 ? 256 : 1, 4096}, device), device),
                "");
    }
  }
}

/// The stores of one byte of a register that cvt wrote a half to, of which ptxas 13.0 stores the half's
/// integer part.
std::vector<std::string> bytes_of_halves(const std::string& ptx) {
  std::set<std::string> halves;
  std::vector<std::string> found;
  std::istringstream lines(ptx);
  for (std::string line; std::getline(lines, line);) {
    std::string operation, first, second;
    std::istringstream(line) >> operation >> first >> second;
    if (operation.starts_with("cvt.rn.f16.")) halves.insert(first.substr(0, first.find(',')));
    if (operation.starts_with("st.") && operation.ends_with("8") &&
        halves.contains(second.substr(0, second.find(';'))))
      found.push_back(line);
  }
  return found;
}

TEST(KernelsThatEncode, StoreNoByteOfARegisterOfAHalf) {
  EXPECT_EQ(bytes_of_halves("cvt.rn.f16.f32 %rs1, %f1;\nst.global.u8 [%rd1+-1], %rs1;\n").size(), 1u);
  for (const std::string format :
       {"e2m1:g16:e4m3:tail32xfp16:scaled", "q8_0", "q4_1", "uint2:g32:fp16:min", "int4:g32:fp16:apart:zero",
        "uint2:keys32:fp16:min", "uint4:g32:fp16:zero=uint4", "decode4(exp2(code * scale) - 1.0):g32:fp16"}) {
    for (const char* call : {"quantize:bf16:d128:kv{{{}}}", "append:fp16:d128:kv{{{}}}:pages16"}) {
      const bool appends = std::string_view(call).starts_with("append");
      if (appends && parse_kv_format(format).keys > 0) continue;
      const KernelSpec spec = parse_spec(fmt::format(fmt::runtime(call), format)).normalized();
      const DeviceInfo device = DeviceInfo::parse("sm_90a");
      EXPECT_EQ(compile_and_check(spec, plan::simt_traits().heuristic(spec, shape_of(0), device), device),
                "");
      const KernelSource source =
          render::render(spec, plan::simt_traits().heuristic(spec, shape_of(0), device), device,
                         render::TemplateSet::embedded());
      EXPECT_EQ(bytes_of_halves(compiler().ptx(source)), std::vector<std::string>{}) << format;
    }
  }
}

void compile_spread(const std::vector<KernelSpec>& specs, const std::vector<const char*>& architectures) {
  const std::array families{&plan::sm80_traits(), &plan::simt_traits()};
  std::vector<DeviceInfo> devices;
  for (const char* arch : architectures) devices.push_back(DeviceInfo::parse(arch));
  std::size_t i = 0;
  for (const auto& [spec, family, device] : test::spread(specs, families, devices)) {
    const AttentionShape shape =
        ++i % 2 ? AttentionShape{16, 32, 8, 1, 8192} : AttentionShape{4, 32, 8, 1024, 1024};
    const TileConfig config = families[family]->heuristic(specs[spec], shape, devices[device]);
    EXPECT_EQ(compile_and_check(specs[spec], config, devices[device]), "");
  }
}

// Codes are converted on their way to the tensor cores, which takes registers.
TEST(KernelsOfCodes, CompileWithoutSpills) {
  compile_spread(test::covering_specs_of_codes(), {"sm_75", "sm_80", "sm_90a", "sm_120"});
}

// The second elements of P and dS take registers.
TEST(KernelsOfTwoTerms, CompileWithoutSpills) {
  compile_spread(test::covering_specs_of_two_terms(), {"sm_75", "sm_80", "sm_90a", "sm_120"});
}

TEST(KernelsOfCodes, CompileWithoutSpillsOnHopper) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  std::vector<KernelSpec> specs = test::covering_specs_of_codes();
  std::erase_if(specs, [&](const KernelSpec& spec) { return !plan::sm90_traits().supports(spec, device); });
  std::size_t i = 0;
  for (const KernelSpec& spec : test::covering_words(specs)) {
    const AttentionShape shape =
        ++i % 2 ? AttentionShape{16, 32, 8, 1, 8192} : AttentionShape{4, 32, 8, 1024, 1024};
    EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape, device), device), "");
  }
}

// Ada multiplies codes, the others convert them.
TEST(KernelsOfProductsOfCodes, CompileWithoutSpills) {
  compile_spread(test::covering_specs_of_products_of_codes(), {"sm_75", "sm_80", "sm_89", "sm_90a"});
}

TEST(KernelsOfProductsOfCodes, CompileWithoutSpillsOnHopper) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  std::vector<KernelSpec> specs = test::covering_specs_of_products_of_codes();
  std::erase_if(specs, [&](const KernelSpec& spec) { return !plan::sm90_traits().supports(spec, device); });
  specs = test::covering_words(specs);
  for (const char* text :
       {"fwd:bf16:d256:kve4m3:q_codes", "fwd:bf16:d256:kve4m3:q_codes:causal:varlen:pages16",
        "fwd:bf16:d240:kve5m2:q_codes:causal:fp32_out", "fwd:bf16:d208:kve4m3:q_codes:kvlen:sinks",
        "fwd:bf16:d256:kve4m3:q_codes:sums_all:causal", "fwd:bf16:d128:kve4m3:q_codes:sums4:varlen:pages16",
        "fwd:bf16:d128:kve4m3:q_codes:sums_all", "fwd:fp16:d64:kve4m3:q_codes:sums_all:causal",
        "fwd:bf16:d128:kve4m3:q_codes:score{bias: bf16 4d; score + bias[b, h, q, kv]}",
        "fwd:bf16:d64:kve4m3:q_codes:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:causal",
        "fwd:bf16:d128:kve4m3:q_codes:score{by_key: fp32 2d; score + by_key[b, kv]}:causal"})
    specs.push_back(parse_spec(text).normalized());
  std::size_t i = 0, compiled = 0;
  for (const KernelSpec& spec : specs) {
    if (!plan::sm90_traits().supports(spec, device)) continue;
    const AttentionShape shape =
        ++i % 2 ? AttentionShape{16, 32, 8, 1, 8192} : AttentionShape{4, 32, 8, 1024, 1024};
    EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape, device), device), "");
    ++compiled;
  }
  EXPECT_GT(compiled, specs.size() / 2);
}

TEST(KernelsOfCodes, CompileWithPrograms) {
  test::Turns turns;
  for (const char* arch : {"sm_80", "sm_89", "sm_90a"}) {
    turns.next_row();
    for (const char* text :
         {"fwd:bf16:d128:kve4m3:score{50.0 * tanh(score / 50.0)}:causal:varlen:pages64",
          "fwd:fp16:d64:kvint8:mask{q - kv < 300}:pages24:key_scales",
          "fwd:bf16:d256:kve4m3:causal:pages1:key_scales", "fwd:bf16:d128:kve4m3:causal:varlen:pages1",
          "fwd:bf16:d192x128:kve4m3:score{bias: bf16 4d; score + bias[b, h, q, kv]}:key_scales",
          "fwd:bf16:d256:kve4m3:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:causal:cache"})
      for (const AttentionShape& shape :
           turns.of<AttentionShape>({16, 32, 8, 1, 8192}, {4, 32, 8, 1024, 1024})) {
        const DeviceInfo device = DeviceInfo::parse(arch);
        const KernelSpec spec = parse_spec(text).normalized();
        for (const plan::FamilyTraits& family : plan::families()) {
          if (!test::is_planned(family, device) || !family.supports(spec, device)) continue;
          EXPECT_EQ(compile_and_check(spec, family.heuristic(spec, shape, device), device), "");
        }
      }
  }
}

// What the heuristic takes so, of which a thread has few registers.
TEST(KernelsWithTwoTilesAtATime, CompileWithoutSpills) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  test::Turns turns;
  for (const char* rest : {"", ":causal", ":causal_top_left:sinks", ":map128x128", ":causal:map128x64:kvlen",
                           ":mask{q >= kv && q - kv < 300}", ":mask{q - kv < 300 && kv - q < 300}:sinks",
                           ":mask{((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0}"}) {
    turns.next_row();
    for (const char* dims : {"fp16:d64", "bf16:d40x64"}) {
      const KernelSpec spec = parse_spec(fmt::format("fwd:{}{}", dims, rest)).normalized();
      for (const char* config : turns.of<const char*>("sm90:br128:bc64:w16:s3", "sm90:br128:bc64:w16:s4"))
        EXPECT_EQ(compile_and_check(spec, parse_config(config), device), "");
    }
  }
}

// Rows behind a sequence's last are cleared in a branch, whose registers all others pay for.
TEST(KernelsOfPackedSequences, CompileWithoutSpills) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  for (const char* dims : {"d64", "d72", "d96", "d128", "d128x64", "d256"}) {
    for (const char* rest : {"", ":causal", ":dropout:sinks"}) {
      const KernelSpec spec = parse_spec(fmt::format("bwd:bf16:{}:varlen{}", dims, rest)).normalized();
      const TileConfig config = plan::sm90_traits().heuristic(spec, {4, 16, 16, 4096, 4096}, device);
      EXPECT_EQ(compile_and_check(spec, config, device), "");
    }
  }
}

// Clusters that sum up dQ, with the tiles of their heuristic.
TEST(KernelsOfClustersThatSumUpDq, CompileWithoutSpills) {
  constexpr std::array kRests = {"",
                                 ":causal",
                                 ":dropout",
                                 ":causal_top_left:dropout:kvlen",
                                 ":causal:sinks",
                                 ":varlen:sinks",
                                 ":causal:varlen",
                                 ":score{50.0 * tanh(score / 50.0)}",
                                 ":score{score + 0.05 * to_float(kv - q)}:causal:kvlen",
                                 ":mask{q >= kv && q - kv < 100}"};
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  const auto check = [&](const std::string& text, int keys) {
    const KernelSpec spec = parse_spec(text).normalized();
    const TileConfig config = plan::sm90_traits().heuristic(spec, {64, 16, 16, keys, keys}, device);
    EXPECT_EQ(config.bc, keys) << text;
    EXPECT_EQ(compile_and_check(spec, config, device), "");
  };
  std::size_t i = 0;
  for (const char* dims : {"fp16:d8", "bf16:d64", "bf16:d72x40", "fp16:d96", "bf16:d128", "bf16:d128x64"})
    for (const char* rest : kRests)
      if (i++ % 3 == 0 || test::every_kernel()) check(fmt::format("bwd:{}{}", dims, rest), 256);
  for (const char* text : {"bwd:fp16:d64", "bwd:bf16:d96:dropout", "bwd:fp16:d128:sinks", "bwd:bf16:d128x64"})
    check(text, 512);
}

// Warpgroups that pass over tiles which only others' rows meet.
TEST(KernelsWhoseGroupsMeetOtherTiles, CompileWithoutSpills) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  for (const char* text : {"fwd:bf16:d64:map128x128 sm90:br192:bc128:w12:s4",
                           "fwd:fp16:d40x64:map64x128:sinks sm90:br192:bc128:w12:s4",
                           "fwd:bf16:d64:map64x128:dropout sm90:br128:bc64:w8:s3",
                           "fwd:bf16:d128:map64x128 sm90:br128:bc128:w8:s2",
                           "fwd:bf16:d192x128:map64x112 sm90:br128:bc112:w8:s2",
                           "fwd:bf16:d256:map64x64 sm90:br128:bc64:w8:s2"}) {
    const std::string both = text;
    const KernelSpec spec = parse_spec(both.substr(0, both.find(' '))).normalized();
    const TileConfig config = parse_config(both.substr(both.find(' ') + 1));
    EXPECT_EQ(test::planned_constant(spec, config, "kListedRows"), 64) << both;
    EXPECT_EQ(compile_and_check(spec, config, device), "");
  }
}

// Maps with small blocks, whose tiles hold Q in registers.
TEST(KernelsThatHoldQ, CompileWithoutSpills) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  for (const char* text :
       {"bf16:d128:map64x64", "fp16:d128:map64x64:mask{n: int32 1d; kv % 64 < n[kv / 64]}",
        "bf16:d96x64:map64x64:causal:varlen:dropout", "fp16:d96:map16x32:kvlen:sinks:row_max",
        "bf16:d128x64:map48x80:score{t: fp32 1d; score + t[abs(q - kv)]}",
        "fp16:d72:map32x64:varlen:dropout:mask{doc: int32 1d; doc[q] == doc[kv]}"}) {
    const KernelSpec spec = parse_spec(fmt::format("fwd:{}", text)).normalized();
    const TileConfig config = plan::sm90_traits().heuristic(spec, {1, 8, 8, 32768, 32768}, device);
    EXPECT_EQ(test::planned_constant(spec, config, "kHoldsQ"), 1) << text;
    EXPECT_EQ(compile_and_check(spec, config, device), "");
  }
}

// Masks that divide positions leave enough registers for products that do not wait for each other.
TEST(KernelsThatDividePositions, CompileWithoutSpills) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  for (const char* mask :
       {"((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0", "kv / 8 <= q / 8", "(q ^ kv) % 16 < 4"}) {
    for (const char* dims : {"fwd:bf16:d128", "bwd:bf16:d64", "bwd:bf16:d128", "bwd:bf16:d256"}) {
      const KernelSpec spec = parse_spec(fmt::format("{}:mask{{{}}}", dims, mask));
      EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape_of(0), device), device),
                "");
    }
  }
}

// Row and column terms are found during the products; 48 to 64 bytes of backward passes of documents
// up to 128 columns spill and are still quicker so, so that they are not among these.
TEST(KernelsWithMasksThatRead, CompileWithoutSpills) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a"), a100 = DeviceInfo::parse("sm_80");
  for (const char* mask : {"ids: int32 1d; q >= kv && ids[q] == ids[kv]", "valid: bool 2d; valid[b, kv]",
                           "from: int64 1d; q >= kv && kv >= from[q]"}) {
    for (const char* dims : {"fwd:bf16:d64", "fwd:bf16:d128", "fwd:bf16:d256", "bwd:bf16:d256"}) {
      const KernelSpec spec = parse_spec(fmt::format("{}:mask{{{}}}", dims, mask));
      EXPECT_EQ(compile_and_check(spec, plan::sm90_traits().heuristic(spec, shape_of(0), h100), h100), "");
      EXPECT_EQ(compile_and_check(spec, plan::sm80_traits().heuristic(spec, shape_of(0), a100), a100), "");
    }
  }
}

TEST(KernelsOfOrderedCaptureGrads, CompileWithEveryTile) {
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  const KernelSpec spec = parse_spec(
      "bwd:fp32:d64:score{m: fp32 2d grad; t: fp16 1d grad; score * m[q, kv] + t[kv]}:dropout:varlen:det");
  const std::vector<TileConfig> configs = plan::simt_traits().search_space(spec, device);
  EXPECT_GE(configs.size(), 10u);
  for (const TileConfig& config : configs) EXPECT_EQ(compile_and_check(spec, config, device), "");
}

// As quick as the plain ones, so that a hang that needs their timing is found, too.
TEST(KernelsOfCheckedWaits, CompileWithoutSpillsAndTrap) {
  const auto expect_traps = [](const char* arch, Family family, const std::string& text) {
    SCOPED_TRACE(fmt::format("{} {} {}", arch, to_string(family), text));
    const DeviceInfo device = DeviceInfo::parse(arch);
    const KernelSpec spec = parse_spec(text).normalized();
    const TileConfig config = plan::traits(family).heuristic(spec, shape_of(0), device);
    const auto traps = [&](const plan::Checks& checks) {
      const auto& templates = render::TemplateSet::embedded();
      return compiler().ptx(render::render(spec, config, device, templates, checks)).find("trap;") !=
             std::string::npos;
    };
    EXPECT_FALSE(traps({}));
    EXPECT_TRUE(traps({.check_waits = true}));
    EXPECT_EQ(compile_and_check(spec, config, device, {.check_waits = true}), "");
  };
  for (const char* text : {"fwd:fp16:d128:causal", "fwd:bf16:d256", "bwd:bf16:d128:causal:det",
                           "bwd:bf16:d256", "bwd:bf16:d256:map64x64"})
    expect_traps("sm_90a", Family::sm90, text);
  expect_traps("sm_80", Family::sm80, "bwd:bf16:d128:causal:det");
  expect_traps("sm_80", Family::simt, "bwd:fp32:d64:score{t: fp32 1d grad; score + t[h]}:det");
}

/// Fails where a kernel's own account of its shared memory is not the planner's, by static_assert.
std::string disagreement(const KernelSpec& spec, const TileConfig& config, const DeviceInfo& device,
                         const plan::Checks& checks) {
  if (!is_drawn(to_string(spec) + to_string(config))) return {};
  try {
    compiler().check(render::render(spec, config, device, render::TemplateSet::embedded(), checks));
    return {};
  } catch (const Error& error) {
    return fmt::format("{} {} {}: {}\n{}", device.arch, to_string(spec), to_string(config), error.message(),
                       error.detail());
  }
}

// Debug modes change what kernels read and how: the planner must know.
TEST(KernelsOfChecks, ArePlannedAsTheyAreCompiled) {
  constexpr std::array kChecks = {plan::Checks{.check_indices = true}, plan::Checks{.check_waits = true},
                                  plan::Checks{.check_indices = true, .check_waits = true}};
  std::vector<KernelSpec> specs = test::covering_plain_specs();
  for (const char* pass : {"fwd", "bwd"})
    for (const char* dims : {"d64", "d96", "d128", "d256"})
      for (const char* programs :
           {"score{bias: bf16 4d; score + bias[b, h, q, kv]}", "score{w: fp32 1d; score + w[kv]}",
            "score{f: fp32 2d; score * f[h, q]}:mask{doc: int32 1d; doc[q] == doc[kv]}"})
        specs.push_back(parse_spec(fmt::format("{}:bf16:{}:{}", pass, dims, programs)).normalized());
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a"), a100 = DeviceInfo::parse("sm_80");
  const auto expect_agreement = [](const plan::FamilyTraits& family, const plan::AnalysedSpec& spec,
                                   std::size_t i, const DeviceInfo& device) {
    if (!family.supports(spec, device)) return;
    EXPECT_EQ(disagreement(spec, family.heuristic(spec, shape_of(i), device), device, spec.checks), "");
  };
  for (std::size_t i = 0; i < specs.size(); ++i) {
    expect_agreement(plan::sm90_traits(), {specs[i], kChecks[i % 3]}, i, h100);
    if (i % 4 == 0) expect_agreement(plan::sm80_traits(), {specs[i], kChecks[i / 4 % 3]}, i, a100);
  }
}

TEST(PerformanceLoss, IsFoundInTheLog) {
  const std::string fine = "ptxas info    : 0 bytes gmem\nptxas info    : Used 168 registers\n";
  EXPECT_EQ(test::performance_loss(fine), "");
  for (const std::string line :
       {"ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored"})
    EXPECT_EQ(test::performance_loss(fine + line + "\n" + fine), line);
}

TEST(Covering, HoldsEveryPairOnceOrMore) {
  const std::vector<KernelSpec> specs = test::covering_specs();
  std::set<std::pair<Pass, DType>> passes;
  std::set<std::tuple<DType, int, int>> dims;
  for (const KernelSpec& spec : specs) {
    passes.insert({spec.pass, spec.dtype});
    dims.insert({spec.dtype, spec.head_dim, spec.v_dim()});
  }
  EXPECT_EQ(passes.size(), 6u);
  EXPECT_EQ(dims.size(), 24u);
  EXPECT_LE(specs.size(), 40u) << "the compile tests would take too long";
}

TEST(Spread, HoldsEverySpecAndEveryWordWithEveryFamilyAndDevice) {
  const std::array families{&plan::sm80_traits(), &plan::simt_traits()};
  const std::vector<DeviceInfo> devices{DeviceInfo::parse("sm_75"), DeviceInfo::parse("sm_80"),
                                        DeviceInfo::parse("sm_120")};
  const std::vector<KernelSpec> specs = test::covering_wide_specs();
  std::set<std::size_t> left;
  std::set<std::pair<std::string, std::size_t>> by_family, on_device;
  std::size_t product = 0;
  for (std::size_t i = 0; i < specs.size(); ++i)
    for (std::size_t f = 0; f < families.size(); ++f)
      for (std::size_t d = 0; d < devices.size(); ++d) {
        if (!families[f]->supports(specs[i], devices[d])) continue;
        ++product, left.insert(i);
        for (const std::string& word : test::words_of(specs[i]))
          by_family.insert({word, f}), on_device.insert({word, d});
      }
  EXPECT_EQ(left.size(), specs.size());
  const std::vector<test::Place> places = test::spread(specs, families, devices);
  for (const test::Place& place : places) {
    left.erase(place.spec);
    for (const std::string& word : test::words_of(specs[place.spec]))
      by_family.erase({word, place.family}), on_device.erase({word, place.device});
  }
  EXPECT_TRUE(left.empty() && by_family.empty() && on_device.empty());
  EXPECT_LE(places.size(), test::every_kernel() ? product : product / 2);
}

TEST(Spread, TakesAProgramAsAWord) {
  EXPECT_EQ(test::words_of(parse_spec("fwd:bf16:d64:mask{doc: int32 1d; doc[q] == doc[kv]}:sinks")).size(),
            5u);
}

}  // namespace
}  // namespace flashjit

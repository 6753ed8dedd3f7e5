// NVRTC itself: what is asked of it, what comes back, and how it says no. Needs NVRTC and no GPU.
#include "compile/compiler.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <thread>

#include "device/images.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/nvrtc.hpp"

namespace flashjit {
namespace {

using test::compiler;

KernelSource source_of(std::string text, std::string arch = "sm_80") {
  KernelSource source;
  source.spec = parse_spec("fwd:bf16:d64");
  source.arch = std::move(arch);
  source.text = std::move(text);
  source.entries = {{.name = "forward", .header = "", .function = "", .threads = 64, .hot = true}};
  return source;
}

KernelSource small_source(const std::string& arch = "sm_80") {
  return source_of(R"(
    extern "C" __global__ void __launch_bounds__(64, 1) flashjit_forward(float* p) {
      __shared__ float s[64];
      s[threadIdx.x] = p[threadIdx.x];
      __syncthreads();
      p[threadIdx.x] = s[63 - threadIdx.x];
    })",
                   arch);
}

Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::internal, "no error was thrown");
}

TEST(Compiler, TellsItsVersionWithTheBuild) {
  EXPECT_TRUE(std::regex_match(compiler().tag(), std::regex(R"(nvrtc1[23]\.\d+\.\d+)"))) << compiler().tag();
  EXPECT_TRUE(std::filesystem::exists(compiler().path())) << compiler().path();
}

TEST(Compiler, OffersPlainAndSpecificArchitectures) {
  const std::vector<std::string> all = compiler().architectures();
  for (const char* arch : {"sm_75", "sm_80", "sm_90", "sm_90a"}) {
    EXPECT_EQ(std::count(all.begin(), all.end(), arch), 1) << arch;
  }
  EXPECT_EQ(std::count(all.begin(), all.end(), "sm_80a"), 0);
}

TEST(Compiler, EveryOfferedArchitectureCompiles) {
  for (const std::string& arch : compiler().architectures()) {
    EXPECT_NO_THROW(compiler().compile(small_source(arch))) << arch;
  }
}

TEST(Compiler, ReportsWhatPtxasReports) {
  const CompiledKernel kernel = compiler().compile(small_source("sm_90a"));
  EXPECT_TRUE(
      kernel.cubin.starts_with("\x7f"
                               "ELF"));
  EXPECT_EQ(kernel.compiler, compiler().tag());
  EXPECT_GT(kernel.compile_ms, 0);
  ASSERT_EQ(kernel.resources.size(), 1u) << kernel.log;
  EXPECT_EQ(kernel.resources[0].entry, "forward");
  EXPECT_EQ(kernel.resources[0].static_shared, 256);
  EXPECT_GT(kernel.resources[0].registers, 0);
  EXPECT_FALSE(spills_in_main_loop(kernel, small_source().entries));
}

// NVRTC's own cache would leave the second log empty.
TEST(Compiler, TheSameSourceGivesTheSameBytesAndReport) {
  const CompiledKernel first = compiler().compile(small_source());
  const CompiledKernel second = compiler().compile(small_source());
  EXPECT_EQ(first.cubin, second.cubin);
  EXPECT_EQ(first.resources, second.resources);
  EXPECT_FALSE(second.resources.empty());
}

TEST(Compiler, SeesSpills) {
  KernelSource source = source_of(R"(
    extern "C" __global__ void __launch_bounds__(1024, 2) flashjit_forward(float* p) {
      float v[96];
    #pragma unroll
      for (int i = 0; i < 96; ++i) v[i] = p[i * 1024 + threadIdx.x];
      __syncthreads();
    #pragma unroll
      for (int i = 0; i < 96; ++i) p[i * 1024 + threadIdx.x] = v[95 - i] * v[(i * 7) % 96];
    })");
  const CompiledKernel kernel = compiler().compile(source);
  EXPECT_GT(kernel.resources.at(0).spill_stores, 0) << kernel.log;
  EXPECT_TRUE(spills_in_main_loop(kernel, source.entries));
  source.entries[0].hot = false;
  EXPECT_FALSE(spills_in_main_loop(kernel, source.entries));
}

TEST(Compiler, TakesHeadersFromMemoryAlone) {
  KernelSource source = source_of(
      "#include \"flashjit/a.cuh\"\n"
      "extern \"C\" __global__ void flashjit_forward(int* p) { *p = twice(21); }");
  source.headers = {{"flashjit/a.cuh", "#pragma once\nconstexpr int twice(int x) { return 2 * x; }\n"}};
  EXPECT_NO_THROW(compiler().compile(source));
  EXPECT_EQ(error_of([] { compiler().compile(source_of("#include <cuda_fp16.h>\n")); }).code(),
            ErrorCode::compile_failed);
}

TEST(Compiler, AWrongSourceGivesTheFirstErrorAndTheWholeLog) {
  const Error error =
      error_of([] { compiler().compile(source_of("__global__ void f() { int x = nowhere; }")); });
  EXPECT_EQ(error.code(), ErrorCode::compile_failed);
  EXPECT_NE(error.message().find("fwd:bf16:d64"), std::string::npos) << error.message();
  EXPECT_NE(error.message().find("\"nowhere\" is undefined"), std::string::npos) << error.message();
  EXPECT_NE(error.detail().find("1 error detected"), std::string::npos) << error.detail();
}

TEST(Compiler, AnUnknownArchitectureIsRefusedWithThoseItKnows) {
  for (const char* arch : {"sm_35", "sm_9000", "sm_", "", "compute_80", "sm_80;rm"}) {
    const Error error = error_of([&] { compiler().compile(small_source(arch)); });
    EXPECT_EQ(error.code(), ErrorCode::compile_failed) << arch;
    EXPECT_NE(error.message().find("sm_80, sm_"), std::string::npos) << error.message();
  }
}

TEST(Compiler, CompilesProgramsWhoseImagesFollowEachOther) {
  for (const char* spec : {"fwd:bf16:d64", "bwd:bf16:d64:det", "fwd:bf16:d64:map128x128"}) {
    for (const char* arch : {"sm_80", "sm_90a"}) {
      const DeviceInfo device = DeviceInfo::parse(arch);
      const plan::ExecutionPlan plan = plan::make_plan(parse_spec(spec), {1, 8, 8, 4096, 4096}, device, {});
      const KernelSource source =
          render::render(plan.spec, plan.config, device, render::TemplateSet::embedded());
      const std::string cubin = compiler().compile(source).cubin, ptx = compiler().ptx(source);
      const std::vector<std::string_view> images = device::images(cubin);
      EXPECT_EQ(images.size(), program_count(source.entries)) << spec << " " << arch;
      std::size_t bytes = 0;
      for (const std::string_view image : images) bytes += image.size();
      EXPECT_EQ(bytes, cubin.size());
      for (const plan::Entry& entry : source.entries) {
        const std::string symbol = ".text.flashjit_" + entry.name;
        const bool second = images.size() > 1 && !entry.hot;
        for (std::size_t i = 0; i < images.size(); ++i)
          EXPECT_EQ(images[i].find(symbol) != images[i].npos, i == second) << spec << " " << symbol;
        EXPECT_NE(ptx.find(".entry flashjit_" + entry.name), ptx.npos) << spec << " " << symbol;
      }
    }
  }
}

TEST(Compiler, AnErrorInAnyProgramIsTold) {
  for (const char* number : {"1", "2"}) {
    KernelSource source = small_source();
    source.entries.push_back({.name = "other", .header = "", .function = "", .threads = 64});
    source.text += fmt::format("\n#if FLASHJIT_PROGRAM == {}\nint x = nowhere;\n#endif\n", number);
    const Error error = error_of([&] { compiler().compile(source); });
    EXPECT_EQ(error.code(), ErrorCode::compile_failed) << number;
    EXPECT_NE(error.message().find("\"nowhere\" is undefined"), std::string::npos) << error.message();
  }
}

TEST(Compiler, GivesPtx) {
  const std::string ptx = compiler().ptx(small_source());
  EXPECT_NE(ptx.find(".visible .entry flashjit_forward"), std::string::npos);
  EXPECT_EQ(ptx.find('\0'), std::string::npos);
}

TEST(Compiler, ChecksWhatCompilingWouldRefuse) {
  KernelSource source = small_source();
  EXPECT_NO_THROW(compiler().check(source));
  source.text += "\nstatic_assert(sizeof(int) == 5, \"as the test asked\");\n";
  const Error error = error_of([&] { compiler().check(source); });
  EXPECT_EQ(error.code(), ErrorCode::compile_failed);
  EXPECT_NE(error.detail().find("as the test asked"), std::string::npos) << error.detail();
}

TEST(Compiler, LeavesTheStackLimitAlone) {
  rlimit before{}, after{};
  ::getrlimit(RLIMIT_STACK, &before);
  compiler().compile(small_source());
  ::getrlimit(RLIMIT_STACK, &after);
  EXPECT_EQ(before.rlim_cur, after.rlim_cur);
}

TEST(Compiler, CompilesInSeveralThreads) {
  const std::string expected = compiler().compile(small_source()).cubin;
  std::vector<std::thread> threads;
  std::vector<std::string> cubins(4);
  for (std::string& cubin : cubins) {
    threads.emplace_back([&cubin] { cubin = compiler().compile(small_source()).cubin; });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& cubin : cubins) EXPECT_EQ(cubin, expected);
}

TEST(CompilerOpen, TakesAFileOrTheFolderThatHoldsIt) {
  const std::filesystem::path path = compiler().path();
  EXPECT_EQ(compile::Compiler::open(path)->tag(), compiler().tag());
  EXPECT_EQ(compile::Compiler::open(path.parent_path())->tag(), compiler().tag());
}

TEST(CompilerOpen, PassesOverOneThatIsTooOld) {
  const test::Variable old("FAKE_NVRTC_OLD", "1");
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "two_nvrtcs";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::filesystem::create_symlink(test::built(FLASHJIT_FAKE_NVRTC), folder / "libnvrtc.so.13");
  EXPECT_EQ(error_of([&] { compile::Compiler::open(folder); }).code(), ErrorCode::no_compiler);
  std::filesystem::create_symlink(compiler().path(), folder / "libnvrtc.so.12");
  EXPECT_EQ(compile::Compiler::open(folder)->tag(), compiler().tag());
}

TEST(CompilerOpen, AMissingLibraryIsNamedWithTheRemedy) {
  const Error error = error_of([] { compile::Compiler::open("/nowhere/libnvrtc.so.13"); });
  EXPECT_EQ(error.code(), ErrorCode::no_compiler);
  EXPECT_NE(error.message().find("/nowhere/libnvrtc.so.13"), std::string::npos) << error.message();
  EXPECT_NE(error.message().find("FLASHJIT_NVRTC"), std::string::npos) << error.message();
}

TEST(CompilerOpen, WhatIsNoNvrtcIsRefused) {
  EXPECT_EQ(error_of([] { compile::Compiler::open("libm.so.6"); }).code(), ErrorCode::no_compiler);
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "no_nvrtc";
  std::filesystem::create_directories(folder);
  EXPECT_EQ(error_of([&] { compile::Compiler::open(folder); }).code(), ErrorCode::no_compiler);
  std::ofstream(folder / "libnvrtc.so.13") << "this is no library";
  EXPECT_EQ(error_of([&] { compile::Compiler::open(folder); }).code(), ErrorCode::no_compiler);
}

}  // namespace
}  // namespace flashjit

// What is read from ptxas's report.
#include <gtest/gtest.h>

#include "compile/compiler.hpp"
#include "render/kernel_source.hpp"

namespace flashjit {
namespace {

constexpr const char* kLog = R"(ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'flashjit_preprocess' for 'sm_90a'
ptxas info    : Function properties for flashjit_preprocess
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Compile time = 2.275 ms
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements.
ptxas info    : Compiling entry function 'flashjit_backward' for 'sm_90a'
ptxas info    : Function properties for flashjit_backward
    96 bytes stack frame, 88 bytes spill stores, 104 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
)";

TEST(PtxasLog, GivesEveryEntryWithoutItsPrefix) {
  const std::vector<EntryResources> expected{{.entry = "preprocess", .registers = 32},
                                             {.entry = "backward",
                                              .registers = 255,
                                              .spill_stores = 88,
                                              .spill_loads = 104,
                                              .stack = 96,
                                              .static_shared = 1024}};
  EXPECT_EQ(compile::parse_ptxas_log(kLog), expected);
}

TEST(PtxasLog, SpillsCountInHotEntriesAlone) {
  CompiledKernel kernel;
  kernel.resources = compile::parse_ptxas_log(kLog);
  const auto entry = [](const char* name, bool hot) {
    return plan::Entry{.name = name, .header = {}, .function = {}, .hot = hot};
  };
  const plan::Entry hot = entry("backward", true), cold = entry("backward", false),
                    sound = entry("preprocess", true);
  EXPECT_TRUE(spills_in_main_loop(kernel, {sound, hot}));
  EXPECT_FALSE(spills_in_main_loop(kernel, {sound, cold}));
  EXPECT_FALSE(spills_in_main_loop(kernel, {}));
}

TEST(PtxasLog, CountsSpillsOfFunctionsThatWereNotInlined) {
  const auto used = compile::parse_ptxas_log(
      "ptxas info : Compiling entry function 'flashjit_f' for 'sm_80'\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info : Used 40 registers\n"
      "ptxas info : Function properties for helper\n"
      "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n");
  ASSERT_EQ(used.size(), 1u);
  EXPECT_EQ(used[0].registers, 40);
  EXPECT_EQ(used[0].spill_stores, 4);
  EXPECT_EQ(used[0].spill_loads, 12);
}

TEST(PtxasLog, SurvivesWhatItDoesNotKnow) {
  for (const std::string log :
       {"", "\n\n", "Used 3 registers", "bytes spill stores", "Compiling entry function '",
        "Compiling entry function ''\nUsed 99999999999999999999 registers\n"}) {
    EXPECT_LE(compile::parse_ptxas_log(log).size(), 1u) << log;
  }
  std::string cut = kLog;
  for (; !cut.empty(); cut.pop_back()) EXPECT_LE(compile::parse_ptxas_log(cut).size(), 2u);
}

TEST(CompileOptions, NameTheArchitectureAndNoPath) {
  const std::vector<std::string> options = compile::compile_options("sm_90a");
  EXPECT_EQ(options.front(), "--gpu-architecture=sm_90a");
  for (const std::string& option : options) EXPECT_EQ(option.find('/'), std::string::npos) << option;
}

}  // namespace
}  // namespace flashjit

// Batch invariance and O in fp32 as the emulator runs them.
#include "tests/support/built.hpp"
#include "tests/support/invariant_run.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

class EmulatedInvariance : public GpuTest {};

// Keys of more than one part, and neighbours of other lengths, without keys and with all.
TEST_F(EmulatedInvariance, ASequenceIsTheSameAlone) {
  TemporaryRuntime runtime;
  const AttentionShape decode{3, 4, 2, 1, 4300}, few{3, 4, 2, 3, 2200}, many{2, 2, 1, 130, 150};
  for (const char* dims : {"bf16:d64", "fp16:d32"}) {
    const std::string spec(dims);
    expect_same_alone(runtime.get(), {(spec + ":causal:cache:invariant").c_str(), decode, {4201, 700, 2049}});
    expect_same_alone(runtime.get(), {(spec + ":cache:invariant").c_str(), few, {2200, 0, 2047}});
  }
  expect_same_alone(runtime.get(), {"bf16:d64:causal:invariant", many});
  expect_same_alone(runtime.get(), {"bf16:d64:invariant", {3, 4, 2, 1, 2500}});
  for (const char* config : {"sm80:br64:bc32:w4:min_blocks2:split", "sm90:br64:bc128:w4:s2:split"})
    expect_same_alone(runtime.get(), {"bf16:d32:cache:invariant", {2, 4, 2, 2, 2200}, {2200, 2049}, config});
  expect_same_alone(runtime.get(), {"fp32:d16:cache:invariant", {3, 2, 1, 2, 90}, {90, 1, 40}});
  // So many rows together that a warp combines one, and alone a CTA.
  expect_same_alone(runtime.get(), {"bf16:d32x40:cache:invariant",
                                    {2, 64, 1, 65, 2100},
                                    {2100, 9},
                                    "sm80:br64:bc32:w4:min_blocks2:split"});
}

// Tiles of fewer rows, and one query whose heads are a tile's rows.
TEST_F(EmulatedInvariance, ARowIsTheSameForUpTo64Queries) {
  TemporaryRuntime runtime;
  expect_same_of_fewer_queries(
      runtime.get(), {"bf16:d64:causal:cache:invariant", {3, 8, 1, 9, 4300}, {4201, 700, 2049}}, {1, 8});
}

class EmulatedFp32Out : public GpuTest {};

TEST_F(EmulatedFp32Out, IsWhatIsRounded) {
  TemporaryRuntime runtime;
  for (const char* spec : {"bf16:d64", "bf16:d128:causal", "fp16:d72x40"})
    expect_fp32_out(runtime.get(), {spec, {2, 4, 2, 130, 150}});
  expect_fp32_out(runtime.get(), {"bf16:d64:causal:cache", {3, 4, 2, 1, 900}, {900, 0, 77}});
  expect_fp32_out(runtime.get(), {"bf16:d64:cache:invariant", {2, 4, 2, 1, 2200}, {2200, 100}});
  expect_fp32_out(runtime.get(), {"bf16:d64", {1, 2, 2, 8, 1000}});
  for (const char* config : {"sm80:br64:bc64:w4", "sm80:br64:bc32:w4:min_blocks2:split", "simt:br32:bc32:w4"})
    expect_fp32_out(runtime.get(), {"bf16:d64x40:causal", {2, 4, 2, 70, 90}, {}, config});
  expect_fp32_out(runtime.get(), {"bf16:d320x264", {1, 2, 1, 20, 40}});
}

CommandResult verified(const std::string& spec) {
  const TemporaryDirectory folder;
  return run_command(folder, "verify --seed 1 --spec " + spec + " --shape b1:hq2:hkv1:sq70:skv130",
                     fmt::format("FLASHJIT_LIBCUDA='{}' FLASHJIT_NVRTC='{}'", built(FLASHJIT_EMULATED_CUDA),
                                 built(FLASHJIT_EMULATED_NVRTC)));
}

TEST_F(EmulatedFp32Out, TheCommandHasMemoryForIt) {
  const CommandResult result = verified("fwd:bf16:d64:fp32_out");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(EmulatedRowMax, IsCheckedByTheCommand) {
  const CommandResult result = verified("fwd:bf16:d64:row_max");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("row_max "), std::string::npos) << result.out;
}

TEST(EmulatedState, IsGivenByTheCommand) {
  for (const char* spec : {"fwd:bf16:d64:running_state", "bwd:bf16:d64:running_state"}) {
    const CommandResult result = verified(spec);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
  }
}

}  // namespace
}  // namespace flashjit::test

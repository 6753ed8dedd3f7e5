// What the emulator is for: a kernel with a fault fails, and the message says why.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <ostream>
#include <string>

#include "support/file.hpp"
#include "tests/support/built.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit::test {
namespace {

enum ExitCode { kDone = 0, kCheckFailed = 1, kFailure = 4 };

/// One change of the templates: the first `text` of the file becomes `instead`.
struct Fault {
  const char* name;
  const char* file;
  std::string text, instead;
  int capability;  ///< for which the command chooses the kernel's family
  const char* problem;
  ExitCode code;
  const char* message;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

constexpr const char* kForward = "--spec fwd:bf16:d64 --shape b1:hq2:hkv1:sq200:skv300";
constexpr const char* kBackward = "--spec bwd:bf16:d64 --shape b1:hq2:hkv1:sq300:skv200";

const Fault kFaults[] = {
    {"no_fault", "sm80/forward.cuh", "", "", 80, kForward, kDone, "within their limits"},
    {"no_fault_where_gradients_are_added", "sm80/backward.cuh", "", "", 80,
     "--spec bwd:bf16:d64:add_grads --shape b1:hq2:hkv1:sq70:skv90", kDone, "within their limits"},
    {"barrier_missing", "sm80/backward_epilogue.cuh", "__syncthreads();", "", 80, kBackward, kCheckFailed,
     "NOT all within their limits"},
    {"copies_not_awaited", "sm80/forward_loader.cuh",
     "P::Copies::template wait<ForwardPolicy<P>::kPendingCopies>();", "", 80, kForward, kCheckFailed,
     "NOT all within their limits"},
    {"products_not_awaited", "sm90/forward_mainloop.cuh", "wgmma_wait<1>();", "", 90, kForward, kCheckFailed,
     "NOT all within their limits"},
    {"fence_missing", "sm90/forward_output.cuh", "publish_to_async_proxy();", "", 90, kForward, kFailure,
     "without a fence.proxy.async"},
    {"prior_grid_not_awaited", "sm90/backward.cuh", "wait_for_prior_grid<P>();", "", 90, kBackward, kFailure,
     "before it has waited for the grid before"},
    {"stage_never_released", "sm90/backward.cuh", "DoutRing<P>::release_thread(smem, i);", "", 90, kBackward,
     kFailure, "a deadlock"},
    {"outside_of_shared_memory", "sm90/backward_smem.cuh", "return base + kLayout.q() +",
     "return base + (1 << 20) + kLayout.q() +", 90, kBackward, kFailure, "shared memory was accessed at"},
    {"outside_of_a_tensor", "simt/pair_weights.cuh", "p.lse.data[sequence.lse_row(p, h, q)]",
     "p.lse.data[sequence.lse_row(p, h, q) + 600]", 80,
     "--spec bwd:fp32:d64 --shape b1:hq2:hkv1:sq300:skv100", kFailure, "a fault at address"},
    {"another_family_takes_over", "sm90/forward.cuh", "#pragma once", "#error", 90,
     "--spec fwd:bf16:d64:cache --shape b2:hq4:hkv2:sq1:skv300", kDone, "all within their limits"},
    {"unknown_instruction", "common/ptx.cuh", "ex2.approx.ftz.f32", "ex2.approx.ftz.f64", 80, kForward,
     kFailure, "does not know the PTX instruction ex2.approx.ftz.f64"},
};

// A part of the cases below is drawn for a run; a text that moved is found in every run.
TEST(CommandFaultTexts, Occur) {
  for (const Fault& fault : kFaults)
    EXPECT_NE(read_file(test::sources() + "/templates/" + fault.file).find(fault.text), std::string::npos)
        << fault.name << ": templates/" << fault.file << " has no " << fault.text;
}

class CommandFaults : public testing::TestWithParam<Fault> {};

TEST_P(CommandFaults, AreFound) {
  const Fault& fault = GetParam();
  const TemporaryDirectory folder;
  const std::filesystem::path templates = folder.path() / "templates", changed = templates / fault.file;
  std::filesystem::copy(test::sources() + "/templates", templates, std::filesystem::copy_options::recursive);
  std::string text = read_file(changed);
  const std::size_t at = text.find(fault.text);
  ASSERT_NE(at, text.npos) << "see CommandFaultTexts";
  std::ofstream(changed) << text.replace(at, fault.text.size(), fault.instead);

  const CommandResult result =
      run_command(folder, std::string("verify --seed 1 ") + fault.problem,
                  fmt::format("FLASHJIT_LIBCUDA='{}' FLASHJIT_NVRTC='{}' FLASHJIT_TEMPLATE_DIR='{}' "
                              "FLASHJIT_EMULATOR_CAPABILITY={}",
                              built(FLASHJIT_EMULATED_CUDA), built(FLASHJIT_EMULATED_NVRTC),
                              templates.string(), fault.capability));
  EXPECT_EQ(result.code, fault.code) << result.out << result.err;
  EXPECT_NE((result.out + result.err).find(fault.message), std::string::npos) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(Templates, CommandFaults, testing::ValuesIn(kFaults),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flashjit::test

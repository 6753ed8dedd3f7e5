// Every error code of the C interface, each produced by what a user may meet, and each with the way out of
// it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cctype>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <regex>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "api/c_words.hpp"
#include "flashjit/flashjit.h"
#include "support/file.hpp"
#include "support/text.hpp"
#include "tests/support/built.hpp"
#include "tests/support/c_abi_support.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/kept_log.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using test::FakeDriver;
using test::RuntimePtr;
using test::SpecPtr;
using test::Variable;

/// A runtime over the fake driver and the fake NVRTC that keeps nothing on disk, unless its options are
/// changed.
class CAbiErrors : public testing::Test {
 protected:
  void SetUp() override {
    fake().reset();
    options_.struct_size = sizeof options_;
    options_.cache_dir = "";
    options_.nvrtc = nvrtc_.c_str();
    options_.log = [](void*, const char*) {};
  }

  void TearDown() override { fake().reset(); }  // other tests make a context of it first

  static FakeDriver& fake() { return test::fake_cuda(); }

  RuntimePtr runtime() { return test::make_runtime(options_); }
  static SpecPtr spec(const char* text) { return test::make_spec(text); }
  static flashjit_status forward(flashjit_runtime* runtime) {
    const flashjit_forward_args args = test::make_forward_args();
    return flashjit_forward(runtime, spec("bf16:d64:causal").get(), &args, nullptr);
  }
  /// The call fails so, names what is wrong, and launches nothing; afterwards the runtime still works.
  void expect(flashjit_status status, const std::string& part, flashjit_runtime* runtime) {
    const std::size_t before = fake().launches.size();
    EXPECT_EQ(forward(runtime), status) << flashjit_last_error_message();
    EXPECT_NE(std::string(flashjit_last_error_message()).find(part), std::string::npos)
        << flashjit_last_error_message();
    EXPECT_EQ(fake().launches.size(), before);
  }
  static void expect_that_it_works(flashjit_runtime* runtime) {
    const std::size_t before = fake().launches.size();
    EXPECT_EQ(forward(runtime), FLASHJIT_OK) << flashjit_last_error_message();
    EXPECT_GT(fake().launches.size(), before);
  }

  const std::string nvrtc_ = test::built(FLASHJIT_FAKE_NVRTC);
  const Variable libcuda_{"FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA)};
  flashjit_options options_{};
};

TEST_F(CAbiErrors, Ok) { expect_that_it_works(runtime().get()); }

TEST_F(CAbiErrors, InvalidArgument) {
  fake().unknown_pointers_below = 0x10001;
  const RuntimePtr r = runtime();
  expect(FLASHJIT_INVALID_ARGUMENT, "q is at 0x10000", r.get());
  fake().unknown_pointers_below = 0;
  expect_that_it_works(r.get());
}

TEST_F(CAbiErrors, AdviceIsInTheWordsOfC) {
  const RuntimePtr r = runtime();
  flashjit_forward_args args = test::make_forward_args();
  const auto says = [&](const char* text, const std::string& advice) {
    EXPECT_EQ(flashjit_forward(r.get(), spec(text).get(), &args, nullptr), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(flashjit_last_error_message()).find(advice), std::string::npos)
        << flashjit_last_error_message();
  };
  args.cu_seqlens_q = reinterpret_cast<const std::int32_t*>(0x100000);
  says("bf16:d64:causal", "the spec has no varlen: write :varlen in the spec.");
  args.cu_seqlens_q = nullptr;
  args.page_table.data = reinterpret_cast<const std::int32_t*>(0x100000);
  says("bf16:d64:causal", "write :pages16 in the spec, with the rows of a page.");
}

/// The strings of a source, those that lie side by side as one.
std::vector<std::string> strings_of(std::string source) {
  source = std::regex_replace(source, std::regex("\"\\s*\n\\s*\""), "");
  const std::regex quoted("\"((?:[^\"\\\\\n]|\\\\.)*)\"");
  std::vector<std::string> found;
  for (std::sregex_iterator at(source.begin(), source.end(), quoted), end; at != end; ++at)
    found.push_back((*at)[1]);
  return found;
}

TEST_F(CAbiErrors, NoMessageOfACallSpeaksOfCxx) {
  const std::regex cxx("[A-Za-z]::|spec\\.[a-z]|Layout");
  std::size_t translated = 0;
  for (const fs::path& file : fs::directory_iterator(fs::path(test::sources()) / "runtime/call")) {
    if (file.extension() != ".cpp") continue;
    for (const std::string& message : strings_of(read_file(file))) {
      const std::string said = c_api::in_c_words(message);
      translated += said != message;
      const bool is_include = message.ends_with(".hpp") || message.ends_with(".h");
      EXPECT_TRUE(is_include || !std::regex_search(said, cxx)) << file << ": " << said;
    }
  }
  EXPECT_GT(translated, 25u);
}

TEST_F(CAbiErrors, RowsOfAFormatHaveColumnsThatHeadsCanHave) {
  std::int64_t bytes = -1;
  std::int32_t alignment = -1, has_scale = -1;
  const auto row = [&](std::int32_t dim) {
    return flashjit_kv_row("nvfp4", dim, &bytes, &alignment, &has_scale);
  };
  for (const std::int32_t wrong : {-16, 592, 1 << 30}) {
    EXPECT_EQ(row(wrong), FLASHJIT_INVALID_ARGUMENT) << wrong;
    EXPECT_NE(std::string_view(flashjit_last_error_message()).find("576"), std::string_view::npos);
  }
  EXPECT_EQ(row(0), FLASHJIT_OK);
  EXPECT_EQ(bytes, -1);
  EXPECT_EQ(alignment, -1);
  EXPECT_GE(has_scale, 0);
  EXPECT_EQ(row(64), FLASHJIT_OK);
  EXPECT_GT(bytes, 0);
}

TEST_F(CAbiErrors, Unsupported) {
  fake().compute_capability = 60;
  expect(FLASHJIT_UNSUPPORTED, "sm_60", runtime().get());
  const SpecPtr s = spec("bf16:d64:causal");
  const flashjit_shape shape{1, 2, 2, 128, 128};
  flashjit_device device{};
  device.struct_size = sizeof device;
  ASSERT_EQ(flashjit_current_device(runtime().get(), &device), FLASHJIT_OK);
  EXPECT_STREQ(device.arch, "sm_60");
  const std::string of_call = flashjit_last_error_message();
  EXPECT_EQ(flashjit_can(FLASHJIT_FORWARD, s.get(), &shape, &device), FLASHJIT_UNSUPPORTED);
  EXPECT_EQ(flashjit_last_error_message(), of_call);
}

TEST_F(CAbiErrors, NoDriver) {
  const Variable nowhere("FLASHJIT_LIBCUDA", "/nonexistent/libcuda.so.1");
  expect(FLASHJIT_NO_DRIVER, "FLASHJIT_LIBCUDA", runtime().get());
}

TEST_F(CAbiErrors, NoDevice) {
  fake().has_context = false;
  const RuntimePtr r = runtime();
  expect(FLASHJIT_NO_DEVICE, "context", r.get());
  fake().has_context = true;
  expect_that_it_works(r.get());

  fake().init_result = CUDA_ERROR_NO_DEVICE;
  const RuntimePtr without_gpu = runtime();
  expect(FLASHJIT_NO_DEVICE, "CUDA_VISIBLE_DEVICES", without_gpu.get());
  fake().init_result = CUDA_SUCCESS;
  expect_that_it_works(without_gpu.get());
}

TEST_F(CAbiErrors, NoCompiler) {
  options_.nvrtc = "/nonexistent/libnvrtc.so";
  expect(FLASHJIT_NO_COMPILER, "FLASHJIT_NVRTC", runtime().get());
}

TEST_F(CAbiErrors, CompileFailed) {
  const RuntimePtr r = runtime();
  {
    const Variable fails("FAKE_NVRTC_FAIL", "1");
    expect(FLASHJIT_COMPILE_FAILED, "as the test asked", r.get());
    EXPECT_NE(std::string(flashjit_last_error_detail()).find("error: as the test asked"), std::string::npos);
  }
  expect_that_it_works(r.get());
}

TEST_F(CAbiErrors, KernelMissing) {
  options_.jit = FLASHJIT_JIT_OFF;
  expect(FLASHJIT_KERNEL_MISSING, "flashjit pack --spec fwd:bf16:d64:causal", runtime().get());
}

TEST_F(CAbiErrors, Io) {
  options_.template_dir = "/nonexistent/templates";
  expect(FLASHJIT_IO, "/nonexistent/templates", runtime().get());
}

TEST_F(CAbiErrors, Cuda) {
  const RuntimePtr r = runtime();
  fake().load_result = CUDA_ERROR_OUT_OF_MEMORY;
  expect(FLASHJIT_CUDA, "cuLibraryLoadData failed", r.get());
  fake().load_result = CUDA_SUCCESS;
  expect_that_it_works(r.get());
  fake().launch_result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
  expect(FLASHJIT_CUDA, "cuLaunchKernelEx failed", r.get());
  fake().launch_result = CUDA_SUCCESS;
  expect_that_it_works(r.get());
}

TEST_F(CAbiErrors, Internal) {
  const auto r = runtime();
  fake().throws_at_launch = true;
  expect(FLASHJIT_INTERNAL, "thrown by the fake driver", r.get());
  fake().throws_at_launch = false;
  expect_that_it_works(r.get());
}

TEST_F(CAbiErrors, TheCacheLimitIsPassedOn) {
  const fs::path folder = fs::path(testing::TempDir()) / ("limit-" + unique_suffix());
  const std::string path = folder.string();
  options_.cache_dir = path.c_str();
  for (const bool limited : {false, true}) {
    std::string log;
    options_.log = [](void* user, const char* line) { *static_cast<std::string*>(user) += line; };
    options_.log_user = &log;
    options_.cache_limit = limited ? 1 : 0;
    expect_that_it_works(runtime().get());
    EXPECT_EQ(log.find("limit of 1 bytes") != log.npos, limited) << log;
    fs::remove_all(folder);
  }
}

TEST_F(CAbiErrors, DeterministicIsMeantForTheBackwardPassWhateverPassTheTextNames) {
  const RuntimePtr r = runtime();
  const flashjit_shape shape{1, 2, 2, 8192, 512};
  const auto bytes = [&](const char* text) {
    std::size_t needed = 0;
    EXPECT_EQ(flashjit_workspace_bytes(r.get(), FLASHJIT_BACKWARD, spec(text).get(), &shape, &needed),
              FLASHJIT_OK);
    return needed;
  };
  const std::size_t with_tickets = bytes("bwd:bf16:d64:det");
  EXPECT_GT(with_tickets, bytes("bwd:bf16:d64"));
  EXPECT_EQ(bytes("bf16:d64:det"), with_tickets);
  EXPECT_EQ(bytes("fwd:bf16:d64:det"), with_tickets);
}

/// The tuner starts where it is asked for and nowhere else, and lives until it is stopped: that the fake GPU
/// cannot be tuned on is what it tells.
TEST_F(CAbiErrors, TuningInTheBackgroundIsPassedOn) {
  options_.log = [](void* user, const char* line) { static_cast<test::KeptLog*>(user)->add(line); };
  const auto tunes = [&](flashjit_switch option, const char* environment) {
    const Variable variable("FLASHJIT_TUNE_IN_BACKGROUND", environment);
    test::KeptLog log;
    options_.log_user = &log;
    options_.tune_in_background = option;
    fake().reset();
    fake().ctx_result = CUDA_ERROR_INVALID_VALUE;
    const RuntimePtr r = runtime();
    expect_that_it_works(r.get());
    const char* line = "cannot tune fwd:bf16:d64:causal";
    const bool expected = option == FLASHJIT_SWITCH_ON || (!option && std::string(environment) == "on");
    log.hears(line, std::chrono::milliseconds(expected ? 10000 : 50));
    EXPECT_EQ(flashjit_stop_tuning(r.get()), FLASHJIT_OK) << flashjit_last_error_message();
    return log.has(line);
  };
  EXPECT_TRUE(tunes(FLASHJIT_SWITCH_ON, ""));
  EXPECT_TRUE(tunes(FLASHJIT_SWITCH_DEFAULT, "on"));
  EXPECT_FALSE(tunes(FLASHJIT_SWITCH_DEFAULT, ""));
  EXPECT_FALSE(tunes(FLASHJIT_SWITCH_OFF, "on"));
}

TEST_F(CAbiErrors, EveryCodeHasATestOfItsName) {
  const testing::TestSuite& suite = *testing::UnitTest::GetInstance()->current_test_suite();
  std::set<std::string> names;
  for (int i = 0; i < suite.total_test_count(); ++i) names.insert(suite.GetTestInfo(i)->name());
  for (flashjit_status code = FLASHJIT_OK; code <= FLASHJIT_INTERNAL; ++code) {
    std::string name;
    for (const std::string_view word : split(flashjit_status_name(code), '_'))
      name += fmt::format("{:c}{}", std::toupper(word[0]), word.substr(1));
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

}  // namespace
}  // namespace flashjit

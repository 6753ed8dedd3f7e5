// prepare_range(): every configuration that shapes of a range choose. NVRTC and the driver are those of
// tests/fake.
#include "flashjit/flashjit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <set>
#include <stdexcept>

#include "call/engine.hpp"
#include "plan/plan.hpp"
#include "support/file.hpp"
#include "tests/support/built.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/kept_log.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using test::FakeDriver;
using test::Variable;

const KernelSpec kDecoding{
    {.dtype = DType::bf16, .head_dim = 64, .mask = causal(), .kv = KvLayout::paged(16), .varlen = true}};
const ShapeRange kRange{{1, 8, 2, 1, 128}, {48, 8, 2, 1024, 8192}};

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << text

template <class Call>
Error error_of_range(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "nothing was thrown"};
}

std::vector<std::int64_t> batches_of(const ShapeRange& range) {
  std::vector<std::int64_t> batches;
  for (const AttentionShape& shape : range.shapes()) batches.push_back(shape.batch);
  return batches;
}

TEST(ShapeRange, HasItsEndsAndThePowersOfTwoBetweenThemOrSteps) {
  const auto batches = [](std::int64_t first, std::int64_t last, std::int64_t step) {
    return batches_of({{first, 4, 4, 1, 1}, {last, 4, 4, 1, 1}, {step, 0, 0, 0, 0}});
  };
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(batches(1, 1, 0), Sizes({1}));
  EXPECT_EQ(batches(1, 8, 0), Sizes({1, 2, 4, 8}));
  EXPECT_EQ(batches(3, 9, 0), Sizes({3, 4, 8, 9}));
  EXPECT_EQ(batches(5, 7, 0), Sizes({5, 7}));
  EXPECT_EQ(batches(8, 32, 8), Sizes({8, 16, 24, 32}));
  EXPECT_EQ(batches(1, 20, 8), Sizes({1, 9, 17, 20}));
  EXPECT_EQ(batches(1, 2, std::numeric_limits<std::int64_t>::max()), Sizes({1, 2}));
  EXPECT_EQ((ShapeRange{{1, 4, 4, 1, 16}, {2, 4, 4, 4, 64}}.shapes().size()), 2u * 3 * 3);
}

TEST(ShapeRange, RefusesWhatIsNone) {
  const auto message = [](const AttentionShape& first, const AttentionShape& last,
                          const AttentionShape& step = {}) {
    return error_of_range([&] { (void)ShapeRange{first, last, step}.shapes(); }).message();
  };
  EXPECT_CONTAINS(message({0, 4, 4, 1, 1}, {2, 4, 4, 1, 1}), "batch goes from 0 to 2: begin with 1");
  EXPECT_CONTAINS(message({1, 4, 4, 9, 1}, {2, 4, 4, 8, 1}), "seqlen_q goes from 9 to 8");
  EXPECT_CONTAINS(message({1, 4, 4, 1, 1}, {2, 8, 4, 1, 1}), "last has 8 and 4: give a range for each");
  EXPECT_CONTAINS(message({1, 4, 4, 1, 1}, {1, 4, 4, 1, 8}, {0, 0, 0, 0, -2}), "the step of seqlen_kv is -2");
  EXPECT_CONTAINS(message({1, 4, 4, 1, 1}, {1, 4, 4, 1, 1 << 20}, {1, 1, 1, 1, 1}), "more than 65536 sizes");
  EXPECT_CONTAINS(message({1, 4, 4, 1, 1}, {1024, 4, 4, 1, 1024}, {1, 1, 1, 1, 1}), "1048576 shapes");
  EXPECT_CONTAINS(message({1, 4, 3, 1, 1}, {1, 4, 3, 1, 1}), "multiple of heads_kv");
  EXPECT_CONTAINS(message({1, 0, 0, 1, 1}, {1, 0, 0, 1, 1}), "heads_kv is 0");
}

class PrepareRange : public testing::Test {
 protected:
  PrepareRange() { FakeDriver::state().reset(); }
  ~PrepareRange() override { fs::remove_all(folder_); }

  std::unique_ptr<Engine> engine(bool jit = true) {
    Settings settings;
    settings.cache_dir = folder_.string();
    settings.cache_limit = std::uint64_t{1} << 40;
    settings.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
    settings.jit = jit;
    settings.log = log_.writer();
    return std::make_unique<Engine>(std::move(settings), FakeDriver::driver());
  }

  static std::set<std::string> chosen() {
    std::set<std::string> configs;
    for (const AttentionShape& shape : kRange.shapes())
      configs.insert(to_string(
          plan::make_plan(kDecoding, shape, device::query_device(*FakeDriver::driver(), 0), {}).config));
    return configs;
  }

  test::KeptLog log_;
  const fs::path folder_ = fs::temp_directory_path() / ("flashjit-range-" + unique_suffix());
};

TEST_F(PrepareRange, NoCallOfTheRangeCompilesAfterwards) {
  const auto runtime = engine();
  const RangeReport report = runtime->prepare_range(kDecoding, kRange, {});
  std::set<std::string> made;
  std::size_t workspace = 0;
  for (const KernelReport& kernel : report.kernels) {
    EXPECT_EQ(kernel.origin, KernelOrigin::compiled);
    made.insert(to_string(kernel.config));
  }
  EXPECT_EQ(made, chosen());
  EXPECT_GT(made.size(), 1u);
  EXPECT_EQ(report.configurations, made.size());
  EXPECT_EQ(report.shapes, kRange.shapes().size());
  for (const AttentionShape& shape : kRange.shapes()) {
    EXPECT_EQ(runtime->prepare(kDecoding, shape, {}).origin, KernelOrigin::memory) << to_string(shape);
    workspace = std::max(workspace, runtime->workspace_bytes(kDecoding, shape));
  }
  EXPECT_EQ(report.workspace_bytes, workspace);
  EXPECT_GT(workspace, 0u);
}

TEST_F(PrepareRange, GoesOnFromTheCacheWhereItWasStopped) {
  std::size_t kept = 0;
  {
    std::vector<std::size_t> told;
    const RangeReport stopped =
        engine()->prepare_range(kDecoding, kRange, [&](std::size_t made, std::size_t configurations) {
          EXPECT_EQ(configurations, chosen().size());
          told.push_back(made);
          return made == 0;
        });
    kept = stopped.kernels.size();
    EXPECT_EQ(told.front(), 0u);
    EXPECT_EQ(told.size(), 2u);
    EXPECT_GE(kept, told.back());
    EXPECT_EQ(stopped.configurations, chosen().size());
  }
  const RangeReport rest = engine()->prepare_range(kDecoding, kRange, {});
  EXPECT_EQ(std::ranges::count(rest.kernels, KernelOrigin::disk, &KernelReport::origin),
            static_cast<std::ptrdiff_t>(kept));
  EXPECT_EQ(rest.kernels.size(), chosen().size());
  EXPECT_EQ(engine(false)->prepare_range(kDecoding, kRange, {}).kernels.size(), chosen().size());
}

TEST_F(PrepareRange, WhatProgressThrowsComesThrough) {
  const auto runtime = engine();
  const auto throws = [](std::size_t made, std::size_t) {
    if (made > 0) throw std::length_error("enough");
    return true;
  };
  EXPECT_THROW(runtime->prepare_range(kDecoding, kRange, throws), std::length_error);
  EXPECT_EQ(runtime->prepare_range(kDecoding, kRange, {}).kernels.size(), chosen().size());
}

TEST_F(PrepareRange, WhatFailsIsThrown) {
  const Variable failing("FAKE_NVRTC_FAIL", "1");
  EXPECT_EQ(error_of_range([&] { engine()->prepare_range(kDecoding, kRange, {}); }).code(),
            ErrorCode::compile_failed);
  EXPECT_EQ(error_of_range([&] { engine(false)->prepare_range(kDecoding, kRange, {}); }).code(),
            ErrorCode::kernel_missing);
}

TEST(PrepareRangeInC, NullIsRefused) {
  const flashjit_shape shape{1, 2, 2, 128, 128};
  EXPECT_EQ(flashjit_prepare_range(nullptr, FLASHJIT_FORWARD, nullptr, nullptr, &shape, nullptr, nullptr,
                                   nullptr, nullptr, nullptr, nullptr, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  EXPECT_CONTAINS(std::string(flashjit_last_error_message()), "shape is null");
}

}  // namespace
}  // namespace flashjit

// The meter of real GPUs, on the driver of tests/fake: what it launches, with which inputs, and in which
// order.
#include "autotune/device_meter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "autotune/inputs.hpp"
#include "device/device_info.hpp"
#include "plan/plan.hpp"
#include "support/file.hpp"
#include "tests/support/built.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/launched_params.hpp"

namespace flashjit::autotune {
namespace {

using test::FakeDriver;

class DeviceMeterTest : public ::testing::Test {
 protected:
  DeviceMeterTest() { fake().reset(); }
  ~DeviceMeterTest() override { fake().reset(); }

  static FakeDriver& fake() { return test::fake_cuda(); }
  static MeterOptions options() {
    MeterOptions options{.map_density = 0.5};
    options.runtime.nvrtc = test::built(FLASHJIT_FAKE_NVRTC);
    return options;
  }

  /// Times a problem's configuration by itself, and returns what its last launch was given.
  Params last_params(DeviceMeter& meter, const Problem& problem, const TileConfig& config) const {
    meter.prepare(problem, config);
    meter.compare(problem, config, {}, 3);
    const DeviceInfo device = device::query_device(*gpu_.driver(), gpu_.device());
    const auto plan = plan::make_plan(problem.spec, problem.shape, device, {}, config);
    return launched_params(fake().launches.back(), plan);
  }

  const test::Variable libcuda_{"FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA)};
  const device::PrimaryContext gpu_{device::Driver::open(test::built(FLASHJIT_FAKE_CUDA))};
  const Problem problem_{parse_spec("fwd:bf16:d64:map128x128").normalized(),
                         parse_shape("b1:hq8:hkv8:sq2048:skv2048")};
  const std::vector<TileConfig> configs_{parse_config("sm80:br128:bc64:w4"),
                                         parse_config("sm80:br64:bc64:w4")};
};

/// The launches of the calls that were timed, which are the last ones.
class TimedCalls {
 public:
  TimedCalls(const FakeDriver& fake, std::size_t calls, std::size_t launches_a_call)
      : launches_(fake.launches.end() - static_cast<std::ptrdiff_t>(calls * launches_a_call),
                  fake.launches.end()),
        launches_a_call_(launches_a_call) {}
  /// The main kernel's, which is a forward pass's last.
  const FakeDriver::Launch& main(std::size_t call) const {
    return launches_.at((call + 1) * launches_a_call_ - 1);
  }
  double ms(std::size_t call) const {
    double sum = 0;
    for (std::size_t i = 0; i < launches_a_call_; ++i) {
      const FakeDriver::Launch& launch = launches_.at(call * launches_a_call_ + i);
      sum += FakeDriver::launch_ms(launch.blocks, launch.threads);
    }
    return sum;
  }

 private:
  std::vector<FakeDriver::Launch> launches_;
  std::size_t launches_a_call_;
};

TEST_F(DeviceMeterTest, CandidatesTakeTurnsOnInputsThatRotateUnderTheRealMap) {
  constexpr int kRounds = 20;  // more launches than the queue holds
  const std::size_t calls = kRounds * configs_.size();
  DeviceMeter meter(gpu_, options());
  for (const TileConfig& config : configs_) meter.prepare(problem_, config);
  const Comparison compared = meter.compare(problem_, configs_[0], std::span(configs_).subspan(1), kRounds);

  const DeviceInfo device = device::query_device(*gpu_.driver(), gpu_.device());
  const auto plan = plan::make_plan(problem_.spec, problem_.shape, device, {}, configs_.front());
  const TimedCalls timed(fake(), calls, plan.launches.size());
  ASSERT_NE(timed.main(0).blocks, timed.main(1).blocks) << "that tells the candidates apart";

  std::set<const void*> seen;
  for (std::size_t i = 0; i < calls; ++i) seen.insert(launched_params(timed.main(i), plan).q.data);
  // A set's four tensors have 2 MiB each, and its LSE 64 KiB.
  const std::size_t sets = 2 * static_cast<std::size_t>(device.l2_bytes) / ((8 << 20) + (64 << 10)) + 1;
  EXPECT_EQ(seen.size(), sets) << "twice what the L2 cache holds";

  const std::vector<std::size_t> order = launch_order(1, kRounds);
  const BlockPattern map = plausible_map(problem_.spec, problem_.shape, options().map_density);
  for (std::size_t i = 0; i < calls; ++i) {
    const Params params = launched_params(timed.main(i), plan),
                 first = launched_params(timed.main(i % sets), plan);
    EXPECT_EQ(timed.main(i).blocks, timed.main(order[i]).blocks) << i;
    EXPECT_EQ(params.q.data, first.q.data) << i;
    EXPECT_EQ(params.k.data, first.k.data) << i;
    EXPECT_EQ(params.v.data, first.v.data) << i;
    EXPECT_EQ(params.o.data, first.o.data) << i;
    EXPECT_EQ(params.map_rows, map.rows);
    EXPECT_EQ(params.map_columns, map.columns);
    EXPECT_EQ(fake().uploads[reinterpret_cast<CUdeviceptr>(params.block_map)], map.blocks);
  }
  EXPECT_NEAR(compared.reference_ms, timed.ms(0), 1e-4);
  EXPECT_NEAR(compared.ratios.at(0), timed.ms(1) / timed.ms(0), 1e-3);
}

TEST_F(DeviceMeterTest, ABackwardPassIsTimedAloneOnGradientsOfItsOwn) {
  Problem problem{parse_spec("bwd:bf16:d64").normalized(), parse_shape("b1:hq8:hkv8:sq2048:skv2048")};
  DeviceMeter meter(gpu_, options());
  const Params last = last_params(meter, problem, parse_config("sm80:br64:bc64:w4"));
  std::set<const void*> tensors;
  for (const TensorParam& tensor : {last.q, last.k, last.v, last.o, last.dout, last.dq, last.dk, last.dv})
    tensors.insert(tensor.data);
  EXPECT_EQ(tensors.size(), 8u);
  EXPECT_FALSE(tensors.contains(nullptr));
}

TEST_F(DeviceMeterTest, EveryQueryHasAListOfKeysWhereTheSpecSaysSo) {
  for (const char* spec :
       {"fwd:bf16:d64:indices", "fwd:bf16:d64:varlen:pages16:indices", "bwd:bf16:d64:indices"}) {
    const Problem problem{parse_spec(spec).normalized(), parse_shape("b2:hq8:hkv2:sq3:skv100")};
    DeviceMeter meter(gpu_, options());
    const IndicesParam indices = last_params(meter, problem, parse_config("simt:br16:bc32:w4")).indices;
    EXPECT_EQ(indices.count, 50) << spec;
    EXPECT_EQ(fake().uploads[reinterpret_cast<CUdeviceptr>(indices.keys)].size(), 2 * 3 * 2 * 50 * 4) << spec;
  }
}

TEST_F(DeviceMeterTest, SwizzledScalesOfOAreOneMatrix) {
  for (const char* spec : {"fwd:bf16:d64:out{e2m1:g16:e4m3:apart:scaled}:swizzled_scales",
                           "fwd:bf16:d64:varlen:out{e2m1:g16:e4m3:apart:scaled}:swizzled_scales"}) {
    const Problem problem{parse_spec(spec).normalized(), parse_shape("b2:hq8:hkv2:sq3:skv100")};
    DeviceMeter meter(gpu_, options());
    const TensorParam scales = last_params(meter, problem, parse_config("simt:br16:bc32:w4")).out_block_scale;
    EXPECT_NE(scales.data, nullptr) << spec;
    EXPECT_EQ(scales.stride_s, 8 * 4 * 128) << spec;  // of 128 tokens
  }
}

TEST_F(DeviceMeterTest, OneShapesKernelsServeTheOther) {
  const std::string log = testing::TempDir() + "meter-" + unique_suffix();
  const test::Variable log_variable("FAKE_NVRTC_LOG", log);
  DeviceMeter meter(gpu_, options());
  Problem other = problem_;
  other.shape.seqlen_kv *= 2;
  for (const TileConfig& config : configs_) meter.prepare(problem_, config);
  meter.prepare(other, configs_[0]);
  EXPECT_EQ(std::ranges::count(read_file(log), '\n'), 2);
  std::filesystem::remove(log);
}

TEST_F(DeviceMeterTest, AFallingClockDoesNotMoveTheChoiceAndOneThatNeverSettlesShowsAsDrift) {
  const auto tuned = [&](double slower, double slowest) {
    fake().reset();
    fake().slower = slower;
    fake().slowest = slowest;
    DeviceMeter meter(gpu_, options());
    TuneOptions tuning;
    tuning.exhaustive = true;
    tuning.families = {Family::sm80};
    return tune(problem_, read_setting(gpu_, options().runtime), meter, tuning);
  };
  const TuneResult cool = tuned(0, 0), limited = tuned(1e-4, 1.0 / 3), heating = tuned(1e-4, INFINITY);
  EXPECT_LT(cool.drift, 0.001);
  EXPECT_LT(limited.drift, 0.05) << "the clock fell by a quarter before anything was timed";
  EXPECT_GT(heating.drift, 0.1);
  EXPECT_EQ(limited.record.best, cool.record.best);
  const auto chosen = std::ranges::find(cool.record.timings, heating.record.best, &plan::Timing::config);
  ASSERT_NE(chosen, cool.record.timings.end());
  EXPECT_LE(chosen->ms, 1.02 * cool.best_ms()) << "each was measured beside the reference";
}

TEST_F(DeviceMeterTest, NothingIsTimedUntilTheClockIsSteady) {
  const std::span<const TileConfig> other(&configs_[1], 1);
  fake().slower = 1e-4;
  fake().slowest = 1.0 / 3;  // the clock falls by a quarter
  DeviceMeter meter(gpu_, options());
  for (const TileConfig& config : configs_) meter.prepare(problem_, config);
  const double warm_ms = meter.compare(problem_, configs_[0], other, 6).reference_ms;
  EXPECT_NEAR(fake().heat, fake().slowest, 0.02) << "all of the fall is over";
  const auto launches_of = [&](auto&& measure) {
    const std::size_t before = fake().launches.size();
    measure();
    return fake().launches.size() - before;
  };
  const std::size_t still_warm = launches_of([&] { meter.compare(problem_, configs_[0], other, 6); });
  EXPECT_LT(still_warm, 1000u) << "one look shows that it still is";
  fake().heat = 0;  // it waited for a compiler, say
  double ms = 0;
  const std::size_t cool =
      launches_of([&] { ms = meter.compare(problem_, configs_[0], other, 6).reference_ms; });
  EXPECT_NEAR(ms, warm_ms, 0.02 * warm_ms);
  EXPECT_GT(cool, 3 * still_warm);
}

TEST_F(DeviceMeterTest, AClockThatNeverSettlesIsWaitedForOnlySoLong) {
  fake().slower = 1e-3;
  DeviceMeter meter(gpu_, options());
  meter.prepare(problem_, configs_[0]);
  EXPECT_GT(meter.compare(problem_, configs_[0], {}, 6).reference_ms, 0);
  EXPECT_LT(fake().launches.size(), 100000u);
}

}  // namespace
}  // namespace flashjit::autotune

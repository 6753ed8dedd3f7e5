// How warm and fast a GPU is: read from an NVML, and over a measurement.
#include "autotune/conditions.hpp"

#include <gtest/gtest.h>

#include "tests/support/built.hpp"
#include "tests/support/fakes.hpp"

namespace flashjit::autotune {
namespace {

using device::GpuState;
using device::Sensors;
using test::FakeNvml;

constexpr const char* kBusId = "FA4E:01:00.0";

class SensorsTest : public ::testing::Test {
 protected:
  SensorsTest() { fake() = {}; }
  ~SensorsTest() override { fake() = {}; }
  static FakeNvml& fake() { return test::fake_nvml(); }
};

TEST_F(SensorsTest, ReadClockTemperatureAndReasons) {
  {
    const Sensors sensors(kBusId, test::built(FLASHJIT_FAKE_NVML));
    EXPECT_EQ(sensors.read(), (GpuState{1980, 35, 0x4}));
    EXPECT_EQ(sensors.read(), (GpuState{1965, 37, 0x4}));
    EXPECT_EQ(fake().in_use, 1);
  }
  EXPECT_EQ(fake().in_use, 0) << "NVML is shut down again";
}

TEST_F(SensorsTest, WhatAGpuDoesNotTellIsUnknownAndTheRestIsNot) {
  const Sensors sensors(kBusId, test::built(FLASHJIT_FAKE_NVML));
  fake().knows_temperature = false;
  EXPECT_EQ(sensors.read(), (GpuState{1980, {}, 0x4}));
  fake().knows_temperature = true;
  fake().knows_clock = fake().knows_reasons = false;
  EXPECT_EQ(sensors.read(), (GpuState{{}, 35, 0}));
}

TEST_F(SensorsTest, NothingIsKnownWithoutAnNvmlThatKnowsTheGpu) {
  EXPECT_EQ(Sensors(kBusId, "/nowhere/libnvidia-ml.so.1").read(), GpuState{});
  EXPECT_EQ(Sensors(kBusId, test::built(FLASHJIT_FAKE_NVRTC)).read(), GpuState{})
      << "a library without its functions";
  EXPECT_EQ(Sensors("FA4E:7F:00.0", test::built(FLASHJIT_FAKE_NVML)).read(), GpuState{}) << "another GPU";
  EXPECT_EQ(fake().in_use, 0);
  fake().starts = false;
  EXPECT_EQ(Sensors(kBusId, test::built(FLASHJIT_FAKE_NVML)).read(), GpuState{});
  EXPECT_EQ(fake().in_use, 0);
}

TEST(Conditions, SpanWhatWasRead) {
  Conditions conditions;
  EXPECT_EQ(to_string(conditions), "");
  for (const GpuState& state : {GpuState{1980, 35, 0}, GpuState{1600, 63, 0x4}, GpuState{1755, 61, 0x1}})
    conditions.add(state);
  EXPECT_EQ(conditions.clock_mhz, (Range{1980, 1755, 1600, 1980}));
  EXPECT_EQ(conditions.celsius, (Range{35, 61, 35, 63}));
  EXPECT_EQ(to_string(conditions), "clock 1980 -> 1755 MHz, 35 -> 61 C, slowed by the power limit");

  Conditions later;
  later.add(GpuState{1500, 70, 0x40 | 0x8});
  conditions.add(later);
  conditions.add(Conditions{});
  EXPECT_EQ(conditions.clock_mhz, (Range{1980, 1500, 1500, 1980}));
  EXPECT_EQ(to_string(conditions),
            "clock 1980 -> 1500 MHz, 35 -> 70 C, slowed by the power limit, heat, the hardware's protection");
}

TEST(Conditions, WhatMerelyChoosesTheClocksSlowsNothing) {
  // NVML: idle, clocks of applications, sync boost, clocks of the display.
  EXPECT_EQ(slowed_text(0x1 | 0x2 | 0x10 | 0x100), "");
  EXPECT_EQ(slowed_text(0x20), "heat");
  EXPECT_EQ(slowed_text(0x80), "the hardware's protection");
}

TEST(Conditions, AnUnknownReadingChangesNothing) {
  Conditions conditions;
  conditions.add(GpuState{{}, 40, 0});
  conditions.add(GpuState{});
  EXPECT_EQ(to_string(conditions), "clock unknown MHz, 40 -> 40 C");
}

}  // namespace
}  // namespace flashjit::autotune

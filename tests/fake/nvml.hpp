// What the fake NVML answers and how it is used; one a process.
#pragma once

namespace flashjit::test {

/// A GPU that heats and slows down: each question about clocks and temperature changes them by a step, until
/// they are at the last one.
struct FakeNvml {
  int in_use = 0;  ///< calls of nvmlInit_v2 without their nvmlShutdown
  int celsius = 35, last_celsius = 61;
  int clock_mhz = 1980, last_clock_mhz = 1755;
  unsigned long long reasons = 0x4;  ///< the power limit
  bool starts = true, knows_temperature = true, knows_clock = true, knows_reasons = true;
};

}  // namespace flashjit::test

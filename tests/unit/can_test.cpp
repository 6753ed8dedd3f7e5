// can() beside the planner that calls ask, and its C face.
#include "flashjit/can.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "flashjit/flashjit.h"
#include "plan/plan.hpp"
#include "plan/shipped.hpp"
#include "tests/support/c_abi_support.hpp"
#include "tests/support/covering.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit::test {
namespace {

/// The message of what the planner refuses; empty: it has a plan.
std::string refusal_of(const KernelSpec& spec, const AttentionShape& shape, const DeviceInfo& device,
                       const plan::TuningRecords& records) {
  try {
    plan::make_plan(spec, shape, device, records);
    return "";
  } catch (const Error& error) {
    return error.message();
  }
}

/// Devices on which each family is the first that can, and two that can little.
std::vector<DeviceInfo> various_devices() {
  std::vector<DeviceInfo> devices;
  for (const char* arch : {"sm_75", "sm_80", "sm_90a", "sm_120"}) devices.push_back(DeviceInfo::parse(arch));
  devices.push_back(DeviceInfo::parse("sm_80"));
  devices.back().shared_per_block = 40 * 1024;
  devices.push_back(DeviceInfo::parse("sm_75"));
  devices.back().name = devices.back().arch = "sm_70";
  devices.back().compute_capability = 70;
  return devices;
}

TEST(Can, AgreesWithThePlannerOnSpecsThatCoverPairs) {
  plan::TuningRecords none, shipped;
  for (const plan::TuningRecord& record : plan::shipped_records())
    shipped.add(record, plan::TuningRecords::Origin::shipped);
  int yes = 0, no = 0;
  std::vector<KernelSpec> specs = covering_specs();
  for (const auto& more : {covering_wide_specs(), covering_specs_of_codes(),
                           covering_specs_of_products_of_codes(), covering_plain_specs()})
    specs.insert(specs.end(), more.begin(), more.end());
  for (const char* text : {"append:bf16:d128:pages16", "merge:bf16:d128", "quantize:bf16:d128:k{nvfp4}",
                           "jvp:bf16:d64:causal", "bwd_jvp:fp16:d256", "fwd:fp32:d64:skip_softmax"})
    specs.push_back(parse_spec(text));
  for (const KernelSpec& spec : specs)
    for (const DeviceInfo& device : various_devices())
      for (const AttentionShape& shape :
           {AttentionShape{3, 8, 2, 1, 300}, {2, 4, 4, 4096, 4096}, {1, 3, 2, 64, 64}}) {
        SCOPED_TRACE(fmt::format("{} {} {}", to_string(spec), to_string(shape), device.arch));
        const Support found = can(spec, shape, device);
        ASSERT_EQ(found.reason, refusal_of(spec, shape, device, none));
        ASSERT_EQ(found.ok, found.reason.empty());
        ASSERT_EQ(found.ok, refusal_of(spec, shape, device, shipped).empty());
        ++(found ? yes : no);
      }
  EXPECT_GT(yes, 1000);
  EXPECT_GT(no, 500);
}

TEST(Can, IsAValueForWrongSpecsAndShapesToo) {
  const DeviceInfo a100 = DeviceInfo::parse("sm_80");
  const AttentionShape shape{1, 8, 8, 128, 128};
  KernelSpec wrong{{.head_dim = 63}};
  EXPECT_TRUE(can(KernelSpec{{.head_dim = 64}}, shape, a100));
  expect_in("head_dim is 63", can(wrong, shape, a100).reason);
  expect_in("head_dim is 63", can(wrong, a100).reason);
  wrong.head_dim = 64;
  expect_in("heads_q is 3 and heads_kv is 2", can(wrong, {1, 3, 2, 8, 8}, a100).reason);
  expect_in("are allowed", can(wrong, {1 << 20, 1 << 10, 1 << 10, 4096, 4096}, a100).reason);
}

TEST(Can, AsksAboutThePassThatIsNamed) {
  const DeviceInfo h100 = DeviceInfo::parse("sm_90a");
  const AttentionSpec cache = parse_spec("bf16:d128:cache");
  EXPECT_TRUE(can(cache, h100));
  EXPECT_TRUE(can(cache, {2, 8, 2, 1, 4096}, h100));
  EXPECT_FALSE(can(cache, h100, Pass::backward));
  expect_in("cache", can(cache, {2, 8, 2, 1, 4096}, h100, Pass::backward).reason);
}

std::string message_of_can() { return flashjit_last_error_message(); }

TEST(CanInC, NeedsNoRuntime) {
  const SpecPtr spec = make_spec("bf16:d128:causal"), wide = make_spec("bf16:d576x512");
  const flashjit_shape shape{2, 8, 2, 1, 4096}, uneven{1, 3, 2, 8, 8};
  flashjit_device device{};
  device.struct_size = sizeof device;
  ASSERT_EQ(flashjit_device_of("sm_90a", &device), FLASHJIT_OK);
  EXPECT_STREQ(device.arch, "sm_90a");
  EXPECT_EQ(device.compute_capability, 90);
  EXPECT_EQ(device.multiprocessors, DeviceInfo::parse("sm_90a").multiprocessors);
  for (const auto* one : {&shape, static_cast<const flashjit_shape*>(nullptr)})
    EXPECT_EQ(flashjit_can(FLASHJIT_BACKWARD, spec.get(), one, &device), FLASHJIT_OK) << message_of_can();
  EXPECT_EQ(flashjit_can(FLASHJIT_FORWARD, spec.get(), &uneven, &device), FLASHJIT_UNSUPPORTED);
  expect_in("heads_q is 3 and heads_kv is 2", message_of_can());
  device.shared_per_block = 16 * 1024;
  EXPECT_EQ(flashjit_can(FLASHJIT_FORWARD, wide.get(), nullptr, &device), FLASHJIT_UNSUPPORTED);
  expect_in("bytes of shared memory", message_of_can());
  DeviceInfo info = DeviceInfo::parse("sm_90a");
  info.shared_per_block = 16 * 1024;
  EXPECT_EQ(message_of_can(), can(parse_spec("bf16:d576x512"), info).reason);
}

TEST(CanInC, ItsArgumentsAreChecked) {
  const SpecPtr spec = make_spec("bf16:d128");
  flashjit_device device{};
  EXPECT_EQ(flashjit_device_of("sm_90a", &device), FLASHJIT_INVALID_ARGUMENT);
  expect_in("flashjit_device.struct_size is 0", message_of_can());
  EXPECT_EQ(flashjit_device_of("sm_90a", nullptr), FLASHJIT_INVALID_ARGUMENT);
  expect_in("flashjit_device is null", message_of_can());
  device.struct_size = sizeof device;
  EXPECT_EQ(flashjit_device_of("sm_91", &device), FLASHJIT_INVALID_ARGUMENT);
  expect_in("sm_91", message_of_can());
  EXPECT_EQ(flashjit_device_of(nullptr, &device), FLASHJIT_INVALID_ARGUMENT);
  expect_in("arch is null", message_of_can());
  EXPECT_EQ(flashjit_can(FLASHJIT_FORWARD, spec.get(), nullptr, &device), FLASHJIT_INVALID_ARGUMENT);
  expect_in("device.arch is empty: let flashjit_current_device()", message_of_can());
  for (char& letter : device.arch) letter = 'x';
  EXPECT_EQ(flashjit_can(FLASHJIT_FORWARD, spec.get(), nullptr, &device), FLASHJIT_INVALID_ARGUMENT);
  expect_in("device.arch is longer than 15 bytes", message_of_can());
  ASSERT_EQ(flashjit_device_of("sm_80", &device), FLASHJIT_OK);
  EXPECT_EQ(flashjit_can(7, spec.get(), nullptr, &device), FLASHJIT_INVALID_ARGUMENT);
  expect_in("pass is 7", message_of_can());
  EXPECT_EQ(flashjit_can(FLASHJIT_FORWARD, nullptr, nullptr, &device), FLASHJIT_INVALID_ARGUMENT);
  expect_in("spec is null", message_of_can());
  EXPECT_EQ(flashjit_can(FLASHJIT_FORWARD, spec.get(), nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace flashjit::test

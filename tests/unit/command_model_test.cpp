// `flashjit pack --model`: one line for all kernels of a model, with a compiler that does nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>
#include <set>
#include <string>

#include "flashjit/spec.hpp"
#include "plan/plan.hpp"
#include "plan/shipped.hpp"
#include "tests/support/built.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

using test::CommandResult;

class PackOfAModel : public testing::Test {
 protected:
  CommandResult pack(const std::string& model, const std::string& more = "--arch sm_90a") const {
    return test::run_command(folder_,
                             "pack --json --model '" + model + "' " + more + " --out " + folder_.file("pack"),
                             "FLASHJIT_NVRTC=" + test::built(FLASHJIT_FAKE_NVRTC));
  }
  /// "spec config of part" of each kernel.
  static std::set<std::string> kernels_of(const CommandResult& packed) {
    std::set<std::string> kernels;
    const auto report = packed.json();
    for (const auto& kernel : report["kernels"])
      kernels.insert(kernel["spec"].get<std::string>() + " " + kernel["config"].get<std::string>() + " of " +
                     kernel["part"].get<std::string>());
    EXPECT_EQ(kernels.size(), report["kernels"].size()) << "a kernel is packed twice";
    return kernels;
  }

  static std::string text_of(const plan::KernelPlan& plan) {
    return to_string(plan.spec) + " " + to_string(plan.config) + " of " + to_string(plan.spec.part);
  }

  test::TemporaryDirectory folder_;
};

TEST_F(PackOfAModel, HasEachKernelThatAnEngineAsksFor) {
  const CommandResult packed = pack("32/8 heads, d128, pages of 16, bf16, shared_prefix");
  ASSERT_EQ(packed.code, 0) << packed.err;
  const std::set<std::string> kernels = kernels_of(packed);
  EXPECT_LT(kernels.size(), 25u);
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  std::mt19937 random(1);
  const auto length = [&](double most) {
    return static_cast<std::int64_t>(std::exp(std::uniform_real_distribution(0.0, std::log(most))(random)));
  };
  for (int i = 0; i < 300; ++i) {
    const bool packs = i % 2 == 0;
    AttentionShape shape{length(1024), 32, 8, length(packs ? 8192 : 16), length(1 << 18)};
    shape.seqlen_kv = std::max(shape.seqlen_kv, shape.seqlen_q);
    for (const char* text : {"fwd:bf16:d128:causal:pages16", "append:bf16:d128:pages16", "merge:bf16:d128"}) {
      KernelSpec spec = parse_spec(text);
      spec.varlen = packs && spec.pass != Pass::merge;
      spec.kv.shared_prefix = packs && i % 4 == 0 && spec.pass == Pass::forward;
      const plan::ExecutionPlan plan = plan::make_plan(spec, shape, device, {});
      for (const plan::ExecutionPlan* one : {&plan, plan.decodes.get()}) {
        if (!one) continue;
        EXPECT_TRUE(kernels.contains(text_of(*one))) << to_string(shape) << " " << text_of(*one);
      }
    }
  }
}

TEST_F(PackOfAModel, HasBothPassesForTraining) {
  const CommandResult packed = pack("32/8 heads, d128, training, bf16");
  ASSERT_EQ(packed.code, 0) << packed.err;
  const std::set<std::string> kernels = kernels_of(packed);
  EXPECT_LT(kernels.size(), 25u);
  const DeviceInfo device = DeviceInfo::parse("sm_90a");
  plan::TuningRecords none, shipped;
  for (const plan::TuningRecord& record : plan::shipped_records())
    shipped.add(record, plan::TuningRecords::Origin::shipped);
  for (const char* pass : {"fwd", "bwd"})
    for (const char* packing : {"", ":varlen"})
      for (const std::int64_t length : {100, 777, 4096, 8192, 33000})
        for (const std::int64_t batch : {1, 3, 16}) {
          const AttentionShape shape{batch, 32, 8, length, length};
          const std::string text = std::string(pass) + ":bf16:d128:causal" + packing;
          for (const plan::TuningRecords* records : {&none, &shipped}) {
            const plan::ExecutionPlan plan = plan::make_plan(parse_spec(text), shape, device, *records);
            EXPECT_TRUE(kernels.contains(text_of(plan)))
                << to_string(shape) << " " << to_string(plan.spec) << " " << to_string(plan.config);
          }
        }
}

TEST_F(PackOfAModel, PassesOnWhatASpecHas) {
  const CommandResult packed = pack(
      "8 heads, d64x32, slots, fp16, sinks, mask{q - kv < max(100, 2) && kv <= q}", "--arch sm_80,sm_90a");
  ASSERT_EQ(packed.code, 0) << packed.err;
  std::set<std::string> specs;
  const auto report = packed.json();
  for (const auto& kernel : report["kernels"]) specs.insert(kernel["spec"]);
  EXPECT_EQ(specs, (std::set<std::string>{
                       "append:fp16:d64x32:cache", "append:fp16:d64x32:varlen:cache", "merge:fp16:d32",
                       "fwd:fp16:d64x32:mask{q - kv < max(100, 2) && kv <= q}:sinks:cache",
                       "fwd:fp16:d64x32:mask{q - kv < max(100, 2) && kv <= q}:varlen:sinks:cache"}));
}

TEST_F(PackOfAModel, HasWhatACacheOfEightBitsNeeds) {
  const CommandResult packed =
      pack("32/8 heads, d128, pages of 16, bf16, kv e4m3, key_scales", "--arch sm_90a");
  ASSERT_EQ(packed.code, 0) << packed.err;
  std::set<std::string> specs;
  const auto report = packed.json();
  for (const auto& kernel : report["kernels"]) specs.insert(kernel["spec"]);
  EXPECT_EQ(specs, (std::set<std::string>{"append:bf16:d128:kve4m3:pages16:key_scales",
                                          "append:bf16:d128:kve4m3:varlen:pages16:key_scales",
                                          "merge:bf16:d128", "fwd:bf16:d128:kve4m3:causal:pages16:key_scales",
                                          "fwd:bf16:d128:kve4m3:causal:varlen:pages16:key_scales",
                                          "fwd:bf16:d128:kve4m3:pages16:key_scales"}));
}

TEST_F(PackOfAModel, NeedsNoRecords) {
  ASSERT_EQ(pack("8 heads, d64, slots, bf16").code, 0);
  ASSERT_EQ(pack("32/8 heads, d128, training, bf16").code, 0);  // of which the library ships records
  EXPECT_FALSE(std::filesystem::exists(folder_.file("pack/v1/tuning")));
  EXPECT_EQ(test::run_command(folder_, "cache verify --dir " + folder_.file("pack")).code, 0);
}

TEST_F(PackOfAModel, SaysWhatIsMissing) {
  const auto says = [&](const char* model, const char* what) {
    const CommandResult refused = pack(model);
    EXPECT_EQ(refused.code, 2) << model;
    EXPECT_NE(refused.err.find(what), std::string::npos) << refused.err;
  };
  says("d128, pages of 16, bf16", "has no heads");
  says("32/8 heads, pages of 16, bf16", "has no head dimension");
  says("32/8 heads, d128, bf16", "has no cache");
  says("32/8 heads, d128, training, bf16, shared_prefix", "without a cache");
  says("32/8 heads, d128, training, slots, bf16", "names its cache twice");
  says("32/8 heads, d128, pages of 16", "has no type");
  says("32/8 heads, d128, pages of 16, bf16, fp16", "names its type twice");
  says("32/8 heads, d128, pages of 16, slots, bf16", "names its cache twice");
  says("32/8 heads, d128, d64, pages of 16, bf16", "names its head dimension twice");
  says("32/8 heads, 8 heads, d128, pages of 16, bf16", "names its heads twice");
  says("x/8 heads, d128, pages of 16, bf16", "the query heads");
  says("32/5 heads, d128, pages of 16, bf16", "multiple");
  says("32/8 heads, d128, pages of 0, bf16", "pages0");
  says("32/8 heads, d128, pages of 16, bf16, sink", "sink");
  says("32/8 heads, d128, pages of 16, bf16, kv e3m4", "e3m4");
}

}  // namespace
}  // namespace flashjit

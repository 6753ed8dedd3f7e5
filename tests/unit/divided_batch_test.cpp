// Prefills beside decodes: which calls are divided between two kernels.
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "plan/divided_batch.hpp"
#include "plan/plan.hpp"

namespace flashjit::plan {
namespace {

const char* const kPrefillsAndDecodes = "b64:hq32:hkv8:sq1024:skv4096";

ExecutionPlan plan_of(const std::string& spec, const char* shape = kPrefillsAndDecodes,
                      const char* arch = "sm_90a", const std::optional<TileConfig>& config = {}) {
  return make_plan(parse_spec(spec), parse_shape(shape), DeviceInfo::parse(arch), {}, config);
}

TEST(DividedBatch, EachPartHasItsKernel) {
  for (const char* spec : {"fwd:bf16:d128:causal:varlen:cache", "fwd:fp16:d64:varlen:pages16:sinks"}) {
    const ExecutionPlan prefills = plan_of(spec);
    ASSERT_TRUE(prefills.decodes) << spec;
    EXPECT_EQ(prefills.spec.part, BatchPart::prefills);
    EXPECT_FALSE(prefills.schedule.stream_k);
    EXPECT_EQ(prefills.decodes->spec.part, BatchPart::decodes);
    EXPECT_TRUE(prefills.decodes->schedule.stream_k);
    EXPECT_EQ(prefills.decodes->shape.seqlen_q, kMostQueriesOfDecode);
    EXPECT_GE(prefills.workspace.bytes, prefills.decodes->workspace.bytes);
    EXPECT_EQ(prefills.workspace.list_bytes(), 0u);
    EXPECT_NE(name_of(prefills), name_of(plan_of(spec, "b4:hq32:hkv8:sq1024:skv4096")));
  }
}

TEST(DividedBatch, SmallPagesAreCopiedForThePrefills) {
  const ExecutionPlan plan = plan_of("fwd:bf16:d128:causal:varlen:pages1");
  ASSERT_TRUE(plan.decodes);
  EXPECT_TRUE(plan.config.decode_cache);
  EXPECT_FALSE(plan.decodes->config.decode_cache);
}

TEST(DividedBatch, ATunedConfigurationIsThePrefills) {
  TuningRecord record;
  record.spec = parse_spec("fwd:bf16:d128:causal:varlen:cache");
  record.shape = parse_shape(kPrefillsAndDecodes);
  record.arch = "sm_90a";
  record.best = parse_config("sm90:br192:bc80:w12:s2");
  TuningRecords records;
  records.add(record, TuningRecords::Origin::shipped);
  const ExecutionPlan plan = make_plan(record.spec, record.shape, DeviceInfo::parse("sm_90a"), records);
  EXPECT_EQ(plan.config, record.best);
  EXPECT_TRUE(plan.decodes);
}

TEST(DividedBatch, OtherCallsAreWhole) {
  const std::string spec = "fwd:bf16:d128:causal:varlen:cache";
  const TileConfig given = parse_config("sm90:br128:bc128:w8:s2");
  EXPECT_FALSE(plan_of(spec, "b4:hq32:hkv8:sq1024:skv4096").decodes) << "few sequences";
  EXPECT_FALSE(plan_of(spec, "b64:hq32:hkv8:sq16:skv4096").decodes) << "few queries";
  EXPECT_FALSE(plan_of(spec, kPrefillsAndDecodes, "sm_80").decodes) << "no stream-K";
  EXPECT_FALSE(plan_of(spec, kPrefillsAndDecodes, "sm_90a", given).decodes) << "given";
  for (const char* other :
       {"fwd:bf16:d128:causal:varlen", "fwd:bf16:d128:causal:cache",
        "fwd:bf16:d128:causal:varlen:cache:invariant", "fwd:bf16:d128:causal:varlen:cache:skip_softmax"})
    EXPECT_FALSE(plan_of(other).decodes) << other;
}

}  // namespace
}  // namespace flashjit::plan

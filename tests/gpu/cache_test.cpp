// Caches: slots and pages of every size, layout and family against the reference, which has the keys in
// order.
#include "plan/plan.hpp"
#include "tests/support/cache_run.hpp"

namespace flashjit::test {
namespace {

/// Pages of every size by turns with what combines with them.
std::vector<CacheCase> cases() {
  constexpr std::array kRests = {":causal:varlen",
                                 "",
                                 ":causal",
                                 ":varlen:sinks",
                                 ":mask{q - kv < 40}:varlen",
                                 ":causal:score{20.0 * tanh(score / 20.0)}"};
  constexpr std::array kDims = {"bf16:d128", "fp16:d64", "bf16:d64x32", "bf16:d256", "fp16:d96"};
  const std::vector<AttentionShape> shapes = {
      {4, 4, 2, 70, 200}, {3, 8, 2, 1, 300}, {5, 4, 1, 16, 517}, {3, 2, 2, 130, 129}};
  std::vector<CacheCase> all;
  unsigned seed = 0;
  // The next case, in one of so many layouts by turns.
  const auto add = [&](Family family, const std::string& spec, const AttentionShape& shape,
                       unsigned layouts) {
    CacheCase test{.spec = spec_for(family, spec),
                   .shape = shape,
                   .family = family,
                   .layout = static_cast<PoolLayout>(seed % layouts),
                   .slot_table = seed % 2 == 1,
                   .seed = seed};
    if (test.spec.v_dim() != test.spec.head_dim && test.layout == PoolLayout::interleaved)
      test.layout = PoolLayout::hnd;
    all.push_back(test);
    ++seed;
  };
  const auto add_of_many = [&](Family family, const char* codes, const char* pages, unsigned layouts) {
    add(family,
        fmt::format("fwd:{}{}{}{}", kDims[seed % kDims.size()], codes,
                    kRests[(seed + seed / 6) % kRests.size()], pages),
        shapes[(seed + seed / 4) % shapes.size()], layouts);
  };
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const char* pages :
         {":cache", ":pages1", ":pages3", ":pages8", ":pages16", ":pages64", ":pages128", ":pages256"})
      for (int i = 0; i < 3; ++i) add_of_many(family, "", pages, 3);
  // Codes of 8 bits, by the families that take them.
  constexpr std::array kCodes = {
      ":kve4m3",         ":kve4m3:key_scales",        ":kve5m2", ":kvint8", ":kvint8:key_scales",
      ":kve4m3:q_codes", ":kve5m2:q_codes:key_scales"};
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const char* pages : {":cache", ":pages1", ":pages16", ":pages64", ":pages256"})
      for (const char* codes : kCodes) add_of_many(family, codes, pages, 2);
  // Latents, whose first columns are V.
  constexpr std::array<AttentionShape, 4> kOfLatents = {
      {{4, 16, 1, 1, 700}, {3, 128, 1, 3, 500}, {4, 8, 1, 8, 333}, {3, 24, 1, 70, 200}}};
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const char* pages : {":cache", ":pages16", ":pages64"})
      for (const char* dims : {"bf16:d576x512:causal", "fp16:d320x256:causal:varlen"})
        add(family, fmt::format("fwd:{}{}:shared_kv", dims, pages), kOfLatents[seed % kOfLatents.size()], 2);
  // And Q in two tensors.
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const char* pages : {":cache", ":pages1", ":pages64"})
      for (const char* dims : {"bf16:d576x512:causal", "fp16:d320x256:causal:varlen"})
        add(family, fmt::format("fwd:{}{}:shared_kv:q_rope", dims, pages),
            kOfLatents[seed % kOfLatents.size()], 2);
  // And lists of keys in them.
  for (const Family family : {Family::simt, Family::sm90})
    for (const char* pages : {":cache", ":pages1", ":pages3", ":pages64"})
      for (const char* dims : {"bf16:d576x512:causal:shared_kv", "bf16:d576x512:causal:shared_kv:q_rope",
                               "fp16:d128:varlen:sinks"})
        add(family, fmt::format("fwd:{}{}:indices", dims, pages), kOfLatents[seed % kOfLatents.size()], 2);
  // Prefixes that sequences share.
  constexpr std::array<AttentionShape, 4> kOfPrefixes = {
      {{16, 8, 2, 1, 1500}, {5, 8, 2, 3, 2000}, {3, 4, 4, 130, 900}, {9, 16, 1, 1, 700}}};
  for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
    for (const char* pages : {":pages1", ":pages16", ":pages64"})
      for (const char* dims : {"bf16:d128:causal:varlen", "fp16:d64:varlen:sinks",
                               "bf16:d96:kve4m3:causal:varlen", "bf16:d576x512:causal:varlen:shared_kv"})
        add(family, fmt::format("fwd:{}{}:shared_prefix", dims, pages),
            kOfPrefixes[seed % kOfPrefixes.size()], 2);
  return all;
}

class CacheTest : public GpuTestWith<CacheCase> {};

TEST_P(CacheTest, IsReadAsTheKeysInOrder) {
  TemporaryRuntime runtime;
  check_cache(runtime.get(), GetParam());
}

class PackedHeads : public GpuTest {};

/// A batch with a long prefill has tiles of several heads' rows whose keys are not split.
TEST_F(PackedHeads, AreStoredByHeadWhereKeysAreNotSplit) {
  if (gpu().info.compute_capability != 90) GTEST_SKIP() << "Hopper's planner packs heads this way";
  TemporaryRuntime runtime;
  for (const char* spec : {"bf16:d128:causal:varlen:pages16", "fp16:d64:varlen:cache:sinks"}) {
    const CacheCase test{
        .spec = parse_spec(spec), .shape = {6, 8, 2, 600, 700}, .family = Family::sm90, .seed = 7};
    TileConfig config = plan::traits(test.family).heuristic(test.spec, test.shape, gpu().info);
    EXPECT_TRUE(config.pack_gqa && !config.split) << to_string(config);
    CacheRun(test).check(runtime.get(), config);
  }
}

class DividedBatch : public GpuTest {};

/// Prefills and decodes of one call have a kernel each, which leaves the other's sequences alone.
TEST_F(DividedBatch, ComputesEachSequenceOnce) {
  if (gpu().info.compute_capability != 90) GTEST_SKIP() << "Hopper's planner divides batches";
  TemporaryRuntime runtime;
  unsigned seed = 0;
  for (const char* spec :
       {"bf16:d128:causal:varlen:pages16", "fp16:d64:varlen:cache:sinks", "bf16:d256:causal:varlen:pages3",
        "bf16:d96:kve4m3:causal:varlen:cache", "fp16:d128:mask{q - kv < 40}:varlen:cache"})
    for (const AttentionShape shape :
         {AttentionShape{19, 8, 2, 600, 700}, AttentionShape{9, 3, 3, 1100, 400}}) {
      const CacheCase test{
          .spec = parse_spec(spec), .shape = shape, .family = Family::sm90, .seed = ++seed, .decodes = true};
      SCOPED_TRACE(name_of(test));
      const plan::ExecutionPlan plan = plan::make_plan(test.spec, shape, gpu().info, {});
      EXPECT_EQ(plan.decodes == nullptr, plan.config.split) << to_string(plan.config);
      CacheRun(test).check(runtime.get());
    }
}

class WrongCache : public GpuTest {};

/// What the host cannot check: pages that do not exist, and lengths.
TEST_F(WrongCache, SpoilsItsSequencesAlone) {
  TemporaryRuntime runtime;
  for (const auto& [page, length] : {std::pair{1 << 30, 5000}, std::pair{-3, -5}})
    for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
      for (const char* spec : {"bf16:d64:causal:pages16", "fp16:d64:pages3"}) {
        SCOPED_TRACE(std::string(spec) + " " + std::string(to_string(family)));
        const CacheCase test{.spec = spec_for(family, spec), .shape = {3, 4, 2, 5, 100}, .family = family};
        if (!plan::traits(family).supports(test.spec, gpu().info)) continue;
        runtime.get().prepare(test.spec, test.shape,
                              plan::traits(family).heuristic(test.spec, test.shape, gpu().info));
        CacheRun(test).check_wrong_entries(runtime.get(), page, length);
      }
}

INSTANTIATE_TEST_SUITE_P(All, CacheTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace flashjit::test

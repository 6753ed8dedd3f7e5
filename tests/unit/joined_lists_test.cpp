// Lists of keys that are joined for the queries of a tile: where that is chosen, planned and refused.
#include "plan/joined_lists.hpp"

#include <gtest/gtest.h>

#include "plan/plan.hpp"
#include "plan/tiles.hpp"

namespace flashjit {
namespace {

constexpr const char* kLatents = "fwd:bf16:d576x512:shared_kv:indices";
constexpr const char* kJoining = "sm90:br64:bc64:w8:s2:d_split2:split:pack_gqa:join_lists";

plan::ExecutionPlan planned_lists(const std::string& spec, const std::string& shape,
                                  const std::optional<TileConfig>& config = {}) {
  return plan::make_plan(parse_spec(spec), parse_shape(shape), DeviceInfo::parse("sm_90a"), {}, config);
}
bool joins_lists(const std::string& spec, const std::string& shape) {
  return planned_lists(spec, shape).config.join_lists;
}
std::string refusal_of_joining(const std::string& spec, const std::string& config,
                               const char* arch = "sm_90a") {
  const TileConfig tile = parse_config(config);
  return plan::traits(tile.family).admits(parse_spec(spec), tile, DeviceInfo::parse(arch)).reason;
}

TEST(JoinedListsPlan, IsChosenForManyQueriesOfFewHeads) {
  for (const char* heads : {"8", "16", "32"})
    EXPECT_TRUE(joins_lists(kLatents, fmt::format("b1:hq{}:hkv1:sq4096:skv8192", heads))) << heads;
  EXPECT_FALSE(joins_lists(kLatents, "b1:hq64:hkv1:sq4096:skv8192"));
  EXPECT_FALSE(joins_lists(kLatents, "b1:hq128:hkv1:sq4096:skv8192"));
  EXPECT_FALSE(joins_lists(kLatents, "b128:hq16:hkv1:sq1:skv32768"));
  for (const char* spec : {"fwd:bf16:d576x512:shared_kv:varlen:indices",
                           "fwd:bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64:indices"})
    EXPECT_TRUE(joins_lists(spec, "b2:hq16:hkv1:sq4096:skv8192")) << spec;
  EXPECT_FALSE(joins_lists("fwd:bf16:d128:indices", "b1:hq16:hkv1:sq4096:skv8192")) << "not measured";
  // More than 1 GiB of lists.
  EXPECT_FALSE(joins_lists(kLatents, "b32:hq16:hkv1:sq4096:skv65536"));
}

TEST(JoinedListsPlan, IsAnEntryBeforeThoseOfListsOfTheirOwn) {
  const char* shape = "b2:hq16:hkv1:sq4095:skv8191";
  TileConfig alone = parse_config(kJoining);
  alone.join_lists = false;
  const plan::ExecutionPlan joined = planned_lists(kLatents, shape, parse_config(kJoining)),
                            plain = planned_lists(kLatents, shape, alone);
  ASSERT_EQ(joined.entries.size(), plain.entries.size() + 1);
  EXPECT_EQ(joined.entries[0].name, "join_lists");
  EXPECT_EQ(joined.steps[0], plan::Step::join_lists);
  EXPECT_EQ(joined.launches[0].blocks, 2 * 1024);
  EXPECT_FALSE(joined.launches[0].early) << "its lists are read by the call before";
  // Of each tile of 4 queries: its length, and 2048 keys for each query, with a byte.
  EXPECT_EQ(joined.workspace.bytes, plain.workspace.bytes + std::size_t{2} * 1024 * (4 + 8192 * (4 + 1)));
}

TEST(JoinedListsPlan, ATileHasUpTo8Queries) {
  const TileConfig joining = parse_config(kJoining);
  for (const auto& [heads, queries] : {std::pair{1, 8}, {4, 8}, {8, 8}, {12, 5}, {16, 4}, {32, 2}, {64, 1}}) {
    const KernelSpec spec = parse_spec(kLatents);
    const AttentionShape shape{1, heads, 1, 100, 1000};
    EXPECT_EQ(plan::packed_heads(shape, plan::most_queries(spec, joining)).queries, queries) << heads;
  }
}

TEST(JoinedListsPlan, IsRefusedWhereThereIsNothingToJoin) {
  EXPECT_EQ(refusal_of_joining(kLatents, kJoining), "");
  const std::string narrow = "sm90:br64:bc64:w4:s2:split:pack_gqa:join_lists";
  EXPECT_NE(refusal_of_joining("fwd:bf16:d64:cache", narrow).find("with indices"), std::string::npos);
  EXPECT_EQ(refusal_of_joining("fwd:bf16:d64:varlen:indices", narrow), "");
  EXPECT_NE(refusal_of_joining("fwd:bf16:d64:indices", "sm80:br64:bc64:w4:join_lists").find("family sm90"),
            std::string::npos);
  EXPECT_NE(refusal_of_joining("fwd:bf16:d64:indices", "simt:br32:bc32:w4:join_lists").find("does not have"),
            std::string::npos);
}

}  // namespace
}  // namespace flashjit

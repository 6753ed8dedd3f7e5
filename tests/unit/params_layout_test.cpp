// Which members of Params a kernel has, and how the host packs them.
#include "plan/params_layout.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plan/plan.hpp"
#include "support/file.hpp"
#include "templates/common/backward_jvp_params.cuh"
#include "tests/support/built.hpp"

namespace flashjit::plan {
namespace {

ParamsLayout layout_of(const std::string& spec, const std::string& config = "") {
  const KernelSpec parsed = parse_spec(spec).normalized();
  const std::optional<TileConfig> given = config.empty() ? std::nullopt : std::optional(parse_config(config));
  return params_layout(make_plan(parsed, {4, 32, 8, 4096, 4096}, DeviceInfo::parse("sm_90a"), {}, given));
}

/// "DROPOUT VARLEN": the groups that a kernel has besides what all have.
std::string groups_of(const ParamsLayout& layout) {
  constexpr std::string_view kWord = "FLASHJIT_IF_";
  std::vector<std::string> groups;
  for (const auto& [name, value] : layout.macros)
    if (name.starts_with(kWord) && value.empty()) groups.push_back(name.substr(kWord.size()));
  std::ranges::sort(groups);
  std::string text;
  for (const std::string& group : groups) text += (text.empty() ? "" : " ") + group;
  return text;
}

TEST(ParamsLayout, ADenseForwardPassHasUnder600Bytes) {
  const ParamsLayout dense = layout_of("fwd:bf16:d128");
  EXPECT_LT(dense.bytes, 600u);
  const std::string page = read_file(test::sources() + "/templates/README.md");
  EXPECT_NE(page.find(fmt::format("a dense forward pass {} bytes.", dense.bytes)), page.npos) << dense.bytes;
  EXPECT_EQ(dense.parts.size(), 1u);
  EXPECT_EQ(groups_of(dense), "");
  EXPECT_EQ(layout_of("bwd:bf16:d128").bytes, 424u);
  EXPECT_GT(sizeof(Params), 2400u) << "the host has all";
}

TEST(ParamsLayout, AKernelHasTheGroupsOfItsSpecAndItsConfiguration) {
  const std::vector<std::pair<const char*, const char*>> specs = {
      {"bwd:bf16:d64", "GRADIENTS"},
      {"fwd:bf16:d64:map64x64", "BLOCK_MAP TILE_LISTS"},
      {"fwd:bf16:d64:varlen", "VARLEN"},
      {"fwd:bf16:d64:kvlen", "KV_LENGTHS"},
      {"fwd:bf16:d64:dropout", "DROPOUT"},
      {"fwd:bf16:d64:running_state", "RUNNING_STATE"},
      {"fwd:bf16:d96x64:shared_kv:q_rope", "Q_ROPE"},
      {"fwd:bf16:d64:skip_softmax", "SKIP_SOFTMAX"},
      {"fwd:bf16:d64:score{bias: bf16 4d; n: int; score + bias[b,h,q,kv] * to_float(n)}", "CAPTURES SCALARS"},
  };
  for (const auto& [spec, groups] : specs) EXPECT_EQ(groups_of(layout_of(spec)), groups) << spec;
  EXPECT_EQ(groups_of(layout_of("fwd:bf16:d64", "sm80:br64:bc64:w4:s2:split")), "SPLIT");
  EXPECT_EQ(groups_of(layout_of("fwd:bf16:d64:indices", "simt:br16:bc32:w4")), "INDICES");
  EXPECT_EQ(groups_of(layout_of("fwd:bf16:d64:indices", "sm90:br64:bc64:w4:s2:split:pack_gqa:join_lists")),
            "INDICES JOINED_LISTS PACK_GQA SPLIT");
}

TEST(ParamsLayout, ArraysAreAsLongAsProgramsDeclare) {
  const std::size_t none = layout_of("fwd:bf16:d64").bytes;
  EXPECT_EQ(layout_of("fwd:bf16:d64:score{a: fp32 1d; score + a[h]}").bytes, none + sizeof(CaptureParam));
  EXPECT_EQ(layout_of("fwd:bf16:d64:score{a: fp32 1d; c: fp32 1d; score + a[h] + c[h]}").bytes,
            none + 2 * sizeof(CaptureParam));
  EXPECT_EQ(layout_of("fwd:bf16:d64:score{x: float; score * x}").bytes, none + 8) << "in whole 8 bytes";
  EXPECT_EQ(layout_of("fwd:bf16:d64:score{x: float; y: float; z: float; score * x + y * z}").bytes,
            none + 16);
}

TEST(ParamsLayout, PackedAreThePartsAndThenWhatFollowsParams) {
  const ParamsLayout layout =
      layout_of("bwd_jvp:bf16:d64:varlen:score{a: fp32 1d; x: float; score + a[h] * x}");
  BackwardJvpParams params{};
  params.q.stride_s = 1, params.dout.stride_s = 2, params.lpt_heads = 3;
  params.rows_kv = 4, params.indices.count = 5;
  params.captures[0].size[5] = 6, params.captures[1].size[5] = 7, params.scalars[0] = 8;
  params.q_tangent.stride_s = 9, params.grads[kMaxCaptures - 1] = reinterpret_cast<float*>(10);
  const PackedParams packed(layout, params);
  const auto* bytes = static_cast<const std::byte*>(packed.data());
  BackwardJvpParams seen{};
  for (const ParamsLayout::Part& part : layout.parts) {
    std::memcpy(reinterpret_cast<std::byte*>(&seen) + part.begin, bytes, part.bytes);
    bytes += part.bytes;
  }
  EXPECT_EQ(bytes, static_cast<const std::byte*>(packed.data()) + layout.bytes);
  std::memcpy(reinterpret_cast<std::byte*>(&seen) + sizeof(Params), bytes, sizeof seen - sizeof(Params));
  EXPECT_EQ(seen.q.stride_s, 1);
  EXPECT_EQ(seen.dout.stride_s, 2);
  EXPECT_EQ(seen.lpt_heads, 3);
  EXPECT_EQ(seen.rows_kv, 4);
  EXPECT_EQ(seen.indices.count, 0) << "the kernel has none";
  EXPECT_EQ(seen.captures[0].size[5], 6);
  EXPECT_EQ(seen.captures[1].size[5], 0);
  EXPECT_EQ(seen.scalars[0], 8u);
  EXPECT_EQ(seen.q_tangent.stride_s, 9);
  EXPECT_EQ(seen.grads[kMaxCaptures - 1], reinterpret_cast<float*>(10));
}

}  // namespace
}  // namespace flashjit::plan

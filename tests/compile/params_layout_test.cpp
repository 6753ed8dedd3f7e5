// A kernel's Params are what the host packs, and no kernel reads what it lacks. Needs NVRTC and no GPU.
#include "plan/params_layout.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "compile/compiler.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "templates/auxiliary/decode_cache_params.cuh"
#include "templates/common/backward_jvp_params.cuh"
#include "tests/support/nvrtc.hpp"

namespace flashjit {
namespace {

using plan::ParamsLayout;
using test::compiler;

#define FLASHJIT_PLACE(member) std::pair<std::string_view, std::size_t>(#member, offsetof(Params, member))
/// The first and the last member of each group, and what all have.
constexpr std::pair<std::string_view, std::size_t> kPlaces[] = {
    FLASHJIT_PLACE(q),
    FLASHJIT_PLACE(batch),
    FLASHJIT_PLACE(dout),
    FLASHJIT_PLACE(lpt_heads),
    FLASHJIT_PLACE(lists),
    FLASHJIT_PLACE(block_map),
    FLASHJIT_PLACE(map_rows),
    FLASHJIT_PLACE(cu_seqlens_q),
    FLASHJIT_PLACE(rows_kv),
    FLASHJIT_PLACE(zero_unused_rows),
    FLASHJIT_PLACE(kv_lengths),
    FLASHJIT_PLACE(page_table),
    FLASHJIT_PLACE(o_splits),
    FLASHJIT_PLACE(num_splits),
    FLASHJIT_PLACE(head_groups),
    FLASHJIT_PLACE(packed),
    FLASHJIT_PLACE(rng_state),
    FLASHJIT_PLACE(dropout_place),
    FLASHJIT_PLACE(drop_share),
    FLASHJIT_PLACE(offset_hi),
    FLASHJIT_PLACE(k_scale),
    FLASHJIT_PLACE(v_block_scale),
    FLASHJIT_PLACE(indices),
    FLASHJIT_PLACE(q_rope),
    FLASHJIT_PLACE(out_mod),
    FLASHJIT_PLACE(out_scale),
    FLASHJIT_PLACE(out_block_scale),
    FLASHJIT_PLACE(given),
    FLASHJIT_PLACE(o_state),
    FLASHJIT_PLACE(lse_state),
    FLASHJIT_PLACE(skip_softmax_counts),
    FLASHJIT_PLACE(skip_softmax_log2),
    FLASHJIT_PLACE(captures),
    FLASHJIT_PLACE(scalars),
};
#undef FLASHJIT_PLACE

/// Where a kernel has what the host has at `place`; nothing: it lacks it.
std::optional<std::size_t> packed(const ParamsLayout& layout, std::size_t place) {
  std::size_t before = 0;
  for (const ParamsLayout::Part& part : layout.parts) {
    if (place >= part.begin && place < part.begin + part.bytes) return before + place - part.begin;
    before += part.bytes;
  }
  return {};
}

ParamsLayout layout_of(const std::string& spec, const std::string& config) {
  const std::optional<TileConfig> given = config.empty() ? std::nullopt : std::optional(parse_config(config));
  return plan::params_layout(plan::make_plan(parse_spec(spec).normalized(),
                                             parse_shape("b4:hq32:hkv8:sq512:skv4096"),
                                             DeviceInfo::parse("sm_90a"), {}, given));
}

KernelSource source_with(const ParamsLayout& layout, const std::string& text) {
  KernelSource source;
  source.spec = parse_spec("fwd:bf16:d64");
  source.arch = "sm_80";
  for (const auto& [name, value] : layout.macros) source.text += fmt::format("#define {} {}\n", name, value);
  source.text +=
      "#include \"flashjit/auxiliary/decode_cache_params.cuh\"\n"
      "#include \"flashjit/common/backward_jvp_params.cuh\"\n" +
      text;
  for (const auto& [name, header] : render::TemplateSet::embedded().all())
    source.headers.push_back({name, header});
  source.entries = {{.name = "forward", .header = "", .function = "", .threads = 32}};
  return source;
}

constexpr std::string_view kOffsetOf = "__INTADDR__";  // what NVRTC's front end has for offsetof

class ParamsOfKernels : public testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(ParamsOfKernels, AreWhatTheHostPacks) {
  const ParamsLayout layout = layout_of(GetParam().first, GetParam().second);
  std::string text;
  for (const auto& [member, place] : kPlaces) {
    if (const auto at = packed(layout, place))
      text += fmt::format("static_assert({}(&((flashjit::Params*)0)->{}) == {});\n", kOffsetOf, member, *at);
  }
  const auto add_longer = [&](const char* name, std::size_t bytes) {
    text += fmt::format("static_assert(sizeof(flashjit::{}) == {});\n", name,
                        layout.bytes + bytes - sizeof(Params));
  };
  add_longer("JvpParams", sizeof(JvpParams));
  add_longer("BackwardJvpParams", sizeof(BackwardJvpParams));
  add_longer("DecodeCacheParams", sizeof(DecodeCacheParams));
  EXPECT_NO_THROW(compiler().check(source_with(layout, text)));
}

INSTANTIATE_TEST_SUITE_P(
    EachGroup, ParamsOfKernels,
    testing::Values(
        std::pair("fwd:bf16:d128", ""), std::pair("bwd:bf16:d128", ""),
        std::pair("fwd:bf16:d64:map64x64", ""), std::pair("fwd:bf16:d64:varlen", ""),
        std::pair("fwd:bf16:d64:kvlen", ""), std::pair("fwd:bf16:d64:cache", ""),
        std::pair("fwd:bf16:d64:varlen:pages16:shared_prefix", ""),
        std::pair("fwd:bf16:d64", "sm80:br64:bc64:w4:s2:split"),
        std::pair("fwd:bf16:d64", "sm90:br128:bc128:w8:s2:split:pack_gqa"),
        std::pair("fwd:bf16:d64:dropout", ""), std::pair("fwd:bf16:d64:dropout:dropout_place", ""),
        std::pair("fwd:bf16:d64:kve4m3:cache", ""), std::pair("fwd:bf16:d64:indices", ""),
        std::pair("fwd:bf16:d64:out_mod{out * 2.0}", ""), std::pair("bwd:bf16:d64:q_mod{element * 2.0}", ""),
        std::pair("fwd:bf16:d64:running_state", ""), std::pair("fwd:bf16:d64:skip_softmax", ""),
        std::pair("fwd:bf16:d64:skip_softmax:score{x: float; score * x}", ""),
        std::pair("fwd:bf16:d64:score{a: fp32 1d; x: float; score * x + a[h]}", ""),
        std::pair("jvp:bf16:d64:score{a: fp32 1d; c: fp32 1d; score * c[h] + a[h]}:dropout", ""),
        std::pair("bwd_jvp:bf16:d64:score{x: float; y: float; z: float; score * x + y * z}:varlen", ""),
        std::pair("bwd:bf16:d64:score{a: fp32 1d grad; score + a[h]}:varlen:dropout:sinks:map64x64", "")));

TEST(ParamsOfKernel, PackedHeadsThatAreNotSplitNeedNoMembersOfSplits) {
  const KernelSpec spec = parse_spec("fwd:bf16:d128:causal:varlen:pages16").normalized();
  EXPECT_NO_THROW(
      compiler().compile(render::render(spec, parse_config("sm90:br128:bc128:w8:s2:pack_gqa"),
                                        DeviceInfo::parse("sm_90a"), render::TemplateSet::embedded(), {})));
}

TEST(ParamsOfKernel, AMemberThatAKernelLacksIsNotRead) {
  const std::string kernel = R"(
    template <bool kIndices>
    __device__ void run(const flashjit::Params& p) {
      if (kIndices) p.row_max[0] = p.indices.count;
      p.row_max[1] = p.batch;
    }
    extern "C" __global__ void flashjit_forward(const __grid_constant__ flashjit::Params p) { run<READS>(p); })";
  const auto compile = [&](const char* spec, const char* reads) {
    compiler().compile(source_with(layout_of(spec, ""), fmt::format("#define READS {}\n", reads) + kernel));
  };
  EXPECT_NO_THROW(compile("fwd:bf16:d64:indices", "true"));
  EXPECT_NO_THROW(compile("fwd:bf16:d64", "false"));
  try {
    compile("fwd:bf16:d64", "true");
    ADD_FAILURE() << "zeros in silence";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    EXPECT_NE(error.message().find("7indices"), std::string::npos) << error.message();
  }
}

}  // namespace
}  // namespace flashjit

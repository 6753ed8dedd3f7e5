// append() and merge() without a GPU: what a call may be given, and what is planned of it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "call/append_arguments.hpp"
#include "flashjit/reference.hpp"
#include "plan/plan.hpp"
#include "support/dtypes.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit::test {
namespace {

KernelSpec paged_spec() { return parse_spec("append:bf16:d64:varlen:pages16"); }

/// 50 new rows of three sequences, of up to 5 pages of 16 rows, of which a pool has 40.
AppendArgs append_args() {
  return {.k = ConstTensorView::bshd(address(0x10000), 1, 50, 2, 64),
          .v = ConstTensorView::bshd(address(0x20000), 1, 50, 2, 64),
          .k_cache = TensorView::bshd(address(0x100000), 40, 16, 2, 64),
          .v_cache = TensorView::bshd(address(0x200000), 40, 16, 2, 64),
          .kv_lengths = address<std::int32_t>(0x50000),
          .page_table = {address<std::int32_t>(0x60000), 3, 5},
          .q = ConstTensorView::bshd(address(0x300000), 1, 50, 4, 64),
          .q_out = TensorView::bshd(address(0x300000), 1, 50, 4, 64),
          .rope = {.theta = 10000.0f},
          .cu_seqlens_q = address<std::int32_t>(0x70000),
          .batch_size = 3};
}

template <class Change>
std::string refusal(Change&& change) {
  KernelSpec spec = paged_spec();
  AppendArgs args = append_args();
  change(spec, args);
  return refusal_of([&] { check_arguments(spec, args); });
}

TEST(Append, ShapeIsOfRowsAndBounds) {
  EXPECT_EQ(shape_of(paged_spec(), append_args()), (AttentionShape{3, 4, 2, 50, 80}));
  AppendArgs args = append_args();
  args.max_seqlen_kv = 70, args.q = {}, args.q_out = {};
  EXPECT_EQ(shape_of(paged_spec(), args), (AttentionShape{3, 0, 2, 50, 70}));
}

TEST(Append, SoundArgumentsPass) {
  EXPECT_EQ(refusal([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(refusal([](auto&, auto& args) { args.q = {}, args.q_out = {}, args.rope = {}; }), "accepted");
  EXPECT_EQ(refusal([](auto&, auto& args) { args.q_out.data = address(0x400000); }), "accepted");
  EXPECT_EQ(refusal([](auto&, auto& args) {
              args.rope = {.cos = address(0x80000), .sin = address(0x90000), .table_rows = 9, .dims = 32};
            }),
            "accepted");
  EXPECT_EQ(refusal([](auto& spec, auto& args) {
              spec = parse_spec("bf16:d64:causal:cache");
              args.cu_seqlens_q = nullptr, args.batch_size = 0;
              args.k = args.v = ConstTensorView::bshd(address(0x10000), 3, 2, 2, 64);
              args.q = {}, args.q_out = {}, args.page_table = {};
            }),
            "accepted");
}

TEST(Append, CachesThatShareMemoryGetTheSameRows) {
  const auto shared = [](auto&& change) {
    return refusal([&](auto&, auto& args) {
      args.v_cache = args.k_cache, args.v = args.k, args.rope = {};
      change(args);
    });
  };
  EXPECT_EQ(shared([](auto&) {}), "accepted");
  constexpr const char* kLoses = "k_cache is written, but has memory of v_cache";
  expect_says(shared([](auto& args) { args.v.data = address(0x20000); }), {kLoses, "memory of its own"});
  expect_says(shared([](auto& args) { args.rope = {.theta = 100.0f}; }), {kLoses});
  EXPECT_EQ(shared([](auto& args) { args.v_cache.data = address(0x101000); }), "accepted");  // the next page
  // K and V of a page behind each other.
  EXPECT_EQ(refusal([](auto&, auto& args) {
              args.k_cache.stride[0] = args.v_cache.stride[0] = 2 * 16 * 2 * 64;
              args.v_cache.data = address(0x100000 + 16 * 2 * 64 * 2);
            }),
            "accepted");
}

TEST(Append, WrongArgumentsAreNamed) {
  expect_says(refusal([](auto& spec, auto&) { spec = parse_spec("bf16:d64:varlen"); }),
              {"no cache", "KvLayout::paged(page_size)"});
  expect_says(refusal([](auto&, auto& args) { args.k.size[0] = 2; }), {"k has batch 2", "varlen"});
  expect_says(refusal([](auto& spec, auto&) { spec.varlen = false; }), {"batch_size 3", "no varlen"});
  expect_says(refusal([](auto&, auto& args) { args.batch_size = -1; }), {"batch_size is -1"});
  expect_says(refusal([](auto&, auto& args) { args.batch_size = 0; }),
              {"page_table has 3 rows", "0 sequences"});
  expect_says(refusal([](auto&, auto& args) { args.cu_seqlens_q = nullptr; }), {"cu_seqlens_q is null"});
  expect_says(refusal([](auto&, auto& args) { args.kv_lengths = nullptr; }), {"kv_lengths is null"});
  expect_says(refusal([](auto&, auto& args) { args.v.size[2] = 49; }), {"v has length 49", "k has 50"});
  expect_says(refusal([](auto&, auto& args) { args.k_cache.size[2] = 8; }),
              {"k_cache has 8 rows a page", "page_size is 16"});
  expect_says(refusal([](auto&, auto& args) { args.v_cache.size[0] = 39; }),
              {"v_cache has batch 39", "k_cache has 40"});
  expect_says(refusal([](auto&, auto& args) { args.k_cache.stride[0] = 0; }),
              {"k_cache is written", "overlap"});
  expect_says(refusal([](auto&, auto& args) { args.max_seqlen_kv = 81; }),
              {"max_seqlen_kv is 81", "room for 80 keys"});
  expect_says(refusal([](auto&, auto& args) { args.page_table = {}; }), {"page_table is null"});
  expect_says(refusal([](auto&, auto& args) { args.q = {}; }), {"q_out is given without q"});
  expect_says(refusal([](auto&, auto& args) { args.q_out = {}; }), {"q_out is not given"});
  expect_says(refusal([](auto&, auto& args) { args.q_out.data = address(0x300010); }),
              {"q_out overlaps q", "the very same"});
  expect_says(refusal([](auto&, auto& args) { args.q_out.data = const_cast<void*>(args.k.data); }),
              {"q_out is written, but has memory of k"});
  expect_says(refusal([](auto&, auto& args) { args.rope.dims = 24; }), {"rope.dims is 24", "16"});
  expect_says(refusal([](auto&, auto& args) { args.rope.dims = 80; }), {"rope.dims is 80", "64"});
  expect_says(refusal([](auto&, auto& args) { args.rope.theta = -1; }), {"rope.theta is -1"});
  expect_says(refusal([](auto&, auto& args) { args.rope.cos = address(0x80000); }), {"rope.theta is 10000"});
  expect_says(refusal([](auto&, auto& args) { args.rope = {.cos = address(0x80000)}; }),
              {"rope.sin is null"});
  expect_says(refusal([](auto&, auto& args) { args.rope = {.dims = 32}; }), {"neither tables nor theta"});
  expect_says(refusal([](auto&, auto& args) {
                args.rope.sections = {16, 8, 8};
              }),
              {"rope.positions is null", "three arrays"});
  const auto with_sections = [](std::array<int, 3> sections, bool interleaved) {
    return refusal([&](auto&, auto& args) {
      args.rope.positions = static_cast<const std::int32_t*>(address(0x600000));
      args.rope.sections = sections, args.rope.interleaved_sections = interleaved;
    });
  };
  expect_says(with_sections({16, 8, 9}, false), {"16, 8, 9", "32 together"});
  expect_says(with_sections({40, -8, 0}, false), {"40, -8, 0"});
  expect_says(with_sections({8, 16, 8}, true), {"the first is the largest"});
  expect_says(with_sections({0, 0, 0}, true), {"rope.interleaved_sections is given without"});
  EXPECT_EQ(with_sections({16, 8, 8}, true), "accepted");
  expect_says(refusal([](auto&, auto& args) {
                args.k_norm = {address(0x700000), DType::fp16};
              }),
              {"k_norm.type is fp16", "bf16"});
  expect_says(refusal([](auto&, auto& args) { args.k_norm = {address(0x700002), DType::fp32}; }), {"k_norm"});
  expect_says(refusal([](auto&, auto& args) {
                args.q_norm = {address(0x700000), DType::fp32, 0};
              }),
              {"q_norm.eps is 0"});
  expect_says(refusal([](auto&, auto& args) {
                args.q = {}, args.q_out = {}, args.q_norm = {address(0x700000), DType::fp32};
              }),
              {"q_norm is given without rows"});
  expect_says(refusal([](auto&, auto& args) {
                args.rope = {.cos = address(8), .sin = address(16), .type = DType::fp16};
              }),
              {"rope.type is fp16", "bf16"});
}

TEST(Append, SlotsStandAlone) {
  const auto with_slots = [](auto&& change) {
    return refusal([&](auto& spec, auto& args) {
      args.slots = {.data = address(0x500000)};
      args.kv_lengths = args.cu_seqlens_q = nullptr;
      args.page_table = {};
      args.batch_size = args.max_seqlen_kv = 0;
      args.rope.positions = static_cast<const std::int32_t*>(address(0x600000));
      change(spec, args);
    });
  };
  EXPECT_EQ(with_slots([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(
      with_slots([](auto& spec, auto& args) { spec.varlen = false, args.slots.type = ElementType::int32; }),
      "accepted");
  expect_says(with_slots([](auto&, auto& args) { args.slots.type = ElementType::int16; }),
              {"slots.type is int16", "int64 or int32"});
  expect_says(with_slots([](auto&, auto& args) { args.slots.data = address(0x500004); }), {"slots", "8"});
  expect_says(with_slots([](auto&, auto& args) {
                args.kv_lengths = static_cast<const std::int32_t*>(address(0x700000));
              }),
              {"kv_lengths is given with slots"});
  expect_says(with_slots([](auto&, auto& args) { args.batch_size = 3; }), {"batch_size is given with slots"});
  expect_says(with_slots([](auto&, auto& args) { args.max_seqlen_kv = 3; }),
              {"max_seqlen_kv is given with slots"});
  expect_says(with_slots([](auto&, auto& args) { args.rope.positions = nullptr; }),
              {"rope.positions is null", "slots"});
}

template <class Check>
std::string message_of(const Check& check) {
  try {
    check();
  } catch (const Error& error) {
    return error.message();
  }
  return "accepted";
}

std::string merge_refusal(const MergeArgs& args) {
  return message_of([&] { check_arguments(parse_spec("bf16:d64"), args); });
}

TEST(Append, ScalesOfCodesAreChecked) {
  const auto with_scales = [](const char* spec_text, ScaleView k, ScaleView v) {
    return refusal([&](auto& spec, auto& args) {
      spec = parse_spec(spec_text);
      args.k_scale = k, args.v_scale = v;
    });
  };
  auto* data = address<float>(0x500000);
  const auto one = ScaleView::of_tensor(data), heads = ScaleView::of_heads(data, 3, 2),
             pages = ScaleView::of_pages(data, 40, 2), keys = ScaleView::of_keys(data, 40, 2, 16),
             keys_of_v = ScaleView::of_keys(address<float>(0x600000), 40, 2, 16);
  constexpr const char *kOfHeads = "append:bf16:d64:kve4m3:varlen:pages16",
                       *kOfKeys = "append:bf16:d64:kve4m3:varlen:pages16:key_scales";
  EXPECT_EQ(with_scales(kOfHeads, one, heads), "accepted");
  EXPECT_EQ(with_scales(kOfKeys, keys, keys_of_v), "accepted");
  expect_says(with_scales(kOfKeys, keys, keys), {"k_scale is written, but has memory of v_scale"});
  expect_says(with_scales(kOfHeads, one, {}), {"v_scale is null", "e4m3"});
  expect_says(with_scales(kOfKeys, keys, pages),
              {"v_scale is [1, 40, 2, 1]", "a scale of its own", "[1, 40, 2, 16]"});
  expect_says(with_scales(kOfKeys, one, keys), {"k_scale is [1, 1, 1, 1]"});
  expect_says(with_scales("append:bf16:d64:varlen:pages16", one, one),
              {"k_scale is given", "spec.kv.k_format"});
  ScaleView shared = keys;
  shared.stride[1] = 0;
  expect_says(with_scales(kOfKeys, shared, keys),
              {"k_scale is written, but its elements overlap", "stride 0"});
}

/// The reference called as users call it: a key's largest value becomes the largest code.
TEST(Append, TheReferenceGivesEachKeyItsScale) {
  constexpr int kDim = 16, kKeys = 2;
  const KernelSpec spec = parse_spec("append:fp32:d16:kve4m3:cache:key_scales");
  std::vector<float> k(kKeys * kDim), v(kKeys * kDim, 0.0f);
  for (int i = 0; i < kKeys * kDim; ++i)
    k[i] = static_cast<float>(i % kDim == 3 ? -7 * (1 + i / kDim) : i % kDim == 5);
  std::vector<std::uint8_t> k_cache(4 * kDim, 0xff), v_cache(4 * kDim, 0xff);
  std::vector<float> k_scale(4, -1.0f), v_scale(4, -1.0f);
  const std::int32_t length = 3;
  reference_append(spec, {.k = ConstTensorView::bhsd(k.data(), 1, 1, kKeys, kDim),
                          .v = ConstTensorView::bhsd(v.data(), 1, 1, kKeys, kDim),
                          .k_cache = TensorView::bhsd(k_cache.data(), 1, 1, 4, kDim),
                          .v_cache = TensorView::bhsd(v_cache.data(), 1, 1, 4, kDim),
                          .kv_lengths = &length,
                          .k_scale = ScaleView::of_keys(k_scale.data(), 1, 1, 4),
                          .v_scale = ScaleView::of_keys(v_scale.data(), 1, 1, 4)});
  EXPECT_EQ(k_scale, (std::vector<float>{-1, 7.0f / 448, 14.0f / 448, -1}));
  EXPECT_EQ(v_scale, (std::vector<float>{-1, 1, 1, -1}));  // of zeros
  const auto code = [&](int key, int i) { return dtype_info(DType::e4m3).decode(&k_cache[key * kDim + i]); };
  EXPECT_EQ(code(1, 3), -448);
  EXPECT_EQ(code(1, 5), 64);
  EXPECT_EQ(code(2, 3), -448);
  EXPECT_EQ(code(2, 5), 32);
  EXPECT_EQ(v_cache[kDim], 0);
  EXPECT_EQ(k_cache[0], 0xff);
  EXPECT_EQ(v_cache[3 * kDim], 0xff);
}

TEST(Append, TheReferenceRefusesScalesThatNoCodeCanHave) {
  const KernelSpec spec = parse_spec("append:fp32:d16:kve4m3:cache");
  std::vector<float> k(16, 1.0f);
  std::vector<std::uint8_t> k_cache(16), v_cache(16);
  const std::int32_t length = 1;
  for (const float wrong : {0.0f, -1.0f, std::nanf(""), INFINITY}) {
    float k_scale = 1, v_scale = wrong;
    expect_says(refusal_of([&] {
                  reference_append(spec, {.k = ConstTensorView::bhsd(k.data(), 1, 1, 1, 16),
                                          .v = ConstTensorView::bhsd(k.data(), 1, 1, 1, 16),
                                          .k_cache = TensorView::bhsd(k_cache.data(), 1, 1, 1, 16),
                                          .v_cache = TensorView::bhsd(v_cache.data(), 1, 1, 1, 16),
                                          .kv_lengths = &length,
                                          .k_scale = {&k_scale, {1, 1, 1, 1}},
                                          .v_scale = {&v_scale, {1, 1, 1, 1}}});
                }),
                {"v_scale is", "finite and above 0"});
  }
}

/// What shares a scale with NaN has NaN for its scale, wherever the NaN is.
TEST(Quantize, TheReferenceKeepsNan) {
  const KernelSpec spec = parse_spec("quantize:fp32:d16:kve4m3");
  for (const int place : {0, 20, 47}) {
    std::vector<float> x(3 * 16, 2.0f), scale(1);
    x[place] = std::nanf("");
    std::vector<std::uint8_t> codes(x.size());
    reference_quantize(spec, {.x = ConstTensorView::bhsd(x.data(), 1, 1, 3, 16),
                              .codes = TensorView::bhsd(codes.data(), 1, 1, 3, 16),
                              .scale = {scale.data(), {1, 1, 1, 1}}});
    EXPECT_TRUE(std::isnan(scale[0])) << place;
  }
}

TEST(Quantize, ScalesOfNoRowsAreOne) {
  const KernelSpec spec = parse_spec("quantize:fp32:d16:kve4m3");
  float x = 0;
  std::uint8_t codes = 0;
  std::vector<float> scales(6, -1.0f);
  reference_quantize(spec, {.x = ConstTensorView::bhsd(&x, 2, 3, 0, 16),
                            .codes = TensorView::bhsd(&codes, 2, 3, 0, 16),
                            .scale = {scales.data(), {2, 1, 3, 1}, {3, 3, 1, 1}}});
  EXPECT_EQ(scales, std::vector<float>(6, 1.0f));
}

TEST(Quantize, ScalesHavePlacesOfTheirOwn) {
  std::vector<float> memory(1 << 15);
  const AttentionSpec spec = parse_spec("bf16:d64:kve4m3");
  const auto with_strides = [&](std::int64_t pages, std::int64_t heads, std::int64_t rows) {
    return message_of([&] {
      check_arguments(spec, {.x = ConstTensorView::bhsd(memory.data(), 2, 3, 24, 64),
                             .codes = TensorView::bhsd(memory.data() + 8192, 2, 3, 24, 64),
                             .scale = {memory.data() + 16384, {1, 2, 3, 24}, {0, pages, heads, rows}}});
    });
  };
  for (const auto& [pages, heads, rows] : {std::array{72, 24, 1}, {24, 48, 1}, {1, 2, 6}})
    EXPECT_EQ(with_strides(pages, heads, rows), "accepted");
  for (const auto& [pages, heads, rows] : {std::array{72, 1, 1}, {72, 24, 0}, {1, 24, 1}})
    expect_says(with_strides(pages, heads, rows), {"scale is written, but its elements overlap"});
  expect_says(with_strides(72, -24, 1), {"scale has stride -24"});
  expect_says(with_strides(INT64_MAX, 24, 1), {"scale reaches beyond 2^62 elements"});
}

TEST(Merge, ArgumentsAreChecked) {
  const PartialState state{ConstTensorView::bshd(address(0x10000), 2, 5, 3, 64), address<float>(0x90000)};
  std::vector<PartialState> states(2, state);
  MergeArgs args{.states = states,
                 .out = TensorView::bshd(address(0x20000), 2, 5, 3, 64),
                 .lse = address<float>(0xa0000)};
  EXPECT_EQ(merge_refusal(args), "accepted");
  args.out.data = address(0x10000);
  EXPECT_EQ(merge_refusal(args), "accepted");
  args.out_type = DType::fp32;
  expect_says(merge_refusal(args), {"out overlaps states[0].out"});
  args.out_type = DType::fp16;
  expect_says(merge_refusal(args), {"out_type is fp16", "bf16"});
  args.out_type = {}, args.lse = address<float>(0x90004);
  expect_says(merge_refusal(args), {"lse is written, but has memory of states[0].lse"});
  states[0].lse_strides = {15, 1, 3}, args.lse_strides = {15, 5, 1};
  args.lse = address<float>(0xa0000);
  EXPECT_EQ(merge_refusal(args), "accepted");
  args.lse_strides = {15, 5, 0};
  expect_says(merge_refusal(args), {"lse is written, but its elements overlap", "in length"});
  args.lse = nullptr, states[1].lse = nullptr;
  expect_says(merge_refusal(args), {"states[1].lse is null"});
  states[1] = state, states[1].out.size[2] = 4;
  expect_says(merge_refusal(args), {"states[1].out has length 4", "out has 5"});
  states.assign(9, state), args.states = states;
  expect_says(merge_refusal(args), {"9 states", "1 to 8"});
  args.states = {};
  expect_says(merge_refusal(args), {"0 states"});
}

TEST(Append, SpecsKeepWhatThePassReads) {
  EXPECT_EQ(to_string(parse_spec("append:bf16:d128:causal:sinks:varlen:pages16")),
            "append:bf16:d128:varlen:pages16");
  EXPECT_EQ(to_string(parse_spec("merge:fp16:d64x32:causal:pages16")), "merge:fp16:d32");
  EXPECT_THROW(parse_spec("append:bf16:d128"), Error);
}

/// No family of matrix products takes it, and nothing is to be chosen. Rows as they come have an entry where
/// lanes may have eight columns each.
TEST(Append, IsPlannedWithoutAChoice) {
  for (const char* arch : {"sm_75", "sm_90a"}) {
    const plan::ExecutionPlan plan =
        plan::make_plan(paged_spec(), {3, 4, 2, 50, 80}, DeviceInfo::parse(arch), {});
    ASSERT_EQ(plan.launches.size(), 2u);
    EXPECT_EQ(plan.entries[0].name, "append");
    EXPECT_EQ(plan.launches[0].blocks, 50);
    EXPECT_EQ(plan.entries[1].name, "append_lanes");
    EXPECT_EQ(plan.launches[1].blocks, 50);
    EXPECT_EQ(plan.workspace.bytes, 0u);
    EXPECT_EQ(plan::traits(plan.config.family).search_space(plan.spec, DeviceInfo::parse(arch)).size(), 1u);
  }
  const plan::ExecutionPlan slots =
      plan::make_plan(parse_spec("append:fp32:d64:cache"), {3, 4, 2, 5, 80}, DeviceInfo::parse("sm_80"), {});
  EXPECT_EQ(slots.launches[0].blocks, 15);
  EXPECT_EQ(slots.launches.size(), 1u);
  const plan::ExecutionPlan many = plan::make_plan(parse_spec("append:bf16:d64:kv{q4_0}:cache"),
                                                   {8, 0, 4, 500, 800}, DeviceInfo::parse("sm_80"), {});
  EXPECT_EQ(many.launches[0].blocks, 4000);
  EXPECT_EQ(many.launches[1].blocks, 1000);
  for (const char* text :
       {"append:bf16:d96:pages16", "append:bf16:d128x64:pages16", "append:bf16:d64:kv{iq4_nl}:cache",
        "append:bf16:d64:kve4m3:cache:key_scales", "append:bf16:d576x512:kv{fp8_ds_mla}:shared_kv:cache"})
    EXPECT_EQ(
        plan::make_plan(parse_spec(text), {1, 0, 1, 5, 80}, DeviceInfo::parse("sm_80"), {}).launches.size(),
        1u)
        << text;
  const plan::ExecutionPlan merged =
      plan::make_plan(parse_spec("merge:bf16:d128"), {2, 4, 4, 50, 0}, DeviceInfo::parse("sm_90a"), {});
  EXPECT_EQ(merged.launches[0].blocks, 2 * 4 * 50 * 16 / 128);
}

}  // namespace
}  // namespace flashjit::test

// The spec that a call's arguments have.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "flashjit/runtime.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit {
namespace {

template <class T = void>
T* address(std::uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

ConstTensorView view(std::uintptr_t data, std::int64_t heads, std::int64_t dim, DType type) {
  return ConstTensorView::bhsd(address(data), 2, heads, 100, dim, type);
}
TensorView written(std::uintptr_t data, std::int64_t heads, std::int64_t dim, DType type) {
  return TensorView::bhsd(address(data), 2, heads, 100, dim, type);
}

ForwardArgs forward_args(DType q = DType::bf16, DType kv = DType::bf16, DType out = DType::bf16) {
  return {.q = view(0x100000, 4, 64, q),
          .k = view(0x200000, 2, 64, kv),
          .v = view(0x300000, 2, 32, kv),
          .out = written(0x400000, 4, 32, out)};
}

BackwardArgs backward_args(DType grads = DType::bf16) {
  const ForwardArgs f = forward_args();
  return {.q = f.q,
          .k = f.k,
          .v = f.v,
          .out = f.out,
          .dout = view(0x600000, 4, 32, DType::bf16),
          .dq = written(0x700000, 4, 64, grads),
          .dk = written(0x800000, 2, 64, grads),
          .dv = written(0x900000, 2, 32, grads)};
}

template <class Args, class Change>
std::string text_of(Args args, Change change, const AttentionSpec& options = {}) {
  change(args);
  return to_string(spec_of(args, options));
}
template <class Change>
std::string forward_text(Change change, const AttentionSpec& options = {}) {
  return text_of(forward_args(), change, options);
}

TEST(SpecOf, TypesAndHeadDimensionsComeFromTheViews) {
  EXPECT_EQ(to_string(spec_of(forward_args())), "bf16:d64x32");
  EXPECT_EQ(to_string(spec_of(forward_args(DType::fp16, DType::fp16, DType::fp32))), "fp16:d64x32:fp32_out");
  EXPECT_EQ(to_string(spec_of(forward_args(DType::fp32, DType::fp32, DType::fp32))), "fp32:d64x32");
  EXPECT_EQ(to_string(spec_of(forward_args(DType::fp16, DType::e4m3, DType::fp16))), "fp16:d64x32:kve4m3");
  EXPECT_EQ(to_string(spec_of(forward_args(DType::e4m3, DType::e4m3, DType::fp16))),
            "fp16:d64x32:kve4m3:q_codes");
  EXPECT_EQ(to_string(spec_of(backward_args())), "bf16:d64x32");
  EXPECT_EQ(to_string(spec_of(backward_args(DType::fp32))), "bf16:d64x32:fp32_grads");
  BackwardArgs accurate = backward_args();
  accurate.out.dtype = DType::fp32;
  EXPECT_EQ(to_string(spec_of(accurate)), "bf16:d64x32:fp32_out");
}

TEST(SpecOf, OptionsAreWhatArgumentsDoNotTell) {
  const AttentionSpec options{.score = ScoreProgram("score * 2.0"),
                              .mask = causal(),
                              .block_map = {128, 64},
                              .reproducible = {.deterministic = true, .batch_invariant = true}};
  EXPECT_EQ(to_string(spec_of(backward_args(), options)),
            "bf16:d64x32:score{score * 2.0}:causal:map128x64:det:invariant");
  EXPECT_EQ(to_string(spec_of(backward_args(DType::fp32), {.partial = {.add_grads = true}})),
            "bf16:d64x32:fp32_grads:add_grads");
}

TEST(SpecOf, WhatIsGivenIsUsed) {
  EXPECT_EQ(forward_text([](auto& a) { a.dropout_p = 0.1; }), "bf16:d64x32:dropout");
  EXPECT_EQ(forward_text([](auto& a) { a.rng_state = address<const std::uint64_t>(0x10); }),
            "bf16:d64x32:dropout");
  EXPECT_EQ(forward_text([](auto& a) { a.dropout_p = 0.1, a.partial.dropout_place.q = 16; }),
            "bf16:d64x32:dropout:dropout_place");
  EXPECT_EQ(
      forward_text([](auto& a) { a.cu_seqlens_q = a.cu_seqlens_kv = address<const std::int32_t>(0x10); }),
      "bf16:d64x32:varlen");
  EXPECT_EQ(forward_text([](auto& a) { a.sinks = address<const float>(0x10); }), "bf16:d64x32:sinks");
  EXPECT_EQ(forward_text([](auto& a) { a.row_max = address<float>(0x10); }), "bf16:d64x32:row_max");
  EXPECT_EQ(forward_text([](auto& a) { a.indices.data = address<const std::int32_t>(0x10); }),
            "bf16:d64x32:indices");
  EXPECT_EQ(forward_text([](auto& a) { a.partial.state.lse = address<const float>(0x10); }),
            "bf16:d64x32:running_state");
  EXPECT_EQ(forward_text([](auto& a) { a.v = a.k.first_columns(32); }), "bf16:d64x32:shared_kv");
  const auto in_parts = [](auto& a) {
    a.v = a.k.first_columns(32);
    a.q_rope = a.q.first_columns(32);
    a.q = a.q.first_columns(32);
  };
  EXPECT_EQ(forward_text(in_parts), "bf16:d64x32:shared_kv:q_rope");
}

TEST(SpecOf, TheLayoutOfKAndV) {
  const auto lengths = [](auto& a) { a.kv_lengths = address<const std::int32_t>(0x10); };
  const auto table = [&](std::int64_t columns) {
    return [&, columns](auto& a) {
      lengths(a);
      a.page_table = {address<const std::int32_t>(0x10), 2, columns};
    };
  };
  EXPECT_EQ(forward_text(lengths), "bf16:d64x32:kvlen");
  EXPECT_EQ(text_of(backward_args(), lengths), "bf16:d64x32:kvlen");
  EXPECT_EQ(forward_text(lengths, {.kv = KvLayout::slots()}), "bf16:d64x32:cache");
  EXPECT_EQ(forward_text(table(1)), "bf16:d64x32:cache");
  EXPECT_EQ(forward_text(table(3)), "bf16:d64x32:pages100");
  EXPECT_EQ(forward_text([&](auto& a) {
              table(3)(a), a.cu_seqlens_q = a.prefix_length = address<const std::int32_t>(0x10);
            }),
            "bf16:d64x32:varlen:pages100:shared_prefix");
}

TEST(SpecOf, ScalesOfKeysOrPages) {
  const auto text = [](const ConstScaleView& scale) {
    ForwardArgs args = forward_args(DType::bf16, DType::int8);
    args.k_scale = args.v_scale = scale;
    return to_string(spec_of(args));
  };
  const auto* data = address<const float>(0x10);
  EXPECT_EQ(text(ConstScaleView::of_heads(data, 2, 2)), "bf16:d64x32:kvint8");
  EXPECT_EQ(text(ConstScaleView::of_pages(data, 5, 2)), "bf16:d64x32:kvint8:key_scales");
  EXPECT_EQ(text(ConstScaleView::of_keys(data, 1, 2, 100)), "bf16:d64x32:kvint8:key_scales");
}

TEST(SpecOf, WhatASpecSaysStays) {
  EXPECT_EQ(forward_text([](auto&) {}, {.head_dim = 128, .head_dim_v = 16, .sinks = true}),
            "bf16:d128x16:sinks");
  EXPECT_EQ(forward_text([](auto&) {}, {.kv = KvLayout::paged(16)}), "bf16:d64x32:pages16");
}

TEST(SpecOf, AViewWithoutATypeIsRefused) {
  const auto refusal = [](auto change) {
    try {
      return forward_text(change);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.message();
    }
  };
  expect_in("q has no dtype", refusal([](auto& a) { a.q.dtype.reset(); }));
  expect_in("bhsd(data, b, h, s, d, dtype)", refusal([](auto& a) { a.q.dtype.reset(); }));
  expect_in("k has no dtype", refusal([](auto& a) { a.k.dtype.reset(); }));
  expect_in("out has no dtype", refusal([](auto& a) { a.out.dtype.reset(); }));
}

}  // namespace
}  // namespace flashjit

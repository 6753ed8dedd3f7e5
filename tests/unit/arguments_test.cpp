#include "call/arguments.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "call/captures.hpp"
#include "call/parameters.hpp"
#include "support/dropout.hpp"
#include "tests/support/expectations.hpp"

namespace flashjit {
namespace {

using testing::Test;

/// Addresses that nothing reads: the checks look at pointers, not at memory.
template <class T = void>
T* address(std::uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

AttentionSpec spec() { return {.dtype = DType::bf16, .head_dim = 64}; }

constexpr std::int64_t kBatch = 2, kHeadsQ = 4, kHeadsKv = 2, kQueries = 100, kKeys = 70, kDim = 64;

ForwardArgs forward_args() {
  return {.q = ConstTensorView::bhsd(address(0x100000), kBatch, kHeadsQ, kQueries, kDim),
          .k = ConstTensorView::bhsd(address(0x200000), kBatch, kHeadsKv, kKeys, kDim),
          .v = ConstTensorView::bhsd(address(0x300000), kBatch, kHeadsKv, kKeys, kDim),
          .out = TensorView::bhsd(address(0x400000), kBatch, kHeadsQ, kQueries, kDim),
          .lse = address<float>(0x500000)};
}

BackwardArgs backward_args() {
  const ForwardArgs f = forward_args();
  return {.q = f.q,
          .k = f.k,
          .v = f.v,
          .out = f.out,
          .lse = f.lse,
          .dout = ConstTensorView::bhsd(address(0x600000), kBatch, kHeadsQ, kQueries, kDim),
          .dq = TensorView::bhsd(address(0x700000), kBatch, kHeadsQ, kQueries, kDim),
          .dk = TensorView::bhsd(address(0x800000), kBatch, kHeadsKv, kKeys, kDim),
          .dv = TensorView::bhsd(address(0x900000), kBatch, kHeadsKv, kKeys, kDim)};
}

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.message();
  }
  return "accepted";
}

/// The message that a changed spec and changed arguments get.
template <class Change>
std::string forward_refusal(Change&& change) {
  AttentionSpec s = spec();
  ForwardArgs args = forward_args();
  change(s, args);
  return refusal([&] { check_arguments(s, args); });
}
template <class Change>
std::string backward_refusal(Change&& change) {
  AttentionSpec s = spec();
  BackwardArgs args = backward_args();
  change(s, args);
  return refusal([&] { check_arguments(s, args); });
}

#define EXPECT_SAYS(message, ...)                                                         \
  do {                                                                                    \
    const std::string said = (message);                                                   \
    for (const char* part : {__VA_ARGS__}) EXPECT_NE(said.find(part), said.npos) << said; \
  } while (false)

TEST(Arguments, SoundOnesPass) {
  EXPECT_EQ(forward_refusal([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(backward_refusal([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(shape_of(spec(), forward_args()), (AttentionShape{kBatch, kHeadsQ, kHeadsKv, kQueries, kKeys}));
  EXPECT_EQ(shape_of(spec(), backward_args()), (AttentionShape{kBatch, kHeadsQ, kHeadsKv, kQueries, kKeys}));
}

TEST(Arguments, OtherMemoryLayoutsPass) {
  EXPECT_EQ(forward_refusal([](auto&, ForwardArgs& args) {
              args.q = ConstTensorView::bshd(address(0x100000), kBatch, kQueries, kHeadsQ, kDim);
              args.out = TensorView::bshd(address(0x400000), kBatch, kQueries, kHeadsQ, kDim);
            }),
            "accepted");
  EXPECT_EQ(backward_refusal([](auto&, BackwardArgs& args) {
              args.dq = TensorView::packed_qkv(address(0x700000), kBatch, kQueries, kHeadsQ, kDim, 0, 2);
            }),
            "accepted");
  // One key for all batches and heads is a fine thing to read, though not to write.
  EXPECT_EQ(forward_refusal([](auto&, ForwardArgs& args) { args.k.stride = {0, 0, kDim, 1}; }), "accepted");
}

TEST(Arguments, SizesThatDisagreeNameBothTensors) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.k.size[0] = 3; }), "k has batch 3", "q has 2");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.v.size[1] = 1; }), "v has heads 1", "k has 2");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.v.size[2] = 71; }), "v has length 71", "k has 70");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.out.size[2] = 70; }), "out has length 70",
              "q has 100");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dout.size[1] = 2; }), "dout has heads 2",
              "q has 4");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dk.size[1] = 4; }), "dk has heads 4", "k has 2");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dv.size[2] = 0; }), "dv has length 0",
              "k has 70");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dq.size[0] = 1; }), "dq has batch 1", "q has 2");
}

TEST(Arguments, HeadDimIsTheSpecs) {
  EXPECT_SAYS(forward_refusal([](auto& s, auto&) { s.head_dim = 128; }), "q has head_dim 64",
              "spec says 128");
  EXPECT_SAYS(forward_refusal([](auto& s, auto&) { s.head_dim_v = 32; }), "v has head_dim 64",
              "spec says 32");
  EXPECT_SAYS(backward_refusal([](auto& s, auto&) { s.head_dim_v = 32; }), "v has head_dim 64",
              "spec says 32");
}

TEST(Arguments, CausalBesideLengthsHasOneMeaning) {
  const auto refusal = [](const char* text, std::int64_t queries, std::int64_t keys) {
    return forward_refusal([&](auto& s, auto& args) {
      s = parse_spec(text);
      args = {.q = ConstTensorView::bshd(address(0x100000), 2, queries, 4, 64),
              .k = ConstTensorView::bshd(address(0x200000), 2, keys, 2, 64),
              .v = ConstTensorView::bshd(address(0x300000), 2, keys, 2, 64),
              .out = TensorView::bshd(address(0x400000), 2, queries, 4, 64),
              .kv_lengths = address<std::int32_t>(0x500000)};
    });
  };
  EXPECT_SAYS(refusal("bf16:d64:causal:kvlen", 16, 24), "two meanings for 16 queries and 24 keys",
              "KvLayout::slots()", "causal_top_left");
  for (const char* spec : {"bf16:d64:causal_top_left:kvlen", "bf16:d64:causal:cache", "bf16:d64:kvlen"})
    EXPECT_EQ(refusal(spec, 16, 24), "accepted") << spec;
  EXPECT_EQ(refusal("bf16:d64:causal:kvlen", 24, 24), "accepted");
  EXPECT_EQ(refusal("bf16:d64:causal:kvlen", 1, 24), "accepted");
}

TEST(Arguments, SharedKvIsKsMemory) {
  const auto shared = [](AttentionSpec& s, ForwardArgs& args) {
    s.kv.shared_kv = true;
    s.head_dim_v = 32;
    args.v = args.k.first_columns(32);
    args.out = TensorView::bhsd(address(0x400000), kBatch, kHeadsQ, kQueries, 32);
  };
  EXPECT_EQ(forward_refusal(shared), "accepted");
  EXPECT_SAYS(forward_refusal([&](auto& s, auto& args) {
                shared(s, args);
                args.v.data = address(0x300000);
              }),
              "not k's memory");
  EXPECT_SAYS(forward_refusal([&](auto& s, auto& args) {
                shared(s, args);
                args.v = ConstTensorView::bhsd(args.k.data, kBatch, kHeadsKv, kKeys, 32);
              }),
              "not k's memory with k's strides");
}

TEST(Arguments, QInTwoTensors) {
  const auto in_parts = [](AttentionSpec& s, ForwardArgs& args) {
    s.kv.shared_kv = s.prologue.q_rope = true;
    s.head_dim_v = 32;
    args.v = args.k.first_columns(32);
    args.out = TensorView::bhsd(address(0x400000), kBatch, kHeadsQ, kQueries, 32);
    args.q_rope = ConstTensorView::bhsd(address(0x600000), kBatch, kHeadsQ, kQueries, s.head_dim - 32);
    args.q = args.q.first_columns(32);
  };
  EXPECT_EQ(forward_refusal(in_parts), "accepted");
  EXPECT_SAYS(forward_refusal([&](auto& s, auto& args) { in_parts(s, args), args.q_rope = {}; }),
              "q_rope is not given");
  EXPECT_SAYS(forward_refusal([&](auto& s, auto& args) { in_parts(s, args), args.q_rope.size[2] = 1; }),
              "q_rope has length 1, but q has");
  EXPECT_SAYS(forward_refusal([&](auto& s, auto& args) { in_parts(s, args), s.prologue.q_rope = false; }),
              "q_rope is given", "set spec.prologue.q_rope");
  EXPECT_SAYS(
      forward_refusal([&](auto& s, auto& args) { in_parts(s, args), args.out.data = address(0x600000); }),
      "out is written", "memory of q_rope");
}

TEST(Arguments, NegativeSizes) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.q.size[2] = -1; }), "q has length -1",
              "0 or more");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.k.size[2] = -7; }), "k has length -7");
}

TEST(Arguments, HeadsOfQAreAMultipleOfThoseOfK) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.k.size[1] = args.v.size[1] = 3; }),
              "q has 4 heads", "k has 3", "multiple");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.k.size[1] = args.v.size[1] = 0; }),
              "q has 4 heads", "k has 0");
}

TEST(Arguments, NullPointers) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.q.data = nullptr; }), "q is null");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.out.data = nullptr; }), "out is null");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dv.data = nullptr; }), "dv is null");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.lse = nullptr; }), "lse is null");
  EXPECT_EQ(forward_refusal([](auto&, auto& args) { args.lse = nullptr; }), "accepted");
  // A tensor without elements needs no memory.
  EXPECT_EQ(forward_refusal([](auto&, auto& args) {
              args.k.size[2] = args.v.size[2] = 0;
              args.k.data = args.v.data = nullptr;
            }),
            "accepted");
}

TEST(Arguments, Alignment) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.q.data = address(0x100008); }), "q is at 0x100008",
              "16 bytes");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.k.stride[2] = 68; }), "k has stride 68 in length",
              "8 elements");
  EXPECT_SAYS(forward_refusal([](auto& s, auto& args) {
                s.dtype = DType::fp32;
                args.k.stride[2] = 66;
              }),
              "k has stride 66", "4 elements");
  EXPECT_EQ(forward_refusal([](auto& s, auto& args) {
              s.dtype = DType::fp32;
              args.k.stride[2] = 68;
            }),
            "accepted");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.lse = address<float>(0x500002); }), "lse is at",
              "4 bytes");
}

TEST(Arguments, StridesOfLse) {
  const auto with = [](RowStrides strides) {
    return forward_refusal([&](auto&, auto& args) { args.lse_strides = strides; });
  };
  EXPECT_EQ(with({kHeadsQ * kQueries, 1, kHeadsQ}), "accepted");
  EXPECT_EQ(with({(kHeadsQ * 2 + 1) * kQueries, 2, kHeadsQ * 2 + 1}), "accepted");
  EXPECT_SAYS(with({kHeadsQ * kQueries, -1, kHeadsQ}), "lse has stride -1 in heads", "0 or more");
  EXPECT_SAYS(with({kHeadsQ * kQueries, 0, 1}), "lse is written, but its elements overlap", "in heads");
  EXPECT_EQ(backward_refusal([](auto&, auto& args) { args.lse_strides = {0, 0, 1}; }), "accepted");
  EXPECT_SAYS(forward_refusal([](auto& s, auto& args) {
                s.epilogue.row_max = true, args.row_max = address<float>(0x900000), args.lse = nullptr;
                args.lse_strides = {1, 1, 1};
              }),
              "row_max is written, but its elements overlap");
}

TEST(Arguments, Strides) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.v.stride[3] = 2; }), "v has stride 2 in head_dim",
              "contiguous");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.v.stride[1] = -64; }),
              "v has stride -64 in heads");
  // Strides of dimensions of one element mean nothing.
  EXPECT_EQ(forward_refusal([](auto&, auto& args) {
              for (auto* size : {&args.q.size, &args.k.size, &args.v.size, &args.out.size}) (*size)[0] = 1;
              args.q.stride[0] = -3;
              args.out.stride[0] = 0;
            }),
            "accepted");
}

TEST(Arguments, WrittenTensorsDoNotOverlapThemselves) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.out.stride[0] = 0; }), "out is written",
              "overlap");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.out.stride[2] = 32; }), "out is written",
              "stride 32");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dk.stride[1] = 0; }), "dk is written");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dq.stride[1] = args.dq.stride[2]; }),
              "dq is written");
}

TEST(Arguments, Overflow) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.q.stride[0] = std::int64_t{1} << 61; }),
              "accepted");
  EXPECT_SAYS(
      forward_refusal([](auto&, auto& args) { args.q.stride[0] = args.q.stride[1] = std::int64_t{1} << 61; }),
      "q reaches beyond 2^62");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.k.stride[2] = std::int64_t{1} << 62; }),
              "k reaches beyond 2^62");
  EXPECT_SAYS(refusal([] {
                check_limits({1, 1, 1, std::numeric_limits<int>::max(), 1});
              }),
              "seqlen_q is 2147483647", "2147483520");
  EXPECT_EQ(refusal([] { check_limits({1, 1, 1, 2147483520, 1}); }), "accepted");
}

TEST(Arguments, SoftmaxScale) {
  for (const float bad : {0.0f, -1.0f, NAN, INFINITY})
    EXPECT_SAYS(forward_refusal([&](auto&, auto& args) { args.softmax_scale = bad; }), "softmax_scale is",
                "finite");
  EXPECT_EQ(forward_refusal([](auto&, auto& args) { args.softmax_scale = 0.5f; }), "accepted");
}

TEST(Arguments, Dropout) {
  for (const double bad : {-0.1, 1.0, 1.5, double{NAN}})
    EXPECT_SAYS(forward_refusal([&](auto& s, auto& args) {
                  s.dropout = true;
                  args.dropout_p = bad;
                }),
                "dropout_p is", "less than 1");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dropout_p = 0.1; }), "dropout_p is 0.1",
              "spec.dropout");
  EXPECT_EQ(forward_refusal([](auto& s, auto&) { s.dropout = true; }), "accepted");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.partial.dropout_place.q = 16; }),
              "dropout_place is given", "spec.partial.dropout_place");
  const auto placed = [](DropoutPlace place) {
    return forward_refusal([&](auto& s, auto& args) {
      s.dropout = s.partial.dropout_place = true;
      args.partial.dropout_place = place;
    });
  };
  EXPECT_EQ(placed({.batch = 7, .head = 5, .heads = 64, .q = 1 << 20, .kv = 3, .q_step = 8}), "accepted");
  EXPECT_SAYS(placed({.q = -1}), "dropout_place has q -1", "at least 0");
  EXPECT_SAYS(placed({.kv_step = 0}), "dropout_place has kv 0 and a step of 0", "at least 1");
  EXPECT_SAYS(placed({.kv = 2147483647}), "dropout_place has kv 2147483647", "at most 2^31 - 1");
  EXPECT_SAYS(placed({.head = 1}), "dropout_place has head 1", "with the call's heads at most");
}

TEST(Arguments, KvLengths) {
  EXPECT_SAYS(forward_refusal([](auto& s, auto&) { s.kv = KvLayout::padded(); }), "kv_lengths is null");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.kv_lengths = address<std::int32_t>(0x100); }),
              "kv_lengths is given", "KvLayout::padded()");
  EXPECT_SAYS(backward_refusal([](auto& s, auto& args) {
                s.kv = KvLayout::padded();
                args.kv_lengths = address<std::int32_t>(0x101);
              }),
              "kv_lengths is at 0x101");
}

TEST(Arguments, BlockMap) {
  const auto with_map = [](std::array<std::int64_t, 4> size, std::uintptr_t data = 0x777) {
    return forward_refusal([&](auto& s, auto& args) {
      s.block_map = {32, 16};
      args.block_map = {address<const std::uint8_t>(data), size};
    });
  };
  // 100 queries by 32 are 4 rows, 70 keys by 16 are 5 columns.
  EXPECT_EQ(with_map({kBatch, kHeadsQ, 4, 5}), "accepted");
  EXPECT_EQ(with_map({1, 1, 4, 5}), "accepted");
  EXPECT_SAYS(with_map({kBatch, kHeadsQ, 4, 4}), "[2, 4, 4, 4]", "[1 or 2, 1 or 4, 4, 5]");
  EXPECT_SAYS(with_map({kBatch, kHeadsKv, 4, 5}), "[2, 2, 4, 5]");
  EXPECT_SAYS(with_map({0, 1, 4, 5}), "[0, 1, 4, 5]");
  EXPECT_SAYS(with_map({1, 1, 4, 5}, 0), "block_map is null");
  EXPECT_SAYS(
      forward_refusal([](auto&, auto& args) { args.block_map.data = address<const std::uint8_t>(1); }),
      "block_map is given", "spec.block_map");
}

/// Three sequences of up to 60 queries and 30 keys, packed.
template <class Args>
void pack(AttentionSpec& s, Args& args) {
  s.varlen = true;
  args.q = ConstTensorView::bhsd(args.q.data, 1, kHeadsQ, kQueries, kDim);
  args.k = ConstTensorView::bhsd(args.k.data, 1, kHeadsKv, kKeys, kDim);
  args.v = ConstTensorView::bhsd(args.v.data, 1, kHeadsKv, kKeys, kDim);
  args.out.size[0] = 1;
  args.cu_seqlens_q = address<const std::int32_t>(0xa00000);
  args.cu_seqlens_kv = address<const std::int32_t>(0xb00000);
  args.batch_size = 3;
  args.max_seqlen_q = 60;
  args.max_seqlen_kv = 30;
}

TEST(Arguments, PackedSequences) {
  const auto with = [](auto change) {
    return forward_refusal([&](auto& s, auto& args) {
      pack(s, args);
      change(s, args);
    });
  };
  EXPECT_EQ(with([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(backward_refusal([](auto& s, auto& args) {
              pack(s, args);
              for (auto* size : {&args.dout.size, &args.dq.size, &args.dk.size, &args.dv.size})
                (*size)[0] = 1;
            }),
            "accepted");
  AttentionSpec s = spec();
  ForwardArgs args = forward_args();
  pack(s, args);
  EXPECT_EQ(shape_of(s, args), (AttentionShape{3, kHeadsQ, kHeadsKv, 60, 30}));
  // A longest sequence that is only a bound is fine.
  EXPECT_EQ(with([](auto&, auto& args) { args.max_seqlen_q = 1000; }), "accepted");
  EXPECT_SAYS(with([](auto&, auto& args) { args.q.size[0] = 2; }), "q has batch 2", "varlen",
              "[1, heads, rows, head_dim]");
  EXPECT_SAYS(with([](auto&, auto& args) { args.k.size[0] = 3; }), "k has batch 3", "varlen");
  EXPECT_SAYS(with([](auto&, auto& args) { args.v.size[2] = 71; }), "v has length 71", "k has 70");
  EXPECT_SAYS(with([](auto&, auto& args) { args.cu_seqlens_q = nullptr; }), "cu_seqlens_q is null",
              "int32 [batch_size + 1]");
  EXPECT_SAYS(with([](auto&, auto& args) { args.cu_seqlens_kv = nullptr; }), "cu_seqlens_kv is null");
  EXPECT_SAYS(with([](auto&, auto& args) { args.cu_seqlens_kv = address<std::int32_t>(0xb00002); }),
              "cu_seqlens_kv is at 0xb00002", "4 bytes");
  EXPECT_SAYS(with([](auto&, auto& args) { args.batch_size = -1; }), "batch_size is -1", "sequences");
  EXPECT_SAYS(with([](auto&, auto& args) { args.max_seqlen_q = 0; }), "max_seqlen_q is 0", "q has 100 rows",
              "longest");
  EXPECT_SAYS(with([](auto&, auto& args) { args.max_seqlen_kv = -5; }), "max_seqlen_kv is -5");
  EXPECT_SAYS(with([](auto&, auto& args) { args.max_seqlen_kv = std::int64_t{1} << 40; }),
              "max_seqlen_kv is 1099511627776");
  EXPECT_SAYS(with([](auto&, auto& args) { args.q.size[2] = args.out.size[2] = std::int64_t{1} << 31; }),
              "q has 2147483648 rows");
  // Block maps count within each sequence.
  const auto with_map = [&](std::array<std::int64_t, 4> size) {
    return with([&](auto& s, auto& args) {
      s.block_map = {32, 16};
      args.block_map = {address<const std::uint8_t>(0x777), size};
    });
  };
  EXPECT_EQ(with_map({3, kHeadsQ, 2, 2}), "accepted");
  EXPECT_SAYS(with_map({1, 1, 4, 5}), "[1 or 3, 1 or 4, 2, 2]");
}

TEST(Arguments, WhatIsOnlyForPackedSequences) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.cu_seqlens_q = address<std::int32_t>(0x100); }),
              "cu_seqlens_q is given", "spec.varlen");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.cu_seqlens_kv = address<std::int32_t>(0x100); }),
              "cu_seqlens_kv is given", "spec.varlen");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.max_seqlen_kv = 70; }), "max_seqlen_kv 70",
              "spec.varlen");
}

TEST(Arguments, TheGradientOfLseAndTheStateOfDropoutAreAligned) {
  EXPECT_EQ(backward_refusal([](auto&, auto& args) { args.dlse = address<float>(0x104); }), "accepted");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dlse = address<float>(0x102); }),
              "dlse is at 0x102");
  EXPECT_SAYS(
      forward_refusal([](auto&, auto& args) { args.rng_state = address<const std::uint64_t>(0x100); }),
      "rng_state is given", "spec.dropout");
  const auto at = [](std::uintptr_t state) {
    return backward_refusal([&](auto& s, auto& args) {
      s.dropout = true;
      args.rng_state = address<const std::uint64_t>(state);
    });
  };
  EXPECT_EQ(at(0x110), "accepted");
  EXPECT_SAYS(at(0x108), "rng_state is at 0x108", "16 bytes");
}

TEST(Arguments, PrefixLength) {
  const auto with = [](const std::int32_t* length, bool shares, std::int64_t scaled_sequences = 0) {
    return forward_refusal([&](auto& s, auto& args) {
      s.kv = KvLayout::paged(16), s.varlen = true, s.kv.shared_prefix = shares;
      if (scaled_sequences > 0) {
        s.kv = s.kv.with(kv_format_of(DType::e4m3));
        args.k_scale =
            args.v_scale = {address<const float>(0x400), {scaled_sequences, 1, 1, 1}, {1, 1, 1, 1}};
      }
      args.q = ConstTensorView::bhsd(address(0x100000), 1, kHeadsQ, kQueries, kDim);
      args.out = TensorView::bhsd(address(0x400000), 1, kHeadsQ, kQueries, kDim);
      args.k = ConstTensorView::bhsd(address(0x200000), 10, kHeadsKv, 16, kDim);
      args.v = ConstTensorView::bhsd(address(0x300000), 10, kHeadsKv, 16, kDim);
      args.cu_seqlens_q = args.kv_lengths = address<const std::int32_t>(0x100);
      args.page_table = {address<const std::int32_t>(0x200), kBatch, 5};
      args.batch_size = kBatch, args.max_seqlen_q = kQueries;
      args.prefix_length = length;
    });
  };
  const auto* length = address<const std::int32_t>(0x300);
  EXPECT_EQ(with(length, true), "accepted");
  EXPECT_SAYS(with(nullptr, true), "prefix_length is null", "one int32");
  EXPECT_SAYS(with(length, false), "prefix_length is given", "spec.kv.shared_prefix");
  EXPECT_SAYS(with(address<const std::int32_t>(0x302), true), "prefix_length is at 0x302");
  EXPECT_EQ(with(length, true, 1), "accepted");
  EXPECT_SAYS(with(length, true, kBatch), "k_scale has 2 sequences", "shared_prefix",
              "one for all sequences");
}

TEST(Arguments, RunningState) {
  const auto with = [](auto change) {
    return forward_refusal([&](auto& s, auto& args) {
      s.partial.running_state = true;
      args.partial.state = {ConstTensorView::bhsd(address(0x500000), kBatch, kHeadsQ, kQueries, kDim),
                            address<const float>(0x400)};
      change(s, args);
    });
  };
  EXPECT_EQ(with([](auto&, auto&) {}), "accepted");
  EXPECT_SAYS(with([](auto& s, auto&) { s.partial.running_state = false; }), "state is given",
              "spec.partial.running_state");
  EXPECT_SAYS(with([](auto&, auto& args) { args.partial.state.out.data = nullptr; }), "state.out is null");
  EXPECT_SAYS(with([](auto&, auto& args) { args.partial.state.lse = nullptr; }), "state.lse is null",
              "state.out");
  EXPECT_SAYS(with([](auto&, auto& args) { args.partial.state.lse = address<const float>(0x402); }),
              "state.lse is at 0x402");
  EXPECT_SAYS(with([](auto&, auto& args) {
                args.partial.state.lse_strides = {kHeadsQ * kQueries, 1, kHeadsQ};
              }),
              "state.lse has strides", "must be equal");
  EXPECT_EQ(with([](auto&, auto& args) {
              args.partial.state.lse_strides = {kHeadsQ * kQueries, kQueries, 1};
            }),
            "accepted")
      << "contiguous, as zeros are";
  EXPECT_SAYS(with([](auto&, auto& args) { args.partial.state.out.size[2] += 1; }), "state.out has length");
  const auto in_place = [&](bool fp32_out) {
    return with([&](auto& s, auto& args) {
      s.partial.fp32_out = fp32_out;
      args.partial.state.out.data = args.out.data;
    });
  };
  EXPECT_EQ(in_place(true), "accepted");
  EXPECT_SAYS(in_place(false), "state.out is out's memory", "fp32_out");
}

TEST(Arguments, WhatIsWrittenHasNoMemoryOfAnotherTensor) {
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.out.data = address(0x100000); }), "out is written",
              "memory of q", "of its own");
  // Dense tensors share memory where one ends in the other.
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.out.data = address(0x200000 - 0x100); }),
              "out is written", "memory of k");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.v.data = address(0x400100); }), "memory of v");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.lse = static_cast<float*>(address(0x100000)); }),
              "lse is written", "memory of q");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.lse = static_cast<float*>(args.out.data); }),
              "out is written", "memory of lse");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dq.data = address(0x100000); }), "dq is written",
              "memory of q");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dk.data = address(0x900000); }), "dk is written",
              "memory of dv");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dv.data = address(0x600000); }),
              "memory of dout");
}

TEST(Arguments, TensorsWithoutElementsMayBeAnywhere) {
  EXPECT_EQ(forward_refusal([](auto&, auto& args) {
              args.k = args.v = ConstTensorView::bhsd(address(0x400100), kBatch, kHeadsKv, 0, kDim);
            }),
            "accepted");
}

TEST(Arguments, RowsOfOneTensorMayLieBetweenThoseOfAnother) {
  // Q, K, V and O of each token side by side.
  constexpr std::int64_t kToken = 4 * kHeadsQ * kDim, kBytes = 2 * kHeadsQ * kDim;
  const auto part = [](std::uintptr_t i) {
    return TensorView{.data = address(0x100000 + i * kBytes),
                      .size = {kBatch, kHeadsQ, kQueries, kDim},
                      .stride = {kQueries * kToken, kDim, kToken, 1}};
  };
  EXPECT_EQ(forward_refusal([&](auto&, auto& args) {
              args.q = part(0), args.k = part(1), args.v = part(2), args.out = part(3);
            }),
            "accepted");
  EXPECT_SAYS(forward_refusal([&](auto&, auto& args) {
                args.q = part(0), args.k = part(1), args.v = part(2), args.out = part(1);
              }),
              "memory of k");
}

TEST(Arguments, Sinks) {
  EXPECT_SAYS(forward_refusal([](auto& s, auto&) { s.epilogue.row_max = true; }), "row_max is null",
              "fp32 [batch");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.row_max = address<float>(0x100); }),
              "row_max is given", "spec.epilogue.row_max");
  EXPECT_SAYS(forward_refusal([](auto& s, auto& args) {
                s.epilogue.row_max = true, args.row_max = address<float>(0x102);
              }),
              "row_max is at 0x102");
  EXPECT_SAYS(forward_refusal([](auto& s, auto&) { s.sinks = true; }), "sinks is null", "one float per head");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.sinks = address<float>(0x100); }),
              "sinks is given", "spec.sinks");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dsinks = address<float>(0x100); }),
              "dsinks is given", "spec.sinks");
  const auto with = [](std::uintptr_t sinks, std::uintptr_t dsinks) {
    return backward_refusal([&](auto& s, auto& args) {
      s.sinks = true;
      args.sinks = address<float>(sinks);
      args.dsinks = address<float>(dsinks);
    });
  };
  EXPECT_EQ(with(0x100, 0x200), "accepted");
  EXPECT_EQ(with(0x100, 0), "accepted");  // not wanted
  EXPECT_SAYS(with(0x101, 0x200), "sinks is at 0x101");
  EXPECT_SAYS(with(0x100, 0x202), "dsinks is at 0x202");
}

plan::ExecutionPlan plan_of(const AttentionSpec& s, const AttentionShape& shape, Pass pass = Pass::forward) {
  plan::ExecutionPlan plan;
  plan.spec = KernelSpec{s, pass};
  plan.shape = shape;
  return plan;
}

using expr::Declaration;

const std::vector<Declaration> kDeclared = {
    {.name = "slopes", .type = ElementType::fp32, .rank = 1},
    {.name = "window", .type = ElementType::int32},
    {.name = "bias", .type = ElementType::bf16, .rank = 4, .wants_grad = true},
    {.name = "cap", .type = ElementType::fp32}};

std::vector<Capture> captures() {
  return {Capture::number("cap", 30.5),
          Capture::tensor("bias", address(0xc00000), {1, kHeadsQ, kQueries, kKeys}, address<float>(0xd00000)),
          Capture::tensor("slopes", address(0xe00000), {kHeadsQ}), Capture::number("window", -7)};
}

/// The message that changed captures get in the backward pass.
template <class Change>
std::string capture_refusal(Change&& change, Pass pass = Pass::backward) {
  std::vector<Capture> given = captures();
  change(given);
  return refusal([&] { check_captures(kDeclared, given, pass); });
}

TEST(Captures, SoundOnesPassInAnyOrder) {
  EXPECT_EQ(capture_refusal([](auto&) {}), "accepted");
  EXPECT_EQ(capture_refusal([](auto&) {}, Pass::forward), "accepted");
  EXPECT_EQ(capture_refusal([](auto& c) { std::swap(c[0], c[3]); }), "accepted");
  EXPECT_EQ(refusal([] { check_captures({}, {}, Pass::forward); }), "accepted");
  // The forward pass gives no gradients and asks for none.
  EXPECT_EQ(capture_refusal([](auto& c) { c[1].grad = nullptr; }, Pass::forward), "accepted");
}

TEST(Captures, NamesAreThoseThatAreDeclared) {
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2].name = "slope"; }), "declare 'slopes: fp32 1d'",
              "it names cap, bias, slope, window");
  EXPECT_SAYS(capture_refusal([](auto& c) { c.clear(); }), "'slopes: fp32 1d'", "it names nothing");
  EXPECT_SAYS(capture_refusal([](auto& c) { c.push_back(Capture::number("offset", 1)); }), "gives 'offset'",
              "they declare slopes: fp32 1d, window: int, bias: bf16 4d grad, cap: float");
  EXPECT_SAYS(capture_refusal([](auto& c) { c.push_back(c[0]); }), "gives 'cap' twice");
  EXPECT_SAYS(refusal([] { check_captures({}, captures(), Pass::forward); }), "gives 'cap'",
              "declare no names");
}

TEST(Captures, ScalarsAndTensorsAreToldApart) {
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2] = Capture::number("slopes", 0.5); }),
              "slopes is given as the number 0.5", "'slopes: fp32 1d'", "Capture::tensor()");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[3] = Capture::tensor("window", address(0x100), {1}); }),
              "window is given as a tensor", "'window: int'", "Capture::number()");
}

TEST(Captures, ScalarsFitTheirType) {
  for (const double bad : {0.5, 3e9, -3e9, double{NAN}, double{INFINITY}})
    EXPECT_SAYS(capture_refusal([&](auto& c) { c[3].scalar = bad; }), "window is", "'window: int'",
                "integer from -2^31 to 2^31 - 1");
  for (const double good : {0.0, -2147483648.0, 2147483647.0})
    EXPECT_EQ(capture_refusal([&](auto& c) { c[3].scalar = good; }), "accepted");
  for (const double bad : {1e300, -0x1.ffffffp127, double{NAN}})
    EXPECT_SAYS(capture_refusal([&](auto& c) { c[0].scalar = bad; }), "cap is", "'cap: float'");
  for (const double rounded : {-3.4028235e38, 0x1.fffffefffffffp127})  // to the largest float
    EXPECT_EQ(capture_refusal([&](auto& c) { c[0].scalar = rounded; }), "accepted");
  EXPECT_EQ(capture_refusal([](auto& c) { c[0].scalar = -INFINITY; }), "accepted");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[0].grad = address<float>(0x100); }), "cap has a grad",
              "scalar");
}

TEST(Captures, TensorsHaveTheDeclaredRankAndType) {
  EXPECT_SAYS(capture_refusal([](auto& c) {
                c[2] = Capture::tensor("slopes", address(0x100), {2, 4});
              }),
              "slopes is given with 2 dimensions", "'slopes: fp32 1d'", "give 1");
  EXPECT_SAYS(capture_refusal([](auto& c) {
                c[1] = Capture::tensor("bias", address(0x100), {1, 1, 1, 1, 1, 1, 1}, address<float>(0x200));
              }),
              "bias is given with 7 dimensions");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2].rank = -1; }), "slopes is given with -1 dimensions");
  EXPECT_EQ(capture_refusal([](auto& c) { c[2].type = ElementType::fp32; }), "accepted");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2].type = ElementType::fp16; }), "slopes holds fp16",
              "'slopes: fp32 1d'");
}

TEST(Captures, TensorsHaveElementsThatExist) {
  EXPECT_SAYS(capture_refusal([](auto& c) { c[1].size[2] = 0; }), "bias has size 0 in dimension 2",
              "[1, 4, 0, 70]", "1 to 2^31 - 1");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2].size[0] = std::int64_t{1} << 31; }),
              "slopes has size 2147483648 in dimension 0");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2].size[0] = -3; }), "slopes has size -3");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[1].stride[3] = -1; }), "bias has stride -1 in dimension 3");
  EXPECT_EQ(capture_refusal([](auto& c) { c[1].stride = {-1, 0, 0, 1}; }), "accepted");  // broadcasts
  EXPECT_SAYS(capture_refusal([](auto& c) { c[1].stride[1] = std::int64_t{1} << 62; }),
              "bias reaches beyond 2^62 elements");
  EXPECT_SAYS(capture_refusal([](auto& c) {
                constexpr std::int64_t kHuge = std::numeric_limits<std::int32_t>::max();
                c[1] = Capture::tensor("bias", address(0x100), {kHuge, kHuge, kHuge, kHuge});
              }),
              "bias reaches beyond 2^62 elements");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2].data = nullptr; }), "slopes is null", "device memory");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[2].data = address(0x102); }), "slopes is at 0x102", "4 bytes");
  EXPECT_EQ(capture_refusal([](auto& c) { c[1].data = address(0x102); }), "accepted");  // of two bytes
}

TEST(Captures, GradientsAreGivenWhereTheyAreWanted) {
  EXPECT_SAYS(capture_refusal([](auto& c) { c[1].grad = nullptr; }), "bias has no grad",
              "'bias: bf16 4d grad'", "zeroed");
  for (const Pass pass : {Pass::forward, Pass::backward})
    EXPECT_SAYS(capture_refusal([](auto& c) { c[2].grad = address<float>(0x100); }, pass),
                "slopes has a grad", "'slopes: fp32 1d grad'");
  EXPECT_SAYS(capture_refusal([](auto& c) { c[1].grad = address<float>(0x102); }),
              "the grad of bias is at 0x102");
}

TEST(Captures, ParamsHoldThemInTheOrderOfTheDeclarations) {
  BackwardArgs args = backward_args();
  const std::vector<Capture> given = captures();
  args.captures = given;
  plan::ExecutionPlan plan = plan_of(spec(), shape_of(spec(), args));
  plan.spec.programs.declarations = kDeclared;
  const Params p = make_params(plan, args);
  EXPECT_EQ(p.captures[0].data, address(0xe00000));
  EXPECT_EQ(p.captures[0].grad, nullptr);
  EXPECT_EQ(p.captures[0].size[0], kHeadsQ);
  EXPECT_EQ(p.captures[0].stride[0], 1);
  EXPECT_EQ(p.captures[0].size[3], 1);
  EXPECT_EQ(p.captures[0].stride[3], 0);
  EXPECT_EQ(p.captures[1].data, address(0xc00000));
  EXPECT_EQ(p.captures[1].grad, address<float>(0xd00000));
  EXPECT_EQ(p.captures[1].size[2], kQueries);
  EXPECT_EQ(p.captures[1].stride[0], 0);  // of one element: means nothing
  EXPECT_EQ(p.captures[1].stride[1], kQueries * kKeys);
  EXPECT_EQ(p.captures[2].data, nullptr);
  EXPECT_EQ(static_cast<int>(p.scalars[0]), -7);
  EXPECT_EQ(p.scalars[1], 0x41f40000u);  // 30.5f

  ForwardArgs forward = forward_args();
  forward.captures = given;
  EXPECT_EQ(make_params(plan, forward).captures[1].grad, nullptr);
}

TEST(Arguments, ATypeOfAViewIsTheSpecs) {
  EXPECT_EQ(forward_refusal([](auto&, auto& args) { args.q.dtype = DType::bf16; }), "accepted");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.v.dtype = DType::fp16; }), "v is fp16",
              "the spec needs bf16");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.out.dtype = DType::fp32; }), "out is fp32");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.dk.dtype = DType::fp32; }), "dk is fp32");
  EXPECT_SAYS(backward_refusal([](auto&, auto& args) { args.out.dtype = DType::fp32; }), "out is fp32");
  const auto in_fp32 = [](DType out) {
    return backward_refusal([out](auto& s, auto& args) {
      s.partial.fp32_out = true;
      args.out.dtype = out;
    });
  };
  EXPECT_EQ(in_fp32(DType::fp32), "accepted");
  EXPECT_SAYS(in_fp32(DType::bf16), "out is bf16", "the spec needs fp32");
}

TEST(Arguments, PackedHeadsAreRowsOfOneHead) {
  ForwardArgs args = forward_args();
  args.q = ConstTensorView::bhsd(address(0x100000), 2, 8, 1, kDim);
  args.out = TensorView::bshd(address(0x400000), 2, 8, 1, kDim);
  args.q.stride[2] = -7;  // of one element: means nothing
  const AttentionShape shape = plan::fold_gqa({spec()}, {2, 8, 2, 1, 70}).shape;
  const ForwardArgs packed = fold_gqa(args);
  EXPECT_EQ(shape_of(spec(), packed), shape);
  EXPECT_EQ(packed.q.size, (std::array<std::int64_t, 4>{2, 2, 4, kDim}));
  EXPECT_EQ(packed.q.stride, (std::array<std::int64_t, 4>{8 * kDim, 4 * kDim, kDim, 1}));
  EXPECT_EQ(packed.out.size, packed.q.size);
  EXPECT_EQ(packed.out.stride, packed.q.stride);
  EXPECT_EQ(packed.k.size, args.k.size);
}

TEST(Arguments, WorkspaceIsLargeEnoughAndAligned) {
  EXPECT_EQ(refusal([] { check_workspace({}, 0); }), "accepted");
  EXPECT_EQ(refusal([] { check_workspace({address(0x100), 512}, 512); }), "accepted");
  EXPECT_SAYS(refusal([] { check_workspace({address(0x100), 511}, 512); }), "511 bytes", "512 are needed");
  EXPECT_SAYS(refusal([] { check_workspace({nullptr, 512}, 512); }), "null", "512 are needed");
  EXPECT_SAYS(refusal([] { check_workspace({address(0x180), 512}, 512); }), "workspace is at 0x180", "256");
}

TEST(Arguments, ParamsCarryWhatWasGiven) {
  AttentionSpec s = spec();
  s.dropout = true;
  s.kv = KvLayout::padded();
  s.block_map = {32, 16};
  BackwardArgs args = backward_args();
  args.dropout_p = 0.25;
  args.seed = 0x1122334455667788u;
  args.offset = 0x99aabbccddeeff00u;
  args.rng_state = address<std::uint64_t>(0xc00000);
  args.dlse = address<float>(0xd00000);
  args.zero_unused_rows = true;
  args.kv_lengths = address<std::int32_t>(0xa00000);
  args.block_map = {address<const std::uint8_t>(0xb00000), {1, kHeadsQ, 4, 5}};
  args.workspace = {address(0x100000), 4096};
  plan::ExecutionPlan plan = plan_of(s, shape_of(s, args));
  plan.needs = {.row_stats = true, .row_terms = true, .dq_accum = true, .semaphores = true, .list_sets = 1};
  plan.workspace = {.d = 0,
                    .lse_padded = 256,
                    .row_terms = 512,
                    .dq_accum = 768,
                    .semaphores = 1024,
                    .list_count = 1280,
                    .list_entries = 1536,
                    .list_rank = 1792,
                    .bytes = 2048};
  plan.heads_cleared = 3;
  plan.lpt_heads = 2;

  const Params p = make_params(plan, args);
  EXPECT_EQ(p.q.data, args.q.data);
  EXPECT_EQ(p.k.stride_h, kKeys * kDim);
  EXPECT_EQ(p.o.stride_s, kDim);
  EXPECT_EQ(p.dout.data, args.dout.data);
  EXPECT_EQ(p.dq.data, args.dq.data);
  EXPECT_EQ(p.dk.data, args.dk.data);
  EXPECT_EQ(p.dv.stride_b, kHeadsKv * kKeys * kDim);
  EXPECT_EQ(p.lse.data, args.lse);
  EXPECT_EQ(p.kv_lengths, args.kv_lengths);
  EXPECT_EQ(p.d, address<float>(0x100000));
  EXPECT_EQ(p.lse_padded, address<float>(0x100100));
  EXPECT_EQ(p.row_terms, address<float>(0x100200));
  EXPECT_EQ(p.dq_accum, address<float>(0x100300));
  EXPECT_EQ(p.semaphores, address<int>(0x100400));
  EXPECT_EQ(p.lists.count, address<int>(0x100500));
  EXPECT_EQ(p.lists.entries, address<int>(0x100600));
  EXPECT_EQ(p.lists.rank, nullptr);
  EXPECT_EQ(p.map_batch, 1);
  EXPECT_EQ(p.map_heads, 4);
  EXPECT_EQ(p.map_rows, 4);
  EXPECT_EQ(p.map_columns, 5);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads_q, 4);
  EXPECT_EQ(p.heads_kv, 2);
  EXPECT_EQ(p.seqlen_q, 100);
  EXPECT_EQ(p.seqlen_kv, 70);
  EXPECT_EQ(p.seqlen_q_padded, 128);
  EXPECT_EQ(p.heads_cleared, 3);
  EXPECT_EQ(p.lpt_heads, 2);
  EXPECT_FLOAT_EQ(p.softmax_scale, 0.125f);
  EXPECT_FLOAT_EQ(p.keep_scale, 4.0f / 3.0f);
  EXPECT_EQ(p.drop_share, dropout_parameters(0.25).drop_share);
  EXPECT_EQ(p.seed_lo, 0x55667788u);
  EXPECT_EQ(p.seed_hi, 0x11223344u);
  EXPECT_EQ(p.offset_lo, 0xddeeff00u);
  EXPECT_EQ(p.offset_hi, 0x99aabbccu);
  EXPECT_EQ(p.rng_state, address<unsigned>(0xc00000));
  EXPECT_EQ(p.dlse, args.dlse);
  EXPECT_EQ(p.zero_unused_rows, 1);
}

TEST(Arguments, ParamsSayWhereAPassKeepsItsParts) {
  const auto params = [](const auto& args, Pass pass) {
    plan::ExecutionPlan plan = plan_of(spec(), shape_of(spec(), args), pass);
    plan.needs = {.num_splits = 3};
    plan.workspace = {.o_splits = 256, .lse_splits = 512, .dk_splits = 768, .dv_splits = 1024, .bytes = 2048};
    return make_params(plan, args);
  };
  ForwardArgs forward = forward_args();
  forward.workspace = {address(0x100000), 4096};
  const Params f = params(forward, Pass::forward);
  EXPECT_EQ(f.num_splits, 3);
  EXPECT_EQ(f.o_splits, address<float>(0x100100));
  EXPECT_EQ(f.lse_splits, address<float>(0x100200));
  EXPECT_EQ(f.dk_splits, nullptr);
  BackwardArgs backward = backward_args();
  backward.workspace = {address(0x100000), 4096};
  const Params b = params(backward, Pass::backward);
  EXPECT_EQ(b.num_splits, 3);
  EXPECT_EQ(b.o_splits, nullptr);
  EXPECT_EQ(b.dk_splits, address<float>(0x100300));
  EXPECT_EQ(b.dv_splits, address<float>(0x100400));
}

TEST(Arguments, ParamsTellHowManyRowsPackedTensorsHave) {
  AttentionSpec s = spec();
  ForwardArgs args = forward_args();
  pack(s, args);
  const plan::ExecutionPlan plan = plan_of(s, shape_of(s, args));
  const Params p = make_params(plan, args);
  EXPECT_EQ(p.rows_q, kQueries);
  EXPECT_EQ(p.rows_kv, kKeys);
  EXPECT_EQ(p.seqlen_q, 60);

  // Lists are made without tensors.
  const Params of_lists =
      make_params(plan, ListArgs{.cu_seqlens_q = args.cu_seqlens_q, .cu_seqlens_kv = args.cu_seqlens_kv});
  EXPECT_EQ(of_lists.rows_q, std::numeric_limits<int>::max());
  EXPECT_EQ(of_lists.rows_kv, std::numeric_limits<int>::max());
  EXPECT_EQ(of_lists.cu_seqlens_q, args.cu_seqlens_q);
}

TEST(Arguments, ParamsWithoutFeaturesAreNeutral) {
  ForwardArgs args = forward_args();
  args.q.size[0] = args.k.size[0] = args.v.size[0] = args.out.size[0] = 1;
  args.q.stride[0] = 12345;  // of one batch: means nothing
  args.softmax_scale = 0.3f;
  const Params p = make_params(plan_of(spec(), shape_of(spec(), args)), args);
  EXPECT_EQ(p.q.stride_b, 0);
  EXPECT_EQ(p.softmax_scale, 0.3f);
  EXPECT_EQ(p.drop_share, 0u);
  EXPECT_EQ(p.keep_scale, 1.0f);
  EXPECT_EQ(p.block_map, nullptr);
  EXPECT_EQ(p.d, nullptr);
  EXPECT_EQ(p.dq.data, nullptr);
  EXPECT_EQ(p.dlse, nullptr);
  EXPECT_EQ(p.rng_state, nullptr);
  EXPECT_EQ(p.zero_unused_rows, 0);
}

TEST(Arguments, PointersLeaveOutNulls) {
  ForwardArgs args = forward_args();
  args.lse = nullptr;
  std::string names;
  for (const NamedPointer& named : pointers_of(args)) names += std::string(named.name) + " ";
  EXPECT_EQ(names, "q k v out ");
  EXPECT_EQ(pointers_of(backward_args()).size(), 9u);

  BackwardArgs backward = backward_args();
  const std::vector<Capture> given = captures();
  backward.captures = given;
  backward.sinks = backward.dsinks = address<float>(0x100);
  backward.cu_seqlens_q = backward.cu_seqlens_kv = address<const std::int32_t>(0x200);
  backward.dlse = address<float>(0x300);
  backward.rng_state = address<std::uint64_t>(0x400);
  // Besides the nine: two tensors, one gradient, both offsets, sinks and their gradient, dLSE, the dropout
  // seed.
  EXPECT_EQ(pointers_of(backward).size(), 9u + 3 + 2 + 2 + 2);
}

}  // namespace
}  // namespace flashjit

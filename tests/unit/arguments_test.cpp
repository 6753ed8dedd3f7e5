#include "arguments.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "reference/reference.hpp"

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
  return {.q = ConstTensorView::bhsd(address(0x10000), kBatch, kHeadsQ, kQueries, kDim),
          .k = ConstTensorView::bhsd(address(0x20000), kBatch, kHeadsKv, kKeys, kDim),
          .v = ConstTensorView::bhsd(address(0x30000), kBatch, kHeadsKv, kKeys, kDim),
          .out = TensorView::bhsd(address(0x40000), kBatch, kHeadsQ, kQueries, kDim),
          .lse = address<float>(0x50000)};
}

BackwardArgs backward_args() {
  const ForwardArgs f = forward_args();
  return {.q = f.q,
          .k = f.k,
          .v = f.v,
          .out = f.out,
          .lse = f.lse,
          .dout = ConstTensorView::bhsd(address(0x60000), kBatch, kHeadsQ, kQueries, kDim),
          .dq = TensorView::bhsd(address(0x70000), kBatch, kHeadsQ, kQueries, kDim),
          .dk = TensorView::bhsd(address(0x80000), kBatch, kHeadsKv, kKeys, kDim),
          .dv = TensorView::bhsd(address(0x90000), kBatch, kHeadsKv, kKeys, kDim)};
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
  EXPECT_EQ(shape_of(forward_args()), (AttentionShape{kBatch, kHeadsQ, kHeadsKv, kQueries, kKeys}));
  EXPECT_EQ(shape_of(backward_args()), (AttentionShape{kBatch, kHeadsQ, kHeadsKv, kQueries, kKeys}));
}

TEST(Arguments, OtherMemoryLayoutsPass) {
  EXPECT_EQ(forward_refusal([](auto&, ForwardArgs& args) {
              args.q = ConstTensorView::bshd(address(0x10000), kBatch, kQueries, kHeadsQ, kDim);
              args.out = TensorView::bshd(address(0x40000), kBatch, kQueries, kHeadsQ, kDim);
            }),
            "accepted");
  EXPECT_EQ(backward_refusal([](auto&, BackwardArgs& args) {
              args.dq = TensorView::packed_qkv(address(0x70000), kBatch, kQueries, kHeadsQ, kDim, 0, 2);
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
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.q.data = address(0x10008); }), "q is at 0x10008",
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
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.lse = address<float>(0x50002); }), "lse is at",
              "4 bytes");
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
}

TEST(Arguments, KvLengths) {
  EXPECT_SAYS(forward_refusal([](auto& s, auto&) { s.kv_lengths = true; }), "kv_lengths is null");
  EXPECT_SAYS(forward_refusal([](auto&, auto& args) { args.kv_lengths = address<std::int32_t>(0x100); }),
              "kv_lengths is given", "spec.kv_lengths");
  EXPECT_SAYS(backward_refusal([](auto& s, auto& args) {
                s.kv_lengths = true;
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

TEST(Arguments, WorkspaceIsLargeEnoughAndAligned) {
  EXPECT_EQ(refusal([] { check_workspace({}, 0); }), "accepted");
  EXPECT_EQ(refusal([] { check_workspace({address(0x100), 512}, 512); }), "accepted");
  EXPECT_SAYS(refusal([] { check_workspace({address(0x100), 511}, 512); }), "511 bytes", "512 are needed");
  EXPECT_SAYS(refusal([] { check_workspace({nullptr, 512}, 512); }), "null", "512 are needed");
  EXPECT_SAYS(refusal([] { check_workspace({address(0x180), 512}, 512); }), "workspace is at 0x180", "256");
}

plan::ExecutionPlan plan_of(const AttentionSpec& s, const AttentionShape& shape) {
  plan::ExecutionPlan plan;
  plan.spec = s;
  plan.shape = shape;
  return plan;
}

TEST(Arguments, ParamsCarryWhatWasGiven) {
  AttentionSpec s = spec();
  s.dropout = true;
  s.kv_lengths = true;
  s.block_map = {32, 16};
  BackwardArgs args = backward_args();
  args.dropout_p = 0.25;
  args.seed = 0x1122334455667788u;
  args.offset = 0x99aabbccddeeff00u;
  args.kv_lengths = address<std::int32_t>(0xa0000);
  args.block_map = {address<const std::uint8_t>(0xb0000), {1, kHeadsQ, 4, 5}};
  args.workspace = {address(0x100000), 4096};
  plan::ExecutionPlan plan = plan_of(s, shape_of(args));
  plan.needs = {.row_stats = true, .dq_accum = true, .tickets = true, .lists = true, .ranks = false};
  plan.workspace = {.d = 0,
                    .lse_padded = 256,
                    .dq_accum = 512,
                    .tickets = 768,
                    .list_count = 1024,
                    .list_entries = 1280,
                    .list_rank = 1536,
                    .bytes = 1792};

  const Params p = make_params(plan, args);
  EXPECT_EQ(p.q.data, args.q.data);
  EXPECT_EQ(p.k.stride_h, kKeys * kDim);
  EXPECT_EQ(p.o.stride_s, kDim);
  EXPECT_EQ(p.dout.data, args.dout.data);
  EXPECT_EQ(p.dq.data, args.dq.data);
  EXPECT_EQ(p.dk.data, args.dk.data);
  EXPECT_EQ(p.dv.stride_b, kHeadsKv * kKeys * kDim);
  EXPECT_EQ(p.lse, args.lse);
  EXPECT_EQ(p.kv_lengths, args.kv_lengths);
  EXPECT_EQ(p.d, address<float>(0x100000));
  EXPECT_EQ(p.lse_padded, address<float>(0x100100));
  EXPECT_EQ(p.dq_accum, address<float>(0x100200));
  EXPECT_EQ(p.tickets, address<int>(0x100300));
  EXPECT_EQ(p.lists.count, address<int>(0x100400));
  EXPECT_EQ(p.lists.entries, address<int>(0x100500));
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
  EXPECT_FLOAT_EQ(p.softmax_scale, 0.125f);
  EXPECT_FLOAT_EQ(p.keep_scale, 4.0f / 3.0f);
  EXPECT_EQ(p.keep_below, reference::dropout_parameters(0.25).keep_below);
  EXPECT_EQ(p.seed_lo, 0x55667788u);
  EXPECT_EQ(p.seed_hi, 0x11223344u);
  EXPECT_EQ(p.offset_lo, 0xddeeff00u);
  EXPECT_EQ(p.offset_hi, 0x99aabbccu);
}

TEST(Arguments, ParamsWithoutFeaturesAreNeutral) {
  ForwardArgs args = forward_args();
  args.q.size[0] = args.k.size[0] = args.v.size[0] = args.out.size[0] = 1;
  args.q.stride[0] = 12345;  // of one batch: means nothing
  args.softmax_scale = 0.3f;
  const Params p = make_params(plan_of(spec(), shape_of(args)), args);
  EXPECT_EQ(p.q.stride_b, 0);
  EXPECT_EQ(p.softmax_scale, 0.3f);
  EXPECT_EQ(p.keep_below, 0xffffffffu);
  EXPECT_EQ(p.keep_scale, 1.0f);
  EXPECT_EQ(p.block_map, nullptr);
  EXPECT_EQ(p.d, nullptr);
  EXPECT_EQ(p.dq.data, nullptr);
}

TEST(Arguments, PointersLeaveOutNulls) {
  ForwardArgs args = forward_args();
  args.lse = nullptr;
  std::string names;
  for (const NamedPointer& named : pointers_of(args)) names += std::string(named.name) + " ";
  EXPECT_EQ(names, "q k v out ");
  EXPECT_EQ(pointers_of(backward_args()).size(), 9u);
}

}  // namespace
}  // namespace flashjit

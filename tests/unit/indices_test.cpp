// Lists of keys for each query without a GPU: what a call may be given, and what the CPU reference makes of
// it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "call/arguments.hpp"
#include "flashjit/reference.hpp"
#include "plan/plan.hpp"
#include "reference/reference.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit::test {
namespace {

/// Three sequences of 5 queries, of 6 heads over 2.
ForwardArgs sparse_args() {
  return {.q = ConstTensorView::bhsd(address(0x100000), 3, 6, 5, 64),
          .k = ConstTensorView::bhsd(address(0x200000), 3, 2, 90, 64),
          .v = ConstTensorView::bhsd(address(0x300000), 3, 2, 90, 64),
          .out = TensorView::bhsd(address(0x400000), 3, 6, 5, 64),
          .indices = IndicesView::contiguous(address<std::int32_t>(0x500000), 3, 5, 2, 40)};
}

template <class Change>
std::string refusal(Change&& change) {
  KernelSpec spec = parse_spec("bf16:d64:indices");
  ForwardArgs args = sparse_args();
  change(spec, args);
  return refusal_of([&] {
    spec.validate();
    check_arguments(spec, args);
  });
}

TEST(Indices, SoundArgumentsPass) {
  EXPECT_EQ(refusal([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(refusal([](auto&, auto& args) { args.indices.size[0] = 1; }), "accepted");
  EXPECT_EQ(refusal([](auto&, auto& args) { args.indices.size[3] = 0, args.indices.data = nullptr; }),
            "accepted");
  EXPECT_EQ(refusal([](auto& spec, auto& args) {
              spec.varlen = true;
              args.q = ConstTensorView::bhsd(address(0x100000), 1, 6, 50, 64);
              args.out = TensorView::bhsd(address(0x400000), 1, 6, 50, 64);
              args.k = ConstTensorView::bhsd(address(0x200000), 1, 2, 90, 64);
              args.v = ConstTensorView::bhsd(address(0x300000), 1, 2, 90, 64);
              args.cu_seqlens_q = args.cu_seqlens_kv = address<std::int32_t>(0x700000);
              args.batch_size = 3, args.max_seqlen_q = 40, args.max_seqlen_kv = 40;
              args.indices = IndicesView::contiguous(address<std::int32_t>(0x500000), 1, 50, 2, 40);
            }),
            "accepted");
}

TEST(Indices, WrongArgumentsAreRefused) {
  expect_says(refusal([](auto& spec, auto&) { spec.indices = false; }), {"indices is given", "spec.indices"});
  expect_says(refusal([](auto&, auto& args) { args.indices.data = nullptr; }),
              {"indices is null", "int32 [3, 5, 2, top-k]"});
  for (const std::size_t i : {0, 1, 2})
    expect_says(refusal([&](auto&, auto& args) { args.indices.size[i] = 4; }),
                {"indices has size [", "[1 or 3, 5, 2, top-k]"});
  expect_says(refusal([](auto&, auto& args) { args.indices.size[3] = -1; }), {"indices has top-k -1"});
  expect_says(refusal([](auto&, auto& args) { args.indices.stride[3] = 2; }),
              {"indices has stride 2 in top-k"});
  expect_says(refusal([](auto&, auto& args) { args.indices.stride[1] = -40; }),
              {"indices has stride -40 in queries"});
  expect_says(refusal([](auto&, auto& args) { args.indices.data = address<std::int32_t>(0x500002); }),
              {"indices is at 0x500002", "4 bytes"});
  expect_says(refusal([](auto& spec, auto&) { spec.dropout = true; }), {"indices", "dropout"});
  const auto of_lengths = [](std::uintptr_t at, std::int64_t stride) {
    return refusal([&](auto&, auto& args) {
      args.indices.topk_length = address<std::int32_t>(at);
      args.indices.topk_length_stride = {5, stride};
    });
  };
  for (const std::int64_t stride : {0, 1, 7}) EXPECT_EQ(of_lengths(0x600000, stride), "accepted");
  expect_says(of_lengths(0x600000, -1), {"topk_length has stride -1 in queries"});
  expect_says(of_lengths(0x600001, 1), {"topk_length is at 0x600001", "4 bytes"});
  expect_says(refusal([](auto& spec, auto& args) {
                spec.indices = false, args.indices = {};
                args.indices.topk_length = address<std::int32_t>(0x600000);
              }),
              {"topk_length is given without indices"});
  expect_says(refusal([](auto& spec, auto&) { spec.block_map = {64, 64}; }), {"indices", "block_map"});
  expect_says(
      refusal([](auto& spec, auto&) { spec.pass = Pass::backward, spec.reproducible.deterministic = true; }),
      {"indices", "deterministic"});
}

/// One query of two heads over keys whose scores are their numbers' logarithms, and whose values are these.
reference::Problem numbered_keys(std::vector<std::int32_t> indices) {
  constexpr int kKeys = 6, kDim = 8;
  reference::Problem problem{.spec = parse_spec("fp32:d8:indices"), .shape = {1, 2, 1, 1, kKeys}};
  problem.softmax_scale = 1;
  problem.q.assign(2 * kDim, 0);
  problem.q[0] = problem.q[kDim] = 1;
  for (int key = 0; key < kKeys; ++key)
    for (int i = 0; i < kDim; ++i) {
      problem.k.push_back(i == 0 ? std::log(key + 1) : 0);
      problem.v.push_back(key + 1);
    }
  problem.indices = std::move(indices);
  return problem;
}

TEST(Indices, AKeyThatIsNamedTwiceCountsTwice) {
  const reference::Forward result = reference::forward(numbered_keys({4, 1, -1, 4, 6, 1000000}));
  EXPECT_NEAR(result.out[0], (5.0 * 5 + 5 * 5 + 2 * 2) / 12, 1e-12);
  EXPECT_NEAR(result.lse[1], std::log(12), 1e-12);
}

TEST(Indices, OnlyTheFirstEntriesOfAListCount) {
  constexpr int kQueries = 4, kTopK = 3, kDim = 8;
  const std::vector<float> ones(kQueries * kDim, 1), k(5 * kDim);
  std::vector<float> v(5 * kDim), out(kQueries * kDim, -1), lse(kQueries);
  for (int i = 0; i < 5 * kDim; ++i) v[i] = static_cast<float>(1 << i / kDim);
  const std::vector<std::int32_t> lists = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2}, lengths = {2, 0, -4, 9};
  ForwardArgs args{.q = ConstTensorView::bhsd(ones.data(), 1, 1, kQueries, kDim),
                   .k = ConstTensorView::bhsd(k.data(), 1, 1, 5, kDim),
                   .v = ConstTensorView::bhsd(v.data(), 1, 1, 5, kDim),
                   .out = TensorView::bhsd(out.data(), 1, 1, kQueries, kDim),
                   .lse = lse.data(),
                   .indices = IndicesView::contiguous(lists.data(), 1, kQueries, 1, kTopK)};
  args.indices.topk_length = lengths.data();
  args.indices.topk_length_stride = {0, 1};
  reference_forward(parse_spec("fp32:d8:indices"), args);
  const float found[] = {out[0], out[kDim], out[2 * kDim], out[3 * kDim]};
  EXPECT_FLOAT_EQ(found[0], 1.5f);
  EXPECT_EQ(found[1], 0);
  EXPECT_EQ(found[2], 0);
  EXPECT_FLOAT_EQ(found[3], 7.0f / 3);
  EXPECT_EQ(lse[1], -std::numeric_limits<float>::infinity());
  EXPECT_FLOAT_EQ(lse[3], std::log(3.0f));
}

TEST(Indices, WhatNoListNamesMayBeNaN) {
  reference::Problem problem = numbered_keys({0, 2, 2});
  for (std::size_t i = 8; i < 16; ++i) problem.k[i] = problem.v[i] = std::numeric_limits<double>::quiet_NaN();
  problem.dout.assign(16, 1);
  problem.spec.pass = Pass::backward;
  EXPECT_NEAR(reference::forward(problem).out[0], (1.0 + 2 * 3 * 3) / 7, 1e-12);
  const reference::Backward gradients = reference::backward(problem);
  for (const double value : gradients.dq) EXPECT_TRUE(std::isfinite(value));
  EXPECT_EQ(gradients.dv[8], 0);
  EXPECT_NEAR(gradients.dv[16], 2 * 6.0 / 7, 1e-12);  // of two heads
}

TEST(Indices, AListOfNoKeysGivesNothing) {
  const reference::Forward result = reference::forward(numbered_keys({-1, -5, 6}));
  EXPECT_EQ(result.out[0], 0);
  EXPECT_EQ(result.lse[0], -std::numeric_limits<double>::infinity());
}

TEST(Indices, HeadsOfOneQueryAreATileOnHopper) {
  const DeviceInfo hopper = DeviceInfo::parse("sm_90a");
  const KernelSpec spec = parse_spec("fwd:bf16:d576x512:shared_kv:indices");
  const plan::ExecutionPlan plan = plan::make_plan(spec, {1, 128, 1, 4096, 8192}, hopper, {});
  EXPECT_EQ(plan.config.family, Family::sm90);
  EXPECT_TRUE(plan.schedule.stream_k && plan.config.pack_gqa);
  EXPECT_FALSE(plan.fold_gqa);
  const plan::ExecutionPlan one = plan::make_plan(spec, {1, 128, 1, 1, 8192}, hopper, {});
  EXPECT_FALSE(one.fold_gqa) << "a query's heads share its list";
}

}  // namespace
}  // namespace flashjit::test

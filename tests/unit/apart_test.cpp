#include "call/apart.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "call/arguments.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit {
namespace {

using test::address;
using test::expect_says;

constexpr std::int64_t kRows = 96, kDim = 64;

ForwardArgs forward_args() {
  return {.q = ConstTensorView::bhsd(address(0x100000), 2, 4, kRows, kDim),
          .k = ConstTensorView::bhsd(address(0x200000), 2, 4, kRows, kDim),
          .v = ConstTensorView::bhsd(address(0x300000), 2, 4, kRows, kDim),
          .out = TensorView::bhsd(address(0x400000), 2, 4, kRows, kDim),
          .lse = address<float>(0x500000)};
}

template <class Change>
std::string refusal(Change&& change, AttentionSpec spec = {.dtype = DType::bf16, .head_dim = kDim}) {
  ForwardArgs args = forward_args();
  change(args);
  return test::refusal_of([&] { check_arguments(spec, args); });
}

TEST(Apart, ViewsOfOneBufferMayTakeTurns) {
  // [2, rows, 4 heads, 3, dim]: O has a place of its own beside Q's.
  const std::array<std::int64_t, 4> stride = {kRows * 12 * kDim, 3 * kDim, 12 * kDim, 1};
  EXPECT_EQ(refusal([&](ForwardArgs& args) {
              args.q.stride = args.out.stride = stride;
              args.out.data = address(0x100000 + 2 * kDim);
            }),
            "accepted");
  // Three places further it is the next head's.
  expect_says(refusal([&](ForwardArgs& args) {
                args.q.stride = args.out.stride = stride;
                args.out.data = address(0x100000 + 6 * kDim);
              }),
              {"out is written, but has memory of q"});
}

TEST(Apart, RowsOfAShiftedViewAreOthers) {
  const std::array<std::int64_t, 4> stride = {4 * (kRows + 1) * kDim, (kRows + 1) * kDim, kDim, 1};
  expect_says(refusal([&](ForwardArgs& args) {
                args.q.stride = args.out.stride = stride;
                args.out.data = address(0x100000 + 2 * kDim);
              }),
              {"out is written, but has memory of q"});
  EXPECT_EQ(refusal([&](ForwardArgs& args) {
              args.q.stride = args.out.stride = stride;
              args.q.size[2] = args.k.size[2] = args.v.size[2] = args.out.size[2] = 1;
              args.out.data = address(0x100000 + 2 * kDim);
            }),
            "accepted");
}

TEST(Apart, ResultsAreApartFromAllThatIsRead) {
  const AttentionSpec packed{.dtype = DType::bf16, .head_dim = kDim, .varlen = true, .sinks = true};
  const auto change = [](ForwardArgs& args) {
    for (auto* size : {&args.q.size, &args.k.size, &args.v.size, &args.out.size}) (*size)[0] = 1;
    args.cu_seqlens_q = args.cu_seqlens_kv = address<std::int32_t>(0x600000);
    args.sinks = address<float>(0x700000);
    args.batch_size = 3, args.max_seqlen_q = args.max_seqlen_kv = kRows;
  };
  EXPECT_EQ(refusal(change, packed), "accepted");
  const auto with = [&](auto&& more) {
    return refusal([&](ForwardArgs& args) { change(args), more(args); }, packed);
  };
  expect_says(with([](ForwardArgs& args) { args.lse = address<float>(0x60000c); }),
              {"lse is written, but has memory of cu_seqlens_q"});
  EXPECT_EQ(with([](ForwardArgs& args) { args.lse = address<float>(0x600010); }), "accepted");
  expect_says(with([](ForwardArgs& args) { args.out.data = address(0x700000); }), {"memory of sinks"});
  const Capture bias = Capture::tensor("bias", address(0x4017f0), {10, 10});
  expect_says(with([&](ForwardArgs& args) {
                args.captures = {&bias, 1};
              }),
              {"out is written, but has memory of bias"});
}

}  // namespace
}  // namespace flashjit

// O as codes: the text, what specs and calls refuse, who plans it, and the CPU reference's codes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "call/arguments.hpp"
#include "flashjit/reference.hpp"
#include "plan/plan.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit {
namespace {

using test::refused_spec;

const std::string kCodesByCall = ":out{e4m3}", kCodesByRow = ":out{e4m3:row:fp32:apart}",
                  kCodesOfFourBits = ":out{e2m1:g16:e4m3:apart:scaled}";

TEST(OutCodes, AreAFieldOfTheText) {
  for (const std::string& format : {kCodesByCall, kCodesByRow, kCodesOfFourBits}) {
    const KernelSpec spec = parse_spec("fwd:bf16:d64" + format + ":causal:sinks");
    EXPECT_EQ(to_string(spec), "fwd:bf16:d64:causal" + format + ":sinks");
    EXPECT_EQ(parse_spec(to_string(spec)), spec.normalized());
  }
  const StoredKvRow row = parse_spec("bf16:d64x80" + kCodesOfFourBits).stored_out();
  EXPECT_EQ(row.type, DType::int8);
  EXPECT_EQ(row.columns, 40);
  EXPECT_EQ(parse_spec("bf16:d64" + kCodesByRow).stored_out().type, DType::e4m3);
  EXPECT_EQ(parse_spec("bf16:d64").stored_out().type, DType::bf16);
}

TEST(OutCodes, RefuseWhatHasNoWholeO) {
  EXPECT_EQ(refused_spec("bf16:d64" + kCodesByRow + ":kvlen:map64x64:dropout:sinks:row_max:causal"),
            "accepted");
  EXPECT_EQ(refused_spec("bf16:d64" + kCodesByCall + ":varlen:pages16:kve4m3:q_codes:invariant"), "accepted");
  expect_in("out_format is int8; O is stored as e4m3, ", refused_spec("bf16:d64:out{int8}"));
  expect_in("it must then be a multiple of 16", refused_spec("bf16:d64x72" + kCodesByCall));
  EXPECT_EQ(refused_spec("bf16:d64:indices" + kCodesByCall), "accepted");
  expect_in("and running_state is set, too", refused_spec("bf16:d64:running_state" + kCodesByCall));
  expect_in("and fp32_out is set, too", refused_spec("bf16:d64:fp32_out" + kCodesByCall));
  for (const char* pass : {"bwd", "jvp", "bwd_jvp"})
    expect_in("codes of O are for inference and have no derivative",
              refused_spec(std::string(pass) + ":bf16:d64" + kCodesByCall));
}

TEST(OutCodes, ArePlannedWithSplitKeysToo) {
  const auto planned = [](const std::string& text, const AttentionShape& shape, const char* arch) {
    return plan::make_plan(parse_spec(text), shape, DeviceInfo::parse(arch), {}).config;
  };
  const AttentionShape few{1, 8, 2, 1, 100000}, many{2, 8, 2, 4096, 4096};
  for (const std::string& format : {kCodesByCall, kCodesByRow, kCodesOfFourBits}) {
    EXPECT_EQ(planned("bf16:d128:causal" + format, many, "sm_90a").family, Family::sm90);
    EXPECT_EQ(planned("bf16:d128:pages64:causal" + format, few, "sm_90a"),
              planned("bf16:d128:pages64:causal", few, "sm_90a"));
    EXPECT_EQ(planned("bf16:d128:causal" + format, few, "sm_80"), planned("bf16:d128:causal", few, "sm_80"));
    EXPECT_EQ(planned("bf16:d256:causal" + format, many, "sm_90a").family, Family::sm90);
    const Family wide = format == kCodesByRow ? Family::simt : Family::sm90;
    EXPECT_EQ(planned("bf16:d320:causal" + format, many, "sm_90a").family, wide);
  }
}

/// A call over two sequences of two heads with 64 columns.
struct OutCodesCall {
  AttentionSpec spec;
  std::vector<float> memory = std::vector<float>(1 << 15);
  ForwardArgs args;

  explicit OutCodesCall(const std::string& text) : spec(parse_spec(text)) {
    char* data = reinterpret_cast<char*>(memory.data());
    args.q = args.k = args.v = ConstTensorView::bhsd(data, 2, 2, 3, 64);
    args.out = TensorView::bhsd(data + (1 << 14), 2, 2, 3, spec.stored_out().columns);
  }
  std::string message() const {
    return test::refusal_of([&] { check_arguments(spec, args); });
  }
};

TEST(OutCodes, ScalesAreCheckedInTheCallersWords) {
  OutCodesCall by_call("bf16:d64" + kCodesByCall);
  expect_in("out_scale is null, but O is stored as e4m3: give one float", by_call.message());
  by_call.args.out_scale = by_call.memory.data() + (1 << 14);
  EXPECT_EQ(by_call.message(), "accepted");
  by_call.args.out.size[3] = 32;
  expect_in("out has head_dim 32, but the spec says 64", by_call.message());

  OutCodesCall by_row("bf16:d64" + kCodesByRow);
  expect_in("out_block_scale is not given, but out is e4m3:row:fp32:apart", by_row.message());
  by_row.args.out_block_scale = TensorView::bhsd(by_row.memory.data() + (1 << 14), 2, 2, 3, 1);
  EXPECT_EQ(by_row.message(), "accepted");
  by_row.args.out_scale = by_row.memory.data();
  expect_in("out_scale is given, but O is e4m3:row:fp32:apart, whose scales the kernel finds",
            by_row.message());

  OutCodesCall none("bf16:d64");
  none.args.out_scale = none.memory.data();
  expect_in("out_scale is given, but O is not stored as codes", none.message());
}

TEST(OutCodes, SwizzledScalesAreNvfp4sOfHeadsOfWholeTiles) {
  expect_in("swizzled_scales is set and out_format is e4m3",
            refused_spec("bf16:d64:swizzled_scales" + kCodesByCall));
  expect_in("head_dim_v is 96; give a multiple of 64",
            refused_spec("bf16:d96:swizzled_scales" + kCodesOfFourBits));
  OutCodesCall call("bf16:d64:swizzled_scales" + kCodesOfFourBits);
  call.args.out_scale = call.memory.data();
  call.args.out_block_scale = TensorView::bhsd(call.memory.data() + (1 << 14), 2, 2, 3, 4);
  expect_in("but the spec has swizzled_scales: give e4m3 [1, 1, 128, 8], contiguous", call.message());
  call.args.out_block_scale = TensorView::bhsd(call.memory.data() + (1 << 14), 1, 1, 128, 8);
  EXPECT_EQ(call.message(), "accepted");
}

TEST(OutCodes, FollowFromTheTypeOfOut) {
  OutCodesCall call("bf16:d64");
  call.args.q.dtype = call.args.k.dtype = call.args.v.dtype = DType::bf16;
  call.args.out.dtype = DType::e4m3;
  call.args.out_scale = call.memory.data();
  EXPECT_EQ(to_string(spec_of(call.args)), "bf16:d64" + kCodesByCall + ":shared_kv");
  call.args.out_scale = nullptr;
  call.args.out_block_scale = TensorView::bhsd(call.memory.data() + (1 << 14), 2, 2, 3, 1, DType::fp32);
  call.spec = spec_of(call.args);
  EXPECT_EQ(to_string(call.spec), "bf16:d64" + kCodesByRow + ":shared_kv");
  EXPECT_EQ(call.message(), "accepted");
}

/// A query's only key is V's row: rounded to the nearest, too large ones to 448, with NaN.
TEST(OutCodes, TheReferenceRounds) {
  const float out_scale = 0.5f, nan = std::nanf("");
  std::vector<float> q(16, 1.0f), v(16, 0.0f);
  v[0] = 1.0f, v[1] = 1e6f, v[2] = -1e6f, v[3] = nan, v[4] = 8.5f, v[5] = 9.5f;  // 17 and 19: between codes
  std::vector<std::uint8_t> codes(16, 1);
  ForwardArgs args{.q = ConstTensorView::bhsd(q.data(), 1, 1, 1, 16),
                   .k = ConstTensorView::bhsd(q.data(), 1, 1, 1, 16),
                   .v = ConstTensorView::bhsd(v.data(), 1, 1, 1, 16),
                   .out = TensorView::bhsd(codes.data(), 1, 1, 1, 16)};
  args.out_scale = &out_scale;
  reference_forward(parse_spec("fp32:d16" + kCodesByCall), args);
  EXPECT_EQ(codes[0], 0x40);  // 2
  EXPECT_EQ(codes[1], 0x7e);
  EXPECT_EQ(codes[2], 0xfe);
  EXPECT_EQ(codes[3] & 0x7f, 0x7f);
  EXPECT_EQ(codes[4], 0x58);  // 16
  EXPECT_EQ(codes[5], 0x5a);  // 20
  EXPECT_EQ(codes[6], 0);
}

}  // namespace
}  // namespace flashjit

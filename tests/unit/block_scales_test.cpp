// Scales of blocks in a tensor of their own: what calls refuse, and the CPU reference over a group of keys.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "call/append_arguments.hpp"
#include "call/arguments.hpp"
#include "expr/kv_codec.hpp"
#include "flashjit/flashjit.hpp"
#include "flashjit/reference.hpp"

namespace flashjit {
namespace {

std::string message_of_block_scales(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}
void expect_parts(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << message << " lacks " << part;
}

/// A call over two sequences of 40 keys of two heads with 64 columns.
struct BlockScalesCall {
  AttentionSpec spec;
  std::vector<float> memory = std::vector<float>(1 << 15);
  ForwardArgs args;

  explicit BlockScalesCall(const char* text) : spec(parse_spec(text)) {
    char* data = reinterpret_cast<char*>(memory.data());
    const int columns_k = spec.stored_k().columns, columns_v = spec.stored_v().columns;
    args.q = ConstTensorView::bhsd(data, 2, 2, 1, 64);
    args.out = TensorView::bhsd(data + (1 << 16), 2, 2, 1, 64);
    args.k = ConstTensorView::bhsd(data, 2, 2, 40, columns_k);
    args.v = ConstTensorView::bhsd(data, 2, 2, 40, columns_v);
  }
  ConstTensorView scales(std::int64_t rows, std::int64_t columns) const {
    return ConstTensorView::bhsd(memory.data(), 2, 2, rows, columns);
  }
  std::string message() const {
    return message_of_block_scales([&] { check_arguments(spec, args); });
  }
};

TEST(BlockScales, AreCheckedInTheCallersWords) {
  BlockScalesCall call("bf16:d64:k{int4:g32:fp16:apart:zero}");
  expect_parts(call.message(),
               {"k_block_scale is not given", "int4:g32:fp16:apart:zero", "fp16 [2, 2, 40, 4]"});
  call.args.k_block_scale = call.scales(40, 2);
  expect_parts(call.message(), {"k_block_scale is [2, 2, 40, 2]", "give fp16 [2, 2, 40, 4]", "zero points"});
  call.args.k_block_scale = call.scales(40, 4);
  EXPECT_EQ(call.message(), "");
  call.args.k_block_scale.dtype = DType::fp32;
  expect_parts(call.message(), {"k_block_scale is fp32", "are fp16"});
  call.args.k_block_scale.dtype = DType::fp16;
  call.args.k_block_scale.stride[3] = 2;
  expect_parts(call.message(), {"k_block_scale has stride 2", "contiguous"});
  call.args.k_block_scale.stride[3] = 1;
  call.args.v_block_scale = call.scales(40, 4);
  expect_parts(call.message(), {"v_block_scale is given", "not quantized", "leave it out"});
}

TEST(BlockScales, OfKeysHaveARowForEachGroup) {
  BlockScalesCall call("bf16:d64:k{uint2:keys16:fp16:min}");
  call.args.k_block_scale = call.scales(40, 128);
  expect_parts(call.message(), {"[2, 2, 40, 128]", "give fp16 [2, 2, 3, 128]", "a row for 16 keys"});
  call.args.k_block_scale = call.scales(3, 128);
  EXPECT_EQ(call.message(), "");
  call.args.k_block_scale.stride[2] = 132;
  expect_parts(call.message(), {"k_block_scale has stride 132", "16 bytes"});
}

TEST(BlockScales, OfKeysAreOfOneSequenceAndPage) {
  const auto says = [](const char* text) {
    return message_of_block_scales([&] { parse_spec(text).validate(); });
  };
  expect_parts(says("bf16:d64:k{uint2:keys32:fp16:min}:pages48"), {"page_size is 48", "32 keys", "multiple"});
  expect_parts(says("bf16:d64:k{uint2:keys32:fp16:min}:varlen"), {"uint2:keys32:fp16:min", "packs"});
  expect_parts(says("append:bf16:d64:k{uint2:keys32:fp16:min}:pages64"),
               {"append", "32 keys", "quantize()", "merge()"});
  EXPECT_EQ(says("bf16:d64:k{uint2:keys32:fp16:min}:pages64"), "");
}

TEST(BlockScales, QuantizeWantsWholeGroups) {
  std::vector<float> memory(1 << 15);
  const AttentionSpec spec = parse_spec("bf16:d64:k{uint2:keys16:fp16:min}");
  QuantizeArgs args{.x = ConstTensorView::bhsd(memory.data(), 1, 1, 40, 64),
                    .codes = TensorView::bhsd(memory.data() + 4096, 1, 1, 40, 16),
                    .scale = {}};
  args.block_scale = TensorView::bhsd(memory.data() + 8192, 1, 1, 3, 128);
  expect_parts(message_of_block_scales([&] { check_arguments(spec, args); }),
               {"x has 40 rows", "16 keys", "the last 8 keys in 16 bits"});
  args.block_scale = args.codes;
  expect_parts(message_of_block_scales([&] { check_arguments(spec, args); }),
               {"block_scale is [1, 1, 40, 16]"});
}

/// quantize() and attention over what it wrote, on the CPU: keys that four levels hold exactly.
TEST(BlockScales, TheReferenceReadsWhatItWrites) {
  const AttentionSpec spec = parse_spec("fp32:d64:k{uint2:keys16:fp16:min}");
  std::vector<float> x(32 * 64), q(64), v(32 * 64), out(64), wanted(64);
  std::vector<std::uint8_t> codes(32 * 16), scales(2 * 128 * 2);
  for (int n = 0; n < 32; ++n)
    for (int i = 0; i < 64; ++i) x[n * 64 + i] = static_cast<float>((n + i) % 4) * 0.25f - i % 8;
  for (int i = 0; i < 64; ++i) q[i] = static_cast<float>(i % 5) * 0.1f;
  std::iota(v.begin(), v.end(), 0.0f);
  QuantizeArgs quantize{.x = ConstTensorView::bhsd(x.data(), 1, 1, 32, 64),
                        .codes = TensorView::bhsd(codes.data(), 1, 1, 32, 16),
                        .scale = {}};
  quantize.block_scale = TensorView::bhsd(scales.data(), 1, 1, 2, 128);
  reference_quantize(spec, quantize);
  ForwardArgs args{.q = ConstTensorView::bhsd(q.data(), 1, 1, 1, 64),
                   .k = quantize.codes,
                   .v = ConstTensorView::bhsd(v.data(), 1, 1, 32, 64),
                   .out = TensorView::bhsd(out.data(), 1, 1, 1, 64)};
  args.k_block_scale = quantize.block_scale;
  reference_forward(spec, args);
  args.k = quantize.x, args.out.data = wanted.data(), args.k_block_scale = {};
  reference_forward(parse_spec("fp32:d64"), args);
  EXPECT_EQ(out, wanted);
}

}  // namespace
}  // namespace flashjit

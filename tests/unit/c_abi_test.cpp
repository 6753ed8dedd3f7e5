// The C interface where no driver is: what it accepts, refuses and says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>

#include "flashjit/flashjit.h"
#include "flashjit/flashjit.hpp"
#include "tests/support/c_abi_support.hpp"

namespace {

using flashjit::test::RuntimePtr;
using flashjit::test::SpecPtr;

std::string last_message() { return flashjit_last_error_message(); }

#define EXPECT_MESSAGE(part) EXPECT_NE(last_message().find(part), std::string::npos) << last_message()

/// Keeps nothing on disk and finds no driver, whatever the machine has.
class CAbi : public testing::Test {
 protected:
  void SetUp() override { setenv("FLASHJIT_LIBCUDA", "/nonexistent/libcuda.so.1", 1); }
  void TearDown() override { unsetenv("FLASHJIT_LIBCUDA"); }

  static RuntimePtr runtime() {
    flashjit_options options{};
    options.struct_size = sizeof options;
    options.cache_dir = "";
    return flashjit::test::make_runtime(options);
  }
  static SpecPtr spec(const char* text = "bf16:d64:causal") { return flashjit::test::make_spec(text); }
  static flashjit_tensor tensor(std::uintptr_t address) { return flashjit::test::make_tensor(address); }
  static flashjit_forward_args forward_args() { return flashjit::test::make_forward_args(); }
  static flashjit_backward_args backward_args() {
    const flashjit_forward_args f = forward_args();
    flashjit_backward_args args{};
    args.struct_size = sizeof args;
    args.q = f.q;
    args.k = f.k;
    args.v = f.v;
    args.out = f.out;
    args.lse = reinterpret_cast<float*>(0x50000);
    args.dout = f.out;
    args.dq = tensor(0x60000);
    args.dk = tensor(0x70000);
    args.dv = tensor(0x80000);
    return args;
  }
  static constexpr flashjit_shape kShape{1, 2, 2, 128, 128};
};

TEST_F(CAbi, VersionAndStatusNames) {
  EXPECT_STREQ(flashjit_version(), FLASHJIT_VERSION);
  EXPECT_STREQ(flashjit_status_name(FLASHJIT_OK), "ok");
  for (int code = FLASHJIT_INVALID_ARGUMENT; code <= FLASHJIT_INTERNAL; ++code)
    EXPECT_EQ(flashjit_status_name(code), to_string(static_cast<flashjit::ErrorCode>(code)));
  EXPECT_STREQ(flashjit_status_name(-1), "unknown");
}

TEST_F(CAbi, TheArgumentsOfSpecOptionMayBeNull) {
  EXPECT_EQ(flashjit_spec_option(0, nullptr, nullptr), 1);
  EXPECT_EQ(flashjit_spec_option(1u << 20, nullptr, nullptr), 0);
}

TEST_F(CAbi, OptionsOfASpecAreParsed) {
  const char *option = nullptr, *argument = nullptr;
  std::size_t count = 0;
  for (; flashjit_spec_option(count, &option, &argument) != 0; ++count) {
    const bool of_append = option == std::string_view("hadamard");
    const bool of_codes =
        of_append || option == std::string_view("key_scales") || option == std::string_view("q_codes");
    const bool of_dropout = option == std::string_view("dropout_place");
    const bool of_pages = option == std::string_view("shared_prefix");
    const bool of_weights = option == std::string_view("weight_mod");
    const bool of_latents = option == std::string_view("q_rope");
    const bool of_sums = std::string_view(option).starts_with("sums");  // values of an argument
    const bool of_scales = option == std::string_view("swizzled_scales");
    const std::string text = of_latents   ? "bf16:d96x64:shared_kv"
                             : of_scales  ? "bf16:d64:out{e2m1:g16:e4m3:apart:scaled}"
                             : of_sums    ? "bf16:d64:kve4m3:q_codes"
                             : of_codes   ? "bf16:d64:kve4m3"
                             : of_dropout ? "bf16:d64:dropout"
                             : of_pages   ? "bf16:d64:varlen:pages16"
                             : of_weights ? "bf16:d64:score{sigmoid(score)}"
                                          : "bf16:d64";
    const auto parsed = flashjit::parse_spec(text + ":" + option);
    EXPECT_NE(parsed, flashjit::parse_spec(text)) << option;
    const bool of_parts = std::string_view(option).ends_with("_grads");  // which attention() does not have
    EXPECT_EQ(*argument == 0, of_parts || of_dropout || of_sums || of_append) << option;
  }
  EXPECT_GE(count, 5u);
}

TEST_F(CAbi, DefaultOptionsNeedNeitherDriverNorStruct) {
  flashjit_runtime* made = nullptr;
  ASSERT_EQ(flashjit_runtime_create(nullptr, &made), FLASHJIT_OK) << last_message();
  EXPECT_NE(made, nullptr);
  flashjit_runtime_destroy(made);
  flashjit_runtime_destroy(nullptr);
  flashjit_spec_destroy(nullptr);
}

TEST_F(CAbi, WithoutADriverEveryCallThatNeedsItSaysSo) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  const auto forward = forward_args();
  const auto backward = backward_args();
  std::size_t bytes = 0;
  flashjit_device device{};
  device.struct_size = sizeof device;
  for (const flashjit_status status :
       {flashjit_forward(r.get(), s.get(), &forward, nullptr),
        flashjit_backward(r.get(), s.get(), &backward, nullptr),
        flashjit_prepare(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, nullptr, nullptr, nullptr),
        flashjit_prepare_both(r.get(), s.get(), &kShape, nullptr, nullptr),
        flashjit_prepare_first_calls(r.get(), s.get(), &kShape),
        flashjit_workspace_bytes(r.get(), FLASHJIT_BACKWARD, s.get(), &kShape, &bytes),
        flashjit_current_device(r.get(), &device)}) {
    EXPECT_EQ(status, FLASHJIT_NO_DRIVER) << last_message();
    EXPECT_MESSAGE("/nonexistent/libcuda.so.1");
    EXPECT_MESSAGE("FLASHJIT_LIBCUDA");
  }
}

TEST_F(CAbi, ALibraryThatIsNoDriverIsRefused) {
  setenv("FLASHJIT_LIBCUDA", "libm.so.6", 1);
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  EXPECT_EQ(flashjit_prepare(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, nullptr, nullptr, nullptr),
            FLASHJIT_NO_DRIVER);
  EXPECT_MESSAGE("libm.so.6 is too old");
}

TEST_F(CAbi, NullHandlesAreRefusedNotFollowed) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  const auto args = forward_args();
  EXPECT_EQ(flashjit_forward(nullptr, s.get(), &args, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("runtime is null");
  EXPECT_EQ(flashjit_forward(r.get(), nullptr, &args, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("spec is null");
  EXPECT_EQ(flashjit_forward(r.get(), s.get(), nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("flashjit_forward_args is null");
  EXPECT_EQ(flashjit_prepare(r.get(), FLASHJIT_FORWARD, s.get(), nullptr, nullptr, nullptr, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("shape is null");
  EXPECT_EQ(flashjit_prepare_both(nullptr, s.get(), &kShape, nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_prepare_both(r.get(), nullptr, &kShape, nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_prepare_both(r.get(), s.get(), nullptr, nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_prepare_first_calls(nullptr, s.get(), &kShape), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_prepare_first_calls(r.get(), nullptr, &kShape), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_prepare_first_calls(r.get(), s.get(), nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_workspace_bytes(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("bytes is null");
  EXPECT_EQ(flashjit_runtime_create(nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_spec_create("bf16:d64", nullptr), FLASHJIT_INVALID_ARGUMENT);
  flashjit_spec* made = nullptr;
  EXPECT_EQ(flashjit_spec_create(nullptr, &made), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("text is null");
}

TEST_F(CAbi, SpecsAreChecked) {
  for (const char* bad : {"", "bf17:d64", "bf16:d60", "bf16:d584", "bf16:d64:sliding", "bf16:d64:map30x64"}) {
    flashjit_spec* made = reinterpret_cast<flashjit_spec*>(1);
    EXPECT_EQ(flashjit_spec_create(bad, &made), FLASHJIT_INVALID_ARGUMENT) << bad;
    EXPECT_EQ(made, nullptr) << bad;
    EXPECT_FALSE(last_message().empty()) << bad;
  }
}

TEST_F(CAbi, ArgumentsAreCheckedBeforeTheDriverIsOpened) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  auto forward = forward_args();
  forward.k.size[0] = 5;
  EXPECT_EQ(flashjit_forward(r.get(), s.get(), &forward, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("k has batch 5");
  const float scale = -1;
  forward = forward_args();
  forward.softmax_scale = &scale;
  EXPECT_EQ(flashjit_forward(r.get(), s.get(), &forward, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("softmax_scale is -1");
  auto backward = backward_args();
  backward.dq.data = nullptr;
  EXPECT_EQ(flashjit_backward(r.get(), s.get(), &backward, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("dq is null");
}

TEST_F(CAbi, EnumsAreChecked) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  EXPECT_EQ(flashjit_prepare(r.get(), 7, s.get(), &kShape, nullptr, nullptr, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("pass is 7");
  flashjit_options options{};
  options.struct_size = sizeof options;
  options.jit = 7;
  flashjit_runtime* made = nullptr;
  EXPECT_EQ(flashjit_runtime_create(&options, &made), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("jit is 7");
  options.jit = FLASHJIT_JIT_DEFAULT;
  options.tune_in_background = 3;
  EXPECT_EQ(flashjit_runtime_create(&options, &made), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("tune_in_background is 3");
  EXPECT_EQ(made, nullptr);
}

TEST_F(CAbi, ConfigurationsAreRead) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  EXPECT_EQ(flashjit_prepare(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, "sm80:br1x", nullptr, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_prepare(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, "sm80:br128:bc64:w4:s2", nullptr,
                             nullptr),
            FLASHJIT_NO_DRIVER);
}

flashjit_tensor two_rows(float* data) { return {data, {1, 1, 2, 8}, {16, 16, 8, 1}}; }

/// Two queries and two keys of eight columns. Q and K are zeros, V's rows zeros and ones.
struct TwoRows {
  alignas(16) float q[16] = {}, v[16] = {}, out[16] = {};
  float lse[2] = {};

  TwoRows() { std::fill_n(v + 8, 8, 1.0f); }
  flashjit_forward_args forward() {
    flashjit_forward_args args{};
    args.struct_size = sizeof args;
    args.q = args.k = two_rows(q);
    args.v = two_rows(v);
    args.out = two_rows(out);
    args.lse = lse;
    return args;
  }
};

/// [rows, heads] in a wider tensor, as engines have LSE; what is between stays as it is.
TEST_F(CAbi, LseOfPackedRowsHasStrides) {
  const SpecPtr s = flashjit::test::make_spec("fp32:d8:varlen");
  alignas(16) float q[3 * 2 * 8] = {}, k[5 * 8] = {}, out[3 * 2 * 8];
  float lse[3 * 3];
  std::fill_n(lse, 9, 7.0f);
  const std::int32_t cu_q[] = {0, 1, 2}, cu_kv[] = {0, 1, 5};  // the third row belongs to no sequence
  flashjit_forward_args args{};
  args.struct_size = sizeof args;
  args.q = {q, {1, 2, 3, 8}, {48, 8, 16, 1}};
  args.k = args.v = {k, {1, 1, 5, 8}, {40, 40, 8, 1}};
  args.out = {out, {1, 2, 3, 8}, {48, 8, 16, 1}};
  args.lse = lse;
  args.lse_stride[1] = 1, args.lse_stride[2] = 3;
  args.cu_seqlens_q = cu_q, args.cu_seqlens_kv = cu_kv;
  args.batch_size = 2, args.max_seqlen_q = 1, args.max_seqlen_kv = 4;
  ASSERT_EQ(flashjit_reference_forward(s.get(), &args), FLASHJIT_OK) << last_message();
  const float one = 0, four = std::log(4.0f);
  EXPECT_EQ(std::vector(lse, lse + 9), (std::vector<float>{one, one, 7, four, four, 7, 7, 7, 7}));
  args.zero_unused_rows = 1;
  ASSERT_EQ(flashjit_reference_forward(s.get(), &args), FLASHJIT_OK) << last_message();
  EXPECT_EQ(std::vector(lse + 6, lse + 9), (std::vector<float>{-INFINITY, -INFINITY, 7}));
  args.lse_stride[1] = -1;
  EXPECT_EQ(flashjit_reference_forward(s.get(), &args), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("lse has stride -1 in heads");
}

TEST_F(CAbi, TheReferenceNeedsNeitherDriverNorRuntime) {
  flashjit_spec* made = nullptr;
  ASSERT_EQ(flashjit_spec_create("fp32:d8", &made), FLASHJIT_OK) << last_message();
  const SpecPtr s(made);
  TwoRows rows;
  auto& [q, v, out, lse] = rows;
  alignas(16) float dout[16], dq[16], dk[16], dv[16];
  std::fill_n(dout, 16, 1.0f);
  flashjit_forward_args forward = rows.forward();
  ASSERT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_OK) << last_message();
  EXPECT_EQ(out[0], 0.5f);  // the average of both rows, as Q is zero
  EXPECT_EQ(lse[1], std::log(2.0f));

  flashjit_backward_args backward{};
  backward.struct_size = sizeof backward;
  backward.q = backward.k = two_rows(q);
  backward.v = two_rows(v);
  backward.out = two_rows(out);
  backward.lse = lse;
  backward.dout = two_rows(dout);
  backward.dq = two_rows(dq);
  backward.dk = two_rows(dk);
  backward.dv = two_rows(dv);
  ASSERT_EQ(flashjit_reference_backward(s.get(), &backward), FLASHJIT_OK) << last_message();
  EXPECT_EQ(dv[0], 1.0f);  // half of each of two rows
  EXPECT_EQ(dq[0], 0.0f);

  forward.v.size[2] = 3;
  EXPECT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("v has length 3");
}

/// In place; the second row of the state has no keys.
TEST_F(CAbi, TheReferenceJoinsARunningState) {
  flashjit_spec* made = nullptr;
  ASSERT_EQ(flashjit_spec_create("fp32:d8:running_state", &made), FLASHJIT_OK) << last_message();
  const SpecPtr s(made);
  TwoRows rows;
  auto& [q, v, out, lse] = rows;
  for (int i = 0; i < 16; ++i) out[i] = i < 8 ? 2.0f : NAN;
  lse[0] = std::log(2.0f), lse[1] = -INFINITY;
  flashjit_forward_args forward = rows.forward();
  EXPECT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("state.out");
  forward.state = {two_rows(out), lse, {}};
  ASSERT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_OK) << last_message();
  EXPECT_EQ(out[0], 1.25f);  // the average of two keys' 2 and of two keys' 0.5
  EXPECT_FLOAT_EQ(lse[0], std::log(4.0f));
  EXPECT_EQ(out[8], 0.5f);
  EXPECT_FLOAT_EQ(lse[1], std::log(2.0f));
}

/// Two new rows of one sequence of five keys, in pages of two rows that lie in the other order.
TEST_F(CAbi, NewRowsAreAppendedByTheReference) {
  const SpecPtr s = flashjit::test::make_spec("fp32:d16:pages2");
  alignas(16) float k[32], v[32], q[32], k_cache[96], v_cache[96];
  for (int i = 0; i < 32; ++i) k[i] = q[i] = static_cast<float>(i % 16 == 0), v[i] = static_cast<float>(i);
  std::fill_n(k_cache, 96, 7.0f), std::fill_n(v_cache, 96, 7.0f);
  const std::int32_t lengths[] = {5}, table[] = {2, 1, 0};
  flashjit_append_args args{};
  args.struct_size = sizeof args;
  args.k = {k, {1, 1, 2, 16}, {32, 32, 16, 1}}, args.v = {v, {1, 1, 2, 16}, {32, 32, 16, 1}};
  args.k_cache = {k_cache, {3, 1, 2, 16}, {32, 32, 16, 1}};
  args.v_cache = {v_cache, {3, 1, 2, 16}, {32, 32, 16, 1}};
  args.kv_lengths = lengths;
  args.page_table = {table, 1, 3, 0, nullptr};
  args.q = args.q_out = {q, {1, 1, 2, 16}, {32, 32, 16, 1}};
  args.rope.theta = 100;
  args.rope.interleaved = 1;
  ASSERT_EQ(flashjit_reference_append(s.get(), &args), FLASHJIT_OK) << last_message();
  // Keys 3 and 4: the second row of page 1, and the first of page 0. Pair 0 turns by the position.
  EXPECT_FLOAT_EQ(k_cache[48], std::cos(3.0f));
  EXPECT_FLOAT_EQ(k_cache[49], std::sin(3.0f));
  EXPECT_FLOAT_EQ(k_cache[0], std::cos(4.0f));
  EXPECT_FLOAT_EQ(q[17], std::sin(4.0f));
  EXPECT_EQ(v_cache[48], 0.0f);
  EXPECT_EQ(v_cache[15], 31.0f);
  EXPECT_EQ(k_cache[47], 7.0f);
  EXPECT_EQ(v_cache[16], 7.0f);

  args.rope.type = FLASHJIT_ELEMENT_INT8;
  EXPECT_EQ(flashjit_reference_append(s.get(), &args), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("rope.type is 7");
  args.struct_size = 8;
  EXPECT_EQ(flashjit_reference_append(s.get(), &args), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("flashjit_append_args.struct_size is 8");
}

// A cache of e4m3 in which each key has a scale: append writes both, and attention reads them.
TEST_F(CAbi, KeysOfEightBitsHaveScales) {
  const SpecPtr s = flashjit::test::make_spec("fp32:d16:kve4m3:cache:key_scales");
  alignas(16) float k[16] = {}, v[16], q[16] = {}, out[16];
  alignas(16) std::uint8_t k_cache[32] = {}, v_cache[32] = {};
  float k_scale[2] = {}, v_scale[2] = {};
  for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(i % 4 * 7);
  const std::int32_t lengths[] = {1};
  flashjit_append_args append{};
  append.struct_size = sizeof append;
  append.k = {k, {1, 1, 1, 16}, {16, 16, 16, 1}}, append.v = {v, {1, 1, 1, 16}, {16, 16, 16, 1}};
  append.k_cache = {k_cache, {1, 1, 2, 16}, {32, 32, 16, 1}};
  append.v_cache = {v_cache, {1, 1, 2, 16}, {32, 32, 16, 1}};
  append.kv_lengths = lengths;
  append.k_scale = {k_scale, {1, 1, 1, 2}, {0, 0, 0, 1}},
  append.v_scale = {v_scale, {1, 1, 1, 2}, {0, 0, 0, 1}};
  ASSERT_EQ(flashjit_reference_append(s.get(), &append), FLASHJIT_OK) << last_message();
  EXPECT_EQ(v_scale[0], 21.0f / 448);
  EXPECT_EQ(v_scale[1], 0.0f);
  EXPECT_EQ(v_cache[3], 0x7e);  // 448

  flashjit_forward_args forward{};
  forward.struct_size = sizeof forward;
  forward.q = {q, {1, 1, 1, 16}, {16, 16, 16, 1}}, forward.out = {out, {1, 1, 1, 16}, {16, 16, 16, 1}};
  forward.k = append.k_cache, forward.v = append.v_cache;
  forward.kv_lengths = lengths;
  forward.k_scale = append.k_scale, forward.v_scale = append.v_scale;
  ASSERT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_OK) << last_message();
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(out[i], v[i], v[i] / 16) << i;
  EXPECT_FLOAT_EQ(out[3], 21.0f);
}

TEST_F(CAbi, ListsOfKeysAreReadByTheReference) {
  const SpecPtr s = flashjit::test::make_spec("fp32:d8:indices");
  alignas(16) float q[8] = {}, keys[24] = {}, out[8] = {};
  for (int i = 0; i < 24; ++i) keys[i] = static_cast<float>(i / 8);
  const std::int32_t indices[] = {2, 0, -1, 2};
  flashjit_forward_args forward{};
  forward.struct_size = sizeof forward;
  forward.q = {q, {1, 1, 1, 8}, {8, 8, 8, 1}}, forward.out = {out, {1, 1, 1, 8}, {8, 8, 8, 1}};
  forward.k = forward.v = {keys, {1, 1, 3, 8}, {24, 24, 8, 1}};
  forward.indices.data = indices;
  std::ranges::copy(std::array{1, 1, 1, 4}, forward.indices.size),
      std::ranges::copy(std::array{4, 4, 4, 1}, forward.indices.stride);
  ASSERT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_OK) << last_message();
  EXPECT_FLOAT_EQ(out[7], 4.0f / 3);
}

TEST_F(CAbi, StatesAreMergedByTheReference) {
  const SpecPtr s = flashjit::test::make_spec("bf16:d8");
  alignas(16) float first[8] = {1, 2}, second[8] = {3, 6}, nothing[8];
  std::fill_n(nothing, 8, std::nanf(""));
  const float lse[] = {0}, lse_of_three_times[] = {std::log(3.0f)}, none[] = {-INFINITY};
  const auto view = [](void* data) { return flashjit_tensor{data, {1, 1, 1, 8}, {8, 8, 8, 1}}; };
  const flashjit_partial_state states[] = {
      {view(first), lse, {}}, {view(nothing), none, {}}, {view(second), lse_of_three_times, {}}};
  alignas(16) float out[8];
  float joined = 0;
  flashjit_merge_args args{};
  args.struct_size = sizeof args;
  args.states = states;
  args.state_count = 3;
  args.out = view(out);
  args.lse = &joined;
  args.states_type = args.out_type = FLASHJIT_ELEMENT_FP32;
  ASSERT_EQ(flashjit_reference_merge(s.get(), &args), FLASHJIT_OK) << last_message();
  EXPECT_FLOAT_EQ(out[0], 2.5f);
  EXPECT_FLOAT_EQ(out[1], 5.0f);
  EXPECT_FLOAT_EQ(joined, std::log(4.0f));

  const auto says = [&](const char* part) {
    EXPECT_EQ(flashjit_reference_merge(s.get(), &args), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_MESSAGE(part);
  };
  args.out_type = FLASHJIT_ELEMENT_FP16;
  says("out_type is fp16");
  args.out_type = FLASHJIT_ELEMENT_INT32;
  says("out_type is 4");
  args.state_count = 9;
  says("state_count is 9");
  args.state_count = 1, args.states = nullptr;
  says("states is null");
}

TEST_F(CAbi, AppendAndMergeNeedADriver) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec("bf16:d64:causal:cache");
  std::int32_t* lengths = reinterpret_cast<std::int32_t*>(0x90000);
  flashjit_append_args append{};
  append.struct_size = sizeof append;
  append.k = append.v = tensor(0x10000);
  append.k_cache = tensor(0x20000), append.v_cache = tensor(0x30000);
  append.kv_lengths = lengths;
  EXPECT_EQ(flashjit_append(r.get(), s.get(), &append, nullptr), FLASHJIT_NO_DRIVER) << last_message();
  EXPECT_EQ(flashjit_append(r.get(), s.get(), nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("flashjit_append_args is null");
  const flashjit_partial_state state{tensor(0x10000), reinterpret_cast<float*>(0x50000), {}};
  flashjit_merge_args merge{};
  merge.struct_size = sizeof merge;
  merge.states = &state;
  merge.state_count = 1;
  merge.out = tensor(0x20000);
  EXPECT_EQ(flashjit_merge(r.get(), s.get(), &merge, nullptr), FLASHJIT_NO_DRIVER) << last_message();
  EXPECT_EQ(flashjit_merge(nullptr, s.get(), &merge, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_prepare(r.get(), FLASHJIT_APPEND, s.get(), &kShape, nullptr, nullptr, nullptr),
            FLASHJIT_NO_DRIVER);
}

TEST_F(CAbi, TheReferenceTakesTheGradientOfLse) {
  const SpecPtr s = flashjit::test::make_spec("fp32:d8");
  alignas(16) float q[16], k[16], v[16] = {}, out[16], dout[16] = {}, dq[16], dk[16], dv[16], lse[2];
  for (int i = 0; i < 16; ++i) q[i] = static_cast<float>(i % 5) / 5, k[i] = static_cast<float>(i / 8);
  const auto view = [](float* data) { return flashjit_tensor{data, {1, 1, 2, 8}, {16, 16, 8, 1}}; };
  flashjit_forward_args forward{};
  forward.struct_size = sizeof forward;
  forward.q = view(q), forward.k = view(k), forward.v = view(v), forward.out = view(out);
  forward.lse = lse;
  ASSERT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_OK) << last_message();
  flashjit_backward_args backward{};
  backward.struct_size = sizeof backward;
  backward.q = view(q), backward.k = view(k), backward.v = view(v), backward.out = view(out);
  backward.lse = lse;
  backward.dout = view(dout), backward.dq = view(dq), backward.dk = view(dk), backward.dv = view(dv);
  const float dlse[] = {1, 0};
  backward.dlse = dlse;
  ASSERT_EQ(flashjit_reference_backward(s.get(), &backward), FLASHJIT_OK) << last_message();
  // d LSE / d q = scale * sum of P k, where the first key is zero and the second one.
  const float scale = 1 / std::sqrt(8.0f);
  const float p = std::exp(scale * std::accumulate(q, q + 8, 0.0f) - lse[0]);
  EXPECT_FLOAT_EQ(dq[0], scale * p);
  EXPECT_EQ(dq[8], 0.0f);
  EXPECT_FLOAT_EQ(dk[9], scale * p * q[1]);
}

TEST_F(CAbi, RowsOfNoSequenceAreLeftAloneOrZeroed) {
  const SpecPtr s = flashjit::test::make_spec("fp32:d8:varlen");
  alignas(16) float data[24] = {}, out[24], dq[24], dk[24], dv[24], lse[4];
  const std::int32_t cu_seqlens[] = {0, 1, 2};  // of three rows
  const auto view = [](float* data) { return flashjit_tensor{data, {1, 1, 3, 8}, {24, 24, 8, 1}}; };
  const auto set_common = [&](auto& args, std::int32_t zero) {
    args.struct_size = sizeof args;
    args.q = args.k = args.v = view(data);
    args.out = view(out);
    args.lse = lse;
    args.cu_seqlens_q = args.cu_seqlens_kv = cu_seqlens;
    args.batch_size = 2;
    args.max_seqlen_q = args.max_seqlen_kv = 2;
    args.zero_unused_rows = zero;
  };
  for (const std::int32_t zero : {0, 1}) {
    for (float* result : {out, dq, dk, dv}) std::fill_n(result, 24, 7.0f);
    flashjit_forward_args forward{};
    set_common(forward, zero);
    ASSERT_EQ(flashjit_reference_forward(s.get(), &forward), FLASHJIT_OK) << last_message();
    flashjit_backward_args backward{};
    set_common(backward, zero);
    backward.dout = view(data);
    backward.dq = view(dq), backward.dk = view(dk), backward.dv = view(dv);
    ASSERT_EQ(flashjit_reference_backward(s.get(), &backward), FLASHJIT_OK) << last_message();
    for (const float* result : {out, dq, dk, dv}) {
      EXPECT_EQ(result[15], 0.0f);
      EXPECT_EQ(result[16], zero ? 0.0f : 7.0f);
      EXPECT_EQ(result[23], zero ? 0.0f : 7.0f);
    }
  }
}

TEST_F(CAbi, StructSizes) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  auto args = forward_args();
  for (const std::size_t size :
       {std::size_t{0}, offsetof(flashjit_forward_args, captures), sizeof args + 8}) {
    args.struct_size = size;
    EXPECT_EQ(flashjit_forward(r.get(), s.get(), &args, nullptr), FLASHJIT_INVALID_ARGUMENT) << size;
    EXPECT_MESSAGE("struct_size is " + std::to_string(size));
  }
  EXPECT_MESSAGE("has " + std::to_string(sizeof args) + " bytes");
}

TEST_F(CAbi, TuningCanBeStoppedWhereNoneIs) {
  EXPECT_EQ(flashjit_stop_tuning(runtime().get()), FLASHJIT_OK);
  EXPECT_EQ(flashjit_stop_tuning(nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("runtime is null");
}

TEST_F(CAbi, ListsAreBuiltOfCheckedArguments) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  flashjit_tile_lists* lists = nullptr;
  const auto build = [&](const flashjit_list_args* args) {
    return flashjit_build_lists(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, args, nullptr, &lists);
  };
  EXPECT_EQ(build(nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("flashjit_list_args is null");
  flashjit_list_args args{};
  EXPECT_EQ(build(&args), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("struct_size is 0");
  args.struct_size = sizeof args;
  args.kv_lengths = reinterpret_cast<std::int32_t*>(0x100);
  EXPECT_EQ(build(&args), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("kv_lengths is given");
  args.kv_lengths = nullptr;
  EXPECT_EQ(build(&args), FLASHJIT_NO_DRIVER) << last_message();
  EXPECT_EQ(lists, nullptr);
  EXPECT_EQ(flashjit_build_lists(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, &args, nullptr, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_list_bytes(r.get(), FLASHJIT_FORWARD, s.get(), &kShape, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  flashjit_tile_lists_destroy(nullptr);
}

TEST_F(CAbi, CapturesAreChecked) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec();
  auto args = forward_args();
  const auto says = [&](const std::string& part) {
    EXPECT_EQ(flashjit_forward(r.get(), s.get(), &args, nullptr), FLASHJIT_INVALID_ARGUMENT) << part;
    EXPECT_MESSAGE(part);
  };
  args.capture_count = 1;
  says("captures is null");
  flashjit_capture capture{};
  args.captures = &capture;
  says("the name of a capture is null");
  capture.name = "window";
  capture.type = 10;
  says("the type of the capture window is 10");
  args.capture_count = FLASHJIT_MAX_CAPTURES + 1;
  says("capture_count is 25");
}

TEST_F(CAbi, SinksAndPackedSequencesArePassedOn) {
  const RuntimePtr r = runtime();
  const SpecPtr s = spec("bf16:d64:varlen:sinks");
  auto args = forward_args();
  const auto says = [&](const std::string& part) {
    EXPECT_EQ(flashjit_forward(r.get(), s.get(), &args, nullptr), FLASHJIT_INVALID_ARGUMENT) << part;
    EXPECT_MESSAGE(part);
  };
  args.batch_size = 3;
  says("cu_seqlens_q is null");
  args.cu_seqlens_q = args.cu_seqlens_kv = reinterpret_cast<std::int32_t*>(0x100);
  says("max_seqlen_q is 0");
  args.max_seqlen_q = 100;
  says("max_seqlen_kv is 0");
  args.max_seqlen_kv = 100;
  says("sinks is null");
  args.sinks = reinterpret_cast<float*>(0x100);
  EXPECT_EQ(flashjit_forward(r.get(), s.get(), &args, nullptr), FLASHJIT_NO_DRIVER) << last_message();
}

TEST_F(CAbi, TheLastErrorIsTheThreadsOwn) {
  flashjit_spec* made = nullptr;
  ASSERT_EQ(flashjit_spec_create("nonsense", &made), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("nonsense");
  std::thread([] {
    EXPECT_STREQ(flashjit_last_error_message(), "");
    EXPECT_STREQ(flashjit_last_error_detail(), "");
  }).join();
  EXPECT_MESSAGE("nonsense");
}

TEST_F(CAbi, PacksArePassedOnAndTheLogIsTheCallers) {
  std::string log;
  const char* packs[] = {"/nonexistent/pack"};
  flashjit_options options{};
  options.struct_size = sizeof options;
  options.cache_dir = "";
  options.packs = packs;
  options.pack_count = 1;
  options.log = [](void* user, const char* line) { *static_cast<std::string*>(user) += line; };
  options.log_user = &log;
  flashjit_runtime* made = nullptr;
  ASSERT_EQ(flashjit_runtime_create(&options, &made), FLASHJIT_OK) << last_message();
  flashjit_runtime_destroy(made);
  EXPECT_NE(log.find("/nonexistent/pack"), log.npos) << log;
  options.packs = nullptr;
  EXPECT_EQ(flashjit_runtime_create(&options, &made), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_MESSAGE("packs is null");
}

}  // namespace

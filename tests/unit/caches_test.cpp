// attention_over() over a driver that only remembers: what is launched with which memory, and what is
// refused.
#include "flashjit/caches.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "flashjit/flashjit.h"
#include "plan/plan.hpp"
#include "templates/auxiliary/append_params.cuh"
#include "tests/support/c_abi_support.hpp"
#include "tests/support/expectations.hpp"
#include "tests/support/fakes.hpp"
#include "tests/support/launched_params.hpp"

namespace flashjit::test {
namespace {

template <class T = void>
T* place(std::uintptr_t value) {
  return reinterpret_cast<T*>(value << 32);
}

constexpr std::int64_t kBatch = 4, kHeads = 8, kQueries = 1024, kDim = 64;
constexpr const char *kPages = "bf16:d64:causal:pages16:sinks", *kSlots = "bf16:d64:cache";

/// Of a cache of pages, then of one in slots with fewer heads; the addresses are not read.
CacheArgs cache_of(const char* spec) {
  CacheArgs cache{parse_spec(spec), {}};
  ForwardArgs& args = cache.args;
  args.q = ConstTensorView::bhsd(place(1), kBatch, kHeads, kQueries, kDim);
  const bool paged = cache.spec.kv.is_paged();
  args.k = paged ? ConstTensorView::bhsd(place(2), 100, 4, 16, kDim)
                 : ConstTensorView::bhsd(place(3), kBatch, 2, 1000, kDim);
  args.v = args.k, args.v.data = place(paged ? 4 : 5);
  args.kv_lengths = place<std::int32_t>(6);
  if (paged) args.page_table = {place<std::int32_t>(7), kBatch, 40};
  if (cache.spec.sinks) args.sinks = place<float>(8);
  return cache;
}

class AttentionOver : public testing::Test {
 protected:
  AttentionOver() { fake().reset(); }
  ~AttentionOver() override { fake().reset(); }

  static FakeDriver& fake() { return fake_cuda(); }

  OverArgs over_args() {
    return {.caches = caches_,
            .out = TensorView::bhsd(place(10), kBatch, kHeads, kQueries, kDim),
            .lse = place<float>(11),
            .workspace = {place(12), std::size_t{1} << 40}};
  }
  /// The bytes that a cache's own pass needs.
  std::size_t scratch(std::size_t i) {
    AttentionSpec spec = caches_[i].spec;
    spec.partial.fp32_out = true;
    return runtime_.workspace_bytes(spec, shape(i));
  }
  AttentionShape shape(std::size_t i) const {
    const bool paged = caches_[i].spec.kv.is_paged();
    return {kBatch, kHeads, paged ? 4 : 2, kQueries, paged ? 640 : 1000};
  }
  std::string refusal(const OverArgs& args) {
    try {
      attention_over(runtime_, args, nullptr);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.message();
      EXPECT_TRUE(fake().launches.empty());
      return error.message();
    }
    return "nothing";
  }

  const Variable libcuda_{"FLASHJIT_LIBCUDA", built(FLASHJIT_FAKE_CUDA)};
  Runtime runtime_{
      RuntimeOptions{.cache_dir = "", .nvrtc = built(FLASHJIT_FAKE_NVRTC), .log = [](std::string_view) {}}};
  const std::string nvrtc_ = built(FLASHJIT_FAKE_NVRTC);
  std::vector<CacheArgs> caches_{cache_of(kPages), cache_of(kSlots)};
};

constexpr std::size_t kBytesOfOut = kBatch * kHeads * kQueries * kDim * 4;
constexpr std::size_t kBytesOfLse = (kBatch * kHeads * kQueries * 4 + 255) / 256 * 256;

TEST_F(AttentionOver, IsAPassOfEachCacheAndAMerge) {
  const auto stream = reinterpret_cast<Stream>(0x77);
  attention_over(runtime_, over_args(), stream);
  const auto& launches = fake().launches;
  std::size_t at = 0;
  char* const work = static_cast<char*>(place(12));
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    AttentionSpec spec = caches_[i].spec;
    spec.partial.fp32_out = true;
    const plan::ExecutionPlan plan = plan::make_plan({spec}, shape(i), runtime_.device(), {});
    ASSERT_FALSE(plan.config.split) << to_string(plan.config);  // what joins splits would write O
    for (const plan::Launch& launch : plan.launches) at += launch.blocks > 0;
    ASSERT_LT(at, launches.size());
    const Params params = launched_params(launches[at - 1], plan);
    EXPECT_EQ(params.q.data, place(1));
    EXPECT_EQ(params.k.data, place(i == 0 ? 2 : 3));
    EXPECT_EQ(params.o.data, work + i * (kBytesOfOut + kBytesOfLse));
    EXPECT_EQ(static_cast<const void*>(params.lse.data),
              work + i * (kBytesOfOut + kBytesOfLse) + kBytesOfOut);
  }
  ASSERT_EQ(at + 1, launches.size());
  MergeParams merge;
  static_assert(sizeof merge <= sizeof(Params));
  std::memcpy(&merge, launches.back().params.data(), sizeof merge);
  EXPECT_EQ(merge.count, 2);
  EXPECT_EQ(merge.out.data, place(10));
  EXPECT_EQ(static_cast<const void*>(merge.lse_out.data), place(11));
  EXPECT_TRUE(merge.fp32_parts && !merge.fp32_out);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(merge.o[i].data, work + i * (kBytesOfOut + kBytesOfLse));
    EXPECT_EQ(static_cast<const void*>(merge.lse[i].data),
              work + i * (kBytesOfOut + kBytesOfLse) + kBytesOfOut);
  }
  for (const auto& launch : launches) EXPECT_EQ(launch.stream, stream);
}

TEST_F(AttentionOver, TellsItsWorkspaceBeforehand) {
  OverArgs args = over_args();
  args.out = {}, args.lse = nullptr, args.workspace = {};
  const std::size_t bytes = attention_over_workspace_bytes(runtime_, args);
  EXPECT_EQ(bytes, 2 * (kBytesOfOut + kBytesOfLse) + std::max(scratch(0), scratch(1)));
  EXPECT_TRUE(fake().launches.empty());
  args = over_args();
  args.workspace.bytes = bytes - 1;
  expect_in(std::to_string(bytes), refusal(args));
  args.workspace = {};
  expect_in("workspace", refusal(args));
  args.workspace = {place(12), bytes};
  EXPECT_EQ(refusal(args), "nothing");
}

TEST_F(AttentionOver, OfOneCacheIsThatPassAlone) {
  caches_.resize(1);
  const OverArgs args = over_args();
  EXPECT_EQ(attention_over_workspace_bytes(runtime_, args),
            runtime_.workspace_bytes(caches_[0].spec, shape(0)));
  attention_over(runtime_, args, nullptr);
  const plan::ExecutionPlan plan = plan::make_plan({caches_[0].spec}, shape(0), runtime_.device(), {});
  ASSERT_EQ(fake().launches.size(), plan.launches.size());
  const Params params = launched_params(fake().launches.back(), plan);
  EXPECT_EQ(params.o.data, args.out.data);
  EXPECT_EQ(params.lse.data, args.lse);
}

TEST_F(AttentionOver, NothingIsLaunchedWhereAnArgumentIsWrong) {
  struct Wrong {
    std::function<void(std::vector<CacheArgs>&, OverArgs&)> change;
    const char* says;
  };
  const Wrong all[] = {
      {[](auto&, OverArgs& a) { a.caches = {}; }, "caches has 0 entries: give 1 to 8"},
      {[](auto& c, OverArgs& a) { c.resize(9, c[1]), a.caches = c; }, "caches has 9 entries"},
      {[](auto& c, auto&) { c[1].args.out.data = place(10); }, "caches[1]: out is given, but it is one for"},
      {[](auto& c, auto&) { c[0].args.lse = place<float>(11); }, "caches[0]: lse is given"},
      {[](auto& c, auto&) { c[1].args.workspace.data = place(12); }, "caches[1]: workspace is given"},
      {[](auto& c, auto&) { c[1].spec.sinks = true; }, ":sinks:cache has sinks, which count once"},
      {[](auto& c, auto&) { c[1].spec.epilogue.row_max = true; }, "caches[1]: the spec has row_max"},
      {[](auto& c, auto&) { c[0].spec.epilogue.out_mod = OutProgram("2.0 * out"); },
       "caches[0]: the spec has out_mod"},
      {[](auto& c, auto&) { c[0].spec.score = weights(ScoreProgram("sigmoid(score)")); },
       "caches[0]: the spec has a score of weights()"},
      {[](auto& c, auto&) { c[0].spec.partial.running_state = true; },
       "caches[0]: the spec has running_state"},
      {[](auto& c, auto&) { c[1].spec.dtype = DType::fp16; },
       "caches[1]: the spec has fp16, and that of caches[0] bf16"},
      {[](auto& c, auto&) { c[1].spec.head_dim_v = 32; },
       "caches[1]: V has 32 columns, and that of caches[0] 64"},
      {[](auto& c, auto&) { c[1].args.q.size[2] = 7; },
       "caches[1]: q is [4, 8, 7, 64], and that of caches[0]"},
      {[](auto& c, auto&) { c[1].args.k.size[3] = 32; }, "caches[1]: k has"},
      {[](auto& c, auto&) { c[0].args.page_table = {}; }, "caches[0]: page_table"},
      {[](auto& c, auto&) { c[1].args.kv_lengths = nullptr; }, "caches[1]: kv_lengths is null"},
      {[](auto&, OverArgs& a) { a.out.size[1] = 3; }, "out is [4, 3, 1024, 64], but"},
      {[](auto&, OverArgs& a) { a.out.data = nullptr; }, "out is null"},
      {[](auto&, OverArgs& a) { a.lse = reinterpret_cast<float*>(0x1001); }, "lse"},
      {[](auto& c, OverArgs& a) {
         a.out.size[0] = c[0].args.q.size[0] = c[1].args.q.size[0] = std::int64_t{1} << 62;
       },
       "q is [4611686018427387904, 8, 1024, 64]: give"},
  };
  for (const Wrong& wrong : all) {
    caches_ = {cache_of(kPages), cache_of(kSlots)};
    OverArgs args = over_args();
    wrong.change(caches_, args);
    if (!args.caches.empty()) args.caches = caches_;
    expect_in(wrong.says, refusal(args));
  }
  caches_ = {cache_of(kPages), cache_of(kSlots)};
  EXPECT_EQ(refusal(over_args()), "nothing");
}

/// What the same caches are in C.
struct InC {
  SpecPtr specs[2] = {make_spec(kPages), make_spec(kSlots)};
  flashjit_forward_args forward[2] = {};
  flashjit_cache_args caches[2] = {};
  flashjit_over_args args{};

  InC(const OverArgs& given) {
    const auto view = [](const auto& from) {
      flashjit_tensor to{const_cast<void*>(static_cast<const void*>(from.data)), {}, {}};
      std::ranges::copy(from.size, to.size), std::ranges::copy(from.stride, to.stride);
      return to;
    };
    for (int i = 0; i < 2; ++i) {
      const ForwardArgs& of = given.caches[i].args;
      forward[i].struct_size = sizeof forward[i];
      forward[i].q = view(of.q), forward[i].k = view(of.k), forward[i].v = view(of.v);
      forward[i].kv_lengths = of.kv_lengths, forward[i].sinks = of.sinks;
      forward[i].page_table = {of.page_table.data, of.page_table.sequences, of.page_table.columns, 0,
                               nullptr};
      caches[i] = {specs[i].get(), &forward[i]};
    }
    args.struct_size = sizeof args;
    args.caches = caches, args.cache_count = 2;
    args.out = view(given.out), args.lse = given.lse;
    args.workspace = given.workspace.data, args.workspace_bytes = given.workspace.bytes;
  }
};

TEST_F(AttentionOver, InCIsTheSame) {
  flashjit_options options{};
  options.struct_size = sizeof options;
  options.cache_dir = "";
  options.nvrtc = nvrtc_.c_str();
  options.log = [](void*, const char*) {};
  const RuntimePtr runtime = make_runtime(options);
  attention_over(runtime_, over_args(), nullptr);
  const auto launches = fake().launches;
  fake().launches.clear();
  InC c(over_args());
  ASSERT_EQ(flashjit_attention_over(runtime.get(), &c.args, nullptr), FLASHJIT_OK)
      << flashjit_last_error_message();
  ASSERT_EQ(fake().launches.size(), launches.size());
  EXPECT_EQ(fake().launches.back().blocks, launches.back().blocks);
  EXPECT_EQ(std::memcmp(fake().launches.back().params.data(), launches.back().params.data(),
                        offsetof(MergeParams, fp32_out)),
            0);
  std::size_t bytes = 0;
  ASSERT_EQ(flashjit_attention_over_workspace_bytes(runtime.get(), &c.args, &bytes), FLASHJIT_OK);
  EXPECT_EQ(bytes, attention_over_workspace_bytes(runtime_, over_args()));

  const auto says = [&](const char* part) {
    EXPECT_EQ(flashjit_attention_over(runtime.get(), &c.args, nullptr), FLASHJIT_INVALID_ARGUMENT) << part;
    expect_in(part, flashjit_last_error_message());
  };
  EXPECT_EQ(flashjit_attention_over_workspace_bytes(runtime.get(), &c.args, nullptr),
            FLASHJIT_INVALID_ARGUMENT);
  c.args.cache_count = 9, says("cache_count is 9: give 1 to 8");
  c.args.cache_count = 2, c.args.caches = nullptr, says("caches is null");
  c.args.caches = c.caches, c.caches[1].args = nullptr, says("flashjit_forward_args is null");
  c.caches[1].args = &c.forward[1], c.caches[1].spec = nullptr, says("spec is null");
  c.args.struct_size = 8, says("flashjit_over_args.struct_size is 8");
}

}  // namespace
}  // namespace flashjit::test

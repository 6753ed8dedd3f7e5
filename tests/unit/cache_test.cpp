// Caches of slots and pages without a GPU: what a call may be given, and what the CPU reference makes of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "call/arguments.hpp"
#include "flashjit/reference.hpp"
#include "support/dtypes.hpp"
#include "tests/support/cache_case.hpp"
#include "tests/support/refused_call.hpp"

namespace flashjit::test {
namespace {

/// Three sequences of up to 5 pages of 16 rows, of which a pool has 40.
ForwardArgs paged_args() {
  return {.q = ConstTensorView::bhsd(address(0x100000), 3, 4, 2, 64),
          .k = ConstTensorView::bshd(address(0x200000), 40, 16, 2, 64),
          .v = ConstTensorView::bshd(address(0x300000), 40, 16, 2, 64),
          .out = TensorView::bhsd(address(0x400000), 3, 4, 2, 64),
          .kv_lengths = address<std::int32_t>(0x500000),
          .page_table = {address<std::int32_t>(0x600000), 3, 5}};
}
KernelSpec paged_spec() { return parse_spec("bf16:d64:causal:pages16"); }

template <class Change>
std::string refusal(Change&& change) {
  KernelSpec spec = paged_spec();
  ForwardArgs args = paged_args();
  change(spec, args);
  return refusal_of([&] {
    spec.validate();
    check_arguments(spec, args);
  });
}

TEST(Cache, ShapeIsOfTheBoundsAlone) {
  EXPECT_EQ(shape_of(paged_spec(), paged_args()), (AttentionShape{3, 4, 2, 2, 80}));
  ForwardArgs args = paged_args();
  args.max_seqlen_kv = 70;
  EXPECT_EQ(shape_of(paged_spec(), args), (AttentionShape{3, 4, 2, 2, 70}));
  const KernelSpec slots = parse_spec("bf16:d64:cache");
  EXPECT_EQ(shape_of(slots, args), (AttentionShape{3, 4, 2, 2, 70}));
  args.max_seqlen_kv = 0;
  EXPECT_EQ(shape_of(slots, args), (AttentionShape{3, 4, 2, 2, 16}));
}

TEST(Cache, SoundArgumentsPass) {
  EXPECT_EQ(refusal([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(refusal([](auto& spec, auto& args) {
              spec.varlen = true;
              args.q = ConstTensorView::bhsd(address(0x100000), 1, 4, 50, 64);
              args.out = TensorView::bhsd(address(0x400000), 1, 4, 50, 64);
              args.cu_seqlens_q = address<std::int32_t>(0x700000);
              args.batch_size = 3, args.max_seqlen_q = 40;
            }),
            "accepted");
  const auto slots = [](auto& spec, auto& args) {
    spec = parse_spec("bf16:d64:cache");
    args.page_table = {};
  };
  EXPECT_EQ(refusal(slots), "accepted");
  EXPECT_EQ(refusal([&](auto& spec, auto& args) {
              slots(spec, args);
              args.page_table = {address<std::int32_t>(0x600000), 3, 1};
            }),
            "accepted");
  EXPECT_EQ(refusal([](auto&, auto& args) { args.page_table = {nullptr, 3, 0}; }), "accepted") << "no keys";
}

TEST(Cache, TablesInOneRow) {
  const auto with = [](const std::int32_t* starts, std::int64_t entries, std::int64_t stride,
                       const char* spec) {
    return refusal([&](auto& s, auto& args) {
      s = parse_spec(spec);
      args.page_table = {address<std::int32_t>(0x600000), 3, entries, stride, starts};
    });
  };
  const auto* starts = address<std::int32_t>(0x700000);
  EXPECT_EQ(with(starts, 5, 0, "bf16:d64:pages16"), "accepted");
  expect_says(with(starts, 5, 5, "bf16:d64:pages16"),
              {"page_table has starts and stride 5", "leave stride 0"});
  expect_says(with(starts, 1, 0, "bf16:d64:cache"), {"page_table.starts is given", "KvLayout::paged"});
  expect_says(with(address<std::int32_t>(0x700002), 5, 0, "bf16:d64:pages16"), {"page_table.starts is at"});
}

TEST(Cache, WrongArgumentsAreNamed) {
  expect_says(refusal([](auto&, auto& args) { args.page_table = {}; }), {"page_table is null", "[3, "});
  expect_says(refusal([](auto&, auto& args) { args.page_table.data = nullptr; }), {"page_table is null"});
  expect_says(refusal([](auto&, auto& args) { args.page_table.sequences = 2; }),
              {"page_table has 2 rows", "3 sequences"});
  expect_says(refusal([](auto&, auto& args) { args.page_table.columns = -1; }),
              {"page_table has -1 columns"});
  expect_says(refusal([](auto&, auto& args) { args.page_table.stride = -5; }), {"page_table has stride -5"});
  expect_says(refusal([](auto&, auto& args) { args.page_table.data = address<std::int32_t>(0x600002); }),
              {"page_table is at", "multiple of 4 bytes"});
  expect_says(refusal([](auto&, auto& args) { args.max_seqlen_kv = 81; }),
              {"max_seqlen_kv is 81", "room for 80 keys"});
  expect_says(refusal([](auto& spec, auto& args) {
                spec = parse_spec("bf16:d64:cache");
                args.page_table = {}, args.max_seqlen_kv = 17;
              }),
              {"max_seqlen_kv is 17", "a slot of k", "room for 16 keys"});
  expect_says(refusal([](auto&, auto& args) { args.max_seqlen_kv = -1; }), {"max_seqlen_kv is -1"});
  expect_says(refusal([](auto&, auto& args) { args.kv_lengths = nullptr; }),
              {"kv_lengths is null", "a cache"});
  expect_says(refusal([](auto&, auto& args) { args.v.size[2] = 8; }),
              {"v has 8 rows a page", "page_size is 16"});
  expect_says(refusal([](auto& spec, auto&) { spec.kv.page_size = 32; }),
              {"k has 16 rows a page", "page_size is 32"});
  expect_says(refusal([](auto&, auto& args) { args.v.size[0] = 39; }), {"v has batch 39", "k has 40"});
  expect_says(refusal([](auto&, auto& args) { args.k.stride[2] = 100; }), {"k has stride 100", "16 bytes"});
  expect_says(refusal([](auto&, auto& args) { args.cu_seqlens_kv = address<std::int32_t>(0x700000); }),
              {"cu_seqlens_kv is given", "kv_lengths"});
  expect_says(refusal([](auto&, auto& args) { args.batch_size = 3; }), {"batch_size 3", "varlen"});
  expect_says(refusal([](auto& spec, auto& args) {
                spec = parse_spec("bf16:d64:cache");
                args.page_table.columns = 2;
              }),
              {"page_table has 2 columns", "slot of each sequence"});
  expect_says(refusal([](auto& spec, auto& args) {
                spec = parse_spec("bf16:d64:cache");
                args.page_table = {};
                args.k.size[0] = args.v.size[0] = 2;
              }),
              {"k has 2 slots for 3 sequences", "page_table"});
  expect_says(refusal([](auto& spec, auto& args) {
                spec = parse_spec("bf16:d64");
                args.kv_lengths = nullptr;
                args.k.size[0] = args.v.size[0] = 3;
              }),
              {"page_table is given", "KvLayout::paged(page_size)"});
  expect_says(refusal([](auto&, auto& args) {
                args.k.size[0] = args.v.size[0] = 1LL << 27;
                args.k.stride[0] = args.v.stride[0] = 0;
              }),
              {"k has 134217728 pages of 16 rows", "2^31 - 1 rows"});
}

/// Sizes of scales are [sequences, pages, heads, rows]: [3, 40, 2, 16], or 1.
TEST(Cache, ScalesAreChecked) {
  const auto with_scales = [](const char* spec_text, ConstScaleView k, ConstScaleView v) {
    return refusal([&](auto& spec, auto& args) {
      spec = parse_spec(spec_text);
      args.k_scale = k, args.v_scale = v;
    });
  };
  const auto* data = address<const float>(0x800000);
  const auto one = ConstScaleView::of_tensor(data), heads = ConstScaleView::of_heads(data, 3, 2),
             pages = ConstScaleView::of_pages(data, 40, 2), keys = ConstScaleView::of_keys(data, 40, 2, 16);
  constexpr const char *kOfHeads = "bf16:d64:kve4m3:pages16", *kOfKeys = "bf16:d64:kve4m3:pages16:key_scales";
  for (const ConstScaleView& k : {one, heads}) EXPECT_EQ(with_scales(kOfHeads, k, one), "accepted");
  for (const ConstScaleView& k : {one, heads, pages, keys})
    EXPECT_EQ(with_scales(kOfKeys, k, keys), "accepted");
  expect_says(with_scales(kOfHeads, {}, one), {"k_scale is null", "e4m3", "device memory"});
  expect_says(with_scales(kOfHeads, one, {}), {"v_scale is null"});
  expect_says(with_scales("bf16:d64:pages16", one, one), {"k_scale is given", "bf16", "spec.kv.k_format"});
  expect_says(with_scales(kOfHeads, pages, one), {"k_scale has 40 pages", "spec.kv.key_scales"});
  expect_says(with_scales(kOfHeads, one, keys), {"v_scale has 40 pages", "spec.kv.key_scales"});
  expect_says(with_scales(kOfHeads, ConstScaleView::of_heads(data, 2, 2), one),
              {"k_scale has 2 sequences", "or 3"});
  expect_says(with_scales(kOfKeys, one, ConstScaleView::of_keys(data, 40, 2, 8)),
              {"v_scale has 8 rows", "or 16"});
  expect_says(with_scales(kOfHeads, ConstScaleView::of_tensor(address<const float>(0x800002)), one),
              {"k_scale is at 0x800002", "4 bytes"});
  ConstScaleView backwards = heads;
  backwards.stride[0] = -2;
  expect_says(with_scales(kOfHeads, backwards, one), {"k_scale has stride -2 in sequences"});
}

TEST(Cache, ScalesOfQAreChecked) {
  const auto with_scale = [](const char* spec_text, ConstScaleView q) {
    return refusal([&](auto& spec, auto& args) {
      spec = parse_spec(spec_text);
      args.k_scale = args.v_scale = ConstScaleView::of_tensor(address<const float>(0x800000));
      args.q_scale = q;
    });
  };
  const auto* data = address<const float>(0x800000);
  constexpr const char* kOfCodes = "bf16:d64:kve4m3:q_codes:pages16";
  for (const ConstScaleView& q : {ConstScaleView::of_tensor(data), ConstScaleView::of_heads(data, 3, 2)})
    EXPECT_EQ(with_scale(kOfCodes, q), "accepted");
  expect_says(with_scale(kOfCodes, {}), {"q_scale is null", "e4m3", "each sequence and KV head"});
  expect_says(with_scale("bf16:d64:kve4m3:pages16", ConstScaleView::of_tensor(data)),
              {"q_scale is given", "bf16", "spec.prologue.q_codes"});
  expect_says(with_scale(kOfCodes, ConstScaleView::of_heads(data, 3, 4)), {"q_scale has 4 heads", "or 2"});
  expect_says(with_scale(kOfCodes, ConstScaleView::of_pages(data, 40, 2)),
              {"q_scale has 40 pages", "one for all."});
}

/// The host sees scales in the reference alone, of which it reads those that keys have.
TEST(Cache, TheReferenceSaysWhichScaleIsWrong) {
  constexpr int kDim = 16, kRows = 2;
  const KernelSpec spec = parse_spec("bf16:d16:kve4m3:cache:key_scales:q_codes");
  const std::vector<std::uint8_t> codes(kRows * kDim);
  std::vector<std::uint16_t> out(kDim);
  const std::int32_t length = 1;
  const auto with = [&](float q, float k, float v) {
    const std::vector<float> k_scales = {k, 0.0f}, v_scales = {v, std::nanf("")};
    ForwardArgs args{.q = ConstTensorView::bhsd(codes.data(), 1, 1, 1, kDim),
                     .k = ConstTensorView::bhsd(codes.data(), 1, 1, kRows, kDim),
                     .v = ConstTensorView::bhsd(codes.data(), 1, 1, kRows, kDim),
                     .out = TensorView::bhsd(out.data(), 1, 1, 1, kDim)};
    args.kv_lengths = &length;
    args.q_scale = ConstScaleView::of_tensor(&q);
    args.k_scale = ConstScaleView::of_keys(k_scales.data(), 1, 1, kRows);
    args.v_scale = ConstScaleView::of_keys(v_scales.data(), 1, 1, kRows);
    try {
      reference_forward(spec, args);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(with(kLeast, 1, 1), "accepted");
  expect_says(with(0, 1, 1), {"q_scale is 0 in sequence 0", "above 0"});
  expect_says(with(1, -0.5f, 1), {"k_scale is -0.5 in sequence 0, page 0, head 0, row 0", "above 0"});
  expect_says(with(1, 1, std::numeric_limits<float>::infinity()), {"v_scale is inf", "finite"});
  expect_says(with(1, std::nanf(""), 1), {"k_scale is nan", "finite"});
}

/// Rows of 8 bits are 16 elements apart, or more.
TEST(Cache, StridesOfCodesAreInBytes) {
  const auto with_stride = [](std::int64_t stride) {
    return refusal([&](auto& spec, auto& args) {
      spec = parse_spec("bf16:d64:kve4m3:pages16");
      args.k_scale = args.v_scale = ConstScaleView::of_tensor(address<const float>(0x800000));
      args.k.stride[2] = stride;
    });
  };
  EXPECT_EQ(with_stride(144), "accepted");
  expect_says(with_stride(136), {"k has stride 136", "multiples of 16 elements (16 bytes)"});
}

TEST(Cache, SpecsThatMakeNoSenseAreRefused) {
  expect_says(refusal([](auto& spec, auto&) { spec.pass = Pass::backward; }), {"backward", "pages"});
  expect_says(refusal([](auto& spec, auto&) { spec.kv.page_size = -1; }),
              {"kv.page_size is -1", "1 or more"});
}

/// The reference called as users call it, on the cache; and on the keys in order.
void expect_read_as_in_order(const CacheCase& test) {
  SCOPED_TRACE(name_of(test));
  const Cache cache = make_cache(test);
  const reference::Forward expected = reference::forward(cache.problem);
  const auto bytes = [&](DType type, const std::vector<double>& values) {
    std::vector<std::byte> all(values.size() * size_of(type));
    for (std::size_t i = 0; i < values.size(); ++i)
      dtype_info(type).encode(values[i], &all[i * size_of(type)]);
    return all;
  };
  const DType kv_type = test.spec.kv_type();
  const auto q = bytes(test.spec.q_type(), cache.q), k = bytes(kv_type, cache.k.values),
             v = bytes(kv_type, cache.v.values), k_scale = bytes(DType::fp32, cache.k_scale.values),
             v_scale = bytes(DType::fp32, cache.v_scale.values),
             q_scale = bytes(DType::fp32, cache.q_scale.values);
  const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
  const bool varlen = test.spec.varlen;
  const std::int64_t b = varlen ? 1 : batch, rows = varlen ? cache.problem.cu_seqlens_q.back() : seqlen_q;
  std::vector<float> out(expected.out.size());
  std::vector<float> lse(expected.lse.size());
  const void* of_v = test.layout == PoolLayout::interleaved ? k.data() : v.data();
  ForwardArgs args{.q = ConstTensorView::bhsd(q.data(), b, heads_q, rows, test.spec.head_dim),
                   .k = cache.k.view(static_cast<const void*>(k.data()), kv_type),
                   .v = cache.v.view(of_v, kv_type),
                   .out = TensorView::bhsd(out.data(), b, heads_q, rows, test.spec.v_dim()),
                   .lse = lse.data(),
                   .kv_lengths = cache.problem.kv_lengths.data(),
                   .max_seqlen_kv = seqlen_kv,
                   .page_table = cache.table_view(cache.table.data(), cache.starts.data()),
                   .k_scale = cache.k_scale.view(k_scale.data()),
                   .v_scale = cache.v_scale.view(v_scale.data()),
                   .q_scale = cache.q_scale.view(q_scale.data())};
  if (varlen) {
    args.cu_seqlens_q = cache.problem.cu_seqlens_q.data();
    args.batch_size = batch, args.max_seqlen_q = seqlen_q;
  }
  reference_forward(test.spec, args);
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], static_cast<float>(expected.out[i])) << i;
}

/// A cache of two pages of four rows, one sequence and one query: the reference's complaint, or its O.
std::string read_with(const char* spec, std::int32_t length, std::array<std::int32_t, 3> table,
                      std::vector<float>* result = nullptr, const std::int32_t* starts = nullptr) {
  constexpr int kDim = 16, kRows = 4;
  std::vector<float> k(2 * kRows * kDim, 0.0f), v(k.size()), q(kDim, 1.0f), out(kDim);
  std::iota(v.begin(), v.end(), 0.0f);
  ForwardArgs args{.q = ConstTensorView::bhsd(q.data(), 1, 1, 1, kDim),
                   .k = ConstTensorView::bhsd(k.data(), 2, 1, kRows, kDim),
                   .v = ConstTensorView::bhsd(v.data(), 2, 1, kRows, kDim),
                   .out = TensorView::bhsd(out.data(), 1, 1, 1, kDim)};
  args.kv_lengths = &length;
  args.page_table = {table.data(), 1, 3, 0, starts};
  try {
    reference_forward(parse_spec(spec), args);
  } catch (const Error& error) {
    return error.what();
  }
  if (result) *result = out;
  return "accepted";
}

/// Engines free pages that a window has left behind, and write -1 into the table.
TEST(Cache, TheReferenceNeedsThePagesThatQueriesSee) {
  constexpr const char* kWindow = "fp32:d16:pages4:mask{kv > q + seqlen_kv - seqlen_q - 4}";
  std::vector<float> whole, freed;
  EXPECT_EQ(read_with(kWindow, 8, {0, 1, 0}, &whole), "accepted");
  EXPECT_EQ(read_with(kWindow, 8, {-1, 1, -1}, &freed), "accepted");
  EXPECT_EQ(whole, freed);
  EXPECT_EQ(freed[0], 88.0f);  // the mean of the second page's rows
  expect_says(read_with(kWindow, 7, {-1, 1, 0}), {"page_table names page -1 for key 3 of sequence 0"});
  expect_says(read_with("fp32:d16:pages4", 5, {0, 2, 0}),
              {"page 2 for key 4 of sequence 0", "k has 2 pages", "give one of them"});
}

TEST(Cache, TheReferenceNamesStartsThatTheTableHasNoEntriesFor) {
  const auto from = [](std::int32_t start, std::int32_t length) {
    return read_with("fp32:d16:pages4", length, {0, 1, 0}, nullptr, &start);
  };
  EXPECT_EQ(from(1, 8), "accepted");
  EXPECT_EQ(from(7, 0), "accepted") << "no keys";
  expect_says(from(7, 1), {"sequence 0 begins at entry 7, but page_table has 3"});
  expect_says(from(2, 5), {"sequence 0 begins at entry 2, but page_table has 3"});
  expect_says(from(-1, 1), {"sequence 0 begins at entry -1"});
}

TEST(Cache, TheReferenceRefusesLengthsThatNothingHasRoomFor) {
  EXPECT_EQ(read_with("fp32:d16:pages4", 0, {0, 1, 0}), "accepted");
  expect_says(read_with("fp32:d16:pages4", 13, {0, 1, 0}), {"kv_lengths has 13 for sequence 0", "0 to 12"});
  expect_says(read_with("fp32:d16:pages4", -1, {0, 1, 0}), {"kv_lengths has -1"});
}

/// On a device nothing can say so: kernels may read the prefix from the first sequence's pages for all.
TEST(Cache, TheReferenceSaysWhatSequencesDoNotShare) {
  constexpr int kDim = 16, kRows = 4;
  const KernelSpec spec = parse_spec("fp32:d16:causal:varlen:pages4:shared_prefix");
  std::vector<float> k(4 * kRows * kDim), v(k.size()), q(3 * kDim), out(q.size());
  std::iota(k.begin(), k.end(), 1.0f);
  const std::vector<std::int32_t> offsets = {0, 2, 2, 3};
  const auto with = [&](std::int32_t prefix, std::vector<std::int32_t> lengths,
                        std::vector<std::int32_t> table) {
    ForwardArgs args{.q = ConstTensorView::bhsd(q.data(), 1, 1, 3, kDim),
                     .k = ConstTensorView::bhsd(k.data(), 4, 1, kRows, kDim),
                     .v = ConstTensorView::bhsd(v.data(), 4, 1, kRows, kDim),
                     .out = TensorView::bhsd(out.data(), 1, 1, 3, kDim)};
    args.kv_lengths = lengths.data();
    args.cu_seqlens_q = offsets.data();
    args.batch_size = 3, args.max_seqlen_q = 2;
    args.page_table = {table.data(), 3, 2};
    args.prefix_length = &prefix;
    try {
      reference_forward(spec, args);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const std::vector<std::int32_t> shared = {0, 1, 3, 3, 0, 2}, unlike = {0, 1, 3, 3, 1, 2};
  EXPECT_EQ(with(4, {6, 0, 7}, shared), "accepted");  // the second sequence has no queries
  EXPECT_EQ(with(0, {1, 0, 0}, unlike), "accepted");
  expect_says(with(-1, {6, 0, 7}, shared), {"prefix_length is -1", "0 or more"});
  expect_says(with(5, {6, 0, 7}, shared),
              {"prefix_length is 5, but sequence 0 has 4 keys before its queries'", "at most"});
  expect_says(with(2'000'000'000, {8, 0, 8}, shared), {"sequence 0 has 6 keys"});
  expect_says(with(4, {6, 0, 4}, shared), {"sequence 2 has 3 keys before its queries'"});
  expect_says(with(5, {8, 0, 8}, shared), {"key 4 of sequence 2 is not that of sequence 0", "share"});
  expect_says(with(4, {6, 0, 7}, unlike), {"key 0 of sequence 2"});
  v[0] = 1, v[kRows * kDim] = 2;  // of pages 0 and 1
  std::copy_n(k.begin(), kRows * kDim, k.begin() + kRows * kDim);
  expect_says(with(4, {6, 0, 7}, unlike), {"key 0 of sequence 2"});
}

TEST(Cache, TheReferenceReadsSlotsAndPages) {
  unsigned seed = 0;
  for (const char* rest : {":cache", ":pages1", ":pages3", ":pages16", ":pages256"})
    for (const PoolLayout layout : {PoolLayout::hnd, PoolLayout::nhd, PoolLayout::interleaved})
      for (const char* queries : {":causal", ":causal:varlen", ":kve4m3:varlen", ":kvint8:key_scales",
                                  ":kve4m3:q_codes:varlen", ":kve5m2:q_codes:causal"})
        expect_read_as_in_order({.spec = parse_spec(fmt::format("fp32:d16{}{}", queries, rest)),
                                 .shape = {4, 4, 2, 7, 50},
                                 .layout = layout,
                                 .slot_table = seed % 2 == 0,
                                 .seed = seed++});
}

/// `causal` lets the last query see a sequence's own last key, as FlashAttention's call with a cache does.
TEST(Cache, CausalEndsAtEachSequencesOwnLength) {
  reference::Problem problem{.spec = parse_spec("fp32:d8:causal:cache"), .shape = {2, 1, 1, 3, 6}};
  problem.q.assign(2 * 3 * 8, 0.0);
  problem.k.assign(2 * 6 * 8, 0.0);
  for (int b = 0; b < 2; ++b)
    for (int n = 0; n < 6; ++n)
      for (int i = 0; i < 8; ++i) problem.v.push_back(n);
  problem.kv_lengths = {4, 2};
  const reference::Forward result = reference::forward(problem);
  // The queries see 2, 3 and 4 of 4 keys, and none, 1 and 2 of 2.
  const std::vector<double> means = {0.5, 1, 1.5, 0, 0, 0.5};
  for (int row = 0; row < 6; ++row) EXPECT_DOUBLE_EQ(result.out[row * 8], means[row]) << row;
  EXPECT_EQ(result.lse[3], -std::numeric_limits<double>::infinity());
}

TEST(Cache, TextsOfSpecs) {
  EXPECT_EQ(to_string(parse_spec("bf16:d128:pages16:causal:varlen")), "fwd:bf16:d128:causal:varlen:pages16");
  EXPECT_EQ(to_string(parse_spec("bf16:d128:cache")), "fwd:bf16:d128:cache");
  EXPECT_EQ(to_string(KernelSpec{{.head_dim = 64, .kv = KvLayout::paged(8)}}), "fwd:bf16:d64:pages8");
  EXPECT_THROW(parse_spec("bf16:d128:pages0"), Error);
  EXPECT_EQ(to_string(parse_spec("bf16:d128:pages1056")), "fwd:bf16:d128:pages1056");
  EXPECT_THROW(parse_spec("bf16:d128:pages16:pages16"), Error);
}

}  // namespace
}  // namespace flashjit::test

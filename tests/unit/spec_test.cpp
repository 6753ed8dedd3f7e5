// The values that describe a problem: text forms, validation, and the messages of every refusal.
#include "flashjit/spec.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "flashjit/error.hpp"
#include "support/text.hpp"
#include "tests/support/random_program.hpp"

namespace flashjit {
namespace {

/// The message of the refusal, checked for its code.
std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.message();
    return error.message();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

void expect_refused(const std::function<void()>& action, const std::vector<std::string>& parts) {
  const std::string message = refusal(action);
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
}

class Random {
 public:
  std::int64_t from_to(std::int64_t min, std::int64_t max) {
    return std::uniform_int_distribution<std::int64_t>(min, max)(engine_);
  }
  bool coin() { return from_to(0, 1) == 1; }

  KernelSpec spec() {
    KernelSpec spec;
    spec.pass = coin() ? Pass::forward : Pass::backward;
    spec.dtype = static_cast<DType>(from_to(0, 2));
    spec.head_dim = static_cast<int>(8 * from_to(1, 32));
    if (coin()) spec.head_dim_v = static_cast<int>(8 * from_to(1, 32));
    if (coin()) spec.mask = causal(coin() ? CausalAlignment::bottom_right : CausalAlignment::top_left);
    test::RandomProgram programs(engine_(), {.depth = 3});
    if (coin()) spec.score = programs.score_program();
    if (coin()) spec.mask = programs.mask_program();
    spec.dropout = coin();
    if (coin()) spec.kv = KvLayout::padded();
    if (coin())
      spec.block_map = {static_cast<int>(16 * from_to(1, 16)), static_cast<int>(16 * from_to(1, 16))};
    spec.reproducible.deterministic = coin();
    spec.varlen = !spec.kv.is_padded() && coin();
    spec.sinks = coin();
    if (spec.pass == Pass::forward && !spec.kv.is_padded() && coin()) {
      spec.kv = coin() ? KvLayout::paged(static_cast<int>(from_to(1, 256))) : KvLayout::slots();
      spec.kv.shared_prefix = spec.kv.is_paged() && spec.varlen && coin();
    }
    spec.epilogue.row_max = coin();
    if (spec.pass == Pass::forward && spec.head_dim % 16 == 0 && spec.v_dim() % 16 == 0 && coin()) {
      spec.kv = spec.kv.with(kv_format_of(static_cast<DType>(from_to(3, 5))));
      spec.kv.key_scales = coin();
      spec.prologue.q_codes = spec.kv_type() != DType::int8 && coin();
      if (spec.prologue.q_codes) spec.epilogue.pv_sums = static_cast<PvSums>(from_to(0, 2));
    }
    spec.partial.fp32_out = coin();
    spec.partial.two_terms = coin();
    spec.partial.fp32_grads = coin();
    spec.partial.add_grads = coin();
    spec.partial.dropout_place = spec.dropout && coin();
    spec.reproducible.batch_invariant = coin();
    spec.partial.running_state = !spec.sinks && !spec.kv.is_cache() && !spec.has_scales() && coin();
    const bool has_softmax = spec.dropout || spec.sinks || spec.epilogue.row_max || spec.prologue.q_codes ||
                             spec.reproducible.batch_invariant || spec.partial.running_state;
    if (!has_softmax && !spec.score.empty() && coin()) spec.score = weights(spec.score);
    const bool changed_later =
        spec.indices || spec.reproducible.batch_invariant || spec.partial.running_state;
    spec.epilogue.skip_softmax =
        spec.pass == Pass::forward && !spec.dropout && !spec.score.is_weight() && coin();
    if (!changed_later && coin()) spec.epilogue.out_mod = OutProgram("w: fp32 1d; out * w[column]");
    const bool plain_rows = !spec.indices && !spec.prologue.q_codes && !spec.has_scales() &&
                            !spec.partial.running_state && !spec.partial.add_grads;
    if (plain_rows && coin())
      spec.prologue.q_mod = RowProgram("w: fp32 1d; element * w[column] + element_at(column ^ 1)");
    if (plain_rows && !spec.kv.is_cache() && !spec.kv.quantized() && !spec.kv.shared_kv && coin())
      spec.prologue.k_mod = RowProgram("element * rsqrt(sum_of_squares) + to_float(kv)");
    return spec;
  }

  AttentionShape shape() {
    const bool few_heads = coin();  // rows of all heads are 2^48 at most
    const std::int64_t max = few_heads ? 20 : 65535, longest = few_heads ? 2147482624 : 4096;
    const std::int64_t heads_kv = from_to(0, max);
    return {from_to(0, max), heads_kv * from_to(0, 9), heads_kv, from_to(0, std::min(max, longest)),
            from_to(0, longest)};
  }

  TileConfig config() {
    return {static_cast<Family>(from_to(0, 2)),
            static_cast<int>(from_to(1, 1024)),
            static_cast<int>(from_to(1, 1024)),
            static_cast<int>(from_to(1, 32)),
            static_cast<int>(from_to(1, 16)),
            coin(),
            static_cast<int>(from_to(1, 2)),
            static_cast<int>(from_to(1, 32)),
            coin(),
            coin()};
  }

 private:
  std::mt19937_64 engine_{20240229};
};

// --- specs

TEST(Spec, TextForms) {
  EXPECT_EQ(to_string(KernelSpec{{.head_dim = 128, .mask = causal()}}), "fwd:bf16:d128:causal");
  const KernelSpec everything{{.dtype = DType::fp16,
                               .head_dim = 64,
                               .head_dim_v = 32,
                               .mask = causal(CausalAlignment::top_left),
                               .dropout = true,
                               .kv = KvLayout::padded(),
                               .block_map = {128, 64},
                               .reproducible = {.deterministic = true}},
                              Pass::backward};
  EXPECT_EQ(to_string(everything), "bwd:fp16:d64x32:causal_top_left:dropout:kvlen:map128x64:det");
  EXPECT_EQ(to_string(KernelSpec{{.head_dim = 64, .mask = causal(), .varlen = true, .sinks = true}}),
            "fwd:bf16:d64:causal:varlen:sinks");
  EXPECT_EQ(parse_spec(to_string(everything)), everything);
}

TEST(Spec, ATextOfBothPassesNamesNone) {
  const AttentionSpec spec{.head_dim = 64, .mask = causal(), .reproducible = {.deterministic = true}};
  EXPECT_EQ(to_string(spec), "bf16:d64:causal:det");
  EXPECT_EQ(AttentionSpec(parse_spec(to_string(spec))), spec.normalized());
}

TEST(Spec, ProgramsStandInBraces) {
  KernelSpec spec{{.head_dim = 64, .dropout = true}};
  spec.score = expr::score + expr::tensor("slopes", ElementType::fp32, 1)[expr::h];
  spec.mask = expr::q >= expr::kv && expr::q - expr::kv < 1024;
  const std::string text =
      "fwd:bf16:d64:score{slopes: fp32 1d; score + slopes[h]}:mask{q >= kv && q - kv < 1024}:dropout";
  EXPECT_EQ(to_string(spec), text);
  EXPECT_EQ(parse_spec(text), spec.normalized());
  EXPECT_EQ(parse_spec("bf16:d64:dropout:mask{ (q>=kv)&&q-kv<1024 }:score{slopes:fp32 1d;score+slopes[h]}"),
            spec.normalized());
  // The spellings of no program, and of those with a name.
  EXPECT_EQ(to_string(parse_spec("bf16:d64:score{score}:mask{true}")), "fwd:bf16:d64");
  EXPECT_EQ(to_string(parse_spec("bf16:d64:score{}:mask{ }")), "fwd:bf16:d64");
  EXPECT_EQ(to_string(parse_spec("bf16:d64:mask{kv <= q}")), "fwd:bf16:d64:causal_top_left");
  EXPECT_EQ(parse_spec("bf16:d64:mask{causal}").mask, causal());
}

TEST(Spec, EqualProblemsHaveOneSpelling) {
  const KernelSpec plain{{.head_dim = 64}},
      spelled{{.head_dim = 64, .head_dim_v = 64, .reproducible = {.deterministic = true}}};
  EXPECT_EQ(plain.normalized(), spelled.normalized());
  EXPECT_EQ(to_string(plain), to_string(spelled));
  EXPECT_EQ(plain.normalized().head_dim_v, 64);
  EXPECT_TRUE((KernelSpec{{.head_dim = 64, .reproducible = {.deterministic = true}}, Pass::backward})
                  .normalized()
                  .reproducible.deterministic);
}

TEST(Spec, WhatTheBackwardPassAloneNeedsIsReadWhateverThePass) {
  KernelSpec spec = parse_spec("bf16:d64:det");
  EXPECT_EQ(to_string(spec), "fwd:bf16:d64");
  spec.pass = Pass::backward;
  EXPECT_EQ(to_string(spec), "bwd:bf16:d64:det");
}

TEST(Spec, TheBackwardPassReadsOInFp32WhereItWasWrittenSo) {
  const auto text = [](const char* spec) { return to_string(parse_spec(spec)); };
  EXPECT_EQ(text("bwd:bf16:d64:fp32_out"), "bwd:bf16:d64:fp32_out");
  EXPECT_EQ(text("bwd:fp32:d64:fp32_out"), "bwd:fp32:d64");
  EXPECT_EQ(text("bwd:bf16:d64:out_mod{out * 2.0}:fp32_out"), "bwd:bf16:d64:out_mod{out * 2.0}");
  EXPECT_EQ(text("bwd_jvp:bf16:d64:fp32_out"), "bwd_jvp:bf16:d64");
}

TEST(Spec, RoundTrip) {
  Random random;
  for (int round = 0; round < 5000; ++round) {
    const KernelSpec spec = random.spec();
    ASSERT_NO_THROW(spec.validate());
    const std::string text = to_string(spec);
    ASSERT_EQ(parse_spec(text), spec.normalized()) << text;
    ASSERT_EQ(to_string(parse_spec(text)), text);
  }
}

TEST(Spec, ShorthandsAndOrder) {
  EXPECT_EQ(parse_spec("bf16:d64"), parse_spec("fwd:bf16:d64x64"));
  EXPECT_EQ(parse_spec("bwd:fp16:d64:det:map128:kvlen:causal:dropout"),
            parse_spec("bwd:fp16:d64:causal:dropout:kvlen:map128x128:det"));
}

TEST(Spec, ParseRefusesWithTheOffendingText) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    expect_refused([&] { parse_spec(text); }, parts);
  };
  refused("", {"the spec ''", "it must be one of: fp16, bf16, fp32"});
  refused("fwd",
          {"'fwd' ends before the element type", "write [fwd:|bwd:|jvp:|bwd_jvp:|append:|merge:|quantize:]"});
  refused("bf16", {"'bf16' ends before the head dimension"});
  refused("forward:bf16:d64", {"'forward:bf16:d64' has a wrong field 'forward'"});
  refused("fp8:d64", {"'fp8'", "fp16, bf16, fp32"});
  refused("bf16:64", {"has '64' where 'd' and a number should stand"});
  refused("bf16:dim64", {"has 'dim64' where 'd' and a number should stand"});
  refused("bf16:d", {"wrong field 'd'", "the number after 'd' is ''"});
  refused("bf16:d64x", {"wrong field 'd64x'", "is ''"});
  refused("bf16:d64x32x16", {"unknown field 'd64x32x16'"});
  refused("bf16:d0", {"'d0'", "from 1 to"});
  refused("bf16:d99999999999999999999", {"'99999999999999999999'", "from 1 to"});
  refused("bf16:d600", {"'bf16:d600' is out of range", "head_dim is 600", "a multiple of 8 from 8 to 576"});
  refused("bf16:d576", {"head_dim_v is 576", "a multiple of 8 from 8 to 512"});
  refused("bf16:d64:map8", {"'bf16:d64:map8' is out of range"});
  refused("bf16:d12", {"'bf16:d12' is out of range", "head_dim is 12", "a multiple of 8 from 8 to 576"});
  refused("bf16:d64x4", {"head_dim_v is 4", "a multiple of 8 from 8 to 512"});
  refused("bf16:d64:", {"unknown field ''"});
  refused("bf16:d64:casual", {"unknown field 'casual'", "causal or causal_top_left"});
  refused("bf16:d64:causal:causal_top_left", {"has both 'causal' and 'causal_top_left'"});
  refused("bf16:d64:mask{q < kv}:causal", {"has both 'mask{q < kv}' and 'causal'"});
  refused("bf16:d64:score{score}:score{q}", {"has both 'score{score}' and 'score{q}'"});
  refused("bf16:d64:mask{q < kv", {"the field 'mask{q < kv', whose '{' has no '}' at its end"});
  refused("bf16:d64:mask{q < kv}x", {"whose '{' has no '}' at its end"});
  refused("bf16:d64:mask", {"unknown field 'mask'", "mask{<program>}"});
  refused("bf16:d64:masks{q < kv}", {"unknown field 'masks{q < kv}'"});
  refused("bf16:d64:mask{q}", {"wrong field 'mask{q}'", "a mask program is bool", "not int: 'q'"});
  refused("bf16:d64:mask{q < score}", {"a mask program reads score"});
  refused("bf16:d64:score{n: int; m}", {"wrong field 'score{n: int; m}'", "unknown name 'm'", "^"});
  refused("bf16:d64:score{t: fp32 1d; score + t[h]}:mask{t: int; q < t}", {"is out of range", "'t: int'"});
  refused("bf16:d64:dropout:dropout", {"has 'dropout' twice"});
  refused("bf16:d64:kvlen:kvlen", {"has 'kvlen' twice"});
  refused("bf16:d64:kvlen:pages16", {"has both 'kvlen' and 'pages16'"});
  refused("bf16:d64:cache:kvlen", {"has both 'cache' and 'kvlen'"});
  refused("bwd:bf16:d64:det:det", {"has 'det' twice"});
  refused("e4m3:d64", {"dtype is e4m3", "q_codes"});
  refused("bf16:d64:varlen:varlen", {"has 'varlen' twice"});
  refused("bf16:d64:sink", {"unknown field 'sink'", "varlen, sinks"});
  refused("bf16:d64:varlen:kvlen", {"varlen and kv_lengths are both set", "leave kv_lengths out"});
  refused("bf16:d64:map64x64:map32x32", {"has both 'map64x64' and 'map32x32'"});
  refused("bf16:d64:map64x", {"wrong field 'map64x'"});
  refused("bf16:d64:map8x64", {"block_map.q is 8", "a multiple of 16 from 16 to 256"});
  refused("bf16:d64:map64x24", {"block_map.kv is 24", "a multiple of 16 from 16 to 256"});
  refused(std::string("bf16:d64:\n\0x", 12), {"unknown field '??x'"});
}

TEST(Spec, ValidateNamesTheField) {
  const auto refused = [](const KernelSpec& spec, const std::vector<std::string>& parts) {
    expect_refused([&] { spec.validate(); }, parts);
  };
  refused({}, {"head_dim is 0", "a multiple of 8 from 8 to 576"});
  refused({{.head_dim = 584}}, {"head_dim is 584"});
  refused({{.head_dim = 64, .kv = {.kind = KvLayout::Kind::slots, .page_size = 16}}}, {"kv.page_size is 16"});
  refused({{.head_dim = 64, .kv = KvLayout::paged(0)}}, {"kv.page_size is 0", "1 or more"});
  refused({{.head_dim = 64, .kv = {.kind = static_cast<KvLayout::Kind>(9)}}}, {"kv.kind is 9"});
  refused({{.head_dim = 64, .kv = {.kind = KvLayout::Kind::paged, .page_size = 16, .shared_prefix = true}}},
          {"shared_prefix", "without varlen"});
  refused({{.head_dim = 64, .kv = {.kind = KvLayout::Kind::slots, .shared_prefix = true}, .varlen = true}},
          {"shared_prefix", "without pages"});
  refused({{.head_dim = 64, .sinks = true, .partial = {.running_state = true}}},
          {"running_state", "sinks", "first state"});
  refused({{.head_dim = 64, .kv = KvLayout::slots(), .partial = {.running_state = true}}},
          {"running_state", "a cache", "merge()"});
  refused({{.head_dim = 64, .indices = true, .partial = {.running_state = true}}},
          {"running_state", "indices"});
  refused({{.head_dim = 64,
            .kv = KvLayout{}.with(kv_format_of(DType::e4m3)),
            .partial = {.running_state = true}}},
          {"running_state", "quantized K and V"});
  refused({{.head_dim = 64, .head_dim_v = 128, .kv = {.shared_kv = true}}},
          {"shared_kv", "head_dim_v is 128"});
  refused({{.head_dim = 64, .kv = {.shared_kv = true, .v_format = kv_format_of(DType::e4m3)}}},
          {"shared_kv", "V is e4m3", "leave kv.v_format out"});
  refused({{.head_dim = 64, .head_dim_v = 32, .prologue = {.q_rope = true}}},
          {"q_rope", "head_dim_v is 32", "shared_kv is not set"});
  refused({{.head_dim = 64, .kv = {.shared_kv = true}, .prologue = {.q_rope = true}}},
          {"q_rope", "head_dim_v is 64", "more columns of K than of V"});
  refused({{.head_dim = 64, .head_dim_v = 32, .kv = {.shared_kv = true}, .prologue = {.q_rope = true}},
           Pass::backward},
          {"the pass is bwd", "q_rope", "join its parts"});
  refused({{.head_dim = 64,
            .head_dim_v = 32,
            .kv = {.shared_kv = true},
            .prologue = {.q_rope = true, .q_mod = RowProgram("element * 2.0")}}},
          {"q_rope", "q_mod", "leave one out"});
  refused({{.head_dim = 520}}, {"head_dim_v is 520", "a multiple of 8 from 8 to 512"});
  refused({{.head_dim = -8}}, {"head_dim is -8"});
  refused({{.head_dim = 64, .head_dim_v = 20}}, {"head_dim_v is 20"});
  refused({{.head_dim = 64,
            .score = ScoreProgram("t: fp32 1d; score + t[h]"),
            .mask = MaskProgram("t: int; q < t")}},
          {"the score program declares 't: fp32 1d', but the mask program 't: int'"});
  refused({{.head_dim = 64, .block_map = {0, 64}}}, {"block_map.q is 0"});
  refused({{.head_dim = 64, .block_map = {64, 0}}}, {"block_map.kv is 0"});
  refused({{.head_dim = 64, .block_map = {272, 64}}}, {"block_map.q is 272"});
  refused({{.head_dim = 64}, static_cast<Pass>(7)}, {"the pass is 'unknown(7)'"});
  refused({{.dtype = static_cast<DType>(9), .head_dim = 64}}, {"the element type is 'unknown(9)'"});
  refused({{.head_dim = 64, .kv = KvLayout{}.with({.code = static_cast<KvFormat::Code>(99)})}},
          {"number 99", "no name"});
  refused({{.head_dim = 64, .kv = {.key_scales = true}}}, {"key_scales is set", "bf16", "set kv.k_format"});
  refused({{.head_dim = 64, .kv = {.hadamard = true}}}, {"hadamard is set", "K is bf16", "leave it out"});
  expect_refused([] { parse_spec("bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages16:hadamard"); },
                 {"hadamard is set", "shared_kv", "O with it"});
  refused({{.head_dim = 72, .kv = KvLayout{}.with(kv_format_of(DType::e4m3))}},
          {"head_dim is 72", "e4m3", "a multiple of 16", "pad"});
  refused({{.head_dim = 64, .head_dim_v = 40, .kv = KvLayout{}.with(kv_format_of(DType::int8))}},
          {"head_dim_v is 40", "a multiple of 16"});
  refused({{.head_dim = 64, .kv = KvLayout{}.with(kv_format_of(DType::e5m2))}, Pass::backward},
          {"backward", "e5m2", "the type of Q"});
  refused({{.head_dim = 64}, Pass::quantize}, {"quantize", "bf16", "set kv.k_format"});
  refused({{.head_dim = 64, .prologue = {.q_codes = true}}},
          {"q_codes is set", "K and V are bf16", "set kv.k_format"});
  refused({{.head_dim = 64, .epilogue = {.pv_sums = PvSums::of_all}}},
          {"pv_sums is set", "Q is bf16", "set q_codes"});
  expect_refused([] { parse_spec("bf16:d64:kve4m3:q_codes:sums4:sums_all"); },
                 {"sums4", "sums_all", "exclude each other"});
  refused({{.head_dim = 64, .kv = KvLayout{}.with(kv_format_of(DType::int8)), .prologue = {.q_codes = true}}},
          {"q_codes", "int8", "e4m3 and e5m2"});
  refused({{.head_dim = 64, .kv = KvLayout{}.with(kv_format_of(DType::e4m3)), .prologue = {.q_codes = true}},
           Pass::backward},
          {"backward", "e4m3", "Q in that of O"});
}

TEST(Spec, TheTypeOfKAndVHasItsText) {
  const KernelSpec spec = parse_spec("bf16:d128:causal:kve4m3:cache:key_scales");
  EXPECT_EQ(spec.kv_type(), DType::e4m3);
  EXPECT_TRUE(spec.has_scales() && spec.kv.key_scales);
  EXPECT_EQ(to_string(spec), "fwd:bf16:d128:kve4m3:causal:cache:key_scales");
  EXPECT_EQ(to_string(parse_spec("fp16:d64:kvint8:kvlen")), "fwd:fp16:d64:kvint8:kvlen");
  // That of Q is no other.
  EXPECT_EQ(to_string(parse_spec("fp16:d64:kvfp16")), "fwd:fp16:d64");
  EXPECT_FALSE(parse_spec("fp16:d64").has_scales());
  EXPECT_EQ(parse_spec("fp16:d64").kv_type(), DType::fp16);
  expect_refused([] { parse_spec("bf16:d64:kve4m3:kvint8"); }, {"has both 'kve4m3' and 'kvint8'"});
  expect_refused([] { parse_spec("bf16:d64:kvfp8"); }, {"unknown field 'kvfp8'", "kv<e4m3|e5m2|int8>"});
  expect_refused([] { parse_spec("bf16:d64:kvfp16"); },
                 {"K and V are fp16 and Q is bf16", "e4m3, e5m2 or int8"});
}

TEST(Spec, AttentionIsTheSameOverRotatedRows) {
  EXPECT_EQ(to_string(parse_spec("bf16:d128:kv{q4_0}:pages16:hadamard").normalized()),
            "fwd:bf16:d128:kv{q4_0}:pages16");
  EXPECT_TRUE(parse_spec("append:bf16:d128:kv{q4_0}:pages16:hadamard").normalized().kv.hadamard);
}

TEST(Spec, FormatsOfKAndVHaveTheirTexts) {
  for (const char* text :
       {"fwd:bf16:d128:kv{nvfp4}:causal", "fwd:bf16:d128:kv{int4:g32:fp16:zero}:cache",
        "fwd:bf16:d128:k{q8_0}:v{q4_0}:pages16", "fwd:fp16:d64:k{int8}", "fwd:bf16:d64:v{mxfp4}",
        "fwd:bf16:d128:kv{int4}:cache:key_scales", "fwd:bf16:d576x512:kv{fp8_ds_mla}:cache:shared_kv",
        "append:bf16:d128:kv{nvfp4}:pages16", "append:bf16:d128:k{q4_0}:pages16:hadamard",
        "quantize:bf16:d128:kv{nvfp4}"})
    EXPECT_EQ(to_string(parse_spec(text)), text);
  EXPECT_EQ(to_string(parse_spec("bf16:d64:kv{fp8}")), "fwd:bf16:d64:kve4m3");
  EXPECT_EQ(to_string(parse_spec("bf16:d64:v{e4m3}:k{e4m3}")), "fwd:bf16:d64:kve4m3");
  const KernelSpec spec = parse_spec("bf16:d128:k{q8_0}:v{e4m3}");
  EXPECT_TRUE(spec.decodes_kv() && !spec.has_scales());
  EXPECT_EQ(spec.kv_type(), DType::bf16);
  EXPECT_EQ(spec.stored_k().columns, 136);
  EXPECT_EQ(spec.stored_k().alignment, 2);
  EXPECT_EQ(spec.stored_v().columns, 128);
  EXPECT_EQ(parse_spec("bf16:d576x512:kv{fp8_ds_mla}:shared_kv").stored_v().columns, 656);
  expect_refused([] { parse_spec("bf16:d64:kv{nvfp5}"); },
                 {"'kv{nvfp5}'", "neither a name nor codes", "mxfp4"});
  expect_refused([] { parse_spec("bf16:d64:kv{nvfp4}:k{q8_0}"); }, {"has both 'kv{nvfp4}' and 'k{q8_0}'"});
  expect_refused([] { parse_spec("bf16:d80:kv{q8_0}"); }, {"head_dim is 80", "blocks of 32"});
  expect_refused([] { parse_spec("bwd:bf16:d64:kv{q8_0}").validate(); },
                 {"backward", "q8_0", "the type of Q"});
  expect_refused([] { parse_spec("bf16:d64:kv{q8_0}:key_scales"); }, {"key_scales is set", "q8_0"});
  expect_refused([] { parse_spec("bf16:d64:kv{nvfp4}:q_codes"); }, {"q_codes is set", "nvfp4"});
}

// --- shapes

TEST(Shape, RoundTrip) {
  Random random;
  EXPECT_EQ(to_string(AttentionShape{2, 32, 8, 4096, 4096}), "b2:hq32:hkv8:sq4096:skv4096");
  for (int round = 0; round < 5000; ++round) {
    const AttentionShape shape = random.shape();
    ASSERT_EQ(parse_shape(to_string(shape)), shape) << to_string(shape);
  }
}

TEST(Shape, ZeroSizesAreLegal) {
  for (const AttentionShape& shape :
       {AttentionShape{}, AttentionShape{0, 4, 2, 8, 8}, AttentionShape{1, 0, 0, 8, 8},
        AttentionShape{1, 0, 4, 8, 8}, AttentionShape{1, 4, 4, 0, 8}, AttentionShape{1, 4, 4, 8, 0}}) {
    EXPECT_NO_THROW(shape.validate()) << to_string(shape);
  }
}

TEST(Shape, ValidateNamesTheField) {
  const auto refused = [](const AttentionShape& shape, const std::vector<std::string>& parts) {
    expect_refused([&] { shape.validate(); }, parts);
  };
  refused({-1, 1, 1, 1, 1}, {"batch is -1", "from 0 to 2147483647"});
  refused({1, -1, 1, 1, 1}, {"heads_q is -1"});
  refused({1, 1, -1, 1, 1}, {"heads_kv is -1"});
  refused({1, 1, 1, -1, 1}, {"seqlen_q is -1"});
  refused({1, 1, 1, 1, -1}, {"seqlen_kv is -1"});
  refused({2147483648, 1, 1, 1, 1}, {"batch is 2147483648"});
  refused({1, 1, 1, 1, 2147483647}, {"seqlen_kv is 2147483647", "from 0 to 2147482624"});
  refused({1, 6, 4, 1, 1}, {"heads_q is 6 and heads_kv is 4", "a multiple of heads_kv"});
  refused({1, 6, 0, 1, 1}, {"heads_q is 6 and heads_kv is 0"});
}

TEST(Shape, ParseRefusesWithTheOffendingText) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    expect_refused([&] { parse_shape(text); }, parts);
  };
  refused("", {"the shape '' has '' where 'b' and a number should stand", "such as b2:hq32"});
  refused("b1:hq1:hkv1:sq1", {"ends before 'skv' and a number"});
  refused("b1:hkv1:hq1:sq1:skv1", {"has 'hkv1' where 'hq' and a number should stand"});
  refused("b1:hq1:hkv1:sq1:skv1:x", {"unknown field 'x'"});
  refused("b1:hq1:hkv1:sq1k:skv1", {"wrong field 'sq1k'", "the number after 'sq' is '1k'"});
  refused("b-1:hq1:hkv1:sq1:skv1", {"wrong field 'b-1'", "from 0 to 2147483647"});
  refused("b1:hq3:hkv2:sq1:skv1", {"is out of range", "heads_q is 3 and heads_kv is 2"});
}

// --- configurations

TEST(Config, RoundTrip) {
  Random random;
  for (int round = 0; round < 5000; ++round) {
    const TileConfig config = random.config();
    ASSERT_EQ(parse_config(to_string(config)), config) << to_string(config);
  }
}

TEST(Config, TextForms) {
  EXPECT_EQ(to_string(TileConfig{Family::simt, 64, 32, 4}), "simt:br64:bc32:w4");
  const TileConfig all{Family::sm80, 128, 64, 4, 2, true, 2, 3, true, true, true, true, true, true};
  EXPECT_EQ(to_string(all),
            "sm80:br128:bc64:w4:s2:q_in_registers:d_split2:min_blocks3:split:pack_gqa:cluster:tma:"
            "decode_cache:join_lists");
  EXPECT_EQ(parse_config(
                "sm80:br128:bc64:w4:join_lists:tma:decode_cache:cluster:pack_gqa:split:min_blocks3:d_split2:"
                "q_in_registers:s2"),
            all);
  EXPECT_EQ(parse_config("simt:br64:bc32:w4:s1:d_split1:min_blocks1"), (TileConfig{Family::simt, 64, 32, 4}));
}

TEST(Config, ParseRefusesWithTheOffendingText) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    expect_refused([&] { parse_config(text); }, parts);
  };
  refused("", {"the tile configuration ''", "sm90, sm80, sm75, simt"});
  refused("sm99:br1:bc1:w1", {"wrong field 'sm99'", "sm90, sm80, sm75, simt"});
  refused("sm80", {"ends before 'br' and a number", "write <family>:br<rows>"});
  refused("sm80:bc64:br64:w4", {"has 'bc64' where 'br' and a number should stand"});
  refused("sm80:br0:bc64:w4", {"wrong field 'br0'", "from 1 to 1024"});
  refused("sm80:br64:bc64:w33", {"wrong field 'w33'", "from 1 to 32"});
  refused("sm80:br64:bc64:w4:s0", {"wrong field 's0'", "from 1 to 16"});
  refused("sm80:br64:bc64:w4:d_split9", {"wrong field 'd_split9'", "from 1 to 8"});
  refused("sm80:br64:bc64:w4:min_blocks99", {"wrong field 'min_blocks99'", "from 1 to 32"});
  refused("sm80:br64:bc64:w4:s2:s3", {"has both 's2' and 's3'"});
  refused("sm80:br64:bc64:w4:q_in_registers:q_in_registers", {"has 'q_in_registers' twice"});
  refused("sm80:br64:bc64:w4:fast", {"unknown field 'fast'"});
  refused("sm80:br64:bc64:w4:stages2", {"unknown field 'stages2'"});
}

// --- any bytes at all: an Error or a value, nothing else

TEST(Parsers, SurviveDamagedText) {
  Random random;
  const std::string letters = "fwdbwd:bf16:d64x32:causal:map128x64:detbr-+0123456789sq\xff\n";
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = random.coin()   ? to_string(random.spec())
                       : random.coin() ? to_string(random.shape())
                                       : to_string(random.config());
    for (int edit = 0; edit < 2 && !text.empty(); ++edit) {
      const auto at = static_cast<std::size_t>(random.from_to(0, static_cast<std::int64_t>(text.size()) - 1));
      if (random.coin()) {
        text.erase(at, static_cast<std::size_t>(random.from_to(1, 3)));
      } else {
        text[at] = letters[static_cast<std::size_t>(
            random.from_to(0, static_cast<std::int64_t>(letters.size()) - 1))];
      }
    }
    const auto parses_or_refuses = [&](auto parse) {
      try {
        const auto value = parse(text);
        if constexpr (requires { value.normalized(); })
          ASSERT_EQ(parse(to_string(value)), value.normalized()) << text;
        else
          ASSERT_EQ(parse(to_string(value)), value) << text;
      } catch (const Error& error) {
        ++refused;
        ASSERT_EQ(error.code(), ErrorCode::invalid_argument);
        ASSERT_NE(error.message().find(quoted(std::string_view(text))), std::string::npos) << error.message();
      }
    };
    parses_or_refuses(parse_spec);
    parses_or_refuses(parse_shape);
    parses_or_refuses(parse_config);
  }
  EXPECT_GT(refused, 20000);
}

// --- devices

TEST(Device, KnownArchitectures) {
  for (const char* arch : {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a",
                           "sm_120", "sm_120a", "sm_121"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    EXPECT_EQ(to_string(device), arch);
    EXPECT_EQ(device.name, arch);
    EXPECT_EQ(device, DeviceInfo::parse(to_string(device)));
    EXPECT_EQ(device.compute_capability, std::stoi(std::string(arch).substr(3))) << arch;
    EXPECT_GT(device.multiprocessors, 0);
    EXPECT_GE(device.shared_per_sm, device.shared_per_block);
    EXPECT_GE(device.shared_per_block, 64 << 10);
    EXPECT_EQ(device.registers_per_sm, 65536);
    EXPECT_GE(device.l2_bytes, 4 << 20);
  }
  EXPECT_EQ(DeviceInfo::parse("sm_90a").shared_per_block, 232448);
  EXPECT_EQ(DeviceInfo::parse("sm_80").multiprocessors, 108);
}

TEST(Device, UnknownArchitecturesAreRefusedWithTheKnownOnes) {
  for (const std::string arch : {"", "sm_70", "sm90", "90", "sm_90A"}) {
    expect_refused([&] { DeviceInfo::parse(arch); },
                   {"the architecture is '" + arch + "'", "sm_75, sm_80", "sm_121"});
  }
}

}  // namespace
}  // namespace flashjit

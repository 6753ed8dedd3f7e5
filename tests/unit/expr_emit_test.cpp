// The text of generated hooks: what they say of themselves, and that common programs come out short.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "expr/emit.hpp"

namespace flashjit::expr {
namespace {

std::string hooks(std::string_view score, std::string_view mask, const EmitOptions& options = {}) {
  return emit_hooks(trees_of(ScoreProgram(score), MaskProgram(mask)), options);
}
ProgramFacts facts(std::string_view score, std::string_view mask) {
  return facts_of(ScoreProgram(score), MaskProgram(mask));
}

/// What is between the braces of a static member function.
std::string body(const std::string& hooks, std::string_view name) {
  const std::size_t at = hooks.find(fmt::format(" {}(", name));
  if (at == std::string::npos) return {};
  const std::size_t begin = hooks.find("{\n", at) + 2;
  return hooks.substr(begin, hooks.find("\n  }", begin) - begin);
}

bool says(const std::string& text, std::string_view what) { return text.find(what) != std::string::npos; }

/// A constant of the hooks.
int number_said(const std::string& hooks, std::string_view name) {
  const std::string before = fmt::format("static constexpr int {} = ", name);
  return std::stoi(hooks.substr(hooks.find(before) + before.size()));
}

/// The constants of the hooks that plans count on.
MaskTraits traits_said(const std::string& hooks) {
  return {.listed = says(hooks, "kListed = true;"),
          .uses_head = says(hooks, "kMaskUsesHead = true;"),
          .q_reads = number_said(hooks, "kMaskRowTerms"),
          .kv_reads = number_said(hooks, "kMaskColumnTerms")};
}

TEST(Emit, HooksAreThoseOfTheContract) {
  for (const char* mask :
       {"", "causal", "causal_top_left", "(q ^ kv) % 3 == 0", "d: int32 1d; d[q] == d[kv]"}) {
    for (const char* score : {"", "score * 2.0", "t: fp32 1d grad; score + t[q]"}) {
      const std::string text = hooks(score, mask);
      for (const char* name :
           {"Head head(", "float score(", "float score_grad(", "void add_capture_grads(", "bool mask(",
            "flashjit::TileClass classify_tile(", "flashjit::Range kv_bounds(", "flashjit::Range q_bounds(",
            "int mask_row_term(", "int mask_column_term("}) {
        const std::size_t at = text.find(name);
        ASSERT_NE(at, std::string::npos) << name << " is missing in\n" << text;
        EXPECT_EQ(text.find(name, at + 1), std::string::npos) << name << " is there twice in\n" << text;
      }
      EXPECT_EQ(std::count(text.begin(), text.end(), '{'), std::count(text.begin(), text.end(), '}'));
    }
  }
}

TEST(Emit, NoProgramsAreSaidToBeNone) {
  const std::string text = hooks("", "");
  EXPECT_TRUE(says(text, "kHasScore = false;"));
  EXPECT_TRUE(says(text, "kHasMask = false;"));
  EXPECT_TRUE(says(text, "kScoreGrad = false;"));
  EXPECT_TRUE(says(text, "kListed = false;"));
  EXPECT_EQ(body(text, "mask"), "    return true;");
  EXPECT_EQ(body(text, "kv_bounds"), "    return {0, head.seqlen_kv};");
}

TEST(Emit, ConstantsTellWhatMasksDependOn) {
  EXPECT_TRUE(says(hooks("", "n: int32 1d; kv < n[b]"), "kMaskUsesHead = false;"));
  EXPECT_TRUE(says(hooks("", "kv < q + h_kv"), "kMaskUsesHead = true;"));
  const std::string documents = hooks("", "doc: int32 2d; kv <= q && doc[b, q] == doc[b, kv]");
  EXPECT_TRUE(says(documents, "kListed = true;") && says(documents, "kEvaluateTiles = false;"));
  EXPECT_TRUE(says(documents, "kMaskRowTerms = 1;") && says(documents, "kMaskColumnTerms = 1;"));
}

TEST(Emit, ValuesOfOnePositionAreFoundApart) {
  const auto values = [](const char* score) {
    const std::string text = hooks(score, "");
    EXPECT_EQ(says(text, "kScoreRowTerm = true;"), facts(score, "").row_term) << score;
    EXPECT_EQ(says(text, "kScoreColumnTerm = true;"), facts(score, "").column_term) << score;
    return std::pair(says(text, "kScoreRowTerm = true;"), says(text, "kScoreColumnTerm = true;"));
  };
  for (const char* score :
       {"bias: fp32 2d; score + bias[b, kv]", "w: bf16 1d; at: int32 1d; score * exp(w[at[kv + 1]] * 2.0)",
        "doc: int32 1d; score - to_float(doc[kv])", "w: fp32 1d; w[kv]",
        "w: fp32 1d; score * w[kv] + score * w[kv]"})
    EXPECT_EQ(values(score), std::pair(false, true)) << score;
  for (const char* score : {"t: fp16 2d; score * sigmoid(t[h, q])", "t: fp16 1d; score + t[q / 2] / 3.0"})
    EXPECT_EQ(values(score), std::pair(true, false)) << score;
  EXPECT_EQ(values("f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])"), std::pair(true, true));
  for (const char* score :
       {"", "slopes: fp32 1d; score + slopes[h] * to_float(kv - q)", "score + to_float(kv)",
        "t: fp32 1d; score + t[kv - q]", "t: fp32 2d; score + t[q, kv]",
        "w: fp32 1d; score * w[kv] + w[kv + 1]", "w: fp32 1d; bias: bf16 2d; score * w[kv] + bias[q, kv]",
        "at: int32 1d; t: fp32 1d; score + t[at[kv] - q]"})
    EXPECT_EQ(values(score), std::pair(false, false)) << score;

  const auto reads_beyond = [](const char* score) { return facts(score, "").score_reads_pairs; };
  for (const char* score : {"", "w: fp32 1d; score * w[kv]", "w: fp32 1d; s: fp32 1d; score * s[h] + w[kv]",
                            "w: fp32 1d; score * w[q]", "w: fp32 1d; score * w[kv] + w[q]"})
    EXPECT_FALSE(reads_beyond(score)) << score;
  for (const char* score : {"w: fp32 1d; score * w[kv] + w[kv + 1]", "w: fp32 2d; score * w[q, kv]"})
    EXPECT_TRUE(reads_beyond(score)) << score;

  const std::string text = hooks("f: fp32 2d; score + (2.0 * f[h, q] - sigmoid(f[h, kv]))", "");
  EXPECT_EQ(body(text, "score_of_terms").find("read_capture"), std::string::npos);
  EXPECT_TRUE(says(body(text, "score_of_terms"), "of_query") && says(body(text, "score_of_terms"), "of_key"));
  EXPECT_TRUE(says(body(text, "score_row_term"), "q.at") && says(body(text, "score_column_term"), "kv.at"));
  const std::string checked = hooks("w: fp32 1d; score + w[kv]", "", {.check_indices = true});
  EXPECT_TRUE(says(checked, "kScoreColumnTerm = false;")) << "each index is checked at its pair";
}

TEST(Emit, MasksAreOfReadsWhereTheyReadTensorsByOnePosition) {
  for (const char* mask :
       {"doc: int32 1d; doc[q] == doc[kv]", "valid: bool 2d; valid[b, kv]",
        "from: int64 1d; q >= kv && kv >= from[q]", "doc: int32 1d; doc[q / 2] < kv / 2"}) {
    const std::string text = hooks("", mask);
    EXPECT_TRUE(says(text, "kMaskTerms = true;")) << mask;
    EXPECT_EQ(body(text, "mask_of_terms").find("read_capture"), std::string::npos) << mask;
    EXPECT_TRUE(says(body(text, "mask"), "read_capture")) << mask;
  }
  for (const char* mask : {"", "causal", "q / 64 == kv / 64", "w: fp32 1d; w[q] < w[kv]",
                           "keep: bool 2d; keep[q, kv]", "n: int32 1d; kv < n[b]"})
    EXPECT_TRUE(says(hooks("", mask), "kMaskTerms = false;")) << mask;

  const auto reads_pairs = [](const char* mask) { return facts("", mask).mask_reads_pairs; };
  for (const char* mask : {"", "causal", "doc: int32 1d; doc[q] == doc[kv]", "n: int32 1d; kv < n[b]"})
    EXPECT_FALSE(reads_pairs(mask)) << mask;
  for (const char* mask : {"w: fp32 1d; w[q] < w[kv]", "keep: bool 2d; keep[q, kv]",
                           "doc: int32 1d; keep: bool 2d; doc[q] == doc[kv] && keep[q, kv]"})
    EXPECT_TRUE(reads_pairs(mask)) << mask;

  const std::string text = hooks("", "keys: bool 1d; doc: int32 1d; keys[kv] && doc[q] == doc[kv] / 3");
  EXPECT_TRUE(says(body(text, "mask_of_terms"), "q_reads[0]") &&
              says(body(text, "mask_of_terms"), "(kv_reads[0] != 0)"));
  EXPECT_TRUE(says(body(text, "mask_column_term"), "divide(v0, 3)"));
  const std::string checked = hooks("", "valid: bool 1d; valid[kv]", {.check_indices = true});
  EXPECT_TRUE(says(checked, "kMaskTerms = false;")) << "each index is checked at its pair";
}

TEST(Emit, BiasTilesAreReadWhereTheLastIndicesAreTheQueryAndTheKey) {
  const auto name_of = [](const char* score) {
    const ProgramFacts known = facts(score, "");
    return known.bias_tile ? known.declarations[known.bias_tile->capture].name : "";
  };
  for (const char* score :
       {"bias: bf16 4d; score + bias[b, h, q, kv]", "bias: fp16 2d; score * (1.0 + bias[q + 7, kv - 3])",
        "bias: fp16 3d; n: int; t: int32 1d; score + bias[t[h_kv], q + n, kv + seqlen_q]",
        "bias: bf16 2d; score + bias[q * 1, kv + 0 * q]",
        "other: fp32 2d; bias: bf16 2d; score + bias[q, kv] + other[q, kv]"}) {
    EXPECT_TRUE(says(hooks(score, ""), "kBiasTile = true;")) << score;
    EXPECT_EQ(name_of(score), "bias") << score;
  }
  for (const char* score :
       {"", "bias: fp32 2d; score + bias[q, kv]", "bias: bf16 2d; score + bias[kv, q]",
        "bias: bf16 2d; score + bias[q, 2 * kv]", "bias: bf16 2d; score + bias[h, kv]",
        "bias: bf16 2d; score + bias[q, kv - q]", "bias: bf16 2d; score + bias[q + kv, kv]",
        "bias: bf16 2d; score + bias[q / 2, kv]", "bias: bf16 3d; score + bias[q % 2, q, kv]",
        "bias: bf16 1d; score + bias[q + kv]", "bias: bf16 2d; score + bias[q, min(kv, 7)]",
        "doc: int32 2d; score + to_float(doc[q, kv])"}) {
    EXPECT_TRUE(says(hooks(score, ""), "kBiasTile = false;")) << score;
    EXPECT_EQ(name_of(score), "") << score;
  }
  const std::string text = hooks("bias: bf16 3d; score + 2.0 * bias[h, q, kv + 3]", "");
  EXPECT_EQ(body(text, "bias_tile"),
            "    return flashjit::bias_tile_of(p.captures[0], static_cast<int>(0LL), static_cast<int>(3LL), "
            "head.h);");
  for (const char* function : {"score_of_element", "score_grad_of_element"})
    EXPECT_FALSE(says(body(text, function), "read_capture")) << function;
  EXPECT_TRUE(says(body(text, "score_of_element"), "flashjit::as_read(flashjit::bf16{element})"));
  const std::string curved = hooks("bias: bf16 2d; tanh(score * bias[q, kv])", "");
  EXPECT_TRUE(says(body(curved, "score_grad_of_element"), "flashjit::as_read(flashjit::bf16{element})"));
  EXPECT_FALSE(says(body(curved, "score_grad_of_element"), "read_capture"));
}

TEST(Emit, TraitsAreWhatPlansAssume) {
  for (const char* mask :
       {"", "causal", "w: int; q - kv < w", "q / 2 == kv / 2", "q < 3 || kv < 3", "kv % 1 == 0",
        "n: int32 1d; kv < n[b]", "d: int32 2d; e: bool 2d; d[b, q] == d[b, kv] && e[h, kv]"}) {
    MaskTraits assumed = facts("", mask).mask;
    EXPECT_EQ(assumed.uses_batch, says(mask, "[b")) << mask;
    assumed.uses_batch = false;  // kernels are not told
    EXPECT_EQ(traits_said(hooks("", mask)), assumed) << mask;
  }
}

TEST(Emit, CausalIsOneComparisonAPair) {
  EXPECT_EQ(
      body(hooks("", "causal"), "mask"),
      "    const bool v0 = kv.at <= flashjit::wrap_add(q.at, static_cast<int>(head.r0));\n    return v0;");
  EXPECT_EQ(body(hooks("", "causal_top_left"), "mask"), "    const bool v0 = kv.at <= q.at;\n    return v0;");
}

TEST(Emit, WindowsAreComparedWithABoundOfTheRow) {
  EXPECT_TRUE(says(body(hooks("", "q - kv < 1024"), "mask"), "kv.at >= flashjit::wrap_add(q.at, (-1023))"));
  EXPECT_TRUE(says(body(hooks("", "w: int; q - kv < w"), "mask"), "kv.at >= flashjit::saturate_int("));
}

TEST(Emit, AlibiIsTwoInstructionsAPair) {
  const std::string text = hooks("slopes: fp32 1d; score + slopes[h] * to_float(kv - q)", "");
  EXPECT_EQ(body(text, "score"),
            "    const float v0 = __fmaf_rn(head.u0, kv.offset - q.offset, head.u0 * (kv.base - q.base));\n"
            "    return __fmaf_rn(dot, p.softmax_scale, v0);");
  EXPECT_TRUE(says(text, "kScoreGrad = false;"));
}

TEST(Emit, IntsThatMayWrapAreConvertedOneByOne) {
  const std::string text = hooks("w: int; score + to_float(kv - q + w)", "");
  EXPECT_TRUE(says(body(text, "score"), "static_cast<float>(v0)"));
}

// Additive masks put finfo.min into scores; a kernel that need not care has log2(e) as a constant.
TEST(Emit, ScoresThatMayBeNextToTheLeastFloatAreTold) {
  const auto far = [](const std::string& score) {
    return says(hooks("bias: bf16 2d; slopes: fp32 1d; half: fp16 2d; pad: bool 1d; least: float; " + score +
                          " + 0.0 * (bias[q, kv] * to_float(q) + slopes[h] * to_float(q) + half[q, kv] + "
                          "to_float(pad[q]) + least * to_float(q))",
                      ""),
                "kNearMinScores = true;");
  };
  for (const char* score :
       {"score + bias[q, kv]", "score - 0.5 * bias[q, kv]", "select(pad[q], least, score)",
        "select(pad[q], -3.4028235e38, score)", "score + to_float(pad[kv]) * -3.4028235e38",
        "max(score, least)", "score + least * slopes[h]"})
    EXPECT_TRUE(far(score)) << score;
  for (const char* score :
       {"score", "score + slopes[h] * to_float(kv - q)", "least * tanh(score / least)", "score + half[q, kv]",
        "score * sigmoid(bias[q, kv])", "select(pad[q], -1e30, score)"})
    EXPECT_FALSE(far(score)) << score;
}

TEST(Emit, LinesAlongKvAreToldFromOtherScores) {
  const auto slope = [](const std::string& score) {
    const std::string text = hooks("w: float; t: fp32 1d; " + score, "");
    EXPECT_EQ(says(text, "kScoreLine = true;"), says(text, "float score_offset(")) << score;
    return says(text, "kScoreLine = true;") ? body(text, "score_slope") : "";
  };
  EXPECT_EQ(slope("score + t[h] * w * to_float(kv - q)"), "    return 1.0f * head.u0;");
  EXPECT_EQ(slope("w * to_float(kv - q) * t[h] + score"), "");  // (w (kv - q)) t[h]
  EXPECT_EQ(slope("to_float(q - kv) * (t[h] + w) + score"), "    return (-1.0f) * head.u0;");
  EXPECT_EQ(slope("score - (w + t[h]) * to_float(kv)"), "    return -1.0f * head.u0;");
  EXPECT_EQ(slope("score - to_float(kv - q) + 0.0 * (w + t[h])"), "");
  for (const char* other :
       {"score + t[h] * w * to_float(q)", "score * w + t[h] * to_float(kv)",
        "t[h] * to_float(kv) - score * w", "score + t[kv] * w * to_float(kv)",
        "score + t[h] * w * to_float(kv * kv)", "score + t[h] * w * to_float(abs(kv - q))",
        "score + t[h] * score * w * to_float(kv)"})
    EXPECT_EQ(slope(other), "") << other;
}

TEST(Emit, RestsThatAreComparedWithZeroAreNotComputed) {
  const auto tested = [](const std::string& mask) { return body(hooks("", mask), "bool mask"); };
  EXPECT_TRUE(says(tested("step: int; (q - kv) % step == 0"), "= head.m0.contain(v0);"));
  EXPECT_TRUE(says(tested("(q - kv) % 3 != 0"), "= !flashjit::Multiples(3).contain(v0);"));
  EXPECT_TRUE(says(tested("(q - kv) % 8 == 0"), "wrap_modulo"));
  EXPECT_TRUE(says(tested("step: int; (q - kv) % step == 1"), "head.d0.rest(v0)"));
  EXPECT_TRUE(says(tested("w: int; q / w == kv % w"), "head.n0.quotient(q.at)"));
  EXPECT_TRUE(says(tested("w: int; q / w == kv % w"), "head.n0.rest(kv.at)"));
}

TEST(Emit, PositionsAreDividedWithoutASign) {
  const auto tested = [](const std::string& mask) { return body(hooks("", mask), "bool mask"); };
  for (const char* natural :
       {"q / 128 == kv / 128", "kv % 64 < 8 && q > 3", "(q ^ kv) % 16 < 4", "q / 64 % 8 <= kv / 64 % 8",
        "max(q - kv, 0) / 128 < 3", "(kv >> 3) % 5 == q % 5", "(q & 255 | 7) / 3 < kv", "min(q, kv) / 7 > 2",
        "(q & -kv) / 7 > 2"}) {
    EXPECT_TRUE(says(tested(natural), "natural_")) << natural << "\n" << tested(natural);
    EXPECT_FALSE(says(tested(natural), "wrap_divide")) << natural << "\n" << tested(natural);
    EXPECT_FALSE(says(tested(natural), "wrap_modulo")) << natural << "\n" << tested(natural);
  }
  for (const char* signed_one :
       {"(q - kv) % 8 == 1", "q / -128 == kv", "q * 7 % 13 < kv", "(q + kv) / 4 < 9",
        "min(q, kv - 8) / 8 > 2", "max(q - 9, kv - 9) / 8 > 2", "(q ^ -kv) % 16 < 4", "(q << 3) / 5 > kv",
        "abs(q - kv) / 2 < 4", "~q / 128 == kv", "(q - kv >> 2) % 3 == 1", "q / (kv + 1) == 2",
        "max(q, -1 - kv) / (kv % 3) > 2"})
    EXPECT_FALSE(says(tested(signed_one), "natural_divide")) << signed_one << "\n" << tested(signed_one);
}

TEST(Emit, MasksSayInWhichBlocksTheyAreTheSame) {
  const auto blocks = [](std::string_view mask) {
    const std::string text = hooks("", mask);
    return std::pair(number_said(text, "kMaskBlockQ"), number_said(text, "kMaskBlockKv"));
  };
  EXPECT_EQ(blocks("((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0"), std::pair(128, 128));
  EXPECT_EQ(blocks("q >> 7 != kv / 96 || kv / 64 % 3 == 1"), std::pair(128, 32));
  EXPECT_EQ(blocks("keep: bool 3d; keep[h, q / 100, seqlen_q / 2 - kv / 256 * 3]"), std::pair(100, 256));
  EXPECT_EQ(blocks("h % 2 == 0"), std::pair(0, 0));
  EXPECT_EQ(blocks("kv / 128 < 5"), std::pair(0, 128));
  EXPECT_EQ(blocks("q / 128 == (kv + 1) / 128"), std::pair(128, 1));
  EXPECT_EQ(blocks("w: int; q / w == kv / 128"), std::pair(1, 128));
  EXPECT_EQ(blocks("q / 128 == kv / 128 && kv <= q"), std::pair(1, 1));
  EXPECT_EQ(blocks("128 / (q + 1) == 3 && q / -128 == kv % 128"), std::pair(1, 1));
}

TEST(Emit, SoftcapDividesOnceAHead) {
  const std::string text = hooks("cap: float; cap * tanh(score / cap)", "");
  EXPECT_FALSE(says(body(text, "score"), "divide")) << text;
  EXPECT_TRUE(says(body(text, "score"), "v0 = dot * head.s0;")) << text;
}

TEST(Emit, GradientsOfCapturesNameTheirElement) {
  const std::string text =
      hooks("s: fp32 1d; bias: bf16 2d grad; score * s[h] + bias[q, kv] * 2.0 + bias[kv, q]", "");
  EXPECT_TRUE(says(text, "kCaptureGrads = 2;"));
  EXPECT_EQ(body(text, "add_capture_grads"),
            "    add(flashjit::Addition<0, false, flashjit::AccumulationPattern::any, false>(), "
            "flashjit::capture_grad(p.captures[1], q.at, kv.at), flashjit::chained(ds, 2.0f));\n"
            "    add(flashjit::Addition<1, false, flashjit::AccumulationPattern::any, false>(), "
            "flashjit::capture_grad(p.captures[1], kv.at, q.at), ds);");
}

TEST(Emit, AGradientOfEachPairsOwnElementMayBeThatOfTheScore) {
  for (const char* same :
       {"t: bf16 4d grad; score + t[b, h, q, kv]", "t: fp32 2d grad; t[q + 2, kv - 3] + score",
        "t: fp16 3d grad; 9.0 * tanh((score + t[h_kv, q, kv]) / 9.0)"}) {
    const std::string text = hooks(same, "");
    EXPECT_TRUE(says(text, "kBiasTileGrad = true;")) << text;
    EXPECT_TRUE(says(text, "Addition<0, false, flashjit::AccumulationPattern::own, true>")) << text;
    EXPECT_TRUE(says(body(text, "bias_tile_grad"), "return flashjit::bias_tile_grad_of(p.captures[0], "))
        << text;
  }
  for (const char* other : {"t: bf16 4d; score + t[b, h, q, kv]", "t: bf16 2d grad; score + 2.0 * t[q, kv]",
                            "t: bf16 2d grad; score * 2.0 + t[q, kv]", "t: bf16 2d grad; score * t[q, kv]",
                            "t: bf16 2d grad; score + t[kv, q]", "t: bf16 3d grad; score + t[kv / 2, q, kv]"})
    EXPECT_TRUE(says(hooks(other, ""), "kBiasTileGrad = false;")) << other;
}

TEST(Emit, AGradientMayBeASumOverPairsOfOneDifference) {
  const std::string table = "t: fp32 2d grad; score + t[h, max(min(kv - q, 31), -32) + 32]",
                    scaled = "t: fp32 1d grad; score - t[(kv - q) / 8] * to_float(abs(2 * q - 2 * kv))";
  for (const std::string& by_difference :
       {table, scaled, std::string("t: fp16 2d grad; 9.0 * tanh((score + t[h, abs(q - kv) / 2]) / 9.0)"),
        std::string("t: fp16 1d grad; score + t[select(kv - q > 0, 1, 0)]")})
    EXPECT_TRUE(says(hooks(by_difference, ""), "kDifferenceGrads = 1;")) << by_difference;
  EXPECT_TRUE(
      says(hooks(table, ""), "Addition<0, true, flashjit::AccumulationPattern::by_difference, true>"));
  EXPECT_TRUE(
      says(hooks(scaled, ""), "Addition<0, true, flashjit::AccumulationPattern::by_difference, false>"));
  for (const char* other :
       {"t: fp32 1d grad; score * 2.0 + t[kv - q] * to_float(kv - q)", "t: fp32 1d grad; score + t[kv]",
        "t: fp32 1d grad; score + t[q - kv] * to_float(q)", "t: fp32 2d grad; score + t[h, (kv - q) * kv]",
        "t: fp32 1d grad; score * t[kv - q]", "t: fp32 1d grad; score + t[kv / 2 - q / 2]",
        "t: fp32 1d grad; 9.0 * tanh((score + t[kv - q] * to_float(kv - q)) / 9.0)",
        "t: fp32 1d grad; score + t[h] * to_float(kv - q)", "t: fp32 1d grad; score + t[h]"})
    EXPECT_TRUE(says(hooks(other, ""), "kDifferenceGrads = 0;")) << other;
}

TEST(Emit, GradientsOfCapturesComeInTheOrderOfTheirPatterns) {
  const std::string text = hooks(
      "t: fp16 2d grad; s: fp32 1d grad; score + t[q, kv] + s[kv - q] + s[kv] + t[q, kv + 1] + s[q - kv]",
      "");
  EXPECT_TRUE(says(text, "kCaptureGrads = 5;") && says(text, "kDifferenceGrads = 2;")) << text;
  EXPECT_TRUE(says(text, "Addition<4, false, flashjit::AccumulationPattern::own, true>")) << text;
  for (const char* others : {"Addition<0, ", "Addition<1, "})
    EXPECT_TRUE(says(text.substr(text.find(others), 70), "AccumulationPattern::any")) << text;
  for (const char* others : {"Addition<2, ", "Addition<3, "})
    EXPECT_TRUE(says(text.substr(text.find(others), 70), "AccumulationPattern::by_difference")) << text;
}

TEST(Emit, GradientsOfCapturesSayWhetherPairsShareAnElement) {
  const auto shared = [](const std::string& read) {
    const std::string text = hooks("t: fp32 2d grad; score + t[" + read + "]", "");
    EXPECT_TRUE(says(text, "Addition<0, ")) << read;
    return says(text, "Addition<0, true, ");
  };
  for (const char* once : {"q, kv", "kv, q", "q + 1, 2 * kv"}) EXPECT_FALSE(shared(once)) << once;
  for (const char* often :
       {"h, 0", "h, kv", "q, h", "h, kv - q", "q - kv, kv - q", "q / 2, kv", "q, min(kv, 3)"})
    EXPECT_TRUE(shared(often)) << often;
}

TEST(Emit, ChecksOfIndicesAreOnDemand) {
  const char* score = "slopes: fp32 1d; bias: bf16 2d grad; score * slopes[h] + bias[q, kv - q]";
  const char* mask = "doc: int32 2d; any: bool 2d; doc[b, q] == doc[b, kv] && any[q, kv]";
  const std::string plain = hooks(score, mask), checked = hooks(score, mask, {.check_indices = true});
  EXPECT_FALSE(says(plain, "check_indices"));
  const auto checks = [&](std::string_view name, std::string_view what) {
    EXPECT_TRUE(says(body(checked, name), what)) << name << "\n" << checked;
  };
  checks("head", "check_indices(true, {head.b, head.h, -1, -1}, \"slopes\", p.captures[0], head.h);");
  checks("score", "&& mask(p, head, q, kv), {head.b, head.h, q.at, kv.at}, \"bias\", p.captures[1], q.at, v");
  checks("bool mask", "\"any\", p.captures[3], q.at, kv.at);");
  checks("mask_row_term",
         "check_indices(true, {head.b, head.h, at, -1}, \"doc\", p.captures[2], head.b, q.at);");
  checks("mask_column_term", "check_indices(true, {head.b, head.h, -1, at}, \"doc\"");
  EXPECT_FALSE(says(body(checked, "score_grad") + body(checked, "add_capture_grads"), "check_indices"));
}

TEST(Emit, ProgramsStandAsComments) {
  EXPECT_TRUE(says(hooks("score * 2.0", "q < kv"), "// score: score * 2.0\n"));
  EXPECT_TRUE(says(hooks("score * 2.0", "q < kv"), "// mask: q < kv\n"));
}

}  // namespace
}  // namespace flashjit::expr

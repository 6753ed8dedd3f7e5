// NaN and infinity in an input are seen: O and LSE of the rows that attend to them are NaN, and so are
// gradients, in every form of every family. Other rows keep their bits.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tests/support/attention_case.hpp"
#include "tests/support/cache_run.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                 kInfinity = std::numeric_limits<double>::infinity();

/// Expects NaN in all columns of the rows, and elsewhere what was there without NaN in the inputs.
void expect_nan_rows(const char* name, const std::vector<double>& got, const std::vector<double>& clean,
                     std::int64_t columns, const std::set<std::int64_t>& rows) {
  ASSERT_EQ(got.size(), clean.size());
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < std::ssize(got); ++i) {
    const bool as_expected = rows.contains(i / columns)
                                 ? std::isnan(got[i])
                                 : got[i] == clean[i] || (std::isnan(got[i]) && std::isnan(clean[i]));
    if (!as_expected && wrong++ == 0)
      ADD_FAILURE() << name << " of row " << i / columns << " is " << got[i] << ", and " << clean[i]
                    << " without NaN";
  }
  EXPECT_EQ(wrong, 0) << name;
}

bool all_finite(const std::vector<double>& values, std::int64_t begin, std::int64_t end) {
  return std::all_of(values.begin() + begin, values.begin() + end,
                     [](double value) { return std::isfinite(value); });
}
bool any_nan(const std::vector<double>& values, std::int64_t begin, std::int64_t end) {
  return std::any_of(values.begin() + begin, values.begin() + end,
                     [](double value) { return std::isnan(value); });
}

// --- Tensors ----------------------------------------------------------------------------------------------

enum class Spoiled : std::uint8_t { q, infinite_q, k, bias };
constexpr const char* kSpoiled[] = {"q", "infinite_q", "k", "bias"};

struct Form {
  const char* name;
  const char* spec;  ///< has no masks besides causal, which all queries of a sequence's end attend by
  const char* config = "";
};
const Form kForms[] = {
    {"plain", "bf16:d64"},
    {"causal", "fp16:d128:causal"},
    {"wide", "bf16:d320x264:causal"},
    {"sinks", "bf16:d64:causal:sinks:row_max"},
    {"state", "bf16:d64:running_state"},
    {"program", "bf16:d64:score{score * abs(score)}"},
    {"line", "bf16:d64:causal:score{slope: float; score + slope * (kv - q)}"},
    {"far", "bf16:d64:score{bias: fp32 1d; score + bias[q]}"},
    {"lists", "bf16:d64:mask{(q + kv) % 7 != 3 || q == kv}"},
    {"dropout", "bf16:d64:causal:dropout"},
    {"weights", "bf16:d64:causal:score{score * sigmoid(score)}:weight_mod"},
    {"sm80_split", "bf16:d64", "sm80:br64:bc32:w4:min_blocks2:split"},
    {"sm90_split", "bf16:d64:row_max", "sm90:br64:bc64:w4:s2:split"},
};

struct NanCase {
  Form form;
  Family family;
  Spoiled spoiled;
};
std::string name_of(const NanCase& test) {
  return std::string(test.form.name) + "_" + to_string(test.family) + "_" +
         kSpoiled[static_cast<int>(test.spoiled)];
}
void PrintTo(const NanCase& test, std::ostream* out) { *out << name_of(test); }

class NanInTensors : public GpuTestWith<NanCase> {};

/// One query of a head of the second sequence, one key of the second sequence, or a captured value of a
/// query.
TEST_P(NanInTensors, IsSeen) {
  const NanCase& given = GetParam();
  AttentionCase test{.spec = spec_for(given.family, given.form.spec),
                     .shape = {2, 4, 2, 40, 90},
                     .family = given.family,
                     .dropout_p = std::string(given.form.name) == "dropout" ? 0.3 : 0.0,
                     .seed = 3};
  if (const Support able = supports(given.family, test.spec); !able) GTEST_SKIP() << able.reason;
  const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
  const std::int64_t d = test.spec.head_dim, dv = test.spec.v_dim(), b = 1, h = 2, q = 31, kv = 60;
  const reference::Problem clean = make_problem(test);
  reference::Problem problem = clean;
  const bool causal = test.spec.mask == flashjit::causal();
  std::set<std::int64_t> rows = {(b * heads_q + h) * seqlen_q + q};
  switch (given.spoiled) {
    case Spoiled::q:
      problem.q[*rows.begin() * d + 5] = kNan;
      break;
    case Spoiled::infinite_q:
      problem.q[*rows.begin() * d + 5] = kInfinity;
      break;
    case Spoiled::k:
      problem.k[((b * heads_kv + h / 2) * seqlen_kv + kv) * d + 5] = kNan;
      rows.clear();
      for (const std::int64_t head : {h, h + 1})
        for (std::int64_t i = 0; i < seqlen_q; ++i) {
          const bool attends = std::string(given.form.name) == "lists"
                                   ? (i + kv) % 7 != 3 || i == kv
                                   : !causal || kv <= i + seqlen_kv - seqlen_q;
          if (attends) rows.insert((b * heads_q + head) * seqlen_q + i);
        }
      break;
    case Spoiled::bias:
      if (problem.captures.empty() || problem.captures[0].name != "bias") GTEST_SKIP() << "there is none";
      problem.captures[0].values[q] = kNan;
      rows.clear();
      for (std::int64_t head = 0; head < batch * heads_q; ++head) rows.insert(head * seqlen_q + q);
      break;
  }

  const auto config = [&](Pass pass) {
    return pass == Pass::forward && *given.form.config ? parse_config(given.form.config)
                                                       : heuristic(given.family, test.spec, test.shape, pass);
  };
  TemporaryRuntime runtime;
  AttentionRun without(test, clean), with(test, problem);
  for (AttentionRun* run : {&without, &with})
    run->check_memory_beside(runtime.get(), config(Pass::forward), config(Pass::backward));
  expect_nan_rows("out", with.out(), without.out(), dv, rows);
  if (!test.spec.score.is_weight()) expect_nan_rows("LSE", with.lse(), without.lse(), 1, rows);
  if (test.spec.epilogue.row_max) expect_nan_rows("row_max", with.row_max(), without.row_max(), 1, rows);

  // What a row does not attend to may be NaN, too, as in a product of matrices; another sequence's is not.
  const std::vector<double> dq = with.grad(0), dk = with.grad(1), dv_grad = with.grad(2);
  for (const std::int64_t row : rows) EXPECT_TRUE(any_nan(dq, row * d, (row + 1) * d)) << "dq of row " << row;
  const std::int64_t head_kv = b * heads_kv + h / 2;
  EXPECT_TRUE(any_nan(dk, head_kv * seqlen_kv * d, (head_kv + 1) * seqlen_kv * d)) << "dk";
  EXPECT_TRUE(any_nan(dv_grad, head_kv * seqlen_kv * dv, (head_kv + 1) * seqlen_kv * dv)) << "dv";
  if (given.spoiled != Spoiled::bias) {
    EXPECT_TRUE(all_finite(dq, 0, heads_q * seqlen_q * d)) << "dq of the first sequence";
    EXPECT_TRUE(all_finite(dk, 0, heads_kv * seqlen_kv * d)) << "dk of the first sequence";
    EXPECT_TRUE(all_finite(dv_grad, 0, heads_kv * seqlen_kv * dv)) << "dv of the first sequence";
  }
}

std::vector<NanCase> nan_cases() {
  std::vector<NanCase> all;
  for (const Form& form : kForms)
    for (const Family family : {Family::simt, Family::sm80, Family::sm90, Family::sm75})
      for (const Spoiled spoiled : {Spoiled::q, Spoiled::infinite_q, Spoiled::k, Spoiled::bias}) {
        const std::string config(form.config);
        if (!config.empty() && config.rfind(to_string(family), 0) != 0) continue;
        const std::string form_name(form.name);
        if ((spoiled == Spoiled::bias) != (form_name == "far")) continue;
        if (spoiled == Spoiled::infinite_q && form_name != "plain") continue;
        if (spoiled == Spoiled::k && form_name != "causal" && form_name != "lists" && form_name != "state" &&
            form_name != "weights")
          continue;
        all.push_back({form, family, spoiled});
      }
  return covering(all, [](const NanCase& test) {
    const std::string form(test.form.name), family(to_string(test.family));
    const std::string spoiled = std::to_string(static_cast<int>(test.spoiled));
    std::set<std::string> facts{form + spoiled, family + spoiled};
    if (test.family != Family::sm75) facts.insert(form + family);
    return facts;
  });
}

INSTANTIATE_TEST_SUITE_P(All, NanInTensors, testing::ValuesIn(nan_cases()),
                         [](const auto& test) { return name_of(test.param); });

// --- Caches -----------------------------------------------------------------------------------------------

class NanInCache : public GpuTestWith<CacheCase> {};

/// The last query of a sequence, in its first head.
TEST_P(NanInCache, IsSeen) {
  const CacheCase& test = GetParam();
  const plan::FamilyTraits& family = plan::traits(test.family);
  if (const Support able = family.supports(test.spec, gpu().info); !able) GTEST_SKIP() << able.reason;
  const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test.shape;
  const TileConfig config = family.heuristic(test.spec, test.shape, gpu().info);
  TemporaryRuntime runtime;
  CacheRun run(test);
  run.launch(runtime.get(), config);
  const std::vector<double> out = run.out(), lse = run.lse();

  const reference::Problem& problem = run.cache().problem;
  const bool varlen = test.spec.varlen;
  const auto own_of = [&](std::int64_t b) {
    return varlen ? problem.cu_seqlens_q[b + 1] - problem.cu_seqlens_q[b] : seqlen_q;
  };
  std::int64_t b = batch - 1;
  while (own_of(b) == 0 || problem.kv_lengths[b] < own_of(b)) ASSERT_GT(--b, -1);
  const std::int64_t own = own_of(b),
                     row = varlen ? problem.cu_seqlens_q[b + 1] - 1 : b * heads_q * seqlen_q + own - 1;
  std::vector<double> q = run.cache().q;
  q[row * test.spec.head_dim + 3] = kNan;
  run.put_q(q);
  run.launch(runtime.get(), config);
  expect_nan_rows("out", run.out(), out, test.spec.v_dim(), {row});
  expect_nan_rows("LSE", run.lse(), lse, 1, {row});
}

std::vector<CacheCase> caches() {
  struct Kind {
    const char* spec;
    AttentionShape shape;
    bool of_every_family = false;
  };
  const std::vector<Kind> kinds = {
      {"bf16:d64:causal:cache", {3, 4, 2, 1, 900}, true},
      {"fp16:d128:causal:varlen:pages16:sinks", {4, 8, 2, 5, 700}},
      {"bf16:d64:varlen:pages1", {4, 4, 4, 70, 300}},
      {"bf16:d576x512:causal:pages64:shared_kv", {3, 16, 1, 2, 150}, true},
      {"bf16:d64:cache:indices", {3, 4, 1, 3, 200}, true},
      {"bf16:d128:kve4m3:causal:pages16", {4, 8, 2, 3, 500}},
      {"bf16:d64:kve4m3:q_codes:causal:varlen:pages16", {4, 4, 2, 70, 300}},
      {"bf16:d64:causal:varlen:pages16:shared_prefix", {5, 8, 2, 3, 700}},
      {"bf16:d64:causal:varlen:pages16:invariant", {4, 4, 2, 1, 2200}},
  };
  std::vector<CacheCase> all;
  for (const Family family : {Family::sm90, Family::sm80, Family::simt, Family::sm75})
    for (const Kind& kind : kinds)
      if (kind.of_every_family || family == Family::sm90)
        all.push_back({.spec = spec_for(family, kind.spec),
                       .shape = kind.shape,
                       .family = family,
                       .seed = static_cast<unsigned>(all.size())});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, NanInCache, testing::ValuesIn(caches()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace flashjit::test

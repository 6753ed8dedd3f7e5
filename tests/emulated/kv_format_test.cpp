// K and V in every format, decoded by kernels of every family that takes them: each code exactly, and
// attention in slots, pages, latents and lists.
#include "tests/support/kv_format_run.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

class EmulatedKvFormat : public GpuTestWith<KvFormatCase> {};
class EmulatedLatents : public GpuTest {};
class EmulatedKvCodes : public GpuTestWith<KvFormatCase> {};

TEST_P(EmulatedKvFormat, IsAttentionOverTheDecodedRows) {
  TemporaryRuntime runtime;
  check_kv_format(runtime.get(), GetParam());
}

TEST_P(EmulatedKvCodes, AreTheirTablesValues) {
  TemporaryRuntime runtime;
  check_every_code(runtime.get(), GetParam());
}

/// Codes that are operands as they are, for the few rows of a query's heads.
class EmulatedFewRows : public GpuTestWith<std::string> {};

TEST_P(EmulatedFewRows, AreAttentionOverTheDecodedRows) {
  TemporaryRuntime runtime;
  for (const AttentionShape& shape : {AttentionShape{3, 2, 2, 5, 330}, {2, 1, 1, 8, 64}}) {
    const KvFormatCase test{"bf16:d128:" + GetParam() + ":pages16", shape, Family::sm90, shape.batch == 2};
    EXPECT_EQ(plan::traits(test.family).heuristic(parse_spec(test.spec), shape, gpu().info).br, 8);
    check_kv_format(runtime.get(), test);
  }
}
TEST_P(EmulatedFewRows, HaveEveryCode) {
  TemporaryRuntime runtime;
  const KvFormatCase test{"fp16:d128:" + GetParam() + ":pages16", {2, 1, 1, 128, 1}, Family::sm90};
  TileConfig config = plan::traits(test.family)
                          .heuristic(parse_spec(test.spec), {2, 1, 1, 1, 1}, DeviceInfo::parse("sm_90a"));
  check_every_code(runtime.get(), test, config);
}
INSTANTIATE_TEST_SUITE_P(
    All, EmulatedFewRows,
    testing::Values("kv{int4:g32:fp16}", "kv{nvfp4}", "kv{mxfp4}",
                    "k{int4:g64:fp32:before}:v{int4_offset:row:fp32}", "k{e2m1:g128:fp32}:v{nvfp4}", "kve4m3",
                    "kve5m2", "kvint8", "kv{q8_0}", "kv{mxfp8}", "kv{e4m3:g128:fp32}",
                    "k{int8:g64:fp16}:v{e5m2:row:bf16:before}",
                    "k{e4m3:g32:fp16:apart}:v{int8:g32:fp32:apart:scaled}", "kv{q4_0}",
                    "k{int4:g32:fp16:halves}:v{int4:g64:fp16:apart}", "kv{e2m1:g16:e4m3:apart:scaled}",
                    "kv{uint4:g32:fp16:zero=uint4}", "kv{int4:g32:fp16:zero}",
                    "k{q4_1}:v{int4:g32:fp16:apart:zero=uint4}", "k{uint4:g64:fp32:apart:zero=uint4}:v{q4_1}",
                    "kv{uint4:g64:bf16:min}", "kv{uint2:g32:fp16:min}",
                    "k{uint2:keys16:fp16:min}:v{uint2:g32:fp16:min}", "k{uint4:keys16:fp16:min}:v{q4_0}",
                    "k{int4:keys16:fp16}:v{uint2:g64:fp32:apart:zero}"),
    [](const auto& info) {
      return name_of({info.param, {}, Family::sm90});
    });

class EmulatedDrawnFormat : public GpuTestWith<KvFormatCase> {};

TEST_P(EmulatedDrawnFormat, IsAttentionOverTheDecodedRows) {
  TemporaryRuntime runtime;
  check_kv_format(runtime.get(), GetParam());
}

class EmulatedKvEncoding : public GpuTestWith<std::string> {};

/// quantize() and append() on the GPU make the bytes that the CPU reference makes.
TEST_P(EmulatedKvEncoding, IsTheReferences) {
  TemporaryRuntime runtime;
  check_quantized_rows(runtime.get(), GetParam());
  for (const bool rotates : {true, false}) check_appended_rows(runtime.get(), GetParam(), 128, rotates);
  check_appended_rows(runtime.get(), GetParam(), 128, false, rows_at_edges);
  check_appended_rows(runtime.get(), GetParam(), 128, true, rows_with_zeros, ":hadamard");
}

/// Latents have one cache, in which V is the first columns of K.
TEST_F(EmulatedLatents, AreAppended) {
  TemporaryRuntime runtime;
  check_appended_rows(runtime.get(), "fp8_ds_mla", 576);
}

class EmulatedShortRows : public GpuTest {};

/// Rows of 34 bytes, which are stored by two bytes, and of 68.
TEST_F(EmulatedShortRows, AreAppended) {
  TemporaryRuntime runtime;
  for (const int dim : {32, 64}) check_appended_rows(runtime.get(), "q8_0", dim, false, rows_at_edges);
}

constexpr Family kFamilies[] = {Family::simt, Family::sm80, Family::sm90, Family::sm75};

std::vector<KvFormatCase> codes() {
  std::vector<KvFormatCase> all;
  int turn = 0;
  for (const Family family : kFamilies)
    for (const std::string& format : kv_formats_of_128())
      if (family != Family::sm75 || every_kernel() || turn++ % 3 == 0)  // sm75 decodes as sm80 does
        all.push_back({"bf16:d128:kv{" + format + "}", {2, 1, 1, 128, 1}, family});
  return all;
}

/// A format in turn with each layout.
std::vector<KvFormatCase> forms() {
  struct Form {
    const char* options;
    AttentionShape shape;
  };
  const Form kForms[] = {{"causal:pages16", {2, 4, 2, 3, 90}},
                         {"cache", {2, 4, 1, 20, 70}},
                         {"pages3:causal", {2, 2, 1, 1, 40}},
                         {"causal", {1, 2, 2, 50, 70}}};
  std::vector<KvFormatCase> all;
  int turn = 0;
  for (const Family family : kFamilies)
    for (const std::string& format : kv_formats_of_128()) {
      const Form& form = kForms[turn++ % 4];
      all.push_back(
          {fmt::format("bf16:d128:kv{{{}}}:{}", format, form.options), form.shape, family, turn % 3});
    }
  for (const Family family : kFamilies)
    for (const char* spec :
         {"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64",
          "bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64:indices", "bf16:d576x512:kve4m3:shared_kv:cache",
          "fp16:d64:k{q8_0}:v{e4m3}:pages16", "bf16:d128x64:k{int4}:v{nvfp4}:cache:key_scales",
          "bf16:d64:v{q4_0}:pages16", "bf16:d64:k{mxfp8}:cache", "fp16:d96x32:kv{q8_0}:cache:indices",
          "bf16:d256:kv{q4_0}:pages16:causal", "bf16:d128:kv{nvfp4}:cache:score{2.0 * tanh(score / 2.0)}",
          "bf16:d64:k{iq4_nl}:v{nvfp4}:pages16:score{score - 0.1 * to_float(abs(q - kv))}:causal",
          "bf16:d64:kv{int8:g32:fp32}:pages16:mask{q + seqlen_kv - seqlen_q - kv < 20 && kv <= q + seqlen_kv "
          "- "
          "seqlen_q}"})
      all.push_back({spec, {2, 4, 1, 2, 80}, family, 1});
  // Latents by rows of several tiles: lists of which not all counts, with entries that are no keys and the
  // same ones again; dense ones in splits.
  for (const auto& [spec, shape, top_k] :
       {std::tuple{"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:indices", AttentionShape{1, 64, 1, 3, 150}, 110},
        {"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages16:causal:indices", {2, 16, 1, 2, 90}, 75},
        {"fp16:d576x512:kv{int8:g64:fp32:tail64}:shared_kv:cache:indices", {2, 128, 1, 1, 120}, 70},
        {"bf16:d320:kv{e4m3:g64:fp32:tail64}:shared_kv:pages3", {2, 20, 1, 4, 170}, 20},
        {"bf16:d576x512:kv{fp8_ds_mla}:shared_kv:pages64:causal", {2, 64, 1, 2, 200}, 20}})
    all.push_back({spec, shape, Family::sm90, 1, top_k});
  // One head's rows follow each other in a page, and are copied together.
  for (const Family family : kFamilies)
    for (const char* spec : {"bf16:d128:kv{nvfp4}:pages16", "fp16:d64:kv{q8_0}:pages64:causal",
                             "bf16:d96:k{mxfp4}:v{int4}:pages8:key_scales"})
      all.push_back({spec, {2, 4, 1, 2, 150}, family});
  std::erase_if(all, [](const KvFormatCase& test) {
    return !plan::traits(test.family)
                .supports(parse_spec(test.spec).normalized(), DeviceInfo::parse("sm_90a"));
  });
  for (const char* spec : {"fp32:d128:kv{nvfp4}:cache", "fp32:d64:k{q8_0}:pages16"})
    all.push_back({spec, {2, 4, 1, 2, 80}, Family::simt});
  return covering(
      all, [](const KvFormatCase& test) { return shown_by(parse_spec(test.spec), test.family, test.spec); });
}

/// Some five of 60, others when a template changes; at night all.
std::vector<KvFormatCase> drawn() {
  std::vector<KvFormatCase> all =
      drawn_kv_format_cases({Family::simt, Family::sm80, Family::sm90, Family::sm90}, 60);
  std::erase_if(all, [](const KvFormatCase& test) { return !is_drawn(name_of(test), 12); });
  return all;
}

const auto kName = [](const auto& info) { return std::to_string(info.index) + "_" + name_of(info.param); };
INSTANTIATE_TEST_SUITE_P(All, EmulatedKvCodes, testing::ValuesIn(codes()), kName);
INSTANTIATE_TEST_SUITE_P(All, EmulatedKvEncoding, testing::ValuesIn(kv_formats_of_128()));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EmulatedDrawnFormat);  // none may be drawn
INSTANTIATE_TEST_SUITE_P(All, EmulatedDrawnFormat, testing::ValuesIn(drawn()), kName);
INSTANTIATE_TEST_SUITE_P(All, EmulatedKvFormat, testing::ValuesIn(forms()), kName);

}  // namespace
}  // namespace flashjit::test

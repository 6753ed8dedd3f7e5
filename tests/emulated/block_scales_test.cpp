// Scales of blocks, and of groups of keys, in a tensor of their own: attention in every layout, each code
// exactly, append() and quantize(), by the families that read them.
#include "tests/support/kv_format_run.hpp"
#include "tests/support/spread.hpp"

namespace flashjit::test {
namespace {

class EmulatedBlockScales : public GpuTestWith<KvFormatCase> {};
class EmulatedCodesApart : public GpuTestWith<KvFormatCase> {};
class EmulatedEncodingApart : public GpuTestWith<std::string> {};
class EmulatedEncodingOfKeys : public GpuTestWith<std::string> {};

TEST_P(EmulatedBlockScales, AreReadInEveryLayout) {
  TemporaryRuntime runtime;
  check_kv_format(runtime.get(), GetParam());
}

TEST_P(EmulatedCodesApart, AreTheirTablesValues) {
  TemporaryRuntime runtime;
  check_every_code(runtime.get(), GetParam());
}

TEST_P(EmulatedEncodingApart, IsTheReferences) {
  TemporaryRuntime runtime;
  check_quantized_rows(runtime.get(), GetParam());
  for (const bool rotates : {true, false}) check_appended_rows(runtime.get(), GetParam(), 128, rotates);
}

TEST_P(EmulatedEncodingOfKeys, IsTheReferences) {
  TemporaryRuntime runtime;
  check_quantized_rows(runtime.get(), GetParam());
}

/// Family sm90 and another for each format in turn, and at night all.
std::vector<KvFormatCase> codes_apart() {
  std::vector<KvFormatCase> all;
  int turn = 0;
  const std::vector<Family> others{Family::simt, Family::sm80, Family::sm75};
  for (const auto& formats : {kv_formats_apart(), kv_formats_of_keys()})
    for (const std::string& format : formats) {
      const KvFormatCase test{"bf16:d128:kv{" + format + "}", {2, 1, 1, 128, 1}, Family::sm90};
      all.push_back(test);
      for (std::size_t i = 0; i < others.size(); ++i)
        if (every_kernel() || i == static_cast<std::size_t>(turn++ / 3 % 2))
          all.push_back({test.spec, test.shape, others[i]});
    }
  return all;
}

std::vector<KvFormatCase> forms_apart() {
  return covering(
      block_scale_cases({Family::simt, Family::sm80, Family::sm90, Family::sm75}),
      [](const KvFormatCase& test) { return shown_by(parse_spec(test.spec), test.family, test.spec); });
}

const auto kName = [](const auto& info) { return std::to_string(info.index) + "_" + name_of(info.param); };
INSTANTIATE_TEST_SUITE_P(All, EmulatedBlockScales, testing::ValuesIn(forms_apart()), kName);
INSTANTIATE_TEST_SUITE_P(All, EmulatedCodesApart, testing::ValuesIn(codes_apart()), kName);
INSTANTIATE_TEST_SUITE_P(All, EmulatedEncodingApart, testing::ValuesIn(kv_formats_apart()));
INSTANTIATE_TEST_SUITE_P(All, EmulatedEncodingOfKeys, testing::ValuesIn(kv_formats_of_keys()));

}  // namespace
}  // namespace flashjit::test

// Scales of blocks, and of groups of keys, in a tensor of their own: attention in every layout, append() and
// quantize(), by the families that read them.
#include "tests/support/kv_format_run.hpp"

namespace flashjit::test {
namespace {

class BlockScales : public GpuTestWith<KvFormatCase> {};
class EncodingApart : public GpuTestWith<std::string> {};
class EncodingOfKeys : public GpuTestWith<std::string> {};

TEST_P(BlockScales, AreReadInEveryLayout) {
  TemporaryRuntime runtime;
  check_kv_format(runtime.get(), GetParam());
}

TEST_P(EncodingApart, IsTheReferences) {
  TemporaryRuntime runtime;
  check_quantized_rows(runtime.get(), GetParam());
  for (const bool rotates : {true, false}) check_appended_rows(runtime.get(), GetParam(), 128, rotates);
}

TEST_P(EncodingOfKeys, IsTheReferences) {
  TemporaryRuntime runtime;
  check_quantized_rows(runtime.get(), GetParam());
}

const auto kName = [](const auto& info) { return std::to_string(info.index) + "_" + name_of(info.param); };
INSTANTIATE_TEST_SUITE_P(All, BlockScales,
                         testing::ValuesIn(block_scale_cases({Family::simt, Family::sm80, Family::sm90})),
                         kName);
INSTANTIATE_TEST_SUITE_P(All, EncodingApart, testing::ValuesIn(kv_formats_apart()));
INSTANTIATE_TEST_SUITE_P(All, EncodingOfKeys, testing::ValuesIn(kv_formats_of_keys()));

}  // namespace
}  // namespace flashjit::test

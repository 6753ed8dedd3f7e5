#include "flashjit/types.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "flashjit/error.hpp"
#include "support/dtypes.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

template <class Value, std::size_t kCount>
using Names = std::array<std::pair<Value, std::string_view>, kCount>;

constexpr Names<Pass, 7> kPasses{{{Pass::forward, "fwd"},
                                  {Pass::backward, "bwd"},
                                  {Pass::append, "append"},
                                  {Pass::merge, "merge"},
                                  {Pass::quantize, "quantize"},
                                  {Pass::jvp, "jvp"},
                                  {Pass::backward_jvp, "bwd_jvp"}}};
/// The names of the table of types.
Names<DType, 6> dtype_names() {
  Names<DType, 6> names;
  std::ranges::transform(dtypes(), names.begin(),
                         [](const DTypeInfo& info) { return std::pair(info.dtype, info.name); });
  return names;
}
constexpr Names<ElementType, 9> kElementTypes{{{ElementType::fp32, "fp32"},
                                               {ElementType::fp16, "fp16"},
                                               {ElementType::bf16, "bf16"},
                                               {ElementType::int32, "int32"},
                                               {ElementType::int64, "int64"},
                                               {ElementType::int16, "int16"},
                                               {ElementType::int8, "int8"},
                                               {ElementType::uint8, "uint8"},
                                               {ElementType::boolean, "bool"}}};
constexpr Names<Family, 4> kFamilies{
    {{Family::sm90, "sm90"}, {Family::sm80, "sm80"}, {Family::sm75, "sm75"}, {Family::simt, "simt"}}};
constexpr Names<ConfigSource, 5> kConfigSources{{{ConfigSource::given, "given"},
                                                 {ConfigSource::tuned, "tuned"},
                                                 {ConfigSource::tuned_elsewhere, "tuned elsewhere"},
                                                 {ConfigSource::tuned_near, "tuned for a near shape"},
                                                 {ConfigSource::heuristic, "heuristic"}}};

template <class Value, std::size_t kCount>
std::string name_of(const Names<Value, kCount>& names, Value value) {
  for (const auto& [known, name] : names) {
    if (known == value) return std::string(name);
  }
  return fmt::format("unknown({})", static_cast<int>(value));
}

template <class Value, std::size_t kCount>
Value value_of(const Names<Value, kCount>& names, std::string_view what, std::string_view text) {
  std::array<std::string_view, kCount> allowed;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i].second == text) return names[i].first;
    allowed[i] = names[i].second;
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is {}; it must be one of: {}", what, quoted(text), fmt::join(allowed, ", ")));
}

}  // namespace

std::string to_string(Pass pass) { return name_of(kPasses, pass); }
std::string to_string(DType dtype) { return name_of(dtype_names(), dtype); }
std::string to_string(ElementType type) { return name_of(kElementTypes, type); }
std::string to_string(Family family) { return name_of(kFamilies, family); }
std::string to_string(ConfigSource source) { return name_of(kConfigSources, source); }

Pass parse_pass(std::string_view text) { return value_of(kPasses, "the pass", text); }
DType parse_dtype(std::string_view text) { return value_of(dtype_names(), "the element type", text); }
Family parse_family(std::string_view text) { return value_of(kFamilies, "the kernel family", text); }

}  // namespace flashjit

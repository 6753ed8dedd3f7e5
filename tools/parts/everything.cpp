#include "tools/parts/everything.hpp"

#include <fmt/format.h>

#include <string>

namespace flashjit::command {
namespace {

struct Checked {
  const char* spec;  ///< after the type
  const char* shape;
};

// Both passes, in both types of 16 bits.
constexpr Checked kTrained[] = {
    {"d64:causal", "b2:hq4:hkv2:sq200:skv333"},
    {"d128", "b1:hq4:hkv4:sq150:skv130"},
    {"d128:causal:dropout", "b1:hq4:hkv2:sq200:skv200"},
    {"d96:causal:varlen:sinks", "b4:hq4:hkv2:sq90:skv100"},
    {"d256:causal", "b1:hq2:hkv1:sq150:skv170"},
    {"d40:kvlen", "b3:hq2:hkv2:sq70:skv130"},
    {"d64:mask{q >= kv && q - kv < 70}:score{5.0 * tanh(score / 5.0)}", "b1:hq4:hkv2:sq200:skv210"},
    {"d64:score{slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)}:causal",
     "b1:hq4:hkv4:sq130:skv200"},
    {"d64:causal:map64x64", "b1:hq4:hkv4:sq300:skv330"},
    {"d192x128:causal:det", "b1:hq2:hkv2:sq140:skv190"},
    {"d320x264", "b1:hq2:hkv1:sq70:skv90"},
    {"d64:causal:indices", "b2:hq6:hkv2:sq5:skv150"}};
// As in serving, forward alone.
constexpr Checked kServed[] = {{"d128:cache", "b8:hq8:hkv2:sq1:skv700"},
                               {"d128:causal:varlen:pages16", "b4:hq8:hkv2:sq7:skv300"},
                               {"d128:kve4m3:pages16:causal", "b4:hq8:hkv2:sq1:skv500"},
                               {"d64:kvint8:key_scales:cache", "b3:hq4:hkv2:sq33:skv200"},
                               {"d64:kve5m2:pages64:causal", "b3:hq4:hkv2:sq5:skv300"},
                               {"d576x512:causal:pages64:shared_kv", "b2:hq16:hkv1:sq1:skv300"},
                               {"d128:row_max:fp32_out:causal", "b1:hq4:hkv2:sq130:skv200"}};

}  // namespace

std::vector<autotune::SuiteProblem> every_problem() {
  std::vector<autotune::SuiteProblem> all;
  const auto add = [&](const std::string& text, const char* shape) {
    for (const KernelSpec& spec : autotune::parse_passes(text)) all.push_back({spec, parse_shape(shape)});
  };
  for (const char* type : {"fp16", "bf16"}) {
    for (const auto& [spec, shape] : kTrained) add(fmt::format("{}:{}", type, spec), shape);
    for (const auto& [spec, shape] : kServed) add(fmt::format("fwd:{}:{}", type, spec), shape);
  }
  add("fp32:d64:causal", "b1:hq4:hkv2:sq100:skv130");
  return all;
}

}  // namespace flashjit::command

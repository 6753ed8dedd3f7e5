#include "expr/gradient_tangents.hpp"

#include <map>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "expr/derive.hpp"
#include "expr/nodes.hpp"

namespace flashjit::expr {
namespace {

/// The lines of one of the hooks, where `moved` is the tangent of the score before the program.
class TangentCode {
 public:
  TangentCode(ProgramAnalysis& analysis, HeadCode& head)
      : analysis_(analysis), graph_(analysis.graph()), head_(head), code_(head, Style::fast, {}) {}

  std::string value(int place) { return code_.value(place); }
  const std::string& lines() const { return code_.lines(); }

  /// Where the tangent of what is read lies.
  std::string place_of(int read) {
    if (const auto known = places_.find(read); known != places_.end()) return known->second;
    std::vector<std::string> arguments = {fmt::format("p.captures[{}]", slot(read))};
    for (const int index : std::vector<int>(graph_[read].args)) arguments.push_back(code_.value(index));
    return places_[read] =
               code_.line("float*", fmt::format("flashjit::capture_grad({})", fmt::join(arguments, ", ")));
  }
  int slot(int read) const { return head_.slot(graph_.node(read).declaration); }

  /// The tangent of a value: its derivatives times the tangents of what it depends on.
  std::string tangent_of(int place) {
    std::vector<std::string> terms;
    const auto add = [&](const NodePtr& variable, auto tangent) {
      const NodePtr slope = derivative(graph_[place].node, variable);
      if (is_real(*slope, 0)) return;
      const int derived = graph_.add(slope);
      terms.push_back(fmt::format("flashjit::chained({}, {})", tangent(), code_.value(derived)));
    };
    add(make_name(Name::score), [] { return std::string("moved"); });
    for (const ReadGrad& grad : analysis_.read_grads())
      add(graph_[grad.read].node, [&] { return "*" + place_of(grad.read); });
    return terms.empty() ? "0.0f" : fmt::format("{}", fmt::join(terms, " + "));
  }

 private:
  ProgramAnalysis& analysis_;
  Graph& graph_;
  HeadCode& head_;
  Code code_;
  std::map<int, std::string> places_;
};

std::string score_grad_tangent(ProgramAnalysis& analysis, HeadCode& head) {
  TangentCode code(analysis, head);
  const std::string result = code.tangent_of(analysis.score_grad());
  return fmt::format(
      "  static __device__ __forceinline__ float score_grad_tangent(\n"
      "      const flashjit::Params& p, const Head& head, float dot, float moved, flashjit::Position q,\n"
      "      flashjit::Position kv) {{\n{}    return {};\n  }}\n",
      code.lines(), result);
}

std::string add_capture_grad_tangents(ProgramAnalysis& analysis, HeadCode& head) {
  TangentCode code(analysis, head);
  std::string additions;
  int number = 0;
  for (const ReadGrad& grad : analysis.read_grads()) {
    const std::string tangent = code.tangent_of(grad.derivative), place = code.place_of(grad.read);
    additions += fmt::format(
        "    add(flashjit::Addition<{}, true, flashjit::AccumulationPattern::any, false>(),\n"
        "        flashjit::capture_grad_of(p, {}, {}),\n"
        "        flashjit::chained(ds_tangent, {}) + flashjit::chained(ds, {}));\n",
        number++, code.slot(grad.read), place, code.value(grad.derivative), tangent);
  }
  return fmt::format(
      "  template <class Add>\n"
      "  static __device__ __forceinline__ void add_capture_grad_tangents(\n"
      "      const flashjit::BackwardJvpParams& p, const Head& head, float ds, float ds_tangent, float dot,\n"
      "      float moved, flashjit::Position q, flashjit::Position kv, Add&& add) {{\n{}{}  }}\n",
      code.lines(), additions);
}

}  // namespace

std::string gradient_tangent_hooks(ProgramAnalysis& analysis, HeadCode& head) {
  return score_grad_tangent(analysis, head) + add_capture_grad_tangents(analysis, head);
}

}  // namespace flashjit::expr

#include "expr/row_hooks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>

#include "expr/derive.hpp"
#include "expr/nodes.hpp"
#include "expr/ops.hpp"

namespace flashjit::expr {
namespace {

/// Q's rows or K's.
struct RowsOf {
  std::string_view name;      ///< of its program
  std::string_view constant;  ///< kQMod says whether there is one, kQModGrads how many additions it makes
  std::string_view position;  ///< in programs
  ReadCheck reads;
};
constexpr RowsOf kRowsOfQ = {"q_mod", "kQMod", "q", {"q.at < head.seqlen_q", "head.b, head.h, q.at, -1"}};
constexpr RowsOf kRowsOfK = {"k_mod", "kKMod", "kv", {"kv.at < head.seqlen_kv", "head.b, head.h, -1, kv.at"}};

/// A function of a row's element, whose floats are as exact as fp32 is: angles grow with positions.
std::string row_function(const RowsOf& rows, std::string_view result, std::string_view name,
                         std::string_view more, const std::string& body) {
  return fmt::format(
      "  static __device__ __forceinline__ {} {}(const flashjit::Params& p, const Head& head, const Row& "
      "row,\n"
      "      float element, float sum_of_squares, flashjit::Position {}, int column{}) {{\n{}  }}\n",
      result, name, rows.position, more, body);
}

std::string additions_of(const NodePtr& program, HeadCode& head, Code& code) {
  Graph& graph = head.graph();
  const auto times_dout = [&](const NodePtr& slope) {
    return fmt::format("flashjit::chained(dout, {})", code.value(graph.add(slope)));
  };
  std::string text;
  if (const NodePtr own = derivative(program, make_name(Name::element)); !is_real(*own, 0))
    text += fmt::format("    add.own({});\n", times_dout(own));
  for (const NodePtr& read : reads_of_row(program)) {
    const std::string at = code.value(graph[graph.add(read)].args[0]);
    text += fmt::format("    add.at({}, {});\n", at, times_dout(derivative(program, read)));
  }
  if (const NodePtr squares = derivative(program, make_name(Name::sum_of_squares)); !is_real(*squares, 0))
    text += fmt::format("    add.squares({});\n", times_dout(squares));
  int number = 0;
  for (const RowReadGrad& grad : row_read_grads(program)) {
    const int read = graph.add(grad.read);
    std::vector<std::string> indices;
    for (const int index : std::vector<int>(graph[read].args)) indices.push_back(code.value(index));
    text += fmt::format(
        "    add.capture(flashjit::OutAddition<{}, {}>(), flashjit::capture_grad(p.captures[{}], {}), {});\n",
        number++, (graph.uses(read) & kUsesKv) != 0, head.slot(grad.read->declaration),
        fmt::join(indices, ", "), times_dout(grad.derivative));
  }
  return text;
}

std::string hooks_of(const RowsOf& rows, const NodePtr& given, HeadCode& head) {
  const NodePtr program = given ? given : make_name(Name::element);
  Code value(head, Style::exact, rows.reads), grads(head, Style::exact, {});
  const std::string result = value.value(head.graph().add(program));
  const std::string additions = additions_of(program, head, grads);
  return fmt::format("  static constexpr bool {0} = {1};\n  static constexpr int {0}Grads = {2};\n",
                     rows.constant, given != nullptr, row_read_grads(given).size()) +
         (given ? fmt::format("  // {}: {}\n", rows.name, body_text(*given)) : std::string()) +
         "  template <class Row>\n" +
         row_function(rows, "float", rows.name, "",
                      fmt::format("{}    return {};\n", value.lines(), result)) +
         "  template <class Row, class Add>\n" +
         row_function(rows, "void", fmt::format("{}_grads", rows.name), ", float dout, Add&& add",
                      grads.lines() + additions);
}

}  // namespace

std::vector<RowReadGrad> row_read_grads(const NodePtr& program) {
  std::vector<RowReadGrad> grads;
  if (!program) return grads;
  for (const NodePtr& read : reads_with_grad(program))
    if (NodePtr slope = derivative(program, read); !is_real(*slope, 0))
      grads.push_back({read, std::move(slope)});
  return grads;
}

std::string row_hooks(const Trees& programs, HeadCode& head) {
  if (!programs.q_mod && !programs.k_mod) return {};
  return hooks_of(kRowsOfQ, programs.q_mod, head) + hooks_of(kRowsOfK, programs.k_mod, head);
}

}  // namespace flashjit::expr

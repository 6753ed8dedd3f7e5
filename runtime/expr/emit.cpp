#include "expr/emit.hpp"

#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "expr/code.hpp"
#include "expr/gradient_tangents.hpp"
#include "expr/nodes.hpp"
#include "expr/ops.hpp"
#include "expr/row_hooks.hpp"
#include "expr/tile_code.hpp"

namespace flashjit::expr {
namespace {

constexpr std::string_view kPair = "flashjit::Position q, flashjit::Position kv";

constexpr std::string_view kPairPlace = "head.b, head.h, q.at, kv.at";
// Kernels compute pairs past the ends of the tensors, too, and scores of pairs that do not attend.
constexpr ReadCheck kMaskReads = {"q.at < head.seqlen_q && kv.at < head.seqlen_kv", kPairPlace};
constexpr ReadCheck kScoreReads = {"q.at < head.seqlen_q && kv.at < head.seqlen_kv && mask(p, head, q, kv)",
                                   kPairPlace};
constexpr ReadCheck kOutReads = {"q.at < head.seqlen_q", "head.b, head.h, q.at, -1"};
constexpr std::string_view kOutElement = "float out, flashjit::Position q, int column";
constexpr ReadCheck kQReads = {"true", "head.b, head.h, at, -1"},
                    kKvReads = {"true", "head.b, head.h, -1, at"};

/// The first argument of a static member function is always Params, the second the Head.
std::string function(std::string_view result, std::string_view name, std::string_view arguments,
                     const std::string& body) {
  return fmt::format(
      "  static __device__ __forceinline__ {} {}(const flashjit::Params& p, const Head& head{}{}) {{\n"
      "{}  }}\n",
      result, name, arguments.empty() ? "" : ", ", arguments, body);
}

std::string comment(std::string_view what, const NodePtr& program) {
  return program ? fmt::format("  // {}: {}\n", what, body_text(*program)) : std::string();
}

std::string result_of(Code& code, const std::string& result) {
  return code.lines() + fmt::format("    return {};\n", result);
}

std::string_view text_of(AccumulationPattern pattern) {
  switch (pattern) {
    case AccumulationPattern::any:
      return "any";
    case AccumulationPattern::by_difference:
      return "by_difference";
    case AccumulationPattern::own:
      return "own";
  }
  return "";
}

/// The hooks' texts, made one after the other; the Head knows all that they need when all are made.
class Hooks {
 public:
  Hooks(ProgramAnalysis& analysis, const EmitOptions& options)
      : analysis_(analysis),
        options_(options),
        graph_(analysis.graph()),
        score_(analysis.score()),
        score_grad_(analysis.score_grad()),
        mask_root_(analysis.mask_root()),
        mask_(analysis.mask()),
        bias_read_(analysis.bias_read()),
        terms_(analysis.terms()),
        head_(graph_, analysis.programs().declarations, options.check_indices) {}

  std::string text() {
    const std::string functions =
        comment("score", analysis_.programs().score) + score() + bias_tile_functions() + value_functions() +
        line_functions() + pair_sigmoid_functions() + score_grad() + add_capture_grads() +
        comment("mask", analysis_.programs().mask) + mask() + tiles() +
        comment("out_mod", analysis_.programs().out_mod) + out_mod() +
        row_hooks(analysis_.programs(), head_) +
        (options_.gradient_tangents ? gradient_tangent_hooks(analysis_, head_) : std::string());
    return head() + functions;
  }

 private:
  bool of_score(const ReadGrad& grad) const { return grad.derivative == score_grad_; }
  std::string head() const {
    return "  struct Head {\n    int b, h, h_kv, seqlen_q, seqlen_kv;\n" + head_.members() +
           "  };\n"
           "  static __device__ __forceinline__ Head head(const flashjit::Params& p, int b, int h, int "
           "seqlen_q,\n"
           "                                              int seqlen_kv) {\n"
           "    Head head = {b, h, h / p.qhead_per_kvhead(), seqlen_q, seqlen_kv};\n" +
           head_.body() + "    return head;\n  }\n\n";
  }

  std::string score() {
    Code code(head_, Style::fast, kScoreReads);
    const std::string result = code.score_result(score_);
    return function("float", "score", fmt::format("float dot, {}", kPair), result_of(code, result));
  }
  /// The function that finds the bias tile of a read, or its gradient.
  std::string bias_tile_function(std::string_view type, std::string_view name, std::string_view make,
                                 int read_index) {
    const Graph::Item read = graph_[read_index];
    const std::size_t leading = read.args.size() - 2;
    Code place(head_, Style::fast, {});
    std::vector<std::string> arguments = {fmt::format("p.captures[{}]", head_.slot(read.node->declaration))};
    for (const std::size_t i : {leading, leading + 1}) {
      const Rest shift = affine_form(graph_, read.args[i])->rest;
      arguments.push_back(fmt::format("static_cast<int>({})", head_.rest(shift)));
    }
    for (std::size_t i = 0; i < leading; ++i) arguments.push_back(place.value(read.args[i]));
    return function(type, name, "",
                    result_of(place, fmt::format("{}({})", make, fmt::join(arguments, ", "))));
  }
  /// What the score and its slope are where a kernel has read the bias tile's element.
  std::string bias_tile_functions() {
    if (bias_read_ < 0) return {};
    const std::string element = element_text(graph_.node(bias_read_).declaration.type);
    const auto of_element = [&](std::string_view name, auto result_in) {
      Code code(head_, Style::fast, {});
      code.know(bias_read_, code.line("float", fmt::format("flashjit::as_read({}{{element}})", element)));
      const std::string result = result_in(code);
      return function("float", name, fmt::format("float dot, unsigned short element, {}", kPair),
                      result_of(code, result));
    };
    return bias_tile_function("flashjit::BiasTile", "bias_tile", "flashjit::bias_tile_of", bias_read_) +
           of_element("score_of_element", [&](Code& code) { return code.score_result(score_); }) +
           of_element("score_grad_of_element", [&](Code& code) { return code.value(score_grad_); });
  }
  /// What the score is where a kernel has found what it reads of the query and of the key.
  std::string value_functions() {
    if (terms_.row < 0 && terms_.column < 0) return {};
    const auto of_position = [&](std::string_view name, int place, std::string_view position) {
      if (place < 0) return std::string();
      Code code(head_, Style::fast, {});
      const std::string value = code.value(place);
      return function("float", name, position, result_of(code, value));
    };
    const auto of_values = [&](std::string_view name, auto result_in) {
      Code code(head_, Style::fast, {});
      if (terms_.row >= 0) code.know(terms_.row, "of_query");
      if (terms_.column >= 0) code.know(terms_.column, "of_key");
      const std::string result = result_in(code);
      return function("float", name, fmt::format("float dot, float of_query, float of_key, {}", kPair),
                      result_of(code, result));
    };
    return of_position("score_row_term", terms_.row, "flashjit::Position q") +
           of_position("score_column_term", terms_.column, "flashjit::Position kv") +
           of_values("score_of_terms", [&](Code& code) { return code.score_result(score_); }) +
           of_values("score_grad_of_terms", [&](Code& code) { return code.value(score_grad_); });
  }
  /// What is added to the score at a pair, and how much more that is a key on.
  std::string line_functions() {
    if (!analysis_.line()) return {};
    const ScoreLine& line = *analysis_.line();
    const char* sign = line.negated ? "-" : "";
    Code offset(head_, Style::fast, {});
    const std::string at_pair = offset.value(line.place);
    const std::string factor = line.factor < 0 ? "" : fmt::format(" * {}", head_.uniform(line.factor));
    return function("float", "score_offset", kPair, result_of(offset, sign + at_pair)) +
           function("float", "score_slope", "",
                    fmt::format("    return {}{}{};\n", sign, literal_text(line.keys), factor));
  }
  /// The weight and its derivative where a kernel has found their sigmoid from its exponent.
  std::string pair_sigmoid_functions() {
    const PairSigmoid& sigmoid = analysis_.pair_sigmoid();
    if (sigmoid.place < 0) return {};
    Code exponent(head_, Style::fast, {});
    const std::string at_pair = exponent.value(sigmoid.exponent);
    const auto of_sigmoid = [&](std::string_view name, int place) {
      Code code(head_, Style::fast, {});
      code.know(sigmoid.place, "sigmoid");
      const std::string result = code.value(place);
      return function("float", name, fmt::format("float dot, float sigmoid, {}", kPair),
                      result_of(code, result));
    };
    return function("float", "sigmoid_exponent", fmt::format("float dot, {}", kPair),
                    result_of(exponent, at_pair)) +
           of_sigmoid("score_of_sigmoid", sigmoid.score) + of_sigmoid("score_grad_of_sigmoid", sigmoid.slope);
  }
  // The reads of the gradients are among the score's, which checks them.
  std::string score_grad() {
    Code code(head_, Style::fast, {});
    const std::string result = code.value(score_grad_);
    return function("float", "score_grad", fmt::format("float dot, {}", kPair), result_of(code, result));
  }
  std::string add_capture_grads() {
    Code code(head_, Style::fast, {});
    std::string additions;
    int number = 0;
    for (const ReadGrad& grad : analysis_.read_grads()) {
      std::vector<std::string> indices;
      for (const int index : std::vector<int>(graph_[grad.read].args)) indices.push_back(code.value(index));
      const bool one = is_real(graph_.node(grad.derivative), 1);
      additions += fmt::format(
          "    add(flashjit::Addition<{}, {}, flashjit::AccumulationPattern::{}, {}>(), "
          "flashjit::capture_grad(p.captures[{}], {}), {});\n",
          number++, !reads_each_once(graph_, grad.read), text_of(grad.pattern), of_score(grad),
          head_.slot(graph_.node(grad.read).declaration), fmt::join(indices, ", "),
          one ? "ds" : product_with_ds(grad.derivative, code.value(grad.derivative)));
    }
    return "  template <class Add>\n" +
           function("void", "add_capture_grads", fmt::format("float ds, float dot, {}, Add&& add", kPair),
                    code.lines() + additions) +
           (analysis_.has_bias_tile_grad()
                ? bias_tile_function("flashjit::BiasTileGrad", "bias_tile_grad",
                                     "flashjit::bias_tile_grad_of", analysis_.read_grads().back().read)
                : std::string()) +
           "\n";
  }

  std::string product_with_ds(int derivative, const std::string& text) const {
    const bool finite = graph_.node(derivative).op == Op::to_float;
    return finite ? "ds * " + text : fmt::format("flashjit::chained(ds, {})", text);
  }

  std::string mask() {
    Code code(head_, Style::exact, kMaskReads);
    const std::string result = code.value(mask_root_);
    return function("bool", "mask", kPair, result_of(code, result)) + mask_of_reads();
  }
  /// What the mask is where a kernel has found what it reads of the query and of the key.
  std::string mask_of_reads() {
    if (!analysis_.mask_terms()) return {};
    Code code(head_, Style::exact, {});
    const auto know = [&](std::string_view position, const std::vector<int>& reads) {
      for (std::size_t i = 0; i < reads.size(); ++i) {
        const std::string read = fmt::format("{}_reads[{}]", position, i);
        code.know(reads[i],
                  graph_.node(reads[i]).type == Type::boolean ? fmt::format("({} != 0)", read) : read);
      }
    };
    know("q", mask_.q_reads());
    know("kv", mask_.kv_reads());
    const std::string result = code.value(mask_root_);
    return function("bool", "mask_of_terms",
                    fmt::format("const int* q_reads, const int* kv_reads, {}", kPair),
                    result_of(code, result));
  }
  std::string tiles() {
    return function("flashjit::TileClass", "classify_tile",
                    "flashjit::Range q_range, flashjit::Range kv_range,\n"
                    "      const flashjit::Interval* q_reads, const flashjit::Interval* kv_reads",
                    classify_tile_body(head_, mask_)) +
           function("flashjit::Range", "kv_bounds", "flashjit::Range q_range",
                    bounds_body(head_, mask_, {.of_keys = true})) +
           function("flashjit::Range", "q_bounds", "flashjit::Range kv_range",
                    bounds_body(head_, mask_, {.of_keys = false})) +
           (mask_.bounds() == 0 ? std::string()
                                : function("flashjit::Range", "kv_bounds_of_all", "flashjit::Range q_range",
                                           bounds_body(head_, mask_, {.of_keys = true, .of_all = true}))) +
           function("int", "mask_row_term", "int i, int at", reads_body("q", kQReads, mask_.q_reads())) +
           function("int", "mask_column_term", "int i, int at", reads_body("kv", kKvReads, mask_.kv_reads()));
  }
  std::string reads_body(std::string_view position, const ReadCheck& check, const std::vector<int>& reads) {
    std::string body = fmt::format("    const flashjit::Position {} = {{at, 0.0f, 0.0f}};\n", position);
    for (std::size_t i = 0; i < reads.size(); ++i) {
      Code code(head_, Style::exact, check);
      const std::string result = code.value(reads[i]);
      body += fmt::format("    if (i == {}) {{\n{}    }}\n", i, result_of(code, result));
    }
    return (reads.empty() ? std::string() : body) + "    return 0;\n";
  }

  /// What becomes of an element of O, its derivative, and what an element's gradient adds to captures'.
  std::string out_mod() {
    if (!analysis_.programs().out_mod) return {};
    const auto of_element = [&](std::string_view name, int place, const ReadCheck& check) {
      Code code(head_, Style::fast, check);
      const std::string value = code.value(place);
      return function("float", name, kOutElement, result_of(code, value));
    };
    return of_element("out_mod", analysis_.out(), kOutReads) + out_tile() +
           of_element("out_mod_grad", analysis_.out_grad(), {}) + add_out_mod_grads();
  }
  /// The tile of a tensor that a tile of O reads, and what the program and its derivatives are where a kernel
  /// has read its element.
  std::string out_tile() {
    const OutTileRead& tile = analysis_.out_tile();
    if (tile.place < 0) return {};
    const std::string element = element_text(graph_.node(tile.place).declaration.type);
    const auto with_element = [&](Code& code) {
      code.know(tile.place, code.line("float", fmt::format("flashjit::as_read({}{{element}})", element)));
    };
    Code code(head_, Style::fast, {}), grads(head_, Style::fast, {});
    with_element(code), with_element(grads);
    const std::string value = code.value(analysis_.out()), of_out = grads.value(analysis_.out_grad());
    const std::string of_element =
        analysis_.has_out_tile_grad() ? grads.value(analysis_.out_read_grads().front().derivative) : "0.0f";
    return out_tile_place("flashjit::OutModTile", "out_tile", "flashjit::out_mod_tile_of<{}>({})") +
           function("float", "out_mod_of_element", fmt::format("unsigned short element, {}", kOutElement),
                    result_of(code, value)) +
           function(
               "flashjit::OutModGrads", "out_mod_grads_of_element",
               fmt::format("unsigned short element, float dout, {}", kOutElement),
               result_of(grads, fmt::format("{{flashjit::chained(dout, {}), flashjit::chained(dout, {})}}",
                                            of_out, of_element))) +
           (analysis_.has_out_tile_grad() ? out_tile_place("flashjit::OutModTileGrad", "out_tile_grad",
                                                           "flashjit::out_mod_tile_grad_of<{}>({})")
                                          : std::string());
  }
  /// The function that finds the tile, or its gradient. `make` is given q's index, and the arguments.
  std::string out_tile_place(std::string_view type, std::string_view name, std::string_view make) {
    const OutTileRead& tile = analysis_.out_tile();
    const Graph::Item read = graph_[tile.place];
    Code place(head_, Style::fast, {});
    const Rest shift = affine_form(graph_, read.args[tile.of_q])->rest;
    std::vector<std::string> arguments = {fmt::format("p.captures[{}]", head_.slot(read.node->declaration)),
                                          fmt::format("static_cast<int>({})", head_.rest(shift))};
    for (int i = 0; i + 1 < static_cast<int>(read.args.size()); ++i)
      arguments.push_back(i == tile.of_q ? "0" : place.value(read.args[i]));
    const std::string joined = fmt::format("{}", fmt::join(arguments, ", "));
    return function(type, name, "", result_of(place, fmt::format(fmt::runtime(make), tile.of_q, joined)));
  }
  std::string add_out_mod_grads() {
    Code code(head_, Style::fast, {});
    std::string additions;
    int number = 0;
    for (const ReadGrad& grad : analysis_.out_read_grads()) {
      std::vector<std::string> indices;
      for (const int index : std::vector<int>(graph_[grad.read].args)) indices.push_back(code.value(index));
      additions += fmt::format(
          "    add(flashjit::OutAddition<{}, {}>(), flashjit::capture_grad(p.captures[{}], {}), "
          "flashjit::chained(dout, {}));\n",
          number++, (graph_.uses(grad.read) & kUsesKv) != 0, head_.slot(graph_.node(grad.read).declaration),
          fmt::join(indices, ", "), code.value(grad.derivative));
    }
    return "  template <class Add>\n" + function("void", "add_out_mod_grads",
                                                 fmt::format("float dout, {}, Add&& add", kOutElement),
                                                 code.lines() + additions);
  }

  ProgramAnalysis& analysis_;
  const EmitOptions options_;
  Graph& graph_;
  int score_, score_grad_, mask_root_;
  const MaskAnalysis& mask_;
  int bias_read_;
  PositionTerms terms_;
  HeadCode head_;
};

}  // namespace

std::string emit_functions(const Trees& programs, const EmitOptions& options) {
  ProgramAnalysis analysis(programs, options);
  return Hooks(analysis, options).text();
}

std::string emit_hooks(const Trees& programs, const EmitOptions& options) {
  ProgramAnalysis analysis(programs, options);
  std::string constants;
  for (const Constant& constant : constants_of(analysis.facts())) constants += to_string(constant);
  return constants + "\n" + Hooks(analysis, options).text();
}

}  // namespace flashjit::expr

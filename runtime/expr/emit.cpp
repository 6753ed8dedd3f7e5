#include "expr/emit.hpp"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "expr/analyze.hpp"
#include "expr/code.hpp"
#include "expr/declarations.hpp"
#include "expr/derive.hpp"
#include "expr/fold.hpp"
#include "expr/nodes.hpp"
#include "expr/ops.hpp"
#include "expr/tile_code.hpp"

namespace flashjit::expr {
namespace {

constexpr std::string_view kPair = "flashjit::Position q, flashjit::Position kv";

constexpr std::string_view kPairPlace = "head.b, head.h, q.at, kv.at";
// Kernels compute pairs past the ends of the tensors, too, and scores of pairs that do not attend.
constexpr ReadCheck kMaskReads = {"q.at < head.seqlen_q && kv.at < head.seqlen_kv", kPairPlace};
constexpr ReadCheck kScoreReads = {"q.at < head.seqlen_q && kv.at < head.seqlen_kv && mask(p, head, q, kv)",
                                   kPairPlace};
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

std::string constant(std::string_view name, bool value) {
  return fmt::format("  static constexpr bool {} = {};\n", name, value);
}
std::string constant(std::string_view name, std::size_t value) {
  return fmt::format("  static constexpr int {} = {};\n", name, value);
}

std::string comment(std::string_view what, const NodePtr& program) {
  return program ? fmt::format("  // {}: {}\n", what, body_text(*program)) : std::string();
}

std::string result_of(Code& code, const std::string& result) {
  return code.lines() + fmt::format("    return {};\n", result);
}

/// To which places a head's pairs add: Places in templates/common/capture_grads.cuh.
enum class Places { any, by_difference, own };

std::string_view text_of(Places places) {
  switch (places) {
    case Places::any:
      return "any";
    case Places::by_difference:
      return "by_difference";
    case Places::own:
      return "own";
  }
  return "";
}

/// The gradient of one read: d score / d read.
struct ReadGrad {
  int read, derivative;
  Places places = Places::any;
};

/// The hooks' texts, made one after the other; the Head knows all that they need when all are made.
class Hooks {
 public:
  Hooks(const Trees& programs, const EmitOptions& options)
      : programs_(programs),
        score_(graph_.add(programs.score ? programs.score : make_name(Name::score))),
        score_grad_(graph_.add(derivative(graph_[score_].node, make_name(Name::score)))),
        mask_root_(graph_.add(programs.mask ? programs.mask : make_boolean(true))),
        mask_(graph_, mask_root_),
        plane_read_(options.check_indices ? -1 : plane_read(graph_, score_)),
        values_(options.check_indices || plane_read_ >= 0 ? PositionValues{}
                                                          : position_values(graph_, score_)),
        line_(line_of_score(graph_, score_)),
        mask_reads_(!options.check_indices && reads_tensors(mask_.q_reads(), mask_.kv_reads())),
        head_(graph_, programs.declarations, options.check_indices) {
    for (const NodePtr& read : reads_with_grad(graph_[score_].node)) {
      const NodePtr slope = derivative(graph_[score_].node, read);
      if (is_real(*slope, 0)) continue;
      ReadGrad grad{graph_.add(read), graph_.add(slope)};
      grad.places = places_of(grad);
      read_grads_.push_back(grad);
    }
    sort_read_grads();
  }

  std::string text() {
    const std::string functions = comment("score", programs_.score) + score() + plane_functions() +
                                  value_functions() + line_functions() + score_grad() + add_capture_grads() +
                                  comment("mask", programs_.mask) + mask() + tiles();
    return constants() + "\n" + head() + functions;
  }

 private:
  bool of_score(const ReadGrad& grad) const { return grad.derivative == score_grad_; }
  /// Own: a pair gives its place what it gives the score, dS; of `score + bias[q, kv]`, or a softcap of that.
  /// By difference: that, or dS and a factor, of `score + table[h, kv - q]`. What all pairs of a head add to
  /// one place is in neither: a thread's are soon one sum.
  Places places_of(const ReadGrad& grad) const {
    const auto of_difference = [&](int place) { return depends_on_difference(graph_, place); };
    const std::vector<int>& indices = graph_[grad.read].args;
    if (of_score(grad) && reads_plane(graph_, grad.read)) return Places::own;
    const bool product = is_real(graph_.node(score_grad_), 1) && of_difference(grad.derivative);
    return (of_score(grad) || product) && std::ranges::all_of(indices, of_difference) &&
                   std::ranges::any_of(indices, [&](int index) { return graph_.uses_positions(index); })
               ? Places::by_difference
               : Places::any;
  }
  /// Those of any places come first, and of those with places of their own there is one.
  void sort_read_grads() {
    const auto owning = [](const ReadGrad& grad) { return grad.places == Places::own; };
    const auto first = std::ranges::find_if(read_grads_, owning);
    if (first != read_grads_.end())
      std::for_each(first + 1, read_grads_.end(), [&](ReadGrad& grad) {
        if (owning(grad)) grad.places = Places::any;
      });
    std::ranges::stable_sort(read_grads_, {}, &ReadGrad::places);
  }
  bool has_plane_grad() const { return !read_grads_.empty() && read_grads_.back().places == Places::own; }
  std::size_t difference_grads() const {
    return static_cast<std::size_t>(
        std::ranges::count(read_grads_, Places::by_difference, &ReadGrad::places));
  }

  std::string constants() const {
    const unsigned uses = graph_.uses(mask_root_);
    return constant("kHasScore", !is_name(graph_.node(score_), Name::score)) +
           constant("kHasMask", !is_boolean(graph_.node(mask_root_), true)) +
           constant("kScoreGrad", !is_real(graph_.node(score_grad_), 1)) +
           constant("kBiasTile", plane_read_ >= 0) + constant("kScoreRowTerm", values_.query >= 0) +
           constant("kScoreColumnTerm", values_.key >= 0) + constant("kScoreLine", line_.has_value()) +
           constant("kMaskBounds", mask_.bounds()) + constant("kListed", mask_.listed()) +
           constant("kEvaluateTiles", mask_.evaluate_tiles()) +
           constant("kMaskBlockQ", static_cast<std::size_t>(block_of(graph_, mask_root_, kUsesQ))) +
           constant("kMaskBlockKv", static_cast<std::size_t>(block_of(graph_, mask_root_, kUsesKv))) +
           constant("kMaskUsesBatch", (uses & kUsesBatch) != 0) +
           constant("kMaskUsesHead", (uses & kUsesHead) != 0) + constant("kMaskTerms", mask_reads_) +
           constant("kMaskRowTerms", mask_.q_reads().size()) +
           constant("kMaskColumnTerms", mask_.kv_reads().size()) +
           constant("kCaptureGrads", read_grads_.size()) + constant("kDifferenceGrads", difference_grads()) +
           constant("kBiasTileGrad", has_plane_grad());
  }

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
  /// The function that says where the plane of a read lies, or its gradient.
  std::string plane_function(std::string_view type, std::string_view name, std::string_view make, int plane) {
    const Graph::Item read = graph_[plane];
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
  /// What the score and its slope are where a kernel has read the plane's element.
  std::string plane_functions() {
    if (plane_read_ < 0) return {};
    const std::string element = element_text(graph_.node(plane_read_).declaration.type);
    const auto of_element = [&](std::string_view name, auto result_in) {
      Code code(head_, Style::fast, {});
      code.know(plane_read_, code.line("float", fmt::format("flashjit::as_read({}{{element}})", element)));
      const std::string result = result_in(code);
      return function("float", name, fmt::format("float dot, unsigned short element, {}", kPair),
                      result_of(code, result));
    };
    return plane_function("flashjit::BiasTile", "bias_tile", "flashjit::bias_tile_of", plane_read_) +
           of_element("score_of_element", [&](Code& code) { return code.score_result(score_); }) +
           of_element("score_grad_of_element", [&](Code& code) { return code.value(score_grad_); });
  }
  /// What the score is where a kernel has found what it reads of the query and of the key.
  std::string value_functions() {
    if (values_.query < 0 && values_.key < 0) return {};
    const auto of_position = [&](std::string_view name, int place, std::string_view position) {
      if (place < 0) return std::string();
      Code code(head_, Style::fast, {});
      const std::string value = code.value(place);
      return function("float", name, position, result_of(code, value));
    };
    const auto of_values = [&](std::string_view name, auto result_in) {
      Code code(head_, Style::fast, {});
      if (values_.query >= 0) code.know(values_.query, "of_query");
      if (values_.key >= 0) code.know(values_.key, "of_key");
      const std::string result = result_in(code);
      return function("float", name, fmt::format("float dot, float of_query, float of_key, {}", kPair),
                      result_of(code, result));
    };
    return of_position("score_row_term", values_.query, "flashjit::Position q") +
           of_position("score_column_term", values_.key, "flashjit::Position kv") +
           of_values("score_of_terms", [&](Code& code) { return code.score_result(score_); }) +
           of_values("score_grad_of_terms", [&](Code& code) { return code.value(score_grad_); });
  }
  /// What is added to the score at a pair, and how much more that is a key on.
  std::string line_functions() {
    if (!line_) return {};
    const char* sign = line_->negated ? "-" : "";
    Code offset(head_, Style::fast, {});
    const std::string at_pair = offset.value(line_->place);
    const std::string factor = line_->factor < 0 ? "" : fmt::format(" * {}", head_.uniform(line_->factor));
    return function("float", "score_offset", kPair, result_of(offset, sign + at_pair)) +
           function("float", "score_slope", "",
                    fmt::format("    return {}{}{};\n", sign, literal_text(line_->keys), factor));
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
    for (const ReadGrad& grad : read_grads_) {
      std::vector<std::string> indices;
      for (const int index : std::vector<int>(graph_[grad.read].args)) indices.push_back(code.value(index));
      const bool one = is_real(graph_.node(grad.derivative), 1);
      additions += fmt::format(
          "    add(flashjit::Addition<{}, {}, flashjit::Places::{}, {}>(), "
          "flashjit::capture_grad(p.captures[{}], {}), {});\n",
          number++, !reads_each_once(graph_, grad.read), text_of(grad.places), of_score(grad),
          head_.slot(graph_.node(grad.read).declaration), fmt::join(indices, ", "),
          one ? "ds" : product_with_ds(grad.derivative, code.value(grad.derivative)));
    }
    return "  template <class Add>\n" +
           function("void", "add_capture_grads", fmt::format("float ds, float dot, {}, Add&& add", kPair),
                    code.lines() + additions) +
           (has_plane_grad() ? plane_function("flashjit::BiasTileGrad", "bias_tile_grad",
                                              "flashjit::bias_tile_grad_of", read_grads_.back().read)
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
    if (!mask_reads_) return {};
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
  /// Whether any of what a mask reads of one position comes from a tensor.
  bool reads_tensors(const std::vector<int>& q_reads, const std::vector<int>& kv_reads) const {
    const auto reads = [&](int place) { return reads_by_position(graph_[place].node); };
    return std::ranges::any_of(q_reads, reads) || std::ranges::any_of(kv_reads, reads);
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

  const Trees& programs_;
  Graph graph_;
  int score_, score_grad_, mask_root_;
  MaskAnalysis mask_;
  int plane_read_;         ///< of the score; -1: none
  PositionValues values_;  ///< of the score
  std::optional<ScoreLine> line_;
  bool mask_reads_;  ///< whether the mask is emitted as one of what it reads, too
  HeadCode head_;
  std::vector<ReadGrad> read_grads_;
};

}  // namespace

std::string emit_hooks(const Trees& programs, const EmitOptions& options) {
  Trees prepared = programs;
  if (prepared.score) prepared.score = fold(prepared.score);
  if (prepared.mask) prepared.mask = prepared_mask(prepared.mask);
  return Hooks(prepared, options).text();
}

std::string emit_hooks(const ScoreProgram& score, const MaskProgram& mask, const EmitOptions& options) {
  return emit_hooks({score.tree(), mask.tree(), declarations(score, mask)}, options);
}

}  // namespace flashjit::expr

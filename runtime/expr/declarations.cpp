#include "expr/declarations.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "expr/ops.hpp"
#include "flashjit/error.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"
#include "support/until_unload.hpp"

namespace flashjit {
namespace expr {
namespace {

void check_counts(std::string_view what, const std::vector<Declaration>& declared) {
  const auto scalars = std::ranges::count_if(declared, &Declaration::is_scalar);
  const auto tensors = static_cast<std::ptrdiff_t>(declared.size()) - scalars;
  if (tensors > kMaxDeclaredTensors)
    refuse("{} {} tensors; at most {} are allowed", what, tensors, kMaxDeclaredTensors);
  if (scalars > kMaxDeclaredScalars)
    refuse("{} {} scalars; at most {} are allowed", what, scalars, kMaxDeclaredScalars);
}

bool reads_score(const Node& node) {
  return (node.op == Op::name && node.name == Name::score) ||
         std::ranges::any_of(node.args, [](const NodePtr& arg) { return reads_score(*arg); });
}

/// The canonical text of a program that is sound as such.
std::string checked_text(std::string_view what, const Expr& program) {
  check_size(program.node());
  check_counts(fmt::format("a {} program declares", what), declarations_of(program.node()));
  std::string text = to_string(program);
  if (text.size() > kMaxText)
    refuse("a {} program's text has {} bytes; at most {} are allowed: choose shorter names", what,
           text.size(), kMaxText);
  return text;
}

bool is_identity(const Expr& score) {
  return score.node().op == Op::name && score.node().name == Name::score;
}

bool masks_nothing(const Expr& mask) { return mask.node().op == Op::literal && mask.node().boolean; }

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

}  // namespace

std::vector<Declaration> declarations(const ScoreProgram& score, const MaskProgram& mask) {
  std::vector<Declaration> out, of_mask;
  if (!score.empty()) out = declarations_of(*score.tree());
  if (!mask.empty()) of_mask = declarations_of(*mask.tree());
  for (Declaration& d : of_mask) {
    const auto found = std::ranges::find(out, d.name, &Declaration::name);
    if (found == out.end()) {
      out.push_back(std::move(d));
    } else if (found->type != d.type || found->rank != d.rank) {
      // Whether the score declares a gradient does not matter to the mask.
      refuse("the score program declares '{}', but the mask program '{}'; one name is one thing in both",
             to_string(*found), to_string(d));
    }
  }
  check_counts("the score program and the mask program declare together", out);
  return out;
}

}  // namespace expr

MaskProgram::MaskProgram(const expr::Expr& mask) {
  using namespace expr;
  if (mask.type() != Type::boolean)
    refuse("a mask program is bool (whether a pair attends), not {}: {}", to_string(mask.type()),
           quoted(body_text(mask.node())));
  if (masks_nothing(mask)) return;
  std::string text = checked_text("mask", mask);
  if (reads_score(mask.node()))
    refuse("a mask program reads score; a mask depends on positions and captures alone: {}", quoted(text));
  for (const Declaration& d : declarations_of(mask.node())) {
    if (d.wants_grad) refuse("a mask program declares '{}'; a mask has no gradients", to_string(d));
  }
  text_ = std::move(text);
  tree_ = mask.pointer();
}

MaskProgram::MaskProgram(std::string_view text) {
  if (!expr::is_blank(text)) *this = MaskProgram(expr::parse(text));
}

ScoreProgram::ScoreProgram(const expr::Expr& given) {
  using namespace expr;
  if (given.type() == Type::boolean)
    refuse("a score program is float, not bool: {}", quoted(body_text(given.node())));
  const Expr score = to_float(given);
  if (is_identity(score)) return;
  text_ = checked_text("score", score);
  tree_ = score.pointer();
}

ScoreProgram::ScoreProgram(std::string_view text) {
  if (!expr::is_blank(text)) *this = ScoreProgram(expr::parse(text));
}

const MaskProgram& causal(CausalAlignment alignment) {
  static const MaskProgram &bottom_right = until_unload(MaskProgram("causal")),
                           &top_left = until_unload(MaskProgram("causal_top_left"));
  return alignment == CausalAlignment::bottom_right ? bottom_right : top_left;
}

}  // namespace flashjit

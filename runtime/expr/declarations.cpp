#include "expr/declarations.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

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

bool reads_name(const Node& node, Name name) {
  return (node.op == Op::name && node.name == name) ||
         std::ranges::any_of(node.args, [&](const NodePtr& arg) { return reads_name(*arg, name); });
}

bool reads_row(const Node& node) {
  return node.op == Op::element_at ||
         std::ranges::any_of(node.args, [](const NodePtr& arg) { return reads_row(*arg); });
}

/// The first of `names` that the program reads; empty: none.
std::string_view first_read(const Node& program, std::initializer_list<Name> names) {
  for (const Name name : names)
    if (reads_name(program, name)) return to_string(name);
  return {};
}

/// What the program reads of a row of Q or K; empty: nothing.
std::string_view row_read(const Node& program) {
  if (reads_row(program)) return info(Op::element_at).text;
  return first_read(program, {Name::element, Name::sum_of_squares});
}

void refuse_reads_of_row(std::string_view what, const Expr& program) {
  if (const auto name = row_read(program.node()); !name.empty())
    refuse("{} program reads {}, which is for programs of Q and K (q_mod, k_mod): {}", what, name,
           quoted(body_text(program.node())));
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

bool is_identity(const Expr& program, Name name) {
  return program.node().op == Op::name && program.node().name == name;
}

bool masks_nothing(const Expr& mask) { return mask.node().op == Op::literal && mask.node().boolean; }

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

}  // namespace

void check_prologue(const Prologue& prologue) {
  const auto check = [](std::string_view program, const NodePtr& tree, std::initializer_list<Name> others,
                        std::string_view position) {
    if (const auto name = tree ? first_read(*tree, others) : std::string_view(); !name.empty())
      refuse("a {} program reads {}; its position is {}, and its head {}: {}", program, name, position,
             program == "k_mod" ? "h_kv" : "h or h_kv", quoted(body_text(*tree)));
  };
  check("q_mod", prologue.q_mod.tree(), {Name::kv}, "q");
  check("k_mod", prologue.k_mod.tree(), {Name::q, Name::h}, "kv");
}

std::vector<Declaration> declarations(const ScoreProgram& score, const MaskProgram& mask,
                                      const OutProgram& out_mod, const Prologue& prologue) {
  struct Part {
    std::string_view name;
    const NodePtr& tree;
  };
  std::vector<Declaration> all;
  std::vector<std::string_view> owners;
  for (const Part& part :
       {Part{"score", score.tree()}, Part{"out_mod", out_mod.tree()}, Part{"q_mod", prologue.q_mod.tree()},
        Part{"k_mod", prologue.k_mod.tree()}, Part{"mask", mask.tree()}}) {
    if (!part.tree) continue;
    for (Declaration& d : declarations_of(*part.tree)) {
      const auto found = std::ranges::find(all, d.name, &Declaration::name);
      if (found == all.end()) {
        all.push_back(std::move(d));
        owners.push_back(part.name);
        continue;
      }
      // Whether another declares a gradient does not matter to the mask.
      const bool grads_differ = part.name != "mask" && found->wants_grad != d.wants_grad;
      if (found->type != d.type || found->rank != d.rank || grads_differ)
        refuse("the {} program declares '{}', but the {} program '{}'; one name is one thing in both",
               owners[found - all.begin()], to_string(*found), part.name, to_string(d));
    }
  }
  check_counts("the programs of a spec declare together", all);
  return all;
}

}  // namespace expr

MaskProgram::MaskProgram(const expr::Expr& mask) {
  using namespace expr;
  if (mask.type() != Type::boolean)
    refuse("a mask program is bool (whether a pair attends), not {}: {}", to_string(mask.type()),
           quoted(body_text(mask.node())));
  if (masks_nothing(mask)) return;
  std::string text = checked_text("mask", mask);
  refuse_reads_of_row("a mask", mask);
  if (const auto name = first_read(mask.node(), {Name::score, Name::out, Name::column}); !name.empty())
    refuse("a mask program reads {}; a mask depends on positions and captures alone: {}", name, quoted(text));
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
  if (is_identity(score, Name::score)) return;
  refuse_reads_of_row("a score", score);
  if (const auto name = first_read(score.node(), {Name::out, Name::column}); !name.empty())
    refuse("a score program reads {}, which is for programs of O (out_mod): {}", name,
           quoted(body_text(score.node())));
  text_ = checked_text("score", score);
  tree_ = score.pointer();
}

ScoreProgram::ScoreProgram(std::string_view text) {
  if (!expr::is_blank(text)) *this = ScoreProgram(expr::parse(text));
}

OutProgram::OutProgram(const expr::Expr& given) {
  using namespace expr;
  if (given.type() == Type::boolean)
    refuse("an out_mod program is float, not bool: {}", quoted(body_text(given.node())));
  const Expr out = to_float(given);
  if (is_identity(out, Name::out)) return;
  refuse_reads_of_row("an out_mod", out);
  if (const auto name = first_read(out.node(), {Name::score, Name::kv}); !name.empty())
    refuse(
        "an out_mod program reads {}; it has out, b, h, h_kv, q, column, the lengths and what it declares: "
        "{}",
        name, quoted(body_text(out.node())));
  text_ = checked_text("out_mod", out);
  tree_ = out.pointer();
}

OutProgram::OutProgram(std::string_view text) {
  if (!expr::is_blank(text)) *this = OutProgram(expr::parse(text));
}

RowProgram::RowProgram(const expr::Expr& given) {
  using namespace expr;
  if (given.type() == Type::boolean)
    refuse("a q_mod or k_mod program is float, not bool: {}", quoted(body_text(given.node())));
  const Expr element = to_float(given);
  if (is_identity(element, Name::element)) return;
  if (const auto name = first_read(element.node(), {Name::score, Name::out}); !name.empty())
    refuse(
        "a q_mod or k_mod program reads {}; it has element, element_at(), sum_of_squares, column, b, h_kv, "
        "the "
        "lengths, its position and what it declares: {}",
        name, quoted(body_text(element.node())));
  text_ = checked_text("q_mod or k_mod", element);
  tree_ = element.pointer();
}

RowProgram::RowProgram(std::string_view text) {
  if (!expr::is_blank(text)) *this = RowProgram(expr::parse(text));
}

const MaskProgram& causal(CausalAlignment alignment) {
  static const MaskProgram &bottom_right = until_unload(MaskProgram("causal")),
                           &top_left = until_unload(MaskProgram("causal_top_left"));
  return alignment == CausalAlignment::bottom_right ? bottom_right : top_left;
}

}  // namespace flashjit

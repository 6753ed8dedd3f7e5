#include "expr/float_scalars.hpp"

#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "expr/declarations.hpp"
#include "expr/ops.hpp"

namespace flashjit::expr {
namespace {

bool is_int_scalar(const Node& node) { return node.op == Op::scalar && node.type == Type::integer; }

/// Int scalars by how they are read.
class ScalarReads {
 public:
  void add(const NodePtr& tree) {
    if (!tree || !seen_.insert(tree.get()).second) return;
    for (const NodePtr& arg : tree->args) {
      if (is_int_scalar(*arg)) (tree->op == Op::to_float ? floats_ : ints_).insert(arg->declaration.name);
      add(arg);
    }
  }
  std::set<std::string> floats_alone() const {
    std::set<std::string> names = floats_;
    for (const std::string& name : ints_) names.erase(name);
    return names;
  }

 private:
  std::set<std::string> floats_, ints_;
  std::unordered_set<const Node*> seen_;  // subtrees may be shared
};

class Redeclared {
 public:
  explicit Redeclared(const std::set<std::string>& names) : names_(names) {}

  NodePtr of(const NodePtr& tree) {
    if (tree->args.empty()) return tree;
    NodePtr& known = known_[tree.get()];
    if (!known) known = of_new(tree);
    return known;
  }

 private:
  NodePtr of_new(const NodePtr& tree) {
    const Node& first = *tree->args[0];
    if (tree->op == Op::to_float && is_int_scalar(first) && names_.contains(first.declaration.name))
      return scalar_float(first.declaration.name).pointer();
    std::vector<Expr> args;
    bool changed = false;
    for (const NodePtr& arg : tree->args) {
      args.emplace_back(of(arg));
      changed |= args.back().pointer() != arg;
    }
    if (!changed) return tree;
    return (tree->op == Op::read ? read(tree->declaration, args) : apply(tree->op, std::move(args)))
        .pointer();
  }

  const std::set<std::string>& names_;
  std::unordered_map<const Node*, NodePtr> known_;
};

}  // namespace

void declare_float_scalars(ScoreProgram& score, MaskProgram& mask, OutProgram& out_mod, Prologue& prologue) {
  ScalarReads uses;
  RowProgram* const of_rows[] = {&prologue.q_mod, &prologue.k_mod};
  for (const RowProgram* program : of_rows) uses.add(program->tree());
  uses.add(tree(score));
  uses.add(tree(mask));
  uses.add(out_mod.tree());
  const std::set<std::string> names = uses.floats_alone();
  if (names.empty()) return;
  Redeclared redeclared(names);
  if (!score.empty()) {
    ScoreProgram changed = Expr(redeclared.of(tree(score)));
    score = score.is_weight() ? weights(std::move(changed)) : std::move(changed);
  }
  if (!mask.empty()) mask = Expr(redeclared.of(tree(mask)));
  if (!out_mod.empty()) out_mod = Expr(redeclared.of(out_mod.tree()));
  for (RowProgram* program : of_rows)
    if (!program->empty()) *program = Expr(redeclared.of(program->tree()));
}

}  // namespace flashjit::expr

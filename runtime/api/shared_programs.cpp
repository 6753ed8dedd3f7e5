#include "api/shared_programs.hpp"

#include <string>
#include <vector>

#include "expr/ops.hpp"

namespace flashjit {
namespace {

using expr::Expr;
using expr::Name;
using expr::Op;

Expr part(int which) { return expr::scalar_int(std::string(kPartNames[which])); }

Expr moved_name(const Expr& name, PartMoves moves) {
  switch (name.node().name) {
    case Name::q:
      return name + part(0);
    case Name::kv:
      return name + part(1);
    case Name::h:
      return moves.heads ? name + part(2) : name;
    case Name::h_kv:
      return moves.heads ? name + part(3) : name;
    case Name::b:
      return moves.batch ? name + part(4) : name;
    case Name::seqlen_q:
    case Name::seqlen_kv:
      return part(5);
    case Name::score:
    case Name::out:
    case Name::column:
    case Name::element:
    case Name::sum_of_squares:
      break;
  }
  return name;
}

Expr moved_tree(const Expr& tree, PartMoves moves) {
  const expr::Node& node = tree.node();
  if (node.op == Op::name) return moved_name(tree, moves);
  std::vector<Expr> args;
  for (const expr::NodePtr& arg : node.args) args.push_back(moved_tree(Expr(arg), moves));
  if (node.op == Op::read) return expr::read(node.declaration, args);
  return args.empty() ? tree : expr::apply(node.op, args);
}

}  // namespace

MaskProgram moved(const MaskProgram& mask, PartMoves moves) {
  return mask.empty() ? mask : MaskProgram(moved_tree(Expr(mask.tree()), moves));
}
ScoreProgram moved(const ScoreProgram& score, PartMoves moves) {
  return score.empty() ? score : ScoreProgram(moved_tree(Expr(score.tree()), moves));
}

}  // namespace flashjit

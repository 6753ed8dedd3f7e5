#include "call/row_mods.hpp"

#include <cstddef>

#include "support/refuse.hpp"

namespace flashjit {
namespace {

/// A contiguous tensor like `given` in the workspace.
template <class View>
View view_in_workspace(View given, const Workspace& workspace, std::size_t offset) {
  given.data = static_cast<char*>(workspace.data) + offset;
  given.stride = {given.size[1] * given.size[2] * given.size[3], given.size[2] * given.size[3], given.size[3],
                  1};
  return given;
}

template <class Args>
void move_modified_rows(const plan::ExecutionPlan& plan, Args& args) {
  const Prologue& prologue = plan.spec.prologue;
  if (!prologue.q_mod.empty()) args.q = view_in_workspace(args.q, args.workspace, plan.workspace.q_mod);
  if (!prologue.k_mod.empty()) args.k = view_in_workspace(args.k, args.workspace, plan.workspace.k_mod);
}

}  // namespace

void check_modified_rows(const AttentionSpec& spec, const AttentionShape& shape, const ConstTensorView& q,
                         const ConstTensorView& k) {
  const auto check = [&](const RowProgram& program, const char* name, const ConstTensorView& tensor,
                         const char* longest, std::int64_t most) {
    if (!spec.varlen || program.empty() || tensor.size[2] <= shape.batch * most) return;
    refuse(
        "{0} has {1} packed rows, but batch_size * {2} is {3}: with {0}_mod there is memory for those alone, "
        "so "
        "give a larger {2}, or views without the rows of no sequence.",
        name, tensor.size[2], longest, shape.batch * most);
  };
  check(spec.prologue.q_mod, "q", q, "max_seqlen_q", shape.seqlen_q);
  check(spec.prologue.k_mod, "k", k, "max_seqlen_kv", shape.seqlen_kv);
}

ForwardArgs args_of_kernels(const plan::ExecutionPlan& plan, ForwardArgs args) {
  move_modified_rows(plan, args);
  return args;
}

BackwardArgs args_of_kernels(const plan::ExecutionPlan& plan, BackwardArgs args) {
  const Prologue& prologue = plan.spec.prologue;
  move_modified_rows(plan, args);
  if (!prologue.q_mod.empty()) args.dq = view_in_workspace(args.dq, args.workspace, plan.workspace.dq_of_mod);
  if (!prologue.k_mod.empty()) args.dk = view_in_workspace(args.dk, args.workspace, plan.workspace.dk_of_mod);
  return args;
}

}  // namespace flashjit

"""The eager path of autograd: what a call records, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._call_types import NO_RNG, NOTHING, Fixed, Rng, grads_of_fixed
from ._front import FIXED, Calls, Recorder
from ._lists import TileLists
from ._plans import Plan
from ._tensors import Layout


class Call:
    """What a call's backward pass needs besides the tensors that autograd keeps."""

    __slots__ = (
        *("plan", "fixed", "values", "rng", "lists", "returns_lse", "row_max", "rounded"),
        *("is_plain", "fronts"),
    )

    def __init__(
        self,
        plan: Plan,
        fixed: Fixed,
        values: tuple[Any, ...],
        rng: Rng,
        lists: TileLists | None,
        returns_lse: bool,
        row_max: Tensor | None,
        rounded: torch.dtype | None = None,
    ) -> None:
        self.row_max, self.rounded = row_max, rounded
        self.plan, self.fixed, self.rng, self.lists, self.returns_lse = plan, fixed, rng, lists, returns_lse
        self.values = values  # once recorded, without its tensors
        self.is_plain = not (plan.has_out_mod or plan.shares_kv) and rng is NO_RNG and row_max is None
        self.fronts = _fronts_of(plan) if self.is_plain and not values else None


def _fronts_of(plan: Plan) -> tuple[Calls, Calls]:
    """What the front keeps of the plan's two passes, whose calls differ in their tensors alone."""
    if plan.fronts is None:
        backward = ("dout", "q", "k", "v", "out", "lse")
        plan.fronts = (
            Calls.of_tensors(("q", "k", "v"), (), Fixed._fields),
            Calls.of_tensors(backward, (), FIXED, "backward"),
        )
    return plan.fronts


class _Attention(torch.autograd.Function):
    """The eager path: no dispatcher between the call and the launch."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        """rest: where the call has more than Q, K, V, the fixed tensors or None, and the captured tensors."""
        plan, fronts, recorder, found, before_mod = call.plan, call.fronts, None, None, None
        lists = None if call.lists is None else call.lists.built[0]
        if fronts is not None:
            given = (q, k, v, *call.fixed, lists)
            found = fronts[0].find(*given)
            recorder = Recorder(fronts[0], given) if found is None else None
        if found is None or found is NotImplemented:
            before_mod = plan.new_before_mod() if plan.has_out_mod else None
            found = plan.forward(
                *(q, k, v, call.fixed, call.values, call.rng, True, lists, call.row_max),
                before_mod=before_mod,
                recorder=recorder,
            )
            if recorder is not None:
                recorder.keep(found)
        out, lse = found
        call.row_max = None  # which nothing needs any more
        ctx.save_for_backward(q, k, v, out if before_mod is None else before_mod, lse, *rest)
        ctx.set_materialize_grads(False)
        ctx.call = call
        if rest:
            call.fixed, call.values = (
                NOTHING,
                tuple(None if isinstance(x, Tensor) else x for x in call.values),
            )
        if call.rounded is not None:
            out = out.to(call.rounded)
        return (out, lse) if call.returns_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        if dout is not None and dout.is_neg():
            dout = dout.resolve_neg()
        if dlse is not None and dlse.is_neg():
            dlse = dlse.resolve_neg()
        if not torch.is_grad_enabled():
            return _gradients(ctx.call, dout, dlse, *ctx.saved_tensors)
        # Under create_graph the operator records what its gradients depend on.
        return _gradients_by_operator(ctx.call, dout, dlse, *ctx.saved_tensors)


_GIVEN = frozenset({Tensor, type(None)})  # of a gradient: no subclass


def _gradients(
    call: Call,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> Any:
    """Those of what _Attention.forward() is given, in its order."""
    recorder, lists = None, None if call.lists is None else call.lists.built[1]
    if dlse is None and call.fronts is not None:
        front, saved = call.fronts[1], (dout, q, k, v, out, lse, *(rest or NOTHING)[: len(FIXED)], lists)
        found = front.find(*saved)
        if found is None:
            recorder = Recorder(front, saved)
        elif found is not NotImplemented:
            return (None, *found, *[None] * len(rest))
    if (
        type(dout) not in _GIVEN
        or type(dlse) not in _GIVEN
        or not call.plan.reads_saved(q, k, v, out, lse, rest)
    ):
        return _gradients_by_operator(call, dout, dlse, q, k, v, out, lse, *rest)
    given, captures = rest[: len(NOTHING)], iter(rest[len(NOTHING) :])
    fixed = Fixed(*given) if any(x is not None for x in given) else NOTHING
    values = [next(captures) if x is None else x for x in call.values]
    grads, dsinks, dvalues = call.plan.backward(
        dout, dlse, q, k, v, out, lse, fixed, values, call.rng, lists, recorder
    )
    if recorder is not None:
        recorder.keep(tuple(grads))
    if not rest:
        return (None, *grads)
    return (None, *grads, *grads_of_fixed(dsinks), *_of_captures(call, dvalues))


def _of_captures(call: Call, dvalues: Sequence[Tensor]) -> list[Tensor | None]:
    """A gradient or None for each captured tensor."""
    by_place = dict(zip(call.plan.grad_places, dvalues))
    return [by_place.get(i) for i, x in enumerate(call.values) if x is None]


def _gradients_by_operator(
    call: Call, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor | None
) -> Any:
    """_gradients() of saved tensors that hooks gave back with other strides, elsewhere, or as a subclass: the
    operator makes a plan for what it is given, and a subclass may dispatch it."""
    plan, layouts = call.plan, iter(call.plan.saved)
    moved = [x if x is None else _moved(x, next(layouts), plan) for x in saved]
    (q, k, v, out, lse), rest = moved[:5], moved[5:]
    fixed, captures = rest[: len(NOTHING)] or NOTHING, rest[len(NOTHING) :]
    problem = plan.problem
    options = problem.options.removesuffix(":shared_kv")  # K and V may have memory of their own now
    rng: Any = call.rng if problem.dropout_p else None
    if isinstance(rng, tuple):
        rng = torch.tensor([x - (x >> 63 << 64) for x in rng], device=plan.device)  # int64 of the same bits
    numbers = [float(x) for x in call.values if x is not None]
    lists = None if call.lists is None else call.lists.memory[1]
    grads = torch.ops.flashjit.attention_backward(
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        *fixed,
        rng,
        None,
        lists,
        captures,
        numbers,
        list(problem.names),
        options,
        problem.scale,
        float(problem.dropout_p),
        problem.max_seqlen_q,
        problem.max_seqlen_kv,
        problem.cached,
        problem.out_type,
        None,  # formats have no gradients
    )
    dqkv, others = grads[:3], grads[3:]
    if not rest:
        return (None, *dqkv)
    dsinks = None if fixed[4] is None else others.pop(0)
    return (None, *dqkv, *grads_of_fixed(dsinks), *_of_captures(call, others))


def _moved(tensor: Tensor, layout: Layout, plan: Plan) -> Tensor:
    """To the device and the type in which it was saved."""
    return tensor.to(plan.device if layout.device_index == plan.index else "cpu", layout.dtype)


def recording(
    plan: Plan, returns_lse: bool
) -> Callable[[Tensor, Tensor, Tensor, Fixed, tuple[Any, ...], TileLists | None], Any]:
    """record() of calls that differ in their tensors and lists alone, given Q, K, V, the others, the captures' values and lists."""
    shared = Call(plan, NOTHING, (), NO_RNG, None, returns_lse, None)

    def of_tensors(
        q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], lists: TileLists | None
    ) -> Any:
        if fixed is NOTHING and not values and lists is None:
            return record(shared, q, k, v)
        captured = [x for x in values if isinstance(x, Tensor)]
        others = () if fixed is NOTHING and not values else (*fixed, *captured)
        return record(Call(plan, fixed, values, NO_RNG, lists, returns_lse, None), q, k, v, *others)

    return of_tensors


# Function.apply without its search for functorch's wrappers, which is_watched() has ruled out.
record = super(torch.autograd.Function, _Attention).apply

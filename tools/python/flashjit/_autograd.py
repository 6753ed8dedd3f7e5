"""The eager path of autograd: what a call records, and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._call_types import NO_RNG, NOTHING, Fixed, Rng, grads_of_fixed
from ._front import FIXED, RECORDED, Calls, Recorder
from ._lists import TileLists
from ._plans import Plan
from ._tensors import Layout
from ._transforms import refuse_vectors


class Call:
    """What a call's passes need besides the tensors that autograd keeps.

    tools/torch/recorded.cpp calls forward() where the call's front has not launched it, and backward() where `front` has not,
    given what that found: None where it is to be kept."""

    __slots__ = (
        *("plan", "values", "rng", "lists", "built", "returns_lse", "row_max", "rounded"),
        *("is_plain", "calls", "front"),
    )

    def __init__(
        self,
        plan: Plan,
        values: tuple[Any, ...],
        rng: Rng,
        lists: TileLists | None,
        returns_lse: bool,
        row_max: Tensor | None,
        rounded: torch.dtype | None = None,
    ) -> None:
        self.row_max, self.rounded = row_max, rounded
        self.plan, self.rng, self.lists, self.returns_lse = plan, rng, lists, returns_lse
        self.values = tuple([None if isinstance(x, Tensor) else x for x in values])
        self.built = (None, None) if lists is None else lists.built
        self.is_plain = not (plan.has_out_mod or plan.shares_kv) and rng is NO_RNG and row_max is None
        self.calls = _backward_calls(plan) if self.is_plain and not values else None
        self.front = None if self.calls is None else self.calls.front

    def of_rest(self, rest: Sequence[Any]) -> tuple[Fixed, list[Any]]:
        """The fixed tensors and the captures' values."""
        given, captures = rest[: len(NOTHING)], iter(rest[len(NOTHING) :])
        fixed = Fixed(*given) if any([x is not None for x in given]) else NOTHING
        return fixed, [next(captures) if x is None else x for x in self.values]

    def forward(
        self, ctx: Any, recorder: Recorder | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> Any:
        """rest: where the call has more than Q, K, V, the fixed tensors or None, and the captured tensors. recorder: of a call that is new
        to attention()'s front."""
        plan = self.plan
        fixed, values = self.of_rest(rest)
        before_mod = plan.new_before_mod() if plan.has_out_mod else None
        out, lse = plan.forward(
            *(q, k, v, fixed, values, self.rng, True, self.built[0], self.row_max),
            before_mod=before_mod,
            recorder=recorder,
        )
        if recorder is not None:
            recorder.made = out, lse
        self.row_max = None  # nothing needs it now
        ctx.save_for_backward(q, k, v, out if before_mod is None else before_mod, lse, *rest)
        ctx.set_materialize_grads(False)
        ctx.call = self
        if self.rounded is not None:
            out = out.to(self.rounded)
        return (out, lse) if self.returns_lse else out

    def backward(self, found: Any, dout: Tensor | None, dlse: Tensor | None, *saved: Any) -> Any:
        """The gradients of what _Attention.forward() is given after ctx."""
        refuse_vectors(dout, dlse)
        if dout is not None and dout.is_neg():
            dout = dout.resolve_neg()
        if dlse is not None and dlse.is_neg():
            dlse = dlse.resolve_neg()
        if torch.is_grad_enabled():  # under create_graph the operator records what its gradients depend on
            return _gradients_by_operator(self, dout, dlse, *saved)
        return _gradients(self, found, dout, dlse, *saved)


def _backward_calls(plan: Plan) -> Calls:
    """What a front keeps of the plan's backward passes, which differ in their tensors alone."""
    if plan.backward_calls is None:
        plan.backward_calls = Calls.of_gradients("dout", ("q", "k", "v", "out", "lse", *FIXED))
    return plan.backward_calls


class _Attention(torch.autograd.Function):
    """The eager path: no dispatcher between the call and the launch."""

    @staticmethod
    def forward(ctx: Any, call: Call, made: Any, *tensors: Any) -> Any:
        """made: (O, LSE) that attention()'s front launched, or forward()'s recorder."""
        return call.forward(ctx, made, *tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        return ctx.call.backward(NotImplemented, dout, dlse, *ctx.saved_tensors)


if RECORDED is not None:
    _Attention.forward = staticmethod(RECORDED[0])  # type: ignore[method-assign]
    # In place of a call of backward(), which compiled autograd takes, and which has to be Python's for that.
    _Attention._backward_cls.apply = lambda ctx, *grads: RECORDED[1](ctx, *grads)  # type: ignore[attr-defined]

_GIVEN = frozenset({Tensor, type(None)})  # of a gradient: no subclass


def _gradients(
    call: Call,
    found: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> Any:
    """The gradients of what _Attention.forward() is given, in its order."""
    recorder, lists = None, call.built[1]
    if found is None and call.calls is not None:
        recorder = Recorder(call.calls, (dout, q, k, v, out, lse, *(rest or NOTHING)[: len(FIXED)], lists))
    if (
        type(dout) not in _GIVEN
        or type(dlse) not in _GIVEN
        or not call.plan.reads_saved(q, k, v, out, lse, rest)
    ):
        return _gradients_by_operator(call, dout, dlse, q, k, v, out, lse, *rest)
    fixed, values = call.of_rest(rest)
    grads, dsinks, dvalues = call.plan.backward(
        dout, dlse, q, k, v, out, lse, fixed, values, call.rng, lists, recorder
    )
    if recorder is not None:
        recorder.keep(tuple(grads))
    if not rest:
        return (None, None, *grads)
    return (None, None, *grads, *grads_of_fixed(dsinks), *_of_captures(call, dvalues))


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
        return (None, None, *dqkv)
    dsinks = None if fixed[4] is None else others.pop(0)
    return (None, None, *dqkv, *grads_of_fixed(dsinks), *_of_captures(call, others))


def _moved(tensor: Tensor, layout: Layout, plan: Plan) -> Tensor:
    """To the device and the type in which it was saved."""
    return tensor.to(plan.device if layout.device_index == plan.index else "cpu", layout.dtype)


# Function.apply without its search for functorch's wrappers, which is_watched() has ruled out.
record = super(torch.autograd.Function, _Attention).apply


def recording(call: Call) -> Callable[..., Any]:
    """record() of calls that differ from this one in their tensors and lists alone, given what was made, lists where it has some, and
    the tensors."""
    if call.lists is None:
        return functools.partial(record, call)
    plan, values, returns_lse = call.plan, call.values, call.returns_lse
    return lambda made, lists, *tensors: record(
        Call(plan, values, NO_RNG, lists, returns_lse, None), made, *tensors
    )

"""flashjit::attention_forward, attention_backward and their derivatives: what torch.compile, export and tensor subclasses see.

Tile lists are the memory of a TileLists: by it, and not by an object, the operators know them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._call_types import (
    NO_RNG,
    NOTHING,
    Fixed,
    Problem,
    Rng,
    Stored,
    contiguous,
    grads_of_fixed,
    names_with_grad,
    out_dtype_of,
)
from ._fakes import register_fake
from ._formats import refuse_formats_in_transforms
from ._kept_plans import plan_of
from ._lists import built_at
from ._plans import Plan
from ._tangents import launch_backward_jvp, launch_jvp
from ._tensors import aligned, dense_strides, describe, laid_out, readable, under_transform
from ._transforms import gradient_of_operator, through_transforms
from .errors import InvalidArgument

_FIXED_SCHEMA = (
    "Tensor? block_map, Tensor? kv_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? sinks, "
    "Tensor? indices, Tensor? topk_length, Tensor? page_table, Tensor? prefix_length, Tensor? page_starts, Tensor? k_scale, Tensor? v_scale, Tensor? q_scale, "
    "Tensor? k_block_scale, Tensor? v_block_scale, Tensor? q_rope, "
)
_PROBLEM_SCHEMA = (
    "Tensor? rng, Tensor? lists_forward, Tensor? lists_backward, Tensor[] captures, float[] numbers, "
    "str[] names, str options, float? scale, float dropout_p, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "bool cached, str out_type, int? dim_v"
)
_FIXED = len(NOTHING)
torch.library.define(
    "flashjit::attention_forward",
    f"(Tensor q, Tensor k, Tensor v, {_FIXED_SCHEMA}{_PROBLEM_SCHEMA}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "flashjit::attention_backward",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_FIXED_SCHEMA}{_PROBLEM_SCHEMA}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "flashjit::attention_jvp",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_tangent, Tensor? k_tangent, Tensor? v_tangent, Tensor? sinks_tangent, "
    f"Tensor[] capture_tangents, str[] with_tangent, {_FIXED_SCHEMA}{_PROBLEM_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "flashjit::attention_backward_jvp",
    "(Tensor? dout, Tensor? dlse, Tensor? dout_tangent, Tensor? dlse_tangent, Tensor q, Tensor k, Tensor v, Tensor lse, "
    "Tensor? q_tangent, Tensor? k_tangent, Tensor? v_tangent, Tensor? sinks_tangent, Tensor[] capture_tangents, "
    f"str[] with_tangent, {_FIXED_SCHEMA}{_PROBLEM_SCHEMA}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "flashjit::draw",
    "(Tensor like) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)


def through_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fixed: Fixed,
    values: tuple[Any, ...],
    problem: Problem,
    lists: tuple[Any, Any],
    has_tangents: bool = False,
) -> tuple[Tensor, Tensor]:
    """lists: the memory of the forward pass's lists, and of the backward pass's, or None. has_tangents: whether some tensor has
    one, of torch.autograd.forward_ad."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    rng = _draw_once(q, (q, k, v, fixed.sinks, *tensors)) if problem.dropout_p else None
    arguments = operator_arguments(fixed, values, problem, rng, lists)
    if has_tangents or under_transform():
        if problem.stored is not None:
            refuse_formats_in_transforms()
        return through_transforms(q, k, v, arguments)
    return torch.ops.flashjit.attention_forward(q, k, v, *arguments)


def operator_arguments(
    fixed: Fixed,
    values: tuple[Any, ...],
    problem: Problem,
    rng: Tensor | None,
    lists: tuple[Any, Any] = (None, None),
) -> tuple[Any, ...]:
    """Arguments of both operators after their first tensors."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers = [float(value) for value in values if not isinstance(value, Tensor)]
    return (
        *fixed,
        rng,
        *lists,
        tensors,
        numbers,
        list(problem.names),
        problem.options,
        problem.scale,
        float(problem.dropout_p),
        problem.max_seqlen_q,
        problem.max_seqlen_kv,
        problem.cached,
        problem.out_type,
        None if problem.stored is None else problem.stored.dim_v,
    )


def draw(like: Tensor) -> Tensor:
    """Seed and offset of a dropout mask, from PyTorch's generator of the device, where the kernels read them."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=like.device)


def _draw_once(q: Tensor, inputs: Sequence[Tensor | None]) -> Tensor:
    """draw(), marked for torch.compile: the backward pass of `inputs`, if any, needs the same numbers. In a checkpoint its
    partitioner then replays the generator where it computes a forward pass again; elsewhere it would draw anew. A graph without a
    backward pass can have no such checkpoint."""
    if (
        torch.compiler.is_compiling()
        and not _is_exporting()
        and torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in inputs)
    ):
        return checkpoint(_draw_by_operator, q, use_reentrant=False)
    return draw(q)


def _draw_by_operator(q: Tensor) -> Tensor:
    # Inductor has its own numbers for PyTorch's operators, and may not replay them. PyTorch 2.11 makes one of two
    # calls with the same tensor, but not of two empty tensors.
    return torch.ops.flashjit.draw(torch.empty(0, device=q.device))


def _is_exporting() -> bool:
    # torch.compiler.is_exporting() is true under torch.compile, too, in PyTorch 2.10 and 2.11.
    return getattr(torch.compiler, "_is_exporting_flag", False)


class _Unpacked(NamedTuple):
    plan: Plan
    qkv: tuple[Tensor, Tensor, Tensor]
    fixed: Fixed
    values: tuple[Any, ...]
    rng: Rng
    lists: Sequence[Any]  # the memory of both passes'


def _unpack(q: Tensor, k: Tensor, v: Tensor, arguments: Sequence[Any]) -> _Unpacked:
    """An operator's arguments, and their plan."""
    given, (rng, *lists), rest = arguments[:_FIXED], arguments[_FIXED : _FIXED + 3], arguments[_FIXED + 3 :]
    captures, numbers, names, options, scale, dropout_p, max_q, max_kv, cached, out_type, dim_v = rest
    fixed = NOTHING
    if any(x is not None for x in given):
        fixed = contiguous(Fixed(*[x if x is None else aligned(x) for x in given]))
    values = (*map(aligned, captures), *numbers)
    stored = None if dim_v is None else Stored(dim_v)
    q = readable(q, "q")
    if stored is None:
        k, v = readable(k, "k"), readable(v, "v")
    plan = plan_of(
        q,
        k,
        v,
        fixed,
        values,
        Problem(options, scale, dropout_p, max_q, max_kv, tuple(names), cached, out_type, stored=stored),
    )
    if rng is None:
        rng = NO_RNG
    elif rng.data_ptr() % 16:
        rng = rng.clone()
    return _Unpacked(plan, (q, k, v), fixed, values, rng, lists)


@torch.library.impl("flashjit::draw", ("cuda", "cpu"))
def _operator_draw(like: Tensor) -> Tensor:
    return draw(like)


@torch.library.impl("flashjit::attention_forward", ("cuda", "cpu"))
def _operator_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    plan, qkv, fixed, values, rng, lists = _unpack(q, k, v, arguments)
    return plan.forward(*qkv, fixed, values, rng, True, built_at(lists[0]))


@torch.library.impl("flashjit::attention_backward", ("cuda", "cpu"))
def _operator_backward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    plan, qkv, fixed, values, rng, lists = _unpack(q, k, v, arguments)
    for name, x, size in (("out", out, plan.out_size), ("lse", lse, plan.lse_size)):
        if tuple(x.shape) != size:
            raise InvalidArgument(
                f"{name} is {describe(x)} in the backward pass, and was {list(size)}: hooks of "
                "saved tensors must give back the same sizes."
            )
    if plan.has_out_mod:  # an operator saves what it returns, not O before that: which is computed again
        out = plan.new_before_mod()
        plan.forward(*qkv, fixed, values, rng, False, built_at(lists[0]), before_mod=out)
    else:
        out = laid_out(out.to(plan.out_dtype), plan.out_size, plan.out_stride)
    lse = aligned(lse.to(torch.float32).contiguous())
    grads, dsinks, dvalues = plan.backward(dout, dlse, *qkv, out, lse, fixed, values, rng, built_at(lists[1]))
    return [*grads, *([] if dsinks is None else [dsinks]), *dvalues]


@torch.library.impl("flashjit::attention_jvp", ("cuda", "cpu"))
def _operator_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Any,
    dk: Any,
    dv: Any,
    dsinks: Any,
    dcaptures: Sequence[Tensor],
    with_tangent: Sequence[str],
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan, qkv, fixed, values, rng, _ = _unpack(q, k, v, arguments)
    by_name = dict(zip(with_tangent, dcaptures))
    return launch_jvp(plan, qkv, (dq, dk, dv), dsinks, by_name, fixed, values, rng)


@torch.library.impl("flashjit::attention_backward_jvp", ("cuda", "cpu"))
def _operator_backward_jvp(
    dout: Any,
    dlse: Any,
    dout_tangent: Any,
    dlse_tangent: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dq: Any,
    dk: Any,
    dv: Any,
    dsinks: Any,
    dcaptures: Sequence[Tensor],
    with_tangent: Sequence[str],
    *arguments: Any,
) -> list[Tensor]:
    plan, qkv, fixed, values, rng, _ = _unpack(q, k, v, arguments)
    lse = aligned(lse.to(torch.float32).contiguous())
    by_name = dict(zip(with_tangent, dcaptures))
    tangents = (dout_tangent, dq, dk, dv)
    grads, of_sinks, of_captures = launch_backward_jvp(
        plan, dout, dlse, qkv, lse, tangents, dlse_tangent, dsinks, by_name, fixed, values, rng
    )
    return [*grads, *([] if of_sinks is None else [of_sinks]), *of_captures]


@register_fake("flashjit::attention_backward_jvp")
def _fake_backward_jvp(*arguments: Any) -> list[Tensor]:
    q, k, v, lse = arguments[4:8]
    return _fake_backward(None, None, q, k, v, lse, lse, *arguments[14:])


@register_fake("flashjit::attention_jvp")
def _fake_jvp(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    out, lse = _fake_forward(q, k, v, *arguments[6:])
    return out, lse, torch.empty_like(out), torch.empty_like(lse)


@register_fake("flashjit::draw")
def _fake_draw(like: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=like.device)


@register_fake("flashjit::attention_forward")
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    options, *_, out_type, dim_v = arguments[_FIXED + 6 :]
    size = (*q.shape[:3], v.shape[3] if dim_v is None else dim_v)
    out = torch.empty_strided(
        size, dense_strides(size, q.stride()), dtype=out_dtype_of(options, out_type, q.dtype), device=q.device
    )
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@register_fake("flashjit::attention_backward")
def _fake_backward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    grads = [
        torch.empty_strided(t.shape, dense_strides(t.shape, t.stride()), dtype=t.dtype, device=t.device)
        for t in (q, k, v)
    ]
    sinks, (captures, _, names, options) = arguments[4], arguments[_FIXED + 3 : _FIXED + 7]
    if sinks is not None:
        grads.append(torch.empty(sinks.shape, dtype=torch.float32, device=q.device))
    with_grad = names_with_grad(options)
    grads += [
        torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for name, t in zip(names, captures)
        if name in with_grad
    ]
    return grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    fixed, (rng, _, lists_backward, captures) = arguments[:_FIXED], arguments[_FIXED : _FIXED + 4]
    ctx.save_for_backward(q, k, v, *output, *fixed, rng, lists_backward, *captures)
    ctx.rest = arguments[_FIXED + 4 :]
    ctx.set_materialize_grads(False)


def _without_gradients(rest: Sequence[Any]) -> tuple[Any, ...]:
    """Gradients for the arguments after the tensors: none. PyTorch wants a list for a list without elements, and None for one of numbers or
    texts."""
    numbers, names, *others = rest
    return (None if numbers else [], None if names else [], *[None] * len(others))


def _operator_gradient(ctx: Any, dout: Any, dlse: Any) -> Any:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    fixed, (rng, lists_backward), captures = (
        tensors[:_FIXED],
        tensors[_FIXED : _FIXED + 2],
        tensors[_FIXED + 2 :],
    )
    _, names, options, *_ = ctx.rest
    rest = _without_gradients(ctx.rest)
    if dout is None and dlse is None:
        return (*[None] * (_FIXED + 6), [None] * len(captures), *rest)
    dq, dk, dv, *others = torch.ops.flashjit.attention_backward(
        dout, dlse, q, k, v, out, lse, *fixed, rng, None, lists_backward, captures, *ctx.rest
    )
    dsinks = others.pop(0) if fixed[4] is not None else None
    with_grad = names_with_grad(options)
    dcaptures = [others.pop(0) if name in with_grad else None for name, _ in zip(names, captures)]
    of_fixed = grads_of_fixed(dsinks)  # the others have no gradients
    return dq, dk, dv, *of_fixed, None, None, None, dcaptures, *rest


torch.library.register_autograd(
    "flashjit::attention_forward", _operator_gradient, setup_context=_setup_context
)


def _setup_context_of_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    own, fixed = inputs[:7], inputs[7 : 7 + _FIXED]
    rng, _, _, captures = inputs[7 + _FIXED : 11 + _FIXED]
    ctx.save_for_backward(*own, *fixed, rng, *captures)
    ctx.rest = inputs[11 + _FIXED :]
    ctx.set_materialize_grads(False)


def _gradient_of_backward(ctx: Any, tangents: Sequence[Any]) -> Any:
    grads = gradient_of_operator(ctx, tangents)
    first = 8 + _FIXED  # of the captures
    return (*grads[:first], None, None, list(grads[first:]), *_without_gradients(ctx.rest))


torch.library.register_autograd(
    "flashjit::attention_backward", _gradient_of_backward, setup_context=_setup_context_of_backward
)

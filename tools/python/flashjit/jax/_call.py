"""Attention as primitives of JAX: their shapes, batching, sharding and lowering."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from .._library import spec_handle
from .._without_tangent import OF_JAX, refuse_without_tangent
from . import _handler
from ._problem import (
    TANGENT,
    Derivative,
    Gradients,
    GradientTangents,
    Problem,
    differentiated,
    kind_of,
    operand_names,
    result_names,
)
from ._sharding import KEEP_CALLS, partitioned, requires_devices


def alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, made to vary over all mesh axes of a shard_map that one of them varies over."""
    axes = [_varying(array) for array in arrays]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(array, tuple(sorted(union - own)), to="varying") if union - own else array
        for array, own in zip(arrays, axes)
    ]


def _varying(array: Any) -> frozenset[str]:
    aval = jax.typeof(array)
    kind = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying


# --- primitives --------------------------------------------------------------------------------------------------------


def _shapes(*avals: Any, problem: Problem, derivative: Derivative = None) -> list[Any]:
    """Shapes of the results. LSE has the dimensions of Q, so that it has its sharding, too."""
    by_name = dict(zip(operand_names(problem, derivative), avals))
    q, v = by_name["q"], by_name["v"]
    if isinstance(derivative, tuple):
        return [by_name[name] for name in problem.saved()]
    if derivative is None:
        of_lse = q.update(shape=(*q.shape[:3], 1), dtype=np.dtype("float32"))
        out = q.update(shape=(*q.shape[:3], problem.columns_of_out(v)), dtype=problem.out_type(q))
        sizes, scale_type = problem.out_block_scale(q, v)
        of_rows = q.update(shape=sizes, dtype=scale_type)
        return [{"lse": of_lse, "out_block_scale": of_rows}.get(name, out) for name in problem.outputs()]
    made = []
    for name in result_names(problem, derivative):
        aval = by_name[name[1:]]
        made.append(aval if name in ("dq", "dk", "dv") else aval.update(dtype=np.dtype("float32")))
    return made


def _primitive(name: str) -> Any:
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_shapes)
    primitive.def_impl(lambda *arrays, **params: _compiled(primitive, tuple(params.items()))(*arrays))
    return primitive


@functools.lru_cache(KEEP_CALLS)
def _compiled(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)))


forward_p = _primitive("flashjit_forward")
backward_p = _primitive("flashjit_backward")
#: Tangents of O and LSE, linear in those that it is given. It reads O and LSE for its transpose alone.
tangent_p = _primitive("flashjit_tangent")
#: Tangents of what backward_p makes, linear in those that it is given. It reads O for its transpose alone.
backward_tangent_p = _primitive("flashjit_backward_tangent")
#: The same of one device's arrays, below what XLA partitions.
_shard_forward_p = _primitive("flashjit_forward_shard")
_shard_backward_p = _primitive("flashjit_backward_shard")
_shard_tangent_p = _primitive("flashjit_tangent_shard")
_shard_backward_tangent_p = _primitive("flashjit_backward_tangent_shard")


# --- vmap --------------------------------------------------------------------------------------------------------------


def _batch_forward(arrays: Any, axes: Any, *, problem: Problem) -> Any:
    return fold_over(forward_p, operand_names(problem, None), arrays, axes, (), problem)


def _batch_tangent(arrays: Any, axes: Any, *, problem: Problem, derivative: tuple[str, ...]) -> Any:
    names = operand_names(problem, derivative)
    grads = differentiated(problem, derivative)
    return fold_over(tangent_p, names, arrays, axes, grads, problem, derivative=derivative)


def fold_over(
    primitive: Any,
    names: Sequence[str],
    arrays: Any,
    axes: Any,
    grads: tuple[bool, ...],
    problem: Problem,
    **params: Any,
) -> Any:
    """A batching rule of a primitive whose results are like O and LSE. names: of its arrays; grads: the captures that have tangents."""
    if _must_repeat(problem, names, axes):
        return one_after_another(primitive, arrays, axes, problem=problem, **params)
    problem, folded = _fold(problem, names, arrays, axes, _axis_size(arrays, axes), grads)
    results = primitive.bind(*folded, problem=problem, **params)
    return [_unfolded(x, problem) for x in results], [0] * len(results)


def _batch_backward(arrays: Any, axes: Any, *, problem: Problem, derivative: Gradients) -> Any:
    size = _axis_size(arrays, axes)
    names = operand_names(problem, derivative)
    if _must_repeat(problem, names, axes) or derivative.sinks and problem.keeps_before_mod:
        return one_after_another(backward_p, arrays, axes, problem=problem, derivative=derivative)
    problem, folded = _fold(problem, names, arrays, axes, size, derivative.captures)
    results = dict.fromkeys(result_names(problem, derivative))
    made = dataclasses.replace(derivative, sinks=False)
    results.update(
        zip(result_names(problem, made), backward_p.bind(*folded, problem=problem, derivative=made))
    )
    for name in ("dq", "dk", "dv"):
        results[name] = _unfolded(results[name], problem)
    if derivative.sinks:
        results["dsinks"] = _sink_gradients(dict(zip(names, folded)), problem)
    return list(results.values()), [0] * len(results)


def _batch_backward_tangent(arrays: Any, axes: Any, *, problem: Problem, derivative: GradientTangents) -> Any:
    size = _axis_size(arrays, axes)
    names = operand_names(problem, derivative)
    if _must_repeat(problem, names, axes) or derivative.gradients.sinks:
        return one_after_another(backward_tangent_p, arrays, axes, problem=problem, derivative=derivative)
    problem, folded = _fold(problem, names, arrays, axes, size, derivative.gradients.captures)
    results = dict(
        zip(
            result_names(problem, derivative),
            backward_tangent_p.bind(*folded, problem=problem, derivative=derivative),
        )
    )
    results.update({name: _unfolded(results[name], problem) for name in ("dq", "dk", "dv")})
    return list(results.values()), [0] * len(results)


def _axis_size(arrays: Any, axes: Any) -> int:
    return next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)


def _must_repeat(problem: Problem, names: Sequence[str], axes: Any) -> bool:
    """Whether one call cannot do what many do: sinks have no batch, a dropout mask is one of a whole batch, a cache is one, as
    are packed sequences, and which dimensions scales have is not known here."""
    mapped = {name for name, axis in zip(names, axes) if axis is not None}
    of_cache = problem.pages is not None and (bool({"k", "v"} & mapped) or "page_table" not in names)
    packed = problem.longest is not None
    return (
        "rng" in names
        or bool(problem.codes)
        or packed
        or bool({"sinks", f"sinks{TANGENT}"} & mapped)
        or of_cache
    )


def one_after_another(primitive: Any, arrays: Any, axes: Any, **params: Any) -> Any:
    """A batching rule: calls in a loop."""
    mapped = [axis is not None for axis in axes]
    front = [jnp.moveaxis(x, axis, 0) if on else x for x, axis, on in zip(arrays, axes, mapped)]

    def one(entries: list[Any]) -> list[Any]:
        rest = iter(entries)
        return primitive.bind(*alike([next(rest) if on else x for x, on in zip(front, mapped)]), **params)

    results = jax.lax.map(one, [x for x, on in zip(front, mapped) if on])
    return results, [0] * len(results)


def _fold(
    problem: Problem, names: Sequence[str], arrays: Any, axes: Any, size: int, grads: tuple[bool, ...]
) -> tuple[Problem, list[Any]]:
    """The mapped axis as part of the batch. A capture keeps it as a dimension of its own, also where it is not mapped and its
    gradient is one of each entry, as does a capture's tangent."""
    captures = list(problem.program.captures)
    folded = []
    for name, array, axis in zip(names, arrays, axes):
        mapped = axis is not None
        front = jnp.moveaxis(array, axis, 0) if mapped else array
        plain = name.removesuffix(TANGENT)
        number = int(plain[1:]) if re.fullmatch(r"c\d+", plain) else None
        in_cache = name in ("k", "v") and problem.pages is not None
        if (
            plain == "sinks"
            or in_cache
            or number is not None
            and not mapped
            and not (grads and grads[number])
        ):
            folded.append(front)
            continue
        front = front if mapped else jnp.broadcast_to(front, (size, *front.shape))
        if number is None:
            folded.append(front.reshape(size * front.shape[1], *front.shape[2:]))
            continue
        folded.append(front)
        if plain == name:
            capture = captures[number]
            captures[number] = dataclasses.replace(capture, folds=(len(problem.folds), *capture.folds))
    program = dataclasses.replace(problem.program, captures=tuple(captures))
    return dataclasses.replace(problem, program=program, folds=(*problem.folds, size)), alike(folded)


def _unfolded(array: Any, problem: Problem) -> Any:
    """With the axis that was folded last in front again."""
    *others, size = problem.folds
    return array.reshape(size, math.prod(others) * problem.batch, *array.shape[1:])


def _sink_gradients(arrays: dict[str, Any], problem: Problem) -> Any:
    """[size, heads], of each entry of the mapped axis."""
    product = arrays["out"].astype(jnp.float32) * arrays["dout"].astype(jnp.float32)
    delta = product.sum(-1, keepdims=True)  # like LSE
    if "dlse" in arrays:
        delta = delta - arrays["dlse"]
    heads, length = (2, 1) if problem.layout == "BTNH" else (1, 2)
    sinks = jnp.expand_dims(arrays["sinks"], [d for d in range(4) if d != heads])
    weight = jnp.exp(sinks - arrays["lse"])
    return _unfolded(-weight * delta, problem).sum((1, length + 1, 4))


batching.primitive_batchers[forward_p] = _batch_forward
batching.primitive_batchers[tangent_p] = _batch_tangent
batching.primitive_batchers[backward_p] = _batch_backward
batching.primitive_batchers[backward_tangent_p] = _batch_backward_tangent


# --- lowering ----------------------------------------------------------------------------------------------------------


def _lower_partitioned(shard: Any) -> Any:
    def call(*arrays: Any, problem: Problem, derivative: Derivative = None) -> Any:
        return partitioned(shard, problem, derivative)(*arrays)

    return mlir.lower_fun(call, multiple_results=True)


def _lower_shard(
    ctx: Any, *operands: Any, problem: Problem, derivative: Derivative = None, on_gpu: bool
) -> Any:
    """As a call of the handler, which clears gradients that are added up."""
    names, results = operand_names(problem, derivative), result_names(problem, derivative)
    avals = dict(zip(names, ctx.avals_in))
    spec = problem.spec(avals["q"], avals["v"], differentiated(problem, derivative))
    kind = kind_of(derivative)
    if kind.endswith("tangent"):
        refuse_without_tangent(_handler.PASSES[kind], spec, OF_JAX)
    else:
        spec_handle(spec)
    avals_out, count = list(ctx.avals_out), len(results)
    longest = problem.longest or (0, 0)
    if kind == "tangent":  # which makes O and LSE again
        made_again = problem.saved()
        given = [(name, x) for name, x in zip(names, operands) if name not in made_again]
        names, operands = [name for name, _ in given], tuple(x for _, x in given)
        avals_out += [avals[name] for name in made_again]
        results = [*results, *made_again]
    if on_gpu:
        bytes_needed = _handler.workspace_bytes(spec, _shape_of(avals, problem), kind)
        avals_out.append(jax.core.ShapedArray((bytes_needed,), np.dtype("uint8")))
        results = [*results, "workspace"]
    avals_in = [avals[name] for name in names]
    lowering = jax.ffi.ffi_lowering(
        _handler.TARGETS[kind],
        operand_layouts=_layouts(names, avals_in, problem),
        result_layouts=_layouts(results, avals_out, problem),
    )
    made = lowering(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *operands,
        spec=spec,
        layout=problem.layout,
        args=" ".join(names),
        results=" ".join(results),
        scale=np.float32(problem.scale),
        dropout=np.float32(problem.dropout),
        max_seqlen_q=np.int64(longest[0]),
        max_seqlen_kv=np.int64(longest[1]),
    )
    return made[:count]


def _shape_of(avals: dict[str, Any], problem: Problem) -> tuple[int, ...]:
    q, k = avals["q"].shape, avals["k"].shape
    heads, length = (2, 1) if problem.layout == "BTNH" else (1, 2)
    if problem.longest:
        return (problem.batch, q[heads], k[heads], *problem.longest)
    columns = avals["page_table"].shape[1] if problem.pages else 1
    return (q[0], q[heads], k[heads], q[length], k[length] * columns)


def _layouts(names: Sequence[str], avals: Sequence[Any], problem: Problem) -> list[tuple[int, ...]]:
    """From the last dimension to the first, as they lie in memory: LSE is always batch, heads, length."""
    turned = ("lse", "dlse", f"lse{TANGENT}", f"dlse{TANGENT}") if problem.layout == "BTNH" else ()
    return [
        (3, 1, 2, 0) if name in turned else tuple(reversed(range(len(aval.shape))))
        for name, aval in zip(names, avals)
    ]


for _outer, _shard in (
    (forward_p, _shard_forward_p),
    (backward_p, _shard_backward_p),
    (tangent_p, _shard_tangent_p),
    (backward_tangent_p, _shard_backward_tangent_p),
):
    requires_devices(_outer)
    mlir.register_lowering(_outer, _lower_partitioned(_shard))
    mlir.register_lowering(_shard, functools.partial(_lower_shard, on_gpu=False), platform="cpu")
    mlir.register_lowering(_shard, functools.partial(_lower_shard, on_gpu=True), platform="cuda")

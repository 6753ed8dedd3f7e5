"""Attention as primitives of JAX: their shapes, derivatives, batching, sharding and lowering."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from .._library import spec_handle
from ..errors import Unsupported
from . import _handler
from ._problem import Gradients, Problem, operand_names, result_names
from ._sharding import KEEP_CALLS, partitioned, requires_devices

# --- the differentiable call -------------------------------------------------------------------------------------------


def attend(problem: Problem, arrays: Sequence[Any]) -> tuple[Any, Any]:
    """O, and LSE with a last dimension of 1; arrays are those of operand_names()."""
    try:
        return _attend(problem, tuple(arrays))
    except NotImplementedError as error:  # of shard_map outside of jit, which knows no symbolic zeros
        if isinstance(error, Unsupported):
            raise
        return _attend_with_all_gradients(problem, tuple(arrays))


def _forward(problem: Problem, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    return tuple(forward_p.bind(*alike(arrays), problem=problem))


def _forward_of_primals(problem: Problem, primals: tuple[Any, ...]) -> tuple[Any, Any]:
    """With what each array's gradient is wanted for: structure says so, as residuals are arrays."""
    flags = tuple(None if primal.perturbed else () for primal in primals)
    return _forward_of_arrays(problem, tuple(primal.value for primal in primals), flags)


def _forward_of_arrays(problem: Problem, arrays: tuple[Any, ...], flags: Any = None) -> tuple[Any, Any]:
    out, lse = _forward(problem, arrays)
    return (out, lse), (arrays, out, lse, (None,) * len(arrays) if flags is None else flags)


def _backward(problem: Problem, residuals: Any, cotangents: Any) -> Any:
    if problem.pages is not None:
        raise Unsupported(
            "attention from a cache has no gradients, which need K and V as arrays: call it outside of jax.grad, or apply "
            "jax.lax.stop_gradient to its arguments."
        )
    arrays, out, lse, flags = residuals
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    names = operand_names(problem, None)
    wanted = {
        name
        for name, flag, array in zip(names, flags, arrays)
        if flag is None and jnp.issubdtype(array.dtype, jnp.floating)
    }
    captures = problem.program.captures
    gradients = Gradients(
        dlse is not None,
        "sinks" in wanted,
        tuple(f"c{i}" in wanted and captures[i].in_score for i in range(len(captures))),
    )
    if dout is None:
        dout = jnp.zeros_like(out)
    given = [*arrays[:3], out, lse, dout, *([] if dlse is None else [dlse]), *arrays[3:]]
    made = backward_p.bind(*alike(given), problem=problem, gradients=gradients)
    by_name = dict(zip(result_names(problem, gradients), made))
    return (tuple(_as_type_of(by_name.get(f"d{name}"), array) for name, array in zip(names, arrays)),)


def _as_type_of(gradient: Any, array: Any) -> Any:
    return None if gradient is None else gradient.astype(array.dtype)


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_attend.defvjp(_forward_of_primals, _backward, symbolic_zeros=True)
_attend_with_all_gradients = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_attend_with_all_gradients.defvjp(_forward_of_arrays, _backward)


def alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, all of which vary over the mesh axes of a shard_map over which one does."""
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


def _shapes(*avals: Any, problem: Problem, gradients: Gradients | None = None) -> list[Any]:
    """Of the results. LSE has the dimensions of Q, so that it has its sharding, too."""
    by_name = dict(zip(operand_names(problem, gradients), avals))
    q, v = by_name["q"], by_name["v"]
    if gradients is None:
        of_lse = q.update(shape=(*q.shape[:3], 1), dtype=np.dtype("float32"))
        return [q.update(shape=(*q.shape[:3], v.shape[3])), of_lse]
    made = []
    for name in result_names(problem, gradients):
        aval = by_name[name[1:]]
        made.append(aval if name in ("dq", "dk", "dv") else aval.update(dtype=np.dtype("float32")))
    return made


def _primitive(name: str) -> Any:
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_shapes)
    primitive.def_impl(lambda *arrays, **params: _compiled(primitive, tuple(params.items()))(*arrays))
    ad.primitive_jvps[primitive] = _refuse_derivative
    return primitive


@functools.lru_cache(KEEP_CALLS)
def _compiled(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)))


def _refuse_derivative(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "flashjit.jax.attention has first derivatives in reverse mode alone, by jax.grad and jax.vjp: instead of jax.jvp, "
        "jax.jacfwd, jax.hessian or a gradient of a gradient apply jax.lax.stop_gradient to what is differentiated twice, "
        "or compute this term with jax.nn.dot_product_attention."
    )


forward_p = _primitive("flashjit_forward")
backward_p = _primitive("flashjit_backward")
#: The same of one device's arrays, below what XLA partitions.
_shard_forward_p = _primitive("flashjit_forward_shard")
_shard_backward_p = _primitive("flashjit_backward_shard")


# --- vmap --------------------------------------------------------------------------------------------------------------


def _batch_forward(arrays: Any, axes: Any, *, problem: Problem) -> Any:
    size = _axis_size(arrays, axes)
    names = operand_names(problem, None)
    if _must_repeat(problem, names, axes):
        return one_after_another(forward_p, arrays, axes, problem=problem)
    problem, folded = _fold(problem, names, arrays, axes, size, ())
    results = forward_p.bind(*folded, problem=problem)
    return [_unfolded(x, size) for x in results], [0, 0]


def _batch_backward(arrays: Any, axes: Any, *, problem: Problem, gradients: Gradients) -> Any:
    size = _axis_size(arrays, axes)
    names = operand_names(problem, gradients)
    if _must_repeat(problem, names, axes):
        return one_after_another(backward_p, arrays, axes, problem=problem, gradients=gradients)
    problem, folded = _fold(problem, names, arrays, axes, size, gradients.captures)
    results = dict.fromkeys(result_names(problem, gradients))
    made = dataclasses.replace(gradients, sinks=False)
    results.update(
        zip(result_names(problem, made), backward_p.bind(*folded, problem=problem, gradients=made))
    )
    for name in ("dq", "dk", "dv"):
        results[name] = _unfolded(results[name], size)
    if gradients.sinks:
        results["dsinks"] = _sink_gradients(dict(zip(names, folded)), problem, size)
    return list(results.values()), [0] * len(results)


def _axis_size(arrays: Any, axes: Any) -> int:
    return next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)


def _must_repeat(problem: Problem, names: Sequence[str], axes: Any) -> bool:
    """Whether one call cannot do what many do: sinks have no batch, a dropout mask is one of a whole batch, and a cache is one."""
    mapped = {name for name, axis in zip(names, axes) if axis is not None}
    of_cache = problem.pages is not None and (bool({"k", "v"} & mapped) or "page_table" not in names)
    return "rng" in names or "sinks" in mapped or of_cache


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
    gradient is one of each entry."""
    captures = list(problem.program.captures)
    folded = []
    for name, array, axis in zip(names, arrays, axes):
        mapped = axis is not None
        front = jnp.moveaxis(array, axis, 0) if mapped else array
        number = int(name[1:]) if re.fullmatch(r"c\d+", name) else None
        in_cache = name in ("k", "v") and problem.pages is not None
        if name == "sinks" or in_cache or number is not None and not mapped and not (grads and grads[number]):
            folded.append(front)
            continue
        front = front if mapped else jnp.broadcast_to(front, (size, *front.shape))
        if number is None:
            folded.append(front.reshape(size * front.shape[1], *front.shape[2:]))
        else:
            capture = captures[number]
            captures[number] = dataclasses.replace(capture, folds=(len(problem.folds), *capture.folds))
            folded.append(front)
    program = dataclasses.replace(problem.program, captures=tuple(captures))
    return dataclasses.replace(problem, program=program, folds=(*problem.folds, size)), alike(folded)


def _unfolded(array: Any, size: int) -> Any:
    return array.reshape(size, array.shape[0] // size, *array.shape[1:])


def _sink_gradients(arrays: dict[str, Any], problem: Problem, size: int) -> Any:
    """[size, heads], of each entry of the mapped axis."""
    product = arrays["out"].astype(jnp.float32) * arrays["dout"].astype(jnp.float32)
    delta = product.sum(-1, keepdims=True)  # like LSE
    if "dlse" in arrays:
        delta = delta - arrays["dlse"]
    heads, length = (2, 1) if problem.layout == "BTNH" else (1, 2)
    sinks = jnp.expand_dims(arrays["sinks"], [d for d in range(4) if d != heads])
    weight = jnp.exp(sinks - arrays["lse"])
    return _unfolded(-weight * delta, size).sum((1, length + 1, 4))


batching.primitive_batchers[forward_p] = _batch_forward
batching.primitive_batchers[backward_p] = _batch_backward


# --- lowering ----------------------------------------------------------------------------------------------------------


def _lower_partitioned(shard: Any) -> Any:
    def call(*arrays: Any, problem: Problem, gradients: Gradients | None = None) -> Any:
        return partitioned(shard, problem, gradients)(*arrays)

    return mlir.lower_fun(call, multiple_results=True)


def _lower_shard(
    ctx: Any, *operands: Any, problem: Problem, gradients: Gradients | None = None, on_gpu: bool
) -> Any:
    """As a call of the handler, which clears gradients that are added up."""
    names, results = operand_names(problem, gradients), result_names(problem, gradients)
    avals = dict(zip(names, ctx.avals_in))
    spec = problem.spec(avals["q"], avals["v"], gradients.captures if gradients else ())
    spec_handle(spec)
    avals_out = list(ctx.avals_out)
    if on_gpu:
        bytes_needed = _handler.workspace_bytes(spec, _shape_of(avals, problem), gradients is not None)
        avals_out.append(jax.core.ShapedArray((bytes_needed,), np.dtype("uint8")))
    in_order = [_memory_order(name, problem) for name in names]
    out_order = [_memory_order(name, problem) for name in (*results, *["workspace"] * on_gpu)]
    lowering = jax.ffi.ffi_lowering(
        _handler.TARGETS["forward" if gradients is None else "backward"],
        operand_layouts=[_minor_to_major(order, aval) for order, aval in zip(in_order, ctx.avals_in)],
        result_layouts=[_minor_to_major(order, aval) for order, aval in zip(out_order, avals_out)],
    )
    made = lowering(
        ctx.replace(avals_out=avals_out),
        *operands,
        spec=spec,
        layout=problem.layout,
        args=" ".join(names),
        results=" ".join([*results, *["workspace"] * on_gpu]),
        scale=np.float32(problem.scale),
        dropout=np.float32(problem.dropout),
    )
    return made[: len(results)]


def _shape_of(avals: dict[str, Any], problem: Problem) -> tuple[int, ...]:
    q, k = avals["q"].shape, avals["k"].shape
    heads, length = (2, 1) if problem.layout == "BTNH" else (1, 2)
    columns = avals["page_table"].shape[1] if problem.pages else 1
    return (q[0], q[heads], k[heads], q[length], k[length] * columns)


def _memory_order(name: str, problem: Problem) -> tuple[int, ...] | None:
    """The dimensions as they lie in memory: those of LSE are always batch, heads, length."""
    return (0, 2, 1, 3) if name in ("lse", "dlse") and problem.layout == "BTNH" else None


def _minor_to_major(order: tuple[int, ...] | None, aval: Any) -> tuple[int, ...]:
    return tuple(reversed(order or range(len(aval.shape))))


for _outer, _shard in ((forward_p, _shard_forward_p), (backward_p, _shard_backward_p)):
    requires_devices(_outer)
    mlir.register_lowering(_outer, _lower_partitioned(_shard))
    mlir.register_lowering(_shard, functools.partial(_lower_shard, on_gpu=False), platform="cpu")
    mlir.register_lowering(_shard, functools.partial(_lower_shard, on_gpu=True), platform="cuda")

"""Derivatives of the call: tangents by a primitive that is linear in them, whose transpose is the backward pass.

JAX makes reverse mode of the two, so that grad, vjp, jvp and linearize, and gradients of those arrays alone that are asked for,
follow from one rule. A second derivative is refused when it is computed or transposed, not when it is traced: a tangent or a gradient
to which stop_gradient is applied is a constant of the outer derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..errors import Unsupported
from ._call import alike, backward_p, forward_p, tangent_p
from ._problem import Gradients, Problem, operand_names, result_names


def attend(problem: Problem, arrays: Sequence[Any]) -> tuple[Any, Any]:
    """O, and LSE with a last dimension of 1; arrays are those of operand_names()."""
    return tuple(forward_p.bind(*alike(arrays), problem=problem))


def _tangents_of_forward(primals: Sequence[Any], tangents: Sequence[Any], *, problem: Problem) -> Any:
    if problem.pages is not None:
        raise Unsupported(
            "attention from a cache has no derivatives, which need K and V as arrays: call it outside of jax.grad and jax.jvp, or "
            "apply jax.lax.stop_gradient to its arguments."
        )
    if problem.codes:
        raise Unsupported(
            "attention to K and V of 8 bits has no derivatives: apply jax.lax.stop_gradient to its arguments, or convert K and V to "
            "the type of Q."
        )
    out, lse = forward_p.bind(*primals, problem=problem)
    names = operand_names(problem, None)
    given = {
        name: _in_kernel_type(name, tangent)
        for name, primal, tangent in zip(names, primals, tangents)
        if type(tangent) is not ad.Zero and _differentiable(problem, name, primal)
    }
    if not given:
        return (out, lse), tuple(ad.Zero.from_primal_value(x) for x in (out, lse))
    operands = alike([*primals[:3], out, lse, *primals[3:], *given.values()])
    return (out, lse), tuple(tangent_p.bind(*operands, problem=problem, derivative=tuple(given)))


def _differentiable(problem: Problem, name: str, array: Any) -> bool:
    """A mask has no derivative, and what it reads none by it."""
    if name in ("q", "k", "v", "sinks"):
        return True
    number = name.removeprefix("c")
    return (
        number.isdigit()
        and jnp.issubdtype(array.dtype, jnp.floating)
        and problem.program.captures[int(number)].in_score
    )


def _in_kernel_type(name: str, tangent: Any) -> Any:
    return tangent if name in ("q", "k", "v") else tangent.astype(jnp.float32)


def _transposed(
    cotangents: Sequence[Any], *operands: Any, problem: Problem, derivative: tuple[str, ...]
) -> list[Any]:
    """The backward pass: cotangents of the tangents that `derivative` names."""
    count = len(operands) - len(derivative)
    known = operands[:count]
    out, lse = known[3:5]
    dout, dlse = (None if type(x) is ad.Zero else x for x in cotangents)
    captures = range(len(problem.program.captures))
    gradients = Gradients(
        dlse is not None, "sinks" in derivative, tuple(f"c{i}" in derivative for i in captures)
    )
    given = [*known[:5], jnp.zeros_like(out) if dout is None else dout]
    made = backward_p.bind(
        *alike([*given, *([] if dlse is None else [dlse]), *known[5:]]), problem=problem, derivative=gradients
    )
    by_name = dict(zip(result_names(problem, gradients), made))
    return [None] * count + [by_name[f"d{name}"] for name in derivative]


def _tangents_of_tangents(
    primals: Sequence[Any], tangents: Sequence[Any], *, problem: Problem, derivative: tuple[str, ...]
) -> Any:
    results = tangent_p.bind(*primals, problem=problem, derivative=derivative)
    return _with_refused_tangents(results, tangents)


def _tangents_of_backward(
    primals: Sequence[Any], tangents: Sequence[Any], *, problem: Problem, derivative: Gradients
) -> Any:
    results = backward_p.bind(*primals, problem=problem, derivative=derivative)
    return _with_refused_tangents(results, tangents)


ad.primitive_jvps[forward_p] = _tangents_of_forward
ad.primitive_jvps[tangent_p] = _tangents_of_tangents
ad.primitive_transposes[tangent_p] = _transposed
ad.primitive_jvps[backward_p] = _tangents_of_backward

# --- second derivatives ------------------------------------------------------------------------------------------------


def _with_refused_tangents(results: Sequence[Any], tangents: Sequence[Any]) -> Any:
    given = [tangent for tangent in tangents if type(tangent) is not ad.Zero]
    return results, refused_p.bind(*alike([*results, *given]), count=len(results))


def _refuse(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "flashjit.jax.attention has first derivatives alone: instead of jax.hessian, a gradient of a gradient or of a tangent apply "
        "jax.lax.stop_gradient to what is differentiated twice, or compute this term with jax.nn.dot_product_attention."
    )


def _refuse_transpose(cotangents: Sequence[Any], *operands: Any, count: int) -> list[Any]:
    if any(type(x) is not ad.Zero for x in cotangents):
        _refuse()
    return [None] * count + [ad.Zero(x.aval) for x in operands[count:]]


def _refused_tangents(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> Any:
    return _with_refused_tangents(refused_p.bind(*primals, count=count), tangents)


def _batch_refused(arrays: Any, axes: Any, *, count: int) -> Any:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)
    wide = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes)
    ]
    return refused_p.bind(*wide, count=count), [0] * count


#: From results and tangents what would be the tangents of the results.
refused_p = jax.extend.core.Primitive("flashjit_second_derivative")
refused_p.multiple_results = True
refused_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
refused_p.def_impl(_refuse)
ad.primitive_jvps[refused_p] = _refused_tangents
ad.primitive_transposes[refused_p] = _refuse_transpose
batching.primitive_batchers[refused_p] = _batch_refused
mlir.register_lowering(refused_p, _refuse)

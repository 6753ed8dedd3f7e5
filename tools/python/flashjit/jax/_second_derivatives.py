"""Second derivatives: tangents of gradients, and the gradients of these and of tangents.

The tangents of gradients are a primitive that is linear in the tangents that it is given, as O's tangents are. Second derivatives are
symmetric, so that its transpose is itself for the arrays of the call, and the tangents of O and LSE for their gradients. A tangent's
own tangent has no kernel, and is refused when it is computed, but its transpose has one: the tangents of gradients. A third derivative is
refused when it is computed or transposed, not when it is traced: what stop_gradient is applied to is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..errors import Unsupported
from ._call import alike, backward_p, backward_tangent_p, fold_over, tangent_p
from ._problem import (
    TANGENT,
    Gradients,
    GradientTangents,
    Problem,
    differentiated,
    operand_names,
    result_names,
)


def tangents_given(
    problem: Problem, names: Sequence[str], primals: Sequence[Any], tangents: Sequence[Any]
) -> dict[str, Any]:
    """The tangents that are not zero, by name, in the types of the kernels, of what has a derivative."""
    return {
        name: tangent if name in ("q", "k", "v", "dout") else tangent.astype(jnp.float32)
        for name, primal, tangent in zip(names, primals, tangents)
        if type(tangent) is not ad.Zero and _differentiable(problem, name, primal)
    }


def _differentiable(problem: Problem, name: str, array: Any) -> bool:
    """A mask has no derivative, and what it reads none by it."""
    if name in ("q", "k", "v", "sinks", "dout", "dlse"):
        return True
    number = name.removeprefix("c")
    return (
        number.isdigit()
        and jnp.issubdtype(array.dtype, jnp.floating)
        and problem.program.captures[int(number)].has_gradient()
    )


# --- tangents of gradients ---------------------------------------------------------------------------------------------


def _tangents_of_gradients(
    problem: Problem, arrays: dict[str, Any], gradients: Gradients, given: dict[str, Any]
) -> dict[str, Any]:
    """By names of gradients; of all captures that are given one, too. arrays: by the names of operands of the backward pass."""
    captures = tuple(wanted or f"c{i}" in given for i, wanted in enumerate(gradients.captures))
    made = Gradients(gradients.dlse, gradients.sinks, captures)
    names = operand_names(problem, made)
    zeros = {
        f"c{i}": jnp.zeros(arrays[f"c{i}"].shape, "float32") for i, wanted in enumerate(captures) if wanted
    }
    given = {name: x for name in names if (x := given.get(name, zeros.get(name))) is not None}
    derivative = GradientTangents(made, tuple(given))
    operands = alike([*[arrays[name] for name in names], *given.values()])
    results = backward_tangent_p.bind(*operands, problem=problem, derivative=derivative)
    return dict(zip(result_names(problem, derivative), results))


def _jvp_of_backward(
    primals: Sequence[Any], tangents: Sequence[Any], *, problem: Problem, derivative: Gradients
) -> Any:
    """O and LSE have no tangents of their own: what depends on them is a part of the others'."""
    results = backward_p.bind(*primals, problem=problem, derivative=derivative)
    names = operand_names(problem, derivative)
    given = tangents_given(problem, names, primals, tangents)
    if not given:
        return results, [ad.Zero.from_primal_value(x) for x in results]
    made = _tangents_of_gradients(problem, dict(zip(names, primals)), derivative, given)
    return results, [made[name] for name in result_names(problem, derivative)]


def _transposed_gradients(
    cotangents: Sequence[Any], *operands: Any, problem: Problem, derivative: GradientTangents
) -> list[Any]:
    count = len(operands) - len(derivative.tangents)
    names = operand_names(problem, derivative)[:count]
    arrays = dict(zip(names, operands))
    asked = [name for name, x in zip(derivative.tangents, operands[count:]) if ad.is_undefined_primal(x)]
    along = {
        name.removeprefix("d"): x
        for name, x in zip(result_names(problem, derivative), cotangents)
        if type(x) is not ad.Zero
    }
    made: dict[str, Any] = {}
    if along and not {"dout", "dlse"}.issuperset(asked):
        wanted = _gradients_of(problem, asked, derivative.gradients.dlse)
        made = _tangents_of_gradients(problem, arrays, wanted, along)
    if along and not {"dout", "dlse"}.isdisjoint(asked):
        operands_of_o = [arrays[name] for name in operand_names(problem, tuple(along))[: -len(along)]]
        results = tangent_p.bind(
            *alike([*operands_of_o, *along.values()]), problem=problem, derivative=tuple(along)
        )
        made.update(zip(("ddout", "ddlse"), results))
        made["ddout"] = made["ddout"].astype(arrays["dout"].dtype)
    return [None] * count + [made.get(f"d{name}") if name in asked else None for name in derivative.tangents]


def _gradients_of(problem: Problem, names: Sequence[str], dlse: bool) -> Gradients:
    captures = range(len(problem.program.captures))
    return Gradients(dlse, "sinks" in names, tuple(f"c{i}" in names for i in captures))


# --- tangents of tangents ----------------------------------------------------------------------------------------------


def _jvp_of_tangent(
    primals: Sequence[Any], tangents: Sequence[Any], *, problem: Problem, derivative: tuple[str, ...]
) -> Any:
    results = tangent_p.bind(*primals, problem=problem, derivative=derivative)
    names = operand_names(problem, derivative)
    count = len(names) - len(derivative)
    terms = []
    along = tangents_given(problem, names[:count], primals[:count], tangents[:count])
    if along:
        terms.append(
            second_tangent_p.bind(
                *alike([*primals, *along.values()]),
                problem=problem,
                derivative=derivative,
                along=tuple(along),
            )
        )
    moved = {name: x for name, x in zip(derivative, tangents[count:]) if type(x) is not ad.Zero}
    if moved:
        terms.append(
            tangent_p.bind(
                *alike([*primals[:count], *moved.values()]), problem=problem, derivative=tuple(moved)
            )
        )
    if not terms:
        return results, [ad.Zero.from_primal_value(x) for x in results]
    return results, [sum(parts[1:], parts[0]) for parts in zip(*terms)]


def _transposed_second(
    cotangents: Sequence[Any],
    *operands: Any,
    problem: Problem,
    derivative: tuple[str, ...],
    along: tuple[str, ...],
) -> list[Any]:
    """The tangents of gradients, with the tangents' cotangents as the gradients of O and LSE."""
    names = operand_names(problem, derivative)
    known = dict(zip(names, operands))
    out = known[problem.saved()[0]]
    dout, dlse = (None if type(x) is ad.Zero else x for x in (*cotangents, ad.Zero(out.aval))[:2])
    of_q = known["q"].dtype
    known["dout"] = jnp.zeros_like(out, of_q) if dout is None else dout.astype(of_q)
    if dlse is not None:
        known["dlse"] = dlse
    wanted = _gradients_of(problem, along, dlse is not None)
    made = _tangents_of_gradients(
        problem, known, wanted, {name: known[f"{name}{TANGENT}"] for name in derivative}
    )
    return [None] * len(names) + [made[f"d{name}"] for name in along]


def _batch_second(
    arrays: Any, axes: Any, *, problem: Problem, derivative: tuple[str, ...], along: tuple[str, ...]
) -> Any:
    names = [*operand_names(problem, derivative), *[f"{name}{TANGENT}" for name in along]]
    grads = differentiated(problem, (*derivative, *along))
    return fold_over(
        second_tangent_p, names, arrays, axes, grads, problem, derivative=derivative, along=along
    )


def _refuse_second(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "flashjit has no tangent of a tangent (forward over forward mode): take the tangent of a gradient, as jax.hessian does, apply "
        "jax.lax.stop_gradient to what is differentiated twice, or compute this term with jax.nn.dot_product_attention."
    )


#: What is linear in the tangents `along` of a tangent's own: of the operands of tangent_p and these tangents.
second_tangent_p = jax.extend.core.Primitive("flashjit_second_tangent")
second_tangent_p.multiple_results = True
second_tangent_p.def_impl(_refuse_second)
second_tangent_p.def_abstract_eval(
    lambda *avals, problem, derivative, along: [
        dict(zip(operand_names(problem, derivative), avals))[name] for name in problem.saved()
    ]
)
mlir.register_lowering(second_tangent_p, _refuse_second)


# --- third derivatives -------------------------------------------------------------------------------------------------


def _with_refused_tangents(results: Sequence[Any], tangents: Sequence[Any]) -> Any:
    given = [tangent for tangent in tangents if type(tangent) is not ad.Zero]
    return results, refused_p.bind(*alike([*results, *given]), count=len(results))


def _refuse(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "flashjit has no third derivative: apply jax.lax.stop_gradient to what is differentiated three times, or compute this term with "
        "jax.nn.dot_product_attention."
    )


def _refuse_transpose(cotangents: Sequence[Any], *operands: Any, count: int) -> list[Any]:
    if any(type(x) is not ad.Zero for x in cotangents):
        _refuse()
    return [None] * count + [ad.Zero(x.aval) for x in operands[count:]]


def _batch_refused(arrays: Any, axes: Any, *, count: int) -> Any:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)
    wide = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes)
    ]
    return refused_p.bind(*wide, count=count), [0] * count


#: From results and tangents what would be the tangents of the results.
refused_p = jax.extend.core.Primitive("flashjit_third_derivative")
refused_p.multiple_results = True
refused_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
refused_p.def_impl(_refuse)
mlir.register_lowering(refused_p, _refuse)


def register() -> None:
    """Tells JAX the rules."""
    ad.primitive_jvps[backward_p] = _jvp_of_backward
    ad.primitive_jvps[tangent_p] = _jvp_of_tangent
    ad.primitive_transposes[backward_tangent_p] = _transposed_gradients
    ad.primitive_transposes[second_tangent_p] = _transposed_second
    ad.primitive_transposes[refused_p] = _refuse_transpose
    batching.primitive_batchers[second_tangent_p] = _batch_second
    batching.primitive_batchers[refused_p] = _batch_refused
    for primitive in (backward_tangent_p, second_tangent_p, refused_p):
        ad.primitive_jvps[primitive] = lambda primals, tangents, primitive=primitive, **params: (
            _with_refused_tangents(primitive.bind(*primals, **params), tangents)
        )

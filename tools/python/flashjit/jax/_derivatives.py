"""Derivatives of the call: tangents by a primitive that is linear in them, whose transpose is the backward pass.

JAX makes reverse mode of the two, so that grad, vjp, jvp and linearize, and gradients of those arrays alone that are asked for,
follow from one rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad

from ..errors import Unsupported
from . import _second_derivatives
from ._call import alike, backward_p, forward_p, tangent_p
from ._problem import Gradients, Problem, operand_names, result_names
from ._second_derivatives import tangents_given


def attend(problem: Problem, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Problem.results(): O, and LSE with a last dimension of 1; arrays: by operand_names()."""
    return tuple(forward_p.bind(*alike(arrays), problem=problem))


def _tangents_of_forward(primals: Sequence[Any], tangents: Sequence[Any], *, problem: Problem) -> Any:
    if problem.pages is not None:
        raise Unsupported(
            "attention from a cache has no derivatives, which need K and V as arrays: call it outside of jax.grad and jax.jvp, or "
            "apply jax.lax.stop_gradient to its arguments."
        )
    if problem.out_format:
        raise Unsupported(
            "out_dtype is of codes, which have no derivatives: apply jax.lax.stop_gradient to the arguments, or leave it out."
        )
    if problem.codes:
        raise Unsupported(
            "attention to K and V of 8 bits has no derivatives: apply jax.lax.stop_gradient to its arguments, or convert K and V to "
            "the type of Q."
        )
    given = tangents_given(problem, operand_names(problem, None), primals, tangents)
    if not given:
        made = tuple(forward_p.bind(*primals, problem=problem))
        return made, tuple(ad.Zero.from_primal_value(x) for x in made)
    problem = dataclasses.replace(problem, keeps_before_mod=bool(problem.program.out_mod))
    made = forward_p.bind(*primals, problem=problem)
    by_name = dict(zip(problem.outputs(), made))
    saved = [by_name[name] for name in problem.saved()]
    operands = alike([*primals[:3], *saved, *primals[3:], *given.values()])
    results = tuple(by_name[name] for name in problem.results())
    return results, tuple(tangent_p.bind(*operands, problem=problem, derivative=tuple(given)))


def _transposed(
    cotangents: Sequence[Any], *operands: Any, problem: Problem, derivative: tuple[str, ...]
) -> list[Any]:
    """The backward pass: cotangents of the tangents that `derivative` names."""
    count = len(operands) - len(derivative)
    known = operands[:count]
    made_before = 3 + len(cotangents)
    out = known[3]
    dout, dlse = (None if type(x) is ad.Zero else x for x in (*cotangents, ad.Zero(out.aval))[:2])
    captures = range(len(problem.program.captures))
    gradients = Gradients(
        dlse is not None, "sinks" in derivative, tuple(f"c{i}" in derivative for i in captures)
    )
    of_q = known[0].dtype
    given = [*known[:made_before], jnp.zeros_like(out, of_q) if dout is None else dout.astype(of_q)]
    made = backward_p.bind(
        *alike([*given, *([] if dlse is None else [dlse]), *known[made_before:]]),
        problem=problem,
        derivative=gradients,
    )
    by_name = dict(zip(result_names(problem, gradients), made))
    return [None] * count + [by_name[f"d{name}"] for name in derivative]


ad.primitive_jvps[forward_p] = _tangents_of_forward
ad.primitive_transposes[tangent_p] = _transposed
_second_derivatives.register()

"""Calls of attention() that have no forward-mode or second derivative: refused with the library's reason."""

from __future__ import annotations

from ._library import spec_handle
from .errors import InvalidArgument, Unsupported

FORWARD_MODE = "forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad)"
SECOND = "second derivative (create_graph=True, torch.func.hessian, jvp of grad)"
OF_JAX = "forward-mode and second derivatives (jax.jvp, jax.jacfwd, jax.hessian, jax.grad of jax.grad)"


def refuse_without_tangent(of_pass: str, spec: str, derivative: str) -> None:
    """Raises Unsupported where the library has no pass "jvp:" or "bwd_jvp:" of a spec."""
    try:
        spec_handle(of_pass + spec)
    except InvalidArgument as error:
        raise Unsupported(f"flashjit's attention has no {derivative} of this call: {error}") from None

"""What attention() may be given that its forward-mode and second derivatives do not have: refused in the caller's words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import Unsupported

FORWARD_MODE = "forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad)"
SECOND = "second derivative (create_graph=True, torch.func.hessian, jvp of grad)"
OF_JAX = "forward-mode and second derivatives (jax.jvp, jax.jacfwd, jax.hessian, jax.grad of jax.grad)"
_AS_TENSORS = "give K and V as tensors of the type of q"
#: How a spec's options say it, its name, and another way.
_LACKING: Sequence[tuple[str, str, str]] = (
    (r":out_mod\{", "out_mod", "leave it out and change the returned O after the call"),
    (r":q_mod\{", "q_mod", "leave it out and change q before the call"),
    (r":k_mod\{", "k_mod", "leave it out and change k before the call"),
    (
        r":weight_mod\b",
        "weight_mod",
        "take gradients by reverse mode and once, or compute such weights without flashjit",
    ),
    (r":indices\b", "indices", "give k and v of the listed keys alone, or a mask_mod in place of the lists"),
    (r":(cache|pages\d+|slots)\b", "a cache", _AS_TENSORS),
    (r":(kv?|v)\{|:kv(e4m3|e5m2|int8)\b", "k and v of 8 bits or in a format", _AS_TENSORS),
)


def refuse_without_tangent(options: str, derivative: str) -> None:
    """Raises Unsupported where a call with these options of its spec lacks the derivative."""
    stages = re.sub(r"\{[^}]*\}", "{", options)  # without what programs and formats say
    for pattern, name, instead in _LACKING:
        if re.search(pattern, stages):
            raise Unsupported(f"flashjit's attention with {name} has no {derivative}: {instead}.")

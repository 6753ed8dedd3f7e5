"""PyTorch's names in programs: the functions that there are, and what to write instead of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import InvalidArgument, WrongType

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by their names in torch; _functions.py fills it


def call(name: str, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if named.get("inplace"):
        refuse_in_place(name)
    named = {key: value for key, value in named.items() if key not in ("inplace", "out") or value}
    try:
        return function(*arguments, **named)
    except TypeError as error:
        if isinstance(error, InvalidArgument):
            raise
        raise WrongType(
            f"torch.{name} cannot be called in a program with {len(arguments)} arguments"
            f"{' and ' + ', '.join(named) if named else ''}: see help(flashjit.programs)."
        ) from None


_OF_OTHER_PAIRS = (
    "a program computes one pair of a query and a key, and sees no other: compute it before the call, and capture "
    "the result as a tensor. Softmax over the keys is attention's own."
)
_RANDOM = "give attention() dropout_p, or capture a tensor of numbers drawn before the call."
_INSTEAD = {
    **dict.fromkeys(
        (
            "softmax",
            "log_softmax",
            "logsumexp",
            "sum",
            "mean",
            "prod",
            "cumsum",
            "cumprod",
            "sort",
            "argsort",
            "topk",
            "argmax",
            "argmin",
            "amax",
            "amin",
            "norm",
            "var",
            "std",
            "median",
            "any",
            "all",
            "layer_norm",
            "rms_norm",
            "normalize",
            "glu",
            "einsum",
            "matmul",
        ),
        _OF_OTHER_PAIRS,
    ),
    **dict.fromkeys(
        ("dropout", "alpha_dropout", "rand_like", "randn_like", "randint_like", "bernoulli", "rrelu"), _RANDOM
    ),
    "asinh": "write torch.log(x + torch.sqrt(x * x + 1)).",
    "acosh": "write torch.log(x + torch.sqrt(x * x - 1)).",
    "atanh": "write 0.5 * torch.log((1 + x) / (1 - x)).",
    "ndtr": "write 0.5 * (1 + torch.erf(x * 0.7071067811865476)).",
    "log_ndtr": "write torch.log(0.5 * (1 + torch.erf(x * 0.7071067811865476))).",
    "sinc": "write torch.where(x == 0, 1.0, torch.sin(math.pi * x) / (math.pi * x)).",
    "xlogy": "write torch.where(x == 0, 0.0, x * torch.log(y)).",
    "ldexp": "write x * 2.0 ** y.",
    "logaddexp2": "write y + torch.log2(1 + 2.0 ** (x - y)).",
    "heaviside": "write torch.where(x == 0, y, (x > 0).float()).",
    "copysign": "write torch.where(y < 0, -x.abs(), x.abs()).",
    "cross_entropy": _OF_OTHER_PAIRS,
}
_NO_DERIVATIVE = (
    "what has no derivative here is computed before the call where it is of positions, and captured as a tensor, as in "
    "table[q_idx - kv_idx]; of the score, write it with the functions that help(flashjit.programs) lists, such as "
    "torch.tanh(x), torch.erf(x) or x / (1 + x.abs())."
)
_ALIASES = {"arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh"}


def without_function(name: str, what: str = "its values") -> str:
    """What to write instead of a function that programs do not have."""
    plain = name.removeprefix("torch.")
    return f"a program has no {name!r} of {what}: {_INSTEAD.get(_ALIASES.get(plain, plain), _NO_DERIVATIVE)}"


def refuse_in_place(name: str) -> Any:
    raise WrongType(
        f"a program cannot change values in place, as {name} does: write score = score + x instead of "
        "score.add_(x)."
    )

"""run()'s positional arguments, and FlashInfer's jit_args: a variant of attention by name, with CUDA code, which flashjit does not read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import InvalidArgument, Unsupported
from ._scores import Scales

_SINKS = "AttentionSink"  #: FlashInfer's own, of flashinfer.jit.attention.variants
_NAMES, _SCALARS, _VARIANT = 7, 9, 11  # places in jit_args


def has_sinks(jit_args: Any) -> bool:
    """Whether run() takes sinks and the scale of scores besides. Refuses variants that flashjit does not know."""
    if jit_args is None:
        return False
    given = tuple(jit_args)
    name = given[_VARIANT] if len(given) > _VARIANT else None
    known = name == _SINKS and list(given[_NAMES]) == ["sink"] and list(given[_SCALARS]) == ["sm_scale"]
    if not known:
        raise Unsupported(
            f"jit_args is given, with the variant {name!r}: of variants in CUDA code flashjit.flashinfer has {_SINKS!r}, with "
            "the tensor sink and the scalar sm_scale. Write others as score_mod, mask_mod or weight_mod of flashjit.attention()."
        )
    return True


def sinks_of(args: tuple[Any, ...]) -> tuple[Tensor, float | None]:
    """The sinks and the scale of run()'s positional arguments."""
    if len(args) > 2:
        raise InvalidArgument(
            f"run() is given {len(args)} more arguments: with {_SINKS!r} give sink, float32 [hq], and sm_scale."
        )
    return args[0], float(args[1]) if len(args) > 1 else None


def of_arguments(args: tuple[Any, ...], named: Scales, q: Tensor) -> Scales:
    """Scales, which FlashInfer's FP8 kernels take by position."""
    if not args:
        return named
    if q.dtype.itemsize > 1 or len(args) > 3:
        raise InvalidArgument(
            f"run() is given {len(args)} more arguments, as custom kernels of FlashInfer have them: flashjit takes q_scale, "
            "k_scale and v_scale, by name or for q of 8 bits in this order."
        )
    return Scales(*[given if other is None else other for given, other in zip((*args, None, None), named)])

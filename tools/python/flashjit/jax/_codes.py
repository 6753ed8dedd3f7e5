"""Q, K and V of 8 bits: what a spec says of them, and their scales as the library's arrays of four dimensions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..errors import InvalidArgument, WrongType
from ._problem import CODES, Q_CODES


def codes_of(q: Any, k: Any, scales: dict[str, Any]) -> str:
    """The options of a spec for arrays of these types. scales: in four dimensions, by name, None where there is none."""
    kind = CODES.get(str(k.dtype))
    q_kind = CODES.get(str(q.dtype))
    if kind is None:
        for name, scale in scales.items():
            if scale is not None:
                raise InvalidArgument(
                    f"{name} is given, but K and V are {k.dtype}: scales go with {', '.join(CODES)}."
                )
        return ""
    for name in ("k_scale", "v_scale"):
        if scales[name] is None:
            raise InvalidArgument(
                f"{name} is missing: K and V are {k.dtype}; give jnp.float32(1) where codes are values."
            )
    by_key = any(scales[name].shape[1] > 1 or scales[name].shape[3] > 1 for name in ("k_scale", "v_scale"))
    text = f":kv{kind}{':key_scales' if by_key else ''}"
    if q_kind is None:
        if scales.get("q_scale") is not None:
            raise InvalidArgument(
                f"q_scale is given, but q is {q.dtype}: it goes with float8_e4m3fn and float8_e5m2."
            )
        return text
    if q_kind == "int8" or q_kind != kind:
        raise WrongType(
            f"q is {q.dtype} and k is {k.dtype}: q has 16 bits, or all three are float8_e4m3fn, or float8_e5m2."
        )
    if scales["q_scale"] is None:
        raise InvalidArgument(
            f"q_scale is missing: q is {q.dtype}; give jnp.float32(1) where codes are values."
        )
    return text + Q_CODES


def in_four_dims(name: str, scale: Any, cached: bool) -> Any:
    """[sequences, pages, heads, rows] of what attention() takes."""
    if scale is None:
        return None
    scale = jnp.asarray(scale)
    if scale.dtype != jnp.float32 or scale.ndim > 4:
        raise InvalidArgument(
            f"{name} is {scale.dtype} {list(scale.shape)}: it must be float32: one number, [heads_kv], [sequences, heads_kv], "
            "[pages, heads_kv, rows], or [sequences, pages, heads_kv, rows], with 1 where all have one."
        )
    if scale.ndim == 4:
        return scale
    if scale.ndim == 3:
        return scale[None] if cached else scale[:, None]
    return scale.reshape(1, 1, -1, 1) if scale.ndim < 2 else scale[:, None, :, None]

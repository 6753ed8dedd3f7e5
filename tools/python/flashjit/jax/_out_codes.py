"""O as codes: what out_dtype and out_scale say."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import InvalidArgument
from ._problem import FP8, FP8_ROWS, NVFP4, SWIZZLED

_FORMATS = {"float8_e4m3fn": FP8, "float4_e2m1fn": NVFP4}


def out_codes(dtype: Any, scale: Any, swizzled: bool, columns: int) -> str:
    """What the spec says of O, whose rows have so many columns; "" where it has elements."""
    if swizzled and (dtype is None or _name_of(dtype) != "float4_e2m1fn"):
        raise InvalidArgument(
            f"swizzled_scales is set and out_dtype is {None if dtype is None else _name_of(dtype)}: it is for jnp.float4_e2m1fn, so "
            "leave it out."
        )
    if swizzled and columns % 64:
        raise InvalidArgument(
            f"swizzled_scales is set and v has {columns} columns: give a multiple of 64, or leave it out."
        )
    if dtype is None:
        if scale is not None:
            raise InvalidArgument(
                "out_scale is given and out_dtype is not: give jnp.float8_e4m3fn or jnp.float4_e2m1fn, or leave it out."
            )
        return ""
    name = _name_of(dtype)
    if name not in _FORMATS:
        raise InvalidArgument(
            f"out_dtype is {name}: give jnp.float8_e4m3fn or jnp.float4_e2m1fn, or None for the type of q."
        )
    if scale is None and _FORMATS[name] == NVFP4:
        raise InvalidArgument("out_scale is missing: O of float4_e2m1fn takes one, float32, one number.")
    return f":out{{{FP8_ROWS if scale is None else _FORMATS[name]}}}" + SWIZZLED * swizzled


def scale_of_out(dtype: Any, scale: Any) -> Any:
    """As an operand."""
    if dtype is None or scale is None:
        return None
    scale = jnp.asarray(scale)
    if scale.size != 1 or scale.dtype != jnp.float32:
        raise InvalidArgument(
            f"out_scale is {scale.dtype} {list(scale.shape)}: it must be float32, one number."
        )
    return scale.reshape(1, 1, 1, 1)


def _name_of(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)

"""K and V in formats of a KV cache: what a spec says of them, their rows' columns, and memory for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._kv_rows import block_scales_of, columns_of, row_of
from ..errors import InvalidArgument, WrongType
from ._problem import CODES

_SCALE_TYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e8m0": "float8_e8m0fnu",
}


def new_cache(format: str, size: Sequence[int], layout: str = "BTNH") -> tuple[Any, Any]:
    """(rows, block_scale): zeros for K or V in a KV format, as attention() and append() take them.

    format: a text such as "nvfp4" or "int4:g32:fp16:apart", see tools/docs/cache-formats.md in the repository.
    size: [pages or batch, rows, heads_kv, head_dim], or with layout "BHSD" [pages or batch, heads_kv, rows, head_dim].
    rows: uint8, with the bytes of a row in the place of head_dim. block_scale: of the scales' type, with their numbers there; None
        where the format has no scales in a tensor of their own.
    """
    size = [int(n) for n in size]
    if len(size) != 4 or layout not in ("BTNH", "BHSD"):
        raise InvalidArgument(f"size is {size} and layout {layout!r}: give four sizes in BTNH or BHSD.")
    text = _text("format", format)
    rows = jnp.zeros((*size[:3], row_of(text, size[3])[0]), jnp.uint8)
    wanted = _block_scale_shape(text, rows.shape, size[3], layout)
    if wanted is None:
        return rows, None
    return rows, jnp.zeros(wanted, _SCALE_TYPES[block_scales_of(text, size[3]).type])


class Formats(NamedTuple):
    """The formats of K and V; None: elements of Q's type."""

    k: str | None
    v: str | None

    def __bool__(self) -> bool:
        return self != (None, None)

    def spec_text(self, scales: dict[str, Any]) -> str:
        """The options of a spec. scales: of K and V in four dimensions, by name."""
        by_key = any(x is not None and (x.shape[1] > 1 or x.shape[3] > 1) for x in scales.values())
        text = "".join(f":{name}{{{form}}}" for name, form in zip("kv", self) if form is not None)
        return text + (":key_scales" if by_key else "")


def read_formats(k: Any, v: Any, k_format: Any, v_format: Any) -> Formats:
    """The given formats, or the formats of types of 8 bits without them."""
    if k_format is None and v_format is None:
        return Formats(None, None)
    given = (("k_format", k_format, k), ("v_format", v_format, v))
    return Formats(
        *(CODES.get(str(x.dtype)) if form is None else _text(name, form) for name, form, x in given)
    )


def check_formats(
    formats: Formats, q: Any, k: Any, v: Any, layout: str, scales: dict[str, Any], block_scales: Sequence[Any]
) -> int:
    """Refuses rows and scales that do not fit the formats; returns V's columns. q has K's head_dim. block_scales: K's and V's."""
    head_dim = q.shape[3]
    for name, x, form in zip("kv", (k, v), formats):
        if form is None:
            if x.dtype != q.dtype:
                raise WrongType(
                    f"{name} is {_described(x)} and q {_described(q)}: give it in q's type, or its rows' bytes and {name}_format."
                )
        elif x.dtype.itemsize != 1:
            raise WrongType(
                f"{name} is {_described(x)} and its format is {form}: give its rows' bytes, uint8."
            )
    if formats.k is None and k.shape[3] != head_dim:
        raise InvalidArgument(
            f"q is {_described(q)} and k is {_described(k)}: k must have the head_dim of q."
        )
    if formats.k is not None and k.shape[3] != row_of(formats.k, head_dim)[0]:
        raise InvalidArgument(
            f"k has rows of {k.shape[3]} bytes, but with the head_dim {head_dim} of q a row in the format {formats.k} has "
            f"{row_of(formats.k, head_dim)[0]}: give k as new_cache() makes it."
        )
    columns = v.shape[3] if formats.v is None else columns_of(formats.v, v.shape[3], head_dim)
    if scales.get("q_scale") is not None:
        raise InvalidArgument(
            "q_scale is given with k_format or v_format: it goes with a q of 8 bits; leave it out."
        )
    for name, x, form, dim, of_blocks in zip("kv", (k, v), formats, (head_dim, columns), block_scales):
        scale = scales[f"{name}_scale"]
        has_scale = form is not None and row_of(form, 0)[2]
        if has_scale != (scale is not None):
            raise InvalidArgument(
                f"{name}_scale is missing: {name}'s format is {form}; give jnp.float32(1) where codes are values."
                if has_scale
                else f"{name}_scale is given, but {name} is {form or x.dtype}, which has no scale of the call: leave it out."
            )
        _check_block_scale(f"{name}_block_scale", of_blocks, form, x, dim, layout)
    return columns


def refuse_block_scales(given: Sequence[Any]) -> None:
    """Without formats."""
    for name, array in zip(("k_block_scale", "v_block_scale"), given):
        if array is not None:
            raise InvalidArgument(
                f"{name} is given without {name[0]}_format: give the format that has such scales."
            )


def _check_block_scale(name: str, given: Any, form: str | None, x: Any, dim: int, layout: str) -> None:
    wanted = None if form is None else _block_scale_shape(form, x.shape, dim, layout)
    if form is None or wanted is None:
        if given is not None:
            raise InvalidArgument(
                f"{name} is given, but {name[0]} is {form or x.dtype}, whose scales are not in a tensor of their own: leave it "
                'out, or give a format with apart, such as "int4:g32:fp16:apart".'
            )
        return
    dtype = jnp.dtype(_SCALE_TYPES[block_scales_of(form, dim).type])
    right = given is not None and given.shape == wanted
    if not right or (given.dtype != dtype and not (dtype.itemsize == 1 and given.dtype == jnp.uint8)):
        has = "missing" if given is None else _described(given)
        raise InvalidArgument(
            f"{name} is {has}: {name[0]}'s format is {form}; give {dtype} {list(wanted)}, as new_cache() makes it."
        )


def _block_scale_shape(form: str, rows: Sequence[int], dim: int, layout: str) -> tuple[int, ...] | None:
    """Sizes of the scales' tensor for rows of these sizes; None where a format has no such tensor."""
    known = block_scales_of(form, dim)
    if not known.keys:
        return None
    shape = list(rows)
    length = 1 if layout == "BTNH" else 2
    shape[length] = math.ceil(shape[length] / known.keys)
    return (*shape[:3], known.columns)


def _text(name: str, given: Any) -> str:
    """The text of a format, or of a KvFormat."""
    text = getattr(given, "text", given)
    if not isinstance(text, str):
        raise WrongType(f'{name} is a {type(given).__name__}: give a text such as "nvfp4".')
    return text


def _described(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}"

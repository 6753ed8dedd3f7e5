"""What the library knows of rows in a KV format: their bytes, and their rows of scales in a tensor of their own."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from ._library import c_text, check, library
from .errors import InvalidArgument


def row_of(text: str, head_dim: int) -> tuple[int, int, bool]:
    """Bytes of a row, its alignment, and whether a call has scales for it."""
    return _known_row(text, head_dim)


# What torch.compiler.assume_constant_result() does, which imports the compiler.
row_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _known_row(text: str, head_dim: int) -> tuple[int, int, bool]:
    size, alignment, has_scale = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_int32()
    results = map(ctypes.byref, (size, alignment, has_scale))
    check(library().flashjit_kv_row(c_text("the KV format", text), head_dim, *results))
    return size.value, alignment.value, bool(has_scale.value)


class BlockScales(NamedTuple):
    """A row of a format's tensor of scales: its numbers and their type, and how many keys share it, 0 without one."""

    columns: int
    keys: int
    type: str


def block_scales_of(text: str, head_dim: int) -> BlockScales:
    columns, keys, name = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_char_p()
    check(
        library().flashjit_kv_block_scales(
            c_text("the KV format", text), head_dim, *map(ctypes.byref, (columns, keys, name))
        )
    )
    return BlockScales(columns.value, keys.value, (name.value or b"").decode())


block_scales_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def columns_of(text: str, size: int, columns_of_k: int) -> int:
    """How many columns V's row of `size` bytes has: as many as K's, or others."""
    if _known_row(text, columns_of_k)[0] == size:
        return columns_of_k
    for dim in range(16, 513, 16):
        try:
            if _known_row(text, dim)[0] == size:
                return dim
        except InvalidArgument:
            continue
    raise InvalidArgument(
        f"v has rows of {size} bytes, which no head_dim has in the format {text}: with {columns_of_k} columns "
        f"a row has {_known_row(text, columns_of_k)[0]}."
    )


columns_of._dynamo_marked_constant = True  # type: ignore[attr-defined]

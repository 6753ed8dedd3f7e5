"""Structs of the C interface that a plan fills: where their members are, in words, and the members of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import _library
from ._call_types import table_size


class Lent(NamedTuple):
    """Where a call's struct has what both passes are lent alike, in words."""

    workspace: int
    lists: int
    seed: int
    rng_state: int
    dropout_place: int
    fixed: tuple[int, ...]


def words_at(structure: type[ctypes.Structure], *members: str) -> tuple[int, ...]:
    return tuple(_library.word(structure, member) for member in members)


def words_lent(structure: type[ctypes.Structure], fixed: Sequence[str]) -> Lent:
    names = ("workspace", "lists", "seed", "rng_state", "dropout_place")
    members = {
        "page_starts": ("page_table", _library.PageTable, "starts"),
        "topk_length": ("indices", _library.Indices, "topk_length"),
    }
    words = {name: _library.word(structure, name) for name in fixed if name not in members}
    for name, (outer, inner, member) in members.items():
        if name in fixed:
            words[name] = words[outer] + _library.word(inner, member)
    return Lent(**dict(zip(names, words_at(structure, *names))), fixed=tuple(words[name] for name in fixed))


def tensor_struct(size: Sequence[int], stride: Sequence[int]) -> _library.Tensor:
    return _library.Tensor(None, (ctypes.c_int64 * 4)(*size), (ctypes.c_int64 * 4)(*stride))


def scales_struct(scale: Tensor | None) -> _library.Scales:
    """The struct for scales [sequences, pages, heads, rows]."""
    if scale is None:
        return _library.Scales()
    return _library.Scales(None, (ctypes.c_int64 * 4)(*scale.shape), (ctypes.c_int64 * 4)(*scale.stride()))


def indices_struct(indices: Tensor, topk_length: Any) -> _library.Indices:
    """topk_length: contiguous, or None; of one dimension, or of one row, all sequences have the same."""
    shared = topk_length is None or topk_length.dim() == 1 or topk_length.shape[0] == 1
    return _library.Indices(
        None,
        (ctypes.c_int64 * 4)(*indices.shape),
        (ctypes.c_int64 * 4)(*indices.stride()),
        None,
        (ctypes.c_int64 * 2)(0 if shared else topk_length.shape[1], 1),
    )


def page_table_struct(fixed: Any) -> _library.PageTable:
    stride = 0 if fixed.page_starts is not None else fixed.page_table.stride(0)
    return _library.PageTable(None, *table_size(fixed), stride)

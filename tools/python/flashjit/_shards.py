"""Tensors of a shared sequence: by position, and by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._chunks import LAYOUTS, chunks
from .errors import InvalidArgument


def positions(rank: int, ranks: int, rows: int, layout: str = "zigzag") -> Tensor:
    """The position in the whole sequence of each row of a rank's shard, int64 [rows]: for rotary embeddings and losses."""
    check_layout(layout, ranks, rows * ranks)
    return torch.cat([c.first + c.step * torch.arange(c.rows) for c in chunks(rank, ranks, rows, layout)])


def in_order(parts: Sequence[Tensor] | Tensor, layout: str) -> Tensor:
    """Rows by position, [batch, heads, all rows, dim], of all ranks' shards, [batch, heads, rows, dim] each."""
    batch, heads, rows, dim = parts[0].shape
    result = parts[0].new_empty(batch, heads, len(parts) * rows, dim)
    for rank, part in enumerate(parts):
        to, of = _wide(result, part)
        for c in chunks(rank, len(parts), rows, layout):
            to[:, :, c.first : c.last + 1 : c.step] = of[:, :, c.begin : c.end]
    return result


def by_rank(x: Tensor, ranks: int, layout: str) -> Tensor:
    """The inverse of in_order(): [ranks, batch, heads, rows, dim]."""
    batch, heads, all_rows, dim = x.shape
    result = x.new_empty(ranks, batch, heads, all_rows // ranks, dim)
    for rank in range(ranks):
        copy_rows(result[rank], x, rank, ranks, layout)
    return result


def copy_rows(to: Tensor, x: Tensor, rank: int, ranks: int, layout: str) -> None:
    """A rank's shard of rows by position."""
    to, of = _wide(to, x)
    for c in chunks(rank, ranks, to.shape[2], layout):
        to[:, :, c.begin : c.end] = of[:, :, c.first : c.last + 1 : c.step]


def _wide(*tensors: Tensor) -> Sequence[Tensor]:
    """The same memory in elements of 16 bytes, where it can be, as PyTorch copies slices element by element."""

    def can_be(x: Tensor) -> bool:
        sizes = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        return (
            x.numel() > 0
            and x.stride(-1) == 1
            and x.data_ptr() % 16 == 0
            and all(n * x.element_size() % 16 == 0 for n in sizes)
        )

    return [x.view(torch.complex128) for x in tensors] if all(map(can_be, tensors)) else tensors


def check_layout(layout: str, ranks: int, rows: int) -> None:
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout is {layout!r}: give one of {', '.join(LAYOUTS)}.")
    parts = 2 * ranks if layout == "zigzag" else ranks
    if rows % parts:
        raise InvalidArgument(
            f"the sequence has {rows} rows, which do not divide into {parts} for {ranks} ranks and the layout "
            f"{layout!r}: pad it to {-(-rows // parts) * parts}."
        )

"""Tensors of a shared sequence: by position, and by rank."""
from __future__ import annotations

import torch
from torch import Tensor

from ._chunks import LAYOUTS, chunks
from .errors import InvalidArgument


def positions(rank: int, ranks: int, rows: int, layout: str = "zigzag") -> Tensor:
    """The position in the whole sequence of each row of a rank's shard, int64 [rows]: for rotary embeddings and losses."""
    check_layout(layout, ranks, rows * ranks)
    return torch.cat([c.first + c.step * torch.arange(c.rows) for c in chunks(rank, ranks, rows, layout)])


def in_order(parts: Tensor, layout: str) -> Tensor:
    """Rows by position, [batch, heads, all rows, dim], of all ranks' shards, [ranks, batch, heads, rows, dim]."""
    ranks, rows = parts.shape[0], parts.shape[3]
    if layout == "striped":
        return parts.movedim(0, 3).flatten(2, 3)
    pieces = [(c.first, parts[rank][:, :, c.begin:c.end]) for rank in range(ranks) for c in chunks(rank, ranks, rows, layout)]
    return torch.cat([part for _, part in sorted(pieces, key=lambda piece: piece[0])], 2)


def by_rank(x: Tensor, ranks: int, layout: str) -> Tensor:
    """The inverse of in_order()."""
    rows = x.shape[2] // ranks
    if layout == "striped":
        return x.unflatten(2, (rows, ranks)).movedim(3, 0)
    return torch.stack([torch.cat([x[:, :, c.first:c.first + c.rows] for c in chunks(rank, ranks, rows, layout)], 2)
                        for rank in range(ranks)])


def check_layout(layout: str, ranks: int, rows: int) -> None:
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout is {layout!r}: give one of {', '.join(LAYOUTS)}.")
    parts = 2 * ranks if layout == "zigzag" else ranks
    if rows % parts:
        raise InvalidArgument(f"the sequence has {rows} rows, which do not divide into {parts} for {ranks} ranks and the layout "
                              f"{layout!r}: pad it to {-(-rows // parts) * parts}.")

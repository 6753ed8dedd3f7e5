"""Tensors of a shared sequence: by position, and by rank."""
from __future__ import annotations

from typing import Any

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
    ranks, batch, heads, rows, dim = parts.shape
    if layout == "striped":
        return parts.movedim(0, 3).flatten(2, 3)
    result = parts.new_empty(batch, heads, ranks * rows, dim)
    for rank in range(ranks):
        for c in chunks(rank, ranks, rows, layout):
            result[:, :, c.first:c.last + 1] = parts[rank, :, :, c.begin:c.end]
    return result


def by_rank(x: Tensor, ranks: int, layout: str) -> Tensor:
    """The inverse of in_order()."""
    batch, heads, all_rows, dim = x.shape
    rows = all_rows // ranks
    if layout == "striped":
        return x.unflatten(2, (rows, ranks)).movedim(3, 0)
    result = x.new_empty(ranks, batch, heads, rows, dim)
    for rank in range(ranks):
        for c in chunks(rank, ranks, rows, layout):
            result[rank, :, :, c.begin:c.end] = x[:, :, c.first:c.last + 1]
    return result


class InOrder(torch.autograd.Function):
    """in_order() with gradients: one copy, where each slice's own gradient would be of all rows."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, layout: str) -> Tensor:
        ctx.ranks, ctx.layout = parts.shape[0], layout
        return in_order(parts, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ByRank.apply(grad, ctx.ranks, ctx.layout), None


class ByRank(torch.autograd.Function):
    """by_rank() with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, layout: str) -> Tensor:
        ctx.layout = layout
        return by_rank(x, ranks, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return InOrder.apply(grad, ctx.layout), None, None


def check_layout(layout: str, ranks: int, rows: int) -> None:
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout is {layout!r}: give one of {', '.join(LAYOUTS)}.")
    parts = 2 * ranks if layout == "zigzag" else ranks
    if rows % parts:
        raise InvalidArgument(f"the sequence has {rows} rows, which do not divide into {parts} for {ranks} ranks and the layout "
                              f"{layout!r}: pad it to {-(-rows // parts) * parts}.")

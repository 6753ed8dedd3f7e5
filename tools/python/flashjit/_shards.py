"""Tensors of a shared sequence: by position, and by rank."""
from __future__ import annotations

from typing import Any, Sequence

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
    to, of = _wide(result, parts)
    for rank in range(ranks):
        for c in chunks(rank, ranks, rows, layout):
            to[:, :, c.first:c.last + 1] = of[rank, :, :, c.begin:c.end]
    return result


def by_rank(x: Tensor, ranks: int, layout: str) -> Tensor:
    """The inverse of in_order()."""
    batch, heads, all_rows, dim = x.shape
    rows = all_rows // ranks
    if layout == "striped":
        return x.unflatten(2, (rows, ranks)).movedim(3, 0)
    result = x.new_empty(ranks, batch, heads, rows, dim)
    to, of = _wide(result, x)
    for rank in range(ranks):
        for c in chunks(rank, ranks, rows, layout):
            to[rank, :, :, c.begin:c.end] = of[:, :, c.first:c.last + 1]
    return result


def _wide(*tensors: Tensor) -> Sequence[Tensor]:
    """The same memory in elements of 16 bytes, where it can be, as PyTorch copies slices element by element."""
    if all(x.numel() and x.is_contiguous() and x.shape[-1] * x.element_size() % 16 == x.data_ptr() % 16 == 0 for x in tensors):
        return [x.view(torch.complex128) for x in tensors]
    return tensors


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

"""Caches: where sequences are, new rows and their rotation."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._cache import append
from .._tensors import KV_TYPES, describe
from .._transforms import refuse_lost_gradients
from .._words import renamed
from ..errors import Error, InvalidArgument, Unsupported
from ._attend import Options, attend, places, with_batch
from .rotary import angles_at, turned


class New(NamedTuple):
    """New rows of a cache, [b, new, hkv, d], or with cu_seqlens [all rows, hkv, d], and their rotation."""

    k: Tensor
    v: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    cu_seqlens: Tensor | None = None
    first: Tensor | None = None  # the position of a sequence's first new row; None: its place


class Place(NamedTuple):
    """Where in a cache the sequences are."""

    table: Tensor | None
    slots: Tensor | None = None
    name: str = "block_table"  # the caller's, of the table
    name_of_lengths: str = "cache_seqlens"

    def words(self) -> dict[str, str]:
        """The caller's, by attention()'s."""
        name = self.name if self.slots is None else "cache_batch_idx"
        return {"page_table": name, "kv_lengths": self.name_of_lengths}

    def named(self) -> dict[str, Any]:
        """As attention() has it."""
        if self.table is not None and self.slots is not None:
            raise InvalidArgument(
                f"{self.name} and cache_batch_idx are both given: a {self.name}'s rows are in the order of q already; select "
                f"them, as in {self.name}[cache_batch_idx]."
            )
        for name, table, dims in ((self.name, self.table, 2), ("cache_batch_idx", self.slots, 1)):
            if table is not None and (table.dim() != dims or table.dtype != torch.int32):
                raise InvalidArgument(
                    f"{name} is {describe(table)}: it must be int32 "
                    f"[batch{', pages of the longest' * (dims - 1)}]."
                )
        table = self.slots if self.table is None else self.table
        return {"cache": True} if table is None else {"page_table": table}

    def lengths(self, k_cache: Tensor, given: int | Tensor | None, batch: int, has_new: bool) -> Tensor:
        """How many keys each sequence has before new ones, int32 [batch]."""
        if isinstance(given, Tensor):
            if tuple(given.shape) != (batch,) or given.is_floating_point() or given.dtype == torch.bool:
                raise InvalidArgument(
                    f"cache_seqlens is {describe(given)}: it must be a number, or int32 [{batch}]."
                )
            return given.to(device=k_cache.device, dtype=torch.int32)
        self.named()  # which refuses wrong tables
        if given is None:
            if has_new:
                raise InvalidArgument(
                    "k is given without cache_seqlens: say from which row of the cache on "
                    "it is to be written."
                )
            given = k_cache.shape[1] * (1 if self.table is None else self.table.shape[1])
        # Not torch.as_tensor(), for which torch.compile makes a graph for each number.
        return torch.full((batch,), given, dtype=torch.int32, device=k_cache.device)


def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: New | None,
    lengths: Tensor,
    place: Place,
    options: Options,
    wants_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Any]:
    """O and LSE, or None, of q [b, s, h, d], or with cu_seqlens_q [all rows, h, d], in the layout of q. out: where O goes."""
    where = place.named()
    refuse_lost_gradients("a cache", q, k_cache, v_cache, *(() if new is None else new[:2]))
    k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    q = q.transpose(1, 2) if cu_seqlens_q is None else with_batch(q)
    if cu_seqlens_q is not None:
        more.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    if out is not None:
        more["out"] = out.transpose(1, 2) if cu_seqlens_q is None else with_batch(out)
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        try:
            if new is not None:
                moving = options.causal or options.has_window()
                table = where.get("page_table")
                q, lengths = _append(q, k_cache, v_cache, new, lengths, table, moving, cu_seqlens_q)
            o, lse = attend(q, k_cache, v_cache, options, wants_lse, kv_lengths=lengths, **where, **more)
        except Error as error:
            raise renamed(error, place.words()) from None
        if out is not None:
            o = out
        else:
            o = o.transpose(1, 2) if cu_seqlens_q is None else o.squeeze(0).transpose(0, 1)
        return o, lse if cu_seqlens_q is None or not wants_lse else lse.squeeze(0)


def _append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: New,
    lengths: Tensor,
    table: Tensor | None,
    moving: bool,
    cu_seqlens_q: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Stores the new rows. Returns q, rotated, and the lengths with them. moving: queries have positions."""
    if new.v is None:
        raise InvalidArgument("k is given without v: give both.")
    if k_cache.dtype in KV_TYPES:
        raise Unsupported(
            "k and v are given with a cache of 8 bits: store them by flashjit.append(), which "
            "divides by its scales."
        )
    packed = new.cu_seqlens is not None
    k, v = (with_batch(x) if packed else x.transpose(1, 2) for x in (new.k, new.v))
    after = lengths + (k.shape[2] if new.cu_seqlens is None else new.cu_seqlens.diff())
    rope: dict[str, Any] = {"cu_seqlens_q": new.cu_seqlens} if packed else {}
    if new.cos is not None or new.sin is not None:
        rope.update(_rotation(new, k_cache, table))
        first = lengths if new.first is None else new.first
        if new.first is not None:
            rope["positions"] = _positions(first, k.shape[2], new.cu_seqlens, True)
        moving = moving or not packed and q.shape[2] == 1
        if moving and new.cu_seqlens is cu_seqlens_q and q.shape[2] == k.shape[2]:
            rope["q"] = q  # each query is at a new key
        else:
            at = _positions(first, q.shape[2], cu_seqlens_q, moving)
            cos, sin = (x[:, None] for x in angles_at(rope["cos"], rope["sin"], at))
            q = turned(q, cos, sin, new.interleaved)
    rotated = append(k, v, k_cache, v_cache, kv_lengths=after, page_table=table, **rope)
    return (q if rotated is None else rotated), after


def _positions(first: Tensor, rows: int, cu_seqlens: Tensor | None, moving: bool) -> Tensor:
    """int32 positions of rows, [b, rows] or [1, all rows], in sequences that begin at `first`."""
    if cu_seqlens is None:
        return first[:, None] + torch.arange(rows, dtype=torch.int32, device=first.device) * int(moving)
    sequence, place = places(cu_seqlens, rows)
    return (first[sequence] + place * int(moving)).int()[None]


def _rotation(new: New, k_cache: Tensor, table: Tensor | None) -> dict[str, Any]:
    if new.cos is None or new.sin is None:
        raise InvalidArgument(
            f"rotary_{'sin' if new.cos is None else 'cos'} is given alone: give both tables."
        )
    rows = k_cache.shape[2]
    if (table is None or table.dim() == 1) and new.cos.shape[0] < rows:
        raise InvalidArgument(
            f"rotary_cos has {new.cos.shape[0]} positions and the cache {rows} rows: give at least as many."
        )
    cos, sin = (x if x.dtype == torch.float32 else x.to(k_cache.dtype) for x in (new.cos, new.sin))
    return {"cos": cos, "sin": sin, "interleaved": new.interleaved}

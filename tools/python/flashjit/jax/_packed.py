"""Packed sequences: where each begins, and how long they may be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import InvalidArgument


def packed(
    starts_q: Any, starts_kv: Any, longest: tuple[Any, Any], rows: tuple[int, int]
) -> tuple[tuple[Any, Any], tuple[int, int] | None]:
    """cu_seqlens of queries and keys, and the most rows of a sequence; (None, None), None where nothing is packed."""
    names = ("max_seqlen_q", "max_seqlen_kv")
    if starts_q is None:
        others = {"cu_seqlens_kv": starts_kv, **dict(zip(names, longest))}
        for name, value in others.items():
            if value is not None:
                raise InvalidArgument(f"{name} is given without cu_seqlens_q: it goes with packed sequences.")
        return (None, None), None
    starts = [_starts("cu_seqlens_q", starts_q)]
    starts.append(starts[0] if starts_kv is None else _starts("cu_seqlens_kv", starts_kv))
    if starts[0].shape != starts[1].shape:
        raise InvalidArgument(
            f"cu_seqlens_q is {list(starts[0].shape)} and cu_seqlens_kv is {list(starts[1].shape)}: both have an entry more than "
            "there are sequences."
        )
    if starts_kv is None and rows[0] != rows[1]:
        raise InvalidArgument(f"cu_seqlens_kv is missing: q has {rows[0]} rows and k has {rows[1]}.")
    if starts_kv is None and longest[1] is None:
        longest = (longest[0], longest[0])
    return (starts[0], starts[1]), (
        _most(names[0], longest[0], rows[0]),
        _most(names[1], longest[1], rows[1]),
    )


def check_packed(batch: int, **others: Any) -> None:
    if batch != 1:
        raise InvalidArgument(
            f"q has batch {batch} and cu_seqlens_q is given: packed sequences are [tokens, heads, head_dim], or one entry of a batch."
        )
    for name, value in others.items():
        if value is not None and value is not False:
            raise InvalidArgument(
                f"{name} and cu_seqlens_q are both given: packed sequences have the lengths that cu_seqlens say; leave one out."
            )


def _starts(name: str, starts: Any) -> Any:
    starts = jnp.asarray(starts)
    if starts.dtype.kind not in "iu" or starts.ndim != 1 or starts.shape[0] < 2:
        raise InvalidArgument(
            f"{name} is {starts.dtype} {list(starts.shape)}: it must be int32 [sequences + 1], where each sequence begins and the "
            "last one ends."
        )
    return starts.astype("int32")


def _most(name: str, given: Any, rows: int) -> int:
    if given is None:
        return rows
    if isinstance(given, jax.core.Tracer) or not isinstance(given, int) or given < 0:
        raise InvalidArgument(
            f"{name} is {given!r}: give a Python number, at least the rows of the longest sequence."
        )
    return min(given, rows)

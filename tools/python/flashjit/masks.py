"""Masks that serving asks for, by name: `flashjit.attention(q, k_pages, v_pages, ..., mask_mod=flashjit.masks.tree(parents))`.

Each function returns a Program: make it once for a step, and give it to every layer's attention(). Tensors are read at the call,
on the device, so that CUDA graphs replay with their current values. The last query is at the last key. Over a cache, where blocks
share out the keys, these masks need no tile lists: the keys before the queries cost as much as without a mask.
"""

from __future__ import annotations

from typing import Any

from ._checks import check_number
from .errors import InvalidArgument, WrongType
from .programs import Program, trace

_LAST = "seqlen_kv - seqlen_q"
_CAUSAL = f"kv <= q + {_LAST}"
MOST_DRAFTS = 64  # the bits of an int64


def chunked(size: int) -> Program:
    """Chunked local attention: keys of the query's own chunk of `size` positions, up to the query."""
    check_number("size", size)
    if not 1 <= size <= 2**30 or size != int(size):
        raise InvalidArgument(f"size is {size}: give the positions of a chunk, from 1 to 2^30.")
    at = f"q + {_LAST}"
    return trace(None, f"{_CAUSAL} && kv / {int(size)} == ({at}) / {int(size)}")


def prefix(length: Any) -> Program:
    """Causal, and every query sees the first length[b] keys. length: int32 [batch]."""
    _check_ints("length", length, 1)
    return trace(None, f"{_CAUSAL} || kv < length[b]", {"length": length})


def mm_prefix(first: Any, last: Any) -> Program:
    """Causal, and besides keys first[b, q] <= kv < last[b, q], such as the keys of the query's own picture.

    first, last: int32 [batch, queries]; where last <= first there are none.
    """
    _check_ints("first", first, 2)
    _check_ints("last", last, 2)
    text = f"{_CAUSAL} || (mm_first[b, q] <= kv && kv < mm_last[b, q])"
    return _of_queries(first, trace(None, text, {"mm_first": first, "mm_last": last}))


def tree(parents: Any = None, *, ancestors: Any = None) -> Program:
    """Drafts in a tree: each query sees the keys before all queries, its ancestors among them, and itself.

    parents: a tensor of ints [batch, queries], of each query the number of its parent among them, or -1; at most 64 queries.
    ancestors: in its place int64 [batch, queries], whose bit n says whether a query sees the n-th of them, itself included.
    """
    if (parents is None) == (ancestors is None):
        raise InvalidArgument("give the tree's parents, or the bits of its ancestors: one of the two.")
    if ancestors is None:
        ancestors = ancestors_of(parents)
    _check_ints("ancestors", ancestors, 2, "int64")
    _check_drafts("ancestors", ancestors)
    own = f"kv - ({_LAST})"
    text = f"{own} < 0 || (ancestors[b, q] >> ({own}) & 1) == 1"
    return _of_queries(ancestors, trace(None, text, {"ancestors": ancestors}))


def ancestors_of(parents: Any) -> Any:
    """The bits that tree() takes, of a PyTorch tensor [batch, queries] of parents. Nothing waits for the device."""
    import torch

    ints = (torch.int64, torch.int32, torch.int16, torch.int8)
    if not isinstance(parents, torch.Tensor) or parents.dim() != 2 or parents.dtype not in ints:
        raise WrongType(
            "parents is no tensor of ints [batch, queries]: give one, with -1 where there is no parent."
        )
    _check_drafts("parents", parents)
    queries = parents.shape[1]
    if parents.device.type == "cpu":
        _check_parents(parents)
    bits = (
        torch.ones((), dtype=torch.int64, device=parents.device)
        << torch.arange(queries, device=parents.device)
    ).expand(parents.shape)
    above = parents.long()  # 1, 2, 4, ... generations up
    for _ in range(max(queries - 1, 0).bit_length()):
        there = above >= 0
        at = above.clamp(0, max(queries - 1, 0))
        bits = bits | torch.where(there, bits.gather(1, at), 0)
        above = torch.where(there, above.gather(1, at), -1)
    if parents.device.type == "cpu" and bool((above >= 0).any()):
        raise InvalidArgument("parents has a circle: follow them from a query, and -1 must come.")
    return bits.contiguous()


def _check_parents(parents: Any) -> None:
    queries = parents.shape[1]
    if bool(((parents >= queries) | (parents < -1)).any()):
        raise InvalidArgument(
            f"parents names a query from {queries} on, or below -1: give 0 to {queries - 1}, or -1 for none."
        )


def positions(q_positions: Any, kv_positions: Any) -> Program:
    """Keys up to the query by positions that are given, in any order: int32 [batch, queries] and [batch, keys]."""
    _check_ints("q_positions", q_positions, 2)
    _check_ints("kv_positions", kv_positions, 2)
    names = {"q_positions": q_positions, "kv_positions": kv_positions}
    return _of_queries(q_positions, trace(None, "kv_positions[b, kv] <= q_positions[b, q]", names))


def interleaved(q_positions: Any, ranks: int, rank: int) -> Program:
    """Decode context parallelism: this rank has every ranks-th key, key kv at position kv * ranks + rank.

    q_positions: int32 [batch, queries]. Join the ranks' results with merge().
    """
    _check_ints("q_positions", q_positions, 2)
    for name, value in (("ranks", ranks), ("rank", rank)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise WrongType(f"{name} is {value!r}: give an int.")
    if not 0 <= rank < ranks:
        raise InvalidArgument(f"rank is {rank} of {ranks} ranks: give 0 to ranks - 1.")
    text = "kv * ranks + rank <= q_positions[b, q]"
    names = {"q_positions": q_positions, "ranks": ranks, "rank": rank}
    return _of_queries(q_positions, trace(None, f"ranks: int; rank: int; {text}", names))


def causal_if(flags: Any) -> Program:
    """Causal in the sequences whose flag is not 0; in the others every pair attends. flags: int32 [batch]."""
    _check_ints("flags", flags, 1)
    return trace(None, f"flags[b] == 0 || {_CAUSAL}", {"flags": flags})


def _of_queries(rows: Any, program: Program) -> Program:
    """The program, which says how many queries its tensors [batch, queries] have."""
    program.queries = int(rows.shape[1])
    return program


def _check_ints(name: str, tensor: Any, rank: int, dtype: str = "int32") -> None:
    found = str(getattr(tensor, "dtype", "")).rpartition(".")[2]
    if found != dtype or len(getattr(tensor, "shape", ())) != rank:
        sizes = "[batch]" if rank == 1 else "[batch, positions]"
        given = f"{found} {list(tensor.shape)}" if found else repr(tensor)
        raise WrongType(f"{name} is {given}: give a tensor {dtype} {sizes}.")


def _check_drafts(name: str, tensor: Any) -> None:
    if tensor.shape[1] > MOST_DRAFTS:
        raise InvalidArgument(
            f"{name} is of {tensor.shape[1]} queries: a tree has at most {MOST_DRAFTS}; capture a tensor of pairs, "
            "visible[b, q, kv], in a mask_mod of your own for more."
        )

"""What all of FlashInfer's functions share: layouts, pages, and one call of attention()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._attention import attention
from .._tensors import KV_TYPES, describe, say_once
from .._transforms import refuse_lost_gradients
from ..errors import InvalidArgument, WrongType
from ..flash_attn._attend import with_batch
from ._scores import LOG2E, Scales, Scores, call, of_heads


class Rows(NamedTuple):
    """Where Q's rows are: packed, or the same number in each sequence."""

    cu_seqlens: Tensor | None = None
    longest: int = 1
    total: int = 0

    def of(self, q: Tensor) -> Tensor:
        """[1, hq, all rows, d], or [sequences, hq, rows, d], of [all rows, hq, d]."""
        if self.cu_seqlens is not None:
            return with_batch(q)
        if not self.longest:  # one sequence, without rows
            return q[None].transpose(1, 2)
        return q.unflatten(0, (-1, self.longest)).transpose(1, 2)

    def named(self) -> dict[str, Any]:
        if self.cu_seqlens is None:
            return {}
        return {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self.longest}

    def lse(self, lse: Tensor) -> Tensor:
        """[hq, all rows] of what attention() returns."""
        return lse.transpose(0, 1).flatten(1)


class Sizes(NamedTuple):
    """What plan() was told of the tensors that run() takes. None: it was not told."""

    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    page_size: int | None = None

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Compares q [rows, hq, d] and k, v [.., hkv, rows, d] with plan()'s arguments, in their words."""
        found = {
            "num_qo_heads": (q.shape[1], self.heads_q, "q", q),
            "num_kv_heads": (k.shape[-3], self.heads_kv, "K", k),
            "num_kv_heads of V": (v.shape[-3], self.heads_kv, "V", v),
            "head_dim of Q": (q.shape[2], self.head_dim, "q", q),
            "head_dim of K": (k.shape[-1], self.head_dim, "K", k),
            "head_dim of V": (v.shape[-1], self.head_dim_v, "V", v),
        }
        if self.page_size is not None:
            found["page_size"] = (k.shape[-2], self.page_size, "K", k)
        for name, (given, planned, tensor, x) in found.items():
            if given != planned:
                raise InvalidArgument(
                    f"{tensor} is {describe(x)}{'' if x is q else ', with heads before rows'}: its {name.split()[0]} is "
                    f"{given}, but plan() was given {planned}: plan again, or give tensors of these sizes (and kv_layout)."
                )


def sizes(heads_q: Any, heads_kv: Any, head_dim: Any, head_dim_v: Any, *page_size: Any) -> Sizes:
    """plan()'s numbers, checked. head_dim_v: None: as head_dim. page_size: left out where there are no pages."""
    named = {"num_qo_heads": heads_q, "num_kv_heads": heads_kv, "head_dim": head_dim}
    if head_dim_v is not None:
        named["head_dim_vo"] = head_dim_v
    named.update({"page_size": size for size in page_size})
    for name, value in named.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise WrongType(f"{name} is {value!r}: give an int.")
        if value < 1:
            raise InvalidArgument(f"{name} is {value}: it must be at least 1.")
    if heads_q % heads_kv:
        raise InvalidArgument(
            f"num_qo_heads is {heads_q} and num_kv_heads {heads_kv}: each head of K and V needs the same number of heads of q."
        )
    return Sizes(heads_q, heads_kv, head_dim, head_dim if head_dim_v is None else head_dim_v, *page_size)


def check_tensor(name: str, given: Any, dims: str) -> Tensor:
    """dims: the names of its dimensions, such as "rows, heads, d"."""
    if not isinstance(given, Tensor) or given.dim() != dims.count(",") + 1:
        raise WrongType(f"{name} is {describe(given)}: give a tensor [{dims}].")
    return given


def check_ints(name: str, given: Any, least: int = 0) -> Tensor:
    """A tensor of ints in one dimension, of `least` elements or more."""
    if not isinstance(given, Tensor) or given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise WrongType(f"{name} is {describe(given)}: give a tensor of int32 in one dimension.")
    if given.numel() < least:
        raise InvalidArgument(
            f"{name} has {given.numel()} elements: it needs {least}, one more than sequences."
        )
    return given


def check_table(name: str, given: Any, sequences: int) -> Tensor:
    """Pages of each sequence."""
    if (
        not isinstance(given, Tensor)
        or given.dtype != torch.int32
        or given.dim() != 2
        or given.shape[0] != sequences
    ):
        raise (InvalidArgument if isinstance(given, Tensor) else WrongType)(
            f"{name} is {describe(given)}: it must be int32 [{sequences}, pages of the longest], a row for each sequence."
        )
    return given


def flattened(name: str, memory: Tensor) -> Tensor:
    """[all rows, heads, d] of memory that is written to."""
    rows = memory.reshape(-1, *memory.shape[-2:])
    if rows.data_ptr() != memory.data_ptr():
        raise InvalidArgument(f"{name} has the strides {list(memory.stride())}: give rows one after another.")
    return rows


def heads_first(x: Tensor, kv_layout: str) -> Tensor:
    """K or V with its heads before its rows: [.., hkv, rows, d]."""
    return x.transpose(-3, -2) if kv_layout == "NHD" else x


def check_layout(kv_layout: str) -> str:
    if kv_layout not in ("NHD", "HND"):
        raise InvalidArgument(f"kv_layout is {kv_layout!r}: give NHD or HND.")
    return kv_layout


def unpacked(paged_kv_cache: Any, kv_layout: str) -> tuple[Tensor, Tensor]:
    """K's and V's pages, [pages, hkv, rows of a page, d], of a pair, or of one tensor with both; pages of one row may be without
    that dimension."""
    if isinstance(paged_kv_cache, Tensor):
        if paged_kv_cache.dim() not in (4, 5) or paged_kv_cache.shape[1] != 2:
            raise InvalidArgument(
                f"paged_kv_cache is {describe(paged_kv_cache)}: give (k_cache, v_cache), or one tensor [pages, 2, ..]."
            )
        pair = paged_kv_cache.unbind(1)
    elif isinstance(paged_kv_cache, (tuple, list)) and len(paged_kv_cache) == 2:
        pair = tuple(paged_kv_cache)
    else:
        raise WrongType(
            f"paged_kv_cache is {describe(paged_kv_cache)}: give (k_cache, v_cache), or one tensor [pages, 2, ..]."
        )
    rows = 1 if kv_layout == "NHD" else 2
    dims = "pages, rows of a page, hkv, d" if kv_layout == "NHD" else "pages, hkv, rows of a page, d"
    k, v = (x.unsqueeze(rows) if isinstance(x, Tensor) and x.dim() == 3 else x for x in pair)
    k, v = (check_tensor(f"{name}_cache", x, dims) for name, x in zip("kv", (k, v)))
    return heads_first(k, kv_layout), heads_first(v, kv_layout)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    scores: Scores,
    scales: Scales,
    out_dtype: torch.dtype,
    out: Tensor | None,
    wants_lse: bool,
    **more: Any,
) -> tuple[Tensor, Any]:
    """O [all rows, hq, d], and LSE [hq, all rows], natural, or None. k, v: [.., hkv, rows, d]. more: attention()'s."""
    refuse_lost_gradients("flashjit.flashinfer", q, k, v)
    with torch.no_grad():
        if scores.rope is not None and k.dtype in KV_TYPES and q.dtype not in KV_TYPES:
            say_once(
                "pos_encoding_mode is ROPE_LLAMA: K and V of 8 bits are converted to the type of q in each call."
            )
            k, v = k.to(q.dtype), v.to(q.dtype)  # which has all codes; a program of rows takes no codes
        if out is not None and out.shape != (*q.shape[:2], v.shape[3]):
            raise InvalidArgument(
                f"out is {describe(out)}: it must be {[*q.shape[:2], v.shape[3]]}, the rows and heads of q and the columns of V."
            )
        given = call(q4 := rows.of(q), k, v, scores, scales, out_dtype)
        direct = out is not None and out.dtype == _natural(q.dtype, given)
        found = attention(
            q4,
            k,
            v,
            return_lse=wants_lse,
            out=rows.of(out) if direct and out is not None else None,
            **rows.named(),
            **given,
            **more,
        )
        o4, lse = found if wants_lse else (found, None)
        o = out if direct and out is not None else o4.transpose(1, 2).flatten(0, 1)
        if scales.v is not None and k.dtype not in KV_TYPES and not _is_one(scales.v):
            factor = scales.v
            if isinstance(factor, Tensor) and factor.numel() != 1:
                heads = k.shape[-3]
                factor = of_heads("v", factor, heads).repeat_interleave(q.shape[1] // heads)[:, None]
            o = o.mul_(factor)
        if out is not None and not direct:
            o = out.copy_(o)
        elif o.dtype != out_dtype:
            o = o.to(out_dtype)
    return o, None if lse is None else rows.lse(lse)


def _natural(q: torch.dtype, given: dict[str, Any]) -> torch.dtype:
    """The type of O."""
    found = given.get("out_dtype", q)
    return found if isinstance(found, torch.dtype) else q


def _is_one(scale: Any) -> bool:
    return not isinstance(scale, Tensor) and scale == 1


def results(found: tuple[Tensor, Any], lse: Tensor | None, wants_lse: bool = True) -> Any:
    """O, or with wants_lse O and FlashInfer's LSE, [all rows, hq], of base 2, which is also written into a given lse."""
    o, natural = found
    if natural is None:
        return o
    binary = (natural * LOG2E).transpose(0, 1)
    check_lse(lse, binary.shape, "all rows, hq")
    binary = binary.contiguous() if lse is None else lse.copy_(binary)
    return (o, binary) if wants_lse else o


def check_lse(lse: Tensor | None, size: Sequence[int], dims: str) -> None:
    """The caller's memory for LSE."""
    if lse is not None and (tuple(lse.shape) != tuple(size) or lse.dtype != torch.float32):
        raise InvalidArgument(f"lse is {describe(lse)}: it must be float32 {list(size)}, [{dims}].")


class Pages(NamedTuple):
    """The pages of all sequences, as attention() has them."""

    table: Tensor  # int32 [sequences, pages of the longest]
    lengths: Tensor  # int32 [sequences]

    def named(self) -> dict[str, Any]:
        return {"page_table": self.table, "kv_lengths": self.lengths}


def pages_of(indptr: Tensor, indices: Tensor, lengths: Tensor, width: int, device: torch.device) -> Pages:
    """A table of one list of pages, in which sequence i has the entries indptr[i] to indptr[i + 1]. width: of the longest."""
    first = indptr[:-1].to(device=device, dtype=torch.int64)
    places = first[:, None] + torch.arange(max(width, 1), device=device)
    indices = indices.to(device=device, dtype=torch.int32)
    if indices.numel() == 0:
        table = torch.zeros(places.shape, dtype=torch.int32, device=device)
    else:
        table = indices[places.clamp_(max=indices.numel() - 1)]
    return Pages(table, lengths.to(device=device, dtype=torch.int32))

"""FlashInfer's functions for rows in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._cache import append
from .._pages import check_last_page
from .._tensors import KV_TYPES, describe
from .._transforms import refuse_lost_gradients
from ..errors import InvalidArgument
from ..flash_attn._attend import places, with_batch
from ._rows import check_ints, check_layout, check_tensor, unpacked


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """How many keys each sequence has, int32 [sequences], of its pages and of the rows in its last one, on kv_indptr's device."""
    check_ints("kv_last_page_len", kv_last_page_len)
    check_ints("kv_indptr", kv_indptr, kv_last_page_len.numel() + 1)
    kv_indptr = kv_indptr[: kv_last_page_len.numel() + 1]
    if kv_indptr.is_cpu and kv_last_page_len.is_cpu:
        check_last_page(kv_last_page_len, kv_indptr.diff(), page_size)
    return (kv_indptr.diff() - 1).clamp_(min=0) * page_size + kv_last_page_len.to(kv_indptr.device)


def planned_lengths(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """get_seq_lens(), and 0 for sequences without pages, whatever kv_last_page_len says of these."""
    lengths = get_seq_lens(kv_indptr, kv_last_page_len, page_size)
    return lengths.masked_fill_(kv_indptr[: lengths.numel() + 1].diff() == 0, 0)


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sequence of each new row and its position there, int32 [nnz]: the last ones of seq_lens, which count them. Rows past
    append_indptr's end, as a CUDA graph has them for other batches, have the sequence -1 and the position 0."""
    if append_indptr.is_cpu and int(append_indptr[-1]) > nnz:
        raise InvalidArgument(
            f"nnz is {nnz}, but append_indptr ends at {int(append_indptr[-1])}: give nnz={int(append_indptr[-1])}, or more."
        )
    if seq_lens.numel() != append_indptr.numel() - 1:
        raise InvalidArgument(
            f"seq_lens is of {seq_lens.numel()} sequences and append_indptr of {append_indptr.numel() - 1}: they must be of the same ones."
        )
    sequence, place = places(append_indptr, nnz)
    found = seq_lens[sequence] - append_indptr.diff()[sequence] + place
    past = torch.arange(nnz, device=found.device) >= append_indptr[-1]
    results = (sequence.int().masked_fill_(past, -1), found.int().masked_fill_(past, 0))
    given = (batch_indices, positions)
    return tuple(x if y is None else y.copy_(x) for x, y in zip(results, given))  # type: ignore[return-value]


def slots_of(
    batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor, page_size: int
) -> Tensor:
    """Where new rows go in the pool, int64: page * page_size + row."""
    check_ints("batch_indices", batch_indices)
    check_ints("kv_indices", kv_indices)
    check_ints("kv_indptr", kv_indptr)
    position = check_ints("positions", positions).long()
    if batch_indices.shape != position.shape:
        raise InvalidArgument(
            f"batch_indices has {batch_indices.numel()} numbers and positions {position.numel()}: give both for each new row."
        )
    if batch_indices.is_cpu and position.is_cpu and kv_indptr.is_cpu:
        _check_positions(batch_indices, position, kv_indptr.diff(), page_size)
    entry = kv_indptr[batch_indices.long()] + position // page_size
    return kv_indices[entry.long()].long() * page_size + position % page_size


def _check_positions(sequences: Tensor, positions: Tensor, pages: Tensor, page_size: int) -> None:
    """That each new row has a page of its own sequence."""
    counts = pages.tolist()
    for sequence, position in zip(sequences.tolist(), positions.tolist()):
        own = counts[sequence] if 0 <= sequence < len(counts) else 0
        if not 0 <= position < own * page_size:
            raise InvalidArgument(
                f"a new row has the position {position} of sequence {sequence}, which has {own} pages of {page_size}: give it pages, "
                "or another position."
            )


def _check_rows(name: str, rows: Tensor, positions: Tensor) -> None:
    if rows.shape[0] != positions.numel():
        raise InvalidArgument(
            f"{name} has {rows.shape[0]} rows, but positions {positions.numel()} numbers: give one for each new row."
        )


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Any,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Stores append_key and append_value, [nnz, hkv, d], into the pages of paged_kv_cache."""
    k_cache, v_cache = unpacked(paged_kv_cache, check_layout(kv_layout))
    check_tensor("append_key", append_key, "nnz, hkv, d")
    check_tensor("append_value", append_value, "nnz, hkv, d")
    for name, rows, cache in (("append_key", append_key, k_cache), ("append_value", append_value, v_cache)):
        _check_rows(name, rows, positions)
        if rows.shape[1:] != (cache.shape[1], cache.shape[3]):
            raise InvalidArgument(
                f"{name} is {describe(rows)}: it must be [nnz, {cache.shape[1]}, {cache.shape[3]}], as the cache is."
            )
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[2])
    if append_key.dtype in KV_TYPES or k_cache.dtype in KV_TYPES:
        _store(append_key, k_cache, slots)
        _store(append_value, v_cache, slots)
        return
    refuse_lost_gradients("append_paged_kv_cache()", append_key, append_value)
    with torch.no_grad():
        append(with_batch(append_key), with_batch(append_value), k_cache, v_cache, slots=slots)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Stores append_ckv [nnz, 512] and append_kpe [nnz, 64] into pages [pages, rows of a page, columns]. None: not."""
    given = (("append_ckv", append_ckv, ckv_cache), ("append_kpe", append_kpe, kpe_cache))
    for name, rows, cache in given:
        if cache is not None:
            check_tensor(name, rows, "nnz, columns")
            _check_rows(name, rows, positions)
            if rows.shape[1] != cache.shape[2]:
                raise InvalidArgument(
                    f"{name} is {describe(rows)}: it must be [nnz, {cache.shape[2]}], as the cache is."
                )
            slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, cache.shape[1])
            _store(rows[:, None], cache[:, None], slots)


def _store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Rows [n, heads, d] as they are, bit by bit, into pages [pages, heads, rows of a page, d]."""
    if rows.dtype != cache.dtype:
        raise InvalidArgument(
            f"New rows are {rows.dtype} and the cache is {cache.dtype}: they are stored as they are, so convert them to its type."
        )
    if cache.dtype in KV_TYPES:
        rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
    cache.transpose(1, 2)[slots // cache.shape[2], slots % cache.shape[2]] = rows.detach()

"""Page tables in CSR, as FlashInfer and MLC have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._tensors import describe
from .errors import InvalidArgument, WrongType


def read_csr(table: Sequence[Any], kv_lengths: Tensor | None, page_size: int) -> tuple[Tensor, Tensor, Any]:
    """indptr, indices and kv_lengths of attention()'s page_table where that is a tuple."""
    names = ("indptr", "indices", "last_page_len")
    if len(table) not in (2, 3):
        raise InvalidArgument(
            f"page_table has {len(table)} parts: give (indptr, indices), or (indptr, indices, last_page_len)."
        )
    for name, part in zip(names, table):
        if not isinstance(part, Tensor):
            raise WrongType(f"page_table's {name} is a {type(part).__name__}: give an int32 tensor.")
    indptr, indices = table[:2]
    if len(table) == 2:
        _check_room(indptr, indices, kv_lengths, page_size)
        return indptr, indices, kv_lengths
    last = table[2]
    if kv_lengths is not None:
        raise InvalidArgument(
            "kv_lengths and page_table's last_page_len are both given: they say the same, so leave one out."
        )
    if indptr.dim() != 1 or last.dtype != torch.int32 or last.shape != (max(indptr.shape[0] - 1, 0),):
        raise InvalidArgument(
            f"page_table's last_page_len is {describe(last)}, and indptr {describe(indptr)}: they must be int32 "
            "[sequences] and [sequences + 1]."
        )
    pages = indptr.diff()
    if last.is_cpu and pages.is_cpu and not torch.compiler.is_compiling():
        check_last_page(last, pages, page_size)
    lengths = torch.where(pages > 0, (pages - 1) * page_size + last, 0).to(torch.int32)
    _check_room(indptr, indices, lengths, page_size)
    return indptr, indices, lengths


def check_last_page(last: Tensor, pages: Tensor, page_size: int) -> None:
    """On the CPU: 1 to page_size rows in the last page of each sequence that has pages."""
    wrong = (pages > 0) & ((last < 1) | (last > page_size))
    if bool(wrong.any()):
        raise InvalidArgument(
            f"last_page_len has {int(last[wrong][0])} rows, but a page has {page_size}: give 1 to {page_size} for each "
            "sequence with pages."
        )


def _check_room(indptr: Tensor, indices: Tensor, lengths: Any, page_size: int) -> None:
    """On the CPU alone, where values can be read."""
    if indptr.device.type != "cpu" or indptr.dim() != 1 or torch.compiler.is_compiling():
        return
    pages = indptr.diff()
    if bool((pages < 0).any()):
        raise InvalidArgument(
            "page_table's indptr falls: give where each sequence's entries begin, in order, and the end."
        )
    if pages.numel() and int(indptr[-1]) > indices.numel():
        raise InvalidArgument(
            f"page_table's indptr ends at {int(indptr[-1])}, but indices has {indices.numel()} entries: give as many."
        )
    if not isinstance(lengths, Tensor) or lengths.shape != pages.shape or lengths.device.type != "cpu":
        return
    if bool(((lengths < 0) | (lengths > pages * page_size)).any()):
        raise InvalidArgument(
            "a sequence has more keys than its own pages have room for: give it pages, or a smaller length."
        )


def read_table(table: Any, kv_lengths: Any, k: Tensor) -> tuple[Any, Any, Any, int]:
    """attention()'s page_table: indptr or None, table or indices, kv_lengths, and the rows of a page, 0 for slots."""
    if isinstance(table, tuple) or (isinstance(table, list) and any(isinstance(x, Tensor) for x in table)):
        return *read_csr(table, kv_lengths, k.shape[2]), k.shape[2]
    return None, table, kv_lengths, k.shape[2] if isinstance(table, Tensor) and table.dim() == 2 else 0


def most_keys(starts: Any, table: Any, page_size: int, k: Tensor) -> int:
    """How many keys a sequence may have, where max_seqlen_kv is left out."""
    if starts is not None:
        raise InvalidArgument(
            "block_mask comes with page_table=(indptr, indices) and no max_seqlen_kv: give the most keys that a "
            "sequence may have."
        )
    return int(table.shape[-1]) * page_size if table is not None and page_size else k.shape[2]

"""Keys and values of pages as packed ones: for what kernels do to packed keys alone, as they load them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._tensors import say_once
from ..flash_attn._attend import places, with_batch
from ._rows import Pages


class Packed(NamedTuple):
    """Where the keys of all sequences are, one after another."""

    page: Tensor  # int64 [keys, or as many as there is room for]
    row: Tensor
    cu_seqlens: Tensor  # int32 [sequences + 1]
    longest: int

    def of(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """[1, hkv, keys, d] each, of pages [pages, hkv, rows, d], and attention()'s arguments for them."""
        say_once(
            "pos_encoding_mode is ROPE_LLAMA, and K is in pages: run() copies K and V of its sequences. To avoid the copy, rotate "
            "keys once, when they are stored (flashjit.append() does it in the same launch), and give NONE."
        )
        k, v = (with_batch(x.transpose(1, 2)[self.page, self.row]) for x in (k, v))
        return k, v, {"cu_seqlens_kv": self.cu_seqlens, "max_seqlen_kv": self.longest}


def packed_of(pages: Pages, page_size: int, room: int | None) -> Packed:
    """room: how many keys to allocate for, if a captured graph reads other keys later; None: the number of keys now."""
    longest = pages.table.shape[1] * page_size
    ends = torch.nn.functional.pad(pages.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    keys = int(ends[-1]) if room is None else room
    if not len(pages.lengths):
        nowhere = torch.zeros(keys, dtype=torch.int64, device=ends.device)
        return Packed(nowhere, nowhere, ends, longest)
    sequence, place = places(ends, keys)
    place = place.clamp(max=longest - 1)  # padding up to the room, not keys
    page = pages.table[sequence.long(), place // page_size].long()
    return Packed(page, place % page_size, ends, longest)

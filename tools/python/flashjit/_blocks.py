"""FlexAttention's BlockMask as a block map and a mask program, which mean together what it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._problem import BlockMap
from .errors import InvalidArgument

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_STEP = 16  # of the sizes of a block map's blocks
_PARTIAL, _FULL = 1, 2
Mask = Callable[[Any, Any, Any, Any], Any]


def read_blocks(block_mask: Any, mask_mod: Any, queries: int, keys: int, for_lists: bool) -> tuple[Any, Any]:
    """The block map of a BlockMask, and its mask joined with `mask_mod`; other things as they are.

    The tables are read on their device at each call, since nothing says whether a replayed CUDA graph, a kernel or `.data` has
    written them. for_lists: tile lists are made, or given, of tables that keep their values.
    """
    if not hasattr(block_mask, "kv_num_blocks"):
        return block_mask, mask_mod
    own = block_mask.mask_mod
    if getattr(own, "__name__", "") == "_sliced_mask_mod_error":
        raise InvalidArgument(
            "block_mask is a slice, which has no mask_mod: set it to the one of the BlockMask that it was cut from, "
            "with the offset of its rows added to q_idx."
        )
    _check_lengths(block_mask, queries, keys)
    if mask_mod is own:
        mask_mod = None
    read = _read_once if for_lists else _read
    blocks, mask = read(block_mask, queries, keys)
    return blocks, _both(mask, mask_mod)


def _check_lengths(block_mask: Any, queries: int, keys: int) -> None:
    made_for = tuple(block_mask.seq_lengths)
    rows, columns = block_mask.kv_num_blocks.shape[-1], block_mask.kv_indices.shape[-1]
    size = _sizes(block_mask)
    # A slice: PyTorch 2.11 leaves it the lengths of the whole.
    if rows * size[0] < made_for[0] and (rows - 1) * size[0] < queries <= rows * size[0]:
        made_for = queries, made_for[1]
    if made_for == (queries, keys) or rows == columns == 1 and size[0] >= queries and size[1] >= keys:
        return
    cut = queries <= made_for[0] and keys <= made_for[1]
    raise InvalidArgument(
        f"block_mask was made for {made_for[0]} queries and {made_for[1]} keys, and q has {queries} and k {keys}: "
        "make one for these"
        + (f", or give block_mask._adjust({queries}, {keys}), its upper left corner." if cut else ".")
    )


def _sizes(block_mask: Any) -> tuple[int, int]:
    size = block_mask.BLOCK_SIZE
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _read_once(block_mask: Any, queries: int, keys: int) -> tuple[BlockMap, Mask | None]:
    """_read(), again only where the tables have been written since, or may have been."""
    tables = [table for table in (getattr(block_mask, name) for name in _TABLES) if table is not None]
    if (
        any(table.is_inference() for table in tables)
        or tables[0].is_cuda
        and torch.cuda.is_current_stream_capturing()
    ):
        return _read(block_mask, queries, keys)
    state = (
        queries,
        keys,
        block_mask.mask_mod,
        [(id(table), table.data_ptr(), table._version) for table in tables],
    )
    known = getattr(block_mask, "_flashjit", None)
    if known is None or known[0] != state:
        known = block_mask._flashjit = (state, _read(block_mask, queries, keys))
    return known[1]  # type: ignore[no-any-return]


def _read(block_mask: Any, queries: int, keys: int) -> tuple[BlockMap, Mask | None]:
    """A block map whose blocks cover those that attend, and what tells the pairs in them apart; None: nothing has to."""
    size = _sizes(block_mask)
    kinds = _kinds(block_mask, -(-keys // size[1]))
    steps = _map_step(size[0]), _map_step(size[1])
    covered = _covered(_covered(kinds, 3, size[1], steps[1], keys), 2, size[0], steps[0], queries)
    blocks = BlockMap(covered, steps)
    own = None if getattr(block_mask.mask_mod, "__name__", "") == "noop_mask" else block_mask.mask_mod
    whole = size[0] % steps[0] == size[1] % steps[1] == 0  # no block of the map reaches across blocks
    if whole and (own is None or block_mask.full_kv_num_blocks is None):
        return blocks, own
    batch, heads = kinds.shape[0] > 1, kinds.shape[1] > 1
    table = kinds[
        slice(None) if batch else 0, slice(None) if heads else 0
    ]  # so that all its indices are positions

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        place: tuple[Any, ...] = (q // size[0], kv // size[1])
        if heads:
            place = (h, *place)
        if batch:
            place = (b, *place)
        kind = table[place]
        if own is None:
            return kind != 0
        return (kind == _FULL) | (kind == _PARTIAL) & own(b, h, q, kv)

    return blocks, mask


def _kinds(block_mask: Any, columns: int) -> Tensor:
    """uint8 [batch or 1, heads or 1, block rows, `columns` or more]: 0, _PARTIAL or _FULL. Rows may list fewer blocks than there are;
    what names none of them counts as none, as nothing waits for the device to tell."""
    first = block_mask.kv_indices[(None,) * (4 - block_mask.kv_indices.dim())]
    columns = max(columns, first.shape[3])
    kinds = torch.zeros((*first.shape[:3], columns + 1), dtype=torch.uint8, device=first.device)
    for kind, counts, listed in (
        (_PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices),
        (_FULL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if counts is not None:
            place = torch.arange(listed.shape[-1], device=first.device)
            named = (place < counts[..., None]) & (listed >= 0) & (listed < columns)
            index = torch.where(named, listed, columns).to(torch.int64)
            kinds.scatter_(3, index[(None,) * (4 - index.dim())], kind)
    return kinds[..., :columns]


def _map_step(size: int) -> int:
    """The largest size that a block map's blocks may have and that divides these; 128 where there is none."""
    return max([step for step in range(_STEP, 257, _STEP) if size % step == 0], default=128)


def _covered(blocks: Tensor, dim: int, size: int, step: int, length: int) -> Tensor:
    """Whether any of the blocks of `size` is set that a block of `step` meets, for all of these within `length`."""
    if size == step:
        return blocks.narrow(dim, 0, -(-length // step))
    first = torch.arange(0, length, step, device=blocks.device)
    begin, end = first // size, ((first + (step - 1)) // size + 1).clamp(max=blocks.shape[dim])
    sums = (blocks != 0).to(torch.int32).cumsum(dim)
    sums = F.pad(sums, (1, 0)) if dim == 3 else F.pad(sums, (0, 0, 1, 0))
    return sums.index_select(dim, end) - sums.index_select(dim, begin) != 0


def _both(own: Mask | None, given: Any) -> Any:
    if own is None or given is None:
        return given if own is None else own
    if not callable(given):
        raise InvalidArgument(
            "block_mask has a mask_mod of its own, or needs one for its blocks, and mask_mod is given beside it as "
            f"a {type(given).__name__}: give it as a function, so that pairs attend by both."
        )
    return lambda b, h, q, kv: own(b, h, q, kv) & given(b, h, q, kv)

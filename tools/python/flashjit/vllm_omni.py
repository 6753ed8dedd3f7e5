"""flashjit as a kernel of vLLM-Omni's SPARSE_ATTN, for image and video models.

A wheel of flashjit announces sparse_attention() by the entry point `vllm_omni.sparse_attn`; a role's attention config chooses it:

    {"backend": "SPARSE_ATTN", "extra": {"backend": "flashjit", "params": {"topk": 0.3}}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._attention import attention
from ._problem import BlockMap
from ._tensors import describe
from .errors import InvalidArgument, WrongType


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: Mapping[str, Any],
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """O [b, sq, h, d] of query [b, sq, h, d] and key, value [b, skv, h, d], over the keys that params leave.

    params: one of the first three is needed; other entries, which are the framework's, have no effect:
        block_mask: [b or 1, h or 1, ceil(sq / rows), ceil(skv / keys)], or the last two: nonzero blocks attend.
        topk: above 0, to 1: the share of the blocks of keys that each block of queries keeps, those with the largest product
            of the blocks' means; protected_kv_prefix: so many first keys are kept besides.
        window: (left, right): how many keys a query sees before and after its own; None: all.
        block_size: rows and keys of a block, one number or two, multiples of 16 to 256; by default 128.
        attn_mask: bool [b, skv], or bool or float [b or 1, h or 1, sq or 1, skv]: as PyTorch's attention takes it.
    """
    _check(query, key, value, params)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    blocks = _blocks(q, k, params)
    window = params.get("window")
    if blocks is None and window is None:
        raise InvalidArgument(
            "params of the sparse attention kernel flashjit have none of block_mask, topk and window: give one of them, or "
            "another backend for dense attention."
        )
    score, mask, captures = _programs(params.get("attn_mask"), window, q, k)
    out = attention(
        q,
        k,
        v,
        causal=is_causal,
        scale=softmax_scale,
        block_mask=blocks,
        score_mod=score,
        mask_mod=mask,
        captures=captures,
    )
    return out.transpose(1, 2)  # type: ignore[no-any-return]


sparse_attention.capabilities = {"supports_attention_mask": True}  # type: ignore[attr-defined]


def _check(query: Any, key: Any, value: Any, params: Any) -> None:
    """Before anything is read of them; attention() checks the rest."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise WrongType(f"{name} is {describe(x)}: give a tensor [b, rows, h, d].")
    if not isinstance(params, Mapping):
        raise WrongType(f"params is {describe(params)}: give a dict with block_mask, topk or window.")
    sizes = (query.shape[0], query.shape[3])
    if (key.shape[0], key.shape[3]) != sizes or not key.shape[2] or query.shape[2] % key.shape[2]:
        raise InvalidArgument(
            f"query is {list(query.shape)} and key {list(key.shape)}, [b, rows, h, d]: b and d must be equal, and query's heads "
            "a multiple of key's."
        )


def _block_size(size: Any) -> tuple[int, int]:
    """Rows and keys of a block."""
    pair = (size, size) if isinstance(size, int) else size
    whole = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not whole or not all(isinstance(n, int) and n in range(16, 257, 16) for n in pair):
        raise InvalidArgument(
            f"block_size is {size!r}: give one number or two, rows and keys of a block, multiples of 16 from 16 to 256."
        )
    return pair[0], pair[1]


def _blocks(q: Tensor, k: Tensor, params: Mapping[str, Any]) -> BlockMap | None:
    """Which blocks attend."""
    given, share = params.get("block_mask"), params.get("topk")
    if given is not None and share is not None:
        raise InvalidArgument("block_mask and topk are both given: give one.")
    size = _block_size(params.get("block_size", 128))
    prefix = params.get("protected_kv_prefix", 0)
    if not isinstance(prefix, int) or isinstance(prefix, bool) or prefix < 0:
        raise InvalidArgument(
            f"protected_kv_prefix is {prefix!r}: give how many first keys are kept, an int from 0 on."
        )
    if given is not None:
        return BlockMap(given, size)
    if share is None:
        return None
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise InvalidArgument(
            f"topk is {share!r}: it is a share of the blocks of keys, above 0 and at most 1."
        )
    rows, keys = size
    with torch.no_grad():
        means = _means(k, keys).repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = _means(q, rows) @ means.transpose(2, 3)
        kept = scores.topk(math.ceil(share * scores.shape[3]), 3).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(3, kept, True)
        chosen[..., : -(-prefix // keys)] = True
    return BlockMap(chosen, (rows, keys))


def _means(x: Tensor, rows: int) -> Tensor:
    """[b, h, blocks, d], the mean of each block's rows."""
    count = x.shape[2]
    sums = F.pad(x.float(), (0, 0, 0, -count % rows)).unflatten(2, (-1, rows)).sum(3)
    sizes = (count - torch.arange(sums.shape[2], device=x.device) * rows).clamp(max=rows)
    return sums / sizes[:, None]


def _programs(given: Any, window: Any, q: Tensor, k: Tensor) -> tuple[str | None, str | None, dict[str, Any]]:
    """score_mod, mask_mod and captures of a mask and a window."""
    conditions: list[str] = []
    captures: dict[str, Any] = {}
    score = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise WrongType(f"window is {window!r}: give (left, right), None for no limit.")
        for side, limit, condition in zip(("left", "right"), window, ("kv >= q - left", "kv <= q + right")):
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < -1):
                raise InvalidArgument(
                    f"window's {side} side is {limit!r}: give an int from 0 on, -1 or None for no limit."
                )
            if limit is not None and limit != -1:
                captures[side] = limit
                conditions.append(condition)
    if given is None:
        return None, " && ".join(conditions) or None, captures
    if not isinstance(given, Tensor) or given.dim() not in (2, 4):
        raise WrongType(
            f"attn_mask is {describe(given)}: give bool [b, skv], or bool or float [b or 1, h or 1, sq or 1, skv]."
        )
    mask = given[:, None, None] if given.dim() == 2 else given
    try:
        captures["given"] = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    except RuntimeError:
        raise InvalidArgument(
            f"attn_mask is {describe(given)}: it does not fit q {list(q.shape)} and k {list(k.shape)}, [b, h, rows, d]."
        ) from None
    if given.is_floating_point():
        score = "score + given[b, h, q, kv]"
    else:
        conditions.append("given[b, h, q, kv]" if given.dtype == torch.bool else "given[b, h, q, kv] != 0")
    return score, " && ".join(conditions) or None, captures

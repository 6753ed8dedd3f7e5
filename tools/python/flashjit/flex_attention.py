"""PyTorch's flex_attention with flashjit's kernels: the same arguments, layouts, defaults and results.

    from flashjit.flex_attention import flex_attention, create_block_mask  # in place of torch.nn.attention.flex_attention

It needs no torch.compile, within which it works too, and has gradients and log-sum-exp on the CPU as well. Every other name
is PyTorch's own: create_block_mask, BlockMask, and_masks, AuxRequest ...
"""

from __future__ import annotations

from typing import Any

import torch.nn.attention.flex_attention as _torch
from torch import Tensor

from ._attention import attention
from ._sdpa import supported
from ._tensors import describe
from .errors import InvalidArgument, WrongType

__all__ = list(_torch.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention of query [b, hq, sq, d], key [b, hkv, skv, d] and value [b, hkv, skv, dv]: O [b, hq, sq, dv].

    score_mod: score_mod(score, b, h, q_idx, kv_idx). block_mask: a BlockMask, as create_block_mask() makes them; its mask_mod
        is applied in its partial blocks, its full blocks attend as a whole. key and value may have a batch of 1 beside it.
    scale: default 1 / sqrt(d). enable_gqa: hq may be a multiple of hkv.
    return_lse: also LSE, the natural logarithm of the softmax's row sums, float32 [b, hq, sq]; -inf in rows without keys.
    return_aux: AuxRequest(lse=True, max_scores=True): also an AuxOutput with LSE and the largest score of each query,
        float32 [b, hq, sq], which has no gradient; max_scores is refused in compiled code and under transforms.
    kernel_options: no effect. They choose among PyTorch's kernels; flashjit chooses its own.

    Raises flashjit.Error.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise WrongType(f"{name} is {describe(tensor)}: give a tensor [batch, heads, length, head_dim].")
    (batch, heads, _, dim), (batch_kv, heads_kv, _, _), dim_v = query.shape, key.shape, value.shape[3]
    if heads != heads_kv and not enable_gqa:
        raise InvalidArgument(
            f"query has {heads} heads and key {heads_kv}: set enable_gqa=True for grouped heads."
        )
    if batch_kv == 1 != batch and block_mask is not None:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    wants_lse, wants_max = return_lse, False
    if return_aux is not None:
        if return_lse:
            raise InvalidArgument(
                "return_lse and return_aux are both given: return_aux=AuxRequest(lse=True) is enough."
            )
        wants_lse, wants_max = return_aux.lse, return_aux.max_scores
    if scale is not None or dim % 8 or dim_v % 8 or not dim or not dim_v:
        query, key, value, scale = supported(query, key, value, scale)
    found = attention(
        query,
        key,
        value,
        scale=scale,
        score_mod=score_mod,
        block_mask=block_mask,
        return_lse=wants_lse,
        return_row_max=wants_max,
    )
    out, *more = found if wants_lse or wants_max else (found,)
    lse = more[0] if wants_lse else None
    if out.shape[3] != dim_v:
        out = out[..., :dim_v]
    if return_aux is not None:
        return out, _torch.AuxOutput(lse=lse, max_scores=more[-1] if wants_max else None)
    return (out, lse) if return_lse else out

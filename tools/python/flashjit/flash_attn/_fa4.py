"""FlashAttention-4's flash_attn.cute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from . import _fa3
from ._fa3 import Maybe

Sides = tuple[Any, Any]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: Maybe = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    mask_mod: Any = None,
    *blocks: Any,
    return_lse: bool = False,
    **named: Any,
) -> tuple[Tensor, Maybe]:
    """O [b, sq, hq, d] of q [b, sq, hq, d], k and v [b, skv, hkv, d], and LSE [b, hq, sq], which is None where
    return_lse is False. window_size: (left, right), None is no limit. learnable_sink: [hq]."""
    _refuse_functions(mask_mod, *blocks[:5], *named.values())
    return_lse = return_lse or bool(blocks[5:] and blocks[5])
    found = _fa3.flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_lse,
        sinks=learnable_sink,
    )
    return found if return_lse else (found, None)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Maybe = None,
    cu_seqlens_k: Maybe = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Maybe = None,
    seqused_k: Maybe = None,
    page_table: Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: Maybe = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    aux_tensors: Any = None,
    return_lse: bool = False,
    **named: Any,
) -> tuple[Tensor, Maybe]:
    """Likewise of packed sequences, [all rows, heads, d]; LSE [hq, all rows]. page_table: k and v are pages."""
    _refuse_functions(score_mod, aux_tensors, *named.values())
    found = _fa3.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        softmax_scale,
        causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_lse,
        page_table=page_table,
        sinks=learnable_sink,
    )
    return found if return_lse else (found, None)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Maybe = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Maybe = None,
    seqused: Maybe = None,
    return_lse: bool = True,
) -> tuple[Tensor, Maybe]:
    """O and LSE over all keys, of parts [splits, b, s, h, d] and [splits, b, s, h], or without b of packed ones."""
    if seqused is not None:
        raise Unsupported("seqused is given: flashjit.flash_attn joins all rows; leave it out.")
    packed = out_partial.dim() == 4
    if packed:
        out_partial, lse_partial = out_partial[:, None], lse_partial[:, None]
        out = None if out is None else out[None]
    o, lse = _fa3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    if packed:
        o, lse = o[0], lse[0]
    return o, lse if return_lse else None


def _refuse_functions(*given: Any) -> None:
    """Functions and block masks of CuTe DSL."""
    if any(value is not None and value is not False for value in given):
        raise Unsupported(
            "mask_mod, score_mod and block masks of FlashAttention-4 are functions of CuTe DSL: call flashjit.attention(), which "
            "takes functions of PyTorch's operators and FlexAttention's BlockMask."
        )

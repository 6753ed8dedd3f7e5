"""FlashAttention-3's flash_attn_interface."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._merge import merge
from .._tensors import describe
from ..errors import InvalidArgument
from . import _functions, _passes
from ._attend import (
    EVERYTHING,
    Options,
    Window,
    attend,
    check_out,
    either,
    missing,
    scales,
    with_batch,
    written,
)

Maybe: TypeAlias = "Tensor | None"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Maybe = None,
    q_descale: Maybe = None,
    k_descale: Maybe = None,
    v_descale: Maybe = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Maybe = None,
    s_aux: Maybe = None,
    out: Maybe = None,
    ver: Any = None,
) -> Any:
    """flash_attn_func() as FlashAttention-3 has it. return_attn_probs: also LSE [b, hq, sq]. q_descale,
    k_descale, v_descale: float32 [b, hkv], of FP8 tensors; a missing one is 1."""
    missing(qv=qv)
    options = Options(
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        either(sinks, s_aux, "sinks and s_aux"),
        chunk=attention_chunk,
    )
    check_out(out, q, v)
    o, lse = attend(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        options,
        return_attn_probs,
        0.0,
        deterministic,
        None if out is None else out.transpose(1, 2),
        **scales(q, k, q_descale, k_descale, v_descale),
    )
    o = o.transpose(1, 2) if out is None else out
    return (o, lse) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Maybe = None,
    k_descale: Maybe = None,
    v_descale: Maybe = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func() of qkv [b, s, 3, h, d], or [b, s, hq + 2 * hkv, d] with num_heads_q."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    elif num_heads_q is None:
        raise InvalidArgument(
            f"qkv is {describe(qkv)}: with four dimensions, [b, s, hq + 2 * hkv, d], give num_heads_q too."
        )
    else:
        q, k, v = qkv.split((num_heads_q, *[(qkv.shape[2] - num_heads_q) // 2] * 2), 2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


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
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Maybe = None,
    q_descale: Maybe = None,
    k_descale: Maybe = None,
    v_descale: Maybe = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    page_table: Maybe = None,
    block_table: Maybe = None,
    sinks: Maybe = None,
    s_aux: Maybe = None,
    out: Maybe = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: Any = None,
    ver: Any = None,
) -> Any:
    """flash_attn_varlen_func() as FlashAttention-3 has it. seqused_q, seqused_k: int32 [sequences]: how many
    of its rows each sequence has. page_table: k and v are pages. return_attn_probs or return_softmax_lse:
    also LSE [hq, all rows]."""
    missing(qv=qv)
    with_lse = return_attn_probs or return_softmax_lse
    table = either(page_table, block_table, "page_table and block_table")
    if seqused_q is None and attention_chunk <= 0:
        return _functions.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            0.0,
            softmax_scale,
            causal,
            window_size,
            softcap,
            None,
            deterministic,
            False,
            block_table,
            page_table=page_table,
            seqused_k=seqused_k,
            sinks=sinks,
            s_aux=s_aux,
            out=out,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            return_softmax_lse=with_lse,
        )
    missing(**{"page_table together with seqused_q or attention_chunk": table})
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
        raise InvalidArgument(
            "cu_seqlens_q, cu_seqlens_k, max_seqlen_q or max_seqlen_k is missing: packed "
            "sequences need all four."
        )
    options = Options(
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        either(sinks, s_aux, "sinks and s_aux"),
        None,
        seqused_q,
        seqused_k,
        attention_chunk,
    )
    check_out(out, q, v)
    o, lse = attend(
        with_batch(q),
        with_batch(k),
        with_batch(v),
        options,
        with_lse,
        0.0,
        deterministic,
        None if out is None else with_batch(out),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k,
        **scales(q, k, q_descale, k_descale, v_descale),
    )
    o = o.squeeze(0).transpose(0, 1) if out is None else out
    return (o, lse.squeeze(0)) if with_lse else o


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Maybe = None,
    v: Maybe = None,
    qv: Maybe = None,
    rotary_cos: Maybe = None,
    rotary_sin: Maybe = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Maybe = None,
    cache_leftpad: Maybe = None,
    page_table: Maybe = None,
    cu_seqlens_q: Maybe = None,
    cu_seqlens_k_new: Maybe = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Maybe = None,
    q_descale: Maybe = None,
    k_descale: Maybe = None,
    v_descale: Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Maybe = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    **engines: Any,
) -> Any:
    """flash_attn_with_kvcache() as FlashAttention-3 has it, the same function with another order of
    arguments. engines: sinks, s_aux, out, block_table, ver."""
    return _functions.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        engines.pop("block_table", None),
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        None,
        num_splits,
        return_softmax_lse,
        **{"page_table": page_table, **engines},
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        qv=qv,
        attention_chunk=attention_chunk,
    )


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Maybe = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """O [b, s, h, d] and LSE [b, s, h] over all keys, of parts [splits, b, s, h, d] and [splits, b, s, h]."""
    parts = [
        (o.transpose(1, 2).float(), lse.transpose(1, 2))
        for o, lse in zip(out_partial.unbind(), lse_partial.unbind())
    ]
    while len(parts) > 8:  # the most that merge() takes
        parts = [merge(parts[:8], dtype=torch.float32), *parts[8:]]
    o, lse = merge(parts, dtype=out_dtype or (out_partial if out is None else out).dtype)
    o = o.transpose(1, 2)
    return o if out is None else written(out, o), lse.transpose(1, 2)


def get_scheduler_metadata(*sizes: Any, cache_seqlens: Maybe = None, **named: Any) -> Tensor:
    """An int32 tensor for scheduler_metadata, which has no effect: flashjit plans the work itself."""
    lengths = next((x for x in (cache_seqlens, *sizes) if isinstance(x, Tensor)), None)
    return torch.zeros(1, dtype=torch.int32, device=None if lengths is None else lengths.device)


# --- The passes one by one ----------------------------------------------------------------------------------


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Maybe = None,
    v_new: Maybe = None,
    qv: Maybe = None,
    out_: Maybe = None,
    cu_seqlens_q: Maybe = None,
    cu_seqlens_k: Maybe = None,
    cu_seqlens_k_new: Maybe = None,
    seqused_q: Maybe = None,
    seqused_k: Maybe = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Maybe = None,
    kv_batch_idx: Maybe = None,
    leftpad_k: Maybe = None,
    rotary_cos: Maybe = None,
    rotary_sin: Maybe = None,
    seqlens_rotary: Maybe = None,
    q_descale: Maybe = None,
    k_descale: Maybe = None,
    v_descale: Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Maybe = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: Maybe = None,
    window_size: Window | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O, LSE, and two empty tensors for parts of split keys. out, window_size: of older versions."""
    window = (window_size_left, window_size_right) if window_size is None else window_size
    out = either(out, out_, "out and out_")
    with torch.no_grad():
        of_cache = any(x is not None for x in (k_new, page_table, kv_batch_idx, leftpad_k))
        if of_cache or cu_seqlens_k is None and seqused_k is not None:
            missing(seqused_q=seqused_q)
            o, lse = flash_attn_with_kvcache(
                q,
                k,
                v,
                k_new,
                v_new,
                qv,
                rotary_cos,
                rotary_sin,
                seqused_k,
                kv_batch_idx,
                leftpad_k,
                page_table,
                cu_seqlens_q,
                cu_seqlens_k_new,
                max_seqlen_q,
                seqlens_rotary,
                q_descale,
                k_descale,
                v_descale,
                softmax_scale,
                causal,
                window,
                attention_chunk,
                softcap,
                rotary_interleaved,
                None,
                return_softmax_lse=True,
                out=out,
            )
        elif cu_seqlens_q is None and cu_seqlens_k is None:
            missing(seqused_q=seqused_q)
            o, lse = flash_attn_func(
                q,
                k,
                v,
                softmax_scale,
                causal,
                qv,
                q_descale,
                k_descale,
                v_descale,
                window,
                attention_chunk,
                softcap,
                return_attn_probs=True,
                out=out,
            )
        else:
            o, lse = flash_attn_varlen_func(
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
                qv,
                q_descale,
                k_descale,
                v_descale,
                window,
                attention_chunk,
                softcap,
                return_attn_probs=True,
                out=out,
            )
    return o, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Maybe = None,
    cu_seqlens_k: Maybe = None,
    sequed_q: Maybe = None,
    sequed_k: Maybe = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Maybe = None,
    dk: Maybe = None,
    dv: Maybe = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool = False,
    window_size: Window | None = None,
) -> None:
    """Writes dq, dk and dv. causal and window_size: as older versions have them."""
    window = (window_size_left, window_size_right) if window_size is None else window_size
    options = Options(softmax_scale, is_causal or causal, window, softcap, used_q=sequed_q, used_k=sequed_k)
    packing = None
    if cu_seqlens_q is not None:
        if cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
            raise InvalidArgument(
                "cu_seqlens_q is given without cu_seqlens_k, max_seqlen_q or max_seqlen_k: give all four."
            )
        packing = _passes.Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _passes.backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, 0.0, deterministic, None, packing
    )

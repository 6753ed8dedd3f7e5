"""The functions of flash-attn 2, with the additional arguments of engines and transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._front import kept
from .._tensors import is_differentiated
from ..errors import InvalidArgument, Unsupported
from ._attend import EVERYTHING, Options, Window, attend, check_out, either, missing, scales, with_batch
from ._kvcache import New, Place, attend_cache

# What the front keeps calls by.
_SHARED = {"q": "q", "sinks": "sinks", "s_aux": "sinks", "out": "out"}
_PAGED = {
    **_SHARED,
    **{"cu_seqlens_q": "cu_seqlens_q", "block_table": "page_table", "page_table": "page_table"},
    **{"q_descale": "q_scale", "k_descale": "k_scale", "v_descale": "v_scale"},
}
_SCORES = ("softmax_scale", "causal", "window_size", "softcap")
_WITHOUT_EFFECT = ("scheduler_metadata", "ver", "fa_version")


@kept(
    {**_SHARED, "k": "k", "v": "v"},
    (*_SCORES, "dropout_p", "deterministic", "return_attn_probs"),
    ignored=("ver",),
)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    ver: Any = None,
    _recorder: Any = None,
) -> Any:
    """Attention of q [b, sq, hq, d], k and v [b, skv, hkv, d]: O [b, sq, hq, d].

    window_size: (left, right), -1 is no limit. softcap: scores become softcap * tanh(score / softcap).
    alibi_slopes: float32 [hq] or [b, hq]; -slope * |query - key| is added to the scores.
    return_attn_probs: also LSE [b, hq, sq], and None for the dropout mask, which is never in memory.

    By keyword, as engines' versions have them: sinks or s_aux [hq]: one more logit per head, without a value.
    out: where O goes, without gradients. ver: no effect.
    """
    options = Options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, either(sinks, s_aux, "sinks and s_aux")
    )
    check_out(out, q, v)
    o, lse = attend(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        options,
        return_attn_probs,
        dropout_p,
        deterministic,
        None if out is None else out.transpose(1, 2),
        recorder=_recorder,
    )
    o = o.transpose(1, 2) if out is None else out
    return (o, lse, None) if return_attn_probs else o


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Any:
    """flash_attn_func() of q [b, sq, hq, d] and kv [b, skv, 2, hkv, d]."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **named: Any) -> Any:
    """flash_attn_func() of qkv [b, s, 3, h, d]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


@kept(
    {**_PAGED, "k": "k", "v": "v", "cu_seqlens_k": "cu_seqlens_kv", "seqused_k": "kv_lengths"},
    (
        *(*_SCORES, "max_seqlen_q", "max_seqlen_k", "dropout_p", "deterministic"),
        *("return_attn_probs", "return_softmax_lse"),
    ),
    ignored=(*_WITHOUT_EFFECT, "num_splits"),
)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    scheduler_metadata: Any = None,
    ver: Any = None,
    fa_version: Any = None,
    _recorder: Any = None,
) -> Any:
    """Attention of sequences packed one after another: q [all rows, hq, d], k and v [all rows, hkv, d],
    where sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1], int32 [sequences + 1]; so K and V.

    block_table: int32 [sequences, pages of the longest]: k and v are pages [pages, rows of a page, hkv, d].
        seqused_k or cu_seqlens_k says how many rows a sequence has. Without gradients: tensors
        that require them are refused.
    return_attn_probs: also LSE [hq, all rows], and None.

    By keyword, as engines' versions have them: page_table: block_table. seqused_k: int32 [sequences]: how
    many of its keys each sequence has. sinks or s_aux [hq]: one more logit per head, without a value. out:
    where O goes, without gradients. q_descale, k_descale, v_descale: float32 [sequences, hkv], of FP8
    tensors. return_softmax_lse: O and LSE [hq, all rows]. num_splits, scheduler_metadata, ver and fa_version
    have no effect.
    """
    table = either(block_table, page_table, "block_table and page_table")
    if (
        cu_seqlens_q is None
        or max_seqlen_q is None
        or table is None
        and (cu_seqlens_k is None or max_seqlen_k is None)
    ):
        needed = {
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_seqlen_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_k": max_seqlen_k,
        }
        name = next(name for name, value in needed.items() if value is None)
        raise InvalidArgument(f"{name} is missing: packed sequences need it.")
    if isinstance(max_seqlen_q, Tensor) or isinstance(max_seqlen_k, Tensor):
        max_seqlen_q, max_seqlen_k = int(max_seqlen_q), int(max_seqlen_k or 0)
    options = Options(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        either(sinks, s_aux, "sinks and s_aux"),
        None,
        None,
        seqused_k if table is None else None,
    )
    return_lse = return_attn_probs or return_softmax_lse
    of_codes = scales(q, k, q_descale, k_descale, v_descale)
    check_out(out, q, v)
    if table is not None:
        lengths = _lengths_of_pages(q, k, v, cu_seqlens_k, seqused_k, dropout_p)
        o, lse = attend_cache(
            q,
            k,
            v,
            None,
            lengths,
            Place(
                table,
                name="block_table" if page_table is None else "page_table",
                name_of_lengths="cu_seqlens_k" if seqused_k is None else "seqused_k",
            ),
            options,
            return_lse,
            cu_seqlens_q,
            max_seqlen_q,
            out,
            recorder=_recorder,
            **of_codes,
        )
    else:
        o, lse = attend(
            with_batch(q),
            with_batch(k),
            with_batch(v),
            options,
            return_lse,
            dropout_p,
            deterministic,
            None if out is None else with_batch(out),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_k,
            recorder=_recorder,
            **of_codes,
        )
        o = o.squeeze(0).transpose(0, 1) if out is None else out
        if return_lse:
            lse = lse.squeeze(0)
    return (o, lse, None) if return_attn_probs else (o, lse) if return_lse else o


def _lengths_of_pages(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, dropout_p: float
) -> Tensor:
    """How many keys each sequence has in the pages of a block_table."""
    if dropout_p:
        raise Unsupported("dropout_p is given with block_table: a cache is for generation; leave it out.")
    if torch.is_grad_enabled() and is_differentiated(q, k, v):
        raise Unsupported(
            "block_table is given with tensors that require gradients, which a cache does not "
            "have: call under torch.no_grad(), or give k and v packed."
        )
    if seqused_k is not None:
        return seqused_k
    if cu_seqlens_k is None:
        raise InvalidArgument(
            "block_table is given without seqused_k and cu_seqlens_k: one of them says how "
            "many keys each sequence has."
        )
    return cu_seqlens_k.diff()


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Any:
    """flash_attn_varlen_func() of q [all rows, hq, d] and kv [all rows, 2, hkv, d]."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **named: Any
) -> Any:
    """flash_attn_varlen_func() of qkv [all rows, 3, h, d]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **named)


@kept(
    {
        **_PAGED,
        "k_cache": "k",
        "v_cache": "v",
        "cache_seqlens": "kv_lengths",
        "cache_batch_idx": "page_table",
    },
    (
        *(*_SCORES, "rotary_interleaved", "num_splits", "return_softmax_lse", "max_seqlen_q"),
        "attention_chunk",
    ),
    ignored=(*_WITHOUT_EFFECT, "pack_gqa", "sm_margin"),
)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    scheduler_metadata: Any = None,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    qv: Tensor | None = None,
    attention_chunk: int = 0,
    ver: Any = None,
    fa_version: Any = None,
    _recorder: Any = None,
) -> Any:
    """Attention of q [b, sq, hq, d] to the first cache_seqlens keys of k_cache and v_cache [b, rows, hkv, d],
    without gradients. The last query is at the last key that is there.

    block_table: int32 [b, pages of the longest]: k_cache and v_cache are pages [pages, rows, hkv, d].
    cache_batch_idx: int32 [b]: which of k_cache's sequences each is. cache_leftpad: int32 [b]: keys before it
        are padding, which must be finite.
    k, v: [b, new, hkv, d], written into the cache, in place, from row cache_seqlens on, before attention sees
        them.
    rotary_cos, rotary_sin: [rows, rotary_dim / 2]: q and k are rotated, at positions from cache_seqlens on,
        which count padding too; without a causal mask or a window all queries are at cache_seqlens.
    num_splits: 1: a sequence's results do not depend on the others in the batch (batch_invariant of
        flashjit.attention); else flashjit decides itself.

    By keyword, as FlashAttention-3 and engines have them: page_table: block_table. cu_seqlens_q, with
    max_seqlen_q: q is [all rows, hq, d]; cu_seqlens_k_new: so are k and v. rotary_seqlens: int32 [b]: where
    positions begin, in place of cache_seqlens. sinks or s_aux [hq]: one more logit per head, without a value.
    q_descale, k_descale, v_descale: float32 [b, hkv], of FP8 tensors. attention_chunk: a query attends to the
    keys of its own chunk of so many. out: where O goes. scheduler_metadata, pack_gqa, sm_margin, ver and
    fa_version have no effect.
    """
    missing(qv=qv)
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise InvalidArgument("cu_seqlens_q is given without max_seqlen_q: packed queries need it.")
    table = either(block_table, page_table, "block_table and page_table")
    place = Place(table, cache_batch_idx, "block_table" if page_table is None else "page_table")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    lengths = place.lengths(k_cache, cache_seqlens, batch, k is not None)
    if k is None and rotary_cos is not None:
        raise InvalidArgument(
            "rotary_cos is given without k and v: as in flash-attn, rotation goes with both."
        )
    new = (
        None
        if k is None
        else New(k, v, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new, rotary_seqlens)
    )
    options = Options(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        either(sinks, s_aux, "sinks and s_aux"),
        cache_leftpad,
        chunk=attention_chunk,
    )
    check_out(out, q, v_cache)
    o, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        new,
        lengths,
        place,
        options,
        return_softmax_lse,
        cu_seqlens_q,
        max_seqlen_q,
        out,
        batch_invariant=num_splits == 1,
        recorder=_recorder if k is None else None,
        **scales(q, k_cache, q_descale, k_descale, v_descale),
    )
    return (o, lse) if return_softmax_lse else o

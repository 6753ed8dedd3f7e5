"""flash-attn's functions (2.8) with flashjit's kernels: the same names, arguments, layouts, defaults and results.

    from flashjit.flash_attn import flash_attn_func            # in place of: from flash_attn import flash_attn_func
    import flashjit.flash_attn; flashjit.flash_attn.install()  # libraries that import flash_attn get these functions

Q is [batch, seqlen_q, heads_q, head_dim], K and V [batch, seqlen_kv, heads_kv, head_dim]; packed forms without the batch.
A causal mask and a window are aligned at the last query and the last key. What is missing raises flashjit.Unsupported
with its name; no argument is ignored, but for num_splits without a cache, pack_gqa and sm_margin, which flashjit decides itself.
"""
from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ._attention import attention
from ._cache import append
from ._plans import describe
from ._sdpa import supported
from .errors import InvalidArgument, Unsupported

__version__ = "2.8.3"  # whose interface this is
__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "install"]

Window = tuple[int, int]
EVERYTHING: Window = (-1, -1)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Union[float, None] = None,
                    causal: bool = False, window_size: Window = EVERYTHING, softcap: float = 0.0,
                    alibi_slopes: Union[Tensor, None] = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """Attention of q [b, sq, hq, d], k and v [b, skv, hkv, d]: O [b, sq, hq, d].

    window_size: (left, right), -1 is no limit. softcap: scores become softcap * tanh(score / softcap); 0: they stay.
    alibi_slopes: float32 [hq] or [b, hq]; -slope * |query - key| is added to the scores.
    return_attn_probs: also LSE [b, hq, sq], and None for the dropout mask, which is never in memory.
    """
    out, lse = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p, softmax_scale, causal, window_size,
                       softcap, alibi_slopes, deterministic, return_attn_probs)
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Any:
    """flash_attn_func() of q [b, sq, hq, d] and kv [b, skv, 2, hkv, d]."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **named: Any) -> Any:
    """flash_attn_func() of qkv [b, s, 3, h, d]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                           max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: Union[float, None] = None,
                           causal: bool = False, window_size: Window = EVERYTHING, softcap: float = 0.0,
                           alibi_slopes: Union[Tensor, None] = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Union[Tensor, None] = None) -> Any:
    """Attention of sequences packed one behind the other: q [all rows, hq, d], k and v [all rows, hkv, d], where sequence
    i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1], int32 [sequences + 1]; so K and V.

    block_table: int32 [sequences, pages of the longest]: k and v are pages [pages, rows of a page, hkv, d], of which the sequences
        have as many rows as cu_seqlens_k says. Without gradients.
    return_attn_probs: also LSE [hq, all rows], and None.
    """
    if block_table is not None:
        if dropout_p:
            raise Unsupported("dropout_p is given with block_table: a cache is for generation; leave it out.")
        out, lse = _attend_cache(_with_batch(q), k.transpose(1, 2), v.transpose(1, 2), None, cu_seqlens_k.diff(),
                                 _Place(block_table, None), softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs, cu_seqlens_q,
                                 int(max_seqlen_q))
    else:
        out, lse = _attend(_with_batch(q), _with_batch(k), _with_batch(v), dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k,
                           max_seqlen_q=int(max_seqlen_q), max_seqlen_kv=int(max_seqlen_k))
    out = out.squeeze(0).transpose(0, 1)
    return (out, _packed_lse(lse, cu_seqlens_q, q.shape[0]), None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Any:
    """flash_attn_varlen_func() of q [all rows, hq, d] and kv [all rows, 2, hkv, d]."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **named)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **named: Any) -> Any:
    """flash_attn_varlen_func() of qkv [all rows, 3, h, d]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **named)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Union[Tensor, None] = None,
                            v: Union[Tensor, None] = None, rotary_cos: Union[Tensor, None] = None,
                            rotary_sin: Union[Tensor, None] = None, cache_seqlens: Union[int, Tensor, None] = None,
                            cache_batch_idx: Union[Tensor, None] = None, cache_leftpad: Union[Tensor, None] = None,
                            block_table: Union[Tensor, None] = None, softmax_scale: Union[float, None] = None,
                            causal: bool = False, window_size: Window = EVERYTHING, softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Union[Tensor, None] = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Any:
    """Attention of q [b, sq, hq, d] to the first cache_seqlens keys of k_cache and v_cache [b, rows, hkv, d], without
    gradients. The last query is at the last key that is there.

    block_table: int32 [b, pages of the longest]: k_cache and v_cache are pages [pages, rows of a page, hkv, d].
    cache_batch_idx: int32 [b]: which of k_cache's sequences each is. cache_leftpad: int32 [b]: keys before it are padding, which
        must be finite.
    k, v: [b, new, hkv, d], written into the cache, in place, from row cache_seqlens on, before attention sees them.
    rotary_cos, rotary_sin: [rows, rotary_dim / 2]: q and k are rotated, at positions from cache_seqlens on, which count padding
        too; without a causal mask or a window all queries are at cache_seqlens.
    num_splits: 1: a sequence's results do not depend on the others in the batch (batch_invariant of flashjit.attention); else
        flashjit decides itself.
    """
    place = _Place(block_table, cache_batch_idx, cache_leftpad)
    lengths = place.lengths(k_cache, cache_seqlens, q.shape[0], k is not None)
    if k is None and rotary_cos is not None:
        raise InvalidArgument("rotary_cos is given without k and v: as in flash-attn, rotation goes with both.")
    new = None if k is None else _New(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    out, lse = _attend_cache(q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2), new, lengths, place, softmax_scale,
                             causal, window_size, softcap, alibi_slopes, return_softmax_lse, batch_invariant=num_splits == 1)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


# --- Caches ----------------------------------------------------------------------------------------------------------


class _New(NamedTuple):
    """New rows of a cache, [b, new, hkv, d], or with cu_seqlens [all rows, hkv, d], and their rotation."""

    k: Tensor
    v: Union[Tensor, None]
    cos: Union[Tensor, None]
    sin: Union[Tensor, None]
    interleaved: bool
    cu_seqlens: Union[Tensor, None] = None


class _Place(NamedTuple):
    """Where in a cache the sequences are."""

    table: Union[Tensor, None]
    slots: Union[Tensor, None]
    leftpad: Union[Tensor, None] = None

    def named(self) -> dict[str, Any]:
        """As attention() has it."""
        if self.table is not None and self.slots is not None:
            raise InvalidArgument("block_table and cache_batch_idx are both given: a block_table's rows are in the order of q "
                                  "already; select them, as in block_table[cache_batch_idx].")
        for name, table, dims in (("block_table", self.table, 2), ("cache_batch_idx", self.slots, 1)):
            if table is not None and (table.dim() != dims or table.dtype != torch.int32):
                raise InvalidArgument(f"{name} is {describe(table)}: it must be int32 [batch{', pages of the longest' * (dims - 1)}].")
        table = self.slots if self.table is None else self.table
        return {"cache": True} if table is None else {"page_table": table}

    def lengths(self, k_cache: Tensor, given: Union[int, Tensor, None], batch: int, has_new: bool) -> Tensor:
        """How many keys each sequence has before new ones, int32 [batch]."""
        self.named()  # which refuses wrong tables
        if given is None:
            if has_new:
                raise InvalidArgument("k is given without cache_seqlens: say from which row of the cache on it is to be written.")
            given = k_cache.shape[1] * (1 if self.table is None else self.table.shape[1])
        return torch.as_tensor(given, dtype=torch.int32, device=k_cache.device).expand(batch)


def _attend_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, new: Union[_New, None], lengths: Tensor, place: _Place,
                  scale: Union[float, None], causal: bool, window: Window, softcap: float, slopes: Union[Tensor, None],
                  wants_lse: bool, cu_seqlens_q: Union[Tensor, None] = None, max_seqlen_q: Union[int, None] = None,
                  batch_invariant: bool = False) -> tuple[Tensor, Any]:
    """O and LSE, or None, of q [b, h, s, d], or [1, h, all rows, d], and caches [b, h, rows, d]."""
    where = place.named()
    with torch.no_grad():
        if new is not None:
            q, lengths = _append(q, k_cache, v_cache, new, lengths, where, causal or tuple(window) != EVERYTHING, cu_seqlens_q)
        packed = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        return _attend(q, k_cache, v_cache, 0.0, scale, causal, window, softcap, slopes, False, wants_lse, place.leftpad,
                       kv_lengths=lengths, batch_invariant=batch_invariant, **where, **packed)


def _append(q: Tensor, k_cache: Tensor, v_cache: Tensor, new: _New, lengths: Tensor, where: dict[str, Any],
            moving: bool, cu_seqlens_q: Union[Tensor, None]) -> tuple[Tensor, Tensor]:
    """Stores the new rows. Returns q, rotated, and the lengths with the new rows. moving: whether each query has a position."""
    if new.v is None:
        raise InvalidArgument("k is given without v: give both.")
    packed = new.cu_seqlens is not None
    k, v = (_with_batch(x) if packed else x.transpose(1, 2) for x in (new.k, new.v))
    after = lengths + (k.shape[2] if new.cu_seqlens is None else new.cu_seqlens.diff())
    rope: dict[str, Any] = {"cu_seqlens_q": new.cu_seqlens} if packed else {}
    if new.cos is not None or new.sin is not None:
        rope.update(_rotation(new, k_cache, where))
        together = packed == (cu_seqlens_q is not None) and q.shape[2] == k.shape[2] and (moving or q.shape[2] == 1)
        if together and (not packed or new.cu_seqlens is cu_seqlens_q):  # each query is at a new key
            rope["q"] = q
        elif cu_seqlens_q is not None:
            raise Unsupported("cu_seqlens_q is given with a rotation, and is not the same tensor as cu_seqlens_k_new: flashjit."
                              "flash_attn rotates packed queries together with new keys; give one tensor for both, or rotate q.")
        else:
            q = _rotate(q, new.cos, new.sin, lengths, new.interleaved, moving)
    table = where.get("page_table")
    rotated = append(k, v, k_cache, v_cache, kv_lengths=after, page_table=table, **rope)
    return (q if rotated is None else rotated), after


def _rotation(new: _New, k_cache: Tensor, where: dict[str, Any]) -> dict[str, Any]:
    if new.cos is None or new.sin is None:
        raise InvalidArgument(f"rotary_{'sin' if new.cos is None else 'cos'} is given alone: give both tables.")
    rows = k_cache.shape[2]
    if "page_table" not in where and new.cos.shape[0] < rows:
        raise InvalidArgument(f"rotary_cos has {new.cos.shape[0]} positions and the cache {rows} rows: give at least as many.")
    cos, sin = (x if x.dtype == torch.float32 else x.to(k_cache.dtype) for x in (new.cos, new.sin))
    return {"cos": cos, "sin": sin, "interleaved": new.interleaved}


# --- What they have in common ----------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: Union[float, None], causal: bool, window: Window,
            softcap: float, slopes: Union[Tensor, None], deterministic: bool, wants_lse: bool,
            leftpad: Union[Tensor, None] = None, **more: Any) -> tuple[Tensor, Any]:
    """O and LSE, or None, of tensors [b, h, s, d], or of packed ones."""
    left, right = (None if side is None or side < 0 else int(side) for side in window)
    if causal:
        right = 0
    named = left is None and right == 0 and leftpad is None  # flashjit's own causal mask
    score = mask = None
    captures: Union[dict[str, Any], None] = None
    if softcap or slopes is not None or leftpad is not None or not (named or left is right is None):
        score, mask = _programs(left is not None, right is not None and not named, bool(softcap),
                                0 if slopes is None else slopes.dim(), leftpad is not None)
        captures = {}
        if left is not None:
            captures["left"] = left
        if right is not None and not named:
            captures["right"] = right
        if softcap:
            captures["softcap"] = float(softcap)
        if slopes is not None:
            captures["slopes"] = slopes.float()
        if leftpad is not None:
            captures["leftpad"] = leftpad
    dim_v = v.shape[3]
    if q.shape[3] % 8 or dim_v % 8 or scale is not None:
        q, k, v, scale = supported(q, k, v, scale)
    found = attention(q, k, v, causal=named, scale=scale, dropout_p=dropout_p, score_mod=score, mask_mod=mask, captures=captures,
                      deterministic=deterministic or None, return_lse=wants_lse, **more)
    out, lse = found if wants_lse else (found, None)
    return out if out.shape[3] == dim_v else out[..., :dim_v], lse


@functools.lru_cache(maxsize=None)
def _programs(left: bool, right: bool, softcap: bool, slopes: int, leftpad: bool) -> tuple[Union[str, None], Union[str, None]]:
    """Of the score and of the mask. slopes: their dimensions."""
    at = "q + seqlen_kv - seqlen_q"  # the key that query q is at
    score = "softcap * tanh(score / softcap)" if softcap else "score"
    if slopes:
        score += f" - slopes[{'h' if slopes == 1 else 'b, h'}] * to_float(abs({at} - kv))"
    conditions = [f"kv <= {at} + right"] * right + [f"kv >= {at} - left"] * left + ["kv >= leftpad[b]"] * leftpad
    return None if score == "score" else score, " && ".join(conditions) or None


def _missing(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise Unsupported(f"{name} is given: flashjit.flash_attn does not have it yet; leave it out.")


def _with_batch(x: Tensor) -> Tensor:
    """[1, heads, rows, dim] of [rows, heads, dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def _packed_lse(lse: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """[heads, all rows] of [sequences, heads, longest]; rows of no sequence have -inf."""
    row = torch.arange(rows, device=lse.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True, out_int32=True).clamp(max=lse.shape[0] - 1)
    within = (row - cu_seqlens[sequence]).clamp(max=lse.shape[2] - 1)
    found = lse.permute(1, 0, 2)[:, sequence, within]
    return found.masked_fill(row >= cu_seqlens[-1], -torch.inf)


def _rotate(x: Tensor, cos: Any, sin: Any, first: Tensor, interleaved: bool, moving: bool) -> Tensor:
    """x [b, h, s, d] with its first 2 * cos.shape[1] columns rotated, row i at position first + i, or all at first."""
    at = first.long()[:, None] + (torch.arange(x.shape[2], device=x.device) if moving else 0)
    cos, sin = (table[at][:, None].to(x.dtype) for table in (cos, sin))
    dim = 2 * cos.shape[-1]
    if interleaved:
        a, b = x[..., :dim:2], x[..., 1:dim:2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = x[..., :dim // 2], x[..., dim // 2:dim]
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned, x[..., dim:]), -1)


# --- flash_attn.bert_padding -----------------------------------------------------------------------------------------


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x by their numbers."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with these rows, and zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Union[Tensor, None] = None) -> Any:
    """The rows of [b, s, ...] where the mask [b, s] is not 0, one behind the other.

    Returns the rows, their numbers in [b * s], cu_seqlens int32 [b + 1], the longest sequence, and how many rows of each
    sequence attention_mask alone keeps. unused_mask: rows to keep too, which attention_mask leaves out.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return (hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()),
            attention_mask.sum(-1, dtype=torch.int32))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input(): [batch, seqlen, ...], zeros where no row was kept."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


# --- FlashAttention-3's flash_attn_interface -------------------------------------------------------------------------


def _fa3_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Union[float, None] = None, causal: bool = False,
              qv: Union[Tensor, None] = None, q_descale: Union[Tensor, None] = None, k_descale: Union[Tensor, None] = None,
              v_descale: Union[Tensor, None] = None, window_size: Window = EVERYTHING, attention_chunk: int = 0,
              softcap: float = 0.0, num_splits: int = 1, pack_gqa: Union[bool, None] = None, deterministic: bool = False,
              sm_margin: int = 0, return_attn_probs: bool = False) -> Any:
    """flash_attn_func() as FlashAttention-3 has it. return_attn_probs: also LSE [b, hq, sq]."""
    _missing(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk or None)
    found = flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs)
    return found[:2] if return_attn_probs else found


def _fa3_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                     max_seqlen_k: int, seqused_q: Union[Tensor, None] = None, seqused_k: Union[Tensor, None] = None,
                     softmax_scale: Union[float, None] = None, causal: bool = False, qv: Union[Tensor, None] = None,
                     q_descale: Union[Tensor, None] = None, k_descale: Union[Tensor, None] = None,
                     v_descale: Union[Tensor, None] = None, window_size: Window = EVERYTHING, attention_chunk: int = 0,
                     softcap: float = 0.0, num_splits: int = 1, pack_gqa: Union[bool, None] = None,
                     deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False) -> Any:
    """flash_attn_varlen_func() as FlashAttention-3 has it. return_attn_probs: also LSE [hq, all rows]."""
    _missing(seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
             attention_chunk=attention_chunk or None)
    found = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
                                   window_size, softcap, None, deterministic, return_attn_probs)
    return found[:2] if return_attn_probs else found


def _fa3_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Union[Tensor, None] = None, v: Union[Tensor, None] = None,
                      qv: Union[Tensor, None] = None, rotary_cos: Union[Tensor, None] = None,
                      rotary_sin: Union[Tensor, None] = None, cache_seqlens: Union[int, Tensor, None] = None,
                      cache_batch_idx: Union[Tensor, None] = None, cache_leftpad: Union[Tensor, None] = None,
                      page_table: Union[Tensor, None] = None, cu_seqlens_q: Union[Tensor, None] = None,
                      cu_seqlens_k_new: Union[Tensor, None] = None, max_seqlen_q: Union[int, None] = None,
                      rotary_seqlens: Union[Tensor, None] = None, q_descale: Union[Tensor, None] = None,
                      k_descale: Union[Tensor, None] = None, v_descale: Union[Tensor, None] = None,
                      softmax_scale: Union[float, None] = None, causal: bool = False, window_size: Window = EVERYTHING,
                      attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
                      scheduler_metadata: Union[Tensor, None] = None, num_splits: int = 0, pack_gqa: Union[bool, None] = None,
                      sm_margin: int = 0, return_softmax_lse: bool = False) -> Any:
    """flash_attn_with_kvcache() as FlashAttention-3 has it. With cu_seqlens_q, q is [all rows, hq, d], with cu_seqlens_k_new so
    are k and v."""
    _missing(qv=qv, rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
             attention_chunk=attention_chunk or None, scheduler_metadata=scheduler_metadata)
    if cu_seqlens_q is None:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
                                       cache_leftpad, page_table, softmax_scale, causal, window_size, softcap, rotary_interleaved,
                                       None, num_splits, return_softmax_lse)
    if max_seqlen_q is None or (k is None) != (cu_seqlens_k_new is None):
        raise InvalidArgument("cu_seqlens_q is given without " + ("max_seqlen_q" if max_seqlen_q is None else
                              "k" if k is None else "cu_seqlens_k_new") + ": packed queries need it.")
    place = _Place(page_table, cache_batch_idx, cache_leftpad)
    lengths = place.lengths(k_cache, cache_seqlens, cu_seqlens_q.numel() - 1, k is not None)
    new = None if k is None else _New(k, v, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new)
    out, lse = _attend_cache(_with_batch(q), k_cache.transpose(1, 2), v_cache.transpose(1, 2), new, lengths, place, softmax_scale,
                             causal, window_size, softcap, None, return_softmax_lse, cu_seqlens_q, int(max_seqlen_q),
                             num_splits == 1)
    out = out.squeeze(0).transpose(0, 1)
    return (out, _packed_lse(lse, cu_seqlens_q, q.shape[0])) if return_softmax_lse else out


# --- By the names that libraries import ------------------------------------------------------------------------------


def install() -> None:
    """Makes `import flash_attn`, `flash_attn.flash_attn_interface`, `flash_attn.bert_padding` and FlashAttention-3's
    `flash_attn_interface` give these functions, in this process, in which the packages flash-attn and flash-attn-3 count as
    installed: transformers' attn_implementation="flash_attention_2" then runs on flashjit. Raises flashjit.InvalidArgument where
    one of the modules was imported already from another package."""
    here = sys.modules[__name__]
    functions = {name: getattr(here, name) for name in __all__ if name != "install"}
    padding = {function.__name__: function for function in (index_first_axis, index_put_first_axis, unpad_input, pad_input)}
    fa3 = {"flash_attn_func": _fa3_func, "flash_attn_varlen_func": _fa3_varlen_func, "flash_attn_with_kvcache": _fa3_with_kvcache}
    contents = {"flash_attn": functions, "flash_attn.flash_attn_interface": functions, "flash_attn.bert_padding": padding,
                "flash_attn_interface": fa3}
    for name in contents:
        if name in sys.modules and not hasattr(sys.modules[name], "_is_flashjit"):
            raise InvalidArgument(f"{name} was imported already, from {getattr(sys.modules[name], '__file__', None)}: call "
                                  "install() before anything imports it.")
    for name, functions in contents.items():
        module = types.ModuleType(name, f"{__name__}, by the name of the package whose functions these are.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "flash_attn")
        module.__dict__.update(functions, __version__=__version__, _is_flashjit=True, __getattr__=_absent(name, functions))
        if name == "flash_attn":
            module.__path__ = []
        sys.modules[name] = module
        package, _, short = name.rpartition(".")
        if package:
            setattr(sys.modules[package], short, module)
    if not any(isinstance(finder, _Packages) for finder in sys.meta_path):
        sys.meta_path.append(_Packages())
    _look_again("transformers.utils.import_utils")


def _absent(module: str, functions: Iterable[str]) -> Any:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{module}.{name} is not among what flashjit.flash_attn has: {', '.join(functions)}")

    return get


class _Package(importlib.metadata.Distribution):
    """What is known of a package without its files."""

    def __init__(self, name: str, module: str, version: str) -> None:
        self.texts = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "top_level.txt": module}

    def read_text(self, filename: str) -> Union[str, None]:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flashjit.flash_attn is in the place of this package, and has no files")


class _Packages(importlib.metadata.DistributionFinder):
    """By this, libraries that ask whether flash-attn is installed, and which version, find it."""

    packages = (_Package("flash-attn", "flash_attn", __version__), _Package("flash-attn-3", "flash_attn_interface", "3.0.0"))

    def find_distributions(self, context: Any = importlib.metadata.DistributionFinder.Context()) -> Any:
        plain = lambda name: name.lower().replace("_", "-")
        return [package for package in self.packages if context.name is None or plain(context.name) == plain(package.name)]

    def find_spec(self, *_: Any) -> None:
        return None


def _look_again(module: str) -> None:
    """Forgets what a library has found of the packages, if it has looked already."""
    found = vars(sys.modules.get(module, types))
    if "PACKAGE_DISTRIBUTION_MAPPING" in found:  # transformers 5.17 looks when it is imported
        found["PACKAGE_DISTRIBUTION_MAPPING"] = importlib.metadata.packages_distributions()
    for name, value in found.items():
        if ("flash_attn" in name or name == "_package_distribution_mapping") and hasattr(value, "cache_clear"):
            value.cache_clear()

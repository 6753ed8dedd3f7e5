"""attention_over(): one softmax over the keys of several caches, by a call for each and their merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._attention import attention
from ._call_types import OF_SOFTMAX
from ._merge import merge
from .errors import InvalidArgument, WrongType

#: Arguments that a cache may have: attention()'s for K and V, masks, scores and packed queries.
_OF_CACHE = frozenset(
    (
        "k v v_columns page_table kv_lengths cache max_seqlen_kv cu_seqlens_kv indices prefix_length k_scale v_scale "
        "k_block_scale v_block_scale k_format v_format causal window mask_mod score_mod softcap captures block_mask "
        "cu_seqlens_q max_seqlen_q"
    ).split()
)
#: Arguments of attention() that all caches have in common.
_OF_ALL = frozenset("causal scale cu_seqlens_q max_seqlen_q q_scale q_rope batch_invariant".split())
_MOST_CACHES = 8


def attention_over(
    q: Tensor,
    caches: Iterable[Mapping[str, Any]],
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **shared: Any,
) -> Any:
    """One softmax over the keys of several caches, such as the cache of a window and a compressed cache (DeepSeek V4).

    q: [batch, heads_q, seqlen_q, head_dim], or packed [1, heads_q, all rows, head_dim], as in attention().
    caches: 1 to 8 mappings, each with the arguments of attention() that belong to one cache: `k`, and as needed `v` or `v_columns`,
        `page_table`, `kv_lengths`, `cache`, `max_seqlen_kv`, `indices` (also with its topk_length), `prefix_length`, scales,
        formats, `causal`, `window`, `softcap`, programs with `captures`, `cu_seqlens_q` and `max_seqlen_q`. Page sizes, formats and
        heads_kv may differ; the columns of V may not. A key that is in two caches counts twice.
    shared: `causal`, `scale`, `cu_seqlens_q`, `max_seqlen_q`, `q_scale`, `q_rope` and `batch_invariant` for all caches. An argument
        in a cache's own mapping replaces them, also where it is None. Besides, attention()'s sink logits, [heads_q], which count
        once. With `q_rope`, [batch, heads_q, seqlen_q, columns], each cache has `v_columns`, as many as q.
    out, lse: tensors that O and LSE are written to, and that are returned, as in attention().

    Returns O, [batch, heads_q, seqlen_q, head_dim_v], of the type of q, or (O, LSE) with return_lse or lse: LSE float32, the natural
    logarithm of the sum over all caches and sink logits. Rows without a key have O = 0. Each cache is a launch, which writes its part of O
    in float32, and one more launch joins them. With gradients where attention() has them; torch.use_deterministic_algorithms(True)
    gives them the same bits on every run. Raises flashjit.Error.
    """
    once = {name: shared.pop(name) for name in OF_SOFTMAX if name in shared}
    given = _checked(caches, shared)
    first, *rest = given
    wants_lse = return_lse or lse is not None
    if not rest:
        return attention(
            **{"q": q, **shared, **first, **once, "return_lse": return_lse, "out": out, "lse": lse}
        )
    parts = []
    for i, cache in enumerate(given):
        own = {} if i else once  # the merge adds the parts' sums
        try:
            parts.append(attention(q, **{**shared, **cache}, **own, return_lse=True, out_dtype=torch.float32))
        except (InvalidArgument, WrongType) as error:
            raise type(error)(f"caches[{i}]: {error}") from None
    columns = [part.shape[3] for part, _ in parts]
    if len({*columns}) > 1:
        raise InvalidArgument(
            f"the caches' V have {', '.join(map(str, columns))} columns: all must have the same."
        )
    dtype = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
    joined = merge(parts, dtype=dtype if out is None else out.dtype, out=out, lse=lse)
    return joined if wants_lse else joined[0]


def _checked(caches: Any, shared: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for name in shared:
        if name not in _OF_ALL:
            raise WrongType(
                f"{name} is given for all caches, but it belongs to a cache: give it as in caches=[{{'k': .., {name!r}: ..}}, ..]."
                if name in _OF_CACHE
                else f"{name} is given for all caches, but attention_over() has no such argument: it has "
                f"{', '.join(sorted(_OF_ALL))}, {', '.join(OF_SOFTMAX)}, return_lse, out and lse."
            )
    if isinstance(caches, (Mapping, Tensor)) or not isinstance(caches, Iterable):
        raise WrongType(
            f"caches is a {type(caches).__name__}: give a list of dicts, one for each cache, such as "
            "[{'k': pages, 'v': pages_of_v, 'page_table': table, 'kv_lengths': lengths}, ..]."
        )
    given = list(caches)
    if not 1 <= len(given) <= _MOST_CACHES:
        raise InvalidArgument(f"caches has {len(given)} entries: give 1 to {_MOST_CACHES}.")
    for i, cache in enumerate(given):
        if not isinstance(cache, Mapping):
            raise WrongType(
                f"caches[{i}] is a {type(cache).__name__}: give a dict of attention()'s arguments."
            )
        if "k" not in cache:
            raise InvalidArgument(f"caches[{i}] has no 'k': give its keys.")
        unknown = next((name for name in cache if name not in _OF_CACHE), None)
        if unknown is not None:
            raise WrongType(
                f"caches[{i}] has {unknown!r}, which is no argument of a cache: give {', '.join(sorted(_OF_CACHE))}."
            )
    return given

"""Block-Sparse-Attention's functions with flashjit's kernels: the same names, arguments and results.

    from flashjit.block_sparse_attn import block_sparse_attn_func  # was: from block_sparse_attn import ...

    import flashjit.block_sparse_attn
    flashjit.block_sparse_attn.install()                           # models that import block_sparse_attn get these

Blocks have 128 queries and 128 keys. Each head is dense, block-sparse or streaming (it sees the first and the latest blocks of
keys). Forward and backward; head dimensions, types and grouped heads as in flashjit.attention().
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor

from ._attention import attention
from ._problem import BlockMap
from ._tensors import describe
from .errors import InvalidArgument, Unsupported, WrongType

__all__ = ["block_sparse_attn_func", "block_streaming_attn_func", "install"]

_BLOCK = 128
_SPARSE, _STREAMING = 1, -1  # in head_mask_type; 0: dense


def block_sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor | None,
    base_blockmask: Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    exact_streaming: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """O [all queries, heads_q, head_dim] of packed sequences.

    q: [all queries, heads_q, head_dim]; k, v: [all keys, heads_kv, head_dim]. cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1].
    head_mask_type: int [heads_q]: 0 dense, 1 block-sparse, -1 streaming.
    streaming_info: int [2 heads_q], needed by streaming heads: for each head how many first blocks of keys it sees, then how many
        latest ones. None: there are no streaming heads. On a GPU this is not checked, so that no call waits for it and CUDA graphs
        take all: streaming heads are then dense, and so are block-sparse ones without base_blockmask.
    base_blockmask: bool or int [sequences or 1, block-sparse heads in order, ceil(max_seqlen_q_ / 128), ceil(max_seqlen_k_ / 128)],
        needed by block-sparse heads: where it is not 0, the blocks attend. None: there are no block-sparse heads.
    max_seqlen_q_, max_seqlen_k_: at least the lengths of the longest sequence.
    p_dropout, deterministic, softmax_scale: as dropout_p, deterministic and scale of flashjit.attention().
    is_causal: masks later keys; the last query of a sequence sees its last key.

    Raises flashjit.Error; flashjit.Unsupported for exact_streaming (write it as a mask_mod) and return_attn_probs.
    """
    if exact_streaming:
        raise Unsupported(
            "exact_streaming counts keys and not blocks: write it as a mask_mod of flashjit.attention(), such as 'kv < first[h] "
            "|| kv > q + seqlen_kv - seqlen_q - latest[h]'."
        )
    if return_attn_probs:
        raise Unsupported("return_attn_probs: the probabilities are never in memory.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise WrongType(
                f"{name} is {describe(x)}: give a tensor [rows of all sequences, heads, head_dim]."
            )
    _check_types(cu_seqlens_q, cu_seqlens_k, base_blockmask)
    max_seqlen_q_, max_seqlen_k_ = (
        _longest("max_seqlen_q_", max_seqlen_q_),
        _longest("max_seqlen_k_", max_seqlen_k_),
    )
    heads, sequences = q.shape[1], cu_seqlens_q.numel() - 1
    blocks = torch.ones(
        sequences,
        heads,
        -(-max_seqlen_q_ // _BLOCK),
        -(-max_seqlen_k_ // _BLOCK),
        dtype=torch.bool,
        device=q.device,
    )
    kinds = _ints("head_mask_type", head_mask_type, heads, q.device)[:, None, None]
    if kinds.is_cpu and bool(((kinds < _STREAMING) | (kinds > _SPARSE)).any()):
        raise InvalidArgument(
            f"head_mask_type is {kinds.flatten().tolist()}: give 0 (dense), 1 (block-sparse) or -1 (streaming) for each head."
        )
    if base_blockmask is not None:
        blocks = torch.where(kinds == _SPARSE, _of_heads(base_blockmask, kinds, blocks), blocks)
    elif _has_heads_on_cpu(kinds, _SPARSE):
        raise InvalidArgument("head_mask_type has block-sparse heads (1), so give base_blockmask.")
    if streaming_info is not None:
        counts = _ints("streaming_info", streaming_info, 2 * heads, q.device).unflatten(0, (heads, 2))
        streaming = _streaming(counts, cu_seqlens_q, cu_seqlens_k, is_causal, blocks)
        blocks = torch.where(kinds == _STREAMING, streaming, blocks)
    elif _has_heads_on_cpu(kinds, _STREAMING):
        raise InvalidArgument("head_mask_type has streaming heads (-1), so give streaming_info.")
    out = attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        causal=is_causal,
        scale=softmax_scale,
        dropout_p=p_dropout,
        block_mask=BlockMap(blocks, _BLOCK),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q_,
        max_seqlen_kv=max_seqlen_k_,
        deterministic=deterministic,
    )
    return out[0].transpose(0, 1)  # type: ignore[no-any-return]


def block_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    return_attn_probs: bool = False,
) -> Tensor:
    """block_sparse_attn_func() without block-sparse heads: head_mask_type is 0 (dense) or -1 (streaming). is_causal is True by default."""
    return block_sparse_attn_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        head_mask_type,
        streaming_info,
        None,
        max_seqlen_q,
        max_seqlen_k,
        p_dropout,
        deterministic=deterministic,
        softmax_scale=softmax_scale,
        is_causal=is_causal,
        return_attn_probs=return_attn_probs,
    )


def install() -> None:
    """Makes `import block_sparse_attn` give this module, in this process. Raises flashjit.InvalidArgument where another module of
    that name was imported before."""
    own = sys.modules[__name__]
    if sys.modules.setdefault("block_sparse_attn", own) is not own:
        raise InvalidArgument(
            "block_sparse_attn was imported before: call install() first, then import models that use it."
        )


def _check_types(starts_q: Any, starts_kv: Any, base: Any) -> None:
    tensors = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_kv, "base_blockmask": base}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and (x is not None or name != "base_blockmask"):
            raise WrongType(f"{name} is {describe(x)}: give a tensor.")


def _longest(name: str, given: Any) -> Any:
    """A length in any form of an int: NumPy's and tensors of one element, too, as there."""
    try:
        most = given if isinstance(given, torch.SymInt) else operator.index(given)
    except (TypeError, ValueError):
        most = -1
    if most < 0:
        raise WrongType(f"{name} is {given!r}: give an int, at least the length of the longest sequence.")
    return most


def _has_heads_on_cpu(kinds: Tensor, kind: int) -> bool:
    """Whether there are heads of a kind, where the host can say so without waiting."""
    return kinds.is_cpu and bool((kinds == kind).any())


def _ints(name: str, given: Tensor, count: int, device: torch.device) -> Tensor:
    if not isinstance(given, Tensor) or given.is_floating_point() or given.numel() != count:
        raise InvalidArgument(f"{name} is {describe(given)}: give a tensor of {count} ints.")
    return given.to(device).flatten()


def _of_heads(base: Tensor, kinds: Tensor, blocks: Tensor) -> Tensor:
    """The maps of all heads. `base` has one for each block-sparse head, in order."""
    sequences, _, rows, columns = blocks.shape
    if (
        base.dim() != 4
        or base.shape[0] not in (1, sequences)
        or base.shape[1] == 0
        or base.shape[2:] != (rows, columns)
    ):
        raise InvalidArgument(
            f"base_blockmask is {describe(base)}: give bool [{sequences}, block-sparse heads, {rows}, {columns}], a block for {_BLOCK} "
            f"queries and {_BLOCK} keys."
        )
    if kinds.is_cpu and (count := int((kinds == _SPARSE).sum())) not in (0, base.shape[1]):
        raise InvalidArgument(
            f"base_blockmask has {base.shape[1]} maps, but head_mask_type has {count} block-sparse heads (1): give a map for each."
        )
    places = ((kinds.flatten() == _SPARSE).cumsum(0) - 1).clamp(0, base.shape[1] - 1)
    return base.to(blocks.device).ne(0).index_select(1, places)


def _streaming(counts: Tensor, cu_q: Tensor, cu_kv: Tensor, causal: bool, blocks: Tensor) -> Tensor:
    """Which blocks are among the first ones, or the latest ones that a row sees."""
    rows, columns = (torch.arange(n, device=blocks.device) for n in blocks.shape[2:])
    queries, keys = cu_q.diff(), cu_kv.diff()
    end = -(-keys // _BLOCK)[:, None].expand(-1, len(rows))
    if causal:
        before = -(-(keys - queries).clamp(min=0) // _BLOCK) - (queries - keys).clamp(min=0) // _BLOCK
        end = before[:, None] + rows + 1
    first, latest = counts[:, 0, None, None], counts[:, 1, None, None]
    end = end[:, None, :, None]
    return (columns < first) | ((columns >= end - latest) & (columns < end))

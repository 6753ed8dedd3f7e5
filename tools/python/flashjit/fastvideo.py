"""FastVideo's block-sparse attention (fastvideo_kernel) with flashjit's kernels: the same names, arguments and results.

    from flashjit.fastvideo import video_sparse_attn  # was: from fastvideo_kernel import video_sparse_attn

Tokens lie in blocks, such as 4 x 4 x 4 of a video. Block n has variable_block_sizes[n] tokens, then padding. Each block of queries
attends to some blocks of keys. Q, K and V are [batch, heads, tokens, head_dim], blocks have 16, 32, 64, 128 or 256 tokens; grouped
heads, types, head dimensions and gradients as in flashjit.attention(). All functions raise flashjit.Error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._attention import attention
from ._problem import BlockMap
from ._tensors import describe
from .errors import InvalidArgument

__all__ = ["block_sparse_attn", "block_sparse_attn_from_indices", "video_sparse_attn"]

_BLOCKS = (16, 32, 64, 128, 256)  # tokens of one


def block_sparse_attn(
    q: Tensor, k: Tensor, v: Tensor, block_map: Tensor, variable_block_sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """O, like q, and its LSE, float32 [batch, heads, tokens], the natural logarithm of the softmax's row sums.

    block_map: bool or int [batch or 1, heads or 1, blocks of queries, blocks of keys]: where it is not 0, the blocks attend.
    variable_block_sizes: int [blocks of keys]: how many first keys of a block exist; no query attends to the others. Rows of O for
    padded queries are computed like all others: ignore them.
    """
    block = _block_of(k, variable_block_sizes)
    sizes = variable_block_sizes.to(q.device, torch.int32)
    return attention(  # type: ignore[no-any-return]
        q,
        k,
        v,
        block_mask=BlockMap(block_map, block),
        mask_mod=f"kv % {block} < sizes[kv / {block}]",
        captures={"sizes": sizes},
        return_lse=True,
    )


def block_sparse_attn_from_indices(
    q: Tensor, k: Tensor, v: Tensor, q2k_idx: Tensor, q2k_num: Tensor, variable_block_sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """block_sparse_attn() with lists in place of a map: the results are the same.

    q2k_idx: int [batch, heads, blocks of queries, most]: the blocks of keys that a block of queries attends to. Numbers that are no
    block are skipped. q2k_num: int [batch, heads, blocks of queries]: how many first entries of each list count.
    variable_block_sizes: as there.
    """
    _block_of(k, variable_block_sizes)
    if q2k_idx.dim() != 4 or q2k_num.shape != q2k_idx.shape[:3]:
        raise InvalidArgument(
            f"q2k_idx is {describe(q2k_idx)} and q2k_num {describe(q2k_num)}: give ints [batch, heads, blocks of queries, most] and "
            "[batch, heads, blocks of queries]."
        )
    blocks = variable_block_sizes.numel()
    listed = torch.arange(q2k_idx.shape[3], device=q2k_idx.device) < q2k_num[..., None]
    named = torch.where(listed & (q2k_idx >= 0) & (q2k_idx < blocks), q2k_idx, blocks).long()
    chosen = torch.zeros(*q2k_idx.shape[:3], blocks + 1, dtype=torch.bool, device=q2k_idx.device)
    return block_sparse_attn(q, k, v, chosen.scatter_(3, named, True)[..., :-1], variable_block_sizes)


def video_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variable_block_sizes: Tensor,
    q_variable_block_sizes: Tensor,
    topk: int,
    block_size: int | tuple[int, int, int] = 64,
    compress_attn_weight: Tensor | None = None,
) -> Tensor:
    """O of video sparse attention (https://arxiv.org/abs/2505.13389), like q: a coarse part plus a fine one. The coarse part is attention
    among the means of blocks, one row for all tokens of a block. The fine part attends to the topk blocks of keys whose means have
    the largest products with the mean of the block of queries.

    variable_block_sizes, q_variable_block_sizes: int [blocks of keys] and [blocks of queries]: how many first tokens of a block
        exist. Rows of padding in q, k and v must be zeros, as the means sum up whole blocks.
    topk: how many blocks of keys a block of queries attends to, 1 or more.
    block_size: the tokens of a block, 16, 32, 64, 128 or 256; or three numbers, whose product they are: (4, 4, 4) for 64. Another
        number n means n x n x n, as in fastvideo_kernel.
    compress_attn_weight: like q: a factor of the coarse part; None: 1.
    """
    if isinstance(block_size, int):
        block = block_size if block_size in _BLOCKS else block_size**3
    else:
        block = math.prod(block_size)
    for name, x, sizes in (("q", q, q_variable_block_sizes), ("k", k, variable_block_sizes)):
        if x.shape[2] != sizes.numel() * block:
            raise InvalidArgument(
                f"{name} has {x.shape[2]} tokens and {sizes.numel()} blocks: with block_size {block_size} each has {block} tokens, padding "
                "included. Pad the blocks, or give the tokens of a block as block_size."
            )
    if not isinstance(topk, int) or topk < 1:
        raise InvalidArgument(
            f"topk is {topk!r}: give how many blocks of keys a block of queries attends to, from 1 on."
        )
    group = q.shape[1] // k.shape[1]
    mean_q = _means(q, q_variable_block_sizes, block)
    mean_k, mean_v = (_means(x, variable_block_sizes, block).repeat_interleave(group, 1) for x in (k, v))
    scores = mean_q @ mean_k.transpose(2, 3) / math.sqrt(q.shape[3])
    coarse = (scores.softmax(3) @ mean_v).repeat_interleave(block, 2)
    with torch.no_grad():
        kept = scores.topk(min(topk, scores.shape[3]), 3).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(3, kept, True)
    out, _ = block_sparse_attn(q, k, v, chosen, variable_block_sizes)
    return out + (coarse if compress_attn_weight is None else coarse * compress_attn_weight)


def _block_of(k: Tensor, sizes: Tensor) -> int:
    """Tokens of a block."""
    blocks = sizes.numel()
    block = k.shape[2] // blocks if blocks else 0
    if sizes.is_floating_point() or block * blocks != k.shape[2] or block not in _BLOCKS:
        raise InvalidArgument(
            f"k has {k.shape[2]} tokens and variable_block_sizes is {describe(sizes)}: give ints, one for each block of 16, 32, 64, 128 "
            "or 256 keys."
        )
    return block


def _means(x: Tensor, sizes: Tensor, block: int) -> Tensor:
    """Means of the tokens that exist, [batch, heads, blocks, head_dim], summed up in float32."""
    sums = x.unflatten(2, (-1, block)).float().sum(3)
    return (sums / sizes.to(x.device).clamp(min=1)[:, None]).to(x.dtype)

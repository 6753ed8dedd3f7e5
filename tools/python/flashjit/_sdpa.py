"""PyTorch's own scaled_dot_product_attention() in terms of attention()."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._attention import attention
from ._checks import check_number
from ._front import kept
from ._tensors import ELEMENTS, describe
from .errors import InvalidArgument, WrongType


@kept({"query": "q", "key": "k", "value": "v"}, ("dropout_p", "is_causal", "scale", "enable_gqa"))
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    _recorder: Any = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with flashjit's kernels: the same arguments, the same meaning.

    query: [..., heads_q, seqlen_q, head_dim]; key: [..., heads_kv, seqlen_kv, head_dim]; value: [..., heads_kv,
        seqlen_kv, head_dim_v]; fewer dimensions work too, and dimensions before the last two broadcast.
    attn_mask: boolean (True attends) or added to the scores, broadcastable to [..., heads_q, seqlen_q, seqlen_kv].
    dropout_p: probability to drop a pair, 0 to 1. enable_gqa: heads_q may be a multiple of heads_kv.
    is_causal: the mask is aligned at the top left, as PyTorch's. Not with attn_mask.
    scale: of any sign, or 0; default 1 / sqrt(head_dim).

    Returns O, [..., heads_q, seqlen_q, head_dim_v]; rows that attend to nothing are 0. Tensors whose strides or head_dim kernels do
    not take are copied. Nested tensors with layout=torch.jagged work without attn_mask. Raises flashjit.Error.
    """
    if is_causal and attn_mask is not None:
        raise InvalidArgument("attn_mask and is_causal are both given: as in PyTorch, give one of them.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            raise WrongType(f"{name} is {describe(tensor)}: give a tensor [..., length, head_dim].")
    if isinstance(scale, Tensor) and scale.dim() == 0:
        scale = scale.item()
    if dropout_p == 1:
        return 0.0 * scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa
        )
    if query.is_nested or key.is_nested or value.is_nested:
        return _of_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale)
    sizes = query.shape, key.shape, value.shape
    if not _is_plain(sizes, enable_gqa):
        leading = _broadcast(*(size[:-3] for size in sizes))
        q, k, v = (_four_dimensions(tensor, leading) for tensor in (query, key, value))
        if not enable_gqa:
            q, k, v = _with_all_heads(q, k, v)
        elif k.shape[1] != v.shape[1]:
            k, v = (_repeated(name, x, q.shape[1]) for name, x in (("key", k), ("value", v)))
        out = _attention(q, k, v, leading, attn_mask, dropout_p, is_causal, scale, _recorder)
        heads = leading + sizes[0][-3:-2] if enable_gqa else _broadcast(*(size[:-2] for size in sizes))
        return out.reshape(*heads, sizes[0][-2], sizes[2][-1])
    return _attention(query, key, value, sizes[0][:1], attn_mask, dropout_p, is_causal, scale, _recorder)


def _is_plain(sizes: tuple[torch.Size, torch.Size, torch.Size], enable_gqa: bool) -> bool:
    """Whether nothing has to be broadcast or reshaped."""
    q, k, v = sizes
    return (
        len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and k[1] == v[1]
        and (enable_gqa or q[1] == k[1])
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    leading: torch.Size,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    recorder: Any,
) -> Tensor:
    """For tensors with four dimensions, as these are or copied."""
    score_mod, mask_mod, captures = mask_programs(attn_mask, leading, q, k)
    dim_v = v.shape[3]
    q, k, v, scale = supported(q, k, v, scale)
    causal: bool | str = "top_left" if is_causal and q.shape[2] != k.shape[2] else is_causal
    out = attention(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        dropout_p=dropout_p,
        score_mod=score_mod,
        mask_mod=mask_mod,
        captures=captures,
        **({} if recorder is None else {"_recorder": recorder}),
    )
    if attn_mask is not None and attn_mask.requires_grad and attn_mask.numel() == 0:
        out = out + attn_mask.sum()  # so that it has a gradient, though nothing reads it
    return out if out.shape[3] == dim_v else out[..., :dim_v]


def _of_jagged(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Each sequence by itself: [batch, heads, rows, dim], where the rows differ."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if (
            not x.is_nested
            or x.layout is not torch.jagged
            or x.dim() != 4
            or x._ragged_idx != 2
            or x.lengths() is not None
        ):
            raise WrongType(
                f"{name} must be nested, as query, key and value: [batch, heads, rows, head_dim] with "
                "layout=torch.jagged, where the rows differ, without gaps. Give such a tensor, or pad all."
            )
    if attn_mask is not None:
        raise InvalidArgument("attn_mask is given with nested tensors: leave it out, or pad them.")
    q, k, v = (x.transpose(1, 2).values().transpose(0, 1)[None] for x in (query, key, value))
    dim_v = v.shape[3]
    q, k, v, scale = supported(q, k, v, scale)
    out = attention(
        q,
        k,
        v,
        causal="top_left" if is_causal else False,
        scale=scale,
        dropout_p=dropout_p,
        cu_seqlens_q=query.offsets().int(),
        cu_seqlens_kv=key.offsets().int(),
        max_seqlen_q=query._get_max_seqlen(),
        max_seqlen_kv=key._get_max_seqlen(),
    )
    rows = out[0, ..., :dim_v].transpose(0, 1)
    return torch.nested.nested_tensor_from_jagged(rows, query.offsets()).transpose(1, 2)


def _repeated(name: str, tensor: Tensor, heads: int) -> Tensor:
    """Each head for as many of the query's."""
    if not tensor.shape[1] or heads % tensor.shape[1]:
        raise InvalidArgument(
            f"query has {heads} heads and {name} {tensor.shape[1]}: the query's must be a multiple."
        )
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _with_all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """One head serves all, as in other broadcasts."""
    heads = max(q.shape[1], k.shape[1], v.shape[1])
    if any(t.shape[1] not in (1, heads) for t in (q, k, v)):
        raise InvalidArgument(
            f"query has {q.shape[1]} heads, key {k.shape[1]} and value {v.shape[1]}: set "
            "enable_gqa=True for grouped heads."
        )
    return tuple(t.expand(-1, heads, -1, -1) for t in (q, k, v))


def _broadcast(q: torch.Size, k: torch.Size, v: torch.Size) -> torch.Size:
    """torch.broadcast_shapes(), which takes 8 us, where there is something to do."""
    if q == k == v:
        return q
    try:
        return torch.broadcast_shapes(q, k, v)
    except RuntimeError:
        raise InvalidArgument(
            f"query, key and value have the leading dimensions {list(q)}, {list(k)} and {list(v)}, which do not "
            "broadcast: make them equal, or 1."
        ) from None


def _four_dimensions(tensor: Tensor, leading: torch.Size) -> Tensor:
    """[batch, heads, length, dim] of [..., heads, length, dim]."""
    if tensor.dim() == 4 and tensor.shape[:1] == leading:
        return tensor
    if tensor.dim() == 2:
        tensor = tensor[None]
    return tensor.expand(*leading, *tensor.shape[-3:]).reshape(math.prod(leading), *tensor.shape[-3:])


def supported(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Q, K, V and a scale that kernels take, with the same result: scales above 0, head dimensions that are multiples of 8."""
    dim = q.shape[3]
    if scale is None:
        if dim % 8 or not dim:
            scale = 1 / math.sqrt(dim) if dim else 1.0
    else:
        check_number("scale", scale)
        if scale <= 0:
            q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    return _padded(q), _padded(k), _padded(v), scale


def _padded(tensor: Tensor) -> Tensor:
    dim = tensor.shape[3]
    return F.pad(tensor, (0, max(-dim % 8, 8 - dim))) if dim % 8 or not dim else tensor


def mask_programs(mask: Tensor | None, leading: torch.Size, q: Tensor, k: Tensor) -> tuple[Any, Any, Any]:
    """A dense mask as a program that reads it, along the dimensions in which it differs."""
    if mask is None:
        return None, None, None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise WrongType(
            f"attn_mask is {describe(mask)}: give booleans, or floating point numbers to add to the scores."
        )
    full = (*leading, q.shape[1], q.shape[2], k.shape[2])
    if len(mask.shape) > len(full) or any(
        size not in (1, needed) for size, needed in zip(reversed(mask.shape), reversed(full))
    ):
        raise InvalidArgument(f"attn_mask is {list(mask.shape)}: it must broadcast to {list(full)}.")
    if len(leading) > 1:
        if mask.dim() > 3:
            mask = mask.expand(*leading, *mask.shape[-3:]).reshape(math.prod(leading), *mask.shape[-3:])
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.numel() == 0:
        return None, None, None  # no pair is there to read it
    indices = [
        name
        for name, size, stride in zip(("b", "h", "q", "kv"), mask.shape, mask.stride())
        if size > 1 and stride != 0
    ]
    places = tuple(slice(None) if name in indices else 0 for name in ("b", "h", "q", "kv"))
    mask = mask[places] if indices else mask[:, 0, 0, 0][:1]
    read = f"attn_mask[{', '.join(indices) or '0'}]"
    if mask.dtype == torch.bool:
        return None, read, {"attn_mask": mask}
    if mask.dtype not in ELEMENTS:
        mask = mask.float()
    return f"score + {read}", None, {"attn_mask": mask}

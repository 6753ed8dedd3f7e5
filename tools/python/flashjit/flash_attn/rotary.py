"""flash_attn.layers.rotary and flash_attn.ops.triton.rotary, in PyTorch's operators.

Layouts are [batch, seqlen, heads, head_dim], or [all rows, heads, head_dim] with cu_seqlens. Tables are
[positions, rotary_dim / 2].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tensors import describe
from ..errors import InvalidArgument
from ._attend import places


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., dim] with its first columns rotated, by angles [..., rotary_dim / 2] that broadcast."""
    half = cos.shape[-1]
    cos, sin = cos.float(), sin.float()
    first = x[..., : 2 * half].float()
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else (first[..., :half], first[..., half:])
    pair = (a * cos - b * sin, a * sin + b * cos)
    new = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return new if 2 * half == x.shape[-1] else torch.cat((new, x[..., 2 * half :]), -1)


def angles_at(cos: Tensor, sin: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the tables. Positions past their end are not rotated, as in flash-attn."""
    last = cos.shape[0] - 1
    past = (at > last)[..., None]
    at = at.clamp(max=last)
    return cos[at].masked_fill(past, 1.0), sin[at].masked_fill(past, 0.0)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """x with its first rotary_dim columns rotated, row i of a sequence at position seqlen_offsets + i.

    seqlen_offsets: a number, or one for each sequence. conjugate: rotates the other way. inplace: x is written
    and returned.
    """
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise InvalidArgument(
            f"cos and sin are {describe(cos)} and {describe(sin)}: they must be "
            "[positions, rotary_dim / 2], with a rotary_dim of "
            f"at most the {x.shape[-1]} columns of x."
        )
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, Tensor) and tuple(seqlen_offsets.shape) != (sequences,):
        raise InvalidArgument(
            f"seqlen_offsets is {describe(seqlen_offsets)}: it must be a number, or integers [{sequences}]."
        )
    if cu_seqlens is not None:
        sequence, at = places(cu_seqlens, x.shape[0])
        at = at + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    else:
        at = torch.arange(x.shape[1], device=x.device)
        at = seqlen_offsets[:, None] + at if isinstance(seqlen_offsets, Tensor) else at + seqlen_offsets
    cos, sin = (angle.unsqueeze(-2) for angle in angles_at(cos, sin, at))
    out = turned(x, cos, -sin if conjugate else sin, interleaved)
    return x.copy_(out) if inplace else out


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """apply_rotary() with the order of arguments that layers have. With gradients to x."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


class ApplyRotaryEmb:
    apply = staticmethod(apply_rotary_emb)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates Q and K in place in qkv [b, s, 3, h, d], or [b, s, hq + 2 * hkv, d] with num_heads_q."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        if num_heads_q is None:
            raise InvalidArgument(
                f"qkv is {describe(qkv)}: with four dimensions, [b, s, hq + 2 * hkv, d], "
                "give num_heads_q too."
            )
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : (qkv.shape[2] + num_heads_q) // 2]
    apply_rotary(q, cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
    apply_rotary(
        k,
        cos if cos_k is None else cos_k,
        sin if sin_k is None else sin_k,
        seqlen_offsets,
        interleaved=interleaved,
        inplace=True,
    )
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates K in place in kv [b, s, 2, h, d]."""
    apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
    return kv


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """A quarter turn of each pair of columns."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """apply_rotary_emb() with the angles of x's rows, [s, rotary_dim / 2] or [b, s, rotary_dim / 2]."""
    return turned(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


class RotaryEmbedding(torch.nn.Module):
    """Rotates qkv in place, or q and kv, with tables that grow as needed. scale_base: that of xPos."""

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-even / dim), persistent=False)
        self.register_buffer(
            "scale", None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim), persistent=False
        )
        self._seq_len_cached = 0
        self._cos_cached: Any = None
        self._sin_cached: Any = None
        self._cos_k_cached: Any = None
        self._sin_k_cached: Any = None

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        cos = self._cos_cached
        if (
            cos is not None
            and seqlen <= self._seq_len_cached
            and cos.device == device
            and cos.dtype == dtype
            and not (self.training and cos.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        # Made anew, as inv_freq may be in 16 bits.
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        angle = torch.outer(position, self.base ** (-even / self.dim))
        factor: Any = 1.0
        if self.scale is not None and self.scale_base is not None:
            factor = self.scale.to(angle.device) ** ((position - seqlen // 2) / self.scale_base)[:, None]
            of_k = angle.cos() / factor, angle.sin() / factor
            self._cos_k_cached, self._sin_k_cached = (x.to(dtype) for x in of_k)
        tables = angle.cos() * factor, angle.sin() * factor
        self._cos_cached, self._sin_cached = (x.to(dtype) for x in tables)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """qkv of apply_rotary_emb_qkv_(), or q [b, s, h, d] with kv [b, s, 2, h, d]. Where seqlen_offset is a
        tensor, max_seqlen is the last position there is."""
        if max_seqlen is not None or isinstance(seqlen_offset, int):
            rows = max_seqlen if max_seqlen is not None else qkv.shape[1] + int(seqlen_offset)
            self._update_cos_sin_cache(rows, device=qkv.device, dtype=qkv.dtype)
        tables, of_k = (self._cos_cached, self._sin_cached), (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *of_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, *tables, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(
            kv, *(tables if self.scale is None else of_k), self.interleaved, seqlen_offset
        )

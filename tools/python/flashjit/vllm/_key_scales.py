"""vLLM's caches of 8 bits with a scale for each token and head.

vLLM counts, for a token and a head, the bytes of K's and V's codes and of two float32 scales. Kernels read rows by 16 bytes, which
a scale behind each row would leave unaligned, so each head's part of a block has K's codes, V's codes, K's scales and V's scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._tensors import describe
from ..errors import InvalidArgument

_SCALE = torch.float32.itemsize


def row_bytes(head_size: int) -> int:
    """Bytes of K and V of a token and a head."""
    return 2 * (head_size + _SCALE)


def customized(spec: Any) -> Any:
    """vLLM's specification of a cache, with room for the scales. vLLM before 0.33 knows it by itself."""
    if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
        return spec
    return replace(spec, state_content_bytes=row_bytes(spec.head_size))


def split(kv_cache: Tensor, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """K's and V's pages, [blocks, heads, rows of a block, d], and their scales, [blocks, heads, rows of a block], as views of
    [blocks, heads, rows of a block, row_bytes()], in which the parts of a head or of a block are without gaps."""
    blocks, heads, rows, content = kv_cache.shape
    block, head, row, _ = kv_cache.stride()
    if row == heads * content and head == content:  # rows before heads: a block's bytes are shared out anew
        head = rows * content
    elif row != content:
        raise InvalidArgument(
            f"kv_cache is {describe(kv_cache)} with strides {list(kv_cache.stride())}: rows of a head, or of a block, must "
            "lie one after another."
        )
    codes = 2 * rows * head_size
    parts = kv_cache.view(torch.uint8).as_strided(
        (blocks, heads, rows * content), (block, head, 1), kv_cache.storage_offset()
    )
    k, v = parts[..., :codes].view(dtype).unflatten(2, (2, rows, head_size)).unbind(2)
    k_scale, v_scale = parts[..., codes:].view(torch.float32).unflatten(2, (2, rows)).unbind(2)
    return k, v, {"k_scale": k_scale, "v_scale": v_scale}

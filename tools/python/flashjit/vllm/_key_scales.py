"""vLLM's caches of 8 and 4 bits with a scale for each token and head.

vLLM counts, for a token and a head, the bytes of K's and V's codes and four bytes for the scale of each. Kernels read rows by 16
bytes, which a scale behind each row would leave unaligned, so each head's part of a block has K's codes, V's codes, K's scales and
V's scales. Beside a scale of 4 bits there is a zero point, both in bf16."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._engines import CACHE_FORMATS, CACHE_TYPES
from .._tensors import describe
from ..errors import InvalidArgument

_SCALE = 4  # bytes of a key's numbers


def row_bytes(head_size: int, cache_type: str) -> int:
    """Bytes of K and V of a token and a head."""
    return 2 * (_code_bytes(head_size, cache_type) + _SCALE)


def _code_bytes(head_size: int, cache_type: str) -> int:
    return head_size // 2 if cache_type in CACHE_FORMATS else head_size


def customized(spec: Any) -> Any:
    """vLLM's specification of a cache, with room for the scales. vLLM before 0.33 knows it by itself."""
    mode = spec.kv_quant_mode
    if spec.state_content_bytes is not None or not mode.is_per_token_head:
        return spec
    return replace(spec, state_content_bytes=row_bytes(spec.head_size, mode.name.lower()))


def split(kv_cache: Tensor, head_size: int, cache_type: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """K's and V's pages, [blocks, heads, rows of a block, d or bytes], and attention()'s arguments for their scales, as views of
    [blocks, heads, rows of a block, row_bytes()], in which the parts of a head or of a block are without gaps."""
    blocks, heads, rows, content = kv_cache.shape
    block, head, row, _ = kv_cache.stride()
    if kv_cache.element_size() != 1 or content != row_bytes(head_size, cache_type):
        raise InvalidArgument(
            f"kv_cache is {describe(kv_cache)}: with {cache_type} and heads of {head_size} it must be bytes [blocks, heads, rows of a "
            f"block, {row_bytes(head_size, cache_type)}]."
        )
    if row == heads * content and head == content:  # rows before heads: a block's bytes are shared out anew
        head = rows * content
    elif row != content:
        raise InvalidArgument(
            f"kv_cache is {describe(kv_cache)} with strides {list(kv_cache.stride())}: rows of a head, or of a block, must "
            "lie one after another."
        )
    row_codes = _code_bytes(head_size, cache_type)
    codes = 2 * rows * row_codes
    parts = kv_cache.view(torch.uint8).as_strided(
        (blocks, heads, rows * content), (block, head, 1), kv_cache.storage_offset()
    )
    form = CACHE_FORMATS.get(cache_type)
    dtype = torch.uint8 if form is not None else CACHE_TYPES[cache_type]
    k, v = parts[..., :codes].view(dtype).unflatten(2, (2, rows, row_codes)).unbind(2)
    of_scales = parts[..., codes:]
    if form is None:
        k_scale, v_scale = of_scales.view(torch.float32).unflatten(2, (2, rows)).unbind(2)
        return k, v, {"k_scale": k_scale, "v_scale": v_scale}
    k_scale, v_scale = of_scales.view(torch.bfloat16).unflatten(2, (2, rows, 2)).unbind(2)
    return k, v, {"k_format": form, "v_format": form, "k_block_scale": k_scale, "v_block_scale": v_scale}


class Rotation:
    """Rows times a random orthogonal matrix times a power of two, so that no column of 4 bits has outliers: K's and Q's, which
    leaves scores as they are, V's, and O's back."""

    def __init__(self, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        block = head_size & -head_size  # the largest power of two that divides it
        matrix = functools.reduce(
            lambda x, _: torch.cat((torch.cat((x, x), 1), torch.cat((x, -x), 1))),
            range(block.bit_length() - 1),
            torch.ones(1, 1),
        )
        signs = torch.randint(2, (block, 1), generator=torch.Generator().manual_seed(4)) * 2 - 1
        exact = 2.0 ** -(
            (block.bit_length() - 1) // 2
        )  # in every type, where the square root of `block` may be none
        whole = torch.block_diag(*[matrix * signs * exact] * (head_size // block))
        square = block * exact**2  # what the matrix times its transpose is
        self._matrix = whole.to(device, dtype)
        self._back = (whole.T / square).to(device, dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rotates rows of K and V."""
        return rows @ self._matrix

    def of_q(self, rows: Tensor) -> Tensor:
        return rows @ self._back.T

    def back(self, rows: Tensor, out: Tensor) -> None:
        torch.matmul(rows, self._back, out=out)

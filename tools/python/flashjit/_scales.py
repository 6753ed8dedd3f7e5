"""Q, K and V of 8 bits: their types in a spec, and their scales as the library's views of four dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._call_types import Fixed, Problem
from ._tensors import KV_TYPES, SPEC_TYPES, describe, how_to_give_bytes, is_differentiated
from .errors import InvalidArgument, Unsupported, WrongType


def has_codes(q: Tensor, k: Tensor, scales: tuple[Any, ...], pv_sums: int | str) -> bool:
    """Whether attention() is given 8 bits, or what goes with them."""
    if type(pv_sums) is not int or pv_sums != 1:
        return bool(sum_options(q, pv_sums))
    return k.dtype in KV_TYPES or q.dtype in KV_TYPES or any([x is not None for x in scales])


def with_scales(
    fixed: Fixed,
    problem: Problem,
    q: Tensor,
    k: Tensor,
    scales: tuple[Any, ...],
    out_dtype: torch.dtype | None,
    pv_sums: int | str,
) -> tuple[Fixed, Problem]:
    """The call's tensors and options, with scales of K, V and Q added. Scales of blocks are refused: they need a format."""
    if any(scale is not None for scale in scales[3:]):
        raise InvalidArgument(
            "k_block_scale or v_block_scale is given without k_format or v_format, whose scales it has: give the format."
        )
    k_scale, v_scale, q_scale = [
        in_four_dims(name, scale, problem.cached and name != "q_scale")
        for name, scale in zip(("k_scale", "v_scale", "q_scale"), scales)
    ]
    options, out_type = kv_options(k, k_scale, v_scale) + sum_options(q, pv_sums), ""
    if q.dtype in KV_TYPES:
        if q.dtype == torch.int8:
            raise WrongType(
                "q is int8: products of 8 bits are for float8_e4m3fn and float8_e5m2 alone; give one of these, or q in "
                "16 bits."
            )
        if k.dtype != q.dtype:
            raise InvalidArgument(
                f"q is {describe(q)} and k is {describe(k)}: they must have one type, or q 16 bits."
            )
        options, out_type = (
            options + ":q_codes",
            SPEC_TYPES[torch.bfloat16 if out_dtype in (None, torch.float32) else out_dtype],
        )
    elif q_scale is not None:
        raise InvalidArgument(
            f"q_scale is given, but q is {str(q.dtype).removeprefix('torch.')}: it goes with float8_e4m3fn and "
            "float8_e5m2."
        )
    return (
        fixed._replace(k_scale=k_scale, v_scale=v_scale, q_scale=q_scale),
        problem._replace(options=problem.options + options, out_type=out_type),
    )


def sum_options(q: Tensor, pv_sums: int | str) -> str:
    """Options of a spec with attention()'s pv_sums."""
    options = {1: "", 4: ":sums4", "all": ":sums_all"}
    if type(pv_sums) not in (int, str) or pv_sums not in options:
        raise InvalidArgument(f'pv_sums is {pv_sums!r}: give 1, 4 or "all".')
    if pv_sums != 1 and q.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise InvalidArgument(
            f"pv_sums is {pv_sums!r}, but q is {describe(q)}: only products of 8 bits are summed with few bits; leave it out."
        )
    return options[pv_sums]


def kv_options(k: Tensor, *scales: Tensor | None) -> str:
    """Options of a spec whose K has this type, and these scales: each key has its own where pages or rows have."""
    if k.dtype not in KV_TYPES:
        if any(scale is not None for scale in scales):
            if k.dtype == torch.uint8:
                raise WrongType(f"k is {describe(k)}: {how_to_give_bytes('k')}.")
            raise InvalidArgument(
                f"k_scale or v_scale is given, but K and V are {str(k.dtype).removeprefix('torch.')}: scales go "
                f"with {names_of_types()}."
            )
        return ""
    by_key = any(scale is not None and (scale.shape[1] > 1 or scale.shape[3] > 1) for scale in scales)
    return f":kv{KV_TYPES[k.dtype]}{':key_scales' if by_key else ''}"


def names_of_types() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_TYPES)


def in_four_dims(name: str, scale: Any, cached: bool) -> Tensor | None:
    """[sequences, pages, heads, rows] of what attention() takes."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        raise WrongType(
            f"{name} is a {type(scale).__name__}: give a float32 torch.Tensor on the device of K."
        )
    if scale.dtype != torch.float32 or scale.dim() > 4 or scale.layout is not torch.strided:
        raise InvalidArgument(
            f"{name} is {describe(scale)}: it must be float32: one number, [heads_kv], [sequences, heads_kv], "
            "[pages, heads_kv, rows], or [sequences, pages, heads_kv, rows], with 1 where all have one."
        )
    if is_differentiated(scale):
        raise Unsupported(
            f"{name} requires a gradient, which K and V of 8 bits do not have: give its detach()."
        )
    if scale.dim() == 4:
        return scale
    if scale.dim() == 3:
        return scale[None] if cached else scale[:, None]
    return scale.reshape(1, 1, -1, 1) if scale.dim() < 2 else scale[:, None, :, None]


def is_fp32_out(out_dtype: Any, q: Tensor) -> bool:
    """Whether O is asked for in fp32, and Q is not."""
    if q.dtype in KV_TYPES:
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in SPEC_TYPES:
            raise InvalidArgument(
                f"out_dtype is {out_dtype}: with q of 8 bits give torch.bfloat16, torch.float16 or torch.float32."
            )
        return out_dtype == torch.float32
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in (torch.float32, q.dtype):
        raise InvalidArgument(
            f"out_dtype is {out_dtype}: give torch.float32, torch.float8_e4m3fn or torch.float4_e2m1fn_x2, or None for the type of "
            f"q, {q.dtype}."
        )
    return out_dtype != q.dtype

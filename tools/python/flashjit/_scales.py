"""K and V of 8 bits: their types in a spec, and their scales as the library's views of four dimensions."""
from __future__ import annotations

from typing import Any, Union

import torch
from torch import Tensor

from ._plans import KV_TYPES, Fixed, Problem, describe
from .errors import InvalidArgument, Unsupported, WrongType


def with_scales(fixed: Fixed, problem: Problem, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any) -> tuple[Fixed, Problem]:
    """The call's tensors and options with those of its scales."""
    scales = [in_four_dims(name, scale, problem.cached) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))]
    return (fixed._replace(k_scale=scales[0], v_scale=scales[1]),
            problem._replace(options=problem.options + kv_options(k, *scales)))


def kv_options(k: Tensor, *scales: Union[Tensor, None]) -> str:
    """Of a spec whose K has this type, and these scales: each key has its own where pages or rows have."""
    if k.dtype not in KV_TYPES:
        if any(scale is not None for scale in scales):
            raise InvalidArgument(f"k_scale or v_scale is given, but K and V are {str(k.dtype).removeprefix('torch.')}: scales go "
                                  f"with {names_of_types()}.")
        return ""
    by_key = any(scale is not None and (scale.shape[1] > 1 or scale.shape[3] > 1) for scale in scales)
    return f":kv{KV_TYPES[k.dtype]}{':key_scales' if by_key else ''}"


def names_of_types() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_TYPES)


def in_four_dims(name: str, scale: Any, cached: bool) -> Union[Tensor, None]:
    """[sequences, pages, heads, rows] of what attention() takes."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        raise WrongType(f"{name} is a {type(scale).__name__}: give a float32 torch.Tensor on the device of K.")
    if scale.dtype != torch.float32 or scale.dim() > 4:
        raise InvalidArgument(f"{name} is {describe(scale)}: it must be float32: one number, [heads_kv], [sequences, heads_kv], "
                              "[pages, heads_kv, rows], or [sequences, pages, heads_kv, rows], with 1 where all have one.")
    if scale.requires_grad:
        raise Unsupported(f"{name} requires a gradient, which K and V of 8 bits do not have: give its detach().")
    if scale.dim() == 4:
        return scale
    if scale.dim() == 3:
        return scale[None] if cached else scale[:, None]
    return scale.reshape(1, 1, -1, 1) if scale.dim() < 2 else scale[:, None, :, None]

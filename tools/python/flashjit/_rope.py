"""Rotary position embeddings (RoPE) as append() and quantize() take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._library import ELEMENT_TYPES, Norm, Rope
from ._tensors import ELEMENTS, describe, has_rows
from .errors import InvalidArgument


def read_sections(sections: Any) -> list[int]:
    """M-RoPE's pairs by time, height and width; none: zeros."""
    if sections is None:
        return [0, 0, 0]
    found = list(sections) if isinstance(sections, (tuple, list)) else []
    if len(found) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) for n in found):
        raise InvalidArgument(
            f"mrope_section is {sections!r}: give three ints, the pairs that rotate by time, height and width."
        )
    return found


def norm_struct(weight: Tensor | None, eps: float) -> Norm:
    """Without its pointer."""
    if weight is None:
        return Norm()
    return Norm(type=ELEMENT_TYPES[ELEMENTS[weight.dtype]], eps=eps)


def rope_struct(
    cos: Tensor | None,
    theta: float,
    dims: int,
    interleaved: bool,
    sections: Sequence[int] = (0, 0, 0),
    interleaved_sections: bool = False,
) -> Rope:
    """Without pointers."""
    rope = Rope(
        theta=theta,
        dims=dims,
        interleaved=interleaved,
        sections=tuple(sections),
        interleaved_sections=interleaved_sections,
    )
    if cos is not None:
        rope.table_rows, pairs = cos.shape
        rope.stride, rope.type = cos.stride(0), ELEMENT_TYPES[ELEMENTS[cos.dtype]]
        if not dims:
            rope.dims = 2 * pairs
    return rope


def readable_angles(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The kernels know one stride of rows for both tables."""
    if cos is None or sin is None:
        return cos, sin
    cos, sin = cos.resolve_neg(), sin.resolve_neg()
    if cos.stride() != sin.stride() or not has_rows(cos):
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin


def check_both_tables(cos: Tensor | None, sin: Tensor | None) -> None:
    if (cos is None) != (sin is None):
        raise InvalidArgument(
            f"{'cos' if sin is None else 'sin'} is given alone: give both tables, or theta."
        )


def check_angles(
    dtype: torch.dtype, rows: int, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, dim: int
) -> None:
    """Checks cos, sin and positions for `rows` rows of `dtype`, with `dim` columns."""
    if cos is not None and cos.dim() == 2 and 2 * cos.shape[1] > dim:
        raise InvalidArgument(
            f"cos has {cos.shape[1]} columns, for rows of {dim}: give one for each pair of dimensions, "
            f"at most {dim // 2}, without the second half of torch.cat([cos, cos], -1)."
        )
    if positions is not None and (positions.dtype != torch.int32 or positions.numel() != rows):
        raise InvalidArgument(
            f"positions is {describe(positions)}: it must be int32 with one number for each of the {rows} rows."
        )
    for name, angles in (("cos", cos), ("sin", sin)):
        if (
            angles is not None
            and cos is not None
            and (
                angles.dim() != 2
                or angles.dtype not in (torch.float32, dtype)
                or angles.shape != cos.shape
                or angles.dtype != cos.dtype
            )
        ):
            raise InvalidArgument(
                f"{name} is {describe(angles)}: cos and sin must be float32 or {str(dtype).removeprefix('torch.')} "
                "[positions, rope_dims / 2], both alike."
            )

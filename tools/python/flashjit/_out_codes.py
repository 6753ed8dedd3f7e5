"""O as codes with scales: what attention() makes of out_dtype, out_scale and out_block_scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _library
from ._library import ForwardArgs
from ._structs import tensor_struct, words_at
from ._tensors import dense_strides, describe
from .errors import InvalidArgument, WrongType

FP4 = getattr(torch, "float4_e2m1fn_x2", None)
_FP8 = torch.float8_e4m3fn
CODE_TYPES = (_FP8, FP4) if FP4 is not None else (_FP8,)
_SCALE, _BLOCK_SCALE = words_at(ForwardArgs, "out_scale", "out_block_scale")
_BLOCK = 16  # columns of NVFP4 that share a scale


class OutCodes(NamedTuple):
    """How O is stored, and the tensors of its scales."""

    format: str  # of the spec
    scale: Tensor | None
    block_scale: Tensor | None  # the caller's memory
    blocks: int  # scales of a row; 0: none
    swizzled: bool = False  # scales are a matrix of all tokens and heads, 128x4

    def options(self, options: str) -> str:
        """The spec's options with the format, before the switches."""
        programs, brace, switches = options.rpartition("}")
        swizzled = ":swizzled_scales" if self.swizzled else ""
        return f"{programs}{brace}:out{{{self.format}}}{switches}{swizzled}"

    def new_block_scale(self, plan: Any) -> Tensor | None:
        """Memory for the scales of a plan's rows: the caller's, or made here."""
        if not self.blocks:
            return None
        size, dtype = self._size_of_scales(plan), torch.float32 if self.scale is None else _FP8
        given = self.block_scale
        if given is None:
            strides = (size[1], 1) if self.swizzled else dense_strides(size, plan.out_stride)
            made = torch.empty_strided(size, strides, dtype=dtype, device=plan.device)
            return made if plan.launches else made.fill_(1)
        gaps = self.swizzled and not given.is_contiguous()
        if tuple(given.shape) != size or given.dtype != dtype or given.device != plan.device or gaps:
            type_name, contiguous = str(dtype).removeprefix("torch."), ", contiguous" if self.swizzled else ""
            raise InvalidArgument(
                f"out_block_scale is {describe(given)}: it must be {type_name} {list(size)} on {plan.device}{contiguous}."
            )
        return given

    def _size_of_scales(self, plan: Any) -> tuple[int, ...]:
        if not self.swizzled:
            return (*plan.lse_size, self.blocks)
        batch, heads, rows = plan.lse_size
        return (-(-batch * rows // 128) * 128, heads * self.blocks)

    def put(self, words: Any, plan: Any) -> Tensor | None:
        """Places in the words of a call what the scales are in: the tensor of the blocks' scales."""
        if self.scale is not None:
            if self.scale.device != plan.device:
                raise InvalidArgument(f"out_scale is {describe(self.scale)}: give it on {plan.device}.")
            words[_SCALE] = self.scale.data_ptr()
        scales = self.new_block_scale(plan)
        if scales is not None:
            matrix = scales[None, None] if self.swizzled else scales
            struct = _library.words_of(tensor_struct(matrix.shape, matrix.stride()))
            words[_BLOCK_SCALE : _BLOCK_SCALE + len(struct)] = struct
            words[_BLOCK_SCALE] = scales.data_ptr()
        return scales

    def returned(self, out: Tensor) -> Tensor:
        """O with the type that was asked for."""
        return out.view(FP4) if out.dtype == torch.uint8 and FP4 is not None else out


def read_out_codes(
    out_dtype: Any, scale: Any, block_scale: Any, out: Tensor | None, v: Tensor, swizzled: bool
) -> tuple[OutCodes | None, Tensor | None, Any]:
    """What out_dtype says, None where O has elements; the caller's memory for O, NVFP4 as bytes; the type of elements."""
    if out_dtype is scale is block_scale is None and not swizzled:
        return None, out, None
    codes = _codes_of(out_dtype, scale, block_scale, v.shape[-1])
    if swizzled:
        codes = _with_swizzled_scales(codes, out_dtype, v.shape[-1])
    if codes is None:
        return None, out, out_dtype
    return codes, out.view(torch.uint8) if isinstance(out, Tensor) and out.dtype == FP4 else out, None


def _codes_of(out_dtype: Any, scale: Any, block_scale: Any, columns: int) -> OutCodes | None:
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in CODE_TYPES:
        for name, given in (("out_scale", scale), ("out_block_scale", block_scale)):
            if given is not None:
                raise InvalidArgument(
                    f"{name} is given and out_dtype is {out_dtype}: give torch.float8_e4m3fn or torch.float4_e2m1fn_x2, or leave "
                    "it out."
                )
        return None
    for name, given in (("out_scale", scale), ("out_block_scale", block_scale)):
        if given is not None and not isinstance(given, Tensor):
            raise WrongType(f"{name} is a {type(given).__name__}: give a torch.Tensor.")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise InvalidArgument(f"out_scale is {describe(scale)}: give float32, one number.")
    scale = None if scale is None else scale.resolve_neg()
    if out_dtype == _FP8 and scale is not None:
        if block_scale is not None:
            raise InvalidArgument(
                "out_scale and out_block_scale are both given: O of float8_e4m3fn has one scale for all of it, or one for each row, "
                "so leave one out."
            )
        return OutCodes("e4m3", scale, None, 0)
    if out_dtype == _FP8:
        return OutCodes("e4m3:row:fp32:apart", None, block_scale, 1)
    if scale is None:
        raise InvalidArgument("out_scale is not given: O of float4_e2m1fn_x2 takes one, float32, one number.")
    return OutCodes("e2m1:g16:e4m3:apart:scaled", scale, block_scale, columns // _BLOCK)


def _with_swizzled_scales(codes: OutCodes | None, out_dtype: Any, columns: int) -> OutCodes:
    if codes is None or out_dtype != FP4:
        raise InvalidArgument(
            f"swizzled_scales is set and out_dtype is {out_dtype}: it is for torch.float4_e2m1fn_x2, so leave it out."
        )
    if columns % (4 * _BLOCK):
        raise InvalidArgument(
            f"swizzled_scales is set and v has {columns} columns: give a multiple of {4 * _BLOCK}, or leave it out."
        )
    return codes._replace(swizzled=True)


def columns_of_out(options: str, columns: int) -> int:
    """Columns of O's rows in memory."""
    return columns // 2 if ":out{e2m1" in options else columns


def type_of_codes(options: str) -> torch.dtype | None:
    """None: O has elements."""
    if ":out{" not in options:
        return None
    return torch.uint8 if ":out{e2m1" in options else _FP8

"""quantize(): a tensor as codes of 8 bits times scales."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _library
from ._checks import check_number, check_text, check_whole
from ._fakes import register_fake
from ._formats import KvFormat, check_block_scales, new_rows, read_format
from ._launch import is_watched, launch
from ._library import QuantizeArgs, Rope, spec_handle
from ._plans import KEEP_PLANS
from ._rope import check_angles, check_both_tables, readable_angles, rope_struct
from ._structs import tensor_struct
from ._tensor_checks import check_alike, check_device
from ._tensors import KV_TYPES, SPEC_TYPES, dense_strides, describe, is_differentiated, readable, signature
from ._transforms import have_tangents, refuse_batched, refuse_wrapped
from .errors import InvalidArgument, Unsupported, WrongType

#: What shares a scale, and the scales' sizes: of x [batch, heads, rows, head_dim], and of as many heads as have one.
_SIZES = {
    "tensor": lambda b, h, s: (),
    "head": lambda b, h, s: (b, h),
    "page": lambda b, h, s: (b, h, 1),
    "row": lambda b, h, s: (b, h, s),
}


class _Angles(NamedTuple):
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None


def quantize(
    x: Tensor,
    dtype: torch.dtype | None = None,
    *,
    format: KvFormat | str | None = None,
    block_scale: Tensor | None = None,
    scales: str = "head",
    heads: int | None = None,
    hadamard: bool = False,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    theta: float | None = None,
    rope_dims: int | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Codes and their scales, as attention() takes them: x is codes times scales, as nearly as the type allows.

    x: Q, K or V, [batch, heads, rows, head_dim], or a pool of pages; float16, bfloat16 or float32; head_dim a multiple of 16.
    dtype: torch.float8_e4m3fn, the default, torch.float8_e5m2 or torch.int8.
    format: KvFormat, or its text such as "nvfp4", in place of dtype: codes are then uint8 [..., bytes of a row].
    block_scale: with a format whose scales are in a tensor of their own: that tensor, of KvFormat.block_scales(x.shape)'s sizes and type,
        which is written. Where keys share scales x has whole groups of them.
    scales: which elements share a scale: "tensor": all; "head": a head of a batch entry; "page": a head of a page, of the sizes
        that attention() takes for pages; "row": a row. Their largest element becomes the largest code.
    heads: number of scales along the heads, if fewer than heads: for Q give the number of KV heads, as query heads that share a KV
        head need one scale.
    hadamard: multiply the rows by an orthogonal matrix first: blocks of a Hadamard matrix, of the largest power of two that divides
        head_dim. Done to Q and K alike it does not change their scores, and it shrinks outliers in few dimensions.
    cos, sin, theta, rope_dims, interleaved: rotate the rows by their positions before that (RoPE), as in append().
    positions: int32 [batch, rows] or as many; None: 0, 1, 2 ... in each batch entry. A row without a position in the tables is not
        rotated.

    Returns (codes, scale): codes like x, or uint8 rows of the format; scale float32, or None where the format has its scales in
    the rows or in block_scale. No gradients. Raises flashjit.Error.
    """
    if not isinstance(x, Tensor):
        raise WrongType(f"x is a {type(x).__name__}: give a torch.Tensor.")
    if dtype is not None and format is not None:
        raise InvalidArgument(
            f"dtype is {dtype} and format {format!r}: a format says how its codes are stored, so give one of them."
        )
    dtype = torch.float8_e4m3fn if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in KV_TYPES:
        raise WrongType(f"dtype is {dtype}: give torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.")
    check_text("scales", scales)
    if scales not in _SIZES:
        raise InvalidArgument(f"scales is {scales!r}: give {', '.join(map(repr, _SIZES))}.")
    refuse_batched("quantize()", x, cos, sin, positions)
    if torch.is_grad_enabled() and is_differentiated(x):
        raise Unsupported(
            "quantize() has no gradients: call it under torch.no_grad(), or give a tensor that requires none."
        )
    if forward_ad._current_level >= 0 and have_tangents(x):
        raise Unsupported("quantize() has no tangents: give a tensor that has none.")
    refuse_wrapped("quantize()", x, block_scale, cos, sin, positions)
    check_alike({"x": x})
    if heads is None:
        heads = x.shape[1]
    check_whole("heads", heads)
    if heads != x.shape[1] and (heads < 1 or x.shape[1] % heads or scales == "row"):
        raise InvalidArgument(
            f'heads is {heads} and x is {describe(x)}: give a divisor of its heads, and with scales="row" none.'
        )
    angles = _Angles(cos, sin, positions)
    for name, value in angles._asdict().items():
        if value is not None and not isinstance(value, Tensor):
            raise WrongType(f"{name} is a {type(value).__name__}: give a torch.Tensor.")
    check_both_tables(cos, sin)
    check_device(x, "x", {"block_scale": block_scale})
    check_device(x, "x", {name: value for name, value in angles._asdict().items() if value is not None})
    if theta is not None:
        check_number("theta", theta)
    if rope_dims is not None:
        check_whole("rope_dims", rope_dims)
    wanted = read_format("format", format)
    if wanted is not None and scales != "head" and not wanted.has_scale:
        raise InvalidArgument(
            f"scales is {scales!r} and format {wanted.text}, which has its own scales: leave scales out."
        )
    check_block_scales("block_scale", block_scale, wanted)
    scale = torch.empty(_SIZES[scales](x.shape[0], heads, x.shape[2]), dtype=torch.float32, device=x.device)
    if wanted is not None:
        codes, text, has_scale = new_rows(wanted, x), wanted.text, wanted.has_scale
    else:
        codes = torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=dtype, device=x.device)
        text, has_scale = None, True
    run = (
        torch.ops.flashjit.quantize
        if torch.compiler.is_compiling() or is_watched() or x.is_neg()
        else _quantize
    )
    rest = (bool(hadamard), *angles, float(theta or 0), rope_dims or 0, bool(interleaved), text, has_scale)
    run(x, codes, scale, block_scale, *rest)
    return codes, scale if has_scale else None


torch.library.define(
    "flashjit::quantize",
    "(Tensor x, Tensor(a!) codes, Tensor(b!) scale, Tensor(c!)? block_scale, bool hadamard, Tensor? cos, Tensor? sin, "
    "Tensor? positions, float theta, int rope_dims, bool interleaved, str? format, bool has_scale) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
register_fake("flashjit::quantize")(lambda *_: None)
_calls: dict[Any, Any] = {}
_PLACES = (
    *(_library.word(QuantizeArgs, name) for name in ("x", "codes", "scale", "block_scale")),
    *(
        _library.word(QuantizeArgs, "rope") + _library.word(Rope, name)
        for name in ("cos", "sin", "positions")
    ),
)


def _quantize(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    block_scale: Tensor | None,
    hadamard: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    theta: float,
    rope_dims: int,
    interleaved: bool,
    format: str | None,
    has_scale: bool,
) -> None:
    x = readable(x, "x")
    angles = _Angles(*readable_angles(cos, sin), None if positions is None else positions.contiguous())
    key = (
        signature(x),
        signature(codes),
        signature(scale),
        None if block_scale is None else signature(block_scale),
        hadamard,
        *(None if y is None else signature(y) for y in angles),
        theta,
        rope_dims,
        interleaved,
        format,
    )
    call = _calls.get(key)
    if call is None:
        check_angles(x.dtype, x.shape[0] * x.shape[2], *angles, x.shape[3])
        sizes = (
            (1, 1, 1, 1)
            if scale.dim() == 0
            else (scale.shape[0], 1, scale.shape[1], scale.shape[2] if scale.dim() == 3 else 1)
        )
        strides = (sizes[2] * sizes[3], 0, sizes[3], 1)
        args = QuantizeArgs(
            struct_size=ctypes.sizeof(QuantizeArgs),
            x=tensor_struct(x.shape, x.stride()),
            codes=tensor_struct(codes.shape, codes.stride()),
            scale=_library.Scales(None, (ctypes.c_int64 * 4)(*sizes), (ctypes.c_int64 * 4)(*strides)),
            hadamard=hadamard,
            rope=rope_struct(angles.cos, theta, rope_dims, interleaved),
        )
        if block_scale is not None:
            args.block_scale = tensor_struct(block_scale.shape, block_scale.stride())
        dims = f"{x.shape[3]}" if x.shape[3] <= 512 else f"{x.shape[3]}x512"  # the most that V has
        call = (
            spec_handle(
                f"{SPEC_TYPES[x.dtype]}:d{dims}:{f'k{{{format}}}' if format else f'kv{KV_TYPES[codes.dtype]}'}"
            ),
            _library.words_of(args),
        )
        if len(_calls) >= KEEP_PLANS:
            _calls.clear()
        _calls[key] = call
    spec, words = call[0], call[1][:]
    for place, tensor in zip(_PLACES, (x, codes, scale if has_scale else None, block_scale, *angles)):
        if tensor is not None:
            words[place] = tensor.data_ptr()
    launch("quantize", spec, words, x.get_device())


torch.library.impl("flashjit::quantize", ("cuda", "cpu"))(_quantize)

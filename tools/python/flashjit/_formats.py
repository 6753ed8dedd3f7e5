"""KvFormat: how rows of K and V are stored, and what attention(), append() and quantize() make of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._at_work import constant
from ._call_types import Fixed, Problem, Stored
from ._kv_rows import block_scales_of, columns_of, row_of
from ._library import library
from ._scales import in_four_dims
from ._tensors import KV_TYPES, SPEC_TYPES, describe
from .errors import InvalidArgument, Unsupported, WrongType

_SCALE_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.uint8,
}


class KvFormat:
    """How a row of K or V is stored: a plain value, made from a name or from its parts.

    text: a name of KvFormat.names(), such as "nvfp4", "q8_0" or "fp8_ds_mla"; or codes ("e4m3", "int4", "uint2", ..., or what these
        mean, "decode4((code - 8) * scale)", an expression of code, scale and zero in the language of programs) and then,
        for scales in the row, "g32" (of 32 columns) or "row", their type, and "before", "zero", "zero=uint4" or "min", "halves",
        "tail64", "scaled": "int4:g32:fp16:zero". "apart", as in "int4:g32:fp16:apart:zero", says that scales and zero points are in a tensor of
        their own, k_block_scale or v_block_scale; "keys32" in the place of "g32" that 32 keys share the scale of each column, apart:
        "uint2:keys32:fp16:min". Codes alone have the scales of k_scale or v_scale. A text that is wrong raises
        flashjit.InvalidArgument, which names the part and the allowed values.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise WrongType(f'the format is a {type(text).__name__}: give a text such as "nvfp4".')
        self.text = text
        self.has_scale = row_of(text, 0)[2]  #: whether a call has k_scale or v_scale for it

    @classmethod
    def of_codes(cls, decode: Callable[[int], float] | str, bits: int, scales: str) -> KvFormat:
        """A format whose code c, times its scale, means decode(c).

        decode: called for each code from 0 to 2**bits - 1; returns a finite number. Elements become the code whose value is nearest.
            Or an expression of code, scale and zero in the language of programs: "(code - 8) * scale".
        bits: 2, 3, 4, 5 or 8.
        scales: the other parts of the format's text, such as "g32:fp16:before:halves"; "" for the call's k_scale or v_scale alone.
        Raises flashjit.InvalidArgument for other bits, values that are not finite or all zero, and parts that are wrong.
        Source: https://arxiv.org/abs/2504.19874 (TurboQuant) has such codes of 2 to 4 bits.
        """
        if bits not in (2, 3, 4, 5, 8):
            raise InvalidArgument(f"bits is {bits}: give 2, 3, 4, 5 or 8.")
        if isinstance(decode, str):
            return cls(f"decode{bits}({decode})" + (f":{scales}" if scales else ""))
        if not callable(decode):
            raise WrongType(
                f"decode is a {type(decode).__name__}: give a function of a code, decode(code) -> number, or an expression."
            )
        values = [decode(code) for code in range(1 << bits)]
        try:
            book = ",".join(repr(float(value)) for value in values)
        except (TypeError, ValueError) as error:
            raise WrongType(f"decode gives no number ({error}): return a finite one for each code.") from None
        return cls(f"book({book})" + (f":{scales}" if scales else ""))

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row of head_dim columns: the last size of a cache's uint8 tensor."""
        return row_of(self.text, _checked_columns(head_dim))[0]

    def alignment(self, head_dim: int) -> int:
        """Bytes that addresses and strides of rows of head_dim columns are multiples of."""
        return row_of(self.text, _checked_columns(head_dim))[1]

    def block_scales(self, size: Sequence[int], device: Any = None) -> Tensor:
        """A tensor of zeros for the scales, and then zero points, of a cache. size: [pages or batch, heads, rows, head_dim]. The
        tensor is [pages or batch, heads, rows or groups of keys, numbers of a row], of the scales' type; e8m0 is uint8."""
        if len(size) != 4:
            raise InvalidArgument(f"size is {tuple(size)}: give [pages or batch, heads, rows, head_dim].")
        batch, heads, rows, head_dim = map(int, size)
        if min(batch, heads, rows) < 0:
            raise InvalidArgument(f"size is {tuple(size)}: its numbers are 0 or more.")
        known = block_scales_of(self.text, head_dim)
        if not known.keys:
            raise InvalidArgument(
                f'{self.text} has no scales in a tensor of their own: give a format with apart, "int4:g32:fp16:apart".'
            )
        shape = (batch, heads, -(-rows // known.keys), known.columns)
        return torch.zeros(shape, dtype=_SCALE_TYPES[known.type], device=device)

    @staticmethod
    def names() -> dict[str, str]:
        """Formats with names, and their parts."""
        name, parts = ctypes.c_char_p(), ctypes.c_char_p()
        found: dict[str, str] = {}
        while library().flashjit_kv_format_name(len(found), ctypes.byref(name), ctypes.byref(parts)):
            found[(name.value or b"").decode()] = (parts.value or b"").decode()
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KvFormat) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"KvFormat({self.text!r})"


def _checked_columns(head_dim: int) -> int:
    if not isinstance(head_dim, (int, torch.SymInt)) or not 0 < head_dim < 2**31:
        raise InvalidArgument(f"head_dim is {head_dim!r}: give an int from 1 to 2^31 - 1.")
    return constant(head_dim)


def read_format(name: str, given: Any) -> KvFormat | None:
    if given is None or isinstance(given, KvFormat):
        return given
    if not isinstance(given, str):
        raise WrongType(f'{name} is a {type(given).__name__}: give a KvFormat or a text such as "nvfp4".')
    return KvFormat(given)


def of_tensor(name: str, tensor: Tensor, format: KvFormat | None, q: Tensor) -> KvFormat | None:
    """The format of a tensor's rows: as given, or as its type says; None: elements of Q's type."""
    if not isinstance(tensor, Tensor) or tensor.dim() != 4 or tensor.layout is not torch.strided:
        raise InvalidArgument(
            f"{name} is {describe(tensor)}: give a tensor [batch, heads, length, bytes of a row]."
        )
    if tensor.device != q.device:
        raise InvalidArgument(f"{name} is on {tensor.device} and q on {q.device}: move it there.")
    if format is None and tensor.dtype in KV_TYPES:
        return KvFormat(KV_TYPES[tensor.dtype])
    if format is not None and tensor.element_size() != 1:
        raise WrongType(
            f"{name} is {describe(tensor)} and its format is {format.text}: give its rows' bytes, torch.uint8."
        )
    if format is None and tensor.dtype != q.dtype:
        raise WrongType(
            f"{name} is {describe(tensor)} and q {describe(q)}: give it in q's type, or its rows' bytes and {name}_format."
        )
    return format


class Formats(NamedTuple):
    """The formats of K and V; None: elements of Q's type."""

    k: KvFormat | None
    v: KvFormat | None

    def texts(self) -> tuple[str | None, str | None]:
        """As an operator has them."""
        return tuple(None if format is None else format.text for format in self)  # type: ignore[return-value]

    @staticmethod
    def of_texts(k: str | None, v: str | None) -> Formats:
        return Formats(None if k is None else KvFormat(k), None if v is None else KvFormat(v))

    def options(self, before: str, scales: tuple[Tensor | None, Tensor | None]) -> str:
        """The options of a spec: the formats, then the given ones. Each key has its own scale where pages or rows have."""
        text = "".join(
            f":{name}{{{format.text}}}"
            for name, format in (("k", self.k), ("v", self.v))
            if format is not None
        )
        by_key = any(scale is not None and (scale.shape[1] > 1 or scale.shape[3] > 1) for scale in scales)
        return text + before + (":key_scales" if by_key else "")


def with_formats(
    fixed: Fixed,
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_columns: int | None,
    formats: tuple[Any, Any],
    scales: tuple[Any, ...],
) -> tuple[Fixed, Problem]:
    """The call's tensors and options with the formats of K and V. scales: of K, V and Q, which is none here, and of K's and V's
    blocks."""
    block_scales = scales[3:]
    if scales[2] is not None:
        raise InvalidArgument(
            "q_scale is given with k_format or v_format: it goes with a q of 8 bits; leave it out."
        )
    k_scale, v_scale = (
        in_four_dims(name, scale, problem.cached) for name, scale in zip(("k_scale", "v_scale"), scales)
    )
    if v_columns is not None:
        _check_columns_of_v(v_columns, formats[1])
    of_k = of_tensor("k", k, read_format("k_format", formats[0]), q)
    of_v = of_tensor("v", v, of_k if v_columns else read_format("v_format", formats[1]), q)
    dim_v = v_columns or (q.shape[3] if of_v is not None else v.shape[3])
    if of_v is not None and not v_columns:
        dim_v = columns_of(of_v.text, constant(v.shape[3]), constant(dim_v))
    used = Formats(of_k, None if v_columns else of_v)
    options = used.options(problem.options, (k_scale, v_scale)) + (":shared_kv" if v_columns else "")
    for name, tensor, format in zip(BLOCK_SCALES, block_scales, (of_k, of_v)):
        check_block_scales(name, tensor, format)
    return (
        fixed._replace(
            k_scale=k_scale, v_scale=v_scale, k_block_scale=block_scales[0], v_block_scale=block_scales[1]
        ),
        problem._replace(options=options, stored=Stored(dim_v)),
    )


def _check_columns_of_v(columns: Any, v_format: Any) -> None:
    if not isinstance(columns, int) or columns <= 0:
        raise InvalidArgument(
            f"v_columns is {columns!r}: give how many of K's first columns are V, an int from 8 on."
        )
    if v_format is not None:
        raise InvalidArgument(
            "v_format is given with v_columns: V is in K's rows and has k_format, so leave it out."
        )


BLOCK_SCALES = ("k_block_scale", "v_block_scale")


def check_block_scales(name: str, tensor: Any, format: KvFormat | None) -> None:
    """Whether a tensor has the type of a format's scales; the library checks its sizes."""
    if tensor is None:
        return
    known = None if format is None else block_scales_of(format.text, 0)
    if known is None or not known.keys:
        raise InvalidArgument(
            f"{name} is given, but {'there is no format' if format is None else format.text} has no scales in a tensor of "
            'their own: leave it out, or give a format with apart, such as "int4:g32:fp16:apart".'
        )
    wanted = _SCALE_TYPES[known.type]
    allowed = (wanted, torch.uint8) if wanted.itemsize == 1 else (wanted,)
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype not in allowed
        or tensor.dim() != 4
        or tensor.layout is not torch.strided
    ):
        given = describe(tensor) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise WrongType(
            f"{name} is {given}: the format {format and format.text} has {str(wanted).removeprefix('torch.')} scales: give a "
            "tensor as of KvFormat.block_scales()."
        )


def refuse_formats_in_transforms() -> None:
    raise Unsupported(
        "k_format and v_format do not work under torch.func's transforms and with tangents: call attention() outside of "
        "them, or give K and V in the type of Q."
    )


def new_rows(format: KvFormat, x: Tensor) -> Tensor:
    """Memory for x's rows in a format."""
    if x.dtype not in SPEC_TYPES:
        raise WrongType(f"x is {describe(x)}: give float16, bfloat16 or float32.")
    return torch.empty(*x.shape[:3], format.row_bytes(x.shape[3]), dtype=torch.uint8, device=x.device)

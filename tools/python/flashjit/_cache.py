"""append(): what goes into a cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import _library
from ._checks import check_number, check_whole
from ._fakes import register_fake
from ._formats import BLOCK_SCALES, Formats, KvFormat, check_block_scales, of_tensor, read_format
from ._head_dims import head_dims
from ._launch import is_watched, launch
from ._library import AppendArgs, Rope, spec_handle
from ._pages import read_csr
from ._plans import KEEP_PLANS
from ._rope import check_angles, check_both_tables, norm_struct, read_sections, readable_angles, rope_struct
from ._scales import in_four_dims, kv_options
from ._structs import page_table_struct, scales_struct, tensor_struct
from ._tensor_checks import check_alike, check_device, check_four_dims, check_page_table
from ._tensors import (
    ELEMENTS,
    KV_TYPES,
    SPEC_TYPES,
    dense_strides,
    describe,
    has_rows,
    is_differentiated,
    readable,
    refuse_negated,
    say_once,
    signature,
)
from ._transforms import have_tangents, refuse_batched
from .errors import InvalidArgument, Unsupported, WrongType


class _Given(NamedTuple):
    """append()'s tensors besides new rows and caches."""

    kv_lengths: Tensor | None
    page_table: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    cu_seqlens_q: Tensor | None
    k_scale: Tensor | None  # of caches of 8 bits, in four dimensions
    v_scale: Tensor | None
    slots: Tensor | None
    page_starts: Tensor | None  # of each sequence's entries in page_table, which is then one row
    k_norm: Tensor | None
    q_norm: Tensor | None
    k_block_scale: Tensor | None  # of formats whose scales are in a tensor of their own
    v_block_scale: Tensor | None


class _Rotation(NamedTuple):
    theta: float
    dims: int
    interleaved: bool
    sections: tuple[int, ...]
    interleaved_sections: bool


def append(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | tuple[Tensor, ...] | None = None,
    slots: Tensor | None = None,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    theta: float | None = None,
    rope_dims: int | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_kv: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_format: KvFormat | str | None = None,
    v_format: KvFormat | str | None = None,
    k_block_scale: Tensor | None = None,
    v_block_scale: Tensor | None = None,
    k_norm: Tensor | None = None,
    q_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
    hadamard: bool = False,
) -> Tensor | None:
    """Stores new rows of K and V into a cache, K's rotated (RoPE), and rotates Q, in one launch. Returns the rotated Q.

    k, v: [sequences, heads_kv, n, head_dim]: new row i of sequence b becomes its key kv_lengths[b] - n + i. With cu_seqlens_q,
        int32 [sequences + 1], they are packed, [1, heads_kv, all rows, head_dim].
    k_cache, v_cache: attention()'s k and v, which are written: pages with a page_table of two dimensions, else slots.
        They are one memory only where both get the same unrotated rows (latents). Pages may interleave.
    kv_lengths: int32 [sequences]: how many keys each sequence has, WITH the new ones, as attention() wants it next.
    page_table: as of attention(): int32 [sequences, pages of the longest], or the slot of each, or (indptr, indices), also with
        last_page_len in place of kv_lengths; None: slots in order.
    slots: in place of kv_lengths, page_table, cu_seqlens_q and max_seqlen_kv: where each new row goes, as engines' slot_mapping
        has it, int64 or int32, one for each row of k's batch and rows: page * rows of a page + row in the page. Negative
        ones, and those beyond the cache, are left out. RoPE then needs positions.
    q: like k, with heads_q heads. q_out: where the rotated rows go: q, or memory of its own; None: a new tensor.
    cos, sin: float32 or of k's type, [positions, rope_dims / 2]; or theta, by which pair i of position n rotates by
        n * theta ** (-2 i / rope_dims). None of them: rows are copied.
    rope_dims: how many dimensions of a head rotate, a multiple of 16; None: all.
    interleaved: pairs are dimensions (2 i, 2 i + 1); else (i, i + rope_dims / 2).
    positions: int32, one for each new row, like a dimension of k's batch and rows; None: the number of its key.
    k_norm, q_norm: float32 or of k's type, [head_dim]: weights of an RMS norm of each head's row of K and of Q before it rotates,
        x * rsqrt(mean(x^2) + norm_eps) * weight in fp32. None: no norm. head_dim is then a multiple of 8.
    mrope_section: M-RoPE: how many pairs rotate by the time, the height and the width of a row, rope_dims / 2 together; positions
        are then int32 [3, ...]. mrope_interleaved: pairs of the three take turns, until height and width have theirs.
    hadamard: multiply rows of K and Q, after norm and RoPE, by blocks of a Hadamard matrix, as quantize() does: scores do not
        change, and outliers in few columns of K spread over all of a block, which codes keep better. Give attention() the Q
        returned. For K in codes or in a format, but not for latents, whose V is in K's rows.
    max_seqlen_kv: the most keys that a sequence may have; None: all that there is room for.
    k_scale, v_scale: with caches of float8_e4m3fn, float8_e5m2 or int8, as in attention(): scales per head are
        read, and larger values saturate; scales per key, [pages, heads_kv, rows], are written, so that each key's largest element
        becomes the largest code.
    k_format, v_format: as in attention(): k_cache or v_cache is uint8, and new rows are encoded in that format. Latents
        have V in the rows of k_cache: give None for v and v_cache.
    k_block_scale, v_block_scale: as in attention(); written. Formats whose keys share scales are refused: keep their last keys in 16
        bits until quantize() can encode a group of them.

    Rows without a sequence, without a place in the cache or without a row in the tables are left out: nothing is written for
    them, in q_out neither. On the CPU lengths beyond the cache are refused. Before a CUDA graph is captured, call it
    once. No gradients. Raises flashjit.Error.
    """
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "q": q, "q_out": q_out}
    page_starts = None
    if isinstance(page_table, (tuple, list)):
        page_starts, page_table, kv_lengths = read_csr(page_table, kv_lengths, k_cache.shape[2])
    given = _Given(
        kv_lengths,
        page_table,
        cos,
        sin,
        positions,
        cu_seqlens_q,
        in_four_dims("k_scale", k_scale, True),
        in_four_dims("v_scale", v_scale, True),
        slots,
        page_starts,
        k_norm,
        q_norm,
        k_block_scale,
        v_block_scale,
    )
    check_number("norm_eps", norm_eps)
    if not norm_eps > 0:
        raise InvalidArgument(f"norm_eps is {norm_eps}: it must be greater than 0.")
    formats = Formats(read_format("k_format", k_format), read_format("v_format", v_format))
    stored = formats != (None, None)
    for name, format in zip(BLOCK_SCALES, formats):
        check_block_scales(name, getattr(given, name), format)
    _check_kinds(tensors, given, ("k", "k_cache") if stored else ("k", "v", "k_cache", "v_cache"))
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        k, v, q = _autocast(k_cache, k, v, q)
        tensors.update(k=k, v=v, q=q)
    if theta is not None:
        check_number("theta", theta)
    for name, value in (("rope_dims", rope_dims), ("max_seqlen_kv", max_seqlen_kv)):
        if value is not None:
            check_whole(name, value)
    if torch.is_grad_enabled() and is_differentiated(*tensors.values()):
        raise Unsupported(
            "append() has no gradients: call it under torch.no_grad(), or give tensors that require none."
        )
    if forward_ad._current_level >= 0 and have_tangents(*tensors.values(), *given):
        raise Unsupported("append() has no tangents: give tensors that have none.")
    refuse_batched("append()", *tensors.values(), *given)
    if q is not None:
        check_four_dims("q", q)
    if q is not None and q_out is None:
        q_out = torch.empty_strided(
            q.shape, dense_strides(q.shape, q.stride()), dtype=q.dtype, device=q.device
        )
    run = torch.ops.flashjit.append if torch.compiler.is_compiling() or is_watched() else _append
    if (
        not stored
        and k_norm is None
        and q_norm is None
        and (k.shape[-1] % 8 or v is not None and v.shape[-1] % 8)
        and k_cache.dtype in SPEC_TYPES
        and not hadamard
    ):
        run = functools.partial(_append_padded, run)
    run(
        k,
        v,
        k_cache,
        v_cache,
        q,
        q_out,
        *given,
        float(theta or 0),
        rope_dims or 0,
        bool(interleaved),
        max_seqlen_kv or 0,
        float(norm_eps),
        read_sections(mrope_section),
        bool(mrope_interleaved),
        bool(hadamard),
        *formats.texts(),
    )
    return q_out


def _autocast(k_cache: Tensor, *tensors: Any) -> list[Any]:
    """Under torch.autocast new rows get the type of the cache; where that has 8 bits, autocast's."""

    def converted(x: Any) -> Any:
        if x is None or x.dtype not in SPEC_TYPES or not torch.is_autocast_enabled(x.device.type):
            return x
        return x.to(k_cache.dtype if k_cache.dtype in SPEC_TYPES else torch.get_autocast_dtype(x.device.type))

    return [converted(x) for x in tensors]


def _append_padded(
    run: Any,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor | None,
    q_out: Tensor | None,
    *rest: Any,
) -> None:
    """Kernels have no such head_dim: they write copies of the caches with more columns, which are copied back."""
    for name, x in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_four_dims(name, x)
    if not torch.compiler.is_compiling():
        if k_cache.numel() and k_cache.data_ptr() == v_cache.data_ptr():
            raise InvalidArgument(
                f"k_cache and v_cache share memory, and head dimensions {k.shape[3]} and {v.shape[3]} "
                "are no multiples of 8: give each its own, or more columns."
            )
        say_once(
            f"k_cache and v_cache are copied in each call of append(): head dimensions {k.shape[3]} and "
            f"{v.shape[3]} are no multiples of 8. Make caches with more columns to save the time."
        )
    tensors = (k, v, k_cache, v_cache, q, q_out)
    padded: list[Any] = [None if x is None else F.pad(x, (0, -x.shape[3] % 8)) for x in tensors]
    given, (theta, rope_dims, *others) = rest[: len(_Given._fields)], rest[len(_Given._fields) :]
    if theta and not rope_dims:
        rope_dims = k.shape[3]
    run(*padded, *given, theta, rope_dims, *others)
    for i in (2, 3, 5):  # the written ones
        written = tensors[i]
        if written is not None:
            written.copy_(padded[i][..., : written.shape[3]])


torch.library.define(
    "flashjit::append",
    "(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor? q, Tensor(c!)? q_out, Tensor? kv_lengths, "
    "Tensor? page_table, Tensor? cos, Tensor? sin, Tensor? positions, Tensor? cu_seqlens_q, "
    "Tensor(d!)? k_scale, Tensor(e!)? v_scale, Tensor? slots, Tensor? page_starts, Tensor? k_norm, Tensor? q_norm, "
    "Tensor(f!)? k_block_scale, Tensor(g!)? v_block_scale, "
    "float theta, int rope_dims, bool interleaved, SymInt max_seqlen_kv, float norm_eps, int[] sections, "
    "bool interleaved_sections, bool hadamard, str? k_format, str? v_format) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
register_fake("flashjit::append")(lambda *_: None)


def _append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, q: Tensor | None, q_out: Tensor | None, *rest: Any
) -> None:
    given, rest = _Given(*rest[: len(_Given._fields)]), rest[len(_Given._fields) :]
    theta, dims, interleaved, max_seqlen_kv, norm_eps, sections, interleaved_sections, hadamard, *formats = (
        rest
    )
    rotation = _Rotation(theta, dims, interleaved, tuple(sections), interleaved_sections)
    for name, x in (
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("q_out", q_out),
        ("k_scale", given.k_scale),
        ("v_scale", given.v_scale),
        ("k_block_scale", given.k_block_scale),
        ("v_block_scale", given.v_block_scale),
    ):
        if x is not None:
            refuse_negated(name, x)
    given = _readable_tables(given)
    k, v = readable(k.resolve_neg(), "k"), v if v is None else readable(v.resolve_neg(), "v")
    if q is not None and q is not q_out:
        q = readable(q.resolve_neg(), "q")
    tensors = (k, v, k_cache, v_cache, q, q_out)
    key = (*[signature(x) for x in (*tensors, *given)], rotation, max_seqlen_kv, norm_eps, hadamard, *formats)
    call = _calls.get(key)
    if call is None:
        call = _AppendCall(
            tensors, given, rotation, max_seqlen_kv, norm_eps, hadamard, Formats.of_texts(*formats)
        )
        if len(_calls) >= KEEP_PLANS:
            _calls.clear()
        _calls[key] = call
    if given.slots is None or given.slots.numel():  # without new rows their pointer is null
        call.launch(tensors, given)


torch.library.impl("flashjit::append", ("cuda", "cpu"))(_append)


class _AppendCall:
    """Checked sizes and the filled struct of calls that look alike."""

    def __init__(
        self,
        tensors: Sequence[Any],
        given: _Given,
        rotation: _Rotation,
        max_seqlen_kv: int,
        norm_eps: float,
        hadamard: bool,
        formats: Formats,
    ) -> None:
        named = dict(zip(("k", "v", "k_cache", "v_cache", "q", "q_out"), tensors))
        _check(named, given, formats, 3 if any(rotation.sections) else 1)
        k, v = named["k"], named["v"]
        table = given.page_table
        dim_v = min(k.shape[3], head_dims().most_v) if v is None else v.shape[3]
        dims = f"{k.shape[3]}" if k.shape[3] == dim_v else f"{k.shape[3]}x{dim_v}"
        options = f"{':varlen' if given.cu_seqlens_q is not None else ''}" + (
            f":pages{named['k_cache'].shape[2]}"
            if given.page_starts is not None or table is not None and table.dim() == 2
            else ":cache"
        )
        scales = (given.k_scale, given.v_scale)
        if formats == (None, None):
            options += kv_options(named["k_cache"], *scales)
        else:
            options = formats.options(options, scales) + (":shared_kv" if v is None else "")
        options += ":hadamard" if hadamard else ""
        self.spec = spec_handle(f"{SPEC_TYPES[k.dtype]}:d{dims}{options}")
        self.index = k.get_device()
        args = AppendArgs(
            struct_size=ctypes.sizeof(AppendArgs),
            max_seqlen_kv=max_seqlen_kv,
            rope=rope_struct(given.cos, *rotation),
            k_norm=norm_struct(given.k_norm, norm_eps),
            q_norm=norm_struct(given.q_norm, norm_eps),
            k_scale=scales_struct(given.k_scale),
            v_scale=scales_struct(given.v_scale),
            **{name: tensor_struct(x.shape, x.stride()) for name, x in named.items() if x is not None},
        )
        for name in BLOCK_SCALES:
            if (block_scales := getattr(given, name)) is not None:
                setattr(args, name, tensor_struct(block_scales.shape, block_scales.stride()))
        if table is not None:
            args.page_table = page_table_struct(given)
        if given.cu_seqlens_q is not None:
            args.batch_size = given.cu_seqlens_q.numel() - 1
        if given.slots is not None:
            args.slots_type = _library.ELEMENT_TYPES[ELEMENTS[given.slots.dtype]]
        self.words = _library.words_of(args)

    def launch(self, tensors: Sequence[Any], given: _Given) -> None:
        words = self.words[:]
        for place, tensor in zip(_PLACES, (*tensors, *given)):
            if tensor is not None:
                words[place] = tensor.data_ptr()
        launch("append", self.spec, words, self.index)


_ROPE = _library.word(AppendArgs, "rope")
_PLACES = (
    *[
        _library.word(AppendArgs, name)
        for name in ("k", "v", "k_cache", "v_cache", "q", "q_out", "kv_lengths", "page_table")
    ],
    *[_ROPE + _library.word(Rope, name) for name in ("cos", "sin", "positions")],
    *[_library.word(AppendArgs, name) for name in ("cu_seqlens_q", "k_scale", "v_scale", "slots")],
    _library.word(AppendArgs, "page_table") + _library.word(_library.PageTable, "starts"),
    *[_library.word(AppendArgs, name) for name in ("k_norm", "q_norm", *BLOCK_SCALES)],
)
_calls: dict[Any, _AppendCall] = {}


def _readable_tables(given: _Given) -> _Given:
    """The kernel knows one stride of rows for both tables, and one of a page table's rows."""
    table = given.page_table
    cos, sin = readable_angles(given.cos, given.sin)
    if table is not None and not has_rows(table):
        table = table.contiguous()
    return _Given(
        None if given.kv_lengths is None else given.kv_lengths.contiguous(),
        table,
        cos,
        sin,
        None if given.positions is None else given.positions.contiguous(),
        None if given.cu_seqlens_q is None else given.cu_seqlens_q.contiguous(),
        given.k_scale,
        given.v_scale,
        None if given.slots is None else given.slots.contiguous(),
        None if given.page_starts is None else given.page_starts.contiguous(),
        None if given.k_norm is None else given.k_norm.resolve_neg().contiguous(),
        None if given.q_norm is None else given.q_norm.resolve_neg().contiguous(),
        given.k_block_scale,
        given.v_block_scale,
    )


def _check_kinds(tensors: dict[str, Any], given: _Given, required: Sequence[str]) -> None:
    for name, value in (*tensors.items(), *zip(_Given._fields, given)):
        if value is None and name not in required:
            continue
        if not isinstance(value, Tensor):
            raise WrongType(f"{name} is a {type(value).__name__}: give a torch.Tensor.")
    if tensors["q"] is None and tensors["q_out"] is not None:
        raise InvalidArgument("q_out is given without q: give both or neither.")
    check_both_tables(given.cos, given.sin)
    if given.slots is None and given.kv_lengths is None:
        raise InvalidArgument(
            "kv_lengths is missing: give the number of keys of each sequence, with the new ones, or slots, where "
            "each new row goes."
        )


def _check(tensors: dict[str, Any], given: _Given, formats: Formats, axes: int) -> None:
    """What the library does not see, or knows by other names. axes: how many positions a row has."""
    k, k_cache = tensors["k"], tensors["k_cache"]
    stored = formats != (None, None)
    caches = (
        {name: tensors[name] for name in ("k_cache", "v_cache") if tensors[name] is not None}
        if stored or k_cache.dtype in KV_TYPES
        else {}
    )
    check_alike({name: x for name, x in tensors.items() if x is not None and name not in caches})
    if stored:
        for name, format in zip(caches, formats):
            of_tensor(name, caches[name], format, k)
    elif caches:
        check_alike(caches, KV_TYPES)
        check_device(k, "k", caches)
    check_device(k, "k", given._asdict())
    sequences = k.shape[0]
    if given.cu_seqlens_q is not None:
        sequences = given.cu_seqlens_q.numel() - 1
        if k.shape[0] != 1:
            raise InvalidArgument(
                f"k is {list(k.shape)}: with cu_seqlens_q its batch is 1, and the sequences lie one behind the "
                "other, [1, heads_kv, all rows, head_dim]."
            )
    check_page_table("k_cache", k_cache, given.page_table, given.page_starts, sequences)
    _check_written_scales(given)
    wanted = {"kv_lengths": sequences, "cu_seqlens_q": sequences + 1}
    for name, size in wanted.items():
        tensor = getattr(given, name)
        if tensor is not None and (tensor.dtype != torch.int32 or tuple(tensor.shape) != (size,)):
            raise InvalidArgument(f"{name} is {describe(tensor)}: it must be int32 [{size}].")
    rows = k.shape[0] * k.shape[2]
    slots = given.slots
    if slots is not None and (slots.dtype not in (torch.int64, torch.int32) or slots.numel() != rows):
        raise InvalidArgument(
            f"slots is {describe(slots)}: it must be int64 or int32 with {rows} elements, one for each new row."
        )
    check_angles(k.dtype, axes * rows, given.cos, given.sin, given.positions, k.shape[3])
    for name, norm in (("k_norm", given.k_norm), ("q_norm", given.q_norm)):
        if norm is not None and (
            norm.dtype not in (torch.float32, k.dtype) or tuple(norm.shape) != (k.shape[3],)
        ):
            raise InvalidArgument(
                f"{name} is {describe(norm)}: give float32 or {str(k.dtype).removeprefix('torch.')} [{k.shape[3]}]."
            )


def _check_written_scales(given: _Given) -> None:
    """Each new key's scale needs memory of its own."""
    if all(
        scale is None or scale.shape[1] == scale.shape[3] == 1 for scale in (given.k_scale, given.v_scale)
    ):
        return  # scales of heads, which are read
    for name, scale in (("k_scale", given.k_scale), ("v_scale", given.v_scale)):
        if scale is not None and any(
            size > 1 and stride == 0 for size, stride in zip(scale.shape, scale.stride())
        ):
            raise InvalidArgument(
                f"{name} is an expanded tensor, whose elements share memory, and each new key's scale is written: "
                "give its contiguous()."
            )

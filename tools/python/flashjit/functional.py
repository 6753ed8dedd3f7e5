"""forward() and backward() for any arrays: NumPy's are computed on the CPU, others where they are.

Arrays are read and written in place through DLPack or the CUDA array interface; nothing is copied. Layouts are
[batch, heads, length, head_dim], with any strides whose last is 1 and whose others are multiples of 16 bytes.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import _library
from ._arrays import View, is_of_jax, view
from ._checks import check_mapping, check_number, check_text, check_whole, python_number
from ._library import BackwardArgs, ForwardArgs, Handle, ListArgs, library, runtime, spec_handle
from .errors import InvalidArgument, Unsupported, WrongType

_FIXED = ("kv_lengths", "cu_seqlens_q", "cu_seqlens_kv", "sinks")


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    options: str = "",
    out: Any = None,
    lse: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    captures: Mapping[str, Any] | None = None,
    block_map: Any = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    sinks: Any = None,
    row_max: Any = None,
    state: tuple[Any, Any] | None = None,
    workspace: Any = None,
    lists: DeviceTileLists | None = None,
    stream: int = 0,
) -> tuple[Any, Any]:
    """O = softmax(scale * Q K^T) V, and the log of the softmax's row sums.

    q: [batch, heads_q, seqlen_q, head_dim]; k: [batch, heads_kv, seqlen_kv, head_dim]; v: [batch, heads_kv, seqlen_kv,
        head_dim_v]; float16, bfloat16 or float32.
    options: of the spec, besides types and dimensions: "causal", "score{s: fp32 1d; score + s[h]}:causal:dropout". Options that
        other arguments need (dropout, kvlen, varlen, sinks) are added; a block map is named here, as in "map128x64".
    out: [batch, heads_q, seqlen_q, head_dim_v], of the type of q, or float32 with "fp32_out" in options. lse: float32 [batch,
        heads_q, seqlen_q], contiguous. Created if left out, for NumPy, CuPy and PyTorch arrays; for others give arrays of these,
        as JAX's are never written.
    scale: above 0; default 1 / sqrt(head_dim).
    dropout_p: probability to drop a pair, from 0 to less than 1. seed, offset: 0 to 2^64 - 1: they choose the pairs.
    captures: values of the names that programs declare: arrays of 1 to 6 dimensions, and numbers.
    block_map: uint8 or bool [batch or 1, heads_q or 1, block rows, block columns], contiguous: 0: no pair of the block attends.
    kv_lengths: int32 [batch]: keys from there on are padding. Caches are flashjit.attention()'s.
    cu_seqlens_q, cu_seqlens_kv: int32 [sequences + 1], with q [1, heads_q, all rows, head_dim] and lse [1, heads_q, all rows];
        both, with max_seqlen_q and max_seqlen_kv, at least the longest. Rows after the last sequence's end get zeros, and an lse
        of -inf. On the GPU cu_seqlens is not checked: wrong values give wrong results for the sequences concerned, but nothing
        outside the tensors is read or written.
    sinks: float32 [heads_q]: one more logit per head in the softmax, without a value.
    row_max: like lse: the largest score of each query is written there, after a score program and without sinks; -inf where it
        attends to nothing. QK-clip's largest logit of a head is the largest of its queries'.
    state: (O, lse), float32, like out and lse, of the same queries over other keys. out and lse are then of all these keys. They may
        be the same arrays, out with "fp32_out". O of a row whose lse is -inf may be anything. Not with sinks.
    workspace: uint8 device memory for this call, at least runtime().workspace_bytes(); created like out.
    lists: the result of build_lists() for such calls; None: built in this call, if needed.
    stream: the CUDA stream to launch on, as an int; the arrays' library must know that the work is there. That stream waits
        for work on arrays with DLPack; for those with the CUDA array interface only, the caller orders the work.

    Returns (out, lse), with "weight_mod" in options (out, None). Raises flashjit.Error.
    """
    if row_max is not None and "row_max" not in _options_in(options):
        options += ":row_max"
    if state is not None and "running_state" not in _options_in(options):
        options += ":running_state"
    call = _Call(
        {"q": q, "k": k, "v": v},
        options,
        dropout_p,
        captures,
        dict(kv_lengths=kv_lengths, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, sinks=sinks),
        block_map,
        max_seqlen_q,
        max_seqlen_kv,
        stream,
    )
    sizes = call.views["q"].size
    out_type = "fp32" if "fp32_out" in _options_in(options) else call.views["q"].type
    out = call.made(out, "out", (*sizes[:3], call.views["v"].size[3]), out_type, q)
    has_lse = lse is not None or "weight_mod" not in _options_in(options)
    if has_lse:
        lse = call.made(lse, "lse", sizes[:3], "fp32", q, -math.inf)
    args = ForwardArgs(
        struct_size=ctypes.sizeof(ForwardArgs),
        lse=call.views["lse"].contiguous_pointer("lse") if has_lse else None,
        **call.tensors("q", "k", "v", "out"),
        **call.common(scale, dropout_p, seed, offset),
    )
    if row_max is not None:
        call.made(row_max, "row_max", sizes[:3], "fp32", q)
        args.row_max = call.views["row_max"].contiguous_pointer("row_max")
    if state is not None:
        args.state = call.state(state, call.views["out"].size, call.views["lse"].size)
    call.launch("forward", args, workspace, lists, q)
    return out, lse


def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    *,
    dlse: Any = None,
    options: str = "",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    captures: Mapping[str, Any] | None = None,
    capture_grads: Mapping[str, Any] | None = None,
    block_map: Any = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    sinks: Any = None,
    dsinks: Any = None,
    workspace: Any = None,
    lists: DeviceTileLists | None = None,
    stream: int = 0,
) -> tuple[Any, Any, Any]:
    """dQ, dK and dV from dO, with the arguments and results of forward().

    out, lse: forward()'s results; lse is None with "weight_mod" in options. With "fp32_out" in options out is float32, which makes
        gradients of rows with one strong key accurate.
    dout: like out, of the type of q. dlse: the gradient of lse, like lse; None: there is none.
    dq, dk, dv: like q, k and v, or float32 with "fp32_grads" or "add_grads" in options; created if left out, as forward() creates
        out. "add_grads" adds to them, and creates zeros.
    capture_grads: by name, for programs that declare "grad": float32, contiguous, the capture's sizes; added to: zero them first.
    dsinks: float32 [heads_q], added to: zero it first. lists: of build_lists(backward=True). All else: see forward().

    Returns (dq, dk, dv). Raises flashjit.Error.
    """
    has_lse = lse is not None or "weight_mod" not in _options_in(options)
    rows = {"lse": lse} if has_lse else {}
    if dlse is not None:
        rows["dlse"] = dlse
    call = _Call(
        {"q": q, "k": k, "v": v, "out": out, "dout": dout, **rows},
        options,
        dropout_p,
        captures,
        dict(kv_lengths=kv_lengths, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, sinks=sinks),
        block_map,
        max_seqlen_q,
        max_seqlen_kv,
        stream,
        capture_grads,
    )
    asked = _options_in(options)
    added = "add_grads" in asked
    grad_type = "fp32" if added or "fp32_grads" in asked else call.views["q"].type
    results = [
        call.made(given, name, call.views[name[1:]].size, grad_type, q, filled=added)
        for name, given in (("dq", dq), ("dk", dk), ("dv", dv))
    ]
    args = BackwardArgs(
        struct_size=ctypes.sizeof(BackwardArgs),
        lse=call.views["lse"].contiguous_pointer("lse") if has_lse else None,
        **call.tensors("q", "k", "v", "out", "dout", "dq", "dk", "dv"),
        **call.common(scale, dropout_p, seed, offset),
    )
    if dlse is not None:
        args.dlse = call.views["dlse"].contiguous_pointer("dlse")
    if dsinks is not None:
        args.dsinks = call.written("dsinks", dsinks, (call.shape[1],), "fp32").contiguous_pointer("dsinks")
    call.launch("backward", args, workspace, lists, q)
    return tuple(results)  # type: ignore[return-value]


class DeviceTileLists:
    """Tile lists that build_lists() made, with their memory."""

    def __init__(self, handle: Handle | None, memory: Any, bytes: int) -> None:
        self.handle, self.memory, self.bytes = handle, memory, bytes


def build_lists(
    q: Any,
    k: Any,
    v: Any,
    *,
    backward: bool = False,
    options: str = "",
    dropout_p: float = 0.0,
    captures: Mapping[str, Any] | None = None,
    block_map: Any = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    sinks: Any = None,
    memory: Any = None,
    stream: int = 0,
) -> DeviceTileLists:
    """The tile lists of a block map or a mask, made once for many calls of forward(), or of backward() with
    backward=True, that are given the same options, types and sizes, and the same values of what the mask reads.

    memory: runtime().list_bytes() bytes of device memory, made like forward()'s out; the lists keep it.
    All else: see forward(). Lists of another spec, shape or tile configuration are refused by the call.
    """
    call = _Call(
        {"q": q, "k": k, "v": v},
        options,
        dropout_p,
        captures,
        dict(kv_lengths=kv_lengths, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, sinks=sinks),
        block_map,
        max_seqlen_q,
        max_seqlen_kv,
        stream,
    )
    if call.views["q"].device[0] == "cpu":  # where every pair is looked at
        return DeviceTileLists(None, None, 0)
    members = {
        name: value
        for name, value in call.common(None, dropout_p, 0, 0).items()
        if name in (field for field, *_ in ListArgs._fields_)
    }
    needed = runtime().list_bytes(call.spec, call.shape, backward=backward)
    args = ListArgs(struct_size=ctypes.sizeof(ListArgs), **members)
    args.memory, args.memory_bytes, memory = call.lent("memory", memory, needed, q)
    handle = Handle(
        "flashjit_build_lists",
        "flashjit_tile_lists_destroy",
        runtime().address,
        int(backward),
        spec_handle(call.spec).address,
        ctypes.byref(_library.shape_struct(call.shape)),
        ctypes.byref(args),
        stream or None,
    )
    return DeviceTileLists(handle, memory, needed)


class _Call:
    """The views of one call's arrays, and what both passes make of them."""

    def __init__(
        self,
        arrays: Mapping[str, Any],
        options: str,
        dropout_p: float,
        captures: Any,
        fixed: dict[str, Any],
        block_map: Any,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        stream: int,
        capture_grads: Any = None,
    ) -> None:
        check_text("options", options)
        check_number("dropout_p", dropout_p)
        check_mapping("captures", captures or {})
        check_mapping("capture_grads", capture_grads or {})
        for name, value in (
            ("max_seqlen_q", max_seqlen_q),
            ("max_seqlen_kv", max_seqlen_kv),
            ("stream", stream),
        ):
            check_whole(name, value)
        self.stream = stream
        self.views: dict[str, View] = {}
        self.fixed: list[str] = []
        for name, array in arrays.items():
            self.add(name, array)
        for name in _FIXED:
            if fixed[name] is not None:
                self.add(name, fixed[name])
                self.fixed.append(name)
        if block_map is not None:
            self.add("block_map", block_map)
        q, k, v = (self.views[name] for name in "qkv")
        for name in ("q", "k", "v", "out", "dout"):
            if name in self.views and len(self.views[name].size) != 4:
                raise InvalidArgument(
                    f"{name} has shape {list(self.views[name].size)}: it needs four dimensions, [batch, "
                    "heads, length, head_dim]."
                )
            wanted = "fp32" if name == "out" and "fp32_out" in _options_in(options) else q.type
            if name in self.views and self.views[name].type != wanted:
                raise InvalidArgument(
                    f"q is {q.type} and {name} is {self.views[name].type}: it must be {wanted}."
                )
        if q.type not in ("fp16", "bf16", "fp32"):
            raise WrongType(f"q is {q.type}: flashjit computes in float16, bfloat16 and float32; convert it.")
        self._make_captures(captures or {}, capture_grads or {})
        varlen = "cu_seqlens_q" in self.views or "cu_seqlens_kv" in self.views
        for name, type in (
            ("kv_lengths", "int32"),
            ("cu_seqlens_q", "int32"),
            ("cu_seqlens_kv", "int32"),
            ("sinks", "fp32"),
            ("lse", "fp32"),
            ("dlse", "fp32"),
        ):
            if name in self.views and self.views[name].type != type:
                raise WrongType(f"{name} is {self.views[name].type}: it must be {type}; convert it.")
            if varlen and name.startswith("cu_") and name not in self.views:
                raise InvalidArgument(
                    f"{name} is missing: give both cu_seqlens_q and cu_seqlens_kv, or none."
                )
        self.varlen = varlen
        offsets = self.views["cu_seqlens_q"].size if varlen else (1,)
        if len(offsets) != 1 or offsets == (0,):
            raise InvalidArgument(f"cu_seqlens_q has shape {list(offsets)}: it must have [sequences + 1].")
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
            if not 0 <= value < 2**31:
                raise InvalidArgument(f"{name} is {value}: it must be 0 or more, and less than 2^31.")
        self.batch = self.views["cu_seqlens_q"].size[0] - 1 if varlen else 0
        self.lengths = (max_seqlen_q, max_seqlen_kv) if varlen else (0, 0)
        self.shape = (
            self.batch if varlen else q.size[0],
            q.size[1],
            k.size[1],
            max_seqlen_q if varlen else q.size[2],
            max_seqlen_kv if varlen else k.size[2],
        )
        self._check_sizes()
        dims = f"{q.size[3]}" if q.size[3] == v.size[3] else f"{q.size[3]}x{v.size[3]}"
        given = {"dropout_p": dropout_p > 0, "cu_seqlens_q": varlen, **dict.fromkeys(self.fixed, True)}
        outside = _options_in(options)
        more = [
            option
            for option in _library.options_of(given, _library.spec_options()).split(":")
            if option not in outside
        ]
        self.spec = ":".join([q.type, f"d{dims}", *filter(None, [options.strip(":"), *more])])

    def _check_sizes(self) -> None:
        """Sizes of arrays that the C ABI takes as pointers alone."""
        batch, heads_q, _, seqlen_q, _ = self.shape
        wanted = {
            "kv_lengths": (batch,),
            "cu_seqlens_q": (batch + 1,),
            "cu_seqlens_kv": (batch + 1,),
            "sinks": (heads_q,),
            "lse": self.views["q"].size[:3],
            "dlse": self.views["q"].size[:3],
        }
        for name, size in wanted.items():
            if name in self.views and self.views[name].size != size:
                raise InvalidArgument(
                    f"{name} has shape {list(self.views[name].size)}: it must have {list(size)}."
                )

    def add(self, name: str, array: Any) -> View:
        made = view(array, name, self.stream)
        first = next(iter(self.views.values()), made)
        if made.device != first.device:
            raise InvalidArgument(
                f"q is on {_device(first)} and {name} on {_device(made)}: move them to one device."
            )
        self.views[name] = made
        return made

    def _make_captures(self, captures: Mapping[str, Any], grads: Mapping[str, Any]) -> None:
        self.captures = (_library.Capture * len(captures))()
        for name in grads:
            if name not in captures:
                raise InvalidArgument(f"capture_grads has {name!r}, which captures has not: remove it.")
        for struct, (name, value) in zip(self.captures, captures.items()):
            check_text("a name in captures", name)
            struct.name = name.encode()
            value = python_number(value)
            if isinstance(value, (int, float)):
                struct.scalar = value
                continue
            seen = self.add(f"captures[{name!r}]", value)
            if len(seen.size) > _library.MAX_CAPTURE_DIMS:
                raise InvalidArgument(
                    f"captures[{name!r}] has {len(seen.size)} dimensions: at most "
                    f"{_library.MAX_CAPTURE_DIMS} are possible."
                )
            sizes, strides = (seen.size, seen.stride) if seen.size else ((1,), (1,))
            struct.data, struct.rank, struct.type = (
                seen.pointer,
                len(sizes),
                _library.ELEMENT_TYPES[seen.type],
            )
            struct.size[: len(sizes)], struct.stride[: len(sizes)] = sizes, strides
            if name in grads:
                label = f"capture_grads[{name!r}]"
                struct.grad = self.written(label, grads[name], seen.size, "fp32").contiguous_pointer(label)

    def made(
        self,
        given: Any,
        name: str,
        size: Sequence[int],
        type: str,
        like: Any,
        unused: float = 0.0,
        filled: bool = False,
    ) -> Any:
        """`given`, or a new array of q's library. unused: the value of elements that no kernel writes, or with `filled` of all."""
        array = _empty(like, size, type, name) if given is None else given
        if given is None and (filled or self.varlen and self.batch == 0):
            array[...] = unused
        self.written(name, array, size, type)
        return array

    def sized(self, name: str, array: Any, size: Sequence[int], type: str) -> View:
        seen = self.add(name, array)
        if seen.size != tuple(size) or seen.type != type:
            raise InvalidArgument(f"{name} is {seen.type} {list(seen.size)}: it must be {type} {list(size)}.")
        return seen

    def written(self, name: str, array: Any, size: Sequence[int], type: str) -> View:
        seen = self.sized(name, array, size, type)
        check_writable(name, array, seen)
        return seen

    def state(
        self, given: Any, out_size: tuple[int, ...], lse_size: tuple[int, ...]
    ) -> _library.PartialState:
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise WrongType(f"state is a {type(given).__name__}: give O and lse of other keys, (out, lse).")
        for name, array, size in zip(("state[0]", "state[1]"), given, (out_size, lse_size)):
            self.sized(name, array, size, "fp32")
        return _library.PartialState(
            self.tensors("state[0]")["state[0]"], self.views["state[1]"].contiguous_pointer("state[1]")
        )

    def tensors(self, *names: str) -> dict[str, _library.Tensor]:
        return {
            name: _library.Tensor(
                self.views[name].pointer,
                (ctypes.c_int64 * 4)(*self.views[name].size),
                (ctypes.c_int64 * 4)(*self.views[name].stride),
            )
            for name in names
        }

    def common(self, scale: float | None, dropout_p: float, seed: int, offset: int) -> dict[str, Any]:
        members: dict[str, Any] = {name: self.views[name].contiguous_pointer(name) for name in self.fixed}
        for name, value in (("seed", seed), ("offset", offset)):
            check_whole(name, value)
            if not 0 <= value < 2**64:
                raise InvalidArgument(f"{name} is {value}: it must be 0 or more, and less than 2^64.")
        members.update(
            dropout_p=dropout_p,
            seed=seed,
            offset=offset,
            batch_size=self.batch,
            max_seqlen_q=self.lengths[0],
            max_seqlen_kv=self.lengths[1],
            capture_count=len(self.captures),
            captures=ctypes.addressof(self.captures) if len(self.captures) else None,
            zero_unused_rows=self.varlen,
        )
        if scale is not None:
            check_number("scale", scale)
            self._scale = ctypes.c_float(scale)
            members["softmax_scale"] = ctypes.addressof(self._scale)
        if "block_map" in self.views:
            blocks = self.views["block_map"]
            if blocks.type not in ("uint8", "bool") or len(blocks.size) != 4:
                raise InvalidArgument(
                    f"block_map is {blocks.type} {list(blocks.size)}: it must be uint8 [batch or 1, heads_q "
                    "or 1, block rows, block columns]."
                )
            members["block_map"] = _library.BlockMap(
                blocks.contiguous_pointer("block_map"), (ctypes.c_int64 * 4)(*blocks.size)
            )
        return members

    def lent(self, name: str, given: Any, needed: int, like: Any) -> tuple[Any, int, Any]:
        """Address and bytes of device memory, and the array that holds it: `given`, or a new one."""
        if not needed:
            return None, 0, None
        array = _empty(like, (needed,), "uint8", name) if given is None else given
        lent = self.add(name, array)
        check_writable(name, array, lent)
        return lent.contiguous_pointer(name), math.prod(lent.size) * lent.element_size, array

    def launch(
        self, function: str, args: Any, workspace: Any, lists: DeviceTileLists | None, like: Any
    ) -> None:
        spec = spec_handle(self.spec)
        if self.views["q"].device[0] == "cpu":
            _library.check(
                getattr(library(), f"flashjit_reference_{function}")(spec.address, ctypes.byref(args))
            )
            return
        needed = runtime().workspace_bytes(self.spec, self.shape, backward=function == "backward")
        if lists is not None and lists.handle is not None:
            args.lists = lists.handle.address
            needed -= min(lists.bytes, needed)  # lists of another call are refused before their size matters
        args.workspace, args.workspace_bytes, workspace = self.lent("workspace", workspace, needed, like)
        _library.check(
            getattr(library(), f"flashjit_{function}")(
                runtime().address, spec.address, ctypes.byref(args), self.stream or None
            )
        )


def check_writable(name: str, array: Any, seen: View) -> None:
    if seen.read_only:
        what = "an array of JAX, where arrays never change" if is_of_jax(array) else "read-only"
        raise InvalidArgument(
            f"{name} is {what}: give an array that can be written"
            f"{', such as one of NumPy, CuPy or PyTorch' if is_of_jax(array) else ''}."
        )


def _device(seen: View) -> str:
    return seen.device[0] if seen.device[0] == "cpu" else f"{seen.device[0]}:{seen.device[1]}"


def _options_in(text: str) -> list[str]:
    """Without what programs have in their braces."""
    depth, kept = 0, []
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth == 0:
            kept.append(character)
    return "".join(kept).split(":")


_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "uint8": "uint8"}


def _empty(like: Any, size: Sequence[int], type: str, name: str) -> Any:
    """A new array of the library that `like` is from."""
    home = type_module(like)
    if home in ("numpy", "cupy") and type != "bf16":
        return sys.modules[home].empty(size, dtype=_NAMES[type])
    if home == "torch":
        torch = sys.modules["torch"]
        return torch.empty(tuple(size), dtype=getattr(torch, _NAMES[type]), device=like.device)
    raise Unsupported(
        f"{name} is left out, but flashjit cannot make {_NAMES[type]} arrays of {home}: give {name}."
    )


def type_module(value: Any) -> str:
    return type(value).__module__.partition(".")[0]

"""What is filled in once for all calls that look alike: checked sizes, filled structs, the workspace's size."""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor
from torch._C._dynamo.guards import assert_size_stride  # in C: a fraction of what comparing stride() takes

from . import _library, _values
from ._library import BackwardArgs, Capture, ForwardArgs, Handle, ListArgs, library, runtime, spec_handle
from ._tracing import is_scalar
from .errors import Error, InvalidArgument, WrongType

_OLDEST = (
    2,
    10,
)  # with which the tests pass: a slice of a BlockMask of PyTorch 2.9 has silently lost its mask_mod
if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
    raise ImportError(
        f"flashjit needs PyTorch {'.'.join(map(str, _OLDEST))} or newer, and this is {torch.__version__}: "
        "pip install -U torch."
    )

SPEC_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
#: Of K and V that have scales.
KV_TYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
ELEMENTS = {getattr(torch, name): text for name, text in _values.ELEMENTS.items()}
KEEP_PLANS = 4096
MAX_DIM, MAX_DIM_V = 576, 512
PLAIN = frozenset({Tensor, torch.nn.Parameter})


class Fixed(NamedTuple):
    """The tensors that every call may have besides Q, K and V."""

    block_map: Any = None
    kv_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    sinks: Any = None
    indices: Any = None
    # Of the forward pass alone: a cache's, and in four dimensions those of K, V and Q of 8 bits.
    page_table: Any = None
    prefix_length: Any = None
    page_starts: Any = None  # where a sequence's entries begin in page_table, which is then one row
    k_scale: Any = None
    v_scale: Any = None
    q_scale: Any = None


NOTHING = Fixed()


def grads_of_fixed(dsinks: Any) -> Fixed:
    """Gradients of the fixed tensors: attention sinks alone have one."""
    return Fixed(sinks=dsinks)


class Stored(NamedTuple):
    """What tensors of rows in a KV format do not tell."""

    dim_v: int


class Problem(NamedTuple):
    """What all calls of a plan share, besides the tensors' sizes and strides."""

    options: str  # of the spec, from the masks on: ":causal:dropout"
    scale: Any
    dropout_p: float
    max_seqlen_q: int
    max_seqlen_kv: int
    names: tuple[str, ...]  # of the captures' values
    cached: bool = False  # K and V are a cache's pages or slots
    out_type: str = ""  # the spec's type where Q is of 8 bits: that of O, unless that is fp32
    reserved_sms: int = 0  # multiprocessors left to others
    stored: Stored | None = None  # K or V are bytes of rows in a KV format


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_index: int  # negative on the CPU


class Lent(NamedTuple):
    """Where a call's struct has what both passes are lent alike, in words."""

    workspace: int
    lists: int
    seed: int
    rng_state: int
    dropout_place: int
    fixed: tuple[int, ...]


#: Seed and offset of a dropout mask: numbers, or an int64 tensor of both where the kernels read them.
Rng = Union[tuple[int, int], Tensor, "Placed"]
NO_RNG: Rng = (0, 0)


class Placed(NamedTuple):
    """Of a call that has a block of a larger problem's mask, with ":dropout_place" among its options."""

    rng: Rng
    place: tuple[int, ...]  # _library.DropoutPlace


def _word(structure: type[ctypes.Structure], *members: str) -> tuple[int, ...]:
    return tuple(_library.word(structure, member) for member in members)


_F_Q, _F_K, _F_V, _F_OUT, _F_LSE, _F_CAPTURES, _F_ROW_MAX, _F_STATE = _word(
    ForwardArgs, "q", "k", "v", "out", "lse", "captures", "row_max", "state"
)
_B_Q, _B_K, _B_V, _B_OUT, _B_LSE, _B_DOUT, _B_DLSE, _B_DQ, _B_DK, _B_DV, _B_CAPTURES, _B_DSINKS = _word(
    BackwardArgs, "q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "captures", "dsinks"
)
_TENSOR_WORDS = ctypes.sizeof(_library.Tensor) // 8
_F_OUT_STRIDE = _F_OUT + _library.word(_library.Tensor, "stride")
_B_DOUT_STRIDE = _B_DOUT + _library.word(_library.Tensor, "stride")


def _lent(structure: type[ctypes.Structure], fixed: Sequence[str]) -> Lent:
    names = ("workspace", "lists", "seed", "rng_state", "dropout_place")
    words = {name: _library.word(structure, name) for name in fixed if name != "page_starts"}
    if "page_starts" in fixed:
        words["page_starts"] = words["page_table"] + _library.word(_library.PageTable, "starts")
    return Lent(**dict(zip(names, _word(structure, *names))), fixed=tuple(words[name] for name in fixed))


_F_LENT = _lent(ForwardArgs, Fixed._fields)
_B_LENT = _lent(BackwardArgs, Fixed._fields[:-6])
_C_SIZE = ctypes.sizeof(Capture) // 8
_C_DATA, _C_GRAD, _C_SCALAR = _word(Capture, "data", "grad", "scalar")


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def dense_strides(size: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory as those of `like` do; the last one innermost."""
    strides = [0, 0, 0, 1]
    step = size[3]
    for i in sorted((2, 1, 0), key=lambda i: like[i]):
        strides[i] = step
        step = step * size[i]
    return tuple(strides)


def tensor_struct(size: Sequence[int], stride: Sequence[int]) -> _library.Tensor:
    return _library.Tensor(None, (ctypes.c_int64 * 4)(*size), (ctypes.c_int64 * 4)(*stride))


def scales_struct(scale: Tensor | None) -> _library.Scales:
    """Of scales [sequences, pages, heads, rows]."""
    if scale is None:
        return _library.Scales()
    return _library.Scales(None, (ctypes.c_int64 * 4)(*scale.shape), (ctypes.c_int64 * 4)(*scale.stride()))


class BuiltLists:
    """Tile lists of one pass: what they were built for, and the library's handle, none on the CPU. Their memory is the
    owner's, so that it lives as long as its user."""

    __slots__ = ("handle", "address", "bytes", "spec", "shape", "device", "text")

    def __init__(self, plan: Plan, backward: bool, handle: Any, bytes: int) -> None:
        self.handle, self.address, self.bytes = handle, handle.address if handle else 0, bytes
        self.spec, self.shape, self.device = plan.spec, plan.shape, plan.device
        self.text = plan.described(backward)


class Plan:
    """Checked sizes, filled structs and the workspace's size of a problem; a call copies the structs and sets pointers."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem
    ) -> None:
        _check_tensors(q, k, v, fixed, values, problem)
        self.problem = problem
        self.device, self.dtype = q.device, q.dtype
        self.out_dtype = out_dtype_of(problem.options, problem.out_type, q.dtype)
        self.grad_dtype = torch.float32 if "fp32_grads" in switches_of(problem.options) else q.dtype
        self.index = q.get_device()
        varlen = fixed.cu_seqlens_q is not None
        batch = fixed.cu_seqlens_q.numel() - 1 if varlen else q.shape[0]
        seqlen_q = problem.max_seqlen_q if varlen else q.shape[2]
        if problem.cached:
            batch = fixed.kv_lengths.numel()
            seqlen_kv = problem.max_seqlen_kv or cache_capacity(k, fixed)
        else:
            seqlen_kv = problem.max_seqlen_kv if varlen else k.shape[2]
        self.shape = (batch, q.shape[1], k.shape[1], seqlen_q, seqlen_kv)
        dim_v = v.shape[3] if problem.stored is None else problem.stored.dim_v
        self.out_size = (*q.shape[:3], dim_v)
        self.out_stride = dense_strides(self.out_size, q.stride())
        self.lse_size = tuple(q.shape[:3])
        # Kernels that are launched write all rows of results.
        self.empty_strided = (
            torch.empty_strided
            if not varlen or batch and seqlen_q
            else lambda *given, **named: torch.empty_strided(*given, **named).zero_()
        )
        self.reads = _strides_are_read(q) and (
            problem.stored is not None or _strides_are_read(k) and _strides_are_read(v)
        )
        self.grads = [(tuple(t.shape), dense_strides(t.shape, t.stride())) for t in (q, k, v)]
        self.shares_kv = "shared_kv" in switches_of(problem.options)
        self.saved = self._layouts_of_saved((q, k, v), (*fixed, *values))
        dims = f"{q.shape[3]}" if q.shape[3] == dim_v else f"{q.shape[3]}x{dim_v}"
        self.spec_text = f"{problem.out_type or SPEC_TYPES[q.dtype]}:d{dims}{problem.options}"
        self.spec = _spec_of(self.spec_text, q, v)
        self._make_captures(values)
        self._make_templates(q, k, v, fixed, batch if varlen else 0)
        self.generation = -1
        self.prepared_both = False
        self.workspace_forward = 0
        self.workspace_backward: int | None = 0

    def _layouts_of_saved(self, tensors: Sequence[Tensor], others: Sequence[Any]) -> list[Layout]:
        """Q, K, V, O, LSE and the tensors among the others: what the backward pass reads."""
        heads, rows = (max(1, size) for size in self.lse_size[1:])
        return [
            *[layout_of(x) for x in tensors],
            Layout(self.out_size, self.out_stride, self.out_dtype, self.index),
            Layout(self.lse_size, (heads * rows, rows, 1), torch.float32, self.index),
            *[layout_of(x) for x in others if isinstance(x, Tensor)],
        ]

    def reads_saved(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Sequence[Tensor | None]
    ) -> bool:
        """Whether saved tensors are as they were saved. Hooks may return others, such as contiguous copies."""
        index, dtype, (of_q, of_k, of_v, of_out, of_lse, *of_rest) = self.index, self.dtype, self.saved
        try:  # not a loop, which takes a microsecond more
            assert_size_stride(q, of_q.size, of_q.stride)
            assert_size_stride(k, of_k.size, of_k.stride)
            assert_size_stride(v, of_v.size, of_v.stride)
            assert_size_stride(out, of_out.size, of_out.stride)
            assert_size_stride(lse, of_lse.size, of_lse.stride)
        except AssertionError:
            return False
        return (
            q.dtype is dtype
            and k.dtype is dtype
            and v.dtype is dtype
            and out.dtype is self.out_dtype
            and lse.dtype is torch.float32
            and type(out) is type(lse) is Tensor
            and type(q) in PLAIN
            and type(k) in PLAIN
            and type(v) in PLAIN
            and (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % 16 == lse.data_ptr() % 4 == 0
            and q.get_device() == k.get_device() == v.get_device() == index
            and out.get_device() == lse.get_device() == index
            and (not self.shares_kv or k.data_ptr() == v.data_ptr())
            and (not of_rest or all(map(_is_laid_out, filter(_is_tensor, rest), of_rest)))
        )

    def _make_captures(self, values: tuple[Any, ...]) -> None:
        self.captures = (Capture * len(values))()
        self.tensor_places, self.scalar_places, self.grad_places = [], [], []
        with_grad = names_with_grad(self.problem.options)
        for i, (name, value) in enumerate(zip(self.problem.names, values)):
            capture = self.captures[i]
            capture.name = name.encode()
            if is_scalar(value):
                self.scalar_places.append(i)
                continue
            self.tensor_places.append(i)
            if name in with_grad:
                self.grad_places.append(i)
            sizes, strides = (tuple(value.shape), value.stride()) if value.dim() else ((1,), (1,))
            capture.rank, capture.type = len(sizes), _library.ELEMENT_TYPES[ELEMENTS[value.dtype]]
            capture.size[: len(sizes)], capture.stride[: len(sizes)] = sizes, strides
        self.capture_words = ctypes.c_uint64 * (_C_SIZE * len(values))
        self.capture_doubles = ctypes.c_double * (_C_SIZE * len(values))

    def _make_templates(self, q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, batch: int) -> None:
        problem = self.problem
        common: dict[str, Any] = {
            "dropout_p": problem.dropout_p,
            "capture_count": len(self.captures),
            "batch_size": batch,
            "max_seqlen_q": problem.max_seqlen_q,
            "max_seqlen_kv": problem.max_seqlen_kv,
            "reserved_sms": problem.reserved_sms,
            "zero_unused_rows": fixed.cu_seqlens_q is not None,
        }
        if problem.scale is not None:
            self._scale = ctypes.c_float(problem.scale)  # lives as long as the structs that point to it
            common["softmax_scale"] = ctypes.addressof(self._scale)
        if fixed.block_map is not None:
            common["block_map"] = _library.BlockMap(None, (ctypes.c_int64 * 4)(*fixed.block_map.shape))
        if fixed.indices is not None:
            common["indices"] = _library.Indices(
                None,
                (ctypes.c_int64 * 4)(*fixed.indices.shape),
                (ctypes.c_int64 * 4)(*fixed.indices.stride()),
            )
        tensors = {name: tensor_struct(t.shape, t.stride()) for name, t in (("q", q), ("k", k), ("v", v))}
        tensors["out"] = tensor_struct(self.out_size, self.out_stride)
        table = fixed.page_table
        forward_alone: dict[str, Any] = {} if table is None else {"page_table": page_table_struct(fixed)}
        forward_alone |= {
            name: scales_struct(getattr(fixed, name)) for name in ("k_scale", "v_scale", "q_scale")
        }
        self.forward_words = _library.words_of(
            ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs), **tensors, **common, **forward_alone)
        )
        for name, (size, stride) in zip(("dq", "dk", "dv"), self.grads):
            tensors[name] = tensor_struct(size, stride)
        tensors["dout"] = tensors["out"]
        self.backward_words = _library.words_of(
            BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs), **tensors, **common)
        )

    # Launches.

    def prepare_both(self) -> None:
        """Before a call with gradients is launched first: its two passes are compiled side by side."""
        self.prepared_both = True
        if self.index < 0 or torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.device(self.index), contextlib.suppress(Error):  # which the call itself raises
            bind_context(self.device)
            runtime().prepare_both(self.spec_text, self.shape)

    def _refresh(self, shared: _library.Runtime) -> None:
        """Asks how much workspace the calls need: again after something was prepared, which may have changed it."""
        if self.index >= 0:
            self.workspace_forward = self._workspace(shared, backward=False)
            self.workspace_backward = None  # until a call needs it: a cache has no backward pass
        self.generation = shared.generation

    def _workspace(self, shared: _library.Runtime, backward: bool) -> int:
        with torch.cuda.device(self.index):
            bind_context(self.device)
            return shared.workspace_bytes(self.spec_text, self.shape, backward=backward)

    def _fill_captures(self, values: Sequence[Any]) -> Any:
        words = self.capture_words.from_buffer_copy(self.captures)
        for i in self.tensor_places:
            words[i * _C_SIZE + _C_DATA] = values[i].data_ptr()
        if self.scalar_places:
            doubles = self.capture_doubles.from_buffer(words)
            for i in self.scalar_places:
                doubles[i * _C_SIZE + _C_SCALAR] = float(values[i])
        return words

    def described(self, backward: bool) -> str:
        names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv")
        sizes = ", ".join(f"{name} {size}" for name, size in zip(names, self.shape))
        return f"{'bwd' if backward else 'fwd'}:{self.spec_text} with {sizes} on {self.device}"

    def build_lists(self, fixed: Fixed, values: Sequence[Any], backward: bool) -> tuple[BuiltLists, Tensor]:
        """The tile lists of one pass, and their memory."""
        if self.index < 0:  # where every pair is looked at
            return BuiltLists(self, backward, None, 0), torch.empty(1, dtype=torch.uint8)
        with torch.cuda.device(self.index):
            bind_context(self.device)
            shared = runtime()
            needed = shared.list_bytes(self.spec_text, self.shape, backward=backward)
            memory = torch.empty(max(1, needed), dtype=torch.uint8, device=self.device)
            args = ListArgs(
                struct_size=ctypes.sizeof(ListArgs),
                memory=memory.data_ptr(),
                memory_bytes=needed,
                capture_count=len(self.captures),
            )
            for name in ("kv_lengths", "cu_seqlens_q", "cu_seqlens_kv"):
                if getattr(fixed, name) is not None:
                    setattr(args, name, getattr(fixed, name).data_ptr())
            if fixed.block_map is not None:
                args.block_map = _library.BlockMap(
                    fixed.block_map.data_ptr(), (ctypes.c_int64 * 4)(*fixed.block_map.shape)
                )
            if values:
                captures = self._fill_captures(values)
                args.captures = ctypes.addressof(captures)
            handle = Handle(
                "flashjit_build_lists",
                "flashjit_tile_lists_destroy",
                shared.address,
                int(backward),
                self.spec.address,
                ctypes.byref(_library.shape_struct(self.shape)),
                ctypes.byref(args),
                torch._C._cuda_getCurrentRawStream(self.index),
            )
        return BuiltLists(self, backward, handle, needed), memory

    def _check_lists(self, lists: BuiltLists, backward: bool) -> None:
        """The library compares the tile configurations too, and block maps."""
        if lists.spec is not self.spec or lists.shape != self.shape or lists.device != self.device:
            raise InvalidArgument(
                f"lists were built for {lists.text}, but this call is {self.described(backward)}: give this "
                "call's arguments to flashjit.torch.TileLists() too."
            )

    def _lend(
        self,
        words: Any,
        at: Lent,
        needed: int,
        fixed: Fixed,
        rng: Rng,
        lists: BuiltLists | None,
        backward: bool,
        workspace: Tensor | None = None,
    ) -> Any:
        """Sets the pointers that both passes have alike. Returns the workspace, which must live until the launch."""
        if type(rng) is Placed:
            words[at.dropout_place : at.dropout_place + len(rng.place)] = array.array("Q", rng.place)
            rng = rng.rng
        if type(rng) is tuple:  # which is asked in less time than whether it is a tensor
            words[at.seed], words[at.seed + 1] = rng
        else:
            words[at.rng_state] = rng.data_ptr()  # type: ignore[union-attr]
        if fixed is not NOTHING:
            for place, tensor in zip(at.fixed, fixed):
                if tensor is not None:
                    words[place] = tensor.data_ptr()
        if lists is not None:
            self._check_lists(lists, backward)
            words[at.lists] = lists.address
            needed = max(0, needed - lists.bytes)
        if not needed:
            return None
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=self.device)
        elif workspace.numel() < needed:
            raise InvalidArgument(
                f"workspace has {workspace.numel()} bytes, and this call needs {needed}: give more, or leave it out."
            )
        words[at.workspace], words[at.workspace + 1] = workspace.data_ptr(), needed
        return workspace

    def new_rows(self) -> Tensor:
        """Memory for LSE, or for the rows' largest scores."""
        rows = torch.empty(self.lse_size, dtype=torch.float32, device=self.device)
        return (
            rows if self.empty_strided is torch.empty_strided else rows.fill_(-math.inf)
        )  # nothing is launched

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fixed: Fixed,
        values: Sequence[Any],
        rng: Rng,
        want_lse: bool,
        lists: BuiltLists | None = None,
        row_max: Tensor | None = None,
        out: Tensor | None = None,
        state: tuple[Tensor, Tensor] | None = None,
        lse: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """O and LSE, and what new_rows() made as row_max, of tensors that are read where they lie: see readable(). out, lse,
        workspace: the caller's, checked, or made here. state: O, which may be `out`, and LSE that the keys join."""
        shared = runtime()
        if self.generation != shared.generation:
            self._refresh(shared)
        words = self.forward_words[:]
        if out is None:
            out = self.empty_strided(self.out_size, self.out_stride, dtype=self.out_dtype, device=self.device)
        else:
            words[_F_OUT_STRIDE : _F_OUT_STRIDE + 4] = array.array("Q", out.stride())
            if self.empty_strided is not torch.empty_strided:  # nothing is launched
                out.zero_()
        words[_F_Q], words[_F_K], words[_F_V], words[_F_OUT] = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
        )
        if want_lse:
            if lse is None:
                lse = self.new_rows()
            else:
                words[_F_LSE + 1 : _F_LSE + 4] = array.array("Q", lse.stride())
                if self.empty_strided is not torch.empty_strided:
                    lse.fill_(-math.inf)
            words[_F_LSE] = lse.data_ptr()
        if state is not None:
            words[_F_STATE : _F_STATE + _TENSOR_WORDS] = _library.words_of(
                tensor_struct(state[0].shape, state[0].stride())
            )
            if lse is not None:  # whose strides the state's LSE has, too
                state = state[0], laid_out(state[1], self.lse_size, lse.stride())
            words[_F_STATE], words[_F_STATE + _TENSOR_WORDS] = (x.data_ptr() for x in state)
        if row_max is not None:
            words[_F_ROW_MAX] = row_max.data_ptr()
        _workspace = self._lend(
            words, _F_LENT, self.workspace_forward, fixed, rng, lists, False, workspace
        )  # lives until the launch
        if values:
            captures = self._fill_captures(values)
            words[_F_CAPTURES] = ctypes.addressof(captures)
        launch("forward", self.spec, words, self.index)
        return out, lse

    def words_for_tangents(
        self,
        qkv: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        fixed: Fixed,
        values: Sequence[Any],
        rng: Rng,
        grads: Mapping[int, int],
        workspace: int,
    ) -> tuple[array.array[int], Any]:
        """The forward pass's struct, whose captures at the places of `grads` have tangents at these addresses, and what must live
        until the launch. workspace: its bytes."""
        words = self.forward_words[:]
        words[_F_Q], words[_F_K], words[_F_V], words[_F_OUT] = (x.data_ptr() for x in (*qkv, out))
        words[_F_LSE] = lse.data_ptr()
        lent = self._lend(words, _F_LENT, workspace, fixed, rng, None, False)
        captures = None
        if values:
            captures = self._fill_captures(values)
            for i, address in grads.items():
                captures[i * _C_SIZE + _C_GRAD] = address
            words[_F_CAPTURES] = ctypes.addressof(captures)
        return words, (lent, captures)

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        fixed: Fixed,
        values: Sequence[Any],
        rng: Rng,
        lists: BuiltLists | None = None,
    ) -> tuple[list[Tensor], Any, list[Tensor]]:
        """[dq, dk, dv], dsinks or None, and the gradients of the captures at grad_places.

        dout and dlse: None where only the other has a gradient."""
        shared = runtime()
        if self.generation != shared.generation:
            self._refresh(shared)
        if self.workspace_backward is None:
            self.workspace_backward = self._workspace(shared, backward=True)
        if self.out_dtype != self.dtype:  # which is rounded now
            out, dout = out.to(self.dtype), None if dout is None else dout.to(self.dtype)
        words = self.backward_words[:]
        words[_B_Q], words[_B_K], words[_B_V], words[_B_OUT] = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
        )
        words[_B_LSE] = lse.data_ptr()
        if dout is None:
            dout = torch.zeros_like(out)
        if dout.stride() != self.out_stride or dout.data_ptr() % 16:
            dout = readable(dout, "the gradient of the output")
            words[_B_DOUT_STRIDE : _B_DOUT_STRIDE + 4] = array.array("Q", dout.stride())
        words[_B_DOUT] = dout.data_ptr()
        if dlse is not None:
            dlse = dlse.to(torch.float32).contiguous()
            words[_B_DLSE] = dlse.data_ptr()
        grads = [
            self.empty_strided(size, stride, dtype=self.grad_dtype, device=self.device)
            for size, stride in self.grads
        ]
        words[_B_DQ], words[_B_DK], words[_B_DV] = [grad.data_ptr() for grad in grads]
        _workspace = self._lend(
            words, _B_LENT, self.workspace_backward, fixed, rng, lists, True
        )  # lives until the launch
        dsinks = None
        if fixed.sinks is not None:
            dsinks = torch.zeros(fixed.sinks.shape, dtype=torch.float32, device=self.device)
            words[_B_DSINKS] = dsinks.data_ptr()
        dvalues = []
        if values:
            captures = self._fill_captures(values)
            for i in self.grad_places:
                grad = torch.zeros(values[i].shape, dtype=torch.float32, device=self.device)
                captures[i * _C_SIZE + _C_GRAD] = grad.data_ptr()
                dvalues.append(grad)
            words[_B_CAPTURES] = ctypes.addressof(captures)
        launch("backward", self.spec, words, self.index)
        dvalues = [grad.to(values[i].dtype) for grad, i in zip(dvalues, self.grad_places)]
        return grads, dsinks, dvalues


def is_watched() -> bool:
    """Whether a mode or a transform, besides autograd, must see the call."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class _Launchers(dict):
    def __missing__(self, name: str) -> Any:
        self[name] = getattr(library(), f"flashjit_{name}")
        return self[name]


_launchers = _Launchers()


def launch(function: str, spec: Handle, words: array.array[int], index: int) -> None:
    """Calls the library's function with the struct that the words are: on a GPU's current stream, or where index is negative on
    the CPU."""
    args, _ = words.buffer_info()
    if index < 0:
        status = getattr(library(), f"flashjit_reference_{function}")(spec.address, args)
    else:
        call = _launchers[function]
        shared = runtime().address
        stream = torch._C._cuda_getCurrentRawStream(index)
        if torch._C._cuda_getDevice() == index:
            status = call(shared, spec.address, args, stream)
        else:
            with torch.cuda.device(index):
                status = call(shared, spec.address, args, stream)
        if status == 4:  # a thread that has not used CUDA has no context yet, such as autograd's
            with torch.cuda.device(index):
                bind_context(torch.device("cuda", index))
                status = call(shared, spec.address, args, stream)
    if status:
        _library.raise_error(status)


_plans: dict[Any, Plan] = {}


def bind_context(device: torch.device) -> None:
    """Makes the device's context current in this thread, as a first launch by PyTorch does."""
    torch.zeros(1, device=device)


def _strides_are_read(tensor: Tensor) -> bool:
    """Whether the kernels read a tensor of four dimensions with these strides."""
    align = 16 // tensor.element_size()
    *others, last = tensor.stride()
    return (last == 1 or tensor.shape[3] <= 1) and all(
        stride % align == 0 for size, stride in zip(tensor.shape, others) if size > 1
    )


def readable(tensor: Tensor, name: str) -> Tensor:
    """The tensor, or a copy in memory as the kernels read it, with its dimensions in the same order."""
    if _strides_are_read(tensor) and tensor.data_ptr() % 16 == 0:
        return tensor
    if tensor.stride(3) != 0:  # else expanded, as the gradient of a sum is
        say_once(
            f"{name} is copied in each call: the kernels read memory that begins at a multiple of 16 bytes, with a last "
            "stride of 1 and others of multiples of 16 bytes. Make it so where it is made to save the time."
        )
    strides = dense_strides(tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@functools.cache
def say_once(text: str) -> None:
    logging.getLogger("flashjit").warning(text)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its elements begin at no multiples of their size, as in a mapped file."""
    return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()


def _is_tensor(value: Any) -> bool:
    return value is not None


def layout_of(tensor: Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.get_device())


def _is_laid_out(tensor: Any, layout: Layout) -> bool:
    return (
        type(tensor) in PLAIN
        and tensor.stride() == layout.stride
        and tensor.shape == layout.size
        and tensor.dtype is layout.dtype
        and tensor.get_device() == layout.device_index
        and tensor.data_ptr() % tensor.element_size() == 0
    )


def laid_out(tensor: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The tensor, or a copy with these strides that kernels read."""
    if tensor.stride() == tuple(stride) and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def contiguous(fixed: Fixed) -> Fixed:
    """Of which the kernels know no strides, but a page table's rows."""
    *others, k_scale, v_scale, q_scale = fixed  # whose strides they know
    if all(x is None or x.is_contiguous() or x is fixed.page_table and has_rows(x) for x in others):
        return fixed
    dense = [x if x is None else x.contiguous() for x in others]
    return Fixed._make((*dense, k_scale, v_scale, q_scale))


def has_rows(table: Tensor) -> bool:
    """Whether one stride says where its rows begin. The library takes a stride of 0, as an expanded tensor has, for the default."""
    return table.dim() == 0 or table.stride(-1) == 1 and table.stride(0) > 0


def cache_capacity(k: Tensor, fixed: Fixed) -> int:
    """How many keys a sequence of a cache may have."""
    return k.shape[2] * table_size(fixed)[1]


def table_size(fixed: Any) -> tuple[int, int]:
    """Sequences and columns of the page table as the library knows it."""
    table = fixed.page_table
    if table is None:
        return 0, 1
    if fixed.page_starts is not None:
        return fixed.page_starts.shape[0] - 1, table.shape[0]
    return table.shape[0], table.shape[1] if table.dim() == 2 else 1


def page_table_struct(fixed: Any) -> _library.PageTable:
    stride = 0 if fixed.page_starts is not None else fixed.page_table.stride(0)
    return _library.PageTable(None, *table_size(fixed), stride)


def out_dtype_of(options: str, out_type: str, dtype: torch.dtype) -> torch.dtype:
    """Of O, by a spec's options and the types of spec and Q."""
    if "fp32_out" in switches_of(options):
        return torch.float32
    return next((torch_type for torch_type, name in SPEC_TYPES.items() if name == out_type), dtype)


def switches_of(options: str) -> list[str]:
    """Of a spec's options those after its programs."""
    return options.rpartition("}")[2].split(":")


def names_with_grad(options: str) -> set[str]:
    """The captured tensors that a score program declares with "grad"."""
    score = options.partition(":score{")[2].partition("}")[0]
    return {line.partition(":")[0].strip() for line in score.split(";") if line.rstrip().endswith(" grad")}


def plan_of(q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem) -> Plan:
    try:
        key = (
            q.shape,
            k.shape,
            v.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            q.dtype,
            k.dtype,
            v.dtype,
            q.get_device(),
            k.get_device(),
            v.get_device(),
            problem,
        )
    except RuntimeError:
        refuse_nested(q, k, v)
        raise
    if fixed is not NOTHING or values:
        key = (*key, *[signature(value) for value in (*fixed, *values)])
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(q, k, v, fixed, values, problem)
        if len(_plans) >= KEEP_PLANS:
            _plans.clear()
        _plans[key] = plan
    elif plan.index < 0:  # so is the index of all that is on no GPU, such as on meta
        _check_tensors(q, k, v, fixed, values, problem)
    return plan


def refuse_nested(*tensors: Tensor) -> None:
    for name, tensor in zip("qkv", tensors):
        if tensor.is_nested:
            raise WrongType(
                f"{name} is a nested tensor: give its rows one behind the other, with cu_seqlens_q and "
                "cu_seqlens_kv, or pad it."
            )


def signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return None


def _spec_of(text: str, q: Tensor, v: Tensor) -> Handle:
    try:
        return spec_handle(text)
    except InvalidArgument as error:
        _, found, reason = str(error).partition("out of range: head_dim")
        if not found:
            raise
        what = f"q is {describe(q)} and v is {describe(v)}: their head_dim{reason}; "
        if q.shape[3] > MAX_DIM or v.shape[3] > MAX_DIM_V:
            raise InvalidArgument(
                what + "torch.nn.functional.scaled_dot_product_attention() computes larger ones."
            ) from None
        raise InvalidArgument(
            what + "pad them with zeros, and give the scale, or call flashjit.torch."
            "scaled_dot_product_attention(), which does so."
        ) from None


# --- checks, where a plan is made ----------------------------------------------------------------------------------


def check_device(first: Tensor, first_name: str, others: Mapping[str, Any]) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise InvalidArgument(
                f"{first_name} is on {first.device} and {name} on {tensor.device}: move them to one device, such as "
                f"{name}.to({first_name}.device)."
            )


def check_four_dims(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 4:
        raise InvalidArgument(
            f"{name} is {describe(tensor)}: it needs four dimensions, [batch, heads, length, head_dim]."
        )


def check_alike(tensors: Mapping[str, Tensor], types: Mapping[torch.dtype, str] = SPEC_TYPES) -> None:
    """Of tensors with four dimensions: whether kernels take them, and all are of the first one's type and device."""
    first_name, first = next(iter(tensors.items()))
    check_device(first, first_name, tensors)
    for name, tensor in tensors.items():
        check_four_dims(name, tensor)
        if tensor.layout is not torch.strided:
            raise WrongType(f"{name} has the layout {tensor.layout}: convert it with .to_dense().")
        if tensor.dtype not in types:
            raise WrongType(
                f"{name} is {describe(tensor)}: "
                + (
                    "flashjit computes in float16, bfloat16 and float32; convert it."
                    if types is SPEC_TYPES
                    else f"where {first_name} is {str(first.dtype).removeprefix('torch.')} it must be of that type, too; see flashjit.quantize()."
                )
            )
        if tensor.dtype != first.dtype:
            raise InvalidArgument(
                f"{first_name} is {describe(first)} and {name} is {describe(tensor)}: they must have one type; "
                f"convert one, such as {name}.to({first_name}.dtype)."
            )
        if tensor.device.type not in ("cuda", "cpu"):
            raise InvalidArgument(f"{name} is on {tensor.device}: move it to a CUDA device or to the CPU.")
        if tensor.shape[3] == 0:
            raise InvalidArgument(
                f"{name} is {describe(tensor)}: its head_dim is 0; flashjit.torch."
                "scaled_dot_product_attention() takes that."
            )
        check_memory(name, tensor)


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem
) -> None:
    if problem.stored is not None:
        check_alike({"q": q})
    elif q.dtype in KV_TYPES:
        check_alike({"q": q, "k": k, "v": v}, KV_TYPES)
    elif k.dtype in KV_TYPES:
        check_alike({"q": q})
        check_alike({"k": k, "v": v}, KV_TYPES)
        check_device(q, "q", {"k": k})
    else:
        check_alike({"q": q, "k": k, "v": v})
    check_device(q, "q", fixed._asdict())
    as_stored = problem.stored is not None  # whose rows' bytes the library checks
    if problem.cached and (v.shape[:3] != k.shape[:3] or not as_stored and k.shape[3] != q.shape[3]):
        raise InvalidArgument(
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: k must have the head_dim of "
            "q, and v the pages or slots, heads and rows of k."
        )
    if not problem.cached and (
        v.shape[:3] != k.shape[:3] or not as_stored and k.shape[3] != q.shape[3] or k.shape[0] != q.shape[0]
    ):
        raise InvalidArgument(
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: batches must be equal, k "
            "must have the head_dim of q, and v the heads and the length of k."
        )
    if k.shape[1] == 0 and q.shape[1] or k.shape[1] and q.shape[1] % k.shape[1]:
        raise InvalidArgument(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: the heads of q must be a multiple of "
            "those of k."
        )
    _check_fixed(q, k, fixed, problem)
    for name, value in zip(problem.names, values):
        _check_capture(name, value, q)


def _check_fixed(q: Tensor, k: Tensor, fixed: Fixed, problem: Problem) -> None:
    batch = q.shape[0]
    if fixed.cu_seqlens_q is not None:
        batch = fixed.cu_seqlens_q.numel() - 1
        if batch < 0:
            raise InvalidArgument("cu_seqlens_q is empty: it needs one number more than there are sequences.")
        if q.shape[0] != 1:
            raise InvalidArgument(
                f"q is {list(q.shape)}: with cu_seqlens its batch is 1, and the sequences lie one behind "
                "the other, [1, heads, all rows, head_dim]."
            )
        if not problem.cached and fixed.cu_seqlens_kv.shape != fixed.cu_seqlens_q.shape:
            raise InvalidArgument(
                f"cu_seqlens_q has {fixed.cu_seqlens_q.numel()} numbers and cu_seqlens_kv "
                f"{fixed.cu_seqlens_kv.numel()}: both need one more than there are sequences."
            )
    wanted = {
        "kv_lengths": (torch.int32, (batch,)),
        "cu_seqlens_q": (torch.int32, (batch + 1,)),
        "cu_seqlens_kv": (torch.int32, (batch + 1,)),
        "prefix_length": (torch.int32, (1,)),
        "sinks": (torch.float32, (q.shape[1],)),
    }
    for name, (dtype, shape) in wanted.items():
        tensor = getattr(fixed, name)
        if tensor is None:
            continue
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise InvalidArgument(
                f"{name} is {describe(tensor)}: it must be {str(dtype).removeprefix('torch.')} {list(shape)}."
            )
        check_memory(name, tensor)
    indices = fixed.indices
    if indices is not None:
        lists = [q.shape[0], q.shape[2], k.shape[1]]
        if (
            indices.dtype != torch.int32
            or indices.dim() != 4
            or list(indices.shape[:3]) not in (lists, [1, *lists[1:]])
        ):
            raise InvalidArgument(
                f"indices is {describe(indices)}: it must be int32 [{lists[0]} or 1, {lists[1]}, {lists[2]}, top-k], "
                "a list of keys for each query and head of k."
            )
        check_memory("indices", indices)
    check_page_table("k", k, fixed.page_table, fixed.page_starts, batch)


def check_page_table(k_name: str, k: Tensor, table: Any, starts: Any, sequences: int) -> None:
    """k: the pages or slots of K."""
    if table is None:
        return
    if starts is not None:
        if starts.dtype != torch.int32 or starts.shape != (sequences + 1,):
            raise InvalidArgument(
                f"page_table's indptr is {describe(starts)}: it must be int32 [{sequences + 1}]."
            )
        if table.dtype != torch.int32 or table.dim() != 1:
            raise InvalidArgument(
                f"page_table's indices are {describe(table)}: they must be int32 [pages of all sequences]."
            )
    elif table.dtype != torch.int32 or table.dim() not in (1, 2) or table.shape[0] != sequences:
        raise InvalidArgument(
            f"page_table is {describe(table)}: it must be int32 [{sequences}, pages of the longest sequence], or "
            f"[{sequences}] for the slot of each sequence."
        )
    if (starts is not None or table.dim() == 2) and k.shape[2] == 0:
        raise InvalidArgument(
            f"{k_name} is {list(k.shape)}: with a page_table its third size is the rows of a page, 1 or more; "
            f"where {k_name} has slots for whole sequences, give a page_table of one dimension, or none."
        )


def _check_capture(name: str, value: Any, q: Tensor) -> None:
    if is_scalar(value):
        return
    if not isinstance(value, Tensor):
        raise WrongType(f"captures[{name!r}] is a {type(value).__name__}: give a tensor or a number.")
    if value.dtype not in ELEMENTS:
        raise WrongType(
            f"captures[{name!r}] is {describe(value)}: programs read {', '.join(map(str, ELEMENTS))}; "
            "convert it."
        )
    if value.device != q.device:
        raise InvalidArgument(
            f"q is on {q.device} and the captured tensor {name} on {value.device}: move it there."
        )
    if value.layout is not torch.strided:
        raise WrongType(
            f"the captured tensor {name} has the layout {value.layout}: convert it with .to_dense()."
        )
    if value.dim() > _library.MAX_CAPTURE_DIMS:
        raise InvalidArgument(
            f"captures[{name!r}] has {value.dim()} dimensions: at most {_library.MAX_CAPTURE_DIMS} are possible."
        )
    if value.numel() == 0:
        raise InvalidArgument(
            f"captures[{name!r}] is {describe(value)}: it has no element to read; give at least one."
        )
    check_memory(f"the captured tensor {name}", value)


def check_memory(name: str, tensor: Tensor) -> None:
    if not torch.compiler.is_compiling() and tensor.numel() and tensor.data_ptr() == 0:
        raise InvalidArgument(
            f"{name} has no memory any more (its storage was freed): give a tensor that is alive."
        )

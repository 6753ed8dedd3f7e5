"""What is filled in once for all calls that look alike: checked sizes, filled structs, the workspace's size."""

from __future__ import annotations

import array
import contextlib
import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# In C: they take a fraction of the time of torch.empty_strided().
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]

from . import _library
from ._call_types import (
    NOTHING,
    OF_BOTH_PASSES,
    BuiltLists,
    Fixed,
    Placed,
    Problem,
    Rng,
    cache_capacity,
    columns_of_q,
    contiguous,
    declares_tensor,
    differentiable,
    has_out_mod,
    names_with_grad,
    out_dtype_of,
    switches_of,
)
from ._formats import BLOCK_SCALES
from ._launch import bind_context, launch
from ._library import BackwardArgs, Capture, ForwardArgs, Handle, ListArgs, runtime
from ._list_checks import check_built
from ._out_codes import OutCodes, columns_of_out, type_of_codes
from ._structs import (
    Lent,
    indices_struct,
    page_table_struct,
    scales_struct,
    tensor_struct,
    words_at,
    words_lent,
)
from ._tensor_checks import check_tensors, spec_of
from ._tensors import (
    ELEMENTS,
    PLAIN,
    SPEC_TYPES,
    Layout,
    dense_strides,
    is_laid_out,
    laid_out,
    layout_of,
    lies_as,
    readable,
    strides_are_read,
)
from ._tracing import is_scalar
from .errors import Error, InvalidArgument

# With which the tests pass: a slice of a BlockMask of PyTorch 2.9 has silently lost its mask_mod.
_OLDEST = (2, 10)
if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
    raise ImportError(
        f"flashjit needs PyTorch {'.'.join(map(str, _OLDEST))} or newer, and this is {torch.__version__}: "
        "pip install -U torch."
    )
KEEP_PLANS = 4096


_F_Q, _F_K, _F_V, _F_OUT, _F_LSE, _F_CAPTURES, _F_ROW_MAX, _F_STATE, _F_BEFORE_MOD, _F_SKIPPED = words_at(
    ForwardArgs,
    *("q", "k", "v", "out", "lse", "captures", "row_max", "state", "out_before_mod", "skip_softmax_counts"),
)
_B_Q, _B_K, _B_V, _B_OUT, _B_LSE, _B_DOUT, _B_DLSE, _B_DQ, _B_DK, _B_DV, _B_CAPTURES, _B_DSINKS = words_at(
    BackwardArgs, "q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "captures", "dsinks"
)
_TENSOR_WORDS = ctypes.sizeof(_library.Tensor) // 8
_F_OUT_STRIDE = _F_OUT + _library.word(_library.Tensor, "stride")
_B_DOUT_STRIDE = _B_DOUT + _library.word(_library.Tensor, "stride")


_F_LENT = words_lent(ForwardArgs, Fixed._fields)
_B_LENT = words_lent(BackwardArgs, OF_BOTH_PASSES)
_C_SIZE = ctypes.sizeof(Capture) // 8
_C_DATA, _C_GRAD, _C_SCALAR = words_at(Capture, "data", "grad", "scalar")


class Plan:
    """Checked sizes, filled structs and the workspace's size of a problem; a call copies the structs and sets pointers."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem
    ) -> None:
        check_tensors(q, k, v, fixed, values, problem)
        self.problem = problem
        self.device, self.dtype = q.device, q.dtype
        out_type = out_dtype_of(problem.options, problem.out_type, q.dtype)
        self.out_dtype = type_of_codes(problem.options) or out_type
        # O as the backward pass reads it, with out_mod before that.
        self.saved_out_dtype = q.dtype if has_out_mod(problem.options) else self.out_dtype
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
        self.out_size = (*q.shape[:3], columns_of_out(problem.options, dim_v))
        self.out_stride = dense_strides(self.out_size, q.stride())
        self.lse_size = tuple(q.shape[:3])
        self.has_lse = "weight_mod" not in switches_of(problem.options)  # else its memory stays as it is
        self.has_out_mod = has_out_mod(problem.options)
        self.has_dense_others = fixed is NOTHING or contiguous(fixed) is fixed
        self.launches = not varlen or bool(batch and seqlen_q)  # and kernels write all rows of results
        self.reads = strides_are_read(q) and (
            problem.stored is not None or strides_are_read(k) and strides_are_read(v)
        )
        self.grads = [(tuple(t.shape), dense_strides(t.shape, t.stride())) for t in (q, k, v)]
        self.shares_kv = "shared_kv" in switches_of(problem.options)
        self.saved = self._layouts_of_saved((q, k, v), (*fixed, *values))
        self.forms = self.saved[0], self.saved[1], self.saved[2]
        self.forms_of_fixed = (
            None if fixed is NOTHING else [None if x is None else layout_of(x) for x in fixed]
        )
        dim = columns_of_q(q, fixed)
        dims = f"{dim}" if dim == dim_v else f"{dim}x{dim_v}"
        self.spec_text = f"{problem.out_type or SPEC_TYPES[q.dtype]}:d{dims}{problem.options}"
        has_codes = k.element_size() == 1 or type_of_codes(problem.options) is not None
        self.spec = spec_of(self.spec_text, q, v, None if has_codes else (dim, dim_v))
        self._make_captures(values)
        self._make_templates(q, k, v, fixed, batch if varlen else 0)
        self.backward_calls: Any = None  # autograd's
        self.generation = -1
        self.prepared_both = False
        self.workspace_forward = 0
        self.workspace_backward: int | None = 0

    def _layouts_of_saved(self, tensors: Sequence[Tensor], others: Sequence[Any]) -> list[Layout]:
        """Q, K, V, O, LSE and the tensors among the others: what the backward pass reads."""
        heads, rows = (max(1, size) for size in self.lse_size[1:])
        return [
            *[layout_of(x) for x in tensors],
            Layout(self.out_size, self.out_stride, self.saved_out_dtype, self.index),
            Layout(self.lse_size, (heads * rows, rows, 1), torch.float32, self.index),
            *[layout_of(x) for x in others if isinstance(x, Tensor)],
        ]

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these tensors lie as the plan's, in a fraction of the time that a key of them takes."""
        of_q, of_k, of_v = self.forms
        index = self.index
        return (
            lies_as(q, of_q)
            and lies_as(k, of_k)
            and lies_as(v, of_v)
            and (index >= 0 or q.device == k.device == v.device == self.device)
        )

    def takes_fixed(self, fixed: Fixed) -> bool:
        """Whether the other tensors are there as in the plan, and have its strides."""
        forms = self.forms_of_fixed
        if forms is None or fixed is NOTHING:
            return forms is None and fixed is NOTHING
        return all(
            tensor is form if tensor is None or form is None else lies_as(tensor, form)
            for tensor, form in zip(fixed, forms)
        )

    def reads_saved(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Sequence[Tensor | None]
    ) -> bool:
        """Whether saved tensors are as they were saved. Hooks may return others, such as contiguous copies."""
        of_q, of_k, of_v, of_out, of_lse, *of_rest = self.saved
        return (
            lies_as(q, of_q)
            and lies_as(k, of_k)
            and lies_as(v, of_v)
            and lies_as(out, of_out)
            and lies_as(lse, of_lse)
            and type(out) is type(lse) is Tensor
            and type(q) in PLAIN
            and type(k) in PLAIN
            and type(v) in PLAIN
            and (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % 16 == lse.data_ptr() % 4 == 0
            and (not self.shares_kv or k.data_ptr() == v.data_ptr())
            and (not of_rest or all(map(is_laid_out, filter(_is_tensor, rest), of_rest)))
        )

    def _make_captures(self, values: tuple[Any, ...]) -> None:
        self.captures = (Capture * len(values))()
        self.tensor_places, self.scalar_places, self.grad_places = [], [], []
        with_grad = names_with_grad(self.problem.options)
        for i, (name, value) in enumerate(zip(self.problem.names, values)):
            capture = self.captures[i]
            capture.name = name.encode()
            if is_scalar(value) and not declares_tensor(self.problem.options, name):
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
            common["indices"] = indices_struct(fixed.indices, fixed.topk_length)
        tensors = {name: tensor_struct(t.shape, t.stride()) for name, t in (("q", q), ("k", k), ("v", v))}
        tensors["out"] = tensor_struct(self.out_size, self.out_stride)
        table = fixed.page_table
        forward_alone: dict[str, Any] = {} if table is None else {"page_table": page_table_struct(fixed)}
        forward_alone |= {
            name: scales_struct(getattr(fixed, name)) for name in ("k_scale", "v_scale", "q_scale")
        }
        if problem.skip_softmax_threshold is not None:
            self._skip_threshold = ctypes.c_float(problem.skip_softmax_threshold)
            forward_alone["skip_softmax_threshold"] = ctypes.addressof(self._skip_threshold)
        for name in (*BLOCK_SCALES, "q_rope"):
            if (tensor := getattr(fixed, name)) is not None:
                forward_alone[name] = tensor_struct(tensor.shape, tensor.stride())
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
            runtime().prepare_first_calls(self.spec_text, self.shape)

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
            check_built(lists, self)
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

    def new(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of a result, with zeros where nothing is launched."""
        index = self.index
        if self.device.type == "cpu":
            made = _empty_strided_cpu(size, stride, dtype)
        elif index >= 0 and torch._C._cuda_getDevice() == index:
            made = _empty_strided_cuda(size, stride, dtype)
        else:
            made = torch.empty_strided(size, stride, dtype=dtype, device=self.device)
        return made if self.launches else made.zero_()

    def new_rows(self) -> Tensor:
        """Memory for LSE, or for the rows' largest scores."""
        of_lse = self.saved[4]
        rows = self.new(self.lse_size, of_lse.stride, torch.float32)
        return rows if self.launches else rows.fill_(-math.inf)

    def new_before_mod(self) -> Tensor:
        """Memory for O before out_mod, which the backward pass reads."""
        return self.new(self.out_size, self.out_stride, self.saved_out_dtype)

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
        before_mod: Tensor | None = None,
        recorder: Any = None,
        skip_softmax_counts: Tensor | None = None,
        codes: OutCodes | None = None,
    ) -> tuple[Any, Any]:
        """O and LSE, and what new_rows() made as row_max, of tensors that are read where they lie: see readable(). out, lse,
        workspace: the caller's, checked, or made here. state: O, which may be `out`, and LSE that the keys join.
        before_mod: what new_before_mod() made. recorder: of a call that is new to the front. skip_softmax_counts: added to.
        codes: O is (O, the scales of its blocks)."""
        shared = runtime()
        if self.generation != shared.generation:
            self._refresh(shared)
        words = self.forward_words[:]
        if out is None:
            out = self.new(self.out_size, self.out_stride, self.out_dtype)
        else:
            words[_F_OUT_STRIDE : _F_OUT_STRIDE + 4] = array.array("Q", out.stride())
            if not self.launches:
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
                if not self.launches:
                    lse.fill_(-math.inf)
            if self.has_lse:
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
        if skip_softmax_counts is not None:
            words[_F_SKIPPED] = skip_softmax_counts.data_ptr()
        block_scale = None if codes is None else codes.put(words, self)
        if before_mod is not None:
            words[_F_BEFORE_MOD : _F_BEFORE_MOD + _TENSOR_WORDS] = _library.words_of(
                tensor_struct(before_mod.shape, before_mod.stride())
            )
            words[_F_BEFORE_MOD] = before_mod.data_ptr()
        _workspace = self._lend(
            words, _F_LENT, self.workspace_forward, fixed, rng, lists, False, workspace
        )  # lives until the launch
        captures = None
        if values:
            captures = self._fill_captures(values)
            words[_F_CAPTURES] = ctypes.addressof(captures)
        launch("forward", self.spec, words, self.index)
        if codes is not None:
            return (out, block_scale), lse
        if recorder is not None:
            recorder.launches(self, words, captures, values, fixed, rng, row_max, state, before_mod)
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
        recorder: Any = None,
    ) -> tuple[list[Tensor], Any, list[Tensor]]:
        """[dq, dk, dv], dsinks or None, and the gradients of the captures at grad_places.

        dout and dlse: None where only the other has a gradient. out: with out_mod, O before that. recorder: as in forward()."""
        shared = runtime()
        if self.generation != shared.generation:
            self._refresh(shared)
        if self.workspace_backward is None:
            self.workspace_backward = self._workspace(shared, backward=True)
        words, (grads, dsinks, dvalues), _held = self.words_for_gradients(
            dout, dlse, (q, k, v), out, lse, fixed, values, rng, self.workspace_backward, lists
        )
        launch("backward", self.spec, words, self.index)
        if recorder is not None:
            recorder.launches(self, words, None, (), fixed, rng, dsinks)
        return grads, dsinks, [grad.to(values[i].dtype) for grad, i in zip(dvalues, self.grad_places)]

    def words_for_gradients(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        fixed: Fixed,
        values: Sequence[Any],
        rng: Rng,
        workspace: int,
        lists: BuiltLists | None = None,
    ) -> tuple[array.array[int], tuple[list[Tensor], Any, list[Tensor]], Any]:
        """The backward pass's struct, memory of its results (of captures in fp32), and what must live until the launch.
        workspace: its bytes."""
        q, k, v = qkv
        if dout is not None and dout.dtype is not self.dtype:  # as O may be float32
            dout = dout.to(self.dtype)
        words = self.backward_words[:]
        words[_B_Q], words[_B_K], words[_B_V], words[_B_OUT] = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
        )
        if self.has_lse:
            words[_B_LSE] = lse.data_ptr()
        if dout is None:
            dout = torch.zeros_like(out, dtype=self.dtype)
        if dout.stride() != self.out_stride or dout.data_ptr() % 16:
            dout = readable(dout, "the gradient of the output")
            words[_B_DOUT_STRIDE : _B_DOUT_STRIDE + 4] = array.array("Q", dout.stride())
        words[_B_DOUT] = dout.data_ptr()
        if dlse is not None:
            dlse = dlse.to(torch.float32).contiguous()
            words[_B_DLSE] = dlse.data_ptr()
        grads = [self.new(size, stride, self.grad_dtype) for size, stride in self.grads]
        words[_B_DQ], words[_B_DK], words[_B_DV] = [grad.data_ptr() for grad in grads]
        lent = self._lend(words, _B_LENT, workspace, fixed, rng, lists, True)
        dsinks, with_grad = None, differentiable(fixed)
        if with_grad is not None:
            dsinks = torch.zeros(with_grad.shape, dtype=torch.float32, device=self.device)
            words[_B_DSINKS] = dsinks.data_ptr()
        dvalues, captures = [], None
        if values:
            captures = self._fill_captures(values)
            for i in self.grad_places:
                grad = torch.zeros(values[i].shape, dtype=torch.float32, device=self.device)
                captures[i * _C_SIZE + _C_GRAD] = grad.data_ptr()
                dvalues.append(grad)
            words[_B_CAPTURES] = ctypes.addressof(captures)
        return words, (grads, dsinks, dvalues), (lent, captures, out, dout, dlse)


def _is_tensor(value: Any) -> bool:
    return value is not None

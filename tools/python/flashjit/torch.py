"""flashjit for PyTorch tensors: attention() with autograd, as custom operators, and what replaces PyTorch's own.

Every call runs on the tensors' device and on PyTorch's current stream, allocates with PyTorch's allocator and waits for
nothing. Tensors on the CPU are computed by the CPU reference, in fp64: for tests, not for speed.
"""
from __future__ import annotations

import ctypes
import math
from typing import Any, Mapping, NamedTuple, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _library
from ._library import BackwardArgs, Capture, ForwardArgs, library, runtime, spec_handle
from .errors import InvalidArgument, Unsupported, WrongType
from ._tracing import is_real, is_scalar
from .programs import EMPTY, Program, program_of, trace_unlocked

__all__ = ["attention", "scaled_dot_product_attention", "BlockMap", "prepare", "register_with_transformers"]

_SPEC_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ELEMENTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "int32",
             torch.int64: "int64", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool"}
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_KEEP_PLANS = 4096


class BlockMap:
    """Which blocks of queries and keys attend to each other; the rest costs nothing.

    blocks: [batch or 1, heads_q or 1, ceil(seqlen_q / bq), ceil(seqlen_kv / bkv)], or the last two only, of bool or
        integers: nonzero attends.
    block: (bq, bkv), or one number for both: multiples of 16 from 16 to 256.
    """

    def __init__(self, blocks: Tensor, block: Union[int, tuple[int, int]] = 128) -> None:
        if not isinstance(blocks, Tensor) or blocks.dim() not in (2, 4) or blocks.is_floating_point():
            raise WrongType(f"blocks is {_describe(blocks)}: give booleans or integers [batch or 1, heads or 1, block rows, "
                            "block columns], or [block rows, block columns].")
        blocks = blocks if blocks.dim() == 4 else blocks[None, None]
        self.blocks = (blocks != 0).to(torch.uint8).contiguous()
        self.block = (block, block) if isinstance(block, int) else (int(block[0]), int(block[1]))

    @staticmethod
    def from_flex(block_mask: Any) -> "BlockMap":
        """From a BlockMask of torch.nn.attention.flex_attention; its mask_mod is not part of it."""
        size = block_mask.BLOCK_SIZE
        return BlockMap(block_mask.to_dense(), size if isinstance(size, int) else tuple(size))


class Fixed(NamedTuple):
    """The tensors that every call may have beside Q, K, V."""

    block_map: Any = None
    kv_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    sinks: Any = None


_NOTHING = Fixed()


class Problem(NamedTuple):
    """What is the same for all calls that share a plan, beside the tensors' sizes and strides."""

    options: str  # of the spec, from the masks on: ":causal:dropout"
    scale: Any
    dropout_p: float
    max_seqlen_q: int
    max_seqlen_kv: int
    names: tuple[str, ...]  # of the captures' values


# --- plans: what is filled in once for all calls that look alike ---------------------------------------------------


def _word(structure: type[ctypes.Structure], *members: str) -> tuple[int, ...]:
    return tuple(_library.word(structure, member) for member in members)


_FWD, _BWD = _library.words_of(ForwardArgs), _library.words_of(BackwardArgs)
_F_Q, _F_K, _F_V, _F_OUT, _F_LSE, _F_SEED, _F_OFFSET, _F_WORKSPACE, _F_CAPTURES = _word(
    ForwardArgs, "q", "k", "v", "out", "lse", "seed", "offset", "workspace", "captures")
_F_FIXED = _word(ForwardArgs, *Fixed._fields)
_B_Q, _B_K, _B_V, _B_OUT, _B_LSE, _B_DOUT, _B_DQ, _B_DK, _B_DV, _B_SEED, _B_OFFSET, _B_WORKSPACE, _B_CAPTURES, _B_DSINKS = _word(
    BackwardArgs, "q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "seed", "offset", "workspace", "captures",
    "dsinks")
_B_FIXED = _word(BackwardArgs, *Fixed._fields)
_B_DOUT_STRIDE = _B_DOUT + _library.word(_library.Tensor, "stride")
_C_SIZE = ctypes.sizeof(Capture) // 8
_C_DATA, _C_GRAD, _C_SCALAR = _word(Capture, "data", "grad", "scalar")


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def _dense_strides(size: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory as those of `like` do; the last one innermost."""
    strides = [0, 0, 0, 1]
    step = size[3]
    for i in sorted((2, 1, 0), key=lambda i: like[i]):
        strides[i] = step
        step = step * size[i]
    return tuple(strides)


def _tensor_struct(size: Sequence[int], stride: Sequence[int]) -> _library.Tensor:
    return _library.Tensor(None, (ctypes.c_int64 * 4)(*size), (ctypes.c_int64 * 4)(*stride))


class _Plan:
    """Checked sizes, filled structs and the workspace's size of a problem; a call copies the structs and sets pointers."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem) -> None:
        _check_tensors(q, k, v, fixed, values, problem)
        self.problem = problem
        self.device, self.dtype = q.device, q.dtype
        self.index = q.get_device()
        varlen = fixed.cu_seqlens_q is not None
        batch = fixed.cu_seqlens_q.numel() - 1 if varlen else q.shape[0]
        seqlen_q = problem.max_seqlen_q if varlen else q.shape[2]
        seqlen_kv = problem.max_seqlen_kv if varlen else k.shape[2]
        self.shape = (batch, q.shape[1], k.shape[1], seqlen_q, seqlen_kv)
        self.out_size = (*q.shape[:3], v.shape[3])
        self.out_stride = _dense_strides(self.out_size, q.stride())
        self.lse_size = (batch, q.shape[1], seqlen_q)
        self.lse_partial = varlen
        self.grads = [(tuple(t.shape), _dense_strides(t.shape, t.stride())) for t in (q, k, v)]
        dims = f"{q.shape[3]}" if q.shape[3] == v.shape[3] else f"{q.shape[3]}x{v.shape[3]}"
        self.spec_text = f"{_SPEC_TYPES[q.dtype]}:d{dims}{problem.options}"
        self.spec = spec_handle(self.spec_text)
        self._make_captures(values)
        self._make_templates(q, k, v, fixed, batch if varlen else 0)
        self.generation = -1
        self.workspace_forward = self.workspace_backward = 0
        self.deterministic = problem.options.endswith(":det")

    def _make_captures(self, values: tuple[Any, ...]) -> None:
        self.captures = (Capture * len(values))()
        self.tensor_places, self.scalar_places, self.grad_places = [], [], []
        with_grad = _names_with_grad(self.problem.options)
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
            capture.rank, capture.type = len(sizes), _library.ELEMENT_TYPES[_ELEMENTS[value.dtype]]
            capture.size[:len(sizes)], capture.stride[:len(sizes)] = sizes, strides
        self.capture_words = ctypes.c_uint64 * (_C_SIZE * len(values))
        self.capture_doubles = ctypes.c_double * (_C_SIZE * len(values))

    def _make_templates(self, q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, batch: int) -> None:
        problem = self.problem
        common: dict[str, Any] = {"dropout_p": problem.dropout_p, "capture_count": len(self.captures),
                                  "batch_size": batch, "max_seqlen_q": problem.max_seqlen_q,
                                  "max_seqlen_kv": problem.max_seqlen_kv}
        if problem.scale is not None:
            self._scale = ctypes.c_float(problem.scale)  # lives as long as the structs that point to it
            common["softmax_scale"] = ctypes.addressof(self._scale)
        if fixed.block_map is not None:
            common["block_map"] = _library.BlockMap(None, (ctypes.c_int64 * 4)(*fixed.block_map.shape))
        tensors = {name: _tensor_struct(t.shape, t.stride()) for name, t in (("q", q), ("k", k), ("v", v))}
        tensors["out"] = _tensor_struct(self.out_size, self.out_stride)
        self.forward_template = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs), **tensors, **common)
        for name, (size, stride) in zip(("dq", "dk", "dv"), self.grads):
            tensors[name] = _tensor_struct(size, stride)
        tensors["dout"] = tensors["out"]
        self.backward_template = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs), **tensors, **common)

    # Launches.

    def _refresh(self, shared: _library.Runtime) -> None:
        """Asks how much workspace the calls need: again after something was prepared, which may have changed it."""
        if self.index >= 0:
            with torch.cuda.device(self.index):
                _bind_context(self.device)
                self.workspace_forward = shared.workspace_bytes(self.spec_text, self.shape)
                self.workspace_backward = shared.workspace_bytes(self.spec_text, self.shape, backward=True)
        self.generation = shared.generation

    def _fill_captures(self, values: Sequence[Any]) -> Any:
        words = self.capture_words.from_buffer_copy(self.captures)
        for i in self.tensor_places:
            words[i * _C_SIZE + _C_DATA] = values[i].data_ptr()
        if self.scalar_places:
            doubles = self.capture_doubles.from_buffer(words)
            for i in self.scalar_places:
                doubles[i * _C_SIZE + _C_SCALAR] = float(values[i])
        return words

    def _launch(self, function: str, words: Any) -> None:
        if self.index < 0:
            status = getattr(library(), f"flashjit_reference_{function}")(self.spec.address, words)
        else:
            launch = _launchers[function]
            shared = runtime().address
            stream = torch._C._cuda_getCurrentRawStream(self.index)
            if torch._C._cuda_getDevice() == self.index:
                status = launch(shared, self.spec.address, words, stream)
            else:
                with torch.cuda.device(self.index):
                    status = launch(shared, self.spec.address, words, stream)
            if status == 4:  # a thread that has not used CUDA has no context yet, such as autograd's
                with torch.cuda.device(self.index):
                    _bind_context(self.device)
                    status = launch(shared, self.spec.address, words, stream)
        if status:
            _library.raise_error(status)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: Sequence[Any], seed: int, offset: int,
                want_lse: bool) -> tuple[Tensor, Any]:
        shared = runtime()
        if self.generation != shared.generation:
            self._refresh(shared)
        out = torch.empty_strided(self.out_size, self.out_stride, dtype=self.dtype, device=self.device)
        words = _FWD.from_buffer_copy(self.forward_template)
        words[_F_Q], words[_F_K], words[_F_V], words[_F_OUT] = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        lse = None
        if want_lse:
            lse = torch.empty(self.lse_size, dtype=torch.float32, device=self.device)
            if self.lse_partial:
                lse.fill_(-math.inf)  # of rows past a sequence's end
            words[_F_LSE] = lse.data_ptr()
        if self.workspace_forward:
            workspace = torch.empty(self.workspace_forward, dtype=torch.uint8, device=self.device)
            words[_F_WORKSPACE], words[_F_WORKSPACE + 1] = workspace.data_ptr(), self.workspace_forward
        if fixed is not _NOTHING:
            for at, tensor in zip(_F_FIXED, fixed):
                if tensor is not None:
                    words[at] = tensor.data_ptr()
        if values:
            captures = self._fill_captures(values)
            words[_F_CAPTURES] = ctypes.addressof(captures)
        words[_F_SEED], words[_F_OFFSET] = seed, offset
        self._launch("forward", words)
        return out, lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, fixed: Fixed,
                 values: Sequence[Any], seed: int, offset: int) -> tuple[list[Tensor], Any, list[Tensor]]:
        """[dq, dk, dv], dsinks or None, and the gradients of the captures at grad_places."""
        shared = runtime()
        if self.generation != shared.generation:
            self._refresh(shared)
        words = _BWD.from_buffer_copy(self.backward_template)
        words[_B_Q], words[_B_K], words[_B_V], words[_B_OUT] = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        words[_B_LSE] = lse.data_ptr()
        if dout.stride() != self.out_stride:
            if not _takes(dout):
                dout = dout.contiguous()
            words[_B_DOUT_STRIDE:_B_DOUT_STRIDE + 4] = dout.stride()
        words[_B_DOUT] = dout.data_ptr()
        grads = [torch.empty_strided(size, stride, dtype=self.dtype, device=self.device) for size, stride in self.grads]
        words[_B_DQ], words[_B_DK], words[_B_DV] = [grad.data_ptr() for grad in grads]
        if self.workspace_backward:
            workspace = torch.empty(self.workspace_backward, dtype=torch.uint8, device=self.device)
            words[_B_WORKSPACE], words[_B_WORKSPACE + 1] = workspace.data_ptr(), self.workspace_backward
        dsinks = None
        if fixed is not _NOTHING:
            for at, tensor in zip(_B_FIXED, fixed):
                if tensor is not None:
                    words[at] = tensor.data_ptr()
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
        words[_B_SEED], words[_B_OFFSET] = seed, offset
        self._launch("backward", words)
        dvalues = [grad.to(values[i].dtype) for grad, i in zip(dvalues, self.grad_places)]
        return grads, dsinks, dvalues


class _Launchers(dict):
    def __missing__(self, name: str) -> Any:
        self[name] = getattr(library(), f"flashjit_{name}")
        return self[name]


_launchers = _Launchers()
_plans: dict[Any, _Plan] = {}


def _bind_context(device: torch.device) -> None:
    """Makes the device's context current in this thread, as a first launch by PyTorch does."""
    torch.zeros(1, device=device)


def _takes(tensor: Tensor) -> bool:
    """Whether the kernels read a tensor where it lies."""
    align = 16 // tensor.element_size()
    return (tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
            and all(stride >= 0 and stride % align == 0 for stride in tensor.stride()[:-1]))


def _names_with_grad(options: str) -> set[str]:
    """The captured tensors that a score program declares with "grad"."""
    score = options.partition(":score{")[2].partition("}")[0]
    return {line.partition(":")[0].strip() for line in score.split(";") if line.rstrip().endswith(" grad")}


def _plan(q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem) -> _Plan:
    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.get_device(),
           k.get_device(), v.get_device(), problem)
    if fixed is not _NOTHING or values:
        key = (*key, *[_signature(value) for value in (*fixed, *values)])
    plan = _plans.get(key)
    if plan is None:
        plan = _Plan(q, k, v, fixed, values, problem)
        if len(_plans) >= _KEEP_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return None


# --- checks, where a plan is made ----------------------------------------------------------------------------------


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem) -> None:
    for name, tensor in (("k", k), ("v", v), *zip(Fixed._fields, fixed)):
        if tensor is not None and tensor.device != q.device:
            raise InvalidArgument(f"q is on {q.device} and {name} on {tensor.device}: move them to one device, such as "
                                  f"{name}.to(q.device).")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise InvalidArgument(f"{name} is {_describe(tensor)}: it needs four dimensions, [batch, heads, length, "
                                  "head_dim].")
        if tensor.layout is not torch.strided:
            raise WrongType(f"{name} has the layout {tensor.layout}: convert it with .to_dense().")
        if tensor.dtype not in _SPEC_TYPES:
            raise WrongType(f"{name} is {_describe(tensor)}: flashjit computes in float16, bfloat16 and float32; convert it.")
        if tensor.dtype != q.dtype:
            raise InvalidArgument(f"q is {_describe(q)} and {name} is {_describe(tensor)}: they must have one type; "
                                  f"convert one, such as {name}.to(q.dtype).")
        if tensor.device.type not in ("cuda", "cpu"):
            raise InvalidArgument(f"{name} is on {tensor.device}: move it to a CUDA device.")
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise InvalidArgument(f"{name} has stride {tensor.stride(3)} in its last dimension, which must be 1: call "
                                  f"{name}.contiguous().")
        _check_memory(name, tensor)
    if v.shape[:3] != k.shape[:3] or k.shape[3] != q.shape[3] or k.shape[0] != q.shape[0]:
        raise InvalidArgument(f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: batches must be equal, k "
                              "must have the head_dim of q, and v the heads and the length of k.")
    if k.shape[1] == 0 and q.shape[1] or k.shape[1] and q.shape[1] % k.shape[1]:
        raise InvalidArgument(f"q has {q.shape[1]} heads and k has {k.shape[1]}: the heads of q must be a multiple of "
                              "those of k.")
    _check_fixed(q, fixed, problem)
    for name, value in zip(problem.names, values):
        _check_capture(name, value, q)


def _check_fixed(q: Tensor, fixed: Fixed, problem: Problem) -> None:
    batch = q.shape[0]
    if fixed.cu_seqlens_q is not None:
        batch = fixed.cu_seqlens_q.numel() - 1
        if q.shape[0] != 1:
            raise InvalidArgument(f"q is {list(q.shape)}: with cu_seqlens its batch is 1, and the sequences lie one behind "
                                  "the other, [1, heads, all rows, head_dim].")
        if fixed.cu_seqlens_kv.shape != fixed.cu_seqlens_q.shape:
            raise InvalidArgument(f"cu_seqlens_q has {fixed.cu_seqlens_q.numel()} numbers and cu_seqlens_kv "
                                  f"{fixed.cu_seqlens_kv.numel()}: both need one more than there are sequences.")
    wanted = {"kv_lengths": (torch.int32, (batch,)), "cu_seqlens_q": (torch.int32, (batch + 1,)),
              "cu_seqlens_kv": (torch.int32, (batch + 1,)), "sinks": (torch.float32, (q.shape[1],))}
    for name, (dtype, shape) in wanted.items():
        tensor = getattr(fixed, name)
        if tensor is None:
            continue
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise InvalidArgument(f"{name} is {_describe(tensor)}: it must be contiguous "
                                  f"{str(dtype).removeprefix('torch.')} {list(shape)}.")
        _check_memory(name, tensor)


def _check_capture(name: str, value: Any, q: Tensor) -> None:
    if is_scalar(value):
        return
    if not isinstance(value, Tensor):
        raise WrongType(f"captures[{name!r}] is a {type(value).__name__}: give a tensor or a number.")
    if value.dtype not in _ELEMENTS:
        raise WrongType(f"captures[{name!r}] is {_describe(value)}: programs read {', '.join(map(str, _ELEMENTS))}; "
                        "convert it.")
    if value.device != q.device:
        raise InvalidArgument(f"q is on {q.device} and the captured tensor {name} on {value.device}: move it there.")
    if value.dim() > 4:
        raise InvalidArgument(f"captures[{name!r}] has {value.dim()} dimensions: at most 4 are possible.")
    if value.numel() == 0:
        raise InvalidArgument(f"captures[{name!r}] is {_describe(value)}: it has no element to read; give at least one.")
    _check_memory(f"the captured tensor {name}", value)


def _check_memory(name: str, tensor: Tensor) -> None:
    if tensor.numel() and tensor.data_ptr() == 0:
        raise InvalidArgument(f"{name} has no memory any more (its storage was freed): give a tensor that is alive.")


# --- attention -----------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: Union[bool, str] = False, scale: Union[float, None] = None,
              dropout_p: float = 0.0, score_mod: Any = None, mask_mod: Any = None,
              captures: Union[Mapping[str, Any], None] = None, block_mask: Any = None,
              cu_seqlens_q: Union[Tensor, None] = None, cu_seqlens_kv: Union[Tensor, None] = None,
              max_seqlen_q: Union[int, None] = None, max_seqlen_kv: Union[int, None] = None,
              sinks: Union[Tensor, None] = None, kv_lengths: Union[Tensor, None] = None,
              deterministic: Union[bool, None] = None, return_lse: bool = False) -> Any:
    """softmax(score_mod(scale * Q K^T), where mask_mod) V, with gradients to q, k, v, sinks and captured tensors.

    q: [batch, heads_q, seqlen_q, head_dim]; k: [batch, heads_kv, seqlen_kv, head_dim]; v: [batch, heads_kv, seqlen_kv,
        head_dim_v]; float16, bfloat16 or float32. heads_q is a multiple of heads_kv. Any strides work without a copy
        where the last is 1 and the others are multiples of 16 bytes.
    causal: True masks later keys, with the last query seeing the last key; "top_left": the first query sees the first.
    scale: default 1 / sqrt(head_dim).
    dropout_p: probability to drop a pair; seeded by PyTorch's generator.
    score_mod, mask_mod: functions as FlexAttention has them, score_mod(score, b, h, q_idx, kv_idx) and mask_mod(b, h,
        q_idx, kv_idx) -> whether the pair attends; or text, such as "score + slopes[h] * to_float(kv - q)"; or what
        flashjit.trace() made. Captured tensors that require gradients in score_mod get them.
    captures: the values of the names in texts: tensors of 1 to 4 dimensions, and numbers.
    block_mask: BlockMap, or FlexAttention's BlockMask.
    cu_seqlens_q, cu_seqlens_kv: int32 [sequences + 1]: q is [1, heads_q, all rows, head_dim], and sequence i has the rows
        cu_seqlens_q[i] to cu_seqlens_q[i + 1]; so K and V. With max_seqlen_q and max_seqlen_kv, at least the longest.
    sinks: [heads_q]: one more logit a head, which takes part in the softmax and has no value.
    kv_lengths: int32 [batch]: keys from there on are padding.
    deterministic: the same gradients, bit by bit, on every run; None: as torch.use_deterministic_algorithms() says.
    return_lse: also return the log of the softmax's row sums, float32 [batch, heads_q, seqlen_q], without gradient.

    Returns O, [batch, heads_q, seqlen_q, head_dim_v]; rows that attend to nothing are 0. Raises flashjit.Error.
    """
    if torch.is_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    compiling = torch.compiler.is_compiling()
    if not compiling and not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        for name, value in (("q", q), ("k", k), ("v", v)):
            if not isinstance(value, Tensor):
                raise WrongType(f"{name} is a {type(value).__name__}: give a torch.Tensor; flashjit.forward() takes other "
                                "arrays.")
    program, fixed, values = EMPTY, _NOTHING, ()
    block = None
    if block_mask is not None:
        block_map, mask_mod = _block_map(block_mask, mask_mod)
        block = block_map.block
    if score_mod is not None or mask_mod is not None or captures:
        program = (trace_unlocked if compiling and not isinstance(score_mod if mask_mod is None else mask_mod, Program)
                   else program_of)(score_mod, mask_mod, captures)
        values = (*program.tensors, *program.scalars)
    varlen = cu_seqlens_q is not None or cu_seqlens_kv is not None
    if varlen or block is not None or sinks is not None or kv_lengths is not None:
        if sinks is not None and sinks.dtype != torch.float32:
            sinks = sinks.float()
        fixed = Fixed(None if block is None else block_map.blocks, kv_lengths, cu_seqlens_q, cu_seqlens_kv, sinks)
    if varlen:
        _check_varlen(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    elif max_seqlen_q is not None or max_seqlen_kv is not None:
        raise InvalidArgument("max_seqlen_q and max_seqlen_kv belong to cu_seqlens_q and cu_seqlens_kv: give those too, or "
                              "none of them.")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    wants_grad = torch.is_grad_enabled()
    key = (program.form, causal, _kinds(program, wants_grad) if values else (), dropout_p > 0, block, kv_lengths is None,
           varlen, sinks is None, deterministic)
    options = _options(key) if compiling else _cached_options(key)
    if not -1 < dropout_p < 1:
        raise InvalidArgument(f"dropout_p is {dropout_p}: it must be at least 0 and less than 1.")
    problem = Problem(options, scale, dropout_p, max_seqlen_q or 0, max_seqlen_kv or 0,
                      program.form.tensors + program.form.scalars)
    if deterministic and wants_grad and values:
        _check_deterministic(problem)
    if compiling or not _is_simple(q, k, v):
        out, lse = _through_operator(q, k, v, fixed, values, problem)
        return (out, lse.detach()) if return_lse else out
    seed, offset = _draw(q) if dropout_p else (0, 0)
    plan = _plan(q, k, v, fixed, values, problem)
    if wants_grad and (q.requires_grad or k.requires_grad or v.requires_grad
                       or (sinks is not None and sinks.requires_grad) or _any_grad(values)):
        out, lse = _Attention.apply(plan, seed, offset, len(values), q, k, v, *fixed, *values)
    else:
        out, lse = plan.forward(q, k, v, fixed, values, seed, offset, return_lse)
    return (out, lse) if return_lse else out


def _is_simple(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody but autograd wants to see the call: no subclass, no mode, no transform."""
    return (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN
            and not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()
            and torch._C._functorch.peek_interpreter_stack() is None)


def _any_grad(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast attention runs in the lower precision, as PyTorch's own does."""
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_cuda and t.dtype in _SPEC_TYPES else t
                 for t in (q, k, v))  # type: ignore[return-value]


def _block_map(block_mask: Any, mask_mod: Any) -> tuple[BlockMap, Any]:
    if isinstance(block_mask, BlockMap):
        return block_mask, mask_mod
    if not hasattr(block_mask, "kv_num_blocks"):
        raise WrongType(f"block_mask is {_describe(block_mask)}: give a flashjit.torch.BlockMap, or FlexAttention's "
                        "BlockMask.")
    if mask_mod is None and getattr(block_mask.mask_mod, "__name__", "") != "noop_mask":
        mask_mod = block_mask.mask_mod
    made = getattr(block_mask, "_flashjit_map", None)
    if made is None:
        made = block_mask._flashjit_map = BlockMap.from_flex(block_mask)
    return made, mask_mod


def _check_varlen(cu_seqlens_q: Any, cu_seqlens_kv: Any, max_seqlen_q: Any, max_seqlen_kv: Any) -> None:
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if not isinstance(value, Tensor):
            raise WrongType(f"{name} is {_describe(value)}: give cu_seqlens_q and cu_seqlens_kv as int32 tensors.")
    if max_seqlen_q is None or max_seqlen_kv is None:
        raise InvalidArgument("cu_seqlens come without max_seqlen_q or max_seqlen_kv: give both as Python ints; to find "
                              "them from cu_seqlens would wait for the GPU.")


def _kinds(program: Program, wants_grad: bool) -> tuple[Any, ...]:
    """(type, rank, whether a gradient is wanted) of each captured tensor, then whether each scalar is a float."""
    kinds = []
    for name, tensor in zip(program.form.tensors, program.tensors):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _ELEMENTS:
            raise WrongType(f"captures[{name!r}] is {_describe(tensor)}: give a number, or a tensor of "
                            f"{', '.join(str(t).removeprefix('torch.') for t in _ELEMENTS)}.")
        grad = wants_grad and tensor.requires_grad
        if grad and name not in program.form.in_score:
            raise InvalidArgument(f"the captured tensor {name} requires a gradient, but only the mask reads it, and a mask "
                                  "has none: give its detach().")
        kinds.append((_ELEMENTS[tensor.dtype], tensor.dim(), grad))
    return (*kinds, *map(is_real, program.scalars))


def _options(key: tuple[Any, ...]) -> str:
    """The options of a spec, from what attention() was asked for."""
    form, causal, kinds, dropout, block, no_kv_lengths, fixed_length, no_sinks, deterministic = key
    named = {False: "", True: "causal", "bottom_right": "causal", "top_left": "causal_top_left"}
    if causal not in named:
        raise InvalidArgument(f"causal is {causal!r}: give True, False, \"bottom_right\" or \"top_left\".")
    count = len(form.tensors)
    for name, kind in zip(form.tensors, kinds):
        if kind[2] and name in form.known and not any(
                line.partition(":")[0].strip() == name and line.endswith(" grad") for line in form.declared):
            raise InvalidArgument(f"the captured tensor {name} requires a gradient, but the program declares it without: "
                                  f"end its declaration with \"grad\", or give its detach().")
    text = form.options(named[causal], kinds[:count], kinds[count:])
    if dropout:
        text += ":dropout"
    if not no_kv_lengths:
        text += ":kvlen"
    if block is not None:
        text += f":map{block[0]}x{block[1]}"
    if fixed_length:
        text += ":varlen"
    if not no_sinks:
        text += ":sinks"
    if deterministic:
        text += ":det"
    return text


_known_options: dict[Any, str] = {}


def _cached_options(key: tuple[Any, ...]) -> str:
    text = _known_options.get(key)
    if text is None:
        if len(_known_options) >= _KEEP_PLANS:
            _known_options.clear()
        text = _known_options[key] = _options(key)
    return text


def _check_deterministic(problem: Problem) -> None:
    """Gradients of captured tensors are summed by atomic additions, whose order changes."""
    if not _names_with_grad(problem.options):
        return
    text = ("gradients of captured tensors are summed in changing order, so they are not deterministic: detach() the "
            "captured tensors, or switch torch.use_deterministic_algorithms() off")
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise Unsupported(text + ".")
    import warnings
    warnings.warn(text, stacklevel=3)


def _draw(q: Tensor) -> tuple[int, int]:
    """Seed and offset of a dropout mask, from PyTorch's generator of the device; both are known on the host."""
    if not q.is_cuda:
        return tuple(torch.randint(0, 2**62, (2,)).tolist())  # type: ignore[return-value]
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported("dropout in a CUDA graph capture would use the same mask at every replay: capture with "
                          "dropout_p=0.")
    generator = torch.cuda.default_generators[q.get_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # offsets are multiples of 4 in PyTorch; ours need to differ only
    return generator.initial_seed(), offset


class _Attention(torch.autograd.Function):
    """The eager path: no dispatcher between the call and the launch."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, seed: int, offset: int, count: int, q: Tensor, k: Tensor, v: Tensor,
                *rest: Any) -> Any:
        five = rest[:len(_NOTHING)]
        fixed = Fixed(*five) if any(x is not None for x in five) else _NOTHING
        values = rest[len(_NOTHING):]
        out, lse = plan.forward(q, k, v, fixed, values, seed, offset, True)
        ctx.save_for_backward(q, k, v, out, lse, *[x if isinstance(x, Tensor) else None for x in rest])
        ctx.plan, ctx.seed, ctx.offset = plan, seed, offset
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in values]
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        if dout is None:
            return (None,) * (7 + len(rest))
        five = rest[:len(_NOTHING)]
        fixed = Fixed(*five) if any(x is not None for x in five) else _NOTHING
        values = [n if t is None else t for n, t in zip(ctx.numbers, rest[len(_NOTHING):])]
        grads, dsinks, dvalues = ctx.plan.backward(dout, q, k, v, out, lse, fixed, values, ctx.seed, ctx.offset)
        of_values: list[Any] = [None] * len(values)
        for i, grad in zip(ctx.plan.grad_places, dvalues):
            of_values[i] = grad
        return (None, None, None, None, *grads, None, None, None, None, dsinks, *of_values)


# --- custom operators: what torch.compile, export and tensor subclasses see -----------------------------------------

_FIXED_SCHEMA = "Tensor? block_map, Tensor? kv_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? sinks, "
_PROBLEM_SCHEMA = ("Tensor? rng, Tensor[] captures, float[] numbers, str[] names, str options, float? scale, "
                   "float dropout_p, SymInt max_seqlen_q, SymInt max_seqlen_kv")
torch.library.define("flashjit::attention_forward", f"(Tensor q, Tensor k, Tensor v, {_FIXED_SCHEMA}{_PROBLEM_SCHEMA})"
                     " -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.define("flashjit::attention_backward",
                     "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
                     f"{_FIXED_SCHEMA}{_PROBLEM_SCHEMA}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _through_operator(q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...],
                      problem: Problem) -> tuple[Tensor, Tensor]:
    rng = None
    if problem.dropout_p:
        rng = torch.randint(0, 2**62, (2,), dtype=torch.int64)  # on the CPU, where the launch reads it
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers = [float(value) for value in values if not isinstance(value, Tensor)]
    return torch.ops.flashjit.attention_forward(q, k, v, *fixed, rng, tensors, numbers, list(problem.names),
                                                problem.options, problem.scale, float(problem.dropout_p),
                                                problem.max_seqlen_q, problem.max_seqlen_kv)


def _unpack(q: Tensor, k: Tensor, v: Tensor, arguments: Sequence[Any]) -> tuple[_Plan, Fixed, Any, int, int]:
    """The plan of an operator's arguments, and what its launches need beside Q, K, V."""
    five, (rng, captures, numbers, names, options, scale, dropout_p, max_q, max_kv) = arguments[:5], arguments[5:]
    fixed = Fixed(*five) if any(x is not None for x in five) else _NOTHING
    values = (*captures, *numbers)
    seed, offset = rng.tolist() if rng is not None else (0, 0)
    plan = _plan(q, k, v, fixed, values, Problem(options, scale, dropout_p, max_q, max_kv, tuple(names)))
    return plan, fixed, values, seed, offset


@torch.library.impl("flashjit::attention_forward", ("cuda", "cpu"))
def _operator_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    plan, fixed, values, seed, offset = _unpack(q, k, v, arguments)
    return plan.forward(q, k, v, fixed, values, seed, offset, True)


@torch.library.impl("flashjit::attention_backward", ("cuda", "cpu"))
def _operator_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                       *arguments: Any) -> list[Tensor]:
    plan, fixed, values, seed, offset = _unpack(q, k, v, arguments)
    if not _takes(lse) or not lse.is_contiguous():
        lse = lse.contiguous()
    if out.stride() != plan.out_stride:
        out = torch.empty_strided(plan.out_size, plan.out_stride, dtype=out.dtype, device=out.device).copy_(out)
    grads, dsinks, dvalues = plan.backward(dout, q, k, v, out, lse, fixed, values, seed, offset)
    return [*grads, *([] if dsinks is None else [dsinks]), *dvalues]


@torch.library.register_fake("flashjit::attention_forward")
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    size = (*q.shape[:3], v.shape[3])
    out = torch.empty_strided(size, _dense_strides(size, q.stride()), dtype=q.dtype, device=q.device)
    cu_seqlens_q, max_seqlen_q = arguments[2], arguments[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows = q.shape[2] if cu_seqlens_q is None else max_seqlen_q
    return out, torch.empty((batch, q.shape[1], rows), dtype=torch.float32, device=q.device)


@torch.library.register_fake("flashjit::attention_backward")
def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                   *arguments: Any) -> list[Tensor]:
    grads = [torch.empty_strided(t.shape, _dense_strides(t.shape, t.stride()), dtype=t.dtype, device=t.device)
             for t in (q, k, v)]
    sinks, captures, names, options = arguments[4], arguments[6], arguments[8], arguments[9]
    if sinks is not None:
        grads.append(torch.empty(sinks.shape, dtype=torch.float32, device=q.device))
    with_grad = _names_with_grad(options)
    grads += [torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in zip(names, captures) if name in with_grad]
    return grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    tensors = [*arguments[:5], arguments[5]]
    ctx.save_for_backward(q, k, v, *output, *tensors, *arguments[6])
    ctx.rest = arguments[7:]
    ctx.set_materialize_grads(False)


def _operator_gradient(ctx: Any, dout: Any, _: Any) -> Any:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    fixed, rng, captures = tensors[:5], tensors[5], list(tensors[6:])
    numbers, names, options, *_ = ctx.rest
    rest = ([None] * len(numbers), [None] * len(names), *[None] * (len(ctx.rest) - 2))
    if dout is None:
        return (*[None] * 9, [None] * len(captures), *rest)
    dq, dk, dv, *others = torch.ops.flashjit.attention_backward(dout, q, k, v, out, lse, *fixed, rng, captures, *ctx.rest)
    dsinks = others.pop(0) if fixed[4] is not None else None
    with_grad = _names_with_grad(options)
    dcaptures = [others.pop(0) if name in with_grad else None for name, _ in zip(names, captures)]
    return dq, dk, dv, None, None, None, None, dsinks, None, dcaptures, *rest


torch.library.register_autograd("flashjit::attention_forward", _operator_gradient, setup_context=_setup_context)


def _refuse_second(ctx: Any, *_: Any) -> Any:
    raise Unsupported("flashjit has no second derivative: compute with torch.nn.functional.scaled_dot_product_attention "
                      "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where one is needed.")


torch.library.register_autograd("flashjit::attention_backward", _refuse_second,
                                setup_context=lambda ctx, inputs, output: None)


# --- PyTorch's own signature -----------------------------------------------------------------------------------------


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Union[Tensor, None] = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: Union[float, None] = None,
                                 enable_gqa: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with flashjit's kernels: the same arguments, the same meaning.

    query: [..., heads_q, seqlen_q, head_dim]; key: [..., heads_kv, seqlen_kv, head_dim]; value: [..., heads_kv,
        seqlen_kv, head_dim_v]; fewer dimensions work too, and dimensions before the last two broadcast.
    attn_mask: boolean (True attends) or added to the scores, broadcastable to [..., heads_q, seqlen_q, seqlen_kv].
    is_causal: the mask is aligned at the top left, as PyTorch's.

    What flashjit cannot read where it lies is copied. Rows that attend to nothing are 0.
    """
    if is_causal and attn_mask is not None:
        raise InvalidArgument("attn_mask and is_causal are both given: as in PyTorch, give one of them.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            raise WrongType(f"{name} is {_describe(tensor)}: give a tensor [..., length, head_dim].")
    leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four_dimensions(tensor, leading) for tensor in (query, key, value))
    if not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        heads = max(q.shape[1], k.shape[1], v.shape[1])
        if any(t.shape[1] not in (1, heads) for t in (q, k, v)):
            raise InvalidArgument(f"query has {q.shape[1]} heads, key {k.shape[1]} and value {v.shape[1]}: set "
                                  "enable_gqa=True for grouped heads.")
        q, k, v = (t.expand(-1, heads, -1, -1) for t in (q, k, v))
    score_mod, mask_mod, captures = _mask_programs(attn_mask, leading, q, k)
    dim, dim_v = q.shape[3], v.shape[3]
    if scale is None:
        scale = 1 / math.sqrt(dim) if dim else 1.0
    q, k, v = (_readable(tensor) for tensor in (q, k, v))
    causal: Union[bool, str] = is_causal
    if is_causal and q.shape[2] != k.shape[2]:
        causal = "top_left"
    out = attention(q, k, v, causal=causal, scale=scale, dropout_p=dropout_p, score_mod=score_mod, mask_mod=mask_mod,
                    captures=captures)
    if out.shape[3] != dim_v:
        out = out[..., :dim_v]
    shape = (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], dim_v) if not enable_gqa else (
        *leading, *query.shape[-3:-1], dim_v)
    return out if out.shape == shape else out.reshape(shape)


def _four_dimensions(tensor: Tensor, leading: torch.Size) -> Tensor:
    """[batch, heads, length, dim] of [..., heads, length, dim]."""
    if tensor.dim() == 4 and tensor.shape[:1] == leading:
        return tensor
    if tensor.dim() == 2:
        tensor = tensor[None]
    return tensor.expand(*leading, *tensor.shape[-3:]).reshape(math.prod(leading), *tensor.shape[-3:])


def _readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that the kernels can read: head dimensions padded to multiples of 8, strides aligned."""
    if tensor.shape[3] % 8:
        return F.pad(tensor, (0, 8 - tensor.shape[3] % 8))
    align = 16 // tensor.element_size()
    strides = tensor.stride()
    if strides[3] != 1 or strides[0] % align or strides[1] % align or strides[2] % align:
        return tensor.contiguous()
    return tensor


def _mask_programs(mask: Union[Tensor, None], leading: torch.Size, q: Tensor, k: Tensor) -> tuple[Any, Any, Any]:
    """A dense mask as a program that reads it, along the dimensions in which it differs."""
    if mask is None:
        return None, None, None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise WrongType(f"attn_mask is {_describe(mask)}: give booleans, or floating point numbers to add to the scores.")
    full = (*leading, q.shape[1], q.shape[2], k.shape[2])
    try:
        torch.broadcast_shapes(mask.shape, full)
    except RuntimeError:
        raise InvalidArgument(f"attn_mask is {list(mask.shape)}: it must broadcast to {list(full)}.") from None
    if len(leading) > 1:
        if mask.dim() > 3:
            mask = mask.expand(*leading, *mask.shape[-3:]).reshape(math.prod(leading), *mask.shape[-3:])
    mask = mask[(None,) * (4 - mask.dim())]
    indices = [name for name, size, stride in zip(("b", "h", "q", "kv"), mask.shape, mask.stride())
               if size > 1 and stride != 0]
    places = tuple(slice(None) if name in indices else 0 for name in ("b", "h", "q", "kv"))
    mask = mask[places] if indices else mask[:, 0, 0, 0][:1]
    read = f"attn_mask[{', '.join(indices) or '0'}]"
    if mask.dtype == torch.bool:
        return None, read, {"attn_mask": mask}
    if mask.dtype not in _ELEMENTS:
        mask = mask.float()
    return f"score + {read}", None, {"attn_mask": mask}


def prepare(q: Tensor, k: Tensor, v: Tensor, *, backward: bool = False, config: Union[str, None] = None,
            causal: Union[bool, str] = False, options: str = "") -> None:
    """Compiles and loads the kernels of attention(q, k, v, causal=causal) now, e.g. before a CUDA graph capture.

    backward: those of the backward pass too. options: more of the spec, such as ":dropout".
    config: tiles to use for this problem from now on, such as "sm80:br128:bc64:w4:s2".
    """
    named = {False: "", True: ":causal", "bottom_right": ":causal", "top_left": ":causal_top_left"}[causal]
    dims = f"{q.shape[3]}" if q.shape[3] == v.shape[3] else f"{q.shape[3]}x{v.shape[3]}"
    spec = f"{_SPEC_TYPES[q.dtype]}:d{dims}{named}{options}"
    shape = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    with torch.cuda.device(q.device):
        _bind_context(q.device)
        for which in (False, True) if backward else (False,):
            runtime().prepare(spec, shape, backward=which, config=config)


def register_with_transformers(name: str = "jit_attention") -> str:
    """Makes flashjit an attention implementation of Hugging Face transformers (4.53 or newer), under a name for
    model.set_attn_implementation(name) and from_pretrained(..., attn_implementation=name). Returns the name.

    name: must not contain "flash", which transformers takes for a package of FlashAttention.
    """
    from ._transformers import register
    return register(name)

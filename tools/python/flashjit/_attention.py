"""attention(): from PyTorch's arguments to a plan, and from there to autograd or to the operators."""
from __future__ import annotations

from typing import Any, Mapping, Sequence, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._operators import through_operator
from ._plans import ELEMENTS, KEEP_PLANS, NOTHING, SPEC_TYPES, Fixed, Plan, Problem, describe, plan_of
from ._tracing import is_real, torch_mode
from .errors import InvalidArgument, Unsupported, WrongType
from .programs import EMPTY, Program, program_of, trace_unlocked

PLAIN = frozenset({Tensor, torch.nn.Parameter})
torch_mode()  # makes its class now: torch.compile, which may be the first to trace a program, cannot


class BlockMap:
    """Which blocks of queries and keys attend to each other; the rest costs nothing.

    blocks: [batch or 1, heads_q or 1, ceil(seqlen_q / bq), ceil(seqlen_kv / bkv)], or the last two only, of bool or
        integers: nonzero attends.
    block: (bq, bkv), or one number for both: multiples of 16 from 16 to 256.
    """

    def __init__(self, blocks: Tensor, block: Union[int, tuple[int, int]] = 128) -> None:
        if not isinstance(blocks, Tensor) or blocks.dim() not in (2, 4) or blocks.is_floating_point():
            raise WrongType(f"blocks is {describe(blocks)}: give booleans or integers [batch or 1, heads or 1, block rows, "
                            "block columns], or [block rows, block columns].")
        blocks = blocks if blocks.dim() == 4 else blocks[None, None]
        self.blocks = (blocks != 0).to(torch.uint8).contiguous()
        self.block = (block, block) if isinstance(block, int) else (int(block[0]), int(block[1]))

    @staticmethod
    def from_flex(block_mask: Any) -> "BlockMap":
        """From a BlockMask of torch.nn.attention.flex_attention; its mask_mod is not part of it."""
        size = block_mask.BLOCK_SIZE
        return BlockMap(block_mask.to_dense(), size if isinstance(size, int) else tuple(size))

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
    if not compiling and not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        for name, value in (("q", q), ("k", k), ("v", v)):
            if not isinstance(value, Tensor):
                raise WrongType(f"{name} is a {type(value).__name__}: give a torch.Tensor; flashjit.forward() takes other "
                                "arrays.")
    program, fixed = EMPTY, NOTHING
    values: tuple[Any, ...] = ()
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
    if compiling or not _is_simple(q, k, v):
        out, lse = through_operator(q, k, v, fixed, values, problem)
        return (out, lse.detach()) if return_lse else out
    seed, offset = _draw(q) if dropout_p else (0, 0)
    plan = plan_of(q, k, v, fixed, values, problem)
    if wants_grad and (q.requires_grad or k.requires_grad or v.requires_grad
                       or (sinks is not None and sinks.requires_grad) or _any_grad(values)):
        if not plan.prepared_both:
            plan.prepare_both()
        call = _Call(plan, fixed, values, seed, offset)
        if fixed is NOTHING and not values:
            out = _record(call, q, k, v)
        else:
            out = _record(call, q, k, v, *fixed, *[x for x in values if isinstance(x, Tensor)])
        lse, call.lse = call.lse, None
    else:
        out, lse = plan.forward(q, k, v, fixed, values, seed, offset, return_lse)
    return (out, lse) if return_lse else out


def _is_simple(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody but autograd wants to see the call: no subclass, no mode, no transform."""
    return (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
            and not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()
            and torch._C._functorch.peek_interpreter_stack() is None)


def _any_grad(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast attention runs in the lower precision, as PyTorch's own does."""
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_cuda and t.dtype in SPEC_TYPES else t
                 for t in (q, k, v))  # type: ignore[return-value]


def _block_map(block_mask: Any, mask_mod: Any) -> tuple[BlockMap, Any]:
    if isinstance(block_mask, BlockMap):
        return block_mask, mask_mod
    if not hasattr(block_mask, "kv_num_blocks"):
        raise WrongType(f"block_mask is {describe(block_mask)}: give a flashjit.torch.BlockMap, or FlexAttention's "
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
            raise WrongType(f"{name} is {describe(value)}: give cu_seqlens_q and cu_seqlens_kv as int32 tensors.")
    if max_seqlen_q is None or max_seqlen_kv is None:
        raise InvalidArgument("cu_seqlens come without max_seqlen_q or max_seqlen_kv: give both as Python ints; to find "
                              "them from cu_seqlens would wait for the GPU.")


def _kinds(program: Program, wants_grad: bool) -> tuple[Any, ...]:
    """(type, rank, whether a gradient is wanted) of each captured tensor, then whether each scalar is a float."""
    kinds = []
    for name, tensor in zip(program.form.tensors, program.tensors):
        if not isinstance(tensor, Tensor) or tensor.dtype not in ELEMENTS:
            raise WrongType(f"captures[{name!r}] is {describe(tensor)}: give a number, or a tensor of "
                            f"{', '.join(str(t).removeprefix('torch.') for t in ELEMENTS)}.")
        grad = wants_grad and tensor.requires_grad
        if grad and name not in program.form.in_score:
            raise InvalidArgument(f"the captured tensor {name} requires a gradient, but only the mask reads it, and a mask "
                                  "has none: give its detach().")
        kinds.append((ELEMENTS[tensor.dtype], tensor.dim(), grad))
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
        if len(_known_options) >= KEEP_PLANS:
            _known_options.clear()
        text = _known_options[key] = _options(key)
    return text


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


class _Call:
    """What one call's backward pass needs beside the tensors that autograd keeps."""

    __slots__ = ("plan", "fixed", "values", "seed", "offset", "lse")

    def __init__(self, plan: Plan, fixed: Fixed, values: tuple[Any, ...], seed: int, offset: int) -> None:
        self.plan, self.fixed, self.seed, self.offset = plan, fixed, seed, offset
        self.values = values  # once recorded, without its tensors
        self.lse: Any = None


class _Attention(torch.autograd.Function):
    """The eager path: no dispatcher between the call and the launch."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        """rest: where the call has more than Q, K, V, the five fixed tensors or None, and the captured tensors."""
        out, lse = call.plan.forward(q, k, v, call.fixed, call.values, call.seed, call.offset, True)
        ctx.save_for_backward(q, k, v, out, lse, *rest)
        ctx.call = call
        call.lse = lse
        if rest:
            call.fixed, call.values = NOTHING, tuple(None if isinstance(x, Tensor) else x for x in call.values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        call = ctx.call
        if not rest:
            grads, _, _ = call.plan.backward(dout, q, k, v, out, lse, NOTHING, (), call.seed, call.offset)
            return (None, *grads)
        five, captures = rest[:len(NOTHING)], iter(rest[len(NOTHING):])
        fixed = Fixed(*five) if any(x is not None for x in five) else NOTHING
        values = [next(captures) if x is None else x for x in call.values]
        grads, dsinks, dvalues = call.plan.backward(dout, q, k, v, out, lse, fixed, values, call.seed, call.offset)
        by_place = dict(zip(call.plan.grad_places, dvalues))
        of_captures = [by_place.get(i) for i, x in enumerate(call.values) if x is None]
        return (None, *grads, None, None, None, None, dsinks, *of_captures)


# Function.apply without its search for functorch's wrappers, which _is_simple() has ruled out.
_record = super(torch.autograd.Function, _Attention).apply

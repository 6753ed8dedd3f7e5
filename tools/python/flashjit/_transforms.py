"""attention() under torch.func: autograd functions over the operators, with rules for what its transforms ask for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._call_types import NOTHING, grads_of_fixed, names_with_grad
from ._tangents import declared_with_grad
from .errors import Unsupported

_OPTIONAL = len(NOTHING) + 1  # of an operator's tensors: the fixed ones and the dropout's seed


class _Call:
    """An operator's arguments that are no tensors, or none that a transform wraps."""

    __slots__ = ("lists", "rest", "options")

    def __init__(self, lists: Sequence[Any], rest: Sequence[Any]) -> None:
        self.lists, self.rest = tuple(lists), tuple(rest)
        self.options: str = rest[2]

    def joins_batches(self, optional: Sequence[Any]) -> bool:
        """Whether another batch dimension can become a part of the first: nothing tells batch entries apart, and no gradient
        is a sum over them."""
        programs = "".join(re.findall(r"(?:score|mask)\{(.*?)\}", self.options))
        return (
            all(x is None for x in optional)
            and not re.search(r"\bb\b", programs)
            and not names_with_grad(self.options)
        )


def through_transforms(q: Tensor, k: Tensor, v: Tensor, arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """attention_forward() of the operator's arguments."""
    optional, (*lists, captures), rest = (
        arguments[:_OPTIONAL],
        arguments[_OPTIONAL : _OPTIONAL + 3],
        arguments[_OPTIONAL + 3 :],
    )
    return _Forward.apply(_Call(lists, rest), q, k, v, *optional, *captures)


def have_tangents(*tensors: Any) -> bool:
    """Whether some tensor is differentiated in forward mode. torch.compile does not show which ones are, and is refused."""
    if torch.compiler.is_compiling():
        raise Unsupported(
            "flashjit has no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad) under "
            "torch.compile: call it outside of what is compiled."
        )
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _over_batch(
    function: Any, own: int, size: int, dims: Sequence[Any], call: _Call, tensors: Sequence[Any]
) -> Any:
    """The rule of vmap. own: how many of the tensors have a batch of the call's own."""
    dims = dims[1:]
    if call.joins_batches(tensors[own : own + _OPTIONAL]) and all(dim is None for dim in dims[own:]):
        joined = [_joined(x, dim, size) for x, dim in zip(tensors[:own], dims)]
        results = [
            x.unflatten(0, (size, x.shape[0] // size)) for x in function.apply(call, *joined, *tensors[own:])
        ]
    else:
        each = [
            function.apply(call, *[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)])
            for i in range(size)
        ]
        results = [torch.stack(parts) for parts in zip(*each)]
    return tuple(results), (0,) * len(results)


def _joined(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def refuse_batched(function: str, *tensors: Any) -> None:
    """Of torch.vmap, where a function has no rule for it."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    if any(isinstance(x, Tensor) and torch._C._functorch.is_batchedtensor(x) for x in tensors):
        raise Unsupported(
            f"{function} does not work under torch.vmap: call it outside, with what vmap maps over as a part of the "
            "batch."
        )


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        return torch.ops.flashjit.attention_forward(
            q, k, v, *rest[:_OPTIONAL], *call.lists, list(rest[_OPTIONAL:]), *call.rest
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:4], *output, *inputs[4:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        if dout is None and dlse is None:
            return (None,) * (len(ctx.saved_tensors) - 1)
        dq, dk, dv, *others = _Backward.apply(ctx.call, dout, dlse, *ctx.saved_tensors)
        optional, captures = ctx.saved_tensors[5 : 5 + _OPTIONAL], ctx.saved_tensors[5 + _OPTIONAL :]
        dsinks = others.pop(0) if optional[4] is not None else None
        with_grad, names = names_with_grad(ctx.call.options), ctx.call.rest[1]
        return (
            None,
            dq,
            dk,
            dv,
            *grads_of_fixed(dsinks),
            None,
            *[others.pop(0) if name in with_grad else None for name, _ in zip(names, captures)],
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Any) -> Any:
        return _over_batch(_Forward, 3, info.batch_size, in_dims, call, tensors)

    @staticmethod
    def jvp(ctx: Any, _: Any, dq: Any, dk: Any, dv: Any, *rest: Any) -> Any:
        q, k, v, *others = ctx.saved_tensors
        dsinks, dcaptures = rest[4], rest[_OPTIONAL:]
        return _Jvp.apply(ctx.call, q, k, v, dq, dk, dv, *others, dsinks, *dcaptures)[2:]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: Any) -> Any:
        own, optional, captures = tensors[:7], tensors[7 : 7 + _OPTIONAL], tensors[7 + _OPTIONAL :]
        return tuple(
            torch.ops.flashjit.attention_backward(*own, *optional, *call.lists, list(captures), *call.rest)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Any) -> Any:
        return _over_batch(_Backward, 7, info.batch_size, in_dims, call, tensors)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        refuse_second()


class _Jvp(torch.autograd.Function):
    """O, LSE and their tangents, from Q, K, V and theirs, the call's other tensors, and the other tangents."""

    @staticmethod
    def forward(call: _Call, *tensors: Any) -> Any:
        q, k, v, dq, dk, dv, *others = tensors
        optional, others = others[:_OPTIONAL], others[_OPTIONAL:]
        names, count = call.rest[1], (len(others) - 1) // 2
        captures, dsinks, dcaptures = others[:count], others[count], others[count + 1 :]
        given = {name: x for name, x in zip(names, dcaptures) if x is not None}
        rest = list(call.rest)
        rest[2] = declared_with_grad(call.options, given)
        return torch.ops.flashjit.attention_jvp(
            q,
            k,
            v,
            dq,
            dk,
            dv,
            dsinks,
            list(given.values()),
            list(given),
            *optional,
            *(None, None),  # the lists belong to another pass
            list(captures),
            *rest,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(
            "flashjit has no gradient of a tangent (reverse over forward mode): detach() what jvp() gave as the tangent, or "
            "compute with torch.nn.functional.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where its gradient is needed."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Any) -> Any:
        return _over_batch(_Jvp, 6, info.batch_size, in_dims, call, tensors)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        refuse_second()


def refuse_second(*_: Any) -> Any:
    raise Unsupported(
        "flashjit has no second derivative: compute with torch.nn.functional.scaled_dot_product_attention "
        "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where one is needed."
    )

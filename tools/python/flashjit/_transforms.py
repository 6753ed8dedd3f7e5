"""attention() under torch.func: autograd functions over the operators, with rules for what its transforms ask for."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._call_types import NOTHING, grads_of_fixed, names_with_grad
from ._tangents import declared_with_grad
from ._tensors import SPEC_TYPES, is_differentiated, under_transform
from ._without_tangent import FORWARD_MODE, SECOND, refuse_without_tangent
from .errors import InvalidArgument, Unsupported

_OPTIONAL = len(NOTHING) + 1  # of an operator's tensors: the fixed ones and the dropout's seed


class _Call:
    """An operator's arguments that are no tensors, or none that a transform wraps."""

    __slots__ = ("lists", "rest", "options")

    def __init__(self, lists: Sequence[Any], rest: Sequence[Any]) -> None:
        self.lists, self.rest = tuple(lists), tuple(rest)
        self.options: str = rest[2]

    def declaring(self, names: Collection[str]) -> _Call:
        """The call of another pass, which has no lists, whose program declares these captured tensors "grad", too."""
        rest = list(self.rest)
        rest[2] = declared_with_grad(self.options, names)
        return _Call((None, None), rest)

    def refuse_without_tangent(self, of_pass: str, q: Tensor, v: Tensor, derivative: str) -> None:
        """of_pass: "jvp:" or "bwd_jvp:"."""
        dtype = self.rest[-2] or SPEC_TYPES[q.dtype]
        refuse_without_tangent(of_pass, f"{dtype}:d{q.shape[3]}x{v.shape[3]}{self.options}", derivative)

    def by_input(
        self, grads: Sequence[Any], optional: Sequence[Any], captures: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Gradients as attention_backward() lists them, in the order of attention_forward()'s tensors."""
        dq, dk, dv, *others = grads
        dsinks = others.pop(0) if optional[4] is not None else None
        with_grad = names_with_grad(self.options)
        dcaptures = [others.pop(0) if name in with_grad else None for name, _ in zip(self.rest[1], captures)]
        return dq, dk, dv, *grads_of_fixed(dsinks), None, *dcaptures

    def with_tangents(self, tangents: Sequence[Any]) -> dict[str, Tensor]:
        """Tangents of captured tensors that have one, by name."""
        return {name: x for name, x in zip(self.rest[1], tangents) if x is not None}

    def joins_batches(self, optional: Sequence[Any]) -> bool:
        """Whether another batch dimension can become a part of the first: nothing tells batch entries apart, and no gradient
        is a sum over them."""
        programs = "".join(re.findall(r"\{(.*?)\}", self.options))
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
    for x in tensors:  # in this frame: torch.compile would take another one, and see no tangents there
        if isinstance(x, Tensor):
            while torch._C._functorch.is_batchedtensor(x):  # PyTorch cannot unpack what vmap wraps
                x = torch._C._functorch.get_unwrapped(x)
            if forward_ad.unpack_dual(x).tangent is not None:
                return True
    return False


def _over_batch(
    function: Any, own: int, size: int, dims: Sequence[Any], call: _Call, tensors: Sequence[Any]
) -> Any:
    """The rule of vmap. own: how many of the tensors have a batch of the call's own."""
    if size == 0:
        raise InvalidArgument(
            "vmap's batch is empty, and its results have no size then: call attention() without vmap."
        )
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


def are_wrapped(*values: Any) -> bool:
    """Whether a transform of torch.func wraps a tensor among these, whose memory cannot be had then."""
    return under_transform() and any(
        [isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x) for x in values]
    )


def refuse_wrapped(function: str, *values: Any) -> None:
    if are_wrapped(*values):
        raise Unsupported(
            f"{function} reads memory, and a transform of torch.func (grad, vmap, jvp, ..) wraps a tensor that it is given: call it "
            "outside, or with tensors that the transform does not see."
        )


def refuse_lost_gradients(function: str, *values: Any) -> None:
    """For functions without gradients that models call outside of no_grad(): what autograd says at backward(), torch.func would
    leave unsaid, and give zeros."""
    if torch.is_grad_enabled() and are_wrapped(*values) and is_differentiated(*values):
        raise Unsupported(
            f"{function} has no gradients, and torch.func asks for them: call it under torch.no_grad(), or call flashjit.attention()."
        )


def refuse_batched(function: str, *tensors: Any) -> None:
    """Refuses torch.vmap where a function has no rule for it."""
    if under_transform() and any(
        isinstance(x, Tensor) and torch._C._functorch.is_batchedtensor(x) for x in tensors
    ):
        raise Unsupported(
            f"{function} does not work under torch.vmap: call it outside, with what vmap maps over as a part of the "
            "batch."
        )


def refuse_vectors(*given: Any) -> None:
    """Refuses gradients and tangents of PyTorch's former vmap, whose tensors have no memory and which asks for no rules."""
    if any(isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in given):
        raise Unsupported(
            "flashjit has no derivatives for a batch of vectors at once, as is_grads_batched=True and vectorize=True ask for: "
            "use torch.func.vmap, jacrev, jacfwd or hessian."
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
        grads = _Backward.apply(ctx.call, dout, dlse, *ctx.saved_tensors)
        optional, captures = ctx.saved_tensors[5 : 5 + _OPTIONAL], ctx.saved_tensors[5 + _OPTIONAL :]
        return None, *ctx.call.by_input(grads, optional, captures)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Any) -> Any:
        return _over_batch(_Forward, 3, info.batch_size, in_dims, call, tensors)

    @staticmethod
    def jvp(ctx: Any, _: Any, dq: Any, dk: Any, dv: Any, *rest: Any) -> Any:
        refuse_vectors(dq, dk, dv, *rest)
        q, k, v, *others = ctx.saved_tensors
        ctx.call.refuse_without_tangent("jvp:", q, v, FORWARD_MODE)
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
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        return None, *gradient_of_backward(ctx.call, tangents, ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Any) -> Any:
        return _over_batch(_Backward, 7, info.batch_size, in_dims, call, tensors)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        dout, dlse, q, k, v, _out, lse, *others = ctx.saved_tensors
        ctx.call.refuse_without_tangent("bwd_jvp:", q, v, SECOND)
        dout_tangent, dlse_tangent, dq, dk, dv, _of_out, _of_lse, *rest = tangents
        return _BackwardJvp.apply(
            ctx.call,
            *(dout, dlse, dout_tangent, dlse_tangent),
            *(q, k, v, lse, dq, dk, dv),
            *others,
            rest[4],
            *rest[_OPTIONAL:],
        )


class _Jvp(torch.autograd.Function):
    """O, LSE and their tangents, from Q, K, V and theirs, the call's other tensors, and the other tangents."""

    @staticmethod
    def forward(call: _Call, *tensors: Any) -> Any:
        q, k, v, dq, dk, dv, *others = tensors
        optional, others = others[:_OPTIONAL], others[_OPTIONAL:]
        count = (len(others) - 1) // 2
        captures, dsinks, dcaptures = others[:count], others[count], others[count + 1 :]
        given = call.with_tangents(dcaptures)
        call = call.declaring(given)
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
            *call.lists,
            list(captures),
            *call.rest,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*output[:2], *inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, of_tangent: Any, of_lse_tangent: Any) -> Any:
        """With the tangents' gradients as dO and dLSE: tangents get the gradients of the backward pass, and the tensors its
        tangents, where O's own gradient is the tangent of dO."""
        out, lse, q, k, v, dq, dk, dv, *others = ctx.saved_tensors
        optional, others = others[:_OPTIONAL], others[_OPTIONAL:]
        count = (len(others) - 1) // 2
        captures, dsinks, dcaptures = others[:count], others[count], others[count + 1 :]
        call = ctx.call.declaring(ctx.call.with_tangents(dcaptures))
        of_tensors: tuple[Any, ...] = (None,) * (3 + _OPTIONAL + count)
        of_tangents = of_tensors
        if of_tangent is not None or of_lse_tangent is not None:
            grads = _Backward.apply(call, of_tangent, of_lse_tangent, q, k, v, out, lse, *optional, *captures)
            of_tangents = call.by_input(grads, optional, captures)
        if any(x is not None for x in (dout, dlse, of_tangent, of_lse_tangent)):
            grads = _BackwardJvp.apply(
                call,
                *(of_tangent, of_lse_tangent, dout, dlse),
                *(q, k, v, lse, dq, dk, dv),
                *(*optional, *captures, dsinks, *dcaptures),
            )
            of_tensors = call.by_input(grads, optional, captures)
        given = [None if x is None else of_tangents[i] for i, x in enumerate((dq, dk, dv))]
        of_sinks = None if dsinks is None else of_tangents[3 + 4]
        of_captures = [
            None if x is None else grad for x, grad in zip(dcaptures, of_tangents[3 + _OPTIONAL :])
        ]
        return None, *of_tensors[:3], *given, *of_tensors[3:], of_sinks, *of_captures

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Any) -> Any:
        return _over_batch(_Jvp, 6, info.batch_size, in_dims, call, tensors)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        refuse_second()


class _BackwardJvp(torch.autograd.Function):
    """Tangents of what _Backward gives: from dO and dLSE and their tangents, Q, K, V, LSE, tangents of Q, K and V, the call's
    other tensors, and the other tangents."""

    @staticmethod
    def forward(call: _Call, *tensors: Any) -> Any:
        own, optional, others = tensors[:11], tensors[11 : 11 + _OPTIONAL], tensors[11 + _OPTIONAL :]
        count = (len(others) - 1) // 2
        captures, dsinks, dcaptures = others[:count], others[count], others[count + 1 :]
        given = call.with_tangents(dcaptures)
        declaring = call.declaring(given)
        grads = torch.ops.flashjit.attention_backward_jvp(
            *own,
            dsinks,
            list(given.values()),
            list(given),
            *optional,
            *declaring.lists,
            list(captures),
            *declaring.rest,
        )
        wanted, made = names_with_grad(call.options), names_with_grad(declaring.options)
        of_captures = [name for name, _ in zip(call.rest[1], captures) if name in made]
        first = len(grads) - len(of_captures)
        return *grads[:first], *[x for name, x in zip(of_captures, grads[first:]) if name in wanted]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Any) -> Any:
        return _over_batch(_BackwardJvp, 11, info.batch_size, in_dims, call, tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_third()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        refuse_third()


def gradient_of_backward(call: _Call, tangents: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The gradient of attention_backward(), whose results' gradients act as tangents: O's and LSE's tangents are the gradients of
    dO and dLSE, and the backward pass's tangents are the gradients of Q, K, V and the others. O and LSE have none: their parts
    are in these."""
    refuse_vectors(*tangents)
    dout, dlse, q, k, v, _out, lse, *others = tensors
    optional, captures = others[:_OPTIONAL], others[_OPTIONAL:]
    if all(x is None for x in tangents):
        return (None,) * len(tensors)
    call.refuse_without_tangent("bwd_jvp:", q, v, SECOND)
    dq, dk, dv, *of_optional = call.by_input(tangents, optional, captures)
    given = (*optional, *captures, of_optional[4], *of_optional[_OPTIONAL:])
    of_dout, of_dlse = _Jvp.apply(call, q, k, v, dq, dk, dv, *given)[2:]
    grads = _BackwardJvp.apply(call, dout, dlse, None, None, q, k, v, lse, dq, dk, dv, *given)
    of_q, of_k, of_v, *rest = call.by_input(grads, optional, captures)
    return (
        None if dout is None else of_dout,
        None if dlse is None else of_dlse,
        *(of_q, of_k, of_v, None, None),
        *rest,
    )


def gradient_of_operator(ctx: Any, tangents: Any) -> tuple[Any, ...]:
    """gradient_of_backward() for the operator, whose other arguments are ctx.rest. Row maxima have no derivatives."""
    rest = list(ctx.rest)
    rest[2] = rest[2].replace(":row_max", "")
    return gradient_of_backward(_Call((None, None), rest), tangents, ctx.saved_tensors)


def refuse_third(*_: Any) -> Any:
    raise Unsupported(
        "flashjit has no third derivative, which torch.autograd.functional.hvp asks for, too: a Hessian-vector product is "
        "torch.autograd.functional.vhp, or torch.func.jvp of torch.func.grad. Where a third one is needed, compute with "
        "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


def refuse_second(*_: Any) -> Any:
    raise Unsupported(
        "flashjit has no tangent of a tangent (forward over forward mode): take the tangent of a gradient, as "
        "torch.func.hessian does, or compute with torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )

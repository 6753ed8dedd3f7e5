"""merge(): one result from calls over disjoint parts of the keys."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import _library
from ._fakes import register_fake
from ._launch import is_watched, launch
from ._library import MergeArgs, PartialState, spec_handle
from ._structs import tensor_struct
from ._tensor_checks import check_memory
from ._tensors import (
    ELEMENTS,
    SPEC_TYPES,
    dense_strides,
    describe,
    is_differentiated,
    readable,
    refuse_expanded,
    refuse_negated,
    strides_are_read,
)
from ._transforms import are_wrapped, have_tangents
from .errors import InvalidArgument, Unsupported, WrongType


def merge(
    states: Sequence[tuple[Tensor, Tensor]],
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(O, LSE) over all keys, from what attention(..., return_lse=True) gave over disjoint parts of them. With derivatives of every
    order, in forward mode and torch.func (grad, vmap, jvp, ..) by PyTorch's operators.

    states: 1 to 8 pairs (O, LSE) of the same queries: O [batch, heads, rows, dim], LSE float32 [batch, heads, rows], with
        any strides; packed queries are one batch entry. One with an LSE of -inf gives nothing, whatever its O.
    dtype: of the merged O; None: the type of `out`, or the states' own. Where it differs from the states' type, one of the two is
        float32.
    out, lse: tensors that O and LSE are written to, and that are returned, of their sizes and types, in memory of their own. lse may
        have any strides; of `out` the last stride is 1, and the others are multiples of 16 bytes. Not with gradients, nor in compiled
        code.

    Returns (O, LSE), like a state. Without any key O is 0 and LSE -inf. Raises flashjit.Error.
    """
    pairs = _check_states(states)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in SPEC_TYPES):
        raise WrongType(
            f"dtype is {dtype}: give torch.float16, torch.bfloat16 or torch.float32, or None for that of the states."
        )
    outs, lses = [x for x, _ in pairs], [y for _, y in pairs]
    _check_memory_of(out, lse, outs[0], dtype)
    dim = outs[0].shape[3]
    if dim % 8:
        if out is not None:
            raise Unsupported(f"out has {dim} columns, which are no multiple of 8: leave it out.")
        padded = [(F.pad(x, (0, -dim % 8)), y) for x, y in pairs]
        wide, lse = merge(padded, dtype=dtype, lse=lse)
        return wide[..., :dim], lse
    if (
        torch.compiler.is_compiling()
        or is_watched()
        or torch.is_grad_enabled()
        and is_differentiated(*outs, *lses)
        or any(x.is_neg() for x in (*outs, *lses))
        or _is_transformed(outs, lses)
    ):
        if out is not None or lse is not None:
            name = "out" if out is not None else "lse"
            raise Unsupported(
                f"{name} is given with gradients, or in compiled code or under modes and transforms of torch: leave it out, or "
                "call merge() under torch.no_grad()."
            )
        if _is_transformed(outs, lses):
            return _merge_by_torch(outs, lses, dtype)
        return torch.ops.flashjit.merge(outs, lses, dtype)  # type: ignore[no-any-return]
    return _merge_into(outs, lses, dtype, out, lse)


def _is_transformed(outs: list[Tensor], lses: list[Tensor]) -> bool:
    """Whether torch.func or forward mode asks for what the operator has no rules for."""
    return are_wrapped(*outs, *lses) or forward_ad._current_level >= 0 and have_tangents(*outs, *lses)


def _merge_by_torch(
    outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """By PyTorch's operators, which have derivatives of every order and mode. What has no keys is left out before it is read."""
    empty = [lse.isneginf() for lse in lses]
    given = [lse.masked_fill(no_keys, 0) for lse, no_keys in zip(lses, empty)]
    most = torch.stack([lse.detach() for lse in lses]).amax(0)
    most = most.masked_fill(most.isneginf(), 0)
    weights = [(lse - most).exp().masked_fill(no_keys, 0) for lse, no_keys in zip(given, empty)]
    total = torch.stack(weights).sum(0)
    none = total == 0
    total = total.masked_fill(none, 1)
    parts = [
        (weight / total)[..., None] * out.float().masked_fill(no_keys[..., None], 0)
        for weight, out, no_keys in zip(weights, outs, empty)
    ]
    lse = (most + total.log()).masked_fill(none, -math.inf)
    return torch.stack(parts).sum(0).to(dtype or outs[0].dtype), lse


torch.library.define(
    "flashjit::merge",
    "(Tensor[] outs, Tensor[] lses, ScalarType? dtype) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _new_state(like: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_strided(
            like.shape,
            dense_strides(like.shape, like.stride()),
            dtype=dtype or like.dtype,
            device=like.device,
        ),
        torch.empty(like.shape[:3], dtype=torch.float32, device=like.device),
    )


@register_fake("flashjit::merge")
def _fake_merge(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return _new_state(outs[0], dtype)


def _merge(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return _merge_into(outs, lses, dtype, None, None)


def _merge_into(
    outs: list[Tensor],
    lses: list[Tensor],
    dtype: torch.dtype | None,
    given_out: Tensor | None,
    given_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    for i, pair in enumerate(zip(outs, lses)):
        for x in pair:
            check_memory(f"states[{i}]", x)
    outs, lses = (
        [readable(out, "a state's O") for out in outs],
        [_with_strides(lse.resolve_neg()) for lse in lses],
    )
    if given_out is None or given_lse is None:
        out, lse = _new_state(outs[0], dtype if given_out is None else given_out.dtype)
    out, lse = out if given_out is None else given_out, lse if given_lse is None else given_lse
    of_states, of_out = outs[0].dtype, out.dtype
    states = (PartialState * len(outs))(
        *[PartialState(_struct_of(x), y.data_ptr(), y.stride()) for x, y in zip(outs, lses)]
    )
    args = MergeArgs(
        struct_size=ctypes.sizeof(MergeArgs),
        states=ctypes.addressof(states),
        state_count=len(outs),
        out=_struct_of(out),
        lse=lse.data_ptr(),
        lse_stride=lse.stride(),
        states_type=_library.ELEMENT_TYPES[ELEMENTS[of_states]],
        out_type=_library.ELEMENT_TYPES[ELEMENTS[of_out]],
    )
    spec = spec_handle(f"{SPEC_TYPES[of_out if of_states == torch.float32 else of_states]}:d{out.shape[3]}")
    launch("merge", spec, _library.words_of(args), out.get_device())
    return out, lse


def _with_strides(lse: Tensor) -> Tensor:
    """The library reads strides that are all 0 as contiguous."""
    return lse if any(lse.stride()) else lse.contiguous()


torch.library.impl("flashjit::merge", ("cuda", "cpu"))(_merge)


def _struct_of(tensor: Tensor) -> _library.Tensor:
    struct = tensor_struct(tensor.shape, tensor.stride())
    struct.data = tensor.data_ptr()
    return struct


def _save_states(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[0], *inputs[1], output[1])
    ctx.set_materialize_grads(False)


def _merge_gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, Any, None]:
    """With weights w_i = exp(LSE_i - LSE): dO_i = w_i dO, dLSE_i = w_i (dO O_i - the sum of w_j dO O_j + dLSE)."""
    *tensors, lse = ctx.saved_tensors
    outs, lses = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    weights = [torch.where(x.isneginf(), 0.0, (x - lse).exp()) for x in lses]
    wide = None if dout is None else dout.float()
    if wide is None:
        products = [torch.zeros_like(lse)] * len(outs)
    else:
        products = [torch.where(w > 0, (wide * x.float()).sum(-1), 0.0) for w, x in zip(weights, outs)]
    shared = sum(w * product for w, product in zip(weights, products))
    shared = shared if dlse is None else shared - dlse
    douts = [None if wide is None else (w[..., None] * wide).to(x.dtype) for w, x in zip(weights, outs)]
    return douts, [w * (product - shared) for w, product in zip(weights, products)], None


torch.library.register_autograd("flashjit::merge", _merge_gradient, setup_context=_save_states)


def _check_memory_of(
    out: Tensor | None, lse: Tensor | None, first: Tensor, dtype: torch.dtype | None
) -> None:
    """That the caller's memory is as the results are."""
    for name, given, size in (("out", out, first.shape), ("lse", lse, first.shape[:3])):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise WrongType(f"{name} is a {type(given).__name__}: give a torch.Tensor.")
        allowed = {torch.float32} if name == "lse" else {dtype} if dtype else {first.dtype, *SPEC_TYPES}
        if given.shape != size or given.dtype not in allowed or given.device != first.device:
            names = " or ".join(sorted(str(x).removeprefix("torch.") for x in allowed))
            raise InvalidArgument(
                f"{name} is {describe(given)}: it must be {names} {list(size)} on {first.device}."
            )
        check_memory(name, given)
        refuse_negated(name, given)
        refuse_expanded(name, given)
    if out is not None and (not strides_are_read(out) or out.data_ptr() % 16):
        raise InvalidArgument(
            f"out has strides {out.stride()}: its last must be 1, the others multiples of 16 bytes, and its memory must begin "
            "at one."
        )


def _check_states(states: Any) -> list[tuple[Tensor, Tensor]]:
    if not isinstance(states, Iterable) or isinstance(states, Tensor):
        raise WrongType(f"states is a {type(states).__name__}: give a list of pairs (O, LSE).")
    pairs = list(states)
    if not 1 <= len(pairs) <= 8:
        raise InvalidArgument(
            f"states has {len(pairs)} pairs: give 1 to 8, or merge the result with the rest."
        )
    for i, pair in enumerate(pairs):
        if (
            not isinstance(pair, (tuple, list))
            or len(pair) != 2
            or not all(isinstance(x, Tensor) for x in pair)
        ):
            raise WrongType(
                f"states[{i}] is a {type(pair).__name__}: give pairs (O, LSE) of tensors, as attention(..., "
                "return_lse=True) returns."
            )
        out, lse = pair
        first = pairs[0][0]
        if (
            out.dim() != 4
            or out.dtype not in SPEC_TYPES
            or out.shape != first.shape
            or out.dtype != first.dtype
        ):
            raise InvalidArgument(
                f"states[{i}][0] is {describe(out)}: each O must be float16, bfloat16 or float32 [batch, heads, "
                f"rows, dim], all like states[0][0], which is {describe(first)}."
            )
        if lse.dtype != torch.float32 or lse.shape != out.shape[:3]:
            raise InvalidArgument(
                f"states[{i}][1] is {describe(lse)}: each LSE must be float32 {list(out.shape[:3])}."
            )
        for x in pair:
            if x.device != first.device:
                raise InvalidArgument(
                    f"states[0][0] is on {first.device} and states[{i}] on {x.device}: move them to one device."
                )
    return pairs

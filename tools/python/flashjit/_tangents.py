"""flashjit::attention_jvp: O, LSE and their tangents, the forward-mode derivative of attention(). And
flashjit::attention_backward_jvp: tangents of the gradients, the second derivative."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _library
from ._call_types import Fixed, Rng
from ._launch import bind_context, launch
from ._library import BackwardJvpArgs, JvpArgs, runtime
from ._plans import Plan
from ._structs import tensor_struct
from ._tensors import aligned, describe, readable
from .errors import InvalidArgument

Tangents = Sequence["Tensor | None"]


def declared_with_grad(options: str, names: Collection[str]) -> str:
    """A spec's options whose score program declares these names "grad", as captured tensors with tangents are."""
    before, found, rest = options.partition(":score{")
    if not found:
        return options
    score, close, after = rest.partition("}")
    lines = [
        f"{line} grad"
        if line.partition(":")[0].strip() in names and ":" in line and not line.rstrip().endswith(" grad")
        else line
        for line in score.split(";")
    ]
    return before + found + ";".join(lines) + close + after


def launch_jvp(
    plan: Plan,
    qkv: tuple[Tensor, Tensor, Tensor],
    tangents: Tangents,
    sinks_tangent: Tensor | None,
    capture_tangents: dict[str, Tensor],
    fixed: Fixed,
    values: Sequence[Any],
    rng: Rng,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O, LSE and their tangents. tangents: of Q, K and V, None where they are zero; capture_tangents: by name."""
    out, out_tangent = (plan.new(plan.out_size, plan.out_stride, plan.out_dtype) for _ in range(2))
    lse, lse_tangent = plan.new_rows(), plan.new_rows().zero_()
    args = JvpArgs(struct_size=ctypes.sizeof(JvpArgs), lse_tangent=lse_tangent.data_ptr())
    held = _set_tangents(args, zip("qkv", qkv, tangents), sinks_tangent)  # alive until the launch
    args.out_tangent = _struct_of(out_tangent)
    of_captures = _tangents_of_captures(plan, capture_tangents, values)
    grads = {i: tangent.data_ptr() for i, tangent in of_captures.items()}
    held.append(of_captures)
    words, lent = plan.words_for_tangents(
        qkv, out, lse, fixed, values, rng, grads, _workspace_bytes(plan, "jvp")
    )
    held.append(lent)
    args.forward = words.buffer_info()[0]
    launch("jvp", plan.spec, _library.words_of(args), plan.index)
    return out, lse, out_tangent, lse_tangent


def launch_backward_jvp(
    plan: Plan,
    dout: Tensor | None,
    dlse: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    tangents: Tangents,
    dlse_tangent: Tensor | None,
    sinks_tangent: Tensor | None,
    capture_tangents: dict[str, Tensor],
    fixed: Fixed,
    values: Sequence[Any],
    rng: Rng,
) -> tuple[list[Tensor], Any, list[Tensor]]:
    """Tangents of what Plan.backward() gives. tangents: of dO, Q, K and V, None where they are zero."""
    out = dout if dout is not None else plan.new(plan.out_size, plan.out_stride, plan.out_dtype).zero_()
    dout = out.to(plan.dtype)  # `out` is not read
    dout_tangent, *of_qkv = tangents
    if dout_tangent is not None:
        dout_tangent = dout_tangent.to(plan.dtype)
    args = BackwardJvpArgs(struct_size=ctypes.sizeof(BackwardJvpArgs))
    given = zip(("dout", *"qkv"), (dout, *qkv), (dout_tangent, *of_qkv))
    held = _set_tangents(args, given, sinks_tangent)  # alive until the launch
    if dlse_tangent is not None:
        held.append(dlse_tangent.to(torch.float32).contiguous())
        args.dlse_tangent = held[-1].data_ptr()
    words, (grads, dsinks, dvalues), lent = plan.words_for_gradients(
        dout, dlse, qkv, out, lse, fixed, values, rng, _workspace_bytes(plan, "bwd_jvp")
    )
    of_captures = _tangents_of_captures(plan, capture_tangents, values)
    addresses = (ctypes.c_void_p * len(values))(
        *[of_captures[i].data_ptr() if i in of_captures else None for i in range(len(values))]
    )
    args.capture_tangents = ctypes.addressof(addresses)
    held += [lent, of_captures, addresses]
    args.backward = words.buffer_info()[0]
    launch("backward_jvp", plan.spec, _library.words_of(args), plan.index)
    return grads, dsinks, [grad.to(values[i].dtype) for grad, i in zip(dvalues, plan.grad_places)]


def _workspace_bytes(plan: Plan, of_pass: str) -> int:
    if plan.index < 0:
        return 0
    with torch.cuda.device(plan.index):
        bind_context(plan.device)
        return runtime().workspace_bytes(f"{of_pass}:{plan.spec_text}", plan.shape)


def _set_tangents(
    args: Any, given: Iterable[tuple[str, Tensor, Tensor | None]], sinks_tangent: Tensor | None
) -> list[Any]:
    """Sets the tangents of (name, tensor, tangent). Returns what must live until the launch."""
    held: list[Any] = []
    for name, tensor, tangent in given:
        if tangent is not None:
            held.append(_read_tangent(f"the tangent of {name}", tangent, tensor))
            setattr(args, f"{name}_tangent", _struct_of(held[-1]))
    if sinks_tangent is not None:
        held.append(sinks_tangent.to(torch.float32).contiguous())
        args.sinks_tangent = held[-1].data_ptr()
    return held


def _tangents_of_captures(plan: Plan, given: dict[str, Tensor], values: Sequence[Any]) -> dict[int, Tensor]:
    """The tangent of each captured tensor that is declared "grad", in fp32, by its place."""
    made = {}
    for i in plan.grad_places:
        tangent = given.get(plan.problem.names[i])
        made[i] = (
            torch.zeros(values[i].shape, device=plan.device)
            if tangent is None
            else aligned(tangent.to(torch.float32).contiguous())
        )
    return made


def _struct_of(tensor: Tensor) -> _library.Tensor:
    struct = tensor_struct(tensor.shape, tensor.stride())
    struct.data = tensor.data_ptr()
    return struct


def _read_tangent(name: str, tangent: Tensor, tensor: Tensor) -> Tensor:
    if tangent.shape != tensor.shape or tangent.dtype != tensor.dtype or tangent.device != tensor.device:
        raise InvalidArgument(
            f"{name} is {describe(tangent)}: it must be {describe(tensor)}, as its tensor is."
        )
    if tangent.is_neg():
        tangent = tangent.resolve_neg()
    if tangent.stride(2) == 0 and tangent.shape[2] > 1:
        tangent = tangent.contiguous()  # TMA copies boxes of rows, so rows must not be expanded
    return readable(tangent, name) if min(tangent.shape) else tangent

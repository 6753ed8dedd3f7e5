"""flashjit::attention_jvp: O, LSE and their tangents, the forward-mode derivative of attention()."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _library
from ._call_types import Fixed, Rng
from ._launch import bind_context, launch
from ._library import JvpArgs, runtime
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
    held: list[Any] = []  # alive until the launch
    args = JvpArgs(struct_size=ctypes.sizeof(JvpArgs), lse_tangent=lse_tangent.data_ptr())
    for name, tensor, tangent in zip("qkv", qkv, tangents):
        if tangent is not None:
            held.append(_read_tangent(f"the tangent of {name}", tangent, tensor))
            setattr(args, f"{name}_tangent", _struct_of(held[-1]))
    args.out_tangent = _struct_of(out_tangent)
    if sinks_tangent is not None:
        held.append(sinks_tangent.to(torch.float32).contiguous())
        args.sinks_tangent = held[-1].data_ptr()
    grads = {}
    for i in plan.grad_places:
        tangent = capture_tangents.get(plan.problem.names[i])
        held.append(
            torch.zeros(values[i].shape, device=plan.device)
            if tangent is None
            else aligned(tangent.to(torch.float32).contiguous())
        )
        grads[i] = held[-1].data_ptr()
    workspace = 0
    if plan.index >= 0:
        with torch.cuda.device(plan.index):
            bind_context(plan.device)
            workspace = runtime().workspace_bytes("jvp:" + plan.spec_text, plan.shape)
    words, lent = plan.words_for_tangents(qkv, out, lse, fixed, values, rng, grads, workspace)
    held.append(lent)
    args.forward = words.buffer_info()[0]
    launch("jvp", plan.spec, _library.words_of(args), plan.index)
    return out, lse, out_tangent, lse_tangent


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
    return readable(tangent, name) if min(tangent.shape) else tangent

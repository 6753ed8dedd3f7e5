"""Tensors as kernels read them: element types, strides, alignment, and the copies that are made of others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _values
from .errors import InvalidArgument, WrongType

SPEC_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
#: Types of K and V that have scales.
KV_TYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
ELEMENTS = {getattr(torch, name): text for name, text in _values.ELEMENTS.items()}
PLAIN = frozenset({Tensor, torch.nn.Parameter})


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_index: int  # negative on the CPU


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def under_transform() -> bool:
    """Whether a transform of torch.func runs; compiled code has none."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_differentiated(*values: Any) -> bool:
    """Whether autograd or a transform of torch.func asks for the gradient of a tensor among these, also where an inner jvp or vmap
    wraps it and says that it needs none."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return under_transform() and any([isinstance(x, Tensor) and _wraps_differentiated(x) for x in values])


def _wraps_differentiated(tensor: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def how_to_give_bytes(name: str) -> str:
    """What to do with a K or V of uint8 that came without its format."""
    return (
        'name the format of its bytes, such as k_format="nvfp4", v_format="nvfp4" (flashjit.KvFormat.names() has all); where they are '
        f"codes of 8 bits, give {name}.view(torch.float8_e4m3fn) and k_scale, v_scale"
    )


def dense_strides(size: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory as `like`'s do; the last one innermost."""
    strides = [0, 0, 0, 1]
    step = size[3]
    for i in sorted((2, 1, 0), key=lambda i: like[i]):
        strides[i] = step
        step = step * size[i]
    return tuple(strides)


def strides_are_read(tensor: Tensor) -> bool:
    """Whether the kernels read a tensor of four dimensions with these strides."""
    align = 16 // tensor.element_size()
    *others, last = tensor.stride()
    return (last == 1 or tensor.shape[3] <= 1) and all(
        stride % align == 0 for size, stride in zip(tensor.shape, others) if size > 1
    )


def readable(tensor: Tensor, name: str) -> Tensor:
    """The tensor, or a copy in memory as the kernels read it, with its dimensions in the same order."""
    if strides_are_read(tensor) and tensor.data_ptr() % 16 == 0:
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


def layout_of(tensor: Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.get_device())


def is_laid_out(tensor: Any, layout: Layout) -> bool:
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


def has_rows(table: Tensor) -> bool:
    """Whether one stride says where its rows begin. The library takes a stride of 0, as an expanded tensor has, for the default."""
    return table.dim() == 0 or table.stride(-1) == 1 and table.stride(0) > 0


def refuse_nested(*tensors: Tensor) -> None:
    for name, tensor in zip("qkv", tensors):
        if tensor.is_nested:
            raise WrongType(
                f"{name} is a nested tensor: give its rows one behind the other, with cu_seqlens_q and "
                "cu_seqlens_kv, or pad it."
            )


def refuse_negated(name: str, written: Tensor) -> None:
    """Kernels write numbers, which such a view would show with the other sign."""
    if written.is_neg():
        raise InvalidArgument(
            f"{name} is a view whose memory holds the negated numbers: give a tensor that holds the numbers."
        )


def refuse_expanded(name: str, written: Tensor) -> None:
    """Refuses a tensor whose strides are all 0: the library would take it as contiguous."""
    if written.numel() > 1 and not any(written.stride()):
        raise InvalidArgument(
            f"{name} is an expanded tensor, whose elements share memory: give its contiguous()."
        )


def signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return None


def lies_as(tensor: Any, form: Layout) -> bool:
    """Not by torch._C._dynamo.guards.assert_size_stride(), which takes less time: PyTorch 2.11's ends the process where a tensor,
    such as a sparse one, has no strides."""
    try:
        return (
            tensor.shape == form.size
            and (tensor.stride() == form.stride or _steps_alike(tensor.stride(), form))
            and tensor.dtype is form.dtype
            and tensor.get_device() == form.device_index
        )
    except (AttributeError, RuntimeError):  # RuntimeError: it has none, or is nested
        return False


def _steps_alike(stride: Sequence[int], form: Layout) -> bool:
    """Whether strides are the form's where there is a second element to step to."""
    return all(a == b or size == 1 for a, b, size in zip(stride, form.stride, form.size))

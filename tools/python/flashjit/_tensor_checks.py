"""Checks of the tensors of a call, where its plan is made. Errors name the argument, what it is and what it should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import _library
from ._call_types import Fixed, Problem, columns_of_q, types_of_fixed
from ._head_dims import head_dims, wrong_head_dim
from ._library import Handle, spec_handle
from ._tensors import ELEMENTS, KV_TYPES, SPEC_TYPES, describe, how_to_give_bytes
from ._tracing import is_scalar
from .errors import InvalidArgument, WrongType


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
    """Refuses tensors without four dimensions, that kernels do not take, or of another type or device than the first."""
    first_name, first = next(iter(tensors.items()))
    check_device(first, first_name, tensors)
    for name, tensor in tensors.items():
        check_four_dims(name, tensor)
        if tensor.layout is not torch.strided:
            raise WrongType(f"{name} has the layout {tensor.layout}: convert it with .to_dense().")
        if tensor.dtype not in types:
            if tensor.dtype == torch.uint8 and name[0] in "kv":
                raise WrongType(f"{name} is {describe(tensor)}: {how_to_give_bytes(name)}.")
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


def check_tensors(
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
    has_dim_of_q = (
        problem.stored is not None  # whose rows' bytes the library checks
        or k.shape[3] == columns_of_q(q, fixed)
    )
    if problem.cached and (v.shape[:3] != k.shape[:3] or not has_dim_of_q):
        raise InvalidArgument(
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: k must have the head_dim of "
            "q, and v the pages or slots, heads and rows of k."
        )
    if not problem.cached and (v.shape[:3] != k.shape[:3] or not has_dim_of_q or k.shape[0] != q.shape[0]):
        raise InvalidArgument(
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: batches must be equal, k "
            "must have the head_dim of q, and v the heads and the length of k."
        )
    if k.shape[1] == 0 and q.shape[1] or k.shape[1] and q.shape[1] % k.shape[1]:
        raise InvalidArgument(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: the heads of q must be a multiple of "
            "the heads of k."
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
    for name, (dtype, shape) in types_of_fixed(batch, q.shape[1]).items():
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
                f"indices is {describe(indices)}: it must be int32 [{'1' if lists[0] == 1 else f'{lists[0]} or 1'}, {lists[1]}, "
                f"{lists[2]}, top-k], "
                "a list of keys for each query and head of k."
            )
        check_memory("indices", indices)
        length = fixed.topk_length
        allowed = ([lists[1]], [1, lists[1]], list(indices.shape[:2]))
        if length is not None and (length.dtype != torch.int32 or list(length.shape) not in allowed):
            raise InvalidArgument(
                f"topk_length is {describe(length)}: it must be int32 {allowed[0]}, {allowed[1]} or {allowed[2]}, how many "
                "entries of each query's lists count."
            )
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


def spec_of(text: str, q: Tensor, v: Tensor, dims: tuple[int, int] | None) -> Handle:
    """The spec of a text. dims: head dimensions of Q and V, whose tensors can be padded with zeros; None: they have codes."""
    if dims and (wrong := wrong_head_dim(*dims)):
        _, most, most_v = head_dims()
        raise InvalidArgument(
            f"q is {describe(q)} and v is {describe(v)}: their {wrong}; "
            + (
                "torch.nn.functional.scaled_dot_product_attention() computes larger ones."
                if dims[0] > most or dims[1] > most_v
                else "pad them with zeros, and give the scale, or call flashjit.torch."
                "scaled_dot_product_attention(), which does so."
            )
        )
    try:
        return spec_handle(text)
    except InvalidArgument as error:
        if ":weight_mod" in text:
            raise InvalidArgument(str(error).replace("a score program", "a weight_mod program")) from None
        raise

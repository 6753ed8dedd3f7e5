"""What a call is besides Q, K and V: the tensors that every call may have, the problem, a dropout mask's numbers."""

from __future__ import annotations

from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from ._tensors import SPEC_TYPES, has_rows
from ._tracing import ELEMENT_MODS


class Fixed(NamedTuple):
    """The tensors that every call may have besides Q, K and V."""

    block_map: Any = None
    kv_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    sinks: Any = None
    indices: Any = None
    topk_length: Any = None  # how many first entries of indices count
    # For the forward pass alone: a cache's, and scales of K, V and Q of 8 bits in four dimensions.
    page_table: Any = None
    prefix_length: Any = None
    page_starts: Any = None  # where a sequence's entries begin in page_table, which is then one row
    k_scale: Any = None
    v_scale: Any = None
    q_scale: Any = None
    k_block_scale: Any = None  # of formats whose scales are in a tensor of their own
    v_block_scale: Any = None
    q_rope: Any = None  # Q's columns behind V's


NOTHING = Fixed()
#: The first ones, which the backward pass reads, too; the last ones, whose strides kernels know.
OF_BOTH_PASSES = Fixed._fields[: Fixed._fields.index("page_table")]
_STRIDED = Fixed._fields[Fixed._fields.index("k_scale") :]
#: Terms of a softmax that belong to no key: a call in several parts gives them to one part.
OF_SOFTMAX = ("sinks",)


def types_of_fixed(batch: int, heads_q: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and sizes of those whose sizes are the call's."""
    return {
        "kv_lengths": (torch.int32, (batch,)),
        "cu_seqlens_q": (torch.int32, (batch + 1,)),
        "cu_seqlens_kv": (torch.int32, (batch + 1,)),
        "prefix_length": (torch.int32, (1,)),
        "sinks": (torch.float32, (heads_q,)),
    }


def differentiable(fixed: Fixed) -> Any:
    """The fixed tensor that has a gradient, or None."""
    return fixed.sinks


def grads_of_fixed(dsinks: Any) -> Fixed:
    """Gradients of the fixed tensors: attention sinks alone have one."""
    return Fixed(sinks=dsinks)


class Stored(NamedTuple):
    """What tensors of rows in a KV format do not tell."""

    dim_v: int


class Problem(NamedTuple):
    """What all calls of a plan share, besides the tensors' sizes and strides."""

    options: str  # of the spec, from the masks on: ":causal:dropout"
    scale: Any
    dropout_p: float
    max_seqlen_q: int
    max_seqlen_kv: int
    names: tuple[str, ...]  # of the captures' values
    cached: bool = False  # K and V are a cache's pages or slots
    out_type: str = ""  # where Q has 8 bits: O's type, which the spec gets, unless it is fp32
    reserved_sms: int = 0  # multiprocessors left to others
    stored: Stored | None = None  # K or V are bytes of rows in a KV format
    skip_softmax_threshold: float | None = None  # None: no tile is skipped


#: Seed and offset of a dropout mask: numbers, or an int64 tensor of both where the kernels read them.
Rng = Union[tuple[int, int], Tensor, "Placed"]
NO_RNG: Rng = (0, 0)


class Placed(NamedTuple):
    """For a call that has a block of a larger problem's mask, with ":dropout_place" among its options."""

    rng: Rng
    place: tuple[int, ...]  # _library.DropoutPlace


class BuiltLists:
    """Tile lists of one pass: what they were built for, and the library's handle, none on the CPU. Their memory is the
    owner's, so that it lives as long as its user."""

    __slots__ = ("handle", "address", "bytes", "spec", "shape", "device", "spec_text", "text", "front_key")

    def __init__(self, plan: Any, backward: bool, handle: Any, bytes: int) -> None:
        self.handle, self.address, self.bytes = handle, handle.address if handle else 0, bytes
        self.spec, self.shape, self.device = plan.spec, plan.shape, plan.device
        self.spec_text, self.text = plan.spec_text, plan.described(backward)
        #: Where they are, and what calls that differ in that alone have in common; what the front launches keeps the spec.
        self.front_key = (self.address, self.bytes, id(plan.spec), plan.index, *plan.shape)


def contiguous(fixed: Fixed) -> Fixed:
    """`fixed` with contiguous tensors: kernels know no strides of them, but of a page table's rows."""
    others, strided = fixed[: -len(_STRIDED)], fixed[-len(_STRIDED) :]
    if all(x is None or x.is_contiguous() or x is fixed.page_table and has_rows(x) for x in others):
        return fixed
    dense = [x if x is None else x.contiguous() for x in others]
    return Fixed._make((*dense, *strided))


def columns_of_q(q: Tensor, fixed: Fixed) -> int:
    """Q's head dimension, some of whose columns may be in a tensor of their own."""
    return q.shape[3] + (0 if fixed.q_rope is None else fixed.q_rope.shape[3])


def cache_capacity(k: Tensor, fixed: Fixed) -> int:
    """How many keys a sequence of a cache may have."""
    return k.shape[2] * table_size(fixed)[1]


def table_size(fixed: Any) -> tuple[int, int]:
    """Sequences and columns of the page table as the library knows it."""
    table = fixed.page_table
    if table is None:
        return 0, 1
    if fixed.page_starts is not None:
        return fixed.page_starts.shape[0] - 1, table.shape[0]
    return table.shape[0], table.shape[1] if table.dim() == 2 else 1


def out_dtype_of(options: str, out_type: str, dtype: torch.dtype) -> torch.dtype:
    """O's type, by a spec's options and the types of spec and Q."""
    if "fp32_out" in switches_of(options):
        return torch.float32
    return next((torch_type for torch_type, name in SPEC_TYPES.items() if name == out_type), dtype)


def switches_of(options: str) -> list[str]:
    """A spec's options after its programs."""
    return options.rpartition("}")[2].split(":")


def names_with_grad(options: str) -> set[str]:
    """The captured tensors that a score program, or one of O, Q or K, declares with "grad"."""
    return {name for name, words in _declared(options).items() if words[-1:] == ["grad"]}


def declares_tensor(options: str, name: str) -> bool:
    """Whether a program reads the name as a tensor. A differentiated tensor without dimensions reaches a call as a number."""
    return len(_declared(options).get(name, ())) > 1


def _declared(options: str) -> dict[str, list[str]]:
    """What programs declare, by its name: its type, the dimensions of a tensor, and "grad"."""
    names = ("score", "mask", *ELEMENT_MODS)
    programs = [options.partition(f":{name}{{")[2].partition("}")[0] for name in names]
    lines = (line.partition(":") for line in ";".join(programs).split(";"))
    return {name.strip(): words.split() for name, _, words in lines}


def has_out_mod(options: str) -> bool:
    return ":out_mod{" in options

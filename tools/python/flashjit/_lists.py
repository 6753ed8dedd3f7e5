"""TileLists: which tiles the kernels visit, made once for many layers and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._blocks import read_blocks
from ._checks import check_switches
from ._kept_plans import plan_of
from ._named import with_named
from ._plans import BuiltLists
from ._problem import autocast, check_types, read_problem
from .errors import Unsupported, WrongType


class TileLists:
    """The tiles of a mask or a block map that the kernels visit, in both passes: built once for calls of attention() that get
    it as `lists`, such as all layers and steps with the same documents. Other calls build theirs each time.

        lists = flashjit.TileLists(q, k, v, mask_mod=documents)
        for layer in layers:
            ... flashjit.attention(q, k, v, mask_mod=documents, lists=lists)

    q, k, v: tensors of the calls' type, sizes and device; their values are ignored.
    All else: the calls' arguments, see attention(). Tensors that the mask reads (captures, block map, lengths) must keep their
        values; tensors that score_mod reads may change. Calls with other programs, sizes or devices are refused, and so are calls
        with weight_mod, out_mod, q_mod or k_mod.
    backward: whether to build the backward pass's lists too; None: if gradients are recorded, not under no_grad(). A backward
        pass without them builds its own.

    Takes some microseconds on the current stream, besides compiling. Build it outside compiled code; torch.compile accepts
    another one without recompiling. Empty on the CPU, and if the kernels use no lists. torch.compile(mode="reduce-overhead")
    loses the gain: its CUDA graphs copy the memory, and calls build their own lists.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool | str = False,
        dropout_p: float = 0.0,
        score_mod: Any = None,
        mask_mod: Any = None,
        captures: Mapping[str, Any] | None = None,
        window: Sequence[int | None] | None = None,
        softcap: float | None = None,
        block_mask: Any = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        sinks: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        deterministic: bool | None = None,
        backward: bool | None = None,
    ) -> None:
        if torch.compiler.is_compiling():
            raise Unsupported(
                "TileLists cannot be made in compiled code: make it outside, and give it to the compiled "
                "function."
            )
        check_types(q, k, v)
        check_switches(deterministic=deterministic, backward=backward)
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            q, k, v = autocast(q, k, v)
        both = torch.is_grad_enabled() if backward is None else backward
        if window is not None or softcap is not None:
            score_mod, mask_mod, captures = with_named(causal, score_mod, mask_mod, captures, window, softcap)
        if block_mask is not None:
            block_mask, mask_mod = read_blocks(
                block_mask, mask_mod, max_seqlen_q or q.shape[2], max_seqlen_kv or k.shape[2], True
            )
        fixed, values, problem = read_problem(
            causal,
            None,
            dropout_p,
            score_mod,
            mask_mod,
            captures,
            block_mask,
            cu_seqlens_q,
            cu_seqlens_kv,
            max_seqlen_q,
            max_seqlen_kv,
            sinks,
            kv_lengths,
            deterministic,
            both,
        )
        plan = plan_of(q, k, v, fixed, values, problem)
        if both and not plan.prepared_both:
            plan.prepare_both()
        made: list[tuple[Any, Any]] = [plan.build_lists(fixed, values, False)]
        made.append(plan.build_lists(fixed, values, True) if both else (None, None))
        self.built: tuple[Any, Any] = (
            made[0][0],
            made[1][0],
        )  # of the forward pass, and of the backward pass or None
        self.memory: tuple[Any, Any] = (made[0][1], made[1][1])
        self.front_key = made[0][0].front_key  # of the compiled front
        for built, memory in made[: 1 + both]:
            _remember(memory, built)

    @property
    def bytes(self) -> int:
        """Bytes of device memory that the lists take."""
        return sum(built.bytes for built in self.built if built)

    def __reduce__(self) -> Any:
        raise Unsupported(
            "TileLists are on a device, for this process: they cannot be copied or pickled; make them anew."
        )

    def __repr__(self) -> str:
        return f"<flashjit.TileLists for {' and '.join(built.text for built in self.built if built)}>"


def check_lists(lists: Any, codes: Any) -> None:
    if lists is not None and codes is not None:
        raise Unsupported(
            "lists are given and out_dtype is of codes: TileLists are for O as elements, so leave one out."
        )
    if lists is not None and not isinstance(lists, TileLists):
        raise WrongType(
            f"lists is a {type(lists).__name__}: give a flashjit.torch.TileLists; what flashjit.build_lists() "
            "makes is for flashjit.forward() and backward()."
        )


# The operators see tensors only: the memory of lists stands for them. What is known of it ends with it.


class _Known(NamedTuple):
    storage: StorageWeakRef
    built: BuiltLists


_known: dict[int, _Known] = {}


def _remember(memory: Tensor, built: BuiltLists) -> None:
    for address, known in list(_known.items()):
        if known.storage.expired():
            _known.pop(address, None)
    _known[memory.data_ptr()] = _Known(StorageWeakRef(memory.untyped_storage()), built)


def built_at(memory: Tensor | None) -> BuiltLists | None:
    """The lists whose memory it is. None for a copy, such as CUDA graphs of torch.compile make of their inputs: the call
    then makes its own."""
    if memory is None:
        return None
    known = _known.get(memory.data_ptr())
    return known.built if known is not None and not known.storage.expired() else None

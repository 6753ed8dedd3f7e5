"""FlashInfer's functions that join parts of the keys, and its wrappers for shared prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._merge import merge
from .._tensors import describe
from .._transforms import refuse_lost_gradients
from ..errors import InvalidArgument, Unsupported
from ..flash_attn._attend import with_batch
from ._batch import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from ._rows import Rows, check_layout, check_tensor, heads_first, run
from ._scores import LOG2E, Scales, Scores

LN2 = math.log(2)
MOST = 8  # states that one call of merge() takes


def joined(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """O [rows, h, d] and natural LSE [h, rows] of any number of those."""
    refuse_lost_gradients("flashjit.flashinfer", *[x for state in states for x in state])
    with torch.no_grad():
        pairs = [(with_batch(o), lse[None]) for o, lse in states]
        while len(pairs) > 1:
            pairs = [merge(pairs[:MOST]), *pairs[MOST:]]
        o, lse = pairs[0]
        return o[0].transpose(0, 1), lse[0]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """O [rows, h, d] and LSE [rows, h], of base 2, over the keys of a and of b."""
    for name, x in (("v_a", v_a), ("v_b", v_b)):
        check_tensor(name, x, "rows, h, d")
    for name, x in (("s_a", s_a), ("s_b", s_b)):
        check_tensor(name, x, "rows, h")
    o, lse = joined([(v_a, _natural(s_a)), (v_b, _natural(s_b))])
    return o.contiguous(), _binary(lse)


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """merge_state() into v and s; with a mask, bool [rows], for the rows where it is nonzero."""
    o, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        if mask.shape != s.shape[:1]:
            raise InvalidArgument(
                f"mask is {describe(mask)}: it must be [{s.shape[0]}], one element for each row."
            )
        kept = mask.bool()[:, None]
        o, lse = torch.where(kept[..., None], o, v), torch.where(kept, lse, s)
    v.copy_(o)
    s.copy_(lse)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """O [rows, h, d] and LSE [rows, h] of v [rows, states, h, d] and s [rows, states, h]."""
    check_tensor("v", v, "rows, states, h, d")
    check_tensor("s", s, "rows, states, h")
    if s.shape != v.shape[:3] or not v.shape[1]:
        raise InvalidArgument(
            f"v is {list(v.shape)} and s {list(s.shape)}: give [rows, states, h, d] and [rows, states, h], of one state or more."
        )
    o, lse = joined([(v[:, i], _natural(s[:, i])) for i in range(v.shape[1])])
    return o.contiguous(), _binary(lse)


def _natural(s: Tensor) -> Tensor:
    return (s.float() * LN2).transpose(0, 1).contiguous()


def _binary(lse: Tensor) -> Tensor:
    return (lse * LOG2E).transpose(0, 1).contiguous()


class MultiLevelCascadeAttentionWrapper:
    """Keys that more and more sequences share, each level over pages of its own."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Tensor] | None = None,
    ) -> None:
        buffers: list[Any] = [
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        ]
        self._levels = []
        for level in range(num_levels):
            own: list[Any] = [None if given is None else given[level] for given in buffers]
            self._levels.append(
                BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *own)
            )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._levels[0].is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: Any) -> None:
        """No effect: flashjit asks PyTorch for memory."""

    def plan(
        self,
        qo_indptr_arr: Sequence[Tensor],
        paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor],
        paged_kv_last_page_len: Sequence[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """Keeps the arguments. causal and window_left hold in the last level, whose keys are the sequences' own."""
        if pos_encoding_mode == "ROPE_LLAMA":
            raise Unsupported(
                "pos_encoding_mode is ROPE_LLAMA, but a level's keys do not say where they are in their sequences: rotate them "
                "once, when they are stored (flashjit.append() does it in the same launch), and give NONE."
            )
        given = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(of_levels) != len(self._levels) for of_levels in given):
            raise InvalidArgument(
                f"plan() is given arrays of {', '.join(str(len(x)) for x in given)} levels, and num_levels is "
                f"{len(self._levels)}: give one tensor of each for each level."
            )
        arrays = zip(self._levels, *given)
        for level, (wrapper, qo_indptr, indptr, indices, last_page_len) in enumerate(arrays):
            last = level == len(self._levels) - 1
            wrapper.plan(
                qo_indptr,
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and last,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left if last else -1,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
        """O [all rows, hq, d]."""
        states = [wrapper.natural(q, paged_kv_cache, wants_lse=True) for wrapper in self._levels]
        return joined(states)[0].contiguous()

    forward = run

    def end_forward(self) -> None:
        """No effect, as in FlashInfer."""


class _SharedPrefix:
    """A prefix, [keys, hkv, d] or [hkv, keys, d], that all sequences share, and pages of their own."""

    _planned: tuple[Any, ...] | None = None
    _made: Any  # the wrapper of a sequence's own pages

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = check_layout(kv_layout)
        self._own: Any = self._made(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any) -> None:
        """No effect: flashjit asks PyTorch for memory."""

    def end_forward(self) -> None:
        """No effect, as in FlashInfer."""

    def _joined(
        self, q: Tensor, k: Tensor, v: Tensor, own: tuple[Tensor, Any], scale: float | None
    ) -> Tensor:
        dims = "keys, hkv, d" if self._kv_layout == "NHD" else "hkv, keys, d"
        named = (("k_shared", k), ("v_shared", v))
        k, v = (heads_first(check_tensor(name, x, dims), self._kv_layout)[None] for name, x in named)
        rows = Rows(None, q.shape[0])
        shared = run(q, k, v, rows, Scores(scale), Scales(), q.dtype, None, True)
        return joined([shared, own])[0].contiguous()


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    _made = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> None:
        self._own.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            data_type=data_type,
        )

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Any) -> Tensor:
        own = self._own.natural(q, unique_kv_cache, wants_lse=True)
        return self._joined(q, k_shared, v_shared, own, None)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    _made = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        self._planned = (
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
        )

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Any,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        if self._planned is None:
            raise InvalidArgument("forward() is called before begin_forward().")
        self._own.plan(*self._planned, causal=causal, sm_scale=sm_scale, q_data_type=q.dtype)
        own = self._own.natural(q, unique_kv_cache, wants_lse=True)
        return self._joined(q, k_shared, v_shared, own, sm_scale)

"""FlashInfer's wrappers for attention with sinks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument
from ._batch import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from ._scores import Scores


def _check_window(window_left: int, plan: Any, args: Any, named: Any) -> None:
    """plan()'s window counts, of any size; the constructor's says there that kernels have one, and alone it would go unread."""
    if window_left >= 0 and "window_left" not in inspect.signature(plan).bind(*args, **named).arguments:
        raise InvalidArgument(
            f"window_left is {window_left} in the constructor and not given to plan(), which needs it, too: give it there, -1 for none."
        )


def _check_positions(scores: Scores, pos_encoding_mode: str) -> None:
    planned = "ALIBI" if scores.alibi else "ROPE_LLAMA" if scores.rope is not None else "NONE"
    if pos_encoding_mode not in ("NONE", planned):
        raise InvalidArgument(
            f"pos_encoding_mode is {planned} in plan() and {pos_encoding_mode} in the constructor: give both the same."
        )


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Sinks in the softmax: one more logit for each head of q, without a value."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indices_buf=paged_kv_indices_buf
        )
        self._takes_sinks = True  # as positional arguments of run(), or by name
        self._made = (window_left, pos_encoding_mode)

    def plan(self, *args: Any, **named: Any) -> None:
        """BatchPrefillWithPagedKVCacheWrapper's. What the constructor was given of window_left and pos_encoding_mode is given here, too."""
        window_left, pos_encoding_mode = self._made
        _check_window(window_left, super().plan, args, named)
        super().plan(*args, **named)
        _check_positions(self._scores, pos_encoding_mode)

    begin_forward = plan


class BatchDecodeWithAttentionSinkWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Likewise for decoding. kwargs: more arguments of BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, **kwargs)
        self._takes_sinks = True
        self._made_for = window_left

    def plan(self, *args: Any, **named: Any) -> None:
        """BatchDecodeWithPagedKVCacheWrapper's. A window_left that the constructor was given is given here, too."""
        _check_window(self._made_for, super().plan, args, named)
        super().plan(*args, **named)

    begin_forward = plan

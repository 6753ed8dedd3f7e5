"""FlashInfer's wrappers for attention with sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument
from ._batch import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from ._scores import Scores


def _compare(scores: Scores, window_left: int, pos_encoding_mode: str = "NONE") -> None:
    """plan()'s options with the constructor's, where that was given some: there, too, both need them."""
    planned = "ALIBI" if scores.alibi else "ROPE_LLAMA" if scores.rope is not None else "NONE"
    for name, given, made, default in (
        ("window_left", scores.window_left, window_left, -1),
        ("pos_encoding_mode", planned, pos_encoding_mode, "NONE"),
    ):
        if made not in (default, given):
            raise InvalidArgument(
                f"{name} is {given} in plan() and {made} in the constructor: give both the same."
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
        super().plan(*args, **named)
        _compare(self._scores, *self._made)

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
        super().plan(*args, **named)
        _compare(self._scores, self._made_for)

    begin_forward = plan

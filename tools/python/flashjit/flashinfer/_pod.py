"""FlashInfer's wrappers that compute prefills and decodes in one step: here each is one call of attention()."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import InvalidArgument
from ._batch import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from ._single import single_prefill_with_kv_cache


class PODWithPagedKVCacheWrapper:
    """One sequence's prefill over K and V as they are, and a batch that decodes over pages."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        jit_args: Any = None,
    ) -> None:
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            jit_args=jit_args,
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any) -> None:
        """No effect: flashjit asks PyTorch for memory."""

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Keeps the arguments, which are of the batch that decodes."""
        self._decode.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode,
            window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: Any,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Tensor, Tensor]:
        """O of the prefill, q_p [queries, hq, d] over k_p, v_p [keys, hkv, d] or by HND [hkv, keys, d], and O of the batch, q_d
        [sequences, hq, d].

        Options of the batch are plan()'s, so those with _d have no effect, as there, and LSE is not returned. The three scales
        are the batch's."""
        prefill: Tensor = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        decode: Tensor = self._decode.run(
            q_d, paged_kv_cache_d, *args, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
        )
        return prefill, decode


class BatchPODWithPagedKVCacheWrapper:
    """A batch of prefills and a batch that decodes, each with packed queries over pages of its own."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._prefill, self._decode = (
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(2)
        )
        self._of_prefill: Any = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Keeps the arguments: with _p of the prefills, with _d of the batch that decodes, and of both."""
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._options: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "q_data_type": q_data_type or data_type or "float16",
            "kv_data_type": kv_data_type or data_type,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        self._of_prefill = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *sizes)
        self._masked: tuple[Any, ...] | None = None
        self._plan_prefill((None, None, False))
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *sizes, **self._options)

    begin_forward = plan

    def _plan_prefill(self, masked: tuple[Any, ...]) -> None:
        """masked: custom_mask, packed_custom_mask and causal, which run() gets: layers of a step have the same, and plan once."""
        if self._of_prefill is None:
            raise InvalidArgument("run() is called before plan().")
        if self._masked is None or any(a is not b for a, b in zip(masked, self._masked)):
            custom, packed, causal = masked
            options = {**self._options, "custom_mask": custom, "packed_custom_mask": packed, "causal": causal}
            self._prefill.plan(*self._of_prefill, **options)
            self._masked = masked

    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: Any,
        q_d: Tensor,
        paged_kv_cache_d: Any,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """O of the prefills and of the batch that decodes, [all rows, hq, d] each; with return_lse two pairs: both O, and both LSE
        [all rows, hq], of base 2. The three scales are the second batch's, as there, which is not causal."""
        self._plan_prefill((custom_mask_p, packed_custom_mask_p, bool(causal_p)))
        prefill = self._prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        decode = self._decode.run(q_d, paged_kv_cache_d, return_lse=return_lse, **scales)
        return tuple(zip(prefill, decode)) if return_lse else (prefill, decode)  # type: ignore[return-value]

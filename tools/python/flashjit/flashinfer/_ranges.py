"""FlashInfer's wrapper for causal attention with ranges that see each other in both directions, as the images of a prompt do."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._named import AT_LAST
from .._tensors import describe
from ..errors import InvalidArgument, WrongType
from ._batch import BatchPrefillWithPagedKVCacheWrapper
from ._rows import results
from ._scores import Scales, Seen, refuse

_OWN = "kv >= ranges[first[b] + q, 0] && kv <= ranges[first[b] + q, 1]"


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """A query sees the keys up to its own, and also the keys of its range."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        o_data_type: Any = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        v_sf_swizzled: bool = False,
    ) -> None:
        refuse(
            pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode,
            v_sf_swizzled=v_sf_swizzled,
        )
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indices_buf=paged_kv_indices_buf
        )
        self._types = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "o_data_type": o_data_type}

    def plan(self, *args: Any, **named: Any) -> None:
        """Keeps the arguments, which are BatchPrefillWithPagedKVCacheWrapper's. Types that are left out are the constructor's. The
        mask is run()'s, so plan() takes none."""
        types = {name: x for name, x in self._types.items() if named.get(name) is None}
        super().plan(*args, **{**named, **types})
        scores = self._scores
        given = {
            "causal": scores.causal,
            "window_left": scores.window_left >= 0,
            "custom_mask": scores.mask is not None,
            "prefix_len_ptr": scores.items is not None,
            "logits_soft_cap": bool(scores.logits_soft_cap),
        }
        for name, is_given in given.items():
            if is_given:
                raise InvalidArgument(
                    f"{name} is given: masks are run()'s bidirectional_ranges, causal_window_left and range_window_left; leave it out."
                )

    begin_forward = plan

    def run(  # type: ignore[override]
        self,
        q: Tensor,
        paged_kv_cache: Any,
        bidirectional_ranges: Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """O [all rows, hq, d] of q [all rows, hq, d]; with return_lse also LSE [all rows, hq], of base 2.

        bidirectional_ranges: int32 [all rows, 2]: the first and the last key of each query's range, counted in its sequence; -1, -1:
        none. causal_window_left: keys before its own that a query sees beside its range; below 0: all. range_window_left: keys
        up to its own, which counts, that it sees of its range; 0 and below: all."""
        refuse(kv_cache_sf=kv_cache_sf)
        ranges = bidirectional_ranges
        if not isinstance(ranges, Tensor) or ranges.dtype != torch.int32:
            raise WrongType(f"bidirectional_ranges is {describe(ranges)}: give int32 [all rows, 2].")
        if ranges.shape != (q.shape[0], 2):
            raise InvalidArgument(
                f"bidirectional_ranges is {describe(ranges)}: give [{q.shape[0]}, 2], a first and a last key for each row of q."
            )
        before, own = f"kv <= {AT_LAST}", _OWN
        captures: dict[str, Any] = {
            "ranges": ranges,
            "first": None if self._rows is None else self._rows.cu_seqlens,
        }
        if causal_window_left >= 0:
            before += f" && kv >= {AT_LAST} - causal_left"
            captures["causal_left"] = int(causal_window_left)
        if range_window_left > 0:
            own += f" && kv > {AT_LAST} - range_left"
            captures["range_left"] = int(range_window_left)
        scores = self._scores._replace(causal=False, seen=Seen(f"({before}) || ({own})", captures))
        scales, wants_lse = Scales(q_scale, k_scale, v_scale), return_lse or lse is not None
        found = self.natural(q, paged_kv_cache, scales, out, wants_lse, scores=scores)
        return results(found, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward = run  # type: ignore[assignment]
    forward_return_lse = run_return_lse

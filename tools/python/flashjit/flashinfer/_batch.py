"""FlashInfer's wrappers for batches: plan() keeps its arguments, and run() is one call of attention()."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._engines import bound
from .._tensors import KV_TYPES, describe
from .._words import renamed
from ..errors import Error, InvalidArgument, Unsupported, WrongType
from ._packed import Packed, packed_of
from ._page import planned_lengths
from ._rows import (
    Pages,
    Rows,
    Sizes,
    check_ints,
    check_layout,
    check_tensor,
    pages_of,
    results,
    run,
    sizes,
    unpacked,
)
from ._said import check_pages, check_room, check_values, lengths_of, longest_list
from ._scores import (
    NO_ROPE,
    Items,
    Scales,
    Scores,
    check_dtypes,
    dtype_of,
    is_invariant,
    read_items,
    read_mask,
    read_scores,
    refuse,
    type_of_out,
)
from ._variants import has_sinks, of_arguments, sinks_of

#: What plan() calls attention()'s arguments.
_OF_PLANS = {
    "page_table": "plan()'s list of pages",
    "kv_lengths": "plan()'s number of keys",
    "cu_seqlens_q": "qo_indptr",
}


class _Wrapper:
    """What all wrappers have. A plan's tensors keep their memory with use_cuda_graph, where graphs read them."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool, jit_args: Any) -> None:
        self._takes_sinks = has_sinks(jit_args)
        self._kv_layout = check_layout(kv_layout)
        if not isinstance(workspace, Tensor):
            raise WrongType(f"float_workspace_buffer is {describe(workspace)}: give a tensor on the device.")
        self.device = workspace.device
        self._use_cuda_graph = use_cuda_graph
        self._rows: Rows | None = None
        self._sizes: Sizes | None = None
        self._scores = Scores()
        self._kept: dict[str, Tensor] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any) -> None:
        """No effect: flashjit asks PyTorch for memory."""

    def end_forward(self) -> None:
        """No effect, as in FlashInfer."""

    def _keep(self, name: str, value: Tensor) -> Tensor:
        """The value, where captured graphs find it."""
        if not self._use_cuda_graph:
            return value
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = value.clone()
        elif kept.shape != value.shape:
            raise InvalidArgument(
                f"{name} has the shape {list(value.shape)} and had {list(kept.shape)} when the first graph was captured: "
                "with use_cuda_graph make a wrapper for each batch size."
            )
        return kept if kept is value else kept.copy_(value)

    def _keep_types(self, q: Any, kv: Any, out: Any) -> None:
        self._q_dtype = dtype_of(q)
        self._kv_dtype = dtype_of(kv, self._q_dtype)
        self._out_dtype = dtype_of(out, type_of_out(self._q_dtype))
        check_dtypes(self._q_dtype, self._kv_dtype, self._out_dtype)

    def _keep_queries(self, qo_indptr: Tensor) -> Tensor:
        """Keeps where Q's rows are, and gives how many each sequence has, on the host."""
        ends = check_ints("qo_indptr", qo_indptr, 1).cpu()
        queries = ends.diff()
        offsets = self._keep("qo_indptr", qo_indptr.to(device=self.device, dtype=torch.int32))
        self._rows = Rows(offsets, int(queries.max()) if queries.numel() else 0, int(ends[-1]))
        return queries

    def _replace_scores(
        self,
        pos_encoding_mode: str,
        cap: float | None,
        causal: bool,
        window_left: int,
        sm_scale: float | None,
        rope: tuple[Any, Any] | None = None,
    ) -> None:
        """Others than plan()'s, with its mask."""
        kept = self._scores
        mask = (kept.mask, kept.mask_start, kept.batch_invariant)
        made = read_scores(
            pos_encoding_mode, cap, causal, window_left, sm_scale, *mask, rope, kept.rope_start
        )
        self._scores = made._replace(items=kept.items)

    def _kept_items(self, items: Items | None) -> Items | None:
        if items is None:
            return None
        return Items(
            self._keep("prefix_len_ptr", items.prefix), self._keep("token_pos_in_items_ptr", items.places)
        )

    def _read(
        self, args: tuple[Any, ...], scales: Scales, q: Tensor, sinks: Tensor | None = None
    ) -> tuple[Scales, Tensor | None, Scores]:
        """run()'s scales, sinks and scores. args: positional, in the order of FlashInfer's kernels for this plan()."""
        if not args or not self._takes_sinks:
            return of_arguments(args, scales, q), sinks, self._scores
        sinks, sm_scale = sinks_of(args)
        scores = self._scores if sm_scale is None else self._scores._replace(sm_scale=sm_scale)
        return scales, sinks, scores

    def _planned(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        """k, v: [.., hkv, rows, d]."""
        if self._rows is None or self._sizes is None:
            raise InvalidArgument("run() is called before plan().")
        check_tensor("q", q, "all rows, hq, d")
        if q.dtype != self._q_dtype or k.dtype != self._kv_dtype:
            raise InvalidArgument(
                f"q is {q.dtype} and K {k.dtype}, but plan() was given q_data_type {self._q_dtype} and kv_data_type "
                f"{self._kv_dtype}: give tensors of these types, or plan again."
            )
        if q.shape[0] != self._rows.total:
            raise InvalidArgument(
                f"q has {q.shape[0]} rows, but plan() was given {self._rows.total}"
                f"{'' if self._rows.cu_seqlens is not None else f', q_len_per_req {self._rows.longest} of each sequence'}."
            )
        self._sizes.check(q, k, v)
        return self._rows


class _Paged(_Wrapper):
    """Over pages: FlashInfer's list of pages, indptr, indices and last_page_len, becomes a table."""

    _pages: Pages
    _packed: Packed | None = None

    def _keep_pages(
        self,
        indptr: Tensor,
        indices: Tensor,
        lengths: Tensor,
        indices_buffer: Tensor | None,
        block_tables: Tensor | None = None,
    ) -> None:
        indptr = check_ints("paged_kv_indptr", indptr, lengths.numel() + 1)
        check_ints("paged_kv_indices", indices)
        indptr = indptr[: lengths.numel() + 1]  # which some callers give more of
        width = bound(longest_list(indptr, indices))
        if self._use_cuda_graph and indices_buffer is not None:
            width = indices_buffer.numel()  # the most that any sequence may have
        pages = pages_of(indptr, indices, lengths, width, self.device)
        check_pages("block_tables", block_tables, pages.table, lengths_of(indptr), "indptr and indices")
        self._pages = Pages(self._keep("page_table", pages.table), self._keep("kv_lengths", pages.lengths))
        self._packed = None if self._scores.rope is None else self._keep_packed()

    def _keep_packed(self) -> Packed:
        """What rotates K: packed keys and queries, and the position of each sequence's first query."""
        if self._q_dtype in KV_TYPES:
            raise Unsupported(NO_ROPE)
        assert self._rows is not None and self._sizes is not None and self._sizes.page_size is not None
        table, lengths = self._pages
        offsets = self._rows.cu_seqlens
        if offsets is None:
            each = self._rows.longest
            offsets = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device) * each
            self._rows = self._rows._replace(cu_seqlens=self._keep("qo_indptr", offsets))
        first = self._keep("rope_start", (lengths - offsets.diff()).int())
        self._scores = self._scores._replace(rope_start=first)
        page_size = self._sizes.page_size
        room = table.numel() * page_size if self._use_cuda_graph else None
        page, row, ends, longest = packed_of(self._pages, page_size, room)
        page, row = self._keep("packed_pages", page), self._keep("packed_rows", row)
        return Packed(page, row, self._keep("packed_ends", ends), longest)

    def natural(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        scales: Scales = Scales(),
        out: Tensor | None = None,
        wants_lse: bool = False,
        sinks: Tensor | None = None,
        scores: Scores | None = None,
    ) -> tuple[Tensor, Any]:
        """O [all rows, hq, d], and the natural LSE [hq, all rows] or None."""
        k, v = unpacked(paged_kv_cache, self._kv_layout)
        rows, named = self._planned(q, k, v), self._pages.named()
        scores = scores or self._scores
        if scores.rope is not None and self._packed is not None:
            k, v, named = self._packed.of(k, v)
        try:
            return run(q, k, v, rows, scores, scales, self._out_dtype, out, wants_lse, sinks=sinks, **named)
        except Error as error:
            raise renamed(error, _OF_PLANS) from None


def _with_window(scores: Scores, window_left: int | None) -> Scores:
    if window_left is None or window_left == scores.window_left:
        return scores
    return scores._replace(window_left=window_left)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """One query, or q_len_per_req queries, of each sequence over its pages."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)
        self.use_tensor_cores = use_tensor_cores
        self._indices_buffer = paged_kv_indices_buffer

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
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        o_data_type: Any = None,
        window_right: int = 0,
        global_override_indptr_cpu: Tensor | None = None,
    ) -> None:
        """Keeps the arguments, which are FlashInfer's. seq_lens and block_tables say what the first three do, and are compared on the
        CPU alone. fixed_split_size and disable_split_kv make results the same
        whatever else is in the batch (batch_invariant of flashjit.attention)."""
        if window_right != 0:
            raise Unsupported(f"window_right is {window_right}: give 0, as no keys follow the last query's.")
        self._sizes = sizes(num_qo_heads, num_kv_heads, head_dim, None, page_size)
        self._keep_types(q_data_type or data_type or "float16", kv_data_type or data_type, o_data_type)
        self._scores = read_scores(
            pos_encoding_mode,
            logits_soft_cap,
            q_len_per_req > 1,
            window_left,
            sm_scale,
            batch_invariant=is_invariant(fixed_split_size, disable_split_kv),
            rope=(rope_scale, rope_theta),
        )
        lengths = planned_lengths(indptr, last_page_len, page_size)
        check_values("seq_lens", seq_lens, "last_page_len", lengths)
        self._rows = Rows(None, q_len_per_req, lengths.numel() * q_len_per_req)
        self._keep_pages(indptr, indices, lengths, self._indices_buffer, block_tables)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """O [all rows, hq, d] of q [all rows, hq, d]; with return_lse also LSE [all rows, hq], of base 2."""
        refuse(
            args=None if self._takes_sinks else args or None,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        scales, sinks, scores = self._read(args, Scales(q_scale, k_scale, v_scale), q, sinks)
        if q_len_per_req is not None and self._rows is not None and q_len_per_req != self._rows.longest:
            raise InvalidArgument(
                f"q_len_per_req is {q_len_per_req}, but plan() was given {self._rows.longest}: plan again."
            )
        wants_lse = return_lse or lse is not None
        found = self.natural(
            q, paged_kv_cache, scales, out, wants_lse, sinks, _with_window(scores, window_left)
        )
        return results(found, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward = run
    forward_return_lse = run_return_lse


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def fast_decode_plan(wrapper: BatchDecodeWithPagedKVCacheWrapper, *args: Any, **named: Any) -> None:
    """wrapper.plan(), which is as fast."""
    type(wrapper).plan(wrapper, *args, **named)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """Packed queries over pages: prefill, chunks of it, and decoding in one call."""

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
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)
        self._indices_buffer = paged_kv_indices_buf

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
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
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Keeps the arguments, which are FlashInfer's. The last query is at the last key. seq_lens, seq_lens_q and block_tables say
        what the first four do, and are compared on the CPU alone."""
        self._sizes = sizes(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
        self._keep_types(q_data_type, kv_data_type, o_data_type)
        lengths = planned_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
        check_values("seq_lens", seq_lens, "paged_kv_last_page_len", lengths)
        check_values("seq_lens_q", seq_lens_q, "qo_indptr", lengths_of(qo_indptr))
        self._keep_scores(
            qo_indptr,
            lengths,
            custom_mask,
            packed_custom_mask,
            read_scores(
                pos_encoding_mode,
                logits_soft_cap,
                causal,
                window_left,
                sm_scale,
                rope=(rope_scale, rope_theta),
            ),
            is_invariant(fixed_split_size, disable_split_kv),
        )
        items = read_items(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, lengths.cpu(), self.device
        )
        self._scores = self._scores._replace(items=self._kept_items(items))
        self._keep_pages(paged_kv_indptr, paged_kv_indices, lengths, self._indices_buffer, block_tables)

    begin_forward = plan

    def _keep_scores(
        self,
        qo_indptr: Tensor,
        lengths: Tensor,
        custom: Tensor | None,
        packed: Tensor | None,
        scores: Scores,
        invariant: bool,
    ) -> None:
        queries = self._keep_queries(qo_indptr)
        masked = custom is not None or packed is not None
        pairs = queries.long() * lengths.cpu().long() if masked else queries
        mask, start = read_mask(custom, packed, pairs, self.device)
        self._scores = scores._replace(
            mask=mask, mask_start=start, causal=scores.causal and mask is None, batch_invariant=invariant
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """O [all rows, hq, d] of q [all rows, hq, d]; with return_lse also LSE [all rows, hq], of base 2.

        args: the scales of q, k and v of 8 bits, float32 [heads of each], as FlashInfer's FP8 kernels take them."""
        refuse(
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        scales, sinks, scores = self._read(args, Scales(q_scale, k_scale, v_scale), q, sinks)
        wants_lse = return_lse or lse is not None
        found = self.natural(
            q, paged_kv_cache, scales, out, wants_lse, sinks, _with_window(scores, window_left)
        )
        return results(found, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward_return_lse = run_return_lse

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """run() with options of scores in the place of plan()'s."""
        rope = None if self._packed is None else (rope_scale, rope_theta)
        self._replace_scores(pos_encoding_mode, logits_soft_cap, causal, window_left, sm_scale, rope)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)


class BatchAttention(_Paged):
    """FlashInfer's wrapper for prefill and decoding in one call."""

    def __init__(self, kv_layout: str = "NHD", device: Any = "cuda") -> None:
        super().__init__(torch.empty(0, device=device), kv_layout, False, None)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        refuse(use_profiler=use_profiler)
        self._sizes = sizes(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
        self._keep_types(q_data_type, kv_data_type, None)
        self._scores = read_scores("NONE", logits_soft_cap, causal, -1, sm_scale)
        lengths = check_ints("kv_len_arr", kv_len_arr)
        check_room("kv_len_arr", lengths, kv_indptr, page_size)
        self._keep_pages(kv_indptr, kv_indices, lengths, None)
        self._keep_queries(qo_indptr)

    def run(
        self,
        q: Tensor,
        kv_cache: Any,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """O and LSE, of base 2, [all rows, hq]."""
        refuse(kv_cache_sf=kv_cache_sf)
        scores = self._scores._replace(logits_soft_cap=logits_soft_cap) if logits_soft_cap else None
        return results(
            self.natural(q, kv_cache, Scales(None, k_scale, v_scale), out, True, scores=scores), lse
        )

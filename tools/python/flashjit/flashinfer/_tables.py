"""FlashInfer's functions for batches over a table of pages. They have no plan()."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._engines import FIRST_NEW
from .._named import AT_LAST, window_text
from .._tensors import describe
from .._words import in_words, renamed
from ..errors import Error, InvalidArgument, Unsupported, WrongType
from ._rows import (
    Rows,
    check_ints,
    check_layout,
    check_table,
    check_tensor,
    flattened,
    results,
    run,
    unpacked,
)
from ._said import check_number, check_offsets, check_sequences
from ._scores import Scales, Scores, Seen, check_dtypes, one_of, refuse, type_of_result

_DRAFT = f"kv - ({FIRST_NEW})"
#: What most of these functions call attention()'s arguments.
WORDS = {
    "page_table": "block_tables",
    "kv_lengths": "seq_lens",
    "max_seqlen_kv": "max_seq_len",
    "cu_seqlens_q": "cum_seq_lens_q",
    "max_seqlen_q": "max_q_len",
}


def signed(x: Any) -> Any:
    """uint32, as some of these functions take lengths and tables, as the same bytes of int32."""
    return x.view(torch.int32) if isinstance(x, Tensor) and x.dtype == torch.uint32 else x


def rows_of(query: Tensor, sequences: int, each: int | None, cu_seqlens: Tensor | None, most: Any) -> Rows:
    """Where the rows of query [all rows, ..] are: `each` of them in each sequence, or packed."""
    if cu_seqlens is not None:
        return Rows(signed(cu_seqlens), query.shape[0] if most is None else most)
    rows = Rows(None, each or 1)
    if query.shape[0] != rows.longest * sequences:
        raise InvalidArgument(
            f"query has {query.shape[0]} rows, but seq_lens is of {sequences} sequences, q_len_per_req is {rows.longest}: give "
            "cum_seq_lens_q and max_q_len for other numbers of queries."
        )
    return rows


def scaled(bmm1_scale: Any, bmm2_scale: Any, causal: bool, window_left: int = -1) -> tuple[Scores, Scales]:
    """bmm1_scale is all that scores are multiplied with, bmm2_scale all that O is: numbers, or float32 [1]."""
    if isinstance(bmm1_scale, Tensor):  # on the device: one factor of scores, whose own is 1
        return Scores(1.0, causal, window_left), Scales(None, bmm1_scale, bmm2_scale)
    return Scores(float(bmm1_scale), causal, window_left), Scales(None, None, bmm2_scale)


def of_row(rows: Rows, first: str) -> tuple[str, dict[str, Tensor]]:
    """Text of a query's row among all of them, and what it captures by the name `first`."""
    if rows.cu_seqlens is None:
        return "b * seqlen_q + q", {}
    return f"{first}[b] + q", {first: rows.cu_seqlens}


def over_keys(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    scores: Scores,
    scales: Scales,
    out: Tensor | None,
    out_dtype: Any,
    lse: Tensor | None,
    return_lse: bool,
    sinks: Any,
    **more: Any,
) -> Any:
    """One call of attention(): O [all rows, hq, d_v], with return_lse also LSE [all rows, hq], of base 2. k, v: [.., hkv, rows, d].
    more: where the keys of each sequence are, as attention() has it."""
    chosen = type_of_result(out_dtype, out, query.dtype)
    check_dtypes(query.dtype, k.dtype, chosen)
    wants_lse = return_lse or lse is not None
    found = run(query, k, v, rows, scores, scales, chosen, out, wants_lse, sinks=sinks, **more)
    return results(found, lse, return_lse)


def over_table(
    query: Tensor,
    kv_cache: Any,
    kv_layout: str,
    block_tables: Tensor,
    seq_lens: Tensor,
    most: int | None,
    rows: Rows,
    scores: Scores,
    scales: Scales,
    out: Tensor | None = None,
    out_dtype: Any = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    sinks: Any = None,
) -> Any:
    """over_keys() in pages. most: keys; None: as many as the table has room for."""
    table = check_table("block_tables", signed(block_tables), seq_lens.numel())
    k, v = unpacked(kv_cache, check_layout(kv_layout))
    room = table.shape[1] * k.shape[2]
    sinks = one_of(sinks)
    try:
        return over_keys(
            query,
            k,
            v,
            rows,
            scores,
            scales,
            out,
            out_dtype,
            lse,
            return_lse,
            sinks=None if sinks is None else sinks.reshape(-1),
            page_table=table,
            kv_lengths=signed(seq_lens).int(),
            max_seqlen_kv=room if most is None else min(most, room),
        )
    except Error as error:
        raise renamed(error, WORDS) from None


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: Tensor | None = None,
    request_order_plan: Any = None,
    sparse_top_k: int = 0,
    length_aware_schedule: bool = False,
) -> Any:
    """O [all rows, hq, d] of query [all rows, hq, d] over pages by block_tables, int32 [sequences, pages of the longest].

    bmm1_scale: what scores are multiplied with, all scales in it, a number or float32 [1]; bmm2_scale: likewise of O.
    Several queries of a sequence are causal, the last one at the last key. cum_seq_lens_q, with max_q_len: they are packed.
    mask: which drafts a draft sees, as xqa() has it. causal_seqlens_kv_global, int32 [sequences]: the pages have every cp_world-th
    key of a sequence, from the cp_rank-th on, and this is its number of keys before query 0.
    With return_lse also LSE [all rows, hq], of base 2."""
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_cache_sf=kv_cache_sf,
        o_scale=None if o_scale in (None, 1) else o_scale,
        bmm1_scale_log2=bmm1_scale_log2,
        enable_block_sparse_attention=enable_block_sparse_attention,
        sparse_top_k=sparse_top_k or None,
    )
    _refuse_two_tables(uses_shared_paged_kv_idx)
    check_tensor("query", query, "all rows, hq, d")
    seq_lens = check_ints("seq_lens", signed(seq_lens))
    rows = rows_of(query, seq_lens.numel(), q_len_per_req, cum_seq_lens_q, max_q_len)
    scores, scales = scaled(bmm1_scale, bmm2_scale, rows.longest > 1, window_left)
    if causal_seqlens_kv_global is not None or (cp_world, cp_rank) != (1, 0):
        if window_left >= 0:
            raise Unsupported(
                f"window_left is {window_left} with causal_seqlens_kv_global: a window's keys would be of several ranks; leave it out."
            )
        if mask is not None:
            raise Unsupported(
                "mask is given with causal_seqlens_kv_global: flashjit.flashinfer has one of them; leave one out."
            )
        seen = of_rank(cp_world, cp_rank, causal_seqlens_kv_global, seq_lens)
        scores = scores._replace(causal=False, seen=seen)
    elif mask is not None and rows.longest > 1:
        scores = scores._replace(causal=False, seen=of_drafts(mask, rows))
    results = (out, out_dtype, lse, return_lse, sinks)
    return over_table(
        query, kv_cache, kv_layout, block_tables, seq_lens, max_seq_len, rows, scores, scales, *results
    )


def of_rank(world: Any, rank: Any, before: Any, seq_lens: Tensor) -> Seen:
    """The keys of a rank that a query sees. before: how many keys of all ranks are before each sequence's query 0."""
    if before is None:
        raise InvalidArgument(
            f"cp_world is {world} and cp_rank {rank}, but causal_seqlens_kv_global is None: give it, or leave both out."
        )
    if not isinstance(before, Tensor) or before.dtype != torch.int32 or before.shape != seq_lens.shape:
        raise InvalidArgument(
            f"causal_seqlens_kv_global is {describe(before)}: it must be int32 {list(seq_lens.shape)}, a number for each sequence."
        )
    if not 0 <= rank < world:
        raise InvalidArgument(f"cp_rank is {rank} of cp_world {world}: give 0 to {world - 1}.")
    captures = {"cp_world": int(world), "cp_rank": int(rank), "cp_before": before}
    return Seen("kv * cp_world + cp_rank <= cp_before[b] + q", captures)


def _refuse_two_tables(shared: bool) -> None:
    if not shared:
        raise Unsupported("uses_shared_paged_kv_idx is False: K and V are in the same pages here.")


def of_drafts(mask: Tensor, rows: Rows) -> Seen:
    """Bits, a row of bytes for each query: which queries of its sequence it sees. All of these are keys, the last ones."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.stride(-1) != 1:
        raise WrongType(f"mask is {describe(mask)}: give bits of each draft, uint16 [.., words of a row].")
    bits = mask.view(torch.uint8).flatten(0, -2)
    if bits.shape[1] * 8 < rows.longest:
        raise InvalidArgument(
            f"mask has {bits.shape[1] * 8} bits in a row, but sequences have up to {rows.longest} queries: give a bit for each."
        )
    row, captures = of_row(rows, "draft_first")
    bit = f"max({_DRAFT}, 0)"
    text = f"{_DRAFT} < 0 || (draft_mask[{row}, {bit} / 8] >> {bit} % 8 & 1) != 0"
    return Seen(text, {**captures, "draft_mask": bits})


@in_words(max_seq_len="max_kv_len")
def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
    window_right: int = -1,
    variable_window_token_starts: Tensor | None = None,
    variable_window_token_ends: Tensor | None = None,
) -> Any:
    """O [all rows, hq, d] of packed queries [all rows, hq, d] over pages by block_tables, int32 [sequences, pages of the longest].

    bmm1_scale, bmm2_scale: as of trtllm_batch_decode_with_kv_cache(). The last query is at the last key. window_right: keys after
    its own that a query sees where it is not causal. variable_window_token_starts, variable_window_token_ends: int32 [all rows]: the
    first and the last key that each query sees, in place of causal. cum_seq_lens_kv is not read: some callers, FlashInfer's tests among
    them, give where lists of pages begin. With return_lse also LSE [all rows, hq], of base 2."""
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
    )
    _refuse_two_tables(uses_shared_paged_kv_idx)
    check_tensor("query", query, "all rows, hq, d")
    seq_lens = check_ints("seq_lens", signed(seq_lens))
    check_sequences(batch_size, "seq_lens", seq_lens.numel())
    rows = rows_of(query, seq_lens.numel(), None, cum_seq_lens_q, max_q_len)
    scores, scales = scaled(bmm1_scale, bmm2_scale, causal, window_left)
    if variable_window_token_starts is not None or variable_window_token_ends is not None:
        seen = _of_windows(query, rows, variable_window_token_starts, variable_window_token_ends)
        for name, side in (("window_left", window_left), ("window_right", window_right)):
            if side >= 0:
                raise InvalidArgument(f"{name} is {side} with a window for each query: leave it out.")
        scores = scores._replace(causal=False, seen=seen)
    elif causal and window_right > 0:
        raise InvalidArgument(
            f"window_right is {window_right}, but causal is True: give 0 or -1, or causal=False."
        )
    elif window_right >= 0 and not causal:
        (text,) = window_text(AT_LAST, None, "window_right")
        scores = scores._replace(seen=Seen(text, {"window_right": int(window_right)}))
    results = (out, out_dtype, lse, return_lse, sinks)
    return over_table(
        query, kv_cache, kv_layout, block_tables, seq_lens, max_kv_len, rows, scores, scales, *results
    )


def _of_windows(query: Tensor, rows: Rows, starts: Any, ends: Any) -> Seen:
    """The first and the last key that each query sees, int32 [all rows] each."""
    if starts is None or ends is None:
        raise InvalidArgument(
            "variable_window_token_starts and variable_window_token_ends come together: give both, or neither."
        )
    for name, given in (("starts", starts), ("ends", ends)):
        if not isinstance(given, Tensor) or given.dtype != torch.int32 or given.shape != query.shape[:1]:
            raise InvalidArgument(
                f"variable_window_token_{name} is {describe(given)}: it must be int32 [{query.shape[0]}], a key for each row of query."
            )
    row, captures = of_row(rows, "window_rows")
    captures.update(window_starts=starts, window_ends=ends)
    return Seen(f"kv >= window_starts[{row}] && kv <= window_ends[{row}]", captures)


def prepare_balanced_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    block_tables: Tensor,
    seq_lens: Tensor,
    workspace_buffer: Tensor,
    *,
    sm_scale: float | None = None,
    q_len_per_req: int = 1,
    out: Tensor | None = None,
    kv_layout: str = "HND",
    backend: str = "cake",
) -> Any:
    """What launches trtllm_batch_decode_with_kv_cache() on these tensors when it is called, and returns O, which is always `out`."""
    room = block_tables.shape[1] * unpacked(kv_cache, check_layout(kv_layout))[0].shape[2]
    return functools.partial(
        trtllm_batch_decode_with_kv_cache,
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        room,
        query.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        out=torch.empty_like(query) if out is None else out,
        kv_layout=kv_layout,
        q_len_per_req=q_len_per_req,
    )


@in_words(cum_seq_lens_q="q_cu_seq_lens", max_q_len="q_len_per_req")
def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Any:
    """trtllm_batch_decode_with_kv_cache() with another order of arguments, and pages [rows of a page, hkv, d] by default."""
    return trtllm_batch_decode_with_kv_cache(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        window_left,
        out,
        sinks=sinks,
        kv_layout=kv_layout,
        q_len_per_req=q_len_per_req,
        o_scale=o_scale,
        mask=mask,
        max_q_len=None if q_cu_seq_lens is None else q_len_per_req,
        cum_seq_lens_q=q_cu_seq_lens,
        kv_cache_sf=kv_cache_sf,
    )


@in_words(
    block_tables="page_table",
    cum_seq_lens_q="q_cu_seq_lens",
    max_q_len="q_seq_len",
    q_len_per_req="q_seq_len",
)
def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: Any = 1.0,
    kv_scale: Any = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
) -> None:
    """Writes O into output, of q [sequences, 1, hq, d] or [sequences, 1, q_seq_len, hq, d], or with q_cu_seq_lens [all rows, hq, d].

    Scores are q_scale * kv_scale / sqrt(d), and O is multiplied with kv_scale. sliding_win_size: keys that a query sees; 0: all.
    mask: bits, uint16 [sequences, q_seq_len, words], or of all rows, with words of a multiple of 32 bits: which drafts a draft sees;
    None: those before it and itself. sinks: float32, of hq elements."""
    refuse(
        k_sf_cache=k_sf_cache,
        v_sf_cache=v_sf_cache,
        rcp_out_scale=None if rcp_out_scale == 1 else rcp_out_scale,
    )
    cache = f"k_cache is {describe(k_cache)}, by kv_layout {kv_layout}"
    k, _ = unpacked((k_cache, v_cache), check_layout(kv_layout))
    check_number("num_kv_heads", num_kv_heads, k.shape[1], cache)
    check_number("page_size", page_size, k.shape[2], cache)
    query, written = q.reshape(-1, *q.shape[-2:]), flattened("output", output)
    lengths = check_ints("seq_lens", signed(seq_lens).reshape(-1))
    rows = rows_of(query, lengths.numel(), q_seq_len, q_cu_seq_lens, q_seq_len)
    scores = Scores(
        None,
        rows.longest > 1 and mask is None,
        sliding_win_size - 1 if sliding_win_size > 0 else -1,
        seen=None if mask is None or rows.longest == 1 else of_drafts(mask, rows),
    )
    over_table(
        query,
        (k_cache, v_cache),
        kv_layout,
        page_table,
        lengths,
        None,
        rows,
        scores,
        Scales(q_scale, kv_scale, kv_scale),
        written,
        sinks=sinks,
    )


@in_words(seq_lens="actual_seq_lens_kv", max_seq_len="max_sequence_kv")
def cudnn_batch_decode_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: Tensor | None = None,
    block_tables: Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: Tensor | None = None,
    batch_offsets_o: Tensor | None = None,
    batch_offsets_k: Tensor | None = None,
    batch_offsets_v: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    lse: Tensor | None = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: Tensor | None = None,
) -> Any:
    """O [all rows, hq, d] of q [all rows, hq, d] over pages k_cache, v_cache [pages, hkv, rows of a page, d] by block_tables, int32
    [sequences, pages of the longest]; with return_lse also LSE [all rows, hq], of base 2.

    actual_seq_lens_kv: int32, of as many elements as sequences. Several queries of a sequence, q_len_per_req, are causal, the last
    one at the last key. batch_offsets_q and batch_offsets_o say what the shapes say, as there, and are compared on the CPU alone."""
    refuse(batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
    if block_tables is None or actual_seq_lens_kv is None:
        raise InvalidArgument(
            "block_tables or actual_seq_lens_kv is None: give both, as K and V are in pages."
        )
    check_tensor("q", q, "all rows, hq, d")
    lengths = check_ints("actual_seq_lens_kv", actual_seq_lens_kv.reshape(-1).to(q.device))
    rows = rows_of(q, lengths.numel(), q_len_per_req, None, None)
    if batch_offsets_q is not None or batch_offsets_o is not None:
        starts = torch.arange(lengths.numel() + 1) * rows.longest
        check_offsets("batch_offsets_q", batch_offsets_q, starts, q.stride(0))
        row_of_out = q.shape[1] * v_cache.shape[-1] if out is None else out.stride(0)
        check_offsets("batch_offsets_o", batch_offsets_o, starts, row_of_out)
    scores, scales = scaled(float(scale), None, rows.longest > 1, window_left)
    cache, results = (k_cache, v_cache), (out, None, lse, return_lse, sinks)
    return over_table(q, cache, "HND", block_tables, lengths, max_sequence_kv, rows, scores, scales, *results)

"""FlashInfer's functions for packed queries, which have no plan()."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._named import AT_LAST
from .._tensors import describe
from .._words import in_words
from ..errors import InvalidArgument, Unsupported, WrongType
from ._rows import Rows, check_ints, check_tensor, heads_first
from ._said import check_offsets, check_sequences, check_values, lengths_of
from ._scores import Scales, Scores, Seen, one_of, refuse
from ._tables import over_keys, over_table, scaled, signed

_LN2 = math.log(2)


def _over_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    keys: tuple[Tensor, int],
    scores: Scores,
    scales: Scales,
    out: Tensor | None,
    out_dtype: Any = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    sinks: Any = None,
) -> Any:
    """over_keys() of q, k, v [all rows, heads, d]. keys: where each sequence's begin, and how many the longest has."""
    check_tensor("q", q, "all rows, hq, d")
    k, v = (heads_first(check_tensor(n, x, "all rows, hkv, d"), "NHD")[None] for n, x in (("k", k), ("v", v)))
    where = {"cu_seqlens_kv": keys[0], "max_seqlen_kv": keys[1]}
    return over_keys(q, k, v, rows, scores, scales, out, out_dtype, lse, return_lse, one_of(sinks), **where)


@in_words(cu_seqlens_q="qo_segment_offsets", max_seqlen_q="max_qo_len", cu_seqlens_kv="kv_segment_offsets")
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_segment_offsets: Tensor,
    kv_segment_offsets: Tensor,
    plan_info: Any = None,
    max_qo_len: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    o_scale: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """O [all rows, hq, d_v] and LSE [all rows, hq], of base 2, or None, of packed q, k, v [all rows, heads, d]."""
    refuse(o_scale=None if o_scale == 1 else o_scale)
    rows = Rows(qo_segment_offsets, q.shape[0] if max_qo_len is None else max_qo_len)
    keys = (kv_segment_offsets, k.shape[0])
    scores, scales = Scores(sm_scale, causal), Scales(q_scale, k_scale, v_scale)
    wants_lse = return_lse or lse is not None
    found = _over_packed(q, k, v, rows, keys, scores, scales, out, None, lse, wants_lse)
    return found if wants_lse else (found, None)


_OF_PACKED = {
    "cu_seqlens_q": "cum_seq_lens_q",
    "max_seqlen_q": "max_q_len",
    "cu_seqlens_kv": "cum_seq_lens_kv",
    "max_seqlen_kv": "max_kv_len",
}


@in_words(**_OF_PACKED)
def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: Any = (None, None, None, None),
    num_elts_per_sage_attn_blk: Any = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Any:
    """O [all rows, hq, d_v] of packed query, key and value [all rows, heads, d]; with return_lse also LSE [all rows, hq], of base 2.

    bmm1_scale, bmm2_scale: as of trtllm_batch_decode_with_kv_cache(). Sequences may have no queries or no keys: O is then 0 and
    LSE -inf. o_sf_scale is not read: O is not quantized. seq_lens says what cum_seq_lens_kv does, and is compared on the CPU alone."""
    refuse(
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        sage_attn_sfs=None if all(x is None for x in sage_attn_sfs) else sage_attn_sfs,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
    )
    check_sequences(batch_size, "cum_seq_lens_q", cum_seq_lens_q.numel() - 1)
    check_values("seq_lens", signed(seq_lens), "cum_seq_lens_kv", lengths_of(cum_seq_lens_kv))
    scores, scales = scaled(bmm1_scale, bmm2_scale, is_causal, window_left)
    rows, keys = Rows(cum_seq_lens_q, max_q_len), (cum_seq_lens_kv, max_kv_len)
    where = (out, None, lse, return_lse, attention_sinks)
    return _over_packed(query, key, value, rows, keys, scores, scales, *where)


def _offsets(lengths: Tensor | None, offsets: Tensor | None, each: int, device: torch.device) -> Tensor:
    """Where sequences begin in packed rows, int32 [sequences + 1]. each: what offsets count of a row."""
    if lengths is not None:
        ends = signed(lengths).reshape(-1).to(device).cumsum(0)
        return torch.nn.functional.pad(ends, (1, 0)).int()
    if offsets is None:
        raise InvalidArgument(
            "Neither the lengths of sequences are given nor their offsets: give one of them."
        )
    return (check_ints("batch_offsets", offsets.to(device), 2) // each).int()


@in_words(
    seq_lens="actual_seq_lens_kv",
    cum_seq_lens_q="actual_seq_lens_q",
    cu_seqlens_q="actual_seq_lens_q",
    cu_seqlens_kv="actual_seq_lens_kv",
    max_q_len="max_token_per_sequence",
    max_seqlen_q="max_token_per_sequence",
    max_seq_len="max_sequence_kv",
    max_seqlen_kv="max_sequence_kv",
)
def cudnn_batch_prefill_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: Tensor | None = None,
    actual_seq_lens_kv: Tensor | None = None,
    block_tables: Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    batch_offsets_q: Tensor | None = None,
    batch_offsets_o: Tensor | None = None,
    batch_offsets_k: Tensor | None = None,
    batch_offsets_v: Tensor | None = None,
    batch_offsets_stats: Tensor | None = None,
    batch_offsets_units: str = "elements",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: Any = None,
    lse_base: str = "log2",
    window_left: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O [all rows, hq, d_v] and LSE [all rows, hq], or None, of packed q [all rows, hq, d] over pages k_cache, v_cache [pages, hkv,
    rows of a page, d] by block_tables, int32 [sequences, pages of the longest], or over packed rows [all rows, hkv, d].

    actual_seq_lens_q, actual_seq_lens_kv: int32, of as many elements as sequences; where one is left out, batch_offsets_q or
    batch_offsets_k says it, in elements of the tensor or in rows ("tokens"). Sequences are packed without gaps, and so other offsets
    are compared with these on the CPU, and not read on a GPU. The last query is at the last key. lse_base: "log2" or "ln"."""
    if batch_offsets_units not in ("elements", "tokens") or lse_base not in ("log2", "ln"):
        raise InvalidArgument(
            f"batch_offsets_units is {batch_offsets_units!r} and lse_base {lse_base!r}: give elements or tokens, and log2 or ln."
        )
    if lse is not None and lse.dim() != 2:
        raise Unsupported(f"lse is {describe(lse)}: give [all rows, hq], which is not padded.")
    tokens = batch_offsets_units == "tokens"
    starts = _offsets(actual_seq_lens_q, batch_offsets_q, 1 if tokens else q.stride(0), q.device)
    rows = Rows(starts, max_token_per_sequence)
    row_of_out = q.shape[1] * v_cache.shape[-1] if out is None else out.stride(0)
    of_queries = (
        ("q", batch_offsets_q, q.stride(0)),
        ("o", batch_offsets_o, row_of_out),
        ("stats", batch_offsets_stats, q.shape[1]),
    )
    for name, given, row in of_queries:
        check_offsets(f"batch_offsets_{name}", given, starts, 1 if tokens else row)
    scores = Scores(float(scale), causal, -1 if window_left is None else window_left)
    scales = Scales(q_scale, k_scale, v_scale)
    wants_lse = return_lse or lse is not None
    where = (out, o_data_type, lse, wants_lse, sinks)
    if block_tables is None:
        keys = _offsets(actual_seq_lens_kv, batch_offsets_k, 1 if tokens else k_cache.stride(0), q.device)
        for name, given, x in (("k", batch_offsets_k, k_cache), ("v", batch_offsets_v, v_cache)):
            check_offsets(f"batch_offsets_{name}", given, keys, 1 if tokens else x.stride(0))
        found = _over_packed(q, k_cache, v_cache, rows, (keys, max_sequence_kv), scores, scales, *where)
    elif actual_seq_lens_kv is None:
        raise InvalidArgument("actual_seq_lens_kv is None: with block_tables give each sequence's keys.")
    else:
        refuse(batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
        lengths = actual_seq_lens_kv.reshape(-1).to(q.device)
        cache = (k_cache, v_cache)
        found = over_table(
            q, cache, "HND", block_tables, lengths, max_sequence_kv, rows, scores, scales, *where
        )
    if wants_lse and lse_base == "ln":
        found[1].mul_(_LN2)
    return found if wants_lse else (found, None)


_CHUNK = f"kv >= ({AT_LAST}) / chunk * chunk"  # keys of a query's own chunk


@in_words(max_seq_len="max_kv_len", **_OF_PACKED)
def trtllm_fmha_v2_prefill(
    qkv: Any,
    input_layout: str,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    block_tables: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: Any = None,
    sinks: Any = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int | None = -1,
    chunked_attention_size: int | None = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Tensor:
    """O [all rows, hq, d] of packed queries.

    input_layout, and what qkv is: PACKED_QKV [all rows, 3, h, d]; CONTIGUOUS_Q_KV (q, [all rows, 2, hkv, d]); SEPARATE_Q_K_V (q, k,
    v); Q_PAGED_KV_HND and Q_PAGED_KV_NHD (q, [pages, 2, ..]) with block_tables, int32 [sequences, pages of the longest].
    mask_mode: causal, sliding_window (window_left keys before a query's own), chunked (keys of its own chunk of
    chunked_attention_size), each with the last query at the last key; or padding, which masks nothing. pos_encoding_mode: alibi."""
    refuse(
        save_softmax_stats=save_softmax_stats,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor or None,
    )
    mode, encoding = (mask_mode or "causal").lower(), (pos_encoding_mode or "none").lower()
    if mode not in ("causal", "sliding_window", "chunked", "padding") or encoding not in ("none", "alibi"):
        raise InvalidArgument(
            f"mask_mode is {mask_mode!r} and pos_encoding_mode {pos_encoding_mode!r}: give causal, sliding_window, chunked or "
            "padding, and None or alibi."
        )
    window_left, chunked_attention_size = (
        -1 if window_left is None else window_left,
        chunked_attention_size or 0,
    )
    for name, size, own in (
        ("window_left", window_left + 1, "sliding_window"),
        ("chunked_attention_size", chunked_attention_size, "chunked"),
    ):
        if size > 0 and mode != own:
            raise InvalidArgument(
                f'{name} is {size - (own != "chunked")}, but mask_mode is {mode!r}: give mask_mode="{own}", or leave {name} out.'
            )
    if mode == "chunked" and not chunked_attention_size:
        raise InvalidArgument(
            "mask_mode is 'chunked', but chunked_attention_size is 0: give the keys of a chunk, or mask_mode=\"causal\"."
        )
    check_sequences(batch_size, "cum_seq_lens_q", cum_seq_lens_q.numel() - 1)
    scores, scales = scaled(bmm1_scale, bmm2_scale, mode != "padding", window_left)
    scores = scores._replace(logits_soft_cap=logits_soft_cap_scale, alibi=encoding == "alibi")
    if chunked_attention_size:
        scores = scores._replace(seen=Seen(_CHUNK, {"chunk": int(chunked_attention_size)}))
    rows, where = Rows(signed(cum_seq_lens_q), max_q_len), (out, out_dtype, None, False, sinks)
    q, kv, *v = _parts(qkv, input_layout)
    if input_layout.startswith("Q_PAGED"):
        if block_tables is None:
            raise InvalidArgument(f"block_tables is None: {input_layout} needs the pages of each sequence.")
        lengths, layout = check_ints("seq_lens", signed(seq_lens)), input_layout[-3:]
        return over_table(  # type: ignore[no-any-return]
            q, kv, layout, block_tables, lengths, max_kv_len, rows, scores, scales, *where
        )
    check_values("seq_lens", signed(seq_lens), "cum_seq_lens_kv", lengths_of(signed(cum_seq_lens_kv)))
    keys = (signed(cum_seq_lens_kv), max_kv_len)
    return _over_packed(q, kv, v[0], rows, keys, scores, scales, *where)  # type: ignore[no-any-return]


def _parts(qkv: Any, layout: str) -> tuple[Any, ...]:
    """Q, K and V, or Q and the pages of both."""
    counts = {"CONTIGUOUS_Q_KV": 2, "SEPARATE_Q_K_V": 3, "Q_PAGED_KV_HND": 2, "Q_PAGED_KV_NHD": 2}
    if layout == "PACKED_QKV":
        return check_tensor("qkv", qkv, "all rows, 3, h, d").unbind(1)
    if layout not in counts:
        raise InvalidArgument(f"input_layout is {layout!r}: give PACKED_QKV, {', '.join(counts)}.")
    if not isinstance(qkv, (tuple, list)) or len(qkv) != counts[layout]:
        raise WrongType(f"qkv is {describe(qkv)}: with {layout} give {counts[layout]} tensors.")
    if layout == "CONTIGUOUS_Q_KV":
        return (qkv[0], *check_tensor("kv", qkv[1], "all rows, 2, hkv, d").unbind(1))
    return tuple(qkv)

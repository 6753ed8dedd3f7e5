"""FlashInfer's functions for one sequence, and trtllm_batch_decode_with_kv_cache()."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument, Unsupported
from ._rows import Rows, check_ints, check_layout, check_tensor, heads_first, results, run, unpacked
from ._scores import Scales, Scores, check_dtypes, dtype_of, read_mask, read_scores, refuse, type_of_out


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """O [hq, d] of q [hq, d] and k, v [keys, hkv, d], or by HND [hkv, keys, d]; with return_lse also LSE [hq], of base 2."""
    check_tensor("q", q, "hq, d")
    k, v = _one_sequence(k, v, kv_layout)
    rope = {"rope": (rope_scale, rope_theta), "rope_start": k.shape[2] - 1}
    scores = read_scores(pos_encoding_mode, logits_soft_cap, False, window_left, sm_scale, **rope)
    out_dtype = type_of_out(q.dtype)
    check_dtypes(q.dtype, k.dtype, out_dtype)
    scales = Scales(q_scale, k_scale, v_scale)
    found = results(run(q[None], k, v, Rows(), scores, scales, out_dtype, None, return_lse), None)
    return (found[0][0], found[1][0]) if return_lse else found[0]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: Any = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """O [queries, hq, d_v] of q [queries, hq, d] and k, v [keys, hkv, d], or by HND [hkv, keys, d]; with return_lse also
    LSE [queries, hq], of base 2. The last query is at the last key."""
    refuse(kv_cache_sf=kv_cache_sf)
    check_tensor("q", q, "queries, hq, d")
    k, v = _one_sequence(k, v, kv_layout)
    out_dtype = dtype_of(o_dtype, type_of_out(q.dtype))
    check_dtypes(q.dtype, k.dtype, out_dtype)
    pairs = torch.tensor([q.shape[0] * k.shape[2]])
    mask, start = read_mask(custom_mask, packed_custom_mask, pairs, q.device)
    rope = {"rope": (rope_scale, rope_theta), "rope_start": k.shape[2] - q.shape[0]}
    scores = read_scores(
        pos_encoding_mode, logits_soft_cap, causal, window_left, sm_scale, mask, start, **rope
    )
    scales = Scales(scale_q, _product(scale_k, k_scale), _product(scale_v, v_scale))
    rows = Rows(None, q.shape[0])
    return results(run(q, k, v, rows, scores, scales, out_dtype, None, return_lse), None)


def _one_sequence(k: Any, v: Any, kv_layout: str) -> tuple[Tensor, Tensor]:
    """[1, hkv, keys, d] of each."""
    dims = "keys, hkv, d" if check_layout(kv_layout) == "NHD" else "hkv, keys, d"
    k, v = check_tensor("k", k, dims), check_tensor("v", v, dims)
    return heads_first(k, kv_layout)[None], heads_first(v, kv_layout)[None]


def _product(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a * b


single_decode_with_kv_cache_return_lse = functools.partial(single_decode_with_kv_cache, return_lse=True)
single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


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
    bf16q_fp8kv_transform_mode: str | None = None,
) -> Any:
    """O [all rows, hq, d] of query [all rows, hq, d] over pages by block_tables, int32 [sequences, pages of the longest].

    bmm1_scale: what scores are multiplied with, all scales in it, a number or float32 [1]; bmm2_scale: likewise of O.
    Several queries of a sequence are causal, the last one at the last key. cum_seq_lens_q, with max_q_len: they are packed.
    With return_lse also LSE [all rows, hq], of base 2."""
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        mask=mask,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_cache_sf=kv_cache_sf,
        o_scale=None if o_scale in (None, 1) else o_scale,
        bmm1_scale_log2=bmm1_scale_log2,
        enable_block_sparse_attention=enable_block_sparse_attention,
    )
    if not uses_shared_paged_kv_idx:
        raise Unsupported("uses_shared_paged_kv_idx is False: K and V are in the same pages here.")
    check_tensor("query", query, "all rows, hq, d")
    check_tensor("block_tables", block_tables, "sequences, pages of the longest")
    check_ints("seq_lens", seq_lens)
    k, v = unpacked(kv_cache, check_layout(kv_layout))
    chosen = dtype_of(out_dtype, type_of_out(query.dtype) if out is None else out.dtype)
    check_dtypes(query.dtype, k.dtype, chosen)
    if cum_seq_lens_q is None:
        rows = Rows(None, q_len_per_req or 1)
        if query.shape[0] != rows.longest * seq_lens.numel():
            raise InvalidArgument(
                f"query has {query.shape[0]} rows, but seq_lens is of {seq_lens.numel()} sequences, q_len_per_req is "
                f"{rows.longest}: give cum_seq_lens_q and max_q_len for other numbers of queries."
            )
    else:
        rows = Rows(cum_seq_lens_q, query.shape[0] if max_q_len is None else max_q_len)
    if isinstance(bmm1_scale, Tensor):  # on the device: one factor of scores, whose own is 1
        scores, scales = Scores(1.0, rows.longest > 1, window_left), Scales(None, bmm1_scale, bmm2_scale)
    else:
        scores = Scores(float(bmm1_scale), rows.longest > 1, window_left)
        scales = Scales(None, None, bmm2_scale)
    if isinstance(sinks, (list, tuple)):
        sinks = sinks[0]
    found = run(
        query,
        k,
        v,
        rows,
        scores,
        scales,
        chosen,
        out,
        return_lse or lse is not None,
        sinks=sinks,
        page_table=block_tables,
        kv_lengths=seq_lens.int(),
        max_seqlen_kv=max_seq_len,
    )
    return results(found, lse, return_lse)

"""FlashInfer's functions for latent attention over a table of pages, or over a list of tokens for each query. They have no plan()."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._attention import attention
from .._tensors import describe
from .._transforms import refuse_lost_gradients
from .._words import in_words, renamed
from ..errors import Error, InvalidArgument, Unsupported
from ._rows import Rows, check_ints, check_table, check_tensor, flattened
from ._said import check_number
from ._scores import LOG2E, constant, one_of, refuse
from ._tables import WORDS, rows_of, signed

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_PACKED = {656: "fp8_ds_mla", 528: "fp8_ds_mla_nope"}  # formats by the bytes of a row


def _number(name: str, scale: Any) -> float:
    if isinstance(scale, Tensor):
        raise Unsupported(f"{name} is {describe(scale)}: for latents give a number.")
    return float(scale)


def _codes(latents: Tensor, bmm2_scale: float) -> tuple[Tensor, dict[str, Any], float]:
    """K as attention() takes it, its arguments for 8 bits, and the scale of it that bmm1_scale has, too."""
    if latents.dtype == torch.uint8:
        form = _PACKED.get(latents.shape[-1])
        if form is None:
            raise InvalidArgument(
                f"kv_cache is {describe(latents)}: give rows of 656 bytes, or of 528 without a rotated part."
            )
        return latents, {"k_format": form}, 1.0
    if latents.dtype in _FORMATS:
        scale = constant(bmm2_scale, latents.device)
        return latents.view(torch.uint8), {"k_format": _FORMATS[latents.dtype], "k_scale": scale}, bmm2_scale
    return latents, {}, 1.0


def _attend(
    q: Tensor,
    latents: Tensor,
    rank: int,
    rows: Rows,
    scales: tuple[float, float],
    out: Tensor | None,
    wants_lse: bool,
    more: dict[str, Any],
) -> tuple[Tensor, Any]:
    """O [all rows, h, rank] and natural LSE [all rows, h] of q [all rows, h, columns] over latents [pages, rows of a page, columns]."""
    if q.dtype in _FORMATS:
        q = q.to(torch.bfloat16)  # which has all codes
    codes, of_codes, in_k = _codes(latents, scales[1])
    direct = out is not None and out.dtype == q.dtype
    found = attention(
        rows.of(q),
        codes[:, None],
        v_columns=rank,
        scale=scales[0] / in_k,
        return_lse=wants_lse,
        out=rows.of(out) if direct and out is not None else None,
        **of_codes,
        **more,
    )
    o4, lse = found if wants_lse else (found, None)
    o = out if direct and out is not None else o4.transpose(1, 2).flatten(0, 1)
    if in_k == 1 and scales[1] != 1:
        o.mul_(scales[1])
    if out is not None and not direct:
        o = out.copy_(o)
    return o, None if lse is None else rows.lse(lse).transpose(0, 1)


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """O [sequences, queries, h, rank] of query [sequences, queries, h, rank + rope], or with cum_seq_lens_q and max_q_len of packed rows
    [all rows, h, ..], over kv_cache [pages, rows of a page, rank + rope] or [pages, 1, ..]; with return_lse also LSE [all rows, h].

    block_tables: int32 [sequences, pages of the longest]; seq_lens: int32 [sequences]. Queries are causal, the last one at the last key.
    With sparse_mla_top_k: int32 [sequences, queries, top-k] or [all rows, top-k]: the rows of the cache, all pages one after another,
    that each query sees; -1: none. seq_lens, or sparse_mla_top_k_lens, then says how many first entries of each list count, or of
    each sequence; None: all.
    kv_cache: query's type, float8_e4m3fn or float8_e5m2, or uint8 with rows of 656 bytes, "fp8_ds_mla", or of 528,
    "fp8_ds_mla_nope". bmm1_scale is all that scores
    are multiplied with, bmm2_scale all that O is: numbers. Queries of 8 bits become bfloat16 in a launch of its own. return_lse_base:
    "base2", the default, or "basee"."""
    refuse(
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax,
        enable_dcp=enable_dcp or None,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )
    if not uses_shared_paged_kv_idx:
        raise Unsupported("uses_shared_paged_kv_idx is False: latents are in one cache here.")
    if (cp_world, cp_rank) != (1, 0):
        raise Unsupported(
            f"cp_world is {cp_world} and cp_rank {cp_rank}: flashjit.flashinfer has no ranks' parts of latents; leave them out."
        )
    if return_lse_base not in (None, "base2", "basee"):
        raise InvalidArgument(f"return_lse_base is {return_lse_base!r}: give base2 or basee.")
    if kv_lora_rank + qk_rope_head_dim != query.shape[-1]:
        raise InvalidArgument(
            f"kv_lora_rank is {kv_lora_rank} and qk_rope_head_dim {qk_rope_head_dim}, but query is {describe(query)}: their sum must be "
            f"its columns, {query.shape[-1]}."
        )
    latents = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
    check_tensor("kv_cache", latents, "pages, rows of a page, columns")
    q = query.reshape(-1, *query.shape[-2:])
    each = query.shape[1] if query.dim() == 4 else 1
    if sparse_mla_top_k > 0:
        lens = sparse_mla_top_k_lens if sparse_mla_top_k_lens is not None else seq_lens
        check_number(
            "sparse_mla_top_k",
            sparse_mla_top_k,
            block_tables.shape[-1],
            f"block_tables is {describe(block_tables)}",
        )
        rows, latents, more = _of_lists(latents, block_tables, lens, q.shape[0])
    elif sparse_mla_top_k_lens is not None:
        raise InvalidArgument(
            "sparse_mla_top_k_lens is given, but sparse_mla_top_k is 0: give the length of lists, or leave it out."
        )
    else:
        lengths = check_ints("seq_lens", signed(seq_lens))
        rows = rows_of(q, lengths.numel(), each, cum_seq_lens_q, max_q_len)
        table = check_table("block_tables", signed(block_tables), lengths.numel())
        more = {
            **rows.named(),
            "page_table": table,
            "kv_lengths": lengths.int(),
            "max_seqlen_kv": min(max_seq_len, table.shape[1] * latents.shape[1]),
            "causal": rows.longest > 1,
        }
    more["sinks"] = one_of(sinks)
    scales = _number("bmm1_scale", bmm1_scale), _number("bmm2_scale", bmm2_scale)
    wants_lse = return_lse or lse is not None
    refuse_lost_gradients("flashjit.flashinfer", query, kv_cache)
    with torch.no_grad():
        written = _memory_of(out, lse, (*q.shape[:2], kv_lora_rank))
        try:
            o, natural = _attend(q, latents, kv_lora_rank, rows, scales, written, wants_lse, more)
        except Error as error:
            raise renamed(error, {**WORDS, "indices": "block_tables"}) from None
        o = o.reshape(*query.shape[:-1], kv_lora_rank) if out is None else out
        if natural is None:
            return o
        found = natural if return_lse_base == "basee" else natural * LOG2E
        found = found.contiguous() if lse is None else lse.copy_(found.reshape(lse.shape))
        return (o, found) if return_lse else o


def _memory_of(out: Any, lse: Any, size: tuple[int, ...]) -> Tensor | None:
    """O [all rows, h, rank] to write to, if any, where O and LSE have that size."""
    if lse is not None and (
        lse.dtype != torch.float32 or lse.shape[-1] != size[1] or lse.numel() != size[0] * size[1]
    ):
        raise InvalidArgument(f"lse is {describe(lse)}: it must be float32 {list(size[:2])}, [all rows, h].")
    if out is None:
        return None
    written = flattened("out", out)
    if tuple(written.shape) != size:
        raise InvalidArgument(f"out is {describe(out)}: it must be {list(size)}, [all rows, h, rank].")
    return written


def _of_lists(
    latents: Tensor, lists: Tensor, counts: Tensor | None, rows: int
) -> tuple[Rows, Tensor, dict[str, Any]]:
    """All rows of the cache as one sequence, whose queries are all rows."""
    lists = signed(lists)
    if lists.dtype != torch.int32 or lists[..., 0].numel() != rows:
        raise InvalidArgument(
            f"block_tables is {describe(lists)}: it must be int32, of query's {rows} rows, a list for each."
        )
    lists = lists.reshape(rows, lists.shape[-1])
    given: Any = lists[None, :, None]
    if counts is not None:
        counts = check_ints("seq_lens", signed(counts).reshape(-1))
        each = rows // max(counts.numel(), 1)
        if each * counts.numel() != rows:
            raise InvalidArgument(
                f"seq_lens is of {counts.numel()} sequences, and query has {rows} rows: give one number for each row, or for each of "
                "sequences with equally many."
            )
        back = torch.arange(each - 1, -1, -1, device=counts.device)
        counts = (counts[:, None] - back).reshape(-1) if each > 1 else counts
        given = (given, counts.clamp(0, lists.shape[1]).int()[None])
    flat = latents.flatten(0, 1)[None]
    return Rows(None, rows), flat, {"indices": given}


def trtllm_prefill_with_kv_cache_mla(*args: Any, **named: Any) -> Any:
    """trtllm_batch_decode_with_kv_cache_mla(), for several queries of a sequence."""
    return trtllm_batch_decode_with_kv_cache_mla(*args, **named)


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """trtllm_batch_decode_with_kv_cache_mla() with fewer arguments."""
    return trtllm_batch_decode_with_kv_cache_mla(  # type: ignore[no-any-return]
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        0,
        out,
        bmm1_scale,
        bmm2_scale,
        sinks,
    )


@in_words(block_tables="page_table")
def xqa_mla(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    page_size: int,
    q_scale: Any = 1.0,
    kv_scale: Any = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """Writes O into output [sequences, 1, h, rank], of q [sequences, 1, h, columns] over k_cache [all rows, columns], pages of
    page_size rows one after another. V is the first columns of K, as many as output has: v_cache is the same tensor. Scores are
    q_scale * kv_scale, numbers that also have the softmax's scale, and O is multiplied with kv_scale."""
    if v_cache.data_ptr() != k_cache.data_ptr():
        raise Unsupported(
            "v_cache has other memory than k_cache: V is the first columns of K here; give k_cache twice."
        )
    scale = _number("q_scale", q_scale) * _number("kv_scale", kv_scale)
    if (
        k_cache.dim() > 2
    ):  # [pages, rows of a page, columns], or with a dimension for the one head before or after the rows
        rows = math.prod(k_cache.shape[1:-1])
        check_number("page_size", page_size, rows, f"k_cache is {describe(k_cache)}")
    elif k_cache.shape[0] % page_size:
        raise InvalidArgument(
            f"page_size is {page_size}, but k_cache is {describe(k_cache)}: give whole pages."
        )
    pages = k_cache.reshape(-1, page_size, k_cache.shape[-1])
    room = page_table.shape[1] * page_size
    lengths, rank = signed(seq_lens).reshape(-1), output.shape[-1]
    trtllm_batch_decode_with_kv_cache_mla(
        q,
        pages,
        workspace_buffer,
        0,
        rank,
        q.shape[-1] - rank,
        page_table,
        lengths,
        room,
        0,
        output,
        scale,
        float(kv_scale),
    )

"""Latent attention of vLLM without a GPU, for vllm_dry.py: what its CUDA kernels around the backend do, by PyTorch.

With a cache of FP8 the latents are rounded before anything reads them, in vLLM and in transformers, so that their tokens are comparable:
vLLM itself attends to the unrounded ones of a step's own tokens, and to the rounded ones of the others. Sparse attention has lists by
place, the first keys of a sequence and the last ones, as vLLM's indexer is kernels of a GPU."""

from __future__ import annotations

import math
from typing import Any


def put_on_cpu(cache_type: str) -> None:
    """After vLLM is imported."""
    import torch
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.attention.mla_attention as layers
    import vllm.model_executor.models.deepseek_v2 as models
    import vllm.v1.attention.backends.mla.prefill.flash_attn as prefill

    def concat_and_cache_mla(
        kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, scale: Any
    ) -> None:
        kept = slot_mapping.flatten() >= 0
        rows = torch.cat((kv_c, k_pe.reshape(len(kv_c), -1)), -1)[: len(kept)][kept]
        slots = slot_mapping.flatten()[kept]
        if kv_cache_dtype == PACKED:
            kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = packed(rows)
            return
        coded = kv_cache_dtype.startswith("fp8")
        pool = kv_cache.view(torch.float8_e4m3fn) if coded else kv_cache
        pool[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = (rows / scale if coded else rows).to(
            pool.dtype
        )

    def gather_and_maybe_dequant_cache(
        src_cache: Any,
        dst: Any,
        block_table: Any,
        cu_seq_lens: Any,
        token_to_seq: Any,
        num_tokens: int,
        kv_cache_dtype: str,
        scale: Any,
        seq_starts: Any = None,
    ) -> None:
        token = torch.arange(num_tokens)
        request = token_to_seq[:num_tokens].long()
        place = token - cu_seq_lens[request] + (0 if seq_starts is None else seq_starts[request])
        rows = src_cache[block_table[request, place // src_cache.shape[1]].long(), place % src_cache.shape[1]]
        if kv_cache_dtype.startswith("fp8"):
            rows = rows.view(torch.float8_e4m3fn).to(dst.dtype) * scale
        dst[:num_tokens] = rows

    def merge_attn_states(
        output: Any,
        prefix_output: Any,
        prefix_lse: Any,
        suffix_output: Any,
        suffix_lse: Any,
        output_lse: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        both = torch.stack((prefix_lse, suffix_lse))  # [2, heads, rows]
        total = both.logsumexp(0)
        a, b = (both - total).exp().nan_to_num(0).transpose(1, 2)[..., None]
        output.copy_(a * prefix_output + b * suffix_output)
        if output_lse is not None:
            output_lse.copy_(total)

    def mask_empty_context(lse: Any, output: Any, query_start_loc: Any, context_start_loc: Any) -> None:
        for i in (context_start_loc.diff() == 0).nonzero().flatten().tolist():
            rows = slice(int(query_start_loc[i]), int(query_start_loc[i + 1]))
            lse[:, rows], output[rows] = -math.inf, 0

    class Indexer(torch.nn.Module):
        def __init__(self, _: Any, config: Any, *args: Any, **__: Any) -> None:
            super().__init__()
            self.topk_tokens, self.topk_indices_buffer = config.index_topk, args[4]

        def forward(self, hidden_states: Any, _: Any, positions: Any, __: Any) -> Any:
            self.topk_indices_buffer[: len(positions)] = listed(positions, self.topk_tokens)
            return self.topk_indices_buffer

    models.Indexer = Indexer
    ops.concat_and_cache_mla = concat_and_cache_mla
    ops.gather_and_maybe_dequant_cache = gather_and_maybe_dequant_cache
    layers.merge_attn_states, layers.mask_empty_context = merge_attn_states, mask_empty_context
    prefill.flash_attn_varlen_func = varlen
    prefill.FlashAttnPrefillBackend.supports_mla_dimensions = classmethod(lambda *_: True)
    prefill.FlashAttnPrefillBackend.supported_dtypes = [torch.float32]
    if cache_type.startswith("fp8"):
        forward = layers.MLAAttention.forward

        def rounding(self: Any, q: Any, kv_c_normed: Any, k_pe: Any, *args: Any, **named: Any) -> Any:
            pair = rounded(kv_c_normed, cache_type), rounded(k_pe, cache_type)
            return forward(self, q, *pair, *args, **named)

        layers.MLAAttention.forward = rounding


PACKED = "fp8_ds_mla"
FIRST = 4  # keys of a sequence that all its queries see


def listed(positions: Any, topk: int) -> Any:
    """The keys that queries see, int32 [rows, top-k], the last ones first, -1 where there are no more."""
    import torch

    last = positions[:, None] - torch.arange(topk - FIRST)
    first = torch.arange(FIRST).expand(len(positions), -1)
    first = first.where(first < last[:, -1:], -1)
    return torch.cat((last.clamp(min=-1), first), 1).int()


def mask_of(model: Any, length: int) -> Any:
    """For transformers: None, or where a model has such lists, which pairs count."""
    import torch

    topk = getattr(model.config, "index_topk", None)
    if topk is None:
        return None
    lists = listed(torch.arange(length), topk).long()
    seen = torch.zeros(length, length + 1, dtype=torch.bool).scatter_(1, lists % (length + 1), True)[:, :-1]
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


def packed(rows: Any) -> Any:
    """Bytes of rows [rows, 576] as the format has them."""
    import flashjit

    return flashjit.quantize(rows[None, None].contiguous(), format=PACKED)[0][0, 0]


def rounded(x: Any, cache_type: str) -> Any:
    """Latents, or their rotated columns, as a cache keeps them."""
    import torch

    if cache_type != PACKED:
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    if x.shape[-1] == 64:
        return x.bfloat16().to(x.dtype)
    rows = x.reshape(-1, 512)
    kept = packed(torch.nn.functional.pad(rows, (0, 64)))
    scales = kept[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
    return (kept[:, :512].contiguous().view(torch.float8_e4m3fn).float() * scales).to(x.dtype).view(x.shape)


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
    out: Any = None,
    **_: Any,
) -> Any:
    """vLLM's own prefill: O [rows, heads, d_v] and LSE [heads, rows]."""
    import torch

    out = q.new_zeros(*q.shape[:2], v.shape[2]) if out is None else out
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        keys = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        score = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * softmax_scale
        if causal:
            score = score.masked_fill(torch.ones_like(score[0]).triu(1).bool(), -math.inf)
        lse[:, rows] = score.logsumexp(2)
        out[rows] = torch.einsum("hqk,khd->qhd", score.softmax(2), v[keys])
    return (out, lse) if return_softmax_lse else out


def round_in_transformers(model: Any, cache_type: str) -> None:
    """Latents of each layer, after their norm and their rotation."""
    import sys

    modeling: Any = sys.modules[type(model).__module__]
    name = "apply_rotary_emb" if hasattr(modeling, "apply_rotary_emb") else "apply_rotary_pos_emb_interleave"
    rotate = getattr(modeling, name)

    def rounding(*args: Any, **named: Any) -> Any:
        q, k = rotate(*args, **named)
        return q, rounded(k, cache_type)

    setattr(modeling, name, rounding)
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, __, found: rounded(found, cache_type))

"""Names of FlashInfer for attention that flashjit.flashinfer does not have, each with the reason."""

from __future__ import annotations

_FOUR_BITS = "it is for NVFP4, which flashjit has for O, but not for Q, K and V of FlashInfer's layout"
_DEVICE = (
    "it prepares tensors for one kernel of one GPU. Call a wrapper of batches, which has no such preparation"
)
_CAKE = "its arguments are one product's kernels. Call trtllm_batch_decode_with_kv_cache or trtllm_batch_context_with_kv_cache"
_SCORES = "it computes an indexer's scores, not attention. Keep FlashInfer's, and give the tokens to trtllm_batch_decode_with_kv_cache_mla"
_SAGE = "its blocks of scales are of kernels for Q and K of INT8, with V of FP8. Call flashjit.attention() with q of 8 bits"
_SPARSE = "its bitmaps of blocks of four keys are one model's. Give the keys of each query as indices of flashjit.attention()"
_DSV4 = "its caches of two kinds are one FlashInfer layout. Call flashjit.attention_over(), which has two caches with lists of their own"

ABSENT = {
    "BatchDecodeMlaWithPagedKVCacheWrapper": "FlashInfer has BatchMLAPagedAttentionWrapper in its place, and so has flashjit",
    "FP8MQATopKWrapper": _SCORES,
    "cake_batch_context_with_kv_cache": _CAKE,
    "cake_batch_decode_with_kv_cache": _CAKE,
    "cake_mla_nvfp4_paged_decode": _FOUR_BITS,
    "cake_mla_varq_dcp_decode": _CAKE,
    "fmha_v2_prefill_deepseek": "it has no packed sequences. Call trtllm_fmha_v2_prefill or flashjit.attention()",
    "fp4_paged_mqa_logits": _SCORES,
    "fp8_paged_mqa_logits": _SCORES,
    "launch_sm110_gqa_decode_prepared": _DEVICE,
    "minimax_h3_varlen_attention": "it is one model's. Call fmha_varlen",
    "minimax_h3_varlen_fp8_attention": "it is one model's. Call fmha_varlen",
    "minimax_h3_varlen_nvfp4_attention": _FOUR_BITS,
    "nvfp4_attention_sm120_fwd": _FOUR_BITS,
    "nvfp4_quantize_append_paged_kv_cache": _FOUR_BITS,
    "nvfp4_sparse_mla_decode": _FOUR_BITS,
    "plan_cake_fmha_request_ordered_paged_decode": _CAKE,
    "prepare_fp8_attention": _SAGE,
    "prepare_nvfp4_attention": _FOUR_BITS,
    "prepare_nvfp4_batch_decode_with_kv_cache_mla": _FOUR_BITS,
    "prepare_sm110_gqa_decode": _DEVICE,
    "qsa_forward": _SPARSE,
    "qsa_indexed_forward": _SPARSE,
    "sm110_gqa_decode": _DEVICE,
    "trtllm_batch_decode_sparse_mla_dsv4": _DSV4,
    "trtllm_sage_attention_quantize": _SAGE,
}


def why_absent(name: str) -> str:
    """What AttributeError says of a name."""
    reason = ABSENT.get(name)
    if reason is None:
        return f"flashjit.flashinfer has no {name}: what is not attention stays FlashInfer's, so import it from there."
    return f"flashjit.flashinfer has no {name}: {reason}."

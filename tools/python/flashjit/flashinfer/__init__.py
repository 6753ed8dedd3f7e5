"""FlashInfer's functions and wrappers with flashjit's kernels: the same names, arguments, defaults and results.

    from flashjit import flashinfer  # in place of: import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(indptr, indices, last_page_len, heads_q, heads_kv, head_dim, page_size)
    out = wrapper.run(q, (k_cache, v_cache))

plan() keeps its arguments and computes nothing for the kernels. LSE has the base 2, as FlashInfer's. What flashjit cannot
serve raises flashjit.Unsupported where it is asked for, mostly in plan(). Arguments that choose among FlashInfer's kernels
have no effect: workspaces, backend, use_tensor_cores, use_fp16_qk_reduction, enable_pdl, non_blocking.
"""

from typing import NoReturn

from ._absent import why_absent
from ._batch import (
    BatchAttention,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from ._cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from ._mla import BatchMLAPagedAttentionWrapper
from ._mla_tables import (
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_prefill_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
    xqa_mla,
)
from ._page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from ._pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from ._ragged import BatchPrefillWithRaggedKVCacheWrapper
from ._ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from ._single import (
    single_decode_with_kv_cache,
    single_decode_with_kv_cache_return_lse,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from ._sinks import BatchAttentionWithAttentionSinkWrapper, BatchDecodeWithAttentionSinkWrapper
from ._sparse import BlockSparseAttentionWrapper
from ._tables import (
    cudnn_batch_decode_with_kv_cache,
    prepare_balanced_batch_decode_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa,
    xqa_batch_decode_with_kv_cache,
)
from ._variable import VariableBlockSparseAttentionWrapper
from ._varlen import (
    cudnn_batch_prefill_with_kv_cache,
    fmha_varlen,
    trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
)

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "fast_decode_plan",
    "fmha_varlen",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "prepare_balanced_batch_decode_with_kv_cache",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_fmha_v2_prefill",
    "trtllm_prefill_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(why_absent(name))

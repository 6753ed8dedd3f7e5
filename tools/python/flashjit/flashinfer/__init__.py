"""FlashInfer's functions and wrappers with flashjit's kernels: the same names, arguments, defaults and results.

    from flashjit import flashinfer  # in place of: import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(indptr, indices, last_page_len, heads_q, heads_kv, head_dim, page_size)
    out = wrapper.run(q, (k_cache, v_cache))

plan() keeps its arguments and computes nothing for the kernels. LSE has the base 2, as FlashInfer's. What flashjit cannot
serve raises flashjit.Unsupported where it is asked for, mostly in plan(). Arguments that choose among FlashInfer's kernels
have no effect: workspaces, backend, use_tensor_cores, use_fp16_qk_reduction, enable_pdl, non_blocking.
"""

from ._batch import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
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
from ._page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from ._ragged import BatchPrefillWithRaggedKVCacheWrapper
from ._single import (
    single_decode_with_kv_cache,
    single_decode_with_kv_cache_return_lse,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_batch_decode_with_kv_cache,
)
from ._sparse import BlockSparseAttentionWrapper
from ._variable import VariableBlockSparseAttentionWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BlockSparseAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_decode_with_kv_cache",
]

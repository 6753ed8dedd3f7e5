"""vLLM's backend for sparse latent attention, as DeepSeek V3.2 has it: each query attends to the keys that an indexer lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from .._attention import attention
from .._engines import SPARSE_FORMAT, bound, of_latents
from .._formats import KvFormat
from ..errors import InvalidArgument
from ..flash_attn._attend import with_batch
from ._backend import FlashjitBuilder, FlashjitMetadata
from ._latent import LatentRules, parts_of_q, refuse_given


class FlashjitSparseLatentBackend(LatentRules, AttentionBackend):
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*LatentRules.supported_kv_cache_dtypes, SPARSE_FORMAT]

    @staticmethod
    def get_name() -> str:
        return "FLASHJIT_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[FlashjitSparseLatentImpl]:
        return FlashjitSparseLatentImpl

    @staticmethod
    def get_builder_cls() -> type[FlashjitSparseLatentBuilder]:
        return FlashjitSparseLatentBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """vLLM before 0.32 asks the backend."""
        packed = cache_dtype_str == SPARSE_FORMAT
        return (num_blocks, block_size, KvFormat(SPARSE_FORMAT).row_bytes(head_size) if packed else head_size)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


@dataclass
class FlashjitSparseLatentMetadata(FlashjitMetadata):
    """vLLM's layer asks how many rows decode: all do, prefills too."""

    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0


class FlashjitSparseLatentBuilder(FlashjitBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashjitSparseLatentMetadata:
        made = super().build(0, common_attn_metadata, fast_build)
        rows = made.num_actual_tokens
        return FlashjitSparseLatentMetadata(
            made.batch,
            rows,
            made.slot_mapping,
            num_decodes=common_attn_metadata.num_reqs,
            num_decode_tokens=rows,
        )


class FlashjitSparseLatentImpl(MLAAttentionImpl[FlashjitSparseLatentMetadata]):
    is_sparse = True
    lse_base_on_e = True
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        topk_indices_buffer: Tensor | None = None,
        indexer: Any = None,
        **of_latents: Any,
    ) -> None:
        refuse_given(
            "sparse latent attention",
            {
                "alibi_slopes": alibi_slopes,
                "sliding_window": sliding_window,
                "logits_soft_cap": logits_soft_cap,
                "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            },
        )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank: int = of_latents["kv_lora_rank"]
        self._indexer, self._lists = indexer, topk_indices_buffer

    @property
    def topk_indices_buffer(self) -> Tensor | None:
        """The indexer's, which vLLM may exchange, or where a layer has no indexer, the one that it was given."""
        return self._lists if self._indexer is None else self._indexer.topk_indices_buffer  # type: ignore[no-any-return]

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, lists: Tensor | None) -> None:
        self._indexer, self._lists = None, lists

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: FlashjitSparseLatentMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """O [rows, heads, latent columns] of q [rows, heads, columns]. The lists, int32 [rows, top-k], name keys of a row's sequence;
        -1 is none."""
        lists = self.topk_indices_buffer
        if lists is None:
            raise InvalidArgument(
                "the layer has neither an indexer nor topk_indices_buffer: give one of them."
            )
        q, q_rope = parts_of_q(q)
        of_codes: dict[str, Any]
        if self.kv_cache_dtype == SPARSE_FORMAT:
            latents, of_codes = kv_c_and_k_pe_cache.view(torch.uint8), {"k_format": SPARSE_FORMAT}
        else:
            latents, of_codes = of_latents(kv_c_and_k_pe_cache, getattr(layer, "_k_scale", None))
        batch = attn_metadata.batch
        assert batch.table is not None
        room = batch.table.shape[1] * latents.shape[1]
        found = attention(
            with_batch(q),
            latents[:, None],
            v_columns=self.kv_lora_rank,
            q_rope=None if q_rope is None else with_batch(q_rope),
            scale=self.scale,
            indices=lists[: q.shape[0]][None, :, None],
            page_table=batch.table,
            kv_lengths=batch.lengths,
            cu_seqlens_q=batch.cu_seqlens,
            max_seqlen_q=bound(batch.most_q),
            max_seqlen_kv=min(bound(batch.most_kv), room),
            **of_codes,
        )
        return found[0].transpose(0, 1), None

"""vLLM's backend for latent attention, MLA: flashjit decodes; prefill is vLLM's, over its own choice of kernels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

from .._attention import attention
from .._engines import bound, of_latents, why_not_latent
from ..errors import InvalidArgument, Unsupported


class LatentRules:
    """What vLLM asks of both backends of latents."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(8)]

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability) >= (8, 0)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None = None,
        *more: Any,
        device_capability: Any = None,
    ) -> str | None:
        """more: as of FlashjitBackend."""
        capability = more[-1] if more else device_capability
        return why_not_latent(
            head_size,
            dtype,
            kv_cache_dtype,
            page_size=block_size,
            capability=capability,
            sparse=cls.is_sparse(),
        )


class FlashjitLatentBackend(LatentRules, MLACommonBackend):
    @staticmethod
    def get_name() -> str:
        return "FLASHJIT_MLA"

    @staticmethod
    def get_impl_cls() -> type[FlashjitLatentImpl]:
        return FlashjitLatentImpl

    @staticmethod
    def get_builder_cls() -> type[FlashjitLatentBuilder]:
        return FlashjitLatentBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False


class FlashjitLatentBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class FlashjitLatentImpl(MLACommonImpl[MLACommonMetadata]):
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.supports_quant_query_input = False  # Q stays as it is over latents of FP8
        refuse_given("latent attention", {name: named.get(name) for name in LACKING})

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: MLACommonMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """O [sequences, heads, latent columns] and LSE [sequences, heads] or None, of q [sequences, heads, columns]."""
        return decode(
            q,
            kv_c_and_k_pe_cache,
            attn_metadata.decode,
            self.kv_lora_rank,
            self.scale,
            self.need_to_return_lse_for_decode,
            getattr(layer, "_k_scale", None),
        )


LACKING = ("alibi_slopes", "sliding_window", "logits_soft_cap")


def refuse_given(what: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value:
            raise Unsupported(f"{name} is given: {what} of flashjit.vllm does not have it.")


def parts_of_q(q: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Q, and its rotated columns where they are a tensor of their own: none of a model without a rotated part."""
    q, q_rope = q if isinstance(q, tuple) else (q, None)
    return q, q_rope if q_rope is not None and q_rope.shape[-1] else None


def decode(
    q: Tensor | tuple[Tensor, Tensor],
    cache: Tensor,
    step: Any,
    rank: int,
    scale: float,
    wants_lse: bool,
    k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """q: [rows, heads, columns], the same number of rows of each sequence, or a tensor of the first `rank` columns and one of the
    others. cache: [blocks, rows of a block, columns], of FP8 with k_scale."""
    if step is None:
        raise InvalidArgument("attn_metadata has no decode part: forward_mqa() is for steps that decode.")
    q, q_rope = parts_of_q(q)
    sequences = step.seq_lens.shape[0]
    if not sequences or q.shape[0] % sequences:
        raise InvalidArgument(
            f"q has {q.shape[0]} rows for {sequences} sequences: each sequence must have the same number of them."
        )
    room = step.block_table.shape[1] * cache.shape[1]
    latents, of_codes = of_latents(cache, k_scale)
    found = attention(
        _by_sequence(q, sequences),
        latents[:, None],
        v_columns=rank,
        q_rope=None if q_rope is None else _by_sequence(q_rope, sequences),
        causal=True,
        scale=scale,
        page_table=step.block_table,
        kv_lengths=step.seq_lens,
        max_seqlen_kv=min(bound(getattr(step, "max_seq_len", None) or room), room),
        return_lse=wants_lse,
        **of_codes,
    )
    o, lse = found if wants_lse else (found, None)
    rows = o.transpose(1, 2).flatten(0, 1)
    return rows, None if lse is None else lse.transpose(1, 2).flatten(0, 1)


def _by_sequence(rows: Tensor, sequences: int) -> Tensor:
    """[sequences, heads, rows of one, columns]."""
    return rows.unflatten(0, (sequences, -1)).transpose(1, 2)

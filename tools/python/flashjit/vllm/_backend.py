"""vLLM's backend, metadata and layer for attention over pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from .._engines import CACHE_FORMATS, CACHE_TYPES, Batch, Layer, has_key_scales, store, why_not
from .._tensors import KV_TYPES, SPEC_TYPES, describe
from ..errors import InvalidArgument, Unsupported
from . import _key_scales, _shards

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class FlashjitBackend(AttentionBackend):
    """What flashjit can do, as vLLM asks."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*CACHE_TYPES, *CACHE_FORMATS]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashjitImpl]:
        return FlashjitImpl

    @staticmethod
    def get_builder_cls() -> type[FlashjitBuilder]:
        return FlashjitBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(8)]  # which TMA copies

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """vLLM before 0.32 asks the backend; later ones have this shape for all of them."""
        scaled = has_key_scales(cache_dtype_str)
        content = _key_scales.row_bytes(head_size, cache_dtype_str) if scaled else 2 * head_size
        return (num_blocks, num_kv_heads, block_size, content)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """What vLLM 0.33 asks in place of get_kv_cache_shape()."""
        return _key_scales.customized(spec)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return why_not(head_size, torch.bfloat16, None) is None

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability) >= (7, 5)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (*_ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None = None,
        use_mla: bool = False,
        has_sink: bool = False,
        *more: Any,
        device_capability: Any = None,
    ) -> str | None:
        """more: use_sparse and others, and at last device_capability, by vLLM's versions."""
        capability = more[-1] if more else device_capability
        return why_not(head_size, dtype, kv_cache_dtype, block_size, has_sink, capability)


def _always(cls: Any) -> bool:
    return True


for _name in (
    "sink",
    "sliding_window",
    "mm_prefix",
    "non_causal",
    "batch_invariance",
    "per_head_quant_scales",
):
    setattr(FlashjitBackend, f"supports_{_name}", classmethod(_always))


@dataclass
class FlashjitMetadata:
    batch: Batch
    num_actual_tokens: int
    slot_mapping: Tensor
    shard: Batch | None = None  # the earlier keys that this rank has, where ranks share them


def _most_captured(compilation_config: Any, batches: str) -> int:
    """The rows of the largest graph with attention inside that is for "mixed" or "decode" batches; 0: there is none."""
    mode = getattr(compilation_config, "cudagraph_mode", None)
    if mode is None or getattr(mode, f"{batches}_mode")().name != "FULL":
        return 0
    return int(compilation_config.max_cudagraph_capture_size or 0)


class FlashjitBuilder(AttentionMetadataBuilder[FlashjitMetadata]):
    """Keeps what vLLM gives: there is no plan on the host, so that a graph replays any batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._ranges: Tensor | None = None
        graphs = getattr(vllm_config, "compilation_config", None)
        self._most_of_any, self._most_of_decodes = (
            _most_captured(graphs, name) for name in ("mixed", "decode")
        )
        self._longest = getattr(vllm_config.model_config, "max_model_len", 0)
        world, rank = _shards.ranks(kv_cache_spec)
        self._shard: _shards.Shard | None = None
        if world > 1:
            interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
            most = vllm_config.scheduler_config.max_num_seqs
            self._shard = _shards.Shard(world, rank, interleave, most, device)
            self.supports_draft_decode_metadata_update = False  # lengths of a shard are made in build()
        if getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
            rows = vllm_config.scheduler_config.max_num_batched_tokens
            self._ranges = torch.full((rows, 2), -1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashjitMetadata:
        given = common_attn_metadata
        sequences = given.seq_lens.shape[0]
        if isinstance(given.causal, Tensor) and (given.causal.dim() != 1 or len(given.causal) < sequences):
            raise InvalidArgument(
                f"causal is {describe(given.causal)}: it must be True, False or bool [{sequences}], one for each request."
            )
        batch = Batch(
            given.query_start_loc,
            given.seq_lens,
            given.block_table_tensor,
            self._most_queries(given),
            self._most_keys(given),
            given.causal,
            self._ranges_of(given),
            None if not common_prefix_len else self._prefix_of(common_prefix_len),
        )
        shard = None if self._shard is None else self._shard.of(batch)
        return FlashjitMetadata(batch, given.num_actual_tokens, given.slot_mapping, shard)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether vLLM (0.26 with disable_cascade_attn=False) passes build() the common prefix. True where reading it once
        saves more than the CUDA graph, which such a step does not use."""
        plain = not (use_alibi or use_sliding_window or use_local_attention) and dcp_world_size == 1
        return plain and common_prefix_len >= 256 and len(query_lens) >= 8

    def _prefix_of(self, keys: int) -> Tensor:
        return torch.full((1,), keys, dtype=torch.int32, device=self.device)

    def _most_queries(self, given: CommonAttentionMetadata) -> int:
        """vLLM captures and warms up with rows that are shared out evenly, also where the graph is for any batch: one
        sequence may have them all."""
        rows = given.num_actual_tokens
        return rows if rows <= self._most_of_any else given.max_query_len

    def _most_keys(self, given: CommonAttentionMetadata) -> int:
        """vLLM captures with the longest sequence of all and warms up with short ones: the kernel must be the same."""
        return max(
            given.max_seq_len, self._longest if given.num_actual_tokens <= self._most_of_decodes else 0
        )

    def update_block_table(
        self, metadata: FlashjitMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> FlashjitMetadata:
        shard = metadata.shard and metadata.shard._replace(table=blk_table)
        batch = metadata.batch._replace(table=blk_table)
        return replace(metadata, batch=batch, slot_mapping=slot_mapping, shard=shard)

    def update_draft_decode_metadata(self, metadata: FlashjitMetadata) -> None:
        """Nothing: the metadata are vLLM's own tensors."""

    def _ranges_of(self, given: CommonAttentionMetadata) -> Tensor | None:
        """The first and the last key of the image that each query belongs to, where a batch has images."""
        if self._ranges is None or not given.mm_req_doc_ranges:
            return None
        starts, lengths = given.query_start_loc_cpu.tolist(), given.seq_lens_cpu_upper_bound
        assert lengths is not None
        found = torch.full((starts[-1], 2), -1, dtype=torch.int32)
        for request, ranges in given.mm_req_doc_ranges.items():
            row, end = starts[request], starts[request + 1]
            first = int(lengths[request]) - (end - row)  # the position of the request's first query
            for low, high in ranges:
                if low < high:
                    rows = slice(row + max(low - first, 0), row + min(max(high + 1 - first, 0), end - row))
                    found[rows] = torch.tensor([low, high], dtype=torch.int32)
        self._ranges[: len(found)].copy_(found, non_blocking=True)
        return self._ranges


class FlashjitImpl(AttentionImpl[FlashjitMetadata]):
    """A layer."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        given = {name: value for name, value in unknown.items() if value}
        if given:
            raise Unsupported(f"flashjit.vllm does not have {', '.join(given)}: choose another backend.")
        stored = CACHE_TYPES.get(kv_cache_dtype)
        dtype = stored if stored in SPEC_TYPES else torch.bfloat16  # the model's is not told
        if alibi_slopes is not None and len(alibi_slopes) != num_heads:
            raise InvalidArgument(
                f"alibi_slopes has {len(alibi_slopes)} numbers: give {num_heads}, one for each of the layer's heads."
            )
        reason = why_not(head_size, dtype, kv_cache_dtype, sinks=sinks is not None)
        if reason is not None:
            raise Unsupported(f"{reason}: choose another backend.")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes, self.sliding_window = alibi_slopes, sliding_window
        self.logits_soft_cap = logits_soft_cap
        self._cache_type = stored
        self._rotates = kv_cache_dtype in CACHE_FORMATS and attn_type not in _ENCODERS
        self._rotation: _key_scales.Rotation | None = None
        self._layer: Layer | None = None
        self._sinks: Tensor | None = None
        self._across: _shards.Across | None = None
        if getattr(self, "dcp_world_size", 1) > 1 and attn_type not in _ENCODERS:
            _shards.refuse(sliding_window, alibi_slopes, self.num_kv_heads)
            self._across = _shards.Across()

    def _layer_on(self, layer: Any, device: torch.device) -> Layer:
        """Made in the first call, where the device and the loaded weights are known."""
        found = self._layer
        if found is None:
            side = None if self.sliding_window is None else self.sliding_window - 1
            slopes = self.alibi_slopes
            self._sinks = None if self.sinks is None else self.sinks.float()
            found = self._layer = Layer(
                self.scale,
                side,
                side,
                self.logits_soft_cap,
                None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device),
                getattr(layer, "mm_prefix_clamp_sliding_window", False),
                bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
            )
        return found

    def _pages(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """K and V, [blocks, heads, rows of a block, d], of [blocks, heads, rows of a block, 2 d], and their scales."""
        if has_key_scales(self.kv_cache_dtype):
            return _key_scales.split(kv_cache, self.head_size, self.kv_cache_dtype)
        scales: dict[str, Any] = {}
        if self._cache_type in KV_TYPES:
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
            if kv_cache.dtype != self._cache_type:
                kv_cache = kv_cache.view(self._cache_type)
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :], scales

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether O is stored as vLLM's compiler would else quantize it: in FP8 with one scale, known before."""
        scale = quant_key.scale
        return bool(
            quant_key.dtype == torch.float8_e4m3fn
            and quant_key.symmetric
            and scale.static
            and scale.group_shape.is_per_tensor()
            and self.head_size % 16 == 0
            and not self._rotates
            and self._across is None
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashjitMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes O into output, [rows, heads, d], of query, likewise; key and value are in the cache already."""
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        if output_block_scale is not None:
            raise Unsupported(
                "output_block_scale is given: flashjit.vllm writes O in FP8 with one scale, or in the type of the model."
            )
        codes = {} if output_scale is None else {"out_dtype": torch.float8_e4m3fn, "out_scale": output_scale}
        rows, batch = attn_metadata.num_actual_tokens, attn_metadata.batch
        self._rotation_of(query)
        described = self._layer_on(layer, query.device)
        if self._across is not None:
            if codes or batch.ranges is not None:
                what = "output_scale" if codes else "mm_prefix"
                raise Unsupported(f"flashjit.vllm does not have {what} with decode context parallelism.")
            over = lambda q: self._over_pages(layer, q, kv_cache, attn_metadata.shard, wants_lse=True)
            own = (query[:rows], key[:rows], value[:rows])
            self._across.attend(over, described, own, batch, output[:rows], self._sinks)
        elif self.attn_type in _ENCODERS:
            batch = batch._replace(table=None, causal=False)
            described.attend(query[:rows], key[:rows], value[:rows], batch, output[:rows], sinks=self._sinks)
        else:
            more = {"sinks": self._sinks, **codes}
            self._over_pages(layer, query[:rows], kv_cache, batch, output[:rows], **more)
        return output

    def _over_pages(
        self, layer: Any, q: Tensor, kv_cache: Tensor, batch: Any, out: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        """O and LSE of q [rows, heads, d] over the cache."""
        described, rotation = self._layer, self._rotation
        assert described is not None
        k, v, scales = self._pages(layer, kv_cache)
        if rotation is None:
            return described.attend(q, k, v, batch, out, **scales, **more)
        rotated, lse = described.attend(rotation.of_q(q), k, v, batch, **scales, **more)
        result = torch.empty_like(rotated) if out is None else out
        rotation.back(rotated, result)
        return result, lse

    def _rotation_of(self, rows: Tensor) -> _key_scales.Rotation | None:
        """Made in the first call, where the model's type and device are known."""
        if self._rotates and self._rotation is None:
            self._rotation = _key_scales.Rotation(self.head_size, rows.dtype, rows.device)
        return self._rotation

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores new keys and values where slot_mapping says."""
        if self.attn_type in _ENCODERS or kv_cache.numel() == 0:
            return
        rotation = self._rotation_of(key)
        if rotation is not None:
            key, value = rotation(key), rotation(value)
        k, v, scales = self._pages(layer, kv_cache)
        store(key, value, k, v, slot_mapping, **scales)

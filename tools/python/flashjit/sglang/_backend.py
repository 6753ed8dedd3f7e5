"""SGLang's backend: a step's metadata and its layers."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from .._engines import Batch, Layer, Tree, bound, of_latents, why_not, why_not_latent
from .._tensors import KV_TYPES, describe
from ..errors import InvalidArgument, Unsupported
from . import _trees

_MOST_DRAFTS = 64  # a tree's limit: ancestors are bits of an int64
_BOTH_WAYS = ("ENCODER_ONLY", "DECODER_BIDIRECTIONAL")


class FlashjitBackend(AttentionBackend):
    """Reads SGLang's table of tokens on the device: nothing of a step is planned on the host."""

    needs_cpu_seq_lens = False
    branches = 1  # sequences of a request

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        config, arguments = model_runner.model_config, model_runner.server_args
        self.page_size: int = model_runner.page_size
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.max_context_len: int = self.req_to_token.shape[1]  # with drafts beyond the model's context
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.device = model_runner.device
        self.latent = config.attention_arch == AttentionArch.MLA
        self.drafts: int = arguments.speculative_num_draft_tokens or 0
        self.trees = (arguments.speculative_eagle_topk or 0) > 1 and not getattr(
            model_runner, "is_draft_worker", False
        )
        self.invariant = bool(getattr(arguments, "enable_deterministic_inference", False))
        self._translate = getattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa", None)
        self._refuse(model_runner, config, arguments)
        self._layers: dict[int, tuple[Layer, bool]] = {}
        self._graphs: dict[str, Tensor] = {}
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self.batch: Batch | None = None
        self._before: Tensor | None = None  # keys before the drafts whose tree is kept
        self.window_table: Tensor | None = None

    def _refuse(self, runner: Any, config: Any, arguments: Any) -> None:
        """What flashjit cannot serve, when the model is loaded."""
        cache = runner.kv_cache_dtype
        name = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}.get(cache, "auto")
        if cache not in KV_TYPES and cache != runner.dtype:
            name = str(cache)
        reason = (
            why_not_latent(
                config.kv_lora_rank + config.qk_rope_head_dim,
                runner.dtype,
                name,
                config.kv_lora_rank,
                self.page_size,
            )
            if self.latent
            else why_not(config.head_dim, runner.dtype, name, self.page_size)
        )
        if self.trees and self.drafts > _MOST_DRAFTS:
            reason = (
                f"speculative_num_draft_tokens is {self.drafts}, and speculative_eagle_topk above 1: trees have at most "
                f"{_MOST_DRAFTS} drafts"
            )
        elif config.is_encoder_decoder:
            reason = (
                "the model is an encoder and a decoder, whose cross attention flashjit.sglang does not have"
            )
        elif getattr(runner, "attention_chunk_size", None) is not None:
            reason = "attention_chunk_size is given: flashjit.sglang does not have chunked local attention"
        elif getattr(getattr(runner, "kv_index_translator", None), "is_translating", False):
            reason = "the unified memory pool translates tokens, which flashjit.sglang does not"
        if reason is not None:
            raise Unsupported(f"--attention-backend flashjit: {reason}; choose another backend.")

    # --- A step ---------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A step outside of a graph."""
        longest = self._longest(forward_batch)
        table = self._tokens(forward_batch, longest)
        lengths, most_q, offsets = self._shape(forward_batch)
        if offsets is None:
            rows = lengths.shape[0] * most_q
            offsets = torch.arange(0, rows + 1, most_q, dtype=torch.int32, device=lengths.device)
        self._bind(Batch(offsets, lengths.int(), table, most_q, longest, tree=self._tree(forward_batch)))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that captured graphs read: a table, lengths and offsets."""
        pages = -(-self.max_context_len // self.page_size)
        new = {"dtype": torch.int32, "device": self.device}
        self._graphs = {
            "table": torch.zeros(max_bs, pages, **new),
            "lengths": torch.ones(max_bs, **new),
            "offsets": torch.zeros(max_bs + 1, **new),
        }
        if self._translate is not None:
            self._graphs["window_table"] = torch.zeros(max_bs, pages, **new)
        if self.drafts:
            self._graphs["ancestors"] = torch.zeros(
                max_bs, self.drafts, dtype=torch.int64, device=self.device
            )
            self._graphs["depth"] = torch.zeros(max_bs, self.drafts, **new)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph is captured or replayed: bounds, and a tree's drafts, which lie elsewhere in each step."""
        count = forward_batch.batch_size * self.branches
        lengths, most_q, _ = self._shape(forward_batch)
        graphs = self._graphs
        self.batch = Batch(
            graphs["offsets"][: count + 1],
            graphs["lengths"][:count],
            graphs["table"][:count],
            most_q,
            self.max_context_len,
            tree=self._kept_tree(forward_batch, most_q, in_capture),
        )
        self.window_table = graphs["window_table"][:count] if self._translate is not None else None

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Within a graph, which repeats it: this step's tokens, lengths and offsets."""
        batch = self.batch
        assert batch is not None and batch.table is not None
        lengths, most_q, offsets = self._shape(forward_batch)
        tokens = self._tokens(forward_batch, self.max_context_len)
        batch.lengths.copy_(lengths)
        if offsets is None:
            count = batch.lengths.shape[0]
            offsets = torch.arange(0, count * most_q + 1, most_q, dtype=torch.int32, device=lengths.device)
        batch.cu_seqlens.copy_(offsets)
        batch.table.copy_(tokens if self.page_size == 1 else tokens // self.page_size)
        if self.window_table is not None:
            self.window_table.copy_(self._window_tokens(tokens))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _bind(self, batch: Batch) -> None:
        tokens = batch.table
        assert tokens is not None
        self.window_table = None if self._translate is None else self._window_tokens(tokens)
        table = tokens if self.page_size == 1 else tokens // self.page_size
        self.batch = batch._replace(table=table.int())

    def _window_tokens(self, tokens: Tensor) -> Tensor:
        """The pages of layers with windows, where these have a pool of their own."""
        assert self._translate is not None
        return (self._translate(tokens) // self.page_size).int()

    def _tokens(self, forward_batch: Any, longest: int) -> Tensor:
        """The first token of each page of each sequence, up to `longest` keys."""
        return self.req_to_token[:, : longest : self.page_size][forward_batch.req_pool_indices]

    def _longest(self, forward_batch: Any) -> int:
        """A bound of the keys of a sequence, without waiting for the device, that few steps change."""
        given = forward_batch.seq_lens_cpu
        if given is None or not given.numel():
            return self.max_context_len
        return min(bound(int(given.max()) + self._new_keys(forward_batch)), self.max_context_len)

    def _new_keys(self, forward_batch: Any) -> int:
        """How many a sequence has beside those that SGLang counts."""
        return self._drafts(forward_batch) if forward_batch.forward_mode.is_target_verify() else 0

    def _shape(self, forward_batch: Any) -> tuple[Tensor, int, Tensor | None]:
        """Keys of each sequence, most queries of one, and offsets of queries, or None where all have as many."""
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_decode_or_idle():
            return lengths, 1, None
        if mode.is_target_verify():
            drafts = self._drafts(forward_batch)
            return lengths + drafts, drafts, None
        given = getattr(forward_batch, "extend_seq_lens", None)
        if given is None:  # a graph's draft extension, before it is replayed
            return lengths, self._drafts(forward_batch), None
        offsets = torch.nn.functional.pad(given.cumsum(0, dtype=torch.int32), (1, 0))
        on_host = getattr(forward_batch, "extend_seq_lens_cpu", None)
        most = max(on_host) if on_host else forward_batch.positions.numel()
        return lengths, int(most), offsets

    def _drafts(self, forward_batch: Any) -> int:
        """How many a step has of each sequence, which may change from step to step."""
        given = getattr(forward_batch.spec_info, "num_tokens_per_req", 0)
        return given if given > 0 else self.drafts

    def _tree(self, forward_batch: Any) -> Tree | None:
        spec = forward_batch.spec_info
        if not forward_batch.forward_mode.is_target_verify() or not _trees.is_tree(spec):
            return None
        return _trees.read(spec.custom_mask, forward_batch.seq_lens, self._drafts(forward_batch))

    def _kept_tree(self, forward_batch: Any, drafts: int, in_capture: bool) -> Tree | None:
        """The tree where graphs read it."""
        if not forward_batch.forward_mode.is_target_verify() or not _trees.is_tree(forward_batch.spec_info):
            return None
        kept = Tree(*(self._graphs[name][: forward_batch.batch_size, :drafts] for name in Tree._fields))
        self._before = forward_batch.seq_lens
        if not in_capture:
            self._fill(kept, forward_batch.spec_info)
        return kept

    def _fill(self, kept: Tree, spec_info: Any) -> None:
        assert self._before is not None
        for old, new in zip(kept, _trees.read(spec_info.custom_mask, self._before, kept.depth.shape[1])):
            old.copy_(new)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """The tree once more, where SGLang prepared a graph before its drafts were there. Other steps are prepared again."""
        if cuda_graph_bs is not None and self.batch is not None and self.batch.tree is not None:
            self._fill(self.batch.tree, spec_info)

    # --- A layer --------------------------------------------------------------------------------------------

    def forward_decode(self, *args: Any, **named: Any) -> Any:
        """As forward_extend(): decoding is an extension by one token."""
        return self.forward_extend(*args, **named)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **unknown: Any,
    ) -> Any:
        """O [rows, hq * d_v]; with return_lse also LSE [rows, hq]. k and v are stored first, where save_kv_cache says."""
        given = [name for name, value in unknown.items() if value is not None]
        if given:
            raise Unsupported(
                f"{', '.join(given)}: flashjit.sglang does not have it; choose another backend."
            )
        if k is not None and save_kv_cache:
            self._store(layer, forward_batch, k, v, k_rope)
        batch = self.batch
        if batch is None:
            raise InvalidArgument(
                "a layer is called before init_forward_metadata(): SGLang calls that once a step."
            )
        described, causal = self._layer(layer)
        if not causal:
            batch = batch._replace(causal=False)
        if layer.sliding_window_size > -1 and self.window_table is not None:
            batch = batch._replace(table=self.window_table)
        q = _by_head(q, layer.tp_q_head_num, layer.v_head_dim if q_rope is not None else layer.qk_head_dim)
        more: dict[str, Any] = {"sinks": sinks}
        if not self.latent:
            keys, values = self._pages(layer, more)
        elif q_rope is None and layer.tp_k_head_num > 1:  # a prefill that is not absorbed
            keys, values, batch = self._packed(k, v, layer, forward_batch, batch)
        else:
            if q_rope is not None:
                more["q_rope"] = q_rope.reshape(*q.shape[:2], layer.qk_head_dim - layer.v_head_dim)
            pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            pool, of_codes = of_latents(pool, self._one)  # SGLang's pool converts to FP8 without a scale
            more.update(of_codes)
            keys, values = pool.view(-1, self.page_size, *pool.shape[1:]).transpose(1, 2), None
            more["v_columns"] = layer.v_head_dim
        out, lse = described.attend(q, keys, values, batch, wants_lse=return_lse, **more)
        result = out.flatten(1)
        return result if lse is None else (result, lse.transpose(0, 1).contiguous())

    def _store(
        self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor | None, k_rope: Tensor | None
    ) -> None:
        """By SGLang's own pool, which knows its layout."""
        slots = getattr(forward_batch, "out_cache_loc", None)
        swa = None if self._translate is None or slots is None else self._translate(slots)
        where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=swa)
        if k_rope is not None:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, where, k, k_rope)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)

    def _layer(self, layer: Any) -> tuple[Layer, bool]:
        """A layer's masks and scores, and whether it is causal; made in its first call."""
        found = self._layers.get(layer.layer_id)
        if found is None:
            kinds = [getattr(AttentionType, name, None) for name in _BOTH_WAYS]
            window = layer.sliding_window_size  # without the query's own key
            side = window if window is not None and window > -1 else None
            if self.trees and side is not None and side < self.drafts - 1:
                raise Unsupported(
                    f"the layer's window is {side}, and speculative_num_draft_tokens {self.drafts}: flashjit.sglang needs "
                    f"a window of {self.drafts - 1} earlier keys or more, which covers the whole tree; choose another backend."
                )
            made = Layer(layer.scaling, side, side, layer.logit_cap, batch_invariant=self.invariant)
            found = self._layers[layer.layer_id] = (made, layer.attn_type not in kinds)
        return found

    def _pages(self, layer: Any, more: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """K's and V's pages, [pages, hkv, rows of a page, d], and their scales."""
        keys, values = (
            pool.view(-1, self.page_size, *pool.shape[1:]).transpose(1, 2)
            for pool in (
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            )
        )
        if keys.dtype in KV_TYPES:
            for name in ("k_scale", "v_scale"):
                scale = getattr(layer, name)
                more[name] = self._one if scale is None else scale
        return keys, values

    def _packed(
        self, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, batch: Batch
    ) -> tuple[Tensor, Tensor, Batch]:
        """K and V of a prefill's own tokens, [rows, h, d]."""
        if k is None or v is None:
            raise InvalidArgument(
                "k or v is None: a prefill that is not absorbed attends to its own tokens; give both."
            )
        if any(getattr(forward_batch, "extend_prefix_lens_cpu", None) or ()):
            raise Unsupported(
                "flashjit.sglang attends to a latent prefix in its absorbed form only: start SGLang with "
                "--disable-chunked-prefix-cache."
            )
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        return k, v, batch._replace(table=None, most_kv=batch.most_q)


def _by_head(q: Tensor, heads: int, columns: int) -> Tensor:
    """[rows, heads, columns], of any dimensions before the last one or two."""
    if q.shape[-1] != heads * columns and tuple(q.shape[-2:]) != (heads, columns):
        raise InvalidArgument(
            f"q is {describe(q)}: it must be [rows, {heads * columns}] or [rows, {heads}, {columns}], of the layer's heads."
        )
    return q.reshape(-1, heads, columns)

"""FlashInfer's wrapper for packed queries, keys and values."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument
from ._batch import _Wrapper
from ._rows import check_ints, check_tensor, heads_first, results, run, sizes
from ._said import check_values
from ._scores import Scales, is_invariant, read_items, read_mask, read_scores, refuse


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Packed queries, keys and values: [all rows, heads, d] each."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """Keeps the arguments, which are FlashInfer's. The last query is at the last key. seq_lens and seq_lens_q say what the
        others do, and are compared on the CPU alone."""
        refuse(v_indptr=v_indptr, o_indptr=o_indptr)
        self._sizes = sizes(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        self._keep_types(q_data_type, kv_data_type, o_data_type)
        queries, keys = self._keep_queries(qo_indptr), check_ints("kv_indptr", kv_indptr, 1).cpu().diff()
        if keys.numel() != queries.numel():
            raise InvalidArgument(
                f"qo_indptr is of {queries.numel()} sequences and kv_indptr of {keys.numel()}: they must be of the same ones."
            )
        check_values("seq_lens", seq_lens, "kv_indptr", keys)
        check_values("seq_lens_q", seq_lens_q, "qo_indptr", queries)
        mask, start = read_mask(custom_mask, packed_custom_mask, queries.long() * keys.long(), self.device)
        invariant = is_invariant(fixed_split_size, disable_split_kv)
        first = self._keep("rope_start", (keys - queries).to(device=self.device, dtype=torch.int32))
        options = (pos_encoding_mode, logits_soft_cap, causal, window_left, sm_scale, mask, start, invariant)
        items = read_items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, keys, self.device)
        self._scores = read_scores(*options, (rope_scale, rope_theta), first)._replace(
            items=self._kept_items(items)
        )
        self._keys = {
            "cu_seqlens_kv": self._keep("kv_indptr", kv_indptr.to(device=self.device, dtype=torch.int32)),
            "max_seqlen_kv": int(keys.max()) if keys.numel() else 0,
        }

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """O [all rows, hq, d_v] of q, k and v [all rows, heads, d]; with return_lse also LSE [all rows, hq], of base 2.

        args: the scales of q, k and v of 8 bits, float32 [heads of each], as FlashInfer's FP8 kernels take them; or with jit_args
        sinks and the scale of scores."""
        refuse(kv_cache_sf=kv_cache_sf, o_scale=None if o_scale == 1 else o_scale)
        dims = "all rows, hkv, d"
        k, v = (heads_first(check_tensor(name, x, dims), "NHD")[None] for name, x in (("k", k), ("v", v)))
        rows = self._planned(q, k, v)
        scales, sinks, scores = self._read(args, Scales(q_scale, k_scale, v_scale), q)
        wants_lse = return_lse or lse is not None
        found = run(q, k, v, rows, scores, scales, self._out_dtype, out, wants_lse, sinks=sinks, **self._keys)
        return results(found, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward_return_lse = run_return_lse

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """run() with options of scores in the place of plan()'s."""
        rope = (rope_scale, rope_theta)
        self._replace_scores(pos_encoding_mode, logits_soft_cap, causal, window_left, sm_scale, rope)
        return self.run(q, k, v)

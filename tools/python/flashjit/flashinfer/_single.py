"""FlashInfer's functions for one sequence."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._tensors import describe
from ..errors import InvalidArgument
from ._rows import Rows, check_layout, check_tensor, heads_first, results, run
from ._scores import Scales, check_dtypes, dtype_of, read_mask, read_scores, refuse, type_of_out


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """O [hq, d] of q [hq, d] and k, v [keys, hkv, d], or by HND [hkv, keys, d]; with return_lse also LSE [hq], of base 2."""
    check_tensor("q", q, "hq, d")
    k, v = _one_sequence(k, v, kv_layout)
    rope = {"rope": (rope_scale, rope_theta), "rope_start": k.shape[2] - 1}
    scores = read_scores(pos_encoding_mode, logits_soft_cap, False, window_left, sm_scale, **rope)
    out_dtype = type_of_out(q.dtype)
    check_dtypes(q.dtype, k.dtype, out_dtype)
    scales = Scales(q_scale, k_scale, v_scale)
    found = results(run(q[None], k, v, Rows(), scores, scales, out_dtype, None, return_lse), None)
    return (found[0][0], found[1][0]) if return_lse else found[0]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: Any = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """O [queries, hq, d_v] of q [queries, hq, d] and k, v [keys, hkv, d], or by HND [hkv, keys, d]; with return_lse also
    LSE [queries, hq], of base 2. The last query is at the last key."""
    refuse(kv_cache_sf=kv_cache_sf)
    check_tensor("q", q, "queries, hq, d")
    k, v = _one_sequence(k, v, kv_layout)
    out_dtype = dtype_of(o_dtype, type_of_out(q.dtype))
    check_dtypes(q.dtype, k.dtype, out_dtype)
    if custom_mask is not None and custom_mask.dim() == 2 and custom_mask.shape != (q.shape[0], k.shape[2]):
        raise InvalidArgument(
            f"custom_mask is {describe(custom_mask)}: give {[q.shape[0], k.shape[2]]}, queries and keys."
        )
    pairs = torch.tensor([q.shape[0] * k.shape[2]])
    mask, start = read_mask(custom_mask, packed_custom_mask, pairs, q.device)
    rope = {"rope": (rope_scale, rope_theta), "rope_start": k.shape[2] - q.shape[0]}
    scores = read_scores(
        pos_encoding_mode, logits_soft_cap, causal, window_left, sm_scale, mask, start, **rope
    )
    scales = Scales(scale_q, _product(scale_k, k_scale), _product(scale_v, v_scale))
    rows = Rows(None, q.shape[0])
    return results(run(q, k, v, rows, scores, scales, out_dtype, None, return_lse), None)


def _one_sequence(k: Any, v: Any, kv_layout: str) -> tuple[Tensor, Tensor]:
    """[1, hkv, keys, d] of each."""
    dims = "keys, hkv, d" if check_layout(kv_layout) == "NHD" else "hkv, keys, d"
    k, v = check_tensor("k", k, dims), check_tensor("v", v, dims)
    return heads_first(k, kv_layout)[None], heads_first(v, kv_layout)[None]


def _product(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a * b


single_decode_with_kv_cache_return_lse = functools.partial(single_decode_with_kv_cache, return_lse=True)
single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)

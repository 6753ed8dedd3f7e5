"""K and V rounded as a cache of vLLM stores them, for transformers, so that tokens over such a cache have something to equal."""

from __future__ import annotations

from typing import Any


def rounded(x: Any, cache_type: str) -> Any:
    """x [batch, heads, rows, d]: each row of a head has a scale of its own, and with 4 bits a zero point besides."""
    import flashjit
    import torch
    from flashjit._engines import CACHE_FORMATS, CACHE_TYPES
    from flashjit.vllm._key_scales import Rotation

    form = CACHE_FORMATS.get(cache_type)
    if form is None:
        codes, scale = flashjit.quantize(x.contiguous(), CACHE_TYPES[cache_type], scales="row")
        return codes.to(x.dtype) * scale.view(*x.shape[:3], 1)
    rotation, kept = Rotation(x.shape[3], x.dtype, x.device), flashjit.KvFormat(form)
    numbers = kept.block_scales(x.shape, device=x.device)
    codes, _ = flashjit.quantize(rotation(x), format=form, block_scale=numbers)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(x.dtype)
    scale, zero = numbers.to(x.dtype).view(*x.shape[:3], 2).unbind(-1)
    turned, found = (codes - zero[..., None]) * scale[..., None], torch.empty_like(x)
    rotation.back(turned, found)
    return found


def attention_over(cache_type: str) -> str:
    """The name by which transformers computes attention over such a cache."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **named: Any) -> Any:
        pair = (rounded(x, cache_type) for x in (key, value))
        return eager_attention_forward(module, query, *pair, *args, **named)

    AttentionInterface.register(cache_type, attend)
    AttentionMaskInterface.register(cache_type, eager_mask)
    return cache_type

"""flashjit as an attention implementation of Hugging Face transformers."""
from __future__ import annotations

import math
from typing import Any, Union

import torch
from torch import Tensor

from ._attention import attention
from ._sdpa import mask_programs, padded
from .errors import InvalidArgument, Unsupported


def register(name: str) -> str:
    """See flashjit.torch.register_with_transformers()."""
    if "flash" in name:
        raise InvalidArgument(f"the name {name!r} contains 'flash', which transformers takes for a package of FlashAttention: "
                              "choose another, such as 'jit_attention'.")
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    except ImportError as error:
        raise Unsupported(f"transformers cannot be used ({error}): flashjit registers with version 4.53 or newer; install "
                          "it with `pip install -U transformers`.") from None
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])  # boolean masks, None where causal is all
    return name


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Union[Tensor, None], dropout: float = 0.0, scaling: Union[float, None] = None,
                      is_causal: Union[bool, None] = None, softcap: Union[float, None] = None,
                      s_aux: Union[Tensor, None] = None, position_bias: Union[Tensor, None] = None,
                      **_: Any) -> tuple[Tensor, None]:
    """The signature that transformers calls. query: [batch, heads_q, seqlen_q, head_dim]; key and value: [batch, heads_kv,
    seqlen_kv, head_dim]. Returns [batch, seqlen_q, heads_q, head_dim], and no weights.

    softcap: softcap * tanh(score / softcap). s_aux: sinks, [heads_q]. position_bias: added to the scores.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # As transformers means it: a mask has the causal part in it, and a single query sees all keys.
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
    dim, dim_v = query.shape[3], value.shape[3]
    scale = scaling if scaling is not None else 1 / math.sqrt(dim)
    leading = query.shape[:1]
    score, mask, captures = mask_programs(attention_mask, leading, query, key)
    captures = dict(captures or {})
    if position_bias is not None:
        bias, _, more = mask_programs(position_bias, leading, query, key)
        score = (score or "score") + bias.removeprefix("score").replace("attn_mask", "position_bias")
        captures["position_bias"] = more["attn_mask"]
    if softcap is not None:
        if score is not None:
            raise Unsupported("softcap together with an additive mask or a position bias is not supported here: use the "
                              "eager implementation for this model.")
        score = "softcap * tanh(score / softcap)"
        captures["softcap"] = float(softcap)
    query, key, value = (padded(tensor) for tensor in (query, key, value))
    out = attention(query, key, value, causal="top_left" if causal and query.shape[2] != key.shape[2] else causal,
                    scale=scale, dropout_p=dropout, score_mod=score, mask_mod=mask, captures=captures or None, sinks=s_aux)
    return out[..., :dim_v].transpose(1, 2).contiguous(), None

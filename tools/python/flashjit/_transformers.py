"""flashjit as an attention implementation of Hugging Face transformers."""
from __future__ import annotations

import sys
from typing import Any, Union

import torch
from torch import Tensor

from ._attention import attention
from ._plans import say_once
from ._sdpa import mask_programs, supported
from .errors import InvalidArgument, Unsupported


def register(name: str) -> str:
    """See flashjit.torch.register_with_transformers()."""
    if "flash" in name:
        raise InvalidArgument(f"the name {name!r} contains 'flash', which transformers takes for a package of FlashAttention: "
                              "choose another, such as 'jit_attention'.")
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    except ImportError as error:
        raise Unsupported(f"transformers cannot be used ({error}): flashjit registers with version 4.53 or newer; install "
                          "it with `pip install -U transformers`.") from None
    AttentionInterface.register(name, attention_forward)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]  # boolean masks, None where causal is all

    def mask_of(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            _tell_of_others(name, PreTrainedModel)
        return make_mask(*arguments, **named)
    AttentionMaskInterface.register(name, mask_of)
    return name


def _tell_of_others(name: str, model_class: type) -> None:
    """Once, of a model that has its mask made for `name`, and then computes attention by itself."""
    frame = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), model_class):
        frame = frame.f_back
    if frame is None:
        return
    model = type(frame.f_locals["self"])
    if not getattr(model, "_supports_attention_backend", False) and "ALL_ATTENTION_FUNCTIONS" not in frame.f_globals:
        say_once(f"{model.__name__} does not call {name!r}, nor any other attention that is registered: it has its own, in "
                 f"{model.__module__}, and flashjit computes nothing for it.")


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Union[Tensor, None], dropout: float = 0.0, scaling: Union[float, None] = None,
                      is_causal: Union[bool, None] = None, softcap: Union[float, None] = None,
                      s_aux: Union[Tensor, None] = None, position_bias: Union[Tensor, None] = None,
                      output_attentions: Union[bool, None] = None, **_: Any) -> tuple[Tensor, None]:
    """The signature that transformers calls. query: [batch, heads_q, seqlen_q, head_dim]; key and value: [batch, heads_kv,
    seqlen_kv, head_dim]. Returns [batch, seqlen_q, heads_q, head_dim], and no weights.

    softcap: softcap * tanh(score / softcap). s_aux: sinks, [heads_q]. position_bias: added to the scores.
    """
    if output_attentions or getattr(getattr(module, "config", None), "output_attentions", False):
        say_once("output_attentions=True: flashjit never has the attention weights in memory, and gives None for them. Use "
                 "model.set_attn_implementation(\"eager\") where they are wanted.")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # As transformers means it: a mask has the causal part in it, and a single query sees all keys.
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
    dim_v = value.shape[3]
    leading = query.shape[:1]
    score, mask, captures = mask_programs(attention_mask, leading, query, key)
    if position_bias is not None:
        bias, _, more = mask_programs(position_bias, leading, query, key)
        score = (score or "score") + bias.removeprefix("score").replace("attn_mask", "position_bias")
        captures = {**(captures or {}), "position_bias": more["attn_mask"]}
    if softcap is not None:
        if score is not None:
            raise Unsupported("softcap together with an additive mask or a position bias is not supported here: use the "
                              "eager implementation for this model.")
        score = "softcap * tanh(score / softcap)"
        captures = {**(captures or {}), "softcap": float(softcap)}
    query, key, value, scale = supported(query, key, value, scaling)
    out = attention(query, key, value, causal="top_left" if causal and query.shape[2] != key.shape[2] else causal,
                    scale=scale, dropout_p=dropout, score_mod=score, mask_mod=mask, captures=captures, sinks=s_aux)
    return out[..., :dim_v].transpose(1, 2).contiguous(), None

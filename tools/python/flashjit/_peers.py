"""What other libraries' attention functions call things, and what attention() takes instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import WrongType

_BIAS = "write score_mod=lambda s, b, h, q, kv: s + bias[b, h, q, kv], or call flashjit.torch.scaled_dot_product_attention()"
_LENGTHS = "give kv_lengths, int32 [batch]"
_CHOSEN = "leave it out: it is chosen for each problem"
_INSTEAD = {
    "window_size": "give window=(left, right)",
    "sliding_window": "give window=(sliding_window - 1, 0)",
    "logits_soft_cap": "give softcap",
    "soft_cap": "give softcap",
    "alibi_slopes": "write score_mod=lambda s, b, h, q, kv: s + slopes[h] * (kv - q)",
    "attn_mask": _BIAS,
    "attn_bias": _BIAS,
    "attention_mask": _BIAS,
    "bias": _BIAS,
    "mask": _BIAS,
    "is_causal": 'give causal=True, or causal="top_left" for what PyTorch means by it',
    "softmax_scale": "give scale",
    "sm_scale": "give scale",
    "scaling": "give scale",
    "dropout": "give dropout_p",
    "return_softmax_lse": "give return_lse=True",
    "return_attn_probs": "give return_lse=True; P itself is never stored",
    "return_aux": "give return_lse=True",
    "enable_gqa": "leave it out: q may have a multiple of the heads of k",
    "seqused_k": _LENGTHS,
    "cache_seqlens": _LENGTHS,
    "block_table": "give page_table, int32 [sequences, pages]",
    "block_tables": "give page_table, int32 [sequences, pages]",
    "cache_batch_idx": "give page_table, int32 [sequences]: slots",
    "kv_seqlens": _LENGTHS,
    "key_padding_mask": _LENGTHS,
    "cu_seqlens": "give cu_seqlens_q and cu_seqlens_kv",
    "cu_seqlens_k": "give cu_seqlens_kv",
    "max_seqlen": "give max_seqlen_q and max_seqlen_kv",
    "max_seqlen_k": "give max_seqlen_kv",
    "s_aux": "give sinks",
    "learnable_sink": "give sinks",
    "query": "give q",
    "key": "give k",
    "value": "give v",
    "num_splits": _CHOSEN,
    "pack_gqa": _CHOSEN,
    "kernel_options": _CHOSEN,
}


def refuse_unknown(arguments: Mapping[str, Any]) -> None:
    name = next(iter(arguments))
    instead = _INSTEAD.get(name, "see help(flashjit.attention) for those that it has")
    raise WrongType(f"attention() has no argument {name}: {instead}.")

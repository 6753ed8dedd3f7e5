"""flashjit as an attention implementation of Hugging Face transformers."""
from __future__ import annotations

import sys
from typing import Any, Union

import torch
from torch import Tensor

from ._attention import attention
from ._cache import append
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
    _let_continuous_batching_take(name)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]  # boolean masks, None where causal is all

    def mask_of(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            _tell_of_others(name, PreTrainedModel)
        return make_mask(*arguments, **named)
    AttentionMaskInterface.register(name, mask_of)
    return name


_paged: set[str] = set()  # the names that continuous batching takes


def _let_continuous_batching_take(name: str) -> None:
    """transformers' continuous batching leaves pages to FlashAttention alone, and knows that by an implementation's name, in
    these modules. From here on it asks about the other names, too."""
    try:
        from transformers.generation.continuous_batching import cache, continuous_api, initialization
        is_flash, load = initialization.is_flash_attention_requested, initialization.lazy_import_flash_attention
        modules = [module for module in (cache, continuous_api, initialization) if hasattr(module, "is_flash_attention_requested")]
    except (ImportError, AttributeError):  # other versions: they take any, or none
        return
    _paged.add(name)
    if hasattr(is_flash, "asks_flashjit"):
        return

    def takes_pages(config: Any = None, requested_attention_implementation: Any = None, version: Any = None) -> bool:
        asked = requested_attention_implementation if config is None else config._attn_implementation
        return asked in _paged or is_flash(config, requested_attention_implementation, version)

    def load_or_ours(implementation: Any, *rest: Any, **named: Any) -> Any:
        return (((attention_forward,) * 5,) * 2) if implementation in _paged else load(implementation, *rest, **named)

    takes_pages.asks_flashjit = True  # type: ignore[attr-defined]
    for module in modules:
        module.is_flash_attention_requested = takes_pages  # type: ignore[attr-defined]
    initialization.lazy_import_flash_attention = load_or_ours


def _tell_of_others(name: str, model_class: type) -> None:
    """Once, of a model that has its mask made for `name`, and then computes attention by itself."""
    frame: Any = sys._getframe(2)
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
                      output_attentions: Union[bool, None] = None, cu_seq_lens_q: Union[Tensor, None] = None,
                      **more: Any) -> tuple[Tensor, None]:
    """The signature that transformers calls. query: [batch, heads_q, seqlen_q, head_dim]; key and value: [batch, heads_kv,
    seqlen_kv, head_dim]. Returns [batch, seqlen_q, heads_q, head_dim], and no weights.

    softcap: softcap * tanh(score / softcap). s_aux: sinks, [heads_q]. position_bias: added to the scores. cu_seq_lens_q, and others
    like it in `more`: sequences are packed, as in continuous batching, where keys may be in pages.
    """
    if output_attentions or getattr(getattr(module, "config", None), "output_attentions", False):
        say_once("output_attentions=True: flashjit never has the attention weights in memory, and gives None for them. Use "
                 "model.set_attn_implementation(\"eager\") where they are wanted.")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if cu_seq_lens_q is not None and attention_mask is None and position_bias is None:
        out = _packed_forward(query, key, value, cu_seq_lens_q, dropout, scaling, bool(is_causal), softcap, s_aux, **more)
        return out.transpose(1, 2).contiguous(), None
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


def _packed_forward(query: Tensor, key: Tensor, value: Tensor, cu_seq_lens_q: Tensor, dropout: float, scaling: Union[float, None],
                    is_causal: bool, softcap: Union[float, None], s_aux: Union[Tensor, None], cu_seq_lens_k: Any = None,
                    max_length_q: Any = None, max_length_k: Any = None, block_table: Union[Tensor, None] = None,
                    k_cache: Union[Tensor, None] = None, v_cache: Union[Tensor, None] = None,
                    sliding_window: Union[int, None] = None, **_: Any) -> Tensor:
    """O, [1, heads_q, all rows, dim of V], of sequences packed one behind the other. With a block_table, each has one new key, which
    goes into the caches' pages [pages, rows of a page, heads_kv, head_dim]."""
    dim_v = value.shape[3]
    query, key, value, scale = supported(query, key, value, scaling)
    score, mask, captures = _window_and_softcap(sliding_window, is_causal, softcap)
    named = {"causal": is_causal and mask is None, "scale": scale, "dropout_p": dropout, "score_mod": score, "mask_mod": mask,
             "captures": captures, "sinks": s_aux}
    if block_table is None:
        out = attention(query, key, value, cu_seqlens_q=cu_seq_lens_q.int(), cu_seqlens_kv=cu_seq_lens_k.int(),
                        max_seqlen_q=int(max_length_q), max_seqlen_kv=int(max_length_k), **named)
        return out[..., :dim_v]
    sequences = block_table.shape[0]
    lengths = cu_seq_lens_k[:sequences + 1].diff().int()
    k_pages, v_pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)  # type: ignore[union-attr]
    q, k, v = (x.transpose(0, 2) for x in (query, key, value))  # a batch of sequences
    append(k, v, k_pages, v_pages, kv_lengths=lengths, page_table=block_table)
    out = attention(q, k_pages, v_pages, kv_lengths=lengths, page_table=block_table, **named)
    return out[..., :dim_v].transpose(0, 2)


def _window_and_softcap(window: Union[int, None], is_causal: bool, softcap: Union[float, None]) -> tuple[Any, Any, Any]:
    """Programs of the score and the mask, and their captures. A window counts the query's own key."""
    score = mask = None
    captures: dict[str, Any] = {}
    if softcap is not None:
        score, captures["softcap"] = "softcap * tanh(score / softcap)", float(softcap)
    if window is not None:
        at, captures["window"] = "q + seqlen_kv - seqlen_q", int(window)
        mask = f"kv > {at} - window && " + (f"kv <= {at}" if is_causal else f"kv < {at} + window")
    return score, mask, captures or None

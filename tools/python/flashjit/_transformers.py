"""flashjit as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from torch import Tensor

from ._attention import attention
from ._cache import append
from ._sdpa import mask_programs, supported
from ._tensors import say_once
from ._words import renamed
from .errors import Error, InvalidArgument, Unsupported


def register(name: str) -> str:
    """See flashjit.torch.register_with_transformers()."""
    if "flash" in name:
        raise InvalidArgument(
            f"the name {name!r} contains 'flash', which transformers takes for a package of FlashAttention: "
            "choose another, such as 'jit_attention'."
        )
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    except ImportError as error:
        raise Unsupported(
            f"transformers cannot be used ({error}): flashjit registers with version 4.53 or newer; install "
            "it with `pip install -U transformers`."
        ) from None
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

        is_flash, load = (
            initialization.is_flash_attention_requested,
            initialization.lazy_import_flash_attention,
        )
        modules = [
            module
            for module in (cache, continuous_api, initialization)
            if hasattr(module, "is_flash_attention_requested")
        ]
    except (ImportError, AttributeError):  # other versions: they take any, or none
        return
    _paged.add(name)
    if hasattr(is_flash, "asks_flashjit"):
        return

    def takes_pages(
        config: Any = None, requested_attention_implementation: Any = None, version: Any = None
    ) -> bool:
        asked = requested_attention_implementation if config is None else config._attn_implementation
        return asked in _paged or is_flash(config, requested_attention_implementation, version)

    def load_or_ours(implementation: Any, *rest: Any, **named: Any) -> Any:
        return (
            (((attention_forward,) * 5,) * 2)
            if implementation in _paged
            else load(implementation, *rest, **named)
        )

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
    if (
        not getattr(model, "_supports_attention_backend", False)
        and "ALL_ATTENTION_FUNCTIONS" not in frame.f_globals
    ):
        say_once(
            f"{model.__name__} does not call {name!r}, nor any other attention that is registered: it has its own, in "
            f"{model.__module__}, and flashjit computes nothing for it."
        )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The signature that transformers calls. query: [batch, heads_q, seqlen_q, head_dim]; key and value: [batch, heads_kv,
    seqlen_kv, head_dim]. Returns [batch, seqlen_q, heads_q, head_dim], and no weights.

    softcap: softcap * tanh(score / softcap). s_aux: sinks, [heads_q]. position_bias: added to the scores. cu_seq_lens_q, and others
    like it in `more`: sequences are packed, and a mask or a bias, which covers all rows, applies within each. In continuous
    batching keys may be in pages.
    """
    if output_attentions or getattr(getattr(module, "config", None), "output_attentions", False):
        say_once(
            "output_attentions=True: flashjit never has the attention weights in memory, and gives None for them. Use "
            'model.set_attn_implementation("eager") where they are wanted.'
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    programs = _dense_programs(attention_mask, position_bias, softcap, query, key)
    if cu_seq_lens_q is not None:
        dense = attention_mask is not None or position_bias is not None
        causal = bool(is_causal)
        if attention_mask is not None:  # which has the causal part and the window in it
            causal, more["sliding_window"] = False, None
        out = _packed_forward(
            query, key, value, cu_seq_lens_q, dropout, scaling, causal, s_aux, programs, dense, **more
        )
        return out.transpose(1, 2).contiguous(), None
    # As transformers means it: a mask has the causal part in it, and a single query sees all keys.
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
    dim_v = value.shape[3]
    query, key, value, scale = supported(query, key, value, scaling)
    out = attention(
        query,
        key,
        value,
        causal="top_left" if causal and query.shape[2] != key.shape[2] else causal,
        scale=scale,
        dropout_p=dropout,
        sinks=s_aux,
        **programs,
    )
    if out.shape[3] != dim_v:
        out = out[..., :dim_v]
    return out.transpose(1, 2).contiguous(), None


def _dense_programs(
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    softcap: float | None,
    query: Tensor,
    key: Tensor,
) -> dict[str, Any]:
    """score_mod, mask_mod and captures of attention()."""
    leading = query.shape[:1]
    score, mask, captures = mask_programs(attention_mask, leading, query, key)
    captures = captures or {}
    if position_bias is not None:
        bias, _, of_bias = mask_programs(position_bias, leading, query, key)
        score = (score or "score") + bias.removeprefix("score").replace("attn_mask", "position_bias")
        captures["position_bias"] = of_bias["attn_mask"]
    if softcap is not None:
        if score is not None:
            raise Unsupported(
                "softcap together with an additive mask or a position bias is not supported here: use the "
                "eager implementation for this model."
            )
        score, captures["softcap"] = "softcap * tanh(score / softcap)", float(softcap)
    return {"score_mod": score, "mask_mod": mask, "captures": captures or None}


def _packed_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens_q: Tensor,
    dropout: float,
    scaling: float | None,
    causal: bool,
    s_aux: Tensor | None,
    programs: dict[str, Any],
    dense: bool,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """O, [1, heads_q, all rows, dim of V], of sequences packed one behind the other. With a block_table, each has one new key, which
    goes into the caches' pages [pages, rows of a page, heads_kv, head_dim]. dense: the programs read a mask or a bias of all rows."""
    if cu_seq_lens_k is None or block_table is None and (max_length_q is None or max_length_k is None):
        raise InvalidArgument(
            "cu_seq_lens_q is given without cu_seq_lens_k, max_length_q or max_length_k: packed sequences need all "
            "four, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives them."
        )
    if dense and block_table is not None:
        raise Unsupported(
            "attention_mask or position_bias comes with a block_table: keys in pages have no dense mask; leave it "
            "out, or use a cache without pages."
        )
    dim_v = value.shape[3]
    query, key, value, scale = supported(query, key, value, scaling)
    offsets = cu_seq_lens_q.int(), cu_seq_lens_k.int()
    if dense:
        programs = _read_by_sequences(programs, *offsets)
    if sliding_window is not None:
        programs, causal = _with_window(programs, sliding_window, causal), False
    named = {"causal": causal, "scale": scale, "dropout_p": dropout, "sinks": s_aux, **programs}
    if block_table is None:
        out = attention(
            query,
            key,
            value,
            cu_seqlens_q=offsets[0],
            cu_seqlens_kv=offsets[1],
            max_seqlen_q=int(max_length_q),
            max_seqlen_kv=int(max_length_k),
            **named,
        )
        return out[..., :dim_v]
    sequences = block_table.shape[0]
    lengths = cu_seq_lens_k[: sequences + 1].diff().int()
    k_pages, v_pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)  # type: ignore[union-attr]
    q, k, v = (x.transpose(0, 2) for x in (query, key, value))  # a batch of sequences
    try:
        append(k, v, k_pages, v_pages, kv_lengths=lengths, page_table=block_table)
        out = attention(q, k_pages, v_pages, kv_lengths=lengths, page_table=block_table, **named)
    except Error as error:
        raise renamed(error, {"page_table": "block_table", "kv_lengths": "cu_seq_lens_k"}) from None
    return out[..., :dim_v].transpose(0, 2)


def _read_by_sequences(programs: dict[str, Any], first_q: Tensor, first_kv: Tensor) -> dict[str, Any]:
    """Programs that read a dense mask or bias of all rows, although q and kv count from the start of sequence b."""
    captures = dict(programs["captures"] or {})
    texts = {name: programs[name] for name in ("score_mod", "mask_mod") if programs[name] is not None}
    for position, name, first in (("q", "first_q", first_q), ("kv", "first_kv", first_kv)):
        moved = {
            mod: re.sub(rf"\b{position}\b", f"{name}[b] + {position}", text) for mod, text in texts.items()
        }
        if moved != texts:
            texts, captures[name] = moved, first
    return {**programs, **texts, "captures": captures}


def _with_window(programs: dict[str, Any], window: int, causal: bool) -> dict[str, Any]:
    """A window counts the query's own key."""
    at = "q + seqlen_kv - seqlen_q"
    mask = f"kv > {at} - window && " + (f"kv <= {at}" if causal else f"kv < {at} + window")
    return {**programs, "mask_mod": mask, "captures": {**(programs["captures"] or {}), "window": int(window)}}

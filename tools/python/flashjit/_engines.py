"""A layer's attention as serving engines describe it: packed queries over pages, in the engine's memory for O."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._attention import attention
from ._cache import append
from ._can import can
from ._head_dims import head_dims
from ._launch import bind_context
from ._named import AT_LAST, SOFTCAP, window_text
from ._tensors import KV_TYPES, SPEC_TYPES
from .errors import InvalidArgument
from .flash_attn._attend import with_batch
from .programs import repeated

#: The first of a step's own keys.
FIRST_NEW = "seqlen_kv - seqlen_q"

#: The names that engines have for the types of caches.
CACHE_TYPES = {
    "auto": None,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}

#: The format of caches that no type names.
CACHE_FORMATS = {"int4_per_token_head": "uint4:row:bf16:apart:zero"}

#: The format of latents that vLLM has for sparse attention.
SPARSE_FORMAT = "fp8_ds_mla"


def has_key_scales(cache_type: str | None) -> bool:
    """Whether each key and head has a scale of its own, which is made as the key is stored."""
    return (cache_type or "").endswith("_per_token_head")


class Tree(NamedTuple):
    """Drafts that may have siblings, at most 64 of each sequence."""

    ancestors: Tensor  # int64 [sequences, drafts]: bit n says whether a draft sees the n-th, itself included
    depth: Tensor  # int32 [sequences, drafts]: how many of them are before it


class Batch(NamedTuple):
    """What all layers of a step share."""

    cu_seqlens: Tensor  # int32 [sequences + 1]: the rows of Q of each sequence
    lengths: Tensor  # int32 [sequences]: keys, with the new ones of this step
    table: Tensor | None  # int32 [sequences, pages of the longest]; None: K and V are packed as Q
    most_q: int
    most_kv: int
    causal: bool | Tensor = True  # or bool [sequences]
    ranges: Tensor | None = None  # int32 [rows of Q, 2]: first and last key that a query sees besides
    prefix: Tensor | None = None  # int32 [1]: keys that all sequences share
    tree: Tree | None = None  # which of a step's own keys its queries see, in place of causal

    def only_decodes(self, q: Tensor) -> bool:
        """Whether row n of q is sequence n's one query: then no kernel has to look for a sequence's rows, and more kernels serve
        the call. Padded sequences are the last ones, and have no keys."""
        own = self.table is not None and self.prefix is None and self.ranges is None and self.tree is None
        return own and self.most_q == 1 and q.shape[0] == self.lengths.shape[0]


class Layer:
    """The masks and scores of a layer, which its calls share: nothing is traced in a call."""

    def __init__(
        self,
        scale: float,
        left: int | None = None,
        right: int | None = None,
        softcap: float | None = None,
        slopes: Tensor | None = None,
        clamped: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """left, right: how many keys a query sees before and after its own; right holds where the call is not causal.
        slopes: float32 [hq], of ALiBi. clamped: the window holds within a batch's ranges too."""
        self.scale, self.clamped, self.batch_invariant = float(scale), clamped, batch_invariant
        self._captures: dict[str, Any] = {}
        if left is not None:
            self._captures["window_left"] = int(left)
        if right is not None:
            self._captures["window_right"] = int(right)
        if softcap:
            self._captures["softcap"] = float(softcap)
        if slopes is not None:
            self._captures["slopes"] = slopes
        self._causal = {name: x for name, x in self._captures.items() if name != "window_right"}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        out: Tensor | None = None,
        wants_lse: bool = False,
        q_rope: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """O and LSE [hq, rows] of q [rows, hq, d], over pages k, v [pages, hkv, rows of a page, d], or over k, v [rows, hkv, d].

        out: where O goes, [rows, hq, d_v]. q_rope: the columns of latents' Q after V's, [rows, hq, d - d_v]. more: attention()'s scales, sinks and v_columns."""
        if batch.table is None:
            k, v = with_batch(k), None if v is None else with_batch(v)
            more.update(cu_seqlens_kv=batch.cu_seqlens, max_seqlen_kv=bound(batch.most_kv))
        else:
            room = batch.table.shape[1] * k.shape[2]
            more.update(
                page_table=batch.table,
                kv_lengths=batch.lengths,
                max_seqlen_kv=min(bound(batch.most_kv), room),
                prefix_length=batch.prefix,
            )
        decodes = batch.only_decodes(q) and not self.batch_invariant
        as_given = _one_query_each if decodes else with_batch
        if not decodes:
            more.update(cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=bound(batch.most_q))
        found = attention(
            as_given(q),
            k,
            v,
            scale=self.scale,
            out=None if out is None else as_given(out),
            q_rope=None if q_rope is None else as_given(q_rope),
            return_lse=wants_lse,
            batch_invariant=self.batch_invariant,
            **self.masks(batch),
            **more,
        )
        o, lse = found if wants_lse else (found, None)
        if decodes:
            return o[:, :, 0] if out is None else out, None if lse is None else lse[..., 0].transpose(0, 1)
        result = o[0].transpose(0, 1) if out is None else out
        return result, None if lse is None else lse.squeeze(0)

    def masks(self, batch: Batch) -> dict[str, Any]:
        """attention()'s causal and mask_mod, a program with the score in it."""
        kind, more = "causal" if batch.causal is not False else "full", {}
        if batch.tree is not None:
            kind, more = "tree", {"ancestors": batch.tree.ancestors}
            if "window_left" in self._captures:
                more["depth"] = batch.tree.depth
        elif batch.ranges is not None:
            kind = "clamped" if self.clamped else "ranges"
            more = {"ranges": batch.ranges, "first": batch.cu_seqlens}
        elif isinstance(batch.causal, Tensor):
            kind, more = "each", {"is_causal": batch.causal}
        captures = self._captures if kind in ("full", "each") else self._causal
        captures = {**captures, **more} if more else captures
        score, mask = _programs(kind, tuple(captures))
        if score is None and mask is None:
            return {"causal": kind == "causal"}
        return {"causal": kind == "causal", "mask_mod": repeated(score, mask, captures)}


def _one_query_each(rows: Tensor) -> Tensor:
    """[sequences, heads, 1, d] of rows [sequences, heads, d]: a view."""
    return rows[:, :, None]


@functools.cache
def _programs(kind: str, given: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Texts of the score and of the mask. given: the captures."""
    score = SOFTCAP if "softcap" in given else "score"
    if "slopes" in given:
        score += f" + slopes[h] * to_float(kv - ({AT_LAST}))"
    left = window_text(AT_LAST, "window_left" if "window_left" in given else None, None)
    right = window_text(AT_LAST, None, "window_right" if "window_right" in given else None)
    before = f"kv <= {AT_LAST}"
    own = "kv >= ranges[first[b] + q, 0] && kv <= ranges[first[b] + q, 1]"
    draft = f"kv - ({FIRST_NEW})"
    seen = f"({draft} < 0 || (ancestors[b, q] >> ({draft}) & 1) == 1)"
    near = [f"kv >= {FIRST_NEW} - window_left", f"kv >= {FIRST_NEW} + depth[b, q] - window_left"] * len(left)
    conditions = {
        "causal": left,
        "full": left + right,
        "each": [f"(kv <= {AT_LAST} || !is_causal[b])", *left, *right],
        "ranges": [f"({' && '.join([before, *left])} || {own})"],
        "clamped": [f"({before} || {own})", *left],
        "tree": [seen, *near],
    }[kind]
    return None if score == "score" else score, " && ".join(conditions) or None


def of_latents(cache: Tensor, scale: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
    """A cache of latents as attention() takes it, and its arguments for FP8, where the cache is of that. vLLM's are bytes then."""
    if cache.element_size() != 1:
        return cache, {}
    form = KV_TYPES[torch.float8_e4m3fn if cache.dtype == torch.uint8 else cache.dtype]
    return cache.view(torch.uint8), {"k_format": form, "k_scale": scale}


def bound(size: int) -> int:
    """A power of two that is no less: lengths that grow from step to step share a launch."""
    return 1 << max(size - 1, 0).bit_length()


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **stored: Any) -> None:
    """New rows k, v [rows, hkv, d] into pages [pages, hkv, rows of a page, d], where slots [rows] says; -1: nowhere.
    stored: append()'s scales and formats."""
    rows = slots.numel()
    append(with_batch(k[:rows]), with_batch(v[:rows]), k_cache, v_cache, slots=slots, **stored)


def why_not(
    head_dim: int,
    dtype: torch.dtype,
    cache_type: str | None,
    page_size: int | None = None,
    sinks: bool = False,
    capability: Sequence[int] | None = None,
) -> str | None:
    """Why no kernel serves a layer of this kind, or None. page_size: rows; None: 16. capability: as _reason() has it."""
    cache = CACHE_TYPES.get(cache_type or "auto", "unknown")
    form = KV_TYPES.get(cache) or CACHE_FORMATS.get(cache_type or "")
    if dtype not in SPEC_TYPES:
        return f"flashjit computes in float16, bfloat16 and float32, not in {dtype}"
    if cache == "unknown" and form is None:
        return f"flashjit has no cache of the type {cache_type}"
    if form is None and cache not in (None, dtype):
        return f"flashjit's caches have the type of the model, {dtype}, or 8 bits, not {cache_type}"
    if form is not None and head_dim > 256:  # simt's alone, which is slow
        return (
            f"flashjit has tensor cores for {cache_type} caches of head sizes up to 256, not for {head_dim}"
        )
    if has_key_scales(cache_type) and head_dim % 16:
        return f"flashjit has {cache_type} caches of head sizes that are multiples of 16, not of {head_dim}"
    codes = f":kv{{{form}}}" if form is not None else ""
    options = f"{codes}:causal:varlen:pages{page_size or 16}{':sinks' if sinks else ''}"
    options += ":key_scales" if has_key_scales(cache_type) and cache in KV_TYPES else ""
    return _reason(f"{SPEC_TYPES[dtype]}:d{head_dim}{options}", capability)


def why_not_latent(
    columns: int,
    dtype: torch.dtype,
    cache_type: str | None,
    rank: int | None = None,
    page_size: int | None = None,
    capability: Sequence[int] | None = None,
    sparse: bool = False,
) -> str | None:
    """Likewise of latent attention. rank: columns that V has; None: not known, as many as there may be. sparse: queries have lists
    of keys."""
    if dtype not in SPEC_TYPES:
        return f"flashjit computes in float16, bfloat16 and float32, not in {dtype}"
    cache = CACHE_TYPES.get(cache_type or "auto", "unknown")
    form = SPARSE_FORMAT if sparse and cache_type == SPARSE_FORMAT else KV_TYPES.get(cache)
    if form is None and cache not in (None, dtype) or has_key_scales(cache_type) or cache == torch.int8:
        return f"flashjit's latent caches have the type of the model, {dtype}, or FP8, not {cache_type}"
    options = (f":k{{{form}}}" if form else "") + (":varlen:indices" if sparse else ":causal")
    dims = f"{columns}x{min(columns, head_dims().most_v) if rank is None else rank}"
    return _reason(f"{SPEC_TYPES[dtype]}:d{dims}{options}:pages{page_size or 16}:shared_kv", capability)


def _reason(spec: str, capability: Sequence[int] | None) -> str | None:
    """can()'s, of the current GPU, or before the engine has begun to use it, of one with the compute capability (major, minor). On
    a machine without a GPU, where the reference computes, of a GPU that has all families."""
    if torch.cuda.is_initialized():
        bind_context(torch.device("cuda"))  # which a thread that loads a model may lack
        return can(spec).reason
    if capability is None or tuple(capability) == (9, 0):
        return can(spec, device="sm_90a").reason
    try:
        return can(spec, device=f"sm_{capability[0]}{capability[1]}").reason
    except InvalidArgument:  # no common product of it is known: the layer asks again, on the GPU
        return None

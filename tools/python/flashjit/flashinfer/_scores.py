"""FlashInfer's options of a call as arguments of attention(): masks, scores and scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._named import AT_LAST, SOFTCAP, window_text
from .._tensors import KV_TYPES, SPEC_TYPES, describe
from ..errors import InvalidArgument, Unsupported
from ..programs import repeated

LOG2E = math.log2(math.e)
NO_ROPE = (
    "pos_encoding_mode is ROPE_LLAMA: flashjit has it for q of 16 or 32 bits, in wrappers of batches and in the single_ "
    "functions. Rotate other keys once, when they are stored (flashjit.append() does it in the same launch), and give NONE."
)
_PAIR = "q * seqlen_kv + kv"  # where FlashInfer's masks have a pair, from a sequence's first on


class Items(NamedTuple):
    """Multi-item scoring: after a prefix, which all see, a query sees the keys of its own item alone."""

    prefix: Tensor  # int32 [sequences]: keys of the prefix
    places: Tensor  # int32 [sequences, keys behind the prefix]: how many keys of its item are before each


class Seen(NamedTuple):
    """One more condition on pairs: the text of a program, and its captures."""

    text: str
    captures: dict[str, Any]


class Scores(NamedTuple):
    """How scores are made and masked: FlashInfer's names, each as plan() and the single_ functions take it."""

    sm_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    alibi: bool = False
    mask: Tensor | None = None  # bool, or bits in uint8, of all sequences one after another
    mask_start: Tensor | None = None  # int32 [sequences]: the first element of each
    batch_invariant: bool = False
    rope: tuple[float, float] | None = None  # scale and theta of ROPE_LLAMA
    rope_start: Any = 0  # the first query's position: a number, or int32 [sequences]
    items: Items | None = None
    seen: Seen | None = None


class Scales(NamedTuple):
    """What Q, K and V are multiplied with: numbers, or float32 with one element or one for each head."""

    q: Any = None
    k: Any = None
    v: Any = None


def read_scores(
    pos_encoding_mode: str,
    logits_soft_cap: float | None,
    causal: bool,
    window_left: int,
    sm_scale: float | None,
    mask: Tensor | None = None,
    mask_start: Tensor | None = None,
    batch_invariant: bool = False,
    rope: tuple[Any, Any] | None = None,
    rope_start: Any = 0,
) -> Scores:
    """Refuses what cannot be served. A mask is in the place of a causal one, as in FlashInfer. rope: scale and theta where K is a
    tensor that can be rotated as it is loaded; None of either: FlashInfer's."""
    rotates = pos_encoding_mode == "ROPE_LLAMA"
    if rotates and rope is None:
        raise Unsupported(NO_ROPE)
    if pos_encoding_mode not in ("NONE", "ALIBI", "ROPE_LLAMA"):
        raise InvalidArgument(f"pos_encoding_mode is {pos_encoding_mode!r}: give NONE, ALIBI or ROPE_LLAMA.")
    return Scores(
        sm_scale,
        causal and mask is None,
        window_left,
        logits_soft_cap,
        pos_encoding_mode == "ALIBI",
        mask,
        mask_start,
        batch_invariant,
        (float(rope[0] or 1), float(rope[1] or 1e4)) if rotates and rope is not None else None,
        rope_start,
    )


def read_items(
    prefix: Tensor | None, places: Tensor | None, longest: int, keys: Tensor, device: torch.device
) -> Items | None:
    """FlashInfer's prefix_len_ptr, token_pos_in_items_ptr, of `longest` numbers a sequence, and keys of each sequence, on the host."""
    if prefix is None:
        if places is not None:
            raise InvalidArgument(
                "token_pos_in_items_ptr is given without prefix_len_ptr: give both, or neither."
            )
        return None
    if places is None or prefix.numel() != keys.numel():
        raise InvalidArgument(
            f"prefix_len_ptr is {describe(prefix)} and token_pos_in_items_ptr {describe(places)}: give a number for each of the "
            f"{keys.numel()} sequences, and the place of each key behind the prefix in its item."
        )
    given = places.cpu().to(torch.int32).reshape(-1)
    table = torch.zeros(keys.numel(), max(1, int(keys.max())) if keys.numel() else 1, dtype=torch.int32)
    longest = longest or given.numel() // max(1, keys.numel())
    for row, own in zip(table, given.split(longest) if longest else ()):
        row[: len(own)] = own[: len(row)]
    return Items(prefix.reshape(-1).to(device=device, dtype=torch.int32), table.to(device))


def refuse(**given: Any) -> None:
    """What flashjit does not have, by its name in FlashInfer."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise Unsupported(f"{name} is given: flashjit.flashinfer does not have it; leave it out.")


def dtype_of(given: Any, default: Any = None) -> torch.dtype:
    """A torch.dtype of that, or of its name."""
    given = default if given is None else given
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"{given!r} is no type: give a torch.dtype, or its name.")
    return found


def type_of_result(out_dtype: Any, out: Tensor | None, q: torch.dtype) -> torch.dtype:
    """O's type where a function takes both it and memory for O."""
    chosen = dtype_of(out_dtype, type_of_out(q) if out is None else out.dtype)
    if out is not None and chosen != out.dtype:
        raise InvalidArgument(
            f"out_dtype is {chosen}, but out is {describe(out)}: leave out_dtype out, or give out of this type."
        )
    return chosen


def one_of(sinks: Any) -> Any:
    """The tensor of a list, as FlashInfer takes sinks."""
    if not isinstance(sinks, (list, tuple)):
        return sinks
    if len(sinks) != 1:
        raise InvalidArgument(f"sinks is a list of {len(sinks)}: give one tensor, float32 [hq].")
    return sinks[0]


def type_of_out(q: torch.dtype) -> torch.dtype:
    """O's type where none is given."""
    return torch.bfloat16 if q.itemsize == 1 else q


def is_invariant(fixed_split_size: int | None, disable_split_kv: bool) -> bool:
    """Whether results are to be the same whatever else is in the batch."""
    return disable_split_kv or (fixed_split_size or 0) > 0


def check_dtypes(q: torch.dtype, kv: torch.dtype, out: torch.dtype) -> None:
    """What plan() can say of the types of a call."""
    if kv == torch.uint8:
        raise Unsupported("kv_data_type is uint8, NVFP4: flashjit has caches of 16 bits, FP8 and INT8.")
    if q not in SPEC_TYPES and q not in KV_TYPES or kv not in KV_TYPES and kv != q:
        raise Unsupported(
            f"q_data_type is {q} and kv_data_type {kv}: give one type of 16 or 32 bits, or float8_e4m3fn, float8_e5m2 or "
            "int8 as kv_data_type."
        )
    if out not in SPEC_TYPES:
        raise Unsupported(
            f"o_data_type is {out}: give torch.bfloat16, torch.float16 or torch.float32; with q of 8 bits it is the type of "
            "q where it is left out."
        )


def call(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, scales: Scales, out_dtype: torch.dtype
) -> dict[str, Any]:
    """attention()'s arguments, for q [.., hq, .., d] in four dimensions. V's scale is among them where K has 8 bits."""
    factor, more, captures = _scaled(q, k, scores, scales)
    score, mask = _programs(
        tuple(name for name in captures if name in ("q_scales", "k_scales")),
        scores.alibi,
        bool(scores.logits_soft_cap),
        None if scores.mask is None else scores.mask.dtype == torch.uint8,
        scores.window_left >= 0,
        scores.items is not None,
        None if scores.seen is None else scores.seen.text,
    )
    if scores.alibi:
        captures["slopes"] = alibi_slopes(q.shape[1], q.device)
    if scores.logits_soft_cap:
        captures["softcap"] = float(scores.logits_soft_cap)
    if scores.mask is not None:
        captures.update(mask=scores.mask, mask_start=scores.mask_start)
    if scores.window_left >= 0:
        captures["window_left"] = int(scores.window_left)
    if scores.items is not None:
        captures.update(items_prefix=scores.items.prefix, items_places=scores.items.places)
    if scores.seen is not None:
        captures.update(scores.seen.captures)
    if scores.sm_scale is not None or factor != 1:
        base = q.shape[3] ** -0.5 if scores.sm_scale is None else scores.sm_scale
        more["scale"] = float(base * factor)
    if q.dtype in KV_TYPES:
        more["out_dtype"] = out_dtype
    elif out_dtype == torch.float32 != q.dtype:
        more["out_dtype"] = torch.float32
    if scores.rope is not None:
        if q.dtype in KV_TYPES or k.dtype in KV_TYPES:
            raise Unsupported(NO_ROPE)
        captures.update(
            rope_start=scores.rope_start, rope_freq=frequencies(k.shape[3], *scores.rope, k.device)
        )
        q_mod, k_mod = _rotations(k.shape[3], isinstance(scores.rope_start, Tensor))
        more.update(score_mod=score, mask_mod=mask, q_mod=q_mod, k_mod=k_mod, captures=captures)
    elif score is not None or mask is not None:
        more["mask_mod"] = repeated(score, mask, captures)
    return {
        "causal": scores.causal or scores.items is not None,
        "batch_invariant": scores.batch_invariant,
        **more,
    }


@functools.cache
def _rotations(dim: int, packed: bool) -> tuple[str, str]:
    """Texts of q_mod and k_mod: rotation of halves by the position's angles. packed: each sequence has a first query of its own."""
    half = dim // 2

    def rotated(position: str) -> str:
        angle = f"to_float({position}) * rope_freq[column % {half}]"
        other = f"select(column < {half}, -element_at(column + {half}), element_at(column - {half}))"
        return f"element * cos({angle}) + {other} * sin({angle})"

    return rotated(f"q + rope_start{'[b]' if packed else ''}"), rotated("kv")


@functools.lru_cache(maxsize=64)
def frequencies(dim: int, scale: float, theta: float, device: torch.device) -> Tensor:
    """What a position is multiplied with, for each pair of columns."""
    exponents = torch.arange(dim // 2, dtype=torch.float64) * (-2 / dim)
    return (theta**exponents / scale).float().to(device)


@functools.cache
def _programs(
    scales: Sequence[str],
    alibi: bool,
    capped: bool,
    bits: bool | None,
    window: bool,
    items: bool,
    seen: str | None,
) -> tuple[str | None, str | None]:
    """Texts of the score and of the mask. bits: whether a custom mask has eight pairs in a byte; None: there is none. seen: Seen's."""
    score = "score"
    for name in scales:
        score += f" * {name}[{'h' if name == 'q_scales' else 'h_kv'}]"
    if alibi:
        score += " + slopes[h] * to_float(kv - q)"
    if capped:
        score = SOFTCAP.replace("score", f"({score})")
    conditions = []
    if bits is not None:
        conditions.append(
            f"(mask[mask_start[b] + ({_PAIR}) / 8] >> ({_PAIR}) % 8 & 1) != 0"
            if bits
            else f"mask[mask_start[b] + {_PAIR}]"
        )
    if window:
        conditions += window_text(AT_LAST, "window_left", None)
    if items:
        behind = f"{AT_LAST} - items_prefix[b]"
        place = f"items_places[b, max({behind}, 0)]"
        conditions.append(f"({behind} < 0 || kv < items_prefix[b] || {AT_LAST} < kv + {place})")
    if seen is not None:
        conditions.append(f"({seen})")
    return None if score == "score" else score, " && ".join(conditions) or None


def _scaled(
    q: Tensor, k: Tensor, scores: Scores, scales: Scales
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """What the scale is multiplied with, attention()'s scales, and captures for scores."""
    factor = 1.0
    more: dict[str, Any] = {}
    captures: dict[str, Any] = {}
    quantized = k.dtype in KV_TYPES
    if quantized:
        one = constant(1.0, k.device)
        more.update(k_scale=one, v_scale=one)
        if q.dtype in KV_TYPES:
            more["q_scale"] = one
    for name, value in (("q", scales.q), ("k", scales.k)):
        if isinstance(value, Tensor):
            if name == "k" and quantized:
                more["k_scale"] = value.float().reshape(-1)
            else:
                heads = q.shape[1] if name == "q" else k.shape[1]
                captures[f"{name}_scales"] = of_heads(name, value, heads)
        elif value is not None:
            factor *= value
    if quantized and scales.v is not None:
        v = scales.v
        more["v_scale"] = v.float().reshape(-1) if isinstance(v, Tensor) else constant(float(v), k.device)
    return factor, more, captures


def of_heads(name: str, scale: Tensor, heads: int) -> Tensor:
    """float32 [heads] of a scale with one element or one for each head."""
    if scale.numel() not in (1, heads):
        raise InvalidArgument(
            f"The scale of {name} is {describe(scale)}: give one element, or one for each of its {heads} heads."
        )
    return scale.float().reshape(-1).expand(heads)


@functools.lru_cache(maxsize=256)
def constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes of its paper: a power of two of heads has 2 ** (-8 i / n), and the rest every second of twice as many."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    slopes += [2 ** (-4 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def read_mask(
    custom: Tensor | None, packed: Tensor | None, pairs: Tensor, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """A custom mask, and where each sequence's begins. pairs: queries times keys of each sequence."""
    given, sizes = (custom, pairs) if packed is None else (packed, (pairs + 7) // 8)
    if given is None:
        return None, None
    if given.numel() < int(sizes.sum()):
        name = "custom_mask" if packed is None else "packed_custom_mask"
        raise InvalidArgument(f"{name} is {describe(given)}: it must have {int(sizes.sum())} elements.")
    if packed is None and given.dim() > 1 and given.numel() != int(sizes.sum()):  # rows of another length
        raise InvalidArgument(
            f"custom_mask is {describe(given)}: give {int(sizes.sum())} elements, a row of its keys for each query."
        )
    if given.numel() == 0:  # sequences without pairs: programs read at least one element
        given = given.new_zeros(1)
    starts = (sizes.cumsum(0) - sizes).to(device=device, dtype=torch.int32)
    given = given.reshape(-1).to(device)
    return given if packed is not None or given.dtype == torch.bool else given != 0, starts

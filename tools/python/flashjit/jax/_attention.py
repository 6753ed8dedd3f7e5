"""attention() of JAX arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import read_accurate
from .._head_dims import wrong_head_dim
from .._library import spec_handle
from .._named import AT_LAST, CAUSAL, weights_of, window_text
from ..errors import InvalidArgument, WrongType
from ._call import alike
from ._codes import codes_of, in_four_dims
from ._derivatives import attend
from ._formats import check_formats, read_formats, refuse_block_scales
from ._out_codes import out_codes, scale_of_out
from ._packed import check_packed, packed
from ._problem import CODES, FIXED, Problem
from ._programs import Tracer

_TYPES = ("float16", "bfloat16", "float32")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    bias: Any = None,
    score_mod: Callable[..., Any] | None = None,
    weight_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_mod: Callable[..., Any] | None = None,
    k_mod: Callable[..., Any] | None = None,
    out_mod: Callable[..., Any] | None = None,
    segment_ids: Any = None,
    kv_lengths: Any = None,
    page_table: Any = None,
    cache: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_format: Any = None,
    v_format: Any = None,
    k_block_scale: Any = None,
    v_block_scale: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_key: Any = None,
    deterministic: bool = False,
    accurate: bool | str = False,
    layout: str = "BTNH",
    return_lse: bool = False,
    out_dtype: Any = None,
    out_scale: Any = None,
    swizzled_scales: bool = False,
) -> Any:
    """softmax(scale * Q K^T) V, with first and second derivatives (jax.grad, jax.jvp, jax.hessian) for q, k, v, bias, sinks and all
    float arrays that functions but mask_mod capture.

    q: [batch, seqlen_q, heads, head_dim]; k: [batch, seqlen_kv, heads_kv, head_dim]; v: [batch, seqlen_kv, heads_kv, head_dim_v].
        heads is a multiple of heads_kv; float16, bfloat16 or float32. The batch may be left out. head_dim is a multiple of 8 up
        to 576, head_dim_v up to 512. Forward alone: k and v, and q, of 8 bits, with scales; head_dim is then a multiple of 16.
    causal: query i sees keys up to i + seqlen_kv - seqlen_q (True, "bottom_right"), or up to i ("top_left").
    window: (left, right), or one number for both: how many keys before and after its own position a query sees.
    softcap: scores become softcap * tanh(score / softcap). scale: a Python number above 0; 1 / sqrt(head_dim) by default.
    bias: [batch or 1, heads or 1, seqlen_q or 1, seqlen_kv or 1], added to scores after softcap, before score_mod.
    score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score; mask_mod: mask_mod(b, h, q_idx, kv_idx) -> whether the pair
        attends. Functions of JAX scalars, float32 and int32, which may read any arrays of the caller.
    weight_mod: in place of the softmax: a function like score_mod, whose value is the weight of a pair: O is
        where(mask, weight_mod(scale * Q K^T + bias), 0) V, as in sigmoid attention, jax.nn.sigmoid(score - math.log(n)). Not with
        score_mod, softcap, sinks, dropout_p and return_lse.
    q_mod, k_mod: q_mod(row, b, h, q_idx, column) -> what the element at `column` of a row of q becomes before the scores;
        k_mod(row, b, h_kv, kv_idx, column) the same of k. row: float32 [head_dim]; a function takes elements of it, row[column ^ 1],
        and (row * row).sum(). k_mod not with a cache.
    out_mod: out_mod(out, b, h, q_idx, column) -> what an element of the result becomes, from float32. Derivatives of weight_mod,
        q_mod, k_mod and out_mod are the first ones of reverse mode (jax.grad, jax.vjp).
    segment_ids: int32 [batch or 1, length], or a pair, for queries and for keys: only pairs of one segment attend.
    kv_lengths: int32 [batch]: keys from there on are padding.
    page_table, cache: K and V are a cache, forward alone: pages [pages, rows, heads_kv, ...] in which key n of sequence b is row
        n % rows of page page_table[b, n // rows], or with cache=True slots [slots, capacity, heads_kv, ...], where page_table, if
        given, has the slot of each sequence. kv_lengths is then how many keys each has, and its last query sees its last key.
    cu_seqlens_q, cu_seqlens_kv: int32 [sequences + 1]: packed sequences, q [tokens, heads, head_dim]: b has the rows from entry b to
        entry b + 1. cu_seqlens_kv is cu_seqlens_q by default. Positions, `causal` and arrays indexed by b are of a sequence's own;
        rows after the last sequence give 0. max_seqlen_q, max_seqlen_kv: Python numbers, at least the rows of the longest; by
        default all rows, which launches more work than there is.
    q_scale, k_scale, v_scale: where k and v are float8_e4m3fn, float8_e5m2 or int8, k's values are its elements times k_scale:
        float32, one number, [heads_kv], [batch, heads_kv], or of keys [batch, heads_kv, seqlen_kv] ([pages, heads_kv, rows] of a
        cache). q_scale where q is of 8 bits as well, of k's type: one number or [batch, heads_kv]; the result is bfloat16.
    k_format, v_format: forward alone: k or v is uint8, rows in this KV format, such as "nvfp4" or "int4:g32:fp16:zero", as
        new_cache() makes room for them and append() writes them; its last dimension is the bytes of a row. Formats of codes alone,
        and "scaled" ones, have k_scale and v_scale. k_block_scale, v_block_scale: the scales of formats that have these in a tensor
        of their own, [batch, seqlen_kv, heads_kv, numbers], or with a row for each group of keys; laid out like k and v.
    sinks: float32 [heads], a logit more for each softmax.
    dropout_p, dropout_key: the share of probabilities that become 0, and a key of jax.random.
    deterministic: whether the backward pass gives the same bits each time.
    accurate: whether the backward pass reads O in float32, before it is rounded to the type of q. Gradients of queries with one strong
        key then have the precision of that type. "fp32": P and dS also enter their products as two elements each, so that O and all
        gradients have the errors of attention in float32. For reverse mode; a call without gradients takes longer, too. No effect with
        weight_mod.
    layout: "BTNH", or "BHSD" for [batch, heads, length, head_dim].
    return_lse: whether to return (out, lse), with lse float32 like q without head_dim, differentiable.
    out_dtype, out_scale: forward alone: O as codes. jnp.float8_e4m3fn: O is code * out_scale, float32, one number; without out_scale
        (out, scale) is returned, with a scale for each row of a head, float32 [..., 1]. jnp.float4_e2m1fn (NVFP4) with out_scale:
        (out, scale), uint8 with two codes a byte, the first column in its low bits, and float8_e4m3fn [..., head_dim_v / 16]: O is
        code * scale of its 16 columns * out_scale. An LSE comes last.
    swizzled_scales: NVFP4's scales as cuBLAS and engines read them (128x4): float8_e4m3fn [rows, heads * head_dim_v / 16], with a row for
        each token, b * seqlen_q + i, rounded up to a multiple of 128, of head_dim_v in multiples of 64. Rows behind the last token may
        hold anything.

    Returns O, like q with V's last dimension. A query without keys gives 0, with an LSE of -inf. Skip-softmax is
    flashjit.attention()'s alone. Raises flashjit.Error.
    """
    given = dict(locals())
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    cached = cache or page_table is not None
    if q.ndim == k.ndim == v.ndim == 3 and not cached:
        named = {name: value for name, value in given.items() if name not in "qkv"}
        named.update(
            {name: jnp.asarray(x)[None] for name, x in named.items() if "block" in name and x is not None}
        )
        result = attention(q[None], k[None], v[None], **named)
        return jax.tree.map(lambda x: x if x.ndim == 2 else x[0], result)  # swizzled scales have no batch
    formats = read_formats(k, v, k_format, v_format)
    batch, heads, seqlen_q, seqlen_kv = _check(q, k, v, layout, cached, bool(formats))
    starts, longest = packed(
        cu_seqlens_q, cu_seqlens_kv, (max_seqlen_q, max_seqlen_kv), (seqlen_q, seqlen_kv)
    )
    if longest:
        check_packed(batch, cache=cached, kv_lengths=kv_lengths, segment_ids=segment_ids)
        batch, (seqlen_q, seqlen_kv) = starts[0].shape[0] - 1, longest
    pages, table = check_table(page_table, cache, batch, seqlen_kv, "k") if cached else (None, None)
    if cached and kv_lengths is None:
        raise InvalidArgument("kv_lengths is missing: with a cache it says how many keys each sequence has.")
    if table is not None and pages:
        seqlen_kv *= table.shape[1]
    if (
        not cached
        and kv_lengths is not None
        and seqlen_q > 1
        and causal in (True, "bottom_right")
        and seqlen_q != seqlen_kv
    ):
        raise InvalidArgument(
            f'causal with kv_lengths has two meanings for {seqlen_q} queries and {seqlen_kv} keys: give causal="top_left", '
            "or a mask_mod that says which keys a query sees."
        )
    tracer = Tracer(batch, heads, seqlen_q, seqlen_kv, k.shape[2 if layout == "BTNH" else 1])
    fixed = {
        "kv_lengths": checked("kv_lengths", kv_lengths, "int32", (batch,)),
        "page_table": table,
        "cu_seqlens_q": starts[0],
        "cu_seqlens_kv": starts[1],
        "sinks": checked("sinks", sinks, "float32", (heads,)),
        "rng": _dropout_state(dropout_p, dropout_key),
        "q_scale": in_four_dims("q_scale", q_scale, False),
        "k_scale": in_four_dims("k_scale", k_scale, cached),
        "v_scale": in_four_dims("v_scale", v_scale, cached),
        "k_block_scale": None if k_block_scale is None else jnp.asarray(k_block_scale),
        "v_block_scale": None if v_block_scale is None else jnp.asarray(v_block_scale),
        "out_scale": scale_of_out(out_dtype, out_scale),
    }
    scales = {name: fixed[name] for name in ("q_scale", "k_scale", "v_scale")}
    blocks = [fixed["k_block_scale"], fixed["v_block_scale"]]
    if formats:
        codes, dim_v = formats.spec_text(scales), check_formats(formats, q, k, v, layout, scales, blocks)
    else:
        codes, dim_v = codes_of(q, k, scales), None
        refuse_block_scales(blocks)
    columns = (q.shape[3], v.shape[3] if dim_v is None else dim_v)
    codes = out_codes(out_dtype, out_scale, bool(swizzled_scales), columns[1]) + codes
    two_terms, accurate = read_accurate(accurate)
    of_pairs = weights_of(weight_mod, score_mod, softcap, return_lse, None, False)
    kind = "score_mod" if weight_mod is None else "weight_mod"
    score, masks = _score(tracer, softcap, bias, kind, of_pairs)
    masks += _masks(tracer, causal, window, segment_ids, mask_mod)
    program, captures = tracer.program(
        score=score,
        mask=" && ".join(f"({mask})" for mask in masks if mask),
        **_element_mods(tracer, columns, q_mod, k_mod, out_mod),
    )
    problem = Problem(
        layout=layout,
        scale=_scale(scale, q.shape[3]),
        program=program,
        batch=batch,
        dropout=float(dropout_p),
        deterministic=bool(deterministic),
        fixed=tuple(name for name in FIXED if fixed[name] is not None),
        pages=pages,
        longest=longest,
        codes=codes,
        dim_v=dim_v,
        accurate=bool(accurate) and q.dtype in (jnp.float16, jnp.bfloat16) and weight_mod is None,
        two_terms=two_terms,
        weight_mod=weight_mod is not None,
    )
    _check_spec(problem, q, v)
    arrays = alike([q, k, v, *[fixed[name] for name in problem.fixed], *captures])
    made = dict(zip(problem.results(), attend(problem, arrays)))
    out = made["out"] if problem.out_format else made["out"].astype(problem.rounded_type(q))
    rest = [_scales_of_out(made["out_block_scale"], swizzled_scales)] if "out_block_scale" in made else []
    rest += [made["lse"][..., 0]] if return_lse else []
    return (out, *rest) if rest else out


def _scales_of_out(scales: Any, swizzled: bool) -> Any:
    return scales.reshape(scales.size // scales.shape[3], scales.shape[3]) if swizzled else scales


def _check(q: Any, k: Any, v: Any, layout: str, cached: bool, in_formats: bool) -> tuple[int, int, int, int]:
    """The problem's batch, heads and lengths. in_formats: check_formats() looks at the types and rows of K and V."""
    if layout not in ("BTNH", "BHSD"):
        raise InvalidArgument(f'layout is {layout!r}: give "BTNH" or "BHSD".')
    codes = str(k.dtype) in CODES and not in_formats  # of 8 bits, which q need not be
    for name, x in (("q", q), ("k", k), ("v", v)):
        stored = in_formats and name != "q"
        if not stored and str(x.dtype) not in (*_TYPES, *(CODES if codes else ())):
            if x.dtype == "uint8" and name != "q":
                raise WrongType(
                    f'{name} is {_described(x)}: name the format of its bytes, such as k_format="nvfp4", v_format="nvfp4".'
                )
            raise WrongType(
                f"{name} is {_described(x)}: flashjit computes in {', '.join(_TYPES)}; convert it with .astype()."
            )
        if not stored and x.dtype != (k.dtype if codes else q.dtype) and not (codes and name == "q"):
            first, other = ("k", k) if codes else ("q", q)
            raise WrongType(
                f"{first} is {other.dtype} and {name} is {x.dtype}: they must have one type; convert one."
            )
        if x.ndim != 4:
            raise InvalidArgument(
                f"{name} is {_described(x)}: it needs the four dimensions {layout}, or q, k and v all without the first."
            )
    heads, length = (2, 1) if layout == "BTNH" else (1, 2)
    other_dim = k.shape[3] != q.shape[3] and not in_formats
    if k.shape[:3] != v.shape[:3] or other_dim or k.shape[0] != q.shape[0] and not cached:
        raise InvalidArgument(
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}: batches must be equal, k must have the "
            "head_dim of q, and v the heads and the length of k."
        )
    if k.shape[heads] == 0 and q.shape[heads] or k.shape[heads] and q.shape[heads] % k.shape[heads]:
        raise InvalidArgument(
            f"q has {q.shape[heads]} heads and k has {k.shape[heads]}: the heads of q must be a multiple of the heads of k "
            f"(layout is {layout!r})."
        )
    return q.shape[0], q.shape[heads], q.shape[length], k.shape[length]


def check_table(table: Any, cache: bool, batch: int, rows: int, name: str) -> tuple[int, Any]:
    """The rows of a page, 0 where a cache has slots, and its table."""
    if table is None:
        return 0, None
    table = jnp.asarray(table)
    if table.dtype.kind not in "iu" or table.ndim != (1 if cache else 2) or table.shape[0] != batch:
        wanted = (
            f"[{batch}], the slot of each sequence" if cache else f"[{batch}, pages of the longest sequence]"
        )
        raise InvalidArgument(f"page_table is {_described(table)}: it must be int32 {wanted}.")
    if not cache and rows == 0:
        raise InvalidArgument(f"the pages of {name} have no rows: give 1 or more, or cache=True for slots.")
    return 0 if cache else rows, table.astype("int32")


def _check_spec(problem: Problem, q: Any, v: Any) -> None:
    if not problem.codes and (wrong := wrong_head_dim(q.shape[3], problem.columns_v(v))):
        raise InvalidArgument(
            f"q is {_described(q)} and v is {_described(v)}: their {wrong}; pad them with zeros and give the "
            "scale, or call flashjit.jax.dot_product_attention(), which does so."
        )
    spec_handle(problem.spec(q, v))


def _described(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, jax.core.Tracer) or not _is_positive(scale):
        raise InvalidArgument(
            f"scale is {scale}: give a Python number above 0 that float32 holds, which is part of the compiled call; to learn "
            "it, multiply the score by a captured array in score_mod."
        )
    return float(scale)


def _is_positive(number: float) -> bool:
    """Whether float32 holds the number, or one close to it, above 0."""
    smallest, largest = 1e-45, float(jnp.finfo("float32").max)
    return smallest <= number <= largest


def checked(name: str, array: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    if array is None:
        return None
    array = jnp.asarray(array)
    kinds = "iu" if dtype == "int32" else "fV"  # V: bfloat16
    if array.dtype.kind not in kinds or array.shape != shape:
        raise InvalidArgument(f"{name} is {_described(array)}: it must be {dtype} {list(shape)}.")
    return array.astype(dtype)


def _dropout_state(dropout_p: float, key: Any) -> Any:
    """Seed and offset as the kernels read them: two integers of 64 bits."""
    if isinstance(dropout_p, jax.core.Tracer) or not 0 <= dropout_p < 1:
        raise InvalidArgument(
            f"dropout_p is {dropout_p}: give a Python number of at least 0 and less than 1."
        )
    if dropout_p == 0:
        return None
    if key is None:
        raise InvalidArgument(
            f"dropout_p is {dropout_p} and dropout_key is missing: give a key of jax.random."
        )
    return jax.random.bits(key, (4,), "uint32")


# --- what is made of scores, and which pairs attend ------------------------------------------------------------------


def _score(
    tracer: Tracer, softcap: float | None, bias: Any, kind: str, function: Any
) -> tuple[str, list[str]]:
    score = "score"
    conditions: list[str] = []
    if softcap is not None:
        if isinstance(softcap, jax.core.Tracer) or not _is_positive(softcap):
            raise InvalidArgument(
                f"softcap is {softcap}: give a Python number above 0 that float32 holds, or None for no cap."
            )
        score = f"({float(softcap)!r} * tanh(score / {float(softcap)!r}))"
    if bias is not None:
        bias = _check_pairs("bias", jnp.asarray(bias), tracer, "f")
        score = f"({score} + {tracer.read(bias, tracer.positions()).text})"
    if function is not None:
        score, conditions = tracer.score(kind, function, score)
    return score, conditions


def _element_mods(
    tracer: Tracer, columns: tuple[int, int], q_mod: Any, k_mod: Any, out_mod: Any
) -> dict[str, str]:
    """Texts, "" where there is no function. columns: of Q and K, and of O."""
    rows = {"q_mod": q_mod, "k_mod": k_mod}
    texts = {kind: "" if mod is None else tracer.row(kind, mod, columns[0]) for kind, mod in rows.items()}
    return {**texts, "out_mod": "" if out_mod is None else tracer.out(out_mod, columns[1])}


def _check_pairs(name: str, array: Any, tracer: Tracer, kind: str) -> Any:
    """An array of each pair, or of what pairs share."""
    wanted = list(tracer.pairs.values())
    right = array.dtype.kind in ("fV" if kind == "f" else kind)
    if not right or array.ndim != 4 or any(a not in (1, b) for a, b in zip(array.shape, wanted)):
        raise InvalidArgument(
            f"{name} is {_described(array)}: it must be {'floating-point' if kind == 'f' else 'bool'} "
            f"[{wanted[0]} or 1, {wanted[1]} or 1, {wanted[2]} or 1, {wanted[3]} or 1]: batch, heads, queries, keys."
        )
    return array


def _masks(tracer: Tracer, causal: Any, window: Any, segment_ids: Any, mask_mod: Any) -> list[str]:
    if not isinstance(causal, (bool, str)) or causal not in CAUSAL:
        raise InvalidArgument(f'causal is {causal!r}: give True, False, "bottom_right" or "top_left".')
    masks = [CAUSAL[causal]]
    if window is not None:
        left, right = _window(window)
        masks += window_text(
            "q" if causal == "top_left" else AT_LAST, str(left), None if causal else str(right)
        )
    if segment_ids is not None:
        masks.append(_segments(tracer, segment_ids))
    if mask_mod is not None:
        masks.append(tracer.mask(mask_mod))
    return masks


def _window(window: Any) -> tuple[int, int]:
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    try:
        left, right = (-1 if isinstance(side, bool) else operator.index(side) for side in pair)
    except (TypeError, ValueError):  # also of a traced number, and of other than two
        left = right = -1
    if left < 0 or right < 0:
        raise InvalidArgument(
            f"window is {window!r}: give (left, right) or one number, how many keys a query sees before and after its "
            "own position."
        )
    return min(left, 2**30), min(right, 2**30)


def _segments(tracer: Tracer, segment_ids: Any) -> str:
    pair = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise InvalidArgument(
            "segment_ids has not two arrays: give that of queries and that of keys, or one for both."
        )
    of_q, of_kv = (jnp.asarray(x) for x in pair) if pair[0] is not pair[1] else [jnp.asarray(pair[0])] * 2
    sizes = tracer.sizes
    for name, ids, length in (("queries", of_q, sizes["q"]), ("keys", of_kv, sizes["kv"])):
        if ids.dtype.kind != "i" or ids.shape not in ((sizes["b"], length), (1, length)):
            raise InvalidArgument(
                f"segment_ids of {name} is {_described(ids)}: it must be int32 [{sizes['b']} or 1, {length}]."
            )
    b, q, kv = (tracer.position(name) for name in ("b", "q", "kv"))
    return f"{tracer.read(of_q, (b, q)).text} == {tracer.read(of_kv, (b, kv)).text}"

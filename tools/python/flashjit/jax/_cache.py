"""append() of JAX arrays: new rows in a cache, as a new cache in the memory of the old one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from .._library import spec_handle
from .._values import ELEMENTS
from ..errors import InvalidArgument, Unsupported, WrongType
from . import _handler
from ._attention import check_table, checked
from ._call import alike, one_after_another
from ._codes import codes_of, in_four_dims
from ._formats import check_formats, read_formats, refuse_block_scales
from ._problem import CODES, cache_option
from ._sharding import KEEP_CALLS

_CACHES = ("k_cache", "v_cache")


@dataclasses.dataclass(frozen=True)
class _Append:
    """A call besides its arrays. operands: what these are, in their order."""

    spec: str
    layout: str
    operands: tuple[str, ...]
    theta: float
    rope_dims: int
    interleaved: bool


def append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    kv_lengths: Any,
    page_table: Any = None,
    q: Any = None,
    cos: Any = None,
    sin: Any = None,
    theta: float | None = None,
    rope_dims: int | None = None,
    interleaved: bool = False,
    positions: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_format: Any = None,
    v_format: Any = None,
    k_block_scale: Any = None,
    v_block_scale: Any = None,
    hadamard: bool = False,
    layout: str = "BTNH",
) -> tuple[Any, ...]:
    """(k_cache, v_cache) with new rows of K and V, K's rotated (RoPE); with q (k_cache, v_cache, q), with its rows rotated.
    Where scales are of keys, the new ones follow the caches: (k_cache, v_cache, k_scale, v_scale), then block scales, then q.

    XLA writes into the caches given where nothing else needs them, as where a jitted function is given them donated.

    k, v: [sequences, n, heads_kv, head_dim]: new row i of sequence b becomes its key kv_lengths[b] - n + i.
    k_cache, v_cache: attention()'s k and v: pages with a page_table of two dimensions, else slots.
    kv_lengths: int32 [sequences]: how many keys each has WITH the new ones, as attention() wants it next.
    page_table: int32 [sequences, pages of the longest], or [sequences], the slot of each; None: slots in order.
    q: like k, with the heads of queries.
    cos, sin: float32 or of k's type, [positions, rope_dims / 2]; or theta, by which pair i of position n rotates by
        n * theta ** (-2 i / rope_dims). None of them: rows are copied.
    rope_dims: how many dimensions of a head rotate, a multiple of 16; None: all. interleaved: pairs are dimensions (2 i, 2 i + 1);
        else (i, i + rope_dims / 2). positions: int32 [sequences, n]; None: the number of each row's key.
    k_scale, v_scale: attention()'s, for caches of 8 bits. Scales of heads are read: new rows are divided by theirs. Of pages and
        keys, in four dimensions or [pages, heads_kv, rows], each new key gets one of its own, and results are of four dimensions.
    k_format, v_format: attention()'s: a cache of uint8 whose rows are in this KV format, in which the new ones are encoded.
    k_block_scale, v_block_scale: attention()'s, written like the caches.
    hadamard: multiply rows of K and Q, after RoPE, by blocks of a Hadamard matrix: scores do not change, and outliers in few columns
        of K spread. Give attention() the q returned. For K in codes or in a format.
    layout: "BTNH", or "BHSD" for [sequences, heads, n, head_dim] and caches alike.

    Rows without a place in the cache or in the tables are left out. No gradients.
    """
    k, v, k_cache, v_cache = (jnp.asarray(x) for x in (k, v, k_cache, v_cache))
    q = None if q is None else jnp.asarray(q)
    formats = read_formats(k_cache, v_cache, k_format, v_format)
    batch, rows, page_rows = _check(k, v, k_cache, v_cache, q, layout, bool(formats))
    in_pages = page_table is not None and jnp.ndim(page_table) == 2
    pages, table = check_table(page_table, not in_pages, batch, page_rows, "k_cache")
    if (cos is None) != (sin is None):
        raise InvalidArgument(
            f"{'cos' if sin is None else 'sin'} is given alone: give both tables, or theta."
        )
    arrays = {
        **{"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache},
        "kv_lengths": checked("kv_lengths", kv_lengths, "int32", (batch,)),
        "page_table": table,
        "q": q,
        "cos": None if cos is None else _angles("cos", cos, k),
        "sin": None if sin is None else _angles("sin", sin, k),
        "positions": checked("positions", positions, "int32", (batch, rows)),
        "k_scale": in_four_dims("k_scale", k_scale, True),
        "v_scale": in_four_dims("v_scale", v_scale, True),
        "k_block_scale": None if k_block_scale is None else jnp.asarray(k_block_scale),
        "v_block_scale": None if v_block_scale is None else jnp.asarray(v_block_scale),
    }
    if arrays["kv_lengths"] is None:
        raise InvalidArgument(
            "kv_lengths is missing: it says how many keys each sequence has, with the new ones."
        )
    given = {name: array for name, array in arrays.items() if array is not None}
    dims = f"{k.shape[3]}" if k.shape[3] == v.shape[3] else f"{k.shape[3]}x{v.shape[3]}"
    scales = {name: arrays[name] for name in ("k_scale", "v_scale")}
    blocks = [arrays["k_block_scale"], arrays["v_block_scale"]]
    if formats:
        columns = check_formats(formats, k, k_cache, v_cache, layout, scales, blocks)
        if columns != v.shape[3]:
            raise InvalidArgument(f"v has head_dim {v.shape[3]}, but rows of v_cache have {columns} columns.")
        codes = formats.spec_text(scales)
    else:
        codes = codes_of(k, k_cache, scales)
        refuse_block_scales(blocks)
    spec = f"{ELEMENTS[str(k.dtype)]}:d{dims}{cache_option(pages)}{codes}{':hadamard' if hadamard else ''}"
    spec_handle(spec)
    call = _Append(spec, layout, tuple(given), float(theta or 0), rope_dims or 0, bool(interleaved))
    return tuple(append_p.bind(*alike(list(given.values())), call=call))


def _check(
    k: Any, v: Any, k_cache: Any, v_cache: Any, q: Any, layout: str, in_formats: bool
) -> tuple[int, int, int]:
    """Sequences, new rows of each, and the rows of a page or a slot. in_formats: check_formats() looks at the caches' rows."""
    if layout not in ("BTNH", "BHSD"):
        raise InvalidArgument(f'layout is {layout!r}: give "BTNH" or "BHSD".')
    heads, length = (2, 1) if layout == "BTNH" else (1, 2)
    arrays = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **({} if q is None else {"q": q})}
    for name, x in arrays.items():
        of_codes = str(k_cache.dtype) in CODES and name.endswith("cache")
        if (of_codes and x.dtype == k_cache.dtype) or (in_formats and name.endswith("cache") and x.ndim == 4):
            continue
        if str(x.dtype) not in ("float16", "bfloat16", "float32") or x.dtype != k.dtype:
            raise WrongType(
                f"k is {k.dtype} and {name} is {x.dtype}: all must be float16, or bfloat16, or float32; caches may both be "
                f"of 8 bits, {', '.join(CODES)}."
            )
        if x.ndim != 4:
            raise InvalidArgument(
                f"{name} is {x.dtype} {list(x.shape)}: it needs the four dimensions {layout}."
            )
    of_caches = [] if in_formats else [(k, k_cache), (v, v_cache)]
    alike_dims = [*of_caches, *([] if q is None else [(k, q)])]
    right = k.shape[:3] == v.shape[:3] and k_cache.shape[:3] == v_cache.shape[:3]
    right = (
        right
        and all(a.shape[3] == b.shape[3] for a, b in alike_dims)
        and k.shape[heads] == k_cache.shape[heads]
    )
    if q is not None:
        right = right and q.shape[0] == k.shape[0] and q.shape[length] == k.shape[length]
    if not right:
        shapes = ", ".join(f"{name} is {list(x.shape)}" for name, x in arrays.items())
        raise InvalidArgument(
            f"{shapes} ({layout}): v has the sequences, rows and heads of k, v_cache the sizes of k_cache, caches the heads "
            "and head_dim of what goes into them, and q the sequences, rows and head_dim of k."
        )
    return k.shape[0], k.shape[length], k_cache.shape[length]


def _angles(name: str, table: Any, k: Any) -> Any:
    table = jnp.asarray(table)
    if table.ndim != 2 or table.dtype not in (jnp.float32, k.dtype) or 2 * table.shape[1] > k.shape[3]:
        raise InvalidArgument(
            f"{name} is {table.dtype} {list(table.shape)}: it must be float32 or {k.dtype} [positions, rope_dims / 2], "
            f"with at most {k.shape[3] // 2} columns."
        )
    return table


# --- the primitive -----------------------------------------------------------------------------------------------------


def _results(call: _Append) -> tuple[str, ...]:
    """What is made anew, by the operands' names."""
    scales = ("k_scale", "v_scale") if ":key_scales" in call.spec else ()
    named = (*scales, "k_block_scale", "v_block_scale")
    written = (*_CACHES, *[name for name in named if name in call.operands])
    return (*written, *(("q",) if "q" in call.operands else ()))


def _shapes(*avals: Any, call: _Append) -> list[Any]:
    return [avals[call.operands.index(name)] for name in _results(call)]


def _refuse_derivative(*_: Any, **__: Any) -> Any:
    raise Unsupported("flashjit.jax.append has no derivatives: apply jax.lax.stop_gradient to its arguments.")


@functools.lru_cache(KEEP_CALLS)
def _compiled(call: _Append) -> Any:
    return jax.jit(lambda *arrays: append_p.bind(*arrays, call=call))


def _lower(ctx: Any, *operands: Any, call: _Append) -> Any:
    results = _results(call)
    written = {call.operands.index(name): place for place, name in enumerate(results) if name != "q"}
    lowering = jax.ffi.ffi_lowering(_handler.TARGETS["append"], operand_output_aliases=written)
    return lowering(
        ctx,
        *operands,
        spec=call.spec,
        layout=call.layout,
        args=" ".join(call.operands),
        results=" ".join("q_out" if name == "q" else f"new_{name}" for name in results),
        theta=np.float32(call.theta),
        rope_dims=np.int64(call.rope_dims),
        interleaved=np.int64(call.interleaved),
    )


append_p = jax.extend.core.Primitive("flashjit_append")
append_p.multiple_results = True
append_p.def_abstract_eval(_shapes)
append_p.def_impl(lambda *arrays, call: _compiled(call)(*arrays))
ad.primitive_jvps[append_p] = _refuse_derivative
batching.primitive_batchers[append_p] = functools.partial(one_after_another, append_p)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(append_p, _lower, platform=_platform)

"""jax.nn.dot_product_attention, by flashjit."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import InvalidArgument
from ._attention import attention

_IMPLEMENTATIONS = (None, "xla", "cudnn")


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """The same arguments and results as jax.nn.dot_product_attention(), with gradients for bias.

    query: [batch, seqlen_q, heads, head_dim]; key and value: [batch, seqlen_kv, heads_kv, head_dim]; all may lack the batch.
    implementation: None, "xla" or "cudnn": no effect, as flashjit computes in any case.
    return_residual: also the LSE, of key's type and without a gradient, as there; attention(return_lse=True) has LSE in float32
        with one.

    A query that attends to no key gives 0, not the mean of the values, and a residual of -inf. Raises flashjit.Error.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise InvalidArgument(
            f"implementation is {implementation!r}: give None, as flashjit computes in any case."
        )
    arrays = [_with_batch(x) for x in (query, key, value)]
    shape, dims = jnp.shape(query), [x.shape[3] for x in arrays]
    if mask is not None:
        mask = _with_batch(mask)
        if mask.dtype != bool or mask.ndim != 4:
            raise InvalidArgument(
                f"mask is {mask.dtype} {list(mask.shape)}: it must be bool, of a shape that broadcasts to (batch, heads, "
                "queries, keys); an additive mask is a bias."
            )
    result = attention(
        *[_padded(x) for x in arrays],
        scale=1 / math.sqrt(dims[0]) if scale is None else scale,
        causal="top_left" if is_causal else False,
        bias=None if bias is None else _with_batch(bias),
        mask_mod=_mask_mod(mask, query_seq_lengths, local_window_size),
        kv_lengths=key_value_seq_lengths,
        return_lse=return_residual,
    )
    out, *residual = result if return_residual else (result,)
    out = out[..., : dims[2]].reshape(*shape[:-1], dims[2])
    if not residual:
        return out
    return out, jax.lax.stop_gradient(residual[0].reshape(shape[:-1])).astype(arrays[1].dtype)


def _with_batch(x: Any) -> Any:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _padded(x: Any) -> Any:
    """With a head_dim that is a multiple of 8, as the kernels have."""
    missing = -x.shape[3] % 8
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def _mask_mod(mask: Any, query_lengths: Any, window: Any) -> Any:
    """What of these there is, as one condition; None where there is none."""
    left, right = (window, window) if isinstance(window, int) else window or (None, None)
    lengths = None if query_lengths is None else jnp.asarray(query_lengths)
    if mask is None and lengths is None and left is None:
        return None

    def attends(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        conditions = []
        if left is not None:
            conditions += [kv_idx >= q_idx - left, kv_idx <= q_idx + right]
        if lengths is not None:
            conditions.append(q_idx < lengths[b])
        if mask is not None:
            conditions.append(mask[b, h, q_idx, kv_idx])
        result = conditions[0]
        for condition in conditions[1:]:
            result = result & condition
        return result

    return attends

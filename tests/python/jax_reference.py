"""Attention in float64 by JAX's own operations, for flashjit.jax: functions are mapped over all pairs."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
import pytest  # noqa: E402

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flashjit import _installed  # noqa: E402

if not (_installed.library_path().parent / "libflashjit_jax.so").exists():
    pytest.skip("libflashjit_jax.so is not built: build the target flashjit_jax", allow_module_level=True)

LIMITS = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def over_pairs(function, batch, heads, seqlen_q, seqlen_kv, scores=None):
    """A score_mod's or a mask_mod's result for each pair."""
    places = jnp.meshgrid(
        *[jnp.arange(n, dtype=jnp.int32) for n in (batch, heads, seqlen_q, seqlen_kv)], indexing="ij"
    )
    mapped = function
    for _ in range(4):
        mapped = jax.vmap(mapped)
    return mapped(*([] if scores is None else [scores]), *places)


def attention(
    q,
    k,
    v,
    *,
    score_mod=None,
    mask_mod=None,
    scale=None,
    sinks=None,
    softcap=None,
    bias=None,
    kv_lengths=None,
):
    """(out, lse) of BTNH, in the type of q."""
    batch, seqlen_q, heads, dim = q.shape
    seqlen_kv = k.shape[1]
    k, v = (jnp.repeat(x, heads // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (dim**-0.5 if scale is None else scale)
    sizes = (batch, heads, seqlen_q, seqlen_kv)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if score_mod is not None:
        scores = over_pairs(score_mod, *sizes, scores)
    attends = jnp.ones(sizes, bool) if mask_mod is None else over_pairs(mask_mod, *sizes)
    if kv_lengths is not None:
        attends = attends & (jnp.arange(seqlen_kv) < kv_lengths[:, None, None, None])
    scores = jnp.where(attends, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*sizes[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    top = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    shares = (weights / jnp.where(total > 0, total, 1))[..., :seqlen_kv]
    lse = jnp.where(total > 0, jnp.log(total), -jnp.inf) + jnp.where(jnp.isfinite(top), top, 0)
    return jnp.einsum("bnts,bsnh->btnh", shares, v), lse[..., 0].swapaxes(1, 2)


def in_float64(function, *arrays):
    """function(*arrays) with floating-point arrays in float64, on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [
            jnp.asarray(np.asarray(x, np.float64))
            if jnp.issubdtype(x.dtype, jnp.floating)
            else jnp.asarray(x)
            for x in arrays
        ]
        return jax.tree.map(lambda x: np.asarray(x), function(*wide))


def expect_close(got, want, dtype=None):
    """Compares trees. The limit is the type's, times the largest number wanted."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        limit = LIMITS[str(dtype or x.dtype)]
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        largest = np.abs(y[finite]).max(initial=1e-3)
        assert np.abs(x[finite] - y[finite]).max(initial=0) <= limit * largest


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def problem(seed=0, batch=2, heads=4, heads_kv=2, seqlen_q=5, seqlen_kv=7, dim=16, dim_v=16, dtype="float32"):
    """q, k, v of BTNH."""
    return draw(
        seed,
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_kv, heads_kv, dim),
        (batch, seqlen_kv, heads_kv, dim_v),
        dtype=dtype,
    )


def loss_of(attend):
    """A scalar of out and lse, which tells their elements apart."""

    def loss(*arguments):
        out, lse = attend(*arguments)
        weights = jnp.cos(jnp.arange(out.size, dtype=lse.dtype)).reshape(out.shape)
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return (out.astype(lse.dtype) * weights).sum() + (seen * seen).sum()

    return loss


def loss_of_out(attend):
    """A scalar that tells the elements of O apart, of a call that gives no LSE."""

    def loss(*arrays):
        out = attend(*arrays).astype(jnp.promote_types(arrays[0].dtype, "float32"))
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum()

    return loss


def check_gradients(ours, reference, arrays, dtype=None):
    """O and the gradients of all arrays."""
    places = tuple(range(len(arrays)))
    both = lambda attend: lambda *x: (attend(*x), jax.grad(loss_of_out(attend), places)(*x))
    got = jax.jit(both(ours))(*arrays)
    expect_close(got, in_float64(jax.jit(both(reference)), *arrays), dtype)

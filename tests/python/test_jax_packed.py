"""flashjit.jax: packed sequences, each against JAX in float64 over its own rows."""

import functools

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_reference import attention as in_jax  # noqa: E402
from jax_reference import draw, expect_close, in_float64, jax, jnp, loss_of, np  # noqa: E402

STARTS_Q, STARTS_KV = np.int32([0, 5, 5, 10]), np.int32([0, 3, 7, 13])  # the last rows belong to none
LONGEST = {"max_seqlen_q": 5, "max_seqlen_kv": 6}


def arrays(dtype="float32"):
    """q, k, v, slopes, table, sinks."""
    q, k, v = draw(0, (12, 4, 16), (14, 2, 16), (14, 2, 8), dtype=dtype)
    return (q, k, v, *draw(1, (4,), (3, 6), (4,)))


def ours(q, k, v, slopes, table, sinks, starts=(STARTS_Q, STARTS_KV), longest=LONGEST, **more):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx) + table[b, kv_idx]

    return fj.attention(
        q,
        k,
        v,
        cu_seqlens_q=starts[0],
        cu_seqlens_kv=starts[1],
        causal=True,
        score_mod=score_mod,
        sinks=sinks,
        return_lse=True,
        **longest,
        **more,
    )


def reference(q, k, v, slopes, table, sinks):
    out, lse = jnp.zeros((12, 4, 8)), jnp.full((12, 4), -jnp.inf)
    for n in range(3):
        rows, keys = slice(*STARTS_Q[n : n + 2]), slice(*STARTS_KV[n : n + 2])
        if rows.start == rows.stop:
            continue
        shift = (keys.stop - keys.start) - (rows.stop - rows.start)
        made = in_jax(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            sinks=sinks,
            score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i) + table[n, j],
            mask_mod=lambda b, h, i, j: j <= i + shift,
        )
        out, lse = out.at[rows].set(made[0][0]), lse.at[rows].set(made[1][0])
    return out, lse


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_each_sequence_is_alone(dtype):
    given = arrays(dtype)
    want = in_float64(reference, *given)
    expect_close(jax.jit(ours)(*given), want, dtype)
    call = functools.partial(ours, longest={})  # all rows
    expect_close(call(*given), want, dtype)
    turned = [x.swapaxes(0, 1) for x in given[:3]]
    out, lse = ours(*turned, *given[3:], layout="BHSD")
    expect_close((out.swapaxes(0, 1), lse.swapaxes(0, 1)), want, dtype)
    out, lse = ours(*[x[None] for x in given[:3]], *given[3:])
    expect_close((out[0], lse[0]), want, dtype)


@pytest.mark.slow
def test_derivatives():
    given = arrays()
    got = jax.jit(jax.grad(loss_of(ours), range(6)))(*given)
    expect_close(got, in_float64(jax.grad(loss_of(reference), range(6)), *given))
    tangents = draw(9, *[x.shape for x in given])
    out, moved = jax.jit(lambda *x: jax.jvp(ours, x[:6], x[6:]))(*given, *tangents)
    want = in_float64(lambda *x: jax.jvp(reference, x[:6], x[6:]), *given, *tangents)
    expect_close(out, want[0])
    expect_close(moved, jax.tree.map(np.nan_to_num, want[1]))


def test_starts_may_be_tracers_and_one_is_enough():
    q, k, v = draw(0, (12, 4, 16), (12, 4, 16), (12, 4, 16))
    call = jax.jit(lambda starts: fj.attention(q, k, v, cu_seqlens_q=starts, max_seqlen_q=8, causal=True))
    for starts in ([0, 4, 12], [0, 8, 12], [0, 0, 7]):
        out = call(jnp.asarray(starts, jnp.int32))
        for first, last in zip(starts, starts[1:]):
            if first < last:
                alone = fj.attention(*[x[None, first:last] for x in (q, k, v)], causal=True)
                expect_close(out[first:last], alone[0])
        assert not out[starts[-1] :].any()


def test_vmap_is_a_loop():
    given = arrays()
    starts = jnp.stack([STARTS_Q, np.int32([0, 2, 6, 11])])
    call = lambda q, starts: ours(q, *given[1:], starts=(starts, STARTS_KV))
    q = jnp.stack([given[0], 2 * given[0]])
    each = [call(*x) for x in zip(q, starts)]
    expect_close(jax.vmap(call)(q, starts), jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_heads_are_divided():
    devices = jax.devices("cpu") if jax.default_backend() == "cpu" else jax.devices()
    if len(devices) < 2:
        pytest.skip("there is one device")
    mesh = Mesh(np.array(devices[:2]), ("x",))
    given = arrays()
    specs = (*[P(None, "x")] * 3, P("x"), P(), P("x"))
    gradient = jax.grad(loss_of(ours), range(6))
    compiled = jax.jit(gradient, in_shardings=[NamedSharding(mesh, spec) for spec in specs])
    expect_close(compiled(*given), gradient(*given))
    assert "all-gather(" not in compiled.lower(*given).compile().as_text()


WRONG = {
    "max_seqlen_q is given without cu_seqlens_q": dict(max_seqlen_q=3),
    "cu_seqlens_kv is missing: q has 12 rows and k has 14": dict(cu_seqlens_q=STARTS_Q),
    r"cu_seqlens_q is float32 \[4\]: it must be int32": dict(
        cu_seqlens_q=STARTS_Q.astype("float32"), cu_seqlens_kv=STARTS_KV
    ),
    r"cu_seqlens_q is \[4\] and cu_seqlens_kv is \[3\]": dict(
        cu_seqlens_q=STARTS_Q, cu_seqlens_kv=STARTS_KV[:3]
    ),
    "max_seqlen_kv is -1: give a Python number": dict(
        cu_seqlens_q=STARTS_Q, cu_seqlens_kv=STARTS_KV, max_seqlen_kv=-1
    ),
    "kv_lengths and cu_seqlens_q are both given": dict(
        cu_seqlens_q=STARTS_Q, cu_seqlens_kv=STARTS_KV, kv_lengths=STARTS_Q
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    with pytest.raises(flashjit.InvalidArgument, match=message):
        jax.jit(lambda *x: fj.attention(*x, **WRONG[message]))(*arrays()[:3])


def test_a_batch_is_refused():
    q, k, v = (jnp.stack([x, x]) for x in arrays()[:3])
    with pytest.raises(flashjit.InvalidArgument, match="q has batch 2 and cu_seqlens_q is given"):
        fj.attention(q, k, v, cu_seqlens_q=STARTS_Q, cu_seqlens_kv=STARTS_KV)

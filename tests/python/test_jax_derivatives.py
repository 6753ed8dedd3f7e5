"""Derivatives of flashjit.jax.attention in forward mode, and both modes together, against JAX in float64."""

import functools

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_reference import attention as in_jax  # noqa: E402
from jax_reference import draw, expect_close, in_float64, jax, jnp, loss_of, np, problem  # noqa: E402

PROGRAMS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "square": {"score_mod": lambda s, b, h, i, j: s * s * 0.3 + h},
    "window": {
        "score_mod": lambda s, b, h, i, j: s + 0.1 * (j - i),
        "mask_mod": lambda b, h, i, j: (j <= i + 2) & (i + 2 - j < 4),
    },
    "lengths": {"kv_lengths": np.int32([3, 7])},
    "no key": {"mask_mod": lambda b, h, i, j: j < i},
}


def tangents_of(arrays, seed=7):
    """Tangents of the arrays' types."""
    drawn = draw(seed, *[x.shape for x in arrays])
    return tuple(t.astype(x.dtype) for t, x in zip(drawn, arrays))


def finite(tree):
    """Where LSE is -inf its derivative is 0, where JAX's is NaN."""
    return jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0, x), tree)


def check_jvp(ours, reference, arrays, dtype=None):
    tangents = tangents_of(arrays)
    got = jax.jit(lambda *x: jax.jvp(ours, x[: len(arrays)], x[len(arrays) :]))(*arrays, *tangents)
    wanted = in_float64(lambda *x: jax.jvp(reference, x[: len(arrays)], x[len(arrays) :]), *arrays, *tangents)
    expect_close(got, finite(wanted), dtype)


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_jvp(name, heads_kv):
    more = PROGRAMS[name]
    check_jvp(
        functools.partial(fj.attention, return_lse=True, **more),
        functools.partial(in_jax, **more),
        problem(heads_kv=heads_kv, dim_v=8),
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BTNH", "BHSD"])
def test_jvp_of_captures_sinks_and_bias(dtype, layout):
    q, k, v = problem(dtype=dtype)
    (table,) = draw(1, (4, 7), dtype=dtype)
    slopes, sinks, bias = draw(2, (4,), (4,), (2, 1, 5, 7))

    def attend(attention, q, k, v, table, slopes, sinks, bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * jnp.exp(table)[h, kv_idx] + slopes[h] * (kv_idx - q_idx)

        return attention(q, k, v, score_mod=score_mod, sinks=sinks, bias=bias)

    def ours(q, k, v, *others):
        if layout == "BTNH":
            return attend(functools.partial(fj.attention, return_lse=True), q, k, v, *others)
        call = functools.partial(fj.attention, layout="BHSD", return_lse=True)
        turned = attend(call, *[x.swapaxes(1, 2) for x in (q, k, v)], *others)
        return tuple(x.swapaxes(1, 2) for x in turned)

    check_jvp(ours, functools.partial(attend, in_jax), (q, k, v, table, slopes, sinks, bias), dtype)


def test_jvp_of_some_arrays():
    """Arrays without a tangent have none of its products: the call has the tangents that are there."""
    q, k, v = problem()
    slopes, slopes_tangent = draw(1, (4,), (4,))
    (q_tangent,) = tangents_of((q,))

    def attend(attention, q, slopes):
        alibi = lambda score, b, h, i, j: score + slopes[h] * (j - i)
        return attention(q, k, v, score_mod=alibi)[0]

    ours = functools.partial(attend, functools.partial(fj.attention, return_lse=True))
    jvp = jax.jit(lambda q, slopes, t: jax.jvp(ours, (q, slopes), (jnp.zeros_like(q), t)))
    of_slopes = jax.jit(lambda slopes, t: jax.jvp(functools.partial(ours, q), (slopes,), (t,)))
    text = of_slopes.lower(slopes, slopes_tangent).as_text()
    assert 'args = "q k v c0 c0_tangent"' in text and "fp32 1d grad" in text
    wanted = in_float64(
        lambda slopes, t: jax.jvp(lambda x: attend(in_jax, q, x), (slopes,), (t,)), slopes, slopes_tangent
    )
    expect_close(of_slopes(slopes, slopes_tangent), wanted)
    expect_close(jvp(q, slopes, slopes_tangent), wanted)
    call = lambda q, t: jax.jvp(lambda x: ours(x, slopes), (q,), (t,))
    assert " grad" not in jax.jit(call).lower(q, q_tangent).as_text()


@pytest.mark.slow
def test_jacfwd_is_jacrev():
    q, k, v = problem(batch=1, heads=2, heads_kv=1, seqlen_q=3, seqlen_kv=4, dim=8, dim_v=8)
    (slopes,) = draw(1, (2,))

    def attend(q, k, v, slopes):
        alibi = lambda score, b, h, i, j: score + slopes[h] * (j - i)
        return fj.attention(q, k, v, score_mod=alibi, causal=True)

    for place in range(4):
        forward = jax.jacfwd(attend, place)(q, k, v, slopes)
        expect_close(forward, jax.jacrev(attend, place)(q, k, v, slopes))


def test_jvp_of_vmap_and_vmap_of_jvp():
    q, k, v, slopes, sinks = draw(0, (3, 2, 5, 4, 16), (3, 2, 7, 2, 16), (2, 7, 2, 16), (3, 4), (3, 4))

    def one(q, k, slopes, sinks):
        alibi = lambda score, b, h, i, j: score + slopes[h] * (j - i)
        return fj.attention(q, k, v, score_mod=alibi, sinks=sinks, return_lse=True)

    arrays = (q, k, slopes, sinks)
    tangents = tangents_of(arrays)
    each = [jax.jvp(one, [x[i] for x in arrays], [t[i] for t in tangents]) for i in range(3)]
    wanted = jax.tree.map(lambda *x: jnp.stack(x), *each)
    expect_close(jax.jvp(jax.vmap(one), arrays, tangents), wanted)
    expect_close(jax.vmap(lambda x, t: jax.jvp(one, x, t))(arrays, tangents), wanted)
    # Tangents alone are mapped, as in jacfwd.
    primals = [x[0] for x in arrays]
    got = jax.vmap(lambda *t: jax.jvp(one, primals, list(t))[1])(*tangents)
    each = [jax.jvp(one, primals, [t[i] for t in tangents])[1] for i in range(3)]
    expect_close(got, jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_dropout_has_the_same_mask():
    arrays = tuple(problem(seqlen_q=32, seqlen_kv=32))
    attend = lambda *x: fj.attention(*x, dropout_p=0.4, dropout_key=jax.random.key(3))
    tangents = tangents_of(arrays)
    out, tangent = jax.jvp(attend, arrays, tangents)
    np.testing.assert_allclose(out, attend(*arrays), rtol=1e-5, atol=1e-6)
    step = 1e-2
    ahead, behind = (attend(*[x + sign * step * t for x, t in zip(arrays, tangents)]) for sign in (1, -1))
    np.testing.assert_allclose(tangent, (ahead - behind) / (2 * step), rtol=2e-2, atol=5e-3)


def test_linearize_scan_and_checkpoint():
    q, k, v = problem(seqlen_q=7, heads=2, heads_kv=2)
    weights = jnp.asarray([0.5, 1.0, 2.0])

    def run(wrap, q, weights):
        block = lambda x, w: (x + fj.attention(x * w, k, v, causal=True), None)
        return jax.lax.scan(wrap(block), q, weights)[0]

    tangents = tangents_of((q, weights))
    plain = functools.partial(run, lambda f: f)
    wanted = jax.jvp(plain, (q, weights), tangents)
    got = jax.jit(lambda *x: jax.jvp(functools.partial(run, jax.checkpoint), x[:2], x[2:]))
    expect_close(got(q, weights, *tangents), wanted)
    out, of_tangents = jax.linearize(plain, q, weights)
    expect_close((out, of_tangents(*tangents)), wanted)
    pulled = jax.linear_transpose(of_tangents, *tangents)(jnp.ones_like(out))
    expect_close(pulled, jax.vjp(plain, q, weights)[1](jnp.ones_like(out)))


def test_jvp_on_devices():
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip(f"there are {len(devices)} devices of 4")
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    q, k, v = problem(heads_kv=4)
    (slopes,) = draw(1, (4,))

    def attend(q, k, v, slopes):
        alibi = lambda score, b, h, i, j: score + slopes[h] * (j - i)
        return fj.attention(q, k, v, score_mod=alibi, causal=True, return_lse=True)

    arrays = (q, k, v, slopes)
    tangents = tangents_of(arrays)
    wanted = jax.jvp(attend, arrays, tangents)
    spec = P("x", None, "y")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec, P("y")), out_specs=(spec, spec))
    jvp = lambda f: lambda *x: jax.jvp(f, x[:4], x[4:])
    expect_close(jax.jit(jvp(mapped))(*arrays, *tangents), wanted)
    expect_close(jvp(mapped)(*arrays, *tangents), wanted)
    shardings = [NamedSharding(mesh, s) for s in (spec, spec, spec, P("y"))] * 2
    compiled = jax.jit(jvp(attend), in_shardings=shardings)
    expect_close(compiled(*arrays, *tangents), wanted)
    assert "all-gather(" not in compiled.lower(*arrays, *tangents).compile().as_text()


@pytest.mark.slow
def test_what_stop_gradient_holds_is_a_constant():
    """As in MeanFlow's loss, whose target is a tangent, and for a gradient inside of a loss."""
    q, k, v = problem()
    (tangent,) = tangents_of((q,))

    def loss(attention, q, tangent):
        attend = lambda q: attention(q, k, v)[0]
        out, moved = jax.jvp(attend, (q,), (tangent,))
        pulled = jax.grad(lambda q: attend(q).sum())(q)
        return ((out - jax.lax.stop_gradient(moved)) ** 2).sum() + (q * jax.lax.stop_gradient(pulled)).sum()

    ours = functools.partial(loss, functools.partial(fj.attention, return_lse=True))
    wanted = in_float64(jax.grad(functools.partial(loss, in_jax)), q, tangent)
    expect_close(jax.grad(ours)(q, tangent), wanted)
    expect_close(jax.jit(jax.grad(ours))(q, tangent), wanted)
    expect_close(jax.vmap(jax.grad(ours), (0, None))(q[None], tangent)[0], wanted)


def test_a_cache_has_no_derivatives():
    (q,) = draw(0, (2, 1, 4, 16))
    k, v = draw(1, (2, 8, 4, 16), (2, 8, 4, 16))
    attend = lambda q: fj.attention(q, k, v, cache=True, kv_lengths=np.int32([3, 8]))
    with pytest.raises(flashjit.Unsupported, match="from a cache has no derivatives"):
        jax.jvp(attend, (q,), (q,))
    assert jax.grad(lambda q: attend(jax.lax.stop_gradient(q)).sum())(q).shape == q.shape


def test_the_tangent_of_a_loss_is_that_of_its_gradient():
    """loss_of() reads O and LSE, which both have tangents: those that the gradient gives."""
    arrays = tuple(problem())
    tangents = tangents_of(arrays)
    loss = loss_of(functools.partial(fj.attention, return_lse=True))
    _, tangent = jax.jvp(loss, arrays, tangents)
    gradients = jax.grad(loss, (0, 1, 2))(*arrays)
    expect_close(tangent, sum((x * t).sum() for x, t in zip(gradients, tangents)))


def test_accurate_gradients_have_the_types_of_their_arrays():
    arrays = [x.astype("bfloat16") for x in problem(dtype="float32")]
    dout = draw(3, arrays[0].shape)[0].astype("bfloat16")

    def gradients(accurate):
        call = functools.partial(fj.attention, causal=True, accurate=accurate)
        out, back = jax.vjp(jax.jit(call), *arrays)
        return out, *back(dout)

    for plain, accurate in zip(gradients(False), gradients(True)):
        assert plain.dtype == accurate.dtype == jnp.bfloat16
        np.testing.assert_allclose(plain.astype("float32"), accurate.astype("float32"), rtol=0.05, atol=0.02)
    kept = jax.make_jaxpr(functools.partial(fj.attention, accurate=True))(*arrays)
    assert any(
        x.aval.dtype == jnp.float32 and x.aval.ndim == 4 and x.aval.shape[-1] > 1
        for equation in kept.jaxpr.eqns
        for x in equation.outvars
    )
    wide = [x.astype("float32") for x in arrays]
    assert fj.attention(*wide, accurate=True).dtype == jnp.float32


@pytest.mark.parametrize("layout", ["BTNH", "BHSD"])
def test_vmap_of_no_entries(layout):
    """As a loop that runs zero times: results, gradients and tangents have no entries, of the right sizes."""
    q, k, v = problem(heads=2, heads_kv=2, seqlen_q=2, seqlen_kv=2)
    slopes, none = jnp.ones(2), jnp.zeros((0, *q.shape))
    attend = lambda q, slopes: fj.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * j, layout=layout
    )
    loss = lambda q, slopes: (attend(q, slopes) ** 2).sum()
    grads = jax.grad(loss, (0, 1))
    once = lambda function: jax.vmap(function, (0, None))(none, slopes)
    assert once(attend).shape == none.shape
    assert [x.shape for x in once(grads)] == [none.shape, (0, 2)]
    assert once(lambda q, slopes: jax.jvp(grads, (q, slopes), (q, slopes))[1][0]).shape == none.shape
    twice = jax.vmap(jax.vmap(attend, (0, None)), (0, None))
    assert twice(jnp.zeros((0, 3, *q.shape)), slopes).shape == (0, 3, *q.shape)
    assert twice(jnp.zeros((3, 0, *q.shape)), slopes).shape == (3, 0, *q.shape)

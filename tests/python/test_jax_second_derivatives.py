"""Second derivatives of flashjit.jax.attention, in the three orders of the modes, against JAX in float64."""

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
    "square": {"score_mod": lambda s, b, h, i, j: s * s * 0.3 + h},
    "window": {"softcap": 3.0, "mask_mod": lambda b, h, i, j: (j <= i + 2) & (i + 2 - j < 4)},
    "no key": {"mask_mod": lambda b, h, i, j: j < i},
}
ours = functools.partial(fj.attention, return_lse=True)


def tangents_of(arrays, seed=7):
    """Tangents of the arrays' types."""
    drawn = draw(seed, *[x.shape for x in arrays])
    return tuple(t.astype(x.dtype) for t, x in zip(drawn, arrays))


def second_derivatives(attend, count):
    """A function of so many arrays, followed by their tangents, that makes second derivatives in each order of the modes."""
    places = tuple(range(count))
    loss = loss_of(attend)

    def product(*given):  # of the Hessian and a vector, forward over reverse mode
        return jax.jvp(jax.grad(loss, places), given[:count], given[count:])[1]

    def penalty(*given):  # reverse over reverse mode
        gradients = lambda *x: sum((g * t).sum() for g, t in zip(jax.grad(loss, places)(*x), given[count:]))
        return jax.grad(gradients, places)(*given[:count])

    def of_tangent(*given):  # reverse over forward mode, of the arrays and of the tangents
        moved = lambda *x: jax.jvp(attend, x[:count], x[count:])
        parts = lambda *x: loss_of(lambda *y: moved(*y)[0])(*x) + loss_of(lambda *y: moved(*y)[1])(*x)
        return jax.grad(parts, tuple(range(2 * count)))(*given)

    return lambda *given: (product(*given), penalty(*given), of_tangent(*given))


def check(attend, arrays, dtype=None):
    """attend(attention, *arrays): (out, lse)."""
    given = (*arrays, *tangents_of(arrays))
    make = lambda attention: second_derivatives(functools.partial(attend, attention), len(arrays))
    got = jax.jit(make(ours))(*given)
    finite = lambda tree: jax.tree.map(lambda x: np.where(np.isnan(x), 0, x), tree)  # where LSE is -inf
    expect_close(got, finite(in_float64(jax.jit(make(in_jax)), *given)), dtype)


@pytest.mark.parametrize(
    "name", ["plain", *[pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS if name != "plain"]]
)
def test_programs(name):
    attend = lambda attention, q, k, v: attention(q, k, v, **PROGRAMS[name])
    check(attend, problem(batch=1, dim_v=8, seqlen_q=3, seqlen_kv=4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captures_sinks_and_a_bias(dtype):
    q, k, v = problem(batch=1, seqlen_q=3, seqlen_kv=4, dtype=dtype)
    table, bias = draw(1, (4, 4), (1, 1, 3, 4), dtype=dtype)
    slopes, sinks = draw(2, (4,), (4,))

    def attend(attention, q, k, v, table, slopes, sinks, bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * jnp.exp(table)[h, kv_idx] + jnp.tanh(slopes[h] * score)

        return attention(q, k, v, score_mod=score_mod, sinks=sinks, bias=bias)

    check(attend, (q, k, v, table, slopes, sinks, bias), dtype)


@pytest.mark.slow
def test_a_hessian_and_vmap_of_products():
    q, k, v = problem(batch=1, heads=2, heads_kv=1, seqlen_q=2, seqlen_kv=3, dim=8, dim_v=8)
    (slopes,) = draw(1, (2,))

    def loss(attention, q, slopes):
        alibi = lambda score, b, h, i, j: score + jnp.tanh(slopes[h] * (j - i) * score)
        return loss_of(functools.partial(attention, score_mod=alibi))(q, k, v)

    of_both = lambda attention: jax.hessian(functools.partial(loss, attention), (0, 1))
    twice_reversed = jax.jacrev(jax.jacrev(functools.partial(loss, ours), 1), (0, 1))
    wanted = in_float64(jax.jit(of_both(in_jax)), q, slopes)
    expect_close(jax.jit(of_both(ours))(q, slopes), wanted)
    expect_close(jax.jit(twice_reversed)(q, slopes), wanted[1])
    # Each problem has a tangent of its own.
    arrays = (q[None] * jnp.arange(1.0, 4)[:, None, None, None, None], jnp.stack([slopes] * 3))
    tangents = tangents_of(arrays)
    product = lambda attention: (
        lambda *x: jax.jvp(jax.grad(functools.partial(loss, attention), (0, 1)), x[:2], x[2:])
    )
    of_each = lambda attention: jax.vmap(product(attention))
    wanted = in_float64(jax.jit(of_each(in_jax)), *arrays, *tangents)
    expect_close(jax.jit(of_each(ours))(*arrays, *tangents), wanted)


@pytest.mark.slow
def test_products_on_devices():
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip(f"there are {len(devices)} devices of 4")
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    arrays = (*problem(heads_kv=4), *draw(1, (4,)))
    given = (*arrays, *tangents_of(arrays))

    def attend(q, k, v, slopes):
        alibi = lambda score, b, h, i, j: score + jnp.tanh(slopes[h] * score)
        return fj.attention(q, k, v, score_mod=alibi, return_lse=True)

    product = lambda *x: jax.jvp(jax.grad(loss_of(attend), (0, 1, 2, 3)), x[:4], x[4:])[1]
    spec = P("x", None, "y")
    shardings = [NamedSharding(mesh, s) for s in (spec, spec, spec, P("y"))] * 2
    compiled = jax.jit(product, in_shardings=shardings)
    expect_close(compiled(*given), product(*given))
    assert "all-gather(" not in compiled.lower(*given).compile().as_text()


@pytest.mark.slow
def test_dropout_has_one_mask():
    """The product is what gradients a step apart say."""
    arrays = tuple(problem(batch=1, seqlen_q=16, seqlen_kv=16))
    attend = lambda *x: fj.attention(*x, dropout_p=0.4, dropout_key=jax.random.key(3))
    gradients = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))
    tangents, step = tangents_of(arrays), 1e-2
    ahead, behind = (gradients(*[x + sign * step * t for x, t in zip(arrays, tangents)]) for sign in (1, -1))
    for got, a, b in zip(jax.jvp(gradients, arrays, tangents)[1], ahead, behind):
        np.testing.assert_allclose(got, (a - b) / (2 * step), rtol=3e-2, atol=1e-2)


@pytest.mark.slow
def test_accurate_gradients_have_some():
    arrays = tuple(problem(batch=1, dtype="bfloat16"))
    attend = lambda attention, q, k, v: attention(q, k, v, **more(attention))
    more = lambda attention: {"accurate": True} if attention is ours else {}
    check(attend, arrays, "bfloat16")


def test_what_is_refused():
    q, k, v = problem(batch=1)
    attend = lambda q: fj.attention(q, k, v).sum()
    tangent = lambda q: jax.jvp(attend, (q,), (q,))[1]
    gradient = lambda q: jax.grad(attend)(q).sum()
    for wrong, says in (
        (lambda q: jax.jvp(tangent, (q,), (q,)), "no tangent of a tangent.*jax.lax.stop_gradient"),
        (jax.jacfwd(jax.jacfwd(attend)), "no tangent of a tangent"),
        (jax.grad(lambda q: jax.grad(gradient)(q).sum()), "no third derivative: apply jax.lax.stop_gradient"),
        (lambda q: jax.jvp(jax.grad(gradient), (q,), (q,)), "no third derivative"),
    ):
        for wrap in (lambda f: f, jax.jit):
            with pytest.raises(flashjit.Unsupported, match=says):
                wrap(wrong)(q)
    weights = lambda q: fj.attention(q, k, v, weight_mod=lambda s, b, h, i, j: jax.nn.sigmoid(s)).sum()
    with pytest.raises(flashjit.Error, match="no forward-mode and second derivatives .*weight_mod is set"):
        jax.jit(jax.grad(lambda q: jax.grad(weights)(q).sum()))(q)


def test_a_third_derivative_that_is_a_constant():
    """As a penalty on a tangent of gradients that stop_gradient holds."""
    q, k, v = problem(batch=1)
    (vector,) = tangents_of((q,))

    def loss(q):
        attend = lambda q: (fj.attention(q, k, v) ** 2).sum()
        product = jax.jvp(jax.grad(attend), (q,), (vector,))[1]
        return (q * jax.lax.stop_gradient(product)).sum(), product

    gradient, product = jax.jit(jax.grad(loss, has_aux=True))(q)
    expect_close(gradient, product)

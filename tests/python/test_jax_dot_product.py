"""flashjit.jax.dot_product_attention beside jax.nn.dot_product_attention in float64."""

import functools
import itertools

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from jax_reference import draw, expect_close, in_float64, jax, jnp, np, problem  # noqa: E402

MASK = np.random.default_rng(0).integers(0, 2, (2, 4, 5, 7)).astype(bool) | (np.arange(7) == 0)
MORE = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "mask": {"mask": MASK},
    "shared mask": {"mask": MASK[:1, :1]},
    "mask of keys": {"mask": MASK[:, :1, :1]},
    "window": {"local_window_size": (3, 2)},
    "one window": {"local_window_size": 2},
    "causal window": {"local_window_size": (2, 0), "is_causal": True},
    "lengths of keys": {"key_value_seq_lengths": np.int32([3, 7])},
    "lengths": {"key_value_seq_lengths": np.int32([4, 6]), "query_seq_lengths": np.int32([5, 2])},
    "lengths and causal": {"key_value_seq_lengths": np.int32([4, 6]), "is_causal": True},
    "everything": {
        "mask": MASK,
        "is_causal": True,
        "local_window_size": (4, 1),
        "key_value_seq_lengths": np.int32([5, 6]),
        "scale": 0.4,
        "implementation": "xla",
    },
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_both_passes(name, with_bias):
    q, k, v = problem(dim=12, dim_v=12)  # no multiple of 8
    (bias,) = draw(1, (1, 4, 5, 7))
    more = MORE[name]

    def loss(attention, q, k, v, bias):
        out = attention(q, k, v, bias if with_bias else None, **more)
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum(), out

    ours = functools.partial(loss, fj.dot_product_attention)
    reference = functools.partial(loss, jax.nn.dot_product_attention)
    got, out = jax.jit(jax.grad(ours, range(4), has_aux=True))(q, k, v, bias)
    want = in_float64(jax.grad(reference, range(4), has_aux=True), q, k, v, bias)
    expect_close((got, out), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_and_residual(dtype):
    q, k, v = problem(dtype=dtype)
    got = fj.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    reference = functools.partial(jax.nn.dot_product_attention, is_causal=True, return_residual=True)
    want = in_float64(reference, q, k, v)
    assert got[0].dtype == got[1].dtype == dtype and got[1].shape == want[1].shape
    expect_close(got, want, dtype)


def test_a_residual_has_no_gradient():
    q, k, v = problem()
    loss = lambda attention, q: attention(q, k, v, return_residual=True)[1].sum()
    for attention in (fj.dot_product_attention, jax.nn.dot_product_attention):
        np.testing.assert_array_equal(jax.grad(functools.partial(loss, attention))(q), np.zeros(q.shape))


def test_without_a_batch():
    q, k, v = problem(batch=1)
    got = fj.dot_product_attention(q[0], k[0], v[0], mask=MASK[:1, :1, :5], return_residual=True)
    want = fj.dot_product_attention(q, k, v, mask=MASK[:1, :1, :5], return_residual=True)
    for x, y in zip(got, want):
        np.testing.assert_array_equal(x, y[0])


@pytest.mark.parametrize("heads_kv, batch", list(itertools.product([1, 2, 4], [1, 2])))
def test_vmap(heads_kv, batch):
    q, k, v = problem(heads_kv=heads_kv, batch=3 * batch)
    q, k, v = (x.reshape(3, batch, *x.shape[1:]) for x in (q, k, v))
    attend = functools.partial(fj.dot_product_attention, is_causal=True)
    want = jnp.stack([attend(*each) for each in zip(q, k, v)])
    np.testing.assert_array_equal(jax.vmap(attend)(q, k, v), want)


def test_a_query_without_keys_is_zero():
    q, k, v = problem()
    mask = jnp.asarray(MASK[:1, :1] & (np.arange(5) != 2)[:, None])
    out = fj.dot_product_attention(q, k, v, mask=mask)
    assert float(jnp.abs(out[:, 2]).max()) == 0 and float(jnp.abs(out[:, 1]).min()) > 0


WRONG = {
    "implementation is 'mosaic'": {"implementation": "mosaic"},
    r"mask is int32 \[2, 4, 5, 7\]: it must be bool": {"mask": MASK.astype("int32")},
    r"bias is float32 \[3, 1, 1, 1\]": {"bias": np.ones((3, 1, 1, 1), "float32")},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    with pytest.raises(flashjit.InvalidArgument, match=message):
        fj.dot_product_attention(*problem(), **WRONG[message])

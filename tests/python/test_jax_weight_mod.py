"""Weights that a function gives in place of the softmax, in flashjit.jax, with gradients: against JAX in float64."""

import functools
import math

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_reference import (  # noqa: E402
    check_gradients,
    draw,
    expect_close,
    in_float64,
    jax,
    jnp,
    loss_of_out,
    np,
    over_pairs,
    problem,
)

WEIGHTS = {
    "sigmoid": lambda s, b, h, i, j: jax.nn.sigmoid(s - math.log(7)),
    "relu": lambda s, b, h, i, j: jax.nn.relu(s) / 7,
    "silu": lambda s, b, h, i, j: jax.nn.silu(s) * (j - i) * 0.1,
}


def sigmoid(s, b, h, i, j):
    return jax.nn.sigmoid(s - 2)


def in_jax(q, k, v, *, weight_mod, mask_mod=None, bias=0):
    """O of BTNH, in the type of q."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[3] ** -0.5 + bias
    weights = over_pairs(weight_mod, *scores.shape, scores)
    if mask_mod is not None:
        weights = jnp.where(over_pairs(mask_mod, *scores.shape), weights, 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize("name", WEIGHTS)
def test_against_float64(name):
    causal = lambda b, h, i, j: j <= i + 2
    check_gradients(
        functools.partial(fj.attention, weight_mod=WEIGHTS[name], causal=True),
        functools.partial(in_jax, weight_mod=WEIGHTS[name], mask_mod=causal),
        problem(dim_v=8),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_captures_and_a_bias(dtype):
    def attend(attention, q, k, v, slopes, bias):
        weigh = lambda s, b, h, i, j: jax.nn.sigmoid(s + jnp.exp(slopes)[h] * (j - i))
        return attention(q, k, v, weight_mod=weigh, bias=bias)

    arrays = (*problem(dtype=dtype), *draw(2, (4,), (2, 1, 5, 7)))
    check_gradients(functools.partial(attend, fj.attention), functools.partial(attend, in_jax), arrays, dtype)


def test_a_layout_a_mask_and_queries_without_keys():
    q, k, v = problem()
    mask = lambda b, h, i, j: (j + h < 5) & (i != 3)
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    got = fj.attention(*turned, weight_mod=sigmoid, mask_mod=mask, layout="BHSD").swapaxes(1, 2)
    expect_close(got, in_float64(functools.partial(in_jax, weight_mod=sigmoid, mask_mod=mask), q, k, v))
    assert (got[:, 3] == 0).all()


@pytest.mark.slow
def test_vmap_of_gradients():
    arrays = draw(0, (3, 2, 5, 4, 16), (3, 2, 7, 2, 16), (3, 2, 7, 2, 16), (3, 4))

    def loss(attention, q, k, v, slopes):
        weigh = lambda s, b, h, i, j: jax.nn.sigmoid(s + slopes[h] * b)
        return loss_of_out(functools.partial(attention, weight_mod=weigh))(q, k, v)

    gradients = lambda attention: jax.vmap(jax.grad(functools.partial(loss, attention), (0, 1, 2, 3)))
    expect_close(gradients(fj.attention)(*arrays), in_float64(gradients(in_jax), *arrays))


def test_devices_divide_batch_and_heads():
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip(f"there are {len(devices)} devices of 4")
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    arrays = problem(heads_kv=4)
    gradients = jax.grad(loss_of_out(functools.partial(fj.attention, weight_mod=sigmoid)), (0, 1, 2))
    compiled = jax.jit(gradients, in_shardings=[NamedSharding(mesh, P("x", None, "y"))] * 3)
    expect_close(compiled(*arrays), gradients(*arrays))
    assert "all-gather(" not in compiled.lower(*arrays).compile().as_text()


def test_a_call_without_gradients_makes_no_lse():
    text = jax.jit(functools.partial(fj.attention, weight_mod=sigmoid)).lower(*problem()).as_text()
    assert 'results = "out' in text and "lse" not in text and ":weight_mod" in text


@pytest.mark.parametrize(
    "more, says",
    [
        ({"score_mod": lambda s, b, h, i, j: s * 2}, "weight_mod and score_mod are both given"),
        ({"softcap": 3.0}, "weight_mod and softcap are both given"),
        ({"return_lse": True}, "without a softmax there is no LSE"),
        ({"dropout_p": 0.5, "dropout_key": jax.random.key(0)}, "weight_mod is set and dropout is, too"),
        ({"sinks": jnp.zeros(4)}, "weight_mod is set and sinks is, too"),
        ({"weight_mod": lambda s, b, h, i, j: s}, "its program is empty or the score itself"),
        ({"weight_mod": lambda s, b, h, i, j: i > j}, "weight_mod returns bool: it returns a weight"),
    ],
)
def test_refusals(more, says):
    with pytest.raises(flashjit.Error, match=says):
        fj.attention(*problem(), **{"weight_mod": sigmoid, **more})


def test_forward_mode_is_refused():
    attend = functools.partial(fj.attention, weight_mod=sigmoid)
    arrays = tuple(problem())
    with pytest.raises(flashjit.Error, match="no forward-mode and second derivatives .*weight_mod is set"):
        jax.jit(lambda *x: jax.jvp(attend, x, x))(*arrays)

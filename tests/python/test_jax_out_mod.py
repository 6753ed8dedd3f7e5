"""Functions of O's elements in flashjit.jax, with gradients: against JAX in float64."""

import functools

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_reference import (  # noqa: E402
    attention,
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


def in_jax(q, k, v, out_mod, **more):
    out = attention(q, k, v, **more)[0].swapaxes(1, 2)
    return over_pairs(out_mod, *out.shape, out).swapaxes(1, 2)


def gated(call, q, k, v, gate, of_heads, **more):
    """A gate of elements [b, q, h, d], and one of heads [b, q, h]."""
    mod = lambda out, b, h, i, d: out * jax.nn.sigmoid(gate[b, i, h, d]) + jnp.square(out) * of_heads[b, i, h]
    return call(q, k, v, out_mod=mod, **more)


def gates(dim_v=8):
    return draw(1, (2, 5, 4, dim_v), (2, 5, 4))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_gates_with_gradients(dtype):
    arrays = (*problem(dim_v=8, dtype=dtype), *gates())
    check_gradients(functools.partial(gated, fj.attention), functools.partial(gated, in_jax), arrays, dtype)


@pytest.mark.slow
def test_beside_a_score_sinks_and_rows():
    def attend(call, q, k, v, slopes, sinks):
        score = lambda s, b, h, i, j: s + slopes[h] * (j - i)
        mod = lambda out, b, h, i, d: jnp.where(d < 4, out * slopes[h], jnp.tanh(out))
        return call(q, k, v, score_mod=score, out_mod=mod, sinks=sinks)

    arrays = (*problem(), *draw(1, (4,), (4,)))
    check_gradients(functools.partial(attend, fj.attention), functools.partial(attend, in_jax), arrays)


@pytest.mark.slow
def test_vmap_of_gradients():
    """Where sinks have gradients, the calls run one after another."""
    arrays = (
        *draw(0, (3, 2, 5, 4, 16), (3, 2, 7, 2, 16), (3, 2, 7, 2, 16), (3, 2, 5, 4, 16)),
        *draw(1, (4,)),
    )

    def loss(call, q, k, v, gate, sinks):
        mod = lambda out, b, h, i, d: out * jax.nn.sigmoid(gate[b, i, h, d])
        return loss_of_out(functools.partial(call, out_mod=mod, sinks=sinks))(q, k, v)

    for places in ((0, 1, 2, 3), (0, 4)):
        of_each = lambda call: jax.vmap(jax.grad(functools.partial(loss, call), places), (0, 0, 0, 0, None))
        expect_close(jax.jit(of_each(fj.attention))(*arrays), in_float64(jax.jit(of_each(in_jax)), *arrays))


@pytest.mark.slow
def test_devices_divide_batch_and_heads():
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip(f"there are {len(devices)} devices of 4")
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    arrays = (*problem(heads_kv=4), *gates(16))
    gradients = jax.grad(loss_of_out(functools.partial(gated, fj.attention)), tuple(range(5)))
    compiled = jax.jit(gradients, in_shardings=[NamedSharding(mesh, P("x", None, "y"))] * 5)
    expect_close(compiled(*arrays), gradients(*arrays))
    assert "all-gather(" not in compiled.lower(*arrays).compile().as_text()


def test_o_before_the_program_is_kept_for_gradients_alone():
    arrays = (*problem(dim_v=8), *gates())
    attend = functools.partial(gated, fj.attention)
    assert "before_mod" not in jax.jit(attend).lower(*arrays).as_text()
    assert "before_mod" in jax.jit(jax.grad(loss_of_out(attend))).lower(*arrays).as_text()


@pytest.mark.slow
def test_accurate_gradients():
    arrays = (*problem(dim_v=8, dtype="bfloat16"), *gates())
    attend = functools.partial(gated, fj.attention, accurate=True)
    assert attend(*arrays).dtype == jnp.bfloat16
    check_gradients(attend, functools.partial(gated, in_jax), arrays, "bfloat16")


@pytest.mark.parametrize(
    "mod, says",
    [
        (lambda out, b, h, i: out, r"missing 1|takes 4"),
        (lambda out, b, h, i, d: d > 3, "out_mod returns bool: it returns an element"),
        ("out * 2.0", "out_mod is a str: give a function out_mod"),
    ],
)
def test_refusals(mod, says):
    with pytest.raises((flashjit.Error, TypeError), match=says):
        fj.attention(*problem(), out_mod=mod)


def test_forward_mode_is_refused():
    attend = functools.partial(fj.attention, out_mod=lambda out, b, h, i, d: out * 2)
    arrays = tuple(problem())
    with pytest.raises(flashjit.Error, match="no forward-mode and second derivatives .*out_mod is set"):
        jax.jit(lambda *x: jax.jvp(attend, x, x))(*arrays)

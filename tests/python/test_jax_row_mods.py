"""Functions of Q's and K's rows in flashjit.jax, with gradients: against JAX in float64."""

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
    problem,
)

DIM = 16


def in_halves(cos, sin):
    """RoPE, as it is written for a whole row."""

    def turn(row, b, h, i, column):
        turned = jnp.concatenate([-row[DIM // 2 :], row[: DIM // 2]])
        angles = [jnp.concatenate([table[i], table[i]]) for table in (cos, sin)]
        return (row * angles[0] + turned * angles[1])[column]

    return turn


def in_pairs(cos, sin):
    return lambda row, b, h, i, d: row[d] * cos[i, d // 2] + row[d ^ 1] * sin[i, d // 2] * (2 * (d & 1) - 1)


def norm(weight):
    return lambda row, b, h, i, d: row[d] * jax.lax.rsqrt((row * row).mean() + 1e-5) * weight[d]


#: The same of [batch, length, heads, DIM].
def on_rows(mod, x):
    sizes = [jnp.arange(n, dtype=jnp.int32) for n in (*x.shape[:3], DIM)]
    of_row = jax.vmap(mod, (None, None, None, None, 0))  # of each column
    of_head = jax.vmap(lambda row, b, i, h: of_row(row, b, h, i, sizes[3]), (0, None, None, 0))
    of_position = jax.vmap(lambda rows, b, i: of_head(rows, b, i, sizes[2]), (0, None, 0))
    return jax.vmap(lambda rows, b: of_position(rows, b, sizes[1]))(x, sizes[0])


def in_jax(q, k, v, q_mod=None, k_mod=None, **more):
    q = q if q_mod is None else on_rows(q_mod, q)
    return attention(q, k if k_mod is None else on_rows(k_mod, k), v, **more)[0]


@pytest.mark.parametrize("turn", [in_halves, pytest.param(in_pairs, marks=pytest.mark.slow)])
def test_rope_and_a_norm_with_gradients_of_tables_and_weights(turn):
    def attend(call, q, k, v, cos, sin, weight):
        return call(q, k, v, q_mod=turn(cos, sin), k_mod=norm(weight))

    arrays = (*problem(), *draw(1, (7, DIM // 2), (7, DIM // 2), (DIM,)))
    check_gradients(
        functools.partial(attend, fj.attention), functools.partial(attend, in_jax), arrays, "float32"
    )


@pytest.mark.slow
def test_a_norm_in_bfloat16_beside_other_programs():
    q, k, v = problem(dtype="bfloat16")

    def attend(call, q, k, v, weight, slopes):
        alibi = lambda s, b, h, i, j: s + slopes[h] * weight[h] * (j - i)
        mask = lambda b, h, i, j: j <= i + 2
        return call(q, k, v, q_mod=norm(weight), k_mod=norm(weight), score_mod=alibi, mask_mod=mask)

    arrays = (q, k, v, *draw(1, (DIM,), (4,)))
    check_gradients(
        functools.partial(attend, fj.attention), functools.partial(attend, in_jax), arrays, "bfloat16"
    )


@pytest.mark.slow
def test_sums_of_a_row_and_of_parts_of_it():
    """The sum of all squares is the language's own; other sums are written out."""

    def attend(call, q, k, v, scale):
        q_mod = lambda row, b, h, i, d: row[d] * scale[b, h, i] + row.sum() + jnp.tanh(row[:3]).sum()
        k_mod = lambda row, b, h, i, d: row[d] * scale[b, h, d % 5] + jnp.linalg.norm(row) * row[DIM - 1]
        return call(q, k, v, q_mod=q_mod, k_mod=k_mod)

    arrays = (*problem(), *draw(1, (2, 4, 5)))
    check_gradients(functools.partial(attend, fj.attention), functools.partial(attend, in_jax), arrays)


def test_the_text_of_a_program():
    q, k, v = problem()
    (weight,) = draw(1, (DIM,))
    text = jax.jit(lambda *x: fj.attention(*x, q_mod=norm(weight))).lower(q, k, v).as_text()
    assert "sum_of_squares" in text and "element_at" not in text and "element * " in text
    same = jax.jit(lambda *x: fj.attention(*x, q_mod=lambda row, b, h, i, d: row[d])).lower(q, k, v)
    assert "q_mod" not in same.as_text()


@pytest.mark.slow
def test_vmap_of_gradients():
    arrays = draw(0, (3, 2, 5, 4, DIM), (3, 2, 7, 2, DIM), (3, 2, 7, 2, DIM), (3, DIM), (2, DIM))

    def loss(call, q, k, v, weight, scale):
        k_mod = lambda row, b, h, j, d: row[d] * scale[b, d]
        return loss_of_out(functools.partial(call, q_mod=norm(weight), k_mod=k_mod))(q, k, v)

    axes = (0, 0, 0, 0, None)
    of_each = lambda call: jax.vmap(jax.grad(functools.partial(loss, call), (0, 1, 2, 3, 4)), axes)
    expect_close(jax.jit(of_each(fj.attention))(*arrays), in_float64(jax.jit(of_each(in_jax)), *arrays))


def test_packed_sequences():
    (x,) = draw(0, (1, 12, 2, DIM))
    cos, sin = draw(1, (7, DIM // 2), (7, DIM // 2))
    turn = in_pairs(cos, sin)
    starts = np.int32([0, 5, 12])
    got = fj.attention(x[0], x[0], x[0], cu_seqlens_q=starts, causal=True, q_mod=turn, k_mod=turn)
    for begin, end in zip(starts, starts[1:]):
        part = x[:, begin:end]
        expect_close(got[begin:end], fj.attention(part, part, part, causal=True, q_mod=turn, k_mod=turn)[0])


@pytest.mark.slow
def test_devices_divide_heads_of_k():
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip(f"there are {len(devices)} devices of 4")
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    arrays = (*problem(), *draw(1, (4, DIM), (2, DIM)))

    def attend(q, k, v, of_q, of_k):
        q_mod = lambda row, b, h, i, d: row[d] * of_q[h, d]
        return fj.attention(q, k, v, q_mod=q_mod, k_mod=lambda row, b, h, j, d: row[d] * of_k[h, d])

    gradients = jax.grad(loss_of_out(attend), (0, 1, 2, 3, 4))
    specs = (*[P("x", None, "y")] * 3, P("y"), P("y"))
    compiled = jax.jit(gradients, in_shardings=[NamedSharding(mesh, spec) for spec in specs])
    expect_close(compiled(*arrays), gradients(*arrays))
    assert "all-gather(" not in compiled.lower(*arrays).compile().as_text()


@pytest.mark.parametrize(
    "more, says",
    [
        ({"q_mod": lambda row, b, h, i, d: row * 2}, "is called as q_mod\\(row, b, h, q_idx, column\\)"),
        ({"k_mod": lambda row, b, h, i, d: d}, "k_mod returns int32: it returns an element"),
        ({"q_mod": lambda row, b, h, i, d: jax.nn.softmax(row)[d]}, "q_mod uses stop_gradient"),
        ({"q_mod": "element"}, "q_mod is a str: give a function q_mod"),
        (
            {"k_mod": lambda row, b, h, i, d: row[d] * 2, "cache": True, "kv_lengths": np.int32([3, 7])},
            "k_mod is set and K is in a cache; append",
        ),
    ],
)
def test_refusals(more, says):
    q, k, v = problem()
    with pytest.raises(flashjit.Error, match=says):
        fj.attention(q, k, v, **more)


def test_other_derivatives_are_refused():
    q, k, v = problem()
    attend = lambda q: fj.attention(q, k, v, q_mod=lambda row, b, h, i, d: row[d] * 2).sum()
    for wrong in (lambda q: jax.jvp(attend, (q,), (q,)), jax.grad(lambda q: jax.grad(attend)(q).sum())):
        with pytest.raises(flashjit.Error, match="no forward-mode and second derivatives .*q_mod is set"):
            jax.jit(wrong)(q)

"""flashjit.jax: Q, K and V of 8 bits with scales, against JAX in float64 over the codes' values."""

import functools

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from jax_reference import attention as in_jax  # noqa: E402
from jax_reference import draw, expect_close, in_float64, jax, jnp, np, problem  # noqa: E402

TYPES = ["float8_e4m3fn", "float8_e5m2", "int8"]
ROWS, TABLE, LENGTHS = 8, np.int32([[5, 1, 0], [2, 7, 4], [6, 0, 0]]), np.int32([7, 22, 3])


def codes(seed, shape, dtype):
    (drawn,) = draw(seed, shape)
    return jnp.round(20 * drawn).astype("int8") if dtype == "int8" else drawn.astype(dtype)


def positive(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).uniform(0.02, 0.1, shape), jnp.float32)


SCALES = {  # of K, and as a factor of [batch, keys, heads, 1]
    "tensor": ((), lambda s: s),
    "heads": ((2,), lambda s: s[None, None, :, None]),
    "heads of sequences": ((2, 2), lambda s: s[:, None, :, None]),
    "keys": ((2, 2, 7), lambda s: s.swapaxes(1, 2)[..., None]),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SCALES)
def test_k_and_v_of_8_bits(dtype, name):
    q = problem(dtype="bfloat16")[0]
    k, v = codes(1, (2, 7, 2, 16), dtype), codes(2, (2, 7, 2, 16), dtype)
    shape, factor = SCALES[name]
    k_scale, v_scale = positive(3, *shape), positive(4, *shape)
    mask = lambda b, h, i, j: j <= i + 2

    @jax.jit
    def call(q, k, v, k_scale, v_scale):
        return fj.attention(q, k, v, causal=True, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    def reference(q, k, v, k_scale, v_scale):
        return in_jax(q, k * factor(k_scale), v * factor(v_scale), mask_mod=mask)

    wide = [np.asarray(x, np.float64) for x in (k, v)]
    want = in_float64(reference, q, *wide, k_scale, v_scale)
    got = call(q, k, v, k_scale, v_scale)
    assert got[0].dtype == q.dtype
    expect_close(got, want, "bfloat16")
    turned = fj.attention(
        *[x.swapaxes(1, 2) for x in (q, k, v)], causal=True, k_scale=k_scale, v_scale=v_scale, layout="BHSD"
    )
    expect_close(turned.swapaxes(1, 2), want[0], "bfloat16")


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_q_of_8_bits(dtype):
    q, k, v = codes(0, (2, 5, 4, 16), dtype), codes(1, (2, 7, 2, 16), dtype), codes(2, (2, 7, 2, 16), dtype)
    q_scale, k_scale, v_scale = positive(3, 2, 2), positive(4), positive(5, 2)
    alibi = lambda score, b, h, i, j: score + 0.1 * h * (j - i)
    out = jax.jit(
        lambda *x: fj.attention(*x, score_mod=alibi, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    )(q, k, v)
    assert out.dtype == "bfloat16"

    def reference(q, k, v, q_scale, k_scale, v_scale):
        q = q * jnp.repeat(q_scale, 2, 1)[:, None, :, None]
        return in_jax(q, k * k_scale, v * v_scale[:, None], score_mod=alibi)[0]

    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    want = in_float64(reference, *wide, q_scale, k_scale, v_scale)
    # P may be e4m3, too, with an error of 2.7%.
    assert np.abs(np.asarray(out, np.float64) - want).max() <= 0.06 * np.abs(want).max()


@pytest.mark.parametrize("by", ["heads", "keys"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_cache_of_8_bits(dtype, by):
    """append() divides by scales of heads, finds those of keys, and attention() reads what it wrote."""
    k, v, q = draw(0, (3, 2, 2, 32), (3, 2, 2, 32), (3, 2, 4, 32), dtype="bfloat16")
    caches = [codes(n, (8, ROWS, 2, 32), dtype) for n in (1, 2)]
    scales = [positive(n, *((2,) if by == "heads" else (8, 2, ROWS))) for n in (3, 4)]
    # The same twice, with keys of the past in the memory as they are.
    append = jax.jit(
        lambda caches, scales: fj.append(
            k, v, *caches, kv_lengths=LENGTHS, page_table=TABLE, k_scale=scales[0], v_scale=scales[1]
        ),
        donate_argnums=0,
    )
    before = [np.asarray(x, np.float64) for x in caches]
    made = append([x.copy() for x in caches], scales)
    assert len(made) == (2 if by == "heads" else 4)
    assert [x.dtype for x in made[:2]] == [dtype] * 2
    used = scales if by == "heads" else made[2:]
    factor = (lambda s: s[:, None]) if by == "heads" else (lambda s: s.reshape(8, 2, ROWS, 1).swapaxes(1, 2))
    values = [np.asarray(x, np.float64) * np.asarray(factor(s)) for x, s in zip(made, used)]
    old = [x * np.asarray(factor(s)) for x, s in zip(before, scales)]
    for new, past, rows in zip(values, old, (k, v)):
        for b in range(3):
            for i in range(2):
                n = LENGTHS[b] - 2 + i
                place = (TABLE[b, n // ROWS], n % ROWS)
                row = np.asarray(rows[b, i], np.float64)
                limit = (
                    np.abs(row).max() / (6 if dtype == "float8_e5m2" else 12) if by == "keys" else 1.6
                )  # clipped
                if by == "keys" or dtype != "int8":
                    assert np.abs(new[place] - row).max() <= limit
                past[place] = new[place]
        np.testing.assert_allclose(new, past, rtol=1e-6)
    call = jax.jit(
        lambda q, k, v, *s: fj.attention(
            q,
            k,
            v,
            causal=True,
            kv_lengths=LENGTHS,
            page_table=TABLE,
            k_scale=s[0],
            v_scale=s[1],
            return_lse=True,
        )
    )

    def reference(q, k, v):
        lengths = jnp.asarray(LENGTHS)
        keys = [x[TABLE].reshape(3, -1, 2, 32) for x in (k, v)]
        return in_jax(q, *keys, mask_mod=lambda b, h, i, j: j <= lengths[b] - 2 + i)

    expect_close(call(q, *made[:2], *used), in_float64(reference, q, *values), "bfloat16")


def test_no_derivatives_and_a_loop_of_vmap():
    q = problem(dtype="bfloat16")[0]
    k, v = codes(1, (2, 7, 2, 16), TYPES[0]), codes(2, (2, 7, 2, 16), TYPES[0])
    attend = lambda q: fj.attention(q, k, v, k_scale=np.float32(0.5), v_scale=np.float32(2))
    with pytest.raises(flashjit.Unsupported, match="K and V of 8 bits has no derivatives"):
        jax.grad(lambda q: attend(q).astype(jnp.float32).sum())(q)
    expect_close(jax.vmap(attend)(q[None])[0], attend(q))


ONE = np.float32(1)
WRONG = {
    "k_scale is missing: K and V are float8_e4m3fn": dict(v_scale=ONE),
    "v_scale is missing": dict(k_scale=ONE),
    r"k_scale is float16 \[\]: it must be float32": dict(k_scale=np.float16(1), v_scale=ONE),
    "q_scale is given, but q is bfloat16": dict(k_scale=ONE, v_scale=ONE, q_scale=ONE),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    q = problem(dtype="bfloat16")[0]
    k, v = codes(1, (2, 7, 2, 16), TYPES[0]), codes(2, (2, 7, 2, 16), TYPES[0])
    with pytest.raises(flashjit.InvalidArgument, match=message):
        jax.jit(functools.partial(fj.attention, **WRONG[message]))(q, k, v)


def test_errors_of_types():
    q, k, v = problem(dtype="bfloat16")
    codes_of_k = codes(1, k.shape, TYPES[0])
    with pytest.raises(flashjit.InvalidArgument, match="k_scale is given, but K and V are bfloat16"):
        fj.attention(q, k, v, k_scale=ONE)
    with pytest.raises(flashjit.WrongType, match="k is float8_e4m3fn and v is bfloat16"):
        fj.attention(q, codes_of_k, v, k_scale=ONE, v_scale=ONE)
    with pytest.raises(flashjit.WrongType, match="q is int8 and k is float8_e4m3fn: q has 16 bits"):
        fj.attention(q.astype("int8"), codes_of_k, codes_of_k, k_scale=ONE, v_scale=ONE)
    with pytest.raises(flashjit.InvalidArgument, match="q_scale is missing: q is float8_e4m3fn"):
        fj.attention(q.astype(TYPES[0]), codes_of_k, codes_of_k, k_scale=ONE, v_scale=ONE)

"""What JAX computes on scalars is what a kernel computes: score_mod and mask_mod of flashjit.jax, pair by pair."""

import functools
import math
import random

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from flashjit.jax import _programs  # noqa: E402
from jax_reference import in_float64, jax, jnp, np, over_pairs  # noqa: E402

BATCH, HEADS, QUERIES, KEYS = SIZES = 2, 2, 4, 5
RNG = np.random.default_rng(0)
SCORES = jnp.asarray(RNG.integers(-24, 25, SIZES) / 8, "float32")
TABLE = jnp.asarray(RNG.normal(size=(HEADS, 9)), "float32")
VECTOR = jnp.asarray(RNG.normal(size=KEYS), "bfloat16")
SMALL = jnp.asarray(RNG.integers(-100, 100, (BATCH, KEYS)), "int8")
BYTES = jnp.asarray(RNG.integers(0, 256, KEYS), "uint8")
FLAGS = jnp.asarray(RNG.integers(0, 2, (QUERIES, KEYS)), "bool")
IDS = jnp.asarray(RNG.integers(-2, 2, (BATCH, KEYS)), "int32")


def of_kernel(score_mod):
    """[BATCH, HEADS, QUERIES, KEYS]: each from the LSE of one key."""
    q = jnp.pad(SCORES, ((0, 0),) * 3 + ((0, 8 - KEYS),))
    k = jnp.broadcast_to(jnp.eye(8)[:KEYS], (BATCH, HEADS, KEYS, 8))
    call = functools.partial(fj.attention, q, k, k, scale=1.0, layout="BHSD", return_lse=True)

    def lse(key):
        return call(score_mod=score_mod, mask_mod=lambda b, h, i, j: j == key)[1]

    return jnp.stack([jax.jit(lse)(key) for key in range(KEYS)], -1)


def mask_of_kernel(mask_mod):
    q = jnp.zeros((BATCH, HEADS, QUERIES, 8))
    k = jnp.broadcast_to(jnp.eye(8)[:KEYS], (BATCH, HEADS, KEYS, 8))
    return fj.attention(q, k, k, mask_mod=mask_mod, layout="BHSD")[..., :KEYS] > 0


def check(score_mod):
    want = np.asarray(over_pairs(score_mod, *SIZES, SCORES))
    np.testing.assert_allclose(of_kernel(score_mod), want, rtol=1e-5, atol=1e-5)


SCORE_MODS = {
    "arithmetic": lambda s, b, h, i, j: (s + 1) * 0.5 - s / 3 + (j - i) * 0.25 - h + -s,
    "division of ints": lambda s, b, h, i, j: s + (j - 3) // 2 + (j - i) % 3 + i // 2 + j % 2,
    "truncation": lambda s, b, h, i, j: s + jax.lax.div(j - 3, 2) + jax.lax.rem(j - 3, 2),
    "powers": lambda s, b, h, i, j: s**2 + s**3 + (s * s + 1) ** -0.5 + jnp.square(s) + 2.0 ** (-h * 1.0),
    "functions": lambda s, b, h, i, j: (
        jnp.exp(-s) + jnp.log(s * s + 1) + jnp.tanh(s) + jnp.sin(s) * jnp.cos(s)
    ),
    "more functions": lambda s, b, h, i, j: (
        jax.scipy.special.erf(s) + jnp.expm1(s) + jnp.log1p(s * s) + jnp.exp2(s)
    ),
    "roots": lambda s, b, h, i, j: jnp.sqrt(s * s) + jax.lax.rsqrt(s * s + 1.0) + jnp.abs(s) + jnp.sign(s),
    "rounding": lambda s, b, h, i, j: (
        jnp.floor(s) + jnp.ceil(s) + jnp.round(s) + jnp.trunc(s) + jax.lax.round(s)
    ),
    "activations": lambda s, b, h, i, j: jax.nn.relu(s) + jax.nn.silu(s) + jax.nn.gelu(s) + jax.nn.sigmoid(s),
    "more activations": lambda s, b, h, i, j: jax.nn.softplus(s) + jax.nn.elu(s) + jax.nn.leaky_relu(s),
    "choices": lambda s, b, h, i, j: (
        jnp.where(j > i, s * 2, jnp.minimum(s, 1)) + jnp.maximum(i, j) + jnp.clip(s, -1, 1)
    ),
    "select of three": lambda s, b, h, i, j: jax.lax.select_n(j % 3, s, s * 2, s * 3),
    "bits": lambda s, b, h, i, j: s + (i & 3) + (j | 4) + (i ^ j) + (~j) + (j << 2) + ((j - 9) >> 1),
    "conversions": lambda s, b, h, i, j: (
        s + s.astype(int) + (j > 2).astype("float32") + jnp.int8(j * 60) + jnp.uint8(j * 90)
    ),
    "table": lambda s, b, h, i, j: s + TABLE[h, j - i + 4],
    "row, then element": lambda s, b, h, i, j: s + TABLE[h][j - i + 4] + TABLE[:, j][h],
    "negative index": lambda s, b, h, i, j: s + TABLE[h, -1] + TABLE[h, j - 4] + TABLE[-h, 0],
    "clamped": lambda s, b, h, i, j: (
        s + TABLE.at[h, j * 3].get(mode="clip") + TABLE[h, jnp.clip(j - i, 0, 2)]
    ),
    "filled": lambda s, b, h, i, j: s + TABLE.at[h, j * 3].get(mode="fill", fill_value=7.0),
    "take": lambda s, b, h, i, j: s + jnp.take(VECTOR, j) + jnp.take(TABLE, h, axis=0)[i],
    "transformed": lambda s, b, h, i, j: (
        s + jnp.exp(TABLE).T[i, h] + TABLE.reshape(-1)[j * 2] + (TABLE * 2 + 1)[h, j]
    ),
    "sliced": lambda s, b, h, i, j: s + TABLE[:, 2:7][h, j] + TABLE[:, ::2][h, i] + TABLE[::-1][h, 0],
    "dynamic slice": lambda s, b, h, i, j: s + jax.lax.dynamic_slice(TABLE, (h, j + 2), (1, 3)).sum(),
    "small ints": lambda s, b, h, i, j: (
        s + SMALL[b, j] + SMALL[b, j] * SMALL[b, 0] + (BYTES[j] + jnp.uint8(200))
    ),
    "a row's sum": lambda s, b, h, i, j: (
        s + TABLE[h].sum() + (TABLE[h] * TABLE[1 - h]).max() + FLAGS[i].any()
    ),
    "joined": lambda s, b, h, i, j: (
        s
        + jnp.stack([s, s * 2, s * 3])[j % 3]
        + jnp.concatenate([s[None], TABLE[0], TABLE[1]])[j + h]
        + jnp.concatenate([TABLE[0], TABLE[1]])[j]
    ),
    "constant array": lambda s, b, h, i, j: s + jnp.array([0.5, 1.5, 2.5, 3.5, 4.5])[j],
    "folded constants": lambda s, b, h, i, j: s * jnp.sqrt(2.0) + jnp.arange(5)[j] + math.pi,
    "number of an array": lambda s, b, h, i, j: s * TABLE[0, 0] + VECTOR[2],
    "types": lambda s, b, h, i, j: s + VECTOR[j] * jnp.bfloat16(2) + jnp.float32(i),
    "finite": lambda s, b, h, i, j: jnp.where(jnp.isfinite(s), s, 0) + jnp.nan_to_num(s),
    "remat": lambda s, b, h, i, j: jax.checkpoint(lambda x: jnp.tanh(x) * x)(s) + jax.jit(lambda x: x + j)(s),
    "the score as it is": lambda s, b, h, i, j: s,
    "a choice that is known": lambda s, b, h, i, j: jnp.where(i >= 0, s, TABLE[h, j]) + VECTOR[j],
    "no score": lambda s, b, h, i, j: TABLE[h, j],
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score(name):
    check(SCORE_MODS[name])


MASK_MODS = {
    "causal": lambda b, h, i, j: j <= i + 1,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 2) | (j == 0),
    "blocks": lambda b, h, i, j: (i // 2 == j // 2) ^ (j % 2 == 0),
    "documents": lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) | (j == 0),
    "flags": lambda b, h, i, j: ~FLAGS[i, j] | (j == 4),
    "logic": lambda b, h, i, j: (
        jnp.logical_and(i >= j, jnp.logical_not(h == 1)) | jnp.logical_or(j == 0, b > i)
    ),
    "floats": lambda b, h, i, j: jnp.sqrt(i * 1.0) * 2 >= j,
    "all": lambda b, h, i, j: jnp.bool_(True),
    "a head's": lambda b, h, i, j: jnp.where(h == 0, j <= i, j >= i),
}


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask(name):
    want = over_pairs(MASK_MODS[name], *SIZES)
    np.testing.assert_array_equal(mask_of_kernel(MASK_MODS[name]), np.broadcast_to(want, SIZES))


def test_minus_infinity_is_a_mask():
    tracer = _programs.Tracer(*SIZES)
    score_mod = lambda s, b, h, i, j: jnp.where(j <= i, s * 2, -jnp.inf)
    assert tracer.score("score_mod", score_mod, "score") == ("(score * 2.0)", ["(kv <= q)"])


TEXTS = {
    "alibi": (
        lambda s, b, h, i, j: s + TABLE[h, 0] * (j - i),
        "(score + (c0[@c0@@h:c0:0@, 0] * to_float((kv - q))))",
    ),
    "int division": (lambda s, b, h, i, j: s + i // 2, "(score + to_float((q / 2)))"),
    "remainder": (lambda s, b, h, i, j: s + j % 2, "(score + to_float((kv % 2)))"),
    "bias": (lambda s, b, h, i, j: s + FLAGS[i, j], "(score + to_float(c0[@c0@q, kv]))"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_what_the_analysis_of_tiles_knows(name):
    function, text = TEXTS[name]
    assert _programs.Tracer(*SIZES).score("score_mod", function, "score") == (text, [])


def test_captures_are_tracers_of_the_enclosing_jit():
    def call(table, scale):
        score_mod = lambda s, b, h, i, j: s * scale + jnp.cumsum(table, 1)[h, j]
        return of_kernel(score_mod)

    got = jax.jit(call)(TABLE, jnp.float32(0.5))
    np.testing.assert_allclose(got, call(TABLE, jnp.float32(0.5)), rtol=1e-6)
    want = over_pairs(lambda s, b, h, i, j: s * 0.5 + jnp.cumsum(TABLE, 1)[h, j], *SIZES, SCORES)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_values_of_arrays_are_no_part_of_the_program():
    def texts(slope):
        tracer = _programs.Tracer(*SIZES)
        return tracer.score("score_mod", lambda s, b, h, i, j: s * slope, "score")

    assert texts(jnp.float32(1)) == texts(jnp.float32(2)) != texts(2.0)


DERIVATIVES = {
    "softcap": lambda s, x: 2 * jnp.tanh(s / 2) + x,
    "gate": lambda s, x: s * jax.nn.sigmoid(x),
    "division": lambda s, x: s / (1 + x * x),
    "powers": lambda s, x: s**3 * 0.1 + jnp.exp(x) * jnp.log1p(s * s),
    "choice": lambda s, x: jnp.where(s > x, s * x, jnp.maximum(s, 2 * x)),
    "soft": lambda s, x: jax.nn.softplus(s) + jax.nn.gelu(x, approximate=False) * jax.scipy.special.erf(s),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative(name):
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, 8)), "float32") for n in (4, 5, 5))
    table = jnp.asarray(rng.normal(size=(2, 5)), "float32")
    mod = DERIVATIVES[name]

    def ours(q, table):
        return (fj.attention(q, k, v, score_mod=lambda s, b, h, i, j: mod(s, table[h, j])) ** 2).sum()

    def reference(q, table):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k.astype(q.dtype)) * 8**-0.5
        shares = jax.nn.softmax(mod(scores, table[None, :, None, :]))
        return (jnp.einsum("bnts,bsnh->btnh", shares, v.astype(q.dtype)) ** 2).sum()

    got = jax.grad(ours, (0, 1))(q, table)
    for x, y in zip(got, in_float64(jax.grad(reference, (0, 1)), q, table)):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * np.abs(y).max())


@jax.custom_vjp
def with_rule(x):
    return x


with_rule.defvjp(lambda x: (x, None), lambda _, g: (g,))


@jax.custom_jvp
def with_forward_rule(x):
    return x


with_forward_rule.defjvp(lambda x, t: (x[0], t[0]))
REFUSED = {
    "score_mod uses acosh, which a program does not have. It may use": lambda s, b, h, i, j: jnp.arccosh(s),
    "uses stop_gradient.*apply jax.lax.stop_gradient to what is captured": lambda s, b, h, i, j: (
        jax.lax.stop_gradient(s) + s
    ),
    "uses cond.*it has no loops and no branches; use jnp.where": lambda s, b, h, i, j: jax.lax.cond(
        j > 0, lambda: s, lambda: -s
    ),
    "custom_vjp_call": lambda s, b, h, i, j: with_rule(s),
    "with_forward_rule, which has a custom_jvp": lambda s, b, h, i, j: with_forward_rule(s),
    "value of uint32": lambda s, b, h, i, j: s + j.astype("uint32"),
    "score_mod returns int32: it returns a score": lambda s, b, h, i, j: j,
    "score_mod returns .*float32.2. *.*and returns a scalar": lambda s, b, h, i, j: jnp.stack([s, s]),
    "score_mod is a int: give a function": 3,
    "captured array.* 7 dimensions": lambda s, b, h, i, j: s + jnp.zeros((2,) * 7)[b, b, b, b, b, b, b],
    "reads? more than 16": lambda s, b, h, i, j: s + sum((TABLE + n)[h, j] for n in range(17)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(flashjit.InvalidArgument, match=message):
        of_kernel(REFUSED[message])


def test_a_mask_returns_a_boolean():
    with pytest.raises(flashjit.WrongType, match="mask_mod returns float32: it returns a boolean"):
        mask_of_kernel(lambda b, h, i, j: (j <= i) * 1.0)


def test_python_s_if_is_refused_by_jax():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        of_kernel(lambda s, b, h, i, j: s if j > 2 else -s)


def random_value(rng, depth, s, b, h, i, j, is_float):
    """An expression of floats or of ints."""
    again = lambda kind=is_float: random_value(rng, depth - 1, s, b, h, i, j, kind)
    if depth == 0:
        if is_float:
            return rng.choice([s, 0.5, TABLE[h, j], TABLE[h, i + 2], VECTOR[j].astype("float32")])
        return rng.choice([b, h, i, j, jnp.int32(3), IDS[b, j], SMALL[b, j].astype("int32")])
    if is_float:
        kind = rng.randrange(8)
        if kind < 4:
            return [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum][kind](again(), again())
        if kind == 4:
            return rng.choice([jnp.tanh, jnp.sin, jnp.abs, jax.nn.sigmoid, jnp.floor, lambda x: -x])(again())
        if kind == 5:
            return again() / (1 + jnp.square(again()))
        if kind == 6:
            return jnp.where(again(False) > again(False), again(), again())
        return jnp.asarray(again(False), "float32") * 0.125
    kind = rng.randrange(7)
    if kind < 5:
        return [jnp.add, jnp.subtract, jnp.multiply, jnp.minimum, jnp.bitwise_and][kind](again(), again())
    if kind == 5:
        return rng.choice([jnp.floor_divide, jnp.remainder, jax.lax.rem])(
            again(), jnp.int32(rng.choice([2, 3, 7]))
        )
    return jnp.where(again(True) > again(True), again(), again())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_random_programs(seed):
    print("seed", seed)

    def score_mod(s, b, h, i, j):
        return jnp.asarray(random_value(random.Random(seed), 3, s, b, h, i, j, True), "float32")

    want = np.asarray(over_pairs(score_mod, *SIZES, SCORES))
    np.testing.assert_allclose(of_kernel(score_mod), want, rtol=1e-4, atol=1e-4)

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


PAIRS = [  # of K and V
    ("nvfp4", "q8_0"),
    ("int4:g32:fp16:zero", None),
    ("q5_0", "book(-7,-4,-2,-0.7,0.7,2,4,7):g32:fp16"),
    ("e2m1:g16:e4m3:apart:scaled", "uint4:g32:bf16:apart:min"),
    ("int4", "fp8_e4m3"),
]


def new_caches(formats, size, layout="BTNH"):
    """K and V: arrays by the arguments' names, and k_format, v_format and scales of the call."""
    arrays, given = {}, {}
    for name, form in zip("kv", formats):
        rows, scales = (
            (jnp.zeros(size, "bfloat16"), None) if form is None else fj.new_cache(form, size, layout)
        )
        arrays[name] = rows
        if form is None:
            continue
        given[f"{name}_format"] = form
        if scales is not None:
            arrays[f"{name}_block_scale"] = scales
        if form in ("nvfp4", "int4", "fp8_e4m3") or form.endswith(":scaled"):
            given[f"{name}_scale"] = jnp.float32({"int4": 0.5, "fp8_e4m3": 0.02}.get(form, 0.01))
    return arrays, given


@pytest.mark.parametrize("layout", ["BTNH", "BHSD"])
@pytest.mark.parametrize("formats", PAIRS)
def test_a_cache_in_a_format(formats, layout):
    """append() encodes rows, and attention() is near to attention over the rows that were given."""
    turn = (lambda x: x) if layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    lengths = jnp.int32([7, 22, 3])
    k, v, q = draw(0, (3, 22, 2, 64), (3, 22, 2, 64), (3, 2, 4, 64), dtype="bfloat16")
    size = (8, ROWS, 2, 64) if layout == "BTNH" else (8, 2, ROWS, 64)
    arrays, given = new_caches(formats, size, layout)
    given |= {"page_table": TABLE, "layout": layout}

    @jax.jit
    def fill(arrays):
        for n in range(22):  # a key at a time, up to each sequence's last
            arrays = append_keys(arrays, n)
        return arrays

    def append_keys(arrays, n):
        now = jnp.minimum(n + 1, lengths)
        rows = [jnp.take_along_axis(x, (now - 1)[:, None, None, None], 1) for x in (k, v)]
        more = {name: x for name, x in arrays.items() if name not in ("k", "v")}
        made = fj.append(*map(turn, rows), arrays["k"], arrays["v"], kv_lengths=now, **more, **given)
        return dict(zip(["k", "v", *more], made))

    made = fill(arrays)
    call = jax.jit(lambda q, made: fj.attention(turn(q), **made, kv_lengths=lengths, causal=True, **given))
    mask = lambda b, h, i, j: j <= lengths[b] - 2 + i
    want = in_float64(lambda q, k, v: in_jax(q, k, v, mask_mod=mask)[0], q, k, v)
    got = np.asarray(turn(call(q, made)), np.float64)
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.25


def test_rows_of_a_cache_may_be_rotated():
    """A Hadamard matrix rotates K and Q, so that outliers in few columns of K cost the others less."""
    k, v, q = draw(3, (1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 4, 64), dtype="bfloat16")
    k = k * jnp.where(jnp.arange(64) < 2, 20, 1).astype(k.dtype)
    lengths, given = jnp.int32([20]), {"k_format": "q4_0", "v_format": "q4_0", "cache": True}
    want = in_float64(lambda *x: in_jax(*x, mask_mod=lambda b, h, i, j: j <= i)[0], q, k, v)
    errors = []
    for hadamard in (False, True):
        caches = [fj.new_cache("q4_0", k.shape)[0] for _ in "kv"]
        formats = {"k_format": "q4_0", "v_format": "q4_0"}
        *caches, turned = fj.append(k, v, *caches, q=q, kv_lengths=lengths, hadamard=hadamard, **formats)
        got = np.asarray(fj.attention(turned, *caches, kv_lengths=lengths, causal=True, **given), np.float64)
        errors.append(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
    assert errors[1] < 0.8 * errors[0] and errors[1] < 0.4


def test_rows_in_a_format_without_a_cache():
    """Bytes of q8_0 by hand: a scale of fp16 and 32 codes."""
    q = problem(dtype="bfloat16", dim=64)[0]
    generator = np.random.default_rng(0)
    of_codes = generator.integers(-127, 128, (2, 7, 2, 2, 32), "int8")
    scales = generator.uniform(0.01, 0.02, (2, 7, 2, 2, 1)).astype("float16")
    rows = jnp.asarray(
        np.concatenate([scales.view("uint8"), of_codes.view("uint8")], -1).reshape(2, 7, 2, 68)
    )
    values = (of_codes * scales.astype("float64")).reshape(2, 7, 2, 64)
    want = in_float64(lambda q, k: in_jax(q, k, k), q, values)
    got = jax.jit(
        lambda q, rows: fj.attention(q, rows, rows, k_format="q8_0", v_format="q8_0", return_lse=True)
    )(q, rows)
    expect_close(got, want, "bfloat16")
    with pytest.raises(flashjit.Unsupported, match="no derivatives"):
        jax.grad(lambda q: fj.attention(q, rows, rows, k_format="q8_0", v_format="q8_0").sum())(q)


def test_formats_are_checked_in_the_callers_words():
    q = problem(dtype="bfloat16", dim=64)[0]
    rows, _ = fj.new_cache("q8_0", (2, 7, 2, 64))
    apart, scales = fj.new_cache("int4:g32:fp16:apart", (2, 7, 2, 64))

    def refused(match, k=rows, v=rows, **given):
        with pytest.raises(flashjit.Error, match=match):
            fj.attention(q, k, v, **given)

    both = {"k_format": "q8_0", "v_format": "q8_0"}
    refused("rows of 67 bytes.*has 68", rows[..., 1:], rows, **both)
    refused("uint8.*name the format", **{})
    refused("give it in q's type, or its rows' bytes and v_format", k_format="q8_0")
    refused("k_scale is given.*has no scale of the call", k_scale=jnp.float32(1), **both)
    refused("k_scale is missing", fj.new_cache("nvfp4", (2, 7, 2, 64))[0], k_format="nvfp4", v_format="q8_0")
    refused("k_block_scale is missing", apart, k_format="int4:g32:fp16:apart", v_format="q8_0")
    refused(
        r"k_block_scale is float16 \[2, 7, 2, 1\].*\[2, 7, 2, 2\]",
        apart,
        k_format="int4:g32:fp16:apart",
        v_format="q8_0",
        k_block_scale=scales[..., 1:],
    )
    refused("v_block_scale is given", v_block_scale=scales, **both)
    refused("k_format is a int", k_format=4)
    refused("'int5'", k_format="int5", v_format="q8_0")

"""flashjit.jax.attention(out_dtype=...): O as codes."""

import flashjit
import numpy as np
import pytest

jax = pytest.importorskip("jax")
import flashjit.jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def arrays(heads=4):
    keys = jax.random.split(jax.random.key(3), 3)
    size = [(2, 40, h, 64) for h in (heads, heads // 2, heads // 2)]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, size)]


def exact(*given, **options):
    return np.asarray(flashjit.jax.attention(*(x.astype("float32") for x in given), causal=True, **options))


@pytest.mark.parametrize("jit", [False, True])
def test_one_scale(jit):
    attend = lambda q, k, v: flashjit.jax.attention(
        q, k, v, causal=True, out_dtype=jnp.float8_e4m3fn, out_scale=jnp.float32(1 / 64)
    )
    out = (jax.jit(attend) if jit else attend)(*arrays())
    assert out.dtype == jnp.float8_e4m3fn and out.shape == (2, 40, 4, 64)
    wanted = exact(*arrays())
    assert np.allclose(np.asarray(out.astype("float32")) / 64, wanted, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("layout", ["BTNH", "BHSD"])
def test_scales_of_rows(layout):
    q, k, v = arrays()
    turn = (lambda x: x) if layout == "BTNH" else (lambda x: x.swapaxes(1, 2))
    out, scale, lse = flashjit.jax.attention(
        turn(q), turn(k), turn(v), causal=True, layout=layout, out_dtype=jnp.float8_e4m3fn, return_lse=True
    )
    assert scale.shape == (*out.shape[:3], 1) and scale.dtype == jnp.float32 and lse.shape == out.shape[:3]
    found = turn(np.asarray(out.astype("float32") * scale))
    assert np.allclose(found, exact(q, k, v), rtol=0.07, atol=1e-3)


def test_nvfp4():
    q, k, v = arrays()
    out, blocks = flashjit.jax.attention(
        q, k, v, causal=True, out_dtype=jnp.float4_e2m1fn, out_scale=jnp.ones(1, "float32") / 64
    )
    assert out.dtype == jnp.uint8 and out.shape == (2, 40, 4, 32)
    assert blocks.dtype == jnp.float8_e4m3fn and blocks.shape == (2, 40, 4, 4)
    codes = np.stack([out & 15, out >> 4], -1).reshape(2, 40, 4, 64)
    scale = np.repeat(np.asarray(blocks.astype("float32")), 16, -1) / 64
    found = np.where(codes > 7, -1, 1) * LEVELS[codes & 7] * scale
    wanted = exact(q, k, v)
    largest = np.repeat(np.abs(wanted).reshape(2, 40, 4, 4, 16).max(-1), 16, -1)
    assert (np.abs(found - wanted) <= 0.19 * largest + 1e-3).all()


def test_vmap_and_rows_of_eight_bits():
    q, k, v = arrays()
    attend = lambda q, k, v: flashjit.jax.attention(q, k, v, out_dtype=jnp.float8_e4m3fn)
    out, scale = jax.vmap(attend)(*(jnp.stack([x, x * 2]) for x in (q, k, v)))
    alone = attend(q * 2, k * 2, v * 2)
    assert (out[1] == alone[0]).all() and (scale[1] == alone[1]).all()
    small = [x.astype(jnp.float8_e4m3fn) for x in (k, v)]
    one = jnp.float32(1)
    codes, rows = flashjit.jax.attention(q, *small, k_scale=one, v_scale=one, out_dtype=jnp.float8_e4m3fn)
    wanted = flashjit.jax.attention(q, *small, k_scale=one, v_scale=one).astype("float32")
    assert np.allclose(codes.astype("float32") * rows, wanted, rtol=0.07, atol=2e-3)


def in_rows(swizzled, batch, length, heads):
    """Scales as the rows of O have them, [batch, length, heads, blocks], of those in the 128x4 layout."""
    rows, columns = swizzled.shape
    tiles = np.asarray(swizzled).view(np.uint8).reshape(rows // 128, columns // 4, 32, 4, 4)
    matrix = tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns)
    return matrix[: batch * length].reshape(batch, length, heads, columns // heads)


@pytest.mark.parametrize("layout", ["BTNH", "BHSD"])
def test_swizzled_scales(layout):
    q, k, v = arrays()
    given = dict(causal=True, out_dtype=jnp.float4_e2m1fn, out_scale=jnp.float32(1 / 64))
    codes, rows = flashjit.jax.attention(q, k, v, **given)
    turn = (lambda x: x) if layout == "BTNH" else (lambda x: x.swapaxes(1, 2))
    attend = lambda q, k, v: flashjit.jax.attention(
        turn(q), turn(k), turn(v), layout=layout, swizzled_scales=True, return_lse=True, **given
    )
    again, swizzled, lse = jax.jit(attend)(q, k, v)
    assert swizzled.shape == (128, 4 * 4) and swizzled.dtype == jnp.float8_e4m3fn
    assert lse.shape == again.shape[:3] and (turn(again) == codes).all()
    assert (in_rows(swizzled, 2, 40, 4) == np.asarray(rows).view(np.uint8)).all()
    one, of_one = flashjit.jax.attention(*(x[0] for x in (q, k, v)), swizzled_scales=True, **given)
    assert (
        one.shape == (40, 4, 32)
        and (in_rows(of_one, 1, 40, 4)[0] == np.asarray(rows[0]).view(np.uint8)).all()
    )
    mapped = jax.vmap(lambda q, k, v: flashjit.jax.attention(q, k, v, swizzled_scales=True, **given))
    _, of_both = mapped(*(jnp.stack([x, x]) for x in (q, k, v)))
    assert (in_rows(of_both[1], 2, 40, 4) == in_rows(swizzled, 2, 40, 4)).all()  # other rows hold anything


@pytest.mark.parametrize(
    "given, words",
    [
        ({"out_scale": 1.0}, "out_scale is given and out_dtype is not"),
        ({"out_dtype": jnp.float8_e5m2}, "out_dtype is float8_e5m2"),
        ({"out_dtype": jnp.float4_e2m1fn}, "out_scale is missing"),
        ({"swizzled_scales": True}, "swizzled_scales is set and out_dtype is None"),
        (
            {"out_dtype": jnp.float8_e4m3fn, "swizzled_scales": True},
            "swizzled_scales is set and out_dtype is float8_e4m3fn: it is for jnp.float4_e2m1fn",
        ),
        ({"out_dtype": jnp.float8_e4m3fn, "out_scale": jnp.ones(2)}, r"out_scale is float32 \[2\]"),
    ],
)
def test_refused(given, words):
    with pytest.raises(flashjit.InvalidArgument, match=words):
        flashjit.jax.attention(*arrays(), **given)


def test_without_derivatives():
    loss = lambda q, k, v: flashjit.jax.attention(q, k, v, out_dtype=jnp.float8_e4m3fn)[1].sum()
    with pytest.raises(flashjit.Unsupported, match="codes, which have no derivatives"):
        jax.grad(loss)(*arrays())

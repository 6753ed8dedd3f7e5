"""flashjit.jax: attention from caches in pages and slots, and append(), against JAX in float64."""

import functools

import pytest

pytest.importorskip("jax_reference")
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_reference import attention as in_jax  # noqa: E402
from jax_reference import draw, expect_close, in_float64, jax, jnp, np  # noqa: E402

HEADS, HEADS_KV, DIM, DIM_V, ROWS = 4, 2, 32, 16, 4
LENGTHS = np.int32([7, 12, 3])
TABLE = np.int32([[5, 1, 0], [2, 7, 4], [6, 0, 0]])
SLOTS = np.int32([2, 0, 3])


def caches(kind, seed=0):
    """(k, v, options of the call)."""
    if kind == "pages":
        shape, more = (8, ROWS), {"page_table": TABLE}
    elif kind == "slots of a table":
        shape, more = (4, 3 * ROWS), {"page_table": SLOTS, "cache": True}
    else:
        shape, more = (3, 3 * ROWS), {"cache": True}
    k, v = draw(seed, (*shape, HEADS_KV, DIM), (*shape, HEADS_KV, DIM_V))
    return k, v, more


def keys_of(cache, kind):
    """[sequences, keys, heads, dim] as arrays."""
    if kind == "pages":
        return cache[TABLE].reshape(3, -1, *cache.shape[2:])
    return cache[SLOTS] if kind == "slots of a table" else cache


def without_keys_to_come(queries):
    lengths = jnp.asarray(LENGTHS)
    return lambda b, h, i, j: j <= lengths[b] - queries + i


KINDS = ["pages", "slots of a table", "slots in order"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_from_a_cache(kind, queries):
    k, v, more = caches(kind)
    (q,) = draw(1, (3, queries, HEADS, DIM))
    call = functools.partial(fj.attention, causal=True, kv_lengths=LENGTHS, return_lse=True, **more)

    def reference(q, k, v):
        mask = without_keys_to_come(queries)
        return in_jax(q, keys_of(k, kind), keys_of(v, kind), mask_mod=mask)

    want = in_float64(reference, q, k, v)
    expect_close(call(q, k, v), want)
    expect_close(jax.jit(call)(q, k, v), want)
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = call(*turned, layout="BHSD")
    expect_close((out.swapaxes(1, 2), lse.swapaxes(1, 2)), want)


def rotated(x, positions, interleaved):
    """x: [rows, heads, dim]."""
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : DIM // 2], x[..., DIM // 2 :])
    pair = left * cos - right * sin, left * sin + right * cos
    return np.stack(pair, -1).reshape(x.shape) if interleaved else np.concatenate(pair, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ["none", "theta", "tables", "positions"])
def test_append(kind, rope):
    k_cache, v_cache, more = caches(kind)
    more.pop("cache", None)
    new = 2
    k, v, q = draw(2, (3, new, HEADS_KV, DIM), (3, new, HEADS_KV, DIM_V), (3, new, HEADS, DIM))
    places = LENGTHS[:, None] - new + np.arange(new)
    turned = 2 * places if rope == "positions" else places
    given = {} if rope == "none" else {"interleaved": rope == "tables"}
    if rope == "tables":
        angles = np.arange(40)[:, None] * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
        given.update(cos=np.cos(angles).astype("float32"), sin=np.sin(angles).astype("float32"))
    elif rope != "none":
        given["theta"] = 10000.0
    if rope == "positions":
        given["positions"] = turned.astype("int32")
    append = jax.jit(functools.partial(fj.append, kv_lengths=LENGTHS, **more, **given), donate_argnums=(2, 3))
    before = [np.asarray(x) for x in (k_cache, v_cache)]
    got_k, got_v, got_q = append(k, v, k_cache.copy(), v_cache.copy(), q=q)
    turn = (lambda x, b: x) if rope == "none" else (lambda x, b: rotated(x, turned[b], rope == "tables"))
    want_k, want_v = (x.astype("float64") for x in before)
    for b in range(3):
        for i in range(new):
            n = places[b, i]
            row = (
                (TABLE[b, n // ROWS], n % ROWS)
                if kind == "pages"
                else (SLOTS[b] if "table" in kind else b, n)
            )
            want_k[row] = turn(np.asarray(k[b], np.float64), b)[i]
            want_v[row] = np.asarray(v[b, i])
    want_q = np.stack([turn(np.asarray(q[b], np.float64), b) for b in range(3)])
    expect_close((got_k, got_v, got_q), (want_k, want_v, want_q))
    # Without donation what is given stays as it is.
    fj.append(k, v, k_cache, v_cache, kv_lengths=LENGTHS, **more)
    np.testing.assert_array_equal(k_cache, before[0])


def test_decoding_is_attention_over_all_keys():
    """A loop of scan that appends a key and attends, in one compiled function with donated caches."""
    steps = 6
    q, k, v = draw(0, (2, steps, HEADS, DIM), (2, steps, HEADS_KV, DIM), (2, steps, HEADS_KV, DIM))
    table = jnp.asarray([[1, 3], [0, 2]], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def decode(k_pages, v_pages, q, k, v):
        def step(pages, now):
            n, q, k, v = now
            lengths = jnp.full(2, n + 1, jnp.int32)
            pages = fj.append(k[:, None], v[:, None], *pages, kv_lengths=lengths, page_table=table)
            return pages, fj.attention(q[:, None], *pages, causal=True, kv_lengths=lengths, page_table=table)[
                :, 0
            ]

        rows = (jnp.arange(steps), *[x.swapaxes(0, 1) for x in (q, k, v)])
        pages, outs = jax.lax.scan(step, (k_pages, v_pages), rows)
        return outs.swapaxes(0, 1), pages

    got, _ = decode(*[jnp.full((4, ROWS, HEADS_KV, DIM), jnp.nan) for _ in "kv"], q, k, v)
    expect_close(got, fj.attention(q, k, v, causal=True))


def test_vmap_is_a_loop():
    k, v, more = caches("pages")
    (q,) = draw(1, (2, 3, 2, HEADS, DIM))
    tables = jnp.stack([more["page_table"], more["page_table"][::-1]])
    call = lambda q, k, table: fj.attention(q, k, v, causal=True, kv_lengths=LENGTHS, page_table=table)
    for axes, each in (((0, None, 0), (k, k)), ((0, 0, None), (k, k[::-1]))):
        given_k = k if axes[1] is None else jnp.stack(each)
        given_table = tables if axes[2] == 0 else tables[0]
        got = jax.vmap(call, axes)(q, given_k, given_table)
        pick = lambda i: tables[i] if axes[2] == 0 else tables[0]
        expect_close(got, jnp.stack([call(q[i], each[i], pick(i)) for i in range(2)]))
    new_k, new_v = draw(3, (2, 3, 1, HEADS_KV, DIM), (2, 3, 1, HEADS_KV, DIM_V))
    append = lambda a, b: fj.append(a, b, k, v, kv_lengths=LENGTHS, page_table=TABLE)
    want = [append(*each) for each in zip(new_k, new_v)]
    expect_close(jax.vmap(append)(new_k, new_v), jax.tree.map(lambda *x: jnp.stack(x), *want))


def test_sharded_by_batch_and_heads():
    mesh = Mesh(np.array(jax.devices("cpu")[:2]).reshape(1, 2), ("x", "y"))
    k, v, more = caches("pages")
    (q,) = draw(1, (3, 1, HEADS, DIM))
    call = lambda q, k, v: fj.attention(q, k, v, causal=True, kv_lengths=LENGTHS, **more)
    heads = NamedSharding(mesh, P(None, None, "y"))
    compiled = jax.jit(call, in_shardings=[heads] * 3)
    expect_close(compiled(q, k, v), call(q, k, v))
    assert "all-gather(" not in compiled.lower(q, k, v).compile().as_text()


def test_gradients_are_refused():
    k, v, more = caches("pages")
    (q,) = draw(1, (3, 1, HEADS, DIM))
    with pytest.raises(flashjit.Unsupported, match="attention from a cache has no derivatives"):
        jax.grad(lambda q: fj.attention(q, k, v, kv_lengths=LENGTHS, **more).sum())(q)
    new = draw(1, (3, 1, HEADS_KV, DIM), (3, 1, HEADS_KV, DIM_V))
    with pytest.raises(flashjit.Unsupported, match="flashjit.jax.append has no derivatives"):
        jax.grad(lambda k: fj.append(k, new[1], *caches("pages")[:2], kv_lengths=LENGTHS, **more)[0].sum())(
            new[0]
        )


WRONG = {
    "kv_lengths is missing": {"kv_lengths": None},
    r"page_table is int32 \[2, 3\]: it must be int32 \[3, pages": {"page_table": TABLE[:2]},
    r"page_table is int32 \[3, 3\]: it must be int32 \[3\], the slot": {"cache": True},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    k, v, more = caches("pages")
    (q,) = draw(1, (3, 1, HEADS, DIM))
    with pytest.raises(flashjit.InvalidArgument, match=message):
        fj.attention(q, k, v, **{**more, "kv_lengths": LENGTHS, **WRONG[message]})


WRONG_APPENDS = {
    "kv_lengths is missing": {"kv_lengths": None},
    "cos is given alone": {"cos": np.ones((4, 16), "float32")},
    r"q is \[3, 1, 4, 24\]": {"q": np.ones((3, 1, 4, 24), "float32")},
    r"sin is float32 \[4, 20\]: it must be float32": {
        "cos": np.ones((4, 8), "float32"),
        "sin": np.ones((4, 20), "float32"),
    },
}


@pytest.mark.parametrize("message", WRONG_APPENDS)
def test_errors_of_append(message):
    k, v, more = caches("pages")
    new = draw(1, (3, 1, HEADS_KV, DIM), (3, 1, HEADS_KV, DIM_V))
    with pytest.raises(flashjit.InvalidArgument, match=message):
        fj.append(*new, k, v, **{**more, "kv_lengths": LENGTHS, **WRONG_APPENDS[message]})

"""flashjit.jax.attention against float64, under JAX's transformations; on a GPU where JAX finds one."""

import functools
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest

pytest.importorskip("jax_reference")
import child  # noqa: E402
import flashjit  # noqa: E402
import flashjit.jax as fj  # noqa: E402
import jax.export  # noqa: E402
from flashjit.jax import _handler  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_reference import attention as in_jax  # noqa: E402
from jax_reference import draw, expect_close, in_float64, jax, jnp, loss_of, np, problem  # noqa: E402

SLOPES = [0.5, 0.25, 0.125, 0.0625]


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx + 2


def alibi(slopes):
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


@pytest.mark.parametrize("version, fits", [("0 99", True), ("0 0", False), ("1 99", False)])
def test_a_handler_that_jaxlib_does_not_take_is_refused(version, fits, tmp_path, monkeypatch):
    """Refused before XLA sees it: XLA would refuse the handler only when JAX first uses a platform, and leave that unusable."""
    names = ("#define XLA_FFI_API_MAJOR", "#define XLA_FFI_API_MINOR")
    header = tmp_path / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("\n".join(" ".join(line) for line in zip(names, version.split())))
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    if fits:
        return _handler._refuse_newer_ffi((0, 3))
    takes = version.replace(" ", "[.]")
    with pytest.raises(
        flashjit.NoDriver, match=f"built for XLA's FFI 0[.].*jaxlib .* has {takes}, .*install a newer JAX"
    ):
        _handler.register.__wrapped__()


# --- one call ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_both_passes(dtype, heads_kv):
    q, k, v = problem(heads_kv=heads_kv, dim_v=32, dtype=dtype)
    attend = lambda q, k, v: fj.attention(q, k, v, causal=True, return_lse=True)
    reference = lambda q, k, v: in_jax(q, k, v, mask_mod=causal)
    expect_close(attend(q, k, v), in_float64(reference, q, k, v), dtype)
    got = jax.grad(loss_of(attend), (0, 1, 2))(q, k, v)
    assert [x.dtype for x in got] == [dtype] * 3
    expect_close(got, in_float64(jax.grad(loss_of(reference), (0, 1, 2)), q, k, v))


def test_gradients_of_captures_and_sinks_in_a_loop():
    """XLA writes results of a loop's calls into slices of what the loop returns, wherever that began."""
    q, k, v = problem()
    slopes = jnp.array([SLOPES, SLOPES[::-1], SLOPES[1:] + SLOPES[:1]])
    sinks = jnp.array([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, -1.0, 0.5], [0.0] * 4])

    def layer(slopes, sinks):
        return lambda q, k, v: fj.attention(q, k, v, score_mod=alibi(slopes), sinks=sinks, return_lse=True)

    def loss_of_layer(slopes, sinks):
        return loss_of(layer(slopes, sinks))(q, k, v)

    grads = jax.grad(loss_of_layer, (0, 1))
    got = jax.jit(lambda *given: jax.lax.map(lambda x: grads(*x), given))(slopes, sinks)
    want = [grads(*each) for each in zip(slopes, sinks)]
    expect_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


def test_layout_bhsd_is_the_same():
    q, k, v = problem()
    want = fj.attention(q, k, v, causal=True, return_lse=True)
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = fj.attention(*turned, causal=True, layout="BHSD", return_lse=True)
    np.testing.assert_array_equal(out.swapaxes(1, 2), want[0])
    np.testing.assert_array_equal(lse.swapaxes(1, 2), want[1])
    loss = loss_of(functools.partial(fj.attention, causal=True, layout="BHSD", return_lse=True))
    got = jax.grad(loss, (0, 1, 2))(*turned)
    weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape).swapaxes(1, 2)

    def reference(q, k, v):
        out, lse = fj.attention(q, k, v, causal=True, return_lse=True)
        return (out * weights).sum() + (lse * lse).sum()

    want = jax.grad(reference, (0, 1, 2))(q, k, v)
    expect_close([x.swapaxes(1, 2) for x in got], want)


def test_without_a_batch():
    q, k, v = problem(batch=1)
    out, lse = fj.attention(q, k, v, return_lse=True)
    alone = fj.attention(q[0], k[0], v[0], return_lse=True)
    np.testing.assert_array_equal(alone[0], out[0])
    np.testing.assert_array_equal(alone[1], lse[0])


OPTIONS = {
    "top left": (dict(causal="top_left"), dict(mask_mod=lambda b, h, i, j: j <= i)),
    "window": (
        dict(window=(np.int64(2), 1)),
        dict(mask_mod=lambda b, h, i, j: (j >= i + 2 - 2) & (j <= i + 2 + 1)),
    ),
    "causal window": (
        dict(window=1, causal="top_left"),
        dict(mask_mod=lambda b, h, i, j: (j >= i - 1) & (j <= i)),
    ),
    "softcap": (dict(softcap=2.0), dict(softcap=2.0)),
    "scale": (dict(scale=0.7), dict(scale=0.7)),
    "no key": (dict(causal=True), dict(mask_mod=lambda b, h, i, j: j <= i - 3)),
    "lengths": (dict(kv_lengths=np.int32([3, 7])), dict(kv_lengths=np.int32([3, 7]))),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    given, meant = OPTIONS[name]
    q, k, v = problem(seqlen_kv=2 if name == "no key" else 7)
    attend = lambda q, k, v: fj.attention(q, k, v, return_lse=True, **given)
    reference = lambda q, k, v: in_jax(q, k, v, **meant)
    expect_close(attend(q, k, v), in_float64(reference, q, k, v))
    expect_close(
        jax.jit(jax.grad(loss_of(attend), (0, 1, 2)))(q, k, v),
        in_float64(jax.grad(loss_of(reference), (0, 1, 2)), q, k, v),
    )


@pytest.mark.slow
def test_gradients_of_sinks_bias_and_captures():
    q, k, v = problem()
    slopes, sinks, bias, gate = draw(1, (4,), (4,), (2, 1, 5, 7), (2, 4, 5))

    def attend(attention, q, k, v, slopes, sinks, bias, gate, **more):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * jnp.exp(gate)[b, h, q_idx] + slopes[h] * (kv_idx - q_idx)

        return attention(q, k, v, score_mod=score_mod, sinks=sinks, bias=bias, **more)

    arrays = (q, k, v, slopes, sinks, bias, gate)
    ours = functools.partial(attend, fj.attention, return_lse=True)
    reference = functools.partial(attend, in_jax)
    expect_close(ours(*arrays), in_float64(reference, *arrays))
    got = jax.jit(jax.grad(loss_of(ours), range(7)))(*arrays)
    expect_close(got, in_float64(jax.grad(loss_of(reference), range(7)), *arrays))


def test_only_gradients_that_are_asked_for_are_computed():
    q, k, v = problem()
    slopes = jnp.asarray(SLOPES)
    loss = lambda q, slopes: fj.attention(q, k, v, score_mod=alibi(slopes)).sum()
    both = str(jax.jit(jax.grad(loss, (0, 1))).lower(q, slopes).as_text())
    one = str(jax.jit(jax.grad(loss, 0)).lower(q, slopes).as_text())
    assert "1d grad" in both and "1d grad" not in one


def test_segments():
    q, k, v = problem(seqlen_q=7)
    ids = jnp.asarray([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]], jnp.int32)
    attend = lambda ids, q, k, v: fj.attention(q, k, v, segment_ids=ids, causal=True, return_lse=True)
    mask = lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (j <= i)
    want = in_float64(lambda q, k, v: in_jax(q, k, v, mask_mod=mask), q, k, v)
    expect_close(attend(ids, q, k, v), want)
    expect_close(jax.jit(attend)((ids, ids), q, k, v), want)


def test_captures_of_small_types():
    q, k, v = problem()
    table = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (4, 7)), jnp.int8)
    half = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7)), jnp.bfloat16)
    seen = jnp.asarray(np.random.default_rng(2).integers(0, 2, (5, 7)), bool)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, kv_idx] * half[b, kv_idx].astype(score.dtype)

    mask_mod = lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx] | (kv_idx == 0)
    got = jax.grad(
        lambda half: fj.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j] * half[b, j], mask_mod=mask_mod
        ).sum()
    )(half)
    assert got.dtype == "bfloat16" and float(jnp.abs(got).max()) > 0
    expect_close(
        fj.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod),
        in_float64(lambda q, k, v: in_jax(q, k, v, score_mod=score_mod, mask_mod=mask_mod)[0], q, k, v),
    )


def test_empty_sizes():
    for sizes in (dict(batch=0), dict(seqlen_q=0), dict(seqlen_kv=0)):
        q, k, v = problem(**sizes)
        out, lse = fj.attention(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        np.testing.assert_array_equal(out, np.zeros(q.shape))
        grads = jax.grad(lambda *a: fj.attention(*a).sum(), (0, 1, 2))(q, k, v)
        for x in grads:
            np.testing.assert_array_equal(x, np.zeros(x.shape))


def test_dropout():
    q, k, v = problem(seqlen_q=64, seqlen_kv=64, batch=1)
    ones = jnp.ones_like(v)
    attend = lambda v, key: fj.attention(q, k, v, dropout_p=0.25, dropout_key=key)
    first, again, other = (attend(ones, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert abs(float(first.mean()) - 1) < 0.05 and float(first.std()) > 0.01
    # O is linear in V, so its gradient says the same as the forward pass where the masks agree.
    out, pull = jax.vjp(lambda v: attend(v, jax.random.key(0)), v)
    (dv,) = pull(jnp.ones_like(out))
    np.testing.assert_allclose((dv * v).sum(), out.sum(), rtol=1e-3)


# --- transformations ---------------------------------------------------------------------------------------------------


def test_jit_compiles_once_for_many_layers():
    q, k, v = problem()

    @jax.jit
    def layers(q, k, v):
        for _ in range(4):
            q = fj.attention(q, k, v, score_mod=alibi(jnp.asarray(SLOPES)))
        return q

    text = layers.lower(q, k, v).as_text()
    specs = set(re.findall(r'spec = "([^"]*)"', text))
    assert len(specs) == 1
    got = layers(q, k, v)
    want = q
    for _ in range(4):
        want = fj.attention(want, k, v, score_mod=alibi(jnp.asarray(SLOPES)))
    expect_close(got, want)


def test_scan_and_checkpoint():
    q, k, v = problem(seqlen_q=7, heads=2, heads_kv=2)

    def block(x, w):
        return x + fj.attention(x * w, k, v, causal=True), None

    def loss(attend, q, weights):
        return (jax.lax.scan(attend, q, weights)[0] ** 2).sum()

    weights = jnp.asarray([0.5, 1.0, 2.0])
    want = jax.grad(functools.partial(loss, block), (0, 1))(q, weights)
    for attend in (
        jax.checkpoint(block),
        jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable),
    ):
        expect_close(jax.jit(jax.grad(functools.partial(loss, attend), (0, 1)))(q, weights), want)


@pytest.mark.slow
def test_vmap_is_a_loop():
    """All operands are mapped, or some; nested, and with programs that read b."""
    q, k, v, slopes, gate = draw(0, (3, 2, 5, 4, 16), (3, 2, 7, 2, 16), (3, 2, 7, 2, 16), (3, 4), (3, 2, 7))
    lengths = jnp.asarray([[3, 7], [1, 2], [7, 5]], jnp.int32)

    def attend(q, k, v, slopes, gate, lengths):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx) + gate[b, kv_idx] + 0.1 * b

        return fj.attention(
            q, k, v, score_mod=score_mod, kv_lengths=lengths, causal="top_left", return_lse=True
        )

    def check(function, axes, *arrays):
        got = jax.vmap(function, axes)(*arrays)
        pick = lambda x, axis, i: x if axis is None else jnp.take(x, i, axis)
        each = [function(*[pick(x, axis, i) for x, axis in zip(arrays, axes)]) for i in range(3)]
        expect_close(got, jax.tree.map(lambda *x: jnp.stack(x), *each))

    arrays = (q, k, v, slopes, gate, lengths)
    everything, some = (0,) * 6, (0, None, None, None, None, None)
    others = (None, 0, None, None, 0, None)
    for function in (attend, jax.grad(loss_of(attend), (0, 1, 2, 3, 4))):
        check(function, everything, *arrays)
        check(function, some, q, *[x[0] for x in arrays[1:]])
        check(function, others, q[0], k, v[0], slopes[0], gate, lengths[0])
    # Mapped axes elsewhere than in front.
    check(attend, (1, 2, 3, 1, 2, 1), *[jnp.moveaxis(x, 0, d) for x, d in zip(arrays, (1, 2, 3, 1, 2, 1))])


@pytest.mark.slow
def test_gradient_of_vmap_and_nested_vmap():
    q, k, v, slopes, sinks = draw(0, (2, 3, 5, 4, 16), (2, 3, 7, 2, 16), (2, 3, 7, 2, 16), (2, 4), (4,))

    def one(q, k, v, slopes, sinks):
        return fj.attention(q, k, v, score_mod=alibi(slopes), sinks=sinks, return_lse=True)

    def mapped(q, k, v, slopes, sinks):
        inner = jax.vmap(one, (0, 0, 0, None, None))
        return jax.vmap(inner, (0, 0, 0, 0, None))(q, k, v, slopes, sinks)

    def looped(q, k, v, slopes, sinks):
        rows = [[one(q[i, j], k[i, j], v[i, j], slopes[i], sinks) for j in range(3)] for i in range(2)]
        stack = lambda x: jax.tree.map(lambda *y: jnp.stack(y), *x)
        return stack([stack(row) for row in rows])

    arrays = (q, k, v, slopes, sinks)
    expect_close(mapped(*arrays), looped(*arrays))
    got = jax.jit(jax.grad(loss_of(mapped), range(5)))(*arrays)
    expect_close(got, jax.grad(loss_of(looped), range(5))(*arrays))


def test_vmap_of_sinks_and_of_dropout_is_a_loop():
    q, k, v, sinks = draw(0, (3, 2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16), (3, 4))
    keys = jax.random.split(jax.random.key(0), 3)

    def attend(q, sinks, key):
        return fj.attention(q, k, v, sinks=sinks, dropout_p=0.3, dropout_key=key)

    got = jax.vmap(attend)(q, sinks, keys)
    expect_close(got, jnp.stack([attend(*each) for each in zip(q, sinks, keys)]))
    grad = jax.grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1))
    expect_close(
        jax.vmap(grad)(q, sinks, keys),
        jax.tree.map(lambda *x: jnp.stack(x), *[grad(*each) for each in zip(q, sinks, keys)]),
    )


def test_donated_buffers_and_ahead_of_time():
    q, k, v = problem(heads_kv=4, seqlen_q=7)
    want = fj.attention(q, k, v)
    compiled = jax.jit(lambda q, k, v: fj.attention(q, k, v), donate_argnums=0).lower(q, k, v).compile()
    expect_close(compiled(q.copy(), k, v), want)
    expect_close(compiled(q.copy(), k, v), want)


def test_export_is_right_where_jax_is_told_to_allow_it():
    q, k, v = problem()
    exported = jax.export.export(
        jax.jit(fj.attention),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("flashjit_forward")],
        platforms=("cpu",),
    )(q, k, v)
    if jax.default_backend() == "cpu":
        expect_close(exported.call(q, k, v), fj.attention(q, k, v))
    with pytest.raises(ValueError, match="flashjit_forward"):
        jax.export.export(jax.jit(fj.attention), platforms=("cpu",))(q, k, v)


def test_with_64_bit_types():
    q, k, v = problem()
    with jax.enable_x64(True):
        ids = jnp.asarray([[0, 0, 1, 1, 1, 2, 2]] * 2, jnp.int64) << 40
        score_mod = lambda score, b, h, q_idx, kv_idx: score + 0.1 * (kv_idx - q_idx)
        mask_mod = lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]
        out = jax.jit(lambda q, k, v: fj.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod))(q, k, v)
        assert out.dtype == "float32"
        with pytest.raises(flashjit.WrongType, match="q is float64 .*computes in float16, bfloat16, float32"):
            fj.attention(*[x.astype("float64") for x in (q, k, v)])
        with pytest.raises(flashjit.WrongType, match="score_mod|a program has a value of float64"):
            fj.attention(q, k, v, score_mod=lambda s, b, h, i, j: s.astype("float64") * 2)
    reference = lambda q, k, v: in_jax(q, k, v, score_mod=score_mod, mask_mod=mask_mod)[0]
    ids = np.asarray([[0, 0, 1, 1, 1, 2, 2]] * 2)
    mask_mod = lambda b, h, q_idx, kv_idx: jnp.asarray(ids)[b, q_idx] == jnp.asarray(ids)[b, kv_idx]
    expect_close(out, in_float64(reference, q, k, v))


# --- several devices ---------------------------------------------------------------------------------------------------


def mesh_of(kind, x, y):
    devices = jax.devices("cpu") if kind == "cpu" else [d for d in jax.devices() if d.platform == "gpu"]
    if len(devices) < x * y:
        pytest.skip(f"there are {len(devices)} devices of {x * y}")
    return Mesh(np.array(devices[: x * y]).reshape(x, y), ("x", "y"))


def on_devices(heads_kv, seed=0):
    q, k, v = problem(seed, heads_kv=heads_kv)
    slopes, sinks, bias = draw(seed + 1, (4,), (4,), (2, 1, 5, 7))
    return q, k, v, slopes, sinks, bias


SEGMENTS = np.int32([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])


def divided(q, k, v, slopes, sinks, bias):
    ids = jnp.asarray(SEGMENTS)
    return fj.attention(
        q,
        k,
        v,
        causal=True,
        score_mod=alibi(slopes),
        sinks=sinks,
        bias=bias,
        segment_ids=(ids[:, :5], ids),
        return_lse=True,
    )


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_sharded_by_batch_and_heads_by_xla(kind, heads_kv):
    mesh = mesh_of(kind, 2, 2)
    arrays = on_devices(heads_kv)
    gradient = jax.grad(loss_of(divided), range(6))
    want = gradient(*arrays)
    of_kv = P("x", None, "y" if heads_kv > 1 else None)
    specs = (P("x", None, "y"), of_kv, of_kv, P("y"), P(), P("x"))
    compiled = jax.jit(gradient, in_shardings=[NamedSharding(mesh, spec) for spec in specs])
    expect_close(compiled(*arrays), want)
    text = compiled.lower(*arrays).compile().as_text()
    assert "all-gather(" not in text
    assert re.search(r"f32\[1,5,2,16\]\S* .*custom_call_target=\"flashjit_forward\"", text)


@pytest.mark.parametrize(
    "spec", [P(None, "x"), P(None, None, None, "x"), P("y", "x"), P(None, None, ("x", "y"))]
)
def test_other_shardings_are_right(spec):
    """Lengths and head_dim are sharded, which each device gets as a whole, and into more parts than K has heads."""
    mesh = mesh_of("cpu", 2, 2)
    arrays = problem(seqlen_q=6, heads_kv=2)
    attend = lambda q, k, v: fj.attention(q, k, v, causal=True, return_lse=True)
    gradient = jax.grad(loss_of(attend), (0, 1, 2))
    want = gradient(*arrays)
    shardings = [NamedSharding(mesh, spec), NamedSharding(mesh, P()), NamedSharding(mesh, P())]
    expect_close(jax.jit(gradient, in_shardings=shardings)(*arrays), want)


@pytest.mark.slow
def test_sharding_leaves_what_programs_say_of_b_and_h():
    mesh = mesh_of("cpu", 2, 2)
    q, k, v = problem(heads_kv=4, batch=4)
    key = jax.random.key(0)

    def with_positions(q, k, v):
        score_mod = lambda score, b, h, q_idx, kv_idx: score * (1 + h) + b * kv_idx
        return fj.attention(q, k, v, score_mod=score_mod, return_lse=True)

    def with_dropout(q, k, v):
        return fj.attention(q, k, v, dropout_p=0.5, dropout_key=key, return_lse=True)

    def with_vmap(q, k, v):
        score_mod = lambda score, b, h, q_idx, kv_idx: score + b * kv_idx
        attend = lambda q, k, v: fj.attention(q, k, v, score_mod=score_mod, return_lse=True)
        return jax.vmap(attend)(*[x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)])

    sharding = NamedSharding(mesh, P("x", None, "y"))
    for attend in (with_positions, with_dropout, with_vmap):
        gradient = jax.grad(loss_of(attend), (0, 1, 2))
        expect_close(jax.jit(gradient, in_shardings=[sharding] * 3)(q, k, v), gradient(q, k, v))


@pytest.mark.xfail(
    tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11),
    reason="XLA refuses the sums of gradients that JAX 0.11 makes for explicit axes",
    strict=True,
)
def test_shardings_as_types():
    """On a mesh whose axes are explicit O has the sharding of Q."""
    devices = mesh_of("cpu", 2, 2).devices
    mesh = Mesh(devices, ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    arrays = on_devices(heads_kv=2)
    with jax.set_mesh(mesh):
        specs = (P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P(), P(), P("x"))
        placed = [jax.device_put(x, spec) for x, spec in zip(arrays, specs)]
        out, lse = jax.jit(divided)(*placed)
        assert out.sharding.spec == P("x", None, "y", None) and lse.sharding.spec == P("x", None, "y")
        got = jax.jit(jax.grad(lambda *a: (divided(*a)[0] ** 2).sum(), range(6)))(*placed)
    expect_close(out, divided(*arrays)[0])
    expect_close(got, jax.grad(lambda *a: (divided(*a)[0] ** 2).sum(), range(6))(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("checked", [True, False])
def test_shard_map(kind, checked):
    mesh = mesh_of(kind, 2, 2)
    q, k, v = problem(heads_kv=4)
    (slopes,) = draw(1, (4,))
    spec = P("x", None, "y")

    def attend(q, k, v, slopes):
        return fj.attention(q, k, v, score_mod=alibi(slopes), causal=True, return_lse=True)

    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(spec, spec, spec, P("y")), out_specs=(spec, spec), check_vma=checked
    )
    gradient = jax.grad(loss_of(attend), range(4))
    want = gradient(q, k, v, slopes)
    expect_close(jax.jit(jax.grad(loss_of(mapped), range(4)))(q, k, v, slopes), want)
    if checked:  # without, JAX cannot differentiate it outside of jit
        expect_close(jax.grad(loss_of(mapped), range(4))(q, k, v, slopes), want)


def test_each_device_of_a_process():
    q, k, v = problem()
    want = np.asarray(fj.attention(q, k, v))
    for device in jax.devices():
        out = fj.attention(*[jax.device_put(x, device) for x in (q, k, v)])
        assert out.devices() == {device}
        expect_close(out, want)


# --- errors ------------------------------------------------------------------------------------------------------------

WRONG = {
    "q is int32": lambda q, k, v: fj.attention(q.astype("int32"), k, v),
    "q is float32 and k is float16": lambda q, k, v: fj.attention(q, k.astype("float16"), v),
    "four dimensions BTNH": lambda q, k, v: fj.attention(q[0], k, v),
    "layout is 'BNTH': give": lambda q, k, v: fj.attention(q, k, v, layout="BNTH"),
    "batches must be equal": lambda q, k, v: fj.attention(q[:1], k, v),
    "q has 3 heads and k has 2": lambda q, k, v: fj.attention(q[:, :, :3], k, v),
    "head_dim is 12; it must be a multiple of 8": lambda q, k, v: fj.attention(q[..., :12], k[..., :12], v),
    "scale is -1": lambda q, k, v: fj.attention(q, k, v, scale=-1),
    "softcap is 0": lambda q, k, v: fj.attention(q, k, v, softcap=0),
    "scale is 1e-300.*float32 holds": lambda q, k, v: fj.attention(q, k, v, scale=1e-300),
    "softcap is inf": lambda q, k, v: fj.attention(q, k, v, softcap=float("inf")),
    "window is .1, True.: give": lambda q, k, v: fj.attention(q, k, v, window=(1, True)),
    "causal is 3": lambda q, k, v: fj.attention(q, k, v, causal=3),
    "window is -1: give": lambda q, k, v: fj.attention(q, k, v, window=-1),
    r"bias is float32 \[4, 5, 7\]": lambda q, k, v: fj.attention(q, k, v, bias=jnp.ones((4, 5, 7))),
    r"sinks is float32 \[3\]: it must be float32 \[4\]": lambda q, k, v: fj.attention(
        q, k, v, sinks=jnp.ones(3)
    ),
    r"kv_lengths is float32 \[2\]": lambda q, k, v: fj.attention(q, k, v, kv_lengths=jnp.ones(2)),
    r"segment_ids of queries is int32 \[2, 7\]: it must be int32 \[2 or 1, 5\]": lambda q, k, v: fj.attention(
        q, k, v, segment_ids=jnp.asarray(SEGMENTS)
    ),
    "causal with kv_lengths has two meanings for 5 queries": lambda q, k, v: fj.attention(
        q, k, v, causal=True, kv_lengths=np.int32([1, 2])
    ),
    "dropout_p is 1": lambda q, k, v: fj.attention(q, k, v, dropout_p=1),
    "dropout_key is missing": lambda q, k, v: fj.attention(q, k, v, dropout_p=0.1),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_errors(message, wrap):
    with pytest.raises(flashjit.InvalidArgument, match=message):
        wrap(WRONG[message])(*problem())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed):
    print("seed", seed)
    rng = random.Random(seed)
    heads_kv = rng.choice([1, 2, 3])
    sizes = dict(
        batch=rng.choice([1, 2, 3]),
        heads=heads_kv * rng.choice([1, 2]),
        heads_kv=heads_kv,
        seqlen_q=rng.randint(1, 40),
        seqlen_kv=rng.randint(1, 40),
        dim=8 * rng.randint(1, 8),
        dim_v=8 * rng.randint(1, 8),
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
    )
    q, k, v = problem(seed, **sizes)
    table, sinks, bias = draw(
        seed,
        (sizes["heads"], 9),
        (sizes["heads"],),
        tuple(
            rng.choice([1, n])
            for n in (sizes["batch"], sizes["heads"], sizes["seqlen_q"], sizes["seqlen_kv"])
        ),
    )
    parts = {name: rng.random() < 0.5 for name in ("score", "mask", "sinks", "bias", "softcap")}

    def attend(attention, q, k, v, table, sinks, bias, **more):
        more.update({"sinks": sinks} if parts["sinks"] else {})
        more.update({"bias": bias} if parts["bias"] else {})
        more.update({"softcap": 3.0} if parts["softcap"] else {})
        if parts["score"]:
            more["score_mod"] = lambda s, b, h, i, j: s + table[h, jnp.clip(j - i, -4, 4) + 4]
        if parts["mask"]:
            more["mask_mod"] = lambda b, h, i, j: (i // 4 >= j // 4) | (j % 3 == b)
        return attention(q, k, v, **more)

    arrays = (q, k, v, table, sinks, bias)
    ours = functools.partial(attend, fj.attention, return_lse=True)
    reference = functools.partial(attend, in_jax)
    expect_close(ours(*arrays), in_float64(reference, *arrays), sizes["dtype"])
    got = jax.jit(jax.grad(loss_of(ours), range(6)))(*arrays)
    want = in_float64(jax.grad(loss_of(reference), range(6)), *arrays)
    expect_close(got, want, sizes["dtype"])


LOWERED = """
import types
from unittest import mock

import flashjit.jax as fj
import jax
import jax.numpy as jnp

q = jnp.ones((2, 64, 4, 64), jnp.bfloat16)
slopes = jnp.ones(4)


def loss(q, slopes):
    alibi = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
    return fj.attention(q, q, q, causal=True, score_mod=alibi).astype(jnp.float32).sum()


traced = jax.jit(jax.grad(loss, (0, 1))).trace(q, slopes)
try:
    traced.lower(lowering_platforms=("cuda",))
except Exception as error:
    print(type(error).__name__, error)
gpu = types.SimpleNamespace(device_kind="a GPU", local_hardware_id=0)
with mock.patch.object(jax, "local_devices", lambda backend: [gpu]):
    print(traced.lower(lowering_platforms=("cuda",)).as_text())
"""


def test_lowering_for_a_gpu():
    """Over the fake driver: with a workspace as a result, and gradients that are added to zeros."""
    fakes = pathlib.Path(
        os.environ.get("FLASHJIT_FAKES", pathlib.Path(__file__).parents[2] / "build" / "tests")
    )
    if not (fakes / "libflashjit_fake_cuda.so").exists():
        pytest.skip("the fake driver is not built: build the target flashjit_unit_tests")
    given = child.environment(FLASHJIT_LIBCUDA=fakes / "libflashjit_fake_cuda.so", JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", LOWERED], capture_output=True, text=True, env=given, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(
        "Unsupported flashjit.jax makes calls for the GPU of this process, and JAX finds none"
    )
    assert re.search(r'args = "q k v c0", .*results = "out lse workspace"', done.stdout)
    backward = next(line for line in done.stdout.splitlines() if "@flashjit_backward" in line)
    assert 'results = "dq dk dv dc0 workspace"' in backward and "fp32 1d grad" in backward
    assert "operand_index" not in backward  # the handler clears what gradients are added to
    assert int(re.search(r"tensor<([0-9]+)xui8>\)$", backward)[1]) > 256

"""forward() and backward() on arrays: NumPy's through the CPU reference, and what is refused."""

import math

import flashjit
import numpy as np
import pytest
from flashjit import _arrays


def arrays(batch=2, heads=4, heads_kv=2, queries=9, keys=13, dim=16, dim_v=8, dtype=np.float32):
    random = np.random.default_rng(0)
    shapes = [
        (batch, heads, queries, dim),
        (batch, heads_kv, keys, dim),
        (batch, heads_kv, keys, dim_v),
        (batch, heads, queries, dim_v),
    ]
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def expected(q, k, v, dout=None, keep=None, scale=None, sinks=None):
    """Attention in float64; keep: boolean, broadcastable to the scores."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = scale or q.shape[3] ** -0.5
    scores = scale * q @ k.swapaxes(2, 3)
    if keep is not None:
        scores = np.where(keep, scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.max(scores, 3, keepdims=True, initial=-np.inf)
        if sinks is not None:
            most = np.maximum(most, sinks[None, :, None, None])
        most = np.where(np.isfinite(most), most, 0)
        weights = np.exp(scores - most)
        total = weights.sum(3, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[None, :, None, None] - most)
        lse = (np.log(total) + most)[..., 0]
        p = np.nan_to_num(weights / total)
    out = p @ v
    if dout is None:
        return out, lse
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (dout * out).sum(3, keepdims=True))
    fold = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
    return out, lse, scale * ds @ k, fold(scale * ds.swapaxes(2, 3) @ q), fold(p.swapaxes(2, 3) @ dout)


def causal(queries, keys):
    return np.tril(np.ones((queries, keys), bool), keys - queries)


def test_forward_and_backward_of_numpy_arrays():
    q, k, v, dout = arrays()
    out, lse = flashjit.forward(q, k, v, options="causal")
    grads = flashjit.backward(q, k, v, out, lse, dout, options="causal")
    for got, want in zip((out, lse, *grads), expected(q, k, v, dout, causal(9, 13))):
        assert got.dtype == np.float32 and got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_half_precision_and_strides():
    q, k, v, _ = arrays(dtype=np.float16)
    q = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)  # [batch, length, heads, dim] in memory
    out, _ = flashjit.forward(q, k, v, scale=0.5)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, expected(q, k, v, scale=0.5)[0], atol=2e-3)


def test_key_padding_block_map_and_given_outputs():
    q, k, v, _ = arrays(queries=32, keys=32)
    lengths = np.array([32, 5], np.int32)
    blocks = np.array([[1, 0], [1, 1]], np.uint8)[None, None]
    out, lse = np.full((2, 4, 32, 8), np.nan, np.float32), np.full((2, 4, 32), np.nan, np.float32)
    results = flashjit.forward(
        q, k, v, options="map16", block_map=blocks, kv_lengths=lengths, out=out, lse=lse
    )
    assert results[0] is out and results[1] is lse
    keep = np.kron(blocks[0, 0], np.ones((16, 16))).astype(bool) & (
        np.arange(32) < lengths[:, None, None, None]
    )
    want = expected(q, k, v, keep=keep)
    np.testing.assert_allclose(out, want[0], atol=1e-6)
    np.testing.assert_allclose(lse, want[1], atol=1e-6)


def test_packed_sequences():
    q, k, v, dout = arrays(batch=1, queries=9, keys=13)
    cu_q, cu_kv = np.array([0, 2, 2, 9], np.int32), np.array([0, 4, 9, 13], np.int32)
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=7, max_seqlen_kv=5)
    out, lse = flashjit.forward(q, k, v, lse=np.full((1, 4, 9), 7.0, np.float32), **options)
    grads = flashjit.backward(q, k, v, out, lse, dout, **options)
    for i in range(3):
        rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_kv[i : i + 2])
        want = expected(q[:, :, rows], k[:, :, keys], v[:, :, keys], dout[:, :, rows])
        got = (
            out[:, :, rows],
            lse[:, :, rows],
            grads[0][:, :, rows],
            grads[1][:, :, keys],
            grads[2][:, :, keys],
        )
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, atol=1e-6)


def test_sinks():
    q, k, v, dout = arrays()
    sinks = np.linspace(-1, 2, 4).astype(np.float32)
    out, lse = flashjit.forward(q, k, v, sinks=sinks)
    want_out, want_lse = expected(q, k, v, sinks=sinks)
    np.testing.assert_allclose(out, want_out, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)
    dsinks = np.zeros(4, np.float32)
    flashjit.backward(q, k, v, out, lse, dout, sinks=sinks, dsinks=dsinks)
    d = (dout * want_out).sum(3)
    np.testing.assert_allclose(dsinks, -(np.exp(sinks[None, :, None] - want_lse) * d).sum((0, 2)), atol=1e-5)


def test_the_gradient_of_lse():
    q, k, v, dout = arrays()
    out, lse = flashjit.forward(q, k, v)
    dlse = np.random.default_rng(1).standard_normal(lse.shape).astype(np.float32)
    both = flashjit.backward(q, k, v, out, lse, dout, dlse=dlse)
    zero = flashjit.backward(q, k, v, out, lse, 0 * dout, dlse=dlse)
    without = flashjit.backward(q, k, v, out, lse, dout)
    for a, b, c in zip(both, zero, without):  # the gradients are linear in dO and dLSE
        np.testing.assert_allclose(a, b + c, atol=1e-5)
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    keys = np.repeat(k, group, 1)
    p = np.exp(scale * q @ keys.swapaxes(2, 3) - lse[..., None])
    np.testing.assert_allclose(zero[0], scale * dlse[..., None] * (p @ keys), atol=1e-5)
    assert (zero[2] == 0).all()
    with pytest.raises(flashjit.InvalidArgument, match="dlse has shape"):
        flashjit.backward(q, k, v, out, lse, dout, dlse=dlse[:, :1])
    with pytest.raises(flashjit.WrongType, match="dlse is fp16: it must be fp32"):
        flashjit.backward(q, k, v, out, lse, dout, dlse=dlse.astype(np.float16))


def test_rows_that_belong_to_no_sequence_are_zeros():
    q, k, v, dout = (x[:1] for x in arrays())
    offsets = np.array([0, 3, 7], np.int32)
    named = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=5, max_seqlen_kv=5)
    for x in (q, k, v, dout):
        x[:, :, 7:] = np.nan
    out, lse = flashjit.forward(q, k, v, out=np.full((*q.shape[:3], v.shape[3]), 7, np.float32), **named)
    grads = flashjit.backward(q, k, v, out, lse, dout, **named)
    assert lse.shape == q.shape[:3] and (lse[:, :, 7:] == -np.inf).all() and np.isfinite(lse[:, :, :7]).all()
    for x in (out, *grads):
        assert (x[:, :, 7:] == 0).all() and np.isfinite(x).all() and (x[:, :, :7] != 0).any()


def test_dropout_is_a_function_of_seed_and_offset():
    q, k, v, _ = arrays()
    run = lambda **seed: flashjit.forward(q, k, v, dropout_p=0.5, **seed)[0]
    assert (run(seed=1) == run(seed=1)).all()
    assert (run(seed=1) != run(seed=2)).any() and (run(seed=1) != run(seed=1, offset=4)).any()


def test_programs_with_captures():
    q, k, v, dout = arrays()
    slopes = np.array([0.5, 0.25, 0.125, 0], np.float32)
    grad = np.zeros(4, np.float32)
    options = (
        "score{slopes: fp32 1d grad; power: int; score + slopes[h] * to_float(kv - q) * to_float(power)}"
    )
    values = dict(options=options, captures={"slopes": slopes, "power": 2})
    out, lse = flashjit.forward(q, k, v, **values)
    flashjit.backward(q, k, v, out, lse, dout, capture_grads={"slopes": grad}, **values)
    distance = 2.0 * (np.arange(13)[None] - np.arange(9)[:, None])
    s = 0.25 * q.astype(np.float64) @ np.repeat(k, 2, 1).swapaxes(2, 3) + slopes[:, None, None] * distance
    p = np.exp(s - s.max(3, keepdims=True))
    p /= p.sum(3, keepdims=True)
    want = p @ np.repeat(v, 2, 1)
    np.testing.assert_allclose(out, want, atol=1e-6)
    ds = p * (dout @ np.repeat(v, 2, 1).swapaxes(2, 3) - (dout * want).sum(3, keepdims=True))
    np.testing.assert_allclose(grad, (ds * distance).sum((0, 2, 3)), atol=1e-4)


class Foreign:
    """An array of a library that flashjit does not know, with DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_lists_of_cpu_arrays_are_empty_and_taken():
    q, k, v, _ = arrays()
    given = dict(
        options="mask{doc: int32 1d; doc[q] == doc[kv]}", captures={"doc": np.arange(13, dtype=np.int32) // 4}
    )
    out, _ = flashjit.forward(q, k, v, **given)
    again, _ = flashjit.forward(q, k, v, lists=flashjit.build_lists(q, k, v, **given), **given)
    assert np.array_equal(again, out)


def test_lists_are_built_once_on_a_gpu(fake_gpu):
    q, out = (OnGpu((1 << 18) * i, (1, 2, 512, 64), "<f2") for i in (1, 2))
    given = dict(
        options="mask{doc: int32 1d; doc[q] == doc[kv]}", captures={"doc": OnGpu(1 << 20, (512,), "<i4")}
    )
    lend = lambda bytes: OnGpu(1 << 24, (bytes,), "|u1")
    spec, shape = "fp16:d64:" + given["options"], (1, 2, 2, 512, 512)
    needed, own = fake_gpu.runtime.workspace_bytes(spec, shape), fake_gpu.runtime.list_bytes(spec, shape)
    call = lambda **more: flashjit.forward(q, q, q, out=out, lse=OnGpu(1 << 22, (1, 2, 512)), **given, **more)
    assert needed >= own > 0
    without = fake_gpu.launches(lambda: call(workspace=lend(needed)))
    lists = flashjit.build_lists(q, q, q, memory=lend(own), **given)
    more = {"workspace": lend(needed - own)} if needed > own else {}
    assert fake_gpu.launches(lambda: call(lists=lists, **more)) < without
    with pytest.raises(flashjit.InvalidArgument, match="lists were built for fwd.* but this call is"):
        flashjit.forward(q, q, q, out=out, lse=OnGpu(1 << 22, (1, 2, 512)), lists=lists)


def test_dlpack():
    q, k, v, _ = arrays()
    seen = _arrays.view(Foreign(q[:, 1:, ::2]), "q")
    assert seen == _arrays.view(q[:, 1:, ::2], "q")._replace(owner=seen.owner)
    out, lse = np.empty((2, 4, 9, 8), np.float32), np.empty((2, 4, 9), np.float32)
    flashjit.forward(Foreign(q), Foreign(k), Foreign(v), out=out, lse=lse)
    np.testing.assert_allclose(out, expected(q, k, v)[0], atol=1e-6)
    with pytest.raises(flashjit.Unsupported, match="give out"):
        flashjit.forward(Foreign(q), Foreign(k), Foreign(v))


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_jax_arrays_on_the_cpu(dtype, limit, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of a GPU's memory
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
    ml_dtypes = pytest.importorskip(
        "ml_dtypes"
    )  # NumPy's arrays can be written, and have no bfloat16 of their own
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, v = (jax.numpy.asarray(x, dtype) for x in arrays()[:3])
        out = np.empty((2, 4, 9, 8), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        flashjit.forward(q, k, v, options="causal", out=out, lse=np.empty((2, 4, 9), np.float32))
        want = expected(*(np.asarray(x) for x in (q, k, v)), keep=causal(9, 13))[0]
        np.testing.assert_allclose(out.astype(np.float64), want, atol=limit)
        with pytest.raises(flashjit.Unsupported, match="cannot make .* arrays of jax.*: give out"):
            flashjit.forward(q, k, v)


class OnGpu:
    """What CuPy shows of an array, without a GPU."""

    def __init__(self, pointer, shape, typestr="<f4", strides=None):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
        }


def test_the_cuda_array_interface():
    seen = _arrays.view(OnGpu(4096, (2, 3, 4, 8), "<f2", (1024, 256, 64, 2)), "q")
    assert seen[:6] == (4096, "fp16", (2, 3, 4, 8), (512, 128, 32, 1), ("cuda", 0), False)
    assert _arrays.view(OnGpu(4096, (2, 8)), "q").stride == (8, 1)
    with pytest.raises(flashjit.InvalidArgument, match="q is on cuda:0 and k on cpu"):
        flashjit.forward(
            OnGpu(4096, (1, 1, 8, 8)), np.zeros((1, 1, 8, 8), np.float32), OnGpu(4096, (1, 1, 8, 8))
        )


def replaced(position, value):
    values = arrays()[:3]
    values[position] = value
    return values


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: (replaced(0, [[1.0]]), {}), "q is a list"),
        (lambda: (arrays()[:3], dict(options=3)), "options is a int: give a str"),
        (lambda: (arrays()[:3], dict(scale="1")), "scale is a str: give a Python number"),
        (lambda: (arrays()[:3], dict(dropout_p="1")), "dropout_p is a str: give a Python number"),
        (lambda: (arrays()[:3], dict(dropout_p=0.1, seed="1")), "seed is a str: give a Python int"),
        (lambda: (arrays()[:3], dict(stream=None)), "stream is a NoneType: give a Python int"),
        (lambda: (arrays()[:3], dict(captures=[1.0])), "captures is a list: give a dict"),
        (lambda: (arrays()[:3], dict(max_seqlen_q=9.5)), "max_seqlen_q is a float: give a Python int"),
        (lambda: (replaced(0, np.zeros((2, 4, 9, 16))), {}), "q has type float64"),
        (lambda: (replaced(1, np.zeros((2, 2, 13, 16), np.float16)), {}), "q is fp32 and k is fp16"),
        (lambda: (replaced(0, np.zeros((4, 9, 16), np.float32)), {}), "four dimensions"),
        (lambda: (replaced(1, np.zeros((3, 2, 13, 16), np.float32)), {}), "k has batch 3"),
        (lambda: (replaced(1, np.zeros((2, 3, 13, 16), np.float32)), {}), "must be equal|multiple"),
        (lambda: (arrays()[:3], {"options": "slide"}), "slide"),
        (lambda: (arrays()[:3], {"scale": -1.0}), "scale is -1"),
        (lambda: (arrays()[:3], {"dropout_p": 1.0}), "dropout_p is 1"),
        (lambda: (arrays()[:3], {"kv_lengths": np.zeros(2, np.int64)}), "kv_lengths is int64"),
        (lambda: (arrays()[:3], {"kv_lengths": np.zeros(3, np.int32)}), "kv_lengths has shape"),
        (lambda: (arrays()[:3], {"lse": np.zeros((2, 4, 8), np.float32)}), "lse is fp32"),
        (lambda: (arrays()[:3], {"out": np.zeros((2, 4, 9, 8), np.float16)}), "out is fp16"),
        (lambda: (arrays()[:3], {"captures": {"x": 3}}), "x"),
        (lambda: (arrays()[:3], {"cu_seqlens_q": np.zeros(2, np.int32)}), "cu_seqlens_kv is missing"),
        (
            lambda: (
                arrays(batch=1)[:3],
                dict(
                    cu_seqlens_q=np.array([0, 10], np.int32),
                    cu_seqlens_kv=np.array([0, 13], np.int32),
                    max_seqlen_q=10,
                    max_seqlen_kv=13,
                ),
            ),
            "cu_seqlens_q ends with 10",
        ),
    ],
)
def test_bad_input_is_refused(make, match):
    values, named = make()
    with pytest.raises(flashjit.Error, match=match) as caught:
        flashjit.forward(*values, **named)
    assert isinstance(caught.value, (ValueError, TypeError))


def test_a_tensor_without_memory_is_refused_by_its_device():
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 2, 5, 8)
    flashjit.attention(q, q, q)  # of the same key
    said = "{} is on .*meta.*: move it to a CUDA device or to the CPU"
    for call in (flashjit.attention, flashjit.forward):
        with pytest.raises(flashjit.InvalidArgument, match=said.format("q")):
            call(q.to("meta"), q.to("meta"), q.to("meta"))
    with pytest.raises(flashjit.InvalidArgument, match="q is on cpu and k on meta"):
        flashjit.attention(q, q.to("meta"), q)
    with pytest.raises(flashjit.InvalidArgument, match=said.format("v")):
        flashjit.forward(q, q, q.to("meta"))


def test_read_only_results_are_refused():
    q, k, v, _ = arrays()
    out = np.empty((2, 4, 9, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises(flashjit.InvalidArgument, match="out is read-only"):
        flashjit.forward(q, k, v, out=out)


def test_gradients_are_added_to_memory_that_fits():
    """The library gets pointers to them, and no sizes."""
    q, k, v, dout = arrays()
    out, lse = flashjit.forward(q, k, v)
    table = np.zeros(11, np.float32)
    of_table = dict(options="score{t: fp32 1d grad; score + t[kv]}", captures={"t": table})
    locked = np.zeros(11, np.float32)
    locked.flags.writeable = False
    for named, match in (
        (
            dict(sinks=table[:4], dsinks=np.zeros(1, np.float32)),
            r"dsinks is fp32 \[1\]: it must be fp32 \[4\]",
        ),
        (dict(sinks=table[:4], dsinks=np.zeros(4, np.int32)), "dsinks is int32"),
        (dict(sinks=table[:4], dsinks=locked[:4]), "dsinks is read-only"),
        (dict(of_table, capture_grads={"t": locked}), "is read-only"),
        (dict(of_table, capture_grads={"t": table[:3].copy()}), "it must be fp32"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=match):
            flashjit.backward(q, k, v, out, lse, dout, **named)


def test_offsets_without_a_beginning_are_refused():
    q, k, v, _ = (x[:1] for x in arrays())
    offsets = np.array([0, 5], np.int32)
    for cu, longest, match in (
        (offsets[:0], 5, r"cu_seqlens_q has shape \[0\]: it must have \[sequences"),
        (offsets[None], 5, r"cu_seqlens_q has shape \[1, 2\]"),
        (offsets, -5, "max_seqlen_q is -5"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=match):
            flashjit.forward(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=5
            )


def test_empty_arrays():
    q, k, v, _ = arrays(keys=0)
    out, lse = flashjit.forward(q, k, v)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert flashjit.forward(*arrays(queries=0)[:3])[0].shape == (2, 4, 0, 8)


def test_a_running_state():
    q, k, v = arrays()[:3]
    out, lse = flashjit.forward(q, k, v)
    state = flashjit.forward(q, k[:, :, :7].copy(), v[:, :, :7].copy())
    joined = flashjit.forward(
        q, k[:, :, 7:].copy(), v[:, :, 7:].copy(), out=state[0], lse=state[1], state=state
    )
    assert joined[0] is state[0]
    np.testing.assert_allclose(joined[0], out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(joined[1], lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(flashjit.InvalidArgument, match=r"state\[1\] is fp32 .*must be fp32"):
        flashjit.forward(q, k, v, state=(out, lse[..., :-1].copy()))
    with pytest.raises(flashjit.WrongType, match="state is a ndarray"):
        flashjit.forward(q, k, v, state=out)


def test_the_largest_score_of_each_query():
    q, k, v = arrays()[:3]
    row_max = np.empty((*q.shape[:2], q.shape[2]), np.float32)
    flashjit.forward(q, k, v, row_max=row_max)
    scores = q @ np.repeat(k, q.shape[1] // k.shape[1], 1).swapaxes(2, 3) / np.sqrt(q.shape[3])
    np.testing.assert_allclose(row_max, scores.max(3), rtol=1e-5, atol=1e-5)
    with pytest.raises(flashjit.InvalidArgument, match="row_max is fp32 .*must be fp32"):
        flashjit.forward(q, k, v, row_max=row_max[..., :-1].copy())


def test_an_output_that_has_memory_of_an_input_is_refused():
    memory = np.ones(3000, np.float32)
    q, k, v = (memory[begin : begin + 512].reshape(1, 2, 32, 8) for begin in (0, 512, 1024))
    with pytest.raises(flashjit.InvalidArgument, match="out is written, but has memory of q"):
        flashjit.forward(q, k, v, out=q)
    with pytest.raises(flashjit.InvalidArgument, match="out is written, but has memory of v"):
        flashjit.forward(q, k, v, out=memory[1100:1612].reshape(q.shape))
    flashjit.forward(q, k, v, out=memory[1536:2048].reshape(q.shape))


def test_gradients_that_are_added_begin_with_zeros():
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((1, 2, 40, 16), np.float32) for _ in range(4))
    out, lse = flashjit.forward(q, k, v)
    np.full((64, 64, 64), np.nan, np.float32)  # memory that the gradients may get
    added = flashjit.backward(q, k, v, out, lse, dout, options="add_grads")
    for a, b in zip(added, flashjit.backward(q, k, v, out, lse, dout)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "given",
    [
        dict(seed=-1),
        dict(seed=2**64),
        dict(offset=2**64),
        dict(max_seqlen_q=2**40),
        dict(scale=10**400),
        dict(options="causal\0x"),
        dict(options="\ud800"),
        dict(captures={1: 2.0}),
    ],
    ids=str,
)
def test_numbers_and_texts_that_the_library_cannot_hold_are_refused(given):
    q = np.zeros((1, 2, 8, 16), np.float32)
    with pytest.raises(flashjit.Error):
        flashjit.forward(q, q, q, **given)


def test_jax_s_arrays_are_not_written():
    """They are taken for unchangeable, and so are those that share their memory."""
    array = type("ArrayImpl", (Foreign,), {"__module__": "jaxlib._jax"})
    q, k, v, _ = arrays()
    out, lse = np.zeros((2, 4, 9, 8), np.float32), np.empty((2, 4, 9), np.float32)
    flashjit.forward(array(q), array(k), array(v), out=out, lse=lse)
    np.testing.assert_allclose(out, expected(q, k, v)[0], atol=1e-6)
    for named in (dict(out=array(out), lse=lse), dict(out=out, lse=array(lse))):
        with pytest.raises(
            flashjit.InvalidArgument, match="(out|lse) is an array of JAX, where arrays never change"
        ):
            flashjit.forward(q, k, v, **named)
    with pytest.raises(flashjit.InvalidArgument, match="dq is an array of JAX"):
        flashjit.backward(q, k, v, out, lse, out, dq=array(np.empty_like(q)))


def test_jax_s_tracers_are_refused():
    class DynamicJaxprTracer:
        def __dlpack__(self):
            raise AssertionError

    with pytest.raises(
        flashjit.WrongType, match="q is a DynamicJaxprTracer, which has no memory: under jax.jit"
    ):
        flashjit.forward(DynamicJaxprTracer(), *arrays()[1:3])


def test_tensors_that_require_gradients_where_none_are_recorded():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays()[:3])
    with pytest.raises(flashjit.InvalidArgument, match="q requires gradients.*torch.no_grad"):
        flashjit.forward(q, k, v)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, lse = flashjit.forward(q, k, v)
            grads = flashjit.backward(q, k, v, out, lse, torch.ones_like(out))
    want = torch.autograd.grad(flashjit.attention(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(list(grads), list(want))


def test_a_number_of_numpy_is_captured():
    q, k, v, _ = arrays()
    out, _ = flashjit.forward(q, k, v, options="score{w: float; score * w}", captures={"w": np.float32(2)})
    np.testing.assert_allclose(out, flashjit.forward(q, k, v, scale=2 * 16**-0.5)[0], atol=1e-6)

"""attention(accurate=True): D of the backward pass from O in float32. On a GPU, where O else is rounded before; on the CPU the
reference needs no O, and what is tested is the way there."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
import numpy as np  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The RMS error of dQ from rounding dS and dQ, and a third more.
BOUNDS = {torch.bfloat16: 3.2e-3, torch.float16: 4e-4}


def with_strong_key(dtype, rows=150, dim=64, size=10):
    """Q, K, V and dO: the score of key 7 is `size` above the logarithm of the others' sum."""
    torch.manual_seed(3)
    q, k, v, dout = (torch.randn(1, 2, rows, dim) for _ in range(4))
    direction = torch.nn.functional.normalize(torch.randn(dim), dim=0)
    k[:, :, 7] = direction * 3 * math.sqrt(dim)
    q += direction * (math.log(rows) + size) / 3
    return [x.to(DEVICE, dtype) for x in (q, k, v, dout)]


def gradients(function, q, k, v, dout):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, dout.to(out.dtype))


def exact(q, k, v, square=False):
    scores = q @ k.mT / math.sqrt(q.shape[3])
    return torch.softmax(scores * scores / 10 if square else scores, 3) @ v


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("square", [False, True], ids=["plain", "squared"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_with_one_strong_key(dtype, square):
    q, k, v, dout = with_strong_key(dtype)
    score = {"score_mod": lambda score, b, h, i, j: score * score / 10} if square else {}
    _, want = gradients(lambda *x: exact(*x, square), *(x.double() for x in (q, k, v, dout)))
    out, accurate = gradients(lambda *x: flashjit.attention(*x, accurate=True, **score), q, k, v, dout)
    same, plain = gradients(lambda *x: flashjit.attention(*x, **score), q, k, v, dout)
    assert out.dtype is dtype
    torch.testing.assert_close(out, same)  # it was rounded twice where that is computed in float64
    assert all(x.dtype is dtype for x in accurate)
    for name, x, y in zip("qkv", accurate, want):
        assert error(x, y) < BOUNDS[dtype], name
    if DEVICE == "cuda":
        assert error(plain[0], want[0]) > 3 * BOUNDS[dtype]


@pytest.mark.parametrize("square", [False, True], ids=["plain", "squared"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_errors_of_fp32(dtype, square):
    """What remains is that the results are rounded."""
    q, k, v, dout = with_strong_key(dtype)
    score = {"score_mod": lambda score, b, h, i, j: score * score / 10} if square else {}
    want = gradients(lambda *x: exact(*x, square), *(x.double() for x in (q, k, v, dout)))
    got = gradients(lambda *x: flashjit.attention(*x, accurate="fp32", **score), q, k, v, dout)
    for x, y in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert x.dtype is dtype
        assert error(x, y) < 1.05 * error(y.to(dtype), y)


def test_another_text_is_refused():
    with pytest.raises(flashjit.InvalidArgument, match='give True, False or "fp32"'):
        flashjit.attention(*with_strong_key(torch.bfloat16)[:3], accurate="tf32")


def kept(call):
    """What autograd keeps of a call."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        call()
    return tensors


def test_autograd_keeps_o_in_float32():
    q, k, v, _ = with_strong_key(torch.bfloat16)
    q.requires_grad_()
    types = [x.dtype for x in kept(lambda: flashjit.attention(q, k, v, accurate=True)) if x.dim() == 4]
    assert types == [torch.bfloat16] * 3 + [torch.float32]
    types = [x.dtype for x in kept(lambda: flashjit.attention(q, k, v)) if x.dim() == 4]
    assert types == [torch.bfloat16] * 4


def test_saved_tensors_elsewhere_and_lse():
    q, k, v, dout = with_strong_key(torch.bfloat16)
    _, want = gradients(lambda *x: flashjit.attention(*x, accurate=True), q, k, v, dout)
    pack = lambda x: x.contiguous().clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x[None].clone()[0]):
        out, lse, row_max = flashjit.attention(
            q.requires_grad_(), k, v, accurate=True, return_lse=True, return_row_max=True
        )
        assert out.dtype is torch.bfloat16 and lse.dtype is row_max.dtype is torch.float32
    (dq,) = torch.autograd.grad(out, q, dout)
    torch.testing.assert_close(dq, want[0])


def test_o_in_float32_has_such_gradients_too():
    q, k, v, dout = with_strong_key(torch.bfloat16)
    _, want = gradients(lambda *x: flashjit.attention(*x, accurate=True), q, k, v, dout)
    out, got = gradients(lambda *x: flashjit.attention(*x, out_dtype=torch.float32), q, k, v, dout)
    assert out.dtype is torch.float32
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)


def test_in_packed_rows_with_sinks_and_dropout():
    q, k, v, dout = with_strong_key(torch.bfloat16)
    rows = torch.tensor([0, 70, 150], dtype=torch.int32, device=DEVICE)
    sinks = torch.randn(2, device=DEVICE).requires_grad_()
    results = []
    for accurate in (False, True):
        torch.manual_seed(4)
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        packed = {"cu_seqlens_q": rows, "cu_seqlens_kv": rows, "max_seqlen_q": 80, "max_seqlen_kv": 80}
        out = flashjit.attention(
            *leaves, causal=True, sinks=sinks, dropout_p=0.2, accurate=accurate, **packed
        )
        results.append([out, *torch.autograd.grad(out, [*leaves, sinks], dout)])
    torch.testing.assert_close(results[0][0], results[1][0])
    for plain, accurate in zip(*results):
        assert error(accurate, plain.double()) < 0.2


def test_second_derivatives():
    q, k, v, dout = (x[:, :, :20].detach().float() for x in with_strong_key(torch.bfloat16, size=1))
    q, k, v, dout = (x.to(torch.bfloat16).requires_grad_() for x in (q, k, v, dout))
    second = []
    for accurate in (False, True):
        out = flashjit.attention(q, k, v, accurate=accurate)
        (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
        second.append(torch.autograd.grad(dq.float().square().sum(), (q, k, dout)))
    for plain, accurate in zip(*second):
        assert error(accurate, plain.double()) < 0.05


def test_in_compiled_code():
    q, k, v, dout = with_strong_key(torch.bfloat16)
    call = lambda q, k, v: flashjit.attention(q, k, v, causal=True, accurate=True)  # noqa: E731
    want = gradients(call, q, k, v, dout)
    got = gradients(torch.compile(call, backend="aot_eager", fullgraph=True), q, k, v, dout)
    assert got[0].dtype is torch.bfloat16
    torch.testing.assert_close(got, want)


def test_no_effect_without_gradients_and_in_float32():
    q, k, v, _ = with_strong_key(torch.bfloat16)
    with torch.no_grad():
        out = torch.empty_like(q)
        assert flashjit.attention(q, k, v, accurate=True, out=out) is out
    torch.testing.assert_close(flashjit.attention(q, k, v, accurate=True), out)
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    assert flashjit.attention(*wide, accurate=True).dtype is torch.float32


def test_refuses_what_keeps_another_o():
    q, k, v, _ = with_strong_key(torch.bfloat16)
    with pytest.raises(flashjit.Error, match="accurate and out_mod are both given"):
        flashjit.attention(q, k, v, out_mod="out * 2.0", accurate=True)
    with pytest.raises(flashjit.Error, match="accurate is for the backward pass"):
        torch.func.jvp(lambda q: flashjit.attention(q, k, v, accurate=True), (q,), (q,))


def test_arrays_with_o_in_float32():
    q, k, v, dout = (x.float().cpu().numpy().astype(np.float16) for x in with_strong_key(torch.float16))
    out, lse = flashjit.forward(q, k, v, options="fp32_out")
    assert out.dtype == np.float32
    got = flashjit.backward(q, k, v, out, lse, dout, options="fp32_out")
    _, want = gradients(exact, *(torch.from_numpy(x).double() for x in (q, k, v, dout)))
    for x, y in zip(got, want):
        assert error(torch.from_numpy(x), y) < BOUNDS[torch.float16]
    with pytest.raises(flashjit.Error, match="q is fp16 and out is fp32: it must be fp16"):
        flashjit.backward(q, k, v, out, lse, dout)
    with pytest.raises(flashjit.Error, match="out is fp16: it must be fp32"):
        flashjit.backward(q, k, v, out.astype(np.float16), lse, dout, options="fp32_out")

"""Weights that a function gives in place of the softmax, on the GPU where there is one: against fp64, with gradients."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exact(q, k, v, weigh, attends=None, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = weigh(q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5))
    if attends is not None:
        weights = weights.masked_fill(~attends, 0)
    return weights @ v


def tensors(queries=37, keys=61, dtype=torch.float32, heads_kv=2):
    torch.manual_seed(5)
    sizes = ((2, 4, queries, 64), (2, heads_kv, keys, 64), (2, heads_kv, keys, 64), (2, 4, queries, 64))
    return [torch.randn(size, dtype=dtype).to(DEVICE) for size in sizes]


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)


WEIGHTS = {
    "sigmoid": (lambda s, b, h, i, j: torch.sigmoid(s - 4), lambda s: torch.sigmoid(s - 4)),
    "relu": (lambda s, b, h, i, j: torch.relu(s) / 61, lambda s: torch.relu(s) / 61),
    "silu": (
        lambda s, b, h, i, j: torch.nn.functional.silu(s) / 61,
        lambda s: torch.nn.functional.silu(s) / 61,
    ),
    "text": ("score * sigmoid(score)", torch.nn.functional.silu),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_against_fp64_with_gradients(name, is_causal):
    function, weigh = WEIGHTS[name]
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    got = flashjit.attention(q, k, v, weight_mod=function, causal=is_causal)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = exact(*wide, weigh, causal(37, 61) if is_causal else None)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    got_grads = torch.autograd.grad(got, (q, k, v), dout)
    want_grads = torch.autograd.grad(want, wide, dout.double())
    for g, w in zip(got_grads, want_grads):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=2e-4)


def test_16_bits():
    q, k, v, _ = tensors(dtype=torch.bfloat16)
    got = flashjit.attention(q, k, v, weight_mod=lambda s, b, h, i, j: torch.sigmoid(s - 4))
    want = exact(q.double(), k.double(), v.double(), lambda s: torch.sigmoid(s - 4))
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_a_mask_a_window_and_no_keys():
    q, k, v, _ = tensors()
    doc = torch.arange(61, device=DEVICE) // 9
    sigmoid, weigh = WEIGHTS["sigmoid"]
    got = flashjit.attention(
        q, k, v, weight_mod=sigmoid, mask_mod=lambda b, h, i, j: (doc[i] == doc[j]) & (i != 5)
    )
    attends = doc[:37, None] == doc[None]
    attends[5] = False
    torch.testing.assert_close(got, exact(q, k, v, weigh, attends), rtol=1e-4, atol=1e-4)
    assert (got[:, :, 5] == 0).all()
    got = flashjit.attention(q, k, v, weight_mod=sigmoid, causal=True, window=(7, 0))
    near = causal(37, 61) & ~causal(37, 61).tril(61 - 37 - 8)
    torch.testing.assert_close(got, exact(q, k, v, weigh, near), rtol=1e-4, atol=1e-4)


def test_packed_sequences():
    q, k, v, _ = tensors(40, 40)
    q, k, v = q[:1], k[:1], v[:1]
    offsets = torch.tensor([0, 13, 13, 40], dtype=torch.int32, device=DEVICE)
    got = flashjit.attention(
        q,
        k,
        v,
        weight_mod=WEIGHTS["silu"][0],
        causal=True,
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=27,
        max_seqlen_kv=27,
    )
    for first, end in ((0, 13), (13, 40)):
        part = exact(
            *(x[:, :, first:end] for x in (q, k, v)), WEIGHTS["silu"][1], causal(end - first, end - first)
        )
        torch.testing.assert_close(got[:, :, first:end], part, rtol=1e-4, atol=1e-4)


def test_gradients_of_captures():
    *qkv, dout = tensors()
    bias = torch.randn(4, device=DEVICE).requires_grad_()
    got = flashjit.attention(*qkv, weight_mod=lambda s, b, h, i, j: torch.sigmoid(s + bias[h]), causal=True)
    (got_grad,) = torch.autograd.grad(got, bias, dout)
    wide = bias.detach().double().requires_grad_()
    want = exact(*(x.double() for x in qkv), lambda s: torch.sigmoid(s + wide[:, None, None]), causal(37, 61))
    (want_grad,) = torch.autograd.grad(want, wide, dout.double())
    torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-3, atol=1e-3)


def test_gradcheck():
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 1, n, 8, device=DEVICE).requires_grad_() for n in (3, 4, 4))
    assert torch.autograd.gradcheck(
        lambda *x: flashjit.attention(*x, weight_mod=lambda s, b, h, i, j: torch.sigmoid(s)),
        (q, k, v),
        eps=1e-2,
        atol=1e-2,
        rtol=1e-2,
        nondet_tol=1e-5,
    )


def test_compiled():
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)

    def call(q, k, v):
        return flashjit.attention(q, k, v, weight_mod=WEIGHTS["sigmoid"][0], causal=True)

    compiled = torch.compile(call, fullgraph=True)
    got, want = compiled(q, k, v), call(q, k, v)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
        torch.testing.assert_close(g, w)


def test_arrays():
    *qkv, dout = (x.cpu().numpy() for x in tensors())
    options = "causal:score{sigmoid(score - 4.0)}:weight_mod"
    if DEVICE == "cuda":
        pytest.skip("arrays of the CPU")
    out, lse = flashjit.forward(*qkv, options=options)
    assert lse is None
    q, k, v = (torch.from_numpy(x).double().requires_grad_() for x in qkv)
    want = exact(q, k, v, WEIGHTS["sigmoid"][1], causal(37, 61))
    torch.testing.assert_close(torch.from_numpy(out).double(), want, rtol=1e-4, atol=1e-4)
    grads = flashjit.backward(*qkv, out, None, dout, options=options)
    for g, w in zip(grads, torch.autograd.grad(want, (q, k, v), torch.from_numpy(dout).double())):
        torch.testing.assert_close(torch.from_numpy(g).double(), w, rtol=1e-4, atol=2e-4)


def test_a_traced_program_and_a_nan():
    q, k, v, _ = tensors()
    program = flashjit.trace(lambda s, b, h, i, j: torch.sigmoid(s - math.log(61)))
    got = flashjit.attention(q, k, v, weight_mod=program)
    torch.testing.assert_close(
        got, exact(q, k, v, lambda s: torch.sigmoid(s - math.log(61))), rtol=1e-4, atol=1e-4
    )
    q[0, 0, 3, 0] = math.nan
    assert flashjit.attention(q, k, v, weight_mod=program)[0, 0, 3].isnan().all()


@pytest.mark.parametrize(
    "more, says",
    [
        ({"score_mod": lambda s, b, h, i, j: s * 2}, "weight_mod and score_mod are both given"),
        ({"softcap": 3.0}, "weight_mod and softcap are both given"),
        ({"return_lse": True}, "without a softmax there is no LSE"),
        ({"return_row_max": True}, "no row has a largest score"),
        ({"dropout_p": 0.5}, "weight_mod is set and dropout is, too"),
        ({"sinks": torch.zeros(4, device=DEVICE)}, "weight_mod is set and sinks is, too"),
        ({"batch_invariant": True}, "weight_mod is set and batch_invariant is, too"),
    ],
)
def test_refusals(more, says):
    q, k, v, _ = tensors()
    with pytest.raises(flashjit.Error, match=says):
        flashjit.attention(q, k, v, weight_mod=WEIGHTS["sigmoid"][0], **more)


def test_the_score_itself_is_refused():
    q, k, v, _ = tensors()
    with pytest.raises(flashjit.Error, match="its program is empty or the score itself"):
        flashjit.attention(q, k, v, weight_mod=lambda s, b, h, i, j: s)


@pytest.mark.parametrize(
    "weight_mod, says",
    [
        (lambda s: s, r"a weight_mod is called as weight_mod\(score, b, h, q_idx, kv_idx\)"),
        (lambda s, b, h, i, j: None, "a weight_mod returns a weight, computed"),
        (3, r"weight_mod is a int: give a function weight_mod\(score, b"),
        ("q > kv", "a weight_mod program is float, not bool"),
    ],
)
def test_errors_name_weight_mod(weight_mod, says):
    q, k, v, _ = tensors()
    with pytest.raises(flashjit.Error, match=says) as found:
        flashjit.attention(q, k, v, weight_mod=weight_mod)
    assert "score_mod" not in str(found.value)


def test_forward_mode_is_refused():
    q, k, v, _ = tensors()
    with pytest.raises(flashjit.Error, match="no forward-mode derivative .*weight_mod is set"):
        torch.func.jvp(
            lambda x: flashjit.attention(x, k, v, weight_mod=WEIGHTS["sigmoid"][0]),
            (q,),
            (torch.ones_like(q),),
        )

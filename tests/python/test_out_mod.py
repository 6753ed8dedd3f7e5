"""Functions of O's elements, on the GPU where there is one: against fp64, with gradients."""

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from element_programs import DEVICE, compare, exact, tensors, wide  # noqa: E402

GATES = {  # of [batch, rows, heads, columns] or [batch, rows, heads]: an output gate of a layer
    "elements": (4, lambda o, gate: lambda out, b, h, i, column: out * torch.sigmoid(gate[b, i, h, column])),
    "heads": (3, lambda o, gate: lambda out, b, h, i, column: out * torch.sigmoid(gate[b, i, h])),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_against_fp64_with_gradients(name):
    rank, make = GATES[name]
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    gate = torch.randn(2, 37, 4, 32, device=DEVICE)[(slice(None),) * 3 + (slice(None) if rank == 4 else 0,)]
    gate = gate.clone().requires_grad_()
    got = flashjit.attention(q, k, v, causal=True, out_mod=make(None, gate))
    wides = wide(q, k, v, gate)
    factor = torch.sigmoid(wides[3]).transpose(1, 2)
    want = exact(*wides[:3], True) * (factor if rank == 4 else factor[..., None])
    compare(got, want, (q, k, v, gate), wides, dout)


def test_a_tensor_of_the_score_and_of_o_gets_both_gradients():
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    w = torch.randn(4, device=DEVICE).requires_grad_()
    got = flashjit.attention(
        q,
        k,
        v,
        score_mod=lambda s, b, h, i, j: s * w[h],
        out_mod=lambda out, b, h, i, column: torch.tanh(out * w[h]) + column,
    )
    wq, wk, wv, ww = wides = wide(q, k, v, w)
    of_head = ww[:, None, None]
    want = torch.tanh(exact(wq * of_head, wk, wv) * of_head) + torch.arange(32, device=DEVICE)
    compare(got, want, (q, k, v, w), wides, dout)


def test_16_bits_text_lse_and_memory():
    *qkv, dout = tensors(dtype=torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in qkv)
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0], device=DEVICE)
    options = {"out_mod": "w: fp32 1d; out * w[h]", "captures": {"w": scale}}
    got, lse = flashjit.attention(q, k, v, return_lse=True, **options)
    wides = wide(q, k, v)
    compare(got, exact(*wides) * scale.double()[:, None, None], (q, k, v), wides, dout, 2e-2)
    with torch.no_grad():
        plain, plain_lse = flashjit.attention(q, k, v, return_lse=True)
        torch.testing.assert_close(lse, plain_lse)
        out = torch.empty_like(q)
        assert flashjit.attention(q, k, v, out=out, out_dtype=None, **options) is out
        torch.testing.assert_close(out, got)
        fp32 = flashjit.attention(q, k, v, out_dtype=torch.float32, **options)
    torch.testing.assert_close(fp32, (plain * scale[:, None, None].bfloat16()).float(), rtol=2e-2, atol=2e-2)


def test_packed_sequences_with_padded_rows():
    *qkv, dout = tensors(40, 40)
    q, k, v = (x[:1].requires_grad_() for x in qkv)
    offsets = torch.tensor([0, 13, 13, 40], dtype=torch.int32, device=DEVICE)
    gate = torch.randn(40, 4, 32, device=DEVICE).requires_grad_()
    got = flashjit.attention(
        q,
        k,
        v,
        causal=True,
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=27,
        max_seqlen_kv=27,
        out_mod=lambda out, b, h, i, column: out * gate[offsets[b] + i, h, column],
    )
    wides = wide(q, k, v, gate)
    wq, wk, wv, wgate = wides
    parts = [exact(*(x[:, :, a:b] for x in (wq, wk, wv)), True) for a, b in ((0, 13), (13, 40))]
    want = torch.cat(parts, 2) * wgate.transpose(0, 1)
    compare(got, want, (q, k, v, gate), wides, dout[:1])


def test_gradcheck():
    torch.manual_seed(1)
    q, k, v, gate = (torch.randn(1, 1, n, 8, device=DEVICE).requires_grad_() for n in (3, 4, 4, 3))
    assert torch.autograd.gradcheck(
        lambda q, k, v, gate: flashjit.attention(
            q, k, v, out_mod=lambda out, b, h, i, column: torch.tanh(out) * gate[b, h, i, column]
        ),
        (q, k, v, gate),
        eps=1e-2,
        atol=1e-2,
        rtol=1e-2,
        nondet_tol=1e-5,
    )


@pytest.mark.parametrize("batch, length", [(0, 5), (1, 0)])
def test_without_queries_a_gate_has_no_elements_and_so_has_its_gradient(batch, length):
    """As the last rank's share of a batch: tensors of the score and of O are empty."""
    q, k, v = (torch.randn(batch, 2, n, 16, requires_grad=True) for n in (length, 3, 3))
    gate, slopes = (torch.randn(batch, length, 2, n, requires_grad=True) for n in (16, 1))
    out = flashjit.attention(
        q,
        k,
        v,
        score_mod=lambda score, b, h, i, j: score * slopes[b, i, h, 0],
        out_mod=lambda out, b, h, i, column: out * torch.sigmoid(gate[b, i, h, column]),
    )
    assert out.shape == q.shape
    for x, grad in zip((gate, slopes), torch.autograd.grad(out.sum(), (gate, slopes))):
        assert grad.shape == x.shape


def test_without_a_softmax_and_without_keys():
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    got = flashjit.attention(
        q,
        k,
        v,
        weight_mod=lambda s, b, h, i, j: torch.sigmoid(s) / 61,
        mask_mod=lambda b, h, i, j: i != 5,
        out_mod=lambda out, b, h, i, column: out * 2 + 1,
    )
    wides = wide(q, k, v)
    wk, wv = (x.repeat_interleave(2, 1) for x in wides[1:])
    weights = torch.sigmoid(wides[0] @ wk.transpose(2, 3) * 32**-0.5) / 61
    attends = (torch.arange(37, device=DEVICE) != 5)[:, None]
    compare(got, (weights * attends) @ wv * 2 + 1, (q, k, v), wides, dout)
    assert (got[:, :, 5] == 1).all()


def in_pages(x):
    return x.unflatten(2, (3, 16)).permute(0, 2, 1, 3, 4).flatten(0, 1).contiguous()


LENGTHS = torch.tensor([17, 48], dtype=torch.int32, device=DEVICE)
OF_PAGES = {
    "page_table": torch.arange(6, dtype=torch.int32, device=DEVICE).view(2, 3),
    "kv_lengths": LENGTHS,
    "causal": True,
}
SCALES = {"k_scale": torch.full((2,), 0.5, device=DEVICE), "v_scale": torch.full((2,), 2.0, device=DEVICE)}
FORMS = {  # K's and V's change, and the other arguments
    "slots": (None, {"cache": True, "kv_lengths": LENGTHS, "causal": True}),
    "pages": (in_pages, OF_PAGES),
    "pages of 8 bits": (lambda x: in_pages(x).to(torch.float8_e4m3fn), {**OF_PAGES, **SCALES}),
    "8 bits": (lambda x: x.to(torch.float8_e4m3fn), SCALES),
    "lengths": (None, {"kv_lengths": LENGTHS}),
    "a window and a softcap": (None, {"window": (7, 0), "softcap": 5.0}),
    "sinks": (None, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)}),
    "skip-softmax": (None, {"skip_softmax_threshold": 1e-3}),
    "deterministic": (None, {"deterministic": True}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_gate_changes_what_the_call_without_it_gives(rows, form):
    """Whose O is float32: the program sees it before it is rounded."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    q, k, v, _ = tensors(rows, 48, dtype=dtype)
    change, more = FORMS[form]
    k, v = (x if change is None else change(x) for x in (k, v))
    gate = torch.randn(2, rows, 4, 32, device=DEVICE)
    gated = lambda out, b, h, i, column: out * torch.sigmoid(gate[b, i, h, column]) + b
    with torch.no_grad():
        plain = flashjit.attention(q, k, v, out_dtype=torch.float32, **more)
        want = plain * torch.sigmoid(gate.transpose(1, 2))
        want[1] += 1
        got = flashjit.attention(q, k, v, out_mod=gated, out_dtype=torch.float32, **more)
        tolerance = 1e-5 if DEVICE == "cpu" else 1e-2
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        rounded = flashjit.attention(q, k, v, out_mod=gated, **more)
        torch.testing.assert_close(rounded, got.to(dtype), rtol=1e-2, atol=1e-2)


def test_compiled_with_gradients():
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    gate = torch.randn(2, 37, 4, 32, device=DEVICE).requires_grad_()

    def call(q, k, v, gate):
        def gated(out, b, h, i, column):
            return out * torch.sigmoid(gate[b, i, h, column])

        return flashjit.attention(q, k, v, out_mod=gated, causal=True)

    got, want = torch.compile(call, fullgraph=True)(q, k, v, gate), call(q, k, v, gate)
    torch.testing.assert_close(got, want)
    inputs = (q, k, v, gate)
    for g, w in zip(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(want, inputs, dout)):
        torch.testing.assert_close(g, w)


def test_arrays():
    if DEVICE == "cuda":
        pytest.skip("arrays of the CPU")
    q, k, v, _ = (x.numpy() for x in tensors())
    out, _ = flashjit.forward(q, k, v, options="causal:out_mod{out * to_float(column)}")
    want = exact(*(torch.from_numpy(x).double() for x in (q, k, v)), True) * torch.arange(32)
    torch.testing.assert_close(torch.from_numpy(out).double(), want, rtol=1e-4, atol=1e-4)


def test_a_traced_program():
    q, k, v, _ = tensors()
    program = flashjit.trace(out_mod=lambda out, b, h, i, column: out * h)
    got = flashjit.attention(q, k, v, out_mod=program)
    want = exact(*(x.double() for x in (q, k, v))) * torch.arange(4, device=DEVICE)[:, None, None]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    plain = flashjit.attention(q, k, v)
    torch.testing.assert_close(flashjit.attention(q, k, v, out_mod=lambda out, b, h, i, c: out), plain)


@pytest.mark.parametrize(
    "more, says",
    [
        ({"batch_invariant": True}, "out_mod is set and batch_invariant is, too"),
        ({"out_mod": lambda out, b, h: out}, r"an? out_mod is called as out_mod\(out, b, h, q_idx, column\)"),
        ({"out_mod": "out * score"}, "an out_mod program reads score"),
        ({"out_mod": 3}, "out_mod is a int: give a function"),
    ],
)
def test_refusals(more, says):
    q, k, v, _ = tensors()
    with pytest.raises(flashjit.Error, match=says):
        flashjit.attention(q, k, v, **{"out_mod": lambda out, b, h, i, c: out * 2, **more})


def test_forward_mode_is_refused():
    q, k, v, _ = tensors()
    with pytest.raises(flashjit.Error, match="no forward-mode derivative .*out_mod is set"):
        torch.func.jvp(
            lambda x: flashjit.attention(x, k, v, out_mod="out * 2.0"), (q,), (torch.ones_like(q),)
        )

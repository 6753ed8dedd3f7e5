"""Functions of Q's and K's rows, on the GPU where there is one: against fp64, with gradients."""

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from element_programs import DEVICE, compare, exact, tensors, wide  # noqa: E402

DIM = 32


def angles(rows, theta=100.0):
    return torch.arange(rows)[:, None] * theta ** -(torch.arange(DIM // 2) * 2 / DIM)


def turned(x, cos, sin, halves):
    """RoPE of [..., rows, DIM] in plain PyTorch."""
    if halves:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def rope_halves(cos, sin):
    def turn(row, b, h, i, d):
        other = torch.where(d < DIM // 2, -row[d + DIM // 2], row[d - DIM // 2])
        return row[d] * cos[i, d % (DIM // 2)] + other * sin[i, d % (DIM // 2)]

    return turn


def rope_pairs(cos, sin):
    return lambda row, b, h, i, d: row[d] * cos[i, d // 2] + row[d ^ 1] * sin[i, d // 2] * (2 * (d & 1) - 1)


@pytest.mark.parametrize("halves", [True, False])
def test_rope_by_tables_that_have_gradients(halves):
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    cos, sin = (f(angles(61)).to(DEVICE).requires_grad_() for f in (torch.cos, torch.sin))
    turn = (rope_halves if halves else rope_pairs)(cos, sin)
    got = flashjit.attention(q, k, v, causal=True, q_mod=turn, k_mod=turn)
    wides = wide(q, k, v, cos, sin)
    wq, wk, wv, wcos, wsin = wides
    want = exact(turned(wq, wcos[:37], wsin[:37], halves), turned(wk, wcos, wsin, halves), wv, True)
    compare(got, want, (q, k, v, cos, sin), wides, dout)


def test_rope_by_theta_at_far_positions():
    """Angles are as exact as fp32 is: no fast sine."""
    q, k, v, _ = tensors(dtype=torch.bfloat16)
    far = 4000

    def turn(row, b, h, i, d):
        angle = (i + far) * torch.pow(100.0, -(d // 2) * (2 / DIM))
        return row[d] * torch.cos(angle) + row[d ^ 1] * torch.sin(angle) * (2 * (d & 1) - 1)

    got = flashjit.attention(q, k, v, q_mod=turn, k_mod=turn)
    cos, sin = (f(angles(61 + far)[far:].double()).to(DEVICE) for f in (torch.cos, torch.sin))
    wides = [turned(x.double(), cos[: x.shape[2]], sin[: x.shape[2]], False).bfloat16() for x in (q, k)]
    want = exact(*[x.double() for x in wides], v.double())
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_head_with_its_weight(dtype):
    *qkv, dout = tensors(dtype=dtype)
    q, k, v = (x.requires_grad_() for x in qkv)
    weights = [(torch.rand(DIM, device=DEVICE) + 0.5).requires_grad_() for _ in range(2)]
    mods = [
        lambda row, b, h, i, d, w=w: row[d] * torch.rsqrt(row.square().sum() / DIM + 1e-5) * w[d]
        for w in weights
    ]
    got = flashjit.attention(q, k, v, q_mod=mods[0], k_mod=mods[1])
    wides = wide(q, k, v, *weights)
    norm = lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w
    want = exact(norm(wides[0], wides[3]), norm(wides[1], wides[4]), wides[2])
    compare(got, want, (q, k, v, *weights), wides, dout, 2e-4 if dtype == torch.float32 else 3e-2)


def test_a_scale_per_column_and_head_as_text_beside_other_programs():
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    scale = torch.randn(4, DIM, device=DEVICE).requires_grad_()
    got, lse = flashjit.attention(
        q,
        k,
        v,
        q_mod="s: fp32 2d grad; element * s[h, column]",
        score_mod="s: fp32 2d grad; score * s[h, 0]",
        out_mod="s: fp32 2d grad; out + s[h, column]",
        captures={"s": scale},
        return_lse=True,
    )
    wides = wide(q, k, v, scale)
    of_head = wides[3][:, None]
    want = exact(wides[0] * of_head * of_head[..., :1], *wides[1:3]) + of_head
    assert lse.shape == q.shape[:3]
    compare(got, want, (q, k, v, scale), wides, dout)


def test_packed_sequences_with_padded_rows():
    *qkv, dout = tensors(40, 40)
    q, k, v = (x[:1].requires_grad_() for x in qkv)
    offsets = torch.tensor([0, 13, 13, 37], dtype=torch.int32, device=DEVICE)
    cos, sin = (f(angles(24)).to(DEVICE) for f in (torch.cos, torch.sin))
    turn = rope_halves(cos, sin)
    got = flashjit.attention(
        q,
        k,
        v,
        causal=True,
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=24,
        max_seqlen_kv=24,
        q_mod=turn,
        k_mod=turn,
    )
    wides = wide(q, k, v)
    parts = []
    for a, b in ((0, 13), (13, 37)):
        wq, wk, wv = (x[:, :, a:b] for x in wides)
        by = cos[: b - a].double(), sin[: b - a].double()
        parts.append(exact(turned(wq, *by, True), turned(wk, *by, True), wv, True))
    want = torch.cat([*parts, torch.zeros(1, 4, 3, DIM, device=DEVICE)], 2)
    compare(got, want, (q, k, v), wides, dout[:1])


def test_a_query_of_a_cache_is_turned():
    q, k, v, _ = tensors(1, 61)
    cos, sin = (f(angles(61)).to(DEVICE) for f in (torch.cos, torch.sin))
    lengths = torch.tensor([17, 61], dtype=torch.int32, device=DEVICE)
    text = (
        "cosine: fp32 2d; sine: fp32 2d; element * cosine[seqlen_kv - seqlen_q + q, column / 2] + element_at(column ^ 1) * "
        "sine[seqlen_kv - seqlen_q + q, column / 2] * to_float(2 * (column & 1) - 1)"
    )
    with torch.no_grad():
        got = flashjit.attention(
            q, k, v, cache=True, kv_lengths=lengths, q_mod=text, captures={"cosine": cos, "sine": sin}
        )
    for b, n in enumerate(lengths.tolist()):
        part = turned(q[b : b + 1].double(), cos[n - 1].double(), sin[n - 1].double(), False)
        want = exact(part, k[b : b + 1, :, :n].double(), v[b : b + 1, :, :n].double())
        torch.testing.assert_close(got[b : b + 1].double(), want, rtol=2e-4, atol=2e-4)
    with torch.no_grad(), pytest.raises(flashjit.Error, match="k_mod is set and K is in a cache; append"):
        flashjit.attention(q, k, v, cache=True, kv_lengths=lengths, k_mod="element * 2.0")


PROGRAMS = {
    "rope in halves": lambda w: (
        lambda row, b, h, i, d: (
            row[d] * torch.cos(w[i]) + torch.where(d < 4, -row[d + 4], row[d - 4]) * torch.sin(w[i])
        )
    ),
    "rope in pairs": lambda w: (
        lambda row, b, h, i, d: (
            row[d] * torch.cos(w[i] * d) + row[d ^ 1] * torch.sin(w[i]) * (2 * (d & 1) - 1)
        )
    ),
    "norm": lambda w: lambda row, b, h, i, d: row[d] * torch.rsqrt(row.square().sum() / 8 + 0.1) * w[d],
    "scale": lambda w: lambda row, b, h, i, d: row[d] * w[d],
    "sums": lambda w: lambda row, b, h, i, d: torch.tanh(row[d] * w[h]) + row[(d + 3) % 8] * row[0] * w[d],
    "any": lambda w: (
        lambda row, b, h, i, d: (
            torch.sigmoid(row[d // 2] + row[7 - d]) * (row**2).sum() * 0.2 + torch.exp(w[d]) * row[d]
        )
    ),
}


@pytest.mark.filterwarnings("ignore:Input #")  # in float32
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradcheck(name):
    torch.manual_seed(1)
    q, k, v, of_q, of_k = (
        torch.randn(size, device=DEVICE).requires_grad_()
        for size in ((1, 2, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8), (8,), (8,))
    )
    make = PROGRAMS[name]
    assert torch.autograd.gradcheck(
        lambda q, k, v, of_q, of_k: flashjit.attention(q, k, v, q_mod=make(of_q), k_mod=make(of_k)),
        (q, k, v, of_q, of_k),
        eps=1e-2,
        atol=1e-2,
        rtol=1e-2,
        nondet_tol=1e-5,
    )


def test_a_traced_program_and_compiled_code():
    *qkv, dout = tensors()
    q, k, v = (x.requires_grad_() for x in qkv)
    cos, sin = (f(angles(61)).to(DEVICE) for f in (torch.cos, torch.sin))
    turn = rope_halves(cos, sin)
    program = flashjit.trace(q_mod=turn, k_mod=turn)
    want = flashjit.attention(q, k, v, q_mod=turn, k_mod=turn)
    torch.testing.assert_close(flashjit.attention(q, k, v, q_mod=program), want)
    compiled = torch.compile(
        lambda q, k, v: flashjit.attention(q, k, v, q_mod=turn, k_mod=turn), fullgraph=True
    )
    got = compiled(q, k, v)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
        torch.testing.assert_close(g, w)


def test_arrays():
    if DEVICE == "cuda":
        pytest.skip("arrays of the CPU")
    *qkv, dout = (x.numpy() for x in tensors())
    options = "causal:q_mod{element * 2.0}:k_mod{element_at(column ^ 1)}"
    out, lse = flashjit.forward(*qkv, options=options)
    q, k, v = (torch.from_numpy(x).double().requires_grad_() for x in qkv)
    want = exact(q * 2, k.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), v, True)
    torch.testing.assert_close(torch.from_numpy(out).double(), want, rtol=1e-4, atol=1e-4)
    grads = flashjit.backward(*qkv, out, lse, dout, options=options)
    for g, w in zip(grads, torch.autograd.grad(want, (q, k, v), torch.from_numpy(dout).double())):
        torch.testing.assert_close(torch.from_numpy(g).double(), w, rtol=1e-4, atol=2e-4)


def test_nan_is_seen():
    q, k, v, _ = tensors()
    q[0, 0, 3, 0] = torch.nan
    norm = lambda row, b, h, i, d: row[d] * torch.rsqrt(row.square().sum() / DIM)
    out = flashjit.attention(q, k, v, q_mod=norm)
    assert out[0, 0, 3].isnan().all() and not out[0, 0, 4].isnan().any()


@pytest.mark.parametrize(
    "mod, says",
    [
        (lambda row, b, h, i, d: row[-1], "is indexed with -1: give a column"),
        (lambda row, b, h, i, d: row[:4], "give a column"),
        (lambda row, b, h, i, d: row * 2, "is used as a whole: index it by columns"),
        (lambda row, b, h, i, d: row.softmax(0), "is used as a whole"),
        (lambda row, b, h, i, d: row.square().mean(), r"divide row.square\(\).sum\(\) by head_dim"),
        (lambda row, b, h, i: row[0], r"a q_mod is called as q_mod\(row, b, h, q_idx, column\)"),
        ("element + kv", "a q_mod program reads kv; its position is q"),
        (3, r"q_mod is a int: give a function q_mod\(row, b, h, q_idx, column\) or text"),
    ],
)
def test_refusals(mod, says):
    q, k, v, _ = tensors()
    with pytest.raises(flashjit.Error, match=says):
        flashjit.attention(q, k, v, q_mod=mod)


def test_other_derivatives_are_refused():
    q, k, v, _ = tensors()
    attend = lambda x: flashjit.attention(x, k, v, q_mod="element * 2.0").sum()
    with pytest.raises(flashjit.Error, match="no forward-mode derivative .*q_mod is set"):
        torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    q.requires_grad_()
    (grad,) = torch.autograd.grad(attend(q), q, create_graph=True)
    with pytest.raises(flashjit.Error, match="no second derivative .*q_mod is set"):
        torch.autograd.grad(grad.sum(), q)

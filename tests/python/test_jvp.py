"""Forward-mode derivatives of attention() on the CPU path, against PyTorch's math path in fp64."""

import flashjit
import pytest
import test_library

torch = pytest.importorskip("torch")
import flashjit.torch  # noqa: E402
from flashjit._tangents import JvpArgs, _read_tangent, declared_with_grad  # noqa: E402
from flashjit.flex_attention import flex_attention  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

SIZES = {"plain": (2, 4, 2, 13, 17), "one": (1, 2, 2, 1, 9), "square": (2, 2, 1, 16, 16)}


def inputs(sizes, dim=16, dim_v=8, dtype=torch.float32, seed=0):
    """Q, K, V and their tangents."""
    torch.manual_seed(seed)
    batch, heads_q, heads_kv, queries, keys = sizes
    shapes = ((batch, heads_q, queries, dim), (batch, heads_kv, keys, dim), (batch, heads_kv, keys, dim_v))
    return tuple(tuple(torch.randn(shape, dtype=dtype) for shape in shapes) for _ in range(2))


def math(q, k, v, score=None, mask=None, sinks=None, scale=None):
    """O and LSE by plain operations; score(s, b, h, q, kv) and mask(b, h, q, kv) get tensors of indices."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    index = torch.meshgrid(*[torch.arange(n) for n in s.shape], indexing="ij")
    if score is not None:
        s = score(s, *index)
    if mask is not None:
        s = s.masked_fill(~mask(*index), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    p = (s - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
    return p[..., : v.shape[2]] @ v, lse


def wide(tensors):
    return tuple(x.double() for x in tensors)


def check(got, wanted, tolerance=2e-5):
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


PROGRAMS = {
    "plain": (None, None),
    "softcap": (lambda s, b, h, q, kv: 3.0 * torch.tanh(s / 3.0), None),
    "square": (lambda s, b, h, q, kv: s * s * 0.3 + h, None),
    "causal": (None, lambda b, h, q, kv: q >= kv),
    "window": (lambda s, b, h, q, kv: s + 0.1 * (kv - q), lambda b, h, q, kv: (q >= kv) & (q - kv < 4)),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_jvp_is_that_of_the_math_path(name, sizes):
    score, mask = PROGRAMS[name]
    primals, tangents = inputs(SIZES[sizes])
    ours = lambda q, k, v: flashjit.attention(q, k, v, score_mod=score, mask_mod=mask, return_lse=True)
    out, tangent = torch.func.jvp(ours, primals, tangents)
    wanted = torch.func.jvp(lambda *x: math(*x, score=score, mask=mask), wide(primals), wide(tangents))
    check((*out, *tangent), (*wanted[0], *wanted[1]))


def test_dual_numbers():
    primals, tangents = inputs(SIZES["plain"])
    with forward_ad.dual_level():
        q, k, v = map(forward_ad.make_dual, primals, tangents)
        out = forward_ad.unpack_dual(flashjit.attention(q, k, v))
        alone = forward_ad.unpack_dual(flashjit.attention(q, primals[1], primals[2]))
    zero = tuple(torch.zeros_like(x) for x in tangents)
    wanted = torch.func.jvp(lambda *x: math(*x)[0], wide(primals), wide(tangents))
    of_q = torch.func.jvp(lambda *x: math(*x)[0], wide(primals), wide((tangents[0], *zero[1:])))
    check((*out, *alone), (*wanted, *of_q))


def test_jacfwd_is_jacrev():
    (q, k, v), _ = inputs((1, 2, 1, 3, 4), dim=8)
    for place in range(3):
        forward = torch.func.jacfwd(flashjit.attention, argnums=place)(q, k, v)
        torch.testing.assert_close(
            forward, torch.func.jacrev(flashjit.attention, argnums=place)(q, k, v), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_tensors_and_sinks_have_tangents(dtype):
    primals, tangents = inputs(SIZES["plain"], dtype=dtype)
    batch, heads, _, queries, keys = SIZES["plain"]
    captured = (torch.randn(heads, keys, dtype=dtype), torch.randn(queries, keys), torch.randn(heads))
    dcaptured = tuple(torch.randn_like(x) for x in captured)

    def score(gate, bias):
        return lambda s, b, h, q, kv: s * torch.sigmoid(gate[h, kv]) + bias[q, kv]

    def ours(q, k, v, gate, bias, sinks):
        return flashjit.attention(
            q, k, v, score_mod=score(gate, bias), sinks=sinks, causal="top_left", return_lse=True
        )

    def plain(q, k, v, gate, bias, sinks):
        return math(q, k, v, score(gate, bias), lambda b, h, q, kv: q >= kv, sinks)

    got = torch.func.jvp(ours, (*primals, *captured), (*tangents, *dcaptured))
    wanted = torch.func.jvp(plain, wide((*primals, *captured)), wide((*tangents, *dcaptured)))
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    check((*got[0], *got[1]), (*wanted[0], *wanted[1]), tolerance)
    # The tangent of one captured tensor alone.
    of_bias = torch.func.jvp(
        lambda x: ours(*primals, captured[0], x, captured[2]), (captured[1],), (dcaptured[1],)
    )
    wanted = torch.func.jvp(
        lambda x: plain(*wide((*primals, captured[0])), x, captured[2].double()),
        wide(captured[1:2]),
        wide(dcaptured[1:2]),
    )
    check(of_bias[1], wanted[1], tolerance)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("kind", ["grad", "jvp", "jvp of grad", "grad of jvp"])
def test_a_learned_scale_is_differentiated(kind, shape):
    """A number as a tensor: one without dimensions, or an element that the score reads at a constant index."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, 7, 7))
    scale, ones = torch.full(shape, 0.3), torch.ones(shape)
    number = lambda scale: scale[0] if shape else scale

    def ours(scale):
        return flashjit.attention(
            q, k, v, scale=1.0, score_mod=lambda score, b, h, i, j: score * number(scale)
        )

    plain = lambda scale: (q.double() @ k.double().mT * number(scale)).softmax(-1) @ v.double()

    def derivative(attend, scale, ones):
        loss = lambda scale: attend(scale).square().sum()
        tangent = lambda scale: torch.func.jvp(attend, (scale,), (ones,))[1]
        if kind == "grad":
            return torch.func.grad(loss)(scale)
        if kind == "jvp":
            return tangent(scale)
        if kind == "jvp of grad":
            return torch.func.jvp(torch.func.grad(loss), (scale,), (ones,))[1]
        return torch.func.grad(lambda scale: tangent(scale).square().sum())(scale)

    got, wanted = (derivative(*of) for of in ((ours, scale, ones), (plain, scale.double(), ones.double())))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_the_result_beside_a_tangent_has_gradients_of_captured_tensors():
    """A loss of jvp's first result, as MeanFlow's, reaches a bias that has a tangent: jvp's wrapper says that it needs no gradient."""
    (q, k, v), _ = inputs(SIZES["square"])
    bias = torch.randn(2, 16)

    def gradient(attend, q, k, v, bias):
        def loss(q, bias):
            (out, lse), (tangent, _) = torch.func.jvp(
                lambda q, bias: attend(q, k, v, bias), (q, bias), (q.detach(), bias.detach())
            )
            return (out - tangent.detach()).square().sum() + lse.sin().sum()

        return torch.func.grad(loss, (0, 1))(q, bias)

    score = lambda bias: lambda s, b, h, q, kv: s + bias[h, kv]
    ours = lambda q, k, v, bias: flashjit.attention(q, k, v, score_mod=score(bias), return_lse=True)
    plain = lambda q, k, v, bias: math(q, k, v, score=score(bias))
    check(gradient(ours, q, k, v, bias), gradient(plain, *wide((q, k, v, bias))), 2e-4)


def test_packed_sequences():
    (q, k, v), (dq, dk, dv) = inputs((1, 4, 2, 12, 14))
    cu_q, cu_kv = (
        torch.tensor([0, 5, 5, 10], dtype=torch.int32),
        torch.tensor([0, 3, 7, 13], dtype=torch.int32),
    )

    def ours(q, k, v):
        return flashjit.attention(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            max_seqlen_q=5,
            max_seqlen_kv=6,
            causal=True,
            return_lse=True,
        )

    (out, lse), (tangent, lse_tangent) = torch.func.jvp(ours, (q, k, v), (dq, dk, dv))
    plain = ours(q, k, v)
    torch.testing.assert_close((out, lse), plain)
    assert lse_tangent.shape == lse.shape
    lse_difference = []
    for i in range(3):
        rows, keys = slice(*cu_q[i : i + 2].tolist()), slice(*cu_kv[i : i + 2].tolist())
        shift = (keys.stop - keys.start) - (rows.stop - rows.start)
        part = lambda q, k, v: (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        wanted, dwanted = torch.func.jvp(
            lambda *x: math(*x, mask=lambda b, h, q, kv: q + shift >= kv),
            wide(part(q, k, v)),
            wide(part(dq, dk, dv)),
        )
        check((out[:, :, rows], tangent[:, :, rows]), (wanted[0], dwanted[0]))
        lse_difference.append(torch.where(wanted[1].isinf(), 0.0, dwanted[1]))
    assert (tangent[:, :, 10:] == 0).all()
    # LSE's rows are those of LSE itself, whose layout the call's other tests hold.
    assert torch.isclose(
        lse_tangent[lse.isfinite()].sum().double(), torch.cat(lse_difference, 2).sum(), atol=1e-4
    )


def test_dropout_has_the_same_mask():
    primals, tangents = inputs(SIZES["plain"])

    def ours(*qkv):
        torch.manual_seed(3)
        return flashjit.attention(*qkv, dropout_p=0.4)

    out, tangent = torch.func.jvp(ours, primals, tangents, strict=False)
    torch.testing.assert_close(out, ours(*primals))
    step = 1e-2
    move = lambda sign: [x + sign * step * t for x, t in zip(primals, tangents)]
    difference = (ours(*move(1)) - ours(*move(-1))) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-2, atol=2e-3)


def test_drop_ins():
    primals, tangents = inputs((2, 2, 2, 16, 16), dim_v=16)
    wanted = torch.func.jvp(
        lambda *x: math(*x, mask=lambda b, h, q, kv: q >= kv)[0], wide(primals), wide(tangents)
    )
    sdpa = lambda *x: flashjit.torch.scaled_dot_product_attention(*x, is_causal=True)
    check(torch.func.jvp(sdpa, primals, tangents), wanted)
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 16, 16, device="cpu")
    check(torch.func.jvp(lambda *x: flex_attention(*x, block_mask=blocks), primals, tangents), wanted)


def test_rows_without_keys_and_nan():
    (q, k, v), (dq, dk, dv) = inputs((1, 1, 1, 4, 4), dim=8)
    masked = lambda *x: flashjit.attention(*x, mask_mod=lambda b, h, q, kv: q > kv, return_lse=True)
    _, (tangent, lse_tangent) = torch.func.jvp(masked, (q, k, v), (dq, dk, dv))
    assert (tangent[0, 0, 0] == 0).all() and lse_tangent[0, 0, 0] == 0 and not tangent.isnan().any()
    dk[0, 0, 1] = torch.nan
    _, (tangent, _) = torch.func.jvp(masked, (q, k, v), (dq, dk, dv))
    assert tangent.isnan().all(-1).tolist() == [[[False, False, True, True]]]


def test_what_has_no_tangent_is_refused():
    (q, k, v), (dq, dk, dv) = inputs((1, 2, 1, 3, 4), dim=8)
    indices = torch.zeros(1, 3, 1, 2, dtype=torch.int32)
    with pytest.raises(flashjit.Unsupported, match="no forward-mode derivative .*indices is set"):
        torch.func.jvp(lambda q: flashjit.attention(q, k, v, indices=indices), (q,), (dq,))
    lengths = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(flashjit.Unsupported, match="a cache is set; tangents are for K and V as tensors"):
        torch.func.jvp(lambda q: flashjit.attention(q, k, v, cache=True, kv_lengths=lengths), (q,), (dq,))
    codes = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    (q, k, v), (dq, _, _) = inputs((1, 2, 1, 3, 4), dim=16)
    k8 = k.to(torch.float8_e4m3fn)
    with pytest.raises(flashjit.Unsupported, match="no forward-mode derivative .*quantized K and V is set"):
        torch.func.jvp(lambda q: flashjit.attention(q, k8, k8, **codes), (q,), (dq,))


def test_the_struct_has_the_layout_of_the_header(tmp_path, monkeypatch):
    monkeypatch.setattr(test_library, "STRUCTS", {"flashjit_jvp_args": JvpArgs})
    test_library.test_structs_have_the_layout_of_the_header(tmp_path)


def test_a_tangent_that_repeats_a_row_is_copied():
    q = torch.randn(2, 3, 5, 16)
    of_rows, of_heads = (torch.randn(size).expand_as(q) for size in ((2, 3, 1, 16), (1, 1, 5, 16)))
    read = _read_tangent("the tangent of q", of_rows, q)
    assert read.stride(2) > 0 and torch.equal(read, of_rows)
    assert _read_tangent("the tangent of q", of_heads, q) is of_heads


def test_captured_tensors_with_tangents_are_declared_so():
    options = ":score{a: fp32 1d; b: bf16 2d grad; score + a[h] + b[q, kv]}:mask{a: fp32 1d; a[q] > 0.0}:det"
    assert declared_with_grad(options, ["a", "b"]) == options.replace("a: fp32 1d; b", "a: fp32 1d grad; b")
    assert declared_with_grad(":causal", ["a"]) == ":causal"


class Net(torch.nn.Module):
    """A velocity of (x, r, t), as MeanFlow's: attention between two layers."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.enter, self.leave = attend, torch.nn.Linear(6, 48), torch.nn.Linear(16, 4)

    def forward(self, x, r, t):
        times = torch.stack([r, t], -1)[:, None].expand(-1, x.shape[1], -1)
        q, k, v = self.enter(torch.cat([x, times], -1)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.leave(self.attend(q, k, v).transpose(1, 2).flatten(2))


def flow_losses(attend, dtype, steps, lr, loss_of):
    """Losses of a training by u and its derivative along its flow: loss_of(u, (t - r) du, velocity)."""
    torch.manual_seed(1)
    net = Net(attend).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        data, noise = (torch.randn(4, 7, 4).to(dtype) for _ in range(2))
        r, t = torch.rand(2, 4).to(dtype).sort(0).values
        velocity = noise - data
        z = data + t[:, None, None] * velocity
        u, du = torch.func.jvp(net, (z, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t)))
        loss = loss_of(u, (t - r)[:, None, None] * du, velocity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_flow_losses(attend, dtype, steps=50):
    """Losses of a training whose target is u's derivative along its flow, detached (MeanFlow, arXiv:2505.13447)."""
    loss_of = lambda u, change, velocity: (u - (velocity - change).detach()).square().mean()
    return flow_losses(attend, dtype, steps, 0.2, loss_of)


@pytest.mark.slow
def test_mean_flow_trains_as_the_math_path_does():
    ours = mean_flow_losses(flashjit.attention, torch.float32)
    wanted = mean_flow_losses(lambda *x: math(*x)[0], torch.float64)
    assert ours[-1] < ours[0]
    torch.testing.assert_close(
        torch.tensor(ours), torch.tensor(wanted), rtol=1e-4, atol=1e-5, check_dtype=False
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", ["attention", "merge"])
def test_compiled_functions_keep_tangents(backend, function):
    """The graph breaks at the call, whose tangents PyTorch computes outside of it."""
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    lses = torch.randn(2, 1, 2, 5)

    def attend(q):
        if function == "attention":
            return flashjit.attention(q, k, v).sin().sum()
        return flashjit.merge([(q, lses[0]), (v, lses[1])])[0].sin().sum()

    wanted = torch.func.jvp(attend, (q,), (k,))[1]
    assert wanted != 0
    torch._dynamo.reset()
    with forward_ad.dual_level():
        out = torch.compile(attend, backend=backend)(forward_ad.make_dual(q, k))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, wanted)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: torch.func.jvp(attend, (q,), (k,))[1], backend=backend)
    torch.testing.assert_close(compiled(q), wanted)
    torch._dynamo.reset()
    with (
        forward_ad.dual_level(),
        pytest.raises(Exception, match="forward-mode|Observed exception"),  # or PyTorch says so itself
    ):
        torch.compile(attend, backend=backend, fullgraph=True)(forward_ad.make_dual(q, k))
    torch._dynamo.reset()

"""Second derivatives of attention() on the CPU path, against PyTorch's math path in fp64."""

import flashjit
import pytest
import test_library
from test_jvp import PROGRAMS, SIZES, check, flow_losses, inputs, math, wide

torch = pytest.importorskip("torch")
import flashjit.torch  # noqa: E402
from flashjit._tangents import BackwardJvpArgs  # noqa: E402
from flashjit.flex_attention import flex_attention  # noqa: E402


def double_gradients(function, tensors, weights):
    """Gradients of <weights, gradients of a loss of O and LSE>."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*tensors)
    loss = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    return torch.autograd.grad(sum((g * w).sum() for g, w in zip(grads, weights)), tensors)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_double_backward_is_that_of_the_math_path(name, sizes):
    score, mask = PROGRAMS[name]
    tensors, weights = inputs(SIZES[sizes])
    ours = lambda q, k, v: flashjit.attention(q, k, v, score_mod=score, mask_mod=mask, return_lse=True)
    wanted = double_gradients(lambda *x: math(*x, score=score, mask=mask), wide(tensors), wide(weights))
    check(double_gradients(ours, tensors, weights), wanted, 1e-4)


@pytest.mark.parametrize("kind", ["grad of grad", "jvp of grad", "grad of jvp", "hessian"])
def test_every_order_of_modes_gives_the_hessian(kind):
    (q, k, v), (t, _, _) = inputs((1, 2, 1, 3, 4), dim=8)

    def product(attend, q, k, v, t):
        loss = lambda q: attend(q, k, v).square().sum()
        if kind == "grad of grad":
            return torch.func.grad(lambda q: (torch.func.grad(loss)(q) * t).sum())(q)
        if kind == "jvp of grad":
            return torch.func.jvp(torch.func.grad(loss), (q,), (t,))[1]
        if kind == "grad of jvp":
            return torch.func.grad(lambda q: torch.func.jvp(loss, (q,), (t,))[1])(q)
        return torch.func.hessian(loss)(q)

    got = product(lambda *x: flashjit.attention(*x, causal="top_left"), q, k, v, t)
    wanted = product(lambda *x: math(*x, mask=lambda b, h, q, kv: q >= kv)[0], *wide((q, k, v, t)))
    check([got], [wanted], 1e-4)


def test_gradients_of_captured_tensors_and_sinks():
    tensors, weights = inputs(SIZES["plain"])
    _, heads, _, queries, keys = SIZES["plain"]
    extra = (torch.randn(heads, keys), torch.randn(queries, keys), torch.randn(heads))
    weights += tuple(torch.randn_like(x) for x in extra)
    score = lambda gate, bias: lambda s, b, h, q, kv: s * torch.sigmoid(gate[h, kv]) + bias[q, kv] * s.sin()

    def ours(q, k, v, gate, bias, sinks):
        return flashjit.attention(
            q, k, v, score_mod=score(gate, bias), sinks=sinks, causal="top_left", return_lse=True
        )

    def plain(q, k, v, gate, bias, sinks):
        return math(q, k, v, score(gate, bias), lambda b, h, q, kv: q >= kv, sinks)

    tensors = (*tensors, *extra)
    wanted = double_gradients(plain, wide(tensors), wide(weights))
    check(double_gradients(ours, tensors, weights), wanted, 2e-4)
    # By a tangent of some of the captured tensors, of which others have gradients.
    loss = lambda function: (
        lambda gate, sinks: torch.func.jvp(
            lambda q, bias: function(q, *tensors_of(function)[1:3], gate, bias, sinks)[0].square().sum(),
            (tensors_of(function)[0], tensors_of(function)[4]),
            (tensors_of(function, weights)[0], tensors_of(function, weights)[4]),
        )[1]
    )
    tensors_of = lambda function, given=tensors: given if function is ours else wide(given)
    got = torch.func.grad(loss(ours), (0, 1))(extra[0], extra[2])
    check(got, torch.func.grad(loss(plain), (0, 1))(*wide((extra[0], extra[2]))), 2e-4)


def test_packed_sequences():
    (q, k, v), weights = inputs((1, 4, 2, 12, 14))
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 10], [0, 3, 7, 13])]

    def ours(q, k, v):
        cu_q, cu_kv = offsets
        sizes = dict(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=5, max_seqlen_kv=6)
        return flashjit.attention(q, k, v, **sizes, causal=True, return_lse=True)

    def plain(q, k, v):
        outs, lses = [], []
        for i in range(3):
            rows, keys = (slice(*x[i : i + 2].tolist()) for x in offsets)
            shift = (keys.stop - keys.start) - (rows.stop - rows.start)
            out, lse = math(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=lambda b, h, q, kv: q + shift >= kv
            )
            outs.append(out), lses.append(lse)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    got = double_gradients(ours, (q, k, v), weights)
    check(got, double_gradients(plain, wide((q, k, v)), wide(weights)), 1e-4)


def test_dropout_has_the_same_mask():
    tensors, weights = inputs(SIZES["plain"])

    def gradients(*qkv):
        qkv = [x.detach().requires_grad_() for x in qkv]
        torch.manual_seed(3)
        loss = flashjit.attention(*qkv, dropout_p=0.4).square().sum()
        return qkv, torch.autograd.grad(loss, qkv, create_graph=True)

    qkv, grads = gradients(*tensors)
    second = torch.autograd.grad(sum((g * w).sum() for g, w in zip(grads, weights)), qkv)
    step = 1e-2
    move = lambda sign: gradients(*[x + sign * step * w for x, w in zip(tensors, weights)])[1]
    for got, after, before in zip(second, move(1), move(-1)):
        torch.testing.assert_close(got, (after - before) / (2 * step), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    tensors, weights = inputs(SIZES["plain"], dtype=dtype)
    ours = lambda *x: flashjit.attention(*x, return_lse=True)
    got = double_gradients(ours, tensors, weights)
    wanted = double_gradients(lambda *x: math(*x), wide(tensors), wide(weights))
    for x, y in zip(got, wanted):
        assert (x.double() - y).abs().max() < {torch.bfloat16: 4e-2, torch.float16: 6e-3}[
            dtype
        ] * y.abs().max()


@pytest.mark.filterwarnings("ignore:Input #")  # that it is not float64
def test_gradgradcheck():
    tensors = [x.requires_grad_() for x in inputs((1, 2, 1, 3, 4), dim=8)[0]]
    call = lambda *x: flashjit.attention(*x, score_mod=lambda s, b, h, q, kv: 3.0 * torch.tanh(s / 3.0))
    torch.autograd.gradcheck(call, tensors, eps=1e-2, atol=2e-2, rtol=2e-2)
    torch.autograd.gradgradcheck(call, tensors, eps=1e-2, atol=2e-2, rtol=2e-2)


def test_drop_ins():
    tensors, weights = inputs((2, 2, 2, 16, 16), dim_v=16)
    lse_of = lambda x: (x, torch.zeros(1, dtype=x.dtype))
    wanted = double_gradients(
        lambda *x: lse_of(math(*x, mask=lambda b, h, q, kv: q >= kv)[0]), wide(tensors), wide(weights)
    )
    sdpa = lambda *x: lse_of(flashjit.torch.scaled_dot_product_attention(*x, is_causal=True))
    check(double_gradients(sdpa, tensors, weights), wanted, 1e-4)
    plain = double_gradients(lambda *x: lse_of(math(*x)[0]), wide(tensors), wide(weights))
    check(double_gradients(lambda *x: lse_of(flex_attention(*x)), tensors, weights), plain, 1e-4)


def test_vmap_of_hessian_products():
    (q, k, v), (t, _, _) = inputs((2, 2, 1, 3, 4), dim=8)
    loss = lambda q, k, v: flashjit.attention(q[None], k[None], v[None]).square().sum()
    product = lambda q, k, v, t: torch.func.jvp(lambda q: torch.func.grad(loss)(q, k, v), (q,), (t,))[1]
    got = torch.func.vmap(product)(q, k, v, t)
    torch.testing.assert_close(got, torch.stack([product(*x) for x in zip(q, k, v, t)]))


def test_what_depends_on_a_part_alone():
    (q, k, v), (t, _, _) = inputs((1, 2, 1, 3, 4), dim=8)
    q.requires_grad_()
    dout = torch.randn(1, 2, 3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(flashjit.attention(q, k, v), q, dout, create_graph=True)
    of_dout, of_q = torch.autograd.grad((grad * t).sum(), (dout, q))
    _, tangent = torch.func.jvp(lambda q: flashjit.attention(q, k, v), (q.detach(),), (t,))
    torch.testing.assert_close(of_dout, tangent)
    step = 1e-2
    slope = lambda sign: torch.func.vjp(lambda q: flashjit.attention(q, k, v), q.detach() + sign * step * t)[
        1
    ](dout.detach())[0]
    torch.testing.assert_close(of_q, (slope(1) - slope(-1)) / (2 * step), rtol=1e-2, atol=1e-2)


def test_third_derivatives_and_tangents_of_tangents_are_refused():
    (q, k, v), (t, _, _) = inputs((1, 2, 1, 3, 4), dim=8)
    loss = lambda q: flashjit.attention(q, k, v).square().sum()
    product = lambda q: torch.func.jvp(torch.func.grad(loss), (q,), (t,))[1].sum()
    with pytest.raises(flashjit.Unsupported, match="no third derivative"):
        torch.func.grad(product)(q)
    says = "no third derivative, which torch.autograd.functional.hvp asks for.*: .* torch.autograd.functional.vhp, or torch.func.jvp"
    with pytest.raises(flashjit.Unsupported, match=says):
        torch.autograd.functional.hvp(loss, q, t)
    wanted = torch.func.jvp(torch.func.grad(loss), (q,), (t,))[1]
    torch.testing.assert_close(torch.autograd.functional.vhp(loss, q, t)[1], wanted)
    tangent = lambda q: torch.func.jvp(loss, (q,), (t,))[1]
    with pytest.raises(flashjit.Unsupported, match="no tangent of a tangent"):
        torch.func.jvp(tangent, (q,), (t,))


@pytest.mark.parametrize("name", ["out_mod", "q_mod", "k_mod", "weight_mod", "indices"])
def test_what_has_no_second_derivative_is_refused(name):
    """In the words of the call: what it is given, the derivative that is not there, and another way."""
    (q, k, v), (t, _, _) = inputs((1, 2, 1, 3, 4), dim=8)
    of_elements = {"out_mod": "out * out", "weight_mod": "score * score"}.get(name, "element * 2.0")
    given = {name: torch.zeros(1, 3, 1, 2, dtype=torch.int32) if name == "indices" else of_elements}
    attend = lambda q: flashjit.attention(q, k, v, **given)
    with pytest.raises(
        flashjit.Unsupported, match=f"no forward-mode derivative .*: .*{name} is set.*leave it out"
    ):
        torch.func.jvp(attend, (q,), (t,))
    with pytest.raises(flashjit.Unsupported, match=f"no forward-mode derivative .*: .*{name} is set"):
        torch.func.jvp(torch.func.grad(lambda q: attend(q).sum()), (q,), (t,))
    q.requires_grad_()
    (grad,) = torch.autograd.grad(attend(q).sum(), q, create_graph=True)
    with pytest.raises(flashjit.Unsupported, match=f"no second derivative .*: .*{name} is set.*leave it out"):
        grad.sum().backward()


def test_row_maxima_leave_second_derivatives_as_they_are():
    (q, k, v), (t, _, _) = inputs((1, 2, 1, 3, 4), dim=8)
    q.requires_grad_()
    seconds = []
    for given in ({}, {"return_row_max": True}):
        made = flashjit.attention(q, k, v, causal=True, **given)
        out = made[0] if given else made
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        seconds.append(torch.autograd.grad((grad * t).sum(), q)[0])
    assert torch.equal(*seconds)


def test_programs_that_name_what_is_refused_are_not():
    (q, k, v), (t, _, _) = inputs((1, 2, 1, 3, 4), dim=8)
    given = dict(score_mod="indices: fp32 1d; score + indices[h]", captures={"indices": torch.randn(2)})
    torch.func.jvp(lambda q: flashjit.attention(q, k, v, **given), (q,), (t,))


def test_the_struct_has_the_layout_of_the_header(tmp_path, monkeypatch):
    monkeypatch.setattr(test_library, "STRUCTS", {"flashjit_backward_jvp_args": BackwardJvpArgs})
    test_library.test_structs_have_the_layout_of_the_header(tmp_path)


def losses_with_tangents(attend, dtype, steps=50):
    """Losses of a training whose loss contains u's derivative along its flow, without detach()."""
    loss_of = lambda u, change, velocity: (u + change - velocity).square().mean()
    return flow_losses(attend, dtype, steps, 0.05, loss_of)


def losses_of_a_transport(attend, dtype, steps=50):
    """Losses of a physics-informed training, u_t + 2 u_x = 0 with u(x, 0) = sin(x): a network whose tokens are times of one place
    (PINNsFormer, arXiv:2307.11833), and whose loss has gradients of u."""
    torch.manual_seed(1)
    enter, leave = (torch.nn.Linear(*n).to(dtype) for n in ((2, 48), (16, 1)))
    parameters = [*enter.parameters(), *leave.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    x = torch.linspace(0, 6, 8).to(dtype)[:, None].repeat(1, 5).requires_grad_()
    t = torch.linspace(0, 1, 5).to(dtype)[None].repeat(8, 1).requires_grad_()
    losses = []
    for _ in range(steps):
        tokens = torch.stack([x, t], -1)
        q, k, v = enter(tokens).sin().unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        u = leave(attend(q, k, v).transpose(1, 2).flatten(2))[..., 0]
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        loss = (u_t + 2 * u_x).square().mean() + (u[:, 0] - x[:, 0].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward(inputs=parameters)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("losses", [losses_with_tangents, losses_of_a_transport])
def test_derivatives_within_a_loss_train_as_the_math_path_does(losses):
    ours = losses(flashjit.attention, torch.float32)
    wanted = losses(lambda *x: math(*x)[0], torch.float64)
    assert ours[-1] < ours[0]
    torch.testing.assert_close(
        torch.tensor(ours), torch.tensor(wanted), rtol=1e-3, atol=1e-4, check_dtype=False
    )

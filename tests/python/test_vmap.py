"""torch.vmap over attention() and its derivatives, on the GPU where there is one: what a call for each entry gives."""

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from element_programs import DEVICE  # noqa: E402

COUNT, BATCH, HEADS, QUERIES, KEYS, DIM = 3, 2, 2, 3, 4, 8
PLACES = (0, 1, 2)


def inputs(count=COUNT, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(count, BATCH, HEADS, n, DIM, device=DEVICE) for n in (QUERIES, KEYS, KEYS)]


def one_by_one(function, in_dims, *tensors):
    size = next(x.shape[dim] for x, dim in zip(tensors, in_dims) if dim is not None)
    each = [
        function(*[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims)])
        for i in range(size)
    ]
    leaves = [torch.utils._pytree.tree_leaves(made) for made in each]
    return [torch.stack(parts) for parts in zip(*leaves)]


def check(function, *tensors, in_dims=None):
    in_dims = in_dims or (0,) * len(tensors)
    got = torch.utils._pytree.tree_leaves(torch.func.vmap(function, in_dims)(*tensors))
    for x, y in zip(got, one_by_one(function, in_dims, *tensors), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def derivatives(attend, count=3):
    """By name, functions of so many tensors. Tangents are the tensors themselves."""
    loss = lambda *x: attend(*x).square().sum()
    places = tuple(range(count))
    gradients = torch.func.grad(loss, places)
    return {
        "forward": attend,
        "grad": gradients,
        "vjp": lambda *x: torch.func.vjp(attend, *x)[1](attend(*x)),
        "jvp": lambda *x: torch.func.jvp(attend, x, x)[1],
        "jacrev": torch.func.jacrev(attend, 0),
        "jacfwd": torch.func.jacfwd(attend, 0),
        "jvp of grad": lambda *x: torch.func.jvp(gradients, x, x)[1],
        "grad of grad": torch.func.grad(lambda *x: sum(g.sin().sum() for g in gradients(*x)), places),
        "grad of jvp": torch.func.grad(lambda *x: torch.func.jvp(loss, x, x)[1], places),
    }


KINDS = tuple(derivatives(lambda q, k, v: q))


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_a_score_that_tells_entries_apart(kind):
    attend = lambda q, k, v: flashjit.attention(
        q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s * (b + 1)
    )
    tensors = [x[:, :, :, :2] for x in inputs()] if "jac" in kind else inputs()
    check(derivatives(attend)[kind], *tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_a_captured_tensor_that_is_mapped(kind):
    """Over other dimensions than the first, and of what is not mapped."""

    def attend(slopes, q, k, v):
        return flashjit.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s * slopes[h]) * 2)

    q, k, v = inputs()
    slopes = torch.randn(HEADS, COUNT, device=DEVICE)
    check(derivatives(attend, 4)[kind], slopes, q.movedim(0, 2), k[0], v, in_dims=(1, 2, None, 0))


MODS = {
    "weight_mod": lambda w: lambda s, b, h, i, j: torch.sigmoid(s) * (b + 1) * w[h],
    "out_mod": lambda w: lambda out, b, h, i, d: torch.tanh(out * w[h]) * (b + 1),
    "q_mod": lambda w: lambda row, b, h, i, d: row[d] * w[h] * (b + 1),
    "k_mod": lambda w: lambda row, b, h, j, d: row[d ^ 1] * w[h] * torch.where(b == 0, 0.5, 2.0),
}


@pytest.mark.parametrize("kind", ["forward", "grad", "vjp"])
@pytest.mark.parametrize("stage", MODS)
@pytest.mark.parametrize("mapped", [False, True])
def test_programs_that_tell_entries_apart(mapped, stage, kind):
    w = torch.tensor([0.7, -1.2], device=DEVICE)
    if not mapped:
        attend = lambda q, k, v: flashjit.attention(q, k, v, **{stage: MODS[stage](w)})
        check(derivatives(attend)[kind], *inputs())
        return
    attend = lambda w, q, k, v: flashjit.attention(q, k, v, **{stage: MODS[stage](w)})
    check(derivatives(attend, 4)[kind], w * torch.randn(COUNT, 1, device=DEVICE), *inputs())


@pytest.mark.parametrize("stage", ["score_mod", *MODS])
def test_a_gradient_outside_of_vmap(stage):
    """As of an ensemble's parameters. vmap's wrappers of what programs read say that they need no gradient."""
    mods = {"score_mod": lambda w: lambda s, b, h, i, j: torch.tanh(s * w[h]), **MODS}
    attend = lambda w, q, k, v: flashjit.attention(q, k, v, **{stage: mods[stage](w)})
    tensors = [torch.randn(COUNT, 2, device=DEVICE), *inputs()]
    mapped = lambda *x: torch.func.vmap(attend)(*x).sin().sum()
    each = lambda *x: sum(attend(*parts).sin().sum() for parts in zip(*x))
    for got, wanted in zip(*[torch.func.grad(loss, (0, 1, 2, 3))(*tensors) for loss in (mapped, each)]):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["grad", "jvp", "dual numbers"])
def test_a_number_for_each_is_differentiated_outside_of_vmap(mode):
    tensors = [torch.randn(COUNT, device=DEVICE), *inputs()]

    def attend(s, q, k, v):
        return flashjit.attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.sin(score * s))

    def derivative(over):
        if mode == "grad":
            return torch.func.grad(lambda *x: over(*x).sin().sum())(*tensors)
        if mode == "jvp":
            return torch.func.jvp(over, (*tensors,), (*tensors,))[1]
        with torch.autograd.forward_ad.dual_level():
            made = over(*[torch.autograd.forward_ad.make_dual(x, x) for x in tensors])
            return torch.autograd.forward_ad.unpack_dual(made).tangent

    each = lambda *x: torch.stack([attend(*parts) for parts in zip(*x)])
    got, wanted = derivative(torch.func.vmap(attend)), derivative(each)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", MODS)
def test_what_has_no_tangent_is_refused_with_the_reason(stage):
    attend = lambda q, k, v: flashjit.attention(q, k, v, **{stage: MODS[stage](torch.ones(2, device=DEVICE))})
    for kind in ("jvp", "jacfwd", "jvp of grad", "grad of grad"):
        with pytest.raises(flashjit.Error, match=f"has no .* derivative.*{stage} is set"):
            torch.func.vmap(derivatives(attend)[kind])(*inputs())


@pytest.mark.parametrize("kind", ["forward", "grad", "jvp", "jvp of grad"])
def test_sinks_lse_and_packed_sequences(kind):
    q, k, v = (x[:, :1] for x in inputs())
    sinks = torch.randn(COUNT, HEADS, device=DEVICE)
    offsets = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1, 3], [0, 3, 4])]

    def attend(sinks, q, k, v):
        out, lse = flashjit.attention(
            q,
            k,
            v,
            sinks=sinks,
            cu_seqlens_q=offsets[0],
            cu_seqlens_kv=offsets[1],
            max_seqlen_q=2,
            max_seqlen_kv=3,
            return_lse=True,
        )
        return out * lse.sin()[..., None]

    check(derivatives(attend, 4)[kind], sinks, q, k, v)


def test_vmap_of_vmap_of_grad():
    q, k, v = (x.unflatten(0, (2, 2)) for x in inputs(4))
    loss = lambda q, k, v: flashjit.attention(q, k, v, causal=True).square().sum()
    gradients = torch.func.grad(loss, PLACES)
    got = torch.func.vmap(torch.func.vmap(gradients), (0, None, 0))(q, k[0], v)
    for i in range(2):
        for x, y in zip(got, one_by_one(gradients, (0, 0, 0), q[i], k[0], v[i])):
            torch.testing.assert_close(x[i], y)


def test_a_batch_without_elements_is_refused():
    with pytest.raises(flashjit.InvalidArgument, match="vmap's batch is empty"):
        torch.func.vmap(flashjit.attention)(*torch.randn(3, 0, 1, 2, 4, 16))


@pytest.mark.parametrize("kind", ["forward", "grad", "jvp"])
def test_dropout_has_no_mask_for_each(kind):
    attend = lambda *x: flashjit.attention(*x, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(derivatives(attend)[kind])(*inputs())


@pytest.mark.parametrize("second", [False, True])
def test_a_batch_of_vectors_is_refused_with_the_reason(second):
    """By PyTorch's former vmap, after a call of the same sizes."""
    q, k, v = (x[0].requires_grad_() for x in inputs())
    made = flashjit.attention(q, k, v)
    if second:
        made = torch.autograd.grad(made.square().sum(), q, create_graph=True)[0]
    torch.autograd.grad(made, q, torch.ones_like(made), retain_graph=True)
    with pytest.raises(flashjit.Unsupported, match="is_grads_batched=True .*: use torch.func.vmap"):
        torch.autograd.grad(made, q, torch.ones(COUNT, *made.shape, device=DEVICE), is_grads_batched=True)


def test_a_batch_of_tangents_is_refused_with_the_reason():
    """By the same vmap, which jacobian(strategy="forward-mode") calls."""
    q, k, v = (x[0] for x in inputs())
    with pytest.raises(
        flashjit.Unsupported, match="no derivatives for a batch of vectors at once.*: use torch.func.vmap"
    ):
        torch.autograd.functional.jacobian(
            lambda q: flashjit.attention(q, k, v), q, vectorize=True, strategy="forward-mode"
        )

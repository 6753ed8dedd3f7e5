"""merge() has derivatives of every order and mode: attention()'s over all keys."""

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from test_differentiated import DEVICE, TRANSFORMS, normal, seed, tensors, transforms  # noqa: E402, F401
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jvp, vmap  # noqa: E402


def in_parts(q, k, v, at=3, **options):
    """attention() of q over two parts of the keys, joined."""
    parts = [
        flashjit.attention(q, k[:, :, x], v[:, :, x], return_lse=True) for x in (slice(at), slice(at, None))
    ]
    return flashjit.merge(parts, **options)


@transforms
def test_merge_has_all_derivatives(name):
    q, k, v = tensors()
    weights, of_lse = normal(*q.shape), normal(*q.shape[:3])

    def loss(x, joined):
        q, k, v = x[:, :, :5].repeat_interleave(2, 1), x[:, :, 5:12], x[:, :, 12:]
        out, lse = in_parts(q, k, v) if joined else flashjit.attention(q, k, v, return_lse=True)
        return (out * weights).sum() + (lse * of_lse).sum()

    x = torch.cat((normal(2, 2, 5, 16), k, v), 2)
    found, wanted = (TRANSFORMS[name][0](lambda x: loss(x, joined), x) for joined in (True, False))
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_merge_has_second_derivatives_and_tangents():
    q, k, v = tensors()
    q, weights = q[:1, :, :2], normal(1, 4, 2, 16)
    k, v = k[:1], v[:1]
    joined = lambda x: (in_parts(x, k, v)[0] * weights).sum()
    whole = lambda x: (flashjit.attention(x, k, v) * weights).sum()
    torch.testing.assert_close(hessian(joined)(q), hessian(whole)(q), atol=2e-5, rtol=1e-4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, weights)
        found, wanted = (forward_ad.unpack_dual(f(dual)).tangent for f in (joined, whole))
    torch.testing.assert_close(found, wanted)


def test_merge_under_transforms_leaves_out_what_has_no_keys():
    out, lse = normal(2, 2, 3, 16), normal(2, 2, 3)
    empty, none = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    lse[0, 0, 0] = float("-inf")
    wanted = flashjit.merge([(out, lse), (empty, none)])
    assert wanted[1][0, 0, 0] == float("-inf") and (wanted[0][0, 0, 0] == 0).all()

    def joined(out, lse):
        return flashjit.merge([(out, lse), (empty, none)])

    torch.testing.assert_close(vmap(joined)(out[None], lse[None]), tuple(x[None] for x in wanted))
    found = grad(lambda *given: joined(*given)[0].sum(), (0, 1))(out, lse)
    assert all(x.isfinite().all() for x in found)
    assert (found[0][0, 0, 0] == 0).all() and (found[0][1] == 1).all()


@pytest.mark.parametrize("memory", ["out", "lse"])
def test_merge_refuses_the_caller_s_memory_under_transforms(memory):
    q, k, v = tensors()
    given = {memory: torch.empty((2, 4, 5, 16) if memory == "out" else (2, 4, 5), device=DEVICE)}
    for name in ("grad", "jvp", "vmap"):
        with pytest.raises(flashjit.Unsupported, match=f"{memory} is given with gradients"):
            TRANSFORMS[name][0](lambda x: in_parts(x, k, v, **given)[0].sum(), q)


def test_merge_pads_columns_under_transforms():
    out, other, lses = normal(2, 2, 3, 12), normal(2, 2, 3, 12), (normal(2, 2, 3), normal(2, 2, 3))
    joined = lambda x: flashjit.merge([(x * x, lses[0]), (other, lses[1])])[0].sin()
    leaf = out.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(joined(leaf).sum(), leaf)
    torch.testing.assert_close(grad(lambda x: joined(x).sum())(out), wanted)
    torch.testing.assert_close(jvp(lambda x: joined(x).sum(), (out,), (out,))[1], (wanted * out).sum())
    torch.testing.assert_close(vmap(joined)(out[None])[0], joined(out))


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap", "jvp of grad"])
def test_several_caches_have_the_derivatives_of_one(name):
    q, k, v = tensors()
    weights = normal(*q.shape)
    caches = [{"k": k[:, :, part], "v": v[:, :, part]} for part in (slice(3), slice(3, None))]
    found = TRANSFORMS[name][0](lambda q: (flashjit.attention_over(q, caches) * weights).sum(), q)
    wanted = TRANSFORMS[name][0](lambda q: (flashjit.attention(q, k, v) * weights).sum(), q)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)

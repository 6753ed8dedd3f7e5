"""What flashjit sees of torch.func's transforms and of forward mode where it has no derivative to give."""

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from flashjit._tensors import is_differentiated  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, jacfwd, jacrev, jvp, vmap  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*size):
    return torch.randn(*size, device=DEVICE)


def one():
    return torch.ones((), device=DEVICE)


#: Calls of f(x), a number, in each transform and in transforms of transforms, and whether x's gradient is asked for within f.
TRANSFORMS = {
    "grad": (lambda f, x: grad(f)(x), True),
    "jacrev": (lambda f, x: jacrev(f)(x), True),
    "jvp": (lambda f, x: jvp(f, (x,), (x,)), False),
    "jacfwd": (lambda f, x: jacfwd(f)(x), False),
    "vmap": (lambda f, x: vmap(f)(x[None]), False),
    "vmap of grad": (lambda f, x: vmap(grad(f))(x[None]), True),
    "grad of vmap": (lambda f, x: grad(lambda y: vmap(f)(y[None]).sum())(x), True),
    "jvp of grad": (lambda f, x: jvp(grad(f), (x,), (x,)), True),
    "grad of jvp": (lambda f, x: grad(lambda y: jvp(f, (y,), (x,))[1])(x), True),
    "grad of vmap of another": (
        lambda f, x: grad(lambda y: vmap(lambda z: f(y) * z)(one()[None]).sum())(x),
        True,
    ),
    "grad of jvp of another": (
        lambda f, x: grad(lambda y: jvp(lambda z: f(y) * z, (one(),), (one(),))[1])(x),
        True,
    ),
}
transforms = pytest.mark.parametrize("name", TRANSFORMS)


@transforms
def test_one_function_sees_through_all_transforms(name):
    transform, wanted = TRANSFORMS[name]
    seen, other = [], normal(2)

    def f(x):
        seen.append(is_differentiated(None, "a", other, x))
        return x.sum()

    transform(f, normal(3))
    assert set(seen) == {wanted}
    assert not is_differentiated(normal(3), None, 1.0)
    assert is_differentiated(None, normal(3).requires_grad_())


def test_a_tensor_beside_those_of_the_transform_is_not_differentiated():
    other, seen = normal(2), []
    grad(lambda x: (seen.append(is_differentiated(other)), x.sum())[1])(normal(3))
    assert seen == [False]


def tensors():
    return normal(2, 4, 5, 16), normal(2, 2, 7, 16), normal(2, 2, 7, 16)


@transforms
@pytest.mark.parametrize("place", range(3))
def test_a_bound_call_is_refused_what_a_transform_wraps(name, place):
    given = tensors()
    call = flashjit.bind(*given)
    wanted = call(*given)
    with pytest.raises(
        flashjit.Unsupported, match="a bound call reads memory, and a transform of torch.func"
    ):
        TRANSFORMS[name][0](lambda x: call(*given[:place], x, *given[place + 1 :]).sum(), given[place])
    with pytest.raises(
        flashjit.Unsupported, match="bind.. is not for tensor subclasses.*transforms of torch"
    ):
        TRANSFORMS[name][0](lambda x: flashjit.bind(x, *given[1:])(x, *given[1:]).sum(), given[0])
    assert torch.equal(call(*given), wanted)
    # Tensors that the transform does not see are a bound call's as ever.
    assert torch.equal(vmap(lambda x: call(*given) * x)(one()[None])[0], wanted)
    seen = []
    grad(lambda x: (seen.append(call(*given)), x.sum())[1])(normal(2))
    assert torch.equal(seen[0], wanted)


@transforms
def test_a_bound_call_is_refused_others_that_a_transform_wraps(name):
    given, sinks = tensors(), normal(4)
    call = flashjit.bind(*given, sinks=sinks)
    with pytest.raises(
        flashjit.Unsupported, match="a bound call reads memory, and a transform of torch.func"
    ):
        TRANSFORMS[name][0](lambda x: call(*given, sinks=x).sum(), sinks)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_bound_call_is_refused_others_with_derivatives(is_kept):
    given, sinks = tensors(), normal(4)
    call = flashjit.bind(*given, sinks=sinks)
    if is_kept:
        for _ in range(3):
            call(*given, sinks=sinks.clone())
    with pytest.raises(flashjit.Unsupported, match="a bound call has no derivatives"):
        call(*given, sinks=sinks.clone().requires_grad_())
    with (
        forward_ad.dual_level(),
        pytest.raises(flashjit.Unsupported, match="a bound call has no derivatives"),
    ):
        call(*given, sinks=forward_ad.make_dual(sinks, sinks))
    with torch.no_grad():
        call(*given, sinks=sinks.clone().requires_grad_())


@transforms
@pytest.mark.parametrize("memory", ["out", "lse"])
def test_the_caller_s_memory_is_refused_under_transforms(name, memory):
    q, k, v = tensors()
    given = {memory: torch.empty((2, 4, 5, 16) if memory == "out" else (2, 4, 5), device=DEVICE)}

    def f(x):
        found = flashjit.attention(x, k, v, **given)
        return (found[0] if memory == "lse" else found).sum()

    with pytest.raises(flashjit.Unsupported, match=f"{memory} cannot be had in .*transforms of torch"):
        TRANSFORMS[name][0](f, q)
    with pytest.raises(flashjit.Unsupported, match=f"{memory} is given with tensors that require gradients"):
        f(q.clone().requires_grad_())
    with torch.no_grad():
        f(q.clone().requires_grad_())


@transforms
def test_a_cache_says_that_it_has_no_derivatives(name):
    q, k, v = tensors()
    lengths = torch.tensor([7, 5], dtype=torch.int32, device=DEVICE)
    attend = lambda x: flashjit.attention(x, k, v, cache=True, kv_lengths=lengths).sum()
    if name == "vmap":  # which asks for no derivative
        return torch.testing.assert_close(vmap(attend)(q[None])[0], attend(q))
    says = "have no backward pass" if TRANSFORMS[name][1] else "no forward-mode derivative"
    says = "no" if name == "grad of jvp" else says  # the tangent comes first
    with pytest.raises(flashjit.Unsupported, match=says):
        TRANSFORMS[name][0](attend, q)


@transforms
def test_append_and_quantize_say_that_they_have_none(name):
    new, lengths = normal(2, 2, 1, 16), torch.tensor([3, 3], dtype=torch.int32, device=DEVICE)
    cache = torch.zeros(2, 2, 8, 16, device=DEVICE)

    def append(x):
        flashjit.append(x, x, cache, cache.clone(), kv_lengths=lengths)
        return x.sum()

    says = (
        "does not work under torch.vmap" if name == "vmap" else "has no (gradients|tangents)|under torch.vmap"
    )
    for call in (append, lambda x: flashjit.quantize(x)[1].sum()):
        with pytest.raises(flashjit.Unsupported, match=says):
            TRANSFORMS[name][0](call, new)
    assert not cache.any()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(new, new)
        for call in (append, lambda x: flashjit.quantize(x)[1].sum()):
            with pytest.raises(flashjit.Unsupported, match="has no tangents"):
                call(dual)
    assert not cache.any()


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap", "grad of jvp"])
def test_functions_of_any_arrays_name_attention(name):
    q, k, v = tensors()
    with pytest.raises(flashjit.Error, match="call flashjit.attention|transform of torch.func"):
        TRANSFORMS[name][0](lambda x: flashjit.forward(x, k, v)[0].sum(), q)


def of_flashinfer(q, k, v):
    """Functions of a tensor, and the tensor."""
    from flashjit import flashinfer as fi

    rows, keys = q[0].transpose(0, 1), (k[0].transpose(0, 1), v[0].transpose(0, 1))
    yield lambda x: fi.single_prefill_with_kv_cache(x, *keys), rows
    yield lambda x: fi.single_prefill_with_kv_cache(rows, keys[0], x), keys[1]
    lse = normal(len(rows), 4)
    yield lambda x: fi.merge_state(x, lse, rows, lse)[0], rows
    pages, table = normal(2, 4, 24), torch.zeros(5, 1, dtype=torch.int32, device=DEVICE)
    given = (16, 16, 8, table, torch.full((5,), 3, dtype=torch.int32, device=DEVICE), 4)
    workspace = torch.empty(8, device=DEVICE)
    latents = normal(5, 1, 4, 24)
    yield lambda x: fi.trtllm_batch_decode_with_kv_cache_mla(x, pages, workspace, *given), latents


@pytest.mark.parametrize("name", ["grad", "grad of vmap", "vmap of grad", "jvp of grad", "grad of jvp"])
def test_functions_without_gradients_say_so_where_zeros_would_come(name):
    from flashjit import flash_attn

    q, k, v = tensors()
    cache, lengths = normal(2, 8, 2, 16), torch.tensor([3, 4], dtype=torch.int32, device=DEVICE)
    calls = [*of_flashinfer(q, k, v)]
    of_cache = lambda x: flash_attn.flash_attn_with_kvcache(x, cache, cache, cache_seqlens=lengths)
    calls.append((of_cache, q.transpose(1, 2)))
    for call, x in calls:
        says = "has no gradients, and torch.func asks for them|no forward-mode|no second|has no tangents"
        with pytest.raises(flashjit.Unsupported, match=says):
            TRANSFORMS[name][0](lambda x: call(x).sum(), x)
        wanted = call(x)
        assert torch.equal(call(x.clone().requires_grad_()), wanted)  # as models call it

        def under_no_grad(x):
            with torch.no_grad():
                return x.sum() + call(x).sum()

        torch.testing.assert_close(grad(under_no_grad)(x), torch.zeros_like(x))

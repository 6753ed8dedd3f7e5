"""The compiled front: calls that look alike are launched without Python, with Python's results and errors; all others are
left to Python. On CPU tensors, whose launch is the reference."""

import ctypes
import gc
import os
import pathlib
import subprocess
import sys
import weakref

import pytest

torch = pytest.importorskip("torch")
import flashjit.torch  # noqa: E402
from flashjit import _attention, _autograd, _bound, _front, _installed, _library, _plans, flash_attn  # noqa: E402

if _front._module is None:
    pytest.skip("there is no compiled front: build the target flashjit_torch", allow_module_level=True)

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

KEPT = (
    flashjit.attention,
    flashjit.torch.scaled_dot_product_attention,
    flash_attn.flash_attn_func,
    flash_attn.flash_attn_varlen_func,
    flash_attn.flash_attn_with_kvcache,
)


def tensors(*sizes, dtype=torch.float16, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=made).to(dtype) for size in sizes]


def qkv(dtype=torch.float16, seed=0, heads=2, rows=16):
    return tensors(*[(2, heads, rows, 16)] * 3, dtype=dtype, seed=seed)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """attention()'s calls, with none kept, and the calls that Python launches."""
    for function in KEPT:
        function._calls.forget()
    launched = []
    launch = _attention._launch
    monkeypatch.setattr(_attention, "_launch", lambda *args: launched.append(args) or launch(*args))
    yield launched
    for function in KEPT:
        function._calls.forget()


def without_front(call):
    """What Python alone makes of it."""
    found = [function._calls.find for function in KEPT]
    for function in KEPT:
        function._calls.find = _front._not_implemented
    try:
        return call()
    finally:
        for function, find in zip(KEPT, found):
            function._calls.find = find


def assert_same(a, b):
    assert type(a) is type(b)
    for x, y in zip(a, b) if isinstance(a, tuple) else [(a, b)]:
        assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype


OPTIONS = [
    {},
    dict(causal=True),
    dict(causal="top_left", scale=0.5),
    dict(scale=0.25, return_lse=True),
    dict(window=(3, 0)),
    dict(window=(3, None), softcap=5.0, return_lse=True),
    dict(batch_invariant=True),
    dict(deterministic=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_third_call_is_launched_without_python(calls, options, dtype):
    for seed in range(4):
        q, k, v = qkv(dtype, seed)
        wanted = without_front(lambda: flashjit.attention(q, k, v, **options))
        calls.clear()
        assert_same(flashjit.attention(q, k, v, **options), wanted)
        assert len(calls) == (seed < 2)


@pytest.mark.parametrize("change", ["size", "heads", "strides", "type", "option", "missing", "alignment"])
def test_what_looks_different_is_another_call(calls, change):
    q, k, v = qkv()
    flashjit.attention(q, k, v, causal=True)
    options, other = dict(causal=True), list(qkv(seed=1))
    if change == "size":
        other = qkv(rows=24)
    elif change == "heads":
        other = qkv(heads=4)
    elif change == "strides":
        other[0] = other[0].transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "type":
        other = qkv(torch.bfloat16)
    elif change == "option":
        options = dict(causal=True, scale=0.5)
    elif change == "missing":
        options = {}
    else:  # Python makes a copy
        other[0] = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(other[0])
    wanted = without_front(lambda: flashjit.attention(*other, **options))
    for _ in range(3):
        assert_same(flashjit.attention(*other, **options), wanted)


def test_numbers_of_other_types_are_other_calls():
    q, k, v = qkv()
    made = flashjit.attention(q, k, v, causal=True)
    with pytest.raises(flashjit.InvalidArgument, match="causal is 2"):
        flashjit.attention(q, k, v, causal=2)
    assert torch.equal(
        flashjit.attention(q, k, v, causal=1, scale=0.25),
        flashjit.attention(q, k, v, causal=True, scale=0.25),
    )
    assert torch.equal(flashjit.attention(q, k, v, causal=True), made)


def test_the_callers_memory_is_written():
    q, k, v = qkv()
    wanted, lse = flashjit.attention(q, k, v, return_lse=True)
    for _ in range(3):
        out, rows = torch.full_like(q, 7), torch.full_like(lse, 7)
        made = flashjit.attention(q, k, v, out=out, lse=rows)
        assert made[0] is out and made[1] is rows
        assert torch.equal(out, wanted) and torch.equal(rows, lse)
    with pytest.raises(flashjit.InvalidArgument, match="out is"):
        flashjit.attention(q, k, v, out=out[:1])


def test_results_share_no_memory(calls):
    q, k, v = qkv()
    made = [flashjit.attention(q, k, v) for _ in range(4)]
    assert len({x.data_ptr() for x in made}) == 4 and len(calls) == 2


class Subclass(torch.Tensor):
    pass


class Modes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def is_left_to_python(call):
    """Whether the front says so, and not that it does not know it."""
    found = []
    find = flashjit.attention._calls.find
    flashjit.attention._calls.find = lambda *given, **named: found.append(find(*given, **named)) or found[-1]
    try:
        call()
    finally:
        flashjit.attention._calls.find = find
    return found[0] is NotImplemented


def test_what_is_not_plain_is_left_to_python():
    q, k, v = qkv()
    flashjit.attention(q, k, v)
    wanted = flashjit.attention(q, k, v)
    call = lambda q=q, **options: flashjit.attention(q, k, v, **options)
    assert not is_left_to_python(call) and not is_left_to_python(lambda: call(torch.nn.Parameter(q, False)))
    with Modes():
        assert is_left_to_python(call)
    with Functions():
        assert is_left_to_python(call)
    with torch.device("cpu"):
        assert is_left_to_python(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_left_to_python(call)
    with torch.autograd.forward_ad.dual_level():
        assert is_left_to_python(call)
    assert is_left_to_python(lambda: call(q.as_subclass(Subclass)))
    negative = torch.complex(q.float(), -q.float()).conj().imag
    assert negative.is_neg() and is_left_to_python(lambda: flashjit.attention(negative, k.float(), v.float()))
    assert is_left_to_python(lambda: call(score_mod="score * 2"))
    assert is_left_to_python(lambda: call(captures={}, mask_mod="kv > 2"))
    assert is_left_to_python(lambda: call(return_row_max=True))
    assert is_left_to_python(lambda: call(scale=ctypes.c_float(0.5).value * torch.ones(()).numpy()[()]))
    doubled = torch.func.vmap(lambda q: flashjit.attention(q, k, v))(torch.stack([q, q]))
    assert torch.equal(doubled[0], wanted) and torch.equal(doubled[1], wanted)
    assert torch.equal(call(), wanted)


def test_what_has_no_memory_is_refused_as_without_the_front():
    q, k, v = qkv()
    flashjit.attention(q, k, v)
    freed = q.clone()
    freed.untyped_storage().resize_(0)
    for wrong in (freed, q.to("meta"), q.to_sparse(), torch.nested.nested_tensor([q[0], q[1]]), None, 3):
        texts = []
        for make in (
            lambda: flashjit.attention(wrong, k, v),
            lambda: without_front(lambda: flashjit.attention(wrong, k, v)),
        ):
            with pytest.raises(Exception) as raised:  # noqa: PT011 - that both say the same is what counts
                make()
            texts.append((type(raised.value), str(raised.value)))
        assert texts[0] == texts[1]


def gradients(call, leaves, dout=None):
    made = call(*leaves)
    outs = [x for x in made if x is not None] if isinstance(made, tuple) else [made]
    douts = [torch.ones_like(x) if dout is None else dout for x in outs]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    return [*outs, *torch.autograd.grad(outs, wanted, douts)]


WITH_GRADIENTS = {
    "causal": (lambda q, k, v: flashjit.attention(q, k, v, causal=True), qkv),
    "lse": (lambda q, k, v: flashjit.attention(q, k, v, scale=0.5, return_lse=True), qkv),
    "window": (lambda q, k, v: flashjit.attention(q, k, v, window=(3, 0)), qkv),
    "fp32 O": (lambda q, k, v: flashjit.attention(q, k, v, out_dtype=torch.float32), qkv),
    "sinks": (lambda q, k, v: flashjit.attention(q, k, v, sinks=torch.ones(2)), qkv),
    "sdpa": (lambda *qkv: flashjit.torch.scaled_dot_product_attention(*qkv, is_causal=True), qkv),
    "flash_attn": (lambda *qkv: flash_attn.flash_attn_func(*qkv, causal=True), lambda seed: fa(seed)),
    "varlen": (
        lambda q, k, v, starts: flashjit.attention(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=24, max_seqlen_kv=24
        ),
        lambda seed: [*packed(seed)[0], packed(seed)[1]["cu_seqlens_q"]],
    ),
    "flash_attn varlen": (
        lambda q, k, v, starts: flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 24, 24),
        lambda seed: fa_packed(seed)[:4],
    ),
}


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_are_pythons(unchecked, name, monkeypatch):
    call, make = WITH_GRADIENTS[name]
    for seed in range(4):
        leaves = [x.requires_grad_(x.is_floating_point()) for x in make(seed=seed)]
        with monkeypatch.context() as patch:
            patch.setattr(_autograd, "_backward_calls", lambda plan: None)
            wanted = without_front(lambda: gradients(call, leaves))
        for a, b in zip(gradients(call, leaves), wanted, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


def test_passes_of_training_are_launched_without_python(monkeypatch):
    launched = []
    launch = _plans.launch
    monkeypatch.setattr(_plans, "launch", lambda name, *args: launched.append(name) or launch(name, *args))
    dout = torch.ones(2, 2, 16, 16, dtype=torch.float16)
    for seed in range(4):
        leaves = [x.requires_grad_() for x in qkv(seed=seed)]
        gradients(lambda q, k, v: flashjit.attention(q, k, v, causal=True, scale=0.3), leaves, dout)
        assert launched == ["forward", "backward"] * min(seed + 1, 2)
    leaves[1].requires_grad_(False)
    gradients(lambda q, k, v: flashjit.attention(q, k, v, causal=True, scale=0.3), leaves, dout)
    assert launched == ["forward", "backward"] * 2
    # A gradient that lies otherwise, and saved tensors that a hook has changed, are other calls.
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    gradients(lambda q, k, v: flashjit.attention(q, k, v, causal=True, scale=0.3), leaves, dout)
    assert launched == ["forward", "backward"] * 2 + ["backward"]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mul(2), lambda x: x.div(2)):
        gradients(lambda q, k, v: flashjit.attention(q, k, v, causal=True, scale=0.3), leaves)


@pytest.mark.parametrize("reads", ["a capture", "sequences"])
def test_recorded_forward_passes_are_launched_without_python(unchecked, reads, monkeypatch):
    passes, forward = [], _plans.Plan.forward
    monkeypatch.setattr(
        _plans.Plan, "forward", lambda *args, **named: passes.append(1) or forward(*args, **named)
    )
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    program = dict(score_mod="score + slopes[h] * to_float(kv - q)", captures={"slopes": slopes})

    def both_passes(tensors, options):
        leaves = [x.clone().requires_grad_() for x in tensors]
        passes.clear()
        made = flashjit.attention(*leaves, return_lse=True, **options)
        count = len(passes)
        others = [slopes] if reads == "a capture" else []
        return count, made + torch.autograd.grad(made[0].sum() + made[1].sum(), leaves + others)

    for seed in range(4):
        given = (qkv(seed=seed), program) if reads == "a capture" else packed(seed)
        with monkeypatch.context() as patch:
            patch.setattr(_autograd, "_backward_calls", lambda plan: None)
            _, wanted = without_front(lambda: both_passes(*given))
        count, found = both_passes(*given)
        assert count == (seed < 2)
        assert_same(found, wanted)


@pytest.mark.slow
def test_compiled_autograd_traces_the_backward_pass():
    from torch._dynamo import compiled_autograd

    leaves = [x.requires_grad_() for x in qkv(torch.float32)]
    for _ in range(3):
        wanted = gradients(lambda q, k, v: flashjit.attention(q, k, v, causal=True), leaves)
    out = flashjit.attention(*leaves, causal=True).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip(leaves, wanted[1:]))


def test_second_derivatives_do_not_change(monkeypatch):
    leaves = [x.float().requires_grad_() for x in qkv()]

    def second():
        (grad,) = torch.autograd.grad(flashjit.attention(*leaves).sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaves)

    with monkeypatch.context() as patch:
        patch.setattr(_autograd, "_backward_calls", lambda plan: None)
        wanted = without_front(second)
    for _ in range(3):
        assert all(map(torch.equal, second(), wanted))


def test_what_needs_no_gradient_has_none():
    q, k, v = qkv()
    leaf = q.clone().requires_grad_()
    flashjit.attention(leaf, k, v, causal=True)
    with torch.no_grad():
        for _ in range(2):
            assert not flashjit.attention(leaf, k, v, causal=True).requires_grad
    assert not flashjit.attention(q, k, v, causal=True).requires_grad
    assert flashjit.attention(leaf, k, v, causal=True).grad_fn is not None
    with torch.inference_mode():
        for _ in range(2):
            assert flashjit.attention(q, k, v, causal=True).is_inference()
    assert not flashjit.attention(q, k, v, causal=True).is_inference()
    with pytest.raises(flashjit.Unsupported, match="out is given with tensors that require gradients"):
        flashjit.attention(leaf, k, v, causal=True, out=torch.empty_like(q))


def test_determinism_is_asked_in_each_call(calls):
    q, k, v = qkv()
    for deterministic in (False, True) * 3:
        torch.use_deterministic_algorithms(deterministic)
        try:
            flashjit.attention(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(calls) == 4


def test_dropout_draws_in_each_call(calls):
    q, k, v = qkv()
    made = [flashjit.attention(q, k, v, dropout_p=0.5) for _ in range(3)]
    assert len(calls) == 3 and not torch.equal(made[0], made[1]) and not torch.equal(made[1], made[2])


def test_after_something_was_prepared_workspaces_are_asked_for_again(calls, monkeypatch):
    q, k, v = qkv()
    wanted = [flashjit.attention(q, k, v) for _ in range(3)][0]
    monkeypatch.setattr(_library.runtime(), "generation", _library.runtime().generation + 1)
    for _ in range(3):
        assert torch.equal(flashjit.attention(q, k, v), wanted)
    assert len(calls) == 3


def test_a_launch_that_fails_is_made_by_python_which_says_why(calls, monkeypatch):
    q, k, v = qkv()
    fails = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda spec, args: 3)
    monkeypatch.setattr(_front, "address_of", lambda *_: ctypes.cast(fails, ctypes.c_void_p).value)
    made = [flashjit.attention(q, k, v) for _ in range(3)]
    assert len(calls) == 3 and torch.equal(made[0], made[2])


@pytest.fixture
def unchecked(monkeypatch):
    """On the CPU, too, calls differ in pointers alone."""
    monkeypatch.setattr(_front, "are_checked", lambda plan, fixed: False)


def test_lengths_are_checked_on_the_cpu(calls):
    q, k, v = qkv()
    lengths = torch.tensor([16, 3], dtype=torch.int32)
    for _ in range(3):
        flashjit.attention(q, k, v, kv_lengths=lengths)
    q.requires_grad_()
    for _ in range(3):
        flashjit.attention(q, k, v, kv_lengths=lengths).sum().backward()
    lengths[0] = 17
    for leaf in (q, q.detach()):
        with pytest.raises(flashjit.InvalidArgument, match="kv_lengths"):
            flashjit.attention(leaf, k, v, kv_lengths=lengths)
    assert len(calls) == 8


def paged(seed=0):
    """Queries, pages and tables, by name."""
    q, k, v = tensors((2, 4, 1, 16), (8, 2, 8, 16), (8, 2, 8, 16), seed=seed)
    table = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).view(2, 4).int()
    lengths = torch.tensor([30, 9 + seed], dtype=torch.int32)
    return (q, k, v), dict(page_table=table, kv_lengths=lengths)


def packed(seed=0):
    q, k, v = tensors(*[(1, 2, 24, 16)] * 3, seed=seed)
    offsets = torch.tensor([0, 7 + seed, 24], dtype=torch.int32)
    return (q, k, v), dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=24, max_seqlen_kv=24)


def padded(seed=0):
    return qkv(seed=seed), dict(kv_lengths=torch.tensor([16, 3 + seed], dtype=torch.int32))


def with_sinks(seed=0):
    return qkv(seed=seed), dict(sinks=torch.tensor([0.5, seed]), window=(4, 0))


def latent(seed=0):
    q, k = tensors((2, 4, 1, 32), (2, 1, 24, 32), seed=seed)
    return (q, k, None), dict(
        v_columns=16, cache=True, kv_lengths=torch.tensor([24, 5 + seed], dtype=torch.int32)
    )


@pytest.mark.parametrize("make", [paged, packed, padded, with_sinks, latent])
@pytest.mark.parametrize("lse", [False, True])
def test_other_tensors_are_read_anew(calls, unchecked, make, lse):
    for seed in range(4):
        given, named = make(seed)
        wanted = without_front(lambda: flashjit.attention(*given, return_lse=lse, **named))
        calls.clear()
        assert_same(flashjit.attention(*given, return_lse=lse, **named), wanted)
        assert len(calls) == (seed < 2)


@pytest.mark.parametrize("make", [paged, packed, padded])
def test_a_bound_call_reads_other_tensors_anew(unchecked, monkeypatch, make):
    given, named = make()
    call = flashjit.bind(*given, causal=make is not padded, **named)
    by_python, launched = _bound.BoundCall._by_python, []
    monkeypatch.setattr(
        _bound.BoundCall, "_by_python", lambda self, *args: launched.append(args) or by_python(self, *args)
    )
    for seed in range(4):
        other, changed = make(seed)
        changed = {name: value for name, value in changed.items() if isinstance(value, torch.Tensor)}
        wanted = flashjit.attention(*other, causal=make is not padded, **{**named, **changed})
        assert torch.equal(call(*other, **changed), wanted)
    assert len(launched) == 2
    assert torch.equal(call(*given), flashjit.attention(*given, causal=make is not padded, **named))
    with pytest.raises(flashjit.InvalidArgument, match="sinks is given, but a bound call takes"):
        call(*given, sinks=torch.zeros(2))
    with pytest.raises(flashjit.InvalidArgument, match="this call was bound for"):
        call(given[0][..., :8], *given[1:])


@torch.no_grad()
def test_a_bound_call_is_what_it_was_when_it_was_bound(monkeypatch):
    q, k, v = qkv()
    call = flashjit.bind(q, k, v, causal=True)
    wanted = call(q, k, v)
    call(q, k, v)
    by_python = _bound.BoundCall._by_python
    monkeypatch.setattr(_bound.BoundCall, "_by_python", None)
    for mode in (Modes(), Functions(), torch.device("cpu"), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            assert_same(call(q, k, v), wanted)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(call(q, k, v), wanted)
    finally:
        torch.use_deterministic_algorithms(False)
    left = []
    monkeypatch.setattr(
        _bound.BoundCall, "_by_python", lambda self, *args: left.append(args) or by_python(self, *args)
    )
    with torch.enable_grad(), torch.autograd.forward_ad.dual_level():
        assert_same(call(q, k, v), wanted)
        with pytest.raises(flashjit.Unsupported, match="no derivatives"):
            call(torch.autograd.forward_ad.make_dual(q, q), k, v)
    assert len(left) == 2


@torch.no_grad()
def test_a_bound_call_has_no_transforms():
    q, k, v = qkv(torch.float32)
    call = flashjit.bind(q, k, v)
    for _ in range(3):
        call(q, k, v)
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize):
        with pytest.raises(Exception):  # noqa: B017  (PyTorch's, or a refusal: no result)
            transform(lambda x: call(x, k, v).sum())(
                torch.stack([q, q]) if transform is torch.func.vmap else q
            )


def test_negative_views_are_resolved_in_repeated_calls(calls):
    """Also dense ones, whose calls differ from known ones in nothing else."""
    imaginary = [torch.complex(x.float(), -x.float()).conj().imag for x in qkv()]
    dense = [torch._neg_view(x.float()) for x in qkv()]
    for given in (imaginary, dense):
        plain = [x.resolve_neg() for x in given]
        wanted = flashjit.attention(*plain)
        for _ in range(4):
            assert torch.equal(flashjit.attention(*plain), wanted)
            assert torch.equal(flashjit.attention(*given), wanted)


def test_a_bound_call_without_others(monkeypatch):
    q, k, v = qkv()
    call = flashjit.bind(q, k, v, causal=True, return_lse=True)
    wanted = [flashjit.attention(*qkv(seed=seed), causal=True, return_lse=True) for seed in range(4)]
    call(q, k, v), call(q, k, v)
    monkeypatch.setattr(_bound.BoundCall, "_by_python", None)
    for seed in range(4):
        assert_same(call(*qkv(seed=seed)), wanted[seed])


def test_copies_are_made_in_each_call(calls):
    q, k, v = qkv()
    odd = torch.empty(2, 2, 16, 17, dtype=q.dtype)[..., :16].copy_(q)
    wanted = flashjit.attention(q, k, v)
    calls.clear()
    for _ in range(3):
        assert torch.equal(flashjit.attention(odd, k, v), wanted)
    assert len(calls) == 3


def test_nothing_is_leaked():
    q, k, v = qkv()
    for _ in range(3):
        flashjit.attention(q, k, v, causal=True, return_lse=True)
    before = [sys.getrefcount(x) for x in (q, k, v, torch.float16, None)]
    for _ in range(1000):
        flashjit.attention(q, k, v, causal=True, return_lse=True)
    after = [sys.getrefcount(x) for x in (q, k, v, torch.float16, None)]
    assert after[:3] == before[:3] and all(b - a < 500 for a, b in zip(before[3:], after[3:]))
    call = flashjit.bind(q, k, v)
    call(q, k, v), call(q, k, v)
    kept = len(gc.get_objects())
    for _ in range(20):
        other = flashjit.bind(q, k, v)
        other(q, k, v), other(q, k, v)
    del other
    gc.collect()
    assert len(gc.get_objects()) < kept + 200


def test_no_more_calls_are_kept_than_there_is_room_for():
    front = _front._module.Front("tvd", ("a", "b", "c"), (0, 1, None), 0, 2)
    (q,) = tensors((2, 3))
    for number in range(5):
        assert front.call(q, number, None) is NotImplemented  # met once
        assert front.call(q, number, None) is None
        front.refuse((q, number, None))
        assert front.call(q, number, None) is NotImplemented
    front.call(q, 0, None)
    assert front.call(q, 0, None) is None and front.call(q, 4, None) is NotImplemented
    assert front.call(q, 4, q) is NotImplemented and front.call([], 4, None) is NotImplemented
    front.forget()
    assert front.call(q, 4, None) is NotImplemented and front.call(q, 4, None) is None
    front.delegate((q, 1, None), lambda _, *given: given, (0,))
    assert front.call(q, 1, None) == (q,) or front.call(q, 1, None)[0] is q
    with pytest.raises(TypeError, match="of 3 parameters"):
        front.refuse((q, 1))
    for kinds in ("txd", "t" * 65, "tv"):
        with pytest.raises(ValueError, match="kinds"):
            _front._module.Front(kinds, ("a", "b", "c"), (None,) * 3, 0, 2)


def test_arguments_are_placed_as_python_does():
    missing = object()
    front = _front._module.Front("vvdi", ("a", "b", "c", "d"), (missing, 5, None, 7), missing, 10)
    assert front.arguments(1) == front.arguments(a=1) == (1, 5, None, 7)
    assert front.arguments(1, 2, d=3) == front.arguments(b=2, d=3, a=1) == (1, 2, None, 3)
    assert front.arguments("".join(["b"]), **{"".join(["b"]): 4}) == ("b", 4, None, 7)
    wrong = [((), {}), ((1,), {"a": 1}), ((1,), {"e": 1}), ((1, 2, 3, 4, 5), {}), ((), {"b": 1})]
    for args, named in wrong:
        assert (
            front.arguments(*args, **named) is NotImplemented and front.call(*args, **named) is NotImplemented
        )
    front.delegate((1, 5, None, 7), lambda _: "kept", ())
    assert front.call(1) == front.call(1, b=5, d=8) == "kept"
    assert front.call(1, c=0) is NotImplemented and front.call(1, c=0) is NotImplemented
    assert front.call(2) is NotImplemented and front.call(2) is None


def test_functions_show_their_own_signature():
    import inspect

    for function in KEPT:
        shown = inspect.signature(function).parameters
        assert [*shown][:3] == [*inspect.signature(function.__wrapped__).parameters][
            :3
        ] and "_recorder" not in shown
        with pytest.raises((TypeError, flashjit.Error)):
            function()
        with pytest.raises((TypeError, flashjit.Error), match="nonsense"):
            function(*qkv(), nonsense=1)


def fa(seed=0):
    return [x.transpose(1, 2).contiguous() for x in qkv(seed=seed)]


def fa_packed(seed=0):
    (q, k, v), named = packed(seed)
    offsets = named["cu_seqlens_q"]
    return [x[0].transpose(0, 1).contiguous() for x in (q, k, v)] + [offsets, offsets, 24, 24]


def fa_pages(seed=0):
    (q, k, v), named = paged(seed)
    return [x.transpose(1, 2).contiguous() for x in (q, k, v)], named["page_table"], named["kv_lengths"]


def cached(seed, **options):
    (q, k, v), table, lengths = fa_pages(seed)
    return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, **options)


def packed_over_pages(seed, **options):
    (q, k, v), table, lengths = fa_pages(seed)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    return flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), k, v, starts, None, 1, 32, seqused_k=lengths, block_table=table, **options
    )


DROP_INS = {
    "sdpa": lambda seed: flashjit.torch.scaled_dot_product_attention(*qkv(seed=seed), is_causal=True),
    "sdpa, broadcast": lambda seed: flashjit.torch.scaled_dot_product_attention(
        *[x[:n] for x, n in zip(qkv(seed=seed), (2, 1, 1))], scale=0.5
    ),
    "func": lambda seed: flash_attn.flash_attn_func(*fa(seed), causal=True),
    "func, probs": lambda seed: flash_attn.flash_attn_func(*fa(seed), return_attn_probs=True)[:2],
    "func, window": lambda seed: flash_attn.flash_attn_func(*fa(seed), window_size=[3, 0], softcap=5.0),
    "func, sinks": lambda seed: flash_attn.flash_attn_func(*fa(seed), s_aux=torch.tensor([0.5, seed])),
    "func, out": lambda seed: flash_attn.flash_attn_func(*fa(seed), out=torch.zeros(2, 16, 2, 16).half()),
    "varlen": lambda seed: flash_attn.flash_attn_varlen_func(*fa_packed(seed), causal=True),
    "varlen, lse": lambda seed: flash_attn.flash_attn_varlen_func(*fa_packed(seed), return_softmax_lse=True),
    "varlen, pages": lambda seed: packed_over_pages(seed, causal=True, fa_version=2),
    "cache": lambda seed: cached(seed, causal=True),
    "cache, lse": lambda seed: cached(seed, return_softmax_lse=True, window_size=(5, -1)),
    "cache, split": lambda seed: cached(seed, num_splits=1, attention_chunk=8),
}


@pytest.mark.parametrize("name", DROP_INS)
def test_the_drop_ins_calls_are_launched_without_python(calls, unchecked, name):
    call = DROP_INS[name]
    for seed in range(4):
        wanted = without_front(lambda: call(seed))
        calls.clear()
        assert_same(call(seed), wanted)
        assert len(calls) == (seed < 2)


def test_what_drop_ins_do_besides_is_not_kept(calls, unchecked):
    (q, k, v), table, lengths = fa_pages()
    new = torch.ones(2, 1, 2, 16, dtype=q.dtype)
    for number in range(3):  # rows are appended, which is another launch
        at = lengths.clone() - 1
        k_cache = k.clone()
        flash_attn.flash_attn_with_kvcache(
            q, k_cache, v.clone(), new, new, cache_seqlens=at, block_table=table
        )
        assert not torch.equal(k_cache, k)
    rows = fa()
    for number in range(3):
        wanted = flash_attn.flash_attn_func(*rows).float() / (number + 1)
        slopes = torch.full((2,), float(number))
        biased = flash_attn.flash_attn_func(*rows, alibi_slopes=slopes)
        assert torch.equal(biased.float(), wanted) == (number == 0)
    odd = [torch.randn(2, 16, 2, 12).half() for _ in range(3)]  # padded
    made = [flash_attn.flash_attn_func(*odd) for _ in range(2)]
    assert made[0].shape == odd[0].shape and torch.equal(made[0], made[1])
    lengths_as_number = [
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=n, block_table=table) for n in (9, 5, 9)
    ]
    assert torch.equal(lengths_as_number[0], lengths_as_number[2])
    assert not torch.equal(lengths_as_number[0], lengths_as_number[1])


def test_values_that_look_alike_are_told_apart():
    front = _front._module.Front("v", ("a",), (None,), 0, 100)
    values = [
        None,
        False,
        True,
        0,
        1,
        -1,
        0.0,
        -0.0,
        1.0,
        float("nan"),
        "",
        "a",
        "abcdefgh",
        "abcdefghi",
        (),
        (0,),
        (1, -1),
        (None,),
    ]
    for value in values:
        assert front.call(value) is NotImplemented and front.call(value) is None
        front.delegate((value,), lambda _, value=value: repr(value), ())
    assert [front.call(value) for value in values] == [*map(repr, values)]
    for value in (1 << 70, [[]], {}, torch.float16, ((1,),), (0,) * 9, b"a"):
        assert front.call(value) is NotImplemented


def run_without(environment):
    code = "import torch, flashjit; from flashjit import _front; q = torch.ones(1, 1, 8, 8); flashjit.attention(q, q, q); print(_front._module)"
    paths = [str(pathlib.Path(flashjit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "FLASHJIT_LIBRARY": str(_installed.library_path()),
            "PYTHONPATH": os.pathsep.join(paths),
            **environment,
        },
    )


def test_it_can_be_turned_off():
    assert run_without({"FLASHJIT_FRONT": "off"}).stdout == "None\n"


@pytest.mark.slow
def test_without_its_file_python_does_all(tmp_path):
    (tmp_path / "libflashjit.so").symlink_to(_installed.library_path())
    environment = {"FLASHJIT_LIBRARY": str(tmp_path / "libflashjit.so")}
    assert "front_module" in run_without({}).stdout
    done = run_without(environment)  # of a link the library's own folder counts
    assert done.returncode == 0, done.stderr
    (tmp_path / "libflashjit.so").unlink()
    (tmp_path / "libflashjit.so").write_bytes(_installed.library_path().read_bytes())
    assert run_without(environment).stdout == "None\n"
    (tmp_path / "libflashjit_torch.so").write_text("no library")
    assert run_without(environment).stdout == "None\n"


def test_the_file_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(_front, "_INTERFACE", -1)
    with pytest.raises(flashjit.InternalError, match="another version of flashjit"):
        _front._open()


def test_what_warns_or_is_refused_is_left_to_python(calls, unchecked):
    q, k, v = (x.requires_grad_() for x in qkv())
    indices = torch.arange(4, dtype=torch.int32).expand(2, 16, 2, 4).contiguous()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            with pytest.warns(UserWarning, match="indices are not deterministic"):
                flashjit.attention(q, k, v, indices=indices)
        torch.use_deterministic_algorithms(True)
        with pytest.raises(flashjit.Unsupported, match="no deterministic gradients"):
            flashjit.attention(q, k, v, indices=indices)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(calls) == 4


ALIBI = "score + slopes[h] * to_float(kv - q) * by"


def of_slopes(slopes, by):
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx) * by


def of_documents(document):
    return lambda b, h, q_idx, kv_idx: document[b, q_idx] == document[b, kv_idx]


def slopes_of(seed):
    return torch.rand(2, generator=torch.Generator().manual_seed(seed))


def gates_of(seed):
    return torch.rand(2, 2, 16, 16, generator=torch.Generator().manual_seed(seed))


def documents_of(seed):
    return (torch.arange(32).view(2, 16) // (3 + seed)).int()


WITH_PROGRAMS = {
    "text": lambda seed: dict(score_mod=ALIBI, captures={"slopes": slopes_of(seed), "by": 0.5}),
    "function": lambda seed: dict(score_mod=of_slopes(slopes_of(seed), 0.5)),
    "traced": lambda seed: dict(score_mod=flashjit.trace(of_slopes(slopes_of(seed), 2))),
    "mask": lambda seed: dict(mask_mod=of_documents(documents_of(seed)), causal=True),
    "mask by name": lambda seed: dict(mask_mod=flashjit.masks.prefix(torch.tensor([seed, 5]).int())),
    "both": lambda seed: dict(
        score_mod=of_slopes(slopes_of(seed), 0.5), mask_mod=of_documents(documents_of(seed)), return_lse=True
    ),
    "weights": lambda seed: dict(
        weight_mod="sigmoid(score + bias[h])", captures={"bias": slopes_of(seed).float()}
    ),
    "elements": lambda seed: dict(out_mod="out * gate[b, h, q, column]", captures={"gate": gates_of(seed)}),
    "window": lambda seed: dict(
        score_mod=ALIBI, captures={"slopes": slopes_of(seed), "by": 1}, window=(4, 2)
    ),
}


@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_programs_and_what_they_capture_are_launched_without_python(calls, name):
    for seed in range(5):
        q, k, v = qkv(seed=seed)
        options = WITH_PROGRAMS[name](seed)
        wanted = without_front(lambda: flashjit.attention(q, k, v, **options))
        calls.clear()
        assert_same(flashjit.attention(q, k, v, **options), wanted)
        assert len(calls) == (seed < 2)


@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_gradients_of_programs_are_those_of_python(calls, name):
    def step(seed):
        leaves = [x.requires_grad_() for x in qkv(seed=seed)]
        options = WITH_PROGRAMS[name](seed)
        captures = options.get("captures", {})
        read = [x.requires_grad_() for x in captures.values() if isinstance(x, torch.Tensor)]
        out = flashjit.attention(*leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        return (out.detach(), *torch.autograd.grad(out.float().square().sum(), (*leaves, *read)))

    for seed in range(4):
        wanted = without_front(lambda: step(seed))
        calls.clear()
        assert_same(step(seed), wanted)
        assert len(calls) == (seed < 2 or name == "elements")  # whose O before it is kept


def test_programs_that_look_different_are_other_calls(calls):
    q, k, v = qkv()
    slopes, others = slopes_of(0), slopes_of(1)
    both = "score + slopes[h] * to_float(q) + others[h] * to_float(kv)"
    made = [
        dict(score_mod=both, captures={"slopes": slopes, "others": slopes}),
        dict(score_mod=both, captures={"slopes": slopes, "others": others}),
        dict(score_mod=both, captures={"others": slopes, "slopes": others}),
        dict(score_mod=both, captures={"slopes": slopes.double().float()[:, None][:, 0], "others": others}),
        dict(score_mod=both, captures={"slopes": slopes.half(), "others": others}),
        dict(score_mod=ALIBI, captures={"slopes": slopes, "by": 1}),
        dict(score_mod=ALIBI, captures={"slopes": slopes, "by": 2}),
        dict(score_mod=ALIBI, captures={"slopes": slopes, "by": 1.5}),
        dict(score_mod=of_slopes(slopes, 1)),
        dict(score_mod=of_slopes(slopes, 1.5)),
        dict(weight_mod=of_slopes(slopes, 1)),
        dict(weight_mod=of_slopes(others, 1)),
        dict(score_mod=of_slopes(slopes, 1), mask_mod=of_documents(documents_of(0))),
        dict(score_mod=of_slopes(slopes, 1), mask_mod=of_documents(documents_of(2))),
        dict(mask_mod=of_documents(documents_of(2))),
        dict(mask_mod="kv <= q"),
        dict(score_mod="score * 0.5"),
    ]
    for _ in range(4):
        for options in made:
            wanted = without_front(lambda: flashjit.attention(q, k, v, **options))
            assert_same(flashjit.attention(q, k, v, **options), wanted)
    calls.clear()
    for options in made:
        flashjit.attention(q, k, v, **options)
    assert not calls


def test_numbers_and_globals_of_functions_are_read_anew(calls):
    q, k, v = qkv()
    slopes, by = slopes_of(0), 1.0

    def steep(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx) * by

    made = []
    for step in range(8):
        by = 1.0 + step // 4
        made.append(flashjit.attention(q, k, v, score_mod=steep))
    assert (
        torch.equal(made[0], made[3]) and torch.equal(made[4], made[7]) and not torch.equal(made[3], made[4])
    )
    slopes = slopes.half()
    assert torch.equal(
        flashjit.attention(q, k, v, score_mod=steep),
        without_front(lambda: flashjit.attention(q, k, v, score_mod=steep)),
    )


def test_what_a_front_cannot_compare_is_left_to_python(calls):
    q, k, v = qkv()
    number = torch.tensor(1.0)  # whose value each call reads
    options = dict(score_mod="score * by", captures={"by": number})
    for by in (1.0, 2.0, 3.0):
        number.fill_(by)
        wanted = flashjit.attention(q, k, v, score_mod="score * by", captures={"by": by})
        assert torch.equal(flashjit.attention(q, k, v, **options), wanted)
    calls.clear()

    class Steps:
        by = 1.0

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * self.by

    steps = Steps()
    for by in (1.0, 2.0, 3.0):
        steps.by = by
        wanted = without_front(lambda: flashjit.attention(q, k, v, score_mod=f"score * {by}"))
        assert torch.equal(flashjit.attention(q, k, v, score_mod=steps), wanted)
    assert len(calls) == 6
    for wrong in (dict(score_mod=3), dict(score_mod="score", mask_mod=flashjit.trace("score"))):
        for _ in range(3):
            with pytest.raises(flashjit.Error):
                flashjit.attention(q, k, v, **wrong)
    for _ in range(3):
        with pytest.raises(flashjit.InvalidArgument, match="captures has 'by', but no program mentions it"):
            flashjit.attention(q, k, v, captures={"by": 1.0})


def test_a_captured_tensor_may_begin_to_want_gradients(calls):
    q, k, v = qkv()
    slopes = slopes_of(0)
    options = dict(score_mod=ALIBI, captures={"slopes": slopes, "by": 0.5})
    for _ in range(3):
        assert not flashjit.attention(q, k, v, **options).requires_grad
    slopes.requires_grad_()
    for _ in range(4):
        assert flashjit.attention(q, k, v, **options).requires_grad
        with torch.no_grad():
            assert not flashjit.attention(q, k, v, **options).requires_grad


def test_a_bound_call_reads_what_its_programs_capture_anew(monkeypatch):
    q, k, v = qkv()
    slopes = slopes_of(0)
    call = flashjit.bind(q, k, v, score_mod=ALIBI, captures={"slopes": slopes, "by": 0.5})
    call(q, k, v), call(q, k, v)
    monkeypatch.setattr(_bound.BoundCall, "_by_python", None)
    slopes.copy_(slopes_of(1))
    wanted = flashjit.attention(q, k, v, score_mod=ALIBI, captures={"slopes": slopes, "by": 0.5})
    assert torch.equal(call(q, k, v), wanted)


def test_programs_are_not_leaked():
    q, k, v = qkv()

    def run():
        for seed in range(3):
            slopes = slopes_of(seed)
            for _ in range(4):
                flashjit.attention(q, k, v, score_mod=of_slopes(slopes, 0.5))
                flashjit.attention(q, k, v, score_mod=ALIBI, captures={"slopes": slopes, "by": 0.5})
        gc.collect()
        return sys.getrefcount(slopes), len(gc.get_objects())

    run()
    before = run()
    after = run()
    assert after[0] == before[0] and after[1] < before[1] + 50


ODD = "(q + kv) % 3 != 0"


@pytest.mark.parametrize("grads", [False, True])
def test_lists_of_tiles_are_part_of_a_call(calls, grads):
    first = flashjit.TileLists(*qkv(), mask_mod=ODD, backward=grads)
    other = flashjit.TileLists(*qkv(), mask_mod=ODD, backward=grads)
    for seed, lists in enumerate((first, first, first, other, first)):
        q, k, v = (x.requires_grad_(grads) for x in qkv(seed=seed))
        wanted = without_front(lambda: flashjit.attention(q, k, v, mask_mod=ODD))
        calls.clear()
        out = flashjit.attention(q, k, v, mask_mod=ODD, lists=lists)
        assert_same(out, wanted)
        assert bool(calls) == (seed < 2)
        if grads:
            dout = torch.ones_like(out)
            assert_same(
                torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout)
            )
    with pytest.raises(flashjit.InvalidArgument, match="lists were built for another call"):
        flashjit.attention(*qkv(rows=32), mask_mod=ODD, lists=first)
    with pytest.raises(flashjit.WrongType, match="lists is a int"):
        flashjit.attention(*qkv(), mask_mod=ODD, lists=5)


def test_a_bound_call_has_lists(calls):
    q, k, v = qkv()
    call = flashjit.bind(q, k, v, mask_mod=ODD, lists=flashjit.TileLists(q, k, v, mask_mod=ODD))
    for seed in range(4):
        given = qkv(seed=seed)
        assert_same(call(*given), without_front(lambda: flashjit.attention(*given, mask_mod=ODD)))
    assert call.call(*call.arguments(*given)) is not NotImplemented


def test_what_a_bound_call_holds_ends_with_it(calls):
    q, k, v = qkv()
    out = torch.empty_like(q)
    call = flashjit.bind(q, k, v, causal=True, out=out)
    for _ in range(3):
        assert call(q, k, v) is out
    held = weakref.ref(out)
    gc.disable()
    try:
        del call, out
        assert held() is None
    finally:
        gc.enable()

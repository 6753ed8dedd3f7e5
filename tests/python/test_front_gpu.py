"""The compiled front on a GPU: without Python launched as with it, on the right stream and device, in graphs and in threads."""

import concurrent.futures

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU", allow_module_level=True)

import flashjit  # noqa: E402
from flashjit import _bound  # noqa: E402
from test_front import (  # noqa: E402
    assert_same,
    calls,  # noqa: F401 - a fixture
    latent,
    packed,
    padded,
    paged,
    qkv,
    with_sinks,
    without_front,
)

HEAD_DIM_32 = 2  # times that of test_front's tensors, so that every family has kernels


def on_gpu(value):
    if isinstance(value, torch.Tensor):
        value = value.cuda()
        return torch.cat([value] * HEAD_DIM_32, -1) if value.dim() == 4 else value
    return value


def moved(made):
    given, named = made
    named = {name: on_gpu(value) for name, value in named.items()}
    if "v_columns" in named:
        named["v_columns"] *= HEAD_DIM_32
    return [*map(on_gpu, given)], named


def plain(seed=0):
    return qkv(seed=seed), dict(causal=True)


FORMS = [plain, paged, packed, padded, with_sinks, latent]


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize("lse", [False, True])
def test_calls_that_look_alike_are_launched_without_python(calls, make, lse):  # noqa: F811
    for seed in range(4):
        given, named = moved(make(seed))
        wanted = without_front(lambda: flashjit.attention(*given, return_lse=lse, **named))
        calls.clear()
        assert_same(flashjit.attention(*given, return_lse=lse, **named), wanted)
        assert len(calls) == (seed < 2)


@pytest.mark.parametrize("make", FORMS)
def test_bound_calls(make, monkeypatch):
    given, named = moved(make())
    call = flashjit.bind(*given, **named)
    by_python, launched = _bound.BoundCall._by_python, []
    monkeypatch.setattr(
        _bound.BoundCall, "_by_python", lambda self, *args: launched.append(args) or by_python(self, *args)
    )
    for seed in range(4):
        other, changed = moved(make(seed))
        given_anew = {name: x for name, x in changed.items() if isinstance(x, torch.Tensor)}
        other = other[:2] if other[2] is None else other
        assert torch.equal(call(*other, **given_anew), flashjit.attention(*other, **changed))
    # A latent call's V, which a slice of K, is made by Python.
    assert len(launched) == 2


def test_each_call_has_its_own_memory():
    """Also in the library, which knows calls again that differ in memory alone."""
    for _ in range(6):
        leaves = [
            torch.randn(2, 4, 96, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"
        ]
        out, want = (
            attention(*leaves, **causal)
            for attention, causal in (
                (flashjit.attention, dict(causal=True)),
                (torch.nn.functional.scaled_dot_product_attention, dict(is_causal=True)),
            )
        )
        torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)
        dout = torch.randn_like(out)
        for got, expected in zip(*(torch.autograd.grad(x, leaves, dout) for x in (out, want))):
            torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


def test_the_current_stream_is_launched_on(calls):  # noqa: F811
    given, named = moved(plain())
    wanted = [flashjit.attention(*given, **named) for _ in range(2)][0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    q = torch.zeros_like(given[0])
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.copy_(given[0])
        made = flashjit.attention(q, *given[1:], **named)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(made, wanted) and len(calls) == 2


def test_graphs_hold_what_the_front_launches(calls):  # noqa: F811
    given, named = moved(paged())
    for _ in range(2):
        wanted = flashjit.attention(*given, **named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = flashjit.attention(*given, **named)
    graph.replay()
    assert torch.equal(made, wanted) and len(calls) == 2
    other, changed = moved(paged(1))
    for old, new in zip((*given, *named.values()), (*other, *changed.values())):
        old.copy_(new)
    graph.replay()
    assert torch.equal(made, flashjit.attention(*other, **changed))


def test_threads_without_a_context(calls):  # noqa: F811
    given, named = moved(plain())
    wanted = flashjit.attention(*given, **named)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for made in threads.map(lambda _: flashjit.attention(*given, **named), range(400)):
            assert torch.equal(made, wanted)


def test_results_are_the_caching_allocators():
    given, named = moved(plain())
    for _ in range(2):
        flashjit.attention(*given, **named)
    before = torch.cuda.memory_allocated()
    made = flashjit.attention(*given, **named)
    assert torch.cuda.memory_allocated() > before
    made.record_stream(torch.cuda.Stream())
    del made
    torch.cuda.synchronize()


def test_another_device_is_left_to_python():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given, named = moved(plain())
    wanted = flashjit.attention(*given, **named)
    with torch.cuda.device(1):
        for _ in range(2):
            assert torch.equal(flashjit.attention(*given, **named), wanted)
    there = [x.to("cuda:1") for x in given]
    for _ in range(3):
        assert torch.equal(flashjit.attention(*there, **named).cpu(), wanted.cpu())


def test_gradients(calls):  # noqa: F811
    given, named = moved(plain())
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = without_front(
        lambda: torch.autograd.grad(flashjit.attention(*leaves, **named).float().sum(), leaves)
    )
    for _ in range(3):
        made = torch.autograd.grad(flashjit.attention(*leaves, **named).float().sum(), leaves)
        for a, b in zip(made, wanted):
            assert torch.allclose(a, b, atol=1e-3)

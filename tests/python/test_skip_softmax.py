"""skip_softmax_threshold of attention(): what it takes, and on the CPU the exact result."""

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402


def tensors(**options):
    torch.manual_seed(3)
    return [torch.randn(1, heads, 20, 16, dtype=torch.float16, **options) for heads in (4, 2, 2)]


def test_the_cpu_skips_nothing():
    q, k, v = tensors()
    counts = torch.tensor([5, 7])
    exact, exact_lse = flashjit.attention(q, k, v, causal=True, return_lse=True)
    for threshold in (0, 0.0, 1e-3, 1.0):
        out, lse = flashjit.attention(
            q,
            k,
            v,
            causal=True,
            return_lse=True,
            skip_softmax_threshold=threshold,
            skip_softmax_counts=counts,
        )
        assert torch.equal(out, exact) and torch.equal(lse, exact_lse)
    assert counts.tolist() == [5, 7]


def test_a_bound_call_has_it_too():
    q, k, v = tensors()
    counts = torch.zeros(2, dtype=torch.int64)
    call = flashjit.bind(q, k, v, skip_softmax_threshold=1e-4, skip_softmax_counts=counts)
    assert torch.equal(call(q, k, v), flashjit.attention(q, k, v))
    assert torch.equal(call(q, k, v, out=torch.empty_like(q)), flashjit.attention(q, k, v))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"skip_softmax_threshold": 1.5}, flashjit.InvalidArgument, "it must be from 0 to 1"),
        ({"skip_softmax_threshold": -1e-3}, flashjit.InvalidArgument, "it must be from 0 to 1"),
        ({"skip_softmax_threshold": float("nan")}, flashjit.InvalidArgument, "it must be from 0 to 1"),
        ({"skip_softmax_threshold": "0.1"}, flashjit.WrongType, "skip_softmax_threshold is a str"),
        ({"skip_softmax_counts": torch.zeros(2)}, flashjit.InvalidArgument, "without skip_softmax_threshold"),
        (
            {"skip_softmax_threshold": 0.1, "skip_softmax_counts": torch.zeros(2)},
            flashjit.InvalidArgument,
            "skip_softmax_counts is float32",
        ),
        (
            {"skip_softmax_threshold": 0.1, "dropout_p": 0.1},
            flashjit.InvalidArgument,
            "skip_softmax is set and dropout is, too",
        ),
    ],
)
def test_refuses(options, error, said):
    with pytest.raises(error, match=said):
        flashjit.attention(*tensors(), **options)


def test_has_no_gradients():
    with pytest.raises(flashjit.Unsupported, match="skip_softmax_threshold is for inference"):
        flashjit.attention(*tensors(requires_grad=True), skip_softmax_threshold=0.1)
    with torch.no_grad():
        flashjit.attention(*tensors(requires_grad=True), skip_softmax_threshold=0.1)

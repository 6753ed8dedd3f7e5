"""Programs from functions that torch.compile traces: the same as in eager mode, whole graphs, without compiling again."""

import flashjit
import pytest

torch = pytest.importorskip("torch", reason="torch.compile")
F = torch.nn.functional
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

table, flags, cap = torch.randn(32), torch.rand(64) > 0.3, torch.tensor(5.0)


def tensors(length=8):
    return [torch.randn(2, 2, length, 16) for _ in range(3)]


def attend(**program):
    return lambda q, k, v: flashjit.attention(
        q, k, v, **{name: function(q, k) for name, function in program.items()}
    )


CASES = {
    "activations": attend(
        score_mod=lambda q, k: (
            lambda s, b, h, i, j: F.sigmoid(s) + F.tanh(s) + F.relu(s) + F.gelu(s) + s.tanh()
        )
    ),
    "reversed operators": attend(
        score_mod=lambda q, k: lambda s, b, h, i, j: 1 - s + 2 / (i + 1) + 3 // (j + 1) + 7 % (i + 1) + 2.0**s
    ),
    "conditions": attend(
        mask_mod=lambda q, k: (
            lambda b, h, i, j: ~(i < j) & ((3 > j) | (0 == j) | (2 <= i)) | ((i & 1) == 0) & True
        )
    ),
    "numbers on the left of conditions": attend(
        mask_mod=lambda q, k: (
            lambda b, h, i, j: (3 < j) & (5 >= i) | True & (2 != i) & (1 <= j) | False ^ (4 > j)
        )
    ),
    "captured tensors": attend(
        score_mod=lambda q, k: lambda s, b, h, i, j: cap * torch.tanh(s / cap) + table[i - j] + table[-1],
        mask_mod=lambda q, k: lambda b, h, i, j: ~flags[j] | (i >= j),
    ),
    "sizes of captured tensors": attend(
        score_mod=lambda q, k: (
            lambda s, b, h, i, j: s + table[(i + j) % len(table)] + table[j % table.shape[0]]
        )
    ),
    "lengths and a batch size": attend(
        score_mod=lambda q, k: lambda s, b, h, i, j: s + b * q.shape[0] + i * (1.0 / q.shape[2]),
        mask_mod=lambda q, k: lambda b, h, i, j: j <= i + (k.shape[2] - q.shape[2]),
    ),
    "lengths as captures": lambda q, k, v: flashjit.attention(
        q, k, v, score_mod="score + to_float(kv % n)", captures={"n": q.shape[2]}
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_programs_are_those_of_eager_mode(name, dynamic):
    torch._dynamo.reset()
    run = torch.compile(CASES[name], backend="eager", fullgraph=True, dynamic=dynamic)
    for length in (8, 11) if dynamic else (8,):
        given = tensors(length)
        torch.testing.assert_close(run(*given), CASES[name](*given))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_programs_within_a_checkpoint(name, dynamic):
    """Whole graphs, though tracing sets what is outside of the checkpoint while it is at work."""
    torch._dynamo.reset()
    bias = torch.randn(64, requires_grad=True)

    def step(q, k, v):
        layer = lambda q: CASES[name](
            q + flashjit.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i - j]), k, v
        )
        return torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False)

    run = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (8, 11) if dynamic else (8,):
        given = [x.requires_grad_() for x in tensors(length)]
        got, want = (torch.autograd.grad(f(*given).square().sum(), (*given, bias)) for f in (run, step))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [int, float])
def test_a_number_that_changes_compiles_once_more_and_no_more(kind):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = lambda q, k, v, w: flashjit.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * w + i)
    run, given = torch.compile(step, backend=counter, fullgraph=True), tensors()
    counts = []
    for number in (2, 3, 5, 7, 9):
        torch.testing.assert_close(run(*given, kind(number)), step(*given, kind(number)))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 4


def test_a_length_that_changes_compiles_no_other_kernel():
    """The program has no length in it, and gradients go through the graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    bias = torch.randn(64, requires_grad=True)

    def step(q, k, v):
        return flashjit.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i - j] * q.shape[2])

    run = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for length in (7, 9, 12):
        given = tensors(length)
        got, want = (torch.autograd.grad(f(*given).square().sum(), bias)[0] for f in (run, step))
        torch.testing.assert_close(got, want)
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 3


def test_other_modes_see_what_they_saw():
    """Tracing changes for itself alone which functions torch hands over to modes: F.tanh calls a method and nothing else."""

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), named=None):
            return function(*arguments, **(named or {})) + (function is F.tanh)

    def seen_by_another(x):
        with Seen():
            return F.tanh(x)

    step = lambda q, k, v: seen_by_another(
        flashjit.attention(q, k, v, score_mod=lambda s, b, h, i, j: F.tanh(s))
    )
    assert F.tanh in torch.overrides.get_ignored_functions()
    torch._dynamo.reset()
    q, k, v = tensors()
    torch.testing.assert_close(torch.compile(step, backend="eager", fullgraph=True)(q, k, v), step(q, k, v))

    def fails(s, b, h, i, j):
        torch._dynamo.graph_break("within the program")

    with pytest.raises(torch._dynamo.exc.Unsupported, match="within the program"):
        torch.compile(
            lambda q, k, v: flashjit.attention(q, k, v, score_mod=fails), backend="eager", fullgraph=True
        )(q, k, v)
    torch.testing.assert_close(torch.compile(seen_by_another, backend="eager", fullgraph=True)(q), F.tanh(q))

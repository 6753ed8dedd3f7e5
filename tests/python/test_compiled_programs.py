"""Programs from functions that torch.compile traces: the same as in eager mode, whole graphs, without compiling again."""
import pytest

import flashjit

torch = pytest.importorskip("torch", reason="torch.compile")
F = torch.nn.functional
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

table, flags, cap = torch.randn(32), torch.rand(64) > 0.3, torch.tensor(5.0)


def tensors(length=8):
    return [torch.randn(2, 2, length, 16) for _ in range(3)]


def attend(**program):
    return lambda q, k, v: flashjit.attention(q, k, v, **{name: function(q, k) for name, function in program.items()})


CASES = {
    "activations": attend(score_mod=lambda q, k: lambda s, b, h, i, j: F.sigmoid(s) + F.tanh(s) + F.relu(s) + F.gelu(s) + s.tanh()),
    "reversed operators": attend(score_mod=lambda q, k: lambda s, b, h, i, j: 1 - s + 2 / (i + 1) + 3 // (j + 1) + 7 % (i + 1) + 2.0 ** s),
    "conditions": attend(mask_mod=lambda q, k: lambda b, h, i, j: ~(i < j) & ((3 > j) | (0 == j) | (2 <= i)) | ((i & 1) == 0) & True),
    "captured tensors": attend(score_mod=lambda q, k: lambda s, b, h, i, j: cap * torch.tanh(s / cap) + table[i - j] + table[-1],
                               mask_mod=lambda q, k: lambda b, h, i, j: ~flags[j] | (i >= j)),
    "sizes of captured tensors": attend(score_mod=lambda q, k: lambda s, b, h, i, j: s + table[(i + j) % len(table)]
                                        + table[j % table.shape[0]]),
    "lengths and a batch size": attend(score_mod=lambda q, k: lambda s, b, h, i, j: s + b * q.shape[0] + i * (1.0 / q.shape[2]),
                                       mask_mod=lambda q, k: lambda b, h, i, j: j <= i + (k.shape[2] - q.shape[2])),
    "lengths as captures": lambda q, k, v: flashjit.attention(q, k, v, score_mod="score + to_float(kv % n)",
                                                              captures={"n": q.shape[2]}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_programs_are_those_of_eager_mode(programs, name, dynamic):
    torch._dynamo.reset()
    run = torch.compile(CASES[name], backend="eager", fullgraph=True, dynamic=dynamic)
    for length in (8, 11) if dynamic else (8,):
        given = tensors(length)
        torch.testing.assert_close(run(*given), CASES[name](*given))


@pytest.mark.parametrize("kind", [int, float])
def test_a_number_that_changes_compiles_once_more_and_no_more(programs, kind):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = lambda q, k, v, w: flashjit.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * w + i)
    run, given = torch.compile(step, backend=counter, fullgraph=True), tensors()
    counts = []
    for number in (2, 3, 5, 7, 9):
        torch.testing.assert_close(run(*given, kind(number)), step(*given, kind(number)))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 4


def test_a_length_that_changes_compiles_no_other_kernel(programs):
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

"""What tests of programs of elements, of O and of Q and K, compare with."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exact(q, k, v, is_causal=False):
    """O of a batch, by PyTorch's own operations."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if is_causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def tensors(queries=37, keys=61, dtype=torch.float32, dim=32):
    """Q, K, V and dO."""
    torch.manual_seed(5)
    sizes = ((2, 4, queries, dim), (2, 2, keys, dim), (2, 2, keys, dim), (2, 4, queries, dim))
    return [torch.randn(size, dtype=dtype).to(DEVICE) for size in sizes]


def wide(*given):
    """In fp64."""
    return [x.detach().double().requires_grad_() for x in given]


def compare(got, want, inputs, wides, dout, tolerance=2e-4):
    """Results and gradients."""
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    got_grads = torch.autograd.grad(got, inputs, dout)
    want_grads = torch.autograd.grad(want, wides, dout.double())
    for g, w in zip(got_grads, want_grads):
        torch.testing.assert_close(g.double(), w, rtol=5 * tolerance, atol=5 * tolerance)

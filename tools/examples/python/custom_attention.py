"""An attention of your own, forward and backward: ALiBi's slopes, learned, in a sliding window. Without a GPU the
CPU reference computes it.

    python3 tools/examples/python/custom_attention.py
"""

import flashjit
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, length, dim, window = 4, 256, 64, 100
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, length, dim, device=device, requires_grad=True) for _ in range(3))
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device, requires_grad=True)


def score(s, b, h, q_idx, kv_idx):
    return s + slopes[h] * (kv_idx - q_idx)


def mask(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)


out = flashjit.attention(q, k, v, score_mod=score, mask_mod=mask)
got = torch.autograd.grad(out.square().sum(), (q, k, v, slopes))

# The same with the whole matrix in memory.
distance = torch.arange(length, device=device) - torch.arange(length, device=device)[:, None]
scores = q @ k.transpose(2, 3) / dim**0.5 + slopes[:, None, None] * distance
wanted = torch.softmax(scores.masked_fill((distance > 0) | (distance <= -window), -torch.inf), 3) @ v
want = torch.autograd.grad(wanted.square().sum(), (q, k, v, slopes))

torch.testing.assert_close(out, wanted, atol=1e-3, rtol=1e-3)
for a, b in zip(got, want):
    torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)
print(
    f"flashjit {flashjit.version()} on {device}: the same as the matrix written out, and so are the gradients"
)

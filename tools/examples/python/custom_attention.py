"""An attention of your own, forward and backward: each query sees the keys of its document whose distance is 0 or a power of two,
with learned slopes (ALiBi) and a learned gate on O. Without a GPU the CPU reference computes it.

    python3 tools/examples/python/custom_attention.py
"""

import flashjit
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, length, dim = 4, 256, 64
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, length, dim, device=device, requires_grad=True) for _ in range(3))
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device, requires_grad=True)
gates = torch.randn(heads, dim, device=device, requires_grad=True)
document = torch.arange(length, device=device, dtype=torch.int32) // 100  # which document a token is of


def score(s, b, h, q_idx, kv_idx):
    return s - slopes[h] * (q_idx - kv_idx)


def mask(b, h, q_idx, kv_idx):
    far = q_idx - kv_idx
    return (far >= 0) & (far & (far - 1) == 0) & (document[q_idx] == document[kv_idx])


gate = lambda o, b, h, q_idx, column: o * torch.sigmoid(gates[h, column])
out = flashjit.attention(q, k, v, score_mod=score, mask_mod=mask, out_mod=gate)
got = torch.autograd.grad(out.square().sum(), (q, k, v, slopes, gates))

# The same with the whole matrix in memory.
far = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
seen = (far >= 0) & (far & (far - 1) == 0) & (document[:, None] == document)
scores = q @ k.transpose(2, 3) / dim**0.5 - slopes[:, None, None] * far
wanted = torch.softmax(scores.masked_fill(~seen, -torch.inf), 3) @ v * torch.sigmoid(gates)[:, None]
want = torch.autograd.grad(wanted.square().sum(), (q, k, v, slopes, gates))

torch.testing.assert_close(out, wanted, atol=1e-3, rtol=1e-3)
for a, b in zip(got, want):
    torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)
print(
    f"flashjit {flashjit.version()} on {device}: the same as the matrix written out, and so are the gradients"
)

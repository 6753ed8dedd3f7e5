"""Training with heads of 512 columns: FFPA (ffpa-attn) by Triton and by CuTe DSL, PyTorch's memory-efficient attention, and the forward pass
of vLLM's fork of FlashAttention-4, which takes such heads on Hopper."""

import functools
import typing

import racing
from measuring import F, SDPBackend, sdpa_kernel, torch

DIM = 512
FA4 = "FA4 of vLLM's fork"


class Problem(typing.NamedTuple):
    pass_name: str
    batch: int
    heads: int
    heads_kv: int
    tokens: int
    causal: bool

    @property
    def name(self):
        mask = "causal" if self.causal else "full"
        return f"{self.pass_name}, d{DIM} {mask}, {self.batch} x {self.tokens} tokens, {self.heads}/{self.heads_kv} heads"

    def operations(self):
        counted = racing.pairs([self.tokens] * self.batch, [self.tokens] * self.batch, self.causal)
        return 4.0 * self.heads * DIM * counted * (2.5 if self.pass_name == "backward" else 1.0)


def problems():
    for causal in (False, True):
        for batch, heads, heads_kv, tokens in ((4, 8, 8, 4096), (1, 32, 32, 8192), (2, 16, 4, 4096)):
            for pass_name in ("forward", "backward"):
                yield Problem(pass_name, batch, heads, heads_kv, tokens, causal)


def expected(q, k, v, dout, causal):
    """O and the gradients of Q, K and V in fp32, a head at a time."""
    out, dq, dk, dv = (torch.zeros(x.shape, device=q.device) for x in (q, q, k, v))
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    later = torch.ones(q.shape[2:3] * 2, device=q.device, dtype=torch.bool).triu(1)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            of = h // group
            rows, keys, values, grad = (x[b, i].float() for x, i in ((q, h), (k, of), (v, of), (dout, h)))
            scores = scale * (rows @ keys.T)
            weights = (scores.masked_fill(later, -torch.inf) if causal else scores).softmax(-1)
            out[b, h] = weights @ values
            dv[b, of] += weights.T @ grad
            dscores = weights * (grad @ values.T - (grad * out[b, h]).sum(-1, keepdim=True)) * scale
            dq[b, h], dk[b, of] = dscores @ keys, dk[b, of] + dscores.T @ rows
    return out, dq, dk, dv


def ours(q, k, v, causal):
    import flashjit

    return flashjit.attention(q, k, v, causal=causal)


def ffpa(q, k, v, causal, **how):
    from ffpa_attn import ffpa_attn_func

    return ffpa_attn_func(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1], **how)


def ffpa_with_tma(q, k, v, causal):
    from ffpa_attn import TritonBackend

    passes = ("forward", "backward")
    how = {f"{name}_backend": TritonBackend(**{name: True}, enable_tma=True) for name in passes}
    return ffpa(q, k, v, causal, **how)


def fa4(q, k, v, causal):
    from vllm.vllm_flash_attn.cute import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def pytorch(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


SIDES = {
    "flashjit": ours,
    "FFPA, Triton": functools.partial(ffpa, backend="triton"),
    "FFPA, Triton, TMA": ffpa_with_tma,
    "FFPA, CuTe DSL": functools.partial(ffpa, backend="cutedsl"),
    FA4: fa4,
    "PyTorch, memory-efficient": pytorch,
}


def backward_of(side, q, k, v, dout, causal):
    """The backward pass alone, of a forward pass that the first call makes."""
    kept = []

    def call():
        if not kept:
            inputs = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
            with torch.enable_grad():
                kept.extend((side(*inputs, causal), inputs))
        return torch.autograd.grad(kept[0], kept[1], dout, retain_graph=True)

    return call


def heat(problem, device="cuda"):
    torch.manual_seed(problem.tokens)
    like = dict(device=device, dtype=torch.bfloat16)
    shape = lambda heads: (problem.batch, heads, problem.tokens, DIM)
    q, k, v = (torch.randn(shape(n), **like) for n in (problem.heads, problem.heads_kv, problem.heads_kv))
    dout = torch.randn(shape(problem.heads), **like)
    out, *gradients = expected(q, k, v, dout, problem.causal)
    forward = problem.pass_name == "forward"
    calls = {}
    for who, side in SIDES.items():
        if forward:
            calls[who] = [functools.partial(side, q, k, v, problem.causal)]
        elif who != FA4:  # whose backward pass ends at 256 columns
            calls[who] = [backward_of(side, q, k, v, dout, problem.causal)]
    wanted = (out,) if forward else tuple(gradients)
    limit = 0.01 if forward else 0.02
    return racing.Heat(problem.name, calls, wanted, limit, problem.operations(), graphs=False)


RACE = racing.Race(
    "wide",
    ("ffpa_attn",),
    "bash tools/bench/peers.sh wide",
    problems,
    heat,
    {"FFPA": "ffpa-attn", "FA4": "vllm"},
)

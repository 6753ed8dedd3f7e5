"""jvp_flash_attention, a Triton kernel: O and its tangent by torch.func.jvp."""

import typing

import racing
from measuring import torch


class Problem(typing.NamedTuple):
    dim: int
    batch: int
    heads: int
    tokens: int
    causal: bool

    @property
    def name(self):
        return f"d{self.dim} {'causal' if self.causal else 'full'}, {self.batch} x {self.tokens} tokens, {self.heads} heads"

    def operations(self):
        """Six products where the forward pass has two."""
        counted = racing.pairs([self.tokens] * self.batch, [self.tokens] * self.batch, self.causal)
        return 12.0 * self.heads * self.dim * counted


def problems():
    for dim, heads in ((64, 32), (128, 16)):
        for batch, tokens in ((16, 1024), (4, 4096)):
            for causal in (False, True):
                yield Problem(dim, batch, heads, tokens, causal)


def expected(primals, tangents, causal):
    """O and its tangent in fp32, a head at a time."""
    out, tangent = (torch.empty(primals[0].shape, device=primals[0].device) for _ in range(2))
    scale = primals[0].shape[3] ** -0.5
    later = torch.ones(primals[0].shape[2:3] * 2, device=out.device, dtype=torch.bool).triu(1)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            q, k, v, dq, dk, dv = (x[b, h].float() for x in (*primals, *tangents))
            scores, change = scale * (q @ k.T), scale * (dq @ k.T + q @ dk.T)
            weights = (scores.masked_fill(later, -torch.inf) if causal else scores).softmax(-1)
            weighted = weights * change
            out[b, h] = weights @ v
            tangent[b, h] = weighted @ v + weights @ dv - weighted.sum(-1, keepdim=True) * out[b, h]
    return out, tangent


def heat(problem, device="cuda"):
    import flashjit
    from jvp_flash_attention.jvp_attention import JVPAttn

    torch.manual_seed(problem.tokens)
    shape = problem.batch, problem.heads, problem.tokens, problem.dim
    primals, tangents = (
        tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)) for _ in range(2)
    )

    def dual(function):
        return lambda: torch.func.jvp(function, primals, tangents)

    ours = dual(lambda q, k, v: flashjit.attention(q, k, v, causal=problem.causal))
    calls = {"flashjit": [ours]}
    for tma in (True, False):
        for specialized in (True, False):
            name = "jvp_flash_attention" + ", TMA" * tma + ", warp specialised" * specialized
            calls[name] = [
                dual(
                    lambda q, k, v, tma=tma, specialized=specialized: JVPAttn.fwd_dual(
                        q, k, v, causal=problem.causal, warp_specialize=specialized, USE_TMA=tma
                    )
                )
            ]
    return racing.Heat(
        problem.name, calls, expected(primals, tangents, problem.causal), 0.02, problem.operations()
    )


RACE = racing.Race(
    "tangents",
    ("jvp_flash_attention",),
    "pip install jvp_flash_attention",
    problems,
    heat,
    {"jvp_flash_attention": "jvp_flash_attention"},
)

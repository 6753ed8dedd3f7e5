"""FlashAttention-3 with Q, K and V in e4m3: vLLM's fork, which moves its sums to fp32 as it goes, and the one on PyPI, where they are
installed. The last rows are checked, which see all keys also under a causal mask."""

import functools
import math
import typing

import eight_bits
import racing
import torch

ROWS = eight_bits.ROWS


class Problem(typing.NamedTuple):
    dim: int
    heads: int
    tokens: int
    causal: bool

    @property
    def name(self):
        mask = "causal" if self.causal else "full"
        return f"e4m3 d{self.dim} {mask}, 1 x {self.tokens} tokens, {self.heads} heads"

    def operations(self):
        return 4.0 * self.heads * self.dim * racing.pairs([self.tokens], [self.tokens], self.causal)


def problems():
    for dim in (128, 256):
        for tokens, heads in ((16384, 2048 // dim), (131072, 512 // dim)):
            for causal in (False, True):
                yield Problem(dim, heads, tokens, causal)


def expected(codes, scales, causal):
    """O of the last rows, fp32 [1, heads, ROWS, dim], of what the codes mean."""
    q, k, v = codes
    rows = torch.arange(q.shape[2] - ROWS, q.shape[2], device=q.device)
    keys, found = torch.arange(k.shape[2], device=q.device), []
    for h in range(q.shape[1]):
        of = [x[0, h].float() * scale[0, h] for x, scale in zip((q[:, :, rows[0] :], k, v), scales)]
        scores = of[0] @ of[1].T / math.sqrt(q.shape[3])
        if causal:
            scores.masked_fill_(keys > rows[:, None], -math.inf)
        found.append(scores.softmax(-1) @ of[2])
    return torch.stack(found)[None]


def ours(codes, scales, causal):
    import flashjit

    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
    return functools.partial(flashjit.attention, *codes, causal=causal, **named)


def vllms(codes, scales, causal):
    """The operator that vLLM's Python calls; it was built for packed sequences alone."""
    from vllm.vllm_flash_attn import _vllm_fa3_C  # noqa: F401  (registers it)

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in codes)
    tokens = q.shape[0]
    ends = torch.tensor([0, tokens], device=q.device, dtype=torch.int32)
    begin = [q, k, v, None, None, None, None, ends, ends, None, None, None, tokens, tokens]
    cache, rotary = [None] * 3, [None] * 3
    end = [q.shape[2] ** -0.5, causal, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None]

    def call():
        out = torch.ops._vllm_fa3_C.fwd(*begin, *cache, *rotary, *scales, *end)[0]
        return out.transpose(0, 1)[None]

    return call


def pypis(codes, scales, causal):
    return eight_bits.fa3_method()(*codes, scales, causal)


SIDES = {"flashjit": ours, "FA3 of vLLM's fork": vllms, "FA3": pypis}


def last_rows(make, *given):
    """A call, prepared when it is first made, of whose O the last rows are seen."""
    made = []

    def call():
        if not made:
            made.append(make(*given))
        return made[0]()[:, :, -ROWS:]

    return call


def heat(problem, device="cuda"):
    drawn = eight_bits.draw_inputs("mean", problem.tokens, problem.dim, device, problem.heads)
    codes, scales = zip(*(eight_bits.quantized(x) for x in drawn))
    calls = {who: [last_rows(side, codes, scales, problem.causal)] for who, side in SIDES.items()}
    wanted = (expected(codes, scales, problem.causal),)
    return racing.Heat(problem.name, calls, wanted, 0.05, problem.operations())


RACE = racing.Race(
    "codes",
    ("vllm.vllm_flash_attn",),
    "bash tools/bench/peers.sh codes",
    problems,
    heat,
    {"FA3 of vLLM": "vllm", "FA3": "fa3-fwd"},
)

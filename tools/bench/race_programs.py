"""FlexAttention on FlashAttention-4 (BACKEND="FLASH"), what that calls by itself, and cuDNN's flex attention for masks that are intervals of
keys, beside the cases of variants.py. All have what they know of a mask made beforehand: block masks, plans, tile lists."""

import typing

import measuring
import racing
import variants
from fa4_programs import FlashAttention4
from measuring import torch
from variants import PREFIX, WINDOW

BATCH, HIDDEN, LENGTH = 2, 2048, 8192
CASES = ("causal", "window", "documents", "prefix", "alibi", "softcap")


class Problem(typing.NamedTuple):
    pass_name: str
    case: str
    dim: int

    @property
    def name(self):
        return f"{self.pass_name}, {self.case} d{self.dim}"


def problems():
    for dim in (128, 64):
        for case in CASES:
            for pass_name in measuring.PASSES:
                yield Problem(pass_name, case, dim)


def expected(case, q, k, v, dout):
    """O and the gradients of Q, K and V in fp32, a head at a time."""
    found = [torch.empty(x.shape, device=q.device) for x in (q, q, k, v)]
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    keys = torch.arange(k.shape[2], device=q.device)[None]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            inputs = [x[b, h].float().requires_grad_() for x in (q, k, v)]
            with torch.enable_grad():
                scores = q.shape[3] ** -0.5 * (inputs[0] @ inputs[1].T)
                if case.score_mod:
                    scores = case.score_mod(scores, b, torch.tensor(h), rows, keys)
                if case.mask_mod:
                    scores = scores.masked_fill(~case.mask_mod(b, h, rows, keys), -torch.inf)
                out = scores.softmax(-1) @ inputs[2]
                gradients = torch.autograd.grad(out, inputs, dout[b, h].float())
            for whole, part in zip(found, (out.detach(), *gradients)):
                whole[b, h] = part
    return found


def intervals(case, length, device):
    """int32 [1, n, length]: query q sees the keys [0, F0), and [F1, F2) where n is 3; or None."""
    q = torch.arange(length, device=device)
    zero = torch.zeros_like(q)
    if case.score_mod:
        return None
    if case.name == "causal":
        parts = [q + 1]
    elif case.name == "window":
        parts = [zero, (q - WINDOW + 1).clamp_min(0), q + 1]
    elif case.name == "documents":
        ids = case.captures["ids"]
        parts = [zero, torch.searchsorted(ids, ids), q + 1]
    elif case.name == "prefix":
        parts = [(q + 1).clamp_min(PREFIX)]
    else:
        return None
    return torch.stack(parts)[None].to(torch.int32).contiguous()


class Flash:
    """FlexAttention, compiled for its shape, on FlashAttention-4."""

    def __init__(self, case, q, k, v, dout):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        mask = case.mask_mod and create_block_mask(
            case.mask_mod, None, None, q.shape[2], k.shape[2], device=q.device
        )
        options = {"BACKEND": "FLASH"}
        self.call = torch.compile(
            lambda q, k, v: flex_attention(
                q, k, v, score_mod=case.score_mod, block_mask=mask, kernel_options=options
            ),
            dynamic=False,
        )
        self.dout, self.inputs = dout, [x.detach().clone().requires_grad_() for x in (q, k, v)]
        self.out = None

    def fwd(self):
        return self.call(*(x.detach() for x in self.inputs))

    def bwd(self):
        if self.out is None:
            with torch.enable_grad():
                self.out = self.call(*self.inputs)
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)


class Intervals:
    """cuDNN's flex attention, which takes [batch, tokens, heads, dim]."""

    def __init__(self, case, q, k, v, dout):
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        ends = intervals(case, q.shape[2], q.device)
        if ends is None:
            raise ValueError("cuDNN's flex attention has masks of intervals, and no score programs")
        tokens_first = lambda x: x.transpose(1, 2).contiguous()
        self.inputs = [tokens_first(x).requires_grad_() for x in (q, k, v)]
        self.dout, self.out = tokens_first(dout), None
        plan = create_mask_plan(
            ends.expand(1, -1, -1).repeat(1, 1, q.shape[0]), *self.inputs, build_backward=True
        )
        self.call = lambda *inputs: flex_attn_func(*inputs, mask_plan=plan)

    def fwd(self):
        return self.call(*(x.detach() for x in self.inputs)).transpose(1, 2)

    def bwd(self):
        if self.out is None:
            with torch.enable_grad():
                self.out = self.call(*self.inputs)
        gradients = torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)
        return tuple(x.transpose(1, 2) for x in gradients)


class Programs:
    """Ours, with tile lists."""

    def __init__(self, case, q, k, v, dout):
        spec = f"bf16:d{q.shape[3]}{case.parts}"
        runtime = measuring.abi.Runtime()
        self.problem = measuring.Ours(runtime, spec, q, k, v, dout, captures=case.captures, lists=True)
        self.problem.forward()

    def fwd(self):
        self.problem.forward()
        return self.problem.out

    def bwd(self):
        self.problem.backward()
        return self.problem.dq, self.problem.dk, self.problem.dv


SIDES = {
    "flashjit": Programs,
    "FlexAttention, FLASH": Flash,
    "FlashAttention-4": FlashAttention4,
    "cuDNN flex": Intervals,
}


def called(make, pass_name):
    """A call of a pass, of what the first call makes."""
    made = []

    def call():
        if not made:
            made.append(make())
        return getattr(made[0], pass_name)()

    return call


def heat(problem, device="cuda"):
    case = next(case for case in variants.cases(LENGTH, device) if case.name == problem.case)
    torch.manual_seed(problem.dim)
    shape = BATCH, HIDDEN // problem.dim, LENGTH, problem.dim
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    forward = problem.pass_name == "fwd"
    out, *gradients = expected(case, *tensors)
    calls = {
        who: [called(lambda side=side: side(case, *tensors), problem.pass_name)]
        for who, side in SIDES.items()
    }
    pairs = variants.counts_of(case, BATCH, LENGTH)[0] if device == "cuda" else 1
    operations = 4.0 * pairs * shape[0] * shape[1] * problem.dim * (1.0 if forward else 2.5)
    wanted, limit = ((out,), 0.01) if forward else (tuple(gradients), 0.02)
    return racing.Heat(problem.name, calls, wanted, limit, operations, graphs=False)


RACE = racing.Race(
    "programs",
    ("flash_attn.cute",),
    "pip install flash-attn-4 nvidia-cutlass-dsl[cu13]",
    problems,
    heat,
    {"FlexAttention": "flash-attn-4", "FlashAttention": "flash-attn-4", "cuDNN": "nvidia-cudnn-frontend"},
)

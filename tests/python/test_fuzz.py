"""Random problems by random callers against attention written out in fp64, on the CPU and, where there is one, on a GPU.

Each test's name has its seed: FLASHJIT_TEST_SEED=... FLASHJIT_TEST_RUNS=1 repeats one, FLASHJIT_TEST_RUNS=1000 looks longer.
"""

import dataclasses
import math
import os
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from flashjit.torch import BlockMap  # noqa: E402

SEED = int(os.environ.get("FLASHJIT_TEST_SEED") or random.SystemRandom().randrange(10**9))
RUNS = int(os.environ.get("FLASHJIT_TEST_RUNS") or 60)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
CALLERS = ["eager", "eager", "compiled", "checkpointed", "checkpointed and compiled", "vmap", "no_grad"]
LAYOUTS = ["bhsd", "bshd", "packed", "misaligned", "columns", "rows"]


@dataclasses.dataclass
class Case:
    """What was drawn."""

    device: str
    dtype: Any
    batch: int
    heads_kv: int
    group: int
    lengths_q: list
    lengths_kv: list
    dim: int
    dim_v: int
    varlen: bool
    tail: int
    caller: str
    layout: str
    causal: Any
    mask: str
    score: str
    sinks: bool
    kv_lengths: bool
    dropout_p: float
    scale: Any
    deterministic: bool
    lse: bool


def draw(device, pick):
    """pick: random.Random."""
    long = 300 if device == "cuda" else 40
    batch, varlen = pick.randint(1, 3), pick.random() < 0.3
    lengths = lambda: (
        [pick.randint(0, long) if pick.random() < 0.9 else 0 for _ in range(batch)]
        if varlen
        else [pick.randint(1, long)] * batch
    )
    dims = [8, 16, 24, 32, 40, 64] if device == "cpu" else [8, 32, 64, 64, 96, 128, 128, 192, 256]
    dim = pick.choice(dims)
    dtype = pick.choice([torch.float32, torch.float16, torch.bfloat16])
    mask = pick.choice(["", "", "window", "documents", "map", "flex"])
    if varlen and mask in ("map", "flex"):
        mask = "window"
    caller = pick.choice(CALLERS)
    score = pick.choice(["", "", "bias", "slopes", "cap"])
    if varlen and caller == "vmap":
        caller = "eager"
    if caller == "checkpointed and compiled" and (
        score or mask not in ("", "map")
    ):  # no program can be traced in a checkpoint yet
        mask = score = ""
    kv_lengths = not varlen and pick.random() < 0.2
    lengths_q, lengths_kv = lengths(), lengths()
    causal = pick.choice([False, True, "top_left"]) if mask != "flex" else False
    if causal is True and kv_lengths and lengths_q[0] not in (1, lengths_kv[0]):  # is refused
        causal = "top_left"
    # As kept() does. On a GPU compiled code draws a seed there, and vmap refuses to.
    draws_alike = caller != "vmap" and not (device == "cuda" and "compiled" in caller)
    return Case(
        device,
        dtype,
        batch,
        pick.randint(1, 3),
        pick.randint(1, 3),
        lengths_q,
        lengths_kv,
        dim,
        dim if pick.random() < 0.7 else pick.choice(dims),
        varlen,
        pick.randint(0, 9) if varlen else 0,
        caller,
        pick.choice(LAYOUTS),
        causal,
        mask,
        score,
        pick.random() < 0.3,
        kv_lengths,
        pick.choice([0.0, 0.0, 0.25]) if draws_alike else 0.0,
        pick.choice([None, None, 0.3]),
        pick.random() < 0.2,
        pick.random() < 0.4,
    )


def laid_out(x, layout):
    """The same numbers elsewhere in memory."""
    x = x.detach()
    if layout == "bshd":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "packed":
        x = torch.stack([x, x], 2)[:, :, 1]
    elif layout == "misaligned":
        x = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
    elif layout == "columns":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "rows":
        x = torch.nn.functional.pad(x, (0, 1))[..., :-1]
    return x.requires_grad_()


class Problem:
    """The tensors of a case, attention() of them, and the same written out."""

    def __init__(self, case, seed):
        self.case = case
        self.generator = torch.Generator().manual_seed(seed)
        batch = 1 if case.varlen else case.batch
        self.heads = case.heads_kv * case.group
        self.longest_q, self.longest_kv = (max(x) for x in (case.lengths_q, case.lengths_kv))
        self.rows_q, self.rows_kv = (
            sum(x) if case.varlen else x[0] for x in (case.lengths_q, case.lengths_kv)
        )
        sizes = [
            (batch, self.heads, self.rows_q + case.tail, case.dim),
            (batch, case.heads_kv, self.rows_kv + case.tail, case.dim),
            (batch, case.heads_kv, self.rows_kv + case.tail, case.dim_v),
        ]
        numbers = [self.randn(*size) for size in sizes]
        for x, rows in zip(numbers, (self.rows_q, self.rows_kv, self.rows_kv)):
            x[:, :, rows:] = math.nan
        self.q, self.k, self.v = (laid_out(x, case.layout) for x in numbers)
        self.leaves = {"q": self.q, "k": self.k, "v": self.v}
        self.named = dict(
            causal=case.causal, scale=case.scale, dropout_p=case.dropout_p, deterministic=case.deterministic
        )
        self.sinks = self.kv_lengths = None
        if case.sinks:
            self.sinks = self.named["sinks"] = self.leaves["sinks"] = self.randn(
                self.heads, dtype=torch.float32
            ).requires_grad_()
        if case.kv_lengths:
            self.kv_lengths = self.named["kv_lengths"] = torch.randint(
                0, self.longest_kv + 1, (case.batch,), dtype=torch.int32, generator=self.generator
            ).to(case.device)
        if case.varlen:
            offsets = lambda lengths: (
                torch.tensor([0, *lengths], device=case.device).cumsum(0).to(torch.int32)
            )
            self.named.update(
                cu_seqlens_q=offsets(case.lengths_q),
                cu_seqlens_kv=offsets(case.lengths_kv),
                max_seqlen_q=max(self.longest_q, 1),
                max_seqlen_kv=max(self.longest_kv, 1),
            )
        self.add_programs()

    def randn(self, *size, dtype=None):
        return torch.randn(size, generator=self.generator).to(self.case.device, dtype or self.case.dtype)

    def add_programs(self):
        """self.score and self.keep: the same functions on tensors of indices, for the formula."""
        case = self.case
        self.score = self.keep = None
        if case.score == "bias":
            bias = self.leaves["bias"] = self.randn(
                case.batch, self.heads, max(self.longest_q, 1), max(self.longest_kv, 1), dtype=torch.float32
            ).requires_grad_()
            self.score = lambda s, b, h, q, kv: s + bias[b, h, q, kv]
        elif case.score == "slopes":
            slopes = self.leaves["slopes"] = (
                self.randn(self.heads, dtype=torch.float32).mul_(0.1).requires_grad_()
            )
            self.score = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
        elif case.score == "cap":
            self.score = lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0)
        if case.mask == "window":
            self.keep = lambda b, h, q, kv: q - kv < 7
        elif case.mask == "documents":
            size = max(self.longest_q, self.longest_kv, 1)
            documents = (
                torch.randint(0, 3, (size,), generator=self.generator).sort()[0].to(case.device, torch.int32)
            )
            self.keep = lambda b, h, q, kv: documents[q] == documents[kv]
        if self.score is not None:
            self.named["score_mod"] = self.score
        if self.keep is not None:
            self.named["mask_mod"] = self.keep
        if case.mask == "map":
            blocks = (
                torch.rand(
                    case.batch,
                    self.heads,
                    -(-self.longest_q // 16),
                    -(-self.longest_kv // 16),
                    generator=self.generator,
                )
                > 0.4
            ).to(case.device)
            self.named["block_mask"] = BlockMap(blocks, 16)
            self.keep = lambda b, h, q, kv: blocks[b, h, q // 16, kv // 16]
        elif case.mask == "flex":
            flex = pytest.importorskip("torch.nn.attention.flex_attention")
            self.keep = lambda b, h, q, kv: (q + 3 * h >= kv) & (kv != 5)
            self.named["block_mask"] = flex.create_block_mask(
                self.keep,
                None,
                self.heads,
                self.longest_q,
                self.longest_kv,
                device=case.device,
                BLOCK_SIZE=random.Random(case.dim).choice([8, 16, 100]),
            )

    def kept(self):
        """What dropout multiplies each pair with: found by such a call with V the identity."""
        case, columns = self.case, min(256, -(-max(self.longest_kv, 1) // 8) * 8)
        zeros = lambda heads, rows: torch.zeros(case.batch, heads, rows, case.dim, device=case.device)
        eye, parts = torch.eye(self.longest_kv, device=case.device), []
        for first in range(0, self.longest_kv, columns):
            some = eye[:, first : first + columns]
            v = (
                torch.nn.functional.pad(some, (0, columns - some.shape[1]))
                .expand(case.batch, case.heads_kv, -1, -1)
                .contiguous()
            )
            torch.manual_seed(77)
            parts.append(
                flashjit.attention(
                    zeros(self.heads, self.longest_q),
                    zeros(case.heads_kv, self.longest_kv),
                    v,
                    dropout_p=case.dropout_p,
                )[..., : some.shape[1]]
            )
        p = torch.cat(parts, 3) if parts else zeros(self.heads, self.longest_q)[..., :0]
        return (p != 0).double() / (1 - case.dropout_p)

    def formula(self, dtype):
        """O and LSE of each sequence, in the tensors' layout."""
        case = self.case
        dropped = self.kept() if case.dropout_p else None
        outs, lses, begin_q, begin_kv = [], [], 0, 0
        for b in range(case.batch):
            n, m = case.lengths_q[b], case.lengths_kv[b]
            if case.varlen:
                q, k, v = (
                    x[0, :, first : first + rows]
                    for x, first, rows in ((self.q, begin_q, n), (self.k, begin_kv, m), (self.v, begin_kv, m))
                )
            else:
                q, k, v = self.q[b], self.k[b], self.v[b]
            out, lse = self.sequence(
                b, *(x.to(dtype) for x in (q, k, v)), None if dropped is None else dropped[b].to(dtype)
            )
            outs.append(out)
            lses.append(lse)
            begin_q, begin_kv = begin_q + n, begin_kv + m
        if not case.varlen:
            return torch.stack(outs), torch.stack(lses)
        pad = torch.nn.functional.pad
        return (
            pad(torch.cat(outs, 1), (0, 0, 0, case.tail))[None],
            pad(torch.cat(lses, 1), (0, case.tail), value=-math.inf)[None],
        )

    def sequence(self, b, q, k, v, dropped):
        case, n, m = self.case, q.shape[1], k.shape[1]
        k, v = k.repeat_interleave(case.group, 0), v.repeat_interleave(case.group, 0)
        s = (case.scale or case.dim**-0.5) * q @ k.transpose(1, 2)
        at = [torch.tensor(b, device=case.device)] + [
            x.to(case.device)
            for x in (torch.arange(self.heads)[:, None, None], torch.arange(n)[:, None], torch.arange(m))
        ]
        if self.score is not None and n and m:
            s = self.score(s, *at).to(q.dtype)
        keep = torch.ones(self.heads, n, m, dtype=torch.bool, device=case.device)
        if self.keep is not None and n and m:
            keep = keep & self.keep(*at)
        if case.causal:
            keep = keep & (at[3] <= at[2] + (m - n if case.causal is True else 0))
        if self.kv_lengths is not None:
            keep = keep & (at[3] < self.kv_lengths[b])
        s = s.masked_fill(~keep, -math.inf)
        if self.sinks is not None:
            s = torch.cat([s, self.sinks.to(q.dtype)[:, None, None].expand(-1, n, 1)], 2)
        nothing = (s == -math.inf).all(2, keepdim=True)
        p = torch.softmax(s.masked_fill(nothing, 0.0), 2).masked_fill(nothing, 0.0)[..., :m]
        lse = torch.logsumexp(s.masked_fill(nothing, 0.0), 2).masked_fill(nothing[..., 0], -math.inf)
        if dropped is not None:
            p = p * dropped[:, :n, :m]
        return p @ v, lse

    def call(self):
        """[O, LSE], by the case's caller."""
        names = ("q", "k", "v")

        def function(q, k, v):
            return flashjit.attention(q, k, v, return_lse=True, **self.named)

        if "checkpointed" in self.case.caller:
            inner = function

            def function(q, k, v):  # noqa: F811
                return torch.utils.checkpoint.checkpoint(inner, q, k, v, use_reentrant=False)

        if "compiled" in self.case.caller:
            torch._dynamo.reset()
            function = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
        tensors = [self.leaves[name] for name in names]
        torch.manual_seed(77)
        if self.case.caller == "no_grad":
            with torch.no_grad():
                return list(function(*tensors))
        if self.case.caller == "vmap":
            return [
                x[1]
                for x in torch.func.vmap(function)(*(torch.stack([torch.zeros_like(x), x]) for x in tensors))
            ]
        return list(function(*tensors))


def poison(device):
    """NaN in memory that is free then."""
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
        kept = [torch.full((size,), math.nan, device=device) for _ in range(4)]
        del kept


def gradient_from_errors_of_d(problem, out, exact, dout):
    """D is the sum of dO O over O as it was stored. Its error e changes a row's dS by -P e, and so the gradient of the slopes, as
    the gradient of e LSE says. Where a row's distances are large and alike, that is more than all other rounding."""
    errors = ((out.detach().double() - exact[0].detach()) * dout.double()).sum(3)
    lse = torch.where(exact[1] == -math.inf, 0.0, exact[1])
    slopes = problem.leaves["slopes"]
    loss = (errors * lse).sum() + 0 * slopes.sum()  # a sum without elements requires no gradient
    return torch.autograd.grad(loss, slopes, retain_graph=True)[0].abs().max()


def compare(name, got, exact, rounded, dtype, factor, more=0.0):
    assert got.shape == exact.shape, name
    got = got.double()
    assert torch.equal(got == -math.inf, exact == -math.inf), name
    got, exact, rounded = (x.double().masked_fill(exact == -math.inf, 0.0) for x in (got, exact, rounded))
    assert got.isfinite().all(), f"{name} is not finite"
    if got.numel() == 0:
        return
    error, of_rounded = (got - exact).abs().max(), (rounded - exact).abs().max()
    # Gradients of captures are added up over all pairs, in an order that differs.
    limit = factor * of_rounded + 8 * torch.finfo(dtype).eps * exact.abs().max() + 1e-5 + more
    assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(SEED, SEED + RUNS))
def test_a_random_problem(device, seed):
    case = draw(device, random.Random(seed))
    print(case)  # which pytest shows where it fails
    problem = Problem(case, seed)
    poison(device)
    out, lse = problem.call()
    exact, rounded = problem.formula(torch.float64), problem.formula(case.dtype)
    compare("out", out, exact[0], rounded[0], case.dtype, 2)
    compare("lse", lse, exact[1], rounded[1], case.dtype, 2)
    if case.caller == "no_grad":
        return
    dout = laid_out(problem.randn(*out.shape), random.Random(seed + 1).choice(LAYOUTS)).detach()
    weights = torch.where(exact[1] == -math.inf, 0.0, problem.randn(*lse.shape).double())
    if case.varlen:
        dout[:, :, problem.rows_q :] = 0

    def gradients(out, lse):
        loss = (out * dout.to(out.dtype)).sum()
        if case.lse:
            loss = loss + (torch.where(weights == 0, 0.0, lse) * weights.to(lse.dtype)).sum()
        return torch.autograd.grad(
            loss, tuple(problem.leaves.values()), allow_unused=True, materialize_grads=True
        )

    poison(device)
    got = gradients(out, lse)
    from_d = gradient_from_errors_of_d(problem, out, exact, dout) if "slopes" in problem.leaves else 0.0
    right, less = gradients(*exact), gradients(*rounded)
    for name, a, b, c in zip(problem.leaves, got, right, less):
        more = from_d if name == "slopes" else 0.0
        compare(
            f"the gradient of {name}",
            a,
            torch.nan_to_num(b.double()),
            torch.nan_to_num(c.double()),
            case.dtype,
            3,
            more,
        )

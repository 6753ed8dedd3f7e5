"""Random programs of every stage, alone and together, on the GPU where there is one, against plain operations in fp64: O, LSE, and
all derivatives that there are.

FLASHJIT_TEST_SEED=<n> draws those of another seed; each failure names its own.
"""

import os
import random

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from element_programs import DEVICE  # noqa: E402
from test_jvp import wide  # noqa: E402

SEED = int(os.environ.get("FLASHJIT_TEST_SEED") or 62)
DIM = 8
STAGES = ("score_mod", "weight_mod", "mask_mod", "q_mod", "k_mod", "out_mod")


class Rows:
    """Rows of Q or K, [batch, heads, length, DIM], as q_mod and k_mod see one of them."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, column):
        return self.rows.gather(-1, torch.as_tensor(column, device=DEVICE).expand(self.rows.shape))

    def square(self):
        return Rows(self.rows.square())

    def sum(self):
        return self.rows.sum(-1, keepdim=True)


def expression(pick, leaves, depth):
    """A function of what the leaves are functions of: smooth, and bounded where its leaves are."""
    if depth == 0:
        return pick.choice(leaves)
    a, b = (expression(pick, leaves, depth - 1) for _ in range(2))
    factor = pick.choice([-0.7, 0.4, 1.1])
    return pick.choice(
        [
            lambda *x: a(*x) + b(*x) * factor,
            lambda *x: a(*x) * torch.tanh(b(*x)),
            lambda *x: torch.sigmoid(a(*x)) * factor + b(*x),
            lambda *x: torch.sin(a(*x)) + b(*x) * 0.5,
            lambda *x: torch.where(x[2] % 2 == 0, a(*x), b(*x)),
            lambda *x: a(*x) * torch.rsqrt(b(*x) * b(*x) + 1.5),
        ]
    )


def program(pick, stage, extra):
    """A random program of the stage's own arguments; extra: [heads] and [length] captured tensors."""
    of_heads, of_positions = extra
    position = 2 if stage in ("q_mod", "k_mod", "out_mod") else 3
    captured = [lambda *x: of_heads[x[2]], lambda *x: of_positions[x[position + 1]]]
    if stage in ("q_mod", "k_mod"):
        flip = pick.choice([1, 3, 7])
        leaves = [
            lambda row, *x: row[x[-1]],
            lambda row, *x: row[x[-1] ^ flip],
            lambda row, *x: row[x[-1]] * torch.rsqrt(row.square().sum() / DIM + 0.5),
        ]
    else:
        leaves = [lambda x, *_: x] * 2
    body = expression(pick, [*leaves, *captured], pick.randint(1, 2))
    first = leaves[0]
    if stage == "weight_mod":
        return lambda *x: torch.sigmoid(body(*x)) * 0.3
    return lambda *x: first(*x) + 0.5 * body(*x)


def mask(pick):
    width, step = pick.randint(1, 4), pick.choice([2, 3])
    return pick.choice(
        [
            lambda b, h, q, kv: q + 2 >= kv,
            lambda b, h, q, kv: (q - kv < width) & (kv - q < width),
            lambda b, h, q, kv: (kv % step != 0) | (q == kv) | (h == 0),
        ]
    )


class Case:
    """Which stages a call has, and the captured tensors that they read: a pair for each."""

    def __init__(self, seed, among=STAGES):
        pick = random.Random(seed)
        self.stages = [stage for stage in among if pick.random() < 0.5] or [pick.choice(among)]
        if {"score_mod", "weight_mod"} <= set(self.stages):
            self.stages.remove(pick.choice(["score_mod", "weight_mod"]))
        self.softmax = "weight_mod" not in self.stages
        self.heads_kv = pick.choice([1, 2])
        self.queries, self.keys = pick.randint(1, 5), pick.randint(2, 6)
        self.draws = {stage: pick.randrange(2**30) for stage in self.stages}
        torch.manual_seed(seed)
        sizes = [(1, 2, self.queries), (1, self.heads_kv, self.keys), (1, self.heads_kv, self.keys)]
        self.tensors = [torch.randn(*size, DIM, device=DEVICE) for size in sizes]
        self.tensors += [
            torch.randn(n, device=DEVICE) for stage in self.stages if stage != "mask_mod" for n in (2, 6)
        ]

    def programs(self, captured):
        made, rest = {}, iter(captured)
        for stage in self.stages:
            pick = random.Random(self.draws[stage])
            made[stage] = (
                mask(pick) if stage == "mask_mod" else program(pick, stage, (next(rest), next(rest)))
            )
        return made

    def ours(self, q, k, v, *captured):
        """(out, lse), or (out,) of weights."""
        made = flashjit.attention(q, k, v, return_lse=self.softmax, **self.programs(captured))
        return made if self.softmax else (made,)

    def plain(self, q, k, v, *captured):
        programs = self.programs(captured)
        q, k = (self._changed(programs.get(stage), x, Rows(x)) for stage, x in (("q_mod", q), ("k_mod", k)))
        k, v = (x.repeat_interleave(2 // self.heads_kv, 1) for x in (k, v))
        scores = q @ k.mT * DIM**-0.5
        of_pairs = programs.get("score_mod", programs.get("weight_mod"))
        scores = self._changed(of_pairs, scores, scores)
        sees = (
            programs["mask_mod"](*self._indices(scores))
            if "mask_mod" in programs
            else torch.tensor(True, device=DEVICE)
        )
        lse = None
        if self.softmax:
            scores = scores.masked_fill(~sees, -torch.inf)
            lse = scores.logsumexp(-1)
            weights = (scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
        else:
            weights = torch.where(sees, scores, 0.0)
        out = weights @ v
        out = self._changed(programs.get("out_mod"), out, out)
        return (out, lse) if self.softmax else (out,)

    @staticmethod
    def _indices(x):
        return torch.meshgrid(*[torch.arange(n, device=DEVICE) for n in x.shape], indexing="ij")

    def _changed(self, program, x, first):
        return x if program is None else program(first, *self._indices(x)).expand(x.shape)


def loss_of(results):
    """A scalar that tells elements apart."""
    return sum(
        (
            torch.where(x.isinf(), 0.0, x)
            * torch.arange(1.0, x.numel() + 1, device=DEVICE).cos().view(x.shape)
        ).sum()
        for x in results
    )


def agree(got, wanted, tolerance, case, seed):
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(
            x.double(), y, rtol=tolerance, atol=tolerance, msg=lambda m: f"seed {seed}: {case.stages}: {m}"
        )


@pytest.mark.parametrize("number", range(24))
def test_stages_together_with_gradients(number):
    seed = SEED * 1000 + number
    case = Case(seed)
    results = []
    for attend, tensors in ((case.ours, case.tensors), (case.plain, wide(case.tensors))):
        tensors = [x.clone().requires_grad_() for x in tensors]
        made = attend(*tensors)
        grads = torch.autograd.grad(loss_of(made), tensors, allow_unused=True, materialize_grads=True)
        results.append([*made, *grads])
    agree(*results, 2e-4, case, seed)


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels of 16 bits are a GPU's")
@pytest.mark.parametrize("number", range(24, 48))
def test_stages_together_in_bfloat16(number):
    """By the families of tensor cores; errors are of the largest element."""
    seed = SEED * 1000 + number
    case = Case(seed)
    case.tensors[:3] = [x.bfloat16() for x in case.tensors[:3]]
    results = []
    for attend, tensors in ((case.ours, case.tensors), (case.plain, wide(case.tensors))):
        tensors = [x.clone().requires_grad_() for x in tensors]
        made = attend(*tensors)
        loss = loss_of([x.to(torch.promote_types(x.dtype, torch.float32)) for x in made])
        grads = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
        results.append([*made, *grads])
    for x, y in zip(*results, strict=True):
        finite = y.isfinite()
        error = (x.double() - y)[finite].abs().max() if finite.any() else torch.tensor(0.0)
        assert error <= 4e-2 * y[finite].abs().max().clamp(min=1.0), f"seed {seed}: {case.stages}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_tangents_and_second_derivatives_of_scores(number):
    """Every order of modes, along random vectors."""
    seed = SEED * 2000 + number
    case = Case(seed, ("score_mod", "mask_mod"))
    vectors = [torch.randn_like(x) for x in case.tensors]
    places = tuple(range(len(vectors)))

    def derivatives(attend, tensors, vectors):
        loss = lambda *x: loss_of(attend(*x))
        gradients = torch.func.grad(loss, places)
        penalty = lambda *x: sum((g * w).sum() for g, w in zip(gradients(*x), vectors))
        tangent = lambda *x: loss_of(torch.func.jvp(attend, x, tuple(vectors))[1])
        return [
            *torch.func.jvp(attend, tuple(tensors), tuple(vectors))[1],
            *torch.func.jvp(gradients, tuple(tensors), tuple(vectors))[1],
            *torch.func.grad(penalty, places)(*tensors),
            *torch.func.grad(tangent, places)(*tensors),
        ]

    wanted = derivatives(case.plain, wide(case.tensors), wide(vectors))
    wanted = [torch.where(x.isnan(), 0.0, x) for x in wanted]  # where LSE is -inf
    agree(derivatives(case.ours, case.tensors, vectors), wanted, 1e-3, case, seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Input #")  # that it is not float64
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "mask_mod"])
def test_gradcheck(stage):
    """By finite differences; of a score in forward mode, too, and of its gradients."""
    case = Case(SEED, (stage,))
    tensors = [x.requires_grad_() for x in case.tensors]
    call = lambda *x: case.ours(*x)[0]
    limits = dict(eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=1e-5)
    assert torch.autograd.gradcheck(call, tensors, check_forward_ad=stage == "score_mod", **limits)
    if stage == "score_mod":
        assert torch.autograd.gradgradcheck(call, tensors, **limits)


def test_a_gated_layer_with_normed_and_rotated_heads():
    """As Qwen3-Next's: RMS norms of Q's and K's heads, RoPE of a quarter of the columns, an output gate per element."""
    torch.manual_seed(SEED)
    dim, rotary, heads, heads_kv, length = 32, 8, 4, 2, 9
    q, gate = torch.randn(2, 2, length, heads, dim, device=DEVICE)
    k, v = torch.randn(2, 2, length, heads_kv, dim, device=DEVICE)
    of_q, of_k = torch.randn(2, dim, device=DEVICE) * 0.1
    angles = (torch.arange(length)[:, None] * 100.0 ** -(torch.arange(rotary // 2) / (rotary // 2))).to(
        DEVICE
    )

    def layer(q, gate, k, v, of_q, of_k):
        """By plain operations."""
        cos, sin = (f(torch.cat([angles, angles], -1)).to(q.dtype)[:, None] for f in (torch.cos, torch.sin))

        def normed_and_turned(x, weight):
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)
            turned, passed = x[..., :rotary], x[..., rotary:]
            other = torch.cat([-turned[..., rotary // 2 :], turned[..., : rotary // 2]], -1)
            return torch.cat([turned * cos + other * sin, passed], -1)

        q, k = normed_and_turned(q, of_q), normed_and_turned(k, of_k)
        k, v = (x.repeat_interleave(heads // heads_kv, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * dim**-0.5
        scores = scores.masked_fill(torch.ones(length, length, device=DEVICE).triu(1).bool(), -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v) * torch.sigmoid(gate)

    def ours(q, gate, k, v, of_q, of_k):
        cos, sin = angles.cos(), angles.sin()

        def mod(weight):
            def normed_and_turned(row, b, h, i, d):
                norm = torch.rsqrt(row.square().sum() / dim + 1e-6)
                x = lambda c: row[c] * (1 + weight[c])
                half = rotary // 2
                other = torch.where(d < half, -x(d + half), x(d - half))
                turned = x(d) * cos[i, d % half] + other * sin[i, d % half]
                return norm * torch.where(d < rotary, turned, x(d))

            return normed_and_turned

        return flashjit.attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            causal=True,
            q_mod=mod(of_q),
            k_mod=mod(of_k),
            out_mod=lambda out, b, h, i, d: out * torch.sigmoid(gate[b, i, h, d]),
        ).transpose(1, 2)

    results = []
    for attend, tensors in ((ours, (q, gate, k, v, of_q, of_k)), (layer, wide((q, gate, k, v, of_q, of_k)))):
        tensors = [x.clone().requires_grad_() for x in tensors]
        out = attend(*tensors)
        results.append([out, *torch.autograd.grad(loss_of([out]), tensors)])
    for x, y in zip(*results):
        torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-4)

"""Forms of attention() by its callers: each form by each caller, against attention written out in fp64.

Callers are what stands between a model and attention(): compilers, checkpoints, offloaded activations, transforms,
other threads. On the CPU and, where there is one, on a GPU. Each test's name ends with its seed: FLASHJIT_TEST_SEED=...
repeats it, FLASHJIT_TEST_RUNS=20 draws 20 problems for each form and caller.
"""

import concurrent.futures
import contextlib
import itertools
import math
import os
import random
import tempfile

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402

SEED = int(os.environ.get("FLASHJIT_TEST_SEED") or random.SystemRandom().randrange(10**9))
RUNS = int(os.environ.get("FLASHJIT_TEST_RUNS") or 1)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
GROUP, HEADS_KV, DIM = 2, 2, 16
checkpoint = torch.utils.checkpoint.checkpoint


# --- forms ---------------------------------------------------------------------------------------------------------


class Case:
    """One problem: leaves that get gradients, a call of attention() on them, and the same in fp64."""

    differentiable = True

    def __init__(self, pick, device, dtype):
        """pick: random.Random."""
        self.pick, self.generator = pick, torch.Generator().manual_seed(pick.randrange(10**9))
        self.device, self.dtype = device, dtype
        self.batch, self.n, self.m = (
            self.pick.randint(1, 3),
            self.pick.randint(1, 20),
            self.pick.randint(1, 30),
        )
        self.heads = GROUP * HEADS_KV
        self.named, self.leaves = {}, {}
        self.make()

    def randn(self, *size, dtype=None):
        return torch.randn(size, generator=self.generator).to(self.device, dtype or self.dtype)

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def leaf(self, name, *size, dtype=None):
        self.leaves[name] = self.randn(*size, dtype=dtype).requires_grad_()

    def make(self):
        self.leaf("q", self.batch, self.heads, self.n, DIM)
        self.leaf("k", self.batch, self.heads, self.m, DIM)
        self.leaf("v", self.batch, self.heads, self.m, DIM)

    def arguments(self, leaves):
        """Q, K and V as the model makes them of its leaves."""
        return leaves["q"], leaves["k"], leaves["v"]

    def options(self, leaves):
        return self.named

    def call(self, *tensors):
        """A tuple of results, from the leaves in their order."""
        leaves = dict(zip(self.leaves, tensors))
        results = flashjit.attention(*self.arguments(leaves), **self.options(leaves))
        return results if isinstance(results, tuple) else (results,)

    def exact(self, *tensors):
        """call() in the tensors' type."""
        q, k, v = self.arguments(dict(zip(self.leaves, tensors)))
        return [written_out(q, k, v, scale=self.named.get("scale"))[0]]


def written_out(q, k, v, keep=None, score=None, sinks=None, scale=None, factor=None):
    """O and LSE. keep, factor: of pairs, broadcastable to the scores. score: of the scores and the indices."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (scale or q.shape[3] ** -0.5) * q @ k.transpose(2, 3)
    if score is not None:
        places = (
            torch.arange(size, device=s.device).view([-1] + [1] * (3 - i)) for i, size in enumerate(s.shape)
        )
        s = score(s, *places).to(s.dtype)
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(len(s), -1, s.shape[2], 1)], 3)
    empty = (s == -math.inf).all(3, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), 3).masked_fill(empty, 0.0)[..., : k.shape[2]]
    lse = torch.logsumexp(s.masked_fill(empty, 0.0), 3).masked_fill(empty[..., 0], -math.inf)
    return (p if factor is None else p * factor) @ v, lse


def lower_right(n, m, device):
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


class Views(Case):
    """Q, K and V in one tensor, as a projection makes them, with the first key for the first query."""

    def make(self):
        self.leaf("qkv", self.batch, self.n, 3, self.heads, DIM)
        self.named = {"causal": True}

    def arguments(self, leaves):
        return leaves["qkv"].permute(2, 0, 3, 1, 4).unbind()

    def exact(self, *tensors):
        return [
            written_out(
                *self.arguments(dict(zip(self.leaves, tensors))), lower_right(self.n, self.n, self.device)
            )[0]
        ]


class Grouped(Case):
    def make(self):
        self.leaf("q", self.batch, self.n, self.heads, DIM)
        self.leaf("kv", self.batch, self.m, 2, HEADS_KV, DIM)
        self.named = {"scale": 0.3}

    def arguments(self, leaves):
        return leaves["q"].transpose(1, 2), *leaves["kv"].permute(2, 0, 3, 1, 4).unbind()


class Expanded(Case):
    """Keys of one head that all heads read, without a copy."""

    def make(self):
        self.leaf("q", self.batch, self.heads, self.n, DIM)
        self.leaf("kv", 2, self.batch, 1, self.m, DIM)

    def arguments(self, leaves):
        return leaves["q"], *(x.expand(-1, self.heads, -1, -1) for x in leaves["kv"])


class Packed(Case):
    def make(self):
        self.lengths = [self.pick.randint(0, 9) for _ in range(self.batch)] + [4]
        rows = sum(self.lengths)
        self.leaf("q", rows, self.heads, DIM)
        self.leaf("kv", rows, 2, HEADS_KV, DIM)
        offsets = self.ints(*itertools.accumulate([0, *self.lengths]))
        self.named = dict(
            causal=True, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=9, max_seqlen_kv=9
        )

    def arguments(self, leaves):
        return leaves["q"].transpose(0, 1)[None], *leaves["kv"].permute(1, 2, 0, 3)[:, None].unbind()

    def exact(self, *tensors):
        parts = zip(*(x.split(self.lengths, 2) for x in self.arguments(dict(zip(self.leaves, tensors)))))
        return [
            torch.cat(
                [
                    written_out(q, k, v, lower_right(q.shape[2], q.shape[2], self.device))[0]
                    for q, k, v in parts
                ],
                2,
            )
        ]


class Latent(Case):
    """V is the first columns of K."""

    def make(self):
        self.leaf("q", self.batch, self.n, self.heads, 24)
        self.leaf("latent", self.batch, 1, self.m, 24)
        self.named = {"v_columns": 16}

    def arguments(self, leaves):
        return leaves["q"].transpose(1, 2), leaves["latent"], None

    def exact(self, *tensors):
        q, latent = tensors
        return [written_out(q.transpose(1, 2), latent, latent[..., :16])[0]]


class Program(Case):
    """With captured tensors of any strides, and a number that is a tensor."""

    def make(self):
        super().make()
        self.leaf("bias", self.m, self.n, dtype=torch.float32)
        self.leaf("slopes", 3, self.heads, dtype=torch.float32)
        self.factor = torch.tensor(0.5)

    def score(self, leaves):
        slopes, bias, factor = leaves["slopes"][1], leaves["bias"].t(), self.factor
        return lambda s, b, h, q, kv: s * factor + slopes[h] * (q - kv) * 0.1 + bias[q, kv]

    def options(self, leaves):
        return {"score_mod": self.score(leaves), "mask_mod": lambda b, h, q, kv: kv - q < 9}

    def exact(self, *tensors):
        leaves = dict(zip(self.leaves, tensors))
        q, kv = torch.arange(self.n, device=self.device)[:, None], torch.arange(self.m, device=self.device)
        return [written_out(*self.arguments(leaves), kv - q < 9, self.score(leaves))[0]]


class Lists(Case):
    """Tile lists of a mask, which layers share."""

    def make(self):
        super().make()
        self.documents = torch.arange(30, device=self.device) // 5
        self.mask = lambda b, h, q, kv: self.documents[q] == self.documents[kv]
        q, k, v = (x.detach() for x in self.leaves.values())
        self.named = {
            "mask_mod": self.mask,
            "lists": flashjit.TileLists(q, k, v, mask_mod=self.mask, backward=True),
        }

    def exact(self, *tensors):
        q, kv = self.documents[: self.n, None], self.documents[: self.m]
        return [written_out(*tensors, q == kv)[0]]


class Sinks(Case):
    def make(self):
        super().make()
        self.leaf("sinks", self.heads, dtype=torch.float32)
        self.lengths = self.ints(*[self.pick.randint(0, self.m) for _ in range(self.batch)])

    def options(self, leaves):
        return {"sinks": leaves["sinks"], "kv_lengths": self.lengths}

    def exact(self, *tensors):
        *qkv, sinks = tensors
        keep = torch.arange(self.m, device=self.device) < self.lengths[:, None, None, None]
        return [written_out(*qkv, keep, sinks=sinks)[0]]


class Dropout(Case):
    """What is dropped is found by a call with the same seed and the identity for V."""

    def make(self):
        self.leaf("q", self.batch, self.heads, self.n, 32)
        self.leaf("k", self.batch, self.heads, self.m, 32)
        self.leaf("v", self.batch, self.heads, self.m, 32)
        self.named = {"dropout_p": 0.25}
        eye = torch.eye(self.m, 32, device=self.device).expand(self.batch, self.heads, -1, -1).contiguous()
        zeros = [
            torch.zeros(self.batch, self.heads, rows, 32, device=self.device) for rows in (self.n, self.m)
        ]
        torch.manual_seed(77)
        self.factor = (flashjit.attention(*zeros, eye, dropout_p=0.25)[..., : self.m] != 0).double() / 0.75

    def exact(self, *tensors):
        return [written_out(*tensors, factor=self.factor.to(tensors[0].dtype))[0]]


class WithLse(Case):
    def make(self):
        super().make()
        self.named = {"return_lse": True, "causal": "top_left"}

    def exact(self, *tensors):
        return list(
            written_out(
                *tensors,
                lower_right(self.n, self.m, self.device)
                if self.n == self.m
                else torch.ones(self.n, self.m, dtype=torch.bool, device=self.device).tril(),
            )
        )


class KeyLists(Case):
    """Sparse attention to the keys that each query names."""

    def make(self):
        self.leaf("q", self.batch, self.heads, self.n, DIM)
        self.leaf("kv", 2, self.batch, HEADS_KV, self.m, DIM)
        count = min(self.m, 4)
        lists = [self.pick.sample(range(self.m), count) for _ in range(self.batch * self.n * HEADS_KV)]
        self.lists = self.ints(*sum(lists, [])).view(self.batch, self.n, HEADS_KV, count)
        self.named = {"indices": self.lists}

    def arguments(self, leaves):
        return leaves["q"], *leaves["kv"]

    def exact(self, *tensors):
        keep = torch.zeros(self.batch, self.n, HEADS_KV, self.m, dtype=torch.bool, device=self.device)
        keep = keep.scatter(3, self.lists.long(), True).transpose(1, 2).repeat_interleave(GROUP, 1)
        return [written_out(*self.arguments(dict(zip(self.leaves, tensors))), keep)[0]]


class Cached(Case):
    differentiable = False

    def make(self):
        self.leaves = {"q": self.randn(self.batch, self.heads, self.n, DIM)}
        self.lengths = [self.pick.randint(self.n, 40) for _ in range(self.batch)]
        self.table = (
            torch.randperm(self.batch * 5, generator=self.generator)
            .to(self.device, torch.int32)
            .view(self.batch, 5)
        )
        self.k, self.v = (self.randn(self.batch * 5, HEADS_KV, 8, DIM) for _ in range(2))
        self.named = dict(page_table=self.table, kv_lengths=self.ints(*self.lengths), causal=True)

    def arguments(self, leaves):
        return leaves["q"], self.k, self.v

    def pages(self, pool, b, dtype):
        return pool[self.table[b].long()].transpose(0, 1).flatten(1, 2)[None, :, : self.lengths[b]].to(dtype)

    def exact(self, *tensors):
        (q,) = tensors
        return [
            torch.cat(
                [
                    written_out(
                        q[b : b + 1],
                        self.pages(self.k, b, q.dtype),
                        self.pages(self.v, b, q.dtype),
                        lower_right(self.n, m, self.device),
                    )[0]
                    for b, m in enumerate(self.lengths)
                ]
            )
        ]


class EightBits(Case):
    differentiable = False

    def make(self):
        self.leaves = {"q": self.randn(self.batch, self.heads, self.n, DIM)}
        self.k, self.v = (
            self.randn(self.batch, HEADS_KV, self.m, DIM).to(torch.float8_e4m3fn) for _ in range(2)
        )
        self.scales = [torch.rand(HEADS_KV, generator=self.generator).to(self.device) + 0.5 for _ in range(2)]
        self.named = dict(zip(("k_scale", "v_scale"), self.scales))

    def arguments(self, leaves):
        return leaves["q"], self.k, self.v

    def exact(self, *tensors):
        (q,) = tensors
        k, v = (
            (x.double() * scale[:, None, None]).to(q.dtype) for x, scale in zip((self.k, self.v), self.scales)
        )
        return [written_out(q, k, v)[0]]


FORMS = {
    "plain": Case,
    "views of qkv": Views,
    "packed": Packed,
    "GQA": Grouped,
    "expanded": Expanded,
    "paged": Cached,
    "8 bits": EightBits,
    "MLA": Latent,
    "program": Program,
    "lists": Lists,
    "sinks": Sinks,
    "dropout": Dropout,
    "LSE": WithLse,
    "indices": KeyLists,
}


# --- callers: each gives results of call(*leaves), with gradients where its backward pass may be run -----------------


def eager(case, call, leaves):
    return call(*leaves)


def compiled(case, call, leaves):
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)(*leaves)


def checkpointed(case, call, leaves):
    return checkpoint(call, *leaves, use_reentrant=False)


def checkpointed_reentrant(case, call, leaves):
    return checkpoint(call, *leaves, use_reentrant=True)


def hooked(pack, unpack):
    def caller(case, call, leaves):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return call(*leaves)

    return caller


def copied(x):
    return x.clone(memory_format=torch.contiguous_format)


def misaligned(x):
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def to_disk(x):
    file = tempfile.TemporaryFile()
    torch.save(x, file)
    return file, x.device


def from_disk(packed):
    file, device = packed
    file.seek(0)
    return torch.load(file, map_location=device)


def checkpointed_and_offloaded(case, call, leaves):
    with torch.autograd.graph.saved_tensors_hooks(copied, lambda x: x):
        return checkpoint(call, *leaves, use_reentrant=False)


def saved_on_cpu(case, call, leaves):
    with torch.autograd.graph.save_on_cpu(pin_memory=case.device != "cpu"):
        return call(*leaves)


def autocast(case, call, leaves):
    with torch.autocast(case.device, dtype=torch.bfloat16):
        return call(*leaves)


def without_gradients(case, call, leaves):
    with torch.inference_mode():
        return call(*leaves)


def pulled_back(case, call, leaves):
    """torch.func.vjp, whose gradients are those of a sum with given weights."""
    results, pull = torch.func.vjp(call, *leaves)
    case.pulled = lambda weights: pull(tuple(w.to(x.dtype) for w, x in zip(weights, results)))
    return [x.detach() for x in results]


def mapped(case, call, leaves):
    """The second of a batch of three."""
    results = torch.func.vmap(call)(*(torch.stack([torch.zeros_like(x), x, x]) for x in leaves))
    return [x[1] for x in results]


def in_a_thread(case, call, leaves):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def run():
            torch.manual_seed(77)
            return call(*leaves)

        return pool.submit(run).result()


def forked(case, call, leaves):
    """In a child, of which a file brings the results."""
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                torch.save([x.detach() for x in call(*leaves)], file.name)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        return torch.load(file.name)


def on_a_stream(case, call, leaves):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = call(*leaves)
    torch.cuda.current_stream().wait_stream(stream)
    return results


def captured(case, call, leaves):
    for _ in range(2):
        on_a_stream(case, call, leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = call(*leaves)
    graph.replay()
    return results


CALLERS = {
    "eager": eager,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "checkpointed, reentrant": checkpointed_reentrant,
    "offloaded": hooked(copied, lambda x: x),
    "offloaded, misaligned": hooked(lambda x: x, misaligned),
    "through a disk": hooked(to_disk, from_disk),
    "offloaded checkpoint": checkpointed_and_offloaded,
    "save_on_cpu": saved_on_cpu,
    "autocast": autocast,
    "inference mode": without_gradients,
    "vjp": pulled_back,
    "vmap": mapped,
    "another thread": in_a_thread,
}
ON_THE_CPU = {"forked": forked}
ON_A_GPU = {"another stream": on_a_stream, "captured": captured}
WITHOUT_BACKWARD = {"inference mode", "vmap", "forked", "captured"}

#: What is refused by design, with which words.
REFUSED = {
    ("dropout", "vmap"): (RuntimeError, "randomness"),
    ("lists", "vmap"): (flashjit.InvalidArgument, "lists were built for"),  # one of the batch's problems
    ("lists", "autocast"): (flashjit.InvalidArgument, "lists were built for"),  # Q of another type
    ("paged", "vjp"): (flashjit.Unsupported, "have no backward pass"),
    ("8 bits", "vjp"): (flashjit.Unsupported, "have no backward pass"),
}
#: On a GPU these draw a seed there, and other pairs are dropped than in the call that finds them.
OTHER_DROPOUT = {"compiled", "vjp", "captured"}


def pairs():
    for device in DEVICES:
        callers = {**CALLERS, **(ON_A_GPU if device == "cuda" else ON_THE_CPU)}
        for form, caller, draw in itertools.product(FORMS, callers, range(RUNS)):
            if device == "cpu" or form != "dropout" or caller not in OTHER_DROPOUT:
                yield device, form, caller, SEED + draw


def compare(name, got, exact, rounded, dtype, factor):
    assert got.shape == exact.shape and torch.equal(got == -math.inf, exact == -math.inf), name
    got, exact, rounded = (x.double().masked_fill(exact == -math.inf, 0.0) for x in (got, exact, rounded))
    assert got.isfinite().all(), f"{name} is not finite"
    if got.numel():
        error, yardstick = (got - exact).abs().max(), (rounded - exact).abs().max()
        limit = factor * yardstick + 8 * torch.finfo(dtype).eps * exact.abs().max() + 1e-5
        assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}"


@pytest.mark.parametrize("device, form, caller, seed", list(pairs()))
def test_a_form_by_a_caller(device, form, caller, seed):
    pick = random.Random(f"{seed} {form} {caller}")
    dtype = pick.choice([torch.float32, torch.float16, torch.bfloat16])
    case = FORMS[form](pick, device, torch.float32 if caller == "autocast" else dtype)
    if caller == "autocast":
        dtype = torch.bfloat16
    leaves = list(case.leaves.values())
    print(f"seed {seed}: {dtype}, batch {case.batch}, {case.n} queries, {case.m} keys")
    run = lambda: {**CALLERS, **ON_THE_CPU, **ON_A_GPU}[caller](case, case.call, leaves)
    torch.manual_seed(77)
    refusal = REFUSED.get((form, caller))
    if refusal:
        with pytest.raises(refusal[0], match=refusal[1]):
            run()
        return
    results = list(run())
    exact, rounded = (
        case.exact(*(x.to(t) if x.dtype == case.dtype else x for x in leaves)) for t in (torch.float64, dtype)
    )
    for i, parts in enumerate(zip(results, exact, rounded)):
        compare(f"result {i}", *parts, dtype, 2)
    if not case.differentiable or caller in WITHOUT_BACKWARD:
        return
    weights = [torch.where(x == -math.inf, 0.0, case.randn(*x.shape, dtype=torch.float64)) for x in exact]

    def gradients(outputs):
        loss = sum(
            (torch.where(x == -math.inf, 0.0, x).to(w.dtype) * w).sum() for x, w in zip(outputs, weights)
        )
        for x in leaves:
            x.grad = None
        loss.backward()  # torch.autograd.grad() is not for reentrant checkpoints
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    got = case.pulled(weights) if caller == "vjp" else gradients(results)
    for name, *parts in zip(case.leaves, got, gradients(exact), gradients(rounded)):
        compare(f"the gradient of {name}", *(x.double() for x in parts), dtype, 3)


def test_refusals_are_those_of_forms_and_callers():
    assert all(form in FORMS and caller in {**CALLERS, **ON_THE_CPU, **ON_A_GPU} for form, caller in REFUSED)

"""flashjit.distributed: ranks against the whole sequence on one, in fp64: over gloo on the CPU, and over NCCL where there are GPUs."""

import concurrent.futures
import datetime
import itertools
import math
import multiprocessing
import os
import pathlib
import queue
import sys
import tempfile
import time
import traceback

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

BENCH = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"
HEADS, HEADS_KV = 4, 2
LAYOUTS = ("contiguous", "zigzag", "striped")
is_small = True  # of tensors on the CPU
DOCUMENTS = {48: (0, 5, 17, 17, 40, 48), 1024: (0, 100, 300, 300, 900, 1024)}  # by the rows of all ranks


def device_of(rank):
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def whole(device, seed=0):
    """q, k, v, dO of the whole sequence, in fp32 on the CPU and in bf16 on a GPU."""
    rows, dim, dtype = (
        (48, 16, torch.float32) if device.type == "cpu" and is_small else (1024, 128, torch.bfloat16)
    )
    generator = torch.Generator().manual_seed(seed)
    make = lambda heads: torch.randn(1, heads, rows, dim, generator=generator).to(dtype).to(device)
    return make(HEADS), make(HEADS_KV), make(HEADS_KV), make(HEADS)


def exact(q, k, v, causal=False, window=None, score=None, keep=None, cu_seqlens=None, sinks=None):
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    s = q.shape[3] ** -0.5 * q @ k.transpose(2, 3)
    i, j = torch.arange(s.shape[2], device=q.device)[:, None], torch.arange(s.shape[3], device=q.device)
    visible = torch.ones(s.shape[2:], dtype=torch.bool, device=q.device)
    if cu_seqlens:
        starts = torch.tensor(cu_seqlens, device=q.device)
        document = lambda x: torch.searchsorted(starts, x, right=True) - 1
        visible &= document(i) == document(j)
        i, j = i - starts[document(i)], j - starts[document(j)]
    if score:
        s = score(
            s,
            document(torch.arange(s.shape[2], device=q.device))[:, None] if cu_seqlens else 0,
            torch.arange(HEADS, device=q.device)[:, None, None],
            i,
            j,
        )
    if causal:
        visible &= i >= j
    if window:
        visible &= i - j < window
    if keep:
        visible &= keep(i, j)
    s = s.masked_fill(~visible, -math.inf)
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[None, :, None])
    return (s - lse[..., None]).exp() @ v, lse


def one(q, k, v, causal=False, window=None, cu_seqlens=None, **given):
    """What attention() makes of the whole sequence on one device."""
    import flashjit

    if window:
        given["mask_mod"] = lambda b, h, i, j: (i >= j) & (i - j < window)
    if cu_seqlens:
        lengths = [b - a for a, b in zip(cu_seqlens, cu_seqlens[1:])]
        cu = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
        given |= dict(
            cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
        )
    return flashjit.attention(q, k, v, causal=causal and not window, **given)


def errors(got, expected, whole=None):
    """The largest, relative to the largest element, of the whole where these are shards."""
    return [
        ((a.double() - b.double()).abs().max() / c.abs().max()).item()
        for a, b, c in zip(got, expected, whole or expected)
    ]


def check(case, group=None):
    """A case's O, LSE and gradients on this rank. In 16 bits no less exact than on one device, but for a tenth."""
    import flashjit.distributed as fd

    device = device_of(dist.get_rank())
    q, k, v, dout = whole(device)
    layout, rule = case["layout"], {name: x for name, x in case.items() if name not in ("scheme", "layout")}
    sinks = rule.pop("sinks", None) and torch.linspace(-1, 2, HEADS, device=device).requires_grad_()
    of_sinks = [] if sinks is None else [sinks]
    doubles = [x.double().requires_grad_() for x in (q, k, v)] + of_sinks
    want, want_lse = exact(*doubles[:3], sinks=sinks, **rule)
    dlse = torch.linspace(-1, 1, want_lse.numel(), device=device).view_as(want_lse)
    wanted = torch.autograd.grad((want * dout).sum() + (want_lse * dlse).sum(), doubles, retain_graph=True)
    cut = lambda x: fd.shard(x.detach(), layout=layout, group=group)
    mine = [cut(x).requires_grad_() for x in (q, k, v)] + [x.detach().requires_grad_() for x in of_sinks]
    out, lse = fd.distributed_attention(
        *mine[:3],
        sinks=mine[3] if mine[3:] else None,
        return_lse=True,
        group=group,
        **{"scheme": case["scheme"], "layout": layout, **rule},
    )
    found = torch.autograd.grad((out * cut(dout)).sum() + (lse * cut(dlse)).sum(), mine)
    if sinks is not None:
        dist.all_reduce(found[3])
    got = errors(
        [out, lse, *found],
        [cut(want), cut(want_lse), *map(cut, wanted[:3]), *wanted[3:]],
        [want, want_lse, *wanted],
    )
    limits = [2e-5] * len(got)
    if q.dtype != torch.float32:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        alone = one(*inputs, sinks=sinks, **rule)
        own = errors(
            [alone, *torch.autograd.grad((alone * dout).sum(), inputs + of_sinks)],
            [want, *torch.autograd.grad((want * dout).sum(), doubles)],
        )
        limits = [1.1 * own[0] + 1e-3, 1e-4] + [1.1 * x + 2e-3 for x in own[1:]]
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    assert all(a <= b for a, b in zip(got, limits)), f"{case}: " + ", ".join(
        f"{name} is off by {a:.3g} of {b:.3g}" for name, a, b in zip(names, got, limits)
    )
    assert torch.equal(fd.unshard(cut(q), layout=layout, group=group), q)


def rules(rows):
    return (
        dict(),
        dict(causal=True),
        dict(causal=True, window=rows // 7 + 1),
        dict(causal=True, sinks=True),
        dict(cu_seqlens=DOCUMENTS[rows]),
        dict(causal=True, cu_seqlens=DOCUMENTS[rows]),
        dict(causal=True, window=rows // 7 + 1, cu_seqlens=DOCUMENTS[rows]),
    )


def check_cases(rank, ranks, schemes=("ring", "all_gather", "ulysses")):
    for scheme in schemes:
        for layout in LAYOUTS:
            for rule in rules(whole(device_of(rank))[0].shape[2]):
                if layout != "striped" or "cu_seqlens" not in rule:
                    check(dict(scheme=scheme, layout=layout, **rule))


def check_in_parts(rank, ranks, check, *arguments):
    """Another check, with as many heads as are exchanged in two parts, as those of long sequences are."""
    from flashjit import _chunks

    global HEADS, HEADS_KV
    usual = _chunks.TILES_OF_PART, HEADS, HEADS_KV
    _chunks.TILES_OF_PART, HEADS, HEADS_KV = 0, 4 * ranks, 2 * ranks
    try:
        assert _chunks.parts_of_heads(ranks, 48, HEADS, HEADS_KV) == 2
        globals()[check](rank, ranks, *arguments)
    finally:
        _chunks.TILES_OF_PART, HEADS, HEADS_KV = usual


def check_on_gpus(rank, ranks):
    """Fewer cases, as their kernels are compiled first."""
    causal, window, sinks, _, documents = rules(whole(device_of(rank))[0].shape[2])[1:6]
    for scheme in ("ring", "all_gather", "ulysses"):
        for rule in (dict(), causal, window, sinks, documents):
            check(dict(scheme=scheme, layout="zigzag", **rule))
        for layout in ("contiguous", "striped"):
            check(dict(scheme=scheme, layout=layout, **causal))


def check_two_levels(rank, ranks):
    mesh = dist.device_mesh.init_device_mesh(device_of(rank).type, (ranks // 2, 2))
    groups = mesh.get_group(0), mesh.get_group(1)
    for layout in LAYOUTS:
        for rule in rules(whole(device_of(rank))[0].shape[2]):
            if layout != "striped" or "cu_seqlens" not in rule:
                check(dict(scheme="two_level", layout=layout, **rule), groups)
    check(dict(scheme="two_level", layout="zigzag", causal=True), mesh)


def check_dropout(rank, ranks, schemes, layouts=LAYOUTS, with_documents=True):
    """The mask of the whole sequence, forward and backward."""
    import flashjit.distributed as fd

    device = device_of(rank)
    inner = (
        dist.device_mesh.init_device_mesh(device.type, (2, ranks // 2)) if "two_level" in schemes else None
    )
    two = [torch.cat(x) for x in zip(whole(device), whole(device, 5))]
    for *rule, scheme, layout in (
        (rule, scheme, layout)
        for scheme in schemes
        for layout in layouts
        for rule in (dict(), dict(causal=True), dict(causal=True, cu_seqlens=DOCUMENTS[two[0].shape[2]]))
    ):
        rule, group = rule[0], inner if scheme == "two_level" else None
        if "cu_seqlens" in rule and (layout == "striped" or not with_documents):
            continue
        q, k, v, dout = whole(device) if "cu_seqlens" in rule else two
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(11)
        want = one(*inputs, dropout_p=0.3, **rule)
        wanted = [want.detach(), *torch.autograd.grad(want, inputs, dout)]
        cut = lambda x: fd.shard(x, layout=layout, group=group)
        mine = [cut(x.detach()).requires_grad_() for x in inputs]
        torch.manual_seed(11)
        out = fd.distributed_attention(
            *mine, scheme=scheme, layout=layout, group=group, dropout_p=0.3, **rule
        )
        found = [out.detach(), *torch.autograd.grad(out, mine, cut(dout))]
        worst = max(errors(found, map(cut, wanted), wanted))
        assert worst < (2e-5 if q.dtype == torch.float32 else 2e-2), f"{scheme}, {layout}, {rule}: {worst}"


def check_programs(rank, ranks):
    import flashjit.distributed as fd

    slopes = torch.tensor([0.1, 0.2, 0.05, 0.3], device=device_of(rank))
    q, k, v, _ = whole(device_of(rank), 1)
    want, _ = exact(
        q, k, v, score=lambda s, b, h, i, j: s + slopes[h] * (j - i), keep=lambda i, j: i // 10 == j // 10
    )
    for scheme in ("ring", "all_gather", "ulysses"):
        for layout in LAYOUTS:
            mine = [fd.shard(x, layout=layout) for x in (q, k, v)]
            out = fd.distributed_attention(
                *mine,
                scheme=scheme,
                layout=layout,
                mask_mod=lambda b, h, i, j: i // 10 == j // 10,
                score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i),
            )
            (error,) = errors([out], [fd.shard(want, layout=layout)], [want])
            assert error < (2e-5 if q.dtype == torch.float32 else 1e-2), f"{scheme}, {layout}: {error}"


def check_programs_of_documents(rank, ranks):
    import flashjit.distributed as fd

    q, k, v, _ = whole(device_of(rank), 2)
    documents = DOCUMENTS[q.shape[2]]
    score = lambda s, b, h, i, j: s + 0.1 * torch.sin(1.0 * i + b) * j
    want, _ = exact(q, k, v, causal=True, score=score, cu_seqlens=documents)
    for scheme in ("ring", "all_gather", "ulysses"):
        mine = [fd.shard(x) for x in (q, k, v)]
        out = fd.distributed_attention(
            *mine, scheme=scheme, causal=True, cu_seqlens=torch.tensor(documents), score_mod=score
        )
        (error,) = errors([out], [fd.shard(want)], [want])
        assert error < (2e-5 if q.dtype == torch.float32 else 1e-2), f"{scheme}: {error}"


def check_refusals(rank, ranks):
    import flashjit
    import flashjit.distributed as fd

    mine = [fd.shard(x) for x in whole(device_of(rank))[:3]]
    slopes = torch.ones(HEADS, requires_grad=True)
    for error, words, given in (
        (flashjit.InvalidArgument, "scheme is 'star'", dict(scheme="star")),
        (flashjit.InvalidArgument, "give two with", dict(scheme="two_level")),
        (flashjit.InvalidArgument, "a window is of 1 key or more", dict(window=3)),
        (flashjit.InvalidArgument, "window is 0 and causal is True", dict(window=0, causal=True)),
        (flashjit.InvalidArgument, "window is 3.5 and causal is True", dict(window=3.5, causal=True)),
        (flashjit.InvalidArgument, "dropout_p is 1.0", dict(dropout_p=1.0)),
        (flashjit.InvalidArgument, "layout is 'star'", dict(layout="star")),
        (flashjit.InvalidArgument, "cu_seqlens goes from 0 to 40 for 48 rows", dict(cu_seqlens=[0, 40])),
        (flashjit.WrongType, "cu_seqlens is .*: give the row", dict(cu_seqlens=[])),
        (flashjit.WrongType, "cu_seqlens is .*: give the row", dict(cu_seqlens=[0, 3.5, 48])),
        (flashjit.InvalidArgument, "causal is 'no'", dict(causal="no")),
        (
            flashjit.InvalidArgument,
            f"sinks is .*: it must be float32 .{HEADS}.",
            dict(sinks=torch.zeros(HEADS + 1)),
        ),
        (flashjit.Unsupported, "layout 'striped'", dict(cu_seqlens=[0, 48], layout="striped")),
        (flashjit.Unsupported, "requires a gradient", dict(score_mod=lambda s, b, h, i, j: s * slopes[h])),
    ):
        with pytest.raises(error, match=words):
            fd.distributed_attention(*mine, **given)
    for words, call in (
        ("group is 3: give a process group", lambda: fd.distributed_attention(*mine, group=3)),
        ("dim is 5, but x is .1, 4, 24, 16.", lambda: fd.shard(mine[0], 5)),
        ("dim is -5, but x is", lambda: fd.unshard(mine[0], -5)),
        ("ranks is 0: give 1 or more", lambda: fd.positions(0, 0, 4)),
        ("rank is 2, ranks 2", lambda: fd.positions(2, 2, 4)),
        ("which inner_ranks must divide", lambda: fd.positions(0, 3, 4, inner_ranks=2)),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=words):
            call()
    q, k, v = mine
    for words, tensors in (
        ("q has 24 rows and k 48", (q, torch.cat((k, k), 2), torch.cat((v, v), 2))),
        ("q has 24 rows and v 48", (q, k, torch.cat((v, v), 2))),
        ("k is .*: it needs four dimensions", (q, k[0], v)),
    ):
        for scheme in ("auto", "ring", "all_gather", "ulysses"):
            with pytest.raises(flashjit.InvalidArgument, match=words):
                fd.distributed_attention(*tensors, scheme=scheme)


def check_disagreement(rank, ranks):
    import flashjit
    import flashjit.distributed as fd

    mine = [fd.shard(x) for x in whole(device_of(rank))[:3]]
    if rank == ranks - 1:
        mine = [x[:, :, :-2] for x in mine]
    with pytest.raises(flashjit.InvalidArgument, match=f"rank {ranks - 1} was given"):
        fd.distributed_attention(*mine)
    mine = [x[:, :, :4] for x in mine]
    torch.manual_seed(rank)
    with pytest.raises(flashjit.InvalidArgument, match="rank 1 was given.*seed of dropout"):
        fd.distributed_attention(*mine, dropout_p=0.5)
    layout = "star" if rank == ranks - 1 else "zigzag"
    with pytest.raises(flashjit.InvalidArgument, match=f"rank {ranks - 1} was given"):
        fd.distributed_attention(*mine, layout=layout)


def check_a_peer_that_died(rank, ranks):
    import flashjit.distributed as fd

    mine = [fd.shard(x) for x in whole(device_of(rank))[:3]]
    fd.distributed_attention(*mine)
    if rank == 1:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        for _ in range(2):
            fd.distributed_attention(*mine)
        torch.cuda.is_available() and torch.cuda.synchronize()
    assert time.monotonic() - begin < 30


class Block(torch.nn.Module):
    """A layer of a GPT, whose attention is given."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(dim, 2 * dim), torch.nn.GELU(), torch.nn.Linear(2 * dim, dim)
        )

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(torch.nn.Module):
    def __init__(self, tokens=50, rows=32, dim=64, heads=4, layers=2):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(tokens, dim), torch.nn.Embedding(rows, dim)
        self.blocks = torch.nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = torch.nn.Linear(dim, tokens)

    def forward(self, text, places, attend, checkpointed=False):
        x = self.words(text) + self.places(places)
        for block in self.blocks:
            if checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, attend, use_reentrant=False)
            else:
                x = block(x, attend)
        return self.head(x)


def check_a_training_step(rank, ranks):
    """The loss and the gradients of one process, with and without activation checkpointing."""
    import flashjit
    import flashjit.distributed as fd

    torch.manual_seed(3)
    model, rows = Gpt(), 32
    text = torch.randint(50, (2, rows + 1))
    inputs, targets, places = text[:, :-1], text[:, 1:], torch.arange(rows)

    def step(inputs, targets, places, attend, checkpointed=False):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(inputs, places, attend, checkpointed).flatten(0, 1), targets.flatten()
        )
        loss.backward()
        return loss.detach(), [x.grad.clone() for x in model.parameters()]

    loss, grads = step(inputs, targets, places, lambda q, k, v: flashjit.attention(q, k, v, causal=True))
    for scheme in ("auto", "ring", "all_gather", "ulysses"):
        for checkpointed in (False, True):
            attend = lambda q, k, v: fd.distributed_attention(q, k, v, scheme=scheme, causal=True)
            mine = [fd.shard(inputs, 1), fd.shard(targets, 1), fd.shard(places, 0)]
            own_loss, own = step(*mine, attend, checkpointed)
            for x in (own_loss, *own):
                dist.all_reduce(x)
                x /= ranks
            assert abs(own_loss - loss) < 1e-5
            for (name, _), a, b in zip(model.named_parameters(), own, grads):
                assert (a - b).abs().max() < 1e-5, f"{scheme}, checkpointed {checkpointed}: {name}"


def check_checkpointed_dropout(rank, ranks):
    """The forward pass that is computed again has the same mask."""
    import flashjit.distributed as fd

    *mine, dout = [fd.shard(x) for x in whole(device_of(rank))]
    mine = [x.requires_grad_() for x in mine]
    for scheme in ("ring", "all_gather", "ulysses"):
        attend = lambda *x: fd.distributed_attention(*x, scheme=scheme, causal=True, dropout_p=0.4)
        results = []
        for call in (attend, lambda *x: torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False)):
            torch.manual_seed(5)
            out = call(*mine)
            results.append([out, *torch.autograd.grad(out, mine, dout)])
        assert all(torch.equal(a, b) for a, b in zip(*results)), scheme


def check_compile(rank, ranks):
    import flashjit.distributed as fd

    mine = [fd.shard(x) for x in whole(device_of(rank))[:3]]
    call = lambda q, k, v: 2 * fd.distributed_attention(q * 2, k, v, causal=True)
    assert torch.allclose(torch.compile(call, backend="aot_eager")(*mine), call(*mine))
    torch.compiler.reset()
    with pytest.raises(Exception, match="distributed_attention|disable"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(*mine)


def check_autocast(rank, ranks):
    """As attention() has it: in 16 bits, with gradients in the inputs' type."""
    import flashjit.distributed as fd

    mine = [fd.shard(x).float().requires_grad_() for x in whole(device_of(rank))[:3]]
    for scheme in ("ring", "all_gather", "ulysses"):
        with torch.autocast(device_of(rank).type, dtype=torch.bfloat16):
            out = fd.distributed_attention(*mine, scheme=scheme, causal=True)
        expected = fd.distributed_attention(*(x.bfloat16() for x in mine), scheme=scheme, causal=True)
        assert out.dtype == torch.bfloat16 and torch.equal(out, expected), scheme
        assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.float().sum(), mine))


def peak(call, device):
    """The peak of the memory that a call allocates, without the memory that was allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return max(
        itertools.accumulate(size for _, size in changes), default=math.inf
    )  # at times it has seen nothing


def check_memory(rank, ranks, batch=1):
    """The formula of tools/docs/distributed.md."""
    import flashjit.distributed as fd

    sys.path.append(str(BENCH))
    import simulator

    device = device_of(rank)
    # On a GPU so many heads that no kernel splits its queries, for which it has another workspace.
    rows, dim, all_heads = (
        (16384, 128, ((32, 8), (16, 16))) if device.type == "cuda" else (128, 32, ((8, 2), (4, 4)))
    )
    for heads, heads_kv in all_heads:
        make = lambda heads: torch.randn(batch, heads, rows, dim, dtype=torch.bfloat16, device=device)
        q, k, v, dout = (
            make(heads).requires_grad_(),
            make(heads_kv).requires_grad_(),
            make(heads_kv).requires_grad_(),
            make(heads),
        )
        inputs = q.nbytes + k.nbytes + v.nbytes
        problem = simulator.Problem(rows * ranks, heads, heads_kv, dim, batch)
        for scheme in ("ring", "all_gather", "ulysses"):
            attend = lambda: fd.distributed_attention(q, k, v, scheme=scheme, causal=True)
            forward = lambda: torch.no_grad()(attend)()
            both = lambda: torch.autograd.grad(attend(), (q, k, v), dout)
            for call, backward in ((forward, False), (both, True)):
                call()
                formula = simulator.memory_bytes(
                    problem, ranks, scheme, backward, on_gpu=device.type == "cuda"
                )
                least = math.inf
                for _ in range(30):  # as gloo lets go of what it sent some time later
                    least = min(least, peak(call, device) + inputs + backward * dout.nbytes)
                    most = torch.tensor(least, device=device, dtype=torch.float64)
                    dist.all_reduce(most, dist.ReduceOp.MAX)
                    if most.item() < 1.05 * formula:
                        break
                assert abs(most.item() / formula - 1) < 0.05, (
                    f"{scheme}, {heads}/{heads_kv} heads, backward {backward}: {most.item()} bytes, the formula says {formula}"
                )


def check_negated_views(rank, ranks):
    """Tensors whose memory has the numbers with the other sign."""
    import flashjit.distributed as fd

    mine = [fd.shard(x) for x in whole(device_of(rank))]
    negated = [torch.complex(x, -x).conj().imag.requires_grad_() for x in mine]
    assert all(x.is_neg() for x in negated)
    inputs = [x.requires_grad_() for x in mine[:3]]
    sinks = torch.linspace(-1, 2, HEADS, device=device_of(rank))
    for scheme in ("ring", "all_gather", "ulysses"):
        outs = [
            fd.distributed_attention(*x[:3], scheme=scheme, causal=True, sinks=s)
            for x, s in ((inputs, sinks), (negated, torch._neg_view(-sinks)))
        ]
        grads = [
            torch.autograd.grad(out, x[:3], dout.detach())
            for out, x, dout in zip(outs, (inputs, negated), (mine[3], negated[3]))
        ]
        assert all(torch.equal(a, b) for a, b in zip((outs[0], *grads[0]), (outs[1], *grads[1]))), scheme


def check_small_weights(rank, ranks):
    """Keys on other ranks that have little of a row's softmax still count in its D, and a sink of -inf is none."""
    import flashjit
    import flashjit.distributed as fd

    q, k, v, dout = whole(device_of(rank))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    sinks = torch.full((HEADS,), -math.inf, device=q.device, requires_grad=True)
    mask = lambda b, h, i, j: (i >= j) & (i > 0)  # the first row sees nothing
    alone = flashjit.attention(*inputs, scale=1.0, mask_mod=mask)
    wanted = [alone, *torch.autograd.grad(alone, inputs, dout)]
    mine = [fd.shard(x).requires_grad_() for x in (q, k, v)]
    for scheme in ("ring", "all_gather", "ulysses"):
        for given in ([], [sinks]):
            out = fd.distributed_attention(
                *mine, scheme=scheme, scale=1.0, mask_mod=mask, sinks=given[0] if given else None
            )
            found = [out, *torch.autograd.grad(out, mine + given, fd.shard(dout))]
            assert max(errors(found[:4], [fd.shard(x) for x in wanted], wanted)) < 2e-5, (scheme, len(given))
            assert not given or found[4].eq(0).all(), scheme


def check_groups_after_refusals(rank, ranks):
    """What only a step's kernel refuses, while blocks are under way, leaves the group as it was."""
    import flashjit
    import flashjit.distributed as fd

    mine = [fd.shard(x) for x in whole(device_of(rank))[:3]]
    for scheme in ("ring", "all_gather", "ulysses"):
        for given in (
            dict(mask_mod="q >= kv"),
            dict(score_mod=lambda s, b, h, i, j: torch.atan(s)),
            dict(mask_mod=[1]),
        ):
            with pytest.raises(flashjit.Error), torch.no_grad():
                fd.distributed_attention(*mine, scheme=scheme, **given)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == ranks, (scheme, given)


def list_kernels(rank, ranks, checks):
    """The kernels that checks launch on GPUs: (spec, shape, whether backward); nothing is computed."""
    global is_small, errors
    from flashjit import _plans

    is_small, errors = False, lambda got, *_: [0.0 for _ in got]
    kernels = set()

    def noted(method, backward):
        def call(plan, *given, **named):
            kernels.add((plan.spec_text, plan.shape, backward))
            return method(plan, *given, **named)

        return call

    _plans.Plan.forward, _plans.Plan.backward = (
        noted(_plans.Plan.forward, False),
        noted(_plans.Plan.backward, True),
    )
    _plans.launch = lambda *_: None
    for name, *arguments in checks:
        globals()[name](rank, ranks, *arguments)
    return kernels


def prepare(rank, ranks, kernels):
    """Compiles this rank's share of them side by side, for all ranks."""
    import flashjit

    runtime = flashjit.runtime()

    def compile_one(kernel):
        torch.zeros(1, device=device_of(rank))  # binds the thread to the device
        spec, shape, backward = kernel
        runtime.prepare(spec, shape, backward=backward)

    torch.cuda.set_device(rank)
    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() // ranks)) as pool:
        list(pool.map(compile_one, sorted(kernels)[rank::ranks]))
    dist.barrier()


def serve(rank, ranks, store, paths, backend, seconds, calls, results):
    """Runs checks until there is no more; a result is the rank, what went wrong or None, and what the check returned."""
    sys.path[:0] = paths
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=seconds),
    )
    for name, arguments in iter(calls.get, None):
        try:
            results.put((rank, None, globals()[name](rank, ranks, *arguments)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
    os._exit(
        0
    )  # gloo's threads at times abort an interpreter that ends, and NCCL's group waits for the others


class Ranks:
    """Processes of a group, which run one check after the other: to begin one takes longer than a check."""

    def __init__(self, ranks, backend="gloo", seconds=300):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.calls, self.results = [context.SimpleQueue() for _ in range(ranks)], context.Queue()
        store = os.path.join(self.folder.name, "store")
        self.processes = [
            context.Process(
                target=serve,
                args=(rank, ranks, store, sys.path, backend, seconds, calls, self.results),
                daemon=True,
            )
            for rank, calls in enumerate(self.calls)
        ]
        for process in self.processes:
            process.start()

    def run(self, name, *arguments):
        """What each rank returns, those that end without an answer left out."""
        for calls in self.calls:
            calls.put((name, arguments))
        answers = {}
        while len(answers) < len(self.processes):
            try:
                rank, wrong, answer = self.results.get(timeout=1)
            except queue.Empty:
                if any(
                    rank not in answers and process.is_alive() for rank, process in enumerate(self.processes)
                ):
                    continue
                break
            answers[rank] = answer
            if wrong:
                self.close()  # whose peers may wait for it
                pytest.fail(f"rank {rank}: {wrong}")
        return answers

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


_ranks = {}


def spawn(name, ranks, *arguments, backend="gloo"):
    group = _ranks.get((ranks, backend))
    if group is None or not all(process.is_alive() for process in group.processes):
        group = _ranks[ranks, backend] = Ranks(ranks, backend)
    answers = group.run(name, *arguments)
    assert len(answers) == ranks, f"of {ranks} ranks {sorted(answers)} have answered"
    return answers


@pytest.fixture(scope="module", autouse=True)
def _end_of_ranks():
    yield
    for group in _ranks.values():
        group.close()
    _ranks.clear()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_scheme_layout_and_mask(ranks, scheme):
    spawn("check_cases", ranks, (scheme,))


@pytest.mark.slow
def test_three_ranks():
    spawn("check_cases", 3, ("ring", "all_gather"))


@pytest.mark.slow
def test_heads_in_parts():
    from flashjit._chunks import parts_of_heads

    assert [parts_of_heads(2, tokens, 32, 8) for tokens in (65535, 65536)] == [1, 2]
    assert (
        parts_of_heads(2, 1 << 20, 32, 2)
        == parts_of_heads(4, 1 << 20, 8, 2)
        == parts_of_heads(2, 1 << 20, 6, 6)
        == 1
    )
    assert parts_of_heads(1, 1 << 20, 32, 8) == 1
    spawn("check_in_parts", 2, "check_cases", ("ulysses",))
    spawn("check_in_parts", 2, "check_dropout", ("ulysses",))
    spawn("check_in_parts", 4, "check_cases", ("ulysses",))


@pytest.mark.slow
def test_ulysses_inside_of_a_ring():
    spawn("check_two_levels", 4)


def test_dropout():
    spawn("check_dropout", 2, ("ring", "all_gather", "ulysses"))


def test_dropout_of_two_levels():
    spawn("check_dropout", 4, ("two_level",), ("zigzag", "striped"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_is_the_formula_s(ranks):
    spawn("check_memory", ranks)


@pytest.mark.parametrize("batch", [1, 2])
def test_memory_of_heads_in_parts(batch):
    spawn("check_in_parts", 2, "check_memory", batch)


@pytest.mark.parametrize(
    "name",
    [
        "check_programs",
        "check_programs_of_documents",
        "check_refusals",
        "check_disagreement",
        "check_a_training_step",
        "check_compile",
        "check_autocast",
        "check_negated_views",
        "check_checkpointed_dropout",
        "check_small_weights",
        "check_groups_after_refusals",
    ],
)
def test_two_ranks(name):
    spawn(name, 2)


@pytest.mark.slow
def test_a_peer_that_died():
    answers = Ranks(2).run("check_a_peer_that_died")
    assert list(answers) == [0]


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
ON_GPUS = [
    ("check_on_gpus",),
    ("check_programs",),
    ("check_dropout", ("ring", "ulysses"), ("zigzag", "striped"), False),
]


@pytest.fixture(scope="module")
def compiled_on_gpus():
    """The kernels of ON_GPUS, compiled by all processors at once."""
    group = _ranks[2, "nccl"] = Ranks(2, "nccl", 60)  # begins while the kernels are found
    kernels = set.union(*spawn("list_kernels", 2, ON_GPUS).values())
    _ranks.pop((2, "gloo")).close()  # which computes nothing any more
    group.run("prepare", kernels)


@needs_two_gpus
@pytest.mark.parametrize(
    "check", ON_GPUS + [("check_autocast",), ("check_disagreement",)], ids=lambda check: check[0]
)
def test_two_gpus(check, compiled_on_gpus):
    spawn(check[0], 2, *check[1:], backend="nccl")


@needs_two_gpus
def test_memory_of_two_gpus():
    spawn("check_memory", 2, backend="nccl")


@needs_two_gpus
def test_two_gpus_of_which_one_dies():
    """NCCL's watchdog ends the one that is left after the group's time-out."""
    group = Ranks(2, "nccl", 5)
    begin = time.monotonic()
    answers = group.run("check_a_peer_that_died")
    assert 1 not in answers and time.monotonic() - begin < 90
    group.close()


def ring_in_turn(q, k, v, dout, ranks, layout):
    """O and gradients of a causal ring whose ranks one process plays in turn."""
    from flashjit._call_types import NO_RNG
    from flashjit._pieces import Rule
    from flashjit._schemes import Saved, State, Sums
    from flashjit._shards import by_rank, chunks, in_order

    shards = [by_rank(x, ranks, layout) for x in (q, k, v, dout)]
    rows = shards[0].shape[3]
    pieces = lambda rank, owner: Rule(True, None, None, None, None).pieces(
        chunks(rank, ranks, rows, layout), chunks(owner, ranks, rows, layout), q.device
    )
    outs, dqs, dkvs = [], [], [Sums(shards[1][i], shards[2][i]) for i in range(ranks)]
    for rank in range(ranks):
        state, dq = State(shards[0][rank], v.shape[3]), Sums(shards[0][rank])
        for step in range(ranks):
            owner = (rank - step) % ranks
            for piece in pieces(rank, owner):
                state.add(piece, torch.float32, shards[1][owner], shards[2][owner], NO_RNG, 0)
        out, lse = state.whole()
        outs.append(out.to(q.dtype))
        saved = Saved(shards[0][rank], outs[-1], lse, shards[3][rank], None)
        for owner in range(ranks):
            for piece in pieces(rank, owner):
                (part, *parts), _ = saved.gradients(shards[1][owner], shards[2][owner], piece)
                dq.add(0, piece.rows, part)
                for i in range(2):
                    dkvs[owner].add(i, piece.keys, parts[i])
        dqs.append(dq.of(0))
    whole = [outs, dqs, *([dkv.of(i) for dkv in dkvs] for i in range(2))]
    return [in_order(x, layout).to(q.dtype) for x in whole]


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_long_rings_are_as_exact_as_one_gpu(ranks, device):
    import flashjit

    generator = torch.Generator().manual_seed(ranks)
    rows, dim = (8192, 128) if device == "cuda" else (256, 16)
    make = lambda heads: torch.randn(1, heads, rows, dim, generator=generator).to(torch.bfloat16).to(device)
    q, k, v, dout = make(HEADS), make(HEADS_KV), make(HEADS_KV), make(HEADS)
    doubles, inputs = ([f(x).requires_grad_() for x in (q, k, v)] for f in (torch.Tensor.double, torch.clone))
    want, _ = exact(*doubles, causal=True)
    wanted = [want, *torch.autograd.grad((want * dout).sum(), doubles)]
    alone = flashjit.attention(*inputs, causal=True)
    own = [alone, *torch.autograd.grad(alone, inputs, dout)]
    mean = lambda got: [(a.double() - b.double()).square().mean().sqrt().item() for a, b in zip(got, wanted)]
    with torch.no_grad():
        got = mean(ring_in_turn(q, k, v, dout, ranks, "zigzag"))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, mean(own)):
        assert a <= 1.1 * b, f"{name}: {a:.3g}, on one {b:.3g}"


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_rows_of_any_size_go_to_ranks_and_back(layout):
    from flashjit._shards import by_rank, in_order

    for batch, dim in itertools.product((0, 1, 2), (0, 1, 3, 8)):
        for dtype in (torch.bfloat16, torch.float64, torch.bool):
            x = torch.randn(batch, 3, 12, dim).to(dtype)
            assert torch.equal(in_order(by_rank(x, 3, layout), layout), x)


def test_layouts():
    import flashjit
    import flashjit.distributed as fd

    assert fd.positions(1, 2, 4, "zigzag").tolist() == [2, 3, 4, 5]
    assert fd.positions(0, 2, 4, "zigzag").tolist() == [0, 1, 6, 7]
    assert fd.positions(1, 2, 4, "striped").tolist() == [1, 3, 5, 7]
    assert fd.positions(1, 4, 2, "zigzag", inner_ranks=2).tolist() == [6, 7]
    with pytest.raises(flashjit.InvalidArgument, match="pad it to 12"):
        fd.positions(0, 2, 5, "zigzag")

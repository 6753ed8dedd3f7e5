"""flashjit.distributed over gloo: ranks on the CPU against the whole sequence on one."""
import math
import os
import sys
import tempfile

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

B, HEADS, HEADS_KV, DIM = 1, 4, 2, 16


def whole(seed=0, rows=48):
    generator = torch.Generator().manual_seed(seed)
    make = lambda heads: torch.randn(B, heads, rows, DIM, generator=generator, dtype=torch.float32)
    return make(HEADS), make(HEADS_KV), make(HEADS_KV), make(HEADS)  # q, k, v, dO


def exact(q, k, v, causal=False, window=None, score=None, keep=None):
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    s = DIM ** -0.5 * q @ k.transpose(2, 3)
    i, j = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])
    if score:
        s = score(s, i, j)
    visible = torch.ones(s.shape[2:], dtype=torch.bool)
    if causal:
        visible &= i >= j
    if window:
        visible &= i - j < window
    if keep:
        visible &= keep(i, j)
    s = s.masked_fill(~visible, -math.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


CASES = [dict(scheme=scheme, layout=layout, **rule)
         for scheme in ("ring", "all_gather", "ulysses") for layout in ("contiguous", "zigzag", "striped")
         for rule in (dict(), dict(causal=True), dict(causal=True, window=7))]


def check_cases(rank, ranks):
    import flashjit.distributed as fd
    for case in CASES:
        if HEADS % ranks and case["scheme"] == "ulysses":
            continue
        q, k, v, dout = whole()
        for x in (q, k, v):
            x.requires_grad_()
        want, want_lse = exact(q, k, v, case.get("causal", False), case.get("window"))
        dlse = torch.linspace(-1, 1, want_lse.numel()).view_as(want_lse)
        ((want * dout).sum() + (want_lse * dlse).sum()).backward()
        cut = lambda x: fd.shard(x.detach(), layout=case["layout"])
        mine = [cut(x).requires_grad_() for x in (q, k, v)]
        out, lse = fd.distributed_attention(*mine, return_lse=True, **case)
        ((out * cut(dout)).sum() + (lse * cut(dlse)).sum()).backward()
        for name, got, expected in (("out", out, want), ("lse", lse, want_lse), ("dq", mine[0].grad, q.grad),
                                    ("dk", mine[1].grad, k.grad), ("dv", mine[2].grad, v.grad)):
            error = (got.double() - cut(expected).double()).abs().max().item()
            assert error < 2e-5, f"{case}: {name} is off by {error}"
        assert torch.equal(fd.unshard(cut(q), layout=case["layout"]), q.detach())


def check_programs(rank, ranks):
    import flashjit.distributed as fd
    for scheme in ("ring", "all_gather"):
        for layout in ("contiguous", "zigzag", "striped"):
            q, k, v, dout = whole(1)
            want, _ = exact(q, k, v, score=lambda s, i, j: s + 0.1 * (j - i), keep=lambda i, j: i // 10 == j // 10)
            mine = [fd.shard(x, layout=layout) for x in (q, k, v)]
            out = fd.distributed_attention(*mine, scheme=scheme, layout=layout, score_mod=lambda s, b, h, i, j: s + 0.1 * (j - i),
                                           mask_mod=lambda b, h, i, j: i // 10 == j // 10)
            error = (out.double() - fd.shard(want, layout=layout)).abs().max().item()
            assert error < 2e-5, f"{scheme}, {layout}: {error}"


def check_disagreement(rank, ranks):
    import flashjit
    import flashjit.distributed as fd
    q, k, v, _ = whole()
    mine = [fd.shard(x) for x in (q, k, v)]
    if rank == ranks - 1:
        mine = [x[:, :, :-2] for x in mine]
    try:
        fd.distributed_attention(*mine)
    except flashjit.InvalidArgument as error:
        assert f"rank {ranks - 1} was given" in str(error), error
    else:
        raise AssertionError("ranks that disagree were not refused")


def run(rank, ranks, file, name, paths):
    sys.path[:0] = paths
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    try:
        globals()[name](rank, ranks)
    finally:
        dist.destroy_process_group()


def spawn(name, ranks):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (ranks, os.path.join(folder, "store"), name, sys.path), nprocs=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_scheme_layout_and_mask(ranks):
    spawn("check_cases", ranks)


def test_programs_count_in_the_whole_sequence():
    spawn("check_programs", 3 if 48 % 6 == 0 else 2)


def test_ranks_that_disagree_are_told_on_every_rank():
    spawn("check_disagreement", 2)


def test_layouts():
    import flashjit
    import flashjit.distributed as fd
    assert fd.positions(1, 2, 4, "zigzag").tolist() == [2, 3, 4, 5]
    assert fd.positions(0, 2, 4, "zigzag").tolist() == [0, 1, 6, 7]
    assert fd.positions(1, 2, 4, "striped").tolist() == [1, 3, 5, 7]
    with pytest.raises(flashjit.InvalidArgument, match="pad it to 12"):
        fd.positions(0, 2, 5, "zigzag")

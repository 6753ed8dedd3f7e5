"""flashjit.vllm where ranks share the keys (decode context parallelism): ranks are threads, against fp64."""

import concurrent.futures
import importlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
import vllm_standin  # noqa: E402
from vllm_standin import DEVICE, normal  # noqa: E402

HEADS, DIM, BLOCK = 2, 32, 16  # of a rank
OLD, NEW = (20, 0, 3), (1, 18, 4)


@pytest.fixture
def backend(monkeypatch):
    torch.manual_seed(0)
    vllm_standin.install(monkeypatch)
    return importlib.import_module("flashjit.vllm._backend")


class Ranks:
    """Requests with OLD keys, of which each rank has `interleave` in turn, and NEW tokens. Each rank has HEADS of Q, and the head of
    K and V."""

    def __init__(self, backend, world, interleave):
        self.backend, self.world, self.interleave = backend, world, interleave
        vllm_standin.groups[:] = [vllm_standin.Group(world)]
        self.k, self.v = ([normal(n + m, 1, DIM) for n, m in zip(OLD, NEW)] for _ in range(2))
        self.q = normal(sum(NEW), world * HEADS, DIM)
        self.table = (torch.randperm(12, device=DEVICE) + 1).int().view(len(NEW), 4)
        self.common, starts = vllm_standin.described(OLD, NEW, self.table)
        self.rows = [slice(int(a), int(b)) for a, b in zip(starts, starts[1:])]

    def config(self):
        return types.SimpleNamespace(
            model_config=types.SimpleNamespace(is_mm_prefix_lm=False),
            scheduler_config=types.SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
            parallel_config=types.SimpleNamespace(cp_kv_cache_interleave_size=self.interleave),
        )

    def slots(self, i, first, last, rank):
        """Where a rank stores keys of a request; -1: another rank does."""
        at = torch.arange(first, last, device=DEVICE)
        turn, step = at // self.interleave, self.interleave
        local = turn // self.world * step + at % step
        found = self.table[i, local // BLOCK].long() * BLOCK + local % BLOCK
        return found.where(turn % self.world == rank, -1)

    def run(self, rank, options):
        vllm_standin.RANK.number = rank
        torch.zeros(1, device=DEVICE)  # a thread has no CUDA context before
        impl = self.backend.FlashjitImpl(HEADS, DIM, 0.2, 1, **options)
        name = options.get("kv_cache_dtype", "auto")
        size = self.backend.FlashjitBackend.get_kv_cache_shape(13, BLOCK, 1, DIM, name)
        dtype = torch.float32 if name == "auto" else torch.uint8
        cache = torch.full(size, float("nan") if name == "auto" else 255, device=DEVICE, dtype=dtype)
        for i, (n, m) in enumerate(zip(OLD, NEW)):
            for a, b in ((0, n), (n, n + m)):
                impl.do_kv_cache_update(
                    None, self.k[i][a:b], self.v[i][a:b], cache, self.slots(i, a, b, rank)
                )
        builder = self.backend.FlashjitBuilder(None, ["layer"], self.config(), DEVICE)
        assert not builder.supports_draft_decode_metadata_update
        metadata = builder.build(0, self.common)
        k, v = (torch.cat([x[i][OLD[i] :] for i in range(len(NEW))]) for x in (self.k, self.v))
        q = self.q[:, rank * HEADS : (rank + 1) * HEADS]
        out = torch.empty(sum(NEW), HEADS, DIM, device=DEVICE)
        return impl.forward(None, q, k, v, cache, metadata, out)

    def both(self, options):
        with concurrent.futures.ThreadPoolExecutor(self.world) as pool:
            return torch.cat(list(pool.map(self.run, range(self.world), [options] * self.world)), 1)


@pytest.mark.parametrize("world, interleave", [(2, 1), (2, 4), (3, 1)])
@pytest.mark.parametrize("sinks", [False, True])
def test_ranks_share_the_keys(backend, world, interleave, sinks):
    ranks = Ranks(backend, world, interleave)
    given = torch.tensor([0.5, -1.0], device=DEVICE) if sinks else None
    out = ranks.both({"logits_soft_cap": 2.0, "sinks": given})
    for i, rows in enumerate(ranks.rows):
        more = {"sinks": given.cpu().repeat(world)} if sinks else {}
        wanted, _ = exact_attention.exact(
            ranks.q[rows], ranks.k[i], ranks.v[i], scale=0.2, causal=True, cap=2.0, **more
        )
        torch.testing.assert_close(out[rows].double().cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_ranks_share_keys_of_four_bits(backend):
    ranks = Ranks(backend, 2, 1)
    out = ranks.both({"kv_cache_dtype": "int4_per_token_head"})
    for i, rows in enumerate(ranks.rows):
        wanted, _ = exact_attention.exact(ranks.q[rows], ranks.k[i], ranks.v[i], scale=0.2, causal=True)
        assert (out[rows].double().cpu() - wanted).norm() / wanted.norm() < 0.25  # of the codes


def test_what_depends_on_places_is_refused(backend):
    vllm_standin.groups[:] = [vllm_standin.Group(2)]
    vllm_standin.RANK.number = 0
    for options, says in (
        ({"sliding_window": 4}, "sliding_window is given with decode context parallelism"),
        ({"alibi_slopes": [0.5, 0.5]}, "alibi_slopes is given with decode context parallelism"),
    ):
        with pytest.raises(flashjit.Unsupported, match=says):
            backend.FlashjitImpl(HEADS, DIM, 0.2, 1, **options)
    with pytest.raises(flashjit.Unsupported, match="a rank has 2 heads of K and V"):
        backend.FlashjitImpl(HEADS, DIM, 0.2, 2)
    impl = backend.FlashjitImpl(HEADS, DIM, 0.2, 2, attn_type="encoder_only", sliding_window=4)
    assert impl._across is None  # without a cache each rank has all keys
    assert backend.FlashjitImpl.supports_dcp


@pytest.mark.parametrize("name, exchange", [("a2a", "dcp_a2a_lse_reduce"), ("ag_rs", "cp_lse_ag_out_rs")])
@pytest.mark.parametrize("module", ["dcp", "dcp_alltoall and common"])
def test_the_exchange_is_where_each_vllm_has_it(backend, monkeypatch, module, name, exchange):
    import flashjit.vllm._shards as shards

    folder = "vllm.v1.attention.ops"
    if module == "dcp":
        wanted = object()
        monkeypatch.setattr(sys.modules[f"{folder}.dcp"], exchange, wanted, raising=False)
    else:  # 0.26
        monkeypatch.delitem(sys.modules, f"{folder}.dcp")
        for of, only in (("dcp_alltoall", "dcp_a2a_lse_reduce"), ("common", "cp_lse_ag_out_rs")):
            made = types.ModuleType(f"{folder}.{of}")
            setattr(made, only, object())
            monkeypatch.setitem(sys.modules, made.__name__, made)
        of = "dcp_alltoall" if name == "a2a" else "common"
        wanted = getattr(sys.modules[f"{folder}.{of}"], exchange)
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(dcp_comm_backend=name))
    assert shards._combine(config) is wanted

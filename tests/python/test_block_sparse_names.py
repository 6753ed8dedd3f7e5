"""The names of Block-Sparse-Attention and of FastVideo's kernels, against fp64."""

import math
import sys

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
from flashjit import block_sparse_attn, fastvideo  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HQ, HKV, DIM = 4, 2, 32


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(out, q, k, v, seen, causal=False):
    """Compares one sequence: out, q [queries, h, d]; seen: bool [h, queries, keys]."""
    for h in range(HQ):
        own, of_kv = slice(h, h + 1), slice(h // (HQ // HKV), h // (HQ // HKV) + 1)
        wanted, _ = exact_attention.exact(q[:, own], k[:, of_kv], v[:, of_kv], causal=causal, seen=seen[h])
        torch.testing.assert_close(out[:, own].double().cpu(), wanted, rtol=1e-5, atol=1e-5)


def expanded(blocks, block, queries, keys):
    return blocks.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :queries, :keys]


class TestBlockSparseAttention:
    QUERIES, KEYS = (200, 300), (330, 300)  # of two sequences

    @pytest.fixture
    def packed(self):
        torch.manual_seed(0)
        return tuple(
            torch.randn(sum(rows), h, DIM, device=DEVICE, requires_grad=True)
            for rows, h in ((self.QUERIES, HQ), (self.KEYS, HKV), (self.KEYS, HKV))
        )

    def call(self, packed, kinds, info, base, **more):
        cu_q, cu_kv = (ints(0, x[0], sum(x)) for x in (self.QUERIES, self.KEYS))
        return block_sparse_attn.block_sparse_attn_func(
            *packed, cu_q, cu_kv, ints(*kinds), info, base, max(self.QUERIES), max(self.KEYS), 0.0, **more
        )

    def call_with(self, packed, name, value):
        given = {"cu_seqlens_q": ints(0, 200, 500), "cu_seqlens_k": ints(0, 330, 630), "p_dropout": 0.0}
        given |= {"head_mask_type": ints(*(0,) * HQ), "streaming_info": None, "base_blockmask": None}
        given |= {"max_seqlen_q_": 300, "max_seqlen_k_": 330, name: value}
        return block_sparse_attn.block_sparse_attn_func(*packed, **given)

    def check(self, out, packed, seen_of, causal):
        """seen_of(sequence): bool [h, queries, keys]."""
        parts = [
            x.split(rows)
            for x, rows in zip((out, *packed), (self.QUERIES, self.QUERIES, self.KEYS, self.KEYS))
        ]
        for i in range(2):
            check(*(x[i].detach() for x in parts), seen_of(i), causal)

    @pytest.mark.parametrize("causal", [False, True])
    def test_each_head_has_its_kind(self, packed, causal):
        base = torch.rand(2, 2, 3, 3, device=DEVICE) < 0.6
        out = self.call(packed, (1, 0, 1, -1), ints(0, 0, 0, 0, 0, 0, 1, 1), base, is_causal=causal)

        def seen_of(i):
            rows, keys = self.QUERIES[i], self.KEYS[i]
            row, column = torch.arange(3)[:, None], torch.arange(3)
            # The last block that a block of queries sees, of its last query where all are there.
            last = row + -(-(keys - rows) // 128) if causal else torch.full((3, 1), -(-keys // 128) - 1)
            streaming = (column == 0) | (column == last)
            dense = torch.ones(3, 3, dtype=torch.bool)
            maps = torch.stack([base[i, 0].cpu(), dense, base[i, 1].cpu(), streaming])
            return expanded(maps, 128, rows, keys)

        self.check(out, packed, seen_of, causal)

    def test_gradients(self, packed):
        base = torch.rand(2, HQ, 3, 3, device=DEVICE) < 0.6
        self.call(packed, (1,) * HQ, None, base, is_causal=True, deterministic=True).square().sum().backward()
        q, k, v = (x.detach().double().cpu().requires_grad_() for x in packed)
        total = 0
        for i in range(2):
            part = [x.split(rows)[i] for x, rows in zip((q, k, v), (self.QUERIES, self.KEYS, self.KEYS))]
            k_of, v_of = (x.repeat_interleave(HQ // HKV, 1) for x in part[1:])
            seen = expanded(base[i].cpu(), 128, self.QUERIES[i], self.KEYS[i])
            seen = seen & torch.ones(seen.shape, dtype=torch.bool).tril(self.KEYS[i] - self.QUERIES[i])
            score = torch.einsum("qhd,khd->hqk", part[0], k_of) / math.sqrt(DIM)
            p = score.masked_fill(~seen, -math.inf).softmax(2).nan_to_num(0)
            total = total + torch.einsum("hqk,khd->qhd", p, v_of).square().sum()
        total.backward()
        for own, wanted in zip(packed, (q, k, v)):
            torch.testing.assert_close(own.grad.double().cpu(), wanted.grad, rtol=1e-4, atol=1e-4)

    def test_streaming_heads_alone(self, packed):
        cu_q, cu_kv = (ints(0, x[0], sum(x)) for x in (self.QUERIES, self.KEYS))
        info = ints(*(1, 2) * HQ)
        kinds = (-1, 0, -1, 0)
        lengths = max(self.QUERIES), max(self.KEYS)
        out = block_sparse_attn.block_streaming_attn_func(
            *packed, cu_q, cu_kv, ints(*kinds), info, *lengths, 0.0
        )
        assert torch.equal(out, self.call(packed, kinds, info, None, is_causal=True))

    def test_what_is_refused(self, packed):
        base = torch.ones(2, 2, 3, 3, dtype=torch.bool, device=DEVICE)
        with pytest.raises(flashjit.Unsupported, match="mask_mod"):
            self.call(packed, (0,) * HQ, None, None, exact_streaming=True)
        with pytest.raises(flashjit.InvalidArgument, match=r"\[2, block-sparse heads, 3, 3\]"):
            self.call(packed, (1,) * HQ, None, base[..., :2])
        with pytest.raises(flashjit.InvalidArgument, match="4 ints"):
            self.call(packed, (1,), None, base)
        for name, value in (
            ("cu_seqlens_q", [0, 200, 500]),
            ("cu_seqlens_k", None),
            ("base_blockmask", [[1]]),
        ):
            with pytest.raises(flashjit.WrongType, match=f"{name} is .*give a tensor"):
                self.call_with(packed, name, value)
        for name in ("max_seqlen_q_", "max_seqlen_k_"):
            with pytest.raises(flashjit.WrongType, match=f"{name} is None: give an int"):
                self.call_with(packed, name, None)
        for most in (torch.tensor(330).numpy()[()], torch.tensor(330)):  # as cu_seqlens.diff().max() is
            self.call_with(packed, "max_seqlen_k_", most)
        if DEVICE == "cpu":
            with pytest.raises(flashjit.InvalidArgument, match=r"head_mask_type is \[0, 2, 0, 0\]: give 0"):
                self.call(packed, (0, 2, 0, 0), None, base)
            for kinds in ((1, 0, 0, 0), (1, 1, 1, 0)):
                with pytest.raises(flashjit.InvalidArgument, match="has 2 maps, but head_mask_type has"):
                    self.call(packed, kinds, None, base)

    def test_heads_that_lack_what_they_need(self, packed):
        """Refused where the host can say so without waiting; else dense, also in CUDA graphs."""
        base = torch.ones(2, 2, 3, 3, dtype=torch.bool, device=DEVICE)
        for kinds, blocks, name in (
            ((1,) * HQ, None, "base_blockmask"),
            ((-1,) * HQ, base, "streaming_info"),
        ):
            if DEVICE == "cpu":
                with pytest.raises(flashjit.InvalidArgument, match=name):
                    self.call(packed, kinds, None, blocks)
                continue
            cu_q, cu_kv = (ints(0, x[0], sum(x)) for x in (self.QUERIES, self.KEYS))
            given = (*packed, cu_q, cu_kv, ints(*kinds), None, blocks, max(self.QUERIES), max(self.KEYS), 0.0)
            with torch.no_grad():
                wanted = self.call(packed, (0,) * HQ, None, None)
                block_sparse_attn.block_sparse_attn_func(*given)  # compiles
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = block_sparse_attn.block_sparse_attn_func(*given)
                graph.replay()
                assert torch.equal(found, wanted)

    def test_install(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "block_sparse_attn", raising=False)
        block_sparse_attn.install()
        from block_sparse_attn import block_sparse_attn_func

        assert block_sparse_attn_func is block_sparse_attn.block_sparse_attn_func
        monkeypatch.setitem(sys.modules, "block_sparse_attn", sys)
        with pytest.raises(flashjit.InvalidArgument, match="imported before"):
            block_sparse_attn.install()


class TestFastVideo:
    BLOCK, ROWS, COLUMNS = 64, 2, 3

    @pytest.fixture
    def qkv(self):
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(2, h, n * self.BLOCK, DIM, device=DEVICE)
            for h, n in ((HQ, self.ROWS), (HKV, self.COLUMNS), (HKV, self.COLUMNS))
        )
        return q, k, v

    sizes = (64, 17, 40)

    def seen(self, blocks):
        """bool [b, h, queries, keys] of the blocks [b, h, rows, columns]."""
        wide = expanded(blocks.cpu(), self.BLOCK, self.ROWS * self.BLOCK, self.COLUMNS * self.BLOCK)
        there = torch.cat([torch.arange(self.BLOCK) < size for size in self.sizes])
        return wide & there

    def check(self, out, qkv, blocks):
        seen = self.seen(blocks)
        for b in range(2):
            check(*(x[b].transpose(0, 1) for x in (out, *qkv)), seen[b])

    def test_a_map(self, qkv):
        blocks = torch.rand(2, HQ, self.ROWS, self.COLUMNS, device=DEVICE) < 0.6
        out, lse = fastvideo.block_sparse_attn(*qkv, blocks, ints(*self.sizes))
        self.check(out, qkv, blocks)
        assert lse.shape == out.shape[:3]

    def test_lists(self, qkv):
        lists = torch.tensor([2, 0, 9, -1], device=DEVICE, dtype=torch.int32).expand(2, HQ, self.ROWS, 4)
        counts = torch.ones(2, HQ, self.ROWS, device=DEVICE, dtype=torch.int32)
        counts[:, 1], counts[1] = 0, 4  # none; all, of which two are no blocks
        out, _ = fastvideo.block_sparse_attn_from_indices(*qkv, lists, counts, ints(*self.sizes))
        blocks = torch.zeros(2, HQ, self.ROWS, self.COLUMNS, dtype=torch.bool)
        blocks[..., 2] = counts.cpu() > 0
        blocks[..., 0] = counts.cpu() > 1
        self.check(out, qkv, blocks)
        assert not out[0, 1].any()

    def test_video_sparse_attention(self, qkv):
        q, k, v = qkv
        of_q = (64, 50)
        for x, sizes in ((q, of_q), (k, self.sizes), (v, self.sizes)):  # padding is zeros
            for n, size in enumerate(sizes):
                x[:, :, n * self.BLOCK + size : (n + 1) * self.BLOCK] = 0
        gate = torch.rand_like(q)
        given = ints(*self.sizes), ints(*of_q), 2, (4, 4, 4)
        out = fastvideo.video_sparse_attn(q, k, v, *given, compress_attn_weight=gate)
        means = []
        for x, sizes in ((q, of_q), (k, self.sizes), (v, self.sizes)):
            parts = x.double().cpu().split(self.BLOCK, 2)
            mean = torch.stack([part[:, :, :size].mean(2) for part, size in zip(parts, sizes)], 2)
            means.append(mean if x is q else mean.repeat_interleave(HQ // HKV, 1))
        scores = means[0] @ means[1].transpose(2, 3) / math.sqrt(DIM)
        coarse = (scores.softmax(3) @ means[2]).repeat_interleave(self.BLOCK, 2)
        blocks = torch.zeros(scores.shape, dtype=torch.bool).scatter_(3, scores.topk(2, 3).indices, True)
        self.check(out - (coarse * gate.double().cpu()).to(out), qkv, blocks)
        plain = fastvideo.video_sparse_attn(q, k, v, *given[:3])  # 64 tokens, by default
        torch.testing.assert_close(
            plain - out, (coarse * (1 - gate.double().cpu())).to(out), rtol=1e-4, atol=1e-5
        )

    def test_gradients_reach_all(self, qkv):
        q, k, v = (x.requires_grad_() for x in qkv)
        fastvideo.video_sparse_attn(q, k, v, ints(*self.sizes), ints(64, 64), 1, (4, 4, 4)).sum().backward()
        assert all(x.grad.abs().sum() > 0 for x in (q, k, v))

    def test_what_is_refused(self, qkv):
        with pytest.raises(flashjit.InvalidArgument, match="one for each block"):
            fastvideo.block_sparse_attn(
                *qkv, torch.ones(2, HQ, 2, 5, device=DEVICE, dtype=torch.bool), ints(*range(5))
            )
        with pytest.raises(flashjit.InvalidArgument, match="each has 125"):
            fastvideo.video_sparse_attn(*qkv, ints(*self.sizes), ints(64, 64), 1, 5)
        with pytest.raises(flashjit.InvalidArgument, match="q2k_num"):
            fastvideo.block_sparse_attn_from_indices(*qkv, ints(1), ints(1), ints(*self.sizes))
        with pytest.raises(flashjit.InvalidArgument, match="topk is 0"):
            fastvideo.video_sparse_attn(*qkv, ints(*self.sizes), ints(64, 64), 0, (4, 4, 4))

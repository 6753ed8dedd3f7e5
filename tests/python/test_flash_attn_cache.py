"""flash_attn_with_kvcache() in the parameters of flash-attn's own test of it, drawn at random, against
fp64."""

import itertools
import math
import random

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from flashjit import flash_attn as fa  # noqa: E402
from flashjit.flash_attn import _fa3 as fa3  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, KEYS = 2, 24


def rotated(x, cos, sin, at, interleaved):
    """x [rows, heads, dim] in fp64, row i at position at[i], as products with complex numbers."""
    half = cos.shape[1]
    part = x[..., : 2 * half].double()
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
    turn = torch.complex(cos[at].double(), sin[at].double())[:, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    return torch.cat((turned, x[..., 2 * half :].double()), -1)


def expected(
    q, k_cache, v_cache, k, v, cos, sin, length, pad, causal, window, slopes, interleaved, moving_from=None
):
    """O [sq, hq, d] of one sequence, and its caches [KEYS, hkv, d] afterwards."""
    k_cache, v_cache, q = k_cache.double().clone(), v_cache.double().clone(), q.double()
    rows = torch.arange(q.shape[0])
    if k is not None:
        places, first = torch.arange(k.shape[0]) + length, length if moving_from is None else moving_from
        if cos is not None:
            k = rotated(k, cos, sin, torch.arange(k.shape[0]) + first, interleaved)
            q = rotated(
                q, cos, sin, rows + first if causal or window != (-1, -1) else rows * 0 + first, interleaved
            )
        k_cache[places], v_cache[places] = k.double(), v.double()
        length = length + k.shape[0]
    group = q.shape[1] // k_cache.shape[1]
    keys, values = (x[:length].repeat_interleave(group, 1) for x in (k_cache, v_cache))
    s = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[2])
    at, key = (rows + length - q.shape[0])[:, None].to(s.device), torch.arange(length, device=s.device)
    left, right = window[0], 0 if causal else window[1]
    hidden = key < pad
    hidden = hidden | (key > at + right) if right >= 0 else hidden.expand(len(rows), -1)
    hidden = hidden | (key < at - left) if left >= 0 else hidden
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * (at - key).abs()
    p = torch.softmax(s.masked_fill(hidden, -math.inf), -1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", p, values), k_cache, v_cache


def draw(seed):
    """Options of one call that flash-attn's own test would run."""
    pick = random.Random(seed).choice
    while True:
        case = dict(
            queries=pick([1, 3, 8]),
            dim=pick([32, 48, 59, 64]),
            paged=pick([None, 4, 7]),
            has_batch_idx=pick([False, True]),
            leftpad=pick([False, True]),
            rotary=pick([0.0, 0.5, 1.0]),
            interleaved=pick([False, True]),
            new_is_queries=pick([False, True]),
            causal=pick([False, True]),
            local=pick([False, True]),
            alibi=pick([False, True]),
            new_kv=pick([False, True]),
            heads_kv=pick([6, 3, 1]),
            splits=pick([0, 1]),
            packed_q=pick([False, True]),
            packed_new=pick([False, True]),
        )
        if (
            not case["new_kv"]
            and (case["rotary"] or case["packed_new"])
            or case["has_batch_idx"]
            and case["paged"]
        ):
            continue
        return case


def offsets(counts):
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)


class Problem:
    """Tensors of a drawn call, in the forms that it is given in and for each sequence."""

    def __init__(self, case, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        self.case, dim, heads_kv = case, case["dim"], case["heads_kv"]
        counts = [
            random.randint(1, case["queries"]) if case["packed_q"] else case["queries"] for _ in range(BATCH)
        ]
        new = (
            [random.randint(1, n) for n in counts]
            if case["packed_new"] and not case["new_is_queries"]
            else list(counts)
            if case["packed_new"]
            else [counts[0] if case["new_is_queries"] else random.randint(1, min(counts))] * BATCH
        )
        room = KEYS - max(counts)
        self.lengths = [
            random.randint(0 if case["new_kv"] else 1, room if case["new_kv"] else KEYS) for _ in range(BATCH)
        ]
        self.pads = [random.randrange(max(n, 1)) if case["leftpad"] else 0 for n in self.lengths]
        self.q, self.k, self.v = (
            [torch.randn(n, heads, dim, device=DEVICE) for n in rows]
            for rows, heads in ((counts, 6), (new, heads_kv), (new, heads_kv))
        )
        self.k_cache, self.v_cache = torch.randn(2, BATCH, KEYS, heads_kv, dim, device=DEVICE)
        rotary_dim = int(case["rotary"] * dim) // 16 * 16
        angle = torch.rand(KEYS + 8, rotary_dim // 2, device=DEVICE) * 2 * math.pi
        self.cos, self.sin = (angle.cos(), angle.sin()) if rotary_dim else (None, None)
        self.window = (random.randrange(KEYS), random.randrange(KEYS)) if case["local"] else (-1, -1)
        self.slopes = torch.rand(BATCH, 6, device=DEVICE) * 0.3 if case["alibi"] else None
        self.counts, self.new = counts, new

    def placed(self):
        """Caches in the form of the call, their table, and a function that undoes that form."""
        page, caches = self.case["paged"], (self.k_cache, self.v_cache)
        if page:
            per = -(-KEYS // page)
            table = torch.randperm(BATCH * per + 3, device=DEVICE)[: BATCH * per].int().view(BATCH, per)
            padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, per * page - KEYS)) for x in caches]
            padded = [x.reshape(BATCH * per, page, *x.shape[2:]) for x in padded]
            pages = [
                x.new_zeros(BATCH * per + 3, *x.shape[1:]).index_copy(0, table.flatten().long(), x)
                for x in padded
            ]
            back = lambda x: x[table.flatten().long()].reshape(BATCH, per * page, *x.shape[2:])[:, :KEYS]
            return pages, {"block_table": table}, back
        if self.case["has_batch_idx"]:
            slots = torch.randperm(2 * BATCH, device=DEVICE)[:BATCH].int()
            given = [
                torch.randn(2 * BATCH, *x.shape[1:], device=DEVICE).index_copy(0, slots.long(), x)
                for x in caches
            ]
            return given, {"cache_batch_idx": slots}, lambda x: x[slots.long()]
        return [x.clone() for x in caches], {}, lambda x: x

    def call(self):
        """O of each sequence, and the caches afterwards."""
        case, int32 = self.case, dict(dtype=torch.int32, device=DEVICE)
        (k_cache, v_cache), given, back = self.placed()
        if case["packed_q"]:
            given.update(cu_seqlens_q=offsets(self.counts), max_seqlen_q=max(self.counts))
        if case["packed_new"]:
            given.update(cu_seqlens_k_new=offsets(self.new))
        if case["packed_q"] and self.new == self.counts and case["packed_new"]:
            given["cu_seqlens_k_new"] = given["cu_seqlens_q"]
        together = lambda parts, packed: torch.cat(parts) if packed else torch.stack(parts)
        if case["new_kv"]:
            given.update(
                k=together(self.k, case["packed_new"]),
                v=together(self.v, case["packed_new"]),
                rotary_cos=self.cos,
                rotary_sin=self.sin,
            )
        if case["leftpad"]:
            given["cache_leftpad"] = torch.tensor(self.pads, **int32)
        out = fa.flash_attn_with_kvcache(
            together(self.q, case["packed_q"]),
            k_cache,
            v_cache,
            cache_seqlens=torch.tensor(self.lengths, **int32),
            causal=case["causal"],
            window_size=self.window,
            rotary_interleaved=case["interleaved"],
            alibi_slopes=self.slopes,
            num_splits=case["splits"],
            **given,
        )
        return out.split(self.counts) if case["packed_q"] else out.unbind(), back(k_cache), back(v_cache)


@pytest.mark.parametrize("seed", range(80))
def test_as_flash_attn_defines_it(seed):
    case = draw(seed)
    problem = Problem(case, seed)
    outs, k_cache, v_cache = problem.call()
    for i, out in enumerate(outs):
        new = (problem.k[i], problem.v[i]) if case["new_kv"] else (None, None)
        want, want_k, want_v = expected(
            problem.q[i],
            problem.k_cache[i],
            problem.v_cache[i],
            *new,
            problem.cos,
            problem.sin,
            problem.lengths[i],
            problem.pads[i],
            case["causal"],
            problem.window,
            None if problem.slopes is None else problem.slopes[i],
            case["interleaved"],
        )
        torch.testing.assert_close(
            out.double(), want, atol=2e-5, rtol=1e-4, msg=lambda text: f"{case}: {text}"
        )
        torch.testing.assert_close(k_cache[i].double(), want_k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(v_cache[i].double(), want_v, atol=0, rtol=0)


def simple(lengths=(5, 9), dim=32):
    torch.manual_seed(0)
    q, k_cache, v_cache = (
        torch.randn(2, rows, heads, dim, device=DEVICE) for rows, heads in ((3, 4), (16, 2), (16, 2))
    )
    return q, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def test_shapes_are_checked():
    q, k_cache, v_cache, lengths = simple()
    int32 = dict(dtype=torch.int32, device=DEVICE)

    def refused(words, **given):
        with pytest.raises(flashjit.InvalidArgument, match=words):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, **{"cache_seqlens": lengths, **given})

    for size in ((1,), (4,), (2, 1), ()):
        refused(r"cache_leftpad is int32 .*int32 \[2\]", cache_leftpad=torch.zeros(size, **int32))
        refused(r"cache_seqlens is int32 .*int32 \[2\]", cache_seqlens=torch.ones(size, **int32))
    refused("cache_leftpad is int64", cache_leftpad=torch.zeros(2, dtype=torch.int64, device=DEVICE))
    refused("cache_seqlens is float32", cache_seqlens=torch.ones(2, device=DEVICE))
    for size in ((8,), (3,), (3, 4), (4, 1), (2, 8), ()):
        refused(r"alibi_slopes is float32 .*\[4\] or \[2, 4\]", alibi_slopes=torch.ones(size, device=DEVICE))
    refused("cu_seqlens_q is given without max_seqlen_q", cu_seqlens_q=torch.zeros(3, **int32))
    refused("block_table and page_table", block_table=lengths, page_table=lengths)


def test_lengths_as_a_number_and_as_int64():
    q, k_cache, v_cache, lengths = simple(lengths=(9, 9))
    want = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    for given in (9, lengths.long()):
        assert torch.equal(fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=given), want)


def test_numbers_of_keys_share_compiled_graphs():
    q, k_cache, v_cache, _ = simple()
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(fa.flash_attn_with_kvcache, backend=graphs, fullgraph=True)
    for keys in range(4, 15):
        got = compiled(q, k_cache, v_cache, cache_seqlens=keys, causal=True)
        torch.testing.assert_close(
            got, fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=keys, causal=True)
        )
    assert graphs.frame_count <= 2, graphs.frame_count


def test_packed_queries_without_new_keys_may_have_offsets_of_these():
    """As SGLang calls it: cu_seqlens_k_new counts where k is given."""
    q, k_cache, v_cache, lengths = simple()
    offsets = torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=DEVICE)
    out, lse = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=offsets,
        cu_seqlens_k_new=offsets,
        max_seqlen_q=3,
        causal=True,
        return_softmax_lse=True,
        ver=3,
    )
    want, want_lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
    )
    torch.testing.assert_close(out.view_as(q), want)
    torch.testing.assert_close(lse.view(4, 2, 3).transpose(0, 1), want_lse)


@pytest.mark.parametrize("packed", [False, True])
def test_positions_may_begin_elsewhere_than_in_the_cache(packed):
    q, k_cache, v_cache, lengths = simple()
    q, first = q[:, :2], torch.tensor([3, 20], dtype=torch.int32, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 2, 32, device=DEVICE)
    angle = torch.rand(32, 16, device=DEVICE) * 6
    given = (
        {"cu_seqlens_q": offsets((2, 2)), "cu_seqlens_k_new": offsets((2, 2)), "max_seqlen_q": 2}
        if packed
        else {}
    )
    caches = k_cache.clone(), v_cache.clone()
    flat = lambda x: x.flatten(0, 1) if packed else x
    out = fa3.flash_attn_with_kvcache(
        flat(q),
        *caches,
        flat(k),
        flat(v),
        rotary_cos=angle.cos(),
        rotary_sin=angle.sin(),
        causal=True,
        cache_seqlens=lengths,
        rotary_seqlens=first,
        **given,
    ).view_as(q)
    for i in range(2):
        want, want_k, _ = expected(
            q[i],
            k_cache[i],
            v_cache[i],
            k[i],
            v[i],
            angle.cos(),
            angle.sin(),
            int(lengths[i]),
            0,
            True,
            (-1, -1),
            None,
            True,
            int(first[i]),
        )
        torch.testing.assert_close(out[i].double(), want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(caches[0][i].double(), want_k, atol=1e-5, rtol=1e-5)


def test_descales_of_fp8_and_what_engines_give():
    q, k_cache, v_cache, lengths = simple()
    q, sinks = q.bfloat16(), torch.randn(4, device=DEVICE)
    codes = [x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache)]
    k_descale, v_descale = torch.rand(2, 2, 2, device=DEVICE) + 0.5
    given = {
        "cache_seqlens": lengths,
        "causal": True,
        "sinks": sinks,
        "scheduler_metadata": fa3.get_scheduler_metadata(2, 3, 16, 4, 2, 32, lengths),
        "num_splits": 0,
        "pack_gqa": True,
        "sm_margin": 2,
    }
    exact = lambda scales: [
        (x.float() * scale[:, None, :, None]).bfloat16() for x, scale in zip(codes, scales)
    ]
    one = torch.ones(2, 2, device=DEVICE)
    out = torch.empty_like(q)
    for scales, named in (
        ((k_descale, v_descale), {"k_descale": k_descale, "v_descale": v_descale}),
        ((one, one), {}),
    ):
        got = fa3.flash_attn_with_kvcache(q, *codes, out=out, **named, **given)
        assert got is out
        want = fa3.flash_attn_with_kvcache(
            q, *exact(scales), k_descale=k_descale, **given
        )  # which has none of FP8
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("module", ["flash_attn", "fa3"])
def test_errors_have_the_caller_s_name_of_the_table(name, module):
    functions = fa if module == "flash_attn" else fa3
    q, pages = torch.randn(2, 1, 4, 32, device=DEVICE), torch.randn(8, 4, 2, 32, device=DEVICE)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2)
    lengths, offsets = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((4, 4), (0, 1, 2)))

    def cache(table, lengths=lengths):
        return functions.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, **{name: table})

    def packed(table, lengths=lengths):
        given = {"cu_seqlens_k": None} if module == "fa3" else {}
        given |= {"cu_seqlens_q": offsets, "max_seqlen_q": 1, "max_seqlen_k": 8, "seqused_k": lengths}
        return functions.flash_attn_varlen_func(q[:, 0], pages, pages, **given, **{name: table})

    for call, of_lengths in ((cache, "cache_seqlens"), (packed, "seqused_k")):
        call(table)
        for wrong in (table.long(), table[:1], table[0]):
            with pytest.raises(flashjit.InvalidArgument, match=f"^{name} is .*: it must be int32"):
                call(wrong)
        if DEVICE == "cpu":
            with pytest.raises(flashjit.InvalidArgument, match=f"^{name} names page 90"):
                call(table + 90)
            with pytest.raises(flashjit.InvalidArgument, match=f"^{of_lengths} has 900 for sequence 0"):
                call(table, lengths + 896)

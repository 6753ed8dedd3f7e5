"""FlashInfer's functions without a plan, over a table of pages and over packed keys, against fp64."""

import math

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from flashjit import flashinfer as fi  # noqa: E402
from test_flashinfer import (  # noqa: E402
    DEVICE,
    DIM,
    HKV,
    HQ,
    KEYS,
    QUERIES,
    Pool,
    check,
    exact,
    indptr,
    ints,
    normal,
    seed,  # noqa: F401
    sequences,
    workspace,
)

SCALE = 0.25


def compare(found, pool, q, rows_of=None, **options):
    """found: O, or O and LSE. options: exact()'s; functions of a sequence's number."""
    found = found if isinstance(found, tuple) else (found,)
    for i, rows in enumerate(rows_of or sequences()):
        own = {name: x(i) if callable(x) else x for name, x in options.items()}
        check([x[rows] for x in found], exact(q[rows], pool.k[i], pool.v[i], **own))


def each(count):
    return [slice(i * count, (i + 1) * count) for i in range(len(KEYS))]


def test_trtllm_decode_takes_a_table_and_both_scales():
    pool, q = Pool("HND"), normal(len(KEYS), HQ, DIM)
    given = (q, pool.cache, workspace(), pool.table(), ints(*KEYS), max(KEYS), SCALE, 2.0)
    out = fi.trtllm_batch_decode_with_kv_cache(*given, window_left=4)
    for i, v in enumerate(pool.v):
        wanted = exact(q[i : i + 1], pool.k[i], 2 * v, scale=SCALE, window=4)[0]
        torch.testing.assert_close(out[i : i + 1].double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    runner = fi.prepare_balanced_batch_decode_with_kv_cache(
        q, pool.cache, pool.table(), ints(*KEYS), workspace(), sm_scale=SCALE
    )
    out = runner()
    compare(out, pool, q, each(1), scale=SCALE)
    assert runner() is out


def test_a_scale_has_one_element_or_one_for_each_head():
    pool, q = Pool("HND"), normal(len(KEYS), HQ, DIM)
    given = (q, pool.cache, workspace(), pool.table(), ints(*KEYS), max(KEYS))
    factors = torch.rand(HKV, device=DEVICE) + 0.5
    out = fi.trtllm_batch_decode_with_kv_cache(*given, SCALE, factors)
    plain = fi.trtllm_batch_decode_with_kv_cache(*given, SCALE)
    torch.testing.assert_close(out, plain * factors.repeat_interleave(HQ // HKV)[:, None])
    for scales in ((SCALE, torch.ones(DIM)), (torch.ones(HKV + 1), 1.0)):
        with pytest.raises(flashjit.InvalidArgument, match="give one element, or one for each of its"):
            fi.trtllm_batch_decode_with_kv_cache(
                *given, *(x.to(DEVICE) if torch.is_tensor(x) else x for x in scales)
            )


@pytest.mark.parametrize("given", ["bfloat16", "float8_e4m3fn"])
def test_rows_of_another_type_than_the_cache_are_refused(given):
    new = normal(1, HKV, DIM).to(getattr(torch, given))
    cache = torch.zeros(1, 2, 4, HKV, DIM, device=DEVICE).to(torch.float8_e5m2)
    where = (ints(0), ints(0))
    pages = (ints(0), ints(0, 1), ints(1))
    with pytest.raises(flashjit.InvalidArgument, match="the cache is torch.float8_e5m2"):
        fi.append_paged_kv_cache(new, new, *where, cache, *pages)
    with pytest.raises(flashjit.InvalidArgument, match="the cache is torch.float8_e5m2"):
        fi.append_paged_mla_kv_cache(
            new[:, 0], new[:, 0], *where, cache[:, 0, :, 0], cache[:, 1, :, 0], *pages
        )


@pytest.mark.parametrize("name", ["custom_mask", "packed_custom_mask"])
def test_a_mask_without_pairs_is_taken(name):
    q, none = normal(2, HQ, DIM), torch.empty(0, HKV, DIM, device=DEVICE)
    mask = torch.empty(0, dtype=torch.bool if name == "custom_mask" else torch.uint8, device=DEVICE)
    out, lse = fi.single_prefill_with_kv_cache(q, none, none, return_lse=True, **{name: mask})
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_of_other_sizes_are_refused(dtype):
    pool, q = Pool("HND"), normal(len(KEYS), HQ, DIM)
    given = (q, pool.cache, workspace(), pool.table(), ints(*KEYS), max(KEYS), SCALE)
    out = torch.empty(2, *q.shape, dtype=dtype, device=DEVICE)
    with pytest.raises(flashjit.InvalidArgument, match="out is .*: it must be"):
        fi.trtllm_batch_decode_with_kv_cache(*given, out=out)
    lse = torch.empty(2, *q.shape[:2], device=DEVICE)
    for wrong in (lse, lse[0].to(torch.float16)):
        with pytest.raises(flashjit.InvalidArgument, match="lse is .*: it must be float32"):
            fi.trtllm_batch_decode_with_kv_cache(*given, lse=wrong)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["trtllm", "xqa_batch", "xqa"])
def test_drafts_see_those_that_their_mask_names(name, packed):
    counts = QUERIES if packed else (3, 3, 3)
    pool, most = Pool("HND"), max(counts)
    ends = torch.tensor(counts).cumsum(0).tolist()
    rows = [slice(end - n, end) for n, end in zip(counts, ends)]
    q = normal(sum(counts), HQ, DIM)
    own = [torch.rand(n, n, device=DEVICE) < 0.5 for n in counts]
    for x in own:
        x.fill_diagonal_(True)
    bits = torch.zeros(sum(counts), 32, dtype=torch.int64, device=DEVICE)
    for x, at in zip(own, rows):
        bits[at, : x.shape[1]] = x.long()
    words = (bits.view(-1, 2, 16) << torch.arange(16, device=DEVICE)).sum(2).to(torch.uint16)
    mask = words if packed else words.view(len(counts), most, 2)
    offsets = indptr(counts) if packed else None
    common = (pool.table(), ints(*KEYS))
    if name == "trtllm":
        given = {"cum_seq_lens_q": offsets, "max_q_len": most if packed else None}
        out = fi.trtllm_batch_decode_with_kv_cache(
            q, pool.cache, workspace(), *common, 9, SCALE, q_len_per_req=most, mask=mask, **given
        )
    elif name == "xqa_batch":
        out = fi.xqa_batch_decode_with_kv_cache(
            q,
            pool.cache,
            workspace(),
            *common,
            9,
            SCALE,
            kv_layout="HND",
            q_len_per_req=most,
            mask=mask,
            q_cu_seq_lens=offsets,
        )
    else:
        out = torch.empty_like(q)
        shape = q.shape if packed else (len(counts), 1, most, HQ, DIM)
        table, lengths = common[0].view(torch.uint32), common[1].view(torch.uint32)[:, None]
        given = (q.view(shape), *pool.cache.unbind(1), table, lengths, out.view(shape))
        fi.xqa(
            *given,
            workspace(),
            workspace(),
            HKV,
            4,
            q_scale=SCALE * DIM**0.5,
            kv_layout="HND",
            q_seq_len=most,
            mask=mask,
            q_cu_seq_lens=offsets,
        )

    def seen(i):
        before = torch.ones(counts[i], KEYS[i] - counts[i], dtype=torch.bool, device=DEVICE)
        return torch.cat((before, own[i]), 1)

    compare(out, pool, q, rows, scale=SCALE, seen=seen)


def test_xqa_decodes_within_a_window_beside_sinks():
    pool, q, sinks = Pool(together=False), normal(len(KEYS), 1, HQ, DIM), normal(HKV, HQ // HKV)
    codes = tuple(x.to(torch.float8_e4m3fn) for x in pool.cache)
    for x, code in ((pool.k, codes[0]), (pool.v, codes[1])):
        for i in range(len(KEYS)):
            pages = pool.table()[i, : -(-KEYS[i] // 4)].long()
            x[i] = code[pages].float().flatten(0, 1)[: KEYS[i]] * 0.5
    for scales in ((2.0, 0.5), (torch.tensor(2.0, device=DEVICE), torch.tensor([0.5], device=DEVICE))):
        out = torch.empty_like(q)
        given = (pool.table(), ints(*KEYS)[:, None], out, workspace(), workspace(), HKV, 4)
        fi.xqa(q, *codes, *given, sinks, *scales, sliding_win_size=3)
        compare(out[:, 0], pool, q[:, 0], each(1), scale=2 * DIM**-0.5, window=2, sinks=sinks.reshape(-1))


@pytest.mark.parametrize("world, rank", [(2, 0), (2, 1), (4, 3)])
def test_a_rank_s_part_of_the_keys(world, rank):
    counts = [len(range(rank, n, world)) for n in KEYS]
    pool, q = Pool("HND", keys=counts), normal(2 * len(KEYS), HQ, DIM)
    before = ints(*[n - 2 for n in KEYS])
    given = (q, pool.cache, workspace(), pool.table(), ints(*counts), 9, SCALE)
    shard = {"cp_world": world, "cp_rank": rank, "causal_seqlens_kv_global": before}
    out, lse = fi.trtllm_batch_decode_with_kv_cache(*given, q_len_per_req=2, return_lse=True, **shard)
    for i, rows in enumerate(each(2)):
        key = torch.arange(counts[i]) * world + rank
        seen = key <= (KEYS[i] - 2 + torch.arange(2))[:, None]
        check((out[rows], lse[rows]), exact(q[rows], pool.k[i], pool.v[i], scale=SCALE, seen=seen))
    with pytest.raises(flashjit.Unsupported, match="window_left is 3 with causal_seqlens_kv_global"):
        fi.trtllm_batch_decode_with_kv_cache(*given, q_len_per_req=2, window_left=3, **shard)


@pytest.mark.parametrize("causal", [True, False])
def test_trtllm_context_over_pages(causal):
    pool, q, sinks = Pool(), normal(sum(QUERIES), HQ, DIM), normal(HQ)
    given = (q, pool.cache, workspace(), pool.table(), ints(*KEYS), 5, 9, SCALE, 1.0, 3)
    given += (indptr(QUERIES), indptr(KEYS))
    found = fi.trtllm_batch_context_with_kv_cache(
        *given,
        kv_layout="NHD",
        causal=causal,
        sinks=[sinks],
        window_left=2,
        window_right=0 if causal else 1,
        return_lse=True,
    )

    def seen(i):
        at = torch.arange(QUERIES[i])[:, None] + KEYS[i] - QUERIES[i]
        return torch.arange(KEYS[i]) <= at + (0 if causal else 1)

    compare(found, pool, q, scale=SCALE, sinks=sinks, window=2, seen=seen)


def test_trtllm_context_of_a_window_for_each_query():
    pool, q = Pool("HND"), normal(sum(QUERIES), HQ, DIM)
    starts, ends = ints(0, 1, 5, 2, 0, 0, 1, 2, 4), ints(3, 4, 8, 3, 0, 1, 2, 4, 4)
    given = (q, pool.cache, workspace(), pool.table(), ints(*KEYS), 5, 9, SCALE, 1.0, 3)
    given += (indptr(QUERIES), indptr(KEYS))
    windows = {"variable_window_token_starts": starts, "variable_window_token_ends": ends}
    found = fi.trtllm_batch_context_with_kv_cache(*given, return_lse=True, **windows)

    def seen(i):
        rows, key = list(sequences())[i], torch.arange(KEYS[i], device=DEVICE)
        return (key >= starts[rows, None]) & (key <= ends[rows, None])

    compare(found, pool, q, scale=SCALE, seen=seen)


def test_cudnn_decode_over_pages():
    pool, q, sinks = Pool("HND", together=False), normal(2 * len(KEYS), HQ, DIM), normal(HQ)
    named = {"actual_seq_lens_kv": ints(*KEYS).view(-1, 1, 1, 1), "block_tables": pool.table()}
    given = (q, *pool.cache, SCALE, workspace())
    options = {"q_len_per_req": 2, "window_left": 3, "sinks": sinks, "return_lse": True}
    found = fi.cudnn_batch_decode_with_kv_cache(*given, max_sequence_kv=9, **named, **options)
    compare(found, pool, q, each(2), scale=SCALE, causal=True, window=3, sinks=sinks)
    with pytest.raises(ValueError, match="give both, as K and V are in pages"):
        fi.cudnn_batch_decode_with_kv_cache(*given, max_sequence_kv=9)


@pytest.mark.parametrize("units", ["elements", "tokens", "lengths"])
@pytest.mark.parametrize("paged", [True, False])
def test_cudnn_prefill_over_pages_and_packed_keys(paged, units):
    pool, q = Pool("HND", together=False), normal(sum(QUERIES), HQ, DIM)
    named = {"actual_seq_lens_kv": ints(*KEYS).view(-1, 1, 1, 1), "block_tables": pool.table()}
    cache = pool.cache
    if not paged:
        cache = torch.cat(pool.k), torch.cat(pool.v)
        named = {"batch_offsets_k": indptr(KEYS) * (HKV * DIM if units == "elements" else 1)}
    if units == "lengths":
        named["actual_seq_lens_q"] = ints(*QUERIES).view(-1, 1, 1, 1)
    else:
        named["batch_offsets_q"] = indptr(QUERIES) * (HQ * DIM if units == "elements" else 1)
    if units != "elements":
        named["batch_offsets_units"] = "tokens"
    common = (q, *cache, SCALE, workspace())
    sizes = {"max_token_per_sequence": 5, "max_sequence_kv": 9, "causal": True}
    out, lse = fi.cudnn_batch_prefill_with_kv_cache(
        *common, **sizes, **named, return_lse=True, lse_base="ln", k_scale=0.5
    )
    compare((out, lse / math.log(2)), pool, q, scale=SCALE * 0.5, causal=True)
    out, lse = fi.cudnn_batch_prefill_with_kv_cache(*common, **sizes, **named, return_lse=False)
    assert lse is None
    compare(out, pool, q, scale=SCALE, causal=True)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_keys_without_a_plan(causal):
    pool, q, sinks = Pool(), normal(sum(QUERIES), HQ, DIM), normal(HQ)
    k, v = torch.cat(pool.k), torch.cat(pool.v)
    offsets = indptr(QUERIES), indptr(KEYS)
    out, lse = fi.fmha_varlen(q, k, v, *offsets, causal=causal, sm_scale=SCALE, return_lse=True)
    compare((out, lse), pool, q, scale=SCALE, causal=causal)
    out, lse = fi.fmha_varlen(q, k, v, *offsets, causal=causal, sm_scale=SCALE)
    assert lse is None
    given = (q, k, v, workspace(), ints(*KEYS), 5, 9, SCALE, 1.0, 1.0, 3, 2, *offsets, None, causal, True)
    found = fi.trtllm_ragged_attention_deepseek(*given, attention_sinks=sinks)
    compare(found, pool, q, scale=SCALE, causal=causal, window=2, sinks=sinks)


LAYOUTS = ("CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD")
MODES = {
    "causal": {},
    "padding": {},
    "sliding_window": {"window_left": 2},
    "chunked": {"chunked_attention_size": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fmha_v2_of_each_layout_and_mask(layout, mode):
    pool, q, sinks = Pool(layout[-3:] if "PAGED" in layout else "NHD"), normal(9, HQ, DIM), normal(HQ)
    k, v = torch.cat(pool.k), torch.cat(pool.v)
    kv = (pool.cache,) if "PAGED" in layout else (k, v)
    kv = (torch.stack((k, v), 1),) if layout == "CONTIGUOUS_Q_KV" else kv
    offsets, lengths = (indptr(QUERIES), indptr(KEYS)), ints(*KEYS)
    given = (workspace(), lengths, 5, 9, SCALE, 1.0, 3, *offsets, pool.table())
    out = fi.trtllm_fmha_v2_prefill(
        (q, *kv), layout, *given, sinks=[sinks], mask_mode=mode, logits_soft_cap_scale=3.0, **MODES[mode]
    )

    def seen(i):
        at = torch.arange(QUERIES[i])[:, None] + KEYS[i] - QUERIES[i]
        return (torch.arange(KEYS[i]) >= at // 4 * 4) | (mode != "chunked")

    window = 2 if mode == "sliding_window" else -1
    compare(
        out, pool, q, scale=SCALE, cap=3.0, sinks=sinks, causal=mode != "padding", window=window, seen=seen
    )


def test_fmha_v2_of_one_tensor_and_what_it_refuses():
    qkv, offsets = normal(6, 3, HQ, DIM), indptr((2, 4))
    given = (workspace(), ints(2, 4), 4, 4, SCALE, 1.0, 2, offsets, offsets)
    out = fi.trtllm_fmha_v2_prefill(qkv, "PACKED_QKV", *given)
    for rows in (slice(0, 2), slice(2, 6)):
        wanted = exact(*qkv[rows].unbind(1), scale=SCALE, causal=True)
        check((out[rows],), wanted)
    with pytest.raises(flashjit.Unsupported, match="save_softmax_stats is given"):
        fi.trtllm_fmha_v2_prefill(qkv, "PACKED_QKV", *given, save_softmax_stats=True)
    with pytest.raises(ValueError, match="input_layout is 'QKV': give PACKED_QKV, CONTIGUOUS_Q_KV"):
        fi.trtllm_fmha_v2_prefill(qkv, "QKV", *given)
    with pytest.raises(TypeError, match="with SEPARATE_Q_K_V give 3 tensors"):
        fi.trtllm_fmha_v2_prefill((qkv, qkv), "SEPARATE_Q_K_V", *given)


def test_a_mask_of_drafts_that_does_not_fit_is_refused():
    pool, q = Pool("HND"), normal(9 * len(KEYS), HQ, DIM)
    given = (q, pool.cache, workspace(), pool.table(), ints(*KEYS), 9, SCALE)
    short = torch.zeros(3, 9, 1, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="mask has 8 bits in a row, but sequences have up to 9 queries"):
        fi.trtllm_batch_decode_with_kv_cache(*given, q_len_per_req=9, mask=short)
    with pytest.raises(ValueError, match="query has 27 rows, but seq_lens is of 3 sequences"):
        fi.trtllm_batch_decode_with_kv_cache(*given, q_len_per_req=2)


def test_names_that_are_absent_say_why():
    assert not hasattr(fi, "sm110_gqa_decode")
    with pytest.raises(AttributeError, match="has no sm110_gqa_decode: it prepares tensors for one kernel"):
        fi.sm110_gqa_decode  # noqa: B018
    with pytest.raises(AttributeError, match="has no rmsnorm: what is not attention stays FlashInfer's"):
        fi.rmsnorm  # noqa: B018
    assert not set(fi._absent.ABSENT) & set(fi.__all__)

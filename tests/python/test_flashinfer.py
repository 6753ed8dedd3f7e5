"""flashjit.flashinfer: FlashInfer's names, against a softmax in fp64, LSE of base 2."""

import math

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
from flashjit import flashinfer as fi  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HQ, HKV, DIM, PAGE = 4, 2, 32, 4
QUERIES, KEYS = (3, 1, 5), (9, 4, 5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def indptr(sizes):
    return ints(0, *torch.tensor(sizes).cumsum(0).tolist())


def normal(*size):
    return torch.randn(*size, device=DEVICE)


def exact(*args, **named):
    """O and LSE of base 2."""
    out, lse = exact_attention.exact(*args, **named)
    return out, lse / math.log(2)


class Pool:
    """Sequences of KEYS keys in pages, scattered, NaN where no key is."""

    def __init__(self, layout="NHD", together=True, keys=KEYS):
        self.layout, self.keys = layout, keys
        self.k, self.v = ([normal(n, HKV, DIM) for n in keys] for _ in range(2))
        counts = [(n + PAGE - 1) // PAGE for n in keys]
        self.indptr = indptr(counts)
        self.indices = torch.randperm(sum(counts) + 2, device=DEVICE)[: sum(counts)].int()
        self.last = ints(*[n - (c - 1) * PAGE for n, c in zip(keys, counts)])
        pool = torch.full((sum(counts) + 2, 2, PAGE, HKV, DIM), math.nan, device=DEVICE)
        for i, n in enumerate(keys):
            for row in range(n):
                page = self.indices[self.indptr[i] + row // PAGE]
                pool[page, 0, row % PAGE], pool[page, 1, row % PAGE] = self.k[i][row], self.v[i][row]
        pool = pool if layout == "NHD" else pool.transpose(2, 3).contiguous()
        self.cache = pool if together else (pool[:, 0], pool[:, 1])

    def plan(self):
        return self.indptr, self.indices, self.last

    def table(self):
        """Pages of each sequence in a row; unused entries are -1."""
        own = [self.indices[a:b] for a, b in zip(self.indptr[:-1], self.indptr[1:])]
        return torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=-1).int()


def planned(wrapper, first, *rest, **named):
    wrapper.plan(*first, *rest, q_data_type="float32", **named)
    return wrapper


def workspace():
    return torch.empty(16, dtype=torch.uint8, device=DEVICE)


def check(found, wanted):
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x.double().cpu(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("together", [True, False])
def test_decode_over_pages(layout, together):
    pool = Pool(layout, together)
    q = normal(len(KEYS), HQ, DIM)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE, window_left=3, logits_soft_cap=2.0)
    out, lse = wrapper.run(q, pool.cache, return_lse=True)
    for i in range(len(KEYS)):
        check((out[i : i + 1], lse[i : i + 1]), exact(q[i : i + 1], pool.k[i], pool.v[i], window=3, cap=2.0))


def test_decode_of_several_queries_is_causal():
    pool = Pool()
    q = normal(2 * len(KEYS), HQ, DIM)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE, q_len_per_req=2)
    out, lse = wrapper.run(q, pool.cache, return_lse=True)
    for i in range(len(KEYS)):
        rows = slice(2 * i, 2 * i + 2)
        check((out[rows], lse[rows]), exact(q[rows], pool.k[i], pool.v[i], causal=True))


def test_prefill_over_pages_writes_into_the_callers_memory():
    pool = Pool()
    q, sinks = normal(sum(QUERIES), HQ, DIM), normal(HQ)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    planned(wrapper, (indptr(QUERIES), *pool.plan()), HQ, HKV, DIM, PAGE, causal=True, sm_scale=0.3)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
    found = wrapper.run(q, pool.cache, out=out, lse=lse, return_lse=True, sinks=sinks)
    assert found[0] is out and found[1] is lse
    out.zero_(), lse.zero_()
    assert wrapper.run(q, pool.cache, out=out, lse=lse, sinks=sinks) is out  # both are written
    for i, rows in enumerate(sequences()):
        wanted = exact(q[rows], pool.k[i], pool.v[i], scale=0.3, causal=True, sinks=sinks)
        check((out[rows], lse[rows]), wanted)


def sequences():
    ends = torch.tensor(QUERIES).cumsum(0).tolist()
    return [slice(end - n, end) for n, end in zip(QUERIES, ends)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_custom_masks_of_each_sequence(packed, paged):
    pool = Pool()
    q = normal(sum(QUERIES), HQ, DIM)
    masks = [torch.rand(n, m, device=DEVICE) < 0.6 for n, m in zip(QUERIES, KEYS)]
    given = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    if packed:
        given = {"packed_custom_mask": torch.cat([bits(mask.flatten()) for mask in masks])}
    if paged:
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
        planned(wrapper, (indptr(QUERIES), *pool.plan()), HQ, HKV, DIM, PAGE, causal=True, **given)
        out, lse = wrapper.run(q, pool.cache, return_lse=True)
    else:
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        planned(wrapper, (indptr(QUERIES), indptr(KEYS)), HQ, HKV, DIM, **given)
        out, lse = wrapper.run(q, torch.cat(pool.k), torch.cat(pool.v), return_lse=True)
    for i, rows in enumerate(sequences()):
        check((out[rows], lse[rows]), exact(q[rows], pool.k[i], pool.v[i], seen=masks[i]))


def bits(mask):
    padded = torch.nn.functional.pad(mask.int(), (0, -len(mask) % 8)).view(-1, 8)
    return (padded << torch.arange(8, device=mask.device)).sum(1).to(torch.uint8)


def test_a_mask_that_is_too_short_is_refused_when_it_is_planned():
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    with pytest.raises(flashjit.InvalidArgument, match="custom_mask is .* must have 56 elements"):
        planned(
            wrapper, (indptr(QUERIES), indptr(KEYS)), HQ, HKV, DIM, custom_mask=torch.ones(9, device=DEVICE)
        )


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_counts_from_the_first_query(heads):
    q, k, v = normal(3, heads, DIM), normal(7, heads, DIM), normal(7, heads, DIM)
    slopes = torch.tensor([2 ** (-2 * i) for i in range(1, 5)] + [2 ** (-i) for i in (1, 3)][: heads - 4])
    found = fi.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI", return_lse=True)
    check(found, exact(q, k, v, slopes=slopes))
    out, lse = fi.single_decode_with_kv_cache(q[0], k, v, pos_encoding_mode="ALIBI", return_lse=True)
    check((out[None], lse[None]), exact(q[:1], k, v, slopes=slopes))


def test_scales_of_heads_of_fp8():
    q, k, v = (normal(n, h, DIM).to(torch.float8_e4m3fn) for n, h in ((4, HQ), (6, HKV), (6, HKV)))
    scales = [torch.rand(h, device=DEVICE) + 0.5 for h in (HQ, HKV, HKV)]
    wide = [x.double() * scale[:, None] for x, scale in zip((q, k, v), scales)]
    found = fi.single_prefill_with_kv_cache(q, k, v, *scales, o_dtype=torch.float32, return_lse=True)
    out, lse = exact(*wide)
    torch.testing.assert_close(found[0].double().cpu(), out, rtol=0.1, atol=0.1)
    torch.testing.assert_close(found[1].double().cpu(), lse, rtol=0.05, atol=0.05)


def test_a_cache_of_fp8_with_numbers_as_scales():
    q, k, v = normal(HQ, DIM).half(), *(normal(6, HKV, DIM).to(torch.float8_e4m3fn) for _ in range(2))
    out = fi.single_decode_with_kv_cache(q, k, v, k_scale=0.5, v_scale=3.0)
    wanted, _ = exact(q[None], 0.5 * k.double(), 3 * v.double())
    torch.testing.assert_close(out[None].double().cpu(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("count", [2, 8, 11])
def test_merged_states_are_attention_over_all_keys(count):
    q, k, v = normal(5, HQ, DIM), normal(4 * count, HKV, DIM), normal(4 * count, HKV, DIM)
    parts = [
        fi.single_prefill_with_kv_cache(q, a, b, return_lse=True)
        for a, b in zip(k.chunk(count), v.chunk(count))
    ]
    outs, lses = torch.stack([o for o, _ in parts], 1), torch.stack([lse for _, lse in parts], 1)
    check(fi.merge_states(outs, lses), exact(q, k, v))
    out, lse = (x.clone() for x in parts[0])
    for part in parts[1:]:
        fi.merge_state_in_place(out, lse, *part)
    check((out, lse), exact(q, k, v))
    rows = torch.tensor([1, 0, 1, 0, 0], dtype=torch.bool, device=DEVICE)
    out, lse = (x.clone() for x in parts[0])
    fi.merge_state_in_place(out, lse, *parts[1], mask=rows)
    check(
        (out[rows], lse[rows]), [x.double().cpu()[rows.cpu()] for x in fi.merge_state(*parts[0], *parts[1])]
    )
    assert torch.equal(out[~rows], parts[0][0][~rows])


def test_append_stores_the_last_rows_of_each_sequence():
    pool = Pool()
    unwritten = pool.cache.clone()
    new = (2, 1, 3)
    lengths = fi.get_seq_lens(pool.indptr, pool.last, PAGE)
    assert lengths.tolist() == list(KEYS)
    batch, positions = fi.get_batch_indices_positions(indptr(new), lengths, sum(new))
    assert batch.tolist() == [0, 0, 1, 2, 2, 2] and positions.tolist() == [7, 8, 3, 2, 3, 4]
    k, v = normal(sum(new), HKV, DIM), normal(sum(new), HKV, DIM)
    fi.append_paged_kv_cache(k, v, batch, positions, pool.cache, pool.indices, pool.indptr, pool.last)
    for row, (b, at) in enumerate(zip(batch.tolist(), positions.tolist())):
        page = pool.indices[pool.indptr[b] + at // PAGE]
        assert torch.equal(pool.cache[page, 0, at % PAGE], k[row])
        assert torch.equal(pool.cache[page, 1, at % PAGE], v[row])
        pool.cache[page, :, at % PAGE] = unwritten[page, :, at % PAGE] = 0
    assert torch.equal(pool.cache.nan_to_num(7), unwritten.nan_to_num(7))


def test_append_of_fp8_keeps_every_bit():
    codes = torch.arange(2 * HKV * DIM, dtype=torch.int32, device=DEVICE).to(torch.uint8).view(2, HKV, DIM)
    new = codes.view(torch.float8_e4m3fn)  # NaN among them
    cache = torch.zeros(3, 2, PAGE, HKV, DIM, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    fi.append_paged_kv_cache(new, new, ints(0, 0), ints(3, 4), cache, ints(2, 0), ints(0, 2), ints(1))
    assert torch.equal(cache.view(torch.uint8)[2, 0, 3], codes[0])
    assert torch.equal(cache.view(torch.uint8)[0, 1, 0], codes[1])


@pytest.mark.parametrize("block", [(16, 32), (4, 8)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_as_a_bsr_matrix(block, masked, causal):
    rows, keys = block
    m, n = 3 * rows, 4 * keys
    blocks = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 1]], dtype=torch.bool, device=DEVICE)
    given = {"mask": torch.rand(7, rows, keys, device=DEVICE) < 0.7} if masked else {}
    wrapper = fi.BlockSparseAttentionWrapper(workspace())
    columns = blocks.nonzero()[:, 1].int()
    sizes = (m, n, rows, keys, HQ, HKV, DIM)
    planned(wrapper, (indptr((2, 2, 3)), columns), *sizes, causal=causal, **given)
    q, k, v = normal(m, HQ, DIM), normal(n, HKV, DIM), normal(n, HKV, DIM)
    seen = torch.zeros(3, 4, rows, keys, dtype=torch.bool, device=DEVICE)
    seen[blocks] = given.get("mask", True)
    seen = seen.transpose(1, 2).reshape(m, n)
    found = wrapper.run(q, k, v, return_lse=True)
    check(found, exact(q, k, v, causal=causal, seen=seen))
    if not masked:
        planned(wrapper, (None, None), *sizes, causal=causal, block_mask=blocks)
        check(wrapper.run(q, k, v, return_lse=True), [x.double().cpu() for x in found])
    with pytest.raises(flashjit.InvalidArgument, match="must be multiples of R"):
        planned(wrapper, (None, None), m + 1, *sizes[1:], block_mask=blocks)


def test_levels_of_a_cascade_join():
    shared, own = Pool(keys=(8,)), Pool()
    total = len(shared.indices) + 2
    cache = torch.cat((shared.cache, own.cache))
    q = normal(sum(QUERIES), HQ, DIM)
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, workspace())
    wrapper.plan(
        [ints(0, sum(QUERIES)), indptr(QUERIES)],
        [shared.indptr, own.indptr],
        [shared.indices, own.indices + total],
        [shared.last, own.last],
        HQ,
        HKV,
        DIM,
        PAGE,
        causal=True,
        q_data_type=torch.float32,
    )
    out = wrapper.run(q, cache)
    for i, rows in enumerate(sequences()):
        k, v = torch.cat((shared.k[0], own.k[i])), torch.cat((shared.v[0], own.v[i]))
        torch.testing.assert_close(
            out[rows].double().cpu(), exact(q[rows], k, v, causal=True)[0], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("joined", [True, False])
def test_latent_attention_of_two_caches(joined):
    heads, rank, rope = 3, 64, 16
    pages = normal(4, PAGE, rank + rope)
    ckv, kpe = pages[..., :rank], pages[..., rank:]
    if not joined:
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(
        ints(0, 2, 3),
        ints(0, 2, 3, 3),
        ints(3, 1, 0),
        ints(7, 2),
        heads,
        rank,
        rope,
        PAGE,
        True,
        0.2,
        torch.float32,
        torch.float32,
    )
    q = normal(3, heads, rank + rope)
    out, lse = wrapper.run(q[..., :rank], q[..., rank:], ckv, kpe, return_lse=True)
    for rows, keys in ((slice(0, 2), torch.cat((pages[3], pages[1]))[:7]), (slice(2, 3), pages[0, :2])):
        check(
            (out[rows], lse[rows]),
            exact(q[rows], keys[:, None], keys[:, None, :rank], scale=0.2, causal=True),
        )


def test_latent_attention_without_a_rotated_part():
    heads, rank = 3, 64
    pages = normal(4, PAGE, rank)
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    places = ints(0, 2, 3), ints(0, 2, 3), ints(3, 1, 0), ints(7, 2)
    wrapper.plan(*places, heads, rank, 0, PAGE, True, 0.2, torch.float32, torch.float32)
    q = normal(3, heads, rank)
    out, lse = wrapper.run(q, q[..., :0], pages, pages[..., :0].contiguous(), return_lse=True)
    for rows, keys in ((slice(0, 2), torch.cat((pages[3], pages[1]))[:7]), (slice(2, 3), pages[0, :2])):
        keys = keys[:, None]
        check((out[rows], lse[rows]), exact(q[rows], keys, keys, scale=0.2, causal=True))


@pytest.mark.parametrize("kpe_scale", [0.5, 0.125])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_latents_of_eight_bits(dtype, kpe_scale):
    heads, rank, rope = 3, 64, 16
    codes = normal(4, PAGE, rank + rope).to(dtype)
    pages = codes.float() * 0.5
    pages[..., rank:] *= kpe_scale / 0.5
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    places = ints(0, 2, 3), ints(0, 2, 3), ints(3, 1, 0), ints(7, 2)
    wrapper.plan(*places, heads, rank, rope, PAGE, True, 0.2, torch.float32, dtype)
    q = normal(3, heads, rank + rope)
    given = (q[..., :rank].contiguous(), q[..., rank:].contiguous(), codes[..., :rank], codes[..., rank:])
    out, lse = wrapper.run(*given, return_lse=True, ckv_scale=0.5, kpe_scale=kpe_scale)
    for rows, keys in ((slice(0, 2), torch.cat((pages[3], pages[1]))[:7]), (slice(2, 3), pages[0, :2])):
        keys = keys[:, None]
        check((out[rows], lse[rows]), exact(q[rows], keys, keys[..., :rank], scale=0.2, causal=True))
    for wrong in ({"ckv_scale": 0.5}, {"ckv_scale": 0.5, "kpe_scale": 0.0}):
        with pytest.raises(
            ValueError, match="kpe_scale is .*: with caches of 8 bits give a finite number above 0"
        ):
            wrapper.run(*given, **wrong)
    with pytest.raises(
        ValueError, match="Exactly one of ckv_scale or ckv_scale_arr is needed.*: neither is given"
    ):
        wrapper.run(*given)
    with pytest.raises(ValueError, match="q_pe.dtype is torch.float16, but plan.. was given torch.float32"):
        wrapper.run(given[0], given[1].half(), *given[2:], ckv_scale=0.5, kpe_scale=0.5)


def test_a_plan_s_tensors_may_be_on_the_host_and_on_the_device():
    pool = Pool()
    q, found = normal(len(KEYS), HQ, DIM), []
    for on_host in ((), (0,), (1,), (2,), (0, 1, 2)):
        places = [x.cpu() if i in on_host else x for i, x in enumerate(pool.plan())]
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
        found.append(planned(wrapper, places, HQ, HKV, DIM, PAGE).run(q, pool.cache))
    assert all(torch.equal(found[0], x) for x in found)


def test_a_captured_graph_finds_a_new_plan_in_the_same_memory():
    pool = Pool()
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, paged_kv_indices_buffer=torch.empty(6, device=DEVICE)
    )
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE)
    before = [x.data_ptr() for x in wrapper._pages]
    planned(wrapper, (pool.indptr, pool.indices.flip(0), pool.last), HQ, HKV, DIM, PAGE)
    assert [x.data_ptr() for x in wrapper._pages] == before
    with pytest.raises(flashjit.InvalidArgument, match="a wrapper for each batch size"):
        planned(wrapper, (ints(0, 1), pool.indices, ints(2)), HQ, HKV, DIM, PAGE)


def rotated(x, start, scale, theta):
    """Rows [rows, heads, d], the first one at position `start`, rotated by halves, in fp64."""
    dim = x.shape[2]
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim) / scale
    angle = torch.cat([(torch.arange(len(x)) + start)[:, None, None] * freq] * 2, -1)
    a, b = x.double().cpu().chunk(2, -1)
    return (x.double().cpu() * angle.cos() + torch.cat([-b, a], -1) * angle.sin()).to(x.device)


@pytest.mark.parametrize(
    "named, scale, theta", [({}, 1.0, 1e4), ({"rope_scale": 2.0, "rope_theta": 500.0}, 2.0, 500.0)]
)
def test_q_and_k_are_rotated_where_k_is_a_tensor(named, scale, theta):
    options = {"pos_encoding_mode": "ROPE_LLAMA", **named}
    k, v = ([normal(n, HKV, DIM) for n in KEYS] for _ in range(2))
    q = [normal(n, HQ, DIM) for n in QUERIES]
    wanted = [
        exact(
            rotated(a, len(b) - len(a), scale, theta),
            rotated(b, 0, scale, theta),
            c,
            scale=DIM**-0.5,
            causal=True,
        )
        for a, b, c in zip(q, k, v)
    ]
    for a, b, c, right in zip(q, k, v, wanted):
        check(fi.single_prefill_with_kv_cache(a, b, c, causal=True, return_lse=True, **options), right)
    one = fi.single_decode_with_kv_cache(q[1][0], k[1], v[1], return_lse=True, **options)
    check(one, [x[0] for x in wanted[1]])
    capped = fi.single_prefill_with_kv_cache(
        q[0], k[0], v[0], causal=True, logits_soft_cap=5.0, window_left=4, **options
    )
    plain = fi.single_prefill_with_kv_cache(
        *(rotated(x, at, scale, theta).to(x.dtype) for x, at in ((q[0], len(k[0]) - len(q[0])), (k[0], 0))),
        *(v[0],),
        causal=True,
        logits_soft_cap=5.0,
        window_left=4,
    )
    torch.testing.assert_close(capped, plain, rtol=1e-4, atol=1e-4)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    planned(wrapper, (indptr(QUERIES), indptr(KEYS)), HQ, HKV, DIM, causal=True, **options)
    found = wrapper.run(torch.cat(q), torch.cat(k), torch.cat(v), return_lse=True)
    check(found, [torch.cat(x) for x in zip(*wanted)])


def seen_of_items(queries, keys, prefix, places):
    """Which keys a query sees: the prefix, and before it its own item's."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        at = i + keys - queries
        for key in range(at + 1):
            seen[i, key] = at < prefix or key < prefix or key > at - places[at - prefix]
    return seen


@pytest.mark.parametrize("ragged", [False, True])
def test_items_do_not_see_each_other(ragged):
    """Multi-item scoring: a delimiter, which has place 0, and the items behind the prefix."""
    keys, queries, prefix = (13, 9), (10, 9), (4, 3)
    places = [[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 0]]
    padded = torch.zeros(2, 12, dtype=torch.int32)
    for row, own in zip(padded, places):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    given = {
        "prefix_len_ptr": torch.tensor(prefix, device=DEVICE).to(torch.uint32),
        "token_pos_in_items_ptr": padded.reshape(-1).to(torch.uint16).to(DEVICE),
        "token_pos_in_items_len": 12,
        "max_item_len_ptr": torch.tensor([3, 2], device=DEVICE).to(torch.uint16),
    }
    pool = Pool(keys=keys)
    q = [normal(n, HQ, DIM) for n in queries]
    alone = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    of_one = Pool(keys=keys[:1])
    number = {
        "prefix_len_ptr": given["prefix_len_ptr"][0],
        "token_pos_in_items_ptr": given["token_pos_in_items_ptr"][:9],
    }
    planned(alone, (indptr(queries[:1]), *of_one.plan()), HQ, HKV, DIM, PAGE, causal=True, **number)
    seen = seen_of_items(queries[0], keys[0], prefix[0], places[0])
    check(
        alone.run(q[0], of_one.cache, return_lse=True),
        exact(q[0], of_one.k[0], of_one.v[0], scale=DIM**-0.5, seen=seen),
    )
    if ragged:
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        planned(wrapper, (indptr(queries), indptr(keys)), HQ, HKV, DIM, causal=True, **given)
        found = wrapper.run(torch.cat(q), torch.cat(pool.k), torch.cat(pool.v), return_lse=True)
    else:
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
        planned(wrapper, (indptr(queries), *pool.plan()), HQ, HKV, DIM, PAGE, causal=True, **given)
        found = wrapper.run(torch.cat(q), pool.cache, return_lse=True)
    wanted = [
        exact(
            q[i],
            pool.k[i],
            pool.v[i],
            scale=DIM**-0.5,
            seen=seen_of_items(queries[i], keys[i], prefix[i], places[i]),
        )
        for i in range(2)
    ]
    # A delimiter sees the prefix, as in FlashInfer.
    check(found, [torch.cat(x) for x in zip(*wanted)])
    with pytest.raises(flashjit.InvalidArgument, match="give a number for each of the 2 sequences"):
        short = {**given, "prefix_len_ptr": given["prefix_len_ptr"][:1]}
        planned(
            wrapper,
            (indptr(queries), *(pool.plan() if not ragged else [indptr(keys)])),
            HQ,
            HKV,
            DIM,
            *([PAGE] * (not ragged)),
            **short,
        )


@pytest.mark.parametrize(
    "given, why",
    [
        ({"kv_data_type": torch.uint8}, "NVFP4"),
        ({"kv_data_type": torch.bfloat16}, "give one type"),
        ({"o_data_type": torch.float8_e4m3fn}, "o_data_type is"),
    ],
)
def test_what_cannot_be_served_is_refused_when_it_is_planned(given, why):
    pool = Pool()
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    with pytest.raises(flashjit.Unsupported, match=why):
        planned(wrapper, (indptr(QUERIES), *pool.plan()), HQ, HKV, DIM, PAGE, **given)


def test_calls_that_do_not_fit_their_plan_are_refused():
    pool = Pool()
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    with pytest.raises(flashjit.InvalidArgument, match="before plan"):
        wrapper.run(normal(3, HQ, DIM), pool.cache)
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE)
    with pytest.raises(
        flashjit.InvalidArgument, match="q has 2 rows, but plan.. was given 3, q_len_per_req 1"
    ):
        wrapper.run(normal(2, HQ, DIM), pool.cache)
    with pytest.raises(flashjit.InvalidArgument, match="q_len_per_req is 2, but plan.. was given 1"):
        wrapper.run(normal(3, HQ, DIM), pool.cache, q_len_per_req=2)
    with pytest.raises(flashjit.InvalidArgument, match="q is torch.float16 and K torch.float32"):
        wrapper.run(normal(3, HQ, DIM).half(), pool.cache)
    with pytest.raises(flashjit.InvalidArgument, match="kv_layout is 'HDN'"):
        fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HDN")
    with pytest.raises(flashjit.Unsupported, match="jit_args is given"):
        fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), jit_args=["a"])


@pytest.mark.parametrize(
    "given, why",
    [
        ((HQ * 2, HKV, DIM, PAGE), "its num_qo_heads is 4, but plan.. was given 8"),
        ((HQ, 1, DIM, PAGE), "its num_kv_heads is 2, but plan.. was given 1"),
        ((HQ, HKV, DIM * 2, PAGE), "its head_dim is 32, but plan.. was given 64"),
        ((HQ, HKV, DIM, PAGE * 2), "its page_size is 4, but plan.. was given 8"),
    ],
)
def test_tensors_of_other_sizes_than_the_plan_s_are_refused(given, why):
    pool = Pool()
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    planned(decode, pool.plan(), *given)
    planned(prefill, (indptr(QUERIES), *pool.plan()), *given)
    for wrapper, rows in ((decode, 3), (prefill, sum(QUERIES))):
        with pytest.raises(flashjit.InvalidArgument, match=why):
            wrapper.run(normal(rows, HQ, DIM), pool.cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_other_layout_s_cache_is_refused(layout):
    pool = Pool(layout)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND" if layout == "NHD" else "NHD")
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE)
    with pytest.raises(flashjit.InvalidArgument, match="its num_kv_heads is 4, but plan.. was given 2"):
        wrapper.run(normal(3, HQ, DIM), pool.cache)


def test_arguments_of_wrong_kinds_are_refused_in_words():
    pool, q = Pool(), normal(3, HQ, DIM)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    latent = fi.BatchMLAPagedAttentionWrapper(workspace())
    cascade = fi.MultiLevelCascadeAttentionWrapper(2, workspace())
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE)
    offsets = indptr(QUERIES)
    for call, why in (
        (lambda: fi.BatchDecodeWithPagedKVCacheWrapper(None), "float_workspace_buffer is a NoneType"),
        (lambda: wrapper.run(None, pool.cache), "q is a NoneType"),
        (lambda: wrapper.run(q, None), "paged_kv_cache is a NoneType"),
        (lambda: wrapper.run(q, (pool.cache,)), "paged_kv_cache is a tuple"),
        (lambda: wrapper.run(q[0], pool.cache), "q is .*give a tensor .all rows, hq, d."),
        (lambda: wrapper.plan([0, 1], pool.indices, pool.last, HQ, HKV, DIM, PAGE), "kv_indptr is a list"),
        (lambda: wrapper.plan(*pool.plan(), HQ, HKV, DIM, None), "head_dim|page_size"),
        (lambda: wrapper.plan(*pool.plan(), HQ, 3, DIM, PAGE), "num_qo_heads is 4 and num_kv_heads 3"),
        (lambda: wrapper.plan(*pool.plan(), HQ, 0, DIM, PAGE), "num_kv_heads is 0"),
        (lambda: ragged.run(q, q, q), "before plan"),
        (lambda: ragged.plan([0, 3], offsets, HQ, HKV, DIM), "qo_indptr is a list"),
        (lambda: ragged.plan(offsets, offsets[:2], HQ, HKV, DIM), "qo_indptr is of 3 sequences"),
        (lambda: latent.run(q, None, q, q), "q_pe is a NoneType"),
        (lambda: cascade.plan([offsets], [], [], [], HQ, HKV, DIM, PAGE), "num_levels is 2"),
        (lambda: fi.merge_state(q, None, q, None), "s_a is a NoneType"),
        (lambda: fi.merge_states(q, q), "v is .*rows, states, h, d"),
        (lambda: fi.single_decode_with_kv_cache(q, q, q), "q is .*give a tensor .hq, d."),
        (lambda: fi.single_decode_with_kv_cache(q[0], None, q), "k is a NoneType"),
        (
            lambda: fi.append_paged_kv_cache(None, q, *pool.plan()[:2], pool.cache, *pool.plan()),
            "append_key is a",
        ),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=why):
            call()

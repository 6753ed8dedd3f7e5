"""FlashInfer's wrappers of prefills beside decodes, of sinks, and of ranges in both directions, against fp64."""

import pytest

torch = pytest.importorskip("torch")

from flashjit import flashinfer as fi  # noqa: E402
from test_flashinfer import (  # noqa: E402
    DEVICE,
    DIM,
    HKV,
    HQ,
    KEYS,
    PAGE,
    QUERIES,
    Pool,
    check,
    exact,
    indptr,
    ints,
    normal,
    planned,
    rotated,
    seed,  # noqa: F401
    sequences,
    workspace,
)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("masked", [True, False])
def test_one_prefill_beside_a_batch_that_decodes(layout, masked):
    pool, q_d, q_p = Pool(layout), normal(len(KEYS), HQ, DIM), normal(5, HQ, DIM)
    k, v = normal(8, HKV, DIM), normal(8, HKV, DIM)
    mask = torch.rand(5, 8, device=DEVICE) < 0.7
    wrapper = fi.PODWithPagedKVCacheWrapper(workspace(), layout)
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE, window_left=4, sm_scale=0.3)
    kv = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    named = {"custom_mask_p": mask.flatten()} if masked else {"causal_p": True, "window_left_p": 3}
    prefill, decode = wrapper.run(
        q_p, *kv, q_d, pool.cache, kv_layout_p=layout, sm_scale_p=0.2, k_scale=0.5, v_scale=2.0, **named
    )
    wanted = {"seen": mask} if masked else {"causal": True, "window": 3}
    check((prefill,), exact(q_p, k, v, scale=0.2, **wanted))
    for i in range(len(KEYS)):
        one = q_d[i : i + 1]
        check((decode[i : i + 1],), exact(one, pool.k[i], 2 * pool.v[i], scale=0.15, window=4))


@pytest.mark.parametrize("causal", [True, False])
def test_prefills_beside_a_batch_that_decodes(causal):
    pools, wrapper = (Pool(), Pool()), fi.BatchPODWithPagedKVCacheWrapper(workspace())
    counts = (QUERIES, (1, 2, 1))
    q = [normal(sum(n), HQ, DIM) for n in counts]
    plans = [x for pool, n in zip(pools, counts) for x in (indptr(n), *pool.plan())]
    planned(wrapper, plans, HQ, HKV, DIM, PAGE, window_left=5)
    given = (q[0], pools[0].cache, q[1], pools[1].cache)
    outs, lses = wrapper.run(*given, causal_p=causal, q_scale=0.5, return_lse=True)
    for side, (pool, n) in enumerate(zip(pools, counts)):
        ends = torch.tensor(n).cumsum(0).tolist()
        for i, rows in enumerate(slice(end - m, end) for m, end in zip(n, ends)):
            scale = DIM**-0.5 * (0.5 if side else 1)
            wanted = exact(
                q[side][rows], pool.k[i], pool.v[i], scale=scale, window=5, causal=causal and not side
            )
            check((outs[side][rows], lses[side][rows]), wanted)
    again = wrapper.run(*given, causal_p=causal, q_scale=0.5)
    assert all(torch.equal(x, y) for x, y in zip(again, outs))


def test_prefills_by_a_mask_beside_a_batch_that_decodes():
    pool, wrapper = Pool(), fi.BatchPODWithPagedKVCacheWrapper(workspace())
    q = normal(sum(QUERIES), HQ, DIM)
    masks = [torch.rand(n, m, device=DEVICE) < 0.7 for n, m in zip(QUERIES, KEYS)]
    with pytest.raises(ValueError, match=r"run\(\) is called before plan\(\)"):
        wrapper.run(q, pool.cache, q, pool.cache)
    planned(wrapper, (indptr(QUERIES), *pool.plan()) * 2, HQ, HKV, DIM, PAGE)
    flat = torch.cat([mask.flatten() for mask in masks])
    prefill, decode = wrapper.run(q, pool.cache, q, pool.cache, custom_mask_p=flat, causal_p=True)
    for i, rows in enumerate(sequences()):
        check((prefill[rows],), exact(q[rows], pool.k[i], pool.v[i], seen=masks[i]))
        check((decode[rows],), exact(q[rows], pool.k[i], pool.v[i]))


def test_a_batch_that_decodes_beside_a_prefill_is_rotated():
    pool, q_d, q_p = Pool(), normal(len(KEYS), HQ, DIM), normal(2, HQ, DIM)
    k, v = normal(3, HKV, DIM), normal(3, HKV, DIM)
    wrapper = fi.PODWithPagedKVCacheWrapper(workspace())
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE, "ROPE_LLAMA", rope_theta=500.0)
    rope = {"pos_encoding_mode_p": "ROPE_LLAMA", "rope_scale_p": 2.0}
    prefill, decode = wrapper.run(q_p, k, v, q_d, pool.cache, **rope)
    check((prefill,), exact(rotated(q_p, 1, 2.0, 1e4), rotated(k, 0, 2.0, 1e4), v))
    for i, n in enumerate(KEYS):
        q, k = rotated(q_d[i : i + 1], n - 1, 1.0, 500.0), rotated(pool.k[i], 0, 1.0, 500.0)
        check((decode[i : i + 1],), exact(q, k, pool.v[i]))


def test_decoding_beside_sinks():
    pool, q, sinks = Pool(), normal(len(KEYS), HQ, DIM), normal(HQ)
    wrapper = fi.BatchDecodeWithAttentionSinkWrapper(workspace(), q_data_type=torch.float32)
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE, window_left=3)
    out, lse = wrapper.run(q, pool.cache, sinks, 0.3, return_lse=True)
    for i in range(len(KEYS)):
        rows = slice(i, i + 1)
        wanted = exact(q[rows], pool.k[i], pool.v[i], scale=0.3, window=3, sinks=sinks)
        check((out[rows], lse[rows]), wanted)


@pytest.mark.parametrize("windows", [(-1, -1), (2, -1), (1, 2)])
def test_ranges_see_each_other_in_both_directions(windows):
    pool, q = Pool(), normal(sum(QUERIES), HQ, DIM)
    ranges = ints(7, 8, 6, 8, -1, -1, 0, 3, -1, -1, 0, 1, 1, 3, 1, 3, -1, -1).view(9, 2)
    wrapper = fi.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(), q_data_type=torch.float32, kv_data_type=torch.float32
    )
    wrapper.plan(indptr(QUERIES), *pool.plan(), HQ, HKV, DIM, PAGE, sm_scale=0.3)
    out, lse = wrapper.run(q, pool.cache, ranges, *windows, return_lse=True)
    for i, rows in enumerate(sequences()):
        key = torch.arange(KEYS[i], device=DEVICE)
        at = torch.arange(QUERIES[i], device=DEVICE)[:, None] + KEYS[i] - QUERIES[i]
        before = (key <= at) & ((key >= at - windows[0]) | (windows[0] < 0))
        own = (key >= ranges[rows, :1]) & (key <= ranges[rows, 1:])
        own = own & ((at - key < windows[1]) | (windows[1] <= 0))
        wanted = exact(q[rows], pool.k[i], pool.v[i], scale=0.3, seen=before | own)
        check((out[rows], lse[rows]), wanted)


def test_a_plan_of_ranges_takes_no_other_mask():
    pool, q = Pool(), normal(sum(QUERIES), HQ, DIM)
    wrapper = fi.BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), q_data_type="float32")
    given = (indptr(QUERIES), *pool.plan(), HQ, HKV, DIM, PAGE)
    with pytest.raises(ValueError, match="causal is given: masks are run..'s bidirectional_ranges"):
        wrapper.plan(*given, causal=True, kv_data_type="float32")
    wrapper.plan(*given, kv_data_type="float32")
    with pytest.raises(ValueError, match=r"give \[9, 2\], a first and a last key for each row of q"):
        wrapper.run(q, pool.cache, ints(0, 1).view(1, 2))

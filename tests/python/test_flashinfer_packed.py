"""FlashInfer's RoPE over pages, and its variants by jit_args, against fp64."""

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from flashjit import flashinfer as fi  # noqa: E402
from test_flashinfer import (  # noqa: E402
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
    normal,
    planned,
    rotated,
    seed,  # noqa: F401
    workspace,
)

ROPE = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 500.0}


def wanted_of(pool, q, **options):
    return [
        exact(
            rotated(a, len(k) - len(a), 2.0, 500.0), rotated(k, 0, 2.0, 500.0), v, scale=DIM**-0.5, **options
        )
        for a, k, v in zip(q, pool.k, pool.v)
    ]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("graph", [False, True])
def test_q_and_k_are_rotated_over_pages(layout, graph):
    pool, q = Pool(layout), [normal(n, HQ, DIM) for n in QUERIES]
    buffer = torch.empty(8, dtype=torch.int32) if graph else None
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), layout, use_cuda_graph=graph, paged_kv_indices_buf=buffer
    )
    planned(wrapper, (indptr(QUERIES), *pool.plan()), HQ, HKV, DIM, PAGE, causal=True, window_left=6, **ROPE)
    found = wrapper.run(torch.cat(q), pool.cache, return_lse=True)
    check(found, [torch.cat(x) for x in zip(*wanted_of(pool, q, causal=True, window=6))])
    found = wrapper.forward(torch.cat(q), pool.cache, causal=True, **ROPE)
    check((found,), [torch.cat([o for o, _ in wanted_of(pool, q, causal=True)])])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_keys_of_8_bits_are_rotated_over_pages(dtype):
    pool, q = Pool(), [normal(n, HQ, DIM) for n in QUERIES]
    codes = (pool.cache.nan_to_num(100.0) * (20 if dtype == torch.int8 else 1)).to(dtype)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    planned(
        wrapper, (indptr(QUERIES), *pool.plan()), HQ, HKV, DIM, PAGE, causal=True, kv_data_type=dtype, **ROPE
    )
    found = wrapper.run(torch.cat(q), codes, k_scale=0.05, v_scale=0.5)
    scale = 20 if dtype == torch.int8 else 1
    pool.k = [(x * scale).to(dtype).float() * 0.05 for x in pool.k]
    pool.v = [(x * scale).to(dtype).float() * 0.5 for x in pool.v]
    wanted = [o for o, _ in wanted_of(pool, q, causal=True)]
    check((found,), [torch.cat(wanted)])
    k, v = ((x[0] / y * scale).to(dtype) for x, y in ((pool.k, 0.05 * scale), (pool.v, 0.5 * scale)))
    one = fi.single_prefill_with_kv_cache(q[0], k, v, causal=True, k_scale=0.05, v_scale=0.5, **ROPE)
    check((one,), wanted[:1])
    with pytest.raises(flashjit.Unsupported, match="has it for q of 16 or 32 bits"):
        named = {"q_data_type": torch.float8_e4m3fn, "kv_data_type": torch.float8_e4m3fn, **ROPE}
        wrapper.plan(indptr(QUERIES), *pool.plan(), HQ, HKV, DIM, PAGE, **named)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("graph", [False, True])
def test_decoding_rotates_over_pages(each, graph):
    pool, q = Pool(), [normal(each, HQ, DIM) for _ in KEYS]
    buffer = torch.empty(8, dtype=torch.int32) if graph else None
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=graph, paged_kv_indices_buffer=buffer
    )
    kept = []
    for _ in range(1 + graph):
        planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE, q_len_per_req=each, **ROPE)
        kept.append(wrapper._packed[:3])
    assert all(a is b for a, b in zip(kept[0], kept[-1]))
    found = wrapper.run(torch.cat(q), pool.cache, return_lse=True)
    check(found, [torch.cat(x) for x in zip(*wanted_of(pool, q, causal=True))])
    planned(wrapper, pool.plan(), HQ, HKV, DIM, PAGE, q_len_per_req=each)
    assert wrapper._packed is None


def test_levels_of_a_cascade_are_not_rotated():
    pool = Pool()
    cascade = fi.MultiLevelCascadeAttentionWrapper(1, workspace())
    with pytest.raises(flashjit.Unsupported, match="do not say where they are"):
        cascade.plan(*([x] for x in (indptr(QUERIES), *pool.plan())), HQ, HKV, DIM, PAGE, **ROPE)


def variant(name="AttentionSink", tensors=("sink",), scalars=("sm_scale",)):
    """jit_args as FlashInfer's tests have them."""
    types, sizes = [torch.float32] * 3 + [torch.int32], [DIM, DIM]
    return ["uri", *types, *sizes, list(tensors), ["float"], list(scalars), ["double"], name, "struct {};"]


@pytest.mark.parametrize("window", [-1, 3])
def test_sinks_by_a_variant(window):
    pool, q, sinks = Pool(), [normal(n, HQ, DIM) for n in QUERIES], normal(HQ)
    options = {"causal": True, "window": window, "scale": 0.3, "sinks": sinks}
    wanted = torch.cat([exact(a, k, v, **options)[0] for a, k, v in zip(q, pool.k, pool.v)])
    named = {"jit_args": variant(), "jit_kwargs": {"use_sliding_window": window >= 0}}
    paged = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), **named)
    planned(paged, (indptr(QUERIES), *pool.plan()), HQ, HKV, DIM, PAGE, causal=True, window_left=window)
    check((paged.run(torch.cat(q), pool.cache, sinks, 0.3),), [wanted])
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace(), **named)
    planned(ragged, (indptr(QUERIES), indptr(KEYS)), HQ, HKV, DIM, causal=True, window_left=window)
    check((ragged.run(torch.cat(q), torch.cat(pool.k), torch.cat(pool.v), sinks, 0.3),), [wanted])
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), jit_args=variant())
    planned(decode, pool.plan(), HQ, HKV, DIM, PAGE, window_left=window)
    one = torch.cat([exact(a[-1:], k, v, **options)[0] for a, k, v in zip(q, pool.k, pool.v)])
    check((decode.run(torch.cat([a[-1:] for a in q]), pool.cache, sinks, 0.3),), [one])
    with pytest.raises(
        flashjit.InvalidArgument, match="run.. is given 3 more arguments: with 'AttentionSink'"
    ):
        decode.run(torch.cat([a[-1:] for a in q]), pool.cache, sinks, 0.3, 1)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("together", [True, False])
def test_pages_of_one_row_may_be_without_that_dimension(layout, together):
    keys, q = 7, normal(2, HQ, DIM)
    k, v = normal(keys, HKV, DIM), normal(keys, HKV, DIM)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    order = torch.randperm(keys, device=q.device).int()
    planned(wrapper, (indptr((4, 3)), order, indptr((1, 1)).diff()), HQ, HKV, DIM, 1)
    found = wrapper.run(q, torch.stack((k, v), 1) if together else (k, v))
    wanted = [exact(a, k[at], v[at])[0] for a, at in zip(q.split(1), order.long().split((4, 3)))]
    check((found,), [torch.cat(wanted)])


@pytest.mark.parametrize(
    "given", [variant("FlashSigmoid", (), ("logits_scale",)), variant(tensors=("a",)), variant()[:5], []]
)
def test_other_variants_are_refused_with_what_to_do(given):
    for wrapper in (
        fi.BatchDecodeWithPagedKVCacheWrapper,
        fi.BatchPrefillWithPagedKVCacheWrapper,
        fi.BatchPrefillWithRaggedKVCacheWrapper,
    ):
        with pytest.raises(flashjit.Unsupported, match="Write others as score_mod, mask_mod or weight_mod"):
            wrapper(workspace(), jit_args=given)

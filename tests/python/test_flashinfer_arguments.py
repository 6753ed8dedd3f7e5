"""Arguments of FlashInfer's functions that contradict its tensors or each other: each is refused, none is left unread."""

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
    PAGE,
    QUERIES,
    Pool,
    indptr,
    ints,
    normal,
    planned,
    seed,  # noqa: F401
    workspace,
)

SCALE = 0.25
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="values are read on the CPU alone")
RANK, ROPE = 64, 32


def refused(match, call, *args, error=flashjit.InvalidArgument, **named):
    with pytest.raises(error, match=match):
        call(*args, **named)


def unsupported(match, call, *args, **named):
    refused(match, call, *args, error=flashjit.Unsupported, **named)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_xqa_compares_the_sizes_of_the_cache(layout):
    pool, q = Pool(layout, together=False), normal(len(KEYS), 1, HQ, DIM)
    given = (q, *pool.cache, pool.table(), ints(*KEYS), torch.empty_like(q), workspace(), workspace())
    fi.xqa(*given, HKV, PAGE, kv_layout=layout)
    of_cache = rf"k_cache is float32 \[.*\] on {DEVICE}.*, by kv_layout {layout}"
    refused(
        f"num_kv_heads is 1, but {of_cache}: give num_kv_heads=2", fi.xqa, *given, 1, PAGE, kv_layout=layout
    )
    refused(f"page_size is 8, but {of_cache}: give page_size=4", fi.xqa, *given, HKV, 8, kv_layout=layout)
    other = {"NHD": "HND", "HND": "NHD"}[layout]
    refused(f"num_kv_heads is 2, but .* by kv_layout {other}", fi.xqa, *given, HKV, PAGE, kv_layout=other)


def decode(q, pool):
    return q, pool.cache, workspace(), pool.table(), ints(*KEYS), max(KEYS), SCALE


def test_a_rank_s_part_needs_what_says_where_it_is():
    given = decode(normal(2 * len(KEYS), HQ, DIM), Pool("HND"))
    call, more = fi.trtllm_batch_decode_with_kv_cache, {"q_len_per_req": 2}
    before = ints(*[n - 2 for n in KEYS])
    refused("cp_world is 2 and cp_rank 0, .*: give it, or leave both out", call, *given, cp_world=2, **more)
    refused("cp_world is 1 and cp_rank 1, .*: give it, or leave both out", call, *given, cp_rank=1, **more)
    more["causal_seqlens_kv_global"] = before
    refused("cp_rank is 2 .*: give 0 to 1", call, *given, cp_world=2, cp_rank=2, **more)
    refused("cp_rank is -1 .*: give 0 to 1", call, *given, cp_world=2, cp_rank=-1, **more)
    mask = torch.zeros(len(KEYS), 2, 2, dtype=torch.uint16, device=DEVICE)
    unsupported("mask is given with causal_seqlens_kv_global", call, *given, mask=mask, **more)
    refused(
        r"causal_seqlens_kv_global is .*: it must be int32 \[3\]",
        call,
        *given,
        **{**more, "causal_seqlens_kv_global": before[:2]},
    )


def context(pool, q, sequences=len(KEYS)):
    offsets = (indptr(QUERIES), indptr(KEYS))
    return (q, pool.cache, workspace(), pool.table(), ints(*KEYS), 5, 9, SCALE, 1.0, sequences, *offsets)


def test_context_refuses_masks_that_it_would_not_read():
    pool, q = Pool("HND"), normal(sum(QUERIES), HQ, DIM)
    given, call = context(pool, q), fi.trtllm_batch_context_with_kv_cache
    refused("window_right is 1, but causal is True: give 0 or -1", call, *given, window_right=1)
    bounds = torch.zeros(len(q), dtype=torch.int32, device=DEVICE)
    starts, ends = {"variable_window_token_starts": bounds}, {"variable_window_token_ends": bounds}
    for one in (starts, ends):
        refused(
            "variable_window_token_starts and variable_window_token_ends come together", call, *given, **one
        )
    refused("window_left is 2 .*: leave it out", call, *given, window_left=2, **starts, **ends)
    refused(
        "window_right is 2 .*: leave it out", call, *given, window_right=2, causal=False, **starts, **ends
    )
    for wrong in (bounds[1:], bounds.long()):
        for name in ("starts", "ends"):
            both = {**starts, **ends, f"variable_window_token_{name}": wrong}
            refused(rf"variable_window_token_{name} is .*: it must be int32 \[9\]", call, *given, **both)


def test_the_number_of_sequences_is_compared():
    pool, q = Pool("HND"), normal(sum(QUERIES), HQ, DIM)
    says = "batch_size is 2, but .* of 3 sequences: give batch_size=3"
    refused(says, fi.trtllm_batch_context_with_kv_cache, *context(pool, q, 2))
    k, v = torch.cat(pool.k), torch.cat(pool.v)
    given = (workspace(), ints(*KEYS), 5, 9, SCALE, 1.0)
    offsets = (indptr(QUERIES), indptr(KEYS))
    refused(
        says, fi.trtllm_ragged_attention_deepseek, q, k, v, *given, 1.0, 2, -1, *offsets, None, True, False
    )
    refused(says, fi.trtllm_fmha_v2_prefill, (q, k, v), "SEPARATE_Q_K_V", *given, 2, *offsets)
    paged = (q, pool.cache), "Q_PAGED_KV_HND"
    refused(says, fi.trtllm_fmha_v2_prefill, *paged, *given, 2, *offsets, block_tables=pool.table())


@ON_CPU
def test_lengths_that_are_said_twice_are_compared():
    pool, q = Pool("HND"), normal(sum(QUERIES), HQ, DIM)
    given = context(pool, q)
    k, v = torch.cat(pool.k), torch.cat(pool.v)
    rest = (5, 9, SCALE, 1.0, 1.0, 3, -1, *given[-2:], None, True, False)
    says = r"seq_lens says 5 for sequence 1, but cum_seq_lens_kv 4: give the same"
    refused(says, fi.trtllm_ragged_attention_deepseek, q, k, v, workspace(), ints(9, 5, 4), *rest)


def test_context_takes_where_lists_of_pages_begin():  # as FlashInfer's tests and vLLM give it for cum_seq_lens_kv
    pool, q = Pool("HND"), normal(sum(QUERIES), HQ, DIM)
    *given, of_keys = context(pool, q)
    call = fi.trtllm_batch_context_with_kv_cache
    torch.testing.assert_close(call(*given, pool.plan()[0]), call(*given, of_keys), rtol=0, atol=0)


@pytest.mark.parametrize("last", [0, 1, PAGE])
def test_sequences_without_pages_have_no_keys(last):
    """Whatever their last page is said to have, as wrappers pad it."""
    pool = Pool()
    ends, pages, lasts = pool.plan()
    given = (torch.cat((ends, ends[-1:])), pages, torch.cat((lasts, ints(last))))
    said = {"seq_lens": ints(*KEYS, 0)}
    of_decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    planned(of_decode, given, HQ, HKV, DIM, PAGE, **said)
    q = normal(len(KEYS) + 1, HQ, DIM)
    o, lse = of_decode.run(q, pool.cache, return_lse=True)
    assert (o[-1] == 0).all() and lse[-1].isneginf().all() and not lse[:-1].isneginf().any()
    of_prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    planned(of_prefill, (indptr((1,) * len(q)), *given), HQ, HKV, DIM, PAGE, **said)
    torch.testing.assert_close(of_prefill.run(q, pool.cache), o)


@ON_CPU
def test_plans_compare_what_is_said_twice():
    pool = Pool()
    sizes = (HQ, HKV, DIM, PAGE)
    says = r"seq_lens says 5 for sequence 1, but .* 4: give the same"
    wrong = ints(9, 5, 4)
    of_decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    refused(says, planned, of_decode, pool.plan(), *sizes, seq_lens=wrong)
    planned(of_decode, pool.plan(), *sizes, seq_lens=ints(*KEYS), block_tables=pool.table())
    of_prefill, first = fi.BatchPrefillWithPagedKVCacheWrapper(workspace()), (indptr(QUERIES), *pool.plan())
    refused(says, planned, of_prefill, first, *sizes, seq_lens=wrong)
    says_q = r"seq_lens_q says 5 for sequence 1, but qo_indptr 1: give the same"
    refused(says_q, planned, of_prefill, first, *sizes, seq_lens_q=ints(3, 5, 1))
    ragged, offsets = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace()), (indptr(QUERIES), indptr(KEYS))
    refused(says, planned, ragged, offsets, HQ, HKV, DIM, seq_lens=wrong)
    refused(says_q, planned, ragged, offsets, HQ, HKV, DIM, seq_lens_q=ints(3, 5, 1))
    planned(ragged, offsets, HQ, HKV, DIM, seq_lens=ints(*KEYS).view(-1, 1, 1, 1), seq_lens_q=ints(*QUERIES))
    other = pool.table()
    other[1, 0] += 1
    says = "block_tables has other pages than .* sequence 1"
    refused(says, planned, of_decode, pool.plan(), *sizes, block_tables=other)
    refused(says, planned, of_prefill, first, *sizes, block_tables=other)


def test_plans_refuse_options_that_they_would_not_read():
    pool = Pool()
    sizes = (HQ, HKV, DIM, PAGE)
    of_decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    unsupported("window_right is 1: give 0", planned, of_decode, pool.plan(), *sizes, window_right=1)
    of_prefill, first = fi.BatchPrefillWithPagedKVCacheWrapper(workspace()), (indptr(QUERIES), *pool.plan())
    places = {"token_pos_in_items_ptr": ints(*range(9)), "token_pos_in_items_len": 3}
    says = "token_pos_in_items_ptr is given without prefix_len_ptr: give both"
    refused(says, planned, of_prefill, first, *sizes, **places)
    ragged, offsets = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace()), (indptr(QUERIES), indptr(KEYS))
    refused(says, planned, ragged, offsets, HQ, HKV, DIM, **places)


def test_wrappers_with_sinks_compare_the_constructor_s_options():
    pool, first = Pool(), indptr(QUERIES)
    for made, given in (
        (fi.BatchAttentionWithAttentionSinkWrapper, (first, *pool.plan())),
        (fi.BatchDecodeWithAttentionSinkWrapper, pool.plan()),
    ):
        wrapper = made(workspace(), window_left=3)
        says = "window_left is 3 in the constructor and not given to plan.*: give it there, -1 for none"
        refused(says, planned, wrapper, given, HQ, HKV, DIM, PAGE)
        for window in (
            3,
            2,
            -1,
        ):  # there, too, plan()'s counts: layers with a window and others share a wrapper
            planned(wrapper, given, HQ, HKV, DIM, PAGE, window_left=window)
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(workspace(), pos_encoding_mode="ALIBI")
    says = "pos_encoding_mode is NONE in plan.. and ALIBI in the constructor: give both the same"
    refused(says, planned, wrapper, (first, *pool.plan()), HQ, HKV, DIM, PAGE)


def test_masks_of_other_shapes_are_refused():
    q, k, v = normal(3, HQ, DIM), normal(5, HKV, DIM), normal(5, HKV, DIM)
    for shape in ((5, 3), (3, 6), (1, 3, 6)):
        mask = torch.ones(shape, dtype=torch.bool, device=DEVICE)
        refused("custom_mask is .*: give ", fi.single_prefill_with_kv_cache, q, k, v, custom_mask=mask)
    fi.single_prefill_with_kv_cache(q, k, v, custom_mask=torch.ones(16, dtype=torch.bool, device=DEVICE))
    ragged, mask = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace()), torch.ones(2, 4, 5, dtype=torch.bool)
    offsets = indptr((3, 3)), indptr((5, 5))
    refused("custom_mask is .*: give ", planned, ragged, offsets, HQ, HKV, DIM, custom_mask=mask)


def test_fmha_v2_refuses_sizes_of_another_mode():
    q, k, v = normal(9, HQ, DIM), normal(18, HKV, DIM), normal(18, HKV, DIM)
    offsets = (indptr(QUERIES), indptr(KEYS))
    given = ((q, k, v), "SEPARATE_Q_K_V", workspace(), ints(*KEYS), 5, 9, SCALE, 1.0, 3, *offsets)
    call = fi.trtllm_fmha_v2_prefill
    for mode in ("causal", "padding", "chunked"):
        more = {"chunked_attention_size": 4} if mode == "chunked" else {}
        says = f"window_left is 2, but mask_mode is '{mode}': give mask_mode=\"sliding_window\", or leave"
        refused(says, call, *given, window_left=2, mask_mode=mode, **more)
    for mode in ("causal", "padding", "sliding_window"):
        says = f"chunked_attention_size is 4, but mask_mode is '{mode}': give mask_mode=\"chunked\", or leave"
        refused(says, call, *given, chunked_attention_size=4, mask_mode=mode)
    refused(
        "mask_mode is 'chunked', but chunked_attention_size is 0: give", call, *given, mask_mode="chunked"
    )
    without = call(*given, window_left=None, chunked_attention_size=None)
    torch.testing.assert_close(without, call(*given), rtol=0, atol=0)


@ON_CPU
def test_offsets_of_rows_with_gaps_are_refused():
    pool, q = Pool("HND", together=False), normal(2 * len(KEYS), HQ, DIM)
    named = {"actual_seq_lens_kv": ints(*KEYS), "block_tables": pool.table(), "max_sequence_kv": 9}
    dense = torch.arange(len(KEYS) + 1) * 2 * q.stride(0)
    for name in ("batch_offsets_q", "batch_offsets_o"):
        call = fi.cudnn_batch_decode_with_kv_cache
        more = {"q_len_per_req": 2, **named}
        for good in (dense, dense[:-1]):
            call(q, *pool.cache, SCALE, workspace(), **more, **{name: good})
        refused(
            f"{name} says .*: rows are packed",
            call,
            q,
            *pool.cache,
            SCALE,
            workspace(),
            **more,
            **{name: dense + 1},
        )
    q, k, v = normal(9, HQ, DIM), normal(18, HKV, DIM), normal(18, HKV, DIM)
    lengths = {"actual_seq_lens_q": ints(*QUERIES), "actual_seq_lens_kv": ints(*KEYS)}
    common = {
        "max_token_per_sequence": 5,
        "max_sequence_kv": 9,
        "causal": True,
        "return_lse": True,
        **lengths,
    }
    call = fi.cudnn_batch_prefill_with_kv_cache
    for name, sizes in (("q", QUERIES), ("o", QUERIES), ("k", KEYS), ("v", KEYS), ("stats", QUERIES)):
        name = f"batch_offsets_{name}"
        common["batch_offsets_units"] = "tokens"
        call(q, k, v, SCALE, workspace(), **common, **{name: indptr(sizes)})
        refused(
            f"{name} says .*: rows are packed",
            call,
            q,
            k,
            v,
            SCALE,
            workspace(),
            **common,
            **{name: indptr(sizes) + 1},
        )


def latents(**more):
    torch.manual_seed(0)
    pool, q = normal(8, PAGE, RANK + ROPE), normal(2, 2, HQ, RANK + ROPE)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4)
    given = {"qk_nope_head_dim": 16, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "block_tables": table}
    given |= {"seq_lens": ints(9, 16), "max_seq_len": 16, **more}
    return fi.trtllm_batch_decode_with_kv_cache_mla(q, pool, workspace(), **given)


def test_latents_compare_what_they_are_told():
    latents()
    refused("kv_lora_rank is 64 and qk_rope_head_dim 16, but query is .*96", latents, qk_rope_head_dim=16)
    lists = torch.zeros(2, 2, 6, dtype=torch.int32, device=DEVICE)
    latents(block_tables=lists, sparse_mla_top_k=6, seq_lens=None)
    for wrong in (4, 8):
        says = f"sparse_mla_top_k is {wrong}, but block_tables is .*: give sparse_mla_top_k=6"
        refused(says, latents, block_tables=lists, sparse_mla_top_k=wrong, seq_lens=None)
    refused(
        "block_tables is .*it must be .*4 rows",
        latents,
        block_tables=lists[:1],
        sparse_mla_top_k=6,
        seq_lens=None,
    )
    refused(
        "sparse_mla_top_k_lens is given, but sparse_mla_top_k is 0",
        latents,
        sparse_mla_top_k_lens=ints(1, 1, 1, 1),
    )
    unsupported("cp_world is 2 and cp_rank 0: .*leave them out", latents, cp_world=2)
    unsupported("cp_world is 1 and cp_rank 1: .*leave them out", latents, cp_rank=1)
    refused("return_lse_base is 'e': give base2 or basee", latents, return_lse=True, return_lse_base="e")


def test_latents_write_where_they_are_told():
    wanted = latents()
    wide = torch.zeros(2, 3, HQ, RANK, device=DEVICE)
    refused("out has the strides .*: give rows one after another", latents, out=wide[:, :2])
    refused(r"out is .*: it must be .*\[4, 4, 64\]", latents, out=wide)
    strided = torch.zeros(2, 2, 2 * HQ, RANK, device=DEVICE)[:, :, :HQ]
    latents(out=strided)
    torch.testing.assert_close(strided, wanted)
    for lse in (torch.zeros(HQ, 4, device=DEVICE)[:, :3], torch.zeros(2, HQ * 2, device=DEVICE)):
        refused(r"lse is .*: it must be float32 \[4, 4\]", latents, lse=lse)
    refused(
        r"lse is .*: it must be float32 \[4, 4\]",
        latents,
        lse=torch.zeros(4, 4, dtype=torch.float64, device=DEVICE),
    )
    latents(lse=torch.zeros(2, 2, HQ, device=DEVICE))


def test_xqa_s_latents_are_pages_of_the_size_that_is_said():
    k = normal(9, PAGE, RANK + ROPE)
    q, out = normal(2, 1, HQ, RANK + ROPE), torch.zeros(2, 1, HQ, RANK, device=DEVICE)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4)
    places = (table, ints(9, 16)[:, None], out, workspace(), workspace())
    wanted = None
    for given in (
        k,
        k.flatten(0, 1),
        k[:, :, None],
        k[:, None],
    ):  # the third: FlashInfer's test has a dimension for the head
        fi.xqa_mla(q, given, given, *places, PAGE)
        wanted = out.clone() if wanted is None else wanted
        assert torch.equal(out, wanted) and out.any()
        out.zero_()
    refused("page_size is 8, but k_cache is .*: give page_size=4", fi.xqa_mla, q, k, k, *places, 8)
    rows = k.flatten(0, 1)[:30]
    refused("page_size is 4, but k_cache is .*: give whole pages", fi.xqa_mla, q, rows, rows, *places, PAGE)
    v = k[:, :, ROPE:]
    unsupported("v_cache has other memory than k_cache", fi.xqa_mla, q, k, v, *places, PAGE)


@ON_CPU
def test_lengths_without_pages_are_refused():
    pool, q = Pool(), normal(sum(QUERIES), HQ, DIM)
    given = (indptr(QUERIES), pool.indptr, pool.indices, ints(9, 5, 5))
    says = "kv_len_arr says 5 keys for sequence 1, which has 1 pages of 4: give it pages, or a smaller length"
    refused(says, fi.BatchAttention(device=DEVICE).plan, *given, HQ, HKV, DIM, DIM, PAGE)
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
    rest = (HQ, RANK, ROPE, PAGE, True, SCALE, "float32", "float32")
    refused(says, wrapper.plan, *given, *rest)
    wrapper.plan(*given[:-1], ints(*KEYS), *rest)
    pages = normal(len(pool.cache), PAGE, RANK + ROPE)
    q = normal(sum(QUERIES), HQ, RANK + ROPE)
    parts = [x.split((RANK, ROPE), -1)[i] for x in (q, pages) for i in range(2)]
    wrapper.run(*parts, kv_len=ints(*KEYS), page_table=pool.table())
    refused("kv_len says 5 for sequence 1, but kv_len_arr of plan", wrapper.run, *parts, kv_len=given[-1])
    other = pool.table() + 1
    refused("page_table has other pages than .* sequence 0", wrapper.run, *parts, page_table=other)
    lse = torch.zeros(1, HQ, device=DEVICE)
    refused(r"lse is .*: it must be float32 \[9, 4\]", wrapper.run, *parts, lse=lse)


def blocks(**more):
    wrapper = fi.BlockSparseAttentionWrapper(workspace())
    given = {"indptr": ints(0, 1, 3), "indices": ints(0, 0, 1), "M": 32, "N": 32, "R": 16, "C": 16}
    given |= {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": DIM, "q_data_type": "float32", **more}
    wrapper.plan(**given)
    return wrapper


def test_blocks_are_those_of_the_sizes_that_are_said():
    q, k = normal(32, HQ, DIM), normal(32, HKV, DIM)
    blocks().run(q, k, k)
    whole = torch.ones(2, 2, dtype=torch.bool, device=DEVICE)
    refused("block_mask is given beside indptr or indices: leave", blocks, block_mask=whole)
    alone = {"indptr": None, "indices": None}
    refused(r"block_mask is .*: it must be \[2, 2\]", blocks, **alone, block_mask=whole[:1])
    refused(r"indptr is .*: it must have 3 numbers", blocks, indptr=ints(0, 3))
    for wrong in (ints(0, 0, 2), ints(0, 0, -1)):
        refused("indices has .*: give 0 to 1", blocks, indices=wrong)
    refused("indptr ends at 3, but indices has 2", blocks, indices=ints(0, 1))
    for shape in ((3, 16, 1), (16, 16), (2, 16, 16)):
        mask = torch.ones(shape, dtype=torch.bool, device=DEVICE)
        refused(r"mask is .*: it must be \[3, 16, 16\]", blocks, mask=mask)
    for made in (blocks(), blocks(R=8, indptr=ints(0, 1, 2, 3, 3))):
        refused(r"k is .*: plan\(\) was given N=32", made.run, q, k[:31], k[:31])


def test_memory_of_other_shapes_is_refused():
    wrapper = fi.VariableBlockSparseAttentionWrapper(workspace())
    sizes = torch.tensor(((4, 4),) * HKV, dtype=torch.int32)
    named = {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": DIM, "q_data_type": "float32"}
    wrapper.plan(torch.ones(HKV, 2, 2), sizes, sizes, **named)
    q, k = normal(HQ, 8, DIM), normal(HKV, 8, DIM)
    refused(
        r"lse is .*: it must be float32 \[4, 8\]",
        wrapper.run,
        q,
        k,
        k,
        lse=torch.zeros(2, HQ, 8, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_are_as_many_as_their_places(dtype):
    new = normal(2, HKV, DIM).to(dtype)
    cache = torch.zeros(4, 2, PAGE, HKV, DIM, device=DEVICE).to(dtype)
    pages = (ints(0), ints(0, 1), ints(3))
    for rows, places in ((1, 2), (2, 1), (2, 3)):
        where = (ints(*[0] * places), ints(*range(places)))
        given = (new[:rows], new[:rows], *where, cache, *pages)
        refused(f"append_key has {rows} rows, but positions {places}", fi.append_paged_kv_cache, *given)
        latent = (new[:rows, 0], new[:rows, 0], *where, cache[:, 0, :, 0], cache[:, 1, :, 0], *pages)
        refused(f"append_ckv has {rows} rows, but positions {places}", fi.append_paged_mla_kv_cache, *latent)
    refused(
        "append_value has 1 rows, but positions 2",
        fi.append_paged_kv_cache,
        new,
        new[:1],
        ints(0, 0),
        ints(0, 1),
        cache,
        *pages,
    )
    refused(
        "batch_indices has 1 .*positions 2",
        fi.append_paged_kv_cache,
        new,
        new,
        ints(0),
        ints(0, 1),
        cache,
        *pages,
    )
    wide = normal(2, HKV, DIM + 8).to(dtype)
    refused(
        r"append_key is .*: it must be \[nnz, 2, 32\]",
        fi.append_paged_kv_cache,
        wide,
        wide,
        ints(0, 0),
        ints(0, 1),
        cache,
        *pages,
    )
    if DEVICE == "cpu":
        says = "position 4 of sequence 0, which has 1 pages of 4"
        refused(says, fi.append_paged_kv_cache, new, new, ints(0, 0), ints(3, 4), cache, *pages)


def test_errors_have_the_caller_s_words():
    pool, q = Pool("HND", together=False), normal(len(KEYS), HQ, DIM)
    table, lengths = pool.table(), ints(*KEYS)
    cache = (q, pool.cache, workspace())

    def trtllm(table=table, lengths=lengths, most=9, **more):
        fi.trtllm_batch_decode_with_kv_cache(*cache, table, lengths, most, SCALE, **more)

    def context(table=table, lengths=lengths, most=9):
        offsets = (indptr((1, 1, 1)), None)
        fi.trtllm_batch_context_with_kv_cache(*cache, table, lengths, 1, most, SCALE, 1.0, 3, *offsets)

    def cudnn(table=table, lengths=lengths, most=9):
        named = {"actual_seq_lens_kv": lengths, "block_tables": table, "max_sequence_kv": most}
        fi.cudnn_batch_decode_with_kv_cache(q, *pool.cache, SCALE, workspace(), **named)

    def cudnn_prefill(table=table, lengths=lengths, most=9):
        named = {"actual_seq_lens_kv": lengths, "block_tables": table, "actual_seq_lens_q": ints(1, 1, 1)}
        sizes = {"max_token_per_sequence": 1, "max_sequence_kv": most, "causal": True, "return_lse": False}
        fi.cudnn_batch_prefill_with_kv_cache(q, *pool.cache, SCALE, workspace(), **named, **sizes)

    def xqa(table=table, lengths=lengths, most=9):
        out = torch.empty_like(q)[:, None]
        given = (q[:, None], *pool.cache, table, lengths, out, workspace(), workspace(), HKV, PAGE)
        fi.xqa(*given, kv_layout="HND")

    for call, name, of_lengths in (
        (trtllm, "block_tables", "seq_lens"),
        (context, "block_tables", "seq_lens"),
        (cudnn, "block_tables", "actual_seq_lens_kv"),
        (cudnn_prefill, "block_tables", "actual_seq_lens_kv"),
        (xqa, "page_table", "seq_lens"),
    ):
        call()
        for wrong in (table.long(), table[:2], table[0]):
            refused(rf"^{name} is .*: it must be int32 \[3, pages of the longest\]", call, wrong)
        if DEVICE == "cpu":
            refused(f"^{name} names page 10", call, table.clamp(min=0) + 1000)
            refused(f"^{of_lengths} has 900 for sequence 0", call, table, ints(900, 1, 1))
            if call is not xqa:
                refused(f"^{of_lengths} has 9 for sequence 0: give 0 to 4", call, table, lengths, 4)
    refused(r"^cum_seq_lens_q is int64", trtllm, cum_seq_lens_q=indptr((1, 1, 1)).long(), max_q_len=1)
    lists = torch.zeros(2, 2, 6, dtype=torch.int64, device=DEVICE)
    refused(
        "^block_tables is int64 .*: it must be int32",
        latents,
        block_tables=lists,
        sparse_mla_top_k=6,
        seq_lens=None,
    )
    refused(r"^block_tables is int64 .*: it must be int32 \[2, pages", latents, block_tables=lists[:, 0])
    k = normal(9, PAGE, RANK + ROPE)
    places = (
        lists[:, 0],
        ints(9, 16)[:, None],
        torch.zeros(2, 1, HQ, RANK, device=DEVICE),
        workspace(),
        workspace(),
    )
    refused("^page_table is int64", fi.xqa_mla, normal(2, 1, HQ, RANK + ROPE), k, k, *places, PAGE)


@ON_CPU
def test_errors_of_a_plan_have_its_words():
    pool, wrapper = Pool(), fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrong = (pool.indptr, pool.indices + 1000, pool.last)
    planned(wrapper, wrong, HQ, HKV, DIM, PAGE)
    refused(r"^plan\(\)'s list of pages names page 10", wrapper.run, normal(len(KEYS), HQ, DIM), pool.cache)


@pytest.mark.parametrize("made", ["decode", "prefill", "attention", "latents"])
def test_lists_of_pages_that_fall_or_end_too_late_are_refused(made):
    pool, sizes = Pool(), (HQ, HKV, DIM, PAGE)

    def plan(ends, indices=pool.indices):
        if made == "decode":
            wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
            return planned(wrapper, (ends, indices, ints(1, 1, 1)), *sizes)
        if made == "prefill":
            wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
            return planned(wrapper, (indptr(QUERIES), ends, indices, ints(1, 1, 1)), *sizes)
        given = (indptr(QUERIES), ends, indices, ints(1, 0, 1))
        if made == "attention":
            return fi.BatchAttention(device=DEVICE).plan(*given, HQ, HKV, DIM, DIM, PAGE)
        wrapper = fi.BatchMLAPagedAttentionWrapper(workspace())
        return wrapper.plan(*given, HQ, RANK, ROPE, PAGE, True, SCALE, "float32", "float32")

    plan(pool.indptr)
    refused(r"indptr is \[0, 3, 2, 6\]: give where each|which has -1 pages", plan, ints(0, 3, 2, 6))
    refused(r"indptr is \[-1, 3, 4, 6\]: give where each", plan, ints(-1, 3, 4, 6))
    refused("indptr ends at 6, but indices has 3 pages", plan, pool.indptr, pool.indices[:3])


def test_no_rows_and_no_sequences():
    k, none, table = (
        normal(5, HKV, DIM),
        normal(0, HQ, DIM),
        torch.zeros(0, 4, dtype=torch.int32, device=DEVICE),
    )
    out, lse = fi.single_prefill_with_kv_cache(none, k, k, return_lse=True)
    assert out.shape == (0, HQ, DIM) and lse.shape == (0, HQ)
    out, lse = fi.single_decode_with_kv_cache(normal(HQ, DIM), k[:0], k[:0], return_lse=True)
    assert not out.any() and lse.isneginf().all()
    cache = normal(3, 2, HKV, PAGE, DIM)
    given = (none, cache, workspace(), table, ints(), 9, SCALE)
    assert fi.trtllm_batch_decode_with_kv_cache(*given).shape == none.shape
    pool = normal(3, PAGE, RANK + ROPE)
    for lists in ({"block_tables": table}, {"block_tables": table[:, None], "sparse_mla_top_k": 4}):
        out = fi.trtllm_batch_decode_with_kv_cache_mla(
            normal(0, 1, HQ, RANK + ROPE),
            pool,
            workspace(),
            16,
            RANK,
            ROPE,
            seq_lens=ints(),
            max_seq_len=9,
            **lists,
        )
        assert out.shape == (0, 1, HQ, RANK)


def test_rows_of_another_number_are_refused():
    v, s = normal(3, HQ, DIM), normal(3, HQ)
    for mask in (torch.tensor([True]), torch.ones(3, 1, dtype=torch.bool)):
        refused(r"mask is .*: it must be \[3\]", fi.merge_state_in_place, v, s, v, s, mask=mask.to(DEVICE))
    refused(
        "seq_lens is of 1 sequences and append_indptr of 2",
        fi.get_batch_indices_positions,
        ints(0, 2, 5),
        ints(4),
        5,
    )
    if DEVICE == "cpu":
        says = "nnz is 4, but append_indptr ends at 5: give nnz=5, or more"
        refused(says, fi.get_batch_indices_positions, ints(0, 2, 5), ints(4, 9), 4)


def test_rows_past_the_last_sequence_are_of_none():  # as FlashInfer pads the batches of a CUDA graph
    found = fi.get_batch_indices_positions(ints(0, 2, 5), ints(4, 9), 7)
    assert [x.tolist() for x in found] == [[0, 0, 1, 1, 1, -1, -1], [2, 3, 6, 7, 8, 0, 0]]


def test_a_type_of_o_and_sinks_that_would_not_be_read_are_refused():
    pool, q = Pool("HND"), normal(sum(QUERIES), HQ, DIM)
    given, call = context(pool, q), fi.trtllm_batch_context_with_kv_cache
    half = torch.empty_like(q, dtype=torch.float16)
    assert call(*given, out=half) is half and call(*given, out=half, out_dtype="float16") is half
    refused(
        "out_dtype is torch.float32, but out is float16 .*: leave out_dtype out",
        call,
        *given,
        out=half,
        out_dtype=torch.float32,
    )
    k, v = torch.cat(pool.k), torch.cat(pool.v)
    packed = ((q, k, v), "SEPARATE_Q_K_V", workspace(), ints(*KEYS), 5, 9, SCALE, 1.0, 3, *given[-2:])
    refused(
        "out_dtype is torch.float32, but out is",
        fi.trtllm_fmha_v2_prefill,
        *packed,
        out=half,
        out_dtype="float32",
    )
    for sinks in ([], [normal(HQ), normal(HQ)]):
        says = f"sinks is a list of {len(sinks)}: give one tensor"
        refused(says, call, *given, sinks=sinks)
        refused(says, fi.trtllm_fmha_v2_prefill, *packed, sinks=sinks)
        refused(says, latents, sinks=sinks)
    if DEVICE == "cpu":
        says = "seq_lens says 5 for sequence 1, but cum_seq_lens_kv 4"
        refused(says, fi.trtllm_fmha_v2_prefill, *packed[:3], ints(9, 5, 4), *packed[4:])

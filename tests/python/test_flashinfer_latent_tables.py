"""FlashInfer's functions for latent attention without a plan, by a table or by lists of tokens, against fp64."""

import math

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from flashjit import flashinfer as fi  # noqa: E402
from test_flashinfer import DEVICE, check, exact, ints, seed, workspace  # noqa: E402, F401
from test_kv_format import decode_fp8_ds_mla  # noqa: E402

RANK, ROPE, HEADS = 64, 16, 3
LENGTHS = (7, 2)
MLA = {"bmm1_scale": 0.2, "qk_nope_head_dim": 32, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}


def latents(dtype=torch.float32):
    """Pages of 4 rows, a table of two sequences, and their keys [keys, 1, columns] in fp32."""
    pages = torch.randn(4, 4, RANK + ROPE, device=DEVICE).to(dtype)
    table = ints(3, 1, 0, 0).view(2, 2)
    return (
        pages,
        table,
        [pages[table[i].long()].float().flatten(0, 1)[:n, None] for i, n in enumerate(LENGTHS)],
    )


def attend_to(keys, q, scale=0.2, **options):
    return exact(q, keys, keys[..., :RANK], scale=scale, **options)


@pytest.mark.parametrize("packed", [True, False])
def test_latents_by_a_table(packed):
    pages, table, keys = latents()
    counts = (1, 2) if packed else (2, 2)
    q, sinks = torch.randn(sum(counts), HEADS, RANK + ROPE, device=DEVICE), torch.randn(HEADS, device=DEVICE)
    named = {"cum_seq_lens_q": ints(0, 1, 3), "max_q_len": 2} if packed else {}
    given = q if packed else q.view(2, 2, HEADS, -1)
    common = {"block_tables": table, "seq_lens": ints(*LENGTHS), "max_seq_len": 16, **MLA, **named}
    out, lse = fi.trtllm_batch_decode_with_kv_cache_mla(
        given, pages[:, None], workspace(), **common, bmm2_scale=2.0, sinks=[sinks], return_lse=True
    )
    assert out.shape == (*given.shape[:-1], RANK)
    ends = torch.tensor(counts).cumsum(0).tolist()
    for i, rows in enumerate(slice(end - n, end) for n, end in zip(counts, ends)):
        wanted, of_base_2 = attend_to(keys[i], q[rows], causal=True, sinks=sinks)
        check((out.flatten(0, -3)[rows], lse[rows]), (2 * wanted, of_base_2))
    natural = torch.empty_like(lse)
    mine = torch.empty_like(out)
    found = fi.trtllm_prefill_with_kv_cache_mla(
        given, pages, workspace(), **common, out=mine, lse=natural, sinks=sinks, return_lse_base="basee"
    )
    assert found is mine
    torch.testing.assert_close(natural, lse / math.log2(math.e))
    torch.testing.assert_close(mine, out / 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_latents_and_queries_of_8_bits(dtype):
    pages, table, keys = latents(dtype)
    q = torch.randn(2, 1, HEADS, RANK + ROPE, device=DEVICE).to(dtype)
    room = {"block_tables": table, "seq_lens": ints(*LENGTHS), "max_seq_len": 8}
    out = fi.xqa_batch_decode_with_kv_cache_mla(q, pages, workspace(), **room, **MLA, bmm2_scale=0.5)
    assert out.dtype == torch.bfloat16
    mine = torch.empty_like(out)
    places = (table.view(torch.uint32), ints(*LENGTHS)[:, None])
    flat = pages.flatten(0, 1)
    fi.xqa_mla(q, flat, flat, *places, mine, workspace(), workspace(), 4, q_scale=0.4, kv_scale=0.5)
    assert torch.equal(mine, out)
    for i in range(2):
        wanted = attend_to(keys[i], q[i].float())[0]
        torch.testing.assert_close(out[i].double().cpu(), wanted / 2, rtol=2e-2, atol=2e-2)
    with pytest.raises(flashjit.Unsupported, match="v_cache has other memory than k_cache"):
        fi.xqa_mla(q, flat, flat.clone(), *places, mine, workspace(), workspace(), 4)
    with pytest.raises(flashjit.Unsupported, match="bmm2_scale is .*: for latents give a number"):
        scale = torch.ones(1, device=DEVICE)
        fi.xqa_batch_decode_with_kv_cache_mla(q, pages, workspace(), **room, **MLA, bmm2_scale=scale)


@pytest.mark.parametrize("given", ["rows", "sequences", "none"])
def test_latents_of_the_tokens_that_each_query_names(given):
    pages, _, _ = latents()
    flat = pages.flatten(0, 1)[:, None]
    q = torch.randn(2, 2, HEADS, RANK + ROPE, device=DEVICE)
    lists = torch.stack([torch.randperm(16, device=DEVICE)[:6] for _ in range(4)]).int()
    lists[1, 4:] = -1
    lengths = {"rows": ints(6, 3, 1, 5), "sequences": ints(5, 9), "none": None}[given]
    counts = {"rows": (6, 3, 1, 5), "sequences": (4, 4, 6, 6), "none": (6, 4, 6, 6)}[given]
    common = {"block_tables": lists.view(2, 2, 6), "max_seq_len": 16, "sparse_mla_top_k": 6, **MLA}
    out, lse = fi.trtllm_batch_decode_with_kv_cache_mla(
        q, pages, workspace(), seq_lens=lengths, return_lse=True, **common
    )
    for i, n in enumerate(counts):
        keys = flat[lists[i, :n].long()]
        check((out.flatten(0, 1)[i : i + 1], lse[i : i + 1]), attend_to(keys, q.flatten(0, 1)[i : i + 1]))


def test_rows_of_656_bytes_by_lists():
    latents = torch.randn(1, 1, 32, 576, device=DEVICE)
    packed, _ = flashjit.quantize(latents, format="fp8_ds_mla")
    keys = torch.from_numpy(decode_fp8_ds_mla(packed.view(32, 656).cpu().numpy(), None))
    q = torch.randn(2, 1, 16, 576, device=DEVICE)
    lists = torch.stack([torch.randperm(32, device=DEVICE)[:8] for _ in range(2)]).int()
    given = (q, packed.view(2, 16, 656), workspace(), 128, 512, 64, lists[:, None], None, 32, 8)
    out = fi.trtllm_batch_decode_with_kv_cache_mla(*given, bmm1_scale=0.05)
    for i in range(2):
        own = keys[lists[i].cpu().long()][:, None]
        wanted = exact(q[i], own, own[..., :512], scale=0.05)[0]
        torch.testing.assert_close(out[i].double().cpu(), wanted, rtol=1e-4, atol=1e-4)

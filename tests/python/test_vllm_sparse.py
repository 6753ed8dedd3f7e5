"""flashjit.vllm's sparse latent attention over a stand-in of vLLM's interface, against fp64."""

import importlib
import types

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
import vllm_standin  # noqa: E402
from vllm_standin import DEVICE  # noqa: E402

HEADS, BLOCK, TOPK = 3, 16, 6
OLD, NEW = (20, 0, 3), (1, 18, 4)


@pytest.fixture
def sparse(monkeypatch):
    torch.manual_seed(0)
    vllm_standin.install(monkeypatch)
    return importlib.import_module("flashjit.vllm._sparse_latent")


def stored(rows, name):
    """A cache of these latents [blocks, rows of a block, columns], a layer, and the latents as they are read."""
    layer = types.SimpleNamespace(_k_scale=torch.tensor(0.5, device=DEVICE))
    if name == "auto":
        return rows, layer, rows
    if name == "fp8":
        codes = (rows / 0.5).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), layer, codes.float() * 0.5
    codes, _ = flashjit.quantize(rows[:, None], format=name)
    values, scales = (
        codes[:, 0, :, :512].view(torch.float8_e4m3fn),
        codes[:, 0, :, 512:528].view(torch.float32),
    )
    tail = codes[:, 0, :, 528:].view(torch.bfloat16).float()
    latents = values.float() * scales.repeat_interleave(128, -1)
    return codes[:, 0], layer, torch.cat((latents, tail), -1)


@pytest.mark.parametrize(
    "name, rank, rope", [("auto", 64, 16), ("fp8", 64, 16), ("auto", 64, 0), ("fp8_ds_mla", 512, 64)]
)
@pytest.mark.parametrize("has_indexer", [False, True])
def test_queries_attend_to_the_keys_of_their_lists(sparse, name, rank, rope, has_indexer):
    table = (torch.randperm(8, device=DEVICE)[:6] + 1).int().view(3, 2)
    cache, layer, latents = stored(torch.randn(9, BLOCK, rank + rope, device=DEVICE), name)
    lists = torch.full((sum(NEW) + 2, TOPK), -1, dtype=torch.int32, device=DEVICE)
    seen = []
    for old, new in zip(OLD, NEW):
        for row in range(new):
            known = old + row + 1
            keys = torch.randperm(known)[: min(TOPK, known)]
            lists[len(seen), : len(keys)] = keys.int()
            seen.append(torch.zeros(old + new, dtype=torch.bool).index_fill(0, keys, True))
    common, starts = vllm_standin.described(OLD, NEW, table, max_seq_len=23)
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(is_mm_prefix_lm=False))
    metadata = sparse.FlashjitSparseLatentBuilder(None, ["layer"], config, DEVICE).build(0, common)
    assert (metadata.num_decode_tokens, metadata.num_prefills, metadata.num_decodes) == (sum(NEW), 0, 3)
    indexer = types.SimpleNamespace(topk_indices_buffer=lists)
    given = {"indexer": indexer} if has_indexer else {"topk_indices_buffer": lists}
    impl = sparse.FlashjitSparseLatentImpl(
        HEADS, rank + rope, 0.1, 1, kv_cache_dtype=name, kv_lora_rank=rank, **given
    )
    q = torch.randn(sum(NEW), HEADS, rank + rope, device=DEVICE)
    out, lse = impl.forward_mqa((q[..., :rank], q[..., rank:]), cache, metadata, layer)
    assert lse is None
    for i, (old, new) in enumerate(zip(OLD, NEW)):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        keys = torch.cat([latents[page] for page in table[i].tolist()])[: old + new, None]
        wanted, _ = exact_attention.exact(
            q[rows], keys, keys[..., :rank], scale=0.1, seen=torch.stack(seen[rows])
        )
        torch.testing.assert_close(out[rows].double().cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_what_no_kernel_serves_is_refused(sparse):
    ask = sparse.FlashjitSparseLatentBackend.supports_combination
    for name in ("auto", "fp8", "fp8_ds_mla"):
        for capability in ((8, 0), (9, 0)):
            assert ask(576, torch.bfloat16, name, 64, device_capability=capability) is None
    assert "or FP8, not fp8_per_token_head" in ask(576, torch.bfloat16, "fp8_per_token_head", 64)
    with pytest.raises(flashjit.Unsupported, match="sliding_window is given"):
        sparse.FlashjitSparseLatentImpl(HEADS, 80, 0.1, 1, sliding_window=4, kv_lora_rank=64)
    impl = sparse.FlashjitSparseLatentImpl(HEADS, 80, 0.1, 1, kv_lora_rank=64)
    with pytest.raises(flashjit.InvalidArgument, match="neither an indexer nor topk_indices_buffer"):
        impl.forward_mqa(torch.zeros(1), torch.zeros(1), None, None)
    impl.topk_indices_buffer = torch.zeros(1)
    assert impl.topk_indices_buffer is not None and sparse.FlashjitSparseLatentBackend.is_sparse()


def test_vllm_0_26_asks_for_a_cache_s_size(sparse):
    size = sparse.FlashjitSparseLatentBackend.get_kv_cache_shape
    assert size(5, 64, 1, 576) == size(5, 64, 1, 576, "fp8") == (5, 64, 576)
    assert size(5, 64, 1, 576, "fp8_ds_mla") == (5, 64, 656)

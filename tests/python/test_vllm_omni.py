"""flashjit.vllm_omni's kernel of SPARSE_ATTN, against fp64."""

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
from flashjit.vllm_omni import sparse_attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUERIES, KEYS, HQ, HKV, DIM = 40, 72, 4, 2, 32


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return tuple(
        torch.randn(2, n, h, DIM, device=DEVICE) for n, h in ((QUERIES, HQ), (KEYS, HKV), (KEYS, HKV))
    )


def check(out, qkv, seen, bias=None):
    """seen: bool [b, h, queries, keys]."""
    for b in range(2):
        for h in range(HQ):
            q, k, v = (x[b, :, i : i + 1] for x, i in zip(qkv, (h, h // 2, h // 2)))
            wanted, _ = exact_attention.exact(
                q, k, v, scale=0.2, seen=seen[b, h], bias=None if bias is None else bias[b, h]
            )
            torch.testing.assert_close(out[b, :, h : h + 1].double().cpu(), wanted, rtol=1e-5, atol=1e-5)


def expanded(blocks, rows, keys):
    wide = blocks.repeat_interleave(rows, 2).repeat_interleave(keys, 3)[..., :QUERIES, :KEYS]
    return wide.expand(2, HQ, -1, -1)


def test_blocks_that_are_given(qkv):
    blocks = torch.rand(2, 1, 3, 3, device=DEVICE) < 0.6
    out = sparse_attention(
        *qkv, {"block_mask": blocks, "block_size": (16, 32), "denoise_step_idx": 3}, False, 0.2
    )
    check(out, qkv, expanded(blocks, 16, 32))


@pytest.mark.parametrize("prefix", [0, 20])
def test_blocks_with_the_largest_products_of_means(qkv, prefix):
    params = {"topk": 0.4, "block_size": 16, "protected_kv_prefix": prefix}
    out = sparse_attention(*qkv, params, is_causal=False, softmax_scale=0.2)
    q, k = qkv[0].double().transpose(1, 2), qkv[1].double().transpose(1, 2).repeat_interleave(2, 1)
    means = [torch.stack([part.mean(2) for part in x.split(16, 2)], 2) for x in (q, k)]
    kept = (means[0] @ means[1].transpose(2, 3)).topk(2, 3).indices  # of 5 blocks
    blocks = torch.zeros(2, HQ, 3, 5, dtype=torch.bool, device=DEVICE).scatter_(3, kept, True)
    blocks[..., : (prefix + 15) // 16] = True
    check(out, qkv, expanded(blocks, 16, 16))


def test_windows_and_masks(qkv):
    at, key = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    near = ((key >= at - 5) & (key <= at + 9)).expand(2, HQ, -1, -1)
    check(sparse_attention(*qkv, {"window": (5, 9)}, False, 0.2), qkv, near)
    padding = torch.arange(KEYS, device=DEVICE) < torch.tensor([[30], [70]], device=DEVICE)
    out = sparse_attention(*qkv, {"window": (None, 40), "attn_mask": padding}, False, 0.2)
    check(out, qkv, (key <= at + 40) & padding[:, None, None].cpu().expand(-1, HQ, -1, -1))
    bias = torch.randn(1, HQ, 1, KEYS, device=DEVICE)
    out = sparse_attention(*qkv, {"window": (5, 9), "attn_mask": bias}, False, 0.2)
    check(out, qkv, near, bias.expand(2, -1, -1, -1))


def test_what_has_no_meaning_is_refused(qkv):
    for params, why in (
        ({}, "none of block_mask, topk and window"),
        ({"topk": 30}, "topk is 30: it is a share"),
        ({"topk": 0.5, "block_mask": torch.ones(1, 1)}, "block_mask and topk are both given"),
        ({"topk": 0.5, "block_size": 100}, "block_size is 100: give one number or two"),
        ({"topk": 0.5, "block_size": (16, 16, 16)}, "block_size is"),
        ({"topk": 0.5, "block_size": None}, "block_size is None"),
        ({"topk": 0.5, "protected_kv_prefix": -1}, "protected_kv_prefix is -1"),
        (None, "params is a NoneType"),
        ({"window": 3}, "give .left, right."),
        ({"window": (1, 1), "attn_mask": torch.ones(3, 5)}, "it does not fit"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=why):
            sparse_attention(*qkv, params)
    q, k, v = qkv
    for given, why in (
        ((None, k, v), "query is a NoneType"),
        ((q[0], k, v), "give a tensor .b, rows, h, d."),
        ((q, k[:, :, :0], v), "a multiple of key's"),
        ((q, k[..., :8], v), "b and d must be equal"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=why):
            sparse_attention(*given, {"topk": 0.5})
    assert sparse_attention.capabilities == {"supports_attention_mask": True}

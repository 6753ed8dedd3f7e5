"""Blocks of any sizes, as FlashInfer's VariableBlockSparseAttentionWrapper has them, against a softmax in fp64; and what its
BlockSparseAttentionWrapper makes of BSR matrices that are unusual."""

import math

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
from flashjit import flashinfer as fi  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HQ, HKV, DIM = 4, 2, 32
ROWS, COLUMNS = ((5, 0, 20, 8), (16, 1, 3, 13)), ((7, 33), (20, 20))


def planned(**more):
    torch.manual_seed(0)
    wrapper = fi.VariableBlockSparseAttentionWrapper(torch.empty(16, dtype=torch.uint8, device=DEVICE))
    blocks = torch.rand(HKV, 4, 2) < 0.6
    blocks[:, :, 0] |= ~blocks.any(2)  # each query has keys
    sizes = [torch.tensor(x, dtype=torch.int32) for x in (ROWS, COLUMNS)]
    given = {"block_mask_map": blocks, "block_row_sz": sizes[0], "block_col_sz": sizes[1]}
    given |= {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": DIM, "q_data_type": "float32", **more}
    wrapper.plan(**given)
    pairs = [
        blocks[i].repeat_interleave(sizes[0][i], 0).repeat_interleave(sizes[1][i], 1) for i in range(HKV)
    ]
    return wrapper, pairs


@pytest.mark.parametrize("cap", [None, 2.0])
def test_blocks_of_any_sizes(cap):
    wrapper, pairs = planned(logits_soft_cap=cap, sm_scale=0.3)
    q, k, v = (torch.randn(h, n, DIM, device=DEVICE) for h, n in ((HQ, 33), (HKV, 40), (HKV, 40)))
    out, lse = torch.empty(HQ, 33, DIM, device=DEVICE), torch.empty(HQ, 33, device=DEVICE)
    assert wrapper.run(q, k, v, out, lse) is out
    for (found, of_base_2), again in zip([wrapper.run_return_lse(q, k, v)], [(out, lse)]):
        torch.testing.assert_close((found, of_base_2), again)
    for h in range(HQ):
        of_kv = h // (HQ // HKV)
        more = {"cap": cap} if cap else {}
        wanted, natural = exact_attention.exact(
            q[h][:, None], k[of_kv][:, None], v[of_kv][:, None], scale=0.3, seen=pairs[of_kv], **more
        )
        torch.testing.assert_close(out[h].double().cpu(), wanted[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[h].double().cpu(), natural[:, 0] / math.log(2), rtol=1e-5, atol=1e-5)


def test_blocks_that_do_not_fit_are_refused():
    for more, says in (
        ({"block_row_sz": torch.tensor(((5, 0, 20, 8), (16, 1, 3, 12)))}, r"sum up to \[33, 32\]"),
        ({"block_col_sz": torch.tensor(((40,), (40,)))}, "block_mask_map is .*it must be .2, 4, 1."),
        ({"block_mask_map": torch.ones(4, 2)}, "block_mask_map is .*give a tensor of 3 dimensions"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=says):
            planned(**more)
    with pytest.raises(flashjit.Unsupported, match="causal"):
        planned(causal=True)
    wrapper, _ = planned()
    q, k = torch.randn(HQ, 33, DIM, device=DEVICE), torch.randn(HKV, 40, DIM, device=DEVICE)
    with pytest.raises(flashjit.InvalidArgument, match=r"k is .*plan\(\) was given \[2, 40, 32\]"):
        wrapper.run(q, k[:, :39], k)
    with pytest.raises(flashjit.InvalidArgument, match="before plan"):
        fi.VariableBlockSparseAttentionWrapper(q).run(q, k, k)


def run_bsr(indptr, indices, **more):
    torch.manual_seed(0)
    wrapper = fi.BlockSparseAttentionWrapper(torch.empty(16, dtype=torch.uint8, device=DEVICE))
    given = [torch.tensor(x, device=DEVICE) for x in (indptr, indices)]
    wrapper.plan(*given, 64, 96, 16, 32, HQ, HKV, DIM, q_data_type="float32", **more)
    return wrapper.run(*(torch.randn(n, h, DIM, device=DEVICE) for n, h in ((64, HQ), (96, HKV), (96, HKV))))


def test_a_bsr_matrix_may_name_blocks_unsorted_and_twice():
    wanted = run_bsr([0, 2, 2, 3, 4], [0, 2, 1, 0])
    assert torch.equal(run_bsr([0, 3, 3, 4, 5], [2, 0, 2, 1, 0]), wanted)
    masks = torch.ones(4, 16, 32, dtype=torch.int32)
    torch.testing.assert_close(run_bsr([0, 2, 2, 3, 4], [2, 0, 1, 0], mask=masks), wanted)


@pytest.mark.parametrize(
    "indptr, indices, says",
    [
        ([0, 2, 1, 3, 4], [2, 0, 1, 0], "steps down to -1: it begins with 0 and does not fall"),
        ([1, 2, 2, 3, 4], [2, 0, 1, 0], "begins with 1"),
        ([0, 2, 2, 3, 4], [2, 2, 1, 0], "name a block twice"),
    ],
)
def test_bsr_matrices_that_contradict_themselves_are_refused(indptr, indices, says):
    with pytest.raises(flashjit.InvalidArgument, match=says):
        run_bsr(indptr, indices, mask=torch.ones(4, 16, 32))

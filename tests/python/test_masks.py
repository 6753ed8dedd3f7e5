"""flashjit.masks against their definitions, over dense keys and over pages."""

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402  (needs PyTorch)
from flashjit import masks  # noqa: E402

BATCH, QUERIES, KEYS, HEADS, PAGE = 2, 5, 23, 2, 4
LENGTHS = [23, 14]


def seen_by(mask):
    """[batch, queries, keys]: which keys each query attends to, read off V = identity."""
    torch.manual_seed(0)
    q = torch.zeros(BATCH, HEADS, QUERIES, 32)
    pages = (KEYS + PAGE - 1) // PAGE
    table = torch.randperm(BATCH * pages, dtype=torch.int32).view(BATCH, pages)
    v = torch.full((BATCH * pages, HEADS, PAGE, 32), float("nan"))
    k = torch.full((BATCH * pages, HEADS, PAGE, 32), float("nan"))
    for b, length in enumerate(LENGTHS):
        for kv in range(length):
            page = int(table[b, kv // PAGE])
            k[page, :, kv % PAGE] = torch.randn(HEADS, 32)
            v[page, :, kv % PAGE] = torch.eye(32)[kv]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = flashjit.attention(q, k, v, mask_mod=mask, page_table=table, kv_lengths=lengths, max_seqlen_kv=KEYS)
    return out[:, 0, :, :KEYS] > 0


def expected(attends):
    """attends(b, q, kv, at): at is the query's place among the keys."""
    return torch.tensor(
        [
            [[kv < n and attends(b, q, kv, q + n - QUERIES) for kv in range(KEYS)] for q in range(QUERIES)]
            for b, n in enumerate(LENGTHS)
        ]
    )


def check(mask, attends):
    assert torch.equal(seen_by(mask), expected(attends))


def ints(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_chunked():
    check(masks.chunked(8), lambda b, q, kv, at: kv <= at and kv // 8 == at // 8)
    with pytest.raises(flashjit.InvalidArgument, match="size is 0"):
        masks.chunked(0)


def test_prefix():
    length = ints(20, 3).view(2)
    check(masks.prefix(length), lambda b, q, kv, at: kv <= at or kv < int(length[b]))


def test_mm_prefix():
    first, last = ints([0, 2, 3, 0, 20], [9, 9, 0, 0, 13]), ints([0, 22, 23, 0, 23], [12, 14, 0, 0, 14])
    check(
        masks.mm_prefix(first, last),
        lambda b, q, kv, at: kv <= at or int(first[b, q]) <= kv < int(last[b, q]),
    )


PARENTS = [[-1, 0, 0, 1, 3], [-1, -1, 1, 2, 0]]


def line_of(b, q):
    found = set()
    while q >= 0:
        found.add(q)
        q = PARENTS[b][q]
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tree(dtype):
    parents = torch.tensor(PARENTS, dtype=dtype)

    def attends(b, q, kv, at):
        own = kv - (LENGTHS[b] - QUERIES)
        return own < 0 or own in line_of(b, q)

    check(masks.tree(parents), attends)
    check(masks.tree(ancestors=masks.ancestors_of(parents)), attends)


def test_deep_trees_have_all_their_ancestors():
    chain = torch.arange(-1, 63).view(1, 64)
    bits = masks.ancestors_of(chain)
    assert [int(n) & (2**64 - 1) for n in bits[0]] == [2 ** (n + 1) - 1 for n in range(64)]


def test_positions():
    generator = torch.Generator().manual_seed(3)
    q_positions = torch.randint(0, 40, (BATCH, QUERIES), generator=generator, dtype=torch.int32)
    kv_positions = torch.randint(0, 40, (BATCH, KEYS), generator=generator, dtype=torch.int32)
    check(
        masks.positions(q_positions, kv_positions),
        lambda b, q, kv, at: int(kv_positions[b, kv]) <= int(q_positions[b, q]),
    )


def test_interleaved():
    q_positions = ints([10, 20, 30, 44, 60], [1, 2, 3, 4, 5])
    check(masks.interleaved(q_positions, 3, 1), lambda b, q, kv, at: kv * 3 + 1 <= int(q_positions[b, q]))
    with pytest.raises(flashjit.InvalidArgument, match="rank is 3 of 3"):
        masks.interleaved(q_positions, 3, 3)


def test_causal_if():
    check(masks.causal_if(ints(1, 0).view(2)), lambda b, q, kv, at: b == 1 or kv <= at)


def test_wrong_tensors_are_named():
    with pytest.raises(flashjit.WrongType, match=r"flags is int64 \[2\]: give a tensor int32 \[batch\]"):
        masks.causal_if(torch.tensor([1, 0]))
    with pytest.raises(flashjit.WrongType, match="parents is no tensor of ints"):
        masks.tree(torch.zeros(2, 3))
    with pytest.raises(flashjit.InvalidArgument, match="parents is of 65 queries: a tree has at most 64"):
        masks.tree(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(flashjit.InvalidArgument, match="one of the two"):
        masks.tree()
    with pytest.raises(flashjit.InvalidArgument, match="from 3 on, or below -1"):
        masks.tree(torch.tensor([[-1, 0, -2]]))
    for circle in ([0, 0, 1], [-1, 2, 1]):
        with pytest.raises(flashjit.InvalidArgument, match="parents has a circle"):
            masks.tree(torch.tensor([circle]))


def test_a_mask_of_fewer_queries_is_refused():
    q, cache = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 9, 16)
    given = {"cache": True, "kv_lengths": ints(9).view(1)}
    for mask in (masks.tree(torch.tensor([[-1, 0, 1]])), masks.interleaved(ints([6, 7, 8]).view(1, 3), 2, 0)):
        with pytest.raises(
            flashjit.InvalidArgument, match="q has 4 queries, but the mask's tensors are of 3"
        ):
            flashjit.attention(q, cache, cache, mask_mod=mask, **given)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: masks.prefix(torch.zeros(0, dtype=torch.int32)),
        lambda: masks.mm_prefix(*torch.zeros(2, 0, QUERIES, dtype=torch.int32)),
        lambda: masks.tree(torch.zeros(0, QUERIES, dtype=torch.int32)),
        lambda: masks.positions(
            torch.zeros(0, QUERIES, dtype=torch.int32), torch.zeros(0, KEYS, dtype=torch.int32)
        ),
        lambda: masks.interleaved(torch.zeros(0, QUERIES, dtype=torch.int32), 2, 0),
        lambda: masks.causal_if(torch.zeros(0, dtype=torch.int32)),
    ],
)
def test_a_batch_of_no_sequences(mask):
    q, k = torch.zeros(0, HEADS, QUERIES, 32), torch.zeros(0, HEADS, KEYS, 32)
    out, lse = flashjit.attention(q, k, k, mask_mod=mask(), return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    compiled = torch.compile(flashjit.attention, backend="eager")
    assert compiled(q, k, k, mask_mod=mask()).shape == q.shape


def test_a_captured_tensor_without_elements_is_refused_where_there_are_queries():
    q, k = torch.zeros(1, HEADS, QUERIES, 32), torch.zeros(1, HEADS, KEYS, 32)
    with pytest.raises(flashjit.InvalidArgument, match="no element to read"):
        flashjit.attention(q, k, k, mask_mod=masks.causal_if(torch.zeros(0, dtype=torch.int32)))

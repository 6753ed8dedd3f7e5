"""attention() on a cache in pages or slots: against each sequence by itself, on the GPU where there is one."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from flashjit import flashinfer  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LENGTHS = [37, 0, 64, 5]
HEADS, HEADS_KV, DIM = 4, 2, 64


def exact(q, k, v, softcap=None):
    """One sequence in float64: q [heads, queries, dim], the last query sees the last key."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    s = q.shape[2] ** -0.5 * q @ k.transpose(1, 2)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    rows, keys = torch.arange(q.shape[1], device=q.device)[:, None], torch.arange(k.shape[1], device=q.device)
    s = s.masked_fill(keys > rows + k.shape[1] - q.shape[1], -math.inf)
    return s.softmax(-1).nan_to_num(0) @ v


class Cache:
    """Sequences of LENGTHS in pages of `rows`, in any order, with NaN in every row that is no key."""

    def __init__(self, rows, layout="nhd"):
        torch.manual_seed(rows)
        self.keys = [torch.randn(HEADS_KV, n, DIM).to(DEVICE, DTYPE) for n in LENGTHS]
        self.values = [torch.randn(HEADS_KV, n, DIM).to(DEVICE, DTYPE) for n in LENGTHS]
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
        columns = -(-max(LENGTHS) // rows) + 1
        pages = sum(-(-n // rows) for n in LENGTHS) + 3
        if layout == "nhd":
            pool = torch.full(
                (2, pages, rows, HEADS_KV, DIM), math.nan, dtype=DTYPE, device=DEVICE
            ).transpose(2, 3)
            self.k, self.v = pool
        elif layout == "hnd":
            self.k, self.v = torch.full((2, pages, HEADS_KV, rows, DIM), math.nan, dtype=DTYPE, device=DEVICE)
        else:  # K and V side by side in each page
            pool = torch.full((pages, 2, rows, HEADS_KV, DIM), math.nan, dtype=DTYPE, device=DEVICE)
            self.k, self.v = pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2)
        self.table = torch.full((len(LENGTHS), columns + 2), 2**31 - 1, dtype=torch.int32, device=DEVICE)[
            :, :columns
        ]
        free = iter(torch.randperm(pages).tolist())
        for i, n in enumerate(LENGTHS):
            for column, begin in enumerate(range(0, n, rows)):
                page, end = next(free), min(begin + rows, n)
                self.table[i, column] = page
                self.k[page, :, : end - begin] = self.keys[i][:, begin:end]
                self.v[page, :, : end - begin] = self.values[i][:, begin:end]


def expect_close(got, want):
    limit = 1e-5 if got.dtype == torch.float32 else 2e-2
    assert torch.isfinite(got).all()
    assert (got.double() - want).abs().max() <= limit if got.numel() else True


@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved"])
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 64, 256])
def test_pages(rows, layout):
    cache = Cache(rows, layout)
    q = torch.randn(len(LENGTHS), HEADS, 3, DIM).to(DEVICE, DTYPE)
    out = flashjit.attention(
        q, cache.k, cache.v, causal=True, page_table=cache.table, kv_lengths=cache.lengths
    )
    for i in range(len(LENGTHS)):
        expect_close(out[i], exact(q[i], cache.keys[i], cache.values[i]))


def in_one_row(cache, rows):
    """The table as CSR has it: (indptr, indices), with entries of no sequence in front of all and behind."""
    counts = [-(-n // rows) for n in LENGTHS]
    none = cache.table.new_full((2,), 2**31 - 1)
    indptr = torch.tensor([0, *counts], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32) + 2
    return indptr, torch.cat([none, *[row[:n] for row, n in zip(cache.table, counts)], none])


@pytest.mark.parametrize("rows", [1, 3, 16, 256])
@pytest.mark.parametrize("lengths", ["kv_lengths", "last_page_len"])
def test_a_table_in_one_row(rows, lengths):
    cache = Cache(rows)
    q = torch.randn(len(LENGTHS), HEADS, 3, DIM).to(DEVICE, DTYPE)
    table, given = in_one_row(cache, rows), {"kv_lengths": cache.lengths}
    if lengths == "last_page_len":
        table, given = (*table, torch.where(cache.lengths > 0, (cache.lengths - 1) % rows + 1, 0)), {}
    given["max_seqlen_kv"] = max(LENGTHS)
    out = flashjit.attention(q, cache.k, cache.v, causal=True, page_table=table, **given)
    for i in range(len(LENGTHS)):
        expect_close(out[i], exact(q[i], cache.keys[i], cache.values[i]))
    compiled = torch.compile(flashjit.attention, backend="eager", fullgraph=True)
    got = compiled(q, cache.k, cache.v, causal=True, page_table=table, **given)
    assert torch.equal(got, out)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda indptr, indices: (indptr[1:], indices), r"page_table's indptr is .*: it must be int32 \[5\]"),
        (lambda indptr, indices: (indptr, indices.long()), "page_table's indices are int64"),
        (lambda indptr, indices: (indptr, indices[None]), "page_table's indices are"),
        (lambda indptr, indices: (indptr,), "page_table has 1 parts"),
        (lambda indptr, indices: (indptr.tolist(), indices), "page_table's indptr is a list"),
        (lambda indptr, indices: [indptr], "page_table has 1 parts: give .indptr, indices."),
        pytest.param(
            lambda indptr, indices: (indptr + 100, indices),
            "indptr ends at .*, but indices has .* entries",
            marks=pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's values are not read"),
        ),
        (lambda indptr, indices: (indptr, indices, indptr[1:]), "are both given"),
    ],
)
def test_wrong_tables_in_one_row_are_refused(change, match):
    cache = Cache(16)
    q = torch.randn(len(LENGTHS), HEADS, 3, DIM).to(DEVICE, DTYPE)
    with pytest.raises(flashjit.Error, match=match):
        flashjit.attention(
            q, cache.k, cache.v, page_table=change(*in_one_row(cache, 16)), kv_lengths=cache.lengths
        )


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's values are not read")
@pytest.mark.parametrize("last", [-3, 0, 17])
def test_a_wrong_last_page_is_refused(last):
    cache = Cache(16)
    table = in_one_row(cache, 16)
    lasts = torch.where(cache.lengths > 0, last, 0).int()
    q = torch.randn(len(LENGTHS), HEADS, 1, DIM).to(DTYPE)
    with pytest.raises(flashjit.InvalidArgument, match=f"last_page_len has {last} rows, .* give 1 to 16"):
        flashjit.attention(q, cache.k, cache.v, page_table=(*table, lasts))
    with pytest.raises(flashjit.InvalidArgument, match=f"last_page_len has {last} rows, .* give 1 to 16"):
        flashinfer.get_seq_lens(table[0], lasts, 16)


def test_sequences_that_share_a_row_of_the_table():
    cache = Cache(16)
    q = torch.randn(3, HEADS, 1, DIM).to(DEVICE, DTYPE)
    lengths = torch.tensor([64, 20, 33], dtype=torch.int32, device=DEVICE)
    out = flashjit.attention(
        q, cache.k, cache.v, page_table=cache.table[2:3].expand(3, -1), kv_lengths=lengths
    )
    for i, n in enumerate(lengths.tolist()):
        expect_close(out[i], exact(q[i], cache.keys[2][:, :n], cache.values[2][:, :n]))


@pytest.mark.parametrize("rows", [16, 5])
def test_packed_queries_of_unlike_lengths(rows):
    cache = Cache(rows)
    counts = [4, 2, 64, 0]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, HEADS, sum(counts), DIM).to(DEVICE, DTYPE)
    out, lse = flashjit.attention(
        q,
        cache.k,
        cache.v,
        causal=True,
        page_table=cache.table,
        kv_lengths=cache.lengths,
        cu_seqlens_q=offsets,
        max_seqlen_q=64,
        max_seqlen_kv=70,
        return_lse=True,
        score_mod=lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
    )
    assert lse.shape == q.shape[:3]
    for i, (begin, count) in enumerate(zip(offsets.tolist(), counts)):
        expect_close(
            out[0, :, begin : begin + count],
            exact(q[0, :, begin : begin + count], cache.keys[i], cache.values[i], softcap=5.0),
        )


@pytest.mark.parametrize("ordered", [True, False])
def test_slots(ordered):
    cache = Cache(16)
    k = torch.full((6, HEADS_KV, 80, DIM), math.nan, dtype=DTYPE, device=DEVICE)
    v = k.clone()
    slots = [0, 1, 2, 3] if ordered else [4, 0, 5, 2]
    for slot, n, key, value in zip(slots, LENGTHS, cache.keys, cache.values):
        k[slot, :, :n], v[slot, :, :n] = key, value
    q = torch.randn(len(LENGTHS), HEADS, 2, DIM).to(DEVICE, DTYPE)
    where = (
        {"cache": True} if ordered else {"page_table": torch.tensor(slots, dtype=torch.int32, device=DEVICE)}
    )
    out = flashjit.attention(q, k, v, causal=True, kv_lengths=cache.lengths, **where)
    for i in range(len(LENGTHS)):
        expect_close(out[i], exact(q[i], cache.keys[i], cache.values[i]))


def test_compiled():
    cache = Cache(16)
    q = torch.randn(len(LENGTHS), HEADS, 1, DIM).to(DEVICE, DTYPE)

    @torch.compile(fullgraph=True)
    def step(q, k, v, table, lengths):
        return 2 * flashjit.attention(q, k, v, causal=True, page_table=table, kv_lengths=lengths)

    with torch.no_grad():
        out = step(q, cache.k, cache.v, cache.table, cache.lengths)
    expect_close(
        out,
        2
        * flashjit.attention(
            q, cache.k, cache.v, causal=True, page_table=cache.table, kv_lengths=cache.lengths
        ).double(),
    )


@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("shared", [0, 150, 320])
def test_a_prefix_that_sequences_share(rows, queries, shared):
    torch.manual_seed(shared)
    own, columns = [7, 200, 64, 5], -(-(shared + 200) // rows)
    whole = shared // rows  # of its pages; a sequence has the rest in a page of its own
    pages = torch.randperm(4 * columns).view(4, columns).to(DEVICE, torch.int32)
    pages[:, :whole] = pages[0, :whole]
    k, v = torch.randn(2, 4 * columns, rows, HEADS_KV, DIM).to(DEVICE, DTYPE).transpose(2, 3)
    of = lambda pool, i, n: pool[pages[i].long()].transpose(0, 1).flatten(1, 2)[:, :n]
    for pool in (k, v):
        for i in range(1, 4):
            if shared % rows:
                pool[pages[i, whole], :, : shared % rows] = pool[pages[0, whole], :, : shared % rows]
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, HEADS, 4 * queries, DIM).to(DEVICE, DTYPE)
    out, lse = flashjit.attention(
        q,
        k,
        v,
        causal=True,
        page_table=pages,
        kv_lengths=ints([shared + n for n in own]),
        max_seqlen_q=queries,
        cu_seqlens_q=ints(range(0, 4 * queries + 1, queries)),
        prefix_length=ints([shared]),
        return_lse=True,
    )
    assert out.dtype == DTYPE and torch.isfinite(lse).all()
    for i, n in enumerate(own):
        expect_close(
            out[0, :, i * queries : (i + 1) * queries],
            exact(q[0, :, i * queries : (i + 1) * queries], of(k, i, shared + n), of(v, i, shared + n)),
        )


def test_what_makes_no_sense_is_refused():
    cache = Cache(16)
    q = torch.randn(len(LENGTHS), HEADS, 1, DIM).to(DEVICE, DTYPE)

    def refused(error, words, q=q, k=cache.k, v=cache.v, **named):
        arguments = {"page_table": cache.table, "kv_lengths": cache.lengths, **named}
        with pytest.raises(error) as caught:
            flashjit.attention(q, k, v, **arguments)
        for word in words:
            assert word in str(caught.value)

    refused(flashjit.InvalidArgument, ["kv_lengths is missing"], kv_lengths=None)
    refused(flashjit.InvalidArgument, ["page_table", "int32 [4, pages"], page_table=cache.table.long())
    refused(flashjit.InvalidArgument, ["page_table", "int32 [4, pages"], page_table=cache.table[:3])
    refused(flashjit.InvalidArgument, ["room for"], max_seqlen_kv=10_000)
    refused(
        flashjit.InvalidArgument,
        ["prefix_length is for packed queries", "cu_seqlens_q"],
        prefix_length=cache.lengths[:1],
    )
    packed = {"cu_seqlens_q": torch.arange(5, dtype=torch.int32, device=DEVICE), "max_seqlen_q": 1}
    refused(
        flashjit.InvalidArgument,
        ["prefix_length is int32 [4]", "int32 [1]"],
        q=q.transpose(0, 2),
        prefix_length=cache.lengths,
        **packed,
    )
    refused(
        flashjit.WrongType,
        ["prefix_length is a list", "torch.Tensor"],
        q=q.transpose(0, 2),
        prefix_length=[1],
        **packed,
    )
    refused(
        flashjit.WrongType,
        ["prefix_length has the layout", "to_dense"],
        q=q.transpose(0, 2),
        prefix_length=cache.lengths[:1].to_sparse(),
        **packed,
    )
    refused(
        flashjit.WrongType,
        ["page_table is a list", "torch.Tensor"],
        q=q.transpose(0, 2),
        page_table=cache.table.tolist(),
        prefix_length=cache.lengths[:1],
        **packed,
    )
    refused(
        flashjit.WrongType,
        ["cu_seqlens_q is a list", "torch.Tensor"],
        cu_seqlens_q=[0, 1, 2, 3, 4],
        max_seqlen_q=1,
    )
    if DEVICE == "cpu":  # else it is on the device
        below = torch.tensor([-1], dtype=torch.int32)
        refused(
            flashjit.InvalidArgument,
            ["prefix_length is -1", "0 or more"],
            q=q.transpose(0, 2),
            prefix_length=below,
            **packed,
        )
        refused(
            flashjit.InvalidArgument,
            ["prefix_length is 1, but sequence 1 has 0 keys"],
            q=q.transpose(0, 2),
            prefix_length=-below,
            **packed,
        )
    refused(flashjit.InvalidArgument, ["v the pages or slots"], v=cache.v[:2])
    refused(flashjit.InvalidArgument, ["cu_seqlens_kv"], cu_seqlens_kv=cache.lengths)
    refused(flashjit.InvalidArgument, ["max_seqlen_q"], cu_seqlens_q=cache.lengths)
    refused(
        flashjit.InvalidArgument,
        ["rows of a page", "1 or more", "page_table of one dimension"],
        k=torch.zeros(3, HEADS_KV, 0, DIM, dtype=DTYPE, device=DEVICE),
        v=torch.zeros(3, HEADS_KV, 0, DIM, dtype=DTYPE, device=DEVICE),
    )
    refused(flashjit.Unsupported, ["no backward pass", "no_grad"], q=q.clone().requires_grad_())


def test_causal_with_padding_is_refused_where_it_has_two_meanings():
    q, k = torch.randn(2, 2, 16, 64).to(DEVICE, DTYPE), torch.randn(2, 2, 24, 64).to(DEVICE, DTYPE)
    lengths = torch.tensor([10, 24], dtype=torch.int32, device=DEVICE)
    with pytest.raises(flashjit.InvalidArgument, match="two meanings.*cache=True"):
        flashjit.attention(q, k, k, causal=True, kv_lengths=lengths)
    out = flashjit.attention(q, k, k, causal=True, kv_lengths=lengths, cache=True)
    assert (out[0, :, :6] == 0).all()  # of 16 queries over 10 keys the first six see nothing
    for allowed in (q[:, :, :1], torch.randn(2, 2, 24, 64).to(DEVICE, DTYPE)):
        flashjit.attention(allowed, k, k, causal=True, kv_lengths=lengths)


@pytest.mark.skipif(DEVICE != "cpu", reason="lengths on a GPU are not looked at")
def test_lengths_without_room_are_refused():
    q, k = torch.randn(2, 2, 1, 16), torch.randn(4, 2, 8, 16)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    for lengths, named, room in (
        ([3, 17], dict(page_table=table), 16),
        ([3, -1], dict(page_table=table), 16),
        ([3, 9], dict(page_table=table, max_seqlen_kv=8), 8),
    ):
        wrong = f"kv_lengths has {lengths[1]} for sequence 1: give 0 to {room},"
        with pytest.raises(flashjit.InvalidArgument, match=wrong):
            flashjit.attention(q, k, k.clone(), kv_lengths=torch.tensor(lengths, dtype=torch.int32), **named)
    keys = torch.randn(2, 2, 9, 16)
    for length in (100, -1):
        with pytest.raises(
            flashjit.InvalidArgument, match=f"kv_lengths has {length} for sequence 0: give 0 to 9,"
        ):
            flashjit.attention(q, keys, keys, kv_lengths=torch.tensor([length, 3], dtype=torch.int32))


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels may read pages in front of a window")
def test_pages_that_a_window_has_left_behind():
    q, k, v = torch.randn(1, 2, 1, 16), *torch.randn(2, 3, 2, 8, 16)
    window = dict(
        mask_mod="kv > q + seqlen_kv - seqlen_q - 6", kv_lengths=torch.tensor([22], dtype=torch.int32)
    )
    whole = flashjit.attention(q, k, v, page_table=torch.tensor([[0, 1, 2]], dtype=torch.int32), **window)
    k[0] = v[0] = torch.nan
    for page in (-1, 0, 99):
        freed = torch.tensor([[page, page, 2]], dtype=torch.int32)
        got = flashjit.attention(q, k, v, page_table=freed, **window)
        torch.testing.assert_close(got, whole, rtol=0, atol=0)
    with pytest.raises(flashjit.InvalidArgument, match="page_table names page -1 for key 16 of sequence 0"):
        flashjit.attention(q, k, v, page_table=torch.tensor([[0, 1, -1]], dtype=torch.int32), **window)

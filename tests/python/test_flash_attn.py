"""flash-attn's functions, by flashjit: against attention written out, as flash-attn's documentation defines it."""

import math

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from flashjit import flash_attn as fa  # noqa: E402
from flashjit.flash_attn import _fa3 as fa3  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(batch=2, queries=7, keys=11, heads=4, heads_kv=2, dim=16, dtype=torch.float32):
    torch.manual_seed(1)
    sizes = [(batch, queries, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim)]
    return [torch.randn(size, dtype=dtype, device=DEVICE).requires_grad_() for size in sizes]


def reference(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    slopes=None,
    lengths=None,
    leftpad=None,
):
    """O [b, sq, hq, d] and LSE [b, hq, sq] in fp64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if lengths is None:
        lengths = torch.full((q.shape[0],), k.shape[2], device=q.device)
    at = (
        torch.arange(q.shape[2], device=q.device)[:, None] + lengths[:, None, None] - q.shape[2]
    )  # [b, sq, 1]
    key = torch.arange(k.shape[2], device=q.device)
    if slopes is not None:
        s = s - (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None] * (at - key).abs()[:, None]
    left, right = window
    keep = key < lengths[:, None, None]
    if causal or right >= 0:
        keep = keep & (key <= at + (0 if causal else right))
    if left >= 0:
        keep = keep & (key >= at - left)
    if leftpad is not None:
        keep = keep & (key >= leftpad[:, None, None])
    s = s.masked_fill(~keep[:, None], -math.inf)
    return (torch.nan_to_num(torch.softmax(s, 3)) @ v).transpose(1, 2), torch.logsumexp(s, 3)


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=1e-4)


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (3, -1), "causal": True},
    {"window_size": (-1, 2)},
    {"softcap": 2.5},
    {"softmax_scale": 0.3, "causal": True},
    {"alibi_slopes": 1},
    {"alibi_slopes": 2, "causal": True},
    {"softcap": 1.5, "alibi_slopes": 1, "window_size": (4, 4)},
]


def as_reference(options):
    names = {"window_size": "window", "softmax_scale": "scale", "alibi_slopes": "slopes"}
    return {names.get(name, name): value for name, value in options.items()}


def with_slopes(options, batch=2, heads=4):
    options = dict(options)
    if "alibi_slopes" in options:
        sizes = (heads,) if options["alibi_slopes"] == 1 else (batch, heads)
        options["alibi_slopes"] = torch.rand(sizes, device=DEVICE)
    return options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("queries, keys", [(7, 11), (9, 9), (11, 7)])
def test_flash_attn_func(options, queries, keys):
    options = with_slopes(options)
    q, k, v = tensors(queries=queries, keys=keys)
    out, lse, probabilities = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    want, want_lse = reference(q, k, v, **as_reference(options))
    assert probabilities is None and out.shape == q.shape and out.is_contiguous()
    close(out, want)
    close(lse, want_lse)
    dout = torch.randn_like(out)
    for got, exact in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout.double())
    ):
        close(got, exact)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softmax_scale": -0.4, "window_size": (3, 2)}], ids=str
)
def test_head_dimensions_that_are_no_multiples_of_8(options):
    q, k, v = tensors(dim=12)
    out, lse, _ = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    want, want_lse = reference(q, k, v, **as_reference(options))
    close(out, want)
    close(lse, want_lse)


def test_packed_forms():
    q, k, v = tensors(queries=9, keys=9, heads_kv=4)
    want = reference(q, k, v, causal=True)[0]
    close(fa.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True), want)
    close(fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.0, None, True), want)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen(options):
    options = with_slopes(options)
    lengths_q, lengths_kv = (5, 9), (11, 9)
    sequences = [[x[:1] for x in tensors(queries=a, keys=b)] for a, b in zip(lengths_q, lengths_kv)]
    q, k, v = (torch.cat([sequence[i][0] for sequence in sequences]).detach() for i in range(3))
    cu_q, cu_kv = (
        torch.tensor([0, n[0], n[0] + n[1]], dtype=torch.int32, device=DEVICE)
        for n in (lengths_q, lengths_kv)
    )
    rest = (cu_q, cu_kv, 9, 11)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, *rest, return_attn_probs=True, **options)
    assert out.shape == q.shape and lse.shape == (4, 14)
    for i, sequence in enumerate(sequences):
        named = as_reference(options)
        if named.get("slopes") is not None and named["slopes"].dim() == 2:
            named["slopes"] = named["slopes"][i : i + 1]
        want, want_lse = reference(*sequence, **named)
        rows = slice(int(cu_q[i]), int(cu_q[i + 1]))
        close(out[rows], want[0])
        close(lse[:, rows], want_lse[0])
    close(fa.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *rest, **options), out)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sequences_may_use_fewer_rows_than_they_have(options):
    """seqused_q and seqused_k: a causal mask ends at the last rows used, the others are 0, and there are gradients."""
    options = {name: value for name, value in options.items() if name != "alibi_slopes"}
    q, k, v = tensors(batch=1, queries=14, keys=20)
    cu_q, cu_kv, used_q, used_k = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 5, 14], [0, 11, 20], [4, 9], [8, 3])
    )
    out, lse = fa3.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_q, cu_kv, 9, 11, used_q, used_k, return_attn_probs=True, **options
    )
    want = torch.zeros_like(q[0], dtype=torch.float64)
    for i in range(2):
        rows, keys = (
            slice(int(cu[i]), int(cu[i] + used[i])) for cu, used in ((cu_q, used_q), (cu_kv, used_k))
        )
        o, want_lse = reference(q[:, rows], k[:, keys], v[:, keys], **as_reference(options))
        want = torch.cat((want[: rows.start], o[0], want[rows.stop :]))
        close(lse[:, rows], want_lse[0])
    close(out, want)
    dout = torch.randn_like(out)
    for got, exact in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout.double())
    ):
        close(got, exact)


def test_sinks_and_out():
    q, k, v = tensors()
    sinks = torch.randn(4, device=DEVICE, requires_grad=True)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, s_aux=sinks, return_attn_probs=True)
    plain, plain_lse = reference(q, k, v, causal=True)
    share = torch.sigmoid(plain_lse - sinks[:, None])
    close(out, plain * share.transpose(1, 2)[..., None])
    assert torch.autograd.grad(out.sum(), sinks)[0].abs().sum() > 0
    with torch.no_grad():
        place = torch.empty_like(out)
        assert fa3.flash_attn_func(q, k, v, causal=True, sinks=sinks, out=place) is place
        close(place, out)
        with pytest.raises(flashjit.InvalidArgument, match="out is float32"):
            fa.flash_attn_func(q, k, v, out=place[:1])
    with pytest.raises(flashjit.Unsupported, match="out is given with tensors that require gradients"):
        fa.flash_attn_func(q, k, v, out=place)
    with pytest.raises(flashjit.InvalidArgument, match="sinks and s_aux"):
        fa.flash_attn_func(q, k, v, sinks=sinks, s_aux=sinks)
    with pytest.raises(
        flashjit.InvalidArgument, match=r"q has 3 dimensions: give \[batch, length, heads, head_dim\]"
    ):
        fa.flash_attn_func(q[0], k[0], v[0])


def test_out_is_written_without_a_copy(monkeypatch):
    from flashjit.flash_attn import _attend

    places = []
    attention = _attend.attention
    monkeypatch.setattr(
        _attend, "attention", lambda *x, **given: (places.append(given["out"]), attention(*x, **given))[1]
    )
    q, k, v = (x.detach() for x in tensors())
    rows, keys = q[0], k[0]
    offsets, both = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (len(rows), len(keys)))
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=DEVICE)
    calls = [
        (q, lambda out: fa.flash_attn_func(q, k, v, causal=True, out=out)),
        (q, lambda out: fa3.flash_attn_func(q, k, v, causal=True, out=out)),
        (rows, lambda out: fa.flash_attn_varlen_func(rows, keys, v[0], offsets, both, 7, 11, out=out)),
        (q, lambda out: fa.flash_attn_with_kvcache(q, k, v, block_table=table, softcap=2.0, out=out)),
        (
            rows,
            lambda out: fa.flash_attn_with_kvcache(
                rows,
                k,
                v,
                cache_seqlens=5,
                block_table=table[:1],
                cu_seqlens_q=offsets,
                max_seqlen_q=7,
                out=out,
            ),
        ),
    ]
    for like, call in calls:
        wide = torch.full((*like.shape[:-1], 2 * like.shape[-1]), 7.0, device=DEVICE)
        out = wide[..., : like.shape[-1]]
        assert call(out) is out
        assert places[-1].data_ptr() == out.data_ptr() and (wide[..., like.shape[-1] :] == 7).all()
        places.clear()
        odd = torch.empty(*like.shape[:-1], like.shape[-1] + 1, device=DEVICE)[..., 1:]
        close(call(odd), out)  # which no kernel can write: a copy
        assert places == [None]
        with pytest.raises(flashjit.InvalidArgument, match="out is float16"):
            call(torch.empty_like(like, dtype=torch.float16))
        places.clear()
    place = q.clone()
    close(fa.flash_attn_func(place, k, v, causal=True, out=place), fa.flash_attn_func(q, k, v, causal=True))


def test_slopes_of_other_shapes_are_refused():
    q, k, v = tensors()
    offsets = torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
    for size in ((8,), (3,), (3, 4), (4, 1), ()):
        with pytest.raises(flashjit.InvalidArgument, match=r"alibi_slopes is float32 .*\[4\] or \[2, 4\]"):
            fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(size, device=DEVICE))
        with pytest.raises(flashjit.InvalidArgument, match=r"alibi_slopes is float32 .*\[4\] or \[1, 4\]"):
            fa.flash_attn_varlen_func(
                q[0], k[0, :7], v[0, :7], offsets, offsets, 7, 7, alibi_slopes=torch.ones(size, device=DEVICE)
            )


def test_pages_have_no_gradients():
    q, k, v = tensors()
    offsets, table = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 7], [[1]]))
    given = (q[0], k, v, offsets, torch.tensor([0, 11], dtype=torch.int32, device=DEVICE), 7, 11)
    with pytest.raises(
        flashjit.Unsupported, match="block_table is given with tensors that require gradients"
    ):
        fa.flash_attn_varlen_func(*given, block_table=table)
    with torch.no_grad():
        out = fa.flash_attn_varlen_func(*given, block_table=table)
        close(out, reference(q[:1], k[1:], v[1:])[0][0])
        used = torch.tensor([4], dtype=torch.int32, device=DEVICE)  # as vLLM calls it
        out = fa.flash_attn_varlen_func(
            q=q[0],
            k=k,
            v=v,
            out=torch.empty_like(q[0]),
            cu_seqlens_q=offsets,
            max_seqlen_q=7,
            seqused_k=used,
            max_seqlen_k=4,
            block_table=table,
            window_size=[-1, -1],
            softcap=0.0,
            fa_version=3,
        )
        close(out, reference(q[:1], k[1:, :4], v[1:, :4])[0][0])
    with pytest.raises(flashjit.InvalidArgument, match="cu_seqlens_k is missing"):
        fa.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=offsets, max_seqlen_q=7)


def test_parts_are_combined():
    q, k, v = (x.detach() for x in tensors(keys=20))
    parts = [fa.flash_attn_func(q, k[:, i::10], v[:, i::10], return_attn_probs=True)[:2] for i in range(10)]
    out, lse = fa3.flash_attn_combine(
        torch.stack([o for o, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    )
    want, want_lse = reference(q, k, v)
    close(out, want)
    close(lse, want_lse.transpose(1, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(7, 11), (9, 9)])
def test_chunks(causal, queries, keys):
    """Keys in chunks of 4, and a query in that of the key it is at."""
    q, k, v = tensors(queries=queries, keys=keys)
    at, key = (
        torch.arange(queries, device=DEVICE)[:, None] + keys - queries,
        torch.arange(keys, device=DEVICE),
    )
    hidden = (at // 4 != key // 4) | (key > at if causal else key < 0)
    s = q.double().transpose(1, 2) @ k.double().repeat_interleave(2, 2).permute(0, 2, 3, 1) * 0.25
    weights = torch.softmax(s.masked_fill(hidden, -math.inf), 3).nan_to_num()
    want = (weights @ v.double().repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2)
    close(fa3.flash_attn_func(q, k, v, causal=causal, attention_chunk=4), want)
    close(fa3.flash_attn_with_kvcache(q, k, v, causal=causal, attention_chunk=4), want)
    offsets = [torch.arange(3, dtype=torch.int32, device=DEVICE) * n for n in (queries, keys)]
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    close(
        fa3.flash_attn_varlen_func(*packed, *offsets, queries, keys, causal=causal, attention_chunk=4),
        want.flatten(0, 1),
    )


def test_fa3_packed_heads():
    q, k, v = tensors(queries=9, keys=9)
    want = reference(q, k, v, causal=True)[0]
    close(fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), causal=True, num_heads_q=4), want)
    with pytest.raises(flashjit.InvalidArgument, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (3, 1)},
        {"softcap": 2.0},
        {"causal": True, "alibi_slopes": 1},
        {"softcap": 2.0, "causal": True},
    ],
    ids=str,
)
def test_a_cache_is_seen_to_each_sequence_s_length(options):
    options = with_slopes(options)
    q, k, v = (x.detach() for x in tensors(queries=3, keys=16))
    lengths = torch.tensor([5, 16], dtype=torch.int32, device=DEVICE)
    k[0, 5:], v[0, 5:] = math.nan, math.nan  # keys behind a length are never read
    out, lse = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True, **options)
    want, want_lse = reference(
        q, torch.nan_to_num(k), torch.nan_to_num(v), lengths=lengths, **as_reference(options)
    )
    close(out, want)
    close(lse, want_lse)


class Placed:
    """A cache [2, 16, 2, 32] of sequences, and the same in pages of 4 rows or in slots, in another order."""

    def __init__(self, place):
        torch.manual_seed(3)
        self.k, self.v = torch.randn(2, 2, 16, 2, 32, device=DEVICE)
        self.given = {}
        order = torch.tensor(
            [5, 2, 9, 4, 0, 7, 1, 8] if place == "block_table" else [3, 1], dtype=torch.int32, device=DEVICE
        )
        self.where, rows = order.long(), 4 if place == "block_table" else 16
        self.k_cache, self.v_cache = torch.full((2, 10, rows, 2, 32), math.nan, device=DEVICE)
        if place == "order":
            self.k_cache, self.v_cache = self.k.clone(), self.v.clone()
            self.where = slice(None)
        else:
            self.given[place] = order.view(2, 4) if place == "block_table" else order
        self.k_cache[self.where], self.v_cache[self.where] = (
            x.reshape(-1, rows, 2, 32) for x in (self.k, self.v)
        )

    def written(self):
        return [x[self.where].reshape(2, 16, 2, 32) for x in (self.k_cache, self.v_cache)]


PLACES = ["order", "block_table", "cache_batch_idx"]


def turned(x, i, at, interleaved, columns=16):
    """[rows, heads, dim] of sequence i, rotated one row at a time, as complex numbers."""
    angle = torch.arange(20, device=DEVICE)[:, None] * torch.linspace(1.0, 0.1, columns // 2, device=DEVICE)
    x = x[i].clone()
    for row in range(x.shape[0]):
        turn = torch.polar(torch.ones(columns // 2, device=DEVICE), angle[at[row]])
        pairs = (
            x[row, :, :columns].unflatten(-1, (-1, 2))
            if interleaved
            else x[row, :, :columns].unflatten(-1, (2, -1)).transpose(-1, -2)
        )
        new = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        x[row, :, :columns] = new.flatten(-2) if interleaved else new.transpose(-1, -2).flatten(-2)
    return x


def rotary(columns=16):
    angle = torch.arange(20, device=DEVICE)[:, None] * torch.linspace(1.0, 0.1, columns // 2, device=DEVICE)
    return {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("queries", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "rotary_interleaved": False},
        {"window_size": (4, 1), "softcap": 2.0},
        {"causal": True, "cache_leftpad": True},
    ],
    ids=str,
)
def test_new_keys_are_rotated_and_appended(options, queries, place):
    cache, new = Placed(place), 3
    lengths = torch.tensor([4, 9], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(2, n, heads, 32, device=DEVICE) for n, heads in ((queries, 4), (new, 2), (new, 2)))
    options, interleaved = dict(options), options.get("rotary_interleaved", True)
    pad = (
        torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
        if options.pop("cache_leftpad", False)
        else None
    )
    out = fa.flash_attn_with_kvcache(
        q,
        cache.k_cache,
        cache.v_cache,
        k,
        v,
        **rotary(),
        cache_seqlens=lengths,
        cache_leftpad=pad,
        **options,
        **cache.given,
    )
    options.pop("rotary_interleaved", None)
    want_q, want_k, want_v = [], cache.k.clone(), cache.v.clone()
    for i, n in enumerate(lengths.tolist()):
        want_k[i, n : n + new] = turned(
            k, i, range(n, n + new), interleaved
        )  # padding or not: a row's place in the cache
        want_v[i, n : n + new] = v[i]
        want_q.append(turned(q, i, range(n, n + queries) if options else [n] * queries, interleaved))
    for got, want in zip(cache.written(), (want_k, want_v)):
        close(got, want)
    close(
        out,
        reference(
            torch.stack(want_q), want_k, want_v, lengths=lengths + new, leftpad=pad, **as_reference(options)
        )[0],
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_caches_in_pages_and_slots(options, place):
    cache, options = Placed(place), with_slopes(options)
    q = torch.randn(2, 3, 4, 32, device=DEVICE)
    lengths = torch.tensor([6, 16], dtype=torch.int32, device=DEVICE)
    out, lse = fa.flash_attn_with_kvcache(
        q,
        cache.k_cache,
        cache.v_cache,
        cache_seqlens=lengths,
        return_softmax_lse=True,
        num_splits=1,
        **options,
        **cache.given,
    )
    want, want_lse = reference(q, cache.k, cache.v, lengths=lengths, **as_reference(options))
    close(out, want)
    close(lse, want_lse)
    whole = fa.flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, **options, **cache.given)
    close(whole, reference(q, cache.k, cache.v, **as_reference(options))[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0), "softcap": 1.5}], ids=str)
def test_packed_queries_of_pages(options):
    cache, counts, lengths = Placed("block_table"), [2, 5], [6, 16]
    q = torch.randn(7, 4, 32, device=DEVICE)
    cu_q, cu_k = (
        torch.tensor([0, n[0], sum(n)], dtype=torch.int32, device=DEVICE) for n in (counts, lengths)
    )
    out, lse, _ = fa.flash_attn_varlen_func(
        q, cache.k_cache, cache.v_cache, cu_q, cu_k, 5, 16, return_attn_probs=True, **options, **cache.given
    )
    same, same_lse = fa3.flash_attn_with_kvcache(
        q,
        cache.k_cache,
        cache.v_cache,
        cache_seqlens=cu_k.diff(),
        cu_seqlens_q=cu_q,
        max_seqlen_q=5,
        page_table=cache.given["block_table"],
        return_softmax_lse=True,
        **options,
    )
    assert torch.equal(out, same) and torch.equal(lse, same_lse)
    for i, rows in enumerate((slice(0, 2), slice(2, 7))):
        want, want_lse = reference(
            q[None, rows],
            cache.k[i : i + 1],
            cache.v[i : i + 1],
            **as_reference(options),
            lengths=torch.tensor(lengths[i : i + 1], device=DEVICE),
        )
        close(out[rows], want[0])
        close(lse[:, rows], want_lse[0])


def test_packed_new_keys_are_rotated_and_appended():
    cache, counts, lengths = (
        Placed("block_table"),
        [2, 5],
        torch.tensor([4, 9], dtype=torch.int32, device=DEVICE),
    )
    q, k, v = (torch.randn(7, heads, 32, device=DEVICE) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 2, 7], dtype=torch.int32, device=DEVICE)
    out = fa3.flash_attn_with_kvcache(
        q,
        cache.k_cache,
        cache.v_cache,
        k,
        v,
        **rotary(),
        cache_seqlens=lengths,
        causal=True,
        max_seqlen_q=5,
        page_table=cache.given["block_table"],
        cu_seqlens_q=offsets,
        cu_seqlens_k_new=offsets,
    )
    want_k, want_v = cache.k.clone(), cache.v.clone()
    for i, (n, count, rows) in enumerate(zip(lengths.tolist(), counts, (slice(0, 2), slice(2, 7)))):
        at = range(n, n + count)
        want_k[i, n : n + count], want_v[i, n : n + count] = turned(k[None, rows], 0, at, True), v[rows]
        want = reference(
            turned(q[None, rows], 0, at, True)[None],
            want_k[i : i + 1],
            want_v[i : i + 1],
            causal=True,
            lengths=lengths[i : i + 1] + count,
        )[0]
        close(out[rows], want[0])
    for got, want in zip(cache.written(), (want_k, want_v)):
        close(got, want)


def test_caches_that_make_no_sense_are_refused():
    cache = Placed("block_table")
    q, k = torch.randn(2, 1, 4, 32, device=DEVICE), torch.randn(2, 1, 2, 32, device=DEVICE)
    lengths = torch.tensor([4, 9], dtype=torch.int32, device=DEVICE)

    def refused(error, words, *rest, **changed):
        with pytest.raises(error, match=words):
            fa.flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, *rest, **{**cache.given, **changed})

    bad = flashjit.InvalidArgument
    refused(bad, "k is given without cache_seqlens", k, k)
    refused(bad, "k is given without v", k, cache_seqlens=lengths)
    refused(bad, "rotary_cos is given without k", cache_seqlens=lengths, **rotary())
    refused(bad, "rotary_cos is given alone", k, k, cache_seqlens=lengths, rotary_cos=rotary()["rotary_cos"])
    refused(bad, "rope_dims is 6", k, k, cache_seqlens=lengths, **rotary(6))
    with pytest.raises(bad, match="rotary_cos has 20 positions and the cache 30 rows"):
        fa.flash_attn_with_kvcache(
            q,
            torch.zeros(2, 30, 2, 32, device=DEVICE),
            torch.zeros(2, 30, 2, 32, device=DEVICE),
            k,
            k,
            cache_seqlens=lengths,
            **rotary(),
        )
    refused(bad, "both given", cache_batch_idx=lengths)
    refused(bad, "block_table is int32 .2.", block_table=lengths)
    refused(bad, "block_table is int64", block_table=cache.given["block_table"].long())

"""attention_over(): one softmax over several caches, and merge() into the caller's memory. On the GPU where there is one."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from exact_attention import exact  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LIMIT = 2e-2 if torch.cuda.is_available() else 1e-4


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def pool(sequences, lengths, page, dim, heads=1):
    """A cache of pages, and its table, with NaN where no sequence has a key."""
    columns = -(-max(lengths) // page)
    pages = torch.full((sequences * columns + 1, heads, page, dim), math.nan, device=DEVICE, dtype=DTYPE)
    table = torch.randperm(sequences * columns).view(sequences, columns).int().to(DEVICE)
    rows = [randn(length, heads, dim) for length in lengths]
    for b, own in enumerate(rows):
        for n in range(len(own)):
            pages[table[b, n // page], :, n % page] = own[n]
    return pages, dict(page_table=table, kv_lengths=ints(*lengths)), rows


def joined(q, parts, scale, sinks=None):
    """O [queries, heads, d_v] and LSE of q [queries, heads, d] over (k, v, seen) of all parts, in fp64."""
    k, v = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return exact(
        q, k, v, scale=scale, seen=torch.cat([part[2].expand(len(q), -1) for part in parts], 1), sinks=sinks
    )


def seen_in(indices, length, keys):
    """How often each key is named by the first entries: 0 or 1 here. indices [queries, top-k], length [queries]."""
    seen = torch.zeros(len(indices), keys, dtype=torch.bool)
    for i, own in enumerate(indices.tolist()):
        for n in own[: max(0, int(length[i]))]:
            if 0 <= n < keys:
                seen[i, n] = True
    return seen


def lists(queries, keys, most, seed):
    """Lists without equal entries, [queries, most], and lengths of them, 0 among these."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(keys, generator=generator)[:most] for _ in range(queries)]
    length = torch.randint(0, most + 1, (queries,), generator=generator, dtype=torch.int32)
    return torch.stack(rows).int(), length


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_two_pools_with_lists_of_their_own_are_one_softmax(with_sinks, queries):
    torch.manual_seed(queries)
    heads, dim, columns, scale = 8, 64, 32, 0.2
    q = randn(2, heads, queries, dim)
    sinks = torch.randn(heads, device=DEVICE) if with_sinks else None
    caches, parts = [], [[], []]
    for lengths, page, most in (([40, 23], 8, 16), ([130, 90], 4, 24)):
        pages, place, rows = pool(2, lengths, page, dim)
        made = [lists(queries, length, most, seed=length) for length in lengths]
        indices = torch.stack([own for own, _ in made])[:, :, None].to(DEVICE)
        counts = torch.stack([count for _, count in made]).to(DEVICE)
        if most == 16:
            counts[0] = 0  # a query without keys in the first cache, which has the sinks
        caches.append(dict(k=pages, indices=(indices, counts), v_columns=columns, **place))
        for b, own in enumerate(rows):
            seen = seen_in(made[b][0], counts[b].cpu(), lengths[b])
            parts[b].append((own, own[..., :columns], seen))
    out, lse = flashjit.attention_over(q, caches, scale=scale, sinks=sinks, return_lse=True)
    assert out.dtype == DTYPE and lse.dtype == torch.float32
    for b in range(2):
        wanted, wanted_lse = joined(q[b].transpose(0, 1), parts[b], scale, sinks)
        assert (out[b].transpose(0, 1).double().cpu() - wanted).abs().max() < LIMIT
        assert torch.allclose(lse[b].T.double().cpu(), wanted_lse, atol=LIMIT)
    assert torch.equal(flashjit.attention_over(q, caches, scale=scale, sinks=sinks), out)


def test_a_window_beside_rows_of_a_whole_pool():
    """Packed queries: recent keys by pages and lengths, compressed ones as global rows of a pool."""
    torch.manual_seed(3)
    heads, dim, columns = 4, 64, 32
    starts, lengths = [0, 2, 5], [20, 9]
    q = randn(1, heads, 5, dim)
    pages, place, rows = pool(2, lengths, 8, dim)
    compressed = randn(1, 1, 50, dim)
    indices, length = lists(5, 50, 12, seed=1)
    recent = dict(
        k=pages,
        v_columns=columns,
        window=(3, 0),
        causal=True,
        cu_seqlens_q=ints(*starts),
        max_seqlen_q=3,
        **place,
    )
    whole = dict(
        k=compressed, v_columns=columns, indices=(indices[None, :, None].to(DEVICE), length.to(DEVICE))
    )
    out, lse = (
        torch.full((5, heads, columns), math.nan, device=DEVICE, dtype=DTYPE),
        torch.empty(5, heads, device=DEVICE),
    )
    memory = dict(out=out.transpose(0, 1)[None], lse=lse.T[None])
    made = flashjit.attention_over(q, [recent, whole], **memory)
    assert made[0] is memory["out"] and made[1] is memory["lse"]
    for b, own in enumerate(rows):
        at = slice(starts[b], starts[b + 1])
        last = torch.arange(starts[b + 1] - starts[b])[:, None] + lengths[b] - (starts[b + 1] - starts[b])
        key = torch.arange(lengths[b])
        near = (key <= last) & (key >= last - 3)
        far = seen_in(indices[at], length[at], 50)
        parts = [
            (own, own[..., :columns], near),
            (compressed[0].transpose(0, 1), compressed[0].transpose(0, 1)[..., :columns], far),
        ]
        wanted, wanted_lse = joined(q[0].transpose(0, 1)[at], parts, dim**-0.5)
        assert (out[at].double().cpu() - wanted).abs().max() < LIMIT
        assert torch.allclose(lse[at].double().cpu(), wanted_lse, atol=LIMIT)


@pytest.mark.parametrize("with_grad", [False, True])
def test_q_in_two_tensors_over_two_caches(with_grad):
    """A window's pages and a whole pool, as DeepSeek V4 has them, with the bits of Q in one tensor."""
    torch.manual_seed(6)
    dim, columns = 96, 64
    q = randn(2, 4, 3, dim).requires_grad_(with_grad)
    pages, place, _ = pool(2, [20, 9], 8, dim)
    slots, dense = randn(2, 1, 16, dim), randn(2, 1, 25, dim).requires_grad_(with_grad)
    whole = dict(k=dense, v_columns=columns)
    recent = dict(k=slots, v_columns=columns, cache=True, kv_lengths=ints(0, 11), window=(3, 0), causal=True)
    paged = dict(k=pages, v_columns=columns, causal=True, **place)
    for caches in ([whole, whole],) if with_grad else ([recent, whole, paged], [paged]):
        wanted = flashjit.attention_over(q, caches, return_lse=True)
        nope, rope = q[..., :columns], q[..., columns:]
        got = flashjit.attention_over(nope, caches, q_rope=rope, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(got, wanted))
        if with_grad:
            grads, right = (torch.autograd.grad(x[0].sum(), (q, dense)) for x in (got, wanted))
            assert all(torch.equal(x, y) for x, y in zip(grads, right))


def test_three_caches_of_other_kinds():
    """Pages of 8 bits, slots, and keys that are no cache; one of them without a key."""
    torch.manual_seed(4)
    q = randn(2, 4, 1, 32)
    pages, place, rows = pool(2, [9, 17], 8, 32, heads=2)
    codes = pages.nan_to_num().to(torch.float8_e4m3fn)
    slots = randn(2, 1, 16, 32)
    dense = randn(2, 2, 5, 32)
    caches = [
        dict(
            k=codes,
            v=codes,
            k_scale=torch.tensor(1.0, device=DEVICE),
            v_scale=torch.tensor(1.0, device=DEVICE),
            **place,
        ),
        dict(k=slots, v=slots, cache=True, kv_lengths=ints(0, 11)),
        dict(k=dense, v=dense, mask_mod="kv >= first", captures={"first": 2}),
    ]
    out, lse = flashjit.attention_over(q, caches, return_lse=True)
    for b, own in enumerate(rows):
        own = own.to(torch.float8_e4m3fn).to(DTYPE)
        parts = []
        for x in (own, slots[b, :, : [0, 11][b]].transpose(0, 1), dense[b, :, 2:].transpose(0, 1)):
            x = x.repeat_interleave(4 // x.shape[1], 1)
            parts.append((x, x, torch.ones(1, len(x), dtype=torch.bool)))
        wanted, wanted_lse = joined(q[b].transpose(0, 1), parts, 32**-0.5)
        assert (out[b].transpose(0, 1).double().cpu() - wanted).abs().max() < LIMIT * 2
        assert torch.allclose(lse[b].T.double().cpu(), wanted_lse, atol=LIMIT * 2)


def test_one_cache_is_a_call_of_attention():
    q, k = randn(2, 4, 3, 32), randn(2, 2, 20, 32)
    sinks = torch.randn(4, device=DEVICE)
    wanted = flashjit.attention(q, k, k, causal=True, sinks=sinks, return_lse=True)
    for got in (
        flashjit.attention_over(q, [dict(k=k, v=k)], causal=True, sinks=sinks, return_lse=True),
        flashjit.attention_over(
            q, (dict(k=k, v=k, causal=True),), causal=False, sinks=sinks, return_lse=True
        ),
    ):
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert torch.equal(flashjit.attention_over(q, [dict(k=k, v=k)]), flashjit.attention(q, k, k))


def test_gradients_of_tensors_that_are_no_caches():
    torch.manual_seed(5)
    q, a, b = (
        randn(1, 4, 6, 32).requires_grad_(),
        randn(1, 2, 10, 32).requires_grad_(),
        randn(1, 2, 7, 32).requires_grad_(),
    )
    sinks = torch.randn(4, device=DEVICE, requires_grad=True)
    out = flashjit.attention_over(q, [dict(k=a, v=a), dict(k=b, v=b)], sinks=sinks)
    both = torch.cat([a, b], 2)
    wanted = flashjit.attention(q, both, both, sinks=sinks)
    assert (out - wanted).abs().max() < LIMIT
    dout = torch.randn_like(wanted)
    for got, right in zip(
        torch.autograd.grad(out, (q, a, b, sinks), dout), torch.autograd.grad(wanted, (q, a, b, sinks), dout)
    ):
        assert (got - right).abs().max() < LIMIT * 4


def test_what_is_refused():
    q, k = randn(1, 2, 3, 32), randn(1, 2, 20, 32)
    one = dict(k=k, v=k)
    wrong = [
        (dict(caches=one), "caches is a dict"),
        (dict(caches=k), "caches is a Tensor"),
        (dict(caches=[]), "caches has 0 entries: give 1 to 8"),
        (dict(caches=[one] * 9), "caches has 9 entries"),
        (dict(caches=[one, k]), r"caches\[1\] is a Tensor"),
        (dict(caches=[one, dict(v=k)]), r"caches\[1\] has no 'k'"),
        (
            dict(caches=[one, dict(one, dropout_p=0.5)]),
            r"caches\[1\] has 'dropout_p', which is no argument of a cache",
        ),
        (dict(caches=[one, one], dropout_p=0.5), "dropout_p is given for all caches, but attention_over"),
        (
            dict(caches=[one, one], deterministic=True),
            "no such argument: it has batch_invariant, .*, sinks, return_lse",
        ),
        (dict(caches=[one, dict(one, sinks=k)]), r"caches\[1\] has 'sinks', which is no argument of a cache"),
        (
            dict(caches=[one, one], page_table=k),
            "page_table is given for all caches, but it belongs to a cache",
        ),
        (dict(caches=[one, dict(k=k, v=k, v_columns=8)]), r"caches\[1\]: v and v_columns are both given"),
        (dict(caches=[one, dict(k=k, v_columns=16)]), "the caches' V have 32, 16 columns"),
        (dict(caches=[one, dict(k=k[..., :16], v=k)]), r"caches\[1\]: .*columns|caches\[1\]: "),
        (dict(caches=[one, one], q_rope=q), r"caches\[0\]: q_rope is given without v_columns"),
        (
            dict(caches=[dict(k=k, v_columns=32), one], q_rope=q[..., :16]),
            r"caches\[0\]: q and q_rope have 48 columns together, and k is \[1, 2, 20, 32\]",
        ),
        (dict(caches=[one, one], out=torch.empty(1, 2, 3, 16, device=DEVICE)), "out is .*: it must be"),
        (dict(caches=[one, one], lse=torch.empty(1, 2, device=DEVICE)), "lse is .*: it must be float32"),
    ]
    for arguments, message in wrong:
        with pytest.raises(flashjit.Error, match=message):
            flashjit.attention_over(q, **arguments)


def test_prefixes_of_several_levels_are_merged():
    """A tree: all four sequences share keys, pairs share more, and each has its own."""
    torch.manual_seed(7)
    q = randn(4, 4, 1, 32)
    levels = [
        (randn(count, 2, keys, 32), randn(count, 2, keys, 32)) for count, keys in ((1, 20), (2, 9), (4, 5))
    ]
    states = []
    for k, v in levels:
        of_one = q.view(len(k), -1, 4, 32).transpose(1, 2)  # the queries of all that share the keys
        out, lse = flashjit.attention(of_one, k, v, return_lse=True, out_dtype=torch.float32)
        states.append((out.transpose(1, 2).reshape(4, 4, 1, 32), lse.transpose(1, 2).reshape(4, 4, 1)))
    out, lse = flashjit.merge(states, dtype=DTYPE)
    k, v = (torch.cat([x.repeat_interleave(4 // len(x), 0) for x in tensors], 2) for tensors in zip(*levels))
    wanted, wanted_lse = flashjit.attention(q, k, v, return_lse=True)
    tolerance = dict(atol=1e-2, rtol=1e-2) if DTYPE != torch.float32 else dict(atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out, wanted, **tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-3)


def test_merge_writes_into_the_callers_memory():
    torch.manual_seed(6)
    q, k = randn(2, 4, 3, 32), randn(2, 4, 20, 32)
    states = [
        flashjit.attention(q, x, x, return_lse=True, out_dtype=torch.float32)
        for x in (k[:, :, :7], k[:, :, 7:])
    ]
    wanted = flashjit.merge(states, dtype=DTYPE)
    out, lse = randn(2, 3, 4, 32).transpose(1, 2), torch.empty(2, 3, 4, device=DEVICE).transpose(1, 2)
    made = flashjit.merge(states, out=out, lse=lse)
    assert made[0] is out and made[1] is lse
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert torch.equal(flashjit.merge(states, dtype=DTYPE, lse=lse)[0], wanted[0])
    with pytest.raises(flashjit.InvalidArgument, match="out has strides"):
        flashjit.merge(states, out=randn(2, 4, 32, 3).transpose(2, 3))
    with pytest.raises(flashjit.InvalidArgument, match="out is .*it must be"):
        flashjit.merge(states, out=out[:1])
    with pytest.raises(flashjit.WrongType, match="lse is a list"):
        flashjit.merge(states, lse=[1])
    for written in (dict(lse=torch._neg_view(lse)), dict(out=torch._neg_view(out))):
        with pytest.raises(flashjit.InvalidArgument, match="is a view .* negated numbers"):
            flashjit.merge(states, **written)
    grads = [(x.requires_grad_(), y) for x, y in states]
    with pytest.raises(flashjit.Unsupported, match="lse is given with gradients"):
        flashjit.merge(grads, lse=lse)

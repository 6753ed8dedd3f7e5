"""append() and merge() against plain PyTorch, on the GPU where there is one."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 64, 32
LENGTHS = [37, 3, 64, 0]  # with the new rows
COUNTS = [4, 3, 20, 0]  # of new rows, where they are packed
ROPES = ["none", "halves", "interleaved", "partial", "theta", "typed", "positions"]


def tables(dims, dtype=torch.float32):
    angles = torch.arange(100.0, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(0, dims, 2, dtype=torch.float64) / dims
    )
    return angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)


def arguments_of(rope, rows):
    if rope == "none":
        return {}
    if rope == "theta":
        return {"theta": 10000.0, "rope_dims": DIM}
    dims = 32 if rope == "partial" else DIM
    cos, sin = tables(dims, DTYPE if rope == "typed" else torch.float32)
    made = {"cos": cos, "sin": sin, "interleaved": rope == "interleaved"}
    if rope == "positions":
        made["positions"] = (7 * torch.arange(rows) % 90).to(DEVICE, torch.int32)
    return made


def turned(x, positions, rope):
    """x: [heads, rows, dim] in float64."""
    if rope == "none":
        return x
    dims = 32 if rope == "partial" else DIM
    cos, sin = tables(dims, DTYPE if rope == "typed" else torch.float64)
    cos, sin = cos.double()[positions], sin.double()[positions]
    left, right = (
        (x[..., :dims:2], x[..., 1:dims:2])
        if rope == "interleaved"
        else (x[..., : dims // 2], x[..., dims // 2 : dims])
    )
    pair = left * cos - right * sin, left * sin + right * cos
    new = torch.stack(pair, -1).flatten(-2) if rope == "interleaved" else torch.cat(pair, -1)
    return torch.cat((new, x[..., dims:]), -1)


def expect_close(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    limit = (2**-8 if DTYPE == torch.bfloat16 else 2**-23) * want.abs().nan_to_num() + 1e-5
    assert ((got.double() - want).abs().nan_to_num() <= limit).all()


def new_cache(pages):
    """K and V full of NaN, the table, and where key n of sequence i lies."""
    rows = 16 if pages in ("pages", "csr") else 80
    k = torch.full((24, rows, HEADS_KV, DIM), math.nan, dtype=DTYPE, device=DEVICE).transpose(1, 2)
    v = torch.full((24, HEADS_KV, rows, DIM_V), math.nan, dtype=DTYPE, device=DEVICE)
    if pages == "ordered":
        return k, v, None, lambda i, n: (i, n)
    order = torch.randperm(24)[: 4 * (80 // rows)].to(DEVICE, torch.int32)
    if pages == "slots":
        return k, v, order, lambda i, n: (int(order[i]), n)
    table = order.view(4, 5)
    if pages == "csr":
        indptr = torch.arange(0, 21, 5, dtype=torch.int32, device=DEVICE)
        return k, v, (indptr, order), lambda i, n: (int(table[i, n // 16]), n % 16)
    return k, v, table, lambda i, n: (int(table[i, n // 16]), n % 16)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("pages", ["pages", "csr", "slots", "ordered"])
@pytest.mark.parametrize("rope", ROPES)
def test_new_rows_are_rotated_and_stored(rope, pages, packed):
    torch.manual_seed(1)
    counts = COUNTS if packed else [3] * 4
    begins = [sum(counts[:i]) for i in range(5)]
    size = (1, sum(counts) + 2) if packed else (4, 3)  # two rows belong to no sequence
    k, v, q = (
        torch.randn(size[0], heads, size[1], dim).to(DEVICE, DTYPE)
        for heads, dim in ((HEADS_KV, DIM), (HEADS_KV, DIM_V), (HEADS, DIM))
    )
    k_cache, v_cache, table, place = new_cache(pages)
    want_k, want_v = k_cache.double(), v_cache.double()
    want_q = torch.full(q.shape, math.nan, dtype=torch.float64, device=DEVICE)
    q_out = torch.full_like(q, math.nan)
    rope_arguments = arguments_of(rope, size[0] * size[1])
    for i, length in enumerate(LENGTHS):
        for row in range(counts[i]):
            key = length - counts[i] + row
            if key < 0:
                continue
            b, s = (0, begins[i] + row) if packed else (i, row)
            at = int(rope_arguments["positions"][b * size[1] + s]) if rope == "positions" else key
            page, slot = place(i, key)
            want_k[page, :, slot] = turned(k[b, :, s : s + 1].double(), [at], rope)[:, 0]
            want_v[page, :, slot] = v[b, :, s].double()
            want_q[b, :, s] = turned(q[b, :, s : s + 1].double(), [at], rope)[:, 0]
    packing = {"cu_seqlens_q": torch.tensor(begins, dtype=torch.int32, device=DEVICE)} if packed else {}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    got = flashjit.append(
        k,
        v,
        k_cache,
        v_cache,
        kv_lengths=lengths,
        page_table=table,
        max_seqlen_kv=80,
        q=q,
        q_out=q_out,
        **rope_arguments,
        **packing,
    )
    assert got is q_out
    expect_close(k_cache, want_k)
    expect_close(v_cache, want_v)
    expect_close(q_out, want_q)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_go_to_slots(dtype, compiled):
    """vLLM's slot_mapping: page * rows of a page + row; -1 and what is beyond the cache is left out."""
    torch.manual_seed(3)
    k, v = (torch.randn(1, 9, 2, 64).to(DEVICE, DTYPE).transpose(1, 2) for _ in range(2))
    k_cache, v_cache = (torch.full((5, 2, 4, 64), math.nan, dtype=DTYPE, device=DEVICE) for _ in range(2))
    slots = torch.tensor([17, 3, -1, 0, 12, 20, 9, 2**31 - 1, 19], dtype=dtype, device=DEVICE)
    positions = torch.arange(9, dtype=torch.int32, device=DEVICE) * 5
    run = torch.compile(flashjit.append, fullgraph=True) if compiled else flashjit.append
    q = torch.randn(1, 9, 4, 64).to(DEVICE, DTYPE).transpose(1, 2)
    given = dict(slots=slots, q=q, theta=10000.0, positions=positions)
    rotated = run(k, v, k_cache, v_cache, **given)
    at = 5 * torch.arange(9, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    x, y = (part.double().cpu() for part in k[0].chunk(2, -1))
    want_k = torch.cat((x * at.cos() - y * at.sin(), x * at.sin() + y * at.cos()), -1)
    written = set()
    for row, slot in enumerate(slots.tolist()):
        if not 0 <= slot < 20:
            continue
        written.add(slot)
        found = k_cache[slot // 4, :, slot % 4].double().cpu()
        torch.testing.assert_close(found, want_k[:, row], rtol=1e-2, atol=1e-2)
        assert torch.equal(v_cache[slot // 4, :, slot % 4], v[0, :, row])
    others = [slot for slot in range(20) if slot not in written]
    assert all(cache[slot // 4, :, slot % 4].isnan().all() for slot in others for cache in (k_cache, v_cache))
    assert rotated.shape == q.shape


def test_attention_sees_what_was_appended():
    torch.manual_seed(2)
    k_cache, v_cache, table, _ = new_cache("pages")
    lengths = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    keys, values = (
        torch.randn(4, HEADS_KV, 5, DIM).to(DEVICE, DTYPE),
        torch.randn(4, HEADS_KV, 5, DIM_V).to(DEVICE, DTYPE),
    )
    for n in range(5):
        lengths += 1
        q = torch.randn(4, HEADS, 1, DIM).to(DEVICE, DTYPE)
        turned_q = flashjit.append(
            keys[:, :, n : n + 1],
            values[:, :, n : n + 1],
            k_cache,
            v_cache,
            kv_lengths=lengths,
            page_table=table,
            q=q,
            theta=500.0,
        )
        out = flashjit.attention(
            turned_q, k_cache, v_cache, page_table=table, kv_lengths=lengths, causal=True
        )
    k_turned = flashjit.append(
        keys, values, *new_cache("ordered")[:2], kv_lengths=lengths, q=keys, theta=500.0
    )
    want = flashjit.attention(turned_q, k_turned, values)
    assert (out.double() - want.double()).abs().max() <= (1e-2 if DTYPE == torch.bfloat16 else 1e-5)


def test_q_may_be_rotated_in_place_and_left_out():
    k_cache, v_cache, table, _ = new_cache("pages")
    lengths = torch.tensor([9, 8, 7, 6], dtype=torch.int32, device=DEVICE)
    k, v, q = (torch.randn(4, 2, 3, dim).to(DEVICE, DTYPE) for dim in (DIM, DIM_V, DIM))
    new = flashjit.append(k, v, k_cache, v_cache, kv_lengths=lengths, page_table=table, q=q, theta=100.0)
    assert (
        flashjit.append(
            k, v, k_cache, v_cache, kv_lengths=lengths, page_table=table, q=q, q_out=q, theta=100.0
        )
        is q
    )
    assert torch.equal(new, q)
    assert flashjit.append(k, v, k_cache, v_cache, kv_lengths=lengths, page_table=table) is None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_get_their_norm_and_three_positions(interleaved, compiled):
    """As Qwen3-VL has it: RMS norms of K and Q, then M-RoPE by time, height and width."""
    torch.manual_seed(3)
    make = lambda *size: torch.randn(*size, device=DEVICE).to(DTYPE)
    k, v, q = make(2, HEADS_KV, 5, DIM), make(2, HEADS_KV, 5, DIM), make(2, HEADS, 5, DIM)
    k_norm, q_norm = torch.rand(DIM, device=DEVICE) + 0.5, make(DIM)
    caches = make(2, HEADS_KV, 16, DIM), make(2, HEADS_KV, 16, DIM)
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=DEVICE)
    positions = torch.randint(0, 90, (3, 2, 5), device=DEVICE, dtype=torch.int32)
    sections = (12, 10, 10)
    cos, sin = tables(DIM)
    append = lambda *tensors, **options: flashjit.append(*tensors, **options)
    append = torch.compile(append, fullgraph=True) if compiled else append
    rotated = append(
        k,
        v,
        *caches,
        kv_lengths=lengths,
        q=q,
        cos=cos,
        sin=sin,
        positions=positions,
        k_norm=k_norm,
        q_norm=q_norm,
        norm_eps=1e-3,
        mrope_section=sections,
        mrope_interleaved=interleaved,
    )
    axis = torch.zeros(DIM // 2, dtype=torch.long)
    if interleaved:
        for n in (1, 2):
            axis[n : 3 * sections[n] : 3] = n
    else:
        axis = torch.tensor([0] * 12 + [1] * 10 + [2] * 10)

    def want(x, weight, b):
        x = x[b].double()
        x = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
        at = positions[:, b].long()[axis].T  # [rows, pairs]
        c, s = (t.double().gather(0, at) for t in (cos, sin))
        left, right = x.chunk(2, -1)
        return torch.cat((left * c - right * s, left * s + right * c), -1)

    for b, length in enumerate(lengths.tolist()):
        expect_close(caches[0][b, :, length - 5 : length], want(k, k_norm, b))
        expect_close(rotated[b], want(q, q_norm, b))
        assert torch.equal(caches[1][b, :, length - 5 : length], v[b])


def test_norms_and_sections_that_make_no_sense_are_refused():
    k = torch.randn(1, HEADS_KV, 2, DIM, device=DEVICE, dtype=DTYPE)
    caches = (
        torch.zeros(1, HEADS_KV, 8, DIM, device=DEVICE, dtype=DTYPE).clone(),
        torch.zeros_like(k[:, :, :1]).expand(1, HEADS_KV, 8, DIM).contiguous(),
    )
    lengths = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    weight = torch.ones(DIM, device=DEVICE)
    for options, message in (
        ({"k_norm": weight[1:]}, "k_norm is"),
        ({"k_norm": weight.double()}, "k_norm is"),
        ({"q_norm": weight}, "q_norm is given without rows"),
        ({"k_norm": weight, "norm_eps": 0.0}, "norm_eps is 0"),
        ({"k_norm": weight, "norm_eps": math.inf}, "norm_eps is inf"),
        ({"theta": 1e4, "mrope_section": (16, 16)}, "mrope_section is"),
        ({"theta": 1e4, "mrope_section": (16, 8, 8)}, "positions is null"),
        ({"theta": 1e4, "mrope_section": (16, 8, 9), "positions": rows}, "32 together"),
        ({"theta": 1e4, "mrope_section": (16, 8, 8), "positions": rows[:1]}, "positions is"),
        ({"theta": 1e4, "mrope_interleaved": True, "positions": rows[0]}, "mrope_interleaved is given"),
    ):
        with pytest.raises(flashjit.Error, match=message):
            flashjit.append(k, k, *caches, kv_lengths=lengths, **options)


def test_tables_may_be_expanded():
    torch.manual_seed(3)
    k, v, q = (
        torch.randn(4, heads, 3, dim).to(DEVICE, DTYPE) for heads, dim in ((2, DIM), (2, DIM_V), (4, DIM))
    )
    lengths = torch.tensor(
        [3, 6, 9, 12], dtype=torch.int32, device=DEVICE
    )  # other rows of the pages that all share
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE).expand(4, -1)
    cos, sin = (x[7:8].expand(20, -1) for x in tables(DIM))

    def appended(table, cos, sin):
        caches = new_cache("pages")[:2]
        return *caches, flashjit.append(
            k, v, *caches, kv_lengths=lengths, page_table=table, q=q, cos=cos, sin=sin
        )

    for got, want in zip(appended(table, cos, sin), appended(*(x.contiguous() for x in (table, cos, sin)))):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_compiled():
    k_cache, v_cache, table, _ = new_cache("pages")
    lengths = torch.tensor([3, 3, 3, 3], dtype=torch.int32, device=DEVICE)
    k, v, q = (
        torch.randn(4, heads, 3, dim).to(DEVICE, DTYPE) for heads, dim in ((2, DIM), (2, DIM_V), (4, DIM))
    )

    @torch.compile(fullgraph=True)
    def step(q, k, v, k_cache, v_cache):
        q = flashjit.append(k, v, k_cache, v_cache, kv_lengths=lengths, page_table=table, q=q, theta=100.0)
        return flashjit.attention(
            q, k_cache, v_cache, causal=True, page_table=table, kv_lengths=lengths, return_lse=True
        )

    with torch.no_grad():
        got = step(q, k, v, k_cache, v_cache)
        other_k, other_v = torch.full_like(k_cache, math.nan), torch.full_like(v_cache, math.nan)
        turned_q = flashjit.append(
            k, v, other_k, other_v, kv_lengths=lengths, page_table=table, q=q, theta=100.0
        )
        want = flashjit.attention(
            turned_q, other_k, other_v, causal=True, page_table=table, kv_lengths=lengths, return_lse=True
        )
    assert not other_k.isnan().all() and all(torch.equal(x, y) for x, y in zip(got, want))
    assert torch.equal(k_cache.nan_to_num(), other_k.nan_to_num())
    assert torch.equal(v_cache.nan_to_num(), other_v.nan_to_num())


def test_appends_that_make_no_sense_are_refused():
    k_cache, v_cache, table, _ = new_cache("pages")
    k, v, q = (
        torch.randn(4, heads, 3, dim).to(DEVICE, DTYPE) for heads, dim in ((2, DIM), (2, DIM_V), (4, DIM))
    )
    lengths = torch.tensor([9, 8, 7, 6], dtype=torch.int32, device=DEVICE)
    cos, sin = tables(DIM)

    def refused(error, *words, **changed):
        arguments = {
            "k": k,
            "v": v,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "kv_lengths": lengths,
            "page_table": table,
            **changed,
        }
        with pytest.raises(error) as caught:
            flashjit.append(*[arguments.pop(name) for name in ("k", "v", "k_cache", "v_cache")], **arguments)
        for word in words:
            assert word in str(caught.value)
        assert "rope." not in str(caught.value)

    bad = flashjit.InvalidArgument
    refused(flashjit.WrongType, "kv_lengths is a list", kv_lengths=[1, 2, 3, 4])
    refused(flashjit.WrongType, "k_cache is a NoneType", k_cache=None)
    refused(flashjit.WrongType, "theta is a str", theta="10000")
    refused(flashjit.WrongType, "max_seqlen_kv is a float", max_seqlen_kv=2.5)
    refused(bad, "kv_lengths is int64 [4]", "int32 [4]", kv_lengths=lengths.long())
    refused(bad, "page_table is int32 [3, 5]", "[4, pages", page_table=table[:3])
    refused(bad, "k_cache is float", "one type", k_cache=k_cache.half())
    refused(bad, "v has heads 1", "k has 2", v=v[:, :1])
    refused(bad, "v_cache has 8 rows a page", v_cache=v_cache[:, :, :8])
    refused(bad, "v_cache has batch 7", "24", v_cache=v_cache[:7])
    refused(bad, "overlap", k_cache=k_cache[:1].expand(24, -1, -1, -1))
    refused(bad, "third size is the rows of a page", k_cache=k_cache[:, :, :0], v_cache=v_cache[:, :, :0])
    refused(bad, "q_out is given without q", q_out=q)
    refused(bad, "q_out overlaps q", q=q[:, :, :2], q_out=q[:, :, 1:], k=k[:, :, :2], v=v[:, :, :2])
    refused(bad, "q_out is written, but has memory of k:", q=torch.zeros_like(k), q_out=k)
    refused(bad, "sin is given alone", sin=sin)
    refused(bad, "sin is float32 [100, 16]", "both alike", cos=cos, sin=sin[:, :16])
    refused(bad, "theta is 5", "tables or theta", cos=cos, sin=sin, theta=5.0)
    refused(bad, "rope_dims is 24", "multiple of 16", theta=5.0, rope_dims=24)
    refused(bad, "neither tables nor theta", rope_dims=16)
    refused(
        bad, "positions is int64", "each of the 12 rows", positions=torch.arange(12, device=DEVICE), theta=5.0
    )
    refused(bad, "max_seqlen_kv is 100", "room for 80", max_seqlen_kv=100)
    refused(
        bad, "with cu_seqlens_q its batch is 1", cu_seqlens_q=torch.zeros(5, dtype=torch.int32, device=DEVICE)
    )
    refused(flashjit.Unsupported, "no gradients", k=k.clone().requires_grad_())
    if DEVICE == "cpu":
        refused(
            bad,
            "cu_seqlens_q ends with 4",
            k=k[:1],
            v=v[:1],
            cu_seqlens_q=torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32),
        )


# --- merge ---------------------------------------------------------------------------------------------------------


def parts_of(count, dtype=DTYPE):
    torch.manual_seed(count)
    states = []
    for i in range(count):
        out = torch.randn(2, 5, 3, DIM_V, dtype=torch.float64).transpose(1, 2).to(DEVICE, dtype)
        lse = 3 * torch.randn(2, 3, 5).to(DEVICE)
        lse[0, i % 3] = -math.inf  # no keys: O may be anything
        out[0, i % 3] = math.nan
        lse[1, 0, 0], out[1, 0, 0] = -math.inf, math.nan  # no keys at all
        states.append((out, lse))
    return states


def joined(states):
    lses = torch.stack([lse.double() for _, lse in states])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0)
    return sum(
        torch.where(w > 0, w, 0)[..., None] * out.double().nan_to_num(0)
        for w, (out, _) in zip(weights, states)
    ), lse


def test_no_new_rows_for_slots():
    cache = torch.zeros(2, 1, 4, 32, device=DEVICE)
    none = torch.empty(1, 1, 0, 32, device=DEVICE)
    flashjit.append(none, none, cache, cache.clone(), slots=torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert not cache.any()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("types", [(DTYPE, None), (torch.float32, DTYPE), (DTYPE, torch.float32)])
def test_states_are_joined(count, types):
    states = parts_of(count, types[0])
    out, lse = flashjit.merge(states, dtype=types[1])
    want, want_lse = joined(states)
    assert out.dtype == (types[1] or types[0]) and out.shape == want.shape
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
    assert torch.allclose(out.double(), want, atol=1e-5, rtol=2**-7 if out.dtype == torch.bfloat16 else 1e-6)


def test_a_state_s_lse_may_be_one_number():
    (out, lse), *_ = parts_of(1)
    out = out.nan_to_num(0)
    expanded = torch.full((1,), 0.5, device=DEVICE).expand_as(lse)
    got = flashjit.merge([(out, expanded), (out, lse)])
    for x, y in zip(got, flashjit.merge([(out, expanded.contiguous()), (out, lse)])):
        assert torch.equal(x, y)


def test_gradients_of_merge_are_those_of_attention_over_all_keys():
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE, requires_grad=True) for n in (4, 9, 9))
    dout, dlse = torch.randn(1, 2, 4, 16, device=DEVICE), torch.randn(1, 2, 4, device=DEVICE)
    parts = [
        flashjit.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True)
        for a, b in ((0, 2), (2, 8), (8, 9))
    ]
    got = torch.autograd.grad(flashjit.merge(parts), (q, k, v), (dout, dlse))
    want = torch.autograd.grad(flashjit.attention(q, k, v, return_lse=True), (q, k, v), (dout, dlse))
    for x, y in zip(got, want):
        assert torch.allclose(x, y, atol=1e-4 if DEVICE == "cpu" else 2e-2)


def test_gradients_pass_by_states_without_keys():
    states = [(out.requires_grad_(), lse.requires_grad_()) for out, lse in parts_of(3, torch.float32)]
    out, lse = flashjit.merge(states)
    out.sum().backward(retain_graph=True)
    for part, part_lse in states:
        assert torch.isfinite(part.grad).all() and torch.isfinite(part_lse.grad).all()
        assert (part.grad[part_lse.isneginf()] == 0).all()
    finite = lse[~lse.isneginf()]
    grads = torch.autograd.grad(finite.sum(), [lse for _, lse in states])
    assert torch.allclose(sum(grads), (~lse.isneginf()).float(), atol=1e-5)


def test_merge_compiled():
    states = [(out.nan_to_num(0), lse) for out, lse in parts_of(3)]
    got = torch.compile(lambda pairs: flashjit.merge(pairs), fullgraph=True)(states)
    for x, y in zip(got, flashjit.merge(states)):
        assert torch.equal(x, y)


def test_merges_that_make_no_sense_are_refused():
    states = parts_of(2)

    def refused(error, *words, given=states, **named):
        with pytest.raises(error) as caught:
            flashjit.merge(given, **named)
        for word in words:
            assert word in str(caught.value)

    out, lse = states[0]
    bad = flashjit.InvalidArgument
    refused(bad, "0 pairs", "1 to 8", given=[])
    refused(bad, "9 pairs", "merge the result with the rest", given=[states[0]] * 9)
    refused(flashjit.WrongType, "states[0] is a Tensor", "pairs (O, LSE)", given=[out, out])
    refused(bad, "states[1][0] is", "[2, 3, 4, 32]", given=[states[0], (out[:, :, :4], lse[:, :, :4])])
    refused(bad, "states[0][1] is float64", "float32 [2, 3, 5]", given=[(out, lse.double())])
    refused(flashjit.WrongType, "states is a NoneType", given=None)
    refused(bad, "lse is an expanded tensor", lse=lse.new_empty(1).expand_as(lse))
    for dtype in (torch.float64, "float16", []):
        refused(flashjit.WrongType, "dtype is", "torch.float16, torch.bfloat16 or torch.float32", dtype=dtype)
    refused(bad, "out_type is fp16", dtype=torch.float16, given=parts_of(1, torch.bfloat16))


@pytest.mark.parametrize("function", ["append", "quantize"])
def test_vmap_is_refused_with_what_to_do(function):
    x, lengths = torch.randn(3, 2, 4, 8, 16), torch.full((3, 2), 8, dtype=torch.int32)
    call = {
        "append": lambda x, lengths: flashjit.append(x, x, x.clone(), x.clone(), kv_lengths=lengths),
        "quantize": lambda x, lengths: flashjit.quantize(x),
    }[function]
    with pytest.raises(
        flashjit.Unsupported, match=f"{function}.. does not work under torch.vmap: call it outside"
    ):
        torch.vmap(call)(x, lengths)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_autocast_gives_new_rows_the_type_of_the_cache():
    caches = [torch.zeros(2, 2, 8, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(4)]
    k, v, q = (torch.randn(2, 2, 1, 16, device=DEVICE) for _ in range(3))
    with torch.autocast(DEVICE.partition(":")[0], dtype=torch.bfloat16):
        turned = flashjit.append(k, v.bfloat16(), *caches[:2], kv_lengths=ints(3, 8), q=q, theta=100.0)
    k, v, q = (x.bfloat16() for x in (k, v, q))
    want = flashjit.append(k, v, *caches[2:], kv_lengths=ints(3, 8), q=q, theta=100.0)
    torch.testing.assert_close([turned, *caches[:2]], [want, *caches[2:]], rtol=0, atol=0)


def test_one_memory_for_both_caches():
    cache, rows = torch.zeros(2, 1, 8, 32, device=DEVICE), torch.randn(2, 1, 2, 32, device=DEVICE)
    flashjit.append(rows, rows[..., :16], cache, cache[..., :16], kv_lengths=ints(2, 7))  # latents
    torch.testing.assert_close(torch.stack([cache[0, :, :2], cache[1, :, 5:7]]), rows, rtol=0, atol=0)
    for named in (dict(theta=100.0), {}):
        with pytest.raises(flashjit.InvalidArgument, match="k_cache is written, but has memory of v_cache"):
            flashjit.append(
                rows, rows if named else rows.clone(), cache, cache, kv_lengths=ints(2, 7), **named
            )
    with pytest.raises(flashjit.InvalidArgument, match="k_cache is written, but has memory of v_cache"):
        flashjit.append(rows[:1], rows[:1], cache[:1, :, :4], cache[:1, :, 2:6], kv_lengths=ints(2))


@pytest.mark.parametrize("dims", [(59, 59), (20, 16), (16, 4)])
def test_head_dims_that_are_no_multiples_of_eight(dims):
    def case(*dims):
        torch.manual_seed(0)
        return [torch.randn(2, 2, rows, dim, device=DEVICE) for rows in (8, 2) for dim in dims]

    k_cache, v_cache, k, v = case(*dims)
    q = k.clone()
    want_k, want_v = k_cache.clone(), v_cache.clone()
    turned = flashjit.append(k, v, k_cache, v_cache, kv_lengths=ints(3, 8), q=q, theta=100.0, rope_dims=16)
    rotated = [x[..., :16].contiguous() for x in (k, q)]
    narrow = torch.zeros(2, 2, 8, 16, device=DEVICE)
    flashjit.append(
        rotated[0],
        rotated[0],
        narrow,
        narrow.clone(),
        kv_lengths=ints(3, 8),
        q=rotated[1],
        q_out=rotated[1],
        theta=100.0,
    )
    for b, first in ((0, 1), (1, 6)):
        want_k[b, :, first : first + 2] = torch.cat([narrow[b, :, first : first + 2], k[b, ..., 16:]], -1)
        want_v[b, :, first : first + 2] = v[b]
    torch.testing.assert_close([k_cache, v_cache], [want_k, want_v], rtol=0, atol=0)
    torch.testing.assert_close(turned, torch.cat([rotated[1], q[..., 16:]], -1), rtol=0, atol=0)


def test_states_with_head_dims_that_are_no_multiples_of_eight():
    outs, lses = torch.randn(2, 1, 2, 5, 20, device=DEVICE), torch.randn(2, 1, 2, 5, device=DEVICE)
    out, lse = flashjit.merge(list(zip(outs, lses)))
    weights = torch.softmax(lses, 0)
    torch.testing.assert_close(out, (weights[..., None] * outs).sum(0))
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0))


def test_messages_are_in_the_caller_s_words():
    k, cache = torch.randn(2, 2, 1, 16, device=DEVICE), torch.zeros(2, 2, 8, 16, device=DEVICE)
    twice = torch.randn(8, 16, device=DEVICE)
    with pytest.raises(
        flashjit.InvalidArgument, match="cos has 16 columns, for rows of 16: .*at most 8, .*torch.cat"
    ):
        flashjit.append(k, k, cache, cache.clone(), kv_lengths=ints(1, 2), cos=twice, sin=twice)
    if DEVICE == "cpu":  # on a GPU nobody looks
        for lengths, given in ((ints(1, 9), 9), (ints(1, -1), -1)):
            with pytest.raises(
                flashjit.InvalidArgument, match=f"kv_lengths has {given} for sequence 1.*give 0 to 8"
            ):
                flashjit.append(k, k, cache, cache.clone(), kv_lengths=lengths)

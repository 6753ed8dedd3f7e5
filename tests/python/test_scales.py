"""attention() and append() with K and V of 8 bits: against attention() over what they mean, on the GPU where there is one."""

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from flashjit.torch import append, attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
BATCH, HEADS, HEADS_KV, QUERIES, KEYS, DIM = 3, 4, 2, 5, 40, 64


def largest(dtype):
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def codes_of(x, scale, dtype):
    """x / scale in 8 bits, which saturate."""
    x = (x / scale).clamp(-largest(dtype), largest(dtype))
    return (x.round() if dtype == torch.int8 else x).to(dtype)


def expect_close(got, want):
    assert torch.isfinite(got).all()
    assert (got.float() - want.float()).abs().max() <= (2e-2 if got.dtype == torch.bfloat16 else 1e-5)


def tensors(dtype, *scale_size):
    """Q, codes of K and V, their scales, and what they mean."""
    torch.manual_seed(7)
    q = torch.randn(BATCH, HEADS, QUERIES, DIM).to(DEVICE, DTYPE)
    codes, scales, means = [], [], []
    for _ in "kv":
        x = torch.randn(BATCH, HEADS_KV, KEYS, DIM, device=DEVICE)
        scale = (torch.rand(scale_size, device=DEVICE) + 0.5) * 4 / largest(dtype)
        spread = scale.reshape(
            {0: (1, 1, 1, 1), 1: (1, -1, 1, 1), 2: (*scale_size, 1, 1), 3: (*scale_size, 1)}[len(scale_size)]
        )
        codes.append(codes_of(x, spread, dtype))
        means.append((codes[-1].float() * spread).to(DTYPE))
        scales.append(scale)
    return q, codes, scales, means


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(), (HEADS_KV,), (BATCH, HEADS_KV), (BATCH, HEADS_KV, KEYS), (BATCH, 1, 1)])
def test_keys_are_codes_times_scales(dtype, size):
    q, (k, v), (k_scale, v_scale), (k_meant, v_meant) = tensors(dtype, *size)
    got = attention(q, k, v, causal=True, k_scale=k_scale, v_scale=v_scale)
    expect_close(got, attention(q, k_meant, v_meant, causal=True))


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("size", [(), (HEADS_KV,), (BATCH, HEADS_KV)])
@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float32])
def test_queries_are_codes_times_scales(dtype, size, out_dtype):
    q, (k, v), (k_scale, v_scale), (k_meant, v_meant) = tensors(dtype, *size)
    q_scale = torch.rand(size, device=DEVICE) + 0.5
    q8 = q.to(dtype)
    spread = q_scale.reshape({0: (1, 1, 1, 1), 1: (1, -1, 1, 1), 2: (*size, 1, 1)}[len(size)]).expand(
        BATCH, HEADS_KV, 1, 1
    )
    meant = (q8.float() * spread.repeat_interleave(HEADS // HEADS_KV, 1)).to(DTYPE)
    got = attention(
        q8, k, v, causal=True, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=out_dtype
    )
    assert got.dtype == (out_dtype or torch.bfloat16)
    want = attention(meant, k_meant, v_meant, causal=True).float()
    assert (got.float() - want).norm() <= (4e-2 if DEVICE == "cuda" else 4e-3) * want.norm()


@pytest.mark.parametrize("sums", [4, "all"])
def test_sums_in_the_tensor_cores(sums):
    q, codes, (k_scale, v_scale), _ = tensors(torch.float8_e4m3fn, BATCH, HEADS_KV)
    q = codes_of(q, 0.01, torch.float8_e4m3fn)
    given = {
        "causal": True,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "q_scale": torch.tensor(0.01, device=DEVICE),
    }
    got = attention(q, *codes, **given, pv_sums=sums)
    torch.testing.assert_close(got, attention(q, *codes, **given, pv_sums=1), atol=1e-2, rtol=2e-2)
    with pytest.raises(flashjit.InvalidArgument, match="pv_sums is 3"):
        attention(q, *codes, **given, pv_sums=3)
    with pytest.raises(flashjit.InvalidArgument, match="only products of 8 bits"):
        attention(*(x.to(DTYPE) for x in (q, *codes)), pv_sums=sums)


def test_slots_and_pages():
    dtype, rows = torch.float8_e4m3fn, 8
    q, (k, v), (k_scale, v_scale), (k_meant, v_meant) = tensors(dtype, BATCH, HEADS_KV, KEYS)
    lengths = torch.tensor([KEYS, 0, 13], dtype=torch.int32, device=DEVICE)
    want = attention(q, k_meant, v_meant, causal=True, kv_lengths=lengths, cache=True)
    expect_close(
        attention(q, k, v, causal=True, kv_lengths=lengths, cache=True, k_scale=k_scale, v_scale=v_scale),
        want,
    )
    table = torch.randperm(BATCH * KEYS // rows, device=DEVICE).to(torch.int32).reshape(BATCH, -1)

    def in_pages(x):  # [batch, heads, keys, ..] -> [pages, heads, rows, ..]
        pages = x.unflatten(2, (-1, rows)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(pages).index_copy_(0, table.flatten().long(), pages)

    as_bytes = [in_pages(x.view(torch.uint8)).view(dtype) for x in (k, v)]
    scales = [in_pages(x) for x in (k_scale, v_scale)]
    got = attention(
        q, *as_bytes, causal=True, kv_lengths=lengths, page_table=table, k_scale=scales[0], v_scale=scales[1]
    )
    expect_close(got, want)
    strided = torch.stack(scales, 1)  # those of K and V side by side
    got = attention(
        q,
        *as_bytes,
        causal=True,
        kv_lengths=lengths,
        page_table=table,
        k_scale=strided[:, 0],
        v_scale=strided[:, 1],
    )
    expect_close(got, want)


def test_packed_sequences():
    dtype = torch.float8_e4m3fn
    q, (k, v), (k_scale, v_scale), (k_meant, v_meant) = tensors(dtype, HEADS_KV)
    starts = [torch.tensor([0, 2, 2, n], dtype=torch.int32, device=DEVICE) for n in (QUERIES, KEYS)]
    named = dict(
        cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1], max_seqlen_q=QUERIES, max_seqlen_kv=KEYS, causal=True
    )
    got = attention(q[:1], k[:1], v[:1], k_scale=k_scale, v_scale=v_scale, **named)
    expect_close(got, attention(q[:1], k_meant[:1], v_meant[:1], **named))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("by_key", [False, True])
def test_append_fills_what_attention_reads(dtype, by_key):
    torch.manual_seed(3)
    k, v = (torch.randn(BATCH, HEADS_KV, 6, DIM).to(DEVICE, DTYPE) for _ in "kv")
    q = torch.randn(BATCH, HEADS, 6, DIM).to(DEVICE, DTYPE)
    cache = [torch.zeros(BATCH, HEADS_KV, KEYS, DIM, device=DEVICE).to(dtype) for _ in "kv"]
    scales = [
        torch.full((BATCH, HEADS_KV, KEYS) if by_key else (HEADS_KV,), 4 / largest(dtype), device=DEVICE)
        for _ in "kv"
    ]
    lengths = torch.full((BATCH,), 6, dtype=torch.int32, device=DEVICE)
    rotated = append(k, v, *cache, kv_lengths=lengths, q=q, theta=1e4, k_scale=scales[0], v_scale=scales[1])
    plain = [torch.zeros(BATCH, HEADS_KV, KEYS, DIM, device=DEVICE, dtype=DTYPE) for _ in "kv"]
    append(k, v, *plain, kv_lengths=lengths, theta=1e4)
    step = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 0}[dtype]
    for codes, scale, exact in zip(cache, scales, plain):
        spread = scale[..., None] if by_key else scale[:, None, None]
        meant, exact = codes.float() * spread, exact.float()
        exact = exact if by_key else exact.clamp(-4.0, 4.0)
        assert ((meant - exact).abs() <= 1.01 * step * exact.abs() + 0.6 * spread + 4e-2)[:, :, :6].all()
        if by_key:
            assert torch.allclose(scale[:, :, :6], exact[:, :, :6].abs().amax(-1) / largest(dtype), rtol=1e-2)
            assert (scale[:, :, 6:] == 4 / largest(dtype)).all()
    got = attention(
        rotated, *cache, causal=True, kv_lengths=lengths, cache=True, k_scale=scales[0], v_scale=scales[1]
    )
    want = attention(rotated, *plain, causal=True, kv_lengths=lengths, cache=True)
    assert (got.float() - want.float()).abs().max() < 0.6


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scales", ["tensor", "head", "page", "row"])
def test_quantize_makes_what_attention_takes(dtype, scales):
    torch.manual_seed(5)
    q, k, v = (
        torch.randn(BATCH, heads, n, DIM).to(DEVICE, DTYPE)
        for heads, n in ((HEADS, QUERIES), (HEADS_KV, KEYS), (HEADS_KV, KEYS))
    )
    (k8, k_scale), (v8, v_scale) = (flashjit.quantize(x, dtype, scales=scales) for x in (k, v))
    assert k8.dtype == dtype and k8.shape == k.shape
    sizes = {
        "tensor": (),
        "head": (BATCH, HEADS_KV),
        "page": (BATCH, HEADS_KV, 1),
        "row": (BATCH, HEADS_KV, KEYS),
    }
    assert k_scale.shape == sizes[scales]
    got = attention(q, k8, v8, causal=True, k_scale=k_scale, v_scale=v_scale).float()
    want = attention(q, k, v, causal=True).float()
    assert (got - want).norm() < {torch.int8: 0.03, torch.float8_e4m3fn: 0.06, torch.float8_e5m2: 0.12}[
        dtype
    ] * want.norm()


def test_quantized_queries_share_a_kv_head_s_scale_and_may_be_rotated():
    torch.manual_seed(6)
    q, k, v = (
        torch.randn(BATCH, heads, n, DIM)
        for heads, n in ((HEADS, QUERIES), (HEADS_KV, KEYS), (HEADS_KV, KEYS))
    )
    k[..., 3] *= 30  # a dimension of outliers
    q, k, v = (x.to(DEVICE, DTYPE) for x in (q, k, v))
    want, errors = attention(q, k, v, causal=True).float(), []
    for hadamard in (False, True):
        q8, q_scale = flashjit.quantize(q, heads=HEADS_KV, hadamard=hadamard)
        k8, k_scale = flashjit.quantize(k, hadamard=hadamard)
        v8, v_scale = flashjit.quantize(v)
        assert q_scale.shape == (BATCH, HEADS_KV)
        got = attention(q8, k8, v8, causal=True, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale).float()
        errors.append(((got - want).norm() / want.norm()).item())
    assert errors[0] < 0.3 and errors[1] < 0.3


@pytest.mark.parametrize(
    "given",
    [
        {"theta": 1e4},
        {"theta": 500.0, "rope_dims": 16, "interleaved": True},
        {"tables": torch.float32},
        {"tables": DTYPE, "positions": True, "hadamard": True},
    ],
)
def test_quantize_rotates_by_position_first(given):
    """As append() does, which then quantizes a cache."""
    torch.manual_seed(7)
    x = torch.randn(BATCH, HEADS, QUERIES, DIM).to(DEVICE, DTYPE)
    given, rope_dims = dict(given), given.get("rope_dims") or DIM
    positions = torch.arange(QUERIES).repeat(BATCH, 1)
    if given.pop("positions", False):
        positions = positions.flip(1) * 5 + 2
        given["positions"] = positions.int().to(DEVICE)
    angles = positions[:, :, None] * given.get("theta", 1e4) ** (
        -2 * torch.arange(rope_dims // 2) / rope_dims
    )
    if table_type := given.pop("tables", None):
        table = torch.arange(6 * QUERIES)[:, None] * 1e4 ** (-2 * torch.arange(rope_dims // 2) / rope_dims)
        given.update(cos=table.cos().to(DEVICE, table_type), sin=table.sin().to(DEVICE, table_type))
    cos, sin = (f(angles)[:, None].to(DEVICE) for f in (torch.cos, torch.sin))
    turned = x.float()
    first, second = (
        (turned[..., :rope_dims:2], turned[..., 1:rope_dims:2])
        if given.get("interleaved")
        else (turned[..., : rope_dims // 2], turned[..., rope_dims // 2 : rope_dims])
    )
    pair = first * cos - second * sin, first * sin + second * cos
    head = torch.stack(pair, -1).flatten(-2) if given.get("interleaved") else torch.cat(pair, -1)
    want, want_scale = flashjit.quantize(
        torch.cat([head, turned[..., rope_dims:]], -1).contiguous(), hadamard=given.get("hadamard", False)
    )
    got, scale = flashjit.quantize(x, **given)
    assert torch.allclose(scale, want_scale, rtol=2e-2 if table_type == DTYPE else 1e-4)
    got, want = got.float() * scale[..., None, None], want.float() * want_scale[..., None, None]
    assert (got - want).norm() < (0.05 if table_type == DTYPE else 0.005) * want.norm()
    assert (got - x.float()).norm() > 0.3 * want.norm()


def test_quantize_compiles():
    x = torch.randn(2, 2, 5, 32).to(DEVICE, DTYPE)
    for scales in ("head", "row"):
        torch._dynamo.reset()
        run = torch.compile(
            lambda x: flashjit.quantize(2 * x, scales=scales, hadamard=True),
            backend="aot_eager",
            fullgraph=True,
        )
        for got, want in zip(run(x), flashjit.quantize(2 * x, scales=scales, hadamard=True)):
            assert torch.equal(got.float(), want.float())


def test_quantize_names_mistakes():
    x = torch.randn(BATCH, HEADS, QUERIES, DIM).to(DEVICE, DTYPE)
    for named, words in (
        ({"scales": "column"}, "scales is 'column'"),
        ({"heads": 3}, "heads is 3"),
        ({"heads": 2, "scales": "row"}, "heads is 2"),
        ({"heads": 2.0}, "heads is a float"),
        ({"scales": ["row"]}, "scales is a list"),
        ({"dtype": [torch.int8]}, "dtype is"),
        ({"cos": torch.ones(9, DIM // 2, device=DEVICE)}, "cos is given alone"),
        ({"theta": -1.0}, "theta is -1"),
        ({"theta": 1e4, "rope_dims": 24}, "rope.dims is 24"),
        ({"theta": 1e4, "positions": [1]}, "positions is a list"),
        ({"theta": 1e4, "positions": torch.ones(3, dtype=torch.int32, device=DEVICE)}, "positions is"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=words):
            flashjit.quantize(x, **named)
    with pytest.raises(flashjit.InvalidArgument, match="head_dim is 24"):
        flashjit.quantize(torch.cat([x, x], -1)[..., :24].contiguous())
    with pytest.raises(flashjit.WrongType, match="dtype is torch.float16"):
        flashjit.quantize(x, torch.float16)
    with pytest.raises(flashjit.Unsupported, match="no gradients"):
        flashjit.quantize(x.clone().requires_grad_())
    zeros, scale = flashjit.quantize(torch.zeros_like(x))
    assert (zeros.float() == 0).all() and (scale == 1).all()


@pytest.mark.parametrize("scales", ["tensor", "head", "page", "row"])
@pytest.mark.parametrize("size", [(0, HEADS, QUERIES, DIM), (BATCH, 0, QUERIES, DIM), (BATCH, HEADS, 0, DIM)])
def test_the_scales_of_nothing_are_one(scales, size, monkeypatch):
    monkeypatch.setattr(
        torch, "empty", lambda *size, **named: torch.full(*size, 7.0, **named)
    )  # what memory happens to hold
    codes, scale = flashjit.quantize(torch.zeros(size, device=DEVICE, dtype=DTYPE), scales=scales)
    assert codes.shape == size and (scale == 1).all()


def test_views_that_negate_are_read_as_what_they_mean():
    x = torch.randn(BATCH, HEADS_KV, 6, DIM).to(DEVICE, DTYPE)
    negated = torch._neg_view(-x)
    for got, want in zip(flashjit.quantize(negated), flashjit.quantize(x)):
        assert torch.equal(got.float(), want.float())
    scale = torch.full((HEADS_KV,), 0.01, device=DEVICE)
    lengths = torch.full((BATCH,), 6, dtype=torch.int32, device=DEVICE)
    caches = [torch.zeros(BATCH, HEADS_KV, KEYS, DIM, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kvkv"]
    append(x, x, *caches[:2], kv_lengths=lengths, k_scale=scale, v_scale=scale)
    append(negated, x, *caches[2:], kv_lengths=lengths, k_scale=scale, v_scale=scale)
    with pytest.raises(flashjit.InvalidArgument, match="k_scale is a view .* negated"):
        append(x, x, *caches[2:], kv_lengths=lengths, k_scale=torch._neg_view(-scale), v_scale=scale)
    for want, got in zip(caches[:2], caches[2:]):
        assert torch.equal(want.float(), got.float())
    turned = [
        append(x, x, *caches[2:], kv_lengths=lengths, k_scale=scale, v_scale=scale, q=q, cos=cos, sin=sin)
        for q, cos, sin in (
            (x, x[0, 0, :, ::2].float(), x[0, 0, :, 1::2].float()),
            (negated, x[0, 0, :, ::2].float(), torch._neg_view(-x[0, 0, :, 1::2].float().contiguous())),
        )
    ]
    assert torch.equal(*turned)
    q, given = torch.randn_like(x), dict(v_scale=scale, kv_lengths=lengths, cache=True)
    want = attention(q, *caches[:2], k_scale=scale, **given)
    expect_close(attention(q, *caches[:2], k_scale=torch._neg_view(-scale), **given), want)
    state = (x, torch.randn(x.shape[:3], device=DEVICE))
    for got, want in zip(
        flashjit.merge([(negated, torch._neg_view(-state[1])), state]), flashjit.merge([state, state])
    ):
        assert torch.equal(got, want)


def test_scales_that_append_writes_have_memory_each():
    k = torch.randn(BATCH, HEADS_KV, 6, DIM).to(DEVICE, DTYPE)
    cache = [torch.zeros(BATCH, HEADS_KV, KEYS, DIM, device=DEVICE).to(torch.int8) for _ in "kv"]
    scale = torch.ones(BATCH, HEADS_KV, KEYS, device=DEVICE)
    lengths = torch.full((BATCH,), 6, dtype=torch.int32, device=DEVICE)
    with pytest.raises(flashjit.InvalidArgument, match="v_scale is an expanded tensor"):
        append(k, k, *cache, kv_lengths=lengths, k_scale=scale, v_scale=scale[:, :, :1].expand_as(scale))


def test_mistakes_are_named():
    q, (k, v), (k_scale, v_scale), (k_meant, v_meant) = tensors(torch.float8_e4m3fn, HEADS_KV)
    for named, words in (
        ({}, "k_scale is missing"),
        ({"k_scale": k_scale}, "v_scale is missing"),
        ({"k_scale": k_scale.double(), "v_scale": v_scale}, "k_scale is float64"),
        ({"k_scale": k_scale[:1].repeat(3), "v_scale": v_scale}, "k_scale has 3 heads"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=words):
            attention(q, k, v, **named)
    with pytest.raises(flashjit.InvalidArgument, match="k_scale or v_scale is given"):
        attention(q, k_meant, v_meant, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(flashjit.InvalidArgument, match="must have one type"):
        attention(q, k, v.view(torch.int8), k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(flashjit.WrongType, match="give a float32"):
        attention(q, k, v, k_scale=1.0, v_scale=v_scale)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    q8, one = q.to(torch.float8_e4m3fn), torch.ones((), device=DEVICE)
    with pytest.raises(flashjit.InvalidArgument, match="q_scale is missing"):
        attention(q8, k, v, **scales)
    with pytest.raises(flashjit.InvalidArgument, match="q_scale is given, but q is"):
        attention(q, k, v, q_scale=one, **scales)
    with pytest.raises(flashjit.InvalidArgument, match="q is float8_e5m2 .* and k is float8_e4m3fn"):
        attention(q.to(torch.float8_e5m2), k, v, q_scale=one, **scales)
    with pytest.raises(flashjit.WrongType, match="q is int8: products"):
        attention(q.to(torch.int8), k.view(torch.int8), v.view(torch.int8), q_scale=one, **scales)
    with pytest.raises(flashjit.InvalidArgument, match="q_scale has 3 heads"):
        attention(q8, k, v, q_scale=one.repeat(3), **scales)
    with pytest.raises(flashjit.InvalidArgument, match="out_dtype is torch.float64: with q of 8 bits"):
        attention(q8, k, v, q_scale=one, out_dtype=torch.float64, **scales)
    with pytest.raises(flashjit.InvalidArgument, match="out_dtype is .*: with q of 8 bits"):
        attention(q8, k, v, q_scale=one, out_dtype=[torch.float16], **scales)
    with pytest.raises(
        flashjit.WrongType, match="v is b?float.*: where k is float8_e4m3fn it must be of that type"
    ):
        attention(q, k, v_meant, **scales)
    with pytest.raises(flashjit.InvalidArgument, match="k_scale is float32"):
        attention(q, k, v, k_scale=k_scale.to_sparse(), v_scale=v_scale)
    with pytest.raises(flashjit.Unsupported, match="8 bits"):
        attention(q.requires_grad_(), k, v, k_scale=k_scale, v_scale=v_scale)


def test_compiled():
    q, (k, v), (k_scale, v_scale), (k_meant, v_meant) = tensors(torch.float8_e4m3fn, BATCH, HEADS_KV)
    run = torch.compile(
        lambda *x: attention(*x[:3], causal=True, k_scale=x[3], v_scale=x[4]),
        backend="aot_eager",
        fullgraph=True,
    )
    expect_close(run(q, k, v, k_scale, v_scale), attention(q, k_meant, v_meant, causal=True))
    q8, q_scale = q.to(k.dtype), torch.ones((), device=DEVICE)
    given = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=torch.float16)
    run = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True, **given), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(run(q8, k, v), attention(q8, k, v, causal=True, **given))


class Model:
    """A transformer of random weights, whose cache is of `dtype`: of 8 bits with a scale for each key."""

    def __init__(self, dtype, layers=3, width=HEADS * DIM, vocabulary=97):
        torch.manual_seed(11)
        weight = lambda *size: (torch.randn(size) / size[0] ** 0.5).to(DEVICE, DTYPE)
        self.embedding = torch.randn(vocabulary, width).to(DEVICE, DTYPE)
        self.weights = [
            {
                "q": weight(width, HEADS, DIM),
                "k": weight(width, HEADS_KV, DIM),
                "v": weight(width, HEADS_KV, DIM),
                "o": weight(HEADS * DIM, width),
                "up": weight(width, 4 * width),
                "down": weight(4 * width, width),
            }
            for _ in range(layers)
        ]
        zeros = lambda: torch.zeros(BATCH, HEADS_KV, KEYS, DIM, device=DEVICE, dtype=DTYPE).to(dtype)
        self.caches = [(zeros(), zeros()) for _ in range(layers)]
        self.scales = [
            [torch.ones(BATCH, HEADS_KV, KEYS, device=DEVICE) for _ in "kv"]
            if dtype in TYPES
            else [None, None]
            for _ in range(layers)
        ]
        self.length = 0

    def __call__(self, tokens):
        """Logits of the last token."""
        x = self.embedding[tokens]
        self.length += tokens.shape[1]
        lengths = torch.full((BATCH,), self.length, dtype=torch.int32, device=DEVICE)
        for w, cache, (k_scale, v_scale) in zip(self.weights, self.caches, self.scales):
            y = torch.nn.functional.rms_norm(x, x.shape[-1:])
            q, k, v = (torch.einsum("bsw,whd->bhsd", y, w[name]) for name in "qkv")
            q = append(k, v, *cache, kv_lengths=lengths, q=q, theta=1e4, k_scale=k_scale, v_scale=v_scale)
            out = attention(
                q, *cache, causal=True, kv_lengths=lengths, cache=True, k_scale=k_scale, v_scale=v_scale
            )
            x = x + out.transpose(1, 2).flatten(2) @ w["o"]
            y = torch.nn.functional.rms_norm(x, x.shape[-1:])
            x = x + torch.relu(y @ w["up"]) @ w["down"]
        return (torch.nn.functional.rms_norm(x[:, -1], x.shape[-1:]) @ self.embedding.T).float()


@pytest.mark.parametrize(
    "dtype, limit", [(torch.float8_e4m3fn, 0.025), (torch.int8, 0.015), (torch.float8_e5m2, 0.045)]
)
def test_a_model_s_logits_stay_near(dtype, limit):
    """Within `limit` of their norm: prefill, then some tokens by themselves."""
    exact, cached = Model(DTYPE), Model(dtype)
    tokens = torch.randint(97, (BATCH, 20), device=DEVICE)
    for piece in (tokens[:, :14], *tokens[:, 14:].split(1, 1)):
        want, got = exact(piece), cached(piece)
        distance = ((got - want).norm() / want.norm()).item()
        assert 1e-4 < distance < limit

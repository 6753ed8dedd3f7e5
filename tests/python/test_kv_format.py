"""K and V in any format: KvFormat, quantize(), append() and attention(), on the CPU."""

import flashjit
import numpy
import pytest

torch = pytest.importorskip("torch")

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def rows_of(tensor):
    return tensor.numpy().reshape(-1, tensor.shape[-1])


def halves(block):  # llama.cpp's 4 bits: 16 bytes, lower halves first
    return numpy.concatenate([block & 15, block >> 4], axis=-1).astype(numpy.float64)


def decode_q8_0(rows, scale):
    blocks = rows.reshape(len(rows), -1, 34)
    d = blocks[..., :2].copy().view(numpy.float16).astype(numpy.float64)
    return (blocks[..., 2:].copy().view(numpy.int8) * d).reshape(len(rows), -1)


def decode_q4_0(rows, scale):
    blocks = rows.reshape(len(rows), -1, 18)
    d = blocks[..., :2].copy().view(numpy.float16).astype(numpy.float64)
    return ((halves(blocks[..., 2:]) - 8) * d).reshape(len(rows), -1)


def decode_q4_1(rows, scale):
    blocks = rows.reshape(len(rows), -1, 20)
    d, m = (blocks[..., i : i + 2].copy().view(numpy.float16).astype(numpy.float64) for i in (0, 2))
    return (halves(blocks[..., 4:]) * d + m).reshape(len(rows), -1)


def decode_nvfp4(rows, scale):
    count = rows.shape[1] * 16 // 9
    codes = numpy.stack([rows[:, : count // 2] & 15, rows[:, : count // 2] >> 4], axis=-1).reshape(
        len(rows), -1
    )
    of_blocks = torch.from_numpy(rows[:, count // 2 :].copy()).view(torch.float8_e4m3fn).double().numpy()
    return numpy.array(E2M1)[codes] * of_blocks.repeat(16, axis=1) * scale.reshape(-1, 1)


def decode_fp8_ds_mla(rows, scale):
    codes = torch.from_numpy(rows[:, :512].copy()).view(torch.float8_e4m3fn).double().numpy()
    of_blocks = rows[:, 512:528].copy().view(numpy.float32).astype(numpy.float64)
    tail = torch.from_numpy(rows[:, 528:].copy()).view(torch.bfloat16).double().numpy()
    return numpy.concatenate([codes * of_blocks.repeat(128, axis=1), tail], axis=1)


DECODERS = {"q8_0": decode_q8_0, "q4_0": decode_q4_0, "q4_1": decode_q4_1, "nvfp4": decode_nvfp4}
#: The largest error of an element of a normal row.
ERRORS = {"q8_0": 0.02, "q4_0": 0.4, "q4_1": 0.3, "nvfp4": 0.6}


def quantized(x, name):
    """x's rows in the format, the scale of the call, and what they mean."""
    codes, scale = flashjit.quantize(x, format=name)
    per_row = None if scale is None else scale[:, :, None].expand(x.shape[:3]).double().numpy().reshape(-1)
    values = DECODERS[name](rows_of(codes), per_row).reshape(x.shape)
    return codes, scale, torch.from_numpy(values)


def exact(q, k, v, causal=True):
    s = (q.double() @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~mask, -torch.inf)
    return torch.softmax(s, -1) @ v


def test_a_format_knows_its_bytes():
    sizes = {
        "q8_0": 136,
        "q4_0": 72,
        "q4_1": 80,
        "nvfp4": 72,
        "mxfp4": 68,
        "mxfp8": 132,
        "int4:g32:fp16:zero": 80,
    }
    for text, size in sizes.items():
        assert flashjit.KvFormat(text).row_bytes(128) == size, text
    assert flashjit.KvFormat("fp8_ds_mla").row_bytes(576) == 656
    assert flashjit.KvFormat("q8_0").alignment(128) == 2
    assert flashjit.KvFormat("nvfp4").has_scale and not flashjit.KvFormat("q8_0").has_scale
    assert flashjit.KvFormat.names()["mxfp4"] == "e2m1:g32:e8m0"
    assert flashjit.KvFormat("q8_0") == flashjit.KvFormat("q8_0") != flashjit.KvFormat("q4_0")


@pytest.mark.parametrize("name", DECODERS)
def test_attention_reads_the_rows(name):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, heads, 40, 64) for heads in (4, 2, 2))
    k_rows, k_scale, k_values = quantized(k, name)
    v_rows, v_scale, v_values = quantized(v, name)
    assert (k_values - k).abs().max() < ERRORS[name]
    out = flashjit.attention(
        q, k_rows, v_rows, causal=True, k_format=name, v_format=name, k_scale=k_scale, v_scale=v_scale
    )
    wanted = exact(q, k_values.repeat_interleave(2, 1), v_values.repeat_interleave(2, 1))
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_formats_of_k_and_v_may_differ():
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 2, 30, 64) for _ in range(3))
    k_rows, _, k_values = quantized(k, "q8_0")
    out = flashjit.attention(q, k_rows, v, k_format=flashjit.KvFormat("q8_0"))
    torch.testing.assert_close(out.double(), exact(q, k_values, v.double(), False), atol=1e-5, rtol=1e-5)
    v_rows, v_scale, v_values = quantized(v[..., :32].contiguous(), "nvfp4")
    out = flashjit.attention(q, k_rows, v_rows, k_format="q8_0", v_format="nvfp4", v_scale=v_scale)
    assert out.shape == (1, 2, 30, 32)
    torch.testing.assert_close(out.double(), exact(q, k_values, v_values, False), atol=1e-5, rtol=1e-5)


def test_switches_stand_behind_formats():
    q = torch.randn(1, 2, 30, 64, dtype=torch.bfloat16)
    rows, _ = flashjit.quantize(q, format="int4:g32:fp16")
    given = {"k_format": "int4:g32:fp16", "v_format": "int4:g32:fp16", "return_lse": True}
    out, lse = flashjit.attention(q, rows, rows, out_dtype=torch.float32, **given)
    rounded, _ = flashjit.attention(q, rows, rows, **given)
    assert out.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    torch.testing.assert_close(out.bfloat16(), rounded)


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "int4:g32:fp16:zero", "mxfp8"])
def test_append_encodes_into_pages(name):
    torch.manual_seed(3)
    form = flashjit.KvFormat(name)
    k, v = torch.randn(2, 2, 2, 20, 64)
    pages = torch.zeros(2, 7, 2, 8, form.row_bytes(64), dtype=torch.uint8)
    table = torch.tensor([[4, 0, 2], [1, 6, 3]], dtype=torch.int32)
    lengths = torch.tensor([20, 20], dtype=torch.int32)
    q_out = flashjit.append(
        k, v, *pages, kv_lengths=lengths, page_table=table, q=k, k_format=name, v_format=form
    )
    torch.testing.assert_close(q_out, k)
    assert torch.equal(pages[0, table[0, 0].item(), 1, 3], flashjit.quantize(k, format=name)[0][0, 1, 3])
    q = torch.randn(2, 4, 1, 64)
    out = flashjit.attention(
        q, *pages, causal=True, kv_lengths=lengths, page_table=table, k_format=name, v_format=name
    )
    of_rows = flashjit.attention(
        q, *(flashjit.quantize(x, format=name)[0] for x in (k, v)), k_format=name, v_format=name
    )
    torch.testing.assert_close(out, of_rows)
    torch.testing.assert_close(out, flashjit.attention(q, k, v), atol=0.2, rtol=0.2)


def test_latents_of_deepseek():
    torch.manual_seed(4)
    latents = torch.randn(2, 1, 50, 576)
    cache = torch.zeros(2, 1, 64, 656, dtype=torch.uint8)
    lengths = torch.tensor([50, 50], dtype=torch.int32)
    flashjit.append(latents, None, cache, None, kv_lengths=lengths, k_format="fp8_ds_mla")
    values = torch.from_numpy(decode_fp8_ds_mla(rows_of(cache), None)).reshape(2, 1, 64, 576)[:, :, :50]
    assert ((values - latents).abs() <= 0.07 * latents.abs() + 1e-2).all()
    q = torch.randn(2, 8, 1, 576)
    given = {"kv_lengths": lengths, "cache": True, "k_format": "fp8_ds_mla", "v_columns": 512}
    out = flashjit.attention(q, cache, causal=True, **given)
    wanted = exact(q, values.expand(2, 8, 50, 576), values[..., :512].expand(2, 8, 50, 512))
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    indices = torch.randint(-1, 50, (2, 1, 1, 20), dtype=torch.int32)
    listed = flashjit.attention(q, cache, indices=indices, **given)
    assert listed.shape == (2, 8, 1, 512) and torch.isfinite(listed).all()


def test_bad_formats_are_refused():
    with pytest.raises(flashjit.InvalidArgument, match="neither a name nor codes"):
        flashjit.KvFormat("int5")
    with pytest.raises(flashjit.InvalidArgument, match="blocks of 24 columns"):
        flashjit.KvFormat("int4:g24:fp16")
    with pytest.raises(flashjit.InvalidArgument, match="head_dim is 80.*blocks of 32"):
        flashjit.KvFormat("q8_0").row_bytes(80)
    with pytest.raises(flashjit.WrongType, match="give a text"):
        flashjit.KvFormat(4)
    q = torch.randn(1, 2, 30, 64)
    rows, _ = flashjit.quantize(q, format="q8_0")
    with pytest.raises(flashjit.WrongType, match="torch.uint8"):
        flashjit.attention(q, q, q, k_format="q8_0")
    with pytest.raises(flashjit.InvalidArgument, match="rows of 60 bytes.*have 68"):
        flashjit.attention(q, rows[..., :60].contiguous(), q, k_format="q8_0")
    with pytest.raises(flashjit.InvalidArgument, match="k_scale is missing"):
        flashjit.attention(q, flashjit.quantize(q, format="nvfp4")[0], q, k_format="nvfp4")
    with pytest.raises(flashjit.InvalidArgument, match="k_scale is given"):
        flashjit.attention(q, rows, q, k_format="q8_0", k_scale=torch.ones(()))
    with pytest.raises(flashjit.Unsupported, match="8 bits|gradient"):
        flashjit.attention(q.clone().requires_grad_(), rows, q, k_format="q8_0")


def compiled(function, **given):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **given)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_reads_and_writes_formats(dynamic):
    torch.manual_seed(5)
    k, v = torch.randn(2, 2, 2, 20, 64)
    of_v = flashjit.KvFormat("q8_0")
    table = torch.tensor([[4, 0, 2], [1, 6, 3]], dtype=torch.int32)
    given = {"kv_lengths": torch.tensor([20, 20], dtype=torch.int32), "page_table": table}
    given |= {"k_format": "nvfp4", "v_format": of_v, "k_scale": torch.full((2,), 0.01)}

    def step(q, k, v, k_pages, v_pages):
        flashjit.append(k, v, k_pages, v_pages, **given)
        return flashjit.attention(q, k_pages, v_pages, causal=True, return_lse=True, **given)

    def new_pages():
        return [
            torch.zeros(7, 2, 8, format.row_bytes(64), dtype=torch.uint8)
            for format in (flashjit.KvFormat("nvfp4"), of_v)
        ]

    run = compiled(step, dynamic=dynamic)
    for queries in (1, 3):
        q, got_pages, pages = torch.randn(2, 4, queries, 64), new_pages(), new_pages()
        got, want = run(q, k, v, *got_pages), step(q, k, v, *pages)
        assert all(torch.equal(x, y) for x, y in zip((*got, *got_pages), (*want, *pages)))
        assert pages[0].any() and pages[1].any()


def test_compiled_code_knows_v_s_columns():
    q, x = torch.randn(1, 2, 30, 64), torch.randn(1, 2, 30, 32)
    run = compiled(lambda q, k, v: flashjit.attention(q, k, v, v_format="q8_0"))
    for v in (x, q):  # the second has other columns, and is compiled again
        rows, _ = flashjit.quantize(v, format="q8_0")
        out = run(q, q, rows)
        assert torch.equal(out, flashjit.attention(q, q, rows, v_format="q8_0")) and out.shape == v.shape
    latents, _ = flashjit.quantize(torch.randn(1, 1, 30, 576), format="fp8_ds_mla")
    q = torch.randn(1, 4, 1, 576)
    read = lambda q, k: flashjit.attention(q, k, k_format="fp8_ds_mla", v_columns=512)
    assert torch.equal(compiled(read)(q, latents), read(q, latents))


@pytest.mark.parametrize("name", ["nvfp4", "q8_0"])
def test_quantize_compiles(name):
    x = torch.randn(2, 2, 5, 64)
    encode = lambda x: flashjit.quantize(2 * x, format=name, hadamard=True)
    (codes, scale), (want, want_scale) = compiled(encode)(x), encode(x)
    assert torch.equal(codes, want)
    assert scale is want_scale is None or torch.equal(scale, want_scale)


def test_operators_know_formats():
    from torch._subclasses import FakeTensorMode

    q, x = torch.randn(1, 2, 30, 64), torch.randn(1, 2, 30, 32)
    rows, _ = flashjit.quantize(x, format="q8_0")
    out = flashjit.attention(q, q, rows, v_format="q8_0")
    with FakeTensorMode() as mode:
        fake = flashjit.attention(*map(mode.from_tensor, (q, q, rows)), v_format="q8_0")
    assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)
    negated = torch._neg_view(-q)
    assert torch.equal(flashjit.attention(negated, q, rows, v_format="q8_0"), out)
    with pytest.raises(flashjit.Unsupported, match="torch.func's transforms"):
        torch.vmap(lambda q: flashjit.attention(q, q, rows, v_format="q8_0"))(q[None])
    with pytest.raises(Exception, match="rows of 60 bytes.*have 68"):
        compiled(lambda q, k: flashjit.attention(q, k, q, k_format="q8_0"))(
            q, torch.zeros(1, 2, 30, 60).byte()
        )

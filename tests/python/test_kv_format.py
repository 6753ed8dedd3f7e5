"""K and V in any format: KvFormat, quantize(), append() and attention(), on the CPU."""

import pathlib
import re

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


def fifth_bits(words):  # 4 bytes: bit i is the fifth of element i, worth 16
    return numpy.unpackbits(words, axis=-1, bitorder="little").astype(numpy.float64) * 16


def decode_q5_0(rows, scale):
    blocks = rows.reshape(len(rows), -1, 22)
    d = blocks[..., :2].copy().view(numpy.float16).astype(numpy.float64)
    return ((halves(blocks[..., 6:]) + fifth_bits(blocks[..., 2:6]) - 16) * d).reshape(len(rows), -1)


def decode_q5_1(rows, scale):
    blocks = rows.reshape(len(rows), -1, 24)
    d, m = (blocks[..., i : i + 2].copy().view(numpy.float16).astype(numpy.float64) for i in (0, 2))
    return ((halves(blocks[..., 8:]) + fifth_bits(blocks[..., 4:8])) * d + m).reshape(len(rows), -1)


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


#: Eight values that a normal element is near to, as TurboQuant has them for rotated rows.
BOOK = "book(-2.152,-1.344,-0.756,-0.245,0.245,0.756,1.344,2.152):row:fp16"


def decode_book(rows, scale):
    values = numpy.array(BOOK[5 : BOOK.index(")")].split(","), numpy.float32).astype(numpy.float64)
    bits = numpy.unpackbits(rows[:, :-2], axis=-1, bitorder="little").reshape(len(rows), -1, 3)
    d = rows[:, -2:].copy().view(numpy.float16).astype(numpy.float64)
    return values[bits @ [1, 2, 4]] * d


def decode_uint4_with_uint4(rows, scale):  # as AWQ: zero points of four bits, two to a byte
    count = rows.shape[1] * 64 // 37 // 32 * 32  # 37 bytes for 64 columns
    codes, zeros = (
        numpy.stack([part & 15, part >> 4], axis=-1).reshape(len(rows), -1).astype(numpy.float64)
        for part in (rows[:, : count // 2], rows[:, count // 2 + count // 16 :])
    )
    scales = rows[:, count // 2 : count // 2 + count // 16].copy().view(numpy.float16).astype(numpy.float64)
    zeros = zeros[:, : count // 32]
    return (codes - zeros.repeat(32, axis=1)) * scales.repeat(32, axis=1)


#: No code times a scale: the scale is the step of a logarithm.
LOGARITHMS = "decode4(select(code < 8, 1.0, -1.0) * (exp2((code & 7) * scale) - 1.0)):g32:fp16"


def decode_logarithms(rows, scale):
    count = rows.shape[1] * 16 // 18  # bytes of codes, two each; the others are scales
    codes = (
        numpy.stack([rows[:, :count] & 15, rows[:, :count] >> 4], axis=-1).reshape(len(rows), -1).astype(int)
    )
    steps = rows[:, count:].copy().view(numpy.float16).astype(numpy.float64).repeat(32, axis=1)
    return numpy.where(codes < 8, 1, -1) * (numpy.exp2((codes & 7) * steps) - 1)


DECODERS = {
    LOGARITHMS: decode_logarithms,
    "uint4:g32:fp16:zero=uint4": decode_uint4_with_uint4,
    "q8_0": decode_q8_0,
    "q4_0": decode_q4_0,
    "q4_1": decode_q4_1,
    "q5_0": decode_q5_0,
    "q5_1": decode_q5_1,
    "nvfp4": decode_nvfp4,
    BOOK: decode_book,
}
#: The largest error of an element of a normal row.
ERRORS = {
    LOGARITHMS: 0.6,
    "uint4:g32:fp16:zero=uint4": 0.4,
    "q8_0": 0.02,
    "q4_0": 0.4,
    "q4_1": 0.3,
    "q5_0": 0.2,
    "q5_1": 0.15,
    "nvfp4": 0.6,
    BOOK: 0.8,
}


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
        "q5_0": 88,
        "q5_1": 96,
        "book(-7,-4,-2,-1,1,2,4,7):row:fp16": 50,
        "nvfp4": 72,
        "mxfp4": 68,
        "mxfp8": 132,
        "int4:g32:fp16:zero": 80,
        "uint4:g32:fp16:zero=uint4": 74,
    }
    for text, size in sizes.items():
        assert flashjit.KvFormat(text).row_bytes(128) == size, text
    assert flashjit.KvFormat("fp8_ds_mla").row_bytes(576) == 656
    assert flashjit.KvFormat("fp8_ds_mla_nope").row_bytes(512) == 528
    assert flashjit.KvFormat("q8_0").alignment(128) == 2
    assert flashjit.KvFormat("nvfp4").has_scale and not flashjit.KvFormat("q8_0").has_scale
    assert flashjit.KvFormat.names()["mxfp4"] == "e2m1:g32:e8m0"
    assert flashjit.KvFormat("q8_0") == flashjit.KvFormat("q8_0") != flashjit.KvFormat("q4_0")


def test_a_format_of_a_function_of_codes():
    cubes = flashjit.KvFormat.of_codes(lambda code: (code / 4 - 0.875) ** 3, 3, "g32:fp16")
    assert cubes.row_bytes(64) == 24 + 4
    x = torch.randn(1, 1, 9, 64)
    rows, _ = flashjit.quantize(x, format=cubes)
    values = torch.tensor([(code / 4 - 0.875) ** 3 for code in range(8)])
    bits = numpy.unpackbits(rows_of(rows)[:, :24], axis=-1, bitorder="little").reshape(9, 64, 3)
    scales = torch.from_numpy(rows_of(rows)[:, 24:].copy().view(numpy.float16).astype(numpy.float32))
    scales = scales.repeat_interleave(32, 1)
    stored = values[torch.from_numpy(bits @ [1, 2, 4])] * scales
    nearest = (x[0, 0][..., None] - values * scales[..., None]).abs().amin(-1)
    torch.testing.assert_close((stored - x[0, 0]).abs(), nearest)
    with pytest.raises(flashjit.InvalidArgument, match="bits is 6"):
        flashjit.KvFormat.of_codes(float, 6, "")
    for wrong, match in (
        (3, "decode is a int: give a function"),
        (lambda code: "x", "decode gives no number"),
    ):
        with pytest.raises(flashjit.WrongType, match=match):
            flashjit.KvFormat.of_codes(wrong, 3, "g32:fp16")
    with pytest.raises(flashjit.InvalidArgument, match="finite"):
        flashjit.KvFormat.of_codes(lambda code: numpy.log(code) if code else -numpy.inf, 4, "row:fp16")


def test_a_format_of_an_expression_of_codes():
    text = "pow(code / 4.0 - 0.875, 3.0) * scale"
    form = flashjit.KvFormat(f"decode3({text}):g32:fp16")
    assert form == flashjit.KvFormat.of_codes(text, 3, "g32:fp16")
    cubes = flashjit.KvFormat.of_codes(lambda code: (code / 4 - 0.875) ** 3, 3, "g32:fp16")
    x = torch.randn(1, 1, 9, 64)
    assert torch.equal(flashjit.quantize(x, format=form)[0], flashjit.quantize(x, format=cubes)[0])
    affine = flashjit.KvFormat("decode4((code - zero) * scale):g32:fp16:zero=uint4")
    codes = flashjit.quantize(x, format="uint4:g32:fp16:zero=uint4")[0]
    assert torch.equal(flashjit.quantize(x, format=affine)[0], codes)
    for wrong, part in {"code * slope): g32": "slope", "tanh(code * scale))": "no scale of the call"}.items():
        with pytest.raises(flashjit.InvalidArgument, match=part):
            flashjit.KvFormat(f"decode4({wrong}")
    with pytest.raises(flashjit.InvalidArgument, match="bits is 7"):
        flashjit.KvFormat.of_codes(text, 7, "g32:fp16")


def test_elements_by_an_expression_need_values_that_grow_with_the_scale():
    falls = "decode4((code + 1) / (1.0 + scale)):g32:fp16"
    rows = flashjit.quantize(torch.randn(1, 1, 30, 64), format=LOGARITHMS)[0]
    out = flashjit.attention(torch.randn(1, 2, 9, 64), rows, rows, k_format=falls, v_format=falls)
    assert out.isfinite().all()
    with pytest.raises(flashjit.InvalidArgument, match="does not grow with the scale"):
        flashjit.quantize(torch.randn(1, 1, 30, 64), format=falls)
    with pytest.raises(flashjit.InvalidArgument, match="does not grow with the scale"):
        lengths = torch.tensor([30], dtype=torch.int32)
        flashjit.append(
            *torch.randn(2, 1, 1, 30, 64), rows, rows, kv_lengths=lengths, k_format=falls, v_format=falls
        )


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


@pytest.mark.parametrize(
    "name", ["q8_0", "q4_1", "q5_0", "q5_1", "int4:g32:fp16:zero", "uint4:g32:fp16:zero=uint4", "mxfp8"]
)
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


def decode_deepseek_v4(pages, rows):
    """[pages, rows, 512] of pages of 584 bytes a row: 448 e4m3 and 64 bf16 of each row, then 8 bytes of each: 7 scales of 64 columns."""
    of_rows, of_scales = numpy.split(pages, [576 * rows], axis=1)
    of_rows, of_scales = of_rows.reshape(-1, 576), of_scales.reshape(-1, 8)[:, :7]
    codes = torch.from_numpy(of_rows[:, :448].copy()).view(torch.float8_e4m3fn).double().numpy()
    tail = torch.from_numpy(of_rows[:, 448:].copy()).view(torch.bfloat16).double().numpy()
    scaled = codes * (2.0 ** (of_scales.astype(numpy.float64) - 127)).repeat(64, axis=1)
    return numpy.concatenate([scaled, tail], axis=1).reshape(len(pages), rows, 512)


def test_pages_of_deepseek_v4():
    torch.manual_seed(5)
    form, rows, count = flashjit.KvFormat("fp8_ds_mla_v4"), 64, 3
    pages = torch.zeros(count, 584 * rows, dtype=torch.uint8)
    cache = pages.as_strided((count, 1, rows, form.row_bytes(512)), (584 * rows, 584 * rows, 576, 1))
    scales = pages.as_strided((count, 1, rows, 7), (584 * rows, 584 * rows, 8, 1), 576 * rows)
    scales = scales.view(form.block_scales((1, 1, 1, 512)).dtype)
    latents, lengths = torch.randn(1, 1, 150, 512), torch.tensor([150], dtype=torch.int32)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    given = {"kv_lengths": lengths, "page_table": table, "k_format": form, "k_block_scale": scales}
    flashjit.append(latents, None, cache, None, **given)
    stored = decode_deepseek_v4(pages.numpy(), rows)[[2, 0, 1]].reshape(1, 1, -1, 512)
    values = torch.from_numpy(stored[:, :, :150])
    # The largest code is 448, which the largest element of a block may exceed by an eighth.
    assert ((values - latents).abs() <= 0.13 * latents.abs() + 1e-2).all()
    q = torch.randn(1, 4, 1, 512)
    out = flashjit.attention(q, cache, causal=True, v_columns=512, **given)
    wanted = exact(q, values.expand(1, 4, 150, 512), values.expand(1, 4, 150, 512))
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


APART = {"e2m1:g16:e4m3:apart:scaled": "nvfp4", "int4:g32:fp16:apart:zero": "int4:g32:fp16:zero"}


@pytest.mark.parametrize("name", APART)
def test_scales_apart_are_those_of_the_row(name):
    torch.manual_seed(6)
    form, beside = flashjit.KvFormat(name), flashjit.KvFormat(APART[name])
    x = torch.randn(2, 2, 30, 64)
    rows, scale = flashjit.quantize(x, format=beside)
    block_scale = form.block_scales(x.shape)
    codes, scale_apart = flashjit.quantize(x, format=form, block_scale=block_scale)
    assert torch.equal(torch.cat((codes, block_scale.view(torch.uint8)), -1), rows)
    assert scale is scale_apart is None or torch.equal(scale, scale_apart)
    q = torch.randn(2, 4, 3, 64)
    given = {"k_scale": scale}
    out = flashjit.attention(q, codes, x, k_format=form, k_block_scale=block_scale, **given)
    assert torch.equal(out, flashjit.attention(q, rows, x, k_format=beside, **given))
    wide = torch.empty(2, 30, 2, block_scale.shape[3] + 3, dtype=block_scale.dtype)
    strided = wide.permute(0, 2, 1, 3)[..., : block_scale.shape[3]].copy_(block_scale)
    read = lambda q, codes, scales: flashjit.attention(
        q, codes, x, k_format=form, k_block_scale=scales, **given
    )
    assert torch.equal(read(q, codes, strided), out)
    assert torch.equal(compiled(read)(q, codes, strided), out)


def test_append_writes_scales_apart():
    torch.manual_seed(7)
    form, beside = flashjit.KvFormat("e4m3:g32:fp16:apart"), flashjit.KvFormat("e4m3:g32:fp16")
    k, v = torch.randn(2, 2, 2, 20, 64)
    table = torch.tensor([[4, 0, 2], [1, 6, 3]], dtype=torch.int32)
    given = {"kv_lengths": torch.tensor([20, 20], dtype=torch.int32), "page_table": table}
    pages, rows = (torch.zeros(2, 7, 2, 8, size, dtype=torch.uint8) for size in (64, beside.row_bytes(64)))
    scales = [form.block_scales((7, 2, 8, 64)) for _ in range(2)]
    apart = {"k_format": form, "v_format": form, "k_block_scale": scales[0], "v_block_scale": scales[1]}

    def step(k, v, *pages):
        flashjit.append(k, v, *pages, **given, **apart)

    flashjit.append(k, v, *rows, **given, k_format=beside, v_format=beside)
    for run in (step, compiled(step)):
        pages.zero_(), [scale.zero_() for scale in scales]
        run(k, v, *pages)
        for i in range(2):
            assert torch.equal(torch.cat((pages[i], scales[i].view(torch.uint8)), -1), rows[i])
    q = torch.randn(2, 4, 1, 64)
    out = flashjit.attention(q, *pages, causal=True, **given, **apart)
    assert torch.equal(
        out, flashjit.attention(q, *rows, causal=True, **given, k_format=beside, v_format=beside)
    )


def test_keys_share_scales_of_columns():
    torch.manual_seed(8)
    form = flashjit.KvFormat("uint2:keys32:fp16:min")
    channels = torch.randn(1, 2, 1, 64) * 20  # K's channels have unlike means, which KIVI's scales follow
    k, q = channels + torch.randn(2, 2, 96, 64), torch.randn(2, 4, 2, 64) / 8
    scales = form.block_scales(k.shape)
    codes, _ = flashjit.quantize(k, format=form, block_scale=scales)
    assert scales.shape == (2, 2, 3, 128) and scales.dtype == torch.float16
    groups = k.reshape(2, 2, 3, 32, 64)
    least, most = groups.amin(3), groups.amax(3)
    torch.testing.assert_close(scales[..., 64:].float(), least, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scales[..., :64].float(), (most - least) / 3, rtol=2e-2, atol=2e-2)
    levels = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2).float()
    by_row = scales.repeat_interleave(32, 2).float()
    decoded = levels * by_row[..., :64] + by_row[..., 64:]
    assert (decoded - k).abs().max() < 1.1
    out = flashjit.attention(q, codes, k, k_format=form, k_block_scale=scales)
    torch.testing.assert_close(out, flashjit.attention(q, decoded, k), atol=1e-4, rtol=1e-4)


def test_kivi_of_the_page_runs():
    page = (pathlib.Path(__file__).parents[2] / "tools/docs/cache-formats.md").read_text()
    (example,) = [text for text in re.findall("```python\n(.*?)```", page, re.S) if "def decode" in text]
    names = {}
    torch.manual_seed(9)
    exec(example, names)
    k, v = torch.randn(2, 2, 2, 101, 64)
    for n in range(101):
        q = torch.randn(2, 4, 1, 64)
        out = names["decode"](q, k[:, :, n : n + 1], v[:, :, n : n + 1], n)
    exact_out = flashjit.attention(q, k, v)
    assert (out - exact_out).square().mean().sqrt() < 0.8 * exact_out.square().mean().sqrt()
    newest = names["decode"](q, k[:, :, :1], v[:, :, :1], 0)  # the first of a group, in 32 bits
    torch.testing.assert_close(newest, v[:, :, :1].repeat_interleave(2, 1))


def test_bad_block_scales_are_refused():
    q = torch.randn(1, 2, 32, 64)
    form = flashjit.KvFormat("int4:g32:fp16:apart")
    scales = form.block_scales(q.shape)
    codes, _ = flashjit.quantize(q, format=form, block_scale=scales)
    read = lambda scales, **given: flashjit.attention(
        q, codes, q, k_format=form, k_block_scale=scales, **given
    )
    with pytest.raises(flashjit.InvalidArgument, match="k_block_scale is not given.*apart"):
        read(None)
    with pytest.raises(flashjit.InvalidArgument, match=r"k_block_scale is \[1, 2, 31, 2\].*\[1, 2, 32, 2\]"):
        read(scales[:, :, :31])
    with pytest.raises(flashjit.WrongType, match="float16 scales"):
        read(scales.float())
    with pytest.raises(flashjit.InvalidArgument, match="v_block_scale is given"):
        read(scales, v_block_scale=scales)
    with pytest.raises(flashjit.InvalidArgument, match="without k_format or v_format"):
        flashjit.attention(q, q, q, k_block_scale=scales)
    with pytest.raises(flashjit.InvalidArgument, match="no scales in a tensor of their own"):
        flashjit.KvFormat("q8_0").block_scales(q.shape)
    with pytest.raises(flashjit.InvalidArgument, match="block_scale is not given"):
        flashjit.quantize(q, format=form)
    kivi = flashjit.KvFormat("uint2:keys16:fp16:min")
    with pytest.raises(flashjit.InvalidArgument, match="x has 24 rows.*16 keys.*the last 8 keys"):
        x = q[:, :, :24]
        flashjit.quantize(x, format=kivi, block_scale=kivi.block_scales(x.shape))
    rows = torch.zeros(1, 2, 32, kivi.row_bytes(64), dtype=torch.uint8)
    lengths = torch.tensor([1], dtype=torch.int32)
    given = {"k_format": kivi, "k_block_scale": kivi.block_scales((1, 2, 32, 64))}
    with pytest.raises(flashjit.InvalidArgument, match="16 keys share scales.*quantize.*merge"):
        flashjit.append(q[:, :, :1], q[:, :, :1], rows, torch.zeros_like(q), kv_lengths=lengths, **given)


def test_bytes_without_a_format_are_told_to_name_it():
    q, k = torch.zeros(1, 2, 1, 64), torch.zeros(8, 2, 16, 64, dtype=torch.uint8)
    place = dict(page_table=torch.zeros(1, 8, dtype=torch.int32), kv_lengths=torch.ones(1, dtype=torch.int32))
    wanted = r"is uint8 .*: name the format of its bytes, such as k_format=.*view\(torch.float8_e4m3fn\)"
    one = torch.tensor(1.0)
    for call in (
        lambda: flashjit.attention(q, k, k, **place),
        lambda: flashjit.attention(q, k, v_columns=32, **place),
        lambda: flashjit.attention(q, k, k, k_scale=one, v_scale=one, **place),
        lambda: flashjit.append(q, q, k, k, **place),
        lambda: flashjit.append(q, q, k, k, k_scale=one, v_scale=one, **place),
    ):
        with pytest.raises(flashjit.WrongType, match=wanted):
            call()
    with pytest.raises(flashjit.WrongType, match="q is uint8 .*convert it"):
        flashjit.attention(k, k, k)


def test_bad_formats_are_refused():
    with pytest.raises(flashjit.InvalidArgument, match="neither a name nor codes"):
        flashjit.KvFormat("int5")
    with pytest.raises(flashjit.InvalidArgument, match="blocks of 24 columns"):
        flashjit.KvFormat("int4:g24:fp16")
    with pytest.raises(flashjit.InvalidArgument, match="head_dim is 80.*blocks of 32"):
        flashjit.KvFormat("q8_0").row_bytes(80)
    for wrong in (2**40, 2**31, 0, 64.0, "64"):
        with pytest.raises(flashjit.InvalidArgument, match="head_dim is .*: give an int from 1 to"):
            flashjit.KvFormat("nvfp4").row_bytes(wrong)
    with pytest.raises(
        flashjit.InvalidArgument, match="size is .*: give .*pages or batch, heads, rows, head_dim"
    ):
        flashjit.KvFormat("int4:g32:fp16:apart").block_scales((2, 3, 64))
    with pytest.raises(flashjit.InvalidArgument, match="size is .*: its numbers are 0 or more"):
        flashjit.KvFormat("int4:g32:fp16:apart").block_scales((2, 3, -1, 64))
    with pytest.raises(flashjit.WrongType, match="give a text"):
        flashjit.KvFormat(4)
    with pytest.raises(flashjit.InvalidArgument, match="text without NUL"):
        flashjit.KvFormat("nvfp4\0x")
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


def appended_attention(name, q, k, v, **given):
    """Attention over pages to which all rows were appended, K and Q changed as append() is told."""
    heads_kv, keys, dim = k.shape[1:]
    form, pages = flashjit.KvFormat(name), -(-keys // 16)
    k_pages, v_pages = torch.zeros(2, pages, heads_kv, 16, form.row_bytes(dim), dtype=torch.uint8)
    cache = {
        "page_table": torch.randperm(pages, dtype=torch.int32)[None],
        "kv_lengths": torch.tensor([keys], dtype=torch.int32),
        "k_format": name,
        "v_format": name,
    }
    if form.has_scale:
        cache |= {"k_scale": torch.ones(pages, heads_kv, 16), "v_scale": torch.ones(pages, heads_kv, 16)}
    turned = flashjit.append(k, v, k_pages, v_pages, q=q, **given, **cache)
    return flashjit.attention(turned, k_pages, v_pages, causal=True, **cache)


@pytest.mark.parametrize("name", ["q4_0", "int4:row:fp16", "q8_0"])
@pytest.mark.parametrize("rope", [{}, {"theta": 1e4}])
def test_append_rotates_by_hadamard(name, rope):
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, heads, 100, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    k[..., :4] *= 20  # channels of outliers
    turned_q, turned_k = torch.empty_like(q), torch.zeros(1, 2, 100, 128, dtype=torch.bfloat16)
    lengths = torch.tensor([100], dtype=torch.int32)
    flashjit.append(k, v, turned_k, v.clone(), q=q, q_out=turned_q, kv_lengths=lengths, **rope)
    exact = flashjit.attention(turned_q.float(), turned_k.float(), v.float(), causal=True)
    errors = [
        (appended_attention(name, q, k, v, hadamard=hadamard, **rope).float() - exact).norm() / exact.norm()
        for hadamard in (False, True)
    ]
    assert errors[1] < 0.8 * errors[0] and errors[1] < 0.4


def test_append_with_hadamard_compiles_and_refuses_what_it_cannot():
    q, k, v = (torch.randn(1, heads, 20, 64) for heads in (4, 2, 2))
    lengths = torch.tensor([20], dtype=torch.int32)
    rows = lambda: torch.zeros(1, 2, 20, 36, dtype=torch.uint8)
    given = {"q": q, "kv_lengths": lengths, "k_format": "q4_0", "v_format": "q4_0", "hadamard": True}
    append = lambda k_cache, v_cache: flashjit.append(k, v, k_cache, v_cache, **given)
    caches, others = (rows(), rows()), (rows(), rows())
    assert torch.equal(append(*caches), compiled(append)(*others))
    assert torch.equal(caches[0], others[0]) and torch.equal(caches[1], others[1])
    with pytest.raises(flashjit.Error, match="hadamard is set, and K is fp32"):
        flashjit.append(k, v, k.clone(), v.clone(), kv_lengths=lengths, hadamard=True)
    latents, rows = torch.randn(1, 1, 20, 576), torch.zeros(1, 1, 20, 656, dtype=torch.uint8)
    with pytest.raises(flashjit.Error, match="hadamard is set, and shared_kv"):
        flashjit.append(latents, None, rows, None, kv_lengths=lengths, k_format="fp8_ds_mla", hadamard=True)


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


def test_columns_of_v_in_coded_rows_are_checked():
    rows, _ = flashjit.quantize(torch.randn(1, 1, 8, 64), format="q8_0")
    q = torch.randn(1, 2, 8, 64)
    for wrong in (0, -8, 8.0):
        with pytest.raises(
            flashjit.InvalidArgument, match="v_columns is .*: give how many of K's first columns are V"
        ):
            flashjit.attention(q, rows, v_columns=wrong, k_format="q8_0")
    with pytest.raises(flashjit.InvalidArgument, match="v_format is given with v_columns"):
        flashjit.attention(q, rows, v_columns=32, k_format="q8_0", v_format="nvfp4")


@pytest.mark.parametrize("name", ["iq4_nl", "book(-3,-1,1,3):g32:fp16", BOOK, "q4_0", "q5_0", "nvfp4"])
def test_a_block_of_zeros_stays_one(name):
    """Also where no code means 0, as in iq4_nl's book."""
    form = flashjit.KvFormat(name)
    given = {"v_scale": torch.ones(())} if form.has_scale else {}
    v, _ = flashjit.quantize(torch.zeros(1, 1, 4, 64), format=form)
    out = flashjit.attention(torch.randn(1, 1, 1, 64), torch.randn(1, 1, 4, 64), v, v_format=form, **given)
    assert torch.equal(out, torch.zeros(1, 1, 1, 64))


def test_the_least_numbers_are_no_nan():
    x = torch.zeros(1, 1, 4, 64)
    x[..., 0] = 1e-43
    v, _ = flashjit.quantize(x, format="e4m3:row:fp32")
    out = flashjit.attention(torch.randn(1, 1, 1, 64), x, v, v_format="e4m3:row:fp32")
    assert out.isfinite().all() and out.abs().max() < 1e-40


def test_scales_of_a_format_are_its_own():
    with pytest.raises(
        flashjit.InvalidArgument, match="scales is 'row' and format q8_0, which has its own scales"
    ):
        flashjit.quantize(torch.randn(1, 1, 4, 64), format="q8_0", scales="row")


def test_a_type_and_a_format_are_refused_together():
    x = torch.randn(1, 1, 4, 64)
    with pytest.raises(
        flashjit.InvalidArgument, match="dtype is torch.int8 and format 'q8_0'.*give one of them"
    ):
        flashjit.quantize(x, torch.int8, format="q8_0")
    assert flashjit.quantize(x)[0].dtype == torch.float8_e4m3fn

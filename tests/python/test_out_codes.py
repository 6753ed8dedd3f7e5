"""O as codes: attention(out_dtype=...), with out_scale and out_block_scale."""

import flashjit
import pytest
import torch

FP8 = torch.float8_e4m3fn
FP4 = getattr(torch, "float4_e2m1fn_x2", None)
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def tensors(device="cpu", dtype=torch.bfloat16, length=40, dim=64, **options):
    torch.manual_seed(3)
    return [torch.randn(2, 4, length, dim, device=device, dtype=dtype, **options) for _ in range(3)]


def of_fp4(out):
    """Bytes of pairs of codes as numbers."""
    byte = out.view(torch.uint8).long().cpu()
    codes = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    return LEVELS[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_one_scale(device):
    q, k, v = tensors(device)
    scale = torch.tensor([0.0123], device=device)
    out = flashjit.attention(q, k, v, causal=True, out_dtype=FP8, out_scale=scale)
    assert out.dtype == FP8 and out.shape == q.shape and out.stride() == q.stride()
    exact = flashjit.attention(q, k, v, causal=True, out_dtype=torch.float32)
    wanted = (exact * (1 / scale)).to(FP8)
    different = (out.view(torch.uint8) != wanted.view(torch.uint8)).float().mean().item()
    assert different < 0.01  # sums in another order, where O is between codes
    assert torch.allclose(out.float(), wanted.float(), rtol=0.13, atol=0.002)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_rows(device):
    q, k, v = tensors(device)
    out, scale = flashjit.attention(q, k, v, causal=True, out_dtype=FP8)
    assert scale.shape == (2, 4, 40, 1) and scale.dtype == torch.float32
    exact = flashjit.attention(q, k, v, causal=True, out_dtype=torch.float32)
    assert torch.allclose(scale, exact.abs().amax(-1, keepdim=True) / 448, rtol=1e-3)
    assert torch.allclose(out.float() * scale, exact, rtol=0.07, atol=1e-3)
    assert out.float().abs().amax(-1).eq(448).all()


@pytest.mark.skipif(FP4 is None, reason="PyTorch has no float4_e2m1fn_x2")
@pytest.mark.parametrize("device", DEVICES)
def test_nvfp4(device):
    q, k, v = tensors(device)
    scale = torch.tensor(1 / 448, device=device)
    out, blocks, lse = flashjit.attention(q, k, v, out_dtype=FP4, out_scale=scale, return_lse=True)
    assert out.dtype == FP4 and out.shape == (2, 4, 40, 32)
    assert blocks.dtype == FP8 and blocks.shape == (2, 4, 40, 4) and lse.shape == (2, 4, 40)
    exact = flashjit.attention(q, k, v, out_dtype=torch.float32).cpu()
    found = of_fp4(out) * (blocks.float().cpu() * scale.cpu()).repeat_interleave(16, -1)
    largest = exact.unflatten(-1, (4, 16)).abs().amax(-1).repeat_interleave(16, -1)
    assert ((found - exact).abs() <= 0.19 * largest + 1e-4).all()


def in_rows(swizzled, batch, heads, length):
    """128x4 scales as [batch, heads, length, blocks of a head]."""
    rows, columns = swizzled.shape
    tiles = swizzled.view(torch.uint8).view(rows // 128, columns // 4, 32, 4, 4)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)[: batch * length]
    return matrix.view(batch, length, heads, columns // heads).transpose(1, 2)


@pytest.mark.skipif(FP4 is None, reason="PyTorch has no float4_e2m1fn_x2")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"causal": True}, {"cache": True}])
def test_swizzled_scales(device, options):
    q, k, v = tensors(device, length=150)
    scale = torch.tensor(1 / 64, device=device)
    if "cache" in options:
        options = {**options, "kv_lengths": torch.tensor([150, 0], dtype=torch.int32, device=device)}
    given = {"out_dtype": FP4, "out_scale": scale, **options}
    out, rows = flashjit.attention(q, k, v, **given)
    memory = torch.ones(384, 16, device=device).to(FP8)
    again, swizzled = flashjit.attention(q, k, v, swizzled_scales=True, out_block_scale=memory, **given)
    assert swizzled.data_ptr() == memory.data_ptr()
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(in_rows(swizzled, 2, 4, 150), rows.view(torch.uint8))
    made = flashjit.attention(q, k, v, swizzled_scales=True, **given)[1]
    assert made.shape == (384, 16) and torch.equal(in_rows(made, 2, 4, 150), rows.view(torch.uint8))


@pytest.mark.skipif(FP4 is None, reason="PyTorch has no float4_e2m1fn_x2")
def test_swizzled_scales_of_packed_sequences():
    q, k, v = (x[:1].repeat(1, 1, 2, 1) for x in tensors())
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    packing = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=40, max_seqlen_kv=40)
    given = {"out_dtype": FP4, "out_scale": torch.tensor(1 / 64), **packing}
    rows = flashjit.attention(q, k, v, **given)[1]
    swizzled = flashjit.attention(q, k, v, swizzled_scales=True, **given)[1]
    assert torch.equal(in_rows(swizzled, 1, 4, 80), rows.view(torch.uint8))


def test_memory_of_the_caller():
    q, k, v = tensors()
    packed = torch.zeros(
        2, 40, 4 * 64, dtype=torch.uint8
    )  # [batch, tokens, heads * columns], as a linear layer reads it
    out = packed.view(FP8).view(2, 40, 4, 64).transpose(1, 2)
    rows = torch.zeros(2, 40, 4)
    got, scale = flashjit.attention(
        q, k, v, out_dtype=FP8, out=out, out_block_scale=rows.transpose(1, 2).unsqueeze(-1)
    )
    assert got.data_ptr() == packed.data_ptr() and scale.data_ptr() == rows.data_ptr()
    again, scales = flashjit.attention(q, k, v, out_dtype=FP8)
    assert torch.equal(again.view(torch.uint8), out.view(torch.uint8)) and torch.equal(scales, scale)


def test_after_a_program_of_o():
    q, k, v = tensors()
    double = {"out_mod": lambda out, b, h, i, column: out * 2}
    scale = torch.tensor(0.01)
    out = flashjit.attention(q, k, v, out_dtype=FP8, out_scale=scale, **double)
    half = flashjit.attention(q, k, v, out_dtype=FP8, out_scale=scale / 2)
    assert torch.equal(out.view(torch.uint8), half.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_with_lists_of_keys(device):
    q, k, v = tensors(device)
    lists = torch.stack([torch.randperm(40)[:24] for _ in range(2 * 40 * 4)]).view(2, 40, 4, 24)
    given = {"indices": lists.to(device=device, dtype=torch.int32)}
    exact = flashjit.attention(q, k, v, out_dtype=torch.float32, **given)
    out, scale = flashjit.attention(q, k, v, out_dtype=FP8, **given)
    assert torch.allclose(out.float() * scale, exact, rtol=0.07, atol=1e-3)


def test_packed_rows_of_no_sequence():
    q, k, v = (x[:1].repeat(1, 1, 2, 1) for x in tensors())
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    packing = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=40, max_seqlen_kv=40)
    out, scale = flashjit.attention(q, k, v, out_dtype=FP8, **packing)
    assert out[:, :, 70:].float().eq(0).all() and scale[:, :, 70:].eq(1).all()
    assert scale[:, :, :70].lt(0.1).all()


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"out_dtype": FP8, "out_scale": 0.5}, flashjit.WrongType, "out_scale is a float"),
        (
            {"out_dtype": FP8, "out_scale": torch.ones(2)},
            flashjit.InvalidArgument,
            "give float32, one number",
        ),
        ({"out_scale": torch.ones(1)}, flashjit.InvalidArgument, "out_scale is given and out_dtype is None"),
        (
            {"out_dtype": FP8, "out_scale": torch.ones(1), "out_block_scale": torch.ones(2, 4, 40, 1)},
            flashjit.InvalidArgument,
            "are both given",
        ),
        (
            {"out_dtype": FP8, "out_block_scale": torch.ones(2, 4, 40)},
            flashjit.InvalidArgument,
            r"out_block_scale is float32 \[2, 4, 40\] on cpu: it must be float32 \[2, 4, 40, 1\]",
        ),
        ({"swizzled_scales": True}, flashjit.InvalidArgument, "swizzled_scales is set and out_dtype is None"),
        (
            {"out_dtype": FP8, "swizzled_scales": True},
            flashjit.InvalidArgument,
            "is for torch.float4_e2m1fn_x2",
        ),
        ({"out_dtype": torch.float8_e5m2}, flashjit.InvalidArgument, "out_dtype is torch.float8_e5m2"),
    ],
)
def test_refused(given, error, words):
    with pytest.raises(error, match=words):
        flashjit.attention(*tensors(), **given)


def test_without_gradients():
    with pytest.raises(flashjit.Unsupported, match="have no gradients"):
        flashjit.attention(*tensors(requires_grad=True), out_dtype=FP8)
    with pytest.raises(flashjit.Unsupported, match="which bind.. does not store"):
        flashjit.bind(*tensors(), out_dtype=FP8)
    assert not flashjit.can("bwd:bf16:d64:out{e4m3}", device="sm_90a")
    assert flashjit.can("fwd:bf16:d64:causal:pages16:varlen:out{e4m3}", device="sm_90a")


def test_lists_are_for_elements():
    q, k, v = torch.randn(3, 1, 2, 32, 64)
    mask = "(q - kv) % 3 == 0"
    lists = flashjit.TileLists(q, k, v, mask_mod=mask)
    with pytest.raises(flashjit.Unsupported, match="TileLists are for O as elements"):
        flashjit.attention(q, k, v, mask_mod=mask, lists=lists, out_dtype=torch.float8_e4m3fn)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no NVFP4")
def test_nvfp4_of_one_block_has_scales_of_its_type():
    q, k, v = torch.randn(3, 1, 1, 4, 16)
    given = {"out_dtype": torch.float4_e2m1fn_x2, "out_scale": torch.tensor(0.002)}
    out, scales = flashjit.attention(q, k, v, **given)
    assert scales.dtype == torch.float8_e4m3fn and scales.shape == (1, 1, 4, 1)
    assert scales.float().max() > 0
    place = torch.empty_like(scales)
    flashjit.attention(q, k, v, out_block_scale=place, **given)
    assert torch.equal(place.view(torch.uint8), scales.view(torch.uint8))


def test_out_scale_is_read_as_it_is_seen():
    q, k, v = torch.randn(3, 1, 1, 4, 64)
    negated = torch.complex(torch.zeros(1), torch.tensor([0.01])).conj().imag  # -0.01 by a bit
    with pytest.raises(flashjit.InvalidArgument, match="out_scale is -0.01"):
        flashjit.attention(q, k, v, out_dtype=torch.float8_e4m3fn, out_scale=negated)
    with pytest.raises(flashjit.Error, match="out is a list"):
        flashjit.attention(q, k, v, out_dtype=torch.float8_e4m3fn, out=[1])

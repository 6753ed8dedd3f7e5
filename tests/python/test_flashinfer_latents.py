"""Latents of 8 bits with scales of 128 columns, as FlashInfer's MLA wrapper has them, against a softmax in fp64."""

import math

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
from flashjit import flashinfer as fi  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, RANK, PAGE = 3, 256, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def planned(rank, rope, dtype):
    wrapper = fi.BatchMLAPagedAttentionWrapper(torch.empty(16, dtype=torch.uint8, device=DEVICE))
    places = ints(0, 2, 3), ints(0, 2, 3), ints(3, 1, 0), ints(7, 2)
    wrapper.plan(*places, HEADS, rank, rope, PAGE, True, 0.2, torch.float32, dtype)
    return wrapper


@pytest.mark.parametrize("rope", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_of_128_columns(dtype, rope):
    codes = torch.randn(4, PAGE, RANK + rope, device=DEVICE).to(dtype)
    scales = torch.rand(4, PAGE, RANK // 128, device=DEVICE) + 0.1
    pages = codes.float()
    pages[..., :RANK] *= scales.repeat_interleave(128, -1)
    pages[..., RANK:] *= 0.25
    q = torch.randn(3, HEADS, RANK + rope, device=DEVICE)
    given = (q[..., :RANK].contiguous(), q[..., RANK:].contiguous(), codes[..., :RANK], codes[..., RANK:])
    more = {"ckv_scale_arr": scales, "kpe_scale": 0.25 if rope else None}
    out, lse = planned(RANK, rope, dtype).run(*given, return_lse=True, **more)
    for rows, keys in ((slice(0, 2), torch.cat((pages[3], pages[1]))[:7]), (slice(2, 3), pages[0, :2])):
        keys = keys[:, None]
        wanted, of_lse = exact_attention.exact(q[rows], keys, keys[..., :RANK], scale=0.2, causal=True)
        torch.testing.assert_close(out[rows].double().cpu(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[rows].double().cpu(), of_lse / math.log(2), rtol=1e-5, atol=1e-5)


def test_scales_that_do_not_fit_are_refused():
    codes = torch.randn(4, PAGE, RANK + 64, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.ones(4, PAGE, RANK // 128, device=DEVICE)
    q = torch.randn(3, HEADS, RANK + 64, device=DEVICE)
    given = (q[..., :RANK].contiguous(), q[..., RANK:].contiguous(), codes[..., :RANK], codes[..., RANK:])
    run = planned(RANK, 64, codes.dtype).run
    for more, says in (
        ({"ckv_scale_arr": scales, "ckv_scale": 1.0}, "Exactly one of .* both are given"),
        ({"kpe_scale": 1.0}, "Exactly one of .* neither is given"),
        ({"ckv_scale_arr": scales}, "kpe_scale is None"),
        (
            {"ckv_scale_arr": scales[..., :1], "kpe_scale": 1.0},
            r"Invalid shape of ckv_scale_arr, .*give torch.float32 \[4, 4, 2\]",
        ),
        ({"ckv_scale_arr": scales.half(), "kpe_scale": 1.0}, "Invalid type of ckv_scale_arr, .*float16"),
        ({"ckv_scale_arr": [1.0], "kpe_scale": 1.0}, "ckv_scale_arr, which is a list"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=says):
            run(*given, **more)
    with pytest.raises(
        flashjit.Unsupported, match="192 columns and kpe_cache 64.*give multiples of these, or ckv_scale"
    ):
        short = (given[0][..., :192].contiguous(), given[1], codes[..., :192], codes[..., RANK:])
        planned(192, 64, codes.dtype).run(*short, ckv_scale_arr=scales[..., :1], kpe_scale=1.0)
    with pytest.raises(
        flashjit.InvalidArgument, match="ckv_scale_arr and kpe_scale are for caches of 8 bits"
    ):
        wide = (*given[:2], codes[..., :RANK].float(), codes[..., RANK:].float())
        planned(RANK, 64, torch.float32).run(*wide, ckv_scale_arr=scales, kpe_scale=1.0)

"""flashjit as diffusers' attention: small random models of its kinds, against its own back end."""

import importlib
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")

import flashjit  # noqa: E402
import flashjit.torch  # noqa: E402
from flashjit import _plans  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def its_own_backend_again():
    torch._dynamo.reset()
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def random(*size):
    return torch.randn(size, device=DEVICE)


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return (
        model,
        dict(
            hidden_states=random(1, 16, 4),
            encoder_hidden_states=random(1, 5, 32),
            pooled_projections=random(1, 32),
            timestep=torch.ones(1, device=DEVICE),
            img_ids=random(16, 3),
            txt_ids=random(5, 3),
        ),
        2,
    )


def wan():
    """Heads of 12 columns, which kernels have not."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    return (
        model,
        dict(
            hidden_states=random(1, 4, 2, 8, 8),
            timestep=torch.ones(1, device=DEVICE, dtype=torch.int64),
            encoder_hidden_states=random(1, 6, 16),
        ),
        2,
    )


def sd3():
    """Its processors call PyTorch's function themselves."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
    )
    return (
        model,
        dict(
            hidden_states=random(1, 4, 8, 8),
            encoder_hidden_states=random(1, 7, 32),
            pooled_projections=random(1, 64),
            timestep=torch.ones(1, device=DEVICE, dtype=torch.int64),
        ),
        1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [flux, wan, sd3])
def test_the_same_results_and_gradients(make, monkeypatch):
    """calls: how often a model computes attention."""
    torch.manual_seed(0)
    model, given, calls = make()
    model = model.to(DEVICE)
    made, forward = [], _plans.Plan.forward
    monkeypatch.setattr(
        _plans.Plan, "forward", lambda self, *rest, **more: made.append(self) or forward(self, *rest, **more)
    )

    def run(call=model):
        model.zero_grad()
        out = call(**given)[0]
        out.square().mean().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    want = run()
    assert not made
    flashjit.torch.use_in_diffusers(model)
    got = run()
    assert len(made) == calls
    compiled = run(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert len(made) == 2 * calls
    assert len(want) == len(got) == len(compiled) > 10
    for exact, *found in zip(want, got, compiled):
        for one in found:
            torch.testing.assert_close(one, exact, atol=1e-4, rtol=1e-3)


def test_by_its_own_functions():
    """What diffusers' users call."""
    assert flashjit.torch.register_with_diffusers() == flashjit.torch.register_with_diffusers() == "flashjit"
    torch.manual_seed(0)
    model, given, _ = flux()
    model = model.to(DEVICE).eval()
    with torch.no_grad():
        want = model(**given)[0]
        with dispatch.attention_backend("flashjit"):
            torch.testing.assert_close(model(**given)[0], want, atol=1e-5, rtol=1e-4)
        model.set_attention_backend("flashjit")
        torch.testing.assert_close(model(**given)[0], want, atol=1e-5, rtol=1e-4)
    name = dispatch.AttentionBackendName("flashjit")
    assert name is dispatch.AttentionBackendName.FLASHJIT and name in list(dispatch.AttentionBackendName)


def dispatched(backend, *given, **named):
    flashjit.torch.register_with_diffusers()
    return dispatch.dispatch_attention_fn(*given, backend=dispatch.AttentionBackendName(backend), **named)


@pytest.mark.parametrize(
    "mask, options",
    [
        (None, {}),
        (None, {"is_causal": True}),
        ("padding", {}),
        ("boolean", {"scale": 0.3}),
        ("added", {}),
        ("heads", {"scale": -0.3}),
    ],
    ids=str,
)
def test_masks_of_the_dispatcher(mask, options):
    torch.manual_seed(0)
    q, k, v = random(2, 9, 4, 16), random(2, 13, 4, 16), random(2, 13, 4, 16)
    keep = torch.rand(2, 4, 9, 13, device=DEVICE) > 0.3
    masks = {
        "padding": torch.arange(13, device=DEVICE) < torch.tensor([[7], [13]], device=DEVICE),
        "boolean": keep[:, :1],
        "added": random(9, 13),
        "heads": keep,
    }
    given = dict(options, attn_mask=masks.get(mask))
    torch.testing.assert_close(
        dispatched("flashjit", q, k, v, **given), dispatched("native", q, k, v, **given), atol=1e-5, rtol=1e-4
    )


def test_grouped_heads_and_lse():
    torch.manual_seed(0)
    q, k, v = random(2, 9, 4, 16), random(2, 13, 2, 16), random(2, 13, 2, 16)
    want = dispatched("native", q, k, v, enable_gqa=True)
    out, lse = dispatched("flashjit", q, k, v, enable_gqa=True, attention_kwargs={"return_lse": True})
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 4
    torch.testing.assert_close(lse, scores.logsumexp(3), atol=1e-5, rtol=1e-4)
    with pytest.raises(flashjit.InvalidArgument, match="enable_gqa"):
        dispatched("flashjit", q, k, v)


def test_video_tiles(monkeypatch):
    """As the mask that the dispatcher is given: near tiles and chosen ones, the tiles at the edges not full."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools/examples/python"), *sys.path])
    tiles = importlib.import_module("video_tiles").Tiles((3, 5, 6), (2, 2, 4), DEVICE)
    torch.manual_seed(0)
    tokens = random(2, 3, 3 * 5 * 6, 16), random(2, 3, 90, 16), random(2, 3, 90, 16)
    q, k, v = map(tiles.put, tokens)
    assert torch.equal(tiles.take(q), tokens[0]) and tiles.sizes.min() < tiles.sizes.max() == 16
    attends = tiles.near((0, 1, 1)) | tiles.liked(q, k, 2)
    out = dispatched(
        "flashjit", *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=tiles.mask(attends)
    ).transpose(1, 2)
    # Without tiles: which tile each token is in, by its place in the video.
    at = torch.cartesian_prod(torch.arange(3), torch.arange(5), torch.arange(6)).to(DEVICE)
    tile = (at[:, 0] // 2 * 3 + at[:, 1] // 2) * 2 + at[:, 2] // 4
    keep = attends[:, :, tile][:, :, :, tile]
    want = torch.nn.functional.scaled_dot_product_attention(*tokens, attn_mask=keep)
    assert 0.2 < keep.float().mean() < 0.9
    torch.testing.assert_close(tiles.take(out), want, atol=1e-5, rtol=1e-4)


def test_what_is_not_there_is_named():
    q = random(1, 4, 2, 8)
    with pytest.raises(flashjit.Unsupported, match="context parallel"):
        dispatched("flashjit", q, q, q, parallel_config=object())
    with pytest.raises(flashjit.InvalidArgument, match="Linear has no attention processors"):
        flashjit.torch.use_in_diffusers(torch.nn.Linear(1, 1))

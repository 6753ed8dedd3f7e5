"""flash-attn's packages as libraries import them: after install(), with the passes one by one, rotary
embeddings and padding."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import child  # noqa: E402
import flashjit  # noqa: E402
from flashjit import flash_attn as fa  # noqa: E402
from flashjit.flash_attn import _fa3, _install, _passes, bert_padding, rotary  # noqa: E402
from test_flash_attn import DEVICE, as_reference, close, reference, tensors, with_slopes  # noqa: E402


@pytest.fixture
def installed():
    names = list(_install._contents())
    before = {name: sys.modules.pop(name, None) for name in names}
    finders = list(sys.meta_path)
    fa.install()
    fa.install()  # again does nothing
    yield
    sys.meta_path[:] = finders
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def test_other_libraries_import_it_by_name(installed):
    import flash_attn_interface
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.bert_padding import unpad_input

    assert flash_attn_func is fa.flash_attn_func and unpad_input is fa.unpad_input
    assert "block_table" in inspect.signature(flash_attn_varlen_func).parameters
    assert importlib.util.find_spec("flash_attn") is not None
    q, k, v = tensors()
    out, lse = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    close(out, reference(q, k, v, causal=True)[0])
    assert lse.shape == (2, 4, 7)
    with pytest.raises(flashjit.Unsupported, match="qv"):
        flash_attn_interface.flash_attn_func(q, k, v, qv=torch.ones(2, 2, device=DEVICE))
    close(
        flash_attn_interface.flash_attn_with_kvcache(q, k, v, causal=True, scheduler_metadata=torch.ones(1)),
        reference(q, k, v, causal=True)[0],
    )
    assert importlib.metadata.version("flash_attn") == fa.__version__
    packages = importlib.metadata.packages_distributions()
    assert "flash-attn" in packages["flash_attn"] and packages["flash_attn_interface"] == ["flash-attn-3"]


NAMES = {
    "flash_attn": "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
    "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache "
    "__version__",
    "flash_attn.flash_attn_interface": "_flash_attn_forward _flash_attn_backward _flash_attn_varlen_forward "
    "_flash_attn_varlen_backward _wrapped_flash_attn_forward "
    "_wrapped_flash_attn_backward "
    "_wrapped_flash_attn_varlen_forward "
    "_wrapped_flash_attn_varlen_backward flash_attn_func",
    "flash_attn.bert_padding": "index_first_axis index_put_first_axis index_first_axis_residual pad_input "
    "unpad_input "
    "unpad_input_for_concatenated_sequences IndexFirstAxis",
    "flash_attn.layers.rotary": "apply_rotary_emb apply_rotary_emb_func apply_rotary_emb_qkv_ "
    "apply_rotary_emb_kv_ "
    "apply_rotary_emb_torch rotate_half RotaryEmbedding ApplyRotaryEmb",
    "flash_attn.ops.triton.rotary": "apply_rotary",
    "flash_attn_3.flash_attn_interface": "flash_attn_func",
    "flash_attn.cute": "flash_attn_func flash_attn_varlen_func",
    "flash_attn.cute.interface": "flash_attn_func flash_attn_varlen_func flash_attn_combine",
    "flash_attn_interface": "flash_attn_func flash_attn_varlen_func flash_attn_qkvpacked_func "
    "flash_attn_with_kvcache "
    "flash_attn_combine get_scheduler_metadata _flash_attn_forward "
    "_flash_attn_backward",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_libraries_import(installed, module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []
    leaked = [
        name for name in vars(found) if name in ("torch", "Tensor", "Any", "Union", "Options", "attention")
    ]
    assert leaked == []


def test_flash_attention_4(installed):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    from flash_attn.cute.interface import flash_attn_combine

    q, k, v = tensors()
    sinks = torch.randn(4, device=DEVICE)
    out, lse = flash_attn_func(q, k, v, causal=True, window_size=(3, None), softcap=2.0)
    close(out, reference(q, k, v, causal=True, window=(3, -1), softcap=2.0)[0])
    assert lse is None
    out, lse = flash_attn_func(q, k, v, learnable_sink=sinks, return_lse=True)
    plain, plain_lse = reference(q, k, v)
    close(out, plain * torch.sigmoid(plain_lse - sinks[:, None]).transpose(1, 2)[..., None])
    offsets = [torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (7, 11)]
    packed, packed_lse = flash_attn_varlen_func(
        q[0], k[0], v[0], *offsets, 7, 11, causal=True, return_lse=True
    )
    want, want_lse = reference(q[:1], k[:1], v[:1], causal=True)
    close(packed, want[0])
    close(packed_lse, want_lse[0])
    halves = [
        flash_attn_func(q, k[:, part], v[:, part], return_lse=True) for part in (slice(5), slice(5, 11))
    ]
    outs = torch.stack([o for o, _ in halves])
    lses = torch.stack([x.transpose(1, 2) for _, x in halves])
    close(flash_attn_combine(outs, lses)[0], plain)
    close(flash_attn_combine(outs[:, 0], lses[:, 0])[0], plain[0])
    for refused in ({"mask_mod": print}, {"score_mod": print}):
        with pytest.raises(flashjit.Unsupported, match="functions of CuTe DSL"):
            flash_attn_func(q, k, v, **refused)
    assert "flash-attn-4" in importlib.metadata.packages_distributions()["flash_attn"]


def test_missing_names_say_what_to_do(installed):
    """Also where `from .. import ..` would replace the message of an AttributeError."""
    import flash_attn

    why = " is not among the names that flashjit.*install flash-attn itself"
    with pytest.raises(ImportError, match="flash_attn.flash_attn_triton" + why):
        from flash_attn import flash_attn_triton  # noqa: F401
    with pytest.raises(ImportError, match="flash_attn.losses" + why):
        from flash_attn.losses.cross_entropy import CrossEntropyLoss  # noqa: F401
    with pytest.raises(ImportError, match="flash_attn_3._C" + why):
        import flash_attn_3._C  # noqa: F401
    with pytest.raises(ImportError, match="flash_attn.ops.rms_norm" + why):
        import flash_attn.ops.rms_norm  # noqa: F401
    with pytest.raises(AttributeError, match="flash_attn.flash_attn_triton" + why):
        flash_attn.flash_attn_triton
    assert not hasattr(flash_attn, "flash_attn_triton")  # libraries that only ask are not stopped
    assert importlib.util.find_spec("flash_attn.losses") is None


@pytest.mark.slow
def test_diffusers_back_ends():
    """In a process of its own, as diffusers looks for the packages when it is imported."""
    pytest.importorskip("diffusers.models.attention_dispatch")
    code = """import torch, flashjit.flash_attn
flashjit.flash_attn.install()
from diffusers.models.attention_dispatch import dispatch_attention_fn
q, k, v = torch.randn(3, 2, 9, 4, 16)
want = dispatch_attention_fn(q, k, v, is_causal=True, backend="native")
for name in ("flash", "flash_varlen", "_flash_varlen_3"):
    out = dispatch_attention_fn(q, k, v, is_causal=True, backend=name)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=child.environment())


def test_diffusers_passes(installed):
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward, _wrapped_flash_attn_forward

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    patch = pytest.MonkeyPatch()
    with patch.context():
        patch.setattr(dispatch, "_wrapped_flash_attn_forward", _wrapped_flash_attn_forward)
        patch.setattr(dispatch, "_wrapped_flash_attn_backward", _wrapped_flash_attn_backward)
        q, k, v = tensors(heads_kv=4)
        context = Context()
        out, _ = dispatch._flash_attention_forward_op(context, q, k, v, is_causal=True, return_lse=True)
        dout = torch.randn_like(out)
        want = reference(q, k, v, causal=True)[0]
        close(out, want)
        for got, exact in zip(
            dispatch._flash_attention_backward_op(context, dout),
            torch.autograd.grad(want, (q, k, v), dout.double()),
        ):
            close(got, exact)


# --- The passes one by one ----------------------------------------------------------------------------------

PASSES = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"softcap": 2.5, "causal": True},
    {"alibi_slopes": 1},
]


def split_window(options):
    left, right = options.pop("window_size", (-1, -1))
    return {"causal": False, **options, "window_size_left": left, "window_size_right": right}


@pytest.mark.parametrize("options", PASSES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward(options, packed):
    options = with_slopes(options)
    lengths_q, lengths_kv = (5, 9), (11, 9)
    q, k, v = (
        x.detach()
        for x in tensors(batch=1 if packed else 2, queries=14 if packed else 7, keys=20 if packed else 11)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        offsets = [
            torch.tensor([0, n[0], sum(n)], dtype=torch.int32, device=DEVICE) for n in (lengths_q, lengths_kv)
        ]
        parts = [
            reference(leaves[0][:, a:b], leaves[1][:, c:d], leaves[2][:, c:d], **as_reference(options))
            for a, b, c, d in ((0, 5, 0, 11), (5, 14, 11, 20))
        ]
        want, want_lse = torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
        more = (*offsets, 9, 11)
    else:
        want, want_lse = reference(*leaves, **as_reference(options))
        more = ()
    given = split_window(options)
    forward, backward = (
        (_passes._flash_attn_varlen_forward, _passes._flash_attn_varlen_backward)
        if packed
        else (_passes._flash_attn_forward, _passes._flash_attn_backward)
    )
    out, lse, mask, rng = forward(q.requires_grad_(), k, v, *more, dropout_p=0.0, softmax_scale=0.25, **given)
    assert mask is None and not out.requires_grad  # whatever q asks for: autograd is the caller's
    close(out, want)
    close(lse, want_lse)
    dout = torch.randn_like(out)
    grads = [torch.full_like(x, torch.nan).detach() for x in (q, k, v)]
    backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        *grads,
        *more,
        dropout_p=0.0,
        softmax_scale=0.25,
        deterministic=False,
        rng_state=rng,
        **given,
    )
    for got, exact in zip(grads, torch.autograd.grad(want, leaves, dout.view_as(want).double())):
        close(got, exact.view_as(got))


def test_dropout_is_the_same_in_both_passes():
    """dV of the mask that the forward pass drew: O is linear in V."""
    q, k, v = (x.detach() for x in tensors())
    given = dict(dropout_p=0.5, softmax_scale=0.25, causal=False)
    out, lse, _, rng = _passes._flash_attn_forward(q, k, v, **given)
    again = _passes._flash_attn_forward(q, k, v, **given)
    assert not torch.equal(out, again[0])
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dout = torch.randn_like(out)
    _passes._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, rng_state=rng, **given)
    close((dv * v).sum(), (dout * out).sum())
    with pytest.raises(flashjit.InvalidArgument, match="rng_state"):
        _passes._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, **given)


def arguments_of(function):
    """As ring libraries have it: each positional argument with its default, or None."""
    spec = inspect.getfullargspec(function)
    defaults = spec.defaults or ()
    return dict(zip(spec.args, (None,) * (len(spec.args) - len(defaults)) + defaults))


def test_a_ring_of_two():
    """Each rank attends to each part of K and V; the backward pass of a part takes the LSE of all keys."""
    q, k, v = tensors(queries=16, keys=16)
    want = fa.flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(want)
    exact = torch.autograd.grad(want, (q, k, v), dout)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for rank in range(2):
        rows = slice(8 * rank, 8 * rank + 8)
        parts = []
        for step in range(rank + 1):
            keys = slice(8 * (rank - step), 8 * (rank - step) + 8)
            params = arguments_of(_passes._flash_attn_forward)
            params.update(
                q=q[:, rows],
                k=k[:, keys],
                v=v[:, keys],
                dropout_p=0,
                softmax_scale=0.25,
                causal=step == 0,
                window_size_left=-1,
                window_size_right=-1,
            )
            block_out, block_lse, _, _ = _passes._flash_attn_forward(**params)
            parts.append((block_out.transpose(1, 2), block_lse, keys))
        out, lse = flashjit.merge([part[:2] for part in parts])
        out = out.transpose(1, 2)
        close(out, want[:, rows])
        for step, (_, _, keys) in enumerate(parts):
            grads = [torch.empty_like(x) for x in (q[:, rows], k[:, keys], v[:, keys])]
            params = arguments_of(_passes._flash_attn_backward)
            params.update(
                dout=dout[:, rows],
                q=q[:, rows],
                k=k[:, keys],
                v=v[:, keys],
                out=out,
                softmax_lse=lse,
                dropout_p=0,
                softmax_scale=0.25,
                causal=step == 0,
                **dict(zip(("dq", "dk", "dv"), grads)),
            )
            _passes._flash_attn_backward(**params)
            for total, grad, place in zip(found, grads, (rows, keys, keys)):
                total[:, place] += grad
    for got, gradient in zip(found, exact):
        close(got, gradient)


def test_fa3_passes():
    q, k, v = (x.detach() for x in tensors())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = reference(*leaves, causal=True)
    # As yunchang calls it.
    out, lse, *_ = _fa3._flash_attn_forward(
        q=q,
        k=k,
        v=v,
        k_new=None,
        v_new=None,
        qv=None,
        out=None,
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=0,
        pack_gqa=None,
    )
    close(out, want)
    close(lse, want_lse)
    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    _fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=grads[0], dk=grads[1], dv=grads[2], is_causal=True)
    for got, exact in zip(grads, torch.autograd.grad(want, leaves, dout.double())):
        close(got, exact)
    lengths = torch.tensor([4, 9], dtype=torch.int32, device=DEVICE)
    close(
        _fa3._flash_attn_forward(q, k, v, seqused_k=lengths, causal=True)[0],
        reference(q, k, v, lengths=lengths, causal=True)[0],
    )


# --- Rotary embeddings --------------------------------------------------------------------------------------


def complex_turn(x, cos, sin, at, interleaved, sign=1):
    """[.., rows, heads, dim] at positions [.., rows], as complex numbers in fp64."""
    half = cos.shape[-1]
    part = x[..., : 2 * half].double()
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
    turn = torch.complex(cos[at].double(), sign * sin[at].double()).unsqueeze(-2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return torch.cat(
        ((turned if interleaved else turned.transpose(-1, -2)).flatten(-2), x[..., 2 * half :].double()), -1
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [16, 8])
def test_rotary_embeddings(interleaved, columns):
    torch.manual_seed(0)
    angle = torch.rand(20, columns // 2, device=DEVICE) * 6
    cos, sin = angle.cos(), angle.sin()
    x = torch.randn(2, 5, 3, 16, device=DEVICE, requires_grad=True)
    first = torch.tensor([4, 0], device=DEVICE)
    at = first[:, None] + torch.arange(5, device=DEVICE)
    got = rotary.apply_rotary_emb(x, cos, sin, interleaved, False, first)
    want = complex_turn(x, cos, sin, at, interleaved)
    close(got, want)
    dout = torch.randn_like(got)
    close(torch.autograd.grad(got, x, dout)[0], complex_turn(dout, cos, sin, at, interleaved, -1))
    close(rotary.apply_rotary(got, cos, sin, first, interleaved=interleaved, conjugate=True), x)
    close(
        rotary.apply_rotary_emb_torch(x, cos[:5], sin[:5], interleaved),
        complex_turn(x, cos, sin, torch.arange(5), interleaved),
    )
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32, device=DEVICE)
    packed = torch.cat((x[0], x[1, :4])).detach()
    got = rotary.apply_rotary_emb(packed, cos, sin, interleaved, True, first, offsets, 5)
    assert got is packed
    close(packed, torch.cat((want[0], want[1, :4])))
    for bad in (torch.zeros(3, device=DEVICE), torch.zeros(2, 1, device=DEVICE)):
        with pytest.raises(flashjit.InvalidArgument, match="seqlen_offsets"):
            rotary.apply_rotary(x, cos, sin, bad)
    with pytest.raises(flashjit.InvalidArgument, match="cos and sin"):
        rotary.apply_rotary(x[..., :4], cos, sin)


@pytest.mark.parametrize("scale_base", [None, 512])
def test_the_rotary_module(scale_base):
    torch.manual_seed(0)
    module = rotary.RotaryEmbedding(16, scale_base=scale_base, device=DEVICE)
    q, k, v = torch.randn(3, 2, 5, 4, 16, device=DEVICE)
    qkv = module(torch.stack((q, k, v), 2), seqlen_offset=3)
    angle = torch.outer(torch.arange(8.0), 10000.0 ** (-torch.arange(0, 16, 2) / 16)).to(DEVICE)
    scale = 1.0
    if scale_base:
        scale = ((torch.arange(0, 16, 2) + 6.4) / 22.4) ** ((torch.arange(8.0) - 4)[:, None] / 512)
        scale = scale.to(DEVICE)
    at = torch.arange(3, 8, device=DEVICE)
    close(qkv[:, :, 0], complex_turn(q, angle.cos() * scale, angle.sin() * scale, at, False))
    close(qkv[:, :, 1], complex_turn(k, angle.cos() / scale, angle.sin() / scale, at, False))
    assert torch.equal(qkv[:, :, 2], v)
    grouped = module(torch.cat((q, k[:, :, :2], v[:, :, :2]), 2), seqlen_offset=3, num_heads_q=4)
    close(grouped, torch.cat((qkv[:, :, 0], qkv[:, :, 1, :2], v[:, :, :2]), 2))
    apart = module(
        q.clone(), torch.stack((k, v), 2), seqlen_offset=torch.tensor([3, 3], device=DEVICE), max_seqlen=8
    )
    close(apart[0], qkv[:, :, 0])
    close(apart[1], qkv[:, :, 1:])
    grad = torch.randn(2, 5, 3, 4, 16, device=DEVICE, requires_grad=True)
    assert torch.autograd.grad(module(grad * 1.0).square().sum(), grad)[0].isfinite().all()


# --- Padding ------------------------------------------------------------------------------------------------


def test_padding_goes_and_comes_back():
    x = torch.randn(3, 5, 4, device=DEVICE)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=DEVICE)
    rows, indices, cu_seqlens, longest, used = fa.unpad_input(x, mask)
    assert rows.shape == (10, 4) and cu_seqlens.tolist() == [0, 2, 7, 10]
    assert longest == 5 and used.tolist() == [2, 5, 3]
    for numbers in (indices, indices.int()):  # transformers has int32 at each token that it generates
        assert torch.equal(fa.pad_input(rows, numbers, 3, 5), x * mask[:, :, None])


def test_several_sequences_in_a_row_of_the_batch():
    x = torch.randn(2, 6, 3, device=DEVICE)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]], device=DEVICE)
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 9] and cu_seqlens.dtype == torch.int32 and longest == 4
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :4]))) and torch.equal(x.flatten(0, 1)[indices], rows)
    again, same = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(again, rows) and torch.equal(same, x.flatten(0, 1))
    assert torch.equal(bert_padding.IndexFirstAxis.apply(x.flatten(0, 1), indices), rows)

"""flash-attn's functions, by flashjit: against attention written out, as flash-attn's documentation defines it."""
import importlib.metadata
import importlib.util
import inspect
import math
import sys

import pytest

torch = pytest.importorskip("torch")

import flashjit  # noqa: E402
from flashjit import flash_attn as fa  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(batch=2, queries=7, keys=11, heads=4, heads_kv=2, dim=16, dtype=torch.float32):
    torch.manual_seed(1)
    sizes = [(batch, queries, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim)]
    return [torch.randn(size, dtype=dtype, device=DEVICE).requires_grad_() for size in sizes]


def reference(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, lengths=None):
    """O [b, sq, hq, d] and LSE [b, hq, sq] in fp64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if lengths is None:
        lengths = torch.full((q.shape[0],), k.shape[2], device=q.device)
    at = torch.arange(q.shape[2], device=q.device)[:, None] + lengths[:, None, None] - q.shape[2]  # [b, sq, 1]
    key = torch.arange(k.shape[2], device=q.device)
    if slopes is not None:
        s = s - (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None] * (at - key).abs()[:, None]
    left, right = window
    keep = key < lengths[:, None, None]
    if causal or right >= 0:
        keep = keep & (key <= at + (0 if causal else right))
    if left >= 0:
        keep = keep & (key >= at - left)
    s = s.masked_fill(~keep[:, None], -math.inf)
    return (torch.nan_to_num(torch.softmax(s, 3)) @ v).transpose(1, 2), torch.logsumexp(s, 3)


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=1e-4)


OPTIONS = [{}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (3, -1), "causal": True}, {"window_size": (-1, 2)},
           {"softcap": 2.5}, {"softmax_scale": 0.3, "causal": True}, {"alibi_slopes": 1}, {"alibi_slopes": 2, "causal": True},
           {"softcap": 1.5, "alibi_slopes": 1, "window_size": (4, 4)}]


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
    for got, exact in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout.double())):
        close(got, exact)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": -0.4, "window_size": (3, 2)}], ids=str)
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
    cu_q, cu_kv = (torch.tensor([0, n[0], n[0] + n[1]], dtype=torch.int32, device=DEVICE) for n in (lengths_q, lengths_kv))
    rest = (cu_q, cu_kv, 9, 11)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, *rest, return_attn_probs=True, **options)
    assert out.shape == q.shape and lse.shape == (4, 14)
    for i, sequence in enumerate(sequences):
        named = as_reference(options)
        if named.get("slopes") is not None and named["slopes"].dim() == 2:
            named["slopes"] = named["slopes"][i:i + 1]
        want, want_lse = reference(*sequence, **named)
        rows = slice(int(cu_q[i]), int(cu_q[i + 1]))
        close(out[rows], want[0])
        close(lse[:, rows], want_lse[0])
    close(fa.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *rest, **options), out)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}, {"softcap": 2.0}, {"causal": True, "alibi_slopes": 1},
                                     {"softcap": 2.0, "causal": True}], ids=str)
def test_a_cache_is_seen_to_each_sequence_s_length(options):
    options = with_slopes(options)
    q, k, v = (x.detach() for x in tensors(queries=3, keys=16))
    lengths = torch.tensor([5, 16], dtype=torch.int32, device=DEVICE)
    k[0, 5:], v[0, 5:] = math.nan, math.nan  # keys behind a length are never read
    out, lse = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True, **options)
    want, want_lse = reference(q, torch.nan_to_num(k), torch.nan_to_num(v), lengths=lengths, **as_reference(options))
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_new_keys_are_rotated_and_appended(interleaved, causal):
    q, k_cache, v_cache = (x.detach() for x in tensors(queries=3, keys=16))
    _, k, v = (x.detach() for x in tensors(queries=3, keys=3))
    lengths = torch.tensor([4, 9], dtype=torch.int32, device=DEVICE)
    angle = torch.arange(16, device=DEVICE)[:, None] * torch.tensor([1.0, 0.3, 0.1], device=DEVICE)  # 6 of 16 columns

    def rotated(x, i, first, moving=True):
        """One row at a time, as complex numbers."""
        x = x[i].clone()
        for row in range(x.shape[0]):
            turn = torch.polar(torch.ones(3, device=DEVICE), angle[first + (row if moving else 0)])
            pairs = (x[row, :, :6].unflatten(-1, (3, 2)) if interleaved else
                     x[row, :, :6].unflatten(-1, (2, 3)).transpose(-1, -2))
            turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
            x[row, :, :6] = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
        return x

    want_k, want_v = k_cache.clone(), v_cache.clone()
    for i, n in enumerate(lengths.tolist()):
        want_k[i, n:n + 3], want_v[i, n:n + 3] = rotated(k, i, n), v[i]
    want_q = torch.stack([rotated(q, i, n, causal) for i, n in enumerate(lengths.tolist())])
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, rotary_cos=angle.cos(), rotary_sin=angle.sin(), causal=causal,
                                     cache_seqlens=lengths, rotary_interleaved=interleaved)
    close(k_cache, want_k)
    close(v_cache, want_v)
    close(out, reference(want_q, want_k, want_v, causal=causal, lengths=lengths + 3)[0])


@pytest.mark.parametrize("name", ["block_table", "cache_batch_idx", "cache_leftpad"])
def test_what_is_missing_is_named(name):
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(flashjit.Unsupported, match=name):
        fa.flash_attn_with_kvcache(q, k, v, **{name: torch.zeros(2, dtype=torch.int32, device=DEVICE)})


def test_padding_goes_and_comes_back():
    x = torch.randn(3, 5, 4, device=DEVICE)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=DEVICE)
    rows, indices, cu_seqlens, longest, used = fa.unpad_input(x, mask)
    assert rows.shape == (10, 4) and cu_seqlens.tolist() == [0, 2, 7, 10] and longest == 5 and used.tolist() == [2, 5, 3]
    for numbers in (indices, indices.int()):  # transformers has int32 at each token that it generates
        assert torch.equal(fa.pad_input(rows, numbers, 3, 5), x * mask[:, :, None])


def test_other_libraries_import_it_by_name():
    names = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding", "flash_attn_interface")
    before = {name: sys.modules.pop(name, None) for name in names}
    finders = list(sys.meta_path)
    try:
        fa.install()
        fa.install()  # again does nothing
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.bert_padding import unpad_input
        import flash_attn_interface
        assert flash_attn_func is fa.flash_attn_func and unpad_input is fa.unpad_input
        assert "block_table" in inspect.signature(flash_attn_varlen_func).parameters
        assert importlib_finds("flash_attn")
        q, k, v = tensors()
        out, lse = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        close(out, reference(q, k, v, causal=True)[0])
        assert lse.shape == (2, 4, 7)
        with pytest.raises(flashjit.Unsupported, match="q_descale"):
            flash_attn_interface.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2, device=DEVICE))
        with pytest.raises(ImportError, match="flash_attn_triton"):
            from flash_attn import flash_attn_triton  # noqa: F401
        with pytest.raises(flashjit.Unsupported, match="scheduler_metadata"):
            flash_attn_interface.flash_attn_with_kvcache(q, k, v, scheduler_metadata=torch.ones(1))
        close(flash_attn_interface.flash_attn_with_kvcache(q, k, v, causal=True), reference(q, k, v, causal=True)[0])
        assert importlib.metadata.version("flash_attn") == fa.__version__
        installed = importlib.metadata.packages_distributions()
        assert installed["flash_attn"] == ["flash-attn"] and installed["flash_attn_interface"] == ["flash-attn-3"]
    finally:
        sys.meta_path[:] = finders
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def importlib_finds(name):
    return importlib.util.find_spec(name) is not None

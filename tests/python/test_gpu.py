"""attention() on a GPU: numbers against float64, and what PyTorch's surroundings ask for. Skips where no GPU is."""

import csv
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

import child  # noqa: E402
import flashjit  # noqa: E402
from flashjit.torch import BlockMap, TileLists, scaled_dot_product_attention  # noqa: E402
from operator_arguments import arguments_of_forward  # noqa: E402

F = torch.nn.functional
DEVICE = "cuda"


def tensors(batch=2, heads=4, heads_kv=2, queries=200, keys=333, dim=64, dim_v=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    sizes = [
        (batch, heads, queries, dim),
        (batch, heads_kv, keys, dim),
        (batch, heads_kv, keys, dim_v or dim),
    ]
    return [torch.randn(size, dtype=dtype, device=DEVICE).requires_grad_() for size in sizes]


def reference(q, k, v, keep=None, score=lambda s: s, scale=None, sinks=None, dtype=torch.float64):
    """Attention written out; dtype float64: exact; the tensors' own: what a straightforward program would get."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = score((scale or q.shape[3] ** -0.5) * (q @ k.transpose(2, 3)))
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(dtype)[None, :, None, None].expand(*s.shape[:3], 1)], 3)
    return torch.nan_to_num(torch.softmax(s, 3))[..., : k.shape[2]] @ v


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)


def check(call, want, inputs):
    """judge() of what call() and autograd give."""
    out = call()
    dout = torch.randn_like(out)
    judge(out, torch.autograd.grad(out, inputs, dout), want, inputs, dout)


def judge(out, grads, want, inputs, dout):
    """The project's rule: errors of at most 2 (O) and 3 (gradients) times those of a straightforward computation in the
    type, which want(dtype=...) does, plus 1e-5."""
    exact, rounded = want(dtype=torch.float64), want(dtype=inputs[0].dtype)
    exact_grads = torch.autograd.grad(exact, inputs, dout.double())
    rounded_grads = torch.autograd.grad(rounded, inputs, dout.to(rounded.dtype))
    for factor, name, a, b, c in [(2, "out", out, exact, rounded)] + [
        (3, f"gradient {i}", *x) for i, x in enumerate(zip(grads, exact_grads, rounded_grads))
    ]:
        assert a.isfinite().all(), name
        error, limit = (
            (a.double() - b.double()).abs().max(),
            factor * (c.double() - b.double()).abs().max() + 1e-5,
        )
        # Gradients of leaves are rounded to the leaf's type in the exact computation too: half a step on each side.
        limit = limit + (torch.finfo(a.dtype).eps * b.double().abs().max() if name != "out" else 0)
        assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}"


@pytest.mark.parametrize("over", ["heads", "batch entries", "rows"])
@pytest.mark.parametrize("dim", [64, 128])
def test_expanded_tensors(over, dim):
    """Tensors that repeat with a stride of 0: K and V of one head, a shared prompt, and the gradient of O's mean."""
    axis = {"batch entries": 0, "heads": 1, "rows": 2}[over]
    q, k, v = tensors(heads=4, heads_kv=4, dim=dim)
    size = lambda x: [1 if i == axis else n for i, n in enumerate(x.shape)]
    k, v = (torch.randn(size(x), dtype=x.dtype, device=DEVICE).requires_grad_() for x in (k, v))
    attend = lambda: flashjit.attention(q, k.expand(2, 4, 333, dim), v.expand(2, 4, 333, dim))
    want = lambda dtype: reference(q, k.expand(2, 4, 333, dim), v.expand(2, 4, 333, dim), dtype=dtype)
    out = attend()
    dout = torch.randn(size(out), dtype=out.dtype, device=DEVICE).expand(out.shape)
    judge(out, torch.autograd.grad(out, (q, k, v), dout), want, (q, k, v), dout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim, dim_v", [(32, 32), (64, 64), (128, 128), (64, 32), (40, 40)])
@pytest.mark.parametrize("masked", [False, True, "top_left"])
def test_forward_and_gradients(dtype, dim, dim_v, masked):
    q, k, v = tensors(dim=dim, dim_v=dim_v, dtype=dtype)
    keep = {
        False: None,
        True: causal(200, 333),
        "top_left": torch.ones(200, 333, dtype=torch.bool, device=DEVICE).tril(),
    }[masked]
    check(
        lambda: flashjit.attention(q, k, v, causal=masked),
        lambda dtype: reference(q, k, v, keep, dtype=dtype),
        (q, k, v),
    )


def test_packed_qkv_is_taken_without_a_copy():
    qkv = torch.randn(2, 128, 3, 4, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out = flashjit.attention(q, k, v)
    assert (
        torch.cuda.memory_allocated() - before <= 2 * out.numel() * out.element_size()
        and out.transpose(1, 2).is_contiguous()
    )
    check(lambda: flashjit.attention(q, k, v), lambda dtype: reference(q, k, v, dtype=dtype), (qkv,))


def test_lse():
    q, k, v = tensors()
    out, lse = flashjit.attention(q, k, v, causal=True, return_lse=True)
    s = 0.125 * q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3)
    torch.testing.assert_close(
        lse.double(), torch.logsumexp(s.masked_fill(~causal(200, 333), -math.inf), 3), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128])
def test_lse_has_gradients(dtype, dim):
    q, k, v = tensors(dim=dim, dtype=dtype)
    sinks = torch.linspace(-1, 2, 4, device=DEVICE, requires_grad=True)
    g, w = torch.randn(2, 4, 200, dim, device=DEVICE, dtype=dtype), torch.randn(2, 4, 200, device=DEVICE)
    keep = causal(200, 333)
    out, lse = flashjit.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    inputs = q, k, v, sinks
    got = torch.autograd.grad((out * g).float().sum() + (lse * w).sum(), inputs)

    def want(dtype):
        scores = (dim**-0.5 * q.to(dtype) @ k.to(dtype).repeat_interleave(2, 1).transpose(2, 3)).masked_fill(
            ~keep, -math.inf
        )
        all_scores = torch.cat([scores, sinks.to(dtype)[None, :, None, None].expand(2, 4, 200, 1)], 3)
        lse = torch.logsumexp(all_scores.float() if dtype != torch.float64 else all_scores, 3)
        return (reference(q, k, v, keep, sinks=sinks, dtype=dtype) * g.to(dtype)).sum() + (
            lse * w.to(lse.dtype)
        ).sum()

    exact, rounded = (torch.autograd.grad(want(x), inputs) for x in (torch.float64, dtype))
    for name, a, b, c in zip(("dq", "dk", "dv", "dsinks"), got, exact, rounded):
        error, limit = (a.double() - b.double()).abs().max(), 3 * (c.double() - b.double()).abs().max() + 1e-5
        limit = limit + torch.finfo(a.dtype).eps * b.double().abs().max() + (1e-2 if name == "dsinks" else 0)
        assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}"


def test_the_gradient_of_lse_does_not_reach_rows_that_attend_to_nothing():
    q, k, v = tensors(queries=333, keys=200)
    lse = flashjit.attention(q, k, v, causal=True, return_lse=True)[1]
    assert all(
        x.isfinite().all() for x in torch.autograd.grad((lse * lse).sum(), (q, k, v))
    )  # infinite there


@pytest.mark.parametrize(
    "dtype, dim", [(torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 128), (torch.bfloat16, 192)]
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("family", ["chosen", "sm80"])
def test_rows_that_belong_to_no_sequence_are_zeros(dtype, dim, dropout_p, family):
    if family == "sm80":
        if dtype == torch.float32:
            pytest.skip("family simt alone takes fp32")
        spec = f"{'fp16' if dtype == torch.float16 else 'bf16'}:d{dim}:causal{':dropout' if dropout_p else ''}:varlen"
        for backward, config in ((False, "sm80:br64:bc64:w4:s1"), (True, "sm80:br32:bc64:w4")):
            flashjit.runtime().prepare(spec, (3, 4, 2, 128, 130), backward=backward, config=config)
    lengths_q, lengths_kv, tail = (100, 1, 64), (70, 130, 1), 77
    rows_q, rows_kv = sum(lengths_q), sum(lengths_kv)
    offsets = lambda lengths: torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    q, k, v = tensors(batch=1, queries=rows_q + tail, keys=rows_kv + tail, dim=dim, dtype=dtype)
    with torch.no_grad():
        for x, rows in ((q, rows_q), (k, rows_kv), (v, rows_kv)):
            x[:, :, rows:] = math.nan
    named = dict(
        causal=True,
        dropout_p=dropout_p,
        cu_seqlens_q=offsets(lengths_q),
        cu_seqlens_kv=offsets(lengths_kv),
        max_seqlen_q=128,
        max_seqlen_kv=130,
        return_lse=True,
    )
    poison = torch.full(
        (64 << 20,), 255, dtype=torch.uint8, device=DEVICE
    )  # NaN, in the memory that the results get
    del poison
    torch.manual_seed(1)
    out, lse = flashjit.attention(q, k, v, **named)
    dout = torch.randn_like(out)
    dout[:, :, rows_q:] = math.nan
    got = out, *torch.autograd.grad(out, (q, k, v), dout)
    short = [
        x[:, :, :rows].detach().clone().requires_grad_()
        for x, rows in ((q, rows_q), (k, rows_kv), (v, rows_kv))
    ]
    torch.manual_seed(1)
    want, want_lse = flashjit.attention(*short, **named)
    assert torch.equal(lse[:, :, :rows_q], want_lse) and (lse[:, :, rows_q:] == -torch.inf).all()
    for a, b, rows in zip(
        got,
        (want, *torch.autograd.grad(want, short, dout[:, :, :rows_q])),
        (rows_q, rows_q, rows_kv, rows_kv),
    ):
        assert (a[:, :, rows:] == 0).all()
        torch.testing.assert_close(a[:, :, :rows], b, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("what", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("through", ["eager", "compiled"])
def test_misaligned_tensors_are_copied(what, through):
    inputs = dict(zip("qkv", tensors()))
    moved = lambda x: (
        torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x.detach())
    )
    if what in inputs:
        inputs[what] = moved(inputs[what]).requires_grad_()
    call = lambda q, k, v: flashjit.attention(q, k, v, causal=True)
    out = (compiled(call) if through == "compiled" else call)(**inputs)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, tuple(inputs.values()), moved(dout) if what == "dout" else dout)
    judge(
        out,
        grads,
        lambda dtype: reference(*inputs.values(), causal(200, 333), dtype=dtype),
        tuple(inputs.values()),
        dout,
    )


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad"])
def test_transforms_of_torch_func(transform):
    q, k, v = (x.detach() for x in tensors())
    loss = lambda q, k, v: flashjit.attention(q, k, v, causal=True).float().square().sum()
    if transform == "grad":
        got = torch.func.grad(loss, (0, 1, 2))(q, k, v)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(loss(*leaves), leaves)
    elif transform == "vmap":
        got = torch.func.vmap(lambda q: flashjit.attention(q, k, v))(torch.stack([q, 2 * q]))
        want = torch.stack([flashjit.attention(q, k, v), flashjit.attention(2 * q, k, v)])
    else:
        got = torch.func.vmap(torch.func.grad(loss), (0, None, None))(torch.stack([q, 2 * q]), k, v)
        want = torch.stack([torch.func.grad(loss)(x, k, v) for x in (q, 2 * q)])
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 200])
def test_rows_of_finfo_min_in_a_program_attend_to_all_keys_alike(dtype, queries):
    q, k, v = tensors(dtype=dtype, heads_kv=4, queries=queries)
    least, padded = torch.finfo(dtype).min, torch.arange(queries, device=DEVICE) < 70
    mask = (padded * torch.ones((), device=DEVICE))[:, None].expand(queries, 333).contiguous()
    rows = padded * least
    programs = (
        lambda s, b, h, i, j: torch.where(i < 70, least, s),
        lambda s, b, h, i, j: s + mask[i, j] * least,
        lambda s, b, h, i, j: s + rows[i],
        lambda s, b, h, i, j: torch.where(i < 70, torch.finfo(torch.float32).min, s),
    )
    mean = v.double().mean(2, keepdim=True).expand(-1, -1, min(queries, 70), -1)
    for program in programs:
        out, lse = flashjit.attention(q, k, v, score_mod=program, return_lse=True)
        torch.testing.assert_close(out[:, :, :70].double(), mean, atol=1e-2, rtol=1e-2)
        assert (lse[:, :, :70] < -3e38).all() and lse.isfinite().all()
        torch.testing.assert_close(
            out[:, :, 70:], flashjit.attention(q[:, :, 70:], k, v), atol=1e-2, rtol=1e-2
        )
        assert all(x.isfinite().all() for x in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_of_finfo_min_attend_to_all_keys_alike(dtype, dim):
    """As the additive masks of left padding have them: there PyTorch's eager code gives the mean of V."""
    q, k, v = tensors(dim=dim, dtype=dtype, heads_kv=4)
    mask = torch.zeros(2, 1, 200, 333, device=DEVICE, dtype=dtype)
    mask[:, :, :70] = torch.finfo(dtype).min
    mask[:, :, 70:90] = -math.inf
    out = scaled_dot_product_attention(q, k, v, mask)
    dout = torch.randn_like(out)
    dout[:, :, :70] = 0  # a loss has no use for such rows
    got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    want = torch.autograd.grad(scaled_dot_product_attention(q[:, :, 90:], k, v), (q, k, v), dout[:, :, 90:])
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)))
    mean = v.double().mean(2, keepdim=True).expand(-1, -1, 70, -1)
    torch.testing.assert_close(out[:, :, :70].double(), mean, atol=1e-2, rtol=1e-2)
    assert (out[:, :, 70:90] == 0).all()
    # Another kernel: the tolerance is that of the element type.
    torch.testing.assert_close(
        out[:, :, 90:], scaled_dot_product_attention(q[:, :, 90:], k, v), atol=1e-2, rtol=1e-2
    )


def test_dropout_is_replayed_in_the_backward_pass():
    q, k, v = tensors(queries=64, keys=64, heads_kv=4)
    torch.manual_seed(5)
    out = flashjit.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(flashjit.attention(q, k, v, dropout_p=0.5), out)
    assert not torch.equal(flashjit.attention(q, k, v, dropout_p=0.5), out)
    eye = torch.eye(64, device=DEVICE, dtype=q.dtype)[None, None].expand(2, 4, -1, -1).contiguous()
    torch.manual_seed(5)
    p = flashjit.attention(q, k, eye, dropout_p=0.5).detach().double()
    assert abs((p > 0).double().mean() - 0.5) < 0.02
    dout = torch.randn_like(out)
    dv = torch.autograd.grad(out, v, dout)[0]
    torch.testing.assert_close(dv.double(), p.transpose(2, 3) @ dout.double(), atol=0.05, rtol=0.05)


def test_key_padding_and_block_map():
    q, k, v = tensors(queries=256, keys=256)
    lengths = torch.tensor([256, 100], dtype=torch.int32, device=DEVICE)
    blocks = torch.tensor([[True, False], [True, True]], device=DEVICE)
    keep = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1) & (
        torch.arange(256, device=DEVICE) < lengths[:, None, None, None]
    )
    check(
        lambda: flashjit.attention(q, k, v, kv_lengths=lengths, block_mask=BlockMap(blocks, 128)),
        lambda dtype: reference(q, k, v, keep, dtype=dtype),
        (q, k, v),
    )


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences(masked):
    q, k, v = tensors(batch=1)
    cu_q = torch.tensor([0, 50, 50, 200], dtype=torch.int32, device=DEVICE)
    cu_kv = torch.tensor([0, 80, 100, 333], dtype=torch.int32, device=DEVICE)
    parts = ((0, 50, 0, 80), (50, 200, 100, 333))
    # Sequence 1 has keys and no queries: its gradients are zero.
    want = lambda dtype: torch.cat(
        [
            reference(
                q[:, :, a:b],
                k[:, :, c:d],
                v[:, :, c:d],
                causal(b - a, d - c) if masked else None,
                dtype=dtype,
            )
            for a, b, c, d in parts
        ],
        2,
    )
    check(
        lambda: flashjit.attention(
            q,
            k,
            v,
            causal=masked,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            max_seqlen_q=150,
            max_seqlen_kv=233,
        ),
        want,
        (q, k, v),
    )


def test_sinks():
    q, k, v = tensors()
    sinks = torch.linspace(-1, 4, 4, device=DEVICE).requires_grad_()
    check(
        lambda: flashjit.attention(q, k, v, causal=True, sinks=sinks),
        lambda dtype: reference(q, k, v, causal(200, 333), sinks=sinks, dtype=dtype),
        (q, k, v, sinks),
    )


def positions(queries=200, keys=333):
    return torch.arange(queries, device=DEVICE)[:, None], torch.arange(keys, device=DEVICE)[None]


def test_captures_with_gradients():
    q, k, v = tensors()
    slopes = (torch.rand(4, device=DEVICE) * 0.1).requires_grad_()
    documents = (torch.arange(333, device=DEVICE) // 60).int()
    i, j = positions()
    score = lambda s, b, h, q, kv: 20 * torch.tanh((s + slopes[h] * (kv - q)) / 20)
    mask = lambda b, h, q, kv: documents[q] == documents[kv]
    want = lambda dtype: reference(
        q,
        k,
        v,
        documents[i] == documents[j],
        lambda s: 20 * torch.tanh((s + slopes.to(dtype)[:, None, None] * (j - i)) / 20),
        dtype=dtype,
    )
    check(lambda: flashjit.attention(q, k, v, score_mod=score, mask_mod=mask), want, (q, k, v, slopes))


@pytest.mark.parametrize(
    "name, mask, keep",
    [
        ("window", lambda b, h, q, kv: (q - kv < 50) & (q >= kv), lambda i, j: (i - j < 50) & (i >= j)),
        ("prefix", lambda b, h, q, kv: (kv < 40) | (q >= kv), lambda i, j: (j < 40) | (i >= j)),
        ("dilated", lambda b, h, q, kv: (q - kv) % 3 == 0, lambda i, j: (i - j) % 3 == 0),
    ],
)
def test_masks(name, mask, keep):
    q, k, v = tensors()
    check(
        lambda: flashjit.attention(q, k, v, mask_mod=mask),
        lambda dtype: reference(q, k, v, keep(*positions()), dtype=dtype),
        (q, k, v),
    )


def test_scalars_need_no_new_kernel():
    q, k, v = tensors()
    i, j = positions()
    for window in (20, 70):
        check(
            lambda: flashjit.attention(
                q, k, v, mask_mod="q - kv < window && q >= kv", captures={"window": window}
            ),
            lambda dtype: reference(q, k, v, (i - j < window) & (i >= j), dtype=dtype),
            (q, k, v),
        )


@pytest.mark.parametrize("queries, keys", [(1, 4000), (5, 700), (200, 333)])
def test_the_largest_score_of_each_query(queries, keys):
    """With keys shared by CTAs, heads packed, and neither."""
    q, k, v = tensors(batch=1, heads=8, queries=queries, keys=keys, dim=128)
    out, row_max = flashjit.attention(q, k, v, causal=True, return_row_max=True)
    scores = q.double() @ k.double().repeat_interleave(4, 1).transpose(2, 3) / math.sqrt(128)
    want = scores.masked_fill(~causal(queries, keys), -math.inf).amax(3)
    torch.testing.assert_close(row_max.double(), want, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(out, flashjit.attention(q, k, v, causal=True), atol=1e-2, rtol=1e-2)


def test_flex_attention_s_block_mask():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = tensors(queries=256, keys=256)
    mask = flex.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (q - kv < 100), None, None, 256, 256, device=DEVICE
    )
    i, j = positions(256, 256)
    check(
        lambda: flashjit.attention(q, k, v, block_mask=mask),
        lambda dtype: reference(q, k, v, (i >= j) & (i - j < 100), dtype=dtype),
        (q, k, v),
    )


# --- PyTorch's surroundings ---


needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="torch.compile needs a compiler"
)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}])
def test_compile(options):
    q, k, v = tensors()
    run = compiled(lambda q, k, v: flashjit.attention(q * 1, k, v, causal=True) + 0, **options)
    for _ in range(3):
        check(
            lambda: run(q, k, v).clone(),
            lambda dtype: reference(q, k, v, causal(200, 333), dtype=dtype),
            (q, k, v),
        )


@needs_compiler
def test_compile_with_programs():
    q, k, v = tensors()
    slopes = (torch.rand(4, device=DEVICE) * 0.1).requires_grad_()
    i, j = positions()

    def function(q, k, v, slopes):
        return flashjit.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s + slopes[h] * (kv - q))

    check(
        lambda: compiled(function)(q, k, v, slopes),
        lambda dtype: reference(
            q, k, v, score=lambda s: s + slopes.to(dtype)[:, None, None] * (j - i), dtype=dtype
        ),
        (q, k, v, slopes),
    )


@needs_compiler
def test_dropout_in_compiled_code():
    q, k, v = tensors()
    run = compiled(lambda q, k, v: flashjit.attention(q, k, v, dropout_p=0.3))
    out = run(q, k, v)
    assert not torch.equal(out, run(q, k, v))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().square().sum(), (q, k, v)))


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_dropout_where_compiled_code_computes_a_region_again(options, budget):
    from torch.utils.checkpoint import checkpoint

    q, k = (torch.randn(1, 2, 64, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in "qk")
    v = torch.eye(64, device=DEVICE, dtype=torch.bfloat16).expand(1, 2, -1, -1).contiguous().requires_grad_()

    def region(q, k, v):
        p = flashjit.attention(torch.sin(q), k, v, dropout_p=0.5)
        return torch.cos(p).relu(), p

    with torch._functorch.config.patch(activation_memory_budget=budget):
        run = compiled(lambda *inputs: checkpoint(region, *inputs, use_reentrant=False), **options)
        masks = []
        for _ in range(3):
            p = run(q, k, v)[1].clone()  # V is the identity: the dropped P
            dout = torch.randn_like(p)
            right = (p.detach().float().transpose(2, 3) @ dout.float()).to(dout.dtype)
            torch.testing.assert_close(torch.autograd.grad(p, v, dout)[0], right, rtol=0.02, atol=0.02)
            masks.append(p != 0)
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_operators_are_sound():
    q, k, v = tensors(queries=32, keys=32)
    arguments = arguments_of_forward(q, k, v, options=":causal")
    torch.library.opcheck(
        torch.ops.flashjit.attention_forward.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_nothing_waits_for_the_gpu():
    q, k, v = tensors()
    for dropout_p in (0.1, 0):  # what the first calls compile is there then
        flashjit.attention(q, k, v, causal=True, dropout_p=dropout_p).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashjit.attention(q, k, v, causal=True, dropout_p=0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    slept = torch.cuda.Event()
    slept.record()
    flashjit.attention(q, k, v, causal=True)
    assert not slept.query()


def test_the_current_stream_is_used():
    q, k, v = (x.detach() for x in tensors())
    want = flashjit.attention(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q * 1
        out = flashjit.attention(late, k, v)  # right only if it waits for the stream's work
    stream.synchronize()
    assert torch.equal(out, want)


def test_graph_capture():
    q, k, v = (x.detach() for x in tensors())
    flashjit.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashjit.attention(q, k, v, causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, flashjit.attention(q, k, v, causal=True))


@pytest.mark.parametrize("name", ["tree", "mm_prefix", "causal_if", "positions", "prefix"])
def test_a_graph_replays_with_masks_and_lengths_written_since(name):
    """Masks of requests over pages read tensors, which an engine writes before each replay."""
    batch, queries, keys, page = 3, 7, 300, 16
    ints = lambda *size, below: torch.randint(0, below, size, device=DEVICE, dtype=torch.int32)
    table = torch.randperm(batch * -(-keys // page), device=DEVICE).to(torch.int32).view(batch, -1)
    k, v = torch.randn(2, table.numel(), 2, page, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    q = torch.randn(batch, 8, queries, 64, device=DEVICE, dtype=torch.bfloat16)

    def values():
        """What the mask reads, and the lengths."""
        parents = torch.stack([ints(batch, below=i + 1) - 1 for i in range(queries)], 1)
        read = {
            "tree": [flashjit.masks.ancestors_of(parents)],
            "mm_prefix": [first := ints(batch, queries, below=keys), first + 20],
            "causal_if": [ints(batch, below=2)],
            "positions": [ints(batch, queries, below=keys), ints(batch, keys, below=keys)],
            "prefix": [ints(batch, below=keys)],
        }
        return [*read[name], queries + ints(batch, below=keys - queries)]

    def call(given):
        *read, lengths = given
        make = getattr(flashjit.masks, name)
        mask = make(ancestors=read[0]) if name == "tree" else make(*read)
        where = dict(page_table=table, kv_lengths=lengths, max_seqlen_kv=keys)
        return flashjit.attention(q, k, v, mask_mod=mask, **where)

    given = values()
    call(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(given)
    for _ in range(3):
        for old, new in zip(given, values()):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        assert torch.equal(got, call(given))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("before", ["nothing", "a kernel", "a copy", "zeros", "another stream"])
def test_a_backward_pass_waits_for_what_the_stream_has_before_it(before, captured):
    """Its first kernel is launched early, behind whatever there is."""
    q, k, v = (x.detach() for x in tensors())
    out, lse = flashjit.forward(q, k, v, options="causal")
    given = torch.randn_like(out)
    dout, other = torch.empty_like(given), torch.cuda.Stream()

    def step():
        current = torch.cuda.current_stream()
        if before != "nothing":
            torch.cuda._sleep(5_000_000)
            dout.copy_(given) if before != "a kernel" else torch.mul(given, 1, out=dout)
        if before == "zeros":
            torch.zeros(1 << 20, device=DEVICE)
        if before == "another stream":
            other.wait_stream(current)
            with torch.cuda.stream(other):
                dout.mul_(1)
            current.wait_stream(other)
        return flashjit.backward(q, k, v, out, lse, dout, options="causal:det", stream=current.cuda_stream)

    dout.copy_(given)
    want = flashjit.backward(q, k, v, out, lse, dout, options="causal:det")
    torch.cuda.synchronize()
    if before != "nothing":
        dout.fill_(7)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        for _ in range(3):
            graph.replay()
    else:
        got = step()
    torch.cuda.synchronize()
    for a, b in zip(got, want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dropout_in_a_graph_has_another_mask_at_each_replay(dtype):
    q, k, v = tensors(queries=64, keys=64, heads_kv=4, dtype=dtype)
    with torch.no_grad():
        v.copy_(torch.eye(64, device=DEVICE))  # O is the dropped P
    dout = torch.randn_like(q)
    step = lambda: (p := flashjit.attention(q, k, v, dropout_p=0.5), torch.autograd.grad(p, v, dout)[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        p, dv = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        masks.append((p > 0).cpu())
        assert 0.4 < masks[-1].double().mean() < 0.6
        want = p.detach().double().transpose(2, 3) @ dout.double()
        torch.testing.assert_close(
            dv.double(), want, atol=0.02 if dtype == torch.float16 else 1e-4, rtol=1e-2
        )
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize(
    "dtype, dim", [(torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256)]
)
def test_dropout_s_seed_on_the_device_is_the_same(dtype, dim):
    from flashjit import _kept_plans, _plans

    q, k, v = (x.detach() for x in tensors(dim=dim, dtype=dtype))
    plan = _kept_plans.plan_of(
        q, k, v, _plans.NOTHING, (), _plans.Problem(":causal:dropout", None, 0.3, 0, 0, ())
    )
    numbers, results = (7, 2**40 + 3), []
    for rng in (numbers, torch.tensor(numbers, device=DEVICE)):
        out, lse = plan.forward(q, k, v, _plans.NOTHING, (), rng, True)
        results.append([out, lse, *plan.backward(out, None, q, k, v, out, lse, _plans.NOTHING, (), rng)[0]])
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_gradients_in_a_new_thread():
    q, k, v = tensors(queries=72)  # a size of its own: the first use is in the thread
    errors = []

    def work():
        try:
            flashjit.attention(q, k, v).sum().backward()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors and q.grad.isfinite().all()


def test_deterministic_mode():
    q, k, v = tensors(queries=1000, keys=1000)
    torch.use_deterministic_algorithms(True)
    try:
        dout = torch.randn(2, 4, 1000, 64, device=DEVICE, dtype=torch.bfloat16)
        runs = [torch.autograd.grad(flashjit.attention(q, k, v), (q, k, v), dout) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


def test_autocast():
    q, k, v = tensors(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flashjit.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@needs_compiler
def test_autocast_in_compiled_code():
    q, k, v = tensors(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        want = flashjit.attention(q, k, v, causal=True)
        out = compiled(lambda q, k, v: flashjit.attention(q, k, v, causal=True))(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want)
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors()
    call = lambda q, k, v: flashjit.attention(q, k, v, causal=True, dropout_p=0.3)
    grads = []
    for run in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(run(q, k, v).float().square().sum(), v)[0])
    torch.testing.assert_close(*grads, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_double_backward(dtype):
    def second(attend, dtype):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors())
        grads = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in grads), (q, k, v))

    wanted = second(lambda q, k, v: reference(q, k, v, causal(200, 333)), torch.float64)
    for got, exact in zip(second(lambda q, k, v: flashjit.attention(q, k, v, causal=True), dtype), wanted):
        assert (got - exact).abs().max() < {torch.bfloat16: 0.05, torch.float32: 1e-4}[
            dtype
        ] * exact.abs().max()


def test_hessian_vector_product_and_gradient_of_a_tangent():
    q, k, v = (x.detach() for x in tensors(dtype=torch.float32))
    t = torch.randn_like(q)

    def both(attend, q, k, v, t):
        loss = lambda q: attend(q, k, v).square().sum()
        product = torch.func.jvp(torch.func.grad(loss), (q,), (t,))[1]
        return product, torch.func.grad(lambda q: torch.func.jvp(loss, (q,), (t,))[1])(q)

    exact = both(reference, *(x.double() for x in (q, k, v, t)))
    for got, wanted in zip(both(flashjit.attention, q, k, v, t), exact):
        assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_arrays_of_other_libraries():
    q, k, v = (x.detach() for x in tensors())
    out, lse = flashjit.forward(q, k, v, options="causal", stream=torch.cuda.current_stream().cuda_stream)
    assert torch.equal(out, flashjit.attention(q, k, v, causal=True))
    dout = torch.randn_like(out)
    dq, dk, dv = flashjit.backward(q, k, v, out, lse, dout, options="causal")
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    again = torch.empty_like(out)
    flashjit.forward(
        *map(INTERFACES["DLPack"], (q, k, v)), options="causal", out=again, lse=torch.empty_like(lse)
    )
    torch.cuda.synchronize()
    assert torch.equal(again, out)


class Only:
    """An array of which one interface alone is seen. It holds the array, whose memory would be another's else."""

    def __init__(self, array, *names):
        self._array = array
        for name in names:
            setattr(self, name, getattr(array, name))


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed: pip install cupy-cuda13x")


INTERFACES = {
    "own": lambda x: x,
    "DLPack": lambda x: Only(x, "__dlpack__", "__dlpack_device__"),
    "CUDA array interface": lambda x: Only(x, "__cuda_array_interface__"),
}


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_cupy(cupy, dtype, interface):
    """Arrays of CuPy's own, on a stream of CuPy's that no other waits for; results in CuPy's arrays, too."""
    q, k, v = leaves = tensors(dtype=dtype)
    dout = torch.randn_like(q)
    shown = INTERFACES[interface]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        made = lambda x: cupy.asarray(x.detach().cpu().numpy())
        arrays = [shown(made(x)) for x in leaves]
        given = dict(options="causal", stream=stream.ptr)
        if interface == "own":  # flashjit makes the rest
            out, lse = flashjit.forward(*arrays, **given)
            grads = flashjit.backward(*arrays, out, lse, made(dout), **given)
        else:
            empty = lambda *size, type=made(q).dtype: cupy.empty(size, type)
            spec, shape = f"{'fp16' if dtype == torch.float16 else 'fp32'}:d64:causal", (2, 4, 2, 200, 333)
            lent = lambda backward: shown(
                empty(
                    max(1, flashjit.runtime().workspace_bytes(spec, shape, backward=backward)), type="uint8"
                )
            )
            out, lse, grads = (
                empty(*q.shape),
                empty(2, 4, 200, type="float32"),
                [empty(*x.shape) for x in leaves],
            )
            flashjit.forward(*arrays, out=shown(out), lse=shown(lse), workspace=lent(False), **given)
            flashjit.backward(
                *arrays,
                shown(out),
                shown(lse),
                shown(made(dout)),
                workspace=lent(True),
                **dict(zip(("dq", "dk", "dv"), map(shown, grads))),
                **given,
            )
        results = [cupy.asnumpy(x, stream=stream) for x in (out, *grads)]  # waits for the stream
    assert all(isinstance(x, cupy.ndarray) for x in (out, lse, *grads))
    out, *grads = (torch.from_numpy(x).to(DEVICE) for x in results)
    judge(out, grads, lambda dtype: reference(q, k, v, causal(200, 333), dtype=dtype), leaves, dout)


def test_dlpack_of_cupy_waits_for_the_array_s_stream(cupy):
    """What is still being written on one stream is read on another only after that."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        q, k, v = (cupy.asarray(x.detach().cpu().numpy()) for x in tensors(dtype=torch.float16))
        values, busy = q.copy(), cupy.empty(2**30, "uint8")
        want = cupy.asnumpy(flashjit.forward(q, k, v, options="causal", stream=stream.ptr)[0], stream=stream)
        out, lse = cupy.empty(want.shape, "float16"), cupy.empty(want.shape[:3], "float32")
        other = cupy.cuda.Stream(non_blocking=True)
        q.data.memset_async(0, q.nbytes)
        for _ in range(50):  # some 15 ms of copies before what counts
            busy.data.copy_from_device_async(busy.data + 2**29, 2**29)
        q.data.copy_from_device_async(values.data, q.nbytes)
        flashjit.forward(q, k, v, options="causal", out=out, lse=lse, stream=other.ptr)
        assert not stream.done  # so that a call which does not wait could be seen
        assert (cupy.asnumpy(out, stream=other) == want).all() and want.any()


WITHOUT_PYTORCH = """import sys, cupy, numpy, flashjit
arrays = numpy.load(sys.argv[1])
q, k, v, dout = (cupy.asarray(arrays[name]) for name in ("q", "k", "v", "dout"))
out, lse = flashjit.forward(q, k, v, options="causal")
grads = flashjit.backward(q, k, v, out, lse, dout, options="causal")
on_cpu, lse_on_cpu = flashjit.forward(*(arrays[name].astype("float32") for name in ("q", "k", "v")), options="causal")
assert "torch" not in sys.modules
numpy.savez(sys.argv[2], *map(cupy.asnumpy, (out, *grads)), on_cpu=on_cpu, lse=cupy.asnumpy(lse), lse_on_cpu=lse_on_cpu)
"""


def test_cupy_where_pytorch_was_never_imported(cupy, tmp_path):
    """In a process of its own, whose CUDA context is CuPy's. Compared with what NumPy's arrays give on the CPU."""
    q, k, v = leaves = tensors(dtype=torch.float16)
    dout = torch.randn_like(q)
    numpy = pytest.importorskip("numpy")
    numpy.savez(
        tmp_path / "in.npz",
        **{name: x.detach().cpu().numpy() for name, x in zip(("q", "k", "v", "dout"), (*leaves, dout))},
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTORCH, tmp_path / "in.npz", tmp_path / "out.npz"],
        text=True,
        capture_output=True,
        timeout=300,
        env=child.environment(),
    )
    assert done.returncode == 0, done.stderr
    results = numpy.load(tmp_path / "out.npz")
    out, *grads = (torch.from_numpy(results[f"arr_{i}"]).to(DEVICE) for i in range(4))
    want = lambda dtype: reference(q, k, v, causal(200, 333), dtype=dtype)
    judge(out, grads, want, leaves, dout)
    torch.testing.assert_close(
        torch.from_numpy(results["on_cpu"]).to(DEVICE).double(), want(torch.float64), atol=1e-5, rtol=0
    )
    assert abs(results["lse"] - results["lse_on_cpu"]).max() < 1e-3


FORKS = """import os, torch, flashjit
q, k, v = (torch.randn(1, 2, 64, 64) for _ in range(3))
out, lse = flashjit.attention(q, k, v, causal=True, return_lse=True)
flashjit.backward(q, k, v, out, lse, torch.randn_like(out), options="causal")
flashjit.attention(q, k, v, dropout_p=0.1, score_mod=lambda s, b, h, i, j: s + i - j, lists=flashjit.TileLists(q, k, v,
    dropout_p=0.1, score_mod=lambda s, b, h, i, j: s + i - j))
flashjit.runtime()
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
got = flashjit.attention(q.cuda(), k.cuda(), v.cuda(), causal=True)
torch.testing.assert_close(got.cpu(), out, atol=1e-3, rtol=0)
torch.cuda.synchronize()
os._exit(0)
"""


def test_a_process_that_forks_after_calls_on_the_cpu_uses_cuda_in_its_child():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300, env=child.environment()
    )
    assert done.returncode == 0, done.stderr


def test_jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax finds no GPU")
    q, k, v = (
        jax.random.normal(key, (2, 4, 100, 64), dtype="bfloat16")
        for key in jax.random.split(jax.random.key(0), 3)
    )
    out = torch.empty(
        2, 4, 100, 64, device=DEVICE, dtype=torch.bfloat16
    )  # JAX's own arrays cannot be written
    lse = torch.empty(2, 4, 100, device=DEVICE)
    flashjit.forward(q, k, v, options="causal", out=out, lse=lse)
    want = flashjit.attention(*(torch.from_dlpack(x) for x in (q, k, v)), causal=True)
    torch.cuda.synchronize()
    torch.testing.assert_close(out, want)


def test_pytorch_s_signature():
    q, k, v = (x.detach().half() for x in tensors(heads_kv=4))
    mask = torch.rand(2, 1, 200, 333, device=DEVICE) > 0.3
    bias = torch.randn(4, 200, 333, device=DEVICE, dtype=torch.float16)
    for named in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": bias}, {"scale": 0.3}):
        torch.testing.assert_close(
            scaled_dot_product_attention(q, k, v, **named),
            F.scaled_dot_product_attention(q, k, v, **named),
            atol=5e-3,
            rtol=5e-3,
        )
    query, key, value = (x.detach() for x in tensors())
    torch.testing.assert_close(
        scaled_dot_product_attention(query, key, value, enable_gqa=True),
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        atol=2e-2,
        rtol=2e-2,
    )


# --- bad input: refused, and the GPU goes on ---


def transposed(x):
    """The same values, with the last dimension not innermost."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def freed(x):
    x.untyped_storage().resize_(0)
    return x


def captured(s, text="score + s[h]"):
    return dict(score_mod=text, captures={"s": s})


def ints(*numbers, device=DEVICE):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def packed(cu_seqlens_q, cu_seqlens_kv):
    return dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=200, max_seqlen_kv=333)


def refused(function, change, match):
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(flashjit.InvalidArgument, match=match):
        function(**{"q": q, "k": k, "v": v, **change(q, k, v)})
    torch.cuda.synchronize()
    assert flashjit.attention(q, k, v).isfinite().all()


@pytest.mark.parametrize(
    "change, match",
    [
        # the CPU's with CUDA's
        (lambda q, k, v: dict(k=k.cpu()), "q is on cuda:0 and k on cpu: move them to one device"),
        (lambda q, k, v: dict(q=q.cpu()), "q is on cpu and k on cuda:0: move them to one device"),
        (lambda q, k, v: dict(kv_lengths=ints(9, 9, device="cpu")), "kv_lengths on cpu"),
        (lambda q, k, v: dict(sinks=torch.zeros(4)), "sinks on cpu"),
        (
            lambda q, k, v: dict(block_mask=BlockMap(torch.ones(2, 3, dtype=torch.bool), 128)),
            "block_map on cpu",
        ),
        (
            lambda q, k, v: dict(
                q=q[:1], k=k[:1], v=v[:1], **packed(ints(0, 200, device="cpu"), ints(0, 333))
            ),
            "cu_seqlens_q on cpu",
        ),
        (lambda q, k, v: captured(torch.rand(4)), "the captured tensor s on cpu"),
        # types
        (lambda q, k, v: dict(k=k.half()), "one type"),
        (lambda q, k, v: dict(q=q.double()), "float16, bfloat16 and float32"),
        (lambda q, k, v: dict(v=v.long()), "float16, bfloat16 and float32"),
        (lambda q, k, v: dict(q=q.tolist()), "q is a list"),
        (lambda q, k, v: dict(kv_lengths=ints(9, 9).long()), "must be int32"),
        (lambda q, k, v: captured(torch.rand(4, device=DEVICE).double()), r"captures\['s'\]"),
        # sizes
        (lambda q, k, v: dict(q=q[..., 1:57].contiguous()[..., 4:60]), "head_dim of q"),
        (lambda q, k, v: dict(q=q[0]), "four dimensions"),
        (lambda q, k, v: dict(q=q[:, :3]), "multiple"),
        (lambda q, k, v: dict(k=k[:1]), "batches must be equal"),
        (lambda q, k, v: dict(v=v[:, :, :300]), "length of k"),
        (lambda q, k, v: dict(kv_lengths=ints(9, 9, 9)), r"int32 \[2\]"),
        (lambda q, k, v: dict(sinks=torch.zeros(3, device=DEVICE)), r"\[4\]"),
        (
            lambda q, k, v: dict(block_mask=BlockMap(torch.ones(3, 3, dtype=torch.bool, device=DEVICE), 128)),
            "block",
        ),
        (lambda q, k, v: packed(ints(0, 200), ints(0, 333)), "its batch is 1"),
        (
            lambda q, k, v: captured(torch.rand(4, 4, device=DEVICE), "s: fp32 1d; score + s[h]"),
            "captured|s ",
        ),
        (lambda q, k, v: captured(torch.rand(0, device=DEVICE)), "no element to read"),
        (lambda q, k, v: dict(q=q[..., :0], k=k[..., :0]), "head_dim is 0"),
        # memory that is gone, and gradients that nothing has
        (lambda q, k, v: dict(q=freed(q.clone())), "no memory any more|is null"),
        (lambda q, k, v: dict(kv_lengths=freed(ints(9, 9))), "no memory any more|is null"),
        (lambda q, k, v: captured(freed(torch.rand(4, device=DEVICE))), "no memory any more|is null"),
    ],
)
def test_bad_input_leaves_the_gpu_well(change, match):
    refused(flashjit.attention, change, match)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda q, k, v: dict(q=q.clone().requires_grad_()), "q requires gradients.*give its detach"),
        (lambda q, k, v: dict(out=torch.empty_like(q).requires_grad_()), "out requires gradients"),
        (
            lambda q, k, v: dict(
                options="score{s: fp32 1d; score + s[h]}",
                captures={"s": torch.rand(4, device=DEVICE, requires_grad=True)},
            ),
            r"captures\['s'\] requires gradients",
        ),
        (
            lambda q, k, v: dict(
                options="score{s: fp32 1d; score + s[h]}", captures={"s": freed(torch.rand(4, device=DEVICE))}
            ),
            "s is null",
        ),
        (lambda q, k, v: dict(k=k.cpu()), "q is on cuda:0 and k on cpu"),
        (lambda q, k, v: dict(out=torch.empty(q.shape, dtype=q.dtype)), "out on cpu"),
        (lambda q, k, v: dict(v=v.half()), "v is fp16: it must be bf16"),
        (lambda q, k, v: dict(q=transposed(q)), "stride"),
        (lambda q, k, v: dict(k=k[:1]), "batch"),
        (lambda q, k, v: dict(lse=torch.empty(2, 4, 100, device=DEVICE)), r"it must be fp32 \[2, 4, 200\]"),
    ],
)
def test_bad_input_of_forward_leaves_the_gpu_well(change, match):
    refused(flashjit.forward, change, match)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "function, change, match",
    [
        (
            flashjit.attention,
            lambda q, k, v: dict(k=k.to("cuda:1")),
            "q is on cuda:0 and k on cuda:1: move them to one device",
        ),
        (
            flashjit.attention,
            lambda q, k, v: dict(kv_lengths=ints(9, 9, device="cuda:1")),
            "kv_lengths on cuda:1",
        ),
        (
            flashjit.attention,
            lambda q, k, v: captured(torch.rand(4, device="cuda:1")),
            "the captured tensor s on cuda:1",
        ),
        (flashjit.forward, lambda q, k, v: dict(v=v.to("cuda:1")), "q is on cuda:0 and v on cuda:1"),
    ],
)
def test_tensors_of_two_gpus_are_refused(function, change, match):
    refused(function, change, match)


def test_captures_freed_between_calls_are_refused():
    """Where all else is known to be right from the call before."""
    q, k, v = (x.detach() for x in tensors())
    slopes = torch.rand(4, device=DEVICE)
    call = lambda: flashjit.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s + slopes[h])
    call()
    torch.cuda.synchronize()
    freed(slopes)
    with pytest.raises(flashjit.InvalidArgument, match="is null"):
        call()
    torch.cuda.synchronize()
    assert flashjit.attention(q, k, v).isfinite().all()


@pytest.mark.parametrize("empty", [dict(batch=0), dict(heads=0, heads_kv=0), dict(queries=0), dict(keys=0)])
def test_empty_tensors(empty):
    """Are no mistake: there is nothing to compute, and what attends to nothing is 0."""
    q, k, v = tensors(**empty)
    out = flashjit.attention(q, k, v, causal=True)
    assert out.shape == q.shape and (out == 0).all()
    out.sum().backward()
    assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in (q, k, v))
    torch.cuda.synchronize()


def test_long_context_counts_the_attention_s_memory_alone(tmp_path):
    """From the first row on, and of each backend: what cuBLAS keeps is in none. 8 tensors of 1024 rows of 1024 numbers are
    16 MiB; dQ in fp32 is 4 more."""
    script = pathlib.Path(__file__).resolve().parents[2] / "tools/bench/long_context.py"
    done = subprocess.run(
        [sys.executable, script, "--hidden", "1024", "--last", "4096", "--csv", tmp_path / "table.csv"],
        capture_output=True,
        text=True,
        timeout=300,
        env=child.environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "table.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["backend"] != "math" and row["status"] == "ok"]
    assert {row["backend"] for row in rows} >= {"flashjit", "flash"}
    for row in rows:
        assert 16 <= float(row["peak_mib"]) / (int(row["seqlen"]) / 1024) < 30, str(row)


def test_deterministic_gradients_of_captures():
    """The same bits on every run, of few elements that all pairs add to, and close to those in any order."""
    q, k, v = tensors(queries=333)
    slopes = torch.linspace(0.1, 1, 4, device=DEVICE).requires_grad_()
    table = torch.randn(64, device=DEVICE).requires_grad_()

    def grads(deterministic):
        out = flashjit.attention(
            q,
            k,
            v,
            score_mod="score * s[h] + t[max(min(kv - q, 31), -32) + 32]",
            captures={"s": slopes, "t": table},
            deterministic=deterministic,
        )
        return torch.autograd.grad(out, (slopes, table, q), torch.ones_like(out))

    first = grads(True)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(grads(True), first))
    for a, b in zip(grads(False), first):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.float().abs().max()))


def test_lists_are_made_once_for_many_calls():
    """For documents, in both passes: the same bits as with lists of each call's own, and others are refused."""
    q, k, v = (x.detach() for x in tensors())
    documents = torch.arange(333, device=DEVICE, dtype=torch.int32) // 50
    given = dict(options="mask{doc: int32 1d; doc[q] == doc[kv]}:det", captures={"doc": documents})
    out, lse = flashjit.forward(q, k, v, **given)
    grads = flashjit.backward(q, k, v, out, lse, q, **given)
    lists = flashjit.build_lists(q, k, v, **given)
    backward_lists = flashjit.build_lists(q, k, v, backward=True, **given)
    for _ in range(2):
        again, lse_again = flashjit.forward(q, k, v, lists=lists, **given)
        assert torch.equal(again, out) and torch.equal(lse_again, lse)
        for one, other in zip(flashjit.backward(q, k, v, out, lse, q, lists=backward_lists, **given), grads):
            assert torch.equal(one, other)
    with pytest.raises(flashjit.InvalidArgument, match="lists were built for bwd"):
        flashjit.forward(q, k, v, lists=backward_lists, **given)


@pytest.fixture
def use_runtime(monkeypatch):
    """Puts a runtime in place of the one that all of PyTorch's calls share; no plan and no call is kept."""

    def use(shared):
        for module in (flashjit._plans, flashjit._launch):
            monkeypatch.setattr(module, "runtime", lambda: shared)
        for kept in ("_plans", "_recent"):
            monkeypatch.setattr(flashjit._kept_plans, kept, {})
        flashjit.attention._calls.forget()

    yield use
    flashjit.attention._calls.forget()


def test_a_call_with_gradients_compiles_both_passes(tmp_path, use_runtime):
    use_runtime(flashjit.Runtime(cache_dir=tmp_path))
    kernels = lambda: len(list(tmp_path.glob("v1/*/*/kernel.cubin")))
    q, k, v = tensors()
    flashjit.attention(q.detach(), k.detach(), v.detach())
    assert kernels() == 1
    out = flashjit.attention(q, k, v)
    assert kernels() == 2
    out.sum().backward()
    assert kernels() == 2


def documents(tokens=50, keys=333):
    document = torch.arange(keys, device=DEVICE, dtype=torch.int32) // tokens
    return document, lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]


def bits(*tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others))


@pytest.mark.parametrize("dim", [64, 128])
def test_attention_takes_lists(dim):
    """For documents, in both passes and under no_grad: the same bits as with lists of each call's own."""
    q, k, v = tensors(dim=dim)
    slopes = torch.rand(4, device=DEVICE, requires_grad=True)
    given = dict(
        mask_mod=documents()[1], score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i), deterministic=True
    )
    dout = torch.randn_like(q)

    def step(**more):
        out = flashjit.attention(q, k, v, **given, **more)
        return bits(out, *torch.autograd.grad(out, (q, k, v, slopes), dout))

    want, lists = step(), TileLists(q, k, v, **given)
    assert lists.bytes > 0
    for _ in range(3):
        assert same(step(lists=lists), want)
    with torch.no_grad():
        assert same([flashjit.attention(q, k, v, **given, lists=lists)], want)
    with pytest.raises(flashjit.InvalidArgument, match="lists were built for"):
        flashjit.attention(q, k, v, causal=True, lists=lists)


def test_lists_of_a_block_map_and_of_packed_sequences():
    q, k, v = (x.detach() for x in tensors(queries=256, keys=384))
    blocks = BlockMap(torch.rand(2, 4, 2, 3, device=DEVICE) > 0.4, 128)
    cu = [torch.tensor(x, device=DEVICE, dtype=torch.int32) for x in ([0, 100, 256], [0, 150, 384])]
    packed = dict(
        cu_seqlens_q=cu[0],
        cu_seqlens_kv=cu[1],
        max_seqlen_q=156,
        max_seqlen_kv=234,
        mask_mod=documents(50, 384)[1],
    )
    for given, tensors_ in ((dict(block_mask=blocks), (q, k, v)), (packed, (q[:1], k[:1], v[:1]))):
        lists = TileLists(*tensors_, **given)
        assert lists.bytes > 0
        assert same(
            [flashjit.attention(*tensors_, **given, lists=lists)], [flashjit.attention(*tensors_, **given)]
        )
    other = BlockMap(blocks.blocks[:1], 128)
    with pytest.raises(
        flashjit.InvalidArgument, match="block_mask of batch 2 and heads 4, but this call's has 1"
    ):
        flashjit.attention(q, k, v, block_mask=other, lists=TileLists(q, k, v, block_mask=blocks))


def test_lists_need_no_workspace_and_no_wait():
    q, k, v = (x.detach() for x in tensors(queries=4096, keys=4096))
    given = dict(mask_mod=documents(500, 4096)[1])
    lists = TileLists(q, k, v, **given)

    def peak(**more):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashjit.attention(q, k, v, **given, **more)
        return torch.cuda.max_memory_allocated() - before

    assert peak(lists=lists) <= peak() - lists.built[0].bytes // 2
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashjit.attention(q, k, v, **given, lists=TileLists(q, k, v, **given))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_code_takes_lists(mode):
    """CUDA graphs copy their inputs, of which nothing is known: right there, too."""
    q, k, v = tensors()
    dout = torch.randn_like(q)

    def step(q, k, v, document, lists):
        return flashjit.attention(
            q, k, v, mask_mod=lambda b, h, i, j: document[i] == document[j], lists=lists, deterministic=True
        )

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, mode=mode)
    for tokens in (50, 64, 33, 50):
        document, mask = documents(tokens)
        lists = TileLists(q, k, v, mask_mod=mask, deterministic=True)
        results = []
        for function in (step, run):
            out = function(q, k, v, document, lists)
            results.append(bits(out, *torch.autograd.grad(out, (q, k, v), dout)))
        torch.testing.assert_close(results[1], results[0])


def test_graph_capture_with_lists():
    """The graph's own work holds no list making: other lists in the same memory are what a replay sees."""
    q, k, v = (x.detach() for x in tensors())
    document, mask = documents()
    lists = TileLists(q, k, v, mask_mod=mask)
    want = flashjit.attention(q, k, v, mask_mod=mask, lists=lists)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashjit.attention(q, k, v, mask_mod=mask, lists=lists)
    graph.replay()
    assert same([out], [want])
    document.copy_(documents(64)[0])
    fresh = TileLists(q, k, v, mask_mod=mask)
    lists.memory[0].copy_(fresh.memory[0])
    graph.replay()
    assert same([out], [flashjit.attention(q, k, v, mask_mod=mask)]) and not same([out], [want])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_lists_of_another_gpu_are_refused():
    q, k, v = (x.detach() for x in tensors())
    given = dict(captures={"n": 7}, mask_mod="q % n == kv % n")
    elsewhere = TileLists(*(x.to("cuda:1") for x in (q, k, v)), **given)
    with pytest.raises(flashjit.InvalidArgument, match="on cuda:1, but this call is .* on cuda:0"):
        flashjit.attention(q, k, v, **given, lists=elsewhere)


def test_a_deterministic_backward_pass_is_another_kernel():
    """What "deterministic" asks for reaches the backward pass: turns need room."""
    shape = (2, 4, 2, 2000, 333)
    torch.zeros(1, device=DEVICE)
    bytes = [
        flashjit.runtime().workspace_bytes(spec, shape, backward=True)
        for spec in ("bf16:d64", "bf16:d64:det")
    ]
    assert bytes[1] > bytes[0]


def test_tuning_in_the_background(tmp_path, use_runtime):
    """While calls go on: a record is kept, results stay right, and it ends on request."""
    tuning = flashjit.Runtime(cache_dir=tmp_path, tune_in_background=True)
    use_runtime(tuning)
    q, k, v = (x.detach() for x in tensors(queries=512, keys=512))
    call = lambda: flashjit.attention(q, k, v, causal=True)
    first = call()
    end = time.monotonic() + 90
    while not list(tmp_path.glob("v1/tuning/*/*.json")) and time.monotonic() < end:
        torch.testing.assert_close(call(), first, atol=1e-2, rtol=1e-2)
        time.sleep(0.05)
    assert list(tmp_path.glob("v1/tuning/*/*.json"))
    tuning.stop_tuning()
    torch.testing.assert_close(call(), first, atol=1e-2, rtol=1e-2)
    torch.cuda.synchronize()

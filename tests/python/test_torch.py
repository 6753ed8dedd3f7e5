"""attention() on CPU tensors, through the CPU reference: everything but the kernels."""

import contextlib
import gc
import inspect
import math
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
import child  # noqa: E402
import flashjit  # noqa: E402
from flashjit import _kept_plans, _launch, _lists, _plans, _tensors  # noqa: E402
from flashjit.torch import BlockMap, TileLists, scaled_dot_product_attention  # noqa: E402
from operator_arguments import arguments_of_forward  # noqa: E402

F = torch.nn.functional


def tensors(batch=2, heads=4, heads_kv=2, queries=9, keys=13, dim=16, dim_v=8, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = [(batch, heads, queries, dim), (batch, heads_kv, keys, dim), (batch, heads_kv, keys, dim_v)]
    return [torch.randn(size, dtype=dtype).requires_grad_() for size in sizes]


def reference(q, k, v, keep=None, add=None, scale=None, score=lambda s: s, sinks=None):
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = score((scale or q.shape[3] ** -0.5) * q @ k.transpose(2, 3))
    if add is not None:
        s = s + add
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], 3)
    p = torch.nan_to_num(torch.softmax(s, 3))[..., : k.shape[2]]
    return p @ v


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def check(call, want, inputs, atol=1e-5):
    """Outputs and gradients of two functions of the same inputs."""
    out, expected = call(), want()
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=1e-4)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    exact = torch.autograd.grad(expected, inputs, dout.double())
    for a, b in zip(got, exact):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-4)


def test_forward_and_gradients():
    q, k, v = tensors()
    check(lambda: flashjit.attention(q, k, v), lambda: reference(q, k, v), (q, k, v))
    check(
        lambda: flashjit.attention(q, k, v, causal=True, scale=0.5),
        lambda: reference(q, k, v, causal(9, 13), scale=0.5),
        (q, k, v),
    )
    top_left = torch.ones(9, 13, dtype=torch.bool).tril()
    check(
        lambda: flashjit.attention(q, k, v, causal="top_left"),
        lambda: reference(q, k, v, top_left),
        (q, k, v),
    )


def test_strides_are_taken_and_kept():
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    out = flashjit.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()  # in memory as q: [batch, length, heads, dim]
    check(lambda: flashjit.attention(q, k, v), lambda: reference(q, k, v), (qkv,))


def misaligned(x):
    """The same numbers, an element behind where kernels can read them."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x.detach())
    assert moved.data_ptr() % 16 == moved.element_size()
    return moved.requires_grad_(x.requires_grad)


UNREADABLE = {
    "misaligned": misaligned,
    "columns": lambda x: x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_(),
    "rows": lambda x: F.pad(x.detach(), (0, 1))[..., :-1].requires_grad_(),
}


@pytest.mark.parametrize("through", ["eager", "compiled", "operator", "no_grad"])
@pytest.mark.parametrize("what", ["q", "k", "v", "all", "sinks", "dout", "slice of a gradient"])
@pytest.mark.parametrize("how", UNREADABLE)
def test_what_kernels_cannot_read_is_copied(through, what, how):
    unreadable, inputs = UNREADABLE[how], dict(zip("qkv", tensors()))
    inputs["sinks"] = torch.linspace(-1, 2, 4, requires_grad=True)
    for name in {"all": "qkv", "dout": "", "slice of a gradient": ""}.get(what, (what,)):
        inputs[name] = (
            torch.linspace(-1, 2, 8)[::2].requires_grad_() if name == "sinks" else unreadable(inputs[name])
        )
    function = lambda q, k, v, sinks: flashjit.attention(q, k, v, sinks=sinks)
    if through == "compiled":
        function = compiled(function)
    elif through == "operator":
        function = lambda q, k, v, sinks: torch.ops.flashjit.attention_forward(
            *arguments_of_forward(q, k, v, sinks=sinks, options=":sinks")
        )[0]
    want = reference(**inputs)
    if through == "no_grad":
        with torch.no_grad():
            torch.testing.assert_close(function(**inputs).double(), want, atol=1e-5, rtol=1e-4)
        return
    out = function(**inputs)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
    dout = torch.randn(2, 4, 9, 8)
    if what == "slice of a gradient":
        other = torch.randn(2 * 4 * 9 * 8 + 1, requires_grad=True)
        loss = lambda out: (
            torch.cat([other[:1].to(out.dtype), out.flatten()])
            * torch.cat([dout.flatten(), dout[0, 0, 0, :1]])
        ).sum()
        got, exact = (torch.autograd.grad(loss(x), tuple(inputs.values())) for x in (out, want))
    else:
        got = torch.autograd.grad(out, tuple(inputs.values()), unreadable(dout) if what == "dout" else dout)
        exact = torch.autograd.grad(want, tuple(inputs.values()), dout.double())
    for a, b in zip(got, exact):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_copies_are_told_once(caplog):
    _tensors.say_once.cache_clear()
    q, k, v = (x.detach() for x in tensors())
    for _ in range(3):
        flashjit.attention(q, misaligned(k), v)
    assert [record.getMessage() for record in caplog.records if record.name == "flashjit"] == [
        caplog.records[0].getMessage()
    ] and "k is copied in each call" in caplog.text


def test_the_gradient_s_strides_do_not_matter():
    q, k, v = tensors()
    out = flashjit.attention(q, k, v)
    out.sum().backward()  # an expanded gradient
    want = torch.autograd.grad(reference(q, k, v).sum(), q)[0]
    torch.testing.assert_close(q.grad, want, atol=1e-5, rtol=1e-4)
    transposed = torch.randn(2, 9, 4, 8).transpose(1, 2)
    got = torch.autograd.grad(flashjit.attention(q, k, v), q, transposed)[0]
    torch.testing.assert_close(
        got, torch.autograd.grad(reference(q, k, v), q, transposed.double())[0], atol=1e-5, rtol=1e-4
    )


def test_lse():
    q, k, v = tensors()
    out, lse = flashjit.attention(q, k, v, return_lse=True)
    want = torch.logsumexp(0.25 * q @ k.repeat_interleave(2, 1).transpose(2, 3), 3)
    torch.testing.assert_close(lse, want)
    with torch.no_grad():
        assert flashjit.attention(q, k, v, return_lse=True)[1].shape == (2, 4, 9)


def reference_lse(q, k, keep=None, sinks=None):
    scores = 0.25 * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    return torch.logsumexp(scores, 3)


@pytest.mark.parametrize("through", ["eager", "compiled", "operator"])
def test_lse_has_gradients(through):
    q, k, v = tensors()
    sinks = torch.linspace(-1, 2, 4).requires_grad_()
    function = lambda q, k, v, sinks: flashjit.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    if through == "compiled":
        function = compiled(function)
    elif through == "operator":
        function = lambda q, k, v, sinks: torch.ops.flashjit.attention_forward(
            *arguments_of_forward(q, k, v, sinks=sinks, options=":causal:sinks")
        )
    w, g = torch.randn(2, 4, 9), torch.randn(2, 4, 9, 8)
    keep = causal(9, 13)
    both = lambda out, lse: (out * g).sum() + (lse * w).sum()
    for loss in (
        both,
        lambda out, lse: (lse * w).sum(),
        lambda out, lse: lse.sum(),
        lambda out, lse: (out * g).sum(),
    ):
        got = torch.autograd.grad(loss(*function(q, k, v, sinks)), (q, k, v, sinks))
        want = torch.autograd.grad(
            loss(reference(q, k, v, keep, sinks=sinks), reference_lse(q, k, keep, sinks)),
            (q, k, v, sinks),
            allow_unused=True,
        )
        for a, b in zip(got, want):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-5, rtol=1e-4)


def test_the_gradient_of_lse_does_not_reach_rows_that_attend_to_nothing():
    q, k, v = tensors(queries=13, keys=9)
    lse = flashjit.attention(q, k, v, causal=True, return_lse=True)[1]
    got = torch.autograd.grad((lse * lse).sum(), (q, k, v))  # infinite there
    lse = reference_lse(q[:, :, 4:], k, causal(9, 9))
    want = torch.autograd.grad((lse * lse).sum(), (q, k))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert (got[2] == 0).all()


# --- torch.func ---


def transformed(transform, q, k, v, attend):
    """What a transform of torch.func makes of a function of Q, K and V."""
    loss = lambda q, k, v: attend(q, k, v).square().sum()
    batch = lambda x: torch.stack([x, x.flip(2), 2 * x], 1)  # of vmap, as the second dimension
    func = torch.func
    return {
        "grad": lambda: func.grad(loss, (0, 1, 2))(q, k, v),
        "vjp": lambda: func.vjp(attend, q, k, v)[1](torch.ones_like(attend(q, k, v))),
        "jacrev": lambda: (func.jacrev(lambda q: attend(q, k, v).sum((0, 2, 3)))(q),),
        "vmap": lambda: (func.vmap(attend, (1, 1, 1), 2)(batch(q), batch(k), batch(v)),),
        "vmap of q": lambda: (func.vmap(attend, (1, None, None))(batch(q), k, v),),
        "vmap of grad": lambda: func.vmap(func.grad(loss, (0, 1, 2)), (1, None, 1))(batch(q), k, batch(v)),
        "vmap of vmap": lambda: (
            func.vmap(func.vmap(attend, (1, None, None)), (None, 1, None))(batch(q), batch(k), v),
        ),
        "grad of vmap": lambda: func.grad(
            lambda q: func.vmap(attend, (1, None, None))(batch(q), k, v).square().sum()
        )(q),
    }[transform]()


TRANSFORMS = ["grad", "vjp", "jacrev", "vmap", "vmap of q", "vmap of grad", "vmap of vmap", "grad of vmap"]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["plain", "sinks", "sdpa", "captures"])
def test_transforms_of_torch_func(transform, kind):
    q, k, v = (
        x.detach()
        for x in tensors(batch=1 if kind == "captures" else 2, heads=2, heads_kv=2, queries=3, keys=4)
    )
    sinks, bias = torch.tensor([0.5, -1.0]), torch.randn(1, 2, 3, 4)
    attend = {
        "plain": lambda q, k, v: flashjit.attention(q, k, v, causal=True),
        "sinks": lambda q, k, v: flashjit.attention(q, k, v, sinks=sinks),
        "sdpa": scaled_dot_product_attention,
        # With b, which counts each call's own batch entries.
        "captures": lambda q, k, v: flashjit.attention(
            q, k, v, score_mod=lambda s, b, h, q, kv: s + bias[b, h, q, kv]
        ),
    }
    want = {
        "plain": lambda q, k, v: reference(q, k, v, causal(3, 4)).float(),
        "sinks": lambda q, k, v: reference(q, k, v, sinks=sinks).float(),
        "sdpa": lambda q, k, v: reference(q, k, v).float(),
        "captures": lambda q, k, v: reference(q, k, v, add=bias).float(),
    }
    for a, b in zip(
        transformed(transform, q, k, v, attend[kind]), transformed(transform, q, k, v, want[kind])
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_transforms_reach_captures_and_sinks():
    q, k, v = (x.detach() for x in tensors(queries=3, keys=4))
    sinks, slopes = torch.linspace(-1, 2, 4), torch.rand(4)
    distance = (torch.arange(4) - torch.arange(3)[:, None]).double()

    def loss(sinks, slopes):
        return (
            flashjit.attention(
                q, k, v, sinks=sinks, score_mod=lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
            )
            .square()
            .sum()
        )

    def want(sinks, slopes):
        return reference(q, k, v, sinks=sinks, add=slopes.double()[:, None, None] * distance).square().sum()

    many = torch.stack([sinks, 2 * sinks]), torch.stack([slopes, -slopes])
    for transform in (
        lambda f: torch.func.grad(f, (0, 1))(sinks, slopes),
        lambda f: torch.func.vmap(torch.func.grad(f, (0, 1)))(*many),
    ):
        for a, b in zip(transform(loss), transform(want)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_dropout_under_vmap_follows_its_randomness():
    q, k, v = (x.detach() for x in tensors())
    dropped = lambda q: flashjit.attention(q, k, v, dropout_p=0.5)
    two = torch.stack([q, q])
    same, other = torch.func.vmap(dropped, randomness="same")(two)
    assert torch.equal(same, other)
    some, other = torch.func.vmap(dropped, randomness="different")(two)
    assert not torch.equal(some, other)
    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(dropped)(two)


@pytest.mark.slow
def test_forward_mode_breaks_compiled_code():
    q, k, v = (x.detach() for x in tensors(queries=2, keys=3))
    loss = lambda q: flashjit.attention(q, k, v).square().sum()
    torch._dynamo.reset()
    for function in (lambda q: torch.func.jvp(loss, (q,), (q,))[1], lambda q: torch.func.jacfwd(loss)(q)):
        with pytest.raises(Exception, match="no forward-mode derivative"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(q)
        torch.testing.assert_close(torch.compile(function, backend="aot_eager")(q), function(q))
    gradient = torch.compile(torch.func.grad(loss), backend="aot_eager")
    if torch.__version__ < "2.14":  # whose compiler takes a transform to no custom operator
        with pytest.raises(Exception, match="functorch transforms.*setup_context"):
            gradient(q)
    else:
        torch.testing.assert_close(gradient(q), torch.func.grad(loss)(q))


def test_dropout_is_replayed_in_the_backward_pass():
    q, k, v = tensors(dim_v=16)
    torch.manual_seed(5)
    out = flashjit.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert (flashjit.attention(q, k, v, dropout_p=0.5) == out).all()
    assert (flashjit.attention(q, k, v, dropout_p=0.5) != out).any()
    # With V the identity, O is the dropped P; with it the backward pass can be computed by hand.
    eye = torch.eye(16)[None, None].expand(2, 2, -1, -1)[:, :, :13].contiguous()
    torch.manual_seed(5)
    p = flashjit.attention(q, k, eye, dropout_p=0.5).detach()[..., :13]
    dout = torch.randn_like(out)
    dv = torch.autograd.grad(out, v, dout)[0]
    want = (p.transpose(2, 3) @ dout).unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(dv, want, atol=1e-5, rtol=1e-4)


def test_key_padding_and_block_map():
    q, k, v = tensors(queries=32, keys=32)
    lengths = torch.tensor([32, 5], dtype=torch.int32)
    blocks = torch.tensor([[True, False], [True, True]])
    keep = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1) & (
        torch.arange(32) < lengths[:, None, None, None]
    )
    check(
        lambda: flashjit.attention(q, k, v, kv_lengths=lengths, block_mask=BlockMap(blocks, 16)),
        lambda: reference(q, k, v, keep),
        (q, k, v),
    )


def test_flex_attention_s_block_mask():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = tensors(queries=64, keys=64)
    mask = flex.create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    check(
        lambda: flashjit.attention(q, k, v, block_mask=mask),
        lambda: reference(q, k, v, causal(64, 64)),
        (q, k, v),
    )


def flex_blocks(kinds, block, mask_mod=None, lengths=None):
    """A BlockMask whose blocks are 0 (none attend), 1 (mask_mod says) or 2 (all attend)."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def table(blocks):
        order = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)

    kinds = torch.as_tensor(kinds)[(None,) * (4 - torch.as_tensor(kinds).dim())]
    return flex.BlockMask.from_kv_blocks(
        *table(kinds == 1),
        *table(kinds == 2),
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        **({} if lengths is None else {"seq_lengths": lengths}),
    )


def causal_mod(b, h, q, kv):
    return q >= kv


@pytest.mark.parametrize("block", [8, 16, 100, 512, (16, 100), "whole"])
@pytest.mark.parametrize("heads", [None, 4])
def test_flex_attention_s_blocks_of_any_size(block, heads):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = tensors(queries=130, keys=210)
    shift = torch.tensor([0, 50, -20, 3])
    mod = causal_mod if heads is None else lambda b, h, q, kv: q + shift[h] >= kv
    if block == "whole":
        mask = flex_blocks([[1]], 1 << 30, mod, (130, 210))
    else:
        mask = flex.create_block_mask(mod, None, heads, 130, 210, device="cpu", BLOCK_SIZE=block)
    keep = torch.arange(130)[:, None] + (shift[:, None, None] if heads else 0) >= torch.arange(210)
    check(lambda: flashjit.attention(q, k, v, block_mask=mask), lambda: reference(q, k, v, keep), (q, k, v))
    with torch.no_grad():
        assert torch.equal(
            flashjit.attention(q, k, v, block_mask=mask, lists=TileLists(q, k, v, block_mask=mask)),
            flashjit.attention(q, k, v, block_mask=mask),
        )


def keep_of(kinds, block, mod, queries, keys):
    """The pairs that attend by a BlockMask's definition."""
    kinds = torch.as_tensor(kinds)[
        ..., (torch.arange(queries) // block)[:, None], torch.arange(keys) // block
    ]
    return (kinds == 2) | (kinds == 1) & mod(0, 0, torch.arange(queries)[:, None], torch.arange(keys))


@pytest.mark.parametrize("block", [8, 16, 20])
@pytest.mark.parametrize("through", ["eager", "compiled"])
def test_flex_attention_s_mask_holds_in_partial_blocks_alone(block, through):
    torch.manual_seed(2)
    q, k, v = tensors(queries=40, keys=56)
    kinds = torch.randint(0, 3, (2, 4, -(-40 // block), -(-56 // block)))
    mask = flex_blocks(kinds, block, causal_mod, (40, 56))
    run = lambda q, k, v: flashjit.attention(q, k, v, block_mask=mask)
    if through == "compiled":
        run = compiled(run)
    check(
        lambda: run(q, k, v), lambda: reference(q, k, v, keep_of(kinds, block, causal_mod, 40, 56)), (q, k, v)
    )


def test_a_block_mask_and_another_mask_hold_together():
    q, k, v = tensors(queries=32, keys=32)
    near = lambda b, h, q, kv: q - kv < 5
    mask = flex_blocks([[1, 0], [2, 1]], 16, causal_mod)
    keep = keep_of([[1, 0], [2, 1]], 16, causal_mod, 32, 32) & (
        torch.arange(32)[:, None] - torch.arange(32) < 5
    )
    check(
        lambda: flashjit.attention(q, k, v, block_mask=mask, mask_mod=near),
        lambda: reference(q, k, v, keep),
        (q, k, v),
    )
    same = flex_blocks([[1, 0], [1, 1]], 16, causal_mod)
    check(
        lambda: flashjit.attention(q, k, v, block_mask=same, mask_mod=causal_mod),
        lambda: reference(q, k, v, causal(32, 32)),
        (q, k, v),
    )
    with pytest.raises(flashjit.InvalidArgument, match="mask_mod of its own, .* give it as a function"):
        flashjit.attention(q, k, v, block_mask=mask, mask_mod="q - kv < 5")


def test_a_block_mask_of_another_length_is_refused():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = tensors(queries=32, keys=32)
    mask = flex.create_block_mask(causal_mod, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(
        flashjit.InvalidArgument,
        match=r"made for 64 queries and 64 keys, and q has 32 and k 32: .*_adjust\(32, 32\)",
    ):
        flashjit.attention(q, k, v, block_mask=mask)
    assert torch.equal(
        flashjit.attention(q, k, v, block_mask=mask._adjust(32, 32)), flashjit.attention(q, k, v, causal=True)
    )
    short = flex.create_block_mask(causal_mod, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(
        flashjit.InvalidArgument,
        match=r"made for 16 queries and 16 keys, and q has 32 and k 32: make one for these\.$",
    ):
        flashjit.attention(q, k, v, block_mask=short)


def test_a_block_mask_is_traced_once(monkeypatch):
    from flashjit import programs as module

    q, k, v = tensors(queries=32, keys=48)
    mask = flex_blocks(torch.tensor([[2, 1, 0], [2, 2, 1]]), 16, causal_mod, (32, 48))
    run = lambda: flashjit.attention(q, k, v, block_mask=mask)
    first = run()
    monkeypatch.setattr(module, "_program", lambda *_: pytest.fail("traced again"))
    assert torch.equal(run(), first)


@pytest.mark.parametrize(
    "write", [torch.Tensor.copy_, lambda table, new: table.data.copy_(new)], ids=["copy_", "data"]
)
def test_a_block_mask_that_is_rewritten_in_place_is_read_again(write):
    """As a decode loop does with static buffers; of what is written through .data, or by a CUDA graph, autograd counts no version."""
    q, k, v = tensors(queries=32, keys=48)
    kinds = torch.tensor([[2, 0, 0], [1, 2, 0]])
    mask = flex_blocks(kinds, 16, causal_mod, (32, 48))
    for other in ([[2, 0, 0], [1, 2, 0]], [[0, 1, 2], [2, 2, 2]], [[1, 1, 1], [0, 0, 2]]):
        fresh = flex_blocks(other, 16, causal_mod, (32, 48))
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            write(getattr(mask, name), getattr(fresh, name))
        check(
            lambda: flashjit.attention(q, k, v, block_mask=mask),
            lambda: reference(q, k, v, keep_of(other, 16, causal_mod, 32, 48)),
            (q, k, v),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_running_state(dtype):
    q, k, v = (x.detach().to(dtype) for x in tensors(queries=40, keys=56))
    parts = [(k[:, :, i:j], v[:, :, i:j]) for i, j in ((0, 20), (20, 21), (21, 56))]
    state = flashjit.attention(q, *parts[0], return_lse=True, out_dtype=torch.float32)
    state[0][:, :, 5], state[1][:, :, 5] = math.nan, -math.inf  # which then has the other parts' keys
    second = flashjit.attention(q, *parts[1], return_lse=True, out_dtype=torch.float32, state=state)
    out, lse = flashjit.attention(q, *parts[2], return_lse=True, state=second)
    merged = flashjit.merge(
        [state]
        + [flashjit.attention(q, *part, return_lse=True, out_dtype=torch.float32) for part in parts[1:]]
    )
    assert out.dtype == dtype
    torch.testing.assert_close(lse, merged[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        out, merged[0].to(dtype), atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2
    )
    for given, error, says in (
        ((q, k, v, (1, 2)), flashjit.WrongType, "give O and LSE"),
        ((q, k, v, (state[0].half(), state[1])), flashjit.InvalidArgument, r"state\[0\] is float16"),
        ((q.clone().requires_grad_(), k, v, state), flashjit.Unsupported, "merge"),
    ):
        with pytest.raises(error, match=says):
            flashjit.attention(*given[:3], state=given[3])
    with pytest.raises(flashjit.InvalidArgument, match="running_state is set beside sinks"):
        flashjit.attention(q, k, v, state=state, sinks=torch.zeros(q.shape[1]))
    with pytest.raises(flashjit.Unsupported, match="state cannot be had in compiled code"):
        torch.func.vmap(lambda q: flashjit.attention(q, k, v, state=state))(q[None])


@pytest.mark.parametrize("with_grad", [False, True])
def test_the_largest_score_of_each_query(with_grad):
    """As QK-clip wants it, without a gradient of its own, and without sinks."""
    q, k, v = tensors(queries=40, keys=56)
    scores = (
        q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * q.shape[3] ** -0.5 * 3
    ).detach()
    keep = causal(40, 56)
    given = dict(
        score_mod=lambda s, b, h, i, j: s * 3,
        causal=True,
        sinks=torch.full((q.shape[1],), 100.0),
        return_row_max=True,
    )
    with torch.set_grad_enabled(with_grad):
        out, lse, row_max = flashjit.attention(q, k, v, return_lse=True, **given)
        alone, again = flashjit.attention(q, k, v, **given)
    want = scores.masked_fill(~keep, -math.inf).amax(3)
    torch.testing.assert_close(row_max, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(again, row_max) and torch.equal(alone, out) and not row_max.requires_grad
    assert torch.equal(
        out, flashjit.attention(q, k, v, return_lse=True, **{**given, "return_row_max": False})[0]
    )
    if with_grad:
        got = torch.autograd.grad(out.sum(), (q, k, v))
        torch.testing.assert_close(got, torch.autograd.grad(alone.sum(), (q, k, v)))


def test_the_largest_scores_of_packed_sequences():
    q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32)
    out, row_max = flashjit.attention(
        q,
        k,
        v,
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=6,
        max_seqlen_kv=6,
        return_row_max=True,
    )
    assert row_max.shape == q.shape[:3]
    torch.testing.assert_close(
        row_max[0, :, 4:], (q[0, :, 4:] @ k[0, :, 4:].transpose(1, 2) / 4).amax(2), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(flashjit.Unsupported, match="return_row_max cannot be had in compiled code"):
        torch.func.vmap(lambda q: flashjit.attention(q, k, v, return_row_max=True)[0])(q[None])


def test_packed_sequences():
    q, k, v = tensors(batch=1)
    cu_q, cu_kv = torch.tensor([0, 2, 9], dtype=torch.int32), torch.tensor([0, 8, 13], dtype=torch.int32)
    call = lambda **more: flashjit.attention(
        q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=7, max_seqlen_kv=8, **more
    )
    want = lambda: torch.cat(
        [
            reference(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal(b - a, d - c))
            for a, b, c, d in ((0, 2, 0, 8), (2, 9, 8, 13))
        ],
        2,
    )
    check(call, want, (q, k, v))
    first = flashjit.attention(q[:, :, :2], k[:, :, :8], v[:, :, :8], causal=True, return_lse=True)[1]
    lse = call(return_lse=True)[1]
    assert lse.shape == (1, 4, 9)
    torch.testing.assert_close(lse[:, :, :2], first)


@pytest.mark.parametrize("through", ["eager", "compiled"])
def test_rows_that_belong_to_no_sequence_are_zeros(through):
    """Packed tensors are longer than the last cumulative length, as trainers pad them, with anything in them."""
    qkv = tensors(batch=1)
    cu_q, cu_kv = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 8, 11], dtype=torch.int32)
    with torch.no_grad():
        for x, rows in zip(qkv, (6, 11, 11)):
            x[:, :, rows:] = math.nan
    lengths = dict(causal=True, max_seqlen_q=7, max_seqlen_kv=8, return_lse=True)
    function = lambda q, k, v, cu_q, cu_kv: flashjit.attention(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, **lengths
    )
    run = function if through == "eager" else compiled(function)
    out, lse = run(*qkv, cu_q, cu_kv)
    dout = torch.randn_like(out)
    dout[:, :, 6:] = math.nan
    got = torch.autograd.grad(out, qkv, dout)
    short = [x[:, :, :rows].detach().clone().requires_grad_() for x, rows in zip(qkv, (6, 11, 11))]
    want, want_lse = function(*short, cu_q, cu_kv)
    assert torch.equal(lse[:, :, :6], want_lse) and (lse[:, :, 6:] == -math.inf).all()
    for a, b, rows in zip(
        (out, *got), (want, *torch.autograd.grad(want, short, dout[:, :, :6])), (6, 6, 11, 11)
    ):
        assert torch.equal(a[:, :, :rows], b) and (a[:, :, rows:] == 0).all()


def test_packed_tensors_without_any_sequence_are_zeros(on_fake_gpu):
    q, k, v = tensors(batch=1, dim=64, dim_v=64, dtype=torch.bfloat16)
    none = torch.zeros(1, dtype=torch.int32)
    out = flashjit.attention(q, k, v, cu_seqlens_q=none, cu_seqlens_kv=none, max_seqlen_q=0, max_seqlen_kv=0)
    out.sum().backward()
    assert all((x == 0).all() for x in (out, q.grad, k.grad, v.grad))


def test_sinks():
    q, k, v = tensors()
    sinks = torch.linspace(-1, 2, 4).requires_grad_()
    check(
        lambda: flashjit.attention(q, k, v, causal=True, sinks=sinks),
        lambda: reference(q, k, v, causal(9, 13), sinks=sinks),
        (q, k, v, sinks),
    )
    half = sinks.detach().bfloat16().requires_grad_()
    flashjit.attention(q, k, v, sinks=half).sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_captures_with_gradients():
    q, k, v = tensors()
    slopes, bias = (
        torch.rand(4, requires_grad=True),
        torch.randn(2, 1, 9, 13).expand(2, 4, 9, 13).requires_grad_(),
    )
    table, cap = torch.randint(0, 2, (13,), dtype=torch.int32), torch.tensor(5.0)
    distance = (torch.arange(9)[:, None] - torch.arange(13)).double()
    score = lambda s, b, h, q, kv: cap * torch.tanh((s + slopes[h] * (q - kv) + bias[b, h, q, kv]) / cap)
    mask = lambda b, h, q, kv: table[q] == table[kv]
    want = lambda: reference(
        q,
        k,
        v,
        table[:9, None] == table,
        score=lambda s: 5 * torch.tanh((s + slopes.double()[:, None, None] * distance + bias) / 5),
    )
    check(lambda: flashjit.attention(q, k, v, score_mod=score, mask_mod=mask), want, (q, k, v, slopes, bias))
    with torch.no_grad():
        torch.testing.assert_close(
            flashjit.attention(q, k, v, score_mod=score, mask_mod=mask).double(), want()
        )
    cap.fill_(2.0)
    with torch.no_grad():  # the number is read at every call
        first = flashjit.attention(q, k, v, score_mod=score)
    assert (
        first
        != flashjit.attention(
            q,
            k,
            v,
            score_mod=score.__class__(
                score.__code__,
                {**globals(), "torch": torch},
                "again",
                None,
                tuple(
                    map(
                        type(score.__closure__[0]),
                        [
                            x if x is not cap else torch.tensor(5.0)
                            for x in (c.cell_contents for c in score.__closure__)
                        ],
                    )
                ),
            ),
        )
    ).any()


def test_texts_with_captures():
    q, k, v = tensors()
    slopes = torch.rand(4, requires_grad=True)
    distance = (torch.arange(13) - torch.arange(9)[:, None]).double()
    check(
        lambda: flashjit.attention(
            q,
            k,
            v,
            score_mod="score + slopes[h] * to_float(kv - q)",
            mask_mod="q - kv < window",
            captures={"slopes": slopes, "window": 3},
        ),
        lambda: reference(q, k, v, -distance < 3, slopes.double()[:, None, None] * distance),
        (q, k, v, slopes),
    )


# --- tile lists made once ---


def documents(keys=13, tokens=4):
    document = torch.arange(keys, dtype=torch.int32) // tokens
    return document, lambda b, h, q, kv: document[q] == document[kv]


def test_lists_serve_many_calls():
    q, k, v = tensors()
    document, mask = documents()
    slopes = torch.rand(4, requires_grad=True)
    given = dict(score_mod=lambda s, b, h, q, kv: s + slopes[h] * (kv - q), mask_mod=mask, causal=True)
    lists = TileLists(q, k, v, **given)
    distance = (torch.arange(13) - torch.arange(9)[:, None]).double()
    want = lambda: reference(
        q, k, v, causal(9, 13) & (document[:9, None] == document), slopes.double()[:, None, None] * distance
    )
    for _ in range(2):
        check(lambda: flashjit.attention(q, k, v, lists=lists, **given), want, (q, k, v, slopes))
    with torch.no_grad():  # also where no gradients are recorded
        torch.testing.assert_close(
            flashjit.attention(q, k, v, lists=lists, **given).double(), want(), atol=1e-5, rtol=1e-4
        )
    k2 = k.transpose(1, 2).contiguous().transpose(1, 2)  # strides do not matter
    assert torch.equal(
        flashjit.attention(q, k2, v, lists=lists, scale=0.5, **given),
        flashjit.attention(q, k, v, scale=0.5, **given),
    )


def test_lists_of_a_block_map_and_of_packed_sequences():
    q, k, v = tensors(queries=32, keys=32)
    given = dict(block_mask=BlockMap(torch.tensor([[True, False], [True, True]]), 16))
    keep = given["block_mask"].blocks[0, 0].bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
    check(
        lambda: flashjit.attention(q, k, v, lists=TileLists(q, k, v, **given), **given),
        lambda: reference(q, k, v, keep),
        (q, k, v),
    )
    q, k, v = tensors(batch=1)
    cu = dict(
        cu_seqlens_q=torch.tensor([0, 2, 9], dtype=torch.int32),
        max_seqlen_q=7,
        cu_seqlens_kv=torch.tensor([0, 8, 13], dtype=torch.int32),
        max_seqlen_kv=8,
        causal=True,
    )
    assert torch.equal(
        flashjit.attention(q, k, v, lists=TileLists(q, k, v, **cu), **cu), flashjit.attention(q, k, v, **cu)
    )


def test_lists_that_do_not_belong_are_refused():
    q, k, v = tensors()
    mask = documents()[1]
    with pytest.raises(flashjit.WrongType, match="backward is a Tensor: give True or False"):
        TileLists(q, k, v, mask_mod=mask, backward=torch.ones(2))
    lists = TileLists(q, k, v, mask_mod=mask)
    call = lambda q=q, k=k, v=v, lists=lists, **other: flashjit.attention(
        q, k, v, lists=lists, **{"mask_mod": mask, **other}
    )
    slopes, other = torch.ones(4), torch.zeros(1, 13, dtype=torch.int32)
    scores = lambda s, b, h, q_idx, kv_idx: s * slopes[h]
    both = TileLists(q, k, v, mask_mod=mask, score_mod=scores)
    blocks = flashjit.BlockMap(torch.ones(1, 1, dtype=torch.bool))
    bfloat16 = dict(zip("qkv", (x.bfloat16() for x in (q, k, v))))
    for given, difference in (
        (dict(mask_mod=None), "with mask_mod, which this call lacks"),
        (
            dict(mask_mod=lambda b, h, q_idx, kv_idx: other[b, q_idx] == other[b, kv_idx]),
            "with another mask_mod",
        ),
        (dict(score_mod=scores), "without score_mod, which this call has"),
        (dict(lists=both, score_mod=lambda s, b, h, q_idx, kv_idx: s + slopes[h]), "with another score_mod"),
        (dict(lists=both), "with score_mod, which this call lacks"),
        (
            dict(lists=both, softcap=2.0),
            "with score_mod, which this call lacks; without softcap, which this call has",
        ),
        (
            dict(mask_mod=None, window=(3, 0)),
            "with mask_mod, which this call lacks; without window, which this call has",
        ),
        (dict(causal=True), "without causal=True, which this call has"),
        (dict(dropout_p=0.1), "without dropout_p, which this call has"),
        (dict(sinks=torch.zeros(4)), "without sinks, which this call has"),
        (dict(deterministic=True), "without deterministic, which this call has"),
        (dict(block_mask=blocks), r"without a block_mask of blocks \(128, 128\), which this call has"),
        (dict(k=k[:, :, :12], v=v[:, :, :12]), "for seqlen_kv 13, and this call has seqlen_kv 12"),
        (dict(q=q[..., :8], k=k[..., :8]), "for head_dim 16x8, and this call has head_dim 8"),
        (bfloat16, "for float32, and this call has bfloat16"),
    ):
        wanted = rf"lists were built for another call: {difference}\. Give this call's arguments to .*TileLists\(\) too"
        with pytest.raises(flashjit.InvalidArgument, match=wanted):
            call(**given)
    with pytest.raises(
        flashjit.WrongType, match="a DeviceTileLists: .* flashjit.torch.TileLists; what flashjit.build_lists"
    ):
        call(lists=flashjit.DeviceTileLists(None, None, 0))
    elsewhere = TileLists(q, k, v, mask_mod=mask)
    elsewhere.built[0].device = torch.device("cuda", 1)
    with pytest.raises(flashjit.InvalidArgument, match="tensors on cuda:1, and this call has tensors on cpu"):
        call(lists=elsewhere)
    with pytest.raises(flashjit.WrongType, match="k is a list: give a torch.Tensor"):
        TileLists(q, [1.0], v)
    with pytest.raises(flashjit.InvalidArgument, match="batches must be equal"):
        TileLists(q, k[:1], v)


def test_lists_of_the_forward_pass_alone():
    q, k, v = tensors()
    mask = documents()[1]
    with torch.no_grad():
        lists = TileLists(q, k, v, mask_mod=mask)
        assert torch.equal(
            flashjit.attention(q, k, v, mask_mod=mask, lists=lists),
            flashjit.attention(q, k, v, mask_mod=mask),
        )
        both = TileLists(q, k, v, mask_mod=mask, backward=True)
    want = torch.autograd.grad(flashjit.attention(q, k, v, mask_mod=mask).square().sum(), (q, k, v))
    for some in (lists, both):
        got = torch.autograd.grad(
            flashjit.attention(q, k, v, mask_mod=mask, lists=some).square().sum(), (q, k, v)
        )
        assert all(map(torch.equal, got, want))


def test_lists_in_checkpoints():
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors()
    mask = documents()[1]
    lists = TileLists(q, k, v, mask_mod=mask)
    call = lambda q, k, v: flashjit.attention(q, k, v, mask_mod=mask, lists=lists)
    want = torch.autograd.grad(call(q, k, v).square().sum(), q)[0]
    for reentrant in (False, True):
        q.grad = None
        checkpoint(call, q, k, v, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(q.grad, want)


def compiled_steps():
    """A function of documents and lists, and how often it was compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, document, lists):
        return flashjit.attention(
            q, k, v, mask_mod=lambda b, h, q, kv: document[q] == document[kv], lists=lists
        )

    return torch.compile(step, backend=counter, fullgraph=True), step, counter


def test_compiled_code_takes_other_lists_without_compiling_again():
    q, k, v = tensors()
    run, step, counter = compiled_steps()
    for tokens in (4, 3, 5):
        document = documents(tokens=tokens)[0]
        lists = TileLists(q, k, v, mask_mod=lambda b, h, q, kv: document[q] == document[kv])
        check(
            lambda: run(q, k, v, document, lists),
            lambda: reference(q, k, v, document[:9, None] == document),
            (q, k, v),
        )
    assert counter.frame_count <= 2


def test_compiled_code_does_not_depend_on_what_re_keeps():
    """Its cache of patterns is what other code left there."""
    q, k, v = tensors()
    run, step, _ = compiled_steps()
    for others in (300, 0):
        re.purge()
        for i in range(others):
            re.compile(f"other{i}")
        document = documents(tokens=4)[0]
        lists = TileLists(q, k, v, mask_mod=lambda b, h, q, kv: document[q] == document[kv])
        check(
            lambda: run(q, k, v, document, lists),
            lambda: reference(q, k, v, document[:9, None] == document),
            (q, k, v),
        )


class ImportsMore(types.ModuleType):
    """A module of which every question imports another, as some do: then no code can go through all modules."""

    def __getattribute__(self, name):
        sys.modules[f"flashjit_test_{len(sys.modules)}"] = sys
        return super().__getattribute__(name)


def test_compiled_code_does_not_ask_which_modules_there_are():
    q, k, v = tensors()
    run, _, _ = compiled_steps()
    document = documents(tokens=4)[0]
    lists = TileLists(q, k, v, mask_mod=lambda b, h, q, kv: document[q] == document[kv])
    sys.modules["flashjit_test_imports_more"] = ImportsMore("imports_more")
    try:
        check(
            lambda: run(q, k, v, document, lists),
            lambda: reference(q, k, v, document[:9, None] == document),
            (q, k, v),
        )
    finally:
        for name in [name for name in sys.modules if name.startswith("flashjit_test_")]:
            del sys.modules[name]


def test_compiled_code_refuses_lists_that_do_not_belong():
    q, k, v = tensors()
    run, _, _ = compiled_steps()
    document = documents()[0]
    with pytest.raises(
        flashjit.InvalidArgument, match="with causal=True, which this call lacks; without mask_mod"
    ):
        run(q, k, v, document, TileLists(q, k, v, causal=True))
    with pytest.raises(Exception, match="lists is a int: give a flashjit.torch.TileLists"):
        run(q, k, v, document, 3)
    with pytest.raises(Exception, match="TileLists cannot be made in compiled code"):
        compiled(lambda q, k, v: flashjit.attention(q, k, v, lists=TileLists(q, k, v)))(q, k, v)


def test_the_operators_are_sound_with_lists():
    q, k, v = tensors()
    lists = TileLists(q, k, v, causal=True)
    given = dict(zip(("lists_forward", "lists_backward"), lists.memory))
    arguments = arguments_of_forward(q, k, v, **given, options=":causal")
    torch.library.opcheck(torch.ops.flashjit.attention_forward.default, arguments)
    with pytest.raises(flashjit.InvalidArgument, match="lists were built for"):
        torch.ops.flashjit.attention_forward(*arguments_of_forward(q, k, v, **given))
    copied = {
        name: memory.clone() for name, memory in given.items()
    }  # of which nothing is known: made in the call
    out = torch.ops.flashjit.attention_forward(*arguments_of_forward(q, k, v, **copied, options=":causal"))[0]
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(torch.ops.flashjit.attention_forward(*arguments)[0].square().sum(), (q, k, v)),
    )


def test_compiled_code_shows_the_library_s_message():
    q, k, v = tensors()
    for function in (compiled, lambda f: torch.compile(f, backend="aot_eager")):
        with pytest.raises(Exception, match="dropout_p is 2.0: it must be at least 0 and less than 1"):
            function(lambda q, k, v: flashjit.attention(q, k, v, dropout_p=2.0))(q, k, v)


def test_what_is_known_of_lists_ends_with_their_memory():
    q, k, v = tensors()
    lists = TileLists(q, k, v)
    memory = lists.memory[0].view(-1)  # as autograd may keep it
    address = memory.data_ptr()
    built = lists.built[0]
    del lists
    gc.collect()
    assert _lists.built_at(memory) is built
    del memory
    another = TileLists(q, k, v)
    assert all(known.storage.expired() is False for known in _lists._known.values())
    assert _lists.built_at(another.memory[0]) is another.built[0]
    assert address not in _lists._known or _lists._known[address].built is not built


@pytest.fixture
def on_fake_gpu(fake_gpu, monkeypatch):
    """Tensors on the CPU are taken for tensors on a GPU, whose kernels do nothing."""

    class OnGpu(_plans.Plan):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.index = 0

    def aligned(size, *more, real=torch.empty, **named):
        if named.get("dtype") is not torch.uint8:
            return real(size, *more, **named)
        raw = real(size + 256, *more, **named)
        return raw[-raw.data_ptr() % 256 :][:size]

    monkeypatch.setattr(_kept_plans, "Plan", OnGpu)
    monkeypatch.setattr(_kept_plans, "_plans", {})
    monkeypatch.setattr(_kept_plans, "_recent", {})
    for module in (_plans, _launch):
        monkeypatch.setattr(module, "runtime", lambda: fake_gpu.runtime)
        monkeypatch.setattr(module, "bind_context", lambda device: None)
    monkeypatch.setattr(torch, "empty", aligned)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *index: 0, raising=False)
    return fake_gpu


def on_gpu_with_documents():
    torch.manual_seed(0)
    q, k, v = (torch.zeros(1, 2, 512, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    slopes = torch.zeros(2, requires_grad=True)
    return (
        q,
        k,
        v,
        dict(mask_mod=documents(512, 100)[1], score_mod=lambda s, b, h, q, kv: s + slopes[h] * (kv - q)),
    )


def test_lists_spare_launches_and_workspace(on_fake_gpu):
    q, k, v, given = on_gpu_with_documents()
    launches = on_fake_gpu.launches
    attention = lambda **more: flashjit.attention(q, k, v, **given, **more)
    step = lambda **more: attention(**more).sum().backward()
    forward, both = (
        launches(lambda: TileLists(q, k, v, **given, backward=backward)) for backward in (False, True)
    )
    assert both > forward > 0
    lists = TileLists(q, k, v, **given)
    (plan,) = _kept_plans._plans.values()
    assert (
        lists.bytes
        == sum(
            on_fake_gpu.runtime.list_bytes(plan.spec_text, plan.shape, backward=backward)
            for backward in (False, True)
        )
        > 0
    )
    counted = (
        1  # what makes the lists resets the count of the work that is done; given lists, a kernel of its own
    )
    assert launches(lambda: attention(lists=lists)) == launches(attention) - forward + counted
    with torch.no_grad():
        assert launches(lambda: attention(lists=lists)) == launches(attention) - forward + counted
    assert launches(lambda: step(lists=lists)) == launches(step) - both + counted
    run = compiled(lambda q, k, v, lists: flashjit.attention(q, k, v, **given, lists=lists))
    assert launches(lambda: run(q, k, v, lists).sum().backward()) == launches(step) - both + counted
    # The library refuses a workspace that is smaller than it needs, so that the calls above gave their lists.
    plan.workspace_forward -= lists.built[0].bytes
    with pytest.raises(
        flashjit.InvalidArgument, match=r"workspace has .* are needed: ask Runtime.workspace_bytes\(\)"
    ):
        attention()
    plan.workspace_forward += lists.built[0].bytes  # the compiled front keeps the plan


def test_lists_of_the_forward_pass_alone_leave_the_backward_pass_its_own(on_fake_gpu):
    q, k, v, given = on_gpu_with_documents()
    forward = TileLists(q, k, v, **given, backward=False)
    launches = lambda call, **more: on_fake_gpu.launches(
        lambda: call(q, k, v, **given, **more).sum().backward()
    )
    alone = on_fake_gpu.launches(lambda: TileLists(q, k, v, **given, backward=False))
    spared = launches(flashjit.attention) - launches(flashjit.attention, lists=forward)
    assert spared == alone - 1 > 0  # one resets the count of work, as above
    assert launches(compiled(flashjit.attention), lists=forward) == launches(
        flashjit.attention, lists=forward
    )


def test_lists_outlive_their_object_until_the_backward_pass(on_fake_gpu):
    q, k, v, given = on_gpu_with_documents()
    kept = TileLists(q, k, v, **given)
    want = on_fake_gpu.launches(flashjit.attention(q, k, v, **given, lists=kept).sum().backward)
    assert want < on_fake_gpu.launches(flashjit.attention(q, k, v, **given).sum().backward)
    for function in (flashjit.attention, compiled(flashjit.attention)):
        lists = TileLists(q, k, v, **given)
        out = function(q, k, v, **given, lists=lists)
        del lists
        gc.collect()
        TileLists(q, k, v, **given)  # forgets those whose memory is gone
        assert on_fake_gpu.launches(out.sum().backward) == want


def test_lists_of_other_tiles_are_refused(on_fake_gpu):
    q, k, v, given = on_gpu_with_documents()
    lists = TileLists(q, k, v, **given)
    plan = next(iter(_kept_plans._plans.values()))
    on_fake_gpu.runtime.prepare(plan.spec_text, plan.shape, config="simt:br32:bc32:w4:s1")
    with pytest.raises(flashjit.InvalidArgument, match="lists were built for .* but this call is .*simt"):
        flashjit.attention(q, k, v, **given, lists=lists)


@pytest.mark.parametrize("empty", [dict(batch=0), dict(heads=0, heads_kv=0), dict(queries=0), dict(keys=0)])
def test_empty_tensors_are_taken_on_a_gpu(on_fake_gpu, empty):
    q, k, v = tensors(**{"dim": 64, "dim_v": 64, "dtype": torch.bfloat16, **empty})
    out = flashjit.attention(q, k, v, causal=True)
    out.sum().backward()
    assert out.shape == q.shape and k.grad.shape == k.shape


# --- PyTorch's surroundings ---


def test_autocast_uses_the_lower_precision():
    from flashjit._problem import autocast

    q, k, v = tensors()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
        assert flashjit.attention(q, k, v).dtype == torch.float32  # CPU tensors stay as they are
    assert all(a is b for a, b in zip(autocast(q, k, v), (q, k, v)))


@pytest.mark.parametrize("call", [flashjit.attention, scaled_dot_product_attention])
def test_autocast_on_the_cpu(call):
    q, k, v = tensors(heads_kv=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(q, k, v)
        assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert compiled(lambda q, k, v: call(q, k, v))(q, k, v).dtype == torch.bfloat16
        lists = TileLists(q, k, v, causal=True)
        flashjit.attention(q, k, v, causal=True, lists=lists)
    torch.testing.assert_close(out, call(*(x.bfloat16() for x in (q, k, v))))
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("loss", [torch.Tensor.sum, lambda out: out.square().sum()])
def test_create_graph_leaves_gradients_as_they_are(loss):
    q, k, v = tensors()
    slopes = torch.rand(4, requires_grad=True)
    scores = dict(score_mod="score + s[h]", captures={"s": slopes})
    for inputs, given in (((q, k, v), {}), ((q, slopes), scores)):
        want = torch.autograd.grad(loss(flashjit.attention(q, k, v, **given)), inputs)
        grads = torch.autograd.grad(loss(flashjit.attention(q, k, v, **given)), inputs, create_graph=True)
        for grad, expected in zip(grads, want):
            assert torch.equal(grad, expected)
            second = torch.autograd.grad(grad.square().sum(), inputs, retain_graph=True)
            assert all(x.isfinite().all() for x in second) and any(x.any() for x in second)


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors()
    call = lambda q, k, v: flashjit.attention(q, k, v, causal=True, dropout_p=0.3)
    torch.manual_seed(3)
    want = torch.autograd.grad(call(q, k, v).square().sum(), q)[0]
    torch.manual_seed(3)
    got = torch.autograd.grad(checkpoint(call, q, k, v, use_reentrant=False).square().sum(), q)[0]
    torch.testing.assert_close(got, want)


def test_many_threads():
    q, k, v = tensors()
    want = flashjit.attention(q, k, v, causal=True)
    wrong = []

    def work():
        for _ in range(20):
            if not torch.equal(flashjit.attention(q, k, v, causal=True), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert not wrong


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.3}, {"return_lse": True}])
def test_compile(options):
    q, k, v = tensors()
    first = lambda out: out[0] if isinstance(out, tuple) else out
    function = lambda q, k, v: first(flashjit.attention(q, k, v, **options)) * 2
    check(
        lambda: compiled(function)(q, k, v),
        lambda: (
            reference(q, k, v, causal(9, 13) if options.get("causal") else None, scale=options.get("scale"))
            * 2
        ),
        (q, k, v),
    )


def test_compile_with_all_tensors():
    q, k, v = tensors(batch=1)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 8, 13], dtype=torch.int32)
    sinks = torch.randn(4, requires_grad=True)
    function = lambda q, k, v, sinks: flashjit.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu[0],
        cu_seqlens_kv=cu[1],
        max_seqlen_q=5,
        max_seqlen_kv=8,
        sinks=sinks,
        deterministic=True,
    )
    want = [
        torch.autograd.grad(function(q, k, v, sinks).square().sum(), x, retain_graph=True)[0]
        for x in (q, k, v, sinks)
    ]
    got = torch.autograd.grad(compiled(function)(q, k, v, sinks).square().sum(), (q, k, v, sinks))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_compile_with_programs():
    q, k, v = tensors()
    slopes, cap = torch.rand(4, requires_grad=True), torch.tensor(5.0)

    def function(q, k, v, slopes):
        def score(s, b, h, q, kv):
            return cap * torch.tanh((s + slopes[h] * (kv - q)) / cap)

        return flashjit.attention(q, k, v, score_mod=score, mask_mod=lambda b, h, q, kv: q - kv < 3)

    distance = (torch.arange(13) - torch.arange(9)[:, None]).double()
    check(
        lambda: compiled(function)(q, k, v, slopes),
        lambda: reference(
            q,
            k,
            v,
            -distance < 3,
            score=lambda s: 5 * torch.tanh((s + slopes.double()[:, None, None] * distance) / 5),
        ),
        (q, k, v, slopes),
    )


def test_compile_with_numbers_as_captures():
    q, k, v = tensors()
    distance = torch.arange(13) - torch.arange(9)[:, None]
    check(
        lambda: compiled(
            lambda q, k, v, window: flashjit.attention(
                q, k, v, mask_mod="kv - q < window", captures={"window": window}
            )
        )(q, k, v, 4),
        lambda: reference(q, k, v, distance < 4),
        (q, k, v),
    )


@pytest.mark.slow
def test_compile_may_be_the_first_to_trace_a_program():
    text = """import torch, flashjit.torch
q = torch.randn(1, 1, 4, 8)
run = torch.compile(lambda q: flashjit.attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2), backend="aot_eager",
                    fullgraph=True)
torch.testing.assert_close(run(q), torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=2 * 8 ** -0.5))"""
    subprocess.run([sys.executable, "-c", text], check=True, env=child.environment())


@pytest.mark.slow
def test_an_older_pytorch_is_refused_with_what_is_needed():
    """By what declares it, too; a build of one's own, such as NVIDIA's 2.10.0a0, is not older."""
    oldest = ".".join(map(str, _plans._OLDEST))
    refused = ["flashjit", "flashjit.flash_attn", "flashjit.flex_attention"]
    imports = [*((module, "2.8.0+cu128") for module in refused), ("flashjit.torch", oldest + ".0a0+git123")]
    # A process for each import, after one import of PyTorch, which takes seconds.
    code = f"""
import importlib, os, torch
for module, version in {imports}:
    child = os.fork()
    if child == 0:
        torch.__version__ = version
        try:
            importlib.import_module(module)
            print(module, "imported", flush=True)
        except ImportError as error:
            print(module, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child.environment()
    )
    said = done.stdout.splitlines()
    for module, line in zip(refused, said):
        assert line.startswith(f"{module} flashjit needs PyTorch {oldest} or newer, and this is 2.8.0")
    assert said[len(refused) :] == ["flashjit.torch imported"], done.stderr
    project = pathlib.Path(__file__).parents[2] / "tools" / "python" / "pyproject.toml"
    assert f'torch = ["torch>={oldest}"]' in project.read_text()


def test_dropout_in_compiled_code_without_gradients():
    """With gradients enabled and tensors that require none: the graph has no backward pass."""
    q, k, v = (x.detach() for x in tensors())
    torch._dynamo.reset()
    function = torch.compile(lambda q, k, v: flashjit.attention(q, k, v, dropout_p=0.5), backend="aot_eager")
    assert not torch.equal(function(q, k, v), function(q, k, v))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_in_compiled_code(backend):
    q, k, v = tensors()
    torch._dynamo.reset()
    function = lambda q, k, v: (
        flashjit.attention(q, k, v, dropout_p=0.5),
        flashjit.attention(q, k, v, dropout_p=0.5),
    )
    run = torch.compile(function, backend=backend, fullgraph=True)
    a, b = run(q, k, v)
    assert (a != b).any() and (run(q, k, v)[0] != a).any()
    torch.autograd.grad(a.sum(), q)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_where_compiled_code_computes_a_region_again(backend, budget, checkpointed):
    from torch.utils.checkpoint import checkpoint

    q, k = torch.randn(1, 2, 16, 16, requires_grad=True), torch.randn(1, 2, 16, 16, requires_grad=True)
    w, v = (
        torch.randn(16, 16, requires_grad=True),
        torch.eye(16).expand(1, 2, -1, -1).contiguous().requires_grad_(),
    )

    def region(q, k, v, w):
        p = flashjit.attention(torch.sin(q @ w), k, v, dropout_p=0.5)
        return torch.cos(p @ w).relu(), p

    def function(*inputs):
        return checkpoint(region, *inputs, use_reentrant=False) if checkpointed else region(*inputs)

    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        run = torch.compile(function, backend=backend, fullgraph=True)
        masks = []
        for _ in range(2):
            p = run(q, k, v, w)[1]  # V is the identity: the dropped P
            dout = torch.randn_like(p)
            torch.testing.assert_close(torch.autograd.grad(p, v, dout)[0], p.detach().transpose(2, 3) @ dout)
            masks.append(p != 0)
        assert not torch.equal(*masks)
        torch.manual_seed(7)
        first = run(q, k, v, w)[1]
        torch.manual_seed(7)
        assert torch.equal(run(q, k, v, w)[1], first)


def test_dropout_s_seed_may_be_a_tensor():
    """As compiled code and CUDA graphs have it, in place of two numbers."""
    q, k, v = (x.detach() for x in tensors())
    plan = _kept_plans.plan_of(q, k, v, _plans.NOTHING, (), _plans.Problem(":dropout", None, 0.5, 0, 0, ()))
    results = [
        plan.forward(q, k, v, _plans.NOTHING, (), rng, False)[0]
        for rng in ((7, 2**40 + 3), torch.tensor([7, 2**40 + 3]), torch.tensor([7, 3]))
    ]
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_dynamic_shapes():
    run = compiled(lambda q, k, v: flashjit.attention(q, k, v, causal=True), dynamic=True)
    for queries in (9, 5, 11):
        q, k, v = tensors(queries=queries)
        torch.testing.assert_close(
            run(q, k, v).double(), reference(q, k, v, causal(queries, 13)), atol=1e-5, rtol=1e-4
        )


def test_operators_are_sound():
    q, k, v = tensors()
    arguments = arguments_of_forward(q, k, v, options=":causal")
    torch.library.opcheck(torch.ops.flashjit.attention_forward.default, arguments)


def test_fake_kernels_agree_with_the_real_ones():
    from torch._subclasses import FakeTensorMode

    qkv = torch.randn(2, 9, 3, 4, 16)
    for q, k, v in ([x.detach() for x in tensors()], [qkv[:, :, i].transpose(1, 2) for i in range(3)]):
        out, lse = flashjit.attention(q, k, v, return_lse=True)
        with FakeTensorMode() as mode:
            fake = flashjit.attention(*(mode.from_tensor(t) for t in (q, k, v)), return_lse=True)
        for a, b in zip((out, lse), fake):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_operators_have_the_second_derivative_of_the_call():
    q, k, v = tensors()

    def second(out):
        grads = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in grads), (q, k, v))

    by_operators = second(torch.ops.flashjit.attention_forward(*arguments_of_forward(q, k, v))[0])
    torch.testing.assert_close(by_operators, second(flashjit.attention(q, k, v)))


@pytest.mark.slow
def test_importing_brings_nothing_in_but_the_package():
    """No module that takes time beyond PyTorch's own, and no library. tools/bench/python_host.py times it."""
    code = (
        "import sys, torch; before = set(sys.modules); import flashjit, flashjit.torch; "
        "print(*{x.split('.')[0] for x in set(sys.modules) - before} - sys.stdlib_module_names, "
        "'libflashjit.so' in open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child.environment()
    )
    assert done.stdout.split() == ["flashjit", "False"]


@pytest.mark.slow
def test_errors_of_blocks_name_block_mask():
    q = torch.zeros(1, 2, 64, 16)
    blocks = flashjit.BlockMap(torch.ones(2, 2, dtype=torch.bool), 64)
    with pytest.raises(
        flashjit.InvalidArgument, match=r"block_mask has size \[1, 1, 2, 2\], but blocks of 64 x 64"
    ):
        flashjit.attention(q, q, q, block_mask=blocks)


@pytest.mark.slow
def test_modules_are_there_without_an_import_of_their_own():
    code = (
        "import flashjit\n"
        "for name in ('distributed.distributed_attention', 'flash_attn.flash_attn_func', 'torch.prepare', 'fastvideo.block_sparse_attn'):\n"
        "    module, _, function = name.partition('.')\n"
        "    assert callable(getattr(getattr(flashjit, module), function)), name\n"
        "assert not hasattr(flashjit, 'no_such')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=child.environment())


def test_no_operator_is_looked_for_in_all_modules_at_import():
    """torch.library.register_fake() asks inspect for the caller's module, which else reads the files of all that there are."""
    count = "print(len(inspect.modulesbyfile))"
    code = f"import inspect, torch; {count}; import flashjit.torch; {count}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child.environment()
    )
    before, after = map(int, done.stdout.split())
    assert after <= before + 3


DRIVER = """
#include <unistd.h>
int cuInit(unsigned flags) { write(2, "cuInit\\n", 7); _exit(3); }
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* found) {
  *function = (void*)cuInit;
  return 0;
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
"""


@pytest.mark.slow
def test_calls_on_the_cpu_leave_the_driver_alone(tmp_path):
    """A process that forks afterwards could not use CUDA in its children. (PyTorch's own backward pass begins it all the same.)"""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True
    )
    code = """
import torch, flashjit, flashjit.torch
q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
offsets = torch.tensor([0, 16, 32], dtype=torch.int32)
packed = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=16, max_seqlen_kv=16)
flashjit.attention(q, k, v, causal=True, return_lse=True)
flashjit.attention(q, k, v, dropout_p=0.1, score_mod=lambda s, b, h, q, kv: s * 2, kv_lengths=torch.tensor([9], dtype=torch.int32))
flashjit.attention(q, k, v, lists=flashjit.TileLists(q, k, v, **packed), **packed)
flashjit.attention(q.requires_grad_(), k, v)
flashjit.torch.scaled_dot_product_attention(q, k, v, torch.ones(32, 32, dtype=torch.bool))
out, lse = flashjit.forward(q.detach(), k, v)
flashjit.backward(q.detach(), k, v, out, lse, torch.randn_like(out))
flashjit.trace(lambda s, b, h, q, kv: s * 2)
flashjit.runtime()
"""
    named = child.environment(LD_LIBRARY_PATH=tmp_path, FLASHJIT_LIBCUDA=tmp_path / "libcuda.so.1")
    run = lambda code: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=named)
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)").returncode == 3
    assert (
        run("import flashjit; flashjit.runtime().workspace_bytes('bf16:d64', (1, 1, 1, 1, 1))").returncode
        == 3
    )


@pytest.mark.parametrize(
    "function",
    [
        flashjit.attention,
        flashjit.forward,
        flashjit.backward,
        flashjit.build_lists,
        flashjit.trace,
        flashjit.TileLists,
        scaled_dot_product_attention,
        flashjit.torch.prepare,
        flashjit.torch.register_with_transformers,
    ],
    ids=lambda x: x.__name__,
)
def test_public_functions_tell_types_and_arguments(function):
    """To type checkers, by py.typed, and to help()."""
    parameters = dict(inspect.signature(function).parameters)
    assert all(x.annotation is not x.empty for x in parameters.values())
    assert "return" in (function.__init__ if inspect.isclass(function) else function).__annotations__
    assert function.__doc__


def test_docstrings_tell_shapes():
    for function, names in (
        (flashjit.attention, "qkv"),
        (flashjit.forward, "qkv"),
        (scaled_dot_product_attention, ("query", "key", "value")),
    ):
        for name in names:
            assert re.search(rf"\b{name}: \[[^]]*length|\b{name}: \[[^]]*seqlen", function.__doc__), name


# --- bad input ---


@pytest.mark.parametrize(
    "change, match, kind",
    [
        (dict(q=[[1.0]]), "q is a list", TypeError),
        (dict(q=torch.zeros(4, 9, 16)), "four dimensions", ValueError),
        (dict(q=torch.zeros(2, 4, 9, 16).double()), "float16, bfloat16 and float32", TypeError),
        (dict(k=torch.zeros(2, 2, 13, 16).half()), "one type", ValueError),
        (dict(k=torch.zeros(2, 2, 13, 16, device="meta")), "one device", ValueError),
        (dict(q=torch.zeros(2, 4, 9, 16, device="meta")), "meta", ValueError),
        (dict(k=torch.zeros(3, 2, 13, 16)), "batches must be equal", ValueError),
        (dict(k=torch.zeros(2, 2, 13, 24)), "head_dim of q", ValueError),
        (dict(v=torch.zeros(2, 2, 12, 16)), "length of k", ValueError),
        (dict(k=torch.zeros(2, 3, 13, 16), v=torch.zeros(2, 3, 13, 16)), "multiple", ValueError),
        (dict(q=torch.zeros(2, 4, 9, 12), k=torch.zeros(2, 2, 13, 12)), "multiple of 8", ValueError),
        (dict(causal="left"), "causal is 'left'", ValueError),
        (dict(scale=-1.0), "^scale is -1", ValueError),
        (dict(dropout_p=1.0), "dropout_p is 1", ValueError),
        (dict(dropout_p=-0.5), "dropout_p is -0.5", ValueError),
        (dict(kv_lengths=torch.zeros(2, dtype=torch.int64)), "int32", ValueError),
        (dict(kv_lengths=torch.zeros(3, dtype=torch.int32)), r"\[2\]", ValueError),
        (dict(sinks=torch.zeros(3)), r"\[4\]", ValueError),
        (dict(cu_seqlens_q=torch.zeros(2, dtype=torch.int32)), "cu_seqlens_kv is a NoneType", TypeError),
        (
            dict(
                cu_seqlens_q=torch.zeros(2, dtype=torch.int32),
                cu_seqlens_kv=torch.zeros(2, dtype=torch.int32),
            ),
            "max_seqlen_q",
            ValueError,
        ),
        (
            dict(
                cu_seqlens_q=torch.zeros(2, dtype=torch.int32),
                cu_seqlens_kv=torch.zeros(2, dtype=torch.int32),
                max_seqlen_q=9,
                max_seqlen_kv=13,
            ),
            "its batch is 1",
            ValueError,
        ),
        (
            dict(
                cu_seqlens_q=torch.zeros(0, dtype=torch.int32),
                cu_seqlens_kv=torch.zeros(0, dtype=torch.int32),
                max_seqlen_q=9,
                max_seqlen_kv=13,
            ),
            "cu_seqlens_q is empty: it needs one number",
            ValueError,
        ),
        (dict(max_seqlen_q=9), "belong to cu_seqlens", ValueError),
        (dict(block_mask=torch.zeros(1, 1)), "BlockMap", TypeError),
        (dict(block_mask=BlockMap(torch.ones(2, 2, dtype=torch.bool), 128)), "block", ValueError),
        (
            dict(score_mod="score + s[h]", captures={"s": torch.rand(4).double()}),
            "captures\\['s'\\]",
            TypeError,
        ),
        (dict(score_mod="score + s[h]", captures={"s": [1.0]}), "captures\\['s'\\]", TypeError),
        (
            dict(score_mod="s: fp32 1d; score + s[h]", captures={"s": torch.rand(4, requires_grad=True)}),
            '"grad"',
            ValueError,
        ),
        (dict(score_mod=3), "score_mod is a int", TypeError),
        (dict(kv_lengths=[9, 9]), "kv_lengths is a list: give a torch.Tensor", TypeError),
        (dict(sinks=[1.0]), "sinks is a list: give a torch.Tensor", TypeError),
        (dict(causal=["left"]), "causal is .'left'.: give True", ValueError),
        (dict(scale="1"), "scale is a str: give a Python number", TypeError),
        (dict(scale=torch.tensor(0.5)), "scale is a Tensor: give a Python number", TypeError),
        (dict(dropout_p="0.1"), "dropout_p is a str: give a Python number", TypeError),
        (dict(dropout_p=None), "dropout_p is a NoneType", TypeError),
        (dict(dropout_p=torch.zeros(2)), "dropout_p is a Tensor: give a Python number", TypeError),
        (dict(return_lse=torch.zeros(2)), "return_lse is a Tensor: give True or False", TypeError),
        (dict(batch_invariant="no"), "batch_invariant is a str: give True or False", TypeError),
        (dict(deterministic=[True]), "deterministic is a list: give True or False", TypeError),
        (dict(out_dtype=torch.zeros(2)), r"out_dtype is tensor\(.*give torch.float32", ValueError),
        (dict(pv_sums=torch.zeros(2)), "pv_sums is tensor.*give 1, 4", ValueError),
        (
            dict(
                cu_seqlens_q=torch.zeros(2, dtype=torch.int32),
                cu_seqlens_kv=torch.zeros(2, dtype=torch.int32),
                max_seqlen_q=torch.tensor(9),
                max_seqlen_kv=13,
            ),
            "max_seqlen_q is a Tensor: give a Python int",
            TypeError,
        ),
        (
            dict(score_mod="score + s[h]", captures=[torch.rand(4)]),
            "captures is a list: give a dict",
            TypeError,
        ),
        (dict(mask_mod=lambda b, h, q, kv: np.arange(13)[q] == kv), "cannot be traced", TypeError),
    ],
)
def test_bad_input_is_refused(change, match, kind):
    q, k, v = (x.detach() for x in tensors(dim_v=16))
    arguments = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(flashjit.Error, match=match) as caught:
        flashjit.attention(**arguments)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize(
    "name, match",
    [
        ("window_size", "window"),
        ("logits_soft_cap", "softcap"),
        ("softmax_scale", "give scale"),
        ("is_causal", "top_left"),
        ("attn_mask", "scaled_dot_product_attention"),
        ("cu_seqlens_k", "cu_seqlens_kv"),
        ("query", "give q"),
        ("colour", "help"),
    ],
)
def test_other_libraries_arguments_are_told_what_to_write(name, match):
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(flashjit.WrongType, match=rf"attention\(\) has no argument {name}: .*{match}"):
        flashjit.attention(q, k, v, **{name: 3})
    with pytest.raises(Exception, match=f"no argument {name}"):
        compiled(lambda q: flashjit.attention(q, k, v, **{name: 3}))(q)


@pytest.mark.parametrize("dim, dim_v", [(12, 12), (300, 300), (16, 12), (16, 300)])
def test_head_dimensions_that_no_kernel_has_are_refused_alike(dim, dim_v):
    q, k, v = (x.detach() for x in tensors(dim=dim, dim_v=dim_v))
    with pytest.raises(
        flashjit.InvalidArgument,
        match=rf"q is float32 .*{dim}.* and v is float32 .*{dim_v}.*a multiple of 8 from 8 to "
        "(576|512); pad",
    ):
        flashjit.attention(q, k, v)
    for x in "qv":
        with pytest.raises(flashjit.InvalidArgument, match=rf"{x} is .*its head_dim is 0"):
            flashjit.attention(
                **{
                    **dict(q=q, k=k, v=v),
                    x: dict(q=q, v=v)[x][..., :0],
                    **({"k": k[..., :0]} if x == "q" else {}),
                }
            )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    q, k, v = (x.detach() for x in tensors(dim_v=16))
    nested = torch.nested.nested_tensor([torch.zeros(4, 9, 16)] * 2, layout=layout)
    with pytest.raises(flashjit.WrongType, match="q is a nested tensor.*cu_seqlens_q"):
        flashjit.attention(nested, k, v)


def test_tensors_that_hold_negated_numbers():
    """The views behind z.conj().imag."""
    q, k, v = (torch._neg_view(x) for x in tensors())
    assert q.is_neg()
    inputs = tensors()
    for keys in ((k, v), (k.detach(), v.detach())):
        torch.testing.assert_close(
            flashjit.attention(q, *keys),
            flashjit.attention(q.resolve_neg(), *(x.resolve_neg() for x in keys)),
        )
    out = flashjit.attention(*inputs)
    dout = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, inputs, torch._neg_view(dout), retain_graph=True),
        torch.autograd.grad(out, inputs, -dout),
    ):
        torch.testing.assert_close(got, want)
    slopes = torch._neg_view(torch.rand(4))
    run = lambda s: flashjit.attention(*inputs, score_mod="score + s[h] * to_float(kv)", captures={"s": s})
    torch.testing.assert_close(run(slopes), run(slopes.resolve_neg()))
    with pytest.raises(flashjit.InvalidArgument, match=r"q is a view .* negated .*resolve_neg\(\)"):
        flashjit.forward(q.detach(), *inputs[1:])


def test_prepare_refuses_what_attention_refuses():
    q, k, v = tensors()
    with pytest.raises(flashjit.InvalidArgument, match="causal is 'left'"):
        flashjit.torch.prepare(q, k, v, causal="left")
    with pytest.raises(flashjit.WrongType, match="q is a list"):
        flashjit.torch.prepare([1.0], k, v)


def test_freed_captures_are_refused():
    q, k, v = tensors()
    slopes = torch.rand(4)
    slopes.untyped_storage().resize_(0)
    with pytest.raises(flashjit.InvalidArgument, match="no memory any more"):
        flashjit.attention(q, k, v, score_mod="score + s[h]", captures={"s": slopes})


def test_captures_freed_between_calls_are_refused():
    q, k, v = tensors()
    slopes = torch.rand(4)
    call = lambda: flashjit.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s + slopes[h])
    call()
    slopes.untyped_storage().resize_(0)
    with pytest.raises(flashjit.InvalidArgument, match="has no memory any more"):
        call()


def needs_no_gradient():
    q, k, v = (x.detach() for x in tensors(dim_v=16))
    return dict(q=q, k=k, v=v), dict(
        options="score{s: fp32 1d grad; score + s[h]}", captures={"s": torch.rand(4)}
    )


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_forward_refuses_what_requires_gradients(name):
    given, _ = needs_no_gradient()
    given.update(out=torch.empty_like(given["q"]), lse=torch.empty(2, 4, 9))
    flashjit.forward(**given)
    given[name].requires_grad_()
    with pytest.raises(
        flashjit.InvalidArgument,
        match=rf"^{name} requires gradients, .* call flashjit.attention\(\), or give",
    ):
        flashjit.forward(**given)
    with torch.no_grad():  # where nobody asks for them
        flashjit.forward(**given)


def test_forward_and_backward_refuse_captures_that_require_gradients():
    given, program = needs_no_gradient()
    out, lse = flashjit.forward(**given, **program)
    program["captures"]["s"].requires_grad_()
    for call in (
        lambda: flashjit.forward(**given, **program),
        lambda: flashjit.backward(**given, out=out, lse=lse, dout=out, **program),
        lambda: flashjit.build_lists(**given, **program),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=r"captures\['s'\] requires gradients"):
            call()


def test_deterministic_mode_takes_gradients_of_captures():
    q, k, v = tensors()
    slopes = torch.rand(4, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        flashjit.attention(q, k, v, score_mod="score * s[h]", captures={"s": slopes}).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert (slopes.grad != 0).any()


def test_empty_tensors():
    q, k, v = tensors(keys=0)
    out = flashjit.attention(q, k, v)
    assert (out == 0).all()
    out.sum().backward()
    assert (q.grad == 0).all() and k.grad.shape == (2, 2, 0, 16)
    assert flashjit.attention(*tensors(queries=0)).shape == (2, 4, 0, 8)
    assert flashjit.attention(*tensors(batch=0)).shape == (0, 4, 9, 8)


# --- PyTorch's signature ---


def same_as_pytorch(*arguments, atol=2e-6, **named):
    leaves = [x for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    out = scaled_dot_product_attention(*arguments, **named)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = F.scaled_dot_product_attention(*arguments, **named)
    assert out.shape == want.shape
    torch.testing.assert_close(out, want, atol=atol, rtol=1e-4)
    if leaves:
        dout = torch.randn_like(out)
        for a, b in zip(
            torch.autograd.grad(out, leaves, dout),
            torch.autograd.grad(want, leaves, dout, materialize_grads=True),
        ):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_sdpa():
    q, k, v = tensors(heads_kv=4)
    same_as_pytorch(q, k, v)
    same_as_pytorch(q, k, v, is_causal=True)  # aligned at the top left
    same_as_pytorch(q, k, v, scale=0.7)
    same_as_pytorch(q[0], k[0], v[0])
    same_as_pytorch(q[0, 0], k[0, 0], v[0, 0])
    same_as_pytorch(q[None], k[None], v[None])
    for few in ((q[:1], k[:1], v), (q[:, :1], k[:, :1], v), (q[0, 0], k[0, 0], v)):  # V alone has all
        same_as_pytorch(*few)
    same_as_pytorch(*tensors(heads_kv=2), enable_gqa=True)
    same_as_pytorch(*tensors(heads_kv=4, dim=12, dim_v=20))  # head dimensions that are no multiples of 8
    same_as_pytorch(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)  # strides that are copied


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, -1])
def test_sdpa_takes_any_scale(scale):
    same_as_pytorch(*tensors(heads_kv=4), scale=scale)


@pytest.mark.parametrize(
    "sizes",
    [dict(dim=0), dict(dim=1), dict(dim_v=0), dict(dim_v=1), dict(keys=0), dict(queries=0), dict(batch=0)],
    ids=str,
)
@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_sdpa_of_few_or_no_columns_keys_and_queries(sizes, mask):
    q, k, v = tensors(**{"heads_kv": 4, **sizes})
    shape = q.shape[0], 1, q.shape[2], k.shape[2]
    given = {
        None: None,
        "boolean": torch.ones(shape, dtype=torch.bool),
        "additive": torch.randn(shape, requires_grad=True),
    }[mask]
    if sizes == dict(dim=0) and not F.scaled_dot_product_attention(q, k, v).any():
        pytest.skip("PyTorch 2.12 alone gives zeros where Q and K have no columns; others give the mean of V")
    same_as_pytorch(q, k, v, attn_mask=given)


def test_sdpa_with_a_mask_that_alone_requires_a_gradient():
    q, k, v = (x.detach() for x in tensors(heads_kv=4))
    mask = torch.randn(9, 13, requires_grad=True)
    same_as_pytorch(q, k, v, attn_mask=mask)
    run = compiled(lambda mask: scaled_dot_product_attention(q, k, v, mask))
    run(mask).square().sum().backward()
    want = torch.autograd.grad(reference(q, k, v, add=mask).square().sum(), mask)[0]
    torch.testing.assert_close(mask.grad, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "shape", [(9, 13), (1, 13), (2, 1, 1, 13), (2, 1, 9, 13), (4, 9, 13), (2, 4, 9, 13), (1, 1, 9, 1), (1,)]
)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_sdpa_with_masks(shape, kind):
    q, k, v = tensors(heads_kv=4)
    torch.manual_seed(1)
    mask = torch.randn(shape) if kind == "additive" else torch.rand(shape) > 0.3
    if kind == "additive":
        mask.requires_grad_()
    elif shape[-1] > 1:
        mask[..., 0] = True  # PyTorch's math gives NaN for rows that attend to nothing
    else:
        mask[:] = True
    same_as_pytorch(q, k, v, attn_mask=mask)


def test_sdpa_refuses_what_pytorch_refuses():
    q, k, v = tensors()
    with pytest.raises(flashjit.InvalidArgument, match="is_causal"):
        scaled_dot_product_attention(q, k, v, torch.ones(9, 13, dtype=torch.bool), is_causal=True)
    with pytest.raises(flashjit.InvalidArgument, match="enable_gqa"):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(flashjit.InvalidArgument, match=r"leading dimensions .* do not broadcast"):
        scaled_dot_product_attention(q, k[:1].expand(3, -1, -1, -1), v)
    with pytest.raises(flashjit.InvalidArgument, match="broadcast"):
        scaled_dot_product_attention(q, k, v, torch.ones(8, 13, dtype=torch.bool), enable_gqa=True)
    for shape in (
        (2, 2, 4, 9, 13),
        (2, 4, 9, 13),
        (1, 4, 9, 13),
        (9, 13),
        (1, 1, 1, 1, 1),
    ):  # larger than the scores
        with pytest.raises(flashjit.InvalidArgument, match="attn_mask is .* must broadcast"):
            scaled_dot_product_attention(q[:1, :1, :1], k[:1, :1], v[:1, :1], torch.ones(shape))
    with pytest.raises(flashjit.InvalidArgument, match="attn_mask is .* must broadcast"):
        scaled_dot_product_attention(q, k[:, :, :1], v[:, :, :1], torch.ones(9, 13), enable_gqa=True)
    with pytest.raises(flashjit.WrongType, match="attn_mask"):
        scaled_dot_product_attention(q, k, v, torch.ones(9, 13, dtype=torch.int32), enable_gqa=True)


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"return_lse": True}], ids=str)
def test_o_in_fp32(given):
    q, k, v = (
        torch.randn(2, heads, n, 32, dtype=torch.bfloat16, requires_grad=True)
        for heads, n in ((4, 5), (2, 9), (2, 9))
    )
    wide, narrow = (flashjit.attention(q, k, v, out_dtype=dtype, **given) for dtype in (torch.float32, None))
    if "return_lse" in given:
        assert torch.equal(wide[1], narrow[1])
        wide, narrow = wide[0], narrow[0]
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    torch.testing.assert_close(wide.bfloat16(), narrow, rtol=2**-7, atol=1e-6)
    assert not torch.equal(wide, narrow.float())
    dout = torch.randn_like(narrow)
    for x, y in zip(
        torch.autograd.grad(wide, (q, k, v), dout.float()), torch.autograd.grad(narrow, (q, k, v), dout)
    ):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=1e-3)
    compiled = torch.compile(lambda q: flashjit.attention(q, k, v, out_dtype=torch.float32), fullgraph=True)
    assert compiled(q).dtype == torch.float32
    assert flashjit.attention(q, k, v, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(flashjit.InvalidArgument, match="out_dtype is torch.float16: give torch.float32"):
        flashjit.attention(q, k, v, out_dtype=torch.float16)


def test_results_that_do_not_depend_on_the_batch():
    q, k, v = (torch.randn(3, heads, n, 32) for heads, n in ((4, 5), (2, 90), (2, 90)))
    lengths = torch.tensor([70, 90, 3], dtype=torch.int32)
    given = {"causal": True, "cache": True, "return_lse": True, "batch_invariant": True}
    together = flashjit.attention(q, k, v, kv_lengths=lengths, **given)
    for i in range(3):
        alone = flashjit.attention(
            q[i : i + 1], k[i : i + 1], v[i : i + 1], kv_lengths=lengths[i : i + 1], **given
        )
        assert all(torch.equal(x[0], y[i]) for x, y in zip(alone, together))


# Saved tensors that come back otherwise than they went, as trainers offload activations.


class Wrapped(torch.Tensor):
    """A subclass that hooks give back: each operator sees what it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        bare = lambda x: x.inner if isinstance(x, Wrapped) else x
        args, kwargs = torch.utils._pytree.tree_map(bare, (args, kwargs or {}))
        return function(*args, **kwargs)


def misaligned(x):
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def columns_first(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x.clone()


def through_bytes(x):
    """As from a file, where elements may begin anywhere."""
    if x.numel() == 0 or x.dtype == torch.bool:
        return x.clone()
    memory = bytearray(1 + x.numel() * x.element_size())
    memory[1:] = bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist())
    return torch.frombuffer(memory, dtype=x.dtype, offset=1).view(x.shape)


GIVEN_BACK = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "misaligned": misaligned,
    "columns first": columns_first,
    "bytes": through_bytes,
    "a subclass": lambda x: Wrapped(x.clone()),
    "another type": lambda x: x.double() if x.is_floating_point() else x.long(),
    "parameters": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
}

SAVED_FORMS = {
    "plain": dict(causal=True),
    "sinks": dict(sinks=torch.linspace(-1, 1, 4).requires_grad_()),
    "kv_lengths": dict(kv_lengths=torch.tensor([3, 9], dtype=torch.int32)),
    "program": dict(score_mod=lambda s, b, h, i, j: s + SLOPES[h] * (j - i) * FACTOR + BIAS[i, j]),
    "block map": dict(block_mask=BlockMap(torch.eye(1, dtype=torch.int32), 128)),
    "dropout": dict(dropout_p=0.4),
    "indices": dict(indices=torch.arange(4, dtype=torch.int32).expand(2, 9, 2, 4).contiguous()),
    "fp32 O": dict(out_dtype=torch.float32),
    "LSE": dict(return_lse=True),
    "v_columns": dict(v_columns=8),
    "packed": dict(
        cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32),
        max_seqlen_q=5,
        cu_seqlens_kv=torch.tensor([0, 5, 9], dtype=torch.int32),
        max_seqlen_kv=5,
    ),
}
SLOPES = torch.rand(6, 4).t()[:, 2].requires_grad_()
BIAS = torch.rand(9, 9).t().requires_grad_()
FACTOR = torch.tensor(0.25)


@pytest.mark.parametrize("back", GIVEN_BACK)
@pytest.mark.parametrize("form", SAVED_FORMS)
def test_saved_tensors_may_come_back_otherwise(form, back):
    named, dtype = SAVED_FORMS[form], torch.bfloat16 if form == "fp32 O" else torch.float32
    torch.manual_seed(0)
    packed = torch.randn(1 if form == "packed" else 2, 9, 4, 32, dtype=dtype).requires_grad_()
    leaves = [packed, SLOPES, BIAS, *([named["sinks"]] if "sinks" in named else [])]

    def gradients(hooks):
        heads = packed.transpose(1, 2)
        q, k, v = heads[..., :16], heads[:, 1:3, :, 8:24], heads[:, ::2, :, 16:]
        torch.manual_seed(1)
        with hooks:
            out = flashjit.attention(q, k, None if form == "v_columns" else v, **named)
        results = out if isinstance(out, tuple) else (out,)
        loss = sum((x.double() * torch.linspace(0, 1, x.numel()).view(x.shape)).sum() for x in results)
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    wanted = gradients(contextlib.nullcontext())
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, GIVEN_BACK[back])
    for a, b in zip(wanted, gradients(hooks)):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_gradient_may_be_of_a_subclass():
    q, k, v = tensors()
    out, lse = flashjit.attention(q, k, v, return_lse=True)
    given = [torch.randn_like(x) for x in (out, lse)]
    want = torch.autograd.grad((out, lse), (q, k, v), given, retain_graph=True)
    for wrapped in ([Wrapped(given[0]), given[1]], [given[0], Wrapped(given[1])]):
        got = torch.autograd.grad((out, lse), (q, k, v), wrapped, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_saved_tensor_of_another_size_is_refused():
    q, k, v = tensors()
    shortened = lambda x: x[..., :4] if x.shape[-1] == 9 else x
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, shortened):
        out = flashjit.attention(q, k, v)
    with pytest.raises(flashjit.InvalidArgument, match=r"lse is float32 \[2, 4, 4\].* was \[2, 4, 9\]"):
        out.sum().backward()


# What callers give in other words than attention() would have them.


@pytest.mark.parametrize("heads", [(2, 4), (4, 2), (1, 2), (2, 8)])
def test_k_and_v_may_have_other_numbers_of_heads_in_pytorch_s_function(heads):
    q, k, v = (torch.randn(2, n, 5, 16).requires_grad_() for n in (8, *heads))
    exact = [x.repeat_interleave(8 // x.shape[1], 1) for x in (k, v)]
    check(
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda: reference(q, *exact),
        (q, k, v),
    )
    with pytest.raises(flashjit.InvalidArgument, match="query has 8 heads and key 3"):
        scaled_dot_product_attention(q, torch.randn(2, 3, 5, 16), v, enable_gqa=True)


def test_pytorch_s_function_takes_a_tensor_as_scale_and_drops_all():
    q, k, v = tensors(heads_kv=4)
    check(
        lambda: scaled_dot_product_attention(q, k, v, scale=torch.tensor(0.3)),
        lambda: reference(q, k, v, scale=0.3),
        (q, k, v),
    )
    out = scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    assert (out == 0).all() and all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_tensors(dim, is_causal):
    lengths = [3, 7, 1]
    packed = [torch.randn(sum(lengths), 4, dim).requires_grad_() for _ in range(3)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in packed]
    out = scaled_dot_product_attention(*nested, is_causal=is_causal)
    assert out.is_nested and out.shape[1::2] == (4, dim)
    (out + nested[0]).sum()  # the rows are known to be the same

    def exact():
        parts = zip(*[x.transpose(0, 1)[None].split(lengths, 2) for x in packed])
        keep = lambda q: causal(q.shape[2], q.shape[2]) if is_causal else None
        return torch.cat([reference(q, k, v, keep(q))[0] for q, k, v in parts], 1).transpose(0, 1)

    def got():
        return scaled_dot_product_attention(*nested, is_causal=is_causal).transpose(1, 2).values()

    check(got, exact, packed)
    with pytest.raises(flashjit.InvalidArgument, match="attn_mask is given with nested tensors"):
        scaled_dot_product_attention(*nested, attn_mask=torch.ones(7, 7))
    with pytest.raises(flashjit.WrongType, match="key must be nested, .*layout=torch.jagged"):
        scaled_dot_product_attention(nested[0], torch.randn(3, 4, 7, dim), nested[2])


def test_what_pytorch_alone_computes_is_not_sent_to_its_stand_in():
    with pytest.raises(
        flashjit.InvalidArgument, match=r"head_dim is 600.*; torch.nn.functional.scaled_dot_product"
    ):
        scaled_dot_product_attention(*[torch.randn(1, 1, 2, 600)] * 3)
    with pytest.raises(flashjit.WrongType, match="float64.*convert it"):
        scaled_dot_product_attention(*[torch.randn(1, 1, 2, 8).double()] * 3)


def test_a_distributed_tensor_is_told_to_give_its_shard():
    class DTensor(torch.Tensor):
        placements = ()

        def to_local(self):
            return self

    with pytest.raises(flashjit.WrongType, match=r"q is a DTensor.*to_local\(\)"):
        flashjit.attention(torch.randn(1, 1, 2, 8).as_subclass(DTensor), *tensors()[1:])


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.int64(2), np.int8(2), np.bool_(True), np.array(0.5)]
)
def test_numbers_of_numpy_are_numbers(number):
    q, k, v = tensors()
    text = "score * w" if isinstance(number.item(), float) else "score * to_float(w)"
    check(
        lambda: flashjit.attention(q, k, v, score_mod=text, captures={"w": number}),
        lambda: reference(q, k, v, score=lambda s: s * float(number)),
        (q, k, v),
    )


@contextlib.contextmanager
def deterministic_algorithms(**named):
    torch.use_deterministic_algorithms(True, **named)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_lists_of_keys_warn_where_pytorch_s_operators_do():
    q, k, v = tensors()
    lists = torch.arange(4, dtype=torch.int32).expand(2, 9, 2, 4).contiguous()
    warned = pytest.warns(UserWarning, match="with indices are not deterministic")
    with deterministic_algorithms(warn_only=True), warned:
        flashjit.attention(q, k, v, indices=lists).sum().backward()
    with deterministic_algorithms():
        with pytest.raises(
            flashjit.Unsupported, match="indices have no deterministic gradients.*deterministic=False"
        ):
            flashjit.attention(q, k, v, indices=lists)
        flashjit.attention(q, k, v, indices=lists, deterministic=False).sum().backward()
        with torch.no_grad():
            flashjit.attention(q, k, v, indices=lists)


@pytest.mark.parametrize("paged", [False, True])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_the_longest_sequence_may_be_an_item_of_a_tensor(paged):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def packed(q, k, v, offsets):
        longest = offsets.diff().max().item()
        if paged:
            table = torch.arange(offsets.shape[0] - 1, dtype=torch.int32)[:, None]
            return flashjit.attention(
                q.detach(),
                k.detach(),
                v.detach(),
                causal=True,
                cu_seqlens_q=offsets,
                max_seqlen_q=longest,
                page_table=table,
                kv_lengths=offsets.diff().int(),
                max_seqlen_kv=longest,
            )
        return flashjit.attention(
            q,
            k,
            v,
            causal=True,
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    torch._dynamo.reset()
    compiled = torch.compile(packed, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ((4, 5, 2), (1, 1, 7, 3), (8, 6, 7, 9, 5)):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        rows = sum(lengths)
        of_keys = (len(lengths), 2, 16, 16) if paged else (1, 2, rows, 16)
        q, k, v = (torch.randn(size).requires_grad_() for size in ((1, 2, rows, 16), of_keys, of_keys))
        got, want = compiled(q, k, v, offsets), packed(q, k, v, offsets)
        torch.testing.assert_close(got, want)
        if not paged:
            grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want)]
            torch.testing.assert_close(*grads)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_python_without_docstrings():
    code = (
        "import torch, flashjit; from flashjit import flash_attn, flex_attention, distributed; "
        "q = torch.ones(1, 1, 2, 8); assert 0; print(flashjit.attention(q, q, q).sum().item())"
    )
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=child.environment())
    assert done.stdout == "16.0\n", done.stderr

"""attention() into the caller's memory: out, lse and workspace, on the GPU where there is one."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def tensors(queries=37, keys=61, batch=2):
    torch.manual_seed(7)
    sizes = ((batch, 4, queries, 64), (batch, 2, keys, 64), (batch, 2, keys, 64))
    return [torch.randn(size).to(DEVICE, DTYPE) for size in sizes]


def poisoned(size, dtype=DTYPE):
    return torch.full(size, math.nan, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "columns of a wider tensor"])
def test_out_and_lse_are_written_and_returned(layout):
    q, k, v = tensors()
    want, want_lse = flashjit.attention(q, k, v, causal=True, return_lse=True)
    if layout == "bhsd":
        out = poisoned(q.shape)
    elif layout == "bshd":
        out = poisoned((2, 37, 4, 64)).transpose(1, 2)
    else:
        out = poisoned((2, 4, 37, 128))[..., 64:]
    lse = poisoned((2, 4, 37), torch.float32)
    if layout != "bhsd":  # [batch, rows, heads], and columns of a wider tensor
        lse = poisoned((2, 37, 9), torch.float32)[..., 1:5].transpose(1, 2)
    got, got_lse = flashjit.attention(q, k, v, causal=True, out=out, lse=lse)
    assert got is out and got_lse is lse
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert flashjit.attention(q, k, v, causal=True, out=out) is out


def test_beside_a_cache_in_pages():
    q, k, v = tensors(1, 16, batch=8)
    table = torch.tensor([[5, 0], [3, 7], [1, 2]], dtype=torch.int32, device=DEVICE)
    given = dict(
        causal=True,
        page_table=table,
        kv_lengths=torch.tensor([17, 32, 3], dtype=torch.int32, device=DEVICE),
        window=(20, 0),
        softcap=5.0,
        return_lse=True,
    )
    want, want_lse = flashjit.attention(q[:3], k, v, **given)
    tokens = poisoned((3, 4, 64))  # [tokens, heads, dim], as engines have it
    lse = poisoned((3, 4, 1), torch.float32)
    flashjit.attention(q[:3], k, v, **given, out=tokens.unsqueeze(1).transpose(1, 2), lse=lse)
    assert torch.equal(tokens, want[:, :, 0]) and torch.equal(lse, want_lse)


def test_packed_rows_of_no_sequence_become_zeros():
    q, k, v = (x[:1] for x in tensors(37, 37))
    offsets = torch.tensor([0, 20, 30], dtype=torch.int32, device=DEVICE)
    given = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=20, max_seqlen_kv=20)
    out, lse = poisoned(q.shape), poisoned((37, 4), torch.float32).t()[None]
    flashjit.attention(q, k, v, **given, out=out, lse=lse)
    want, want_lse = flashjit.attention(q, k, v, **given, return_lse=True)
    assert torch.equal(out, want) and not out[:, :, 30:].any()
    assert torch.equal(lse, want_lse) and (lse[:, :, 30:] == -math.inf).all()
    none = poisoned(q.shape)
    flashjit.attention(
        q, k, v, **{**given, "cu_seqlens_q": offsets[:1], "cu_seqlens_kv": offsets[:1]}, out=none, lse=lse
    )
    assert not none.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("by_rows", [False, True])
def test_packed_states_join_without_a_copy(by_rows):
    """O as [rows, heads, dim] and LSE as [rows, heads] or [heads, rows], as engines have them, join in running states and in
    merge(); rows of no sequence are neutral."""
    q, k, v = (x[:1] for x in tensors(37, 60))
    offsets = torch.tensor([0, 20, 30], dtype=torch.int32, device=DEVICE)
    cuts = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 11, 24], [0, 20, 36])]
    packed = dict(cu_seqlens_q=offsets, max_seqlen_q=20, max_seqlen_kv=20, out_dtype=torch.float32)
    keys = [k[:, :, :24], v[:, :, :24]], [k[:, :, 24:], v[:, :, 24:]]
    states = []
    for cu, (k_part, v_part) in zip(cuts, keys):
        out = poisoned((37, 4, 64), torch.float32).transpose(0, 1)[None]
        lse = poisoned((37, 4), torch.float32).t()[None] if by_rows else poisoned((1, 4, 37), torch.float32)
        states.append(flashjit.attention(q, k_part, v_part, **packed, cu_seqlens_kv=cu, out=out, lse=lse))
    merged, lse = flashjit.merge(states)
    assert lse.shape == (1, 4, 37) and merged.stride()[1:] == states[0][0].stride()[1:]
    for i in range(2):
        rows = slice(*offsets[i : i + 2].tolist())
        both = [
            torch.cat([x[:, :, slice(*cu[i : i + 2].tolist())] for cu, x in zip(cuts, pair)], 2)
            for pair in zip(*keys)
        ]
        want, want_lse = flashjit.attention(q[:, :, rows], *both, return_lse=True)
        torch.testing.assert_close(merged[:, :, rows].to(want.dtype), want, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[:, :, rows], want_lse, rtol=1e-4, atol=1e-4)
    assert (lse[:, :, 30:] == -math.inf).all() and not merged[:, :, 30:].any()
    out, lse_of_state = states[0]
    flashjit.attention(
        q, *keys[1], **packed, cu_seqlens_kv=cuts[1], state=states[0], out=out, lse=lse_of_state
    )
    torch.testing.assert_close(out[:, :, :30], merged[:, :, :30], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse_of_state[:, :, :30], lse[:, :, :30], rtol=1e-4, atol=1e-4)


def test_row_max_and_state_beside_them():
    q, k, v = tensors()
    first, first_lse = flashjit.attention(
        q, k[:, :, :30], v[:, :, :30], return_lse=True, out_dtype=torch.float32
    )
    flashjit.attention(
        q,
        k[:, :, 30:],
        v[:, :, 30:],
        state=(first, first_lse),
        out=first,
        lse=first_lse,
        out_dtype=torch.float32,
    )
    want, want_lse = flashjit.attention(q, k, v, return_lse=True, out_dtype=torch.float32)
    torch.testing.assert_close(first, want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(first_lse, want_lse, rtol=1e-4, atol=1e-4)
    out = poisoned(q.shape)
    got, row_max = flashjit.attention(q, k, v, return_row_max=True, out=out)
    assert got is out and row_max.isfinite().all()


def test_a_workspace_of_the_caller():
    q, k, v = tensors(1, 3000)
    shape, spec = (2, 4, 2, 1, 3000), "fp32:d64" if DTYPE is torch.float32 else "bf16:d64"
    needed = flashjit.Runtime().workspace_bytes(spec, shape) if DEVICE == "cuda" else 0
    workspace = torch.empty(max(1, needed), dtype=torch.uint8, device=DEVICE)
    want = flashjit.attention(q, k, v)
    assert torch.equal(flashjit.attention(q, k, v, workspace=workspace), want)
    if needed:
        with pytest.raises(
            flashjit.InvalidArgument, match=f"workspace has 1 bytes, and this call needs {needed}"
        ):
            flashjit.attention(q, k, v, workspace=workspace[:1])


@pytest.mark.parametrize(
    "given, match",
    [
        (
            lambda q: dict(out=q.new_empty(2, 4, 37, 32)),
            r"out is .*\[2, 4, 37, 32\].*: it must be .* \[2, 4, 37, 64\]",
        ),
        (lambda q: dict(out=q.new_empty(q.shape, dtype=torch.float64)), "out is float64"),
        (lambda q: dict(out="o"), "out is a str: give a torch.Tensor"),
        (lambda q: dict(out=q.new_empty(2, 4, 64, 37).transpose(2, 3)), "out"),
        (lambda q: dict(out=q.new_empty(q.numel() + 1)[1:].view(q.shape)), "out"),
        (lambda q: dict(out=q), "out"),
        (lambda q: dict(out=torch._neg_view(q.clone())), "out is a view .* negated numbers"),
        (
            lambda q: dict(lse=torch._neg_view(q.new_empty(2, 4, 37, dtype=torch.float32))),
            "lse is a view .* negated numbers",
        ),
        (
            lambda q: dict(lse=q.new_empty(2, 37, 4, dtype=torch.float32)),
            r"lse is .*: it must be float32 \[2, 4, 37\]",
        ),
        (
            lambda q: dict(lse=q.new_empty(2, 1, 37, dtype=torch.float32).expand(2, 4, 37)),
            "lse is written, but its elements overlap",
        ),
        (
            lambda q: dict(lse=q.new_empty(1, dtype=torch.float32).expand(2, 4, 37)),
            "lse is an expanded tensor",
        ),
        (lambda q: dict(workspace=q.new_empty(8)), r"workspace is .*: it must be uint8 \[bytes\]"),
    ],
)
def test_wrong_ones_are_refused(given, match):
    q, k, v = tensors()
    with pytest.raises(flashjit.Error, match=match):
        flashjit.attention(q, k, v, **given(q))


def test_memory_that_the_call_reads_is_refused():
    q, k, v = tensors()
    bias, rows = torch.randn_like(q), torch.randn(2, 4, 37, device=DEVICE)
    whole = torch.randn(2, 4, 38, 64, device=DEVICE).to(DTYPE)
    sequences = torch.tensor([0, 37], dtype=torch.int32, device=DEVICE)
    room = torch.empty(4 * 37 * 64 * 4, dtype=torch.uint8, device=DEVICE)
    inside = room[:8].view(torch.int32).copy_(sequences)
    sinks = torch.randn(4, device=DEVICE)
    packed = dict(cu_seqlens_q=inside, cu_seqlens_kv=inside, max_seqlen_q=37, max_seqlen_kv=37)
    one = [x[:1, :, :37].clone() for x in (q, k, v)]
    wrong = {
        "out is written, but has memory of bias": lambda: flashjit.attention(
            q, k, v, out_mod=lambda out, b, h, q_idx, column: out * bias[b, h, q_idx, column], out=bias
        ),
        "out is written, but has memory of q": lambda: flashjit.attention(
            whole[:, :, 1:], k, v, out=whole[:, :, :-1]
        ),
        "lse is written, but has memory of rows": lambda: flashjit.attention(
            q, k, v, score_mod=lambda score, b, h, q_idx, kv: score + rows[b, h, q_idx], lse=rows
        ),
        "lse is written, but has memory of sinks": lambda: flashjit.attention(
            one[0][:, :, :1], *one[1:], sinks=sinks, lse=sinks.view(1, 4, 1)
        ),
        "out is written, but has memory of cu_seqlens_q": lambda: flashjit.attention(
            *one, **packed, out=room.view(DTYPE)[: one[0].numel()].view(one[0].shape)
        ),
    }
    for match, call in wrong.items():
        with pytest.raises(flashjit.InvalidArgument, match=match):
            call()
    # Rows of one buffer, those of O between those of Q.
    wide = torch.randn(2, 4, 37, 2, 64, device=DEVICE).to(DTYPE)
    want = flashjit.attention(wide[..., 0, :], k, v)
    assert torch.equal(flashjit.attention(wide[..., 0, :], k, v, out=wide[..., 1, :]), want)


def test_gradients_and_compiled_code_have_none():
    q, k, v = tensors()
    with pytest.raises(flashjit.Unsupported, match="out is given with tensors that require gradients"):
        flashjit.attention(q.clone().requires_grad_(), k, v, out=torch.empty_like(q))
    with torch.no_grad():
        flashjit.attention(q.clone().requires_grad_(), k, v, out=torch.empty_like(q))
    with pytest.raises(Exception, match="lse cannot be had in compiled code"):
        torch.compile(lambda lse: flashjit.attention(q, k, v, lse=lse), fullgraph=True)(
            poisoned((2, 4, 37), torch.float32)
        )


def test_packed_sequences_without_a_query_have_gradients():
    q, k = torch.randn(1, 3, 0, 32, requires_grad=True), torch.randn(1, 3, 22, 32, requires_grad=True)
    none, all_keys = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([0, 22], dtype=torch.int32)
    named = dict(cu_seqlens_q=none, cu_seqlens_kv=all_keys, max_seqlen_q=4, max_seqlen_kv=22)
    out, lse = flashjit.attention(q, k, k, return_lse=True, **named)
    assert out.shape == (1, 3, 0, 32) and lse.shape == (1, 3, 0)
    (out.sum() + lse.sum()).backward()
    assert q.grad.shape == q.shape and (k.grad == 0).all()


def test_packed_sequences_without_a_query_have_row_maxima():
    q, k = torch.randn(1, 3, 0, 32, device=DEVICE), torch.randn(1, 3, 22, 32, device=DEVICE)
    none, all_keys = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (0, 22))
    named = dict(cu_seqlens_q=none, cu_seqlens_kv=all_keys, max_seqlen_q=4, max_seqlen_kv=22)
    out, row_max = flashjit.attention(q, k, k, return_row_max=True, **named)
    assert out.shape == (1, 3, 0, 32) and row_max.shape == (1, 3, 0)

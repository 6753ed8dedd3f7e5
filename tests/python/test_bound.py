"""bind(): a bound call gives what attention() gives, of other tensors of the same form, and refuses all others."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def rand(*size, dtype=None):
    return torch.randn(size).to(DEVICE, dtype or DTYPE)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tensors(queries=37, keys=61, batch=2):
    return rand(batch, 4, queries, 64), rand(batch, 2, keys, 64), rand(batch, 2, keys, 64)


def paged():
    """64 rows in pages of 16, for two sequences of packed queries."""
    q = rand(9, 4, 64).transpose(0, 1)[None]
    pages = rand(4, 16, 2, 2, 64).permute(3, 0, 2, 1, 4)  # K and V in one tensor
    given = dict(
        causal=True,
        page_table=torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=DEVICE),
        kv_lengths=ints(20, 31),
        cu_seqlens_q=ints(0, 4, 9),
        max_seqlen_q=5,
    )
    return q, *pages, given


def same(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True, scale=0.2, return_lse=True),
        dict(window=(9, 0), softcap=4.0, return_row_max=True),
        dict(return_lse=True, return_row_max=True, batch_invariant=True),
        dict(out_dtype=torch.float32, sinks=torch.tensor([0.1, 2.0, -1.0, 0.0], device=DEVICE)),
        dict(score_mod=lambda score, b, h, q, kv: score + 0.1 * (q - kv)),
        dict(weight_mod=lambda score, b, h, q, kv: torch.sigmoid(score)),
        dict(out_mod=lambda out, b, h, q, column: out * torch.sigmoid(out)),
        dict(q_mod=lambda row, b, h, q, column: row[column ^ 1], k_mod="element * to_float(kv)"),
    ],
    ids=lambda options: ", ".join(options) or "none",
)
@torch.no_grad()
def test_it_gives_what_attention_gives(options):
    call = flashjit.bind(*tensors(), **options)
    for _ in range(2):
        given = tensors()
        same(call(*given), flashjit.attention(*given, **options))


@torch.no_grad()
def test_results_in_the_callers_memory():
    q, k, v = tensors()
    kept = torch.full_like(q, math.nan)
    call = flashjit.bind(q, k, v, out=kept)
    assert call(q, k, v) is kept
    want, want_lse = flashjit.attention(q, k, v, return_lse=True)
    assert torch.equal(kept, want)
    out, lse = (
        torch.empty(2, 37, 4, 64, device=DEVICE, dtype=DTYPE).transpose(1, 2),
        torch.empty(2, 4, 37, device=DEVICE),
    )
    got = call(q, k, v, out=out, lse=lse)
    assert got[0] is out and got[1] is lse and torch.equal(out, want) and torch.equal(lse, want_lse)
    both = flashjit.bind(q, k, v, out=kept, lse=lse)
    got = both(q, k, v, out=out.fill_(math.nan))
    assert got[0] is out and got[1] is lse and torch.equal(out, want)
    with pytest.raises(flashjit.InvalidArgument, match=r"out is .*: it must be .*\[2, 4, 37, 64\]"):
        call(q, k, v, out=torch.empty(2, 4, 36, 64, device=DEVICE, dtype=DTYPE))


@torch.no_grad()
def test_lengths_and_tables_change_from_call_to_call():
    q, k, v, given = paged()
    call = flashjit.bind(q, k, v, **given, return_lse=True)
    same(call(q, k, v), flashjit.attention(q, k, v, **given, return_lse=True))
    changed = dict(page_table=given["page_table"].flip(0), kv_lengths=ints(32, 5), cu_seqlens_q=ints(0, 5, 8))
    want = flashjit.attention(q, k, v, **{**given, **changed}, return_lse=True)
    same(call(q, k, v, **changed), want)
    given["kv_lengths"].copy_(ints(17, 18))  # the tensors of bind(), whose values are read anew
    same(call(q, k, v), flashjit.attention(q, k, v, **given, return_lse=True))


@torch.no_grad()
def test_page_tables_in_csr():
    q, k, v, given = paged()
    given["page_table"] = (ints(0, 2, 4), ints(2, 0, 1, 3))
    call = flashjit.bind(q, k, v, **given, max_seqlen_kv=32)
    other = (ints(0, 2, 4), ints(1, 3, 2, 0))
    want = flashjit.attention(q, k, v, **{**given, "page_table": other}, max_seqlen_kv=32)
    same(call(q, k, v, page_table=other), want)
    with pytest.raises(flashjit.InvalidArgument, match="page_table has 3 parts"):
        call(q, k, v, page_table=(*other, given["kv_lengths"]))
    if DEVICE == "cpu":
        with pytest.raises(flashjit.InvalidArgument, match="more keys than its own pages"):
            call(q, k, v, page_table=(ints(0, 3, 4), other[1]))
    lengths = given.pop("kv_lengths")
    with pytest.raises(flashjit.Unsupported, match="last_page_len.*: give .* and kv_lengths"):
        flashjit.bind(q, k, v, **{**given, "page_table": (*other, lengths % 16)}, max_seqlen_kv=32)


@torch.no_grad()
def test_latents_sparse_tokens_and_eight_bits():
    q, k = rand(2, 4, 5, 128), rand(2, 1, 40, 128)
    lists = torch.randint(-1, 40, (2, 5, 1, 7), dtype=torch.int32, device=DEVICE)
    call = flashjit.bind(q, k, v_columns=64, indices=lists)
    same(call(q, k), flashjit.attention(q, k, v_columns=64, indices=lists))
    other = lists.flip(1)
    same(call(q, k, indices=other), flashjit.attention(q, k, v_columns=64, indices=other))
    with pytest.raises(flashjit.InvalidArgument, match="v is given, but bind.* v_columns"):
        call(q, k, k)
    q, k, v = (
        rand(2, 4, 5, 64, dtype=torch.bfloat16),
        *(rand(2, 2, 40, 64).to(torch.float8_e4m3fn) for _ in "kv"),
    )
    scales = dict(k_scale=torch.tensor(0.5, device=DEVICE), v_scale=torch.rand(2, 2, device=DEVICE))
    call = flashjit.bind(q, k, v, **scales)
    scales["v_scale"].mul_(2)
    same(call(q, k, v), flashjit.attention(q, k, v, **scales))


@torch.no_grad()
def test_dropout_draws_at_each_call():
    q, k, v = tensors()
    torch.manual_seed(3)
    call = flashjit.bind(q, k, v, dropout_p=0.5)
    got = call(q, k, v), call(q, k, v)
    torch.manual_seed(3)
    want = [flashjit.attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and not torch.equal(*got)


@torch.no_grad()
def test_captured_tensors_are_read_anew():
    q, k, v = tensors()
    slopes = torch.rand(4, device=DEVICE)
    mod = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
    call = flashjit.bind(q, k, v, score_mod=mod)
    slopes.neg_()
    same(call(q, k, v), flashjit.attention(q, k, v, score_mod=mod))


OTHERS = {
    "q's length": (
        lambda q, k, v: (q[:, :, :36], k, v),
        r"q is .*\[2, 4, 36, 64\].* bound for .*\[2, 4, 37, 64\]",
    ),
    "no rows": (lambda q, k, v: (q[:, :, :0], k, v), r"q is .*\[2, 4, 0, 64\].* bound for"),
    "no keys": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), r"k is .*\[2, 2, 0, 64\].* bound for"),
    "k's strides": (
        lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        "k is .* strides",
    ),
    "v's type": (lambda q, k, v: (q, k, v.half()), "v is float16 .*: this call was bound for"),
    "alignment": (
        lambda q, k, v: (torch.cat([q.flatten(), q.flatten()[:1]])[1:].view(q.shape), k, v),
        "begins at a multiple of 16 bytes",
    ),
    "a negative view": (lambda q, k, v: (torch._neg_view(q), k, v), "no negative view"),
    "no memory": (lambda q, k, v: (q.to("meta"), k, v), "q is .* on meta"),
    "no tensor": (lambda q, k, v: (q.tolist(), k, v), "q is a list: give a torch.Tensor"),
    "a subclass": (
        lambda q, k, v: (q.as_subclass(type("Sub", (torch.Tensor,), {})), k, v),
        "q is a Sub: a bound call takes plain tensors",
    ),
    "no v": (lambda q, k, v: (q, k), "v is missing"),
    "gradients": (lambda q, k, v: (q.clone().requires_grad_(), k, v), "a bound call has no derivatives"),
}


@pytest.mark.parametrize("other, match", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_refused(other, match):
    q, k, v = tensors()
    call = flashjit.bind(q, k, v)
    with pytest.raises(flashjit.Error, match=match):
        call(*other(q, k, v))
    same(call(q, k, v), flashjit.attention(q, k, v))


def test_tangents_are_refused():
    from torch.autograd import forward_ad

    q, k, v = tensors()
    call = flashjit.bind(q, k, v)
    with forward_ad.dual_level(), pytest.raises(flashjit.Unsupported, match="no derivatives"):
        call(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_others_of_another_form_are_refused():
    q, k, v, given = paged()
    call = flashjit.bind(q, k, v, **given)
    for changed, match in (
        (dict(kv_lengths=ints(1, 2, 3)), r"kv_lengths is int32 \[3\].* bound for int32 \[2\]"),
        (dict(kv_lengths=given["kv_lengths"].long()), "kv_lengths is int64"),
        (dict(kv_lengths=given["kv_lengths"][:0]), r"kv_lengths is int32 \[0\]"),
        (dict(page_table=[[2, 0], [1, 3]]), "page_table is a list"),
        (
            dict(sinks=rand(4)),
            "sinks is given, but a bound call takes q, k, v, out, lse, workspace, kv_lengths",
        ),
        (dict(causal=False), "causal is given, but a bound call takes"),
    ):
        with pytest.raises(flashjit.Error, match=match):
            call(q, k, v, **changed)


def test_what_cannot_be_bound_is_refused():
    q, k, v = tensors()
    state = rand(*q.shape, dtype=torch.float32), rand(2, 4, 37, dtype=torch.float32)
    columns = rand(2, 4, 64, 37).transpose(2, 3)
    for arguments, options, match in (
        ((q, k, v), dict(state=state), "state changes from call to call"),
        ((columns, k, v), {}, "q has the strides .* where they"),
        ((q, k, v), dict(sinks=rand(4, dtype=torch.float16)), "sinks is float16 .*: give it as float32"),
        ((q, k, v), dict(kv_lengths=ints(1, 9, 2, 9)[::2], causal="top_left"), "is not contiguous"),
        ((q.as_subclass(type("Sub", (torch.Tensor,), {})), k, v), {}, "bind.. is not for tensor subclasses"),
        ((q, k, v), dict(window_size=(1, 0)), "no argument window_size"),
    ):
        with pytest.raises(flashjit.Error, match=match):
            flashjit.bind(*arguments, **options)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(flashjit.Unsupported, match="torch.autocast"),
    ):
        flashjit.bind(*(x.cpu().float() for x in (q, k, v)))


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are the GPU's")
@torch.no_grad()
def test_in_a_graph():
    q, k, v, given = paged()
    call = flashjit.bind(q, k, v, **given)
    call(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q, k, v)
    given["kv_lengths"].copy_(ints(9, 30))
    graph.replay()
    same(out, flashjit.attention(q, k, v, **given))


def test_strides_of_dimensions_of_one_element_do_not_count():
    q, k, v = (torch.randn(2, 4, n, 16) for n in (1, 24, 24))
    call = flashjit.bind(q, k, v)
    other = q.as_strided(q.shape, (64, 16, 128, 1))
    for _ in range(2):
        assert torch.equal(call(other, k, v), call(q, k, v))


def test_a_tensor_without_strides_is_refused_in_words():
    """PyTorch 2.11 ends the process where strides are compared by its assert_size_stride()."""
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    call = flashjit.bind(q, k, v)
    for wrong in (q.to_sparse(), torch.nested.nested_tensor([q[0], q[1]])):
        with pytest.raises((flashjit.Error, RuntimeError)):
            call(wrong, k, v)
        with pytest.raises((flashjit.Error, RuntimeError)):
            flashjit.attention(wrong, k, v)

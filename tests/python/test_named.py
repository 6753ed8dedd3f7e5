"""attention()'s window and soft cap by name: against masks and scores written out, on the GPU where there is one."""

import math

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
import flashjit  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exact(q, k, v, window=(None, None), softcap=None, causal=False):
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at = torch.arange(q.shape[2], device=q.device)[:, None]
    if causal != "top_left":
        at = at + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2], device=q.device)
    left, right = (math.inf if side in (None, -1) else side for side in window)
    hidden = (keys < at - left) | (keys > at + (min(right, 0) if causal else right))
    return (s.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0) @ v).float()


def tensors(queries=37, keys=61):
    torch.manual_seed(5)
    sizes = ((2, 4, queries, 64), (2, 2, keys, 64), (2, 2, keys, 64))
    return [(3 * torch.randn(size)).to(DEVICE) for size in sizes]


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (7, 0), [3, 5], (-1, 4), (9, None), (0, 0)])
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_window_and_softcap(causal, window, softcap):
    q, k, v = tensors()
    got = flashjit.attention(q, k, v, causal=causal, window=window, softcap=softcap)
    want = exact(q, k, v, window or (None, None), softcap, causal)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_their_gradients():
    q, k, v = (x.requires_grad_() for x in tensors())
    weight = torch.randn(2, 4, 37, 64, device=DEVICE)
    got = torch.autograd.grad(
        (flashjit.attention(q, k, v, window=(9, 2), softcap=3.0) * weight).sum(), (q, k, v)
    )
    want = torch.autograd.grad((exact(q, k, v, (9, 2), 3.0) * weight).sum(), (q, k, v))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)


def test_beside_programs_of_the_other_role():
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], device=DEVICE)
    got = flashjit.attention(q, k, v, window=(5, 0), score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i))
    want = flashjit.attention(
        q,
        k,
        v,
        score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i),
        mask_mod=lambda b, h, i, j: (j <= i + 24) & (j >= i + 24 - 5),
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got = flashjit.attention(q, k, v, softcap=2.0, mask_mod="kv % m == 0", captures={"m": 2})
    want = exact(q, k[:, :, ::2], v[:, :, ::2], softcap=2.0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_packed_sequences_have_windows_of_their_own():
    q, k, v = (x[:1].transpose(1, 2)[:, :37].transpose(1, 2) for x in tensors(37, 37))
    offsets = torch.tensor([0, 20, 37], dtype=torch.int32, device=DEVICE)
    got = flashjit.attention(
        q, k, v, window=(4, 0), cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=20, max_seqlen_kv=20
    )
    for begin, end in ((0, 20), (20, 37)):
        of = slice(begin, end)
        want = exact(q[:, :, of], k[:, :, of], v[:, :, of], (4, 0))
        torch.testing.assert_close(got[:, :, of], want, rtol=1e-4, atol=1e-4)


def test_with_padding_a_window_has_one_meaning():
    """That of a sequence's own last key and that of the tensor's are different windows."""
    q, k, v = tensors()
    lengths = torch.full((q.shape[0],), 5, dtype=torch.int32, device=DEVICE)
    for queries, window in ((1, (2, 0)), (2, (2, 0)), (2, (None, 1))):
        with pytest.raises(
            flashjit.InvalidArgument, match=r"window with kv_lengths.*two meanings.*cache=True"
        ):
            flashjit.attention(q[:, :, :queries], k, v, kv_lengths=lengths, window=window)
    for few, window, causal in ((q[:, :, :1], (None, 0), False), (q[:, :, :9], (2, 1), "top_left")):
        got = flashjit.attention(few, k, v, kv_lengths=lengths, window=window, causal=causal)
        want = exact(few, k[:, :, :5], v[:, :, :5], window, causal=causal)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_lists_take_them_too():
    q, k, v = tensors()
    lists = flashjit.TileLists(q, k, v, window=(5, 3), softcap=2.0)
    got = flashjit.attention(q, k, v, window=(5, 3), softcap=2.0, lists=lists)
    torch.testing.assert_close(got, exact(q, k, v, (5, 3), 2.0), rtol=1e-4, atol=1e-4)


def test_compiled():
    q, k, v = tensors()
    compiled = torch.compile(
        lambda q, k, v: flashjit.attention(q, k, v, window=(5, 3), softcap=2.0), fullgraph=True
    )
    torch.testing.assert_close(compiled(q, k, v), exact(q, k, v, (5, 3), 2.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "given, match",
    [
        (dict(window=5), r"window is 5: give \(left, right\)"),
        (dict(window=(1, 2, 3)), "window is .*: give"),
        (dict(window=(-2, 0)), r"window is \(-2, 0\): its sides are ints from 0"),
        (dict(window=(1.5, 0)), "its sides are ints"),
        (dict(window=(True, 0)), "its sides are ints"),
        (dict(window=np.array([3, 0])), r"window is array\(\[3, 0\]\): give \(left, right\)"),
        (dict(window=(np.array([3, 1]), 0)), "its sides are ints"),
        (dict(softcap=np.array([3.0, 1.0])), "softcap is a ndarray"),
        (dict(score_mod=np.zeros(2)), "score_mod is a ndarray: give a function"),
        (dict(mask_mod=np.zeros(2)), "mask_mod is a ndarray: give a function"),
        (dict(mask_mod=" "), "mask_mod is ' ': give an expression, or None"),
        (dict(score_mod=""), "score_mod is '': give an expression, or None"),
        (dict(softcap=-1.0), "softcap is -1.0: give a positive number"),
        (dict(softcap=math.nan), "softcap is nan"),
        (dict(softcap="2"), "softcap is a str"),
        (dict(window=(1, 0), mask_mod="kv > 0"), "window and mask_mod are both given"),
        (dict(softcap=1.0, score_mod="score * 2.0"), "softcap and score_mod are both given"),
        (
            dict(window=(1, 0), captures={"window_left": 1}, score_mod="score * 2.0"),
            "captures has 'window_left'",
        ),
    ],
)
def test_wrong_ones_are_refused(given, match):
    with pytest.raises(flashjit.Error, match=match):
        flashjit.attention(*tensors(), **given)

"""What a program gives each pair: by the library's reference, and by calling its function with PyTorch's tensors."""

import flashjit
import torch

BATCH, HEADS, QUERIES, KEYS = 2, 2, 4, 5


def raw_scores(seed=0):
    """Multiples of 1/8 from -3 to 3."""
    return (
        torch.randint(-24, 25, (BATCH, HEADS, QUERIES, KEYS), generator=torch.Generator().manual_seed(seed))
        / 8
    )


def of_library(score_mod=None, captures=None, scores=None):
    """[BATCH, HEADS, QUERIES, KEYS]: what a score_mod, a function or a text, makes of `scores`; each from an LSE of one key."""
    scores = raw_scores() if scores is None else scores
    q = torch.nn.functional.pad(scores, (0, 8 - KEYS))
    k = torch.eye(8)[:KEYS].expand(BATCH, HEADS, KEYS, 8).contiguous()
    lse = [
        flashjit.attention(
            q,
            k,
            k,
            scale=1.0,
            score_mod=score_mod,
            mask_mod="kv == only_key",
            return_lse=True,
            captures={**(captures or {}), "only_key": key},
        )[1]
        for key in range(KEYS)
    ]
    return torch.stack(lse, -1)


def mask_of_library(mask_mod, captures=None):
    """Which pairs attend."""
    q = torch.zeros(BATCH, HEADS, QUERIES, 8)
    k = torch.eye(8)[:KEYS].expand(BATCH, HEADS, KEYS, 8).contiguous()
    return flashjit.attention(q, k, k, mask_mod=mask_mod, captures=captures)[..., :KEYS] > 0


def of_eager(function, scores=None, dtype=torch.int32):
    """The same by PyTorch, pair by pair, as FlexAttention defines a score_mod (or, without scores, a mask_mod)."""
    out = torch.empty(BATCH, HEADS, QUERIES, KEYS)
    for place in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        positions = [torch.tensor(i, dtype=dtype) for i in place]
        out[tuple(place)] = function(*([] if scores is None else [scores[tuple(place)]]), *positions)
    return out


def check_score(function, tolerance=1e-5, scores=None):
    scores = raw_scores() if scores is None else scores
    torch.testing.assert_close(
        of_library(function, scores=scores),
        of_eager(function, scores),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
    )


def check_mask(function):
    assert torch.equal(mask_of_library(function), of_eager(function) != 0)

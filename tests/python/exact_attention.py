"""Attention in fp64, one sequence at a time."""

import math

import torch


def exact(
    q, k, v, scale=None, causal=False, window=-1, cap=0.0, slopes=None, seen=None, sinks=None, bias=None
):
    """O [queries, hq, d_v] and LSE [queries, hq] of q [queries, hq, d] and k, v [keys, hkv, d], the last query at the last key.

    slopes: of ALiBi, counted from the first query. seen: bool [queries, keys]. sinks: [hq]. bias: what scores get besides."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    at, key = torch.arange(len(q))[:, None], torch.arange(len(k))
    if slopes is not None:
        score = score + slopes.double()[:, None, None].cpu() * (key - at)
    if bias is not None:
        score = score + bias.double().cpu()
    if cap:
        score = cap * torch.tanh(score / cap)
    last = at + len(k) - len(q)
    kept = torch.ones(len(q), len(k), dtype=torch.bool) if seen is None else seen.cpu().bool()
    if causal:
        kept = kept & (key <= last)
    if window >= 0:
        kept = kept & (key >= last - window)
    score = score.masked_fill(~kept, -math.inf)
    more = [] if sinks is None else [sinks.double().cpu()[:, None, None].expand(-1, len(q), 1)]
    total = torch.cat([score, *more], 2).logsumexp(2)
    p = torch.where(kept, (score - total[..., None]).exp(), 0)
    return torch.einsum("hqk,khd->qhd", p, v), total.T

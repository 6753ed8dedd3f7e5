"""Measure masks of requests over a cache on one GPU: trees, pictures, chunks, flags and keys of a rank, each beside the causal call.

Keys lie in pages of 16 in a random order. Results are checked against PyTorch in fp32 before calls are timed; graphs take turns,
and medians count. A row's `pairs` is the share of the causal call's pairs that its mask keeps.

    python3 tools/bench/serving_masks.py --lib build/libflashjit.so --csv tools/bench/results/h200_serving_masks.csv

Exit code: 0 if everything ran and was right, 1 if not, 3 without GPU or PyTorch.
"""

import sys

import measuring
import serving
import torch


def parents_of(batch, queries, device):
    """A tree of drafts for each sequence: every query's parent is one before it, drawn at random."""
    draws = [torch.randint(0, i, (batch,)) if i else torch.full((batch,), -1) for i in range(queries)]
    return torch.stack(draws, 1).to(device)


def pictures(batch, queries, size, device):
    """Ranges of keys that the queries of a prefill see both ways: every second `size` tokens are a picture."""
    at = torch.arange(queries, device=device).expand(batch, -1)
    first = at // size * size
    inside = (at // size) % 2 == 1
    last = torch.where(inside, first + size, first)
    return first.int().contiguous(), last.int().contiguous()


def masks_of(flashjit, problem, device):
    """Name -> what attention() takes beside Q, K, V and the pages, and visible(b) -> bool [queries, keys]."""
    batch, queries, keys = len(problem.lengths), problem.queries, problem.lengths[0]
    q = torch.arange(queries, device=device)[:, None] + keys - queries
    kv = torch.arange(keys, device=device)[None]
    causal = kv <= q
    flags = torch.arange(batch, device=device, dtype=torch.int32) % 2
    found = {
        "causal": ({"causal": True}, lambda b: causal),
        "causal_if": ({"mask_mod": flashjit.masks.causal_if(flags)}, lambda b: causal | (flags[b] == 0)),
        "chunked": ({"mask_mod": flashjit.masks.chunked(1024)}, lambda b: causal & (kv // 1024 == q // 1024)),
    }
    at = (2 * q.T).int().expand(batch, -1).contiguous()  # this rank's keys are every second one
    found["interleaved"] = (
        {"mask_mod": flashjit.masks.interleaved(at, 2, 0)},
        lambda b: 2 * kv <= at[b][:, None],
    )
    if queries <= flashjit.masks.MOST_DRAFTS:
        parents = parents_of(batch, queries, device)
        bits = flashjit.masks.ancestors_of(parents)
        own = kv - (keys - queries)
        found["tree"] = (
            {"mask_mod": flashjit.masks.tree(parents)},
            lambda b: (own < 0) | ((bits[b][:, None] >> own.clamp(min=0)) & 1 == 1),
        )
    if queries == keys:
        first, last = pictures(batch, queries, 256, device)
        found["mm_prefix"] = (
            {"mask_mod": flashjit.masks.mm_prefix(first, last)},
            lambda b: causal | ((first[b][:, None] <= kv) & (kv < last[b][:, None])),
        )
    return found


def expected(q, k, v, visible):
    """O of one sequence in fp32: q [heads, queries, dim], k and v [heads_kv, keys, dim]."""
    k, v = (x.float().repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q.float() @ k.mT / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ v


def run_problem(report, problem, flashjit, rounds, device="cuda"):
    torch.manual_seed(len(problem.lengths))
    cache = serving.Cache(problem, device)
    batch = len(problem.lengths)
    q = torch.randn(batch, problem.heads, problem.queries, problem.dim, device=device, dtype=torch.bfloat16)
    k, v, table = cache.pages(16)
    where = {"page_table": table, "kv_lengths": cache.lengths}
    heads_first = lambda x: x.transpose(1, 2)
    calls, pairs = {}, {}
    for name, (option, visible) in masks_of(flashjit, problem, device).items():
        call = lambda option=option: flashjit.attention(q, heads_first(k), heads_first(v), **where, **option)
        out = call()
        for b in sorted({0, 1, batch - 1} & set(range(batch))):
            rows = slice(cache.starts[b], cache.starts[b] + problem.lengths[b])
            reference = expected(
                q[b], heads_first(cache.k[None, rows])[0], heads_first(cache.v[None, rows])[0], visible(b)
            )
            error = ((out[b].float() - reference).norm() / reference.norm()).item()
            if not error <= 0.01:
                report.failure(f"{problem.label()}: {name} is wrong by {error:.3g} in sequence {b}")
        calls[name] = [call]
        pairs[name] = sum(visible(b).sum().item() for b in range(min(batch, 2))) / min(batch, 2)
    if device == "cpu":
        return
    us = serving.microseconds(calls, rounds)
    for name, time in us.items():
        share, slower = pairs[name] / pairs["causal"], time / us["causal"]
        report.row(problem=problem.label(), mask=name, us=time, pairs=share, of_causal=slower)
        print(
            f"{problem.label():44} {name:10} {time:8.1f} us, {slower:.3f} of causal, {share:.3f} of its pairs",
            flush=True,
        )


def problems():
    for queries in (1, 4, 16):
        yield serving.Problem("64 x 4k", 128, 32, 8, queries, [4096] * 64)
    yield serving.Problem("64 x 4k", 64, 64, 8, 16, [4096] * 64)
    yield serving.Problem("4k prefill", 128, 32, 8, 4096, [4096] * 4)


@torch.no_grad()
def measure(report, flashjit, arguments):
    for problem in problems():
        measuring.guarded(report, problem.label(), run_problem, report, problem, flashjit, 15)


def main():
    columns = ["problem", "mask", "us", "pairs", "of_causal"]
    return measuring.command("serving_masks", measuring.parser_of(__doc__).parse_args(), columns, measure)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Decoding over latents with Q in two tensors, beside a cat before each call, and beside Q in one tensor, on one GPU.

    python3 tools/bench/q_rope.py --csv FILE

Each call is 20 times in a CUDA graph; graphs take turns, and medians count. Results of one and two tensors must be equal bit by bit, and
O near attention in fp64. Exit code: 0, 1 where a result is wrong, 3 where there is no GPU.
"""

import argparse
import csv
import statistics
import sys

import flashjit
import torch

HEADS_SEQUENCES_KEYS = ((16, 64, 4096), (64, 64, 4096), (128, 1, 8192), (128, 16, 4096), (128, 64, 4096))
DIM, V_DIM, PAGE, SCALE = 576, 512, 64, 192**-0.5
CALLS, ROUNDS, LIMIT = 20, 7, 5e-3


def calls_of(heads, sequences, keys, device="cuda"):
    """Name -> call, and O of one sequence in fp64."""
    like = dict(device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    pages = sequences * keys // PAGE
    cache = torch.randn(pages, 1, PAGE, DIM, **like)
    table = torch.randperm(pages, device=device).to(torch.int32).view(sequences, -1)
    # As engines have them: behind a product with the weight of K, and a part of a projection.
    nope = torch.randn(heads, sequences, V_DIM, **like).transpose(0, 1)[:, :, None]
    rope = torch.randn(sequences, heads, 192, **like)[..., -(DIM - V_DIM) :][:, :, None]
    q = torch.cat((nope, rope), -1)
    given = dict(v_columns=V_DIM, causal=True, scale=SCALE, page_table=table, max_seqlen_kv=keys)
    given["kv_lengths"] = torch.full((sequences,), keys, dtype=torch.int32, device=device)
    latents = cache[table[0].long()].reshape(keys, DIM).double()
    weights = (SCALE * q[0, :, 0].double() @ latents.T).softmax(-1)
    return {
        "one tensor": lambda: flashjit.attention(q, cache, **given),
        "two tensors": lambda: flashjit.attention(nope, cache, q_rope=rope, **given),
        "cat": lambda: flashjit.attention(torch.cat((nope, rope), -1), cache, **given),
    }, weights @ latents[:, :V_DIM]


def is_right(calls, exact):
    """Also compiles."""
    one, two, joined = (call() for call in calls.values())
    near = (two[0, :, 0].double() - exact).abs().max() < LIMIT
    return bool(near) and torch.equal(one, two) and torch.equal(one, joined)


def microseconds(calls):
    """Medians by name."""
    graphs, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("q_rope: PyTorch finds no GPU", file=sys.stderr)
        return 3
    rows, right = [], True
    for sizes in HEADS_SEQUENCES_KEYS:
        calls, exact = calls_of(*sizes)
        right = is_right(calls, exact) and right
        us = microseconds(calls)
        rows.append((torch.cuda.get_device_name(), *sizes, *(f"{us[name]:.1f}" for name in calls)))
        print(*rows[-1], f"{us['cat'] / us['two tensors']:.2f}", flush=True)
    with open(options.csv, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("device", "heads", "sequences", "keys", *(f"{name}, us" for name in calls)))
        writer.writerows(rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

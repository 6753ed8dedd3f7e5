#!/usr/bin/env python3
"""Prefills over a quantized cache: decoded by each Q tile, decoded once into the workspace, and over a cache in bf16, on one GPU.

    python3 tools/bench/decoded_cache.py --lib build/libflashjit.so --csv FILE [--only REGEX] [--rounds N]
    python3 tools/bench/decoded_cache.py --lib build/libflashjit.so --warm FORMAT    # compiles one format's kernels, for a cache
    python3 tools/bench/decoded_cache.py --tables FILE                               # the tables of FILE, without a GPU

32 heads over 8, d128, causal, pages of 64 whose rows follow each other. The speeds are over the one of bf16.
Exit code: 0, 3 where there is no GPU.
"""

import functools
import re
import sys

import flashjit
import torch
from flashjit._library import runtime
from kv_format_speed import DIM, HEADS, HEADS_KV, formats_of, run, run_once, stored
from measuring import interleaved_ms
from plot_rows import markdown, read

PAGE = 64
COLUMNS = ("problem", "format", "way", "us", "of_bf16")
FORMATS = ("fp8_e4m3", "q8_0", "int4:g32:fp16", "nvfp4", "kivi")
#: Name -> sequences, keys, queries of each.
PROBLEMS = {
    "prefill 4 x 4k": (4, 4096, 4096),
    "prefill 1 x 4k": (1, 4096, 4096),
    "prefill 8 x 1k": (8, 1024, 1024),
    "chunk 4 x 2k over 16k": (4, 16384, 2048),
    "chunk 4 x 512 over 16k": (4, 16384, 512),
    "chunk 4 x 256 over 16k": (4, 16384, 256),
    "chunk 4 x 128 over 16k": (4, 16384, 128),
}
#: What the heuristics choose on an H100 or H200, and with how many queries of a sequence they do not split keys.
TILES = "sm90:br128:bc128:w8:s2"
WAYS = {"tiles": ("", 1024), "once": (":decode_cache", 512)}
IN_TURNS = "once, a sequence a call, on two streams"  # so that one is decoded while another is computed


def prepare(way, formats, shape):
    """Tiles of a way for one shape: the ways differ by one page in the most keys."""
    switch, whole = WAYS[way]
    config = TILES + ("" if shape[3] >= whole else ":split") + switch
    spec = f"bf16:d{DIM}:causal:pages{PAGE}:k{{{formats[0]}}}:v{{{formats[1]}}}"
    runtime().prepare(spec, shape, config=config)


def in_turns(calls, streams):
    """Calls on streams in turn, as one call."""

    def run():
        begin = torch.cuda.current_stream().record_event()
        for stream in streams:
            stream.wait_event(begin)
        for i, call in enumerate(calls):
            with torch.cuda.stream(streams[i % len(streams)]):
                call()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return run


def calls_of(problem, only, device):
    """(format, way) -> call."""
    batch, keys, queries = PROBLEMS[problem]
    if device == "cpu":
        batch, keys, queries = 2, 128, 16
    torch.manual_seed(3)
    q = torch.randn(batch, HEADS, queries, DIM, device=device, dtype=torch.bfloat16)
    count = batch * keys // PAGE
    k, v = torch.randn(2, count, HEADS_KV, PAGE, DIM, device=device, dtype=torch.bfloat16)
    table = torch.randperm(count, device=device).int().view(batch, -1)
    lengths = torch.full((batch,), keys, device=device, dtype=torch.int32)
    given = {"causal": True, "kv_lengths": lengths}
    calls = {("bf16", "16 bits"): functools.partial(flashjit.attention, q, k, v, page_table=table, **given)}
    for name in FORMATS:
        if not re.search(only, name):
            continue
        formats = formats_of(name, PAGE)
        (k_codes, of_k), (v_codes, of_v) = (
            stored(which, form, x) for which, form, x in zip("kv", formats, (k, v), strict=True)
        )
        for i, way in enumerate(WAYS):
            wider = torch.cat([table, table[:, :i]], 1).contiguous()
            if device == "cuda":
                prepare(way, formats, (batch, HEADS, HEADS_KV, queries, keys + i * PAGE))
            calls[name, way] = functools.partial(
                flashjit.attention, q, k_codes, v_codes, page_table=wider, **given, **of_k, **of_v
            )
        if device == "cuda" and queries == 512:
            prepare("once", formats, (1, HEADS, HEADS_KV, queries, keys))
            parts = [
                functools.partial(
                    flashjit.attention,
                    q[b : b + 1],
                    k_codes,
                    v_codes,
                    page_table=table[b : b + 1],
                    causal=True,
                    kv_lengths=lengths[b : b + 1],
                    **of_k,
                    **of_v,
                )
                for b in range(batch)
            ]
            calls[name, IN_TURNS] = in_turns(parts, [torch.cuda.Stream() for _ in range(2)])
    return calls


def measure(options, device):
    for problem in filter(options.problems.search, PROBLEMS):
        calls = calls_of(problem, options.only, device)
        found = interleaved_ms(calls, options.rounds)
        for (name, way), ms in found.items():
            yield problem, name, way, 1e3 * ms, found["bf16", "16 bits"] / ms


def tables(path):
    rows = read(path)
    for problem in PROBLEMS:
        lines = [
            [f"`{row['format']}`", row["way"], f"{float(row['us']):.0f}", f"{float(row['of_bf16']):.2f}"]
            for row in rows
            if row["problem"] == problem
        ]
        print(f"\n{problem}:\n\n{markdown(['format', 'decoded by', 'us', 'speed over bf16'], lines)}")


def warm(options, device):
    for problem in filter(options.problems.search, PROBLEMS):
        run_once(calls_of(problem, options.only, device))


def shown(row):
    return f"{row[0]} {row[1]} {row[2]}: {row[3]:.1f} us, {row[4]:.2f}"


if __name__ == "__main__":
    sys.exit(run(__doc__, COLUMNS, measure, warm, tables, shown))

#!/usr/bin/env python3
"""Speed of attention over a cache in each KV format beside one in bf16, and of append() beside a copy of as many bytes, on one GPU.

    python3 tools/bench/kv_format_speed.py --lib build/libflashjit.so --csv FILE [--only REGEX] [--problems REGEX] [--rounds N]
    python3 tools/bench/kv_format_speed.py --lib build/libflashjit.so --warm FORMAT    # compiles one format's kernels, for a cache
    python3 tools/bench/kv_format_speed.py --tables FILE                               # the tables of FILE, without a GPU

Decode is 64 sequences of 4k keys, one query each; prefill 4 sequences of 4k; a chunk 512 queries over 16k keys of 4 sequences: 32
heads over 8, d128, pages whose rows follow each other. K and V of "kivi" are uint2:keys<n>:fp16:min and uint2:g32:fp16:min.
append() writes 512 keys of 8 sequences; the copy reads and writes as many bytes as it does.
Exit code: 0, 3 where there is no GPU.
"""

import argparse
import csv
import functools
import os
import re
import sys

import flashjit
import torch
from measuring import interleaved_ms
from plot_rows import markdown, read

HEADS, HEADS_KV, DIM = 32, 8, 128
COLUMNS = ("problem", "format", "us", "of_bf16", "bytes")
FORMATS = (
    "fp8_e4m3",
    "e4m3:g128:fp32",
    "mxfp8",
    "q8_0",
    "int4:g32:fp16",
    "uint4:g32:fp16:zero=uint4",
    "nvfp4",
    "e2m1:g16:e4m3:apart:scaled",
    "mxfp4",
    "q4_0",
    "q5_0",
    "kivi",
    "decode4(select(code < 8, 1.0, -1.0) * (exp2((code & 7) * scale) - 1.0)):g32:fp16",
)
PREFILL_FORMATS = ("fp8_e4m3", "int4:g32:fp16", "nvfp4")
#: Name -> sequences, keys of each, queries of each, rows of a page, formats.
PROBLEMS = {
    "decode 64 x 4k, pages of 64": (64, 4096, 1, 64, FORMATS),
    "decode 64 x 4k, pages of 16": (64, 4096, 1, 16, FORMATS),
    "prefill 4 x 4k": (4, 4096, 4096, 64, PREFILL_FORMATS),
    "chunk 4 x 512 over 16k": (4, 16384, 512, 64, PREFILL_FORMATS),
}
APPEND = "append 8 x 512"


def formats_of(name, page):
    """Formats of K and V."""
    if name == "kivi":
        return f"uint2:keys{min(page, 32)}:fp16:min", "uint2:g32:fp16:min"
    return name, name


def stored(name, form, x):
    """Arguments of K or V: pages [pages, heads, rows, dim] in a format."""
    given = {f"{name}_format": form}
    if "apart" in form or ":keys" in form:
        given[f"{name}_block_scale"] = flashjit.KvFormat(form).block_scales(x.shape, x.device)
    scales = {"scales": "tensor"} if flashjit.KvFormat(form).has_scale else {}
    codes, scale = flashjit.quantize(x, format=form, block_scale=given.get(f"{name}_block_scale"), **scales)
    if scale is not None:
        given[f"{name}_scale"] = scale
    return codes, given


def attention_calls(problem, only, device):
    """Format -> (call, bytes of K and V)."""
    batch, keys, queries, page, names = PROBLEMS[problem]
    if device == "cpu":
        batch, keys, queries = 2, 128, min(queries, 16)
    torch.manual_seed(3)
    q = torch.randn(batch, HEADS, queries, DIM, device=device, dtype=torch.bfloat16)
    pages = [
        torch.randn(batch * keys // page, HEADS_KV, page, DIM, device=device, dtype=torch.bfloat16)
        for _ in "kv"
    ]
    table = torch.randperm(batch * keys // page, device=device).int().view(batch, -1)
    lengths = torch.full((batch,), keys, device=device, dtype=torch.int32)
    given = {"causal": True, "kv_lengths": lengths, "page_table": table}
    calls = {
        "bf16": (functools.partial(flashjit.attention, q, *pages, **given), sum(x.nbytes for x in pages))
    }
    for name in names:
        if not re.search(only, name):
            continue
        made, more = [], {}
        for which, form, x in zip("kv", formats_of(name, page), pages):
            codes, own = stored(which, form, x)
            made.append(codes)
            more.update(own)
        size = sum(x.nbytes for x in made) + sum(x.nbytes for n, x in more.items() if "block" in n)
        calls[name] = (functools.partial(flashjit.attention, q, *made, **given, **more), size)
    return calls


def append_calls(only, device):
    """Format -> (call, a copy of as many bytes)."""
    batch, new, page = 8, 512 if device == "cuda" else 16, 16
    size = (batch * new // page, HEADS_KV, page, DIM)
    k, v = torch.randn(2, batch, HEADS_KV, new, DIM, device=device, dtype=torch.bfloat16)
    table = torch.randperm(size[0], device=device).int().view(batch, -1)
    lengths = torch.full((batch,), new, device=device, dtype=torch.int32)
    given = {"kv_lengths": lengths, "page_table": table}
    calls = {}
    for name in ("bf16", *[name for name in FORMATS if name != "kivi" and re.search(only, name)]):
        caches, more = [], {}
        for which in "kv":
            if name == "bf16":
                caches.append(torch.zeros(size, device=device, dtype=torch.bfloat16))
                continue
            codes, own = stored(which, name, torch.ones(size, device=device, dtype=torch.bfloat16))
            caches.append(codes)
            more.update(own)
        written = sum(x.nbytes for x in caches) + sum(x.nbytes for n, x in more.items() if "block" in n)
        source = torch.zeros((k.nbytes + v.nbytes + written) // 2, device=device, dtype=torch.uint8)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        calls[name] = (functools.partial(flashjit.append, k, v, *caches, **given, **more), copy, written)
    return calls


def measure(options, device):
    times = (lambda calls: interleaved_ms(calls, options.rounds)) if device == "cuda" else run_once
    for problem in filter(options.problems.search, PROBLEMS):
        calls = attention_calls(problem, options.only, device)
        found = times({name: call for name, (call, _) in calls.items()})
        for name, (_, size) in calls.items():
            yield problem, name, 1e3 * found[name], found["bf16"] / found[name], size
    if not options.problems.search(APPEND):
        return
    for name, (call, copy, size) in append_calls(options.only, device).items():
        found = times({"append": call, "copy": copy})
        yield APPEND, name, 1e3 * found["append"], found["append"] / found["copy"], size


def run_once(calls):
    for call in calls.values():
        call()
    return dict.fromkeys(calls, 1e-3)


def tables(path):
    rows = read(path)
    for problem in (*PROBLEMS, APPEND):
        of = "append over copy" if problem == APPEND else "speed over bf16"
        lines = [
            [f"`{row['format']}`", f"{float(row['us']):.0f}", f"{float(row['of_bf16']):.2f}"]
            for row in rows
            if row["problem"] == problem
        ]
        print(f"\n{problem}:\n\n{markdown([problem.split(',')[0], 'us', of], lines)}")


def run(doc, columns, measure, warm, tables, shown):
    """The command of a benchmark of formats: its exit code. measure(options, device): rows of `columns`; shown(row) is
    printed; warm(options, device): compiles one format's kernels; tables(path)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", help="libflashjit.so, as FLASHJIT_LIBRARY")
    parser.add_argument("--csv", help="also write the rows here")
    parser.add_argument("--only", default="", help="formats that match; bf16 is always there")
    parser.add_argument(
        "--problems", type=re.compile, default="", help="problems that match, such as append; by default all"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", help="call each problem once in this format, to compile its kernels")
    parser.add_argument("--tables", help="print the tables of a file")
    options = parser.parse_args()
    if options.tables:
        return tables(options.tables)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.warm:
        print("no GPU", file=sys.stderr)
        return 3
    if options.lib:
        from measuring import use_library

        use_library(options.lib)
    if options.warm:
        options.only = f"^{re.escape(options.warm)}$"
        warm(options, device)
        return 0
    with open(options.csv or os.devnull, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in measure(options, device):
            writer.writerow(dict(zip(columns, row, strict=True)))
            file.flush()
            print(shown(row), flush=True)
    return 0


def warm(options, device):
    for problem in filter(options.problems.search, PROBLEMS):
        calls = attention_calls(problem, options.only, device)
        run_once({name: call for name, (call, _) in calls.items()})
    if options.problems.search(APPEND):
        run_once({name: made[0] for name, made in append_calls(options.only, device).items()})


def shown(row):
    return f"{row[0]} {row[1]}: {row[2]:.1f} us, {row[3]:.2f}, {row[4] / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(run(__doc__, COLUMNS, measure, warm, tables, shown))

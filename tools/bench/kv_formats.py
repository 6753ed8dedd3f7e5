#!/usr/bin/env python3
"""How far attention over a quantized cache is from attention over a 16-bit one, for each KV format, on the CPU reference.

    tools/bench/kv_formats.py [--rows N] [--plot FILE]

Prints the table of tools/docs/cache-formats.md: bytes of a row of 128 columns, and the error of O, the root of the mean
square over the same of O, for three kinds of keys: normal; with outlier channels, four columns 20 times as large; and strong
keys, one of 64 keys ten times as large.
"""

import argparse

import flashjit
import torch

DIM, HEADS, QUERIES = 128, 2, 16
FORMATS = [
    "e4m3",
    "e5m2",
    "int8",
    "q8_0",
    "mxfp8",
    "e4m3:g64:fp32:tail64",
    "nvfp4",
    "mxfp4",
    "iq4_nl",
    "q4_0",
    "q4_1",
    "int4:row:fp16",
    "int4:g32:fp16",
    "int4:g32:fp16:zero",
    "uint2:g32:fp16:min",
]


def inputs(kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, HEADS, length, DIM, dtype=torch.bfloat16) for length in (QUERIES, rows, rows))
    if kind == "outlier channels":
        k[..., :4] *= 20
    if kind == "strong keys":
        k[:, :, ::64] *= 10
    return q, k, v


def error(form: str, kind: str, rows: int) -> float:
    q, k, v = inputs(kind, rows)
    exact = flashjit.attention(q, k, v, out_dtype=torch.float32)
    (k_rows, k_scale), (v_rows, v_scale) = (flashjit.quantize(x, format=form) for x in (k, v))
    out = flashjit.attention(
        q,
        k_rows,
        v_rows,
        k_format=form,
        v_format=form,
        k_scale=k_scale,
        v_scale=v_scale,
        out_dtype=torch.float32,
    )
    return ((out - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


KINDS = ("normal", "outlier channels", "strong keys")


def plot(table: dict[str, list[float]], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    names = [f"{form} ({flashjit.KvFormat(form).row_bytes(DIM)} bytes)" for form in table]
    for i, kind in enumerate(KINDS):
        axes.plot([errors[i] for errors in table.values()], names, "os^"[i], label=kind)
    axes.set(xlabel="relative error of O", xscale="log")
    axes.invert_yaxis()
    axes.grid(alpha=0.4)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024, help="keys")
    parser.add_argument("--plot", help="also draw the table into this file, by matplotlib")
    options = parser.parse_args()
    table = {}
    print("| format | bytes of a row | " + " | ".join(KINDS) + " |\n|---|---|---|---|---|")
    for form in FORMATS:
        table[form] = [error(form, kind, options.rows) for kind in KINDS]
        errors = " | ".join(f"{x:.2g}" for x in table[form])
        print(f"| `{form}` | {flashjit.KvFormat(form).row_bytes(DIM)} | {errors} |", flush=True)
    if options.plot:
        plot(table, options.plot)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How far attention over a quantized cache is from attention over a 16-bit one, for each KV format, on the CPU reference,
or on a GPU.

    tools/bench/kv_formats.py [--rows N ...] [--plot FILE] [--device cuda] [--csv FILE] [--formats NAME ...]

Prints the table of tools/docs/cache-formats.md: bytes of a row of 128 columns, and the error of O, the root of the mean
square over the same of O, for three kinds of keys: normal; with outlier channels, four columns 20 times as large; and strong
keys, one of 64 keys ten times as large.
"""

import argparse
import csv
from typing import Any

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
    "q5_0",
    "q5_1",
    "int4:row:fp16",
    "int4:g32:fp16",
    "int4:g32:fp16:zero",
    "uint4:g32:fp16:zero=uint4",
    "uint3:g32:fp16:min",
    "book(-2.152,-1.344,-0.756,-0.245,0.245,0.756,1.344,2.152):g32:fp16",
    "uint2:g32:fp16:min",
    "uint4:keys32:fp16:min",
    "uint2:keys32:fp16:min",
]


def format_of_v(form: str) -> str:
    """Where K's keys share scales V has blocks of a row, as in KIVI."""
    return form.replace(":keys", ":g")


def inputs(kind: str, rows: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, HEADS, length, DIM, dtype=torch.bfloat16) for length in (QUERIES, rows, rows))
    if kind == "outlier channels":
        k[..., :4] *= 20
    if kind == "strong keys":
        k[:, :, ::64] *= 10
    return [x.to(device) for x in (q, k, v)]


def over_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: str, **how: Any) -> torch.Tensor:
    """O, fp32, over rows of K and V that are quantized to a format."""
    block_scale = flashjit.KvFormat(form).block_scales(k.shape, k.device) if ":keys" in form else None
    k_rows, k_scale = flashjit.quantize(k, format=form, block_scale=block_scale)
    v_rows, v_scale = flashjit.quantize(v, format=format_of_v(form))
    return flashjit.attention(
        q,
        k_rows,
        v_rows,
        k_format=form,
        v_format=format_of_v(form),
        k_block_scale=block_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out_dtype=torch.float32,
        **how,
    )


def error(form: str, kind: str, rows: int, device: str) -> float:
    q, k, v = inputs(kind, rows, device)
    exact = flashjit.attention(q, k, v, out_dtype=torch.float32)
    out = over_rows(q, k, v, form)
    return ((out - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


def bytes_of_row(form: str, dim: int = DIM) -> int:
    """With the row's part of scales that keys share."""
    known = flashjit.KvFormat(form)
    if ":keys" not in form:
        return known.row_bytes(dim)
    keys = int(form.partition(":keys")[2].partition(":")[0])
    return known.row_bytes(dim) + known.block_scales((1, 1, keys, dim)).nbytes // keys


KINDS = ("normal", "outlier channels", "strong keys")


def plot(table: dict[str, list[float]], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    names = [f"{form} ({bytes_of_row(form)} bytes)" for form in table]
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
    parser.add_argument("--rows", type=int, nargs="+", default=[1024], help="keys")
    parser.add_argument("--plot", help="also draw the table of the last --rows into this file, by matplotlib")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for long rows")
    parser.add_argument("--csv", help="also write errors into this file")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    options = parser.parse_args()
    found = []
    for rows in options.rows:
        table = {}
        print(
            f"{rows} keys:\n\n| format | bytes of a row | " + " | ".join(KINDS) + " |\n|---|---|---|---|---|"
        )
        for form in options.formats:
            table[form] = [error(form, kind, rows, options.device) for kind in KINDS]
            errors = " | ".join(f"{x:.2g}" for x in table[form])
            print(f"| `{form}` | {bytes_of_row(form)} | {errors} |", flush=True)
            found += [(rows, form, kind, f"{x:.4g}") for kind, x in zip(KINDS, table[form])]
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("rows", "format", "kind", "error"))
            writer.writerows(found)
    if options.plot:
        plot(table, options.plot)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Perplexity and logits of the examples' GPT with its KV cache in each format, beside a cache of 16 bits.

    tools/bench/kv_perplexity.py [--steps 200] [--csv FILE] [--plot FILE] [--formats NAME ...] [sizes of the model]

Trains the GPT of tools/examples/python/small_gpt.py on this repository's text but its last part, with PyTorch's attention, then
reads windows of that part with flashjit's, K and V in a bf16 cache and in each format. Perplexity is of a byte; the error of
logits is the root of the mean square of their difference over that of the logits, each row's mean taken off. Prints the table of
tools/docs/cache-formats.md. On a CPU it takes some minutes.
"""

import argparse
import csv
import math
import pathlib
import sys

import flashjit
import torch
import torch.nn.functional as F
from kv_formats import FORMATS, bytes_of_row, over_rows

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples/python"))
import small_gpt  # noqa: E402

HELD_OUT = 1 << 16  # bytes


def over_cache(form):
    """Causal attention over K and V in a format, or in bf16."""

    def attention(q, k, v):
        q, k, v = (x.bfloat16() for x in (q, k, v))
        if form == "bf16":
            return flashjit.attention(q, k, v, causal=True, out_dtype=torch.float32)
        return over_rows(q, k, v, form, causal=True)

    return attention


@torch.no_grad()
def logits_of(model, windows, form):
    for block in model.blocks:
        block.attention = over_cache(form)
    logits = torch.cat([model(window[None, :-1]) for window in windows]).double()
    return logits - logits.mean(-1, keepdim=True)


def perplexity(logits, windows):
    return math.exp(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item())


def measure(options):
    """Rows of the table: format, bytes of a row of K, perplexity, error of the logits."""
    text = small_gpt.corpus()
    model = small_gpt.train("pytorch", text[:-HELD_OUT], options, options.steps)[2].eval()
    first = torch.linspace(0, HELD_OUT - options.length - 1, options.windows).long()
    windows = text[-HELD_OUT:][first[:, None] + torch.arange(options.length + 1)].long().to(options.device)
    exact = logits_of(model, windows, "bf16")
    dim = options.width // options.heads
    yield "bf16", 2 * dim, perplexity(exact, windows), 0.0
    for form in options.formats:
        logits = logits_of(model, windows, form)
        error = ((logits - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()
        yield form, bytes_of_row(form, dim), perplexity(logits, windows), error


def plot(rows, file):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (of_text, of_logits) = pyplot.subplots(1, 2, figsize=(9, 5), sharey=True)
    short = lambda form: (
        form if len(form) < 30 else form.partition("(")[0] + "(...)" + form.rpartition(")")[2]
    )
    names = [f"{short(form)} ({size} bytes)" for form, size, *_ in rows]
    of_text.plot([found for *_, found, _ in rows], names, "o")
    of_text.axvline(rows[0][2], color="gray", linestyle="--", label="bf16 cache")
    of_text.set(xlabel="perplexity of a byte")
    of_text.legend()
    of_logits.plot([error for *_, error in rows[1:]], names[1:], "o")
    of_logits.set(xlabel="relative error of logits", xscale="log")
    of_text.invert_yaxis()
    for axes in (of_text, of_logits):
        axes.grid(alpha=0.4)
    figure.tight_layout()
    figure.savefig(file)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--windows", type=int, default=16, help="of text that is read")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--csv", help="also write the table into this file")
    parser.add_argument("--plot", help="also draw it into this file, by matplotlib")
    small_gpt.add_options(parser)
    parser.set_defaults(layers=4, width=256, heads=2, length=256, batch=8, device="cpu")
    options = parser.parse_args()
    rows = []
    print("| format | bytes of a row | perplexity | error of logits |\n|---|---|---|---|")
    for row in measure(options):
        rows.append(row)
        form, size, found, error = row
        print(f"| `{form}` | {size} | {found:.3f} | {error:.2g} |", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("format", "bytes", "perplexity", "logit_error"))
            writer.writerows((form, size, f"{x:.4f}", f"{error:.4g}") for form, size, x, error in rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()

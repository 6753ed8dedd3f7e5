"""Trains a small GPT on this repository's own text, once with flashjit and once with PyTorch's attention, from the same
seed: the loss curves coincide, and the tokens per second can be compared.

    python3 tools/examples/python/gpt.py --seconds 90 --csv gpt.csv --png gpt.png

About 12 million parameters (small_gpt.py), bf16 by autocast, causal attention with heads of 64. Needs a GPU; --device cpu
with small sizes uses the CPU reference, to see that everything is wired up. Exit code: 1 if the curves diverge.
"""

import argparse
import sys
import time

import small_gpt
import tables
import torch
from small_gpt import ATTENTION, train


def steps_within(text, options):
    """How many steps there is time for, by a short run of both."""
    if options.seconds is None:
        return options.steps
    start = time.perf_counter()
    per_step = sum(options.batch * options.length / train(name, text, options, 40)[1] for name in ATTENTION)
    left = options.seconds - (time.perf_counter() - start)
    return max(2, min(options.steps, int(left / per_step)))


def smooth(values, span=20):
    """The mean of each value and those before it."""
    spans = [values[max(0, i - span + 1) : i + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in spans]


def draw(path, rows):
    rate = lambda name: float(rows[0][f"{name}_tokens_per_second"])
    loss = lambda name: smooth([float(row[f"{name}_loss"]) for row in rows])
    steps = [int(row["step"]) for row in rows]
    curves = [(f"{name}: {rate(name):,.0f} tokens/s", steps, loss(name)) for name in ATTENTION]
    title = "A small GPT, from the same seed"
    tables.draw(path, curves, title=title, xlabel="step", ylabel="loss (mean of 20 steps)")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, help="fewer steps where both trainings would take longer than this"
    )
    small_gpt.add_options(parser)
    tables.add_options(parser)
    options = parser.parse_args()
    if tables.drawn(options, draw):
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpt: PyTorch finds no GPU; --device cpu with small sizes runs without", file=sys.stderr)
        return 77
    text = small_gpt.corpus()
    print(f"{len(text):,} bytes of text")
    losses, rates, steps = {}, {}, steps_within(text, options)
    for name in ATTENTION:
        losses[name], rates[name], _ = train(name, text, options, steps)
    apart = max(abs(a - b) for a, b in zip(*map(smooth, losses.values())))
    ratio = rates["flashjit"] / rates["pytorch"]
    print(f"the smoothed curves are at most {apart:.4f} apart; speed {ratio:.2f} of PyTorch's")
    rows = [
        {"step": step}
        | {f"{name}_loss": losses[name][step] for name in ATTENTION}
        | {f"{name}_tokens_per_second": round(rates[name]) for name in ATTENTION}
        for step in range(steps)
    ]
    tables.finish(options, rows, draw)
    return 0 if apart < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
